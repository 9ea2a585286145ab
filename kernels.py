"""CPU kernels, compiled by numba, for operations that are slow in stock torch.

`adamw` does the whole optimizer update in one pass over memory. `dropout` computes its mask from a hash of each
element's index, so it runs on all cores, stores no mask, and gives the same mask on any number of threads. `lookup`
reuses the memory of the embeddings' gradient. `gramian` and `weighted_sum` each read the tasks' gradients once,
whatever the number of tasks. Every kernel is compiled for the machine at first use and kept in numba's cache. None is
used on CUDA, where each function here calls torch on all tensors at once, so that a step needs few launches.
"""

import contextlib
import math
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakTensorKeyDictionary


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


FLOAT32 = (torch.float32,)
FLOATS = (torch.float32, torch.bfloat16)


def runs_here(*tensors: Tensor, dtypes: tuple[torch.dtype, ...] = FLOAT32) -> bool:
    """Whether the kernels support these tensors: dense, on the CPU, not while a program is being traced."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    return all(_is_plain(tensor, dtypes) for tensor in tensors)


def _is_plain(t: Tensor, dtypes: tuple[torch.dtype, ...]) -> bool:
    """Whether t has memory that NumPy can use: not a fake or functional tensor, not inside torch.func."""
    own = type(t) in (Tensor, Parameter) and not torch._C._functorch.is_functorch_wrapped_tensor(t)
    return own and t.is_cpu and t.dtype in dtypes and t.is_contiguous()


def _arrays(tensors: Sequence[Tensor]) -> tuple[np.ndarray, ...]:
    """The tensors as flat arrays that share their memory; a bfloat16 as the uint16 of the same bits."""
    flat = (t.detach().view(-1) for t in tensors)
    return tuple((t.view(torch.uint16) if t.dtype == torch.bfloat16 else t).numpy() for t in flat)


def adamw(
    theta: Tensor, grad: Tensor, m: Tensor, v: Tensor,
    beta1: float, beta2: float, alpha_t: float, eps: float, decay: float,
) -> None:  # fmt: skip
    """Do one AdamW update in place: theta <- theta - (alpha_t m / (sqrt(v) + eps) + decay theta)."""
    # 1 - beta is computed in float64: 1 - float32(0.999) has a relative error of 1e-5
    scalars = (beta1, 1 - beta1, beta2, 1 - beta2, alpha_t, eps, decay)
    _loops().adamw(*_arrays((theta, grad, m, v)), *map(np.float32, scalars))


class _Dropout(torch.autograd.Function):
    """y = x * mask / (1 - p). The mask is a function of (seed, index), so the backward pass recomputes it."""

    @staticmethod
    def forward(ctx, x: Tensor, p: float, seed: int) -> Tensor:
        ctx.p, ctx.seed = p, seed
        out = torch.empty_like(x)
        keys = np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32)
        _loops().dropout(*_arrays((x, out)), *keys, np.uint32(round(p * 2**32)), np.float32(1 / (1 - p)))
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Dropout.apply(grad.contiguous(), ctx.p, ctx.seed), None, None


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """Inverted dropout (Srivastava et al. 2014). Each call draws one seed from torch's global generator."""
    if not training or p == 0:
        return x
    if p < 1 and runs_here(x := x.contiguous(), dtypes=FLOATS):
        return _Dropout.apply(x, p, int(torch.randint(2**62, ())))
    return torch.nn.functional.dropout(x, p)


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        out = torch.empty_like(x)
        _loops().gelu(*_arrays((x, out)))
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        out = torch.empty_like(x)
        _loops().gelu_backward(*_arrays((x, grad.contiguous(), out)))
        return out


def gelu(x: Tensor) -> Tensor:
    """x Phi(x), with the normal distribution function Phi (Hendrycks & Gimpel 2016, arXiv:1606.08415)."""
    if runs_here(x, dtypes=FLOATS):
        return _Gelu.apply(x)
    return torch.nn.functional.gelu(x)


class _Zeros:
    """Arrays of zeros for the gradients of one embedding matrix, reused once nothing else refers to them.

    New memory of this size comes from the kernel page by page: 24 ms for minilm's 47 MB, instead of 2 ms.
    """

    def __init__(self):
        self.arrays: list[np.ndarray] = []

    def take(self, shape: torch.Size) -> Tensor:
        for i in range(len(self.arrays)):
            if _references(self.arrays, i) == _UNUSED:
                return torch.from_numpy(self.arrays[i]).zero_()
        self.arrays.append(np.zeros(shape, dtype=np.float32))
        return torch.from_numpy(self.arrays[-1])


def _references(arrays: list[np.ndarray], i: int) -> int:
    """The number of references to an array, including the list's; a tensor of its memory is one."""
    return sys.getrefcount(arrays[i])


_UNUSED = _references([np.zeros(1)], 0)  # that of an array in a list only, which depends on the version of Python
_zeros_of = WeakTensorKeyDictionary()


class _Lookup(torch.autograd.Function):
    """Rows of an embedding matrix."""

    @staticmethod
    def forward(ctx, weight: Tensor, ids: Tensor, padding_id: int) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.padding_id = weight.shape, padding_id
        ctx.zeros = _zeros_of.setdefault(weight, _Zeros())
        return weight[ids]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        (ids,) = ctx.saved_tensors
        dense = ctx.zeros.take(ctx.shape)
        dense.index_add_(0, ids.flatten(), grad.flatten(0, -2))
        dense[ctx.padding_id] = 0
        return dense, None, None


def lookup(weight: Tensor, ids: Tensor, padding_id: int) -> Tensor:
    """Embedding lookup, (..., ) -> (..., H); the padding token's row gets no gradient."""
    if runs_here(weight):
        return _Lookup.apply(weight, ids, padding_id)
    return torch.nn.functional.embedding(ids, weight, padding_idx=padding_id)


# --- the gradients of several tasks: for every parameter a row of K gradients, one per task ---------------------------

Row = Sequence[Tensor]

SMALL = 2**16  # elements; a smaller row takes less time than the call of its loop (20 microseconds), so they share one


def _joined(rows: Sequence[Row]) -> list[Tensor]:
    """The rows as one: for each task, its gradients one after the other."""
    return [torch.cat([gradient.view(-1) for gradient in of_task]) for of_task in zip(*rows, strict=True)]


@torch.no_grad()
def gramian(rows: Sequence[Row]) -> tuple[Tensor, list[np.ndarray | None]]:
    """Return the inner products of K gradients, and for every row which of its blocks are zero in all K.

    First: (K, K), float64, on the gradients' device. The compiled kernel sums in float64, which holds the square of any
    float32, first within each block and then over the blocks in order, so the result does not depend on the number of
    threads. Otherwise see _gramian_of_chunk. Second: a Boolean for each block, which lets weighted_sum skip the zero
    blocks (most of a word embedding's gradient); None for a row on which the compiled kernel was not used.
    """
    zeros: list[np.ndarray | None] = [None] * len(rows)
    products, small, others = [], [], []
    for i, row in enumerate(rows):
        if not runs_here(*row):
            others.append(row)
        elif row[0].numel() < SMALL:
            small.append(row)
            zeros[i] = np.zeros(_blocks(row), dtype=bool)  # not worth looking for
        else:
            product, zeros[i] = _compiled_gramian(row)
            products.append(product)
    if small:
        products.append(_compiled_gramian(_joined(small))[0])
    return sum(products + [_gramian_of_chunk(chunk) for chunk in _chunks(others)]), zeros


def _blocks(row: Row) -> int:
    return -(-row[0].numel() // _loops().BLOCK)


def _compiled_gramian(row: Row) -> tuple[Tensor, np.ndarray]:
    products = np.empty((_blocks(row), len(row), len(row)))
    _loops().gramian(_arrays(row), products)
    return torch.from_numpy(products.sum(axis=0)), ~np.einsum("bkk->b", products).astype(bool)


CHUNK = 2**24  # elements per task that are copied at a time: 64 MB
BLOCK = 512  # elements that are summed in float32: a large one hides small ones only within its block


def _chunks(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Flatten the gradients and group them into chunks of at most CHUNK elements per task; long ones are cut."""
    chunk: list[Row] = []
    size = 0
    for row in rows:
        flat = [gradient.reshape(-1) for gradient in row]
        cut = zip(*(gradient.split(CHUNK) for gradient in flat), strict=True) if flat[0].numel() > CHUNK else [flat]
        for pieces in cut:
            if size + pieces[0].numel() > CHUNK:
                yield chunk
                chunk, size = [], 0
            chunk.append(pieces)
            size += pieces[0].numel()
    if chunk:
        yield chunk


def _gramian_of_chunk(chunk: list[Row]) -> Tensor:
    """Return the inner products of K lists of vectors: (K, K), float64, without waiting for the device.

    Blocks of BLOCK elements are summed in float32 (float64 for float64 gradients) and the blocks in float64. Each task
    is scaled by a power of two, so no product leaves the range of float32. Infinities and NaNs reach the result.
    """
    K, n = len(chunk[0]), sum(row[0].numel() for row in chunk)
    blocks = max(1, -(-n // BLOCK))
    padding = chunk[0][0].new_zeros(blocks * BLOCK - n)
    stack = torch.cat([vector for k in range(K) for vector in (*(row[k] for row in chunk), padding)])
    stack = stack.to(torch.promote_types(stack.dtype, torch.float32)).view(K, -1)
    scale = _inverse_power_of_two(torch.linalg.vector_norm(stack, math.inf, dim=1).float())  # (K,)
    x = stack.mul_(scale.unsqueeze(1)).view(K, blocks, BLOCK).transpose(0, 1)  # (blocks, K, BLOCK)
    products = x.new_empty(blocks, K, K)
    with no_tf32():
        torch.bmm(x, x.transpose(1, 2), out=products)  # autocast never changes the dtype of a call with out=
    unscale = scale.double().reciprocal()
    return products.sum(0, dtype=torch.float64) * torch.outer(unscale, unscale)


def _inverse_power_of_two(x: Tensor) -> Tensor:
    """Return 2^-e for 2^e <= x < 2^(e + 1), x >= 0, from the bits of x; finite and not zero for any x, also NaN."""
    e = x.view(torch.int32) >> 23  # plus 127; 0 for zero and subnormal numbers, 255 for infinity and NaN
    return ((254 - e).clamp(1, 253) << 23).view(torch.float32)


@contextlib.contextmanager
def no_tf32() -> Iterator[None]:
    """Inside this context, products of float32 matrices have the precision of float32, whatever the user has set."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@torch.no_grad()
def weighted_sum(rows: Sequence[Row], weights: Tensor, zeros: Sequence[np.ndarray | None]) -> list[Tensor]:
    """Overwrite the first gradient of every row with sum_k weights[k] row[k] and return these.

    weights: (K,) float64 on the CPU. zeros: from gramian, the blocks to skip. The compiled kernel computes the sum in
    float64, because the weight of a tiny gradient combined with a huge one may be outside the range of float32. For
    other rows, see _weighted_sum_together, which may overwrite all gradients.
    """
    small = []
    for row, blocks in zip(rows, zeros, strict=True):
        if blocks is not None and row[0].numel() < SMALL:
            small.append(row)
        elif blocks is not None:
            _loops().weighted_sum(_arrays(row), weights.numpy(), blocks)
    if small:
        joined = _joined(small)
        _loops().weighted_sum(_arrays(joined), weights.numpy(), np.zeros(_blocks(joined), dtype=bool))
        sums = joined[0].split([row[0].numel() for row in small])
        torch._foreach_copy_([row[0].view(-1) for row in small], sums)
    others = [row for row, blocks in zip(rows, zeros, strict=True) if blocks is None]
    if others:
        _weighted_sum_together(list(zip(*others, strict=True)), weights.tolist())
    return [row[0] for row in rows]


def _weighted_sum_together(tasks: list[Row], weights: list[float]) -> None:
    """The sum in the gradients' own dtype, with K multi-tensor calls; tasks: all gradients of each task.

    A weight outside the range of float32 is applied in several steps, in place.
    """
    first, *others = tasks
    for factor in _factors(weights[0]):
        torch._foreach_mul_(first, factor)
    for other, weight in zip(others, weights[1:], strict=True):
        *steps, last = _factors(weight)
        for factor in steps:
            torch._foreach_mul_(other, factor)
        torch._foreach_add_(first, other, alpha=last)


def _factors(weight: float) -> list[float]:
    """Split a weight into factors between 2^-100 and 2^100. Their partial products lie between 1 and the weight."""
    factors = []
    while not 2.0**-100 <= abs(weight) <= 2.0**100 and weight:
        factors.append(2.0**100 if abs(weight) > 1 else 2.0**-100)
        weight /= factors[-1]
    return [*factors, weight]
