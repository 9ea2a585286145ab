"""Batches that do not fit into a GPU's memory: computed in parts, with the same gradients."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import write_task_files
from safetensors.torch import load_file
from test_multitask import run_multitask
from test_training import Bench, Start
from torch import Tensor

import multitask_build
import pretrain
import utils
from bert import BertModel
from checkpoints import load_state
from distributed import World
from runs import Run

FULL = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 15.77 GiB.\nSee there."
TUNED = ["--option", "finetune", "--lr", "1e-3"]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def bench(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """In float64 and without dropout, whose masks differ between a batch and its parts."""
    build = multitask_build.build_model
    monkeypatch.setattr(multitask_build, "build_model", lambda args: build(args).double())
    return partial(Bench, tiny_checkpoint)


def limited(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Let the encoder run out of memory above this many sentences at a time, as a GPU would."""
    encode = BertModel.encode

    def encoding(bert: BertModel, embeddings: Tensor, *others: object) -> Tensor:
        if len(embeddings) > rows and torch.is_grad_enabled():
            raise torch.OutOfMemoryError(FULL)
        return encode(bert, embeddings, *others)

    monkeypatch.setattr(BertModel, "encode", encoding)


SPLIT = {
    "plain": [],
    "pcgrad and smart": ["--combiner", "pcgrad", "--regularizer", "smart"],
    "smart on embeddings": ["--regularizer", "smart", "--smart_start", "embeddings", "--smart_sigma", 1e-3],
    "bregman, rdrop, uncertainty": ["--regularizer", "bregman+rdrop", "--weighting", "uncertainty"],
    "contrastive": ["--para_loss", "bce+mnrl", "--sst_loss", "ce+simcse", "--sts_loss", "mse+cosent:0.1"],
    "by the head": ["--para_loss", "bce+mnrl_head", "--combiner", "gradvac", "--pairing", "bi"],
    "cross": ["--pairing", "cross", "--accumulate", 2, "--combiner", "cagrad"],
}


@pytest.mark.parametrize("case", SPLIT)
@pytest.mark.parametrize("rows", [2, 4])  # sentences: a row of a task on pairs has two
def test_a_batch_that_does_not_fit_is_computed_in_parts_with_the_same_gradients(
    case: str, rows: int, bench: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    whole, parts = (bench(*SPLIT[case]).with_sgd() for _ in range(2))
    draws = [[(0, 1, 2, 3, 4), (5, 6)], [(7, 3, 1)]]  # two updates, the first with two draws
    wanted = whole.after(*([whole.draw(*these) for these in step] for step in draws))
    limited(monkeypatch, rows)
    found = parts.after(*([parts.draw(*these) for these in step] for step in draws))
    limit = 1e-8 if "--regularizer" in SPLIT[case] else 1e-10  # regularizers return float32
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=limit, atol=limit)
    notes = [line for line in capsys.readouterr().err.splitlines() if "out of memory" in line]
    assert notes[0].startswith("note: step ")
    assert "computed in 2 parts from now on. The gradients are the same, apart from dropout masks." in notes[0]
    assert parts.trainer.parts == parts.trainer.state_dict()["parts"] != {}


def test_the_number_of_parts_is_remembered_and_logged(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    limited(monkeypatch, 3)
    done = run_multitask(tmp_path, tiny_checkpoint, *TUNED, "--epochs", 2, "--keep_state")
    assert [line["parts"] for line in done.log()] == [{"para": 4, "sts": 4}] * 2
    assert load_state(Run(done.run))["trainer"]["parts"] == {"para": 4, "sts": 4}
    notes = [line for line in capsys.readouterr().err.splitlines() if "out of memory" in line]
    assert len(notes) == 4, "two per task, in the first step"


def test_a_single_row_that_does_not_fit_ends_in_one_line(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    limited(monkeypatch, 0)
    with pytest.raises(SystemExit) as stopped:
        utils.run_script(lambda: run_multitask(tmp_path, tiny_checkpoint, *TUNED, "--epochs", 1))
    assert stopped.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if not line.startswith("note: ")] == lines[-1:]
    assert lines[-1].startswith(
        "error: the GPU is out of memory (CUDA out of memory). In the order of their cost: use "
    )


@pytest.mark.parametrize("objective", ["mlm", "simcse"])
def test_pretraining_is_split_by_its_targets_or_in_chunks(
    objective: str, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_task_files(tmp_path / "data", rows=16)
    config = json.loads((tiny_checkpoint / "config.json").read_text())
    folder = tmp_path / "tiny"
    shutil.copytree(tiny_checkpoint, folder)
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (folder / "config.json").write_text(json.dumps(config | off))
    build = pretrain.build_model
    monkeypatch.setattr(pretrain, "build_model", lambda *values: build(*values).double())
    ends = []
    for name in ("whole", "parts"):
        if name == "parts":
            limited(monkeypatch, 3)
        flags = ["--model", folder, "--data", tmp_path / "data", "--runs", tmp_path / "runs", "--name", name]
        flags += ["--objective", objective, "--tasks", "sst", "cfimdb", "--epochs", 1, "--batch_size", 8, "--lr", 1e-3]
        flags += ["--mask_share", 0.5] * (objective == "mlm")
        pretrain.pretrain(pretrain.get_args(list(map(str, flags))), World())
        ends.append(load_file(tmp_path / "runs" / name / "model.safetensors"))
    for name, tensor in ends[0].items():
        limit = 1e-8 if name.endswith("key.bias") else 1e-10
        torch.testing.assert_close(ends[1][name], tensor, rtol=limit, atol=limit)
