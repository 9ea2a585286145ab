"""The directory of a training run: its flags and versions, its log, its best weights."""

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import torch

from utils import InputError, read_json, sha256_of, writable_directory, write_text

PACKAGES = ("numpy", "numba", "tokenizers")  # a run records their versions, and torch's


class Run:
    """The directory of a training run: its flags and versions, its log, its best weights."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.started = time.monotonic()

    @staticmethod
    def must_be_new(folder: Path) -> None:
        if folder.exists():
            raise InputError(f"{folder}: the run exists already. Use another --name, or remove the directory.")

    @classmethod
    def create(cls, folder: Path, args: argparse.Namespace, data: list[Path] | dict[str, str]) -> Self:
        """data: the files that the run reads, or their sha256 by path if already known."""
        cls.must_be_new(folder)
        hashes = data if isinstance(data, dict) else {str(path): sha256_of(path) for path in data}
        writable_directory(folder, "--runs")
        facts = {
            "args": _as_json(vars(args)),
            "command": sys.argv,
            "versions": {"python": platform.python_version(), "torch": str(torch.__version__)}  # with its build
            | {package: version(package) for package in PACKAGES},
            "commit": _commit(),
            "data_sha256": hashes,
        }
        write_text(folder / "args.json", json.dumps(facts, indent=2) + "\n")
        return cls(folder)

    @classmethod
    def reopen(cls, folder: Path) -> Self:
        """An existing run; `facts` returns what it recorded when it was started."""
        if not folder.is_dir():
            raise InputError(f"{folder}: no such directory. Give the directory of a run, such as runs/NAME.")
        if not (folder / "args.json").is_file():
            raise InputError(f"{folder}: must be the directory of a run, but has no args.json. Check the name.")
        return cls(folder)

    @classmethod
    def resume(
        cls,
        folder: Path,
        args: argparse.Namespace,
        upgrade: Callable[[dict[str, Any]], dict[str, Any]],
        data: list[Path],
        may_differ: set[str],
    ) -> Self:
        """An existing run, if it was started with the same flags and the same data.

        upgrade: completes the flags of a run that is older than some of them. may_differ: flags that do not matter.
        """
        run = cls.reopen(folder)
        then, now = _as_json(upgrade(run.facts["args"])), _as_json(vars(args))
        other = [key for key, value in now.items() if key not in may_differ and then.get(key) != value]
        if other:
            shown = ", ".join(f"--{key} {then.get(key)} (now {now[key]})" for key in other[:5])
            shown += f" and {len(other) - 5} more" if len(other) > 5 else ""
            raise InputError(f"{folder}: was started with {shown}. Use the same flags, or another --name.")
        changed = [str(path) for path in data if run.facts["data_sha256"].get(str(path)) != sha256_of(path)]
        if changed:
            raise InputError(f"{folder}: {', '.join(changed)} changed since the run was started. Use another --name.")
        return run

    @property
    def facts(self) -> dict[str, Any]:
        """The contents of args.json, with the flags under `args`; flags.check_stored checks each of them."""
        path = self.folder / "args.json"
        facts = read_json(path, "JSON with a run's flags", "Train the run again.")
        wrong = [table for table in ("args", "data_sha256") if not isinstance(facts.get(table), dict)]
        if wrong or not all(isinstance(value, str | None) for value in facts["data_sha256"].values()):
            problem = f"{wrong[0]} is not a table" if wrong else "data_sha256 has a value that is not text"
            raise InputError(f"{path}: must be JSON with a run's flags; {problem}. Train the run again.")
        return facts

    def log(self, **event: Any) -> None:
        event["seconds"] = round(time.monotonic() - self.started, 2)
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")


def _as_json(flags: dict[str, Any]) -> dict[str, Any]:
    """The flags as they would be read back from JSON."""
    return json.loads(json.dumps(flags, default=str))


def _commit() -> str | None:
    """The project's commit, followed by + if the work tree differs from it; None outside git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
