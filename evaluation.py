"""One way to predict, one to score, one to write prediction files; the starter's model_eval_* are thin wrappers.

    python evaluation.py predictions/ --data data

scores the dev files of a directory against the labels.
"""

import argparse
import re
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from datasets import Split, read_examples, sorted_rows
from tasks import TASKS, Batch, Output, Predictions, Task
from utils import ArgumentParser, InputError, Precision, atomic_path, run_script, warn, write_text


class Predictor(Protocol):
    """What the loop and the evaluation ask of a model; `vectors` are what its frozen part would give."""

    def vectors(self, batch: Batch) -> tuple[Tensor, ...]: ...
    def predict(self, batch: Batch) -> Output: ...
    def eval(self) -> "Predictor": ...


# --- predict ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _in_file_order(
    compute: Callable[[Batch], Iterable[Tensor]], split: Split, batch_size: int, precision: Precision, label: str
) -> tuple[Tensor, ...]:
    """compute(batch) -> tensors (B, ...) for every row, gathered on the CPU in the order of the file."""
    batches = sorted_rows(split.lengths, batch_size)
    results = []
    for rows in tqdm(batches, desc=label, leave=False, disable=None):
        with precision.autocast():
            results.append(tuple(t.float().cpu() for t in compute(split.batch(rows).to(precision.device))))
    order = torch.cat(batches).argsort()
    return tuple(torch.cat(parts)[order] for parts in zip(*results, strict=True))


def predict(model: Predictor, split: Split, batch_size: int, precision: Precision) -> Predictions:
    model.eval()
    (logits,) = _in_file_order(lambda b: (model.predict(b).logits,), split, batch_size, precision, split.task.name)
    labels = None if split.labels is None else split.labels.numpy()
    return Predictions(split.ids, logits.numpy(), split.task.decode(logits).numpy(), labels)


def keep_vectors(model: Predictor, split: Split, batch_size: int, precision: Precision) -> Split:
    """Runs the frozen encoder once over a split, in eval mode, and keeps what it gives."""
    model.eval()
    label = f"encode {split.task.name}"
    return split.with_vectors(_in_file_order(model.vectors, split, batch_size, precision, label))


# --- score ------------------------------------------------------------------------------------------------------------


def score(task: Task, predictions: Predictions) -> float:
    return task.score(predictions.values, predictions.labels)


def overall(scores: dict[str, float]) -> float:
    """The 2024 leaderboard's, by which runs are chosen: the mean over the tasks, a correlation r as (r + 1) / 2."""
    return float(np.mean([(s + 1) / 2 if TASKS[t].kind == "number" else s for t, s in scores.items()]))


def overall_2023(scores: dict[str, float]) -> float:
    """The 2023 leaderboard's: the plain mean over the tasks."""
    return float(np.mean(list(scores.values())))


def score_line(scores: dict[str, float]) -> str:
    parts = [f"{task} {value:.3f}" for task, value in scores.items()]
    return " | ".join([*parts, f"overall {overall(scores):.4f} (2023's: {overall_2023(scores):.4f})"])


# --- prediction files -------------------------------------------------------------------------------------------------


def write_predictions(path: Path, task: Task, predictions: Predictions) -> None:
    """Byte for byte the starter's format: a header, then `id , value ` lines."""
    rows = (f"{i} , {v} \n" for i, v in zip(predictions.ids, predictions.values, strict=True))
    write_text(path, task.csv_header + "".join(rows))


def write_logits(path: Path, predictions: Predictions) -> None:
    """What an ensemble needs of a run: ids, logits and, of dev rows, labels."""
    arrays = {"ids": np.array(predictions.ids), "logits": predictions.logits}
    if predictions.labels is not None:
        arrays["labels"] = predictions.labels
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)


def read_logits(path: Path, task: Task, *, labeled: bool) -> Predictions:
    """What `write_logits` wrote; anything but a row of finite logits (and a label) for each id is an error."""
    rows = " --predict_train" if path.stem.endswith("-train") else ""
    remedy = f"Predict again: multitask_classifier.py --predict_only{rows} --run {path.parent}"
    if (path.parent / "ensemble.json").is_file():
        remedy = f"Predict with its runs{' and --predict_train' * bool(rows)}, then combine them again."
    try:
        with np.load(path, allow_pickle=False) as file:
            ids, logits = list(map(str, file["ids"].tolist())), file["logits"].astype(np.float32)
            labels = file["labels"] if labeled else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, EOFError, BadZipFile, zlib.error) as error:
        reason = getattr(error, "strerror", None) or f"it is not an .npz file with ids and logits ({error!s:.60})"
        raise InputError(f"{path}: cannot be read as logits; {reason}. {remedy}") from error
    shape_fits = logits.shape == (len(ids), task.num_outputs)
    if not shape_fits or not np.isfinite(logits).all():
        found = "NaN or infinity" if shape_fits else f"an array of shape {logits.shape}"
        logit = f"{task.num_outputs} finite logit{'s' * (task.num_outputs > 1)}"
        raise InputError(f"{path}: must hold {logit} for each of its {len(ids)} ids, found {found}. {remedy}")
    if repeated := len(ids) - len(set(ids)):
        raise InputError(f"{path}: ids must be unique, found {repeated} of {len(ids)} repeated. {remedy}")
    if labels is not None and labels.shape != (len(ids),):
        raise InputError(f"{path}: must have a label for each of {len(ids)} ids, found {labels.size}. {remedy}")
    return Predictions(ids, logits, task.decode(torch.from_numpy(logits)).numpy(), labels)


class PredictionFile(NamedTuple):
    part: str  # of the handout
    task: Task
    split: str  # dev or test


# The handout's list: Part 1's eight files, Part 2's six.
PREDICTION_FILES = {
    f"{option}-{name}-{split}-out.csv": PredictionFile("1", TASKS[name], split)
    for option in ("pretrain", "finetune")
    for name in ("sst", "cfimdb")
    for split in ("dev", "test")
} | {
    f"{name}-{split}-output.csv": PredictionFile("2", TASKS[name], split)
    for name in ("sst", "para", "sts")
    for split in ("dev", "test")
}
DEV_FILES = {name: file.task for name, file in PREDICTION_FILES.items() if file.split == "dev"}

# An id may hold anything, a comma too: the value is what follows the last ` , `.
ROW = re.compile(r"(?P<id>.+) , (?P<value>[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?) ", re.ASCII | re.IGNORECASE)


def read_predictions(path: Path, task: Task) -> dict[str, float]:
    """id -> value of a prediction file; anything but the starter's format is an error that names the line."""
    found, problems = _parse_predictions(path, task)
    _raise_first(problems)
    return found


def compare_ids(path: Path, found: Iterable[str], data: Path, expected: Iterable[str]) -> None:
    """Every id of the data file exactly once, and no other."""
    _raise_first(_id_problems(path, found, data, expected))


def check_file(path: Path, task: Task, data: Path, *, labeled: bool) -> tuple[float | None, list[str]]:
    """(score, problems): all that is wrong with a prediction file, a line each; a score where labels tell one."""
    problems: list[str] = []
    examples = found = None
    try:
        examples = read_examples(task, [data], labeled=labeled)
    except InputError as error:
        problems.append(str(error))
    try:
        found, in_file = _parse_predictions(path, task)
        problems += in_file
    except InputError as error:
        problems.append(str(error))
    if examples is not None and found is not None:
        for row in examples.skipped:
            warn(f"{row}. Skipped, so no prediction is expected.")
        problems += _id_problems(path, found, data, examples.ids)
    if problems or not labeled:
        return None, problems
    return task.score(np.array([found[i] for i in examples.ids]), np.array(examples.labels)), []


def score_file(path: Path, task: Task, data: Path) -> float:
    value, problems = check_file(path, task, data, labeled=True)
    _raise_first(problems)
    return value


def _parse_predictions(path: Path, task: Task) -> tuple[dict[str, float], list[str]]:
    """id -> value, and what is wrong, one line for each kind of mistake: a file can have thousands of one kind."""
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InputError(f"{path}: cannot be read as a prediction file; {reason}. Predict again.") from error
    if not text:
        raise InputError(f"{path}: must be a prediction file, found an empty file. Predict again.")
    header, *rows = text.split("\n")
    problems: dict[str, list[str]] = {"header": [], "end": [], "row": [], "value": [], "twice": []}
    if header != task.csv_header.rstrip("\n"):
        problems["header"].append(f"{path} line 1: must be {task.csv_header[:-1]!r}, found {header!r}")
    if rows and not rows[-1]:
        rows.pop()
    else:
        problems["end"].append(f"{path} line {len(rows) + 1}: must end in a newline, found the end of the file")
    found: dict[str, float] = {}
    places: dict[str, int] = {}
    for line, row in enumerate(rows, start=2):
        place = f"{path} line {line}"
        parts = ROW.fullmatch(row)
        if not parts or not np.isfinite(float(parts["value"])):
            problems["row"].append(f"{place}: must be 'id , number ', found {row!r}")
            continue
        identifier = parts["id"].strip().lower()  # as the data files' ids are read
        if identifier in places:
            other = places[identifier]
            problems["twice"].append(f"{place}: ids must be unique, {identifier!r} stands in line {other} too")
        if task.kind != "number":
            try:
                task.parse_label(parts["value"])
            except ValueError as error:
                problems["value"].append(f"{place}: the prediction {error}")
        places[identifier] = line
        found[identifier] = float(parts["value"])
    return found, [_summary(lines) for lines in problems.values() if lines]


def _summary(problems: list[str]) -> str:
    more = f" ({len(problems)} lines of this kind)" if len(problems) > 1 else ""
    return f"{problems[0]}{more}. Predict again."


def _id_problems(path: Path, found: Iterable[str], data: Path, expected: Iterable[str]) -> list[str]:
    found, expected = set(found), set(expected)
    return [
        f"{path}: must have every id of {data} exactly once and no other; {len(ids)} {which}, such as {min(ids)}. "
        "Predict again with this data."
        for which, ids in (("missing", expected - found), ("unknown", found - expected))
        if ids
    ]


def _raise_first(problems: list[str]) -> None:
    if problems:
        raise InputError(problems[0])


# --- the starter's functions, in the order of 2024 --------------------------------------------------------------------


def model_eval_sst(dataloader: Iterable[dict[str, Any]], model: Any, device: torch.device) -> tuple:
    """(accuracy, macro F1, predictions, labels, sentences, ids)"""
    values, ids, labels, sentences = _run(dataloader, model, device, "sst", ("sent_ids", "labels", "sents"))
    scored = np.array(values), np.array(labels)
    return TASKS["sst"].score(*scored), macro_f1(*scored), values, labels, sentences, ids


def model_eval_multitask(
    sentiment_dataloader: Iterable[dict[str, Any]],
    paraphrase_dataloader: Iterable[dict[str, Any]],
    sts_dataloader: Iterable[dict[str, Any]],
    model: Any,
    device: torch.device,
) -> tuple:
    """(sst accuracy, predictions, ids, para accuracy, predictions, ids, sts correlation, predictions, ids)"""
    results: list[Any] = []
    loaders = {"sst": sentiment_dataloader, "para": paraphrase_dataloader, "sts": sts_dataloader}
    for name, loader in loaders.items():
        values, ids, labels = _run(loader, model, device, name, ("sent_ids", "labels"))
        results += [TASKS[name].score(np.array(values), np.array(labels)), values, ids]
    return tuple(results)


def model_eval_test_multitask(
    sentiment_dataloader: Iterable[dict[str, Any]],
    paraphrase_dataloader: Iterable[dict[str, Any]],
    sts_dataloader: Iterable[dict[str, Any]],
    model: Any,
    device: torch.device,
) -> tuple:
    """(sst predictions, ids, para predictions, ids, sts predictions, ids)"""
    results: list[Any] = []
    loaders = {"sst": sentiment_dataloader, "para": paraphrase_dataloader, "sts": sts_dataloader}
    for name, loader in loaders.items():
        results += _run(loader, model, device, name, ("sent_ids",))
    return tuple(results)


def macro_f1(values: np.ndarray, labels: np.ndarray) -> float:
    """The mean over the classes of 2 TP / (2 TP + FP + FN)."""
    found = []
    for c in np.union1d(values, labels):
        hits = np.sum((values == c) & (labels == c))
        found.append(2 * hits / (np.sum(values == c) + np.sum(labels == c)))
    return float(np.mean(found))


@torch.no_grad()
def _run(
    loader: Iterable[dict[str, Any]], model: Any, device: torch.device, name: str, keys: tuple[str, ...]
) -> list[list[Any]]:
    """Predictions by the model's predict_<task>, in the order of the loader, then the batches' entries under keys."""
    model.eval()
    ask = {"sst": "predict_sentiment", "para": "predict_paraphrase", "sts": "predict_similarity"}[name]
    suffixes = ("",) if name == "sst" else ("_1", "_2")
    values: list[Any] = []
    others: list[list[Any]] = [[] for _ in keys]
    for batch in tqdm(loader, desc=name, leave=False, disable=None):
        inputs = [batch[f"{key}{suffix}"].to(device) for suffix in suffixes for key in ("token_ids", "attention_mask")]
        values += list(TASKS[name].decode(getattr(model, ask)(*inputs)).cpu().numpy())
        for kept, key in zip(others, keys, strict=True):
            kept += batch[key].tolist() if isinstance(batch[key], Tensor) else batch[key]
    return [values, *others]


# --- script -----------------------------------------------------------------------------------------------------------


def get_args() -> argparse.Namespace:
    parser = ArgumentParser(prog="evaluation.py", description="Scores the dev prediction files of a directory.")
    parser.add_argument("predictions", type=Path, nargs="?", default=Path("predictions"), help="their directory")
    parser.add_argument("--data", type=Path, default=Path("data"), help="directory with the labels: the course's files")
    return parser.parse_args()


def print_scores(scores: dict[str, float]) -> None:
    """The scores by file name; those of Part 2 together as well."""
    for name, value in scores.items():
        print(f"{name:28} {value:.4f}")
    part2 = {DEV_FILES[name].name: value for name, value in scores.items() if PREDICTION_FILES[name].part == "2"}
    if part2:
        print(score_line(part2))
    if 0 < len(part2) < 3:
        warn(f"only {len(part2)} of the three files of Part 2 found.")


def main() -> None:
    args = get_args()
    there = {name: task for name, task in DEV_FILES.items() if (args.predictions / name).is_file()}
    if not there:
        raise InputError(f"{args.predictions}: must hold one of {', '.join(DEV_FILES)}; found none. Train first.")
    print_scores({n: score_file(args.predictions / n, t, args.data / t.filename("dev")) for n, t in there.items()})


if __name__ == "__main__":
    run_script(main)
