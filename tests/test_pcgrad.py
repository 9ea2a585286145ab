"""Compare gradient combination with Algorithm 1, torchjd and closed forms; test properties that all methods share."""

import argparse
import io
import math

import numpy as np
import pytest
import torch
import torchjd.aggregation as torchjd
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import kernels
import pcgrad
from bert import BertModel
from config import BertConfig
from flags import ALWAYS, ArgumentParser
from optimizer import AdamW
from pcgrad import COMBINERS, CAGrad, GradientCombiner, GradVac, Method, PCGrad
from utils import InputError

SURGERIES = sorted(set(COMBINERS) - {"sum"})
every_combiner = pytest.mark.parametrize("name", sorted(COMBINERS))
every_surgery = pytest.mark.parametrize("name", SURGERIES)


def arguments(*flags: str) -> argparse.Namespace:
    parser = ArgumentParser("test", "")
    parser.section("test")("--seed", type=int, default=0, needs=ALWAYS)
    pcgrad.add_arguments(parser)
    return parser.parse_args(flags)


def method(name: str, *flags: str) -> Method | None:
    return COMBINERS[name](arguments("--combiner", name, *flags))


def vectors(K: int, n: int = 40, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Random gradients; every second one points away from the first, so that some pairs conflict and some agree."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(n, generator=generator, dtype=torch.float64) for _ in range(K)]
    return [((1 + k) * (row + (-1) ** k * 0.8 * rows[0])).to(dtype) for k, row in enumerate(rows)]


def take_step(combiner: GradientCombiner, gradients: dict[str, Tensor]) -> Tensor:
    """Run one step in which each task's gradient for the only shared parameter is the given vector."""
    (p,) = combiner.shared
    for task, gradient in gradients.items():
        combiner.backward(task, (p * gradient).sum())
    combiner.write_gradients()
    written, p.grad = p.grad, None
    return written


def combined(how: Method | None, *gradients: Tensor) -> Tensor:
    p = nn.Parameter(torch.zeros_like(gradients[0]))
    return take_step(GradientCombiner([p], how), {f"task{k}": g for k, g in enumerate(gradients)})


class Model(nn.Module):
    """Three tasks on a shared encoder: b and c use `middle`, only c uses `last`, and none uses `spare`."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(56)  # a conflicts with b and with c
        self.first, self.middle, self.last, self.spare = (nn.Linear(6, 6, dtype=dtype) for _ in range(4))
        self.heads = nn.ModuleDict({task: nn.Linear(6, 2, dtype=dtype) for task in "abc"})
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator))

    @property
    def shared(self) -> list[nn.Parameter]:
        return [p for layer in (self.first, self.middle, self.last, self.spare) for p in layer.parameters()]

    def loss(self, task: str, seed: int = 0) -> Tensor:
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed + ord(task))).to(self.first.weight.dtype)
        x = self.first(x).tanh()
        x = self.middle(x).tanh() if task in "bc" else x
        x = self.last(x).tanh() if task == "c" else x
        return (self.heads[task](x) ** 2).mean()

    def flat_gradient(self, task: str) -> np.ndarray:
        gradients = torch.autograd.grad(self.loss(task), self.shared, materialize_grads=True, allow_unused=True)
        return torch.cat([g.flatten() for g in gradients]).double().numpy()


def flat(parameters: list[nn.Parameter]) -> np.ndarray:
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    return torch.cat([g.flatten() for g in gradients]).double().numpy()


# --- equality with independent references -----------------------------------------------------------------------------


def algorithm_1(gradients: list[np.ndarray], seed: int) -> np.ndarray:
    """Algorithm 1 of Yu et al. 2020, line by line, on plain vectors."""
    generator = torch.Generator().manual_seed(seed)
    total = np.zeros_like(gradients[0])
    for i, g_i in enumerate(gradients):
        current = g_i.copy()
        for j in torch.randperm(len(gradients), generator=generator).tolist():
            if j != i and current @ gradients[j] < 0:
                current = current - (current @ gradients[j]) / (gradients[j] @ gradients[j]) * gradients[j]
        total += current
    return total


@pytest.mark.parametrize("K", [2, 3, 4, 6])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_pcgrad_is_algorithm_1_on_plain_vectors(K: int, seed: int) -> None:
    gradients = vectors(K, n=10, seed=seed, dtype=torch.float64)
    expected = algorithm_1([g.numpy() for g in gradients], seed)
    assert not np.allclose(expected, sum(gradients).numpy()), "there are conflicts"
    np.testing.assert_allclose(combined(PCGrad(seed), *gradients).numpy(), expected, rtol=1e-10, atol=1e-12)


def test_pcgrad_is_algorithm_1_where_many_projections_turn_a_gradient_against_itself() -> None:
    for seed in range(60):  # five gradients in three dimensions: sometimes a result opposes its own original
        gradients = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        actual = PCGrad(seed).weights(gradients @ gradients.T, tuple("abcde")) @ gradients
        np.testing.assert_allclose(actual.numpy(), algorithm_1(list(gradients.numpy()), seed), rtol=1e-8, atol=1e-10)


def test_pcgrad_on_a_model_is_algorithm_1_on_the_flat_shared_gradients() -> None:
    for seed in range(4):  # four different random orders
        model = Model()
        gradients = [model.flat_gradient(task) for task in "abc"]
        expected = algorithm_1(gradients, seed)
        assert not np.allclose(expected, sum(gradients), rtol=1e-2, atol=1e-3), "there are conflicts"
        combiner = GradientCombiner(model.shared, PCGrad(seed))
        for task in "abc":
            combiner.backward(task, model.loss(task))
        combiner.write_gradients()
        np.testing.assert_allclose(flat(model.shared), expected, rtol=1e-4, atol=1e-6)


def test_pcgrad_on_bert_is_algorithm_1_on_the_flat_gradients() -> None:
    torch.manual_seed(0)
    bert = BertModel(BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64))
    bert.eval()
    ids = torch.randint(1000, 2000, (3, 4, 9))
    directions = torch.randn(3, 4, 32)
    directions[1] -= 2 * directions[0]

    def loss(k: int) -> Tensor:
        return (bert(ids[0], torch.ones_like(ids[0]))["pooler_output"] * directions[k]).sum()

    gradients = []
    for k in range(3):
        loss(k).backward()
        gradients.append(flat(list(bert.parameters())))
        bert.zero_grad()
    combiner = GradientCombiner(bert.parameters(), PCGrad(7))
    for k, task in enumerate(("para", "sst", "sts")):
        combiner.backward(task, loss(k))
    combiner.write_gradients()
    expected = algorithm_1(gradients, 7)
    assert not np.allclose(expected, sum(gradients), rtol=1e-2, atol=1e-4), "there are conflicts"
    np.testing.assert_allclose(flat(list(bert.parameters())), expected, rtol=1e-4, atol=1e-5)


def test_pcgrad_of_two_conflicting_tasks_is_the_sum_of_both_projections() -> None:
    g, h = torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 1.0])
    # g - (g.h / h.h) h = (0.5, 0.5); h - (h.g / g.g) g = (0, 1)
    assert combined(PCGrad(0), g, h).tolist() == [0.5, 1.5]
    assert combined(PCGrad(0), g, -h).tolist() == [2.0, -1.0], "without a conflict it is the plain sum"


@pytest.mark.parametrize("K", [2, 3, 5])
def test_pcgrad_equals_torchjd(K: int) -> None:
    for seed in range(3):
        gradients = vectors(K, seed=seed, dtype=torch.float64)
        torch.manual_seed(seed)
        torch.testing.assert_close(combined(PCGrad(seed), *gradients), torchjd.PCGrad()(torch.stack(gradients)))


@pytest.mark.parametrize("reverse", [False, True])
def test_gradvac_equals_torchjd_over_many_steps(reverse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fixed_order(n: int, generator: torch.Generator | None = None) -> Tensor:
        return torch.arange(n).flip(0) if reverse else torch.arange(n)

    monkeypatch.setattr(torch, "randperm", fixed_order)  # torchjd permutes the n - 1 others, we permute all n
    ours, theirs = GradVac(0, beta=0.2), torchjd.GradVac(beta=0.2, eps=0.0)
    changed = 0
    for seed in range(20):
        gradients = vectors(3, seed=seed, dtype=torch.float64)
        gradients[2] += 3 * gradients[0]  # these two agree, so their target rises above zero
        actual = combined(ours, *gradients)
        torch.testing.assert_close(actual, theirs(torch.stack(gradients)))
        changed += not torch.allclose(actual, sum(gradients))
    assert changed > 5
    assert ours.targets["task0 task2"] > 0.3
    assert all(one != other for one, other in map(str.split, ours.targets)), "no task is compared with itself"


@pytest.mark.parametrize("K", [2, 3, 4])
def test_mgda_is_k_times_torchjds_shortest_vector(K: int) -> None:
    for seed in range(3):
        gradients = vectors(K, seed=seed, dtype=torch.float64)
        actual = combined(method("mgda"), *gradients)
        expected = K * torchjd.MGDA(epsilon=1e-9, max_iters=2000)(torch.stack(gradients))
        torch.testing.assert_close(actual, expected, rtol=0, atol=0.05 * float(expected.norm()))  # theirs stops early
        assert actual.norm() <= expected.norm() * (1 + 1e-9)


def test_mgda_of_two_tasks_equals_the_closed_form() -> None:
    for seed in range(5):
        g, h = vectors(2, n=3, seed=seed, dtype=torch.float64)
        share = float(((h - g) @ h / ((h - g) @ (h - g))).clamp(0, 1))  # Sener & Koltun 2018, equation (4)
        torch.testing.assert_close(combined(method("mgda"), g, h), 2 * (share * g + (1 - share) * h))


def test_mgda_agrees_with_every_task_and_no_vector_of_the_hull_is_shorter() -> None:
    for seed in range(20):
        gradients = torch.stack(vectors(4, n=6, seed=seed, dtype=torch.float64))
        actual = combined(method("mgda"), *gradients) / 4
        # <g_k, d> >= |d|^2 for all k is true for the shortest vector in the hull and for no other vector in it
        assert (gradients @ actual >= actual @ actual - 1e-7).all()


@pytest.mark.parametrize("c", [0.1, 0.4, 0.9, 2.0])
def test_cagrad_is_the_best_vector_of_its_ball(c: float) -> None:
    """Strong duality: <g_w, g_0> + c |g_0| |g_w| bounds the worst inner product of every d in the ball, for every w."""
    for seed in range(20):
        gradients = torch.stack(vectors(3, n=6, seed=seed, dtype=torch.float64))
        mean = gradients.mean(dim=0)
        radius = c * mean.norm()
        actual = combined(CAGrad(c), *gradients) / 3
        assert (actual - mean).norm() <= radius * (1 + 1e-9)
        w = torch.linalg.lstsq(gradients.T, (actual - mean)[:, None]).solution[:, 0]
        w /= w.sum()
        assert (w > -1e-9).all()
        bound = w @ gradients @ mean + radius * (w @ gradients).norm()
        torch.testing.assert_close((gradients @ actual).min(), bound, rtol=1e-6, atol=1e-8)


def test_cagrad_with_radius_zero_is_the_plain_sum() -> None:
    gradients = vectors(3)
    torch.testing.assert_close(combined(CAGrad(0), *gradients), sum(gradients))


def test_cagrad_of_gradients_that_cancel_is_the_plain_sum() -> None:
    """The best g_w is zero up to rounding errors, which must not be scaled up to the size of the gradients."""
    g, h, k = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(combined(CAGrad(0.4), g, h, -g - h, k), k, rtol=0, atol=1e-5)


@pytest.mark.parametrize("beta", [0.01, 0.5])
def test_gradvac_brings_the_cosine_to_the_target(beta: float) -> None:
    g, h = torch.tensor([1.0, 0.0]).double(), torch.tensor([0.0, 2.0]).double()
    how = GradVac(0, beta)
    how.targets = {"task0 task1": 0.6, "task1 task0": -1.0}
    moved = combined(how, g, h) - h  # the target of task1 is already met, so h does not change
    assert float(moved @ h / moved.norm() / h.norm()) == pytest.approx(0.6)
    assert float(moved[0]) == 1.0, "only a multiple of h is added"


def test_gradvac_moves_its_target_at_every_step_whether_it_acts_or_not() -> None:
    how = GradVac(0, beta=0.25)
    g = torch.tensor([1.0, 0.0])
    expected = 0.0
    for h in ([1.0, 0.0], [0.6, 0.8], [-0.6, 0.8], [0.0, 1.0]):  # cosines 1, 0.6, -0.6, 0: acts on the last two
        combined(how, g, torch.tensor(h))
        expected = 0.75 * expected + 0.25 * h[0]
        assert how.targets["task0 task1"] == pytest.approx(expected, abs=1e-6)
        assert how.targets["task1 task0"] == pytest.approx(expected, abs=1e-6)


def test_gradvac_without_memory_is_pcgrad() -> None:
    gradients = vectors(4)
    torch.testing.assert_close(combined(GradVac(3, beta=0.0), *gradients), combined(PCGrad(3), *gradients))


# --- properties of every method ---------------------------------------------------------------------------------------


@every_combiner
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_task_alone_keeps_its_gradient(name: str, dtype: torch.dtype) -> None:
    (g,) = vectors(1, dtype=dtype)
    assert torch.equal(combined(method(name), g), g)


@every_combiner
def test_orthogonal_tasks_of_equal_size_do_not_disturb_each_other(name: str) -> None:
    actual = combined(method(name), *torch.eye(3))
    assert (actual > 0).all()
    torch.testing.assert_close(actual / actual[0], torch.ones(3))


@pytest.mark.parametrize("name", ["gradvac", "mgda", "pcgrad", "sum"])
def test_equal_gradients_give_their_sum(name: str) -> None:
    (g,) = vectors(1)
    torch.testing.assert_close(combined(method(name), g, g, g), 3 * g)


@every_combiner
@pytest.mark.parametrize("scale", [2.0**-60, 2.0**16, 2.0**60])
def test_scaling_all_gradients_scales_the_result_and_nothing_else(name: str, scale: float) -> None:
    one, other = method(name), method(name)
    for seed in range(3):  # several steps, as gradvac has state
        gradients = vectors(3, seed=seed)
        torch.testing.assert_close(combined(other, *(g * scale for g in gradients)) / scale, combined(one, *gradients))


@every_combiner
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_rank_deficient_and_extreme_gradients_give_finite_results(name: str, dtype: torch.dtype) -> None:
    g, h, k = vectors(3, dtype=dtype)
    zero = torch.zeros_like(g)
    cases = {
        "all zero": (zero, zero, zero),
        "one zero": (g, zero, h),
        "equal": (g, g, g),
        "opposite": (g, -g),
        "opposite and a third": (g, -g, h),
        "balanced": (g, h, -g - h),
        "balanced and a fourth": (g, h, -g - h, k),
        "collinear": (g, -2 * g, 1e-3 * g),
        "nearly opposite": (g, -g + 1e-6 * h, h),
        "huge": (g * 1e36, h * 1e36, -g * 1e36),
        "tiny": (g * 1e-38, h * 1e-38, -g * 1e-38),
        "huge and tiny": (g * 1e36, -g * 1e-38, h),
    }
    for label, gradients in cases.items():
        how = method(name)
        for _ in range(3):
            actual = combined(how, *gradients)
            assert actual.isfinite().all(), label
            # each method adds at most a multiple of the longest gradient
            assert actual.double().norm() <= 50 * max(g.double().norm() for g in gradients), label
            assert all(math.isfinite(t) for t in getattr(how, "targets", {}).values()), label


@every_combiner
def test_the_order_of_the_backward_passes_does_not_matter(name: str) -> None:
    gradients = dict(zip("abc", vectors(3), strict=True))
    results = []
    for order in ("abc", "cab", "bca"):
        combiner = GradientCombiner([nn.Parameter(torch.zeros(40))], method(name))
        results.append(take_step(combiner, {task: gradients[task] for task in order}))
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(results[0], results[2])


@every_surgery
def test_float32_in_the_compiled_loops_and_float64_in_torch_agree(name: str) -> None:
    results = []
    for dtype in (torch.float32, torch.float64):
        model = Model(dtype)
        combiner = GradientCombiner(model.shared, method(name))
        for task in "abc":
            combiner.backward(task, model.loss(task))
        combiner.write_gradients()
        results.append(flat(model.shared))
    np.testing.assert_allclose(*results, rtol=1e-3, atol=1e-5)


@every_surgery
def test_the_combined_gradients_are_the_same_without_the_compiled_loops(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for runs_here in (kernels.runs_here, lambda *tensors: False):
        monkeypatch.setattr(kernels, "runs_here", runs_here)
        model = Model()
        combiner = GradientCombiner(model.shared, method(name))
        for task in "abc":
            combiner.backward(task, model.loss(task))
        combiner.write_gradients()
        results.append((flat(model.shared), combiner.means()))
        assert [p.grad is None for p in model.shared] == [False] * 6 + [True] * 2
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-5, atol=1e-6)
    assert results[0][1] == pytest.approx(results[1][1], abs=1e-6)


def test_the_gram_matrix_leaves_a_gpu_in_one_transfer() -> None:
    """With fake CUDA tensors, which know their device but have no memory; some tasks have no gradient."""

    class Transfers(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **kwargs or {})
            devices = {x.device.type for x in (*args, out) if isinstance(x, Tensor)}
            if devices == {"cpu", "cuda"} or "_local_scalar" in str(func):
                seen.append(func._overloadpacket.__name__)
            return out

    seen: list[str] = []
    with FakeTensorMode():
        gradient = torch.empty(50, 3, device="cuda")
        rows = [(gradient,) * 3, (gradient, None, gradient), (None, None, None), (None, None, gradient)] * 5
        with Transfers():
            gramian, _ = pcgrad.gram_matrix(rows, 3)
    assert gramian.device.type == "cpu"
    assert len(seen) == 1, seen


@pytest.mark.parametrize("name", ["pcgrad", "mgda"])
def test_after_two_tasks_are_combined_neither_gets_worse(name: str) -> None:
    for seed in range(10):
        g, h = vectors(2, n=4, seed=seed, dtype=torch.float64)
        actual = combined(method(name), g, h)
        assert min(actual @ g, actual @ h) > -1e-9


# --- collecting and writing gradients ---------------------------------------------------------------------------------


@every_combiner
def test_heads_keep_their_plain_gradients(name: str) -> None:
    plain, model = Model(), Model()
    sum(plain.loss(task) for task in "abc").backward()
    combiner = GradientCombiner(model.shared, method(name))
    for task in "abc":
        combiner.backward(task, model.loss(task))
    combiner.write_gradients()
    for actual, expected in zip(model.heads.parameters(), plain.heads.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad)


@every_combiner
def test_what_no_task_uses_has_no_gradient_and_does_not_decay(name: str) -> None:
    model = Model()
    model.first.bias.requires_grad_(False)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    update = AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    combiner = GradientCombiner(model.shared, method(name))
    for _ in range(2):
        for task in "abc":
            combiner.backward(task, model.loss(task))
        combiner.write_gradients()
        update.step()
        update.zero_grad()
    unchanged = {n for n, p in model.named_parameters() if torch.equal(p, before[n])}
    assert unchanged == {"spare.weight", "spare.bias", "first.bias"}


@every_surgery
def test_a_task_without_a_gradient_for_a_parameter_counts_as_zero_there(name: str) -> None:
    model = Model()
    combiner = GradientCombiner(model.shared, method(name))
    for task in "abc":
        combiner.backward(task, model.loss(task))
    combiner.write_gradients()
    dense = [torch.from_numpy(model.flat_gradient(task)) for task in "abc"]
    np.testing.assert_allclose(flat(model.shared), combined(method(name), *dense).numpy(), rtol=1e-3, atol=1e-5)


@every_combiner
def test_accumulated_batches_of_a_task_add_up_before_anything_else(name: str) -> None:
    at_once, in_turns = Model(), Model()
    for model in (at_once, in_turns):
        combiner = GradientCombiner(model.shared, method(name))
        if model is at_once:
            for task in "abc":
                combiner.backward(task, model.loss(task, 1) + model.loss(task, 2))
        else:
            for seed in (1, 2):
                for task in "abc":
                    combiner.backward(task, model.loss(task, seed))
        combiner.write_gradients()
    for actual, expected in zip(in_turns.parameters(), at_once.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-4, atol=1e-5)


@every_combiner
def test_a_step_does_not_affect_the_next(name: str) -> None:
    gradients = vectors(3)
    combiner = GradientCombiner([nn.Parameter(torch.zeros(40))], method(name))
    take_step(combiner, {"a": gradients[0], "b": gradients[1]})
    assert torch.equal(take_step(combiner, {"c": gradients[2]}), gradients[2])
    assert not combiner.kept
    combiner.write_gradients()
    assert combiner.shared[0].grad is None, "without a task there is no gradient"


@every_combiner
def test_clipping_after_combination_shortens_the_gradient_and_keeps_its_direction(name: str) -> None:
    p = nn.Parameter(torch.zeros(40))
    combiner = GradientCombiner([p], method(name))
    for task, g in zip("abc", vectors(3), strict=True):
        combiner.backward(task, (p * g).sum())
    combiner.write_gradients()
    before = p.grad.clone()
    nn.utils.clip_grad_norm_([p], 0.5)
    assert float(p.grad.norm()) == pytest.approx(0.5, rel=1e-4)
    torch.testing.assert_close(p.grad / p.grad.norm(), before / before.norm())


@every_combiner
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("task", ["a", "b", "c"])
def test_an_overflow_in_any_task_skips_the_whole_step_and_harms_no_later_one(name: str, bad: float, task: str) -> None:
    p, head = nn.Parameter(torch.zeros(40)), nn.Parameter(torch.ones(1))
    update = torch.optim.SGD([p, head], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    how, reference = method(name), method(name)
    combiner = GradientCombiner([p], how)

    def step(gradients: dict[str, Tensor]) -> None:
        for each, g in gradients.items():
            combiner.backward(each, scaler.scale((p * g).sum() + head.sum()))
        combiner.write_gradients()
        scaler.step(update)
        scaler.update()
        update.zero_grad()

    good = dict(zip("abc", vectors(3), strict=True))
    broken = {each: g.clone() for each, g in good.items()}
    broken[task][7] = bad
    step(broken)
    assert not p.any(), "the encoder is not updated"
    assert head.tolist() == [1.0], "the head is not updated either, though its gradient is finite"
    assert scaler.get_scale() == 512
    step(good)
    torch.testing.assert_close(-p.detach(), combined(reference, *good.values()))
    assert all(map(math.isfinite, combiner.means().values()))


@every_combiner
def test_no_graph_is_kept(name: str) -> None:
    model = Model()
    combiner = GradientCombiner(model.shared, method(name))
    for task in "abc":
        loss = model.loss(task)
        combiner.backward(task, loss)
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


@every_surgery
def test_the_gradients_are_kept_where_they_are_and_combined_in_the_first_ones_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    combiner = GradientCombiner(model.shared, method(name))
    for task in "abc":
        combiner.backward(task, model.loss(task))
        assert all(p.grad is None for p in model.shared)
    kept = {task: [None if g is None else g.data_ptr() for g in combiner.kept[task]] for task in "abc"}
    combiner.backward("b", model.loss("b", seed=9))
    assert [None if g is None else g.data_ptr() for g in combiner.kept["b"]] == kept["b"], "accumulated in place"
    combiner.write_gradients()
    first = [next((k[i] for k in kept.values() if k[i] is not None), None) for i in range(len(model.shared))]
    assert [None if p.grad is None else p.grad.data_ptr() for p in model.shared] == first


def test_the_plain_sum_is_the_plain_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel in ("gramian", "weighted_sum"):
        monkeypatch.delattr(kernels, kernel)
    plain, model = Model(), Model()
    combiner = GradientCombiner(model.shared, None)
    for task in "abc":
        plain.loss(task).backward()
        combiner.backward(task, model.loss(task))
        for actual, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(actual.grad, expected.grad, rtol=0, atol=0)
    combiner.write_gradients()
    assert not combiner.kept
    assert combiner.means() == combiner.state_dict()["figures"] == {}
    combiner.load_state_dict({})


# --- means, random orders, resuming, flags ----------------------------------------------------------------------------


@every_surgery
def test_means_are_those_of_the_steps_since_the_last_call(name: str) -> None:
    combiner = GradientCombiner([nn.Parameter(torch.zeros(2))], method(name))
    assert combiner.means() == {}
    east, north = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 2.0])
    take_step(combiner, {"sst": east, "para": north - east})  # cosine -3 / sqrt(13)
    take_step(combiner, {"para": east + north, "sst": east})  # the other order, cosine 3 / sqrt(13)
    take_step(combiner, {"sst": east, "para": -east})
    take_step(combiner, {"sst": 0 * east, "para": east})  # a zero gradient has no direction: cosine 0, no conflict
    take_step(combiner, {"sst": 100 * east})  # a single task: nothing to compare
    actual = combiner.means()
    assert list(actual) == ["conflicts para sst", "cosine para sst", "norm para", "norm sst"]
    expected = [0.5, -0.25, (2 * math.sqrt(13) + 3 + 3) / 4, 9 / 4]
    assert list(actual.values()) == pytest.approx(expected)
    assert combiner.means() == {}
    p = combiner.shared[0]
    for task, g in (("sst", east), ("sts", north)):
        combiner.backward(task, 1024 * (p * g).sum())
    combiner.write_gradients(loss_scale=1024)
    expected = {"conflicts sst sts": 0, "cosine sst sts": 0, "norm sst": 3, "norm sts": 2}
    assert combiner.means() == pytest.approx(expected), "norms do not contain the loss scale"


@pytest.mark.parametrize("name", ["gradvac", "pcgrad"])
def test_random_orders_depend_on_the_seed_and_do_not_use_torchs_global_generator(name: str) -> None:
    gradients = vectors(5, n=6)

    def run(seed: int) -> list[Tensor]:
        how = method(name, "--seed", str(seed))
        return [combined(how, *gradients) for _ in range(4)]

    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = run(0)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert all(map(torch.equal, first, run(0)))
    assert not all(map(torch.equal, first, run(1)))
    assert not torch.equal(first[0], first[1]), "every step draws a new order"


def test_the_order_is_drawn_anew_for_every_task(monkeypatch: pytest.MonkeyPatch) -> None:
    draws, randperm = [], torch.randperm
    monkeypatch.setattr(torch, "randperm", lambda n, generator: draws.append(n) or randperm(n, generator=generator))
    combined(PCGrad(0), *vectors(4))
    assert draws == [4, 4, 4, 4]


@every_combiner
def test_a_saved_state_continues_the_same_sequence(name: str) -> None:
    def steps(combiner: GradientCombiner, seeds: range) -> list[Tensor]:
        return [take_step(combiner, dict(zip("abcde", vectors(5, seed=seed), strict=True))) for seed in seeds]

    def build(seed: str) -> GradientCombiner:
        args = arguments("--combiner", name, "--seed", seed, "--gradvac_beta", "0.3")
        return pcgrad.build_combiner(args, [nn.Parameter(torch.zeros(40))])

    original, resumed = build("0"), build("99")
    steps(original, range(5))
    file = io.BytesIO()
    torch.save(original.state_dict(), file)
    expected = steps(original, range(5, 10))
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert all(map(torch.equal, steps(resumed, range(5, 10)), expected))


def test_a_saved_state_does_not_change_in_later_steps() -> None:
    how = GradVac(0, beta=0.3)
    combined(how, *vectors(3))
    state = how.state_dict()
    before = state["generator"].clone(), dict(state["targets"])
    combined(how, *vectors(3, seed=1))
    assert torch.equal(state["generator"], before[0])
    assert state["targets"] == before[1] != how.targets


def test_flags_are_passed_to_the_methods() -> None:
    p = [nn.Parameter(torch.zeros(2))]
    assert pcgrad.build_combiner(arguments(), p).method is None, "the plain sum is the default"
    args = arguments("--gradvac_beta", "0.2", "--cagrad_c", "0.7", "--seed", "3")
    kinds = {
        name: pcgrad.build_combiner(argparse.Namespace(**vars(args) | {"combiner": name}), p) for name in COMBINERS
    }
    assert kinds["gradvac"].method.beta == 0.2
    assert kinds["cagrad"].method.c == 0.7
    assert kinds["pcgrad"].method.generator.initial_seed() == kinds["gradvac"].method.generator.initial_seed() == 3


@pytest.mark.parametrize(
    "flags", [("--combiner", "none"), ("--gradvac_beta", "1.1"), ("--gradvac_beta", "nan"), ("--cagrad_c", "-1")]
)
def test_a_flag_out_of_range_is_refused(flags: tuple[str, str]) -> None:
    with pytest.raises(InputError, match=flags[0]):
        arguments(*flags)


# --- the plain sum, observed ------------------------------------------------------------------------------------------


def test_observing_the_plain_sum_does_not_change_it_by_a_bit() -> None:
    plain, observed = Model(), Model()
    for model, how in ((plain, method("sum")), (observed, method("sum", "--log_gradients"))):
        combiner = GradientCombiner(model.shared, how)
        for task in "cab":  # not the alphabetical order: floating-point sums depend on it
            combiner.backward(task, model.loss(task))
        combiner.write_gradients()
    for one, other in zip(plain.parameters(), observed.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad, other.grad)


def test_observing_the_plain_sum_logs_the_cosines_of_plain_vectors() -> None:
    combiner = GradientCombiner((model := Model()).shared, method("sum", "--log_gradients"))
    for task in "abc":
        combiner.backward(task, model.loss(task))
    combiner.write_gradients()
    a, b = model.flat_gradient("a"), model.flat_gradient("b")
    cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
    assert combiner.cosines(10)["a b"] == [pytest.approx(cosine, abs=1e-6)]
    assert combiner.means()["cosine a b"] == pytest.approx(cosine, abs=1e-6)


def test_the_curve_of_cosines_has_the_mean_of_the_steps() -> None:
    combiner = GradientCombiner([nn.Parameter(torch.zeros(40))], PCGrad(0))
    for seed in range(10):
        take_step(combiner, dict(zip("ab", vectors(2, seed=seed), strict=True)))
    curve = combiner.cosines(5)["a b"]
    assert len(curve) == 5
    assert np.mean(curve) == pytest.approx(combiner.means()["cosine a b"])
    assert combiner.cosines(5) == {}, "the means start a new epoch"
