"""The tokenizer against `transformers`' on every sentence and pair of the course's data, and at the edges."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from conftest import COURSE_TASKS

from base_bert import find_checkpoint
from datasets import read_examples
from tasks import TASKS
from tokenizer import SPECIAL_TOKENS, BertTokenizer, read_vocabulary
from utils import InputError

ODD = [
    "",
    "   ",
    "Crème brûlée, naïve façade — “quoted” … ½ ™ ﬁne",
    "東京タワー and 北京 , mixed中文text",
    "tab\tand\u00a0no-break\u200bspace\u2028line",
    "[MASK] [SEP] [CLS] in the text",
    "e" * 101 + " " + "e" * 100,
    "emoji 😀👍🏽 and a control \x07 character",
    "İstanbul ß ﬀ Σίσυφος",
    "don't   can't  U.S.A. 3.14 a_b #tag @name",
    "\ufffd replacement",
]


@pytest.fixture(scope="module")
def ours() -> BertTokenizer:
    return BertTokenizer.from_pretrained("minilm")


@pytest.fixture(scope="module")
def theirs() -> transformers.BertTokenizer:
    return transformers.BertTokenizer.from_pretrained(find_checkpoint("minilm"), model_max_length=512)


def assert_identical(ours: BertTokenizer, theirs: transformers.BertTokenizer, *columns: list[str]) -> None:
    found = ours.encode(*columns)
    expected = theirs(*columns, truncation="longest_first", max_length=512)
    assert [e.ids for e in found] == expected["input_ids"]
    assert [e.type_ids for e in found] == expected["token_type_ids"]


@pytest.mark.parametrize("task", sorted(COURSE_TASKS))
@pytest.mark.parametrize("split", ["train", "dev", "test"])
def test_every_sentence_and_pair_of_the_course_is_encoded_as_by_transformers(
    course_data: Path, ours, theirs, task: str, split: str
) -> None:
    examples = read_examples(TASKS[task], [course_data / TASKS[task].filename(split)], labeled=split != "test")
    for column in examples.texts:
        assert_identical(ours, theirs, column)
    if len(examples.texts) == 2:
        assert_identical(ours, theirs, *examples.texts)


def test_odd_text_is_encoded_as_by_transformers(ours, theirs) -> None:
    assert_identical(ours, theirs, ODD)
    assert_identical(ours, theirs, ODD, ODD[::-1])


@pytest.mark.parametrize(("first", "second"), [(600, 10), (10, 600), (600, 600), (300, 250), (255, 255), (254, 255)])
def test_long_pairs_are_cut_longest_first_as_by_transformers(ours, theirs, first: int, second: int) -> None:
    assert_identical(ours, theirs, ["one " * first], ["two " * second])
    (encoded,) = ours.encode(["one " * first], ["two " * second])
    assert len(encoded.ids) == min(512, first + second + 3)
    assert bool(encoded.overflowing) == (first + second + 3 > 512)


def test_calling_it_pads_to_the_longest_and_masks_the_padding(ours, theirs) -> None:
    found, expected = ours(ODD, ODD[::-1]), theirs(ODD, ODD[::-1], return_tensors="pt", padding=True)
    assert found.keys() == expected.keys()
    for key in found:
        assert torch.equal(found[key], expected[key])


def test_the_starters_keywords_are_accepted_and_others_refused(ours) -> None:
    assert ours(["a"], return_tensors="pt", padding=True, truncation=True)["input_ids"].shape == (1, 3)
    with pytest.raises(ValueError, match="encode"):
        ours(["a"], padding=False)
    for other in ({"truncation": False}, {"return_tensors": "np"}):
        with pytest.raises(ValueError, match="encode"):
            ours(["a"], **other)


def test_pairs_of_unequal_number_are_refused(ours) -> None:
    with pytest.raises(ValueError, match="shorter"):
        ours.encode(["a", "b"], ["c"])


def test_a_saved_tokenizer_loads_again_here_and_in_transformers(ours, theirs, tmp_path: Path) -> None:
    ours.save_pretrained(tmp_path)
    again = BertTokenizer.from_pretrained(str(tmp_path))
    assert again.vocabulary == ours.vocabulary
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path, config=transformers.BertConfig())
    assert loaded(ODD)["input_ids"] == [e.ids for e in again.encode(ODD)]


def test_the_vocabulary_may_come_out_of_tokenizer_json_alone(ours, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((find_checkpoint("minilm") / "tokenizer.json").read_bytes())
    assert read_vocabulary(tmp_path) == ours.vocabulary


def test_a_cased_checkpoint_keeps_case(ours, tmp_path: Path) -> None:
    ours.save_pretrained(tmp_path)
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace("true", "false"))
    cased = BertTokenizer.from_pretrained(str(tmp_path))
    assert cased.encode(["Film"])[0].ids == [ours.cls_token_id, ours.unk_token_id, ours.sep_token_id]
    theirs = transformers.BertTokenizer.from_pretrained(tmp_path, do_lower_case=False)
    assert_identical(cased, theirs, ODD)  # accents are kept as well
    cased.save_pretrained(tmp_path / "again")
    assert not BertTokenizer.from_pretrained(str(tmp_path / "again")).lowercase


@pytest.mark.parametrize("settings", [None, {}])
def test_a_checkpoint_that_says_nothing_of_case_is_uncased(ours, settings: dict | None, tmp_path: Path) -> None:
    ours.save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    if settings is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert BertTokenizer.from_pretrained(str(tmp_path)).lowercase


def write_config(folder: Path, **changes: int) -> None:
    config = json.loads((find_checkpoint("minilm") / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize(("asked", "positions", "length"), [(512, 16, 16), (8, 16, 8), (8, 512, 8)])
def test_a_text_is_cut_to_what_is_asked_for_and_to_the_positions_of_bert(
    ours, asked: int, positions: int, length: int, tmp_path: Path
) -> None:
    ours.save_pretrained(tmp_path)
    write_config(tmp_path, max_position_embeddings=positions)
    short = BertTokenizer.from_pretrained(str(tmp_path), max_length=asked)
    assert len(short.encode(["one " * 100])[0].ids) == length
    short.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())
    assert saved == {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": length}


def test_a_line_of_the_vocabulary_is_a_piece_whatever_it_holds(tmp_path: Path) -> None:
    """Only \\n ends a line: real vocabularies contain pieces that str.splitlines takes for line ends."""
    pieces = [*SPECIAL_TOKENS, "\u2028", "\u00a0", "\x85", "a b", "film"]
    BertTokenizer(pieces).save_pretrained(tmp_path)
    assert read_vocabulary(tmp_path) == pieces


def test_a_vocabulary_without_a_special_token_or_larger_than_the_embeddings_is_refused(ours, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"\[MASK\] not found"):
        BertTokenizer([token for token in ours.vocabulary if token != "[MASK]"])
    ours.save_pretrained(tmp_path)
    write_config(tmp_path, vocab_size=30521)
    with pytest.raises(InputError, match="30522 word pieces do not fit a vocab_size of 30521"):
        BertTokenizer.from_pretrained(str(tmp_path))
