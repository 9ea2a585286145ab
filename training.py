"""The one training loop: step, epoch, evaluation, checkpoints, resume. It knows no task and no flag."""

import argparse
import itertools
import json
import math
import operator
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from tqdm import tqdm

from base_bert import load_usual_state, usual_state
from bert import ATTENTIONS
from losses import Equal
from optimizer import NoAverage
from pcgrad import GradientCombiner
from smart import Regularizer
from tasks import TASKS, Batch, Output
from utils import (
    InputError,
    Precision,
    Run,
    atomic_path,
    number,
    random_states,
    restore_random_states,
    write_text,
)

Step = Sequence[Sequence[Batch]]  # one update: one or more draws, each with a batch of one or more tasks
CHECK_EVERY = 20  # steps between looks at the losses: each look waits for the GPU
Item = TypeVar("Item")


def grouped(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Lists of `size` items; the last may be shorter."""
    iterator = iter(items)
    while group := list(itertools.islice(iterator, size)):
        yield group


@dataclass
class Seen:
    """What the training pass itself shows of an epoch; a loss that is NaN or infinite ends the run and is named."""

    losses: list[tuple[str, int, Tensor]] = field(default_factory=list)
    penalties: dict[str, list[Tensor]] = field(default_factory=dict)  # what the regularizer added
    values: dict[str, list[Tensor]] = field(default_factory=dict)  # decoded predictions
    labels: dict[str, list[Tensor]] = field(default_factory=dict)
    checked: int = 0

    def add(self, batch: Batch, step: int, loss: Tensor, penalty: Tensor, logits: Tensor) -> None:
        self.losses.append((batch.task, step, (loss + penalty).detach()))
        noted = [(self.penalties, penalty)]
        if batch.task in TASKS:  # the objectives of pre-training have no score of a row
            noted.append((self.values, TASKS[batch.task].decode(logits.detach().float())))  # numpy has no bfloat16
            noted.append((self.labels, batch.labels))
        for kept, tensor in noted:
            kept.setdefault(batch.task, []).append(tensor.detach())
        if len(self.losses) - self.checked >= CHECK_EVERY:
            self.check()

    def check(self) -> None:
        for task, step, loss in self.losses[self.checked :]:
            if not math.isfinite(loss.item()):
                raise InputError(
                    f"the loss of {task} at step {step} must be finite, found {loss.item()}. "
                    "The best epoch so far is kept. Lower --lr, or set --clip 1."
                )
        self.checked = len(self.losses)

    def means(self) -> dict[str, float]:
        """The mean loss of every task, with what the regularizer added."""
        self.check()
        tasks = dict.fromkeys(task for task, _, _ in self.losses)
        return {t: _mean([x for name, _, x in self.losses if name == t]) for t in tasks}

    def mean_penalties(self) -> dict[str, float]:
        return {task: _mean(found) for task, found in self.penalties.items()}

    def scores(self) -> dict[str, float]:
        """Scores on the training rows as they were met, dropout and all: no second pass over the training set."""
        return {
            task: TASKS[task].score(*(torch.cat(kept[task]).cpu().numpy() for kept in (self.values, self.labels)))
            for task in self.values
        }


def _mean(values: list[Tensor]) -> float:
    return torch.stack(values).float().mean().item()


@dataclass
class Trainer:
    """What one update needs, put together by the scripts' builders."""

    model: nn.Module
    objectives: dict[str, Callable[[Output, Batch], Tensor]]  # by task, the mean over the batch's examples
    optimizer: Optimizer
    schedule: LRScheduler
    precision: Precision
    clip: float = 0.0  # largest norm of the gradient; 0: no clipping
    regularizer: Regularizer = field(default_factory=Regularizer)
    weighting: nn.Module = field(default_factory=lambda: Equal([], {}))
    combiner: GradientCombiner = field(default_factory=lambda: GradientCombiner((), None))
    averager: NoAverage = field(default_factory=NoAverage)

    def update(self, step: Step, seen: Seen, number: int) -> None:
        scaler = self.precision.scaler
        for batch in itertools.chain.from_iterable(step):
            batch = batch.to(self.precision.device)
            with self.precision.autocast():
                output = self.model.predict(batch)
                loss = self.objectives[batch.task](output, batch)
                penalty = self.regularizer(self.model, batch, output)
                weighted = self.weighting(batch.task, loss + penalty) / len(step)
            self.combiner.backward(batch.task, scaler.scale(weighted))  # this task's graph is freed here
            seen.add(batch, number, loss, penalty, output.logits)
        self.combiner.write_gradients(scaler.get_scale())
        if self.clip:
            scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        scale = scaler.get_scale()
        scaler.step(self.optimizer)  # passes over the step where fp16 overflowed
        scaler.update()
        self.optimizer.zero_grad()
        if scaler.get_scale() >= scale:  # it falls exactly where the step was passed over
            self.schedule.step()
            self.averager.update(self.model)
            self.regularizer.update(self.model)

    def epoch(self, steps: Iterable[Step], label: str, total: int | None = None) -> Seen:
        """One pass over the steps."""
        self.model.train()
        seen = Seen()
        with tqdm(total=total, desc=label, leave=False, disable=None) as bar:
            for number, step in enumerate(steps, start=1):
                self.update(step, seen, number)
                bar.update()
        seen.check()
        self.averager.epoch_end(self.model)
        return seen

    def state_dict(self) -> dict[str, Any]:
        """All that a run must remember besides its progress: tensors and plain values only."""
        parts = {name: getattr(self, name).state_dict() for name in self._parts()}
        return parts | {"scaler": self.precision.scaler.state_dict(), "random": random_states(self.precision.device)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self._parts():
            getattr(self, name).load_state_dict(state[name])
        self.precision.scaler.load_state_dict(state["scaler"])
        restore_random_states(state["random"], self.precision.device)

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
    """Trains, evaluates after every epoch, and leaves the model with the weights of the best one.

    steps(epoch) are the updates of an epoch, steps_in(epoch) of them. evaluate() -> scores; the epoch with the highest
    scores[select] is kept (operator.lt as `better`: with the lowest), the earlier one in a tie. patience: stop after so
    many epochs without a better one; 0: never. keep_state: write state.pt after every epoch, from which `resume` goes
    on. on_epoch(epoch, scores) comes when an epoch is evaluated and logged; what it raises ends the training there.
    Returns the best scores.
    """
    progress = load_progress(trainer, run) if resume else Progress()
    if progress.epoch >= epochs:
        print(f"{run.folder}: all {epochs} epochs are done, nothing is left to train", flush=True)
    for epoch in range(progress.epoch + 1, epochs + 1):
        if patience and progress.epoch - progress.best_epoch >= patience:
            print(f"stopped: no better epoch in {patience}", flush=True)
            break
        started = time.monotonic()
        seen = trainer.epoch(steps(epoch), f"epoch {epoch}/{epochs}", steps_in(epoch) or None)
        losses = seen.means()
        progress.epoch = epoch
        with trainer.averager.applied(trainer.model):
            scores = evaluate()
            is_best = not progress.best or better(scores[select], progress.best[select])
            if is_best:
                progress.best, progress.best_epoch = scores, epoch
                save_best(trainer.model, run)
        run.log(
            epoch=epoch, losses=losses, penalties=seen.mean_penalties(), train=seen.scores(), scores=scores,
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
    """model.safetensors and config.json: the usual tools load the encoder, this suite the whole model."""
    with atomic_path(run.folder / "model.safetensors") as path:
        save_file(usual_state(model), path, metadata={"format": "pt"})
    write_text(run.folder / "config.json", json.dumps(model.bert.config.to_dict(), indent=2) + "\n")


def restore_best(model: nn.Module, run: Run) -> None:
    path = run.folder / "model.safetensors"
    try:
        tensors = load_file(path)
    except Exception as error:  # safetensors raises its own type for a damaged file, OSError for a missing one
        raise InputError(f"{path}: not a whole weights file ({error}). Train the run again.") from error
    load_usual_state(model, tensors, path)


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
        raise InputError(f"--resume: {path} does not exist; no epoch was finished. Start anew with --name.") from error
    except (RuntimeError, KeyError, ValueError, TypeError, EOFError, pickle.UnpicklingError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise InputError(f"--resume: {path} cannot be used ({reason}). Start anew with another --name.") from error


# --- flags ------------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What every script that trains has: the encoder, the seed, the machine."""
    add = parser.add_argument
    add("--model", default="bert-base-uncased", help="minilm, a checkpoint's directory, a run, or a hub id")
    add("--keep_layers", type=number(int, 1, 1000), help="keep the first n layers of BERT; None: all")
    add("--attention", choices=sorted(ATTENTIONS), default="fastest", help="how attention is computed")
    add("--seed", type=number(int, 0, 2**31), default=11711, help="of weights, batches and dropout")
    add("--use_gpu", action="store_true", help="train on CUDA")
    add("--precision", choices=sorted(Precision.DTYPES), default="fp32", help="a T4 has no bf16: fp16 there")


def must_name_the_run(args: argparse.Namespace) -> None:
    if args.resume and args.name is None:
        raise InputError("--resume needs the name of the run to go on with, found no --name. Add --name NAME.")


def add_loop_arguments(parser: argparse.ArgumentParser) -> None:
    """What the scripts with long runs have besides."""
    add = parser.add_argument
    add("--accumulate", type=number(int, 1, 4096), default=1,
        help="draws of the sampler, or batches, over whose gradients one update takes the mean")  # fmt: skip
    add("--compile", action="store_true", help="torch.compile the layers of BERT")
    add("--checkpoint_activations", action="store_true", help="less memory: layers are computed again when going back")
    add("--patience", type=number(int, 0, 1000), default=0, help="stop after so many epochs without a better; 0: never")
    add("--dry_run", action="store_true", help="two steps of everything, in a temporary directory; nothing is kept")
