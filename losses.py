"""What training makes small: LOSSES of one task, each the mean over the batch's examples, and WEIGHTINGS between tasks.

Shapes:  B batch   C outputs of a task
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tasks import Batch, Output, Task
from utils import InputError, number

Objective = Callable[[Output, Batch], Tensor]

# --- losses: (Output, Batch) -> scalar, the mean over the examples really in the batch (TRAPS 12) ---------------------


def full(tensor: Tensor) -> Tensor:
    """In float32 at least: a mean of logarithms in half precision has three digits."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def cross_entropy(output: Output, batch: Batch) -> Tensor:
    """-log softmax(logits)[label]. Labels 0 .. C-1."""
    return F.cross_entropy(full(output.logits), batch.labels)


def smoothed_cross_entropy(output: Output, batch: Batch, label_smoothing: float = 0.1) -> Tensor:
    """Cross entropy with (1 - eps) of the target on the label and eps spread over all C. Labels 0 .. C-1.

    Szegedy et al. 2016 (arXiv:1512.00567), section 7. For labels that annotators disagree on, as in SST.
    """
    return F.cross_entropy(full(output.logits), batch.labels, label_smoothing=label_smoothing)


def binary_cross_entropy(output: Output, batch: Batch) -> Tensor:
    """-y log sigmoid(l) - (1 - y) log(1 - sigmoid(l)). Labels in [0, 1]."""
    logits = full(output.logits).squeeze(1)  # (B, 1) -> (B,): beside (B,) labels, (B, 1) would make (B, B) differences
    return F.binary_cross_entropy_with_logits(logits, batch.labels.to(logits.dtype))


def squared_error(output: Output, batch: Batch) -> Tensor:
    """(l - y)^2. Labels 0 to 5."""
    predicted = full(output.logits).squeeze(1)  # (B, 1) -> (B,)
    return F.mse_loss(predicted, batch.labels.to(predicted.dtype))


@dataclass(frozen=True)
class Loss:
    function: Callable[..., Tensor]
    kinds: tuple[str, ...]  # Task.kind that its labels and logits fit
    settings: tuple[str, ...] = ()  # flags that it takes as keyword arguments of the same name

    def __call__(self, output: Output, batch: Batch) -> Tensor:
        return self.function(output, batch)


LOSSES: dict[str, Loss] = {
    "ce": Loss(cross_entropy, ("category",)),
    "ce_smooth": Loss(smoothed_cross_entropy, ("category",), ("label_smoothing",)),
    "bce": Loss(binary_cross_entropy, ("probability",)),
    "mse": Loss(squared_error, ("number",)),
}
DEFAULT_LOSSES = {"category": "ce", "probability": "bce", "number": "mse"}  # by Task.kind


def build_objective(spec: str | None, task: Task, args: argparse.Namespace) -> Objective:
    """spec: a loss, or several with weights: `mse`, `bce+mnrl:0.2`. None: the usual one for the task's kind."""
    flag = f"--{task.name}_loss"
    terms = [_term(text, f"{flag} {spec}", task) for text in (spec or DEFAULT_LOSSES[task.kind]).split("+")]
    weighted = [(w, partial(loss.function, **{s: getattr(args, s) for s in loss.settings})) for loss, w in terms]

    def objective(output: Output, batch: Batch) -> Tensor:
        return sum(weight * loss(output, batch) for weight, loss in weighted)

    return objective


def _term(text: str, flag: str, task: Task) -> tuple[Loss, float]:
    """`mse:0.2` -> the loss and its weight."""
    name, colon, weight = text.partition(":")
    if name not in LOSSES:
        raise InputError(f"{flag}: a loss must be one of {', '.join(sorted(LOSSES))}, found {name!r}. Choose one.")
    loss = LOSSES[name]
    if task.kind not in loss.kinds:
        fitting = " or ".join(sorted(n for n, other in LOSSES.items() if task.kind in other.kinds))
        raise InputError(
            f"{flag}: {name} is for a task whose output is a {' or a '.join(loss.kinds)}, "
            f"found {task.name}, whose output is a {task.kind}. Use {fitting}."
        )
    return loss, _weight(weight, f"{flag}: the weight of {name}") if colon else 1.0


def _weight(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise InputError(f"{what} must be a number above 0, found {text!r}. Write it like mse:0.2, or leave it out.")
    return value


# --- weightings: (name of the task, loss) -> loss ---------------------------------------------------------------------


class Equal(nn.Module):
    """Every task's loss as it is."""

    def __init__(self, tasks: list[Task], weights: dict[str, float]):
        super().__init__()

    def forward(self, name: str, loss: Tensor) -> Tensor:
        return loss


class Fixed(Equal):
    """Every task's loss times its weight of --task_weights; 1 for a task that is not named there."""

    def __init__(self, tasks: list[Task], weights: dict[str, float]):
        super().__init__(tasks, weights)
        self.weights = {task.name: weights.get(task.name, 1.0) for task in tasks}

    def forward(self, name: str, loss: Tensor) -> Tensor:
        return self.weights[name] * loss

    def extra_repr(self) -> str:
        return " ".join(f"{name}={weight:g}" for name, weight in self.weights.items())


class Uncertainty(Equal):
    """Kendall et al. 2018 (arXiv:1705.07115), equations 7 and 10, with a learned s = log sigma^2 for every task:

        classification    exp(-s) L + s/2             smallest at s = log 2L
        regression        exp(-s) L/2 + s/2           smallest at s = log L

    s starts at 0. It moves by about the learning rate a step: at the encoder's 1e-5 it all but stands still;
    --head_lr 1e-3 lets it learn. Deviation: none.
    """

    def __init__(self, tasks: list[Task], weights: dict[str, float]):
        super().__init__(tasks, weights)
        self.factors = {task.name: 0.5 if task.kind == "number" else 1.0 for task in tasks}
        self.log_variances = nn.ParameterDict({task.name: nn.Parameter(torch.zeros(())) for task in tasks})

    def forward(self, name: str, loss: Tensor) -> Tensor:
        s = self.log_variances[name]
        return self.factors[name] * torch.exp(-s) * loss + s / 2


WEIGHTINGS: dict[str, type[Equal]] = {"equal": Equal, "fixed": Fixed, "uncertainty": Uncertainty}


# --- flags ------------------------------------------------------------------------------------------------------------


def task_weight(text: str) -> str:
    """An argparse type: `sts=2`, checked and left as it is."""
    name, equals, weight = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"must be like sts=2, found {text!r}")
    number(float, 0, 1e6, above=True)(weight)
    return text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("losses")
    group.add_argument(
        "--label_smoothing", type=number(float, 0, 1), default=0.1, help="share of the target that ce_smooth spreads"
    )
    group.add_argument(
        "--weighting", choices=sorted(WEIGHTINGS), default="equal", help="how the tasks' losses are weighted"
    )
    group.add_argument(
        "--task_weights", type=task_weight, nargs="+", metavar="TASK=WEIGHT", help="for --weighting fixed; others: 1"
    )


def build_weighting(args: argparse.Namespace, tasks: list[Task]) -> nn.Module:
    """A module; what it learns has to be registered in the model, so that the optimizer owns it."""
    if (args.weighting == "fixed") != bool(args.task_weights):
        raise InputError(
            f"--task_weights and --weighting fixed need each other, found --weighting {args.weighting} "
            f"{'with' if args.task_weights else 'without'} --task_weights. Give both, or neither."
        )
    weights = {name: float(weight) for name, _, weight in (t.partition("=") for t in args.task_weights or ())}
    names = [task.name for task in tasks]
    for name in weights:
        if name not in names:
            raise InputError(f"--task_weights: a task must be one of {', '.join(names)}, found {name!r}. Correct it.")
    return WEIGHTINGS[args.weighting](tasks, weights)
