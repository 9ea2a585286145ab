"""data/sample: written by its script, in the course's formats, no overlap of splits, not solvable by a bag of words."""

import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from conftest import COURSE_TASKS, ROOT
from scipy.sparse import csr_matrix, hstack
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression, Ridge

from datasets import Examples, read_examples
from tasks import TASKS

SCRIPT = ROOT / "data" / "make_sample_data.py"
SAMPLE = ROOT / "data" / "sample"
SPLITS = ("train", "dev", "test")
SIZES = {"sst": (600, 150, 150), "cfimdb": (600, 150, 150), "para": (600, 150, 150), "sts": (600, 150, 150)}
# label shares in the course's training files (STS: by integer part of the score)
SHARES = {
    "sst": {0: 0.128, 1: 0.260, 2: 0.190, 3: 0.272, 4: 0.151},
    "cfimdb": {0: 0.5, 1: 0.5},
    "para": {0: 0.63, 1: 0.37},
    "sts": {0: 0.17, 1: 0.16, 2: 0.17, 3: 0.26, 4: 0.18, 5: 0.05},
}
# upper bounds on the dev score of a bag of words; docs/RESULTS.md has the scores of a fine-tuned minilm
BOUNDS = {"sst": 0.55, "cfimdb": 0.68, "para": 0.72, "sts": 0.60}


@pytest.fixture(scope="module")
def sample() -> dict[tuple[str, str], Examples]:
    return {
        (name, split): read_examples(task, [SAMPLE / task.filename(split)], labeled=split != "test")
        for name, task in COURSE_TASKS.items()
        for split in SPLITS
    }


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def run_generator(*flags: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *map(str, flags)], capture_output=True, text=True)


def test_the_script_writes_the_committed_files_byte_for_byte(tmp_path: Path) -> None:
    result = run_generator("--out", tmp_path)
    assert result.returncode == 0, result.stderr
    names = sorted(path.name for path in SAMPLE.glob("*.csv"))
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    for name in names:
        assert (tmp_path / name).read_bytes() == (SAMPLE / name).read_bytes(), name


@pytest.mark.slow
def test_check_detects_a_changed_file(tmp_path: Path) -> None:
    shutil.copytree(SAMPLE, tmp_path, dirs_exist_ok=True)
    assert run_generator("--out", tmp_path, "--check").returncode == 0
    with (tmp_path / "sts-dev.csv").open("a") as file:
        file.write("\n")
    result = run_generator("--out", tmp_path, "--check")
    assert result.returncode == 1
    assert "sts-dev.csv" in result.stdout + result.stderr


def test_every_row_is_usable_and_the_files_have_their_sizes(sample) -> None:
    for name, sizes in SIZES.items():
        for split, size in zip(SPLITS, sizes, strict=True):
            assert not sample[name, split].skipped
            assert len(sample[name, split]) == size


def test_ids_are_25_hexadecimal_digits_and_unique_everywhere(sample) -> None:
    ids = [i for examples in sample.values() for i in examples.ids]
    assert all(re.fullmatch("[0-9a-f]{25}", i) for i in ids)
    assert len(ids) == len(set(ids))


def test_headers_equal_those_of_the_course(course_data: Path) -> None:
    for task in COURSE_TASKS.values():
        for split in SPLITS:
            name = task.filename(split)
            ours, theirs = ((folder / name).read_text(encoding="utf-8") for folder in (SAMPLE, course_data))
            assert ours.splitlines()[0] == theirs.splitlines()[0], name


@pytest.mark.parametrize("name", sorted(COURSE_TASKS))
@pytest.mark.parametrize("split", ["train", "dev"])
def test_label_shares_are_those_of_the_real_data(sample, name: str, split: str) -> None:
    labels = [int(label) for label in sample[name, split].labels]
    counts = Counter(labels)
    for label, share in SHARES[name].items():
        assert counts[label] / len(labels) == pytest.approx(share, abs=0.03), label


@pytest.mark.parametrize("name", sorted(COURSE_TASKS))
def test_no_two_splits_contain_nearly_equal_rows(sample, name: str) -> None:
    """Rows of different splits share less than nine tenths of their words, and no row occurs twice."""
    rows = {split: [words(" ".join(t)) for t in zip(*sample[name, split].texts, strict=True)] for split in SPLITS}
    everything = [" ".join(row) for split in SPLITS for row in rows[split]]
    assert len(everything) == len(set(everything))
    vocabulary = {w: i for i, w in enumerate(sorted({w for split in SPLITS for row in rows[split] for w in row}))}
    sets = {split: np.zeros((len(rows[split]), len(vocabulary)), dtype=np.float32) for split in SPLITS}
    for split in SPLITS:
        for number, row in enumerate(rows[split]):
            sets[split][number, [vocabulary[w] for w in row]] = 1
    for a, b in (("train", "dev"), ("train", "test"), ("dev", "test")):
        common = sets[a] @ sets[b].T
        union = sets[a].sum(1)[:, None] + sets[b].sum(1)[None] - common
        assert (common / union).max() < 0.9


def bag_of_words(train: Examples, other: Examples) -> list[csr_matrix]:
    """TF-IDF of words and word pairs. For two sentences: both, their difference, word overlap and cosine."""
    tfidf = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    tfidf.fit([text for column in train.texts for text in column])
    features = []
    for examples in (train, other):
        columns = [tfidf.transform(column) for column in examples.texts]
        if len(columns) == 2:
            overlap = [
                [len(set(words(a)) & set(words(b))) / max(1, len(set(words(a)) | set(words(b))))]
                for a, b in zip(*examples.texts, strict=True)
            ]
            cosine = columns[0].multiply(columns[1]).sum(1)
            columns = [*columns, abs(columns[0] - columns[1]), csr_matrix(overlap), csr_matrix(cosine)]
        features.append(hstack(columns).tocsr())
    return features


@pytest.mark.parametrize("name", sorted(COURSE_TASKS))
def test_a_bag_of_words_does_not_solve_the_task(sample, name: str) -> None:
    train, dev = sample[name, "train"], sample[name, "dev"]
    train_features, dev_features = bag_of_words(train, dev)
    model = Ridge(1.0) if name == "sts" else LogisticRegression(C=10, max_iter=2000)
    model.fit(train_features, train.labels)
    score = TASKS[name].predicts.score(model.predict(dev_features), np.array(dev.labels))
    assert score < BOUNDS[name]
