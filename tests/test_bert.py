"""Compare bert.py with `transformers` (outputs, gradients, training mode); check that batching changes nothing."""

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import padded
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.bert.modeling_bert import BertSelfAttention as ReferenceAttention

import bert
from base_bert import find_checkpoint, published_name
from bert import ATTENTIONS, BertModel
from config import BertConfig
from tokenizer import BertTokenizer

SINGLE = ["A film .", "It is never dull , though it runs for three hours and has no plot to speak of .", ""]
SECOND = ["Two hours well spent ?", "Short .", "An empty first sentence ."]


@pytest.fixture(scope="module")
def pair_of_models() -> tuple[BertModel, transformers.BertModel]:
    folder = find_checkpoint("minilm")
    return BertModel.from_pretrained("minilm"), transformers.BertModel.from_pretrained(
        folder, attn_implementation="eager"
    )


def inputs(kind: str) -> dict[str, torch.Tensor]:
    tokenizer = BertTokenizer.from_pretrained("minilm")
    if kind == "one sentence":
        return padded(tokenizer, SINGLE[:1])
    return padded(tokenizer, SINGLE) if kind == "ragged sentences" else padded(tokenizer, SINGLE, SECOND)


def at_real_tokens(outputs: dict[str, torch.Tensor], batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [outputs["last_hidden_state"][batch["attention_mask"].bool()], outputs["pooler_output"]]


def some_loss(outputs: dict[str, torch.Tensor], batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """A scalar that depends on every output, each with a different weight."""
    return sum((x * torch.linspace(-1, 1, x.numel()).view_as(x)).mean() for x in at_real_tokens(outputs, batch))


@pytest.mark.parametrize("attention", sorted(ATTENTIONS))
@pytest.mark.parametrize("kind", ["one sentence", "ragged sentences", "pairs"])
def test_outputs_equal_those_of_transformers(pair_of_models, kind: str, attention: str) -> None:
    ours, theirs = (m.eval() for m in pair_of_models)
    ours.use_attention(attention)
    batch = inputs(kind)
    with torch.no_grad():
        actual, expected = at_real_tokens(ours(**batch), batch), at_real_tokens(theirs(**batch), batch)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


@pytest.mark.parametrize("attention", sorted(ATTENTIONS))
@pytest.mark.parametrize("kind", ["one sentence", "ragged sentences", "pairs"])
def test_gradients_of_every_parameter_equal_those_of_transformers(pair_of_models, kind: str, attention: str) -> None:
    ours, theirs = (m.eval() for m in pair_of_models)
    ours.use_attention(attention)
    batch = inputs(kind)
    for model in (ours, theirs):
        model.zero_grad()
        some_loss(model(**batch), batch).backward()
    expected = {name: p.grad for name, p in theirs.named_parameters()}
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p.grad, expected.pop(published_name(name)), atol=1e-5, rtol=1e-4, msg=name)
    assert not expected, "every parameter of the reference was compared"


def masked(x: torch.Tensor, p: float, calls: list[tuple[int, ...]]) -> torch.Tensor:
    """Dropout whose mask depends only on the number of earlier calls, so both implementations get the same masks."""
    generator = torch.Generator().manual_seed(len(calls))
    calls.append(tuple(x.shape))
    return x * (torch.rand(x.shape, generator=generator) >= p) / (1 - p)


def test_training_mode_equals_that_of_transformers_under_the_same_dropout_masks(pair_of_models, monkeypatch) -> None:
    """Dropout belongs after the dense layer and on the attention weights (docs/PITFALLS.md, 7)."""
    ours, theirs = (copy.deepcopy(m).train() for m in pair_of_models)
    ours.use_attention("written")
    batch = inputs("pairs")
    our_calls, their_calls = [], []
    monkeypatch.setattr(bert, "dropout", lambda x, p, training: masked(x, p, our_calls))
    actual = ours(**batch)
    some_loss(actual, batch).backward()
    monkeypatch.setattr(F, "dropout", lambda x, p=0.5, training=True, inplace=False: masked(x, p, their_calls))
    expected = theirs(**batch)
    some_loss(expected, batch).backward()
    assert our_calls == their_calls, "the same dropout calls, in the same order, on the same shapes"
    assert len(our_calls) == 1 + 3 * ours.config.num_hidden_layers
    for a, b in zip(at_real_tokens(actual, batch), at_real_tokens(expected, batch), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=0)
    reference = {name: p.grad for name, p in theirs.named_parameters()}
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p.grad, reference[published_name(name)], atol=1e-5, rtol=1e-3, msg=name)


def test_the_reference_attention_is_the_eager_one(pair_of_models) -> None:
    """transformers may change its default; the reference must be the plain, unfused version."""
    layers = [m for m in pair_of_models[1].modules() if isinstance(m, ReferenceAttention)]
    assert layers
    assert {layer.config._attn_implementation for layer in layers} == {"eager"}


def tiny(**changes: float) -> BertModel:
    torch.manual_seed(0)
    shape = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return BertModel(BertConfig(**shape, intermediate_size=64, initializer_range=0.3, **changes))


@pytest.mark.parametrize("attention", sorted(ATTENTIONS))
def test_padding_and_neighbors_do_not_change_a_row(attention: str) -> None:
    """Outputs at real tokens depend neither on padding nor on the other rows of the batch (docs/PITFALLS.md, 8)."""
    model = tiny().eval()
    model.use_attention(attention)
    ids = torch.randint(1, 100, (4, 12), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([12, 3, 7, 1])
    mask = (torch.arange(12) < lengths[:, None]).long()
    with torch.no_grad():
        together = model(ids, mask)
        for row, n in enumerate(lengths.tolist()):
            alone = model(ids[row : row + 1, :n], torch.ones(1, n, dtype=torch.long))
            torch.testing.assert_close(together["last_hidden_state"][row, :n], alone["last_hidden_state"][0])
            torch.testing.assert_close(together["pooler_output"][row], alone["pooler_output"][0])


def rows_of(model: BertModel, ids: torch.Tensor, mask: torch.Tensor) -> list[int]:
    """The number of tokens that each feed-forward layer computes."""
    rows: list[int] = []
    hooks = [
        layer.interm_dense.register_forward_hook(lambda _, given, result: rows.append(given[0].numel() // 32))
        for layer in model.bert_layers
    ]
    model(ids, mask)
    for hook in hooks:
        hook.remove()
    return rows


def test_padding_is_not_computed_on_a_cpu() -> None:
    model = tiny().train()
    ids, mask = torch.randint(1, 100, (4, 10)), torch.ones(4, 10, dtype=torch.long)
    assert rows_of(model, ids, mask) == [40, 40]
    mask[1, 9] = 0
    assert rows_of(model, ids, mask) == [40, 40], "packing for one token in 40 would not pay"
    mask[1, 5:] = mask[3, 1:] = 0
    assert rows_of(model, ids, mask) == [32, 32], "26 real tokens, and padding up to a multiple of 16"
    model.use_attention("written")
    assert rows_of(model, ids, mask) == [40, 40]


@pytest.mark.parametrize("checkpoint", [False, True])
def test_in_training_hidden_states_without_padding_give_the_same_outputs_and_gradients(monkeypatch, checkpoint) -> None:
    """Dropout is replaced by a function of each value alone, since its masks depend on the places of the values."""
    monkeypatch.setattr(bert, "dropout", lambda x, p, training: x * (x.detach().mul(1e3).frac().abs() > p))
    ids = torch.randint(1, 100, (5, 9), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(9) < torch.tensor([9, 2, 1, 6, 3])[:, None]).long()
    results = []
    for packs in (True, False):
        model = tiny().double().train()  # so that rounding cannot decide which values are dropped
        monkeypatch.setattr(model, "saves_time", lambda *given, packs=packs: packs)
        model.checkpoint_activations = checkpoint
        hidden = model(ids, mask)["last_hidden_state"]
        (hidden * mask[:, :, None] * torch.linspace(-1, 1, 32)).sum().backward()
        results.append([hidden[mask.bool()], *(p.grad for p in model.parameters() if p.grad is not None)])
    for packed, padded_ in zip(*results, strict=True):
        torch.testing.assert_close(packed, padded_)


def test_mixed_precision_casts_the_input_of_query_key_and_value_once() -> None:
    layer = tiny().bert_layers[0].self_attention
    hidden, mask = torch.randn(2, 6, 32), torch.zeros(2, 1, 1, 6)
    with torch.autocast("cpu", torch.bfloat16), CountCasts(hidden.shape) as casts:
        layer(hidden, mask)
    assert casts.count == 1


class CountCasts(TorchDispatchMode):
    """Counts casts of tensors of this shape."""

    def __init__(self, shape: torch.Size):
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._overloadpacket.__name__ == "_to_copy" and args[0].shape == self.shape
        return func(*args, **kwargs or {})


def test_segment_ids_change_the_output() -> None:
    """BERT receives the segment ids and uses them (docs/PITFALLS.md, 3)."""
    model = tiny().eval()
    ids, mask = torch.randint(1, 100, (1, 6)), torch.ones(1, 6, dtype=torch.long)
    plain, second = (model(ids, mask, s)["pooler_output"] for s in (torch.zeros_like(ids), torch.ones_like(ids)))
    assert (plain - second).abs().max() > 1e-3


def test_without_segment_ids_everything_is_the_first_segment() -> None:
    model = tiny().eval()
    ids, mask = torch.randint(1, 100, (1, 6)), torch.ones(1, 6, dtype=torch.long)
    assert torch.equal(model(ids, mask)["pooler_output"], model(ids, mask, torch.zeros_like(ids))["pooler_output"])


def test_the_padding_token_of_the_config_gets_no_gradient() -> None:
    model = tiny(pad_token_id=3)
    ids = torch.tensor([[5, 0, 3], [7, 3, 3]])
    model(ids, torch.ones_like(ids))["last_hidden_state"].square().sum().backward()
    assert model.word_embedding.weight.grad.any(dim=1).nonzero().flatten().tolist() == [0, 5, 7]


def test_each_dropout_uses_its_probability_from_the_config(monkeypatch) -> None:
    model = tiny(hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.4).train()
    model.use_attention("written")
    used = []
    monkeypatch.setattr(bert, "dropout", lambda x, p, training: used.append(p) or x)
    model(torch.ones(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.long))
    assert used == [0.2] + [0.4, 0.2, 0.2] * 2, "the embeddings, then in every layer the attention weights and two sums"


def test_the_fastest_attention_is_written_if_it_draws_dropout_masks_and_fused_otherwise(monkeypatch) -> None:
    assert all(layer.self_attention.attend is ATTENTIONS["fastest"] for layer in tiny().bert_layers), "the default"
    used = []
    for name in ("written_attention", "fused_attention"):
        monkeypatch.setattr(bert, name, lambda *_, name=name: used.append(name))
    for drop in (bert.Dropout(0.1).train(), bert.Dropout(0.1).eval(), bert.Dropout(0.0).train()):
        ATTENTIONS["fastest"](torch.ones(1), None, None, None, drop)
    assert used == ["written_attention", "fused_attention", "fused_attention"]


@pytest.mark.parametrize("attention", sorted(ATTENTIONS))
def test_attention_dropout_is_applied_in_training_only(attention: str) -> None:
    model = tiny(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.5)
    model.use_attention(attention)
    ids, mask = torch.randint(1, 100, (2, 6)), torch.ones(2, 6, dtype=torch.long)
    with torch.no_grad():
        model.train()
        assert not torch.equal(model(ids, mask)["pooler_output"], model(ids, mask)["pooler_output"])
        model.eval()
        assert torch.equal(model(ids, mask)["pooler_output"], model(ids, mask)["pooler_output"])


def test_activation_checkpointing_and_the_same_seed_repeat_the_same_dropout() -> None:
    model = tiny().train()
    ids, mask = torch.randint(1, 100, (2, 6)), torch.ones(2, 6, dtype=torch.long)

    def gradients(run) -> list[torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(5)
        run().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = gradients(lambda: model(ids, mask)["last_hidden_state"])
    saved = gradients(
        lambda: torch.utils.checkpoint.checkpoint(
            lambda: model(ids, mask)["last_hidden_state"], use_reentrant=False, preserve_rng_state=True
        )
    )
    for a, b in zip(plain, saved, strict=True):
        torch.testing.assert_close(a, b)


def test_bfloat16_and_autocast_run() -> None:
    model = tiny().train()
    ids, mask = torch.randint(1, 100, (2, 6)), torch.ones(2, 6, dtype=torch.long)
    mask[1, 3:] = 0
    with torch.autocast("cpu", torch.bfloat16):
        model(ids, mask)["pooler_output"].sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_a_new_model_starts_as_bert_does() -> None:
    """Weights are normal with the config's standard deviation, biases are zero, LayerNorm is the identity."""
    model = tiny()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            assert module.weight.std().item() == pytest.approx(0.3, rel=0.2)
        if isinstance(module, torch.nn.LayerNorm):
            assert (module.weight == 1).all()
        if isinstance(module, torch.nn.Linear | torch.nn.LayerNorm):
            assert not module.bias.any()


def test_every_layer_uses_the_chosen_attention() -> None:
    model = tiny()
    for name, attend in ATTENTIONS.items():
        model.use_attention(name)
        assert [layer.self_attention.attend for layer in model.bert_layers] == [attend] * 2
