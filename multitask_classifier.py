"""Part 2 of the handout: one BERT for sentiment (sst), paraphrase (para) and similarity (sts), with every extension.

    python multitask_classifier.py @recipes/quickstart.txt
    python multitask_classifier.py --fine-tune-mode full-model --lr 1e-5 --use_gpu

What happens here, in order:

  1. `get_args` parses the flags (multitask_flags.py has them) and refuses what does not work.
  2. `train` reads and tokenizes the data, builds the model (model.py) and the trainer, and opens the run's directory.
     It passes two functions to the training loop (training.fit): `steps`, which draws the batches of an epoch in the
     order of the sampler (sampling.py), and `evaluate`, which returns the dev scores. The best epoch by the 2024
     overall score is kept.
  3. `write_run_predictions` writes predictions/{sst,para,sts}-{dev,test}-output.csv with the trained model.

Where to go next: model.py for the forward pass, training.py for the loop, tasks.py for the tasks; docs/ARCHITECTURE.md
lists all files in reading order. `MultitaskBERT`, `train_multitask`, `test_multitask` and `get_args` have the starter's
signatures.
"""

import starting  # noqa: F401

# isort: split

import argparse
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import distributed
import model
import multitask_build
import multitask_flags
import pos
import sampling
import shared_flags
from checkpoints import restore_best
from datasets import endless_batches, read_split
from distributed import World
from evaluation import (
    overall,
    predict,
    score,
    score_line,
    test_model_multitask,
    with_stored_vectors,
    write_logits,
    write_predictions,
    write_starter_predictions,
)
from manifest import Source
from multitask_build import Splits, load_splits
from multitask_flags import data_paths, with_defaults
from observers import build_observer
from runs import Run, shared_run
from starter import load_model, restore_model, save_model, seed_everything
from tasks import TASKS, Predictions, Task
from tokenizer import BertTokenizer
from trainer import Step
from training import NOBODY, Observer, fit, grouped
from utils import (
    InputError,
    Precision,
    choose_device,
    count_parameters,
    dry_run_directory,
    run_script,
    sha256_of,
    warn,
    writable_directory,
)
from watch import note_about_rate

OnEpoch = Callable[[int, dict[str, float]], None]  # called with the epoch and its dev scores
ALONE = World()  # one process


class MultitaskBERT(model.MultitaskBERT):
    """The model with the starter's constructor.

    config: the script's flags, or any namespace with some of them, such as the starter's; the rest are the defaults.
    """

    def __init__(self, config: Any):
        super().__init__(**multitask_build.model_values(with_defaults(config)))


# --- training ---------------------------------------------------------------------------------------------------------


class Trained(NamedTuple):
    """The result of training: the model with the best epoch's weights, and all that predicting with it needs."""

    args: argparse.Namespace
    model: model.MultitaskBERT
    tokenizer: BertTokenizer
    splits: Splits  # dev and test
    precision: Precision
    run: Run
    scores: dict[str, float]  # of the best epoch, on dev
    observer: Observer  # of the training


def train_multitask(args: argparse.Namespace, on_epoch: OnEpoch = lambda epoch, scores: None) -> dict[str, float]:
    """Train, and return the dev scores of the best epoch; the run's directory keeps its weights.

    If the flags have the starter's `filepath`, the model is saved there as well.
    """
    if hasattr(args, "filepath"):
        writable_directory(Path(args.filepath).parent, "the directory of the model")
    trained = train(with_defaults(args), on_epoch)
    trained.observer.end()
    if hasattr(args, "filepath"):
        save_model(trained.model, None, args, trained.args, args.filepath)
    return trained.scores


def train(args: argparse.Namespace, on_epoch: OnEpoch = lambda epoch, scores: None, world: World = ALONE) -> Trained:
    """Train with complete flags. world: the processes that train together."""
    multitask_flags.validate(args)
    if not args.resume:
        world.on_main(lambda: Run.must_be_new(args.runs / args.name))  # before minutes are spent on reading data
    args.pos_tagger = pos.available_tagger(args)
    precision = Precision(args.precision, choose_device(args.use_gpu, args.precision, args.deterministic))
    tokenizer = multitask_build.build_tokenizer(args)
    splits = load_splits(args, tokenizer, multitask_flags.SPLITS)  # test too: mistakes in it show before training
    for name, path in multitask_flags.teacher_files(args).items():
        splits[name]["train"] = multitask_build.with_teacher(splits[name]["train"], path)
    seed_everything(args.seed)
    network = multitask_build.build_model(args).to(precision.device)
    network.world = world
    if args.compile:
        network.adapter.compile_layers()
    for name, split in ((name, split) for name in args.tasks for split in multitask_flags.SCORED):
        writable_directory(Path(getattr(args, f"{name}_{split}_out")).parent, f"the directory of --{name}_{split}_out")
    with shared_run(world, lambda: multitask_flags.open_run(args)) as run:
        world.on_main(lambda: tokenizer.save_pretrained(run.folder))
        describe(args, network, splits, precision)
        found: dict[str, Predictions] = {}  # of the last evaluation, by task
        observer = build_observer(args, run, world, lambda: found)
        best = fit_network(args, network, splits, precision, run, on_epoch, found, observer)
    print(f"best dev: {score_line({name: best[name] for name in args.tasks})} | {run.folder}", flush=True)
    return Trained(args, network, tokenizer, splits, precision, run, best, observer)


def fit_network(
    args: argparse.Namespace,
    network: model.MultitaskBERT,
    splits: Splits,
    precision: Precision,
    run: Run,
    on_epoch: OnEpoch,
    found: dict[str, Predictions],
    observer: Observer,
) -> dict[str, float]:
    """Train the model, whose best epoch's weights it has at the end.

    The training rows are taken out of `splits`. Every evaluation stores its predictions in `found`.
    """
    training_rows = {name: splits[name].pop("train") for name in args.train_tasks}
    scored = {name: of_task["dev"] for name, of_task in splits.items()}
    if network.vectors_are_fixed:
        training_rows, scored = (
            {n: with_stored_vectors(network, rows, args.eval_batch_size, precision) for n, rows in part.items()}
            for part in (training_rows, scored)
        )
    batch_size = shared_flags.batch_size(args)
    sampler = sampling.build_sampler(args, {n: rows.count_batches(batch_size) for n, rows in training_rows.items()})
    select = "overall" if set(args.train_tasks) == set(args.tasks) else "trained"  # the tasks that train decide

    def steps(epoch: int) -> Iterator[Step]:
        sources = {n: endless_batches(rows, batch_size, args.seed, epoch) for n, rows in training_rows.items()}
        draws = (tuple(next(sources[name]) for name in names) for names in sampler.steps(epoch))
        return grouped(draws, args.accumulate)

    def steps_in(epoch: int) -> int:
        return -(-sum(1 for _ in sampler.steps(epoch)) // args.accumulate)

    def evaluate() -> dict[str, float]:
        found.update({name: predict(network, rows, args.eval_batch_size, precision) for name, rows in scored.items()})
        scores = {name: score(TASKS[name], predictions) for name, predictions in found.items()}
        trained = {select: overall({name: scores[name] for name in args.train_tasks})}
        return scores | {"overall": overall(scores)} | trained

    total_steps = sum(steps_in(epoch) for epoch in range(1, args.epochs + 1))
    trainer = multitask_build.build_trainer(args, network, precision, total_steps)
    network.world.seed_apart(args.seed)
    return fit(
        trainer, steps, evaluate, select, args.epochs, run, steps_in=steps_in, patience=args.patience,
        save_minutes=None if args.dry_run else args.save_minutes, keep_state=args.keep_state, resume=args.resume,
        on_epoch=on_epoch, watch=multitask_build.build_watch(args),
        dev_values=lambda: {name: predictions.values for name, predictions in found.items()}, observer=observer,
    )  # fmt: skip


def describe(args: argparse.Namespace, network: model.MultitaskBERT, splits: Splits, precision: Precision) -> None:
    """Print device, precision, parameters and data."""
    trainable, total = count_parameters(network)
    print(
        f"{args.option} {args.model} | {precision.device.type} {args.precision} | {torch.get_num_threads()} threads | "
        f"{trainable:,} of {total:,} parameters train | lr {args.lr:g}"
    )
    chain = f"sampler {args.sampler} | combiner {args.combiner} | regularizer {args.regularizer}{pos.describe(args)}"
    print(chain + network.adapter.summary())
    for name, of_task in splits.items():
        branch = network.branches[name]
        sizes = ", ".join(f"{split} {len(rows)}" for split, rows in of_task.items())
        parts = [f"{sizes} rows", f"pooling {branch.pooling}", f"head {branch.head}"]
        parts += [f"pairing {branch.pairing}"] * branch.task.is_pair + [f"loss {getattr(args, f'{name}_loss')}"]
        print(f"{name}: {' | '.join(parts)}", flush=True)
    if note := note_about_rate(args.option, args.lr, args.head_lr):
        warn(note)


# --- predictions ------------------------------------------------------------------------------------------------------


def test_multitask(args: argparse.Namespace) -> None:
    """Write the prediction files and the logits of a run that was trained before.

    If the flags have the starter's `filepath`, write the prediction files of the model that was saved there.
    """
    if hasattr(args, "filepath"):
        write_starter_predictions(with_defaults(args), *load_saved(args))
    else:
        predict_run(with_defaults(args), ALONE)


def predict_run(args: argparse.Namespace, world: World) -> None:
    """Write the prediction files and the logits of a run. world: the processes that share the work."""
    if args.predict_train and args.repeated_ids:
        raise InputError(
            "--predict_train: logits are looked up by id, which must be unique in the training files, but the run has "
            "--repeated_ids. Give every row its own id, and train without the flag."
        )
    precision = Precision(args.precision, choose_device(args.use_gpu, args.precision, args.deterministic))
    run = Run.reopen(args.runs / args.name)
    network = multitask_build.build_model(args).to(precision.device)
    network.world = world
    restore_best(network, run)
    tokenizer = multitask_build.build_tokenizer(args)
    splits = load_splits(args, tokenizer, multitask_flags.SCORED)
    trained = Trained(args, network, tokenizer, splits, precision, run, {}, NOBODY)
    write_run_predictions(trained, functools.partial(is_own_file, run, args))
    if args.predict_train:
        write_training_logits(trained)


def is_own_file(run: Run, args: argparse.Namespace, name: str, split: str) -> bool:
    """Whether the file to score has the contents that the run was trained with; True if that was not recorded."""
    facts = run.facts
    recorded = facts["data_sha256"].get(str(facts["args"].get(f"{name}_{split}")))
    return recorded in (None, sha256_of(Path(getattr(args, f"{name}_{split}"))))


def write_run_predictions(trained: Trained, is_own: Callable[[str, str], bool] = lambda name, split: True) -> None:
    """Write the prediction files of dev and test, and the logits into the run's directory.

    is_own: whether the rows of a task's split are the run's own. The logits of other rows are not saved: they would
    replace the run's, which ensembles read.
    """
    args = trained.args
    for name, of_task in trained.splits.items():
        for split, rows in of_task.items():
            predictions = predict(trained.model, rows, args.eval_batch_size, trained.precision)
            path = Path(getattr(args, f"{name}_{split}_out"))
            source = Source(trained.run.folder, *data_paths(rows.task, args, split))
            keep = is_own(name, split)
            write = functools.partial(write_split, source, split, path, rows.task, predictions, keep)
            trained.model.world.on_main(write)
            shown = f" | dev score {score(rows.task, predictions):.4f}" if predictions.labels is not None else ""
            print(f"{name}: wrote {path}, {len(predictions.ids)} rows{shown}", flush=True)
            if not keep:
                run, own = trained.run.folder, source.data
                warn(f"{own} is not the {split} file of {run}, so its logits were not saved there.")
    trained.observer.end()


def write_split(
    source: Source, split: str, path: Path, task: Task, predictions: Predictions, keep_logits: bool
) -> None:
    writable_directory(path.parent, f"the directory of --{task.name}_{split}_out")
    write_predictions(path, task, predictions, source)
    if keep_logits:
        write_logits(source.run / f"{task.name}-{split}.npz", predictions)


def write_training_logits(trained: Trained) -> None:
    """Write the logits of ALL rows of the training files, whatever part of them was trained on, for --teacher."""
    args = trained.args
    for name in args.train_tasks:
        branch = trained.model.branches[name]
        pairing = branch.pairing_for("dev")  # in both orders if pairs are scored that way
        paths = data_paths(branch.task, args, "train")
        rows = read_split(branch.task, paths, trained.tokenizer, pairing, labeled=True, strict=args.strict_data)
        predictions = predict(trained.model, rows, args.eval_batch_size, trained.precision)
        path = trained.run.folder / f"{name}-train.npz"
        trained.model.world.on_main(functools.partial(write_logits, path, predictions))
        shown = f"train score {score(branch.task, predictions):.4f}"
        print(f"{name}: wrote {path}, {len(predictions.ids)} rows | {shown}", flush=True)


# --- the starter's functions of 2023 ----------------------------------------------------------------------------------


def load_saved(args: argparse.Namespace) -> tuple[MultitaskBERT, torch.device]:
    """The model in args.filepath, and its device."""
    device, saved = choose_device(with_defaults(args).use_gpu), load_model(args.filepath)
    return restore_model(MultitaskBERT(saved["model_config"]), saved, args.filepath).to(device), device


def test_model(args: argparse.Namespace) -> None:
    """2023's name of test_multitask: write the prediction files of the model in args.filepath."""
    test_model_multitask(with_defaults(args), *load_saved(args))


# --- script -----------------------------------------------------------------------------------------------------------


def get_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags of a training or, with --predict_only, those of the run that predicts."""
    given, _ = multitask_flags.parser().parse_known_args(argv)
    if given.predict_only and given.run is not None:
        multitask_flags.check_exclusive_modes(given)
        return multitask_flags.of_run(given.run, argv)
    args = multitask_flags.parser().parse(argv, multitask_flags.complete)
    multitask_flags.validate(args)
    return args


def dry(args: argparse.Namespace, folder: Path) -> argparse.Namespace:
    """The same flags for one short epoch that writes to this folder only."""
    outputs = {
        f"{name}_{split}_out": str(folder / f"{name}-{split}-output.csv")
        for name in args.tasks
        for split in multitask_flags.SCORED
    }
    new = {"runs": folder / "runs", "predictions": folder, "epochs": 1, "steps_per_epoch": None}
    return argparse.Namespace(**vars(args) | outputs | new)


def main() -> None:
    args = get_args()
    if args.predict_only:
        with distributed.started(args.use_gpu) as world:
            predict_run(args, world)
    elif args.dry_run:
        with dry_run_directory() as folder:
            write_run_predictions(train(dry(args, folder)))
    else:
        with distributed.started(args.use_gpu) as world:
            write_run_predictions(train(args, world=world))


if __name__ == "__main__":
    run_script(main)
