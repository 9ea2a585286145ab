"""How certain a score is: bootstrap confidence intervals, and tests of whether two models differ on the same rows.

A dev set is a sample. Another sample of the same size would give another score, and the bootstrap (Efron 1979) shows
how different: it draws rows with replacement and scores them again. For the overall score, every task's rows are drawn.

Two models that were scored on the same rows are compared row by row. For an accuracy, McNemar's exact test (1947) looks
at the rows that only one of them gets right. For a correlation, and for the overall score, both models are scored on
the same drawn rows (the paired bootstrap).
"""

import zlib
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from tasks import Target

ROUNDS = 2000  # samples that the bootstrap draws
LEVEL = 0.95  # of a confidence interval


class Interval(NamedTuple):
    """A score with its 95% confidence interval."""

    score: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.score:.3f} [{self.low:.3f}, {self.high:.3f}]"


class Scored(NamedTuple):
    """A model's predictions for the rows of a task, with their labels; (rows,) each."""

    target: Target
    values: np.ndarray
    labels: np.ndarray

    @property
    def score(self) -> float:
        return self.target.score(self.values, self.labels)


def drawn_scores(scored: Scored, seed: int | list[int] = 0, rounds: int = ROUNDS) -> np.ndarray:
    """The scores of samples of the rows, drawn with replacement: (rounds,). The same seed draws the same rows."""
    from scipy.stats import bootstrap  # half a second to import, so only where it is needed

    if len(scored.values) < 2:
        return np.full(rounds, scored.score)
    found = bootstrap(
        (scored.values, scored.labels),
        scored.target.score,
        paired=True,
        vectorized=False,
        n_resamples=rounds,
        batch=100,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    return found.bootstrap_distribution


def interval(score: float, drawn: np.ndarray) -> Interval:
    """The interval that holds the middle 95% of the drawn scores (the percentile bootstrap)."""
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(score, float(low), float(high))


def score_interval(scored: Scored, seed: int = 0) -> Interval:
    return interval(scored.score, drawn_scores(scored, seed))


def drawn_overall(tasks: Mapping[str, Scored], seed: int = 0) -> np.ndarray:
    """The 2024 overall scores of samples of every task's rows: (rounds,).

    Tasks are drawn independently of each other, also if they have the same number of rows. Two models are drawn alike.
    """
    drawn = {name: drawn_scores(scored, [seed, zlib.crc32(name.encode())]) for name, scored in tasks.items()}
    return np.mean([scored.target.share_of_overall(drawn[name]) for name, scored in tasks.items()], axis=0)


def overall_score(tasks: Mapping[str, Scored]) -> float:
    return float(np.mean([scored.target.share_of_overall(scored.score) for scored in tasks.values()]))


def overall_interval(tasks: Mapping[str, Scored], seed: int = 0) -> Interval:
    return interval(overall_score(tasks), drawn_overall(tasks, seed))


# --- two models on the same rows --------------------------------------------------------------------------------------


class Comparison(NamedTuple):
    """The difference of two models' scores, second - first.

    p: the probability of a difference at least this large if the models were equally good.
    """

    difference: float
    p: float
    method: str


def compare(first: Scored, second: Scored, seed: int = 0) -> Comparison:
    """Compare two models on the rows of a task; both must have the same labels in the same order."""
    hits = [scored.target.hits(scored.values, scored.labels) for scored in (first, second)]
    difference = second.score - first.score
    if hits[0] is None:
        drawn = drawn_scores(second, seed) - drawn_scores(first, seed)
        return Comparison(difference, bootstrap_p(drawn), "paired bootstrap")
    return Comparison(difference, mcnemar_p(*hits), "McNemar")


def compare_overall(first: Mapping[str, Scored], second: Mapping[str, Scored], seed: int = 0) -> Comparison:
    draw = partial(drawn_overall, seed=seed)
    difference = overall_score(second) - overall_score(first)
    return Comparison(difference, bootstrap_p(draw(second) - draw(first)), "paired bootstrap")


def mcnemar_p(first: np.ndarray, second: np.ndarray) -> float:
    """McNemar's exact test, two-sided. first, second: which rows each model gets right."""
    from scipy.stats import binomtest

    only_first, only_second = int(np.sum(first & ~second)), int(np.sum(second & ~first))
    if only_first + only_second == 0:
        return 1.0
    return float(binomtest(only_first, only_first + only_second, 0.5).pvalue)


def bootstrap_p(drawn: np.ndarray) -> float:
    """Two-sided p-value of drawn differences: twice the share on the other side of zero, never exactly 0."""
    below, above = np.mean(drawn <= 0), np.mean(drawn >= 0)
    return float(min(1.0, max(2 * min(below, above), 1 / len(drawn))))
