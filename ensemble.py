"""Combine runs of multitask_classifier.py by their probabilities, their votes or their weights.

    python ensemble.py runs/a runs/b runs/c --method mean --name ens
    python ensemble.py @recipes/stems/average-weights.txt

Runs may cover different tasks; each task is combined over the runs that have it. The script reads the runs' logits
(<task>-<split>.npz), prints every run's dev scores beside the ensemble's, and writes the prediction files and a run
directory of the same layout, which a further ensemble or a student (--teacher) can read.

Shapes:  M runs   B rows of a split   C logits of a task
"""

import argparse
import contextlib
import functools
import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

import multitask_build
import multitask_flags
import shared_flags
from base_bert import load_checkpoint_state, read_safetensors
from checkpoints import save_best
from evaluation import overall, predict, score_line, write_logits, write_predictions
from flags import ALWAYS, ArgumentParser, Switch, chosen, number
from manifest import Source
from members import PLAIN_DEV, Member, chosen_on_dev, common_splits, hash_of, having, read_members, tasks_of
from model import MultitaskBERT
from runs import Run
from tasks import TASKS, Predictions, Task
from utils import (
    InputError,
    Precision,
    choose_device,
    run_script,
    sha256_of,
    warn,
    writable_directory,
    write_text,
)

INHERITED = "dev (a run was fitted or chosen on dev: expect less on test)"
ROUNDS = 25  # of the greedy search for weights, which are therefore multiples of 1/25 or coarser

# --- pools: (task, the runs' logits (M, B, C), weights (M,)) -> logits (B, C) -----------------------------------------

Pool = Callable[[Task, Tensor, Tensor], Tensor]


# The kind of target decides what these mean: numbers have no probabilities, and their majority is the median.
AVERAGES: dict[str, Pool] = {
    "probabilities": lambda task, logits, weights: task.predicts.mean_probabilities(logits, weights),
    "logits": lambda task, logits, weights: task.predicts.mean_logits(logits, weights),
}


def majority(task: Task, logits: Tensor, weights: Tensor) -> Tensor:
    return task.predicts.majority(logits, weights)


def pooled(pool: Pool, task: Task, logits: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Pool in double precision; if only one run counts, its logits are returned unchanged."""
    if np.count_nonzero(weights) == 1:
        return logits[weights.argmax()]
    return pool(task, torch.from_numpy(logits).double(), torch.from_numpy(weights).double()).float().numpy()


def decoded(task: Task, logits: np.ndarray) -> np.ndarray:
    return task.predicts.decode(torch.from_numpy(logits)).numpy()


# --- weights: (task, the runs' logits (M, B, C), labels (B,)) -> (M,), with sum 1 -------------------------------------

Weigh = Callable[[Task, np.ndarray, np.ndarray], np.ndarray]


def equal_weights(task: Task, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return np.full(len(logits), 1 / len(logits))


def best_alone(task: Task, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """All weight on the run with the highest score, the first one in a tie."""
    scores = [task.predicts.score(decoded(task, of_run), labels) for of_run in logits]
    return np.eye(len(logits))[int(np.argmax(scores))]


def greedy_weights(task: Task, logits: np.ndarray, labels: np.ndarray, pool: Pool) -> np.ndarray:
    """Ensemble selection of Caruana et al. 2004 ("Ensemble Selection from Libraries of Models"), section 2.1.

    Starts with no run and adds in each round, with replacement, the run whose addition gives the highest score; a run's
    weight is how often it was added until the round with the best score. Deviations: ties, which are frequent with
    accuracies, go to the run added least and to the later round, that is, towards equal weights. No bagging of runs.
    """
    counts, kept, highest = np.zeros(len(logits)), np.zeros(len(logits)), -np.inf
    for _ in range(ROUNDS):
        tried = [counts + one for one in np.eye(len(logits))]
        candidates = [decoded(task, pooled(pool, task, logits, counted / counted.sum())) for counted in tried]
        scores = [task.predicts.score(values, labels) for values in candidates]
        choice = max(range(len(logits)), key=lambda i: (scores[i], -counts[i]))
        counts = tried[choice]
        if scores[choice] >= highest:
            kept, highest = counts, scores[choice]
    return kept / kept.sum()


# --- parts of dev: ids -> the rows to fit weights on, the rows to score -----------------------------------------------

Part = Callable[[list[str]], tuple[np.ndarray, np.ndarray]]


def all_rows(ids: list[str]) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(len(ids)), np.arange(len(ids))


def halves(ids: list[str], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split by a hash of id and seed: the same rows whatever their order in the file."""
    order = sorted(range(len(ids)), key=lambda i: hashlib.sha256(f"{seed} {ids[i]}".encode()).digest())
    middle = len(ids) // 2
    return np.sort(order[:middle]), np.sort(order[middle:])


# --- methods: (flags, runs) -> Ensemble -------------------------------------------------------------------------------


class Ensemble(NamedTuple):
    """The result of a method; nothing is written yet."""

    predictions: dict[str, dict[str, Predictions]]  # by task and split
    weights: dict[str, dict[Path, float]]  # by task, of each run that has it
    rows: dict[str, np.ndarray]  # by task, the dev rows that are scored
    scored_on: str  # these rows in words
    flags: argparse.Namespace  # for args.json
    save: Callable[[Run], None] = lambda run: None  # writes what the run's directory needs besides


def mean(args: argparse.Namespace, members: list[Member]) -> Ensemble:
    """The mean of probabilities or logits, with equal weights."""
    must_share(args, members)
    return of_logits(args, members, equal_weights, AVERAGES[args.average])


def vote(args: argparse.Namespace, members: list[Member]) -> Ensemble:
    """The majority of the runs' predictions; the median of numbers."""
    must_share(args, members)
    return of_logits(args, members, equal_weights, majority)


def best(args: argparse.Namespace, members: list[Member]) -> Ensemble:
    """For each task the run with the highest dev score, or the only one that has the task."""
    is_choice = any(len(having(members, name)) > 1 for name in tasks_of(members))
    scored_on = "dev (chosen on dev: expect less on test)" if is_choice else PLAIN_DEV
    return of_logits(args, members, best_alone, AVERAGES["logits"], scored_on=scored_on)


def weighted(args: argparse.Namespace, members: list[Member]) -> Ensemble:
    """Weights fitted on one half of dev; all scores, including the runs', are on the other half."""
    must_share(args, members)
    for name in tasks_of(members):
        rows = len(having(members, name)[0].splits[name]["dev"].ids)
        if rows < 4:
            raise InputError(
                f"--method weighted needs four dev rows, two to fit on and two to score, found {rows} of {name}. "
                "Use --method mean."
            )
    warn("the dev files contain all rows, including those the weights were fitted on: report the scores below.")
    pool, part = AVERAGES[args.average], partial(halves, seed=args.seed)
    scored_on = "the half of dev that no weight was fitted on"
    return of_logits(args, members, partial(greedy_weights, pool=pool), pool, part, scored_on)


def must_share(args: argparse.Namespace, members: list[Member]) -> None:
    if all(len(having(members, name)) == 1 for name in tasks_of(members)):
        raise InputError(
            f"--method {args.method} needs a task that two of the runs have, found none. Use --method best, which "
            "takes each task from its own run, or soup."
        )


def of_logits(
    args: argparse.Namespace,
    members: list[Member],
    weigh: Weigh,
    pool: Pool,
    part: Part = all_rows,
    scored_on: str = PLAIN_DEV,
) -> Ensemble:
    """Weigh the runs on dev, task by task, and pool their logits of every split."""
    combined = Ensemble({}, {}, {}, scored_on, flags_of_ensemble(args, members))
    for name in tasks_of(members):
        task, those = TASKS[name], having(members, name)
        dev = those[0].splits[name]["dev"]
        known, combined.rows[name] = part(dev.ids)
        weights = weigh(task, stacked(those, name, "dev")[:, known], dev.labels[known])
        combined.weights[name] = {m.folder: float(w) for m, w in zip(those, weights, strict=True)}
        combined.predictions[name] = {}
        for split in common_splits(name, those):
            logits = pooled(pool, task, stacked(those, name, split), weights)
            of_first = those[0].splits[name][split]
            combined.predictions[name][split] = of_first._replace(logits=logits, values=decoded(task, logits))
    return combined


def stacked(members: list[Member], task: str, split: str) -> np.ndarray:
    """(M, B, C)"""
    return np.stack([member.splits[task][split].logits for member in members])


def flags_of_ensemble(args: argparse.Namespace, members: list[Member]) -> argparse.Namespace:
    """The script's own flags, with the tasks and data files as a run names them."""
    names = tasks_of(members)
    files = {f"{n}_{s}": having(members, n)[0].flags[f"{n}_{s}"] for n in names for s in ("dev", "test")}
    return argparse.Namespace(**vars(args) | {"tasks": names} | files)


def soup(args: argparse.Namespace, members: list[Member]) -> Ensemble:
    """One model whose weights are the mean of the runs': the uniform soup of Wortsman et al. 2022 (arXiv:2203.05482).

    A tensor that only some runs have, such as a task's head, is the mean over those runs. So single-task runs give the
    model of Tlemcani & Sohn ("MinBERT and Downstream Tasks"), figure 2: one encoder, the mean of the three encoders,
    and each task's own head.
    """
    flags = flags_of_soup(args, members)
    precision = Precision(flags.precision, choose_device(args.use_gpu, flags.precision))
    tokenizer = multitask_build.build_tokenizer(flags)
    other_tasks = (part for name in TASKS if name not in flags.tasks for part in MultitaskBERT.parts_of(name))
    left_out = (*MultitaskBERT.TRAINING_ONLY, *other_tasks)
    tensors = mean_tensors([member.folder / "model.safetensors" for member in members], left_out)
    model = multitask_build.build_model(flags).to(precision.device)
    load_checkpoint_state(model, tensors, members[0].folder)

    def save(run: Run) -> None:
        save_best(model, run)
        tokenizer.save_pretrained(run.folder)

    combined = Ensemble({}, {}, {}, PLAIN_DEV, flags, save)
    for name, splits in multitask_build.load_splits(flags, tokenizer, multitask_flags.SCORED).items():
        those = having(members, name)
        for split, rows in splits.items():
            if rows.ids != those[0].splits[name][split].ids:
                again = f"multitask_classifier.py --predict_only --run {those[0].folder}"
                raise InputError(f"{those[0].folder}: its logits of {name} {split} belong to other rows. Run {again}")
        combined.weights[name] = {member.folder: 1 / len(those) for member in those}
        combined.predictions[name] = {s: predict(model, x, flags.eval_batch_size, precision) for s, x in splits.items()}
        combined.rows[name] = np.arange(len(splits["dev"]))
    return combined


# The flags that a soup's runs must have in common, since they decide what the weights mean.
ENCODER_FLAGS = ("model", "keep_layers", "max_length", "symmetric", "adapter", "own_layers", "feature", "pos_tagger")
BRANCH_FLAGS = ("pooling", "head", "pairing")


def flags_of_soup(args: argparse.Namespace, members: list[Member]) -> argparse.Namespace:
    """The first run's flags, and for each task those of the first run that has it."""
    given = {member.folder: multitask_flags.of_run(member.folder, []) for member in members}
    merged = argparse.Namespace(**vars(given[members[0].folder]))
    for key in ENCODER_FLAGS:
        must_agree(f"--{key}", {folder: getattr(flags, key) for folder, flags in given.items()})
    merged.tasks = merged.train_tasks = tasks_of(members)
    pairs = {f: flags for f, flags in given.items() if any(TASKS[n].is_pair for n in flags.tasks)}
    shares = must_agree("--share_pair_layer", {folder: flags.share_pair_layer for folder, flags in pairs.items()})
    merged.share_pair_layer = bool(shares)
    for name in merged.tasks:
        owners = {member.folder: given[member.folder] for member in having(members, name)}
        of_task = {k: v for k, v in vars(next(iter(owners.values()))).items() if k.startswith(f"{name}_")}
        for what in (w for w in BRANCH_FLAGS if f"{name}_{w}" in of_task):
            values = {f: getattr(multitask_flags.branches(flags)[name], what) for f, flags in owners.items()}
            of_task[f"{name}_{what}"] = must_agree(f"--{name}_{what}", values)
        of_task |= {f"{name}_{s}_out": str(args.predictions / f"{name}-{s}-output.csv") for s in ("dev", "test")}
        vars(merged).update(of_task)
        check_files(having(members, name)[0], name)
    merged.weighting, merged.task_weights = "equal", None  # a matter of training, as are the tensors `weighting.*`
    new = {key: getattr(args, key) for key in ("members", "method", "runs", "name", "predictions", "use_gpu")}
    vars(merged).update(new)
    return merged


def must_agree(flag: str, values: dict[Path, Any]) -> Any:
    """The value of a flag that must be the same in all these runs; None if there are no runs."""
    first = next(iter(values), None)
    for folder, value in values.items():
        if value != values[first]:
            raise InputError(
                f"--method soup needs runs with the same encoder and the same heads, found {flag} {values[first]} in "
                f"{first} and {value} in {folder}. Choose runs that agree, or use --method mean."
            )
    return values.get(first)


def check_files(member: Member, task: str) -> None:
    """Refuse data files that changed: a soup reads them again, and its runs were scored on the old ones."""
    for split in ("dev", "test"):
        path = Path(member.flags[f"{task}_{split}"])
        if not path.is_file():
            raise InputError(
                f"{path}: must be where {member.folder} read it, found no such file. Run this from the same directory."
            )
        if sha256_of(path) != hash_of(member, task, split):
            raise InputError(f"{path}: must be as {member.folder} read it, found another sha256. Restore the file.")


def mean_tensors(paths: list[Path], left_out: tuple[str, ...]) -> dict[str, Tensor]:
    """The mean of the files, tensor by tensor, so that they need not fit into memory. left_out: prefixes to skip."""
    with contextlib.ExitStack() as stack:
        files = {path: stack.enter_context(open_weights(path)) for path in paths}
        names = {path: set(file.keys()) for path, file in files.items()}
        means: dict[str, Tensor] = {}
        for name in sorted(n for n in set().union(*names.values()) if not n.startswith(left_out)):
            those = [path for path in paths if name in names[path]]
            if name.startswith("bert.") and len(those) < len(paths):
                (lacking, *_) = (path for path in paths if path not in those)
                raise InputError(f"{lacking}: must have {name}, as {those[0]} does. Choose runs with the same encoder.")
            tensors = [files[path].get_tensor(name) for path in those]
            for path, tensor in zip(those, tensors, strict=True):
                if tensor.shape != tensors[0].shape:
                    shapes = f"{tuple(tensor.shape)}, not {tuple(tensors[0].shape)} as in {those[0]}"
                    raise InputError(f"{path}: {name} must have one shape in all runs, found {shapes}. Choose others.")
            means[name] = torch.stack(tensors).double().mean(dim=0).to(tensors[0].dtype)
    return means


def open_weights(path: Path) -> Any:
    try:
        read_safetensors(path)  # verifies its checksum
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{path}: not a complete weights file ({error}). Train the run again.") from error


METHODS: dict[str, Callable[[argparse.Namespace, list[Member]], Ensemble]] = {
    "mean": mean,
    "best": best,
    "weighted": weighted,
    "vote": vote,
    "soup": soup,
}


# --- report and files -------------------------------------------------------------------------------------------------

Scores = dict[str, dict[str, float]]  # by run, then by task


def all_scores(members: list[Member], combined: Ensemble, folder: Path) -> Scores:
    """The scores of the runs and, last, of the ensemble, on the same dev rows."""
    given = {str(m.folder): {n: m.splits[n]["dev"] for n in combined.rows if n in m.splits} for m in members}
    given[str(folder)] = {name: splits["dev"] for name, splits in combined.predictions.items()}

    def of_rows(name: str, dev: Predictions) -> float:
        rows = combined.rows[name]
        return TASKS[name].predicts.score(dev.values[rows], dev.labels[rows])

    return {run: {name: of_rows(name, dev) for name, dev in of_run.items()} for run, of_run in given.items()}


def print_table(scores: Scores, combined: Ensemble, method: str) -> None:
    names = list(combined.rows)
    sizes = ", ".join(f"{name} {len(rows)}" for name, rows in combined.rows.items())
    print(f"{method} of {len(scores) - 1} runs | scores on {combined.scored_on} | rows: {sizes}")
    width = max(map(len, scores))
    print(f"{'run':{width}}" + "".join(f"  {name:>7}" for name in [*names, "overall"]))
    for run, of_run in scores.items():
        cells = [f"{of_run[name]:.3f}" if name in of_run else "-" for name in names]
        cells.append(f"{overall(of_run):.4f}" if len(of_run) == len(names) else "-")
        print(f"{run:{width}}" + "".join(f"  {cell:>7}" for cell in cells))
    for name, weights in combined.weights.items():
        if len(set(weights.values())) > 1 or len(weights) < len(scores) - 1:
            print(f"{name}: " + ", ".join(f"{weight:.2f} {run}" for run, weight in weights.items() if weight > 0))


def write_files(args: argparse.Namespace, members: list[Member], combined: Ensemble, scores: Scores) -> None:
    """Write the run's directory, then the prediction files."""
    folder = args.runs / args.name
    hashes = {
        str(member.flags[f"{name}_{split}"]): hash_of(member, name, split)
        for name in combined.predictions
        for member in having(members, name)[:1]
        for split in ("dev", "test")
    }
    with Run.create(folder, combined.flags, hashes) as run:
        combined.save(run)
    own = scores[str(folder)]
    write_text(folder / "dev.json", json.dumps(own | {"overall": overall(own)}) + "\n")
    weights = {name: {str(run): weight for run, weight in of.items()} for name, of in combined.weights.items()}
    facts = {"method": args.method, "scored_on": combined.scored_on, "scores": scores, "weights": weights}
    write_text(folder / "ensemble.json", json.dumps(facts, indent=2) + "\n")
    for name, splits in combined.predictions.items():
        for split, predictions in splits.items():
            write_logits(folder / f"{name}-{split}.npz", predictions)
            if split != "train":
                path = args.predictions / f"{name}-{split}-output.csv"
                data = str(getattr(combined.flags, f"{name}_{split}"))
                write_predictions(path, TASKS[name], predictions, Source(folder, Path(data), hashes.get(data)))
                print(f"{name}: wrote {path}, {len(predictions.ids)} rows", flush=True)


# --- flags ------------------------------------------------------------------------------------------------------------


@functools.cache
def parser() -> ArgumentParser:
    new = ArgumentParser(
        "ensemble.py",
        "Combine runs of multitask_classifier.py, and write the predictions of the ensemble.",
        "python ensemble.py runs/a runs/b runs/c --method mean --name ens",
        usage="RUN RUN ... [flags]",
        sections=("most used", "files"),
    )
    add = new.section("most used")
    add("members", type=Path, nargs="+", metavar="RUN", needs=ALWAYS, help="directories of runs, at least two")
    add("--method", choices=list(METHODS), default="mean", needs=ALWAYS,
        help="mean of the outputs, best run per task, weights fitted on half of dev, majority vote, or mean of "
        "the weights (soup)")  # fmt: skip
    add("--average", choices=list(AVERAGES), default="probabilities", needs=chosen("--method", "mean", "weighted"),
        help="mean and weighted: what is averaged")  # fmt: skip
    add("--seed", type=number(int, 0, 2**31), default=11711, needs=chosen("--method", "weighted"), metavar="N",
        help="weighted: seed of the random split of dev")  # fmt: skip
    add("--tasks", nargs="+", choices=sorted(TASKS), needs=ALWAYS, help="combine only these (default: all of the runs)")
    add("--use_gpu", action=Switch, needs=chosen("--method", "soup"), help="soup: predict on CUDA")
    add("--name", needs=ALWAYS, help="name of the ensemble's directory (default: made from the time)")
    shared_flags.add_predictions(new)
    new.section("files")(
        "--runs", type=Path, default=Path("runs"), needs=ALWAYS, help="parent of the ensemble's directory"
    )
    return new


def complete(args: argparse.Namespace) -> argparse.Namespace:
    return argparse.Namespace(**vars(args) | {"name": shared_flags.run_name(args, args.method)})


def get_args(argv: list[str] | None = None) -> argparse.Namespace:
    return parser().parse(argv, complete)


def main() -> None:
    args = get_args()
    folder = args.runs / args.name
    Run.must_be_new(folder)
    members = read_members(args)
    writable_directory(args.predictions, "--predictions")
    combined = METHODS[args.method](args, members)
    if combined.scored_on == PLAIN_DEV and any(chosen_on_dev(member.folder) for member in members):
        combined = combined._replace(scored_on=INHERITED)
    scores = all_scores(members, combined, folder)
    print_table(scores, combined, args.method)
    write_files(args, members, combined, scores)
    print(f"{combined.scored_on}: {score_line(scores[str(folder)])} | {folder}")


if __name__ == "__main__":
    run_script(main)
