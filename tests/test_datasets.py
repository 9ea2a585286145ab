"""From files to examples, token ids and batches: nothing is lost or changed, and there is little padding."""

import argparse
import csv
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import COURSE_TASKS, padded
from torch.utils.data import DataLoader

from datasets import (
    PAIRINGS,
    Ragged,
    SentenceClassificationDataset,
    SentenceClassificationTestDataset,
    SentencePairDataset,
    SentencePairTestDataset,
    Split,
    bucketed_rows,
    check_rows_meet,
    count_batches,
    endless_batches,
    epoch_generator,
    read_split,
    sorted_rows,
)
from readers import Examples, read_examples
from tasks import CFIMDB, PARA, SST, STS, Batch, Encoded, Task, Tokens, stack
from tokenizer import BertTokenizer
from utils import InputError

SPLITS = ("train", "dev", "test")
# usable rows of the course's files
ROWS = {
    "sst": (8544, 1101, 2210),
    "cfimdb": (1707, 245, 488),
    "para": (14150, 3000, 3062),
    "sts": (6040, 863, 1725),
}


@pytest.fixture(scope="module")
def course(course_data: Path) -> dict[tuple[str, str], Examples]:
    return {
        (task.name, split): read_examples(task, [course_data / task.filename(split)], labeled=split != "test")
        for task in COURSE_TASKS.values()
        for split in SPLITS
    }


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> BertTokenizer:
    return BertTokenizer.from_pretrained(str(tiny_checkpoint))


@pytest.fixture(scope="module")
def sst_lengths(course: dict[tuple[str, str], Examples], tokenizer: BertTokenizer) -> torch.Tensor:
    return Split.tokenize(course["sst", "train"], tokenizer).lengths


# --- the course's files -----------------------------------------------------------------------------------------------


def plain_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file, delimiter="\t"))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("task", COURSE_TASKS.values(), ids=COURSE_TASKS)
def test_every_row_that_csv_sees_is_used_or_named(
    task: Task, split: str, course: dict[tuple[str, str], Examples], course_data: Path
):
    found = course[task.name, split]
    rows = plain_rows(course_data / task.filename(split))
    assert len(found) == ROWS[task.name][SPLITS.index(split)]
    assert len(found) + len(found.skipped) == len(rows)
    usable = rows if split == "test" else [row for row in rows if row[task.label_column]]
    assert found.ids == [row["id"].lower().strip() for row in usable]
    for column, texts in zip(task.text_columns, found.texts, strict=True):
        assert texts == [row[column].strip() for row in usable]
    if split == "test":
        assert found.labels is None
    else:
        assert found.labels == [float(row[task.label_column]) for row in usable]


def test_exactly_two_rows_of_quora_train_are_skipped_and_named(
    course: dict[tuple[str, str], Examples], course_data: Path
):
    path = course_data / "quora-train.csv"
    assert course["para", "train"].skipped == [f"{path} line {n}: is_duplicate is empty" for n in (5002, 9002)]
    assert [key for key, found in course.items() if found.skipped] == [("para", "train")]
    lines = path.read_bytes().splitlines()
    assert all(lines[n - 1].endswith(b"\t") for n in (5002, 9002)), "these lines end in a blank label"


def test_labels_have_their_tasks_type(course: dict[tuple[str, str], Examples], tokenizer: BertTokenizer):
    for task, kind in ((SST, int), (CFIMDB, int), (PARA, int), (STS, float)):
        assert {type(label) for label in course[task.name, "dev"].labels} == {kind}
    assert set(course["sst", "train"].labels) == {0, 1, 2, 3, 4}
    assert set(course["para", "train"].labels) == set(course["cfimdb", "train"].labels) == {0, 1}
    assert 2.6 in course["sts", "train"].labels
    assert Split.tokenize(course["sts", "dev"], tokenizer).labels.is_floating_point()
    assert Split.tokenize(course["para", "dev"], tokenizer).labels.dtype == torch.int64


def spaced_out(sentence: str) -> str:
    """Apply the starter's preprocessing of the sentences of a pair."""
    for mark in ".?,'":
        sentence = sentence.replace(mark, f" {mark}")
    return " ".join(sentence.lower().split())


def lowered(sentence: str) -> str:
    """Apply the starter's preprocessing of the sentences of SST and CFIMDB."""
    return sentence.lower().strip()


@pytest.mark.parametrize(
    ("task", "prepare"), [(SST, lowered), (CFIMDB, lowered), (PARA, spaced_out), (STS, spaced_out)]
)
def test_token_ids_do_not_depend_on_the_starters_preprocessing(
    task: Task,
    prepare: Callable[[str], str],
    course: dict[tuple[str, str], Examples],
    tokenizer: BertTokenizer,
):
    every = [text for split in SPLITS for column in course[task.name, split].texts for text in column]
    assert len(every) == sum(ROWS[task.name]) * len(task.text_columns)
    changed = sorted({text for text in every if prepare(text) != text})  # the ids of the others are the same anyway
    assert len(changed) > len(every) / 2
    ours = [e.ids for e in tokenizer.encode_all(changed)]
    starters = [e.ids for e in tokenizer.encode_all([prepare(text) for text in changed])]
    assert ours == starters


# --- reading ----------------------------------------------------------------------------------------------------------


def write_rows(path: Path, *rows: str, header: str = "\tid\tsentence1\tsentence2\tsimilarity") -> Path:
    path.write_text("\n".join((header, *rows)) + "\n")
    return path


def test_a_fractional_label_stays_a_fraction(tmp_path: Path, tokenizer: BertTokenizer):
    path = write_rows(tmp_path / "sts.csv", "0\tid0\ta\tb\t2.6", "1\tid1\tc\td\t5")
    assert read_examples(STS, [path], labeled=True).labels == [2.6, 5.0]
    assert read_split(STS, [path], tokenizer, labeled=True).labels.tolist() == pytest.approx([2.6, 5.0])


def test_quoras_1_0_is_the_class_1(tmp_path: Path, tokenizer: BertTokenizer):
    header = "\tid\tsentence1\tsentence2\tis_duplicate"
    path = write_rows(tmp_path / "quora.csv", "0\tid0\ta\tb\t1.0", "1\tid1\tc\td\t0.0", header=header)
    labels = read_split(PARA, [path], tokenizer, labeled=True).labels
    assert labels.dtype == torch.int64
    assert labels.tolist() == [1, 0]


def test_several_files_are_read_as_one_in_their_order(tmp_path: Path):
    paths = [write_rows(tmp_path / f"{n}.csv", f"0\tid{n}\ta{n}\tb{n}\t{n}") for n in (2, 1)]
    found = read_examples(STS, paths, labeled=True)
    assert (found.ids, found.texts, found.labels) == (["id2", "id1"], (["a2", "a1"], ["b2", "b1"]), [2.0, 1.0])


# --- padding ----------------------------------------------------------------------------------------------------------

SENTENCES = ["A good film .", "", "Dull, long and unbelievably overwrought!", "bad", "word " * 600]
PAIRS = ["b", "A rather longer second sentence .", "", "c d", "other " * 600]


def test_padded_rows_equal_the_tokenizers_own_padded_call(tokenizer: BertTokenizer):
    for first, second in ((SENTENCES, None), (SENTENCES, PAIRS)):
        ragged = Ragged.tokenize(tokenizer, first, second)
        for rows in ([0, 1, 2, 3, 4], [3, 0], [1], [2, 2, 1]):
            wanted = padded(tokenizer, [first[r] for r in rows], second and [second[r] for r in rows])
            found = ragged.pad(rows, tokenizer.pad_token_id)
            for ours, theirs in zip(found[:3], ("input_ids", "attention_mask", "token_type_ids"), strict=True):
                assert torch.equal(ours, wanted[theirs])
                assert ours.dtype == wanted[theirs].dtype


def test_truncated_rows_are_counted(tokenizer: BertTokenizer):
    ragged = Ragged.tokenize(tokenizer, SENTENCES)
    assert ragged.truncated.sum() == 1
    assert ragged.lengths.tolist()[-1] == tokenizer.max_length == 512


def test_a_split_cuts_batches_out_of_its_rows(tokenizer: BertTokenizer):
    examples = Examples(STS, ["a", "b", "c"], (["one", "two words", ""], ["x y z", "", "u"]), [0.5, 2.6, 5.0])
    split = Split.tokenize(examples, tokenizer)
    assert len(split) == 3
    assert split.lengths.tolist() == [5, 4, 3]  # the longer column, with [CLS] and [SEP]
    batch = split.batch(torch.tensor([2, 0]))
    assert (batch.task, batch.ids, batch.vectors) == ("sts", ["c", "a"], None)
    assert batch.labels.tolist() == [5.0, 0.5]
    first, second = batch.sentences
    assert torch.equal(first.token_ids, padded(tokenizer, ["", "one"])["input_ids"])
    assert torch.equal(second.token_ids, padded(tokenizer, ["u", "x y z"])["input_ids"])
    vectors = torch.arange(6.0).view(3, 2)
    kept = split.with_vectors((vectors,)).batch(torch.tensor([2, 0]))
    assert kept.sentences == ()
    assert torch.equal(kept.vectors[0], vectors[[2, 0]])


def test_a_batch_has_hashes_of_its_texts_only_if_they_were_asked_for(tokenizer: BertTokenizer):
    examples = Examples(PARA, ["a", "b", "c"], (["one", "two", "One"], ["two", "one film", "one dull film"]), [1, 0, 1])
    rows = torch.tensor([2, 0, 1])
    split = Split.tokenize(examples, tokenizer, PAIRINGS["bi"])
    plain = split.batch(rows)
    assert plain.text_hashes == ()
    assert all(batch.text_hashes == () for batch in split.batches(2, epoch_generator(0, 1)))
    hashed = split.with_text_hashes()
    assert all(len(batch.text_hashes) == 2 for batch in hashed.batches(2, epoch_generator(0, 1)))
    batch = hashed.batch(rows)
    assert [column.shape for column in batch.text_hashes] == [(3,), (3,)]
    assert {column.dtype for column in batch.text_hashes} == {torch.int64}
    texts = [["one", "one", "two"], ["one dull film", "two", "one film"]]  # as the tokenizer sees them, in lower case
    found = torch.cat(batch.text_hashes)
    wanted = [text for column in texts for text in column]
    assert (found[:, None] == found).tolist() == [[one == other for other in wanted] for one in wanted]
    assert all(map(torch.equal, batch.sentences[0][:3], plain.sentences[0][:3]))
    selected = hashed.select(torch.tensor([2, 0]))  # keeps the request
    assert torch.equal(torch.cat(selected.batch(torch.tensor([0, 1])).text_hashes), found[[0, 1, 3, 4]])


def test_a_selection_of_rows_keeps_their_data_in_the_order_asked_for(tokenizer: BertTokenizer):
    texts = ["one", "two words", "", "four " * 600]
    split = Split.tokenize(Examples(SST, list("abcd"), (texts,), [0, 1, 2, 3]), tokenizer)
    split = split.with_teacher(torch.arange(20.0).view(4, 5))
    found = split.select(torch.tensor([3, 0, 2]))
    assert (found.ids, found.labels.tolist(), found.truncated) == (["d", "a", "c"], [3, 0, 2], 1)
    assert torch.equal(found.teacher, split.teacher[[3, 0, 2]])
    ours, theirs = found.batch(torch.arange(3)), split.batch(torch.tensor([3, 0, 2]))
    assert all(map(torch.equal, ours.sentences[0][:3], theirs.sentences[0][:3]))


@pytest.mark.parametrize("labels", [torch.tensor([1, 0]), None])
def test_moving_a_batch_keeps_everything(labels: torch.Tensor | None):
    encoded = tuple(Encoded(*(torch.randint(9, (2, 3)) for _ in range(3))) for _ in range(2))
    vectors = (torch.randn(2, 4), torch.randn(2, 4))
    for batch in (
        Batch("sts", ["a", "b"], encoded, labels),
        Batch("sst", ["a", "b"], (), labels, vectors),
        Batch("sts", ["a", "b"], encoded, labels, text_hashes=(torch.tensor([1, 2]),) * 2, teacher=torch.randn(2, 1)),
    ):
        for device in ("cpu", "meta"):
            moved = batch.to(torch.device(device))
            assert (type(moved), moved.task, moved.ids) == (Batch, batch.task, batch.ids)
            for before, after in zip(tensors_of(batch), tensors_of(moved), strict=True):
                assert (after.device.type, after.dtype, after.shape) == (device, before.dtype, before.shape)
                assert device == "meta" or torch.equal(before, after)
            assert all(isinstance(sentence, Encoded) for sentence in moved.sentences)
            assert (moved.labels is None) == (labels is None)
            assert (moved.vectors is None) == (batch.vectors is None)


def tensors_of(batch: Batch) -> list[torch.Tensor]:
    labels = [t for t in (batch.labels, batch.teacher) if t is not None]
    sentences = [t for sentence in batch.sentences for t in sentence if t is not None]
    return sentences + labels + list(batch.vectors or ()) + [*batch.text_hashes]


# --- batches ----------------------------------------------------------------------------------------------------------


def padding_share(lengths: torch.Tensor, batches: list[list[int]]) -> float:
    padded = sum(lengths[rows].max().item() * len(rows) for rows in batches)
    return 1 - lengths.sum().item() / padded


@pytest.mark.parametrize(
    ("count", "batch_size", "pool"), [(1, 8, 50), (8, 8, 1), (1003, 8, 3), (1003, 7, 50), (5, 9, 1)]
)
def test_every_row_is_in_exactly_one_batch(count: int, batch_size: int, pool: int):
    lengths = torch.randint(3, 60, (count,), generator=torch.Generator().manual_seed(0))
    for batches in (
        bucketed_rows(lengths, batch_size, epoch_generator(0, 1), pool),
        sorted_rows(lengths, batch_size),
    ):
        assert sorted(row for rows in batches for row in rows) == list(range(count))
        assert max(map(len, batches)) <= batch_size
        assert len(batches) == -(-count // batch_size)


def test_batches_follow_from_seed_and_epoch_and_differ_between_epochs():
    lengths = torch.randint(3, 60, (1003,), generator=torch.Generator().manual_seed(0))

    def batches(seed: int, epoch: int) -> list[list[int]]:
        torch.rand(3)  # the global generator has no influence
        return [rows.tolist() for rows in bucketed_rows(lengths, 8, epoch_generator(seed, epoch))]

    def memberships(found: list[list[int]]) -> set[frozenset[int]]:
        return set(map(frozenset, found))

    assert batches(7, 1) == batches(7, 1)
    for other in (batches(7, 2), batches(8, 1)):
        assert other != batches(7, 1)
        shared = memberships(other) & memberships(batches(7, 1))
        assert len(shared) < 5  # new batches, not the old ones in another order


def test_a_source_that_starts_anew_is_shuffled_anew(tokenizer: BertTokenizer):
    """docs/PITFALLS.md, 6: a source that replays its first pass trains on the same batches over and over."""
    texts = [f"film {i}" for i in range(24)]
    split = Split.tokenize(Examples(SST, texts, (texts,), [i % 5 for i in range(24)]), tokenizer)
    for epoch in (1, 2):
        batches = [batch.ids for batch in itertools.islice(endless_batches(split, 8, 11711, epoch), 12)]
        passes = [batches[i : i + 3] for i in range(0, 12, 3)]
        assert all(sorted(itertools.chain(*found)) == sorted(texts) for found in passes)
        assert all(one != other for one, other in itertools.combinations(passes, 2))


def test_any_source_with_batches_can_be_passed_over_without_end():
    class Countdown:
        def __len__(self) -> int:
            return 2

        def batches(self, batch_size: int, generator: torch.Generator) -> Iterator[tuple[int, int]]:
            drawn = int(torch.randint(2**31, (), generator=generator))
            yield from ((batch_size, drawn), (batch_size, drawn))

    found = list(itertools.islice(endless_batches(Countdown(), 8, 11711, 1), 6))
    assert [size for size, _ in found] == [8] * 6
    draws = [drawn for _, drawn in found]
    assert (draws[0::2], len(set(draws))) == (draws[1::2], 3)  # each pass has random numbers of its own
    assert draws == [drawn for _, drawn in itertools.islice(endless_batches(Countdown(), 8, 11711, 1), 6)]


def test_the_batches_of_a_split_hold_its_own_rows(tokenizer: BertTokenizer):
    texts = [f"film {'very ' * (i % 5)}{i}" for i in range(20)]
    split = Split.tokenize(
        Examples(SST, [f"id{i}" for i in range(20)], (texts,), [i % 5 for i in range(20)]), tokenizer
    )
    found = list(split.batches(8, epoch_generator(0, 1)))
    assert sorted(len(batch.ids) for batch in found) == [4, 8, 8]
    rows = {
        (i, label, tuple(ids[: mask.sum()]))
        for batch in found
        for i, label, ids, mask in zip(
            batch.ids,
            batch.labels.tolist(),
            batch.sentences[0].token_ids.tolist(),
            batch.sentences[0].attention_mask,
            strict=True,
        )
    }
    encoded = tokenizer.encode_all(texts)
    assert rows == {(f"id{i}", i % 5, tuple(encoded[i].ids)) for i in range(20)}


def test_rows_of_similar_length_share_a_batch():
    lengths = torch.randint(3, 60, (1000,), generator=epoch_generator(0, 1))
    assert padding_share(lengths, bucketed_rows(lengths, 8, epoch_generator(0, 1))) < 0.05


@pytest.mark.parametrize("batch_size", [8, 16, 64])
def test_batches_hold_similar_lengths(batch_size: int, sst_lengths: torch.Tensor):
    share = padding_share(sst_lengths, bucketed_rows(sst_lengths, batch_size, epoch_generator(0, 1)))
    shuffled = torch.randperm(len(sst_lengths), generator=epoch_generator(0, 1)).split(batch_size)
    assert share < 0.05
    assert share < padding_share(sst_lengths, [rows.tolist() for rows in shuffled]) / 5


def test_long_and_short_batches_come_in_random_order(sst_lengths: torch.Tensor):
    means = torch.tensor([sst_lengths[b].float().mean() for b in bucketed_rows(sst_lengths, 8, epoch_generator(0, 1))])
    neighbors = torch.corrcoef(torch.stack((means[1:], means[:-1])))[0, 1].item()
    assert abs(neighbors) < 0.15  # four standard errors of 1,068 batches; sorted ones have more than 0.9


def test_sorted_rows_go_from_long_to_short_and_keep_the_order_of_ties():
    assert [rows.tolist() for rows in sorted_rows(torch.tensor([3, 9, 3, 5, 9]), 2)] == [[1, 4], [3, 0], [2]]


# --- batches by tokens ------------------------------------------------------------------------------------------------

COSTS = {
    "spread": torch.randint(3, 200, (1003,), generator=torch.Generator().manual_seed(0)),
    "short, with some long": torch.cat([torch.arange(1000) % 30 + 3, torch.full((9,), 512)]),
    "all alike": torch.full((103,), 17),
    "one row": torch.tensor([90]),
}
LIMITS = [1, 64, 600, 4096, 10**6]


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("case", COSTS)
def test_a_pass_by_tokens_has_every_row_once_within_the_limit_in_a_fixed_number_of_batches(case: str, limit: int):
    costs, counts = COSTS[case], set()
    for seed, epoch in itertools.product((1, 2), (1, 2, 3)):
        batches = bucketed_rows(costs, Tokens(limit), epoch_generator(seed, epoch))
        assert torch.cat(batches).sort().values.tolist() == list(range(len(costs)))
        assert all(len(rows) == 1 or len(rows) * int(costs[rows].max()) <= limit for rows in batches)
        counts.add(len(batches))
    assert counts == {count_batches(costs, Tokens(limit))}


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("case", COSTS)
def test_no_pass_by_tokens_could_have_fewer_batches(case: str, limit: int):
    """Batches of consecutive rows in order of length are best; the fewest of them, by dynamic programming."""
    costs = COSTS[case].sort().values.tolist()
    fewest = [0]  # for the first n rows
    for end in range(1, len(costs) + 1):
        most = max(1, limit // costs[end - 1])  # rows of a batch whose longest row is this one
        fewest.append(1 + fewest[max(0, end - most)])
    assert count_batches(COSTS[case], Tokens(limit)) == fewest[-1]


def test_batches_by_tokens_follow_from_seed_and_epoch_and_differ_between_epochs():
    def batches(seed: int, epoch: int) -> list[list[int]]:
        torch.rand(3)  # the global generator has no influence
        return [rows.tolist() for rows in bucketed_rows(COSTS["spread"], Tokens(600), epoch_generator(seed, epoch))]

    assert batches(7, 1) == batches(7, 1)
    for other in (batches(7, 2), batches(8, 1)):
        shared = set(map(frozenset, other)) & set(map(frozenset, batches(7, 1)))
        assert len(shared) < len(other) / 10, "new batches, not the old ones in another order"


@pytest.mark.parametrize("limit", [600, 4096])
def test_batches_by_tokens_have_little_padding_and_fill_the_limit(limit: int):
    costs = COSTS["spread"]
    batches = bucketed_rows(costs, Tokens(limit), epoch_generator(0, 1))
    assert padding_share(costs, batches) < 0.05
    filled = torch.tensor([len(rows) * costs[rows].max().item() / limit for rows in batches])
    assert filled.median() > 0.8


def test_long_and_short_batches_by_tokens_come_in_random_order():
    batches = bucketed_rows(COSTS["spread"], Tokens(600), epoch_generator(0, 1))
    longest = torch.tensor([float(COSTS["spread"][rows].max()) for rows in batches])
    assert abs(torch.corrcoef(torch.stack((longest[1:], longest[:-1])))[0, 1]) < 0.3  # four standard errors


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_the_tokens_of_a_pair_are_those_that_bert_computes(pairing: str, tokenizer: BertTokenizer):
    first = [f"film {'good ' * (i % 13)}" for i in range(60)]
    second = [f"is it {'very ' * (i * 5 % 17)}bad" for i in range(60)]
    examples = Examples(STS, [f"id{i}" for i in range(60)], (first, second), [i % 5 for i in range(60)])
    split = Split.tokenize(examples, tokenizer, PAIRINGS[pairing])
    batches = list(split.batches(Tokens(200), epoch_generator(0, 1)))
    computed = [stack(batch.sentences).token_ids.numel() for batch in batches]
    assert len(batches) == split.count_batches(Tokens(200))
    assert all(numel <= 200 for numel in computed)
    assert max(computed) > 150
    costs = {i: cost for i, cost in zip(split.ids, split.costs.tolist(), strict=True)}
    assert computed == [len(batch.ids) * max(costs[i] for i in batch.ids) for batch in batches]


def test_a_loss_that_compares_rows_needs_two_that_fit_together(capsys: pytest.CaptureFixture[str]):
    costs = torch.tensor([10, 20, 60])
    check_rows_meet(costs, 8, "--para_loss mnrl: mnrl")
    check_rows_meet(costs, Tokens(120), "--para_loss mnrl: mnrl")
    assert capsys.readouterr().err == ""
    check_rows_meet(costs, Tokens(119), "--para_loss mnrl: mnrl")
    assert "1 of 3 rows are alone in theirs. --max_tokens 120 leaves none alone." in capsys.readouterr().err
    with pytest.raises(InputError, match=r"no two rows fit into --max_tokens 19\. Use at least 120\."):
        check_rows_meet(costs, Tokens(19), "--para_loss mnrl: mnrl")


# --- the handout's data sets ------------------------------------------------------------------------------------------


def one_batch(dataset: SentenceClassificationDataset) -> dict[str, object]:
    (batch,) = DataLoader(dataset, batch_size=3, shuffle=False, collate_fn=dataset.collate_fn)
    assert len(dataset) == 3
    return batch


@pytest.fixture(scope="module")
def args(tiny_checkpoint: Path) -> argparse.Namespace:
    return argparse.Namespace(model=str(tiny_checkpoint), batch_size=3)


SINGLE = [("A good film .", 3, "a"), ("Bad .", 0, "b"), ("", 2, "c")]
DOUBLE = [("A film .", "The film .", 1, "a"), ("Bad .", "", 0, "b"), ("x", "A longer one , this .", 1, "c")]


def test_the_sentence_data_set_has_the_starters_keys(args: argparse.Namespace, tokenizer: BertTokenizer):
    batch = one_batch(SentenceClassificationDataset(SINGLE, args))
    assert set(batch) == {"token_ids", "token_type_ids", "attention_mask", "labels", "sents", "sent_ids"}
    sentences = [row[0] for row in SINGLE]
    wanted = padded(tokenizer, sentences)
    assert torch.equal(batch["token_ids"], wanted["input_ids"])
    assert torch.equal(batch["attention_mask"], wanted["attention_mask"])
    assert batch["labels"].dtype == torch.int64
    assert (batch["labels"].tolist(), batch["sents"], batch["sent_ids"]) == ([3, 0, 2], sentences, ["a", "b", "c"])


def test_the_sentence_test_set_has_the_starters_keys(args: argparse.Namespace):
    batch = one_batch(SentenceClassificationTestDataset([(text, i) for text, _, i in SINGLE], args))
    assert set(batch) == {"token_ids", "token_type_ids", "attention_mask", "sents", "sent_ids"}
    assert batch["sent_ids"] == ["a", "b", "c"]


PAIR_KEYS = {f"{name}_{n}" for name in ("token_ids", "token_type_ids", "attention_mask") for n in (1, 2)}


def test_the_pair_data_set_has_the_starters_keys(args: argparse.Namespace, tokenizer: BertTokenizer):
    batch = one_batch(SentencePairDataset(DOUBLE, args))
    assert set(batch) == PAIR_KEYS | {"labels", "sent_ids"}
    for n in (1, 2):
        wanted = padded(tokenizer, [row[n - 1] for row in DOUBLE])
        assert torch.equal(batch[f"token_ids_{n}"], wanted["input_ids"])
        assert torch.equal(batch[f"attention_mask_{n}"], wanted["attention_mask"])
        assert not batch[f"token_type_ids_{n}"].any()
    assert batch["labels"].dtype == torch.int64
    assert (batch["labels"].tolist(), batch["sent_ids"]) == ([1, 0, 1], ["a", "b", "c"])


def test_the_pair_test_set_has_the_starters_keys(args: argparse.Namespace):
    batch = one_batch(SentencePairTestDataset([(first, second, i) for first, second, _, i in DOUBLE], args))
    assert set(batch) == PAIR_KEYS | {"sent_ids"}
    assert batch["sent_ids"] == ["a", "b", "c"]


@pytest.mark.parametrize("keywords", [{}, {"isRegression": False}, {"isRegression": True}])
def test_fractional_labels_stay_fractions_whatever_is_regression_says(
    keywords: dict[str, bool], args: argparse.Namespace
):
    rows = [(*row[:2], label, row[3]) for row, label in zip(DOUBLE, (2.6, 0.0, 5.0), strict=True)]
    assert one_batch(SentencePairDataset(rows, args, **keywords))["labels"].tolist() == [2.6, 0.0, 5.0]
