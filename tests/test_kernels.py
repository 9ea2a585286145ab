"""Compare the compiled loops with stock torch and NumPy, and test the dropout masks statistically."""

import gc
import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import kernels
import loops
from bert import BertModel
from config import BertConfig
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


def traced(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> str:
    return str(torch.jit.trace(function, (x,), check_trace=False).graph)


def exported(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> str:
    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(x)

    return str(torch.export.export(Module(), (x,)).graph)


def fake(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> str:
    with FakeTensorMode() as mode:
        return "dropout" if isinstance(function(mode.from_tensor(x)), FakeTensor) else ""


TRANSFORMS = {
    "torch.jit.trace": traced,
    "torch.export": exported,
    "fake tensors": fake,
    "vmap": lambda function, x: str(torch.vmap(function, randomness="different")(x)) and "dropout",
    "torch.func.grad": lambda function, x: str(torch.func.grad(lambda y: function(y).sum())(x)) and "dropout",
    "functionalize": lambda function, x: str(torch.func.functionalize(function)(x)) and "dropout",
}


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated
@pytest.mark.parametrize("how", TRANSFORMS)
def test_a_program_that_is_traced_or_transformed_uses_torchs_own_operations(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiled loops work on memory: a trace would contain their result as a constant."""
    monkeypatch.setattr(kernels, "_loops", None)
    assert "dropout" in TRANSFORMS[how](lambda x: kernels.dropout(x, 0.5, training=True), torch.ones(3, 4))


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


def test_dropout_in_bfloat16_has_the_mask_of_float32_and_rounds_like_torch(monkeypatch) -> None:
    monkeypatch.setattr(F, "dropout", None)  # not used
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.linspace(-38, 38, 100_000)
    x = torch.cat([values.bfloat16(), torch.tensor([math.inf, -math.inf, math.nan]).bfloat16()])
    actual, expected = (kernels._Dropout.apply(y, 0.3, 5) for y in (x, x.float()))
    torch.testing.assert_close(actual, expected.bfloat16(), atol=0, rtol=0, equal_nan=True)
    assert (actual == 0).float().mean().item() == pytest.approx(0.3, abs=0.01)


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


def test_lookup_reuses_the_memory_of_a_gradient_that_nothing_refers_to() -> None:
    weight = torch.randn(50, 6).requires_grad_()

    def gradient(*ids: int) -> torch.Tensor:
        (found,) = torch.autograd.grad(kernels.lookup(weight, torch.tensor([ids]), 0).sum(), weight)
        return found

    first = gradient(3, 4)
    second = gradient(5)
    assert first.data_ptr() != second.data_ptr(), "the first is still in use"
    first.fill_(7)  # as clipping or gradient surgery may write to it
    place = first.data_ptr()
    del first
    third = gradient(6, 6)
    assert third.data_ptr() == place
    assert third[6].eq(2).all()
    assert third.count_nonzero() == 6, "nothing of the first gradient is left"
    assert second.count_nonzero() == 6


def test_lookup_keeps_no_memory_of_a_model_that_is_gone() -> None:
    weight = torch.randn(50, 6).requires_grad_()
    torch.autograd.grad(kernels.lookup(weight, torch.tensor([[3]]), 0).sum(), weight)
    assert weight in kernels._zeros_of
    before = len(kernels._zeros_of)
    del weight
    gc.collect()
    assert len(kernels._zeros_of) < before


# --- gelu -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 4.0, 30.0])
def test_gelu_and_its_gradient_equal_float64(scale: float) -> None:
    x = (scale * torch.linspace(-3, 3, 20_001)).requires_grad_()
    grad = torch.randn(len(x), generator=torch.Generator().manual_seed(0))
    exact = x.detach().double().requires_grad_()
    expected = F.gelu(exact)
    expected.backward(grad.double())
    actual = kernels.gelu(x)
    actual.backward(grad)
    torch.testing.assert_close(actual.double(), expected, atol=1e-6 * scale, rtol=1e-6)
    torch.testing.assert_close(x.grad.double(), exact.grad, atol=1e-6, rtol=1e-6)


def test_gelu_in_bfloat16_is_the_rounded_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.linspace(-6, 6, 10_001).bfloat16().requires_grad_()
    grad = torch.randn(len(x), generator=torch.Generator().manual_seed(0)).bfloat16()
    in_float32 = x.detach().float().requires_grad_()
    monkeypatch.setattr(F, "gelu", None)  # not used
    for value, factor in ((x, grad), (in_float32, grad.float())):
        kernels.gelu(value).backward(factor)
    assert torch.equal(kernels.gelu(x), kernels.gelu(in_float32).bfloat16())
    assert torch.equal(x.grad, in_float32.grad.bfloat16())


def test_gelu_of_extreme_values() -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 0.0, 1e38, -1e38, 4e-45])
    expected = torch.tensor([math.inf, math.nan, math.nan, 0.0, 1e38, 0.0, 2e-45])
    torch.testing.assert_close(kernels.gelu(x), expected, equal_nan=True)


@pytest.mark.parametrize("how", TRANSFORMS)
@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated
def test_gelu_of_a_traced_or_transformed_program_is_torchs(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_loops", None)
    # TRANSFORMS look for "dropout"
    assert "dropout" in TRANSFORMS[how](lambda x: F.dropout(kernels.gelu(x)), torch.ones(3, 4))


def random_vectors(K: int, n: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    return [torch.randn(n, generator=generator).to(dtype) for _ in range(K)]


@pytest.mark.parametrize("K", [1, 2, 3, 4])
@pytest.mark.parametrize("n", [0, 1, 7, 2047, 2048, 2049, 100_003])
def test_gramian_and_weighted_sum_equal_numpy_in_float64(K: int, n: int) -> None:
    vectors = random_vectors(K, n)
    stack = np.stack([v.numpy().astype(np.float64) for v in vectors])
    weights = torch.linspace(-1, 2, K, dtype=torch.float64)
    products, zeros = kernels.gramian([vectors])
    np.testing.assert_allclose(products.numpy(), stack @ stack.T, rtol=1e-12, atol=1e-10)
    (actual,) = kernels.weighted_sum([vectors], weights, zeros)
    assert actual is vectors[0], "the first vector is overwritten"
    np.testing.assert_allclose(actual.numpy(), weights.numpy() @ stack, rtol=1e-7, atol=1e-15)


@pytest.mark.parametrize("K", [1, 2, 3, 4])
def test_small_rows_that_share_a_loop_keep_their_own_sums(K: int) -> None:
    sizes = (3, kernels.SMALL, 1, 384, kernels.SMALL - 1)
    rows = [random_vectors(K, n) for n in sizes]
    weights = torch.linspace(-1, 2, K, dtype=torch.float64)
    expected = [sum(w * v.double() for w, v in zip(weights.tolist(), row, strict=True)).float() for row in rows]
    joined = products_in_float64(rows)
    products, zeros = kernels.gramian(rows)
    np.testing.assert_allclose(products.numpy(), joined, rtol=1e-12, atol=1e-9)
    sums = kernels.weighted_sum(rows, weights, zeros)
    torch.testing.assert_close(sums, expected)
    assert all(total is row[0] for total, row in zip(sums, rows, strict=True))


@pytest.fixture
def switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute on the CPU as on CUDA."""
    monkeypatch.setattr(kernels, "runs_here", lambda *tensors: False)


def products_in_float64(rows: list[list[torch.Tensor]]) -> np.ndarray:
    """The Gram matrix by NumPy: (K, K)."""
    tasks = [np.concatenate([v.double().numpy().ravel() for v in task]) for task in zip(*rows, strict=True)]
    return np.array([[a @ b for b in tasks] for a in tasks])


def cosines(products: np.ndarray) -> np.ndarray:
    norms = np.sqrt(np.diag(products))
    return products / np.outer(norms, norms)


@pytest.mark.usefixtures("switched_off")
@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float32, 1e-6), (torch.float64, 1e-12), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)]
)
def test_gramian_and_weighted_sum_are_the_same_without_the_compiled_loops(
    dtype: torch.dtype, rtol: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "CHUNK", 2**16)
    shapes = (70_001, 3, 0, 65_536, 50_000, 15_536)  # one is cut, and the last two fill a chunk exactly
    rows = [[v.view(1, n) for v in random_vectors(3, n, dtype)] for n in shapes]
    expected = products_in_float64(rows)
    weights = [1.5, -0.25, 2.0]
    sums = [sum(w * v.double() for w, v in zip(weights, row, strict=True)) for row in rows]
    products, zeros = kernels.gramian(rows)
    assert products.dtype == torch.float64
    assert zeros == [None] * len(rows)
    cosine, norm = (1e-13, 1e-13) if dtype == torch.float64 else (3e-8, 2e-6)
    np.testing.assert_allclose(cosines(products.numpy()), cosines(expected), rtol=0, atol=cosine)
    np.testing.assert_allclose(products.numpy().diagonal(), expected.diagonal(), rtol=norm)
    combined = kernels.weighted_sum(rows, torch.tensor(weights, dtype=torch.float64), zeros)
    for actual, wanted, row in zip(combined, sums, rows, strict=True):
        torch.testing.assert_close(actual.double(), wanted, rtol=rtol, atol=rtol)
        assert actual is row[0]


@pytest.mark.usefixtures("switched_off")
@pytest.mark.parametrize("spread", [0.0, 2.0])
def test_gramian_without_the_compiled_loops_has_cosines_within_a_rounding_error(spread: float) -> None:
    """A sum in float32 loses small products beside a large one: plain sums are wrong by far more than 1e-7."""
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randn(2**22, generator=generator) for _ in range(3)]
    g = noise[0] * torch.exp(spread * torch.randn(2**22, generator=generator))  # lengths as different as gradients'
    row = [g, noise[1] - 0.1 * g, 1e-4 * (noise[2] + 0.05 * g)]
    actual, expected = (
        cosines(products) for products in (kernels.gramian([row])[0].numpy(), products_in_float64([row]))
    )
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-7 if spread else 2e-8)


@pytest.mark.usefixtures("switched_off")
def test_gramian_never_uses_tf32_or_autocast_and_restores_the_users_setting() -> None:
    class Watch(Count):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "bmm" in str(func):
                seen.append((torch.get_float32_matmul_precision(), args[0].dtype))
            return super().__torch_dispatch__(func, types, args, kwargs)

    seen: list[tuple[str, torch.dtype]] = []
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        with torch.autocast("cpu", torch.bfloat16), Watch():
            kernels.gramian([random_vectors(2, 10)])
        assert seen == [("highest", torch.float32)]
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_off_the_cpu_a_bert_base_needs_few_launches_and_no_number_from_the_device() -> None:
    """On meta, reading a number fails. bert-base: 110 M weights in 199 tensors."""
    with torch.device("meta"):
        sizes = [p.numel() for p in BertModel(BertConfig()).parameters()]
    rows = [[torch.empty(n, device="meta") for _ in range(3)] for n in sizes]
    with Count() as count:
        products, zeros = kernels.gramian(rows)
    assert products.shape == (3, 3)
    assert products.device.type == "meta"
    assert count.ops["bmm"] == 7
    assert sum(count.ops.values()) < 150, count.ops  # one product per tensor or million elements took 1,817
    with Count() as count:
        kernels.weighted_sum(rows, torch.ones(3, dtype=torch.float64), zeros)
    on_device = {name: number for name, number in count.ops.items() if name.startswith("_foreach")}
    assert on_device == {"_foreach_mul_": 1, "_foreach_add_": 2}
    assert sum(count.ops.values()) <= 4, "and the weights, on the CPU"


def test_gramian_accepts_strided_tensors_of_any_shape() -> None:
    x, y = torch.randn(40, 30), torch.randn(30, 40).t()
    assert not kernels.runs_here(x, y)
    expected = torch.tensor([[(a.double() * b.double()).sum() for b in (x, y)] for a in (x, y)])
    products, zeros = kernels.gramian([[x, y]])
    torch.testing.assert_close(products, expected, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(kernels.gramian([[x, y.contiguous()]])[0], expected)
    total = x + 2 * y
    torch.testing.assert_close(kernels.weighted_sum([[x, y]], torch.tensor([1.0, 2.0]).double(), zeros), [total])


def test_gramian_does_not_depend_on_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    vectors, results = random_vectors(3, 300_001), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(kernels.gramian([vectors])[0])
    torch.set_num_threads(before)
    assert torch.equal(*results)


@pytest.fixture(params=["compiled", "torch"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the compiled loops, and as on CUDA."""
    if request.param == "torch":
        monkeypatch.setattr(kernels, "runs_here", lambda *tensors: False)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_gramian_and_weighted_sum_propagate_infinities_and_nans(bad: float) -> None:
    vectors = random_vectors(2, 5000)
    vectors[1][4321] = bad
    products, zeros = kernels.gramian([vectors])
    assert not products[1, 1].isfinite()
    assert products[0, 0].isfinite()
    (total,) = kernels.weighted_sum([vectors], torch.ones(2, dtype=torch.float64), zeros)
    assert total.isfinite().sum() == 4999
    assert not total[4321].isfinite()


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("pair", [(3e38, 1e-44), (1e-44, 3e38), (1e30, 1e-30), (1.0, 1e-45), (3e38, 2e38)])
def test_gramian_and_weighted_sum_cover_the_whole_range_of_float32(pair: tuple[float, float]) -> None:
    vectors = [torch.full((3000,), value) for value in pair]  # the squares are outside float32
    values = np.array([float(v[0]) for v in vectors])
    products, zeros = kernels.gramian([vectors])
    # equal numbers are the worst case of a float32 sum: its roundings all go the same way
    np.testing.assert_allclose(products.numpy(), 3000 * np.outer(values, values), rtol=1e-5)
    weights = np.array([0.5, -3.0]) / values  # up to 1e45
    (actual,) = kernels.weighted_sum([vectors], torch.from_numpy(weights), zeros)
    np.testing.assert_allclose(actual.numpy(), -2.5, rtol=1e-6)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("weights", [(0.0, 1e39), (1e39, 0.0), (1e39, -1e39), (1e75, 1e75)])
def test_weights_beyond_float32_are_applied_to_gradients_that_need_them(weights: tuple[float, float]) -> None:
    tiny = [torch.tensor([1e-45, 3e-39, -5e-40]), torch.tensor([2e-43, -1e-39, 0.0])]
    wanted = weights[0] * tiny[0].double() + weights[1] * tiny[1].double()
    _, zeros = kernels.gramian([tiny])
    (actual,) = kernels.weighted_sum([tiny], torch.tensor(weights, dtype=torch.float64), zeros)
    torch.testing.assert_close(actual, wanted.float(), rtol=1e-6, atol=0)


@pytest.mark.usefixtures("either_way")
def test_zero_gradients_have_a_gramian_of_zeros() -> None:
    vectors = [torch.zeros(10), torch.ones(10)]
    products, _ = kernels.gramian([vectors, [torch.zeros(0), torch.zeros(0)]])
    assert products.tolist() == [[0, 0], [0, 10]]


def test_blocks_that_are_zero_in_all_gradients_are_detected_and_skipped() -> None:
    generator = torch.Generator().manual_seed(0)
    n = kernels.SMALL + 2 * loops.BLOCK + 7  # in a smaller row nothing is skipped
    rows = torch.zeros(2, n)
    rows[0, loops.BLOCK] = 1e-30  # its square is below the range of float32, but not zero
    rows[1, 3 * loops.BLOCK :] = torch.randn(n - 3 * loops.BLOCK, generator=generator)
    weights = torch.tensor([3.0, -2.0], dtype=torch.float64)
    expected = 3 * rows[0] - 2 * rows[1]
    vectors = [row.clone() for row in rows]
    _, zeros = kernels.gramian([vectors])
    assert zeros[0].tolist() == [True, False, True] + [False] * (len(zeros[0]) - 3)
    torch.testing.assert_close(kernels.weighted_sum([vectors], weights, zeros), [expected])
    touched = [torch.ones(n), torch.zeros(n)]
    kernels.weighted_sum([touched], weights, zeros)
    assert (touched[0][: loops.BLOCK] == 1).all(), "a block marked as zero is not touched"
    assert (touched[0][loops.BLOCK : 2 * loops.BLOCK] == 3).all()
