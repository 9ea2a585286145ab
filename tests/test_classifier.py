"""Part 1 end to end on tiny files; its training loop, mixed precision and prediction files."""

import contextlib
import io
import json
import math
import shutil
import subprocess
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, write_task_files
from safetensors.torch import load_file
from torch import Tensor, nn

import classifier
import optimizer
from base_bert import checkpoint_state
from bert import ATTENTIONS, BertModel
from classifier import BertSentimentClassifier, get_args
from config import BertConfig
from datasets import Examples, Split
from distributed import World
from evaluation import predict, score, with_stored_vectors, write_predictions
from losses import cross_entropy
from manifest import read_manifest
from runs import Run
from tasks import CFIMDB, PARA, SST, STS, Batch, Output, Predictions, Task
from tokenizer import BertTokenizer
from trainer import EpochRecord, Step, Trainer
from training import CHECK_EVERY, fit, train_on
from utils import InputError, Precision

CPU = torch.device("cpu")
FP32 = Precision("fp32", CPU)


pytestmark = pytest.mark.usefixtures("one_thread")


# --- the script, end to end -------------------------------------------------------------------------------------------


@dataclass
class Finished:
    folder: Path
    out: str
    models: list[BertSentimentClassifier]  # as training left them
    encoded: list[tuple[int, bool]]  # rows and training mode of every call of BERT

    def predictions(self) -> dict[str, str]:
        return {path.name: path.read_bytes().decode() for path in (self.folder / "predictions").glob("*.csv")}

    def weights(self, task: str) -> dict[str, Tensor]:
        return load_file(self.folder / "runs" / "r" / task / "model.safetensors")


def run_classifier(folder: Path, model: Path, *flags: object) -> Finished:
    """Run classifier.py on both tasks in this process and record the models and the calls of BERT."""
    write_task_files(folder / "data")
    done = Finished(folder, "", [], [])
    build_model, forward = classifier.build_model, BertModel.forward

    def building(*args: object) -> BertSentimentClassifier:
        done.models.append(build_model(*args))
        return done.models[-1]

    def counting(bert: BertModel, input_ids: Tensor, *args: Tensor) -> dict[str, Tensor]:
        done.encoded.append((len(input_ids), bert.training))
        return forward(bert, input_ids, *args)

    given = {"--model": model, "--data": folder / "data", "--runs": folder / "runs", "--name": "r"}
    given |= {"--predictions": folder / "predictions", "--batch_size": 3, "--eval_batch_size": 5}
    pairs = (part for pair in given.items() for part in pair)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(sys, "argv", ["classifier.py", *map(str, (*pairs, *flags))])
        patch.setattr(classifier, "build_model", building)
        patch.setattr(BertModel, "forward", counting)
        classifier.main()
    done.out = out.getvalue()
    return done


RUNS = {
    "pretrain": ["--option", "pretrain", "--epochs", 3],
    "finetune": ["--option", "finetune", "--epochs", 2, "--lr", "1e-3"],
    "full-model": ["--fine-tune-mode", "full-model", "--epochs", 2, "--lr", "1e-3"],
    "other seed": ["--option", "pretrain", "--epochs", 3, "--seed", 1],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> dict[str, Finished]:
    return {name: run_classifier(tmp_path_factory.mktemp("r"), tiny_checkpoint, *flags) for name, flags in RUNS.items()}


@pytest.mark.parametrize("option", ["pretrain", "finetune"])
def test_each_option_writes_exactly_its_four_prediction_files(option: str, runs: dict[str, Finished]):
    found = runs[option].predictions()
    assert set(found) == {f"{option}-{task}-{split}-out.csv" for task in ("sst", "cfimdb") for split in ("dev", "test")}
    for name, text in found.items():
        header, *rows, end = text.split("\n")
        assert (header, end) == ("id \t Predicted_Sentiment ", "")
        ids = [f"dev{i:020d}" if "-dev-" in name else f"test{i:021d}" for i in range(8)]
        grades = range(5) if "-sst-" in name else range(2)
        assert [row.partition(" , ")[0] for row in rows] == ids, "in the order of the file"
        assert all(row.partition(" , ")[2] in [f"{grade} " for grade in grades] for row in rows)


def same_weights(one: Finished, other: Finished) -> bool:
    pairs = [(one.weights(task), other.weights(task)) for task in ("sst", "cfimdb")]
    return all(a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in pairs)


def test_the_same_seed_gives_the_same_files_under_either_name_of_the_option(runs: dict[str, Finished]):
    later = {name.replace("finetune", "full-model"): text for name, text in runs["finetune"].predictions().items()}
    assert runs["full-model"].predictions() == later
    assert same_weights(runs["finetune"], runs["full-model"])


def test_the_last_of_both_names_of_the_option_counts_and_names_the_files():
    for flags, option, mode in (
        ([], "pretrain", None),
        (["--option", "finetune"], "finetune", None),
        (["--fine-tune-mode", "full-model"], "finetune", "full-model"),
        (["--fine-tune-mode", "full-model", "--option", "pretrain"], "pretrain", None),
        (["--option", "finetune", "--fine_tune_mode=last-linear-layer"], "pretrain", "last-linear-layer"),
    ):
        args = classifier.get_args(flags)
        assert (args.option, args.fine_tune_mode) == (option, mode), flags


def test_the_manifest_has_the_run_and_the_data_of_every_file(runs: dict[str, Finished]):
    done = runs["full-model"]
    origins = read_manifest(done.folder / "predictions")
    assert origins.keys() == done.predictions().keys()
    for name, origin in origins.items():
        task = "sst" if "-sst-" in name else "cfimdb"
        data = done.folder / "data" / classifier.PART_1_TASKS[task].filename("dev" if "-dev-" in name else "test")
        assert (origin.run, origin.data) == (str(done.folder / "runs" / "r" / task), str(data))
        assert origin.data_sha256 == sha256(data.read_bytes()).hexdigest()
        assert origin.sha256 == sha256(done.predictions()[name].encode()).hexdigest()
        assert (origin.script, origin.rows) == ("classifier.py", 8)
        assert "--fine-tune-mode full-model" in origin.command


def test_max_train_trains_on_the_same_few_rows_for_the_same_seed(tmp_path: Path, tokenizer: BertTokenizer):
    write_task_files(tmp_path)

    def rows(*flags: str) -> list[str]:
        args = classifier.get_args(["--data", str(tmp_path), *flags])
        splits = classifier.load_splits(SST, args, tokenizer)
        assert [len(splits[name]) for name in ("dev", "test")] == [8, 8]
        return splits["train"].ids

    whole, few = rows(), rows("--max_train", "3")
    assert len(few) == 3
    assert few == [identifier for identifier in whole if identifier in few], "in the order of the file"
    assert rows("--max_train", "3") == few
    assert any(rows("--max_train", "3", "--seed", str(seed)) != few for seed in range(5))
    assert rows("--max_train", "9") == whole


def test_a_run_is_resumed_only_with_the_same_max_train(runs: dict[str, Finished], tiny_checkpoint: Path):
    folder = runs["finetune"].folder
    data = ["--data", str(folder / "data"), "--runs", str(folder / "runs"), "--name", "r", "--model"]
    flags = [*RUNS["finetune"], "--batch_size", 3, *data, tiny_checkpoint, "--resume"]
    classifier.open_run(SST, classifier.get_args(list(map(str, flags)))).release()
    with pytest.raises(InputError, match=r"was started with --max_train None \(now 4\)"):
        classifier.open_run(SST, classifier.get_args([*map(str, flags), "--max_train", "4"]))


def test_a_run_that_is_older_than_fine_tune_mode_can_be_resumed_under_either_name(
    runs: dict[str, Finished], tiny_checkpoint: Path, tmp_path: Path
):
    shutil.copytree(runs["finetune"].folder / "runs", tmp_path / "runs")
    path = tmp_path / "runs" / "r" / "sst" / "args.json"
    facts = json.loads(path.read_text())
    del facts["args"]["fine_tune_mode"], facts["args"]["max_train"]
    path.write_text(json.dumps(facts))
    data = ["--data", runs["finetune"].folder / "data", "--runs", tmp_path / "runs", "--name", "r", "--resume"]
    for flags in (RUNS["finetune"], RUNS["full-model"]):
        given = [*flags, "--batch_size", 3, *data, "--model", tiny_checkpoint]
        classifier.open_run(SST, classifier.get_args(list(map(str, given)))).release()


def test_another_seed_gives_other_weights(runs: dict[str, Finished]):
    assert not same_weights(runs["pretrain"], runs["other seed"])


@pytest.mark.parametrize("name", ["pretrain", "finetune"])
def test_a_run_notes_versions_commit_data_and_every_epoch(name: str, runs: dict[str, Finished]):
    done = runs[name]
    for task in ("sst", "cfimdb"):
        folder = done.folder / "runs" / "r" / task
        files = {path.name for path in folder.iterdir()}
        assert files == {
            "args.json",
            "log.jsonl",
            "output.txt",
            ".lock",
            "model.safetensors",
            "config.json",
            "dev.json",
            "vocab.txt",
            "tokenizer_config.json",
            f"{task}-dev.npz",
            f"{task}-test.npz",
        }
        facts = json.loads((folder / "args.json").read_text())
        assert facts["args"]["option"] == name
        assert facts["args"]["seed"] == 11711
        assert facts["command"][0] == "classifier.py"
        assert {"python", "torch", "numpy", "tokenizers"} <= facts["versions"].keys()
        assert facts["versions"]["torch"] == torch.__version__
        paths = [done.folder / "data" / f"ids-{task}-{split}.csv" for split in ("train", "dev", "test-student")]
        assert facts["data_sha256"] == {str(path): sha256(path.read_bytes()).hexdigest() for path in paths}
        log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        assert [line["epoch"] for line in log] == list(range(1, 4 if name == "pretrain" else 3))
        keys = {"epoch", "losses", "penalties", "train", "scores", "best", "gradients", "memory", "seconds"}
        keys |= {"curve", "cosines"}
        assert all(line.keys() == keys for line in log)
        best = max(line["scores"]["dev"] for line in log)
        assert json.loads((folder / "dev.json").read_text()) == {"dev": best}
        assert [line["best"] for line in log] == [
            all(line["scores"]["dev"] > earlier["scores"]["dev"] for earlier in log[:i]) for i, line in enumerate(log)
        ]
        assert f"{task}: best dev accuracy {best:.3f} | " in done.out


def test_a_run_notes_the_commit_of_the_project(runs: dict[str, Finished]):
    def hash_of(name: str) -> str:
        asked = ["git", "-C", str(ROOT), "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"]
        return subprocess.run(asked, capture_output=True, text=True).stdout

    facts = json.loads((runs["finetune"].folder / "runs" / "r" / "sst" / "args.json").read_text())
    if not hash_of("HEAD"):
        assert facts["commit"] is None
    else:
        assert hash_of(facts["commit"].removesuffix("+")) == hash_of("HEAD")


def test_the_predictions_are_those_of_the_best_weights(runs: dict[str, Finished], tokenizer: BertTokenizer):
    done = runs["finetune"]
    for task, model in zip((SST, CFIMDB), done.models, strict=True):
        best = done.weights(task.name)
        assert best.keys() == checkpoint_state(model).keys()
        assert all(torch.equal(tensor, best[name]) for name, tensor in checkpoint_state(model).items())
        words = ["good", "bad", "dull", "bright", "slow"]
        texts = [f"A {words[i % 5]} film ." for i in range(8)]
        split = Split.tokenize(Examples(task, [f"test{i:021d}" for i in range(8)], (texts,)), tokenizer)
        path = done.folder / f"again-{task.name}.csv"
        write_predictions(path, task, predict(model, split, 5, FP32))
        assert path.read_text() == done.predictions()[f"finetune-{task.name}-test-out.csv"]


def test_a_recipe_file_gives_flags_and_later_flags_win(tmp_path: Path):
    recipe = tmp_path / "recipe.txt"
    recipe.write_text("# SST alone\n--tasks sst  # and not cfimdb\n\n--epochs 3 --lr 5e-5\n   --strict_data\n")
    args = get_args([f"@{recipe}", "--epochs", "7"])
    assert (args.tasks, args.epochs, args.lr, args.strict_data) == (["sst"], 7, 5e-5, True)
    assert get_args(["--epochs", "7", f"@{recipe}"]).epochs == 3
    assert get_args(["--batch_size", "5", f"@{recipe}"]).batch_size == 5


def test_the_learning_rate_follows_the_option_unless_given():
    assert get_args([]).lr == get_args(["--option", "pretrain"]).lr == 1e-3
    assert get_args(["--option", "finetune"]).lr == get_args(["--fine-tune-mode", "full-model"]).lr == 1e-5
    assert get_args(["--option", "finetune", "--lr", "2e-5"]).lr == 2e-5
    assert get_args(["--option", "pretrain", "--fine-tune-mode", "full-model"]).option == "finetune"
    assert get_args(["--option", "finetune", "--fine-tune-mode", "last-linear-layer"]).option == "pretrain"


# --- a frozen BERT ----------------------------------------------------------------------------------------------------


def test_a_frozen_bert_sees_every_row_once_and_in_eval_mode(runs: dict[str, Finished]):
    seen = runs["pretrain"].encoded
    assert sum(rows for rows, _ in seen) == 2 * 3 * 8  # two tasks with three files of eight rows, for all three epochs
    assert not any(training for _, training in seen)


def test_a_fine_tuned_bert_sees_its_training_rows_in_every_epoch_and_in_training_mode(runs: dict[str, Finished]):
    seen = runs["finetune"].encoded
    assert sum(rows for rows, training in seen if training) == 2 * 2 * 8  # two tasks, two epochs
    assert sum(rows for rows, training in seen if not training) == 2 * (2 + 2) * 8  # dev twice, then dev and test


def test_a_frozen_bert_stays_bit_for_bit_what_it_was(runs: dict[str, Finished], tiny_checkpoint: Path):
    before = BertModel.from_pretrained(str(tiny_checkpoint)).state_dict()
    for model in runs["pretrain"].models:
        assert all(torch.equal(before[name], tensor) for name, tensor in model.bert.state_dict().items())
    for model in runs["finetune"].models:
        assert not all(torch.equal(before[name], tensor) for name, tensor in model.bert.state_dict().items())


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> BertTokenizer:
    return BertTokenizer.from_pretrained(str(tiny_checkpoint))


@pytest.fixture
def build(tiny_checkpoint: Path) -> Callable[..., BertSentimentClassifier]:
    def build(frozen: bool = False, outputs: int = 5) -> BertSentimentClassifier:
        torch.manual_seed(1)
        option = "pretrain" if frozen else "finetune"
        return BertSentimentClassifier(Namespace(model=str(tiny_checkpoint), num_labels=outputs, option=option))

    return build


Build = Callable[..., BertSentimentClassifier]

TEXTS = ["A good film .", "", "dull " * 40, "Bad", "A rather longer sentence , and one more clause .", "x y z"]
LABELS = [3, 2, 0, 1, 4, 2]


@pytest.fixture(scope="module")
def split(tokenizer: BertTokenizer) -> Split:
    return Split.tokenize(Examples(SST, [f"id{i}" for i in range(6)], (TEXTS,), LABELS), tokenizer)


def test_a_frozen_bert_is_in_eval_mode_although_train_was_called(build: Build):
    frozen, tuned = build(frozen=True).train(), build(frozen=False).train()
    assert not any(module.training for module in frozen.bert.modules())
    assert frozen.training
    assert frozen.dropout.training
    assert all(module.training for module in tuned.modules())
    assert not any(parameter.requires_grad for parameter in frozen.bert.parameters())
    assert all(parameter.requires_grad for parameter in tuned.parameters())


def test_stored_vectors_give_the_logits_of_the_whole_model(build: Build, split: Split):
    model = build(frozen=True).train()
    stored = with_stored_vectors(model, split, 4, FP32)
    assert stored.vectors[0].shape == (6, 32)
    assert not stored.vectors[0].requires_grad
    assert stored.ids == split.ids
    whole = predict(model, split, 4, FP32).logits
    np.testing.assert_allclose(predict(model, stored, 3, FP32).logits, whole, atol=1e-6)
    np.testing.assert_allclose(predict(build(frozen=False), split, 2, FP32).logits, whole, atol=1e-6)


def test_the_handouts_forward_gives_the_same_logits(build: Build, split: Split):
    model = build().eval()
    batch = split.batch(torch.tensor([4, 0, 2]))
    (sentence,) = batch.sentences
    with torch.no_grad():
        assert torch.equal(model(sentence.token_ids, sentence.attention_mask), model.predict(batch).logits)


# --- predictions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", sorted(ATTENTIONS))
def test_a_prediction_does_not_depend_on_its_batch(attention: str, build: Build, split: Split):
    model = build().eval()
    model.bert.use_attention(attention)
    with torch.no_grad():
        alone = torch.cat([model.predict(split.batch(torch.tensor([row]))).logits for row in range(6)])
        for rows in ([0, 1, 2, 3, 4, 5], [5, 2, 0], [1, 2]):
            together = model.predict(split.batch(torch.tensor(rows))).logits
            torch.testing.assert_close(together, alone[rows], atol=1e-6, rtol=0)
    assert len(alone.unique(dim=0)) == 6, "the sentences differ"


class Watched(nn.Module):
    """Records the mode in which it is called. Its logits encode the number in a row's id."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.world = nn.Parameter(torch.ones(())), World()
        self.seen: list[tuple[bool, bool]] = []

    def predict(self, batch: Batch) -> Output:
        self.seen.append((self.training, torch.is_grad_enabled()))
        rows = torch.tensor([float(i.removeprefix("id")) for i in batch.ids])
        return Output(F.one_hot(rows.long() % 5, 5) * self.scale, (rows[:, None],))


def test_predictions_are_in_file_order_without_gradients_and_in_eval_mode(split: Split):
    model = Watched().train()
    found = predict(model, split, 2, FP32)
    assert found.ids == split.ids == [f"id{i}" for i in range(6)]
    assert found.values.tolist() == [0, 1, 2, 3, 4, 0]
    assert found.logits.argmax(1).tolist() == [0, 1, 2, 3, 4, 0]
    assert found.labels.tolist() == LABELS
    assert model.seen == [(False, False)] * 3
    assert score(SST, found) == np.mean([p == label for p, label in zip([0, 1, 2, 3, 4, 0], LABELS, strict=True)])


# a float32 is written with all the digits of its value, as the starter's f-string does
GOLDEN: list[tuple[Task, np.ndarray, str]] = [
    (SST, np.array([4, 0, 2]), "id \t Predicted_Sentiment \na1 , 4 \nb2 , 0 \nc3 , 2 \n"),
    (CFIMDB, np.array([1, 0]), "id \t Predicted_Sentiment \na1 , 1 \nb2 , 0 \n"),
    (PARA, np.array([0, 1], dtype=np.float32), "id \t Predicted_Is_Paraphrase \na1 , 0.0 \nb2 , 1.0 \n"),
    (
        STS,
        np.array([1.0, 3.25, -0.1, 1e-7], dtype=np.float32),
        "id \t Predicted_Similiary \na1 , 1.0 \nb2 , 3.25 \nc3 , -0.10000000149011612 \nd4 , 1.0000000116860974e-07 \n",
    ),
]


@pytest.mark.parametrize(("task", "values", "text"), GOLDEN, ids=[task.name for task, _, _ in GOLDEN])
def test_prediction_files_are_literally_the_starters(task: Task, values: np.ndarray, text: str, tmp_path: Path):
    ids = ["a1", "b2", "c3", "d4"][: len(values)]
    path = tmp_path / "out.csv"
    write_predictions(path, task, Predictions(ids, values[:, None], values, None))
    assert path.read_bytes() == text.encode()
    assert list(tmp_path.iterdir()) == [path], "no temporary file is left"


@pytest.mark.parametrize(
    ("task", "logits", "values"),
    [
        (SST, [[0.0, 1, 5, 2, 3], [9.0, 1, 5, 2, 3]], "a1 , 2 \nb2 , 0 \n"),
        (CFIMDB, [[0.0, 1], [1.0, 0]], "a1 , 1 \nb2 , 0 \n"),
        (PARA, [[-0.1], [0.1]], "a1 , 0.0 \nb2 , 1.0 \n"),
        (STS, [[3.25], [5.5]], "a1 , 3.25 \nb2 , 5.5 \n"),
    ],
    ids=["sst", "cfimdb", "para", "sts"],
)
def test_logits_are_decoded_and_written_as_the_leaderboard_reads_them(
    task: Task, logits: list[list[float]], values: str, tmp_path: Path
):
    found = Predictions(["a1", "b2"], np.array(logits), task.predicts.decode(torch.tensor(logits)).numpy(), None)
    write_predictions(tmp_path / "out.csv", task, found)
    assert (tmp_path / "out.csv").read_text() == task.csv_header + values


# --- the loop ---------------------------------------------------------------------------------------------------------


class Head(nn.Module):
    """A linear layer on stored vectors: the smallest model that the loop can train."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 5)

    def predict(self, batch: Batch) -> Output:
        return Output(self.linear(batch.vectors[0]), batch.vectors)


class HeadAndBert(Head):
    """A Head with an unused encoder, so that the model can be saved."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = BertModel(BertConfig(vocab_size=8, hidden_size=4, num_hidden_layers=1, num_attention_heads=2))


def some_batch(rows: int = 6, seed: int = 0) -> Batch:
    vectors = torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))
    return Batch("sst", [f"id{i}" for i in range(rows)], (), torch.arange(rows) % 5, (vectors,))


def build_trainer(
    model: nn.Module,
    objective: Callable[[Output, Batch], Tensor] = cross_entropy,
    precision: Precision = FP32,
    clip: float = 0.0,
    rule: type[torch.optim.Optimizer] = torch.optim.SGD,
) -> Trainer:
    update = rule(model.parameters(), lr=1e-2)
    schedule = optimizer.build_schedule(update, "constant", 10, 0.0)
    return Trainer(model, {"sst": objective}, update, schedule, precision, clip)


def weights_of(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("rows", [1, 3, 6])
def test_the_loss_is_the_mean_over_the_examples_in_the_batch(rows: int):
    batch, model = some_batch(rows), Head()
    logits = model.predict(batch).logits
    each = [-logits[i].log_softmax(0)[label].item() for i, label in enumerate(batch.labels)]
    losses = EpochRecord()
    build_trainer(model).update([[batch]], losses, 1)
    assert losses.mean_losses() == {"sst": pytest.approx(sum(each) / rows)}


def test_a_batch_repeated_within_itself_has_the_same_gradient():
    once, model = some_batch(3), Head()
    twice = Batch("sst", once.ids * 2, (), once.labels.repeat(2), (once.vectors[0].repeat(2, 1),))
    gradients = []
    for batch in (once, twice):
        model.zero_grad()
        cross_entropy(model.predict(batch), batch).backward()
        gradients.append(model.linear.weight.grad.clone())
    torch.testing.assert_close(*gradients)


def make_run(folder: Path) -> Run:
    (folder / "run").mkdir()
    return Run(folder / "run")


def test_the_best_epochs_weights_are_restored(tmp_path: Path, capsys: pytest.CaptureFixture):
    model, run = HeadAndBert(), make_run(tmp_path)
    scripted, after = iter([0.2, 0.9, 0.9, 0.5]), []

    def evaluate() -> dict[str, float]:
        after.append(weights_of(model))
        return {"dev": next(scripted), "epoch": len(after)}

    def steps(epoch: int) -> Iterator[Step]:
        yield from [[[some_batch(seed=epoch)]], [[some_batch(3, seed=epoch + 10)]]]

    best = fit(build_trainer(model), steps, evaluate, "dev", 4, run)
    assert best == {"dev": 0.9, "epoch": 2}, "a tie goes to the earlier epoch"
    assert not same(after[1], after[3])
    assert same(weights_of(model), after[1])
    log = [json.loads(line) for line in (run.folder / "log.jsonl").read_text().splitlines()]
    assert [line["best"] for line in log] == [True, True, False, False]
    assert [line["scores"]["dev"] for line in log] == [0.2, 0.9, 0.9, 0.5]
    printed = capsys.readouterr().out.splitlines()
    assert [line[:7] for line in printed] == ["epoch 1", "epoch 2", "epoch 3", "epoch 4"]
    assert ["| best |" in line for line in printed] == [True, True, False, False]


def test_the_loop_turns_training_mode_on_again_after_an_evaluation(tmp_path: Path):
    model, modes = HeadAndBert(), []

    def objective(output: Output, batch: Batch) -> Tensor:
        modes.append(model.training)
        return cross_entropy(output, batch)

    def evaluate() -> dict[str, float]:
        model.eval()
        return {"dev": 0.0}

    fit(build_trainer(model, objective), lambda _: [[[some_batch()]]], evaluate, "dev", 3, make_run(tmp_path))
    assert modes == [True] * 3


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("bad_step", "steps"), [(1, 1), (3, 5), (CHECK_EVERY + 2, CHECK_EVERY * 3)])
def test_a_loss_that_is_not_finite_stops_with_task_and_step(value: float, bad_step: int, steps: int):
    taken = []

    def objective(output: Output, batch: Batch) -> Tensor:
        taken.append(batch)
        return cross_entropy(output, batch) * (value if len(taken) == bad_step else 1.0)

    trainer = build_trainer(Head(), objective)
    with pytest.raises(InputError, match=rf"the loss of sst at step {bad_step} must be finite, found {value}\..*--lr"):
        train_on(trainer, [[[some_batch()]]] * steps)
    assert len(taken) - bad_step < CHECK_EVERY, "it is noticed within a few steps"


def test_a_user_sees_a_diverging_loss_as_one_line_and_keeps_no_predictions(
    tmp_path: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(classifier, "cross_entropy", lambda output, batch: output.logits.sum() * math.nan)
    with pytest.raises(InputError, match="the loss of sst at step 1 must be finite, found nan"):
        run_classifier(tmp_path, tiny_checkpoint, "--epochs", 1)
    assert not list((tmp_path / "predictions").iterdir())


# --- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize(("attention", "clip"), [("written", 0.0), ("fused", 1.0)])
def test_half_precision_trains_and_leaves_finite_float32_weights(
    name: str, attention: str, clip: float, build: Build, split: Split
):
    model, precision = build(), Precision(name, CPU)
    model.bert.use_attention(attention)
    before, losses = weights_of(model), EpochRecord()
    trainer = build_trainer(model.train(), precision=precision, clip=clip, rule=optimizer.AdamW)
    for step in (1, 2):
        trainer.update([[split.batch(torch.tensor([0, 1, 3, 5]))]], losses, step)
    after = weights_of(model)
    assert all(weight.dtype == torch.float32 and weight.isfinite().all() for weight in after)
    assert not same(before, after)
    assert math.isfinite(losses.mean_losses()["sst"])
    half = predict(model, split, 4, precision)
    assert half.logits.dtype == np.float32
    assert not np.array_equal(half.logits, predict(model, split, 4, FP32).logits), "autocast is on"
    np.testing.assert_allclose(half.logits, predict(model, split, 4, FP32).logits, atol=0.05)


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_an_fp16_overflow_skips_the_step_cleanly(clip: float):
    """The first loss is finite, but too large once it is scaled; the second is an ordinary one."""
    factors = iter([1e36, 1.0])
    model, precision = Head(), Precision("fp16", CPU)
    trainer = build_trainer(model, lambda o, b: cross_entropy(o, b) * next(factors), precision, clip, optimizer.AdamW)
    before, losses, scale = weights_of(model), EpochRecord(), precision.scaler.get_scale()
    with warnings.catch_warnings(action="error"):
        trainer.update([[some_batch()]], losses, 1)
        assert same(before, weights_of(model))
        assert not trainer.optimizer.state, "a skipped step leaves no moments"
        assert all(parameter.grad is None for parameter in model.parameters())
        assert precision.scaler.get_scale() == scale / 2
        trainer.update([[some_batch()]], losses, 2)
    assert not same(before, weights_of(model))
    assert all(weight.isfinite().all() for weight in weights_of(model))
    losses.check()


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_a_step_in_half_precision_is_the_fp32_step_but_for_rounding(clip: float):
    steps = {}
    for name in ("fp32", "fp16", "bf16"):
        model = Head()
        before = model.linear.weight.detach().clone()
        build_trainer(model, precision=Precision(name, CPU), clip=clip).update([[some_batch()]], EpochRecord(), 1)
        steps[name] = model.linear.weight.detach() - before
    for name in ("fp16", "bf16"):
        assert (steps[name] - steps["fp32"]).norm() < 0.02 * steps["fp32"].norm()


def test_fp32_is_no_mixed_precision_at_all():
    precision = Precision("fp32", CPU)
    loss = torch.tensor(3.0, requires_grad=True)
    assert precision.scaler.scale(loss) is loss
    assert not precision.scaler.is_enabled()
    with warnings.catch_warnings(action="error"), precision.autocast():
        assert not torch.is_autocast_enabled("cpu")
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    model, plain = Head(), Head()
    build_trainer(model, precision=precision).update([[some_batch()]], EpochRecord(), 1)
    update = torch.optim.SGD(plain.parameters(), lr=1e-2)
    cross_entropy(plain.predict(some_batch()), some_batch()).backward()
    update.step()
    assert same(weights_of(model), weights_of(plain))


def test_clipping_bounds_the_gradient_and_zero_means_none():
    norms = []
    for clip in (0.0, 0.01):
        trainer = build_trainer(Head(), lambda o, b: 100 * cross_entropy(o, b), clip=clip)
        trainer.optimizer.register_step_pre_hook(
            lambda update, *_: norms.append(nn.utils.get_total_norm(p.grad for p in update.param_groups[0]["params"]))
        )
        trainer.update([[some_batch()]], EpochRecord(), 1)
    assert norms[0] > 1
    assert norms[1].item() == pytest.approx(0.01, rel=1e-3)


def test_the_first_kernel_leaves_torchs_number_of_threads_alone():
    program = """
import torch, kernels
torch.set_num_threads(1)
kernels.dropout(torch.ones(8), 0.5, True)
print(torch.get_num_threads())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "1\n"
