"""What a script prints: it survives a closed terminal, and a run keeps a copy in output.txt.

`python train.py | head` or a lost connection close the standard output. Printing then fails, which must not end a
training of hours. Progress bars are for terminals only; the copy has a line of progress every minute instead.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

CLEAR = "\r\033[K"  # back to the start of the terminal's line, which is then empty


class Transcript:
    """Everything that was printed, except progress bars; kept in memory until there is a file for it."""

    def __init__(self) -> None:
        self.waiting: list[str] = []
        self.file: TextIO | None = None

    def write(self, text: str) -> None:
        if "\r" in text:  # a progress bar
            return
        if self.file is None:
            self.waiting.append(text)
            return
        with contextlib.suppress(OSError, ValueError):  # a full disk: the copy is not worth ending a training
            self.file.write(text)
            self.file.flush()

    def attach(self, path: Path) -> None:
        """Append to this file from now on, beginning with what was printed so far. A symbolic link is not followed."""
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
        self.file = os.fdopen(handle, "a", encoding="utf-8", errors="replace")
        self.write("".join(self.waiting))
        self.waiting.clear()

    def detach(self) -> None:
        if self.file is not None:
            with contextlib.suppress(OSError):
                self.file.close()
        self.file = None


class Stream:
    """A standard stream that also writes to a transcript, and goes silent if nobody listens any more."""

    def __init__(self, stream: TextIO, transcript: Transcript):
        self.stream, self.transcript = stream, transcript

    def write(self, text: str) -> int:
        self.transcript.write(text)
        _status.clear()
        try:
            self.stream.write(text)
        except UnicodeEncodeError:
            encoding = self.stream.encoding or "ascii"
            self.stream.write(text.encode(encoding, "replace").decode(encoding))
        except BlockingIOError:  # a reader that is too slow; it misses this text only
            pass
        except (OSError, ValueError):  # a closed pipe, a lost terminal, a closed file
            self._silence()
        return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except BlockingIOError:
            pass
        except (OSError, ValueError):
            self._silence()

    def _silence(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # Python flushes the original stream again when it exits
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
        self.stream = nowhere()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")


def _open_standard_files() -> None:
    """Open what was closed before the script started, as by `>&-`; else another file would get its number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number


@contextlib.contextmanager
def robust() -> Iterator[Transcript]:
    """Make the standard streams survive being closed; the innermost of nested contexts does nothing."""
    if isinstance(sys.stdout, Stream):
        yield sys.stdout.transcript
        return
    _open_standard_files()
    before, transcript = (sys.stdout, sys.stderr), Transcript()
    sys.stdout, sys.stderr = (Stream(stream or nowhere(), transcript) for stream in before)
    try:
        yield transcript
    finally:
        sys.stdout.flush()
        transcript.detach()
        sys.stdout, sys.stderr = before


@contextlib.contextmanager
def recorded(path: Path) -> Iterator[None]:
    """Copy what is printed to this file as well; in a script, also what it prints afterwards, up to its end."""
    is_script = isinstance(sys.stdout, Stream)
    with robust() as transcript:
        transcript.detach()
        transcript.attach(path)
        try:
            yield
        finally:
            if not is_script:
                transcript.detach()


class _Status:
    """The line on the terminal that says what takes a moment. There is one terminal, so there is one such object."""

    def __init__(self) -> None:
        self.stream: TextIO | None = None  # where the line is shown

    def clear(self) -> None:
        """Remove the line before anything else is written, whichever stream that goes to."""
        stream, self.stream = self.stream, None
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):  # a lost terminal
                stream.write(CLEAR)
                stream.flush()


_status = _Status()


def show(what: str) -> None:
    """Show on a terminal what takes a moment; the line disappears with the next output."""
    stream = getattr(sys.stderr, "stream", sys.stderr)
    if stream is None or not stream.isatty():
        return
    _status.clear()
    with contextlib.suppress(OSError, ValueError):
        stream.write(f"\r{what} ...")
        stream.flush()
        _status.stream = stream


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
    """Show what takes a moment, such as "reading sst", for the time that it takes."""
    show(what)
    try:
        yield
    finally:
        _status.clear()


def progress_line(text: str) -> None:
    """Print a line of progress where there is no bar: always to the copy, and to an output that is not a terminal."""
    if not sys.stderr.isatty():
        print(text, flush=True)
    elif isinstance(sys.stdout, Stream):
        sys.stdout.transcript.write(text + "\n")
