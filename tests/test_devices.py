"""The training step on a device that is not the CPU, as far as a machine without a GPU can show.

`meta` tensors have a device and a shape but no data. A dispatch mode sees every operation of a step: it refuses
operations that mix devices, answers what the host reads from the device, and counts.
"""

import contextlib
import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from test_training import ENTRIES, NEEDED, Bench
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import multitask_build
from bert import ATTENTIONS, BertModel
from config import BertConfig
from datasets import PAIRINGS, Split
from evaluation import predict
from model import Branch, MultitaskBERT
from readers import Examples
from tasks import SST, TASKS, Batch, Encoded
from tokenizer import BertTokenizer
from trainer import EpochRecord
from utils import Precision

pytestmark = pytest.mark.usefixtures("one_thread")

META = torch.device("meta")
aten = torch.ops.aten
COPIES = {aten._to_copy.default, aten.copy_.default}  # between devices
ON_CPU_BY_DESIGN = {aten._pack_padded_sequence.default}  # torch packs by lengths on the CPU


class Device(TorchDispatchMode):
    """Plays the device: refuses mixed operations, answers reads with ones, and counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)]
        here = [t for t in tensors if t.device.type == "meta"]
        if not here:
            return func(*args, **kwargs or {})
        self.ops["launches"] += not func.is_view
        if func is aten._local_scalar_dense.default:
            self.ops["reads"] += 1
            return torch.ones((), dtype=here[0].dtype).item()
        if func in COPIES:
            return self.copied(func, args, kwargs or {})
        elsewhere = [t for t in tensors if t.device.type != "meta" and t.ndim]  # numbers may be on the CPU
        assert not elsewhere or func in ON_CPU_BY_DESIGN, f"{func} mixes meta and cpu tensors"
        self.ops["float64"] += any(t.dtype == torch.float64 and t.numel() > 1 for t in tensors)
        return func(*args, **kwargs or {})

    def copied(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """A copy from the device, which has no data to copy, is full of ones."""
        source = args[1] if func is aten.copy_.default else args[0]
        target = args[0].device if func is aten.copy_.default else torch.device(kwargs.get("device", source.device))
        if source.device.type == "meta" and target.type != "meta":
            self.ops["reads"] += 1
            if func is aten.copy_.default:
                return args[0].fill_(1)
            return torch.ones(source.shape, dtype=kwargs.get("dtype") or source.dtype)
        return func(*args, **kwargs)


@pytest.fixture(autouse=True)
def autocast_on_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    """meta has no autocast: a region for it does nothing, as in fp32."""
    real = torch.autocast
    nothing = contextlib.nullcontext()
    monkeypatch.setattr(torch, "autocast", lambda kind, *a, **k: nothing if kind == "meta" else real(kind, *a, **k))


def started(checkpoint: Path, *flags: object) -> Bench:
    """A model and its trainer, as a script builds them, on meta."""
    bench = Bench(checkpoint, *flags, dropout=True)
    bench.model.to(META)
    bench.trainer = multitask_build.build_trainer(bench.args, bench.model, Precision("fp32", META), 100)
    return bench


def with_teacher(batch: Batch) -> Batch:
    return dataclasses.replace(batch, teacher=torch.zeros(len(batch.ids), TASKS[batch.task].predicts.num_logits))


MORE = [
    *(("--attention", name) for name in ATTENTIONS),
    *(("--pairing", name) for name in PAIRINGS),
    ("--clip", "1"),
    ("--accumulate", "2"),
    ("--checkpoint_activations",),
    ("--chunk_rows", "2"),
    ("--share_pair_layer",),
    ("--adapter", "lora", "--adapter_only"),
    ("--regularizer", "smart", "--smart_start", "embeddings", "--smart_steps", "2"),
    ("--regularizer", "smart", "--smart_norm", "l2", "--smart_variant", "2"),
    ("--combiner", "pcgrad", "--regularizer", "smart+bregman+rdrop", "--averager", "ema", "--clip", "1"),
]
CASES = [("--option", "finetune"), *MORE, *((*entry, *NEEDED.get(" ".join(entry), ())) for entry in ENTRIES)]
CASES = [case for case in CASES if case[0] != "--sampler"]  # which tasks a step has does not matter here


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_a_step_of_every_entry_stays_on_its_device(case: tuple[str, ...], tiny_checkpoint: Path, tmp_path: Path):
    distills = ["--teacher", tmp_path] if "distill" in " ".join(case) else []
    if distills:
        for task in ("sst", "para", "sts"):
            (tmp_path / f"{task}-train.npz").touch()
    bench = started(tiny_checkpoint, *case, *distills)
    draws = [[with_teacher(batch) for batch in bench.draw(0, 1, 2, 3)] for _ in range(2)]
    with Device() as mode:
        for number in (1, 2):  # the second step has the optimizer's state
            bench.trainer.update(
                draws if "--accumulate" in case else draws[:1], EpochRecord(bench.trainer.targets), number
            )
    assert mode.ops["launches"] > 300
    assert {p.device for p in bench.model.parameters()} == {META}


def test_predicting_stays_on_its_device(tiny_checkpoint: Path):
    bench = started(tiny_checkpoint)
    texts = ([f"a film {'good ' * i}" for i in range(7)],)
    split = Split.tokenize(Examples(SST, list("abcdefg"), texts, [0, 1, 2, 3, 4, 0, 1]), bench.tokenizer)
    with Device() as mode:
        found = predict(bench.model, split, 2, Precision("fp32", META))
    assert len(found.values) == 7
    assert mode.ops["reads"] > 0, "the mode sees what the host reads"


def test_an_operation_that_mixes_devices_is_noticed():
    with Device(), pytest.raises(AssertionError, match="mixes"):
        torch.zeros(2, device=META) + torch.zeros(2)


# --- memory -----------------------------------------------------------------------------------------------------------


def saved_bytes_per_token(model: MultitaskBERT, B: int, T: int) -> float:
    """What the backward pass needs of the forward pass, without the parameters, by token."""
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            kept[storage._cdata] = tensor  # also keeps the storage alive, so that its address is not used again
        return tensor

    ids = torch.ones(B, T, dtype=torch.long, device=META)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model.predict(Batch("sst", ["a"] * B, (Encoded(ids, ids, torch.zeros_like(ids)),), None))
        assert output.logits.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) / (B * T)


@pytest.mark.parametrize(("checkpointed", "kilobytes"), [(False, 730), (True, 50)])
def test_the_backward_pass_of_bert_base_keeps_a_stated_number_of_bytes_per_token(checkpointed: bool, kilobytes: int):
    """In fp32 with dropout and torch's unfused attention, which meta has; a GPU's fused kernels keep 100 less."""
    with META:
        model = MultitaskBERT(BertModel(BertConfig()), [Branch(SST)])
    model.train().bert.checkpoint_activations = checkpointed
    found = [saved_bytes_per_token(model, B, 32) / 1024 for B in (4, 8)]
    assert found[0] == pytest.approx(found[1], rel=0.05), "it grows with the number of tokens"
    assert 0.85 * kilobytes < found[1] < kilobytes


# --- budgets of a step ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def three_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers, because a dispatch mode is slow. bert-base needs about 3,500 operations for the first row."""
    folder = tmp_path_factory.mktemp("three")
    shape = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64)
    BertModel(BertConfig(**shape)).save_pretrained(folder)
    BertTokenizer.from_pretrained("minilm").save_pretrained(folder)
    return folder


# One step with three tasks: operations other than views, reads by the host, and operations on arrays of float64. The
# figures are those counted, plus three percent.
BUDGETS = {
    "": (1070, 0, 0),
    "--clip 1": (1200, 0, 0),
    "--weight_decay 0.01": (1070, 0, 0),
    "--combiner pcgrad": (980, 1, 8),
    "--regularizer smart": (2700, 0, 235),
    "--regularizer smart --smart_start embeddings": (3060, 0, 175),
    "--regularizer bregman": (1480, 0, 70),
    "--regularizer rdrop": (2255, 0, 90),
    "--averager ema": (1070, 0, 0),
    "--optimizer nadam": (1570, 0, 0),
}


@pytest.mark.parametrize("flags", BUDGETS)
def test_a_step_needs_no_more_than_its_budget_of_operations(flags: str, three_layers: Path):
    bench = started(three_layers, *flags.split())
    draw = [batch.to(META) for batch in bench.draw(0, 1, 2, 3)]
    with Device() as mode:
        for number in (1, 2):  # the first makes the optimizer's state
            mode.ops.clear()
            bench.trainer.update([draw], EpochRecord(bench.trainer.targets), number)
    found = mode.ops["launches"], mode.ops["reads"], mode.ops["float64"]
    assert all(n <= most for n, most in zip(found, BUDGETS[flags], strict=True)), found
