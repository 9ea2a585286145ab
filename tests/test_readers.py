"""Readers of additional training data: other formats become rows of the tasks, and long files are never held whole."""

import gzip
import json
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from conftest import (
    COURSE_TASKS,
    ROOT,
    Finished,
    assert_refused,
    nli_line,
    the_error,
    write_more_data,
    write_task_files,
)

import datasets
import multitask_classifier
from datasets import PAIRINGS, Ragged, load_multitask_data, read_split
from readers import READERS, Examples, read_examples, reader_of, readers_for, source_of
from tasks import PARA, SST, STS, TASKS, Category, Number
from tokenizer import BertTokenizer
from utils import InputError

pytestmark = pytest.mark.usefixtures("one_thread")
QUORA = "\tid\tsentence1\tsentence2\tis_duplicate\n"


def read(source: str, path: Path, text: str | None = None, **options: bool) -> Examples:
    """Read a file with this text, for the first task that the reader supports."""
    if text is not None:
        path.write_text(text)
    task = next(task for task in TASKS.values() if READERS[source].fits(task))
    return read_examples(task, [Path(f"{source}:{path}")], labeled=True, **options)


def pairs_of(found: Examples) -> list[tuple[str, str]]:
    return list(zip(*found.texts, strict=True))


# --- SNLI and MultiNLI ------------------------------------------------------------------------------------------------

E, N, C = "entailment", "neutral", "contradiction"


@pytest.mark.parametrize("source", ["snli", "mnli"])
def test_the_label_of_an_nli_pair_is_the_mean_of_the_votes(source: str, tmp_path: Path):
    given = [([E], E, 5), ([N], N, 3), ([C], C, 0), ([E, E, N, E, C], E, 18 / 5), ([C, C, C, N], C, 3 / 4),
             ([N, "", "", "", ""], N, 3), ([], E, 5)]  # fmt: skip
    found = read(source, tmp_path / "a.jsonl", "".join(nli_line(votes, gold) for votes, gold, _ in given))
    assert found.labels == pytest.approx([label for _, _, label in given])
    assert {type(label) for label in found.labels} == {float}
    assert pairs_of(found) == [("Two dogs run.", "Animals move.")] * 7
    assert found.skipped == []


def test_nli_text_comes_through_whole(tmp_path: Path):
    first, second = ' A "quoted"\ttab,\n naïve café — 日本 \U0001f600 ', ""
    for text in (nli_line([N], N, first, second), json.dumps(json.loads(nli_line([N], N, first, second)))):
        assert pairs_of(read("snli", tmp_path / "a.jsonl", text + "\n\n")) == [(first.strip(), "")]


def test_half_a_character_does_not_stop_the_tokenizer(tmp_path: Path, tiny_checkpoint: Path):
    text = nli_line([N], N, "a \ud83d b") + nli_line([C], C)
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    tokenizer = BertTokenizer.from_pretrained(str(tiny_checkpoint))
    assert len(read_split(STS, [Path(f"snli:{path}")], tokenizer, PAIRINGS["bi"], labeled=True)) == 2


def test_lines_without_a_gold_label_are_skipped_and_counted(tmp_path: Path, tiny_checkpoint: Path, capsys):
    path = tmp_path / "a.jsonl"
    path.write_text((nli_line([E, E, N, N, C], "-") + nli_line([E], E)) * 8 + nli_line([C], C))
    tokenizer = BertTokenizer.from_pretrained(str(tiny_checkpoint))
    assert len(read_split(STS, [Path(f"snli:{path}")], tokenizer, PAIRINGS["bi"], labeled=True)) == 9
    notes = capsys.readouterr().err.splitlines()
    assert notes[0] == (
        f"note: {path} line 1: has no gold label, the annotators did not agree. Skipped (8 of 17 rows skipped; "
        "--strict_data stops instead)."
    )
    assert [f"line {n}" in note for n, note in zip((1, 3, 5, 7, 9), notes, strict=False)] == [True] * 5
    assert notes[5:] == [f"note: snli:{path}: 3 more rows skipped; --strict_data stops at the first."]
    with pytest.raises(InputError, match=r"line 1: has no gold label.* Fix the row, or leave out --strict_data"):
        read("snli", path, strict=True)


BROKEN_JSON = {
    '{"sentence1": "a", "sent': "must be a JSON object; Unterminated string starting at (column 20). Fix the line, or",
    "[1, 2]": "must be a JSON object with sentence1, sentence2, gold_label, annotator_labels; sentence1 is missing",
    "7": "sentence1 is missing",
    "[" * 100_000: "must be a JSON object; maximum recursion depth exceeded",
    '{"sentence1": "a", "sentence2": null, "gold_label": "neutral", "annotator_labels": []}': "sentence2 is missing or",
    '{"sentence1": "a", "sentence2": "b", "annotator_labels": []}': "gold_label is missing or not a str",
    '{"sentence1": "a", "sentence2": "b", "gold_label": "neutral"}': "annotator_labels is missing or not a list",
    nli_line(["hidden"], "hidden").strip(): "a label must be one of contradiction, neutral, entailment, found 'hidden'",
    nli_line([E, "maybe"], E).strip(): "found 'maybe'",
    nli_line([["neutral"]], E).strip(): "found ['neutral']",
}


@pytest.mark.parametrize("line", BROKEN_JSON, ids=lambda line: line[:30])
def test_a_broken_json_line_is_named_with_file_and_line(line: str, tmp_path: Path):
    path = tmp_path / "a.jsonl"
    with pytest.raises(InputError) as caught:
        read("snli", path, nli_line([N], N) + "\n" + line + "\n" + nli_line([C], C))
    assert str(caught.value).startswith(f"{path} line 3: ")
    assert BROKEN_JSON[line] in str(caught.value)
    assert ". Fix " in str(caught.value)
    assert "\n" not in str(caught.value)


# --- Yelp -------------------------------------------------------------------------------------------------------------


def test_stars_become_grades(tmp_path: Path):
    text = "review_id,stars,date,text\n" + "".join(f"r{s},{s},2015,Fine {s}\n" for s in (5, 1, "3.0", 4, 2))
    found = read("yelp", tmp_path / "a.csv", text)
    assert found.labels == [4, 0, 2, 3, 1]
    assert {type(label) for label in found.labels} == {int}
    assert found.texts == (["Fine 5", "Fine 1", "Fine 3.0", "Fine 4", "Fine 2"],)


def test_reviews_may_hold_commas_quotes_tabs_and_line_ends(tmp_path: Path):
    text = 'stars,text\r\n2,"Slow, ""very"" slow.\n\n\tNever\tagain \\no."\r\n4,Good\r\n'
    found = read("yelp", tmp_path / "a.csv", text)
    assert found.texts == (['Slow, "very" slow.  \tNever\tagain \\no.', "Good"],)
    assert found.ids == [f"{tmp_path}/a.csv:2", f"{tmp_path}/a.csv:5"]


def test_yelp_full_has_no_header_and_writes_line_ends_as_backslash_n(tmp_path: Path):
    found = read("yelp", tmp_path / "a.csv", '"5","dr. g is ""nice"".\\n\\nSee him."\n"1","No"\n')
    assert (found.labels, found.texts) == ([4, 0], (['dr. g is "nice".  See him.', "No"],))


def test_reviews_without_stars_or_text_are_skipped_and_named(tmp_path: Path):
    path = tmp_path / "a.csv"
    found = read("yelp", path, "stars,text\n,blank\n3\n3,good\n3,a,b\n")
    assert found.texts == (["good"],)
    assert [line.removeprefix(f"{path} line ") for line in found.skipped] == [
        "2: stars is empty",
        "3: text is missing (a quotation mark left open?)",
        "5: has more fields than the header",
    ]


BAD_YELP = {
    "stars,text\n3,a\n6,b\n": "line 3: stars must be a whole number from 1 to 5, found '6'. Fix the row.",
    "stars,text\n0,a\n": "line 2: stars must be a whole number from 1 to 5, found '0'.",
    '"5","a"\n"good","b"\n': "line 2: stars must be a whole number from 1 to 5, found 'good'.",
    "stars,review\n3,a\n": "line 1: the header must have the comma-separated columns stars, text; text not found.",
    'stars,text\n3,a\n4,"b\n5,c\n': "line 3: quotation marks must be doubled inside a field and closed at its end",
    'stars,text\n3,"a "quoted" word"\n': "line 2: quotation marks must be doubled",
}


@pytest.mark.parametrize("text", BAD_YELP)
def test_a_bad_csv_of_reviews_is_refused(text: str, tmp_path: Path):
    with pytest.raises(InputError) as caught:
        read("yelp", tmp_path / "a.csv", text)
    assert str(caught.value).startswith(f"{tmp_path / 'a.csv'} {BAD_YELP[text]}")


# --- Quora as similarities --------------------------------------------------------------------------------------------


def quora_file(path: Path, rows: int, seed: int = 0) -> Path:
    draw = random.Random(seed)
    lines = [f"{i}\tid{draw.getrandbits(64)}\tq {i}\tr {i}\t{i % 2}.0\n" for i in range(rows)]
    path.write_text(QUORA + "".join(lines))
    return path


def test_paraphrases_are_uniform_from_4_to_5_and_others_from_0_to_4(tmp_path: Path):
    path = quora_file(tmp_path / "q.csv", 8000)
    labels = torch.tensor(read("quora_as_sts", path).labels, dtype=torch.float64)
    for share in (labels[1::2] - 4, labels[0::2] / 4):
        assert share.min() >= 0
        assert share.max() <= 1
        steps = share.sort().values - (torch.arange(4000) + 0.5) / 4000
        assert steps.abs().max() < 1.63 / 4000**0.5  # Kolmogorov's test of uniformity at 1%
    both = torch.corrcoef(torch.stack([labels[1::2], labels[0::2]]))[0, 1]
    assert abs(both) < 4 / 4000**0.5


def test_a_pairs_similarity_depends_on_its_id_alone(tmp_path: Path):
    path = quora_file(tmp_path / "q.csv", 50)
    found = read("quora_as_sts", path)
    header, *lines = path.read_text().splitlines(keepends=True)
    again = read("quora_as_sts", tmp_path / "other.csv", header + "".join(lines[:9:-1]))
    assert again.ids == found.ids[:9:-1]
    assert again.labels == found.labels[:9:-1]
    assert len(set(found.labels)) == 50


def test_a_quora_row_without_a_label_is_skipped_as_it_is_for_para(tmp_path: Path):
    text = QUORA + "0\ta\tx\ty\t1\n1\tb\tx\ty\t\n"
    found = read("quora_as_sts", tmp_path / "q.csv", text)
    assert (found.ids, found.skipped) == (["quora_as_sts:a"], [f"{tmp_path}/q.csv line 3: is_duplicate is empty"])
    with pytest.raises(InputError, match="line 2: is_duplicate must be 0 or 1, found '2'"):
        read("quora_as_sts", tmp_path / "q.csv", QUORA + "0\ta\tx\ty\t2\n")


# --- pairs in tab-separated files -------------------------------------------------------------------------------------

STSB = 'index\tgenre\tsentence1\tsentence2\tscore\n0\tnews\tA "plane" lands.\tA plane" lands.\t3.8\n1\tnews\tx\ty\t0\n'
PAWS = 'id\tsentence1\tsentence2\tlabel\n7\ta\tb\t1\n8\t"c\td\t0\n'


def test_pairs_of_glues_and_of_paws_layout_are_read(tmp_path: Path):
    (tmp_path / "a.tsv").write_text(STSB)
    found = read_examples(STS, [Path(f"tsv:{tmp_path}/a.tsv")], labeled=True)
    assert (pairs_of(found), found.labels) == ([('A "plane" lands.', 'A plane" lands.'), ("x", "y")], [3.8, 0.0])
    (tmp_path / "b.tsv").write_text(PAWS)
    found = read_examples(PARA, [Path(f"tsv:{tmp_path}/b.tsv")], labeled=True)
    assert (pairs_of(found), found.labels) == ([("a", "b"), ('"c', "d")], [1, 0])


def test_the_tasks_own_label_column_goes_first(tmp_path: Path):
    (tmp_path / "a.tsv").write_text("label\tscore\tsimilarity\tsentence2\tsentence1\n1\t2\t3\tb\ta\n")
    found = read_examples(STS, [Path(f"tsv:{tmp_path}/a.tsv")], labeled=True)
    assert (pairs_of(found), found.labels) == ([("a", "b")], [3.0])


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (PAWS.replace("label", "gold"), "line 1: the header must have the tab-separated columns sentence1, sentence2, "
         "is_duplicate (or score, label); is_duplicate (or score, label) not found. Check that this is a file of"),
        (STSB.replace("sentence2", "text_b"), "sentence2 not found."),
        (STSB, "line 2: score must be 0 or 1, found '3.8'. Fix the row."),
    ],
)  # fmt: skip
def test_a_file_of_pairs_that_does_not_fit_is_refused(text: str, part: str, tmp_path: Path):
    with pytest.raises(InputError) as caught:
        read("tsv", tmp_path / "a.tsv", text)
    assert part in str(caught.value)


# --- what all readers share -------------------------------------------------------------------------------------------


EXAMPLES = {
    "handout": (SST, "id\tsentence\tsentiment\na\tx\t1\nb\ty\t2\n"),
    "snli": (STS, nli_line([E], E) + nli_line([C], C)),
    "mnli": (STS, nli_line([E], E) + nli_line([C], C)),
    "yelp": (SST, "stars,text\n1,x\n2,y\n"),
    "quora_as_sts": (STS, QUORA + "0\ta\tx\ty\t1\n1\tb\tx\ty\t0\n"),
    "tsv": (PARA, PAWS),
}


def test_every_reader_has_an_example_and_reads_it():
    assert EXAMPLES.keys() == READERS.keys()


FITTING = {
    "handout": {"sst", "cfimdb", "para", "sts"},
    "snli": {"sts"},
    "mnli": {"sts"},
    "yelp": {"sst"},
    "quora_as_sts": {"sts"},
    "tsv": {"para", "sts"},
}


@pytest.mark.parametrize("source", READERS)
def test_a_reader_is_refused_for_every_task_that_it_does_not_fit(source: str):
    assert {task.name for task in COURSE_TASKS.values() if READERS[source].fits(task)} == FITTING[source]
    path = Path(f"{source}:file")
    for task in COURSE_TASKS.values():
        if task.name in FITTING[source]:
            assert reader_of(task, path) == (READERS[source], Path("file"))
            assert source in readers_for(task)
        else:
            with pytest.raises(InputError, match=f"the reader {source} is for .*, found {task.name}. Use one of "):
                reader_of(task, path)
            assert source not in readers_for(task)


def test_a_reader_fits_by_what_a_task_is_not_by_its_name(tmp_path: Path):
    other = replace(STS, name="relatedness", predicts=Number(1, 7))
    assert readers_for(other) == readers_for(STS)
    (tmp_path / "a.jsonl").write_text(nli_line([E], E) + nli_line([C], C) + nli_line([E, N], E))
    found = read_examples(other, [Path(f"snli:{tmp_path}/a.jsonl")], labeled=True)
    assert found.labels == pytest.approx([7, 1, (7 + 4.6) / 2])  # neutral is 0.6 of the range
    ten = replace(SST, name="ten", predicts=Category(10))
    assert readers_for(ten) == ["handout"]


@pytest.mark.parametrize("source", READERS)
def test_a_compressed_file_reads_like_a_plain_one(source: str, tmp_path: Path):
    task, text = EXAMPLES[source]
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode()))
    plain, packed = (
        read_examples(task, [Path(f"{source}:{tmp_path}/{name}")], labeled=True) for name in ("a.txt", "a.txt.gz")
    )
    assert (packed.texts, packed.labels) == (plain.texts, plain.labels)
    assert len(packed) == 2


@pytest.mark.parametrize("source", READERS)
def test_what_is_no_text_file_is_refused_by_every_reader(source: str, tmp_path: Path):
    task, text = EXAMPLES[source]
    path = tmp_path / "a"
    line = 1 + text.count("\n")
    for content, part in {
        b"": ": the file is empty.",
        b" \n\r\n": ": the file is empty.",
        text.encode() + b"\0\n": f" line {line}: must be text, found a NUL byte.",
        text.encode() + b"caf\xe9\n": f" line {line}: must be UTF-8, found byte 0xe9. Convert the file to UTF-8.",
    }.items():
        path.write_bytes(content)
        with pytest.raises(InputError) as caught:
            read_examples(task, [Path(f"{source}:{path}")], labeled=True)
        assert str(caught.value).startswith(f"{path}{part}")
    for name, content in {"cut.gz": gzip.compress(text.encode())[:-9], "no.gz": text.encode()}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=f"{name}: cannot be read; "):
            read_examples(task, [Path(f"{source}:{tmp_path / name}")], labeled=True)
    with pytest.raises(InputError, match=r"nowhere: cannot be read; No such file or directory\. \w+"):
        read_examples(task, [Path(f"{source}:{tmp_path}/nowhere")], labeled=True)


def test_ids_are_unique_across_files_and_readers_and_the_same_file_twice_is_noticed(tmp_path: Path):
    write_task_files(tmp_path)
    paths = [Path(tmp_path / "sts-train.csv"), Path(f"quora_as_sts:{tmp_path}/quora-train.csv")]
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_more_data(tmp_path / name)
        paths.append(Path(f"snli:{tmp_path / name}/snli_1.0_train.jsonl"))
    found = read_examples(STS, paths, labeled=True)
    assert len(set(found.ids)) == len(found) == 8 + 8 + 9 + 9
    with pytest.raises(InputError, match="line 1: ids must be unique"):
        read_examples(STS, [paths[2], paths[2]], labeled=True)


def test_the_starters_loader_takes_readers_too(tmp_path: Path):
    write_task_files(tmp_path)
    write_more_data(tmp_path)
    sst, labels, para, sts = load_multitask_data(
        [f"{tmp_path}/ids-sst-train.csv", f"yelp:{tmp_path}/yelp.csv"],
        f"{tmp_path}/quora-train.csv",
        f"snli:{tmp_path}/snli_1.0_train.jsonl",
    )
    assert (len(sst), len(labels), len(para), len(sts)) == (17, 5, 8, 9)
    assert sst[8] == ('A "place" of 0 tables. Go.', 0, f"{tmp_path}/yelp.csv:1")
    assert [row[2] for row in sts[:3]] == [5, 3, 0]


# --- prefixes ---------------------------------------------------------------------------------------------------------


def test_a_plain_path_with_a_colon_in_it_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("snli:a.csv", "my file:2.csv", "yelp:"):
        Path(name).write_text("")
        assert source_of(Path(name)) == ("handout", Path(name))
    for name in ("C:\\data\\sts.csv", "c:/data/sts.csv", "data/a:b.csv", "./a:b.csv/x", "plain.csv"):
        assert source_of(Path(name)) == ("handout", Path(name))


def test_a_reader_is_taken_off_its_path(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert source_of(Path("snli:data/a:b.jsonl")) == ("snli", Path("data/a:b.jsonl"))
    assert source_of(Path("mnli:/abs/a")) == ("mnli", Path("/abs/a"))
    assert source_of(Path("yelp:~/a.csv")) == ("yelp", Path("/home/me/a.csv"))


# --- the script -------------------------------------------------------------------------------------------------------


@pytest.fixture
def classify(
    tiny_checkpoint: Path,
    task_files: Path,
    tmp_path: Path,
    run_main: Callable[..., Finished],
) -> Callable[..., Finished]:
    """Run multitask_classifier.py in this process on small files. Further flags come last."""
    write_more_data(task_files)
    given = {"--model": tiny_checkpoint, "--data": task_files, "--runs": tmp_path / "runs", "--name": "r"}
    given |= {"--predictions": tmp_path / "predictions", "--epochs": 1}

    def run(*more: object) -> Finished:
        flags = [str(part) for pair in given.items() for part in pair]
        return run_main(multitask_classifier, *flags, *more)

    return run


def test_a_run_on_more_data_notes_the_files_hashes_and_goes_on(classify: Callable, task_files: Path, tmp_path: Path):
    extra = [task_files / "yelp.csv", task_files / "snli_1.0_train.jsonl"]
    flags = ["--sst_train", task_files / "ids-sst-train.csv", f"yelp:{extra[0]}"]
    flags += ["--sts_train", f"snli:{extra[1]}", "--patience", 1]
    finished = classify(*flags)
    assert finished.status == 0, finished.err
    assert "sst: train 17, dev 8, test 8 rows" in finished.out
    assert "sts: train 9, dev 8, test 8 rows" in finished.out
    hashes = json.loads((tmp_path / "runs/r/args.json").read_text())["data_sha256"]
    assert {str(path): sha256(path.read_bytes()).hexdigest() for path in extra}.items() <= hashes.items()
    assert all(Path(path).is_file() for path in hashes)
    assert classify(*flags, "--resume").status == 0
    assert classify("--predict_only", "--run", tmp_path / "runs/r").status == 0
    extra[1].write_text(extra[1].read_text() * 2)
    assert f"{extra[1]} changed since the run was started" in the_error(classify(*flags, "--resume"))
    flags[4] = f"mnli:{extra[1]}"
    assert "was started with --sts_train" in the_error(classify(*flags, "--resume"))


REFUSED = {
    "--sts_train snly:data/x": (
        "snly:data/x: must be a file or READER:PATH with one of handout, snli, mnli, yelp, quora_as_sts, tsv, found "
        "neither. Correct the path, or the reader."
    ),
    "--sts_train snli:": "snli:: must be a file or READER:PATH with one of handout, snli",
    "--sts_train yelp:x": "yelp:x: the reader yelp is for sst, found sts. Use one of handout, snli, mnli, quora_as_sts",
    "--sst_train snli:x": "snli:x: the reader snli is for sts, found sst. Use one of handout, yelp.",
    "--para_train quora_as_sts:x": "the reader quora_as_sts is for sts, found para. Use one of handout, tsv.",
    "--tasks cfimdb --cfimdb_train yelp:x": "the reader yelp is for sst, found cfimdb. Use one of handout.",
    "--sts_dev snli:x": "--sts_dev snli:x: must be in the course's format, found the reader snli. Use it with --sts_tr",
    "--sst_test yelp:x": "--sst_test yelp:x: must be in the course's format, found the reader yelp. Use it with --sst_",
    "--sts_train snli:nowhere/x": "nowhere/x: cannot be read; No such file or directory. SNLI: https://nlp.stanford.edu",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_a_reader_that_is_none_or_does_not_fit_is_refused(flags: str, classify: Callable, tmp_path: Path):
    assert_refused(classify(*flags.split()), tmp_path, REFUSED[flags])


def test_a_broken_line_ends_the_script_in_one_line(classify: Callable, task_files: Path, tmp_path: Path):
    path = task_files / "snli_1.0_train.jsonl"
    path.write_text(path.read_text() + '{"sentence1": "cut')
    assert_refused(classify("--sts_train", f"snli:{path}"), tmp_path, f"{path} line 10: must be a JSON object")
    path.write_text(nli_line([E], "-") + nli_line([E], E) + nli_line([C], C))
    refused = classify("--sts_train", f"snli:{path}", "--strict_data")
    assert_refused(refused, tmp_path, f"{path} line 1: has no gold label")


# --- long files -------------------------------------------------------------------------------------------------------


def write_long_nli(path: Path, rows: int) -> None:
    """Write lines as long as SNLI's: about 14 and 8 words, and parses that make up three quarters of the file."""
    draw = random.Random(0)
    words = ["a", "man", "in", "the", "blue", "shirt", "is", "playing", "outside", "with", "two", "brown", "dogs"]

    def sentence(mean: float, spread: float) -> str:
        return " ".join(draw.choices(words, k=max(3, round(draw.gauss(mean, spread))))) + "."

    with path.open("w") as file:
        for i in range(rows):
            first, second, label = sentence(14, 6), sentence(8, 3), (E, N, C)[i % 3]
            found = {"sentence1": first, "sentence2": second, "annotator_labels": [label], "pairID": f"{i}.jpg#0r1n"}
            found |= {"sentence1_parse": f"(ROOT (NP {first})) " * 3, "sentence2_parse": f"(ROOT (NP {second})) " * 3}
            file.write(json.dumps(found | {"gold_label": "-" if i % 700 == 0 else label}) + "\n")


def test_a_file_is_never_held_whole(tmp_path: Path):
    """Files are read line by line: apart from the rows that are kept, memory does not grow with the file."""
    path = tmp_path / "long.jsonl"
    write_long_nli(path, 20_000)
    tracemalloc.start()
    found = read("snli", path)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found) == 20_000 - 29
    assert peak < kept + path.stat().st_size / 4


def test_a_table_is_never_held_whole_either(tmp_path: Path):
    path = tmp_path / "long.csv"
    path.write_text("stars,other,text\n" + f'4,{"x" * 2000},"fine"\n' * 10_000)
    tracemalloc.start()
    found = read("yelp", path)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found) == 10_000
    assert peak < kept + path.stat().st_size / 4


@pytest.mark.parametrize("pairs", [False, True])
def test_rows_are_tokenized_a_chunk_at_a_time(pairs: bool, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    tokenizer = BertTokenizer.from_pretrained(str(tiny_checkpoint), max_length=12)
    first = [f"{'word ' * (i % 15)}{i}" for i in range(53)]
    second = [f"other {'and ' * (i % 4)}" for i in range(53)] if pairs else None
    wanted = tokenizer.encode_all(first, second)
    asked = []
    encode = tokenizer.encode_all
    monkeypatch.setattr(tokenizer, "encode_all", lambda *texts: asked.append(len(texts[0])) or encode(*texts))
    monkeypatch.setattr(datasets, "CHUNK", 10)
    found = Ragged.tokenize(tokenizer, first, second)
    assert asked == [10, 10, 10, 10, 10, 3]
    assert found.token_ids.tolist() == [i for e in wanted for i in e.ids]
    assert found.token_type_ids.tolist() == [i for e in wanted for i in e.type_ids]
    assert found.lengths.tolist() == [len(e.ids) for e in wanted]
    assert found.starts.tolist() == [sum(len(e.ids) for e in wanted[:r]) for r in range(53)]
    assert found.truncated.tolist() == [bool(e.overflowing) for e in wanted]
    assert (found.token_ids.dtype, found.token_type_ids.dtype) == (torch.int16, torch.uint8)


def test_token_ids_above_32767_are_stored_as_they_are(tiny_checkpoint: Path):
    plain = BertTokenizer.from_pretrained(str(tiny_checkpoint))
    large = BertTokenizer([*plain.vocabulary, *(f"unused{i}" for i in range(40_000)), "zyzzyva"])
    found = Ragged.tokenize(large, ["zyzzyva"])
    assert found.token_ids.tolist()[1] == len(large.vocabulary) - 1 > 2**16
    assert found.pad(torch.tensor([0]), 0).token_ids.tolist() == [large.encode_all(["zyzzyva"], None)[0].ids]


@pytest.mark.parametrize("pairing", ["bi", "cross", "both"])
def test_a_file_that_is_read_a_chunk_at_a_time_gives_the_same_split(
    pairing: str, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    path, tokenizer = tmp_path / "sts.csv", BertTokenizer.from_pretrained(str(tiny_checkpoint), max_length=6)
    good = [f"{i}\tid{i}\ta {'b ' * (i % 5)}\tc {i}\t{i % 6}.0" for i in range(30)]
    path.write_text("\n".join(["\tid\tsentence1\tsentence2\tsimilarity", *good[:7], "x\tbad\ta\tb\t", *good[7:],
                               "x\tworse\ta\tb\t"]) + "\n")  # fmt: skip
    most, found = [], []
    tokenize = datasets.Split.tokenize.__func__

    def watched(cls: type, examples: object, *rest: object) -> object:
        most.append(len(examples))
        return tokenize(cls, examples, *rest)

    monkeypatch.setattr(datasets.Split, "tokenize", classmethod(watched))
    for chunk in (1000, 10):
        monkeypatch.setattr(datasets, "CHUNK", chunk)
        found.append(datasets.read_split(STS, [path], tokenizer, datasets.PAIRINGS[pairing], labeled=True))
    assert most == [30, 10, 10, 10]
    notes = capsys.readouterr().err.splitlines()
    assert len(notes) == 6
    assert notes[:3] == notes[3:]
    assert "(2 of 32 rows skipped" in notes[0]
    assert "longer than 6 tokens" in notes[2]
    whole, joined = found
    assert (joined.ids, joined.views, joined.padding_id) == (whole.ids, whole.views, whole.padding_id)
    assert torch.equal(joined.labels, whole.labels)
    for a, b in zip(whole.columns, joined.columns, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True) if x is not None or y is not None)


def test_an_id_that_is_repeated_in_another_chunk_is_refused_with_both_places(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path, tokenizer = tmp_path / "sst.csv", BertTokenizer.from_pretrained(str(tiny_checkpoint))
    rows = [f"{i}\tid{i % 25}\tfine\t{i % 5}" for i in range(26)]
    path.write_text("\n".join(["\tid\tsentence\tsentiment", *rows]) + "\n")
    monkeypatch.setattr(datasets, "CHUNK", 10)
    with pytest.raises(InputError, match=r"sst.csv line 27: ids must be unique, 'id0' appears in .*sst.csv line 2 too"):
        datasets.read_split(SST, [path], tokenizer, labeled=True)
    assert len(datasets.read_split(SST, [path], tokenizer, labeled=True, repeated_ids=True)) == 26


READ_ALL = """
import resource, sys
from pathlib import Path
from datasets import PAIRINGS, read_split
from tasks import STS
from tokenizer import BertTokenizer
tokenizer = BertTokenizer.from_pretrained("minilm")
split = read_split(STS, [Path(sys.argv[1])], tokenizer, PAIRINGS["cross"], labeled=True)
used = resource.getrusage(resource.RUSAGE_SELF)
print(len(split), used.ru_utime + used.ru_stime, used.ru_maxrss // 1024)
"""


@pytest.mark.slow
def test_550000_pairs_are_read_and_tokenized_within_two_minutes_and_a_gigabyte(tmp_path: Path):
    """Measures the CPU time of all threads together, so that other work on the machine does not count."""
    path = tmp_path / "snli.jsonl"
    write_long_nli(path, 550_000)
    command = [sys.executable, "-c", READ_ALL, f"snli:{path}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    rows, seconds, megabytes = map(float, done.stdout.split())
    assert rows == 550_000 - 786
    assert seconds < 120
    assert megabytes < 1000
