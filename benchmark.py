"""Measure speed and memory against real peers in the same run.

    python benchmark.py --only adamw,pcgrad --json results.json

Ours and the peer alternate; times are medians over the rounds, so a slow moment of the machine affects both. Needs the
test dependencies (source setup.sh --dev).
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

import benchmark_runs as runs
import benchmark_steps as steps
from flags import ALWAYS, ArgumentParser, number
from timing import Result
from utils import InputError, choose_device, run_script, write_text

BENCHMARKS: dict[str, Callable[[int], list[Result]]] = {
    "adamw": steps.adamw, "frozen": runs.frozen, "bert": steps.bert, "pcgrad": steps.pcgrad, "tasks": steps.tasks,
    "smart": steps.smart, "pipeline": runs.pipeline, "growth": runs.growth, "distributed": steps.distributed,
    "checkpoint": runs.checkpoint, "predict": runs.prediction, "time_to_score": runs.time_to_score,
}  # fmt: skip
BY_NAME_ONLY = ("time_to_score",)  # a whole training


def get_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(
        "benchmark.py",
        "Measure speed and memory against real peers.",
        "python benchmark.py --only adamw,pcgrad --json results.json",
        sections=("flags",),
    )
    add = parser.section("flags")
    usual = ",".join(name for name in BENCHMARKS if name not in BY_NAME_ONLY)
    add("--only", default=usual, needs=ALWAYS, metavar="NAMES", help="benchmarks, separated by commas")
    add("--rounds", type=number(int, 1, 10000), default=30, needs=ALWAYS, metavar="N", help="measurements of each side")
    add("--json", type=Path, needs=ALWAYS, help="file for the results")
    args = parser.parse(argv)
    args.only = [name for name in args.only.split(",") if name]
    unknown = [name for name in args.only if name not in BENCHMARKS]
    if unknown or not args.only:
        raise InputError(f"--only must name some of {', '.join(BENCHMARKS)}, found {', '.join(unknown) or 'none'}.")
    return args


def main() -> None:
    args = get_args()
    choose_device(use_gpu=False)
    results = []
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, {args.rounds} rounds")
    for name in args.only:
        for result in BENCHMARKS[name](args.rounds):
            results.append(asdict(result))
            verdict = "ok" if result.ok else "MISSED"
            print(
                f"{result.name:14} ours {result.ours_ms:9.2f} ms | {result.peer_ms:9.2f} ms {result.peer} | "
                f"ratio {result.ratio:.2f}, target {result.target:.2f}: {verdict}{result.note and f' | {result.note}'}",
                flush=True,
            )
    if args.json:
        write_text(args.json, json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    run_script(main)
