"""Measure speed and memory against real peers in the same run.

    python benchmark.py --only adamw,pcgrad --json results.json

Ours and the peer alternate; times are medians over the rounds, so a slow moment of the machine affects both. Needs the
test dependencies (source setup.sh --dev).
"""

import argparse
import contextlib
import csv
import io
import itertools
import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

import export
import multitask_classifier
import predict as predict_script
from base_bert import find_checkpoint
from bert import BertModel
from checkpoints import save_state
from classifier import BertSentimentClassifier
from datasets import (
    SentenceClassificationDataset,
    SentencePairDataset,
    Split,
    epoch_generator,
    load_multitask_data,
    read_split,
)
from distributed import World, started
from evaluation import model_eval_multitask, predict, with_stored_vectors
from flags import ALWAYS, ArgumentParser, number
from forms import form_of
from losses import build_objective, cross_entropy
from model import Branch, MultitaskBERT
from optimizer import AdamW, build_schedule
from pcgrad import GradientCombiner, Method, PCGrad
from readers import read_examples
from runs import Run
from smart import Regularizer, Smart
from tables import FORMATS
from tasks import CFIMDB, PARA, SST, STS, Batch, Encoded, Output, Task
from tokenizer import BertTokenizer
from trained import TrainedRun
from trainer import EpochRecord, Trainer
from training import train_on
from utils import (
    InputError,
    Precision,
    keep_freed_memory,
    run_script,
    seed_everything,
    write_text,
)

SAMPLE = Path(__file__).parent / "data" / "sample"
CPU = torch.device("cpu")


@dataclass
class Result:
    name: str
    ours_ms: float
    peer: str
    peer_ms: float
    ratio: float
    target: float
    ok: bool

    @classmethod
    def of(cls, name: str, ours: list[float], peer: str, theirs: list[float], target: float) -> "Result":
        a, b = (1000 * statistics.median(times) for times in (ours, theirs))
        return cls(name, round(a, 3), peer, round(b, 3), round(a / b, 3), target, a / b <= target)


def seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def take_turns(
    actions: dict[str, Callable[[], float]], rounds: int, label: str, warm_up: int = 3
) -> dict[str, list[float]]:
    """Each action returns its own time in seconds; all run once per round, one after the other."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for done in tqdm(range(warm_up + rounds), desc=label, leave=False, disable=None):
        for name, action in actions.items():
            spent = action()
            if done >= warm_up:
                times[name].append(spent)
    return times


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


# --- frozen: ten epochs on stored vectors against one encoding pass ---------------------------------------------------


def frozen(rounds: int) -> list[Result]:
    """Both encode the sample data's train, dev and test rows once; ours also trains and evaluates ten times."""
    tokenizer = BertTokenizer.from_pretrained("minilm")
    splits = {
        name: read_split(SST, [SAMPLE / SST.filename(name)], tokenizer, labeled=name != "test")
        for name in ("train", "dev", "test")
    }
    seed_everything(0)
    model = BertSentimentClassifier(
        argparse.Namespace(model="minilm", option="pretrain", num_labels=SST.predicts.num_logits)
    )
    precision = Precision("fp32", CPU)

    def encode() -> dict[str, Split]:
        return {name: with_stored_vectors(model, split, 32, precision) for name, split in splits.items()}

    def ten_epochs() -> None:
        stored = encode()
        update = AdamW(model.linear.parameters(), lr=1e-3)
        trainer = Trainer(model, {"sst": cross_entropy}, update, build_schedule(update, "constant", 1, 0), precision)
        for epoch in range(10):
            batches = stored["train"].batches(8, epoch_generator(0, epoch))
            train_on(trainer, (((b,),) for b in batches))
            predict(model, stored["dev"], 32, precision)

    actions = {"ours": lambda: seconds(ten_epochs), "pass": lambda: seconds(encode)}
    times = take_turns(actions, max(3, rounds // 6), "frozen", warm_up=1)
    return [Result.of("frozen", times["ours"], "one encoding pass of the same rows", times["pass"], 1.3)]


# --- bert: a training step -------------------------------------------------------------------------------------------


def _training_steps(kind: str, threads: int, pipe: Connection) -> None:
    """A worker: build the model, then make one step per message and answer with its time."""
    torch.set_num_threads(threads)
    seed_everything(0)
    if kind == "ours":
        keep_freed_memory()  # as all scripts do
        model = BertModel.from_pretrained("minilm")
    else:
        import transformers

        transformers.utils.logging.disable_progress_bar()
        model = transformers.BertModel.from_pretrained(find_checkpoint("minilm"), attn_implementation="sdpa")
    model.train()
    head = torch.nn.Linear(model.config.hidden_size, 5)
    ids = torch.randint(1000, 20000, (32, 32))
    mask, labels = torch.ones_like(ids), torch.randint(5, (32,))

    def step() -> None:
        outputs = model(input_ids=ids, attention_mask=mask)
        F.cross_entropy(head(outputs["pooler_output"]), labels).backward()
        model.zero_grad()

    pipe.send("ready")
    while pipe.recv():
        pipe.send(seconds(step))


def bert(rounds: int) -> list[Result]:
    """Forward and backward pass, 32 x 32 tokens, dropout on; each side in its own process, as users run it."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    workers = []
    for kind in ("ours", "transformers"):
        pipes[kind], other = context.Pipe()
        workers.append(
            context.Process(target=_training_steps, args=(kind, torch.get_num_threads(), other), daemon=True)
        )
        workers[-1].start()
        pipes[kind].recv()

    def one_step(pipe: Connection) -> float:
        pipe.send(True)
        return pipe.recv()

    actions = {kind: (lambda pipe=pipe: one_step(pipe)) for kind, pipe in pipes.items()}
    times = take_turns(actions, rounds, "bert")
    for pipe, worker in zip(pipes.values(), workers, strict=True):
        pipe.send(False)
        worker.join()
    return [Result.of("bert", times["ours"], "transformers.BertModel, sdpa", times["transformers"], 0.9)]


# --- pcgrad: a training step of three tasks ---------------------------------------------------------------------------


THREE_TASK_METHODS: dict[str, Callable[[], Method | None]] = {"ours": lambda: PCGrad(seed=0), "sum": lambda: None}


def _three_task_step(model: BertModel, method: Method | None) -> Callable[[], None]:
    """Three batches of 8 x 32 tokens, a linear head each, one update of all weights."""
    model.train()
    combiner = GradientCombiner(model.parameters(), method)
    heads = torch.nn.ModuleDict({name: torch.nn.Linear(model.config.hidden_size, 5) for name in ("sst", "para", "sts")})
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
    model = BertModel.from_pretrained("minilm")
    step = _three_task_step(model, THREE_TASK_METHODS[kind]())
    for _ in range(6):
        step()
    peak = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith("VmHWM"))
    pipe.send((int(peak.split()[1]) / 1024, sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20))


def pcgrad(rounds: int) -> list[Result]:
    """Times alternate in this process; each memory peak is that of a new process (MB where the table says ms)."""
    seed_everything(0)
    steps = {
        k: _three_task_step(BertModel.from_pretrained("minilm"), build()) for k, build in THREE_TASK_METHODS.items()
    }
    times = take_turns({kind: (lambda step=step: seconds(step)) for kind, step in steps.items()}, rounds, "pcgrad")

    context = multiprocessing.get_context("spawn")
    peaks = {}
    for kind in THREE_TASK_METHODS:
        mine, other = context.Pipe()
        worker = context.Process(target=_peak_memory, args=(kind, torch.get_num_threads(), other), daemon=True)
        worker.start()
        peaks[kind], gradient = mine.recv()
        worker.join()
    extra, copies = peaks["ours"] - peaks["sum"], len(("sst", "para", "sts")) * gradient
    ratio = round(extra / copies, 3)
    return [
        Result.of("pcgrad", times["ours"], "the step with plainly summed losses", times["sum"], 1.15),
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


# --- pipeline: an epoch of Part 2, from files to scores ---------------------------------------------------------------

PIPELINE_ROWS = {"train": 2000, "dev": 500, "test": 500}
WARM_UP_ROWS = {"train": 64, "dev": 32, "test": 32}
PIPELINE_TASKS = [SST, PARA, STS]


def _write_rows(folder: Path, rows_of: dict[str, int]) -> None:
    """Write this many rows of every task under the course's file names, from COURSE_DATA if set, else sample data."""
    source = Path(os.environ.get("COURSE_DATA", SAMPLE))
    for task in PIPELINE_TASKS:
        for split, count in rows_of.items():
            examples = read_examples(task, [source / task.filename(split)], labeled=split != "test")
            columns = [*examples.texts, examples.labels] if split != "test" else [*examples.texts]
            header = ["", "id", *task.text_columns] + [task.label_column] * (split != "test")
            rows = [header]
            for row in range(count):
                chosen = row % len(examples)  # a small file is repeated
                rows.append([row, f"{row:025x}", *(column[chosen] for column in columns)])
            with (folder / task.filename(split)).open("w", encoding="utf-8", newline="") as file:
                csv.writer(file, delimiter="\t").writerows(rows)


class _TwoPasses(multitask_classifier.MultitaskBERT):
    """As the starter's users write it: each sentence of a pair goes through BERT on its own."""

    def predict_paraphrase(self, *tensors: Tensor) -> Tensor:
        return self.logits("para", (self(*tensors[:2]), self(*tensors[2:])), ((0, 1),))

    def predict_similarity(self, *tensors: Tensor) -> Tensor:
        return self.logits("sts", (self(*tensors[:2]), self(*tensors[2:])), ((0, 1),))


def _starter_epoch(flags: argparse.Namespace, folder: Path) -> None:
    """The starter's habits: tokenize every batch, no bucketing, two passes, evaluate the training set as well."""
    seed_everything(0)
    model = _TwoPasses(flags)
    update = AdamW(model.parameters(), lr=1e-5)
    loaders = {}
    for split in ("train", "dev"):
        sst, _, para, sts = load_multitask_data(*(str(folder / t.filename(split)) for t in PIPELINE_TASKS), split=split)
        sets = (SentenceClassificationDataset(sst, flags), *(SentencePairDataset(rows, flags) for rows in (para, sts)))
        loaders[split] = [
            DataLoader(d, flags.batch_size, shuffle=split == "train", collate_fn=d.collate_fn) for d in sets
        ]
    asks = (model.predict_sentiment, model.predict_paraphrase, model.predict_similarity)
    model.train()
    for task, ask, loader in zip(PIPELINE_TASKS, asks, loaders["train"], strict=True):
        objective = build_objective(task.predicts.default_loss, task, flags)
        suffixes = ("",) if task is SST else ("_1", "_2")
        for batch in loader:
            inputs = [batch[f"{key}{suffix}"] for suffix in suffixes for key in ("token_ids", "attention_mask")]
            update.zero_grad()
            objective(Output(ask(*inputs), ()), Batch(task.name, [], (), batch["labels"])).backward()
            update.step()
    for split in ("train", "dev"):
        model_eval_multitask(*loaders[split], model, CPU)
    torch.save(model.state_dict(), folder / "starter.pt")


def pipeline(rounds: int) -> list[Result]:
    """One epoch over 2,000 rows a task, tokenizing, evaluation and checkpoint included; bi-encoder, batches of 32."""
    names = (f"run{number}" for number in itertools.count())

    def ours(flags: list[str]) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            multitask_classifier.train_multitask(multitask_classifier.get_args([*flags, "--name", next(names)]))

    def starter(flags: list[str], folder: Path) -> None:
        _starter_epoch(multitask_classifier.get_args(flags), folder)

    def both(folder: Path) -> dict[str, Callable[[], float]]:
        flags = ["--model", "minilm", "--option", "finetune", "--sampler", "sequential", "--epochs", "1"]
        flags += ["--batch_size", "32", "--pooling", "mean", "--no-report"]
        flags += [text for flag in ("--data", "--runs", "--predictions") for text in (flag, str(folder))]
        return {
            "ours": lambda: seconds(lambda: ours(flags)),
            "starter": lambda: seconds(lambda: starter(flags, folder)),
        }

    with tempfile.TemporaryDirectory() as small, tempfile.TemporaryDirectory() as whole:
        _write_rows(Path(small), WARM_UP_ROWS)
        take_turns(both(Path(small)), 1, "warm-up", warm_up=0)  # what a process loads once counts for neither side
        _write_rows(Path(whole), PIPELINE_ROWS)
        times = take_turns(both(Path(whole)), max(1, rounds // 15), "pipeline", warm_up=0)
    return [Result.of("pipeline", times["ours"], "the starter's habits on the same model", times["starter"], 0.4)]


# --- distributed: two processes with twice the rows against one process -----------------------------------------------

ROWS_OF_A_PROCESS = 16


def _training_step(rows: int, world: World) -> Callable[[], float]:
    """A step of the three tasks with pcgrad on minilm, `rows` rows of 32 tokens each; returns its seconds."""
    torch.set_num_threads(1)
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


# --- checkpoint: saving the state of a run ----------------------------------------------------------------------------


def checkpoint(rounds: int) -> list[Result]:
    """Save the state of a fine-tuning of minilm, with checksum and flush to the disk, against torch.save alone."""
    seed_everything(0)
    model = BertModel.from_pretrained("minilm").train()
    update = AdamW(model.parameters(), lr=1e-5)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    update.step()
    state = {"model": model.state_dict(), "optimizer": update.state_dict()}
    with tempfile.TemporaryDirectory() as folder:
        run, path = Run(Path(folder)), Path(folder) / "peer.pt"
        actions = {
            "ours": lambda: seconds(lambda: save_state(state, run)),
            "peer": lambda: seconds(lambda: torch.save(state, path)),
        }
        times = take_turns(actions, max(3, rounds // 3), "checkpoint", warm_up=1)
    return [Result.of("checkpoint", times["ours"], "torch.save, neither verified nor flushed", times["peer"], 4.0)]


# --- predict: a file of sentences with predict.py against transformers' pipeline --------------------------------------

PREDICTED_ROWS = 2000


def _sample_sentences(count: int) -> list[str]:
    """Sentences of the sample data of all lengths, one in 25 a whole review."""
    short = [t for task in (SST, PARA, STS) for t in _texts(task)]
    long = itertools.cycle(_texts(CFIMDB))
    return [next(long) if row % 25 == 0 else short[row % len(short)] for row in range(count)]


def _texts(task: Task) -> list[str]:
    return [text for split in ("train", "dev") for text in
            read_examples(task, [SAMPLE / task.filename(split)], labeled=True).texts[0]]  # fmt: skip


def prediction(rounds: int) -> list[Result]:
    """Text in, labels and probabilities out; the same weights, exported, and batches of 32 on both sides.

    The pipeline takes the sentences as they come, which pads short ones to the longest of their batch; `predict_sorted`
    is against a pipeline that gets them sorted by length.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    seed_everything(0)
    model = MultitaskBERT(BertModel.from_pretrained("minilm"), [Branch(SST)]).eval()
    tokenizer = BertTokenizer.from_pretrained("minilm")
    run = TrainedRun(Path("minilm"), {}, argparse.Namespace(), model, tokenizer, Precision("fp32", CPU))
    sentences = _sample_sentences(PREDICTED_ROWS)
    text = FORMATS["text"]

    def ours(rows: list[str]) -> None:
        table = text.read(io.BytesIO("".join(f"{row}\n" for row in rows).encode()), "sentences")
        output = predict_script.Output(io.BytesIO(), None)
        predict_script.predict_table(run, [SST], table, text, 32, output, None, tqdm(disable=True))
        assert output.rows == len(rows)

    with tempfile.TemporaryDirectory() as folder:
        export.write_classifier(Path(folder), run, SST, form_of(run, "sst"))
        classify = transformers.pipeline("text-classification", folder, device="cpu")

    def peer(rows: list[str]) -> None:
        assert len(classify(rows, batch_size=32, truncation=True, top_k=None)) == len(rows)

    for side in (ours, peer):  # what a process loads once counts for neither side
        side(sentences[:64])
    actions = {
        "ours": lambda: seconds(lambda: ours(sentences)),
        "peer": lambda: seconds(lambda: peer(sentences)),
        "sorted": lambda: seconds(lambda: peer(sorted(sentences, key=len))),
    }
    times = take_turns(actions, max(3, rounds // 6), "predict", warm_up=0)
    return [
        Result.of("predict", times["ours"], "transformers' pipeline", times["peer"], 1.0),
        Result.of("predict_sorted", times["ours"], "the same, sentences sorted by length", times["sorted"], 1.0),
    ]


BENCHMARKS: dict[str, Callable[[int], list[Result]]] = {
    "adamw": adamw, "frozen": frozen, "bert": bert, "pcgrad": pcgrad, "smart": smart, "pipeline": pipeline,
    "distributed": distributed, "checkpoint": checkpoint, "predict": prediction,
}  # fmt: skip


# --- script -----------------------------------------------------------------------------------------------------------


def get_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(
        "benchmark.py",
        "Measure speed and memory against real peers.",
        "python benchmark.py --only adamw,pcgrad --json results.json",
        sections=("flags",),
    )
    add = parser.section("flags")
    add("--only", default=",".join(BENCHMARKS), needs=ALWAYS, metavar="NAMES", help="benchmarks, separated by commas")
    add("--rounds", type=number(int, 1, 10000), default=30, needs=ALWAYS, metavar="N", help="measurements of each side")
    add("--json", type=Path, needs=ALWAYS, help="file for the results")
    args = parser.parse(argv)
    args.only = [name for name in args.only.split(",") if name]
    unknown = [name for name in args.only if name not in BENCHMARKS]
    if unknown or not args.only:
        raise InputError(f"--only must name some of {', '.join(BENCHMARKS)}, found {', '.join(unknown) or 'none'}.")
    return args


def main() -> None:
    args = get_args()
    results = []
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, {args.rounds} rounds")
    for name in args.only:
        for result in BENCHMARKS[name](args.rounds):
            results.append(asdict(result))
            verdict = "ok" if result.ok else "MISSED"
            print(
                f"{result.name:14} ours {result.ours_ms:9.2f} ms | {result.peer_ms:9.2f} ms {result.peer} | "
                f"ratio {result.ratio:.2f}, target {result.target:.2f}: {verdict}",
                flush=True,
            )
    if args.json:
        write_text(args.json, json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    run_script(main)
