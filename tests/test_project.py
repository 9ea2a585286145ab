"""The house rules: who imports whom, what the README promises, what may not be committed."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, run_script

import benchmark
import classifier
from bert import ATTENTIONS
from optimizer import SCHEDULES
from tasks import TASKS

# README section "Who imports whom": a file may import the files of earlier levels, and those of its own named here.
LEVELS = [
    {"config", "utils", "tasks", "kernels"},
    {"base_bert", "optimizer"},
    {"tokenizer", "bert"},
    {"datasets"},
    {"evaluation"},
    {"training"},
    {"classifier", "sanity_check", "optimizer_test", "make_sample_data"},
    {"benchmark"},
]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SCRIPTS = sorted(path.stem for path in ROOT.glob("*.py"))


def imports_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    return names | {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}


def test_every_file_has_a_level() -> None:
    assert set().union(*LEVELS) == set(SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_file_imports_only_from_levels_below(name: str) -> None:
    level = next(i for i, names in enumerate(LEVELS) if name in names)
    below = set().union(*LEVELS[:level])
    assert imports_of(ROOT / f"{name}.py") & set(SCRIPTS) <= below


def test_training_imports_no_test_dependency() -> None:
    """Oracles are for the tests: benchmark.py, which compares with them, is the one exception."""
    oracles = {"transformers", "sklearn", "pytest"}
    for name in SCRIPTS:
        if name != "benchmark":
            assert not imports_of(ROOT / f"{name}.py") & oracles, name


def test_the_file_tree_of_the_readme_is_true() -> None:
    section = README.split("\n## Files\n")[1].split("\n## ")[0]
    listed = set(re.findall(r"^\| `([\w./-]+)` \|", section, flags=re.M))
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    for path in listed:
        assert (ROOT / path).exists(), f"{path} is in the README only"
    top = {p for p in tracked if "/" not in p and p.endswith((".py", ".sh"))}
    assert top <= listed, "in the project, but not in the README"


@pytest.mark.parametrize("registry", [ATTENTIONS, SCHEDULES, TASKS, benchmark.BENCHMARKS])
def test_the_readme_names_every_entry_of_every_registry(registry: dict) -> None:
    for key in registry:
        assert f"`{key}`" in README, key


def test_the_readme_names_every_requirement_and_what_it_is_for() -> None:
    for file in ROOT.glob("requirements*.txt"):
        for name in re.findall(r"^([\w-]+)==", file.read_text(), flags=re.M):
            assert f"`{name}`" in README, f"{file.name}: {name}"


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").rglob("*.txt")), ids=lambda p: p.stem)
def test_every_recipe_parses(recipe: Path) -> None:
    args = classifier.get_args([f"@{recipe}"])
    assert args.model == "minilm"


def test_no_course_data_is_committed(course_data: Path) -> None:
    ids = set()
    for path in course_data.glob("*.csv"):
        ids |= set(re.findall(r"\b[0-9a-f]{25}\b", path.read_text(encoding="utf-8")))
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    for name in tracked:
        path = ROOT / name
        if path.suffix in {".csv", ".md", ".py", ".txt", ".json"} and path.is_file():
            found = set(re.findall(r"\b[0-9a-f]{25}\b", path.read_text(encoding="utf-8"))) & ids
            assert not found, f"{name} holds ids of the course's data"


@pytest.mark.parametrize("script", ["classifier.py", "benchmark.py"])
def test_help_tells_every_flag_and_exits_zero(script: str) -> None:
    result = run_script(script, "--help")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"usage: {script}")


def bash(command: str, folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in {"VIRTUAL_ENV", "CONDA_PREFIX"}}
    return subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=folder, env=clean | environment, timeout=120
    )


@pytest.fixture
def copy_with_environment(tmp_path: Path) -> Path:
    """setup.sh and its requirements in a folder whose .venv has them all installed, by its stamps."""
    folder = tmp_path / "project"
    (folder / "data").mkdir(parents=True)
    for path in (ROOT / "setup.sh", *ROOT.glob("requirements*.txt")):
        shutil.copy(path, folder)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / ".venv")], check=True)
    for path in folder.glob("requirements*.txt"):
        shutil.copy(path, folder / ".venv" / f".minbert-{path.name}")
    return folder


def test_setup_with_nothing_to_do_takes_seconds_sourced_and_executed(copy_with_environment: Path) -> None:
    executed = bash("./setup.sh --dev", copy_with_environment)
    assert (executed.returncode, executed.stderr) == (0, "setup: ready\n")
    sourced = bash("source setup.sh && echo $VIRTUAL_ENV", copy_with_environment)
    assert sourced.stdout.strip() == str(copy_with_environment / ".venv")


def test_setup_uses_the_active_environment(copy_with_environment: Path) -> None:
    active = copy_with_environment / ".venv"
    other = copy_with_environment.parent / "other"
    active.rename(other)
    result = bash("source setup.sh", copy_with_environment, VIRTUAL_ENV=str(other))
    assert result.returncode == 0, result.stderr
    assert f"using the active environment {other}" in result.stderr
    assert not active.exists()


def test_setup_refuses_an_unknown_flag(copy_with_environment: Path) -> None:
    result = bash("./setup.sh --course", copy_with_environment)
    assert result.returncode == 2
    assert "--course" in result.stderr


def test_without_a_network_course_data_ends_in_a_clear_line(copy_with_environment: Path) -> None:
    git = copy_with_environment / "bin"
    git.mkdir()
    (git / "git").write_text("#!/bin/sh\necho 'fatal: Could not resolve host: github.com' >&2\nexit 128\n")
    (git / "git").chmod(0o755)
    result = bash("PATH=$PWD/bin:$PATH; source setup.sh --course-data; echo shell lives", copy_with_environment)
    assert "could not fetch the course's data: fatal: Could not resolve host" in result.stderr
    assert result.stdout == "shell lives\n"
    assert not list((copy_with_environment / "data").iterdir())


def test_course_data_is_copied_from_the_starter_repository(copy_with_environment: Path) -> None:
    """The real clone and copy, from a repository on this disk."""
    starter = copy_with_environment.parent / "starter"
    (starter / "data").mkdir(parents=True)
    (starter / "data" / "ids-sst-train.csv").write_text("\tid\tsentence\tsentiment\n")
    identity = "-c user.name=t -c user.email=t@example.invalid"
    done = bash(f"git init -q . && git add -A && git {identity} commit -qm data", starter)
    assert done.returncode == 0, done.stderr
    script = copy_with_environment / "setup.sh"
    script.write_text(re.sub(r"https://github\.com/\S+", str(starter), script.read_text()))
    result = bash("./setup.sh --course-data", copy_with_environment)
    assert result.returncode == 0, result.stderr
    assert (copy_with_environment / "data" / "ids-sst-train.csv").is_file()
    again = bash("./setup.sh --course-data", copy_with_environment)
    assert "already" in again.stderr
