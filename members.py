"""The runs that ensemble.py combines: their flags and logits, and the checks that they belong together."""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

from evaluation import read_logits
from flags import check_stored
from multitask_flags import SCORED, logits_remedy, parser
from runs import Run
from tasks import TASKS, Predictions
from utils import InputError, read_json, warn

PLAIN_DEV = "dev"  # what an ensemble is scored on if nothing was fitted or chosen on dev


class Member(NamedTuple):
    """The parts of a run that an ensemble reads."""

    folder: Path
    flags: dict[str, Any]
    data_sha256: dict[str, str]
    splits: dict[str, dict[str, Predictions]]  # by task, then dev, test and, if it was predicted, train


def read_member(folder: Path, wanted: list[str] | None) -> Member:
    facts = Run.reopen(folder).facts
    flags = facts["args"]
    tasks = flags.get("tasks")
    names = [name for name in TASKS if name in tasks] if isinstance(tasks, list) else []
    if not names or not all(isinstance(flags.get(f"{name}_{split}"), str) for name in names for split in SCORED):
        raise InputError(f"{folder}: must be a run of multitask_classifier.py or ensemble.py. Choose another.")
    known = flags | {"tasks": names}  # a run may have tasks that are not registered here
    check_stored(parser(), known, folder / "args.json")
    splits: dict[str, dict[str, Predictions]] = {}
    for name in (n for n in names if wanted is None or n in wanted):
        paths = {split: folder / f"{name}-{split}.npz" for split in ("dev", "test", "train")}
        there = {split: path for split, path in paths.items() if split != "train" or path.is_file()}
        splits[name] = {
            split: read_logits(
                path,
                TASKS[name],
                logits_remedy(folder, train=split == "train"),
                labeled=split != "test",
            )
            for split, path in there.items()
        }
    return Member(folder, flags, facts["data_sha256"], splits)


def read_members(args: argparse.Namespace) -> list[Member]:
    if len(args.members) < 2:
        raise InputError(f"an ensemble needs at least two runs, found {args.members[0]} alone. Name another.")
    places = [folder.resolve() for folder in args.members]
    twice = [folder for i, folder in enumerate(args.members) if places[i] in places[:i]]
    if twice:
        raise InputError(f"{twice[0]}: must be named once, found it twice. Remove one.")
    members = [read_member(folder, args.tasks) for folder in args.members]
    absent = [name for name in args.tasks or () if not having(members, name)]
    if absent:
        raise InputError(f"--tasks {absent[0]}: must be a task of one of the runs, found it in none. Leave it out.")
    for member in members:
        if scored_on := chosen_on_dev(member.folder):
            warn(f"{member.folder}: fitted or chosen on dev ({scored_on}), so expect a lower score on test.")
    idle = [member.folder for member in members if not member.splits]
    if idle:
        raise InputError(f"{idle[0]}: must have one of --tasks {' '.join(args.tasks)}, found none. Leave it out.")
    for name in tasks_of(members):
        check_same_data(name, having(members, name))
    return members


def chosen_on_dev(folder: Path) -> str:
    """The rows that an ensemble was scored on if its weights were fitted or chosen on dev; empty for any other run."""
    path = folder / "ensemble.json"
    if not path.is_file():
        return ""
    rule, remedy = "JSON with what the ensemble was scored on", "Combine its runs again."
    scored_on = read_json(path, rule, remedy).get("scored_on")
    if not isinstance(scored_on, str):
        raise InputError(f"{path}: must be {rule}; scored_on must be text, found {scored_on!r:.80}. {remedy}")
    return "" if scored_on == PLAIN_DEV else scored_on


def having(members: list[Member], task: str) -> list[Member]:
    return [member for member in members if task in member.splits]


def tasks_of(members: list[Member]) -> list[str]:
    return [name for name in TASKS if having(members, name)]


def check_same_data(task: str, members: list[Member]) -> None:
    """Refuse runs whose dev or test rows of a task differ."""
    first, *others = members
    for other in others:
        for split in ("dev", "test"):
            must = f"{other.folder}: must have the {task} {split} rows of {first.folder}, found"
            differs = difference(first.splits[task][split], other.splits[task][split])
            if differs:
                raise InputError(f"{must} {differs}. Train both with the same files.")
            if hash_of(first, task, split) != hash_of(other, task, split):
                raise InputError(f"{must} a file with another sha256. Train both with the same files.")


def difference(expected: Predictions, other: Predictions) -> str:
    """The first row in which the data of two runs differ; empty if none does."""
    if len(other.ids) != len(expected.ids):
        return f"{len(other.ids)} rows, not {len(expected.ids)}"
    for i, (theirs, ours) in enumerate(zip(expected.ids, other.ids, strict=True)):
        if ours != theirs:
            return f"id {ours!r} in row {i + 1}, not {theirs!r}"
        if expected.labels is not None and other.labels[i] != expected.labels[i]:
            return f"label {other.labels[i]} of id {ours!r}, not {expected.labels[i]}"
    return ""


def hash_of(member: Member, task: str, split: str) -> str | None:
    return member.data_sha256.get(str(member.flags[f"{task}_{split}"]))


def common_splits(task: str, members: list[Member]) -> list[str]:
    """dev, test and, if every run has predicted the same training rows, train."""
    given = [member.splits[task]["train"] for member in members if "train" in member.splits[task]]
    if not given:
        return ["dev", "test"]
    absent = [str(member.folder) for member in members if "train" not in member.splits[task]]
    problems = [f"{folder} has none" for folder in absent]
    differences = (difference(given[0], other) for other in given[1:])
    problems += [f"the runs differ: {differs}" for differs in differences if differs]
    if problems:
        warn(f"{task}: the training rows are left out, so the ensemble cannot be a teacher; {problems[0]}.")
        return ["dev", "test"]
    return ["dev", "test", "train"]
