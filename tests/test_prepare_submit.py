"""A submission is complete and valid, or every problem is reported on a line of its own and no zip is written."""

import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, run_script
from test_evaluation import write_data, write_guesses

import prepare_submit
from submission import PREDICTION_FILES
from utils import InputError

ALL = set(PREDICTION_FILES)
PART1 = {name for name in ALL if name.endswith("-out.csv")}
NAME = "cs224n_default_final_project_submission.zip"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with complete data/ and predictions/."""
    write_data(tmp_path / "data")
    write_guesses(tmp_path / "predictions")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def prepare(monkeypatch: pytest.MonkeyPatch, *flags: object) -> None:
    monkeypatch.setattr(sys, "argv", ["prepare_submit.py", *map(str, flags)])
    prepare_submit.main()


def refuse(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, *flags: object) -> list[str]:
    """Return the problems that a run reports before it exits with status 2."""
    with pytest.raises(SystemExit) as exit_info:
        prepare(monkeypatch, *flags)
    out, err = capsys.readouterr()
    assert exit_info.value.code == 2
    assert all(re.fullmatch(r"part [12]: complete, [68] files", line) for line in out.splitlines()), out
    lines = err.splitlines()
    assert all(line.startswith("error: ") for line in lines)
    return [line.removeprefix("error: ") for line in lines]


def unknown_origin(folder: Path) -> str:
    return f"{folder / 'manifest.json'} does not know these files, so it is unknown which run they are from."


def code_of_the_project() -> set[str]:
    recipes = {f"recipes/{path.relative_to(ROOT / 'recipes').as_posix()}" for path in (ROOT / "recipes").rglob("*.txt")}
    top = {path.name for path in ROOT.iterdir() if path.suffix == ".py" or path.name.startswith("requirements")}
    return recipes | {name for name in top if name[0] != "."} | {"README.md", "setup.sh", "report_template.html"}


# --- complete submissions ---------------------------------------------------------------------------------------------


def test_a_complete_submission_is_packed_with_all_code_and_its_scores_are_printed(here: Path):
    output = here / "out" / NAME
    done = run_script(
        "prepare_submit.py", "--data", here / "data", "--predictions", here / "predictions", "--output", output
    )
    assert (done.returncode, done.stderr) == (0, f"note: {unknown_origin(here / 'predictions')}\n")
    with zipfile.ZipFile(output) as archive:
        assert archive.testzip() is None
        assert set(archive.namelist()) == code_of_the_project() | {f"predictions/{name}" for name in ALL}
        assert {"bert.py", "classifier.py", "optimizer.py", "prepare_submit.py"} <= set(archive.namelist())
        for name in ALL:
            assert archive.read(f"predictions/{name}") == (here / "predictions" / name).read_bytes()
        assert archive.read("bert.py") == (ROOT / "bert.py").read_bytes()
    scored = run_script("evaluation.py", here / "predictions", "--data", here / "data")
    *parts, contents = done.stdout.partition("file ")[0].splitlines(), done.stdout.partition("wrote ")[2]
    assert parts == [["part 1: complete, 8 files", "part 2: complete, 6 files"]]
    assert scored.stdout in done.stdout
    assert contents.startswith(f"{output}: {len(code_of_the_project()) + 14} files, ")
    assert re.search(r"^  predictions/ +14 files$", contents, re.MULTILINE)
    assert [path.name for path in output.parent.iterdir()] == [NAME], "no temporary file is left"


def test_the_default_output_has_the_handouts_name_in_the_working_directory(here: Path, monkeypatch: pytest.MonkeyPatch):
    prepare(monkeypatch)
    assert zipfile.is_zipfile(here / NAME)


def test_the_same_files_give_the_same_bytes_whatever_their_dates(here: Path, monkeypatch: pytest.MonkeyPatch):
    prepare(monkeypatch)
    first = (here / NAME).read_bytes()
    shutil.rmtree(here / "predictions")
    write_guesses(here / "predictions")
    for name in reversed(sorted(ALL)):
        (here / "predictions" / name).touch()
    prepare(monkeypatch)
    assert (here / NAME).read_bytes() == first
    with zipfile.ZipFile(here / NAME) as archive:
        assert archive.namelist() == sorted(archive.namelist())
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        assert archive.getinfo("setup.sh").external_attr >> 16 & 0o777 == 0o755


@pytest.mark.parametrize(("part", "names"), [("1", PART1), ("2", ALL - PART1)])
def test_a_part_needs_and_packs_its_own_files_only(
    part: str, names: set[str], here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    for name in ALL - names:
        (here / "predictions" / name).unlink()
    prepare(monkeypatch, "--part", part)
    with zipfile.ZipFile(here / NAME) as archive:
        assert {n for n in archive.namelist() if n.startswith("predictions/")} == {f"predictions/{n}" for n in names}
    assert ("overall" in capsys.readouterr().out) == (part == "2")


def test_files_that_are_not_checked_are_left_out_and_named(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    (here / "predictions" / "notes.csv").write_text("x")
    (here / "predictions" / "cfimdb-dev-output.csv").write_text("x")
    prepare(monkeypatch)
    note = "note: not on the handout's list for --part all, so left out: cfimdb-dev-output.csv, notes.csv.\n"
    assert capsys.readouterr().err.startswith(note)
    with zipfile.ZipFile(here / NAME) as archive:
        assert not {"predictions/notes.csv", "predictions/cfimdb-dev-output.csv"} & set(archive.namelist())


def test_predictions_can_be_checked_against_the_sample_data(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    problems = refuse(monkeypatch, capsys, "--data", ROOT / "data" / "sample")
    assert len(problems) == 2 * 14, "for each file 150 missing ids and 6 unknown ones"
    assert all("150 missing" in p for p in problems[::2])
    assert all("6 unknown" in p for p in problems[1::2])


# --- what is packed ---------------------------------------------------------------------------------------------------


@pytest.fixture
def project(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the files of the project that are packed, in place of the real ones."""
    root = here / "project"
    for name in code_of_the_project():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    monkeypatch.setattr(prepare_submit, "ROOT", root)
    return root


def packed(here: Path) -> set[str]:
    with zipfile.ZipFile(here / NAME) as archive:
        return {name for name in archive.namelist() if not name.startswith("predictions/")}


def test_every_top_level_file_of_the_project_is_on_the_list() -> None:
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "*.py"], capture_output=True, text=True)
    files = listed.stdout.split() if listed.returncode == 0 else [path.name for path in ROOT.glob("*.py")]
    top = sorted(name for name in files if "/" not in name)
    assert sorted(prepare_submit.SCRIPTS) == top, "add a new file to SCRIPTS in prepare_submit.py"


def test_a_file_that_is_not_the_projects_is_packed_only_if_it_is_included(
    here: Path, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    (project / "passwords.py").write_text("secret = 1\n")
    (here / "extra.py").write_text("x = 1\n")
    prepare(monkeypatch)
    assert packed(here) == code_of_the_project()
    note = "note: not files of the project, so left out: passwords.py. --include FILE packs one.\n"
    assert capsys.readouterr().err.startswith(note)
    prepare(monkeypatch, "--include", project / "passwords.py", here / "extra.py")
    assert packed(here) == code_of_the_project() | {"passwords.py", "extra.py"}
    assert capsys.readouterr().err == f"note: {unknown_origin(Path('predictions'))}\n"


def test_an_included_file_must_exist_be_no_link_and_have_a_name_of_its_own(
    here: Path, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    (here / "link.py").symlink_to("/etc/passwd")
    assert "must be a file, found a link." in refuse(monkeypatch, capsys, "--include", here / "link.py")[0]
    assert "must be a file, found none." in refuse(monkeypatch, capsys, "--include", here / "absent.py")[0]
    (here / "bert.py").write_text("other\n")
    with pytest.raises(InputError, match=r"the project has another bert\.py already"):
        prepare(monkeypatch, "--include", here / "bert.py")
    assert not (here / NAME).exists()


def test_links_and_hidden_files_are_not_packed(
    here: Path, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    (project / "recipes" / ".cache").mkdir()
    (project / "recipes" / ".cache" / "x.txt").write_text("hidden")
    (project / "recipes" / "link.txt").symlink_to("/etc/passwd")
    (here / "elsewhere").mkdir()
    (here / "elsewhere" / "y.txt").write_text("private")
    (project / "recipes" / "folder").symlink_to(here / "elsewhere")
    prepare(monkeypatch)
    assert packed(here) == code_of_the_project()
    assert "note: links are not packed, so left out: " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["project/bert.py", f"predictions/{min(ALL)}"])
def test_a_required_file_that_is_a_link_is_refused(
    name: str, here: Path, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    path = here / name
    path.rename(here / "moved")
    path.symlink_to(here / "moved")
    (problem,) = refuse(monkeypatch, capsys)
    assert problem.endswith(f"{path.name}: must be a file, found a link. Replace it by a copy of the file.")


# --- defects ----------------------------------------------------------------------------------------------------------


def edit(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = (folder / name).read_bytes().decode()
        assert old in text
        (folder / name).write_bytes(text.replace(old, new, 1).encode())

    return change


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def as_directory(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return change


SST_TEST, PARA_TEST = "predictions/sst-test-output.csv", "predictions/para-test-output.csv"
STS_DEV, CFIMDB = "predictions/sts-dev-output.csv", "predictions/pretrain-cfimdb-test-out.csv"
IDS = "must have every id of"
DEFECTS: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "a file of part 1 is missing": (
        remove(CFIMDB),
        [
            "part 1: needs 8 files in predictions, found 7; missing: pretrain-cfimdb-test-out.csv. "
            "Write with: python classifier.py --option pretrain --lr 1e-3 --tasks cfimdb"
        ],
    ),
    "a file of part 2 is missing": (
        remove(SST_TEST),
        [
            "part 2: needs 6 files in predictions, found 5; missing: sst-test-output.csv. "
            "Write with: python multitask_classifier.py --option finetune --lr 1e-5"
        ],
    ),
    "a directory": (as_directory(STS_DEV), [f"{STS_DEV}: cannot be read as a prediction file; Is a directory."]),
    "empty": (
        lambda folder: (folder / STS_DEV).write_text(""),
        [f"{STS_DEV}: must be a prediction file, found an emp"],
    ),
    "header": (edit(STS_DEV, "Similiary", "Similarity"), [f"{STS_DEV} line 1: must be "]),
    "row": (
        edit(PARA_TEST, "para-test-1 , 0.0 ", "para-test-1,0.0"),
        [f"{PARA_TEST} line 3: must be 'id , number '", f"{PARA_TEST}: {IDS} data/quora-test-student.csv"],
    ),
    "an id is missing": (
        edit(SST_TEST, "sst-test-2 , 2 \n", ""),
        [f"{SST_TEST}: {IDS} data/ids-sst-test-student.csv exactly once and no other; 1 missing, such as sst-test-2."],
    ),
    "an id is unknown": (
        edit(SST_TEST, "sst-test-0 , 0 \n", "sst-test-0 , 0 \nx , 0 \n"),
        [f"{SST_TEST}: {IDS} data/ids-sst-test-student.csv exactly once and no other; 1 unknown, such as x."],
    ),
    "an id occurs twice": (
        edit(SST_TEST, "sst-test-1 , 1 \n", "sst-test-1 , 1 \nsst-test-1 , 1 \n"),
        [f"{SST_TEST} line 4: ids must be unique, 'sst-test-1' is in line 3 too."],
    ),
    "sst range": (
        edit(SST_TEST, "0 , 0 ", "0 , 5 "),
        [f"{SST_TEST} line 2: the prediction must be a whole number from 0 to 4, found '5'."],
    ),
    "cfimdb range": (
        edit(CFIMDB, "0 , 0 ", "0 , 2 "),
        [f"{CFIMDB} line 2: the prediction must be 0 or 1, found '2'."],
    ),
    "para range": (
        edit(PARA_TEST, "0 , 1.0 ", "0 , 0.5 "),
        [f"{PARA_TEST} line 2: the prediction must be 0 or 1, found '0.5'."],
    ),
    "sts number": (edit(STS_DEV, "5.25", "nan"), [f"{STS_DEV} line 6: must be 'id , number '", f"{STS_DEV}: {IDS}"]),
    "the data of two files is missing": (
        remove("data/ids-cfimdb-dev.csv"),
        ["data/ids-cfimdb-dev.csv: cannot be read; No such file or directory."],
    ),
    "a label of the data is wrong": (
        edit("data/quora-dev.csv", "\t1\n", "\t7\n"),
        ["data/quora-dev.csv line 3: is_duplicate must be 0 or 1, found '7'."],
    ),
}


@pytest.mark.parametrize(("defect", "expected"), DEFECTS.values(), ids=DEFECTS)
def test_a_defect_is_listed_and_nothing_is_written(
    defect: Callable[[Path], None],
    expected: list[str],
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
):
    (here / NAME).write_bytes(b"an earlier one")
    defect(here)
    before = sorted(here.rglob("*"))
    problems = refuse(monkeypatch, capsys)
    assert len(problems) == len(expected), problems
    assert all(problem.startswith(start) for problem, start in zip(problems, expected, strict=True)), problems
    assert sorted(here.rglob("*")) == before
    assert (here / NAME).read_bytes() == b"an earlier one"


def test_all_defects_are_listed_together_with_status_2_and_no_zip_is_left(here: Path):
    for name in ("a file of part 2 is missing", "header", "cfimdb range", "the data of two files is missing"):
        DEFECTS[name][0](here)
    done = run_script(
        "prepare_submit.py", "--data", here / "data", "--predictions", here / "predictions", "--output", here / NAME
    )
    assert (done.returncode, done.stdout) == (2, "")
    lines = [line.removeprefix("error: ").removeprefix(f"{here}/") for line in done.stderr.splitlines()]
    starts = ["data/ids-cfimdb-dev.csv: ", f"{CFIMDB} line 2: ", "part 2: needs 6 files", f"{STS_DEV} line 1: "]
    assert len(lines) == len(starts), done.stderr
    assert all(line.startswith(start) for line, start in zip(lines, starts, strict=True)), done.stderr
    assert not (here / NAME).exists()


def test_a_defect_of_the_other_part_does_not_count(here: Path, monkeypatch: pytest.MonkeyPatch):
    DEFECTS["sst range"][0](here)
    prepare(monkeypatch, "--part", "1")
    assert zipfile.is_zipfile(here / NAME)


def test_wrong_directories_and_a_wrong_output_are_reported_on_one_line_each(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    assert refuse(monkeypatch, capsys, "--data", "d", "--predictions", "p", "--output", "bert.py") == [
        "--data d: must be a directory, found none. Check the path.",
        "--predictions p: must be a directory, found none. Check the path.",
        "--output bert.py: must be a file that ends in .zip, found the suffix '.py'. Choose another.",
    ]
    (here / NAME).mkdir()
    (problem,) = refuse(monkeypatch, capsys)
    assert problem == f"--output {NAME}: must be a file that ends in .zip, found a directory. Choose another."


def test_an_output_that_cannot_be_written_is_reported_on_one_line(here: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(InputError, match=r"the directory of --output data/sts-dev\.csv: must be a writable directory"):
        prepare(monkeypatch, "--output", "data/sts-dev.csv/x.zip")


def test_a_failure_while_packing_leaves_the_earlier_zip(here: Path, monkeypatch: pytest.MonkeyPatch):
    (here / NAME).write_bytes(b"an earlier one")
    read, names = Path.read_bytes, []

    def failing(path: Path) -> bytes:
        names.append(path.name)
        if path.suffix == ".py" and len(names) > 40:
            raise OSError(28, "No space left on device")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", failing)
    with pytest.raises(InputError, match=rf"{NAME}: could not be written \(No space left on device\)"):
        prepare(monkeypatch)
    monkeypatch.undo()
    assert (here / NAME).read_bytes() == b"an earlier one"
    assert sorted(path.name for path in here.iterdir()) == [NAME, "data", "predictions"]


def test_the_code_that_part_1_requires_must_exist(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    (here / "project").mkdir()
    for name in ("bert.py", "optimizer.py", ".#bert.py"):
        (here / "project" / name).write_text("")
    monkeypatch.setattr(prepare_submit, "ROOT", here / "project")
    (problem,) = refuse(monkeypatch, capsys, "--part", "1")
    assert problem == f"{here}/project/classifier.py: Part 1 needs this file, but it does not exist. Restore it."
    prepare(monkeypatch, "--part", "2")
    with zipfile.ZipFile(here / NAME) as archive:
        assert [name for name in archive.namelist() if "/" not in name] == ["bert.py", "optimizer.py"]
