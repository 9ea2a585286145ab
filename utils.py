"""What every script needs: errors, seeds, device and precision, safe file writes, run directories."""

import argparse
import contextlib
import ctypes
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

PACKAGES = ("torch", "numpy", "numba", "tokenizers")  # a run records their versions

# --- errors and messages ----------------------------------------------------------------------------------------------


class InputError(ValueError):
    """A mistake that the user can fix; one line: what, rule, found, remedy. Scripts print it and exit with status 2."""


def warn(message: str) -> None:
    print(f"note: {message}", file=sys.stderr)


def run_script(main: Callable[[], None]) -> None:
    """Run a script's main. A mistake that the user can fix ends in one line and exit status 2, without a traceback."""
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
    """The states of the generators that dropout draws from, on the CPU and on the GPU in use."""
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def restore_random_states(states: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"].cpu())
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"].cpu(), device)


@contextlib.contextmanager
def replayed(state: dict[str, Tensor] | None, device: torch.device) -> Iterator[None]:
    """Draw the same random numbers again as after `state` was taken, then continue as if nothing had been drawn."""
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
    """Mixed precision: an autocast context and a loss scaler; in fp32 both do nothing."""

    DTYPES: ClassVar = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

    def __init__(self, name: str, device: torch.device):
        self.name, self.device = name, device
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.DTYPES[self.name], enabled=self.name != "fp32")


def keep_freed_memory() -> None:
    """Tell glibc to keep freed blocks of up to 32 MB, so that each training step reuses the previous step's memory.

    By default glibc returns large blocks to the kernel and maps them again page by page: about 5% of a step.
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
def dry_run_directory() -> Iterator[Path]:
    """Yield a temporary directory for everything that a dry run writes; at the end, say that nothing was kept."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)
    print("dry run: two steps of everything went through; nothing was kept.")


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path` to write to; rename it to `path` at the end, remove it on failure."""
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
    """Write a text file completely or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def writable_directory(path: Path, flag: str) -> Path:
    """Create the directory and make sure that a file can be written there, before hours of training are spent."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        raise InputError(f"{flag} {path}: must be a writable directory; {error.strerror}. Choose another.") from error


# --- runs -------------------------------------------------------------------------------------------------------------


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
            "versions": {"python": platform.python_version()} | {p: version(p) for p in PACKAGES},
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
        path = self.folder / "args.json"
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
            if not all(isinstance(facts[table], dict) for table in ("args", "data_sha256")):
                raise TypeError("it has no table of flags")
            return facts
        except (ValueError, KeyError, TypeError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else error
            raise InputError(f"{path}: must be JSON with a run's flags; {reason}. Train the run again.") from error

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


def get_extended_attention_mask(attention_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The starter's mask to add to attention scores: (B, T) of 1 and 0 -> (B, 1, 1, T) of 0 and -10000.

    bert.py has -inf for padding, so that its attention weight is exactly 0.
    """
    return (1.0 - attention_mask[:, None, None, :].to(dtype)) * -10000.0


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """The number of trainable parameters, and of all."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(n for n, trainable in sizes if trainable), sum(n for n, _ in sizes)
