"""Losses against their formulas in float64; specs such as ce+ce_smooth:0.2; weightings between tasks."""

import argparse
import dataclasses
import inspect
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from conftest import COURSE_TASKS
from torch import Tensor, nn

import losses
from flags import ArgumentParser
from losses import (
    LOSSES,
    WEIGHTINGS,
    Loss,
    build_objective,
    build_weighting,
    losses_in,
    ranking,
    same_meaning,
    without_excluded,
)
from optimizer import parameter_groups
from tasks import PARA, SST, STS, TASKS, Batch, Category, Number, Output, Probability, Task
from utils import InputError

WIDE = dataclasses.replace(STS, name="wide", predicts=Number(1, 7))
NLI = dataclasses.replace(PARA, name="nli", predicts=Category(3))
GIVEN_TASKS = {task.name: task for task in (SST, PARA, STS, WIDE, NLI)}


def fits(loss: Loss, task: Task) -> bool:
    return isinstance(task.predicts, loss.fits) and (task.is_pair or not loss.needs_pair)


FITTING = [(name, task.name) for name in sorted(LOSSES) for task in GIVEN_TASKS.values() if fits(LOSSES[name], task)]


@pytest.fixture(autouse=True)
def _more_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register a number of another range and a category of pairs, which no task of the course has."""
    for task in (WIDE, NLI):
        monkeypatch.setitem(TASKS, task.name, task)


def parser() -> ArgumentParser:
    new = ArgumentParser("losses.py", "")
    losses.add_arguments(new, TASKS.values())
    return new


def flags(*argv: str) -> argparse.Namespace:
    return parser().parse_args(argv)


def checked_flags(*argv: str, train: tuple[str, ...] = ("sst", "para", "sts")) -> argparse.Namespace:
    """The same, but a flag that has no effect is an error."""
    return parser().parse(list(argv), lambda args: argparse.Namespace(**vars(args), train_tasks=list(train)))


def dot_products(pairs: tuple[Tensor, Tensor]) -> Tensor:
    """A head for pairs: (n, H), (n, H) -> (n, 1)."""
    u, v = (losses.at_least_float32(x) for x in pairs)
    return (u * v).sum(dim=1, keepdim=True)


def example(task: Task, B: int = 7, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Output, Batch]:
    """Random logits and vectors, also of a teacher and of a second pass. Labels have the type that the data has."""
    rng = np.random.default_rng(seed)
    count = len(task.text_columns)

    def vectors() -> tuple[Tensor, ...]:
        return tuple(torch.tensor(rng.normal(size=(B, 6)), dtype=dtype, requires_grad=True) for _ in range(count))

    first, second = vectors(), vectors()
    logits, teacher = (torch.tensor(2 * rng.normal(size=(B, task.predicts.num_logits)), dtype=dtype) for _ in range(2))
    texts = tuple(torch.arange(B) + B * column for column in range(count))
    match task.predicts:
        case Category(C):
            values = rng.integers(C, size=B)
        case Probability():
            values = np.arange(B) % 2
        case Number(low, high):
            values = rng.permutation(np.linspace(low, high, B, dtype=np.float32))
    again = Output(logits, second)
    output = Output(logits.requires_grad_(), first, score=dot_products, again=lambda: again)
    ids = [str(i) for i in range(B)]
    return output, Batch(task.name, ids, (), torch.tensor(values), text_hashes=texts, teacher=teacher)


def changed(output: Output, change: Callable[[Tensor], Tensor]) -> Output:
    """Apply `change` to all tensors of an output, including those of the second pass."""
    again = output.again()
    other = again._replace(logits=change(again.logits), vectors=tuple(map(change, again.vectors)))
    vectors = tuple(map(change, output.vectors))
    return output._replace(logits=change(output.logits), vectors=vectors, again=lambda: other)


def rows(output: Output, batch: Batch, chosen: list[int]) -> tuple[Output, Batch]:
    return changed(output, lambda x: x[chosen]), dataclasses.replace(
        batch,
        ids=[batch.ids[i] for i in chosen],
        labels=batch.labels[chosen],
        text_hashes=tuple(column[chosen] for column in batch.text_hashes),
        teacher=batch.teacher[chosen],
    )


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


@pytest.mark.parametrize(("name", "task"), [case for case in FITTING if case[0] in ("bce", "ce", "ce_smooth", "mse")])
@pytest.mark.parametrize("B", [1, 7])
def test_a_loss_is_the_mean_of_its_formula_over_the_examples_in_the_batch(name: str, task: str, B: int) -> None:
    """Neither a sum nor a sum divided by the requested batch size (docs/PITFALLS.md, 12)."""
    output, batch = example(GIVEN_TASKS[task], B)
    pairs = zip(output.logits.detach().numpy(), batch.labels.tolist(), strict=True)
    expected = np.mean([by_hand(name, logits, label) for logits, label in pairs])
    assert LOSSES[name].function(output, batch).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("name", "task"), FITTING)
def test_a_loss_is_a_scalar_with_gradients_that_does_not_mind_the_order_of_the_rows(name: str, task: str) -> None:
    output, batch = example(GIVEN_TASKS[task])
    loss = LOSSES[name].function(output, batch)
    assert loss.shape == ()
    assert loss.isfinite()
    loss.backward()
    grads = [t.grad for t in (output.logits, *output.vectors)]
    assert any(g is not None and g.any() for g in grads)
    assert all(g is None or g.isfinite().all() for g in grads)
    turned = LOSSES[name].function(*rows(output, batch, [3, 6, 0, 1, 5, 2, 4]))
    torch.testing.assert_close(turned, loss)


@pytest.mark.parametrize(("name", "task"), FITTING)
def test_a_loss_does_not_grow_with_the_batch(name: str, task: str) -> None:
    """Losses share one scale, or the largest would decide every step (docs/PITFALLS.md, 12 and 16).

    Losses per example do not grow at all. Losses that compare rows grow at most by the logarithm of the factor by which
    the number of candidates or pairs grows.
    """
    output, batch = example(GIVEN_TASKS[task])
    once = LOSSES[name].function(output, batch)
    twice = LOSSES[name].function(*rows(output, batch, [*range(7), *range(7)]))
    grows = {"cosent": math.log(4), "mnrl": math.log(2), "mnrl_head": math.log(2), "simcse": math.log(2)}
    assert once - 1e-12 <= twice <= once + grows.get(name, 1e-12)


@pytest.mark.parametrize(("name", "task"), FITTING)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_loss_of_half_precision_logits_is_computed_in_float32(name: str, task: str, dtype: torch.dtype) -> None:
    output, batch = example(GIVEN_TASKS[task], dtype=dtype)
    loss = LOSSES[name].function(output, batch)
    exact = LOSSES[name].function(changed(output, Tensor.double), batch)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("task", COURSE_TASKS.values(), ids=COURSE_TASKS)
def test_every_task_has_a_default_that_fits_it_and_is_its_flags_default(task: Task) -> None:
    spec = getattr(flags(), f"{task.name}_loss")
    assert spec == task.predicts.default_loss == {"sst": "ce", "cfimdb": "ce", "para": "bce", "sts": "mse"}[task.name]
    output, batch = example(task)
    assert torch.equal(build_objective(spec, task, flags())(output, batch), LOSSES[spec].function(output, batch))


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_every_setting_of_a_loss_is_a_flag_with_the_functions_own_default(name: str) -> None:
    defaults = {p.name: p.default for p in inspect.signature(LOSSES[name].function).parameters.values()}
    for setting in LOSSES[name].settings:
        assert getattr(flags(), setting) == defaults[setting]
    assert set(LOSSES[name].settings) == defaults.keys() - {"output", "batch"}


OTHER_VALUES = {
    "label_smoothing": ("0.4",),
    "cosine_margin": ("-0.5",),
    "cosent_scale": ("3",),
    "mnrl_scale": ("3",),
    "mnrl_symmetric": (),
    "mnrl_threshold": ("2",),
    "simcse_temperature": ("0.5",),
    "distill_temperature": ("5",),
}
SETTINGS = [(name, setting, task) for name, task in FITTING for setting in LOSSES[name].settings]


@pytest.mark.parametrize(("name", "setting", "task"), SETTINGS)
def test_a_setting_has_an_effect_exactly_on_the_targets_that_the_loss_states(name: str, setting: str, task: str):
    """The other settings are accepted as well, but a flag that would do nothing must be known as one."""
    output, batch = example(GIVEN_TASKS[task])
    given = flags(f"--{setting}", *OTHER_VALUES[setting])
    before, after = (build_objective(name, GIVEN_TASKS[task], f)(output, batch) for f in (flags(), given))
    stated = isinstance(GIVEN_TASKS[task].predicts, LOSSES[name].settings[setting])
    assert (before.item() != after.item()) == stated


@pytest.mark.parametrize(("name", "setting", "task"), SETTINGS)
def test_a_setting_is_refused_unless_a_task_that_trains_has_a_loss_that_reads_it(name: str, setting: str, task: str):
    flag, spec = [f"--{setting}", *OTHER_VALUES[setting]], [f"--{task}_loss", name]
    with pytest.raises(InputError, match=rf"^--{setting}.* needs the loss .*{name}"):
        checked_flags(*flag, train=("sst", "para", "sts", task))
    if isinstance(GIVEN_TASKS[task].predicts, LOSSES[name].settings[setting]):
        found = checked_flags(*flag, *spec, train=(task,))
        assert getattr(found, setting) != getattr(flags(), setting)
    else:
        with pytest.raises(InputError, match=rf"^--{setting}.* needs the loss .* of a task that predicts a "):
            checked_flags(*flag, *spec, train=(task,))


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
    expected = sum(weight * LOSSES[name].function(output, batch) for name, weight in weights.items())
    torch.testing.assert_close(build_objective(spec, SST, flags())(output, batch), expected)


def test_a_loss_on_vectors_with_settings_fits_into_the_same_dictionary(monkeypatch) -> None:
    """Contrastive losses need this: the vectors, flags of their own, and several kinds of task."""

    def alignment(output: Output, batch: Batch, label_smoothing: float) -> Tensor:
        u, v = output.vectors
        return label_smoothing * (u - v).pow(2).sum(dim=1).mean()

    monkeypatch.setitem(LOSSES, "alignment", Loss(alignment, losses.GRADED, {"label_smoothing": losses.GRADED}))
    output, batch = example(PARA)
    u, v = output.vectors
    ours = build_objective("bce+alignment:0.5", PARA, flags("--label_smoothing", "0.4"))(output, batch)
    torch.testing.assert_close(ours, LOSSES["bce"].function(output, batch) + 0.5 * 0.4 * (u - v).pow(2).sum(1).mean())


NOT_LOSSES = r"must be made of ce, ce_smooth, bce, mse, .*, found"
WRONG_SPECS = [
    ("focal", SST, rf"^--sst_loss focal: {NOT_LOSSES} 'focal'\. Choose one\.$"),
    ("cosin", PARA, rf"^--para_loss cosin: {NOT_LOSSES} 'cosin'\. Did you mean \w+\?$"),
    ("", SST, rf"^--sst_loss : {NOT_LOSSES} ''"),
    ("ce+", SST, rf"^--sst_loss ce\+: {NOT_LOSSES} ''"),
    ("ce+ce:2", SST, r"^--sst_loss ce\+ce:2: each name may appear once, found ce twice\. Remove one\.$"),
    ("ce:", SST, r"^--sst_loss ce:: the weight of ce must be a number above 0, found ''"),
    ("ce:x", SST, r"found 'x'\. Write it like ce:0\.2, or leave it out\.$"),
    ("ce:0", SST, r"above 0, found '0'"),
    ("ce:-1", SST, r"above 0, found '-1'"),
    ("ce:nan", SST, r"found 'nan'"),
    ("ce:inf", SST, r"found 'inf'"),
    (
        "mse",
        PARA,
        r"^--para_loss mse: mse is for a task that predicts a number, but para predicts a probability\. Use bce or .*",
    ),
    ("bce", STS, r"bce is for a task that predicts a probability, but sts predicts a number\. Use mse or .*"),
    ("ce", STS, r"ce is for a task that predicts a category, but sts predicts a number"),
    ("ce+mnrl", SST, r"mnrl is for a task that predicts a probability or a number, but sst predicts a category\. Use "),
]


@pytest.mark.parametrize(("spec", "task", "message"), WRONG_SPECS, ids=[f"{t.name} {s}" for s, t, _ in WRONG_SPECS])
def test_a_wrong_spec_is_refused_with_rule_and_remedy(spec: str, task: Task, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_objective(spec, task, flags())


@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if loss.needs_pair])
def test_a_loss_that_compares_two_sentences_is_refused_for_a_task_on_one(name: str) -> None:
    review = dataclasses.replace(SST, name="stars", predicts=Number(0, 5))
    message = f"{name} is for a task that predicts a score for a pair of sentences, but stars has one sentence"
    with pytest.raises(InputError, match=rf"^--stars_loss {name}: {message}. Use mse or distill or simcse\.$"):
        losses_in(name, review)
    assert losses_in(f"mse+{name}:0.5", STS) == {"mse": 1.0, name: 0.5}


# --- distillation -----------------------------------------------------------------------------------------------------


def probabilities(logits: np.ndarray, T: float) -> np.ndarray:
    """The softened probabilities; for one logit, those of yes and no."""
    if len(logits) == 1:
        yes = 1 / (1 + math.exp(-logits[0] / T))
        return np.array([yes, 1 - yes])
    return np.exp(logits / T) / np.exp(logits / T).sum()


@pytest.mark.parametrize("T", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("task", [SST, PARA], ids=lambda task: task.name)
def test_distillation_is_hintons_divergence_between_softened_distributions(task: Task, T: float) -> None:
    output, batch = example(task)
    pairs = zip(output.logits.detach().numpy(), batch.teacher.numpy(), strict=True)
    softened = [(probabilities(teacher, T), probabilities(student, T)) for student, teacher in pairs]
    expected = T**2 * np.mean([(p * np.log(p / q)).sum() for p, q in softened])
    loss = build_objective("distill", task, flags("--distill_temperature", str(T)))(output, batch)
    assert loss.item() == pytest.approx(expected, rel=1e-10)
    loss.backward()
    by_hand = [
        T * (q - p)[: task.predicts.num_logits] / 7 for p, q in softened
    ]  # their equation 2, times T^2, averaged
    np.testing.assert_allclose(output.logits.grad, np.array(by_hand), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("task", [STS, WIDE], ids=lambda task: task.name)
def test_distillation_of_a_number_is_the_squared_error(task: Task) -> None:
    output, batch = example(task)
    expected = np.mean((output.logits.detach().numpy() - batch.teacher.numpy()) ** 2)
    assert LOSSES["distill"].function(output, batch).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("task", [SST, PARA, STS], ids=lambda task: task.name)
def test_a_student_that_agrees_with_its_teacher_has_nothing_to_learn(task: Task) -> None:
    output, batch = example(task)
    loss = LOSSES["distill"].function(output, dataclasses.replace(batch, teacher=output.logits.detach()))
    loss.backward()
    assert loss.item() == pytest.approx(0, abs=1e-15)
    assert output.logits.grad.abs().max() < 1e-15


# --- losses on vectors ------------------------------------------------------------------------------------------------


def cosine(x: np.ndarray, y: np.ndarray) -> float:
    return float(x @ y / math.sqrt((x @ x) * (y @ y)))


def arrays(output: Output) -> list[np.ndarray]:
    return [v.detach().double().numpy() for v in output.vectors]


def test_texts_with_the_same_meaning_do_not_count_as_negatives() -> None:
    """Rows: (how?, in what way?) +, (in what way?, by what?) +, (why?, how?) -, (where?, when?) +.

    For "how?", its own pair, "how?" itself in row 2, and "by what?" in row 1 are excluded: row 1 says that it means the
    same as "in what way?". Row 2 is not a paraphrase and says nothing.
    """
    how, way, what, why, where, when = range(6)
    x, y = torch.tensor([how, way, why, where]), torch.tensor([way, what, how, when])
    positive = torch.tensor([True, True, False, True])
    assert same_meaning(x, y, y, positive).tolist() == [
        [True, True, True, False],  # how, way: y_0; y_1 by row 1; y_2 is "how?" itself
        [True, True, False, False],  # way, what: "in what way?" is y_0
        [True, False, True, False],  # why, how: y_2; y_0 by row 0, where x_0 is "how?"
        [False, False, False, True],
    ]
    assert same_meaning(x, y, y)[0].tolist() == [True, True, True, False]
    # From second to first sentences, and with row 2 as a positive pair: then "why?" means the same as "how?".
    assert same_meaning(y, x, x).tolist() == [
        [True, True, True, False],  # way, how: x_0; "in what way?" is x_1; x_2 by row 2, where y_2 is "how?"
        [True, True, False, False],
        [True, False, True, False],
        [False, False, False, True],
    ]
    assert same_meaning(y, x, x, positive)[0].tolist() == [True, True, False, False]


def test_candidates_beyond_the_positives_are_excluded_by_their_own_text_only() -> None:
    """Supervised SimCSE adds hard negatives behind the B positives: (B,), (B,), (S,) with S = B + 2."""
    x, y = torch.tensor([1, 2]), torch.tensor([3, 4])
    candidates = torch.tensor([3, 4, 1, 9])
    excluded = same_meaning(x, y, candidates)
    assert excluded.tolist() == [[True, False, True, False], [False, True, False, False]]
    scores = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    inf = math.inf
    assert without_excluded(scores, excluded).tolist() == [[1.0, 2.0, -inf, 4.0], [5.0, 6.0, 7.0, 8.0]]
    rows = [math.log(1 + math.e + math.e**3), math.log(1 + math.e**-1 + math.e + math.e**2)]
    for anchors, expected in (([1, 1], np.mean(rows)), ([1, 0], rows[0]), ([False, True], rows[1]), ([0, 0], 0.0)):
        found = ranking(scores, excluded, torch.tensor(anchors))
        assert found.item() == pytest.approx(expected, rel=1e-6)


def ranked(scores: np.ndarray, x: list[int], y: list[int], positive: list[bool]) -> float:
    """Henderson et al.'s mean over the positive rows, candidate by candidate."""
    found = []
    for i in (i for i, is_positive in enumerate(positive) if is_positive):
        same = {x[i], y[i]}
        wrong = [j for j in range(len(x)) if j != i and y[j] not in same and not (positive[j] and x[j] in same)]
        found.append(math.log(sum(math.exp(scores[i, j] - scores[i, i]) for j in [i, *wrong])))
    return float(np.mean(found)) if found else 0.0


TEXTS = {
    "all different": ([0, 1, 2, 3, 4, 5, 6], [10, 11, 12, 13, 14, 15, 16]),
    "a second text twice": ([0, 1, 2, 3, 4, 5, 6], [10, 11, 12, 11, 14, 11, 16]),
    "a first text twice": ([0, 1, 2, 1, 4, 5, 1], [10, 11, 12, 13, 14, 15, 16]),
    "a text in both columns": ([0, 1, 12, 13, 4, 5, 6], [10, 11, 12, 13, 14, 1, 3]),
    "one text everywhere": ([7] * 7, [7] * 7),
}


@pytest.mark.parametrize("task", [PARA, STS, WIDE], ids=lambda task: task.name)
@pytest.mark.parametrize("texts", TEXTS)
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("name", ["mnrl", "mnrl_head"])
def test_multiple_negatives_ranking_is_its_formula_with_like_texts_left_out(
    name: str, symmetric: bool, texts: str, task: Task
) -> None:
    """Duplicates in the batch are no negatives (docs/PITFALLS.md, 28)."""
    output, batch = example(task)
    x, y = TEXTS[texts]
    batch = dataclasses.replace(batch, text_hashes=(torch.tensor(x), torch.tensor(y)))
    u, v = arrays(output)
    score = (lambda a, b: 7 * cosine(a, b)) if name == "mnrl" else np.dot
    scores = np.array([[score(a, b) for b in v] for a in u])
    positive = [label >= (1 if task is PARA else 3) for label in batch.labels.tolist()]
    assert 1 < sum(positive) < 7
    expected = ranked(scores, x, y, positive)
    if symmetric:
        expected = (expected + ranked(scores.T, y, x, positive)) / 2
    given = flags("--mnrl_scale", "7", "--mnrl_threshold", "3", *["--mnrl_symmetric"] * symmetric)
    assert build_objective(name, task, given)(output, batch).item() == pytest.approx(expected, rel=1e-10, abs=1e-14)


NOTHING_TO_COMPARE = [
    (name, case)
    for name in ("mnrl", "mnrl_head", "simcse", "cosent")
    for case in ("one row", "nothing positive", "one text everywhere")
    if (name, case) != ("simcse", "nothing positive")  # it reads no labels
]


@pytest.mark.parametrize(("name", "case"), NOTHING_TO_COMPARE)
def test_without_anything_to_compare_a_contrastive_loss_is_exactly_zero_and_so_are_its_gradients(
    name: str, case: str
) -> None:
    output, batch = example(PARA, 1 if case == "one row" else 4)
    if case == "one row":
        batch = dataclasses.replace(batch, labels=torch.ones(1))
    elif case == "nothing positive":
        batch = dataclasses.replace(batch, labels=torch.zeros(4))
    else:
        batch = dataclasses.replace(batch, text_hashes=(torch.zeros(4), torch.zeros(4)), labels=torch.ones(4))
    loss = LOSSES[name].function(output, batch)
    assert loss.item() == 0
    loss.backward()
    for vectors in output.vectors:
        assert vectors.grad is not None
        assert vectors.grad.abs().max() < 1e-15


def test_of_one_positive_row_the_negative_rows_are_hard_negatives() -> None:
    output, batch = example(PARA, 4)
    batch = dataclasses.replace(batch, labels=torch.tensor([0, 0, 1, 0]))
    u, v = arrays(output)
    scores = [20 * cosine(u[2], b) for b in v]
    expected = math.log(sum(math.exp(s - scores[2]) for s in scores))
    assert LOSSES["mnrl"].function(output, batch).item() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("name", ["cosent", "cosine_embedding", "mnrl", "simcse"])
def test_autocast_does_not_coarsen_the_cosines(name: str) -> None:
    """A matrix product under autocast has only three digits, and mnrl multiplies it by 20."""
    output, batch = example(PARA, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = LOSSES[name].function(output, batch)
    torch.testing.assert_close(loss, LOSSES[name].function(output, batch), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["cosent", "cosine_embedding", "mnrl", "simcse"])
def test_cosines_do_not_mind_the_vectors_lengths(name: str) -> None:
    output, batch = example(STS)
    torch.testing.assert_close(
        LOSSES[name].function(changed(output, lambda x: 50 * x), batch), LOSSES[name].function(output, batch)
    )


@pytest.mark.parametrize("margin", [-0.2, 0.0, 0.3])
def test_cosine_embedding_is_torchs_loss_where_torchs_targets_say_what_is_meant(margin: float) -> None:
    reference = nn.CosineEmbeddingLoss(margin=margin)
    for task, no, yes in ((PARA, 0, 1), (STS, 0, 5), (WIDE, 1, 7)):
        output, batch = example(task, 8)
        label = torch.tensor([0, 1, 1, 0, 0, 1, 0, 1])
        ours = build_objective("cosine_embedding", task, flags("--cosine_margin", str(margin)))
        loss = ours(output, dataclasses.replace(batch, labels=no + label * (yes - no)))
        torch.testing.assert_close(loss, reference(*output.vectors, 2 * label - 1))


@pytest.mark.parametrize(("task", "low", "high"), [(STS, 0, 5), (WIDE, 1, 7)], ids=["sts", "wide"])
def test_cosine_embedding_of_a_number_is_the_mean_over_both_targets(task: Task, low: float, high: float) -> None:
    """torch's own loss is 0 for every target other than +1 and -1 (docs/PITFALLS.md, 26)."""
    output, batch = example(task)
    shares = (batch.labels.double().numpy() - low) / (high - low)
    assert (shares.min(), shares.max()) == (0, 1)
    expected = [
        p * (1 - cosine(u, v)) + (1 - p) * max(0, cosine(u, v)) for u, v, p in zip(*arrays(output), shares, strict=True)
    ]
    loss = LOSSES["cosine_embedding"].function(output, batch)
    assert loss.item() == pytest.approx(np.mean(expected), rel=1e-6)
    loss.backward()
    assert output.vectors[0].grad[batch.labels > low].any(dim=1).all()


@pytest.mark.parametrize("task", [PARA, STS], ids=lambda task: task.name)
def test_cosent_is_its_formula_over_rows_with_different_labels(task: Task) -> None:
    output, batch = example(task)
    if task is STS:
        batch = dataclasses.replace(batch, labels=torch.tensor([0.0, 2.5, 5.0, 2.5, 1.0, 5.0, 4.2]))
    y = batch.labels.tolist()
    found = [cosine(u, v) for u, v in zip(*arrays(output), strict=True)]
    terms = [math.exp(9 * (found[j] - found[i])) for i in range(7) for j in range(7) if y[i] > y[j]]
    loss = build_objective("cosent", task, flags("--cosent_scale", "9"))(output, batch)
    assert loss.item() == pytest.approx(math.log(1 + sum(terms)), rel=1e-12)


def test_cosent_does_not_overflow() -> None:
    output, batch = example(STS, dtype=torch.float32)
    loss = build_objective("cosent", STS, flags("--cosent_scale", "1e5"))(output, batch)
    loss.backward()
    assert loss.isfinite()
    assert output.vectors[0].grad.isfinite().all()


@pytest.mark.parametrize("task", [SST, STS], ids=lambda task: task.name)
def test_simcse_tells_a_sentence_under_other_dropout_from_all_other_texts(task: Task) -> None:
    output, batch = example(task)
    texts = [column.clone() for column in batch.text_hashes]
    texts[-1][4] = texts[0][1]  # a text that occurs twice
    batch = dataclasses.replace(batch, text_hashes=tuple(texts))
    one, other = np.concatenate(arrays(output)), np.concatenate(arrays(output.again()))
    text = [int(t) for column in texts for t in column]
    row = [*range(7)] * len(texts)
    found = []
    for i in range(len(one)):
        scores = {j: cosine(one[i], other[j]) / 0.1 for j in range(len(other))}
        own = {text[j] for j in scores if row[j] == row[i]}
        wrong = [j for j in scores if text[j] not in own]
        found.append(math.log(sum(math.exp(scores[j] - scores[i]) for j in [i, *wrong])))
    loss = build_objective("simcse", task, flags("--simcse_temperature", "0.1"))(output, batch)
    assert loss.item() == pytest.approx(np.mean(found), rel=1e-10)
    loss.backward()
    assert all(v.grad.any() for v in (*output.vectors, *output.again().vectors)), "both passes learn"


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
        (["--weighting", "fixed"], "--weighting fixed needs --task_weights, found none"),
        (
            ["--task_weights", "sst=2"],
            "--task_weights sst=2 needs --weighting fixed. Use --weighting fixed, or leave out",
        ),
        (["--weighting", "fixed", "--task_weights", "imdb=2"], "must be one of sst, para, sts, found 'imdb'"),
    ],
)
def test_weights_that_would_be_ignored_are_refused(argv: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_weighting(checked_flags(*argv), TRIO)


@pytest.mark.parametrize("text", ["sst", "sst=", "=2", "sst=x", "sst=0", "sst=-1", "sst=nan"])
def test_a_malformed_weight_is_refused_by_the_parser(text: str) -> None:
    with pytest.raises(InputError, match=r"^--task_weights: must be .* See losses\.py --help\.$"):
        flags("--weighting", "fixed", "--task_weights", text)


def test_cosines_are_never_computed_in_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU would compute their product with three digits; divided by a temperature of .05, that is an error of .02."""
    seen, normalize = [], losses.F.normalize

    def recorded(*args: object, **more: object) -> Tensor:
        seen.append(torch.get_float32_matmul_precision())
        return normalize(*args, **more)

    monkeypatch.setattr(losses.F, "normalize", recorded)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        losses.cosines(torch.randn(2, 4), torch.randn(3, 4))
        assert torch.get_float32_matmul_precision() == "high", "the user's setting is restored"
    finally:
        torch.set_float32_matmul_precision(before)
    assert set(seen) == {"highest"}
