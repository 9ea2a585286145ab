"""Samplers: exact counts, exact orders for fixed samplers, frequencies for random ones."""

import argparse
import itertools
import math
from collections import Counter

import numpy as np
import pytest

from flags import ArgumentParser
from sampling import SAMPLERS, Drawn, Sampler, add_arguments, build_sampler
from utils import InputError

BATCHES = {"sst": 5, "para": 12, "sts": 3}
DRAWN = sorted(name for name, sampler in SAMPLERS.items() if issubclass(sampler, Drawn))
FIXED = sorted(SAMPLERS.keys() - set(DRAWN))
LENGTHS = {"sequential": 20, "combined": 3, "round_robin": 12, "balanced": 12} | dict.fromkeys(DRAWN, 20)


def sampler(name: str, batches: dict[str, int] = BATCHES, epochs: int = 4, seed: int = 11, steps=None) -> Sampler:
    return SAMPLERS[name](batches, epochs, seed, steps)


@pytest.mark.parametrize("steps_per_epoch", [None, 1, 2, 7, 1000])
@pytest.mark.parametrize("name", sorted(SAMPLERS))
def test_every_epoch_has_the_stated_length(name: str, steps_per_epoch: int | None) -> None:
    ours = sampler(name, steps=steps_per_epoch)
    wanted = steps_per_epoch or LENGTHS[name]
    length = wanted if name in DRAWN else min(wanted, LENGTHS[name])
    assert ours.length() == length
    assert [len(list(ours.steps(epoch))) for epoch in range(1, 5)] == [length] * 4


@pytest.mark.parametrize("name", sorted(SAMPLERS))
def test_a_step_has_known_tasks_without_repetition_and_as_many_as_the_sampler_states(name: str) -> None:
    for epoch in (1, 4):
        for step in sampler(name).steps(epoch):
            assert isinstance(step, tuple)
            assert list(step) == [task for task in BATCHES if task in step], "in the order of BATCHES, each once"
            assert {"one": len(step) == 1, "all": len(step) >= 1}[sampler(name).tasks_per_step]


@pytest.mark.parametrize("name", sorted(SAMPLERS))
def test_steps_depend_only_on_seed_and_epoch(name: str) -> None:
    """A run resumed in epoch 3 sees the same steps as an uninterrupted one; numpy's global generator is not used."""
    whole = sampler(name)
    epochs = [list(whole.steps(epoch)) for epoch in range(1, 5)]
    np.random.seed(5)
    before = np.random.get_state()[1].copy()
    assert list(sampler(name).steps(3)) == epochs[2] == list(whole.steps(3))
    assert (np.random.get_state()[1] == before).all()
    if name in DRAWN:
        assert epochs[0] != epochs[1]
        assert list(sampler(name, seed=12).steps(1)) != epochs[0]


@pytest.mark.parametrize("name", sorted(SAMPLERS))
def test_a_single_task_is_seen_as_often_as_it_has_batches(name: str) -> None:
    assert list(sampler(name, {"sst": 6}, epochs=1).steps(1)) == [("sst",)] * 6


@pytest.mark.parametrize("name", ["sequential", "round_robin"])
def test_every_batch_of_every_task_is_seen_once(name: str) -> None:
    assert Counter(task for step in sampler(name).steps(2) for task in step) == BATCHES


def test_sequential_takes_one_whole_task_after_another() -> None:
    assert list(sampler("sequential").steps(1)) == [("sst",)] * 5 + [("para",)] * 12 + [("sts",)] * 3


def test_combined_ends_with_the_smallest_task() -> None:
    assert list(sampler("combined").steps(1)) == [("sst", "para", "sts")] * 3


def test_round_robin_drops_a_task_that_has_run_out() -> None:
    expected = [("sst", "para", "sts")] * 3 + [("sst", "para")] * 2 + [("para",)] * 7
    assert list(sampler("round_robin").steps(1)) == expected


def test_balanced_has_every_task_in_every_step_until_the_largest_runs_out() -> None:
    assert list(sampler("balanced").steps(1)) == [("sst", "para", "sts")] * 12


EXPONENTS = {"uniform": lambda e, E: 0.0, "proportional": lambda e, E: 1.0, "sqrt": lambda e, E: 0.5}
EXPONENTS["annealed"] = lambda e, E: 1 - 0.8 * (e - 1) / (E - 1)


@pytest.mark.parametrize("epoch", [1, 2, 5])
@pytest.mark.parametrize("name", DRAWN)
def test_tasks_are_drawn_with_probability_n_to_the_alpha(name: str, epoch: int) -> None:
    n = 40_000
    ours = sampler(name, epochs=5, steps=n)
    weights = [count ** EXPONENTS[name](epoch, 5) for count in BATCHES.values()]
    expected = np.array(weights) / sum(weights)
    np.testing.assert_allclose(ours.probabilities(epoch), expected, rtol=1e-12)
    counts = Counter(task for (task,) in ours.steps(epoch))
    for task, p in zip(BATCHES, expected, strict=True):
        assert abs(counts[task] / n - p) < 5 * math.sqrt(p * (1 - p) / n), task


def test_annealing_lowers_alpha_from_1_to_one_fifth_and_allows_a_single_epoch() -> None:
    """Stickland & Murray 2019: alpha = 1 - 0.8 (e - 1) / (E - 1)."""
    ours = sampler("annealed", epochs=5)
    assert [ours.exponent(e) for e in range(1, 6)] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert sampler("annealed", epochs=1).exponent(1) == 1.0


def test_drawn_tasks_are_mixed_within_an_epoch() -> None:
    """Draws are independent: a step does not predict the next one."""
    steps = [task for (task,) in sampler("uniform", steps=30_000).steps(1)]
    same = sum(a == b for a, b in itertools.pairwise(steps)) / 30_000
    assert abs(same - 1 / 3) < 5 * math.sqrt(2 / 9 / 30_000)


@pytest.mark.parametrize("name", sorted(SAMPLERS))
def test_a_task_without_batches_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="para: a task needs at least one batch, found 0"):
        sampler(name, {"sst": 3, "para": 0})


def test_flags_choose_the_sampler_and_its_length() -> None:
    parser = ArgumentParser("test", "")
    add_arguments(parser)
    for name, kind in SAMPLERS.items():
        args = parser.parse_args(["--sampler", name, "--steps_per_epoch", "2"])
        ours = build_sampler(argparse.Namespace(**vars(args), epochs=3, seed=1), BATCHES)
        assert type(ours) is kind
        assert (ours.epochs, ours.length()) == (3, 2)
    assert parser.parse_args([]).sampler == "round_robin"
    assert parser.parse_args([]).steps_per_epoch is None
    with pytest.raises(InputError, match="at least 1"):
        parser.parse_args(["--steps_per_epoch", "0"])
