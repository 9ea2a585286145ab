"""A fourth task is one row in tasks.py: two new tasks go through everything, and nothing else is changed for them.

`cola` has one sentence and predicts a probability; `nli` has a pair of sentences and predicts one of three classes.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, the_error, write_task_files

import ensemble
import evaluation
import multitask_classifier
import multitask_flags
import pretrain
import sweep
from datasets import PAIRINGS
from heads import HEADS, POOLERS
from losses import LOSSES, WEIGHTINGS, losses_in
from pcgrad import COMBINERS
from sampling import SAMPLERS
from smart import REGULARIZERS
from tasks import ONE_SENTENCE, SST, TASKS, TWO_SENTENCES, Category, Probability, Task
from utils import InputError

COLA = Task(
    name="cola",
    files="cola-{}.csv",
    text_columns=ONE_SENTENCE,
    label_column="acceptable",
    predicts=Probability(),
    csv_header="id \t Predicted_Acceptable \n",
)
NLI = Task(
    name="nli",
    files="nli-{}.csv",
    text_columns=TWO_SENTENCES,
    label_column="relation",
    predicts=Category(3),
    csv_header="id \t Predicted_Relation \n",
)
NEW = {task.name: task for task in (COLA, NLI)}
ALL = ["sst", "para", "sts", "cola", "nli"]

pytestmark = pytest.mark.usefixtures("one_thread", "new_tasks")


@pytest.fixture
def new_tasks() -> Iterator[None]:
    """Register the two tasks; the parsers are built again, as in a process that starts with them."""
    TASKS.update(NEW)
    clear_parsers()
    yield
    for name in NEW:
        del TASKS[name]
    clear_parsers()


def clear_parsers() -> None:
    for parser in (multitask_flags.parser, pretrain.parser, ensemble.parser, sweep.parser):
        parser.cache_clear()


def write_new_files(folder: Path, rows: int = 8) -> None:
    words = ["good", "bad", "dull", "bright", "slow"]
    for split in ("train", "dev", "test-student"):
        for task, labels in ((COLA, 2), (NLI, 3)):
            header = ["", "id", *task.text_columns] + [task.label_column] * (split != "test-student")
            lines = ["\t".join(header)]
            for i in range(rows):
                texts = [f"Film {i} is {words[i % 5]} .", f"A {words[i * 3 % 5]} film ."][: len(task.text_columns)]
                label = [str(i % labels)] * (split != "test-student")
                lines.append("\t".join([str(i), f"{task.name}{split[:5]}{i:017d}", *texts, *label]))
            (folder / task.filename(split.removesuffix("-student"))).write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("new") / "data"
    write_task_files(folder)
    write_new_files(folder)
    return folder


@pytest.fixture
def train(tiny_checkpoint: Path, data: Path, tmp_path: Path, run_main) -> Iterator:
    """train(flags ...): a run of one epoch on all five tasks."""

    def run(*flags: object, name: str = "run"):
        places = ["--data", data, "--runs", tmp_path / "runs", "--predictions", tmp_path / "predictions"]
        usual = ["--model", tiny_checkpoint, "--option", "finetune", "--epochs", 1, "--batch_size", 4, "--name", name]
        finished = run_main(multitask_classifier, *usual, *places, "--tasks", *ALL, *flags)
        assert finished.status == 0, finished.err
        return finished

    return run


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_new_tasks_train_with_every_sampler(sampler: str, train, tmp_path: Path) -> None:
    printed = train("--sampler", sampler).out
    assert all(f"{name}: wrote" in printed for name in ALL)
    log = json.loads((tmp_path / "runs" / "run" / "log.jsonl").read_text().splitlines()[-1])
    assert set(log["scores"]) >= set(ALL)


@pytest.mark.parametrize("combiner", COMBINERS)
def test_new_tasks_train_with_every_combiner(combiner: str, train, tmp_path: Path) -> None:
    train("--combiner", combiner)
    log = json.loads((tmp_path / "runs" / "run" / "log.jsonl").read_text())
    assert ("cosine cola nli" in log["gradients"]) == (combiner != "sum")


@pytest.mark.parametrize("regularizer", [*REGULARIZERS, "smart+bregman+rdrop"])
def test_new_tasks_train_with_every_regularizer(regularizer: str, train, tmp_path: Path) -> None:
    train("--regularizer", regularizer)
    log = json.loads((tmp_path / "runs" / "run" / "log.jsonl").read_text())
    for name in ALL:
        assert (log["penalties"][name] > 0) == (regularizer != "none"), name


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_new_tasks_train_with_every_weighting(weighting: str, train) -> None:
    train("--weighting", weighting, *(["--task_weights", "cola=2", "nli=0.5"] if weighting == "fixed" else []))


def fits(loss: str, task: Task) -> bool:
    try:
        losses_in(loss, task)
    except InputError:
        return False
    return True


FITTING_LOSSES = [(task.name, loss) for task in NEW.values() for loss in LOSSES if fits(loss, task)]


def test_the_losses_that_claim_to_fit_are_those_one_would_expect() -> None:
    assert {loss for name, loss in FITTING_LOSSES if name == "cola"} == {"bce", "distill", "simcse"}
    assert {loss for name, loss in FITTING_LOSSES if name == "nli"} == {"ce", "ce_smooth", "distill", "simcse"}


@pytest.mark.parametrize(("name", "loss"), FITTING_LOSSES)
def test_new_tasks_train_with_every_loss_that_fits(name: str, loss: str, train, data: Path, tmp_path: Path) -> None:
    flags = [f"--{name}_loss", loss if LOSSES[loss].trains_head else f"{TASKS[name].predicts.default_loss}+{loss}"]
    if loss == "distill":
        teacher = tmp_path / "teacher"
        teacher.mkdir()
        ids = [line.split("\t")[1] for line in (data / NEW[name].filename("train")).read_text().splitlines()[1:]]
        np.savez(teacher / f"{name}-train.npz", ids=ids, logits=np.zeros((len(ids), NEW[name].predicts.num_logits)))
        flags += ["--teacher", teacher]
    train(*flags)


@pytest.mark.parametrize("name", NEW)
def test_a_loss_that_does_not_fit_is_refused_in_one_line(
    name: str, tiny_checkpoint: Path, data: Path, run_main
) -> None:
    for loss in (loss for loss in LOSSES if not fits(loss, NEW[name])):
        flags = ["--model", tiny_checkpoint, "--data", data, "--tasks", *ALL, f"--{name}_loss", loss]
        assert f"{loss} is for a task that predicts a" in the_error(run_main(multitask_classifier, *flags))


def heads_that_fit(task: Task) -> list[str]:
    return [h for h, head in HEADS.items() if isinstance(task.predicts, head.fits) and task.is_pair >= head.needs_pair]


@pytest.mark.parametrize(("name", "head"), [(t.name, head) for t in NEW.values() for head in heads_that_fit(t)])
def test_new_tasks_train_with_every_head_that_fits(name: str, head: str, train) -> None:
    assert f"head {head}" in train(f"--{name}_head", head).out


@pytest.mark.parametrize("pooling", POOLERS)
def test_new_tasks_train_with_every_pooling(pooling: str, train) -> None:
    train("--cola_pooling", pooling, "--nli_pooling", pooling)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_a_new_task_on_pairs_trains_with_every_pairing(pairing: str, train) -> None:
    assert f"pairing {pairing}" in train("--nli_pairing", pairing).out


def test_predictions_of_new_tasks_have_their_header_and_are_scored(train, run_main, data: Path, tmp_path: Path) -> None:
    printed = train().out
    for task in NEW.values():
        for split in ("dev", "test"):
            lines = (tmp_path / "predictions" / f"{task.name}-{split}-output.csv").read_text().splitlines(keepends=True)
            assert lines[0] == task.csv_header
            assert len(lines) == 9
    scored = run_main(evaluation, tmp_path / "predictions", "--data", data)
    assert scored.status == 0, scored.err
    for name in ALL:
        (line,) = [line for line in printed.splitlines() if line.startswith(f"{name}: wrote") and "dev score" in line]
        (row,) = [row.split() for row in scored.out.splitlines() if row.startswith(f"{name}-dev-output.csv ")]
        assert float(row[1]) == pytest.approx(float(line.rpartition(" ")[2]), abs=6e-4)


def test_new_tasks_can_be_predicted_again_and_combined(train, run_main, tmp_path: Path) -> None:
    train(name="a")
    train("--seed", 2, name="b")
    before = (tmp_path / "predictions" / "nli-test-output.csv").read_bytes()
    again = run_main(multitask_classifier, "--predict_only", "--run", tmp_path / "runs" / "b")
    assert again.status == 0, again.err
    assert (tmp_path / "predictions" / "nli-test-output.csv").read_bytes() == before
    for method in ensemble.METHODS:
        flags = ["--runs", tmp_path / "runs", "--predictions", tmp_path / method, "--method", method, "--name", method]
        combined = run_main(ensemble, tmp_path / "runs" / "a", tmp_path / "runs" / "b", *flags)
        assert combined.status == 0, combined.err
        assert all((tmp_path / method / f"{name}-test-output.csv").is_file() for name in ALL)


def test_the_overall_score_is_the_mean_over_all_tasks() -> None:
    scores = {"sst": 0.5, "para": 0.8, "sts": 0.6, "cola": 0.7, "nli": 0.4}
    assert evaluation.overall(scores) == pytest.approx((0.5 + 0.8 + 0.8 + 0.7 + 0.4) / 5)


def test_pre_training_reads_the_files_that_are_there(
    data: Path, tiny_checkpoint: Path, tmp_path: Path, task_files: Path
) -> None:
    """With files of the new tasks they are read too; without them, the course's four are, and nothing breaks."""
    assert pretrain.get_args(["--data", str(data)]).tasks == list(TASKS)
    assert pretrain.get_args(["--data", str(task_files)]).tasks == ["sst", "cfimdb", "para", "sts"]


def test_a_task_cannot_be_used_under_a_name_that_is_not_registered(tiny_checkpoint: Path, run_main) -> None:
    assert "found 'colla'. Did you mean cola?" in the_error(run_main(multitask_classifier, "--tasks", "colla"))


# --- runs that were made before the new tasks existed, by an older version of the suite -------------------------------


@pytest.fixture
def older_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs of commit 075668d on a BERT of 8 dimensions: `finished`, and `interrupted` after two of three epochs."""
    import shutil

    stored = ROOT / "tests" / "references" / "older_run"
    for name in ("checkpoint", "data", "predictions"):
        shutil.copytree(stored / name, tmp_path / name)
    shutil.copytree(stored / "saved_runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return stored


def values_in(path: Path) -> np.ndarray:
    return np.array([float(line.rsplit(" , ", 1)[1]) for line in path.read_text().splitlines()[1:]])


def assert_same_predictions(folder: Path, stored: Path) -> None:
    for path in sorted((stored / "predictions").glob("*.csv")):
        mine = folder / path.name
        assert mine.read_text().splitlines()[0] == path.read_text().splitlines()[0]
        np.testing.assert_allclose(values_in(mine), values_in(path), atol=1e-4)


@pytest.mark.parametrize("registered", [True, False], ids=["with new tasks", "with the old tasks only"])
def test_an_older_run_predicts_as_before(
    registered: bool, older_run: Path, run_main, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if not registered:
        for name in NEW:
            del TASKS[name]
        clear_parsers()
        request.addfinalizer(lambda: TASKS.update(NEW))
    finished = run_main(multitask_classifier, "--predict_only", "--run", "runs/finished", "--predictions", "again")
    assert finished.status == 0, finished.err
    assert_same_predictions(tmp_path / "again", older_run)


OLD_SMART = ["--smart_radius", 0.01, "--smart_step_size", 0.001]  # the defaults of then


def test_an_older_run_is_resumed_with_the_values_it_was_started_with(older_run: Path, run_main, tmp_path: Path) -> None:
    flags = [f"@{older_run / 'flags.txt'}", "--predictions", "predictions", "--name", "interrupted", "--resume"]
    refused = the_error(run_main(multitask_classifier, *flags))
    assert "was started with --smart_radius 0.01 (now 0.003), --smart_step_size 0.001 (now None)." in refused
    finished = run_main(multitask_classifier, *flags, *OLD_SMART)
    assert finished.status == 0, finished.err
    assert "epoch 3" in finished.out
    assert "epoch 2" not in finished.out
    for path in (older_run / "predictions").glob("*.csv"):  # other values: what SMART and dropout compute has changed
        assert values_in(tmp_path / "predictions" / path.name).shape == values_in(path).shape


def test_a_flag_that_an_older_run_did_not_use_may_have_another_default_since() -> None:
    stored = {"tasks": ["sst"], "train_tasks": ["sst"], "regularizer": "none", "smart_radius": 0.01}
    assert multitask_flags.upgraded(stored)["smart_radius"] == 0.003
    assert multitask_flags.upgraded(stored | {"regularizer": "smart"})["smart_radius"] == 0.01


def test_an_older_run_with_other_flags_is_not_resumed(older_run: Path, run_main) -> None:
    flags = [f"@{older_run / 'flags.txt'}", *OLD_SMART, "--name", "interrupted", "--resume", "--lr", 1e-3]
    assert "was started with --lr 0.01 (now 0.001)" in the_error(run_main(multitask_classifier, *flags))


def test_an_older_run_can_be_combined_and_is_an_encoder(older_run: Path, run_main, tmp_path: Path) -> None:
    runs = ["runs/finished", "runs/interrupted"]
    assert run_main(multitask_classifier, "--predict_only", "--run", runs[1], "--predictions", "other").status == 0
    for method in ("mean", "soup"):
        flags = ["--method", method, "--name", method, "--predictions", method]
        finished = run_main(ensemble, *runs, *flags)
        assert finished.status == 0, finished.err
    flags = ["--model", "runs/finished", "--option", "finetune", "--data", "data", "--dry_run"]
    assert run_main(multitask_classifier, *flags).status == 0


def test_the_run_of_a_task_that_is_not_registered_is_refused(train, run_main, tmp_path: Path) -> None:
    train()
    for name in NEW:
        del TASKS[name]
    clear_parsers()
    try:
        error = the_error(run_main(multitask_classifier, "--predict_only", "--run", tmp_path / "runs" / "run"))
    finally:
        TASKS.update(NEW)
    assert "was trained on cola, which is not in tasks.py" in error


def test_the_stored_tasks_are_untouched() -> None:
    assert SST.predicts == Category(5)
    assert list(TASKS) == ["sst", "cfimdb", "para", "sts", "cola", "nli"]
