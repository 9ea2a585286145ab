"""Samplers: which tasks take part in each training step. A sampler only knows the number of batches of each task.

Student papers are cited by their authors; recipes/README.md lists them.
"""

import argparse
import itertools
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from flags import ALWAYS, ArgumentParser, number
from utils import InputError

TaskNames = tuple[str, ...]  # the tasks of one step, in the order of `batches`


class Sampler:
    """Yields the tasks of every step of an epoch.

    batches: number of batches in one pass over each task's data. steps_per_epoch: None for the sampler's own length.
    steps(epoch) depends only on the seed and the epoch (from 1), so a resumed run sees the same steps as an
    uninterrupted one.
    """

    tasks_per_step: ClassVar[str]  # "one", or "all" (every task that still has batches)

    def __init__(self, batches: dict[str, int], epochs: int, seed: int, steps_per_epoch: int | None = None):
        for name, count in batches.items():
            if count < 1:
                raise InputError(f"{name}: a task needs at least one batch, found {count}. Check its training data.")
        self.batches, self.epochs, self.seed, self.steps_per_epoch = batches, epochs, seed, steps_per_epoch

    def steps(self, epoch: int) -> Iterator[TaskNames]:
        return itertools.islice(self._steps(epoch), self.length())

    def length(self) -> int:
        """Number of steps in an epoch: the sampler's own length, capped at steps_per_epoch."""
        return min(self._length(), self.steps_per_epoch or self._length())

    def _steps(self, epoch: int) -> Iterator[TaskNames]:
        raise NotImplementedError

    def _length(self) -> int:
        raise NotImplementedError


# --- fixed order ------------------------------------------------------------------------------------------------------


class Sequential(Sampler):
    """All batches of the first task, then all of the second, and so on, in every epoch. The baseline of Hicks & Liu."""

    tasks_per_step = "one"

    def _steps(self, epoch: int) -> Iterator[TaskNames]:
        for name, count in self.batches.items():
            yield from itertools.repeat((name,), count)

    def _length(self) -> int:
        return sum(self.batches.values())


class RoundRobin(Sampler):
    """One batch of every task per step; a task that runs out drops out. Ramos & Dalmia, iteration 4; Chue et al."""

    tasks_per_step = "all"

    def _steps(self, epoch: int) -> Iterator[TaskNames]:
        for step in range(self._length()):
            yield tuple(name for name, count in self.batches.items() if step < count)

    def _length(self) -> int:
        return max(self.batches.values())


class Combined(RoundRobin):
    """One batch of every task per step, until the smallest task runs out. Hicks & Liu, section 4.3.1.

    Deviation: the paper takes one example of each task at a time, which is --batch_size 1 here.
    """

    def _length(self) -> int:
        return min(self.batches.values())


class Balanced(RoundRobin):
    """One batch of every task per step, until the largest task runs out; smaller ones start over.

    Ramos & Dalmia, iteration 6.
    """

    def _steps(self, epoch: int) -> Iterator[TaskNames]:
        return itertools.repeat(tuple(self.batches), self._length())


# --- one random task per step, with probability proportional to N^alpha -----------------------------------------------


class Drawn(Sampler):
    """Draws task i with probability N_i^alpha / sum_j N_j^alpha, N_i its number of batches (arXiv:1902.02671).

    An epoch has steps_per_epoch steps, by default as many as all tasks together have batches.
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

    def _steps(self, epoch: int) -> Iterator[TaskNames]:
        generator = np.random.default_rng([self.seed, epoch])
        drawn = generator.choice(len(self.batches), size=self.length(), p=self.probabilities(epoch))
        names = list(self.batches)
        return ((names[i],) for i in drawn)


class Uniform(Drawn):
    """alpha = 0: every task is equally likely."""

    alpha = 0.0


class Proportional(Drawn):
    """alpha = 1: every example is equally likely."""

    alpha = 1.0


class SquareRoot(Drawn):
    """alpha = 0.5: in between."""

    alpha = 0.5


class Annealed(Drawn):
    """alpha = 1 - 0.8 (e - 1) / (E - 1) in epoch e of E: proportional at first, then increasingly even.

    Stickland & Murray 2019 (arXiv:1902.02671). Deviation: none; if there is only one epoch, alpha = 1.
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


def one_task_per_step(args: argparse.Namespace) -> bool:
    return SAMPLERS[args.sampler].tasks_per_step == "one"


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.section("steps: which tasks, and how their gradients are combined")
    add("--sampler", choices=sorted(SAMPLERS), default="round_robin", needs=ALWAYS, help="which tasks make up a step")
    add("--steps_per_epoch", type=number(int, 1, 10**9), needs=ALWAYS,
        help="steps per epoch, before --accumulate (default: the sampler's own number)")  # fmt: skip


def build_sampler(args: argparse.Namespace, batches: dict[str, int]) -> Sampler:
    return SAMPLERS[args.sampler](batches, args.epochs, args.seed, args.steps_per_epoch)
