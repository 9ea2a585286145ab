"""Runs that survive: killed at any moment, stopped by signals, without a terminal, on a full disk, started twice."""

import contextlib
import itertools
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import ROOT, the_error, write_task_files
from processes import run_as_script, start, wait_until
from test_multitask import run_multitask
from test_training import Bench, Start

import checkpoints
import console
import interruption
import multitask_classifier
import training
import utils
from checkpoints import load_state
from optimizer import AVERAGERS, OPTIMIZERS
from pcgrad import COMBINERS
from runs import Run
from sampling import SAMPLERS
from smart import REGULARIZERS
from trainer import EpochRecord, Trainer
from utils import InputError, atomic_path, write_text

pytestmark = pytest.mark.usefixtures("one_thread")
TUNED = "--option finetune --lr 1e-3"


class Folder:
    """A place for runs that are trained in processes of their own."""

    def __init__(self, folder: Path, checkpoint: Path):
        self.folder, self.checkpoint = folder, checkpoint
        write_task_files(folder / "data")

    def flags(self, name: str, *flags: object) -> list[str]:
        where = ["--model", self.checkpoint, "--data", self.folder / "data", "--runs", self.folder / "runs"]
        where += ["--predictions", self.folder / f"predictions-{name}", "--batch_size", 3, "--name", name]
        return [*map(str, where), *" ".join(map(str, flags)).split()]

    def run(self, name: str) -> Path:
        return self.folder / "runs" / name

    def start(self, name: str, *flags: object, prepare: str = "") -> "subprocess.Popen":
        output = self.folder / f"{name}.txt"
        return start(run_as_script, "multitask_classifier", self.flags(name, *flags), output, prepare)

    def train(self, name: str, *flags: object, prepare: str = "") -> int:
        process = self.start(name, *flags, prepare=prepare)
        process.join(timeout=240)
        return process.exitcode

    def output(self, name: str) -> str:
        return (self.folder / f"{name}.txt").read_text()

    def end(self, name: str) -> dict[str, object]:
        """All that a finished run leaves, without times."""
        run = self.run(name)
        log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
        state = load_state(Run(run)) or {}
        files = [*(self.folder / f"predictions-{name}").glob("*.csv"), *run.glob("*.npz")]
        files += [run / "model.safetensors", run / "dev.json"]
        return {
            "log": [{k: v for k, v in line.items() if k not in ("seconds", "memory")} for line in log],
            "state": {key: state.get(key) for key in ("progress", "record", "trainer")},
            "files": {path.name: path.read_bytes() for path in files},
        }


@pytest.fixture
def place(tmp_path: Path, tiny_checkpoint: Path) -> Folder:
    return Folder(tmp_path, tiny_checkpoint)


def assert_same_end(found: dict[str, object], wanted: dict[str, object], tasks: int = 3) -> None:
    assert found["log"] == wanted["log"]
    assert len(wanted["files"]) == 4 * tasks + 2  # prediction files and logits of dev and test; weights, scores
    assert found["files"] == wanted["files"]
    torch.testing.assert_close(found["state"], wanted["state"], rtol=0, atol=0)


# --- kill -9 ----------------------------------------------------------------------------------------------------------

EVERY_STEP = "--save_minutes 0 --keep_state --epochs 2"
KILLED = {
    "pcgrad, smart, ema": f"{TUNED} --combiner pcgrad --regularizer smart --averager ema --sampler round_robin",
    "gradvac, bregman, swa": (
        f"{TUNED} --combiner gradvac --regularizer smart+bregman --averager swa --sampler balanced --optimizer nadam"
    ),
    "cagrad, rdrop": (
        f"{TUNED} --combiner cagrad --regularizer rdrop --sampler combined --optimizer adafactor --schedule linear"
    ),
    "mgda, mixout": f"{TUNED} --combiner mgda --sampler annealed --accumulate 3 --adapter mixout --optimizer adamax",
    "uncertainty": f"{TUNED} --weighting uncertainty --sampler uniform --optimizer radam --head_lr 0.01 --clip 1",
    "pals": f"{TUNED} --adapter pal --sampler proportional --optimizer sgd --schedule cosine --warmup 0.2",
    "lora": f"{TUNED} --adapter lora --adapter_only --sampler sqrt --optimizer torch_adamw",
    "fp16": f"{TUNED} --precision fp16 --sampler sequential --combiner sum --regularizer none --averager none",
    "frozen": "--lr 1e-2 --head mlp --optimizer adamw",
    "contrastive": f"{TUNED} --para_loss bce+mnrl --sst_loss ce+simcse --chunk_rows 2 --patience 5",
}


def test_the_runs_that_are_killed_have_every_method_with_a_state():
    words = set(re.split(r"[\s+]", " ".join(KILLED.values())))
    for registry in (SAMPLERS, OPTIMIZERS, AVERAGERS, COMBINERS, REGULARIZERS):
        assert set(registry) <= words


def killed_and_resumed(place: Folder, name: str, flags: str, seconds: float, moments: list[float]) -> int:
    """Kill a run at these fractions of its time, resuming it in between; return how many kills hit a live process."""
    kills = 0
    for moment in moments:
        process = place.start(name, flags, "--resume")
        process.join(timeout=moment * seconds)
        if process.exitcode is None:
            process.kill()
            kills += 1
        process.join()
    assert place.train(name, flags, "--resume") == 0, place.output(name)
    return kills


def survive(place: Folder, case: str, moments: list[float]) -> int:
    flags = f"{KILLED[case]} {EVERY_STEP}"
    started = time.monotonic()
    assert place.train("whole", flags) == 0, place.output("whole")
    kills = killed_and_resumed(place, "killed", flags, time.monotonic() - started, moments)
    assert_same_end(place.end("killed"), place.end("whole"))
    return kills


def test_a_run_that_is_killed_twice_ends_byte_for_byte_like_one_that_was_not(place: Folder):
    survive(place, "pcgrad, smart, ema", [0.55, 0.7])


@pytest.mark.slow
@pytest.mark.parametrize("case", KILLED)
def test_a_run_that_is_killed_at_random_moments_ends_byte_for_byte_like_one_that_was_not(case: str, place: Folder):
    seed = int(os.environ.get("KILL_SEED", "1"))
    moments = [random.Random(f"{seed} {case} {i}").uniform(0.05, 1) for i in range(4)]
    kills = survive(place, case, moments)
    print(f"{case}: {kills} kills")
    assert kills >= 2


# The code that writes files, and the calls in the loop around it.
SAVING = {"checkpoints.py": "", "runs.py": "", "utils.py": "atomic_path|_flush_to_disk|write_text", "training.py":
          "save|complete_epoch|train|fit|keep|train_epoch"}  # fmt: skip
TRACE = """
import os, re, signal, sys
saving, wanted, log = {saving!r}, {wanted!r}, {log!r}
seen = {{}}

def trace(frame, event, value):
    name = os.path.basename(frame.f_code.co_filename)
    if name in saving and re.fullmatch(saving[name] or ".*", frame.f_code.co_name):
        return at_line

def at_line(frame, event, value):
    if event == "line":
        place = os.path.basename(frame.f_code.co_filename) + ":" + str(frame.f_lineno)
        seen[place] = seen.get(place, 0) + 1
        if log:
            with open(log, "a") as file:
                file.write(place + "\\n")
        if [place, seen[place]] == wanted:
            os.kill(os.getpid(), signal.SIGKILL)
    return at_line

sys.settrace(trace)
"""
AT_LINES = f"{TUNED} --tasks sst --regularizer bregman --averager ema --save_minutes 0 --keep_state --epochs 2"


def lines_of_saving(place: Folder) -> dict[str, int]:
    """Every line of the saving code that a run executes, and how often."""
    log = place.folder / "lines.txt"
    assert place.train("whole", AT_LINES, prepare=TRACE.format(saving=SAVING, wanted=None, log=str(log))) == 0
    lines = log.read_text().splitlines()
    return {line: lines.count(line) for line in dict.fromkeys(lines)}


def kill_at_lines(place: Folder, lines: list[tuple[str, int]]) -> None:
    wanted = place.end("whole")
    for number, (line, occurrence) in enumerate(lines):
        name = f"killed{number}"
        prepare = TRACE.format(saving=SAVING, wanted=[line, occurrence], log=None)
        assert place.train(name, AT_LINES, prepare=prepare) == -signal.SIGKILL, (line, place.output(name))
        assert place.train(name, AT_LINES, "--resume") == 0, (line, place.output(name))
        assert_same_end(place.end(name), wanted, tasks=1)
        assert not list(place.run(name).glob(f".*{utils.TEMPORARY}")), line


@pytest.mark.slow
def test_a_run_that_is_killed_while_it_saves_ends_byte_for_byte_like_one_that_was_not(place: Folder):
    found = lines_of_saving(place)
    lines = {line: count for line, count in found.items() if line.startswith(("utils", "checkpoints"))}
    some = random.Random(5).sample(sorted(lines), 2)
    kill_at_lines(place, [(line, 1 + lines[line] // 2) for line in some])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_a_run_that_is_killed_at_any_line_of_the_saving_code_ends_byte_for_byte_like_one_that_was_not(
    part: int, place: Folder
):
    """In four parts, so that several processes can test them."""
    lines = lines_of_saving(place)
    chosen = [(line, random.Random(line).randint(1, count)) for line, count in lines.items()]
    print(f"{len(chosen[part::4])} of {len(chosen)} lines")
    assert len(chosen) > 60
    kill_at_lines(place, chosen[part::4])


# --- resuming ---------------------------------------------------------------------------------------------------------


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_over(place: Folder):
    kill = "import os, trainer; trainer.Trainer.update = lambda *_: os.kill(os.getpid(), 9)"
    assert place.train("r", "--epochs 1", prepare=kill) == -signal.SIGKILL
    assert (place.run("r") / "args.json").exists()
    assert place.train("r", "--epochs 1 --resume") == 0
    assert "nothing was saved yet, so the run starts from the beginning\n" in place.output("r")


@pytest.mark.parametrize("left", [None, (), (".lock", ".args.json.1234abcd.tmp")])
def test_resume_of_a_run_that_does_not_exist_yet_starts_it(
    left: tuple[str, ...] | None, tiny_checkpoint: Path, tmp_path: Path
):
    """So that the start-up script of a preemptible machine can always say --resume."""
    if left is not None:
        (tmp_path / "runs" / "r").mkdir(parents=True)
    for name in left or ():
        (tmp_path / "runs" / "r" / name).touch()
    done = run_multitask(tmp_path, tiny_checkpoint, "--epochs", 1, "--resume")
    assert "there is no such run yet, so it starts from the beginning\n" in done.out
    assert len(done.predictions()) == 6


def test_a_run_that_was_started_with_resume_can_be_resumed_again(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Its stored flags have every task's own dropout, so --hidden_dropout_prob looks as if it had no effect."""
    flags = ["--option", "finetune", "--hidden_dropout_prob", 0.1, "--pooling", "mean", "--epochs", 1, "--resume"]
    run_multitask(tmp_path, tiny_checkpoint, *flags)
    run_multitask(tmp_path, tiny_checkpoint, *flags)
    flags[3] = 0.2
    with pytest.raises(InputError, match=r"was started with --sst_dropout 0\.1 \(now 0\.2\)"):
        run_multitask(tmp_path, tiny_checkpoint, *flags)


def test_resume_says_where_it_goes_on(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stop_after(monkeypatch, 5)
    flags = ["--epochs", 3, "--save_minutes", 1000]
    with pytest.raises(interruption.Stopped):
        run_multitask(tmp_path, tiny_checkpoint, *flags)
    monkeypatch.undo()
    interruption._received.__init__()
    done = run_multitask(tmp_path, tiny_checkpoint, *flags, "--resume")
    assert re.search(r"resuming at epoch 2 of 3, step 2 of 3, best 0\.\d\d\d\n", done.out)


def stop_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Behave as if SIGTERM arrived during this update."""
    update, counted = Trainer.update, []

    def updating(trainer: Trainer, *values: object) -> None:
        update(trainer, *values)
        counted.append(1)
        if len(counted) == steps:
            interruption._received.receive(signal.SIGTERM, None)

    interruption._received.__init__()
    monkeypatch.setattr(Trainer, "update", updating)
    monkeypatch.setattr(interruption, "_received", interruption._received)


@pytest.fixture(autouse=True)
def no_signal() -> Iterator[None]:
    yield
    interruption._received.__init__()


def test_a_finished_run_has_scores_and_no_state(tiny_checkpoint: Path, tmp_path: Path):
    done = run_multitask(tmp_path, tiny_checkpoint, "--epochs", 1)
    assert (Run(done.run).finished, (done.run / "state.pt").exists()) == (True, False)
    again = run_multitask(tmp_path, tiny_checkpoint, "--epochs", 1, "--resume")
    assert "all epochs are done, nothing left to train\n" in again.out
    assert again.predictions() == done.predictions()


def test_a_finished_run_can_be_extended_and_ends_like_one_that_was_that_long_from_the_start(
    tiny_checkpoint: Path, tmp_path: Path
):
    flags = [*TUNED.split(), "--keep_state", "--averager", "ema"]
    run_multitask(tmp_path / "extended", tiny_checkpoint, *flags, "--epochs", 2)
    extended = run_multitask(tmp_path / "extended", tiny_checkpoint, *flags, "--epochs", 3, "--resume")
    assert "resuming at epoch 3 of 3, step 0 of 3" in extended.out
    whole = run_multitask(tmp_path / "whole", tiny_checkpoint, *flags, "--epochs", 3)
    assert extended.predictions() == whole.predictions()
    states = [load_state(Run(done.run)) for done in (extended, whole)]
    torch.testing.assert_close(states[0]["trainer"], states[1]["trainer"], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--keep_state", "--schedule", "linear"], "--schedule linear depends on the number of epochs"),
        (["--keep_state", "--warmup", 0.1], "--warmup 0.1 depends on the number of epochs"),
        (["--keep_state", "--averager", "swa"], "--averager swa depends on the number of epochs"),
        (["--keep_state", "--sampler", "annealed"], "--sampler annealed depends on the number of epochs"),
        ([], "its state was removed. Train with --keep_state"),
    ],
)
def test_a_run_that_cannot_be_extended_says_why(flags: list, reason: str, tiny_checkpoint: Path, tmp_path: Path):
    run_multitask(tmp_path, tiny_checkpoint, *flags, "--epochs", 1)
    with pytest.raises(InputError) as refused:
        run_multitask(tmp_path, tiny_checkpoint, *flags, "--epochs", 2, "--resume")
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)
    run_multitask(tmp_path, tiny_checkpoint, *flags, "--epochs", 1, "--resume")  # as it was, it still works


def test_the_log_is_trimmed_to_the_state(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stop_after(monkeypatch, 5)
    with pytest.raises(interruption.Stopped):
        run_multitask(tmp_path, tiny_checkpoint, "--epochs", 2)
    monkeypatch.undo()
    interruption._received.__init__()
    path = tmp_path / "runs" / "r" / "log.jsonl"
    path.write_text(path.read_text() + '{"epoch": 2, "torn')
    done = run_multitask(tmp_path, tiny_checkpoint, "--epochs", 2, "--resume")
    assert [line["epoch"] for line in done.log()] == [1, 2]


# --- checksums --------------------------------------------------------------------------------------------------------


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= 0x10
    path.write_bytes(bytes(content))


def test_no_flipped_bit_in_weights_or_state_goes_unnoticed(tiny_checkpoint: Path, tmp_path: Path):
    done = run_multitask(tmp_path, tiny_checkpoint, "--epochs", 1, "--keep_state")
    run, model = Run(done.run), done.models[0]
    wanted = {checkpoints.WEIGHTS: utils.digest(model.state_dict()), checkpoints.STATE: utils.digest(load_state(run))}
    places, silent = random.Random(0), 0
    for name in (checkpoints.WEIGHTS, checkpoints.STATE):
        path = done.run / name
        intact = path.read_bytes()
        for _ in range(60):
            flip(path, places.choice([places.randrange(len(intact)), places.randrange(5000), -places.randrange(5000)]))
            try:
                if name == checkpoints.WEIGHTS:
                    checkpoints.restore_best(model, run)
                    found = utils.digest(model.state_dict())
                else:
                    found = utils.digest(load_state(run))
                silent += found != wanted[name]
            except InputError as error:
                silent += str(path) not in str(error) or "\n" in str(error)
            path.write_bytes(intact)
    assert silent == 0


# --- NaN --------------------------------------------------------------------------------------------------------------


def test_weights_that_are_not_finite_replace_neither_state_nor_best_weights(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    update, counted = Trainer.update, []

    def ruining(trainer: Trainer, *values: object) -> None:
        update(trainer, *values)
        counted.append(1)
        if len(counted) == 6:  # the last one of epoch 2
            next(trainer.model.parameters()).data[0, 0] = float("nan")

    monkeypatch.setattr(Trainer, "update", ruining)
    with pytest.raises(InputError, match=r"the weights at epoch 2 of 3, step 3 of 3 must be finite, found NaN"):
        run_multitask(tmp_path, tiny_checkpoint, *TUNED.split(), "--epochs", 3)
    run = Run(tmp_path / "runs" / "r")
    state = load_state(run)
    assert state["progress"]["epoch"] == 1
    assert all(tensor.isfinite().all() for tensor in state["trainer"]["model"].values())
    monkeypatch.undo()
    interruption._received.__init__()
    done = run_multitask(tmp_path, tiny_checkpoint, *TUNED.split(), "--epochs", 3, "--resume")
    assert [line["epoch"] for line in done.log()] == [1, 2, 3]


# --- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)], ids=lambda x: str(x)
)
def test_a_signal_saves_and_prints_the_command_that_goes_on(number: signal.Signals, status: int, place: Folder):
    flags = f"{TUNED} --epochs 400"
    process = place.start("r", flags)
    wait_until((place.run("r") / "log.jsonl").exists)
    os.kill(process.pid, number)
    process.join(timeout=60)
    assert process.exitcode == status
    (line,) = [line for line in place.output("r").splitlines() if line.startswith("error: ")]
    assert re.match(rf"error: stopped by {number.name} at epoch \d+ of 400, step \d of 3\. ", line)
    command = line.split("Go on with: ")[1]
    assert command == f"python multitask_classifier.py {' '.join(place.flags('r', flags))} --resume"
    assert "Traceback" not in place.output("r")
    assert line in (place.run("r") / "output.txt").read_text()
    progress = load_state(Run(place.run("r")))["progress"]
    assert f"at epoch {progress['epoch'] + 1} of 400, step {progress['step']} of 3" in line


def test_a_second_signal_ends_the_process_at_once_and_harms_nothing(place: Folder):
    slow = "import checkpoints, time; checkpoints.torch.save = lambda *_: time.sleep(60)"
    slow += "; import training; training.save_state.__globals__['torch'] = checkpoints.torch"
    assert place.train("r", f"{TUNED} --epochs 1 --keep_state") == 0
    before = (place.run("r") / "state.pt").read_bytes()
    process = place.start("r", f"{TUNED} --epochs 400 --resume --keep_state --save_minutes 0", prepare=slow)
    wait_until(lambda: bool(list(place.run("r").glob(f".state.pt*{utils.TEMPORARY}"))))
    os.kill(process.pid, signal.SIGINT)
    time.sleep(0.2)
    os.kill(process.pid, signal.SIGINT)
    process.join(timeout=10)
    assert process.exitcode == 130
    assert "stopped at once by a second signal. What was saved before is intact.\n" in place.output("r")
    assert "Traceback" not in place.output("r")
    assert (place.run("r") / "state.pt").read_bytes() == before


def test_nohup_keeps_a_training_alive(place: Folder):
    ignore = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    process = place.start("r", "--epochs 3", prepare=ignore)
    wait_until((place.run("r") / "output.txt").exists)
    os.kill(process.pid, signal.SIGHUP)
    process.join(timeout=120)
    assert process.exitcode == 0


def test_a_signal_during_evaluation_is_not_lost_work(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    flags = [*TUNED.split(), "--epochs", 2, "--averager", "swa", "--keep_state"]
    whole = run_multitask(tmp_path / "whole", tiny_checkpoint, *flags)
    predict, calls = multitask_classifier.predict, []

    def predicting(*values: object) -> object:
        calls.append(1)
        if len(calls) == 5:  # the second task of the second evaluation
            interruption._received.receive(signal.SIGTERM, None)
        return predict(*values)

    interruption._received.__init__()
    with monkeypatch.context() as patch:
        patch.setattr(multitask_classifier, "predict", predicting)
        with pytest.raises(interruption.Stopped) as stopped:
            run_multitask(tmp_path / "stopped", tiny_checkpoint, *flags)
    assert "at epoch 2 of 2, step 3 of 3" in stopped.value.message
    interruption._received.__init__()
    done = run_multitask(tmp_path / "stopped", tiny_checkpoint, *flags, "--resume")
    assert done.predictions() == whole.predictions()
    states = [load_state(Run(d.run))["trainer"] for d in (done, whole)]
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)


# --- a lost terminal --------------------------------------------------------------------------------------------------


def test_a_closed_output_does_not_end_a_training(place: Folder):
    """As in `python multitask_classifier.py | head -1`."""
    command = [sys.executable, str(ROOT / "multitask_classifier.py"), *place.flags("r", "--epochs 2 --lr 1e-3")]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    ) as run:  # fmt: skip
        run.stdout.readline()
        run.stdout.close()
        errors = run.stderr.read()
    assert (run.returncode, errors) == (0, "")
    assert len(list((place.folder / "predictions-r").glob("*.csv"))) == 6
    text = (place.run("r") / "output.txt").read_text()
    assert text.startswith("pretrain ")
    assert "epoch 2 | " in text
    assert "sts: wrote " in text


def test_progress_is_a_line_in_the_copy_of_the_output(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("training.LINE_SECONDS", 0.0)
    done = run_multitask(tmp_path, tiny_checkpoint, "--epochs", 1)
    text = (done.run / "output.txt").read_text()
    assert (
        len(re.findall(r"^epoch 1 of 1, step \d of 3 \| 0 min .*\| loss para \d\.\d{3} sst .* sts \d", text, re.M)) == 3
    )


def test_bars_are_not_copied(tmp_path: Path, capsys: pytest.CaptureFixture):
    with console.recorded(tmp_path / "output.txt"):
        print("a line")
        sys.stderr.write("\rbar 1/2")
    assert (tmp_path / "output.txt").read_text() == "a line\n"


# --- disks and directories --------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """small_disk(bytes): a directory on a disk of this size."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mounted(size: int) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("needs the right to mount a small disk (root)")
        return folder

    yield mounted
    while folder.is_mount():
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_is_too_small_is_refused_at_the_start(
    small_disk: Callable[[int], Path], tiny_checkpoint: Path, tmp_path: Path
):
    disk = small_disk(8 * 2**20)
    with pytest.raises(InputError) as refused:
        run_multitask(tmp_path, tiny_checkpoint, *TUNED.split(), "--epochs", 1, "--runs", disk)
    assert re.search(r"--runs .*disk/r: the run's checkpoints need ", str(refused.value))
    assert "MB, but the disk has 8.4 MB free." in re.sub(r"8\.\d MB", "8.4 MB", str(refused.value))


@pytest.mark.parametrize("file", ["state.pt", "model.safetensors", "log.jsonl", "config.json", "dev.json"])
def test_a_disk_that_fills_up_is_one_line_and_the_earlier_files_stay_readable(
    file: str, small_disk: Callable[[int], Path], tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    disk = small_disk(64 * 2**20)
    flags = [*TUNED.split(), "--runs", disk, "--keep_state"]
    run_multitask(tmp_path, tiny_checkpoint, *flags, "--epochs", 1)
    before = {name: (disk / "r" / name).read_bytes() for name in ("state.pt", "model.safetensors", "log.jsonl")}
    replace = Path.replace
    evaluate = multitask_classifier.overall

    def fill(*values: object) -> float:
        """Leave no room, once the second epoch has been evaluated."""
        if not (disk / "filler").exists():
            with (disk / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
                while filler.write(b"x" * 4096):
                    pass
            if file in ("log.jsonl", "config.json", "dev.json"):  # there is room for checkpoints, but not for these
                monkeypatch.setattr(Path, "replace", lambda a, b: full(a, b) if b.name == file else replace(a, b))
                monkeypatch.setattr("runs.os.open", lambda p, *a: full(p, p) if Path(p).name == file else opened(p, *a))
                (disk / "filler").unlink()
        return evaluate(*values)

    opened = os.open

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(multitask_classifier, "overall", fill)
    if file == "state.pt":
        monkeypatch.setattr("training.save_best", lambda *_: None)
    with pytest.raises(InputError) as refused:
        run_multitask(tmp_path, tiny_checkpoint, *flags, "--epochs", 2, "--resume")
    message = str(refused.value)
    assert message.startswith(f"{disk / 'r' / file}: could not be written (No space left on device). The disk of ")
    assert "MB free" in message
    assert "\n" not in message
    if file in ("state.pt", "model.safetensors"):
        assert "the file needs " in message
    monkeypatch.undo()
    interruption._received.__init__()
    (disk / "filler").unlink(missing_ok=True)
    if file not in ("config.json", "dev.json"):
        assert (disk / "r" / "model.safetensors").read_bytes() == before["model.safetensors"] or file == "log.jsonl"
    if file in ("state.pt", "model.safetensors"):
        assert (disk / "r" / "state.pt").read_bytes() == before["state.pt"]
    done = run_multitask(tmp_path, tiny_checkpoint, *flags, "--epochs", 2, "--resume")
    assert len(done.predictions()) == 6
    log = (disk / "r" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in log] == [1, 2]


def test_a_prediction_file_that_cannot_be_written_leaves_the_earlier_one(tmp_path: Path):
    """RLIMIT_FSIZE limits files as a quota does."""
    path = tmp_path / "sst-dev-output.csv"
    write_text(path, "earlier")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(InputError, match=r"could not be written \(File too large\)\. The disk of .* MB free"):
            write_text(path, "x" * 200)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text() == "earlier"
    assert os.listdir(tmp_path) == [path.name]


def test_a_disk_that_becomes_read_only_is_one_line(
    small_disk: Callable[[int], Path], tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    disk, evaluate = small_disk(64 * 2**20), multitask_classifier.overall

    def lock(*values: object) -> float:
        subprocess.run(["mount", "--bind", str(disk), str(disk)], check=True)  # open files keep the other one writable
        subprocess.run(["mount", "-o", "remount,bind,ro", str(disk)], check=True)
        return evaluate(*values)

    monkeypatch.setattr(multitask_classifier, "overall", lock)
    with pytest.raises(InputError, match=r"model\.safetensors: could not be written \(Read-only file system\)\."):
        run_multitask(tmp_path, tiny_checkpoint, "--epochs", 1, "--runs", disk)


def test_a_directory_that_vanishes_is_one_line(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    evaluate = multitask_classifier.overall

    def remove(*values: object) -> float:
        subprocess.run(["rm", "-r", tmp_path / "runs"], check=True)
        return evaluate(*values)

    monkeypatch.setattr(multitask_classifier, "overall", lambda *v: remove(*v) if (tmp_path / "runs").exists() else 0.5)
    with pytest.raises(InputError, match=r"model\.safetensors: could not be written, since the directory .*runs/r no"):
        run_multitask(tmp_path, tiny_checkpoint, "--epochs", 1)


def test_files_have_the_permissions_that_the_umask_allows(tiny_checkpoint: Path, tmp_path: Path):
    before = os.umask(0o007)
    try:
        done = run_multitask(tmp_path, tiny_checkpoint, "--epochs", 1, "--keep_state")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in done.run.iterdir()}
    assert set(modes.values()) == {0o660}, modes


def test_links_in_a_run_are_not_followed_for_writing(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    stop_after(monkeypatch, 4)
    with pytest.raises(interruption.Stopped):
        run_multitask(tmp_path, tiny_checkpoint, "--epochs", 2)
    monkeypatch.undo()
    interruption._received.__init__()
    run, victim = tmp_path / "runs" / "r", tmp_path / "victim"
    victim.write_text("mine")
    for name in ("log.jsonl", "state.pt.new", "model.safetensors", "config.json"):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(victim)
    run_multitask(tmp_path, tiny_checkpoint, "--epochs", 2, "--resume")
    assert victim.read_text() == "mine"
    assert not (run / "log.jsonl").is_symlink()
    for name in (".lock", "output.txt"):
        other = tmp_path / "runs" / name.strip(".")
        other.mkdir()
        flags = (run / "args.json").read_text().replace('"name": "r"', f'"name": "{other.name}"')
        (other / "args.json").write_text(flags)
        (other / name).symlink_to(victim)
        with pytest.raises(InputError, match=r"could not be written \(Too many levels of symbolic links\)"):
            run_multitask(tmp_path, tiny_checkpoint, "--epochs", 2, "--resume", "--name", other.name)
        assert victim.read_text() == "mine"


# --- two processes, names ---------------------------------------------------------------------------------------------


def test_only_one_of_many_processes_can_have_a_run(place: Folder):
    """Each waits before it looks, so that all of them start at the same moment."""
    at = time.time() + 3
    wait = "import time, runs; h = runs.sha256_of; runs.sha256_of = lambda p: (time.sleep(0.1), h(p))[1]; "
    wait += f"time.sleep(max(0, {at} - time.time()))"
    processes = [
        start(run_as_script, "multitask_classifier", place.flags("r", "--epochs 1"), place.folder / f"{i}.txt", wait)
        for i in range(4)
    ]
    for process in processes:
        process.join(timeout=120)
    assert sorted(process.exitcode for process in processes) == [0, 2, 2, 2]
    texts = [(place.folder / f"{i}.txt").read_text() for i in range(4)]
    reasons = "another process is training this run|the run exists already"
    assert sum(bool(re.search(f"error: .*({reasons})", text)) for text in texts) == 3


def test_a_run_that_is_being_trained_cannot_be_resumed(tiny_checkpoint: Path, tmp_path: Path):
    done = run_multitask(tmp_path, tiny_checkpoint, "--epochs", 1)
    with Run._locked(done.run), pytest.raises(InputError, match=r"another process is training this run\. Wait"):
        run_multitask(tmp_path, tiny_checkpoint, "--epochs", 1, "--resume")
    run_multitask(tmp_path, tiny_checkpoint, "--epochs", 1, "--resume")


@pytest.mark.parametrize(
    "name", ["a/b", "../x", "/tmp/x", "..", ".", "", " ", "a\nb", "a\x1bb", "a\\b", "x" * 300, "é" * 101]
)
def test_a_name_must_be_a_plain_file_name(name: str, run_main: Callable, tmp_path: Path):
    error = the_error(run_main(multitask_classifier, "--name", name, "--runs", tmp_path / "runs"))
    if len(name) < 255:  # argparse itself refuses longer ones
        assert "must be a plain name of at most 200 bytes without slashes and control characters" in error
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["a", "a.b", "lr 1e-5", "é" * 100, "-x", "模型"])
def test_a_plain_name_is_accepted(name: str, tiny_checkpoint: Path, tmp_path: Path):
    with atomic_path(tmp_path / name) as path:  # the longest has a temporary file as well
        path.write_text("")
    args = multitask_classifier.get_args([f"--name={name}", "--data", str(ROOT / "data" / "sample")])
    assert args.name == name


# --- Part 1 and pre-training ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", ["classifier", "pretrain"])
def test_the_other_scripts_resume_too(script: str, place: Folder):
    flags = {
        "classifier": f"{TUNED} --epochs 2 --cfimdb_batch_size 3 --predictions {place.folder / 'p'}",
        "pretrain": "--epochs 2 --objective mlm+simcse --tasks sst --max_length 16",
    }[script]
    where = f"--model {place.checkpoint} --data {place.folder / 'data'} --runs {place.folder / 'runs'} --batch_size 3"
    kill = "import trainer, os; u = trainer.Trainer.update; n = []\ndef update(*a):\n    u(*a)\n    n.append(1)\n"
    kill += f"    if len(n) == {8 if script == 'classifier' else 3}:\n        os.kill(os.getpid(), 9)\n"
    kill += "trainer.Trainer.update = update"
    for name, prepare, status in (("whole", "", 0), ("r", kill, -9), ("r", "", 0)):
        words = f"{where} {flags} --name {name} --save_minutes 0".split() + ["--resume"] * (name == "r")
        process = start(run_as_script, script, words, place.folder / f"{name}.txt", prepare)
        process.join(timeout=120)
        assert process.exitcode == status, place.output(name)
    assert "resuming at epoch " in place.output("r")
    for path in place.run("whole").rglob("model.safetensors"):
        other = place.run("r") / path.relative_to(place.run("whole"))
        assert other.read_bytes() == path.read_bytes()
        assert not (path.parent / "state.pt").exists()


# --- a long run -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_memory_and_open_files_stay_flat_over_2000_steps(place: Folder):
    measure = """
import os, re, training
seen, complete = [], training.Loop.complete_epoch
def completing(loop, *values):
    line = complete(loop, *values)
    size = int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1])
    print(f"measured {size} {len(os.listdir('/proc/self/fd'))}", flush=True)
    return line
training.Loop.complete_epoch = completing
"""
    flags = f"{TUNED} --epochs 20 --steps_per_epoch 100 --sampler uniform --regularizer smart --averager ema"
    assert place.train("r", flags, "--save_minutes 0.02", prepare=measure) == 0, place.output("r")
    found = [
        tuple(map(int, line.split()[1:])) for line in place.output("r").splitlines() if line.startswith("measured")
    ]
    print(f"memory in KB and open files, by epoch: {found}")
    assert len(found) == 20
    sizes, files = zip(*found[4:], strict=True)
    assert max(sizes) < 1.05 * min(sizes)
    assert len(set(files)) == 1


def test_the_script_says_interrupted_before_training(place: Folder):
    stop = "import os, signal, readers; script.load_splits = lambda *a: os.kill(os.getpid(), signal.SIGTERM)"
    assert place.train("r", "--epochs 1", prepare=stop) == 143
    assert place.output("r").endswith("error: stopped by SIGTERM\n")


# --- found by review --------------------------------------------------------------------------------------------------


def test_a_saved_record_has_not_hidden_its_losses_from_the_watch(bench: Start):
    one, record = bench(), EpochRecord()
    for number in range(1, 4):
        one.trainer.update([one.draw(number)], record, number)
        record.state_dict()
    assert {task: len(losses) for task, losses in record.check().items()} == {"sst": 3, "para": 3, "sts": 3}
    other = EpochRecord()
    one.trainer.update([one.draw(4)], record, 4)
    other.load_state_dict(record.state_dict(), torch.device("cpu"))
    assert {task: len(losses) for task, losses in other.check().items()} == {"sst": 1, "para": 1, "sts": 1}


@pytest.fixture
def bench(tiny_checkpoint: Path) -> Start:
    return partial(Bench, tiny_checkpoint)


def test_a_signal_while_weights_are_averaged_leaves_the_models_own(bench: Start):
    one = bench("--averager", "ema")
    own = one.after([one.draw(0, 1)], [one.draw(2, 3)])
    averager, model = one.trainer.averager, one.model
    with pytest.raises(interruption.Stopped), averager.applied(model):
        interruption._received.receive(signal.SIGTERM, None)
    assert all(torch.equal(p, own[name]) for name, p in model.named_parameters())
    context = averager.applied(model)
    context.__enter__()  # interrupted before it could be left
    assert not all(torch.equal(p, own[name]) for name, p in model.named_parameters())
    averager.take_back()
    assert all(torch.equal(p, own[name]) for name, p in model.named_parameters())


def test_a_run_that_is_killed_between_best_weights_and_state_takes_the_previous_weights_back(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The repeated epoch may have other scores, such as on a GPU, and then must not leave the killed one's weights."""
    scores = itertools.chain.from_iterable([s, s] for s in (0.5, 0.6, 0.4))  # epoch 1, epoch 2, epoch 2 again
    monkeypatch.setattr(multitask_classifier, "overall", lambda found: next(scores))
    real = training.save_state

    def failing(state: dict, run: Run) -> None:
        if state["progress"]["epoch"] == 2:
            raise KeyboardInterrupt
        real(state, run)

    with monkeypatch.context() as patch:
        patch.setattr("training.save_state", failing)
        with pytest.raises(KeyboardInterrupt):
            run_multitask(tmp_path, tiny_checkpoint, *TUNED.split(), "--epochs", 2)
    run = tmp_path / "runs" / "r"
    held, weights = (run / checkpoints.HELD).read_bytes(), (run / "model.safetensors").read_bytes()
    assert held != weights
    done = run_multitask(tmp_path, tiny_checkpoint, *TUNED.split(), "--epochs", 2, "--resume")
    assert (run / "model.safetensors").read_bytes() == held
    assert json.loads((run / "dev.json").read_text())["overall"] == 0.5
    assert not (done.run / checkpoints.HELD).exists()


def test_a_directory_that_is_created_again_is_not_written_into(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run, evaluate = tmp_path / "runs" / "r", multitask_classifier.overall

    def replace(*values: object) -> float:
        if (run / "args.json").exists():
            run.rename(tmp_path / "removed")
            run.mkdir()
            (run / ".lock").touch()
        return evaluate(*values)

    monkeypatch.setattr(multitask_classifier, "overall", replace)
    with pytest.raises(InputError, match="was removed and created again while it was being trained"):
        run_multitask(tmp_path, tiny_checkpoint, "--epochs", 1)
    assert not (run / "state.pt").exists()


def test_a_name_that_another_process_is_training_is_refused_as_such(tiny_checkpoint: Path, tmp_path: Path):
    done = run_multitask(tmp_path, tiny_checkpoint, "--epochs", 1)
    with Run._locked(done.run), pytest.raises(InputError, match="another process is training this run"):
        run_multitask(tmp_path, tiny_checkpoint, "--epochs", 1)


def test_a_resumed_run_may_use_the_space_of_its_own_checkpoints(
    small_disk: Callable[[int], Path], tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    disk = small_disk(36 * 2**20)  # the checkpoints need 32 MB, of which 16 are taken after an epoch
    flags = [*TUNED.split(), "--epochs", 2, "--runs", disk]
    stop_after(monkeypatch, 4)
    with pytest.raises(interruption.Stopped):
        run_multitask(tmp_path, tiny_checkpoint, *flags)
    monkeypatch.undo()
    interruption._received.__init__()
    run_multitask(tmp_path, tiny_checkpoint, *flags, "--resume")


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_script_runs_with_standard_files_that_were_closed_before_it_started(closed: str):
    command = f"{sys.executable} {ROOT / 'multitask_classifier.py'} --help {closed}"
    assert subprocess.run(command, shell=True, cwd=ROOT, stderr=subprocess.DEVNULL).returncode == 0


def test_text_that_the_output_cannot_encode_does_not_silence_it(tmp_path: Path):
    path = tmp_path / "out.txt"
    with path.open("w", encoding="ascii") as file:
        stream = console.Stream(file, console.Transcript())
        stream.write("é\n")
        stream.write("more\n")
    assert path.read_text() == "?\nmore\n"


def test_temporary_files_of_killed_processes_are_removed_and_those_of_others_are_not(tmp_path: Path):
    dead = subprocess.Popen(["true"])
    dead.wait()
    names = {
        f".a.csv.{utils.MACHINE}-{dead.pid}-123456{utils.TEMPORARY}": False,
        f".a.csv.{utils.MACHINE}-{os.getpid()}-123456{utils.TEMPORARY}": True,  # this process writes it
        f".a.csv.00000000-{dead.pid}-123456{utils.TEMPORARY}": True,  # on another machine
        f".b.csv.{utils.MACHINE}-{dead.pid}-123456{utils.TEMPORARY}": True,  # of another file
    }
    for name in names:
        (tmp_path / name).touch()
    write_text(tmp_path / "a.csv", "x")
    assert {name: (tmp_path / name).exists() for name in names} == names
