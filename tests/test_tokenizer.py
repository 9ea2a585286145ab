"""The tokenizer against `transformers`' on every sentence and pair of the course's data, and at the edges."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from conftest import COURSE_TASKS

from base_bert import find_checkpoint
from bert import BertModel
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
    found = ours.encode_all(*columns)
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
    (encoded,) = ours.encode_all(["one " * first], ["two " * second])
    assert len(encoded.ids) == min(512, first + second + 3)
    assert bool(encoded.overflowing) == (first + second + 3 > 512)


SETTINGS = [
    {},
    {"padding": True},
    {"padding": "longest", "truncation": True},
    {"max_length": 6},
    {"max_length": 6, "truncation": False},
    {"max_length": 6, "padding": True},
    {"max_length": 6, "padding": "max_length", "truncation": True},
    {"max_length": 200, "padding": "max_length"},
    {"padding": "max_length", "truncation": "longest_first"},
    {"padding": "do_not_pad", "truncation": "do_not_truncate"},
    {"add_special_tokens": False},
    {"return_token_type_ids": False, "return_attention_mask": False},
    {"return_tensors": "pt", "padding": True, "truncation": True},
    {"return_tensors": "pt", "padding": "max_length", "max_length": 130, "truncation": True},
]
INPUTS = {
    "a text": ("A fine film , isn't it ?",),
    "a pair": ("A fine film , isn't it ?", "No, unwatchable drivel."),
    "texts": (ODD,),
    "pairs": (ODD, ODD[::-1]),
}


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: ",".join(f"{k}={v}" for k, v in s.items()) or "defaults")
@pytest.mark.parametrize("inputs", INPUTS)
def test_a_call_returns_what_transformers_returns(ours, theirs, inputs: str, settings: dict) -> None:
    found, expected = ours(*INPUTS[inputs], **settings), theirs(*INPUTS[inputs], **settings)
    assert found.keys() == expected.keys()
    for key in found:
        if settings.get("return_tensors"):
            assert torch.equal(found[key], expected[key])
        else:
            assert found[key] == expected[key]
        assert getattr(found, key) is found[key]
    if settings.get("return_tensors"):
        assert torch.equal(found.to("cpu").input_ids, expected["input_ids"])


@pytest.mark.parametrize("strategy", ["only_first", "only_second"])
def test_one_side_of_a_pair_can_be_cut_as_by_transformers(ours, theirs, strategy: str) -> None:
    pair = "one " * 20, "two " * 20
    settings = {"truncation": strategy, "max_length": 30}
    assert ours(*pair, **settings)["input_ids"] == theirs(*pair, **settings)["input_ids"]


def test_calls_do_not_change_how_the_suite_encodes(ours) -> None:
    before = [e.ids for e in ours.encode_all(["one two three four"])]
    ours("one two three four", max_length=3, truncation=True, padding="max_length")
    assert [e.ids for e in ours.encode_all(["one two three four"])] == before


@pytest.mark.parametrize("text", ODD)
def test_the_starters_methods_are_those_of_transformers(ours, theirs, text: str) -> None:
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    other = f"{text[::-1]} end"  # transformers takes an empty second text for none
    assert ours.encode(text, other, max_length=9, truncation=True) == theirs.encode(
        text, other, max_length=9, truncation=True
    )
    assert torch.equal(ours.encode(text, return_tensors="pt"), theirs.encode(text, return_tensors="pt"))
    pieces = ours.tokenize(text)
    assert pieces == theirs.tokenize(text)
    assert ours.convert_tokens_to_ids(pieces) == theirs.convert_tokens_to_ids(pieces) == ids[1:-1]
    assert ours.convert_tokens_to_string(pieces) == theirs.convert_tokens_to_string(pieces)
    for skip in (False, True):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
        assert ours.batch_decode(torch.tensor([ids]), skip_special_tokens=skip) == [
            theirs.decode(ids, skip_special_tokens=skip)
        ]
        assert ours.convert_ids_to_tokens(torch.tensor(ids), skip_special_tokens=skip) == theirs.convert_ids_to_tokens(
            ids, skip_special_tokens=skip
        )
    assert ours.encode_plus(text, padding="max_length", max_length=150) == dict(
        theirs(text, padding="max_length", max_length=150)
    )


def test_the_vocabulary_and_the_special_tokens_are_those_of_transformers(ours, theirs) -> None:
    for kind in ("pad", "unk", "cls", "sep", "mask"):
        for name in (f"{kind}_token", f"{kind}_token_id"):
            assert getattr(ours, name) == getattr(theirs, name)
    assert set(ours.all_special_tokens) == set(theirs.all_special_tokens)
    assert set(ours.all_special_ids) == set(theirs.all_special_ids)
    assert (ours.vocab_size, len(ours), ours.model_max_length) == (theirs.vocab_size, len(theirs), 512)
    assert ours.get_vocab() == ours.vocab == theirs.get_vocab()
    assert ours.convert_tokens_to_ids("unheard-of") == theirs.convert_tokens_to_ids("unheard-of") == 100
    assert ours.convert_ids_to_tokens(2023) == theirs.convert_ids_to_tokens(2023)
    assert ours.decode(2023) == theirs.decode(2023)


def test_a_batch_of_texts_or_tuples_can_be_encoded_by_the_old_name(ours, theirs) -> None:
    texts, pairs = ["a film", "no"], [("a film", "no"), ("two", "three words")]
    assert ours.batch_encode_plus(texts, padding=True) == dict(theirs(texts, padding=True))
    assert ours.batch_encode_plus(pairs) == dict(theirs([a for a, _ in pairs], [b for _, b in pairs]))


@pytest.mark.parametrize(
    ("texts", "settings", "message"),
    [
        (["a"], {"return_tensors": "np"}, "return_tensors must be"),
        (["a"], {"padding": "left"}, "padding must be"),
        (["a", "b c"], {"return_tensors": "pt"}, "Add padding=True"),
    ],
)
def test_a_setting_that_is_not_supported_is_refused(ours, texts: list, settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ours(texts, **settings)


def test_encode_refuses_a_list(ours) -> None:
    with pytest.raises(ValueError, match="encode takes one text, found a list"):
        ours.encode(["a", "b"])


def test_pairs_of_unequal_number_are_refused(ours) -> None:
    with pytest.raises(ValueError, match="shorter"):
        ours.encode_all(["a", "b"], ["c"])


def test_a_saved_tokenizer_loads_again_here_and_in_transformers(ours, theirs, tmp_path: Path) -> None:
    ours.save_pretrained(tmp_path)
    again = BertTokenizer.from_pretrained(str(tmp_path))
    assert again.vocabulary == ours.vocabulary
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path, config=transformers.BertConfig())
    assert loaded(ODD)["input_ids"] == [e.ids for e in again.encode_all(ODD)]


def test_the_vocabulary_may_come_out_of_tokenizer_json_alone(ours, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((find_checkpoint("minilm") / "tokenizer.json").read_bytes())
    assert read_vocabulary(tmp_path) == ours.vocabulary


def test_a_cased_checkpoint_keeps_case(ours, tmp_path: Path) -> None:
    ours.save_pretrained(tmp_path)
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace("true", "false"))
    cased = BertTokenizer.from_pretrained(str(tmp_path))
    assert cased.encode_all(["Film"])[0].ids == [ours.cls_token_id, ours.unk_token_id, ours.sep_token_id]
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
    assert len(short.encode_all(["one " * 100])[0].ids) == length
    short.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())
    assert saved == {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": positions}


@pytest.mark.parametrize(
    ("positions", "stated", "most"),
    [(16, 512, 16), (512, 16, 16), (512, None, 512), (1024, 10**30, 1024), (1024, 600, 600), (512, 1e30, 512)],
)
def test_the_maximum_is_what_the_checkpoint_supports(
    ours, positions: int, stated: float | None, most: int, tmp_path: Path
) -> None:
    ours.save_pretrained(tmp_path)
    write_config(tmp_path, max_position_embeddings=positions)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": stated}))
    found = BertTokenizer.from_pretrained(tmp_path)
    assert (found.max_length, found.model_max_length) == (most, most)
    assert len(found.encode_all(["one " * 2000])[0].ids) == most
    assert len(found.encode("one " * 2000, truncation=True)) == most
    assert BertTokenizer.from_pretrained(tmp_path, max_length=5000).max_length == most


@pytest.mark.parametrize("stated", [2, -1, "long", [512]])
def test_a_maximum_that_makes_no_sense_is_refused(ours, stated: object, tmp_path: Path) -> None:
    ours.save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": stated}))
    with pytest.raises(InputError, match="its tokenizer files are damaged"):
        BertTokenizer.from_pretrained(tmp_path)


def test_fewer_pieces_than_rows_of_the_embedding_matrix_are_fine(ours, tmp_path: Path) -> None:
    """Padded matrices: 30,528 rows for 30,522 pieces, so that the width is a multiple of 64."""
    ours.save_pretrained(tmp_path)
    shape = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64)
    torch.manual_seed(0)
    theirs = transformers.BertModel(transformers.BertConfig(**shape, vocab_size=30528)).eval()
    theirs.save_pretrained(tmp_path)
    inputs = BertTokenizer.from_pretrained(tmp_path)(ODD, return_tensors="pt", padding=True)
    model = BertModel.from_pretrained(tmp_path)
    found, expected = model(**inputs), theirs(**inputs)
    torch.testing.assert_close(found["pooler_output"], expected["pooler_output"], atol=1e-5, rtol=0)
    model.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["vocab_size"] == 30528


def test_a_vocabulary_with_missing_ids_is_refused_instead_of_shifted(tmp_path: Path) -> None:
    pieces = {piece: i for i, piece in enumerate([*SPECIAL_TOKENS, "film"])} | {"good": 7}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": pieces}}))
    with pytest.raises(InputError, match=r"the ids in tokenizer\.json are not 0, 1, 2"):
        BertTokenizer.from_pretrained(tmp_path)


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
    with pytest.raises(InputError, match="its 30522 word pieces must fit a vocab_size of 30521"):
        BertTokenizer.from_pretrained(str(tmp_path))
