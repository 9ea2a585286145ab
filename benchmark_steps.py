"""Benchmarks of single steps: the optimizer, BERT, gradient surgery, SMART, two processes. benchmark.py runs them."""

import argparse
import multiprocessing
import os
import socket
import statistics
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from base_bert import find_checkpoint
from bert import BertModel
from config import BertConfig
from distributed import World, started
from losses import build_objective, cross_entropy
from model import Branch, MultitaskBERT
from optimizer import AdamW, build_schedule
from pcgrad import GradientCombiner, Method, PCGrad
from smart import Regularizer, Smart
from tasks import PARA, SST, STS, Batch, Encoded
from timing import Result, seconds, take_turns
from trainer import EpochRecord, Trainer
from utils import Precision, choose_device, keep_freed_memory, seed_everything

CPU = torch.device("cpu")

# --- adamw: one update of all weights of minilm -----------------------------------------------------------------------


def adamw(rounds: int) -> list[Result]:
    def prepared(kind: type[torch.optim.Optimizer], **options: object) -> Callable[[], float]:
        torch.manual_seed(0)
        model = BertModel.from_pretrained("minilm")
        for p in model.parameters():
            p.grad = 1e-3 * torch.randn_like(p)
        update = kind(model.parameters(), lr=1e-5, weight_decay=0.01, **options)
        return lambda: seconds(update.step)

    actions = {
        "ours": prepared(AdamW),
        "fused": prepared(torch.optim.AdamW, fused=True),
        "foreach": prepared(torch.optim.AdamW, foreach=True),
    }
    times = take_turns(actions, rounds, "adamw")
    return [
        Result.of("adamw", times["ours"], "torch.optim.AdamW(fused=True)", times["fused"], 1.5),
        Result.of("adamw_foreach", times["ours"], "torch.optim.AdamW(foreach=True)", times["foreach"], 1.0),
    ]


# --- bert: a training step -------------------------------------------------------------------------------------------

ROWS, LENGTH = 32, 32
TARGETS = {("fp32", 2): 0.80, ("bf16", 2): 0.75, ("fp32", 1): 0.95, ("bf16", 1): 0.85}


class Setting(NamedTuple):
    precision: str
    threads: int


def _training_steps(kind: str, pipe: Connection) -> None:
    """A worker: build the model, then make one step per setting it receives and answer with its time."""
    seed_everything(0)
    if kind == "ours":
        keep_freed_memory()  # as all scripts do
        choose_device(use_gpu=False)
        model = BertModel.from_pretrained("minilm")
    else:
        import transformers

        transformers.utils.logging.disable_progress_bar()
        model = transformers.BertModel.from_pretrained(find_checkpoint("minilm"), attn_implementation="sdpa")
    model.train()
    head = torch.nn.Linear(model.config.hidden_size, 5)
    ids = torch.randint(1000, 20000, (ROWS, LENGTH))
    mask, labels = torch.ones_like(ids), torch.randint(5, (ROWS,))

    def step(precision: Precision) -> None:
        with precision.autocast():
            outputs = model(input_ids=ids, attention_mask=mask)
            loss = F.cross_entropy(head(outputs["pooler_output"]).float(), labels)
        loss.backward()
        model.zero_grad()

    pipe.send("ready")
    while order := pipe.recv():
        torch.set_num_threads(order.threads)
        precision = Precision(order.precision, CPU)
        pipe.send(seconds(lambda p=precision: step(p)))


def _product_rate(setting: Setting, size: int = 2048) -> float:
    """The floating-point operations per second of a large product of matrices: the machine's limit for a step."""
    before = torch.get_num_threads()
    torch.set_num_threads(setting.threads)
    a, b = (torch.randn(size, size).to(Precision.DTYPES[setting.precision]) for _ in range(2))
    fastest = min(seconds(lambda: a @ b) for _ in range(5))
    torch.set_num_threads(before)
    return 2 * size**3 / fastest


def _step_operations(config: BertConfig) -> float:
    """The floating-point operations of a step's products: forward, and twice as many backward."""
    H, tokens = config.hidden_size, ROWS * LENGTH
    layer = tokens * (4 * H * H + 2 * H * config.intermediate_size) + 2 * tokens * LENGTH * H
    return 3 * 2 * config.num_hidden_layers * layer


def bert(rounds: int) -> list[Result]:
    """Forward and backward pass, 32 x 32 tokens, dropout on; each side in its own process, as users run it."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    workers = []
    for kind in ("ours", "transformers"):
        pipes[kind], other = context.Pipe()
        workers.append(context.Process(target=_training_steps, args=(kind, other), daemon=True))
        workers[-1].start()
        pipes[kind].recv()

    def one_step(pipe: Connection, setting: Setting) -> float:
        pipe.send(setting)
        return pipe.recv()

    operations = _step_operations(BertModel.from_pretrained("minilm").config)
    results = []
    for precision, threads in TARGETS:
        setting = Setting(precision, threads)
        actions = {kind: partial(one_step, pipe, setting) for kind, pipe in pipes.items()}
        times = take_turns(actions, rounds, f"bert {precision}")
        rate = operations / statistics.median(times["ours"])
        note = f"{rate / 1e9:.0f} GFLOP/s, {rate / _product_rate(setting):.0%} of a large matrix product's"
        name = f"bert_{precision}_{threads}"
        peer = f"transformers.BertModel, sdpa, {precision}, threads: {threads}"
        results.append(Result.of(name, times["ours"], peer, times["transformers"], TARGETS[precision, threads], note))
    for pipe, worker in zip(pipes.values(), workers, strict=True):
        pipe.send(None)
        worker.join()
    return results


# --- pcgrad: a training step of three tasks ---------------------------------------------------------------------------


TASK_METHODS: dict[str, Callable[[], Method | None]] = {"ours": lambda: PCGrad(seed=0), "sum": lambda: None}


def _step_of_tasks(model: BertModel, method: Method | None, count: int = 3) -> Callable[[], None]:
    """A batch of 8 x 32 tokens and a linear head per task, one update of all weights."""
    model.train()
    combiner = GradientCombiner(model.parameters(), method)
    heads = torch.nn.ModuleDict({f"task{k}": torch.nn.Linear(model.config.hidden_size, 5) for k in range(count)})
    update = AdamW([*model.parameters(), *heads.parameters()], lr=1e-5, weight_decay=0.01)
    batches = {name: (torch.randint(1000, 20000, (8, 32)), torch.randint(5, (8,))) for name in heads}

    def step() -> None:
        for name, (ids, labels) in batches.items():
            outputs = model(input_ids=ids, attention_mask=torch.ones_like(ids))
            combiner.backward(name, F.cross_entropy(heads[name](outputs["pooler_output"]), labels))
        combiner.write_gradients()
        update.step()
        update.zero_grad()

    return step


def _peak_memory(kind: str, threads: int, pipe: Connection) -> None:
    """A worker: make a few steps and answer with the peak resident memory and the size of the gradients, in MB."""
    torch.set_num_threads(threads)
    seed_everything(0)
    keep_freed_memory()  # as all scripts do
    choose_device(use_gpu=False)
    model = BertModel.from_pretrained("minilm")
    step = _step_of_tasks(model, TASK_METHODS[kind]())
    for _ in range(6):
        step()
    peak = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith("VmHWM"))
    pipe.send((int(peak.split()[1]) / 1024, sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20))


def pcgrad(rounds: int) -> list[Result]:
    """Times alternate in this process; each memory peak is that of a new process (MB where the table says ms)."""
    seed_everything(0)
    steps = {k: _step_of_tasks(BertModel.from_pretrained("minilm"), build()) for k, build in TASK_METHODS.items()}
    times = take_turns({kind: (lambda step=step: seconds(step)) for kind, step in steps.items()}, rounds, "pcgrad")

    context = multiprocessing.get_context("spawn")
    peaks = {}
    for kind in TASK_METHODS:
        mine, other = context.Pipe()
        worker = context.Process(target=_peak_memory, args=(kind, torch.get_num_threads(), other), daemon=True)
        worker.start()
        peaks[kind], gradient = mine.recv()
        worker.join()
    extra, copies = peaks["ours"] - peaks["sum"], 3 * gradient
    ratio = round(extra / copies, 3)
    return [
        Result.of("pcgrad", times["ours"], "the step with plainly summed losses", times["sum"], 1.06),
        Result(
            "pcgrad_extra_mb",
            round(extra, 1),
            "three copies of the gradient (MB)",
            round(copies, 1),
            ratio,
            1.0,
            ratio <= 1,
        ),
    ]


# --- tasks: the cost of gradient surgery as the number of tasks grows -------------------------------------------------


def tasks(rounds: int) -> list[Result]:
    """A step of K tasks with PCGrad against the same step with summed losses."""
    results = []
    for count in (2, 3, 6, 12):
        seed_everything(0)
        steps = {
            kind: _step_of_tasks(BertModel.from_pretrained("minilm"), build(), count)
            for kind, build in TASK_METHODS.items()
        }
        turns = {kind: partial(seconds, step) for kind, step in steps.items()}
        times = take_turns(turns, max(3, rounds // 4), f"{count} tasks", warm_up=2)
        peer = f"the step of {count} tasks with summed losses"
        results.append(Result.of(f"tasks_{count}", times["ours"], peer, times["sum"], 1.15))
    return results


# --- smart: a training step with SMART against the plain step ---------------------------------------------------------


def smart(rounds: int) -> list[Result]:
    """Forward, loss, regularizer, backward, AdamW; 8 x 32 tokens, dropout on, one ascent step."""
    seed_everything(0)
    ids = torch.randint(1000, 20000, (8, 32))
    encoded = Encoded(ids, torch.ones_like(ids), torch.zeros_like(ids))
    batch = Batch("sst", [str(i) for i in range(8)], (encoded,), torch.randint(5, (8,)))
    model = MultitaskBERT(BertModel.from_pretrained("minilm"), [Branch(SST, dropout=0.1)]).train()

    def prepared(regularizer: Regularizer) -> Callable[[], float]:
        update = AdamW(model.parameters(), lr=1e-5)
        schedule = build_schedule(update, "constant", 1, 0)
        precision = Precision("fp32", CPU)
        trainer = Trainer(model, {"sst": cross_entropy}, update, schedule, precision, regularizer=regularizer)
        return lambda: seconds(lambda: trainer.update([[batch]], EpochRecord(), 1))

    terms = {"plain": Regularizer(), "logits": Smart(), "embeddings": Smart(start="embeddings")}
    times = take_turns({name: prepared(term) for name, term in terms.items()}, rounds, "smart")
    peer = "the same step without SMART", times["plain"]
    return [
        Result.of("smart", times["logits"], *peer, 2.4),
        Result.of("smart_embeddings", times["embeddings"], *peer, 2.8),
    ]


# --- distributed: two processes with twice the rows against one process -----------------------------------------------

ROWS_OF_A_PROCESS = 16


def _training_step(rows: int, world: World) -> Callable[[], float]:
    """A step of the three tasks with pcgrad on minilm, `rows` rows of 32 tokens each; returns its seconds."""
    torch.set_num_threads(1)
    choose_device(use_gpu=False)
    seed_everything(0)
    branches = [Branch(SST, "mean"), Branch(PARA, "mean", pairing="cross"), Branch(STS, "mean", pairing="cross")]
    model = MultitaskBERT(BertModel.from_pretrained("minilm"), branches).train()
    update = AdamW(model.parameters(), lr=1e-5)
    objectives = {t.name: build_objective(t.predicts.default_loss, t, argparse.Namespace()) for t in (SST, PARA, STS)}
    trainer = Trainer(
        model, objectives, update, build_schedule(update, "constant", 1, 0.0), Precision("fp32", CPU),
        combiner=GradientCombiner(model.shared_parameters(), PCGrad(0)), world=world,
    )  # fmt: skip
    ids = torch.randint(1000, 30000, (rows, 32))
    encoded = Encoded(ids, torch.ones_like(ids), torch.zeros_like(ids))
    labels = {"sst": torch.arange(rows) % 5, "para": torch.arange(rows) % 2, "sts": torch.arange(rows) % 6 * 0.8}
    step = [[Batch(name, [], (encoded,), of_task) for name, of_task in labels.items()]]
    return lambda: seconds(lambda: trainer.update(step, EpochRecord(), 1))


def _one_of_two(rank: int, port: int, orders: Connection) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with started(use_gpu=False) as world:
        step = _training_step(2 * ROWS_OF_A_PROCESS, world)
        while orders.recv():
            orders.send(step())


def distributed(rounds: int) -> list[Result]:
    """A step of two processes, each with 16 rows of a task and one thread, against one process with 16 rows."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    context, threads = multiprocessing.get_context("spawn"), torch.get_num_threads()
    pipes = [context.Pipe() for _ in range(2)]
    workers = [context.Process(target=_one_of_two, args=(rank, port, there)) for rank, (_, there) in enumerate(pipes)]
    for worker in workers:
        worker.start()

    def together() -> float:
        for here, _ in pipes:
            here.send(True)
        return max(here.recv() for here, _ in pipes)

    alone = _training_step(ROWS_OF_A_PROCESS, World())
    times = take_turns({"together": together, "alone": alone}, rounds, "distributed")
    for here, _ in pipes:
        here.send(False)
    for worker in workers:
        worker.join()
    torch.set_num_threads(threads)
    return [Result.of("distributed", times["together"], "one process with half of the rows", times["alone"], 1.5)]
