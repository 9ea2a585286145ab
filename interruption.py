"""Signals that end a training: finish the step, save, then stop.

SIGTERM (a preempted machine), SIGHUP (a lost terminal) and SIGINT (Ctrl-C) raise `Stopped` where they arrive, which
unwinds the script. Inside `deferred()`, they wait until the end of the region, so that an update or a file is never
left half done. A second signal ends the process at once.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ECHO_SECONDS = 10.0  # torchrun forwards a signal that the terminal has already sent to every process


class Stopped(KeyboardInterrupt):
    """A signal asked the script to end."""

    def __init__(self, number: int):
        self.number, self.message = number, f"stopped by {signal.Signals(number).name}"
        super().__init__(self.message)

    @property
    def status(self) -> int:
        """The exit status that a shell would report for the signal: 130, 143 or 129."""
        return 128 + self.number


class _Received:
    """The signals of this process. A process has one set of signal handlers, so there is one such object."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.at = 0.0
        self.raised = False
        self.depth = 0  # of nested `deferred` regions

    def receive(self, number: int, frame: FrameType | None) -> None:
        if self.number is None:
            self.number, self.at = number, time.monotonic()
            if not self.depth:
                self.stop()
        elif "TORCHELASTIC_RUN_ID" not in os.environ or time.monotonic() - self.at > ECHO_SECONDS:
            # No traceback and no cleanup: every file on the disk is complete, whatever was being written.
            os.write(2, b"\nerror: stopped at once by a second signal. What was saved before is intact.\n")
            os._exit(128 + number)

    def stop(self) -> None:
        self.raised, self.at = True, self.at or time.monotonic()
        raise Stopped(self.number)


_received = _Received()


@contextlib.contextmanager
def handled() -> Iterator[None]:
    """Install the handlers. A signal that is ignored, such as SIGHUP under nohup, stays ignored."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    _received.__init__()
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _received.receive)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Let a signal wait until the end of this region, unless an exception ends it."""
    _received.depth += 1
    try:
        yield
    finally:
        _received.depth -= 1
    if requested() and not _received.depth and not _received.raised:
        _received.stop()


def requested() -> bool:
    """Whether a signal has arrived."""
    return _received.number is not None


def stop(number: int | None = None) -> None:
    """Raise Stopped for the signal that has arrived, or for `number` if another process received it."""
    _received.number = _received.number or number or signal.SIGTERM
    _received.stop()
