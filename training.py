"""The training loop of all scripts: step, epoch, evaluation, checkpoints, resuming.

What happens here, in order:

  1. A script builds a `Trainer` from the model, one loss function per task, optimizer, schedule, precision,
     regularizer, weighting, gradient combiner and averager, and calls `fit`.
  2. `fit` runs the epochs. For each it asks the script for the batches (`steps`), trains on them (`Trainer.epoch`),
     asks the script for dev scores (`evaluate`), saves the weights if they are the best so far, writes a line to the
     log, and saves the state from which the run can be resumed.
  3. `Trainer.update` is one optimizer step. For every batch: forward pass, loss, regularizer, weighting, and backward
     pass, which frees the graph. Then the tasks' gradients are combined, clipped and applied.
  4. At the end, `fit` loads the best epoch's weights back into the model.

Nothing here knows a task or a flag. Where to go next: model.py (the forward pass), losses.py, smart.py (regularizers),
pcgrad.py (gradient combination), optimizer.py, and multitask_classifier.py, which puts them together.
"""

import itertools
import json
import math
import operator
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from tqdm import tqdm

from base_bert import checkpoint_state, load_checkpoint_state
from losses import Equal
from optimizer import NoAverage
from pcgrad import GradientCombiner
from runs import Run
from smart import Regularizer
from tasks import Batch, Output, Target
from utils import (
    InputError,
    Precision,
    SideStream,
    atomic_path,
    random_states,
    restore_random_states,
    write_text,
)

Step = Sequence[Sequence[Batch]]  # one update: one or more draws, each with a batch of one or more tasks
CHECK_EVERY = 20  # steps between checks of the losses: each check waits once for the GPU
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
class EpochRecord:
    """Losses, penalties and predictions of one epoch's training pass. A loss that is NaN or infinite ends the run."""

    targets: Mapping[str, Target] = field(default_factory=dict)  # what each task predicts; tasks not in it are unscored
    losses: list[tuple[str, int, Tensor]] = field(default_factory=list)  # task, step, loss
    penalties: dict[str, list[Tensor]] = field(default_factory=dict)  # what the regularizer added, by task
    values: dict[str, list[Tensor]] = field(default_factory=dict)  # decoded predictions, by task
    labels: dict[str, list[Tensor]] = field(default_factory=dict)
    checked: int = 0

    def add(self, batch: Batch, step: int, loss: Tensor, penalty: Tensor, logits: Tensor) -> None:
        self.losses.append((batch.task, step, (loss + penalty).detach()))
        entries = [(self.penalties, penalty)]
        if batch.task in self.targets:
            values = self.targets[batch.task].decode(logits.detach().float())  # numpy has no bfloat16
            entries += [(self.values, values), (self.labels, batch.labels)]
        for table, tensor in entries:
            table.setdefault(batch.task, []).append(tensor.detach())

    def check(self) -> None:
        """Refuse a loss that is not finite. All losses since the last check are read from the GPU at once."""
        new = self.losses[self.checked :]
        values = torch.stack([loss for _, _, loss in new]).tolist() if new else []
        for (task, step, _), value in zip(new, values, strict=True):
            if not math.isfinite(value):
                raise InputError(
                    f"the loss of {task} at step {step} must be finite, found {value}. "
                    "The best epoch so far is kept. Lower --lr, or set --clip 1."
                )
        self.checked = len(self.losses)

    def mean_losses(self) -> dict[str, float]:
        """The mean loss of every task, including what the regularizer added."""
        self.check()
        tasks = dict.fromkeys(task for task, _, _ in self.losses)
        return {t: _mean([x for name, _, x in self.losses if name == t]) for t in tasks}

    def mean_penalties(self) -> dict[str, float]:
        return {task: _mean(penalties) for task, penalties in self.penalties.items()}

    def scores(self) -> dict[str, float]:
        """Scores on the training rows as they were seen, with dropout: no second pass over the training set."""
        return {
            task: self.targets[task].score(*(torch.cat(t[task]).cpu().numpy() for t in (self.values, self.labels)))
            for task in self.values
        }


def _mean(values: list[Tensor]) -> float:
    return torch.stack(values).float().mean().item()


@dataclass
class Trainer:
    """All that an update needs; the scripts put it together."""

    model: nn.Module
    objectives: dict[str, Callable[[Output, Batch], Tensor]]  # the loss function of each task
    optimizer: Optimizer
    schedule: LRScheduler
    precision: Precision
    clip: float = 0.0  # maximum norm of the gradient; 0: no clipping
    regularizer: Regularizer = field(default_factory=Regularizer)
    weighting: nn.Module = field(default_factory=lambda: Equal([], {}))
    combiner: GradientCombiner = field(default_factory=lambda: GradientCombiner((), None))
    averager: NoAverage = field(default_factory=NoAverage)
    targets: Mapping[str, Target] = field(default_factory=dict)  # what the tasks predict, to score the training pass
    side_stream: SideStream = field(default_factory=SideStream)  # for what losses and regularizers draw

    def update(self, step: Step, record: EpochRecord, number: int) -> None:
        """One optimizer step, the epoch's `number`-th."""
        # One region for all batches, so that each weight is cast once. Backward passes run in this thread: in the one
        # that a GPU has for them, a recomputed layer would be a region of its own, which drops all casts at its end.
        with self.precision.autocast(), torch.autograd.set_multithreading_enabled(False):
            for batch in itertools.chain.from_iterable(step):
                batch = batch.to(self.precision.device)  # in an epoch it is there already
                output = self.model.predict(batch)
                with self.side_stream.drawn(self.precision.device):  # so that no method shifts the dropout of the model
                    loss = self.objectives[batch.task](output, batch)
                    penalty = self.regularizer(self.model, batch, output)
                weighted = self.weighting(batch.task, loss + penalty) / len(step)
                with self.precision.paused():
                    self.combiner.backward(batch.task, self.precision.scaler.scale(weighted))  # frees this task's graph
                record.add(batch, number, loss, penalty, output.logits)
        if self._apply_gradients():
            self.schedule.step()
            self.averager.update(self.model)
            self.regularizer.update(self.model)

    def _apply_gradients(self) -> bool:
        """Combine, clip and apply the gradients; return whether the optimizer made its step.

        In fp16 the loss scaler skips the step after an overflow, and to find out it reads one number from the GPU.
        Whether it then calls the optimizer is known without reading another.
        """
        scaler, steps = self.precision.scaler, []
        self.combiner.write_gradients(scaler.get_scale() if self.combiner.method else 1.0)
        if self.clip:
            scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        hook = self.optimizer.register_step_post_hook(lambda *_: steps.append(1))
        scaler.step(self.optimizer)
        hook.remove()
        scaler.update()
        self.optimizer.zero_grad()
        return bool(steps)

    def epoch(self, steps: Iterable[Step], label: str, total: int | None = None) -> EpochRecord:
        """Train on these steps."""
        self.model.train()
        record = EpochRecord(self.targets)
        with tqdm(total=total, desc=label, leave=False, disable=None) as bar:
            for number, step in enumerate(ahead(steps, self.precision.device), start=1):
                self.update(step, record, number)
                if number % CHECK_EVERY == 0:
                    record.check()
                bar.update()
        record.check()
        self.averager.epoch_end(self.model)
        return record

    def state_dict(self) -> dict[str, Any]:
        """All that a run needs in order to be resumed, besides its progress: tensors and plain values only."""
        parts = {name: getattr(self, name).state_dict() for name in self._parts()}
        return parts | {
            "scaler": self.precision.scaler.state_dict(),
            "random": random_states(self.precision.device),
            "side_stream": self.side_stream.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self._parts():
            getattr(self, name).load_state_dict(state[name])
        if state["scaler"]:  # empty if the run was saved in another precision than fp16: then the scaler starts anew
            self.precision.scaler.load_state_dict(state["scaler"])
        restore_random_states(state["random"], self.precision.device)
        self.side_stream.load_state_dict(state.get("side_stream", {"states": None}))  # older states have none

    @staticmethod
    def _parts() -> tuple[str, ...]:
        return ("model", "optimizer", "schedule", "combiner", "regularizer", "averager")


@dataclass
class Progress:
    """How far a run has come."""

    epoch: int = 0
    best_epoch: int = 0
    best: dict[str, float] = field(default_factory=dict)  # the best epoch's scores


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
    keep_state: bool = False,
    resume: bool = False,
    on_epoch: Callable[[int, dict[str, float]], None] = lambda epoch, scores: None,
) -> dict[str, float]:
    """Train, evaluate after every epoch, and leave the model with the weights of the best epoch. Return its scores.

    steps: returns the updates of an epoch; steps_in: their number, for the progress bar. evaluate: returns the scores;
    the epoch with the highest scores[select] is the best one (with the lowest if `better` is operator.lt), and the
    earlier one in a tie. patience: stop after this many epochs without a better one; 0 means never. keep_state: write
    state.pt after every epoch, so that `resume` can continue from it. on_epoch: called after an epoch has been
    evaluated and logged; an exception that it raises ends the training.
    """
    progress = load_progress(trainer, run) if resume else Progress()
    if progress.epoch >= epochs:
        print(f"{run.folder}: all {epochs} epochs are done, nothing left to train", flush=True)
    for epoch in range(progress.epoch + 1, epochs + 1):
        if patience and progress.epoch - progress.best_epoch >= patience:
            print(f"stopped: no better epoch in the last {patience}", flush=True)
            break
        started = time.monotonic()
        record = trainer.epoch(steps(epoch), f"epoch {epoch}/{epochs}", steps_in(epoch) or None)
        losses = record.mean_losses()
        progress.epoch = epoch
        with trainer.averager.applied(trainer.model):
            scores = evaluate()
            is_best = not progress.best or better(scores[select], progress.best[select])
            if is_best:
                progress.best, progress.best_epoch = scores, epoch
                save_best(trainer.model, run)
        run.log(
            epoch=epoch, losses=losses, penalties=record.mean_penalties(), train=record.scores(), scores=scores,
            best=is_best, gradients=trainer.combiner.means(),
        )  # fmt: skip
        if keep_state:
            save_progress(trainer, progress, run)
        print(epoch_line(epoch, losses, scores, is_best, time.monotonic() - started), flush=True)
        on_epoch(epoch, scores)
    restore_best(trainer.model, run)
    write_text(run.folder / "dev.json", json.dumps(progress.best) + "\n")
    return progress.best


def epoch_line(epoch: int, losses: dict[str, float], scores: dict[str, float], is_best: bool, seconds: float) -> str:
    parts = [f"epoch {epoch}", *(f"{task} loss {value:.3f}" for task, value in losses.items())]
    parts += [f"{name} {value:.3f}" for name, value in scores.items()]
    return " | ".join([*parts, "best" if is_best else "    ", f"{seconds:.0f} s"])


# --- checkpoints ------------------------------------------------------------------------------------------------------


def save_best(model: nn.Module, run: Run) -> None:
    """Write model.safetensors and config.json: transformers loads the encoder from them, this suite the whole model."""
    with atomic_path(run.folder / "model.safetensors") as path:
        save_file(checkpoint_state(model), path, metadata={"format": "pt"})
    write_text(run.folder / "config.json", json.dumps(model.bert.config.to_dict(), indent=2) + "\n")


def restore_best(model: nn.Module, run: Run) -> None:
    path = run.folder / "model.safetensors"
    try:
        tensors = load_file(path)
    except Exception as error:  # safetensors raises its own type for a damaged file, OSError for a missing one
        raise InputError(f"{path}: not a complete weights file ({error}). Train the run again.") from error
    load_checkpoint_state(model, tensors, path)


def save_progress(trainer: Trainer, progress: Progress, run: Run) -> None:
    with atomic_path(run.folder / "state.pt") as path:
        torch.save({"progress": asdict(progress), "trainer": trainer.state_dict()}, path)


def load_progress(trainer: Trainer, run: Run) -> Progress:
    path = run.folder / "state.pt"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        trainer.load_state_dict(state["trainer"])
        return Progress(**state["progress"])
    except FileNotFoundError as error:
        raise InputError(
            f"--resume: {path} does not exist; no epoch was finished. Start again with another --name."
        ) from error
    except torch.OutOfMemoryError:  # a RuntimeError, but not a damaged file
        raise
    except (RuntimeError, KeyError, ValueError, TypeError, EOFError, pickle.UnpicklingError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise InputError(f"--resume: {path} cannot be used ({reason}). Start again with another --name.") from error
