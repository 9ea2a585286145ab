"""The audit of a directory of data, `python datasets.py data/`: what is in the files, and what may be wrong with them.

Two rows are exact duplicates if their texts are equal. They are normalized duplicates if their texts are equal without
case, white space, punctuation and invisible characters and, for pairs, in either order: such rows are the same to a
reader. A row of dev or test that is in train as well is seen in training, which flatters the score.
"""

import argparse
import functools
import itertools
import json
import textwrap
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from flags import ALWAYS, ArgumentParser, number
from readers import Examples, read_examples
from tasks import TASKS, Task
from utils import InputError, atomic_path, printable, warn, write_text

SPLITS = ("train", "dev", "test")
PERCENTILES = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
CHUNK = 20_000  # rows tokenized at a time: the tokenizer's own objects are far larger than a row
GET_DATA = "Get the course's data with: source setup.sh --course-data. The sample data is in data/sample."
EXAMPLES = 3  # of duplicates, in the JSON


class Counts(Protocol):
    """A tokenizer."""

    max_length: int

    def count_tokens(self, sentences: list[str]) -> list[int]: ...


# --- equal texts ------------------------------------------------------------------------------------------------------


class _Removed(dict):
    """A table for str.translate: removes punctuation, white space and invisible characters; computed as needed."""

    def __missing__(self, code: int) -> int | None:
        category = unicodedata.category(chr(code))
        self[code] = None if category[0] in "PZ" or category in ("Cc", "Cf") else code
        return self[code]


REMOVED = _Removed()


def normalized(text: str) -> str:
    """The text without case, white space and punctuation; a text that has nothing else stays as it is."""
    return unicodedata.normalize("NFKC", text).casefold().translate(REMOVED) or text


Key = tuple[str, ...]  # what is equal for equal rows


def exact_keys(examples: Examples) -> list[Key]:
    return list(zip(*examples.texts, strict=True))


def normalized_keys(examples: Examples) -> list[Key]:
    columns = [list(map(normalized, column)) for column in examples.texts]
    return [tuple(sorted(texts)) for texts in zip(*columns, strict=True)]


KEYS: dict[str, Callable[[Examples], list[Key]]] = {"exact": exact_keys, "normalized": normalized_keys}


# --- one file ---------------------------------------------------------------------------------------------------------


class Audited(NamedTuple):
    """A file and what was found in it."""

    task: Task
    split: str
    path: Path
    rows: int
    facts: dict[str, Any]  # for the JSON
    keys: dict[str, list[Key]]  # of every row
    lengths: np.ndarray  # (rows,), tokens of a row


def audit_file(task: Task, split: str, path: Path, tokenizer: Counts) -> Audited:
    examples = read_examples(task, [path], labeled=split != "test", repeated_ids=True)
    keys = {name: keys_of(examples) for name, keys_of in KEYS.items()}
    lengths, longest = token_lengths(examples, tokenizer)
    facts = {
        "rows": len(examples),
        "skipped": dict(Counter(reason_of(row, path) for row in examples.skipped)),
        "repeated_ids": len(examples) - len(set(examples.ids)),
        "labels": {} if examples.labels is None else task.predicts.label_counts(np.array(examples.labels)),
        "tokens": {name: int(np.percentile(lengths, at)) for name, at in PERCENTILES.items()},
        "truncated": int((lengths > tokenizer.max_length).sum()),
        "truncated_apart": int((longest > tokenizer.max_length).sum()),
        "duplicates": {name: duplicates(of_rows, examples.labels) for name, of_rows in keys.items()},
    }
    return Audited(task, split, path, len(examples), facts, keys, lengths)


def reason_of(skipped: str, path: Path) -> str:
    """Why a row was skipped, without its place: `FILE line N: reason`."""
    return skipped.removeprefix(str(path)).partition(": ")[2]


def token_lengths(examples: Examples, tokenizer: Counts) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of each row, pairs joined as [CLS] a [SEP] b [SEP]; and those of each row's longest text."""
    columns = [
        [n for start in range(0, len(column), CHUNK) for n in tokenizer.count_tokens(column[start : start + CHUNK])]
        for column in examples.texts
    ]
    each = np.array(columns)  # (columns, rows), each with [CLS] and [SEP]
    return each.sum(axis=0) - (len(each) - 1), each.max(axis=0)


def duplicates(keys: list[Key], labels: list[int | float] | None) -> dict[str, Any]:
    """Rows that repeat an earlier one, and groups of equal rows whose labels differ."""
    counts = Counter(keys)
    repeated = [key for key, count in counts.items() if count > 1]
    found: dict[str, Any] = {"rows": len(keys) - len(counts), "examples": repeated[:EXAMPLES]}
    if labels is not None:
        of_key: dict[Key, set[int | float]] = {key: set() for key in repeated}
        for key, label in zip(keys, labels, strict=True):
            if key in of_key:
                of_key[key].add(label)
        found["conflicting_labels"] = sum(len(different) > 1 for different in of_key.values())
    return found


# --- all files --------------------------------------------------------------------------------------------------------


def audit_directory(folder: Path, tokenizer: Counts) -> tuple[list[Audited], list[Path], list[InputError]]:
    """The audited files, the missing files, and what is wrong with files that cannot be read."""
    audited, missing, errors = [], [], []
    for task in TASKS.values():
        for split in SPLITS:
            path = folder / task.filename(split)
            if not path.exists():
                missing.append(path)
                continue
            try:
                audited.append(audit_file(task, split, path, tokenizer))
            except InputError as error:
                errors.append(error)
    return audited, missing, errors


def overlaps(audited: list[Audited]) -> Iterator[dict[str, Any]]:
    """For two splits of a task, the rows of the later one that are in the earlier one too."""
    for first, second in itertools.combinations(audited, 2):
        if first.task != second.task:
            continue
        shared = {}
        for name, keys in second.keys.items():
            known = set(first.keys[name])
            shared[name] = [key for key in keys if key in known]
        yield {
            "task": first.task.name,
            "splits": [first.split, second.split],
            "rows": second.rows,
            **{name: len(keys) for name, keys in shared.items()},
            "examples": shared["normalized"][:EXAMPLES],
        }


def as_json(
    audited: list[Audited], shared: list[dict[str, Any]], missing: list[Path], model: str, max_length: int
) -> str:
    files = [{"file": str(a.path), "task": a.task.name, "split": a.split} | a.facts for a in audited]
    facts = {
        "model": model,
        "max_length": max_length,
        "files": files,
        "overlaps": shared,
        "missing": list(map(str, missing)),
    }
    return json.dumps(facts, indent=2, ensure_ascii=False) + "\n"


# --- tables -----------------------------------------------------------------------------------------------------------


def print_table(rows: list[list[Any]], left: int = 2) -> None:
    """Print rows of cells in columns; the first `left` columns are flush left."""
    text = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*text, strict=True)]
    for row in text:
        cells = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        print("  ".join(cells).rstrip())


def print_audit(audited: list[Audited], shared: list[dict[str, Any]], model: str, max_length: int) -> None:
    print(f"tokens: {model}'s, with [CLS] and [SEP], pairs joined; cut: rows that --max_length {max_length} truncates")
    print("repeats: rows whose text is in the file before, exactly | normalized; conflicts: texts with several labels")
    print_table([FILE_HEADER, *map(file_row, audited)])
    if labels := [label_row(a) for a in audited if a.facts["labels"]]:
        print("\nlabels")
        print_table(labels, left=3)
    if shared:
        print("\nrows of the second split that are in the first too")
        print_table([OVERLAP_HEADER, *map(overlap_row, shared)])


OVERLAP_HEADER = ["task", "splits", "rows", "exact", "normalized", "share"]


def overlap_row(of: dict[str, Any]) -> list[Any]:
    counts = [of["rows"], of["exact"], of["normalized"]]
    return [of["task"], " / ".join(of["splits"]), *counts, f"{of['normalized'] / of['rows']:.1%}"]


FILE_HEADER = ["task", "split", "rows", "skipped", *PERCENTILES, "cut", "repeats", "conflicts"]


def file_row(audited: Audited) -> list[Any]:
    facts = audited.facts
    repeats = facts["duplicates"]
    return [
        audited.task.name, audited.split, audited.rows, sum(facts["skipped"].values()), *facts["tokens"].values(),
        facts["truncated"], f"{repeats['exact']['rows']} | {repeats['normalized']['rows']}",
        repeats["normalized"].get("conflicting_labels", "-"),
    ]  # fmt: skip


def label_row(audited: Audited) -> list[str]:
    shares = [f"{name} {count / audited.rows:.1%}" for name, count in audited.facts["labels"].items()]
    return [audited.task.name, audited.split, "  ".join(shares)]


def report_problems(audited: list[Audited], missing: list[Path]) -> None:
    """A note per kind of problem."""
    for a in audited:
        for reason, count in a.facts["skipped"].items():
            warn(printable(f"{a.path}: {count} row{'s' * (count > 1)} skipped: {reason}."))
        if a.facts["repeated_ids"]:
            warn(printable(f"{a.path}: {a.facts['repeated_ids']} rows have an id that is in the file before."))
    if missing:
        warn(printable(f"not found, so not audited: {', '.join(map(str, missing))}."))


# --- plot -------------------------------------------------------------------------------------------------------------

STYLES = {"train": ("#0072B2", "-"), "dev": ("#E69F00", "--"), "test": ("#009E73", ":")}  # Okabe and Ito's colors


def draw(audited: list[Audited], max_length: int, path: Path) -> None:
    """A row of two plots per task: the shares of the labels, and how many rows have at most N tokens."""
    from matplotlib.figure import Figure  # a second to import, so only where it is needed

    tasks = list({a.task.name: a.task for a in audited}.values())
    figure = Figure(figsize=(11, 2.6 * len(tasks)), layout="constrained")
    axes = figure.subplots(len(tasks), 2, squeeze=False)
    for task, (labels, lengths) in zip(tasks, axes, strict=True):
        of_task = [a for a in audited if a.task == task]
        draw_labels(labels, [a for a in of_task if a.facts["labels"]])
        labels.set_title(f"{task.name}: labels", loc="left")
        draw_lengths(lengths, of_task, max_length)
        lengths.set_title(f"{task.name}: tokens of a row", loc="left")
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=120, format=path.suffix[1:])


def draw_labels(axis: Any, audited: list[Audited]) -> None:
    width = 0.8 / max(1, len(audited))
    for place, a in enumerate(audited):
        names = a.task.names or tuple(a.facts["labels"])
        shares = [100 * count / a.rows for count in a.facts["labels"].values()]
        places = np.arange(len(shares)) + (place - (len(audited) - 1) / 2) * width
        bars = axis.bar(places, shares, width, color=STYLES[a.split][0], label=f"{a.split}, {a.rows:,} rows")
        axis.bar_label(bars, fmt="%.0f", fontsize=8)
        axis.set_xticks(range(len(names)), [textwrap.fill(name, 16) for name in names])
    if audited:
        axis.legend(frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)  # above the bars
    axis.margins(y=0.2)
    axis.set_ylabel("% of rows")


def draw_lengths(axis: Any, audited: list[Audited], max_length: int) -> None:
    for a in audited:
        color, line = STYLES[a.split]
        axis.ecdf(a.lengths, color=color, linestyle=line, label=f"{a.split}, {a.facts['truncated']} cut")
    axis.axvline(max_length, color="black", linewidth=0.8)
    axis.text(max_length, 0.02, f"--max_length {max_length} ", fontsize=8, horizontalalignment="right")
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:.0f}")
    axis.set_ylabel("share of rows")
    axis.legend(frameon=False, fontsize=8, loc="upper left")


# --- script -----------------------------------------------------------------------------------------------------------

PLOTS = (".pdf", ".png", ".svg")


@functools.cache
def parser() -> ArgumentParser:
    new = ArgumentParser(
        "datasets.py",
        "Audit the data files of a directory: rows, labels, lengths, duplicates, overlap between splits.",
        "python datasets.py data/ --plot data.png",
        usage="[DIRECTORY] [flags]",
        sections=("files",),
    )
    add = new.section("files")
    add("data", type=Path, nargs="?", default=Path("data"), needs=ALWAYS, help="directory with the course's files")
    add("--model", default="minilm", needs=ALWAYS, metavar="NAME",
        help="checkpoint whose tokenizer counts tokens; minilm has the vocabulary of bert-base-uncased")  # fmt: skip
    add("--max_length", type=number(int, 4, 100_000), default=512, needs=ALWAYS, metavar="N",
        help="count the rows with more tokens, which training would truncate")  # fmt: skip
    add("--json", type=Path, needs=ALWAYS, metavar="PATH", help="write everything that was found to this file")
    add("--plot", type=Path, needs=ALWAYS, metavar="PATH",
        help="draw label shares and token lengths, as .png, .pdf or .svg")  # fmt: skip
    return new


def check_args(args: argparse.Namespace) -> None:
    if not args.data.is_dir():
        raise InputError(f"{args.data}: must be a directory with data files, found none. {GET_DATA}")
    if args.plot is not None and args.plot.suffix not in PLOTS:
        raise InputError(f"--plot {args.plot}: must end in one of {', '.join(PLOTS)}. Choose another name.")
    for flag, path in (("--json", args.json), ("--plot", args.plot)):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise InputError(f"{flag} {path}: must be a file in an existing directory. Choose another name.")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    args = parser().parse(argv)
    check_args(args)
    return args


def run(args: argparse.Namespace, load_tokenizer: Callable[..., Counts]) -> None:
    """The script. load_tokenizer: called with the name of a checkpoint and max_length."""
    tokenizer = load_tokenizer(args.model, max_length=args.max_length)
    audited, missing, errors = audit_directory(args.data, tokenizer)
    if not audited and not errors:
        names = ", ".join(path.name for path in missing)
        raise InputError(f"{args.data}: must have one of {names}; found none. {GET_DATA}")
    shared = list(overlaps(audited))
    if audited:
        print_audit(audited, shared, args.model, tokenizer.max_length)
    report_problems(audited, missing)
    if args.json is not None:
        write_text(args.json, as_json(audited, shared, missing, args.model, tokenizer.max_length))
        print(printable(f"wrote {args.json}"))
    if args.plot is not None and audited:
        draw(audited, tokenizer.max_length, args.plot)
        print(printable(f"wrote {args.plot}"))
    if errors:
        more = f" ({len(errors)} files cannot be read)" if len(errors) > 1 else ""
        raise InputError(f"{errors[0]}{more}")
