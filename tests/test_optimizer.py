"""AdamW against the handout's pseudo-code in float64 and against torch; groups, schedules, resuming; averages."""

import argparse
import copy
import itertools
import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import run_script
from make_references import adamw
from test_kernels import Count

import kernels
import optimizer
from bert import BertModel
from classifier import BertSentimentClassifier
from config import BertConfig
from flags import ArgumentParser
from optimizer import (
    AVERAGERS,
    OPTIMIZERS,
    SCHEDULES,
    AdamW,
    ExponentialAverage,
    NoAverage,
    StochasticWeightAverage,
    build_averager,
    build_optimizer,
    build_schedule,
    parameter_groups,
)
from utils import InputError

ROUTES = {"one pass": kernels.runs_here, "multi-tensor": lambda *tensors: False}


@pytest.fixture(params=sorted(ROUTES))
def route(request, monkeypatch) -> str:
    """Both ways of computing the update: the compiled loop, and lists of tensors as on CUDA."""
    monkeypatch.setattr(kernels, "runs_here", ROUTES[request.param])
    return request.param


def random_gradients(shape: tuple[int, ...], steps: int) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    # scales from 1e-8 to 1: where v is tiny, the place of eps shows
    return [rng.normal(size=shape) * 10.0 ** rng.uniform(-8, 0, size=shape) for _ in range(steps)]


@pytest.mark.parametrize("correct_bias", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 1e-4, 0.3])
def test_adamw_follows_the_handouts_pseudo_code(route: str, weight_decay: float, correct_bias: bool) -> None:
    """eps is outside the bias correction, and decay follows the update, on the new weights (docs/PITFALLS.md, 11)."""
    start = np.random.default_rng(0).normal(size=(17, 5))
    gradients = random_gradients(start.shape, 30)
    expected = adamw(start, [lambda _, g=g: g for g in gradients], 1e-2, weight_decay, correct_bias)
    p = torch.nn.Parameter(torch.tensor(start, dtype=torch.float32))
    ours = AdamW([p], lr=1e-2, weight_decay=weight_decay, correct_bias=correct_bias)
    for g in gradients:
        p.grad = torch.tensor(g, dtype=torch.float32)
        ours.step()
    np.testing.assert_allclose(p.detach().numpy(), expected, atol=3e-6, rtol=2e-6)


@pytest.mark.parametrize("correct_bias", [True, False])
def test_a_tiny_decay_is_not_lost_to_rounding(route: str, correct_bias: bool) -> None:
    """At lr 1e-5 and decay 0.01, a step decays by 1e-7, about one float32 rounding error of the weight itself."""
    start = np.random.default_rng(0).normal(size=500).astype(np.float32).astype(np.float64)
    gradients = [g.astype(np.float32) for g in random_gradients(start.shape, 1000)]
    fixed = [lambda _, g=g: g.astype(np.float64) for g in gradients]
    expected, without = (adamw(start, fixed, 1e-5, decay, correct_bias) for decay in (0.01, 0.0))
    p = torch.nn.Parameter(torch.tensor(start, dtype=torch.float32))
    ours = AdamW([p], lr=1e-5, weight_decay=0.01, correct_bias=correct_bias)
    for g in gradients:
        p.grad = torch.from_numpy(g)
        ours.step()
    error = p.detach().numpy() - expected
    assert np.abs(error).max() < 1e-5 < np.abs(expected - without).max() / 10
    assert abs(np.mean(error * np.sign(start))) < 0.005 * np.mean(np.abs(expected - without))


@pytest.mark.parametrize(("lr", "weight_decay"), [(0.0, 0.5), (1.0, 1.0), (2.0, 0.75)])
def test_adamw_without_a_rate_or_with_a_decay_of_everything(route: str, lr: float, weight_decay: float) -> None:
    start = np.linspace(-2.0, 2.0, 9)
    gradients = random_gradients(start.shape, 3)
    expected = adamw(start, [lambda _, g=g: g for g in gradients], lr, weight_decay, True)
    p = torch.nn.Parameter(torch.tensor(start, dtype=torch.float32))
    ours = AdamW([p], lr=lr, weight_decay=weight_decay)
    for g in gradients:
        p.grad = torch.tensor(g, dtype=torch.float32)
        ours.step()
    np.testing.assert_allclose(p.detach().numpy(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("strided", ["weight", "gradient", "both"])
def test_adamw_updates_transposed_weights_and_gradients(route: str, strided: str, dtype: torch.dtype) -> None:
    start = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    p = torch.nn.Parameter(start.t().contiguous().t() if strided != "gradient" else start.clone())
    q = torch.nn.Parameter(start.clone())
    pair = [AdamW([x], lr=1e-2, weight_decay=0.1) for x in (p, q)]
    for step in range(3):
        q.grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(step)).to(dtype)
        p.grad = q.grad.t().contiguous().t() if strided != "weight" else q.grad.clone()
        for update in pair:
            update.step()
    torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("weight_decay", "calls"), [(0.0, 1), (0.01, 3)])
def test_off_the_cpu_adamw_is_one_pass_over_memory_and_three_with_decay(weight_decay: float, calls: int) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3, n, device="meta")) for n in range(1, 41)]
    update = AdamW(parameters, lr=1e-3, weight_decay=weight_decay)
    for _ in range(2):  # the first step makes the state
        for p in parameters:
            p.grad = torch.ones_like(p)
        with Count() as count:
            update.step()
    assert count.ops.pop("full") == 1, "the step count"
    assert sum(count.ops.values()) == calls, count.ops
    assert count.ops["_fused_adamw_"] == 1
    assert {type(state["step"]) for state in update.state.values()} == {int}
    assert {tuple(state) for state in update.state.values()} == {("step", "m", "v")}


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - {"adafactor"}))  # its help says that it waits for a GPU
def test_an_optimizer_reads_nothing_from_the_device_also_after_it_is_resumed(name: str) -> None:
    """On meta, reading a number fails; on CUDA it would wait."""
    parameters = [torch.nn.Parameter(torch.zeros(3, n, device="meta")) for n in range(1, 5)]

    def step(update: torch.optim.Optimizer) -> None:
        for p in parameters:
            p.grad = torch.ones_like(p)
        update.step()

    first, resumed = (OPTIMIZERS[name]([{"params": parameters, "lr": 0.1, "weight_decay": 0.1}]) for _ in range(2))
    step(first)
    resumed.load_state_dict(copy.deepcopy(first.state_dict()))
    for update in (first, resumed):
        step(update)
    if name == "nadam":
        products = [[state["mu_product"].item() for state in update.state.values()] for update in (first, resumed)]
        assert products[0] == products[1], "the product goes on"
        assert 0 < products[0][0] < 1


def test_the_help_says_that_adafactor_waits_for_a_gpu_twice_per_parameter() -> None:
    class Reads(Count):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "_local_scalar" in str(func):
                read.append(args[0].data_ptr())
            return super().__torch_dispatch__(func, types, args, kwargs)

    read: list[int] = []
    parameters = [torch.nn.Parameter(torch.ones(3, n)) for n in range(1, 5)]
    update = OPTIMIZERS["adafactor"]([{"params": parameters, "lr": 0.1}])
    for _ in range(2):  # the first step makes the state
        for p in parameters:
            p.grad = torch.ones_like(p)
        on_the_cpu = {state["step"].data_ptr() for state in update.state.values()}  # torch counts steps there
        read.clear()
        with Reads():
            update.step()
    assert len([pointer for pointer in read if pointer not in on_the_cpu]) == 2 * len(parameters)
    new = ArgumentParser("optimizer.py", "")
    optimizer.add_arguments(new, lr=1e-3)
    assert "adafactor waits for a GPU twice per parameter" in new.flags["--optimizer"].help


def test_adamw_equals_torchs_at_zero_decay(route: str) -> None:
    """torch adds eps after the bias correction: with eps 1e-12 that cannot show."""
    starts = [torch.randn(40, 3), torch.randn(7)]
    ours, theirs = ([torch.nn.Parameter(s.clone()) for s in starts] for _ in range(2))
    pair = AdamW(ours, lr=3e-3, eps=1e-12), torch.optim.AdamW(theirs, lr=3e-3, eps=1e-12, weight_decay=0.0)
    for step in range(20):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=torch.Generator().manual_seed(step))
            b.grad = a.grad.clone()
        for optimizer_ in pair:
            optimizer_.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-5)


def test_adamw_is_not_torchs_adamw_when_weights_decay() -> None:
    ends = []
    for kind in (AdamW, torch.optim.AdamW):
        p = torch.nn.Parameter(torch.ones(3))
        update = kind([p], lr=0.1, weight_decay=0.5, eps=1e-6)
        p.grad = torch.ones(3)
        update.step()
        ends.append(p[0].item())
    assert ends[0] == pytest.approx((1 - 0.1) * 0.95, abs=1e-5)
    assert ends[1] == pytest.approx(0.95 - 0.1, abs=1e-5)


def test_a_parameter_without_a_gradient_is_neither_moved_nor_decayed(route: str) -> None:
    idle, busy = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    update = AdamW([idle, busy], lr=0.1, weight_decay=0.5)
    for _ in range(3):
        busy.grad = torch.ones(3)
        update.step()
    assert torch.equal(idle, torch.ones(3))
    idle.grad = torch.ones(3)
    busy.grad = None
    update.step()
    assert update.state[idle]["step"] == 1, "its bias correction starts with its own first step"
    assert idle[0].item() == pytest.approx((1 - 0.1) * 0.95, abs=1e-5)


def test_a_saved_state_resumes_on_the_same_path(route: str, tmp_path) -> None:
    def steps(update: AdamW, p: torch.nn.Parameter, numbers: range) -> None:
        for n in numbers:
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(n))
            update.step()

    start = torch.randn(6, 4)
    p = torch.nn.Parameter(start.clone())
    whole = AdamW([p], lr=1e-2, weight_decay=0.1)
    steps(whole, p, range(10))

    q = torch.nn.Parameter(start.clone())
    first = AdamW([q], lr=1e-2, weight_decay=0.1)
    steps(first, q, range(5))
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second = AdamW([q], lr=1.0)
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))  # docs/PITFALLS.md, 10
    steps(second, q, range(5, 10))
    assert torch.equal(p, q)


@pytest.mark.parametrize("wrong", [{"lr": -1}, {"betas": (0.9, 1.0)}, {"betas": (-0.1, 0.9)}, {"eps": -1e-8}])
def test_impossible_settings_are_refused(wrong) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        AdamW([torch.nn.Parameter(torch.ones(1))], **wrong)


def test_a_sparse_gradient_is_refused() -> None:
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    before = embedding.weight.detach().clone()
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="needs dense gradients, found a sparse one"):
        AdamW(embedding.parameters()).step()
    assert torch.equal(embedding.weight, before)


def test_step_runs_the_closure_with_gradients_enabled_and_returns_its_loss() -> None:
    p = torch.nn.Parameter(torch.full((3,), 2.0))
    update = AdamW([p], lr=0.1)
    losses = []

    def closure() -> torch.Tensor:
        update.zero_grad()
        losses.append((p**2).sum())
        losses[-1].backward()
        return losses[-1]

    with torch.no_grad():  # step itself enables them
        returned = update.step(closure)
    assert len(losses) == 1
    assert returned is losses[0]
    assert returned.item() == 12
    assert p[0].item() == pytest.approx(1.9, abs=1e-5), "the step is made with the closure's gradient"
    assert update.step() is None


def test_the_default_settings_are_the_handouts() -> None:
    (group,) = AdamW([torch.nn.Parameter(torch.ones(1))]).param_groups
    defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.0, "correct_bias": True}
    assert {k: v for k, v in group.items() if k != "params"} == defaults


def small_model(frozen: bool = False) -> BertSentimentClassifier:
    shape = {"vocab_size": 50, "hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2}
    with tempfile.TemporaryDirectory() as folder:
        BertModel(BertConfig(**shape, intermediate_size=16)).save_pretrained(Path(folder))
        option = "pretrain" if frozen else "finetune"
        return BertSentimentClassifier(argparse.Namespace(model=folder, num_labels=5, option=option))


def rate_of(groups: list[dict], parameter: torch.nn.Parameter) -> tuple[float, float]:
    (group,) = [g for g in groups if any(p is parameter for p in g["params"])]
    return group["lr"], group["weight_decay"]


def test_every_trainable_parameter_is_in_one_group_with_its_own_rate_and_decay() -> None:
    model = small_model()
    groups = parameter_groups(model, 1e-2, head_lr=0.5, weight_decay=0.1, decay_matrices_only=True, layer_decay=0.5)
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))
    bert = model.bert
    assert rate_of(groups, model.linear.weight) == (0.5, 0.1)
    assert rate_of(groups, model.linear.bias) == (0.5, 0.0)
    assert rate_of(groups, bert.pooler_dense.weight) == (1e-2, 0.1)
    assert rate_of(groups, bert.bert_layers[2].out_dense.weight) == (1e-2, 0.1)
    assert rate_of(groups, bert.bert_layers[0].out_dense.weight) == (pytest.approx(0.25e-2), 0.1)
    assert rate_of(groups, bert.bert_layers[0].out_layer_norm.weight)[1] == 0.0
    assert rate_of(groups, bert.word_embedding.weight) == (pytest.approx(0.125e-2), 0.1)
    assert rate_of(groups, bert.embed_layer_norm.weight) == (pytest.approx(0.125e-2), 0.0)


def test_without_head_lr_the_heads_learn_at_lr() -> None:
    model = small_model()
    groups = parameter_groups(model, 1e-2, layer_decay=0.5)
    assert rate_of(groups, model.linear.weight) == rate_of(groups, model.linear.bias) == (1e-2, 0.0)
    assert len(parameter_groups(model, 1e-2)) == 1


def test_weight_decay_reaches_biases_and_layer_norm_unless_it_is_for_matrices_only() -> None:
    model = small_model()
    layer = model.bert.bert_layers[0]
    vectors = [model.linear.bias, layer.out_dense.bias, layer.out_layer_norm.weight, layer.out_layer_norm.bias]
    everything = parameter_groups(model, 1e-2, weight_decay=0.1)
    matrices = parameter_groups(model, 1e-2, weight_decay=0.1, decay_matrices_only=True)
    assert [rate_of(everything, p)[1] for p in (model.linear.weight, *vectors)] == [0.1] * 5
    assert [rate_of(matrices, p)[1] for p in (model.linear.weight, *vectors)] == [0.1] + [0.0] * 4


@pytest.mark.parametrize(
    ("flags", "matrix", "bias", "lowest", "head"),  # (lr, weight decay) of four parameters
    [
        ("", (0.01, 0), (0.01, 0), (0.01, 0), (0.01, 0)),
        ("--head_lr 0.5", (0.01, 0), (0.01, 0), (0.01, 0), (0.5, 0)),
        ("--layer_decay 0.5", (0.01, 0), (0.01, 0), (0.0025, 0), (0.01, 0)),
        ("--weight_decay 0.1", (0.01, 0.1), (0.01, 0.1), (0.01, 0.1), (0.01, 0.1)),
        ("--weight_decay 0.1 --decay_matrices_only", (0.01, 0.1), (0.01, 0), (0.01, 0.1), (0.01, 0.1)),
    ],
)
def test_every_flag_of_the_optimizer_reaches_its_groups(flags: str, matrix, bias, lowest, head) -> None:
    model = small_model()
    groups = built(model, f"--lr 0.01 {flags}").param_groups
    layers = model.bert.bert_layers
    parameters = layers[2].out_dense.weight, layers[2].out_dense.bias, layers[0].out_dense.weight, model.linear.weight
    for parameter, expected in zip(parameters, (matrix, bias, lowest, head), strict=True):
        assert rate_of(groups, parameter) == pytest.approx(expected)


# --- every entry of OPTIMIZERS ----------------------------------------------------------------------------------------


def parser(lr: float | None = None) -> ArgumentParser:
    new = ArgumentParser("optimizer.py", "")
    optimizer.add_arguments(new, lr)
    return new


def built(model: torch.nn.Module, flags: str) -> torch.optim.Optimizer:
    return build_optimizer(parser().parse(flags.split()), model)


def test_the_handouts_adamw_is_the_default() -> None:
    assert type(built(small_model(), "--lr 0.1")) is AdamW


@pytest.mark.parametrize("lr", [1e-5, 0.3, None])
def test_the_script_says_what_the_default_learning_rate_is(lr: float | None) -> None:
    assert parser(lr).parse([]).lr == lr
    assert parser(lr).parse(["--lr", "0.2"]).lr == 0.2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--decay_matrices_only", "--decay_matrices_only needs --weight_decay. Use --weight_decay, or leave out"),
        ("--ema_decay 0.5", "--ema_decay 0.5 needs --averager ema. Use --averager ema, or leave out --ema_decay."),
        ("--averager swa --ema_decay 0.5", "--ema_decay 0.5 needs --averager ema."),
        ("--averager ema --average_start 0.1", "--average_start 0.1 needs --averager swa."),
        ("--lr 0", "--lr: must be a number, above 0 and at most 1, found '0'. See optimizer.py --help."),
        ("--warmup 1.5", "--warmup: must be a number, at least 0 and at most 1, found '1.5'. See optimizer.py --help."),
        ("--optimizer adam", "--optimizer must be one of ad"),
    ],
)
def test_a_flag_that_is_out_of_range_or_has_no_effect_is_refused(flags: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parser().parse(flags.split())
    assert str(caught.value).startswith(message)


def test_decay_for_matrices_only_can_be_switched_off_again() -> None:
    given = ["--weight_decay", "0.1", "--decay_matrices_only"]
    assert parser().parse(given).decay_matrices_only is True
    assert parser().parse([*given, "--no-decay_matrices_only"]).decay_matrices_only is False


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_has_the_groups_rates_and_decays_of_the_flags(name: str) -> None:
    model = small_model()
    update = built(model, f"--optimizer {name} --lr 0.01 --head_lr 0.5 --weight_decay 0.1 --decay_matrices_only")
    groups = update.param_groups
    assert type(update) is type(OPTIMIZERS[name](parameter_groups(model, 0.01)))
    assert rate_of(groups, model.linear.weight) == (0.5, 0.1)
    assert rate_of(groups, model.linear.bias) == (0.5, 0.0)
    assert rate_of(groups, model.bert.pooler_dense.weight) == (0.01, 0.1)
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))
    for p in model.linear.parameters():  # all else is without a gradient
        p.grad = torch.ones_like(p)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    build_schedule(update, "constant", 10, 0.5)  # sets the rates to a sixth
    update.step()
    moved = {n: (p.detach() - before[n]).abs().max().item() for n, p in model.named_parameters()}
    assert {n for n, far in moved.items() if far} == {"linear.weight", "linear.bias"}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_follows_the_rate_of_each_group_and_decays_what_has_one(name: str) -> None:
    """Of two groups with one start and one gradient the slower moves less; decay alone makes weights smaller."""
    a, b, c = (torch.nn.Parameter(torch.full((4, 3), 2.0)) for _ in range(3))
    rows = [(a, 0.01, 0.0), (b, 0.001, 0.0), (c, 0.01, 0.9)]
    update = OPTIMIZERS[name]([{"params": [p], "lr": lr, "weight_decay": decay} for p, lr, decay in rows])
    for _ in range(8):
        for p, gradient in ((a, 0.3), (b, 0.3), (c, 0.0)):
            p.grad = torch.full_like(p, gradient)
        update.step()
    assert (a - 2).abs().mean() > 3 * (b - 2).abs().mean() > 0
    assert (c < 1.95).all()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_minimizes(name: str) -> None:
    torch.manual_seed(0)
    target, p = torch.randn(6, 4), torch.nn.Parameter(torch.randn(6, 4))
    update = OPTIMIZERS[name]([{"params": [p], "lr": 0.05, "weight_decay": 0.0}])
    start = (p - target).square().mean().item()
    for _ in range(200):
        update.zero_grad()
        (p - target).square().sum().backward()
        update.step()
    assert (p - target).square().mean().item() < 0.05 * start


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_resumes_bit_for_bit_from_plain_values(name: str, tmp_path) -> None:
    def steps(update: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], numbers: range) -> None:
        for n in numbers:
            for i, p in enumerate(parameters):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * i + n))
            update.step()

    def start() -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
        generator = torch.Generator().manual_seed(7)
        ps = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((6, 4), (5,), ())]
        return ps, OPTIMIZERS[name](
            [{"params": [p], "lr": 0.01 * (i + 1), "weight_decay": 0.1} for i, p in enumerate(ps)]
        )

    whole, update = start()
    steps(update, whole, range(9))
    parts, update = start()
    steps(update, parts, range(4))
    torch.save(update.state_dict(), tmp_path / "state.pt")
    update = OPTIMIZERS[name]([{"params": [p], "lr": 0.5, "weight_decay": 0.0} for p in parts])
    update.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    steps(update, parts, range(4, 9))
    assert all(torch.equal(p, q) for p, q in zip(whole, parts, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_passes_over_an_overflow_under_a_loss_scaler(name: str) -> None:
    p, q = (torch.nn.Parameter(torch.linspace(1, 2, 12).view(3, 4)) for _ in range(2))
    update, plain = (OPTIMIZERS[name]([{"params": [x], "lr": 0.01, "weight_decay": 0.1}]) for x in (p, q))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    for factor in (1.0, 1e35, 3.0):  # the second is finite until it is scaled
        update.zero_grad()
        scaler.scale((p * factor).square().sum()).backward()
        before = p.detach().clone()
        scaler.step(update)
        scaler.update()
        assert torch.equal(before, p) == (factor == 1e35)
    for factor in (1.0, 3.0):
        plain.zero_grad()
        (q * factor).square().sum().backward()
        plain.step()
    torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


def test_sgd_with_momentum_is_that_of_the_formula() -> None:
    p = torch.nn.Parameter(torch.tensor([3.0]))
    update = OPTIMIZERS["sgd"]([{"params": [p], "lr": 0.1, "weight_decay": 0.2}])
    theta, velocity = 3.0, 0.0
    for g in (1.0, -2.0, 0.5):
        p.grad = torch.tensor([g])
        update.step()
        velocity = 0.9 * velocity + g + 0.2 * theta
        theta -= 0.1 * velocity
    assert p.item() == pytest.approx(theta, rel=1e-5)


def test_frozen_parameters_are_in_no_group() -> None:
    groups = parameter_groups(small_model(frozen=True), 1e-3)
    assert sum(len(g["params"]) for g in groups) == 2


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_schedule_starts_at_one_and_never_rises(name: str) -> None:
    values = [SCHEDULES[name](x) for x in np.linspace(0, 1, 101)]
    assert values[0] == 1
    assert all(a >= b for a, b in itertools.pairwise(values))
    assert values[-1] == pytest.approx(1.0 if name == "constant" else 0.0, abs=1e-12)


def test_warm_up_rises_to_the_full_rate_and_linear_decay_ends_near_zero() -> None:
    update = AdamW([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = build_schedule(update, "linear", total_steps=100, warmup=0.1)
    rates = []
    for _ in range(100):
        rates.append(update.param_groups[0]["lr"])
        update.step()
        schedule.step()
    assert rates[0] == pytest.approx(1 / 11)
    assert max(rates) == rates[10] == 1.0
    assert rates[99] == pytest.approx(1 / 90)
    assert math.isclose(update.param_groups[0]["lr"], 0.0, abs_tol=1e-12)


def rates_of_schedule(name: str, total_steps: int, warmup: float, steps: int) -> list[float]:
    """The learning rates of the first steps, from a full rate of 1."""
    update = AdamW([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = build_schedule(update, name, total_steps, warmup)
    rates = []
    for _ in range(steps):
        rates.append(update.param_groups[0]["lr"])
        update.step()
        schedule.step()
    return rates


def test_cosine_is_half_a_wave_from_one_to_zero() -> None:
    """(1 + cos(pi x)) / 2 at the angles whose cosines are known."""
    known = {0: 1, 1 / 6: (2 + 3**0.5) / 4, 1 / 4: (2 + 2**0.5) / 4, 1 / 3: 3 / 4, 1 / 2: 1 / 2, 2 / 3: 1 / 4, 1: 0}
    assert {x: SCHEDULES["cosine"](x) for x in known} == pytest.approx(known, abs=1e-12)
    rates = rates_of_schedule("cosine", 15, 0.2, 16)  # 3 steps of warm-up, then 12 to the end
    assert [rates[3 + round(12 * x)] for x in known] == pytest.approx(list(known.values()), abs=1e-12)


@pytest.mark.parametrize("warmup", [0.0, 0.3])
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_steps_past_the_end_of_a_schedule_stay_at_its_end(name: str, warmup: float) -> None:
    rates = rates_of_schedule(name, 10, warmup, 25)
    assert rates[10:] == pytest.approx([1.0 if name == "constant" else 0.0] * 15, abs=1e-12)
    assert rates[9] > 0, "and the last step of all still learns"


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_warm_up_of_all_steps_rises_to_the_last(name: str) -> None:
    assert rates_of_schedule(name, 9, 1.0, 9) == pytest.approx([n / 10 for n in range(1, 10)])


def test_both_routes_agree_on_many_shapes() -> None:
    shapes = [(), (1,), (3, 0), (257,), (33, 65)]
    starts = [torch.randn(s) for s in shapes]
    ends = []
    for runs_here in ROUTES.values():
        ps = [torch.nn.Parameter(s.clone()) for s in starts]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "runs_here", runs_here)
            update = AdamW(ps, lr=1e-2, weight_decay=0.1)
            for step in range(5):
                for p in ps:
                    p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
                update.step()
        ends.append(ps)
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


# --- averagers --------------------------------------------------------------------------------------------------------

EPOCHS, STEPS = 4, 3


def average_flags(name: str, **given: object) -> argparse.Namespace:
    args = parser().parse(["--averager", name, *(f"--{k}={v}" for k, v in given.items())])
    return argparse.Namespace(**vars(args), epochs=EPOCHS)


def test_an_averager_is_built_with_the_values_of_its_flags() -> None:
    model = two_layers()
    assert type(build_averager(average_flags("none"), model)) is NoAverage
    ema, swa = (build_averager(average_flags(name), model) for name in ("ema", "swa"))
    assert (type(ema), ema.decay) == (ExponentialAverage, 0.999)
    assert (type(swa), swa.first) == (StochasticWeightAverage, 2)
    assert build_averager(average_flags("ema", ema_decay=0.7), model).decay == 0.7
    assert build_averager(average_flags("swa", average_start=0.75), model).first == 3


@pytest.mark.parametrize("name", ["ema", "swa"])
def test_an_averager_takes_plain_values(name: str) -> None:
    model, other = two_layers(), two_layers()
    plain = ExponentialAverage(model, 0.6) if name == "ema" else StochasticWeightAverage(model, 0.3, EPOCHS)
    given = {"ema_decay": 0.6} if name == "ema" else {"average_start": 0.3}
    by_flags = build_averager(average_flags(name, **given), other)
    wander(model, plain)
    wander(other, by_flags)
    assert np.array_equal(averaged(plain, model), averaged(by_flags, other))


def test_a_share_of_the_weights_is_included_in_the_average() -> None:
    """average <- average + share(n) (weights - average), at the n-th call."""
    model = two_layers()
    averager = ExponentialAverage(model, 0.5)
    start = model[1].weight.detach().double().numpy().copy()
    with torch.no_grad():
        model[1].weight.add_(1.0)
    counts = []
    averager.include(model, lambda n: counts.append(n) or 0.25)
    averager.include(model, lambda n: counts.append(n) or 0.5)
    assert counts == [1, 2]
    np.testing.assert_allclose(averager.weights["1.weight"].numpy(), start + 0.25 + 0.5 * 0.75, atol=1e-6)
    assert averager.weights.keys() == {"1.weight", "1.bias"}, "frozen parameters are not averaged"


def two_layers() -> torch.nn.Sequential:
    """A frozen layer and a trainable one."""
    torch.manual_seed(4)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    model[0].requires_grad_(False)
    return model


def wander(model: torch.nn.Module, averager: NoAverage, epochs: range = range(EPOCHS)) -> list[np.ndarray]:
    """Training whose steps are random moves; the trainable weight after each of them, in float64."""
    path = []
    for epoch in epochs:
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(epoch * STEPS + step)
            with torch.no_grad():
                for p in model[1].parameters():
                    p.add_(torch.randn(p.shape, generator=generator))
            averager.update(model)
            path.append(model[1].weight.detach().double().numpy().copy())
        averager.epoch_end(model)
    return path


def averaged(averager: NoAverage, model: torch.nn.Module) -> np.ndarray:
    with averager.applied(model):
        return model[1].weight.detach().double().numpy().copy()


@pytest.mark.parametrize("name", sorted(AVERAGERS))
def test_averaged_weights_are_in_the_model_only_within_the_context(name: str) -> None:
    model = two_layers()
    averager = build_averager(average_flags(name), model)
    wander(model, averager)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    identities = list(map(id, model.parameters()))
    inside = averaged(averager, model)
    assert np.array_equal(inside, before["1.weight"].numpy()) is (name == "none")
    with pytest.raises(KeyError), averager.applied(model):  # restored after a failure, too
        raise KeyError
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()), "bit for bit"
    assert list(map(id, model.parameters())) == identities, "the optimizer's parameters are still the model's"
    assert np.array_equal(averaged(averager, model), inside), "looking changes nothing"


@pytest.mark.parametrize("name", sorted(AVERAGERS))
def test_before_the_first_average_the_weights_are_the_models_own(name: str) -> None:
    model = two_layers()
    averager = build_averager(average_flags(name), model)
    with torch.no_grad():
        model[1].weight.add_(1.0)
    assert np.array_equal(averaged(averager, model), model[1].weight.detach().numpy())


@pytest.mark.parametrize("name", sorted(AVERAGERS))
def test_training_goes_on_after_the_context_without_touching_the_average(name: str) -> None:
    """Weights and average never share memory outside of it."""
    model = two_layers()
    averager = build_averager(average_flags(name), model)
    wander(model, averager)
    inside = averaged(averager, model)
    with torch.no_grad():
        model[1].weight.fill_(100.0)
    assert np.array_equal(averaged(averager, model), inside) is (name != "none")
    assert (model[1].weight == 100).all()


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.999])
def test_ema_is_the_bias_corrected_mean_of_all_steps(decay: float) -> None:
    model = two_layers()
    averager = build_averager(average_flags("ema", ema_decay=decay), model)
    path = wander(model, averager)
    n = len(path)
    weights = [decay ** (n - k) for k in range(1, n + 1)]
    expected = sum(w * theta for w, theta in zip(weights, path, strict=True)) / sum(weights)
    np.testing.assert_allclose(averaged(averager, model), expected, atol=1e-5)
    np.testing.assert_array_equal(model[0].weight.numpy(), two_layers()[0].weight.numpy())


@pytest.mark.parametrize(("start", "first"), [(0.0, 1), (0.25, 1), (0.3, 2), (0.5, 2), (0.75, 3), (1.0, 4)])
def test_swa_is_the_plain_mean_of_the_epochs_from_its_start_on(start: float, first: int) -> None:
    model = two_layers()
    averager = build_averager(average_flags("swa", average_start=start), model)
    path = wander(model, averager)
    ends = path[STEPS - 1 :: STEPS]
    np.testing.assert_allclose(averaged(averager, model), np.mean(ends[first - 1 :], axis=0), atol=1e-5)


def test_swa_starts_on_the_epoch_that_was_asked_for_in_spite_of_rounding() -> None:
    args = average_flags("swa", average_start=0.28)
    args.epochs = 25
    model = two_layers()
    averager = build_averager(args, model)
    for _ in range(7):
        assert averager.count == 0
        averager.epoch_end(model)
    assert averager.count == 1


@pytest.mark.parametrize("name", sorted(AVERAGERS))
def test_a_saved_average_resumes_on_the_same_path(name: str, tmp_path) -> None:
    whole = two_layers()
    averager = build_averager(average_flags(name), whole)
    wander(whole, averager)
    expected = averaged(averager, whole)

    model = two_layers()
    first = build_averager(average_flags(name), model)
    wander(model, first, range(3))
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second = build_averager(average_flags(name), model)
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))  # docs/PITFALLS.md, 10
    wander(model, second, range(3, EPOCHS))
    assert np.array_equal(averaged(second, model), expected)


def test_an_average_of_other_parameters_is_refused() -> None:
    model = two_layers()
    state = build_averager(average_flags("ema"), model).state_dict()
    model[0].requires_grad_(True)
    with pytest.raises(ValueError, match=r"same parameters, found 0.bias"):
        build_averager(average_flags("ema"), model).load_state_dict(state)


def test_no_average_holds_nothing() -> None:
    averager = build_averager(average_flags("none"), two_layers())
    assert vars(averager) == {} == averager.state_dict()


def test_optimizer_test_prints_one_line_of_success() -> None:
    result = run_script("optimizer_test.py")
    assert (result.returncode, result.stdout) == (0, "Optimizer test passed!\n"), result.stderr


def test_optimizer_test_fails_on_a_wrong_optimizer(monkeypatch, capsys) -> None:
    import optimizer_test

    monkeypatch.setattr(optimizer_test, "AdamW", lambda p, correct_bias, **kw: torch.optim.AdamW(p, eps=1e-6, **kw))
    assert optimizer_test.main() == 1
    assert "FAILED" in capsys.readouterr().err
    assert optimizer.AdamW is AdamW
