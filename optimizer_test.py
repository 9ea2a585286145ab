"""The handout's check of AdamW: a small training run must end with the reference weights.

    python optimizer_test.py

The references come from a float64 NumPy version of the handout's pseudocode, see tests/make_references.py.
"""

import sys
from pathlib import Path

import numpy as np
import torch

from flags import ArgumentParser
from optimizer import AdamW
from utils import run_script

REFERENCE = Path(__file__).parent / "tests" / "references" / "optimizer_test.npz"
TOLERANCE = 3e-6  # for 200 updates in float32; the course allows a relative error of 1e-4


def train(inputs: np.ndarray, targets: np.ndarray, start: np.ndarray, **settings: float) -> np.ndarray:
    """Train a linear layer without bias on squared error, one update per row, like the course's own test."""
    weight = torch.nn.Parameter(torch.tensor(start, dtype=torch.float32))
    optimizer = AdamW([weight], **settings)
    for x, y in zip(torch.tensor(inputs).float(), torch.tensor(targets).float(), strict=True):
        optimizer.zero_grad()
        ((weight @ x - y) ** 2).sum().backward()
        optimizer.step()
    return weight.detach().numpy()


def main() -> int:
    saved = np.load(REFERENCE)
    cases = {
        "lr 1e-3, weight decay 1e-4, bias correction": {"lr": 1e-3, "weight_decay": 1e-4, "correct_bias": True},
        "without bias correction": {"lr": 1e-3, "weight_decay": 1e-4, "correct_bias": False},
        "without weight decay": {"lr": 1e-3, "weight_decay": 0.0, "correct_bias": True},
    }
    for number, (name, settings) in enumerate(cases.items()):
        weights = train(saved["inputs"], saved["targets"], saved["start"], **settings)
        distance = np.abs(weights - saved[f"weights_{number}"]).max()
        if not distance <= TOLERANCE:  # also catches NaN
            print(f"Optimizer test FAILED ({name}): off by {distance:.1e}, tolerance {TOLERANCE:.0e}", file=sys.stderr)
            return 1
    print("Optimizer test passed!")
    return 0


def script() -> None:
    ArgumentParser("optimizer_test.py", __doc__.splitlines()[0], "python optimizer_test.py", usage="").parse(None)
    sys.exit(main())


if __name__ == "__main__":
    run_script(script)
