"""The search: which points it tries, that a study survives a kill, and its outputs: table, plot, recipe."""

import contextlib
import itertools
import json
import os
import random
import re
import signal
import sqlite3
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import optuna
import pytest
import torch
from conftest import ROOT, Finished, run_script, the_error, write_task_files
from matplotlib.axes import Axes
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState

import multitask_classifier
import multitask_flags
import results
import sweep
from storage import StudyFile
from study import PRUNERS, SEARCHES, next_sampler, read_space, tpe
from trials import read_flags, with_trials
from utils import InputError

pytestmark = pytest.mark.usefixtures("one_thread")

Sweep = Callable[..., Finished]
Score = Callable[[Namespace], float]  # maps a run's flags to its score
# The two stages of Ramos & Dalmia lead to lr 1e-5 (at dropout .3), then to dropout .4. The best of all is elsewhere.
NINE = {
    ("1e-4", ".2"): 0.9, ("1e-4", ".3"): 0.3, ("1e-4", ".4"): 0.2,
    ("1e-5", ".2"): 0.5, ("1e-5", ".3"): 0.6, ("1e-5", ".4"): 0.7,
    ("1e-6", ".2"): 0.1, ("1e-6", ".3"): 0.4, ("1e-6", ".4"): 0.8,
}  # fmt: skip
TWO_LISTS = ["--search", "lr=1e-4,1e-5,1e-6", "hidden_dropout_prob=.2,.3,.4"]
RANGES = ["--search", "lr=1e-6..1e-2:log", "epochs=1..5", "sampler=round_robin,combined", "--trials", "12"]
SHORT_LISTS = ["--search", "lr=1e-4,1e-5", "hidden_dropout_prob=.2,.3,.4"]
OF_METHOD = {"grid": SHORT_LISTS, "coordinate": SHORT_LISTS, "tpe": RANGES}


def of_nine(flags: Namespace) -> float:
    return next(s for (lr, p), s in NINE.items() if (float(lr), float(p)) == (flags.lr, flags.hidden_dropout_prob))


def smooth(flags: Namespace) -> float:
    """Best at lr 1e-4 and three epochs."""
    decades = torch.tensor(flags.lr).log10().item()
    return 0.9 - 0.1 * abs(decades + 4) - 0.02 * abs(flags.epochs - 3)


@pytest.fixture
def run_sweep(
    tiny_checkpoint: Path,
    task_files: Path,
    tmp_path: Path,
    run_main: Callable[..., Finished],
) -> Sweep:
    """Run sweep.py in this process; --study is <name>.db."""

    def run(*given: object, name: str = "s") -> Finished:
        flags = ["--study", tmp_path / f"{name}.db", "--model", tiny_checkpoint, "--data", task_files]
        flags += ["--runs", tmp_path / "runs", "--predictions", tmp_path / "predictions", *given]
        return run_main(sweep, *flags)

    return run


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Callable[[Score], list[Namespace]]:
    """Replace training by a formula. The returned list receives the flags of every run."""

    def replace(score: Score) -> list[Namespace]:
        runs: list[Namespace] = []

        def train(flags: Namespace, on_epoch: Callable = lambda epoch, scores: None) -> dict[str, float]:
            runs.append(flags)
            (flags.runs / flags.name).mkdir(parents=True)
            value = score(flags)
            for epoch in range(1, flags.epochs + 1):
                on_epoch(epoch, {"overall": value * epoch / flags.epochs})
            return {"sst": value, "para": value, "sts": value, "overall": value}

        monkeypatch.setattr(multitask_classifier, "train_multitask", train)
        monkeypatch.setattr(results, "plot", lambda study, args, path: path.touch())  # has a test of its own
        return runs

    return replace


def trials_in(path: Path) -> list[FrozenTrial]:
    return optuna.load_study(study_name="sweep", storage=f"sqlite:///{path}").trials


def points(runs: list[Namespace]) -> list[tuple[float, float]]:
    return [(flags.lr, flags.hidden_dropout_prob) for flags in runs]


# --- which points are tried -------------------------------------------------------------------------------------------


def test_grid_tries_every_point_once_and_finds_the_best(run_sweep: Sweep, trained: Callable, tmp_path: Path) -> None:
    runs = trained(of_nine)
    finished = run_sweep(*TWO_LISTS)
    assert finished.status == 0, finished.err
    assert points(runs) == list(itertools.product((1e-4, 1e-5, 1e-6), (0.2, 0.3, 0.4)))
    assert "best: trial 0, score 0.9000" in finished.out
    assert "--lr 1e-4\n" in (tmp_path / "s-best.txt").read_text()


def test_coordinate_has_the_two_stages_of_the_paper(run_sweep: Sweep, trained: Callable) -> None:
    """Learning rates at the flags' dropout of .3, then dropouts at the best rate. Known points are not repeated."""
    runs = trained(of_nine)
    finished = run_sweep("--method", "coordinate", *TWO_LISTS, "--", "--hidden_dropout_prob", "0.3")
    assert points(runs) == [(1e-4, 0.3), (1e-5, 0.3), (1e-6, 0.3), (1e-5, 0.2), (1e-5, 0.4)]
    assert "best: trial 4, score 0.7000" in finished.out


def test_coordinate_starts_at_the_first_value_if_the_flags_value_is_not_listed(
    run_sweep: Sweep, trained: Callable
) -> None:
    runs = trained(of_nine)
    run_sweep("--method", "coordinate", "--search", "lr=1e-4,1e-6", "hidden_dropout_prob=.4,.2")  # the default is .3
    assert points(runs) == [(1e-4, 0.4), (1e-6, 0.4), (1e-6, 0.2)]


def test_coordinate_continues_from_its_start_if_all_trials_of_a_stage_failed(
    run_sweep: Sweep, trained: Callable
) -> None:
    def score(flags: Namespace) -> float:
        if flags.hidden_dropout_prob == 0.3:
            raise InputError("no.")
        return 0.5

    runs = trained(score)
    run_sweep("--method", "coordinate", *TWO_LISTS, "--lr", "1e-5")
    assert points(runs)[3:] == [(1e-5, 0.2), (1e-5, 0.4)]


def test_tpe_stays_in_its_ranges(run_sweep: Sweep, trained: Callable) -> None:
    runs = trained(smooth)
    run_sweep("--method", "tpe", "--search", "lr=1e-6..1e-2:log", "epochs=1..3", "--trials", "12")
    assert all(1e-6 <= flags.lr <= 1e-2 for flags in runs)
    assert {flags.epochs for flags in runs} == {1, 2, 3}


def test_tpe_with_a_new_seed_for_every_trial_still_learns() -> None:
    """Compared with random search over eight seeds, because the spread of one seed is as large as the gain."""
    space = read_space(["lr=1e-8..1e-1:log", "epochs=1..5"])

    def after_the_random_ones(choose: Callable[[Namespace, list[FrozenTrial]], optuna.samplers.BaseSampler]) -> float:
        scores = []
        for seed in range(0, 8000, 1000):
            study = optuna.create_study(direction="maximize")
            for _ in range(25):
                study.sampler = choose(Namespace(seeds=[seed]), study.trials)
                trial = study.ask(space)
                study.tell(trial, smooth(Namespace(**trial.params)))
            scores += [t.value for t in study.trials[10:]]
        return statistics.fmean(scores)

    def at_random(args: Namespace, found: list[FrozenTrial]) -> optuna.samplers.BaseSampler:
        return optuna.samplers.RandomSampler(seed=args.seeds[0] + len(found))

    assert after_the_random_ones(tpe) > after_the_random_ones(at_random) + 0.03


def test_tpe_trains_no_point_of_lists_twice(run_sweep: Sweep, trained: Callable, tmp_path: Path) -> None:
    runs = trained(of_nine)
    run_sweep("--method", "tpe", "--search", "lr=1e-4,1e-5", "--trials", "6")
    assert sorted(flags.lr for flags in runs) == [1e-5, 1e-4]
    assert {(t.params["lr"], t.value) for t in trials_in(tmp_path / "s.db")} == {("1e-4", 0.3), ("1e-5", 0.6)}


@pytest.mark.parametrize("method", sorted(SEARCHES))
def test_an_interrupted_study_tries_the_same_points_as_an_uninterrupted_one(
    method: str, run_sweep: Sweep, trained: Callable, tmp_path: Path
) -> None:
    score = smooth if method == "tpe" else of_nine
    flags = ["--method", method, *OF_METHOD[method]]
    runs = trained(score)
    run_sweep(*flags, name="uninterrupted")
    expected = [(r.lr, r.hidden_dropout_prob, r.epochs, r.sampler) for r in runs]

    def stops(flags: Namespace) -> float:
        if len(runs) == 4:
            raise KeyboardInterrupt
        return score(flags)

    runs = trained(stops)
    assert run_sweep(*flags).status == 130
    assert not (tmp_path / "s-best.txt").exists()
    first, runs = runs, trained(score)
    assert run_sweep(*flags).status == 0
    assert [(r.lr, r.hidden_dropout_prob, r.epochs, r.sampler) for r in first[:3] + runs] == expected
    states = [t.state for t in trials_in(tmp_path / "s.db")]
    assert states == [TrialState.COMPLETE] * 3 + [TrialState.FAIL] + [TrialState.COMPLETE] * (len(expected) - 3)
    runs.clear()
    assert run_sweep(*flags).status == 0  # the same command once more has nothing left to do
    assert runs == []


def test_a_study_can_be_continued_with_more_trials(run_sweep: Sweep, trained: Callable, tmp_path: Path) -> None:
    runs = trained(of_nine)
    run_sweep(*TWO_LISTS, "--trials", "2")
    assert len(runs) == 2
    assert "2 trials so far" in run_sweep(*TWO_LISTS, "--trials", "5").out
    assert len(runs) == len(set(points(runs))) == 5


def test_switches_are_searched_as_on_and_off(run_sweep: Sweep, trained: Callable, tmp_path: Path) -> None:
    runs = trained(lambda flags: 0.5 + 0.1 * flags.symmetric)
    run_sweep("--search", "symmetric=off,on", "--", "--symmetric")
    assert [flags.symmetric for flags in runs] == [False, True]
    assert "\n--symmetric\n" in (tmp_path / "s-best.txt").read_text()


def test_a_switch_that_is_best_off_is_turned_off_in_the_recipe(
    run_sweep: Sweep, trained: Callable, tmp_path: Path
) -> None:
    """Otherwise a switch of a recipe in front of it would stay on."""
    runs = trained(lambda flags: 0.5 - 0.1 * flags.symmetric)
    run_sweep("--search", "symmetric=on,off", "--", "--symmetric")
    assert [flags.symmetric for flags in runs] == [True, False]
    best = tmp_path / "s-best.txt"
    assert "\n--no-symmetric\n" in best.read_text()
    assert multitask_classifier.get_args(["--symmetric", f"@{best}"]).symmetric is False


def test_a_trial_is_the_mean_over_the_seeds(run_sweep: Sweep, trained: Callable, tmp_path: Path) -> None:
    runs = trained(lambda flags: of_nine(flags) + {1: 0.0, 2: 0.03, 7: 0.06}[flags.seed])
    finished = run_sweep("--search", "lr=1e-4,1e-5", "--seeds", "1", "2", "7")
    assert [flags.name for flags in runs[:3]] == ["s-0-seed1", "s-0-seed2", "s-0-seed7"]
    assert [t.value for t in trials_in(tmp_path / "s.db")] == pytest.approx([0.33, 0.63])
    assert "score 0.6300 +- 0.0173" in finished.out  # .03 / sqrt(3)
    recipe = (tmp_path / "s-best.txt").read_text()
    assert "mean over the seeds 1 2 7" in recipe
    assert "\n--seed" not in recipe


# --- pruning ----------------------------------------------------------------------------------------------------------


def test_the_median_pruner_ends_trials_below_the_median_after_five_trials(
    run_sweep: Sweep, trained: Callable, tmp_path: Path
) -> None:
    values = {8: 0.5, 16: 0.6, 24: 0.7, 32: 0.8, 40: 0.9, 48: 0.65, 56: 0.75}
    trained(lambda flags: values[flags.batch_size])
    listed = "batch_size=" + ",".join(map(str, values))
    finished = run_sweep("--search", listed, "--pruner", "median", "--epochs", "4")
    states = [t.state for t in trials_in(tmp_path / "s.db")]
    assert statistics.median(list(values.values())[:5]) > 0.65
    assert states == [TrialState.COMPLETE] * 5 + [TrialState.PRUNED, TrialState.COMPLETE]
    assert "batch_size 48 | pruned after epoch 1 at 0.1625" in finished.out


def test_halving_continues_the_best_third_of_each_rung(run_sweep: Sweep, trained: Callable, tmp_path: Path) -> None:
    trained(lambda flags: 0.9 - 0.01 * flags.batch_size)  # each is worse than the one before
    run_sweep("--search", "batch_size=8,16,24,32", "--pruner", "halving", "--epochs", "4")
    all_trials = trials_in(tmp_path / "s.db")
    assert [t.state for t in all_trials] == [TrialState.COMPLETE] + [TrialState.PRUNED] * 3
    assert [t.last_step for t in all_trials] == [4, 1, 1, 1]


@pytest.mark.parametrize("pruner", sorted(PRUNERS))
def test_no_trial_is_pruned_after_its_last_epoch(
    pruner: str, run_sweep: Sweep, trained: Callable, tmp_path: Path
) -> None:
    trained(lambda flags: 0.9 - 0.01 * flags.batch_size)
    run_sweep("--search", "batch_size=8,16,24,32,40,48", "--pruner", pruner, "--epochs", "1")
    assert {t.state for t in trials_in(tmp_path / "s.db")} == {TrialState.COMPLETE}


def test_a_pruned_run_keeps_its_files_and_is_logged_before_it_is_pruned(
    run_sweep: Sweep, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Trains for real, with a pruner that ends every trial whose score is below two."""
    monkeypatch.setitem(PRUNERS, "median", lambda: optuna.pruners.ThresholdPruner(lower=2, n_warmup_steps=2))
    finished = run_sweep("--search", "lr=1e-3", "--pruner", "median", "--epochs", "5")
    assert "no trial finished" in the_error(finished)
    assert "pruned after epoch 2" in finished.out
    folder = tmp_path / "runs" / "s-0"
    epochs = [json.loads(line)["epoch"] for line in (folder / "log.jsonl").read_text().splitlines()]
    assert epochs == [1, 2]
    assert (folder / "model.safetensors").is_file()
    assert (folder / "state.pt").is_file()
    assert not (folder / "dev.json").exists()
    intermediate = trials_in(tmp_path / "s.db")[0].intermediate_values
    logged = [json.loads(line)["scores"]["overall"] for line in (folder / "log.jsonl").read_text().splitlines()]
    assert intermediate == pytest.approx(dict(enumerate(logged, start=1)))


# --- trials that fail -------------------------------------------------------------------------------------------------


def test_impossible_flags_and_infinite_losses_fail_with_their_reason_and_the_study_continues(
    run_sweep: Sweep, tmp_path: Path
) -> None:
    """Trains for real."""
    flags = ["--search", "batch_size=1,8", "sst_loss=ce:1e39,ce", "--epochs", "1", "--option", "finetune"]
    finished = run_sweep(*flags, "--sts_loss", "mse+cosent")
    assert finished.status == 0, finished.err
    *impossible, infinite, good = trials_in(tmp_path / "s.db")
    expected = "--sts_loss mse+cosent: cosent compares the rows of a batch, found --batch_size 1."
    assert all(t.user_attrs["reason"].startswith(expected) for t in impossible)
    assert "the loss of sst at step 1 must be finite, found inf" in infinite.user_attrs["reason"]
    assert (len(impossible), infinite.state, good.state) == (2, TrialState.FAIL, TrialState.COMPLETE)
    assert "trial 2 | batch_size 8 | sst_loss ce:1e39 | failed: the loss of sst" in finished.out
    again = run_sweep(*flags, "--sts_loss", "mse+cosent")
    assert "4 trials so far" in again.out
    assert len(trials_in(tmp_path / "s.db")) == 4


def test_a_shared_flag_that_a_searched_value_makes_pointless_is_dropped_with_a_note(
    run_sweep: Sweep, trained: Callable
) -> None:
    """The command line of a trial is no different from any other: later flags win."""
    runs = trained(lambda flags: 0.5)
    shared = ["--option", "finetune", "--combiner", "pcgrad"]
    finished = run_sweep("--search", "sampler=uniform,round_robin", "--", *shared)
    assert finished.status == 0, finished.err
    assert [(flags.sampler, flags.combiner) for flags in runs] == [("uniform", "sum"), ("round_robin", "pcgrad")]
    assert "note: --combiner: no effect with --sampler uniform, so dropped.\n" in finished.err


def test_a_trial_that_needs_too_much_memory_fails_alone(run_sweep: Sweep, trained: Callable, tmp_path: Path) -> None:
    def score(flags: Namespace) -> float:
        if flags.batch_size == 64:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")
        return 0.5

    trained(score)
    assert "batch_size 64 | failed: CUDA out of memory. |" in run_sweep("--search", "batch_size=64,8").out


def test_a_study_without_a_finished_trial_says_why(run_sweep: Sweep, trained: Callable, tmp_path: Path) -> None:
    def score(flags: Namespace) -> float:
        raise InputError("the disk is full.")

    trained(score)
    error = the_error(run_sweep("--search", "lr=1e-4,1e-5"))
    assert error.endswith("no trial finished, so none is the best. The last: failed: the disk is full.")
    assert not (tmp_path / "s-best.txt").exists()


# --- table, plot, recipe ----------------------------------------------------------------------------------------------


def test_the_table_is_sorted_by_score_with_pruned_and_failed_trials_last(run_sweep: Sweep, trained: Callable) -> None:
    def score(flags: Namespace) -> float:
        if flags.lr == 1e-6:
            raise InputError("no.")
        return of_nine(flags)

    trained(score)
    out = run_sweep(*TWO_LISTS).out
    rows = out.split("\ntrial | lr ")[1].split("\nbest: ")[0].splitlines()[1:]
    assert [int(row.split("|")[0]) for row in rows] == [0, 5, 4, 3, 1, 2, 6, 7, 8]
    assert [cell.strip() for cell in rows[0].split("|")] == ["0", "1e-4", ".2", *["0.900"] * 3, "score 0.9000"]


def test_the_plot_shows_every_trial_over_time_and_by_parameter(
    run_sweep: Sweep, trained: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn, draw, plot = [], results._draw, results.plot

    def watched(axis: Axes, given: list[FrozenTrial], places: list[float]) -> None:
        drawn.append(places)
        draw(axis, given, places)

    trained(of_nine)
    monkeypatch.setattr(results, "_draw", watched)
    monkeypatch.setattr(results, "plot", plot)
    run_sweep("--search", "lr=1e-4,1e-5", "hidden_dropout_prob=.2,.3,.4")
    assert drawn == [[0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]]
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")


def test_the_recipe_runs_unchanged_and_gives_the_trials_score(
    run_sweep: Sweep, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Trains for real. When a flag is given twice, the later one wins, in the search and in the recipe."""
    recipe = tmp_path / "mine.txt"
    flags = ["--search", "lr=1e-3,1e-2", "--write_recipe", recipe, "--", f"@{ROOT}/recipes/robust/5-surgery.txt"]
    finished = run_sweep(*flags, "--epochs=2", "--model", "/nowhere", "--model", tiny_checkpoint)
    assert finished.status == 0, finished.err
    best = max(trials_in(tmp_path / "s.db"), key=lambda t: t.value)
    text = recipe.read_text()
    assert f"# Written by sweep.py: the best trial of {tmp_path / 's.db'}, trial {best.number}." in text
    assert "# The best of 2 trials, chosen on dev: expect a lower score on new data" in text
    assert f"overall {best.value:.4f} (seed 11711)" in text
    assert "--runs" not in text
    flags = [f"@{recipe}", "--runs", tmp_path / "again", "--name", "r", "--predictions", tmp_path / "predictions"]
    monkeypatch.setattr(sys, "argv", ["multitask_classifier.py", *map(str, flags)])
    multitask_classifier.main()
    ours, again = (tmp_path / "runs" / f"s-{best.number}", tmp_path / "again" / "r")
    assert (again / "dev.json").read_text() == (ours / "dev.json").read_text()
    assert json.loads((ours / "dev.json").read_text())["overall"] == best.value
    assert (again / "model.safetensors").read_bytes() == (ours / "model.safetensors").read_bytes()


def test_a_recipe_names_flags_that_a_file_cannot_contain(run_sweep: Sweep, trained: Callable, task_files: Path) -> None:
    trained(of_nine)
    spaced = task_files.with_name("my data")
    task_files.rename(spaced)
    run_sweep("--search", "lr=1e-4", "--data", spaced)
    recipe = (task_files.parent / "s-best.txt").read_text()
    assert f"# Add on the command line: '--data' '{spaced}'" in recipe
    assert "\n--data" not in recipe


# --- a kill -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_study_continues_without_repeating_finished_trials(
    tiny_checkpoint: Path, task_files: Path, tmp_path: Path
) -> None:
    runs, study = tmp_path / "runs", tmp_path / "k.db"
    flags = ["--study", study, "--search", "lr=1e-3,1e-2,1e-4", "--", "--model", tiny_checkpoint, "--data", task_files]
    flags += ["--runs", runs, "--predictions", tmp_path / "p", "--option", "finetune", "--epochs", "4"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen([sys.executable, "sweep.py", *map(str, flags)], cwd=ROOT, env=environment)
    while process.poll() is None and not (runs / "k-1" / "log.jsonl").exists():
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)  # in the middle of the second trial
    assert process.wait() == -signal.SIGKILL
    before = (runs / "k-0" / "model.safetensors").stat()
    result = run_script("sweep.py", *flags, OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stderr
    assert "1 trials so far\ntrial 2 | lr 1e-2 | score" in result.stdout
    assert (runs / "k-0" / "model.safetensors").stat() == before
    all_trials = trials_in(study)
    assert [t.params["lr"] for t in all_trials] == ["1e-3", "1e-2", "1e-2", "1e-4"]
    assert [t.state.name for t in all_trials] == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]
    assert "1     | 1e-2 | -     | -     | -      | killed, so repeated" in result.stdout


# --- bad input --------------------------------------------------------------------------------------------------------

WRONG_SEARCHES = {
    "learning_rate=1e-4,1e-5": "--search learning_rate: must be a flag of multitask_classifier.py, which has no --lear",
    "help=1": "--search help: must be a flag of multitask_classifier.py",
    "lr": "--search must be KEY=A,B,C or KEY=LOW..HIGH[:log], found 'lr'.",
    "lr=": "--search must be KEY=A,B,C or KEY=LOW..HIGH[:log], found 'lr='.",
    "lr=fast": "--lr: must be a number, above 0 and at most 1, found 'fast'. See multitask_classifier.py --help.",
    "lr=1e-4,7": "--lr: must be a number, above 0 and at most 1, found '7'",
    "sampler=random": "--sampler must be one of annealed, balanced, combined, proportional, round_robin, sequential, ",
    "sst_loss=ce,bce": "--sst_loss bce: bce is for a task that predicts a probability, but sst predicts a category.",
    "sst_loss=ce,ce+cosent": "--sst_loss ce+cosent: cosent is for a task that predicts a probability or a number, but",
    "sts_loss=mse,mean": "--sts_loss mean: must be made of ce, ce_smooth, bce, mse, ",
    "sts_loss=mse,mse:0": "--sts_loss mse:0: the weight of mse must be a number above 0, found '0'.",
    "lr=1e-4,.0001": "--search lr=1e-4,.0001: values must differ, found the same value twice. Remove it.",
    "lr=1e-4,": "--search lr=1e-4,: values must differ, found an empty value. Remove it.",
    "lr=1e-4 lr=1e-5": "--search lr=1e-5: --lr is searched twice. Put all its values into one list.",
    "option=pretrain fine-tune-mode=full-model": "--fine-tune-mode is searched twice",
    "seed=1,2": "--search seed: a lucky seed is not a better model. Average over several: --seeds 1 2 3.",
    "sst_dev=a,b": "--search sst_dev: --sst_dev must be the same for all trials. Give it as a flag.",
    "symmetric=yes,no": "--search symmetric: --symmetric is on or off, found 'yes'. Write symmetric=on,off.",
    "lr=1e-4..1e-5 --method tpe": "--search lr=1e-4..1e-5: a range must be LOW..HIGH or LOW..HIGH:log, of numbers",
    "lr=1e-5..1e-4:exp --method tpe": "a range must be LOW..HIGH or LOW..HIGH:log",
    "weight_decay=0..0.1:log --method tpe": "LOW below HIGH and, with log, above 0. Correct it, or list the values.",
    "sampler=uniform..round_robin --method tpe": "a range must be LOW..HIGH or LOW..HIGH:log, of numbers",
    "lr=1e-5..1e-4": "--method grid needs lists of values, but lr has a range. Write lr=A,B,C, or use --method tpe.",
    "lr=1e-5..1e-4 --method coordinate": "--method coordinate needs lists of values",
    "lr=1e-5..1e-4 --method tpe": "--method tpe never ends by itself. Add --trials 30.",
    "lr=1e-4 --seeds 1 2 --seed 3": "--seed and --seeds cannot be combined. Use --seeds alone.",
    "lr=1e-4 --name mine": "--name is not for sweep.py, which names its runs and continues by itself. Leave it out.",
    "lr=1e-4 --resume": "--resume is not for sweep.py, which names its runs and continues by itself. Leave it out.",
    "lr=1e-4 --epoch 3": "unknown flag --epoch. Did you mean --epochs? See multitask_classifier.py --help.",
    "lr=1e-4 --head siamese": "no trial could run: --sst_head siamese compares two sentences, but sst has one. Use",
    "lr=1e-4 --data nowhere": "nowhere",
    "teacher=a,b --sst_loss ce+distill": "--search teacher: --teacher must be the same for all trials. Give it as a",
    "lr=1e-4 --sst_loss ce+distill --teacher nowhere": "nowhere/sst-train.npz: cannot be read as logits; No such file",
    "lr=1e-4 --model nowhere": "nowhere",
    "lr=1e-4 --method random": "--method must be one of grid, coordinate, tpe; found 'random'.",
    "lr=1e-4 --method coordinat": "--method must be one of grid, coordinate, tpe; found 'coordinat'. Did you mean coo",
    "lr=1e-4 --pruner medain": "--pruner must be one of none, median, halving; found 'medain'. Did you mean median?",
    "lr=1e-4 --trials 0": "--trials: must be a whole number, at least 1 and at most 1000000, found '0'. See sweep.py",
    "lr=1e-4 --smart_weight 2": "no trial could run: --smart_weight 2.0 needs --regularizer smart",
}


def test_a_list_of_paths_is_no_range() -> None:
    assert read_space(["model=../a,../b"])["model"].choices == ("../a", "../b")


@pytest.mark.parametrize("given", WRONG_SEARCHES)
def test_a_wrong_search_is_refused_in_one_line_and_nothing_is_left(
    given: str, run_sweep: Sweep, trained: Callable, tmp_path: Path
) -> None:
    runs = trained(of_nine)
    finished = run_sweep(
        "--search", *given.split(), *(["--trials", "3"] if ":" in given or "uniform.." in given else [])
    )
    assert WRONG_SEARCHES[given] in the_error(finished)
    assert runs == []
    assert not list(tmp_path.glob("*s.db*"))


def test_broken_data_are_refused_before_the_first_trial(
    run_sweep: Sweep, trained: Callable, task_files: Path, tmp_path: Path
) -> None:
    """An error that would fail every trial is not recorded as a failed trial."""
    path = task_files / "sts-train.csv"
    path.write_text(path.read_text().replace("\t0.9\n", "\t9\n"))
    trained(of_nine)
    assert f"{path} line" in the_error(run_sweep(*TWO_LISTS))
    assert not (tmp_path / "s.db").exists()


def not_a_database(path: Path) -> None:
    path.write_text("lr,score\n1e-4,0.5\n")


def an_empty_file(path: Path) -> None:
    path.touch()


def another_database(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE songs (name TEXT)")


def another_programs_study(path: Path) -> None:
    optuna.create_study(study_name="theirs", storage=f"sqlite:///{path}")


def a_truncated_study(path: Path) -> None:
    optuna.create_study(study_name="sweep", storage=f"sqlite:///{path}").set_user_attr("facts", {})
    path.write_bytes(path.read_bytes()[:50_000])


def a_damaged_study(path: Path) -> None:
    optuna.create_study(study_name="sweep", storage=f"sqlite:///{path}").set_user_attr("facts", {})
    pages = path.read_bytes()
    path.write_bytes(pages[:-4096] + bytes(4096))  # the part that sweep.py looks up stays readable


WRONG_FILES = {
    not_a_database: "must be a study's database, but file is not a database. It was not changed; use another",
    an_empty_file: "must be a study's database, but no such table: studies. It was not changed",
    another_database: "must be a study's database, but no such table: studies. It was not changed",
    another_programs_study: "must be a study of sweep.py, found one of another program. It was not changed",
    a_truncated_study: "must be a study's database, but database disk image is malformed. It was not changed",
    a_damaged_study: "must be an intact database, but it is damaged. It was not changed",
}


@pytest.mark.parametrize("make", WRONG_FILES, ids=lambda make: make.__name__)
def test_a_file_that_is_no_study_of_sweep_is_refused_and_not_changed(
    make: Callable[[Path], None], run_sweep: Sweep, trained: Callable, tmp_path: Path
) -> None:
    make(tmp_path / "s.db")
    before = (tmp_path / "s.db").read_bytes()
    runs = trained(of_nine)
    error = the_error(run_sweep(*TWO_LISTS))
    assert f"--study {tmp_path / 's.db'}: {WRONG_FILES[make]}" in error
    assert (tmp_path / "s.db").read_bytes() == before
    assert runs == []


def write_facts(path: Path, facts: object) -> None:
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE study_user_attributes SET value_json = ?", [json.dumps(facts)])


def change(statement: str) -> Callable[[Path], None]:
    """A change to a sound study by one statement of SQL."""

    def apply(path: Path) -> None:
        with contextlib.closing(sqlite3.connect(path)) as database, database:
            database.execute(statement)

    return apply


NO_FACTS = "must record the flags and data of its trials, but does not. It was not changed"
CHANGES = {
    "facts_5": (lambda path: write_facts(path, 5), NO_FACTS),
    "facts_null": (lambda path: write_facts(path, None), NO_FACTS),
    "facts_list": (lambda path: write_facts(path, ["flags", "data_sha256"]), NO_FACTS),
    "facts_without_keys": (lambda path: write_facts(path, {}), NO_FACTS),
    "facts_without_data": (lambda path: write_facts(path, {"flags": {}}), NO_FACTS),
    "facts_of_wrong_kind": (lambda path: write_facts(path, {"flags": [], "data_sha256": 3}), NO_FACTS),
    "facts_with_lines": (
        lambda path: write_facts(path, {"flags": {"lr": "a\nb\n" * 999}, "data_sha256": {}}),
        "was started with --method None (now grid)",
    ),
    "facts_no_json": (change("UPDATE study_user_attributes SET value_json = '{'"), "Optuna cannot read it ("),
    "score_text": (
        change('UPDATE trial_user_attributes SET value_json = \'[{"overall": "high"}]\''),
        "trial 0 must be one of sweep.py, but its scores are not numbers for overall, para, sst, sts. It was",
    ),
    "score_missing": (
        change("DELETE FROM trial_user_attributes"),
        "trial 0 must be one of sweep.py, but it does not have the scores of 1 seeds.",
    ),
    "score_nan": (
        change("UPDATE trial_user_attributes SET value_json = replace(value_json, '0.3', 'NaN')"),
        "trial 0 must be one of sweep.py, but its scores are not numbers",
    ),
    "value_text": (change("UPDATE trial_values SET value = 'high'"), "but its value 'high' is not the mean of its"),
    "value_infinite": (
        change("UPDATE trial_values SET value = NULL, value_type = 'INF_POS'"),
        "but its value inf is not the mean of its scores, 0.3000.",
    ),
    "value_other": (
        change("UPDATE trial_values SET value = 0.99"),
        "but its value 0.99 is not the mean of its scores, 0.3000.",
    ),
    "value_missing": (change("DELETE FROM trial_values"), "but its value None is not the mean of its scores"),
    "parameter_outside": (change("UPDATE trial_params SET param_value = 7"), "Optuna cannot read it ("),
    "parameter_other": (
        change("UPDATE trial_params SET distribution_json = replace(distribution_json, '1e-5', '1e-9')"),
        "trial 0 must be one of sweep.py, but its value of lr is not one of the search.",
    ),
    "parameter_renamed": (
        change("UPDATE trial_params SET param_name = 'epochs' WHERE param_name = 'lr'"),
        "trial 0 must be one of sweep.py, but it has the parameters ['epochs', 'hidden_dropout_prob'].",
    ),
    "parameter_missing": (change("DELETE FROM trial_params"), "but it has the parameters []."),
    "state_unknown": (change("UPDATE trials SET state = 'ASLEEP'"), "Optuna cannot read it ("),
    "state_waiting": (change("UPDATE trials SET state = 'WAITING'"), "but its state or its reason is wrong."),
    "pruned_without_score": (
        change("UPDATE trials SET state = 'PRUNED', datetime_complete = NULL"),
        "it was pruned without a score",
    ),
    "reason_number": (
        change("UPDATE trial_user_attributes SET key = 'reason', value_json = '5'"),
        "but its state or its reason is wrong.",
    ),
    "number_wrong": (change("UPDATE trials SET number = number + 3"), "but its number is wrong."),
    "number_missing": (change("UPDATE trials SET number = NULL"), "but its number is wrong."),
    "minimized": (change("UPDATE study_directions SET direction = 'MINIMIZE'"), "must be a study of sweep.py"),
    "two_studies": (change("INSERT INTO studies (study_name) VALUES ('other')"), "must be a study of sweep.py"),
    "no_study": (change("DELETE FROM studies"), "must be a study of sweep.py"),
    "table_missing": (change("DROP TABLE trial_heartbeats"), "must be a complete study; tables are missing."),
    "version_missing": (change("DELETE FROM version_info"), "must be a complete study; tables are missing."),
    "version_other": (change("UPDATE alembic_version SET version_num = 'v9.9'"), "Optuna cannot read it ("),
    "trigger": (
        change("CREATE TRIGGER t AFTER INSERT ON trials BEGIN DELETE FROM trials; END"),
        "must be a study's database, but it has views or triggers.",
    ),
}


@pytest.fixture(scope="module")
def sound_study(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Namespace:
    """The flags of a search of two parameters, and its study with three finished trials."""
    folder = tmp_path_factory.mktemp("sound")
    write_task_files(folder / "data")
    flags = ["--study", folder / "s.db", *TWO_LISTS, "--", "--model", tiny_checkpoint, "--data", folder / "data"]
    args = with_trials(sweep.get_args([*map(str, flags)]))
    study, _ = args.study.open(args)
    for _ in range(3):
        study.sampler = next_sampler(args, study)
        trial = study.ask(args.space)
        trial.set_user_attr("scores", [dict.fromkeys(["sst", "para", "sts", "overall"], 0.3)])
        study.tell(trial, 0.3)
    return args


def moved(args: Namespace, path: Path, data: bytes) -> Namespace:
    """The same search with its study in another file."""
    path.write_bytes(data)
    return Namespace(**vars(args) | {"study": StudyFile(path)})


@pytest.mark.parametrize("name", CHANGES)
def test_a_study_with_wrong_contents_is_refused_in_one_line_and_not_changed(
    name: str, sound_study: Namespace, tmp_path: Path
) -> None:
    args = moved(sound_study, tmp_path / "s.db", sound_study.study.path.read_bytes())
    make, message = CHANGES[name]
    make(args.study.path)
    before = args.study.path.read_bytes()
    with pytest.raises(InputError) as raised:
        args.study.open(args)
    error = str(raised.value)
    assert error.startswith(f"--study {args.study.path}: ")
    assert message in error
    assert error.isprintable()
    assert len(error) < 20_000
    assert args.study.path.read_bytes() == before


def test_a_study_with_wrong_contents_ends_the_script_in_one_line(
    run_sweep: Sweep, trained: Callable, tmp_path: Path
) -> None:
    runs = trained(of_nine)
    run_sweep("--search", "lr=1e-4,1e-5", "--trials", "1")
    runs.clear()
    write_facts(tmp_path / "s.db", 5)
    assert NO_FACTS in the_error(run_sweep("--search", "lr=1e-4,1e-5"))
    assert runs == []


def test_a_view_that_computes_forever_is_refused(run_sweep: Sweep, trained: Callable, tmp_path: Path) -> None:
    trained(of_nine)
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS study_id FROM n"
    change(f"CREATE VIEW studies AS {endless}")(tmp_path / "s.db")
    started = time.monotonic()
    assert "it has views or triggers" in the_error(run_sweep("--search", "lr=1e-4,1e-5"))
    assert time.monotonic() - started < 30


def damage(data: bytes, draw: random.Random) -> bytes:
    """Flip a bit, replace bytes, or cut the file, at a place that is in use."""
    used = [i for i, byte in enumerate(data) if byte]
    at, length = draw.choice(used), draw.choice([1, 1, 4, 64])
    end = min(at + length, len(data))
    kind = draw.choice(["bit", "bit", "bytes", "zeros", "cut"])
    if kind == "cut":
        return data[:at]
    new = {"bit": bytes([data[at] ^ 1 << draw.randrange(8)]), "bytes": draw.randbytes(end - at)}.get(
        kind, bytes(end - at)
    )
    return data[:at] + new + data[at + len(new) :]


@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_damaged_study_is_used_or_refused_in_one_line_and_not_changed(
    count: int, sound_study: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every damage that can be noticed is refused; a digit of a date, say, cannot be noticed."""
    sound, draw, errors = sound_study.study.path.read_bytes(), random.Random(count), []
    head = RDBStorage(f"sqlite:///{sound_study.study.path}").get_head_version()  # Optuna reads ten files to find it
    monkeypatch.setattr("optuna.storages._rdb.storage._VersionManager.get_head_version", lambda self: head)
    for _ in range(count):
        args = moved(sound_study, tmp_path / "s.db", damage(sound, draw))
        before = args.study.path.read_bytes()
        try:
            study, _ = args.study.open(args)
            results.table(study, args)
            results.recipe(study, args)
        except InputError as error:
            errors.append(str(error))
            assert args.study.path.read_bytes() == before
    assert len(errors) > count / 4
    assert all(error.isprintable() for error in errors)


OTHER_FLAGS = {
    "--epochs 3": "was started with --epochs 10 (now 3). Give the same flags, or another --study.",
    "--method coordinate": "was started with --method grid (now coordinate).",
    "--search lr=1e-4,1e-3": "was started with --search lr=1e-4,1e-5 (now lr=1e-4,1e-3).",
    "--seeds 1 2": "was started with --seeds 11711 (now 1 2).",
    "--pruner median --clip 1": "was started with --pruner none (now median), --clip 0.0 (now 1.0). Give the same",
}


@pytest.mark.parametrize("other", OTHER_FLAGS)
def test_a_study_with_other_flags_is_refused_and_the_flags_are_named(
    other: str, run_sweep: Sweep, trained: Callable, tmp_path: Path
) -> None:
    runs = trained(of_nine)
    run_sweep("--search", "lr=1e-4,1e-5")
    before = {path: path.read_bytes() for path in tmp_path.glob("s*")}
    runs.clear()
    error = the_error(run_sweep("--search", "lr=1e-4,1e-5", *other.split()))
    assert OTHER_FLAGS[other] in error
    assert runs == []
    assert {path: path.read_bytes() for path in tmp_path.glob("s*")} == before


def test_flags_that_do_not_change_the_score_may_differ(run_sweep: Sweep, trained: Callable, tmp_path: Path) -> None:
    trained(of_nine)
    run_sweep(*TWO_LISTS, "--trials", "1")
    more = ["--trials", "2", "--eval_batch_size", "4", "--predictions", tmp_path / "elsewhere", "--verbose"]
    assert run_sweep(*TWO_LISTS, *more).status == 0


def test_a_study_with_other_data_is_refused(run_sweep: Sweep, trained: Callable, task_files: Path) -> None:
    trained(of_nine)
    run_sweep(*TWO_LISTS, "--trials", "1")
    path = task_files / "sts-dev.csv"
    path.write_text(path.read_text().replace("bright", "dark"))
    assert f"s.db: {path} changed since. Give the same data, or another --study." in the_error(run_sweep(*TWO_LISTS))


@pytest.mark.parametrize("place", ["runs/s-0", "s.png", "s-best.txt"])
def test_no_existing_file_is_overwritten(place: str, run_sweep: Sweep, trained: Callable, tmp_path: Path) -> None:
    path = tmp_path / place
    path.parent.mkdir(exist_ok=True)
    path.write_text("precious")
    runs = trained(of_nine)
    assert f"{path}: " in the_error(run_sweep(*TWO_LISTS))
    assert path.read_text() == "precious"
    assert runs == []


def test_study_plot_and_recipe_are_three_files(run_sweep: Sweep, tmp_path: Path) -> None:
    for flags in (["--write_recipe", tmp_path / "s.db"], ["--study", tmp_path / "s.png"]):
        assert "must be three files. Rename one." in the_error(run_sweep(*TWO_LISTS, *flags))


# --- flags ------------------------------------------------------------------------------------------------------------


def test_no_flag_of_the_two_scripts_has_the_same_name() -> None:
    """Otherwise sweep.py would not pass it on to the other script. It does pass on --dry_run."""
    assert set(sweep.parser().flags) & set(multitask_flags.parser().flags) == {"--dry_run", "--no-dry_run"}


@pytest.mark.parametrize(("flag", "registry"), [("--method", SEARCHES), ("--pruner", PRUNERS)])
def test_the_help_page_names_every_entry_of_the_registries(flag: str, registry: dict) -> None:
    """sweep.py has the names as text, because the registries are in a file that imports Optuna."""
    page = " ".join(sweep.parser().format_help().split())
    entry = re.search(rf" {flag} NAME (.*?) \(default: ", page)[1]
    assert re.findall(r"\w+", entry)[-len(registry) :] == list(registry)


@pytest.mark.parametrize("flags", [["--help"], ["--search", "lr=1e-4", "--trials", "none"], ["--method", "grid"]])
def test_help_and_mistakes_in_flags_are_answered_without_optuna(flags: list[str]) -> None:
    code = """
import sys, sweep, utils
try:
    sweep.main()
except (SystemExit, utils.InputError):
    print({"optuna", "matplotlib"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code, *flags], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("set()\n")


@pytest.fixture
def flag_file(tmp_path: Path) -> Iterator[str]:
    path = tmp_path / "flags.txt"
    path.write_text("# a comment\n--search lr=1e-4,1e-5 option=finetune\n--epochs 3\n--tasks sst sts\n--lr 1e-3\n")
    return f"@{path}"


def test_flags_of_both_scripts_may_be_in_one_file_and_later_ones_win(flag_file: str) -> None:
    raw = sweep.get_args([flag_file, "--epochs", "4", "--", "--batch_size=2", "--trials", "7"])
    assert raw.rest == ["--epochs", "3", "--tasks", "sst", "sts", "--lr", "1e-3", "--epochs", "4", "--batch_size=2"]
    args = with_trials(raw)
    assert args.search == ["lr=1e-4,1e-5", "option=finetune"]
    assert (args.flags.epochs, args.flags.tasks, args.flags.batch_size, args.trials) == (4, ["sst", "sts"], 2, 7)
    assert args.base["tasks"] == ["--tasks", "sst", "sts"]


def test_flags_are_identified_by_what_they_set() -> None:
    given = ["--fine-tune-mode", "full-model", "--option", "pretrain", "--task_weights", "sst=2", "sts=1", "--lr=3"]
    given += ["--symmetric", "--no-symmetric"]
    assert read_flags(given) == {
        "option": ["--option", "pretrain"],
        "task_weights": ["--task_weights", "sst=2", "sts=1"],
        "lr": ["--lr=3"],
        "symmetric": ["--no-symmetric"],
    }


def test_shared_flags_that_later_ones_make_pointless_are_not_shared(capsys: pytest.CaptureFixture) -> None:
    shared = ["--option", "finetune", "--regularizer", "smart", "--smart_weight", "2", "--regularizer", "none"]
    args = with_trials(sweep.get_args(["--search", "lr=1e-4", "--", *shared]))
    assert "smart_weight" not in args.base
    assert "note: --smart_weight: no effect with --regularizer none, so dropped.\n" in capsys.readouterr().err


def test_a_space_is_lists_and_ranges_of_the_flags_own_kind() -> None:
    space = read_space(["lr=1e-6..1e-4:log", "epochs=1..5", "sampler=uniform,sqrt"])
    assert space["lr"] == optuna.distributions.FloatDistribution(1e-6, 1e-4, log=True)
    assert space["epochs"] == optuna.distributions.IntDistribution(1, 5)
    assert space["sampler"] == optuna.distributions.CategoricalDistribution(("uniform", "sqrt"))
