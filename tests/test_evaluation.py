"""Prediction files byte for byte, their checks, the scores, and the starter's functions in the return order of 2024."""

import dataclasses
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import COURSE_TASKS, run_script
from sklearn.metrics import accuracy_score, f1_score
from torch import Tensor, nn
from torch.utils.data import DataLoader

import evaluation
from datasets import (
    SentenceClassificationDataset,
    SentenceClassificationTestDataset,
    SentencePairDataset,
    SentencePairTestDataset,
    Split,
)
from distributed import World
from evaluation import (
    macro_f1,
    model_eval_multitask,
    model_eval_sst,
    model_eval_test_multitask,
    overall,
    overall_2023,
    read_logits,
    score_line,
    write_logits,
    write_predictions,
)
from readers import Examples, read_examples
from submission import PREDICTION_FILES, SAMPLE, PredictionFile, check_file, dev_files, parse_predictions, read_scored
from tasks import CFIMDB, PARA, SST, STS, TASKS, Batch, Number, Output, Predictions, Task
from tokenizer import BertTokenizer
from utils import InputError, Precision

CPU = torch.device("cpu")

# --- small files ------------------------------------------------------------------------------------------------------

LABELS = {"sst": [0, 1, 2, 3, 4, 2], "cfimdb": [0, 1, 1, 0, 1, 0], "para": [0, 1, 1, 0, 1, 1]}
LABELS["sts"] = [0.0, 1.2, 2.6, 3.4, 5.0, 4.1]
# one of sst, two of cfimdb and three of para are wrong
GUESSES = {
    "sst": np.array([0, 1, 2, 3, 4, 3]),
    "cfimdb": np.array([0, 1, 1, 0, 0, 1]),
    "para": np.array([1, 0, 0, 0, 1, 1], dtype=np.float32),
    "sts": np.array([0.1, 1.0, 2.5, -0.3, 5.25, 4.0], dtype=np.float32),
}


def ids_of(task: Task, split: str) -> list[str]:
    return [f"{task.name}-{split}-{i}" for i in range(6)]


def write_data(folder: Path) -> Path:
    """Write dev and test files of six rows for all tasks. Ids are in capitals, but are compared in lower case."""
    folder.mkdir()
    for task in COURSE_TASKS.values():
        texts = "\t".join(f"A {column} ." for column in task.text_columns)
        header = "\t".join(("", "id", *task.text_columns))
        for split in ("dev", "test"):
            labels = [f"\t{label}" for label in LABELS[task.name]] if split == "dev" else [""] * 6
            ids = [identifier.upper() for identifier in ids_of(task, split)]
            rows = [f"{n}\t{i}\t{texts}{label}\n" for n, (i, label) in enumerate(zip(ids, labels, strict=True))]
            first = header + (f"\t{task.label_column}" if split == "dev" else "") + "\n"
            (folder / task.filename(split)).write_text(first + "".join(rows), encoding="utf-8")
    return folder


def write_guesses(folder: Path) -> Path:
    """Write the fourteen prediction files that the handout lists, as the suite writes them."""
    folder.mkdir()
    for name, (_, task, split) in PREDICTION_FILES.items():
        values = GUESSES[task.name]
        write_predictions(folder / name, task, Predictions(ids_of(task, split), values[:, None], values, None))
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path / "data")


@pytest.fixture
def predictions(tmp_path: Path) -> Path:
    return write_guesses(tmp_path / "predictions")


# --- the format -------------------------------------------------------------------------------------------------------

GOLDEN: dict[str, tuple[list[list[float]], bytes]] = {
    "sst": ([[0, 0, 0, 9, 1], [7, 0, 1, 2, 3]], b"id \t Predicted_Sentiment \na1 , 3 \nb2 , 0 \n"),
    "cfimdb": ([[0, 0.5], [0.5, 0]], b"id \t Predicted_Sentiment \na1 , 1 \nb2 , 0 \n"),
    "para": ([[0.7], [-0.7]], b"id \t Predicted_Is_Paraphrase \na1 , 1.0 \nb2 , 0.0 \n"),
    "sts": ([[3.25], [-0.1]], b"id \t Predicted_Similiary \na1 , 3.25 \nb2 , -0.10000000149011612 \n"),
}


@pytest.mark.parametrize("name", COURSE_TASKS)
def test_prediction_files_are_the_starters_byte_for_byte(name: str, tmp_path: Path):
    logits, golden = torch.tensor(GOLDEN[name][0]), GOLDEN[name][1]
    values = TASKS[name].predicts.decode(logits).numpy()
    write_predictions(tmp_path / "out.csv", TASKS[name], Predictions(["a1", "b2"], logits.numpy(), values, None))
    assert (tmp_path / "out.csv").read_bytes() == golden


@pytest.mark.parametrize("name", COURSE_TASKS)
def test_what_was_written_is_read_back_exactly(name: str, tmp_path: Path):
    ids, values = ["a1", "b,2", "c , 3", "d 4", "\u2028e", "f"], GUESSES[name]
    write_predictions(tmp_path / "out.csv", TASKS[name], Predictions(ids, values[:, None], values, None))
    found = parse_predictions(tmp_path / "out.csv", TASKS[name])
    assert found == (dict(zip((i.strip() for i in ids), values.tolist(), strict=True)), [])


def test_the_list_of_files_is_the_handouts():
    part1 = {
        f"{o}-{t}-{s}-out.csv" for o in ("pretrain", "finetune") for t in ("sst", "cfimdb") for s in ("dev", "test")
    }
    part2 = {f"{t}-{s}-output.csv" for t in ("sst", "para", "sts") for s in ("dev", "test")}
    assert {name for name, file in PREDICTION_FILES.items() if file.part == "1"} == part1
    assert {name for name, file in PREDICTION_FILES.items() if file.part == "2"} == part2
    assert len(part1) == 8
    assert len(part2) == 6
    assert all(file.task.name in name and file.split in name for name, file in PREDICTION_FILES.items())
    for_dev = {name for name in part1 | part2 if "-dev-" in name}
    assert {name: file for name, file in dev_files().items() if name in PREDICTION_FILES} == {
        name: PREDICTION_FILES[name] for name in for_dev
    }


def test_the_dev_files_are_the_handouts_and_those_of_every_other_task(monkeypatch: pytest.MonkeyPatch):
    handouts = {name for name in PREDICTION_FILES if "-dev-" in name}
    assert dev_files().keys() - handouts == {"cfimdb-dev-output.csv"}
    assert dev_files()["cfimdb-dev-output.csv"] == PredictionFile("2", CFIMDB, "dev")
    added = dataclasses.replace(STS, name="relatedness", files="sick-{}.csv")
    monkeypatch.setitem(TASKS, added.name, added)
    assert dev_files()["relatedness-dev-output.csv"] == PredictionFile("2", added, "dev")
    assert {file.split for file in dev_files().values()} == {"dev"}


def test_ids_are_read_in_lower_case_and_numbers_in_any_spelling(tmp_path: Path):
    (tmp_path / "out.csv").write_text("id \t Predicted_Similiary \nAB , 1 \ncD , -.5 \nef , 1.5E-07 \n")
    assert parse_predictions(tmp_path / "out.csv", STS) == ({"ab": 1, "cd": -0.5, "ef": 1.5e-7}, [])


@pytest.mark.parametrize("task", [SST, PARA, STS], ids=lambda task: task.name)
def test_files_that_went_through_an_editor_are_read_right(task: Task, data: Path, predictions: Path):
    """Line ends of Windows, a byte order mark, no final newline, rows in any order, 1.0 for 1."""
    path, labels = predictions / f"{task.name}-dev-output.csv", data / task.filename("dev")
    expected = read_scored(path, task, labels).score
    header, *rows = path.read_text().splitlines()
    floats = [re.sub(r" (\d) $", r" \1.0 ", row) for row in rows]
    variants = {
        "line ends": "\r\n".join([header, *rows, ""]),
        "byte order mark": "\ufeff" + "\n".join([header, *rows, ""]),
        "no final newline": "\n".join([header, *rows]),
        "no final newline, line ends": "\r\n".join([header, *rows]),
        "any order": "\n".join([header, *sorted(rows, key=lambda row: row[::-1]), ""]),
        "1.0 for 1": "\n".join([header, *floats, ""]),
        "1 for 1.0": "\n".join([header, *(re.sub(r"\.0 $", " ", row) for row in rows), ""]),
        "all": "\ufeff" + "\r\n".join([header, *reversed(floats)]),
    }
    for name, text in variants.items():
        path.write_bytes(text.encode())
        assert read_scored(path, task, labels).score == expected, name


WRONG_IDS = {
    "dev as test": (SST, "test", SST, "dev"),
    "test as dev": (SST, "dev", SST, "test"),
    "another task": (CFIMDB, "dev", SST, "dev"),
}


@pytest.mark.parametrize(("task", "split", "other", "other_split"), WRONG_IDS.values(), ids=WRONG_IDS)
def test_ids_of_another_split_or_task_are_named(
    task: Task, split: str, other: Task, other_split: str, data: Path, tmp_path: Path
):
    path, values = tmp_path / "out.csv", GUESSES["cfimdb"]
    write_predictions(path, task, Predictions(ids_of(other, other_split), values[:, None], values, None))
    _, problems = check_file(path, task, data / task.filename(split), labeled=split == "dev")
    wanted, found = data / task.filename(split), data / other.filename(other_split)
    assert problems == [
        f"{path}: must have every id of {wanted} exactly once and no other; its ids are those of {found} "
        f"({other.name} {other_split}). Predict again with {wanted}."
    ]


def test_predictions_for_the_sample_data_are_recognized(data: Path, tmp_path: Path):
    ids = read_examples(SST, [SAMPLE / "ids-sst-dev.csv"], labeled=True).ids
    values = np.zeros(len(ids), int)
    write_predictions(tmp_path / "out.csv", SST, Predictions(ids, values[:, None], values, None))
    _, (problem,) = check_file(tmp_path / "out.csv", SST, data / "ids-sst-dev.csv", labeled=True)
    assert "sample/ids-sst-dev.csv (sst dev), the project's sample data, whose ids are on no leaderboard." in problem


SENTIMENT = "id \t Predicted_Sentiment \n"
BAD_FILES: dict[str, tuple[Task, str | bytes | None, str]] = {
    "absent": (SST, None, "PATH: cannot be read as a prediction file; No such file or directory. Predict again."),
    "empty": (SST, "", "PATH: must be a prediction file, found an empty file. Predict again."),
    "not text": (SST, b"\xff\xfe", "PATH: cannot be read as a prediction file; it is not UTF-8 text. Predict again."),
    "header": (
        SST,
        "id,Predicted_Sentiment\na1 , 3 \n",
        r"PATH line 1: must be 'id \t Predicted_Sentiment ', found 'id,Predicted_Sentiment'. Predict again.",
    ),
    "another task's header": (
        PARA,
        SENTIMENT + "a1 , 1 \n",
        r"PATH line 1: must be 'id \t Predicted_Is_Paraphrase ', found 'id \t Predicted_Sentiment '. Predict again.",
    ),
    "correct spelling of the header": (
        STS,
        "id \t Predicted_Similarity \na1 , 1 \n",
        r"PATH line 1: must be 'id \t Predicted_Similiary ', found 'id \t Predicted_Similarity '. Predict again.",
    ),
    "no value": (SST, SENTIMENT + "a1 ,  \n", "PATH line 2: must be 'id , number ', found 'a1 ,  '. Predict again."),
    "no id": (SST, SENTIMENT + " , 1 \n", "PATH line 2: must be 'id , number ', found ' , 1 '. Predict again."),
    "no spaces": (SST, SENTIMENT + "a1,3\n", "PATH line 2: must be 'id , number ', found 'a1,3'. Predict again."),
    "blank line": (SST, SENTIMENT + "\na1 , 3 \n", "PATH line 2: must be 'id , number ', found ''. Predict again."),
    "a word": (SST, SENTIMENT + "a1 , x \n", "PATH line 2: must be 'id , number ', found 'a1 , x '. Predict again."),
    "nan": (
        STS,
        STS.csv_header + "a1 , 1 \nb2 , nan \n",
        "PATH line 3: must be 'id , number ', found 'b2 , nan '. Predict again.",
    ),
    "infinity": (
        STS,
        STS.csv_header + "a1 , 1e999 \n",
        "PATH line 2: must be 'id , number ', found 'a1 , 1e999 '. Predict again.",
    ),
    "several": (
        SST,
        SENTIMENT + "a1,3\nb2 , 3 \nc3,3\nd4,3\n",
        "PATH line 2: must be 'id , number ', found 'a1,3' (3 lines of this kind). Predict again.",
    ),
    "twice": (
        SST,
        SENTIMENT + "a1 , 3 \nb2 , 3 \nA1 , 3 \n",
        "PATH line 4: ids must be unique, 'a1' is in line 2 too. Predict again.",
    ),
    "sst range": (
        SST,
        SENTIMENT + "a1 , 4 \nb2 , 5 \n",
        "PATH line 3: the prediction must be a whole number from 0 to 4, found '5'. Predict again.",
    ),
    "sst fraction": (
        SST,
        SENTIMENT + "a1 , 2.5 \n",
        "PATH line 2: the prediction must be a whole number from 0 to 4, found '2.5'. Predict again.",
    ),
    "cfimdb range": (
        CFIMDB,
        SENTIMENT + "a1 , 2 \n",
        "PATH line 2: the prediction must be 0 or 1, found '2'. Predict again.",
    ),
    "para range": (
        PARA,
        PARA.csv_header + "a1 , 0.7 \n",
        "PATH line 2: the prediction must be 0 or 1, found '0.7'. Predict again.",
    ),
}


@pytest.mark.parametrize(("task", "content", "line"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_bad_prediction_file_ends_in_one_clear_line(
    task: Task, content: str | bytes | None, line: str, data: Path, tmp_path: Path
):
    path = tmp_path / "out.csv"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError) as caught:
        read_scored(path, task, data / task.filename("dev"))
    assert str(caught.value) == line.replace("PATH", str(path))
    for split in ("dev", "test"):
        value, problems = check_file(path, task, data / task.filename(split), labeled=split == "dev")
        assert value is None
        assert problems[0] == str(caught.value)
        assert all("must have every id" in problem for problem in problems[1:]), "one problem, besides the ids"


def test_a_similarity_may_be_any_finite_number(data: Path, predictions: Path):
    """A correlation does not depend on the range, and a linear head exceeds it."""
    path = predictions / "sts-dev-output.csv"
    scaled = (GUESSES["sts"] * 100 - 7).astype(np.float64)
    write_predictions(path, STS, Predictions(ids_of(STS, "dev"), scaled[:, None], scaled, None))
    assert read_scored(path, STS, data / "sts-dev.csv").score == pytest.approx(CORRELATION)


def test_missing_and_unknown_ids_are_counted_and_one_is_named(data: Path, predictions: Path):
    path, file = predictions / "sst-dev-output.csv", data / "ids-sst-dev.csv"
    header, *rows = path.read_text().splitlines(keepends=True)
    path.write_text(header + "".join(reversed(rows)))
    assert read_scored(path, SST, file).score == 5 / 6, "the order of the rows does not matter"
    rule = f"{path}: must have every id of {file} exactly once and no other"
    path.write_text(header + rows[2] + "".join(rows[:1]))
    missing = f"{rule}; 4 missing, such as sst-dev-1. Predict again with this data."
    assert check_file(path, SST, file, labeled=True) == (None, [missing])
    path.write_text(header + "".join(rows) + "other , 1 \n" + "more , 1 \n")
    unknown = f"{rule}; 2 unknown, such as more. Predict again with this data."
    assert check_file(path, SST, file, labeled=True) == (None, [unknown])
    with pytest.raises(InputError) as caught:
        read_scored(path, SST, file)
    assert str(caught.value) == unknown


def test_a_check_lists_every_problem_of_a_file(data: Path, tmp_path: Path):
    path = tmp_path / "out.csv"
    rows = ["sst-dev-0 , 9 ", "sst-dev-1,1", "sst-dev-2 , 2 ", "sst-dev-2 , 2 ", "other , 1 "]
    path.write_text("id\n" + "\n".join(rows))
    value, problems = check_file(path, SST, data / "ids-sst-dev.csv", labeled=True)
    assert value is None
    kinds = ["line 1: must be", "line 3: must be", "line 2: the pred", "line 5: ids must"]
    kinds += ["4 missing, such as sst-dev-1.", "1 unknown, such as other."]
    assert len(problems) == len(kinds)
    assert all(kind in problem for kind, problem in zip(kinds, problems, strict=True))
    with pytest.raises(InputError, match="line 1: must be"):
        read_scored(path, SST, data / "ids-sst-dev.csv")


def test_a_check_names_unreadable_data_beside_the_files_own_problems(tmp_path: Path):
    value, problems = check_file(tmp_path / "out.csv", SST, tmp_path / "none.csv", labeled=False)
    assert value is None
    assert [problem.split(":")[0] for problem in problems] == [str(tmp_path / "none.csv"), str(tmp_path / "out.csv")]


def test_a_row_of_the_data_that_cannot_be_used_is_named_and_not_expected(
    data: Path, predictions: Path, capsys: pytest.CaptureFixture
):
    with (data / "quora-dev.csv").open("a") as file:
        file.write("6\tpara-dev-6\tA question ?\n")
    assert read_scored(predictions / "para-dev-output.csv", PARA, data / "quora-dev.csv").score == 0.5
    assert "quora-dev.csv line 8: sentence2 is missing" in capsys.readouterr().err


@pytest.mark.parametrize("labels", [None, np.array([3, 1])])
def test_logits_make_the_round_trip(labels: np.ndarray | None, tmp_path: Path):
    logits = np.array([[0.1, -2.5], [1e-30, 3.0]], dtype=np.float32)
    write_logits(tmp_path / "dev.npz", Predictions(["a1", "b2"], logits, logits.argmax(1), labels))
    with np.load(tmp_path / "dev.npz", allow_pickle=False) as found:
        assert set(found) == {"ids", "logits", "sha256"} | ({"labels"} if labels is not None else set())
        assert found["ids"].tolist() == ["a1", "b2"]
        assert found["logits"].dtype == np.float32
        assert np.array_equal(found["logits"], logits)
        assert labels is None or np.array_equal(found["labels"], labels)
    assert [path.name for path in tmp_path.iterdir()] == ["dev.npz"], "no temporary file is left"


def test_logits_are_read_back_as_predictions(tmp_path: Path):
    logits = np.array([[0.1], [-3.0]], dtype=np.float32)
    given = Predictions(["a1", "b2"], logits, np.array([1.0, 0.0]), np.array([0, 1]))
    write_logits(tmp_path / "para-dev.npz", given)
    found = read_logits(tmp_path / "para-dev.npz", PARA, "Predict again.", labeled=True)
    assert found.ids == given.ids
    for ours, theirs in zip(found[1:], given[1:], strict=True):
        assert np.array_equal(ours, theirs)
    assert read_logits(tmp_path / "para-dev.npz", PARA, "Predict again.", labeled=False).labels is None


BAD_LOGITS: dict[str, tuple[Callable[[Path], None], str]] = {
    "absent": (lambda path: None, "cannot be read as logits; No such file or directory"),
    "not an archive": (
        lambda path: path.write_bytes(b"PK"),
        "cannot be read as logits; it is not an .npz file with ids",
    ),
    "no logits": (lambda path: np.savez(path, ids=["a"]), "cannot be read as logits; it is not an .npz file with ids"),
    "pickled": (
        lambda path: np.savez(path, ids=np.array([{}], dtype=object), logits=np.zeros((1, 5))),
        "cannot be read as logits; it is not an .npz file",
    ),
    "another number of logits": (
        lambda path: np.savez(path, ids=["a", "b"], logits=np.zeros((2, 1))),
        "must have 5 finite logits for each of its 2 ids, found an array of shape (2, 1)",
    ),
    "too few rows": (
        lambda path: np.savez(path, ids=["a", "b"], logits=np.zeros((1, 5))),
        "must have 5 finite logits for each of its 2 ids, found an array of shape (1, 5)",
    ),
    "not finite": (
        lambda path: np.savez(path, ids=["a"], logits=np.full((1, 5), np.nan)),
        "must have 5 finite logits for each of its 1 ids, found NaN or infinity",
    ),
    "an id twice": (
        lambda path: np.savez(path, ids=["a", "b", "a"], logits=np.zeros((3, 5))),
        "ids must be unique, found 1 of 3 repeated",
    ),
    "too few labels": (
        lambda path: np.savez(path, ids=["a", "b"], logits=np.zeros((2, 5)), labels=np.zeros(1)),
        "must have a label for each of 2 ids, found 1",
    ),
}


@pytest.mark.parametrize(("write", "message"), BAD_LOGITS.values(), ids=BAD_LOGITS)
def test_bad_logits_are_refused_with_the_remedy_of_the_caller(
    write: Callable[[Path], None], message: str, tmp_path: Path
):
    path = tmp_path / "sst-dev.npz"
    write(path)
    with pytest.raises(InputError) as caught:
        read_logits(path, SST, "Ask again.", labeled="label" in message)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert str(caught.value).endswith(". Ask again.")
    assert "\n" not in str(caught.value)


# --- scores -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scores", "of_2024", "of_2023"),
    [
        ({"sst": 0.5, "para": 0.75, "sts": 0.5}, 2.0 / 3, 1.75 / 3),  # (0.5 + 0.75 + 0.75) / 3
        ({"sst": 0.52, "para": 0.88, "sts": 0.86}, 0.776667, 0.753333),  # (0.52 + 0.88 + 0.93) / 3
        ({"sst": 0.0, "para": 0.0, "sts": -1.0}, 0.0, -1 / 3),
        ({"sst": 1.0, "para": 1.0, "sts": 1.0}, 1.0, 1.0),
        ({"sts": 0.2}, 0.6, 0.2),
        ({"sst": 0.4, "cfimdb": 0.8}, 0.6, 0.6),
    ],
)
def test_the_overall_scores_of_both_years(scores: dict[str, float], of_2024: float, of_2023: float):
    assert overall(scores) == pytest.approx(of_2024, abs=1e-6)
    assert overall_2023(scores) == pytest.approx(of_2023, abs=1e-6)


def test_the_score_line_names_both_overall_scores():
    line = score_line({"sst": 0.52, "para": 0.88, "sts": 0.86})
    assert line == "sst 0.520 | para 0.880 | sts 0.860 | overall 0.7767 (2023 formula: 0.7533)"


@pytest.mark.parametrize("classes", [2, 5])
def test_macro_f1_is_sklearns(classes: int):
    generator = np.random.default_rng(classes)
    for rows in (3, 10, 200):
        values, labels = generator.integers(0, classes, (2, rows))
        assert macro_f1(values, labels) == pytest.approx(f1_score(labels, values, average="macro"))
    only_predicted, only_labeled = np.array([0, 4, 4, 0]), np.array([0, 1, 0, 0])
    assert macro_f1(only_predicted, only_labeled) == pytest.approx(
        f1_score(only_labeled, only_predicted, average="macro", zero_division=0)
    )


# --- the starter's functions ------------------------------------------------------------------------------------------


class Measuring(nn.Module):
    """Its only logit is the number of tokens of a row."""

    world = World()

    def predict(self, batch: Batch) -> Output:
        return Output(batch.sentences[0].attention_mask.sum(dim=1, keepdim=True).float(), ())


def test_predictions_are_in_the_order_of_the_file():
    """Batches are sorted by length. The lengths here need a permutation that is not its own inverse."""
    texts = [f"{'good ' * n}film" for n in (3, 1, 2, 6, 4, 9, 5)]
    task = dataclasses.replace(SST, predicts=Number(0, 100))
    split = Split.tokenize(Examples(task, list("abcdefg"), (texts,), None), BertTokenizer.from_pretrained("minilm"))
    found = evaluation.predict(Measuring(), split, 2, Precision("fp32", torch.device("cpu")))
    assert found.ids == list("abcdefg")
    assert found.values.tolist() == [6, 4, 5, 9, 7, 12, 8]  # with [CLS] and [SEP]


class Counting(nn.Module):
    """A MultitaskBERT whose outputs can be computed by hand: they depend only on the numbers of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.seen: list[tuple[str, bool, bool]] = []

    def _lengths(self, name: str, *masks: Tensor) -> list[Tensor]:
        self.seen.append((name, self.training, torch.is_grad_enabled()))
        return [self.scale * mask.sum(1) for mask in masks]

    def predict_sentiment(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        assert input_ids.shape == attention_mask.shape
        (length,) = self._lengths("sst", attention_mask)
        return -(length[:, None] % 5 - torch.arange(5)).abs()  # largest at length % 5

    def predict_paraphrase(self, ids_1: Tensor, mask_1: Tensor, ids_2: Tensor, mask_2: Tensor) -> Tensor:
        assert (ids_1.shape, ids_2.shape) == (mask_1.shape, mask_2.shape)
        one, two = self._lengths("para", mask_1, mask_2)
        return (one - two - 0.5)[:, None]  # a paraphrase where the first is longer

    def predict_similarity(self, ids_1: Tensor, mask_1: Tensor, ids_2: Tensor, mask_2: Tensor) -> Tensor:
        assert (ids_1.shape, ids_2.shape) == (mask_1.shape, mask_2.shape)
        one, two = self._lengths("sts", mask_1, mask_2)
        return (one - two / 2)[:, None]


WORDS = [1, 4, 2, 7, 3]  # words of the first sentences; [CLS] and [SEP] add two tokens
OTHER_WORDS = [2, 3, 2, 1, 9]
SENTENCES, OTHERS = ([" ".join(["film"] * n) for n in numbers] for numbers in (WORDS, OTHER_WORDS))
IDS = {name: [f"{name}{i}" for i in range(5)] for name in ("sst", "para", "sts")}
GRADES, DUPLICATES, SIMILARITIES = [3, 1, 0, 4, 2], [0, 1, 1, 1, 0], [1.5, 2.6, 0.0, 5.0, 1.0]
EXPECTED = {
    "sst": [(n + 2) % 5 for n in WORDS],
    "para": [float(a > b) for a, b in zip(WORDS, OTHER_WORDS, strict=True)],
    "sts": [a + 2 - (b + 2) / 2 for a, b in zip(WORDS, OTHER_WORDS, strict=True)],
}


@pytest.fixture(scope="module")
def args(tmp_path_factory: pytest.TempPathFactory) -> Namespace:
    folder = tmp_path_factory.mktemp("tokenizer")
    BertTokenizer.from_pretrained("minilm").save_pretrained(folder)
    return Namespace(model=str(folder))


def load(dataset: SentenceClassificationDataset | SentencePairDataset) -> DataLoader:
    return DataLoader(dataset, shuffle=False, batch_size=2, collate_fn=dataset.collate_fn)


@pytest.fixture
def dev_loaders(args: Namespace) -> list[DataLoader]:
    pairs = (
        list(zip(SENTENCES, OTHERS, y, IDS[t], strict=True)) for t, y in (("para", DUPLICATES), ("sts", SIMILARITIES))
    )
    sentences = list(zip(SENTENCES, GRADES, IDS["sst"], strict=True))
    para, sts = pairs
    return [
        load(SentenceClassificationDataset(sentences, args)),
        load(SentencePairDataset(para, args)),
        load(SentencePairDataset(sts, args, isRegression=True)),
    ]


@pytest.fixture
def unlabeled_loaders(args: Namespace) -> list[DataLoader]:
    sentences = list(zip(SENTENCES, IDS["sst"], strict=True))
    para, sts = (list(zip(SENTENCES, OTHERS, IDS[name], strict=True)) for name in ("para", "sts"))
    return [
        load(SentenceClassificationTestDataset(sentences, args)),
        load(SentencePairTestDataset(para, args)),
        load(SentencePairTestDataset(sts, args)),
    ]


def test_model_eval_sst_returns_what_the_starter_of_2024_does(dev_loaders: list[DataLoader]):
    accuracy, f1, values, labels, sentences, ids = model_eval_sst(dev_loaders[0], Counting(), CPU)
    assert list(values) == EXPECTED["sst"] == [3, 1, 4, 4, 0]
    assert list(labels) == GRADES
    assert (sentences, ids) == (SENTENCES, IDS["sst"])
    assert accuracy == accuracy_score(GRADES, EXPECTED["sst"]) == 0.6
    assert f1 == pytest.approx(f1_score(GRADES, EXPECTED["sst"], average="macro", zero_division=0))


def test_model_eval_multitask_returns_sst_para_sts_as_in_2024(dev_loaders: list[DataLoader]):
    found = model_eval_multitask(*dev_loaders, Counting(), CPU)
    assert len(found) == 9
    assert found[0] == 0.6
    assert found[3] == accuracy_score(DUPLICATES, EXPECTED["para"]) == 0.8
    assert found[6] == pytest.approx(np.corrcoef(EXPECTED["sts"], SIMILARITIES)[1][0])
    for name, values, ids in zip(EXPECTED, found[1::3], found[2::3], strict=True):
        assert list(values) == EXPECTED[name]
        assert ids == IDS[name]


def test_model_eval_test_multitask_returns_sst_para_sts_as_in_2024(unlabeled_loaders: list[DataLoader]):
    found = model_eval_test_multitask(*unlabeled_loaders, Counting(), CPU)
    assert len(found) == 6
    for name, values, ids in zip(EXPECTED, found[::2], found[1::2], strict=True):
        assert list(values) == EXPECTED[name]
        assert ids == IDS[name]


def test_evaluation_is_in_eval_mode_and_without_gradients(
    dev_loaders: list[DataLoader], unlabeled_loaders: list[DataLoader]
):
    for ask in (
        lambda model: model_eval_sst(dev_loaders[0], model, CPU),
        lambda model: model_eval_multitask(*dev_loaders, model, CPU),
        lambda model: model_eval_test_multitask(*unlabeled_loaders, model, CPU),
    ):
        model = Counting().train()
        ask(model)
        assert {seen[1:] for seen in model.seen} == {(False, False)}
        assert len(model.seen) % 3 == 0, "three batches per loader"
    assert torch.is_grad_enabled()


def test_predictions_of_the_starters_functions_are_written_like_the_suites(
    dev_loaders: list[DataLoader], tmp_path: Path
):
    """Lists of NumPy numbers print as the starter's do: `1.0` for para, `3` for sst."""
    found = model_eval_multitask(*dev_loaders, Counting(), CPU)
    for name, values, ids in zip(EXPECTED, found[1::3], found[2::3], strict=True):
        rows = "".join(f"{i} , {v} \n" for i, v in zip(ids, values, strict=True))
        array = np.array(values)
        write_predictions(tmp_path / "out.csv", TASKS[name], Predictions(ids, array, array, None))
        assert (tmp_path / "out.csv").read_text() == TASKS[name].csv_header + rows
        assert rows.splitlines()[0] == {"sst": "sst0 , 3 ", "para": "para0 , 0.0 ", "sts": "sts0 , 1.0 "}[name]


# --- the script -------------------------------------------------------------------------------------------------------

CORRELATION = float(np.corrcoef(GUESSES["sts"], LABELS["sts"])[0, 1])


def test_the_script_prints_the_scores_of_a_direct_computation(data: Path, predictions: Path):
    done = run_script("evaluation.py", predictions, "--data", data)
    unknown = f"{predictions / 'manifest.json'} does not know these files, so it is unknown which run they are from."
    assert (done.returncode, done.stderr) == (0, f"note: {unknown}\n")
    header, *files, last = done.stdout.splitlines()
    assert header.split() == ["file", "score", "[95%", "interval]", "run", "predicted"]
    accuracies = {t: accuracy_score(LABELS[t], GUESSES[t]) for t in ("sst", "cfimdb", "para")}
    tasks = {name: file.task for name, file in PREDICTION_FILES.items() if file.split == "dev"}
    assert dict(line.split()[:2] for line in files) == {
        name: f"{CORRELATION if task is STS else accuracies[task.name]:.3f}" for name, task in tasks.items()
    }
    mean = (accuracies["sst"] + accuracies["para"] + (CORRELATION + 1) / 2) / 3
    plain = (accuracies["sst"] + accuracies["para"] + CORRELATION) / 3
    line = f"sst 0.833 | para 0.500 | sts {CORRELATION:.3f} | overall {mean:.4f} (2023 formula: {plain:.4f})"
    assert re.fullmatch(re.escape(line) + r" \| 95% interval of overall \[0\.\d{3}, 0\.\d{3}\]", last)


def test_the_scripts_bad_input_is_one_line_and_status_2(data: Path, predictions: Path):
    path = predictions / "sst-dev-output.csv"
    path.write_text(SENTIMENT + "a1 , 3 \n")
    done = run_script("evaluation.py", predictions, "--data", data)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"error: {path}: must have every id of {data / 'ids-sst-dev.csv'} exactly once and no other; 6 missing, "
        "such as sst-dev-0. Predict again with this data.\n"
    )


def evaluate(monkeypatch: pytest.MonkeyPatch, *flags: object) -> None:
    monkeypatch.setattr(sys, "argv", ["evaluation.py", *map(str, flags)])
    evaluation.main()


@pytest.fixture
def nothing_printed(capsys: pytest.CaptureFixture) -> Iterator[None]:
    yield
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("nothing_printed")
def test_a_directory_without_prediction_files_is_refused(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(InputError, match=r"nowhere: must have one of pretrain-sst-dev-out\.csv, .*found none\. Train"):
        evaluate(monkeypatch, tmp_path / "nowhere", "--data", data)


@pytest.mark.usefixtures("nothing_printed")
def test_absent_data_is_refused(predictions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(InputError, match=r"nowhere/ids-sst-dev\.csv: cannot be read; No such file.*--data data/sample"):
        evaluate(monkeypatch, predictions, "--data", tmp_path / "nowhere")


def test_an_incomplete_part_2_is_scored_and_noted(
    data: Path, predictions: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    for path in predictions.iterdir():
        if path.name not in ("sst-dev-output.csv", "sts-test-output.csv"):
            path.unlink()
    evaluate(monkeypatch, predictions, "--data", data)
    out, err = capsys.readouterr()
    assert out.splitlines()[1].split()[:2] == ["sst-dev-output.csv", "0.833"]
    assert len(out.splitlines()) == 3
    assert err.startswith("note: no dev file of para, sts found, so the overall score is not the leaderboard's.\n")


def test_the_dev_file_of_a_task_that_the_handout_does_not_list_is_scored_too(
    data: Path, predictions: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    for path in predictions.iterdir():
        if path.name != "sst-dev-output.csv":
            path.unlink()
    values = GUESSES["cfimdb"]
    given = Predictions(ids_of(CFIMDB, "dev"), values[:, None], values, None)
    write_predictions(predictions / "cfimdb-dev-output.csv", CFIMDB, given)
    evaluate(monkeypatch, predictions, "--data", data)
    out, err = capsys.readouterr()
    assert [line.split()[:2] for line in out.splitlines()[1:3]] == [
        ["sst-dev-output.csv", "0.833"],
        ["cfimdb-dev-output.csv", "0.667"],
    ]
    assert out.splitlines()[3].startswith("sst 0.833 | cfimdb 0.667 | overall 0.7500 (2023 formula: 0.7500) | ")
    assert "no dev file of para, sts found" in err
