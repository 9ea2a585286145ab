"""What every script needs and no method owns: errors, flags, seeds, device and precision, whole-file writes, runs."""

import argparse
import contextlib
import ctypes
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Self

import torch
from torch import Tensor, nn

PACKAGES = ("torch", "numpy", "numba", "tokenizers")  # whose versions a run notes down

# --- errors and messages ----------------------------------------------------------------------------------------------


class InputError(ValueError):
    """Something the user can mend. Its message is one line: what, rule, found, remedy. Scripts print it and exit 2."""


def warn(message: str) -> None:
    print(f"note: {message}", file=sys.stderr)


def run_script(main: Callable[[], None]) -> None:
    """Runs a script's main; what the user can mend ends in one line and status 2, without a traceback."""
    keep_freed_memory()
    try:
        main()
    except InputError as error:
        sys.exit(_fail(str(error), 2))
    except KeyboardInterrupt:
        sys.exit(_fail("interrupted", 130))


def _fail(message: str, status: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return status


# --- flags ------------------------------------------------------------------------------------------------------------


class ArgumentParser(argparse.ArgumentParser):
    """argparse with flag files: `@recipes/x.txt` stands for the flags in that file; `#` starts a comment."""

    def __init__(self, **options: Any):
        super().__init__(
            fromfile_prefix_chars="@",
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
            allow_abbrev=False,
            **options,
        )

    def error(self, message: str) -> NoReturn:
        """One line, as for every other mistake, instead of all flags and then the line."""
        if unreadable := re.match(r"\[Errno \d+\] (.+): '(.+)'$", message):  # argparse of a recipe
            reason, path = unreadable.groups()
            self.exit(2, f"error: {path}: cannot be read; {reason}. recipes/README.md lists all recipes.\n")
        if re.match(r"unrecognized arguments: .*\.txt\b", message):
            message += ". A file of flags is given as @FILE"
        self.exit(2, f"error: {message.rstrip('.')}. See {self.prog} --help.\n")

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        return arg_line.partition("#")[0].split()


def number(kind: type, low: float, high: float, *, above: bool = False) -> Callable[[str], Any]:
    """An argparse type: a number from low to high; `above` leaves out low itself."""

    def parse(text: str) -> Any:
        rule = f"must be {'above' if above else 'at least'} {low:g} and at most {high:g}"
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{rule}, found {text!r}") from None
        if not (low < value if above else low <= value) or not value <= high:
            raise argparse.ArgumentTypeError(f"{rule}, found {text!r}")
        return value

    return parse


FINE_TUNE_MODES = {"last-linear-layer": "pretrain", "full-model": "finetune"}  # the later handouts' --option


def fine_tune_mode(name: str) -> str:
    """An argparse type: the option of that name."""
    if name not in FINE_TUNE_MODES:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(FINE_TUNE_MODES)}, found {name!r}")
    return FINE_TUNE_MODES[name]


# --- seeds, device, precision -----------------------------------------------------------------------------------------


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)  # the CPU's generator and every GPU's
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def choose_device(use_gpu: bool) -> torch.device:
    if use_gpu and not torch.cuda.is_available():
        raise InputError("--use_gpu needs a CUDA device, found none. Leave the flag out, or check `nvidia-smi`.")
    return torch.device("cuda" if use_gpu else "cpu")


def random_states(device: torch.device) -> dict[str, Tensor]:
    """The generators that dropout draws from, on the CPU and on the GPU in use."""
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def restore_random_states(states: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"].cpu())
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"].cpu(), device)


@contextlib.contextmanager
def replayed(state: dict[str, Tensor] | None, device: torch.device) -> Iterator[None]:
    """Draws the same random numbers again as after `state` was taken, then goes on as if nothing had been drawn."""
    if state is None:
        yield
        return
    now = random_states(device)
    restore_random_states(state, device)
    try:
        yield
    finally:
        restore_random_states(now, device)


class Precision:
    """Mixed precision: an autocast context and a loss scaler, both of which do nothing in fp32."""

    DTYPES: ClassVar = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

    def __init__(self, name: str, device: torch.device):
        self.name, self.device = name, device
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.DTYPES[self.name], enabled=self.name != "fp32")


def keep_freed_memory() -> None:
    """Tells glibc to keep freed blocks of up to 32 MB, so that each training step finds the last one's memory mapped.

    By default it hands large blocks back to the kernel and faults them in anew, page by page: a twentieth of a step.
    """
    m_trim_threshold, m_mmap_threshold = -1, -3  # malloc.h
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(m_mmap_threshold, 2**25)
        libc.mallopt(m_trim_threshold, 2**31 - 1)


# --- files ------------------------------------------------------------------------------------------------------------


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary name beside `path` to write to; renamed over it at the end, removed on failure."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a text file whole or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def writable_directory(path: Path, flag: str) -> Path:
    """Creates the directory and makes sure that a file can be written there, before hours of training go by."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        raise InputError(
            f"{flag} {path}: must be a directory that can be written to; {error.strerror}. Choose another."
        ) from error


# --- runs -------------------------------------------------------------------------------------------------------------


class Run:
    """One directory per training run: its flags and versions, its log, its best weights."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.started = time.monotonic()

    @staticmethod
    def must_be_new(folder: Path) -> None:
        if folder.exists():
            raise InputError(
                f"{folder}: the run exists already. Give another --name, remove the directory, or go on with it by "
                "--resume (multitask_classifier.py, pretrain.py)."
            )

    @classmethod
    def create(cls, folder: Path, args: argparse.Namespace, data: list[Path] | dict[str, str]) -> Self:
        """data: the files, or their sha256 by path where it is known already."""
        cls.must_be_new(folder)
        hashes = data if isinstance(data, dict) else {str(path): sha256_of(path) for path in data}
        writable_directory(folder, "--runs")
        facts = {
            "args": _plain(vars(args)),
            "command": sys.argv,
            "versions": {"python": platform.python_version()} | {p: version(p) for p in PACKAGES},
            "commit": _commit(),
            "data_sha256": hashes,
        }
        write_text(folder / "args.json", json.dumps(facts, indent=2) + "\n")
        return cls(folder)

    @classmethod
    def reopen(cls, folder: Path) -> Self:
        """A run that is there already; `facts` gives what it noted down at its start."""
        if not (folder / "args.json").is_file():
            raise InputError(f"{folder}: must be the directory of a run, but has no args.json. Check the name.")
        return cls(folder)

    @property
    def facts(self) -> dict[str, Any]:
        path = self.folder / "args.json"
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if not all(isinstance(found[table], dict) for table in ("args", "data_sha256")):
                raise TypeError("it has no table of flags")
            return found
        except (ValueError, KeyError, TypeError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else error
            raise InputError(f"{path}: must be JSON with a run's flags; {reason}. Train the run again.") from error

    def must_match(self, args: argparse.Namespace, data: list[Path], may_differ: set[str]) -> None:
        """Refuses to go on with other flags or other data than the run was started with."""
        facts, now = self.facts, _plain(vars(args))
        other = [k for k, v in now.items() if k not in may_differ and facts["args"].get(k) != v]
        if other:
            shown = ", ".join(f"--{k} {facts['args'].get(k)} (now {now[k]})" for k in other[:5])
            shown += f" and {len(other) - 5} more" if len(other) > 5 else ""
            raise InputError(f"{self.folder}: was started with {shown}. Give the same flags, or another --name.")
        changed = [str(p) for p in data if facts["data_sha256"].get(str(p)) != sha256_of(p)]
        if changed:
            raise InputError(f"{self.folder}: {', '.join(changed)} changed since it was started. Give another --name.")

    def log(self, **event: Any) -> None:
        event["seconds"] = round(time.monotonic() - self.started, 2)
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")


def _plain(flags: dict[str, Any]) -> dict[str, Any]:
    """Flags as JSON would give them back."""
    return json.loads(json.dumps(flags, default=str))


def _commit() -> str | None:
    """The project's commit, with a + where the work tree differs from it; None outside git."""
    here = Path(__file__).parent
    asked = ["git", "-C", str(here), "describe", "--always", "--dirty=+", "--abbrev=12"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """(trainable, all)"""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(n for n, trainable in sizes if trainable), sum(n for n, _ in sizes)
