"""Helpers for tests with other processes: they start in a fraction of a second, since a server has imported everything.

The server of `multiprocessing` imports the scripts once and forks from there. It never computes anything, so that its
children can use threads.
"""

import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import classifier
import distributed
import multitask_build
import multitask_classifier
import pretrain
import teacher
import utils

SCRIPTS: dict[str, ModuleType] = {m.__name__: m for m in (classifier, multitask_classifier, pretrain, teacher)}


def context() -> Any:
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["processes"])
    return server


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def wait_until(is_true: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


def start(function: Callable[..., None], *values: object) -> BaseProcess:
    process = context().Process(target=function, args=values)
    process.start()
    return process


def run_as_script(script: str, flags: list[str], output: Path | None = None, prepare: str = "") -> None:
    """In a new process: run a script as its command line does. prepare: code to execute before it."""
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    if output is not None:
        handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    sys.argv = [f"{script}.py", *flags]
    exec(prepare, {"script": SCRIPTS[script]})
    status = 0
    try:
        utils.run_script(SCRIPTS[script].main)
    except SystemExit as stop:
        status = stop.code or 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


# --- several processes that train together ----------------------------------------------------------------------------


def join(rank: int, size: int, port: int) -> None:
    """Set the environment that torchrun gives to a process."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def run_together(rank: int, size: int, port: int, script: str, flags: list[str], output: Path) -> None:
    """In a new process: run a script together with the other processes."""
    join(rank, size, port)
    run_as_script(script, flags, output)


def train_cases(rank: int, size: int, port: int, cases: dict[str, tuple[str, list[str]]], output: Path) -> None:
    """In a new process: run a script's training for every case in float64, together with the other processes."""
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.stdout = sys.stderr = output.open("w")
    build, build_pretraining, build_classifier = (
        multitask_build.build_model, pretrain.build_model, classifier.build_model,
    )  # fmt: skip
    # The vectors of a frozen encoder are stored in float32.
    multitask_build.build_model = lambda args: build(args).double() if args.option == "finetune" else build(args)
    pretrain.build_model = lambda *values: build_pretraining(*values).double()
    classifier.build_model = lambda *values: build_classifier(*values).double()
    join(rank, size, port)
    with distributed.started(use_gpu=False) as world:
        for script, flags in cases.values():
            args = SCRIPTS[script].get_args(flags)
            if script == "multitask_classifier":
                multitask_classifier.write_run_predictions(multitask_classifier.train(args, world=world))
            elif script == "pretrain":
                pretrain.pretrain(args, world)
            else:
                classifier.train_tasks(args, world)
