"""The directory of a training run: its flags and versions, its log, and the lock that keeps a second process out.

args.json          flags, versions, commit and data hashes, written first
log.jsonl          a line per epoch
output.txt         what was printed
model.safetensors  the best epoch's weights, with config.json and the tokenizer's files
state.pt           where --resume continues; a finished run does not have it
dev.json           the best epoch's scores: a run that has this file is finished
"""

import argparse
import contextlib
import errno
import fcntl
import functools
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import torch

import console
from distributed import World
from interruption import Stopped
from utils import TEMPORARY, InputError, could_not_write, read_json, remove, sha256_of, writable_directory, write_text

PACKAGES = ("numpy", "numba", "tokenizers")  # a run records their versions, and torch's
TRAINING_SCRIPTS = ("classifier.py", "multitask_classifier.py", "pretrain.py", "teacher.py")  # scripts with --resume
LOCK = ".lock"


class Run:
    """The directory of a training run. Leave the context of a run to let another process have it.

    `log` adds a line to the log, which `write_log` appends to the file. In between, the lines go into the state from
    which the run can be resumed: after a kill, the log is written again from the state, so the two always agree.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.lines: list[str] = []  # of the log
        self.written = 0  # how many of them are in the file
        self.started = time.monotonic()
        self.seconds_before = 0.0  # spent before the run was resumed
        self.seconds_aside = 0.0  # spent on other things than training, such as the run's page
        self.lock: int | None = None
        self.is_new = False

    @classmethod
    def must_be_new(cls, folder: Path) -> None:
        """Refuse a name that is taken. A directory without anything in it, left by a run that was killed, is free."""
        if not folder.exists() or (folder.is_dir() and not _files(folder)):
            return
        run = Run(folder)
        if (folder / LOCK).is_file():
            cls._locked(folder).release()  # refuses a run that is being trained
        resumable = (folder / "args.json").is_file() and Path(sys.argv[0]).name in TRAINING_SCRIPTS
        go_on = "Continue it with --resume, use" if resumable and not run.finished else "Use"
        raise InputError(f"{folder}: the run exists already. {go_on} another --name, or remove the directory.")

    @classmethod
    def create(cls, folder: Path, args: argparse.Namespace, data: list[Path] | dict[str, str], **facts: Any) -> Self:
        """A new run, locked against other processes.

        data: the files that the run reads, or their sha256 by path if already known. facts: more to record.
        """
        cls.must_be_new(folder)  # at once; what another process does in the meantime is noticed below
        run = cls._locked(folder)
        try:
            cls.must_be_new(folder)
            run._begin(args, data, facts)
        except BaseException:
            run.release()
            raise
        return run

    @classmethod
    def _locked(cls, folder: Path) -> Self:
        """Create the directory and lock it. The lock ends with the process, however that ends."""
        writable_directory(folder, "--runs")
        run = cls(folder)
        try:
            run.lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            fcntl.flock(run.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            run.release()
            raise InputError(
                f"{folder}: another process is training this run. Wait until it ends, or use another --name."
            ) from error
        except OSError as error:
            run.release()
            if error.errno in (errno.ENOLCK, errno.ENOTSUP):
                raise InputError(
                    f"--runs {folder}: must be on a file system with locks, found one without. Choose another."
                ) from error
            raise InputError(could_not_write(folder / LOCK, error)) from error
        return run

    def must_be_ours(self) -> None:
        """Refuse to write into a directory that somebody has removed and created again."""
        path = self.folder / LOCK
        if self.lock is not None and path.exists() and not os.path.samestat(os.fstat(self.lock), path.stat()):
            raise InputError(
                f"{self.folder}: was removed and created again while it was being trained. Nothing was written into "
                "the new directory. Use another --name."
            )

    def _begin(self, args: argparse.Namespace, data: list[Path] | dict[str, str], facts: dict[str, Any]) -> None:
        hashes = data if isinstance(data, dict) else {str(path): sha256_of(path) for path in data}
        self.is_new = True
        facts = {
            "args": _as_json(vars(args)),
            "command": sys.argv,
            "versions": {"python": platform.python_version(), "torch": str(torch.__version__)}  # with its build
            | {package: version(package) for package in PACKAGES},
            "commit": commit(),
            "data_sha256": hashes,
        } | facts
        write_text(self.folder / "args.json", json.dumps(facts, indent=2) + "\n")

    def release(self) -> None:
        """Give up the lock."""
        if self.lock is not None:
            os.close(self.lock)
        self.lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @classmethod
    def reopen(cls, folder: Path) -> Self:
        """An existing run, to read from; `facts` returns what it recorded when it was started."""
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
        check_extension: Callable[[int], None],
        **facts: Any,
    ) -> Self:
        """An existing run, if it was started with the same flags and the same data; a new one if there is none yet.

        upgrade: completes the flags of a run that is older than some of them. may_differ: flags that do not matter.
        check_extension: refuses to continue a run that was started with this other number of epochs.
        """
        if not folder.is_dir() or not _files(folder):
            print(f"{folder}: there is no such run yet, so it starts from the beginning", flush=True)
            return cls.create(folder, args, data, **facts)
        cls.reopen(folder)  # refuses the directory of something else, and leaves it as it is
        run = cls._locked(folder)
        try:
            run._must_match(args, upgrade, data, may_differ)
            if args.epochs != (before := run.facts["args"].get("epochs")):
                check_extension(before)
                run._must_have_state(args.epochs, before)
            for path in folder.glob(f".*{TEMPORARY}"):  # of a process that was killed while it wrote them
                remove(path)
        except BaseException:
            run.release()
            raise
        return run

    def _must_match(
        self,
        args: argparse.Namespace,
        upgrade: Callable[[dict[str, Any]], dict[str, Any]],
        data: list[Path],
        may_differ: set[str],
    ) -> None:
        then, now = _as_json(upgrade(self.facts["args"])), _as_json(vars(args))
        other = [key for key, value in now.items() if key not in may_differ and then.get(key) != value]
        if other:
            shown = ", ".join(f"--{key} {then.get(key)} (now {now[key]})" for key in other[:5])
            shown += f" and {len(other) - 5} more" if len(other) > 5 else ""
            raise InputError(f"{self.folder}: was started with {shown}. Use the same flags, or another --name.")
        changed = [str(path) for path in data if self.facts["data_sha256"].get(str(path)) != sha256_of(path)]
        if changed:
            raise InputError(
                f"{self.folder}: {', '.join(changed)} changed since the run was started. Use another --name."
            )

    def _must_have_state(self, epochs: int, before: int) -> None:
        """Refuse to extend a finished run whose state was removed."""
        if self.finished and not (self.folder / "state.pt").is_file():
            raise InputError(
                f"--resume --epochs {epochs}: {self.folder} finished its {before} epochs, and its state was "
                "removed. Train with --keep_state to extend a run later, or start anew with another --name."
            )

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

    @property
    def finished(self) -> bool:
        """Whether the run has been trained to its end."""
        return (self.folder / "dev.json").is_file()

    def scores(self) -> dict[str, float]:
        """The best epoch's scores of a finished run."""
        path, rule = self.folder / "dev.json", "JSON with the run's scores"
        found = read_json(path, rule, "Train the run again.")
        if not all(isinstance(value, int | float) for value in found.values()):
            raise InputError(f"{path}: must be {rule}, found a value that is not a number. Train the run again.")
        return found

    # The log

    @property
    def seconds(self) -> float:
        """The time spent on this run, including that before it was resumed."""
        return self.seconds_before + time.monotonic() - self.started - self.seconds_aside

    def log(self, **event: Any) -> None:
        """Add a line to the log; it is in the file after `write_log`."""
        self.lines.append(json.dumps(event | {"seconds": round(self.seconds, 2)}) + "\n")

    def write_log(self) -> None:
        """Append the new lines to the file. A symbolic link is not followed."""
        path = self.folder / "log.jsonl"
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
            with os.fdopen(handle, "a", encoding="utf-8") as file:
                file.writelines(self.lines[self.written :])
                file.flush()
                os.fsync(handle)
        except OSError as error:
            raise InputError(could_not_write(path, error)) from error
        self.written = len(self.lines)

    def restore_log(self, lines: list[str], seconds: float) -> None:
        """Make the log file that of the state from which the run is resumed."""
        self.lines, self.written, self.seconds_before = list(lines), len(lines), seconds
        self.started, self.seconds_aside = time.monotonic(), 0.0
        write_text(self.folder / "log.jsonl", "".join(lines))

    def command(self) -> str:
        """The command that continues this run."""
        script = Path(sys.argv[0]).name
        if script == "sweep.py":
            return "the same command"
        if script not in TRAINING_SCRIPTS:
            return f"the same flags, --name {self.folder.name} and --resume"
        processes = os.environ.get("LOCAL_WORLD_SIZE")
        launcher = f"torchrun --nproc_per_node={processes}" if processes else "python"
        words = [word for word in sys.argv[1:] if word != "--resume"]
        if not any(word.partition("=")[0] == "--name" for word in words):
            words += ["--name", self.name_of_flag]
        return f"{launcher} {shlex.join([sys.argv[0], *words])} --resume"

    @property
    def name_of_flag(self) -> str:
        """The value of --name: Part 1 has a directory per task inside that of its name."""
        return self.folder.parent.name if Path(sys.argv[0]).name == "classifier.py" else self.folder.name


@contextlib.contextmanager
def shared_run(world: World, open_run: Callable[[], Run]) -> Iterator[Run]:
    """The run of all processes, which the first one opens; it also keeps a copy of what it prints there."""
    own = world.on_main(open_run)
    run = own or Run(world.broadcast(None))
    if own is not None:
        world.broadcast(run.folder)
    with contextlib.ExitStack() as stack:
        stack.enter_context(run)
        if world.is_main:
            path = run.folder / "output.txt"
            try:
                stack.enter_context(console.recorded(path))
            except OSError as error:  # such as a symbolic link
                raise InputError(could_not_write(path, error)) from error
        try:
            yield run
        except Stopped as stopped:
            if "Go on with" not in stopped.message:
                stopped.message += f". Go on with: {run.command()}"
            raise


def _files(folder: Path) -> list[Path]:
    """What is in the directory, without locks and temporary files."""
    return [path for path in folder.iterdir() if path.name != LOCK and not path.name.endswith(TEMPORARY)]


def _as_json(flags: dict[str, Any]) -> dict[str, Any]:
    """The flags as they would be read back from JSON."""
    return json.loads(json.dumps(flags, default=str))


@functools.cache
def commit() -> str | None:
    """The project's commit, followed by + if the work tree differs from it; None outside git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
