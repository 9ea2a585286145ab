"""What every script needs and no method owns: errors, flags, seeds, device and precision, whole-file writes, runs."""

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
from safetensors.torch import load_file, save_file
from torch import nn

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


# --- seeds, device, precision -----------------------------------------------------------------------------------------


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)  # the CPU's generator and every GPU's
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def choose_device(use_gpu: bool) -> torch.device:
    if use_gpu and not torch.cuda.is_available():
        raise InputError("--use_gpu needs a CUDA device, found none. Leave the flag out, or check `nvidia-smi`.")
    return torch.device("cuda" if use_gpu else "cpu")


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

    @classmethod
    def create(cls, folder: Path, args: argparse.Namespace, data: list[Path]) -> Self:
        if folder.exists():
            raise InputError(f"{folder}: the run exists already. Give another --name, or remove the directory.")
        writable_directory(folder, "--runs")
        facts = {
            "args": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
            "command": sys.argv,
            "versions": {"python": platform.python_version()} | {p: version(p) for p in PACKAGES},
            "commit": _commit(),
            "data_sha256": {str(path): sha256_of(path) for path in data},
        }
        write_text(folder / "args.json", json.dumps(facts, indent=2) + "\n")
        return cls(folder)

    def log(self, **event: Any) -> None:
        event["seconds"] = round(time.monotonic() - self.started, 2)
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")

    def keep_best(self, model: nn.Module) -> None:
        """Keeps what training changes; a frozen encoder is in its checkpoint already."""
        tensors = {n: p.detach().cpu().contiguous() for n, p in model.named_parameters() if p.requires_grad}
        with atomic_path(self.folder / "best.safetensors") as path:
            save_file(tensors, path)

    def restore_best(self, model: nn.Module) -> None:
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, tensor in load_file(self.folder / "best.safetensors").items():
                parameters[name].copy_(tensor)


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
