"""Which tasks make up each training step. A sampler sees the number of batches of each task and nothing else."""

import argparse
import itertools
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from utils import InputError, number

Step = tuple[str, ...]  # the tasks of one update, in the order of the tasks


class Sampler:
    """batches: in one pass over each task's data. steps_per_epoch: None for as many as the method itself has.

    steps(epoch) is a function of the seed and the epoch (from 1) alone, so a resumed run sees what the whole one saw.
    """

    tasks_per_step: ClassVar[str]  # "one", or "all" that still have batches

    def __init__(self, batches: dict[str, int], epochs: int, seed: int, steps_per_epoch: int | None = None):
        for name, count in batches.items():
            if count < 1:
                raise InputError(f"{name}: a task needs at least one batch, found {count}. Check its training data.")
        self.batches, self.epochs, self.seed, self.steps_per_epoch = batches, epochs, seed, steps_per_epoch

    def steps(self, epoch: int) -> Iterator[Step]:
        return itertools.islice(self._steps(epoch), self.length())

    def length(self) -> int:
        """Steps in an epoch: the method's own number, or fewer where steps_per_epoch says so."""
        return min(self._length(), self.steps_per_epoch or self._length())

    def total_steps(self) -> int:
        return self.epochs * self.length()

    def _steps(self, epoch: int) -> Iterator[Step]:
        raise NotImplementedError

    def _length(self) -> int:
        raise NotImplementedError


# --- every batch in a fixed order -------------------------------------------------------------------------------------


class Sequential(Sampler):
    """The whole of one task after the whole of another, every epoch. The baseline of paper 000."""

    tasks_per_step = "one"

    def _steps(self, epoch: int) -> Iterator[Step]:
        for name, count in self.batches.items():
            yield from itertools.repeat((name,), count)

    def _length(self) -> int:
        return sum(self.batches.values())


class RoundRobin(Sampler):
    """One batch of every task a step; a task that has run out drops out. Paper 004, iteration 4; paper 003."""

    tasks_per_step = "all"

    def _steps(self, epoch: int) -> Iterator[Step]:
        for step in range(self._length()):
            yield tuple(name for name, count in self.batches.items() if step < count)

    def _length(self) -> int:
        return max(self.batches.values())


class Combined(RoundRobin):
    """One batch of every task a step, until the shortest task ends. Paper 000, section 4.3.1.

    Deviation: the paper takes one example of each task at a time; a batch of one is --batch_size 1.
    """

    def _length(self) -> int:
        return min(self.batches.values())


class Balanced(RoundRobin):
    """One batch of every task a step, until the longest task ends; shorter ones start anew. Paper 004, iteration 6."""

    def _steps(self, epoch: int) -> Iterator[Step]:
        return itertools.repeat(tuple(self.batches), self._length())


# --- one task a step, drawn with probability ~ N^alpha ----------------------------------------------------------------


class Drawn(Sampler):
    """Task i with probability N_i^alpha / sum_j N_j^alpha, N its number of batches (arXiv:1902.02671).

    An epoch has steps_per_epoch steps, or as many as there are batches of all tasks.
    """

    tasks_per_step = "one"
    alpha: ClassVar[float]

    def exponent(self, epoch: int) -> float:
        return self.alpha

    def probabilities(self, epoch: int) -> np.ndarray:
        weights = np.array(list(self.batches.values()), dtype=np.float64) ** self.exponent(epoch)
        return weights / weights.sum()

    def length(self) -> int:
        return self.steps_per_epoch or sum(self.batches.values())

    def _steps(self, epoch: int) -> Iterator[Step]:
        generator = np.random.default_rng([self.seed, epoch])
        drawn = generator.choice(len(self.batches), size=self.length(), p=self.probabilities(epoch))
        names = list(self.batches)
        return ((names[i],) for i in drawn)


class Uniform(Drawn):
    """Every task as often as any other: alpha = 0."""

    alpha = 0.0


class Proportional(Drawn):
    """Every example as often as any other: alpha = 1."""

    alpha = 1.0


class SquareRoot(Drawn):
    """In between: alpha = 0.5."""

    alpha = 0.5


class Annealed(Drawn):
    """alpha = 1 - 0.8 (e - 1) / (E - 1) in epoch e of E: proportional first, then ever more even.

    Stickland & Murray 2019 (arXiv:1902.02671), on sampling tasks. Deviation: none; a single epoch has alpha = 1.
    """

    def exponent(self, epoch: int) -> float:
        return 1 - 0.8 * (epoch - 1) / max(1, self.epochs - 1)


SAMPLERS: dict[str, type[Sampler]] = {
    "sequential": Sequential,
    "combined": Combined,
    "round_robin": RoundRobin,
    "balanced": Balanced,
    "uniform": Uniform,
    "proportional": Proportional,
    "sqrt": SquareRoot,
    "annealed": Annealed,
}


# --- flags ------------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--sampler", choices=sorted(SAMPLERS), default="round_robin", help="which tasks make up a step")
    group.add_argument(
        "--steps_per_epoch",
        type=number(int, 1, 10**9),
        help="steps in an epoch, before --accumulate; None: as the sampler has. At most, where the order is fixed",
    )


def build_sampler(args: argparse.Namespace, batches: dict[str, int]) -> Sampler:
    return SAMPLERS[args.sampler](batches, args.epochs, args.seed, args.steps_per_epoch)
