"""The training loop of all scripts: step, epoch, evaluation, checkpoints, resuming.

What happens here, in order:

  1. A script builds a `Trainer` from the model, one loss function per task, optimizer, schedule, precision,
     regularizer, weighting, gradient combiner and averager, and calls `fit`.
  2. `fit` runs the epochs (`Loop`). For each it asks the script for the batches (`steps`), trains on them, asks the
     script for dev scores (`evaluate`), and saves the weights if they are the best so far. Every few minutes and after
     every epoch it saves the state from which the run can be resumed, then it writes a line to the log.
  3. `Trainer.update` (trainer.py) is one optimizer step.
  4. At the end, `fit` loads the best epoch's weights back into the model.

Nothing here knows a task or a flag. Where to go next: trainer.py (an update), model.py (the forward pass), losses.py,
smart.py (regularizers), pcgrad.py (gradient combination), optimizer.py, checkpoints.py, distributed.py (several
processes), and multitask_classifier.py, which puts them together.
"""

import contextlib
import functools
import itertools
import json
import operator
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from tqdm import tqdm

from checkpoints import (
    checkpoint_bytes,
    drop_held,
    drop_state,
    hold_best,
    load_state,
    restore_best,
    save_best,
    save_state,
    size_of,
    take_back_best,
    unusable,
)  # fmt: skip
from console import progress_line
from interruption import Stopped, deferred, requested, stop
from memory import peak_memory, reset_peak
from runs import Run
from trainer import EpochRecord, Point, Step, Trainer
from utils import InputError, in_words, random_states, remove, require_space, restore_random_states, warn, write_text
from watch import Watch

CHECK_EVERY = 20  # steps between checks of the losses: each check waits once for the GPU
CURVE_POINTS = 200  # of an epoch, at most, in the log
LINE_SECONDS = 60.0  # between lines of progress where there is no bar
Item = TypeVar("Item")


def grouped(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Lists of `size` items; the last may be shorter."""
    iterator = iter(items)
    while group := list(itertools.islice(iterator, size)):
        yield group


def ahead(steps: Iterable[Step], device: torch.device) -> Iterator[Step]:
    """The steps with their batches on the device.

    On a GPU, the next step's batches are copied before this step is computed, so that the GPU need not wait for them.
    """
    lead = 0 if device.type == "cpu" else 1
    waiting: deque[Step] = deque()
    for step in steps:
        waiting.append([[batch.to(device) for batch in draw] for draw in step])
        if len(waiting) > lead:
            yield waiting.popleft()
    yield from waiting


@dataclass
class Progress:
    """How far a run has come."""

    epoch: int = 0  # epochs that were trained, evaluated and logged
    best_epoch: int = 0
    best: dict[str, float] = field(default_factory=dict)  # the best epoch's scores
    step: int = 0  # updates of the next epoch that were made
    ended: bool = False  # whether they were the last ones, and only the evaluation is left


class Observer:
    """Is told how a training proceeds. This one does nothing; observers.py has others. step: updates made so far."""

    what: ClassVar[str] = "an observer"  # for the note if it fails
    remedy: ClassVar[str] = ""

    def start(self, step: int) -> None:
        """The training starts, or goes on."""

    def point(self, step: int, point: Point) -> None:
        """Losses and rates, every few steps."""

    def epoch(self, step: int, line: Mapping[str, Any]) -> None:
        """An epoch was evaluated and logged; line: of the log."""

    def end(self) -> None:
        """The model is trained, and its predictions are written."""


class Observers(Observer):
    """Several observers. One that fails is left out with a note: a training is worth more than a picture of it."""

    def __init__(self, members: Iterable[Observer] = ()):
        self.members = list(members)

    def start(self, step: int) -> None:
        self._tell("start", step)

    def point(self, step: int, point: Point) -> None:
        self._tell("point", step, point)

    def epoch(self, step: int, line: Mapping[str, Any]) -> None:
        self._tell("epoch", step, line)

    def end(self) -> None:
        self._tell("end")

    def _tell(self, what: str, *news: Any) -> None:
        for member in list(self.members):
            try:
                getattr(member, what)(*news)
            except Exception as error:
                self.members.remove(member)
                reason = f"{type(error).__name__}: {error}"[:300]
                warn(f"{member.what} failed and is left out ({reason}). The training goes on. {member.remedy}")


NOBODY = Observer()


@dataclass
class Loop:
    """A training: its progress, and all that `fit` was called with."""

    trainer: Trainer
    steps: Callable[[int], Iterable[Step]]
    evaluate: Callable[[], dict[str, float]]
    select: str
    epochs: int
    run: Run
    better: Callable[[float, float], bool] = operator.gt
    steps_in: Callable[[int], int] = lambda epoch: 0
    patience: int = 0
    save_seconds: float | None = None
    on_epoch: Callable[[int, dict[str, float]], None] = lambda epoch, scores: None
    watch: Watch | None = None
    dev_values: Callable[[], Mapping[str, np.ndarray]] = dict
    observer: Observer = field(default_factory=Observer)
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        self.record = EpochRecord(self.trainer.targets)
        self.world = self.trainer.world
        self.saved = self.printed = time.monotonic()
        self.steps_in = functools.cache(self.steps_in)  # counting the steps can take a moment
        self.pace = Pace(self.steps_in, self.epochs)

    def place(self) -> str:
        """How far the run is, in words."""
        epoch = self.progress.epoch + 1
        if epoch > self.epochs:
            return f"the end of epoch {self.progress.epoch} of {self.epochs}"
        total = self.steps_in(epoch)
        return f"epoch {epoch} of {self.epochs}, step {self.progress.step}" + (f" of {total}" if total else "")

    def updates(self) -> int:
        """The number of updates made so far, in all epochs."""
        return sum(self.steps_in(epoch) for epoch in range(1, self.progress.epoch + 1)) + self.progress.step

    def train(self) -> None:
        """Run the epochs that are left."""
        self.observer.start(self.updates())
        try:
            for epoch in range(self.progress.epoch + 1, self.epochs + 1):
                if self.patience and self.progress.epoch - self.progress.best_epoch >= self.patience:
                    print(f"stopped: no better epoch in the last {self.patience}", flush=True)
                    break
                started = time.monotonic()
                reset_peak(self.trainer.precision.device)
                self.train_epoch(epoch)
                scores = self.evaluate_epoch()
                peak = peak_memory(self.trainer.precision.device)
                with deferred():
                    line = self.complete_epoch(epoch, scores, peak)
                used = f" | {peak / 1e9:.1f} GB" if peak is not None else ""
                print(f"{line} | {time.monotonic() - started:.0f} s{used}", flush=True)
                ended = time.monotonic()
                self.observer.epoch(self.updates(), json.loads(self.run.lines[-1]))
                self.run.seconds_aside += time.monotonic() - ended
                self.on_epoch(epoch, scores)
        except Stopped as stopped:
            self.keep(stopped)
            raise

    def train_epoch(self, epoch: int) -> EpochRecord:
        """Make the updates of this epoch that are left; return what the epoch recorded."""
        trainer, progress, total = self.trainer, self.progress, self.steps_in(epoch)
        trainer.model.train()
        left = itertools.islice(self.steps(epoch), progress.step, None)
        with self.progress_bar(epoch, total) as bar, self.pace.training(progress):
            for step in ahead(left, trainer.precision.device):
                with deferred():
                    trainer.update(step, self.record, progress.step + 1)
                    progress.step += 1
                    if progress.step % CHECK_EVERY == 0 or self.updates() == 1:  # so that a loss is shown at once
                        self.look_at_losses()
                    is_stopped, is_due = self.world.any(requested(), self.save_is_due())
                    if is_due:
                        self.save()
                if is_stopped:
                    stop()
                if not bar.disable:
                    bar.set_postfix_str(" | ".join(self.figures()), refresh=False)
                bar.update()
                self.print_now_and_then(total)
        with deferred():
            self.look_at_losses()
            if not progress.ended:
                trainer.averager.epoch_end(trainer.model)
            progress.ended = True
        return self.record

    def evaluate_epoch(self) -> dict[str, float]:
        """The scores of the epoch's weights, averaged if there is an averager."""
        trainer = self.trainer
        self.check_finite()
        self.world.broadcast_tensors(p.data for p in trainer.model.parameters())  # rounding may differ between GPUs
        random = random_states(trainer.precision.device)
        try:
            with trainer.averager.applied(trainer.model), self.pace.evaluating():
                return self.evaluate()
        except Stopped:  # wherever it was: what is saved now must be as before the evaluation
            trainer.averager.take_back()
            restore_random_states(random, trainer.precision.device)
            raise

    def complete_epoch(self, epoch: int, scores: dict[str, float], peak: int | None) -> str:
        """Keep the weights if they are the best, save the state, then write the log. Return the line to print.

        peak: the memory in bytes that the epoch needed.
        """
        trainer, progress, run = self.trainer, self.progress, self.run
        losses, is_best = self.record.mean_losses(), not progress.best
        is_best = is_best or self.better(scores[self.select], progress.best[self.select])
        progress.epoch, progress.step, progress.ended = epoch, 0, False
        if is_best:
            progress.best, progress.best_epoch = scores, epoch
            with trainer.averager.applied(trainer.model):
                self.world.on_main(lambda: (hold_best(run), save_best(trainer.model, run)))
        if self.watch is not None:
            say(self.watch.epoch(epoch, losses, self.record.mean_penalties(), self.dev_values()))
        in_parts = {"parts": dict(trainer.parts)} if trainer.parts else {}
        run.log(
            epoch=epoch, losses=losses, penalties=self.record.mean_penalties(), train=self.record.scores(),
            scores=scores, best=is_best, curve=self.record.curves(CURVE_POINTS),
            cosines=trainer.combiner.cosines(CURVE_POINTS), gradients=trainer.combiner.means(), memory=peak, **in_parts,
        )  # fmt: skip
        self.record = EpochRecord(trainer.targets)
        if self.save_seconds is not None:
            self.save()
        self.world.on_main(lambda: drop_held(run))
        self.world.on_main(run.write_log)
        return epoch_line(epoch, losses, scores, is_best)

    def check_finite(self) -> None:
        """Refuse weights that are not finite."""
        if not self.trainer.is_finite():
            raise InputError(
                f"the weights at {self.place()} must be finite, found NaN or infinity. What was saved before is kept. "
                "Lower --lr, or set --clip 1."
            )

    def look_at_losses(self) -> None:
        """Refuse losses that are not finite, and say so if they explode."""
        losses = self.record.check()
        if losses:
            self.record.mark(self.progress.step, self.trainer.rates, losses)
            self.observer.point(self.updates(), self.record.curve[-1])
        if self.watch is not None:
            say(self.watch.step(losses))

    # Checkpoints

    def save_is_due(self) -> bool:
        return self.save_seconds is not None and time.monotonic() - self.saved >= self.save_seconds

    def save(self) -> None:
        """Write the state from which the run can be resumed, unless its weights are not finite."""
        self.check_finite()
        self.world.on_main(self.run.must_be_ours)
        state = {
            "progress": asdict(self.progress),
            "record": self.record.state_dict(),
            "log": list(self.run.lines),
            "seconds": self.run.seconds,
            "watch": None if self.watch is None else self.watch.state_dict(),
            "trainer": self.trainer.state_dict(),
        }
        self.world.on_main(lambda: save_state(state, self.run))
        self.saved = time.monotonic()

    def restore(self) -> bool:
        """Continue where the saved state is; return False if there is none."""
        self.world.on_main(lambda: take_back_best(self.run))
        state = self.world.broadcast(self.world.on_main(lambda: load_state(self.run)))
        if state is None:
            return False
        try:
            self.trainer.load_state_dict(state["trainer"])
            self.progress = Progress(**state["progress"])
            if "record" in state:  # older states are of complete epochs only
                self.record.load_state_dict(state["record"], self.trainer.precision.device)
            if self.watch is not None and state.get("watch"):
                self.watch.load_state_dict(state["watch"])
        except torch.OutOfMemoryError:  # a RuntimeError, but not a damaged file
            raise
        except (RuntimeError, LookupError, ValueError, TypeError, AttributeError) as error:
            raise InputError(unusable(self.run.folder / "state.pt", error)) from error
        if "log" in state:
            self.world.on_main(lambda: self.run.restore_log(state["log"], state["seconds"]))
        return True

    def keep(self, stopped: Stopped) -> None:
        """Save on a signal, and tell how to go on."""
        where = f"{stopped.message} at {self.place()}"
        if self.save_seconds is None:
            stopped.message = where
            return
        self.save()
        best = f", the best so far in model.safetensors (epoch {self.progress.best_epoch})" * bool(self.progress.best)
        stopped.message = (
            f"{where}. {self.run.folder} keeps all of it in state.pt{best}. Go on with: {self.run.command()}"
        )

    # Progress

    def print_now_and_then(self, total: int) -> None:
        now = time.monotonic()
        if now - self.printed < LINE_SECONDS:
            return
        self.printed = now
        progress_line(" | ".join([self.place(), f"{self.run.seconds / 60:.0f} min", *self.figures()]))

    def progress_bar(self, epoch: int, total: int) -> tqdm:
        """A bar for the epoch; behind it the figures of the whole run."""
        form = "{desc} {percentage:3.0f}%|{bar:8}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}"
        return tqdm(
            total=total or None, initial=self.progress.step, desc=f"epoch {epoch}/{self.epochs}", leave=False,
            disable=None, dynamic_ncols=True, bar_format=form if total else None,
        )  # fmt: skip

    def figures(self) -> list[str]:
        """The time that the run still takes, the peak memory of the epoch, and the latest losses."""
        left, peak = self.pace.seconds_left(self.progress), peak_memory(self.trainer.precision.device)
        losses = sorted(self.record.curve[-1].losses.items()) if self.record.curve else []
        parts = [f"{in_words(left)} left"] if left is not None else []
        parts += [f"{peak / 1e9:.1f} GB"] if peak is not None else []
        return parts + ([" ".join(["loss", *(f"{task} {loss:.3f}" for task, loss in losses)])] if losses else [])


class Pace:
    """Estimates how long a run still takes, from the steps and the evaluation that it has timed so far."""

    def __init__(self, steps_in: Callable[[int], int], epochs: int):
        self.steps_in, self.epochs = steps_in, epochs
        self.started, self.before = time.monotonic(), 0  # of the epoch: the time, and the steps made before it
        self.evaluation = 0.0  # seconds of the last one; 0 until there was one

    @contextlib.contextmanager
    def training(self, progress: Progress) -> Iterator[None]:
        self.started, self.before = time.monotonic(), progress.step
        yield

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.evaluation = time.monotonic() - started

    def seconds_left(self, progress: Progress) -> float | None:
        """Of all epochs, as if none ends the run early; None if nothing was timed yet, or lengths are unknown."""
        made = progress.step - self.before
        steps = [self.steps_in(epoch) for epoch in range(progress.epoch + 1, self.epochs + 1)]
        if made < 1 or not all(steps):
            return None
        per_step = (time.monotonic() - self.started) / made
        return (sum(steps) - progress.step) * per_step + len(steps) * self.evaluation


def say(notes: Iterable[str]) -> None:
    for note in notes:
        warn(note)


def train_on(trainer: Trainer, steps: Iterable[Step]) -> EpochRecord:
    """Make these updates without a run, for measurements; return what was recorded."""
    return Loop(trainer, lambda epoch: steps, dict, "", 1, Run(Path())).train_epoch(1)


def fit(
    trainer: Trainer,
    steps: Callable[[int], Sequence[Step] | Iterable[Step]],
    evaluate: Callable[[], dict[str, float]],
    select: str,
    epochs: int,
    run: Run,
    *,
    better: Callable[[float, float], bool] = operator.gt,
    steps_in: Callable[[int], int] = lambda epoch: 0,
    patience: int = 0,
    save_minutes: float | None = None,
    keep_state: bool = False,
    resume: bool = False,
    on_epoch: Callable[[int, dict[str, float]], None] = lambda epoch, scores: None,
    watch: Watch | None = None,
    dev_values: Callable[[], Mapping[str, np.ndarray]] = dict,
    observer: Observer = NOBODY,
) -> dict[str, float]:
    """Train, evaluate after every epoch, and leave the model with the weights of the best epoch. Return its scores.

    steps: returns the updates of an epoch, always the same ones; steps_in: their number, for the progress bar.
    evaluate: returns the scores; the epoch with the highest scores[select] is the best one (with the lowest if `better`
    is operator.lt), and the earlier one in a tie. patience: stop after this many epochs without a better one; 0 means
    never. save_minutes: write state.pt this often and after every epoch, so that `resume` can continue from it; None
    means never. keep_state: leave the state of a finished run where it is, so that it can be extended. on_epoch: called
    after an epoch has been evaluated and logged; an exception that it raises ends the training. watch: writes notes if
    training goes wrong. dev_values: returns the predictions of the last evaluation, for these notes. observer: is
    told about every few steps and every epoch.
    """
    save_seconds = None if save_minutes is None else 60 * save_minutes
    loop = Loop(
        trainer, steps, evaluate, select, epochs, run, better, steps_in, patience, save_seconds, on_epoch, watch,
        dev_values, observer,
    )  # fmt: skip
    world = trainer.world
    if resume and loop.restore():
        best = f", best {loop.progress.best[select]:.3f}" if loop.progress.best else ""
        done = f"{run.folder}: all {epochs} epochs are done, nothing left to train"
        print(done if loop.progress.epoch >= epochs else f"resuming at {loop.place()}{best}", flush=True)
    elif resume and world.broadcast(run.finished):
        print(f"{run.folder}: all epochs are done, nothing left to train", flush=True)
        world.on_main(lambda: restore_best(trainer.model, run))
        world.broadcast_tensors(trainer.model.state_dict().values())
        return world.broadcast(world.on_main(run.scores))
    elif resume and world.broadcast(not run.is_new):
        print(f"{run.folder}: nothing was saved yet, so the run starts from the beginning", flush=True)
        world.on_main(lambda: run.restore_log(run.lines, 0.0))
    if save_seconds is not None and loop.progress.epoch < epochs:
        world.on_main(lambda: check_space(trainer, run))
    world.on_main(lambda: remove(run.folder / "dev.json"))  # of a run that is extended
    loop.train()
    world.on_main(lambda: restore_best(trainer.model, run))
    world.broadcast_tensors(trainer.model.state_dict().values())
    world.on_main(lambda: write_text(run.folder / "dev.json", json.dumps(loop.progress.best) + "\n"))
    if not keep_state:
        world.on_main(lambda: drop_state(run))
    return loop.progress.best


def check_space(trainer: Trainer, run: Run) -> None:
    """Refuse to start if the disk cannot hold the checkpoints: of each, the old file and the new one."""
    needed = 2 * (size_of(trainer.model.state_dict()) + trainer.state_bytes()) - checkpoint_bytes(run)
    require_space(run.folder, needed, "the run's checkpoints need", "--runs")


def epoch_line(epoch: int, losses: dict[str, float], scores: dict[str, float], is_best: bool) -> str:
    parts = [f"epoch {epoch}", *(f"{task} loss {value:.3f}" for task, value in losses.items())]
    parts += [f"{name} {value:.3f}" for name, value in scores.items()]
    return " | ".join([*parts, "best" if is_best else "    "])
