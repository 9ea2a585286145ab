"""A hyper-parameter search on Optuna: the search space, and the methods that choose the next trial.

storage.py keeps the study and lets several workers share it, trials.py runs the trials; sweep.py is the script, which
imports them after its flags are parsed.
"""

import argparse
import itertools
import json
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

import multitask_flags
from flags import Switch
from losses import losses_in
from multitask_flags import SCORED
from tasks import TASKS
from utils import InputError, sha256_of

Flags = dict[str, list[str]]  # by destination: a flag and its values, as on a command line
Point = dict[str, Any]  # a value for every parameter of the search
Space = dict[str, BaseDistribution]
Trials = Sequence[FrozenTrial]  # those of a study, as of one moment

# --- the search space -------------------------------------------------------------------------------------------------

# Flags that belong to the sweep or to the machine, and flags between whose values scores cannot be compared.
NEVER_SEARCHED = {"tasks", "train_tasks", "data", "predictions", "runs", "name", "resume", "predict_only", "run"}
NEVER_SEARCHED |= {"dry_run", "use_gpu", "strict_data", "repeated_ids", "teacher"}
RANGE = re.compile(r"[^,/\\]*\.\.[^,/\\]*")  # and not a path such as ../checkpoint
SWITCH = ("on", "off")  # the values of a flag that takes none


def action_of(key: str) -> argparse.Action:
    """The flag --key of multitask_classifier.py, if a search may vary it."""
    action = multitask_flags.parser().flags.get(f"--{key}")
    if action is None:
        raise InputError(
            f"--search {key}: must be a flag of multitask_classifier.py, which has no --{key}. See its --help."
        )
    if action.dest == "seed":
        raise InputError("--search seed: a lucky seed is not a better model. Average over several: --seeds 1 2 3.")
    if action.dest in NEVER_SEARCHED | multitask_flags.file_flags():
        raise InputError(f"--search {key}: --{key} must be the same for all trials. Give it as a flag.")
    return action


def flags_of(key: str, value: Any) -> list[str]:
    """The value as a flag of multitask_classifier.py."""
    if isinstance(action_of(key), Switch):
        return [f"--{key}" if value == "on" else f"--no-{key}"]
    return [f"--{key}", text_of(value)]


def text_of(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)  # the recipe will say exactly what was trained


def parsed(key: str, value: Any) -> Any:
    """The value as multitask_classifier.py reads it."""
    if isinstance(action_of(key), Switch) and value not in SWITCH:
        raise InputError(f"--search {key}: --{key} is on or off, found {value!r}. Write {key}=on,off.")
    return getattr(multitask_flags.parser().parse_args(flags_of(key, value)), action_of(key).dest)


def read_space(terms: list[str]) -> Space:
    """Parse `key=A,B,C`, a list, `key=LOW..HIGH`, a range, and `key=LOW..HIGH:log`, a range on a logarithmic scale."""
    space: Space = {}
    for term in terms:
        key, equals, values = term.partition("=")
        if not (key and equals and values):
            raise InputError(
                f"--search must be KEY=A,B,C or KEY=LOW..HIGH[:log], found {term!r}. Write for example lr=1e-4,1e-5."
            )
        if action_of(key).dest in {action_of(other).dest for other in space}:
            raise InputError(f"--search {term}: --{key} is searched twice. Put all its values into one list.")
        space[key] = _range(key, values) if RANGE.fullmatch(values) else _list(key, values.split(","))
    return space


def _list(key: str, values: list[str]) -> CategoricalDistribution:
    if key.endswith("_loss"):
        for value in values:
            losses_in(value, TASKS[key.removesuffix("_loss")])  # refuses what does not fit
    so_far: list[Any] = []
    for value in values:
        if not value or parsed(key, value) in so_far:
            found = "the same value twice" if value else "an empty value"
            raise InputError(f"--search {key}={','.join(values)}: values must differ, found {found}. Remove it.")
        so_far.append(parsed(key, value))
    return CategoricalDistribution(values)


def _range(key: str, text: str) -> IntDistribution | FloatDistribution:
    ends, _, scale = text.partition(":")
    low, high = (parsed(key, end) for end in ends.split("..", 1))
    kinds = {type(end) for end in (low, high)}
    if scale not in ("", "log") or kinds not in ({int}, {float}) or not low < high or (scale and low <= 0):
        raise InputError(
            f"--search {key}={text}: a range must be LOW..HIGH or LOW..HIGH:log, of numbers, LOW below HIGH and, with "
            "log, above 0. Correct it, or list the values."
        )
    return (IntDistribution if kinds == {int} else FloatDistribution)(low, high, log=bool(scale))


def corners(space: Space) -> Iterator[Point]:
    """Every combination of the listed values; of a range, its ends."""
    sides = [d.choices if isinstance(d, CategoricalDistribution) else (d.low, d.high) for d in space.values()]
    return (dict(zip(space, values, strict=True)) for values in itertools.product(*sides))


# --- command lines ----------------------------------------------------------------------------------------------------


def tokens(flags: Flags) -> list[str]:
    return list(itertools.chain.from_iterable(flags.values()))


def at_point(base: Flags, point: Point) -> Flags:
    """The flags of a trial: those all trials share, and the point's."""
    return base | {action_of(key).dest: flags_of(key, value) for key, value in point.items()}


def score_of(scores: dict[str, float]) -> float:
    """The score by which training selects its best epoch: the overall score of the tasks that train."""
    return scores.get("trained", scores["overall"])


# --- searches ---------------------------------------------------------------------------------------------------------


class FixedPointSampler(BaseSampler):
    """An Optuna sampler that returns a given point."""

    def __init__(self, point: Point):
        self.point = point

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> Space:
        return {}

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, search_space: Space) -> Point:
        return {}

    def sample_independent(self, study: optuna.Study, trial: FrozenTrial, name: str, _: BaseDistribution) -> Any:
        return self.point[name]


class Wait:
    """The answer of a search that has nothing to start until a running trial of another worker ends."""


def settled(trials: Trials) -> list[FrozenTrial]:
    """Trials with a result, including failed ones with a reason; a trial that was killed has none."""
    return [t for t in trials if t.state in (TrialState.COMPLETE, TrialState.PRUNED) or "reason" in t.user_attrs]


def running(trials: Trials) -> list[FrozenTrial]:
    """Trials that other workers are training; storage.py has already failed those whose worker is dead."""
    return [t for t in trials if t.state == TrialState.RUNNING]


def _key(point: Point) -> frozenset:
    return frozenset(point.items())


def _outcomes(trials: Trials) -> dict[frozenset, float]:
    """The score of each point; -inf for a pruned or failed trial."""
    return {
        _key(trial.params): trial.value if trial.state == TrialState.COMPLETE else -math.inf
        for trial in settled(trials)
    }


def _first_free(points: Iterable[Point], trials: Trials) -> BaseSampler | Wait | None:
    """The first point without a result that nobody trains; None if all have one."""
    known, started = _outcomes(trials), {_key(trial.params) for trial in running(trials)}
    left = [point for point in points if _key(point) not in known]
    free = (point for point in left if _key(point) not in started)
    return next(map(FixedPointSampler, free), Wait() if left else None)


def grid(args: argparse.Namespace, trials: Trials) -> BaseSampler | Wait | None:
    """Every combination of the listed values once, the last parameter fastest (Tlemcani & Sohn, section 3.2)."""
    return _first_free(corners(args.space), trials)


def coordinate(args: argparse.Namespace, trials: Trials) -> BaseSampler | Wait | None:
    """One parameter after the other, the others at their best values so far (Ramos & Dalmia, section 4.7).

    A parameter whose turn has not come has its value from the flags, or the first in its list if that is not listed.
    Everything follows from the finished trials, so a study that was stopped continues as if it had never been stopped.
    Several workers share the points of one parameter; the next parameter waits until all of them have a result.
    Deviation: none; the best trial for the first parameter is also one for the second, and is not trained again.
    """
    known, point = _outcomes(trials), starting_point(args)
    for key, listed in args.space.items():
        stage = {value: point | {key: value} for value in listed.choices}
        found = _first_free(stage.values(), trials)
        if found is not None:
            return found
        scores = {value: known[_key(candidate)] for value, candidate in stage.items()}
        if max(scores.values()) > -math.inf:
            point[key] = max(scores, key=scores.get)  # the earlier one in a tie
    return None


def starting_point(args: argparse.Namespace) -> Point:
    given = {key: getattr(args.flags, action_of(key).dest) for key in args.space}
    return {
        key: next((value for value in listed.choices if parsed(key, value) == given[key]), listed.choices[0])
        for key, listed in args.space.items()
    }


def tpe(args: argparse.Namespace, trials: Trials) -> BaseSampler:
    """Tree-structured Parzen estimator (Bergstra et al. 2011, section 4); the first ten trials are random.

    The seed of each trial depends on the number of settled and running ones, so a study that was stopped draws the same
    points, and two workers draw different ones. A running trial counts as a bad one (Optuna's "constant liar"), which
    keeps the workers apart.
    """
    with warnings.catch_warnings(action="ignore"):  # Optuna calls the constant liar experimental
        return TPESampler(seed=args.seeds[0] + len(settled(trials)) + len(running(trials)), constant_liar=True)


# A search returns who chooses the next point. None ends the study.
Search = Callable[[argparse.Namespace, Trials], BaseSampler | Wait | None]
SEARCHES: dict[str, Search] = {"grid": grid, "coordinate": coordinate, "tpe": tpe}


def next_sampler(args: argparse.Namespace, study: optuna.Study) -> BaseSampler | Wait | None:
    """The search's answer, within the limit of --trials.

    The trials are read once: between two reads, another worker's trial could end, and be neither running in the one nor
    settled in the other.
    """
    trials = study.get_trials(deepcopy=False)
    done = len(settled(trials))
    if args.trials is not None and done >= args.trials:
        return None
    if args.trials is not None and done + len(running(trials)) >= args.trials:
        return Wait()
    return SEARCHES[args.method](args, trials)


PRUNERS: dict[str, Callable[[], optuna.pruners.BasePruner]] = {
    "none": optuna.pruners.NopPruner,
    # Golovin et al. 2017: ends a trial below the median of earlier trials at this epoch; the first five are complete.
    "median": optuna.pruners.MedianPruner,
    # Li et al. 2020 (ASHA): after 1, 3, 9, ... epochs, the best third of the trials that got so far continues.
    "halving": lambda: optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3),
}


# --- what identifies a study ------------------------------------------------------------------------------------------

MAY_DIFFER = {"runs", "predictions", "use_gpu", "eval_batch_size"}


def may_differ() -> set[str]:
    """The flags that may change when a study is continued."""
    return MAY_DIFFER | {f"{task}_{split}_out" for task in TASKS for split in SCORED}


def facts_of(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Identifies a study: every setting that can change a trial's score or which trials there are."""
    flags = vars(multitask_flags.parser().parse_args(tokens(args.base)))
    own = {key: getattr(args, key) for key in ("method", "search", "seeds", "pruner")}
    plain = json.loads(json.dumps(own | {k: v for k, v in flags.items() if k not in may_differ()}, default=str))
    return {
        "flags": plain,
        "data_sha256": {str(path): sha256_of(path) for path in multitask_flags.data_files(args.flags)},
    }
