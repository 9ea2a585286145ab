"""Combine the gradients of several tasks into one: plain sum, PCGrad, Gradient Vaccine, CAGrad, MGDA.

Each method sees only the K x K Gram matrix of the shared parameters' gradients, gramian[i, j] = <g_i, g_j>, and returns
K weights: the combined gradient is sum_k weights[k] g_k. Full-size tensors are therefore read only twice, once for the
inner products and once for the weighted sum; compared with that, the methods themselves cost nothing. Multiplying all
gradients by the same number does not change the weights, so the methods work unchanged on scaled losses (fp16).

Shapes:  K tasks in a step, in alphabetical order
"""

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import combinations
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

import kernels
from distributed import World
from flags import ENCODER_TRAINS, ArgumentParser, Need, Switch, chosen, number
from sampling import one_task_per_step
from utils import thinned


class Method:
    """Computes weights from a Gram matrix, and holds any state that is kept between steps."""

    def weights(self, gramian: Tensor, names: tuple[str, ...]) -> Tensor:
        """gramian: (K, K), float64, CPU, finite, K >= 2; names: the K tasks. Returns (K,)."""
        raise NotImplementedError

    def combine(
        self, rows: "list[Row]", weights: Tensor, zeros: list[np.ndarray | None], arrival: list[int]
    ) -> list[Tensor | None]:
        """The weighted sum of each row's gradients; None without a gradient. arrival: the tasks in backward's order."""
        return weighted_sum(rows, weights, zeros)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


# --- the plain sum, observed ------------------------------------------------------------------------------------------


class ObservedSum(Method):
    """The plain sum, with each task's gradient kept until the end of the step so that cosines can be logged.

    The gradients are added in the order of the backward passes, as autograd adds them: training is the same, bit for
    bit, as without the observation (with --accumulate and with several processes, up to rounding).
    """

    def weights(self, gramian: Tensor, names: tuple[str, ...]) -> Tensor:
        return torch.ones_like(gramian[0])

    def combine(
        self, rows: "list[Row]", weights: Tensor, zeros: list[np.ndarray | None], arrival: list[int]
    ) -> list[Tensor | None]:
        combined: list[Tensor | None] = [None] * len(rows)
        for tasks, indices, _ in by_tasks(rows):
            first, *others = (k for k in arrival if k in tasks)
            sums = [rows[i][first] for i in indices]
            for k in others:
                torch._foreach_add_(sums, [rows[i][k] for i in indices])
            for i, total in zip(indices, sums, strict=True):
                combined[i] = total
        return combined


# --- changing one gradient after another: PCGrad, Gradient Vaccine ----------------------------------------------------


class Surgery(Method):
    """Adds multiples of the ORIGINAL g_j, j != i, to each g_i, in a new random order for every i, and sums the results.

    The changed g_i is sum_k c_k g_k, so storing its K coefficients c is enough: <g_i, g_j> = (gramian c)_j.
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
        """Return the multiple of g_j to add to the gradient with coefficients c."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


class PCGrad(Surgery):
    """Algorithm 1 of Yu et al. 2020 (arXiv:2001.06782).

    If the current g_i conflicts with g_j, project it onto g_j's normal plane: g_i - (<g_i, g_j> / |g_j|^2) g_j.
    Deviation: none.
    """

    def multiple(self, gramian: Tensor, c: Tensor, j: int, pair: str) -> float:
        inner = float(gramian[j] @ c)
        return -inner / float(gramian[j, j]) if inner < 0 else 0.0


class GradVac(Surgery):
    """Gradient Vaccine, Algorithm 1 of Wang et al. 2021 (arXiv:2010.05874), for the whole encoder at once.

    If phi, the cosine of the current g_i and g_j, is below the pair's running target rho, equation (2) raises it to
    rho: g_i + (|g_i| (rho sqrt(1 - phi^2) - phi sqrt(1 - rho^2)) / (|g_j| sqrt(1 - rho^2))) g_j. Every step then
    applies equation (3): rho <- (1 - beta) rho + beta phi, starting from rho = 0. With beta = 0 this is PCGrad.
    Deviations: one parameter group instead of one per layer; targets are capped at HIGHEST_TARGET, since rho = 1 would
    need an infinite multiple of g_j; a pair with a zero gradient has no cosine and does not change its target.
    """

    HIGHEST_TARGET = 0.999

    def __init__(self, seed: int, beta: float):
        super().__init__(seed)
        self.beta = beta
        # "i j" -> rho. The pair "j i" has its own target: its cosine is that of a changed g_j and the original g_i.
        self.targets: dict[str, float] = {}

    def multiple(self, gramian: Tensor, c: Tensor, j: int, pair: str) -> float:
        length_i = float((c @ gramian @ c).clamp(min=0)) ** 0.5  # rounding can make a zero negative
        length_j = float(gramian[j, j]) ** 0.5
        if length_i == 0 or length_j == 0:
            return 0.0
        phi = max(-1.0, min(1.0, float(gramian[j] @ c) / length_i / length_j))
        target = self.targets.get(pair, 0.0)
        self.targets[pair] = (1 - self.beta) * target + self.beta * phi
        rho = min(target, self.HIGHEST_TARGET)
        if phi >= rho:
            return 0.0
        # equation (2), simplified by sqrt(1 - rho^2) > 0: rho < 1, and rho > phi >= -1
        return length_i / length_j * (rho * ((1 - phi**2) / (1 - rho**2)) ** 0.5 - phi)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"targets": dict(self.targets)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.targets = dict(state["targets"])


# --- optimizing weights on the simplex: CAGrad, MGDA ------------------------------------------------------------------


ROUNDING = 1e-15  # rounding error of a float64 Gram matrix with trace 1


def minimize_on_simplex(gramian: Tensor, slope: Tensor, steps: int = 500, tolerance: float = 1e-10) -> Tensor:
    """Return the w >= 0 with sum 1 that minimizes slope . w + |g_w|, g_w = sum_k w_k g_k. Both terms are convex.

    Frank-Wolfe with pairwise steps (Lacoste-Julien & Jaggi 2015, arXiv:1511.05932): each step moves the optimal amount
    of weight from the task with the largest derivative to the one with the smallest, until their derivatives are equal.
    gramian: (K, K), with a trace of about 1; slope: (K,). Returns (K,).
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
        # Along d = e_to - e_source, |g_(w + t d)|^2 = square + 2 b t + a t^2. The minimum of s t + its square root is
        # where b + a t = -s sqrt((a square - b^2) / (a - s^2)), or at the largest possible t if |s| >= sqrt(a).
        a = float(gramian[to, to] + gramian[source, source] - 2 * gramian[to, source])
        b = float(inner[to] - inner[source])
        s = float(slope[to] - slope[source])
        t = limit = float(w[source])
        if a > s**2:
            t = (-b - s * (max(0.0, a * square - b**2) / (a - s**2)) ** 0.5) / a
        t = max(0.0, min(limit, t))
        w[to] += t
        w[source] = limit - t  # exactly 0 if all of the weight moves
    return w


class CAGrad(Method):
    """Conflict-averse gradient descent, Algorithm 1 of Liu et al. 2021 (arXiv:2110.14048).

    Among all d within a distance c |g_0| of the mean gradient g_0, take the one whose smallest inner product with a g_i
    is largest: d = g_0 + c |g_0| g_w / |g_w|, where w minimizes <g_w, g_0> + c |g_0| |g_w| on the simplex.
    Deviations: K d instead of d, so that c = 0 is the plain sum; d = g_0 if the gradients cancel each other (g_w = 0;
    in practice |g_w| below a ten-thousandth of their size).
    """

    BALANCE = 1e-4  # below it, the weights would scale float32's rounding errors up to the size of the gradient

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
    solver (their Algorithm 2), which reach the solution up to rounding errors; gradients are not normalized.
    """

    def weights(self, gramian: Tensor, names: tuple[str, ...]) -> Tensor:
        K = len(names)
        return K * minimize_on_simplex(gramian / gramian.trace(), torch.zeros(K, dtype=gramian.dtype))


# --- collecting and writing gradients ---------------------------------------------------------------------------------


class GradientCombiner:
    """Runs the backward passes, keeps each task's gradients, and writes the combined ones; shared by all methods.

    Each backward pass runs immediately and frees its graph. The gradients of the shared parameters are kept by task
    until they are combined, without copying them; all other parameters (heads) accumulate theirs in .grad as usual.
    method None is the plain sum: every gradient goes to .grad and nothing is kept.
    """

    def __init__(self, shared: Iterable[Parameter], method: Method | None):
        self.shared = list(shared)
        self.method = method
        self.world = World()  # the processes that train the model together
        self.kept: dict[str, list[Tensor | None]] = {}  # by task, in the order of `shared`
        self.figures: dict[str, list[float]] = defaultdict(list)  # by name, one value per step

    def backward(self, task: str, loss: Tensor) -> None:
        """Compute the task's gradient. A second call within a step adds to it before gradients are combined."""
        if self.method is None:
            loss.backward()
            return
        accumulated = self.kept.get(task, [None] * len(self.shared))
        for p, gradient in zip(self.shared, accumulated, strict=True):
            p.grad = gradient
        loss.backward()
        self.kept[task] = [p.grad for p in self.shared]
        for p in self.shared:
            p.grad = None

    @torch.no_grad()
    def write_gradients(self, loss_scale: float = 1.0, parameters: Iterable[Parameter] = ()) -> None:
        """Write the combined gradients to the shared parameters' .grad and drop the tasks' own.

        If several processes train together, each task's gradient first becomes that of the whole batch, and so do those
        of the other `parameters`, the model's, which are in .grad.

        .grad is None where no task has a gradient. loss_scale: the factor by which a loss scaler has multiplied the
        losses; it only affects the norms in means().
        """
        names = tuple(sorted(self.kept))
        for name in names:
            self.world.average(self.kept[name])
        self.world.average(p.grad for p in parameters)  # None for the shared ones, unless the method is the plain sum
        if len(names) > 1:
            rows = list(zip(*(self.kept[name] for name in names), strict=True))  # per parameter: K gradients or None
            gramian, zeros = gram_matrix(rows, len(names))
            weights = self._weights(gramian, names, loss_scale)
            combined = self.method.combine(rows, weights, zeros, [names.index(name) for name in self.kept])
        else:  # nothing to combine: a single task, or none
            combined = self.kept[names[0]] if names else []
        for p, gradient in zip(self.shared, combined, strict=bool(names)):
            p.grad = gradient
        self.kept = {}

    def _weights(self, gramian: Tensor, names: tuple[str, ...], loss_scale: float) -> Tensor:
        if not gramian.isfinite().all():  # one task overflowed: its infinity must reach the loss scaler's check
            return torch.ones_like(gramian[0])
        self._record(gramian, names, loss_scale)
        return self.method.weights(gramian, names) if gramian.trace() > 0 else torch.ones_like(gramian[0])

    def _record(self, gramian: Tensor, names: tuple[str, ...], loss_scale: float) -> None:
        norms = gramian.diagonal().sqrt()
        for i, name in enumerate(names):
            self.figures[f"norm {name}"].append(float(norms[i]) / loss_scale)
        for i, j in combinations(range(len(names)), 2):
            inner, product = float(gramian[i, j]), float(norms[i] * norms[j])
            self.figures[f"cosine {names[i]} {names[j]}"].append(inner / product if product else 0.0)
            self.figures[f"conflicts {names[i]} {names[j]}"].append(inner < 0)

    def means(self) -> dict[str, float]:
        """Return means since the last call, over the steps with at least two tasks and no overflow.

        Keys: 'norm sst'; 'cosine para sst', task names in alphabetical order; 'conflicts para sst', the share of steps
        with a negative cosine. Empty for the plain sum, unless it is observed.
        """
        means = {name: fmean(values) for name, values in sorted(self.figures.items())}
        self.figures.clear()
        return means

    def cosines(self, most: int) -> dict[str, list[float]]:
        """The cosines since the last call of `means` as a curve of at most this many points, by 'para sst'."""
        names = sorted(name for name in self.figures if name.startswith("cosine "))
        return {name.removeprefix("cosine "): thinned(self.figures[name], most) for name in names}

    def drop(self) -> None:
        """Forget the gradients of a step that is not completed."""
        self.kept = {}

    def state_dict(self) -> dict[str, Any]:
        """The state between two steps: tensors, numbers and dicts only."""
        figures = {"figures": {name: list(values) for name, values in self.figures.items()}}
        return figures | (self.method.state_dict() if self.method else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.figures = defaultdict(list, {name: list(values) for name, values in state.get("figures", {}).items()})
        if self.method:
            self.method.load_state_dict(state)


Row = tuple[Tensor | None, ...]  # the K gradients of a parameter


def by_tasks(rows: list[Row]) -> Iterator[tuple[list[int], list[int], list[list[Tensor]]]]:
    """Group the rows by the tasks that have a gradient: these tasks, the rows' indices, and their gradients."""
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        groups[tuple(k for k, gradient in enumerate(row) if gradient is not None)].append(index)
    for tasks, indices in groups.items():
        if tasks:
            yield list(tasks), indices, [[rows[i][k] for k in tasks] for i in indices]


def gram_matrix(rows: list[Row], K: int) -> tuple[Tensor, list[np.ndarray | None]]:
    """Return the inner products of K tasks' gradients; a gradient that is None counts as zero.

    Returns (K, K) on the CPU and, for every row, the blocks that are zero in all of its gradients.
    """
    zeros: list[np.ndarray | None] = [None] * len(rows)
    parts: list[tuple[list[int], Tensor]] = []
    for tasks, indices, gradients in by_tasks(rows):
        part, blocks = kernels.gramian(gradients)
        parts.append((tasks, part))
        for i, found in zip(indices, blocks, strict=True):
            zeros[i] = found
    gramian = torch.zeros(K, K, dtype=torch.float64)
    if parts:
        products = torch.cat([part.flatten() for _, part in parts]).cpu()  # one transfer, for which the CPU waits
        for (tasks, _), product in zip(parts, products.split([part.numel() for _, part in parts]), strict=True):
            index = torch.tensor(tasks)
            gramian[index[:, None], index] += product.view(len(tasks), -1)
    return gramian, zeros


def weighted_sum(rows: list[Row], weights: Tensor, zeros: list[np.ndarray | None]) -> list[Tensor | None]:
    """Overwrite each row's first gradient with sum_k weights[k] row[k] and return these; None without a gradient."""
    combined: list[Tensor | None] = [None] * len(rows)
    for tasks, indices, gradients in by_tasks(rows):
        sums = kernels.weighted_sum(gradients, weights[tasks], [zeros[i] for i in indices])
        for i, found in zip(indices, sums, strict=True):
            combined[i] = found
    return combined


# --- flags ------------------------------------------------------------------------------------------------------------

COMBINERS: dict[str, Callable[[argparse.Namespace], Method | None]] = {
    "sum": lambda args: ObservedSum() if args.log_gradients else None,
    "pcgrad": lambda args: PCGrad(args.seed),
    "gradvac": lambda args: GradVac(args.seed, args.gradvac_beta),
    "cagrad": lambda args: CAGrad(args.cagrad_c),
    "mgda": lambda args: MGDA(),
}


TWO_TASKS = Need(
    "at least two tasks that train", lambda args: len(args.train_tasks) > 1, "Use two tasks, or --combiner sum"
)
TWO_TASKS_PER_STEP = Need(
    "at least two tasks in a step",
    lambda args: not one_task_per_step(args) or args.accumulate > 1,
    "Use --sampler round_robin or --accumulate 3",
)


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.section("steps: which tasks, and how their gradients are combined")
    add("--combiner", choices=sorted(COMBINERS), default="sum", needs=(TWO_TASKS, TWO_TASKS_PER_STEP, ENCODER_TRAINS),
        help="how the tasks' gradients for the encoder are combined")  # fmt: skip
    add("--log_gradients", action=Switch,
        needs=(chosen("--combiner", "sum"), TWO_TASKS, TWO_TASKS_PER_STEP, ENCODER_TRAINS),
        help="sum: log the cosines between the tasks' gradients, as the other combiners always do")  # fmt: skip
    add("--gradvac_beta", type=number(float, 0, 1), default=0.01, needs=chosen("--combiner", "gradvac"),
        help="gradvac: weight of each step in the running cosines")  # fmt: skip
    add("--cagrad_c", type=number(float, 0, 10), default=0.4, needs=chosen("--combiner", "cagrad"),
        help="cagrad: search radius relative to the mean gradient; 0 is the plain sum")  # fmt: skip


def build_combiner(args: argparse.Namespace, shared: Iterable[Parameter]) -> GradientCombiner:
    return GradientCombiner(shared, COMBINERS[args.combiner](args))
