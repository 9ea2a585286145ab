"""Examples -> token ids, once -> length-bucketed batches; how pairs are encoded; the starter's data set classes.

As a script, it audits the data files of a directory:

    python datasets.py data/
"""

import argparse
import dataclasses
import hashlib
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Generator, Tensor
from torch.utils.data import Dataset

import audit
from console import doing
from readers import Examples, example_chunks, read_examples, report_skipped
from tasks import PARA, SST, STS, Batch, BatchSize, Encoded, Task, Tokens
from tokenizer import BertTokenizer
from utils import InputError, run_script, warn

# --- examples -> token ids, once --------------------------------------------------------------------------------------


CHUNK = 2_000  # rows read and tokenized at a time: texts and the tokenizer's objects, far larger than ids, come and go


def _tokenize_chunk(tokenizer: BertTokenizer, sentences: list[str], pairs: list[str] | None) -> tuple[Tensor, ...]:
    """Concatenated token ids and segment ids, lengths, whether a row was truncated, and tags if the tokenizer tags."""
    encoded = tokenizer.encode_all(sentences, pairs)
    lengths = [len(e) for e in encoded]

    def concatenate(name: str, kind: type) -> Tensor:
        every = itertools.chain.from_iterable(getattr(e, name) for e in encoded)
        return torch.from_numpy(np.fromiter(every, kind, sum(lengths)))

    truncated = torch.tensor([bool(e.overflowing) for e in encoded])
    tags = tokenizer.tags(encoded, sentences, pairs)
    number = np.int16 if len(tokenizer.vocabulary) <= 2**15 else np.int32
    columns = concatenate("ids", number), concatenate("type_ids", np.uint8), torch.tensor(lengths), truncated
    return columns if tags is None else (*columns, tags)


class Ragged(NamedTuple):
    """Token ids of many sentences, unpadded and concatenated."""

    token_ids: Tensor  # (total tokens,)
    token_type_ids: Tensor  # (total tokens,)
    lengths: Tensor  # (rows,)
    starts: Tensor  # (rows,)
    truncated: Tensor  # (rows,), whether it was cut to the tokenizer's maximum length
    pos_ids: Tensor | None = None  # (total tokens,), part-of-speech tags

    @classmethod
    def tokenize(cls, tokenizer: BertTokenizer, sentences: list[str], pairs: list[str] | None = None) -> Self:
        chunks = [
            _tokenize_chunk(tokenizer, sentences[start : start + CHUNK], pairs and pairs[start : start + CHUNK])
            for start in range(0, max(1, len(sentences)), CHUNK)
        ]
        token_ids, token_type_ids, lengths, truncated, *pos_ids = map(torch.cat, zip(*chunks, strict=True))
        return cls(token_ids, token_type_ids, lengths, lengths.cumsum(0) - lengths, truncated, *pos_ids)

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """The rows of all parts, in order."""
        token_ids, token_type_ids, lengths, truncated = (
            torch.cat([getattr(part, name) for part in parts])
            for name in ("token_ids", "token_type_ids", "lengths", "truncated")
        )
        pos_ids = None if parts[0].pos_ids is None else torch.cat([part.pos_ids for part in parts])
        return cls(token_ids, token_type_ids, lengths, lengths.cumsum(0) - lengths, truncated, pos_ids)

    def pad(self, rows: Tensor, padding_id: int) -> Encoded:
        """These rows as one batch, padded to the longest of them."""
        lengths = self.lengths[rows]
        columns = torch.arange(int(lengths.max()))
        mask = columns < lengths[:, None]  # (1, T) < (B, 1) -> (B, T)
        places = torch.where(mask, self.starts[rows][:, None] + columns, 0)
        token_ids = torch.where(mask, self.token_ids[places], padding_id).long()
        token_type_ids = torch.where(mask, self.token_type_ids[places], 0).long()
        pos_ids = None if self.pos_ids is None else torch.where(mask, self.pos_ids[places], 0).long()
        return Encoded(token_ids, mask.long(), token_type_ids, pos_ids)

    def hashes(self, rows: Tensor) -> Tensor:
        """A 64-bit hash of each row's token ids; equal texts have equal hashes, also in different columns."""
        ids, starts, lengths = self.token_ids.numpy(), self.starts[rows].tolist(), self.lengths[rows].tolist()
        pieces = (ids[start : start + length].tobytes() for start, length in zip(starts, lengths, strict=True))
        digests = (hashlib.blake2b(piece, digest_size=8).digest() for piece in pieces)
        return torch.tensor([int.from_bytes(digest, "little", signed=True) for digest in digests])

    def select(self, rows: Tensor) -> Self:
        """A subset of the rows; the token ids themselves are not copied."""
        return self._replace(lengths=self.lengths[rows], starts=self.starts[rows], truncated=self.truncated[rows])


# --- pairs ------------------------------------------------------------------------------------------------------------


class Pairing(NamedTuple):
    """How the texts of a row become inputs of the encoder, and which of their vectors a head sees."""

    tokenize: Callable[[BertTokenizer, tuple[list[str], ...]], tuple[Ragged, ...]]
    join: Callable[[Encoded, Encoded, int], tuple[Encoded, ...]]  # the same from token ids, with a maximum length
    views: tuple[tuple[int, ...], ...]  # a head scores the vectors of each view; the logits are averaged


Texts = tuple[list[str], ...]  # one list per text column


def tokenize_apart(tokenizer: BertTokenizer, texts: Texts) -> tuple[Ragged, ...]:
    return tuple(Ragged.tokenize(tokenizer, column) for column in texts)


def tokenize_joined(tokenizer: BertTokenizer, texts: Texts) -> tuple[Ragged, ...]:
    return (Ragged.tokenize(tokenizer, *texts),)


def tokenize_joined_both_ways(tokenizer: BertTokenizer, texts: Texts) -> tuple[Ragged, ...]:
    return (Ragged.tokenize(tokenizer, *texts), Ragged.tokenize(tokenizer, *reversed(texts)))


def tokenize_apart_and_joined(tokenizer: BertTokenizer, texts: Texts) -> tuple[Ragged, ...]:
    return (*tokenize_apart(tokenizer, texts), *tokenize_joined(tokenizer, texts))


def tokenize_apart_and_joined_both_ways(tokenizer: BertTokenizer, texts: Texts) -> tuple[Ragged, ...]:
    return (*tokenize_apart(tokenizer, texts), *tokenize_joined_both_ways(tokenizer, texts))


def join_pair(first: Encoded, second: Encoded, max_length: int) -> Encoded:
    """Join padded `[CLS] a [SEP]` and `[CLS] b [SEP]` into padded `[CLS] a [SEP] b [SEP]` with real segment ids.

    A pair that is too long loses tokens of its longer side first, as the tokenizer truncates it. The result's width
    follows from the inputs' widths alone, so that the model can be exported: trim_padding removes empty columns.
    """
    T = first.token_ids.size(1)
    a, b = (e.attention_mask.sum(dim=1, keepdim=True) - 2 for e in (first, second))  # (B, 1), tokens of each side
    keep_a, keep_b = cut_longest_first(a, b, max_length - 3)
    # Where the pieces of `[CLS] a [SEP] b [SEP]` end, in the result and in the two inputs side by side.
    middle, end = keep_a + 1, keep_a + keep_b + 2  # (B, 1), the places of both [SEP]
    width = torch.sym_min(T + second.token_ids.size(1) - 1, max_length)
    column = torch.arange(width, device=a.device)[None]  # (1, T')
    place = torch.where(column < middle, column, T + column - middle)  # a with its [CLS], then b without
    place = torch.where(column == middle, a + 1, torch.where(column == end, T + b + 1, place))
    mask = column <= end  # (B, T')
    both = torch.cat([first.token_ids, second.token_ids], dim=1)
    token_ids = torch.where(mask, both.gather(1, torch.where(mask, place, 0)), 0)
    return Encoded(token_ids, mask.long(), (mask & (column > middle)).long())


def cut_longest_first(a: Tensor, b: Tensor, room: int) -> tuple[Tensor, Tensor]:
    """The number of tokens kept of each side; the shorter side stays whole while it fills at most half of the room."""
    short = torch.minimum(a, b).clamp(max=room // 2)
    cut = a + b > room
    keep_a = torch.where(cut, torch.where(a <= b, short, room - short), a)
    keep_b = torch.where(cut, torch.where(a <= b, room - short, short), b)
    return keep_a, keep_b


def trim_padding(encoded: Encoded) -> Encoded:
    """The same rows without the columns that are padding in all of them."""
    longest = int(encoded.attention_mask.sum(dim=1).max())
    return Encoded(*(None if part is None else part[:, :longest] for part in encoded))


SINGLE = Pairing(tokenize_apart, lambda a, b, most: (a,), ((0,),))
PAIRINGS = {
    "bi": Pairing(tokenize_apart, lambda a, b, most: (a, b), ((0, 1),)),
    "bi_symmetric": Pairing(tokenize_apart, lambda a, b, most: (a, b), ((0, 1), (1, 0))),
    "cross": Pairing(tokenize_joined, lambda a, b, most: (join_pair(a, b, most),), ((0,),)),
    "cross_symmetric": Pairing(
        tokenize_joined_both_ways, lambda a, b, most: (join_pair(a, b, most), join_pair(b, a, most)), ((0,), (1,))
    ),
    "both": Pairing(tokenize_apart_and_joined, lambda a, b, most: (a, b, join_pair(a, b, most)), ((0, 1, 2),)),
    "both_symmetric": Pairing(
        tokenize_apart_and_joined_both_ways,
        lambda a, b, most: (a, b, join_pair(a, b, most), join_pair(b, a, most)),
        ((0, 1, 2), (1, 0, 3)),
    ),
}


# --- token ids -> batches ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """A tokenized file of a task: all that training and evaluation need."""

    task: Task
    ids: list[str]
    columns: tuple[Ragged, ...]
    labels: Tensor | None
    padding_id: int
    views: tuple[tuple[int, ...], ...] = SINGLE.views
    vectors: tuple[Tensor, ...] | None = None  # a frozen encoder's output for every row
    teacher: Tensor | None = None  # (rows, C), another model's logits
    hash_texts: bool = False  # whether batches carry hashes of their texts, which contrastive losses compare

    @classmethod
    def tokenize(cls, examples: Examples, tokenizer: BertTokenizer, pairing: Pairing = SINGLE) -> Self:
        tokenizer.prepare(examples.texts)
        columns = pairing.tokenize(tokenizer, examples.texts)
        labels = None if examples.labels is None else torch.tensor(examples.labels)
        return cls(examples.task, examples.ids, columns, labels, tokenizer.pad_token_id, pairing.views)

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """The rows of all parts, which were just tokenized alike, in order."""
        columns = tuple(Ragged.join(column) for column in zip(*(part.columns for part in parts), strict=True))
        labels = None if parts[0].labels is None else torch.cat([part.labels for part in parts])
        ids = [identifier for part in parts for identifier in part.ids]
        return dataclasses.replace(parts[0], ids=ids, columns=columns, labels=labels)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> Tensor:
        """The number of tokens of a row's longest column."""
        return torch.stack([column.lengths for column in self.columns]).amax(0)

    @property
    def costs(self) -> Tensor:
        """The number of tokens that BERT computes for a row: all columns, each padded to the longest."""
        return len(self.columns) * self.lengths

    @property
    def truncated(self) -> int:
        """The number of rows that were truncated."""
        return int(torch.stack([column.truncated for column in self.columns]).any(dim=0).sum())

    def batch(self, rows: Tensor) -> Batch:
        stored = self.vectors is not None
        enough = stored and all(column.pos_ids is None for column in self.columns)  # a feature reads tags after them
        return Batch(
            self.task.name,
            [self.ids[r] for r in rows.tolist()],
            () if enough else tuple(column.pad(rows, self.padding_id) for column in self.columns),
            None if self.labels is None else self.labels[rows],
            tuple(v[rows] for v in self.vectors) if stored else None,
            self.views,
            tuple(column.hashes(rows) for column in self.columns) if self.hash_texts else (),
            None if self.teacher is None else self.teacher[rows],
        )

    def batches(self, batch_size: BatchSize, generator: Generator) -> Iterator[Batch]:
        """One pass over the rows, in random batches of similar length."""
        for rows in bucketed_rows(self.costs, batch_size, generator):
            yield self.batch(rows)

    def count_batches(self, batch_size: BatchSize, generator: Generator | None = None) -> int:
        """The number of batches of a pass: the same for every generator."""
        return count_batches(self.costs, batch_size)

    def select(self, rows: Tensor) -> Self:
        """A subset of the rows, in the order given."""
        return dataclasses.replace(
            self,
            ids=[self.ids[r] for r in rows.tolist()],
            columns=tuple(column.select(rows) for column in self.columns),
            labels=None if self.labels is None else self.labels[rows],
            teacher=None if self.teacher is None else self.teacher[rows],
        )

    def sample(self, count: int, seed: int) -> Self:
        """At most `count` random rows in the order of the file, the same ones for the same seed."""
        if count >= len(self):
            return self
        rows = torch.randperm(len(self), generator=epoch_generator(seed, 0))[:count]
        return self.select(rows.sort().values)

    def with_teacher(self, logits: Tensor) -> Self:
        return dataclasses.replace(self, teacher=logits)

    def with_vectors(self, vectors: tuple[Tensor, ...]) -> Self:
        return dataclasses.replace(self, vectors=vectors)

    def with_text_hashes(self) -> Self:
        return dataclasses.replace(self, hash_texts=True)


class Band(NamedTuple):
    """Consecutive rows in order of decreasing cost that are cut into batches of the same number of rows."""

    start: int
    end: int
    batch_rows: int


def bands(descending: list[int], batch_size: BatchSize) -> list[Band]:
    """Cut rows, given by their costs from large to small, into bands. Batches of a band may hold any of its rows.

    A batch of n rows costs n times its largest row. Going from large to small, every batch takes as many rows as fit.
    Adjacent batches of n rows each form a band: its largest row fits n times, so the band's rows can be exchanged at
    will without exceeding the limit. The bands follow from the costs alone: they are the same in every epoch.
    """
    if isinstance(batch_size, int):
        return [Band(0, len(descending), batch_size)]
    found: list[Band] = []
    start = 0
    while start < len(descending):
        n = max(1, batch_size.most // max(1, descending[start]))
        end = min(start + n, len(descending))
        if found and found[-1].batch_rows == n:
            found[-1] = found[-1]._replace(end=end)
        else:
            found.append(Band(start, end, n))
        start = end
    return found


def count_batches(costs: Tensor, batch_size: BatchSize) -> int:
    """The number of batches that bucketed_rows makes, whatever its generator."""
    return sum(-(-(band.end - band.start) // band.batch_rows) for band in bands(_descending(costs), batch_size))


def _descending(costs: Tensor) -> list[int]:
    return costs.sort(descending=True).values.tolist()


def bucketed_rows(costs: Tensor, batch_size: BatchSize, generator: Generator, pool: int = 50) -> list[Tensor]:
    """Every row once, in batches of similar length, in random order.

    costs: the number of tokens of each row, or a multiple of it. Rows are shuffled, cut into pools of `pool` batches,
    and sorted by length within each pool; then the batches are shuffled. Padding shrinks to a few percent while batches
    still differ from epoch to epoch. If the size is in tokens, this is done in each band; rows of equal cost are
    shuffled before they are divided among bands.
    """
    order = torch.randperm(len(costs), generator=generator)
    if isinstance(batch_size, Tokens):
        order = order[costs[order].argsort(descending=True, stable=True)]
    batches: list[Tensor] = []
    for start, end, batch_rows in bands(costs[order].tolist(), batch_size):
        rows = order[start:end]
        if isinstance(batch_size, Tokens):
            rows = rows[torch.randperm(len(rows), generator=generator)]
        pools = (p[costs[p].argsort(stable=True)] for p in rows.split(pool * batch_rows))
        batches += [b for p in pools for b in p.split(batch_rows)]
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def check_rows_meet(costs: Tensor, batch_size: BatchSize, loss: str) -> None:
    """Refuse a limit in tokens that leaves every row alone in its batch, if a loss compares rows; note such rows.

    loss: names the loss in messages. For a batch of one row, such a loss is 0.
    """
    if isinstance(batch_size, int) or not len(costs):
        return
    alone = int((2 * costs > batch_size.most).sum())
    enough = 2 * int(costs.max())
    if 2 * int(costs.min()) > batch_size.most:
        raise InputError(
            f"{loss} compares the rows of a batch, but no two rows fit into --max_tokens {batch_size.most}. Use at "
            f"least {enough}."
        )
    if alone:
        warn(
            f"{loss} compares the rows of a batch; {alone} of {len(costs)} rows are alone in theirs. --max_tokens "
            f"{enough} leaves none alone."
        )


def sorted_rows(lengths: Tensor, batch_size: int) -> list[Tensor]:
    """Every row once, longest first: for evaluation, where order does not matter and peak memory shows at once."""
    return list(lengths.argsort(descending=True, stable=True).split(batch_size))


def epoch_generator(seed: int, epoch: int, number: int = 0) -> Generator:
    """The random numbers for the batches of one pass; they depend on seed, epoch and number of the pass only."""
    # torch's CPU generator uses the lowest 32 bits of a seed, so the pass's number has to change them
    return Generator().manual_seed(seed * 1_000_003 + epoch + number * 0x9E3779B1)


class Source(Protocol):
    """Rows that come in random batches: a Split, or the rows of a pre-training objective."""

    def __len__(self) -> int: ...
    def batches(self, batch_size: BatchSize, generator: Generator) -> Iterator[Batch]: ...
    def count_batches(self, batch_size: BatchSize, generator: Generator) -> int:
        """The number of batches of a pass with this generator."""


def endless_batches(source: Source, batch_size: BatchSize, seed: int, epoch: int) -> Iterator[Batch]:
    """Pass after pass over the rows, each reshuffled: nothing is replayed and nothing is kept in memory."""
    for number in itertools.count():
        yield from source.batches(batch_size, epoch_generator(seed, epoch, number))


def read_split(
    task: Task,
    paths: list[Path],
    tokenizer: BertTokenizer,
    pairing: Pairing = SINGLE,
    *,
    labeled: bool,
    strict: bool = False,
    repeated_ids: bool = False,
) -> Split:
    """Read and tokenize the files, and report what was skipped or truncated."""
    names = ", ".join(map(str, paths))
    with doing(f"reading {task.name}: {names}"):
        parts, skipped = [], []
        size = CHUNK if tokenizer.reads_parts else None
        for examples in example_chunks(task, paths, size, labeled=labeled, strict=strict, repeated_ids=repeated_ids):
            skipped += examples.skipped
            if len(examples):
                parts.append(Split.tokenize(examples, tokenizer, pairing))
        split = Split.join(parts)
        report_skipped(skipped, len(split), names)
        if labeled and split.labels.unique().numel() < 2:
            raise InputError(
                f"{names}: needs rows with at least two different labels, found {len(split)} "
                f"row{'s' * (len(split) > 1)}, all labeled {split.labels[0].item()}. There is nothing to learn from it."
            )
    if split.truncated:
        limit = tokenizer.max_length
        warn(f"{names}: {split.truncated} of {len(split)} rows are longer than {limit} tokens and were truncated.")
    return split


# --- the starter's data sets ------------------------------------------------------------------------------------------


class _TokenizedDataset(Dataset):
    """Rows as the starter's loaders return them. pad_data tokenizes them; collate_fn names what it returns."""

    def __init__(self, dataset: list[tuple], args: argparse.Namespace):
        self.dataset, self.p = dataset, args
        name, local = getattr(args, "model", "bert-base-uncased"), getattr(args, "local_files_only", False)
        self.tokenizer = BertTokenizer.from_pretrained(name, local_files_only=local)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple:
        return self.dataset[index]

    def encoded(self, sentences: list[str]) -> tuple[Tensor, Tensor, Tensor]:
        """token_ids, token_type_ids, attention_mask: (B, T) each"""
        encoded = self.tokenizer(sentences, return_tensors="pt", padding=True, truncation=True)
        return encoded["input_ids"], encoded["token_type_ids"], encoded["attention_mask"]


def _label_tensor(labels: list[int | float], regression: bool = False) -> Tensor:
    """Fractions stay fractions, whatever the argument says; with regression, whole numbers become float64 as well."""
    regression = regression or any(isinstance(label, float) for label in labels)
    return torch.tensor(labels, dtype=torch.float64 if regression else torch.int64)


class SentenceClassificationTestDataset(_TokenizedDataset):
    """Rows (sentence, id)."""

    keys = ("token_ids", "attention_mask", "sents", "sent_ids")

    def pad_data(self, rows: list[tuple[str, str]]) -> tuple:
        sentences, ids = map(list, zip(*rows, strict=True))
        token_ids, _, attention_mask = self.encoded(sentences)
        return token_ids, attention_mask, sentences, ids

    def collate_fn(self, rows: list[tuple]) -> dict[str, Any]:
        batch = dict(zip(self.keys, self.pad_data(rows), strict=True))
        return batch | {"token_type_ids": torch.zeros_like(batch["token_ids"])}


class SentenceClassificationDataset(SentenceClassificationTestDataset):
    """Rows (sentence, label, id)."""

    keys = ("token_ids", "attention_mask", "labels", "sents", "sent_ids")

    def pad_data(self, rows: list[tuple[str, int, str]]) -> tuple:
        sentences, labels, ids = map(list, zip(*rows, strict=True))
        token_ids, _, attention_mask = self.encoded(sentences)
        return token_ids, attention_mask, _label_tensor(labels), sentences, ids


PAIR_KEYS = tuple(f"{name}_{side}" for side in (1, 2) for name in ("token_ids", "token_type_ids", "attention_mask"))


class SentencePairTestDataset(_TokenizedDataset):
    """Rows (sentence1, sentence2, id)."""

    keys = (*PAIR_KEYS, "sent_ids")

    def pad_data(self, rows: list[tuple[str, str, str]]) -> tuple:
        first, second, ids = map(list, zip(*rows, strict=True))
        return *self.encoded(first), *self.encoded(second), ids

    def collate_fn(self, rows: list[tuple]) -> dict[str, Any]:
        return dict(zip(self.keys, self.pad_data(rows), strict=True))


class SentencePairDataset(SentencePairTestDataset):
    """Rows (sentence1, sentence2, label, id). isRegression: labels are float64, as fractions are without it."""

    keys = (*PAIR_KEYS, "labels", "sent_ids")

    def __init__(self, dataset: list[tuple], args: argparse.Namespace, isRegression: bool = False):
        super().__init__(dataset, args)
        self.isRegression = isRegression

    def pad_data(self, rows: list[tuple[str, str, int | float, str]]) -> tuple:
        first, second, labels, ids = map(list, zip(*rows, strict=True))
        return *self.encoded(first), *self.encoded(second), _label_tensor(labels, self.isRegression), ids


def preprocess_string(text: str) -> str:
    """Lower case, and a space before `.`, `?`, `,` and `'`; the tokenizer makes the same pieces with and without it."""
    return " ".join(re.sub(r"([.?,'])", r" \1", text.lower()).split())


def load_multitask_data(
    sentiment_filename: str | list[str],
    paraphrase_filename: str | list[str],
    similarity_filename: str | list[str],
    split: str = "train",
) -> tuple[list[tuple], dict[int, int], list[tuple], list[tuple]]:
    """The starter's loader: sentiment rows, {label: index of the label}, paraphrase rows, similarity rows.

    A row is (text, label, id) or (text, text, label, id), without the label if split is "test".
    """
    labeled = split != "test"
    rows = []
    for task, given in ((SST, sentiment_filename), (PARA, paraphrase_filename), (STS, similarity_filename)):
        paths = [Path(path) for path in ([given] if isinstance(given, str | Path) else given)]
        examples = read_examples(task, paths, labeled=labeled)
        labels = [examples.labels] if labeled else []
        rows.append(list(zip(*examples.texts, *labels, examples.ids, strict=True)))
    sentiment, paraphrase, similarity = rows
    labels = dict.fromkeys(row[1] for row in sentiment) if labeled else {}
    return sentiment, {label: index for index, label in enumerate(labels)}, paraphrase, similarity


def load_multitask_test_data(
    sentiment_filename: str = "data/ids-sst-test-student.csv",
    paraphrase_filename: str = "data/quora-test-student.csv",
    similarity_filename: str = "data/sts-test-student.csv",
) -> tuple[list[str], list[tuple[str, str]], list[tuple[str, str]]]:
    """2023's loader of test texts without their ids: sentences, question pairs, sentence pairs."""
    sentiment, _, *pairs = load_multitask_data(sentiment_filename, paraphrase_filename, similarity_filename, "test")
    return [text for text, _ in sentiment], *([row[:2] for row in rows] for rows in pairs)


# --- script -----------------------------------------------------------------------------------------------------------


def get_args(argv: list[str] | None = None) -> argparse.Namespace:
    return audit.parse(argv)


def main() -> None:
    audit.run(get_args(), BertTokenizer.from_pretrained)


if __name__ == "__main__":
    run_script(main)
