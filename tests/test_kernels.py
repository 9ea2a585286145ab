"""Compare the compiled loops with stock torch and NumPy, and test the dropout masks statistically."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import kernels
import loops
from optimizer import AdamW


class Count(TorchDispatchMode):
    """Counts the operations by name, except views and the profiler's marks: on CUDA, each launches kernels."""

    def __init__(self):
        super().__init__()
        self.ops = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and "record_function" not in str(func):
            self.ops[func._overloadpacket.__name__] += 1
        return func(*args, **kwargs or {})


def test_the_compiled_loops_support_dense_float32_on_the_cpu_outside_torch_compile(monkeypatch) -> None:
    x = torch.ones(4, 3)
    assert kernels.runs_here(x)
    assert kernels.runs_here(x, torch.ones(2))
    for other in (x.t(), x[:, :2], x.double(), x.bfloat16(), x.to("meta")):
        assert not kernels.runs_here(other)
        assert not kernels.runs_here(x, other), "one unsupported tensor is enough"
        assert not kernels.runs_here(other, x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not kernels.runs_here(x)


def test_adamw_uses_torch_for_a_strided_gradient(monkeypatch) -> None:
    loop, sizes = kernels.adamw, []
    monkeypatch.setattr(kernels, "adamw", lambda theta, *rest: (sizes.append(theta.numel()), loop(theta, *rest)))

    def train(strided: bool) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(6, 4, generator=generator)) for _ in range(2)]
        parameters.append(torch.nn.Parameter(torch.randn(5, generator=generator)))
        update = AdamW(parameters, lr=1e-2, weight_decay=0.1)
        for _ in range(3):
            for p in parameters:
                p.grad = torch.randn(p.shape, generator=generator)
            if strided:
                parameters[0].grad = parameters[0].grad.t().contiguous().t()  # the same values, stored by column
            update.step()
        return parameters

    actual = train(strided=True)
    assert sizes == [24, 5] * 3, "the other parameters still use the compiled loop"
    monkeypatch.setattr(kernels, "runs_here", lambda *tensors: False)
    for a, b in zip(actual, train(strided=False), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9])
def test_dropout_zeroes_the_share_p_and_keeps_the_mean(p: float) -> None:
    torch.manual_seed(0)
    n = 1_000_000
    y = kernels.dropout(torch.ones(n), p, training=True)
    assert set(y.unique().tolist()) == {0.0, float(np.float32(1 / (1 - p)))}
    error = math.sqrt(p * (1 - p) / n)
    assert abs((y == 0).float().mean().item() - p) < 4 * error


def test_dropout_masks_are_uncorrelated_along_rows_between_calls_and_between_seeds() -> None:
    torch.manual_seed(0)
    n = 1_000_000
    first, second = (kernels.dropout(torch.ones(n), 0.5, True).sub(1) for _ in range(2))  # -1 or +1, mean 0
    for lag in (1, 2, 3, 8, 32, 64, 384, 1024, 4096, 65536):
        assert abs((first[:-lag] * first[lag:]).mean().item()) < 4.5 / math.sqrt(n), lag
    assert abs((first * second).mean().item()) < 4.5 / math.sqrt(n)
    # consecutive seeds give masks that are as uncorrelated as those of random seeds
    near = [kernels._Dropout.apply(torch.ones(n), 0.5, seed).sub(1) for seed in (7, 8, 7 + 2**32)]
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert abs((near[i] * near[j]).mean().item()) < 4.5 / math.sqrt(n)


def test_dropout_does_not_depend_on_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    masks = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        masks.append(kernels._Dropout.apply(torch.ones(100_003), 0.3, 12345))
    torch.set_num_threads(before)
    assert torch.equal(*masks)


def test_dropout_gradients_use_the_mask_of_the_forward_pass() -> None:
    x = torch.randn(50, 40, requires_grad=True)
    torch.manual_seed(3)
    y = kernels.dropout(x, 0.4, True)
    mask = torch.where(y == 0, 0.0, 1 / 0.6)
    weights = torch.randn_like(y)
    (gradient,) = torch.autograd.grad((y * weights).sum(), x, create_graph=True)
    torch.testing.assert_close(gradient, weights * mask)
    # twice differentiable: the second derivative uses the same mask
    (y2,) = torch.autograd.grad((kernels._Dropout.apply(x, 0.4, 9) ** 2).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(y2.sum(), x)
    again = kernels._Dropout.apply(torch.ones_like(x), 0.4, 9)
    torch.testing.assert_close(second, 2 * again**2)


def test_dropout_follows_the_seed_and_is_the_identity_in_eval_mode_or_at_zero() -> None:
    x = torch.randn(7, 5)
    results = []
    for _ in range(2):
        torch.manual_seed(11)
        results.append(kernels.dropout(x, 0.5, True))
    assert torch.equal(*results)
    assert kernels.dropout(x, 0.5, False) is x
    assert kernels.dropout(x, 0.0, True) is x
    assert not kernels.dropout(x, 1.0, True).any()


def test_dropout_accepts_strided_input_and_other_dtypes() -> None:
    x = torch.ones(6, 8).t()
    assert kernels.dropout(x, 0.5, True).shape == (8, 6)
    assert kernels.dropout(torch.ones(4, dtype=torch.bfloat16), 0.5, True).dtype == torch.bfloat16


def test_dropout_of_a_strided_input_equals_that_of_its_contiguous_copy(monkeypatch) -> None:
    def forbidden(*args: object) -> None:
        raise AssertionError("did not use the compiled loop")

    monkeypatch.setattr(F, "dropout", forbidden)
    strided = torch.randn(30, 50).t().requires_grad_()
    copy = strided.detach().contiguous().requires_grad_()
    factor = torch.randn(30, 50)
    results = []
    for x in (strided, copy):
        torch.manual_seed(5)
        y = kernels.dropout(x, 0.3, True)
        (y.t() * factor).sum().backward()  # the gradient of y is strided, too
        results.append(y)
    assert torch.equal(*results)
    assert torch.equal(strided.grad, copy.grad)
    torch.testing.assert_close(copy.grad, torch.where(results[1] == 0, 0.0, factor.t() / 0.7))


@pytest.mark.parametrize("bit", [30, 31, 32, 33, 61])
def test_every_bit_of_a_dropout_seed_changes_the_mask(bit: int) -> None:
    first, second = (kernels._Dropout.apply(torch.ones(10_000), 0.5, seed) for seed in (7, 7 + 2**bit))
    assert 0.4 < (first != second).float().mean().item() < 0.6


def test_dropout_draws_seeds_from_more_than_32_bits(monkeypatch) -> None:
    seeds = []
    monkeypatch.setattr(kernels._Dropout, "apply", lambda x, p, seed: seeds.append(seed))
    for _ in range(20):
        kernels.dropout(torch.ones(2), 0.5, True)
    assert 2**48 < max(seeds) < 2**63
    assert len(set(seeds)) == 20


def test_lookup_equals_torchs_embedding_forward_and_backward() -> None:
    ids = torch.tensor([[3, 1, 0, 3], [3, 9, 0, 0]])  # a repeated row, and padding
    weights = [torch.randn(10, 6, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in range(2)]
    factor = torch.randn(2, 4, 6)
    actual = kernels.lookup(weights[0], ids, 0)
    expected = F.embedding(ids, weights[1], padding_idx=0)
    assert torch.equal(actual, expected)
    (actual * factor).sum().backward()
    (expected * factor).sum().backward()
    torch.testing.assert_close(weights[0].grad, weights[1].grad)
    assert not weights[0].grad[0].any(), "the padding row gets no gradient"


@pytest.mark.parametrize("kind", ["float64", "strided"])
def test_lookup_without_the_compiled_loops_gives_the_padding_row_no_gradient(kind: str) -> None:
    matrix = torch.randn(6, 10, generator=torch.Generator().manual_seed(0)).t()
    weight = (matrix.contiguous().double() if kind == "float64" else matrix).requires_grad_()
    assert not kernels.runs_here(weight)
    ids = torch.tensor([[3, 1, 2, 3], [3, 9, 2, 2]])
    actual = kernels.lookup(weight, ids, 2)
    assert torch.equal(actual, weight[ids]), "the padding row is looked up like any other"
    actual.sum().backward()
    counts = torch.tensor([0, 1, 0, 3, 0, 0, 0, 0, 0, 1], dtype=weight.dtype)  # occurrences of each row, except padding
    assert torch.equal(weight.grad, counts[:, None].expand(10, 6))


def random_vectors(K: int, n: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    return [torch.randn(n, generator=generator).to(dtype) for _ in range(K)]


@pytest.mark.parametrize("K", [1, 2, 3, 4])
@pytest.mark.parametrize("n", [0, 1, 7, 2047, 2048, 2049, 100_003])
def test_gramian_and_weighted_sum_equal_numpy_in_float64(K: int, n: int) -> None:
    vectors = random_vectors(K, n)
    stack = np.stack([v.numpy().astype(np.float64) for v in vectors])
    weights = torch.linspace(-1, 2, K, dtype=torch.float64)
    np.testing.assert_allclose(kernels.gramian(vectors)[0].numpy(), stack @ stack.T, rtol=1e-12, atol=1e-10)
    actual = kernels.weighted_sum(vectors, weights)
    assert actual is vectors[0], "the first vector is overwritten"
    np.testing.assert_allclose(actual.numpy(), weights.numpy() @ stack, rtol=1e-7, atol=1e-15)


@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float32, 1e-6), (torch.float64, 1e-12), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)]
)
def test_gramian_and_weighted_sum_are_the_same_without_the_compiled_loops(
    dtype: torch.dtype, rtol: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors = random_vectors(3, 2**20 + 5, dtype)  # more than one piece
    compiled = [v.to(torch.float32, copy=True) for v in vectors]
    weights = torch.tensor([1.5, -0.25, 2.0], dtype=torch.float64)
    expected = kernels.gramian(compiled)[0], kernels.weighted_sum(compiled, weights)
    monkeypatch.setattr(kernels, "runs_here", lambda *tensors: False)
    actual = kernels.gramian(vectors)[0], kernels.weighted_sum(vectors, weights)
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-10, atol=1e-8)
    torch.testing.assert_close(actual[1].float(), expected[1], rtol=rtol, atol=rtol)
    assert actual[1] is vectors[0]


def test_gramian_accepts_strided_tensors_of_any_shape() -> None:
    x, y = torch.randn(40, 30), torch.randn(30, 40).t()
    assert not kernels.runs_here(x, y)
    expected = torch.tensor([[(a.double() * b.double()).sum() for b in (x, y)] for a in (x, y)])
    torch.testing.assert_close(kernels.gramian([x, y])[0], expected)
    torch.testing.assert_close(kernels.gramian([x, y.contiguous()])[0], expected)
    total = x + 2 * y
    torch.testing.assert_close(kernels.weighted_sum([x, y], torch.tensor([1.0, 2.0]).double()), total)


def test_gramian_does_not_depend_on_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    vectors, results = random_vectors(3, 300_001), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(kernels.gramian(vectors)[0])
    torch.set_num_threads(before)
    assert torch.equal(*results)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_gramian_and_weighted_sum_propagate_infinities_and_nans(bad: float) -> None:
    vectors = random_vectors(2, 5000)
    vectors[1][4321] = bad
    assert not kernels.gramian(vectors)[0][1, 1].isfinite()
    assert not kernels.weighted_sum(vectors, torch.ones(2, dtype=torch.float64))[4321].isfinite()


def test_gramian_and_weighted_sum_cover_the_whole_range_of_float32() -> None:
    huge, tiny = torch.full((3000,), 3e38), torch.full((3000,), 1e-44)  # their squares are outside float32
    expected = np.array([float(huge[0]), float(tiny[0])])
    np.testing.assert_allclose(
        kernels.gramian([huge, tiny])[0].numpy(), 3000 * np.outer(expected, expected), rtol=1e-12
    )
    actual = kernels.weighted_sum([huge, tiny], torch.tensor([1e-40, 1e44], dtype=torch.float64))
    np.testing.assert_allclose(actual.numpy(), 1e-40 * expected[0] + 1e44 * expected[1], rtol=1e-6)


def test_blocks_that_are_zero_in_all_gradients_are_detected_and_skipped() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.zeros(2, 5 * loops.BLOCK + 7)
    rows[0, loops.BLOCK] = 1e-30  # its square is below the range of float32, but not zero
    rows[1, 3 * loops.BLOCK :] = torch.randn(2 * loops.BLOCK + 7, generator=generator)
    weights = torch.tensor([3.0, -2.0], dtype=torch.float64)
    expected = 3 * rows[0] - 2 * rows[1]
    vectors = [row.clone() for row in rows]
    _, zeros = kernels.gramian(vectors)
    assert zeros.tolist() == [True, False, True, False, False, False]
    torch.testing.assert_close(kernels.weighted_sum(vectors, weights, zeros), expected)
    touched = [torch.ones(5 * loops.BLOCK + 7), torch.zeros(5 * loops.BLOCK + 7)]
    kernels.weighted_sum(touched, weights, zeros)
    assert (touched[0][: loops.BLOCK] == 1).all(), "a block marked as zero is not touched"
    assert (touched[0][loops.BLOCK : 2 * loops.BLOCK] == 3).all()
