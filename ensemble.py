"""Combines runs of multitask_classifier.py: by their probabilities, their votes or their weights.

    python ensemble.py runs/a runs/b runs/c --method mean --name ens
    python ensemble.py @recipes/stems/average-weights.txt

Runs may cover different tasks; each task is combined over the runs that have it. Reads the runs' logits
(<task>-<split>.npz), prints every run's dev scores beside the ensemble's, and writes the prediction files and a run
directory of the same layout, which a further ensemble or a student (--teacher) reads.

Shapes:  M runs   B rows of a split   C outputs of a task   G classes: 2 for a probability, otherwise C
"""

import argparse
import contextlib
import hashlib
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from base_bert import load_usual_state
from evaluation import overall, predict, read_logits, score_line, write_logits, write_predictions
from multitask_classifier import MultitaskBERT, chosen, flags_of_run, load_splits
from tasks import TASKS, Predictions, Task
from tokenizer import BertTokenizer
from training import save_best
from utils import (
    ArgumentParser,
    InputError,
    Precision,
    Run,
    choose_device,
    number,
    run_script,
    sha256_of,
    warn,
    writable_directory,
    write_text,
)

PLAIN_DEV = "dev"  # what an ensemble is scored on where dev decided nothing
ROUNDS = 25  # of the greedy search for weights, which are therefore multiples of 1/25 or coarser

# --- runs -------------------------------------------------------------------------------------------------------------


class Member(NamedTuple):
    """A run, as far as an ensemble reads it."""

    folder: Path
    flags: dict[str, Any]
    data_sha256: dict[str, str]
    splits: dict[str, dict[str, Predictions]]  # by task, then dev, test and, where it was predicted, train


def read_member(folder: Path, wanted: list[str] | None) -> Member:
    facts = Run.reopen(folder).facts
    flags = facts["args"]
    names = [name for name in TASKS if name in flags.get("tasks", ())]
    if not names or not all(f"{name}_dev" in flags for name in names):
        raise InputError(f"{folder}: must be a run of multitask_classifier.py or ensemble.py. Choose another.")
    splits: dict[str, dict[str, Predictions]] = {}
    for name in (n for n in names if wanted is None or n in wanted):
        paths = {split: folder / f"{name}-{split}.npz" for split in ("dev", "test", "train")}
        there = {split: path for split, path in paths.items() if split != "train" or path.is_file()}
        splits[name] = {s: read_logits(path, TASKS[name], labeled=s != "test") for s, path in there.items()}
    return Member(folder, flags, facts["data_sha256"], splits)


def read_members(args: argparse.Namespace) -> list[Member]:
    if len(args.members) < 2:
        raise InputError(f"an ensemble needs at least two runs, found {args.members[0]} alone. Name another.")
    places = [folder.resolve() for folder in args.members]
    twice = [folder for i, folder in enumerate(args.members) if places[i] in places[:i]]
    if twice:
        raise InputError(f"{twice[0]}: must be named once, found it twice; a second copy adds nothing. Leave it out.")
    members = [read_member(folder, args.tasks) for folder in args.members]
    absent = [name for name in args.tasks or () if not having(members, name)]
    if absent:
        raise InputError(f"--tasks {absent[0]}: must be a task of one of the runs, found it in none. Leave it out.")
    for member in members:
        if scored_on := chosen_on_dev(member.folder):
            warn(f"{member.folder}: fitted or chosen on dev ({scored_on}); expect less on test of what contains it.")
    idle = [member.folder for member in members if not member.splits]
    if idle:
        raise InputError(f"{idle[0]}: must have one of --tasks {' '.join(args.tasks)}, found none. Leave it out.")
    for name in tasks_of(members):
        check_same_data(name, having(members, name))
    return members


def chosen_on_dev(folder: Path) -> str:
    """Of an ensemble whose weights dev decided: on which rows it was scored; empty for any other run."""
    path = folder / "ensemble.json"
    scored_on = json.loads(path.read_text(encoding="utf-8"))["scored_on"] if path.is_file() else PLAIN_DEV
    return "" if scored_on == PLAIN_DEV else scored_on


def having(members: list[Member], task: str) -> list[Member]:
    return [member for member in members if task in member.splits]


def tasks_of(members: list[Member]) -> list[str]:
    return [name for name in TASKS if having(members, name)]


def check_same_data(task: str, members: list[Member]) -> None:
    """Refuses runs whose dev or test rows of a task differ."""
    first, *others = members
    for other in others:
        for split in ("dev", "test"):
            must = f"{other.folder}: must have the {task} {split} rows of {first.folder}, found"
            found = difference(first.splits[task][split], other.splits[task][split])
            if found:
                raise InputError(f"{must} {found}. Train both with the same files.")
            if hash_of(first, task, split) != hash_of(other, task, split):
                raise InputError(f"{must} a file with another sha256. Train both with the same files.")


def difference(expected: Predictions, found: Predictions) -> str:
    """The first row in which two runs' data differ; empty if none does."""
    if len(found.ids) != len(expected.ids):
        return f"{len(found.ids)} rows, not {len(expected.ids)}"
    for i, (theirs, ours) in enumerate(zip(expected.ids, found.ids, strict=True)):
        if ours != theirs:
            return f"id {ours!r} in row {i + 1}, not {theirs!r}"
        if expected.labels is not None and found.labels[i] != expected.labels[i]:
            return f"label {found.labels[i]} of id {ours!r}, not {expected.labels[i]}"
    return ""


def hash_of(member: Member, task: str, split: str) -> str | None:
    return member.data_sha256.get(str(member.flags[f"{task}_{split}"]))


def common_splits(task: str, members: list[Member]) -> list[str]:
    """dev, test and, where every run has predicted the same training rows, train."""
    given = [member.splits[task]["train"] for member in members if "train" in member.splits[task]]
    if not given:
        return ["dev", "test"]
    absent = [str(member.folder) for member in members if "train" not in member.splits[task]]
    problems = [f"{folder} has none" for folder in absent]
    problems += [f"the runs differ: {found}" for found in (difference(given[0], other) for other in given[1:]) if found]
    if problems:
        warn(f"{task}: the training rows are left out, so no student can learn from them; {problems[0]}.")
        return ["dev", "test"]
    return ["dev", "test", "train"]


# --- from logits to probabilities and back ----------------------------------------------------------------------------


def log_probabilities(task: Task, logits: Tensor) -> Tensor:
    """(..., C) -> (..., G). One logit l is the softmax over (0, l), as sigmoid(l) = e^l / (1 + e^l)."""
    if task.kind == "probability":
        logits = torch.cat((torch.zeros_like(logits), logits), dim=-1)
    return F.log_softmax(logits, dim=-1)


def as_logits(task: Task, log_p: Tensor) -> Tensor:
    """The inverse, up to a constant a row: (..., G) -> (..., C)."""
    return log_p[..., 1:] - log_p[..., :1] if task.kind == "probability" else log_p


# --- pools: (task, the runs' logits (M, B, C), weights (M,)) -> logits (B, C) -----------------------------------------

Pool = Callable[[Task, Tensor, Tensor], Tensor]


def mean_of_probabilities(task: Task, logits: Tensor, weights: Tensor) -> Tensor:
    """log sum_m w_m p_m, summed in the log domain, so that a certain run's logit stays finite; numbers: their mean."""
    if task.kind == "number":
        return mean_of_logits(task, logits, weights)
    weighted = log_probabilities(task, logits) + weights.log()[:, None, None]  # (M, B, G)
    return as_logits(task, weighted.logsumexp(dim=0))  # (B, G) -> (B, C)


def mean_of_logits(task: Task, logits: Tensor, weights: Tensor) -> Tensor:
    """sum_m w_m l_m: after the softmax, the geometric mean of the probabilities."""
    mean = torch.tensordot(weights, logits, dims=1)  # (B, C)
    return mean.log_softmax(dim=-1) if task.kind == "category" else mean


def majority(task: Task, logits: Tensor, weights: Tensor) -> Tensor:
    """The class that most runs decode; of a number, the median.

    The mean probability votes too, as one voter who splits its vote: it decides ties and, being below 1, nothing else.
    What comes out is a distribution, of use to a student as well.
    """
    if task.kind == "number":
        return torch.quantile(logits, 0.5, dim=0)  # of an even number of runs, the mean of the middle two
    votes = torch.stack([task.decode(of_run) for of_run in logits]).long()  # (M, B)
    log_p = log_probabilities(task, logits)  # (M, B, G)
    ballots = F.one_hot(votes, log_p.size(-1)).sum(dim=0) + log_p.exp().mean(dim=0)  # (B, G)
    shares = ballots / (len(logits) + 1)
    return as_logits(task, shares.clamp_min(torch.finfo(shares.dtype).tiny).log())  # a share can underflow to zero


AVERAGES: dict[str, Pool] = {"probabilities": mean_of_probabilities, "logits": mean_of_logits}


def pooled(pool: Pool, task: Task, logits: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """In double precision; the logits of a run that counts alone come through as they are."""
    if np.count_nonzero(weights) == 1:
        return logits[weights.argmax()]
    found = pool(task, torch.from_numpy(logits).double(), torch.from_numpy(weights).double())
    return found.float().numpy()


def decoded(task: Task, logits: np.ndarray) -> np.ndarray:
    return task.decode(torch.from_numpy(logits)).numpy()


# --- weights: (task, the runs' logits (M, B, C), labels (B,)) -> (M,), which sum to one -------------------------------

Weigh = Callable[[Task, np.ndarray, np.ndarray], np.ndarray]


def equal_weights(task: Task, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return np.full(len(logits), 1 / len(logits))


def best_alone(task: Task, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """All weight on the run with the highest score, the first of them in a tie."""
    scores = [task.score(decoded(task, of_run), labels) for of_run in logits]
    return np.eye(len(logits))[int(np.argmax(scores))]


def greedy_weights(task: Task, logits: np.ndarray, labels: np.ndarray, pool: Pool) -> np.ndarray:
    """Ensemble selection of Caruana et al. 2004 ("Ensemble Selection from Libraries of Models"), section 2.1.

    Starts with nothing and adds in each round, with replacement, the run whose addition gives the highest score; a
    run's weight is how often it was added, at the round that scored best. Deviations: ties, frequent in accuracies,
    go to the run added least, and between rounds to the later: towards equal weights. No bagging of runs.
    """
    counts, kept, highest = np.zeros(len(logits)), np.zeros(len(logits)), -np.inf
    for _ in range(ROUNDS):
        tried = [counts + one for one in np.eye(len(logits))]
        scores = [task.score(decoded(task, pooled(pool, task, logits, t / t.sum())), labels) for t in tried]
        choice = max(range(len(logits)), key=lambda i: (scores[i], -counts[i]))
        counts = tried[choice]
        if scores[choice] >= highest:
            kept, highest = counts, scores[choice]
    return kept / kept.sum()


# --- parts of dev: ids -> the rows that weights are found on, the rows that are scored --------------------------------

Part = Callable[[list[str]], tuple[np.ndarray, np.ndarray]]


def all_rows(ids: list[str]) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(len(ids)), np.arange(len(ids))


def halves(ids: list[str], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """By a hash of ids and seed: the same rows whatever their order in the file."""
    order = sorted(range(len(ids)), key=lambda i: hashlib.sha256(f"{seed} {ids[i]}".encode()).digest())
    middle = len(ids) // 2
    return np.sort(order[:middle]), np.sort(order[middle:])


# --- methods: (flags, runs) -> Combined -------------------------------------------------------------------------------


class Combined(NamedTuple):
    """What a method makes of the runs; nothing is written yet."""

    predictions: dict[str, dict[str, Predictions]]  # by task and split
    weights: dict[str, dict[Path, float]]  # by task, of each run that has it
    rows: dict[str, np.ndarray]  # by task, those of dev that are scored
    scored_on: str  # which they are, in words
    flags: argparse.Namespace  # for args.json
    save: Callable[[Run], None] = lambda run: None  # writes what else the run's directory needs


def mean(args: argparse.Namespace, members: list[Member]) -> Combined:
    """Of probabilities or logits, each run alike."""
    must_share(args, members)
    return of_logits(args, members, equal_weights, AVERAGES[args.average])


def vote(args: argparse.Namespace, members: list[Member]) -> Combined:
    must_share(args, members)
    return of_logits(args, members, equal_weights, majority)


def best(args: argparse.Namespace, members: list[Member]) -> Combined:
    """Each task by the run with the highest dev score, or by the only one that has it."""
    is_choice = any(len(having(members, name)) > 1 for name in tasks_of(members))
    scored_on = "dev (chosen on dev: expect less on test)" if is_choice else PLAIN_DEV
    return of_logits(args, members, best_alone, mean_of_logits, scored_on=scored_on)


def weighted(args: argparse.Namespace, members: list[Member]) -> Combined:
    """Weights fitted on one half of dev; scores, the runs' too, on the other."""
    must_share(args, members)
    for name in tasks_of(members):
        rows = len(having(members, name)[0].splits[name]["dev"].ids)
        if rows < 4:
            raise InputError(
                f"--method weighted needs four rows of dev, two to fit on and two to score, found {rows} of {name}. "
                "Use --method mean."
            )
    warn("the dev files hold all rows, also those that weights were fitted on: report the scores below, not theirs.")
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
) -> Combined:
    """Weighs the runs task by task on dev and pools what they say of every split."""
    combined = Combined({}, {}, {}, scored_on, flags_of_ensemble(args, members))
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
    """The script's own, with the tasks and data files as a run names them."""
    names = tasks_of(members)
    files = {f"{n}_{s}": having(members, n)[0].flags[f"{n}_{s}"] for n in names for s in ("dev", "test")}
    return argparse.Namespace(**vars(args) | {"tasks": names} | files)


def soup(args: argparse.Namespace, members: list[Member]) -> Combined:
    """One model whose weights are the mean of the runs': the uniform soup of Wortsman et al. 2022 (arXiv:2203.05482).

    A tensor that only some runs have, such as a task's head, is the mean over those. So single-task runs give the
    model of paper 002 (Tlemcani & Sohn), figure 2: one encoder, the mean of the three stems, and each task's own head.
    """
    flags = flags_of_soup(args, members)
    precision = Precision(flags.precision, choose_device(args.use_gpu))
    tokenizer = BertTokenizer.from_pretrained(flags.model, max_length=flags.max_length)
    left_out = tuple(
        f"{part}.{name}." for part in ("heads", "poolers", "adapter.tasks") for name in TASKS if name not in flags.tasks
    )
    tensors = mean_tensors([member.folder / "model.safetensors" for member in members], ("weighting.", *left_out))
    model = MultitaskBERT(flags).to(precision.device)
    load_usual_state(model, tensors, members[0].folder)

    def save(run: Run) -> None:
        save_best(model, run)
        tokenizer.save_pretrained(run.folder)

    combined = Combined({}, {}, {}, PLAIN_DEV, flags, save)
    for name, splits in load_splits(flags, tokenizer, ("dev", "test")).items():
        those = having(members, name)
        for split, rows in splits.items():
            if rows.ids != those[0].splits[name][split].ids:
                again = f"multitask_classifier.py --predict_only --run {those[0].folder}"
                raise InputError(f"{those[0].folder}: its logits of {name} {split} are of other rows. Run {again}")
        combined.weights[name] = {member.folder: 1 / len(those) for member in those}
        combined.predictions[name] = {s: predict(model, x, flags.eval_batch_size, precision) for s, x in splits.items()}
        combined.rows[name] = np.arange(len(splits["dev"]))
    return combined


# What a soup's runs must have in common beside the shapes: it decides what the weights mean.
STEM = ("model", "keep_layers", "max_length", "symmetric", "adapter", "feature", "pos_tagger")
BRANCH = ("pooling", "head", "pairing")


def flags_of_soup(args: argparse.Namespace, members: list[Member]) -> argparse.Namespace:
    """The first run's flags, and for each task those of the first run that has it."""
    given = {member.folder: flags_of_run([], member.folder) for member in members}
    merged = argparse.Namespace(**vars(given[members[0].folder]))
    for key in STEM:
        must_agree(f"--{key}", {folder: getattr(flags, key) for folder, flags in given.items()})
    merged.tasks = merged.train_tasks = tasks_of(members)
    pairs = {f: flags for f, flags in given.items() if any(len(TASKS[n].text_columns) == 2 for n in flags.tasks)}
    shares = must_agree("--share_pair_layer", {folder: flags.share_pair_layer for folder, flags in pairs.items()})
    merged.share_pair_layer = bool(shares)
    for name in merged.tasks:
        owners = {member.folder: given[member.folder] for member in having(members, name)}
        of_task = {k: v for k, v in vars(next(iter(owners.values()))).items() if k.startswith(f"{name}_")}
        for what in (w for w in BRANCH if f"{name}_{w}" in of_task):
            found = {folder: chosen(flags, name, what) for folder, flags in owners.items()}
            of_task[f"{name}_{what}"] = must_agree(f"--{name}_{what}", found)
        of_task |= {f"{name}_{s}_out": str(args.predictions / f"{name}-{s}-output.csv") for s in ("dev", "test")}
        vars(merged).update(of_task)
        check_files(having(members, name)[0], name)
    merged.weighting, merged.task_weights = "equal", None  # a matter of training, as are the tensors `weighting.*`
    new = {key: getattr(args, key) for key in ("members", "method", "runs", "name", "predictions", "use_gpu")}
    vars(merged).update(new)
    return merged


def must_agree(flag: str, found: dict[Path, Any]) -> Any:
    """The value of a flag that is the same in all runs; None of no run."""
    first = next(iter(found), None)
    for folder, value in found.items():
        if value != found[first]:
            raise InputError(
                f"--method soup needs runs of one stem and like branches, found {flag} {found[first]} in {first} and "
                f"{value} in {folder}. Choose runs that agree, or use --method mean."
            )
    return found.get(first)


def check_files(member: Member, task: str) -> None:
    """A soup reads the data anew: it must still be what the runs were scored on."""
    for split in ("dev", "test"):
        path = Path(member.flags[f"{task}_{split}"])
        if not path.is_file():
            raise InputError(f"{path}: must be where {member.folder} read it, found no such file. Start from there.")
        if sha256_of(path) != hash_of(member, task, split):
            raise InputError(f"{path}: must be as {member.folder} read it, found another sha256. Restore the file.")


def mean_tensors(paths: list[Path], left_out: tuple[str, ...]) -> dict[str, Tensor]:
    """Tensor by tensor, so that the files need not fit into memory. left_out: names that start so are not wanted."""
    with contextlib.ExitStack() as stack:
        files = {path: stack.enter_context(open_weights(path)) for path in paths}
        names = {path: set(file.keys()) for path, file in files.items()}
        found: dict[str, Tensor] = {}
        for name in sorted(n for n in set().union(*names.values()) if not n.startswith(left_out)):
            those = [path for path in paths if name in names[path]]
            if name.startswith("bert.") and len(those) < len(paths):
                (lacking, *_) = (path for path in paths if path not in those)
                raise InputError(f"{lacking}: must have {name}, as {those[0]} does. Choose runs of one stem.")
            tensors = [files[path].get_tensor(name) for path in those]
            for path, tensor in zip(those, tensors, strict=True):
                if tensor.shape != tensors[0].shape:
                    shapes = f"{tuple(tensor.shape)}, not {tuple(tensors[0].shape)} as in {those[0]}"
                    raise InputError(f"{path}: {name} must have one shape in all runs, found {shapes}. Choose others.")
            found[name] = torch.stack(tensors).double().mean(dim=0).to(tensors[0].dtype)
    return found


def open_weights(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: not a whole weights file ({error}). Train the run again.") from error


METHODS: dict[str, Callable[[argparse.Namespace, list[Member]], Combined]] = {
    "mean": mean,
    "best": best,
    "weighted": weighted,
    "vote": vote,
    "soup": soup,
}


# --- report and files -------------------------------------------------------------------------------------------------

Scores = dict[str, dict[str, float]]  # by run, then by task


def all_scores(members: list[Member], combined: Combined, folder: Path) -> Scores:
    """The runs' and, last, the ensemble's, on the same rows of dev."""
    given = {str(m.folder): {n: m.splits[n]["dev"] for n in combined.rows if n in m.splits} for m in members}
    given[str(folder)] = {name: splits["dev"] for name, splits in combined.predictions.items()}

    def of_rows(name: str, dev: Predictions) -> float:
        rows = combined.rows[name]
        return TASKS[name].score(dev.values[rows], dev.labels[rows])

    return {run: {name: of_rows(name, dev) for name, dev in of_run.items()} for run, of_run in given.items()}


def print_table(scores: Scores, combined: Combined, method: str) -> None:
    names = list(combined.rows)
    sizes = ", ".join(f"{name} {len(rows)}" for name, rows in combined.rows.items())
    print(f"{method} of {len(scores) - 1} runs | scores on {combined.scored_on} | rows: {sizes}")
    width = max(map(len, scores))
    print(f"{'run':{width}}" + "".join(f"  {name:>7}" for name in [*names, "overall"]))
    for run, found in scores.items():
        cells = [f"{found[name]:.3f}" if name in found else "-" for name in names]
        cells.append(f"{overall(found):.4f}" if len(found) == len(names) else "-")
        print(f"{run:{width}}" + "".join(f"  {cell:>7}" for cell in cells))
    for name, weights in combined.weights.items():
        if len(set(weights.values())) > 1 or len(weights) < len(scores) - 1:
            print(f"{name}: " + ", ".join(f"{weight:.2f} {run}" for run, weight in weights.items() if weight > 0))


def write_files(args: argparse.Namespace, members: list[Member], combined: Combined, scores: Scores) -> None:
    """The run's directory, then the prediction files."""
    folder = args.runs / args.name
    hashes = {
        str(member.flags[f"{name}_{split}"]): hash_of(member, name, split)
        for name in combined.predictions
        for member in having(members, name)[:1]
        for split in ("dev", "test")
    }
    run = Run.create(folder, combined.flags, hashes)
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
                write_predictions(path, TASKS[name], predictions)
                print(f"{name}: wrote {path}, {len(predictions.ids)} rows", flush=True)


# --- flags ------------------------------------------------------------------------------------------------------------


def get_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(prog="ensemble.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("members", type=Path, nargs="+", metavar="RUN", help="a run's directory; two at least")
    add("--method", choices=sorted(METHODS), default="mean", help="best: a run for each task; soup: mean of weights")
    add("--average", choices=sorted(AVERAGES), default="probabilities", help="what mean and weighted take the mean of")
    add("--seed", type=number(int, 0, 2**31), default=11711, help="of the half of dev that weighted fits on")
    add("--tasks", nargs="+", choices=sorted(TASKS), help="combine these only; None: all that a run has")
    add("--use_gpu", action="store_true", help="predict with a soup on CUDA")
    add("--predictions", type=Path, default=Path("predictions"), help="where the prediction files go")
    add("--runs", type=Path, default=Path("runs"), help="where the ensemble's own directory goes")
    add("--name", help="of the ensemble's directory; None: method and time")
    args = parser.parse_args(argv)
    args.name = args.name or f"{args.method}-{time.strftime('%Y%m%d-%H%M%S')}"
    for flag, methods in {"average": ("mean", "weighted"), "seed": ("weighted",), "use_gpu": ("soup",)}.items():
        if getattr(args, flag) != parser.get_default(flag) and args.method not in methods:
            needed = " or ".join(methods)
            raise InputError(f"--{flag} only works with --method {needed}, found {args.method}. Leave --{flag} out.")
    return args


def main() -> None:
    args = get_args()
    folder = args.runs / args.name
    Run.must_be_new(folder)
    members = read_members(args)
    writable_directory(args.predictions, "--predictions")
    combined = METHODS[args.method](args, members)
    scores = all_scores(members, combined, folder)
    print_table(scores, combined, args.method)
    write_files(args, members, combined, scores)
    print(f"{combined.scored_on}: {score_line(scores[str(folder)])} | {folder}")


if __name__ == "__main__":
    run_script(main)
