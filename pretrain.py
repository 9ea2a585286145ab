"""Further pre-training: masked words, next sentences, SimCSE, on the tasks' own text or on any other.

    python pretrain.py --model minilm --objective mlm --name on-course-text
    python pretrain.py --model minilm --objective mlm+simcse:0.5 --text my.txt --epochs 1
    python multitask_classifier.py --model runs/on-course-text --option finetune

The run's directory is a checkpoint that --model takes; `transformers.BertForMaskedLM` loads it as well. Only training
files are read by default: their texts, and for simcse_supervised the labels of the paraphrases.

Shapes:  B batch   R rows of one pass   T tokens   H hidden size   V word pieces   M chosen places of a batch
"""

import argparse
import itertools
import math
import operator
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from tqdm import tqdm

import heads
import optimizer
import training
from base_bert import copy_tensors, find_checkpoint, modern_name, read_weights
from bert import BertModel
from datasets import (
    NO_GOLD_LABEL,
    Ragged,
    bucketed_rows,
    epoch_generator,
    join_pair,
    nli_lines,
    read_examples,
    report_skipped,
    text_lines,
)
from losses import full
from tasks import PARA, TASKS, Batch, Encoded, Output, Task, stack
from tokenizer import SPECIAL_TOKENS, BertTokenizer
from training import Step, Trainer, fit, grouped
from utils import (
    ArgumentParser,
    InputError,
    Precision,
    Run,
    choose_device,
    count_parameters,
    number,
    run_script,
    seed_everything,
    warn,
)

IGNORED = -100  # the label of a place that is not to be predicted
IS_NEXT, IS_RANDOM = 0, 1  # as transformers' BertForNextSentencePrediction counts them
HELD_OUT_SEED, HELD_OUT_BATCH = 0, 32  # no flags: held-out figures of different runs are to be compared

# --- files -> documents -----------------------------------------------------------------------------------------------

Documents = list[list[str]]  # each a list of consecutive sentences

# Behind . ! or ?, perhaps with a quotation mark or bracket that closes, and before what may open a sentence.
SENTENCE_END = re.compile(r"""(?:(?<=[.!?])|(?<=[.!?]["')\]]))\s+(?=["'`(\[\s]*[A-Z0-9])""")


def split_sentences(text: str) -> list[str]:
    """A text's sentences, by punctuation alone: `Mr. Smith` is cut too, which pre-training survives."""
    return [part for part in (found.strip() for found in SENTENCE_END.split(text)) if part]


def read_text(path: Path) -> Documents:
    """One sentence a line; a blank line ends a document, as in the original BERT's input format."""
    lines = (line.strip() for line in text_lines(path))
    documents = [list(group) for has_text, group in itertools.groupby(lines, bool) if has_text]
    if not documents:
        raise InputError(f"{path}: has no sentence. A text file needs one sentence a line.")
    return documents


def task_documents(task: Task, path: Path, strict: bool) -> Documents:
    """The texts of a task's file, without its labels.

    A single text is a document of its sentences. The texts of a pair are a document each: they are alike or not, but
    neither follows the other.
    """
    examples = read_examples(task, [path], labeled=False, strict=strict, repeated_ids=True)
    report_skipped(examples, str(path))
    if len(task.text_columns) == 1:
        found = map(split_sentences, examples.texts[0])
    else:
        found = ([text] if text else [] for text in itertools.chain(*examples.texts))
    return [sentences for sentences in found if sentences]


def without_repeats(documents: Documents) -> Documents:
    """Every sentence once: Quora has some questions many times, held-out ones among them."""
    seen: set[str] = set()
    kept = []
    for sentences in documents:
        new = [s for s in dict.fromkeys(sentences) if s not in seen]
        seen.update(new)
        kept.append(new)
    return [sentences for sentences in kept if sentences]


def hold_out(documents: Documents) -> tuple[Documents, Documents]:
    """(train, held out): a random tenth of the documents, or the last tenth of the text where they are under ten."""
    if len(documents) >= 10:
        order = torch.randperm(len(documents), generator=Generator().manual_seed(HELD_OUT_SEED)).tolist()
        cut = len(documents) // 10
        return [documents[i] for i in sorted(order[cut:])], [documents[i] for i in sorted(order[:cut])]
    flat = [(i, sentence) for i, sentences in enumerate(documents) for sentence in sentences]
    cut = len(flat) - max(3, len(flat) // 10)
    if cut < 3:
        raise InputError(
            f"held-out text needs at least 6 different sentences to be taken from, found {len(flat)}. "
            "Give more text, or held-out text by --held_out FILE."
        )
    return tuple(
        [[s for _, s in group] for _, group in itertools.groupby(part, key=lambda pair: pair[0])]
        for part in (flat[:cut], flat[cut:])
    )


def at_most(documents: Documents, sentences: int | None, seed: int) -> Documents:
    """Random documents with so many sentences together, the last one cut; None: all."""
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
    negative: str | None  # a hard one, where there is one


def read_nli(paths: list[Path]) -> tuple[list[tuple[str, str]], dict[str, list[str]]]:
    """Entailed pairs (premise, hypothesis), and the hypotheses that contradict a premise; SNLI's and MultiNLI's jsonl.

    Lines without a gold label are passed over and counted.
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


def read_paraphrases(path: Path, strict: bool) -> tuple[list[tuple[str, str]], dict[str, list[str]]]:
    """Pairs labeled paraphrases, and what is labeled no paraphrase of a text."""
    examples = read_examples(PARA, [path], labeled=True, strict=strict, repeated_ids=True)
    report_skipped(examples, str(path))
    positives, negatives = [], {}
    for first, second, label in zip(*examples.texts, examples.labels, strict=True):
        if label:
            positives.append((first, second))
            continue
        negatives.setdefault(first, []).append(second)
        negatives.setdefault(second, []).append(first)
    return positives, negatives


def labeled_pairs(args: argparse.Namespace) -> list[Pair]:
    """Every positive pair of --nli, or of para's training file, with a hard negative of its first text.

    A text with several of both gets them in turn.
    """
    if args.nli:
        positives, negatives = read_nli(args.nli)
    else:
        positives, negatives = read_paraphrases(args.data / PARA.filename("train"), args.strict_data)
    if args.positives_only:
        negatives = {}
    turns = {text: itertools.cycle(dict.fromkeys(found)) for text, found in negatives.items()}
    pairs = [Pair(a, b, next(turns[a]) if a in turns else None) for a, b in dict.fromkeys(positives) if a and b]
    if len(pairs) < 20:
        source = ", ".join(map(str, args.nli or [args.data / PARA.filename("train")]))
        raise InputError(
            f"{source}: simcse_supervised needs at least 20 positive pairs (entailment, or paraphrases), found "
            f"{len(pairs)}. Give more data."
        )
    return pairs


# --- texts -> token ids, once -----------------------------------------------------------------------------------------


class Corpus(NamedTuple):
    """Tokenized sentences, those of a document one after the other."""

    tokens: Ragged
    document: Tensor  # (sentences,), the document's number

    @classmethod
    def tokenize(cls, documents: Documents, tokenizer: BertTokenizer) -> Self:
        tokens = Ragged.tokenize(tokenizer, [s for sentences in documents for s in sentences])
        sizes = torch.tensor([len(sentences) for sentences in documents])
        return cls(tokens, torch.arange(len(documents)).repeat_interleave(sizes))

    def padded(self, batch_size: int, padding_id: int, generator: Generator) -> Iterator[Encoded]:
        """Every sentence once, in batches of like length, in random order."""
        for rows in bucketed_rows(self.tokens.lengths, batch_size, generator):
            yield self.tokens.pad(rows, padding_id)


class PairCorpus(NamedTuple):
    first: Ragged
    second: Ragged
    negatives: Ragged  # of the rows that have one
    negative: Tensor  # (rows,), which of the negatives is this row's; -1: none

    @classmethod
    def tokenize(cls, pairs: list[Pair], tokenizer: BertTokenizer) -> Self:
        has_one = torch.tensor([pair.negative is not None for pair in pairs])
        return cls(
            Ragged.tokenize(tokenizer, [pair.first for pair in pairs]),
            Ragged.tokenize(tokenizer, [pair.second for pair in pairs]),
            Ragged.tokenize(tokenizer, [pair.negative for pair in pairs if pair.negative is not None]),
            torch.where(has_one, has_one.cumsum(0) - 1, -1),
        )


# --- token ids -> batches, one source an objective --------------------------------------------------------------------


class Source(Protocol):
    """The rows of an objective; a pass over them draws masks and partners anew from the generator."""

    def __len__(self) -> int: ...
    def batches(self, batch_size: int, generator: Generator) -> Iterator[Batch]: ...


@dataclass(frozen=True)
class Masking:
    """Which tokens are hidden, and how: Devlin et al. 2019 (arXiv:1810.04805), section 3.1 and appendix A.1.

    A share of 15% of the tokens is chosen; of these 80% become [MASK], 10% a random word piece, 10% stay as they are,
    by a random number of its own (TRAPS 29). Special tokens, [UNK] and padding among them, are never chosen and never
    put in, nor are the vocabulary's [unused] entries put in. Deviations: each token is chosen independently, where the
    original takes 15% of each text, rounded, at least one; and anew in every epoch, as RoBERTa (Liu et al. 2019,
    arXiv:1907.11692, section 4.1). whole_word: the word pieces of a word are chosen together; each still has its own
    lot of the 80, 10 and 10, as in Google's code.
    """

    mask_id: int
    special: Tensor  # (V,) bool
    continues: Tensor  # (V,) bool, a piece ##like this
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
        """(B, T) -> what the model sees (B, T); labels (B, T), the chosen tokens themselves, IGNORED elsewhere."""
        shape = token_ids.shape
        choice = torch.rand(shape, generator=generator)
        if self.whole_word:
            word = ((~self.continues[token_ids]).cumsum(dim=1) - 1).clamp(min=0)  # (B, T), the number of its word
            choice = choice.gather(1, word)
        chosen = (choice < self.share) & ~self.special[token_ids]
        lot = torch.rand(shape, generator=generator)
        other = self.replacements[torch.randint(len(self.replacements), shape, generator=generator)]
        seen = torch.where(chosen & (lot < 0.8), self.mask_id, token_ids)
        seen = torch.where(chosen & (lot >= 0.9), other, seen)
        return seen, torch.where(chosen, token_ids, IGNORED)


@dataclass(frozen=True)
class MaskedSentences:
    corpus: Corpus
    masking: Masking
    padding_id: int

    def __len__(self) -> int:
        return len(self.corpus.document)

    def batches(self, batch_size: int, generator: Generator) -> Iterator[Batch]:
        for sentences in self.corpus.padded(batch_size, self.padding_id, generator):
            seen, labels = self.masking(sentences.token_ids, generator)
            yield Batch("mlm", [], (sentences._replace(token_ids=seen),), labels)


class NextSentences:
    """Every sentence that has a next one, half of the time with it, half of the time with one of another document.

    Devlin et al. 2019, section 3.1, task 2. Within a single document the random sentence is any but the first of the
    pair and its next. Deviations: a side is one sentence, not a span of up to 512 tokens; pairs are drawn anew in every
    epoch; nothing is masked, since mlm has a pass of its own. Sentences of one-sentence documents are left out on both
    sides: their style would give the random ones away.
    """

    def __init__(self, corpus: Corpus, padding_id: int, max_length: int):
        sizes = corpus.document.bincount()
        rows = (sizes[corpus.document] > 1).nonzero().flatten()
        self.tokens, self.document = corpus.tokens.select(rows), corpus.document[rows]
        self.padding_id, self.max_length = padding_id, max_length
        self.first = (self.document[:-1] == self.document[1:]).nonzero().flatten()
        # what a random sentence may not be: a block from `start` of `size`, the document or the true pair
        if len(self.document.unique()) > 1:
            starts = sizes[sizes > 1].cumsum(0) - sizes[sizes > 1]
            of_first = self.document[self.first].unique_consecutive(return_inverse=True)[1]
            self.start, self.size = starts[of_first], sizes[sizes > 1][of_first]
        else:
            self.start, self.size = self.first, torch.full_like(self.first, 2)
        if not len(self.first) or int(self.size.max()) >= len(rows):
            raise InputError(
                "nsp needs three sentences, two of them consecutive, in training and held-out text each; one has "
                "none. Give text by --text, a sentence a line, documents apart by blank lines; or --tasks cfimdb."
            )

    def __len__(self) -> int:
        return len(self.first)

    def pairs(self, generator: Generator) -> tuple[Tensor, Tensor]:
        """(the second sentence of every pair, its label)."""
        room = len(self.document) - self.size
        place = (torch.rand(len(self), generator=generator, dtype=torch.float64) * room).long()
        random = torch.where(place < self.start, place, place + self.size)  # steps over the block
        is_next = torch.rand(len(self), generator=generator) < 0.5
        return torch.where(is_next, self.first + 1, random), torch.where(is_next, IS_NEXT, IS_RANDOM)

    def batches(self, batch_size: int, generator: Generator) -> Iterator[Batch]:
        second, labels = self.pairs(generator)
        lengths = self.tokens.lengths[self.first] + self.tokens.lengths[second]
        for rows in bucketed_rows(lengths, batch_size, generator):
            a, b = (self.tokens.pad(side[rows], self.padding_id) for side in (self.first, second))
            yield Batch("nsp", [], (join_pair(a, b, self.max_length),), labels[rows])


@dataclass(frozen=True)
class SentencesTwice:
    corpus: Corpus
    padding_id: int

    def __len__(self) -> int:
        return len(self.corpus.document)

    def batches(self, batch_size: int, generator: Generator) -> Iterator[Batch]:
        for sentences in self.corpus.padded(batch_size, self.padding_id, generator):
            yield Batch("simcse", [], (sentences, sentences), torch.arange(len(sentences.token_ids)))


@dataclass(frozen=True)
class PositivePairs:
    corpus: PairCorpus
    padding_id: int

    def __len__(self) -> int:
        return len(self.corpus.negative)

    def batches(self, batch_size: int, generator: Generator) -> Iterator[Batch]:
        lengths = torch.maximum(self.corpus.first.lengths, self.corpus.second.lengths)
        for rows in bucketed_rows(lengths, batch_size, generator):
            given = [self.corpus.first.pad(rows, self.padding_id), self.corpus.second.pad(rows, self.padding_id)]
            negatives = self.corpus.negative[rows]
            if (negatives >= 0).any():
                given.append(self.corpus.negatives.pad(negatives[negatives >= 0], self.padding_id))
            yield Batch("simcse_supervised", [], tuple(given), torch.arange(len(rows)))


# --- the model --------------------------------------------------------------------------------------------------------


class WordHead(nn.Module):
    """Logits of all word pieces: W LayerNorm(gelu(dense(h))) + b, with W the word embeddings themselves.

    Devlin et al. 2019, section 3.1, task 1, as their code has it. Parameters have transformers' names.
    """

    def __init__(self, bert: BertModel):
        super().__init__()
        H = bert.config.hidden_size
        norm = nn.LayerNorm(H, eps=bert.config.layer_norm_eps)
        self.transform = nn.ModuleDict({"dense": nn.Linear(H, H), "LayerNorm": norm})
        self.bias = nn.Parameter(torch.zeros(bert.config.vocab_size))
        self.encoder = (bert,)  # within a tuple, so that its parameters are not registered a second time
        self.apply(bert.init_weights)

    def forward(self, hidden: Tensor) -> Tensor:
        """(M, H) -> (M, V)"""
        (bert,) = self.encoder
        hidden = self.transform["LayerNorm"](F.gelu(self.transform["dense"](hidden)))
        return F.linear(hidden, bert.word_embedding.weight, self.bias)


class PretrainingBERT(nn.Module):
    """BERT with a head for each objective, of which `cls.*` are called and saved as transformers does."""

    def __init__(self, bert: BertModel, objectives: Iterable[str], pooling: str = "mean", temperature: float = 0.05):
        super().__init__()
        self.bert, self.temperature = bert, temperature
        self.cls, self.poolers = nn.ModuleDict(), nn.ModuleDict()
        names = set(objectives)
        if "mlm" in names:
            self.cls["predictions"] = WordHead(bert)
        if "nsp" in names:
            self.cls["seq_relationship"] = nn.Linear(bert.config.hidden_size, 2).apply(bert.init_weights)
        if names & CONTRASTIVE:
            self.poolers["simcse"] = heads.build_pooler(pooling, bert)
        bert.pooler_dense.requires_grad_("nsp" in names or (bool(names & CONTRASTIVE) and pooling == "pooler"))

    def predict(self, batch: Batch) -> Output:
        """Logits of the batch's objective (rows, choices), one row for each of its `targets`."""
        sentences = stack(batch.sentences)
        hidden = self.bert.encode(
            self.bert.embed(sentences.token_ids, sentences.token_type_ids), sentences.attention_mask
        )
        return Output(OBJECTIVES[batch.task].logits(self, hidden, batch), ())

    def word_logits(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Of the chosen places only: with 30,000 word pieces all others would be most of the cost. -> (M, V)"""
        return self.cls["predictions"](hidden[batch.labels != IGNORED])  # (B, T, H) -> (M, H) -> (M, V)

    def order_logits(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Is the second sentence the next one? From the pooled [CLS]: (B, T, H) -> (B, 2)."""
        return self.cls["seq_relationship"](self.bert.pooler_af(self.bert.pooler_dense(hidden[:, 0])))

    def similarity_logits(self, hidden: Tensor, batch: Batch) -> Tensor:
        """cos(h_i, h_j) / temperature of every first text i with every other text j of the batch.

        SimCSE, Gao et al. 2021 (arXiv:2104.08821). The row's own positive stands at j = i. Where that is the sentence
        itself under another dropout mask, the cross entropy of these logits is equation 4; with labeled positives and
        hard negatives, equation 5. -> (B, B + negatives)
        Deviations: mean pooling is the default (`--pooling pooler` is the paper's [CLS] with an MLP, cls its variant
        without); a text that equals text i or its positive, or is a positive of a text that equals either, is no
        negative of i (TRAPS 28); rows without a hard negative are kept.
        """
        given = stack(batch.sentences)
        vectors = self.poolers["simcse"](hidden, given.attention_mask)  # (R, H)
        sizes = [len(sentences.token_ids) for sentences in batch.sentences]
        with torch.autocast(vectors.device.type, enabled=False):  # bfloat16 tells cosines apart by 1/256 only
            unit = F.normalize(full(vectors), dim=1)
            first, others = unit[: sizes[0]], unit[sizes[0] :]
            logits = first @ others.T / self.temperature  # (B, H) x (H, B + negatives) -> (B, B + negatives)
        texts = given.token_ids.masked_fill(given.attention_mask == 0, IGNORED)  # equal texts now have equal rows
        return logits.masked_fill(_no_negatives(texts, sizes[0]), -math.inf)


def _no_negatives(texts: Tensor, B: int) -> Tensor:
    """(B, R - B), where text j must not count as a negative of text i; False at the positive itself.

    texts: (R, T), the B first ones, their B positives, then hard negatives.
    """
    first, others = texts[:B], texts[B:]
    found = (first[:, None] == others).all(dim=-1) | (others[:B, None] == others).all(dim=-1)  # (B, 1, T) == (R - B, T)
    found[:, :B] |= (first[:, None] == first).all(dim=-1) | (others[:B, None] == first).all(dim=-1)
    return found.fill_diagonal_(False)


def load_heads(model: PretrainingBERT, folder: Path) -> None:
    """The checkpoint's own pre-training heads, where it has them; a head that it does not have starts at random."""
    found = {modern_name(name): tensor for name, tensor in read_weights(folder).items()}
    if "cls.predictions.decoder.bias" in found:  # the same tensor under its other name
        found.setdefault("cls.predictions.bias", found["cls.predictions.decoder.bias"])
    for head in model.cls:
        wanted = {name: p for name, p in model.named_parameters() if name.startswith(f"cls.{head}.")}
        given = {name: found[name] for name in wanted if name in found}
        if given:
            misfit = "the pre-training head does not fit its config.json", "Check that both belong together"
            copy_tensors(given, wanted, folder, misfit)
        else:
            warn(f"{folder} has no head cls.{head}: its own weights start at random.")


# --- objectives -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Objective:
    """A cross entropy over `logits`, one row for each target of a batch of `source`."""

    logits: Callable[[PretrainingBERT, Tensor, Batch], Tensor]  # (model, hidden states, batch) -> (rows, choices)
    source: Callable[[argparse.Namespace, BertTokenizer, Corpus | PairCorpus], Source]
    on_pairs: bool = False  # its data are labeled pairs, not text
    dropout_is_noise: bool = False  # so that even held-out text is scored under dropout


OBJECTIVES: dict[str, Objective] = {
    "mlm": Objective(
        PretrainingBERT.word_logits,
        lambda args, tokenizer, corpus: MaskedSentences(
            corpus, Masking.of(tokenizer, args.mask_share, args.whole_word), tokenizer.pad_token_id
        ),
    ),
    "nsp": Objective(
        PretrainingBERT.order_logits,
        lambda args, tokenizer, corpus: NextSentences(corpus, tokenizer.pad_token_id, tokenizer.max_length),
    ),
    "simcse": Objective(
        PretrainingBERT.similarity_logits,
        lambda args, tokenizer, corpus: SentencesTwice(corpus, tokenizer.pad_token_id),
        dropout_is_noise=True,
    ),
    "simcse_supervised": Objective(
        PretrainingBERT.similarity_logits,
        lambda args, tokenizer, corpus: PositivePairs(corpus, tokenizer.pad_token_id),
        on_pairs=True,
    ),
}
CONTRASTIVE = {"simcse", "simcse_supervised"}


def parse_objectives(spec: str) -> dict[str, float]:
    """`mlm+simcse:0.5` -> the weight of each objective."""
    weights: dict[str, float] = {}
    for term in spec.split("+"):
        name, colon, weight = term.partition(":")
        if name not in OBJECTIVES:
            raise InputError(
                f"--objective {spec}: an objective must be one of {', '.join(OBJECTIVES)}, found {name!r}. Choose one."
            )
        if name in weights:
            raise InputError(f"--objective {spec}: every objective may stand once, found {name} twice. Leave one out.")
        try:
            weights[name] = number(float, 0, 1e6, above=True)(weight) if colon else 1.0
        except argparse.ArgumentTypeError as error:
            raise InputError(
                f"--objective {spec}: the weight of {name} {error}. Write it like mlm+simcse:0.5."
            ) from error
    return weights


def targets(batch: Batch) -> Tensor:
    return batch.labels[batch.labels != IGNORED]


def summed_loss(output: Output, batch: Batch) -> Tensor:
    """Cross entropy, summed over the targets. No class is ignored, 0 as little as any (TRAPS 30)."""
    return F.cross_entropy(full(output.logits), targets(batch), reduction="sum")


def weighted_loss(output: Output, batch: Batch, weight: float) -> Tensor:
    """The mean over the targets times the weight; 0 for a batch of which nothing was chosen."""
    return weight * summed_loss(output, batch) / max(1, len(output.logits))


@torch.no_grad()
def measure(model: PretrainingBERT, name: str, source: Source, precision: Precision) -> tuple[float, float]:
    """(mean loss, accuracy) over the held-out targets, with the same masks, pairs and dropout at every call."""
    loss = right = count = 0.0
    model.train(OBJECTIVES[name].dropout_is_noise)
    batches = source.batches(HELD_OUT_BATCH, Generator().manual_seed(HELD_OUT_SEED))
    total = -(-len(source) // HELD_OUT_BATCH)
    with torch.random.fork_rng([precision.device] if precision.device.type == "cuda" else []):
        torch.manual_seed(HELD_OUT_SEED)
        for batch in tqdm(batches, desc=f"held out {name}", total=total, leave=False, disable=None):
            batch = batch.to(precision.device)
            with precision.autocast():
                output = model.predict(batch)
            loss += summed_loss(output, batch).item()
            right += (output.logits.argmax(dim=1) == targets(batch)).sum().item()
            count += len(output.logits)
    return loss / count, right / count


# --- data -------------------------------------------------------------------------------------------------------------


class Sources(NamedTuple):
    train: Source
    held_out: Source


def data_paths(args: argparse.Namespace) -> list[Path]:
    """All files that are read."""
    of_tasks = [args.data / TASKS[name].filename("train") for name in args.tasks]
    return [*of_tasks, *(args.text or ()), *(args.nli or ()), *([args.held_out] if args.held_out else [])]


def text_splits(args: argparse.Namespace, names: list[str]) -> tuple[Documents, Documents]:
    """(train, held out)"""
    documents: Documents = []
    for name in args.tasks:
        documents += task_documents(TASKS[name], args.data / TASKS[name].filename("train"), args.strict_data)
    for path in args.text or ():
        documents += read_text(path)
    if "nsp" not in names:  # which needs documents as they are
        documents = without_repeats(documents)
    train, held_out = (documents, read_text(args.held_out)) if args.held_out else hold_out(documents)
    return at_most(train, args.max_train, args.seed), at_most(held_out, args.max_held_out, HELD_OUT_SEED)


def pair_splits(args: argparse.Namespace) -> tuple[list[Pair], list[Pair]]:
    """(train, held out): a random tenth of the pairs."""
    train, held_out = hold_out([[pair] for pair in labeled_pairs(args)])
    train, held_out = at_most(train, args.max_train, args.seed), at_most(held_out, args.max_held_out, HELD_OUT_SEED)
    return [pair for (pair,) in train], [pair for (pair,) in held_out]


def build_sources(args: argparse.Namespace, tokenizer: BertTokenizer) -> dict[str, Sources]:
    """Reads and tokenizes what the objectives need."""
    names = list(parse_objectives(args.objective))
    corpora: dict[bool, list] = {}
    if not all(OBJECTIVES[name].on_pairs for name in names):
        corpora[False] = [Corpus.tokenize(documents, tokenizer) for documents in text_splits(args, names)]
        for corpus, which in zip(corpora[False], ("training", "held-out"), strict=True):
            if cut := int(corpus.tokens.truncated.sum()):
                warn(f"{cut} of {len(corpus.document)} {which} sentences are over {args.max_length} tokens, and cut.")
    if any(OBJECTIVES[name].on_pairs for name in names):
        corpora[True] = [PairCorpus.tokenize(pairs, tokenizer) for pairs in pair_splits(args)]
    found = {
        name: Sources(*(OBJECTIVES[name].source(args, tokenizer, c) for c in corpora[OBJECTIVES[name].on_pairs]))
        for name in names
    }
    for name, sources in found.items():
        batches = sources.held_out.batches(HELD_OUT_BATCH, Generator().manual_seed(HELD_OUT_SEED))
        if not any(len(targets(batch)) for batch in batches):
            raise InputError(f"the held-out text is too short: {name} finds nothing to predict in it. Give more text.")
    return found


# --- training ---------------------------------------------------------------------------------------------------------


def build_model(args: argparse.Namespace, precision: Precision) -> PretrainingBERT:
    bert = BertModel.from_pretrained(args.model, keep_layers=args.keep_layers, takes_cls=True)
    bert.use_attention(args.attention)
    bert.checkpoint_activations = args.checkpoint_activations
    model = PretrainingBERT(bert, parse_objectives(args.objective), args.pooling, args.temperature)
    load_heads(model, find_checkpoint(args.model))
    if args.compile:
        bert.compile_layers()
    return model.to(precision.device)


def open_run(args: argparse.Namespace) -> Run:
    folder = args.runs / args.name
    if not args.resume:
        return Run.create(folder, args, data_paths(args))
    run = Run.reopen(folder)
    run.must_match(args, data_paths(args), may_differ={"resume", "runs", "use_gpu"})
    return run


def build_trainer(args: argparse.Namespace, model: PretrainingBERT, precision: Precision, total_steps: int) -> Trainer:
    update = optimizer.build_optimizer(args, model)
    return Trainer(
        model,
        {name: partial(weighted_loss, weight=weight) for name, weight in parse_objectives(args.objective).items()},
        update,
        optimizer.build_schedule(update, args.schedule, total_steps, args.warmup),
        precision,
        args.clip,
        averager=optimizer.build_averager(args, model),
    )


def endless_batches(source: Source, batch_size: int, seed: int, epoch: int) -> Iterator[Batch]:
    """Pass after pass, drawn anew for each."""
    for pass_number in itertools.count():
        yield from source.batches(batch_size, epoch_generator(seed, epoch, pass_number))


def pretrain(args: argparse.Namespace) -> dict[str, float]:
    """Trains; the run's directory keeps the best epoch by the held-out loss. Returns its held-out figures."""
    weights = parse_objectives(args.objective)
    precision = Precision(args.precision, choose_device(args.use_gpu))
    sources = build_sources(args, BertTokenizer.from_pretrained(args.model, max_length=args.max_length))
    seed_everything(args.seed)
    model = build_model(args, precision)
    run = open_run(args)
    BertTokenizer.from_pretrained(args.model).save_pretrained(run.folder)  # with the checkpoint's own --max_length
    describe(args, model, sources, precision)

    def evaluate() -> dict[str, float]:
        scores, total = {}, 0.0
        for name, weight in weights.items():
            loss, accuracy = measure(model, name, sources[name].held_out, precision)
            total += weight * loss
            scores |= (
                {"perplexity": torch.tensor(loss).exp().item()} if name == "mlm" else {f"{name} accuracy": accuracy}
            )
        return scores | {"held-out loss": total}

    if not args.resume:
        before = evaluate()
        run.log(epoch=0, scores=before)
        print(" | ".join(["before ", *(f"{name} {value:.3f}" for name, value in before.items())]), flush=True)
    draws = max(-(-len(of_name.train) // args.batch_size) for of_name in sources.values())

    def steps(epoch: int) -> Iterator[Step]:
        """A batch of every objective each; an epoch is a pass over the largest source, the others start anew."""
        streams = [endless_batches(s.train, args.batch_size, args.seed, epoch) for s in sources.values()]
        return grouped(itertools.islice(zip(*streams, strict=True), draws), args.accumulate)

    steps_in_epoch = -(-draws // args.accumulate)
    best = fit(
        build_trainer(args, model, precision, steps_in_epoch * args.epochs), steps, evaluate, "held-out loss",
        args.epochs, run, better=operator.lt, steps_in=lambda epoch: steps_in_epoch, patience=args.patience,
        keep_state=not args.dry_run, resume=args.resume,
    )  # fmt: skip
    print(" | ".join(["best", *(f"{name} {value:.3f}" for name, value in best.items()), str(run.folder)]), flush=True)
    return best


def describe(
    args: argparse.Namespace, model: PretrainingBERT, sources: dict[str, Sources], precision: Precision
) -> None:
    """Device, precision, parameters and data, once, first."""
    trainable, total = count_parameters(model)
    print(
        f"{args.objective} {args.model} | {precision.device.type} {args.precision} | {torch.get_num_threads()} threads "
        f"| {trainable:,} of {total:,} parameters train | lr {args.lr:g}"
    )
    for name, of_name in sources.items():
        unit = {"nsp": "sentence pairs", "simcse_supervised": "positive pairs"}.get(name, "sentences")
        print(f"{name}: train {len(of_name.train)}, held out {len(of_name.held_out)} {unit}", flush=True)


# --- flags ------------------------------------------------------------------------------------------------------------


def build_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="pretrain.py",
        usage="pretrain.py [@recipes/FILE.txt] [flags; later ones win]",
        description=__doc__.splitlines()[0],
    )
    add = parser.add_argument
    add("--objective", default="mlm", metavar="NAME[:WEIGHT][+...]", help=f"of {', '.join(OBJECTIVES)}; they add up")
    training.add_arguments(parser)
    training.add_loop_arguments(parser)
    add("--epochs", type=number(int, 1, 1000), default=3, help="passes over the largest objective's rows")
    add("--batch_size", type=number(int, 1, 4096), default=32, help="rows of an objective in a step")
    _add_objective_arguments(parser)
    _add_data_arguments(parser)
    optimizer.add_arguments(parser)
    parser.set_defaults(lr=5e-5)
    return parser


def _add_objective_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("objectives").add_argument
    add("--mask_share", type=number(float, 0, 1, above=True), default=0.15, help="mlm: share of tokens to predict")
    add("--whole_word", action="store_true", help="mlm: the pieces of a word are chosen together")
    add("--pooling", choices=sorted(heads.POOLERS), default="mean", help="simcse: a sentence's vector; paper: pooler")
    add("--temperature", type=number(float, 0, 100, above=True), default=0.05, help="simcse: divides the cosines")
    add("--positives_only", action="store_true", help="simcse_supervised: without hard negatives")


def _add_data_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("files").add_argument
    add("--data", type=Path, default=Path("data"), help="directory with the course's files; data/sample is at hand")
    add("--tasks", nargs="+", choices=sorted(TASKS), help="whose training files; None: all, or none with --text")
    add("--text", nargs="+", type=Path, help="text files, a sentence a line, a blank line between documents")
    add("--nli", nargs="+", type=Path, help="simcse_supervised: SNLI's or MultiNLI's jsonl; None: para's training file")
    add("--held_out", type=Path, help="a text file to measure on; None: a tenth of the text")
    add("--max_train", type=number(int, 2, 10**9), help="train on so many sentences, or pairs, at the most; None: all")
    add("--max_held_out", type=number(int, 2, 10**9), default=5000, help="and measure on so many at the most")
    add("--max_length", type=number(int, 4, 512), default=128, help="longer sentences are cut to so many tokens")
    add("--strict_data", action="store_true", help="a row that cannot be used is an error")
    add("--runs", type=Path, default=Path("runs"), help="where runs go: log, weights, state")
    add("--name", help="name of the run; None: objective and time")
    add("--resume", action="store_true", help="go on with the run --name after its last finished epoch")


# A flag that would change nothing is refused, not passed over: (flags, what they need, is it so)
DEPENDENT_FLAGS = (
    (("mask_share", "whole_word"), "--objective mlm", lambda args, names: "mlm" in names),
    (("pooling", "temperature"), "--objective simcse or simcse_supervised", lambda args, names: names & CONTRASTIVE),
    (("nli", "positives_only"), "--objective simcse_supervised", lambda args, names: "simcse_supervised" in names),
    (("text", "held_out"), "--objective mlm, nsp or simcse", lambda args, names: names != {"simcse_supervised"}),
    (
        ("tasks",),
        "an objective that reads the tasks' files",
        lambda args, names: names != {"simcse_supervised"} or not args.nli,
    ),
    (("ema_decay",), "--averager ema", lambda args, names: args.averager == "ema"),
    (("average_start",), "--averager swa", lambda args, names: args.averager == "swa"),
)


def validate(args: argparse.Namespace) -> None:
    """Refuses what cannot be, or would silently do nothing; one line each, with the remedy."""
    names = set(parse_objectives(args.objective))
    defaults = build_parser().parse_args([])
    for flags, needed, holds in DEPENDENT_FLAGS:
        for key in flags:
            if getattr(args, key) != getattr(defaults, key) and not holds(args, names):
                raise InputError(f"--{key} only works with {needed}, which is not set. Set it, or leave --{key} out.")
    if names & CONTRASTIVE and args.batch_size == 1:
        raise InputError("simcse compares the rows of a batch, found --batch_size 1. Use 32 or more.")
    if "simcse_supervised" in names and not args.nli and "para" not in (args.tasks or ([] if args.text else ["para"])):
        raise InputError(
            "simcse_supervised needs labeled pairs, found neither --nli nor para among --tasks. Give --nli FILE, or "
            "add para to --tasks."
        )
    if args.dry_run and args.resume:
        raise InputError("--dry_run and --resume exclude each other: a dry run keeps nothing. Choose one.")


def fill_in(args: argparse.Namespace) -> argparse.Namespace:
    """Defaults that follow from other flags."""
    only_pairs = set(parse_objectives(args.objective)) == {"simcse_supervised"}
    if args.tasks is None:
        args.tasks = [] if args.text or (only_pairs and args.nli) else ["para"] if only_pairs else list(TASKS)
    args.tasks = list(dict.fromkeys(args.tasks))
    args.name = args.name or f"pretrain-{time.strftime('%Y%m%d-%H%M%S')}"
    return args


def get_args(argv: list[str] | None = None) -> argparse.Namespace:
    args = build_parser().parse_args(argv)
    training.must_name_the_run(args)
    validate(args)
    return fill_in(args)


def main() -> None:
    args = get_args()
    if not args.dry_run:
        pretrain(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        args.runs, args.epochs = Path(folder) / "runs", 1
        args.max_train, args.max_held_out = 2 * args.batch_size * args.accumulate, 2 * HELD_OUT_BATCH
        pretrain(args)
    print("dry run: two steps of everything went through; nothing was kept.")


if __name__ == "__main__":
    run_script(main)
