"""The handout's AdamW, written by hand, and torch's other optimizers; parameter groups, schedules, weight averages.

Algorithm 1 of Kingma & Ba 2015 (arXiv:1412.6980) in its efficient form, with the decoupled weight decay of Loshchilov &
Hutter 2019 (arXiv:1711.05101) as the last operation of a step.
"""

import argparse
import contextlib
import math
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import kernels
from flags import ALWAYS, ENCODER_TRAINS, ArgumentParser, Need, Switch, chosen, number
from interruption import deferred


class AdamW(Optimizer):
    """The handout's update:

        m <- beta1 m + (1 - beta1) g
        v <- beta2 v + (1 - beta2) g^2
        alpha_t <- lr sqrt(1 - beta2^t) / (1 - beta1^t)      (correct_bias; else alpha_t <- lr)
        theta <- theta - alpha_t m / (sqrt(v) + eps)
        theta <- theta - lr weight_decay theta               (with the new theta)

    This is not torch.optim.AdamW, where eps is added to the bias-corrected denominator and theta decays before the
    update. The two agree up to eps if weight_decay is 0.

    The last two lines are computed as one, theta - (u (1 - d) + d theta) with u = alpha_t m / (sqrt(v) + eps) and
    d = lr weight_decay. At the usual d of 1e-7, rounding the factor 1 - d to float32 would change d by 20%, so every
    step would decay too much. On the CPU this is the loop `adamw` of loops.py, on CUDA `update_together`.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        correct_bias: bool = True,
    ):
        if lr < 0:
            raise ValueError(f"lr must be at least 0, found {lr}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be at least 0 and below 1, found {betas}")
        if eps < 0:
            raise ValueError(f"eps must be at least 0, found {eps}")
        super().__init__(
            params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, correct_bias=correct_bias)
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for t, parameters in self._advance(group).items():
                self._update(parameters, t, group)
        return loss

    def _advance(self, group: dict[str, Any]) -> dict[int, list[Tensor]]:
        """Count a step for every parameter that has a gradient; return the parameters by their step count t."""
        by_step: dict[int, list[Tensor]] = {}
        for p in group["params"]:
            if p.grad is None:  # not part of this step: neither updated nor decayed
                continue
            if p.grad.is_sparse:
                raise RuntimeError("AdamW needs dense gradients, found a sparse one. Use SparseAdam for it.")
            state = self.state[p]
            if not state:
                state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
            state["step"] += 1
            by_step.setdefault(state["step"], []).append(p)
        return by_step

    def _update(self, parameters: list[Tensor], t: int, group: dict[str, Any]) -> None:
        lr, betas, decay = group["lr"], group["betas"], group["lr"] * group["weight_decay"]
        alpha = (lr * bias_correction(betas, t) if group["correct_bias"] else lr) * (1 - decay)
        others = []
        for row in ((p, p.grad, self.state[p]["m"], self.state[p]["v"]) for p in parameters):
            if kernels.runs_here(*row):
                kernels.adamw(*row, *betas, alpha, group["eps"], decay)
            else:
                others.append(row)
        if others:
            rounded = tuple(as_computed(beta, others[0][0].dtype) for beta in betas)
            alpha *= bias_correction(rounded, t) / bias_correction(betas, t)
            update_together(*zip(*others, strict=True), *rounded, alpha, group["eps"], decay)


def bias_correction(betas: tuple[float, float], t: int) -> float:
    return math.sqrt(1 - betas[1] ** t) / (1 - betas[0] ** t)


def as_computed(beta: float, dtype: torch.dtype) -> float:
    """Return beta as torch's fused kernel has it: rounded to float32, unless the tensors are float64.

    On CUDA the kernel derives 1 - beta from it. For 0.999 that is 1.3e-5 too small, and so are all v.
    """
    return beta if dtype == torch.float64 else float(np.float32(beta))


def update_together(
    theta: tuple[Tensor, ...], grad: tuple[Tensor, ...], m: tuple[Tensor, ...], v: tuple[Tensor, ...],
    beta1: float, beta2: float, alpha: float, eps: float, decay: float,
) -> None:  # fmt: skip
    """Do the update on lists of tensors: one pass over memory without decay, three with it.

    torch's fused kernel computes x <- x - alpha m / (sqrt(v) + eps) once its bias corrections are 1 and its decay is 0.
    Its own decay is a subtraction before this one. At d = 1e-7 rounding makes that up to 100% wrong for single weights,
    so the kernel is applied to x = -d theta instead, and the sum of both terms is added to theta.
    """
    sums = torch._foreach_mul(theta, -decay) if decay else theta
    grad = [g if g.stride() == p.stride() else torch.empty_like(p).copy_(g) for p, g in zip(theta, grad, strict=True)]
    endless = torch.full((), 2.0**62, dtype=torch.float32, device=theta[0].device)  # a step count t with beta^t = 0
    torch._fused_adamw_(
        sums, grad, m, v, [], [endless] * len(theta), lr=alpha, beta1=beta1, beta2=beta2, weight_decay=0.0, eps=eps,
        amsgrad=False, maximize=False,
    )  # fmt: skip
    if decay:
        torch._foreach_add_(theta, sums)


class NAdam(torch.optim.NAdam):
    """torch's NAdam, except that each parameter's scalar `mu_product` stays on the CPU when a state is loaded.

    torch moves it to the parameter's device. The step reads it, and on a GPU each read is a synchronization.
    """

    def __init__(self, params: Iterable[Tensor] | Iterable[dict[str, Any]]):
        super().__init__(params, decoupled_weight_decay=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)  # keeps the order of the parameters
        for state, saved in zip(self.state.values(), state_dict["state"].values(), strict=True):
            state["mu_product"] = saved["mu_product"].to("cpu", copy=True)


# --- parameter groups -------------------------------------------------------------------------------------------------


def parameter_groups(
    model: nn.Module,
    lr: float,
    *,
    head_lr: float | None = None,
    weight_decay: float = 0.0,
    decay_matrices_only: bool = False,
    layer_decay: float = 1.0,
) -> list[dict[str, Any]]:
    """Group the trainable parameters by learning rate and weight decay; each belongs to exactly one group.

    head_lr: the rate of everything outside the encoder `bert`; copies of its layers, which `own_layers` gives every
    task, count as inside. decay_matrices_only: no decay for biases and LayerNorm. layer_decay: layer l of the encoder's
    L layers has the rate lr * layer_decay^(L - l); the embeddings count as layer 0.
    """
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    layers = max((_layer(name) or 0 for name, _ in model.named_parameters()), default=0)
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for name, p in trainable.items():
        if name.startswith("bert.") or "bert_layers." in name:
            layer = _layer(name)
            rate = lr if layer is None else lr * layer_decay ** (layers - layer)
        else:
            rate = lr if head_lr is None else head_lr
        decay = 0.0 if decay_matrices_only and p.ndim < 2 else weight_decay
        group = groups.setdefault((rate, decay), {"params": [], "lr": rate, "weight_decay": decay})
        group["params"].append(p)
    owned = [id(p) for group in groups.values() for p in group["params"]]
    assert sorted(owned) == sorted(map(id, trainable.values())), "every parameter is in exactly one group"
    return list(groups.values())


def _layer(name: str) -> int | None:
    """The number of the encoder's layer, from 1; 0 for the embeddings; None above the layers (pooler, heads)."""
    match = re.search(r"bert_layers\.(\d+)\.", name)
    if match:
        return int(match[1]) + 1
    return 0 if "embed" in name else None


# --- schedules: progress in [0, 1] -> multiplier of the learning rate -------------------------------------------------


def constant(progress: float) -> float:
    return 1.0


def linear(progress: float) -> float:
    return 1.0 - progress


def cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))


SCHEDULES: dict[str, Callable[[float], float]] = {"constant": constant, "linear": linear, "cosine": cosine}


def build_schedule(optimizer: Optimizer, name: str, total_steps: int, warmup: float) -> LambdaLR:
    """Raise the rate linearly over the first fraction `warmup` of the steps, then follow SCHEDULES[name]."""
    warm = round(warmup * total_steps)

    def multiplier(step: int) -> float:
        if step < warm:
            return (step + 1) / (warm + 1)
        return SCHEDULES[name](min(1.0, (step - warm) / max(1, total_steps - warm)))

    return LambdaLR(optimizer, multiplier)


# --- averagers: the weights to evaluate and keep ----------------------------------------------------------------------


class NoAverage:
    """The current weights; costs nothing."""

    def update(self, model: nn.Module) -> None:
        """Call this after every step."""

    def epoch_end(self, model: nn.Module) -> None:
        """Call this after the last step of every epoch."""

    @contextlib.contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Inside this context the model has the averaged weights; afterwards its own again, bit for bit."""
        yield

    def take_back(self) -> None:
        """Give the model its own weights again if `applied` was interrupted."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Average(NoAverage):
    """A running average of the trainable parameters; frozen ones never change."""

    def __init__(self, model: nn.Module):
        self.weights = {name: p.detach().clone() for name, p in self.trainable(model)}
        self.count = 0  # how many weights the average contains
        self.own: dict[nn.Parameter, Tensor] = {}  # the model's weights, while it has the averaged ones

    @staticmethod
    def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in model.named_parameters() if p.requires_grad]

    @torch.no_grad()
    def include(self, model: nn.Module, share: Callable[[int], float]) -> None:
        """average <- average + share(n) (weights - average), at the n-th call."""
        self.count += 1
        own = [p for _, p in self.trainable(model)]
        torch._foreach_lerp_(list(self.weights.values()), own, share(self.count))

    @contextlib.contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        if not self.count:
            yield
            return
        try:
            with deferred():
                self.own = {p: p.data for _, p in self.trainable(model)}
                for (_, p), average in zip(self.trainable(model), self.weights.values(), strict=True):
                    p.data = average  # only the pointer changes; nothing is copied
            yield
        finally:
            self.take_back()

    def take_back(self) -> None:
        with deferred():
            for p, data in self.own.items():
                p.data = data
            self.own = {}

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "weights": dict(self.weights)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["weights"].keys() != self.weights.keys():
            odd = sorted(state["weights"].keys() ^ self.weights.keys())[0]
            raise ValueError(f"the saved average must be of the same parameters, found {odd} on one side only")
        self.count = state["count"]
        for name, tensor in state["weights"].items():
            self.weights[name].copy_(tensor)


class ExponentialAverage(Average):
    """After every step n: (1 - d) sum_k d^(n-k) theta_k / (1 - d^n), with decay d.

    Polyak averaging with exponential weights and the bias correction of Adam (Kingma & Ba 2015, sections 3 and 7.2),
    written as an interpolation by (1 - d) / (1 - d^n), so that the initial weights do not count.
    """

    def __init__(self, model: nn.Module, decay: float):
        super().__init__(model)
        self.decay = decay

    def update(self, model: nn.Module) -> None:
        self.include(model, lambda n: (1 - self.decay) / (1 - self.decay**n))


class StochasticWeightAverage(Average):
    """The plain mean of the weights at the ends of the epochs e >= start * epochs; at least of the last one.

    Izmailov et al. 2018 (arXiv:1803.05407), Algorithm 1, with a cycle of one epoch. Deviation: the learning rate
    follows --schedule (constant is nearest to the paper). BERT has no batch normalization to update.
    """

    def __init__(self, model: nn.Module, start: float, epochs: int):
        super().__init__(model)
        self.first = round(start * epochs, 6)  # in float arithmetic, 0.28 * 25 is above 7
        self.epoch = 0

    def epoch_end(self, model: nn.Module) -> None:
        self.epoch += 1
        if self.epoch >= self.first:
            self.include(model, lambda n: 1 / n)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.epoch = state["epoch"]


AVERAGERS: dict[str, Callable[[nn.Module, argparse.Namespace], NoAverage]] = {
    "none": lambda model, args: NoAverage(),
    "ema": lambda model, args: ExponentialAverage(model, args.ema_decay),
    "swa": lambda model, args: StochasticWeightAverage(model, args.average_start, args.epochs),
}


def build_averager(args: argparse.Namespace, model: nn.Module) -> NoAverage:
    """Call this once the model is on its device and its frozen parameters are frozen."""
    return AVERAGERS[args.averager](model, args)


# --- flags ------------------------------------------------------------------------------------------------------------

# Each takes parameter groups with their own lr and weight_decay. All but adamw are torch's, with torch's defaults
# unless noted; in sgd and adamax, weight decay is an L2 term of the gradient.
OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]]], Optimizer]] = {
    "adamw": AdamW,
    "torch_adamw": torch.optim.AdamW,
    "sgd": partial(torch.optim.SGD, momentum=0.9),  # Sutskever et al. 2013; needs a far larger rate than Adam
    "adamax": torch.optim.Adamax,  # Kingma & Ba 2015, Algorithm 2
    "nadam": NAdam,  # Dozat 2016
    "radam": partial(torch.optim.RAdam, decoupled_weight_decay=True),  # Liu et al. 2020, arXiv:1908.03265
    "adafactor": torch.optim.Adafactor,  # Shazeer & Stern 2018, arXiv:1804.04235; the rate is relative to the weights
}


ENCODER_LEARNS_ITSELF = Need(
    "an encoder whose own layers train, which --adapter_only freezes",
    lambda args: not getattr(args, "adapter_only", False),
    "Leave out --adapter_only (--head_lr sets the adapter's rate)",
)


def add_arguments(parser: ArgumentParser, lr: float | None, lr_default: str = "") -> None:
    """lr: the default learning rate; None if it depends on other flags, as lr_default says."""
    add = parser.section("most used")
    rate = number(float, 0, 1, above=True)
    add("--lr", type=rate, default=lr, needs=ALWAYS, help=f"learning rate{lr_default}")
    add = parser.section("optimization")
    add("--optimizer", choices=sorted(OPTIMIZERS), default="adamw", needs=ALWAYS,
        help="adamw is the handout's, the others torch's; adafactor waits for a GPU twice per parameter")  # fmt: skip
    add(
        "--head_lr",
        type=rate,
        needs=ALWAYS,
        help="learning rate outside the encoder, adapters included (default: --lr)",
    )
    add("--layer_decay", type=rate, default=1.0, needs=(ENCODER_TRAINS, ENCODER_LEARNS_ITSELF),
        help="factor on the learning rate from each layer to the one below")  # fmt: skip
    add("--weight_decay", type=number(float, 0, 1), default=0.0, needs=ALWAYS,
        help="decoupled weight decay; for sgd and adamax an L2 term")  # fmt: skip
    add("--decay_matrices_only", action=Switch, help="no decay for biases and LayerNorm",
        needs=Need("--weight_decay", lambda args: args.weight_decay > 0))  # fmt: skip
    add("--schedule", choices=sorted(SCHEDULES), default="constant", needs=ALWAYS, help="learning rate over the steps")
    add("--warmup", type=number(float, 0, 1), default=0.0, needs=ALWAYS,
        help="fraction of the steps over which the rate rises")  # fmt: skip
    add(
        "--clip",
        type=number(float, 0, 1e6),
        default=0.0,
        needs=ALWAYS,
        help="maximum gradient norm; 0 means no clipping",
    )
    add("--averager", choices=sorted(AVERAGERS), default="none", needs=ALWAYS,
        help="average of the weights that is evaluated and saved")  # fmt: skip
    add("--ema_decay", type=number(float, 0, 0.999999), default=0.999, needs=chosen("--averager", "ema"),
        help="ema: weight of the old average per step")  # fmt: skip
    add("--average_start", type=number(float, 0, 1), default=0.5, needs=chosen("--averager", "swa"),
        help="swa: fraction of the epochs before the first average")  # fmt: skip


def build_optimizer(args: argparse.Namespace, model: nn.Module) -> Optimizer:
    return OPTIMIZERS[args.optimizer](
        parameter_groups(
            model,
            args.lr,
            head_lr=args.head_lr,
            weight_decay=args.weight_decay,
            decay_matrices_only=args.decay_matrices_only,
            layer_decay=args.layer_decay,
        )
    )
