"""The shape of a BERT checkpoint, as its config.json states it. Nothing about training lives here."""

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
            value, least = getattr(self, field.name), 0 if field.type is float or field.name == "pad_token_id" else 1
            if not isinstance(value, int | field.type) or value < least:
                raise ValueError(
                    f"{field.name} must be a number of at least {least}, found {value!r}. "
                    "Take the config.json that belongs to the checkpoint."
                )
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size must be a multiple of num_attention_heads; found {self.hidden_size} and "
                f"{self.num_attention_heads}. Take the config.json that belongs to the checkpoint."
            )

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Reads config.json; keys that do not change the encoder are passed over."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{path}: must be a JSON file that describes a BERT; {error}. Take the checkpoint's own."
            ) from error
        if not isinstance(found, dict) or found.get("model_type", "bert") != "bert":
            kind = found.get("model_type") if isinstance(found, dict) else type(found).__name__
            raise ValueError(f"{path}: model_type must be 'bert', found {kind!r}. Choose a BERT checkpoint.")
        for key, only in {"hidden_act": "gelu", "position_embedding_type": "absolute"}.items():
            if found.get(key, only) != only:
                raise ValueError(
                    f"{path}: {key} must be {only!r}, found {found[key]!r}. Choose a plain BERT checkpoint."
                )
        missing = sorted({"vocab_size", "hidden_size", "num_hidden_layers"} - found.keys())
        if missing:
            raise ValueError(f"{path}: a BERT config must state {', '.join(missing)}. Take the checkpoint's own file.")
        return cls(**{f.name: found[f.name] for f in fields(cls) if f.name in found})

    def to_dict(self) -> dict[str, Any]:
        """What config.json holds, with the keys by which the usual tools recognize a BERT."""
        kind = {"model_type": "bert", "architectures": ["BertModel"], "hidden_act": "gelu"}
        return kind | asdict(self)
