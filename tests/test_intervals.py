"""Confidence intervals and paired tests, against closed forms, scipy and an exhaustive count."""

import itertools
import math

import numpy as np
import pytest
from scipy.stats import norm, pearsonr

from intervals import (
    Scored,
    bootstrap_p,
    compare,
    compare_overall,
    drawn_scores,
    mcnemar_p,
    overall_interval,
    score_interval,
)
from tasks import PARA, SST, STS


def right_at(rate: float, rows: int, seed: int = 0) -> Scored:
    """Predictions of five grades of which about this share is right."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 5, rows)
    return Scored(SST.predicts, np.where(generator.random(rows) < rate, labels, (labels + 1) % 5), labels)


def noisy(noise: float, rows: int = 800, seed: int = 0) -> Scored:
    labels = np.random.default_rng(1).uniform(0, 5, rows)
    return Scored(STS.predicts, labels + np.random.default_rng(seed).normal(0, noise, rows), labels)


@pytest.mark.parametrize("rate", [0.5, 0.9])
def test_the_interval_of_an_accuracy_is_that_of_the_normal_approximation(rate: float) -> None:
    scored = right_at(rate, 2000)
    found, half = score_interval(scored), norm.ppf(0.975) * math.sqrt(scored.score * (1 - scored.score) / 2000)
    assert found.score == scored.score
    assert found.low == pytest.approx(scored.score - half, abs=0.004)
    assert found.high == pytest.approx(scored.score + half, abs=0.004)


def test_the_interval_of_a_correlation_is_that_of_fishers_transformation() -> None:
    scored = noisy(1.0)
    found, exact = score_interval(scored), pearsonr(scored.values, scored.labels)
    assert found.score == pytest.approx(exact.statistic, abs=1e-12)
    # Fisher's transformation assumes normal labels, and these are uniform: the intervals agree to half a point.
    assert found[1:] == pytest.approx(tuple(exact.confidence_interval(0.95)), abs=0.005)


def test_the_interval_covers_the_true_accuracy_nineteen_times_in_twenty() -> None:
    covered = [
        (found := score_interval(right_at(0.7, 300, seed), seed)).low <= 0.7 <= found.high for seed in range(100)
    ]
    assert 88 <= sum(covered) <= 100  # binomial: below 88 once in 300 such tests


def test_the_overall_interval_is_narrower_than_those_of_its_tasks() -> None:
    parts = {"sst": right_at(0.5, 400), "sts": noisy(1.0, 400)}
    found, of_sst = overall_interval(parts), score_interval(parts["sst"])
    assert found.score == pytest.approx((parts["sst"].score + (parts["sts"].score + 1) / 2) / 2)
    assert found.high - found.low < of_sst.high - of_sst.low


def test_the_same_seed_draws_the_same_rows() -> None:
    assert (drawn_scores(noisy(1.0), 3) == drawn_scores(noisy(1.0), 3)).all()
    assert not (drawn_scores(noisy(1.0), 3) == drawn_scores(noisy(1.0), 4)).all()


def test_one_row_has_an_interval() -> None:
    one = Scored(PARA.predicts, np.array([1.0]), np.array([1]))
    assert score_interval(one) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(("only_first", "only_second"), [(0, 0), (1, 0), (3, 9), (0, 6), (5, 5)])
def test_mcnemars_test_counts_the_coin_flips_that_are_as_uneven(only_first: int, only_second: int) -> None:
    first = np.array([True] * only_first + [False] * only_second + [True, False])
    second = np.array([False] * only_first + [True] * only_second + [True, False])
    total, uneven = only_first + only_second, abs(only_first - only_second)
    flips = itertools.product((0, 1), repeat=total)
    as_uneven = sum(abs(2 * sum(flip) - total) >= uneven for flip in flips)
    assert mcnemar_p(first, second) == pytest.approx(as_uneven / 2**total)


def test_a_model_does_not_differ_from_itself_and_differs_from_a_worse_one() -> None:
    good, same, bad = right_at(0.8, 500), right_at(0.8, 500), right_at(0.5, 500)
    assert compare(good, same) == (0.0, 1.0, "McNemar")
    found = compare(good, bad)
    assert found.difference == bad.score - good.score
    assert found.p < 1e-6


def test_two_correlations_are_compared_on_the_same_drawn_rows() -> None:
    """The difference of two similar models is far more certain than either score."""
    first = noisy(1.0)
    second = Scored(first.target, first.values * 0.98 + first.labels * 0.02, first.labels)
    apart = score_interval(first)
    assert apart.low < second.score < apart.high, "the intervals overlap"
    found = compare(first, second)
    assert (found.method, found.difference > 0) == ("paired bootstrap", True)
    assert found.p < 0.01
    assert compare(first, first).p == 1.0


def test_the_p_value_of_drawn_differences_has_the_right_size_where_nothing_differs() -> None:
    shifts = norm.rvs(size=400, random_state=5)  # the bootstrap is centered at the difference that was found
    ps = [bootstrap_p(np.random.default_rng(seed).normal(shift, 1, 2000)) for seed, shift in enumerate(shifts)]
    assert 5 <= sum(p < 0.05 for p in ps) <= 40  # 20 are expected


def test_overall_scores_are_compared_too() -> None:
    first = {"sst": right_at(0.5, 600), "sts": noisy(1.0)}
    better = {"sst": right_at(0.9, 600), "sts": noisy(0.5)}
    assert compare_overall(first, first).p == 1.0
    assert compare_overall(first, better).difference > 0.1
    assert compare_overall(first, better).p < 0.01


def test_tasks_with_the_same_number_of_rows_are_drawn_independently() -> None:
    labels = np.zeros(150, dtype=int)
    alike = Scored(SST.predicts, (np.arange(150) >= 90).astype(int), labels)  # 60% right, the same rows in both tasks
    found, oracle = overall_interval({"a": alike, "b": alike}), np.random.default_rng(1).binomial(150, 0.6, (20_000, 2))
    low, high = np.quantile(oracle.mean(axis=1) / 150, [0.025, 0.975])
    assert (found.low, found.high) == (pytest.approx(low, abs=0.01), pytest.approx(high, abs=0.01))
