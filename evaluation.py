"""One way to predict, one to score, one to write prediction files."""

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from datasets import Split, sorted_rows
from tasks import Batch, Output, Predictions, Task
from utils import Precision, write_text


class Predictor(Protocol):
    """What the loop and the evaluation ask of a model; `vectors` are what its frozen part would give."""

    def vectors(self, batch: Batch) -> tuple[Tensor, ...]: ...
    def predict(self, batch: Batch) -> Output: ...
    def eval(self) -> "Predictor": ...


@torch.no_grad()
def _in_file_order(compute, split: Split, batch_size: int, precision: Precision, label: str) -> tuple[Tensor, ...]:
    """compute(batch) -> tensors (B, ...) for every row, gathered on the CPU in the order of the file."""
    batches = sorted_rows(split.lengths, batch_size)
    results = []
    for rows in tqdm(batches, desc=label, leave=False, disable=None):
        with precision.autocast():
            results.append(tuple(t.float().cpu() for t in compute(split.batch(rows).to(precision.device))))
    order = torch.tensor([row for rows in batches for row in rows]).argsort()
    return tuple(torch.cat(parts)[order] for parts in zip(*results, strict=True))


def predict(model: Predictor, split: Split, batch_size: int, precision: Precision) -> Predictions:
    model.eval()
    (logits,) = _in_file_order(lambda b: (model.predict(b).logits,), split, batch_size, precision, split.task.name)
    labels = None if split.labels is None else split.labels.numpy()
    return Predictions(split.ids, logits.numpy(), split.task.decode(logits).numpy(), labels)


def keep_vectors(model: Predictor, split: Split, batch_size: int, precision: Precision) -> Split:
    """Runs the frozen encoder once over a split, in eval mode, and keeps what it gives."""
    model.eval()
    label = f"encode {split.task.name}"
    return split.with_vectors(_in_file_order(model.vectors, split, batch_size, precision, label))


def score(task: Task, predictions: Predictions) -> float:
    return task.score(predictions.values, predictions.labels)


def write_predictions(path: Path, task: Task, predictions: Predictions) -> None:
    """Byte for byte the starter's format: a header, then `id , value ` lines."""
    rows = (f"{i} , {v} \n" for i, v in zip(predictions.ids, predictions.values, strict=True))
    write_text(path, task.csv_header + "".join(rows))
