"""Part 1 of the handout: sentiment on SST and CFIMDB, with a frozen or a fine-tuned BERT.

    python3 classifier.py --option {pretrain,finetune} --lr {1e-3,1e-5}

Trains on SST, then on CFIMDB, and writes predictions/<option>-<task>-{dev,test}-out.csv. With
--fine-tune-mode, as later handouts call --option, the files have the later names, such as full-model-sst-dev-out.csv.
"""

import starting  # noqa: F401

# isort: split

import argparse
import dataclasses
import functools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import distributed
import evaluation
import optimizer
import shared_flags
from base_bert import revision_of
from bert import BertModel, Dropout
from datasets import (
    SentenceClassificationDataset,
    SentenceClassificationTestDataset,
    Split,
    epoch_generator,
    read_split,
)
from distributed import World, local_sentences
from evaluation import predict, score, with_stored_vectors, write_logits, write_predictions
from flags import ALWAYS, ArgumentParser, Need, check_stored, number
from losses import cross_entropy
from manifest import Source
from observers import build_observer
from readers import read_examples, report_skipped
from runs import Run, shared_run
from starter import load_model, restore_model, save_model, seed_everything
from submission import part_1_name
from tasks import CFIMDB, SST, Batch, Category, Output, Predictions, Task
from tokenizer import BertTokenizer
from trainer import Step, Trainer
from training import NOBODY, Observer, fit
from utils import (
    Precision,
    choose_device,
    count_parameters,
    run_script,
    warn,
    writable_directory,
)
from watch import Watch, note_about_rate

PART_1_TASKS = {"sst": SST, "cfimdb": CFIMDB}
BATCH_SIZE_FLAGS = {"sst": "batch_size", "cfimdb": "cfimdb_batch_size"}
BATCH_SIZE = 8  # the handout's
LEARNING_RATES = {"pretrain": 1e-3, "finetune": 1e-5}  # the starter's 1e-3 for both would ruin fine-tuning


class BertSentimentClassifier(nn.Module):
    """The pooled [CLS] vector -> dropout -> linear. A frozen BERT stays in eval mode, so its dropout is off."""

    def __init__(self, config: Any):
        """config: num_labels, and flags of the script, such as the starter's namespace; the rest are the defaults."""
        super().__init__()
        args = with_defaults(config)
        self.bert = BertModel.from_pretrained(
            args.model, keep_layers=args.keep_layers, local_files_only=args.local_files_only
        )
        self.bert.use_attention(args.attention)
        self.frozen, self.num_labels = args.option == "pretrain", args.num_labels
        self.bert.requires_grad_(not self.frozen)
        self.dropout = Dropout(args.hidden_dropout_prob)
        self.linear = nn.Linear(self.bert.config.hidden_size, args.num_labels)
        self.world = World()  # the processes that train this model together

    def train(self, mode: bool = True) -> "BertSentimentClassifier":
        super().train(mode)
        if self.frozen:
            self.bert.eval()
        return self

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The starter's signature: (B, T), (B, T) -> logits (B, C)."""
        return self.linear(self.dropout(self.bert(input_ids, attention_mask)["pooler_output"]))

    def vectors(self, batch: Batch) -> tuple[Tensor, ...]:
        (sentence,) = batch.sentences
        own = local_sentences(self.world, sentence)
        vectors = self.bert(own.token_ids, own.attention_mask)["pooler_output"]
        return (self.world.gather(vectors, len(sentence.token_ids)),)  # (B, H)

    def predict(self, batch: Batch) -> Output:
        vectors = self.vectors(batch) if batch.vectors is None else batch.vectors
        return Output(self.linear(self.dropout(vectors[0])), vectors)


def load_splits(task: Task, args: argparse.Namespace, tokenizer: BertTokenizer) -> dict[str, Split]:
    splits = {
        split: read_split(task, [path], tokenizer, labeled=split != "test", strict=args.strict_data)
        for split, path in data_paths(task, args).items()
    }
    return splits | {"train": splits["train"].sample(args.max_train or len(splits["train"]), args.seed)}


def data_paths(task: Task, args: argparse.Namespace) -> dict[str, Path]:
    return {split: args.data / task.filename(split) for split in ("train", "dev", "test")}


def build_model(task: Task, args: argparse.Namespace) -> BertSentimentClassifier:
    return BertSentimentClassifier(argparse.Namespace(**vars(args) | {"num_labels": task.predicts.num_logits}))


def build_trainer(
    task: Task, args: argparse.Namespace, model: BertSentimentClassifier, precision: Precision, total_steps: int
) -> Trainer:
    update = optimizer.build_optimizer(args, model)
    return Trainer(
        model,
        {task.name: cross_entropy},
        update,
        optimizer.build_schedule(update, args.schedule, total_steps, args.warmup),
        precision,
        args.clip,
        averager=optimizer.build_averager(args, model),
        targets={task.name: task.predicts},
        world=model.world,
    )


def train_task(
    task: Task, args: argparse.Namespace, splits: dict[str, Split], precision: Precision, run: Run, world: World
) -> float:
    """Train one classifier, write its two prediction files and their logits, and return the best dev accuracy."""
    found: dict[str, Predictions] = {}  # of the last evaluation
    observer = build_observer(args, run, world, lambda: found)
    trainer, best = fit_task(task, args, splits, precision, run, world, found, observer)
    for name in ("dev", "test"):
        path = args.predictions / part_1_name(args.fine_tune_mode or args.option, task.name, name)
        predictions = predict(trainer.model, splits[name], args.eval_batch_size, precision)
        source = Source(run.folder, data_paths(task, args)[name])
        world.on_main(functools.partial(write_predictions, path, task, predictions, source))
        world.on_main(functools.partial(write_logits, run.folder / f"{task.name}-{name}.npz", predictions))
        print(f"{task.name}: wrote {path}", flush=True)
    observer.end()
    return best


def fit_task(
    task: Task,
    args: argparse.Namespace,
    splits: dict[str, Split],
    precision: Precision,
    run: Run,
    world: World,
    found: dict[str, Predictions],
    observer: Observer = NOBODY,
) -> tuple[Trainer, float]:
    """Train one classifier; return its trainer, with the best epoch's weights, and the best dev accuracy.

    A frozen BERT's vectors are stored in `splits`. Every evaluation stores its predictions in `found`.
    """
    seed_everything(args.seed)
    model = build_model(task, args).to(precision.device)
    model.world = world
    trainable, total = count_parameters(model)
    sizes = ", ".join(f"{name} {len(split)}" for name, split in splits.items())
    print(f"{task.name}: {sizes} rows | {trainable:,} of {total:,} parameters train", flush=True)
    batch_size = shared_flags.batch_size(args, BATCH_SIZE_FLAGS[task.name])
    if model.frozen:
        for name, split in splits.items():
            splits[name] = with_stored_vectors(model, split, args.eval_batch_size, precision)

    total_steps = splits["train"].count_batches(batch_size)
    trainer = build_trainer(task, args, model, precision, total_steps * args.epochs)
    world.seed_apart(args.seed)

    def steps(epoch: int) -> Iterator[Step]:
        for batch in splits["train"].batches(batch_size, epoch_generator(args.seed, epoch)):
            yield ((batch,),)

    def evaluate() -> dict[str, float]:
        found[task.name] = predict(model, splits["dev"], args.eval_batch_size, precision)
        return {"dev": score(task, found[task.name])}

    best = fit(
        trainer, steps, evaluate, "dev", args.epochs, run, steps_in=lambda epoch: total_steps,
        save_minutes=args.save_minutes, keep_state=args.keep_state, resume=args.resume,
        watch=Watch(args.lr, args.epochs, chance={task.name: task.predicts.loss_of_guessing()}),
        dev_values=lambda: {name: predictions.values for name, predictions in found.items()}, observer=observer,
    )  # fmt: skip
    return trainer, best["dev"]


@functools.cache
def parser() -> ArgumentParser:
    new = ArgumentParser(
        "classifier.py",
        "Part 1: train sentiment classifiers on SST and CFIMDB, and write their predictions.",
        "python classifier.py @recipes/classifier-quickstart.txt",
        "python classifier.py --option finetune --lr 1e-5 --use_gpu --precision fp16",
        usage="[@recipes/FILE.txt] [flags; later ones win]",
        sections=("most used", "the model", "optimization", "time and memory", "files"),
    )
    shared_flags.add_option(new)
    shared_flags.add_most_used(new, epochs=10)
    add = new.section("most used")
    add("--tasks", nargs="+", choices=sorted(PART_1_TASKS), default=["sst", "cfimdb"], needs=ALWAYS,
        help="data sets to train on, in this order")  # fmt: skip
    for task, flag in BATCH_SIZE_FLAGS.items():
        add(f"--{flag}", type=number(int, 1, 4096), needs=(trains(task), shared_flags.ONE_SIZE), metavar="N",
            help=f"rows per update on {task}; 64 fits a 12 GB GPU (default: {BATCH_SIZE})")  # fmt: skip
    shared_flags.add_max_tokens(new)
    shared_flags.add_checkpoints(new)
    optimizer.add_arguments(new, lr=None, lr_default=" (default: 1e-3 for pretrain, 1e-5 for finetune)")
    shared_flags.add_encoder(new)
    new.section("the model")(
        "--hidden_dropout_prob", type=number(float, 0, 0.99), default=0.3, needs=ALWAYS, metavar="P",
        help="dropout before the linear layer")  # fmt: skip
    shared_flags.add_eval_batch_size(new)
    shared_flags.add_files(new, max_length=512)
    shared_flags.add_max_train(new)
    shared_flags.add_predictions(new)
    return new


def trains(task: str) -> Need:
    return Need(f"{task} among --tasks", lambda args: task in args.tasks)


def complete(args: argparse.Namespace) -> argparse.Namespace:
    """Fill in the defaults that follow from other flags."""
    new = {"lr": args.lr or LEARNING_RATES[args.option], "name": shared_flags.run_name(args, args.option)}
    for task in args.tasks if args.max_tokens is None else ():
        new[BATCH_SIZE_FLAGS[task]] = getattr(args, BATCH_SIZE_FLAGS[task]) or BATCH_SIZE
    return argparse.Namespace(**vars(args) | new)


def with_defaults(config: Any) -> argparse.Namespace:
    """Complete flags from any namespace with some of them, such as the starter's; the rest are the defaults."""
    given = {"local_files_only": False} | shared_flags.with_option(vars(config))
    return complete(argparse.Namespace(**vars(parser().parse_args([])) | given))


def get_args(argv: list[str] | None = None) -> argparse.Namespace:
    return parser().parse(argv, complete)


# Flags that may differ between the start of a run and --resume.
MAY_DIFFER = {"runs", "predictions", "fine_tune_mode", "eval_batch_size", "tasks", "epochs"}
MAY_DIFFER |= shared_flags.OF_THE_MACHINE | shared_flags.OF_CHECKPOINTS | shared_flags.OF_DISPLAY


def open_run(task: Task, args: argparse.Namespace) -> Run:
    """A new run, or the one to resume."""
    folder, data = args.runs / args.name / task.name, list(data_paths(task, args).values())
    if not args.resume:
        return Run.create(folder, args, data, model_revision=revision_of(args.model))

    def upgraded(stored: dict[str, Any]) -> dict[str, Any]:
        """The flags of a run that may be older than some of them."""
        return vars(parser().parse_args([])) | check_stored(parser(), stored, folder / "args.json")

    extend, revision = functools.partial(shared_flags.check_extension, args), revision_of(args.model)
    return Run.resume(folder, args, upgraded, data, MAY_DIFFER, extend, model_revision=revision)


def main() -> None:
    args = get_args()
    with distributed.started(args.use_gpu) as world:
        train_tasks(args, world)


def train_tasks(args: argparse.Namespace, world: World) -> None:
    """Train a classifier for each task, one after the other."""
    device = choose_device(args.use_gpu, args.precision, args.deterministic)
    tokenizer = BertTokenizer.from_pretrained(args.model, max_length=args.max_length)
    splits = {name: load_splits(PART_1_TASKS[name], args, tokenizer) for name in dict.fromkeys(args.tasks)}
    BertModel.from_pretrained(args.model, keep_layers=args.keep_layers)  # fails now rather than after the first task
    writable_directory(args.predictions, "--predictions")
    for name in splits if not args.resume else ():
        world.on_main(functools.partial(Run.must_be_new, args.runs / args.name / name))
    threads = torch.get_num_threads()
    print(f"{args.option} {args.model} | {device.type} {args.precision} | {threads} threads | lr {args.lr:g}")
    if note := note_about_rate(args.option, args.lr, args.head_lr):
        warn(note)
    for name, task_splits in splits.items():
        started, task, precision = time.monotonic(), PART_1_TASKS[name], Precision(args.precision, device)
        with shared_run(world, functools.partial(open_run, task, args)) as run:
            world.on_main(functools.partial(tokenizer.save_pretrained, run.folder))
            best = train_task(task, args, task_splits, precision, run, world)
            spent = time.monotonic() - started
            print(f"{name}: best dev accuracy {best:.3f} | {spent:.0f} s | {run.folder}", flush=True)


# --- the starter's functions ------------------------------------------------------------------------------------------

SentimentDataset, SentimentTestDataset = SentenceClassificationDataset, SentenceClassificationTestDataset
model_eval, model_test_eval = evaluation.model_eval, evaluation.model_test_eval


def load_data(filename: str | Path, flag: str = "train") -> Any:
    """Rows (sentence, label, id), with the number of labels if flag is "train"; rows (sentence, id) if it is "test"."""
    examples = read_examples(SST, [Path(filename)], labeled=flag != "test")
    report_skipped(examples.skipped, len(examples), str(filename))
    print(f"load {len(examples)} data from {filename}")
    if flag == "test":
        return list(zip(*examples.texts, examples.ids, strict=True))
    rows = list(zip(*examples.texts, examples.labels, examples.ids, strict=True))
    return (rows, len(set(examples.labels))) if flag == "train" else rows


def train(args: Any) -> None:
    """Train on args.train, choose the epoch on args.dev, and save the model to args.filepath."""
    writable_directory(Path(args.filepath).parent, "the directory of the model")
    _, num_labels = load_data(args.train, "train")
    task = dataclasses.replace(SST, predicts=Category(num_labels))
    flags = with_defaults(argparse.Namespace(**{"seed": torch.initial_seed() % 2**31} | vars(args)))
    config = argparse.Namespace(**vars(flags) | {"num_labels": num_labels})
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(args.train), Path(args.dev)]
        tokenizer = BertTokenizer.from_pretrained(flags.model, max_length=flags.max_length)
        splits = {
            name: read_split(task, [path], tokenizer, labeled=True)
            for name, path in zip(("train", "dev"), paths, strict=True)
        }
        flags.save_minutes = None  # the directory is temporary
        precision = Precision(flags.precision, choose_device(flags.use_gpu))
        with Run.create(Path(folder) / "run", flags, paths) as run:
            trainer, _ = fit_task(task, flags, splits, precision, run, World(), {})
    save_model(trainer.model, trainer.optimizer, args, config, args.filepath)


def test(args: Any) -> None:
    """Write the predictions of the model in args.filepath to args.dev_out and args.test_out."""
    saved, flags = load_model(args.filepath), with_defaults(args)
    precision = Precision(flags.precision, choose_device(flags.use_gpu))
    model = restore_model(BertSentimentClassifier(saved["model_config"]), saved, args.filepath).to(precision.device)
    task = dataclasses.replace(SST, predicts=Category(model.num_labels))
    tokenizer = BertTokenizer.from_pretrained(saved["model_config"].model, max_length=flags.max_length)
    for name, path, out in (("dev", args.dev, args.dev_out), ("test", args.test, args.test_out)):
        rows = read_split(task, [Path(path)], tokenizer, labeled=name == "dev")
        predictions = predict(model, rows, flags.eval_batch_size, precision)
        if name == "dev":
            print(f"dev acc :: {score(task, predictions):.3f}")
        writable_directory(Path(out).parent, "the directory of the predictions")
        write_predictions(Path(out), task, predictions, Source(Path(args.filepath), Path(path)))


if __name__ == "__main__":
    run_script(main)
