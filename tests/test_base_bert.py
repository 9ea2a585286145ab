"""Checkpoints: names, formats, old spellings, errors that list what is wrong; to `transformers` and back."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import base_bert
from base_bert import find_checkpoint
from bert import BertModel
from config import BertConfig
from utils import InputError

IDS = torch.tensor([[101, 7592, 2088, 102], [101, 2003, 102, 0]])
MASK = (IDS != 0).long()


def outputs(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, attention_mask=MASK)["pooler_output"]


def rewrite(source: Path, target: Path, change) -> Path:
    """A copy of a checkpoint whose weights went through `change`."""
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
    ours = BertModel.from_pretrained(str(tmp_path))
    torch.testing.assert_close(outputs(ours), outputs(theirs.bert), atol=1e-5, rtol=0)
    assert "cls.*" in capsys.readouterr().err


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


def test_keep_layers_keeps_the_first_ones() -> None:
    whole, cut = BertModel.from_pretrained("minilm"), BertModel.from_pretrained("minilm", keep_layers=2)
    assert cut.config.num_hidden_layers == len(cut.bert_layers) == 2
    whole.bert_layers = whole.bert_layers[:2]
    assert torch.equal(outputs(cut), outputs(whole))


def test_dropout_can_be_set_at_loading(tiny_checkpoint: Path) -> None:
    model = BertModel.from_pretrained(str(tiny_checkpoint), hidden_dropout_prob=0.25)
    assert model.embed_dropout.p == model.bert_layers[1].out_dropout.p == 0.25


def test_the_wheels_code_is_never_imported() -> None:
    import sys

    find_checkpoint("minilm")
    assert base_bert.MINILM_PACKAGE not in sys.modules


def test_a_deep_checkpoint_with_sixteen_heads_loads(tmp_path: Path) -> None:
    """bert-large's depth and heads, on narrow layers."""
    shape = {"hidden_size": 64, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 128}
    theirs = transformers.BertModel(transformers.BertConfig(**shape, vocab_size=8000))
    theirs.save_pretrained(tmp_path)
    torch.testing.assert_close(outputs(BertModel.from_pretrained(str(tmp_path))), outputs(theirs), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "roberta"}, "model_type"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"hidden_size": 30}, "multiple"),
    ],
)
def test_a_config_of_another_kind_is_refused(tiny_checkpoint: Path, tmp_path: Path, change: dict, named: str) -> None:
    found = json.loads((tiny_checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(found | change))
    with pytest.raises(ValueError, match=named):
        BertConfig.from_file(tmp_path / "config.json")
    with pytest.raises(InputError, match=named):
        BertModel.from_pretrained(str(tmp_path))


class FakeHub:
    """Stands for the hub's repository: some files exist, the network may be down. Only its absence is imitated."""

    def __init__(self, folder: Path, error: Exception | None = None):
        self.folder, self.error, self.asked = folder, error, []

    def __call__(self, name: str, file: str) -> str:
        from huggingface_hub.errors import EntryNotFoundError

        self.asked.append(file)
        if self.error:
            raise self.error
        if not (self.folder / file).is_file():
            raise EntryNotFoundError(file)
        return str(self.folder / file)


def test_of_a_hub_id_the_bin_is_fetched_only_without_safetensors(tiny_checkpoint, tmp_path, monkeypatch) -> None:
    hub = FakeHub(tiny_checkpoint)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", hub)
    assert find_checkpoint("someone/some-bert") == tiny_checkpoint
    assert hub.asked == ["config.json", "model.safetensors", "vocab.txt", "tokenizer_config.json"]
    for name in ("config.json", "vocab.txt"):
        (tmp_path / name).write_bytes((tiny_checkpoint / name).read_bytes())
    torch.save(load_file(tiny_checkpoint / "model.safetensors"), tmp_path / "pytorch_model.bin")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", FakeHub(tmp_path))
    assert find_checkpoint("someone/old-bert") == tmp_path
