"""How the gradients of several tasks become one: plain sum, PCGrad, Gradient Vaccine, CAGrad, MGDA.

Each method sees only the K x K Gram matrix of the shared parameters' gradients, gramian[i, j] = <g_i, g_j>, and answers
with K weights: the combined gradient is sum_k weights[k] g_k. So full-size tensors are read twice, once for the inner
products and once for the weighted sum, and a method costs nothing beside them. Multiplying all gradients by one number
does not change the weights, so a loss scaler's factor passes through.

Shapes:  K tasks of a step, in alphabetical order
"""

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import combinations
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

import kernels
from utils import number


class Method:
    """Gram matrix -> weights, and whatever a method remembers from step to step."""

    def weights(self, gramian: Tensor, names: tuple[str, ...]) -> Tensor:
        """gramian: (K, K), float64, CPU, finite, K >= 2; names: the K tasks. Returns (K,)."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


# --- surgery on one gradient after the other: PCGrad, Gradient Vaccine ------------------------------------------------


class Surgery(Method):
    """Changes each g_i by multiples of the ORIGINAL g_j, j != i, in an order drawn anew for every i; sums the results.

    The changed g_i is sum_k c_k g_k, and the K coefficients c are all that is kept of it: <g_i, g_j> = (gramian c)_j.
    """

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def weights(self, gramian: Tensor, names: tuple[str, ...]) -> Tensor:
        K = len(names)
        total = torch.zeros(K, dtype=gramian.dtype)
        for i in range(K):
            c = torch.zeros_like(total)
            c[i] = 1
            for j in torch.randperm(K, generator=self.generator).tolist():
                if j != i:
                    c[j] += self.multiple(gramian, c, j, f"{names[i]} {names[j]}")
            total += c
        return total

    def multiple(self, gramian: Tensor, c: Tensor, j: int, pair: str) -> float:
        """How much of g_j to add to the gradient with coefficients c."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


class PCGrad(Surgery):
    """Algorithm 1 of Yu et al. 2020 (arXiv:2001.06782).

    Where the current g_i conflicts with g_j, it is projected onto g_j's normal plane: g_i - (<g_i, g_j> / |g_j|^2) g_j.
    Deviation: none.
    """

    def multiple(self, gramian: Tensor, c: Tensor, j: int, pair: str) -> float:
        inner = float(gramian[j] @ c)
        return -inner / float(gramian[j, j]) if inner < 0 else 0.0


class GradVac(Surgery):
    """Gradient Vaccine, Algorithm 1 of Wang et al. 2021 (arXiv:2010.05874), for the whole encoder at once.

    Where phi, the cosine of the current g_i with g_j, is below the pair's running target rho, equation (2) raises it
    to rho: g_i + (|g_i| (rho sqrt(1 - phi^2) - phi sqrt(1 - rho^2)) / (|g_j| sqrt(1 - rho^2))) g_j. Then, at every
    step, equation (3): rho <- (1 - beta) rho + beta phi, from rho = 0. With beta = 0 it is PCGrad.
    Deviations: one parameter group, not one a layer; a target counts as HIGHEST_TARGET at most, since rho = 1 would
    take infinitely much of g_j; a pair with a zero gradient has no cosine and leaves its target as it is.
    """

    HIGHEST_TARGET = 0.999

    def __init__(self, seed: int, beta: float):
        super().__init__(seed)
        self.beta = beta
        self.targets: dict[str, float] = {}  # by ordered pair, as the current g_i differs from the original

    def multiple(self, gramian: Tensor, c: Tensor, j: int, pair: str) -> float:
        length_i = float((c @ gramian @ c).clamp(min=0)) ** 0.5  # rounding may take a zero below zero
        length_j = float(gramian[j, j]) ** 0.5
        if length_i == 0 or length_j == 0:
            return 0.0
        phi = max(-1.0, min(1.0, float(gramian[j] @ c) / length_i / length_j))
        target = self.targets.get(pair, 0.0)
        self.targets[pair] = (1 - self.beta) * target + self.beta * phi
        rho = min(target, self.HIGHEST_TARGET)
        if phi >= rho:
            return 0.0
        # divided through by sqrt(1 - rho^2): rho < 1, and rho > phi >= -1
        return length_i / length_j * (rho * ((1 - phi**2) / (1 - rho**2)) ** 0.5 - phi)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"targets": dict(self.targets)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.targets = dict(state["targets"])


# --- a problem solved on the simplex: CAGrad, MGDA --------------------------------------------------------------------


ROUNDING = 1e-15  # of a Gram matrix of trace 1 in float64


def minimize_on_simplex(gramian: Tensor, slope: Tensor, steps: int = 500, tolerance: float = 1e-10) -> Tensor:
    """The w >= 0 with sum 1 that minimizes slope . w + |g_w|, g_w = sum_k w_k g_k. Both terms are convex.

    Frank-Wolfe with pairwise steps (Lacoste-Julien & Jaggi 2015, arXiv:1511.05932): weight moves from the task with the
    largest derivative to the one with the smallest, as far as is best, until no such pair is left.
    gramian: (K, K), of trace about 1; slope: (K,). Returns (K,).
    """
    w = torch.full_like(slope, 1 / len(slope))
    for _ in range(steps):
        inner = gramian @ w  # <g_k, g_w>
        square = float(w @ inner)
        if square <= ROUNDING:  # g_w = 0, where |g_w| has no derivative
            break
        derivative = slope + inner / square**0.5
        to = int(derivative.argmin())
        source = int(derivative.masked_fill(w <= 0, -torch.inf).argmax())
        if derivative[source] - derivative[to] <= tolerance:
            break
        # |g_(w + t d)|^2 = square + 2 b t + a t^2 along d = e_to - e_source; the minimum of s t + its root is where
        # b + a t = -s sqrt((a square - b^2) / (a - s^2)), and at the end of the way if |s| >= sqrt(a)
        a = float(gramian[to, to] + gramian[source, source] - 2 * gramian[to, source])
        b = float(inner[to] - inner[source])
        s = float(slope[to] - slope[source])
        t = limit = float(w[source])
        if a > s**2:
            t = (-b - s * (max(0.0, a * square - b**2) / (a - s**2)) ** 0.5) / a
        t = max(0.0, min(limit, t))
        w[to] += t
        w[source] = limit - t  # exactly 0 where the whole weight moves
    return w


class CAGrad(Method):
    """Conflict-averse gradient descent, Algorithm 1 of Liu et al. 2021 (arXiv:2110.14048).

    Of all d within c |g_0| of the mean gradient g_0, the one whose worst inner product with a g_i is largest:
    d = g_0 + c |g_0| g_w / |g_w|, where w minimizes <g_w, g_0> + c |g_0| |g_w| on the simplex.
    Deviations: K d instead of d, so that c = 0 is the plain sum; where the gradients hold each other in balance
    (g_w = 0, |g_w| below a ten-thousandth of their size), d = g_0.
    """

    BALANCE = 1e-4  # beyond it the weights would enlarge float32's rounding errors to the size of the gradient

    def __init__(self, c: float):
        self.c = c

    def weights(self, gramian: Tensor, names: tuple[str, ...]) -> Tensor:
        ones = torch.ones(len(names), dtype=gramian.dtype)
        gramian = gramian / gramian.trace()
        radius = self.c * float((ones @ gramian @ ones).clamp(min=0)) ** 0.5  # K c |g_0|
        if radius == 0:
            return ones
        w = minimize_on_simplex(gramian, gramian @ ones / radius)
        length = float((w @ gramian @ w).clamp(min=0)) ** 0.5
        return ones + radius / length * w if length > self.BALANCE else ones


class MGDA(Method):
    """Multiple-gradient descent, Sener & Koltun 2018 (arXiv:1810.04650): the shortest vector in the gradients' hull.

    Deviations: K times that vector, so that K equal gradients give their plain sum; pairwise steps in the Frank-Wolfe
    solver (their Algorithm 2), which end at the solution to rounding; gradients as they are, not normalized.
    """

    def weights(self, gramian: Tensor, names: tuple[str, ...]) -> Tensor:
        K = len(names)
        return K * minimize_on_simplex(gramian / gramian.trace(), torch.zeros(K, dtype=gramian.dtype))


# --- plumbing ---------------------------------------------------------------------------------------------------------


class GradientCombiner:
    """The plumbing, once: every backward pass runs at once and frees its graph.

    The gradients of the shared parameters are kept by task until they are combined, in the memory where the backward
    pass left them; all other parameters (heads) accumulate theirs in .grad, as always. method None is the plain sum:
    every gradient goes to .grad and nothing is kept.
    """

    def __init__(self, shared: Iterable[Parameter], method: Method | None):
        self.shared = list(shared)
        self.method = method
        self.kept: dict[str, list[Tensor | None]] = {}  # by task, in the order of `shared`
        self.figures: dict[str, list[float]] = defaultdict(list)  # by name, one a step

    def backward(self, task: str, loss: Tensor) -> None:
        """Takes the task's gradient; a second call within a step adds to it, before any projection."""
        if self.method is None:
            loss.backward()
            return
        so_far = self.kept.get(task, [None] * len(self.shared))
        for p, gradient in zip(self.shared, so_far, strict=True):
            p.grad = gradient
        loss.backward()
        self.kept[task] = [p.grad for p in self.shared]
        for p in self.shared:
            p.grad = None

    @torch.no_grad()
    def write_gradients(self, loss_scale: float = 1.0) -> None:
        """Writes the shared parameters' .grad, None where no task has a gradient, and forgets the step's gradients.

        loss_scale: what a scaler has multiplied the losses by; it only matters for the norms in means().
        """
        names = tuple(sorted(self.kept))
        if len(names) > 1:
            rows = list(zip(*(self.kept[name] for name in names), strict=True))  # by parameter: K gradients or None
            gramian, zeros = gram_matrix(rows, len(names))
            weights = self._weights(gramian, names, loss_scale)
            combined = [weighted_sum(row, weights, blocks) for row, blocks in zip(rows, zeros, strict=True)]
        else:  # nothing to combine: the only task's own, or none
            combined = self.kept[names[0]] if names else []
        for p, gradient in zip(self.shared, combined, strict=bool(names)):
            p.grad = gradient
        self.kept = {}

    def _weights(self, gramian: Tensor, names: tuple[str, ...], loss_scale: float) -> Tensor:
        if not gramian.isfinite().all():  # an overflow in one task: its infinity has to reach the scaler's check
            return torch.ones_like(gramian[0])
        self._note(gramian, names, loss_scale)
        return self.method.weights(gramian, names) if gramian.trace() > 0 else torch.ones_like(gramian[0])

    def _note(self, gramian: Tensor, names: tuple[str, ...], loss_scale: float) -> None:
        norms = gramian.diagonal().sqrt()
        for i, name in enumerate(names):
            self.figures[f"norm {name}"].append(float(norms[i]) / loss_scale)
        for i, j in combinations(range(len(names)), 2):
            inner, product = float(gramian[i, j]), float(norms[i] * norms[j])
            self.figures[f"cosine {names[i]} {names[j]}"].append(inner / product if product else 0.0)
            self.figures[f"conflicts {names[i]} {names[j]}"].append(inner < 0)

    def means(self) -> dict[str, float]:
        """Since the last call, over the steps with at least two tasks and no overflow.

        'norm sst'; 'cosine para sst', names in alphabetical order; 'conflicts para sst', the share of steps with a
        negative cosine. Empty for the plain sum.
        """
        means = {name: fmean(values) for name, values in sorted(self.figures.items())}
        self.figures.clear()
        return means

    def state_dict(self) -> dict[str, Any]:
        """Between steps; tensors, numbers and dicts."""
        return self.method.state_dict() if self.method else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.method:
            self.method.load_state_dict(state)


def gram_matrix(rows: list[tuple[Tensor | None, ...]], K: int) -> tuple[Tensor, list[np.ndarray | None]]:
    """Inner products of K tasks' gradients, None counting as zero; rows: by parameter.

    Returns (K, K) on the CPU and, for every row, the blocks that are zero in all of its gradients.
    """
    parts: dict[tuple[int, ...], Tensor] = {}  # by the tasks that have a gradient: one transfer each from a GPU
    zeros: list[np.ndarray | None] = []
    for row in rows:
        present = tuple(k for k, gradient in enumerate(row) if gradient is not None)
        zeros.append(None)
        if present:
            part, zeros[-1] = kernels.gramian([row[k] for k in present])
            parts[present] = parts[present] + part if present in parts else part
    gramian = torch.zeros(K, K, dtype=torch.float64)
    for present, part in parts.items():
        index = torch.tensor(present)
        gramian[index[:, None], index] += part.cpu()
    return gramian, zeros


def weighted_sum(row: tuple[Tensor | None, ...], weights: Tensor, zeros: np.ndarray | None) -> Tensor | None:
    """sum_k weights[k] row[k] in the memory of its first gradient; None if there is none."""
    present = [k for k, gradient in enumerate(row) if gradient is not None]
    return kernels.weighted_sum([row[k] for k in present], weights[present], zeros) if present else None


# --- flags ------------------------------------------------------------------------------------------------------------

COMBINERS: dict[str, Callable[[argparse.Namespace], Method | None]] = {
    "sum": lambda args: None,
    "pcgrad": lambda args: PCGrad(args.seed),
    "gradvac": lambda args: GradVac(args.seed, args.gradvac_beta),
    "cagrad": lambda args: CAGrad(args.cagrad_c),
    "mgda": lambda args: MGDA(),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("gradient combination")
    group.add_argument(
        "--combiner",
        choices=sorted(COMBINERS),
        default="sum",
        help="how the tasks' gradients for the encoder are combined",
    )
    group.add_argument(
        "--gradvac_beta", type=number(float, 0, 1), default=0.01, help="share of each step in gradvac's running cosines"
    )
    group.add_argument(
        "--cagrad_c", type=number(float, 0, 10), default=0.4,
        help="radius of cagrad's search, relative to the mean gradient; 0: plain sum; guarantees end at 1",
    )  # fmt: skip


def build_combiner(args: argparse.Namespace, shared: Iterable[Parameter]) -> GradientCombiner:
    return GradientCombiner(shared, COMBINERS[args.combiner](args))
