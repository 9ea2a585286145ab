"""Recipes: every row of the papers' tables has one, and every one of them runs."""

import importlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, run_script, write_more_data, write_task_files

import ensemble
import multitask_classifier
import trials
from multitask_classifier import get_args
from multitask_flags import parser
from readers import read_examples
from tasks import PARA, SST, STS

FOLDER = ROOT / "recipes"
README = (FOLDER / "README.md").read_text(encoding="utf-8")
# These, and all recipes in minilm/ and extensions/, name their model.
OUR_OWN = {"quickstart", "best", "fast", "distilled", "classifier-quickstart", "classifier-minilm-finetune"}
# The rows of the papers' tables, by the name of their recipe. Every row must have one.
ROWS = [
    "parts/baseline-last-linear", "parts/baseline-full", "parts/pos", "parts/siamese", "parts/combined",
    "parts/gradient-surgery", "parts/cosine", "parts/sigmoid", "parts/surgery-sigmoid",
    "stems/sst-linear-frozen", "stems/sst-linear-full", "stems/sst-mlp-frozen", "stems/sst-mlp-full",
    "stems/sst-bigru-frozen", "stems/sst-bigru-full",
    "stems/para-bce-frozen", "stems/para-bce-full", "stems/para-mnr-frozen", "stems/para-mnr-full",
    "stems/para-siamese-frozen", "stems/para-siamese-full",
    "stems/sts-linear-frozen", "stems/sts-linear-full", "stems/sts-siamese-frozen", "stems/sts-siamese-full",
    "stems/sts-siamese-bigru-frozen", "stems/sts-siamese-bigru-full", "stems/sts-quora-augmented",
    "stems/ensemble", "stems/average-weights", "stems/grid-search",
    "smarter/baseline", "smarter/sampled", "smarter/smart", "smarter/pcgrad", "smarter/pcgrad-smart",
    "smarter/five-epochs", "smarter/more-data", "smarter/cross", "smarter/cross-pcgrad-smart0",
    "smarter/cross-pcgrad-smart1", "smarter/cross-pcgrad-smart2",
    "robust/1-baseline", "robust/2-dropout", "robust/3-cosine", "robust/4-round-robin", "robust/5-surgery",
    "robust/6-balanced", "robust/7-final", "robust/search",
]  # fmt: skip


def name_of(path: Path) -> str:
    return path.relative_to(FOLDER).with_suffix("").as_posix()


def script_of(path: Path) -> str:
    """The script that a recipe is for, from the command in its comment: `#   python SCRIPT.py @recipes/NAME.txt`."""
    command = rf"^# .*\bpython3? (\w+)\.py @recipes/{re.escape(name_of(path))}\.txt"
    found = re.search(command, path.read_text(encoding="utf-8"), flags=re.M)
    assert found, f"{path}: its comment must contain the command, `#   python SCRIPT.py @recipes/{name_of(path)}.txt`"
    return found[1]


RECIPES = {name_of(path): path for path in sorted(FOLDER.rglob("*.txt"))}
SCRIPTS = {name: script_of(path) for name, path in RECIPES.items()}
DRY = [name for name, script in SCRIPTS.items() if script not in ("classifier", "ensemble")]  # scripts with --dry_run
PART_2 = [name for name, script in SCRIPTS.items() if script == "multitask_classifier"]
ENSEMBLES = [name for name, script in SCRIPTS.items() if script == "ensemble"]
OF_PAPERS = [name for name in PART_2 if name in ROWS]
TABLE = {
    name: {"paper": paper, "dev": dev, "what": what}
    for name, paper, dev, what in re.findall(
        r"^\| `([\w/-]+)` \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$", README.split("\n## All of them\n")[1], flags=re.M
    )
}


def flags_in(name: str) -> list[str]:
    """The flags that a recipe's own lines set."""
    lines = (line.partition("#")[0].split() for line in RECIPES[name].read_text(encoding="utf-8").splitlines())
    return [line[0] for line in lines if line]


def comment_of(name: str) -> str:
    return "\n".join(line for line in RECIPES[name].read_text(encoding="utf-8").splitlines() if line.startswith("#"))


# --- the table --------------------------------------------------------------------------------------------------------


def test_every_recipe_is_in_the_table() -> None:
    assert set(RECIPES) <= set(TABLE)


@pytest.mark.parametrize("name", ROWS)
def test_every_row_of_the_papers_has_a_recipe_and_a_line_in_the_table(name: str) -> None:
    assert name in RECIPES
    assert re.match(r"00[0-4], ", TABLE[name]["paper"])
    assert TABLE[name]["what"]


def test_every_file_of_the_table_exists_and_belongs_to_a_row_or_is_our_own() -> None:
    for name in set(TABLE) - set(ROWS):
        assert name in RECIPES, name
        assert name in OUR_OWN or name.startswith(("minilm/", "extensions/")), name


def test_the_readme_runs_only_recipes_that_exist() -> None:
    for name in re.findall(r"@recipes/([\w/-]+)\.txt", README):
        assert name in RECIPES


# --- contents ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_parses_and_is_consistent(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = importlib.import_module(SCRIPTS[name]).get_args([f"@{RECIPES[name]}"])
    if SCRIPTS[name] == "sweep":
        trials.with_trials(args)
    assert capsys.readouterr().err == "", "no flag of a recipe makes another one pointless"


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_sets_no_flag_twice_and_none_that_depends_on_the_user(name: str) -> None:
    flags = flags_in(name)
    assert len(flags) == len(set(flags))
    assert not set(flags) & {"--name", "--use_gpu", "--seed", "--runs", "--predictions", "--dry_run"}


@pytest.mark.parametrize("name", OF_PAPERS)
def test_a_papers_recipe_leaves_model_and_data_to_the_defaults(name: str) -> None:
    args = get_args([f"@{RECIPES[name]}"])
    assert (args.model, args.data) == ("bert-base-uncased", Path("data"))
    assert {"--lr", "--epochs", "--batch_size", "--hidden_dropout_prob"} <= set(flags_in(name))


@pytest.mark.parametrize("name", [name for name in DRY if name not in ROWS])
def test_our_own_recipes_name_their_model(name: str) -> None:
    assert "--model" in flags_in(name)


@pytest.mark.parametrize("name", [name for name in RECIPES if name in ROWS])
def test_a_papers_recipe_cites_paper_and_figures_as_the_table_does(name: str) -> None:
    comment = comment_of(name)
    paper = re.match(r"\d{3}", TABLE[name]["paper"])[0]
    assert comment.startswith(f"# Paper {paper}, ")
    assert f"@recipes/{name}.txt" in comment
    dev = re.search(r"^# Dev: (.*)$", comment, flags=re.M)[1]
    assert re.findall(r"-?\.\d{3}", TABLE[name]["dev"]) == re.findall(r"-?\.\d{3}", dev.partition("(")[0])


def test_the_rows_of_a_paper_differ() -> None:
    """Two rows with the same flags would be one system under two names."""
    seen: dict[str, str] = {}
    for name in OF_PAPERS:
        flags = repr(sorted(vars(parser().parse_args([f"@{RECIPES[name]}"])).items(), key=lambda item: item[0]))
        assert flags not in seen, f"{name} is {seen.get(flags)}"
        seen[flags] = name


# --- runs -------------------------------------------------------------------------------------------------------------


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipes") / "data"
    write_task_files(folder)
    return folder


def write_teacher(folder: Path, data: Path) -> None:
    """Write logits of all training rows, as in the directory of an ensemble, and of more rows, as teacher.py does."""
    folder.mkdir(parents=True)
    for task in (SST, PARA, STS):
        train = data / task.filename("train")
        ids = read_examples(task, [train], labeled=True).ids
        more = [f"more{identifier}" for identifier in ids]
        logits = np.zeros((2 * len(ids), task.predicts.num_logits))
        np.savez(folder / f"{task.name}-train.npz", ids=ids + more, logits=logits)
        (folder / f"{task.name}-more.csv").write_text(train.read_text().replace("\ttrain", "\tmoretrain"))


@pytest.mark.usefixtures("tags_offline")
@pytest.mark.parametrize("name", DRY)
def test_every_recipe_runs_two_steps(
    name: str,
    tiny_checkpoint: Path,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    if {"--sst_train", "--sts_train"} & set(flags_in(name)):  # the recipe names files in data/, wherever --data points
        write_task_files(tmp_path / "data")
        write_more_data(tmp_path / "data")
    if "--teacher" in flags_in(name):
        for teacher in ("ensemble", "teacher"):
            write_teacher(tmp_path / "runs" / teacher, data)
    before = sorted(tmp_path.rglob("*"))
    folder = data if SCRIPTS[name] != "pretrain" else ROOT / "data" / "sample"  # a tenth of it is held out
    argv = [f"@{RECIPES[name]}", "--model", str(tiny_checkpoint), "--data", str(folder), "--dry_run"]
    for flag in {"--keep_layers", "--own_layers"} & set(flags_in(name)):
        argv += [flag, "1"]  # of two
    monkeypatch.setattr(sys, "argv", [f"{SCRIPTS[name]}.py", *argv])
    importlib.import_module(SCRIPTS[name]).main()
    printed = capsys.readouterr().out
    if name in PART_2:
        args = get_args(argv)
        rows = min(8, 2 * args.batch_size * args.accumulate)
        for task in args.tasks:
            assert re.search(rf"^{task}: wrote .+{task}-dev-output\.csv, {rows} rows", printed, flags=re.M)
    assert printed.endswith("dry run: two steps of everything went through; nothing was kept.\n")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.fixture(scope="module")
def runs_to_combine(tiny_checkpoint: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs that the recipes for ensemble.py name, trained by the commands in their comments."""
    folder = tmp_path_factory.mktemp("combine")
    commands = {c for n in ENSEMBLES for c in re.findall(r"python (multitask_classifier.py @.+)", comment_of(n))}
    for command in sorted(commands):
        script, recipe, *flags = (part for part in command.split() if part != "--use_gpu")
        given = ["--model", tiny_checkpoint, "--data", data, "--predictions", folder / "predictions", "--epochs", 1]
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.setattr(sys, "argv", [script, f"@{ROOT}/{recipe[1:]}", *flags, *map(str, given)])
            multitask_classifier.main()
    return folder


@pytest.mark.parametrize("name", ENSEMBLES)
def test_every_recipe_for_ensembles_runs_on_the_runs_that_it_names(
    name: str,
    runs_to_combine: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(runs_to_combine)
    flags = ["--runs", tmp_path / "runs", "--name", "r", "--predictions", tmp_path / "predictions"]
    monkeypatch.setattr(sys, "argv", ["ensemble.py", f"@{RECIPES[name]}", *map(str, flags)])
    ensemble.main()
    assert re.search(r"^.*dev.*: sst \S+ \| para \S+ \| sts \S+ \| overall ", capsys.readouterr().out, flags=re.M)
    assert len(list((tmp_path / "predictions").glob("*-output.csv"))) == 6


@pytest.mark.parametrize("name", ["parts/baseline-last-linear", "robust/7-final"])
def test_a_recipe_runs_from_the_command_line(name: str, tiny_checkpoint: Path, data: Path) -> None:
    flags = [f"@recipes/{name}.txt", "--model", tiny_checkpoint, "--data", data, "--dry_run"]
    result = run_script("multitask_classifier.py", *flags, OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stderr
    assert "dry run: two steps of everything went through" in result.stdout


def test_the_quickstart_runs_unchanged() -> None:
    result = run_script("multitask_classifier.py", "@recipes/quickstart.txt", "--dry_run", OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stderr
    assert "finetune minilm" in result.stdout
