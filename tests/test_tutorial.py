"""docs/TUTORIAL.md: its pieces of code run, its pointers exist, and its two examples train in a copy of the project."""

import ast
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import ROOT, write_task_files

TUTORIAL = (ROOT / "docs" / "TUTORIAL.md").read_text(encoding="utf-8")
SECTIONS = re.split(r"^## (?=\d)", TUTORIAL, flags=re.M)[1:]
EXAMPLES = [section for section in SECTIONS if "Add your own" in section.splitlines()[0]]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.M | re.S)


def names_in(path: Path) -> set[str]:
    """Functions, classes, `Class.method`, and constants of a file."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def test_everything_that_the_tutorial_points_to_exists() -> None:
    pointers = re.findall(r"`(\w+\.py): ([\w.]+)`", TUTORIAL)
    assert len(pointers) > 30
    for file, name in pointers:
        assert name in names_in(ROOT / file), f"{file} has no {name}"


def test_the_pieces_of_code_run_one_after_the_other(one_thread: None) -> None:
    """They contain assertions, so that what they claim is checked too."""
    space: dict[str, object] = {}
    ran = 0
    for section in SECTIONS:
        if section in EXAMPLES:
            continue
        for piece in blocks(section, "python"):
            exec(compile(piece, f"TUTORIAL.md, {section.splitlines()[0]}", "exec"), space)
            ran += 1
    assert ran >= 8


# --- the two examples -------------------------------------------------------------------------------------------------


class Example(NamedTuple):
    file: str
    registry: str
    code: str
    entry: str
    commands: list[str]


def example(section: str) -> Example:
    file, registry = re.search(r"In `(\w+\.py)`, above\s`(\w+)`:", section).groups()
    code, entry = blocks(section, "python")
    (commands,) = blocks(section, "bash")
    return Example(file, registry, code, entry, commands.splitlines())


def add_to(folder: Path, new: Example) -> None:
    """Do what the section says: put the code above the registry, and the line into it."""
    path = folder / new.file
    text = path.read_text(encoding="utf-8")
    registry = re.search(rf"^{new.registry}\b.*?^\}}$", text, flags=re.M | re.S)
    entries = registry[0].removesuffix("}") + new.entry + "}"
    path.write_text(f"{text[: registry.start()]}{new.code}\n\n{entries}{text[registry.end() :]}", encoding="utf-8")


# Runs every command as the script itself would, in one process: the imports take longer than the training.
RUN_ALL = """
import sys
import multitask_classifier

for line in sys.argv[1:]:
    sys.argv[1:] = line.split()
    multitask_classifier.main()
"""


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> str:
    """What the commands of both examples print in a copy of the project, with a tiny model and small files."""
    folder = tmp_path_factory.mktemp("copy")
    for path in ROOT.glob("*.py"):
        shutil.copy(path, folder)
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    write_task_files(folder / "small")
    for section in EXAMPLES:
        add_to(folder, example(section))
    commands = [command for section in EXAMPLES for command in example(section).commands]
    assert all(command.startswith("python multitask_classifier.py ") for command in commands)
    small = f" --model {tiny_checkpoint} --data small --epochs 1"
    lines = [shlex.join(shlex.split(command)[2:]) + small for command in commands]
    result = subprocess.run(
        [sys.executable, "-c", RUN_ALL, *lines], cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert sorted(path.name for path in (folder / "runs").iterdir()) == ["bilinear", "equal-norms"]
    return result.stdout


def test_the_examples_are_about_fifteen_lines() -> None:
    assert len(EXAMPLES) == 2
    for section in EXAMPLES:
        assert len(example(section).code.splitlines()) <= 18
        assert len(example(section).entry.splitlines()) == 1


def test_the_head_of_the_tutorial_is_trained(output: str) -> None:
    assert len(re.findall(r"^sts: .* \| head bilinear \| pairing bi \| loss mse$", output, flags=re.M)) == 2


def test_the_combiner_of_the_tutorial_is_used(output: str) -> None:
    assert output.count("sampler round_robin | combiner equal_norms | regularizer smart") == 2
    assert output.count("two steps of everything went through") == 2
