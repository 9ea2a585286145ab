"""The results of a hyper-parameter search: the table, the plot, and the best trial as a recipe."""

import argparse
import itertools
import math
import statistics
import textwrap
from pathlib import Path
from typing import Any

import optuna
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from study import at_point, score_of, settled, text_of
from utils import InputError, atomic_path, write_text

# --- the table --------------------------------------------------------------------------------------------------------


def best_number(study: optuna.Study) -> int | None:
    """The trial with the highest score, the earlier one in a tie."""
    finished = study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
    return max(finished, key=lambda t: (t.value, -t.number)).number if finished else None


def standard_error(trial: FrozenTrial) -> float | None:
    """The standard error of the mean over the seeds."""
    scores = [score_of(scores) for scores in trial.user_attrs.get("scores", [])]
    return statistics.stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else None


def outcome(trial: FrozenTrial) -> str:
    if trial.state == TrialState.COMPLETE:
        error = standard_error(trial)
        return f"score {trial.value:.4f}" + (f" +- {error:.4f}" if error is not None else "")
    if trial.state == TrialState.PRUNED:
        return f"pruned after epoch {trial.last_step} at {trial.value:.4f}"
    if trial.state == TrialState.RUNNING:
        return "another worker is training it"
    return f"failed: {trial.user_attrs['reason']}" if "reason" in trial.user_attrs else "killed, so repeated"


def ranked(study: optuna.Study) -> list[FrozenTrial]:
    """Finished trials by score, then pruned ones, then the rest."""
    order = {TrialState.COMPLETE: 0, TrialState.PRUNED: 1}
    return sorted(study.trials, key=lambda t: (order.get(t.state, 2), -(t.value or 0), t.number))


def table(study: optuna.Study, args: argparse.Namespace) -> str:
    rows = [["trial", *args.space, *args.flags.tasks, "outcome"]]
    for trial in ranked(study):
        scores = trial.user_attrs.get("scores", [])
        means = [f"{statistics.fmean(s[task] for s in scores):.3f}" if scores else "-" for task in args.flags.tasks]
        params = [text_of(trial.params.get(key, "-")) for key in args.space]  # a killed trial may have none
        rows.append([str(trial.number), *params, *means, textwrap.shorten(outcome(trial), 80, placeholder=" ...")])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(" | ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


# --- the plot ---------------------------------------------------------------------------------------------------------

POINTS = {  # how a trial is drawn, by how it ended
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
    """Plot the score over the trials, then over each parameter; trials without a score are at the bottom."""
    trials, panels = settled(study.trials), 1 + len(args.space)
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
    entries = dict(zip(*reversed(axes[0].get_legend_handles_labels()), strict=True))  # one entry per label
    figure.legend(entries.values(), entries.keys(), loc="outside upper right", ncols=len(entries), frameon=False)
    figure.suptitle(
        f"{args.study.run_prefix}: {args.method}, {len(trials)} trials", x=0.01, ha="left", fontsize="medium"
    )
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=130)


def _places(axis: Axes, distribution: BaseDistribution, values: list[Any]) -> list[float]:
    """The x positions of the values: listed ones side by side, those of a range on its scale."""
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
        bottom = {"transform": axis.get_xaxis_transform()} if trial.state == TrialState.FAIL else {}
        y = 0.03 if bottom else trial.value
        axis.errorbar(x, y, standard_error(trial), linestyle="none", capsize=3, **POINTS[trial.state], **bottom)
        if trial.state == TrialState.COMPLETE and trial.value == best:
            axis.plot(x, y, "o", color="tab:green", markersize=12, markerfacecolor="none", label="best")


# --- the recipe -------------------------------------------------------------------------------------------------------

NOT_IN_RECIPES = {"runs", "predictions", "use_gpu"}  # they depend on the user's machine


def recipe_header(args: argparse.Namespace) -> str:
    return f"# Written by sweep.py: the best trial of {args.study.shown}"


def recipe(study: optuna.Study, args: argparse.Namespace) -> str:
    """The best trial as a file of flags."""
    trial = study.trials[best_number(study)]
    by_seed, many = trial.user_attrs["scores"], len(args.seeds) > 1
    scores = " | ".join(f"{name} {statistics.fmean(s[name] for s in by_seed):.4f}" for name in by_seed[0])
    seeds = " ".join(map(str, args.seeds))
    comment = [
        f"{recipe_header(args)}, trial {trial.number}.",
        f"# Dev: {scores} ({f'mean over the seeds {seeds}' if many else f'seed {seeds}'})",
        f"# The best of {len(settled(study.trials))} trials, chosen on dev: expect a lower score on new data.",
        f"# Searched: --method {args.method} --search {' '.join(args.search)}",
        f"# python multitask_classifier.py @{args.write_recipe}",
    ]
    seed = {} if many else {"seed": ["--seed", seeds]}
    flags = at_point({k: v for k, v in args.base.items() if k not in NOT_IN_RECIPES}, trial.params) | seed
    for line in (line for line in flags.values() if line):
        cut = any(set(value) & set("# \t") or not value for value in line)  # a recipe cannot contain it
        comment.append(f"# Add on the command line: {' '.join(map(repr, line))}" if cut else " ".join(line))
    return "\n".join(comment) + "\n"


def write_results(args: argparse.Namespace, study: optuna.Study) -> None:
    """Print the table, and write the plot and the recipe. On several machines, each does so with the same contents."""
    print(table(study, args))
    number_of_best = best_number(study)
    if number_of_best is None:
        last = f" The last: {outcome(study.trials[-1])}" if study.trials else ""
        raise InputError(f"--study {args.study.shown}: no trial finished, so none is the best.{last}")
    plot(study, args, args.study.plot)
    write_text(args.write_recipe, recipe(study, args))
    best = study.trials[number_of_best]
    print(f"best: trial {best.number}, {outcome(best)}; chosen on dev, so expect a lower score on new data")
    print(f"wrote {args.study.plot} and {args.write_recipe}")
