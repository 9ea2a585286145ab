"""Notes about training that goes wrong: each appears in its case, once, and not in healthy runs."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import write_task_files

import multitask_classifier
import training
from tasks import Batch, Predictions
from watch import WINDOW, Watch, note_about_rate

pytestmark = pytest.mark.usefixtures("one_thread")

CHANCE = {"sst": math.log(5), "para": math.log(2)}
SPANS = {"sts": 5.0}
Notes = list[str]


def new_watch(**values: object) -> Watch:
    return Watch(**{"lr": 1e-5, "epochs": 3, "chance": CHANCE, "spans": SPANS} | values)


def noisy(level: float, count: int, spread: float = 0.3, seed: int = 0) -> list[float]:
    """Losses around a level; with a spread of 1, as of batches of one row."""
    draw = random.Random(seed)
    return [level * math.exp(draw.gauss(0, spread) - spread**2 / 2) for _ in range(count)]


# --- losses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spread", [0.05, 0.3, 1.0])
def test_a_healthy_loss_gives_no_note_with_large_and_small_batches(spread: float) -> None:
    watch = new_watch()
    for start in range(40):
        fall = 1 / (1 + start / 10)
        levels = {"sst": 1.6 * fall, "para": 0.69 * fall, "sts": 9 * fall}
        assert watch.step({task: noisy(level, 20, spread, start) for task, level in levels.items()}) == []


def test_large_losses_in_the_first_steps_give_no_note() -> None:
    """A regression starts far from its labels, and a few batches of long sentences may be worse than the others."""
    watch = new_watch()
    assert watch.step({"sst": [9.0, 7.0, 5.0, *noisy(1.6, 17)], "sts": [2.0, 4.9, 7.8, *noisy(9.3, 17)]}) == []
    assert watch.step({"sts": noisy(9.0, 20)}) == []


def test_a_loss_that_stays_above_chance_is_noted_once_for_each_task() -> None:
    watch = new_watch(lr=1.0)
    notes = watch.step({"sst": noisy(2.5, 20), "para": noisy(0.69, 20)})
    assert len(notes) == 1
    assert notes[0].startswith("the loss of sst is at 2.")
    assert notes[0].endswith("compared with 1.61 for guessing: training diverges. Lower --lr (now 1), or set --clip 1.")
    assert watch.step({"sst": noisy(9.0, 20)}) == []
    assert len(watch.step({"para": noisy(4.0, 20)})) == 1


def test_a_loss_without_a_chance_level_is_compared_with_its_start() -> None:
    watch = new_watch()
    assert watch.step({"sts": noisy(2.0, 20)}) == []
    assert watch.step({"sts": noisy(5.0, 20)}) == []
    notes = watch.step({"sts": noisy(20.0, 20)})
    assert len(notes) == 1
    assert " at the start: training diverges." in notes[0]


def test_one_bad_batch_is_no_explosion() -> None:
    watch = new_watch()
    for spike in (50.0, math.inf, math.nan):
        assert watch.step({"sst": [*noisy(1.5, 19), spike], "sts": [*noisy(1.5, 19), spike]}) == []


def test_few_losses_of_a_task_say_nothing() -> None:
    watch = new_watch()
    assert watch.step({"sst": [9.0] * (WINDOW - 1)}) == []
    assert len(watch.step({"sst": [9.0]})) == 1


def test_the_note_about_a_loss_names_the_regularizer_if_there_is_one() -> None:
    notes = new_watch(regularizer="rdrop:9").step({"sst": [9.0] * WINDOW})
    assert notes[0].endswith("Lower --lr (now 1e-05) or the weight of --regularizer rdrop:9, or set --clip 1.")


# --- epochs -----------------------------------------------------------------------------------------------------------


def after(watch: Watch, epochs: int, penalty: float = 0.0, **values: np.ndarray) -> list[Notes]:
    """The notes of each epoch, with losses of 1 before the penalty."""
    losses, penalties = ({task: x for task in values} for x in (1.0 + penalty, penalty))
    return [watch.epoch(epoch, losses, penalties, values) for epoch in range(1, epochs + 1)]


def test_constant_predictions_are_noted_if_they_last() -> None:
    watch = new_watch(lr=1e-2)
    varied = np.arange(150) % 5
    notes = after(watch, 3, sst=varied, para=np.zeros(150), sts=np.full(150, 2.5) + 1e-4 * varied)
    assert [len(of_epoch) for of_epoch in notes] == [0, 2, 0]
    assert notes[1][0].startswith("the model predicts the same value, 0, for all 150 rows of para: ")
    assert notes[1][0].endswith("change --lr (now 0.01).")
    assert "2.5, for all 150 rows of sts" in notes[1][1]


def test_constant_predictions_of_the_only_epoch_are_noted() -> None:
    assert len(after(new_watch(epochs=1), 1, para=np.zeros(150))[0]) == 1


def test_predictions_that_are_constant_for_one_epoch_only_are_not_noted() -> None:
    watch, varied = new_watch(epochs=5), np.arange(150) % 2
    for epoch, values in enumerate([np.zeros(150), varied, np.zeros(150), varied], start=1):
        assert watch.epoch(epoch, {"para": 0.6}, {}, {"para": values}) == []


@pytest.mark.parametrize(
    "values",
    [np.arange(150) % 5, np.array([1.0] + [0.0] * 149), 2 + 0.03 * np.sin(np.arange(150)), np.zeros(8)],
    ids=["varied", "one_differs", "regression_at_its_start", "few_rows"],
)
def test_healthy_predictions_give_no_note(values: np.ndarray) -> None:
    assert after(new_watch(), 3, sts=values) == [[], [], []]


@pytest.mark.parametrize(
    ("penalty", "text"),
    [
        (
            1e-7,
            "the penalty of --regularizer smart is 1e-07 of the loss of sst, so it has no effect. Raise its",
        ),
        (0.0, "is 0 of the loss of sst, so it has no effect"),
        (3.0, "the penalty of --regularizer smart is 3 times the loss of sst, so it decides the training. Lower its"),
    ],
)
def test_a_penalty_that_is_negligible_or_outweighs_the_loss_is_noted_once(penalty: float, text: str) -> None:
    notes = after(new_watch(regularizer="smart"), 3, penalty, sst=np.arange(150) % 5)
    assert [len(of_epoch) for of_epoch in notes] == [0, 1, 0]
    assert text in notes[1][0]


@pytest.mark.parametrize("penalty", [1e-4, 0.005, 0.1, 0.4])
def test_a_penalty_of_a_usual_size_gives_no_note(penalty: float) -> None:
    assert after(new_watch(regularizer="smart"), 3, penalty, sst=np.arange(150) % 5) == [[], [], []]


def test_without_a_regularizer_no_penalty_is_noted() -> None:
    assert after(new_watch(), 3, 0.0, sst=np.arange(150) % 5) == [[], [], []]


def test_a_penalty_that_vanished_with_the_predictions_is_not_noted_as_well() -> None:
    notes = after(new_watch(regularizer="smart", epochs=1), 1, 0.0, sst=np.zeros(150))
    assert len(notes[0]) == 1
    assert "the same value" in notes[0][0]


# --- a resumed run ----------------------------------------------------------------------------------------------------


def test_a_resumed_run_repeats_no_note_and_continues_the_comparison(tmp_path: Path) -> None:
    """The state is of plain values: torch.load reads it without running code."""
    first, second = new_watch(), new_watch()
    assert len(first.step({"sst": [9.0] * WINDOW, "sts": [1.0] * WINDOW})) == 1
    assert first.epoch(1, {"para": 0.6}, {}, {"para": np.zeros(150)}) == []
    torch.save(first.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert json.loads(json.dumps(state)) == state
    second.load_state_dict(state)
    assert second.step({"sst": [9.0] * WINDOW}) == []
    assert len(second.step({"sts": [4.0] * WINDOW})) == 1
    assert len(second.epoch(2, {"para": 0.6}, {}, {"para": np.zeros(150)})) == 1


# --- the learning rate of a frozen encoder ----------------------------------------------------------------------------


def test_a_frozen_encoder_with_the_rate_of_fine_tuning_is_noted() -> None:
    note = note_about_rate("pretrain", 1e-5)
    assert note == "--lr 1e-05: with a frozen encoder (--option pretrain), the heads hardly learn. Use --lr 1e-3."
    assert note_about_rate("pretrain", 1e-3, head_lr=1e-5).endswith("Use --head_lr 1e-3.")


@pytest.mark.parametrize(
    "values", [("pretrain", 1e-3), ("pretrain", 1e-4), ("finetune", 1e-5), ("pretrain", 1e-5, 1e-3)]
)
def test_a_suitable_rate_gives_no_note(values: tuple) -> None:
    assert note_about_rate(*values) is None


# --- real runs --------------------------------------------------------------------------------------------------------


@pytest.fixture
def notes_of(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Notes]:
    """Train the tiny model for two epochs, and return the notes that a watch makes of it."""
    write_task_files(tmp_path / "data", rows=80)
    losses: dict[str, list[float]] = {}
    predictions: dict[str, np.ndarray] = {}
    add, predict = training.EpochRecord.add, multitask_classifier.predict

    def recorded(self: training.EpochRecord, batch: Batch, step: int, loss: torch.Tensor, *rest: torch.Tensor) -> None:
        losses.setdefault(batch.task, []).append((loss + rest[0]).item())
        add(self, batch, step, loss, *rest)

    def kept(network: object, rows: object, *rest: object) -> Predictions:
        found = predict(network, rows, *rest)
        predictions[rows.task.name] = found.values
        return found

    def run(*flags: str, regularizer: str = "none") -> Notes:
        monkeypatch.setattr(training.EpochRecord, "add", recorded)
        monkeypatch.setattr(multitask_classifier, "predict", kept)
        given = ["--model", tiny_checkpoint, "--data", tmp_path / "data", "--runs", tmp_path / "runs", "--name", "r"]
        given += ["--predictions", tmp_path, "--option", "finetune", "--epochs", "2", "--batch_size", "4"]
        given += ["--pooling", "mean", "--hidden_dropout_prob", "0.1", "--tasks", "sst", "sts", *flags]
        args = multitask_classifier.get_args([*map(str, given), "--regularizer", regularizer])
        watch, notes = new_watch(lr=args.lr, epochs=2, regularizer=regularizer), []

        def on_epoch(epoch: int, scores: dict[str, float]) -> None:
            line = json.loads((tmp_path / "runs" / "r" / "log.jsonl").read_text().splitlines()[-1])
            notes.extend(watch.step(losses))
            notes.extend(watch.epoch(epoch, line["losses"], line["penalties"], predictions))
            losses.clear()

        multitask_classifier.train_multitask(args, on_epoch)
        return notes

    return run


def test_a_real_run_at_a_usual_rate_gives_no_note(notes_of: Callable[..., Notes]) -> None:
    assert notes_of("--lr", "3e-3", regularizer="rdrop") == []


def test_a_real_run_at_a_rate_of_1_is_noted(notes_of: Callable[..., Notes]) -> None:
    notes = notes_of("--lr", "1")
    assert any("training diverges. Lower --lr (now 1)" in note for note in notes), notes


def test_a_real_run_with_a_penalty_without_effect_is_noted(notes_of: Callable[..., Notes]) -> None:
    notes = notes_of("--lr", "3e-3", regularizer="rdrop:1e-9")
    assert len(notes) == 2, notes
    assert all("of --regularizer rdrop:1e-9 is" in note and "so it has no effect" in note for note in notes)


def test_a_real_run_with_a_penalty_that_is_too_strong_is_noted(notes_of: Callable[..., Notes]) -> None:
    notes = notes_of("--lr", "1e-5", regularizer="rdrop:10000")
    assert any("times the loss of" in note for note in notes), notes
