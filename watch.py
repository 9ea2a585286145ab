"""Notes about training that goes wrong: a loss that explodes, constant predictions, a penalty of the wrong size, a
learning rate that does not suit a frozen encoder.

A note never ends a run. Everything here works on plain numbers and returns text; the training loop calls it and prints
the notes. The thresholds lie between measured healthy and diverged runs of the sample data.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

WINDOW = 20  # losses of a task whose median is its level: a single batch, above all a small one, says little
ABOVE_CHANCE = 1.2  # times the loss of guessing; healthy levels were at most 1.03, diverged ones at least 1.26
ABOVE_START = 3.0  # times the level at the start, for losses that guessing says nothing about; healthy: at most 1.3
CONSTANT = 1e-3  # of the range of the values: the standard deviation below which predictions count as constant
FEW_ROWS = 20  # with fewer predictions, all may be the same by chance
NEGLIGIBLE, OUTWEIGHS = 1e-5, 1.0  # penalty divided by the loss without it; healthy: 1e-4 to 0.1
FROZEN_RATE = 1e-4  # a frozen encoder's heads hardly learn below it


def note_about_rate(option: str, lr: float, head_lr: float | None = None) -> str | None:
    """A note if the heads of a frozen encoder would hardly learn.

    option: the value of --option, "pretrain" for a frozen encoder. The handout's 1e-5 is for training all of BERT.
    """
    rate = lr if head_lr is None else head_lr
    if option != "pretrain" or rate >= FROZEN_RATE:
        return None
    flag = "lr" if head_lr is None else "head_lr"
    return f"--{flag} {rate:g}: with a frozen encoder (--option pretrain), the heads hardly learn. Use --{flag} 1e-3."


class Watch:
    """Looks at the losses and predictions of a run. Each kind of note appears at most once per task.

    lr, epochs, regularizer: the flags, the last one as "none" or as it was given. chance: the loss of a model that
    guesses, log(number of classes), for each task whose loss is a plain cross entropy; other tasks are compared with
    their own start. spans: the range of a task's predictions where it is not 1, such as {"sts": high - low}.
    """

    def __init__(
        self,
        lr: float,
        epochs: int,
        regularizer: str = "none",
        chance: Mapping[str, float] | None = None,
        spans: Mapping[str, float] | None = None,
    ):
        self.lr, self.epochs, self.regularizer = lr, epochs, regularizer
        self.chance, self.spans = dict(chance or {}), dict(spans or {})
        self.recent: dict[str, list[float]] = {}  # the last WINDOW losses of each task
        self.start: dict[str, float] = {}  # the level of a task's first WINDOW losses
        self.streaks: dict[str, int] = {}  # epochs in a row in which something was seen, by kind and task
        self.said: list[str] = []  # kinds and tasks of the notes so far

    def step(self, losses: Mapping[str, Sequence[float]]) -> list[str]:
        """Notes about the losses since the last call, by task. Call it every 20 steps or so."""
        notes = []
        for task, new in losses.items():
            recent = [*self.recent.get(task, []), *(math.inf if math.isnan(loss) else float(loss) for loss in new)]
            if task not in self.start and len(recent) >= WINDOW:
                self.start[task] = statistics.median(recent[:WINDOW])
            self.recent[task] = recent = recent[-WINDOW:]
            if len(recent) == WINDOW:
                notes += self._once("explodes", task, self._explodes(task, statistics.median(recent)))
        return notes

    def _explodes(self, task: str, level: float) -> str | None:
        chance = self.chance.get(task)
        limit = ABOVE_START * self.start[task] if chance is None else ABOVE_CHANCE * chance
        if level <= limit:
            return None
        than = f"{self.start[task]:.3g} at the start" if chance is None else f"{chance:.3g} for guessing"
        weight = f" or the weight of --regularizer {self.regularizer}" if self.regularizer != "none" else ""
        return (
            f"the loss of {task} is at {level:.3g}, compared with {than}: training diverges. "
            f"Lower --lr (now {self.lr:g}){weight}, or set --clip 1."
        )

    def epoch(
        self,
        epoch: int,
        losses: Mapping[str, float],
        penalties: Mapping[str, float],
        predictions: Mapping[str, np.ndarray],
    ) -> list[str]:
        """Notes about an epoch: the mean losses, which include the penalties, the mean penalties, and the predictions.

        What is seen must last: for two epochs in a row, or at the end of the run.
        """
        notes, constant = [], set()
        for task, values in predictions.items():
            found = self._constant(task, np.asarray(values, dtype=np.float64))
            constant |= {task} if found else set()
            notes += self._lasting("constant", task, epoch, found)
        for task, penalty in penalties.items():
            if self.regularizer == "none" or task not in losses:
                continue
            share = penalty / max(losses[task] - penalty, 1e-12)
            found = self._negligible(task, share) if task not in constant else None  # else it only follows from that
            notes += self._lasting("negligible", task, epoch, found)
            notes += self._lasting("outweighs", task, epoch, self._outweighs(task, share))
        return notes

    def _constant(self, task: str, values: np.ndarray) -> str | None:
        if len(values) < FEW_ROWS or values.std() >= CONSTANT * self.spans.get(task, 1.0):
            return None
        return (
            f"the model predicts the same value, {values.mean():.3g}, for all {len(values)} rows of {task}: it has "
            f"collapsed, or not yet learned to tell rows apart. If this stays so, change --lr (now {self.lr:g})."
        )

    def _negligible(self, task: str, share: float) -> str | None:
        if share >= NEGLIGIBLE:
            return None
        return (
            f"the penalty of --regularizer {self.regularizer} is {share:.1g} of the loss of {task}, so it has no "
            "effect. Raise its weight, or use --regularizer none."
        )

    def _outweighs(self, task: str, share: float) -> str | None:
        if share <= OUTWEIGHS:
            return None
        return (
            f"the penalty of --regularizer {self.regularizer} is {share:.2g} times the loss of {task}, so it decides "
            "the training. Lower its weight."
        )

    def _lasting(self, kind: str, task: str, epoch: int, note: str | None) -> list[str]:
        key = f"{kind} {task}"
        self.streaks[key] = self.streaks.get(key, 0) + 1 if note else 0
        return self._once(kind, task, note) if self.streaks[key] >= 2 or epoch >= self.epochs else []

    def _once(self, kind: str, task: str, note: str | None) -> list[str]:
        key = f"{kind} {task}"
        if note is None or key in self.said:
            return []
        self.said.append(key)
        return [note]

    def state_dict(self) -> dict[str, Any]:
        """Plain values: a resumed run repeats no note, and compares with the same start."""
        return {
            "recent": {task: list(losses) for task, losses in self.recent.items()},
            "start": dict(self.start),
            "streaks": dict(self.streaks),
            "said": list(self.said),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.recent = {task: list(losses) for task, losses in state["recent"].items()}
        self.start, self.streaks = dict(state["start"]), dict(state["streaks"])
        self.said = list(state["said"])
