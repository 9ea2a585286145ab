"""WordPiece tokenization on the Rust library `tokenizers`, with the vocabulary of the checkpoint."""

import json
import math
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import tokenizers
import torch
from tokenizers import decoders
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from base_bert import find_checkpoint, read_config
from config import BertConfig
from utils import InputError, read_json, write_text

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def read_vocabulary(folder: Path) -> list[str]:
    """Every word piece in the order of its id, from vocab.txt or tokenizer.json."""
    lines, whole = folder / "vocab.txt", folder / "tokenizer.json"
    if lines.is_file():
        return lines.read_text(encoding="utf-8").rstrip("\n").split("\n")
    if whole.is_file():
        model = _read_json(whole).get("model")
        pieces = model.get("vocab") if isinstance(model, dict) else None
        if not isinstance(pieces, dict) or not all(type(number) is int for number in pieces.values()):
            raise ValueError("tokenizer.json has no model.vocab from word pieces to ids")
        if sorted(pieces.values()) != list(range(len(pieces))):
            raise ValueError("the ids in tokenizer.json are not 0, 1, 2, ...")
        return sorted(pieces, key=pieces.get)
    raise InputError("has neither vocab.txt nor tokenizer.json. Copy them from the checkpoint.")


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path, "JSON that describes a tokenizer", "Copy it again.")


def _settings(path: Path) -> tuple[bool, float]:
    """Whether to lowercase and the largest number of tokens, from tokenizer_config.json, or the defaults."""
    settings = _read_json(path) if path.is_file() else {}
    lowercase, most = settings.get("do_lower_case", True), settings.get("model_max_length") or math.inf
    if not isinstance(lowercase, bool):
        raise ValueError(f"do_lower_case must be true or false, found {lowercase!r:.80}")
    if not isinstance(most, int | float) or isinstance(most, bool):
        raise ValueError(f"model_max_length must be a number, found {most!r:.80}")
    return lowercase, most


class BatchEncoding(dict):
    """input_ids, token_type_ids, attention_mask: as keys and, as in the starter's tokenizer, as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(f"an encoding has {', '.join(self)}, not {name}") from error

    def to(self, device: torch.device | str) -> "BatchEncoding":
        return BatchEncoding({name: tensor.to(device) for name, tensor in self.items()})


class BertTokenizer:
    """Text -> `[CLS] a [SEP]` or `[CLS] a [SEP] b [SEP]`, at most max_length tokens; the longer side is cut first."""

    reads_parts: ClassVar[bool] = True  # whether a data set may be encoded a part at a time

    def __init__(
        self,
        vocabulary: list[str],
        *,
        lowercase: bool = True,
        max_length: int = 512,
        model_max_length: int | None = None,
    ):
        """model_max_length: the most that the checkpoint supports, if that is more than max_length."""
        self.vocabulary, self.lowercase, self.max_length = vocabulary, lowercase, max_length
        self.model_max_length = max_length if model_max_length is None else model_max_length
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
        self.rust.decoder = decoders.WordPiece(prefix="##")
        self.rust.enable_truncation(max_length, strategy="longest_first")

    @classmethod
    def from_pretrained(
        cls, name: str | Path, *, max_length: int | None = None, local_files_only: bool = False
    ) -> Self:
        """The tokenizer of a checkpoint.

        max_length: the default, and the most, is what the checkpoint supports: the number of positions of its BERT or
        the model_max_length of its tokenizer_config.json, whichever is smaller.
        """
        folder = find_checkpoint(name, local_files_only=local_files_only)
        shape = read_config(folder) if (folder / "config.json").is_file() else BertConfig()
        try:
            lowercase, longest = _settings(folder / "tokenizer_config.json")
            vocabulary = read_vocabulary(folder)
            if len(vocabulary) > shape.vocab_size:
                raise InputError(
                    f"its {len(vocabulary)} word pieces must fit a vocab_size of {shape.vocab_size}. Use the "
                    "vocabulary and the config.json of one checkpoint."
                )
            most = int(min(shape.max_position_embeddings, longest))
            if most < 4:
                raise ValueError(f"model_max_length must be at least 4, found {most}")
            return cls(
                vocabulary,
                lowercase=lowercase,
                max_length=min(max_length or most, most),
                model_max_length=most,
            )
        except InputError as error:
            raise InputError(f"{folder}: {error}") from error
        except (ValueError, OSError) as error:
            raise InputError(f"{folder}: its tokenizer files are damaged ({error}). Copy them again.") from error

    def count_tokens(self, sentences: list[str]) -> list[int]:
        """The number of tokens of each sentence with [CLS] and [SEP], were it not truncated."""
        self.rust.no_truncation()
        try:
            return [len(encoded) for encoded in self.rust.encode_batch_fast(sentences)]
        finally:
            self.rust.enable_truncation(self.max_length, strategy="longest_first")

    def encode_all(self, sentences: list[str], pairs: list[str] | None = None) -> list[tokenizers.Encoding]:
        """One unpadded Encoding per sentence or pair: `.ids`, `.type_ids`, and `.overflowing` if it was truncated."""
        return self.rust.encode_batch(sentences if pairs is None else list(zip(sentences, pairs, strict=True)))

    # Two hooks for a tokenizer that also tags parts of speech (pos.TaggingTokenizer); a plain one does nothing.

    def prepare(self, columns: Iterable[list[str]]) -> None:
        """Called with all texts of a data set before they are encoded, or with a part of them; see reads_parts."""

    def tags(self, encoded: list[tokenizers.Encoding], sentences: list[str], pairs: list[str] | None) -> Tensor | None:
        """A tag for every token of the encodings, concatenated; None if there are none."""
        return None

    def save_pretrained(self, folder: Path) -> None:
        """Writes vocab.txt and tokenizer_config.json, from which this class and `transformers` load."""
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "vocab.txt", "\n".join(self.vocabulary) + "\n")
        settings = {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": self.lowercase,
            "model_max_length": self.model_max_length,
        }
        write_text(folder / "tokenizer_config.json", json.dumps(settings, indent=2) + "\n")

    # The starter's methods, which are those of transformers.BertTokenizer; the suite itself calls encode_all.

    pad_token, unk_token, cls_token, sep_token, mask_token = SPECIAL_TOKENS
    all_special_tokens: ClassVar = list(SPECIAL_TOKENS)

    def __call__(
        self,
        text: str | list[str],
        text_pair: str | list[str] | None = None,
        add_special_tokens: bool = True,
        padding: bool | str = False,
        truncation: bool | str | None = None,
        max_length: int | None = None,
        *,
        return_tensors: str | None = None,
        return_token_type_ids: bool = True,
        return_attention_mask: bool = True,
    ) -> BatchEncoding:
        """Lists of ids or, with return_tensors="pt", tensors (B, T), of one text or several.

        padding: True or "longest", "max_length", or False. truncation: True or "longest_first", "only_first",
        "only_second", or False; a max_length without padding implies True, as in transformers.
        """
        if return_tensors not in (None, "pt"):
            raise ValueError(f'return_tensors must be "pt" or None, found {return_tensors!r}')
        single = isinstance(text, str)
        texts = [text] if single else list(text)
        pairs = [text_pair] if isinstance(text_pair, str) else text_pair
        if truncation is None:
            truncation = max_length is not None and padding is False
        rust = self._set_up(max_length or self.max_length, padding, truncation)
        inputs = texts if pairs is None else list(zip(texts, pairs, strict=True))
        encoded = rust.encode_batch(inputs, add_special_tokens=add_special_tokens)
        columns = {"input_ids": [e.ids for e in encoded]}
        if return_token_type_ids:
            columns["token_type_ids"] = [e.type_ids for e in encoded]
        if return_attention_mask:
            columns["attention_mask"] = [e.attention_mask for e in encoded]
        if return_tensors is None:
            return BatchEncoding({name: rows[0] if single else rows for name, rows in columns.items()})
        if len({len(row) for row in columns["input_ids"]}) > 1:
            raise ValueError('return_tensors="pt" needs texts of one length. Add padding=True.')
        return BatchEncoding({name: torch.tensor(rows) for name, rows in columns.items()})

    @cached_property
    def _own_settings(self) -> tokenizers.Tokenizer:
        """A copy for the starter's methods, whose calls set its padding and truncation."""
        return tokenizers.Tokenizer.from_str(self.rust.to_str())

    def _set_up(self, most: int, padding: bool | str, truncation: bool | str) -> tokenizers.Tokenizer:
        rust = self._own_settings
        if truncation in (False, "do_not_truncate"):
            rust.no_truncation()
        else:
            rust.enable_truncation(most, strategy="longest_first" if truncation is True else truncation)
        if padding in (False, "do_not_pad"):
            rust.no_padding()
        elif padding in (True, "longest", "max_length"):
            length = most if padding == "max_length" else None
            rust.enable_padding(pad_id=self.pad_token_id, pad_token=self.pad_token, length=length)
        else:
            raise ValueError(f'padding must be True, False, "longest" or "max_length", found {padding!r}')
        return rust

    def encode(self, text: str, text_pair: str | None = None, **settings: Any) -> list[int] | Tensor:
        """The ids of ONE text or pair; for many texts, call the tokenizer itself or encode_all."""
        if not isinstance(text, str):
            raise ValueError(f"encode takes one text, found a {type(text).__name__}. Use tokenizer(texts) for several.")
        return self(text, text_pair, **settings)["input_ids"]

    def encode_plus(self, text: str, text_pair: str | None = None, **settings: Any) -> BatchEncoding:
        return self(text, text_pair, **settings)

    def batch_encode_plus(self, batch: list[str] | list[tuple[str, str]], **settings: Any) -> BatchEncoding:
        """Texts, or pairs of texts as tuples."""
        if batch and not isinstance(batch[0], str):
            return self(*map(list, zip(*batch, strict=True)), **settings)
        return self(batch, **settings)

    def tokenize(self, text: str) -> list[str]:
        """The word pieces, without [CLS] and [SEP]."""
        return self._set_up(self.model_max_length, False, False).encode(text, add_special_tokens=False).tokens

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else _as_list(token_ids)
        return self.rust.decode(ids, skip_special_tokens=skip_special_tokens)

    def batch_decode(self, sequences: Any, skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> str | list[str]:
        if isinstance(ids, int):
            return self.vocabulary[ids]
        skipped = set(self.all_special_ids) if skip_special_tokens else set()
        return [self.vocabulary[i] for i in _as_list(ids) if i not in skipped]

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | list[int]:
        if isinstance(tokens, str):
            found = self.rust.token_to_id(tokens)
            return self.unk_token_id if found is None else found
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return self.rust.decoder.decode(tokens)

    def get_vocab(self) -> dict[str, int]:
        return {piece: i for i, piece in enumerate(self.vocabulary)}

    @property
    def vocab(self) -> dict[str, int]:
        return self.get_vocab()

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary)

    def __len__(self) -> int:
        return len(self.vocabulary)

    @property
    def all_special_ids(self) -> list[int]:
        return self.convert_tokens_to_ids(self.all_special_tokens)


def _as_list(ids: Any) -> list[int]:
    """The ids of a list, tensor or array."""
    return ids.tolist() if hasattr(ids, "tolist") else list(ids)
