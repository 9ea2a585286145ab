"""Part 2 end to end on tiny files: the model, its encodings, the starter's interface, the run's directory and files."""

import argparse
import contextlib
import io
import itertools
import json
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import padded, write_task_files
from safetensors.torch import load_file
from torch import Tensor, nn

import heads
import model as multitask_model
import multitask_build
import multitask_classifier
import multitask_flags
from base_bert import checkpoint_state
from bert import BertModel
from datasets import PAIRINGS, SINGLE, Examples, Split, join_pair, read_split
from evaluation import predict
from model import Branch
from multitask_build import training_rows
from multitask_classifier import MultitaskBERT, get_args
from tasks import PARA, SST, STS, TASKS, Encoded, Task
from tokenizer import BertTokenizer
from trainer import Trainer
from training import Loop
from utils import InputError, Precision

FP32 = Precision("fp32", torch.device("cpu"))
NAMES = ("sst", "para", "sts")


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> BertTokenizer:
    return BertTokenizer.from_pretrained(str(tiny_checkpoint))


Build = Callable[..., MultitaskBERT]


@pytest.fixture(scope="module")
def build(tiny_checkpoint: Path) -> Build:
    def build(**flags: object) -> MultitaskBERT:
        """Build a model in eval mode, with weights so large that every token matters."""
        torch.manual_seed(1)
        model = MultitaskBERT(SimpleNamespace(**{"model": str(tiny_checkpoint), "option": "finetune"} | flags))
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                nn.init.normal_(parameter, std=0.3)
        return model.eval()

    return build


# --- the script, end to end -------------------------------------------------------------------------------------------


@dataclass
class Finished:
    folder: Path
    out: str
    models: list[multitask_model.MultitaskBERT]  # every model that was built
    encoded: list[tuple[int, bool]]  # rows and training mode of every call of BERT

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "r"

    def predictions(self) -> dict[str, str]:
        return {path.name: path.read_bytes().decode() for path in (self.folder / "predictions").glob("*.csv")}

    def weights(self) -> dict[str, Tensor]:
        return load_file(self.run / "model.safetensors")

    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run / "log.jsonl").read_text().splitlines()]


def run_multitask(folder: Path, checkpoint: Path, *flags: object) -> Finished:
    """Run multitask_classifier.py in this process and record the models and the calls of BERT."""
    if not (folder / "data").exists():
        write_task_files(folder / "data")
    done = Finished(folder, "", [], [])
    build_model, encode = multitask_model.MultitaskBERT.__init__, BertModel.encode

    def building(built: multitask_model.MultitaskBERT, *values: object, **others: object) -> None:
        build_model(built, *values, **others)
        done.models.append(built)

    def counting(bert: BertModel, hidden_states: Tensor, *others: object) -> Tensor:
        done.encoded.append((len(hidden_states), bert.training))
        return encode(bert, hidden_states, *others)

    given = {"--model": checkpoint, "--data": folder / "data", "--runs": folder / "runs", "--name": "r"}
    given |= {"--predictions": folder / "predictions", "--batch_size": 3, "--eval_batch_size": 5}
    if "--run" in flags:
        given = {}
    pairs = (part for pair in given.items() for part in pair)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(sys, "argv", ["multitask_classifier.py", *map(str, (*pairs, *flags))])
        patch.setattr(multitask_model.MultitaskBERT, "__init__", building)
        patch.setattr(BertModel, "encode", counting)
        multitask_classifier.main()
    done.out = out.getvalue()
    return done


RUNS = {
    "frozen": ["--epochs", 3, "--lr", "1e-2"],
    "bigru": ["--epochs", 2, "--lr", "1e-2", "--pooling", "bigru"],
    "tuned": ["--option", "finetune", "--epochs", 2, "--lr", "1e-3", "--pairing", "cross", "--pooling", "mean"],
}
RUNS["full-model"] = ["--fine-tune-mode", "full-model", *RUNS["tuned"][2:]]
RUNS["other seed"] = [*RUNS["tuned"], "--seed", 1]


class Runs(dict[str, Finished]):
    """The runs in RUNS. Each one is executed when it is first needed."""

    def __init__(self, folder: Path, model: Path):
        self.folder, self.model = folder, model

    def __missing__(self, name: str) -> Finished:
        self[name] = run_multitask(self.folder / name, self.model, *RUNS[name])
        return self[name]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"), tiny_checkpoint)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# --- the starter's interface ------------------------------------------------------------------------------------------

STUDENTS_SCRIPT = """
import argparse, random
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from tqdm import tqdm

from datasets import (SentenceClassificationDataset, SentenceClassificationTestDataset, SentencePairDataset,
                      SentencePairTestDataset, load_multitask_data)
from evaluation import model_eval_multitask, model_eval_sst, model_eval_test_multitask
from multitask_classifier import MultitaskBERT
from optimizer import AdamW

args = argparse.Namespace(model=CHECKPOINT, batch_size=3, lr=1e-3, fine_tune_mode="full-model")


def save_model(model, optimizer, args, config, filepath):
    save_info = {
        "model": model.state_dict(), "optim": optimizer.state_dict(), "args": args, "model_config": config,
        "system_rng": random.getstate(), "numpy_rng": np.random.get_state(), "torch_rng": torch.random.get_rng_state(),
    }
    torch.save(save_info, filepath)


device = torch.device("cpu")
sst_train_data, num_labels, para_train_data, sts_train_data = load_multitask_data(
    DATA + "/ids-sst-train.csv", DATA + "/quora-train.csv", DATA + "/sts-train.csv", split="train")
sst_dev_data, num_labels, para_dev_data, sts_dev_data = load_multitask_data(
    DATA + "/ids-sst-dev.csv", DATA + "/quora-dev.csv", DATA + "/sts-dev.csv", split="train")
sst_test_data, _, para_test_data, sts_test_data = load_multitask_data(
    DATA + "/ids-sst-test-student.csv", DATA + "/quora-test-student.csv", DATA + "/sts-test-student.csv", split="test")


def loader(kind, rows, shuffle=False):
    data = kind(rows, args)
    return DataLoader(data, shuffle=shuffle, batch_size=args.batch_size, collate_fn=data.collate_fn)


sst_train_dataloader = loader(SentenceClassificationDataset, sst_train_data, True)
para_train_dataloader = loader(SentencePairDataset, para_train_data, True)
sts_data = SentencePairDataset(sts_train_data, args, isRegression=True)
sts_train_dataloader = DataLoader(sts_data, shuffle=True, batch_size=args.batch_size, collate_fn=sts_data.collate_fn)
dev_dataloaders = (loader(SentenceClassificationDataset, sst_dev_data), loader(SentencePairDataset, para_dev_data),
                   loader(SentencePairDataset, sts_dev_data))

config = {"hidden_dropout_prob": 0.3, "num_labels": num_labels, "hidden_size": 768, "data_dir": ".",
          "fine_tune_mode": args.fine_tune_mode, "model": args.model}
config = SimpleNamespace(**config)

model = MultitaskBERT(config)
model = model.to(device)
optimizer = AdamW(model.parameters(), lr=args.lr)
model.train()
train_loss, num_batches = 0, 0
for batch in tqdm(sst_train_dataloader, desc="train-sst", disable=True):
    b_ids, b_mask, b_labels = (batch["token_ids"], batch["attention_mask"], batch["labels"])
    optimizer.zero_grad()
    logits = model.predict_sentiment(b_ids, b_mask)
    loss = F.cross_entropy(logits, b_labels.view(-1), reduction="sum") / args.batch_size
    loss.backward()
    optimizer.step()
    train_loss += loss.item()
    num_batches += 1
for predict, criterion, batches in (
    (model.predict_paraphrase, F.binary_cross_entropy_with_logits, para_train_dataloader),
    (model.predict_similarity, F.mse_loss, sts_train_dataloader),
):
    for batch in batches:
        optimizer.zero_grad()
        logits = predict(batch["token_ids_1"], batch["attention_mask_1"],
                         batch["token_ids_2"], batch["attention_mask_2"])
        loss = criterion(logits.view(-1), batch["labels"].float())
        loss.backward()
        optimizer.step()
        train_loss += loss.item()
        num_batches += 1
embedding = model(b_ids, b_mask)

dev_acc, dev_f1, *_ = model_eval_sst(dev_dataloaders[0], model, device)
(dev_sentiment_accuracy, dev_sst_y_pred, dev_sst_sent_ids, dev_paraphrase_accuracy, dev_para_y_pred, dev_para_sent_ids,
 dev_sts_corr, dev_sts_y_pred, dev_sts_sent_ids) = model_eval_multitask(*dev_dataloaders, model, device)
save_model(model, optimizer, args, config, OUT + "/model.pt")

saved = torch.load(OUT + "/model.pt", weights_only=False)
loaded = MultitaskBERT(saved["model_config"])
loaded.load_state_dict(saved["model"])
again = model_eval_multitask(*dev_dataloaders, loaded.to(device), device)
test_sst_y_pred, test_sst_sent_ids, *others = model_eval_test_multitask(
    loader(SentenceClassificationTestDataset, sst_test_data), loader(SentencePairTestDataset, para_test_data),
    loader(SentencePairTestDataset, sts_test_data), model, device)
with open(OUT + "/sst-test-output.csv", "w+") as f:
    f.write("id \\t Predicted_Sentiment \\n")
    for p, s in zip(test_sst_sent_ids, test_sst_y_pred):
        f.write(f"{p} , {s} \\n")
"""


def test_a_script_in_the_starters_style_trains_evaluates_saves_and_loads(
    task_files: Path, tiny_checkpoint: Path, tmp_path: Path
):
    script = tmp_path / "students.py"
    script.write_text(STUDENTS_SCRIPT)
    torch.manual_seed(0)
    places = {"DATA": str(task_files), "OUT": str(tmp_path), "CHECKPOINT": str(tiny_checkpoint)}
    found = runpy.run_path(str(script), init_globals=places)
    assert found["num_labels"] == {grade: grade for grade in range(5)}
    assert found["num_batches"] == 9
    assert np.isfinite(found["train_loss"])
    assert found["embedding"].shape == (len(found["b_ids"]), 32)
    for task in ("sst", "para", "sts"):
        assert found[f"dev_{task}_sent_ids"] == [f"dev{i:020d}" for i in range(8)]
        assert len(found[f"dev_{task}_y_pred"]) == 8
    labels = [row[1] for row in found["sst_dev_data"]]
    assert found["dev_sentiment_accuracy"] == np.mean(np.array(found["dev_sst_y_pred"]) == labels) == found["dev_acc"]
    assert set(map(float, found["dev_para_y_pred"])) <= {0.0, 1.0}
    similarities = [row[2] for row in found["sts_dev_data"]]
    assert found["dev_sts_corr"] == pytest.approx(np.corrcoef(found["dev_sts_y_pred"], similarities)[0, 1])
    assert len(found["again"]) == 9
    assert found["again"][:2] == (found["dev_sentiment_accuracy"], found["dev_sst_y_pred"])
    assert found["again"][7] == found["dev_sts_y_pred"]
    assert [len(part) for part in found["others"]] == [8] * 4
    lines = (tmp_path / "sst-test-output.csv").read_text().split("\n")
    assert lines[1].split(" , ")[0] == f"test{0:021d}"


def test_the_starters_loop_trains_the_encoder_and_every_head(build: Build, tokenizer: BertTokenizer):
    model = build()
    ids, mask = (padded(tokenizer, ["a film", "one"])[key] for key in ("input_ids", "attention_mask"))
    pair = (ids, mask, ids.flip(0), mask.flip(0))
    scores = model.predict_sentiment(ids, mask), model.predict_paraphrase(*pair), model.predict_similarity(*pair)
    assert [logits.shape for logits in scores] == [(2, 5), (2, 1), (2, 1)]
    sum(logits.sum() for logits in scores).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_handouts_flags_have_its_defaults():
    args = vars(get_args([]))
    wanted = {"seed": 11711, "epochs": 10, "batch_size": 8, "hidden_dropout_prob": 0.3, "lr": 1e-5, "use_gpu": False}
    wanted |= {"option": "pretrain", "model": "bert-base-uncased", "tasks": ["sst", "para", "sts"]}
    for name, stem in (("sst", "ids-sst"), ("para", "quora"), ("sts", "sts")):
        wanted |= {f"{name}_train": f"data/{stem}-train.csv", f"{name}_dev": f"data/{stem}-dev.csv"}
        wanted |= {f"{name}_test": f"data/{stem}-test-student.csv"}
        wanted |= {f"{name}_{split}_out": f"predictions/{name}-{split}-output.csv" for split in ("dev", "test")}
    assert {key: args[key] for key in wanted} == wanted


def test_the_handouts_commands_are_understood():
    for mode, option in (("last-linear-layer", "pretrain"), ("full-model", "finetune")):
        args = get_args(["--fine-tune-mode", mode, "--lr", "1e-3", "--use_gpu"])
        assert (args.option, args.lr, args.use_gpu) == (option, 1e-3, True)
        assert get_args(["--option", option]).option == option
    args = get_args(["--sst_train", "a.csv", "--sts_dev_out", "b.csv", "--epochs", "3", "--batch_size", "64"])
    assert (args.sst_train, args.sts_dev_out) == (["a.csv"], "b.csv")
    assert (args.epochs, args.batch_size) == (3, 64)


# --- a prediction never depends on its batch --------------------------------------------------------------------------


def random_texts(count: int, seed: int, longest: int = 40) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    words = ["good", "film", "a", "the", "unbelievably", "dull", ",", "not", "story", "?", "it's", "0.5"]
    lengths = torch.randint(0, longest, (count,), generator=generator).tolist()
    return [" ".join(words[i] for i in torch.randint(0, len(words), (n,), generator=generator)) for n in lengths]


def split_of(task: Task, tokenizer: BertTokenizer, pairing: str, *texts: list[str]) -> Split:
    found = Examples(task, [f"id{i}" for i in range(len(texts[0]))], texts)
    return Split.tokenize(found, tokenizer, *([PAIRINGS[pairing]] if len(texts) == 2 else []))


@torch.no_grad()
def logits_of(model: MultitaskBERT, split: Split, rows: Tensor) -> Tensor:
    return model.predict(split.batch(rows)).logits


@pytest.mark.parametrize("pooling", heads.POOLERS)
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_a_prediction_never_depends_on_its_batch(pairing: str, pooling: str, build: Build, tokenizer: BertTokenizer):
    model = build(pairing=pairing, pooling=pooling, head="mlp")
    first, second = random_texts(14, 0), random_texts(14, 1)
    generator = torch.Generator().manual_seed(2)
    for task in (SST, PARA, STS):
        split = split_of(task, tokenizer, pairing, *((first, second)[: len(task.text_columns)]))
        alone = torch.cat([logits_of(model, split, torch.tensor([row])) for row in range(14)])
        assert alone.std(dim=0).min() > 1e-3, "rows must differ, or the test proves nothing"
        for size in (2, 5, 9, 14, 14):
            rows = torch.randperm(14, generator=generator)[:size]
            torch.testing.assert_close(logits_of(model, split, rows), alone[rows], rtol=0, atol=1e-5)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_the_starters_calls_on_apart_padded_tensors_give_the_pipelines_logits(
    pairing: str, build: Build, tokenizer: BertTokenizer
):
    model = build(pairing=pairing, pooling="mean")
    texts = random_texts(6, 3), random_texts(6, 4)
    a, b = (padded(tokenizer, column) for column in texts)
    tensors = a["input_ids"], a["attention_mask"], b["input_ids"], b["attention_mask"]
    for task, ask in ((PARA, model.predict_paraphrase), (STS, model.predict_similarity)):
        wanted = predict(model, split_of(task, tokenizer, pairing, *texts), 4, FP32).logits
        torch.testing.assert_close(ask(*tensors).detach(), torch.tensor(wanted), rtol=0, atol=1e-5)
    wanted = predict(model, split_of(SST, tokenizer, pairing, texts[0]), 4, FP32).logits
    found = model.predict_sentiment(*tensors[:2]).detach()
    torch.testing.assert_close(found, torch.tensor(wanted), rtol=0, atol=1e-5)


def test_the_starters_calls_cut_joined_pairs_where_the_pipeline_does(build: Build, tokenizer: BertTokenizer):
    model = build(pairing="cross", max_length=12)
    texts = random_texts(6, 3), random_texts(6, 4)
    a, b = (padded(tokenizer, column) for column in texts)
    short = BertTokenizer(tokenizer.vocabulary, max_length=12)
    split = split_of(PARA, short, "cross", *texts)
    assert split.truncated
    found = model.predict_paraphrase(a["input_ids"], a["attention_mask"], b["input_ids"], b["attention_mask"])
    torch.testing.assert_close(found.detach(), torch.tensor(predict(model, split, 4, FP32).logits), rtol=0, atol=1e-5)


# --- encodings --------------------------------------------------------------------------------------------------------


def inputs_of_embed(model: MultitaskBERT, split: Split) -> list[tuple[Tensor, Tensor]]:
    """The token ids and segment ids that reach BERT."""
    seen: list[tuple[Tensor, Tensor]] = []
    embed = model.bert.embed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.bert, "embed", lambda ids, types: (seen.append((ids, types)), embed(ids, types))[1])
        logits_of(model, split, torch.arange(len(split)))
    return seen


def test_the_cross_encoder_joins_before_padding_with_real_segment_ids(build: Build, tokenizer: BertTokenizer):
    texts = ["A good film .", "dull", ""], ["Is it ?", "not at all , is it", "x"]
    wanted = padded(tokenizer, *texts)
    ((ids, types),) = inputs_of_embed(build(pairing="cross"), split_of(PARA, tokenizer, "cross", *texts))
    assert torch.equal(ids, wanted["input_ids"])
    assert torch.equal(types, wanted["token_type_ids"])
    assert types.amax(dim=1).tolist() == [1, 1, 1]
    padding = wanted["attention_mask"] == 0
    assert padding.any()
    assert not ids[padding].any(), "all padding is at the end"
    assert [row.tolist().count(tokenizer.sep_token_id) for row in ids] == [2, 2, 2]
    assert [row.tolist().count(tokenizer.cls_token_id) for row in ids] == [1, 1, 1]


def test_segment_ids_change_what_the_cross_encoder_says(build: Build, tokenizer: BertTokenizer):
    model, split = build(pairing="cross"), split_of(PARA, tokenizer, "cross", ["a film"], ["no film"])
    before = logits_of(model, split, torch.tensor([0]))
    with torch.no_grad():
        model.bert.tk_type_embedding.weight[1, :16] += 1
    assert not torch.allclose(before, logits_of(model, split, torch.tensor([0])), atol=1e-3)


@pytest.mark.parametrize("max_length", [5, 8, 15, 16, 512])
def test_joined_pairs_are_cut_like_the_tokenizers(max_length: int, tokenizer: BertTokenizer):
    lengths = range(19) if max_length < 512 else (0, 1, 253, 254, 255, 256, 300, 509, 600)
    words = ["good", "film", "bad", "dull", "slow"]
    pairs = [
        (" ".join(itertools.islice(itertools.cycle(words), a)), " ".join(itertools.islice(itertools.cycle("xyz"), b)))
        for a, b in itertools.product(lengths, repeat=2)
    ]
    texts = [list(column) for column in zip(*pairs, strict=True)]
    names = ("input_ids", "attention_mask", "token_type_ids")
    apart = [Encoded(*(padded(tokenizer, column)[name] for name in names)) for column in texts]
    joined = join_pair(*apart, max_length)
    wanted = padded(BertTokenizer(tokenizer.vocabulary, max_length=max_length), *texts)
    for row, (a, b) in enumerate(itertools.product(lengths, repeat=2)):
        keep, found = wanted["attention_mask"][row].bool(), joined.attention_mask[row].bool()
        assert wanted["input_ids"][row][keep].tolist() == joined.token_ids[row][found].tolist(), (a, b)
        assert wanted["token_type_ids"][row][keep].tolist() == joined.token_type_ids[row][found].tolist(), (a, b)


@pytest.mark.parametrize(("pairing", "rows"), [("bi", 6), ("bi_symmetric", 6), ("cross", 3), ("cross_symmetric", 6)])
def test_a_pair_costs_one_forward_pass(
    pairing: str, rows: int, build: Build, tokenizer: BertTokenizer, monkeypatch: pytest.MonkeyPatch
):
    model, seen, encode = build(pairing=pairing), [], BertModel.encode
    monkeypatch.setattr(BertModel, "encode", lambda bert, x, *rest: (seen.append(len(x)), encode(bert, x, *rest))[1])
    split = split_of(STS, tokenizer, pairing, random_texts(3, 5), random_texts(3, 6))
    logits_of(model, split, torch.arange(3))
    assert seen == [rows]


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_symmetric_pairings_and_no_others_score_both_orders_alike(pairing: str, build: Build, tokenizer: BertTokenizer):
    a, b, model = random_texts(6, 7), random_texts(6, 8), build(pairing=pairing, pooling="mean", head="mlp")
    for task in (PARA, STS):
        there, back = (
            logits_of(model, split_of(task, tokenizer, pairing, *texts), torch.arange(6)) for texts in ((a, b), (b, a))
        )
        assert torch.allclose(there, back, atol=1e-6) == pairing.endswith("_symmetric")


def stored_logits(path: Path) -> np.ndarray:
    return np.load(path)["logits"]


@pytest.mark.parametrize("regularizer", ["none", "bregman"])
def test_symmetric_scoring_is_the_mean_of_both_orders_and_leaves_training_alone(
    regularizer: str, tiny_checkpoint: Path, tmp_path: Path
):
    """Bregman's teacher is also in eval mode, but it sees training batches."""
    flags = [*RUNS["tuned"][:2], *RUNS["tuned"][4:], "--epochs", 1, "--regularizer", regularizer]
    plain = run_multitask(tmp_path / "plain", tiny_checkpoint, *flags)
    both = run_multitask(tmp_path / "both", tiny_checkpoint, *flags, "--symmetric")
    ours, theirs = both.weights(), plain.weights()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    turned = tmp_path / "turned"
    write_task_files(turned)
    path = turned / PARA.filename("dev")
    header, *rows = (line.split("\t") for line in path.read_text().splitlines())
    first, second = header.index("sentence1"), header.index("sentence2")
    for row in rows:
        row[first], row[second] = row[second], row[first]
    path.write_text("".join("\t".join(row) + "\n" for row in (header, *rows)))
    straight = stored_logits(plain.run / "para-dev.npz")
    flags = ["--predict_only", "--run", plain.run, "--predictions", tmp_path / "out", "--data", turned]
    args_json = plain.run / "args.json"
    facts = json.loads(args_json.read_text())
    args_json.write_text(json.dumps(facts | {"data_sha256": {}}))  # else the logits of other rows are not saved
    run_multitask(tmp_path / "plain", tiny_checkpoint, *flags)
    other_way = stored_logits(plain.run / "para-dev.npz")
    assert not np.allclose(straight, other_way)
    np.testing.assert_allclose(stored_logits(both.run / "para-dev.npz"), (straight + other_way) / 2, atol=1e-5)


def test_train_tasks_train_alone_while_all_are_scored(tiny_checkpoint: Path, tmp_path: Path):
    flags = ["--option", "finetune", "--epochs", 2, "--lr", "1e-3", "--train_tasks", "para"]
    done = run_multitask(tmp_path, tiny_checkpoint, *flags)
    assert len(done.predictions()) == 6
    assert all(line["losses"].keys() == {"para"} for line in done.log())
    assert all(line["scores"]["trained"] == line["scores"]["para"] for line in done.log())
    trained = done.models[0]
    torch.manual_seed(get_args([]).seed)
    fresh = MultitaskBERT(get_args(["--model", str(tiny_checkpoint)]))
    for name in NAMES:
        same = torch.equal(trained.heads[name].linear.weight, fresh.heads[name].linear.weight)
        assert same == (name != "para"), name


def test_pairing_pooling_and_head_are_chosen_task_by_task(build: Build):
    flags = {
        "pairing": "cross",
        "sts_pairing": "bi",
        "sts_head": "cosine_affine",
        "para_head": "mlp",
        "pooling": "mean",
    }
    model = build(**flags, sst_pooling="cls")
    pairings = {name: branch.pairing_for("train") for name, branch in model.branches.items()}
    assert pairings == {"sst": SINGLE, "para": PAIRINGS["cross"], "sts": PAIRINGS["bi"]}
    assert [type(model.heads[n]) for n in NAMES] == [heads.Linear, heads.MLP, heads.CosineAffine]
    assert [type(model.poolers[n]) for n in NAMES] == [heads.ClsPooler, heads.MeanPooler, heads.MeanPooler]


def test_a_model_of_plain_values_is_the_one_that_the_flags_describe(tiny_checkpoint: Path):
    flags = "--option finetune --hidden_dropout_prob 0.2 --pooling mean --sts_head cosine_affine --para_pairing cross"
    flags += " --para_dropout 0 --symmetric --max_length 40"
    args = get_args(["--model", str(tiny_checkpoint), *flags.split()])
    torch.manual_seed(3)
    described = multitask_build.build_model(args)
    torch.manual_seed(3)
    values = multitask_model.MultitaskBERT(
        BertModel.from_pretrained(str(tiny_checkpoint)),
        [
            Branch(SST, pooling="mean", symmetric=True, dropout=0.2),
            Branch(PARA, pooling="mean", pairing="cross", symmetric=True, dropout=0.0),
            Branch(STS, pooling="mean", head="cosine_affine", symmetric=True, dropout=0.2),
        ],
        max_length=40,
    )
    assert same(described.state_dict(), values.state_dict())
    assert repr(described) == repr(values)
    assert described.branches == values.branches
    assert (described.max_length, described.frozen) == (values.max_length, values.frozen) == (40, False)
    assert type(MultitaskBERT(args)).__mro__[1] is type(described)


def test_a_branch_scores_dev_and_test_in_both_orders_if_it_is_symmetric():
    for pairing in ("cross", "cross_symmetric"):
        branch = Branch(PARA, pairing=pairing, symmetric=True)
        assert branch.pairing_for("train") is PAIRINGS[pairing]
        assert branch.pairing_for("dev") is branch.pairing_for("test") is PAIRINGS["cross_symmetric"]
    assert Branch(PARA).pairing_for("test") is PAIRINGS["bi"]
    assert Branch(SST, symmetric=True).pairing_for("dev") is SINGLE


@pytest.mark.parametrize("pairing", ["bi", "cross"])
def test_the_shared_pair_layer_is_one_module_for_para_and_sts_and_not_for_sst(
    pairing: str, build: Build, tokenizer: BertTokenizer
):
    model = build(share_pair_layer=True, pairing=pairing)
    layer = model.shared_pair_layer
    assert sum(name.startswith("shared_pair_layer.") for name, _ in model.named_parameters()) == 2
    used = []
    layer.register_forward_hook(lambda *_: used.append(task.name))
    for task in (SST, PARA, STS):
        texts = [random_texts(3, 9), random_texts(3, 10)][: len(task.text_columns)]
        model.zero_grad()
        model.predict(split_of(task, tokenizer, pairing, *texts).batch(torch.arange(3))).logits.sum().backward()
        assert (layer[0].weight.grad is not None) == (task is not SST)
    assert used == ["para", "sts"] if pairing == "cross" else ["para", "para", "sts", "sts"]
    assert not list(build().shared_pair_layer.parameters())


# --- a frozen BERT ----------------------------------------------------------------------------------------------------


def test_a_frozen_bert_sees_every_row_once_in_training_and_once_in_testing(runs: Runs):
    seen = runs["frozen"].encoded
    sentences = 8 * (1 + 2 + 2)  # a pair has two
    assert sum(rows for rows, _ in seen) == 2 * sentences + 2 * sentences  # train and dev, over three epochs; dev, test
    assert not any(training for _, training in seen)


@pytest.mark.parametrize("name", ["frozen", "bigru"])
def test_a_frozen_bert_keeps_its_weights_while_all_else_learns(name: str, runs: Runs, tiny_checkpoint: Path):
    before = BertModel.from_pretrained(str(tiny_checkpoint)).state_dict()
    trained = runs[name].models[0]
    assert same(before, trained.bert.state_dict())
    assert not any(training for _, training in runs[name].encoded)
    torch.manual_seed(11711)
    start = MultitaskBERT(
        SimpleNamespace(model=str(tiny_checkpoint), **({"pooling": "bigru"} if name == "bigru" else {}))
    )
    moved = {k: not torch.equal(p, trained.state_dict()[k]) for k, p in start.named_parameters()}
    assert moved == {k: not k.startswith("bert.") for k in moved}
    assert any("gru" in k for k in moved) == (name == "bigru")


def test_a_trained_pooler_on_a_frozen_bert_sees_its_rows_in_every_epoch(runs: Runs):
    assert sum(rows for rows, _ in runs["bigru"].encoded) == 8 * 5 * (2 + 2 + 2)  # train and dev twice; dev, test


def test_vectors_are_fixed_below_a_frozen_bert_unless_a_pooler_learns(build: Build):
    wanted = {("pretrain", "mean"): True, ("pretrain", "bigru"): False, ("finetune", "mean"): False}
    assert {key: build(option=key[0], pooling=key[1]).vectors_are_fixed for key in wanted} == wanted
    assert not build(option="pretrain", sst_pooling="attention").vectors_are_fixed


def test_train_leaves_a_frozen_bert_in_eval_mode(build: Build):
    frozen, tuned = build(option="pretrain").train(), build().train()
    assert not any(module.training for module in frozen.bert.modules())
    assert frozen.heads.training
    assert all(module.training for module in tuned.modules())
    assert not any(parameter.requires_grad for parameter in frozen.bert.parameters())


# --- what a run leaves ------------------------------------------------------------------------------------------------

HEADERS = {
    "sst": "id \t Predicted_Sentiment ",
    "para": "id \t Predicted_Is_Paraphrase ",
    "sts": "id \t Predicted_Similiary ",
}


@pytest.mark.parametrize("name", ["frozen", "tuned"])
def test_a_run_writes_the_six_files_literally_with_ids_in_file_order(name: str, runs: Runs):
    found = runs[name].predictions()
    assert set(found) == {f"{task}-{split}-output.csv" for task in NAMES for split in ("dev", "test")}
    for file, text in found.items():
        task, split, _ = file.split("-")
        header, *rows, end = text.split("\n")
        assert (header, end) == (HEADERS[task], "")
        prefix = f"{split}{0:020d}" if split == "dev" else {"sst": f"test{0:021d}"}.get(task, f"test-{0:020d}")
        assert [row.partition(" , ")[0] for row in rows] == [f"{prefix[:-1]}{i}" for i in range(8)]
        values = [row.partition(" , ")[2] for row in rows]
        assert all(value.endswith(" ") for value in values)
        if task == "sts":
            assert len({float(value) for value in values}) > 1
        else:
            assert set(values) <= ({f"{grade} " for grade in range(5)} if task == "sst" else {"0.0 ", "1.0 "})


def test_a_run_keeps_flags_log_scores_weights_and_logits(runs: Runs):
    done = runs["tuned"]
    logits = {f"{task}-{split}.npz" for task in NAMES for split in ("dev", "test")}
    kept = {"args.json", "log.jsonl", "output.txt", ".lock", "dev.json", "model.safetensors", "config.json"}
    assert {path.name for path in done.run.iterdir()} == kept | logits | {"vocab.txt", "tokenizer_config.json"}
    facts = json.loads((done.run / "args.json").read_text())
    assert (facts["args"]["option"], facts["args"]["pairing"], facts["args"]["seed"]) == ("finetune", "cross", 11711)
    assert len(facts["data_sha256"]) == 9
    log = done.log()
    assert [line["epoch"] for line in log] == [1, 2]
    for line in log:
        assert line["losses"].keys() == line["train"].keys() == set(NAMES)
        assert line["scores"].keys() == {*NAMES, "overall"}
    best = max(log, key=lambda line: line["scores"]["overall"])
    assert json.loads((done.run / "dev.json").read_text()) == best["scores"]


def test_stored_logits_are_those_of_the_kept_weights(runs: Runs, tokenizer: BertTokenizer):
    done = runs["tuned"]
    for task in (SST, PARA, STS):
        for split in ("dev", "test"):
            pairing = [PAIRINGS["cross"]] if task is not SST else []
            paths = [done.folder / "data" / task.filename(split)]
            rows = read_split(task, paths, tokenizer, *pairing, labeled=split == "dev")
            with np.load(done.run / f"{task.name}-{split}.npz") as kept:
                assert kept["ids"].tolist() == rows.ids
                assert ("labels" in kept) == (split == "dev")
                wanted = predict(done.models[0], rows, 5, FP32).logits
                np.testing.assert_array_equal(kept["logits"], wanted)
    assert len(done.models) == 1, "the trained model predicts; none is built again"
    assert same(checkpoint_state(done.models[0]), done.weights())


def test_the_usual_tools_load_a_runs_encoder(runs: Runs, tokenizer: BertTokenizer):
    transformers = pytest.importorskip("transformers")
    done = runs["tuned"]
    theirs = transformers.AutoModel.from_pretrained(done.run).eval()
    ours = done.models[0].bert.eval()
    inputs = padded(tokenizer, ["a good film", "x"], ["no", "a rather longer text , is it ?"])
    with torch.no_grad():
        wanted, found = ours(**inputs), theirs(**inputs)
    torch.testing.assert_close(found.last_hidden_state, wanted["last_hidden_state"], rtol=0, atol=1e-5)
    torch.testing.assert_close(found.pooler_output, wanted["pooler_output"], rtol=0, atol=1e-5)
    pieces = transformers.AutoTokenizer.from_pretrained(done.run)("A good film .")["input_ids"]
    assert pieces == tokenizer.encode_all(["A good film ."])[0].ids


def test_a_run_is_an_encoder_for_another(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture):
    first = runs["tuned"].run
    done = run_multitask(
        tmp_path, first, "--epochs", 1, "--lr", 1e-3
    )  # frozen, so that the encoder keeps the first run's weights
    assert len(done.predictions()) == 6
    encoder = {name: tensor for name, tensor in load_file(first / "model.safetensors").items() if "bert." in name}
    assert same(encoder, {name: tensor for name, tensor in done.weights().items() if "bert." in name})
    assert capsys.readouterr().err == f"note: {first}: only the encoder is used, not its heads.\n"


# --- prediction without training --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["frozen", "tuned"])
def test_predict_only_writes_the_same_files_again(name: str, runs: Runs, tmp_path: Path):
    done = runs[name]
    log, weights = done.log(), done.weights()
    again = run_multitask(
        tmp_path, Path(), "--predict_only", "--run", done.run, "--predictions", tmp_path / "predictions"
    )
    assert again.predictions() == done.predictions()
    assert len(again.models) == 1, "nothing is trained"
    assert (done.log(), same(done.weights(), weights)) == (log, True)


def test_predict_only_without_more_writes_where_the_run_wrote(runs: Runs):
    done = runs["frozen"]
    before = done.predictions()
    for path in (done.folder / "predictions").glob("*.csv"):
        path.unlink()
    run_multitask(done.folder, Path(), "--predict_only", "--run", done.run)
    assert done.predictions() == before


def test_predict_only_takes_other_data(runs: Runs, tmp_path: Path):
    write_task_files(tmp_path / "data", rows=5)
    kept = {path.name: path.read_bytes() for path in runs["frozen"].run.glob("*.npz")}
    given = ["--data", tmp_path / "data", "--predictions", tmp_path / "predictions"]
    done = run_multitask(tmp_path, Path(), "--predict_only", "--run", runs["frozen"].run, *given)
    assert {name: text.count("\n") for name, text in done.predictions().items()} == dict.fromkeys(done.predictions(), 6)
    assert len(done.predictions()) == 6
    assert {path.name: path.read_bytes() for path in runs["frozen"].run.glob("*.npz")} == kept


def test_predict_only_takes_one_other_file_and_leaves_the_rest(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write_task_files(tmp_path / "data", rows=3)
    done = runs["tuned"]
    logits = stored_logits(done.run / "sst-test.npz")
    given = ["--sst_test", tmp_path / "data" / "ids-sst-test-student.csv", "--predictions", tmp_path / "predictions"]
    again = run_multitask(tmp_path, Path(), "--predict_only", "--run", done.run, *given)
    assert again.predictions().pop("sst-test-output.csv").count("\n") == 4
    same_files = {k: v for k, v in done.predictions().items() if k != "sst-test-output.csv"}
    assert {k: v for k, v in again.predictions().items() if k != "sst-test-output.csv"} == same_files
    note = f"{given[1]} is not the test file of {done.run}, so its logits were not saved there."
    assert capsys.readouterr().err == f"note: {note}\n"
    assert np.array_equal(stored_logits(done.run / "sst-test.npz"), logits), "an ensemble reads them"


def test_predict_only_takes_files_of_the_runs_own_tasks(tiny_checkpoint: Path, tmp_path: Path):
    """cfimdb is not among the tasks by default, but it is the run's."""
    done = run_multitask(tmp_path, tiny_checkpoint, "--tasks", "cfimdb", "--epochs", 1)
    given = ["--cfimdb_test", tmp_path / "data" / "ids-sst-test-student.csv", "--cfimdb_test_out", tmp_path / "x.csv"]
    run_multitask(tmp_path, Path(), "--predict_only", "--run", done.run, *given)
    assert (tmp_path / "x.csv").read_text() == done.predictions()["cfimdb-test-output.csv"], (
        "the sentences are the same"
    )


def test_a_run_of_a_gpu_is_read_without_one(runs: Runs, tmp_path: Path):
    path = runs["tuned"].run / "args.json"
    before = path.read_text()
    facts = json.loads(before)
    facts["args"] |= {"use_gpu": True}
    path.write_text(json.dumps(facts))
    given = ["--predict_only", "--run", runs["tuned"].run, "--predictions", tmp_path / "predictions"]
    assert run_multitask(tmp_path, Path(), *given).predictions() == runs["tuned"].predictions()
    path.write_text(before)


# --- seeds, tasks, rows -----------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_weights_and_files_under_either_name_of_the_option(runs: Runs):
    assert same(runs["tuned"].weights(), runs["full-model"].weights())
    assert runs["tuned"].predictions() == runs["full-model"].predictions()


def test_another_seed_gives_other_weights(runs: Runs):
    assert runs["tuned"].weights().keys() == runs["other seed"].weights().keys()
    assert not same(runs["tuned"].weights(), runs["other seed"].weights())


@pytest.mark.parametrize("task", ["sst", "sts", "cfimdb"])
def test_a_task_trains_alone(task: str, tiny_checkpoint: Path, tmp_path: Path):
    done = run_multitask(tmp_path, tiny_checkpoint, "--tasks", task, "--epochs", 1)
    assert set(done.predictions()) == {f"{task}-dev-output.csv", f"{task}-test-output.csv"}
    assert done.log()[0]["losses"].keys() == {task}
    assert list(done.models[0].heads) == [task]


def test_several_training_files_are_read_as_one(tiny_checkpoint: Path, tmp_path: Path):
    write_task_files(tmp_path / "data")
    more = tmp_path / "more.csv"
    more.write_text((tmp_path / "data" / "ids-sst-train.csv").read_text().replace("\ttrain", "\tother"))
    files = [tmp_path / "data" / "ids-sst-train.csv", more]
    done = run_multitask(tmp_path, tiny_checkpoint, "--tasks", "sst", "--epochs", 1, "--sst_train", *files)
    assert "sst: train 16, dev 8, test 8 rows" in done.out
    facts = json.loads((done.run / "args.json").read_text())
    assert {str(path) for path in files} <= facts["data_sha256"].keys()


def test_fractions_and_max_train_take_as_many_rows_as_they_say(tiny_checkpoint: Path, tmp_path: Path):
    given = ["--para_fraction", 0.5, "--max_train", 6, "--epochs", 1]
    done = run_multitask(tmp_path, tiny_checkpoint, *given)
    assert [line.split(" rows")[0] for line in done.out.splitlines()[2:5]] == [
        "sst: train 6, dev 8, test 8",
        "para: train 4, dev 8, test 8",
        "sts: train 6, dev 8, test 8",
    ]


def test_cut_rows_are_drawn_by_seed_and_keep_their_order(tokenizer: BertTokenizer):
    split = split_of(SST, tokenizer, "bi", random_texts(200, 11))
    args = get_args(["--sst_fraction", "0.1"])
    chosen = training_rows(split, args).ids
    assert len(chosen) == 20
    assert chosen == training_rows(split, args).ids
    assert chosen == sorted(chosen, key=lambda i: int(i.removeprefix("id")))
    assert set(chosen) < set(split.ids)
    assert chosen != training_rows(split, get_args(["--sst_fraction", "0.1", "--seed", "1"])).ids
    assert chosen != split.ids[:20]
    assert len(training_rows(split, get_args(["--max_train", "7"]))) == 7
    assert len(training_rows(split, get_args(["--max_train", "7", "--sst_fraction", "0.01"]))) == 2
    assert training_rows(split, get_args([])) is split


@pytest.mark.parametrize("sampler", ["round_robin", "proportional"])
def test_a_dry_run_takes_few_steps_and_keeps_nothing(
    sampler: str, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    steps = []
    update = Trainer.update
    monkeypatch.setattr(Trainer, "update", lambda *a: (steps.append(1), update(*a))[1])
    write_task_files(tmp_path / "data")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    given = ["--dry_run", "--epochs", 9, "--batch_size", 2, "--steps_per_epoch", 100, "--sampler", sampler]
    done = run_multitask(tmp_path, tiny_checkpoint, *given)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert "nothing was kept" in done.out
    assert len(steps) == (2 if sampler == "round_robin" else 6)  # one task per step


# --- which epoch is kept ----------------------------------------------------------------------------------------------


def scripted_scores(monkeypatch: pytest.MonkeyPatch, *epochs: dict[str, float]) -> None:
    """Make the evaluations return these scores in turn; the last ones are repeated."""
    turns = {name: iter([scores[name] for scores in (*epochs, *epochs[-1:] * 9)]) for name in NAMES}
    monkeypatch.setattr(multitask_classifier, "score", lambda task, found: next(turns[task.name]))


def test_the_best_epoch_is_kept_by_the_2024_score_and_both_scores_are_printed(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    better = {"sst": 0.6, "para": 0.6, "sts": 0.3}  # 2024: 0.6167, 2023: 0.5
    worse = {"sst": 0.5, "para": 0.5, "sts": 0.6}  # 2024: 0.6, 2023: 0.5333
    scripted_scores(monkeypatch, better, worse)
    after: list[dict[str, Tensor]] = []
    train_epoch = Loop.train_epoch

    def watched(loop: Loop, epoch: int) -> object:
        seen = train_epoch(loop, epoch)
        after.append({name: p.detach().clone() for name, p in loop.trainer.model.named_parameters()})
        return seen

    monkeypatch.setattr(Loop, "train_epoch", watched)
    done = run_multitask(tmp_path, tiny_checkpoint, "--option", "finetune", "--epochs", 2)
    assert [line["best"] for line in done.log()] == [True, False]
    assert json.loads((done.run / "dev.json").read_text()) == {**better, "overall": pytest.approx(0.61667, abs=1e-5)}
    assert "best dev: sst 0.600 | para 0.600 | sts 0.300 | overall 0.6167 (2023 formula: 0.5000)" in done.out
    assert same(dict(done.models[0].named_parameters()), after[0])
    assert not same(after[0], after[1])


def test_every_task_is_a_choice_of_its_own_files_and_outputs():
    args = get_args(["--tasks", *TASKS])
    for name, task in TASKS.items():
        assert getattr(args, f"{name}_train") == f"data/{task.filename('train')}"
        assert getattr(args, f"{name}_dev_out") == f"predictions/{name}-dev-output.csv"


def test_files_are_filled_in_for_the_tasks_that_are_used_and_no_others():
    args = vars(get_args(["--tasks", "sst", "para", "--data", "d", "--pooling", "mean"]))
    keys = ("train", "dev", "test", "dev_out", "test_out")
    found = {name: {key: args[f"{name}_{key}"] for key in keys if f"{name}_{key}" in args} for name in TASKS}
    assert found["sst"] == {
        "train": "d/ids-sst-train.csv",
        "dev": "d/ids-sst-dev.csv",
        "test": "d/ids-sst-test-student.csv",
        "dev_out": "predictions/sst-dev-output.csv",
        "test_out": "predictions/sst-test-output.csv",
    }
    assert found["para"]["train"] == "d/quora-train.csv"
    assert set(found["cfimdb"].values()) == set(found["sts"].values()) == {None}


def test_a_flag_that_is_changed_after_parsing_has_its_effect():
    args = get_args(["--tasks", "sst", "para"])
    args.pooling, args.pairing, args.para_head = "mean", "cross", "mlp"
    sst, para = multitask_flags.branches(multitask_flags.with_defaults(args)).values()
    assert (sst.pooling, sst.head) == ("mean", "linear")
    assert (para.pooling, para.head, para.pairing) == ("mean", "mlp", "cross")


def test_a_namespace_from_code_may_name_the_files_of_tasks_that_it_does_not_use():
    files = {
        f"{name}_{split}": f"{name}-{split}" for name in ("sst", "para", "sts") for split in ("train", "dev", "test")
    }
    args = multitask_flags.with_defaults(argparse.Namespace(tasks=["sst", "sts"], train_tasks=["sst"], **files))
    multitask_flags.validate(args)
    assert (args.sst_train, args.sts_train, args.sts_dev, args.para_dev) == ("sst-train", None, "sts-dev", None)


def test_a_joined_pair_is_never_longer_than_the_encoder_has_positions(tiny_checkpoint: Path):
    from model import Branch
    from model import MultitaskBERT as Plain

    bert = BertModel.from_pretrained(str(tiny_checkpoint))
    assert Plain(bert, [Branch(SST)], max_length=4096).max_length == bert.config.max_position_embeddings
    assert Plain(bert, [Branch(SST)], max_length=64).max_length == 64


def test_repeated_ids_are_allowed_in_training_files_only(tiny_checkpoint: Path, task_files: Path):
    for name in ("train", "dev"):
        path = task_files / f"ids-sst-{name}.csv"
        path.write_text(path.read_text() + path.read_text().splitlines()[1] + "\n")
        args = get_args(
            ["--tasks", "sst", "--data", str(task_files), "--model", str(tiny_checkpoint), "--repeated_ids"]
        )
        tokenizer = multitask_build.build_tokenizer(args)
        if name == "train":
            assert len(multitask_build.load_splits(args, tokenizer, ("train", "dev"))["sst"]["train"]) == 9
    with pytest.raises(InputError, match="ids must be unique"):
        multitask_build.load_splits(args, tokenizer, ("train", "dev"))
