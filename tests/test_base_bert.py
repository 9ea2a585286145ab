"""Checkpoints: names, formats, old spellings, errors that list every problem, exchange with `transformers`."""

import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import transformers
from conftest import ROOT
from safetensors.torch import load_file, save_file

import base_bert
from base_bert import checkpoint_state, find_checkpoint, load_checkpoint_state
from bert import BertModel
from config import ACTIVATIONS, BertConfig
from tokenizer import BertTokenizer
from utils import InputError

IDS = torch.tensor([[101, 7592, 2088, 102], [101, 2003, 102, 0]])
MASK = (IDS != 0).long()


def outputs(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, attention_mask=MASK)["pooler_output"]


def rewrite(source: Path, target: Path, change) -> Path:
    """Copy a checkpoint and apply `change` to its weights."""
    target.mkdir()
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(
        {k: v.clone() for k, v in change(load_file(source / "model.safetensors")).items()}, target / "model.safetensors"
    )
    return target


def test_a_saved_model_loads_in_transformers_to_the_same_outputs(tmp_path: Path) -> None:
    model = BertModel.from_pretrained("minilm")
    model.save_pretrained(tmp_path)
    theirs = transformers.AutoModel.from_pretrained(tmp_path)
    assert type(theirs) is transformers.BertModel
    torch.testing.assert_close(outputs(theirs), outputs(model), atol=1e-5, rtol=0)
    assert torch.equal(outputs(BertModel.from_pretrained(str(tmp_path))), outputs(model))


def test_a_model_saved_by_transformers_loads_here(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    theirs = transformers.BertModel(config)
    theirs.save_pretrained(tmp_path)
    torch.testing.assert_close(outputs(BertModel.from_pretrained(str(tmp_path))), outputs(theirs), atol=1e-5, rtol=0)


def test_a_pre_training_checkpoint_loads_and_says_what_is_not_used(tmp_path: Path, capsys) -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    theirs = transformers.BertForPreTraining(config)
    theirs.save_pretrained(tmp_path)
    capsys.readouterr()  # their progress bar
    ours = BertModel.from_pretrained(str(tmp_path))
    torch.testing.assert_close(outputs(ours), outputs(theirs.bert), atol=1e-5, rtol=0)
    assert capsys.readouterr().err == f"note: {tmp_path}: only the encoder is used, not its cls.\n"


def test_a_classifiers_checkpoint_loads_with_one_note(tmp_path: Path, capsys) -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    theirs = transformers.BertForSequenceClassification(config)
    theirs.save_pretrained(tmp_path)
    assert {name.partition(".")[0] for name in load_file(tmp_path / "model.safetensors")} == {"bert", "classifier"}
    capsys.readouterr()  # their progress bar
    ours = BertModel.from_pretrained(str(tmp_path))
    torch.testing.assert_close(outputs(ours), outputs(theirs.bert), atol=1e-5, rtol=0)
    assert capsys.readouterr().err == f"note: {tmp_path}: only the encoder is used, not its classifier.\n"


def test_all_parts_beside_the_encoder_are_named_in_one_note_unless_the_caller_reads_them(
    tiny_checkpoint: Path, tmp_path: Path, capsys
) -> None:
    def extend(weights: dict) -> dict:
        others = ("qa_outputs.weight", "cls.predictions.bias", "heads.sst.bias", "heads.sts.bias", "loose")
        return {f"bert.{k}": v for k, v in weights.items()} | {name: torch.zeros(2) for name in others}

    folder = str(rewrite(tiny_checkpoint, tmp_path / "more", extend))
    plain = outputs(BertModel.from_pretrained(str(tiny_checkpoint)))
    assert capsys.readouterr().err == ""
    every = "cls, heads, loose, qa_outputs"
    for read, named in ((set(), every), ({"cls"}, "heads, loose, qa_outputs"), ({"cls", "absent"}, every[5:])):
        assert torch.equal(outputs(BertModel.from_pretrained(folder, others_read=read)), plain)
        assert capsys.readouterr().err == f"note: {folder}: only the encoder is used, not its {named}.\n"
    BertModel.from_pretrained(folder, others_read={"cls", "heads", "loose", "qa_outputs"})
    assert capsys.readouterr().err == ""


def test_without_the_prefix_a_part_that_bert_does_not_have_is_an_error(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """A file of an encoder alone has no prefix and nothing beside the encoder."""
    folder = rewrite(tiny_checkpoint, tmp_path / "odd", lambda weights: weights | {"classifier.bias": torch.zeros(2)})
    with pytest.raises(InputError, match=r"1 unexpected: classifier\.bias"):
        BertModel.from_pretrained(str(folder))


def test_old_names_and_the_bert_prefix_are_mapped(tiny_checkpoint: Path, tmp_path: Path) -> None:
    def age(weights: dict) -> dict:
        old = {k.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): v
               for k, v in weights.items()}  # fmt: skip
        return {f"bert.{k}": v for k, v in old.items()}

    aged = rewrite(tiny_checkpoint, tmp_path / "old", age)
    assert torch.equal(
        outputs(BertModel.from_pretrained(str(aged))), outputs(BertModel.from_pretrained(str(tiny_checkpoint)))
    )


def test_a_bin_file_is_read_without_its_code(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_checkpoint / "config.json").read_bytes())
    torch.save(load_file(tiny_checkpoint / "model.safetensors"), tmp_path / "pytorch_model.bin")
    assert torch.equal(
        outputs(BertModel.from_pretrained(str(tmp_path))), outputs(BertModel.from_pretrained(str(tiny_checkpoint)))
    )


def test_safetensors_come_before_bin(tiny_checkpoint: Path, tmp_path: Path) -> None:
    copy = rewrite(tiny_checkpoint, tmp_path / "both", lambda weights: weights)
    (copy / "pytorch_model.bin").write_bytes(b"not read")
    BertModel.from_pretrained(str(copy))


def test_every_weight_that_does_not_fit_is_listed(tiny_checkpoint: Path, tmp_path: Path) -> None:
    def spoil(weights: dict) -> dict:
        weights["encoder.layer.0.surprise.weight"] = weights.pop("encoder.layer.0.output.dense.weight")
        weights["encoder.layer.1.output.dense.bias"] = torch.zeros(3)
        return weights

    with pytest.raises(InputError) as error:
        BertModel.from_pretrained(str(rewrite(tiny_checkpoint, tmp_path / "spoilt", spoil)))
    message = str(error.value)
    assert "1 missing: encoder.layer.0.output.dense.weight" in message
    assert "1 unexpected: encoder.layer.0.surprise.weight" in message
    assert "1 mis-shaped: encoder.layer.1.output.dense.bias (3,), not (32,)" in message


def test_a_missing_pooler_starts_at_random_and_it_says_so(tiny_checkpoint: Path, tmp_path: Path, capsys) -> None:
    def drop_pooler(weights: dict) -> dict:
        return {k: v for k, v in weights.items() if not k.startswith("pooler.")}

    BertModel.from_pretrained(str(rewrite(tiny_checkpoint, tmp_path / "bare", drop_pooler)))
    assert "no pooler" in capsys.readouterr().err


def test_position_ids_of_old_checkpoints_are_ignored_silently(tiny_checkpoint: Path, tmp_path: Path, capsys) -> None:
    for prefix in ("", "bert."):

        def add_positions(weights: dict, prefix: str = prefix) -> dict:
            named = {f"{prefix}{k}": v for k, v in weights.items()}
            return named | {f"{prefix}embeddings.position_ids": torch.arange(512)[None]}

        BertModel.from_pretrained(str(rewrite(tiny_checkpoint, tmp_path / f"older{prefix}", add_positions)))
        assert capsys.readouterr().err == ""


def test_keep_layers_keeps_the_first_ones() -> None:
    whole, cut = BertModel.from_pretrained("minilm"), BertModel.from_pretrained("minilm", keep_layers=2)
    assert cut.config.num_hidden_layers == len(cut.bert_layers) == 2
    whole.bert_layers = whole.bert_layers[:2]
    assert torch.equal(outputs(cut), outputs(whole))


def test_dropout_can_be_set_at_loading(tiny_checkpoint: Path) -> None:
    model = BertModel.from_pretrained(str(tiny_checkpoint), hidden_dropout_prob=0.25)
    assert model.embed_dropout.p == model.bert_layers[1].out_dropout.p == 0.25


def test_the_wheels_code_is_never_imported() -> None:
    find_checkpoint("minilm")
    assert base_bert.MINILM_PACKAGE not in sys.modules


def test_a_deep_checkpoint_with_sixteen_heads_loads(tmp_path: Path) -> None:
    """bert-large's depth and heads, on narrow layers."""
    shape = {"hidden_size": 64, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 128}
    theirs = transformers.BertModel(transformers.BertConfig(**shape, vocab_size=8000))
    theirs.save_pretrained(tmp_path)
    torch.testing.assert_close(outputs(BertModel.from_pretrained(str(tmp_path))), outputs(theirs), atol=1e-5, rtol=0)


LARGE = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}


def test_the_first_layers_of_a_checkpoint_as_wide_as_bert_large_are_those_of_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(**LARGE, num_hidden_layers=3, vocab_size=8000, max_position_embeddings=16)
    transformers.BertModel(config).save_pretrained(tmp_path)
    ours = BertModel.from_pretrained(str(tmp_path), keep_layers=2)
    theirs = transformers.BertModel.from_pretrained(tmp_path, num_hidden_layers=2)
    torch.testing.assert_close(outputs(ours), outputs(theirs), atol=1e-5, rtol=0)


def test_bert_large_has_the_names_and_shapes_of_transformers(tmp_path: Path) -> None:
    config = transformers.BertConfig(**LARGE, num_hidden_layers=24)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):  # only the shapes, without memory or time
        ours = BertModel(base_bert.read_config(tmp_path))
        theirs = transformers.BertModel(config)
    shapes = {base_bert.published_name(name): p.shape for name, p in ours.named_parameters()}
    assert shapes == {name: p.shape for name, p in theirs.named_parameters()}
    assert sum(shape.numel() for shape in shapes.values()) == 335_141_888


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "roberta"}, "model_type"),
        ({"hidden_act": "silu"}, "hidden_act must be one of gelu, gelu_new, gelu_pytorch_tanh, relu, found 'silu'"),
        ({"hidden_act": ["gelu"]}, "hidden_act must be one of"),
        ({"is_decoder": True}, "is_decoder must be false, found true. Choose the checkpoint of a plain BERT encoder"),
        ({"add_cross_attention": True}, "add_cross_attention must be false, found true"),
        ({"position_embedding_type": "relative_key"}, 'position_embedding_type must be "absolute"'),
        ({"hidden_size": 30}, "multiple"),
    ],
)
def test_an_unsupported_config_is_refused(tiny_checkpoint: Path, tmp_path: Path, change: dict, named: str) -> None:
    values = json.loads((tiny_checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | change))
    with pytest.raises(ValueError, match=named):
        base_bert.read_config(tmp_path)
    with pytest.raises(InputError, match=named):
        BertModel.from_pretrained(str(tmp_path))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_gives_the_outputs_of_transformers_and_is_saved(activation: str, tmp_path: Path) -> None:
    """The weights are large, so that the activations differ by far more than the tolerance."""
    torch.manual_seed(0)
    shape = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    theirs = transformers.BertModel(transformers.BertConfig(**shape, hidden_act=activation, initializer_range=0.5))
    theirs.save_pretrained(tmp_path / "theirs")
    ours = BertModel.from_pretrained(tmp_path / "theirs")
    torch.testing.assert_close(outputs(ours), outputs(theirs), atol=1e-5, rtol=0)
    ours.save_pretrained(tmp_path / "ours")
    again = transformers.AutoModel.from_pretrained(tmp_path / "ours")
    assert again.config.hidden_act == activation
    torch.testing.assert_close(outputs(again), outputs(theirs), atol=1e-5, rtol=0)
    other = BertConfig(**vars(ours.config) | {"hidden_act": "gelu" if activation == "relu" else "relu"})
    plain = BertModel(other)
    plain.load_state_dict(ours.state_dict())
    assert (outputs(plain) - outputs(ours)).abs().max() > 1e-2


def sharded(folder: Path, **shape: int) -> transformers.BertModel:
    """Save a random BERT of transformers in several files."""
    torch.manual_seed(0)
    shape = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64) | shape
    model = transformers.BertModel(transformers.BertConfig(**shape, vocab_size=8000))
    model.save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    assert not (folder / "model.safetensors").exists()
    return model


def test_a_checkpoint_in_several_files_loads(tmp_path: Path) -> None:
    theirs = sharded(tmp_path)
    torch.testing.assert_close(outputs(BertModel.from_pretrained(tmp_path)), outputs(theirs), atol=1e-5, rtol=0)


def test_all_files_of_a_checkpoint_are_fetched_from_the_hub(unreachable, tmp_path: Path, monkeypatch) -> None:
    sharded(tmp_path)
    hub = FakeHub(tmp_path)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", hub)
    assert find_checkpoint("someone/large-bert") == tmp_path
    shards = sorted(path.name for path in tmp_path.glob("model-*.safetensors"))
    assert set(shards) <= set(hub.asked)
    (tmp_path / shards[-1]).unlink()
    with pytest.raises(InputError, match=unreachable or "no BERT weights"):
        find_checkpoint("someone/large-bert")


@pytest.mark.parametrize(
    "index", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": "../b.safetensors"}}', '{"weight_map": 3}']
)
def test_a_damaged_list_of_files_is_refused_in_one_line(index: str, tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(InputError, match=r"index\.json: must be JSON with a weight_map from tensors to files") as error:
        BertModel.from_pretrained(tmp_path)
    assert "\n" not in str(error.value)


def test_a_file_that_the_list_names_but_that_is_absent_is_named(tmp_path: Path) -> None:
    sharded(tmp_path)
    shard = min(tmp_path.glob("model-*.safetensors"))
    shard.unlink()
    with pytest.raises(InputError, match=shard.name):
        BertModel.from_pretrained(tmp_path)


def test_local_files_only_asks_the_cache_and_nobody_else(tiny_checkpoint: Path, tmp_path: Path, monkeypatch) -> None:
    def no_request(name: str) -> str:
        raise AssertionError("a request was made")

    cached = []

    def from_cache(name: str, file: str, *, local_files_only: bool) -> str:
        cached.append(local_files_only)
        return FakeHub(tiny_checkpoint)(name, file, local_files_only=local_files_only)

    monkeypatch.setattr(base_bert, "why_unreachable", no_request)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", from_cache)
    model = BertModel.from_pretrained("someone/some-bert", local_files_only=True)
    tokenizer = BertTokenizer.from_pretrained("someone/some-bert", local_files_only=True)
    assert set(cached) == {True}
    assert torch.equal(outputs(model), outputs(BertModel.from_pretrained(tiny_checkpoint, local_files_only=True)))
    assert len(tokenizer) == 30522
    monkeypatch.setattr("huggingface_hub.hf_hub_download", FakeHub(tmp_path))
    with pytest.raises(InputError, match="local_files_only is set"):
        BertModel.from_pretrained("someone/some-bert", local_files_only=True)


def test_a_file_is_no_checkpoint_and_the_message_says_what_to_do(tmp_path: Path) -> None:
    torch.save({"model": {}}, tmp_path / "full-model-10-1e-05-multitask.pt")
    with pytest.raises(InputError, match=r"found a file.*model\.bert\.save_pretrained\(DIRECTORY\)"):
        find_checkpoint(str(tmp_path / "full-model-10-1e-05-multitask.pt"))


@pytest.mark.parametrize("name", ["minilm", "directory"])
def test_a_loaded_model_is_in_eval_mode_as_the_starters(name: str, tiny_checkpoint: Path) -> None:
    model = BertModel.from_pretrained("minilm" if name == "minilm" else tiny_checkpoint)
    assert not any(part.training for part in model.modules())
    assert model.dtype == torch.float32
    assert model.double().dtype == torch.float64


def test_the_defaults_of_a_config_are_those_of_bert_base() -> None:
    theirs = transformers.BertConfig()
    for name, value in vars(BertConfig()).items():
        assert value == getattr(theirs, name), name


class FakeHub:
    """A stand-in for a repository on the hub: it has the files in `folder` and reports all others as missing."""

    def __init__(self, folder: Path):
        self.folder, self.asked = folder, []

    def __call__(self, name: str, file: str, *, local_files_only: bool) -> str:
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        self.asked.append(file)
        if not (self.folder / file).is_file():
            raise LocalEntryNotFoundError(file) if local_files_only else EntryNotFoundError(file)
        return str(self.folder / file)


@pytest.fixture(params=["", "no connection"], ids=["hub", "cache"])
def unreachable(request, monkeypatch) -> str:
    """Run a test twice: with a reachable hub, and without one, from the cache."""
    monkeypatch.setattr(base_bert, "why_unreachable", lambda name: request.param)
    return request.param


def test_of_a_hub_id_the_bin_is_fetched_only_without_safetensors(
    unreachable, tiny_checkpoint, tmp_path, monkeypatch
) -> None:
    hub = FakeHub(tiny_checkpoint)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", hub)
    assert find_checkpoint("someone/some-bert") == tiny_checkpoint
    assert hub.asked == ["config.json", "model.safetensors", "vocab.txt", "tokenizer_config.json"]
    for name in ("config.json", "vocab.txt"):
        (tmp_path / name).write_bytes((tiny_checkpoint / name).read_bytes())
    torch.save(load_file(tiny_checkpoint / "model.safetensors"), tmp_path / "pytorch_model.bin")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", FakeHub(tmp_path))
    assert find_checkpoint("someone/old-bert") == tmp_path


def test_a_hub_id_without_weights_is_refused_with_the_reason(unreachable, tmp_path, monkeypatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", FakeHub(tmp_path))
    with pytest.raises(InputError, match=unreachable or "no BERT weights"):
        find_checkpoint("someone/empty")


# Runs in its own process, because the hub reads its settings at import. Prints the result or error, then the seconds.
FIND = """
import sys, time, huggingface_hub.file_download
from base_bert import InputError, find_checkpoint
started = time.monotonic()
try:
    print(find_checkpoint(sys.argv[1]))
except InputError as error:
    print(error)
print(time.monotonic() - started)
"""


def find_in_subprocess(name: str, **environment: str) -> tuple[str, float]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and not k.lower().endswith("_proxy")}
    command = [sys.executable, "-c", FIND, name]
    found = subprocess.run(command, cwd=ROOT, env=clean | environment, capture_output=True, text=True, timeout=100)
    assert found.returncode == 0, found.stderr
    answer, seconds = found.stdout.splitlines()
    return answer, float(seconds)


CLOSED = "http://127.0.0.1:9"  # the discard port: nothing listens there


@pytest.mark.parametrize("environment", [{"HF_ENDPOINT": CLOSED}, {"HTTPS_PROXY": CLOSED}], ids=["hub", "proxy"])
def test_without_a_connection_an_unknown_hub_id_is_refused_within_seconds(environment, tmp_path: Path) -> None:
    answer, seconds = find_in_subprocess("someone/unknown", HF_HOME=str(tmp_path), **environment)
    assert "--model someone/unknown: not a directory, not in the hub's cache, and not available from the hub" in answer
    assert "(no connection: " in answer
    assert seconds < 10, "the hub's own client takes 23 seconds"


@pytest.fixture
def hub_server(tiny_checkpoint: Path):
    """A small local hub that serves one checkpoint. It answers the first five requests with 503 (busy)."""

    class Handler(http.server.BaseHTTPRequestHandler):
        refused = 0

        def do_HEAD(self) -> None:
            path = tiny_checkpoint / Path(self.path).name
            if Handler.refused < 5:
                Handler.refused += 1
                status, body = 503, b""
            else:
                status, body = (200, path.read_bytes()) if path.is_file() else (404, b"")
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{path.name}"')
            self.send_header("X-Repo-Commit", "0" * 40)
            if status == 404:
                self.send_header("X-Error-Code", "EntryNotFound")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_GET = do_HEAD  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.slow
def test_a_busy_hub_is_asked_again_and_its_files_serve_without_it_later(hub_server: str, tiny_checkpoint, tmp_path):
    online, _ = find_in_subprocess("someone/some-bert", HF_HOME=str(tmp_path), HF_ENDPOINT=hub_server)
    for file in ("config.json", "model.safetensors", "vocab.txt"):
        assert (Path(online) / file).read_bytes() == (tiny_checkpoint / file).read_bytes()
    offline, seconds = find_in_subprocess("someone/some-bert", HF_HOME=str(tmp_path), HF_ENDPOINT=CLOSED)
    assert offline == online
    assert seconds < 10
    assert find_in_subprocess("someone/some-bert", HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1")[0] == online


# --- the files of a multitask run -------------------------------------------------------------------------------------


class TwoHeads(torch.nn.Module):
    """An encoder with a layer that BERT does not have, two heads, one of them under two names, and a buffer."""

    def __init__(self, seed: int, outputs: int = 3):
        super().__init__()
        torch.manual_seed(seed)
        shape = {"vocab_size": 8000, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        self.bert = BertModel(BertConfig(**shape, intermediate_size=64))
        self.bert.bert_layers[1].adapter = torch.nn.Linear(32, 2)
        self.heads = torch.nn.ModuleDict({"sst": torch.nn.Linear(32, 5), "para": torch.nn.Linear(32, outputs)})
        self.heads["sts"] = self.heads["para"]
        self.weighting = torch.nn.Module()
        self.weighting.register_buffer("losses", torch.rand(3))
        self.weighting.register_buffer("scratch", torch.rand(3), persistent=False)


def test_the_checkpoint_state_of_a_model_comes_back_exactly(tmp_path: Path) -> None:
    saved, loaded = TwoHeads(0), TwoHeads(1)
    state = checkpoint_state(saved)
    assert "bert.encoder.layer.1.output.LayerNorm.bias" in state
    assert "bert.bert_layers.1.adapter.weight" in state
    assert {k for k in state if not k.startswith("bert.")} == {
        "heads.sst.weight", "heads.sst.bias", "heads.para.weight", "heads.para.bias", "weighting.losses"
    }  # fmt: skip
    assert not any(tensor.requires_grad for tensor in state.values())
    save_file(state, tmp_path / "model.safetensors")
    load_checkpoint_state(loaded, load_file(tmp_path / "model.safetensors"), tmp_path)
    ours, theirs = saved.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_tensor_that_is_not_contiguous_is_saved_as_it_reads(tmp_path: Path) -> None:
    model = TwoHeads(0)
    model.heads["sst"].weight = torch.nn.Parameter(torch.rand(32, 5).t())
    save_file(checkpoint_state(model), tmp_path / "model.safetensors")
    assert torch.equal(load_file(tmp_path / "model.safetensors")["heads.sst.weight"], model.heads["sst"].weight)


def test_a_state_of_another_build_is_refused_with_everything_that_does_not_fit(tmp_path: Path) -> None:
    state = checkpoint_state(TwoHeads(0))
    state["heads.cfimdb.bias"] = state.pop("bert.pooler.dense.bias")
    with pytest.raises(InputError) as error:
        load_checkpoint_state(TwoHeads(1, outputs=4), state, tmp_path)
    message = str(error.value)
    assert message.startswith(f"{tmp_path}: the weights do not fit this model.")
    assert "1 missing: bert.pooler.dense.bias" in message
    assert "1 unexpected: heads.cfimdb.bias" in message
    assert "2 mis-shaped: heads.para.bias (3,), not (4,), heads.para.weight (3, 32), not (4, 32)" in message


def test_the_encoder_of_a_multitask_run_loads_here_and_in_transformers(tmp_path: Path, capsys) -> None:
    model = TwoHeads(0)
    del model.bert.bert_layers[1].adapter
    model.poolers = torch.nn.ModuleDict({"sst": torch.nn.Linear(32, 1)})
    model.shared_pair_layer = torch.nn.Linear(32, 32)
    model.bert.save_pretrained(tmp_path)  # for config.json
    save_file(checkpoint_state(model), tmp_path / "model.safetensors", metadata={"format": "pt"})
    ours = BertModel.from_pretrained(str(tmp_path))
    assert torch.equal(outputs(ours), outputs(model.bert))
    others = "heads, poolers, shared_pair_layer, weighting"
    assert capsys.readouterr().err == f"note: {tmp_path}: only the encoder is used, not its {others}.\n"
    theirs = transformers.AutoModel.from_pretrained(tmp_path)
    torch.testing.assert_close(outputs(theirs), outputs(model.bert), atol=1e-5, rtol=0)
    cut = BertModel.from_pretrained(str(tmp_path), keep_layers=1)
    assert torch.equal(cut.pooler_dense.weight, model.bert.pooler_dense.weight)
