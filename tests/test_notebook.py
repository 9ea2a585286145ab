"""docs/colab.ipynb is executed from top to bottom, without the clone and with a tiny model."""

import json
import sys
from pathlib import Path

import nbformat
import pytest
from conftest import ROOT, write_task_files
from nbclient import NotebookClient

NOTEBOOK = ROOT / "docs" / "colab.ipynb"


def code_cells(notebook: nbformat.NotebookNode) -> dict[str, nbformat.NotebookNode]:
    """The code cells by their tag."""
    return {cell.metadata.tags[0]: cell for cell in notebook.cells if cell.cell_type == "code"}


def printed(cell: nbformat.NotebookNode) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def test_the_notebook_is_valid_and_has_no_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in code_cells(notebook).values():
        assert cell.outputs == []
        assert cell.execution_count is None


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> dict[str, nbformat.NotebookNode]:
    """The code cells after execution by this Python, in a directory that has the scripts and small data files."""
    folder = tmp_path_factory.mktemp("clone")
    for path in (*ROOT.glob("*.py"), ROOT / "report_template.html"):
        (folder / path.name).symlink_to(path)
    write_task_files(folder / "small")
    kernel = folder / "jupyter" / "kernels" / "this-python"
    kernel.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "", "language": "python"}))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cells = code_cells(notebook)
    cells["parameters"].source += f"\nFLAGS += ' --model {tiny_checkpoint} --data small --epochs 1'\nDATA = 'small'"
    cells["setup"].source = f"%cd {folder}\nPYTHON = {sys.executable!r}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINBERT_REPORT", "1")
        patch.setenv("JUPYTER_PATH", str(folder / "jupyter"))
        NotebookClient(notebook, timeout=120, kernel_name="this-python").execute()
    return cells


def test_the_notebook_trains_and_writes_what_it_says(executed: dict[str, nbformat.NotebookNode]) -> None:
    assert "best dev: sst" in printed(executed["train"])
    assert "no GPU" in printed(executed["gpu"]) or "driver_version" in printed(executed["gpu"])
    assert "error:" not in "".join(map(printed, executed.values()))


def test_the_notebook_scores_and_packs_the_predictions(executed: dict[str, nbformat.NotebookNode]) -> None:
    shown = printed(executed["scores"])
    assert "overall" in shown
    assert Path(shown.splitlines()[-1]).name == "predictions.zip"


def test_the_notebook_shows_the_report(executed: dict[str, nbformat.NotebookNode]) -> None:
    (output,) = executed["report"].outputs
    assert "<iframe srcdoc=" in output.data["text/html"]


def test_the_notebook_predicts_on_own_sentences(executed: dict[str, nbformat.NotebookNode]) -> None:
    shown = printed(executed["predict"])
    for task in ("sst", "para", "sts"):
        assert task in shown
