"""Adapters: PALs against float64 NumPy, LoRA merged and unmerged, mixout in numbers, own layers; what each changes."""

import argparse
import copy
import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from test_multitask import run_multitask, same
from test_training import Bench, assert_close, rising_scores, weights_of
from torch import Tensor, nn

import multitask_classifier
from adapters import ADAPTERS, LINEARS, PAL, LinearWithUpdate, LoRA, Mixout, MixoutLayer, OwnLayers, build_adapter
from base_bert import checkpoint_state
from bert import BertModel
from checkpoints import restore_best, save_best
from config import BertConfig
from model import MultitaskBERT
from runs import Run
from smart import REGULARIZERS, build_regularizer, evaluating
from tasks import Batch, stack
from utils import InputError

pytestmark = pytest.mark.usefixtures("one_thread")
TRAINED = [name for name, adapter in ADAPTERS.items() if adapter.own_parameters]
TASKS = ("sst", "para", "sts")
PER_TASK = [name for name in TRAINED if not ADAPTERS[name].shared]

Start = Callable[..., Bench]


@pytest.fixture
def bench(tiny_checkpoint: Path) -> Start:
    return lambda *flags, **options: Bench(tiny_checkpoint, *flags, **options)


def stirred(one: Bench, what: str = "adapter.", std: float = 0.3) -> Bench:
    """Make the weights so large that every effect is visible."""
    torch.manual_seed(3)
    for name, parameter in one.model.named_parameters():
        if name.startswith(what):
            nn.init.normal_(parameter, std=std)
    return one


@torch.no_grad()
def logits_of(model: MultitaskBERT, *batches: Batch) -> list[Tensor]:
    model.eval()
    return [model.predict(batch).logits for batch in batches]


# --- the formulas -----------------------------------------------------------------------------------------------------

Arrays = dict[str, np.ndarray]


def linear(x: np.ndarray, w: Arrays, name: str) -> np.ndarray:
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)


def norm(x: np.ndarray, w: Arrays, name: str) -> np.ndarray:
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12)
    return x * w[f"{name}.weight"] + w[f"{name}.bias"]


def attention(x: np.ndarray, w: Arrays, name: str, heads: int) -> np.ndarray:
    """Attention within one sentence without padding, head by head."""
    q, k, v = (linear(x, w, f"{name}.{part}") for part in ("query", "key", "value"))
    out = []
    for columns in np.split(np.arange(q.shape[1]), heads):
        scores = q[:, columns] @ k[:, columns].T / np.sqrt(len(columns))
        weights = np.exp(scores - scores.max(1, keepdims=True))
        out.append(weights / weights.sum(1, keepdims=True) @ v[:, columns])
    return np.concatenate(out, axis=1)


def written_out(embedded: np.ndarray, w: Arrays, task: str, layers: int, heads: int) -> np.ndarray:
    """BERT with PALs on one sentence (T, H), in the paper's notation."""
    h = embedded
    for i in range(layers):
        at, pal = f"bert.bert_layers.{i}", f"adapter.tasks.{task}"
        multi_head = linear(attention(h, w, f"{at}.self_attention", heads), w, f"{at}.attention_dense")
        x = norm(h + multi_head, w, f"{at}.attention_layer_norm")
        inner = linear(x, w, f"{at}.interm_dense")
        feed_forward = linear(inner * 0.5 * (1 + np.vectorize(math.erf)(inner / np.sqrt(2))), w, f"{at}.out_dense")
        small = attention(linear(h, w, f"{pal}.encoder"), w, f"{pal}.attentions.{i}", heads)
        h = norm(x + feed_forward + linear(small, w, f"{pal}.decoder"), w, f"{at}.out_layer_norm")
    return h


@pytest.mark.parametrize("attend", ["written", "fused"])
def test_pals_follow_the_paper_in_float64(attend: str, bench: Start):
    one = stirred(bench("--adapter", "pal", "--attention", attend))
    arrays = {name: p.detach().double().numpy() for name, p in one.model.named_parameters()}
    one.model.eval()
    found = {}
    for task in TASKS:
        batch = one.batch("sst", 0, 3, 7)  # of three lengths, so that two are padded
        sentence = batch.sentences[0]
        with torch.no_grad():
            embedded = one.model.embed(batch)
            hidden = one.model.bert.encode(embedded, sentence.attention_mask, one.model.adapter.layers(task))
        for row, length in enumerate(sentence.attention_mask.sum(1).tolist()):
            wanted = written_out(embedded[row, :length].double().numpy(), arrays, task, layers=2, heads=4)
            np.testing.assert_allclose(hidden[row, :length], wanted, atol=2e-5)
        found[task] = hidden
    assert not torch.allclose(found["sst"], found["para"], atol=1e-2), "every task has its own"


@pytest.mark.parametrize(
    ("H", "N", "d"),
    [(768, 12, 192), (384, 12, 96), (1024, 16, 256), (32, 4, 32), (576, 12, 192), (128, 2, 32), (8, 8, 64)],
)
def test_the_width_of_a_pal_is_about_the_papers_share_in_heads_of_a_multiple_of_8(H: int, N: int, d: int):
    """In half precision, fused attention needs such heads; the paper's d = 204 in bert-base gives heads of 17."""
    config = BertConfig(hidden_size=H, num_attention_heads=N)
    assert PAL.width(config, None) == d
    assert d // N % 8 == 0
    assert PAL.width(config, 5 * N) == 5 * N
    if N > 1:
        with pytest.raises(InputError, match=rf"--pal_dim must be a multiple .* {N} .* found 1. Use {N}\."):
            PAL.width(config, 1)


def test_eight_tasks_pals_are_an_eighth_of_bert_base_as_in_the_paper():
    with torch.device("meta"):
        bert = BertModel(BertConfig())
        pal = PAL(bert, list("abcdefgh"), dim=204)
    encoder, added = (sum(p.numel() for p in module.parameters()) for module in (bert, pal))
    assert 1 + added / encoder == pytest.approx(1.13, abs=0.005)


def test_v_e_and_v_d_are_shared_by_the_layers_and_not_by_the_tasks(bench: Start):
    names = [name for name, _ in bench("--adapter", "pal").model.adapter.named_parameters()]
    for task in TASKS:
        assert [n for n in names if n.startswith(f"tasks.{task}.") and "attentions" not in n] == [
            f"tasks.{task}.encoder.weight", f"tasks.{task}.decoder.weight"
        ]  # fmt: skip
        assert sum(n.startswith(f"tasks.{task}.attentions.") for n in names) == 2 * 6


def test_lora_merged_and_unmerged_give_the_same_outputs_and_the_update_is_that_of_the_paper(bench: Start):
    one = stirred(bench("--adapter", "lora", "--lora_r", 3, "--lora_alpha", 5, "--lora_on", "query", "interm_dense"))
    model, batches = one.model, one.draw(0, 3, 7)
    before, unmerged = weights_of(model), logits_of(model, *batches)
    state = checkpoint_state(model)
    assert same(weights_of(model), before), "the model stays as it is"
    for i in range(2):
        for ours, theirs in (("self_attention.query", "attention.self.query"), ("interm_dense", "intermediate.dense")):
            name = ours.rpartition(".")[2]
            A, B = (before[f"adapter.updates.{i}.{name}.{m}"].double() for m in "AB")
            wanted = before[f"bert.bert_layers.{i}.{ours}.weight"].double() + 5 / 3 * B @ A
            torch.testing.assert_close(
                state[f"bert.encoder.layer.{i}.{theirs}.weight"].double(), wanted, atol=1e-6, rtol=0
            )
            assert not state[f"adapter.updates.{i}.{name}.B"].any()
    layers = [module for module in model.modules() if isinstance(module, LinearWithUpdate)]
    assert len(layers) == 4
    for layer in layers:
        with layer.merged():
            torch.testing.assert_close(logits_of(model, *batches), unmerged, atol=1e-5, rtol=0)
    assert same(weights_of(model), before)
    plain = bench().model
    plain.load_state_dict({k: v for k, v in before.items() if not k.startswith("adapter.")})
    assert not torch.allclose(logits_of(plain, *batches)[0], unmerged[0], atol=1e-2), "the update has an effect"


class Weights(nn.Module):
    """A layer that returns its weight matrix."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.matrix, self.bias = nn.Parameter(weight), nn.Parameter(torch.zeros(3))

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        return self.matrix


def test_mixout_takes_the_start_with_probability_p_and_keeps_the_mean():
    torch.manual_seed(0)
    u, w, p = torch.randn(300, 200), torch.randn(300, 200), 0.7
    layer = Weights(u.clone())
    mixed = MixoutLayer(layer, p)
    layer.matrix.data = w
    draws = [mixed(None, None) for _ in range(200)]
    old, new = (torch.isclose(draws[0], value, atol=1e-5) for value in (u, (w - p * u) / (1 - p)))
    assert (old | new).all()
    assert old.float().mean().item() == pytest.approx(p, abs=0.01)
    assert not torch.equal(draws[0], draws[1])
    error = torch.stack(draws).mean(0) - w
    assert (error.abs().mean() / (w - u).abs().mean()).item() < 0.15  # sqrt(p / (1 - p) / 200) = 0.11
    assert abs(error.mean().item()) < 0.01
    (gradient,) = torch.autograd.grad(draws[0].sum(), layer.matrix)
    torch.testing.assert_close(gradient, new.float() / (1 - p) * ~old + 0.0)
    mixed.eval()
    assert mixed(None, None) is layer.matrix


# --- built from plain values, or from the flags -----------------------------------------------------------------------


def small_bert() -> BertModel:
    shape = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    return BertModel(BertConfig(**shape, intermediate_size=64))


GIVEN = argparse.Namespace(pal_dim=12, lora_r=3, lora_alpha=5.0, lora_on=["key", "out_dense"], mixout_p=0.4)
GIVEN.own_layers = 1


def test_adapters_take_values_and_the_flags_set_them() -> None:
    shapes = []
    for pal in (PAL(small_bert(), TASKS, 12), build_adapter_of("pal")):
        assert list(pal.tasks) == list(TASKS)
        shapes.append({name: p.shape for name, p in pal.named_parameters()})
        assert pal.tasks["sst"].encoder.weight.shape == (12, 32)
    assert shapes[0] == shapes[1]
    for lora in (LoRA(small_bert(), TASKS, r=3, alpha=5.0, on=("key", "out_dense")), build_adapter_of("lora")):
        assert [list(layer) for layer in lora.updates] == [["key", "out_dense"]] * 2
        assert {update.scale for layer in lora.updates for update in layer.values()} == {5 / 3}
        assert lora.updates[0]["out_dense"].A.shape == (3, 64)
    for mixout in (Mixout(small_bert(), TASKS, 0.4), build_adapter_of("mixout")):
        assert [layer.p for layer in mixout.mixed] == [0.4, 0.4]
    for own in (OwnLayers(small_bert(), TASKS, 1), build_adapter_of("own_layers")):
        assert {task: list(layers.bert_layers) for task, layers in own.tasks.items()} == {name: ["1"] for name in TASKS}
    none = build_adapter_of("none")
    assert (type(none), list(none.parameters())) == (ADAPTERS["none"], [])


def build_adapter_of(name: str) -> nn.Module:
    return build_adapter(argparse.Namespace(adapter=name, **vars(GIVEN)), small_bert(), TASKS)


def test_the_defaults_of_the_values_are_those_of_the_flags() -> None:
    args = multitask_classifier.get_args([])
    assert (args.pal_dim, args.lora_r, args.lora_alpha, args.lora_on) == (None, 8, 8, ["query", "value"])
    assert (args.mixout_p, args.own_layers) == (0.7, 2)
    assert {len(layers.bert_layers) for layers in OwnLayers(small_bert(), TASKS).tasks.values()} == {2}
    lora = LoRA(small_bert(), TASKS)
    assert [list(layer) for layer in lora.updates] == [["query", "value"]] * 2
    assert {(update.scale, len(update.A)) for layer in lora.updates for update in layer.values()} == {(1.0, 8)}
    assert {layer.p for layer in Mixout(small_bert(), TASKS).mixed} == {0.7}
    assert PAL(small_bert(), TASKS).tasks["sst"].encoder.weight.shape == (32, 32)


MATRICES = {"query": "self_attention.query", "key": "self_attention.key", "value": "self_attention.value"}
MATRICES |= {name: name for name in ("attention_dense", "interm_dense", "out_dense")}


@pytest.mark.parametrize("name", LINEARS)
def test_lora_replaces_each_matrix_where_it_is_and_keeps_its_parameter_names(name: str) -> None:
    bert = small_bert()
    names = [n for n, _ in bert.named_parameters()]
    lora = LoRA(bert, TASKS, on=[name, name])
    assert [n for n, _ in bert.named_parameters()] == names
    for layer, updates in zip(bert.bert_layers, lora.updates, strict=True):
        replaced = {n: m for n, m in layer.named_modules() if isinstance(m, LinearWithUpdate)}
        assert replaced.keys() == {MATRICES[name]}
        assert replaced[MATRICES[name]].update == (updates[name],)


# --- properties of every entry ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_is_the_identity_at_the_start_and_leaves_the_heads_start_alone(name: str, bench: Start):
    plain, one = bench(), bench("--adapter", name)
    batches = plain.draw(0, 3, 7)
    before = weights_of(plain.model)
    assert same(before, {k: v for k, v in weights_of(one.model).items() if k in before})
    for x, y in zip(logits_of(plain.model, *batches), logits_of(one.model, *batches), strict=True):
        assert torch.equal(x, y)
    for model in (plain.model.train(), one.model.train()):
        model.bert.train()
    for batch in batches:  # without dropout
        assert torch.equal(plain.model.predict(batch).logits, one.model.predict(batch).logits)


@pytest.mark.parametrize("name", ADAPTERS)
def test_under_an_adapter_a_prediction_never_depends_on_its_batch(name: str, bench: Start):
    one = stirred(bench("--adapter", name, "--pooling", "mean"), "")
    for task in TASKS:
        (together,) = logits_of(one.model, one.batch(task, *range(8)))
        alone = torch.cat([logits_of(one.model, one.batch(task, row))[0] for row in range(8)])
        torch.testing.assert_close(together, alone, atol=2e-5, rtol=0)
        assert alone.std(dim=0).min() > 1e-3, "rows must differ, or the test proves nothing"


def owner(name: str) -> str:
    """The owner of a parameter: bert, adapter, or a task."""
    own = re.match(r"(?:adapter\.tasks|heads|poolers)\.(\w+)\.", name)
    return own[1] if own else name.split(".")[0]


@pytest.mark.parametrize("only", [False, True])
@pytest.mark.parametrize("name", TRAINED)
def test_a_gradient_reaches_what_should_train_and_nothing_else(name: str, only: bool, bench: Start):
    one = stirred(bench("--adapter", name, "--pooling", "mean", *(["--adapter_only"] if only else [])))
    for task in TASKS:
        one.model.zero_grad()
        one.model.predict(one.batch(task, 0, 3)).logits.sum().backward()
        reached = {n for n, p in one.model.named_parameters() if p.grad is not None and p.grad.any()}
        wanted = {"adapter", task} if name == "lora" else {task}
        assert {owner(n) for n in reached} == (wanted if only else wanted | {"bert"})
        own = [n for n, _ in one.model.named_parameters() if owner(n) in wanted and not n.endswith("key.bias")]
        assert set(own) <= reached
    for parameter in one.model.shared_parameters():
        assert parameter.requires_grad
    shared = {id(p) for p in one.model.shared_parameters()}
    names = {owner(n) for n, p in one.model.named_parameters() if id(p) in shared}
    assert names == {"bert", "adapter"} - ({"bert"} if only else set()) - ({"adapter"} if name in PER_TASK else set())


@pytest.mark.parametrize("name", TRAINED)
def test_trained_alone_an_adapter_leaves_the_encoder_bit_for_bit_and_other_tasks_pals_too(name: str, bench: Start):
    flags = ["--adapter", name, "--adapter_only", "--weight_decay", 0.1, "--clip", 1, "--averager", "ema"]
    one = bench(*flags, dropout=True)
    assert one.model.bert.training, "dropout stays on"
    before = weights_of(one.model)
    after = one.after(*([[one.batch("sst", i, i + 1), one.batch("sts", i)]] for i in range(3)))
    moved = {n for n in after if not torch.equal(before[n], after[n])}
    assert moved == {n for n in after if owner(n) not in ("bert", "para")}


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_copy_of_a_model_has_an_adapter_of_its_own(name: str, bench: Start):
    one = stirred(bench("--adapter", name))
    batch, twin = one.batch("sst", 0, 3), copy.deepcopy(one.model)
    (before,) = logits_of(one.model, batch)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(0.1)
    assert torch.equal(logits_of(one.model, batch)[0], before)
    assert not torch.equal(logits_of(twin, batch)[0], before)
    twin.train().predict(batch).logits.sum().backward()
    assert all(p.grad is None for p in one.model.parameters())


# --- with the other extensions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_pass_is_repeated_with_all_its_random_masks(name: str, bench: Start):
    """SMART relies on this: without noise there is no difference."""
    one = stirred(bench("--adapter", name, dropout=True), "")
    for batch in one.draw(0, 3, 7):
        output = one.model.predict(batch)
        again = one.model.predict(batch, output.embeddings, output.random_state)
        assert torch.equal(output.logits, again.logits)
        assert not torch.equal(output.logits, one.model.predict(batch).logits)


@pytest.mark.parametrize("only", [False, True])
@pytest.mark.parametrize("regularizer", [*(name for name in REGULARIZERS if name != "none"), "bregman+rdrop:0.5"])
@pytest.mark.parametrize("name", TRAINED)
def test_regularizers_train_with_an_adapter(name: str, regularizer: str, only: bool, bench: Start):
    flags = ["--adapter", name, "--regularizer", regularizer, *(["--adapter_only"] if only else [])]
    one = stirred(bench(*flags, dropout=True))
    batch = one.batch("para", 0, 3)
    output = one.model.predict(batch)
    penalty = one.trainer.regularizer(one.model, batch, output)
    assert penalty.item() > 0
    penalty.backward()
    reached = {owner(n) for n, p in one.model.named_parameters() if p.grad is not None and p.grad.any()}
    assert ("bert" in reached) != only
    assert ("para" if name in PER_TASK else "adapter") in reached


@pytest.mark.parametrize("name", TRAINED)
def test_bregmans_teacher_runs_with_the_adapter_that_it_had(name: str, bench: Start):
    one = stirred(bench("--adapter", name, "--adapter_only"))
    args = argparse.Namespace(**vars(one.args) | {"regularizer": "bregman"})
    regularizer, batch = build_regularizer(args, one.model), one.batch("sts", 0, 3)
    before = one.model.predict(batch).logits.detach()
    stirred(one, std=2.0)
    output = one.model.predict(batch)
    wanted = (output.logits - before).square().mean()
    torch.testing.assert_close(regularizer(one.model, batch, output), wanted, rtol=1e-4, atol=1e-6)
    assert wanted > 1e-4
    with evaluating(one.model):
        assert torch.equal(one.model.predict(batch).logits, output.logits), "and the model has its own weights again"


@pytest.mark.parametrize(
    ("name", "only"), [(name, []) for name in ADAPTERS] + [(name, ["--adapter_only"]) for name in TRAINED]
)
def test_checkpointed_activations_give_the_same_weights_under_an_adapter(name: str, only: list[str], bench: Start):
    def after_two_steps(*more: str) -> dict[str, Tensor]:
        one = bench("--adapter", name, *only, *more, dropout=True)
        torch.manual_seed(5)
        return one.after([one.draw(0, 1, 2)], [one.draw(3, 4)])

    assert_close(after_two_steps(), after_two_steps("--checkpoint_activations"), atol=1e-7)


def test_under_gradient_surgery_pals_keep_plain_gradients_and_loras_are_combined(bench: Start):
    for name in TRAINED:
        one, other = (
            stirred(bench("--adapter", name, "--combiner", combiner), "").with_sgd() for combiner in ("sum", "mgda")
        )
        plain, surgery = (b.after([b.draw(0, 1, 2)]) for b in (one, other))
        alike = {n: torch.allclose(plain[n], surgery[n], rtol=0, atol=1e-6) for n in plain}
        assert all(alike[n] for n in plain if owner(n) in TASKS)
        assert not all(alike[n] for n in plain if owner(n) == "bert")
        if name == "lora":
            assert not all(alike[n] for n in plain if owner(n) == "adapter")


@pytest.mark.parametrize("count", [1, 2])
def test_every_task_runs_through_the_shared_layers_and_then_through_its_own(count: int, bench: Start):
    """Against plain models whose last layers are a task's own."""
    one = stirred(bench("--adapter", "own_layers", "--own_layers", count), "adapter.", std=0.2)
    one.model.eval()
    for task in TASKS:
        plain = bench()
        plain.model.load_state_dict({n: p for n, p in weights_of(one.model).items() if not n.startswith("adapter.")})
        own = {
            f"bert.{n.split('.', 3)[3]}": p
            for n, p in weights_of(one.model).items()
            if n.startswith(f"adapter.tasks.{task}.")
        }
        assert {n.split(".")[2] for n in own} == {"0", "1"} if count == 2 else {"1"}
        plain.model.load_state_dict(own, strict=False)
        batch = one.batch(task, 0, 3, 5)
        (found,), (wanted,) = logits_of(one.model, batch), logits_of(plain.model, batch)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
        (start,) = logits_of(bench().model, batch)
        assert not torch.allclose(found, start, atol=1e-3), "or the test proves nothing"


def test_the_layers_that_were_copied_do_not_train_and_are_not_shared(bench: Start):
    one = bench("--adapter", "own_layers", "--own_layers", 1)
    fixed = {n for n, p in one.model.named_parameters() if not p.requires_grad}
    assert fixed == {n for n in weights_of(one.model) if n.startswith("bert.bert_layers.1.")}
    before, after = weights_of(one.model), one.after([one.draw(0, 1, 2)])
    assert all(torch.equal(before[n], after[n]) for n in fixed)


def test_own_layers_learn_at_the_rate_of_the_layer_that_they_copy(bench: Start):
    one = bench("--adapter", "own_layers", "--lr", 0.1, "--head_lr", 0.5, "--layer_decay", 0.5)
    rates = {id(p): group["lr"] for group in one.trainer.optimizer.param_groups for p in group["params"]}
    for layers in one.model.adapter.tasks.values():
        found = {number: {rates[id(p)] for p in layer.parameters()} for number, layer in layers.bert_layers.items()}
        assert found == {"0": {0.05}, "1": {0.1}}


def test_more_own_layers_than_the_encoder_has_are_refused() -> None:
    with pytest.raises(
        InputError, match=r"^--own_layers must be at most the number of the encoder's layers, 2, found 3"
    ):
        OwnLayers(small_bert(), TASKS, 3)


def test_an_adapter_with_new_weights_learns_at_the_heads_rate(bench: Start):
    for name in ("pal", "lora"):
        one = bench("--adapter", name, "--head_lr", 0.5, "--layer_decay", 0.5)
        rates = {id(p): group["lr"] for group in one.trainer.optimizer.param_groups for p in group["params"]}
        assert {rates[id(p)] for p in one.model.adapter.parameters()} == {0.5}


@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTERS)
def test_compiled_layers_give_the_same_step_under_an_adapter(name: str, bench: Start):
    plain, compiled = (stirred(bench("--adapter", name)).with_sgd() for _ in range(2))
    for layer in (m for b in (plain, compiled) for m in b.model.modules() if isinstance(m, MixoutLayer)):
        layer.p = 0.0  # compiled code draws other masks
    compiled.model.adapter.compile_layers()
    for rows in ((0, 1, 2), (3, 4), (5, 6, 7)):  # of different lengths
        for one, other in zip(*(logits_of(b.model, *b.draw(*rows)) for b in (plain, compiled)), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    for b in (plain, compiled):
        b.model.train()
    assert_close(*(b.after([b.draw(0, 1, 2)], [b.draw(3, 4)]) for b in (plain, compiled)), atol=1e-5)


# --- what a run says and leaves ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_saved_model_comes_back_with_the_same_outputs(name: str, bench: Start, tmp_path: Path):
    one, other = stirred(bench("--adapter", name), ""), bench("--adapter", name)
    batches = one.draw(0, 3, 7)
    before, wanted = weights_of(one.model), logits_of(one.model, *batches)
    save_best(one.model, Run(tmp_path))
    assert same(weights_of(one.model), before)
    restore_best(other.model, Run(tmp_path))
    for found, logits in zip(logits_of(other.model, *batches), wanted, strict=True):
        torch.testing.assert_close(found, logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_encoder_of_a_run_loads_here_and_in_transformers_and_says_what_is_left_out(
    name: str, bench: Start, tmp_path: Path, capsys: pytest.CaptureFixture
):
    one = stirred(bench("--adapter", name))
    save_best(one.model, Run(tmp_path))
    capsys.readouterr()
    ours = BertModel.from_pretrained(str(tmp_path)).eval()
    others = "adapter, heads" if name in TRAINED else "heads"
    assert capsys.readouterr().err == f"note: {tmp_path}: only the encoder is used, not its {others}.\n"
    theirs = transformers.AutoModel.from_pretrained(tmp_path).eval()
    batch = one.batch("sst", 0, 3)
    ids, mask, _ = stack(batch.sentences)[:3]
    one.model.eval()
    with torch.no_grad():
        found = [model(input_ids=ids, attention_mask=mask)["last_hidden_state"] for model in (ours, theirs)]
        whole = one.model.bert.encode(one.model.embed(batch), mask, one.model.adapter.layers("sst"))
    for hidden in found:
        hidden, wanted = hidden[mask.bool()], whole[mask.bool()]
        if name in PER_TASK:
            assert not torch.allclose(hidden, wanted, atol=1e-2)
        else:
            torch.testing.assert_close(hidden, wanted, rtol=0, atol=1e-5)


RUNS = {
    "pal": ["--adapter", "pal", "--sampler", "annealed"],
    "pal only": ["--adapter", "pal", "--adapter_only", "--pal_dim", 12],
    "lora": ["--adapter", "lora", "--averager", "ema", "--ema_decay", 0.5, "--combiner", "pcgrad"],
    "lora only": ["--adapter", "lora", "--adapter_only", "--lora_r", 2, "--lora_on", "key", "out_dense"],
    "mixout": ["--adapter", "mixout", "--precision", "bf16"],
    "own layers": ["--adapter", "own_layers", "--own_layers", 1, "--averager", "ema", "--ema_decay", 0.5],
    "own layers only": ["--adapter", "own_layers", "--adapter_only"],
}
LAYER = 4 * (32 * 32 + 32) + 2 * 32 * 64 + 32 + 64 + 4 * 32
PARAMETERS = {  # of 2 layers, 32 wide, 64 inside
    "pal": f" | adapter pal: {2 * 3 * (32 * 32 + 32) + 2 * 32 * 32:,} parameters for each task",
    "pal only": f" | adapter pal: {2 * 3 * (12 * 12 + 12) + 2 * 32 * 12:,} parameters for each task",
    "lora": f" | adapter lora: {2 * 2 * 8 * (32 + 32):,} parameters",
    "lora only": f" | adapter lora: {2 * 2 * (32 + 32 + 64 + 32):,} parameters",
    "mixout": " | adapter mixout: no parameters",
    "own layers": f" | adapter own_layers: {LAYER:,} parameters for each task",
    "own layers only": f" | adapter own_layers: {2 * LAYER:,} parameters for each task",
}


@pytest.mark.parametrize("case", RUNS)
def test_a_run_says_what_it_trains_and_predicts_again_as_it_was_evaluated(
    case: str, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    evaluated, predict = {}, multitask_classifier.predict

    def predicting(model: MultitaskBERT, split: object, *rest: object) -> object:
        found = predict(model, split, *rest)
        evaluated.setdefault(split.task.name, []).append(found.logits)
        return found

    rising_scores(monkeypatch)
    monkeypatch.setattr(multitask_classifier, "predict", predicting)
    flags = ["--option", "finetune", "--lr", "1e-2", "--epochs", 2, *RUNS[case]]
    done = run_multitask(tmp_path, tiny_checkpoint, *flags)
    assert done.out.splitlines()[1].endswith(PARAMETERS[case])
    trained, total = (int(n.replace(",", "")) for n in re.search(r"([\d,]+) of ([\d,]+) parameters", done.out).groups())
    encoder = sum(p.numel() for p in done.models[0].bert.parameters())
    assert total - trained == (encoder if "only" in case else LAYER if "own" in case else 0)
    tolerance = 0.05 if "bf16" in RUNS[case] else 1e-5
    for logits in evaluated.values():  # two epochs on dev, then dev and test
        np.testing.assert_allclose(logits[2], logits[1], atol=tolerance)
        assert not np.allclose(logits[1], logits[0], atol=1e-3)
    if "only" in case:
        start = BertModel.from_pretrained(str(tiny_checkpoint)).state_dict()
        restored = done.models[-1].bert.state_dict()
        changed = {n for n in start if not torch.equal(start[n], restored[n])}
        assert all(re.search(r"self_attention\.key|out_dense", n) for n in changed)
        assert bool(changed) == ("lora" in case)
    before = done.predictions()
    again = run_multitask(tmp_path, Path(), "--predict_only", "--run", done.run)
    assert again.predictions() == before
    assert same(load_file(done.run / "model.safetensors"), checkpoint_state(again.models[0]))


@pytest.mark.parametrize("width", [8, 32])
def test_a_run_of_pals_is_loaded_with_the_width_of_its_weights_whatever_the_default_is_now(
    width: int, tiny_checkpoint: Path, tmp_path: Path
):
    """At first the default was 204 for bert-base, and 8 for this checkpoint; args.json holds null for a default."""
    flags = ["--option", "finetune", "--epochs", 1, "--adapter", "pal", "--pal_dim", width]
    done = run_multitask(tmp_path, tiny_checkpoint, *flags)
    before, facts = done.predictions(), json.loads((done.run / "args.json").read_text())
    assert facts["args"].pop("pal_dim") == width
    (done.run / "args.json").write_text(json.dumps(facts | {"args": facts["args"] | {"pal_dim": None}}))
    assert run_multitask(tmp_path, Path(), "--predict_only", "--run", done.run).predictions() == before
    (done.run / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(InputError, match="not a complete weights file"):
        run_multitask(tmp_path, Path(), "--predict_only", "--run", done.run)


def test_the_encoder_of_a_run_with_fewer_layers_is_a_checkpoint_with_fewer_layers(
    tiny_checkpoint: Path, tmp_path: Path
):
    flags = ["--option", "finetune", "--epochs", 1, "--adapter", "lora", "--lr", "1e-2"]
    first = run_multitask(tmp_path / "first", tiny_checkpoint, *flags, "--keep_layers", 1)
    assert len(first.models[-1].bert.bert_layers) == len(first.models[-1].adapter.updates) == 1
    before = first.predictions()
    run_multitask(tmp_path / "first", Path(), "--predict_only", "--run", first.run)
    assert first.predictions() == before
    theirs = transformers.AutoModel.from_pretrained(first.run)
    assert theirs.config.num_hidden_layers == 1
    second = run_multitask(tmp_path / "second", first.run, *flags, "--keep_layers", 1)
    assert len(second.models[0].bert.bert_layers) == 1
    with pytest.raises(InputError, match="--keep_layers must be 1 to 1"):
        run_multitask(tmp_path / "third", first.run, *flags, "--keep_layers", 2)
