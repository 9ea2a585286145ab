"""A trained run, opened to predict: the model with the best epoch's weights, its tokenizer and its tasks.

Nothing is written into the run's directory, and no lock is taken. The directory alone is enough: the checkpoint that
the run started from and the data files are not read. A run of Part 1 becomes the same kind of model as one of Part 2.
"""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

import multitask_flags
import pos
from base_bert import check_sizes, encoder_weights, load_checkpoint_state, read_config
from bert import BertModel
from checkpoints import WEIGHTS, best_tensors
from datasets import Split
from evaluation import logits_and_vectors
from flags import check_stored
from model import Branch, MultitaskBERT
from multitask_build import build_model
from readers import Examples
from runs import Run
from tasks import TASKS, Task
from tokenizer import BertTokenizer
from utils import InputError, Precision, warn

# What Part 1 and Part 2 have in common: the flags of a run of Part 1 that its model depends on.
PART_1_FLAGS = ("model", "attention", "hidden_dropout_prob", "max_length")


class Answers(NamedTuple):
    """A model's output for some rows of a task."""

    logits: Tensor  # (rows, C)
    vectors: tuple[Tensor, ...]  # one (rows, H) for each sentence that is encoded
    truncated: int  # rows that were longer than the maximum


class TrainedRun(NamedTuple):
    folder: Path
    facts: dict[str, Any]  # of args.json
    args: argparse.Namespace  # the flags of Part 2 that build the same model
    model: MultitaskBERT
    tokenizer: BertTokenizer
    precision: Precision

    @property
    def branches(self) -> dict[str, Branch]:
        return self.model.branches

    @property
    def tasks(self) -> dict[str, Task]:
        return {name: branch.task for name, branch in self.branches.items()}

    def split(self, name: str, texts: tuple[list[str], ...]) -> Split:
        """Sentences, or pairs, tokenized as in the evaluation of the run. texts: a list per text column."""
        branch = self.branches[name]
        columns = tuple([text.strip() for text in column] for column in texts)
        ids = [str(row) for row in range(len(columns[0]))]
        return Split.tokenize(Examples(branch.task, ids, columns), self.tokenizer, branch.pairing_for("dev"))

    def answers(self, name: str, texts: tuple[list[str], ...], batch_size: int) -> Answers:
        split = self.split(name, texts)
        found = logits_and_vectors(self.model, split, batch_size, self.precision)
        return Answers(*found, split.truncated)


def open_trained(folder: Path, precision: Precision, max_length: int | None = None) -> TrainedRun:
    """Open a run of multitask_classifier.py or classifier.py, or a soup. max_length: instead of the run's own."""
    check_kind(folder)
    run = Run.reopen(folder)
    args = flags_of(run)
    if not run.finished:
        warn(f"{folder}: its training has not finished; these are the best weights so far.")
    if max_length is not None:
        args.max_length = max_length
    config, tensors = read_config(folder), best_tensors(run)
    check_sizes(config, encoder_weights(tensors)[0], folder)
    network = build_model(args, BertModel(config))
    if is_part_1(run.facts):
        tensors = {name.replace("linear.", f"heads.{args.tasks[0]}.linear.", 1) if name.startswith("linear.") else name:
                   tensor for name, tensor in tensors.items()}  # fmt: skip
    load_checkpoint_state(network, tensors, folder / WEIGHTS)
    network = network.to(precision.device).eval().requires_grad_(False)
    return TrainedRun(folder, run.facts, args, network, tokenizer_of(folder, args), precision)


def tokenizer_of(folder: Path, args: argparse.Namespace) -> BertTokenizer:
    """The run's own tokenizer; runs of Part 1 that are older have none, so theirs is the checkpoint's."""
    source = folder if (folder / "vocab.txt").is_file() else args.model
    plain = BertTokenizer.from_pretrained(source, max_length=args.max_length)
    return pos.build_tokenizer(args, plain, cached=False)


def check_kind(folder: Path) -> None:
    """Refuse a directory that is not a trained run, and say what it is and what to do instead."""
    if folder.is_file():
        raise InputError(f"--run {folder}: must be the directory of a run, found a file. Give its directory.")
    inside = sorted(path.parent for path in folder.glob("*/args.json")) if folder.is_dir() else []
    if inside and not (folder / "args.json").is_file():
        raise InputError(
            f"--run {folder}: must be the directory of one run, found {len(inside)} inside. Use {inside[0]}."
        )
    stored = Run.reopen(folder).facts["args"]
    if "objective" in stored:
        raise InputError(
            f"--run {folder}: is a run of pretrain.py, an encoder without a task. Fine-tune it first: "
            f"multitask_classifier.py --model {folder}"
        )
    has_weights = (folder / WEIGHTS).is_file()
    if (folder / "ensemble.json").is_file() and not has_weights:
        raise InputError(
            f"--run {folder}: is an ensemble of logits, which has no weights. Use one of its runs, or make one model "
            "of them: ensemble.py --method soup."
        )
    if not has_weights:
        raise InputError(
            f"--run {folder}: has no {WEIGHTS} yet, since no epoch was finished. Continue its training with --resume."
        )


def is_part_1(facts: dict[str, Any]) -> bool:
    return "train_tasks" not in facts["args"] and isinstance(facts["args"].get("tasks"), list)


def flags_of(run: Run) -> argparse.Namespace:
    """The flags of Part 2 that build the run's model."""
    if not is_part_1(run.facts):
        return multitask_flags.of_run(run.folder, [])
    stored, source = run.facts["args"], run.folder / "args.json"
    known = check_stored(multitask_flags.parser(), {k: stored[k] for k in PART_1_FLAGS if k in stored}, source)
    return multitask_flags.with_defaults(argparse.Namespace(**known, tasks=[task_of_part_1(run)]))


def task_of_part_1(run: Run) -> str:
    """The task of a run of Part 1, by the name of its dev file: its flags list all tasks of the command."""
    files = {Path(path).name for path in run.facts["data_sha256"]}
    names = [name for name, task in TASKS.items() if task.filename("dev") in files]
    if len(names) != 1:
        raise InputError(
            f"{run.folder / 'args.json'}: data_sha256 must name the dev file of one task, found {len(names)}. "
            "Restore the file, or train the run again."
        )
    return names[0]
