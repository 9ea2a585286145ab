"""Hyper-parameter search on Optuna: every trial is a run of multitask_classifier.py; a killed study goes on.

    python sweep.py --method coordinate --search lr=1e-4,1e-5 hidden_dropout_prob=.2,.3 -- @recipes/robust/7-final.txt
    python sweep.py @recipes/robust/search.txt --use_gpu
    python sweep.py --method tpe --trials 30 --search lr=1e-6..1e-4:log epochs=1..5 -- @recipes/best.txt --pruner median

Flags that are not listed here are those of multitask_classifier.py, the same for all trials. The same command goes on
with a study that was stopped. Prints a line a trial and a table, and writes a plot and the best trial as a recipe.
"""

import argparse
import contextlib
import io
import itertools
import json
import math
import re
import sqlite3
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

import losses
import multitask_classifier
from datasets import read_examples
from evaluation import read_logits
from multitask_classifier import data_files, data_paths, train_multitask
from tasks import TASKS
from tokenizer import BertTokenizer
from utils import (
    ArgumentParser,
    InputError,
    atomic_path,
    choose_device,
    number,
    run_script,
    sha256_of,
    writable_directory,
    write_text,
)

Flags = dict[str, list[str]]  # by destination: a flag and its values, as on a command line
Point = dict[str, Any]  # a value for every parameter of the search
Space = dict[str, BaseDistribution]

# --- the search space -------------------------------------------------------------------------------------------------

# What belongs to the sweep or to the user's machine, and what scores of trials could not be compared over.
NEVER_SEARCHED = {"tasks", "train_tasks", "data", "predictions", "runs", "name", "resume", "predict_only", "run"}
NEVER_SEARCHED |= {"dry_run", "use_gpu", "strict_data", "repeated_ids", "teacher"}
NEVER_SEARCHED |= {f"{task}_{split}" for task in TASKS for split in ("train", "dev", "test", "dev_out", "test_out")}
RANGE = re.compile(r"[^,/\\]*\.\.[^,/\\]*")  # and not a path such as ../checkpoint
SWITCH = ("on", "off")  # the values of a flag that takes none
ACTIONS = multitask_classifier.build_parser()._option_string_actions  # all its flags, with what argparse knows of them


def action_of(key: str) -> argparse.Action:
    """The flag --key of multitask_classifier.py, if a search may vary it."""
    action = ACTIONS.get(f"--{key}")
    if action is None or action.dest == "help":
        raise InputError(
            f"--search {key}: must be a flag of multitask_classifier.py, which has no --{key}. See its --help."
        )
    if action.dest == "seed":
        raise InputError("--search seed: the luckiest seed is no better model. Take the mean over some: --seeds 1 2 3.")
    if action.dest in NEVER_SEARCHED:
        raise InputError(f"--search {key}: --{key} must be the same for all trials. Give it as a flag.")
    return action


def flags_of(key: str, value: Any) -> list[str]:
    """A value as multitask_classifier.py's flag."""
    if action_of(key).nargs == 0:
        return [f"--{key}"] if value == "on" else []
    return [f"--{key}", text_of(value)]


def text_of(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)  # what is trained is what the recipe will say


def parsed(key: str, value: Any) -> Any:
    """The value as multitask_classifier.py reads it; its parser ends the script where it cannot."""
    if action_of(key).nargs == 0 and value not in SWITCH:
        raise InputError(f"--search {key}: --{key} is on or off, found {value!r}. Write {key}=on,off.")
    return getattr(multitask_classifier.build_parser().parse_args(flags_of(key, value)), action_of(key).dest)


def read_space(terms: list[str]) -> Space:
    """`key=A,B,C` is a list, `key=LOW..HIGH` a range, `key=LOW..HIGH:log` one of which every decade gets its share."""
    space: Space = {}
    for term in terms:
        key, equals, values = term.partition("=")
        if not (key and equals and values):
            raise InputError(f"--search must be KEY=A,B,C or KEY=LOW..HIGH[:log], found {term!r}.")
        if action_of(key).dest in {action_of(other).dest for other in space}:
            raise InputError(f"--search {term}: --{key} is searched twice. Put all its values into one list.")
        space[key] = _range(key, values) if RANGE.fullmatch(values) else _list(key, values.split(","))
    return space


def _list(key: str, values: list[str]) -> CategoricalDistribution:
    if key.endswith("_loss"):
        for name in (name for value in values for name in losses.names_in(value) if name not in losses.LOSSES):
            known = ", ".join(sorted(losses.LOSSES))
            raise InputError(f"--search {key}: a loss must be one of {known}, found {name!r}. Choose one.")
    seen: list[Any] = []
    for value in values:
        if not value or parsed(key, value) in seen:
            found = "the same value twice" if value else "an empty value"
            raise InputError(f"--search {key}={','.join(values)}: values must differ, found {found}. Leave it out.")
        seen.append(parsed(key, value))
    return CategoricalDistribution(values)


def _range(key: str, text: str) -> IntDistribution | FloatDistribution:
    ends, _, scale = text.partition(":")
    low, high = (parsed(key, end) for end in ends.split("..", 1))
    kinds = {type(end) for end in (low, high)}
    if scale not in ("", "log") or kinds not in ({int}, {float}) or not low < high or (scale and low <= 0):
        raise InputError(
            f"--search {key}={text}: a range must be LOW..HIGH or LOW..HIGH:log, of numbers, LOW below HIGH and, with "
            "log, above 0. Write it so, or list values."
        )
    return (IntDistribution if kinds == {int} else FloatDistribution)(low, high, log=bool(scale))


def corners(space: Space) -> Iterator[Point]:
    """Every point of the lists; of a range, the ends."""
    sides = [d.choices if isinstance(d, CategoricalDistribution) else (d.low, d.high) for d in space.values()]
    return (dict(zip(space, values, strict=True)) for values in itertools.product(*sides))


# --- searches ---------------------------------------------------------------------------------------------------------


class At(BaseSampler):
    """Optuna's sampler for a point that is known beforehand."""

    def __init__(self, point: Point):
        self.point = point

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> Space:
        return {}

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, search_space: Space) -> Point:
        return {}

    def sample_independent(self, study: optuna.Study, trial: FrozenTrial, name: str, _: BaseDistribution) -> Any:
        return self.point[name]


def settled(study: optuna.Study) -> list[FrozenTrial]:
    """Trials with a result, be it a reason why they failed; those that a kill cut short have none."""
    return [t for t in study.trials if t.state in (TrialState.COMPLETE, TrialState.PRUNED) or "reason" in t.user_attrs]


def _outcomes(study: optuna.Study) -> dict[frozenset, float]:
    """The score by point; a pruned or failed trial has lost."""
    return {
        frozenset(trial.params.items()): trial.value if trial.state == TrialState.COMPLETE else -math.inf
        for trial in settled(study)
    }


def grid(args: argparse.Namespace, study: optuna.Study) -> BaseSampler | None:
    """Every point of the lists once, the last parameter fastest (paper 002, section 3.2)."""
    known = _outcomes(study)
    left = (point for point in corners(args.space) if frozenset(point.items()) not in known)
    return next(map(At, left), None)


def coordinate(args: argparse.Namespace, study: optuna.Study) -> BaseSampler | None:
    """One parameter after the other, the others at the best so far (paper 004, section 4.7: lr, then dropout).

    A parameter whose turn has not come has its value of the flags, or the first of its list where that is not in it.
    The whole course follows from the finished trials, so a stopped study goes on as if it had never been stopped.
    Deviation: none; the paper's best trial of lr is one of those of dropout, and is not trained again.
    """
    known, point = _outcomes(study), starting_point(args)
    for key, listed in args.space.items():
        stage = {value: point | {key: value} for value in listed.choices}
        for candidate in stage.values():
            if frozenset(candidate.items()) not in known:
                return At(candidate)
        scores = {value: known[frozenset(candidate.items())] for value, candidate in stage.items()}
        if max(scores.values()) > -math.inf:
            point[key] = max(scores, key=scores.get)  # the earlier one in a tie
    return None


def starting_point(args: argparse.Namespace) -> Point:
    given = {key: getattr(args.flags, action_of(key).dest) for key in args.space}
    return {
        key: next((value for value in listed.choices if parsed(key, value) == given[key]), listed.choices[0])
        for key, listed in args.space.items()
    }


def tpe(args: argparse.Namespace, study: optuna.Study) -> BaseSampler:
    """Tree-structured Parzen estimator (Bergstra et al. 2011, section 4); the first ten trials are random.

    Seeded anew for every trial by the number of settled ones: a stopped study draws what it would have drawn.
    """
    return TPESampler(seed=args.seeds[0] + len(settled(study)))


Search = Callable[[argparse.Namespace, optuna.Study], BaseSampler | None]  # who chooses the next point; None: the end
SEARCHES: dict[str, Search] = {"grid": grid, "coordinate": coordinate, "tpe": tpe}
PRUNERS: dict[str, Callable[[], optuna.pruners.BasePruner]] = {
    "none": optuna.pruners.NopPruner,
    # Golovin et al. 2017: below the median of the earlier trials at this epoch; the first five run through.
    "median": optuna.pruners.MedianPruner,
    # Li et al. 2020 (ASHA): after 1, 3, 9, ... epochs the best third of those that came so far goes on.
    "halving": lambda: optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3),
}


# --- the study's file -------------------------------------------------------------------------------------------------

STUDY = "sweep"  # the one study in a file
MAY_DIFFER = {"runs", "predictions", "use_gpu", "eval_batch_size"}
MAY_DIFFER |= {f"{task}_{split}_out" for task in TASKS for split in ("dev", "test")}


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Keeps a second sweep.py off the study; the lock ends with the process, however that ends."""
    writable_directory(path.parent, "the folder of --study")
    with contextlib.closing(sqlite3.connect(path.with_name(f".{path.name}.lock"), timeout=0)) as lock:
        try:
            lock.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError as error:
            raise InputError(
                f"--study {path}: another sweep.py is at work on it. Wait for its end, or give another --study."
            ) from error
        yield


def facts_of(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """By what a study is known: whatever has a say in the score of a point, and in which points come."""
    flags = vars(multitask_classifier.build_parser().parse_args(tokens(args.base)))
    own = {key: getattr(args, key) for key in ("method", "search", "seeds", "pruner")}
    plain = json.loads(json.dumps(own | {k: v for k, v in flags.items() if k not in MAY_DIFFER}, default=str))
    return {"flags": plain, "data_sha256": {str(path): sha256_of(path) for path in data_files(args.flags)}}


def open_study(args: argparse.Namespace) -> optuna.Study:
    """The study in the file, or a new one; a file that is anything else is refused and left alone."""
    path, facts = args.study, facts_of(args)
    if not path.exists():
        _create_study(path, facts)
    _check_database(path)
    try:
        storage = optuna.storages.RDBStorage(f"sqlite:///{path}")
        study = optuna.load_study(study_name=STUDY, storage=storage, pruner=PRUNERS[args.pruner]())
    except (RuntimeError, optuna.exceptions.OptunaError) as error:
        reason = str(error).splitlines()[0][:200]
        raise InputError(f"--study {path}: Optuna cannot read it ({reason}). Give another --study.") from error
    _must_match(path, study.user_attrs["facts"], facts)
    for trial in study.get_trials(states=[TrialState.RUNNING]):  # cut short by a kill: no result, so it comes again
        study.tell(trial.number, state=TrialState.FAIL)
    return study


def _create_study(path: Path, facts: dict[str, Any]) -> None:
    """Whole or not at all, so that a kill leaves no half-made study."""
    if path.with_suffix(".png").exists():
        raise InputError(
            f"{path.with_suffix('.png')}: the plot of a new study would go there, but the file exists. "
            "Move it, or give another --study."
        )
    with atomic_path(path) as temporary:
        storage = optuna.storages.RDBStorage(f"sqlite:///{temporary}")
        optuna.create_study(study_name=STUDY, storage=storage, direction="maximize").set_user_attr("facts", facts)
        storage.remove_session()
        storage.engine.dispose()


def _check_database(path: Path) -> None:
    remedy = "It is left as it is; give another --study."
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True)) as database:
            (sound,) = database.execute("PRAGMA quick_check").fetchone()
            names = [name for (name,) in database.execute("SELECT study_name FROM studies")]
            keys = [key for (key,) in database.execute("SELECT key FROM study_user_attributes")]
    except sqlite3.DatabaseError as error:
        raise InputError(f"--study {path}: must be a study's database, but {error}. {remedy}") from error
    if sound != "ok":
        raise InputError(f"--study {path}: must be a whole database, but it is damaged. {remedy}")
    if names != [STUDY] or keys != ["facts"]:
        raise InputError(f"--study {path}: must be a study of sweep.py, found one of another program. {remedy}")


def _must_match(path: Path, then: dict[str, dict[str, Any]], now: dict[str, dict[str, Any]]) -> None:
    def shown(value: Any) -> str:
        return " ".join(map(str, value)) if isinstance(value, list) else str(value)

    flags, remedy = then["flags"], "or another --study."
    other = [key for key, value in now["flags"].items() if key not in flags or flags[key] != value]
    if other:
        parts = [f"--{key} {shown(flags.get(key))} (now {shown(now['flags'][key])})" for key in other]
        raise InputError(f"--study {path}: was started with {', '.join(parts)}. Give the same flags, {remedy}")
    changed = [name for name, found in now["data_sha256"].items() if then["data_sha256"].get(name) != found]
    if changed:
        raise InputError(f"--study {path}: {', '.join(changed)} changed since. Give the same data, {remedy}")


# --- trials -----------------------------------------------------------------------------------------------------------


def tokens(flags: Flags) -> list[str]:
    return list(itertools.chain.from_iterable(flags.values()))


def at_point(base: Flags, point: Point) -> Flags:
    return base | {action_of(key).dest: flags_of(key, value) for key, value in point.items()}


def score_of(scores: dict[str, float]) -> float:
    """By which training chose its best epoch: the overall score of what trains."""
    return scores.get("trained", scores["overall"])


def run_names(args: argparse.Namespace, trial: int) -> dict[int, str]:
    """By seed."""
    ends = {seed: f"-seed{seed}" if len(args.seeds) > 1 else "" for seed in args.seeds}
    return {seed: f"{args.study.stem}-{trial}{end}" for seed, end in ends.items()}


def train(args: argparse.Namespace, trial: optuna.Trial) -> list[dict[str, float]]:
    """Dev scores by seed. The first seed's epochs are what the pruner sees."""

    found = []

    def report(epoch: int, scores: dict[str, float]) -> None:
        trial.report(score_of(scores), epoch)
        if epoch < flags.epochs and trial.should_prune():  # after its last epoch there is nothing to save
            raise optuna.TrialPruned

    for seed, name in run_names(args, trial.number).items():
        own = {"seed": ["--seed", str(seed)], "name": ["--name", name]}
        flags = multitask_classifier.get_args(tokens(at_point(args.base, trial.params) | own))
        watch = {} if found else {"on_epoch": report}
        with contextlib.nullcontext() if args.verbose else contextlib.redirect_stdout(io.StringIO()):
            found.append(train_multitask(flags, **watch))
    return found


def trained_before(trial: optuna.Trial, study: optuna.Study) -> FrozenTrial | None:
    """A finished trial of the same flags: tpe comes back to points of lists."""
    wanted = {key: text_of(value) for key, value in trial.params.items()}
    finished = (t for t in study.trials if t.state == TrialState.COMPLETE)
    return next((t for t in finished if {k: text_of(v) for k, v in t.params.items()} == wanted), None)


def run_trial(args: argparse.Namespace, study: optuna.Study, sampler: BaseSampler) -> FrozenTrial:
    """One trial; what is wrong with it is its result, and the study goes on."""
    for name in run_names(args, len(study.trials)).values():
        if (args.flags.runs / name).exists():
            raise InputError(
                f"{args.flags.runs / name}: the run of the next trial would go there, but it exists, from another "
                "study of that name. Move it, or give another --study or --runs."
            )
    study.sampler = sampler
    trial = study.ask(args.space)
    twin = trained_before(trial, study)
    try:
        scores = twin.user_attrs["scores"] if twin else train(args, trial)
    except optuna.TrialPruned:
        return study.tell(trial, state=TrialState.PRUNED)
    except (InputError, torch.OutOfMemoryError) as error:
        trial.set_user_attr("reason", str(error).splitlines()[0])
        return study.tell(trial, state=TrialState.FAIL)
    trial.set_user_attr("scores", scores)
    return study.tell(trial, statistics.fmean(map(score_of, scores)))


def run_study(args: argparse.Namespace, study: optuna.Study) -> None:
    while args.trials is None or len(settled(study)) < args.trials:
        sampler = SEARCHES[args.method](args, study)
        if sampler is None:
            return
        started = time.monotonic()
        trial = run_trial(args, study, sampler)
        line = [f"trial {trial.number}", *(f"{key} {text_of(value)}" for key, value in trial.params.items())]
        line += [outcome(trial), "best" if trial.number == best_number(study) else "    "]
        print(" | ".join([*line, f"{time.monotonic() - started:.0f} s"]), flush=True)


# --- what came out ----------------------------------------------------------------------------------------------------


def best_number(study: optuna.Study) -> int | None:
    """The trial with the highest score, the earlier one in a tie."""
    finished = study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
    return max(finished, key=lambda t: (t.value, -t.number)).number if finished else None


def standard_error(trial: FrozenTrial) -> float | None:
    """Of the mean over the seeds."""
    scores = [score_of(scores) for scores in trial.user_attrs.get("scores", [])]
    return statistics.stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else None


def outcome(trial: FrozenTrial) -> str:
    if trial.state == TrialState.COMPLETE:
        error = standard_error(trial)
        return f"score {trial.value:.4f}" + (f" +- {error:.4f}" if error is not None else "")
    if trial.state == TrialState.PRUNED:
        return f"pruned after epoch {trial.last_step} at {trial.value:.4f}"
    return f"failed: {trial.user_attrs['reason']}" if "reason" in trial.user_attrs else "stopped, so repeated"


def ranked(study: optuna.Study) -> list[FrozenTrial]:
    """Finished ones by score, then pruned ones, then the rest."""
    order = {TrialState.COMPLETE: 0, TrialState.PRUNED: 1}
    return sorted(study.trials, key=lambda t: (order.get(t.state, 2), -(t.value or 0), t.number))


def table(study: optuna.Study, args: argparse.Namespace) -> str:
    rows = [["trial", *args.space, *args.flags.tasks, "outcome"]]
    for trial in ranked(study):
        found = trial.user_attrs.get("scores", [])
        means = [f"{statistics.fmean(s[task] for s in found):.3f}" if found else "-" for task in args.flags.tasks]
        params = [text_of(trial.params.get(key, "-")) for key in args.space]  # a kill may come before they are drawn
        rows.append([str(trial.number), *params, *means, textwrap.shorten(outcome(trial), 80, placeholder=" ...")])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(" | ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


# --- the plot ---------------------------------------------------------------------------------------------------------

POINTS = {  # what a trial looks like, by how it ended
    TrialState.COMPLETE: {"color": "tab:blue", "marker": "o", "label": "finished"},
    TrialState.PRUNED: {
        "color": "tab:orange",
        "marker": "o",
        "markerfacecolor": "none",
        "label": "pruned, at its last epoch",
    },
    TrialState.FAIL: {"color": "tab:gray", "marker": "x", "label": "failed, no score"},
}


def plot(study: optuna.Study, args: argparse.Namespace, path: Path) -> None:
    """Score over the trials, then by each parameter; trials without a score stand at the foot."""
    trials, panels = settled(study), 1 + len(args.space)
    columns = 2 if panels == 4 else min(3, panels)
    lines = -(-panels // columns)
    figure = Figure(figsize=(4.2 * columns, 3.6 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, sharey=True, squeeze=False).flatten()
    _draw(axes[0], trials, [float(t.number) for t in trials])
    finished = [t for t in trials if t.state == TrialState.COMPLETE]
    highest = list(itertools.accumulate((t.value for t in finished), max))
    axes[0].step([t.number for t in finished], highest, where="post", color="tab:green", zorder=0, label="best so far")
    axes[0].xaxis.get_major_locator().set_params(integer=True)
    axes[0].set_xlabel("trial")
    for axis, (key, distribution) in zip(axes[1:], args.space.items(), strict=False):
        _draw(axis, trials, _places(axis, distribution, [t.params[key] for t in trials]))
        axis.set_xlabel(key)
    for i, axis in enumerate(axes):
        axis.grid(alpha=0.3)
        axis.set_visible(i < panels)
        axis.margins(y=0.08)
        axis.tick_params(labelleft=True)
    for axis in axes[::columns]:
        axis.set_ylabel("score on dev")
    seen = dict(zip(*reversed(axes[0].get_legend_handles_labels()), strict=True))  # one entry for each label
    figure.legend(seen.values(), seen.keys(), loc="outside upper right", ncols=len(seen), frameon=False)
    figure.suptitle(f"{args.study.stem}: {args.method}, {len(trials)} trials", x=0.01, ha="left", fontsize="medium")
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=130)


def _places(axis: Axes, distribution: BaseDistribution, values: list[Any]) -> list[float]:
    """Where the values stand: listed ones side by side, those of a range on its scale."""
    if isinstance(distribution, CategoricalDistribution):
        count = len(distribution.choices)
        axis.set_xticks(range(count), distribution.choices)
        axis.set_xlim(-0.5, count - 0.5)
        return [float(distribution.choices.index(value)) for value in values]
    axis.set_xscale("log" if distribution.log else "linear")
    if isinstance(distribution, IntDistribution) and not distribution.log:
        axis.xaxis.get_major_locator().set_params(integer=True)
    return [float(value) for value in values]


def _draw(axis: Axes, trials: list[FrozenTrial], places: list[float]) -> None:
    best = max((t.value for t in trials if t.state == TrialState.COMPLETE), default=None)
    for trial, x in zip(trials, places, strict=True):
        foot = {"transform": axis.get_xaxis_transform()} if trial.state == TrialState.FAIL else {}
        y = 0.03 if foot else trial.value
        axis.errorbar(x, y, standard_error(trial), linestyle="none", capsize=3, **POINTS[trial.state], **foot)
        if trial.state == TrialState.COMPLETE and trial.value == best:
            axis.plot(x, y, "o", color="tab:green", markersize=12, markerfacecolor="none", label="best")


# --- the recipe -------------------------------------------------------------------------------------------------------

THE_USERS = {"runs", "predictions", "use_gpu"}  # flags that do not belong into a recipe


def recipe_header(args: argparse.Namespace) -> str:
    return f"# Written by sweep.py: the best trial of {args.study}"


def recipe(study: optuna.Study, args: argparse.Namespace) -> str:
    """The best trial as a file of flags."""
    trial = study.trials[best_number(study)]
    found, many = trial.user_attrs["scores"], len(args.seeds) > 1
    scores = " | ".join(f"{name} {statistics.fmean(s[name] for s in found):.4f}" for name in found[0])
    seeds = " ".join(map(str, args.seeds))
    comment = [
        f"{recipe_header(args)}, trial {trial.number}.",
        f"# Dev: {scores} ({f'mean over the seeds {seeds}' if many else f'seed {seeds}'})",
        f"# The best of {len(settled(study))} trials, chosen on dev: expect less of new data, and give the test score.",
        f"# Searched: --method {args.method} --search {' '.join(args.search)}",
        f"# python multitask_classifier.py @{args.write_recipe}",
    ]
    seed = {} if many else {"seed": ["--seed", seeds]}
    flags = at_point({k: v for k, v in args.base.items() if k not in THE_USERS}, trial.params) | seed
    for line in (line for line in flags.values() if line):
        cut = any(set(value) & set("# \t") or not value for value in line)  # a flag file cannot say it
        comment.append(f"# To be added on the command line: {' '.join(map(repr, line))}" if cut else " ".join(line))
    return "\n".join(comment) + "\n"


# --- flags ------------------------------------------------------------------------------------------------------------


def build_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="sweep.py",
        usage="sweep.py --search KEY=VALUES ... [flags] [--] [@recipes/FILE.txt] [flags of multitask_classifier.py]",
        description=__doc__.splitlines()[0],
    )
    add = parser.add_argument
    add("--search", nargs="+", required=True, metavar="KEY=VALUES",
        help="flags to search and their values: lr=1e-4,1e-5 or, for tpe, also lr=1e-6..1e-4:log")  # fmt: skip
    add("--method", choices=sorted(SEARCHES), default="grid", help="who chooses the next values")
    add("--trials", type=number(int, 1, 10**6), help="end when the study has so many; None: when the method ends")
    add("--pruner", choices=sorted(PRUNERS), default="none", help="who ends trials that do badly after an epoch")
    add("--seeds", nargs="+", type=number(int, 0, 2**31), help="train each trial with all, take the mean; None: --seed")
    add("--study", type=Path, default=Path("runs/study.db"), help="the study's file; one that is there goes on")
    add("--write_recipe", type=Path, help="file for the best trial; None: <study>-best.txt beside the study")
    add("--verbose", action="store_true", help="show what every trial prints")
    add("--dry_run", action="store_true", help="two steps of two trials in a temporary directory; nothing is kept")
    return parser


def read_flags(given: list[str]) -> Flags:
    """Flags of multitask_classifier.py by destination; the later one wins."""
    found: Flags = {}
    for token in given:
        flag, equals, value = token.partition("=")
        if flag in ACTIONS:
            last = found[ACTIONS[flag].dest] = [flag, value] if equals else [flag]
        else:
            last.append(token)
    return found


def get_args(argv: list[str] | None = None) -> argparse.Namespace:
    """With the flags of sweep.py: `space`, `base` (what all trials share) and `flags` (the same, parsed)."""
    given = sys.argv[1:] if argv is None else argv
    args, rest = build_parser().parse_known_args([token for token in given if token != "--"])  # it is for the eye only
    args.flags = multitask_classifier.fill_in(multitask_classifier.build_parser().parse_args(rest))
    args.base = read_flags(rest)
    args.space = read_space(args.search)
    if args.seeds and "seed" in args.base:
        raise InputError("--seed and --seeds exclude each other. Give --seeds alone.")
    args.seeds = list(dict.fromkeys(args.seeds or [args.flags.seed]))
    args.write_recipe = args.write_recipe or args.study.with_name(f"{args.study.stem}-best.txt")
    validate(args)
    return args


def validate(args: argparse.Namespace) -> None:
    for key in ("name", "resume", "predict_only", "run"):
        if key in args.base:
            raise InputError(f"--{key} is not for sweep.py, which names runs and goes on by itself. Leave it out.")
    ranges = [key for key, d in args.space.items() if not isinstance(d, CategoricalDistribution)]
    if ranges and args.method != "tpe":
        raise InputError(
            f"--method {args.method} needs lists of values, but {ranges[0]} has a range. "
            f"Write {ranges[0]}=A,B,C, or use --method tpe."
        )
    if args.method == "tpe" and args.trials is None and not args.dry_run:
        raise InputError("--method tpe never ends by itself. Add --trials 30.")
    written = {args.study, args.study.with_suffix(".png"), args.write_recipe}
    if len(written) < 3:
        raise InputError(
            f"--study {args.study}, its plot and --write_recipe {args.write_recipe} must be three files. Rename one."
        )
    refused = []
    for point in itertools.islice(corners(args.space), 100):
        try:
            multitask_classifier.get_args(tokens(at_point(args.base, point)))
            return
        except InputError as error:
            refused.append(error)
    raise InputError(f"no trial could run: {refused[0]}") from refused[0]


def check_inputs(args: argparse.Namespace) -> None:
    """What would make every trial fail shows before the first."""
    choose_device(args.flags.use_gpu)
    if "model" not in args.space:
        BertTokenizer.from_pretrained(args.flags.model)
    for name, split in itertools.product(args.flags.tasks, ("train", "dev", "test")):
        if split == "train" and name not in args.flags.train_tasks:
            continue
        read_examples(
            TASKS[name], data_paths(TASKS[name], args.flags, split), labeled=split != "test",
            strict=args.flags.strict_data, repeated_ids=args.flags.repeated_ids and split == "train",
        )  # fmt: skip
    for name, path in multitask_classifier.teacher_files(args.flags).items():
        read_logits(path, TASKS[name], labeled=False)
    writable_directory(args.flags.predictions, "--predictions")
    writable_directory(args.write_recipe.parent, "the folder of --write_recipe")
    if args.write_recipe.exists():
        try:
            ours = args.write_recipe.read_text(encoding="utf-8").startswith(recipe_header(args) + ",")
        except (OSError, UnicodeDecodeError):
            ours = False
        if not ours:
            raise InputError(
                f"--write_recipe {args.write_recipe}: exists, and is not this study's recipe. Give another."
            )


def dry(args: argparse.Namespace, folder: Path) -> argparse.Namespace:
    """The same sweep, cut short, in a temporary directory."""
    kept = {k: v for k, v in args.base.items() if k not in MAY_DIFFER | {"steps_per_epoch", "epochs"}}
    base = [*tokens(kept), "--dry_run", "--runs", str(folder), "--predictions", str(folder), "--epochs", "1"]
    own = {"study": folder / "study.db", "write_recipe": folder / "best.txt", "trials": 2, "seeds": args.seeds[:1]}
    flags = multitask_classifier.fill_in(multitask_classifier.build_parser().parse_args(base))
    return argparse.Namespace(**vars(args) | own | {"base": read_flags(base), "flags": flags})


def sweep(args: argparse.Namespace) -> None:
    check_inputs(args)
    with alone(args.study):
        study = open_study(args)
        before = len(settled(study))
        print(f"{args.method} search of {', '.join(args.space)} | {args.study}: {before} trials so far", flush=True)
        run_study(args, study)
        print(table(study, args))
        number_of_best = best_number(study)
        if number_of_best is None:
            last = f" The last: {outcome(study.trials[-1])}" if study.trials else ""
            raise InputError(f"--study {args.study}: no trial finished, so none is the best.{last}")
        plot(study, args, args.study.with_suffix(".png"))
        write_text(args.write_recipe, recipe(study, args))
    best = study.trials[number_of_best]
    print(f"best: trial {best.number}, {outcome(best)}; chosen on dev, so expect less of new data")
    print(f"wrote {args.study.with_suffix('.png')} and {args.write_recipe}")


def main() -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    args = get_args()
    if not args.dry_run:
        sweep(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        sweep(dry(args, Path(folder)))
    print("dry run: two steps of everything went through; nothing was kept.")


if __name__ == "__main__":
    run_script(main)
