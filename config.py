"""The architecture of a BERT checkpoint, read from its config.json. Training settings are elsewhere."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self


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

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            minimum = 0 if field.type is float or field.name == "pad_token_id" else 1
            if not isinstance(value, int | field.type) or value < minimum:
                raise ValueError(
                    f"{field.name} must be a number of at least {minimum}, found {value!r}. "
                    "Use the config.json that belongs to the checkpoint."
                )
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size must be a multiple of num_attention_heads; found {self.hidden_size} and "
                f"{self.num_attention_heads}. Use the config.json that belongs to the checkpoint."
            )

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read config.json; keys that do not affect the encoder are ignored."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{path}: must be a JSON file that describes a BERT; {error}. Use the checkpoint's own."
            ) from error
        if not isinstance(values, dict) or values.get("model_type", "bert") != "bert":
            kind = values.get("model_type") if isinstance(values, dict) else type(values).__name__
            raise ValueError(f"{path}: model_type must be 'bert', found {kind!r}. Choose a BERT checkpoint.")
        for key, supported in {"hidden_act": "gelu", "position_embedding_type": "absolute"}.items():
            if values.get(key, supported) != supported:
                raise ValueError(
                    f"{path}: {key} must be {supported!r}, found {values[key]!r}. Choose a plain BERT checkpoint."
                )
        missing = sorted({"vocab_size", "hidden_size", "num_hidden_layers"} - values.keys())
        if missing:
            raise ValueError(f"{path}: a BERT config must state {', '.join(missing)}. Use the checkpoint's own file.")
        return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})

    def to_dict(self) -> dict[str, Any]:
        """The contents of config.json, including the keys by which other libraries recognize a BERT."""
        kind = {"model_type": "bert", "architectures": ["BertModel"], "hidden_act": "gelu"}
        return kind | asdict(self)
