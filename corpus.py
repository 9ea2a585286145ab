"""Text for further pre-training: documents and labeled pairs from files, masking, next sentences, batches.

Shapes:  B batch   T tokens   V word pieces
"""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Generator, Tensor

from datasets import Ragged, bucketed_rows, count_batches, epoch_generator, join_pair, trim_padding
from readers import NO_GOLD_LABEL, nli_lines, read_examples, report_skipped, text_lines
from tasks import IGNORED, PARA, Batch, BatchSize, Encoded, Task
from tokenizer import SPECIAL_TOKENS, BertTokenizer
from utils import InputError, warn

IS_NEXT, IS_RANDOM = 0, 1  # the labels of transformers' BertForNextSentencePrediction
HELD_OUT_SEED = 0  # not a flag: held-out figures of different runs must be comparable

# --- files -> documents -----------------------------------------------------------------------------------------------

Documents = list[list[str]]  # each document is a list of consecutive sentences

# After . ! or ?, perhaps with a closing quotation mark or bracket, and before what may open a sentence.
SENTENCE_END = re.compile(r"""(?:(?<=[.!?])|(?<=[.!?]["')\]]))\s+(?=["'`(\[\s]*[A-Z0-9])""")


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences by punctuation alone; `Mr. Smith` is split too, which does little harm here."""
    return [part for part in map(str.strip, SENTENCE_END.split(text)) if part]


def read_text(path: Path) -> Documents:
    """Read a file with one sentence per line; a blank line ends a document, as in the original BERT's input format."""
    lines = (line.strip() for line in text_lines(path))
    documents = [list(group) for has_text, group in itertools.groupby(lines, bool) if has_text]
    if not documents:
        raise InputError(f"{path}: has no sentence. A text file needs one sentence per line.")
    return documents


def task_documents(task: Task, path: Path, strict: bool) -> Documents:
    """The texts of a task's file, without its labels.

    A single text is a document of its sentences. Each text of a pair is a document of its own: the two may be alike,
    but neither follows the other.
    """
    examples = read_examples(task, [path], labeled=False, strict=strict, repeated_ids=True)
    report_skipped(examples.skipped, len(examples), str(path))
    if not task.is_pair:
        documents = map(split_sentences, examples.texts[0])
    else:
        documents = ([text] if text else [] for text in itertools.chain(*examples.texts))
    return [sentences for sentences in documents if sentences]


def without_repeats(documents: Documents) -> Documents:
    """Keep every sentence once: Quora repeats questions, and held-out ones must not be in the training text."""
    seen: set[str] = set()
    kept = []
    for sentences in documents:
        new = [s for s in dict.fromkeys(sentences) if s not in seen]
        seen.update(new)
        kept.append(new)
    return [sentences for sentences in kept if sentences]


def hold_out(documents: Documents) -> tuple[Documents, Documents]:
    """Split off a random tenth of the documents, or the last tenth of the text if there are fewer than ten."""
    if len(documents) >= 10:
        order = torch.randperm(len(documents), generator=Generator().manual_seed(HELD_OUT_SEED)).tolist()
        cut = len(documents) // 10
        return [documents[i] for i in sorted(order[cut:])], [documents[i] for i in sorted(order[:cut])]
    flat = [(i, sentence) for i, sentences in enumerate(documents) for sentence in sentences]
    cut = len(flat) - max(3, len(flat) // 10)
    if cut < 3:
        raise InputError(
            f"holding out text needs at least 6 different sentences, found {len(flat)}. Use more text, or add "
            "--held_out FILE."
        )
    return tuple(
        [[s for _, s in group] for _, group in itertools.groupby(part, key=lambda pair: pair[0])]
        for part in (flat[:cut], flat[cut:])
    )


def at_most(documents: Documents, sentences: int | None, seed: int) -> Documents:
    """Random documents with this many sentences in total, the last one shortened; None keeps all."""
    if sentences is None or sum(map(len, documents)) <= sentences:
        return documents
    kept = []
    for i in torch.randperm(len(documents), generator=epoch_generator(seed, 0)).tolist():
        kept.append(documents[i][:sentences])
        sentences -= len(kept[-1])
        if not sentences:
            break
    return kept


# --- files -> labeled pairs -------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    first: str
    second: str
    negative: str | None  # a hard negative, if there is one


LabeledPairs = tuple[list[tuple[str, str]], dict[str, list[str]]]  # positive pairs, and negatives of a text


def read_nli_pairs(paths: list[Path]) -> LabeledPairs:
    """Entailed pairs (premise, hypothesis), and the hypotheses that contradict a premise, from SNLI or MultiNLI.

    Lines without a gold label are skipped and counted.
    """
    positives, negatives, unlabeled, total = [], {}, 0, 0
    for row in itertools.chain.from_iterable(map(nli_lines, paths)):
        total += 1
        if row.gold == "entailment":
            positives.append((row.premise, row.hypothesis))
        elif row.gold == "contradiction":
            negatives.setdefault(row.premise, []).append(row.hypothesis)
        elif row.gold == NO_GOLD_LABEL:
            unlabeled += 1
    if unlabeled:
        warn(f"{', '.join(map(str, paths))}: {unlabeled} of {total} lines have no gold label. Skipped.")
    return positives, negatives


def read_paraphrases(path: Path, strict: bool) -> LabeledPairs:
    """Pairs labeled as paraphrases, and for each text the texts labeled as no paraphrase of it."""
    examples = read_examples(PARA, [path], labeled=True, strict=strict, repeated_ids=True)
    report_skipped(examples.skipped, len(examples), str(path))
    positives, negatives = [], {}
    for first, second, label in zip(*examples.texts, examples.labels, strict=True):
        if label:
            positives.append((first, second))
            continue
        negatives.setdefault(first, []).append(second)
        negatives.setdefault(second, []).append(first)
    return positives, negatives


def with_hard_negatives(positives: list[tuple[str, str]], negatives: dict[str, list[str]]) -> list[Pair]:
    """Every positive pair once, with a hard negative of its first text; a text with several negatives takes turns."""
    turns = {text: itertools.cycle(dict.fromkeys(texts)) for text, texts in negatives.items()}
    return [Pair(a, b, next(turns[a]) if a in turns else None) for a, b in dict.fromkeys(positives) if a and b]


# --- texts -> token ids, once -----------------------------------------------------------------------------------------


class Corpus(NamedTuple):
    """Tokenized sentences; those of a document are consecutive."""

    tokens: Ragged
    document: Tensor  # (sentences,), the document's number

    @classmethod
    def tokenize(cls, documents: Documents, tokenizer: BertTokenizer) -> Self:
        tokens = Ragged.tokenize(tokenizer, [s for sentences in documents for s in sentences])
        sizes = torch.tensor([len(sentences) for sentences in documents])
        return cls(tokens, torch.arange(len(documents)).repeat_interleave(sizes))

    def padded(self, batch_size: BatchSize, padding_id: int, generator: Generator) -> Iterator[Encoded]:
        """Every sentence once, in batches of similar length, in random order."""
        for rows in bucketed_rows(self.tokens.lengths, batch_size, generator):
            yield self.tokens.pad(rows, padding_id)


class PairCorpus(NamedTuple):
    first: Ragged
    second: Ragged
    negatives: Ragged  # hard negatives, of the rows that have one
    negative: Tensor  # (rows,), the index of the row's negative; -1: none

    @classmethod
    def tokenize(cls, pairs: list[Pair], tokenizer: BertTokenizer) -> Self:
        has_one = torch.tensor([pair.negative is not None for pair in pairs])
        return cls(
            Ragged.tokenize(tokenizer, [pair.first for pair in pairs]),
            Ragged.tokenize(tokenizer, [pair.second for pair in pairs]),
            Ragged.tokenize(tokenizer, [pair.negative for pair in pairs if pair.negative is not None]),
            torch.where(has_one, has_one.cumsum(0) - 1, -1),
        )


# --- token ids -> batches: one source of rows per objective (see datasets.Source) -------------------------------------


@dataclass(frozen=True)
class Masking:
    """Masks tokens as in Devlin et al. 2019 (arXiv:1810.04805), section 3.1 and appendix A.1.

    15% of the tokens are chosen; of these, 80% become [MASK], 10% a random word piece, and 10% stay unchanged, decided
    by a second random number (docs/PITFALLS.md, 29). Special tokens, including [UNK] and padding, are never chosen and
    never inserted; the vocabulary's [unused] entries are not inserted either. Deviations: each token is chosen
    independently, while the original takes 15% of each text, rounded, at least one; and tokens are chosen anew in every
    epoch, as in RoBERTa (Liu et al. 2019, arXiv:1907.11692, section 4.1). whole_word: the pieces of a word are chosen
    together; the 80/10/10 decision is still made for each piece, as in Google's code.
    """

    mask_id: int
    special: Tensor  # (V,) bool
    continues: Tensor  # (V,) bool, whether a piece continues a word, ##like this
    replacements: Tensor  # ids of all ordinary pieces
    share: float
    whole_word: bool

    @classmethod
    def of(cls, tokenizer: BertTokenizer, share: float, whole_word: bool) -> Self:
        pieces = tokenizer.vocabulary
        special = torch.tensor([piece in SPECIAL_TOKENS for piece in pieces])
        unused = torch.tensor([re.fullmatch(r"\[unused\d+\]", piece) is not None for piece in pieces])
        continues = torch.tensor([piece.startswith("##") for piece in pieces])
        ordinary = (~special & ~unused).nonzero().flatten()
        return cls(tokenizer.mask_token_id, special, continues, ordinary, share, whole_word)

    def __call__(self, token_ids: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        """(B, T) -> the model's input (B, T), and labels (B, T): the chosen tokens, IGNORED elsewhere."""
        shape = token_ids.shape
        choice = torch.rand(shape, generator=generator)
        if self.whole_word:
            word = ((~self.continues[token_ids]).cumsum(dim=1) - 1).clamp(min=0)  # (B, T), the number of its word
            choice = choice.gather(1, word)
        chosen = (choice < self.share) & ~self.special[token_ids]
        fate = torch.rand(shape, generator=generator)
        other = self.replacements[torch.randint(len(self.replacements), shape, generator=generator)]
        masked = torch.where(chosen & (fate < 0.8), self.mask_id, token_ids)
        masked = torch.where(chosen & (fate >= 0.9), other, masked)
        return masked, torch.where(chosen, token_ids, IGNORED)


@dataclass(frozen=True)
class MaskedSentences:
    """Every sentence, masked: for the objective mlm."""

    corpus: Corpus
    masking: Masking
    padding_id: int

    def __len__(self) -> int:
        return len(self.corpus.document)

    def batches(self, batch_size: BatchSize, generator: Generator) -> Iterator[Batch]:
        for sentences in self.corpus.padded(batch_size, self.padding_id, generator):
            masked, labels = self.masking(sentences.token_ids, generator)
            yield Batch("mlm", [], (sentences._replace(token_ids=masked),), labels)

    def count_batches(self, batch_size: BatchSize, generator: Generator | None = None) -> int:
        return count_batches(self.corpus.tokens.lengths, batch_size)


class NextSentences:
    """Every sentence that has a successor, half of the time with it, half of the time with one of another document.

    Devlin et al. 2019, section 3.1, task 2. If there is a single document, the random sentence is any but the pair
    itself. Deviations: each side is one sentence, not a span of up to 512 tokens; pairs are drawn anew in every epoch;
    nothing is masked, since mlm has its own pass. Sentences of one-sentence documents are left out on both sides,
    because their style would give the random ones away.
    """

    def __init__(self, corpus: Corpus, padding_id: int, max_length: int):
        sizes = corpus.document.bincount()
        rows = (sizes[corpus.document] > 1).nonzero().flatten()
        self.tokens, self.document = corpus.tokens.select(rows), corpus.document[rows]
        self.padding_id, self.max_length = padding_id, max_length
        self.first = (self.document[:-1] == self.document[1:]).nonzero().flatten()
        # the random sentence must not be in a block of `size` from `start`: the document, or the true pair
        if len(self.document.unique()) > 1:
            starts = sizes[sizes > 1].cumsum(0) - sizes[sizes > 1]
            of_first = self.document[self.first].unique_consecutive(return_inverse=True)[1]
            self.start, self.size = starts[of_first], sizes[sizes > 1][of_first]
        else:
            self.start, self.size = self.first, torch.full_like(self.first, 2)
        if not len(self.first) or int(self.size.max()) >= len(rows):
            raise InputError(
                "nsp needs three sentences, two of them consecutive, in the training text and in the held-out text. "
                "Give text with --text, one sentence per line and a blank line between documents; or --tasks cfimdb."
            )

    def __len__(self) -> int:
        return len(self.first)

    def pairs(self, generator: Generator) -> tuple[Tensor, Tensor]:
        """The second sentence of every pair, and its label."""
        room = len(self.document) - self.size
        place = (torch.rand(len(self), generator=generator, dtype=torch.float64) * room).long()
        random = torch.where(place < self.start, place, place + self.size)  # skips the block
        is_next = torch.rand(len(self), generator=generator) < 0.5
        return torch.where(is_next, self.first + 1, random), torch.where(is_next, IS_NEXT, IS_RANDOM)

    def batches(self, batch_size: BatchSize, generator: Generator) -> Iterator[Batch]:
        second, labels = self.pairs(generator)
        for rows in bucketed_rows(self.costs(second), batch_size, generator):
            a, b = (self.tokens.pad(side[rows], self.padding_id) for side in (self.first, second))
            yield Batch("nsp", [], (trim_padding(join_pair(a, b, self.max_length)),), labels[rows])

    def count_batches(self, batch_size: BatchSize, generator: Generator) -> int:
        """The number of batches of the pass with this generator, which draws the pairs and so their lengths."""
        return count_batches(self.costs(self.pairs(generator)[0]), batch_size)

    def costs(self, second: Tensor) -> Tensor:
        """The number of tokens of every pair, if this is the second sentence of each; a joined pair has one [CLS]."""
        together = self.tokens.lengths[self.first] + self.tokens.lengths[second] - 1
        return together.clamp(max=self.max_length)


@dataclass(frozen=True)
class SentencesTwice:
    """Every sentence twice, for two dropout masks: for the objective simcse."""

    corpus: Corpus
    padding_id: int

    def __len__(self) -> int:
        return len(self.corpus.document)

    def batches(self, batch_size: BatchSize, generator: Generator) -> Iterator[Batch]:
        tokens = self.corpus.tokens
        for rows in bucketed_rows(self.costs, batch_size, generator):
            sentences, hashes = tokens.pad(rows, self.padding_id), tokens.hashes(rows)
            labels = torch.arange(len(rows))
            yield Batch("simcse", [], (sentences, sentences), labels, text_hashes=(hashes, hashes))

    def count_batches(self, batch_size: BatchSize, generator: Generator | None = None) -> int:
        return count_batches(self.costs, batch_size)

    @property
    def costs(self) -> Tensor:
        """The number of tokens that BERT computes for every row."""
        return 2 * self.corpus.tokens.lengths


@dataclass(frozen=True)
class PositivePairs:
    """Positive pairs and, where there are any, hard negatives: for the objective simcse_supervised."""

    corpus: PairCorpus
    padding_id: int

    def __len__(self) -> int:
        return len(self.corpus.negative)

    def batches(self, batch_size: BatchSize, generator: Generator) -> Iterator[Batch]:
        for rows in bucketed_rows(self.costs, batch_size, generator):
            columns = [(self.corpus.first, rows), (self.corpus.second, rows)]
            negatives = self.corpus.negative[rows]
            if (negatives >= 0).any():
                columns.append((self.corpus.negatives, negatives[negatives >= 0]))
            sentences = tuple(column.pad(chosen, self.padding_id) for column, chosen in columns)
            hashes = tuple(column.hashes(chosen) for column, chosen in columns)
            yield Batch("simcse_supervised", [], sentences, torch.arange(len(rows)), text_hashes=hashes)

    def count_batches(self, batch_size: BatchSize, generator: Generator | None = None) -> int:
        return count_batches(self.costs, batch_size)

    @property
    def costs(self) -> Tensor:
        """The number of tokens that BERT computes for every row, as if all rows had a negative if some have one."""
        corpus = self.corpus
        longest = torch.maximum(corpus.first.lengths, corpus.second.lengths)
        has_one = corpus.negative >= 0
        if not has_one.any():
            return 2 * longest
        negatives = corpus.negatives.lengths[corpus.negative.clamp(min=0)].where(has_one, 0)
        return 3 * torch.maximum(longest, negatives)
