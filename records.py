"""What a run has recorded, read back for reports: flags, epochs, dev predictions and their texts.

A record is read-only. A run may still be training, may have been killed, or may come from an older version: what is
missing is left out, and `notes` says so.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evaluation import read_logits
from flags import PROJECT
from intervals import Scored
from readers import read_examples
from runs import Run
from tasks import TASKS, Predictions, Task
from utils import InputError, parse_json, read_json, sha256_of


@dataclass(frozen=True)
class Record:
    """The records of one run."""

    folder: Path
    facts: Mapping[str, Any]  # of args.json
    epochs: list[dict[str, Any]]  # of log.jsonl
    finished: bool
    predictions: Mapping[str, Predictions] = field(default_factory=dict)  # for dev, by task
    predicted_at: str = "the best epoch"  # whose predictions they are
    before: Mapping[str, float] = field(default_factory=dict)  # figures before the first epoch, of pretrain.py
    ensemble: Mapping[str, Any] = field(default_factory=dict)  # of ensemble.json; empty for a run of its own
    notes: tuple[str, ...] = ()  # what could not be read

    @property
    def flags(self) -> Mapping[str, Any]:
        return self.facts["args"]

    @property
    def name(self) -> str:
        """The run's name; Part 1 has a directory per task inside that of its name."""
        folder = self.folder.resolve()
        return f"{folder.parent.name}/{folder.name}" if folder.name in TASKS else folder.name

    @property
    def is_fitted_on_dev(self) -> bool:
        """Whether an ensemble's weights were fitted on a part of the dev rows, so that these cannot score it."""
        return not str(self.ensemble.get("scored_on", "dev")).startswith("dev")

    @property
    def best(self) -> dict[str, Any]:
        """The log line of the best epoch so far."""
        return next(line for line in reversed(self.epochs) if line.get("best") or line is self.epochs[0])

    @property
    def tasks(self) -> list[Task]:
        """The tasks with dev predictions, in the order in which the suite lists them."""
        return [task for name, task in TASKS.items() if name in self.predictions]

    def scored(self, task: Task) -> Scored:
        found = self.predictions[task.name]
        return Scored(task.predicts, found.values, found.labels)

    @property
    def all_scored(self) -> dict[str, Scored]:
        return {task.name: self.scored(task) for task in self.tasks}


# --- reading ----------------------------------------------------------------------------------------------------------


def read_record(folder: Path) -> Record:
    """The records of a run that has logged at least one epoch, or of an ensemble."""
    run = Run.reopen(folder)
    facts, notes = run.facts, []
    predictions = _read_predictions(folder, notes)
    lines = _read_log(folder, notes)
    epochs = [line for line in lines if line["epoch"] > 0]
    if not epochs and not predictions:
        raise InputError(
            f"{folder}: must be a run that has logged an epoch, found none in log.jsonl. Wait for the end of its first "
            "epoch, or train it again."
        )
    before = next((line["scores"] for line in lines if line["epoch"] == 0), {})  # pretrain.py logs its start
    combined = folder / "ensemble.json"
    ensemble = read_json(combined, "JSON about an ensemble", "Combine its runs again.") if combined.is_file() else {}
    return Record(
        folder, facts, epochs, run.finished, predictions, before=before, ensemble=ensemble, notes=tuple(notes)
    )


def find_runs(folders: Iterable[Path]) -> list[Path]:
    """The directories of runs; one of Part 1's --name stands for the runs of its tasks."""
    found: list[Path] = []
    for folder in folders:
        inside = [folder / name for name in TASKS if (folder / name / "args.json").is_file()]
        found += inside if inside and not (folder / "args.json").is_file() else [folder]
    return list(dict.fromkeys(found))


def _read_log(folder: Path, notes: list[str]) -> list[dict[str, Any]]:
    path = folder / "log.jsonl"
    if not path.is_file():
        return []
    lines = path.read_bytes().decode("utf-8", "replace").splitlines()
    epochs = []
    for number, line in enumerate(lines, start=1):
        try:
            found = parse_json(line)
            _check_epoch(found)
        except ValueError as error:
            if number == len(lines):  # a killed process can leave a part of its last line
                notes.append(f"{path} line {number} is incomplete, so it is left out.")
                break
            raise InputError(f"{path} line {number}: must be an epoch's log, found {error}. Train again.") from error
        epochs.append(found)
    return epochs


TABLES = ("losses", "penalties", "train", "scores", "gradients")  # of a log line: numbers by name


def _check_epoch(line: dict[str, Any]) -> None:
    """Raise ValueError for a line that no version of this suite would write."""
    if not isinstance(line.get("epoch"), int) or not isinstance(line.get("seconds"), int | float):
        raise ValueError("no epoch and seconds")
    for name in TABLES:
        table = line.setdefault(name, {})
        if not isinstance(table, dict) or not all(isinstance(value, int | float) for value in table.values()):
            raise ValueError(f"{name} that is not a table of numbers")
    if not isinstance(line.get("memory"), int | None):
        raise ValueError("memory that is not a number")
    for name in ("curve", "cosines"):
        if not isinstance(line.setdefault(name, {}), dict):
            raise ValueError(f"{name} that is not a table")
    _check_columns(list(line["cosines"].values()))
    curve = line["curve"]
    if curve:
        steps, rates, losses = (curve.get(name) for name in ("step", "rates", "losses"))
        if not isinstance(rates, list) or len(rates) != 2 or not isinstance(losses, dict):
            raise ValueError("a curve without rates and losses")
        _check_columns([steps, *rates, *losses.values()])
        if any(len(column) != len(steps) for column in (*rates, *losses.values())) or min(steps, default=1) < 1:
            raise ValueError("a curve whose columns do not fit together")


def _check_columns(columns: list[Any]) -> None:
    for column in columns:
        if not isinstance(column, list) or not all(isinstance(value, int | float | None) for value in column):
            raise ValueError("a curve that is not a list of numbers")


def _read_predictions(folder: Path, notes: list[str]) -> dict[str, Predictions]:
    found = {}
    for name, task in TASKS.items():
        path = folder / f"{name}-dev.npz"
        if path.is_file():
            try:
                found[name] = read_logits(path, task, "Predict again.", labeled=True)
            except InputError as error:
                notes.append(str(error))
    return found


def dev_texts(record: Record, task: Task) -> dict[str, tuple[str, ...]] | None:
    """The texts of the run's dev file by id; None if the file is not there any more, or has changed."""
    given = record.flags.get(f"{task.name}_dev")
    path = Path(given if isinstance(given, str) else Path(str(record.flags.get("data", ""))) / task.filename("dev"))
    known = record.facts["data_sha256"].get(str(path))
    if not path.is_file() or known is None or sha256_of(path) != known:
        return None
    try:
        examples = read_examples(task, [path], labeled=True)
    except InputError:
        return None
    return dict(zip(examples.ids, zip(*examples.texts, strict=True), strict=True))


def worst_rows(task: Task, predictions: Predictions, count: int) -> list[int]:
    """The rows whose predictions are the most wrong, the worst first; rows that are right are not among them."""
    labels = torch.from_numpy(np.asarray(predictions.labels))
    wrong = task.predicts.mistakes(torch.from_numpy(predictions.logits), labels).numpy()
    order = np.argsort(-wrong, kind="stable")[:count]
    return [int(row) for row in order if wrong[row] > 0]


# --- recipes and papers -----------------------------------------------------------------------------------------------

SCORE = re.compile(r"(\w+) (-?\d?\.\d+)")


@dataclass(frozen=True)
class Paper:
    """A recipe's row in the table of a paper."""

    citation: str  # such as "A SMARTer minBERT" (Chue, Liu & Sahoo), table 1, row "Cross-Encoding"
    scores: dict[str, float]  # the paper's, on dev, by task and perhaps "overall"


def recipe_of(record: Record) -> str | None:
    """The first recipe on the run's command line, such as recipes/best.txt."""
    words = record.facts.get("command")
    names = [w[1:] for w in words if isinstance(w, str) and w.startswith("@")] if isinstance(words, list) else []
    return names[0] if names else None


def paper_of(record: Record) -> Paper | None:
    """The figures of the paper whose system the run's recipe follows; None if it is not a paper's."""
    recipe = recipe_of(record)
    path = (PROJECT / recipe).resolve() if recipe else PROJECT
    if not path.is_relative_to(PROJECT.resolve() / "recipes") or not path.is_file():
        return None
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    cited = [line.removeprefix("# Paper ").partition(", ")[2].rstrip(".") for line in lines if "# Paper " in line]
    scores = [line for line in lines if line.startswith("# Dev: ")]
    found = {name: float(value) for name, value in SCORE.findall(scores[0].partition(" (")[0])} if scores else {}
    return Paper(cited[0], found) if cited and found else None


# --- several runs -----------------------------------------------------------------------------------------------------

# Flags that do not change what is learned: where files are, how a run is saved and shown.
INCIDENTAL = re.compile(
    r"name|runs|predictions|resume|save_minutes|keep_state|report|tensorboard|log_gradients|dry_run|run|predict_only|"
    r"predict_train|eval_batch_size|pos_cache|\w+_(dev|test)_out"
)


def settings(record: Record) -> dict[str, str]:
    """The flags that can change the result, as text."""
    return {key: json.dumps(value) for key, value in record.flags.items() if not INCIDENTAL.fullmatch(key)}


def differing_flags(records: list[Record]) -> dict[str, list[str]]:
    """The flags in which runs differ, with each run's value; a run that is older than a flag has "-"."""
    tables = [settings(record) for record in records]
    keys = sorted(set().union(*tables))
    values = {key: [table.get(key, "-") for table in tables] for key in keys}
    return {key: [_plain(value) for value in row] for key, row in values.items() if len(set(row)) > 1}


def _plain(value: str) -> str:
    """A flag's value as one would type it."""
    if value == "-":
        return value
    found = json.loads(value)
    return " ".join(map(str, found)) if isinstance(found, list) else "not set" if found is None else str(found)


def by_recipe(records: list[Record]) -> list[list[Record]]:
    """Groups of runs on the same data that differ in their seed only; of each seed, the first run."""
    groups: dict[str, dict[Any, Record]] = {}
    for record in records:
        same = {key: value for key, value in settings(record).items() if key != "seed"}
        same |= {"data": sorted(map(str, record.facts["data_sha256"].items()))}
        groups.setdefault(json.dumps(same, sort_keys=True), {}).setdefault(str(record.flags.get("seed")), record)
    return [list(group.values()) for group in groups.values()]


def comparable(first: Predictions, second: Predictions) -> bool:
    """Whether two runs were scored on the same rows, in the same order."""
    return first.ids == second.ids and np.array_equal(first.labels, second.labels)
