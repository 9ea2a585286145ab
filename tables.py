"""Sentences in files: plain text, tab-separated tables and JSON lines, read and written record by record.

Nothing here holds more than one record, so a file of any length, or an endless pipe, takes the same memory.
"""

import csv
import gzip
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from tasks import ONE_SENTENCE
from utils import InputError, parse_json

STANDARD_INPUT = Path("-")
LONGEST_LINE = 2**26  # bytes; a file without line ends must not fill the memory
LONGEST_FIELD = 1000  # lines of a quoted field; a longer one is a quotation mark that was left open

csv.field_size_limit(sys.maxsize)


class Record(NamedTuple):
    place: str  # file and line, for messages
    values: dict[str, Any]  # by column


class Table(NamedTuple):
    columns: list[str]  # of the first record
    records: Iterator[Record]


# --- lines ------------------------------------------------------------------------------------------------------------


def name_of(path: Path) -> str:
    return "standard input" if path == STANDARD_INPUT else str(path)


def open_input(path: Path) -> IO[bytes]:
    """A file, a .gz file, or the standard input, as bytes."""
    if path == STANDARD_INPUT:
        return sys.stdin.buffer
    try:
        return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")
    except OSError as error:
        raise InputError(f"--file {path}: cannot be read; {error.strerror}. Check the path.") from error


def numbered_lines(file: IO[bytes], name: str) -> Iterator[tuple[int, str]]:
    """The number and text of each line, with its line end. A line ends in a newline and nowhere else."""
    number = 0
    while line := _read_line(file, name):
        number += 1
        if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
            raise InputError(f"{name} line {number}: must have less than {LONGEST_LINE:,} bytes. Is it text?")
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            byte = f"byte 0x{line[error.start]:02x}"
            raise InputError(
                f"{name} line {number}: must be UTF-8, found {byte}. Convert the file to UTF-8."
            ) from error
        yield number, text


def _read_line(file: IO[bytes], name: str) -> bytes:
    try:
        return file.readline(LONGEST_LINE)
    except (OSError, EOFError, ValueError) as error:  # a damaged .gz, a directory, a closed standard input
        raise InputError(f"{name}: cannot be read; {getattr(error, 'strerror', None) or error}.") from error


def count_lines(path: Path) -> int | None:
    """The number of lines, for a progress bar; None if only reading the input would tell."""
    if path.suffix == ".gz" or not path.is_file():
        return None
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(2**20), b""))


# --- readers: lines -> table ------------------------------------------------------------------------------------------


def read_text(file: IO[bytes], name: str) -> Table:
    """One sentence per line. An empty line is an empty sentence, so that lines and predictions correspond."""
    (column,) = ONE_SENTENCE

    def records() -> Iterator[Record]:
        for number, line in numbered_lines(file, name):
            yield Record(f"{name} line {number}", {column: line.removesuffix("\n").removesuffix("\r")})

    return Table([column], records())


class _CountedLines:
    """The lines for the csv module, which reads on while a quotation mark is open."""

    def __init__(self, file: IO[bytes], name: str):
        self.lines, self.name = numbered_lines(file, name), name
        self.first, self.last = 1, 0  # the lines of the record that is being read

    def __iter__(self) -> Iterator[str]:
        for number, line in self.lines:
            self.last = number
            if number - self.first >= LONGEST_FIELD:
                raise InputError(
                    f"{self.name} line {self.first}: a quoted field must end within {LONGEST_FIELD} lines. A quotation "
                    "mark is left open: close it, and double the marks inside a field."
                )
            yield line

    def place(self) -> str:
        """The lines of the record that was just read."""
        first, self.first = self.first, self.last + 1
        return f"{self.name} line {first}" if first == self.last else f"{self.name} lines {first} to {self.last}"


def _rows(lines: _CountedLines) -> Iterator[list[str]]:
    """The fields of each row. A carriage return inside a line is not text unless it is quoted."""
    rows = csv.reader(lines, delimiter="\t")
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            raise InputError(
                f"{lines.place()}: must have lines that end in a newline, found a carriage return inside one. Convert "
                "the line ends, or put the field into quotation marks."
            ) from error
        yield row


def read_tsv(file: IO[bytes], name: str) -> Table:
    """Tab-separated columns under a header, quoted as in the course's files."""
    lines = _CountedLines(file, name)
    rows = _rows(lines)
    header = next(rows, [])
    lines.place()
    twice = [column for i, column in enumerate(header) if column in header[:i]]
    if twice:
        raise InputError(f"{name} line 1: the names of columns must be unique, found {twice[0]!r} twice. Rename one.")

    def records() -> Iterator[Record]:
        for row in rows:
            place = lines.place()
            if not row:  # a blank line
                continue
            if len(row) != len(header):
                raise InputError(
                    f"{place}: must have {len(header)} fields like the header, separated by tabs, found {len(row)}. "
                    "Fix the row."
                )
            if any("\t" in field and "\n" in field for field in row):
                raise InputError(f"{place}: contains several rows. A quotation mark is left open: close or double it.")
            yield Record(place, dict(zip(header, row, strict=True)))

    return Table(header, records())


def read_jsonl(file: IO[bytes], name: str) -> Table:
    """A JSON object per line."""

    def records() -> Iterator[Record]:
        for number, line in numbered_lines(file, name):
            if not line.strip():
                continue
            try:
                yield Record(f"{name} line {number}", parse_json(line))
            except ValueError as error:
                reason = str(error).replace("line 1, ", "")
                raise InputError(f"{name} line {number}: must be a JSON object; {reason}. Fix the line.") from error

    rest = records()
    first = next(rest, None)
    if first is None:
        return Table([], rest)
    return Table(list(first.values), _with_first(first, rest))


def _with_first(first: Record, rest: Iterator[Record]) -> Iterator[Record]:
    yield first
    yield from rest


# --- writers: columns, values -> lines --------------------------------------------------------------------------------


def tsv_line(values: list[Any]) -> str:
    """A line of a table. A field with a tab, a line end or a quotation mark is quoted, as the csv module reads it."""
    line = io.StringIO()
    # The csv module quotes a field with a carriage return only if lines end in one.
    csv.writer(line, delimiter="\t", lineterminator="\r\n").writerow(values)
    return line.getvalue().removesuffix("\r\n") + "\n"


def tsv_rows(columns: list[str], rows: list[dict[str, Any]]) -> str:
    return "".join(tsv_line([row[column] for column in columns]) for row in rows)


def jsonl_rows(columns: list[str], rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


class Format(NamedTuple):
    what: str  # for messages
    read: Callable[[IO[bytes], str], Table]
    head: Callable[[list[str]], str]  # columns -> the first line of the output
    write: Callable[[list[str], list[dict[str, Any]]], str]  # columns, rows -> lines


FORMATS = {
    "text": Format("one sentence per line", read_text, tsv_line, tsv_rows),
    "tsv": Format("tab-separated columns under a header", read_tsv, tsv_line, tsv_rows),
    "jsonl": Format("a JSON object per line", read_jsonl, lambda columns: "", jsonl_rows),
}
SUFFIXES = {".tsv": "tsv", ".csv": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl"}  # the course's .csv have tabs


def format_of(path: Path) -> str:
    """The format by the file's suffix, before a .gz; text for any other."""
    return SUFFIXES.get(Path(path.name.removesuffix(".gz")).suffix.lower(), "text")
