"""Memory: what a process measures, and the formula for a step against the tensors that are really alive in it."""

import mmap
import os
import resource
import subprocess
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import run_script
from test_training import Bench
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import bert
import memory
from bert import BertModel
from config import BertConfig
from memory import METHODS, Step, largest_rows, parameters, peak, peak_memory, reset_peak, room
from model import Branch, MultitaskBERT
from pretrain import PretrainingBERT, weighted_loss
from tasks import SST, Batch, Encoded
from tokenizer import BertTokenizer
from training import EpochRecord, Trainer
from utils import Precision

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
TOLERANCE = 0.08  # of the formula; 0.15 was aimed at

# --- what a process measures ------------------------------------------------------------------------------------------


@pytest.mark.skipif(not memory.CLEAR_REFS.exists(), reason="needs Linux's /proc")
def test_the_peak_of_a_process_counts_from_the_last_reset():
    size = 200 * 2**20
    reset_peak(CPU)
    before = peak_memory(CPU)
    with mmap.mmap(-1, size) as pages:  # new pages; a tensor may take memory that an earlier test left to the allocator
        pages[:: mmap.PAGESIZE] = bytes(size // mmap.PAGESIZE)
        after = peak_memory(CPU)
    assert after - before > 0.9 * size
    reset_peak(CPU)
    assert peak_memory(CPU) < after - 0.9 * size, "freed memory is forgotten"


def test_without_a_reset_the_peak_is_that_of_the_whole_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(memory, "STATUS", tmp_path / "absent")
    monkeypatch.setattr(memory, "CLEAR_REFS", tmp_path / "absent" / "too")
    reset_peak(CPU)
    assert peak_memory(CPU) == 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (tmp_path / "absent").write_text("VmRSS:\t 12 kB\nVmHWM:\t 34 kB\n")
    assert peak_memory(CPU) == 34 * 1024


def test_on_a_gpu_the_peak_is_that_of_torchs_tensors(monkeypatch: pytest.MonkeyPatch):
    calls: list[object] = []
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 123)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", calls.append)
    reset_peak(torch.device("cuda"))
    assert (peak_memory(torch.device("cuda")), calls) == (123, [torch.device("cuda")])
    assert peak_memory(torch.device("meta")) is None


# --- oneDNN's caches --------------------------------------------------------------------------------------------------

MANY_LENGTHS = """
import sys
from pathlib import Path
import torch
import utils

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

torch.set_num_threads(1)
layers = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 1024), torch.nn.Linear(1024, 256))
for length in range(3, 153):
    with torch.autocast("cpu", torch.bfloat16):
        layers(torch.ones(2, length, 256, requires_grad=True)).sum().backward()
    if length == 32:
        before = resident()
print(resident() - before)
"""


def growth(**environment: str) -> int:
    """The megabytes by which a process grows from the 30th length of sentences to the 150th."""
    root = Path(memory.__file__).parent
    names = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"  # this process has set them
    inherited = {key: value for key, value in os.environ.items() if key not in names}
    command = [sys.executable, "-c", MANY_LENGTHS]
    done = subprocess.run(command, cwd=root, env=inherited | environment, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(not memory.STATUS.exists(), reason="needs Linux's /proc")
def test_memory_stays_flat_however_many_lengths_there_are():
    unbounded = growth(ONEDNN_PRIMITIVE_CACHE_CAPACITY="1024", LRU_CACHE_CAPACITY="1024")  # the defaults
    if unbounded < 100:
        pytest.skip(f"oneDNN keeps little on this CPU: {unbounded} MB")
    assert growth() < 50


# --- the tensors that are alive ---------------------------------------------------------------------------------------


class Live(TorchDispatchMode):
    """Adds up the bytes of all storages that an operation has read or made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, weakref.ref] = {}
        self.now = self.peak = 0

    def see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self.alive:
            return

        def gone(_: weakref.ref) -> None:
            del self.alive[key]
            self.now -= size

        self.alive[key] = weakref.ref(storage, gone)
        self.now += size

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **kwargs or {})
        for leaf in tree_leaves((args, kwargs or {}, out)):
            if isinstance(leaf, Tensor):
                self.see(leaf)
        self.peak = max(self.peak, self.now)
        return out


def test_the_tracker_sees_what_is_alive_and_only_that():
    with Live() as mode:
        x = torch.zeros(1000)
        y = x.view(10, 100) + 1  # a view has no storage of its own
        del x
        for _ in range(3):
            y = y * 2
    assert (mode.now, mode.peak) == (4000, 8000)
    del y
    assert mode.now == 0


def batch(task: str, B: int, T: int) -> Batch:
    ids = torch.full((B, T), 1000)
    labels = torch.zeros(B, dtype=torch.long if task == "sst" else torch.float32)
    return Batch(task, ["a"] * B, (Encoded(ids, torch.ones_like(ids), torch.zeros_like(ids)),), labels)


def measured(trainer: Trainer, draws: list[list[Batch]]) -> int:
    """The peak of the second step, which has the optimizer's state."""
    record = EpochRecord(trainer.targets)
    trainer.update(draws, record, 1)
    with Live() as mode:
        for tensor in tree_leaves(trainer.state_dict()):
            if isinstance(tensor, Tensor):
                mode.see(tensor)
        mode.peak = mode.now
        trainer.update(draws, record, 2)
    return mode.peak


SMALL = BertConfig(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256)


@pytest.fixture(scope="module")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    BertModel(SMALL).save_pretrained(folder)
    BertTokenizer.from_pretrained("minilm").save_pretrained(folder)
    return folder


FLAGS: dict[str, dict[str, Any]] = {
    "": {},
    "--combiner pcgrad": {"kept_tasks": 3},
    "--regularizer smart": {"passes": 2},
    "--combiner pcgrad --regularizer smart": {"kept_tasks": 3, "passes": 2},
    "--regularizer smart --smart_start embeddings": {"passes": 2},
    "--regularizer smart+rdrop": {"passes": 3, "lookups": 2},
    "--averager ema --regularizer bregman": {"copies": 2},
    "--checkpoint_activations": {"checkpoint_activations": True},
    "--checkpoint_activations --combiner pcgrad --regularizer smart": {
        "checkpoint_activations": True,
        "kept_tasks": 3,
        "passes": 2,
    },
    "--chunk_rows 4": {"chunk_rows": 4},
    "--chunk_rows 4 --checkpoint_activations": {"chunk_rows": 4, "checkpoint_activations": True},
    "--tasks sst": {"batches": 1},
    "--tasks sst --accumulate 2": {"batches": 2},
    "--combiner pcgrad --accumulate 2": {"kept_tasks": 3, "batches": 6},
}
SIZES = [(2, 8), (32, 32), (8, 160)]


@pytest.mark.parametrize("flags", FLAGS)
def test_the_formula_agrees_with_a_step_on_the_cpu(flags: str, small_checkpoint: Path):
    joined = [] if "--tasks" in flags else ["--pairing", "cross"]
    bench = Bench(small_checkpoint, *joined, *flags.split(), dropout=True)
    for B, T in SIZES:
        draw = [batch(task, B, T) for task in bench.args.tasks]
        found = measured(bench.trainer, [draw] * bench.args.accumulate)
        wanted = peak(SMALL, Step(B, T, **{"batches": 3, "on_gpu": False} | FLAGS[flags]))
        assert wanted == pytest.approx(found, rel=TOLERANCE), (B, T, wanted / found)


def test_attention_that_is_fused_stores_no_weights(small_checkpoint: Path):
    """On a CPU, torch's fused attention is fused without dropout only."""
    bench = Bench(small_checkpoint, "--tasks", "sst", dropout=False)
    found = measured(bench.trainer, [[batch("sst", 8, 192)]])
    wanted = peak(SMALL, Step(8, 192, on_gpu=False, stores_scores=False))
    assert wanted == pytest.approx(found, rel=TOLERANCE)


def test_the_logits_of_masked_tokens_are_part_of_the_formula(small_checkpoint: Path):
    model = PretrainingBERT(BertModel.from_pretrained(str(small_checkpoint)), ["mlm"]).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = Trainer(
        model, {"mlm": lambda output, batch: weighted_loss(output, batch, 1.0)}, optimizer, schedule,
        Precision("fp32", CPU),
    )  # fmt: skip
    B, T = 32, 64
    plain = batch("mlm", B, T)
    labels = torch.where(torch.arange(T) % 8 == 0, plain.sentences[0].token_ids, -100)  # every eighth token
    found = measured(trainer, [[Batch("mlm", [], plain.sentences, labels)]])
    moments = 2 * 4 * parameters(SMALL)  # SGD has none
    wanted = peak(SMALL, Step(B, T, on_gpu=False, predicted_tokens=B * T // 8)) - moments
    assert wanted == pytest.approx(found, rel=TOLERANCE)


# --- bert-base on a GPU, without either: fake tensors have sizes but no memory ----------------------------------------


def efficient_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, drop: bert.Dropout) -> Tensor:
    """The kernel that torch uses on a GPU if there is a mask."""
    T = query.size(-2)
    bias = mask.to(query.dtype).expand(-1, query.size(1), T, T)
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    return attend(query, key, value, bias, True, drop.p if drop.training else 0.0)[0]


@pytest.fixture
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fake tensors, and the kernels of a GPU: dropout with a mask of one byte per element, fused attention."""
    with FakeTensorMode():
        monkeypatch.setattr(torch.nn.Module, "to", lambda module, *_: module)  # fake weights cannot be moved
        for name in ("get_rng_state", "set_rng_state"):  # have no fake version
            monkeypatch.setattr(torch, name, lambda *_: torch.zeros(1, dtype=torch.uint8))
        monkeypatch.setattr(bert, "dropout", lambda x, p, training: torch.native_dropout(x, p, training)[0])
        monkeypatch.setitem(bert.ATTENTIONS, "fastest", efficient_attention)
        # what the combiner reads of the Gram matrix does not change the memory
        monkeypatch.setattr("pcgrad.GradientCombiner._weights", lambda self, gramian, *_: torch.ones(len(gramian)))
        monkeypatch.setattr("kernels.weighted_sum", lambda rows, *_: [row[0] for row in rows])
        monkeypatch.setattr("optimizer.update_together", lambda *_: None)
        yield


BASE = BertConfig()
METHOD_FLAGS = {
    "plain": "",
    "PCGrad": "--combiner pcgrad",
    "SMART": "--regularizer smart",
    "both": "--combiner pcgrad --regularizer smart",
}


def compare_with_a_gpu(
    config: BertConfig, sizes: list[tuple[int, int]], method: str, precision: str, checkpoint: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BertModel, "from_pretrained", lambda *_, **__: BertModel(config))
        flags = ["--pairing", "cross", "--precision", precision, *METHOD_FLAGS[method].split()]
        bench = Bench(checkpoint, *flags, dropout=True)
    for B, T in sizes:
        found = measured(bench.trainer, [[batch(task, B, T) for task in bench.args.tasks]])
        wanted = peak(config, METHODS[method](Step(B, T, batches=3, half=precision == "bf16")))
        assert wanted == pytest.approx(found, rel=TOLERANCE), (B, T, wanted / found)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("method", METHODS)
def test_the_formula_agrees_with_the_kernels_of_a_gpu(
    method: str, precision: str, like_a_gpu: None, tiny_checkpoint: Path
):
    three_layers = replace(BASE, num_hidden_layers=3)
    compare_with_a_gpu(three_layers, [(4, 32), (64, 128)], method, precision, tiny_checkpoint)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("method", METHODS)
def test_the_formula_agrees_with_all_layers_of_bert_base_on_a_gpu(
    method: str, precision: str, like_a_gpu: None, tiny_checkpoint: Path
):
    compare_with_a_gpu(BASE, [(4, 32), (16, 128), (64, 128), (8, 512)], method, precision, tiny_checkpoint)


# --- what follows from it ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [BASE, SMALL], ids=["bert-base", "small"])
def test_the_formula_counts_the_weights_of_the_encoder(config: BertConfig):
    with torch.device("meta"):
        model = BertModel(config)
        whole = MultitaskBERT(model, [Branch(SST)])
    assert parameters(config) == sum(p.numel() for p in model.parameters())
    assert parameters(config) == pytest.approx(sum(p.numel() for p in whole.parameters()), rel=0.001), "heads are small"


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_the_largest_batch_fits_and_one_more_row_does_not(method: str, half: bool):
    for size, length in ((8, 32), (16, 128), (24, 512)):
        step = METHODS[method](Step(1, length, batches=3, half=half))
        rows = largest_rows(BASE, step, room(size))
        assert peak(BASE, replace(step, rows=rows)) <= room(size) < peak(BASE, replace(step, rows=rows + 1))
    assert largest_rows(BASE, METHODS[method](Step(1, 512, batches=3)), room(1)) == 0


def test_the_table_of_the_documentation_is_the_one_that_the_script_prints():
    printed = run_script("memory.py")
    assert printed.returncode == 0, printed.stderr
    rows = [line for line in printed.stdout.splitlines() if line.startswith("|")]
    assert len(rows) == 10
    page = (Path(memory.__file__).parent / "docs" / "GPU.md").read_text(encoding="utf-8")
    assert "\n".join(rows) in page
