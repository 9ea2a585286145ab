"""The one training loop: step, epoch, evaluation, the best epoch's weights. It knows no task and no flag."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from tqdm import tqdm

from tasks import Batch, Output
from utils import InputError, Precision, Run

Step = Sequence[Batch]  # the batches, one a task, whose gradients make one update
CHECK_EVERY = 20  # steps between looks at the losses: each look waits for the GPU


@dataclass
class Losses:
    """The losses of an epoch; a NaN or an infinity ends the run and is named."""

    values: list[tuple[str, int, Tensor]] = field(default_factory=list)
    checked: int = 0

    def add(self, task: str, step: int, loss: Tensor) -> None:
        self.values.append((task, step, loss.detach()))
        if len(self.values) - self.checked >= CHECK_EVERY:
            self.check()

    def check(self) -> None:
        for task, step, loss in self.values[self.checked :]:
            if not math.isfinite(loss.item()):
                raise InputError(
                    f"the loss of {task} at step {step} must be finite, found {loss.item()}. "
                    "The best epoch so far is kept. Lower --lr, or set --clip 1."
                )
        self.checked = len(self.values)

    def means(self) -> dict[str, float]:
        self.check()
        tasks = dict.fromkeys(task for task, _, _ in self.values)
        return {t: torch.stack([x for name, _, x in self.values if name == t]).float().mean().item() for t in tasks}


@dataclass
class Trainer:
    """What one update needs, put together by the scripts' builders."""

    model: nn.Module
    objectives: dict[str, Callable[[Output, Batch], Tensor]]  # by task, the mean over the batch's examples
    optimizer: Optimizer
    schedule: LRScheduler
    precision: Precision
    clip: float = 0.0  # largest norm of the gradient; 0: no clipping

    def update(self, batches: Step, losses: Losses, step: int) -> None:
        for batch in batches:
            batch = batch.to(self.precision.device)
            with self.precision.autocast():
                loss = self.objectives[batch.task](self.model.predict(batch), batch)
            self.precision.scaler.scale(loss).backward()  # this task's graph is freed here
            losses.add(batch.task, step, loss)
        if self.clip:
            self.precision.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        scale = self.precision.scaler.get_scale()
        self.precision.scaler.step(self.optimizer)  # passes over the step where fp16 overflowed
        self.precision.scaler.update()
        self.optimizer.zero_grad()
        if self.precision.scaler.get_scale() >= scale:  # it falls exactly where the step was passed over
            self.schedule.step()

    def epoch(self, steps: Iterable[Step], label: str, total: int) -> dict[str, float]:
        """One pass over the steps; the mean loss of every task."""
        self.model.train()
        losses = Losses()
        with tqdm(total=total, desc=label, leave=False, disable=None) as bar:
            for number, batches in enumerate(steps, start=1):
                self.update(batches, losses, number)
                bar.update()
        return losses.means()


def fit(
    trainer: Trainer,
    steps: Callable[[int], Iterable[Step]],
    total_steps: int,
    evaluate: Callable[[], dict[str, float]],
    select: str,
    epochs: int,
    run: Run,
) -> dict[str, float]:
    """Trains, evaluates after every epoch, and leaves the model with the weights of the best one.

    steps(epoch) are the updates of an epoch, total_steps of them. evaluate() -> scores; the epoch with the highest
    scores[select] is kept, the earlier one in a tie. Returns its scores.
    """
    best: dict[str, float] = {}
    for epoch in range(1, epochs + 1):
        started = time.monotonic()
        losses = trainer.epoch(steps(epoch), f"epoch {epoch}/{epochs}", total_steps)
        scores = evaluate()
        is_best = not best or scores[select] > best[select]
        if is_best:
            best = scores
            run.keep_best(trainer.model)
        run.log(epoch=epoch, losses=losses, scores=scores, best=is_best)
        print(epoch_line(epoch, losses, scores, is_best, time.monotonic() - started), flush=True)
    run.restore_best(trainer.model)
    return best


def epoch_line(epoch: int, losses: dict[str, float], scores: dict[str, float], is_best: bool, seconds: float) -> str:
    parts = [f"epoch {epoch}", *(f"{task} loss {value:.3f}" for task, value in losses.items())]
    parts += [f"{name} {value:.3f}" for name, value in scores.items()]
    return " | ".join([*parts, "best" if is_best else "    ", f"{seconds:.0f} s"])
