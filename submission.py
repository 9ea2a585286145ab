"""The prediction files of a submission: their names, their format, and whether they belong to the data.

What is written is byte for byte the starter's format. What is read may have been through an editor or a spreadsheet:
rows in any order, line ends of Windows, a byte order mark and no final newline are read all the same.
"""

import functools
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from intervals import Scored
from readers import read_examples
from tasks import PARA, SST, STS, TASKS, Task
from utils import InputError, sha256_of, warn

DATA = Path(__file__).parent / "data"  # where setup.sh puts the course's files
SAMPLE = DATA / "sample"

# --- names ------------------------------------------------------------------------------------------------------------


class PredictionFile(NamedTuple):
    part: str  # of the handout
    task: Task
    split: str  # dev or test


OPTIONS = {"pretrain": "last-linear-layer", "finetune": "full-model"}  # --option, and its later name --fine-tune-mode


def part_1_name(option: str, task: str, split: str) -> str:
    return f"{option}-{task}-{split}-out.csv"


# The files that the handout asks for: eight in Part 1, six in Part 2.
PART_1_FILES = {
    part_1_name(option, name, split): PredictionFile("1", TASKS[name], split)
    for option in OPTIONS
    for name in ("sst", "cfimdb")
    for split in ("dev", "test")
}
PART_2_FILES = {
    f"{task.name}-{split}-output.csv": PredictionFile("2", task, split)
    for task in (SST, PARA, STS)
    for split in ("dev", "test")
}
PREDICTION_FILES = PART_1_FILES | PART_2_FILES
# Part 1 has other names in later years. Either name is read; a file that has only one name is not listed here.
LATER_NAMES = {
    part_1_name(option, file.task.name, file.split): part_1_name(later, file.task.name, file.split)
    for option, later in OPTIONS.items()
    for file in PART_1_FILES.values()
}


def dev_files() -> dict[str, PredictionFile]:
    """The dev files that the scripts write, by name: those of the handout, and Part 2's of every other task."""
    others = {f"{task.name}-dev-output.csv": PredictionFile("2", task, "dev") for task in TASKS.values()}
    return {name: file for name, file in (PREDICTION_FILES | others).items() if file.split == "dev"}


def of_one_run(name: str) -> str:
    """The files that one training writes: those with the same text here should be from one run."""
    file = dev_files().get(name) or PREDICTION_FILES[name]
    option = name.partition("-")[0]
    return f"the files of {file.task.name} with --option {option}" if file.part == "1" else f"Part {file.part}'s files"


# --- format -----------------------------------------------------------------------------------------------------------

# An id may contain anything, even a comma: the value is what follows the last ` , `.
ROW = re.compile(r"(?P<id>.+) , (?P<value>[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?) ", re.ASCII | re.IGNORECASE)


def check_file(path: Path, task: Task, data: Path, *, labeled: bool) -> tuple[Scored | None, list[str]]:
    """The predictions of a file with their labels, if there are labels, and all its problems, one line each."""
    problems: list[str] = []
    examples = values = None
    try:
        examples = read_examples(task, [data], labeled=labeled)
    except InputError as error:
        problems.append(str(error))
    try:
        values, in_file = parse_predictions(path, task)
        problems += in_file
    except InputError as error:
        problems.append(str(error))
    if examples is not None and values is not None:
        for row in examples.skipped:
            warn(f"{row}. Skipped, so no prediction is expected.")
        problems += _id_problems(path, set(values), data, set(examples.ids))
    if problems or not labeled:
        return None, [str(InputError(problem)) for problem in problems]  # one bounded line each, whatever was found
    return Scored(task.predicts, np.array([values[i] for i in examples.ids]), np.array(examples.labels)), []


def read_scored(path: Path, task: Task, data: Path) -> Scored:
    """The predictions of a dev file with their labels; its first problem is an error."""
    scored, problems = check_file(path, task, data, labeled=True)
    if problems:
        raise InputError(problems[0])
    return scored


def parse_predictions(path: Path, task: Task) -> tuple[dict[str, float], list[str]]:
    """The value of each id, and one line per kind of mistake: a file can have thousands of one kind."""
    header, *rows = _lines(path)
    problems: dict[str, list[str]] = {"header": [], "row": [], "value": [], "twice": []}
    if header != task.csv_header.rstrip("\n"):
        problems["header"].append(f"{path} line 1: must be {task.csv_header[:-1]!r}, found {header!r}")
    values: dict[str, float] = {}
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
            problems["twice"].append(f"{place}: ids must be unique, {identifier!r} is in line {other} too")
        try:
            task.predicts.parse_prediction(parts["value"])
        except ValueError as error:
            problems["value"].append(f"{place}: the prediction {error}")
        places[identifier] = line
        values[identifier] = float(parts["value"])
    return values, [_summary(lines) for lines in problems.values() if lines]


def _lines(path: Path) -> list[str]:
    """The lines of a prediction file without their ends, whatever wrote it."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InputError(f"{path}: cannot be read as a prediction file; {reason}. Predict again.") from error
    if not text:
        raise InputError(f"{path}: must be a prediction file, found an empty file. Predict again.")
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]  # an id may have other line ends


def _summary(problems: list[str]) -> str:
    more = f" ({len(problems)} lines of this kind)" if len(problems) > 1 else ""
    return f"{problems[0]}{more}. Predict again."


# --- ids --------------------------------------------------------------------------------------------------------------


def _id_problems(path: Path, found: set[str], data: Path, expected: set[str]) -> list[str]:
    rule = f"{path}: must have every id of {data} exactly once and no other"
    if 2 * len(found & expected) < len(found) and (others := whose_ids(found, data)):
        return [f"{rule}; {others}. Predict again with {data}."]
    return [
        f"{rule}; {len(ids)} {which}, such as {min(ids)}. Predict again with this data."
        for which, ids in (("missing", expected - found), ("unknown", found - expected))
        if ids
    ]


def whose_ids(ids: set[str], wanted: Path) -> str:
    """The data file that most of the ids belong to, in words; empty if no file has at least half of them.

    wanted: the data file that they should belong to. Looked for beside it, in the project's data/ and its sample data.
    """
    counts = {file: len(ids & _ids_in(*file)) for file in _data_files(wanted.parent)}
    file = max(counts, key=counts.get, default=None)
    if file is None or 2 * counts[file] < max(1, len(ids)):
        return ""
    task, split, path, _ = file
    number = "its ids are" if counts[file] == len(ids) else f"{counts[file]} of its {len(ids)} ids are"
    sample = is_sample(path) and not is_sample(wanted)
    remark = ", the project's sample data, whose ids are on no leaderboard" if sample else ""
    return f"{number} those of {path} ({task.name} {split}){remark}"


def _data_files(folder: Path) -> list[tuple[Task, str, Path, int]]:
    """The data files of a directory and of the project: task, split, path, and when the file was changed."""
    places = {place.resolve(): place for place in (SAMPLE, DATA, folder)}  # the name as it was given counts
    files = [
        (task, split, place / task.filename(split))
        for place in reversed(places.values())
        for task in TASKS.values()
        for split in ("dev", "test", "train")
    ]
    return [(*file, file[-1].stat().st_mtime_ns) for file in files if file[-1].is_file()]


@functools.lru_cache(maxsize=64)  # the files of a submission are compared with the same data files
def _ids_in(task: Task, split: str, path: Path, changed: int) -> set[str]:
    try:
        return set(read_examples(task, [path], labeled=False, repeated_ids=True).ids)
    except InputError:  # a damaged file elsewhere is no problem of this one
        return set()


def is_sample(path: Path) -> bool:
    """Whether a data file is one of the project's sample data, or a copy of it."""
    sample = SAMPLE / path.name
    if not sample.is_file() or not path.is_file():
        return False
    return path.samefile(sample) or (
        path.stat().st_size == sample.stat().st_size and sha256_of(path) == sha256_of(sample)
    )
