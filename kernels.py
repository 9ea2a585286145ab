"""The loops that stock torch runs slowly on a CPU, written out element by element and compiled by numba.

`adamw` makes the whole optimizer update in one pass over memory. `dropout` draws its mask from a hash of the element's
index, so that drawing runs on all cores, needs no stored mask, and gives the same mask on any number of threads.
`gramian` and `weighted_sum` read the tasks' gradients once each, whatever the number of tasks. All are compiled for the
machine at first use and kept in numba's cache. On CUDA none is used.
"""

from collections.abc import Sequence

import numba
import numpy as np
import torch
from torch import Tensor

GOLDEN = 0x9E3779B9  # 2^32 / golden ratio: spreads consecutive indices over the 32-bit range
ROUND_1, ROUND_2 = 0x7FEB352D, 0x846CA68B  # multipliers of the hash prospector's "lowbias32"


def _match_threads() -> None:
    """Numba uses as many threads as torch was told to use, so that one setting governs both."""
    wanted = torch.get_num_threads()
    numba.set_num_threads(min(wanted, numba.config.NUMBA_NUM_THREADS))
    if torch.get_num_threads() != wanted:  # numba's first start resets OpenMP's number of threads, which is torch's too
        torch.set_num_threads(wanted)


def runs_here(*tensors: Tensor) -> bool:
    """Whether this file's code serves these tensors: dense float32 on the CPU, outside torch.compile."""
    usable = all(t.device.type == "cpu" and t.dtype == torch.float32 and t.is_contiguous() for t in tensors)
    return usable and not torch.compiler.is_compiling()


@numba.njit(parallel=True, fastmath={"contract"}, error_model="numpy", cache=True)
def _adamw_loop(theta, grad, m, v, beta1, rest1, beta2, rest2, alpha_t, eps, decay):
    for i in numba.prange(theta.size):
        g = grad[i]
        m[i] = beta1 * m[i] + rest1 * g
        v[i] = beta2 * v[i] + rest2 * g * g
        theta[i] -= alpha_t * m[i] / (np.sqrt(v[i]) + eps) + decay * theta[i]


def adamw(
    theta: Tensor, grad: Tensor, m: Tensor, v: Tensor,
    beta1: float, beta2: float, alpha_t: float, eps: float, decay: float,
) -> None:  # fmt: skip
    """One AdamW update in place: theta <- theta - (alpha_t m / (sqrt(v) + eps) + decay theta)."""
    _match_threads()
    arrays = (t.detach().view(-1).numpy() for t in (theta, grad, m, v))
    # 1 - beta is taken in float64: 1 - float32(0.999) would be off by a hundred-thousandth
    scalars = (beta1, 1 - beta1, beta2, 1 - beta2, alpha_t, eps, decay)
    _adamw_loop(*arrays, *map(np.float32, scalars))


@numba.njit(parallel=True, fastmath={"contract"}, error_model="numpy", cache=True)
def _dropout_loop(x, out, key1, key2, threshold, scale):
    for i in numba.prange(x.size):
        h = np.uint32(np.uint32(i) * np.uint32(GOLDEN) + key1)  # numba widens every product: cut back to 32 bits
        h = np.uint32((h ^ (h >> np.uint32(16))) * np.uint32(ROUND_1))
        h = np.uint32((h ^ (h >> np.uint32(15))) * np.uint32(ROUND_2))
        h = np.uint32((h ^ (h >> np.uint32(16))) + key2)
        h = np.uint32((h ^ (h >> np.uint32(16))) * np.uint32(ROUND_1))  # a second round, or like keys give like masks
        h = np.uint32((h ^ (h >> np.uint32(15))) * np.uint32(ROUND_2))
        h = h ^ (h >> np.uint32(16))
        out[i] = x[i] * scale if h >= threshold else np.float32(0)


class _Dropout(torch.autograd.Function):
    """y = x * mask / (1 - p), mask a function of (seed, index): the backward pass computes it again."""

    @staticmethod
    def forward(ctx, x: Tensor, p: float, seed: int) -> Tensor:
        ctx.p, ctx.seed = p, seed
        _match_threads()
        out = torch.empty_like(x)
        keys = np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32)
        flat = (t.detach().view(-1).numpy() for t in (x, out))
        _dropout_loop(*flat, *keys, np.uint32(round(p * 2**32)), np.float32(1 / (1 - p)))
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Dropout.apply(grad.contiguous(), ctx.p, ctx.seed), None, None


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """Inverted dropout (Srivastava et al. 2014); each call takes one seed from torch's global generator."""
    if not training or p == 0:
        return x
    if p < 1 and runs_here(x := x.contiguous()):
        return _Dropout.apply(x, p, int(torch.randint(2**62, ())))
    return torch.nn.functional.dropout(x, p)


class _Lookup(torch.autograd.Function):
    """Rows of an embedding matrix. Most rows of its gradient are zero, and fresh memory for them is never written."""

    @staticmethod
    def forward(ctx, weight: Tensor, ids: Tensor, padding_id: int) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.padding_id = weight.shape, padding_id
        return weight[ids]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        (ids,) = ctx.saved_tensors
        # NumPy asks for huge pages: minilm's 47 MB cost 24 page faults at the most, instead of 11,000 with torch.zeros.
        dense = torch.from_numpy(np.zeros(ctx.shape, dtype=np.float32))
        dense.index_add_(0, ids.flatten(), grad.flatten(0, -2))
        dense[ctx.padding_id] = 0
        return dense, None, None


def lookup(weight: Tensor, ids: Tensor, padding_id: int) -> Tensor:
    """Embedding lookup, (..., ) -> (..., H); the padding token's row gets no gradient."""
    if runs_here(weight):
        return _Lookup.apply(weight, ids, padding_id)
    return torch.nn.functional.embedding(ids, weight, padding_idx=padding_id)


BLOCK = 2048  # elements: those of three gradients fill 24 KB, so that all six products find them in the L1 cache


# reassoc lets the sums run in vector registers; infinities and NaNs stay what they are
@numba.njit(parallel=True, fastmath={"contract", "reassoc"}, error_model="numpy", cache=True)
def _gramian_loop(vectors, products):
    for block in numba.prange(products.shape[0]):
        start = block * BLOCK
        stop = min(start + BLOCK, vectors[0].size)
        for i in range(len(vectors)):
            for j in range(i + 1):
                x, y = vectors[i][start:stop], vectors[j][start:stop]
                total = 0.0
                for e in range(x.size):
                    total += np.float64(x[e]) * np.float64(y[e])
                products[block, i, j] = products[block, j, i] = total


def gramian(vectors: Sequence[Tensor]) -> tuple[Tensor, np.ndarray | None]:
    """Inner products of K tensors of one shape, as a (K, K) float64 tensor on their device; and where they are zero.

    Each block's products are summed in float64, which holds the square of any float32, then the blocks' sums in their
    order: the result does not depend on the number of threads. Second: which blocks are zero in all K tensors, for
    weighted_sum to pass over, as most of a word embedding's gradient is; None off the kernel.
    """
    if runs_here(*vectors):
        _match_threads()
        blocks = -(-vectors[0].numel() // BLOCK)
        products = np.empty((blocks, len(vectors), len(vectors)))
        _gramian_loop(tuple(v.detach().view(-1).numpy() for v in vectors), products)
        return torch.from_numpy(products.sum(axis=0)), ~np.einsum("bkk->b", products).astype(bool)
    # pieces of a million elements: the copies in float64 stay small beside the gradients themselves
    pieces = zip(*(v.detach().flatten().split(2**20) for v in vectors), strict=True)
    stacks = (torch.stack([part.double() for part in piece]) for piece in pieces)  # each (K, 2^20)
    return sum(stack @ stack.T for stack in stacks), None


@numba.njit(parallel=True, fastmath={"contract"}, error_model="numpy", cache=True)
def _weighted_sum_loop(vectors, weights, zeros):
    out = vectors[0]
    for block in numba.prange(-(-out.size // BLOCK)):
        if zeros[block]:
            continue
        start = block * BLOCK
        stop = min(start + BLOCK, out.size)
        total = np.zeros(BLOCK)
        for k in range(len(vectors)):
            x, weight = vectors[k][start:stop], weights[k]
            for e in range(x.size):
                total[e] += weight * np.float64(x[e])
        for e in range(stop - start):
            out[start + e] = total[e]


def weighted_sum(vectors: Sequence[Tensor], weights: Tensor, zeros: np.ndarray | None = None) -> Tensor:
    """sum_k weights[k] vectors[k], written over the first of them; weights: (K,) float64 on the CPU.

    zeros: from gramian, the blocks that need not be touched. The sum is taken in float64: the weight of a tiny
    gradient beside a huge one may lie outside float32.
    """
    first, *others = vectors
    if runs_here(*vectors):
        _match_threads()
        if zeros is None:
            zeros = np.zeros(-(-first.numel() // BLOCK), dtype=bool)
        _weighted_sum_loop(tuple(v.detach().view(-1).numpy() for v in vectors), weights.numpy(), zeros)
        return first
    scales = weights.tolist()
    first.mul_(scales[0])
    for other, scale in zip(others, scales[1:], strict=True):
        first.add_(other, alpha=scale)
    return first
