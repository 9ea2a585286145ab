"""Losses against their formulas in float64; specs such as ce+ce_smooth:0.2; weightings between tasks."""

import argparse
import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import losses
from losses import DEFAULT_LOSSES, LOSSES, WEIGHTINGS, Loss, build_objective, build_weighting
from optimizer import parameter_groups
from tasks import PARA, SST, STS, TASKS, Batch, Output, Task
from utils import InputError

OF_KIND = {"category": SST, "probability": PARA, "number": STS}
FITTING = [(name, kind) for name, loss in sorted(LOSSES.items()) for kind in loss.kinds]


def flags(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    losses.add_arguments(parser)
    return parser.parse_args(argv)


def example(task: Task, B: int = 7, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Output, Batch]:
    """Random logits and vectors; labels of the type that the data has."""
    rng = np.random.default_rng(seed)
    count = len(task.text_columns)
    vectors = tuple(torch.tensor(rng.normal(size=(B, 6)), dtype=dtype, requires_grad=True) for _ in range(count))
    logits = torch.tensor(2 * rng.normal(size=(B, task.num_outputs)), dtype=dtype, requires_grad=True)
    values = {
        "category": lambda: rng.integers(task.num_outputs, size=B),
        "probability": lambda: np.arange(B) % 2,
        "number": lambda: rng.uniform(0, 5, size=B).astype(np.float32),
    }[task.kind]()
    return Output(logits, vectors), Batch(task.name, [str(i) for i in range(B)], (), torch.tensor(values))


def rows(output: Output, batch: Batch, chosen: list[int]) -> tuple[Output, Batch]:
    part = Output(output.logits[chosen], tuple(v[chosen] for v in output.vectors))
    return part, dataclasses.replace(batch, ids=[batch.ids[i] for i in chosen], labels=batch.labels[chosen])


# --- losses -----------------------------------------------------------------------------------------------------------


def by_hand(name: str, logits: np.ndarray, label: float, eps: float = 0.1) -> float:
    """The loss of one example."""
    if name == "mse":
        return (logits[0] - label) ** 2
    if name == "bce":
        p = 1 / (1 + math.exp(-logits[0]))
        return -label * math.log(p) - (1 - label) * math.log(1 - p)
    log_p = logits - np.log(np.exp(logits).sum())
    eps = eps if name == "ce_smooth" else 0.0
    return -(1 - eps) * log_p[int(label)] - eps * log_p.mean()


@pytest.mark.parametrize("name", ["bce", "ce", "ce_smooth", "mse"])
@pytest.mark.parametrize("B", [1, 7])
def test_a_loss_is_the_mean_of_its_formula_over_the_examples_in_the_batch(name: str, B: int) -> None:
    """TRAPS 12: not a sum, and not divided by the batch size that was asked for."""
    output, batch = example(OF_KIND[LOSSES[name].kinds[0]], B)
    pairs = zip(output.logits.detach().numpy(), batch.labels.tolist(), strict=True)
    expected = np.mean([by_hand(name, logits, label) for logits, label in pairs])
    assert LOSSES[name](output, batch).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("name", "kind"), FITTING)
def test_a_loss_is_a_scalar_with_gradients_that_does_not_mind_the_order_of_the_rows(name: str, kind: str) -> None:
    output, batch = example(OF_KIND[kind])
    loss = LOSSES[name](output, batch)
    assert loss.shape == ()
    assert loss.isfinite()
    loss.backward()
    grads = [t.grad for t in (output.logits, *output.vectors)]
    assert any(g is not None and g.any() for g in grads)
    assert all(g is None or g.isfinite().all() for g in grads)
    turned = LOSSES[name](*rows(output, batch, [3, 6, 0, 1, 5, 2, 4]))
    torch.testing.assert_close(turned, loss)


@pytest.mark.parametrize(("name", "kind"), FITTING)
def test_a_loss_does_not_grow_with_the_batch(name: str, kind: str) -> None:
    """TRAPS 12 and 16: losses on one scale, or the largest decides every step. Per-example losses keep it exactly."""
    output, batch = example(OF_KIND[kind])
    once = LOSSES[name](output, batch)
    twice = LOSSES[name](*rows(output, batch, [*range(7), *range(7)]))
    if name in ("bce", "ce", "ce_smooth", "mse"):
        torch.testing.assert_close(twice, once)
    assert twice < 1.9 * once + 0.1


@pytest.mark.parametrize(("name", "kind"), FITTING)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_loss_of_half_precision_logits_is_computed_in_float32(name: str, kind: str, dtype: torch.dtype) -> None:
    output, batch = example(OF_KIND[kind], dtype=dtype)
    loss = LOSSES[name](output, batch)
    exact = LOSSES[name](Output(output.logits.double(), tuple(v.double() for v in output.vectors)), batch)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=1e-5)


def test_every_kind_of_task_has_a_default_that_fits_it() -> None:
    assert DEFAULT_LOSSES.keys() == {task.kind for task in TASKS.values()}
    for task in TASKS.values():
        assert task.kind in LOSSES[DEFAULT_LOSSES[task.kind]].kinds
        output, batch = example(task)
        default = LOSSES[DEFAULT_LOSSES[task.kind]](output, batch)
        assert torch.equal(build_objective(None, task, flags())(output, batch), default)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_every_setting_of_a_loss_is_a_flag(name: str) -> None:
    assert all(hasattr(flags(), setting) for setting in LOSSES[name].settings)


@pytest.mark.parametrize("eps", [0.0, 0.3])
def test_the_flag_sets_the_share_that_label_smoothing_spreads(eps: float) -> None:
    output, batch = example(SST)
    objective = build_objective("ce_smooth", SST, flags("--label_smoothing", str(eps)))
    pairs = zip(output.logits.detach().numpy(), batch.labels.tolist(), strict=True)
    expected = np.mean([by_hand("ce_smooth", logits, label, eps) for logits, label in pairs])
    assert objective(output, batch).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("spec", "weights"),
    [
        ("ce", {"ce": 1}),
        ("ce:0.5", {"ce": 0.5}),
        ("ce+ce_smooth:0.2", {"ce": 1, "ce_smooth": 0.2}),
        ("ce:3e-1+ce_smooth", {"ce": 0.3, "ce_smooth": 1}),
    ],
)
def test_a_spec_is_a_weighted_sum(spec: str, weights: dict[str, float]) -> None:
    output, batch = example(SST)
    expected = sum(weight * LOSSES[name](output, batch) for name, weight in weights.items())
    torch.testing.assert_close(build_objective(spec, SST, flags())(output, batch), expected)


def test_a_loss_on_vectors_with_settings_fits_into_the_same_dictionary(monkeypatch) -> None:
    """What contrastive losses need: the vectors, their own flags, several kinds."""

    def alignment(output: Output, batch: Batch, label_smoothing: float) -> Tensor:
        u, v = output.vectors
        return label_smoothing * (u - v).pow(2).sum(dim=1).mean()

    monkeypatch.setitem(LOSSES, "alignment", Loss(alignment, ("probability", "number"), ("label_smoothing",)))
    output, batch = example(PARA)
    u, v = output.vectors
    ours = build_objective("bce+alignment:0.5", PARA, flags("--label_smoothing", "0.4"))(output, batch)
    torch.testing.assert_close(ours, LOSSES["bce"](output, batch) + 0.5 * 0.4 * (u - v).pow(2).sum(1).mean())


@pytest.mark.parametrize(
    ("spec", "task", "message"),
    [
        ("focal", SST, r"^--sst_loss focal: a loss must be one of .*, found 'focal'"),
        ("", SST, None),
        ("ce+", SST, r"a loss must be one of .*, found ''"),
        ("ce:", SST, r"^--sst_loss ce:: the weight of ce must be a number above 0, found ''"),
        ("ce:x", SST, r"found 'x'. Write it like mse:0.2"),
        ("ce:0", SST, r"above 0, found '0'"),
        ("ce:-1", SST, r"above 0, found '-1'"),
        ("ce:nan", SST, r"found 'nan'"),
        ("ce:inf", SST, r"found 'inf'"),
        (
            "mse",
            PARA,
            r"^--para_loss mse: mse is for .* a number, found para, whose output is a probability. Use .*bce",
        ),
        ("bce", STS, r"bce is for .* a probability, found sts, whose output is a number. Use .*mse"),
        ("ce", STS, r"ce is for .* a category, found sts"),
    ],
)
def test_a_wrong_spec_is_refused_with_rule_and_remedy(spec: str, task: Task, message: str | None) -> None:
    if message is None:
        build_objective(spec, task, flags())  # nothing given: the usual loss
        return
    with pytest.raises(InputError, match=message):
        build_objective(spec, task, flags())


# --- weightings -------------------------------------------------------------------------------------------------------

TRIO = [SST, PARA, STS]
GIVEN = {"fixed": ["--task_weights", "para=0.5", "sts=2"]}


def weighting(name: str) -> nn.Module:
    return build_weighting(flags("--weighting", name, *GIVEN.get(name, [])), TRIO)


@pytest.mark.parametrize("name", sorted(WEIGHTINGS))
def test_a_weighting_keeps_the_direction_of_the_gradient_and_is_linear_in_the_loss(name: str) -> None:
    module = weighting(name)
    for task in TRIO:
        values = [module(task.name, torch.tensor(x, dtype=torch.float64)).item() for x in (0.0, 1.0, 3.0)]
        assert values[2] - values[0] == pytest.approx(3 * (values[1] - values[0]))
        assert values[1] > values[0]


@pytest.mark.parametrize("name", sorted(WEIGHTINGS))
def test_what_a_weighting_learns_is_owned_by_the_optimizer_and_by_the_checkpoint(name: str) -> None:
    model = nn.ModuleDict({"head": nn.Linear(2, 1), "weighting": weighting(name)})
    owned = {id(p) for group in parameter_groups(model, 1e-3) for p in group["params"]}
    assert {id(p) for p in model["weighting"].parameters()} <= owned
    assert len(list(model["weighting"].parameters())) == (3 if name == "uncertainty" else 0)
    twin = weighting(name)
    twin.load_state_dict(model["weighting"].state_dict())


def test_equal_leaves_the_loss_alone_and_fixed_multiplies_it() -> None:
    loss = torch.tensor(3.0)
    assert [weighting("equal")(task.name, loss).item() for task in TRIO] == [3.0, 3.0, 3.0]
    assert [weighting("fixed")(task.name, loss).item() for task in TRIO] == [3.0, 1.5, 6.0]


@pytest.mark.parametrize("s", [-1.0, 0.0, 0.7])
@pytest.mark.parametrize("task", TRIO, ids=lambda task: task.name)
def test_uncertainty_weighs_by_the_likelihood_of_kendall_et_al(task: Task, s: float) -> None:
    """Equation 10: L / (2 sigma^2) + log sigma for a regression, L / sigma^2 + log sigma for a classification."""
    module = weighting("uncertainty").double()
    with torch.no_grad():
        module.log_variances[task.name].fill_(s)
    loss = torch.tensor(1.7, dtype=torch.float64, requires_grad=True)
    sigma = math.exp(s / 2)
    factor = 0.5 if task is STS else 1.0
    weighted = module(task.name, loss)
    assert weighted.item() == pytest.approx(factor * 1.7 / sigma**2 + math.log(sigma))
    weighted.backward()
    assert loss.grad.item() == pytest.approx(factor / sigma**2)
    assert module.log_variances[task.name].grad.item() == pytest.approx(0.5 - factor * 1.7 / sigma**2)
    others = [module.log_variances[t.name].grad for t in TRIO if t is not task]
    assert others == [None, None], "a task that is not in the step leaves the others' weights alone"


@pytest.mark.parametrize("task", TRIO, ids=lambda task: task.name)
def test_uncertainty_settles_where_the_likelihood_is_highest(task: Task) -> None:
    module = weighting("uncertainty").double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    loss = torch.tensor(0.3, dtype=torch.float64)
    for _ in range(200):
        optimizer.zero_grad()
        module(task.name, loss).backward()
        optimizer.step()
    optimum = math.log(0.3) if task is STS else math.log(2 * 0.3)
    assert module.log_variances[task.name].item() == pytest.approx(optimum, abs=1e-9)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--weighting", "fixed"], "without --task_weights"),
        (["--task_weights", "sst=2"], "found --weighting equal with --task_weights"),
        (["--weighting", "fixed", "--task_weights", "imdb=2"], "must be one of sst, para, sts, found 'imdb'"),
    ],
)
def test_weights_that_would_be_ignored_are_refused(argv: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_weighting(flags(*argv), TRIO)


@pytest.mark.parametrize("text", ["sst", "sst=", "=2", "sst=x", "sst=0", "sst=-1", "sst=nan"])
def test_a_malformed_weight_is_refused_by_the_parser(text: str, capsys) -> None:
    with pytest.raises(SystemExit):
        flags("--weighting", "fixed", "--task_weights", text)
    assert "must be" in capsys.readouterr().err
