"""Part 1 of the handout: sentiment on SST and CFIMDB, with a frozen or a fine-tuned BERT.

    python3 classifier.py --option {pretrain,finetune} --lr {1e-3,1e-5}

Trains on SST, then on CFIMDB, and writes predictions/<option>-<task>-{dev,test}-out.csv.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import optimizer
import training
from bert import BertModel, Dropout
from datasets import Split, epoch_generator, read_split, training_batches
from evaluation import keep_vectors, predict, score, write_predictions
from losses import cross_entropy
from tasks import CFIMDB, SST, Batch, Output, Task
from tokenizer import BertTokenizer
from training import Step, Trainer, fit
from utils import (
    FINE_TUNE_MODES,
    ArgumentParser,
    Precision,
    Run,
    choose_device,
    count_parameters,
    fine_tune_mode,
    number,
    run_script,
    seed_everything,
    writable_directory,
)

TASKS = {"sst": SST, "cfimdb": CFIMDB}


class BertSentimentClassifier(nn.Module):
    """The pooled [CLS] vector -> dropout -> linear. A frozen BERT stays in eval mode, so its dropout is off."""

    def __init__(self, bert: BertModel, num_labels: int, hidden_dropout_prob: float, frozen: bool):
        super().__init__()
        self.bert, self.frozen = bert, frozen
        self.bert.requires_grad_(not frozen)
        self.dropout = Dropout(hidden_dropout_prob)
        self.linear = nn.Linear(bert.config.hidden_size, num_labels)

    def train(self, mode: bool = True) -> "BertSentimentClassifier":
        super().train(mode)
        if self.frozen:
            self.bert.eval()
        return self

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The handout's signature: (B, T), (B, T) -> logits (B, C)."""
        return self.linear(self.dropout(self.bert(input_ids, attention_mask)["pooler_output"]))

    def vectors(self, batch: Batch) -> tuple[Tensor, ...]:
        (sentence,) = batch.sentences
        return (self.bert(sentence.token_ids, sentence.attention_mask)["pooler_output"],)  # (B, H)

    def predict(self, batch: Batch) -> Output:
        vectors = self.vectors(batch) if batch.vectors is None else batch.vectors
        return Output(self.linear(self.dropout(vectors[0])), vectors)


def load_splits(task: Task, args: argparse.Namespace, tokenizer: BertTokenizer) -> dict[str, Split]:
    return {
        split: read_split(task, [path], tokenizer, labeled=split != "test", strict=args.strict_data)
        for split, path in data_paths(task, args).items()
    }


def data_paths(task: Task, args: argparse.Namespace) -> dict[str, Path]:
    return {split: args.data / task.filename(split) for split in ("train", "dev", "test")}


def build_model(task: Task, args: argparse.Namespace) -> BertSentimentClassifier:
    bert = BertModel.from_pretrained(args.model, keep_layers=args.keep_layers)
    bert.use_attention(args.attention)
    return BertSentimentClassifier(bert, task.num_outputs, args.hidden_dropout_prob, frozen=args.option == "pretrain")


def train_task(task: Task, args: argparse.Namespace, splits: dict[str, Split], precision: Precision, run: Run) -> float:
    """Trains one classifier, writes its two prediction files, and returns the best dev accuracy."""
    seed_everything(args.seed)
    model = build_model(task, args).to(precision.device)
    trainable, total = count_parameters(model)
    sizes = ", ".join(f"{name} {len(split)}" for name, split in splits.items())
    print(f"{task.name}: {sizes} rows | {trainable:,} of {total:,} parameters train", flush=True)
    batch_size = {"sst": args.batch_size, "cfimdb": args.cfimdb_batch_size}[task.name]
    if model.frozen:
        splits = {name: keep_vectors(model, split, args.eval_batch_size, precision) for name, split in splits.items()}

    total_steps = -(-len(splits["train"]) // batch_size)
    update = optimizer.build_optimizer(args, model)
    schedule = optimizer.build_schedule(update, args.schedule, total_steps * args.epochs, args.warmup)
    averager = optimizer.build_averager(args, model)
    trainer = Trainer(model, {task.name: cross_entropy}, update, schedule, precision, args.clip, averager=averager)

    def steps(epoch: int) -> Iterator[Step]:
        for batch in training_batches(splits["train"], batch_size, epoch_generator(args.seed, epoch)):
            yield ((batch,),)

    def evaluate() -> dict[str, float]:
        return {"dev": score(task, predict(model, splits["dev"], args.eval_batch_size, precision))}

    best = fit(trainer, steps, evaluate, "dev", args.epochs, run, steps_in=lambda epoch: total_steps)
    for name in ("dev", "test"):
        path = args.predictions / f"{args.option}-{task.name}-{name}-out.csv"
        write_predictions(path, task, predict(model, splits[name], args.eval_batch_size, precision))
        print(f"{task.name}: wrote {path}", flush=True)
    return best["dev"]


def get_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(prog="classifier.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--option", choices=("pretrain", "finetune"), default="pretrain", help="pretrain: BERT is frozen")
    add("--fine-tune-mode", dest="option", type=fine_tune_mode, metavar="{" + ",".join(FINE_TUNE_MODES) + "}",
        default=argparse.SUPPRESS, help="the later handouts' name for --option")  # fmt: skip
    training.add_arguments(parser)
    add("--tasks", nargs="+", choices=sorted(TASKS), default=["sst", "cfimdb"], help="which data sets, in this order")
    add("--data", type=Path, default=Path("data"), help="directory with the course's files; data/sample is at hand")
    add("--strict_data", action="store_true", help="a row that cannot be used is an error")
    add("--max_length", type=number(int, 4, 512), default=512, help="longer texts are cut to so many tokens, counted")
    add("--predictions", type=Path, default=Path("predictions"), help="where the prediction files go")
    add("--runs", type=Path, default=Path("runs"), help="where the run's log and weights go")
    add("--name", help="name of the run; None: option and time")
    add("--epochs", type=number(int, 1, 1000), default=10, help="passes over the training rows")
    add("--batch_size", type=number(int, 1, 4096), default=8, help="rows an update, SST: 64 fits a 12 GB GPU")
    add("--cfimdb_batch_size", type=number(int, 1, 4096), default=8, help="rows an update, CFIMDB")
    add("--eval_batch_size", type=number(int, 1, 4096), default=32, help="rows a forward pass, without gradients")
    add("--hidden_dropout_prob", type=number(float, 0, 0.99), default=0.3, help="dropout before the linear layer")
    optimizer.add_arguments(parser)
    args = parser.parse_args(argv)
    if args.lr is None:
        args.lr = {"pretrain": 1e-3, "finetune": 1e-5}[args.option]
    args.name = args.name or f"{args.option}-{time.strftime('%Y%m%d-%H%M%S')}"
    return args


def main() -> None:
    args = get_args()
    device = choose_device(args.use_gpu)
    tokenizer = BertTokenizer.from_pretrained(args.model, max_length=args.max_length)
    splits = {name: load_splits(TASKS[name], args, tokenizer) for name in dict.fromkeys(args.tasks)}
    BertModel.from_pretrained(args.model, keep_layers=args.keep_layers)  # fails now rather than after the first task
    writable_directory(args.predictions, "--predictions")
    runs = {
        name: Run.create(args.runs / args.name / name, args, list(data_paths(TASKS[name], args).values()))
        for name in splits
    }
    threads = torch.get_num_threads()
    print(f"{args.option} {args.model} | {device.type} {args.precision} | {threads} threads | lr {args.lr:g}")
    for name, task_splits in splits.items():
        started = time.monotonic()
        best = train_task(TASKS[name], args, task_splits, Precision(args.precision, device), runs[name])
        spent = time.monotonic() - started
        print(f"{name}: best dev accuracy {best:.3f} | {spent:.0f} s | {runs[name].folder}", flush=True)


if __name__ == "__main__":
    run_script(main)
