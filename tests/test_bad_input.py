"""User errors end in one line with place, rule and remedy, before anything is written. Input that is odd but legal is
accepted, and rows that are skipped are counted and named."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Finished, assert_refused, run_script, the_error
from safetensors.torch import load_file, save_file
from torch import Tensor

import base_bert
import classifier
import utils
from bert import BertModel
from config import BertConfig

HEADER = "\tid\tsentence\tsentiment\n"
A_REMEDY = re.compile(r"[.?)] [A-Z]\w+ ")  # another sentence after the found value


Classify = Callable[..., Finished]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def flags(task_files: Path, tiny_checkpoint: Path, tmp_path: Path) -> list[str]:
    given = {
        "--model": tiny_checkpoint,
        "--data": task_files,
        "--runs": tmp_path / "runs",
        "--name": "r",
        "--predictions": tmp_path / "predictions",
        "--tasks": "sst",
        "--epochs": 1,
    }
    return [str(part) for pair in given.items() for part in pair]


@pytest.fixture
def classify(
    flags: list[str],
    run_main: Callable[..., Finished],
) -> Classify:
    """Run classifier.py in this process. Flags given here come last and override the others."""

    def run(*more: object) -> Finished:
        return run_main(classifier, *flags, *more)

    return run


def in_subprocess(flags: list[str], *more: object) -> Finished:
    done = run_script("classifier.py", *flags, *more, OMP_NUM_THREADS="1")
    return Finished(done.returncode, done.stdout, done.stderr)


def rows(count: int = 8, **changed: str) -> str:
    """The rows of a training file; row_3="..." replaces the third."""
    plain = {f"row_{i}": f"{i}\tid{i}\tA film number {i} .\t{i % 5}\n" for i in range(1, count + 1)}
    return "".join((plain | changed).values())


# --- data files -------------------------------------------------------------------------------------------------------

BAD_FILES = {
    "a missing file": (None, "cannot be read", "No such file", "setup.sh --course-data", "--data data/sample"),
    "an empty file": ("", "the file is empty", "needs a header and at least one row"),
    "a file of blank lines": ("\n \n\n", "the file is empty", "needs a header and at least one row"),
    "a header alone": (HEADER, "no usable row", "needs a header and at least one row"),
    "a wrong header": (
        "\tid\ttext\tgrade\n" + rows(),
        "line 1: the header must have the tab-separated columns id, sentence, sentiment",
        "sentence, sentiment not found",
        "Check that this is a sst file",
    ),
    "a comma-separated file": (
        (HEADER + rows()).replace("\t", ","),
        "line 1: the header must have the tab-separated columns",
        "Check that this is a sst file",
    ),
    "a label above the range": (
        HEADER + rows(row_3="3\tid3\tA film .\t5\n"),
        "line 4: sentiment must be a whole number from 0 to 4, found '5'",
        "Fix the row",
    ),
    "a label below the range": (
        HEADER + rows(row_1="1\tid1\tA film .\t-1\n"),
        "line 2: sentiment must be a whole number from 0 to 4, found '-1'",
        "Fix the row",
    ),
    "a fraction for a grade": (
        HEADER + rows(row_8="8\tid8\tA film .\t2.5\n"),
        "line 9: sentiment must be a whole number from 0 to 4, found '2.5'",
        "Fix the row",
    ),
    "a label that is not a number": (
        HEADER + rows(row_2="2\tid2\tA film .\tgood\n"),
        "line 3: sentiment must be a whole number from 0 to 4, found 'good'",
        "Fix the row",
    ),
    "a label nan": (
        HEADER + rows(row_2="2\tid2\tA film .\tnan\n"),
        "line 3: sentiment must be a whole number from 0 to 4, found 'nan'",
        "Fix the row",
    ),
    "a label inf": (
        HEADER + rows(row_2="2\tid2\tA film .\tinf\n"),
        "line 3: sentiment must be a whole number from 0 to 4, found 'inf'",
        "Fix the row",
    ),
    "bytes that are not UTF-8": (
        (HEADER + rows(row_4="4\tid4\tA caf\xe9 film .\t1\n")).encode("latin-1"),
        "line 5: must be UTF-8, found byte 0xe9",
        "Convert the file to UTF-8",
    ),
    "bytes that are not UTF-8 after a byte-order mark": (
        b"\xef\xbb\xbf" + (HEADER + rows(row_4="4\tid4\t\xe9t\xe9 .\t1\n")).encode("latin-1"),
        "line 5: must be UTF-8, found byte 0xe9",
        "Convert the file to UTF-8",
    ),
    "a NUL byte": (
        HEADER + rows(row_5="5\tid5\tA \0 film .\t1\n"),
        "line 6: must be text, found a NUL byte",
        "damaged?",
    ),
    "an id twice": (
        HEADER + rows(row_6="6\tid2\tA film .\t1\n"),
        "line 7: ids must be unique, 'id2' appears in",
        "line 3 too",
        "Remove one",
    ),
    "an id twice but for case and spaces": (
        HEADER + rows(row_6="6\t ID2 \tA film .\t1\n"),
        "line 7: ids must be unique, 'id2' appears in",
        "line 3 too",
        "Remove one",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_data_file_is_refused_with_file_line_rule_and_remedy(
    case: str, classify: Classify, task_files: Path, tmp_path: Path
):
    content, *parts = BAD_FILES[case]
    path = task_files / "ids-sst-train.csv"
    path.unlink()
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    assert_refused(classify(), tmp_path, path, *parts)


@pytest.mark.parametrize("split", ["dev", "test-student"])
def test_a_missing_dev_or_test_file_is_refused_before_training(
    split: str, classify: Classify, task_files: Path, tmp_path: Path
):
    path = task_files / f"ids-sst-{split}.csv"
    path.unlink()
    assert_refused(classify(), tmp_path, path, "cannot be read", "--data data/sample")


def test_a_bad_file_of_the_second_task_is_refused_before_the_first_is_trained(
    classify: Classify, task_files: Path, tmp_path: Path
):
    path = task_files / "ids-cfimdb-train.csv"
    path.write_text(path.read_text().replace("\t1\n", "\t2\n"))
    finished = classify("--tasks", "sst", "cfimdb")
    assert_refused(finished, tmp_path, path, "line 3: sentiment must be 0 or 1, found '2'", "Fix the row")


def test_a_user_sees_one_line_and_status_2_for_a_bad_label(flags: list[str], task_files: Path, tmp_path: Path):
    path = task_files / "ids-sst-train.csv"
    path.write_text(HEADER + rows(row_3="3\tid3\tA film .\t5\n"))
    finished = in_subprocess(flags)
    assert_refused(finished, tmp_path, path, "line 4: sentiment must be a whole number from 0 to 4, found '5'", "Fix")
    assert finished.out == ""


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint that a test may damage."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))


def as_pickle(checkpoint: Path, content: Any = None) -> Path:
    """Replace model.safetensors by pytorch_model.bin."""
    safe = checkpoint / "model.safetensors"
    path = checkpoint / "pytorch_model.bin"
    torch.save(load_file(safe) if content is None else content, path)
    safe.unlink()
    return path


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def test_an_unknown_model_without_network_is_refused(flags: list[str], tmp_path: Path):
    finished = in_subprocess(flags, "--model", "no-such-bert-anywhere")
    assert_refused(
        finished, tmp_path, "--model no-such-bert-anywhere", "not a directory, not in the hub's cache", "--model minilm"
    )


@pytest.mark.parametrize("name", ["./nowhere", "../nowhere/at/all", "/nowhere", "~nobody/bert", "runs/tapt/sst"])
def test_a_directory_that_does_not_exist_is_refused(name: str, classify: Classify, tmp_path: Path):
    assert_refused(classify("--model", name), tmp_path, f"--model {name}: no such directory", "Use a directory")


def test_a_checkpoint_without_config_is_refused(classify: Classify, checkpoint: Path, tmp_path: Path):
    (checkpoint / "config.json").unlink()
    finished = classify("--model", checkpoint)
    assert_refused(finished, tmp_path, f"{checkpoint}: has no config.json", "Use the directory of a checkpoint")


def test_a_checkpoint_without_vocabulary_is_refused(classify: Classify, checkpoint: Path, tmp_path: Path):
    (checkpoint / "vocab.txt").unlink()
    finished = classify("--model", checkpoint)
    assert_refused(finished, tmp_path, f"{checkpoint}: has neither vocab.txt nor tokenizer.json", "Copy them")


def test_a_checkpoint_without_weights_is_refused(classify: Classify, checkpoint: Path, tmp_path: Path):
    (checkpoint / "model.safetensors").unlink()
    finished = classify("--model", checkpoint)
    parts = "has neither model.safetensors nor pytorch_model.bin", "Use the directory of a checkpoint"
    assert_refused(finished, tmp_path, checkpoint, *parts)


@pytest.mark.parametrize("size", [0, 2_000, -1_000])
def test_truncated_safetensors_are_refused(size: int, classify: Classify, checkpoint: Path, tmp_path: Path):
    path = checkpoint / "model.safetensors"
    cut(path, size)
    finished = classify("--model", checkpoint)
    assert_refused(finished, tmp_path, f"{path}: not a complete weights file", "Download or copy it again")


@pytest.mark.parametrize("size", [0, 2_000, -1_000])
def test_a_truncated_pickle_is_refused(size: int, classify: Classify, checkpoint: Path, tmp_path: Path):
    path = as_pickle(checkpoint)
    cut(path, size)
    finished = classify("--model", checkpoint)
    assert_refused(finished, tmp_path, f"{path}: ")
    assert A_REMEDY.search(finished.err)


class Intruder:
    """Unpickling it creates a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple:
        return open, (str(self.path), "w")


def test_code_in_a_pickle_is_refused_and_never_runs(flags: list[str], checkpoint: Path, tmp_path: Path):
    mark = tmp_path / "the code ran"
    path = as_pickle(checkpoint, {"embeddings.word_embeddings.weight": Intruder(mark)})
    torch.load(path, weights_only=False)["embeddings.word_embeddings.weight"].close()
    assert mark.exists(), "the trap itself works"
    mark.unlink()
    finished = in_subprocess(flags, "--model", checkpoint)
    assert not mark.exists()
    assert_refused(finished, tmp_path, f"{path}: contains more than tensors", "Use safetensors")


NOT_WEIGHTS = {
    "a list": [torch.zeros(2)],
    "a tensor": torch.zeros(2),
    "a number for a tensor": {"embeddings.word_embeddings.weight": 3},
    "a number for an unknown name": {"epoch": 3},
    "weights one level down": {"model": {"embeddings.word_embeddings.weight": torch.zeros(2)}, "args": {"lr": 1e-5}},
}


@pytest.mark.parametrize("case", NOT_WEIGHTS)
def test_a_pickle_that_is_no_table_of_tensors_is_refused(
    case: str, classify: Classify, checkpoint: Path, tmp_path: Path
):
    as_pickle(checkpoint, NOT_WEIGHTS[case])
    finished = classify("--model", checkpoint)
    assert_refused(finished, tmp_path, checkpoint)
    assert A_REMEDY.search(finished.err)


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        ("{broken", "must be a JSON file that describes a BERT"),
        ("\N{LATIN SMALL LETTER E WITH ACUTE}".encode("latin-1"), "must be a JSON file that describes a BERT"),
        ("[1, 2]", "must be a JSON file that describes a BERT; it is a list, not an object"),
        ('{"model_type": "gpt2"}', "model_type must be 'bert', found 'gpt2'"),
        ('{"model_type": "bert"}', "a BERT config must state hidden_size, num_hidden_layers, vocab_size"),
        ('{"model_type": "bert", "is_decoder": true}', "is_decoder must be false, found true. Choose the checkpoint"),
        (
            '{"vocab_size": 30522, "hidden_size": 32, "num_hidden_layers": 1, "hidden_act": "silu"}',
            "hidden_act must be one of gelu, gelu_new, gelu_pytorch_tanh, relu, found 'silu'",
        ),
    ],
    ids=["not JSON", "not UTF-8", "a list", "another model", "a config without sizes", "a decoder", "an activation"],
)
def test_a_config_that_describes_no_bert_is_refused(
    content: str | bytes, rule: str, classify: Classify, checkpoint: Path, tmp_path: Path
):
    path = checkpoint / "config.json"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    finished = classify("--model", checkpoint)
    assert_refused(finished, tmp_path, f"error: {path}: {rule}")
    assert A_REMEDY.search(finished.err)


@pytest.mark.parametrize(
    "changes",
    [{"hidden_size": "wide"}, {"num_attention_heads": 0}, {"num_attention_heads": 5}, {"hidden_size": -32}],
    ids=str,
)
def test_a_config_with_impossible_sizes_is_refused(
    changes: dict[str, Any], classify: Classify, checkpoint: Path, tmp_path: Path
):
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    finished = classify("--model", checkpoint)
    assert_refused(finished, tmp_path, *changes)
    assert A_REMEDY.search(finished.err)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", b"{broken"),
        ("tokenizer_config.json", b"[1, 2]"),
        ("tokenizer.json", b"{broken"),
        ("tokenizer.json", b'{"model": 3}'),
        ("vocab.txt", b"\xe9\n"),
        ("vocab.txt", b"only\nwords\n"),
    ],
)
def test_a_damaged_tokenizer_file_is_refused(
    name: str, content: bytes, classify: Classify, checkpoint: Path, tmp_path: Path
):
    if name == "tokenizer.json":
        (checkpoint / "vocab.txt").unlink()
    (checkpoint / name).write_bytes(content)
    assert_refused(classify("--model", checkpoint), tmp_path, checkpoint)


def test_a_vocabulary_larger_than_the_embedding_is_refused(classify: Classify, tiny_checkpoint: Path, tmp_path: Path):
    folder = tmp_path / "small"
    shape = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64)
    BertModel(BertConfig(vocab_size=1_000, **shape)).save_pretrained(folder)
    shutil.copy(tiny_checkpoint / "vocab.txt", folder)
    assert_refused(classify("--model", folder), tmp_path, folder, "1000")


def spoil(weights: dict[str, Tensor]) -> None:
    del weights["encoder.layer.1.output.dense.bias"], weights["embeddings.LayerNorm.weight"]
    weights["encoder.layer.2.output.dense.bias"] = torch.zeros(32)
    weights["encoder.layer.0.attention.self.query.weight"] = torch.zeros(32, 31)


def test_weights_that_do_not_fit_the_config_are_all_listed(classify: Classify, checkpoint: Path, tmp_path: Path):
    path = checkpoint / "model.safetensors"
    weights = load_file(path)
    spoil(weights)
    save_file(weights, path)
    assert_refused(
        classify("--model", checkpoint),
        tmp_path,
        f"{checkpoint}: the weights do not fit its config.json",
        "2 missing: embeddings.LayerNorm.weight, encoder.layer.1.output.dense.bias",
        "1 unexpected: encoder.layer.2.output.dense.bias",
        "1 mis-shaped: encoder.layer.0.attention.self.query.weight (32, 31), not (32, 32)",
        "Check that both belong together",
    )


def test_a_wrong_sha256_names_both_sums_and_the_remedy(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"abc")
    right = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2's example for "abc"
    base_bert.verify_sha256(path, right)
    with pytest.raises(utils.InputError) as refused:
        base_bert.verify_sha256(path, "0" * 64)
    for part in (str(path), "sha256 must be 0000000000000000...", f"found {right[:16]}...", "install it again: rm -rf"):
        assert part in str(refused.value)
    with pytest.raises(utils.InputError, match=r"absent: no such file\. Install the wheel again"):
        base_bert.verify_sha256(tmp_path / "absent", right)


def test_the_embedded_encoder_is_refused_where_its_sum_differs(
    classify: Classify, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(base_bert, "MINILM_SHA256", "0" * 64)
    finished = classify("--model", "minilm")
    assert_refused(finished, tmp_path, "model.safetensors: sha256 must be 0000000000000000", "source setup.sh")


def test_the_embedded_encoder_is_refused_where_its_wheel_is_not_installed(
    classify: Classify, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(base_bert, "MINILM_PACKAGE", "no_such_package_anywhere")
    finished = classify("--model", "minilm")
    assert_refused(finished, tmp_path, "--model minilm", "is not installed", "Run: source setup.sh")


def test_more_layers_than_the_model_has_are_refused(classify: Classify, tiny_checkpoint: Path, tmp_path: Path):
    finished = classify("--keep_layers", 3)
    assert_refused(finished, tmp_path, f"--keep_layers must be 1 to 2 for {tiny_checkpoint}, found 3")


# --- flags and directories --------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_use_gpu_without_cuda_is_refused(classify: Classify, tmp_path: Path):
    assert_refused(classify("--use_gpu"), tmp_path, "--use_gpu needs a CUDA device, found none", "Leave the flag out")


@pytest.mark.parametrize("flag", ["--predictions", "--runs"])
@pytest.mark.parametrize("below", ["", "x"])
def test_an_output_directory_that_cannot_be_made_is_refused(flag: str, below: str, classify: Classify, tmp_path: Path):
    file = tmp_path / "a file"
    file.write_text("kept")
    finished = classify(flag, file / below)
    assert_refused(finished, tmp_path, flag, file / below, "must be a writable directory")
    assert file.read_text() == "kept"
    assert A_REMEDY.search(finished.err)


def test_an_existing_run_is_refused_and_left_alone(classify: Classify, tmp_path: Path):
    log = tmp_path / "runs" / "r" / "sst" / "log.jsonl"
    log.parent.mkdir(parents=True)
    log.write_text("kept")
    error = the_error(classify())
    assert f"{tmp_path / 'runs' / 'r' / 'sst'}: the run exists already" in error
    assert "Use another --name, or remove the directory" in error
    assert log.read_text() == "kept"
    assert list((tmp_path / "runs").rglob("*.*")) == [log]
    assert not list((tmp_path / "predictions").glob("*"))


NUMBERS = {
    "--lr": ["0", "-1", "1e9", "nan", "inf", "fast", "1.5", ""],
    "--epochs": ["0", "-1", "1e9", "1000000000", "nan", "inf", "many", "1.5", ""],
    "--batch_size": ["0", "-1", "1e9", "1000000000", "nan", "inf", "many", "1.5", ""],
    "--eval_batch_size": ["0", "1000000000"],
    "--max_tokens": ["0", "-1", "1000000000", "many", "1.5"],
    "--cfimdb_batch_size": ["0", "1000000000"],
    "--seed": ["-1", "1e9", "99999999999"],
    "--hidden_dropout_prob": ["-0.1", "1", "nan"],
    "--keep_layers": ["0", "-1"],
    "--weight_decay": ["-1", "nan"],
    "--warmup": ["1.1", "nan"],
    "--clip": ["-1", "nan", "inf"],
}


@pytest.mark.parametrize(("flag", "value"), [(flag, value) for flag, values in NUMBERS.items() for value in values])
def test_a_number_outside_its_range_is_refused(flag: str, value: str, classify: Classify, tmp_path: Path):
    assert_refused(classify(flag, value), tmp_path, f"error: {flag}: must be ", " and at most ", f"found {value!r}")


def test_what_is_wrong_with_a_flag_is_one_line_that_names_the_help(classify: Classify, tmp_path: Path):
    finished = classify("--lr", "-1")
    assert_refused(finished, tmp_path, "error: --lr: must be a number, above 0 and at most 1, found '-1'")
    assert finished.err.startswith("error: ")
    assert finished.err.endswith(" See classifier.py --help.\n")
    assert finished.err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags_given", "parts"),
    [
        (["--epoch", "3"], ["unknown flag --epoch.", "Did you mean --epochs?", "See classifier.py --help."]),
        (["--learning_rate", "3"], ["unknown flag --learning_rate.", "See classifier.py --help."]),
        (["@nowhere.txt"], ["@nowhere.txt: no such recipe.", "recipes/README.md lists them all."]),
        (["--option", "freeze"], ["--option must be one of pretrain, finetune; found 'freeze'."]),
        (["--fine-tune-mode", "half"], ["must be one of last-linear-layer, full-model; found 'half'"]),
        (["--tasks", "sts"], ["--tasks must be one of cfimdb, sst; found 'sts'. Did you mean sst?"]),
        (["--precision", "fp8"], ["--precision must be one of bf16, fp16, fp32; found 'fp8'."]),
        (["--name"], ["--name: expected one argument"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_flag_that_does_not_exist_or_a_choice_that_is_none_is_refused(
    flags_given: list[str], parts: list[str], classify: Classify, tmp_path: Path
):
    assert_refused(classify(*flags_given), tmp_path, *parts)


def test_an_interrupt_ends_in_one_line(
    classify: Classify, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(classifier, "choose_device", interrupted)
    assert classify() == Finished(130, "", "error: interrupted\n")


# --- odd but legal ----------------------------------------------------------------------------------------------------


def predicted_ids(tmp_path: Path, split: str) -> list[str]:
    lines = (tmp_path / "predictions" / f"pretrain-sst-{split}-out.csv").read_text().split("\n")[1:-1]
    return [line.split(" , ")[0] for line in lines]


def assert_all_rows_used(finished: Finished, tmp_path: Path, notes: int = 0) -> None:
    assert finished.status == 0, finished.err
    assert [line[:6] for line in finished.err.split("\n")[:-1]] == ["note: "] * notes, finished.err
    assert "sst: train 8, dev 8, test 8 rows" in finished.out
    assert predicted_ids(tmp_path, "dev") == [f"dev{i:020d}" for i in range(8)]
    assert predicted_ids(tmp_path, "test") == [f"test{i:021d}" for i in range(8)]


def with_sentence(text: str) -> Callable[[str], str]:
    """Insert `text` into the middle of every sentence."""
    return lambda content: content.replace(" film", f" {text} film")


def quoted(content: str) -> str:
    """Put every sentence into quotation marks, over two lines."""
    return re.sub(r"A (\w+) film([^\t\n]*)", r'"A \1' + "\n" + r'film ""so to say""\2"', content)


ODDITIES: dict[str, Callable[[str], str]] = {
    "CRLF line ends": lambda content: content.replace("\n", "\r\n"),
    "a byte-order mark": lambda content: "\ufeff" + content,
    "a byte-order mark and CRLF": lambda content: "\ufeff" + content.replace("\n", "\r\n"),
    "no newline at the end": lambda content: content.removesuffix("\n"),
    "blank lines at the end": lambda content: content + "\n\n",
    "a form feed": with_sentence("\f"),
    "a line separator U+2028": with_sentence("\u2028"),
    "a paragraph separator U+2029": with_sentence("\u2029"),
    "a next line U+0085": with_sentence("\x85"),
    "a file separator U+001C": with_sentence("\x1c"),
    "a vertical tab": with_sentence("\v"),
    "an emoji": with_sentence("\N{GRINNING FACE}"),
    "HTML": with_sentence("<br /><b class=x>&amp;</b>"),
    "right-to-left text": with_sentence("\u202e\u05e9\u05dc\u05d5\u05dd\u202c \u0645\u0631\u062d\u0628\u0627"),
    "control characters": with_sentence("\x1b[31m\x07\x08\x7f"),
    "a quotation mark within the sentence": with_sentence('"'),
    "a quoted sentence with a newline": quoted,
    "ids in capitals with spaces": lambda content: re.sub(
        r"\t((?:train|dev|test)\d+)\t", lambda found: f"\t {found.group(1).upper()} \t", content
    ),
}


@pytest.mark.parametrize("case", ODDITIES)
def test_an_oddity_keeps_every_row(case: str, classify: Classify, task_files: Path, tmp_path: Path):
    for path in task_files.glob("ids-sst-*.csv"):
        content = ODDITIES[case](path.read_text())
        assert content != path.read_text()
        path.write_bytes(content.encode())
    assert_all_rows_used(classify(), tmp_path)


def test_control_characters_of_a_data_file_are_escaped_in_messages(classify: Classify, task_files: Path):
    path = task_files / "ids-sst-dev.csv"
    path.write_text(path.read_text().replace("\t3\n", "\t\x1b[31m\u202e3\n"))
    error = the_error(classify())
    assert r"sentiment must be a whole number from 0 to 4, found '\x1b[31m\u202e3'" in error
    assert error.isprintable()


def test_a_byte_order_mark_does_not_hide_the_first_column(classify: Classify, task_files: Path, tmp_path: Path):
    for path in task_files.glob("ids-sst-*.csv"):
        lines = path.read_text().splitlines()
        first = lines[0].split("\t").index("id")
        path.write_bytes(("\ufeff" + "\n".join("\t".join(line.split("\t")[first:]) for line in lines)).encode())
    assert_all_rows_used(classify(), tmp_path)


def test_a_blank_sentence_is_legal_in_every_file(classify: Classify, task_files: Path, tmp_path: Path):
    for path in task_files.glob("ids-sst-*.csv"):
        path.write_text(path.read_text().replace("A bad film", "").replace(" number 1 .", " "))
    assert_all_rows_used(classify(), tmp_path)


def test_a_test_file_needs_no_label_and_may_have_an_odd_first_column(
    classify: Classify, task_files: Path, tmp_path: Path
):
    path = task_files / "ids-sst-test-student.csv"
    assert path.read_text().startswith("0\t\tid\tsentence\n0\t0.0\ttest")
    assert_all_rows_used(classify(), tmp_path)


def test_sentences_of_100000_characters_are_truncated_and_counted(classify: Classify, task_files: Path, tmp_path: Path):
    path = task_files / "ids-sst-dev.csv"
    path.write_text(path.read_text().replace("A bad", "bad " * 25_000).replace("A dull", "dull " * 20_000))
    finished = classify()
    assert_all_rows_used(finished, tmp_path, notes=1)  # rows 1 and 6 are bad, 2 and 7 are dull
    assert f"note: {path}: 4 of 8 rows are longer than 512 tokens and were truncated." in finished.err


def test_a_word_beyond_csvs_own_limit_of_131072_characters_is_legal(
    classify: Classify, task_files: Path, tmp_path: Path
):
    path = task_files / "ids-sst-train.csv"
    path.write_text(path.read_text().replace("A bad", "bad" * 50_000))
    assert_all_rows_used(classify(), tmp_path)


def test_a_long_sentence_fits_a_checkpoint_with_few_positions(
    classify: Classify, tiny_checkpoint: Path, task_files: Path, tmp_path: Path
):
    folder = tmp_path / "short"
    shape = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64)
    BertModel(BertConfig(max_position_embeddings=64, **shape)).save_pretrained(folder)
    shutil.copy(tiny_checkpoint / "vocab.txt", folder)
    path = task_files / "ids-sst-dev.csv"
    path.write_text(path.read_text().replace("A bad", "bad " * 100))
    finished = classify("--model", folder)
    assert_all_rows_used(finished, tmp_path, notes=1)
    assert f"note: {path}: 2 of 8 rows are longer than 64 tokens and were truncated." in finished.err


# --- skipped rows -----------------------------------------------------------------------------------------------------

UNUSABLE = {
    "a blank label": ("8\tid8\tA film .\t\n", "sentiment is empty"),
    "a label of spaces": ("8\tid8\tA film .\t  \n", "sentiment is empty"),
    "a blank id": ("8\t \tA film .\t1\n", "id is empty"),
    "a missing column": ("8\tid8\tA film .\n", "sentiment is missing"),
    "an open quotation mark": ('8\tid8\t"A film .\t1\n', "sentiment is missing (a quotation mark left open?)"),
    "a column too many": ("8\tid8\tA film .\t1\t1\n", "has more fields than the header"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_an_unusable_row_is_skipped_counted_and_named(case: str, classify: Classify, task_files: Path, tmp_path: Path):
    row, reason = UNUSABLE[case]
    path = task_files / "ids-sst-train.csv"
    path.write_text(HEADER + rows(row_3="3\tid3\tA film .\t\n", row_8=row))
    finished = classify()
    assert finished.status == 0
    assert "sst: train 6, dev 8, test 8 rows" in finished.out
    advice = "Skipped (2 of 8 rows skipped; --strict_data stops instead)."
    notes = finished.err.split("\n")[:-1]
    assert notes[0] == f"note: {path} line 4: sentiment is empty. {advice}"
    assert notes[1].startswith(f"note: {path} line 9: {reason}")
    assert notes[1].endswith(advice)
    assert len(notes) == 2


@pytest.mark.parametrize("case", UNUSABLE)
def test_strict_data_makes_an_unusable_row_an_error(case: str, classify: Classify, task_files: Path, tmp_path: Path):
    row, reason = UNUSABLE[case]
    path = task_files / "ids-sst-train.csv"
    path.write_text(HEADER + rows(row_8=row))
    finished = classify("--strict_data")
    assert_refused(finished, tmp_path, f"{path} line 9: {reason}", "Fix the row, or leave out --strict_data")


def test_a_file_of_unusable_rows_alone_is_refused(classify: Classify, task_files: Path, tmp_path: Path):
    path = task_files / "ids-sst-train.csv"
    path.write_text(HEADER + "1\tid1\tA film .\t\n")
    assert_refused(classify(), tmp_path, f"{path}: no usable row", "at least one row")


def test_an_open_quotation_mark_is_named_with_the_line_where_it_opens(
    classify: Classify, task_files: Path, tmp_path: Path
):
    path = task_files / "ids-sst-train.csv"
    path.write_text(HEADER + rows(row_3='3\tid3\t"A film .\t1\n'))  # it swallows rows 3 to 8, lines 4 to 9
    finished = classify("--strict_data")
    assert_refused(finished, tmp_path, path, "sentiment is missing (a quotation mark left open?)", "Fix the row")
    assert re.search(r"\blines? 4\b", finished.err)


def test_rows_joined_by_a_quotation_mark_that_closes_in_a_later_row_do_not_vanish_silently(
    classify: Classify, task_files: Path, tmp_path: Path
):
    path = task_files / "ids-sst-train.csv"
    path.write_text(HEADER + rows(row_3='3\tid3\t"A film .\t1\n', row_5='5\tid5\tA "film" .\t0\n'))
    finished = classify()  # csv reads lines 4 to 6 as one row: the first line's id, the last line's label
    assert finished.status == 0
    assert "sst: train 5, dev 8, test 8 rows" in finished.out
    assert re.search(rf"^note: {re.escape(str(path))} lines 4 to 6: .*quotation mark", finished.err, re.MULTILINE)


def test_blank_lines_do_not_shift_the_line_that_is_named(classify: Classify, task_files: Path, tmp_path: Path):
    path = task_files / "ids-sst-train.csv"
    path.write_text(HEADER + rows(row_3="\n\n3\tid3\tA film .\t5\n"))
    assert_refused(classify(), tmp_path, f"{path} line 6: sentiment must be a whole number from 0 to 4, found '5'")
