"""Several processes end where one ends: the same weights and predictions, for every entry of every registry."""

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import ROOT, write_task_files
from processes import free_port, start, train_cases, wait_until
from safetensors.torch import load_file

from adapters import ADAPTERS
from bert import BertModel
from config import BertConfig
from datasets import PAIRINGS
from distributed import Processes, World
from heads import POOLERS
from losses import LOSSES, WEIGHTINGS
from optimizer import AVERAGERS, OPTIMIZERS, SCHEDULES
from pcgrad import COMBINERS
from pretrain import OBJECTIVES
from sampling import SAMPLERS
from smart import REGULARIZERS, STARTS
from tokenizer import BertTokenizer
from utils import SideStream

TUNED = "--option finetune --lr 1e-3 --hidden_dropout_prob 0"
# 8 rows in batches of 3: the last batch has two rows, so that one of three processes has none of sst's.
CASES = {
    "sum": f"multitask_classifier {TUNED} --combiner sum --sampler round_robin --clip 1",
    "pcgrad and smart": (
        f"multitask_classifier {TUNED} --combiner pcgrad --regularizer smart --pairing cross --sampler balanced "
        "--optimizer adamw --schedule linear --warmup 0.2"
    ),
    "gradvac and smart on embeddings": (
        f"multitask_classifier {TUNED} --combiner gradvac --regularizer smart --smart_start embeddings --smart_sigma "
        "1e-3 --smart_steps 2 --sampler combined --averager ema --ema_decay 0.5 --optimizer nadam --pooling mean"
    ),
    "cagrad and bregman": (
        f"multitask_classifier {TUNED} --combiner cagrad --regularizer bregman --bregman_momentum 0.5 --averager swa "
        "--pooling max --optimizer torch_adamw --pairing bi_symmetric --schedule cosine"
    ),
    "mgda and rdrop": (
        f"multitask_classifier {TUNED} --combiner mgda --regularizer rdrop --sampler proportional --accumulate 3 "
        "--pooling attention --optimizer adamax --adapter lora --schedule constant"
    ),
    "contrastive losses": (
        f"multitask_classifier {TUNED} --sst_loss ce+simcse --para_loss bce+mnrl+cosine_embedding:0.1 --sts_loss "
        "mse+cosent:0.1 --mnrl_symmetric --pooling cls --sampler sequential --optimizer sgd"
    ),
    "mnrl by the head": (
        f"multitask_classifier {TUNED} --para_loss bce+mnrl_head --sst_loss ce_smooth --weighting uncertainty "
        "--sampler uniform --optimizer adafactor --adapter pal --para_head sbert --chunk_rows 2"
    ),
    "a bigru and fixed weights": (
        f"multitask_classifier {TUNED} --weighting fixed --task_weights sts=2 --sampler annealed --sst_pooling bigru "
        "--adapter mixout --mixout_p 1e-12 --pairing cross_symmetric --optimizer radam"
    ),
    "a frozen encoder": "multitask_classifier --lr 1e-2 --head mlp --hidden_dropout_prob 0 --sampler sqrt",
    "pooler and smart+bregman": (
        f"multitask_classifier {TUNED} --regularizer smart+bregman --smart_variant 2 --pooling pooler --symmetric "
        "--checkpoint_activations --share_pair_layer --combiner pcgrad --pairing bi"
    ),
    "both views of a pair": (
        f"multitask_classifier {TUNED} --pairing both_symmetric --sts_pairing both --sts_head both --para_head both "
        "--pooling mean --adapter own_layers --own_layers 1"
    ),
    "part 1": "classifier --option finetune --lr 1e-3 --hidden_dropout_prob 0 --cfimdb_batch_size 3",
    "pre-training": (
        "pretrain --objective mlm+nsp:0.5+simcse:0.1+simcse_supervised:0.1 --lr 1e-3 --mask_share 0.5 --tasks cfimdb "
        "para --max_train 60 --max_held_out 60 --max_length 32 --accumulate 3"
    ),
}


@pytest.fixture(scope="module")
def without_dropout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    shape = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    off = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    BertModel(BertConfig(**shape, **off)).save_pretrained(folder)
    BertTokenizer.from_pretrained("minilm").save_pretrained(folder)
    return folder


def flags_of(case: str, checkpoint: Path, folder: Path, size: int) -> tuple[str, list[str]]:
    script, *flags = CASES[case].split()
    own = folder / str(size) / case.replace(" ", "-")
    data = ROOT / "data" / "sample" if script == "pretrain" else folder / "data"  # which has enough paraphrases
    flags += ["--model", str(checkpoint), "--data", str(data), "--runs", str(own), "--name", "r"]
    flags += ["--epochs", "1", "--batch_size", "3"]
    if script != "pretrain":
        flags += ["--predictions", str(own / "predictions"), "--eval_batch_size", "3"]
    return script, flags


@pytest.fixture(scope="module")
def trained(without_dropout: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """trained(size): a directory with one for every case, trained by this number of processes."""
    folder = tmp_path_factory.mktemp("trained")
    write_task_files(folder / "data")

    @functools.cache
    def train(size: int) -> Path:
        cases = {case: flags_of(case, without_dropout, folder, size) for case in CASES}
        port = free_port()
        processes = [start(train_cases, rank, size, port, cases, folder / f"{size}-{rank}.txt") for rank in range(size)]
        for process in processes:
            process.join(timeout=240)
        printed = [(folder / f"{size}-{rank}.txt").read_text()[-2000:] for rank in range(size)]
        assert [process.exitcode for process in processes] == [0] * size, "\n".join(printed)
        return folder / str(size)

    return train


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_several_processes_end_on_the_weights_and_predictions_of_one(
    case: str, size: int, trained: Callable[[int], Path]
):
    one, several = (trained(n) / case.replace(" ", "-") for n in (1, size))
    paths = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
    assert paths == sorted(path.relative_to(several) for path in several.rglob("*") if path.is_file())
    for path in (path for path in paths if path.name == "model.safetensors"):
        weights, others = load_file(one / path), load_file(several / path)
        assert {tensor.dtype for tensor in weights.values()} == {torch.float32 if "frozen" in case else torch.float64}
        assert others.keys() == weights.keys()
        for name, tensor in weights.items():
            # The keys' biases have no effect and no gradient but rounding errors, which optimizers scale up.
            limit = 1e-6 if "frozen" in case else 1e-8 if name.endswith("key.bias") else 1e-10
            torch.testing.assert_close(others[name], tensor, rtol=limit, atol=limit)
    for path in (path for path in paths if path.suffix == ".csv"):
        found, wanted = ((folder / path).read_text() for folder in (several, one))
        numbers = [re.findall(r" , (\S+) $", text, flags=re.M) for text in (found, wanted)]
        assert re.sub(r" , \S+ $", "", found, flags=re.M) == re.sub(r" , \S+ $", "", wanted, flags=re.M)
        assert [float(x) for x in numbers[0]] == pytest.approx([float(x) for x in numbers[1]], abs=1e-6)
    for path in (path for path in paths if path.name == "log.jsonl"):
        logs = [[json.loads(line) for line in (folder / path).read_text().splitlines()] for folder in (one, several)]
        for wanted, found in zip(*logs, strict=True):
            limit = 1e-3 if "frozen" in case else 1e-9  # in float32, the correlation of 8 rows
            assert found["scores"] == pytest.approx(wanted["scores"], abs=limit)
            assert found.get("losses") == pytest.approx(wanted.get("losses"), abs=limit)


def test_training_changed_the_weights(trained: Callable[[int], Path], without_dropout: Path):
    """Otherwise the test above would compare nothing."""
    before = load_file(without_dropout / "model.safetensors")["encoder.layer.0.output.dense.weight"].double()
    for path in trained(1).rglob("model.safetensors"):
        after = load_file(path)["bert.encoder.layer.0.output.dense.weight"]
        assert torch.equal(after.double(), before) == ("frozen" in str(path))


def test_every_process_has_dropout_masks_of_its_own():
    """And none has those of the side stream, from which R-Drop and SimCSE draw their second pass."""
    first = []
    for rank in range(4):
        world = World()
        world.rank = rank
        torch.manual_seed(7)
        Processes.seed_apart(world, 7)
        first.append(torch.rand(4).tolist())
    with SideStream(7).drawn(torch.device("cpu")):
        first.append(torch.rand(4).tolist())
    assert len({tuple(numbers) for numbers in first}) == 5


REGISTRIES = {
    "combiner": COMBINERS, "regularizer": REGULARIZERS, "sampler": SAMPLERS, "optimizer": OPTIMIZERS,
    "averager": AVERAGERS, "schedule": SCHEDULES, "weighting": WEIGHTINGS, "adapter": ADAPTERS, "pooling": POOLERS,
    "pairing": PAIRINGS, "start": STARTS, "loss": LOSSES, "objective": OBJECTIVES,
}  # fmt: skip
DEFAULTS = {"none", "adamw", "constant", "equal", "sum", "logits", "ce", "bce", "mse"}
NOT_SPLIT = {"distill"}  # needs a teacher's file; it is a mean over rows like bce


@pytest.mark.parametrize("registry", REGISTRIES)
def test_the_cases_have_every_entry_of_every_registry(registry: str):
    words = set(re.split(r"[\s+:=]", " ".join(f"{flags} " for flags in CASES.values())))
    words |= {re.sub(r":[\d.]+", "", word) for word in words}
    assert set(REGISTRIES[registry]) - DEFAULTS - NOT_SPLIT <= words


# --- a process that dies or is stuck ----------------------------------------------------------------------------------


def torchrun(size: int, flags: list[object], **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={size}", "--master_port"]
    command += [str(free_port()), str(ROOT / "multitask_classifier.py"), *map(str, flags)]
    settings = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | environment
    return subprocess.Popen(
        command, cwd=ROOT, env=settings, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip


def workers_of(launcher: subprocess.Popen[str]) -> list[int]:
    """The processes that torchrun started, in the order of their ranks."""
    found = subprocess.run(["pgrep", "-P", str(launcher.pid)], capture_output=True, text=True).stdout.split()

    def rank(pid: int) -> int:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return int(dict(word.split(b"=", 1) for word in words if b"=" in word)[b"RANK"])

    return sorted(map(int, found), key=rank)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "is stuck"])
def test_a_process_that_dies_or_is_stuck_ends_the_run_within_a_minute_and_it_resumes_with_another_number(
    how: signal.Signals, tiny_checkpoint: Path, tmp_path: Path
):
    write_task_files(tmp_path / "data")
    flags = ["--model", tiny_checkpoint, "--data", tmp_path / "data", "--runs", tmp_path / "runs", "--name", "r"]
    flags += ["--predictions", tmp_path / "predictions", "--option", "finetune", "--epochs", 300, "--batch_size", 3]
    flags += ["--save_minutes", 0]
    with torchrun(2, flags) as run:
        try:
            wait_until((tmp_path / "runs" / "r" / "log.jsonl").exists)
            os.kill(workers_of(run)[1], how)
            started = time.monotonic()
            output, _ = run.communicate(timeout=90)
            spent = time.monotonic() - started
        finally:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.killpg(run.pid, signal.SIGKILL)
    assert run.returncode != 0
    print(f"{how.name}: ended after {spent:.0f} s")
    assert spent < 60  # torchrun itself waits up to 30 s for processes that do not end
    assert "start the same command with the run's --name and --resume" in output
    done = len((tmp_path / "runs" / "r" / "log.jsonl").read_text().splitlines())
    flags[flags.index("--epochs") + 1] = done + 3
    with torchrun(3, [*flags, "--resume"]) as again:
        output, _ = again.communicate(timeout=240)
    assert again.returncode == 0, output
    assert "resuming at epoch " in output
    epochs = [json.loads(line)["epoch"] for line in (tmp_path / "runs" / "r" / "log.jsonl").read_text().splitlines()]
    assert epochs == list(range(1, done + 4))
    assert len(list((tmp_path / "predictions").glob("*.csv"))) == 6


@pytest.mark.slow
def test_a_signal_stops_all_processes_at_the_same_step_and_the_run_ends_like_an_uninterrupted_one(
    without_dropout: Path, tmp_path: Path
):
    write_task_files(tmp_path / "data")
    ends = {}
    for name in ("whole", "stopped"):
        flags = ["--model", without_dropout, "--data", tmp_path / "data", "--runs", tmp_path, "--name", name]
        flags += ["--predictions", tmp_path / f"{name} predictions", "--option", "finetune", "--epochs", 30]
        flags += ["--batch_size", 3, "--hidden_dropout_prob", 0, "--combiner", "pcgrad"]
        with torchrun(2, flags) as run:
            if name == "stopped":
                wait_until((tmp_path / name / "log.jsonl").exists)
                run.send_signal(signal.SIGTERM)
            output, _ = run.communicate(timeout=240)
        if name == "stopped":
            assert "stopped by SIGTERM at epoch " in output
            assert f"torchrun --nproc_per_node=2 {ROOT / 'multitask_classifier.py'} --model" in output
            with torchrun(2, [*flags, "--resume"]) as run:
                output, _ = run.communicate(timeout=240)
            assert "resuming at epoch " in output
        assert run.returncode == 0, output
        ends[name] = load_file(tmp_path / name / "model.safetensors")
    torch.testing.assert_close(ends["stopped"], ends["whole"], rtol=0, atol=0)
