"""The machine: which device and precision, random states across devices, and what a step costs a GPU.

No GPU is needed: decisions are functions of facts that the tests make up, and costs are counted on the CPU by the
operations that torch dispatches.
"""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import run_script
from test_multitask import FP32, run_multitask, same
from test_training import Bench, Start, interrupted_at, weights_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import classifier
import evaluation
import multitask_classifier
import pretrain
import training
import utils
from bert import BertModel
from checkpoints import load_state, save_state
from datasets import Split
from readers import Examples
from runs import Run
from tasks import SST, Batch
from trainer import EpochRecord, Trainer
from training import ahead, train_on
from utils import InputError, Precision, random_states, restore_random_states

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TUNED = ["--option", "finetune", "--lr", "1e-3"]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def bench(tiny_checkpoint: Path) -> Start:
    return partial(Bench, tiny_checkpoint)


# --- why there is no GPU ----------------------------------------------------------------------------------------------

REASONS = {
    "no GPU": (("2.13.0", "13.0", None), "--use_gpu needs a CUDA device, found none: `nvidia-smi` finds no driver. "),
    "no GPU and a CPU build": (
        ("2.13.0+cpu", None, None),
        "found none: `nvidia-smi` finds no driver, and torch 2.13.0+cpu is a build for the CPU only. Leave the flag",
    ),
    "a CPU build": (
        ("2.13.0+cpu", None, "580.65.06"),
        "needs a torch built for CUDA, found torch 2.13.0+cpu, a build for the CPU only (driver 580.65.06). Run "
        "`source setup.sh` in a new environment, or leave",
    ),
    "an old driver": (
        ("2.13.0", "13.0", "550.54.15"),
        "torch 2.13.0 is built for CUDA 13.0, which needs NVIDIA driver 580 or later, found 550.54.15. Run `source "
        "setup.sh`, which installs a torch for this driver, or update the driver.",
    ),
    "a very old driver": (
        ("2.10.0", "12.8", "470.57.02"),
        "driver 525 or later, found 470.57.02. Update the driver.",
    ),
    "a driver that fits": (
        ("2.13.0", "13.0", "580.65.06"),
        "found none that torch 2.13.0 (CUDA 13.0) can use with driver 580.65.06. Check CUDA_VISIBLE_DEVICES",
    ),
    "a driver that fits CUDA 12": (("2.10.0", "12.8", "525.60.13"), "found none that torch 2.10.0 (CUDA 12.8) can use"),
}


@pytest.mark.parametrize("case", REASONS)
def test_the_reason_why_there_is_no_gpu_has_the_versions_and_the_remedy(case: str):
    facts, wanted = REASONS[case]
    reason = utils.why_no_gpu(*facts)
    assert wanted in reason
    assert reason.startswith("--use_gpu")
    assert "\n" not in reason


def test_use_gpu_with_an_old_driver_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(utils, "driver_version", lambda: "550.54.15")
    with pytest.raises(InputError, match=r"CUDA 13\.0, which needs NVIDIA driver 580 or later, found 550\.54\.15"):
        utils.choose_device(use_gpu=True)


@pytest.mark.parametrize(
    ("script", "version"),
    [
        ("echo 550.54.15; echo 550.54.15", "550.54.15"),  # two GPUs
        ("echo 'NVIDIA-SMI has failed because it could not communicate with the driver'; exit 9", None),
        ("echo 'No devices were found'", None),
        ("true", None),
    ],
)
def test_the_driver_is_the_one_that_nvidia_smi_names(
    script: str, version: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fake = tmp_path / "nvidia-smi"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert utils.driver_version() == version


def with_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], name: str) -> list[str]:
    """Pretend that there is this GPU; return the list of the matmul precisions that are set from now on."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    settings: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", settings.append)
    return settings


def test_bf16_on_a_gpu_without_it_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch):
    with_gpu(monkeypatch, (7, 5), "Tesla T4")
    with pytest.raises(InputError) as refused:
        utils.choose_device(True, "bf16")
    assert str(refused.value) == (
        "--precision bf16 needs a GPU of compute capability 8.0 or later, found 7.5 (Tesla T4). Use --precision fp16."
    )
    assert utils.choose_device(True, "fp16") == CUDA
    with_gpu(monkeypatch, (8, 9), "NVIDIA L4")
    assert utils.choose_device(True, "bf16") == CUDA


@pytest.mark.parametrize("script", [classifier, multitask_classifier, pretrain])
def test_every_training_script_refuses_bf16_on_a_t4_before_it_writes_anything(
    script: Any, tiny_checkpoint: Path, task_files: Path, tmp_path: Path, run_main: Any, monkeypatch: pytest.MonkeyPatch
):
    with_gpu(monkeypatch, (7, 5), "Tesla T4")
    flags = ["--model", tiny_checkpoint, "--data", task_files, "--runs", tmp_path / "runs", "--use_gpu"]
    done = run_main(script, *flags, "--precision", "bf16", "--epochs", 1)
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert "Use --precision fp16." in done.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("capability", "precision", "deterministic", "wanted"),
    [
        ((8, 0), "fp32", False, "high"),
        ((9, 0), "fp32", False, "high"),
        ((8, 0), "fp32", True, "highest"),
        ((7, 5), "fp32", False, "highest"),
        ((8, 0), "fp16", False, "highest"),
        ((8, 0), "bf16", False, "highest"),
    ],
)
def test_tf32_is_used_in_fp32_where_the_gpu_has_it(
    capability: tuple[int, int], precision: str, deterministic: bool, wanted: str, monkeypatch: pytest.MonkeyPatch
):
    settings = with_gpu(monkeypatch, capability, "a GPU")
    monkeypatch.setattr(utils, "set_deterministic", lambda on: None)
    utils.choose_device(True, precision, deterministic)
    assert settings == [wanted]


# --- determinism ------------------------------------------------------------------------------------------------------


@pytest.fixture
def determinism_restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    fill = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fill


@pytest.mark.usefixtures("determinism_restored")
def test_deterministic_training_is_on_during_the_updates_and_changes_nothing_on_a_cpu(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    flags = [*TUNED, "--epochs", 1, "--combiner", "pcgrad", "--regularizer", "smart+rdrop", "--pooling", "attention"]
    plain = run_multitask(tmp_path / "plain", tiny_checkpoint, *flags)
    update, seen = Trainer.update, []
    monkeypatch.setattr(
        Trainer, "update", lambda *a: (seen.append(torch.are_deterministic_algorithms_enabled()), update(*a))[1]
    )
    strict = run_multitask(tmp_path / "strict", tiny_checkpoint, *flags, "--deterministic")
    assert seen == [True] * 3
    assert utils.os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert same(plain.weights(), strict.weights())
    run_multitask(tmp_path / "later", tiny_checkpoint, *flags)
    assert seen[3:] == [False] * 3, "a later run in the same process is as usual"


@pytest.mark.parametrize("script", ["classifier.py", "pretrain.py"])
def test_the_other_training_scripts_run_deterministically(
    script: str, tiny_checkpoint: Path, task_files: Path, tmp_path: Path
):
    more = ["--option", "finetune", "--predictions", tmp_path / "p"] if script == "classifier.py" else []
    flags = ["--model", tiny_checkpoint, "--data", task_files, "--runs", tmp_path, "--epochs", 1, "--tasks", "sst"]
    done = run_script(script, *flags, *more, "--deterministic")
    assert done.returncode == 0, done.stderr


# --- random states and resuming across devices ------------------------------------------------------------------------


class FakeGenerator:
    """Stands for the GPU's generator: what it was seeded with, or the state that was restored."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.state = torch.tensor([1, 2], dtype=torch.uint8)
        monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: self.state.clone())
        monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: setattr(self, "state", state))
        monkeypatch.setattr(torch.cuda, "manual_seed", lambda seed: setattr(self, "state", seed))


def test_a_state_of_the_cpu_seeds_a_gpu_in_one_way(monkeypatch: pytest.MonkeyPatch):
    gpu = FakeGenerator(monkeypatch)
    seeds = []
    for seed in (1, 1, 2):
        states = random_states(CPU) if torch.manual_seed(seed) else {}
        wanted = torch.rand(3)
        restore_random_states(states, CUDA)
        assert torch.equal(torch.rand(3), wanted), "and the CPU goes on where it was"
        seeds.append(gpu.state)
    assert seeds[0] == seeds[1] != seeds[2]
    assert all(isinstance(seed, int) and 0 <= seed < 2**63 for seed in seeds)


def test_a_state_of_a_gpu_is_restored_there_and_left_out_on_a_cpu(monkeypatch: pytest.MonkeyPatch):
    gpu = FakeGenerator(monkeypatch)
    states = random_states(CUDA)
    wanted = torch.rand(3)
    gpu.state = torch.tensor([9, 9], dtype=torch.uint8)
    restore_random_states(states, CPU)
    assert torch.equal(torch.rand(3), wanted)
    assert gpu.state.tolist() == [9, 9]
    restore_random_states(states, CUDA)
    assert torch.equal(torch.rand(3), wanted)
    assert gpu.state.tolist() == [1, 2]


@pytest.mark.parametrize(("start", "end"), [(CPU, CUDA), (CUDA, CPU), (CUDA, CUDA)])
def test_a_run_can_be_resumed_on_another_device(
    start: torch.device, end: torch.device, bench: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    FakeGenerator(monkeypatch)
    run = Run(tmp_path)
    one, other = (bench("--averager", "ema", "--regularizer", "bregman") for _ in range(2))
    after = one.after([one.draw(0, 1, 2)])
    one.trainer.precision.device, other.trainer.precision.device = start, end  # the tensors stay on the CPU
    save_state(one.trainer.state_dict(), run)
    other.trainer.load_state_dict(load_state(run))
    assert same(weights_of(other.model), after)


@pytest.mark.parametrize(("start", "end"), [("fp32", "fp16"), ("fp16", "fp32"), ("fp32", "bf16")])
def test_a_run_can_be_resumed_in_another_precision(
    start: str, end: str, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    flags = [*TUNED, "--epochs", 2, "--tasks", "sst"]
    with monkeypatch.context() as patch:
        interrupted_at(patch, 4)  # the first step of epoch 2
        with pytest.raises(KeyboardInterrupt):
            run_multitask(tmp_path, tiny_checkpoint, *flags, "--precision", start)
    done = run_multitask(tmp_path, tiny_checkpoint, *flags, "--precision", end, "--resume")
    assert [line["epoch"] for line in done.log()] == [1, 2]


# --- out of memory ----------------------------------------------------------------------------------------------------

FULL = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 15.77 GiB.\nSee there."


@pytest.mark.parametrize("where", ["load_state_dict", "update"])
def test_out_of_memory_is_one_line_with_the_flags_that_help(
    where: str, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    flags = [*TUNED, "--epochs", 1]
    run_multitask(tmp_path, tiny_checkpoint, *flags, "--keep_state")

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError(FULL)

    monkeypatch.setattr(Trainer, where, full)
    more = ["--resume"] if where == "load_state_dict" else ["--name", "other"]
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        utils.run_script(lambda: run_multitask(tmp_path, tiny_checkpoint, *flags, *more))
    assert stopped.value.code == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: the GPU is out of memory (CUDA out of memory). In the order of their cost: use ")
    for flag in ("--batch_size", "--accumulate", "--eval_batch_size", "--precision fp16", "--checkpoint_activations"):
        assert flag in error
    assert "cannot be used" not in error


# --- one region of mixed precision per step ---------------------------------------------------------------------------


class Operations(TorchDispatchMode):
    """Counts the casts of some tensors, and the operations that make the CPU wait for a GPU."""

    aten = torch.ops.aten
    WAITING = frozenset({
        aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default,
        aten._unique2.default, aten.repeat_interleave.Tensor,
    })  # fmt: skip
    INDEXING = frozenset({aten.index.Tensor, aten.index_put_.default, aten.index_put.default})

    def __init__(self, tensors: dict[str, Tensor] | None = None):
        super().__init__()
        self.names = {(t.data_ptr(), t.shape): name for name, t in (tensors or {}).items()}
        self.casts: Counter[str] = Counter()
        self.waits: list[str] = []
        self.stacked = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if operation is self.aten._to_copy.default and kwargs.get("dtype") in {torch.bfloat16, torch.float16}:
            name = self.names.get((args[0].data_ptr(), args[0].shape))
            self.casts.update([name] if name else [])
        masks = operation in self.INDEXING and any(i is not None and i.dtype == torch.bool for i in args[1])
        if operation in self.WAITING or masks:
            self.waits.append(str(operation))
        self.stacked += operation is self.aten.stack.default
        return operation(*args, **kwargs)


REGIONS = {
    "plain": [],
    "pcgrad": ["--combiner", "pcgrad"],
    "smart and rdrop": ["--regularizer", "smart+rdrop"],
    "smart from the embeddings": ["--regularizer", "smart", "--smart_start", "embeddings"],
    "a teacher": ["--regularizer", "smart+bregman"],
    "recomputed activations": ["--checkpoint_activations"],
    "chunks": ["--chunk_rows", "2"],
    "a joined pair": ["--pairing", "cross", "--head", "mlp"],
}


@pytest.mark.parametrize("case", REGIONS)
def test_a_step_casts_every_weight_once_for_all_batches(case: str, bench: Start):
    one = bench("--precision", "bf16", *REGIONS[case], dropout=True)
    step = [one.draw(0, 1, 2), one.draw(3, 4)]
    with Operations(dict(one.model.named_parameters())) as counted:
        one.trainer.update(step, EpochRecord(), 1)
    assert {"bert.bert_layers.0.interm_dense.weight", "bert.pooler_dense.bias"} <= counted.casts.keys()
    assert set(counted.casts.values()) == {1}, counted.casts.most_common(3)


def test_backward_passes_run_outside_autocast_in_the_thread_of_the_region(bench: Start):
    """A recomputed layer is a region, too; the end of a thread's outermost region drops the casts of all threads."""
    one, seen = bench("--tasks", "sst", "--checkpoint_activations", "--precision", "bf16"), []
    weight = one.model.bert.pooler_dense.weight
    weight.register_hook(
        lambda gradient: seen.append((torch._C._is_multithreading_enabled(), torch.is_autocast_enabled("cpu")))
    )
    one.after([one.draw(0, 1)])
    assert seen == [(False, False)]
    assert torch._C._is_multithreading_enabled()


@pytest.mark.parametrize("case", REGIONS)
def test_one_region_for_the_step_gives_the_gradients_of_a_region_for_every_batch(case: str, bench: Start):
    """Bregman's teacher makes a pass without gradients, whose casts must not serve the live weights."""

    def gradients(one: Bench) -> tuple[dict[str, Tensor], int]:
        """Those of a step, and how often a weight was cast."""
        parameters, found = dict(one.model.named_parameters()), {}
        one.trainer.optimizer.register_step_pre_hook(
            lambda *_: found.update({name: p.grad.clone() for name, p in parameters.items() if p.grad is not None})
        )
        torch.manual_seed(3)
        with Operations(parameters) as counted:
            one.trainer.update([one.draw(0, 1, 2), one.draw(3, 4)], EpochRecord(), 1)
        return found, max(counted.casts.values())

    one, other = (bench("--precision", "bf16", *REGIONS[case], dropout=True) for _ in range(2))
    backward = other.trainer.combiner.backward  # drops all casts after every batch, as the end of a region does
    other.trainer.combiner.backward = lambda *batch: (backward(*batch), torch.clear_autocast_cache())
    (found, once), (wanted, often) = gradients(one), gradients(other)
    assert (once, often) == (1, 6)
    assert len(found) > 30
    assert same(found, wanted)


def rows_of(one: Bench, count: int) -> Split:
    texts = [f"sentence {i} is {'good ' * (i % 7)}" for i in range(count)]
    examples = Examples(SST, list(map(str, range(count))), (texts,), [i % 5 for i in range(count)])
    return Split.tokenize(examples, one.tokenizer)


def test_an_evaluation_casts_every_weight_once_and_copies_the_logits_once(
    bench: Start, monkeypatch: pytest.MonkeyPatch
):
    one, copies, copy = bench(), [], Tensor.cpu
    monkeypatch.setattr(Tensor, "cpu", lambda tensor: (copies.append(tensor.shape), copy(tensor))[1])
    with Operations(dict(one.model.named_parameters())) as counted:
        half = evaluation.predict(one.model, rows_of(one, 20), 4, Precision("bf16", CPU))
    assert set(counted.casts.values()) == {1}
    assert copies == [(20, 5)]
    full = evaluation.predict(one.model, rows_of(one, 20), 4, FP32)
    assert half.ids == full.ids
    assert abs(half.logits - full.logits).max() < 0.05


# --- waiting for the GPU ----------------------------------------------------------------------------------------------

BUSY = ["--regularizer", "smart+bregman+rdrop", "--averager", "ema", "--schedule", "linear"]


@pytest.mark.parametrize("flags", [[], ["--clip", "1"], BUSY], ids=["plain", "clipped", "busy"])
@pytest.mark.parametrize(("precision", "waits"), [("fp32", 0), ("bf16", 0), ("fp16", 1)])
def test_a_step_waits_for_the_gpu_only_where_the_loss_scaler_has_to(
    precision: str, waits: int, flags: list[str], bench: Start
):
    one = bench("--precision", precision, *flags)
    one.model.bert.packs = False  # on a GPU it never does: see the next test
    step = [one.draw(0, 1, 2)]
    one.trainer.update(step, EpochRecord(one.trainer.targets), 1)  # the optimizer's first step
    with Operations() as counted:
        one.trainer.update(step, EpochRecord(one.trainer.targets), 2)
    assert len(counted.waits) == waits, counted.waits


def test_whether_there_is_padding_is_asked_on_a_cpu_only():
    hidden, mask = torch.randn(2, 4, 8), torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    assert BertModel.saves_time(hidden, mask)
    assert not BertModel.saves_time(hidden.to("meta"), mask.to("meta")), "a value of a meta tensor cannot be read"


def test_losses_are_checked_by_one_transfer_every_20_steps(bench: Start, monkeypatch: pytest.MonkeyPatch):
    one, check, waits = bench(), EpochRecord.check, []

    def counting(record: EpochRecord) -> None:
        with Operations() as counted:
            check(record)
        waits.append((record.checked, len(counted.waits), counted.stacked))

    monkeypatch.setattr(EpochRecord, "check", counting)
    train_on(one.trainer, [[one.draw(0, 1)]] * 41)
    assert waits == [(3, 0, 1), (60, 0, 1), (120, 0, 1), (123, 0, 1)]  # the first step too, so that a loss is shown


# --- batches that are copied ahead ------------------------------------------------------------------------------------


def test_on_a_gpu_the_next_step_is_copied_before_this_one_is_computed(bench: Start):
    one, drawn = bench(), []

    def steps() -> Iterator[list[list[Batch]]]:
        for i in range(3):
            drawn.append(i)
            yield [one.draw(i), one.draw(i + 1)]

    seen = []
    for step in ahead(steps(), torch.device("meta")):
        seen.append(drawn[-1])
        assert [len(draw) for draw in step] == [3, 3]
        assert {batch.labels.device.type for draw in step for batch in draw} == {"meta"}
    assert seen == [1, 2, 2]
    drawn.clear()
    for i, step in enumerate(ahead(steps(), CPU)):
        assert drawn[-1] == i, "on the CPU there is nothing to gain"
        assert [batch.task for batch in step[0]] == ["sst", "para", "sts"]


def test_copies_to_a_gpu_are_pinned_and_do_not_block(bench: Start, monkeypatch: pytest.MonkeyPatch):
    batch, pinned, moved, to = bench().batch("para", 0, 1, 2), [], [], Tensor.to

    def moving(tensor: Tensor, device: torch.device, *, non_blocking: bool) -> Tensor:
        moved.append((tensor.data_ptr(), device, non_blocking))
        return to(tensor, CPU)

    monkeypatch.setattr(Tensor, "pin_memory", lambda t: pinned.append(t.clone()) or pinned[-1])
    monkeypatch.setattr(Tensor, "to", moving)
    batch.to(CUDA)
    assert len(pinned) == 9  # ids, mask, segments and text hashes of two sentences, and the labels
    assert moved == [(tensor.data_ptr(), CUDA, True) for tensor in pinned]
    pinned.clear()
    assert batch.to(CPU).labels is batch.labels
    assert not pinned


def test_drawing_batches_ahead_changes_no_random_number(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    flags = [*TUNED, "--epochs", 2, "--combiner", "pcgrad", "--regularizer", "smart", "--accumulate", 2]
    plain = run_multitask(tmp_path / "plain", tiny_checkpoint, *flags)
    monkeypatch.setattr(training, "ahead", lambda steps, device: ahead(list(steps), device))
    assert same(run_multitask(tmp_path / "ahead", tiny_checkpoint, *flags).weights(), plain.weights())
