"""--max_tokens: batches of as many rows as fit into a number of tokens, in all training scripts."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from conftest import Finished, the_error, write_task_files
from test_training import interrupted_at

import classifier
import multitask_classifier
import multitask_flags
import pretrain
import training
from bert import BertModel
from corpus import Corpus, MaskedSentences, Masking, NextSentences, Pair, PairCorpus, PositivePairs, SentencesTwice
from datasets import Source, epoch_generator
from tasks import Tokens, stack
from tokenizer import BertTokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

# --- the sources of pre-training --------------------------------------------------------------------------------------


def sources(tokenizer: BertTokenizer) -> dict[str, Source]:
    words = ["a", "cat", "sees", "two", "red", "dogs", "in", "the", "old", "barn", "and", "runs", "home"]
    documents = [[" ".join(words[: 1 + (3 * i + j) % 12]) + f" {i} {j}" for j in range(5)] for i in range(30)]
    texts, padding_id = Corpus.tokenize(documents, tokenizer), tokenizer.pad_token_id
    pairs = [Pair(a, b, c if i % 3 else None) for i, (a, b, c, *_) in enumerate(documents)]
    return {
        "mlm": MaskedSentences(texts, Masking.of(tokenizer, 0.15, whole_word=False), padding_id),
        "nsp": NextSentences(texts, padding_id, 20),
        "simcse": SentencesTwice(texts, padding_id),
        "simcse_supervised": PositivePairs(PairCorpus.tokenize(pairs, tokenizer), padding_id),
        "simcse_supervised without negatives": PositivePairs(
            PairCorpus.tokenize([pair._replace(negative=None) for pair in pairs], tokenizer), padding_id
        ),
    }


@pytest.mark.parametrize("name", ["mlm", "nsp", "simcse", "simcse_supervised", "simcse_supervised without negatives"])
def test_the_batches_of_a_pretraining_source_stay_within_the_limit_and_their_number_is_known(
    name: str, tiny_checkpoint: Path
):
    source = sources(BertTokenizer.from_pretrained(tiny_checkpoint))[name]
    counts = set()
    for epoch in (1, 2, 3):
        batches = list(source.batches(Tokens(150), epoch_generator(0, epoch)))
        computed = [stack(batch.sentences).token_ids.numel() for batch in batches]
        assert max(computed) <= 150
        assert torch.tensor(computed).double().median() > 100
        assert sum(len(batch.labels) for batch in batches) == len(source)
        assert len(batches) == source.count_batches(Tokens(150), epoch_generator(0, epoch))
        counts.add(len(batches))
    assert len(counts) == 1 or name == "nsp", "only nsp draws other pairs, and so other lengths, in every epoch"


# --- the scripts ------------------------------------------------------------------------------------------------------

Run = Callable[..., Finished]
SCRIPTS: dict[ModuleType, list[str]] = {
    classifier: ["--option", "finetune", "--lr", "1e-3"],
    multitask_classifier: ["--option", "finetune", "--lr", "1e-3"],
    pretrain: ["--objective", "mlm+nsp+simcse", "--lr", "1e-3"],
}
BY_NAME = {module.__name__: module for module in SCRIPTS}


@pytest.fixture
def run(tmp_path: Path, tiny_checkpoint: Path, run_main: Run) -> Run:
    """run(script, *flags): train in this process on small files of every task."""
    write_task_files(tmp_path / "data", rows=30)
    lines = [f"Sentence {i} has {'more ' * (i % 7)}words.\n" + "\n" * (i % 4 == 3) for i in range(60)]
    (tmp_path / "text.txt").write_text("".join(lines))

    def run(script: ModuleType, *flags: object) -> Finished:
        given = ["--model", tiny_checkpoint, "--runs", tmp_path / "runs", "--epochs", 2, "--name", "r"]
        if script is pretrain:
            given += ["--text", tmp_path / "text.txt"]
        else:
            given += ["--data", tmp_path / "data", "--predictions", tmp_path / "predictions"]
        return run_main(script, *given, *SCRIPTS[script], *flags)

    return run


@pytest.mark.parametrize("name", BY_NAME)
def test_every_script_trains_on_batches_within_the_limit(name: str, run: Run, monkeypatch: pytest.MonkeyPatch):
    computed: list[int] = []
    real = BertModel.encode

    def encode(bert: BertModel, hidden_states: torch.Tensor, *others: object) -> torch.Tensor:
        if torch.is_grad_enabled():
            computed.append(hidden_states.shape[0] * hidden_states.shape[1])
        return real(bert, hidden_states, *others)

    monkeypatch.setattr(BertModel, "encode", encode)
    finished = run(BY_NAME[name], "--max_tokens", 120)
    assert finished.status == 0, finished.err
    assert max(computed) <= 120
    assert max(computed) > 90


@pytest.mark.parametrize("name", BY_NAME)
def test_the_schedule_ends_with_the_last_batch(name: str, run: Run, monkeypatch: pytest.MonkeyPatch):
    """A linear schedule is at zero after its last step, so its length is the number of updates."""
    rates: list[list[float]] = []
    real = training.Trainer.update

    def update(self: training.Trainer, *arguments: object) -> None:
        real(self, *arguments)
        rates.append([group["lr"] for group in self.optimizer.param_groups])

    monkeypatch.setattr(training.Trainer, "update", update)
    only = ["--tasks", "sst"] if name == "classifier" else []
    finished = run(BY_NAME[name], "--max_tokens", 120, "--schedule", "linear", *only)
    assert finished.status == 0, finished.err
    assert max(rates[-1]) == 0
    assert all(max(before) > 0 for before in rates[:-1])


@pytest.mark.parametrize("name", ["multitask_classifier", "pretrain"])
def test_a_resumed_run_by_tokens_ends_like_one_that_was_not_stopped(
    name: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    script, updates = BY_NAME[name], []
    real = training.Trainer.update
    with monkeypatch.context() as patch:
        patch.setattr(training.Trainer, "update", lambda self, *rest: (updates.append(1), real(self, *rest)))
        assert run(script, "--max_tokens", 120, "--name", "whole").status == 0
    with monkeypatch.context() as patch:
        interrupted_at(patch, len(updates) - 1)  # in the second epoch
        assert run(script, "--max_tokens", 120, "--name", "stopped").status == 130
    assert run(script, "--max_tokens", 120, "--name", "stopped", "--resume").status == 0
    logs = [
        [json.loads(line) for line in (tmp_path / "runs" / n / "log.jsonl").read_text().splitlines()]
        for n in ("whole", "stopped")
    ]
    for one, other in zip(*logs, strict=True):
        assert (one["epoch"], one["scores"], one.get("losses")) == (
            other["epoch"],
            other["scores"],
            other.get("losses"),
        )


@pytest.mark.parametrize("name", ["multitask_classifier", "pretrain"])
def test_a_dry_run_by_tokens_makes_two_updates(name: str, run: Run, monkeypatch: pytest.MonkeyPatch):
    updates: list[int] = []
    real = training.Trainer.update
    monkeypatch.setattr(training.Trainer, "update", lambda self, *rest: (updates.append(1), real(self, *rest)))
    finished = run(BY_NAME[name], "--max_tokens", 120, "--accumulate", 2, "--dry_run")
    assert finished.status == 0, finished.err
    assert len(updates) == 2


# --- flags ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [8, 5], ids=["the default", "another"])
@pytest.mark.parametrize("name", BY_NAME)
def test_both_sizes_together_are_refused(name: str, size: int, run: Run):
    error = the_error(run(BY_NAME[name], "--batch_size", size, "--max_tokens", 512))
    assert error == (
        f"error: --batch_size {size} needs one size of a batch, in rows or in tokens, but both are given. Leave out "
        "--max_tokens, or leave out --batch_size."
    )


PARSERS = {
    "classifier": classifier.get_args,
    "multitask_classifier": multitask_classifier.get_args,
    "pretrain": lambda argv: pretrain.get_args([*argv, "--tasks", "sst"]),
}


@pytest.mark.parametrize("name", PARSERS)
def test_a_later_size_replaces_that_of_a_recipe(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "rows.txt").write_text("--batch_size 16\n")
    (tmp_path / "tokens.txt").write_text("--max_tokens 512\n")
    rows, tokens = (f"@{tmp_path / recipe}.txt" for recipe in ("rows", "tokens"))
    for argv in ([rows, "--max_tokens", "512"], [rows, tokens]):
        args = PARSERS[name](argv)
        assert (args.batch_size, args.max_tokens) == (None, 512)
        assert "note: --batch_size: no effect with --max_tokens 512, so dropped." in capsys.readouterr().err
    for argv in ([tokens, "--batch_size", "16"], [tokens, rows]):
        args = PARSERS[name](argv)
        assert (args.batch_size, args.max_tokens) == (16, None)
        assert "note: --max_tokens: no effect with --batch_size 16, so dropped." in capsys.readouterr().err


def test_part_1_refuses_max_tokens_with_the_size_of_either_task():
    for flag in ("--batch_size", "--cfimdb_batch_size"):
        with pytest.raises(ValueError, match=f"{flag} 4 needs one size of a batch"):
            classifier.get_args(["--max_tokens", "512", flag, "4"])


def test_a_contrastive_loss_refuses_a_limit_that_no_two_rows_fit(run: Run):
    error = the_error(run(multitask_classifier, "--max_tokens", 20, "--para_loss", "bce+mnrl"))
    assert "--para_loss bce+mnrl: mnrl compares the rows of a batch, but no two rows fit into --max_tokens 20." in error
    error = the_error(run(pretrain, "--max_tokens", 10, "--objective", "simcse"))
    assert "--objective simcse compares the rows of a batch, but no two rows fit into --max_tokens 10." in error


def test_chunks_must_be_smaller_than_the_limit():
    tuned = ["--option", "finetune", "--max_tokens", "100", "--chunk_rows"]
    assert multitask_classifier.get_args([*tuned, "49"]).chunk_rows == 49
    with pytest.raises(ValueError, match="at most 50 here, found 50"):
        multitask_classifier.get_args([*tuned, "50"])


def test_a_run_that_is_older_than_the_flag_has_the_batch_size_it_was_started_with():
    stored = {"tasks": ["sst"], "batch_size": 4}
    assert (multitask_flags.upgraded(stored)["batch_size"], multitask_flags.upgraded(stored)["max_tokens"]) == (4, None)
