"""The audit of a directory of data counts rows, labels, tokens, duplicates and overlaps; it survives any text."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import COURSE_FILES, Finished, run_script, the_error, write_task_files

import audit
import datasets
from readers import read_examples
from tasks import CFIMDB, PARA, SST, STS, TASKS
from tokenizer import BertTokenizer

RunMain = Callable[..., Finished]
pytestmark = pytest.mark.usefixtures("one_thread")

SST_TRAIN = [
    ("a1", "A good film .", 3),
    ("a2", "A good film .", 3),  # an exact duplicate
    ("a3", "a  GOOD film!", 1),  # a normalized duplicate, with another label
    ("a4", "<b>Bold</b> &amp; brave", 4),
    ("a5", "\N{THUMBS UP SIGN}", 4),
    ("a6", "\N{THUMBS DOWN SIGN}", 0),  # no duplicate of the other emoji
    ("a7", "...", 2),
    ("a8", "?!", 2),  # no duplicate: both are nothing but punctuation
    ("a9", "\u202eright to left\u202c \u05e9\u05dc\u05d5\u05dd", 2),
    ("b1", "a\x1b[31m red \x07 film", 2),
]
PARA_TRAIN = [
    ("p1", "Is it good?", "Is it bad?", 0),
    ("p2", "is it BAD", "Is it good?", 1),  # the same pair in the other order, with another label
    ("p3", "Is it long?", "Is it short?", 0),
]
PARA_DEV = [
    ("q1", "Is it short?", "Is it long ?", 0),  # p3 in the other order
    ("q2", "Is it long?", "Is it short?", 0),  # p3
    ("q3", "Is it old?", "Is it new?", 1),
]


def write(path: Path, columns: str, rows: list[tuple]) -> None:
    lines = ["\t".join(map(str, (number, *row))) for number, row in enumerate(rows)]
    path.write_text("\n".join([columns, *lines]) + "\n", encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_task_files(tmp_path / "data")
    write(tmp_path / "data" / "ids-sst-train.csv", "\tid\tsentence\tsentiment", [*SST_TRAIN, ("x", "No label", "")])
    write(tmp_path / "data" / "quora-train.csv", "\tid\tsentence1\tsentence2\tis_duplicate", PARA_TRAIN)
    write(tmp_path / "data" / "quora-dev.csv", "\tid\tsentence1\tsentence2\tis_duplicate", PARA_DEV)
    return tmp_path / "data"


def facts_of(content: dict, task: str, split: str) -> dict:
    (found,) = (file for file in content["files"] if (file["task"], file["split"]) == (task, split))
    return found


def audited(run_main: RunMain, folder: Path, *flags: object) -> tuple[dict, Finished]:
    done = run_main(datasets, folder, "--json", folder / "audit.json", *flags)
    assert done.status == 0, done.err
    return json.loads((folder / "audit.json").read_text(encoding="utf-8")), done


def test_rows_labels_duplicates_and_conflicts_are_counted(folder: Path, run_main: RunMain):
    content, done = audited(run_main, folder)
    sst = facts_of(content, "sst", "train")
    assert sst["rows"] == 10
    assert sst["skipped"] == {"sentiment is empty": 1}
    assert "ids-sst-train.csv: 1 row skipped: sentiment is empty." in done.err
    assert sst["labels"] == {"0": 1, "1": 1, "2": 4, "3": 2, "4": 2}
    assert (sst["duplicates"]["exact"]["rows"], sst["duplicates"]["exact"]["conflicting_labels"]) == (1, 0)
    assert (sst["duplicates"]["normalized"]["rows"], sst["duplicates"]["normalized"]["conflicting_labels"]) == (2, 1)
    para = facts_of(content, "para", "train")["duplicates"]
    assert (para["exact"]["rows"], para["normalized"]["rows"], para["normalized"]["conflicting_labels"]) == (0, 1, 1)


def test_the_overlap_of_two_splits_counts_rows_exactly_and_normalized(folder: Path, run_main: RunMain):
    content, _ = audited(run_main, folder)
    of = {(o["task"], *o["splits"]): (o["rows"], o["exact"], o["normalized"]) for o in content["overlaps"]}
    assert of["para", "train", "dev"] == (3, 1, 2)
    assert of["sts", "train", "test"] == (8, 8, 8), "these small files all have the same texts"
    assert len(of) == 3 * len(TASKS)


@pytest.mark.parametrize("task", [SST, PARA], ids=lambda task: task.name)
def test_token_lengths_and_truncations_are_those_of_tokenizing(task, folder: Path, run_main: RunMain):
    """The oracle tokenizes each row on its own, joined pairs as the tokenizer joins them."""
    examples = read_examples(task, [folder / task.filename("train")], labeled=True)
    rows = [[[text] for text in row] for row in zip(*examples.texts, strict=True)]
    tokenizer = BertTokenizer.from_pretrained("minilm")
    lengths = [len(tokenizer.encode_all(*row)[0]) for row in rows]
    limit = sorted(set(lengths))[-2]  # rows of this length are whole, and longer ones exist
    content, _ = audited(run_main, folder, "--max_length", limit)
    facts = facts_of(content, task.name, "train")
    assert facts["tokens"] == {name: int(np.percentile(lengths, at)) for name, at in audit.PERCENTILES.items()}
    short = BertTokenizer.from_pretrained("minilm", max_length=limit)
    assert facts["truncated"] == sum(bool(short.encode_all(*row)[0].overflowing) for row in rows) > 0
    assert content["max_length"] == limit


def test_counting_tokens_leaves_the_tokenizer_as_it_was():
    tokenizer = BertTokenizer.from_pretrained("minilm", max_length=6)
    assert tokenizer.count_tokens(["a " * 50, "a"]) == [52, 3]
    assert len(tokenizer.encode_all(["a " * 50])[0]) == 6


def test_texts_with_control_characters_do_not_reach_the_terminal(folder: Path, run_main: RunMain):
    moved = folder.rename(folder.with_name("da\x1b[31mta"))
    content, done = audited(run_main, moved)
    assert all(line.isprintable() for line in (done.out + done.err).split("\n"))
    assert facts_of(content, "sst", "train")["duplicates"]["exact"]["examples"] == [["A good film ."]]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("It's good .", "its  GOOD", True),
        ("do n't", "don't", True),
        ("stra\N{LATIN SMALL LETTER SHARP S}e", "STRASSE", True),
        ("a\N{ZERO WIDTH SPACE}b", "ab", True),
        ("\N{FULLWIDTH LATIN CAPITAL LETTER A}", "a", True),
        ("I \N{HEAVY BLACK HEART} it", "I \N{BROKEN HEART} it", False),
        ("!", "?", False),
        ("good", "goods", False),
    ],
)
def test_normalized_texts_are_equal_if_case_space_or_punctuation_differ(one: str, other: str, same: bool):
    assert (audit.normalized(one) == audit.normalized(other)) == same


def test_similarities_are_counted_in_fifths_of_their_range():
    counts = STS.predicts.label_counts(np.array([0, 0.9, 1, 2.5, 4.2, 5]))
    assert counts == {"0-1": 2, "1-2": 1, "2-3": 1, "3-4": 0, "4-5": 2}
    assert CFIMDB.predicts.label_counts(np.array([0, 0])) == {"0": 2, "1": 0}
    assert PARA.predicts.label_counts(np.array([1, 1, 0])) == {"0": 1, "1": 2}


def test_missing_files_are_named_and_the_others_audited(folder: Path, run_main: RunMain):
    for name in COURSE_FILES[2:]:
        (folder / name).unlink()
    content, done = audited(run_main, folder)
    assert [file["split"] for file in content["files"]] == ["train", "dev"]
    assert content["missing"] == [str(folder / name) for name in COURSE_FILES[2:]]
    assert f"not found, so not audited: {folder / 'ids-sst-test-student.csv'}" in done.err


def test_a_damaged_file_ends_in_one_line_after_the_others_were_audited(folder: Path, run_main: RunMain):
    path = folder / "sts-dev.csv"
    path.write_text(path.read_text().replace("\t0.9", "\t9"))
    done = run_main(datasets, folder)
    assert f"{path} line 3: similarity must be a number from 0 to 5, found '9'." in the_error(done)
    assert "sts     test" in done.out


def test_repeated_ids_are_counted(folder: Path, run_main: RunMain):
    write(folder / "ids-sst-train.csv", "\tid\tsentence\tsentiment", [("A", "x", 1), ("a", "y", 2)])
    content, done = audited(run_main, folder)
    assert facts_of(content, "sst", "train")["repeated_ids"] == 1
    assert "1 rows have an id that is in the file before" in done.err


def test_the_plot_is_drawn_for_whatever_files_there_are(folder: Path, run_main: RunMain):
    for name in COURSE_FILES[3:6]:
        (folder / name).unlink()
    (folder / "quora-train.csv").unlink()
    (folder / "quora-dev.csv").unlink()  # leaves a task without labels
    with warnings.catch_warnings(action="error"):  # a warning would end up in the user's terminal
        done = run_main(datasets, folder, "--plot", folder / "audit.png")
    assert done.status == 0, done.err
    assert (folder / "audit.png").read_bytes().startswith(b"\x89PNG")


BAD_FLAGS = {
    "no directory": (
        ["nowhere"],
        "nowhere: must be a directory with data files, found none. Get the course's data with:",
    ),
    "no data": (["."], ".: must have one of ids-sst-train.csv, "),
    "not a plot": (["data", "--plot", "x.gif"], "--plot x.gif: must end in one of .pdf, .png, .svg."),
    "json is a directory": (["data", "--json", "data"], "--json data: must be a file in an existing directory."),
    "no model": (["data", "--model", "nowhere/x/y"], "nowhere/x/y"),
    "unknown flag": (["data", "--plots", "x"], "unknown flag --plots. Did you mean --plot?"),
}


@pytest.mark.parametrize(("flags", "message"), BAD_FLAGS.values(), ids=BAD_FLAGS)
def test_wrong_flags_are_one_line(
    flags: list[str], message: str, folder: Path, run_main: RunMain, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(folder.parent)
    done = run_main(datasets, *flags)
    assert message in the_error(done)
    assert done.out == ""


def test_the_script_audits_the_sample_data(tmp_path: Path):
    done = run_script("datasets.py", "data/sample")
    assert (done.returncode, done.stderr) == (0, "")
    assert "sst     train   600        0" in done.stdout


def test_the_courses_data_has_the_known_numbers_of_rows(course_data: Path, tmp_path: Path, run_main: RunMain):
    shutil.copytree(course_data, tmp_path / "data", copy_function=shutil.copyfile)
    (tmp_path / "data").chmod(0o755)
    content, _ = audited(run_main, tmp_path / "data")
    assert [facts_of(content, "sst", split)["rows"] for split in audit.SPLITS] == [8544, 1101, 2210]
    assert [facts_of(content, "sts", split)["rows"] for split in audit.SPLITS] == [6040, 863, 1725]
