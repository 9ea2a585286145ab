"""One update of a training: forward and backward passes, gradient combination, optimizer step.

`Trainer.update` computes, for every batch of a step: forward pass, loss, regularizer, weighting, and backward pass,
which frees the graph. Then the tasks' gradients are combined, clipped and applied. A batch that does not fit into the
GPU's memory is computed in parts, with the same gradients. `EpochRecord` keeps the losses and predictions of an epoch.

Nothing here knows a task or a flag. training.py calls this file; model.py has the forward pass.
"""

import contextlib
import gc
import itertools
import math
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from checkpoints import size_of
from distributed import World
from losses import Equal
from optimizer import NoAverage
from pcgrad import GradientCombiner
from smart import Regularizer
from tasks import Batch, Output, Target
from utils import (
    InputError,
    Precision,
    SideStream,
    out_of_memory,
    random_states,
    restore_random_states,
    thinned,
    warn,
)

Step = Sequence[Sequence[Batch]]  # one update: one or more draws, each with a batch of one or more tasks


class Point(NamedTuple):
    """A point of the curve of an epoch."""

    step: int
    rates: tuple[float, float]  # the lowest and the highest learning rate of a parameter
    losses: dict[str, float]  # mean since the point before, by task


@dataclass
class EpochRecord:
    """Losses, penalties and predictions of one epoch's training pass. A loss that is NaN or infinite ends the run."""

    targets: Mapping[str, Target] = field(default_factory=dict)  # what each task predicts; tasks not in it are unscored
    losses: list[tuple[str, int, Tensor]] = field(default_factory=list)  # task, step, loss
    penalties: dict[str, list[Tensor]] = field(default_factory=dict)  # what the regularizer added, by task
    values: dict[str, list[Tensor]] = field(default_factory=dict)  # decoded predictions, by task
    labels: dict[str, list[Tensor]] = field(default_factory=dict)
    checked: int = 0
    curve: list["Point"] = field(default_factory=list)  # every few steps

    def add(self, batch: Batch, step: int, loss: Tensor, penalty: Tensor, logits: Tensor) -> None:
        self.losses.append((batch.task, step, (loss + penalty).detach()))
        entries = [(self.penalties, penalty)]
        if batch.task in self.targets:
            values = self.targets[batch.task].decode(logits.detach().float())  # numpy has no bfloat16
            entries += [(self.values, values), (self.labels, batch.labels)]
        for table, tensor in entries:
            table.setdefault(batch.task, []).append(tensor.detach())

    def check(self) -> dict[str, list[float]]:
        """Return the losses since the last check, by task, read from the GPU at once; refuse one that is not finite."""
        new = self.losses[self.checked :]
        values = torch.stack([loss for _, _, loss in new]).tolist() if new else []
        for (task, step, _), value in zip(new, values, strict=True):
            if not math.isfinite(value):
                raise InputError(
                    f"the loss of {task} at step {step} must be finite, found {value}. "
                    "What was saved before is kept. Lower --lr, or set --clip 1."
                )
        self.checked = len(self.losses)
        by_task: dict[str, list[float]] = {}
        for (task, _, _), value in zip(new, values, strict=True):
            by_task.setdefault(task, []).append(value)
        return by_task

    def mark(self, step: int, rates: tuple[float, float], losses: Mapping[str, list[float]]) -> None:
        """Add a point to the curve. rates: the lowest and the highest learning rate; losses: since the last point."""
        means = {task: sum(of_task) / len(of_task) for task, of_task in losses.items()}
        self.curve.append(Point(step, rates, means))

    def curves(self, most: int) -> dict[str, Any]:
        """The curve in columns of at most this many numbers: step, lowest and highest rate, losses by task."""
        tasks = dict.fromkeys(task for point in self.curve for task in point.losses)
        rates = ([point.rates[i] for point in self.curve] for i in (0, 1))
        return {
            "step": [point.step for point in self.curve][:: -(-len(self.curve) // most) or 1],
            "rates": [thinned(column, most) for column in rates],
            "losses": {task: thinned([point.losses.get(task) for point in self.curve], most) for task in tasks},
        }

    def mean_losses(self) -> dict[str, float]:
        """The mean loss of every task, including what the regularizer added."""
        self.check()
        tasks = dict.fromkeys(task for task, _, _ in self.losses)
        return {t: mean([x for name, _, x in self.losses if name == t]) for t in tasks}

    def mean_penalties(self) -> dict[str, float]:
        return {task: mean(penalties) for task, penalties in self.penalties.items()}

    def state_dict(self) -> dict[str, Any]:
        """What the epoch has recorded so far, in few tensors."""

        def joined(table: dict[str, list[Tensor]]) -> dict[str, Tensor]:
            return {task: torch.cat(tensors).cpu() for task, tensors in table.items()}

        return {
            "checked": self.checked,
            "names": [(task, step) for task, step, _ in self.losses],
            "losses": torch.stack([loss for _, _, loss in self.losses]).cpu() if self.losses else None,
            "penalties": {task: torch.stack(tensors).cpu() for task, tensors in self.penalties.items()},
            "values": joined(self.values),
            "labels": joined(self.labels),
            "curve": [tuple(point) for point in self.curve],
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        if state["names"]:
            losses = state["losses"].to(device).unbind()
            self.losses = [(task, step, loss) for (task, step), loss in zip(state["names"], losses, strict=True)]
        self.penalties = {task: list(tensor.to(device).unbind()) for task, tensor in state["penalties"].items()}
        self.values = {task: [tensor.to(device)] for task, tensor in state["values"].items()}
        self.labels = {task: [tensor.to(device)] for task, tensor in state["labels"].items()}
        self.checked = state["checked"]
        self.curve = [Point(step, tuple(rates), losses) for step, rates, losses in state.get("curve", ())]

    def scores(self) -> dict[str, float]:
        """Scores on the training rows as they were seen, with dropout: no second pass over the training set."""
        return {
            task: self.targets[task].score(*(torch.cat(t[task]).cpu().numpy() for t in (self.values, self.labels)))
            for task in self.values
        }


def mean(values: list[Tensor]) -> float:
    return torch.stack(values).float().mean().item()


class MemoryShortageError(Exception):
    """The GPU's memory did not suffice for a batch. reason: torch's message."""

    def __init__(self, batch: Batch, reason: str):
        super().__init__(reason)
        self.batch, self.reason = batch, reason


def is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "CUBLAS_STATUS_ALLOC_FAILED" in str(error)


class Pass(NamedTuple):
    """The result of a batch's forward and backward pass."""

    batch: Batch
    loss: Tensor
    penalty: Tensor
    logits: Tensor


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
    compare_rows: Collection[str] = ()  # tasks whose loss compares the rows of a batch, which must stay whole
    world: World = field(default_factory=World)  # the processes that train the model together
    parts: dict[str, int] = field(default_factory=dict)  # in how many parts a task's batches are computed; 1 if absent

    def __post_init__(self) -> None:
        self.model.world = self.combiner.world = self.world

    def update(self, step: Step, record: EpochRecord, number: int) -> None:
        """One optimizer step, the epoch's `number`-th. If the GPU's memory is too small, it is repeated in parts."""
        while True:
            before = random_states(self.precision.device), self.side_stream.state_dict()
            try:
                passes = list(self._passes(step))
                break
            except MemoryShortageError as shortage:
                self._abandon(*before)
                self._split_further(shortage, number)
        for done in passes:
            record.add(done.batch, number, done.loss, done.penalty, done.logits)
        if self._apply_gradients():
            self.schedule.step()
            self.averager.update(self.model)
            self.regularizer.update(self.model)

    def _passes(self, step: Step) -> Iterator[Pass]:
        """The forward and backward passes of all batches."""
        # One region for all batches, so that each weight is cast once. Backward passes run in this thread: in the one
        # that a GPU has for them, a recomputed layer would be a region of its own, which drops all casts at its end.
        with self.precision.autocast(), torch.autograd.set_multithreading_enabled(False), self.world.sharing():
            for batch in itertools.chain.from_iterable(step):
                batch = batch.to(self.precision.device)  # in an epoch it is there already
                try:
                    yield self._pass(batch, len(step))
                except RuntimeError as error:
                    if not is_out_of_memory(error):
                        raise
                    traceback.clear_frames(error.__traceback__)  # they hold the graph, and with it the memory
                    raise MemoryShortageError(batch, str(error)) from None

    def _pass(self, batch: Batch, draws: int) -> Pass:
        """Forward and backward pass of one batch of a step with this many draws, in parts if it is too large."""
        parts = self.parts.get(batch.task, 1)
        if parts == 1:
            return self._whole_pass(batch, draws)
        if batch.task in self.compare_rows:
            with self._in_chunks(batch, parts):
                return self._whole_pass(batch, draws)
        done, side_stream = [], self.side_stream.state_dict()
        for part in batch.parts(min(parts, len(batch))):
            self.side_stream.load_state_dict(side_stream)  # a regularizer draws the numbers of the whole batch
            share = part.targets / max(1, batch.targets)
            done.append((share, self._whole_pass(part, draws, share)))
        loss, penalty = (sum(share * getattr(p, name) for share, p in done) for name in ("loss", "penalty"))
        return Pass(batch, loss, penalty, torch.cat([p.logits for _, p in done]))

    def _whole_pass(self, batch: Batch, draws: int, share: float = 1.0) -> Pass:
        output = self.model.predict(batch)
        with self.side_stream.drawn(self.precision.device):  # so that no method shifts the dropout of the model
            loss = self.objectives[batch.task](output, batch)
            penalty = self.regularizer(self.model, batch, output)
        weighted = self.weighting(batch.task, loss + penalty) * share / draws
        with self.precision.paused():
            self.combiner.backward(batch.task, self.precision.scaler.scale(weighted))  # frees this task's graph
        return Pass(batch, loss.detach(), penalty.detach(), output.logits.detach())

    # Batches that do not fit into the GPU's memory

    @contextlib.contextmanager
    def _in_chunks(self, batch: Batch, parts: int) -> Iterator[None]:
        """Encode a batch whose rows are compared in `parts` chunks: the loss still sees all of its vectors."""
        before = self.model.chunk_rows
        chunk = max(1, -(-len(batch) * len(batch.sentences) // parts))
        self.model.chunk_rows = min(chunk, before or chunk)
        try:
            yield
        finally:
            self.model.chunk_rows = before

    def _abandon(self, states: dict[str, Tensor], side_stream: dict[str, Any]) -> None:
        """Undo a step that was not completed."""
        self.combiner.drop()
        self.optimizer.zero_grad()
        restore_random_states(states, self.precision.device)
        self.side_stream.load_state_dict(side_stream)
        if self.precision.device.type == "cuda":
            gc.collect()  # recomputed layers leave cycles
            torch.cuda.empty_cache()

    def _split_further(self, shortage: "MemoryShortageError", number: int) -> None:
        """Compute the task's batches in twice as many parts from now on; refuse if a single row does not fit."""
        task, batch, before = shortage.batch.task, shortage.batch, self.parts.get(shortage.batch.task, 1)
        most = len(batch) * (len(batch.sentences) if task in self.compare_rows else 1)
        if self.world.size > 1 or before >= most:
            raise InputError(out_of_memory(shortage.reason)) from shortage
        self.parts[task] = 2 * before
        warn(
            f"step {number}: out of memory at {len(batch)} rows of {task}, so its batches are computed in {2 * before} "
            "parts from now on. The gradients are the same, apart from dropout masks."
        )

    def _apply_gradients(self) -> bool:
        """Combine, clip and apply the gradients; return whether the optimizer made its step.

        In fp16 the loss scaler skips the step after an overflow, and to find out it reads one number from the GPU.
        Whether it then calls the optimizer is known without reading another.
        """
        scaler, steps = self.precision.scaler, []
        self.combiner.write_gradients(scaler.get_scale() if self.combiner.method else 1.0, self.model.parameters())
        if self.clip:
            scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        hook = self.optimizer.register_step_post_hook(lambda *_: steps.append(1))
        scaler.step(self.optimizer)
        hook.remove()
        scaler.update()
        self.optimizer.zero_grad()
        return bool(steps)

    # State

    @property
    def rates(self) -> tuple[float, float]:
        """The lowest and the highest learning rate of a parameter at the next step."""
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        return min(rates), max(rates)

    def is_finite(self) -> bool:
        """Whether all weights are finite."""
        tensors = [p.detach() for p in self.model.parameters() if p.requires_grad]
        return bool(torch.stack([tensor.isfinite().all() for tensor in tensors]).all())  # one transfer from the GPU

    def state_dict(self) -> dict[str, Any]:
        """All that a run needs in order to be resumed, besides its progress: tensors and plain values only.

        Every process has its own random numbers; all other parts are the same in all of them.
        """
        own = {"random": random_states(self.precision.device), "side_stream": self.side_stream.state_dict()}
        parts = {name: getattr(self, name).state_dict() for name in self._parts()}
        return parts | {
            "scaler": self.precision.scaler.state_dict(),
            "parts": dict(self.parts),
            "processes": self.world.collect(own),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self._parts():
            getattr(self, name).load_state_dict(state[name])
        if state["scaler"]:  # empty if the run was saved in another precision than fp16: then the scaler starts anew
            self.precision.scaler.load_state_dict(state["scaler"])
        self.parts = dict(state.get("parts", {}))
        processes = state.get("processes") or [state]  # older states have the random numbers of one process
        own = processes[min(self.world.rank, len(processes) - 1)]
        restore_random_states(own["random"], self.precision.device)
        self.side_stream.load_state_dict(own.get("side_stream", {"states": None}))
        if self.world.rank >= len(processes):  # there are more processes than when it was saved
            torch.manual_seed(torch.initial_seed() + int(torch.randint(2**31, ())) + self.world.rank)

    def state_bytes(self) -> int:
        """About the size of the state once the optimizer has made a step: most keep two numbers per weight."""
        trainable = sum(p.nbytes for p in self.model.parameters() if p.requires_grad)
        return 2 * trainable + sum(
            size_of(getattr(self, name).state_dict()) for name in self._parts() if name != "optimizer"
        )

    @staticmethod
    def _parts() -> tuple[str, ...]:
        return ("model", "optimizer", "schedule", "combiner", "regularizer", "averager")
