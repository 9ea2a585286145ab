"""What both scripts of the starter share: its random seeds and its checkpoint files (.pt)."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import utils
from base_bert import first_line
from utils import InputError, atomic_path


def seed_everything(seed: int = 11711) -> None:
    """Seed Python's and NumPy's generators as well, which the suite itself does not use."""
    random.seed(seed)
    np.random.seed(seed)
    utils.seed_everything(seed)


def save_model(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, args: Any, config: Any, filepath: str | Path
) -> None:
    """Write the starter's checkpoint file: the state of model and optimizer, the flags, and all random states."""
    saved = {
        "model": model.state_dict(),
        "optim": None if optimizer is None else optimizer.state_dict(),
        "args": args,
        "model_config": config,
        "system_rng": random.getstate(),
        "numpy_rng": np.random.get_state(),
        "torch_rng": torch.random.get_rng_state(),
    }
    with atomic_path(Path(filepath)) as path:
        torch.save(saved, path)
    print(f"save the model to {filepath}")


def load_model(filepath: str | Path) -> dict[str, Any]:
    """Read a checkpoint file of save_model, without running code that it may contain."""
    try:
        saved = torch.load(filepath, map_location="cpu", weights_only=True)
        if not isinstance(saved, dict) or not {"model", "model_config"} <= saved.keys():
            raise TypeError("it has no model and model_config")
        return saved
    except Exception as error:  # the unpickler raises its own type, private to pickle, for anything it does not know
        raise InputError(
            f"{filepath}: must be a file of the starter's save_model ({first_line(error)}). If you trust the file, "
            "read it with torch.load(FILE, weights_only=False) and write it again with save_model."
        ) from error


def restore_model(model: nn.Module, saved: dict[str, Any], filepath: str | Path) -> nn.Module:
    """Copy the weights of a file of save_model into a model that was built with its model_config."""
    try:
        model.load_state_dict(saved["model"])
    except RuntimeError as error:  # one line per tensor that does not fit
        names = " ".join(str(error).split())[:200]
        raise InputError(
            f"{filepath}: its weights do not fit this model ({names}). Load it with the class that it was saved from."
        ) from error
    print(f"load model from {filepath}")
    return model
