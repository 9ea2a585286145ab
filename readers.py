"""Data files -> examples: the course's format, other formats for more training data, and the audit of every row.

A row that cannot be used is skipped, counted and named; a row that breaks the format is an error. The readers are
generators, so a file of any length is streamed.
"""

import contextlib
import csv
import dataclasses
import gzip
import hashlib
import itertools
import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from tasks import PARA, SST, TASKS, Number, Task, whole_number
from utils import InputError, warn

csv.field_size_limit(sys.maxsize)  # a very long sentence is legal: it is truncated later, and counted


# --- examples ---------------------------------------------------------------------------------------------------------


@dataclass
class Examples:
    """The usable rows of one or more files of a task."""

    task: Task
    ids: list[str] = field(default_factory=list)
    texts: tuple[list[str], ...] = ()  # one list per text column
    labels: list[int | float] | None = None  # None for a test file
    skipped: list[str] = field(default_factory=list)  # the reasons, one line per row

    @classmethod
    def empty(cls, task: Task, labeled: bool) -> "Examples":
        return cls(task, texts=tuple([] for _ in task.text_columns), labels=[] if labeled else None)

    def add(self, row: "Row") -> None:
        self.ids.append(row.id)
        for column, text in zip(self.texts, row.texts, strict=True):
            column.append(text)
        if self.labels is not None:
            self.labels.append(row.label)

    def __len__(self) -> int:
        return len(self.ids)


class Row(NamedTuple):
    place: str  # file and line, for messages
    id: str
    texts: tuple[str, ...]
    label: int | float | None


def read_examples(
    task: Task, paths: list[Path], *, labeled: bool, strict: bool = False, repeated_ids: bool = False
) -> Examples:
    """Read the course's tab-separated files, and files of other READERS, named like `snli:data/train.jsonl`.

    A row with missing fields (broken quoting, a blank label) is skipped, counted and named; `strict` makes it an
    error. Anything else that breaks the format is an error, since a wrong label would train the model on nonsense.
    repeated_ids: ids need not be unique, as in training files from elsewhere, where nothing is looked up by id.
    """
    (examples,) = example_chunks(task, paths, None, labeled=labeled, strict=strict, repeated_ids=repeated_ids)
    return examples


def example_chunks(
    task: Task,
    paths: list[Path],
    size: int | None,
    *,
    labeled: bool,
    strict: bool = False,
    repeated_ids: bool = False,
) -> Iterator[Examples]:
    """Read the files as `read_examples` does, this many rows at a time; None: all rows in one piece.

    So the texts of a large file need not be in memory together. A row that was skipped is in the piece after it.
    """
    ids: set[str] = set()
    piece = Examples.empty(task, labeled)
    skipped: list[str] = []
    for row in _rows(task, paths, labeled):
        if isinstance(row, str):
            if strict:
                raise InputError(f"{row}. Fix the row, or leave out --strict_data to skip it.")
            skipped.append(row)
            piece.skipped.append(row)
            continue
        if row.id in ids and not repeated_ids:
            first = next(r.place for r in _rows(task, paths, labeled) if not isinstance(r, str) and r.id == row.id)
            raise InputError(
                f"{row.place}: ids must be unique, {row.id!r} appears in {first} too. Remove one, or allow repeated "
                "ids in training files with --repeated_ids."
            )
        ids.add(row.id)
        piece.add(row)
        if len(piece) == size:
            yield piece
            piece = Examples.empty(task, labeled)
    if not ids:
        why = f"; {len(skipped)} skipped, the first: {skipped[0]}" if skipped else ""
        names = ", ".join(map(str, paths))
        raise InputError(f"{names}: no usable row{why}. A data file needs a header and at least one row.")
    if len(piece) or piece.skipped:
        yield piece


def _rows(task: Task, paths: list[Path], labeled: bool) -> Iterator["Row | str"]:
    for reader, path in [reader_of(task, path) for path in paths]:
        yield from reader.read(task, path, labeled)


SKIPPED_SHOWN = 5  # rows named one by one; SNLI has hundreds without a gold label


def report_skipped(skipped: list[str], used: int, names: str) -> None:
    """Name the first rows that were skipped. used: the number of rows that were not. names: of the files."""
    for row in skipped[:SKIPPED_SHOWN]:
        warn(f"{row}. Skipped ({len(skipped)} of {used + len(skipped)} rows skipped; --strict_data stops instead).")
    if (more := len(skipped) - SKIPPED_SHOWN) > 0:
        warn(f"{names}: {more} more rows skipped; --strict_data stops at the first.")


# --- the course's format ----------------------------------------------------------------------------------------------


def read_handout(task: Task, path: Path, labeled: bool) -> Iterator[Row | str]:
    """The rows of the course's tab-separated files; a string says why a row cannot be used."""
    table = csv.DictReader(_data_lines(path), delimiter="\t")
    wanted = ["id", *task.text_columns] + [task.label_column] * labeled
    _check_header(table, path, wanted, f"a {task.name} file")
    for place, _, record in _placed(table, path):
        yield _parse(task, record, wanted, place)


def _check_header(table: csv.DictReader, path: Path, wanted: list[str], what: str) -> None:
    absent = [name for name in wanted if name not in _header(table, path)]
    if absent:
        separated = "tab" if table.reader.dialect.delimiter == "\t" else "comma"
        raise InputError(
            f"{path} line 1: the header must have the {separated}-separated columns {', '.join(wanted)}; "
            f"{', '.join(absent)} not found. Check that this is {what}; a file in another format needs the reader's "
            "name in front of its path, as in snli:FILE."
        )


def _header(table: csv.DictReader, path: Path) -> list[str]:
    """The names in the first line, which is read here."""
    try:
        return list(table.fieldnames or ())
    except csv.Error as error:  # where quoting is strict
        raise _bad_quotes(path, 1, error) from error


def _bad_quotes(path: Path, line: int, error: csv.Error) -> InputError:
    rule = "quotation marks must be doubled inside a field and closed at its end"
    return InputError(f"{path} line {line}: {rule}; {error}. Fix the row.")


def _placed(table: csv.DictReader, path: Path) -> Iterator[tuple[str, int, dict[str, str | None]]]:
    """For every row: file and lines for messages, the first line, the record."""
    last = table.line_num
    try:
        for record in table:
            inside = sum(value.count("\n") for value in record.values() if isinstance(value, str))
            # a quoted field may contain newlines and an open quote runs on; blank lines before the row are not its own
            first, last = max(last + 1, table.line_num - inside), table.line_num
            place = f"{path} line {first}" if first == last else f"{path} lines {first} to {last}"
            yield place, first, record
    except csv.Error as error:  # where quoting is strict
        raise _bad_quotes(path, last + 1, error) from error


def _parse(
    task: Task,
    record: dict[str, str | None],
    wanted: list[str],
    place: str,
    parse_label: Callable[[str], int | float] | None = None,
) -> Row | str:
    """parse_label: for labels that are not written like the task's own."""
    absent = [name for name in wanted if record[name] is None]
    if absent:
        return f"{place}: {absent[0]} is missing (a quotation mark left open?)"
    if None in record:
        return f"{place}: has more fields than the header"
    texts = tuple(record[name].strip() for name in task.text_columns)
    if any("\t" in text and "\n" in text for text in texts):
        return f"{place}: contains several rows (a quotation mark left open?)"
    identifier = record["id"].lower().strip()  # as the starter and the leaderboard compare ids
    if not identifier:
        return f"{place}: id is empty"
    if task.label_column not in wanted:
        return Row(place, identifier, texts, None)
    label = record[task.label_column].strip()
    if not label:
        return f"{place}: {task.label_column} is empty"
    try:
        return Row(place, identifier, texts, (parse_label or task.predicts.parse_label)(label))
    except ValueError as error:
        raise InputError(f"{place}: {task.label_column} {error}. Fix the row.") from error


# --- lines of text ----------------------------------------------------------------------------------------------------

COURSE_DATA = "The course's data: source setup.sh --course-data; sample data: --data data/sample"


def text_lines(path: Path, source: str = "Check the path.") -> Iterator[str]:
    """Read the lines of a UTF-8 text file one by one, with their line ends; NUL bytes are an error.

    source: where to get such a file, for the message that it does not exist.
    """
    try:
        with _open(path, "rt", encoding="utf-8-sig", newline="") as file:  # csv wants line ends as they are
            for number, line in enumerate(file, 1):
                if "\0" in line:
                    raise InputError(f"{path} line {number}: must be text, found a NUL byte. Is the file damaged?")
                yield line
    except UnicodeDecodeError as error:
        line, byte = _first_bad_byte(path)
        raise InputError(f"{path} line {line}: must be UTF-8, found {byte}. Convert the file to UTF-8.") from error
    except (OSError, EOFError, zlib.error) as error:  # the last two for a truncated or damaged .gz
        raise InputError(f"{path}: cannot be read; {getattr(error, 'strerror', None) or error}. {source}") from error


def _data_lines(path: Path, source: str = COURSE_DATA) -> Iterator[str]:
    """The lines of a file that must contain data."""
    lines, first = text_lines(path, source), []
    for line in lines:
        first.append(line)
        if line.strip():
            return itertools.chain(first, lines)
    raise InputError(f"{path}: the file is empty. A data file needs a header and at least one row.")


def _open(path: Path, mode: str, **options: str) -> IO:
    return gzip.open(path, mode, **options) if path.suffix == ".gz" else path.open(mode, **options)


def _first_bad_byte(path: Path) -> tuple[int, str]:
    """Find the line that is not UTF-8, and its byte; the decoder, which reads in blocks, does not know lines."""
    number = 1
    with contextlib.suppress(OSError, EOFError, zlib.error), _open(path, "rb") as file:  # of a damaged .gz
        for number, line in enumerate(file, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                return number, f"byte 0x{line[error.start]:02x}"
    return number, "other bytes"


# --- other formats, as training data ----------------------------------------------------------------------------------

NLI_FIELDS = {"sentence1": str, "sentence2": str, "gold_label": str, "annotator_labels": list}
NLI_FRACTIONS = {"contradiction": 0.0, "neutral": 0.6, "entailment": 1.0}  # of the range of similarities
NLI_SOURCE = "SNLI: https://nlp.stanford.edu/projects/snli; MultiNLI: https://cims.nyu.edu/~sbowman/multinli"
NO_GOLD_LABEL = "-"  # no three of the five annotators agree


class NliLine(NamedTuple):
    number: int  # of the line in its file
    premise: str
    hypothesis: str
    gold: str  # a key of NLI_FRACTIONS, or NO_GOLD_LABEL
    votes: list[str]  # the annotators'


def nli_lines(path: Path) -> Iterator[NliLine]:
    """The lines of SNLI 1.0 and MultiNLI 1.0, each a JSON object."""
    for number, line in enumerate(_data_lines(path, NLI_SOURCE), 1):
        if not line.strip():
            continue
        place = f"{path} line {number}"
        record = _read_object(line, place, NLI_FIELDS)
        # JSON can spell half a character (a lone surrogate), which no tokenizer accepts
        texts = (record[name].strip().encode("utf-8", "replace").decode() for name in ("sentence1", "sentence2"))
        row = NliLine(number, *texts, record["gold_label"], [vote for vote in record["annotator_labels"] if vote])
        for label in (*row.votes, row.gold):
            if label not in tuple(NLI_FRACTIONS) and (label, row.gold) != (NO_GOLD_LABEL, NO_GOLD_LABEL):
                known = ", ".join(NLI_FRACTIONS)
                raise InputError(f"{place}: a label must be one of {known}, found {label!r}. Fix the line.")
        yield row


def read_nli(task: Task, path: Path, labeled: bool) -> Iterator[Row | str]:
    """SNLI and MultiNLI as similarities (Chue, Liu & Sahoo, "A SMARTer minBERT", section 3.5).

    The label is the mean of the annotators' votes: contradiction 0, neutral 3, entailment 5. Lines without a gold label
    are skipped, as is usual with these corpora; the paper does not say.
    """
    for row in nli_lines(path):
        place = f"{path} line {row.number}"
        if row.gold == NO_GOLD_LABEL:
            yield f"{place}: has no gold label, the annotators did not agree"
            continue
        values = [task.predicts.low + NLI_FRACTIONS[vote] * task.predicts.range for vote in row.votes or [row.gold]]
        yield Row(place, f"{path}:{row.number}", (row.premise, row.hypothesis), sum(values) / len(values))


def _read_object(line: str, place: str, fields: dict[str, type]) -> dict[str, Any]:
    try:
        record = json.loads(line.rstrip())
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} (column {error.colno})" if isinstance(error, json.JSONDecodeError) else error
        raise InputError(
            f"{place}: must be a JSON object; {reason}. Fix the line, or download the file again."
        ) from error
    for name, kind in fields.items():
        if not isinstance(record, dict) or not isinstance(record.get(name), kind):
            raise InputError(
                f"{place}: must be a JSON object with {', '.join(fields)}; {name} is missing or not a {kind.__name__}. "
                "Fix the line, or check that the file has this reader's format."
            )
    return record


YELP_SOURCE = "Yelp-full: yelp_review_full_csv of Zhang et al. 2015; Yelp's own: https://www.yelp.com/dataset"


def read_yelp(task: Task, path: Path, labeled: bool) -> Iterator[Row | str]:
    """Yelp reviews, comma-separated, with 1 to 5 stars as classes 0 to 4 ("A SMARTer minBERT", section 3.5).

    Either with a header that has the columns stars and text, among others such as review_id; or without a header, as
    in Yelp-full (Zhang et al. 2015): the stars, the text, and in the text `\\n` for the end of a line.
    """
    lines = _data_lines(path, YELP_SOURCE)
    first = next(lines)
    bare = re.match(r'"?[1-5]"?,', first)
    names = ["stars", "text"] if bare else None
    table = csv.DictReader(itertools.chain([first], lines), names, strict=True)
    reviews = dataclasses.replace(task, text_columns=("text",), label_column="stars")
    _check_header(table, path, ["stars", "text"], "a csv of reviews")
    line_end = re.compile(r"\\n|\n" if bare else r"\n")

    def stars(text: str) -> int:
        return whole_number(text, 1, task.predicts.num_logits) - 1

    for place, number, record in _placed(table, path):
        record["id"] = f"{path}:{number}"
        if record["text"] is not None:
            record["text"] = line_end.sub(" ", record["text"])
        yield _parse(reviews, record, ["stars", "text"], place, stars)


def read_quora_as_sts(task: Task, path: Path, labeled: bool) -> Iterator[Row | str]:
    """The course's Quora file as similarities (Tlemcani & Sohn, "MinBERT and Downstream Tasks", section 3.3).

    A paraphrase gets a label drawn uniformly from [4, 5], any other pair one from [0, 4]. The random number is a hash
    of the row's id: it is the same in every run, whatever rows stand around it.
    """
    low, high = task.predicts.low, task.predicts.high
    for row in read_handout(PARA, path, True):
        if isinstance(row, Row):
            drawn = int.from_bytes(hashlib.sha256(row.id.encode()).digest()[:8], "big") / 2**64
            label = high - 1 + drawn if row.label else low + (high - 1 - low) * drawn
            row = row._replace(id=f"quora_as_sts:{row.id}", label=label)
        yield row


def read_tsv(task: Task, path: Path, labeled: bool) -> Iterator[Row | str]:
    """Tab-separated pairs, as in PAWS and GLUE's STS-B.

    The header names sentence1, sentence2 and a label in the task's own range: the task's own column, score or label.
    Other columns are ignored; quotation marks are text, so a row is a line.
    """
    table = csv.DictReader(_data_lines(path, "Check the path."), delimiter="\t", quoting=csv.QUOTE_NONE)
    own = task.label_column
    label = next((name for name in (own, "score", "label") if name in _header(table, path)), f"{own} (or score, label)")
    wanted = [*task.text_columns, label]
    _check_header(table, path, wanted, "a file of pairs")
    pairs = dataclasses.replace(task, label_column=label)
    for place, number, record in _placed(table, path):
        yield _parse(pairs, record | {"id": f"{path}:{number}"}, wanted, place)


# --- which reader -----------------------------------------------------------------------------------------------------


def _any_task(task: Task) -> bool:
    return True


def _similarities(task: Task) -> bool:
    return task.is_pair and isinstance(task.predicts, Number)


def _reviews(task: Task) -> bool:
    return not task.is_pair and task.predicts == SST.predicts


def _pairs(task: Task) -> bool:
    return task.is_pair


class Reader(NamedTuple):
    """A file format. Every row's id is unique across files: the course's own, or file and line."""

    read: Callable[[Task, Path, bool], Iterator[Row | str]]  # the bool: whether labels are needed
    fits: Callable[[Task], bool]  # whether its rows are data for a task


READERS = {
    "handout": Reader(read_handout, _any_task),
    "snli": Reader(read_nli, _similarities),
    "mnli": Reader(read_nli, _similarities),
    "yelp": Reader(read_yelp, _reviews),
    "quora_as_sts": Reader(read_quora_as_sts, _similarities),
    "tsv": Reader(read_tsv, _pairs),
}


def readers_for(task: Task) -> list[str]:
    return [name for name, reader in READERS.items() if reader.fits(task)]


def source_of(path: Path) -> tuple[str, Path]:
    """Split `snli:data/train.jsonl` into the reader's name and the file.

    A path without a reader is in the course's format, and so is one with a colon in it that exists as it stands.
    """
    prefix = re.fullmatch(r"([^/\\:]{2,}):(.*)", str(path))  # one letter is a drive
    if prefix is None or os.path.isfile(path):
        return "handout", path
    name, rest = prefix.groups()
    if name not in READERS or not rest:
        raise InputError(
            f"{path}: must be a file or READER:PATH with one of {', '.join(READERS)}, found neither. "
            "Correct the path, or the reader."
        )
    return name, Path(os.path.expanduser(rest))  # a shell does not expand a ~ behind a colon


def reader_of(task: Task, path: Path) -> tuple[Reader, Path]:
    name, file = source_of(path)
    if not READERS[name].fits(task):
        tasks = " and ".join(other.name for other in TASKS.values() if READERS[name].fits(other))
        raise InputError(
            f"{path}: the reader {name} is for {tasks}, found {task.name}. Use one of {', '.join(readers_for(task))}."
        )
    return READERS[name], file
