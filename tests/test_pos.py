"""Part-of-speech features: the tagger against NLTK's own, tags by character, the cache, the model that uses them."""

import importlib.util
import json
import pickle
import random
import shutil
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import nltk
import numpy as np
import pytest
import torch
from conftest import ROOT, Finished, assert_refused, the_error, write_task_files
from nltk.tag.perceptron import PerceptronTagger
from nltk.tokenize import NLTKWordTokenizer
from torch import Tensor, nn

import multitask_classifier
import pos
from bert import BertModel
from datasets import PAIRINGS, SINGLE, Ragged, Split
from evaluation import predict, with_stored_vectors
from multitask_classifier import MultitaskBERT, get_args
from pos import (
    FEATURES,
    NOTHING,
    TAG_IDS,
    UNKNOWN,
    PosFeature,
    PosTagger,
    TaggingTokenizer,
    build_tokenizer,
    find_perceptron,
)
from readers import Examples, read_examples
from tasks import STS, TASKS, Encoded, stack
from tokenizer import BertTokenizer
from utils import InputError, Precision

pytestmark = pytest.mark.usefixtures("one_thread", "tags_offline")
FP32 = Precision("fp32", torch.device("cpu"))
# Texts in which words and word pieces differ: contractions, quotes, accents, brackets, scripts without spaces, [SEP].
TEXTS = [
    "I can't say that it's unbelievably good, but they cannot complain.",
    '"Who\'s there?" he asked -- twice (at least)...',
    "Café naïveté costs $3.88 in São Paulo; see http://x.org/a_b?c=1.",
    "",
    "中文 字 mixed with words",
    "gonna wanna ''quoted'' `tick`   spaces\tand e\u0301 accents",
    "A [SEP] in the text\u00adhyphen \u200b and a control \x7f sign .",
    "-lrb- treebank 's own -rrb- do n't",
    "Supercalifragilisticexpialidocious " * 3,
]


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> BertTokenizer:
    return BertTokenizer.from_pretrained(str(tiny_checkpoint))


@pytest.fixture
def tagger(tmp_path: Path) -> PosTagger:
    return PosTagger(find_perceptron("wheel"), tmp_path / "tags")


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the cache, so that find_perceptron searches again at every call."""
    monkeypatch.setattr(pos, "find_perceptron", find_perceptron.__wrapped__)


def sample_texts(count: int) -> list[str]:
    """The first `count` texts of each column of the sample files: English prose of all four tasks."""
    found: list[str] = []
    for task in TASKS.values():
        path = ROOT / "data" / "sample" / task.filename("train")
        if path.is_file():
            for column in read_examples(task, [path], labeled=True).texts:
                found += column[:count]
    return found


# --- the tagger -------------------------------------------------------------------------------------------------------


def test_tag_ids_never_change() -> None:
    """A checkpoint's embedding has one row per tag, so a changed id would break earlier checkpoints."""
    tags = sorted(set(TAG_IDS.values()))
    assert tags == list(range(2, 47))
    assert (NOTHING, UNKNOWN, pos.NUM_TAGS) == (0, 1, 47)
    some = {
        "CC": 2,
        "DT": 4,
        "JJ": 8,
        "NN": 13,
        "NNP": 14,
        "PRP": 19,
        "VB": 28,
        "VBZ": 33,
        "WRB": 37,
        ".": 44,
        "``": 46,
    }
    assert {tag: TAG_IDS[tag] for tag in some} == some
    assert (TAG_IDS["-LRB-"], TAG_IDS["-RRB-"]) == (TAG_IDS["("], TAG_IDS[")"])
    assert set(find_perceptron("wheel").tagger.classes) <= set(TAG_IDS), "no tag of the tagger is unknown"


def _tagged(oracle: PerceptronTagger, text: str) -> list[tuple[int, int, str]]:
    spans = list(NLTKWordTokenizer().span_tokenize(text))
    return [(*span, tag) for span, (_, tag) in zip(spans, oracle.tag([text[b:e] for b, e in spans]), strict=True)]


def write_nltk_data(folder: Path, weights: object, words: object, tags: object) -> Path:
    """Write a tagger's weights into the files that NLTK installs."""
    target = folder / "taggers" / pos.NLTK_DATA
    target.mkdir(parents=True)
    for part, value in {"weights": weights, "tagdict": words, "classes": sorted(tags)}.items():
        (target / f"{pos.NLTK_DATA}.{part}.json").write_text(json.dumps(value))
    return target


SMALL = {"bias": {"NN": 1.0}}, {"is": "VBZ"}, {"NN", "VBZ"}


def test_both_sources_tag_as_nltks_own_class_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = TEXTS + sample_texts(60)
    assert len(texts) > 300
    folder = Path(importlib.util.find_spec("textblob_aptagger").submodule_search_locations[0])
    oracle = PerceptronTagger(load=False)
    weights, oracle.tagdict, tags = pickle.loads((folder / pos.WHEEL_FILE).read_bytes())
    oracle.model.weights, oracle.classes, oracle.model.classes = weights, tags, tags
    wanted = [_tagged(oracle, text) for text in texts]
    write_nltk_data(tmp_path, weights, oracle.tagdict, tags)
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    ours = find_perceptron("wheel"), find_perceptron.__wrapped__("nltk")
    for perceptron in ours:
        words = pos.tag_words(perceptron.tagger, texts)
        assert words.counts.tolist() == [len(found) for found in wanted]
        found = zip(words.begins.tolist(), words.ends.tolist(), words.tags.tolist(), strict=True)
        assert list(found) == [(begin, end, TAG_IDS[tag]) for text in wanted for begin, end, tag in text]
    assert ours[0].fingerprint == ours[1].fingerprint


def test_a_tag_outside_the_treebank_is_unknown() -> None:
    strange = SimpleNamespace(tag=lambda words: [(word, "XYZ") for word in words])
    assert pos.tag_words(strange, ["two words", ""]).tags.tolist() == [UNKNOWN, UNKNOWN]


def test_several_processes_tag_as_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = TEXTS * 4
    alone = pos.tag_in_processes("wheel", texts, chunk=5)
    monkeypatch.setattr(pos, "CHARACTERS", 100)
    monkeypatch.setattr(pos, "tag_words", lambda *_: pytest.fail("this process shall not tag"))
    monkeypatch.setattr("joblib.cpu_count", lambda: 2)
    for found, wanted in zip(pos.tag_in_processes("wheel", texts, chunk=5), alone, strict=True):
        np.testing.assert_array_equal(found, wanted)


# --- the tagger's weights ---------------------------------------------------------------------------------------------


def test_the_wheels_code_never_runs() -> None:
    assert find_perceptron("wheel").source == "wheel"
    assert not [name for name in sys.modules if name.startswith("textblob")]


class Harmful:
    def __reduce__(self) -> tuple:
        return print, ("this must never be printed",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_the_unpickler_admits_nothing_but_sets(
    protocol: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.pickle"
    for harmful in (Harmful(), {"a": [Harmful()]}, print, frozenset("a"), np.float64(1), complex(1, 2)):
        path.write_bytes(pickle.dumps(harmful, protocol=protocol))
        if protocol >= 4 and isinstance(harmful, frozenset):
            continue  # has an opcode of its own there, and calls nothing
        with path.open("rb") as file, pytest.raises(pickle.UnpicklingError, match="only sets are allowed"):
            pos._SetUnpickler(file).load()
    assert capsys.readouterr().out == ""
    plain = ({"a": {"b": -1.5}}, ["c"], 3)
    path.write_bytes(pickle.dumps(plain, protocol=protocol))
    with path.open("rb") as file:
        assert pos._SetUnpickler(file).load() == plain


def test_the_unpickler_reads_a_set_as_python_2_wrote_it(tmp_path: Path) -> None:
    path = tmp_path / "x.pickle"
    path.write_bytes(pickle.dumps({"NN", "VB"}, protocol=2))
    with path.open("rb") as file:
        assert pos._SetUnpickler(file).load() == {"NN", "VB"}


def fake_wheel(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a package with the wheel's name that is found before the real one. Importing it would fail."""
    package = folder / pos.WHEEL_PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('its code must not run')\n")
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    return package / pos.WHEEL_FILE


def test_other_weights_than_the_published_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unloaded: None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = fake_wheel(tmp_path / "site", monkeypatch)
    with pytest.raises(InputError, match=r"no such file\. Install the wheel again"):
        pos.find_perceptron("wheel")
    path.write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(InputError, match="sha256 must be 1109164b3d28dce5"):
        pos.find_perceptron("wheel")
    assert capsys.readouterr().out == ""


def test_nltks_data_come_first_then_what_can_be_fetched_then_the_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unloaded: None
) -> None:
    assert pos.find_perceptron("auto").source == "wheel"
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    monkeypatch.setattr(pos, "_why_not_fetched", lambda: write_nltk_data(tmp_path, *SMALL) and "")
    assert pos.find_perceptron("auto").source == "nltk"
    monkeypatch.setattr(pos, "_why_not_fetched", lambda: pytest.fail("they are there"))
    assert pos.find_perceptron("auto").source == "nltk"
    assert pos.find_perceptron("wheel").source == "wheel"


def test_damaged_nltk_data_are_named_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unloaded: None
) -> None:
    folder = write_nltk_data(tmp_path, *SMALL)
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    (folder / f"{pos.NLTK_DATA}.weights.json").write_text('{"bias": {')
    with pytest.raises(InputError, match=r"cannot be read .*Run: .*--force, or use --pos_tagger wheel"):
        pos.find_perceptron("auto")


@pytest.mark.parametrize("answers", ["refuses", "is silent"])
def test_the_attempt_to_fetch_fails_fast(answers: str) -> None:
    with pytest.MonkeyPatch.context() as patch, socket.socket() as server:
        patch.setattr(pos, "PATIENCE", 0.3)
        server.bind(("127.0.0.1", 0))
        if answers == "is silent":
            server.listen()
        patch.setattr("nltk.downloader.Downloader.DEFAULT_URL", f"http://127.0.0.1:{server.getsockname()[1]}/index.xml")
        started = time.monotonic()
        assert REALLY_WHY_NOT_FETCHED() != ""
        assert time.monotonic() - started < 5


REALLY_WHY_NOT_FETCHED = pos._why_not_fetched  # before the fixtures replace it


# --- tags of word pieces ----------------------------------------------------------------------------------------------


def tags_by_character(perceptron: PerceptronTagger, text: str) -> list[int | None]:
    """The tag of the word that each character belongs to."""
    found: list[int | None] = [None] * len(text)
    for begin, end, tag in _tagged(perceptron, text):
        found[begin:end] = [TAG_IDS[tag]] * (end - begin)
    return found


def wanted_ids(tokenizer: BertTokenizer, perceptron: PerceptronTagger, *row: str) -> list[int]:
    (encoding,) = tokenizer.encode_all([row[0]], [row[1]] if len(row) == 2 else None)
    by_character = [tags_by_character(perceptron, text) for text in row]
    ids = []
    for column, (begin, _) in zip(encoding.sequence_ids, encoding.offsets, strict=True):
        ids.append(NOTHING if column is None else (by_character[column][begin] or UNKNOWN))
    return ids


def random_texts(count: int) -> list[str]:
    draw = random.Random(3)
    parts = [*"ab '\"`.,?!()[]-$%é“”\u2019\t1中", "can't", "gonna", " the ", " film ", "''", " it's", "[SEP]", "\u200b"]
    return ["".join(draw.choices(parts, k=draw.randrange(30))).strip() for _ in range(count)]


@pytest.mark.parametrize("max_length", [12, 512])
def test_a_piece_has_the_tag_of_the_word_in_which_it_begins(
    max_length: int, tokenizer: BertTokenizer, tagger: PosTagger
) -> None:
    tokenizer = TaggingTokenizer(BertTokenizer(tokenizer.vocabulary, max_length=max_length), tagger)
    first = TEXTS + random_texts(200)
    second = first[5:] + first[:5]
    tokenizer.prepare([first])
    perceptron = tagger.perceptron.tagger
    for columns in ((first,), (first, second), (second, first)):
        ragged = Ragged.tokenize(tokenizer, *columns)
        rows = [r.tolist() for r in ragged.pos_ids.split(ragged.lengths.tolist())]
        assert rows == [wanted_ids(tokenizer, perceptron, *row) for row in zip(*columns, strict=True)]


def test_contractions_and_specials_are_tagged_as_one_would_by_hand(tokenizer: BertTokenizer, tagger: PosTagger) -> None:
    text = "They can't see unbelievable films ."
    tagger.read([[text]])
    encoded = tokenizer.encode_all([text])
    found = dict(zip(encoded[0].tokens, tagger.align(encoded, [text]).tolist(), strict=True))
    names = {i: tag for tag, i in TAG_IDS.items()} | {NOTHING: "-"}
    wanted = {"[CLS]": "-", "they": "PRP", "can": "MD", "'": "RB", "t": "RB", "see": "VB", "unbelievable": "JJ"}
    assert {piece: names[i] for piece, i in found.items()} == wanted | {"films": "NNS", ".": ".", "[SEP]": "-"}


@pytest.mark.parametrize("lowercase", [True, False])
def test_a_tagging_tokenizer_encodes_like_its_own_tokenizer(
    lowercase: bool, tokenizer: BertTokenizer, tagger: PosTagger, tmp_path: Path
) -> None:
    plain = BertTokenizer(tokenizer.vocabulary, lowercase=lowercase, max_length=9)
    tagging = TaggingTokenizer(plain, tagger)
    texts = [*TEXTS, "UPPER Case"]
    for pairs in (None, texts[::-1]):
        assert [e.ids for e in tagging.encode_all(texts, pairs)] == [e.ids for e in plain.encode_all(texts, pairs)]
        assert plain.tags(plain.encode_all(texts, pairs), texts, pairs) is None
        tagging.prepare([texts])
        found = tagging.tags(tagging.encode_all(texts, pairs), texts, pairs)
        assert torch.equal(found, tagger.align(plain.encode_all(texts, pairs), texts, pairs))
    tagging.save_pretrained(tmp_path / "saved")
    assert BertTokenizer.from_pretrained(str(tmp_path / "saved")).lowercase == lowercase


def test_a_split_prepares_its_tokenizer_with_all_columns(tokenizer: BertTokenizer, tagger: PosTagger) -> None:
    split_of("para", tokenizer, "cross", tagger)
    assert set(tagger.words) == set(random_texts(24))


def test_texts_without_a_word_have_no_tags(tokenizer: BertTokenizer, tagger: PosTagger) -> None:
    tagger.read([["", " "]])
    assert tagger.align(tokenizer.encode_all(["", " "]), ["", " "]).tolist() == [NOTHING] * 4


# --- stored on disk ---------------------------------------------------------------------------------------------------


@pytest.fixture
def tagged(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The texts that were tagged, one list per call."""
    calls: list[list[str]] = []
    really = pos.tag_in_processes
    monkeypatch.setattr(pos, "tag_in_processes", lambda source, texts: (calls.append(texts), really(source, texts))[1])
    return calls


def ids_of(tagger: PosTagger, tokenizer: BertTokenizer, texts: list[str]) -> list[int]:
    tagger.read([texts])
    return tagger.align(tokenizer.encode_all(texts), texts).tolist()


def test_a_data_set_is_tagged_once(tagger: PosTagger, tokenizer: BertTokenizer, tagged: list[list[str]]) -> None:
    first = ids_of(tagger, tokenizer, TEXTS)
    again = PosTagger(tagger.perceptron, tagger.folder)
    assert ids_of(again, tokenizer, TEXTS) == first
    assert tagged == [TEXTS]
    ids_of(again, tokenizer, TEXTS[1:])
    other = PosTagger(tagger.perceptron._replace(fingerprint="of other weights"), tagger.folder)
    ids_of(other, tokenizer, TEXTS)
    assert tagged == [TEXTS, TEXTS[1:], TEXTS], "other texts or other weights are tagged again"
    assert len(list(tagger.folder.iterdir())) == 3


def test_a_repeated_text_is_tagged_once(tagger: PosTagger, tagged: list[list[str]]) -> None:
    tagger.read((["a film", "b"], ["b", "a film"]))
    assert tagged == [["a film", "b"]]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut off": lambda content: content[: len(content) // 2],
    "no archive": lambda content: b"not an archive",
    "a pickle": lambda content: pickle.dumps(Harmful()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_texts_of_a_damaged_file_are_tagged_again_with_a_note(
    damage: str, tagger: PosTagger, tokenizer: BertTokenizer, tagged: list, capsys: pytest.CaptureFixture[str]
) -> None:
    first = ids_of(tagger, tokenizer, TEXTS)
    (path,) = tagger.folder.iterdir()
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    assert ids_of(tagger, tokenizer, TEXTS) == first
    out, err = capsys.readouterr()
    assert err.startswith(f"note: {path}: the stored tags are damaged (")
    assert err.endswith("). Tagging the texts again.\n")
    assert (out, err.count("\n"), len(tagged)) == ("", 1, 2)
    assert ids_of(tagger, tokenizer, TEXTS) == first
    assert (capsys.readouterr().err, len(tagged)) == ("", 2), "the file was rewritten"


def test_no_changed_byte_changes_a_tag(tagger: PosTagger) -> None:
    texts = ["It's good.", ""]
    tagger.read([texts])
    (path,) = tagger.folder.iterdir()
    whole, wanted = path.read_bytes(), pos._read_words(path, 2)
    for place in range(0, len(whole), 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :])
        found = pos._read_words(path, 2)  # None: a note is printed, and the texts are tagged again
        assert found is None or all(map(np.array_equal, found, wanted))


def test_a_file_of_other_sizes_is_damaged(tagger: PosTagger, capsys: pytest.CaptureFixture[str]) -> None:
    tagger.read([TEXTS])
    (path,) = tagger.folder.iterdir()
    parts = dict(np.load(path))
    for name in ("counts", "begins", "tags"):
        np.savez(path, **parts | {name: parts[name][:-1]})
        tagger.read([TEXTS])
        assert "damaged (its sizes do not fit)" in capsys.readouterr().err


def test_tags_are_kept_whole_or_not_at_all(tagger: PosTagger, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: object, **parts: np.ndarray) -> None:
        file.write(b"half")
        raise OSError(28, "no space left")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(InputError, match=r"could not be written \(No space left on device\)"):
        tagger.read([TEXTS])
    assert list(tagger.folder.iterdir()) == []


def test_tags_are_stored_in_the_users_cache_directory_or_where_the_flag_says(
    tags_offline: Path, tmp_path: Path, tokenizer: BertTokenizer
) -> None:
    flags = {"feature": "pos", "pos_tagger": "wheel"}
    for cache, folder in ((None, tags_offline), (tmp_path / "here", tmp_path / "here")):
        built = build_tokenizer(SimpleNamespace(**flags, pos_cache=cache), tokenizer)
        assert isinstance(built, TaggingTokenizer)
        assert (built.tagger.folder, built.tagger.perceptron.source) == (folder, "wheel")
    assert build_tokenizer(SimpleNamespace(**flags | {"feature": "none"}, pos_cache=None), tokenizer) is tokenizer


@pytest.mark.slow
def test_the_course_data_cost_less_than_two_minutes_of_one_core(
    course_data: Path, tagger: PosTagger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measures the CPU time of one process, which other work on the machine hardly changes."""
    monkeypatch.setattr(pos, "CHARACTERS", 10**9)
    columns = [
        read_examples(task, [course_data / task.filename(split)], labeled=split != "test").texts
        for task in TASKS.values()
        for split in ("train", "dev", "test")
    ]
    started = time.process_time()
    for texts in columns:
        tagger.read(texts)
    seconds = time.process_time() - started
    print(f"{seconds:.0f} s of one core")
    assert seconds < 120


# --- rows and batches -------------------------------------------------------------------------------------------------


def split_of(task: str, tokenizer: BertTokenizer, pairing: str, tagger: PosTagger | None, rows: int = 12) -> Split:
    texts = random_texts(2 * rows)[::2], random_texts(2 * rows)[1::2]
    texts = texts[: len(TASKS[task].text_columns)]
    found = Examples(TASKS[task], [f"id{i}" for i in range(rows)], texts, [i % 2 for i in range(rows)])
    tokenizer = tokenizer if tagger is None else TaggingTokenizer(tokenizer, tagger)
    return Split.tokenize(found, tokenizer, PAIRINGS[pairing] if len(texts) == 2 else SINGLE)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_tags_stay_beside_their_tokens(pairing: str, tokenizer: BertTokenizer, tagger: PosTagger) -> None:
    split = split_of("para", tokenizer, pairing, tagger)
    rows = torch.tensor([7, 2, 9])
    for batch in (
        split.batch(rows),
        split.select(rows).batch(torch.arange(3)),
        split.batch(rows).to(torch.device("cpu")),
    ):
        together = stack(batch.sentences)
        assert together.pos_ids.shape == together.token_ids.shape
        assert together.pos_ids.dtype == torch.int64
        special = torch.isin(together.token_ids, torch.tensor([tokenizer.pad_token_id, tokenizer.cls_token_id]))
        assert not together.pos_ids[special].any()
        of_columns = {"bi": (2, 2), "cross": (3, 3), "both": (2, 2, 3, 3)}[pairing.removesuffix("_symmetric")]
        specials = torch.tensor(of_columns[: len(batch.sentences)]).repeat_interleave(len(rows))
        assert torch.equal((together.pos_ids > 0).sum(1), together.attention_mask.sum(1) - specials)
    texts = random_texts(24)[::2], random_texts(24)[1::2]
    firsts = (0, 1) if pairing.startswith("cross") else (0,)
    wanted = [wanted_ids(tokenizer, tagger.perceptron.tagger, *(texts[i][r] for i in firsts)) for r in rows.tolist()]
    found = split.batch(rows).sentences[0]
    real = [ids[mask.bool()].tolist() for ids, mask in zip(found.pos_ids, found.attention_mask, strict=True)]
    assert real == wanted


def test_without_a_tagger_there_are_no_tags(tokenizer: BertTokenizer) -> None:
    batch = split_of("para", tokenizer, "bi", None).batch(torch.arange(3))
    assert [s.pos_ids for s in (*batch.sentences, stack(batch.sentences))] == [None] * 3
    assert [s.pos_ids for s in batch.to(torch.device("cpu")).sentences] == [None] * 2


# --- the feature ------------------------------------------------------------------------------------------------------


def encoded(pos_ids: list[list[int]]) -> Encoded:
    ids = torch.tensor(pos_ids)
    return Encoded(ids, torch.ones_like(ids), torch.zeros_like(ids), ids)


def test_the_feature_is_the_papers_formula() -> None:
    """Compared with float64 NumPy: append the mean of the tags' embeddings, then project back."""
    torch.manual_seed(0)
    feature, vectors = PosFeature(6, 3).double(), torch.randn(3, 6).double()
    for parameter in feature.parameters():
        nn.init.normal_(parameter)
    rows = [[0, 5, 5, 46, 0, 0], [0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]]
    E, W, b = (p.detach().numpy() for p in feature.parameters())
    means = np.stack([np.mean([E[i] for i in row if i] or [np.zeros(3)], axis=0) for row in rows])
    wanted = np.concatenate([vectors.numpy(), means], axis=1) @ W.T + b
    np.testing.assert_allclose(feature(vectors, encoded(rows)).detach().numpy(), wanted, rtol=0, atol=1e-12)


Build = Callable[..., MultitaskBERT]


@pytest.fixture
def build(tiny_checkpoint: Path) -> Build:
    def build(large: bool = True, **flags: object) -> MultitaskBERT:
        """Build a model in eval mode. `large` makes its weights so large that every token matters."""
        torch.manual_seed(1)
        given = {"model": str(tiny_checkpoint), "option": "finetune", "feature": "pos", "pooling": "mean"} | flags
        model = MultitaskBERT(SimpleNamespace(**given))
        for name, parameter in model.named_parameters():
            if large and "norm" not in name:
                nn.init.normal_(parameter, std=0.3)
        return model.eval()

    return build


@torch.no_grad()
def logits_of(model: MultitaskBERT, split: Split, rows: Tensor) -> Tensor:
    return model.predict(split.batch(rows)).logits


@pytest.mark.parametrize("pairing", ["bi", "cross"])
def test_training_starts_from_the_model_without_tags(
    pairing: str, build: Build, tokenizer: BertTokenizer, tagger: PosTagger
) -> None:
    with_tags, without = (build(large=False, feature=feature, pairing=pairing) for feature in ("pos", "none"))
    for task in ("sst", "para"):
        split = split_of(task, tokenizer, pairing, tagger)
        found, wanted = (logits_of(model, split, torch.arange(12)) for model in (with_tags, without))
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def test_without_a_feature_a_checkpoint_is_what_it_was(build: Build) -> None:
    assert not [name for name in build(feature="none").state_dict() if name.startswith("feature")]
    names = [name for name in build().state_dict() if name.startswith("feature")]
    assert names == ["feature.embedding.weight", "feature.projection.weight", "feature.projection.bias"]


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_a_prediction_never_depends_on_its_batch(
    pairing: str, feature: str, build: Build, tokenizer: BertTokenizer, tagger: PosTagger
) -> None:
    model = build(pairing=pairing, feature=feature)
    generator = torch.Generator().manual_seed(2)
    for task in ("sst", "para", "sts"):
        split = split_of(task, tokenizer, pairing, tagger)
        alone = torch.cat([logits_of(model, split, torch.tensor([row])) for row in range(12)])
        assert alone.std(dim=0).min() > 1e-3, "rows must differ, or the test proves nothing"
        for size in (2, 5, 9, 12):
            rows = torch.randperm(12, generator=generator)[:size]
            torch.testing.assert_close(logits_of(model, split, rows), alone[rows], rtol=0, atol=1e-5)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_tags_change_what_the_model_says(
    pairing: str, build: Build, tokenizer: BertTokenizer, tagger: PosTagger
) -> None:
    model, split = build(pairing=pairing), split_of("sts", tokenizer, pairing, tagger)
    before = logits_of(model, split, torch.arange(12))
    other = tuple(column._replace(pos_ids=column.pos_ids.flip(0)) for column in split.columns)
    changed = logits_of(model, Split(STS, split.ids, other, None, 0, split.views), torch.arange(12))
    assert (before - changed).abs().max() > 1e-3


def test_every_weight_of_the_feature_learns_and_is_shared(
    build: Build, tokenizer: BertTokenizer, tagger: PosTagger
) -> None:
    model = build()
    shared = {id(p) for p in model.shared_parameters()}
    for task in ("sst", "para"):
        model.zero_grad()
        model.predict(split_of(task, tokenizer, "bi", tagger).batch(torch.arange(8))).logits.square().sum().backward()
        for parameter in model.feature.parameters():
            assert parameter.grad.abs().sum() > 0
            assert id(parameter) in shared, "gradient surgery sees it"


def test_the_starters_calls_have_no_tags_and_are_refused(build: Build) -> None:
    ids = torch.tensor([[101, 1037, 2143, 102]])
    mask = torch.ones_like(ids)
    model = build()
    calls = (
        lambda: model(ids, mask),
        lambda: model.predict_sentiment(ids, mask),
        lambda: model.predict_paraphrase(ids, mask, ids, mask),
        lambda: model.predict_similarity(ids, mask, ids, mask),
    )
    for call in calls:
        with pytest.raises(InputError, match=r"--feature pos needs part-of-speech tags.*Use model\.predict on a batch"):
            call()


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_a_frozen_encoders_vectors_are_stored_before_the_feature(
    pairing: str, build: Build, tokenizer: BertTokenizer, tagger: PosTagger, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(option="pretrain", pairing=pairing)
    assert model.vectors_are_fixed
    assert all(p.requires_grad for p in model.feature.parameters())
    split = split_of("para", tokenizer, pairing, tagger)
    wanted = predict(model, split, 5, FP32).logits
    stored = with_stored_vectors(model, split, 5, FP32)
    monkeypatch.setattr(BertModel, "encode", lambda *_: pytest.fail("the encoder shall not run again"))
    np.testing.assert_allclose(predict(model, stored, 5, FP32).logits, wanted, rtol=0, atol=1e-5)
    output = model.predict(stored.batch(torch.arange(4)))
    output.logits.sum().backward()
    assert model.feature.embedding.weight.grad.abs().sum() > 0
    with torch.no_grad():
        model.feature.projection.weight += 1
    assert not np.allclose(predict(model, stored, 5, FP32).logits, wanted, atol=1e-3), "the feature comes after"


def test_stored_vectors_travel_alone_where_no_tags_are_read(build: Build, tokenizer: BertTokenizer) -> None:
    model = build(option="pretrain", feature="none")
    stored = with_stored_vectors(model, split_of("para", tokenizer, "bi", None), 5, FP32)
    assert stored.batch(torch.arange(4)).sentences == ()
    with pytest.raises(InputError, match="needs part-of-speech tags"):
        build(option="pretrain").predict(stored.batch(torch.arange(4)))


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_a_second_pass_on_the_same_embeddings_says_the_same(
    pairing: str, build: Build, tokenizer: BertTokenizer, tagger: PosTagger
) -> None:
    """SMART relies on this."""
    model = build(pairing=pairing, hidden_dropout_prob=0.5).train()
    batch = split_of("para", tokenizer, pairing, tagger).batch(torch.arange(6))
    first = model.predict(batch)
    again = model.predict(batch, first.embeddings, first.random_state)
    torch.testing.assert_close(again.logits, first.logits)
    assert not torch.allclose(model.predict(batch).logits, first.logits), "dropout is on"


# --- the script -------------------------------------------------------------------------------------------------------

Classify = Callable[..., Finished]


@pytest.fixture
def classify(
    tiny_checkpoint: Path,
    tmp_path: Path,
    run_main: Callable[..., Finished],
) -> Classify:
    """Run multitask_classifier.py in this process, with --feature pos."""
    write_task_files(tmp_path / "data")

    def run(*more: object) -> Finished:
        given = {"--model": tiny_checkpoint, "--data": tmp_path / "data", "--runs": tmp_path / "runs", "--name": "r"}
        given |= {"--predictions": tmp_path / "predictions", "--epochs": 1, "--feature": "pos"}
        flags = [str(part) for pair in given.items() for part in pair]
        return run_main(multitask_classifier, *flags, *more)

    return run


def test_a_run_trains_predicts_again_and_goes_on(classify: Classify, tmp_path: Path, tags_offline: Path) -> None:
    lively = ("--option", "finetune", "--lr", "1e-2")
    found = classify(*lively)
    assert found.status == 0, found.err
    assert "| feature pos, tagger wheel\n" in found.out
    stored = {path.name for path in tags_offline.iterdir()}
    assert stored
    facts = json.loads((tmp_path / "runs" / "r" / "args.json").read_text())["args"]
    assert (facts["feature"], facts["pos_tagger"], facts["pos_dim"]) == ("pos", "wheel", 32)
    wanted = {path.name: path.read_bytes() for path in (tmp_path / "predictions").glob("*.csv")}
    shutil.rmtree(tmp_path / "predictions")
    assert classify("--predict_only", "--run", tmp_path / "runs" / "r").status == 0
    assert {path.name for path in tags_offline.iterdir()} == stored, "nothing was tagged again"
    assert {path.name: path.read_bytes() for path in (tmp_path / "predictions").glob("*.csv")} == wanted
    assert classify("--predict_only", "--predict_train", "--run", tmp_path / "runs" / "r").status == 0
    assert (tmp_path / "runs" / "r" / "sts-train.npz").is_file()
    again = classify(*lively, "--resume", "--pos_cache", tmp_path / "elsewhere")
    assert again.status == 0, again.err


def test_a_run_goes_on_only_with_its_own_tagger(
    classify: Classify, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert classify().status == 0
    write_nltk_data(tmp_path / "nltk", *SMALL)
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "nltk")])
    monkeypatch.setattr(pos, "find_perceptron", find_perceptron.__wrapped__)
    error = the_error(classify("--resume"))
    assert "was started with --pos_tagger wheel (now nltk)" in error


def test_an_encoder_trained_with_tags_can_be_taken_further(classify: Classify, tmp_path: Path) -> None:
    assert classify("--option", "finetune").status == 0
    found = classify("--name", "s", "--model", tmp_path / "runs" / "r", "--feature", "none")
    assert found.status == 0, found.err
    assert f"note: {tmp_path / 'runs' / 'r'}: only the encoder is used, not its feature, heads.\n" in found.err


@pytest.mark.parametrize(
    "flags",
    [
        "--option pretrain",
        "--option pretrain --sts_head cosine",  # the feature learns, though this head does not
        "--option finetune --pairing cross --symmetric --regularizer smart+bregman",
        "--option finetune --combiner pcgrad --sampler combined",
        "--option finetune --regularizer rdrop --share_pair_layer --averager ema",
    ],
)
def test_it_goes_with_everything_else(flags: str, classify: Classify) -> None:
    found = classify("--dry_run", *flags.split())
    assert found.status == 0, found.err
    assert "dry run: two steps of everything went through" in found.out


def test_neither_weights_nor_a_network_ends_in_one_line_with_both_remedies(
    classify: Classify, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unloaded: None
) -> None:
    monkeypatch.setattr(pos, "_why_not_fetched", REALLY_WHY_NOT_FETCHED)
    monkeypatch.setattr("nltk.downloader.Downloader.DEFAULT_URL", "http://127.0.0.1:9/index.xml")
    really = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == pos.WHEEL_PACKAGE else really(name, *more)
    )
    for source in ("auto", "nltk", "wheel"):
        started = time.monotonic()
        found = classify("--pos_tagger", source)
        assert time.monotonic() - started < 10
        remedies = "python -m nltk.downloader averaged_perceptron_tagger_eng", "source setup.sh"
        assert_refused(found, tmp_path, "--feature pos needs a tagger's weights", *remedies)


def test_a_cache_that_cannot_be_written_is_refused(classify: Classify, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    error = the_error(classify("--pos_cache", tmp_path / "file" / "tags"))
    assert "--pos_cache" in error
    assert "must be a writable directory" in error


@pytest.mark.parametrize("flag", ["--pos_dim 8", "--pos_tagger wheel", "--pos_cache x"])
def test_a_flag_without_its_feature_is_refused(flag: str) -> None:
    with pytest.raises(InputError, match=rf"^{flag} needs --feature pos\. Use --feature pos\, or leave out"):
        get_args(flag.split())
