"""The two checkpoints of a run: the best epoch's weights, and the state from which training continues.

Both files carry a checksum of their contents, which is verified on reading, and both are replaced atomically: a killed
process leaves the old file or the new one, never a part of one. Neither is read by running pickled code.
"""

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from base_bert import checkpoint_state, load_checkpoint_state, read_safetensors
from runs import Run
from utils import InputError, atomic_path, digest, remove, warn, write_text

WEIGHTS, STATE, HELD = "model.safetensors", "state.pt", ".previous.safetensors"


# transformers and sentence-transformers know nothing of this suite's heads: asked for a classifier or a cross-encoder,
# they would put one with random weights on the encoder. This dropout, which a plain encoder does not read, makes them
# stop with an error instead. export.py writes the heads in their formats. A further pre-trained checkpoint has no such
# heads and is meant to get new ones: `is_checkpoint` of its model says so.
NO_FOREIGN_HEAD = {"classifier_dropout": -1.0}


def save_best(model: nn.Module, run: Run) -> None:
    """Write model.safetensors and config.json: transformers loads the encoder from them, this suite the whole model."""
    tensors = checkpoint_state(model)
    with atomic_path(run.folder / WEIGHTS, size_of(tensors)) as path:
        save_file(tensors, path, metadata={"format": "pt", "sha256": digest(dict(sorted(tensors.items())))})
        sort_metadata(path)
    guard = {} if getattr(model, "is_checkpoint", False) else NO_FOREIGN_HEAD
    write_text(run.folder / "config.json", json.dumps(model.bert.config.to_dict() | guard, indent=2) + "\n")


def sort_metadata(path: Path) -> None:
    """Write the metadata of a safetensors file in order, so that the same weights always give the same bytes.

    The library writes it in random order. The header is its length in 8 bytes, and JSON that may end in spaces.
    """
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        ordered = {"__metadata__": dict(sorted(header.pop("__metadata__").items()))} | header
        text = json.dumps(ordered, separators=(",", ":")).encode().ljust(length)
        assert len(text) == length, "the same header in another order"
        file.seek(8)
        file.write(text)


def restore_best(model: nn.Module, run: Run) -> None:
    load_checkpoint_state(model, best_tensors(run), run.folder / WEIGHTS)


def best_tensors(run: Run) -> dict[str, Tensor]:
    """The tensors of model.safetensors, as save_best named them."""
    path = run.folder / WEIGHTS
    try:
        tensors, has_checksum = read_safetensors(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{path}: not a complete weights file ({error}). Train the run again.") from error
    if not has_checksum:
        warn(f"{path} has no checksum, since an older version wrote it: damage to it would go unnoticed.")
    return tensors


def save_state(state: dict[str, Any], run: Run) -> None:
    """Write state.pt: tensors and plain values only."""
    with atomic_path(run.folder / STATE, size_of(state)) as path:
        torch.save({"content": state, "sha256": digest(state)}, path)


def load_state(run: Run) -> dict[str, Any] | None:
    """What save_state wrote, on the CPU; None if there is no state yet."""
    path = run.folder / STATE
    if not path.exists():
        return None
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        if "content" not in saved:
            warn(f"{path} has no checksum, since an older version wrote it: damage to it would go unnoticed.")
            return saved
        if digest(saved["content"]) != saved["sha256"]:
            raise ValueError("its contents do not match its checksum")
        return saved["content"]
    except (
        *(RuntimeError, LookupError, ValueError, TypeError, AttributeError, EOFError, OSError),
        pickle.UnpicklingError,
    ) as error:
        raise InputError(unusable(path, error)) from error


def unusable(path: Path, error: Exception) -> str:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    if isinstance(error, pickle.UnpicklingError):  # its message advises to run the file's code
        reason = "it is damaged, or has more than tensors and plain values"
    return f"--resume: {path} cannot be used ({reason}). Remove the file to start over, or use another --name."


def drop_state(run: Run) -> None:
    remove(run.folder / STATE)


def checkpoint_bytes(run: Run) -> int:
    """The size of the checkpoints that are there."""
    return sum(path.stat().st_size for path in (run.folder / WEIGHTS, run.folder / STATE) if path.is_file())


# The weights of a new best epoch are written before the state that knows of them. Until it is there, the previous ones
# are held under another name, and a run that was killed in between takes them back.


def hold_best(run: Run) -> None:
    path, held = run.folder / WEIGHTS, run.folder / HELD
    remove(held)
    if path.is_file():
        try:
            os.link(path, held)
        except OSError:  # a file system without hard links
            with atomic_path(held, path.stat().st_size) as copy:
                shutil.copyfile(path, copy)


def drop_held(run: Run) -> None:
    remove(run.folder / HELD)


def take_back_best(run: Run) -> None:
    held = run.folder / HELD
    if held.is_file() and not held.is_symlink():
        held.replace(run.folder / WEIGHTS)


def size_of(value: Any) -> int:
    """The bytes of all tensors in nested dicts and lists."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, dict):
        value = value.values()
    return sum(map(size_of, value)) if not isinstance(value, str | int | float | None) else 0
