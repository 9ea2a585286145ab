"""Files that someone else wrote, or that are damaged: each is read or refused in one line.

The second half mutates a valid file of every kind with Hypothesis. By default some hundreds of files are tried; with
`-m slow` more than 10,000, and the test prints how many were refused.
"""

import contextlib
import copy
import gzip
import io
import json
import os
import pickle
import random
import shutil
import signal
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import ROOT, nli_line, write_task_files
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import base_bert
import ensemble
import evaluation
import manifest
import multitask_classifier
import multitask_flags
import pretrain
import submission
import sweep
from bert import BertModel
from config import BertConfig
from corpus import read_text
from flags import FromRecipe, check_stored
from members import chosen_on_dev, read_member
from readers import read_examples
from runs import Run
from tasks import PARA, SST, STS, Predictions
from tokenizer import BertTokenizer
from utils import LONGEST_MESSAGE, InputError, read_arrays, read_json

OLDER_RUN = ROOT / "tests" / "references" / "older_run"
DEEP = "[" * 200_000 + "]" * 200_000

pytestmark = pytest.mark.usefixtures("one_thread")


def refusal(read: Callable[[], Any]) -> str:
    """The message with which a file is refused."""
    with pytest.raises(InputError) as refused:
        read()
    message = str(refused.value)
    assert "\n" not in message
    assert len(message) <= LONGEST_MESSAGE
    return message


def part_2(*words: str) -> Any:
    return multitask_classifier.get_args(list(words))


# --- recipes ----------------------------------------------------------------------------------------------------------

SECRET = "s3cr3t-0f-mine"
SCRIPTS = {  # command lines that take a recipe in every place where one can stand
    "alone": lambda recipe: part_2(recipe),
    "after a flag that needs a value": lambda recipe: part_2("--lr", recipe),
    "after a flag with several values": lambda recipe: part_2("--sst_train", recipe),
    "as a name": lambda recipe: part_2("--name", recipe),
    "for another script": lambda recipe: pretrain.get_args([recipe]),
    "with names of runs": lambda recipe: ensemble.get_args(["runs/a", "runs/b", recipe]),
    "as all runs": lambda recipe: ensemble.get_args([recipe]),
    "as a search": lambda recipe: sweep_flags("--search", recipe),
    "for all trials": lambda recipe: sweep_flags("--search", "lr=1e-4,1e-5", "--", recipe),
}
FORMS = [
    "{}",
    "--{}",
    "-{}",
    "@{}",
    "--{}={}",
    "--unknown={}",
    "{}/{}:x",
    "--sst_lr {}",
    "--UPPER {}",
    "{}:x:0:0:{}:/bin",
]


def sweep_flags(*words: str) -> Any:
    import trials

    return trials.with_trials(sweep.get_args(list(words)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", SCRIPTS)
def test_the_text_of_a_file_that_is_not_a_recipe_is_never_shown(
    place: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "private.txt"
    for text in (form + "\n", "--seed 3\n" + form, "# a comment\n\n" + form + "\nmore " + form, "--use_gpu " + form):
        path.write_text(text.replace("{}", SECRET))
        message = refusal(lambda: SCRIPTS[place](f"@{path}"))
        assert SECRET not in message
        assert SECRET not in capsys.readouterr().err


def test_a_line_of_a_file_that_is_not_a_recipe_is_named() -> None:
    assert refusal(lambda: part_2("@/etc/passwd")).startswith("/etc/passwd line 1 is not a flag. A recipe must consist")


def test_an_unknown_flag_of_a_recipe_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "recipe.txt"
    path.write_text("# comment\n--lr 1e-4\n--epoch 3\n")
    message = refusal(lambda: part_2(f"@{path}"))
    assert message.startswith(f"unknown flag --epoch. Did you mean --epochs? It is in {path} line 3;")


UNREADABLE = {
    "latin-1": ("--name caf\xe9\n".encode("latin-1"), "it is not UTF-8 text"),
    "UTF-16": ("--lr 1e-4\n".encode("utf-16"), "it is not UTF-8 text"),
    "UTF-16 without a mark": ("--lr 1e-4\n".encode("utf-16-le"), "line 1: must be text, found a NUL byte"),
    "a NUL byte": (b"--seed 3\n--name a\0b\n", "line 2: must be text, found a NUL byte"),
    "a long word": (b"--name " + b"x" * 5000, "line 1: a word must have at most 4096 characters, found 5000"),
    "a large file": (b"#" * 2**21, "a recipe must have at most 1048576 bytes, found 2097152"),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_recipe_that_is_not_plain_text_is_refused(kind: str, tmp_path: Path) -> None:
    content, part = UNREADABLE[kind]
    (tmp_path / "recipe.txt").write_bytes(content)
    assert part in refusal(lambda: part_2(f"@{tmp_path / 'recipe.txt'}"))


def test_a_recipe_that_includes_itself_under_another_name_is_refused(tmp_path: Path) -> None:
    one, other = tmp_path / "one.txt", tmp_path / "other.txt"
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.txt").symlink_to(one)
    for include in ("@folder/../one.txt", "@link.txt", f"@{tmp_path}/./one.txt", "@other.txt"):
        one.write_text(f"--seed 3\n{include}\n")
        other.write_text("@link.txt\n")
        assert "a recipe must not include itself" in refusal(lambda: part_2(f"@{one}"))


def test_recipes_that_include_each_other_without_end_are_refused(tmp_path: Path) -> None:
    for i in range(300):
        (tmp_path / f"{i}.txt").write_text(f"@{i + 1}.txt @{i + 1}.txt\n")
    assert "at most 100 recipes may include each other" in refusal(lambda: part_2(f"@{tmp_path}/0.txt"))


def test_a_directory_is_not_a_recipe(tmp_path: Path) -> None:
    assert "no such recipe" in refusal(lambda: part_2(f"@{tmp_path}"))


@pytest.mark.parametrize(
    "flag", ["--name", "--model", "--data", "--sst_train", "--sst_dev_out", "--runs", "--pos_cache"]
)
def test_names_that_no_file_can_have_are_refused(flag: str) -> None:
    assert "must not contain a NUL character" in refusal(lambda: part_2(flag, "a\0b"))
    assert "must have at most 2" in refusal(lambda: part_2(flag, "x" * 300))
    assert "must not contain a NUL character" in refusal(lambda: part_2("--lr\0", "3"))
    assert "no such recipe" in refusal(lambda: part_2("@a\0b"))


def test_a_message_is_one_line_without_control_characters() -> None:
    assert str(InputError("a\nb\0")) == r"a\nb\x00"
    message = str(InputError("a\nb\x1b[31m\u2028" + "x" * 5000 + "end"))
    assert message.startswith(r"a\nb\x1b[31m\u2028xxx")
    assert message.endswith("xxxend")
    assert len(message) <= LONGEST_MESSAGE


def test_a_word_of_a_recipe_can_be_copied() -> None:
    """As flags are when a run is prepared."""
    word = FromRecipe("--lr", "x.txt line 1")
    again = copy.deepcopy(word)
    assert (again, again.place, pickle.loads(pickle.dumps(word))) == ("--lr", "x.txt line 1", "--lr")


# --- JSON -------------------------------------------------------------------------------------------------------------

BAD_JSON = {
    "nested 200,000 deep": (DEEP, "it is nested too deeply"),
    "nested in an object": ('{"a": ' + DEEP + "}", "it is nested too deeply"),
    "NaN": ('{"a": NaN}', "numbers must be finite, found NaN"),
    "infinity": ('{"a": [-Infinity]}', "numbers must be finite, found -Infinity"),
    "1e999": ('{"a": 1e999}', "numbers must be finite, found 1e999"),
    "a huge integer": ('{"a": ' + "9" * 5000 + "}", "Exceeds the limit"),
    "half a character": (r'{"a": "\ud83d"}', "half a character"),
    "a list": ("[]", "it is a list, not an object"),
    "cut": ('{"a": [1, 2', "(line 1, column"),
    "not UTF-8": (b"\xff\xfe{", "it is not UTF-8 text"),
    "empty": ("", "Expecting value (line 1, column 1)"),
}


@pytest.mark.parametrize("kind", BAD_JSON)
def test_bad_json_is_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    content, part = BAD_JSON[kind]
    path = tmp_path / "x.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    message = refusal(lambda: read_json(path, "JSON with a rule", "Do this."))
    assert message.startswith(f"{path}: must be JSON with a rule; ")
    assert message.endswith(" Do this.")
    assert part in message


def test_json_with_whole_characters_and_repeated_keys_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"a": 1, "a": "\\ud83d\\ude00", "b": 1e308}')
    assert read_json(path, "", "") == {"a": "\N{GRINNING FACE}", "b": 1e308}


# --- args.json --------------------------------------------------------------------------------------------------------


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """A copy of a finished run of an older version."""
    return Path(shutil.copytree(OLDER_RUN / "saved_runs" / "finished", tmp_path / "finished"))


def change_flags(run: Path, **flags: Any) -> None:
    facts = json.loads((run / "args.json").read_text())
    facts["args"] |= flags
    (run / "args.json").write_text(json.dumps(facts))


WRONG_FLAGS = {
    "lr": ["fast", None, True, [1e-3], {}, 5.0, -1, 10**400],
    "epochs": [1.5, "3", None, False, 0, 10**9],
    "use_gpu": ["yes", 1, None, []],
    "tasks": ["sst", [], [3], [["sst"]], {"sst": 1}],
    "pooling": ["mean ", 3, None, ["mean"]],
    "smart_variant": [7, "1", None, 1.0],
    "data": [3, None, ["data"], "a\0b"],
    "sst_dev": [3, ["x"], {}, "a\0b"],
    "sst_train": [3, [3], {}, ["a\0b"]],
    "sst_loss": ["bogus", 3, None, "ce:nan", "ce+ce"],
    "regularizer": ["bogus", "none+smart", None, 3],
    "task_weights": ["sst=1", ["sst"], ["sst=-1"], 3],
    "sst_dropout": [1, "0.1", True, -0.1],
    "option": ["both", None, 3],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG_FLAGS.items() for value in values])
def test_a_stored_flag_with_a_wrong_value_is_refused_with_its_file_and_name(
    key: str, value: Any, finished: Path
) -> None:
    change_flags(finished, **{key: value})
    messages = [refusal(lambda: multitask_flags.of_run(finished, []))]
    if key != "tasks":  # of which the message is that the run is of another script
        messages.append(refusal(lambda: multitask_flags.upgraded(Run(finished).facts["args"], finished / "args.json")))
        assert all(message.startswith(f"{finished / 'args.json'}: ") for message in messages)
        assert all(key in message for message in messages)


@pytest.mark.parametrize("key", sorted(json.loads((OLDER_RUN / "saved_runs/finished/args.json").read_text())["args"]))
def test_a_stored_flag_that_is_missing_has_its_default(key: str, finished: Path) -> None:
    facts = json.loads((finished / "args.json").read_text())
    del facts["args"][key]
    (finished / "args.json").write_text(json.dumps(facts))
    with contextlib.suppress(InputError):  # tasks, train_tasks: not a run of this script
        multitask_flags.of_run(finished, [])
    with contextlib.suppress(InputError):
        read_member(finished, None)


def test_flags_that_were_removed_since_are_ignored(finished: Path) -> None:
    before = multitask_flags.of_run(finished, [])
    change_flags(finished, removed_flag={"any": ["thing"]})
    assert vars(multitask_flags.of_run(finished, [])).items() >= vars(before).items()


@pytest.mark.parametrize("facts", ["5", "[]", "{}", '{"args": 3}', '{"args": {}, "data_sha256": {"a": 3}}', DEEP, "{"])
def test_a_run_without_a_table_of_flags_is_refused(facts: str, finished: Path) -> None:
    (finished / "args.json").write_text(facts)
    for read in (lambda: multitask_flags.of_run(finished, []), lambda: read_member(finished, None)):
        assert "args.json: must be JSON with a run's flags; " in refusal(read)


def test_the_stored_flags_of_pretraining_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "args.json"
    assert check_stored(pretrain.parser(), {"objective": "mlm", "tasks": [], "text": ["a.txt"]}, path)
    for wrong in ({"mask_share": "much"}, {"text": "a.txt"}, {"tasks": ["sst", None]}, {"whole_word": 1}):
        (key,) = wrong
        assert refusal(lambda wrong=wrong: check_stored(pretrain.parser(), wrong, path)).startswith(
            f"{path}: {key} must"
        )


@pytest.mark.parametrize(
    ("key", "value"), [("tasks", 3), ("tasks", [3]), ("sst_dev", None), ("sst_test", 3), ("lr", "a")]
)
def test_a_member_of_an_ensemble_with_wrong_flags_is_refused(key: str, value: Any, finished: Path) -> None:
    change_flags(finished, **{key: value})
    assert str(finished) in refusal(lambda: read_member(finished, None))


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"scored_on": 3}', '{"scored_on": null}', DEEP])
def test_a_damaged_record_of_an_ensemble_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "ensemble.json"
    path.write_text(content)
    message = refusal(lambda: chosen_on_dev(tmp_path))
    assert message.startswith(f"{path}: must be JSON with what the ensemble was scored on; ")
    assert message.endswith("Combine its runs again.")


# --- checkpoints ------------------------------------------------------------------------------------------------------

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "film", "good", "##s", ".", "the", "dull"]


def write_checkpoint(folder: Path) -> Path:
    """A BERT of two layers, 8 wide, with twelve word pieces."""
    torch.manual_seed(0)
    shape = dict(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16)
    BertModel(BertConfig(vocab_size=len(PIECES), max_position_embeddings=16, **shape)).save_pretrained(folder)
    BertTokenizer(PIECES, max_length=16).save_pretrained(folder)
    return folder


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "small")


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**6),
        ("num_hidden_layers", 10**30),
        ("hidden_size", 2 * 10**9),
        ("hidden_size", 10**12),
        ("vocab_size", 2**31),
        ("intermediate_size", 10**9),
        ("max_position_embeddings", 10**9),
        ("type_vocab_size", 10**9),
        ("num_hidden_layers", True),
        ("hidden_dropout_prob", 2),
        ("hidden_dropout_prob", 1),
        ("attention_probs_dropout_prob", -0.5),
        ("attention_probs_dropout_prob", False),
        ("layer_norm_eps", 10**400),
        ("layer_norm_eps", None),
        ("initializer_range", "0.02"),
        ("pad_token_id", 10**6),
        ("pad_token_id", -1),
        ("hidden_act", ["gelu"]),
    ],
)
def test_a_config_that_its_weights_contradict_is_refused_at_once(key: str, value: Any, small: Path) -> None:
    change_config(small, **{key: value})
    with time_limit(20):
        assert key in refusal(lambda: BertModel.from_pretrained(small))


def test_a_config_is_refused_if_the_tensor_that_bounds_it_is_missing(small: Path) -> None:
    tensors = base_bert.read_weights(small)
    for name, _ in base_bert.SIZES.values():
        base_bert.save_file({n: t for n, t in tensors.items() if n != name}, small / "model.safetensors")
        assert name in refusal(lambda: BertModel.from_pretrained(small))


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "1e999"])
def test_a_config_with_a_number_that_is_not_finite_is_refused(constant: str, small: Path) -> None:
    path = small / "config.json"
    path.write_text(path.read_text().replace("1e-12", constant))
    assert "numbers must be finite" in refusal(lambda: BertModel.from_pretrained(small))


@pytest.mark.parametrize(
    "settings_",
    [{"do_lower_case": "no"}, {"model_max_length": "long"}, {"model_max_length": True}, {"model_max_length": 2}],
)
def test_a_tokenizer_with_wrong_settings_is_refused(settings_: dict[str, Any], small: Path) -> None:
    (small / "tokenizer_config.json").write_text(json.dumps(settings_))
    assert next(iter(settings_)) in refusal(lambda: BertTokenizer.from_pretrained(small))


@pytest.mark.parametrize(
    "content",
    [DEEP, "[]", '{"model": []}', '{"model": {"vocab": ["a"]}}', '{"model": {"vocab": {"a": false, "b": true}}}',
     '{"model": {"vocab": {"a": 0, "b": 2}}}', '{"model": {"vocab": {"a": 0, "b": "1"}}}'],
)  # fmt: skip
def test_a_damaged_tokenizer_json_is_refused(content: str, small: Path) -> None:
    (small / "vocab.txt").unlink()
    (small / "tokenizer.json").write_text(content)
    assert str(small) in refusal(lambda: BertTokenizer.from_pretrained(small))


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "..", "/x.bin", "a\0.bin", "x.txt", "", 3, None, [], "a" * 300 + ".bin"]
)
def test_an_index_names_plain_files_only(name: Any, tmp_path: Path) -> None:
    path = tmp_path / base_bert.SHARDS
    path.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": name}}))
    assert "must be JSON with a weight_map from tensors to files" in refusal(lambda: base_bert.shard_names(path))


# --- the hub's revisions ----------------------------------------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A stand-in for the hub with one repository in its cache. Returns the options of every download."""
    snapshot = write_checkpoint(tmp_path / "models--someone--bert" / "snapshots" / COMMIT)
    asked: list[dict[str, Any]] = []

    def download(name: str, file: str, **options: Any) -> str:
        asked.append({"name": name} | options)
        return str(snapshot / file)

    monkeypatch.setattr(base_bert, "why_unreachable", lambda name: "")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    return asked


def test_a_revision_after_the_name_is_what_is_downloaded(hub: list[dict[str, Any]]) -> None:
    BertModel.from_pretrained(f"someone/bert@{COMMIT}")
    assert {(options["name"], options["revision"]) for options in hub} == {("someone/bert", COMMIT)}
    hub.clear()
    BertModel.from_pretrained("someone/bert")
    assert all("revision" not in options for options in hub)


@pytest.mark.parametrize("revision", ["", "a b", "../x", "a\nb", "x" * 300])
def test_what_cannot_be_a_revision_is_refused(revision: str, hub: list[dict[str, Any]]) -> None:
    assert "must be a commit, branch or tag" in refusal(lambda: base_bert.find_checkpoint(f"someone/bert@{revision}"))
    assert hub == []


def test_the_revision_of_a_checkpoint_is_the_commit_in_the_cache(hub: list[dict[str, Any]], small: Path) -> None:
    assert base_bert.revision_of("someone/bert") == COMMIT
    assert base_bert.revision_of("someone/bert@main") == COMMIT
    assert all(options["local_files_only"] for options in hub), "no request is made"
    assert base_bert.revision_of("minilm") is None
    assert base_bert.revision_of(small) is None


# --- saved logits -----------------------------------------------------------------------------------------------------

LOGITS = np.linspace(-3, 3, 40, dtype=np.float32).reshape(8, 5)
SAVED = Predictions([f"id{i}" for i in range(8)], LOGITS, LOGITS.argmax(1), np.arange(8) % 5)


def read_saved(path: Path) -> Predictions:
    return evaluation.read_logits(path, SST, "Predict again.", labeled=True)


def with_header(path: Path, shape: str, kind: str = "'<f4'") -> None:
    """Write an .npz whose array `logits` declares another shape or type than it has."""
    evaluation.write_logits(path, SAVED)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    header = f"{{'descr': {kind}, 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    parts["logits.npy"] = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(160)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)


@pytest.mark.parametrize(
    "shape", ["(10000000000000, 5)", "(100000000, 5)", "(8, 6)", "(-8, -5)", "(10**30, 5)", "(0, 5)", "'x'"]
)
def test_logits_with_a_header_that_does_not_fit_the_file_are_refused(shape: str, tmp_path: Path) -> None:
    with_header(tmp_path / "x.npz", shape)
    message = refusal(lambda: read_saved(tmp_path / "x.npz"))
    assert "cannot be read as logits" in message
    assert "does not fit the file" in message or not shape.replace(", ", "").strip("()").isdigit()


@pytest.mark.parametrize("kind", ["'|O'", "[('a', '|O')]", "'<M8[s]'", "'<c8'", "'|V4'", "'nonsense'"])
def test_logits_of_another_type_are_refused(kind: str, tmp_path: Path) -> None:
    with_header(tmp_path / "x.npz", "(8, 5)", kind)
    assert "cannot be read as logits" in refusal(lambda: read_saved(tmp_path / "x.npz"))


@pytest.mark.parametrize("name", ["ids", "logits", "labels", "sha256"])
def test_logits_that_differ_from_their_checksum_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    evaluation.write_logits(path, SAVED)
    arrays = read_arrays(path)
    other = {"ids": np.array([f"ID{i}" for i in range(8)]), "logits": LOGITS + 1e-6, "sha256": np.array("0" * 64)}
    np.savez(path, **arrays | {name: other.get(name, arrays["labels"][::-1])})
    assert "its contents differ from its checksum" in refusal(lambda: read_saved(path))
    np.savez(path, **arrays, more=np.zeros(3))
    assert "'more' is of type" in refusal(lambda: read_saved(path))


def test_logits_of_an_older_version_have_no_checksum_and_are_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", ids=np.array(SAVED.ids), logits=LOGITS, labels=SAVED.labels)
    assert np.array_equal(read_saved(tmp_path / "x.npz").logits, LOGITS)
    old = evaluation.read_logits(OLDER_RUN / "saved_runs/finished/sst-dev.npz", SST, "", labeled=True)
    assert len(old.ids) > 0


# --- data -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ['"5,"good"\n', '"5"x,good\n', 'stars,"te"xt\n5,good\n', '"5","good\n'])
def test_a_bad_quote_in_the_first_line_of_reviews_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "y.csv"
    path.write_text(content)
    message = refusal(lambda: read_examples(SST, [Path(f"yelp:{path}")], labeled=True))
    assert message.startswith(f"{path} line 1: ")


def test_a_damaged_gzip_file_that_is_not_text_either_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.csv.gz"
    whole = gzip.compress(b"\tid\tsentence\tsentiment\n" + b"\xff" * 50_000 + os.urandom(50_000))
    path.write_bytes(whole[:-30_000])
    assert str(path) in refusal(lambda: read_examples(SST, [path], labeled=True))


# --- every kind of file, mutated --------------------------------------------------------------------------------------


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupt what hangs."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"still not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Kind(NamedTuple):
    """A kind of file: a valid one, and what reads it."""

    path: Path
    read: Callable[[], Any]
    sealed: bool = False  # it carries a checksum, so what is read from a mutated file must be what was written


def prediction_problems(path: Path, data: Path) -> Any:
    """What check_file returns; problems are raised, so that they count as a refusal."""
    score, problems = submission.check_file(path, SST, data, labeled=True)
    for problem in problems:
        assert "\n" not in problem
        assert len(problem) <= LONGEST_MESSAGE
    if problems:
        raise InputError(problems[0])
    return score


def encoder(folder: Path) -> Any:
    return BertModel.from_pretrained(folder)


def tokenized(folder: Path) -> Any:
    return [encoding.ids for encoding in BertTokenizer.from_pretrained(folder).encode_all(["A good film.", "dull"])]


def rows_of(task: Any, path: str | Path) -> Any:
    examples = read_examples(task, [Path(path)], labeled=True)
    return examples.ids, examples.texts, examples.labels


def flags_of_run(folder: Path) -> Any:
    upgraded = multitask_flags.upgraded(Run(folder).facts["args"], folder / "args.json")
    return upgraded, vars(multitask_flags.of_run(folder, []))


def saved_content(path: Path) -> Any:
    found = read_saved(path)
    return found.ids, found.logits.tobytes(), found.labels.tobytes()


def known_origins(folder: Path) -> dict[str, str]:
    """The runs in the manifest; its notes about damage count as a refusal, and each is one line."""
    with contextlib.redirect_stderr(io.StringIO()) as notes:
        found = manifest.find_files(folder, {"predictions.csv": submission.PART_2_FILES["sst-dev-output.csv"]})
        runs = {name: origin.run + origin.age for name, origin in manifest.read_manifest(folder).items()}
    lines = notes.getvalue().splitlines()
    assert len(lines) == notes.getvalue().count("\n")
    assert all(line.startswith("note: ") and line.isprintable() for line in lines)
    assert set(found) == {"predictions.csv"}
    return runs


def make_kinds(folder: Path) -> dict[str, Kind]:
    """A valid file of every kind in a folder of its own."""

    def checkpoint(name: str) -> Path:
        return write_checkpoint(folder / name)

    write_task_files(folder / "data")
    data = folder / "data"
    recipe = Path(shutil.copy(ROOT / "recipes" / "quickstart.txt", folder / "recipe.txt"))
    run = Path(shutil.copytree(OLDER_RUN / "saved_runs" / "finished", folder / "run"))
    (folder / "ensemble").mkdir()
    facts = {"method": "best", "scored_on": "dev (chosen on dev)", "scores": {"runs/a": {"sst": 0.5}}}
    (folder / "ensemble" / "ensemble.json").write_text(json.dumps(facts, indent=2))
    config, weights, vocabulary, whole, sharded = map(checkpoint, ("config", "weights", "vocab", "tokenizer", "index"))
    (whole / "vocab.txt").unlink()
    (whole / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {p: i for i, p in enumerate(PIECES)}}}))
    tensors = base_bert.read_weights(sharded)
    (sharded / "model.safetensors").unlink()
    halves = {"model-1.safetensors": list(tensors)[::2], "model-2.safetensors": list(tensors)[1::2]}
    for name, names in halves.items():
        base_bert.save_file({n: tensors[n] for n in names}, sharded / name)
    places = {n: name for name, names in halves.items() for n in names}
    (sharded / base_bert.SHARDS).write_text(json.dumps({"metadata": {}, "weight_map": places}, indent=1))
    evaluation.write_logits(folder / "sealed.npz", SAVED)
    np.savez(folder / "plain.npz", ids=np.array(SAVED.ids), logits=LOGITS, labels=SAVED.labels)
    labels = ["entailment", "neutral", "contradiction"]
    (folder / "snli.jsonl").write_text("".join(nli_line([label], label) for label in labels * 2))
    (folder / "yelp.csv").write_text("".join(f'"{1 + i % 5}","A ""place"" of {i} tables.\\nGo."\n' for i in range(6)))
    (folder / "tables.csv").write_text("review_id,stars,text\n" + "".join(f"r{i},{i},So so.\n" for i in range(1, 6)))
    (folder / "pairs.tsv").write_text("index\tsentence1\tsentence2\tscore\n" + "1\tA b.\tA c.\t2.5\n" * 3)
    (data / "sst.csv.gz").write_bytes(gzip.compress((data / "ids-sst-dev.csv").read_bytes()))
    (folder / "text.txt").write_text("One sentence.\nAnother sentence.\n\nA new document.\nIts end.\n")
    ids = read_examples(SST, [data / "ids-sst-dev.csv"], labeled=True).ids
    answers = Predictions(ids, np.empty(0), np.arange(len(ids)) % 5, None)
    evaluation.write_predictions(folder / "predictions.csv", SST, answers)
    labeled = Path(shutil.copy(data / "ids-sst-dev.csv", folder / "labels.csv"))
    manifest.record(folder / "predictions.csv", manifest.Source(run, labeled), 6)
    return {
        "recipe": Kind(recipe, lambda: vars(part_2(f"@{recipe}", "--name", "x"))),
        "args.json": Kind(run / "args.json", lambda: flags_of_run(run)),
        "ensemble.json": Kind(folder / "ensemble" / "ensemble.json", lambda: chosen_on_dev(folder / "ensemble")),
        "config.json": Kind(config / "config.json", lambda: encoder(config)),
        "model.safetensors": Kind(weights / "model.safetensors", lambda: encoder(weights)),
        "index.json": Kind(sharded / base_bert.SHARDS, lambda: encoder(sharded)),
        "vocab.txt": Kind(vocabulary / "vocab.txt", lambda: tokenized(vocabulary)),
        "tokenizer_config.json": Kind(config / "tokenizer_config.json", lambda: tokenized(config)),
        "tokenizer.json": Kind(whole / "tokenizer.json", lambda: tokenized(whole)),
        "logits": Kind(folder / "sealed.npz", lambda: saved_content(folder / "sealed.npz"), sealed=True),
        "older logits": Kind(folder / "plain.npz", lambda: saved_content(folder / "plain.npz")),
        "sst": Kind(data / "ids-sst-train.csv", lambda: rows_of(SST, data / "ids-sst-train.csv")),
        "para": Kind(data / "quora-train.csv", lambda: rows_of(PARA, data / "quora-train.csv")),
        "sts": Kind(data / "sts-train.csv", lambda: rows_of(STS, data / "sts-train.csv")),
        "gzip": Kind(data / "sst.csv.gz", lambda: rows_of(SST, data / "sst.csv.gz")),
        "quora_as_sts": Kind(data / "quora-dev.csv", lambda: rows_of(STS, f"quora_as_sts:{data / 'quora-dev.csv'}")),
        "snli": Kind(folder / "snli.jsonl", lambda: rows_of(STS, f"snli:{folder / 'snli.jsonl'}")),
        "yelp": Kind(folder / "yelp.csv", lambda: rows_of(SST, f"yelp:{folder / 'yelp.csv'}")),
        "yelp with a header": Kind(folder / "tables.csv", lambda: rows_of(SST, f"yelp:{folder / 'tables.csv'}")),
        "tsv": Kind(folder / "pairs.tsv", lambda: rows_of(STS, f"tsv:{folder / 'pairs.tsv'}")),
        "text": Kind(folder / "text.txt", lambda: read_text(folder / "text.txt")),
        "predictions": Kind(
            folder / "predictions.csv", lambda: prediction_problems(folder / "predictions.csv", labeled)
        ),
        "labels": Kind(labeled, lambda: rows_of(SST, labeled)),
        "manifest.json": Kind(folder / "manifest.json", lambda: known_origins(folder)),
    }  # fmt: skip


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kind]:
    return make_kinds(tmp_path_factory.mktemp("kinds"))


KINDS = [
    "recipe", "args.json", "ensemble.json", "config.json", "model.safetensors", "index.json", "vocab.txt",
    "tokenizer_config.json", "tokenizer.json", "logits", "older logits", "sst", "para", "sts", "gzip", "quora_as_sts",
    "snli", "yelp", "yelp with a header", "tsv", "text", "predictions", "labels", "manifest.json",
]  # fmt: skip
# Raw JSON to put in place of a value.
NASTY = [
    "null", "true", "false", "0", "-1", "1", "2.5", "1e-400", "1e999", "NaN", "-Infinity", "1" + "0" * 40, "9" * 5000,
    '""', '"x"', json.dumps("x" * 5000), '"a\\u0000b"', '"\\ud83d"', '"../../x"', '"\\n\\u001b[31m"', "[]", "{}",
    "[[1]]", '["sst"]', '{"a": {"b": null}}', "[" * 1000 + "]" * 1000, DEEP,
]  # fmt: skip
NASTY_BYTES = [
    b"\0",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b'"',
    b"\t",
    b"\n",
    b"\r",
    b"--",
    b"@",
    b"\xe9",
    b"nan",
    b"1e999",
    b"9" * 400,
]


def places_in(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Every place in a JSON value, as keys and indices from the root."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places_in(value[key], (*path, key))


def replaced(content: bytes, place: int, raw: str | None) -> bytes:
    """The JSON text with the value at one place replaced by raw JSON; None removes a key."""
    root = json.loads(content)
    places = list(places_in(root))
    *outer, last = places[place % len(places)] or (None,)
    if last is None:
        return (raw or "").encode()
    inner = root
    for key in outer:
        inner = inner[key]
    if raw is None:
        del inner[last]
        return json.dumps(root).encode()
    inner[last] = "\N{SNOWMAN}"
    return json.dumps(root, ensure_ascii=False).replace('"\N{SNOWMAN}"', raw).encode()


def mutated(content: bytes, draw: Callable[[st.SearchStrategy], Any], is_json: bool) -> bytes:
    """Apply one to three random changes to the bytes of a file."""
    if is_json and draw(st.booleans()):
        return replaced(content, draw(st.integers(0, 10**6)), draw(st.sampled_from([None, *NASTY])))
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["flip", "byte", "cut", "cut front", "insert", "remove", "swap", "repeat"]))
        a, b = sorted((draw(st.integers(0, len(content))), draw(st.integers(0, len(content)))))
        if kind == "flip" and a < len(content):
            content = content[:a] + bytes([content[a] ^ (1 << draw(st.integers(0, 7)))]) + content[a + 1 :]
        elif kind == "byte" and a < len(content):
            content = content[:a] + bytes([draw(st.integers(0, 255))]) + content[a + 1 :]
        elif kind == "cut":
            content = content[:a]
        elif kind == "cut front":
            content = content[a:]
        elif kind == "insert":
            content = content[:a] + draw(st.sampled_from(NASTY_BYTES) | st.binary(max_size=20)) + content[a:]
        elif kind == "remove":
            content = content[:a] + content[min(b, a + 50) :]
        elif kind == "swap":
            middle = (a + b) // 2
            content = content[:a] + content[middle:b] + content[a:middle] + content[b:]
        elif kind == "repeat":
            content = content[:b] + content[a : min(b, a + 1000)] + content[b:]
    return content


SECONDS = 20  # for one file; the slowest takes a fraction of a second on an idle core


def try_mutations(kind: Kind, examples: int) -> Counter:
    """Read mutated files, all different; each is read or refused in one line. Returns how many of each."""
    content, counts = kind.path.read_bytes(), Counter()
    seen = {content}
    original = kind.read()
    is_json = kind.path.suffix == ".json"

    @settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(st.data())
    def read_one(data: st.DataObject) -> None:
        damaged = mutated(content, data.draw, is_json)
        if damaged in seen:  # the changes cancel out, or gave this file before
            return
        seen.add(damaged)
        kind.path.write_bytes(damaged)
        counts["tried"] += 1
        try:
            with time_limit(SECONDS):
                found = kind.read()
        except InputError as error:
            message = str(error)
        else:
            message = None
        counts["read" if message is None else "refused"] += 1
        if message is not None:
            assert "\n" not in message
            assert 0 < len(message) <= LONGEST_MESSAGE
            return
        assert not kind.sealed or found == original, "a file with a checksum gave other contents in silence"

    try:
        read_one()
    finally:
        kind.path.write_bytes(content)
    return counts


def test_every_kind_of_file_is_mutated(kinds: dict[str, Kind]) -> None:
    assert list(kinds) == KINDS
    for kind in kinds.values():
        kind.read()


@pytest.mark.parametrize("name", KINDS)
def test_a_mutated_file_is_read_or_refused_in_one_line(name: str, kinds: dict[str, Kind]) -> None:
    assert try_mutations(kinds[name], 40)["tried"] >= 20


@pytest.mark.slow
def test_ten_thousand_mutated_files_are_read_or_refused_in_one_line(
    kinds: dict[str, Kind], capsys: pytest.CaptureFixture
) -> None:
    total: Counter = Counter()
    for name in KINDS:
        counts = try_mutations(kinds[name], 700)
        total += counts
        with capsys.disabled():
            print(f"\nmutated files | {name} | " + " | ".join(f"{k} {counts[k]}" for k in ("tried", "refused", "read")))
    with capsys.disabled():
        print("mutated files | all | " + " | ".join(f"{k} {total[k]}" for k in ("tried", "refused", "read")))
    assert total["tried"] >= 10_000


def test_the_words_of_a_random_text_are_never_shown(tmp_path: Path) -> None:
    """As in test_the_text_of_a_file_that_is_not_a_recipe_is_never_shown, in random order."""
    path, choose = tmp_path / "text.txt", random.Random(0)
    for _ in range(200):
        words = [choose.choice(FORMS).replace("{}", SECRET) for _ in range(choose.randint(1, 6))]
        path.write_text("".join(word + choose.choice([" ", "\n", " # ", "\t"]) for word in words))
        with contextlib.suppress(InputError):
            part_2(f"@{path}")  # a comment alone is an empty recipe
            continue
        assert SECRET not in refusal(lambda: part_2(f"@{path}"))
