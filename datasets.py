"""Files -> examples -> token ids, once -> length-bucketed batches."""

import argparse
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
from typing import IO, Any, NamedTuple, Self

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from pos import PosTagger
from tasks import PARA, SST, STS, TASKS, Batch, Encoded, Task, grades
from tokenizer import BertTokenizer
from utils import InputError, warn

csv.field_size_limit(sys.maxsize)  # a very long sentence is legal: it is truncated later, and counted


# --- files -> examples ------------------------------------------------------------------------------------------------


@dataclass
class Examples:
    """The usable rows of one or more files of a task."""

    task: Task
    ids: list[str] = field(default_factory=list)
    texts: tuple[list[str], ...] = ()  # one list a text column
    labels: list[int | float] | None = None  # None for a test file
    skipped: list[str] = field(default_factory=list)  # why, one line a row

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
    """Reads the course's tab-separated files, and those of READERS, which are named like `snli:data/train.jsonl`.

    A row with missing fields (broken quoting, a blank label) is skipped, counted and named; `strict` makes it an
    error. Anything else that breaks the format is an error: a wrong label would train the model on nonsense.
    repeated_ids: ids need not be unique, as in training files from elsewhere, where nothing is looked up by id.
    """
    found = Examples(task, texts=tuple([] for _ in task.text_columns), labels=[] if labeled else None)
    places: dict[str, str] = {}
    for reader, path in [reader_of(task, path) for path in paths]:
        for row in reader.read(task, path, labeled):
            if isinstance(row, str):
                if strict:
                    raise InputError(f"{row}. Mend the row, or leave out --strict_data to skip it.")
                found.skipped.append(row)
                continue
            if row.id in places and not repeated_ids:
                other = places[row.id]
                raise InputError(
                    f"{row.place}: ids must be unique, {row.id!r} stands in {other} too. Remove one, or allow it in "
                    "training files with --repeated_ids."
                )
            places[row.id] = row.place
            found.ids.append(row.id)
            for column, text in zip(found.texts, row.texts, strict=True):
                column.append(text)
            if found.labels is not None:
                found.labels.append(row.label)
    if not len(found):
        why = f"; {len(found.skipped)} skipped, the first: {found.skipped[0]}" if found.skipped else ""
        names = ", ".join(map(str, paths))
        raise InputError(f"{names}: no usable row{why}. A data file needs a header and at least one row.")
    return found


def read_handout(task: Task, path: Path, labeled: bool) -> Iterator[Row | str]:
    """The course's tab-separated files; a string tells why a row cannot be used."""
    table = csv.DictReader(_data_lines(path), delimiter="\t")
    wanted = ["id", *task.text_columns] + [task.label_column] * labeled
    _check_header(table, path, wanted, f"a {task.name} file")
    for place, _, record in _placed(table, path):
        yield _parse(task, record, wanted, place)


def _check_header(table: csv.DictReader, path: Path, wanted: list[str], what: str) -> None:
    absent = [name for name in wanted if name not in (table.fieldnames or ())]
    if absent:
        separated = "tab" if table.reader.dialect.delimiter == "\t" else "comma"
        raise InputError(
            f"{path} line 1: the header must have the {separated}-separated columns {', '.join(wanted)}; "
            f"{', '.join(absent)} not found. Check that this is {what}; files in other formats need a reader's name "
            "before the path, as in snli:FILE."
        )


def _placed(table: csv.DictReader, path: Path) -> Iterator[tuple[str, int, dict[str, str | None]]]:
    """(file and lines for messages, the first line, the record) of every row."""
    last = table.line_num
    try:
        for record in table:
            inside = sum(value.count("\n") for value in record.values() if isinstance(value, str))
            # a quoted field may hold newlines and an open quote runs on; blank lines before the row are not its own
            first, last = max(last + 1, table.line_num - inside), table.line_num
            place = f"{path} line {first}" if first == last else f"{path} lines {first} to {last}"
            yield place, first, record
    except csv.Error as error:  # where quoting is strict
        raise InputError(
            f"{path} line {last + 1}: quotation marks must be doubled within a field and closed behind it; {error}. "
            "Mend the row."
        ) from error


def _parse(task: Task, record: dict[str, str | None], wanted: list[str], place: str) -> Row | str:
    absent = [name for name in wanted if record[name] is None]
    if absent:
        return f"{place}: {absent[0]} is missing (a quotation mark left open?)"
    if None in record:
        return f"{place}: has more fields than the header"
    texts = tuple(record[name].strip() for name in task.text_columns)
    if any("\t" in text and "\n" in text for text in texts):
        return f"{place}: holds several rows (a quotation mark left open?)"
    identifier = record["id"].lower().strip()  # as the starter and the leaderboard compare them
    if not identifier:
        return f"{place}: id is empty"
    if task.label_column not in wanted:
        return Row(place, identifier, texts, None)
    if not record[task.label_column].strip():
        return f"{place}: {task.label_column} is empty"
    try:
        return Row(place, identifier, texts, task.parse_label(record[task.label_column].strip()))
    except ValueError as error:
        raise InputError(f"{place}: {task.label_column} {error}. Mend the row.") from error


COURSE_DATA = "The course's data: source setup.sh --course-data; sample data: --data data/sample"


def text_lines(path: Path, source: str = "Check the path.") -> Iterator[str]:
    """The lines of a UTF-8 text file without NUL bytes, ends as they are; read as they are asked for.

    source: where such a file is to be had, for the message that it is not there.
    """
    try:
        with _opened(path, "rt", encoding="utf-8-sig", newline="") as file:  # csv wants line ends as they are
            for number, line in enumerate(file, 1):
                if "\0" in line:
                    raise InputError(f"{path} line {number}: must be text, found a NUL byte. Is the file damaged?")
                yield line
    except UnicodeDecodeError:
        _refuse_bad_bytes(path)
        raise
    except (OSError, EOFError, zlib.error) as error:  # the last two of a .gz that was cut or damaged
        raise InputError(f"{path}: cannot be read; {getattr(error, 'strerror', None) or error}. {source}") from error


def _data_lines(path: Path, source: str = COURSE_DATA) -> Iterator[str]:
    """The same of a file that has to hold data."""
    lines, first = text_lines(path, source), []
    for line in lines:
        first.append(line)
        if line.strip():
            return itertools.chain(first, lines)
    raise InputError(f"{path}: the file is empty. A data file needs a header and at least one row.")


def _opened(path: Path, mode: str, **options: str) -> IO:
    return gzip.open(path, mode, **options) if path.suffix == ".gz" else path.open(mode, **options)


def _refuse_bad_bytes(path: Path) -> None:
    """Names the line that is no UTF-8: a decoder, which reads in blocks, knows no lines."""
    with _opened(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                found = f"0x{line[error.start]:02x}"
                raise InputError(
                    f"{path} line {number}: must be UTF-8, found byte {found}. Convert the file to UTF-8."
                ) from error


# --- files in other formats, as training data -------------------------------------------------------------------------


NLI_FIELDS = {"sentence1": str, "sentence2": str, "gold_label": str, "annotator_labels": list}
NLI_SIMILARITIES = {"contradiction": 0, "neutral": 3, "entailment": 5}
NLI_SOURCE = "SNLI: https://nlp.stanford.edu/projects/snli; MultiNLI: https://cims.nyu.edu/~sbowman/multinli"
NO_GOLD_LABEL = "-"  # no three of five annotators agree


class NliLine(NamedTuple):
    number: int  # of the line in its file
    premise: str
    hypothesis: str
    gold: str  # of NLI_SIMILARITIES, or NO_GOLD_LABEL
    votes: list[str]  # the annotators'


def nli_lines(path: Path) -> Iterator[NliLine]:
    """SNLI 1.0 and MultiNLI 1.0: a JSON object a line."""
    for number, line in enumerate(_data_lines(path, NLI_SOURCE), 1):
        if not line.strip():
            continue
        place = f"{path} line {number}"
        found = _read_object(line, place, NLI_FIELDS)
        # JSON can spell half a character (a lone surrogate), which no tokenizer takes
        texts = (found[name].strip().encode("utf-8", "replace").decode() for name in ("sentence1", "sentence2"))
        row = NliLine(number, *texts, found["gold_label"], [vote for vote in found["annotator_labels"] if vote])
        for label in (*row.votes, row.gold):
            if label not in tuple(NLI_SIMILARITIES) and (label, row.gold) != (NO_GOLD_LABEL, NO_GOLD_LABEL):
                known = ", ".join(NLI_SIMILARITIES)
                raise InputError(f"{place}: a label must be one of {known}, found {label!r}. Mend it.")
        yield row


def read_nli(task: Task, path: Path, labeled: bool) -> Iterator[Row | str]:
    """SNLI and MultiNLI as similarities (paper 003, section 3.5).

    The label is the mean of the annotators' votes: contradiction 0, neutral 3, entailment 5. Lines without a gold label
    are skipped, as is usual with these corpora; the paper does not say.
    """
    for row in nli_lines(path):
        place = f"{path} line {row.number}"
        if row.gold == NO_GOLD_LABEL:
            yield f"{place}: has no gold label, the annotators did not agree"
            continue
        values = [NLI_SIMILARITIES[vote] for vote in row.votes or [row.gold]]
        yield Row(place, f"{path}:{row.number}", (row.premise, row.hypothesis), sum(values) / len(values))


def _read_object(line: str, place: str, fields: dict[str, type]) -> dict[str, Any]:
    try:
        found = json.loads(line.rstrip())
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} (column {error.colno})" if isinstance(error, json.JSONDecodeError) else error
        raise InputError(
            f"{place}: must be a JSON object; {reason}. Mend the line, or fetch the file again."
        ) from error
    for name, kind in fields.items():
        if not isinstance(found, dict) or not isinstance(found.get(name), kind):
            raise InputError(
                f"{place}: must be a JSON object with {', '.join(fields)}; {name} is missing or no {kind.__name__}. "
                "Mend the line, or check that this is the reader's format."
            )
    return found


YELP_SOURCE = "Yelp-full: yelp_review_full_csv of Zhang et al. 2015; Yelp's own: https://www.yelp.com/dataset"


def read_yelp(task: Task, path: Path, labeled: bool) -> Iterator[Row | str]:
    """Yelp's reviews, comma-separated, 1 to 5 stars as grades 0 to 4 (paper 003, section 3.5).

    Either with a header that has the columns stars and text, among others such as review_id; or without, as in
    Yelp-full (Zhang et al. 2015): the stars, the text, and in the text `\\n` for the end of a line.
    """
    lines = _data_lines(path, YELP_SOURCE)
    first = next(lines)
    bare = re.match(r'"?[1-5]"?,', first)
    names = ["stars", "text"] if bare else None
    table = csv.DictReader(itertools.chain([first], lines), names, strict=True)
    reviews = dataclasses.replace(task, text_columns=("text",), label_column="stars", parse_label=_stars)
    _check_header(table, path, ["stars", "text"], "a csv of reviews")
    line_end = re.compile(r"\\n|\n" if bare else r"\n")
    for place, number, record in _placed(table, path):
        record["id"] = f"{path}:{number}"
        if record["text"] is not None:
            record["text"] = line_end.sub(" ", record["text"])
        yield _parse(reviews, record, ["stars", "text"], place)


def _stars(text: str) -> int:
    return grades(5, lowest=1)(text) - 1


def read_quora_as_sts(task: Task, path: Path, labeled: bool) -> Iterator[Row | str]:
    """The course's Quora file as similarities (paper 002, section 3.3).

    A paraphrase is uniform in [4, 5], any other pair in [0, 4]. The random number is a hash of the row's id: the same
    in every run, whatever rows stand around it.
    """
    for row in read_handout(PARA, path, True):
        if isinstance(row, Row):
            drawn = int.from_bytes(hashlib.sha256(row.id.encode()).digest()[:8], "big") / 2**64
            row = row._replace(id=f"quora_as_sts:{row.id}", label=4 + drawn if row.label else 4 * drawn)
        yield row


def read_tsv(task: Task, path: Path, labeled: bool) -> Iterator[Row | str]:
    """Tab-separated pairs, as PAWS and GLUE's STS-B have them.

    The header names sentence1, sentence2 and a label in the task's own range: its own column, score or label. Further
    columns are passed over; quotation marks are text, so a row is a line.
    """
    table = csv.DictReader(_data_lines(path, "Check the path."), delimiter="\t", quoting=csv.QUOTE_NONE)
    own = task.label_column
    label = next(
        (name for name in (own, "score", "label") if name in (table.fieldnames or ())), f"{own} (or score, label)"
    )
    wanted = [*task.text_columns, label]
    _check_header(table, path, wanted, "a file of pairs")
    pairs = dataclasses.replace(task, label_column=label)
    for place, number, record in _placed(table, path):
        yield _parse(pairs, record | {"id": f"{path}:{number}"}, wanted, place)


class Reader(NamedTuple):
    """A file format. Every row's id is its own across files: the course's, or file and line."""

    read: Callable[[Task, Path, bool], Iterator[Row | str]]  # the bool: are labels asked for
    tasks: tuple[str, ...]  # for which its rows are data


READERS = {
    "handout": Reader(read_handout, tuple(TASKS)),
    "snli": Reader(read_nli, ("sts",)),
    "mnli": Reader(read_nli, ("sts",)),
    "yelp": Reader(read_yelp, ("sst",)),
    "quora_as_sts": Reader(read_quora_as_sts, ("sts",)),
    "tsv": Reader(read_tsv, ("para", "sts")),
}


def source_of(path: Path) -> tuple[str, Path]:
    """`snli:data/train.jsonl` -> the reader's name and the file.

    A path without a reader is the handout's, and so is one with a colon in it that is a file as it stands.
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
    return name, Path(os.path.expanduser(rest))  # a shell leaves a ~ behind a colon as it is


def reader_of(task: Task, path: Path) -> tuple[Reader, Path]:
    name, file = source_of(path)
    if task.name not in READERS[name].tasks:
        fitting = ", ".join(key for key, reader in READERS.items() if task.name in reader.tasks)
        raise InputError(
            f"{path}: the reader {name} is for {' and '.join(READERS[name].tasks)}, found {task.name}. "
            f"Use one of {fitting}."
        )
    return READERS[name], file


# --- examples -> token ids, once --------------------------------------------------------------------------------------


CHUNK = 20_000  # rows tokenized at a time: the tokenizer's own objects, far larger than ids, never exist for all rows


def _tokenize_chunk(
    tokenizer: BertTokenizer, sentences: list[str], pairs: list[str] | None, tagger: PosTagger | None
) -> tuple[Tensor, ...]:
    """Token ids and segment ids end to end, lengths, whether a row was cut, and with a tagger the tags end to end."""
    encoded = tokenizer.encode(sentences, pairs)
    lengths = [len(e) for e in encoded]

    def joined(name: str, kind: type) -> Tensor:
        every = itertools.chain.from_iterable(getattr(e, name) for e in encoded)
        return torch.from_numpy(np.fromiter(every, kind, sum(lengths)))

    truncated = torch.tensor([bool(e.overflowing) for e in encoded])
    tags = () if tagger is None else (tagger.align(encoded, sentences, pairs),)
    return joined("ids", np.int32), joined("type_ids", np.uint8), torch.tensor(lengths), truncated, *tags


class Ragged(NamedTuple):
    """Token ids of many sentences, unpadded, end to end."""

    token_ids: Tensor  # (total tokens,)
    token_type_ids: Tensor  # (total tokens,)
    lengths: Tensor  # (rows,)
    starts: Tensor  # (rows,)
    truncated: Tensor  # (rows,), whether it was cut to the tokenizer's maximum
    pos_ids: Tensor | None = None  # (total tokens,), part-of-speech tags

    @classmethod
    def tokenize(
        cls,
        tokenizer: BertTokenizer,
        sentences: list[str],
        pairs: list[str] | None = None,
        tagger: PosTagger | None = None,
    ) -> Self:
        """tagger: one that has read these texts already."""
        chunks = [
            _tokenize_chunk(tokenizer, sentences[start : start + CHUNK], pairs and pairs[start : start + CHUNK], tagger)
            for start in range(0, max(1, len(sentences)), CHUNK)
        ]
        token_ids, token_type_ids, lengths, truncated, *pos_ids = map(torch.cat, zip(*chunks, strict=True))
        return cls(token_ids, token_type_ids, lengths, lengths.cumsum(0) - lengths, truncated, *pos_ids)

    def pad(self, rows: Tensor, padding_id: int) -> Encoded:
        """The chosen rows as one batch, padded to the longest of them."""
        lengths = self.lengths[rows]
        columns = torch.arange(int(lengths.max()))
        mask = columns < lengths[:, None]  # (1, T) < (B, 1) -> (B, T)
        places = torch.where(mask, self.starts[rows][:, None] + columns, 0)
        token_ids = torch.where(mask, self.token_ids[places], padding_id).long()
        token_type_ids = torch.where(mask, self.token_type_ids[places], 0).long()
        pos_ids = None if self.pos_ids is None else torch.where(mask, self.pos_ids[places], 0).long()
        return Encoded(token_ids, mask.long(), token_type_ids, pos_ids)

    def numbers(self, rows: Tensor) -> Tensor:
        """A number for each of the rows, of 64 bits: the same where the token ids are, also from another column."""
        ids, starts, lengths = self.token_ids.numpy(), self.starts[rows].tolist(), self.lengths[rows].tolist()
        pieces = (ids[start : start + length].tobytes() for start, length in zip(starts, lengths, strict=True))
        digests = (hashlib.blake2b(piece, digest_size=8).digest() for piece in pieces)
        return torch.tensor([int.from_bytes(digest, "little", signed=True) for digest in digests])

    def select(self, rows: Tensor) -> Self:
        """Some of the rows; the token ids themselves stay where they are."""
        return self._replace(lengths=self.lengths[rows], starts=self.starts[rows], truncated=self.truncated[rows])


# --- pairs ------------------------------------------------------------------------------------------------------------


class Pairing(NamedTuple):
    """How the texts of a row become the encoder's inputs, and what a head is shown of their vectors."""

    tokenize: Callable[[BertTokenizer, tuple[list[str], ...], PosTagger | None], tuple[Ragged, ...]]
    join: Callable[[Encoded, Encoded, int], tuple[Encoded, ...]]  # the same from token ids, at most so many tokens
    views: tuple[tuple[int, ...], ...]  # a head sees the vectors of each view, and its logits are averaged over views


Texts = tuple[list[str], ...]  # one list a text column


def tokenize_apart(tokenizer: BertTokenizer, texts: Texts, tagger: PosTagger | None = None) -> tuple[Ragged, ...]:
    return tuple(Ragged.tokenize(tokenizer, column, tagger=tagger) for column in texts)


def tokenize_joined(tokenizer: BertTokenizer, texts: Texts, tagger: PosTagger | None = None) -> tuple[Ragged, ...]:
    return (Ragged.tokenize(tokenizer, *texts, tagger),)


def tokenize_joined_both_ways(
    tokenizer: BertTokenizer, texts: Texts, tagger: PosTagger | None = None
) -> tuple[Ragged, ...]:
    return (Ragged.tokenize(tokenizer, *texts, tagger), Ragged.tokenize(tokenizer, *reversed(texts), tagger))


def join_pair(first: Encoded, second: Encoded, max_length: int) -> Encoded:
    """`[CLS] a [SEP]` and `[CLS] b [SEP]`, padded -> `[CLS] a [SEP] b [SEP]`, padded, with real segment ids.

    Too long a pair loses tokens of the longer side first, as the tokenizer cuts it.
    """
    joined, segments = [], []
    for row in range(len(first.token_ids)):
        a, b = (e.token_ids[row][e.attention_mask[row].bool()] for e in (first, second))
        keep_a, keep_b = cut_longest_first(len(a) - 2, len(b) - 2, max_length - 3)
        a, b = torch.cat([a[: 1 + keep_a], a[-1:]]), torch.cat([b[1 : 1 + keep_b], b[-1:]])  # b's [CLS] goes
        joined.append(torch.cat([a, b]))
        segments.append(torch.cat([torch.zeros_like(a), torch.ones_like(b)]))
    token_ids = pad_sequence(joined, batch_first=True)
    mask = pad_sequence([torch.ones_like(ids) for ids in joined], batch_first=True)
    return Encoded(token_ids, mask, pad_sequence(segments, batch_first=True))


def cut_longest_first(a: int, b: int, room: int) -> tuple[int, int]:
    """How many tokens of each side remain: the shorter side stays whole while it fills at most half of the room."""
    if a + b <= room:
        return a, b
    short = min(a, b, room // 2)
    return (short, room - short) if a <= b else (room - short, short)


SINGLE = Pairing(tokenize_apart, lambda a, b, most: (a,), ((0,),))
PAIRINGS = {
    "bi": Pairing(tokenize_apart, lambda a, b, most: (a, b), ((0, 1),)),
    "bi_symmetric": Pairing(tokenize_apart, lambda a, b, most: (a, b), ((0, 1), (1, 0))),
    "cross": Pairing(tokenize_joined, lambda a, b, most: (join_pair(a, b, most),), ((0,),)),
    "cross_symmetric": Pairing(
        tokenize_joined_both_ways, lambda a, b, most: (join_pair(a, b, most), join_pair(b, a, most)), ((0,), (1,))
    ),
}


# --- token ids -> batches ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """A tokenized file of a task: everything that training and evaluation need of it."""

    task: Task
    ids: list[str]
    columns: tuple[Ragged, ...]
    labels: Tensor | None
    padding_id: int
    views: tuple[tuple[int, ...], ...] = SINGLE.views
    vectors: tuple[Tensor, ...] | None = None  # a frozen encoder's output for every row
    teacher: Tensor | None = None  # (rows, C), another model's logits

    @classmethod
    def tokenize(
        cls,
        examples: Examples,
        tokenizer: BertTokenizer,
        pairing: Pairing = SINGLE,
        tagger: PosTagger | None = None,
    ) -> Self:
        if tagger is not None:
            tagger.read(examples.texts)
        columns = pairing.tokenize(tokenizer, examples.texts, tagger)
        labels = None if examples.labels is None else torch.tensor(examples.labels)
        return cls(examples.task, examples.ids, columns, labels, tokenizer.pad_token_id, pairing.views)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> Tensor:
        """Tokens a row costs: its longest column."""
        return torch.stack([column.lengths for column in self.columns]).amax(0)

    @property
    def truncated(self) -> int:
        """Rows of which something was cut."""
        return int(torch.stack([column.truncated for column in self.columns]).any(dim=0).sum())

    def batch(self, rows: Tensor) -> Batch:
        kept = self.vectors is not None
        suffice = kept and all(column.pos_ids is None for column in self.columns)  # a feature reads tags after them
        return Batch(
            self.task.name,
            [self.ids[r] for r in rows.tolist()],
            () if suffice else tuple(column.pad(rows, self.padding_id) for column in self.columns),
            None if self.labels is None else self.labels[rows],
            tuple(v[rows] for v in self.vectors) if kept else None,
            self.views,
            tuple(column.numbers(rows) for column in self.columns),
            None if self.teacher is None else self.teacher[rows],
        )

    def select(self, rows: Tensor) -> Self:
        """Some of the rows, in the order given."""
        return dataclasses.replace(
            self,
            ids=[self.ids[r] for r in rows.tolist()],
            columns=tuple(column.select(rows) for column in self.columns),
            labels=None if self.labels is None else self.labels[rows],
            teacher=None if self.teacher is None else self.teacher[rows],
        )

    def with_teacher(self, logits: Tensor) -> Self:
        return dataclasses.replace(self, teacher=logits)

    def with_vectors(self, vectors: tuple[Tensor, ...]) -> Self:
        return dataclasses.replace(self, vectors=vectors)


def bucketed_rows(lengths: Tensor, batch_size: int, generator: Generator, pool: int = 50) -> list[Tensor]:
    """Every row once, in batches of similar length, in random order.

    Rows are shuffled, cut into pools of `pool` batches, and sorted by length within each pool; then the batches are
    shuffled. Padding shrinks to a few percent while batches still differ from epoch to epoch.
    """
    order = torch.randperm(len(lengths), generator=generator)
    pools = (p[lengths[p].argsort(stable=True)] for p in order.split(pool * batch_size))
    batches = [b for p in pools for b in p.split(batch_size)]
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def sorted_rows(lengths: Tensor, batch_size: int) -> list[Tensor]:
    """Every row once, longest first: for evaluation, where order does not matter and memory shows its peak at once."""
    return list(lengths.argsort(descending=True, stable=True).split(batch_size))


def epoch_generator(seed: int, epoch: int, number: int = 0) -> Generator:
    """The random numbers of a pass's batches follow from the seed, the epoch and the pass's number in it alone."""
    # torch's CPU generator takes the lowest 32 bits of a seed, so the pass's number has to show in them
    return Generator().manual_seed(seed * 1_000_003 + epoch + number * 0x9E3779B1)


def training_batches(split: Split, batch_size: int, generator: Generator) -> Iterator[Batch]:
    for rows in bucketed_rows(split.lengths, batch_size, generator):
        yield split.batch(rows)


def endless_batches(split: Split, batch_size: int, seed: int, epoch: int) -> Iterator[Batch]:
    """Pass after pass over the rows, shuffled anew for each: nothing is replayed and nothing is kept."""
    for number in itertools.count():
        yield from training_batches(split, batch_size, epoch_generator(seed, epoch, number))


SKIPPED_SHOWN = 5  # rows named one by one; SNLI has hundreds without a gold label


def report_skipped(examples: Examples, names: str) -> None:
    total = len(examples) + len(examples.skipped)
    for row in examples.skipped[:SKIPPED_SHOWN]:
        warn(f"{row}. Skipped ({len(examples.skipped)} of {total} rows skipped; --strict_data stops instead).")
    if (more := len(examples.skipped) - SKIPPED_SHOWN) > 0:
        warn(f"{names}: {more} further rows skipped; --strict_data stops at the first.")


def read_split(
    task: Task,
    paths: list[Path],
    tokenizer: BertTokenizer,
    pairing: Pairing = SINGLE,
    *,
    labeled: bool,
    strict: bool = False,
    repeated_ids: bool = False,
    tagger: PosTagger | None = None,
) -> Split:
    """Reads and tokenizes, and says what was left out."""
    examples = read_examples(task, paths, labeled=labeled, strict=strict, repeated_ids=repeated_ids)
    names = ", ".join(map(str, paths))
    report_skipped(examples, names)
    if labeled and len(set(examples.labels)) < 2:
        raise InputError(
            f"{names}: needs rows with at least two different labels, found {len(examples)} "
            f"row{'s' * (len(examples) > 1)}, all labeled {examples.labels[0]}. There is nothing to learn from it."
        )
    split = Split.tokenize(examples, tokenizer, pairing, tagger)
    if split.truncated:
        limit = tokenizer.max_length
        warn(f"{names}: {split.truncated} of {len(split)} rows are longer than {limit} tokens and were cut.")
    return split


# --- the handout's data sets ------------------------------------------------------------------------------------------


class _TokenizedDataset(Dataset):
    """Rows as the starter's loaders return them, tokenized by batch in collate_fn, with the starter's keys."""

    def __init__(self, dataset: list[tuple], args: argparse.Namespace):
        self.dataset, self.p = dataset, args
        self.tokenizer = BertTokenizer.from_pretrained(getattr(args, "model", "bert-base-uncased"))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple:
        return self.dataset[index]

    def encoded(self, sentences: list[str], suffix: str = "") -> dict[str, Tensor]:
        found = self.tokenizer(sentences)
        names = {"token_ids": "input_ids", "token_type_ids": "token_type_ids", "attention_mask": "attention_mask"}
        return {f"{ours}{suffix}": found[theirs] for ours, theirs in names.items()}


def _label_tensor(labels: list[int | float]) -> Tensor:
    """Grades stay whole numbers, similarities stay fractions: the labels tell, not a default."""
    return torch.tensor(labels, dtype=torch.float64 if any(isinstance(x, float) for x in labels) else torch.int64)


class SentenceClassificationDataset(_TokenizedDataset):
    """Rows (sentence, label, id)."""

    def collate_fn(self, rows: list[tuple[str, int, str]]) -> dict[str, Any]:
        sentences, labels, ids = map(list, zip(*rows, strict=True))
        return self.encoded(sentences) | {"labels": _label_tensor(labels), "sents": sentences, "sent_ids": ids}


class SentenceClassificationTestDataset(_TokenizedDataset):
    """Rows (sentence, id)."""

    def collate_fn(self, rows: list[tuple[str, str]]) -> dict[str, Any]:
        sentences, ids = map(list, zip(*rows, strict=True))
        return self.encoded(sentences) | {"sents": sentences, "sent_ids": ids}


class SentencePairDataset(_TokenizedDataset):
    """Rows (sentence1, sentence2, label, id). isRegression is accepted for the starter's calls; the labels decide."""

    def __init__(self, dataset: list[tuple], args: argparse.Namespace, isRegression: bool = False):
        super().__init__(dataset, args)
        self.isRegression = isRegression

    def collate_fn(self, rows: list[tuple[str, str, int | float, str]]) -> dict[str, Any]:
        first, second, labels, ids = map(list, zip(*rows, strict=True))
        both = self.encoded(first, "_1") | self.encoded(second, "_2")
        return both | {"labels": _label_tensor(labels), "sent_ids": ids}


class SentencePairTestDataset(_TokenizedDataset):
    """Rows (sentence1, sentence2, id)."""

    def collate_fn(self, rows: list[tuple[str, str, str]]) -> dict[str, Any]:
        first, second, ids = map(list, zip(*rows, strict=True))
        return self.encoded(first, "_1") | self.encoded(second, "_2") | {"sent_ids": ids}


def load_multitask_data(
    sentiment_filename: str | list[str],
    paraphrase_filename: str | list[str],
    similarity_filename: str | list[str],
    split: str = "train",
) -> tuple[list[tuple], dict[int, int], list[tuple], list[tuple]]:
    """The starter's loader: sentiment rows, {label: number of the label}, paraphrase rows, similarity rows.

    A row is (text, label, id) or (text, text, label, id); without the label where split is "test".
    """
    labeled = split != "test"
    found = []
    for task, given in ((SST, sentiment_filename), (PARA, paraphrase_filename), (STS, similarity_filename)):
        paths = [Path(path) for path in ([given] if isinstance(given, str | Path) else given)]
        examples = read_examples(task, paths, labeled=labeled)
        labels = [examples.labels] if labeled else []
        found.append(list(zip(*examples.texts, *labels, examples.ids, strict=True)))
    sentiment, paraphrase, similarity = found
    seen = dict.fromkeys(row[1] for row in sentiment) if labeled else {}
    return sentiment, {label: number for number, label in enumerate(seen)}, paraphrase, similarity
