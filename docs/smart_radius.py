"""The measurements of docs/SMART.md: how much the output of a trained run changes under SMART's perturbation.

    python docs/smart_radius.py runs/NAME [--rows 96]

For every task, radius and start: the mean divergence between the outputs on clean and on perturbed dev rows, in
training mode. Beside it: the gradient scaled to the same radius instead of clipped, and random signs.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))
from checkpoints import restore_best
from multitask_build import build_model, build_tokenizer, load_splits
from multitask_flags import of_run
from runs import Run
from smart import Smart, linf_norm, mean, smart_divergence
from tasks import Batch, Output, stack
from utils import run_script

RADII = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
BATCH = 16


class Scaled(Smart):
    """The gradient itself, scaled until its largest element has the radius."""

    def ascend(self, noise: Tensor, gradient: Tensor, mask: Tensor) -> Tensor:
        return self.radius * mask * gradient / linf_norm(gradient).clamp_min(torch.finfo(gradient.dtype).tiny)


class RandomSigns(Smart):
    def perturbation(self, model: torch.nn.Module, batch: Batch, output: Output) -> Tensor:
        mask = stack(batch.sentences).attention_mask[..., None]
        return self.radius * mask * torch.randn_like(output.embeddings).sign()


METHODS = {
    "clipped, from the logits": lambda radius: Smart(radius=radius),
    "clipped, from the embeddings": lambda radius: Smart(radius=radius, start="embeddings"),
    "clipped, 3 steps": lambda radius: Smart(radius=radius, steps=3),
    "scaled, from the logits": lambda radius: Scaled(radius=radius),
    "random signs": lambda radius: RandomSigns(radius=radius),
}


def figures(model: torch.nn.Module, batches: list[Batch], seed: int = 0) -> Iterator[tuple[str, list[float]]]:
    for name, build in METHODS.items():
        means = []
        for radius in RADII:
            torch.manual_seed(seed)
            term, found = build(radius), []
            for batch in batches:
                output = model.predict(batch)
                noise = term.perturbation(model, batch, output)
                with torch.no_grad():
                    other = model.predict(batch, output.embeddings + noise, output.random_state)
                found.append(mean(smart_divergence, batch, output.logits, other.logits).item())
            means.append(sum(found) / len(found))
        yield name, means


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--rows", type=int, default=96)
    given = parser.parse_args()
    args = of_run(given.run, [])
    model = build_model(args)
    restore_best(model, Run.reopen(given.run))
    model.train()
    splits = load_splits(args, build_tokenizer(args), ("dev",))
    print(f"| {'task, method':40} | " + " | ".join(f"{radius:.0e}" for radius in RADII) + " |")
    for name, of_task in splits.items():
        batches = [of_task["dev"].batch(rows) for rows in torch.arange(given.rows).split(BATCH)]
        for method, values in figures(model, batches):
            print(f"| {f'{name}, {method}':40} | " + " | ".join(f"{value:.1e}" for value in values) + " |", flush=True)


if __name__ == "__main__":
    run_script(main)
