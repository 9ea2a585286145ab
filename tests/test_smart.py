"""Every regularizer on three kinds of batch (docs/PITFALLS.md, 19 to 25), and formulas against float64 references."""

import argparse
import io
import itertools
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import smart
from bert import BertModel, Dropout
from config import BertConfig
from flags import ArgumentParser
from model import Branch, MultitaskBERT
from smart import (
    BALLS,
    REGULARIZERS,
    STARTS,
    VARIANTS,
    Bregman,
    RDrop,
    Regularizer,
    Smart,
    Sum,
    add_arguments,
    build_regularizer,
    parts_of,
)
from tasks import SST, TASKS, Batch, Category, Encoded, Number, Output, Probability, Target, stack
from utils import InputError

TASK_NAMES = ["sst", "para", "sts"]  # one sentence: category; bi-encoded pair: probability; joined pair: number
PARTS = {"smart": Smart, "bregman": Bregman, "rdrop": RDrop}
ACTIVE = ["+".join(names) for n in (1, 2, 3) for names in itertools.combinations(PARTS, n)]  # every sum there is
EVERY = ["none", *ACTIVE]


class SmallModel(nn.Module):
    """A BERT with three heads and the `predict` method that smart.py needs."""

    def __init__(self, bert: BertModel, dropout: float):
        super().__init__()
        H = bert.config.hidden_size
        self.bert, self.dropout = bert, Dropout(dropout)
        self.heads = nn.ModuleDict({"sst": nn.Linear(H, 5), "para": nn.Linear(3 * H, 1), "sts": nn.Linear(H, 1)})

    def predict(self, batch: Batch, embeddings: Tensor | None = None, random_state: Tensor | None = None) -> Output:
        if batch.vectors is not None:
            return Output(self.head(batch, batch.vectors), batch.vectors)
        ids, mask, segments, _ = stack(batch.sentences)
        if embeddings is None:
            embeddings = self.bert.embed(ids, segments)
        before = torch.get_rng_state()
        if random_state is not None:
            torch.set_rng_state(random_state)
        hidden = self.bert.encode(embeddings, mask)
        pooled = self.bert.pooler_af(self.bert.pooler_dense(hidden[:, 0]))
        vectors = self.dropout(pooled).chunk(len(batch.sentences))
        logits = self.head(batch, vectors)
        if random_state is not None:
            torch.set_rng_state(before)
        if not self.training:
            return Output(logits, vectors)
        return Output(logits, vectors, embeddings, before, again=partial(self.predict, batch))

    def head(self, batch: Batch, vectors: tuple[Tensor, ...]) -> Tensor:
        if len(vectors) == 2:
            vectors = (torch.cat([*vectors, (vectors[0] - vectors[1]).abs()], dim=1),)
        return self.heads[batch.task](vectors[0])


def small_model(dropout: float = 0.1) -> SmallModel:
    torch.manual_seed(0)
    shape = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    config = BertConfig(**shape, intermediate_size=64, initializer_range=0.3, **rates)
    return SmallModel(BertModel(config), dropout).train()


def sentences(lengths: tuple[int, ...], seed: int, pair: bool = False) -> Encoded:
    B, T = len(lengths), max(lengths)
    mask = (torch.arange(T) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(1, 100, (B, T), generator=torch.Generator().manual_seed(seed)) * mask
    return Encoded(ids, mask, (torch.arange(T) >= 4).long() * mask if pair else torch.zeros_like(ids))


def batch_of(task: str) -> Batch:
    parts = {
        "sst": (sentences((9, 4, 7, 2), 1),),
        "para": (sentences((6, 3, 5, 8), 2), sentences((4, 7, 5, 3), 3)),
        "sts": (sentences((10, 6, 8, 9), 4, pair=True),),
    }
    return Batch(task, list("abcd"), parts[task], torch.tensor([1, 0, 1, 0]))


def twice(batch: Batch) -> Batch:
    doubled = tuple(Encoded(*(torch.cat([t, t]) for t in s[:3])) for s in batch.sentences)
    return Batch(batch.task, batch.ids * 2, doubled, torch.cat([batch.labels, batch.labels]))


def flags(*given: str) -> argparse.Namespace:
    parser = ArgumentParser("smart.py", "")
    add_arguments(parser)
    return parser.parse_args(given)


def build(spec: str, model: SmallModel, *given: str) -> Regularizer:
    return build_regularizer(flags("--regularizer", spec, *given), model)


def moved(model: SmallModel) -> None:
    """Move every parameter a little, as an optimizer step would."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=generator))


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


# --- every regularizer ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASK_NAMES)
def test_none_is_exactly_zero(task: str) -> None:
    model, batch = small_model(), batch_of(task)
    term = build("none", model)(model, batch, model.predict(batch))
    assert term.shape == ()
    assert term.item() == 0
    assert not term.requires_grad


@pytest.mark.parametrize("variant", sorted(VARIANTS))
@pytest.mark.parametrize("task", TASK_NAMES)
@pytest.mark.parametrize("name", ACTIVE)
def test_every_term_is_positive_on_every_kind_of_task(name: str, task: str, variant: int) -> None:
    """A softmax over one logit would make the term zero for paraphrase and similarity (docs/PITFALLS.md, 19)."""
    model, batch = small_model(), batch_of(task)
    regularizer = build(name, model, "--smart_variant", str(variant))
    moved(model)
    term = regularizer(model, batch, model.predict(batch))
    assert term.shape == ()
    assert term.dtype == torch.float32
    assert 1e-5 < term.item() < 100


@pytest.mark.parametrize("task", TASK_NAMES)
@pytest.mark.parametrize("name", ACTIVE)
def test_every_term_changes_the_gradient_of_the_trained_weights(name: str, task: str) -> None:
    """The term is used: it reaches the encoder, its embeddings and the task's head (docs/PITFALLS.md, 19)."""
    model, batch = small_model(), batch_of(task)
    regularizer = build(name, model)
    moved(model)
    regularizer(model, batch, model.predict(batch)).backward()
    reached = {name for name, grad in gradients(model).items() if grad is not None and grad.abs().max() > 1e-6}
    assert {
        "bert.word_embedding.weight",
        "bert.bert_layers.0.self_attention.query.weight",
        "bert.bert_layers.1.out_dense.weight",
        f"heads.{task}.weight",
    } <= reached


@pytest.mark.parametrize("start", sorted(STARTS))
@pytest.mark.parametrize("task", TASK_NAMES)
@pytest.mark.parametrize("name", EVERY)
def test_calling_a_term_leaves_gradients_modes_and_weights_alone(name: str, task: str, start: str) -> None:
    """The ascent changes no .grad (docs/PITFALLS.md, 23), and a frozen part that is in eval mode stays in eval mode."""
    model, batch = small_model(), batch_of(task)
    regularizer = build(name, model, "--smart_start", start)
    moved(model)
    model.bert.embed_dropout.eval()
    model.predict(batch).logits.sum().backward()
    before = gradients(model)
    weights = {n: (p, p.detach().clone()) for n, p in model.named_parameters()}
    modes = [m.training for m in model.modules()]
    term = regularizer(model, batch, model.predict(batch))
    for parameter, grad in gradients(model).items():
        assert (grad is None) == (before[parameter] is None), parameter
        assert grad is None or torch.equal(grad, before[parameter]), parameter
    for n, p in model.named_parameters():
        assert p is weights[n][0], n
        assert torch.equal(p, weights[n][1]), n
        assert p.requires_grad
    assert [m.training for m in model.modules()] == modes
    assert term.isfinite()


@pytest.mark.parametrize("task", TASK_NAMES)
@pytest.mark.parametrize("name", EVERY)
def test_a_batch_written_twice_has_the_same_term(name: str, task: str, monkeypatch) -> None:
    """Without dropout and with the same noise, the batch size does not change the term (docs/PITFALLS.md, 25)."""
    model, batch = small_model(dropout=0), batch_of(task)
    regularizer = build(name, model)
    moved(model)
    pair = len(batch.sentences)

    def repeated_noise(like: Tensor) -> Tensor:
        columns = pair if like.ndim == 3 else 1  # embeddings of every sentence, or logits of every row
        rows = columns * len(batch.ids)
        parts = torch.randn((rows, *like.shape[1:]), generator=torch.Generator().manual_seed(3)).chunk(columns)
        return torch.cat([copy for part in parts for copy in [part] * (len(like) // rows)])

    monkeypatch.setattr(smart.torch, "randn_like", repeated_noise)
    once = regularizer(model, batch, model.predict(batch))
    again = regularizer(model, twice(batch), model.predict(twice(batch)))
    # At noise of 1e-5 the ascent's direction carries float32's rounding, which another batch size changes.
    torch.testing.assert_close(once, again, rtol=1e-2, atol=1e-7)


@pytest.mark.parametrize("name", EVERY)
def test_the_state_survives_a_file_of_weights_only(name: str) -> None:
    model = small_model()
    regularizer = build(name, model)
    moved(model)
    regularizer.update(model)
    file = io.BytesIO()
    torch.save(regularizer.state_dict(), file)
    file.seek(0)
    resumed = build(name, model)
    resumed.load_state_dict(torch.load(file, weights_only=True))

    def flat(state: dict) -> dict[str, Tensor]:
        inner = [flat(v) for v in state.values() if isinstance(v, dict)]
        return {k: v for k, v in state.items() if isinstance(v, Tensor)} | {k: v for d in inner for k, v in d.items()}

    found, expected = flat(resumed.state_dict()), flat(regularizer.state_dict())
    assert bool(expected) == ("bregman" in name)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[k], expected[k]) for k in expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("task", TASK_NAMES)
@pytest.mark.parametrize("name", ACTIVE)
def test_half_precision_gives_a_float32_term_with_finite_gradients(name: str, task: str, dtype: torch.dtype) -> None:
    model, batch = small_model(), batch_of(task)
    regularizer = build(name, model)
    moved(model)
    with torch.autocast("cpu", dtype):
        term = regularizer(model, batch, model.predict(batch))
    assert term.dtype == torch.float32
    assert term.item() > 1e-5
    term.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", EVERY)
def test_a_term_of_weight_two_is_twice_the_term(name: str) -> None:
    model, batch = small_model(), batch_of("sst")
    weights = [f"--{part}_weight=2" for part in ("smart", "bregman", "rdrop")]
    terms = [build(name, model), build(name, model, *weights)]
    moved(model)
    values = []
    for regularizer in terms:
        torch.manual_seed(1)
        values.append(regularizer(model, batch, model.predict(batch)))
    torch.testing.assert_close(2 * values[0], values[1], rtol=1e-5, atol=0)


# --- smart ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", sorted(STARTS))
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("norm", sorted(BALLS))
@pytest.mark.parametrize("task", TASK_NAMES)
def test_the_perturbation_is_in_the_ball_and_off_the_padding(task: str, norm: str, steps: int, start: str) -> None:
    """The norm of every real token's perturbation is the radius (docs/PITFALLS.md, 21)."""
    model, batch = small_model(), batch_of(task)
    term = Smart(norm=norm, radius=0.03, steps=steps, start=start)
    noise = term.perturbation(model, batch, model.predict(batch))
    size = noise.norm(dim=-1) if norm == "l2" else noise.abs().amax(dim=-1)
    real = stack(batch.sentences).attention_mask.bool()
    assert noise.shape[:2] == real.shape
    assert not noise.requires_grad
    assert (size <= 0.03 * (1 + 1e-6)).all()
    assert (size[real] > 0.9999 * 0.03).all()
    assert (noise[~real] == 0).all()
    assert (~real).any()


@pytest.fixture(scope="module")
def minilm() -> SmallModel:
    torch.manual_seed(0)
    return SmallModel(BertModel.from_pretrained("minilm"), 0.3).train()


@pytest.mark.parametrize("start", sorted(STARTS))
@pytest.mark.parametrize("variant", sorted(VARIANTS))
@pytest.mark.parametrize("norm", sorted(BALLS))
@pytest.mark.parametrize("task", TASK_NAMES)
def test_the_perturbation_is_adversarial(task: str, norm: str, variant: int, start: str) -> None:
    """It changes the output far more than random noise of the same norm, for every seed (docs/PITFALLS.md, 20)."""
    check_adversarial(small_model(), task, Smart(norm=norm, variant=variant, start=start), factor=2, seeds=3)


@pytest.mark.parametrize("start", sorted(STARTS))
@pytest.mark.parametrize("task", TASK_NAMES)
def test_the_perturbation_of_minilm_is_adversarial(minilm: SmallModel, task: str, start: str) -> None:
    check_adversarial(minilm, task, Smart(start=start), factor=10, seeds=2)


def check_adversarial(model: SmallModel, task: str, term: Smart, factor: float, seeds: int) -> None:
    batch, target = batch_of(task), TASKS[task].predicts
    for seed in range(seeds):
        torch.manual_seed(seed)
        output = model.predict(batch)
        found = term.perturbation(model, batch, output)
        random = torch.randn_like(found)
        random *= term.ball.norm(found) / term.ball.norm(random)
        with torch.no_grad():
            passes = [model.predict(batch, output.embeddings + x, output.random_state) for x in (found, random)]
        strong, weak = (term.outer(target, output.logits, other.logits).mean() for other in passes)
        assert strong > factor * weak > 0, f"seed {seed}"


def fixed_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the initial noise a function of its shape, so that two computations draw the same."""

    def draw(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=torch.Generator().manual_seed(3), dtype=like.dtype)

    monkeypatch.setattr(smart.torch, "randn_like", draw)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("norm", sorted(BALLS))
@pytest.mark.parametrize("task", TASK_NAMES)
def test_the_perturbation_is_that_of_algorithm_1(task: str, norm: str, steps: int, monkeypatch) -> None:
    """Against a plain loop: noise, gradient of the divergence by the embeddings, normalized step, projection."""
    model, batch = small_model(dropout=0).double(), batch_of(task)
    fixed_noise(monkeypatch)
    output = model.predict(batch)
    term = Smart(norm=norm, steps=steps, radius=0.02, step_size=0.05, sigma=1e-3, start="embeddings")
    found = term.perturbation(model, batch, output)
    x, clean = output.embeddings.detach(), output.logits.detach()
    mask = stack(batch.sentences).attention_mask[..., None]
    noise = 1e-3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(3), dtype=x.dtype) * mask
    for _ in range(steps):
        moved_x = (x + noise).requires_grad_()
        logits = model.predict(batch, moved_x).logits
        if task == "sts":
            divergence = (logits - clean).square().sum()
        else:
            logits, reference = (z if task == "sst" else torch.cat([-z, z], 1) / 2 for z in (logits, clean))
            p, q = reference.softmax(1), logits.softmax(1)
            divergence = (p * (p / q).log() + q * (q / p).log()).sum()
        (g,) = torch.autograd.grad(divergence, moved_x)
        size = {"l2": lambda v: v.pow(2).sum(-1, keepdim=True).sqrt(), "linf": lambda v: v.abs().amax(-1, True)}[norm]
        noise = noise + 0.05 * torch.where(mask.bool(), g / size(g), 0)
        if norm == "linf":
            noise = noise.clip(-0.02, 0.02)
        else:
            noise = noise * torch.where(size(noise) > 0.02, 0.02 / size(noise), 1)
    torch.testing.assert_close(found, noise, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("task", TASK_NAMES)
def test_clipping_finds_far_more_than_scaling_the_gradient_to_the_same_radius(minilm: SmallModel, task: str) -> None:
    """Scaling keeps the gradient's direction, so one element of a token reaches the radius and the others do not."""
    batch, target = batch_of(task), TASKS[task].predicts
    output = minilm.predict(batch)
    term = Smart()
    found = term.perturbation(minilm, batch, output)
    (g,) = torch.autograd.grad(output.logits.sum(), output.embeddings, retain_graph=True)
    if task == "sst":  # for one logit, every direction is that of its gradient
        u = term.logit_direction(batch, output.logits, output.logits + 1e-5 * torch.randn_like(output.logits))
        (g,) = torch.autograd.grad(output.logits, output.embeddings, u.float(), retain_graph=True)
    scaled = term.radius * g / g.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    with torch.no_grad():
        passes = [minilm.predict(batch, output.embeddings + x, output.random_state) for x in (found, scaled)]
    clipped, weak = (term.outer(target, output.logits, other.logits).mean() for other in passes)
    assert clipped > 4 * weak > 0


@pytest.mark.parametrize("start", sorted(STARTS))
@pytest.mark.parametrize("task", TASK_NAMES)
def test_the_perturbation_reaches_its_radius_for_confident_rows(task: str, start: str) -> None:
    """The gradient of a confident row is tiny: it must be normalized without a constant in the denominator."""
    model, batch = small_model(dropout=0).double(), batch_of(task)
    model.heads["sst"].bias.data[0] = 30
    model.heads["para"].bias.data[0] = 30
    noise = Smart(radius=0.03, start=start).perturbation(model, batch, model.predict(batch))
    real = stack(batch.sentences).attention_mask.bool()
    torch.testing.assert_close(noise.abs().amax(-1)[real], torch.full((int(real.sum()),), 0.03, dtype=noise.dtype))


def test_the_perturbation_reaches_its_radius_for_confident_rows_in_float16() -> None:
    """There, a gradient of 1e-7 would vanish on its way to the embeddings: it is scaled to length 1 before."""
    model, batch = small_model(dropout=0), batch_of("para")
    model.heads["para"].bias.data[0] = 18
    term = Smart(radius=1.0, sigma=0.2, start="embeddings")
    with torch.autocast("cpu", torch.float16):
        noise = term.perturbation(model, batch, model.predict(batch))
    real = stack(batch.sentences).attention_mask.bool()
    assert (noise.abs().amax(-1)[real] == 1).float().mean() > 0.7  # one row of four may have the same logit as before


@pytest.mark.parametrize("start", sorted(STARTS))
@pytest.mark.parametrize("task", TASK_NAMES)
def test_a_rows_perturbation_does_not_depend_on_the_other_rows(task: str, start: str, monkeypatch) -> None:
    model, batch = small_model(dropout=0).double(), batch_of(task)
    monkeypatch.setattr(
        smart.torch, "randn_like", lambda x: torch.linspace(-1, 2, x.size(-1), dtype=x.dtype).expand_as(x).clone()
    )
    alone = Batch(task, ["a"], tuple(Encoded(*(t[:1] for t in s[:3])) for s in batch.sentences), batch.labels[:1])
    model.heads["sst"].weight.data *= torch.linspace(1, 3, 5)[:, None]  # so that the rows differ in confidence
    term = Smart(start=start, steps=2, step_size=0.004)
    whole = term.perturbation(model, batch, model.predict(batch)).unflatten(0, (len(batch.sentences), -1))
    single = term.perturbation(model, alone, model.predict(alone)).unflatten(0, (len(batch.sentences), -1))
    torch.testing.assert_close(whole[:, :1], single, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(("task", "expected"), [("sst", Smart.POWER_ITERATIONS), ("para", 1), ("sts", 1)])
def test_one_logit_needs_one_power_iteration(task: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, target = small_model(), batch_of(task), type(TASKS[task].predicts)
    calls, curvature = [], target.curvature
    monkeypatch.setattr(target, "curvature", lambda *args: calls.append(1) or curvature(*args))
    Smart().perturbation(model, batch, model.predict(batch))
    assert len(calls) == expected


@pytest.mark.parametrize("divergence", [smart.kl, smart.symmetrized_kl, smart.smart_divergence])
@pytest.mark.parametrize("target", [Category(5), Probability(), Number(0, 5)], ids=lambda target: target.noun)
def test_power_iterations_end_at_the_most_sensitive_direction_of_the_logits(target: Target, divergence, monkeypatch):
    """Close to the reference, the divergence is a quadratic form; its largest eigenvector is the oracle."""
    torch.manual_seed(0)
    monkeypatch.setattr(Smart, "POWER_ITERATIONS", 300)
    clean = torch.randn(4, target.num_logits, dtype=torch.float64)
    u = Smart().sensitive_direction(target, clean, torch.randn_like(clean))
    for row in range(4):
        hessian = torch.autograd.functional.hessian(
            lambda z, row=row: divergence(target, clean[row : row + 1], z[None]).sum(), clean[row]
        )
        top = torch.linalg.eigh(hessian).eigenvectors[:, -1]
        assert abs(float(top @ u[row])) > 0.999


@pytest.mark.parametrize("task", TASK_NAMES)
def test_the_terms_gradient_is_that_of_the_formula_for_a_fixed_perturbation(task: str, monkeypatch) -> None:
    """By finite differences, of an embedding too: the perturbed pass starts at x + noise, and x is not detached."""
    model, batch = small_model(dropout=0).double(), batch_of(task)
    noise = 0.3 * torch.randn(model.predict(batch).embeddings.shape, dtype=torch.float64)
    term = Smart()
    monkeypatch.setattr(term, "perturbation", lambda model, batch, output: noise)
    monkeypatch.setattr(smart, "mean", lambda divergence, batch, a, b: divergence(TASKS[task].predicts, a, b).mean())
    term(model, batch, model.predict(batch)).backward()
    ids = stack(batch.sentences).token_ids
    weight = model.bert.word_embedding.weight
    for row, column in ((int(ids[0, 0]), 3), (int(ids[1, 1]), 7)):
        values = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                weight[row, column] += step
                values.append(term(model, batch, model.predict(batch)).item())
                weight[row, column] -= step
        assert weight.grad[row, column].item() == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-4)


@pytest.mark.parametrize("task", TASK_NAMES)
def test_more_steps_find_no_weaker_perturbation(task: str) -> None:
    values = {}
    for steps in (1, 5):
        model, batch = small_model(), batch_of(task)
        torch.manual_seed(2)
        values[steps] = Smart(steps=steps)(model, batch, model.predict(batch)).item()
    assert values[5] > 0.98 * values[1]


@pytest.mark.parametrize("task", TASK_NAMES)
def test_without_a_perturbation_the_term_is_exactly_zero_in_training_mode(task: str, monkeypatch) -> None:
    """All passes use the same dropout masks (docs/PITFALLS.md, 22)."""
    model, batch = small_model(dropout=0.3), batch_of(task)
    term = Smart()
    monkeypatch.setattr(term, "perturbation", lambda model, batch, output: torch.zeros_like(output.embeddings))
    output = model.predict(batch)
    assert not torch.equal(output.logits, model.predict(batch).logits), "dropout is on"
    assert term(model, batch, output).item() == 0


@pytest.mark.parametrize("task", TASK_NAMES)
def test_the_term_is_the_weighted_divergence_at_the_perturbation(task: str) -> None:
    model, batch = small_model(), batch_of(task)
    term, output = Smart(3.0), model.predict(batch)
    before = torch.get_rng_state()
    noise = term.perturbation(model, batch, output)
    perturbed = model.predict(batch, output.embeddings + noise, output.random_state)
    torch.set_rng_state(before)
    expected = 3 * oracle(TASKS[task].predicts, output.logits, perturbed.logits).mean()
    assert term(model, batch, output).item() == pytest.approx(expected, rel=1e-4)


def test_the_gradient_passes_through_both_outputs() -> None:
    """The head's bias shifts both outputs equally, so its gradient cancels unless the clean output is detached."""
    model, batch = small_model(dropout=0), batch_of("sts")
    Smart()(model, batch, model.predict(batch)).backward()
    assert model.heads["sts"].weight.grad.abs().max() > 1e-3
    assert model.heads["sts"].bias.grad.abs().item() < 1e-6


@pytest.mark.parametrize("task", TASK_NAMES)
def test_both_starts_find_the_same_direction_for_one_logit_up_to_its_sign(task: str) -> None:
    """For five logits the directions are similar: the first gradient combines the gradients of the logits."""
    model, batch = small_model(), batch_of(task)
    model.double()  # avoids the float32 kernels and most of the rounding
    output = model.predict(batch)
    a, b = (Smart(start=start, sigma=1e-6).perturbation(model, batch, output) for start in ("embeddings", "logits"))
    real = stack(batch.sentences).attention_mask.bool()
    cosines = torch.cosine_similarity(a[real], b[real], dim=-1).abs()
    assert cosines.mean() > (0.2 if task == "sst" else 0.99)


@pytest.mark.parametrize("task", TASK_NAMES)
def test_starting_at_the_logits_is_adversarial_in_bfloat16(task: str) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        check_adversarial(small_model(), task, Smart(start="logits"), factor=2, seeds=3)


@pytest.mark.parametrize("start", sorted(STARTS))
def test_smart_works_on_frozen_embeddings(start: str, tiny_checkpoint: Path) -> None:
    """As when only adapters train: the clean pass must still be differentiable with respect to the embeddings."""
    bert = BertModel.from_pretrained(str(tiny_checkpoint))
    model = MultitaskBERT(bert, [Branch(SST)], train_encoder=False).train()
    assert not any(p.requires_grad for p in bert.parameters())
    batch = batch_of("sst")
    assert Smart(start=start)(model, batch, model.predict(batch)).item() > 0


def test_power_iterations_on_the_logits_find_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """If three grades are very unlikely, most random directions of the five logits change hardly anything."""
    found = {}
    for iterations in (1, 8):
        monkeypatch.setattr(Smart, "POWER_ITERATIONS", iterations)
        model, batch = small_model(), batch_of("sst")
        model.heads["sst"].bias.data = torch.tensor([4.0, 4.0, 0.0, 0.0, 0.0])  # the other three are very unlikely
        torch.manual_seed(5)
        found[iterations] = sum(Smart()(model, batch, model.predict(batch)).item() for _ in range(20))
    assert found[8] > 1.03 * found[1]


def test_smart_on_stored_vectors_or_in_eval_mode_says_what_it_needs() -> None:
    model = small_model()
    stored = Batch("sst", ["a"], (), torch.tensor([1]), (torch.randn(1, 32),))
    with pytest.raises(ValueError, match=r"needs the embeddings .* Train the encoder"):
        Smart()(model, stored, model.predict(stored))
    model.eval()
    with pytest.raises(ValueError, match="training mode"):
        Smart()(model, batch_of("sst"), model.predict(batch_of("sst")))


# --- divergences ------------------------------------------------------------------------------------------------------


TARGETS = {"category": Category(5), "probability": Probability(), "number": Number(0, 5), "number 1-7": Number(1, 7)}


def distribution(target: Target, logits: Tensor) -> np.ndarray:
    x = logits.detach().double().numpy()
    if isinstance(target, Category):
        return np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)
    if isinstance(target, Number):
        x = 4 * (x - (target.low + target.high) / 2) / (target.high - target.low)
    p = 1 / (1 + np.exp(-x))
    return np.concatenate([1 - p, p], axis=1)


def oracle_kl(target: Target, reference: Tensor, other: Tensor) -> np.ndarray:
    p, q = distribution(target, reference), distribution(target, other)
    return (p * np.log(p / q)).sum(axis=1)


def oracle(target: Target, reference: Tensor, other: Tensor) -> np.ndarray:
    """The divergence l_s of the paper."""
    if isinstance(target, Number):
        return ((reference - other).detach().double().numpy() ** 2).sum(axis=1)
    return oracle_kl(target, reference, other) + oracle_kl(target, other, reference)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_divergences_equal_their_definitions(target: Target) -> None:
    torch.manual_seed(0)
    a, b = (3 * torch.randn(50, target.num_logits) for _ in range(2))
    both = oracle_kl(target, a, b) + oracle_kl(target, b, a)
    half = oracle(target, a, b) * (1 if isinstance(target, Number) else 1 / 2)
    np.testing.assert_allclose(smart.kl(target, a, b).numpy(), oracle_kl(target, a, b), rtol=1e-9)
    np.testing.assert_allclose(smart.symmetrized_kl(target, a, b).numpy(), both, rtol=1e-9)
    np.testing.assert_allclose(smart.smart_divergence(target, a, b).numpy(), oracle(target, a, b), rtol=1e-6)
    np.testing.assert_allclose(smart.dropout_divergence(target, a, b).numpy(), half, rtol=1e-6)


def test_the_divergence_of_one_logit_is_that_of_two_categories() -> None:
    a, b = torch.randn(2, 20, 1).unbind()
    two = [torch.cat([x, torch.zeros_like(x)], dim=1) for x in (a, b)]
    torch.testing.assert_close(smart.kl(Probability(), a, b), smart.kl(Category(2), *two))


@pytest.mark.parametrize("divergence", [smart.kl, smart.symmetrized_kl, smart.smart_divergence])
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_divergences_of_extreme_and_of_nearly_equal_logits_are_finite_and_resolved(target: Target, divergence) -> None:
    C = target.num_logits
    a = torch.full((1, C), -200.0)
    a[0, 0] = 200
    b = (-a).requires_grad_()
    value = divergence(target, a, b)
    value.sum().backward()
    assert value.isfinite().all()
    assert value > 100
    assert b.grad.isfinite().all()
    x = torch.linspace(-1, 1, C).view(1, C)
    y = x.clone()
    y[0, 0] += 1e-5
    assert 1e-14 < divergence(target, x, y).item() < 1e-9  # float32 would lose it to rounding


@pytest.mark.parametrize(("target", "middle"), [(Number(0, 5), 2.5), (Number(1, 7), 4.0)])
def test_a_number_becomes_a_probability_tangent_to_its_share_of_the_range(target: Number, middle: float) -> None:
    x = torch.tensor([[middle]], requires_grad=True)
    p = target.log_probabilities(x)[0, 1].exp()
    p.backward()
    assert p.item() == pytest.approx(0.5)
    assert x.grad.item() == pytest.approx(1 / (target.high - target.low))


# --- bregman ----------------------------------------------------------------------------------------------------------


def test_the_teacher_is_a_copy_of_the_trainable_parameters() -> None:
    """A teacher that shares memory with the model would always agree with it (docs/PITFALLS.md, 24)."""
    model = small_model()
    model.bert.pooler_dense.weight.requires_grad_(False)
    teacher = Bregman(model).teacher
    live = dict(model.named_parameters())
    assert teacher.keys() == live.keys() - {"bert.pooler_dense.weight"}
    before = {name: p.clone() for name, p in teacher.items()}
    moved(model)
    for name, p in teacher.items():
        assert p.data_ptr() != live[name].data_ptr()
        assert torch.equal(p, before[name])
        assert not torch.equal(p, live[name])


def test_an_update_moves_the_teacher_by_momentum() -> None:
    model = small_model()
    regularizer = Bregman(model, momentum=0.9)
    expected = {name: p.double().clone() for name, p in regularizer.teacher.items()}
    for _ in range(3):
        moved(model)
        regularizer.update(model)
        for name, p in model.named_parameters():
            expected[name] = 0.9 * expected[name] + 0.1 * p.detach().double()
    for name, p in regularizer.teacher.items():
        torch.testing.assert_close(p.double(), expected[name], rtol=1e-6, atol=1e-7)
        assert not p.requires_grad


@pytest.mark.parametrize("task", TASK_NAMES)
def test_the_term_compares_with_the_teacher_in_eval_mode(task: str) -> None:
    model, batch = small_model(), batch_of(task)
    regularizer = Bregman(model, 2.0)
    model.eval()
    with torch.no_grad():
        old = model.predict(batch).logits
    model.train()
    moved(model)
    output = model.predict(batch)
    found = regularizer(model, batch, output).item()
    assert found == pytest.approx(2 * oracle(TASKS[task].predicts, old, output.logits).mean(), rel=1e-4)


@pytest.mark.parametrize("task", TASK_NAMES)
def test_before_the_first_step_the_term_is_zero_but_for_dropout(task: str) -> None:
    batch = batch_of(task)
    for dropout, zero in ((0.0, True), (0.3, False)):
        model = small_model(dropout)
        assert (Bregman(model)(model, batch, model.predict(batch)).item() == 0) == zero


@pytest.mark.parametrize("task", TASK_NAMES)
def test_autocast_does_not_serve_live_weights_to_the_teacher(task: str) -> None:
    """Autocast caches half-precision weights per parameter, so it would not notice swapped data of a parameter."""
    model, batch = small_model(dropout=0), batch_of(task)
    regularizer = Bregman(model)
    moved(model)
    exact = regularizer(model, batch, model.predict(batch)).item()
    with torch.autocast("cpu", torch.bfloat16):
        first = model.predict(batch)
        assert regularizer(model, batch, first).item() == pytest.approx(exact, rel=0.3)
        assert torch.equal(first.logits, model.predict(batch).logits), "nor the teacher's weights to the student"


def test_a_teacher_of_other_parameters_is_refused() -> None:
    model = small_model()
    state = Bregman(model).state_dict()
    model.heads["sts"].requires_grad_(False)
    with pytest.raises(ValueError, match=r"heads\.sts\.bias on one side only \(2 in all\)"):
        Bregman(model).load_state_dict(state)


# --- rdrop ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASK_NAMES)
def test_rdrop_equals_its_definition(task: str) -> None:
    model, batch = small_model(dropout=0.2), batch_of(task)
    output = model.predict(batch)
    before = torch.get_rng_state()
    second = model.predict(batch).logits
    torch.set_rng_state(before)
    share = 1 if task == "sts" else 1 / 2
    expected = 3 * share * oracle(TASKS[task].predicts, output.logits, second).mean()
    assert RDrop(3.0)(model, batch, output).item() == pytest.approx(expected, rel=1e-5)
    assert expected > 0


@pytest.mark.parametrize("task", TASK_NAMES)
def test_rdrop_is_zero_without_dropout(task: str) -> None:
    model, batch = small_model(dropout=0), batch_of(task)
    assert RDrop()(model, batch, model.predict(batch)).item() == 0


def test_rdrop_repeats_the_pass_by_the_outputs_own_function() -> None:
    """It needs nothing of the model: the output knows how to repeat its pass with new dropout masks."""
    output = Output(torch.zeros(2, 1), (), again=lambda: Output(torch.ones(2, 1), ()))
    batch = Batch("sts", ["a", "b"], (), torch.tensor([1.0, 2.0]))
    assert RDrop(3.0)(None, batch, output).item() == 3.0


def test_bregman_runs_on_stored_vectors() -> None:
    """With a frozen encoder, only the head is regularized."""
    model = small_model()
    model.bert.requires_grad_(False)
    stored = Batch("sst", list("ab"), (), torch.tensor([1, 0]), (torch.randn(2, 32),))
    regularizer = build("bregman", model)
    moved(model)
    assert regularizer.teacher.keys() == {f"heads.{t}.{p}" for t in TASK_NAMES for p in ("weight", "bias")}
    assert regularizer(model, stored, model.predict(stored)).item() > 0


# --- sums -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ACTIVE)
def test_every_sum_of_regularizers_is_built_of_its_parts_in_the_order_given(spec: str) -> None:
    model, names = small_model(), spec.split("+")
    for order in itertools.permutations(names):
        regularizer = build("+".join(order), model)
        parts = {names[0]: regularizer} if len(names) == 1 else regularizer.parts
        assert [(name, type(part)) for name, part in parts.items()] == [(name, PARTS[name]) for name in order]
        assert isinstance(regularizer, Sum) == (len(names) > 1)


@pytest.mark.parametrize("task", TASK_NAMES)
@pytest.mark.parametrize("spec", ACTIVE)
def test_a_sum_is_the_sum_of_its_parts_and_updates_every_one(spec: str, task: str) -> None:
    model, batch = small_model(), batch_of(task)
    whole, parts = build(spec, model), [build(name, model) for name in spec.split("+")]
    moved(model)
    for regularizer in (whole, *parts):
        regularizer.update(model)
    moved(model)
    output, state = model.predict(batch), torch.get_rng_state()
    found = whole(model, batch, output)
    torch.set_rng_state(state)
    torch.testing.assert_close(found, sum(part(model, batch, output) for part in parts))
    if "bregman" in spec:
        (alone,) = (part for part in parts if isinstance(part, Bregman))
        within = whole.parts["bregman"] if isinstance(whole, Sum) else whole
        assert all(torch.equal(within.teacher[name], tensor) for name, tensor in alone.teacher.items())


@pytest.mark.parametrize(
    ("spec", "weights"),
    [
        ("smart", {"smart": 2}),
        ("smart:0.5", {"smart": 1}),
        ("smart:0.5+rdrop", {"smart": 1, "rdrop": 5}),
        ("rdrop:2+bregman:1e-1", {"rdrop": 10, "bregman": 0.3}),
        ("smart:3+bregman+rdrop:0.2", {"smart": 6, "bregman": 3, "rdrop": 1}),
    ],
)
def test_a_number_in_the_specification_multiplies_the_flags_weight(spec: str, weights: dict[str, float]) -> None:
    model = small_model()
    found = build(spec, model, "--smart_weight=2", "--bregman_weight=3", "--rdrop_weight=5")
    parts = found.parts if isinstance(found, Sum) else dict.fromkeys(weights, found)
    assert {name: part.weight for name, part in parts.items()} == pytest.approx(weights)
    assert list(parts) == list(parts_of(spec))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("smarter", r"must be made of none, smart, bregman, rdrop, found 'smarter'\. Did you mean smart\?$"),
        ("", r"must be made of none, smart, bregman, rdrop, found ''\. Choose one\.$"),
        ("smart+", r"found ''"),
        ("smart+smart", r"each name may appear once, found smart twice\. Remove one\.$"),
        ("smart+none", r"none must stand alone, found 2 names\. Remove it\.$"),
        ("none+rdrop:2", r"none must stand alone, found 2 names\. Remove it\.$"),
        ("rdrop:0", r"the weight of rdrop must be a number above 0, found '0'\. Write it like rdrop:0\.2, or leave"),
        ("rdrop:nan", r"above 0, found 'nan'"),
        ("rdrop:", r"above 0, found ''"),
    ],
)
def test_a_wrong_specification_is_refused_with_rule_and_remedy(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        build(spec, small_model())
    assert str(caught.value).startswith(f"--regularizer {spec}: ")


def test_the_registry_has_the_parts_and_none() -> None:
    assert REGULARIZERS.keys() == {"none", *PARTS}
    assert type(build("none", small_model())) is Regularizer


# --- flags ------------------------------------------------------------------------------------------------------------


def test_the_flags_have_the_papers_numbers() -> None:
    args = flags()
    assert args.regularizer == "none"
    assert (args.smart_weight, args.smart_steps, args.smart_sigma, args.smart_norm) == (1, 1, 1e-5, "linf")
    term = build("smart", small_model())
    assert term.step_size / term.radius == pytest.approx(1e-3 / 1e-5)
    assert args.smart_start == "logits", "the one deviation, which saves a pass"
    assert (args.smart_variant, args.bregman_weight, args.bregman_momentum) == (0, 1, 0.99)


@pytest.mark.parametrize(
    "given",
    [
        ["--smart_sigma", "0"],
        ["--smart_radius", "0"],
        ["--smart_steps", "0"],
        ["--smart_variant", "3"],
        ["--bregman_momentum", "1.1"],
        ["--smart_weight", "nan"],
    ],
)
def test_flags_out_of_range_are_refused(given: list[str]) -> None:
    with pytest.raises(InputError, match=rf"^{given[0]}.* See smart\.py --help\.$"):
        flags(*given)


NEEDED = {
    "--smart_steps 2": ("smart",),
    "--smart_variant 1": ("smart", "bregman"),
    "--bregman_momentum 0.5": ("bregman",),
    "--rdrop_weight 2.5": ("rdrop",),
}


@pytest.mark.parametrize("spec", EVERY)
@pytest.mark.parametrize("flag", NEEDED)
def test_a_flag_is_refused_without_a_regularizer_that_reads_it(flag: str, spec: str) -> None:
    parser = ArgumentParser("smart.py", "")
    add_arguments(parser)
    argv = [*flag.split(), "--regularizer", spec.replace("+", ":0.5+")]
    if set(NEEDED[flag]) & set(spec.split("+")):
        assert parser.parse(argv).regularizer == argv[-1]
    else:
        with pytest.raises(
            InputError, match=rf"^{flag} needs --regularizer {' or '.join(NEEDED[flag])}\. Use --regularizer "
        ):
            parser.parse(argv)


def test_every_flag_reaches_its_regularizer() -> None:
    names = ["weight", "steps", "step_size", "radius", "sigma"]
    values = [2.0, 3, 0.004, 0.006, 0.007]
    given = [f"--smart_{name}={value}" for name, value in zip(names, values, strict=True)]
    model = small_model()
    more = [
        "--smart_start=embeddings",
        "--smart_norm=l2",
        "--smart_variant=2",
        "--bregman_weight=8",
        "--bregman_momentum=0.9",
        "--rdrop_weight=10",
    ]
    total = build("smart+bregman+rdrop", model, *given, *more)
    term, bregman, rdrop = total.parts.values()
    assert [getattr(term, name) for name in names] == values
    assert term.ball is BALLS["l2"]
    assert (term.inner, term.outer, term.start) == (*VARIANTS[2], STARTS["embeddings"])
    assert (bregman.weight, bregman.momentum, bregman.divergence) == (8, 0.9, smart.symmetrized_kl)
    assert rdrop.weight == 10
