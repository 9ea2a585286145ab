"""Predict a split, score predictions, read and write prediction files; the starter's model_eval_* on top of that.

As a script, it scores the dev files of a directory against the labels:

    python evaluation.py predictions/ --data data
"""

import argparse
import functools
import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

import manifest
from datasets import (
    SentenceClassificationDataset,
    SentenceClassificationTestDataset,
    SentencePairDataset,
    SentencePairTestDataset,
    Split,
    load_multitask_data,
    sorted_rows,
)
from distributed import World
from flags import ALWAYS, ArgumentParser
from interruption import requested, stop
from intervals import Scored, overall_interval, score_interval
from manifest import Found, Source
from submission import PART_2_FILES, dev_files, read_scored
from tasks import PARA, SST, STS, TASKS, Batch, Output, Predictions, Task
from utils import (
    InputError,
    Precision,
    atomic_path,
    digest,
    printable,
    read_arrays,
    run_script,
    warn,
    writable_directory,
    write_text,
)


class Predictor(Protocol):
    """What training and evaluation need of a model; `vectors` is the output of its frozen part."""

    world: World

    def vectors(self, batch: Batch) -> tuple[Tensor, ...]: ...
    def predict(self, batch: Batch) -> Output: ...
    def eval(self) -> "Predictor": ...


# --- predict ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _in_file_order(
    compute: Callable[[Batch], Iterable[Tensor]],
    split: Split,
    batch_size: int,
    precision: Precision,
    label: str | None,
    world: World,
) -> tuple[Tensor, ...]:
    """Compute tensors (B, ...) for all rows, batch by batch; return them on the CPU in the order of the file.

    label: of the progress bar; None shows none.
    They stay on the device until the end: one copy for all batches, so that no batch waits for the one before it.
    Several processes divide the batches between them, and each returns the results of all.
    """
    batches = sorted_rows(split.lengths, batch_size)
    results = []
    with precision.autocast():  # one region for all batches, so that each weight is cast once
        hidden = True if label is None else None  # None: shown on a terminal
        for rows in tqdm(batches[world.rank :: world.size], desc=label, leave=False, disable=hidden):
            results.append(tuple(compute(split.batch(rows).to(precision.device))))
    found = [torch.cat(parts).float().cpu() for parts in zip(*results, strict=True)]
    everyone = world.collect((found, requested()))
    if world.size > 1 and any(is_stopped for _, is_stopped in everyone):
        stop()  # all processes together; one on its own was stopped where it was
    by_rank = [of_rank for of_rank, _ in everyone if of_rank]
    rows = [row for rank in range(world.size) for row in batches[rank :: world.size]]
    order = torch.cat(rows).argsort()
    return tuple(torch.cat(parts)[order] for parts in zip(*by_rank, strict=True))


def predict(model: Predictor, split: Split, batch_size: int, precision: Precision) -> Predictions:
    model.eval()
    (logits,) = _in_file_order(
        lambda b: (model.predict(b).logits,), split, batch_size, precision, f"predict {split.task.name}", model.world
    )
    labels = None if split.labels is None else split.labels.numpy()
    return Predictions(split.ids, logits.numpy(), split.task.predicts.decode(logits).numpy(), labels)


def logits_and_vectors(
    model: Predictor, split: Split, batch_size: int, precision: Precision
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The logits (rows, C) and the vectors that the head sees, one (rows, H) for each sentence of a row; no bar."""
    model.eval()

    def compute(batch: Batch) -> Iterable[Tensor]:
        output = model.predict(batch)
        return output.logits, *output.vectors

    logits, *vectors = _in_file_order(compute, split, batch_size, precision, None, model.world)
    return logits, tuple(vectors)


def with_stored_vectors(model: Predictor, split: Split, batch_size: int, precision: Precision) -> Split:
    """Run the frozen encoder once over a split, in eval mode, and store its vectors in the split."""
    model.eval()
    label = f"encode {split.task.name}"
    return split.with_vectors(_in_file_order(model.vectors, split, batch_size, precision, label, model.world))


# --- score ------------------------------------------------------------------------------------------------------------


def score(task: Task, predictions: Predictions) -> float:
    return task.predicts.score(predictions.values, predictions.labels)


def overall(scores: dict[str, float]) -> float:
    """The 2024 leaderboard's score, which selects the best epoch: the mean over tasks, a correlation r as (r + 1)/2."""
    return float(np.mean([TASKS[task].predicts.share_of_overall(score) for task, score in scores.items()]))


def overall_2023(scores: dict[str, float]) -> float:
    """The 2023 leaderboard's score: the plain mean over tasks."""
    return float(np.mean(list(scores.values())))


def score_line(scores: dict[str, float]) -> str:
    parts = [f"{task} {value:.3f}" for task, value in scores.items()]
    return " | ".join([*parts, f"overall {overall(scores):.4f} (2023 formula: {overall_2023(scores):.4f})"])


# --- prediction files -------------------------------------------------------------------------------------------------


def write_predictions(path: Path, task: Task, predictions: Predictions, source: Source | None = None) -> None:
    """Byte for byte the starter's format: a header, then `id , value ` lines.

    source: what was predicted with what, for the manifest beside the file.
    """
    rows = (f"{i} , {v} \n" for i, v in zip(predictions.ids, predictions.values, strict=True))
    text = task.csv_header + "".join(rows)
    write_text(path, text)
    if source is not None:
        manifest.record(path, source, len(predictions.ids), hashlib.sha256(text.encode()).hexdigest())


def write_logits(path: Path, predictions: Predictions) -> None:
    """Write what an ensemble needs of a run: ids, logits and, for dev rows, labels; and a checksum of them."""
    arrays = {"ids": np.array(predictions.ids), "logits": predictions.logits}
    if predictions.labels is not None:
        arrays["labels"] = predictions.labels
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **arrays, sha256=np.array(digest(arrays)))


def read_logits(path: Path, task: Task, remedy: str, *, labeled: bool) -> Predictions:
    """Read the file of `write_logits`. Anything but a row of finite logits (and a label) for each id is an error.

    remedy: how to write the file again, for the message.
    """
    try:
        arrays = read_arrays(path)
        _check_arrays(arrays, labeled)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or f"it is not an .npz file with ids and logits ({error!s:.100})"
        raise InputError(f"{path}: cannot be read as logits; {reason}. {remedy}") from error
    ids, logits = list(map(str, arrays["ids"].tolist())), arrays["logits"].astype(np.float32)
    labels = arrays["labels"] if labeled else None
    C = task.predicts.num_logits
    shape_fits = logits.shape == (len(ids), C)
    if not shape_fits or not np.isfinite(logits).all():
        found = "NaN or infinity" if shape_fits else f"an array of shape {logits.shape}"
        expected = f"{C} finite logit{'s' * (C > 1)}"
        raise InputError(f"{path}: must have {expected} for each of its {len(ids)} ids, found {found}. {remedy}")
    if repeated := len(ids) - len(set(ids)):
        raise InputError(f"{path}: ids must be unique, found {repeated} of {len(ids)} repeated. {remedy}")
    if labels is not None and (labels.shape != (len(ids),) or not np.isfinite(labels).all()):
        raise InputError(f"{path}: must have a label for each of {len(ids)} ids, found {labels.size}. {remedy}")
    return Predictions(ids, logits, task.predicts.decode(torch.from_numpy(logits)).numpy(), labels)


NUMBERS = (np.integer, np.floating)
ARRAYS = {"ids": (np.str_, np.bytes_, np.integer), "logits": NUMBERS, "labels": NUMBERS, "sha256": (np.str_,)}


def _check_arrays(arrays: dict[str, np.ndarray], labeled: bool) -> None:
    """Raise a ValueError if the arrays are not those of `write_logits`, or differ from their checksum."""
    for name in sorted(arrays.keys() | {"ids", "logits"} | ({"labels"} if labeled else set())):
        if name not in arrays or not any(np.issubdtype(arrays[name].dtype, kind) for kind in ARRAYS.get(name, ())):
            found = "not there" if name not in arrays else f"of type {arrays[name].dtype!s:.20}"
            raise ValueError(f"{name!r:.30} is {found}")
    if arrays["ids"].ndim != 1:
        raise ValueError(f"ids has {arrays['ids'].ndim} dimensions")
    content = {name: arrays[name] for name in ARRAYS if name in arrays and name != "sha256"}
    if "sha256" in arrays and str(arrays["sha256"]) != digest(content):  # an older version wrote none
        raise ValueError("its contents differ from its checksum")


# --- the starter's functions, with results in the order of 2024 unless they say otherwise -----------------------------

Loader = Iterable[dict[str, Any]]  # the starter's batches


def model_eval(dataloader: Loader, model: Any, device: torch.device) -> tuple:
    """Part 1, on a model that returns logits: (accuracy, macro F1, predictions, labels, sentences, ids)"""
    return _with_scores(_run(dataloader, model, model, device, SST, ("sent_ids", "labels", "sents")))


def model_test_eval(dataloader: Loader, model: Any, device: torch.device) -> tuple:
    """Part 1: (predictions, sentences, ids)"""
    return tuple(_run(dataloader, model, model, device, SST, ("sents", "sent_ids")))


def model_eval_sst(dataloader: Loader, model: Any, device: torch.device) -> tuple:
    """(accuracy, macro F1, predictions, labels, sentences, ids)"""
    columns = "sent_ids", "labels", "sents"
    return _with_scores(_run(dataloader, model, model.predict_sentiment, device, SST, columns))


def _with_scores(columns: list[list[Any]]) -> tuple:
    values, ids, labels, sentences = columns
    scored = np.array(values), np.array(labels)
    return SST.predicts.score(*scored), macro_f1(*scored), values, labels, sentences, ids


def model_eval_multitask(
    sentiment_dataloader: Loader,
    paraphrase_dataloader: Loader,
    sts_dataloader: Loader,
    model: Any,
    device: torch.device,
) -> tuple:
    """(sst accuracy, predictions, ids, para accuracy, predictions, ids, sts correlation, predictions, ids)"""
    results: list[Any] = []
    loaders = sentiment_dataloader, paraphrase_dataloader, sts_dataloader
    for task, loader in zip((SST, PARA, STS), loaders, strict=True):
        values, ids, labels = _run(loader, model, _asker(model, task), device, task, ("sent_ids", "labels"))
        results += [task.predicts.score(np.array(values), np.array(labels)), values, ids]
    return tuple(results)


def model_eval_test_multitask(
    sentiment_dataloader: Loader,
    paraphrase_dataloader: Loader,
    sts_dataloader: Loader,
    model: Any,
    device: torch.device,
) -> tuple:
    """(sst predictions, ids, para predictions, ids, sts predictions, ids)"""
    results: list[Any] = []
    loaders = sentiment_dataloader, paraphrase_dataloader, sts_dataloader
    for task, loader in zip((SST, PARA, STS), loaders, strict=True):
        results += _run(loader, model, _asker(model, task), device, task, ("sent_ids",))
    return tuple(results)


@functools.cache
def _say_once(message: str) -> None:
    warn(message)


def test_model_multitask(args: argparse.Namespace, model: Any, device: torch.device) -> tuple:
    """2023's: write the six prediction files, and return the dev results in the order of 2023:

    (para accuracy, predictions, ids, sst accuracy, predictions, ids, sts correlation, predictions, ids)
    """
    _say_once(
        "test_model_multitask returns results in the order of 2023: para, sst, sts. model_eval_multitask and "
        "model_eval_test_multitask return them in the order of 2024: sst, para, sts."
    )
    dev, _ = write_starter_predictions(args, model, device)
    return *dev[3:6], *dev[:3], *dev[6:]


def write_starter_predictions(args: argparse.Namespace, model: Any, device: torch.device) -> tuple[tuple, tuple]:
    """Write the six prediction files; the results of model_eval_multitask and of model_eval_test_multitask.

    args: the starter's: sst_dev, sst_dev_out and so on, and batch_size.
    """
    results = []
    for split, kinds, evaluate in (
        ("dev", (SentenceClassificationDataset, SentencePairDataset), model_eval_multitask),
        ("test", (SentenceClassificationTestDataset, SentencePairTestDataset), model_eval_test_multitask),
    ):
        paths = [getattr(args, f"{task.name}_{split}") for task in (SST, PARA, STS)]
        sst, _, *pairs = load_multitask_data(*paths, split)
        datasets = [kinds[0](sst, args), *(kinds[1](rows, args) for rows in pairs)]
        loaders = [DataLoader(d, batch_size=args.batch_size, collate_fn=d.collate_fn) for d in datasets]
        results.append(evaluate(*loaders, model, device))
        columns = len(results[-1]) // 3  # the last two of a task's columns are predictions and ids
        for number, task in enumerate((SST, PARA, STS), start=1):
            values, ids = results[-1][columns * number - 2 : columns * number]
            path = Path(getattr(args, f"{task.name}_{split}_out"))
            writable_directory(path.parent, f"the directory of --{task.name}_{split}_out")
            source = Source(Path(args.filepath), Path(paths[number - 1])) if hasattr(args, "filepath") else None
            write_predictions(path, task, Predictions(ids, np.empty(0), np.array(values), None), source)
    return tuple(results)


def macro_f1(values: np.ndarray, labels: np.ndarray) -> float:
    """The mean over the classes of 2 TP / (2 TP + FP + FN)."""
    scores = []
    for c in np.union1d(values, labels):
        hits = np.sum((values == c) & (labels == c))
        scores.append(2 * hits / (np.sum(values == c) + np.sum(labels == c)))
    return float(np.mean(scores))


def _asker(model: Any, task: Task) -> Callable[..., Tensor]:
    """The starter's method that returns this task's logits."""
    names = {"sst": "predict_sentiment", "para": "predict_paraphrase", "sts": "predict_similarity"}
    return getattr(model, names[task.name])


@torch.no_grad()
def _run(
    loader: Loader,
    model: Any,
    ask: Callable[..., Tensor],
    device: torch.device,
    task: Task,
    keys: tuple[str, ...],
) -> list[list[Any]]:
    """The predictions from the logits of `ask` in the order of the loader, then the entries under `keys`."""
    model.eval()
    suffixes = ("_1", "_2") if task.is_pair else ("",)
    values: list[Any] = []
    others: list[list[Any]] = [[] for _ in keys]
    for batch in tqdm(loader, desc=task.name, leave=False, disable=None):
        inputs = [batch[f"{key}{suffix}"].to(device) for suffix in suffixes for key in ("token_ids", "attention_mask")]
        values += list(task.predicts.decode(ask(*inputs)).cpu().numpy())
        for kept, key in zip(others, keys, strict=True):
            kept += batch[key].tolist() if isinstance(batch[key], Tensor) else batch[key]
    return [values, *others]


# --- script -----------------------------------------------------------------------------------------------------------


def get_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(
        "evaluation.py",
        "Score the dev prediction files of a directory.",
        "python evaluation.py predictions/ --data data/sample",
        usage="[DIRECTORY] [--data DIRECTORY]",
        sections=("files",),
    )
    add = parser.section("files")
    add("predictions", type=Path, nargs="?", default=Path("predictions"), needs=ALWAYS, help="directory to score")
    add(
        "--data",
        type=Path,
        default=Path("data"),
        needs=ALWAYS,
        help="directory with the labeled files",
    )
    return parser.parse(argv)


def print_scores(found: dict[str, Found], scored: dict[str, Scored]) -> None:
    """Print for each dev file its score, run and age, and the scores of Part 2 together as well."""
    rows = [("file", "score [95% interval]", "run", "predicted")]
    for name, of in found.items():
        run, age = (of.origin.run, of.origin.age) if of.origin else ("unknown", "-")
        rows.append((of.path.name, str(score_interval(scored[name])), printable(run), age))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    part2 = {of.file.task.name: scored[name] for name, of in found.items() if of.file.part == "2"}
    if part2:
        low, high = overall_interval(part2)[1:]
        line = score_line({task: of_task.score for task, of_task in part2.items()})
        print(f"{line} | 95% interval of overall [{low:.3f}, {high:.3f}]")
    wanted = [file.task.name for file in PART_2_FILES.values() if file.split == "dev"]
    missing = [name for name in wanted if name not in part2]
    if part2 and missing:
        warn(f"no dev file of {', '.join(missing)} found, so the overall score is not the leaderboard's.")


def main() -> None:
    args = get_args()
    found = manifest.find_files(args.predictions, dev_files())
    if not found:
        raise InputError(f"{args.predictions}: must have one of {', '.join(dev_files())}; found none. Train first.")
    scored = {
        n: read_scored(of.path, of.file.task, args.data / of.file.task.filename("dev")) for n, of in found.items()
    }
    print_scores(found, scored)
    manifest.report_origins(found, args.data)


if __name__ == "__main__":
    run_script(main)
