"""What every script needs: errors, seeds, device and precision, safe file writes."""

import contextlib
import ctypes
import errno
import glob
import hashlib
import itertools
import json
import math
import os
import platform
import secrets
import shutil
import subprocess
import sys
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

import console
import interruption
from products import best_matmul_precision

# oneDNN, torch's library for CPUs, prepares every operation for its exact shapes and keeps the result, 1024 in each of
# two caches. With sentences of all lengths that adds up to a gigabyte, and hardly any of it is used again. 64 are more
# than one batch needs; docs/GPU.md, "On a CPU", has memory and times. oneDNN reads these variables at its first
# operation, so they are set on import. A value that the user has set stays.
for _variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_variable, "64")

# --- errors and messages ----------------------------------------------------------------------------------------------


LONGEST_MESSAGE = 1000  # characters; what is found in a damaged file can have any length


class InputError(ValueError):
    """A mistake that the user can fix; one line: what, rule, found, remedy. Scripts print it and exit with status 2.

    What was found may come from a damaged file: the message is made printable, and if it is too long, it
    loses its middle.
    """

    def __init__(self, message: object):
        text = printable(str(message))
        half = LONGEST_MESSAGE // 2 - 5
        super().__init__(text if len(text) <= LONGEST_MESSAGE else f"{text[:half]} [...] {text[-half:]}")


JOINERS = "\u200c\u200d"  # invisible, but part of some scripts' words and of some emoji


def printable(text: str) -> str:
    """The text with line ends and control characters escaped, so that it is one line and cannot drive a terminal."""
    return "".join(c if c.isprintable() or c in JOINERS else c.encode("unicode_escape").decode() for c in text)


def warn(message: str) -> None:
    print(f"note: {message}", file=sys.stderr)


def run_script(main: Callable[[], None]) -> None:
    """Run a script's main. A mistake that the user can fix ends in one line and exit status 2, without a traceback.

    SIGINT, SIGTERM and SIGHUP end in one line too, with the status that a shell would report for the signal.
    """
    keep_freed_memory()
    with console.robust(), interruption.handled():
        try:
            main()
        except InputError as error:
            sys.exit(_fail(str(error), 2))
        except torch.OutOfMemoryError as error:
            sys.exit(_fail(out_of_memory(str(error)), 2))
        except interruption.Stopped as stop:
            is_first = os.environ.get("RANK", "0") == "0"  # of the processes that torchrun started
            sys.exit(_fail(stop.message, stop.status) if is_first else stop.status)
        except KeyboardInterrupt:
            sys.exit(_fail("interrupted", 130))


def out_of_memory(message: str) -> str:
    """One line: what torch said first, and the flags that need less memory, the cheapest first."""
    reason = (message.strip() or "no details").splitlines()[0].split(". ")[0]
    return (
        f"the GPU is out of memory ({reason}). In the order of their cost: use --precision fp16, a smaller "
        "--max_length, --batch_size or --max_tokens (--accumulate keeps the rows per update) or --eval_batch_size, "
        "--checkpoint_activations, or --keep_layers; docs/GPU.md has the memory of each."
    )


def _fail(message: str, status: int) -> int:
    rank = os.environ.get("RANK", "0")  # set by torchrun
    process = "" if rank == "0" else f" in process {rank}"
    print(f"error{process}: {message}", file=sys.stderr)
    return status


# --- seeds, device, precision -----------------------------------------------------------------------------------------


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)  # the CPU's generator and every GPU's
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


OLDEST_DRIVERS = {"12": 525, "13": 580}  # by CUDA's major version, from NVIDIA's table of minor version compatibility
BF16_CAPABILITY = TF32_CAPABILITY = (8, 0)  # Ampere; older GPUs emulate bfloat16 and have no TF32


def choose_device(use_gpu: bool, precision: str = "fp32", deterministic: bool = False) -> torch.device:
    """The device to compute on, with torch set up for it. Call this before anything is on the GPU."""
    set_deterministic(deterministic)
    if not use_gpu:
        torch.set_float32_matmul_precision(best_matmul_precision())
        return torch.device("cpu")
    with warnings.catch_warnings(action="ignore"):  # torch warns about an old driver; the error below says more
        available = torch.cuda.is_available()
    if not available:
        raise InputError(why_no_gpu(torch.__version__, torch.version.cuda, driver_version()))
    capability = torch.cuda.get_device_capability()
    check_precision(precision, capability, torch.cuda.get_device_name())
    torch.set_float32_matmul_precision(matmul_precision(precision, capability, deterministic))
    return torch.device("cuda")


def set_deterministic(on: bool) -> None:
    """Restrict torch to deterministic algorithms, or lift the restriction."""
    if on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when CUDA starts
        torch.utils.deterministic.fill_uninitialized_memory = False  # it is for debugging and costs time
    if on != torch.are_deterministic_algorithms_enabled():  # the call takes two seconds, even if nothing changes
        torch.use_deterministic_algorithms(on)


def why_no_gpu(torch_version: str, cuda: str | None, driver: str | None) -> str:
    """The reason why torch cannot use a GPU here, in one line with the remedy.

    cuda: the version that torch was built for, None for a build without it. driver: the version of NVIDIA's driver,
    None if there is none.
    """
    if driver is None:
        build = "" if cuda else f", and torch {torch_version} is a build for the CPU only"
        return f"--use_gpu needs a CUDA device, found none: `nvidia-smi` finds no driver{build}. Leave the flag out."
    if cuda is None:
        return (
            f"--use_gpu needs a torch built for CUDA, found torch {torch_version}, a build for the CPU only (driver "
            f"{driver}). Run `source setup.sh` in a new environment, or leave the flag out."
        )
    oldest = OLDEST_DRIVERS.get(cuda.split(".")[0], 0)
    major = int(driver.split(".")[0])
    if major < oldest:
        other = "Run `source setup.sh`, which installs a torch for this driver, or update"
        return (
            f"--use_gpu: torch {torch_version} is built for CUDA {cuda}, which needs NVIDIA driver {oldest} or later, "
            f"found {driver}. {other if major >= min(OLDEST_DRIVERS.values()) else 'Update'} the driver."
        )
    return (
        f"--use_gpu needs a CUDA device, found none that torch {torch_version} (CUDA {cuda}) can use with driver "
        f"{driver}. Check CUDA_VISIBLE_DEVICES and `nvidia-smi`, or leave the flag out."
    )


def driver_version() -> str | None:
    """The version of NVIDIA's driver; None if there is none."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return found[0] if found and found[0][0].isdigit() else None


def check_precision(precision: str, capability: tuple[int, int], gpu: str) -> None:
    """Refuse bf16 on a GPU that only emulates it: it would be slower than fp32."""
    if precision == "bf16" and capability < BF16_CAPABILITY:
        raise InputError(
            f"--precision bf16 needs a GPU of compute capability {_dotted(BF16_CAPABILITY)} or later, found "
            f"{_dotted(capability)} ({gpu}). Use --precision fp16."
        )


def matmul_precision(precision: str, capability: tuple[int, int], deterministic: bool) -> str:
    """Return torch's name of TF32, products with a mantissa of 10 bits, for fp32 on a GPU that has it."""
    return "high" if precision == "fp32" and capability >= TF32_CAPABILITY and not deterministic else "highest"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def random_states(device: torch.device) -> dict[str, Tensor]:
    """The states of the generators that dropout draws from, on the CPU and on the GPU in use."""
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def restore_random_states(states: dict[str, Tensor], device: torch.device) -> None:
    """Restore the generators of the CPU and of the GPU in use.

    A run that was saved on the CPU has no state for a GPU, whose generator is then seeded from the CPU's state.
    """
    torch.set_rng_state(states["cpu"].cpu())
    if device.type != "cuda":
        return
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"].cpu(), device)
    else:
        digest = hashlib.sha256(states["cpu"].cpu().numpy().tobytes()).digest()
        torch.cuda.manual_seed(int.from_bytes(digest[:7]))


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


class SideStream:
    """A second sequence of random numbers: what draws from it does not shift the global one.

    So two runs that differ in a regularizer have the same dropout masks in the passes that both make.
    """

    def __init__(self, seed: int = 0):
        self.seed = seed
        self.states: dict[str, Tensor] | None = None  # where the sequence is; None before the first number

    @contextlib.contextmanager
    def drawn(self, device: torch.device) -> Iterator[None]:
        """Inside this context, the global generators continue this sequence."""
        outside = random_states(device)
        if self.states is None:
            torch.manual_seed(self.seed + 0x9E3779B1)  # not the seed of the global sequence
        else:
            restore_random_states(self.states, device)
        try:
            yield
        finally:
            self.states = random_states(device)
            restore_random_states(outside, device)

    def state_dict(self) -> dict[str, Any]:
        return {"states": self.states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.states = state["states"]


class Precision:
    """Mixed precision: an autocast context and a loss scaler; in fp32 both do nothing."""

    DTYPES: ClassVar = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

    def __init__(self, name: str, device: torch.device):
        self.name, self.device = name, device
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")

    def autocast(self) -> torch.autocast:
        """A region of mixed precision. It casts each trainable weight once, so one region holds as much as possible.

        The weights must not change inside. No pass over them may run there without gradients before one with gradients:
        the older torch would use its casts, which have no graph (docs/PITFALLS.md, 41).
        """
        return torch.autocast(self.device.type, self.DTYPES[self.name], enabled=self.name != "fp32")

    def paused(self) -> torch.autocast:
        """Full precision inside a region, for a backward pass. The region keeps its casts of the weights."""
        return torch.autocast(self.device.type, enabled=False)


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


def digest(value: Any) -> str:
    """The sha256 of nested dicts and lists of tensors, arrays and plain values.

    It is a checksum of contents: files carry it beside what they store, and it is verified on reading.
    """
    checksum = hashlib.sha256()

    def feed(part: Any) -> None:
        if isinstance(part, Tensor):
            part = part.detach().cpu().contiguous()
            checksum.update(f"{part.dtype} {tuple(part.shape)}".encode())
            checksum.update(part.reshape(-1).view(torch.uint8).numpy().data)
        elif isinstance(part, np.ndarray):
            checksum.update(f"{part.dtype.str} {part.shape}".encode())
            checksum.update(np.ascontiguousarray(part).tobytes())
        elif isinstance(part, dict | list | tuple):
            checksum.update(f"{type(part).__name__} {len(part)}".encode())
            for item in itertools.chain.from_iterable(part.items()) if isinstance(part, dict) else part:
                feed(item)
        else:
            checksum.update(f"{type(part).__name__} {part!r}".encode())
        checksum.update(b";")

    feed(value)
    return checksum.hexdigest()


def read_json(path: Path, rule: str, remedy: str) -> dict[str, Any]:
    """Read a JSON file that must contain an object. Whatever else is in the file is an InputError.

    rule: completes "FILE: must be ...", such as "JSON with a run's flags". remedy: the error's last sentence. NaN and
    infinities, which are not JSON, are refused, and so is a number like 1e999 that does not fit a float.
    """
    try:
        return parse_json(path.read_bytes().decode("utf-8-sig"))
    except (OSError, ValueError) as error:  # a UnicodeDecodeError is a ValueError
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error
        reason = getattr(error, "strerror", None) or reason
        raise InputError(f"{path}: must be {rule}; {reason}. {remedy}") from error


def parse_json(text: str) -> dict[str, Any]:
    """Parse text that must be a JSON object; a ValueError with a short message if it is anything else."""

    def finite(number: str) -> float:
        value = float(number)
        if not math.isfinite(value):
            raise ValueError(f"numbers must be finite, found {number[:20]}")
        return value

    try:
        value = json.loads(text, parse_float=finite, parse_constant=finite)
        if "\\ud" in text.lower():  # perhaps half a character (a lone surrogate), which nothing can encode
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("it contains half a character, a lone surrogate") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} (line {error.lineno}, column {error.colno})") from error
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"it is a {type(value).__name__}, not an object")
    return value


MOST_INFLATED = 1100  # bytes from one compressed byte; deflate cannot give more than 1032


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read all arrays of an .npz file; a ValueError or OSError if it is anything else.

    The shape and type that an array declares are compared with the size of the file before memory is allocated for it.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            size = path.stat().st_size
            for entry in archive.infolist():
                with archive.open(entry) as file:
                    _check_header(file, entry.file_size, MOST_INFLATED * size)
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except OSError:
        raise
    except Exception as error:  # zipfile, zlib, struct, ast and tokenize each raise their own kind for a damaged file
        raise ValueError(f"{error!s:.100}" or type(error).__name__) from error


def _check_header(file: IO[bytes], size: int, most: int) -> None:
    """Refuse an array of Python objects, or one that does not have exactly the size of its entry in the archive."""
    version = np.lib.format.read_magic(file)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"its format {version} is not known")
    shape, _, dtype = readers[version](file)
    declared = math.prod(shape) * dtype.itemsize
    if dtype.hasobject or min(shape, default=0) < 0 or declared != size - file.tell() or declared > most:
        raise ValueError(f"shape {shape!s:.40} of {dtype!s:.20} does not fit the file")


@contextlib.contextmanager
def dry_run_directory() -> Iterator[Path]:
    """Yield a temporary directory for everything that a dry run writes; at the end, say that nothing was kept."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)
    print("dry run: two steps of everything went through; nothing was kept.")


@contextlib.contextmanager
def atomic_path(path: Path, size: int | None = None) -> Iterator[Path]:
    """Yield a temporary path beside `path` to write to; at the end flush it to the disk and rename it to `path`.

    Whatever happens, `path` is either the complete old file or the complete new one, and never a symbolic link's
    target. If the file cannot be written, an InputError says so in one line. size: the file's bytes, for that line.
    """
    temporary = path.with_name(f".{path.name}.{MACHINE}-{os.getpid()}-{secrets.token_hex(3)}{TEMPORARY}")
    try:
        temporary.open("xb").close()
        permissions = temporary.stat().st_mode  # those that the umask allows
        yield temporary
        temporary.chmod(permissions)  # safetensors makes its files private
        _flush_to_disk(temporary)
        temporary.replace(path)
        _flush_to_disk(path.parent)
        _remove_leftovers(path)
    except torch.OutOfMemoryError:
        raise
    except (OSError, RuntimeError, SafetensorError) as error:  # the last two are how torch and safetensors report it
        raise InputError(could_not_write(path, error, size)) from error
    finally:
        with contextlib.suppress(OSError):  # the directory may have vanished, or have become read-only
            temporary.unlink(missing_ok=True)


TEMPORARY = ".tmp"  # the end of temporary files' names
MACHINE = f"{zlib.crc32(platform.node().encode()):08x}"


def _remove_leftovers(path: Path) -> None:
    """Remove the temporary files for this path of processes of this machine that were killed."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.{MACHINE}-*-*{TEMPORARY}"):
        with contextlib.suppress(OSError, ValueError):
            try:
                os.kill(int(leftover.name.split("-")[-2]), 0)  # only asks whether the process is alive
            except ProcessLookupError:
                leftover.unlink()


def _flush_to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):  # not all can flush a directory
            raise
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Remove a file if it is there."""
    if not os.path.lexists(path):  # on a read-only disk, removing nothing is an error too
        return
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(
            f"{path}: could not be removed ({os.strerror(error.errno)}). Make the directory writable."
        ) from error


def could_not_write(path: Path, error: Exception, size: int | None = None) -> str:
    """One line: the path, the reason, the disk's free space, and what to do."""
    reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else ""
    needed = f"; the file needs {megabytes(size)}" if size else ""
    try:
        place = next(folder for folder in (path.parent, *path.parent.parents) if folder.is_dir())
        free = shutil.disk_usage(place).free
    except OSError:
        return f"{path}: could not be written ({reason or error}{needed}). Check the directory and its disk."
    if not path.parent.is_dir():
        return f"{path}: could not be written, since the directory {path.parent} no longer exists. Restore it."
    full = (size is not None and free < size) or free < 2**20 or getattr(error, "errno", 0) in DISK_IS_FULL
    reason = reason or (os.strerror(errno.ENOSPC) if full else str(error).strip().splitlines()[0][:120])
    remedy = "Free some space" if full else "Make it writable"
    return (
        f"{path}: could not be written ({reason}). The disk of {place.absolute()} has {megabytes(free)} free{needed}. "
        f"Earlier files are intact. {remedy}, or choose another directory."
    )


DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def write_text(path: Path, text: str) -> None:
    """Write a text file completely or not at all."""
    content = text.encode()
    with atomic_path(path, len(content)) as temporary:
        temporary.write_bytes(content)


def writable_directory(path: Path, flag: str) -> Path:
    """Create the directory and make sure that a file can be written there, before hours of training are spent."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"x")
            return path
    except OSError as error:
        raise InputError(f"{flag} {path}: must be a writable directory; {error.strerror}. Choose another.") from error


def require_space(path: Path, size: int, what: str, flag: str) -> None:
    """Refuse to start what would fill the disk."""
    free = shutil.disk_usage(path).free
    if free < size:
        raise InputError(
            f"{flag} {path}: {what} {megabytes(size)}, but the disk has {megabytes(free)} free. Free some space, "
            f"or choose another {flag}."
        )


def in_words(seconds: float) -> str:
    """A duration, roughly: 40 s, 12 min, 3 h 20 min."""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def thinned(values: Sequence[float | None], most: int) -> list[float | None]:
    """A curve with at most this many points: the means of equal parts of the values; None where a part has none."""
    size = -(-len(values) // most) or 1
    parts = ([v for v in values[i : i + size] if v is not None] for i in range(0, len(values), size))
    return [sum(part) / len(part) if part else None for part in parts]


def get_extended_attention_mask(attention_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The starter's mask to add to attention scores: (B, T) of 1 and 0 -> (B, 1, 1, T) of 0 and -10000.

    bert.py has -inf for padding, so that its attention weight is exactly 0.
    """
    return (1.0 - attention_mask[:, None, None, :].to(dtype)) * -10000.0


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """The number of trainable parameters, and of all."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(n for n, trainable in sizes if trainable), sum(n for n, _ in sizes)
