"""predict.py: the run's own predictions again, any input, constant memory, and a run that never changes."""

import contextlib
import csv
import hashlib
import io
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, Finished, short_training, the_error, write_task_files

import classifier
import ensemble
import multitask_classifier
import predict
import pretrain
import tables
from evaluation import read_logits
from tasks import CFIMDB, PARA, SST, STS, TASKS
from trained import open_trained
from utils import InputError, Precision

VARIANTS = {
    "bi": ["--sts_head", "cosine_affine", "--pooling", "mean"],
    "cross": ["--pairing", "cross", "--max_length", "12"],  # some pairs are truncated
    "symmetric": ["--pairing", "cross", "--symmetric", "--weighting", "uncertainty"],
    "pos": ["--feature", "pos", "--pos_tagger", "wheel", "--pooling", "mean", "--tasks", "sst", "para"],
    "pal": ["--adapter", "pal", "--tasks", "sst", "sts"],
    "lora": ["--adapter", "lora", "--tasks", "sst", "para", "--para_pairing", "cross"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path, one_thread: None) -> Path:
    """Data files and the runs that the tests make."""
    folder = tmp_path_factory.mktemp("predict")
    write_task_files(folder / "data", rows=8)
    return folder


@pytest.fixture(scope="module")
def run_of(folder: Path, tiny_checkpoint: Path) -> Callable[[str], Path]:
    """run_of(variant): the directory of a trained run, made at its first use."""

    def run(variant: str) -> Path:
        made = folder / "runs" / variant
        if not made.exists():
            flags = short_training(tiny_checkpoint, folder, variant)
            args = multitask_classifier.get_args([str(word) for word in (*flags, *VARIANTS[variant])])
            with contextlib.redirect_stdout(io.StringIO()):
                multitask_classifier.write_run_predictions(multitask_classifier.train(args))
        return made

    return run


@pytest.fixture
def ask(run_main, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Finished]:
    """ask(run, *flags, given=b""): run predict.py with this standard input."""

    def ask(run: Path, *flags: object, given: bytes = b"") -> Finished:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given), encoding="utf-8"))
        return run_main(predict, "--run", run, *flags)

    return ask


def table_in(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline=""), delimiter="\t"))


# --- the run's own predictions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_dev_file_gets_the_predictions_that_the_run_itself_saved(
    variant: str, run_of, folder: Path, ask, tmp_path: Path, tags_offline: Path
) -> None:
    run = run_of(variant)
    for name in json.loads((run / "args.json").read_text())["args"]["tasks"]:
        task = TASKS[name]
        saved = read_logits(run / f"{name}-dev.npz", task, "", labeled=True)
        given = folder / "data" / task.filename("dev")
        done = ask(run, "--file", given, "--tasks", name, "--out", tmp_path / "o.tsv", "--batch_size", 3)
        assert (done.status, done.out) == (0, ""), done
        rows = table_in((tmp_path / "o.tsv").read_text())
        assert [row["id"] for row in rows] == saved.ids
        logits = torch.from_numpy(saved.logits)
        expected = {"category": logits.softmax(1), "probability": logits.sigmoid()}.get(task.predicts.noun, logits)
        columns = [f"{name}_{c}" for c in (task.predicts.probability_names or ("prediction",))]
        found = np.array([[float(row[column]) for column in columns] for row in rows])
        np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)
        np.testing.assert_allclose([float(row[f"{name}_prediction"]) for row in rows], saved.values, atol=1e-5)
        if task.names:
            assert [row[f"{name}_label"] for row in rows] == [task.names[int(value)] for value in saved.values]


def test_a_run_of_part_1_is_a_model_of_the_same_kind(
    folder: Path, tiny_checkpoint: Path, run_main, ask, tmp_path: Path
):
    flags = ["--model", tiny_checkpoint, "--data", folder / "data", "--runs", tmp_path, "--name", "r", "--epochs", 1]
    flags += ["--predictions", tmp_path / "p", "--option", "pretrain", "--tasks", "cfimdb"]
    assert run_main(classifier, *flags).status == 0
    written = (tmp_path / "p" / "pretrain-cfimdb-dev-out.csv").read_text().splitlines()[1:]
    done = ask(tmp_path / "r" / "cfimdb", "--file", folder / "data" / CFIMDB.filename("dev"))
    rows = table_in(done.out)
    assert [f"{row['id']} , {row['cfimdb_prediction']} " for row in rows] == written
    assert done.err == ""
    assert f"Use {tmp_path / 'r' / 'cfimdb'}." in the_error(ask(tmp_path / "r", "A film ."))
    for name in ("vocab.txt", "tokenizer_config.json"):  # runs of older versions have none
        (tmp_path / "r" / "cfimdb" / name).unlink()
    assert table_in(ask(tmp_path / "r" / "cfimdb", "--file", folder / "data" / CFIMDB.filename("dev")).out) == rows


def test_vectors_are_those_that_the_head_sees(run_of, folder: Path, ask, tmp_path: Path) -> None:
    run = open_trained(run_of("bi"), Precision("fp32", torch.device("cpu")))
    texts = [f"A film with {'very ' * n}long scenes ." for n in range(7)]
    given = tmp_path / "in.txt"
    given.write_text("".join(f"{text}\n" for text in texts))
    flags = ["--vectors", tmp_path / "v.npy", "--out", tmp_path / "o.tsv"]
    assert ask(run_of("bi"), "--file", given, *flags).status == 0
    (expected,) = run.answers("sst", (texts,), 2).vectors
    vectors = np.load(tmp_path / "v.npy")
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, expected.numpy(), atol=1e-5)
    pairs = folder / "data" / STS.filename("dev")
    assert "needs one task, found 2. Use --tasks para or sts." in the_error(ask(run_of("bi"), "--file", pairs, *flags))
    assert ask(run_of("bi"), "--file", pairs, "--tasks", "sts", *flags).status == 0
    assert np.load(tmp_path / "v.npy").shape == (8, 2, 32)


# --- windows ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict, "WINDOW_ROWS", 4)


def test_rows_are_written_in_their_own_order_whatever_the_windows(run_of, ask, tmp_path: Path, monkeypatch) -> None:
    given = tmp_path / "in.txt"
    given.write_text("".join(f"Film {n} is {'very ' * (n * 7 % 11)}good .\n" for n in range(11)))
    flags = ["--file", given, "--vectors", tmp_path / "v.npy"]
    whole, vectors = ask(run_of("bi"), *flags).out, np.load(tmp_path / "v.npy")
    monkeypatch.setattr(predict, "WINDOW_ROWS", 4)
    parts = ask(run_of("bi"), *flags).out
    assert [row["sentence"] for row in table_in(parts)] == given.read_text().splitlines()
    for one, other in zip(table_in(whole), table_in(parts), strict=True):
        assert float(one["sst_p_0"]) == pytest.approx(float(other["sst_p_0"]), abs=2e-6)
    np.testing.assert_allclose(np.load(tmp_path / "v.npy"), vectors, atol=1e-5)


def test_a_window_is_read_when_the_one_before_it_was_written(run_of, small_windows: None) -> None:
    """Nothing is accumulated: an endless input is predicted as well."""
    run = open_trained(run_of("bi"), Precision("fp32", torch.device("cpu")))
    output = predict.Output(io.BytesIO(), None)
    lead = []  # rows that were read and not yet written

    def records() -> Iterator[tables.Record]:
        for number in itertools.count(1):
            if number == 40:
                raise InputError("enough.")
            lead.append(number - output.rows)
            yield tables.Record(f"line {number}", {"sentence": f"Film {number} ."})

    table, text = tables.Table(["sentence"], records()), tables.FORMATS["text"]
    with pytest.raises(InputError, match="enough"):
        predict.predict_table(run, [SST], table, text, 2, output, None, predict.tqdm(disable=True))
    assert max(lead) == 4
    assert output.rows == 39, "those before the error are written too"


def test_long_texts_end_a_window_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict, "WINDOW_CHARACTERS", 10)
    records = (tables.Record("", {"sentence": "x" * length}) for length in (4, 4, 4, 12, 1))
    assert [len(window) for window in predict.windows(records)] == [3, 1, 1]


@pytest.mark.slow
def test_two_hundred_thousand_lines_take_the_memory_of_a_few_thousand(run_of) -> None:
    peaks = {}
    for rows in (10_000, 200_000):
        writer = f"for n in range({rows}): print('Film', n, 'is good .')"
        lines = subprocess.Popen([sys.executable, "-c", writer], stdout=subprocess.PIPE)
        command = [sys.executable, str(ROOT / "predict.py"), "--run", str(run_of("bi")), "--file", "-"]
        process = subprocess.Popen(command, stdin=lines.stdout, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert sum(1 for _ in process.stdout) == rows + 1
        _, status, used = os.wait4(process.pid, 0)
        lines.wait()
        assert status == 0
        peaks[rows] = used.ru_maxrss / 1024
    assert peaks[200_000] < peaks[10_000] + 60, peaks


# --- the run does not change ------------------------------------------------------------------------------------------


def state_of(folder: Path) -> dict[str, tuple[str, int, int]]:
    """Contents and times of all files, and of the directory itself."""
    files = {path.name: path for path in folder.iterdir()}
    facts = {
        n: (hashlib.sha256(p.read_bytes()).hexdigest(), p.stat().st_mtime_ns, p.stat().st_ino) for n, p in files.items()
    }
    return facts | {".": ("", folder.stat().st_mtime_ns, folder.stat().st_ino)}


def test_predicting_leaves_the_run_as_it_is_even_if_it_is_read_only(run_of, ask, tmp_path: Path) -> None:
    run = run_of("cross")
    before = state_of(run)
    run.chmod(0o555)
    try:
        assert ask(run, "A film .").status == 0
        assert ask(run, "--file", "-", "--vectors", tmp_path / "v.npy", given=b"A film .\n").status == 0
        assert ask(run, "--interactive", given=b"A film .\n\n").status == 0
    finally:
        run.chmod(0o755)
    assert state_of(run) == before
    for flag in ("--out", "--vectors"):
        error = the_error(ask(run, "--file", "-", flag, run / "mine.tsv", given=b"A film .\n"))
        assert "must be outside the run, which is only read" in error
    assert state_of(run) == before


def test_a_run_that_is_being_trained_can_be_asked(run_of, ask) -> None:
    from runs import Run

    with Run._locked(run_of("bi")):
        assert ask(run_of("bi"), "A film .").status == 0


# --- what goes in and out ---------------------------------------------------------------------------------------------

ODD = [
    "<b>Fine</b> &amp; dandy", "\U0001f600 emoji", "\u202eright to left \u05e9\u05dc\u05d5\u05dd", "a\tb", "c\rd",
    "e\0f", "\x1b[31mred", "", 'say "no"', "\u2028separator", "x\x85y",
]  # fmt: skip


def test_every_line_of_odd_text_gets_its_row(run_of, ask) -> None:
    done = ask(run_of("bi"), "--file", "-", given="".join(f"{text}\n" for text in ODD).encode())
    assert done.status == 0, done.err
    assert done.out.count("\n") == len(ODD) + 1
    assert [row["sentence"] for row in table_in(done.out)] == ODD
    assert done.err == "note: standard input is read as text, one sentence per line; --format reads another.\n"


def test_json_lines_are_carried_through(run_of, ask) -> None:
    given = [{"sentence": text, "n": [1, {"x": None}]} for text in [*ODD, "two\nlines"]]
    done = ask(
        run_of("bi"), "--file", "-", "--format", "jsonl", given="".join(f"{json.dumps(g)}\n" for g in given).encode()
    )
    found = [json.loads(line) for line in done.out.removesuffix("\n").split("\n")]
    assert [{k: row[k] for k in ("sentence", "n")} for row in found] == given
    assert all(sum(row[f"sst_p_{c}"] for c in range(5)) == pytest.approx(1, abs=1e-5) for row in found)
    assert all(row["sst_label"] == SST.names[row["sst_prediction"]] for row in found)


def test_windows_line_ends_a_byte_order_mark_and_a_missing_newline_are_no_part_of_a_sentence(run_of, ask) -> None:
    done = ask(run_of("bi"), "--file", "-", given="\ufeffOne .\r\nTwo .".encode())
    assert [row["sentence"] for row in table_in(done.out)] == ["One .", "Two ."]


def test_a_file_is_read_by_its_suffix_also_if_it_is_compressed(run_of, ask, tmp_path: Path) -> None:
    import gzip

    given = tmp_path / "pairs.tsv.gz"
    given.write_bytes(gzip.compress(b"x\tsentence1\tsentence2\n7\tIs it?\tIt is .\n"))
    (row,) = table_in(ask(run_of("bi"), "--file", given).out)
    assert list(row) == ["x", "sentence1", "sentence2", "para_label", "para_prediction", "para_p", "sts_prediction"]
    assert tables.format_of(Path("a.csv")) == "tsv"
    assert tables.format_of(Path("a.JSONL.gz")) == "jsonl"
    assert tables.format_of(Path("tsv")) == "text"


def test_a_repeated_line_is_predicted_again(run_of, ask) -> None:
    assert len(table_in(ask(run_of("bi"), "--file", "-", given=b"Same .\n" * 5).out)) == 5


def test_sentences_on_the_command_line_are_shown_for_people(run_of, ask) -> None:
    one = ask(run_of("bi"), "@home: a \x1b[31mfilm .")
    assert one.status == 0, one.err
    first, second, *bars = one.out.splitlines()
    assert first == "@home: a \\x1b[31mfilm ."
    assert second.removeprefix("  sst: ") in SST.names
    assert [bar[4:23].strip() for bar in bars] == list(SST.names)
    two = ask(run_of("bi"), "How old are you?", "What is your age?").out
    assert "  para: " in two
    assert " on a scale from 0 to 5" in two
    assert "sst" not in two
    only = ask(run_of("bi"), "a .", "b .", "--tasks", "sts").out
    assert "para" not in only


def test_truncated_rows_are_counted(run_of, ask) -> None:
    done = ask(
        run_of("bi"), "--file", "-", "--format", "text", "--max_length", 6, given=b"A .\n" + b"word " * 9 + b"\n"
    )
    assert done.err == "note: standard input: 1 of 2 rows are longer than 6 tokens and were truncated.\n"


def test_a_conversation_takes_sentences_and_pairs_until_the_input_ends(run_of, ask) -> None:
    done = ask(run_of("bi"), "--interactive", given=b"Good .\n\n\nIs it?\nIt is .\n")
    assert done.status == 0, done.err
    assert [line for line in ("  sst: ", "  para: ", "  sts: ") if done.out.count(line) == 1] == [
        "  sst: ",
        "  para: ",
        "  sts: ",
    ]


def test_a_conversation_that_ends_before_the_second_sentence_answers_the_first(run_of, ask) -> None:
    done = ask(run_of("bi"), "--interactive", given=b"Good .\n")
    assert (done.status, done.out.count("  sst: "), done.out.count("  sts: ")) == (0, 1, 0)
    done = ask(run_of("bi"), "--interactive", "--tasks", "sts", given=b"Good .\n")
    assert (done.status, done.out.count("  sts: ")) == (0, 0)


# --- mistakes ---------------------------------------------------------------------------------------------------------

BAD_FILES = {
    "empty": ("text", b"", "must have at least one row, found none. Nothing was written."),
    "empty tsv": ("tsv", b"", "must have at least one row, found none"),
    "header only": ("tsv", b"sentence\tx\n", "must have at least one row, found none"),
    "empty jsonl": ("jsonl", b"\n\n", "must have at least one row, found none"),
    "other columns": ("tsv", b"text\tx\na\tb\n", "sst needs a column sentence, found text, x"),
    "a column twice": ("tsv", b"sentence\tx\tx\n", "line 1: the names of columns must be unique, found 'x' twice"),
    "a short row": ("tsv", b"sentence\tx\na\tb\nc\n", "line 3: must have 2 fields like the header"),
    "an open quote": ("tsv", b'sentence\tx\na\tb\n"c\td\ne\tf\n', "lines 3 to 4: must have 2 fields like the header"),
    "an endless quote": (
        "tsv",
        b'sentence\tx\n"c\n' + b"d\n" * 2000,
        "line 2: a quoted field must end within 1000 lines",
    ),
    "its own key in the second row": (
        "jsonl",
        b'{"sentence": "a"}\n{"sentence": "b", "sst_label": "c"}\n',
        "line 2: must not have a column sst_label",
    ),
    "a carriage return": ("tsv", b"sentence\tid\na\rb\t1\n", "found a carriage return inside"),
    "its own column": ("tsv", b"sentence\tsst_p_0\na\tb\n", "must not have a column sst_p_0"),
    "not UTF-8": ("text", b"good\nb\xffd\n", "line 2: must be UTF-8, found byte 0xff"),
    "broken JSON": ("jsonl", b'{"sentence": "a"}\n{"sentence": \n', "line 2: must be a JSON object; Expecting value"),
    "a JSON list": ("jsonl", b"[1]\n", "line 1: must be a JSON object; it is a list"),
    "a missing key": ("jsonl", b'{"sentence": "a"}\n{"text": "b"}\n', "line 2: sentence must be a text, found none"),
    "a number": ("jsonl", b'{"sentence": 3}\n', "line 1: sentence must be a text, found 3"),
    "half a character": ("jsonl", b'{"sentence": "\\ud800"}\n', "line 1: must be a JSON object; it contains half"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_refused_by_its_line(name: str, run_of, ask, tmp_path: Path) -> None:
    kind, content, expected = BAD_FILES[name]
    out = tmp_path / "o.tsv"
    out.write_text("before")
    flags = ["--file", "-", "--format", kind, "--tasks", "sst"]
    assert f"standard input{'' if expected.startswith(('must', 'sst')) else ' '}" in (
        error := the_error(ask(run_of("bi"), *flags, given=content))
    )
    assert expected in error
    assert expected.removesuffix(" Nothing was written.") in the_error(
        ask(run_of("bi"), *flags, "--out", out, given=content)
    )
    assert out.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["o.tsv"]


def test_rows_before_a_bad_line_are_written_and_counted(run_of, ask, small_windows: None) -> None:
    done = ask(run_of("bi"), "--file", "-", "--format", "text", given=b"Good .\n" * 6 + b"\xff\n")
    assert the_error(done).endswith("Convert the file to UTF-8. Rows written before it: 6.")
    assert len(table_in(done.out)) == 6


BAD_FLAGS = {
    "": "give sentences, as in",
    "a b c": "give one sentence or two, found 3",
    "a --interactive": "found sentences and --interactive",
    "a --file -": "found sentences and --file",
    "a --out o.tsv": "--out o.tsv needs --file",
    "a --tasks cfimdb": "was trained on sst, para, sts",
    "a --tasks para": "para needs two sentences, found 1",
    "a b --tasks sst": "sst needs one sentence, found 2",
    "--file nowhere.txt": "--file nowhere.txt: cannot be read; No such file or directory",
    "--file . --format text": "Is a directory",
    "--file - --tasks para": "para needs a column sentence1 and a column sentence2, found sentence",
    "--file - --vectors v.txt": "--vectors v.txt: must end in .npy",
    "a --formt tsv": "unknown flag --formt. Did you mean --format?",
}


@pytest.mark.parametrize("flags", BAD_FLAGS)
def test_flags_that_do_not_work_are_refused(flags: str, run_of, ask) -> None:
    assert BAD_FLAGS[flags] in the_error(ask(run_of("bi"), *flags.split(), given=b"a\n"))


def test_the_input_is_never_overwritten(run_of, ask, tmp_path: Path) -> None:
    given = tmp_path / "in.txt"
    given.write_text("A .\n")
    for flag in ("--out", "--vectors"):
        error = the_error(ask(run_of("bi"), "--file", given, flag, tmp_path / "." / "in.txt"))
        assert "must be another file than --file" in error
    assert given.read_text() == "A .\n"
    assert "could not be written" in the_error(ask(run_of("bi"), "--file", given, "--out", tmp_path / "no" / "o.tsv"))


def test_what_is_not_a_trained_run_is_refused_with_what_to_do(
    run_of, folder: Path, ask, run_main, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    flags = ["--model", tiny_checkpoint, "--data", folder / "data", "--runs", tmp_path, "--name", "pre", "--epochs", 1]
    assert run_main(pretrain, *flags).status == 0
    assert f"Fine-tune it first: multitask_classifier.py --model {tmp_path / 'pre'}" in the_error(
        ask(tmp_path / "pre", "a")
    )
    flags = ["--runs", tmp_path, "--predictions", tmp_path / "p", "--name", "ens"]
    assert run_main(ensemble, run_of("bi"), run_of("cross"), *flags).status == 0
    assert "is an ensemble of logits, which has no weights" in the_error(ask(tmp_path / "ens", "a"))
    assert "no such directory" in the_error(ask(tmp_path / "nothing", "a"))
    assert "found a file" in the_error(ask(run_of("bi") / "args.json", "a"))


def copy_of(run: Path, target: Path, *names: str) -> Path:
    target.mkdir()
    for name in names or [path.name for path in run.iterdir()]:
        (target / name).write_bytes((run / name).read_bytes())
    return target


def test_a_half_written_run_is_refused_and_one_without_logs_is_enough(run_of, ask, tmp_path: Path) -> None:
    needed = ["args.json", "config.json", "model.safetensors", "vocab.txt", "tokenizer_config.json"]
    bare = copy_of(run_of("bi"), tmp_path / "bare", *needed)
    done = ask(bare, "A film .")
    assert done.status == 0
    assert done.err == f"note: {bare}: its training has not finished; these are the best weights so far.\n"
    assert done.out == ask(run_of("bi"), "A film .").out
    for name, expected in {
        "model.safetensors": "has no model.safetensors yet, since no epoch was finished",
        "config.json": "has no config.json",
        "args.json": "has no args.json",
    }.items():
        content = (bare / name).read_bytes()
        (bare / name).unlink()
        assert expected in the_error(ask(bare, "A film ."))
        (bare / name).write_bytes(content[: len(content) // 2])
        assert str(bare / name) in the_error(ask(bare, "A film ."))
        (bare / name).write_bytes(content)


def test_an_older_run_predicts_without_its_checkpoint_and_data(ask, tmp_path: Path) -> None:
    stored = ROOT / "tests" / "references" / "older_run"
    run = copy_of(stored / "saved_runs" / "finished", tmp_path / "finished")
    for task in (SST, PARA, STS):
        done = ask(run, "--file", stored / "data" / task.filename("dev"), "--tasks", task.name)
        assert done.status == 0, done.err
        lines = (stored / "predictions" / f"{task.name}-dev-output.csv").read_text().splitlines()[1:]
        expected = {line.rsplit(" , ", 1)[0]: float(line.rsplit(" , ", 1)[1]) for line in lines}
        found = {row["id"]: float(row[f"{task.name}_prediction"]) for row in table_in(done.out)}
        assert found == pytest.approx(expected, abs=1e-4)


# --- pipes and signals ------------------------------------------------------------------------------------------------


def test_a_closed_pipe_ends_quietly_and_ctrl_c_in_one_line(run_of) -> None:
    """One process: the pipe is closed after a line. Another: it is interrupted while it waits for its input."""
    command = [sys.executable, str(ROOT / "predict.py"), "--run", str(run_of("bi")), "--file", "-", "--format", "text"]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    closed, waiting = subprocess.Popen(command, **pipes), subprocess.Popen(command, **pipes)
    closed.stdout.close()
    closed.stdin.write(b"Good .\n" * 5000)
    closed.stdin.close()
    waiting.stdin.write(b"Good .\n" * 5000)  # a window is written, and half of another one is not
    waiting.stdin.flush()
    assert waiting.stdout.readline().startswith(b"sentence\t")
    waiting.send_signal(signal.SIGINT)
    assert (closed.stderr.read(), closed.wait(60)) == (b"", 128 + signal.SIGPIPE)
    assert (waiting.stderr.read(), waiting.wait(60)) == (b"error: stopped by SIGINT\n", 130)


def test_a_full_disk_behind_the_standard_output_is_an_error(run_of, ask, monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        done = ask(run_of("bi"), "--file", "-", "--format", "text", given=b"Good .\n")
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # what is left in its buffer can be flushed
    assert "standard output: could not be written (No space left on device)" in the_error(done)


def test_help_states_the_columns(run_main) -> None:
    words = run_main(predict, "--help").out.split()
    assert {"TASK_label,", "TASK_prediction,", "TASK_p_0,", "TASK_p"} <= set(words)
