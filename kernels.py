"""CPU kernels, compiled by numba, for operations that are slow in stock torch.

`adamw` does the whole optimizer update in one pass over memory. `dropout` computes its mask from a hash of each
element's index, so it runs on all cores, stores no mask, and gives the same mask on any number of threads. `gramian`
and `weighted_sum` each read the tasks' gradients once, whatever the number of tasks. Every kernel is compiled for the
machine at first use and kept in numba's cache. None is used on CUDA.
"""

from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch
from torch import Tensor


def _loops() -> ModuleType:
    """The compiled loops, with as many threads as torch uses, so that one setting controls both.

    They are imported at first use, because numba takes a while to load.
    """
    import numba

    import loops

    wanted = torch.get_num_threads()
    numba.set_num_threads(min(wanted, numba.config.NUMBA_NUM_THREADS))
    if torch.get_num_threads() != wanted:  # numba's first launch resets the OpenMP thread count that torch shares
        torch.set_num_threads(wanted)
    return loops


def runs_here(*tensors: Tensor) -> bool:
    """Whether the kernels support these tensors: dense float32 on the CPU, outside torch.compile."""
    usable = all(t.device.type == "cpu" and t.dtype == torch.float32 and t.is_contiguous() for t in tensors)
    return usable and not torch.compiler.is_compiling()


def adamw(
    theta: Tensor, grad: Tensor, m: Tensor, v: Tensor,
    beta1: float, beta2: float, alpha_t: float, eps: float, decay: float,
) -> None:  # fmt: skip
    """Do one AdamW update in place: theta <- theta - (alpha_t m / (sqrt(v) + eps) + decay theta)."""
    arrays = (t.detach().view(-1).numpy() for t in (theta, grad, m, v))
    # 1 - beta is computed in float64: 1 - float32(0.999) has a relative error of 1e-5
    scalars = (beta1, 1 - beta1, beta2, 1 - beta2, alpha_t, eps, decay)
    _loops().adamw(*arrays, *map(np.float32, scalars))


class _Dropout(torch.autograd.Function):
    """y = x * mask / (1 - p). The mask is a function of (seed, index), so the backward pass recomputes it."""

    @staticmethod
    def forward(ctx, x: Tensor, p: float, seed: int) -> Tensor:
        ctx.p, ctx.seed = p, seed
        out = torch.empty_like(x)
        keys = np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32)
        flat = (t.detach().view(-1).numpy() for t in (x, out))
        _loops().dropout(*flat, *keys, np.uint32(round(p * 2**32)), np.float32(1 / (1 - p)))
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Dropout.apply(grad.contiguous(), ctx.p, ctx.seed), None, None


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """Inverted dropout (Srivastava et al. 2014). Each call draws one seed from torch's global generator."""
    if not training or p == 0:
        return x
    if p < 1 and runs_here(x := x.contiguous()):
        return _Dropout.apply(x, p, int(torch.randint(2**62, ())))
    return torch.nn.functional.dropout(x, p)


class _Lookup(torch.autograd.Function):
    """Rows of an embedding matrix. Most rows of its gradient are zero; those are never written to."""

    @staticmethod
    def forward(ctx, weight: Tensor, ids: Tensor, padding_id: int) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.padding_id = weight.shape, padding_id
        return weight[ids]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        (ids,) = ctx.saved_tensors
        # NumPy requests huge pages: minilm's 47 MB cost at most 24 page faults, instead of 11,000 with torch.zeros.
        dense = torch.from_numpy(np.zeros(ctx.shape, dtype=np.float32))
        dense.index_add_(0, ids.flatten(), grad.flatten(0, -2))
        dense[ctx.padding_id] = 0
        return dense, None, None


def lookup(weight: Tensor, ids: Tensor, padding_id: int) -> Tensor:
    """Embedding lookup, (..., ) -> (..., H); the padding token's row gets no gradient."""
    if runs_here(weight):
        return _Lookup.apply(weight, ids, padding_id)
    return torch.nn.functional.embedding(ids, weight, padding_idx=padding_id)


def gramian(vectors: Sequence[Tensor]) -> tuple[Tensor, np.ndarray | None]:
    """Return the inner products of K tensors of one shape, and which blocks are zero in all of them.

    First: (K, K), float64, on the tensors' device. Products are summed in float64, which holds the square of any
    float32, first within each block and then over the blocks in order, so the result does not depend on the number of
    threads. Second: a Boolean for each block, which lets weighted_sum skip the zero blocks (most of a word embedding's
    gradient); None if the compiled kernel was not used.
    """
    if runs_here(*vectors):
        loops = _loops()
        blocks = -(-vectors[0].numel() // loops.BLOCK)
        products = np.empty((blocks, len(vectors), len(vectors)))
        loops.gramian(tuple(v.detach().view(-1).numpy() for v in vectors), products)
        return torch.from_numpy(products.sum(axis=0)), ~np.einsum("bkk->b", products).astype(bool)
    # pieces of a million elements, so that the float64 copies stay small compared with the gradients
    pieces = zip(*(v.detach().flatten().split(2**20) for v in vectors), strict=True)
    stacks = (torch.stack([part.double() for part in piece]) for piece in pieces)  # each (K, 2^20)
    return sum(stack @ stack.T for stack in stacks), None


def weighted_sum(vectors: Sequence[Tensor], weights: Tensor, zeros: np.ndarray | None = None) -> Tensor:
    """Overwrite the first vector with sum_k weights[k] vectors[k] and return it; weights: (K,) float64 on the CPU.

    zeros: from gramian, the blocks to skip. The sum is computed in float64, because the weight of a tiny gradient
    combined with a huge one may be outside the range of float32.
    """
    first, *others = vectors
    if runs_here(*vectors):
        loops = _loops()
        if zeros is None:
            zeros = np.zeros(-(-first.numel() // loops.BLOCK), dtype=bool)
        loops.weighted_sum(tuple(v.detach().view(-1).numpy() for v in vectors), weights.numpy(), zeros)
        return first
    scales = weights.tolist()
    first.mul_(scales[0])
    for other, scale in zip(others, scales[1:], strict=True):
        first.add_(other, alpha=scale)
    return first
