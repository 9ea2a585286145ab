"""What a task predicts: every target against plain NumPy formulas in float64, and the rules for labels."""

import math

import numpy as np
import pytest
import torch
from conftest import COURSE_TASKS
from torch import Tensor

from tasks import (
    CFIMDB,
    PARA,
    SST,
    STS,
    Category,
    Number,
    Probability,
    Target,
    accuracy,
    pearson,
    whole_number,
)

TARGETS = {
    "two categories": Category(2),
    "five categories": Category(5),
    "probability": Probability(),
    "0 to 5": Number(0, 5),
    "1 to 7": Number(1, 7),
    "-1 to 1": Number(-1, 1),
}
every_target = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
CLASSIFYING = {name: target for name, target in TARGETS.items() if not isinstance(target, Number)}
NUMBERS = {name: target for name, target in TARGETS.items() if isinstance(target, Number)}
every_classification = pytest.mark.parametrize("target", CLASSIFYING.values(), ids=CLASSIFYING)
every_number = pytest.mark.parametrize("target", NUMBERS.values(), ids=NUMBERS)
# A single number stands for a probability by this (slope, middle): 4 / range and the middle of the range.
SLOPES = {Number(0, 5): (0.8, 2.5), Number(1, 7): (2 / 3, 4.0), Number(-1, 1): (2.0, 0.0)}


def random_logits(target: Target, *shape: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    rng = np.random.default_rng(seed)
    return torch.tensor(scale * rng.normal(size=(*shape, target.num_logits)))


def probabilities(target: Target, logits: Tensor) -> np.ndarray:
    """The distribution over the classes, (..., C) -> (..., G): no and yes for a single logit."""
    x = logits.detach().double().numpy()
    if isinstance(target, Category):
        return np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True)
    if isinstance(target, Number):
        slope, middle = SLOPES[target]
        x = slope * (x - middle)
    yes = 1 / (1 + np.exp(-x))
    return np.concatenate([1 - yes, yes], axis=-1)


def kl_of(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return (p * np.log(p / q)).sum(axis=-1)


# --- distributions ----------------------------------------------------------------------------------------------------


@every_target
@pytest.mark.parametrize("shape", [(20,), (4, 6)])
def test_log_probabilities_are_those_of_the_distribution(target: Target, shape: tuple[int, ...]) -> None:
    logits = random_logits(target, *shape)
    found = target.log_probabilities(logits)
    assert found.shape == (*shape, max(2, target.num_logits))
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found.numpy(), np.log(probabilities(target, logits)), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found.exp().sum(-1).numpy(), 1, rtol=1e-12)


@every_target
def test_log_probabilities_of_extreme_logits_are_finite(target: Target) -> None:
    """Neither log(0) nor an overflow of exp: the logarithm is never taken of a probability."""
    logits = torch.zeros(2, target.num_logits)
    logits[:, 0] = torch.tensor([1e4, -1e4])
    assert target.log_probabilities(logits).isfinite().all()
    assert target.log_probabilities(logits).min() < -1000


@every_classification
def test_log_probabilities_become_logits_again(target: Target) -> None:
    logits = random_logits(target, 30)
    again = target.as_logits(target.log_probabilities(logits))
    assert again.shape == logits.shape
    difference = (again - logits).numpy()  # a constant per row; for a single logit there is nothing to leave open
    np.testing.assert_allclose(difference, np.broadcast_to(difference[:, :1], difference.shape), atol=1e-12)
    assert isinstance(target, Category) or abs(difference).max() < 1e-12
    assert torch.equal(target.decode(again), target.decode(logits))


# --- distances --------------------------------------------------------------------------------------------------------


@every_target
def test_kl_and_its_symmetrized_form_are_their_definitions(target: Target) -> None:
    a, b = random_logits(target, 50), random_logits(target, 50, seed=1)
    p, q = probabilities(target, a), probabilities(target, b)
    np.testing.assert_allclose(target.kl(a, b).numpy(), kl_of(p, q), rtol=1e-9, atol=1e-13)
    np.testing.assert_allclose(target.kl(b, a).numpy(), kl_of(q, p), rtol=1e-9, atol=1e-13)
    np.testing.assert_allclose(target.symmetrized_kl(a, b).numpy(), kl_of(p, q) + kl_of(q, p), rtol=1e-9, atol=1e-13)
    assert not np.allclose(kl_of(p, q), kl_of(q, p), rtol=0.1), "the direction matters, or the test proves nothing"


@every_target
@pytest.mark.parametrize("name", ["kl", "symmetrized_kl", "divergence", "dropout_divergence"])
def test_a_distance_is_zero_between_equal_outputs_and_resolves_small_differences(target: Target, name: str) -> None:
    """In float64, whatever comes in: float32 does not resolve a divergence of 1e-11."""
    distance = getattr(target, name)
    a = random_logits(target, 8, scale=0.5).float()
    assert distance(a, a).tolist() == [0.0] * 8
    near = a.clone()
    near[:, 0] += 1e-5
    found = distance(a, near)
    assert (found.shape, found.dtype) == ((8,), torch.float64)
    p, q = probabilities(target, a), probabilities(target, near)
    symmetrized = ((p - q) * np.log(p / q)).sum(axis=-1)
    by_default = {"kl": kl_of(p, q), "dropout_divergence": symmetrized / 2}.get(name, symmetrized)
    is_squared = isinstance(target, Number) and name.endswith("divergence")
    wanted = ((a.double() - near.double()).numpy() ** 2)[:, 0] if is_squared else by_default
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-3)
    assert 1e-14 < wanted.min() < wanted.max() < 1e-8


@every_target
def test_the_divergences_of_smart_and_of_rdrop(target: Target) -> None:
    """SMART: symmetrized KL, or the squared error of numbers. R-Drop: half of the symmetrized KL, or the same."""
    a, b = random_logits(target, 50), random_logits(target, 50, seed=1)
    p, q = probabilities(target, a), probabilities(target, b)
    if isinstance(target, Number):
        smart = rdrop = ((a - b).numpy() ** 2)[:, 0]
    else:
        smart, rdrop = kl_of(p, q) + kl_of(q, p), (kl_of(p, q) + kl_of(q, p)) / 2
    np.testing.assert_allclose(target.divergence(a, b).numpy(), smart, rtol=1e-9)
    np.testing.assert_allclose(target.dropout_divergence(a, b).numpy(), rdrop, rtol=1e-9)


@pytest.mark.parametrize("T", [0.5, 1.0, 4.0])
@every_classification
def test_distillation_is_the_divergence_of_softened_distributions(target: Target, T: float) -> None:
    student, teacher = random_logits(target, 9).requires_grad_(), random_logits(target, 9, seed=1)
    p, q = (probabilities(target, x / T) for x in (teacher, student))
    found = target.distillation(student, teacher, T)
    assert found.item() == pytest.approx(T**2 * kl_of(p, q).mean(), rel=1e-9)
    found.backward()
    wanted = T * (q - p) / 9  # the gradient by the logits of softened cross entropy, times T^2
    wanted = wanted if isinstance(target, Category) else wanted[:, 1:]
    np.testing.assert_allclose(student.grad.numpy(), wanted, rtol=1e-9, atol=1e-13)


@every_number
def test_distillation_of_a_number_is_the_squared_error_at_any_temperature(target: Number) -> None:
    student, teacher = random_logits(target, 9), random_logits(target, 9, seed=1)
    wanted = ((student - teacher).numpy() ** 2).mean()
    for T in (0.5, 1.0, 4.0):
        assert target.distillation(student, teacher, T).item() == pytest.approx(wanted, rel=1e-12)


# --- several models' logits -------------------------------------------------------------------------------------------

WEIGHTS = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)


@every_target
def test_mean_logits_are_the_weighted_mean(target: Target) -> None:
    logits = random_logits(target, 3, 20)
    mean = sum(w * x for w, x in zip(WEIGHTS.tolist(), logits.numpy(), strict=True))
    found = target.mean_logits(logits, WEIGHTS)
    if isinstance(target, Category):  # up to a constant per row: as logarithms of the geometric mean's probabilities
        np.testing.assert_allclose(found.exp().sum(1).numpy(), 1, rtol=1e-12)
        mean -= np.log(np.exp(mean).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(found.numpy(), mean, rtol=1e-9, atol=1e-12)


@every_classification
def test_mean_probabilities_are_the_weighted_mean_of_the_distributions(target: Target) -> None:
    logits = random_logits(target, 3, 20)
    mean = np.tensordot(WEIGHTS.numpy(), probabilities(target, logits), axes=1)
    found = target.mean_probabilities(logits, WEIGHTS)
    assert found.shape == logits.shape[1:]
    np.testing.assert_allclose(probabilities(target, found), mean, rtol=1e-9)
    geometric = probabilities(target, target.mean_logits(logits, WEIGHTS))
    assert not np.allclose(geometric, mean, rtol=0.05), "the two means differ, or the test proves nothing"


@every_classification
def test_mean_probabilities_of_very_sure_models_stay_finite(target: Target) -> None:
    logits = torch.zeros(2, 3, target.num_logits)
    logits[0, :, 0], logits[1, :, 0] = 500.0, 500.0
    found = target.mean_probabilities(logits, torch.tensor([0.5, 0.5]))
    assert found.isfinite().all()
    assert torch.equal(target.decode(found), target.decode(logits[0]))
    alone = target.mean_probabilities(logits, torch.tensor([1.0, 0.0]))  # a model without weight
    torch.testing.assert_close(target.log_probabilities(alone), target.log_probabilities(logits[0]))


@every_number
def test_a_number_has_the_mean_of_the_numbers_for_every_average(target: Number) -> None:
    logits = random_logits(target, 3, 20)
    mean = np.tensordot(WEIGHTS.numpy(), logits.numpy(), axes=1)
    np.testing.assert_allclose(target.mean_probabilities(logits, WEIGHTS).numpy(), mean, rtol=1e-9, atol=1e-12)


def votes_of(target: Target, logits: Tensor) -> np.ndarray:
    """How many models predict each class: (M, B, C) -> (B, G)."""
    classes = probabilities(target, logits).argmax(axis=-1)  # (M, B)
    return np.stack([(classes == c).sum(axis=0) for c in range(max(2, target.num_logits))], axis=1)


@every_classification
@pytest.mark.parametrize("M", [2, 3, 5])
def test_the_majority_is_the_class_of_most_models_and_the_mean_breaks_ties(target: Target, M: int) -> None:
    logits = random_logits(target, M, 300, scale=1.0)
    votes, mean = votes_of(target, logits), probabilities(target, logits).mean(axis=0)
    wanted = [max(range(len(v)), key=lambda c: (v[c], p[c])) for v, p in zip(votes, mean, strict=True)]
    found = target.majority(logits, torch.full((M,), 1 / M))
    assert found.shape == logits.shape[1:]
    assert target.decode(found).tolist() == wanted
    tied = [sorted(v)[-1] == sorted(v)[-2] for v in votes]
    assert any(tied) == (M == 2 or target.num_logits == 5), "ties occur where they can"
    np.testing.assert_allclose(probabilities(target, found), (votes + mean) / (M + 1), rtol=1e-9)


def test_a_tie_by_hand() -> None:
    """Two models for class 0 and two for class 2, which are surer; one more for class 1 changes nothing."""
    sure, unsure = [0.0, 0.0, 4.0], [0.5, 0.0, 0.0]
    four = torch.tensor([[unsure], [sure], [unsure], [sure]])
    assert Category(3).decode(Category(3).majority(four, torch.full((4,), 0.25))).tolist() == [2]
    five = torch.cat([four, torch.tensor([[[0.0, 9.0, 0.0]]])])
    assert Category(3).decode(Category(3).majority(five, torch.full((5,), 0.2))).tolist() == [2]
    yes_and_no = torch.tensor([[[0.1]], [[-3.0]]])
    assert Probability().decode(Probability().majority(yes_and_no, torch.ones(2))).tolist() == [0]
    assert Probability().decode(Probability().majority(-yes_and_no, torch.ones(2))).tolist() == [1]


def test_a_majority_does_not_count_how_sure_a_model_is() -> None:
    three_against_two = torch.tensor([[[0.1]], [[0.1]], [[0.1]], [[-50.0]], [[-50.0]]])
    assert Probability().decode(Probability().majority(three_against_two, torch.ones(5))).tolist() == [1]
    assert Probability().decode(Probability().mean_logits(three_against_two, torch.ones(5) / 5)).tolist() == [0]
    many = torch.tensor([[[1000.0, 0.0]], [[1000.0, 0.0]]])  # the other class's probability underflows
    assert Category(2).majority(many, torch.ones(2)).isfinite().all()


@every_number
@pytest.mark.parametrize("M", [2, 3, 4, 5])
def test_the_majority_of_numbers_is_their_median(target: Number, M: int) -> None:
    logits = random_logits(target, M, 20)
    np.testing.assert_allclose(target.majority(logits, torch.ones(M)).numpy(), np.median(logits.numpy(), axis=0))


# --- labels -----------------------------------------------------------------------------------------------------------

TWO = "must be 0 or 1"
LABELS: dict[str, tuple[Target, dict[str, float | str]]] = {
    "two categories": (Category(2), {"0": 0, "1.0": 1, "2": TWO, "-1": TWO, "0.5": TWO, "x": TWO, "nan": TWO}),
    "five categories": (
        Category(5),
        {"4": 4, " 3": 3, "0.0": 0}
        | dict.fromkeys(("5", "-1", "2.5", "", "inf"), "must be a whole number from 0 to 4"),
    ),
    "probability": (Probability(), {"1": 1, "0.0": 0, "0.7": TWO, "2": TWO, "yes": TWO}),
    "0 to 5": (
        Number(0, 5),
        {"2.6": 2.6, "5": 5.0, "0": 0.0} | dict.fromkeys(("5.01", "-0.1", "nan", "a"), "must be a number from 0 to 5"),
    ),
    "1 to 7": (
        Number(1, 7),
        {"7": 7.0, "1": 1.0, "6.5": 6.5} | dict.fromkeys(("0.9", "7.1", "inf"), "must be a number from 1 to 7"),
    ),
    "-0.5 to 1": (Number(-0.5, 1), {"-0.25": -0.25, "-1": "must be a number from -0.5 to 1"}),
}
CASES = [(target, text, wanted) for target, cases in LABELS.values() for text, wanted in cases.items()]


@pytest.mark.parametrize(("target", "text", "wanted"), CASES, ids=[f"{t} {text!r}" for t, text, _ in CASES])
def test_a_label_is_read_or_refused_with_the_rule(target: Target, text: str, wanted: float | str) -> None:
    if isinstance(wanted, str):
        with pytest.raises(ValueError, match="must be") as caught:
            target.parse_label(text)
        assert str(caught.value) == f"{wanted}, found {text!r}"
    else:
        found = target.parse_label(text)
        assert (found, type(found)) == (wanted, float if isinstance(target, Number) else int)


def test_a_prediction_of_a_number_may_lie_outside_its_range_but_no_other() -> None:
    assert Number(0, 5).parse_prediction("-3.5") == -3.5
    assert Number(1, 7).parse_prediction("1e3") == 1000.0
    assert Probability().parse_prediction("1.0") == 1.0
    for target in (Probability(), Category(5)):
        with pytest.raises(ValueError, match="must be"):
            target.parse_prediction("0.5")


def test_a_whole_number_lies_between_its_ends() -> None:
    assert [whole_number(text, 1, 5) for text in ("1", "5.0", "3")] == [1, 5, 3]
    for text in ("0", "6", "1.5", "five"):
        with pytest.raises(ValueError, match=f"^must be a whole number from 1 to 5, found {text!r}$"):
            whole_number(text, 1, 5)


# --- labels in losses and heads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "labels", "fractions"),
    [
        (Probability(), [0, 1], [0, 1]),
        (Number(0, 5), [0, 2.5, 5, 1], [0, 0.5, 1, 0.2]),
        (Number(1, 7), [1, 4, 7, 2.5], [0, 0.5, 1, 0.25]),
        (Number(-1, 1), [-1, 0, 1], [0, 0.5, 1]),
    ],
    ids=str,
)
def test_a_label_is_a_fraction_of_its_range(target: Target, labels: list[float], fractions: list[float]) -> None:
    assert target.fraction(torch.tensor(labels, dtype=torch.float64)).tolist() == fractions


def test_which_rows_are_positive_pairs() -> None:
    labels = torch.tensor([0, 1, 1, 0])
    for threshold in (0.0, 4.0, 9.0):  # the threshold is for numbers
        assert Probability().is_positive(labels, threshold).tolist() == [False, True, True, False]
    similarities = torch.tensor([3.9, 4.0, 5.0, 0.0])
    assert Number(0, 5).is_positive(similarities, 4.0).tolist() == [False, True, True, False]
    assert Number(1, 7).is_positive(similarities, 5.0).tolist() == [False, False, True, False]


@every_number
def test_a_cosine_is_scaled_to_the_range(target: Number) -> None:
    scale, offset = target.cosine_scale
    assert target.range == target.high - target.low == scale
    assert (offset, scale + offset) == (target.low, target.high)
    assert {type(scale), type(offset)} == {float}, "parameters made of them must be floating-point"


def test_the_even_chance_of_a_cosine_lies_at_three_quarters() -> None:
    """BERT's cosines are nearly all positive (docs/PITFALLS.md, 27)."""
    scale, offset = Probability().cosine_scale
    assert scale > 0
    assert scale * 0.75 + offset == 0


# --- predictions and scores -------------------------------------------------------------------------------------------


def test_logits_are_decoded_as_the_leaderboard_grades_them() -> None:
    assert Category(5).decode(torch.tensor([[0.0, 1, 2, 3, 0], [9, 0, 0, 0, 0]])).tolist() == [3, 0]
    assert Category(2).decode(torch.tensor([[0.0, 0.5]])).tolist() == [1]
    assert Probability().decode(torch.tensor([[0.7], [-0.7], [8.0]])).tolist() == [1.0, 0.0, 1.0]
    assert Number(0, 5).decode(torch.tensor([[3.25], [-0.5]])).tolist() == [3.25, -0.5], "as it is, in or out of range"


@every_target
def test_a_score_is_the_accuracy_or_pearsons_correlation(target: Target) -> None:
    rng = np.random.default_rng(0)
    if isinstance(target, Number):
        labels = rng.uniform(target.low, target.high, 40).astype(np.float32)
        values = (labels + rng.normal(size=40)).astype(np.float32)
        wanted = np.corrcoef(values.astype(np.float64), labels.astype(np.float64))[0, 1]
        assert target.share_of_overall(wanted) == pytest.approx((wanted + 1) / 2)
    else:
        values, labels = rng.integers(0, max(2, target.num_logits), (2, 40))
        wanted = sum(v == y for v, y in zip(values, labels, strict=True)) / 40
        assert target.share_of_overall(wanted) == wanted
    assert target.score(values, labels) == pytest.approx(wanted, rel=1e-12)
    assert target.score(labels, labels) == pytest.approx(1.0)
    assert 0 < wanted < 1


def test_a_constant_side_has_no_correlation() -> None:
    assert pearson(np.array([2.0, 2.0, 2.0]), np.array([1.0, 2.0, 3.0])) == 0.0
    assert pearson(np.array([1.0, 2.0, 3.0]), np.array([4, 4, 4])) == 0.0
    assert pearson(np.array([1, 2, 3]), np.array([3, 2, 1])) == pytest.approx(-1.0)
    assert accuracy(np.array([1.0, 0.0]), np.array([1, 1])) == 0.5


# --- the tasks --------------------------------------------------------------------------------------------------------


def test_the_tasks_are_rows_of_data() -> None:
    assert COURSE_TASKS == {"sst": SST, "cfimdb": CFIMDB, "para": PARA, "sts": STS}
    predicts = {name: task.predicts for name, task in COURSE_TASKS.items()}
    assert predicts == {"sst": Category(5), "cfimdb": Category(2), "para": Probability(), "sts": Number(0, 5)}
    assert {name for name, task in COURSE_TASKS.items() if task.is_pair} == {"para", "sts"}
    assert [STS.filename(split) for split in ("train", "dev", "test")] == [
        "sts-train.csv",
        "sts-dev.csv",
        "sts-test-student.csv",
    ]


def test_targets_are_values() -> None:
    """Equal ones are equal, so that a task that predicts the same can be recognized."""
    assert len({Category(5), Category(5), Category(2), Probability(), Probability(), Number(0, 5), Number(1, 7)}) == 5
    assert Number(0, 5) != Number(0, 4)
    assert [target.num_logits for target in TARGETS.values()] == [2, 5, 1, 1, 1, 1]


def test_what_follows_from_a_target() -> None:
    table = {type(target): (target.noun, target.default_loss, target.uncertainty_factor) for target in TARGETS.values()}
    assert table == {
        Category: ("category", "ce", 1.0),
        Probability: ("probability", "bce", 1.0),
        Number: ("number", "mse", 0.5),
    }
    assert {target.default_head for target in TARGETS.values()} == {"linear"}
    assert math.isclose(Number(1, 7).range, 6)
