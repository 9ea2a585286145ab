"""Regularizers: SMART's adversarial smoothness, its Bregman proximal term, and R-Drop.

Each compares the model's output with that of a second pass over the same batch: on perturbed embeddings (smart), with
older weights (bregman), under other dropout masks (rdrop). The model is handed in and has to offer `predict`.

Shapes:  B batch   R rows of one pass (B, or 2B for a bi-encoder)   T tokens   H hidden size   C outputs of a task
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from tasks import TASKS, Batch, Output, stack
from utils import number


class Model(Protocol):
    """An nn.Module that can also run its layers, pooling and head on given embeddings."""

    training: bool

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def modules(self) -> Iterator[nn.Module]: ...

    def predict(self, batch: Batch, embeddings: Tensor | None = None, random_state: Any = None) -> Output:
        """random_state: an earlier output's, for this pass alone, so that dropout repeats its masks."""


# --- divergences ------------------------------------------------------------------------------------------------------

Divergence = Callable[[str, Tensor, Tensor], Tensor]  # (Task.kind, reference (B, C), other (B, C)) -> (B,)


def log_probabilities(kind: str, logits: Tensor) -> Tensor:
    """The distribution that the logits stand for: (B, C) -> (B, C) of a category, else (B, 2), a Bernoulli variable's.

    One logit is never softmaxed: that would be the constant 1. A number x from 0 to 5 becomes the probability
    sigmoid(4/5 (x - 5/2)), which is tangent to x / 5 at the middle and, unlike it, below 1 whatever a head puts out.
    In float64: close to each other, two distributions differ by less than float32 resolves, and B x C is small.
    """
    logits = logits.double()
    if kind == "category":
        return logits.log_softmax(dim=1)
    if kind == "number":
        logits = 4 / 5 * (logits - 5 / 2)
    return torch.cat([F.logsigmoid(logits), F.logsigmoid(-logits)], dim=1)


def kl(kind: str, reference: Tensor, other: Tensor) -> Tensor:
    """KL(P || Q) = sum p (log p - log q), P the reference's distribution."""
    log_p, log_q = log_probabilities(kind, reference), log_probabilities(kind, other)
    return (log_p.exp() * (log_p - log_q)).sum(dim=1)


def symmetrized_kl(kind: str, reference: Tensor, other: Tensor) -> Tensor:
    """KL(P || Q) + KL(Q || P) = sum (p - q) (log p - log q)"""
    log_p, log_q = log_probabilities(kind, reference), log_probabilities(kind, other)
    return ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum(dim=1)


def squared_error(kind: str, reference: Tensor, other: Tensor) -> Tensor:
    return (reference.double() - other.double()).square().sum(dim=1)


def smart_divergence(kind: str, reference: Tensor, other: Tensor) -> Tensor:
    """l_s of Jiang et al.: symmetrized KL for a classification, squared error for a regression."""
    return (squared_error if kind == "number" else symmetrized_kl)(kind, reference, other)


def mean(divergence: Divergence, batch: Batch, reference: Tensor, other: Tensor) -> Tensor:
    """Over the examples really in the batch, so that its size does not matter; a float32 scalar."""
    return divergence(TASKS[batch.task].kind, reference, other).mean().float()


# The student paper's SMART 0, 1, 2 (`A SMARTer minBERT`, section 4): divergence of the ascent, and at its end.
VARIANTS: dict[int, tuple[Divergence, Divergence]] = {
    0: (smart_divergence, smart_divergence),
    1: (kl, kl),
    2: (kl, symmetrized_kl),
}


# --- norms ------------------------------------------------------------------------------------------------------------

# Of every token's vector: (R, T, H) -> (R, T, 1)
NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "l2": lambda x: x.norm(dim=-1, keepdim=True),
    "linf": lambda x: x.abs().amax(dim=-1, keepdim=True),
}


# --- regularizers -----------------------------------------------------------------------------------------------------


class Regularizer:
    """A term of the loss, its weight included; a mean over the batch. This one is always 0."""

    def __call__(self, model: Model, batch: Batch, output: Output) -> Tensor:
        """output: what model.predict(batch) returned, in training mode, with its graph."""
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

        v <- x' - x ~ N(0, sigma^2)
        `steps` times:
            g <- gradient, by x', of the divergence
            v <- v + step_size g / (||g||_p + epsilon)
            x' <- x + radius v / (||v||_p + epsilon)

    x is the embedding layer's output (after LayerNorm and dropout). ||.||_p is taken of each token's vector: `linf`
    bounds every element, `l2` every token. Padding is not perturbed. Dropout: all passes share the clean pass's masks,
    so that the term measures the perturbation and nothing else. The ascent differentiates by x' alone and leaves every
    .grad as it is; the term itself is differentiated through f(x') and f(x), as the equation stands.

    Why radius and epsilon are two numbers. In the paper, epsilon is the radius, 1e-5 (1e-6 in the student paper), and
    step_size is 1e-3: every step leaves the ball, and the projection puts x' back on its surface. So those numbers fix
    a direction, the radius alone fixes the length, and so it is here. But minilm's embeddings have a standard deviation
    of 0.55. Symmetrized KL on 8 sentences of SST after 24 steps of training, one seed, beside random signs of the norm:

        radius   1e-6     1e-5     1e-4     1e-3     1e-2     1e-1     1
        found    4e-13    4e-11    4e-9     4e-7     4e-5     3e-3     4e-2
        random   6e-15    3e-13    2e-11    4e-9     2e-7     2e-5     8e-3

    At 1e-6 there is nothing to train on. Of the public implementations, MT-DNN (the authors') has no ball and takes one
    step of 1e-3, smart-pytorch (the student paper's) scales to radius 1, two standard deviations; in both, epsilon is
    the constant in the denominator. It is that here, and the radius has a flag of its own. Once minilm has been
    fine-tuned (two epochs on the course's data) the term is a hundred times larger, SST / para / sts:

        radius   1e-3                    1e-2                    1e-1
        found    4e-4 / 2e-4 / 5e-4      4e-2 / 2e-2 / 4e-2      1.4 / 0.7 / 1.9

    So 0.01 is the default, some hundredths of the loss; at 0.1 the term outweighs what is to be learned.

    Deviations: radius and epsilon, as above. x' is scaled onto the surface, also from inside (a convex function has its
    maximum there); for l2 that is the projection of anything outside. The ascent's objective is the sum over the batch,
    so that no row's step depends on the others, divided by the perturbation's size: the gradient at sigma = 1e-5 is
    about 1e-10, which epsilon = 1e-6 would swallow (as in MT-DNN's formula; in smart-pytorch's the step is 1e-3 times
    1e-10, so that its noise would stay random). Perturbed are the embeddings of all tokens, special ones included.

    `start` says where the first noise is. `embeddings`: as above. `logits`, the default: on the clean pass's logits,
    and v = 0. With u the divergence's gradient by the logits and J the Jacobian of the logits by x, the first g is J^T
    u in both cases, and at noise of 1e-5 J is the clean pass's: only u differs. Both are one power iteration towards
    the most sensitive direction (Miyato et al. 2018, arXiv:1704.03976, section 3.3), and in the space of C logits
    further ones cost nothing: POWER_ITERATIONS of them. For one logit u is a number and nothing differs but its sign.
    It saves a forward pass and finds as much: 96 dev rows a task, minilm after 6,000 rows of training, squared error
    for sts, one seed:

        start         SST                para               sts
        embeddings    5.6e-4             4.6e-4             1.58e-2
        logits        6.0e-4             4.5e-4             1.60e-2        (without the iterations SST 4.8e-4)

    It also suits fp16 and bf16 autocast, where 1e-5 on the embeddings is below the layers' resolution: a row whose
    logits come out the same has no gradient, and its noise stays random (found by minilm on sts in bf16: 3.9e-3 from
    the embeddings, 5.8e-3 from the logits; in fp32 6.0e-3 both). Not in the paper: --smart_start embeddings is.
    """

    POWER_ITERATIONS = 8  # on (B, C) numbers: a thousandth of a pass

    def __init__(
        self,
        weight: float = 1.0,
        *,
        steps: int = 1,
        step_size: float = 1e-3,
        epsilon: float = 1e-6,
        radius: float = 0.01,
        sigma: float = 1e-5,
        norm: str = "linf",
        variant: int = 0,
        start: str = "logits",
    ):
        self.weight, self.steps, self.step_size, self.epsilon = weight, steps, step_size, epsilon
        self.radius, self.sigma = radius, sigma
        self.norm = NORMS[norm]
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
                "Train the encoder (no kept vectors of a frozen one), and call the model in training mode."
            )
        mask = stack(batch.sentences).attention_mask.unsqueeze(-1).to(output.embeddings.dtype)  # (R, T, 1)
        noise, gradient = self.start(self, model, batch, output, mask)
        v = noise + self.step_size * mask * self.normalized(gradient)
        for _ in range(self.steps - 1):
            gradient = self.gradient(model, batch, output, self.radius * self.normalized(v), self.radius)
            v = v + self.step_size * mask * self.normalized(gradient)
        return self.radius * self.normalized(v)

    def gradient(self, model: Model, batch: Batch, output: Output, noise: Tensor, size: float) -> Tensor:
        """Of the ascent's objective at x' = x + noise, by x': (R, T, H)."""
        x = (output.embeddings.detach() + noise).requires_grad_()
        logits = model.predict(batch, x, output.random_state).logits
        divergence = self.inner(TASKS[batch.task].kind, output.logits.detach(), logits)
        return torch.autograd.grad(divergence.sum() / size, x)[0]

    def start_at_embeddings(self, model: Model, batch: Batch, output: Output, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The first noise v, and the gradient there: two passes, forward and backward."""
        noise = torch.randn_like(output.embeddings).mul_(self.sigma * mask)
        return noise, self.gradient(model, batch, output, noise, self.sigma)

    def start_at_logits(self, model: Model, batch: Batch, output: Output, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The same with noise on the clean logits, v = 0: one pass, backward, through the clean pass's own graph."""
        clean = output.logits.detach().double()
        u = torch.randn_like(clean)  # (B, C)
        for _ in range(self.POWER_ITERATIONS):
            logits = (clean + self.sigma * F.normalize(u, dim=1)).requires_grad_()
            divergence = self.inner(TASKS[batch.task].kind, clean, logits)
            (u,) = torch.autograd.grad(divergence.sum() / self.sigma, logits)
        # The loss goes back through this graph next, so it is kept, and no longer than without us.
        (gradient,) = torch.autograd.grad(
            output.logits, output.embeddings, u.to(output.logits.dtype), retain_graph=True
        )
        return torch.zeros_like(gradient), gradient

    def normalized(self, x: Tensor) -> Tensor:
        """Every token's vector at norm 1, less what epsilon takes; a zero vector stays zero."""
        return x / (self.norm(x) + self.epsilon)


STARTS = {"embeddings": Smart.start_at_embeddings, "logits": Smart.start_at_logits}


class Bregman(Regularizer):
    """Momentum Bregman proximal point term, equations 3-4 of Jiang et al. 2020 (arXiv:1911.03437):

        mu / B sum_i  l_s(f(x_i; theta), f(x_i; theta~)),        theta~ <- beta theta~ + (1 - beta) theta  after a step

    The teacher theta~ is a copy of the trainable parameters, made when the regularizer is built: build it when the
    model has its weights and its device. Its pass is made without gradients by `functional_call`, which puts the copy
    in the parameters' places and needs no second model; swapping the parameters' own data would be wrong under
    autocast, whose cache would go on serving the live weights.

    Dropout: the teacher's pass is in eval mode, the student's output the one it trains on. So at the first step, where
    theta~ = theta, the term is what dropout makes of the output, and 0 without dropout.
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
    """`predict` as a module's forward, which is what functional_call calls."""

    def __init__(self, model: Model):
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Output:
        return self.model.predict(batch)


@contextmanager
def evaluating(model: Model) -> Iterator[None]:
    """Eval mode; afterwards every module has its own mode again, as a frozen part stays in eval mode in training."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


class RDrop(Regularizer):
    """R-Drop, Liang et al. 2021 (arXiv:2106.14448): two passes under different dropout masks agree.

        alpha / B sum_i  1/2 (KL(P1 || P2) + KL(P2 || P1)),        squared error for a regression

    Dropout: the second pass draws masks of its own, those of the embedding layer included.
    Deviation: the supervised loss is taken of the first pass only, not of both.
    """

    def __init__(self, weight: float = 1.0):
        self.weight = weight

    def __call__(self, model: Model, batch: Batch, output: Output) -> Tensor:
        return self.weight * mean(r_drop_divergence, batch, output.logits, model.predict(batch).logits)


def r_drop_divergence(kind: str, reference: Tensor, other: Tensor) -> Tensor:
    if kind == "number":
        return squared_error(kind, reference, other)
    return symmetrized_kl(kind, reference, other) / 2


class Sum(Regularizer):
    """Several regularizers at once, by name."""

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


# --- flags ------------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("regularization")
    group.add_argument("--regularizer", choices=sorted(REGULARIZERS), default="none", help="a term added to each loss")
    weight = number(float, 0, 1e6)
    positive = number(float, 0, 1e6, above=True)
    group.add_argument("--smart_weight", type=weight, default=1.0, help="lambda, the weight of smart")
    group.add_argument("--smart_steps", type=number(int, 1, 100), default=1, help="steps of the ascent")
    group.add_argument("--smart_step_size", type=positive, default=1e-3, help="eta; its ratio to smart_sigma matters")
    group.add_argument("--smart_epsilon", type=positive, default=1e-6, help="constant in the normalizing denominators")
    group.add_argument("--smart_radius", type=positive, default=0.01, help="norm of each token's perturbation")
    group.add_argument("--smart_sigma", type=positive, default=1e-5, help="standard deviation of the first noise")
    group.add_argument(
        "--smart_start", choices=sorted(STARTS), default="logits",
        help="where the first noise is; embeddings: as in the paper, a forward pass more, and not in half precision",
    )  # fmt: skip
    group.add_argument("--smart_norm", choices=sorted(NORMS), default="linf", help="norm of a token's perturbation")
    group.add_argument(
        "--smart_variant", type=int, choices=sorted(VARIANTS), default=0,
        help="0: symmetrized KL, for sts squared error; 1: KL throughout; 2: KL in the ascent, symmetrized at its end",
    )  # fmt: skip
    group.add_argument("--bregman_weight", type=weight, default=1.0, help="mu, the weight of bregman")
    group.add_argument("--bregman_momentum", type=number(float, 0, 1), default=0.99, help="beta of bregman's teacher")
    group.add_argument("--rdrop_weight", type=weight, default=1.0, help="alpha, the weight of rdrop")


Builder = Callable[[argparse.Namespace, Model], Regularizer]


def build_regularizer(args: argparse.Namespace, model: Model) -> Regularizer:
    """To be called when the model has its weights and its device: bregman copies them."""
    return REGULARIZERS[args.regularizer](args, model)


def _none(args: argparse.Namespace, model: Model) -> Regularizer:
    return Regularizer()


def _smart(args: argparse.Namespace, model: Model) -> Regularizer:
    return Smart(
        args.smart_weight,
        steps=args.smart_steps,
        step_size=args.smart_step_size,
        epsilon=args.smart_epsilon,
        radius=args.smart_radius,
        sigma=args.smart_sigma,
        norm=args.smart_norm,
        variant=args.smart_variant,
        start=args.smart_start,
    )


def _bregman(args: argparse.Namespace, model: Model) -> Regularizer:
    _, divergence = VARIANTS[args.smart_variant]  # l_s is one function in the paper
    return Bregman(model, args.bregman_weight, momentum=args.bregman_momentum, divergence=divergence)


def _rdrop(args: argparse.Namespace, model: Model) -> Regularizer:
    return RDrop(args.rdrop_weight)


def _sum_of(**builders: Builder) -> Builder:
    return lambda args, model: Sum({name: build(args, model) for name, build in builders.items()})


REGULARIZERS: dict[str, Builder] = {
    "none": _none,
    "smart": _smart,
    "bregman": _bregman,
    "rdrop": _rdrop,
    "smart+bregman": _sum_of(smart=_smart, bregman=_bregman),
    "smart+rdrop": _sum_of(smart=_smart, rdrop=_rdrop),
    "smart+bregman+rdrop": _sum_of(smart=_smart, bregman=_bregman, rdrop=_rdrop),
}
