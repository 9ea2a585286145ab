"""The training loop with every extension: resuming, accumulation, scores, averages, precision; every option acts."""

import copy
import itertools
import json
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import write_task_files
from safetensors.torch import load_file
from test_multitask import Finished, run_multitask, same
from torch import Tensor, nn

import losses
import multitask_build
import multitask_classifier
import utils
from adapters import ADAPTERS
from bert import Dropout
from checkpoints import load_state
from datasets import Split
from evaluation import write_logits
from heads import HEADS, POOLERS, check_head
from losses import LOSSES, WEIGHTINGS
from model import MultitaskBERT
from multitask_classifier import get_args, train_multitask
from optimizer import AVERAGERS, OPTIMIZERS
from pcgrad import COMBINERS
from readers import Examples, read_examples
from runs import Run
from sampling import SAMPLERS
from smart import REGULARIZERS
from tasks import SST, STS, TASKS, Batch, Number, Output, Predictions, Task
from tokenizer import BertTokenizer
from trainer import EpochRecord, Trainer
from training import grouped, train_on
from utils import InputError, Precision

CPU = torch.device("cpu")
TUNED = ["--option", "finetune", "--lr", "1e-3"]
UNEQUAL = {"seconds": 0, "memory": 0}  # what differs between the logs of two equal runs


pytestmark = pytest.mark.usefixtures("one_thread")


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def state_of(done: Finished) -> dict[str, Any]:
    return load_state(Run(done.run))["trainer"]


def scripted(monkeypatch: pytest.MonkeyPatch, *overall: float) -> None:
    """Make the evaluations return these scores in turn, for every task; the last one is repeated."""
    turns = {name: itertools.chain(overall, itertools.repeat(overall[-1])) for name in TASKS}
    monkeypatch.setattr(multitask_classifier, "score", lambda task, found: next(turns[task.name]))


def rising_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the last epoch the best one."""
    scripted(monkeypatch, *(i / 100 for i in range(99)))


# --- resume -----------------------------------------------------------------------------------------------------------


def interrupted_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Raise KeyboardInterrupt after `number` updates."""
    left, update = itertools.count(1), Trainer.update

    def updating(*args: object) -> None:
        update(*args)
        if next(left) == number:
            raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "update", updating)


# 8 rows in batches of 3: three draws of the sampler per epoch
RESUMED = {
    "sum": [*TUNED, "--clip", 1],
    "pcgrad and smart": [*TUNED, "--combiner", "pcgrad", "--regularizer", "smart", "--pairing", "cross"],
    "gradvac and ema": [
        *TUNED,
        "--combiner",
        "gradvac",
        "--averager",
        "ema",
        "--ema_decay",
        0.9,
        "--schedule",
        "linear",
    ],
    "smart+bregman": [*TUNED, "--regularizer", "smart+bregman", "--bregman_momentum", 0.5],
    "rdrop, swa and uncertainty": [
        *(*TUNED, "--regularizer", "rdrop", "--averager", "swa", "--weighting", "uncertainty", "--head_lr", 0.01),
        *("--sampler", "annealed", "--steps_per_epoch", 3, "--schedule", "cosine", "--warmup", 0.2),
    ],
    "fp16": [*TUNED, "--precision", "fp16", "--hidden_dropout_prob", 0],
    "a frozen BERT": ["--lr", "1e-2", "--head", "mlp"],
    "pals and adafactor": [*TUNED, "--adapter", "pal", "--regularizer", "bregman", "--optimizer", "adafactor"],
    "lora alone, ema and nadam": [
        *(*TUNED, "--adapter", "lora", "--adapter_only", "--optimizer", "nadam", "--averager", "ema"),
        *("--combiner", "pcgrad"),
    ],
    "mixout": [*TUNED, "--adapter", "mixout"],
    "own layers": [*TUNED, "--adapter", "own_layers", "--own_layers", 1, "--averager", "ema"],
}


@pytest.mark.parametrize("case", RESUMED)
def test_a_run_that_goes_on_ends_bit_for_bit_like_one_that_was_never_interrupted(
    case: str, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    flags = [*RESUMED[case], "--epochs", 4, "--keep_state"]
    write_task_files(tmp_path / "data")
    whole = run_multitask(tmp_path, tiny_checkpoint, *flags, "--name", "r")
    shutil.move(tmp_path / "runs", tmp_path / "whole")
    shutil.move(tmp_path / "predictions", tmp_path / "predictions of the whole")
    with monkeypatch.context() as patch:
        interrupted_at(patch, 8)  # the second step of epoch 3
        with pytest.raises(KeyboardInterrupt):
            run_multitask(tmp_path, tiny_checkpoint, *flags)
    assert not (tmp_path / "predictions" / "sst-dev-output.csv").exists()
    torch.manual_seed(99)  # another process has other random numbers
    done = run_multitask(tmp_path, tiny_checkpoint, *flags, "--resume")
    assert "epoch 3 " in done.out
    assert "epoch 2 " not in done.out
    one, other = (load_state(Run(tmp_path / d / "r")) for d in ("whole", "runs"))
    for state in (one, other):
        del state["seconds"], state["log"], state["watch"]
    torch.testing.assert_close(one, other, rtol=0, atol=0)  # weights, optimizer, averages, teacher, generators, scaler
    assert same(load_file(tmp_path / "whole" / "r" / "model.safetensors"), done.weights())
    log = [json.loads(line) for line in (tmp_path / "whole" / "r" / "log.jsonl").read_text().splitlines()]
    assert len(log) == 4
    assert [line | UNEQUAL for line in done.log()] == [line | UNEQUAL for line in log]
    wanted = {path.name: path.read_text() for path in (tmp_path / "predictions of the whole").glob("*.csv")}
    assert (done.predictions(), len(wanted)) == (wanted, 6)
    assert whole.out.splitlines()[-6:] == done.out.splitlines()[-6:]


def test_a_run_that_goes_on_remembers_its_best_epoch(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    flags = [*TUNED, "--epochs", 3]
    with monkeypatch.context() as patch:
        scripted(patch, 0.5, 0.4)
        interrupted_at(patch, 7)  # the first step of epoch 3
        with pytest.raises(KeyboardInterrupt):
            run_multitask(tmp_path, tiny_checkpoint, *flags)
    best = load_file(tmp_path / "runs" / "r" / "model.safetensors")
    scripted(monkeypatch, 0.45)
    done = run_multitask(tmp_path, tiny_checkpoint, *flags, "--resume")
    assert [line["best"] for line in done.log()] == [True, False, False]
    assert json.loads((done.run / "dev.json").read_text())["sst"] == 0.5
    assert same(done.weights(), best)


@pytest.fixture
def finished(tiny_checkpoint: Path, tmp_path: Path) -> Finished:
    return run_multitask(tmp_path, tiny_checkpoint, "--epochs", 1)


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (["--epochs", 1, "--lr", 0.5, "--seed", 3], "--seed 11711 (now 3), --lr 1e-05 (now 0.5)"),
        (["--epochs", 1, "--option", "finetune"], "--option pretrain (now finetune)"),
    ],
)
def test_resume_with_other_flags_is_refused(flags: list, found: str, finished: Finished, tiny_checkpoint: Path):
    with pytest.raises(InputError) as refused:
        run_multitask(finished.folder, tiny_checkpoint, *flags, "--resume")
    assert f"was started with {found}. Use the same flags, or another --name." in str(refused.value)


@pytest.mark.parametrize("split", ["train", "dev", "test-student"])
def test_resume_with_changed_data_is_refused(split: str, finished: Finished, tiny_checkpoint: Path):
    path = finished.folder / "data" / f"sts-{split}.csv"
    path.write_text(path.read_text().replace("good", "fine"))
    with pytest.raises(InputError, match=rf"sts-{split}\.csv changed since the run was started\. Use another --name\."):
        run_multitask(finished.folder, tiny_checkpoint, "--epochs", 1, "--resume")


def test_resume_of_a_finished_run_trains_no_more_and_predicts_the_same(finished: Finished, tiny_checkpoint: Path):
    before, weights = finished.predictions(), finished.weights()
    done = run_multitask(finished.folder, tiny_checkpoint, "--epochs", 1, "--resume")
    assert (done.predictions(), len(done.log())) == (before, 1)
    assert same(done.weights(), weights)


# --- one update -------------------------------------------------------------------------------------------------------


class Bench:
    """A model, its trainer and batches of all tasks, without a script around them."""

    def __init__(self, checkpoint: Path, *flags: object, dropout: bool = False, device: torch.device = CPU):
        given = ["--model", checkpoint, "--option", "finetune", "--lr", "1e-2", *flags]
        self.args = get_args(list(map(str, given)))
        torch.manual_seed(0)
        self.model = multitask_build.build_model(self.args)
        for module in self.model.modules():
            if isinstance(module, Dropout | HEADS["linear"]) and not dropout:
                module.p = 0.0
        self.model.to(device).train()
        self.trainer = multitask_build.build_trainer(self.args, self.model, Precision(self.args.precision, device), 100)
        self.tokenizer = BertTokenizer.from_pretrained(str(checkpoint))

    def batch(self, task: str, *rows: int) -> Batch:
        texts = tuple([f"{column} {i} is {'good ' * i}" for i in range(8)] for column in TASKS[task].text_columns)
        labels = [i % 5 if task == "sst" else i % 2 if task == "para" else i / 2 for i in range(8)]
        pairing = self.model.branches[task].pairing_for("train")
        split = Split.tokenize(Examples(TASKS[task], list("abcdefgh"), texts, labels), self.tokenizer, pairing)
        return split.with_text_hashes().batch(torch.tensor(rows)).to(self.trainer.precision.device)

    def draw(self, *rows: int) -> list[Batch]:
        return [self.batch(task, *rows) for task in self.args.tasks]

    def with_sgd(self) -> "Bench":
        """Use SGD, whose steps are proportional to the gradients. Adam would amplify their rounding errors."""
        self.trainer.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.trainer.schedule = torch.optim.lr_scheduler.LambdaLR(self.trainer.optimizer, lambda step: 1.0)
        return self

    def after(self, *steps: list[list[Batch]]) -> dict[str, Tensor]:
        for number, step in enumerate(steps, start=1):
            self.trainer.update(step, EpochRecord(self.trainer.targets), number)
        return weights_of(self.model)


Start = Callable[..., Bench]


@pytest.fixture
def bench(tiny_checkpoint: Path) -> Start:
    return lambda *flags, **options: Bench(tiny_checkpoint, *flags, **options)


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor], atol: float = 1e-6) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


EXTENSIONS = [*(("--regularizer", key) for key in REGULARIZERS if key != "none"), ("--sts_loss", "mse+simcse")]


@pytest.mark.parametrize(("flag", "value"), EXTENSIONS)
def test_an_extension_that_draws_random_numbers_leaves_the_models_dropout_masks_as_they_were(
    flag: str, value: str, bench: Start
):
    """So a run with the extension and one without differ by the extension and nothing else."""
    states = []
    for flags in ((), (flag, value)):
        started = bench(*flags, dropout=True)
        torch.manual_seed(5)
        started.after([started.draw(0, 1, 2)], [started.draw(3, 4)])
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_the_loop_moves_the_bregman_teacher_after_every_step(bench: Start):
    """theta~ <- beta theta~ + (1 - beta) theta; a teacher that never moves would hold the model at its start."""
    started = bench("--regularizer", "bregman", "--bregman_momentum", "0.9")
    expected = weights_of(started.model)
    for _ in range(2):
        live = started.after([started.draw(0, 1)])
        expected = {name: 0.9 * tensor + 0.1 * live[name] for name, tensor in expected.items()}
    assert_close(dict(started.trainer.regularizer.teacher), expected)
    assert not same(live, expected)


@pytest.mark.parametrize("combiner", COMBINERS)
def test_two_half_batches_make_the_step_of_the_whole_batch(combiner: str, bench: Start):
    flags = ["--combiner", combiner, "--pairing", "cross"]
    whole, halves = bench(*flags).with_sgd(), bench(*flags).with_sgd()
    before = weights_of(whole.model)
    one = whole.after([whole.draw(0, 1, 2, 3, 4, 5)])
    other = halves.after([halves.draw(0, 1, 2), halves.draw(3, 4, 5)])
    assert_close(one, other, atol=1e-5)
    assert max((one[name] - before[name]).abs().max() for name in one) > 1e-2


def test_a_group_counts_by_the_draws_it_has_and_not_by_those_it_was_to_have(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bench: Start
):
    groups, update = [], Trainer.update
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", lambda t, step, *a: (groups.append(len(step)), update(t, step, *a))[1])
        run_multitask(tmp_path, tiny_checkpoint, *TUNED, "--epochs", 2, "--accumulate", 2)  # three draws per epoch
    assert groups == [2, 1, 2, 1]
    one = bench("--accumulate", 2).with_sgd()
    draw = one.draw(0, 1)
    sum(one.trainer.objectives[batch.task](one.model.predict(batch), batch) for batch in draw).backward()
    wanted = {name: (p - 0.1 * p.grad).detach() for name, p in one.model.named_parameters()}
    one.model.zero_grad()
    assert_close(one.after([draw]), wanted)


def test_groups_hold_every_item_in_order_and_the_last_may_be_shorter():
    assert list(grouped(range(5), 2)) == [[0, 1], [2, 3], [4]]
    assert list(grouped([], 3)) == []
    assert list(grouped("abc", 1)) == [["a"], ["b"], ["c"]]


@pytest.mark.parametrize("flags", [["--pairing", "bi"], ["--combiner", "pcgrad", "--regularizer", "smart"]])
def test_checkpointed_activations_give_the_same_weights_with_dropout_on(flags: list[str], bench: Start):
    def after_two_steps(*more: str) -> dict[str, Tensor]:
        one = bench(*flags, *more, dropout=True)
        torch.manual_seed(5)
        return one.after([one.draw(0, 1, 2)], [one.draw(3, 4)])

    assert_close(after_two_steps(), after_two_steps("--checkpoint_activations"), atol=1e-7)


def test_checkpointed_activations_are_computed_twice(bench: Start):
    for flags, times in (([], 1), (["--checkpoint_activations"], 2)):
        one, calls = bench("--tasks", "sst", *flags), []
        one.model.bert.bert_layers[0].register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        one.after([one.draw(0, 1)])
        assert len(calls) == times


@pytest.mark.slow
def test_compiled_layers_give_the_same_logits_and_the_same_step(bench: Start):
    plain, compiled = bench().with_sgd(), bench().with_sgd()
    names = list(compiled.model.state_dict())
    compiled.model.bert.compile_layers()
    assert list(compiled.model.state_dict()) == names
    for rows in ((0, 1, 2), (3, 4), (5, 6, 7)):  # of different lengths
        with torch.no_grad():
            one, other = (b.model.predict(b.batch("para", *rows)).logits for b in (plain, compiled))
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    assert_close(*(b.after([b.draw(0, 1, 2)], [b.draw(3, 4)]) for b in (plain, compiled)), atol=1e-5)


def test_learning_rates_reach_their_parameters(bench: Start):
    one = bench("--head_lr", "0.5", "--layer_decay", "0.1", "--lr", "0.01", "--share_pair_layer")
    names = {id(parameter): name for name, parameter in one.model.named_parameters()}
    rates = {names[id(p)]: group["lr"] for group in one.trainer.optimizer.param_groups for p in group["params"]}
    assert rates.keys() == set(names.values())
    for name, rate in rates.items():
        wanted = 0.5
        if name.startswith("bert."):
            steps = 0 if "pooler" in name else 2 if "embed" in name else 1 - int(name.split("bert_layers.")[1][0])
            wanted = 0.01 * 0.1**steps
        assert rate == pytest.approx(wanted), name


# --- what the training pass itself shows ------------------------------------------------------------------------------


def test_training_scores_come_from_the_training_pass_alone(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    met: dict[str, list[tuple[np.ndarray, np.ndarray, float]]] = {}
    add = EpochRecord.add

    def adding(record: EpochRecord, batch: Batch, step: int, loss: Tensor, penalty: Tensor, logits: Tensor) -> None:
        met.setdefault(batch.task, []).append((logits.detach().numpy(), batch.labels.numpy(), (loss + penalty).item()))
        add(record, batch, step, loss, penalty, logits)

    monkeypatch.setattr(EpochRecord, "add", adding)
    done = run_multitask(tmp_path, tiny_checkpoint, *TUNED, "--epochs", 1)
    line = done.log()[0]
    logits, labels = ({t: np.concatenate([part[i] for part in met[t]]) for t in met} for i in (0, 1))
    assert {task: len(rows) for task, rows in logits.items()} == {"sst": 8, "para": 8, "sts": 8}
    assert line["train"] == {
        "sst": pytest.approx(np.mean(logits["sst"].argmax(1) == labels["sst"])),
        "para": pytest.approx(np.mean((logits["para"][:, 0] > 0) == labels["para"])),
        "sts": pytest.approx(np.corrcoef(logits["sts"][:, 0], labels["sts"])[0, 1]),
    }
    assert line["losses"] == {task: pytest.approx(np.mean([part[2] for part in parts])) for task, parts in met.items()}
    sentences = 8 * (1 + 2 + 2)
    assert sum(rows for rows, training in done.encoded if training) == sentences
    assert sum(rows for rows, training in done.encoded if not training) == 3 * sentences  # dev; then dev and test


def record_of(targets: dict[str, Any], *entries: tuple[str, float, float, list[float], list[float]]) -> EpochRecord:
    """Entries: task, loss, penalty, logits of a single output, labels."""
    record = EpochRecord(targets)
    for step, (task, loss, penalty, logits, labels) in enumerate(entries, start=1):
        batch = Batch(task, [], (), torch.tensor(labels))
        record.add(batch, step, torch.tensor(loss), torch.tensor(penalty), torch.tensor(logits)[:, None])
    return record


def test_a_record_has_the_means_of_losses_and_penalties_and_the_scores_of_the_tasks_that_have_a_target():
    entries = [
        ("para", 1.0, 0.5, [0.3, -2.0], [1, 1]),
        ("sts", 4.0, 0.0, [1.0, 2.0], [0.5, 5.0]),
        ("para", 2.0, 0.25, [5.0], [1]),
        ("sts", 2.0, 1.0, [9.0], [3.0]),
    ]
    targets = {"para": TASKS["para"].predicts, "sts": TASKS["sts"].predicts}
    record = record_of(targets, *entries)
    assert record.mean_losses() == {"para": 1.875, "sts": 3.5}
    assert record.mean_penalties() == {"para": 0.375, "sts": 0.5}
    correlation = np.corrcoef([1.0, 2.0, 9.0], [0.5, 5.0, 3.0])[0, 1]
    assert record.scores() == {"para": pytest.approx(2 / 3), "sts": pytest.approx(correlation)}
    assert record_of({"sts": STS.predicts}, *entries).scores() == {"sts": pytest.approx(correlation)}
    unscored = record_of({}, *entries)  # as in pre-training, whose objectives are not tasks
    assert (unscored.scores(), unscored.mean_losses()) == ({}, record.mean_losses())


def test_a_trainer_scores_the_tasks_whose_targets_it_was_given(bench: Start):
    one = bench()
    assert one.trainer.targets == {name: TASKS[name].predicts for name in ("sst", "para", "sts")}
    one.trainer.targets = {"sst": SST.predicts}
    record = train_on(one.trainer, [[one.draw(0, 1, 2)], [one.draw(3, 4)]])
    assert record.scores().keys() == {"sst"}
    assert record.mean_losses().keys() == {"sst", "para", "sts"}


# --- a loss that is not finite ----------------------------------------------------------------------------------------


def test_a_nan_loss_stops_with_task_and_step_and_the_best_epoch_stays_usable(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    turns = itertools.count(1)

    def failing(output: Output, batch: Batch) -> Tensor:
        loss = losses.mean_squared_error(output, batch)
        return loss * math.nan if next(turns) == 5 else loss  # the second step of epoch 2

    with monkeypatch.context() as patch:
        patch.setitem(LOSSES, "mse", losses.Loss(failing, (Number,)))
        with pytest.raises(SystemExit) as stopped:
            utils.run_script(lambda: run_multitask(tmp_path, tiny_checkpoint, *TUNED, "--epochs", 3))
    assert stopped.value.code == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(
        "error: the loss of sts at step 2 must be finite, found nan. What was saved before is kept."
    )
    assert not list((tmp_path / "predictions").glob("*"))
    done = Finished(tmp_path, "", [], [])
    assert [line["epoch"] for line in done.log()] == [1]
    assert all(tensor.isfinite().all() for tensor in done.weights().values())
    again = run_multitask(tmp_path, Path(), "--predict_only", "--run", done.run)
    assert len(again.predictions()) == 6
    assert same(weights_of(again.models[0]), state_of(done)["model"])


# --- early stopping ---------------------------------------------------------------------------------------------------


def test_training_stops_after_patience_epochs_without_a_better_one(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    flags = ["--epochs", 9, "--patience", 2]
    scripted(monkeypatch, 0.1, 0.3, 0.2, 0.3, 0.9)  # equal is not better
    done = run_multitask(tmp_path, tiny_checkpoint, *flags)
    assert [line["best"] for line in done.log()] == [True, True, False, False]
    assert "stopped: no better epoch in the last 2\n" in done.out
    assert json.loads((done.run / "dev.json").read_text())["sst"] == 0.3
    again = run_multitask(tmp_path, tiny_checkpoint, *flags, "--resume")
    assert len(again.log()) == 4, "and it stays stopped"


# --- averages of the weights ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("averager", ["ema", "swa"])
def test_averages_are_evaluated_and_kept_while_training_goes_on_with_the_raw_weights(
    averager: str, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    flags = [*TUNED, "--epochs", 2, "--combiner", "pcgrad", "--keep_state"]
    plain = run_multitask(tmp_path / "plain", tiny_checkpoint, *flags)
    rising_scores(monkeypatch)
    after_step: list[dict[str, Tensor]] = []
    evaluated: list[dict[str, Tensor]] = []
    update, predict = Trainer.update, multitask_classifier.predict
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", lambda t, *a: (update(t, *a), after_step.append(weights_of(t.model)))[0])
        patch.setattr(
            multitask_classifier, "predict", lambda m, *a: (evaluated.append(weights_of(m)), predict(m, *a))[1]
        )
        more = ["--ema_decay", 0.5] if averager == "ema" else ["--average_start", 0]
        done = run_multitask(tmp_path / "averaged", tiny_checkpoint, *flags, "--averager", averager, *more)
    assert same(state_of(done)["model"], state_of(plain)["model"])
    if averager == "ema":
        shares = [0.5 ** (len(after_step) - 1 - k) for k in range(len(after_step))]
    else:
        shares = [float(k % 3 == 2) for k in range(len(after_step))]  # the ends of the two epochs
    average = {
        name: sum(share * weights[name] for share, weights in zip(shares, after_step, strict=True)) / sum(shares)
        for name in after_step[0]
    }
    assert_close(evaluated[3], average)  # the second evaluation's first task
    assert not same(evaluated[3], after_step[-1])
    assert same(evaluated[3], weights_of(done.models[-1]))


# --- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_trains_with_pcgrad_and_smart(
    precision: str, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # starting at torch's default scale of 65536, the scaler would skip the first steps
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=64.0))
    flags = [*TUNED, "--epochs", 2, "--combiner", "pcgrad", "--regularizer", "smart", "--clip", 1, "--keep_state"]
    full = run_multitask(tmp_path / "full", tiny_checkpoint, *flags)
    half = run_multitask(tmp_path / "half", tiny_checkpoint, *flags, "--precision", precision)
    for line, wanted in zip(half.log(), full.log(), strict=True):
        assert line["losses"] == {task: pytest.approx(loss, rel=0.05) for task, loss in wanted["losses"].items()}
        assert all(0 <= penalty < 1 for penalty in line["penalties"].values())
        assert line["gradients"].keys() == wanted["gradients"].keys()
        for name in ("norm sst", "norm para", "norm sts"):  # without the scaler's factor; fp16 has other dropout masks
            assert line["gradients"][name] == pytest.approx(wanted["gradients"][name], rel=0.5)
    assert not same(half.weights(), full.weights())
    assert {t.dtype for t in half.weights().values()} == {torch.float32}
    assert all(tensor.isfinite().all() for tensor in half.weights().values())
    assert bool(state_of(half)["scaler"]) == (precision == "fp16")


@pytest.mark.parametrize("clip", [0, 1])
@pytest.mark.parametrize("combiner", COMBINERS)
def test_an_overflow_skips_the_whole_step_cleanly(combiner: str, clip: int, bench: Start):
    flags = ["--precision", "fp16", "--combiner", combiner, "--clip", clip, "--regularizer", "bregman"]
    one = bench(*flags, "--averager", "ema", "--schedule", "linear")
    trainer, objective = one.trainer, one.trainer.objectives["para"]
    before, scale = weights_of(one.model), trainer.precision.scaler.get_scale()
    trainer.objectives["para"] = lambda output, batch: objective(output, batch) * 1e36  # finite, but not when scaled
    teacher = copy.deepcopy(trainer.regularizer.state_dict())
    after = one.after([one.draw(0, 1, 2)])
    assert same(before, after)
    assert not trainer.optimizer.state
    assert all(parameter.grad is None for parameter in one.model.parameters())
    assert trainer.averager.count == 0
    assert trainer.schedule.last_epoch == 0
    assert same(trainer.regularizer.state_dict()["teacher"], teacher["teacher"])
    assert trainer.precision.scaler.get_scale() == scale / 2
    trainer.objectives["para"] = objective
    assert not same(one.after([one.draw(0, 1, 2)]), before)
    assert (trainer.averager.count, trainer.schedule.last_epoch) == (1, 1)
    assert all(tensor.isfinite().all() for tensor in weights_of(one.model).values())


# --- every entry of every seam acts -----------------------------------------------------------------------------------

NEEDED = {
    "--averager swa": ["--average_start", "0"],
    "--weighting fixed": ["--task_weights", "sts=3"],
    "--optimizer sgd": ["--lr", "0.1"],
    # two rows of sts train, with low similarities
    "--sts_loss mse+mnrl": ["--mnrl_threshold", "0"],
    "--sts_loss mnrl_head": ["--mnrl_threshold", "0"],
    "--para_head both": ["--para_pairing", "both"],
    "--sts_head both": ["--sts_pairing", "both"],
    "--adapter own_layers": ["--own_layers", "1"],
}
SEAMS = {
    "--sampler": (SAMPLERS, "round_robin"),
    "--combiner": (COMBINERS, "sum"),
    "--regularizer": (REGULARIZERS, "none"),
    "--averager": (AVERAGERS, "none"),
    "--weighting": (WEIGHTINGS, "equal"),
    "--adapter": (ADAPTERS, "none"),
    "--optimizer": (OPTIMIZERS, "adamw"),
    "--pooling": (POOLERS, "pooler"),
}


def head_fits(name: str, task: Task) -> bool:
    try:
        check_head(name, task, 1 + task.is_pair + HEADS[name].needs_joined)
        return True
    except InputError:
        return False


def loss_fits(name: str, task: Task) -> bool:
    loss = LOSSES[name]
    return isinstance(task.predicts, loss.fits) and (task.is_pair or not loss.needs_pair)


TRIO = [TASKS[name] for name in ("sst", "para", "sts")]
SUMS = ("smart+bregman", "smart+rdrop", "bregman+rdrop", "smart:0.5+bregman+rdrop:2")
ENTRIES = [(flag, key) for flag, (registry, off) in SEAMS.items() for key in registry if key != off]
ENTRIES += [("--regularizer", spec) for spec in SUMS]
ENTRIES += [(f"--{task.name}_pooling", key) for task in TRIO for key in ("cls", "mean")]
ENTRIES += [(f"--{task.name}_head", key) for task in TRIO for key in HEADS if key != "linear" and head_fits(key, task)]
ENTRIES += [
    (f"--{task.name}_loss", key if LOSSES[key].trains_head else f"{task.predicts.default_loss}+{key}")
    for task in TRIO
    for key in LOSSES
    if key != task.predicts.default_loss and loss_fits(key, task)
]


def test_every_head_and_loss_fits_a_task_and_so_is_among_the_entries():
    keys = {part for flag, key in ENTRIES if flag.endswith(("_head", "_loss")) for part in key.split("+")}
    assert keys >= HEADS.keys() - {"linear"} | LOSSES.keys() - {"ce"}


@pytest.fixture(scope="module")
def end_weights(
    tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Weights before and after training with the given flags: two epochs of two draws, tasks of different size."""
    folder = tmp_path_factory.mktemp("seams")
    write_task_files(folder / "data")
    (folder / "teacher").mkdir()
    for task in TRIO:
        rows = read_examples(task, [folder / "data" / task.filename("train")], labeled=True)
        logits = np.random.default_rng(0).normal(size=(len(rows), task.predicts.num_logits)).astype(np.float32)
        write_logits(folder / "teacher" / f"{task.name}-train.npz", Predictions(rows.ids, logits, logits[:, 0], None))
    numbers = itertools.count()

    def train(*flags: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        given = {"--model": tiny_checkpoint, "--data": folder / "data", "--runs": folder, "--name": next(numbers)}
        given |= {"--predictions": folder / "p", "--option": "finetune", "--lr": 1e-3, "--epochs": 2, "--batch_size": 2}
        given |= {"--sts_fraction": 0.25, "--hidden_dropout_prob": 0.1}
        given |= {"--teacher": folder / "teacher"} if "distill" in flags else {}
        args = get_args([*(str(part) for pair in given.items() for part in pair), "--dry_run", *flags])
        models: list[tuple[MultitaskBERT, dict[str, Tensor]]] = []
        with pytest.MonkeyPatch.context() as patch:
            rising_scores(patch)
            build = multitask_build.build_trainer
            patch.setattr(
                multitask_build,
                "build_trainer",
                lambda a, model, *rest: (models.append((model, weights_of(model))), build(a, model, *rest))[1],
            )
            train_multitask(args)
        ((model, before),) = models
        return before, weights_of(model)

    return train


@pytest.fixture(scope="module")
def default_weights(end_weights: Callable) -> dict[str, Tensor]:
    return end_weights()[1]


@pytest.mark.parametrize(("flag", "key"), ENTRIES, ids=[f"{flag} {key}" for flag, key in ENTRIES])
def test_every_entry_of_every_seam_changes_what_is_learned(
    flag: str, key: str, end_weights: Callable, default_weights: dict[str, Tensor]
):
    before, after = end_weights(flag, key, *NEEDED.get(f"{flag} {key}", []))
    encoder = {name for name in after if name.startswith("bert.")}
    assert any(not torch.equal(after[name], default_weights[name]) for name in encoder)
    own = {name for name in after if name not in default_weights}  # weights that come with the entry learn
    own -= {name for name in own if name.endswith(".B")}  # LoRA's, which the best epoch has merged into the encoder
    assert all(not torch.equal(before[name], after[name]) for name in own)
    copied = {name for name in encoder if f"adapter.tasks.sst.{name.removeprefix('bert.')}" in after}  # own_layers'
    for name in encoder - {name for name in encoder if "pooler" in name}:
        assert torch.equal(before[name], after[name]) == (name in copied), name


def test_the_same_flags_end_on_the_same_weights(end_weights: Callable, default_weights: dict[str, Tensor]):
    assert same(end_weights()[1], default_weights)
