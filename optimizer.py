"""The handout's AdamW, written by hand, and torch's others; parameter groups; schedules; averages of the weights.

Algorithm 1 of Kingma & Ba 2015 (arXiv:1412.6980) in its efficient form, with the decoupled weight decay of Loshchilov &
Hutter 2019 (arXiv:1711.05101) as the last update of a step.
"""

import argparse
import contextlib
import math
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import kernels
from utils import number


class AdamW(Optimizer):
    """The handout's update:

        m <- beta1 m + (1 - beta1) g
        v <- beta2 v + (1 - beta2) g^2
        alpha_t <- lr sqrt(1 - beta2^t) / (1 - beta1^t)      (correct_bias; else alpha_t <- lr)
        theta <- theta - alpha_t m / (sqrt(v) + eps)
        theta <- theta - lr weight_decay theta               (with the new theta)

    This is not torch.optim.AdamW: there eps is added to the bias-corrected denominator, and theta decays before the
    update. The two agree to within eps where weight_decay is 0.
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
        """Counts the step of every parameter that has a gradient; the parameters by their step count t."""
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
        beta1, beta2 = group["betas"]
        alpha_t = group["lr"]
        if group["correct_bias"]:
            alpha_t *= math.sqrt(1 - beta2**t) / (1 - beta1**t)
        # (theta - u)(1 - d) = theta - (u (1 - d) + d theta): one subtraction. In float32 the factor 1 - d itself is off
        # by a fifth at the usual lr * weight_decay = 1e-7, so every step would decay too much.
        decay = group["lr"] * group["weight_decay"]
        scalars = (beta1, beta2, alpha_t * (1 - decay), group["eps"], decay)
        tensors = [(p, p.grad, self.state[p]["m"], self.state[p]["v"]) for p in parameters]
        in_one_pass = [row for row in tensors if kernels.runs_here(*row)]
        for row in in_one_pass:
            kernels.adamw(*row, *scalars)
        others = [row for row in tensors if not kernels.runs_here(*row)]
        if others:
            update_together(*zip(*others, strict=True), *scalars)


def update_together(
    theta: tuple[Tensor, ...], grad: tuple[Tensor, ...], m: tuple[Tensor, ...], v: tuple[Tensor, ...],
    beta1: float, beta2: float, alpha_t: float, eps: float, decay: float,
) -> None:  # fmt: skip
    """The update on lists of tensors: on CUDA each line is one launch of a multi-tensor kernel."""
    torch._foreach_lerp_(m, grad, 1 - beta1)
    torch._foreach_mul_(v, beta2)
    torch._foreach_addcmul_(v, grad, grad, value=1 - beta2)
    denominator = torch._foreach_sqrt(v)
    torch._foreach_add_(denominator, eps)
    update = torch._foreach_div(m, denominator)
    torch._foreach_mul_(update, alpha_t)
    if decay:
        torch._foreach_add_(update, theta, alpha=decay)
    torch._foreach_sub_(theta, update)


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
    """Trainable parameters by learning rate and weight decay; each belongs to exactly one group.

    head_lr: for everything outside the encoder `bert`. decay_matrices_only: biases and LayerNorm are not decayed.
    layer_decay: the encoder's layer l of L learns at lr * layer_decay^(L - l), its embeddings like layer 0.
    """
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    layers = max((_layer(name) or 0 for name, _ in model.named_parameters()), default=0)
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for name, p in trainable.items():
        if name.startswith("bert."):
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
    """The encoder's layer, counted from 1; 0 for the embeddings; None above the layers (pooler, heads)."""
    found = re.search(r"bert_layers\.(\d+)\.", name)
    if found:
        return int(found.group(1)) + 1
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
    """Rises linearly over the first share `warmup` of the steps, then follows SCHEDULES[name] to the end."""
    warm = round(warmup * total_steps)

    def multiplier(step: int) -> float:
        if step < warm:
            return (step + 1) / (warm + 1)
        return SCHEDULES[name](min(1.0, (step - warm) / max(1, total_steps - warm)))

    return LambdaLR(optimizer, multiplier)


# --- averagers: the weights to evaluate and keep ----------------------------------------------------------------------


class NoAverage:
    """The weights as they are; costs nothing."""

    def update(self, model: nn.Module) -> None:
        """To be called after every step."""

    def epoch_end(self, model: nn.Module) -> None:
        """To be called after the last step of every epoch."""

    @contextlib.contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Within it, the model has the averaged weights; afterwards its own again, bit for bit."""
        yield

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Average(NoAverage):
    """A running average of the trainable parameters, frozen ones being the same at all times."""

    def __init__(self, model: nn.Module, args: argparse.Namespace):
        self.weights = {name: p.detach().clone() for name, p in self.trainable(model)}
        self.count = 0  # of the weights that went into the average

    @staticmethod
    def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in model.named_parameters() if p.requires_grad]

    @torch.no_grad()
    def take_in(self, model: nn.Module, share: Callable[[int], float]) -> None:
        """average <- average + share(n) (weights - average), at the n-th call."""
        self.count += 1
        own = [p for _, p in self.trainable(model)]
        torch._foreach_lerp_(list(self.weights.values()), own, share(self.count))

    @contextlib.contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        if not self.count:
            yield
            return
        own = {p: p.data for _, p in self.trainable(model)}
        try:
            for (_, p), average in zip(self.trainable(model), self.weights.values(), strict=True):
                p.data = average  # the pointer only: nothing is copied
            yield
        finally:
            for p, data in own.items():
                p.data = data

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
    """After every step n: (1 - d) sum_k d^(n-k) theta_k / (1 - d^n), with d = --ema_decay.

    Polyak averaging with exponential weights and the bias correction of Adam (Kingma & Ba 2015, sections 3 and 7.2), in
    the form of one interpolation by (1 - d) / (1 - d^n), so that the start does not count.
    """

    def __init__(self, model: nn.Module, args: argparse.Namespace):
        super().__init__(model, args)
        self.decay = args.ema_decay

    def update(self, model: nn.Module) -> None:
        self.take_in(model, lambda n: (1 - self.decay) / (1 - self.decay**n))


class StochasticWeightAverage(Average):
    """The plain mean of the weights at the ends of the epochs e >= --average_start E of E; at least of the last.

    Izmailov et al. 2018 (arXiv:1803.05407), Algorithm 1, cycle length one epoch. Deviation: the learning rate stays
    that of --schedule (constant is nearest to the paper). BERT has no batch normalization to update.
    """

    def __init__(self, model: nn.Module, args: argparse.Namespace):
        super().__init__(model, args)
        self.first = round(args.average_start * args.epochs, 6)  # 0.28 * 25 is above 7
        self.epoch = 0

    def epoch_end(self, model: nn.Module) -> None:
        self.epoch += 1
        if self.epoch >= self.first:
            self.take_in(model, lambda n: 1 / n)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.epoch = state["epoch"]


AVERAGERS: dict[str, Callable[[nn.Module, argparse.Namespace], NoAverage]] = {
    "none": lambda model, args: NoAverage(),
    "ema": ExponentialAverage,
    "swa": StochasticWeightAverage,
}


def build_averager(args: argparse.Namespace, model: nn.Module) -> NoAverage:
    """For a model that is on its device, with the parameters frozen that will be."""
    return AVERAGERS[args.averager](model, args)


# --- flags ------------------------------------------------------------------------------------------------------------

# Each takes parameter groups with their own lr and weight_decay. All but adamw are torch's, with torch's defaults
# where nothing else is said; sgd and adamax know weight decay as an L2 term of the gradient only.
OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]]], Optimizer]] = {
    "adamw": AdamW,
    "torch_adamw": torch.optim.AdamW,
    "sgd": partial(torch.optim.SGD, momentum=0.9),  # Sutskever et al. 2013; wants a far larger rate than Adam
    "adamax": torch.optim.Adamax,  # Kingma & Ba 2015, Algorithm 2
    "nadam": partial(torch.optim.NAdam, decoupled_weight_decay=True),  # Dozat 2016
    "radam": partial(torch.optim.RAdam, decoupled_weight_decay=True),  # Liu et al. 2020, arXiv:1908.03265
    "adafactor": torch.optim.Adafactor,  # Shazeer & Stern 2018, arXiv:1804.04235; the rate is relative to the weights
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("optimization")
    rate = number(float, 0, 1, above=True)
    group.add_argument(
        "--optimizer", choices=sorted(OPTIMIZERS), default="adamw", help="adamw: the handout's; others: torch's"
    )
    group.add_argument("--lr", type=rate, help="learning rate; None: 1e-3 for a frozen encoder, else 1e-5")
    group.add_argument(
        "--head_lr", type=rate, help="learning rate outside the encoder, adapters included; None: as --lr"
    )
    group.add_argument(
        "--layer_decay", type=rate, default=1.0, help="factor on the rate from each layer to the one below"
    )
    group.add_argument(
        "--weight_decay",
        type=number(float, 0, 1),
        default=0.0,
        help="weight decay, decoupled; of sgd and adamax: an L2 term",
    )
    group.add_argument("--decay_matrices_only", action="store_true", help="no decay on biases and LayerNorm")
    group.add_argument("--schedule", choices=sorted(SCHEDULES), default="constant", help="learning rate over the steps")
    group.add_argument("--warmup", type=number(float, 0, 1), default=0.0, help="share of steps with a rising rate")
    group.add_argument("--clip", type=number(float, 0, 1e6), default=0.0, help="largest gradient norm; 0: no clipping")
    group.add_argument(
        "--averager", choices=sorted(AVERAGERS), default="none", help="average of the weights to evaluate and keep"
    )
    group.add_argument(
        "--ema_decay", type=number(float, 0, 0.999999), default=0.999, help="ema: the old average's share a step"
    )
    group.add_argument(
        "--average_start", type=number(float, 0, 1), default=0.5, help="swa: share of the epochs before the first"
    )


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
