"""Ensembles: means, votes and fitted weights equal a direct computation; soups are runs; bad runs are refused."""

import json
import shutil
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, Finished, run_script, the_error, write_task_files
from safetensors.numpy import load_file, save_file

import ensemble
import multitask_classifier
import utils
from bert import BertModel
from ensemble import halves
from evaluation import read_logits
from manifest import read_manifest
from multitask_flags import logits_remedy
from submission import read_scored
from tasks import TASKS, Number, Predictions

NAMES = ("sst", "para", "sts")
ROWS = {"dev": 41, "test": 24, "train": 16}

pytestmark = pytest.mark.usefixtures("one_thread")


# --- runs of random logits --------------------------------------------------------------------------------------------


def ids_of(task: str, split: str) -> list[str]:
    return [f"{task}{split}{i:04d}" for i in range(ROWS[split])]


def labels_of(task: str, split: str) -> np.ndarray:
    generator = np.random.default_rng(list(f"{task} {split}".encode()))
    top = {"sst": 5, "para": 2, "sts": 6}[task]
    found = generator.integers(0, top, ROWS[split])
    return found * 0.9 if task == "sts" else found


def logits_of(task: str, split: str, seed: int, skill: float = 1.0) -> np.ndarray:
    """Random logits, which are right more often the larger `skill` is."""
    labels, C = labels_of(task, split), TASKS[task].predicts.num_logits
    noise = np.random.default_rng(seed).normal(size=(ROWS[split], C))
    truth = np.eye(5)[labels.astype(int)] if task == "sst" else ((labels - labels.mean()) / labels.std())[:, None]
    return (skill * truth + noise).astype(np.float32)


def write_run(folder: Path, logits: dict[tuple[str, str], np.ndarray]) -> Path:
    """Write the part of a run's directory that an ensemble reads. `logits` has a key (task, split) for each file."""
    folder.mkdir(parents=True)
    tasks = list(dict.fromkeys(task for task, _ in logits))
    files = {f"{task}_{split}": f"data/{task}-{split}.csv" for task in tasks for split in ("dev", "test")}
    facts = {"args": {"tasks": tasks} | files, "data_sha256": {path: f"sha of {path}" for path in files.values()}}
    (folder / "args.json").write_text(json.dumps(facts))
    for (task, split), values in logits.items():
        labels = {} if split == "test" else {"labels": labels_of(task, split)}
        np.savez(folder / f"{task}-{split}.npz", ids=np.array(ids_of(task, split)), logits=values, **labels)
    return folder


def random_run(
    folder: Path, seed: int, tasks: tuple[str, ...] = NAMES, splits: tuple[str, ...] = ("dev", "test"), **options: float
) -> Path:
    given = {(t, s): logits_of(t, s, 100 * seed + i, **options) for i, t in enumerate(tasks) for s in splits}
    return write_run(folder, given)


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [random_run(tmp_path / f"run{seed}", seed) for seed in (1, 2, 3)]


Combine = Callable[..., Finished]


@pytest.fixture
def combine(
    tmp_path: Path,
    run_main: Callable[..., Finished],
) -> Combine:
    """Run ensemble.py in this process."""

    def run(*given: object) -> Finished:
        usual = ["--runs", tmp_path / "runs", "--name", "ens", "--predictions", tmp_path / "predictions"]
        return run_main(ensemble, *usual, *given)

    return run


def succeeded(finished: Finished) -> Finished:
    assert finished.status == 0, finished.err
    return finished


def predictions_in(folder: Path, task: str, split: str = "dev") -> Predictions:
    remedy = logits_remedy(folder, train=split == "train")
    return read_logits(folder / f"{task}-{split}.npz", TASKS[task], remedy, labeled=split != "test")


def kept(folder: Path, task: str, split: str) -> np.ndarray:
    with np.load(folder / f"{task}-{split}.npz") as file:
        return file["logits"].astype(np.float64)


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logits))


def expected_mean(task: str, given: list[np.ndarray], average: str) -> np.ndarray:
    """The mean of the probabilities, or of the numbers, in double precision."""
    to_p = {"sst": softmax, "para": sigmoid, "sts": lambda values: values}[task]
    if average == "logits":
        return to_p(sum(given) / len(given))
    return sum(map(to_p, given)) / len(given)


# --- what is averaged -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("average", ["probabilities", "logits"])
def test_the_mean_equals_a_direct_computation(average: str, runs: list[Path], combine: Combine, tmp_path: Path) -> None:
    succeeded(combine(*runs, "--method", "mean", "--average", average))
    folder = tmp_path / "runs" / "ens"
    for task in NAMES:
        for split in ("dev", "test"):
            mean = expected_mean(task, [kept(run, task, split) for run in runs], average)
            found = kept(folder, task, split)
            if task == "sst":
                np.testing.assert_allclose(found, np.log(mean), rtol=1e-5, atol=1e-6)  # log-probabilities
            elif task == "para":
                np.testing.assert_allclose(found, np.log(mean / (1 - mean)), rtol=1e-4, atol=1e-5)
            else:
                np.testing.assert_allclose(found, mean, rtol=1e-6)
            values = {"sst": mean.argmax(axis=1), "para": (mean > 0.5).astype(float).ravel(), "sts": mean.ravel()}
            lines = (tmp_path / "predictions" / f"{task}-{split}-output.csv").read_text().splitlines()[1:]
            written = [line.removesuffix(" ").split(" , ") for line in lines]
            assert [i for i, _ in written] == ids_of(task, split)
            np.testing.assert_allclose([float(v) for _, v in written], values[task], rtol=1e-6)


@pytest.mark.parametrize("task", [name for name, task in TASKS.items() if not isinstance(task.predicts, Number)])
def test_as_logits_inverts_log_probabilities_up_to_a_constant(task: str) -> None:
    predicts = TASKS[task].predicts
    logits = 3 * torch.randn(3, 7, predicts.num_logits, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    log_p = predicts.log_probabilities(logits)
    torch.testing.assert_close(log_p.exp().sum(dim=-1), torch.ones(3, 7, dtype=torch.float64))
    found = predicts.as_logits(log_p)
    if found.size(-1) > 1:
        found, logits = (x - x[..., :1] for x in (found, logits))
    torch.testing.assert_close(found, logits)


def test_probabilities_and_logits_are_not_the_same_mean(tmp_path: Path, combine: Combine) -> None:
    """One run is certain and two mildly disagree: the mean logit follows the first, the mean probability the two."""
    for name, logit in (("a", 9.0), ("b", -1.5), ("c", -1.5)):
        given = {("para", split): np.full((ROWS[split], 1), logit, dtype=np.float32) for split in ("dev", "test")}
        write_run(tmp_path / name, given)
    members = [tmp_path / name for name in "abc"]
    for average, value in (("probabilities", 0.0), ("logits", 1.0)):
        succeeded(combine(*members, "--average", average, "--name", average))
        values = predictions_in(tmp_path / "runs" / average, "para").values
        assert (values == value).all(), average


def test_runs_that_are_certain_give_finite_logits(tmp_path: Path, combine: Combine) -> None:
    """sigmoid(80) is 1 in double precision, and a class with logit -800 has probability 0."""
    certain = np.array([800.0, 0, 0, 0, 0], dtype=np.float32)
    for name, scale in (("a", 1), ("b", 2)):
        given = {("sst", s): np.tile(scale * certain, (ROWS[s], 1)) for s in ("dev", "test")}
        write_run(tmp_path / name, given | {("para", s): np.full((ROWS[s], 1), 80.0 * scale) for s in ("dev", "test")})
    for method in ("mean", "vote"):
        succeeded(combine(tmp_path / "a", tmp_path / "b", "--method", method, "--name", method))
        folder = tmp_path / "runs" / method
        assert predictions_in(folder, "sst").values.tolist() == [0] * ROWS["dev"]
        assert predictions_in(folder, "para").values.tolist() == [1] * ROWS["dev"]
    # 1 - p = (e^-80 + e^-160) / 2
    np.testing.assert_allclose(kept(tmp_path / "runs" / "mean", "para", "dev"), 80 + np.log(2), rtol=1e-6)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_vote_is_the_majority_and_ties_go_to_the_mean_probability(
    count: int, tmp_path: Path, combine: Combine
) -> None:
    members = [random_run(tmp_path / f"run{seed}", seed, skill=0.3) for seed in range(count)]
    succeeded(combine(*members, "--method", "vote"))
    ties = 0
    for task in NAMES:
        given = [kept(run, task, "dev") for run in members]
        values = predictions_in(tmp_path / "runs" / "ens", task).values
        mean = expected_mean(task, given, "probabilities")
        for row, found in enumerate(values):
            if task == "sts":
                assert found == pytest.approx(statistics.median(g[row, 0] for g in given), rel=1e-6)
                continue
            votes = Counter(int(g[row].argmax()) if task == "sst" else int(g[row, 0] > 0) for g in given)
            most = [c for c, n in votes.items() if n == max(votes.values())]
            ties += len(most) > 1
            chance = mean[row] if task == "sst" else [1 - mean[row, 0], mean[row, 0]]
            assert found == max(most, key=lambda c: chance[c])
    assert ties > (0 if count == 3 else 10), "the votes include ties"


def test_a_vote_gives_a_distribution_for_a_student(runs: list[Path], combine: Combine, tmp_path: Path) -> None:
    succeeded(combine(*runs, "--method", "vote"))
    np.testing.assert_allclose(np.exp(kept(tmp_path / "runs" / "ens", "sst", "dev")).sum(axis=1), 1, rtol=1e-5)


# --- what is chosen and fitted ----------------------------------------------------------------------------------------


@pytest.fixture
def specialists(tmp_path: Path) -> list[Path]:
    """Run i is good at task i."""
    found = []
    for i in range(3):
        of_task = {(t, s): logits_of(t, s, 10 * i + j, skill=3.0 if i == j else 0.1)
                   for j, t in enumerate(NAMES) for s in ("dev", "test")}  # fmt: skip
        found.append(write_run(tmp_path / f"run{i}", of_task))
    return found


def test_best_takes_each_task_from_the_run_that_is_best_on_dev_and_says_so(
    specialists: list[Path], combine: Combine, tmp_path: Path
) -> None:
    out = succeeded(combine(*specialists, "--method", "best")).out
    for i, task in enumerate(NAMES):
        for split in ("dev", "test"):
            assert np.array_equal(kept(tmp_path / "runs" / "ens", task, split), kept(specialists[i], task, split))
        assert f"{task}: 1.00 {specialists[i]}\n" in out
    assert "\ndev (chosen on dev: expect less on test): sst " in out


def test_halves_share_no_row_and_do_not_depend_on_the_order() -> None:
    ids = ids_of("sst", "dev")
    fitted, scored = halves(ids, seed=1)
    assert sorted([*fitted, *scored]) == list(range(len(ids)))
    assert (len(fitted), len(scored)) == (20, 21)
    reversed_, _ = halves(ids[::-1], seed=1)
    assert {ids[i] for i in fitted} == {ids[::-1][i] for i in reversed_}
    assert not np.array_equal(fitted, halves(ids, seed=2)[0])


def weights_in(folder: Path) -> dict[str, dict[str, float]]:
    return json.loads((folder / "ensemble.json").read_text())["weights"]


def change_labels(run: Path, task: str, rows: np.ndarray) -> None:
    path = run / f"{task}-dev.npz"
    with np.load(path) as file:
        arrays = dict(file)
    arrays["labels"][rows] = arrays["labels"][rows][::-1]
    np.savez(path, **arrays)


def plain_score(task: str, mean: np.ndarray, labels: np.ndarray) -> float:
    """The score of a task, computed directly from probabilities or numbers."""
    if task == "sts":
        return np.corrcoef(mean.ravel(), labels)[0, 1]
    return ((mean.argmax(axis=1) if task == "sst" else mean.ravel() > 0.5) == labels).mean()


def test_weights_are_scored_on_the_half_of_dev_that_they_were_not_fitted_on(
    runs: list[Path], combine: Combine, tmp_path: Path
) -> None:
    out = succeeded(combine(*runs, "--method", "weighted", "--seed", 5)).out
    folder = tmp_path / "runs" / "ens"
    dev = json.loads((folder / "dev.json").read_text())
    of_first = next(line for line in out.splitlines() if line.startswith(f"{runs[0]} ")).split()[1:]
    for i, task in enumerate(NAMES):
        _, scored = halves(ids_of(task, "dev"), seed=5)
        weights = weights_in(folder)[task]
        assert (sum(weights.values()), min(weights.values()) >= 0) == (pytest.approx(1), True)
        given = [expected_mean(task, [kept(run, task, "dev")], "probabilities")[scored] for run in runs]
        mean = sum(weights[str(run)] * p for run, p in zip(runs, given, strict=True))
        labels = labels_of(task, "dev")[scored]
        assert dev[task] == pytest.approx(plain_score(task, mean, labels), abs=1e-6)
        assert of_first[i] == f"{plain_score(task, given[0], labels):.3f}", "single runs are scored on the same half"
    assert "scores on the half of dev that no weight was fitted on | rows: sst 21, para 21, sts 21" in out
    assert "\nthe half of dev that no weight was fitted on: sst " in out


def test_labels_of_the_scored_half_have_no_part_in_the_weights(
    runs: list[Path], combine: Combine, tmp_path: Path
) -> None:
    succeeded(combine(*runs, "--method", "weighted", "--name", "before"))
    for run in runs:
        for task in NAMES:
            change_labels(run, task, halves(ids_of(task, "dev"), seed=11711)[1])
    succeeded(combine(*runs, "--method", "weighted", "--name", "after"))
    before, after = tmp_path / "runs" / "before", tmp_path / "runs" / "after"
    assert weights_in(before) == weights_in(after)
    assert (before / "dev.json").read_text() != (after / "dev.json").read_text()


def test_on_the_fitted_half_no_run_scores_above_the_ensemble(
    runs: list[Path], combine: Combine, tmp_path: Path
) -> None:
    succeeded(combine(*runs, "--method", "weighted"))
    for task in NAMES:
        fitted, _ = halves(ids_of(task, "dev"), seed=11711)
        labels = labels_of(task, "dev")[fitted]

        def on_half(folder: Path, task: str = task, fitted: np.ndarray = fitted, labels: np.ndarray = labels) -> float:
            values = predictions_in(folder, task).values
            return TASKS[task].predicts.score(values[fitted], labels)

        assert on_half(tmp_path / "runs" / "ens") >= max(map(on_half, runs)) - 1e-6


def test_a_run_of_noise_gets_little_weight(tmp_path: Path, combine: Combine) -> None:
    good, noise = random_run(tmp_path / "good", 1, skill=2.0), random_run(tmp_path / "noise", 2, skill=-1.0)
    succeeded(combine(noise, good, "--method", "weighted"))
    for of_runs in weights_in(tmp_path / "runs" / "ens").values():
        assert of_runs[str(noise)] <= 0.4 < 0.6 <= of_runs[str(good)]


def test_equal_runs_get_equal_weights(tmp_path: Path, combine: Combine) -> None:
    """Every round is a tie, so the search keeps the weights as equal as 25 rounds allow."""
    members = [random_run(tmp_path / name, 1) for name in "ab"]
    succeeded(combine(*members, "--method", "weighted"))
    for of_runs in weights_in(tmp_path / "runs" / "ens").values():
        assert sorted(of_runs.values()) == pytest.approx([12 / 25, 13 / 25])


# --- tasks, splits, the run's directory -------------------------------------------------------------------------------


def test_each_task_is_combined_over_the_runs_that_have_it(tmp_path: Path, combine: Combine) -> None:
    a, b = random_run(tmp_path / "a", 1, ("sst", "para")), random_run(tmp_path / "b", 2, ("sst", "sts"))
    out = succeeded(combine(a, b)).out
    folder = tmp_path / "runs" / "ens"
    assert np.array_equal(kept(folder, "para", "dev"), kept(a, "para", "dev"))
    assert np.array_equal(kept(folder, "sts", "test"), kept(b, "sts", "test"))
    mean = (softmax(kept(a, "sst", "dev")) + softmax(kept(b, "sst", "dev"))) / 2
    np.testing.assert_allclose(np.exp(kept(folder, "sst", "dev")), mean, rtol=1e-5)
    origins = read_manifest(tmp_path / "predictions")
    assert origins.keys() == {path.name for path in (tmp_path / "predictions").glob("*.csv")}
    assert len(origins) == 6
    assert {origin.run for origin in origins.values()} == {str(folder)}, "the ensemble, not its members"
    row = next(line for line in out.splitlines() if line.startswith(f"{a} ")).split()
    assert row[3:] == ["-", "-"], "this run has no sts score, so it has no overall score"


def test_tasks_limits_what_is_combined(runs: list[Path], combine: Combine, tmp_path: Path) -> None:
    succeeded(combine(*runs, "--tasks", "sts"))
    assert {p.name for p in (tmp_path / "predictions").glob("*.csv")} == {"sts-dev-output.csv", "sts-test-output.csv"}
    assert json.loads((tmp_path / "runs" / "ens" / "args.json").read_text())["args"]["tasks"] == ["sts"]


def test_the_training_rows_are_combined_if_every_run_has_them(tmp_path: Path, combine: Combine) -> None:
    splits = ("dev", "test", "train")
    members = [random_run(tmp_path / f"run{seed}", seed, splits=splits) for seed in (1, 2)]
    (members[1] / "para-train.npz").unlink()
    change = members[1] / "sts-train.npz"
    with np.load(change) as file:
        np.savez(change, ids=file["ids"][::-1], logits=file["logits"], labels=file["labels"])
    done = succeeded(combine(*members))
    folder = tmp_path / "runs" / "ens"
    mean = expected_mean("sst", [kept(run, "sst", "train") for run in members], "probabilities")
    np.testing.assert_allclose(np.exp(kept(folder, "sst", "train")), mean, rtol=1e-5)
    labels = predictions_in(folder, "sst", "train").labels
    assert np.array_equal(labels, labels_of("sst", "train"))
    assert [path.name for path in folder.glob("*-train.npz")] == ["sst-train.npz"]
    assert (
        f"note: para: the training rows are left out, so the ensemble cannot be a teacher; {members[1]} has" in done.err
    )
    assert "note: sts: the training rows are left out" in done.err
    assert "the runs differ: id 'ststrain0015' in row 1, not 'ststrain0000'" in done.err


def test_an_ensemble_is_a_run_of_another_ensemble(runs: list[Path], combine: Combine, tmp_path: Path) -> None:
    succeeded(combine(*runs[:2], "--name", "pair"))
    succeeded(combine(tmp_path / "runs" / "pair", runs[2], "--name", "all"))
    p = [softmax(kept(run, "sst", "dev")) for run in runs]
    found = np.exp(kept(tmp_path / "runs" / "all", "sst", "dev"))
    np.testing.assert_allclose(found, (p[0] + p[1]) / 4 + p[2] / 2, rtol=1e-5)


def test_the_directory_records_the_runs_and_the_scores(runs: list[Path], combine: Combine, tmp_path: Path) -> None:
    done = succeeded(combine(*runs))
    folder = tmp_path / "runs" / "ens"
    facts = json.loads((folder / "args.json").read_text())
    assert facts["args"]["members"] == [str(run) for run in runs]
    assert (facts["args"]["method"], facts["args"]["tasks"]) == ("mean", list(NAMES))
    assert facts["versions"].keys() >= {"python", "torch", "numpy"}
    assert facts["data_sha256"]["data/sst-dev.csv"] == "sha of data/sst-dev.csv"
    dev = json.loads((folder / "dev.json").read_text())
    for task in NAMES:
        data = tmp_path / f"{task}.csv"
        pairs = "\t".join(TASKS[task].text_columns)
        texts = "\t".join("text" for _ in TASKS[task].text_columns)
        rows = zip(ids_of(task, "dev"), labels_of(task, "dev"), strict=True)
        lines = [f"{n}\t{i}\t{texts}\t{label}\n" for n, (i, label) in enumerate(rows)]
        data.write_text(f"\tid\t{pairs}\t{TASKS[task].label_column}\n" + "".join(lines))
        scored = read_scored(tmp_path / "predictions" / f"{task}-dev-output.csv", TASKS[task], data).score
        assert dev[task] == pytest.approx(scored, abs=1e-9)
    assert dev["overall"] == pytest.approx((dev["sst"] + dev["para"] + (dev["sts"] + 1) / 2) / 3)
    title, header, *table = done.out.splitlines()
    assert title == "mean of 3 runs | scores on dev | rows: sst 41, para 41, sts 41"
    assert header.split() == ["run", "sst", "para", "sts", "overall"]
    assert [line.split()[0] for line in table[:4]] == [*map(str, runs), str(folder)]
    assert table[3].split()[1:] == [*(f"{dev[task]:.3f}" for task in NAMES), f"{dev['overall']:.4f}"]
    assert table[-1].startswith(f"dev: sst {dev['sst']:.3f} | para ")
    assert table[-1].endswith(f"| {folder}")


# --- soups ------------------------------------------------------------------------------------------------------------

TRAINED = {
    "a": ["--seed", 1, "--weighting", "uncertainty"],
    "b": ["--seed", 2],
    "sst": ["--tasks", "sst", "--seed", 3],
    "sts": ["--tasks", "sts", "--seed", 4, "--sts_head", "siamese_cosine"],
    "mlp": ["--tasks", "sst", "--sst_head", "mlp"],
    "shallow": ["--tasks", "sst", "--keep_layers", 1],
    "pal": ["--adapter", "pal", "--pal_dim", 8],
    "pal2": ["--adapter", "pal", "--pal_dim", 8, "--seed", 2],
    "own": ["--adapter", "own_layers", "--own_layers", 1, "--seed", 1],
    "own2": ["--adapter", "own_layers", "--own_layers", 1, "--seed", 2],
    "two own": ["--adapter", "own_layers", "--own_layers", 2],
}


def multitask(*flags: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["multitask_classifier.py", *map(str, flags)])
        multitask_classifier.main()


@pytest.fixture(scope="module")
def trained(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with the runs in TRAINED."""
    folder = tmp_path_factory.mktemp("trained")
    write_task_files(folder / "data")
    usual = ["--model", tiny_checkpoint, "--data", folder / "data", "--runs", folder / "runs", "--epochs", 1]
    usual += ["--option", "finetune", "--lr", "1e-3", "--predictions"]
    for name, flags in TRAINED.items():
        multitask(*usual, folder / "predictions" / name, "--name", name, *flags)
    return folder / "runs"


def weights_of(run: Path) -> dict[str, np.ndarray]:
    return load_file(run / "model.safetensors")


def prediction_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.csv")}


def test_a_soup_is_the_mean_of_the_weights_and_a_run_like_any_other(
    trained: Path, combine: Combine, tmp_path: Path
) -> None:
    succeeded(combine(trained / "a", trained / "b", "--method", "soup"))
    folder = tmp_path / "runs" / "ens"
    a, b, mean = (weights_of(run) for run in (trained / "a", trained / "b", folder))
    assert mean.keys() == b.keys(), "the uncertainties that a learned belong to its training only"
    for name, tensor in mean.items():
        expected = (a[name].astype(np.float64) + b[name]) / 2
        np.testing.assert_allclose(tensor, expected, rtol=1e-6, atol=1e-9, err_msg=name)
    assert any(not np.allclose(a[name], b[name]) for name in b if name.startswith("bert."))
    written, logits = prediction_files(tmp_path / "predictions"), kept(folder, "sst", "dev")
    assert len(written) == 6
    multitask("--predict_only", "--run", folder, "--predictions", tmp_path / "again")
    assert prediction_files(tmp_path / "again") == written
    assert np.array_equal(kept(folder, "sst", "dev"), logits)
    encoder = dict(BertModel.from_pretrained(str(folder)).named_parameters())
    assert np.array_equal(encoder["pooler_dense.bias"].detach().numpy(), mean["bert.pooler.dense.bias"])


def test_a_soup_of_a_run_and_its_copy_predicts_as_the_run_does(trained: Path, combine: Combine, tmp_path: Path) -> None:
    shutil.copytree(trained / "b", tmp_path / "copy")
    succeeded(combine(trained / "b", tmp_path / "copy", "--method", "soup"))
    assert prediction_files(tmp_path / "predictions") == prediction_files(trained.parent / "predictions" / "b")


def test_a_soup_of_single_task_runs_averages_the_encoders_and_keeps_each_head(
    trained: Path, combine: Combine, tmp_path: Path
) -> None:
    """Tlemcani & Sohn, figure 2."""
    succeeded(combine(trained / "sst", trained / "sts", "--method", "soup"))
    folder = tmp_path / "runs" / "ens"
    sst, sts, mean = (weights_of(run) for run in (trained / "sst", trained / "sts", folder))
    for name, tensor in mean.items():
        if name.startswith("bert."):
            np.testing.assert_allclose(tensor, (sst[name].astype(np.float64) + sts[name]) / 2, rtol=1e-6, atol=1e-9)
        else:
            assert np.array_equal(tensor, (sst if ".sst." in name else sts)[name]), name
    assert mean.keys() == sst.keys() | sts.keys()
    args = json.loads((folder / "args.json").read_text())["args"]
    assert (args["tasks"], args["sts_head"], args["sst_head"]) == (["sst", "sts"], "siamese_cosine", "linear")
    written = prediction_files(tmp_path / "predictions")
    multitask("--predict_only", "--run", folder, "--predictions", tmp_path / "again")
    assert prediction_files(tmp_path / "again") == written


def test_a_soup_of_some_tasks_has_the_heads_of_these(trained: Path, combine: Combine, tmp_path: Path) -> None:
    succeeded(combine(trained / "a", trained / "b", "--method", "soup", "--tasks", "para"))
    heads = {name.split(".")[1] for name in weights_of(tmp_path / "runs" / "ens") if name.startswith("heads.")}
    assert heads == {"para"}


# --- what cannot be combined ------------------------------------------------------------------------------------------


def assert_refused(finished: Finished, tmp_path: Path, *parts: object) -> None:
    error = the_error(finished)
    for part in map(str, parts):
        assert part in error
    assert not (tmp_path / "runs").exists()
    assert not list((tmp_path / "predictions").glob("*"))


def changed(path: Path, **arrays: Callable[[np.ndarray], np.ndarray]) -> None:
    with np.load(path) as file:
        given = {name: file[name] for name in file if name != "sha256"}  # as older versions wrote it
    np.savez(path, **given | {name: change(given[name]) for name, change in arrays.items()})


def with_first(value: object) -> Callable[[np.ndarray], np.ndarray]:
    return lambda array: np.array([value, *array[1:]])


@pytest.mark.parametrize(
    ("split", "arrays", "found"),
    [
        ("dev", {"ids": with_first("other")}, "id 'other' in row 1, not 'paradev0000'"),
        ("test", {"ids": with_first("other")}, "id 'other' in row 1, not 'paratest0000'"),
        ("dev", {"labels": lambda labels: 1 - labels}, "label "),
        ("dev", {n: lambda x: x[:-1] for n in ("ids", "logits", "labels")}, "40 rows, not 41"),
    ],
)
def test_runs_with_other_rows_are_refused(
    split: str, arrays: dict[str, Callable], found: str, runs: list[Path], combine: Combine, tmp_path: Path
) -> None:
    changed(runs[1] / f"para-{split}.npz", **arrays)
    must = f"{runs[1]}: must have the para {split} rows of {runs[0]}, found {found}"
    remedy = "Train both with the same files."
    assert_refused(combine(*runs), tmp_path, must, remedy)


@pytest.mark.parametrize("split", ["dev", "test"])
def test_runs_with_another_file_are_refused(split: str, runs: list[Path], combine: Combine, tmp_path: Path) -> None:
    """The same ids and labels, but another text."""
    facts = json.loads((runs[2] / "args.json").read_text())
    facts["data_sha256"][f"data/sts-{split}.csv"] = "another"
    (runs[2] / "args.json").write_text(json.dumps(facts))
    must = f"{runs[2]}: must have the sts {split} rows of {runs[0]}, found a file with another sha256. Train both with"
    assert_refused(combine(*runs), tmp_path, must)


BROKEN = {
    "missing": (Path.unlink, "cannot be read as logits; No such file or directory."),
    "garbage": (lambda path: path.write_bytes(b"garbage"), "cannot be read as logits; "),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-50]), "cannot be read as logits; "),
    "empty": (lambda path: path.write_bytes(b""), "cannot be read as logits; "),
    "no labels": (
        lambda path: np.savez(path, ids=np.array(["a"]), logits=np.zeros((1, 5))),
        "'labels' is not there",
    ),
    "other shape": (
        lambda path: changed(path, logits=lambda x: x[:, :3]),
        "must have 5 finite logits for each of its 41 ids, found an array of shape (41, 3).",
    ),
    "not finite": (lambda path: changed(path, logits=lambda x: x / 0), "found NaN or infinity."),
    "few labels": (
        lambda path: changed(path, labels=lambda x: x[:7]),
        "must have a label for each of 41 ids, found 7.",
    ),
}


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("damage", BROKEN)
def test_missing_or_damaged_logits_name_the_command_that_writes_them(
    damage: str, runs: list[Path], combine: Combine, tmp_path: Path
) -> None:
    change, part = BROKEN[damage]
    path = runs[1] / "sst-dev.npz"
    change(path)
    again = f"Predict again: multitask_classifier.py --predict_only --run {runs[1]}"
    assert_refused(combine(*runs), tmp_path, f"{path}: ", part, again)


def test_damaged_training_logits_name_the_flag_that_writes_them(combine: Combine, tmp_path: Path) -> None:
    members = [random_run(tmp_path / f"run{seed}", seed, splits=("dev", "test", "train")) for seed in (1, 2)]
    (members[1] / "sst-train.npz").write_bytes(b"garbage")
    again = f"Predict again: multitask_classifier.py --predict_only --predict_train --run {members[1]}"
    assert_refused(combine(*members), tmp_path, members[1] / "sst-train.npz", again)


def test_damaged_logits_of_an_ensemble_name_another_remedy(runs: list[Path], combine: Combine, tmp_path: Path) -> None:
    succeeded(combine(*runs[:2], "--runs", tmp_path / "others", "--predictions", tmp_path / "others"))
    path = tmp_path / "others" / "ens" / "sts-test.npz"
    path.write_bytes(b"garbage")
    finished = combine(path.parent, runs[2])
    assert_refused(finished, tmp_path, f"{path}: ", "Predict with its runs, then combine them again.")


def test_a_run_that_was_never_predicted_is_refused(runs: list[Path], combine: Combine, tmp_path: Path) -> None:
    (runs[0] / "sts-test.npz").unlink()
    assert_refused(combine(*runs), tmp_path, runs[0] / "sts-test.npz", f"--predict_only --run {runs[0]}")


def test_one_run_is_no_ensemble_and_a_run_counts_once(runs: list[Path], combine: Combine, tmp_path: Path) -> None:
    assert_refused(combine(runs[0]), tmp_path, f"needs at least two runs, found {runs[0]} alone. Name another.")
    again = runs[0].parent / "." / ".." / runs[0].parent.name / runs[0].name
    assert_refused(combine(runs[0], runs[1], again), tmp_path, f"{again}: must be named once, found it twice")


def test_a_folder_that_is_no_run_is_refused(runs: list[Path], combine: Combine, tmp_path: Path) -> None:
    assert_refused(combine(runs[0], tmp_path / "none"), tmp_path, tmp_path / "none", "no such directory. Give")
    (runs[1] / "args.json").write_text('{"args": {"tasks": ["sst"]}, "data_sha256": {}}')  # like a run of classifier.py
    expected = f"{runs[1]}: must be a run of multitask_classifier.py or ensemble.py. Choose another."
    assert_refused(combine(*runs), tmp_path, expected)


@pytest.mark.parametrize("method", ["mean", "vote", "weighted"])
def test_runs_without_a_common_task_are_refused(method: str, combine: Combine, tmp_path: Path) -> None:
    members = [random_run(tmp_path / task, 1, (task,)) for task in NAMES]
    expected = f"--method {method} needs a task that two of the runs have, found none. Use --method best, which"
    assert_refused(combine(*members, "--method", method), tmp_path, expected)
    out = succeeded(combine(*members, "--method", "best")).out
    assert "\ndev: sst " in out, "there was nothing to choose"


def test_a_task_that_no_run_has_and_a_run_without_a_task_are_refused(combine: Combine, tmp_path: Path) -> None:
    members = [random_run(tmp_path / task, 1, (task, "sst")) for task in ("para", "sts")]
    expected = "--tasks cfimdb: must be a task of one of the runs, found it in none. Leave it out."
    assert_refused(combine(*members, "--tasks", "cfimdb", "sst"), tmp_path, expected)
    expected = f"{members[1]}: must have one of --tasks para, found none. Leave it out."
    assert_refused(combine(*members, "--tasks", "para"), tmp_path, expected)


def test_a_name_that_is_taken_is_refused_and_nothing_is_overwritten(
    runs: list[Path], combine: Combine, tmp_path: Path
) -> None:
    taken = tmp_path / "runs" / "ens"
    taken.mkdir(parents=True)
    (taken / "mine").write_text("mine")
    assert f"{taken}: the run exists already." in the_error(combine(*runs))
    assert [path.name for path in taken.iterdir()] == ["mine"]
    assert not (tmp_path / "predictions").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--method", "vote", "--average", "logits"],
            "--average logits needs --method mean or weighted. Use --method mean or weighted, or leave out --average.",
        ),
        (
            ["--method", "mean", "--seed", "3"],
            "--seed 3 needs --method weighted. Use --method weighted, or leave out --seed.",
        ),
        (["--seed", "3"], "--seed 3 needs --method weighted. Use --method weighted, or leave out --seed."),
        (
            ["--method", "best", "--use_gpu"],
            "--use_gpu needs --method soup. Use --method soup, or leave out --use_gpu.",
        ),
        (["--method", "stack"], "--method must be one of mean, best, weighted, vote, soup; found 'stack'."),
        (["--metod", "mean"], "unknown flag --metod. Did you mean --method? See ensemble.py --help."),
    ],
)
def test_flags_without_effect_and_unknown_ones_are_refused(
    flags: list[str], message: str, runs: list[Path], combine: Combine, tmp_path: Path
) -> None:
    assert_refused(combine(*runs, *flags), tmp_path, message)


def test_a_flag_that_a_later_one_makes_pointless_is_dropped_with_a_note(
    runs: list[Path], combine: Combine, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.txt"
    recipe.write_text("--method weighted --seed 3 --average logits\n")
    done = succeeded(combine(*runs, f"@{recipe}", "--method", "vote"))
    assert "note: --average, --seed: no effect with --method vote, so dropped.\n" in done.err
    succeeded(combine(*runs, "--method", "vote", "--name", "plain"))
    for task in NAMES:
        assert np.array_equal(*(kept(tmp_path / "runs" / name, task, "dev") for name in ("ens", "plain")))
    args = json.loads((tmp_path / "runs" / "ens" / "args.json").read_text())["args"]
    assert (args["method"], args["average"], args["seed"]) == ("vote", "probabilities", 11711)


def test_dev_files_too_small_to_halve_are_refused(
    combine: Combine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ROWS, "dev", 3)
    members = [random_run(tmp_path / f"run{seed}", seed, ("sst",)) for seed in (1, 2)]
    finished = combine(*members, "--method", "weighted")
    assert_refused(finished, tmp_path, "needs four dev rows, two to fit on and two to score, found 3 of sst.")


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        ("sst", "mlp", "--sst_head linear in {} and mlp in {}"),
        ("sst", "shallow", "--keep_layers None in {} and 1"),
        ("own", "two own", "--own_layers 1 in {} and 2 in {}"),
    ],
)
def test_a_soup_of_other_heads_or_layers_is_refused(
    one: str, other: str, found: str, trained: Path, combine: Combine, tmp_path: Path
) -> None:
    expected = "--method soup needs runs with the same encoder and the same heads, found " + found
    members = trained / one, trained / other
    finished = combine(*members, "--method", "soup")
    assert_refused(finished, tmp_path, expected.format(*members), "Choose runs that agree, or use --method mean.")


@pytest.fixture
def copies(trained: Path, tmp_path: Path) -> list[Path]:
    """Copies of two runs with the same model, which a test may damage."""
    return [shutil.copytree(trained / name, tmp_path / name) for name in ("a", "b")]


def test_a_soup_of_another_model_is_refused(copies: list[Path], combine: Combine, tmp_path: Path) -> None:
    path = copies[1] / "args.json"
    facts = json.loads(path.read_text())
    facts["args"]["model"] = "bert-base-uncased"
    path.write_text(json.dumps(facts))
    expected = f"and bert-base-uncased in {copies[1]}. Choose runs that agree"
    assert_refused(combine(*copies, "--method", "soup"), tmp_path, "needs runs with the same encoder", expected)


def reshaped(weights: dict[str, np.ndarray]) -> None:
    weights["heads.sst.linear.bias"] = np.zeros(7, dtype=np.float32)


def without_a_layer(weights: dict[str, np.ndarray]) -> None:
    del weights["bert.encoder.layer.1.output.dense.bias"]


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (reshaped, "heads.sst.linear.bias must have one shape in all runs, found (7,), not (5,) as in"),
        (without_a_layer, "model.safetensors: must have bert.encoder.layer.1.output.dense.bias, as"),
    ],
)
def test_a_soup_of_other_shapes_is_refused(
    damage: Callable, expected: str, copies: list[Path], combine: Combine, tmp_path: Path
) -> None:
    weights = weights_of(copies[1])
    damage(weights)
    save_file(weights, copies[1] / "model.safetensors")
    finished = combine(*copies, "--method", "soup")
    assert_refused(finished, tmp_path, f"{copies[1] / 'model.safetensors'}: ", expected, "Choose ")


def test_a_soup_averages_the_layers_that_a_task_has_for_itself(trained: Path, combine: Combine, tmp_path: Path):
    succeeded(combine(trained / "own", trained / "own2", "--method", "soup"))
    found, one, other = map(weights_of, (tmp_path / "runs" / "ens", trained / "own", trained / "own2"))
    own = [name for name in one if name.startswith("adapter.tasks.")]
    assert len({name.split(".")[2] for name in own}) == len(NAMES)
    assert not all(np.array_equal(one[name], other[name]) for name in own), "or the test proves nothing"
    for name in own:
        np.testing.assert_allclose(found[name], (one[name] + other[name]) / 2, atol=1e-6)


@pytest.mark.parametrize("members", [("pal", "pal2"), ("own", "own2")])
def test_a_soup_of_one_task_leaves_the_adapters_of_the_others_out(
    members: tuple[str, str], trained: Path, combine: Combine, tmp_path: Path
):
    succeeded(combine(*(trained / name for name in members), "--method", "soup", "--tasks", "sst"))
    predicted = prediction_files(tmp_path / "predictions")
    multitask("--predict_only", "--run", tmp_path / "runs" / "ens", "--predictions", tmp_path / "again")
    assert len(predicted) == 2
    assert prediction_files(tmp_path / "again") == predicted
    adapters = [name for name in weights_of(tmp_path / "runs" / "ens") if name.startswith("adapter.tasks.")]
    assert adapters
    assert all(name.startswith("adapter.tasks.sst.") for name in adapters)


def test_an_ensemble_of_what_was_fitted_on_dev_says_so(runs: list[Path], combine: Combine, tmp_path: Path) -> None:
    succeeded(combine(*runs, "--method", "weighted", "--name", "w"))
    found = succeeded(combine(tmp_path / "runs" / "w", runs[0], "--method", "mean"))
    assert f"note: {tmp_path / 'runs' / 'w'}: fitted or chosen on dev (the half of dev that no" in found.err
    assert "fitted or chosen" not in combine(*runs, "--method", "mean", "--name", "plain").err


def test_a_soup_without_weights_is_refused(
    runs: list[Path], copies: list[Path], combine: Combine, tmp_path: Path
) -> None:
    expected = f"{runs[0]}: must have model.safetensors, found none. Use a trained run, or a soup."
    assert_refused(combine(*runs, "--method", "soup"), tmp_path, expected)
    (copies[0] / "model.safetensors").write_bytes(b"garbage")
    assert_refused(
        combine(*copies, "--method", "soup"),
        tmp_path,
        f"{copies[0] / 'model.safetensors'}: not a complete weights file",
    )


def test_a_soup_whose_data_changed_is_refused(copies: list[Path], combine: Combine, tmp_path: Path) -> None:
    other = tmp_path / "sts-dev.csv"
    for run in copies:
        facts = json.loads((run / "args.json").read_text())
        data = Path(facts["args"]["sts_dev"])
        facts["data_sha256"][str(other)] = facts["data_sha256"][str(data)]
        facts["args"]["sts_dev"] = str(other)
        (run / "args.json").write_text(json.dumps(facts))
    expected = f"{other}: must be where {copies[0]} read it, found no such file."
    assert_refused(combine(*copies, "--method", "soup"), tmp_path, expected)
    other.write_text(data.read_text().replace("film", "movie"))
    expected = f"{other}: must be as {copies[0]} read it, found another sha256. Restore the file."
    assert_refused(combine(*copies, "--method", "soup"), tmp_path, expected)
    for run in copies:
        changed(run / "sst-dev.npz", ids=with_first("other"))
    other.write_text(data.read_text())
    assert_refused(
        combine(*copies, "--method", "soup"), tmp_path, f"{copies[0]}: its logits of sst dev belong to other rows"
    )


def test_an_ensemble_of_logits_cannot_predict(runs: list[Path], combine: Combine, tmp_path: Path) -> None:
    succeeded(combine(*runs))
    with pytest.raises(
        utils.InputError, match=r"must have model\.safetensors, found none\. Use a trained run, or a soup\."
    ):
        multitask("--predict_only", "--run", tmp_path / "runs" / "ens")


def test_the_script_runs_from_the_command_line(runs: list[Path], tmp_path: Path) -> None:
    flags = ["--name", "ens", "--runs", tmp_path / "runs", "--predictions", tmp_path / "predictions"]
    done = run_script("ensemble.py", *runs, *flags, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("mean of 3 runs | scores on dev")
    again = run_script("ensemble.py", *runs, *flags)
    assert (again.returncode, again.stdout, again.stderr.count("\n")) == (2, "", 1)
    assert not (ROOT / "runs" / "ens").exists()
    assert predictions_in(tmp_path / "runs" / "ens", "sts").ids == ids_of("sts", "dev")


def test_what_contains_an_ensemble_that_was_fitted_on_dev_says_so(
    runs: list[Path], combine: Combine, tmp_path: Path
) -> None:
    """The mark is inherited, however deep the ensemble is nested."""
    succeeded(combine(*runs, "--method", "weighted", "--name", "fitted"))
    succeeded(combine(runs[0], tmp_path / "runs" / "fitted", "--name", "outer"))
    facts = json.loads((tmp_path / "runs" / "outer" / "ensemble.json").read_text())
    assert facts["scored_on"] == "dev (a run was fitted or chosen on dev: expect less on test)"
    done = succeeded(combine(runs[1], tmp_path / "runs" / "outer", "--name", "outermost"))
    assert "outer: fitted or chosen on dev" in done.err
