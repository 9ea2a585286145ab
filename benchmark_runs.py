"""Benchmarks of whole runs: frozen encoder, pipeline, growth, checkpoints, predictions. benchmark.py runs them."""

import argparse
import contextlib
import csv
import io
import itertools
import math
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

import export
import multitask_classifier
import predict as predict_script
from bert import BertModel
from checkpoints import save_state
from classifier import BertSentimentClassifier
from config import BertConfig
from datasets import (
    PAIRINGS,
    SentenceClassificationDataset,
    SentencePairDataset,
    Split,
    epoch_generator,
    load_multitask_data,
    read_split,
)
from evaluation import model_eval_multitask, predict, with_stored_vectors
from forms import form_of
from kernels import no_tf32
from losses import build_objective, cross_entropy
from memory import peak_memory, reset_peak
from model import Branch, MultitaskBERT
from optimizer import AdamW, build_schedule
from readers import read_examples
from runs import Run
from tables import FORMATS
from tasks import CFIMDB, PARA, SST, STS, Batch, Output, Task
from timing import Result, seconds, take_turns
from tokenizer import BertTokenizer
from trained import TrainedRun
from trainer import Trainer
from training import train_on
from utils import InputError, Precision, choose_device, keep_freed_memory, seed_everything

SAMPLE = Path(__file__).parent / "data" / "sample"
CPU = torch.device("cpu")


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
    """The starter's habits: tokenize every batch, no bucketing, compute padding, two passes, evaluate on train too.

    Products are torch's own, and not those that products.py chooses.
    """
    seed_everything(0)
    model = _TwoPasses(flags)
    model.bert.packs = False  # padding is computed
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
        with no_tf32():
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
    return [Result.of("pipeline", times["ours"], "the starter's habits on the same model", times["starter"], 0.33)]


# --- growth: seconds and memory as the data set grows -----------------------------------------------------------------

GROWTH_ROWS = (2_000, 20_000, 140_000)  # the last is about the size of the course's Quora file


def _write_questions(path: Path, count: int) -> None:
    """A file in the format of Quora: pairs of the sample data with a number in each, so that no text occurs twice.

    The numbers have six digits in a file of any size, so that its texts are not longer because there are more of them.
    """
    examples = read_examples(PARA, [SAMPLE / PARA.filename("train")], labeled=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, delimiter="\t")
        rows.writerow(["", "id", *PARA.text_columns, PARA.label_column])
        for row in range(count):
            chosen = row % len(examples)
            number = 100_000 + row * 7_919 % 900_000  # each of these occurs once in 900,000 rows
            texts = (f"{column[chosen]} {number}" for column in examples.texts)
            rows.writerow([row, f"{row:025x}", *texts, examples.labels[chosen]])


SMALL = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=256)
MEMORY_ROWS = 640  # of minilm's training in which the memory is measured: 20 steps


def _train_on_file(path: Path, bert: Callable[[], BertModel], rows: int | None, pipe: Connection) -> None:
    """A worker: read and tokenize a file and train on it once, or on its first rows only.

    Answers with the seconds and the peak memory in bytes.
    """
    torch.set_num_threads(1)
    seed_everything(0)
    keep_freed_memory()
    choose_device(use_gpu=False)
    tokenizer = BertTokenizer.from_pretrained("minilm")
    model = MultitaskBERT(bert(), [Branch(PARA, "mean", pairing="cross")]).train()
    update = AdamW(model.parameters(), lr=1e-4)
    objective = {"para": build_objective("bce", PARA, argparse.Namespace())}
    trainer = Trainer(model, objective, update, build_schedule(update, "constant", 1, 0.0), Precision("fp32", CPU))

    def run(rows: int | None) -> None:
        split = read_split(PARA, [path], tokenizer, PAIRINGS["cross"], labeled=True)
        split = split if rows is None else split.select(torch.arange(rows))
        train_on(trainer, (((batch,),) for batch in split.batches(32, epoch_generator(0, 1))))

    run(256)  # what a process loads once does not count
    reset_peak(CPU)
    pipe.send((seconds(lambda: run(rows)), peak_memory(CPU)))


def _in_a_process(*args: Any) -> tuple[float, int]:
    """What `_train_on_file` answers in a process of its own, with these arguments."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    worker = context.Process(target=_train_on_file, args=(*args, there), daemon=True)
    worker.start()
    answer = here.recv()
    worker.join()
    return answer


def growth(rounds: int) -> list[Result]:
    """Seconds per 1,000 rows, reading and tokenizing included, and the peak memory (MB where the table says ms).

    The time is that of a small encoder, so that whatever grows with the data is a large share of it. The memory is that
    of training minilm.
    """
    per_thousand: dict[int, list[float]] = {rows: [] for rows in GROWTH_ROWS}
    peaks: dict[int, list[float]] = {rows: [] for rows in GROWTH_ROWS}
    with tempfile.TemporaryDirectory() as folder:
        files = {rows: Path(folder) / f"{rows}.csv" for rows in GROWTH_ROWS}
        for rows, path in files.items():
            _write_questions(path, rows)
        for _, (rows, path) in itertools.product(range(max(3, rounds // 10)), files.items()):
            spent, _ = _in_a_process(path, partial(BertModel, SMALL), None)
            _, peak = _in_a_process(path, partial(BertModel.from_pretrained, "minilm"), MEMORY_ROWS)
            per_thousand[rows].append(1000 * spent / rows)
            peaks[rows].append(peak / 1e9)
    few, *more = GROWTH_ROWS
    return [
        Result.of(f"growth_{what}_{rows}", of[rows], f"the same with {few:,} rows", of[few], 1.05)
        for what, of in (("time", per_thousand), ("memory", peaks))
        for rows in more
    ]


# --- time_to_score: minutes until a dev score ------------------------------------------------------------------------

SCORE, MINUTES = 0.750, 10.0


def time_to_score(rounds: int) -> list[Result]:
    """Minutes of recipes/fast.txt, from the start of the process to the first epoch with the score; always one run.

    Needs the course's data in COURSE_DATA.
    """
    if "COURSE_DATA" not in os.environ:
        raise InputError("time_to_score needs the course's data. Set COURSE_DATA to its directory.")
    here = Path(__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, here / "multitask_classifier.py", f"@{here / 'recipes' / 'fast.txt'}", "--no-report"]
        command += ["--data", os.environ["COURSE_DATA"], "--runs", folder, "--predictions", folder, "--name", "fast"]
        started = time.monotonic()
        running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        epochs: list[str] = []
        minutes = math.inf
        for line in running.stdout:
            found = re.match(r"epoch \d+ \|.*?(sst \d.*\| overall (\d\.\d+)) \|", line)
            if found:
                epochs.append(found[1])
                if float(found[2]) >= SCORE:
                    minutes = min(minutes, (time.monotonic() - started) / 60)
        if running.wait():
            raise InputError(f"time_to_score: {command[1]} ended with status {running.returncode}.")
    note = f"dev by epoch: {'; '.join(epochs)}"
    goal = f"{MINUTES:g} minutes until dev {SCORE:.3f}"
    return [Result.of("time_to_score", [60 * minutes], goal, [60 * MINUTES], 1.0, note)]


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
        with no_tf32():  # torch's own products
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
