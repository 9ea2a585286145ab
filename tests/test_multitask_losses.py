"""Losses on vectors, encoding in chunks and distillation in the whole model: gradients, memory, flags, files."""

import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import write_task_files
from test_multitask import Finished, run_multitask, same
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import losses
import model as multitask_model
import multitask_build
import smart
from datasets import PAIRINGS, SINGLE, Examples, Ragged, Split
from evaluation import read_logits, write_logits
from multitask_classifier import MultitaskBERT, get_args
from tasks import PARA, SST, STS, TASKS, Batch, Predictions
from tokenizer import BertTokenizer
from utils import InputError

pytestmark = pytest.mark.usefixtures("one_thread")

TEACHER = {name: ["--teacher", "runs/teacher"] if name == "distill" else [] for name in losses.LOSSES}
FIRST = ["Is it good?", "Who wrote the very long book about whales?", "Why?", "Is it good?", "a b c d", "How far?"]
SECOND = ["Is it any good?", "Who is the author?", "Why not, after all?", "It is bad.", "e f g", "Is it good?"]


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> BertTokenizer:
    return BertTokenizer.from_pretrained(str(tiny_checkpoint))


@pytest.fixture(scope="module")
def build(tiny_checkpoint: Path) -> Callable[..., MultitaskBERT]:
    def build(p: float = 0.0, **flags: object) -> MultitaskBERT:
        """Build a model in training mode, with dropout p everywhere."""
        torch.manual_seed(1)
        given = {"model": str(tiny_checkpoint), "option": "finetune", "hidden_dropout_prob": p, "pooling": "mean"}
        model = MultitaskBERT(SimpleNamespace(**given | flags))
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                nn.init.normal_(parameter, std=0.2)
        for module in model.bert.modules():
            if hasattr(module, "p"):
                module.p = p
        return model.train()

    return build


def batch_of(tokenizer: BertTokenizer, task: str = "para", repeat: int = 1) -> Batch:
    texts = (FIRST * repeat, SECOND * repeat)[: 1 + TASKS[task].is_pair]
    labels = {"sst": [0, 1, 2, 3, 4, 0], "para": [1, 1, 0, 0, 1, 1], "sts": [4.5, 4.0, 3.0, 0.0, 5.0, 2.0]}[task]
    ids = [str(i) for i in range(6 * repeat)]
    pairing = PAIRINGS["bi"] if len(texts) == 2 else SINGLE
    split = Split.tokenize(Examples(TASKS[task], ids, texts, labels * repeat), tokenizer, pairing)
    return split.with_text_hashes().batch(torch.arange(6 * repeat))


def gradients(model: MultitaskBERT, batch: Batch, spec: str, *flags: str, **options: Any) -> dict[str, Tensor]:
    """The gradients of the loss, plus the regularizer if one is given."""
    args = get_args(["--option", "finetune", f"--{batch.task}_loss", spec, *flags])
    model.zero_grad()
    output = model.predict(batch)
    loss = losses.build_objective(spec, TASKS[batch.task], args)(output, batch)
    regularizer = options.get("regularizer")
    (loss if regularizer is None else loss + regularizer(model, batch, output)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def close(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Assert equality up to float32's rounding, relative to the largest gradient of all parameters."""
    assert one.keys() == other.keys()
    scale = max(g.abs().max().item() for g in one.values())
    assert scale > 0
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=tolerance * scale, msg=name)


# --- the hashes of texts ----------------------------------------------------------------------------------------------


def test_a_batch_hashes_its_texts_by_their_tokens_in_whichever_column(tokenizer: BertTokenizer) -> None:
    first, second = (column.tolist() for column in batch_of(tokenizer).text_hashes)
    assert first[0] == first[3] == second[5]
    assert len({*first, *second}) == 10


def test_the_hashes_follow_the_rows_that_are_chosen(tokenizer: BertTokenizer) -> None:
    ragged = Ragged.tokenize(tokenizer, FIRST)
    everything = ragged.hashes(torch.arange(6))
    assert torch.equal(ragged.hashes(torch.tensor([4, 1])), everything[[4, 1]])
    assert torch.equal(ragged.select(torch.tensor([5, 2, 0])).hashes(torch.tensor([2, 0])), everything[[0, 5]])


def pairs_of(tokenizer: BertTokenizer) -> Split:
    return Split.tokenize(Examples(PARA, list("abcdef"), (FIRST, SECOND), [0, 1] * 3), tokenizer, PAIRINGS["bi"])


def test_stored_vectors_of_a_frozen_encoder_have_their_texts_hashes_too(tokenizer: BertTokenizer) -> None:
    split = pairs_of(tokenizer).with_text_hashes()
    stored = split.with_vectors((torch.randn(6, 4), torch.randn(6, 4))).batch(torch.tensor([3, 0]))
    assert stored.sentences == ()
    assert stored.text_hashes[0][0] == stored.text_hashes[0][1]


def test_texts_are_hashed_only_for_a_loss_that_reads_them(tokenizer: BertTokenizer) -> None:
    split = pairs_of(tokenizer)
    assert split.batch(torch.arange(2)).text_hashes == ()
    for name, loss in losses.LOSSES.items():
        if not isinstance(PARA.predicts, loss.fits):
            continue
        args = get_args(["--option", "finetune", "--para_loss", name, "--para_head", "cosine_affine", *TEACHER[name]])
        hashed = multitask_build.training_rows(split, args).batch(torch.arange(2)).text_hashes
        assert len(hashed) == (2 if name in ("mnrl", "mnrl_head", "simcse") else 0), name


# --- encoding in chunks -----------------------------------------------------------------------------------------------

CHUNKED = [("para", "bce+mnrl:0.5"), ("sts", "mse+cosent:0.1+cosine_embedding"), ("sst", "ce+simcse"), ("sts", "mse")]


@pytest.mark.parametrize(("task", "spec"), CHUNKED)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("pooling", ["mean", "bigru"])
def test_gradients_by_chunks_are_those_of_one_pass(
    pooling: str, rows: int, task: str, spec: str, build: Callable[..., MultitaskBERT], tokenizer: BertTokenizer
) -> None:
    batch = batch_of(tokenizer, task)
    whole = gradients(build(pooling=pooling), batch, spec)
    close(whole, gradients(build(pooling=pooling, chunk_rows=rows), batch, spec))


def test_the_mean_over_small_batches_is_something_else(
    build: Callable[..., MultitaskBERT], tokenizer: BertTokenizer
) -> None:
    """--accumulate is no substitute: each small batch lacks the negatives of the others."""
    batch = batch_of(tokenizer)
    examples = Examples(PARA, batch.ids, (FIRST, SECOND), batch.labels.tolist())
    split = Split.tokenize(examples, tokenizer, PAIRINGS["bi"]).with_text_hashes()
    whole = gradients(build(), batch, "bce+mnrl")
    halves = [gradients(build(), split.batch(torch.arange(3) + start), "bce+mnrl") for start in (0, 3)]
    with pytest.raises(AssertionError):
        close(whole, {name: (halves[0][name] + halves[1][name]) / 2 for name in whole})


def test_chunks_draw_the_same_dropout_masks_again(
    build: Callable[..., MultitaskBERT], tokenizer: BertTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of(tokenizer)
    model = build(p=0.3, chunk_rows=5)

    def found() -> dict[str, Tensor]:
        torch.manual_seed(3)
        return gradients(model, batch, "bce+mnrl+simcse")

    recomputed = found()
    monkeypatch.setattr(multitask_model, "checkpoint", lambda f, *inputs, use_reentrant: f(*inputs))
    close(found(), recomputed, 1e-7)


@pytest.mark.parametrize("start", ["embeddings", "logits"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_chunks_go_with_smart_and_with_checkpointed_layers(
    checkpointed: bool, start: str, build: Callable[..., MultitaskBERT], tokenizer: BertTokenizer
) -> None:
    batch = batch_of(tokenizer)
    found = []
    for flags in ({}, {"chunk_rows": 5, "checkpoint_activations": checkpointed}):
        torch.manual_seed(5)
        found.append(
            gradients(build(**flags), batch, "bce+mnrl", regularizer=smart.Smart(start=start, radius=0.1, steps=2))
        )
    close(*found, 1e-4)


def test_smarts_passes_share_the_clean_passs_dropout_masks_in_chunks(
    build: Callable[..., MultitaskBERT], tokenizer: BertTokenizer
) -> None:
    batch = batch_of(tokenizer)
    model = build(p=0.3, chunk_rows=5)
    output = model.predict(batch)
    torch.testing.assert_close(model.predict(batch, output.embeddings, output.random_state).logits, output.logits)
    assert not torch.allclose(model.predict(batch).logits, output.logits)


class LiveBytes(TorchDispatchMode):
    """Record the peak of the total size of all live tensors that were created within the context."""

    def __init__(self):
        super().__init__()
        self.live, self.peak = 0, 0
        self.seen: set[int] = set()

    def freed(self, key: int, size: int) -> None:
        self.live -= size
        self.seen.discard(key)

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self.seen:
                    self.seen.add(key)
                    self.live += size
                    weakref.finalize(storage, self.freed, key, size)
        self.peak = max(self.peak, self.live)
        return result


def test_the_peak_of_memory_falls_with_the_chunks(
    build: Callable[..., MultitaskBERT], tokenizer: BertTokenizer
) -> None:
    batch = batch_of(tokenizer, repeat=40)  # 480 sentences, whose activations outweigh the word embeddings' gradient
    peaks = {}
    for rows in (None, 240, 40):
        model = build(chunk_rows=rows)
        gradients(model, batch, "bce+mnrl")  # afterwards .grad exists and the kernels are compiled
        model.bert.word_embedding.requires_grad_(False)
        with LiveBytes() as memory:
            gradients(model, batch, "bce+mnrl")
        peaks[rows] = memory.peak
    assert peaks[240] < 0.7 * peaks[None]
    assert peaks[40] < 0.4 * peaks[None]


# --- the script -------------------------------------------------------------------------------------------------------

TUNED = ["--option", "finetune", "--epochs", 1, "--lr", "1e-3", "--batch_size", 4]
ADDED = [
    ("sst", "simcse"),
    ("para", "cosine_embedding"),
    ("para", "mnrl"),
    ("para", "mnrl_head"),
    ("sts", "cosent"),
    ("sts", "mnrl"),
    ("sts", "simcse"),
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Finished:
    return run_multitask(tmp_path_factory.mktemp("plain"), tiny_checkpoint, *TUNED)


@pytest.fixture(scope="module")
def taught(plain: Finished) -> Finished:
    """The same run after it has also predicted its training rows."""
    run_multitask(plain.folder, plain.folder, "--predict_only", "--predict_train", "--run", plain.run)
    return plain


@pytest.mark.parametrize(("task", "loss"), ADDED)
def test_a_further_loss_leads_to_other_weights(
    task: str, loss: str, plain: Finished, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    done = run_multitask(tmp_path, tiny_checkpoint, *TUNED, f"--{task}_loss", f"{DEFAULTS[task]}+{loss}:0.5")
    assert not same(done.weights(), plain.weights())
    assert all(np.isfinite(list(epoch["losses"].values())).all() for epoch in done.log())


DEFAULTS = {name: task.predicts.default_loss for name, task in TASKS.items()}


def test_every_new_loss_is_among_those_that_were_tried() -> None:
    tried = {loss for _, loss in ADDED} | {"distill", "ce", "ce_smooth", "bce", "mse"}
    assert tried == set(losses.LOSSES)


@pytest.mark.parametrize("spec", ["mnrl", "cosent", "cosine_embedding"])
@pytest.mark.parametrize(("task", "head"), [("para", "cosine_affine"), ("sts", "cosine")])
def test_a_loss_on_vectors_trains_alone_below_a_head_of_cosines_that_stays_as_it_is(
    task: str, head: str, spec: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    flags = ["--tasks", task, f"--{task}_head", head, f"--{task}_loss", spec, "--clip", 1]
    weights = run_multitask(tmp_path, tiny_checkpoint, *TUNED, *flags).weights()
    start = MultitaskBERT(get_args(["--model", str(tiny_checkpoint), *map(str, TUNED + flags)]))
    assert not torch.equal(weights["bert.pooler.dense.weight"], start.bert.pooler_dense.weight)
    for name, value in start.heads.state_dict().items():
        assert torch.equal(weights[f"heads.{name}"], value)


def test_the_ranking_of_the_heads_own_scores_trains_the_head_on_a_frozen_encoder(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    flags = ["--tasks", "para", "--para_loss", "mnrl_head", "--epochs", 1]
    learned, still = (
        run_multitask(tmp_path / lr, tiny_checkpoint, *flags, "--lr", lr).weights()["heads.para.linear.weight"]
        for lr in ("1e-2", "1e-9")
    )
    assert (learned - still).abs().max() > 1e-3


def test_of_a_linear_head_the_ranking_trains_the_second_sentences_part_alone(
    build: Callable[..., MultitaskBERT], tokenizer: BertTokenizer
) -> None:
    """w.x + b is the same for all candidates of x. So Tlemcani & Sohn's score is just the larger class's share."""
    found = gradients(build(), batch_of(tokenizer), "mnrl_head")
    first, second = found["heads.para.linear.weight"].abs().split(32, dim=1)
    assert max(first.max(), found["heads.para.linear.bias"].abs().max()) < 1e-5 * second.max()


def test_chunks_train_and_predict_from_the_command_line(tiny_checkpoint: Path, tmp_path: Path) -> None:
    flags = [*TUNED, "--tasks", "para", "--para_loss", "bce+mnrl:0.2", "--chunk_rows", 3]
    done = run_multitask(tmp_path, tiny_checkpoint, *flags)
    training = [rows for rows, is_training in done.encoded if is_training]
    assert set(training) == {2, 3}  # 8 sentences: 3, 3, 2, and again in the backward pass
    assert len(training) == 2 * 3 * 2
    assert {rows for rows, is_training in done.encoded if not is_training} == {6, 10}


# --- distillation -----------------------------------------------------------------------------------------------------


def test_predict_train_writes_the_logits_of_every_training_row(taught: Finished) -> None:
    for name in ("sst", "para", "sts"):
        ids, logits = read_logits(taught.run / f"{name}-train.npz", TASKS[name], "Again.", labeled=True)[:2]
        assert ids == [f"train{i:020d}" for i in range(8)]
        assert logits.shape == (8, TASKS[name].predicts.num_logits)
        with np.load(taught.run / f"{name}-train.npz") as found:
            assert len(found["labels"]) == 8


def test_predict_train_scores_all_rows_as_dev_is_scored_whatever_was_trained_on(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    flags = [*TUNED, "--tasks", "sts", "--max_train", 3, "--symmetric"]
    done = run_multitask(tmp_path, tiny_checkpoint, *flags)
    for split in ("train", "dev"):  # dev becomes the training file, row by row
        text = (tmp_path / "data" / "sts-train.csv").read_text()
        (tmp_path / "data" / f"sts-{split}.csv").write_text(text)
    run_multitask(tmp_path, tiny_checkpoint, "--predict_only", "--predict_train", "--run", done.run)
    (ids, train), (_, dev) = (
        read_logits(done.run / f"sts-{split}.npz", TASKS["sts"], "Again.", labeled=True)[:2]
        for split in ("train", "dev")
    )
    assert len(ids) == 8
    np.testing.assert_allclose(train, dev, rtol=1e-5)


def test_predict_train_follows_other_data(taught: Finished, tmp_path: Path) -> None:
    write_task_files(tmp_path / "data", rows=5)
    before = {path.name: path.read_bytes() for path in taught.run.glob("*.npz")}
    try:
        flags = ["--data", tmp_path / "data", "--predictions", tmp_path / "predictions", "--run", taught.run]
        run_multitask(taught.folder, taught.folder, "--predict_only", "--predict_train", *flags)
        assert len(read_logits(taught.run / "sst-train.npz", TASKS["sst"], "Again.", labeled=True).ids) == 5
    finally:
        for name, content in before.items():
            (taught.run / name).write_bytes(content)


@pytest.mark.parametrize(("task", "option"), [("sst", []), ("para", []), ("sts", []), ("sts", TUNED)])
def test_a_student_comes_close_to_its_teacher(
    task: str, option: list[Any], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """The labels do not matter: this teacher predicts something that no label says."""
    rng = np.random.default_rng(1)
    C = TASKS[task].predicts.num_logits
    wanted = np.tile(rng.normal(size=C), (8, 1)).astype(np.float32) + 1
    ids = [f"train{i:020d}" for i in (*range(7, -1, -1), 99)]  # in another order, and with one row too many
    logits = np.concatenate([wanted[::-1], np.full((1, C), 50, dtype=np.float32)])
    write_logits(tmp_path / f"{task}-train.npz", Predictions(ids, logits, np.zeros(9), None))
    flags = ["--tasks", task, f"--{task}_loss", "distill", "--teacher", tmp_path, "--hidden_dropout_prob", 0]
    done = run_multitask(tmp_path, tiny_checkpoint, *option, *flags, "--epochs", 30, "--lr", "2e-2")
    first, last = done.log()[0]["losses"][task], done.log()[-1]["losses"][task]
    assert last < 0.1 * first


def test_the_teachers_logits_stay_with_their_rows(tokenizer: BertTokenizer, tmp_path: Path) -> None:
    ids = list("abcdef")
    split = Split.tokenize(Examples(STS, ids, (FIRST, SECOND), [0.5] * 6), tokenizer, PAIRINGS["bi"])
    known = dict(zip("xfbdaec", range(7), strict=True))
    logits = np.array([[value] for value in known.values()], dtype=np.float64)
    write_logits(tmp_path / "t.npz", Predictions(list(known), logits, np.zeros(7), None))
    taught = multitask_build.with_teacher(split, tmp_path / "t.npz")
    assert taught.teacher.dtype == torch.float32
    for part, rows in ((taught, [4, 0]), (taught.select(torch.tensor([5, 4, 0])), [1, 2])):
        batch = part.batch(torch.tensor(rows)).to(torch.device("cpu"))
        assert batch.teacher.flatten().tolist() == [known[i] for i in batch.ids] == [known["e"], known["a"]]
    assert split.batch(torch.tensor([0])).teacher is None


def test_a_run_goes_on_only_with_the_teacher_it_started_with(
    taught: Finished, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "teacher").mkdir()
    teacher = tmp_path / "teacher" / "sst-train.npz"
    teacher.write_bytes((taught.run / "sst-train.npz").read_bytes())
    flags = ["--tasks", "sst", "--sst_loss", "ce+distill", "--teacher", tmp_path / "teacher"]
    run_multitask(tmp_path, tiny_checkpoint, *flags, "--epochs", 1)
    run_multitask(tmp_path, tiny_checkpoint, *flags, "--epochs", 1, "--resume")
    ids, logits = read_logits(teacher, TASKS["sst"], "Again.", labeled=False)[:2]
    write_logits(teacher, Predictions(ids, logits + 1, np.zeros(8), None))
    with pytest.raises(InputError, match=r"sst-train\.npz changed since the run was started"):
        run_multitask(tmp_path, tiny_checkpoint, *flags, "--epochs", 1, "--resume")


def test_a_mixture_of_labels_and_teacher_leads_to_other_weights(
    taught: Finished, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    flags = [*TUNED, "--sst_loss", "ce+distill", "--teacher", taught.run, "--seed", 3]
    done = run_multitask(tmp_path / "a", tiny_checkpoint, *flags)
    other = run_multitask(tmp_path / "b", tiny_checkpoint, *flags, "--distill_temperature", 9)
    assert not same(done.weights(), other.weights())
    assert SST.name in done.log()[0]["losses"]
