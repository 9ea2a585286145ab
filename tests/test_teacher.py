"""teacher.py and unlabeled.py: logits of rows that the teacher has not seen, and of texts without labels."""

import argparse
import contextlib
import csv
import hashlib
import io
import random
import re
import signal
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from conftest import the_error
from processes import free_port, run_together, start
from sklearn.linear_model import LogisticRegression
from torch.nn.functional import softmax

import interruption
import multitask_classifier
import teacher
import unlabeled
from evaluation import read_logits, write_logits
from readers import read_examples
from tasks import TASKS

FLAGS = ("--epochs", 1, "--batch_size", 4, "--max_length", 32, "--name", "t")


@pytest.fixture
def flags(tiny_checkpoint: Path, task_files: Path, tmp_path: Path) -> list[object]:
    review = " ".join(f"I have seen film {number} twice." for number in range(9))
    (tmp_path / "reviews.csv").write_text(f"\tid\tsentence\n0\treview\t{review}\n")
    files = ["--data", task_files, "--texts", tmp_path / "reviews.csv", "--runs", tmp_path / "runs"]
    return ["--model", tiny_checkpoint, *files, *FLAGS]


def logits_in(path: Path, task: str) -> dict[str, np.ndarray]:
    found = read_logits(path, TASKS[task], "", labeled=False)
    return dict(zip(found.ids, found.logits, strict=True))


@pytest.mark.parametrize("task", ["sst", "para", "sts"])
def test_a_student_learns_from_what_the_teacher_writes(
    task: str, flags: list[object], task_files: Path, tmp_path: Path, tiny_checkpoint: Path, run_main: Any
):
    done = run_main(teacher, *flags, "--tasks", task, "--more", 5)
    assert done.status == 0, done.err
    assert [line.split(" | ")[0] for line in done.out.splitlines()[:2]] == [f"{task}: fold {k} of 2" for k in (1, 2)]
    more = tmp_path / "runs" / "t" / f"{task}-more.csv"
    trained = [task_files / TASKS[task].filename("train"), more]
    ids = read_examples(TASKS[task], trained, labeled=True).ids
    assert logits_in(tmp_path / "runs" / "t" / f"{task}-train.npz", task).keys() == set(ids)
    assert len(ids) > 8, "some texts are new"
    student = ["--model", tiny_checkpoint, "--data", task_files, "--runs", tmp_path / "runs", "--tasks", task]
    student += ["--predictions", tmp_path / "predictions", "--option", "finetune", "--epochs", 1, "--lr", 1e-3]
    learned = run_main(multitask_classifier, *student, f"--{task}_loss", "distill", f"--{task}_train", *trained,
                       "--teacher", tmp_path / "runs" / "t")  # fmt: skip
    assert learned.status == 0, learned.err
    assert f"{task}: train {len(ids)}, dev 8" in learned.out


def test_every_row_is_labeled_by_a_teacher_that_has_not_seen_it(
    flags: list[object], tmp_path: Path, task_files: Path, run_main: Any, monkeypatch: pytest.MonkeyPatch
):
    seen: list[set[str]] = []
    labeled: list[list[str]] = []

    def fine_tune(model: teacher.Teacher, task: Any, objective: Any, texts: teacher.Columns, *rest: object) -> None:
        seen.append(set(texts[0]))

    def logits_of(model: teacher.Teacher, texts: teacher.Columns, *rest: object) -> torch.Tensor:
        labeled.append(texts[0])
        return torch.full((len(texts[0]), 5), float(len(seen)))  # the number of the fold

    monkeypatch.setattr(teacher, "fine_tune", fine_tune)
    monkeypatch.setattr(teacher, "logits_of", logits_of)
    monkeypatch.setattr(teacher, "calibration", lambda *rest: (1.0, torch.zeros(5)))
    done = run_main(teacher, *flags, "--tasks", "sst", "--folds", 3, "--more", 0)
    assert done.status == 0, done.err
    train = read_examples(TASKS["sst"], [task_files / TASKS["sst"].filename("train")], labeled=True)
    held_out = labeled[1::2]  # dev is labeled before them
    assert sorted(text for part in held_out for text in part) == sorted(train.texts[0])
    for known, part in zip(seen, held_out, strict=True):
        assert known == set(train.texts[0]) - set(part)
    written = logits_in(tmp_path / "runs" / "t" / "sst-train.npz", "sst")
    for identifier, text in zip(train.ids, train.texts[0], strict=True):
        fold = next(number for number, part in enumerate(held_out, 1) if text in part)
        assert written[identifier].tolist() == [fold] * 5


def test_all_logits_are_calibrated_and_more_texts_get_the_mean_of_all_folds_probabilities(
    flags: list[object], tmp_path: Path, run_main: Any, monkeypatch: pytest.MonkeyPatch
):
    scale, offsets = 0.5, np.linspace(-1, 1, 5, dtype=np.float32)
    monkeypatch.setattr(teacher, "calibration", lambda *rest: (scale, torch.from_numpy(offsets)))
    run_main(teacher, *flags, "--tasks", "sst", "--folds", 3, "--more", 4)
    run = tmp_path / "runs" / "t"
    written = logits_in(run / "sst-train.npz", "sst")
    raw = [logits_in(run / f"sst-fold-{k}.npz", "sst") for k in (1, 2, 3)]
    folds = [{key: value * scale + offsets for key, value in fold.items()} for fold in raw]
    for identifier in set(written) - set.intersection(*map(set, folds)):
        fold = next(fold for fold in folds if identifier in fold)
        np.testing.assert_allclose(written[identifier], fold[identifier], rtol=1e-6)
    rows = list(csv.DictReader((run / "sst-more.csv").open(newline=""), delimiter="\t"))
    assert len(rows) == 4
    for row in rows:
        probabilities = np.mean([np.exp(f[row["id"]]) / np.exp(f[row["id"]]).sum() for f in folds], axis=0)
        found = softmax(torch.from_numpy(written[row["id"]]), dim=0).numpy()
        np.testing.assert_allclose(found, probabilities, rtol=1e-5)
        assert int(row["sentiment"]) == probabilities.argmax()


def calibration(name: str, logits: np.ndarray, labels: np.ndarray) -> tuple[float, np.ndarray]:
    task = TASKS[name]
    objective = teacher.build_objective(task.predicts.default_loss, task, argparse.Namespace())
    scale, offsets = teacher.calibration(torch.from_numpy(logits).float(), torch.from_numpy(labels), task, objective)
    return scale, offsets.numpy()


def test_calibration_of_probabilities_is_logistic_regression():
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 4, (500, 1))
    labels = (logits[:, 0] / 3 + 1 + rng.logistic(size=500) > 0).astype(np.float32)
    scale, offsets = calibration("para", logits, labels)
    reference = LogisticRegression(C=1e12, tol=1e-10).fit(logits, labels)
    np.testing.assert_allclose([scale, *offsets], [*reference.coef_[0], *reference.intercept_], rtol=1e-4)


def test_calibration_of_numbers_is_a_straight_line():
    rng = np.random.default_rng(0)
    logits = rng.normal(2, 1, (500, 1))
    labels = (0.7 * logits[:, 0] + 0.5 + rng.normal(size=500)).astype(np.float32)
    scale, offsets = calibration("sts", logits, labels)
    np.testing.assert_allclose([scale, *offsets], np.polyfit(logits[:, 0], labels, 1), rtol=1e-4)


def test_calibration_of_categories_finds_the_scale_and_the_offsets_that_the_labels_were_drawn_with():
    rng = np.random.default_rng(0)
    true, offsets = rng.normal(size=(20_000, 5)), np.array([0.5, 0.2, -0.4, -0.8, 0.5])
    labels = (true + rng.gumbel(size=true.shape)).argmax(axis=1)  # drawn with probabilities softmax(true)
    scale, found = calibration("sst", (true - offsets) * 2.5, labels)
    assert scale == pytest.approx(1 / 2.5, rel=0.05)
    np.testing.assert_allclose(found - found.mean(), offsets, atol=0.05)


def test_calibration_of_logits_that_are_always_right_is_finite():
    labels = np.arange(5)
    scale, offsets = calibration("sst", np.eye(5), labels)
    assert scale > 1
    assert np.isfinite([scale, *offsets]).all()


@pytest.mark.parametrize("task", ["sst", "para"])
def test_no_text_of_train_dev_or_test_is_among_the_more_texts(
    task: str, flags: list[object], tmp_path: Path, task_files: Path, run_main: Any
):
    test = task_files / TASKS[task].filename("test")
    train = read_examples(TASKS[task], [task_files / TASKS[task].filename("train")], labeled=True)
    args = teacher.get_args([str(flag) for flag in [*flags, "--tasks", task]])
    some = next(iter(zip(*teacher.more_texts(TASKS[task], train, args), strict=True)))
    number = "9\t9.0" if task == "sst" else "9"
    with test.open("a") as file:  # in capitals and, for a pair, in the other order
        file.write("\t".join([number, "new", *(text.upper() for text in reversed(some))]) + "\n")
    run_main(teacher, *flags, "--tasks", task)
    new = read_examples(TASKS[task], [tmp_path / "runs" / "t" / f"{task}-more.csv"], labeled=True)
    rows = list(zip(*new.texts, strict=True))
    assert rows
    assert some not in rows
    for split in ("train", "dev", "test"):
        known = read_examples(TASKS[task], [task_files / TASKS[task].filename(split)], labeled=False).texts
        assert not {*rows} & {*zip(*known, strict=True)}


def test_a_resumed_run_keeps_the_folds_that_are_done(
    flags: list[object], tmp_path: Path, run_main: Any, monkeypatch: pytest.MonkeyPatch
):
    flags = [*flags, "--tasks", "sst", "--more", 3]
    assert run_main(teacher, *flags).status == 0
    run = tmp_path / "runs" / "t"
    before = logits_in(run / "sst-train.npz", "sst")
    (run / "sst-train.npz").unlink()
    (run / "sst-fold-2.npz").unlink()
    trained, fine_tune = [], teacher.fine_tune
    monkeypatch.setattr(teacher, "fine_tune", lambda *args: (trained.append(1), fine_tune(*args)))
    assert "exists already" in the_error(run_main(teacher, *flags))
    assert "--epochs 1 (now 2)" in the_error(run_main(teacher, *flags, "--epochs", 2, "--resume"))
    assert run_main(teacher, *flags, "--resume").status == 0
    assert trained == [1]
    after = logits_in(run / "sst-train.npz", "sst")
    assert all(np.array_equal(before[key], after[key]) for key in before)


def test_lines_of_progress_name_the_task_and_the_fold(
    flags: list[object], run_main: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(teacher, "SECONDS_PER_LINE", 0)
    done = run_main(teacher, *flags, "--tasks", "sst", "--folds", 2, "--more", 0)
    assert done.status == 0, done.err
    for fold in (1, 2):
        assert f"sst: fold {fold} of 2: training, step 0 of" in done.out
        assert f"sst: fold {fold} of 2: labeling, step 0 of" in done.out


def test_several_processes_share_the_folds_and_write_what_one_does(
    flags: list[object], task_files: Path, tmp_path: Path, run_main: Any
):
    flags = [*flags, "--tasks", "sst", "para", "--folds", 3, 2, "--more", 4]
    one = run_main(teacher, *flags)
    assert one.status == 0, one.err
    written = {path.name: path.read_bytes() for path in (tmp_path / "runs" / "t").glob("*.[nc]*v*")}
    flags[flags.index("--runs") + 1] = tmp_path / "several"
    printed, port = [tmp_path / f"{rank}.txt" for rank in range(2)], free_port()
    words = [str(flag) for flag in flags]
    processes = [start(run_together, rank, 2, port, "teacher", words, path) for rank, path in enumerate(printed)]
    for process in processes:
        process.join(timeout=240)
    first, second = (path.read_text() for path in printed)
    assert [process.exitcode for process in processes] == [0, 0], first + second
    run = tmp_path / "several" / "t"
    for name, content in written.items():
        if name.endswith(".csv"):
            assert (run / name).read_bytes() == content
        else:
            task = name.split("-")[0]
            wanted, found = (logits_in(folder / name, task) for folder in (tmp_path / "runs" / "t", run))
            assert all(np.array_equal(wanted[key], found[key]) for key in wanted)
    assert second == ""
    without_time = [sorted(re.sub(r"\| \d+ s|\S+/t:", "", text).splitlines()) for text in (one.out, first)]
    assert without_time[0] == without_time[1]


def test_a_process_that_waits_for_another_ends_at_a_signal(tmp_path: Path):
    written = tmp_path / "written"
    written.touch()
    teacher.wait_for([written])
    with interruption.handled(), contextlib.suppress(interruption.Stopped), interruption.deferred():
        signal.raise_signal(signal.SIGTERM)
        teacher.wait_for([written, tmp_path / "never written"])
        pytest.fail("it did not end")


def test_a_fold_that_was_written_for_other_texts_is_refused(flags: list[object], tmp_path: Path, run_main: Any):
    """The further texts depend on rounding where two neighbors are equally near, so on the machine."""
    flags = [*flags, "--tasks", "sst", "--more", 3]
    assert run_main(teacher, *flags).status == 0
    path = tmp_path / "runs" / "t" / "sst-fold-1.npz"
    stored = read_logits(path, TASKS["sst"], "", labeled=False)
    write_logits(path, stored._replace(ids=[*stored.ids[:-1], "more" + 21 * "0"]))
    before = (path.parent / "sst-train.npz").read_bytes()
    assert "must have logits for the rows and texts of this run" in the_error(run_main(teacher, *flags, "--resume"))
    assert (path.parent / "sst-train.npz").read_bytes() == before


def test_the_teacher_is_the_mean_of_the_hidden_states_and_a_linear_layer(tiny_checkpoint: Path):
    """Against transformers' own pass over one text at a time, in NumPy after it."""
    import transformers

    torch.manual_seed(0)
    model = teacher.Teacher(str(tiny_checkpoint), 5, 32).eval()
    first, second = ["A film .", "A long and very dull film ."], ["Good .", "No ."]
    reference = transformers.AutoModel.from_pretrained(tiny_checkpoint).eval()
    with torch.no_grad():
        found = model((first, second)).numpy()
        for row, pair in enumerate(zip(first, second, strict=True)):
            hidden = reference(**model.tokenizer(*pair, return_tensors="pt")).last_hidden_state[0].double().numpy()
            weight, bias = (p.double().numpy() for p in (model.linear.weight, model.linear.bias))
            np.testing.assert_allclose(found[row], weight @ hidden.mean(axis=0) + bias, atol=1e-5)


def test_fine_tuning_learns_the_rows(tiny_checkpoint: Path):
    args = teacher.get_args(["--epochs", "60", "--batch_size", "4", "--lr", "3e-3", "--head_lr", "1e-2"])
    torch.manual_seed(0)
    model = teacher.Teacher(str(tiny_checkpoint), 5, 32)
    texts, labels = (["good", "bad", "dull", "bright", "slow"],), torch.arange(5)
    settings = teacher.FineTuning.of(args, teacher.Precision("fp32", torch.device("cpu")))
    objective = teacher.build_objective("ce", TASKS["sst"], args)
    teacher.fine_tune(model, TASKS["sst"], objective, texts, labels, settings, "sst")
    assert teacher.logits_of(model, texts, settings, "sst").argmax(dim=1).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--model", "/nowhere/at/all"], "transformers cannot load it"),
        (["--folds", "1"], "--folds: must be a whole number, at least 2"),
        (["--folds", "2", "3", "4"], "one for each of the tasks sst para, found 3 numbers. Give 2."),
        (["--name", "a/b"], "must be a plain name"),
    ],
)
def test_bad_flags_are_refused_in_one_line(
    given: list[str], message: str, flags: list[object], run_main: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert message in the_error(run_main(teacher, *flags, *given))


def test_mpnet_that_is_not_installed_is_refused_with_the_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(teacher, "MPNET_PARTS", ("no-such-package",))
    with pytest.raises(teacher.InputError, match=r"Run: source setup\.sh --teacher"):
        teacher.find_mpnet()


def test_mpnet_is_put_together_from_its_five_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With small files in its place; the real packages are half a gigabyte."""
    weights = b"weights" * 1000
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as zipped:
        for name in teacher.MPNET_FILES:
            zipped.writestr(f"all-mpnet-base-v2/{name}", name)
        zipped.writestr("all-mpnet-base-v2/model.safetensors", weights)
    contents, size = whole.getvalue(), -(-len(whole.getvalue()) // 5)

    class Package:
        def __init__(self, name: str):
            part = int(name[-3:])
            path = tmp_path / name / f"m.zip.{part:03}"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(contents[(part - 1) * size : part * size])
            self.files = [Located(path)]

    class Located(PurePosixPath):
        def locate(self) -> PurePosixPath:
            return self

    monkeypatch.setattr(teacher, "distribution", Package)
    monkeypatch.setattr(teacher, "MPNET_SHA256", hashlib.sha256(weights).hexdigest())
    folder = teacher.find_mpnet()
    assert (folder / "model.safetensors").read_bytes() == weights
    assert (folder / "vocab.txt").read_text() == "vocab.txt"
    (folder / "model.safetensors").write_bytes(b"something else")
    with pytest.raises(teacher.InputError, match="sha256 must be"):
        teacher.find_mpnet()


# --- texts without labels ---------------------------------------------------------------------------------------------


def test_neighbors_are_new_pairs_of_the_most_similar_texts():
    vectors = torch.randn(60, 5, generator=torch.Generator().manual_seed(0)) * torch.rand(60, 1)  # of all lengths
    unit = (vectors / vectors.norm(dim=1, keepdim=True)).double().numpy()
    cosines = unit @ unit.T
    np.fill_diagonal(cosines, -2)
    ranks = cosines.argsort(axis=1)[:, ::-1]
    known = {(a, int(ranks[a, 0])) for a in range(60)}  # the nearest neighbor of each, in one order
    pairs = unlabeled.neighbors(vectors, known, random.Random(0))
    assert len(pairs) == len({frozenset(pair) for pair in pairs}) > 40
    assert not {frozenset(pair) for pair in pairs} & {frozenset(pair) for pair in known}
    for a, b in pairs:
        assert min(ranks[a].tolist().index(b), ranks[b].tolist().index(a)) < 8, "one of four, without the known ones"
    assert sum(a > b for a, b in pairs) > 5, "pairs come in both orders"
    assert pairs == unlabeled.neighbors(vectors, known, random.Random(0)), "the same seed gives the same pairs"


def test_parts_are_clauses_of_a_sentence_and_sentences_of_a_review():
    sentence = "The plot is thin at best , but the two leads are a joy to watch"
    review = "I saw it twice.<br /><br />The plot is thin! Was it worth the money ? No. A joy it was not ."
    found = unlabeled.parts_of([sentence, review, "Too short ."], random.Random(0))
    assert sorted(found) == [
        "A joy it was not .",
        "I saw it twice.",
        "The plot is thin at best",
        "The plot is thin!",
        "Was it worth the money ?",
        "the two leads are a joy to watch",
    ]
