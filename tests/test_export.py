"""export.py: transformers, sentence-transformers and onnxruntime compute what the run computes."""

import contextlib
import importlib.util
import io
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, Finished, short_training, the_error, write_task_files

import export
import forms
import multitask_classifier
from cards import changed_flags, known_files
from evaluation import read_logits
from heads import HEADS, POOLERS
from tasks import TASKS
from trained import TrainedRun, open_trained
from utils import Precision, sha256_of

CPU = Precision("fp32", torch.device("cpu"))
FIRST = [
    "A lovely film .",
    "ok",
    "Is film 3 dull, or not? " * 3,
    "<b>\U0001f600</b> \u05e9\u05dc\u05d5\u05dd \x00 \t x",
    "",
]
SECOND = ["A film that I love , all of it , from its start to its very end .", "No .", "A bright film .", "x", "y"]

VARIANTS = {
    "pooler": "--pairing cross --max_length 12",  # some texts are truncated
    "mean": "--pooling mean --sst_head mlp --para_pairing cross --sts_head cosine_affine",
    "max": "--pooling max --pairing cross --share_pair_layer --sts_head sigmoid --adapter lora --lora_alpha 64",
    "cls": "--pooling cls --sst_pooling pooler --sst_head mlp --para_pairing cross_symmetric --sts_head siamese_cosine",
    "scaled": "--tasks sts para --sts_pairing cross --sts_head scaled_linear --para_head cosine_affine",
    "apart": "--para_head siamese --sts_head cosine_relu",
    "attention": "--pooling attention --tasks sst",
    "bigru": "--pooling bigru --tasks sst",
    "pal": "--adapter pal --tasks sst sts",
    "own": "--adapter own_layers --own_layers 1 --tasks sst sts",
    "both": "--pairing both --para_head both --sts_head both --adapter own_layers --own_layers 1 --pooling mean",
    "pos": "--feature pos --pos_tagger wheel --tasks sst",
}


@pytest.fixture(scope="module")
def run_of(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path, one_thread: None
) -> Callable[[str], TrainedRun]:
    """run_of(variant): a trained run, made at its first use."""
    folder = tmp_path_factory.mktemp("export")
    write_task_files(folder / "data", rows=8)
    opened: dict[str, TrainedRun] = {}

    def run(variant: str) -> TrainedRun:
        if variant not in opened:
            flags = short_training(tiny_checkpoint, folder, variant)
            args = multitask_classifier.get_args([str(word) for word in (*flags, *VARIANTS[variant].split())])
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                multitask_classifier.write_run_predictions(multitask_classifier.train(args))
            opened[variant] = open_trained(folder / "runs" / variant, CPU)
        return opened[variant]

    return run


@pytest.fixture
def exported(run_of, run_main, tmp_path: Path) -> Callable[..., tuple[Finished, Path]]:
    def run(variant: str, *flags: object) -> tuple[Finished, Path]:
        return run_main(export, "--run", run_of(variant).folder, "--to", tmp_path / "out", *flags), tmp_path / "out"

    return run


def texts_of(name: str) -> tuple[list[str], ...]:
    return (FIRST, SECOND)[: len(TASKS[name].text_columns)]


def logits_of(run: TrainedRun, name: str) -> torch.Tensor:
    """The run's logits in one order of a pair, which is what another library computes."""
    branches = {n: replace(b, pairing=b.pairing.removesuffix("_symmetric")) for n, b in run.branches.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run.model, "branches", branches)
        return run.answers(name, texts_of(name), 2).logits


def by_other_libraries(folder: Path, run: TrainedRun, name: str) -> torch.Tensor:
    """The logits, or numbers that sentence-transformers returns, of the exported model of a task."""
    from sentence_transformers import CrossEncoder, SentenceTransformer

    form = forms.form_of(run, name)
    if form.score_of_cosine is not None:
        model = SentenceTransformer(str(folder), device="cpu")
        cosine = model.similarity_pairwise(*(model.encode(texts, batch_size=2) for texts in texts_of(name)))
        return eval(form.score_of_cosine, {"cosine": cosine})[:, None]
    if TASKS[name].is_pair:
        model = CrossEncoder(str(folder), device="cpu")
        assert isinstance(model.activation_fn, TASKS[name].predicts.activation)
        pairs = list(zip(*texts_of(name), strict=True))
        return torch.from_numpy(model.predict(pairs, activation_fn=torch.nn.Identity(), batch_size=2)).reshape(5, -1)
    if form.loader == forms.CLASSIFIER:
        return by_transformers(folder, name)
    return torch.from_numpy(SentenceTransformer(str(folder), device="cpu").encode(FIRST, batch_size=2))


def by_transformers(folder: Path, name: str) -> torch.Tensor:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        return model(**tokenizer(*texts_of(name), padding=True, truncation=True, return_tensors="pt")).logits


# --- the same outputs -------------------------------------------------------------------------------------------------

KINDS = {
    "pooler": {"sst": forms.CLASSIFIER, "para": forms.CLASSIFIER, "sts": forms.CLASSIFIER},
    "mean": {"sst": forms.SENTENCE_TRANSFORMER, "para": forms.CROSS_ENCODER, "sts": forms.SENTENCE_TRANSFORMER},
    "max": {"sst": forms.SENTENCE_TRANSFORMER, "para": forms.CROSS_ENCODER, "sts": forms.CROSS_ENCODER},
    "cls": {"sst": forms.SENTENCE_TRANSFORMER, "para": forms.CROSS_ENCODER, "sts": forms.SENTENCE_TRANSFORMER},
    "scaled": {"sts": forms.CLASSIFIER, "para": forms.SENTENCE_TRANSFORMER},
}


@pytest.mark.parametrize("variant", KINDS)
def test_other_libraries_compute_the_logits_of_the_run(variant: str, exported, run_of) -> None:
    done, folder = exported(variant)
    assert done.status == 0, done.err
    run = run_of(variant)
    for name, kind in KINDS[variant].items():
        assert forms.form_of(run, name).loader == kind
        expected = logits_of(run, name)
        found = by_other_libraries(folder / name, run, name)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        if kind == forms.CLASSIFIER:
            torch.testing.assert_close(by_transformers(folder / name, name), expected, atol=1e-5, rtol=0)
    assert all(path.stat().st_mode & 0o077 for path in folder.rglob("*")), "others may read it"


@pytest.mark.parametrize("variant", ["pooler", "mean", "max"])
def test_the_encoder_gives_the_vectors_of_the_run(variant: str, exported, run_of) -> None:
    from sentence_transformers import SentenceTransformer
    from transformers import AutoModel

    _, folder = exported(variant)
    (expected,) = run_of(variant).answers("sst", (FIRST,), 2).vectors
    found = SentenceTransformer(str(folder / "encoder"), device="cpu").encode(FIRST, batch_size=2)
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)
    assert AutoModel.from_pretrained(folder / "encoder").config.hidden_size == 32


def test_a_pipeline_names_the_classes(exported, run_of) -> None:
    from transformers import pipeline

    _, folder = exported("pooler")
    classify = pipeline("text-classification", str(folder / "sst"), truncation=True, device="cpu")
    expected = logits_of(run_of("pooler"), "sst").softmax(dim=1)
    for of_row, row in zip(classify(FIRST, top_k=None), expected, strict=True):
        found = {answer["label"]: answer["score"] for answer in of_row}
        assert [found[name] for name in TASKS["sst"].names] == pytest.approx(row.tolist(), abs=1e-5)
    judge = pipeline("text-classification", str(folder / "para"), truncation=True, device="cpu")
    found = judge([{"text": a, "text_pair": b} for a, b in zip(FIRST, SECOND, strict=True)])
    assert {answer["label"] for answer in found} == {"paraphrase"}
    expected = logits_of(run_of("pooler"), "para").sigmoid().flatten().tolist()
    assert [answer["score"] for answer in found] == pytest.approx(expected, abs=1e-5)
    measure = pipeline("text-classification", str(folder / "sts"), truncation=True, device="cpu")
    found = measure([{"text": a, "text_pair": b} for a, b in zip(FIRST, SECOND, strict=True)])
    expected = logits_of(run_of("pooler"), "sts").flatten().tolist()
    assert [answer["score"] for answer in found] == pytest.approx(expected, abs=1e-5)


# --- heads with random weights ----------------------------------------------------------------------------------------


def test_no_library_puts_a_random_head_on_a_run_or_an_exported_encoder(exported, run_of) -> None:
    from sentence_transformers import CrossEncoder
    from transformers import AutoModel, AutoModelForSequenceClassification

    _, folder = exported("mean")
    for place in (run_of("mean").folder, folder / "encoder", folder / "sst", folder / "para"):
        with pytest.raises(ValueError, match="dropout probability has to be between 0 and 1"):
            AutoModelForSequenceClassification.from_pretrained(place)
        AutoModel.from_pretrained(place)
    for place in (run_of("mean").folder, folder / "encoder", folder / "sst"):
        with pytest.raises(ValueError, match="dropout probability has to be between 0 and 1"):
            CrossEncoder(str(place))


def test_a_run_is_still_a_checkpoint_to_start_from(run_of) -> None:
    from bert import BertModel

    assert BertModel.from_pretrained(run_of("mean").folder).config.hidden_size == 32


# --- what cannot be expressed -----------------------------------------------------------------------------------------

REFUSED = {
    ("apart", "para"): "--para_head siamese joins several vectors (--para_pairing bi), which no other library does",
    ("attention", "sst"): "--sst_pooling attention has no counterpart in other libraries",
    ("own", "sts"): "--adapter own_layers gives every task layers of its own, which no other library has",
    ("pal", "sts"): "--adapter pal gives every task layers of its own, which no other library has",
    ("pos", "sst"): "--feature pos reads part-of-speech tags, which no other library computes",
}


@pytest.mark.parametrize(("variant", "name"), REFUSED)
def test_a_named_task_that_no_library_can_express_is_refused_with_the_reason(
    variant: str, name: str, exported, tags_offline: Path
) -> None:
    done, folder = exported(variant, "--tasks", name)
    error = the_error(done)
    assert f"{name} cannot be exported: {REFUSED[variant, name]}" in error
    assert "predict.py" in error
    assert ("Add --onnx" in error) == (variant != "pos")
    assert list(folder.parent.iterdir()) == []


def test_without_names_what_can_be_expressed_is_exported_and_the_rest_is_noted(exported, run_of) -> None:
    done, folder = exported("apart")
    assert done.status == 0
    assert done.err == f"note: para is left out: {forms.form_of(run_of('apart'), 'para')}.\n"
    assert {path.name for path in folder.iterdir()} == {"README.md", "encoder", "sst", "sts"}
    assert "`para` is not here: --para_head siamese" in (folder / "README.md").read_text()


def test_nothing_to_export_is_an_error(exported) -> None:
    done, folder = exported("pal")
    assert "sst cannot be exported" in the_error(done)
    assert not folder.exists()


def test_every_pooling_and_head_is_expressed_or_known_to_be_impossible() -> None:
    """A new entry must decide: layers, a formula, or neither."""
    impossible = {"siamese", "sbert", "both"}
    for name, head in HEADS.items():
        vectors = 1 + head.needs_pair + head.needs_joined
        target = next(t.predicts for t in TASKS.values() if isinstance(t.predicts, head.fits))
        built = head(8, vectors, target, 0.0)
        assert (built.layers() is None) == (name in impossible), name
        u, v = torch.randn(3, 8), torch.randn(3, 8)
        vectors_in = [u, v][:vectors]
        for layer in built.layers() or ():
            vectors_in = [layer.activation()(x @ layer.weight.T + layer.bias) for x in vectors_in]
        if formula := built.score_of_cosine():
            cosine = torch.nn.functional.cosine_similarity(*vectors_in)
            vectors_in = [eval(formula, {"cosine": cosine})[:, None]]
        if name not in impossible:
            torch.testing.assert_close(vectors_in[0], built.eval()(*[u, v][:vectors]), atol=1e-6, rtol=1e-6)
    assert {name for name, pooler in POOLERS.items() if pooler.published is None} == {"attention", "bigru"}


# --- the model card ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["pooler", "cls"])
def test_the_code_in_the_card_runs(variant: str, exported, run_of, monkeypatch: pytest.MonkeyPatch) -> None:
    _, folder = exported(variant)
    blocks = re.findall(r"^```python\n(.*?)^```$", (folder / "README.md").read_text(), flags=re.M | re.S)
    assert len(blocks) == 4
    monkeypatch.chdir(folder)
    values: dict[str, object] = {}
    for block in blocks:
        exec(block, values)
    if variant == "cls":
        expected = run_of("cls").answers("sts", (["How old are you?"], ["What is your age?"]), 1).logits
        torch.testing.assert_close(values["scores"], expected[0], atol=1e-5, rtol=0)


def test_the_card_tells_scores_with_intervals_data_flags_and_limits_but_no_paths(exported, run_of) -> None:
    _, folder = exported("cls")
    card, run = (folder / "README.md").read_text(), run_of("cls")
    assert card.startswith("---\nlanguage: en\n")
    for name in run.tasks:
        saved = read_logits(run.folder / f"{name}-dev.npz", TASKS[name], "", labeled=True)
        score = TASKS[name].predicts.score(saved.values, saved.labels)
        row = next(line for line in card.splitlines() if line.startswith(f"| `{name}` |"))
        _, _, shown, interval, rows, _ = row.split("|")
        low, high = map(float, interval.split(" to "))
        assert shown.strip() == f"{score:.3f}"
        assert low <= score + 1e-3
        assert score - 1e-3 <= high
        assert rows.strip() == "8"
    for path, value in run.facts["data_sha256"].items():
        assert f"| {Path(path).name} | elsewhere | {value} |" in card
    assert "--para_pairing cross_symmetric" in card
    assert "`para` was scored in both orders of a pair" in card
    assert str(run.folder.parent) not in card
    assert "random weights" in card
    assert "see the base model" in card


def test_the_card_of_the_sample_data_does_not_claim_the_courses() -> None:
    assert known_files()[sha256_of(ROOT / "data" / "sample" / "ids-sst-dev.csv")] == "made-up sample data"


def test_the_flags_in_the_card_build_the_same_model(run_of) -> None:
    run = run_of("max")
    words = [word for word in changed_flags(run) if not re.fullmatch(r"tiny\d+", word)]
    words.remove("--model")
    flags = multitask_classifier.get_args([*words, "--model", str(run.args.model)])
    for key in ("pooling", "pairing", "sts_head", "adapter", "lora_alpha", "share_pair_layer", "lr", "epochs"):
        assert getattr(flags, key) == getattr(run.args, key), key


# --- ONNX -------------------------------------------------------------------------------------------------------------


def session_of(path: Path) -> Callable[..., torch.Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    names = [given.name for given in session.get_inputs()]
    return lambda *inputs: torch.from_numpy(session.run(["logits"], dict(zip(names, inputs, strict=True)))[0])


def assert_onnx(folder: Path, run: TrainedRun, name: str) -> None:
    """Two sizes of batches with transformers' tokenizer, which the card's code uses too."""
    from transformers import AutoTokenizer

    tokenizer, ask = AutoTokenizer.from_pretrained(folder), session_of(folder / "model.onnx")
    expected = logits_of(run, name)
    settings = dict(padding=True, truncation=True, return_tensors="np")
    for rows in (slice(0, 5), slice(1, 3)):
        texts = [column[rows] for column in texts_of(name)]
        if export.Answering(run, name).apart:
            sides = [tokenizer(column, **settings) for column in texts]
            inputs = [side[key] for side in sides for key in ("input_ids", "attention_mask")]
        else:
            encoded = tokenizer(*texts, **settings)
            inputs = [encoded[key] for key in ("input_ids", "attention_mask", "token_type_ids")]
        torch.testing.assert_close(ask(*inputs), expected[rows], atol=1e-4, rtol=0)


@pytest.mark.slow
def test_onnx_expresses_what_no_library_can(exported, run_of) -> None:
    done, folder = exported("apart", "--tasks", "para", "--onnx")
    assert done.status == 0, done.err
    assert re.search(r"para: \S+model\.onnx \| logits differ by \d\.\de-\d\d at most", done.out)
    assert {path.name for path in (folder / "para").iterdir()} == {"model.onnx", "vocab.txt", "tokenizer_config.json"}
    assert_onnx(folder / "para", run_of("apart"), "para")
    assert "`para` is here as ONNX only" in (folder / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["pooler", "mean", "max", "cls", "scaled", "attention", "pal", "both"])
def test_onnx_computes_the_logits_of_every_kind_of_run(variant: str, exported, run_of, monkeypatch) -> None:
    done, folder = exported(variant, "--onnx")
    assert done.status == 0, done.err
    for name in run_of(variant).tasks:
        assert_onnx(folder / name, run_of(variant), name)
    monkeypatch.chdir(folder)
    for block in re.findall(r"^```python\n(.*?)^```$", Path("README.md").read_text(), flags=re.M | re.S):
        exec(block, {})


@pytest.mark.slow
def test_an_onnx_model_that_differs_is_not_left_behind(exported, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "LARGEST_DIFFERENCE", -1.0)
    done, folder = exported("attention", "--onnx")
    assert "the logits of sst must be torch's within -1, found a difference of" in the_error(done)
    assert list(folder.parent.iterdir()) == []


@pytest.mark.slow
def test_what_torch_cannot_export_is_one_line(exported) -> None:
    done, folder = exported("bigru", "--onnx")
    assert "--onnx: torch cannot export sst with --sst_pooling bigru" in the_error(done)
    assert list(folder.parent.iterdir()) == []


def test_onnx_without_its_packages_is_refused_with_the_command(exported, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "onnxscript" else real(name, *a))
    done, folder = exported("mean", "--onnx")
    assert "onnxscript is not installed. Run: source setup.sh --dev" in the_error(done)
    assert not folder.exists()


def test_onnx_of_tags_is_refused(exported, tags_offline: Path) -> None:
    done, folder = exported("pos", "--onnx")
    assert "--onnx: --feature pos reads part-of-speech tags" in the_error(done)
    assert not folder.exists()


# --- directories ------------------------------------------------------------------------------------------------------


def test_a_directory_with_something_in_it_is_refused_and_an_empty_one_is_used(exported, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    done, folder = exported("mean", "--tasks", "sts")
    assert done.status == 0, done.err
    assert {path.name for path in folder.iterdir()} == {"README.md", "encoder", "sts"}
    before = sorted(folder.rglob("*"))
    assert "must be a new or an empty directory" in the_error(exported("mean")[0])
    assert sorted(folder.rglob("*")) == before


def test_an_export_reads_the_run_only(run_of, run_main, tmp_path: Path) -> None:
    run = run_of("mean").folder
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in run.iterdir()}
    error = the_error(run_main(export, "--run", run, "--to", run / "shared"))
    assert "must be outside the run, which is only read" in error
    run.chmod(0o555)
    try:
        assert run_main(export, "--run", run, "--to", tmp_path / "out", "--tasks", "sts").status == 0
    finally:
        run.chmod(0o755)
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in run.iterdir()} == before


def test_a_failure_leaves_nothing(exported, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> str:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(export, "model_card", full)
    done, folder = exported("mean")
    assert "could not be written (No space left on device)" in the_error(done)
    assert list(folder.parent.iterdir()) == []


def test_an_older_run_without_logs_and_a_task_that_it_does_not_have(run_main, tmp_path: Path) -> None:
    stored = ROOT / "tests" / "references" / "older_run" / "saved_runs" / "finished"
    run = tmp_path / "finished"
    run.mkdir()
    for name in ("args.json", "config.json", "model.safetensors", "vocab.txt", "tokenizer_config.json"):
        (run / name).write_bytes((stored / name).read_bytes())
    done = run_main(export, "--run", run, "--to", tmp_path / "out")
    assert done.status == 0, done.err
    assert "The run has no record of its dev scores." in (tmp_path / "out" / "README.md").read_text()
    error = the_error(run_main(export, "--run", run, "--to", tmp_path / "other", "--tasks", "cfimdb"))
    assert "was trained on sst, para, sts. Choose from these." in error
    assert json.loads((tmp_path / "out" / "sst" / "config.json").read_text())["id2label"]["0"] == "negative"
