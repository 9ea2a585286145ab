"""The architecture of a BERT checkpoint, read from its config.json. Training settings are elsewhere."""

import json
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch.nn.functional as F

# The activation between the two feed-forward layers, by its name in config.json.
ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
# Keys that would change the encoder, with the only value that is supported.
FIXED = {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}


@dataclass(frozen=True)
class BertConfig:
    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    pad_token_id: int = 0
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    layer_norm_eps: float = 1e-12
    initializer_range: float = 0.02
    hidden_act: str = "gelu"

    def __post_init__(self) -> None:
        if self.hidden_act not in tuple(ACTIVATIONS):
            raise ValueError(
                f"hidden_act must be one of {', '.join(ACTIVATIONS)}, found {self.hidden_act!r}. "
                "Choose a checkpoint with one of these activations."
            )
        for field in (field for field in fields(self) if field.type is not str):
            value = getattr(self, field.name)
            least = 0 if field.type is float or field.name == "pad_token_id" else 1
            # dropout of 1 leaves nothing; the other two floats are small numbers, and NaN is not in any range
            most = 2**31 if field.type is int else 1
            is_number = isinstance(value, int | field.type) and not isinstance(value, bool)
            if not is_number or not least <= value <= most or (value == 1 and field.name.endswith("dropout_prob")):
                limit = f" and at most {most}" if field.type is int else " and below 1"
                raise ValueError(
                    f"{field.name} must be a {'whole ' * (field.type is int)}number of at least {least}{limit}, found "
                    f"{value!r:.80}. Use the config.json that belongs to the checkpoint."
                )
        if self.pad_token_id >= self.vocab_size:
            raise ValueError(
                f"pad_token_id must be below vocab_size, found {self.pad_token_id} and {self.vocab_size}. Use the "
                "config.json that belongs to the checkpoint."
            )
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size must be a multiple of num_attention_heads; found {self.hidden_size} and "
                f"{self.num_attention_heads}. Use the config.json that belongs to the checkpoint."
            )

    @classmethod
    def from_values(cls, values: dict[str, Any], path: Path) -> Self:
        """The architecture from the contents of config.json; keys that do not affect the encoder are ignored.

        path: the file, for messages. base_bert.read_config reads it.
        """
        if values.get("model_type", "bert") != "bert":
            kind = values.get("model_type")
            raise ValueError(f"{path}: model_type must be 'bert', found {kind!r:.80}. Choose a BERT checkpoint.")
        for key, supported in FIXED.items():
            if values.get(key, supported) != supported:
                raise ValueError(
                    f"{path}: {key} must be {json.dumps(supported)}, found {json.dumps(values[key]):.80}. "
                    "Choose the checkpoint of a plain BERT encoder."
                )
        missing = sorted({"vocab_size", "hidden_size", "num_hidden_layers"} - values.keys())
        if missing:
            raise ValueError(f"{path}: a BERT config must state {', '.join(missing)}. Use the checkpoint's own file.")
        try:
            return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """The contents of config.json, including the keys by which other libraries recognize a BERT."""
        kind = {"model_type": "bert", "architectures": ["BertModel"]}
        return kind | asdict(self)
