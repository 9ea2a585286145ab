"""The handout's AdamW, written by hand; parameter groups; learning-rate schedules.

Algorithm 1 of Kingma & Ba 2015 (arXiv:1412.6980) in its efficient form, with the decoupled weight decay of Loshchilov &
Hutter 2019 (arXiv:1711.05101) as the last update of a step.
"""

import argparse
import math
import re
from collections.abc import Callable, Iterable
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


# --- flags ------------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("optimization")
    rate = number(float, 0, 1, above=True)
    group.add_argument("--lr", type=rate, help="learning rate; None: 1e-3 with a frozen encoder, 1e-5 otherwise")
    group.add_argument("--head_lr", type=rate, help="learning rate outside the encoder; None: as --lr")
    group.add_argument(
        "--layer_decay", type=rate, default=1.0, help="factor on the rate from each layer to the one below"
    )
    group.add_argument("--weight_decay", type=number(float, 0, 1), default=0.0, help="decoupled weight decay")
    group.add_argument("--decay_matrices_only", action="store_true", help="no decay on biases and LayerNorm")
    group.add_argument("--schedule", choices=sorted(SCHEDULES), default="constant", help="learning rate over the steps")
    group.add_argument("--warmup", type=number(float, 0, 1), default=0.0, help="share of steps with a rising rate")
    group.add_argument("--clip", type=number(float, 0, 1e6), default=0.0, help="largest gradient norm; 0: no clipping")


def build_optimizer(args: argparse.Namespace, model: nn.Module) -> AdamW:
    return AdamW(
        parameter_groups(
            model,
            args.lr,
            head_lr=args.head_lr,
            weight_decay=args.weight_decay,
            decay_matrices_only=args.decay_matrices_only,
            layer_decay=args.layer_decay,
        )
    )
