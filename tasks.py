"""The tasks as rows of data, what their predictions mean, and the types that travel between files.

A task says what it predicts by an object: `Category(5)`, `Probability()` or `Number(0, 5)`. That object owns everything
that depends on the meaning of the logits: how they are decoded and scored, which distribution they stand for, how far
apart two outputs are, and which loss and head are used by default. Nothing else in the project asks what kind of task
it deals with.

Shapes:  B batch   T tokens   H hidden size   C logits of a task   G classes (2 for a probability, else C)   M models
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

# --- batches and outputs ----------------------------------------------------------------------------------------------


class Encoded(NamedTuple):
    """A batch of tokenized sentences, or of joined pairs."""

    token_ids: Tensor  # (B, T)
    attention_mask: Tensor  # (B, T), 1 = real token
    token_type_ids: Tensor  # (B, T), zeros unless a joined pair
    pos_ids: Tensor | None = None  # (B, T), the part-of-speech tag of each token, 0 for special tokens; if requested


class Output(NamedTuple):
    """What the model returns for a batch."""

    logits: Tensor  # (B, C)
    vectors: tuple[Tensor, ...]  # one (B, H), or two for a bi-encoder
    # Needed to repeat the same pass on other embeddings with the same dropout masks; set in training mode.
    embeddings: Tensor | None = None  # (R, T, H), the embedding layer's output for the batch's R = B or 2B sentences
    random_state: dict[str, Tensor] | None = None  # of the random generators, before the first layer
    # What a loss or a regularizer may ask of the model in addition.
    score: Callable[[tuple[Tensor, ...]], Tensor] | None = None  # the head's logits for vectors other than the batch's
    again: Callable[[], "Output"] | None = None  # the same batch with new dropout masks; set in training mode
    local: Callable[[Tensor], Tensor] = lambda rows: rows  # of R rows, those that this process encodes


def stack(sentences: tuple[Encoded, ...]) -> Encoded:
    """Stack all sentences of a batch for ONE forward pass: n times (B, T_i) -> (n B, max T_i)."""
    if len(sentences) == 1:
        return sentences[0]
    T = max(s.token_ids.size(1) for s in sentences)

    def concatenate(name: str) -> Tensor | None:
        parts = [getattr(s, name) for s in sentences]
        if any(part is None for part in parts):
            return None
        return torch.cat([F.pad(part, (0, T - part.size(1))) for part in parts])  # masked, so any padding id works

    return Encoded(*map(concatenate, Encoded._fields))


class Predictions(NamedTuple):
    """A model's predictions for a whole split, in the order of its file."""

    ids: list[str]
    logits: np.ndarray  # (rows, C)
    values: np.ndarray  # (rows,), decoded as the leaderboard grades them
    labels: np.ndarray | None  # (rows,)


@dataclass(frozen=True)
class Batch:
    """Rows of one task, ready for the model."""

    task: str
    ids: list[str]
    sentences: tuple[Encoded, ...]  # one, or two for a bi-encoded pair; empty if the stored vectors are enough
    labels: Tensor | None  # (B,)
    vectors: tuple[Tensor, ...] | None = None  # the frozen encoder's output (B, H), computed once
    views: tuple[tuple[int, ...], ...] = ((0,),)  # the head scores each view's vectors; the logits are averaged
    text_hashes: tuple[Tensor, ...] = ()  # (B,) per text column: equal numbers mean equal texts; if a loss reads them
    teacher: Tensor | None = None  # (B, C), another model's logits to learn from
    part_of: "Part | None" = None  # which rows of a larger batch these are, if it was too large for the memory

    def to(self, device: torch.device) -> Self:
        """The batch on a device. A copy to a GPU starts from pinned memory, so that nothing waits for it."""

        def move(tensor: Tensor | None) -> Tensor | None:
            if tensor is not None and device.type == "cuda" and tensor.device.type == "cpu":
                tensor = tensor.pin_memory()
            return None if tensor is None else tensor.to(device, non_blocking=True)

        return dataclasses.replace(
            self,
            sentences=tuple(Encoded(*map(move, encoded)) for encoded in self.sentences),
            labels=move(self.labels),
            vectors=None if self.vectors is None else tuple(map(move, self.vectors)),
            text_hashes=tuple(map(move, self.text_hashes)),
            teacher=None if self.teacher is None else move(self.teacher),
        )

    def __len__(self) -> int:
        """B, the number of rows."""
        return len(self.sentences[0].token_ids if self.sentences else self.vectors[0])

    @property
    def targets(self) -> int:
        """The number of labels that a mean loss averages over."""
        return len(self) if self.labels is None else int((self.labels != IGNORED).sum())

    def parts(self, count: int) -> Iterator[Self]:
        """The rows in `count` batches of similar size; they are not copied."""
        B = len(self)
        for start, stop in itertools.pairwise(i * B // count for i in range(count + 1)):

            def rows(tensor: Tensor | None, these: slice = slice(start, stop)) -> Tensor | None:
                return None if tensor is None else tensor[these]

            yield dataclasses.replace(
                self,
                ids=self.ids[start:stop],
                sentences=tuple(Encoded(*map(rows, encoded)) for encoded in self.sentences),
                labels=rows(self.labels),
                vectors=None if self.vectors is None else tuple(map(rows, self.vectors)),
                text_hashes=tuple(map(rows, self.text_hashes)),
                teacher=rows(self.teacher),
                part_of=Part(start, stop, B),
            )


class Part(NamedTuple):
    """Rows start to stop of a batch of `total` rows."""

    start: int
    stop: int
    total: int


IGNORED = -100  # the label of a token that is not to be predicted


class Tokens(NamedTuple):
    """The size of a batch in tokens, counting padding: as many rows as fit, at least one."""

    most: int


BatchSize = int | Tokens  # a number of rows, or as many rows as fit into a number of tokens


# --- what a task predicts ---------------------------------------------------------------------------------------------


class Target:
    """What a task predicts: the meaning of its logits and labels. There is one subclass for each kind of target."""

    noun: ClassVar[str]  # for messages: "a task that predicts a category"
    problem_type: ClassVar[str]  # in transformers: it decides what a pipeline does with the logits
    activation: ClassVar[type[nn.Module]] = nn.Identity  # from logits to what sentence-transformers returns
    formula: ClassVar[str] = "logits"  # from logits to probabilities, or to the number, in a model card's code
    default_loss: ClassVar[str]
    default_head: ClassVar[str] = "linear"
    uncertainty_factor: ClassVar[float] = 1.0  # of the loss under uncertainty weighting (losses.Uncertainty)
    range: float = 1.0  # of the predictions
    num_logits: int = 1  # C
    num_classes: int = 0  # classes that a prediction can name; 0 if it is a number

    def parse_label(self, text: str) -> int | float:
        """Read a label; raise ValueError, stating the rule, if it is invalid."""
        raise NotImplementedError

    def parse_prediction(self, text: str) -> float:
        """Read a prediction from a prediction file; raise ValueError, stating the rule, if it is invalid."""
        return float(self.parse_label(text))

    def decode(self, logits: Tensor) -> Tensor:
        """Turn logits into predictions, as the leaderboard grades them: (B, C) -> (B,)."""
        raise NotImplementedError

    def as_labels(self, logits: Tensor) -> Tensor:
        """Predictions that a training file may have as labels: (B, C) -> (B,)."""
        return self.decode(logits)

    def score(self, predictions: np.ndarray, labels: np.ndarray) -> float:
        """Compare predictions with labels, (rows,) each; higher is better."""
        return accuracy(predictions, labels)

    def hits(self, predictions: np.ndarray, labels: np.ndarray) -> np.ndarray | None:
        """Which rows are predicted correctly, (rows,); None if a prediction is not simply right or wrong."""
        return predictions == labels

    def mistakes(self, logits: Tensor, labels: Tensor) -> Tensor:
        """How wrong each prediction is: the probability of a class that is not the label's, 0 if it is: (rows,)."""
        probability, found = self.log_probabilities(logits.double()).exp().max(dim=-1)
        return probability * (found != labels)

    def label_counts(self, labels: np.ndarray) -> dict[str, int]:
        """How many labels each class has, by the class's number; for numbers, each part of their range."""
        counts = np.bincount(labels.astype(np.int64), minlength=self.num_classes)
        return {str(label): int(count) for label, count in enumerate(counts)}

    def share_of_overall(self, score: float) -> float:
        """The score as it enters the mean over tasks that the 2024 leaderboard ranks by."""
        return score

    def loss_of_guessing(self) -> float | None:
        """The default loss of a model that finds everything equally likely; None if there is no such thing."""
        return None

    # Predictions for people and files

    def plain(self, value: float) -> int | float:
        """A prediction as it is written to a file: a class is a whole number."""
        return int(value)

    @property
    def probability_names(self) -> tuple[str, ...]:
        """A name for each of the `probabilities`."""
        return ()

    def probabilities(self, logits: Tensor) -> Tensor:
        """The probabilities that are reported with a prediction, (B, C) -> (B, P); a number has none, P = 0."""
        return logits[:, : len(self.probability_names)]

    def in_words(self, value: float, names: tuple[str, ...]) -> str:
        """A prediction in words. names: those of the classes."""
        return names[int(value)]

    def fractions(self, logits: Tensor) -> Tensor:
        """The lengths of bars: each class's probability, or where a number lies in its range; (B, C) -> (B, G)."""
        return self.log_probabilities(logits).exp()

    # Distributions

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """The logarithms of the distribution over G classes that the logits stand for: (..., C) -> (..., G)."""
        raise NotImplementedError

    def as_logits(self, log_probabilities: Tensor) -> Tensor:
        """The inverse of log_probabilities, up to a constant per row: (..., G) -> (..., C)."""
        return log_probabilities

    # Distances between two outputs, in float64: close to each other, two distributions differ by less than float32
    # resolves, and B x C numbers are few.

    def kl(self, reference: Tensor, other: Tensor) -> Tensor:
        """KL(P || Q) = sum p (log p - log q), with P the reference's distribution: (B, C), (B, C) -> (B,)."""
        log_p, log_q = (self.log_probabilities(logits.double()) for logits in (reference, other))
        return (log_p.exp() * (log_p - log_q)).sum(dim=1)

    def symmetrized_kl(self, reference: Tensor, other: Tensor) -> Tensor:
        """KL(P || Q) + KL(Q || P) = sum (p - q) (log p - log q): (B, C), (B, C) -> (B,)."""
        log_p, log_q = (self.log_probabilities(logits.double()) for logits in (reference, other))
        return ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum(dim=1)

    def divergence(self, reference: Tensor, other: Tensor) -> Tensor:
        """l_s of SMART (Jiang et al. 2020): symmetrized KL for a classification, squared error for a regression."""
        return self.symmetrized_kl(reference, other)

    def dropout_divergence(self, reference: Tensor, other: Tensor) -> Tensor:
        """The distance of two dropout passes in R-Drop (Liang et al. 2021): half the symmetrized KL divergence."""
        return self.symmetrized_kl(reference, other) / 2

    def curvature(self, logits: Tensor, u: Tensor) -> Tensor:
        """The Hessian of every divergence above at equal outputs, times u, up to a positive factor per row: (B, C).

        For a distribution it is the Fisher information of the logits. One logit has a single direction.
        """
        return u

    def distillation(self, logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        """T^2 KL(teacher || student) with both logits divided by the temperature T; the mean over the batch."""
        log_q, log_p = (self.log_probabilities(x / temperature) for x in (logits, teacher))
        return temperature**2 * (log_p.exp() * (log_p - log_q)).sum(dim=1).mean()

    # Several models' logits (M, B, C), weights (M,) -> (B, C)

    def mean_logits(self, logits: Tensor, weights: Tensor) -> Tensor:
        """The weighted mean of the logits; after the softmax, the geometric mean of the probabilities."""
        return torch.tensordot(weights, logits, dims=1)

    def mean_probabilities(self, logits: Tensor, weights: Tensor) -> Tensor:
        """The weighted mean of the probabilities, as logits, computed in the log domain so that it stays finite."""
        weighted = self.log_probabilities(logits) + weights.log()[:, None, None]  # (M, B, G)
        return self.as_logits(weighted.logsumexp(dim=0))  # (B, G) -> (B, C)

    def majority(self, logits: Tensor, weights: Tensor) -> Tensor:
        """The class that most models predict.

        The mean probability is added as a fractional vote: it breaks ties and, being below 1, decides nothing else. The
        result is a distribution, so a student can learn from it. Every model counts alike.
        """
        votes = torch.stack([self.decode(of_model) for of_model in logits]).long()  # (M, B)
        log_p = self.log_probabilities(logits)  # (M, B, G)
        ballots = F.one_hot(votes, log_p.size(-1)).sum(dim=0) + log_p.exp().mean(dim=0)  # (B, G)
        shares = ballots / (len(logits) + 1)
        return self.as_logits(shares.clamp_min(torch.finfo(shares.dtype).tiny).log())  # a share can underflow to zero


@dataclass(frozen=True)
class Category(Target):
    """One of `num_logits` classes, one logit each. Labels 0 .. C-1; score: accuracy."""

    num_logits: int
    noun: ClassVar = "category"
    problem_type: ClassVar = "single_label_classification"
    formula: ClassVar = "logits.softmax(dim=1)"
    default_loss: ClassVar = "ce"

    @property
    def num_classes(self) -> int:
        return self.num_logits

    def parse_label(self, text: str) -> int:
        return whole_number(text, 0, self.num_logits - 1)

    def decode(self, logits: Tensor) -> Tensor:
        return logits.argmax(dim=1)

    def loss_of_guessing(self) -> float:
        return math.log(self.num_logits)

    @property
    def probability_names(self) -> tuple[str, ...]:
        return tuple(f"p_{c}" for c in range(self.num_logits))

    def probabilities(self, logits: Tensor) -> Tensor:
        return logits.softmax(dim=1)

    def log_probabilities(self, logits: Tensor) -> Tensor:
        return logits.log_softmax(dim=-1)

    def curvature(self, logits: Tensor, u: Tensor) -> Tensor:
        """(diag(p) - p p^T) u with p = softmax(logits)"""
        p = logits.softmax(dim=1)
        return p * (u - (p * u).sum(dim=1, keepdim=True))

    def mean_logits(self, logits: Tensor, weights: Tensor) -> Tensor:
        return super().mean_logits(logits, weights).log_softmax(dim=-1)


@dataclass(frozen=True)
class Probability(Target):
    """Whether something holds: one logit, whose sigmoid is the probability. Labels 0 and 1; score: accuracy."""

    noun: ClassVar = "probability"
    problem_type: ClassVar = "multi_label_classification"  # a sigmoid for each logit
    activation: ClassVar = nn.Sigmoid
    formula: ClassVar = "logits.sigmoid()"
    default_loss: ClassVar = "bce"
    num_classes: ClassVar[int] = 2
    # A cosine c starts as the logit 10 (c - 0.75): BERT's cosines are nearly all positive, so the threshold must be
    # high (docs/PITFALLS.md, 27).
    cosine_scale: ClassVar[tuple[float, float]] = (10.0, -7.5)

    def parse_label(self, text: str) -> int:
        return whole_number(text, 0, 1)

    def decode(self, logits: Tensor) -> Tensor:
        return logits.flatten().sigmoid().round()

    def loss_of_guessing(self) -> float:
        return math.log(2)

    @property
    def probability_names(self) -> tuple[str, ...]:
        return ("p",)

    def probabilities(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """(..., 1) -> (..., 2). A single logit is never passed through a softmax, which would give the constant 1."""
        return torch.cat([F.logsigmoid(-logits), F.logsigmoid(logits)], dim=-1)

    def as_logits(self, log_probabilities: Tensor) -> Tensor:
        return log_probabilities[..., 1:] - log_probabilities[..., :1]

    def fraction(self, labels: Tensor) -> Tensor:
        """Labels as fractions of their range: 0 to 1."""
        return labels

    def is_positive(self, labels: Tensor, threshold: float) -> Tensor:
        """Which rows are positive pairs of a contrastive loss; the threshold is for numbers."""
        return labels >= 1


@dataclass(frozen=True)
class Number(Target):
    """A number from low to high, predicted as it is. Score: Pearson's correlation."""

    low: float
    high: float
    noun: ClassVar = "number"
    problem_type: ClassVar = "regression"
    default_loss: ClassVar = "mse"
    uncertainty_factor: ClassVar = 0.5

    @property
    def range(self) -> float:
        return self.high - self.low

    @property
    def cosine_scale(self) -> tuple[float, float]:
        """(a, b) so that a c + b is the first guess from a cosine c: 0 is the lowest number, 1 the highest."""
        return float(self.range), float(self.low)

    def parse_label(self, text: str) -> float:
        rule = f"must be a number from {self.low:g} to {self.high:g}"
        value = _number(text, rule)
        if not self.low <= value <= self.high:
            raise ValueError(f"{rule}, found {text!r}")
        return value

    def parse_prediction(self, text: str) -> float:
        return float(text)  # any number: Pearson's correlation does not depend on the range

    def decode(self, logits: Tensor) -> Tensor:
        return logits.flatten()

    def as_labels(self, logits: Tensor) -> Tensor:
        return self.decode(logits).clamp(self.low, self.high)

    def score(self, predictions: np.ndarray, labels: np.ndarray) -> float:
        return pearson(predictions, labels)

    def hits(self, predictions: np.ndarray, labels: np.ndarray) -> None:
        return None

    def mistakes(self, logits: Tensor, labels: Tensor) -> Tensor:
        """How far each prediction is from its label: (rows,)."""
        return (logits.double().flatten() - labels).abs()

    def plain(self, value: float) -> float:
        return round(float(value), 6)

    def in_words(self, value: float, names: tuple[str, ...]) -> str:
        return f"{value:.2f} on a scale from {self.low:g} to {self.high:g}"

    def fractions(self, logits: Tensor) -> Tensor:
        return self.fraction(logits).clamp(0, 1)

    def label_counts(self, labels: np.ndarray) -> dict[str, int]:
        counts, edges = np.histogram(labels, bins=5, range=(self.low, self.high))
        names = (f"{low:g}-{high:g}" for low, high in itertools.pairwise(edges))
        return dict(zip(names, counts.tolist(), strict=True))

    def share_of_overall(self, score: float) -> float:
        return (score + 1) / 2  # a correlation lies between -1 and 1

    def fraction(self, labels: Tensor) -> Tensor:
        """Labels as fractions of their range: 0 to 1."""
        return (labels - self.low) / self.range

    def is_positive(self, labels: Tensor, threshold: float) -> Tensor:
        """Which rows are positive pairs of a contrastive loss: those with a label of at least `threshold`."""
        return labels >= threshold

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """A Bernoulli variable's: (..., 1) -> (..., 2).

        The number x becomes the probability sigmoid(4 (x - middle) / range), which is tangent to (x - low) / range at
        the middle and, unlike it, stays between 0 and 1 whatever a head returns.
        """
        x = 4 / self.range * (logits - (self.low + self.high) / 2)
        return torch.cat([F.logsigmoid(-x), F.logsigmoid(x)], dim=-1)

    def squared_error(self, reference: Tensor, other: Tensor) -> Tensor:
        return (reference.double() - other.double()).square().sum(dim=1)

    divergence = dropout_divergence = squared_error

    def distillation(self, logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        """The mean squared difference from the teacher; a number has no temperature."""
        return F.mse_loss(logits, teacher)

    def mean_probabilities(self, logits: Tensor, weights: Tensor) -> Tensor:
        """A number has no probabilities: the weighted mean."""
        return self.mean_logits(logits, weights)

    def majority(self, logits: Tensor, weights: Tensor) -> Tensor:
        """The median; of an even number of models, the mean of the middle two."""
        return torch.quantile(logits, 0.5, dim=0)


def whole_number(text: str, low: int, high: int) -> int:
    """Read a whole number from low to high; `1.0` counts as 1, as Quora writes it."""
    rule = f"must be a whole number from {low} to {high}" if high - low > 1 else f"must be {low} or {high}"
    value = _number(text, rule)
    if value not in range(low, high + 1):
        raise ValueError(f"{rule}, found {text!r}")
    return int(value)


def _number(text: str, rule: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{rule}, found {text!r}") from None


def accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    return float((predictions == labels).mean())


def pearson(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Pearson's correlation; 0 if one side is constant, since nothing is explained then."""
    x, y = (values.astype(np.float64) - values.mean(dtype=np.float64) for values in (predictions, labels))
    norm = math.sqrt((x @ x) * (y @ y))
    return float(x @ y / norm) if norm > 0 else 0.0


# --- the tasks --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A task as plain data, independent of training."""

    name: str  # prefix of flags, logs and prediction files
    files: str  # the course's file name, with {} for train, dev, test-student
    text_columns: tuple[str, ...]
    label_column: str
    predicts: Target
    csv_header: str  # first line of a prediction file, literally the handout's
    class_names: tuple[str, ...] = ()  # what the classes mean, for people; see `names`
    about: str = ""  # what the task is and where its data comes from, for a model card

    @property
    def names(self) -> tuple[str, ...]:
        """A name for each class that a prediction can be; empty if predictions are numbers."""
        return self.class_names or tuple(f"class {c}" for c in range(self.predicts.num_classes))

    @property
    def output_names(self) -> tuple[str, ...]:
        """A name for each logit: the class that it speaks for, or the label's."""
        return self.names[-self.predicts.num_logits :] or (self.label_column,)

    @property
    def is_pair(self) -> bool:
        return len(self.text_columns) == 2

    def filename(self, split: str) -> str:
        return self.files.format("test-student" if split == "test" else split)


ONE_SENTENCE = ("sentence",)
TWO_SENTENCES = ("sentence1", "sentence2")

SST = Task(
    name="sst",
    files="ids-sst-{}.csv",
    text_columns=ONE_SENTENCE,
    label_column="sentiment",
    predicts=Category(5),
    csv_header="id \t Predicted_Sentiment \n",
    class_names=("negative", "somewhat negative", "neutral", "somewhat positive", "positive"),
    about="the sentiment of a phrase or sentence from an English movie review, as in the Stanford Sentiment Treebank",
)
CFIMDB = Task(
    name="cfimdb",
    files="ids-cfimdb-{}.csv",
    text_columns=ONE_SENTENCE,
    label_column="sentiment",
    predicts=Category(2),
    csv_header="id \t Predicted_Sentiment \n",
    class_names=("negative", "positive"),
    about="the sentiment of a whole English movie review, as in CFIMDB, whose reviews take sides clearly",
)
PARA = Task(
    name="para",
    files="quora-{}.csv",
    text_columns=TWO_SENTENCES,
    label_column="is_duplicate",
    predicts=Probability(),
    csv_header="id \t Predicted_Is_Paraphrase \n",
    class_names=("not a paraphrase", "paraphrase"),
    about="whether two questions of English Quora users ask the same thing, as in the Quora Question Pairs",
)
STS = Task(
    name="sts",
    files="sts-{}.csv",
    text_columns=TWO_SENTENCES,
    label_column="similarity",
    predicts=Number(0, 5),
    csv_header="id \t Predicted_Similiary \n",  # the starter's spelling; the leaderboard expects it
    about="how similar two English sentences are in meaning, as in the STS Benchmark of news, captions and forums",
)
TASKS = {task.name: task for task in (SST, CFIMDB, PARA, STS)}
