"""From the flags of Part 2 to the model, the trainer and the data. Code below these builders does not read flags."""

import argparse
import bisect
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import adapters
import losses
import optimizer
import pcgrad
import pos
import shared_flags
import smart
from bert import BertModel
from datasets import Split, check_rows_meet, count_batches, read_split
from evaluation import read_logits
from losses import losses_of
from model import MultitaskBERT
from multitask_flags import branches, data_paths, logits_remedy
from tasks import TASKS, BatchSize
from tokenizer import BertTokenizer
from trainer import Trainer
from utils import InputError, Precision, SideStream
from watch import Watch

# --- model and trainer ------------------------------------------------------------------------------------------------


def model_values(args: argparse.Namespace, bert: BertModel | None = None) -> dict[str, Any]:
    """The arguments of MultitaskBERT. bert: the encoder; by default that of --model."""
    local = getattr(args, "local_files_only", False)  # the starter's
    bert = bert or BertModel.from_pretrained(args.model, keep_layers=args.keep_layers, local_files_only=local)
    bert.use_attention(args.attention)
    bert.checkpoint_activations = args.checkpoint_activations
    return {
        "bert": bert,
        "branches": list(branches(args).values()),
        "frozen": args.option == "pretrain",
        "train_encoder": not args.adapter_only,
        "share_pair_layer": args.share_pair_layer,
        "max_length": args.max_length,
        "chunk_rows": args.chunk_rows,
        "weighting": losses.build_weighting(args, [TASKS[name] for name in args.tasks]),
        "feature": partial(pos.build_feature, args),
        "adapter": partial(adapters.build_adapter, args),
    }


def build_model(args: argparse.Namespace, bert: BertModel | None = None) -> MultitaskBERT:
    return MultitaskBERT(**model_values(args, bert))


def build_trainer(args: argparse.Namespace, model: MultitaskBERT, precision: Precision, total_steps: int) -> Trainer:
    update = optimizer.build_optimizer(args, model)
    return Trainer(
        model,
        {name: losses.build_objective(getattr(args, f"{name}_loss"), TASKS[name], args) for name in args.tasks},
        update,
        optimizer.build_schedule(update, args.schedule, total_steps, args.warmup),
        precision,
        args.clip,
        smart.build_regularizer(args, model),
        model.weighting,
        pcgrad.build_combiner(args, model.shared_parameters()),
        optimizer.build_averager(args, model),
        {name: TASKS[name].predicts for name in args.tasks},
        SideStream(args.seed),
        {name for name in args.tasks if any(loss.compares_rows for loss in losses_of(args, name).values())},
        model.world,
    )


def build_watch(args: argparse.Namespace) -> Watch:
    """Writes notes if training goes wrong; a loss that is not the task's default is compared with its own start."""
    targets = {name: TASKS[name].predicts for name in args.tasks}
    plain = {name: t for name, t in targets.items() if getattr(args, f"{name}_loss") == t.default_loss}
    chance = {name: t.loss_of_guessing() for name, t in plain.items() if t.loss_of_guessing() is not None}
    return Watch(args.lr, args.epochs, args.regularizer, chance, {name: t.range for name, t in targets.items()})


# --- data -------------------------------------------------------------------------------------------------------------

Splits = dict[str, dict[str, Split]]  # by task, then by train, dev, test


def build_tokenizer(args: argparse.Namespace) -> BertTokenizer:
    return pos.build_tokenizer(args, BertTokenizer.from_pretrained(args.model, max_length=args.max_length))


def load_splits(args: argparse.Namespace, tokenizer: BertTokenizer, which: Iterable[str]) -> Splits:
    """Read and tokenize these splits of all tasks; only the tasks that train have a training split."""
    splits: Splits = {}
    for name, branch in branches(args).items():
        wanted = [split for split in which if split != "train" or name in args.train_tasks]
        splits[name] = {
            split: read_split(
                branch.task,
                data_paths(branch.task, args, split),
                tokenizer,
                branch.pairing_for(split),
                labeled=split != "test",
                strict=args.strict_data,
                repeated_ids=args.repeated_ids and split == "train",
            )
            for split in wanted
        }
        if "train" in splits[name]:
            splits[name]["train"] = training_rows(splits[name]["train"], args)
        if args.dry_run:
            two_steps = partial(first_batches, count=2 * args.accumulate, batch_size=shared_flags.batch_size(args))
            splits[name] = {s: two_steps(rows) for s, rows in splits[name].items()}
    return splits


def first_batches(split: Split, count: int, batch_size: BatchSize) -> Split:
    """The first rows of the split, as many as fill this number of batches."""
    costs = split.costs
    fitting = bisect.bisect_right(range(1, len(split) + 1), count, key=lambda n: count_batches(costs[:n], batch_size))
    return split.select(torch.arange(fitting))


def training_rows(split: Split, args: argparse.Namespace) -> Split:
    """The rows to train on: a random fraction or at most --max_train of them, the same ones for the same seed."""
    if any(loss.reads_texts for loss in losses_of(args, split.task.name).values()):
        split = split.with_text_hashes()
    wanted = max(2, round(getattr(args, f"{split.task.name}_fraction") * len(split)))
    split = split.sample(min(wanted, args.max_train or wanted), args.seed)
    comparing = [name for name, loss in losses_of(args, split.task.name).items() if loss.compares_rows]
    if comparing:
        spec = getattr(args, f"{split.task.name}_loss")
        check_rows_meet(split.costs, shared_flags.batch_size(args), f"--{split.task.name}_loss {spec}: {comparing[0]}")
    return split


def with_teacher(split: Split, path: Path) -> Split:
    """The training rows with the teacher's logits, looked up by id; the teacher may know more rows."""
    logits = read_logits(path, split.task, logits_remedy(path.parent, train=True), labeled=False)
    places = {identifier: row for row, identifier in enumerate(logits.ids)}
    absent = [identifier for identifier in split.ids if identifier not in places]
    if absent:
        raise InputError(
            f"{path}: must have logits for every training row of {split.task.name}; {len(absent)} of {len(split)} are "
            f"missing, such as {absent[0]}. Write them with --predict_only --predict_train --run RUN on this data."
        )
    return split.with_teacher(torch.from_numpy(logits.logits)[[places[identifier] for identifier in split.ids]])
