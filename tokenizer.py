"""WordPiece tokenization on the Rust library `tokenizers`, with the vocabulary of the checkpoint."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import tokenizers
import torch
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from base_bert import find_checkpoint
from config import BertConfig
from utils import InputError, write_text

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def read_vocabulary(folder: Path) -> list[str]:
    """Every word piece in the order of its id, from vocab.txt or tokenizer.json."""
    lines, whole = folder / "vocab.txt", folder / "tokenizer.json"
    if lines.is_file():
        return lines.read_text(encoding="utf-8").rstrip("\n").split("\n")
    if whole.is_file():
        pieces = _read_json(whole)["model"]["vocab"]
        return sorted(pieces, key=pieces.get)
    raise InputError("has neither vocab.txt nor tokenizer.json. Copy them from the checkpoint.")


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


class BertTokenizer:
    """Text -> `[CLS] a [SEP]` or `[CLS] a [SEP] b [SEP]`, at most max_length tokens; the longer side is cut first."""

    def __init__(self, vocabulary: list[str], *, lowercase: bool = True, max_length: int = 512):
        self.vocabulary, self.lowercase, self.max_length = vocabulary, lowercase, max_length
        ids = {piece: i for i, piece in enumerate(vocabulary)}
        missing = [token for token in SPECIAL_TOKENS if token not in ids]
        if missing:
            raise InputError(f"the vocabulary must have {', '.join(SPECIAL_TOKENS)}; {', '.join(missing)} not found.")
        self.pad_token_id, self.unk_token_id, self.cls_token_id, self.sep_token_id, self.mask_token_id = (
            ids[token] for token in SPECIAL_TOKENS
        )
        model = WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=100)
        self.rust = tokenizers.Tokenizer(model)
        self.rust.add_special_tokens(list(SPECIAL_TOKENS))
        self.rust.normalizer = BertNormalizer(lowercase=lowercase)
        self.rust.pre_tokenizer = BertPreTokenizer()
        self.rust.post_processor = TemplateProcessing(
            single="[CLS]:0 $A:0 [SEP]:0",
            pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
            special_tokens=[("[CLS]", self.cls_token_id), ("[SEP]", self.sep_token_id)],
        )
        self.rust.enable_truncation(max_length, strategy="longest_first")

    @classmethod
    def from_pretrained(cls, name: str, *, max_length: int = 512) -> Self:
        """The tokenizer of a checkpoint; max_length is lowered to the number of positions that its BERT has."""
        folder = find_checkpoint(name)
        try:
            settings, config = folder / "tokenizer_config.json", folder / "config.json"
            lowercase = _read_json(settings).get("do_lower_case", True) if settings.is_file() else True
            shape = BertConfig.from_file(config) if config.is_file() else BertConfig()
            vocabulary = read_vocabulary(folder)
            if len(vocabulary) > shape.vocab_size:
                raise ValueError(f"{len(vocabulary)} word pieces do not fit a vocab_size of {shape.vocab_size}")
            return cls(vocabulary, lowercase=lowercase, max_length=min(max_length, shape.max_position_embeddings))
        except InputError as error:
            raise InputError(f"{folder}: {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{folder}: its tokenizer files are damaged ({error}). Copy them again.") from error

    def encode(self, sentences: list[str], pairs: list[str] | None = None) -> list[tokenizers.Encoding]:
        """One unpadded Encoding per sentence or pair: `.ids`, `.type_ids`, and `.overflowing` if it was truncated."""
        return self.rust.encode_batch(sentences if pairs is None else list(zip(sentences, pairs, strict=True)))

    # Two hooks for a tokenizer that also tags parts of speech (pos.TaggingTokenizer); a plain one does nothing.

    def prepare(self, columns: Iterable[list[str]]) -> None:
        """Called with all texts of a data set before they are encoded."""

    def tags(self, encoded: list[tokenizers.Encoding], sentences: list[str], pairs: list[str] | None) -> Tensor | None:
        """A tag for every token of the encodings, concatenated; None if there are none."""
        return None

    def __call__(
        self,
        sentences: list[str],
        pairs: list[str] | None = None,
        *,
        return_tensors: str = "pt",
        padding: bool = True,
        truncation: bool = True,
    ) -> dict[str, Tensor]:
        """Padded tensors (B, T): input_ids, token_type_ids, attention_mask. The keywords are the starter's."""
        if (return_tensors, padding, truncation) != ("pt", True, True):
            raise ValueError(
                "needs return_tensors='pt', padding=True, truncation=True. Use encode() for unpadded lists."
            )
        encoded = self.encode(sentences, pairs)
        pad = torch.nn.utils.rnn.pad_sequence

        def padded(rows: list[list[int]], value: int) -> Tensor:
            return pad([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)

        return {
            "input_ids": padded([e.ids for e in encoded], self.pad_token_id),
            "token_type_ids": padded([e.type_ids for e in encoded], 0),
            "attention_mask": padded([e.attention_mask for e in encoded], 0),
        }

    def save_pretrained(self, folder: Path) -> None:
        """Writes vocab.txt and tokenizer_config.json, from which this class and `transformers` load."""
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "vocab.txt", "\n".join(self.vocabulary) + "\n")
        settings = {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": self.lowercase,
            "model_max_length": self.max_length,
        }
        write_text(folder / "tokenizer_config.json", json.dumps(settings, indent=2) + "\n")
