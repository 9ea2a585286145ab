"""Poolers against padding and plain loops; heads against their formulas in float64; what each head may be used for."""

import copy
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_model
from torch import Tensor, nn

from bert import BertModel
from config import BertConfig
from heads import HEADS, POOLERS, build_head, check_head
from tasks import SST, STS, TASKS, Category, Number, Probability, Task
from utils import InputError

H = 8
LENGTHS = [5, 2, 7, 1]


@pytest.fixture(scope="module")
def bert() -> BertModel:
    torch.manual_seed(0)
    shape = dict(hidden_size=H, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=20)
    return BertModel(BertConfig(**shape)).eval()


def lively(module: nn.Module) -> nn.Module:
    """Put a module into eval mode and float64, with random parameters instead of start values such as zero."""
    generator = torch.Generator().manual_seed(3)
    for p in module.parameters():
        p.data = torch.randn(p.shape, generator=generator)
    return module.double().eval()


def sentences(seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, H, generator=generator, dtype=torch.float64) for n in LENGTHS]


def padded(rows: list[Tensor], T: int, garbage: float) -> tuple[Tensor, Tensor]:
    hidden = torch.full((len(rows), T, H), garbage, dtype=torch.float64)
    mask = torch.zeros(len(rows), T, dtype=torch.long)
    for i, row in enumerate(rows):
        hidden[i, : len(row)], mask[i, : len(row)] = row, 1
    return hidden, mask


# --- poolers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(POOLERS))
def test_a_sentence_has_the_same_vector_in_any_batch_order_and_padding(name: str, bert: BertModel) -> None:
    """Padding and the other rows of a batch must not change a vector (docs/PITFALLS.md, 8)."""
    pooler = lively(POOLERS[name](copy.deepcopy(bert).double()))
    rows = sentences()
    alone = torch.cat([pooler(row[None], torch.ones(1, len(row), dtype=torch.long)) for row in rows])
    assert alone.shape == (len(rows), H)
    for garbage in (0.0, 1e4, -1e4):
        for T in (7, 12):
            for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 2, 1]):
                vectors = pooler(*padded([rows[i] for i in order], T, garbage))
                torch.testing.assert_close(vectors, alone[order], atol=1e-12, rtol=1e-12)


def gru_last(row: np.ndarray, weight_ih: np.ndarray, weight_hh: np.ndarray, bias_ih: np.ndarray, bias_hh: np.ndarray):
    """The GRU of Cho et al. 2014 in torch's form, one token after the other."""
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    state = np.zeros(weight_hh.shape[1])
    for x in row:
        r, z, n = np.split(weight_ih @ x + bias_ih, 3)
        hr, hz, hn = np.split(weight_hh @ state + bias_hh, 3)
        r, z = sigmoid(r + hr), sigmoid(z + hz)
        state = (1 - z) * np.tanh(n + r * hn) + z * state
    return state


def pooled_by_hand(name: str, pooler: nn.Module, bert: BertModel, row: np.ndarray) -> np.ndarray:
    own = {n: p.detach().numpy() for n, p in pooler.named_parameters()}
    if name == "pooler":
        return np.tanh(bert.pooler_dense.weight.detach().numpy() @ row[0] + bert.pooler_dense.bias.detach().numpy())
    if name == "attention":
        weights = np.exp(row @ own["query"] / math.sqrt(H))
        return (weights / weights.sum()) @ row
    if name == "bigru":
        parts = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        forward = gru_last(row, *(own[f"gru.{part}_l0"] for part in parts))
        backward = gru_last(row[::-1], *(own[f"gru.{part}_l0_reverse"] for part in parts))
        return np.concatenate([forward, backward])
    return {"cls": row[0], "mean": row.mean(axis=0), "max": row.max(axis=0)}[name]


@pytest.mark.parametrize("name", sorted(POOLERS))
def test_a_pooler_computes_its_formula(name: str, bert: BertModel) -> None:
    bert = copy.deepcopy(bert).double()
    pooler = lively(POOLERS[name](bert))
    rows = sentences()
    expected = [pooled_by_hand(name, pooler, bert, row.numpy()) for row in rows]
    np.testing.assert_allclose(pooler(*padded(rows, 9, 5.0)).detach().numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("name", sorted(POOLERS))
def test_a_pooler_says_whether_it_has_parameters_and_all_of_them_learn(name: str, bert: BertModel) -> None:
    pooler = POOLERS[name](bert)
    parameters = list(pooler.parameters())
    assert pooler.own_parameters is bool(parameters)
    hidden, mask = padded(sentences(), 7, 0.0)
    hidden = hidden.float().requires_grad_()
    pooler(hidden, mask).pow(2).sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in parameters)
    assert not hidden.grad[mask == 0].any(), "padding gets no gradient"
    bert.zero_grad()


@pytest.mark.parametrize("name", sorted(POOLERS))
def test_a_pooler_registers_no_parameter_of_the_encoder_and_follows_its_copy(name: str, bert: BertModel, tmp_path):
    model = nn.ModuleDict({"bert": bert, "pool": POOLERS[name](bert)})
    assert len(list(model.parameters())) == len(set(model.state_dict())), "each parameter has one name"
    save_model(model, str(tmp_path / "model.safetensors"))
    twin = copy.deepcopy(model)
    hidden, mask = (t for t in padded(sentences(), 7, 0.0))
    before = model["pool"](hidden.float(), mask)
    with torch.no_grad():
        for p in twin.parameters():
            p.normal_(std=3.0)
    assert torch.equal(model["pool"](hidden.float(), mask), before), "a copy has its own weights"
    if name == "pooler":
        assert not torch.allclose(twin["pool"](hidden.float(), mask), before)


def test_attention_pooling_starts_from_the_mean(bert: BertModel) -> None:
    inputs = padded(sentences(), 7, 1e3)
    ours, mean = (POOLERS[name](bert).double()(*inputs) for name in ("attention", "mean"))
    torch.testing.assert_close(ours, mean)


@pytest.mark.parametrize("name", sorted(POOLERS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pooler_runs_under_autocast(name: str, dtype: torch.dtype, bert: BertModel) -> None:
    pooler = POOLERS[name](bert)
    hidden, mask = padded(sentences(), 7, 0.0)
    full = pooler(hidden.float(), mask)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(pooler(hidden.to(dtype), mask).float(), full, atol=0.05, rtol=0.05)


def test_bigru_refuses_an_odd_width() -> None:
    bert = BertModel(BertConfig(hidden_size=9, num_hidden_layers=1, num_attention_heads=3, vocab_size=20))
    with pytest.raises(InputError, match="even hidden size, found 9"):
        POOLERS["bigru"](bert)


# --- heads ------------------------------------------------------------------------------------------------------------

TARGETS = {
    "category": Category(5),
    "probability": Probability(),
    "number": Number(0, 5),
    "number 1-7": Number(1, 7),
}


def task_for(kind: str, vectors: int, *, pair: bool | None = None) -> Task:
    """A task that predicts this; on pairs if its head gets several vectors, or if `pair` says so."""
    columns = STS if pair or (pair is None and vectors > 1) else SST
    return replace(columns, name=kind, predicts=TARGETS[kind])


def fits(name: str, kind: str, vectors: int, pair: bool) -> bool:
    try:
        check_head(name, task_for(kind, vectors, pair=pair), vectors)
        return True
    except InputError:
        return False


# head, what it predicts, vectors that it gets, whether the task is on pairs
GRID = [
    (name, kind, vectors, pair)
    for name, kind in itertools.product(sorted(HEADS), TARGETS)
    for vectors, pair in ((1, False), (1, True), (2, True), (3, True))
]
FITTING = [case[:3] for case in GRID if fits(*case) and case[3] == (case[2] > 1)]
REFUSED = [case for case in GRID if not fits(*case)]


def vectors_for(count: int, B: int = 6, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(B, H, generator=generator, dtype=torch.float64) for _ in range(count)]


def head_for(name: str, kind: str, vectors: int, dropout: float = 0.0) -> nn.Module:
    return build_head(name, H, vectors, task_for(kind, vectors), dropout)


def moved(head: nn.Module) -> nn.Module:
    """The head after some training: a matrix that starts at zero is random."""
    for p in head.parameters():
        if p.ndim > 1 and not p.any():
            nn.init.normal_(p, std=0.1)
    return head


@pytest.mark.parametrize(("name", "kind", "vectors"), FITTING)
def test_a_head_gives_one_row_of_outputs_per_pair_whatever_the_batch(name: str, kind: str, vectors: int) -> None:
    head = lively(head_for(name, kind, vectors, dropout=0.5))
    given = vectors_for(vectors)
    logits = head(*given)
    assert logits.shape == (6, TARGETS[kind].num_logits)
    order = [4, 0, 5]
    torch.testing.assert_close(head(*(v[order] for v in given)), logits[order])


def logits_by_hand(
    name: str, kind: str, own: dict[str, np.ndarray], u: np.ndarray, v: np.ndarray | None = None, c=None
) -> np.ndarray:
    low, high = {"number": (0, 5), "number 1-7": (1, 7)}.get(kind, (math.nan, math.nan))
    joined = {
        "siamese": lambda: [u, v, np.abs(u - v)],
        "sbert": lambda: [u, v, np.abs(u - v), u * v],
        "both": lambda: [c, np.abs(u - v), u * v],
    }.get(name, lambda: [x for x in (u, v, c) if x is not None])()
    x = np.concatenate(joined)
    cos = lambda a, b: a @ b / math.sqrt((a @ a) * (b @ b))  # noqa: E731
    dense = lambda layer, x: own[f"{layer}.weight"] @ x + own[f"{layer}.bias"]  # noqa: E731
    if name in ("linear", "siamese", "sbert"):
        return dense("linear", x)
    if name == "mlp":
        inner = dense("inner", x)
        gelu = inner * 0.5 * (1 + np.array([math.erf(i / math.sqrt(2)) for i in inner]))
        return dense("outer", gelu)
    if name == "sigmoid":
        return low + (high - low) / (1 + np.exp(-dense("linear", x)))
    if name == "scaled_linear":
        return low + (high - low) * dense("linear", x)
    if name == "siamese_cosine":
        return np.array([low + (high - low) * (cos(dense("linear", u), dense("linear", v)) + 1) / 2])
    cosine = cos(u, v)
    if name == "cosine_affine":
        return np.array([own["scale"] * cosine + own["offset"]])
    if name == "both":
        return own["scale"] * cosine + own["offset"] + own["linear.weight"] @ x
    return np.array([{"cosine": cosine, "cosine_relu": low + (high - low) * max(cosine, 0.0)}[name]])


@pytest.mark.parametrize(("name", "kind", "vectors"), FITTING)
def test_a_head_computes_its_formula(name: str, kind: str, vectors: int) -> None:
    head = lively(head_for(name, kind, vectors))
    own = {n: p.detach().numpy() for n, p in head.named_parameters()}
    given = vectors_for(vectors, seed=1)
    rows = zip(*(v.numpy() for v in given), strict=True)
    expected = [logits_by_hand(name, kind, own, *row) for row in rows]
    np.testing.assert_allclose(head(*given).detach().numpy(), expected, atol=1e-12)


@pytest.mark.parametrize(("name", "kind", "vectors"), FITTING)
def test_dropout_stands_before_every_head_and_is_off_in_eval_mode(name: str, kind: str, vectors: int) -> None:
    head = moved(head_for(name, kind, vectors, dropout=0.5))
    given = [v.float() for v in vectors_for(vectors, B=50)]
    assert not torch.allclose(head.train()(*given), head(*given))
    assert torch.equal(head.eval()(*given), head(*given))
    bare = head_for(name, kind, vectors, dropout=0.0)
    bare.load_state_dict(head.state_dict())
    assert torch.equal(bare.train()(*given), head(*given))


@pytest.mark.parametrize(("name", "kind", "vectors"), FITTING)
def test_a_heads_mean_output_in_training_is_its_output_in_evaluation(name: str, kind: str, vectors: int) -> None:
    """Separate masks for two vectors would make the mean cosine 1 - p times as large (docs/PITFALLS.md, 38)."""
    torch.manual_seed(0)
    width, target = 384, TARGETS[kind]
    head = moved(build_head(name, width, vectors, task_for(kind, vectors), 0.3))
    u, noise, joined = torch.randn(3, 8, width)
    given = (u, 0.8 * u + 0.6 * noise, joined)[:vectors]
    samples = head.train()(*(v.repeat(2000, 1) for v in given)).view(2000, 8, -1)
    error = (samples.mean(dim=0) - head.eval()(*given)).abs()
    scale = target.range if isinstance(target, Number) else 2.0  # a logit of 2 is a probability of .88
    assert (error < 0.04 * scale + 5 * samples.std(dim=0) / 2000**0.5).all()  # gelu and sigmoid are curved


@pytest.mark.parametrize(("name", "kind", "vectors"), FITTING)
def test_every_parameter_of_a_head_gets_a_gradient_in_any_precision(name: str, kind: str, vectors: int) -> None:
    head = moved(head_for(name, kind, vectors))
    assert head.own_parameters is bool(list(head.parameters()))
    given = [v.float().requires_grad_() for v in vectors_for(vectors)]
    with torch.autocast("cpu", torch.bfloat16):
        logits = head(*given)
    torch.testing.assert_close(logits.float(), head(*given), atol=0.05, rtol=0.05)
    logits.float().pow(2).sum().backward()
    assert all(t.grad is not None and t.grad.any() for t in (*head.parameters(), *given))


BOUNDED = ("cosine", "cosine_relu", "siamese_cosine", "sigmoid")


@pytest.mark.parametrize("kind", ["number", "number 1-7"])
@pytest.mark.parametrize("name", BOUNDED)
def test_a_bounded_head_stays_within_its_range_and_serves_numbers_only(name: str, kind: str) -> None:
    assert HEADS[name].fits == (Number,)
    low, high = (-1, 1) if name == "cosine" else {"number": (0, 5), "number 1-7": (1, 7)}[kind]
    head = lively(head_for(name, kind, 1 + HEADS[name].needs_pair))
    u = 20 * torch.randn(400, H, dtype=torch.float64)
    near = u if HEADS[name].needs_pair else -u
    pairs = [(u, near), (u, -u)] if HEADS[name].needs_pair else [(u,), (near,)]
    logits = torch.cat([head(*pair) for pair in pairs])
    assert low - 1e-9 <= logits.min() < low + 0.4
    assert high - 0.01 < logits.max() <= high + 1e-9


def test_zero_vectors_give_a_finite_cosine_and_gradient() -> None:
    for name in ("cosine", "cosine_affine", "cosine_relu", "siamese_cosine"):
        u = torch.zeros(2, H, requires_grad=True)
        logits = head_for(name, "number", 2)(u, torch.zeros(2, H))
        logits.sum().backward()
        assert logits.isfinite().all(), name
        assert u.grad.isfinite().all(), name


def test_a_cosine_as_a_logit_has_a_learned_scale_and_offset_that_start_apart_from_one_half() -> None:
    """sigmoid(cos) lies in [.27, .73], and above .5 for nearly all of BERT's cosines (docs/PITFALLS.md, 27)."""
    assert Probability not in HEADS["cosine"].fits
    head = head_for("cosine_affine", "probability", 2)
    assert {n for n, _ in head.named_parameters()} == {"scale", "offset"}
    u = torch.eye(2)
    chance = head(u, torch.tensor([[1.0, 0.0], [1.0, 1.0]])).sigmoid().flatten()  # cosines 1 and 0.71
    assert chance[0] > 0.9
    assert chance[1] < 0.5
    for kind, lowest, highest in (("number", 0.0, 5.0), ("number 1-7", 1.0, 7.0)):
        number = head_for("cosine_affine", kind, 2)
        torch.testing.assert_close(number(u, u), torch.full((2, 1), highest))
        torch.testing.assert_close(number(u, u.flip(0)), torch.full((2, 1), lowest))


def test_cosine_affine_learns_a_threshold_that_a_cosine_alone_cannot_have() -> None:
    """Cosines from 0.80 to 0.99, paraphrases above 0.9: sigmoid(cos) calls every pair a paraphrase."""
    cosines = torch.linspace(0.80, 0.99, 20)
    labels = (cosines > 0.9).float()
    u = torch.tensor([[1.0, 0.0]]).repeat(20, 1)
    v = torch.stack([cosines, (1 - cosines**2).sqrt()], dim=1)
    head = build_head("cosine_affine", 2, 2, task_for("probability", 2), 0.0)
    optimizer = torch.optim.Adam(head.parameters(), lr=0.3)
    for _ in range(300):
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(head(u, v).flatten(), labels).backward()
        optimizer.step()
    assert torch.equal((head(u, v).flatten() > 0).float(), labels)
    assert (cosines.sigmoid() > 0.5).all()


@pytest.mark.parametrize(("name", "kind", "vectors", "pair"), REFUSED)
def test_a_head_is_refused_where_it_does_not_fit_and_the_remedy_is_named(
    name: str, kind: str, vectors: int, pair: bool
) -> None:
    task, head = task_for(kind, vectors, pair=pair), HEADS[name]
    with pytest.raises(InputError) as caught:
        check_head(name, task, vectors, "--x_head")
    message = str(caught.value)
    if head.needs_pair and not pair:
        assert message == (f"--x_head {name} compares two sentences, but {kind} has one. Use --x_head linear or mlp.")
    elif head.needs_pair and vectors == 1:
        assert message == (
            f"--x_head {name} compares two vectors, but cross pairing makes one vector per pair. "
            f"Use --x_head linear or mlp. Or use --{task.name}_pairing {'both' if name == 'both' else 'bi'}."
        )
    elif name == "both" and vectors == 2:
        assert message == (
            "--x_head both needs the joined pair as well, but bi pairing encodes the two sentences only. "
            f"Use --{task.name}_pairing both, or --x_head cosine_affine."
        )
    elif head.needs_pair and name != "both" and vectors == 3:
        assert message == (
            f"--x_head {name} compares two vectors, but both pairing makes three. Use --x_head both, or "
            f"--{task.name}_pairing bi."
        )
    else:
        nouns = {"category": "category", "probability": "probability"}
        assert message.startswith(f"--x_head {name} predicts a ")
        assert message.endswith(f", but {kind} needs a {nouns.get(kind, 'number')}. Use --x_head linear or mlp.")
    with pytest.raises(InputError, match=f"--head {name} "):
        build_head(name, H, vectors, task, 0.1)


def test_which_heads_fit_what() -> None:
    """The table as the classes state it; a head for pairs needs a task on pairs that are encoded apart."""
    every = {"category", "probability", "number", "number 1-7"}
    numbers = {"number", "number 1-7"}
    found = {name: {kind for head, kind, *_ in FITTING if head == name} for name in HEADS}
    assert found == {
        **dict.fromkeys(("linear", "mlp", "siamese", "sbert"), every),
        **dict.fromkeys(("cosine", "cosine_relu", "siamese_cosine", "sigmoid", "scaled_linear"), numbers),
        **dict.fromkeys(("cosine_affine", "both"), numbers | {"probability"}),
    }
    for_one_vector = {name for name, _, vectors in FITTING if vectors == 1}
    assert for_one_vector == {name for name, head in HEADS.items() if not head.needs_pair}
    for_three = {name for name, _, vectors in FITTING if vectors == 3}
    assert for_three == for_one_vector | {"both"}


def test_both_starts_as_cosine_affine() -> None:
    u, v, c = (x.float() for x in vectors_for(3))
    both, affine = (head_for(name, "probability", n) for name, n in (("both", 3), ("cosine_affine", 2)))
    assert torch.equal(both(u, v, c), affine(u, v))


def test_every_task_has_a_default_head_that_fits_it() -> None:
    for task in TASKS.values():
        for vectors in (1, 2)[: 1 + task.is_pair]:
            check_head(task.predicts.default_head, task, vectors)
    assert {target for head in HEADS.values() for target in head.fits} == {type(t.predicts) for t in TASKS.values()}
