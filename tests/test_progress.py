"""What a running training shows: the curve in its log, the time that is left, the line that says what it is doing."""

import fcntl
import io
import itertools
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, write_task_files
from test_multitask import run_multitask

import console
import training
from trainer import EpochRecord
from training import Pace, Progress
from utils import in_words, thinned

pytestmark = pytest.mark.usefixtures("one_thread")
TUNED = ["--option", "finetune", "--lr", "1e-3"]


@pytest.mark.parametrize(
    ("values", "most", "expected"),
    [
        ([], 3, []),
        ([1.0, 2.0], 3, [1.0, 2.0]),
        ([1.0, 2.0, 3.0, 5.0], 2, [1.5, 4.0]),
        ([1.0, None, None, None, 6.0], 3, [1.0, None, 6.0]),
    ],
)
def test_a_curve_is_thinned_by_means(values: list, most: int, expected: list) -> None:
    assert thinned(values, most) == expected


def test_the_log_has_a_curve_of_losses_and_rates(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "CHECK_EVERY", 2)
    flags = ["--epochs", 2, "--batch_size", 2, "--schedule", "linear", "--head_lr", "1e-2"]
    done = run_multitask(tmp_path, tiny_checkpoint, *TUNED, *flags)
    for epoch, line in enumerate(done.log()):
        curve = line["curve"]
        assert curve["step"] == [[1, 2, 4], [2, 4]][epoch]
        assert set(curve["losses"]) == set(line["losses"])
        counts = np.diff([0, *curve["step"]])  # the updates since the last point
        for task, losses in curve["losses"].items():
            assert np.average(losses, weights=counts) == pytest.approx(line["losses"][task], rel=1e-5)
        share = [1 - (4 * epoch + step) / 8 for step in curve["step"]]
        assert curve["rates"][0] == pytest.approx([1e-3 * x for x in share])
        assert curve["rates"][1] == pytest.approx([1e-2 * x for x in share])
        assert line["cosines"] == {}


def test_gradients_are_logged_under_the_plain_sum_on_request_and_training_stays_the_same(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    flags = [*TUNED, "--sampler", "round_robin", "--epochs", 1]
    plain = run_multitask(tmp_path / "a", tiny_checkpoint, *flags)
    logged = run_multitask(tmp_path / "b", tiny_checkpoint, *flags, "--log_gradients")
    line = logged.log()[0]
    assert set(line["cosines"]) == {"para sst", "para sts", "sst sts"}
    assert all(-1 <= value <= 1 for curve in line["cosines"].values() for value in curve)
    assert 0 <= line["gradients"]["conflicts para sst"] <= 1
    assert plain.log()[0]["cosines"] == {}
    assert (plain.run / "model.safetensors").read_bytes() == (logged.run / "model.safetensors").read_bytes()


def test_a_long_epochs_curve_is_bounded() -> None:
    record = EpochRecord()
    for step in range(1, 1001):
        record.mark(step, (1e-5, 1e-3), {"sst": [1.0, 3.0], **({"para": [step]} if step > 500 else {})})
    curve = record.curves(100)
    assert len(curve["step"]) == len(curve["losses"]["sst"]) == len(curve["losses"]["para"]) == 100
    assert curve["losses"]["para"][:50] == [None] * 50
    assert set(curve["losses"]["sst"]) == {2.0}


# --- the time that is left --------------------------------------------------------------------------------------------


def test_the_time_left_counts_later_epochs_and_their_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()  # each look at the clock is a second later
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    pace = Pace(lambda epoch: 10 * epoch, epochs=3)
    progress = Progress()
    assert pace.seconds_left(progress) is None, "nothing was timed yet"
    with pace.evaluating():
        next(clock)
    assert pace.evaluation == 2.0
    with pace.training(progress):
        progress.step = 1
        # One second for one step; of 10 + 20 + 30 steps, 59 are left, and three evaluations of two seconds.
        assert pace.seconds_left(progress) == 59 + 3 * 2


def test_the_time_left_of_a_resumed_epoch_counts_the_steps_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(step=5)
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    pace = Pace(lambda epoch: 100, epochs=1)
    progress = Progress(step=90)
    with pace.training(progress):
        progress.step = 95
        assert pace.seconds_left(progress) == 5.0


def test_without_a_known_number_of_steps_there_is_no_estimate() -> None:
    pace, progress = Pace(lambda epoch: 0, epochs=1), Progress()
    with pace.training(progress):
        progress.step = 5
        assert pace.seconds_left(progress) is None


@pytest.mark.parametrize(
    ("seconds", "words"), [(3.4, "3 s"), (99, "99 s"), (130, "2 min"), (5900, "98 min"), (12_000, "3 h 20 min")]
)
def test_durations_are_told_in_words(seconds: float, words: str) -> None:
    assert in_words(seconds) == words


# --- the terminal -----------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_takes_a_moment_is_shown_and_disappears_before_other_output(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, transcript = Terminal(), console.Transcript()
    stream = console.Stream(screen, transcript)
    monkeypatch.setattr(sys, "stderr", stream)
    with console.doing("reading sst"):
        assert screen.getvalue() == "\rreading sst ..."
        print("note: a row was skipped", file=stream)
    assert screen.getvalue() == f"\rreading sst ...{console.CLEAR}note: a row was skipped\n"
    assert "reading" not in "".join(transcript.waiting)


def test_a_file_does_not_get_the_codes_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The standard output may be a file while the line is on the terminal."""
    screen, file, transcript = Terminal(), io.StringIO(), console.Transcript()
    monkeypatch.setattr(sys, "stderr", console.Stream(screen, transcript))
    with console.doing("reading sst"):
        print("epoch 1", file=console.Stream(file, transcript))
    assert file.getvalue() == "epoch 1\n"
    assert screen.getvalue() == f"\rreading sst ...{console.CLEAR}"


def test_nothing_is_shown_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with console.doing("reading sst"):
        pass
    assert capsys.readouterr() == ("", "")


def on_a_terminal(*command: object, cwd: Path) -> str:
    """What a command shows on a terminal of 120 columns."""
    mine, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MINBERT_REPORT": "0"}
    process = subprocess.Popen(list(map(str, command)), stdout=theirs, stderr=theirs, cwd=cwd, env=environment)
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(mine, 4096)
        except OSError:  # the end, on Linux
            break
        if not piece:
            break
        shown += piece
    os.close(mine)
    assert process.wait() == 0, shown.decode()
    return shown.decode()


def test_a_terminal_shows_what_is_done_the_losses_the_time_left_and_the_memory(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    write_task_files(tmp_path / "data", rows=100)
    flags = ["--model", tiny_checkpoint, "--data", "data", "--batch_size", 2, "--epochs", 2, *TUNED]
    shown = on_a_terminal(sys.executable, ROOT / "multitask_classifier.py", *flags, "--name", "r", cwd=tmp_path)
    assert shown.startswith("\rstarting ..."), "before torch is imported"
    assert "reading sst" in shown
    bars = [part for part in shown.split("\r") if part.startswith("epoch ") and "left" in part]
    assert bars, shown
    pattern = r"epoch 1/2 +\d+%\|.*\| \d+/50 \[.*\], \d+ (s|min) left \| \d\.\d GB \| loss para \d\.\d{3} sst .* sts \d"
    assert re.match(pattern, bars[0]), bars[0]
    copied = (tmp_path / "runs" / "r" / "output.txt").read_text()
    assert "reading" not in copied
    assert "left" not in copied
    lines = [json.loads(line) for line in (tmp_path / "runs" / "r" / "log.jsonl").read_text().splitlines()]
    assert len(lines) == 2
