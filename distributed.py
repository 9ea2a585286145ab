"""Several processes that train one model: `torchrun --nproc_per_node=2 multitask_classifier.py ...`.

Every process reads the same data, draws the same batches, and keeps the same weights. The encoder's work is divided:

  1. Inside `sharing`, the rows of a batch are split (`local`); each process encodes its own rows.
  2. The pooled vectors are gathered (`gather`), so that heads, losses and regularizers see the whole batch in every
     process. A contrastive loss therefore has the negatives of all processes, uneven shares need no weights, and every
     process computes the same loss as one process with the whole batch.
  3. In the backward pass, each process computes the gradient of its own rows. The means over the processes, which are
     taken of each task's gradient before tasks are combined (`average`), are the gradients of the whole batch.

Evaluation is split by batches. The first process alone writes files and prints. This is not DistributedDataParallel,
whose hooks would average gradients before gradient surgery could see those of single tasks.

A process that has died is noticed by the others at their next exchange, and one that is stuck by a heartbeat: either
ends the run with a message, and `--resume` continues it, with any number of processes.
"""

import contextlib
import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

import interruption
from tasks import Encoded
from utils import InputError

Result = TypeVar("Result")
BUCKET = 2**23  # elements that are exchanged at a time: 32 MB in float32
PATIENCE = timedelta(minutes=30)  # for an exchange, such as with a process that writes a checkpoint to a slow disk
HEARTBEAT = 2.0  # seconds
SILENCE = 20.0  # seconds without a heartbeat after which a process counts as lost; torchrun then takes up to 30


class World:
    """One process on its own: nothing is split and nothing is exchanged."""

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is the process that prints and writes files."""
        return self.rank == 0

    @contextlib.contextmanager
    def sharing(self) -> Iterator[None]:
        """Inside this context, the rows of a batch are divided between the processes."""
        yield

    def local(self, rows: Tensor) -> Tensor:
        """This process's rows of a tensor with a row for every sentence of the batch."""
        return rows

    def gather(self, vectors: Tensor, count: int) -> Tensor:
        """The rows of all processes, `count` in all; gradients flow to this process's own rows."""
        return vectors

    def average(self, gradients: Iterable[Tensor | None]) -> None:
        """Replace gradients by their means over the processes, which are the gradients of the whole batch."""

    def sum(self, numbers: list[float]) -> list[float]:
        """The sums over the processes."""
        return numbers

    def collect(self, value: Result) -> list[Result]:
        """The values of all processes, in the order of their ranks."""
        return [value]

    def broadcast(self, value: Result) -> Result:
        """The first process's value."""
        return value

    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Replace the tensors by those of the first process."""

    def on_main(self, action: Callable[[], Result]) -> Result | None:
        """Call a function in the first process only and return its result there. Its InputError ends all processes."""
        return action()

    def seed_apart(self, seed: int) -> None:
        """Give every process its own dropout masks; the first has those of one process on its own."""

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """For each flag, whether it is set in any of the processes."""
        return flags


class Processes(World):
    """One of several processes, started by torchrun."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.is_sharing = False

    @contextlib.contextmanager
    def sharing(self) -> Iterator[None]:
        self.is_sharing = True
        try:
            yield
        finally:
            self.is_sharing = False

    def share(self, count: int) -> tuple[int, int]:
        """The first row of this process and the one after its last."""
        return self.rank * count // self.size, (self.rank + 1) * count // self.size

    def local(self, rows: Tensor) -> Tensor:
        if not self.is_sharing:
            return rows
        start, stop = self.share(len(rows))
        # With fewer rows than processes, some encode a row that `gather` leaves out, so that all have the same graph.
        return rows[start:stop] if start < stop else rows[:1]

    def gather(self, vectors: Tensor, count: int) -> Tensor:
        return _Gather.apply(vectors, self, count) if self.is_sharing else vectors

    @torch.no_grad()
    def average(self, gradients: Iterable[Tensor | None]) -> None:
        for bucket in in_buckets([gradient for gradient in gradients if gradient is not None]):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            with understandable_errors():
                dist.all_reduce(flat)
            flat /= self.size
            for gradient, part in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
                gradient.copy_(part.view_as(gradient))

    def sum(self, numbers: list[float]) -> list[float]:
        return [sum(column) for column in zip(*self.collect(numbers), strict=True)]

    def collect(self, value: Result) -> list[Result]:
        values: list[Any] = [None] * self.size
        with understandable_errors():
            dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: Result) -> Result:
        values = [value]
        with understandable_errors():
            dist.broadcast_object_list(values)
        return values[0]

    @torch.no_grad()
    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        with understandable_errors():
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def on_main(self, action: Callable[[], Result]) -> Result | None:
        result, problem = None, None
        if self.is_main:
            try:
                result = action()
            except InputError as error:
                problem = error
        message = self.broadcast(problem and str(problem))
        if problem is not None:
            raise problem
        if message is not None:
            sys.exit(2)  # the first process says why
        return result

    def seed_apart(self, seed: int) -> None:
        if self.rank:
            digest = hashlib.sha256(f"process {self.rank} of seed {seed}".encode()).digest()
            torch.manual_seed(int.from_bytes(digest[:7]))

    def any(self, *flags: bool) -> tuple[bool, ...]:
        found = torch.tensor(flags, dtype=torch.int32)  # on the CPU: nothing waits for a GPU
        with understandable_errors():
            dist.all_reduce(found, dist.ReduceOp.MAX)
        return tuple(map(bool, found.tolist()))


class _Gather(torch.autograd.Function):
    """The rows of all processes. Its backward pass returns the gradient of this process's rows, times their number.

    Every process computes the whole loss from all rows, so the gradient of its own rows is complete. The factor makes
    the mean over the processes, by which `average` treats all gradients alike, the sum over the rows.
    """

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, world: Processes, count: int) -> Tensor:
        start, stop = ctx.share = world.share(count)
        ctx.size, ctx.computed = world.size, len(vectors)
        longest = -(-count // world.size)
        padded = vectors.new_zeros(longest, *vectors.shape[1:])
        padded[: stop - start] = vectors[: stop - start]
        everyone = [torch.empty_like(padded) for _ in range(world.size)]
        with understandable_errors():
            dist.all_gather(everyone, padded)
        sizes = [(rank + 1) * count // world.size - rank * count // world.size for rank in range(world.size)]
        return torch.cat([rows[:size] for rows, size in zip(everyone, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        start, stop = ctx.share
        own = gradient.new_zeros(ctx.computed, *gradient.shape[1:])
        own[: stop - start] = gradient[start:stop] * ctx.size
        return own, None, None


def local_sentences(world: World, sentences: Encoded) -> Encoded:
    """This process's rows of stacked sentences."""
    return Encoded(*(None if part is None else world.local(part) for part in sentences))


def in_buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Groups of at most BUCKET elements and of one dtype, so that one exchange serves many small tensors."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        filled = sum(other.numel() for other in bucket)
        if bucket and (filled + tensor.numel() > BUCKET or bucket[0].dtype != tensor.dtype):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


@contextlib.contextmanager
def understandable_errors() -> Iterator[None]:
    """Say in one line that another process has died or does not answer."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0][:160]
        raise InputError(f"{LOST} ({reason}). {REMEDY}") from error


LOST = "another process of this run has ended or does not answer"
REMEDY = "What was saved before is intact. Look for its message above, then start the same command with the "
REMEDY += "run's --name and --resume."


# --- starting ---------------------------------------------------------------------------------------------------------


def launched() -> bool:
    """Whether torchrun started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "LOCAL_RANK" in os.environ


@contextlib.contextmanager
def started(use_gpu: bool) -> Iterator[World]:
    """Join the other processes, if torchrun started several; else yield the world of one process.

    All processes but the first are silent, except for errors.
    """
    if not launched():
        yield World()
        return
    on_gpus = use_gpu and torch.cuda.is_available()  # if there is none, choose_device says why
    if on_gpus:
        count, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
        if count > gpus:
            raise InputError(f"--nproc_per_node must be at most the number of GPUs, {gpus}; found {count}. Lower it.")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo", timeout=PATIENCE)
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0][:160]
        raise InputError(
            f"the processes could not find each other ({reason}). Check the addresses and ports given to torchrun."
        ) from error
    world = Processes()
    ended = threading.Event()
    watch = threading.Thread(target=_watch_the_others, args=(world, ended), daemon=True)
    watch.start()
    try:
        # A signal reaches the processes at different moments: they agree on when to stop (World.stop_requested).
        with interruption.deferred(), open(os.devnull, "w") as nowhere:
            out, err = (sys.stdout, sys.stderr) if world.is_main else (nowhere, nowhere)
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                yield world
            world.collect(None)  # none leaves before all are done, or its heartbeat would be missed
    finally:
        ended.set()
        watch.join(timeout=2 * HEARTBEAT)  # a thread that still uses its connection at the end would crash the process
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


def _watch_the_others(world: Processes, ended: threading.Event) -> None:
    """Send heartbeats, and end this process if another has none. A process that is stopped or cut off sends none."""
    address, timeout = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timedelta(seconds=SILENCE)
    last: dict[int, tuple[bytes, float]] = {}
    store, beat, reached = None, 0, time.monotonic()
    while not ended.wait(HEARTBEAT):
        beat += 1
        try:
            store = store or dist.TCPStore(*address, is_master=False, timeout=timeout)
            store.set(f"minbert/heartbeat/{world.rank}", str(beat))
            for rank in range(world.size):
                key = f"minbert/heartbeat/{rank}"
                found = store.get(key) if store.check([key]) else b""
                if rank not in last or last[rank][0] != found:
                    last[rank] = found, time.monotonic()
            reached = time.monotonic()
        except RuntimeError:
            store = None  # connect again
        silent = [f"process {rank}" for rank, (_, when) in last.items() if time.monotonic() - when > SILENCE]
        silent += ["torchrun"] if time.monotonic() - reached > SILENCE else []
        if silent and not ended.is_set():
            os.write(2, f"error: {silent[0]} has not answered for {SILENCE:.0f} s. {REMEDY}\n".encode())
            os._exit(1)
