"""The tasks as rows of data, and the few types that travel between the rooms.

Shapes:  B batch   T tokens   H hidden size   C outputs of a task
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


class Encoded(NamedTuple):
    """A batch of tokenized sentences, or of joined pairs."""

    token_ids: Tensor  # (B, T)
    attention_mask: Tensor  # (B, T), 1 = real token
    token_type_ids: Tensor  # (B, T), zeros unless a joined pair
    pos_ids: Tensor | None = None  # (B, T), part-of-speech tag of each token, 0 for special ones; where asked for


class Output(NamedTuple):
    logits: Tensor  # (B, C)
    vectors: tuple[Tensor, ...]  # one (B, H), or two for a bi-encoder
    # What it takes to run the same pass again on other embeddings, with the same dropout masks; set while training.
    embeddings: Tensor | None = None  # (R, T, H), the embedding layer's output for the batch's R = B or 2B sentences
    random_state: dict[str, Tensor] | None = None  # of the generators, before the first layer
    # What a loss may ask the model for besides.
    score: Callable[[tuple[Tensor, ...]], Tensor] | None = None  # the head's logits for other vectors than the batch's
    again: Callable[[], "Output"] | None = None  # the same batch under other dropout masks; set while training


def stack(sentences: tuple[Encoded, ...]) -> Encoded:
    """All sentences of a batch below each other, for ONE forward pass: n times (B, T_i) -> (n B, max T_i)."""
    if len(sentences) == 1:
        return sentences[0]
    T = max(s.token_ids.size(1) for s in sentences)

    def together(name: str) -> Tensor | None:
        parts = [getattr(s, name) for s in sentences]
        if any(part is None for part in parts):
            return None
        return torch.cat([F.pad(part, (0, T - part.size(1))) for part in parts])  # masked, so any padding id will do

    return Encoded(*map(together, Encoded._fields))


class Predictions(NamedTuple):
    """What a model says of a whole split, in the order of its file."""

    ids: list[str]
    logits: np.ndarray  # (rows, C)
    values: np.ndarray  # (rows,), decoded as the leaderboard grades them
    labels: np.ndarray | None  # (rows,)


@dataclass(frozen=True)
class Task:
    """A row of data: nothing here knows about training."""

    name: str  # prefix of flags, logs, prediction files
    files: str  # the course's file name, with {} for train, dev, test-student
    text_columns: tuple[str, ...]
    label_column: str
    parse_label: Callable[[str], int | float]  # raises ValueError with the rule
    num_outputs: int  # C
    kind: str  # what the logits mean: "category" (C of them), "probability" (one logit), "number" (one, 0 to 5)
    decode: Callable[[Tensor], Tensor]  # logits (B, C) -> (B,)
    score: Callable[[np.ndarray, np.ndarray], float]  # (predictions, labels) -> higher is better
    csv_header: str  # literal, the handout's

    def filename(self, split: str) -> str:
        return self.files.format("test-student" if split == "test" else split)


@dataclass(frozen=True)
class Batch:
    task: str
    ids: list[str]
    sentences: tuple[Encoded, ...]  # one, or two for a bi-encoded pair; empty where kept vectors suffice
    labels: Tensor | None  # (B,)
    vectors: tuple[Tensor, ...] | None = None  # the frozen encoder's output (B, H), computed once
    views: tuple[tuple[int, ...], ...] = ((0,),)  # a head sees the vectors of each view; the logits' mean counts
    texts: tuple[Tensor, ...] = ()  # (B,) for each of a row's texts: equal numbers where the token ids are equal
    teacher: Tensor | None = None  # (B, C), another model's logits, to learn from

    def to(self, device: torch.device) -> Self:
        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=True)

        return dataclasses.replace(
            self,
            sentences=tuple(Encoded(*map(move, encoded)) for encoded in self.sentences),
            labels=move(self.labels),
            vectors=None if self.vectors is None else tuple(map(move, self.vectors)),
            texts=tuple(map(move, self.texts)),
            teacher=None if self.teacher is None else move(self.teacher),
        )


def grades(count: int, lowest: int = 0) -> Callable[[str], int]:
    """Labels lowest .. lowest + count - 1; `1.0` counts as 1, as Quora writes it."""

    def parse(text: str) -> int:
        rule = f"must be a whole number from {lowest} to {lowest + count - 1}" if count > 2 else "must be 0 or 1"
        value = _number(text, rule)
        if value not in range(lowest, lowest + count):
            raise ValueError(f"{rule}, found {text!r}")
        return int(value)

    return parse


def similarity(text: str) -> float:
    rule = "must be a number from 0 to 5"
    value = _number(text, rule)
    if not 0 <= value <= 5:
        raise ValueError(f"{rule}, found {text!r}")
    return value


def _number(text: str, rule: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{rule}, found {text!r}") from None


def most_likely(logits: Tensor) -> Tensor:
    return logits.argmax(dim=1)


def more_likely_than_not(logits: Tensor) -> Tensor:
    return logits.flatten().sigmoid().round()


def as_it_is(logits: Tensor) -> Tensor:
    return logits.flatten()


def accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    return float((predictions == labels).mean())


def pearson(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Pearson's correlation; 0 where one side is constant, as nothing is explained then."""
    x, y = (values.astype(np.float64) - values.mean(dtype=np.float64) for values in (predictions, labels))
    norm = math.sqrt((x @ x) * (y @ y))
    return float(x @ y / norm) if norm > 0 else 0.0


SENTIMENT_HEADER = "id \t Predicted_Sentiment \n"
ONE, TWO = ("sentence",), ("sentence1", "sentence2")

SST = Task("sst", "ids-sst-{}.csv", ONE, "sentiment", grades(5), 5, "category", most_likely, accuracy, SENTIMENT_HEADER)
CFIMDB = Task(
    "cfimdb", "ids-cfimdb-{}.csv", ONE, "sentiment", grades(2), 2, "category", most_likely, accuracy, SENTIMENT_HEADER
)
PARA = Task(
    "para", "quora-{}.csv", TWO, "is_duplicate", grades(2), 1, "probability", more_likely_than_not, accuracy,
    "id \t Predicted_Is_Paraphrase \n",
)  # fmt: skip
STS = Task(
    "sts", "sts-{}.csv", TWO, "similarity", similarity, 1, "number", as_it_is, pearson,
    "id \t Predicted_Similiary \n",  # the starter's spelling; the leaderboard expects it
)  # fmt: skip
TASKS = {task.name: task for task in (SST, CFIMDB, PARA, STS)}
