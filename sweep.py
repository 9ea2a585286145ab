"""Hyper-parameter search on Optuna: every trial is a run of multitask_classifier.py; a killed study can be continued.

    python sweep.py --method coordinate --search lr=1e-4,1e-5 hidden_dropout_prob=.2,.3 -- @recipes/robust/7-final.txt
    python sweep.py @recipes/robust/search.txt --use_gpu
    python sweep.py --method tpe --trials 30 --search lr=1e-6..1e-4:log epochs=1..5 -- @recipes/best.txt --pruner median
    python sweep.py @recipes/robust/search.txt --use_gpu --workers 4 --study postgresql://me@server/search

Flags that are not listed here are those of multitask_classifier.py, the same for all trials. The same command continues
a study that was stopped; while the study runs, it joins in, on this machine or another. The script prints a line per
trial and a table, and writes a plot and the best trial as a recipe. study.py has the search itself, storage.py the
study's file and the locks between workers, trials.py runs the trials, results.py shows their results.
"""

import argparse
import functools
import sys
from pathlib import Path

from flags import ALWAYS, ArgumentParser, Switch, number
from utils import dry_run_directory, run_script


@functools.cache
def parser() -> ArgumentParser:
    new = ArgumentParser(
        "sweep.py",
        "Search hyper-parameters of multitask_classifier.py; its flags follow, the same for all trials.",
        "python sweep.py --search lr=1e-4,1e-5 batch_size=8,16 -- @recipes/quickstart.txt",
        "python sweep.py --method tpe --trials 30 --search lr=1e-6..1e-4:log -- @recipes/best.txt --use_gpu",
        usage="--search KEY=VALUES ... [flags] [-- flags of multitask_classifier.py]",
        sections=("most used",),
    )
    add = new.section("most used")
    add("--search", nargs="+", required=True, metavar="KEY=VALUES", needs=ALWAYS,
        help="flags to search and their values: lr=1e-4,1e-5 or, for tpe, also lr=1e-6..1e-4:log")  # fmt: skip
    add("--method", default="grid", metavar="NAME", needs=ALWAYS,
        help="how the next values are chosen: grid, coordinate, tpe")  # fmt: skip
    add("--trials", type=number(int, 1, 10**6), needs=ALWAYS, metavar="N",
        help="stop when the study has N trials (default: when the method ends)")  # fmt: skip
    add("--pruner", default="none", metavar="NAME", needs=ALWAYS,
        help="ends bad trials after an epoch: none, median, halving")  # fmt: skip
    add("--seeds", nargs="+", type=number(int, 0, 2**31), needs=ALWAYS, metavar="N",
        help="train each trial with all of these and take the mean (default: --seed)")  # fmt: skip
    add("--study", default="runs/study.db", needs=ALWAYS, metavar="FILE|URL",
        help="the study's file, or a database such as postgresql://user@host/name; continued if it exists")  # fmt: skip
    add("--workers", type=number(int, 1, 1000), default=1, needs=ALWAYS, metavar="N",
        help="processes that train trials at the same time; they share the cores or the GPUs")  # fmt: skip
    add("--write_recipe", type=Path, needs=ALWAYS, help="file for the best trial (default: <study>-best.txt)")
    add("--verbose", action=Switch, needs=ALWAYS, help="show the output of every trial")
    add(
        "--dry_run", action=Switch, needs=ALWAYS, help="two steps of two trials in a temporary directory; keeps nothing"
    )
    return new


def get_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags of sweep.py, and as `rest` those of multitask_classifier.py."""
    given = [token for token in (sys.argv[1:] if argv is None else argv) if token != "--"]  # it only helps the reader
    args, rest = parser().parse_known_args(given)
    return argparse.Namespace(**vars(args), rest=rest)


def main() -> None:
    args = get_args()
    import storage  # here, since Optuna and matplotlib load slowly: --help and mistakes are answered without them
    import trials

    sys.argv = list(map(storage.without_password, sys.argv))  # every run records its command
    args = trials.with_trials(args)
    if not args.dry_run:
        trials.sweep(args)
        return
    with dry_run_directory() as folder:
        trials.sweep(trials.dry(args, folder))


if __name__ == "__main__":
    run_script(main)
