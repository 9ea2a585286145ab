"""The handout's check of AdamW: a small training run must end on reference weights.

    python3 optimizer_test.py

The references come from a float64 NumPy version of the handout's pseudo-code: tests/make_references.py.
"""

import sys
from pathlib import Path

import numpy as np
import torch

from optimizer import AdamW

REFERENCE = Path(__file__).parent / "tests" / "references" / "optimizer_test.npz"
TOLERANCE = 3e-6  # float32 over 200 updates; the course allows 1e-4 of the value


def train(inputs: np.ndarray, targets: np.ndarray, start: np.ndarray, **settings: float) -> np.ndarray:
    """A linear layer without bias on squared error, one update a row, as the course's own test trains it."""
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
        found = train(saved["inputs"], saved["targets"], saved["start"], **settings)
        distance = np.abs(found - saved[f"weights_{number}"]).max()
        if not distance <= TOLERANCE:
            print(f"Optimizer test FAILED ({name}): off by {distance:.1e}, tolerance {TOLERANCE:.0e}", file=sys.stderr)
            return 1
    print("Optimizer test passed!")
    return 0


if __name__ == "__main__":
    sys.exit(main())
