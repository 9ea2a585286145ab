"""The manifest beside prediction files: what it records, and what is said about files of several or unknown runs."""

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path

import pytest
from conftest import ROOT, Finished, the_error
from test_evaluation import write_data, write_guesses

import evaluation
import multitask_classifier
import prepare_submit
from manifest import MANIFEST, Source, find_files, read_manifest, record
from submission import LATER_NAMES, OPTIONS, PART_1_FILES, PART_2_FILES, PREDICTION_FILES, SAMPLE

RunMain = Callable[..., Finished]
SST_DEV = "sst-dev-output.csv"


def run_of(name: str) -> Path:
    """The run that would write this file: one for Part 2, one for each option and task of Part 1."""
    part, task, _ = PREDICTION_FILES[name]
    return Path("runs/m") if part == "2" else Path(f"runs/{name.partition('-')[0]}/{task.name}")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with complete data/ and predictions/, and a manifest of the latter."""
    monkeypatch.chdir(tmp_path)
    write_data(Path("data"))
    write_guesses(Path("predictions"))
    for name, (_, task, split) in PREDICTION_FILES.items():
        record(Path("predictions") / name, Source(run_of(name), Path("data") / task.filename(split)), 6)
    return tmp_path


def change(name: str, **fields: object) -> None:
    """Change fields of an entry of the manifest; None removes one."""
    path = Path("predictions") / MANIFEST
    content = json.loads(path.read_text())
    content["files"][name] |= fields
    content["files"][name] = {key: value for key, value in content["files"][name].items() if value is not None}
    path.write_text(json.dumps(content))


def notes(done: Finished) -> list[str]:
    assert done.status == 0, done.err
    lines = done.err.splitlines()
    assert all(line.startswith("note: ") for line in lines), done.err
    return [line.removeprefix("note: ") for line in lines]


# --- what is recorded -------------------------------------------------------------------------------------------------


def test_an_entry_has_the_run_the_command_the_commit_the_data_and_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "x.csv").write_text("predictions")
    (tmp_path / "dev.csv").write_text("data")
    monkeypatch.setattr(sys, "argv", ["/a b/multitask_classifier.py", "--name", "my run"])
    record(tmp_path / "x.csv", Source(Path("runs/my run"), tmp_path / "dev.csv"), 7)
    entry = json.loads((tmp_path / MANIFEST).read_text())["files"]["x.csv"]
    written = datetime.fromisoformat(entry.pop("time"))
    assert written.utcoffset() == timedelta(0)
    assert abs(datetime.now(UTC) - written) < timedelta(minutes=1)
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--abbrev=12"]
    assert entry == {
        "run": "runs/my run",
        "script": "multitask_classifier.py",
        "command": "'/a b/multitask_classifier.py' --name 'my run'",
        "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip() or None,
        "data": str(tmp_path / "dev.csv"),
        "data_sha256": sha256(b"data").hexdigest(),
        "rows": 7,
        "sha256": sha256(b"predictions").hexdigest(),
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dev.csv", MANIFEST, "x.csv"], "no lock is left"


def test_other_entries_stay_and_the_last_writer_of_a_file_wins(here: Path):
    before = read_manifest(Path("predictions"))
    record(Path("predictions") / SST_DEV, Source(Path("runs/other"), Path("data/ids-sst-dev.csv")), 6)
    after = read_manifest(Path("predictions"))
    assert after.pop(SST_DEV).run == "runs/other"
    del before[SST_DEV]
    assert after == before


def record_many(folder: Path, writer: int) -> None:
    for number in range(10):
        (folder / f"{writer}-{number}.csv").write_text("x")
        record(folder / f"{writer}-{number}.csv", Source(Path(f"runs/{writer}"), folder / "none.csv", "0"), 1)


def test_processes_that_write_at_the_same_time_lose_no_entry(tmp_path: Path):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=record_many, args=(tmp_path, writer)) for writer in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(read_manifest(tmp_path)) == sorted(f"{w}-{n}.csv" for w in range(3) for n in range(10))


@pytest.mark.parametrize(
    ("hours", "words"),
    [(0, "just now"), (0.02, "1 minute ago"), (0.5, "30 minutes ago"), (1, "1 hour ago"), (50, "2 days ago")],
)
def test_the_age_of_a_file_is_in_words(hours: float, words: str, here: Path):
    time = datetime.now(UTC) - timedelta(hours=hours)
    change(SST_DEV, time=time.isoformat())
    assert read_manifest(Path("predictions"))[SST_DEV].age == words


def test_part_2_records_its_run_and_a_prediction_file_cannot_be_the_manifest(
    task_files: Path, tiny_checkpoint: Path, tmp_path: Path, run_main: RunMain
):
    places = ["--runs", tmp_path / "runs", "--predictions", tmp_path / "p", "--data", task_files]
    flags = ["--model", tiny_checkpoint, *places, "--name", "m", "--epochs", 1, "--tasks", "sst"]
    error = the_error(run_main(multitask_classifier, *flags, "--sst_dev_out", tmp_path / "p" / MANIFEST))
    assert f"must not be {MANIFEST}" in error
    assert run_main(multitask_classifier, *flags).status == 0
    found = find_files(tmp_path / "p", PART_2_FILES)
    for split in ("dev", "test"):
        origin = found[f"sst-{split}-output.csv"].origin
        data = task_files / PART_2_FILES[f"sst-{split}-output.csv"].task.filename(split)
        assert (origin.run, origin.data, origin.rows) == (str(tmp_path / "runs" / "m"), str(data), 8)


# --- what the scripts say about it ------------------------------------------------------------------------------------


def test_both_scripts_name_the_run_and_the_age_of_every_file_and_have_nothing_to_note(here: Path, run_main: RunMain):
    for script in (evaluation, prepare_submit):
        done = run_main(script)
        assert notes(done) == []
        for name in (name for name, file in PREDICTION_FILES.items() if file.split == "dev"):
            (line,) = (line for line in done.out.splitlines() if line.startswith(f"{name} "))
            assert line.endswith(f"{run_of(name)}  just now") or f"  {run_of(name)} " in line
    with zipfile.ZipFile(prepare_submit.OUTPUT) as archive:
        assert f"predictions/{MANIFEST}" not in archive.namelist()


def test_a_mixture_of_runs_is_noted_part_by_part(here: Path, run_main: RunMain):
    change(SST_DEV, run="runs/other")
    change("pretrain-cfimdb-test-out.csv", run="runs/third/cfimdb")
    one, two = notes(run_main(prepare_submit))
    assert one == (
        "the files of cfimdb with --option pretrain are from 2 different runs: runs/pretrain/cfimdb wrote "
        "pretrain-cfimdb-dev-out.csv; runs/third/cfimdb wrote pretrain-cfimdb-test-out.csv. Predict all of them with "
        "one run."
    )
    assert two.startswith("Part 2's files are from 2 different runs: runs/other wrote sst-dev-output.csv; runs/m wrote")
    assert two.endswith(" sst-test-output.csv, para-dev-output.csv, para-test-output.csv and 2 more. Predict all of "
                        "them with one run.")  # fmt: skip


def test_a_file_that_was_changed_after_it_was_predicted_has_an_unknown_run(here: Path, run_main: RunMain):
    path = Path("predictions") / SST_DEV
    path.write_text(path.read_text().replace("0 , 0 ", "0 , 1 "))
    done = run_main(evaluation)
    assert notes(done) == ["sst-dev-output.csv: changed after it was predicted, or copied here, so its run is unknown."]
    assert any(line.startswith("sst-dev-output.csv ") and "unknown" in line for line in done.out.splitlines())


def test_data_that_changed_since_the_prediction_is_noted(here: Path, run_main: RunMain):
    path = Path("data/sts-test-student.csv")
    path.write_text(path.read_text().replace("A sentence1 .", "Another sentence ."))
    assert notes(run_main(prepare_submit)) == [
        "predictions/sts-test-output.csv: was predicted on other data (data/sts-test-student.csv) than "
        "data/sts-test-student.csv has now. Predict again."
    ]
    assert notes(run_main(evaluation)) == [], "it reads the dev files only"


def test_sample_data_is_noted_even_as_a_copy(here: Path, run_main: RunMain):
    shutil.rmtree("predictions")
    Path("predictions").mkdir()
    shutil.copytree(SAMPLE, "copy")
    _, *rows = (SAMPLE / "ids-sst-dev.csv").read_text().splitlines()
    ids = [row.split("\t")[1] for row in rows]
    text = "id \t Predicted_Sentiment \n" + "".join(f"{identifier} , 2 \n" for identifier in ids)
    (Path("predictions") / SST_DEV).write_text(text)
    for data in (SAMPLE, Path("copy")):
        assert notes(run_main(evaluation, "--data", data))[-1] == (
            f"{data} has the project's sample data: its ids are on no leaderboard, where these files would score 0."
        )


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: path.unlink(), "does not know these files"),
    "empty": (lambda path: path.write_text(""), "must be JSON with the origins of prediction files"),
    "cut off": (lambda path: path.write_bytes(path.read_bytes()[:200]), "must be JSON with the origins"),
    "not an object": (lambda path: path.write_text("[]"), "it is a list, not an object"),
    "not text": (lambda path: path.write_bytes(b"\xff\xfe\x00"), "it is not UTF-8 text"),
    "of another version": (lambda path: path.write_text('{"version": 0}'), "files is not a table"),
    "entries of another version": (
        lambda path: path.write_text(json.dumps({"files": {name: {"run": "runs/a"} for name in PREDICTION_FILES}})),
        "and 13 more is damaged or incomplete",
    ),
    "control characters": (
        lambda path: path.write_text(json.dumps({"files": {"\x1b[31m\n": 1}})),
        r"the entry of \x1b[31m\n is damaged or incomplete",
    ),
    "a directory": (lambda path: (path.unlink(), path.mkdir()), "Is a directory"),
}


@pytest.mark.parametrize(("damage", "note"), DAMAGE.values(), ids=DAMAGE)
def test_without_a_readable_manifest_everything_works_and_the_origin_is_unknown(
    damage: Callable[[Path], object], note: str, here: Path, run_main: RunMain
):
    damage(Path("predictions") / MANIFEST)
    found = notes(run_main(evaluation))
    assert any(note in line for line in found), found
    assert found[-1].startswith("predictions/manifest.json does not know these files")


def test_a_damaged_manifest_is_written_anew_by_the_next_prediction(here: Path, capsys: pytest.CaptureFixture):
    (Path("predictions") / MANIFEST).write_text("{")
    record(Path("predictions") / SST_DEV, Source(Path("runs/new"), Path("data/ids-sst-dev.csv")), 6)
    assert "must be JSON with the origins" in capsys.readouterr().err
    assert read_manifest(Path("predictions")).keys() == {SST_DEV}


@pytest.mark.parametrize("field", ["run", "script", "command", "data", "rows", "time", "sha256"])
def test_an_entry_without_a_field_is_ignored_with_a_note(field: str, here: Path, capsys: pytest.CaptureFixture):
    change(SST_DEV, **{field: None})
    assert SST_DEV not in read_manifest(Path("predictions"))
    assert capsys.readouterr().err.count("\n") == 1


def test_fields_of_a_newer_version_are_ignored(here: Path):
    change(SST_DEV, signature="x")
    assert read_manifest(Path("predictions"))[SST_DEV].run == "runs/m"


# --- the later names --------------------------------------------------------------------------------------------------


def rename_to_later_names() -> None:
    content = json.loads((Path("predictions") / MANIFEST).read_text())
    for name, later in LATER_NAMES.items():
        (Path("predictions") / name).rename(Path("predictions") / later)
        content["files"][later] = content["files"].pop(name)
    (Path("predictions") / MANIFEST).write_text(json.dumps(content))


def test_every_file_of_part_1_has_a_later_name_with_the_later_option() -> None:
    assert LATER_NAMES.keys() == PART_1_FILES.keys()
    assert LATER_NAMES["pretrain-cfimdb-dev-out.csv"] == "last-linear-layer-cfimdb-dev-out.csv"
    assert LATER_NAMES["finetune-sst-test-out.csv"] == "full-model-sst-test-out.csv"
    assert len(set(LATER_NAMES.values())) == 2 * 2 * len(OPTIONS)


def test_files_with_the_later_names_are_scored_and_packed_under_them(here: Path, run_main: RunMain):
    before = run_main(evaluation).out
    rename_to_later_names()
    after = run_main(evaluation)
    assert notes(after) == []
    for name, later in LATER_NAMES.items():
        before = before.replace(name, later)
    assert [line.split() for line in after.out.splitlines()] == [line.split() for line in before.splitlines()]
    done = run_main(prepare_submit)
    assert notes(done) == []
    with zipfile.ZipFile(prepare_submit.OUTPUT) as archive:
        packed = {name.removeprefix("predictions/") for name in archive.namelist() if "predictions/" in name}
    assert packed == {*LATER_NAMES.values(), *PART_2_FILES}


@pytest.mark.parametrize("known", [True, False], ids=["by the manifest", "by the files' dates"])
@pytest.mark.parametrize("newer", ["full-model-sst-dev-out.csv", "finetune-sst-dev-out.csv"])
def test_of_two_names_the_newer_file_counts_and_a_note_says_so(newer: str, known: bool, here: Path, run_main: RunMain):
    older = ({"full-model-sst-dev-out.csv", "finetune-sst-dev-out.csv"} - {newer}).pop()
    folder = Path("predictions")
    shutil.copy(folder / "finetune-sst-dev-out.csv", folder / "full-model-sst-dev-out.csv")
    record(folder / older, Source(Path("runs/older/sst"), Path("data/ids-sst-dev.csv")), 6)
    record(folder / newer, Source(Path("runs/newer/sst"), Path("data/ids-sst-dev.csv")), 6)
    change(older, time="2024-01-01T00:00:00+00:00")
    if not known:
        (folder / MANIFEST).unlink()
    seconds = {True: (2_000_000_000, 1_000_000_000), False: (1_000_000_000, 2_000_000_000)}[known]
    for name, at in zip((older, newer), seconds, strict=True):  # the manifest counts more than the dates
        os.utime(folder / name, (at, at))
    done = run_main(evaluation)
    assert f"predictions/{older}: under the file's other name there is a newer one, which counts." in notes(done)[0]
    assert any(line.startswith(f"{newer} ") for line in done.out.splitlines())
    assert not any(line.startswith(f"{older} ") for line in done.out.splitlines())


# --- what is missing --------------------------------------------------------------------------------------------------


def missing(run_main: RunMain, *names: str, flags: tuple[object, ...] = ()) -> str:
    """The command that prepare_submit.py gives for files that are not there."""
    for name in names:
        (Path("predictions") / name).unlink()
    done = run_main(prepare_submit, *flags)
    assert done.out in ("part 1: complete, 8 files\n", "part 2: complete, 6 files\n"), "one line per part"
    error = the_error(done)
    assert all(name in error for name in names[:3])
    return error.partition("Write with: ")[2]


def test_the_command_for_missing_files_of_part_1_names_the_option_and_the_task(here: Path, run_main: RunMain):
    command = missing(run_main, "finetune-sst-dev-out.csv")
    assert command == "python classifier.py --option finetune --lr 1e-5 --tasks sst"
    others = "finetune-cfimdb-dev-out.csv", "pretrain-sst-test-out.csv"
    assert missing(run_main, *others) == (
        "python classifier.py --option pretrain --lr 1e-3 --tasks sst && "
        "python classifier.py --option finetune --lr 1e-5"
    )


def test_the_command_for_missing_files_uses_the_later_name_if_the_others_have_it(here: Path, run_main: RunMain):
    rename_to_later_names()
    command = missing(run_main, "full-model-sst-dev-out.csv")
    assert command == "python classifier.py --fine-tune-mode full-model --lr 1e-5 --tasks sst"


def test_the_command_for_missing_files_of_part_2_predicts_with_the_run_of_the_others(here: Path, run_main: RunMain):
    Path("runs/m").mkdir(parents=True)
    Path("runs/m/model.safetensors").touch()
    command = missing(run_main, "sst-test-output.csv", flags=("--data", here / "data"))
    assert command == f"python multitask_classifier.py --predict_only --run runs/m --data {here / 'data'}"
    command = missing(run_main, "sst-dev-output.csv")
    assert command == "python multitask_classifier.py --option finetune --lr 1e-5", "the run may not have the task"
