"""Code written against the starter: both course checks, scripts of each year's layout, checkpoints, export."""

import itertools
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest
import torch
import transformers
from conftest import ROOT, run_script, the_error, write_task_files

import classifier
import evaluation
import multitask_classifier
import starter
import submission
from base_bert import BertPreTrainedModel, find_checkpoint
from bert import BertModel
from config import BertConfig
from datasets import (
    PAIRINGS,
    SentenceClassificationDataset,
    SentenceClassificationTestDataset,
    SentencePairDataset,
    SentencePairTestDataset,
    join_pair,
    load_multitask_test_data,
    preprocess_string,
    trim_padding,
)
from model import Branch, MultitaskBERT
from optimizer import AdamW
from pretrain import PretrainingBERT
from tasks import CFIMDB, PARA, SST, STS, Encoded
from tokenizer import BertTokenizer
from utils import InputError, get_extended_attention_mask

CPU = torch.device("cpu")

# --- the course's two checks ------------------------------------------------------------------------------------------


def test_the_logic_of_the_courses_sanity_check_passes(tmp_path: Path) -> None:
    """As in the course's script: its token ids, no call of eval(), its tolerances. The reference is transformers'."""
    sent_ids = torch.tensor(
        [[101, 7592, 2088, 102, 0, 0, 0, 0], [101, 7592, 15756, 2897, 2005, 17953, 2361, 102]]
    )  # "hello world", "hello neural network for NLP"
    att_mask = torch.tensor([[1, 1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1]])
    theirs = transformers.BertModel.from_pretrained(find_checkpoint("minilm"))
    with torch.no_grad():
        reference = theirs(input_ids=sent_ids, attention_mask=att_mask)
    names = ("last_hidden_state", "pooler_output")
    torch.save({name: reference[name] for name in names}, tmp_path / "sanity_check.data")

    sanity_data = torch.load(tmp_path / "sanity_check.data")
    bert = BertModel.from_pretrained("minilm")
    outputs = bert(sent_ids, att_mask)
    real = att_mask.unsqueeze(-1)
    outputs["last_hidden_state"] = outputs["last_hidden_state"] * real
    sanity_data["last_hidden_state"] = sanity_data["last_hidden_state"] * real
    for name in names:
        assert torch.allclose(outputs[name], sanity_data[name], atol=1e-5, rtol=1e-3)


def reference_adamw(weight: np.ndarray, inputs: np.ndarray, lr: float, weight_decay: float) -> np.ndarray:
    """The handout's pseudo-code in float64, with the gradient of the course's squared error written out."""
    m, v = np.zeros_like(weight), np.zeros_like(weight)
    for t, x in enumerate(inputs, start=1):
        gradient = 2 * np.outer(weight @ x - np.array([x[0] + x[1], -x[2]]), x)
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        alpha_t = lr * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        weight = weight - alpha_t * m / (np.sqrt(v) + 1e-6)
        weight = weight - lr * weight_decay * weight
    return weight


def test_the_logic_of_the_courses_optimizer_test_passes() -> None:
    """As in the course's script: 1000 updates of a linear layer, and its tolerances."""
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2, bias=False)
    start, inputs = model.weight.detach().double().numpy(), []
    opt = AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4, correct_bias=True)
    for _ in range(1000):
        opt.zero_grad()
        x = torch.FloatTensor(rng.uniform(size=[model.in_features]))
        inputs.append(x.double().numpy())
        loss = ((torch.Tensor([x[0] + x[1], -x[2]]) - model(x)) ** 2).sum()
        loss.backward()
        opt.step()
    reference = torch.tensor(reference_adamw(start, np.array(inputs), 1e-3, 1e-4), dtype=torch.float32)
    assert (reference - torch.tensor(start)).abs().max() > 0.3, "the weights have moved far"
    assert torch.allclose(reference, model.weight.detach(), atol=1e-6, rtol=1e-4)


# --- a BERT in the starter's layout -----------------------------------------------------------------------------------


class StudentsLayer(torch.nn.Module):
    """A layer under the starter's module names, with torch's functions for everything."""

    def __init__(self, config: BertConfig):
        super().__init__()
        H, inner = config.hidden_size, config.intermediate_size
        self.N = config.num_attention_heads
        self.self_attention = torch.nn.ModuleDict({name: torch.nn.Linear(H, H) for name in ("query", "key", "value")})
        self.attention_dense, self.interm_dense, self.out_dense = (
            torch.nn.Linear(*shape) for shape in ((H, H), (H, inner), (inner, H))
        )
        self.attention_layer_norm, self.out_layer_norm = (torch.nn.LayerNorm(H, eps=1e-12) for _ in range(2))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            self.self_attention[name](x).unflatten(-1, (self.N, -1)).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        scores = query @ key.transpose(-1, -2) / query.size(-1) ** 0.5 + mask
        attended = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
        x = self.attention_layer_norm(x + self.attention_dense(attended))
        return self.out_layer_norm(x + self.out_dense(torch.nn.functional.gelu(self.interm_dense(x))))


class StudentsBert(BertPreTrainedModel):
    """The starter's bert.py as a student completes it: base class, names, mask and initialization are the starter's."""

    def __init__(self, config: BertConfig):
        super().__init__(config)
        self.word_embedding = torch.nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=0)
        self.pos_embedding = torch.nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.tk_type_embedding = torch.nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.embed_layer_norm = torch.nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.register_buffer("position_ids", torch.arange(config.max_position_embeddings)[None])
        self.bert_layers = torch.nn.ModuleList(StudentsLayer(config) for _ in range(config.num_hidden_layers))
        self.pooler_dense = torch.nn.Linear(config.hidden_size, config.hidden_size)
        self.init_weights()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.word_embedding(input_ids) + self.pos_embedding(self.position_ids[:, : input_ids.size(1)])
        x = self.embed_layer_norm(x + self.tk_type_embedding(torch.zeros_like(input_ids)))
        for layer in self.bert_layers:
            x = layer(x, get_extended_attention_mask(attention_mask, self.dtype))
        return {"last_hidden_state": x, "pooler_output": self.pooler_dense(x[:, 0]).tanh()}


def test_a_students_bert_runs_on_the_base_class_and_the_mask_of_the_starter() -> None:
    ids = torch.tensor([[101, 7592, 2088, 102], [101, 2003, 102, 0]])
    mask = (ids != 0).long()
    students, ours = StudentsBert.from_pretrained("minilm"), BertModel.from_pretrained("minilm")
    assert not students.training
    for name, found in students(ids, mask).items():
        expected = ours(ids, mask)[name]
        real = mask.bool() if found.dim() == 3 else slice(None)
        torch.testing.assert_close(found[real], expected[real], atol=1e-5, rtol=0)
    fresh = StudentsBert(BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64))
    assert fresh.pooler_dense.weight.std().item() == pytest.approx(0.02, rel=0.15)
    assert not fresh.pooler_dense.bias.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_extended_mask_adds_nothing_to_words_and_minus_10000_to_padding(dtype: torch.dtype) -> None:
    mask = get_extended_attention_mask(torch.tensor([[1, 1, 0]]), dtype)
    assert mask.dtype == dtype
    assert mask.shape == (1, 1, 1, 3)
    assert mask.flatten().tolist() == [0, 0, -10000]


# --- data sets --------------------------------------------------------------------------------------------------------

SIDES = [f"{name}_{side}" for side in (1, 2) for name in ("token_ids", "token_type_ids", "attention_mask")]
DATASETS = {  # rows, and the columns of the starter's pad_data in its order
    SentenceClassificationDataset: (
        [("A film .", 3, "a"), ("Bad", 0, "b")],
        ["token_ids", "attention_mask", "labels", "sents", "sent_ids"],
    ),
    SentenceClassificationTestDataset: (
        [("A film .", "a"), ("Bad", "b")],
        ["token_ids", "attention_mask", "sents", "sent_ids"],
    ),
    SentencePairDataset: ([("A film .", "No", 1, "a"), ("Bad", "", 0, "b")], [*SIDES, "labels", "sent_ids"]),
    SentencePairTestDataset: ([("A film .", "No", "a"), ("Bad", "", "b")], [*SIDES, "sent_ids"]),
}


@pytest.fixture(scope="module")
def args(tiny_checkpoint: Path) -> Namespace:
    return Namespace(model=str(tiny_checkpoint), batch_size=3)


def same(one: object, other: object) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("kind", DATASETS)
def test_pad_data_returns_the_starters_columns_in_its_order(kind: type, args: Namespace) -> None:
    rows, names = DATASETS[kind]
    dataset = kind(rows, args)
    columns, batch = dataset.pad_data(rows), dataset.collate_fn(rows)
    assert len(columns) == len(names)
    assert all(same(column, batch[name]) for column, name in zip(columns, names, strict=True))


def test_collate_fn_uses_a_students_own_pad_data(args: Namespace) -> None:
    class Shouting(SentenceClassificationDataset):
        def pad_data(self, data: list[tuple]) -> tuple:
            token_ids, mask, labels, sentences, ids = super().pad_data(data)
            return token_ids, mask, labels, [sentence.upper() for sentence in sentences], ids

    assert Shouting([], args).collate_fn([("loud", 1, "a")])["sents"] == ["LOUD"]


def test_is_regression_makes_whole_numbers_float64_too(args: Namespace) -> None:
    rows = [("a", "b", 3, "x"), ("c", "d", 0, "y")]
    plain, regression = (SentencePairDataset(rows, args, **kw).collate_fn(rows) for kw in ({}, {"isRegression": True}))
    assert (plain["labels"].dtype, regression["labels"].dtype) == (torch.int64, torch.float64)
    assert regression["labels"].tolist() == [3.0, 0.0]


def test_preprocess_string_is_the_starters() -> None:
    assert preprocess_string("Don't  STOP,it's 3.5?") == "don 't stop ,it 's 3 .5 ?"


def test_local_files_only_of_the_starters_flags_reaches_the_tokenizer(monkeypatch, tiny_checkpoint: Path) -> None:
    seen = []

    def find(name: str, *, local_files_only: bool) -> Path:
        seen.append(local_files_only)
        return tiny_checkpoint

    monkeypatch.setattr("tokenizer.find_checkpoint", find)
    SentencePairDataset([], Namespace(local_files_only=True))
    SentencePairDataset([], Namespace())
    assert seen == [True, False]


def test_the_test_texts_of_2023_come_without_ids(task_files: Path) -> None:
    names = (f"{stem}-test-student.csv" for stem in ("ids-sst", "quora", "sts"))
    sentences, para, sts = load_multitask_test_data(*(str(task_files / name) for name in names))
    assert sentences[:2] == ["A good film .", "A bad film ."]
    assert para[0] == sts[0] == ("Is film 0 good, or not?", "A good film .")
    assert len(para) == len(sts) == 8


# --- scripts of both years --------------------------------------------------------------------------------------------

HEADER = """
import argparse, random, sys
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

DATA, OUT, MODEL = sys.argv[1:]
"""

FLAGS = """
def get_args():
    parser = argparse.ArgumentParser()
    for task, stem in (("sst", "ids-sst"), ("para", "quora"), ("sts", "sts")):
        for split, end in (("train", "train"), ("dev", "dev"), ("test", "test-student")):
            parser.add_argument(f"--{task}_{split}", type=str, default=f"{DATA}/{stem}-{end}.csv")
        for split in ("dev", "test"):
            parser.add_argument(f"--{task}_{split}_out", type=str, default=f"{OUT}/{task}-{split}-output.csv")
    parser.add_argument("--seed", type=int, default=11711)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument(MODE, type=str, default=CHOICE)
    parser.add_argument("--use_gpu", action="store_true")
    parser.add_argument("--batch_size", type=int, default=3)
    parser.add_argument("--hidden_dropout_prob", type=float, default=0.3)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--model", type=str, default=MODEL)
    return parser.parse_args([])
"""

OWN_LOOP = """
class StudentsModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.bert = BertModel.from_pretrained(MODEL)
        for param in self.bert.parameters():
            param.requires_grad = True
        H = self.bert.config.hidden_size
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.sentiment, self.pair = nn.Linear(H, 5), nn.Linear(2 * H, 2)

    def forward(self, input_ids, attention_mask):
        return self.dropout(self.bert(input_ids, attention_mask)["pooler_output"])

    def predict_sentiment(self, input_ids, attention_mask):
        return self.sentiment(self(input_ids, attention_mask))

    def predict_pair(self, ids_1, mask_1, ids_2, mask_2):
        return self.pair(torch.cat((self(ids_1, mask_1), self(ids_2, mask_2)), dim=-1))

    def predict_paraphrase(self, *inputs):
        return self.predict_pair(*inputs)[:, :1]

    def predict_similarity(self, *inputs):
        return self.predict_pair(*inputs)[:, 1:]


def save_model(model, optimizer, args, config, filepath):
    torch.save({
        "model": model.state_dict(), "optim": optimizer.state_dict(), "args": args, "model_config": config,
        "system_rng": random.getstate(), "numpy_rng": np.random.get_state(), "torch_rng": torch.random.get_rng_state(),
    }, filepath)


def train_multitask(args):
    device = torch.device("cuda") if args.use_gpu else torch.device("cpu")
    sst_data, num_labels, para_data, sts_data = load_multitask_data(
        args.sst_train, args.para_train, args.sts_train, split="train")
    datasets = {
        "predict_sentiment": SentenceClassificationDataset(sst_data, args),
        "predict_paraphrase": SentencePairDataset(para_data, args),
        "predict_similarity": SentencePairDataset(sts_data, args, isRegression=True),
    }
    config = SimpleNamespace(hidden_dropout_prob=args.hidden_dropout_prob, num_labels=num_labels, hidden_size=768,
                             data_dir=".")
    model = StudentsModel(config).to(device)
    optimizer = AdamW(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        model.train()
        for name, dataset in datasets.items():
            for batch in DataLoader(dataset, shuffle=True, batch_size=args.batch_size, collate_fn=dataset.collate_fn):
                optimizer.zero_grad()
                ends = [""] if name == "predict_sentiment" else ["_1", "_2"]
                inputs = [batch[key + end].to(device) for end in ends for key in ("token_ids", "attention_mask")]
                logits, labels = getattr(model, name)(*inputs), batch["labels"].to(device)
                if name == "predict_sentiment":
                    loss = F.cross_entropy(logits, labels.view(-1), reduction="sum") / args.batch_size
                elif name == "predict_paraphrase":
                    loss = F.binary_cross_entropy_with_logits(logits.view(-1), labels.float())
                else:
                    assert labels.dtype == torch.float64
                    loss = F.mse_loss(logits.view(-1), labels.view(-1).float())
                loss.backward()
                optimizer.step()
        save_model(model, optimizer, args, config, args.filepath)
"""

SCRIPT_2023 = (
    HEADER
    + """
from torch import nn

from bert import BertModel
from datasets import SentenceClassificationDataset, SentencePairDataset, load_multitask_data, load_multitask_test_data
from evaluation import model_eval_sst, test_model_multitask
from multitask_classifier import seed_everything
from optimizer import AdamW
from tokenizer import BertTokenizer

MODE, CHOICE = "--option", "finetune"
"""
    + FLAGS
    + OWN_LOOP
    + """
def test_model(args):
    with torch.no_grad():
        device = torch.device("cpu")
        saved = torch.load(args.filepath)
        model = StudentsModel(saved["model_config"])
        model.load_state_dict(saved["model"])
        results = test_model_multitask(args, model.to(device), device)
        para_acc, para_pred, para_ids, sst_acc, sst_pred, sst_ids, sts_corr, sts_pred, sts_ids = results
        assert len(para_pred) == len(para_ids) == len(sst_pred) == len(sts_ids) == 8
        assert {float(p) for p in para_pred} <= {0.0, 1.0}
        test_model_multitask(args, model, device)


args = get_args()
args.filepath = OUT + "/" + f"{args.option}-{args.epochs}-{args.lr}-multitask.pt"
seed_everything()
train_multitask(args)
test_model(args)
"""
)

SCRIPT_2024 = (
    HEADER
    + """
from torch import nn

from bert import BertModel
from datasets import (SentenceClassificationDataset, SentenceClassificationTestDataset, SentencePairDataset,
                      SentencePairTestDataset, load_multitask_data)
from evaluation import model_eval_multitask, model_eval_sst, model_eval_test_multitask
from multitask_classifier import seed_everything
from optimizer import AdamW

MODE, CHOICE = "--fine-tune-mode", "full-model"
"""
    + FLAGS
    + OWN_LOOP
    + """
def test_multitask(args):
    device = torch.device("cpu")
    saved = torch.load(args.filepath)
    model = StudentsModel(saved["model_config"])
    model.load_state_dict(saved["model"])
    for split, kinds, evaluate in (
        ("dev", (SentenceClassificationDataset, SentencePairDataset), model_eval_multitask),
        ("test", (SentenceClassificationTestDataset, SentencePairTestDataset), model_eval_test_multitask),
    ):
        names = [getattr(args, f"{task}_{split}") for task in ("sst", "para", "sts")]
        sst, num_labels, para, sts = load_multitask_data(*names, split=split)
        sets = kinds[0](sst, args), kinds[1](para, args), kinds[1](sts, args)
        found = evaluate(*(DataLoader(d, shuffle=False, batch_size=args.batch_size, collate_fn=d.collate_fn)
                           for d in sets), model, device)
        if split == "dev":
            sst_acc, sst_pred, sst_ids, para_acc, para_pred, para_ids, sts_corr, sts_pred, sts_ids = found
        else:
            sst_pred, sst_ids, para_pred, para_ids, sts_pred, sts_ids = found
        for task, column, ids, values in (("sst", "Sentiment", sst_ids, sst_pred),
                                          ("para", "Is_Paraphrase", para_ids, para_pred),
                                          ("sts", "Similiary", sts_ids, sts_pred)):
            with open(getattr(args, f"{task}_{split}_out"), "w+") as f:
                f.write(f"id \\t Predicted_{column} \\n")
                for p, s in zip(ids, values):
                    f.write(f"{p} , {s} \\n")


args = get_args()
args.filepath = OUT + "/" + f"{args.fine_tune_mode}-{args.epochs}-{args.lr}-multitask.pt"
seed_everything(args.seed)
train_multitask(args)
test_multitask(args)
"""
)

OUR_FUNCTIONS = HEADER + "MODE, CHOICE = SETTING\n" + FLAGS + """
from pathlib import Path

from multitask_classifier import MultitaskBERT, TEST, save_model, seed_everything, train_multitask

args = get_args()
args.filepath = OUT + "/multitask.pt"
args.runs = Path(OUT) / "runs"
seed_everything(args.seed)
train_multitask(args)
saved = torch.load(args.filepath)
MultitaskBERT(saved["model_config"]).load_state_dict(saved["model"])
TEST(args)
"""  # fmt: skip
SCRIPTS = {
    "2023, own loop": SCRIPT_2023,
    "2024, own loop": SCRIPT_2024,
    "2023, our functions": OUR_FUNCTIONS.replace("SETTING", '"--option", "pretrain"').replace("TEST", "test_model"),
    "2024, our functions": OUR_FUNCTIONS.replace("SETTING", '"--fine-tune-mode", "full-model"').replace(
        "TEST", "test_multitask"
    ),
}


def run_students(script: str, folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Run a student's script, which imports the suite's modules, as `python script.py DATA OUT CHECKPOINT`."""
    (folder / "students.py").write_text(script)
    return run_script(str(folder / "students.py"), *words, PYTHONPATH=str(ROOT))


def problems(folder: Path, data: Path, files: dict[str, submission.PredictionFile]) -> list[str]:
    """All that is wrong with these prediction files, by the checks before submission."""
    found = []
    for name, (_, task, split) in files.items():
        found += submission.check_file(folder / name, task, data / task.filename(split), labeled=split == "dev")[1]
    return found


def test_the_function_of_2023_returns_its_order_and_says_so_once(
    task_files: Path, tiny_checkpoint: Path, tmp_path: Path, capsys
) -> None:
    torch.manual_seed(0)
    model = MultitaskBERT(BertModel.from_pretrained(tiny_checkpoint), [Branch(SST), Branch(PARA), Branch(STS)])
    stems = {"sst": "ids-sst", "para": "quora", "sts": "sts"}
    paths = {f"{name}_dev": task_files / f"{stem}-dev.csv" for name, stem in stems.items()}
    paths |= {f"{name}_test": task_files / f"{stem}-test-student.csv" for name, stem in stems.items()}
    paths |= {
        f"{name}_{split}_out": tmp_path / f"{name}-{split}-output.csv" for name in stems for split in ("dev", "test")
    }
    args = Namespace(model=tiny_checkpoint, batch_size=3, **paths)
    evaluation._say_once.cache_clear()
    first, second = (evaluation.test_model_multitask(args, model, CPU) for _ in range(2))
    assert capsys.readouterr().err.count("in the order of 2023: para, sst, sts") == 1
    (dev, _) = evaluation.write_starter_predictions(args, model, CPU)
    assert first == second == (*dev[3:6], *dev[:3], *dev[6:])
    assert first[1] != first[4], "para and sst differ, so the order shows"
    assert problems(tmp_path, task_files, submission.PART_2_FILES) == []
    lines = (tmp_path / "sts-dev-output.csv").read_text().splitlines()[1:]
    read = [float(line.partition(" , ")[2]) for line in lines]
    np.testing.assert_allclose(read, first[7], rtol=1e-6)


@pytest.mark.parametrize("layout", SCRIPTS)
def test_a_script_of_the_starter_trains_saves_loads_tests_and_writes_six_files(
    layout: str, task_files: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    done = run_students(SCRIPTS[layout], tmp_path, task_files, tmp_path, tiny_checkpoint)
    assert done.returncode == 0, done.stderr
    assert problems(tmp_path, task_files, submission.PART_2_FILES) == []
    notes = [line for line in done.stderr.splitlines() if "the order of 2023: para, sst, sts" in line]
    assert len(notes) == ("2023" in layout), "once, however often it is called"


PART_1_SCRIPT = HEADER + """
from classifier import (BertSentimentClassifier, SentimentDataset, SentimentTestDataset, load_data, model_eval,
                        model_test_eval, save_model, seed_everything, test, train)
from optimizer import AdamW

seed_everything(11711)
device = torch.device("cpu")
train_data, num_labels = load_data(DATA + "/ids-sst-train.csv", "train")
dev_data = load_data(DATA + "/ids-sst-dev.csv", "valid")
test_data = load_data(DATA + "/ids-sst-test-student.csv", "test")
args = SimpleNamespace(batch_size=3, model=MODEL)


def loader(kind, rows, shuffle=False):
    dataset = kind(rows, args)
    return DataLoader(dataset, shuffle=shuffle, batch_size=args.batch_size, collate_fn=dataset.collate_fn)


config = SimpleNamespace(hidden_dropout_prob=0.3, num_labels=num_labels, hidden_size=768, data_dir=".", model=MODEL,
                         **{CONFIG})
model = BertSentimentClassifier(config).to(device)
optimizer = AdamW(model.parameters(), lr=1e-3)
model.train()
for batch in loader(SentimentDataset, train_data, True):
    optimizer.zero_grad()
    logits = model(batch["token_ids"], batch["attention_mask"])
    loss = F.cross_entropy(logits, batch["labels"].view(-1), reduction="sum") / args.batch_size
    loss.backward()
    optimizer.step()
acc, f1, pred, true, sents, ids = model_eval(loader(SentimentDataset, dev_data), model, device)
assert acc == np.mean(np.array(pred) == np.array(true)) and len(sents) == len(ids) == 8
save_model(model, optimizer, args, config, OUT + "/own.pt")
saved = torch.load(OUT + "/own.pt")
again = BertSentimentClassifier(saved["model_config"])
again.load_state_dict(saved["model"])
AdamW(again.parameters(), lr=1e-3).load_state_dict(saved["optim"])
assert model_test_eval(loader(SentimentTestDataset, test_data), again, device)[2] == [row[1] for row in test_data]

for name in ("sst", "cfimdb"):
    config = SimpleNamespace(
        filepath=f"{OUT}/{name}-classifier.pt", lr=1e-3, use_gpu=False, epochs=1, batch_size=3, hidden_dropout_prob=0.3,
        train=f"{DATA}/ids-{name}-train.csv", dev=f"{DATA}/ids-{name}-dev.csv", model=MODEL, **{CONFIG},
        test=f"{DATA}/ids-{name}-test-student.csv", dev_out=f"{OUT}/OPTION-{name}-dev-out.csv",
        test_out=f"{OUT}/OPTION-{name}-test-out.csv")
    train(config)
    test(config)
"""  # fmt: skip


@pytest.mark.parametrize("choice", [{"option": "pretrain"}, {"fine_tune_mode": "full-model"}], ids=["2023", "2024"])
def test_a_script_of_part_1_trains_saves_loads_tests_and_writes_its_files(
    choice: dict[str, str], task_files: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    option = choice.get("option", "finetune")
    script = PART_1_SCRIPT.replace("**{CONFIG}", f"**{choice}").replace("OPTION", option)
    done = run_students(script, tmp_path, task_files, tmp_path, tiny_checkpoint)
    assert done.returncode == 0, done.stderr
    files = {name: file for name, file in submission.PART_1_FILES.items() if name.startswith(option)}
    assert len(files) == 4
    assert problems(tmp_path, task_files, files) == []
    model = torch.load(tmp_path / "cfimdb-classifier.pt")["model"]
    assert model["linear.weight"].shape == (CFIMDB.predicts.num_logits, 32)


def test_part_1_in_the_starters_way_writes_the_scripts_own_predictions(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """One training loop: the same seed and flags give the files of classifier.py, byte for byte."""
    write_task_files(tmp_path / "data")
    data, flags = tmp_path / "data", ["--epochs", 2, "--batch_size", 3, "--lr", "1e-3", "--option", "finetune"]
    done = run_script(
        "classifier.py", "--model", tiny_checkpoint, "--data", data, "--tasks", "sst", "--runs", tmp_path / "runs",
        "--predictions", tmp_path, *flags,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    config = SimpleNamespace(
        filepath=tmp_path / "m.pt", lr=1e-3, use_gpu=False, epochs=2, batch_size=3, hidden_dropout_prob=0.3,
        option="finetune",
        train=data / "ids-sst-train.csv", dev=data / "ids-sst-dev.csv", test=data / "ids-sst-test-student.csv",
        dev_out=tmp_path / "dev.csv", test_out=tmp_path / "test.csv", model=str(tiny_checkpoint),
    )  # fmt: skip
    classifier.seed_everything()
    classifier.train(config)
    classifier.test(config)
    for split in ("dev", "test"):
        expected = (tmp_path / f"finetune-sst-{split}-out.csv").read_bytes()
        assert (tmp_path / f"{split}.csv").read_bytes() == expected


# --- checkpoints of starter-style code --------------------------------------------------------------------------------


def starters_file(path: Path, **more: object) -> Path:
    contents = {"model": {"w": torch.ones(2)}, "args": Namespace(lr=1e-5), "model_config": SimpleNamespace(option="x")}
    torch.save(contents | {"numpy_rng": np.random.get_state()} | more, path)
    return path


def test_torch_load_reads_the_starters_file_because_its_types_run_no_code(tmp_path: Path) -> None:
    starters_file(tmp_path / "m.pt")
    saved = torch.load(tmp_path / "m.pt")
    assert (saved["args"].lr, saved["model_config"].option) == (1e-5, "x")
    np.testing.assert_array_equal(saved["numpy_rng"][1], np.random.get_state()[1])
    bare = "import torch, sys; torch.load(sys.argv[1])"
    found = subprocess.run([sys.executable, "-c", bare, tmp_path / "m.pt"], capture_output=True, text=True)
    assert "weights_only" in found.stderr, "without the suite's modules, torch refuses the file"


class Surprise:
    """Something that torch.load does not read."""


@pytest.mark.parametrize("kind", ["missing", "other", "unknown type", "damaged"])
def test_a_file_that_cannot_be_read_is_refused_in_one_line_with_the_remedy(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    if kind == "other":
        torch.save([1, 2], path)
    elif kind == "unknown type":
        starters_file(path, model_config=Surprise())
    elif kind == "damaged":
        path.write_bytes(starters_file(path).read_bytes()[:300])
    with pytest.raises(InputError, match=r"torch\.load\(FILE, weights_only=False\)") as error:
        starter.load_model(path)
    assert "\n" not in str(error.value)


def test_weights_of_another_model_are_refused_in_one_line(tmp_path: Path, tiny_checkpoint: Path) -> None:
    path = starters_file(tmp_path / "m.pt", model_config=SimpleNamespace(model=str(tiny_checkpoint), option="pretrain"))
    with pytest.raises(InputError, match="its weights do not fit this model") as error:
        multitask_classifier.test_multitask(Namespace(filepath=path, model=str(tiny_checkpoint)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("script", ["classifier.py", "multitask_classifier.py", "pretrain.py"])
def test_a_pt_file_as_model_is_refused_with_what_to_do(script: str, tmp_path: Path, task_files: Path) -> None:
    starters_file(tmp_path / "m.pt")
    done = run_script(script, "--model", tmp_path / "m.pt", "--data", task_files, "--runs", tmp_path / "runs")
    assert "model.bert.save_pretrained(DIRECTORY)" in the_error(finished(done))


def test_a_pt_file_as_run_is_refused_with_what_to_do(tmp_path: Path) -> None:
    starters_file(tmp_path / "m.pt")
    done = run_script("multitask_classifier.py", "--predict_only", "--run", tmp_path / "m.pt")
    assert "call test_multitask(args) with args.filepath" in the_error(finished(done))


def finished(done: subprocess.CompletedProcess[str]) -> SimpleNamespace:
    return SimpleNamespace(status=done.returncode, out=done.stdout, err=done.stderr)


def test_seeds_of_python_and_numpy_are_set_as_well() -> None:
    def draws() -> list[float]:
        import random

        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    classifier.seed_everything(3)
    first = draws()
    multitask_classifier.seed_everything(3)
    assert draws() == first
    multitask_classifier.seed_everything()
    default = draws()
    classifier.seed_everything(11711)
    assert draws() == default != first


# --- one segment type -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_segment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one-segment")
    torch.manual_seed(0)
    shape = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, type_vocab_size=1)
    BertModel(BertConfig(**shape)).save_pretrained(folder)
    BertTokenizer.from_pretrained("minilm").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_joined_pairs_on_one_segment_type_are_refused_in_one_line(pairing: str, one_segment: Path) -> None:
    bert, ids = BertModel.from_pretrained(one_segment), torch.tensor([[101, 2023, 102]])
    if pairing.startswith("bi"):
        model = MultitaskBERT(bert, [Branch(PARA, pairing=pairing)]).eval()
        assert model.predict_paraphrase(ids, ids > 0, ids, ids > 0).shape == (1, 1)
        return
    with pytest.raises(InputError, match=rf"--para_pairing {pairing} .*type_vocab_size 1\. Use --para_pairing bi"):
        MultitaskBERT(bert, [Branch(PARA, pairing=pairing)])


def test_the_scripts_refuse_it_too_with_status_2(one_segment: Path, task_files: Path, tmp_path: Path) -> None:
    where = "--model", one_segment, "--data", task_files, "--runs", tmp_path / "runs"
    done = run_script("multitask_classifier.py", *where, "--pairing", "cross", "--predictions", tmp_path)
    assert "Use --para_pairing bi" in the_error(finished(done))
    with pytest.raises(InputError, match="--objective nsp joins two sentences"):
        PretrainingBERT(BertModel.from_pretrained(one_segment), ["nsp"])


# --- joined pairs and export ------------------------------------------------------------------------------------------


def random_side(rows: int, width: int, generator: torch.Generator) -> Encoded:
    """[CLS], a random number of tokens, [SEP], padding; one row is as long as the batch is wide."""
    lengths = torch.randint(2, width + 1, (rows,), generator=generator)
    lengths[0] = width
    columns = torch.arange(width)
    ids = torch.randint(1000, 2000, (rows, width), generator=generator)
    ids[:, 0] = 101
    ids = torch.where(columns == lengths[:, None] - 1, 102, ids)
    mask = (columns < lengths[:, None]).long()
    return Encoded(ids * mask, mask, torch.zeros_like(ids))


def joined_row(first: list[int], second: list[int], most: int) -> tuple[list[int], list[int]]:
    """Token by token: drop the last token of the longer side until the pair fits.

    In a tie, it is the side that was shorter at first, as in the tokenizer.
    """
    a, b = first[1:-1], second[1:-1]
    shorter = a if len(a) <= len(b) else b
    while len(a) + len(b) + 3 > most:
        (shorter if len(a) == len(b) else max(a, b, key=len)).pop()
    return [101, *a, 102, *b, 102], [0] * (len(a) + 2) + [1] * (len(b) + 1)


@pytest.mark.parametrize("most", [4, 7, 12, 13, 40])
def test_joining_without_data_dependent_shapes_equals_joining_token_by_token(most: int) -> None:
    generator = torch.Generator().manual_seed(most)
    for case in range(40):
        first, second = (random_side(6, 2 + (case * step) % 17, generator) for step in (3, 7))
        joined = join_pair(first, second, most)
        assert joined.token_ids.size(1) == min(first.token_ids.size(1) + second.token_ids.size(1) - 1, most)
        for row in range(6):
            sides = [e.token_ids[row][e.attention_mask[row].bool()].tolist() for e in (first, second)]
            ids, segments = joined_row(*sides, most)
            padding = [0] * (joined.token_ids.size(1) - len(ids))
            assert joined.token_ids[row].tolist() == ids + padding
            assert joined.attention_mask[row].tolist() == [1] * len(ids) + padding
            assert joined.token_type_ids[row].tolist() == segments + padding
        trimmed = trim_padding(joined)
        assert trimmed.attention_mask.any(dim=0).all()
        assert torch.equal(trimmed.attention_mask.sum(dim=1), joined.attention_mask.sum(dim=1))


class Asking(torch.nn.Module):
    """One of the starter's calls as a module's forward pass."""

    def __init__(self, model: MultitaskBERT, name: str):
        super().__init__()
        self.model, self.name = model, name

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return getattr(self.model, self.name)(*inputs)


def exported(asking: Asking, sides: int, example: tuple[torch.Tensor, ...]) -> torch.export.ExportedProgram:
    """The program for batches of any size and sentences of any length."""
    B, *T = (torch.export.Dim(letter, max=500) for letter in ("B", "T1", "T2"))
    shapes = (tuple({0: B, 1: T[side]} for side in range(sides) for _ in ("token_ids", "attention_mask")),)
    return torch.export.export(asking, example, dynamic_shapes=shapes)


def starter_inputs(rows: int, widths: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(sum(widths))
    encoded = [random_side(rows, width, generator) for width in widths]
    return tuple(part for side in encoded for part in (side.token_ids, side.attention_mask))


def asking_for(name: str, pairing: str, checkpoint: Path) -> Asking:
    torch.manual_seed(0)
    branches = [Branch(SST), Branch(PARA, pairing=pairing), Branch(STS, pairing=pairing, pooling="mean")]
    return Asking(MultitaskBERT(BertModel.from_pretrained(checkpoint), branches, max_length=12), name).eval()


SIZES = [(3, (9, 7)), (5, (4, 12)), (2, (30, 3))]


@pytest.mark.parametrize(
    ("name", "pairing"),
    [("predict_sentiment", "bi"), *itertools.product(["predict_paraphrase", "predict_similarity"], PAIRINGS)],
)
def test_every_call_can_be_exported_for_batches_and_sentences_of_any_size(
    name: str, pairing: str, tiny_checkpoint: Path
) -> None:
    asking, sides = asking_for(name, pairing, tiny_checkpoint), 1 if name == "predict_sentiment" else 2
    cases = [starter_inputs(rows, widths[:sides]) for rows, widths in SIZES]
    program = exported(asking, sides, cases[0]).module()
    for case in cases:
        with torch.no_grad():
            torch.testing.assert_close(program(*case), asking(*case), atol=1e-6, rtol=0)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_joined_pairs_can_be_exported_to_onnx(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """onnxruntime, which knows nothing of torch, gives the same logits."""
    asking = asking_for("predict_paraphrase", "cross", tiny_checkpoint)
    cases = [starter_inputs(rows, widths) for rows, widths in SIZES]
    torch.onnx.export(exported(asking, 2, cases[0]), dynamo=True, verbose=False).save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    names = [given.name for given in session.get_inputs()]
    for case in cases:
        (logits,) = session.run(None, {name: tensor.numpy() for name, tensor in zip(names, case, strict=True)})
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(logits), asking(*case), atol=1e-6, rtol=0)
