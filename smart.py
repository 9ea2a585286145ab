"""Regularizers: SMART's adversarial smoothness term, its Bregman proximal term, and R-Drop.

Each compares the model's output with that of a second pass over the same batch: on perturbed embeddings (smart), with
older weights (bregman), or under other dropout masks (rdrop). `--regularizer smart+rdrop` adds several. The model is
passed in and must provide `predict`.

Shapes:  B batch   R rows of one pass (B, or 2B for a bi-encoder)   T tokens   H hidden size   C logits of a task
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from flags import ENCODER_TRAINS, ArgumentParser, Need, chosen, number, parse_spec
from tasks import TASKS, Batch, Output, Target, stack
from utils import InputError


class Model(Protocol):
    """An nn.Module that can also run its layers, pooling and head on given embeddings."""

    training: bool

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def modules(self) -> Iterator[nn.Module]: ...

    def predict(self, batch: Batch, embeddings: Tensor | None = None, random_state: Any = None) -> Output:
        """random_state: that of an earlier output, so that dropout repeats its masks in this pass."""


# --- divergences: what a task predicts, reference (B, C), other (B, C) -> (B,) ----------------------------------------

Divergence = Callable[[Target, Tensor, Tensor], Tensor]


def smart_divergence(target: Target, reference: Tensor, other: Tensor) -> Tensor:
    return target.divergence(reference, other)


def kl(target: Target, reference: Tensor, other: Tensor) -> Tensor:
    return target.kl(reference, other)


def symmetrized_kl(target: Target, reference: Tensor, other: Tensor) -> Tensor:
    return target.symmetrized_kl(reference, other)


def dropout_divergence(target: Target, reference: Tensor, other: Tensor) -> Tensor:
    return target.dropout_divergence(reference, other)


def mean(divergence: Divergence, batch: Batch, reference: Tensor, other: Tensor) -> Tensor:
    """The mean over the examples really in the batch, so its size does not matter; a float32 scalar."""
    return divergence(TASKS[batch.task].predicts, reference, other).mean().float()


# SMART 0, 1, 2 of Chue, Liu & Sahoo, "A SMARTer minBERT", section 4: the divergence of the ascent, and at its end.
VARIANTS: dict[int, tuple[Divergence, Divergence]] = {
    0: (smart_divergence, smart_divergence),
    1: (kl, kl),
    2: (kl, symmetrized_kl),
}


# --- balls ------------------------------------------------------------------------------------------------------------


class Ball(NamedTuple):
    """The perturbations that are allowed: those whose norm, taken of each token's vector, is at most the radius."""

    norm: Callable[[Tensor], Tensor]  # of every token's vector: (R, T, H) -> (R, T, 1)
    project: Callable[[Tensor, float], Tensor]  # the nearest point of the ball: (R, T, H), radius -> (R, T, H)


def l2_norm(x: Tensor) -> Tensor:
    return x.norm(dim=-1, keepdim=True)


def linf_norm(x: Tensor) -> Tensor:
    return x.abs().amax(dim=-1, keepdim=True)


def shorten(x: Tensor, radius: float) -> Tensor:
    """Scale the vectors that are longer than the radius down to it."""
    return x * (radius / l2_norm(x).clamp_min(radius))


def clip(x: Tensor, radius: float) -> Tensor:
    """Clip every element to [-radius, radius]."""
    return x.clamp(-radius, radius)


BALLS = {"l2": Ball(l2_norm, shorten), "linf": Ball(linf_norm, clip)}


def scaled_to_one(x: Tensor, norm: Callable[[Tensor], Tensor]) -> Tensor:
    """Vectors divided by their norms, however small these are; a zero vector stays zero."""
    tiny = torch.finfo(x.dtype).tiny
    x = x / linf_norm(x).clamp_min(tiny)  # first, because the squares of tiny numbers vanish
    return x / norm(x).clamp_min(tiny)


# --- regularizers -----------------------------------------------------------------------------------------------------


class Regularizer:
    """A term of the loss, including its weight; a mean over the batch. This one is always 0."""

    def __call__(self, model: Model, batch: Batch, output: Output) -> Tensor:
        """output: the result of model.predict(batch) in training mode, with its graph."""
        return torch.zeros((), device=output.logits.device)

    def update(self, model: Model) -> None:
        """Called after every optimizer step."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Smart(Regularizer):
    """Smoothness-inducing adversarial regularization, equations 1-2 and Algorithm 1 of Jiang et al. 2020
    (arXiv:1911.03437):

        R(theta) = 1/B sum_i  max_{||x' - x||_p <= radius}  l_s(f(x'; theta), f(x; theta))

        x' <- x + noise, noise ~ N(0, sigma^2)
        `steps` times:
            g <- gradient of the divergence with respect to x'
            x' <- projection of x' + step_size g / ||g||_p onto the ball around x

    x is the embedding layer's output (after LayerNorm and dropout). On the linf ball, the projection clips every
    element. With a step of 100 times the radius, as in the paper and by default here, nearly every element ends at
    plus or minus the radius: the signs of the gradient, which maximize a linear function on that ball.

    Dropout: all passes share the clean pass's masks, so the term measures the perturbation and nothing else. The ascent
    differentiates with respect to x' alone and does not touch any .grad; the term itself is differentiated through
    f(x') and f(x), as in the equation.

    Deviations: ||.||_p is taken of each token's vector, not of the whole sentence: `linf` bounds every element, as in
    the paper, and `l2` every token. The embeddings of all tokens are perturbed, including special tokens, but not
    padding. g is computed up to a positive factor per row, which its normalization removes: see `gradient`. The radius
    is far larger than the paper's 1e-5; docs/SMART.md says how it was chosen.

    `start` chooses what the initial noise is added to. `embeddings`: as in the formula above. `logits`, the default: to
    the clean pass's logits, while x' = x. With u the gradient of the divergence with respect to the logits and J the
    Jacobian of the logits with respect to x, the first g is J^T u in both cases; only u differs. Noise on the
    embeddings makes u the image of a random direction, as in the power iteration of Miyato et al. 2018
    (arXiv:1704.03976, section 3.3). Noise on the logits lets u itself be iterated at no cost: POWER_ITERATIONS steps
    lead to the direction in which the divergence is most sensitive to the LOGITS. Neither is the direction in which it
    is most sensitive to the embeddings, which would take many passes through the model. Starting at the logits saves a
    forward pass, finds about as large a divergence, and suits half precision, where 1e-5 on the embeddings is below the
    layers' resolution (docs/SMART.md). It is not in the paper; --smart_start embeddings is.
    """

    POWER_ITERATIONS = 8  # on (B, C) numbers: a thousandth of a pass
    STEP = 100.0  # the default step size in multiples of the radius: 1e-3 and 1e-5 in the paper

    def __init__(
        self,
        weight: float = 1.0,
        *,
        steps: int = 1,
        step_size: float | None = None,
        radius: float = 0.003,
        sigma: float = 1e-5,
        norm: str = "linf",
        variant: int = 0,
        start: str = "logits",
    ):
        self.weight, self.steps, self.radius, self.sigma = weight, steps, radius, sigma
        self.step_size = self.STEP * radius if step_size is None else step_size
        self.ball = BALLS[norm]
        self.inner, self.outer = VARIANTS[variant]
        self.start = STARTS[start]

    def __call__(self, model: Model, batch: Batch, output: Output) -> Tensor:
        noise = self.perturbation(model, batch, output)
        perturbed = model.predict(batch, output.embeddings + noise, output.random_state)
        return self.weight * mean(self.outer, batch, output.logits, perturbed.logits)

    def perturbation(self, model: Model, batch: Batch, output: Output) -> Tensor:
        """x' - x at the end of the ascent: (R, T, H), without a graph."""
        if output.embeddings is None or output.random_state is None:
            raise ValueError(
                "SMART needs the embeddings and the random state of the clean pass, found an output without them. "
                "Train the encoder (not on stored vectors of a frozen one), and call the model in training mode."
            )
        mask = output.local(stack(batch.sentences).attention_mask)
        mask = mask.unsqueeze(-1).to(output.embeddings.dtype)  # (R, T, 1)
        noise, gradient = self.start(self, model, batch, output, mask)
        noise = self.ascend(noise, gradient, mask)
        for _ in range(self.steps - 1):
            noise = self.ascend(noise, self.gradient(model, batch, output, noise), mask)
        return noise

    def ascend(self, noise: Tensor, gradient: Tensor, mask: Tensor) -> Tensor:
        """One step from x + noise along the gradient, projected onto the ball; all (R, T, H)."""
        step = self.step_size * mask * scaled_to_one(gradient, self.ball.norm)
        return self.ball.project(noise + step, self.radius)

    def gradient(self, model: Model, batch: Batch, output: Output, noise: Tensor) -> Tensor:
        """The gradient of each row's divergence with respect to x' = x + noise, up to a positive factor: (R, T, H).

        The gradient with respect to the logits is scaled to length 1 before it is passed on to the embeddings. So a
        confident row, whose divergence is nearly flat, has as large a gradient as any other, also in half precision,
        and no row depends on the others.
        """
        x = (output.embeddings.detach() + noise).requires_grad_()
        logits = model.predict(batch, x, output.random_state).logits
        u = self.logit_direction(batch, output.logits, logits)
        return torch.autograd.grad(logits, x, u.to(logits.dtype))[0]

    def logit_direction(self, batch: Batch, reference: Tensor, logits: Tensor) -> Tensor:
        """The gradient of each row's divergence with respect to the logits, scaled to length 1: (B, C), float64."""
        logits = logits.detach().double().requires_grad_()
        divergence = self.inner(TASKS[batch.task].predicts, reference.detach().double(), logits)
        return scaled_to_one(torch.autograd.grad(divergence.sum(), logits)[0], l2_norm)

    def start_at_embeddings(self, model: Model, batch: Batch, output: Output, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The first noise on x and the gradient there: a forward and a backward pass."""
        x, R = output.embeddings, len(batch.sentences) * len(batch)
        of_all = x if len(x) == R else x.new_empty(R, *x.shape[1:])  # all processes draw the numbers of all rows
        noise = output.local(noise_like(of_all, batch)) * (self.sigma * mask)
        return noise, self.gradient(model, batch, output, noise)

    def start_at_logits(self, model: Model, batch: Batch, output: Output, mask: Tensor) -> tuple[Tensor, Tensor]:
        """No noise on x, and the gradient from noise on the logits: a backward pass through the clean pass's graph."""
        logits = output.logits.detach().double()
        u = self.sensitive_direction(TASKS[batch.task].predicts, logits, noise_like(logits, batch))
        # The loss's backward pass uses this graph next, so it is retained; it is freed as early as without SMART.
        (gradient,) = torch.autograd.grad(
            output.logits, output.embeddings, u.to(output.logits.dtype), retain_graph=True
        )
        return torch.zeros_like(gradient), gradient

    def sensitive_direction(self, target: Target, logits: Tensor, u: Tensor) -> Tensor:
        """The direction in which the divergence is most sensitive to the logits, starting at u: (B, C), length 1.

        The power iteration on the divergence's Hessian, which is known: for noise of any small size, without a graph.
        """
        for _ in range(self.POWER_ITERATIONS if logits.size(1) > 1 else 1):  # one logit has one direction and its sign
            u = scaled_to_one(target.curvature(logits, u), linf_norm)
        return scaled_to_one(u, l2_norm)


def noise_like(x: Tensor, batch: Batch) -> Tensor:
    """Normal random numbers for every row of x, (n B, ...), where n is the number of sentences of a row, or 1.

    A part of a larger batch has that batch's numbers for its rows, so that splitting a batch changes nothing.
    """
    if batch.part_of is None:
        return torch.randn_like(x)
    start, stop, total = batch.part_of
    n = len(x) // len(batch)
    whole = torch.randn(n, total, *x.shape[1:], dtype=x.dtype, device=x.device)
    return whole[:, start:stop].flatten(0, 1)


STARTS = {"embeddings": Smart.start_at_embeddings, "logits": Smart.start_at_logits}


class Bregman(Regularizer):
    """Momentum Bregman proximal point term, equations 3-4 of Jiang et al. 2020 (arXiv:1911.03437):

        mu / B sum_i  l_s(f(x_i; theta), f(x_i; theta~)),        theta~ <- beta theta~ + (1 - beta) theta  after a step

    The teacher theta~ is a copy of the trainable parameters, made when the regularizer is built, so build it once the
    model has its weights and its device. The teacher's pass runs without gradients by `functional_call`, which
    substitutes the copy for the parameters and needs no second model. Swapping the parameters' data instead would be
    wrong under autocast, whose cache would still return the live weights.

    Dropout: the teacher's pass is in eval mode; the student's output is the one it trains on. So at the first step,
    where theta~ = theta, the term is the effect of dropout, and 0 without dropout.
    Deviation: beta is the same at every update.
    """

    def __init__(
        self, model: Model, weight: float = 1.0, *, momentum: float = 0.99, divergence: Divergence = smart_divergence
    ):
        self.weight, self.momentum, self.divergence = weight, momentum, divergence
        self.teacher = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}

    def __call__(self, model: Model, batch: Batch, output: Output) -> Tensor:
        parameters = {f"model.{name}": p for name, p in self.teacher.items()}
        with torch.no_grad(), evaluating(model):
            reference = functional_call(_Predict(model), parameters, (batch,)).logits
        return self.weight * mean(self.divergence, batch, reference, output.logits)

    @torch.no_grad()
    def update(self, model: Model) -> None:
        parameters = dict(model.named_parameters())
        live = [parameters[name].detach() for name in self.teacher]
        torch._foreach_lerp_(list(self.teacher.values()), live, 1 - self.momentum)  # beta theta~ + (1 - beta) theta

    def state_dict(self) -> dict[str, Any]:
        return {"teacher": self.teacher}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["teacher"].keys() != self.teacher.keys():
            differing = sorted(state["teacher"].keys() ^ self.teacher.keys())
            raise ValueError(
                f"The Bregman teacher must have the model's trainable parameters, found {differing[0]} on one side "
                f"only ({len(differing)} in all). Resume with the flags of the run that was saved."
            )
        for name, tensor in state["teacher"].items():
            self.teacher[name].copy_(tensor)


class _Predict(nn.Module):
    """`predict` as the forward of a module, which is what functional_call calls."""

    def __init__(self, model: Model):
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Output:
        return self.model.predict(batch)


@contextmanager
def evaluating(model: Model) -> Iterator[None]:
    """Eval mode; afterwards every module returns to its own mode, as a frozen part stays in eval mode in training."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


class RDrop(Regularizer):
    """R-Drop, Liang et al. 2021 (arXiv:2106.14448): two passes under different dropout masks should agree.

        alpha / B sum_i  1/2 (KL(P1 || P2) + KL(P2 || P1)),        squared error for a regression

    Dropout: the second pass draws new masks, including those of the embedding layer.
    Deviation: the supervised loss is computed on the first pass only, not on both.
    """

    def __init__(self, weight: float = 1.0):
        self.weight = weight

    def __call__(self, model: Model, batch: Batch, output: Output) -> Tensor:
        if output.again is None:
            raise ValueError(
                "R-Drop needs a second pass under other dropout masks, found an output without one. Train the encoder "
                "(not on stored vectors of a frozen one), and call the model in training mode."
            )
        return self.weight * mean(dropout_divergence, batch, output.logits, output.again().logits)


class Sum(Regularizer):
    """The sum of several regularizers, by name."""

    def __init__(self, parts: dict[str, Regularizer]):
        self.parts = parts

    def __call__(self, model: Model, batch: Batch, output: Output) -> Tensor:
        return sum(part(model, batch, output) for part in self.parts.values())

    def update(self, model: Model) -> None:
        for part in self.parts.values():
            part.update(model)

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self.parts.items():
            part.load_state_dict(state[name])


# --- the registry -----------------------------------------------------------------------------------------------------


def _none(args: argparse.Namespace, model: Model, factor: float) -> Regularizer:
    return Regularizer()


def _smart(args: argparse.Namespace, model: Model, factor: float) -> Regularizer:
    return Smart(
        factor * args.smart_weight,
        steps=args.smart_steps,
        step_size=args.smart_step_size,
        radius=args.smart_radius,
        sigma=args.smart_sigma,
        norm=args.smart_norm,
        variant=args.smart_variant,
        start=args.smart_start,
    )


def _bregman(args: argparse.Namespace, model: Model, factor: float) -> Regularizer:
    _, divergence = VARIANTS[args.smart_variant]  # l_s is one function in the paper
    return Bregman(model, factor * args.bregman_weight, momentum=args.bregman_momentum, divergence=divergence)


def _rdrop(args: argparse.Namespace, model: Model, factor: float) -> Regularizer:
    return RDrop(factor * args.rdrop_weight)


# How each is built from the flags; the number multiplies its weight.
REGULARIZERS: dict[str, Callable[[argparse.Namespace, Model, float], Regularizer]] = {
    "none": _none,
    "smart": _smart,
    "bregman": _bregman,
    "rdrop": _rdrop,
}


def parts_of(spec: str) -> dict[str, float]:
    """Parse `smart+rdrop:0.5` into the factor of each regularizer."""
    parts = parse_spec(spec, REGULARIZERS, "--regularizer")
    if "none" in parts and len(parts) > 1:
        raise InputError(f"--regularizer {spec}: none must stand alone, found {len(parts)} names. Remove it.")
    return parts


def build_regularizer(args: argparse.Namespace, model: Model) -> Regularizer:
    """Call it once the model has its weights and its device: bregman copies them."""
    parts = {name: REGULARIZERS[name](args, model, factor) for name, factor in parts_of(args.regularizer).items()}
    return next(iter(parts.values())) if len(parts) == 1 else Sum(parts)


# --- flags ------------------------------------------------------------------------------------------------------------


def uses(*names: str) -> Need:
    return Need(f"--regularizer {' or '.join(names)}", lambda args: bool(set(names) & set(parts_of(args.regularizer))))


def _trains(args: argparse.Namespace) -> bool:
    return bool(parts_of(args.regularizer)) and ENCODER_TRAINS.is_met(args)  # a misspelled name is reported first


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.section("regularization")
    smart, bregman, rdrop = uses("smart"), uses("bregman"), uses("rdrop")
    weight = number(float, 0, 1e6)
    positive = number(float, 0, 1e6, above=True)
    add("--regularizer", default="none", metavar="NAME[:WEIGHT][+...]", needs=ENCODER_TRAINS._replace(is_met=_trains),
        help=f"terms added to each task's loss: {', '.join(REGULARIZERS)}, or a sum such as smart+rdrop")  # fmt: skip
    add("--smart_weight", type=weight, default=1.0, needs=smart, help="lambda, the weight of smart")
    add("--smart_steps", type=number(int, 1, 100), default=1, needs=smart, help="number of ascent steps")
    add("--smart_radius", type=positive, default=0.003, needs=smart,
        help="how far an embedding may move: each element (linf) or each token's vector (l2)")  # fmt: skip
    add("--smart_step_size", type=positive, needs=smart,
        help="eta, the length of an ascent step before the projection (default: 100 times the radius)")  # fmt: skip
    add("--smart_sigma", type=positive, default=1e-5, needs=(smart, chosen("--smart_start", "embeddings")),
        help="standard deviation of the first noise on the embeddings")  # fmt: skip
    add("--smart_start", choices=sorted(STARTS), default="logits", needs=smart,
        help="what the initial noise is added to; embeddings, as in the paper, takes one more forward pass and "
        "works poorly in half precision")  # fmt: skip
    add("--smart_norm", choices=sorted(BALLS), default="linf", needs=smart, help="norm that bounds the perturbation")
    add("--smart_variant", type=int, choices=sorted(VARIANTS), default=0, needs=uses("smart", "bregman"),
        metavar="N", help="0: symmetrized KL, squared error for sts; 1: KL; 2: KL, then symmetrized KL")  # fmt: skip
    add("--bregman_weight", type=weight, default=1.0, needs=bregman, help="mu, the weight of bregman")
    add("--bregman_momentum", type=number(float, 0, 1), default=0.99, needs=bregman, help="beta of bregman's teacher")
    add("--rdrop_weight", type=weight, default=1.0, needs=rdrop, help="alpha, the weight of rdrop")
