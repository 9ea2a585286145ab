"""report.py: the page of one run and of several, its numbers against other libraries, and a real browser."""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, Finished, the_error, write_task_files
from sklearn.metrics import f1_score, precision_score, recall_score
from test_multitask import run_multitask

import figures
import multitask_classifier
import observers
import pages
import pretrain
import report
from evaluation import write_logits
from pages import clipped, comparison_page, run_page
from records import (
    Paper,
    Record,
    by_recipe,
    dev_texts,
    differing_flags,
    find_runs,
    paper_of,
    read_record,
    worst_rows,
)
from runs import Run
from tasks import PARA, SST, STS, TASKS, Predictions
from training import Observer, Observers

pytestmark = pytest.mark.usefixtures("one_thread")
TUNED = ["--option", "finetune", "--lr", "1e-3", "--sampler", "round_robin", "--epochs", 2]
OLDER = ROOT / "tests" / "references" / "older_run" / "saved_runs"
HOSTILE = [
    "<script>document.title='hacked'</script><img src=x onerror=\"document.title='hacked'\">",
    "סרט נהדר \u202eabc .",
    "A 🎬 film\x1b[31m & \"quotes\" 'here' {{ 7 * 7 }} </td></table>",
    "فيلم رائع $\\frac{1}{2}$ \x07 .",
]


@pytest.fixture(scope="module")
def trained(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with three runs: PCGrad with SMART, and the plain sum with two seeds. Some dev texts are hostile."""
    folder = tmp_path_factory.mktemp("report")
    write_task_files(folder / "data", rows=16)
    for name, column in (("ids-sst-dev.csv", 2), ("quora-dev.csv", 2), ("sts-dev.csv", 3)):
        lines = (folder / "data" / name).read_text().splitlines()
        for i, text in enumerate(HOSTILE, start=1):
            cells = lines[i].split("\t")
            cells[column] = '"' + text.replace('"', '""') + '"'
            lines[i] = "\t".join(cells)
        (folder / "data" / name).write_text("\n".join(lines) + "\n")
    surgery = ["--combiner", "pcgrad", "--regularizer", "smart", "--head_lr", "1e-2", "--schedule", "linear"]
    for name, flags in {
        "surgery": [*surgery, "--report", "--tensorboard"],
        "sum-1": ["--log_gradients", "--seed", 1, "--no-report"],
        "sum-2": ["--log_gradients", "--seed", 2, "--no-report"],
    }.items():
        run_multitask(folder, tiny_checkpoint, *TUNED, *flags, "--name", name)
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run with all extensions, to be damaged."""
    return Path(shutil.copytree(trained / "runs" / "surgery", tmp_path / "surgery"))


class Document(HTMLParser):
    """The elements and the visible text of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.hidden = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        self.hidden += tag in ("style", "script")

    def handle_endtag(self, tag: str) -> None:
        self.hidden -= tag in ("style", "script")

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


SECTIONS = ["Curves", "Gradients of the tasks", "sst", "para", "sts", "Time and memory", "How it was made"]


# --- one run ----------------------------------------------------------------------------------------------------------


def test_training_leaves_a_page_with_every_section(trained: Path) -> None:
    page = Document((trained / "runs" / "surgery" / "report.html").read_text())
    headings = re.findall(r"<h2>(.*?)</h2>", (trained / "runs" / "surgery" / "report.html").read_text())
    assert headings == SECTIONS
    for title in (
        "Dev and training scores", "Training loss, sst", "Learning rate", "Penalty of the regularizer",
        "Gradient cosines between tasks", "Conflicts between tasks", "Confusion matrix, sst",
        "Labels and predictions, sst", "Calibration, para", "Predictions against labels, sts", "Residuals, sts",
        "Time and memory", "Precision, recall and F1", "Most confident errors", "Largest errors", "Epochs", "Flags",
    ):  # fmt: skip
        assert title in page.text, title
    assert "finished · epoch 2 of 2" in page.text
    assert "weights of the best epoch" in page.text
    assert "http-equiv" not in str(page.tags), "a finished run does not change any more"


def test_the_page_needs_no_other_file_and_no_network(trained: Path) -> None:
    page = Document((trained / "runs" / "surgery" / "report.html").read_text())
    assert not [tag for tag, _ in page.tags if tag in ("script", "iframe", "object", "embed", "img", "base")]
    for tag, attributes in page.tags:
        for name in ("href", "src", "xlink:href", "srcset", "action"):
            assert (attributes.get(name) or "#").startswith(("#", "data:,")), (tag, attributes)
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids)), "several plots share a page, but an id may appear once"
    targets = {attributes.get("xlink:href") or attributes.get("href") for _, attributes in page.tags} - {None, "data:,"}
    assert targets <= {f"#{name}" for name in ids}


def test_texts_of_the_data_are_shown_as_text(trained: Path) -> None:
    source = (trained / "runs" / "surgery" / "report.html").read_text()
    assert "<script" not in source
    assert "\x1b" not in source
    assert "\x07" not in source
    record = read_record(trained / "runs" / "surgery")
    everything = [tuple(row) for task in record.tasks for row in dev_texts(record, task).values()]
    hostile = [text for row in everything for text in row if any(part in text for part in HOSTILE)]
    assert len(hostile) == 12
    for task in (SST, PARA, STS):
        found = record.predictions[task.name]
        wrong = found.logits.copy()
        wrong[:4] = wrong[:4] + 50  # the hostile rows become the worst ones
        changed = found._replace(logits=wrong)
        table = pages._errors(record, task, changed)
        assert len(table.rows) <= pages.WORST
    table = pages.Table(["text"], [[clipped(text)] for text in HOSTILE], texts=frozenset({0}))
    shown = Document(pages.Page("t", "s", [], [pages.Section("x", tables=[table])]).render())
    assert "<script>document.title='hacked'</script>" in shown.text
    assert "{{ 7 * 7 }} </td></table>" in shown.text
    assert "🎬" in shown.text
    assert "סרט נהדר" in shown.text
    assert "film\\x1b[31m" in shown.text


def test_the_tables_agree_with_scikit_learn(trained: Path) -> None:
    record = read_record(trained / "runs" / "surgery")
    found = record.predictions["sst"]
    (section,) = [s for s in run_page(record).sections if s.title == "sst"]
    table = next(t for t in section.tables if t.title.startswith("Precision"))
    for average, measure in enumerate((precision_score, recall_score, f1_score), start=1):
        expected = measure(found.labels, found.values, labels=range(5), average=None, zero_division=0)
        assert [row[average] for row in table.rows[:5]] == [f"{x:.3f}" for x in expected]
        macro = measure(found.labels, found.values, labels=range(5), average="macro", zero_division=0)
        assert table.rows[5][average] == f"{macro:.3f}"
    assert [row[0] for row in table.rows[:5]] == list(SST.names)


def test_the_cards_show_the_run_s_own_scores(trained: Path) -> None:
    record = read_record(trained / "runs" / "surgery")
    cards = {card.label: card for card in run_page(record).cards}
    for name, value in json.loads((record.folder / "dev.json").read_text()).items():
        assert cards[name].value == f"{value:.3f}"
        assert re.fullmatch(r"95%: -?\d\.\d{3} to \d\.\d{3}", cards[name].detail)
    assert cards["peak memory"].value.endswith("GB")


def test_the_worst_rows_are_the_confident_errors() -> None:
    logits = np.array([[5.0], [-4.0], [0.1], [-3.0]], dtype=np.float32)  # says yes, no, yes, no
    found = Predictions(list("abcd"), logits, np.array([1, 0, 1, 0]), np.array([1, 1, 0, 1]))
    assert worst_rows(PARA, found, 9) == [1, 3, 2]
    numbers = np.array([[1.0], [5.0], [2.0]], np.float32)
    assert worst_rows(STS, Predictions(list("abc"), numbers, numbers[:, 0], np.array([1, 1, 3.0])), 9) == [1, 2]
    grades = np.zeros((2, 5), np.float32)
    grades[:, 4] = [9, 1]
    assert worst_rows(SST, Predictions(["a", "b"], grades, np.array([4, 4]), np.array([0, 0])), 9) == [0, 1]


def test_the_calibration_error_is_zero_where_probabilities_are_right_and_known_otherwise() -> None:
    generator = np.random.default_rng(0)
    p = generator.uniform(0, 1, 200_000)
    assert figures.expected_calibration_error(p, generator.random(len(p)) < p) < 0.01
    assert figures.expected_calibration_error(np.full(10, 0.9), np.arange(10) < 5) == pytest.approx(0.4)


def test_a_run_that_trains_shows_its_last_epoch_and_loads_itself_again(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    epoch = observers.Reporter.epoch

    def spy(self: observers.Reporter, *news: object) -> None:
        epoch(self, *news)
        seen.append((self.run.folder / "report.html").read_text())

    monkeypatch.setattr(observers.Reporter, "epoch", spy)
    monkeypatch.setattr(observers, "SHARE", 0)
    done = run_multitask(tmp_path, tiny_checkpoint, *TUNED, "--report")
    assert len(seen) == 2
    assert "training · epoch 1 of 2" in seen[0]
    assert "weights of epoch 2." in seen[1]
    assert 'http-equiv="refresh"' in seen[0]
    assert f"report: {done.run / 'report.html'}\n" in done.out


def test_a_page_that_cannot_be_written_does_not_end_the_training(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pages.Page, "write", lambda *_: 1 / 0)
    done = run_multitask(tmp_path, tiny_checkpoint, *TUNED, "--report")
    assert len(done.log()) == 2
    assert (done.run / "dev.json").is_file()
    assert "report:" not in done.out


def test_an_observer_that_fails_is_left_out_with_one_note(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken(Observer):
        what = "drawing"

        def epoch(self, step: int, line: object) -> None:
            raise OSError("no space left")

    told = []

    class Listening(Observer):
        def epoch(self, step: int, line: object) -> None:
            told.append(step)

    both = Observers([Broken(), Listening()])
    both.epoch(1, {})
    both.epoch(2, {})
    assert told == [1, 2]
    assert capsys.readouterr().err.count("note: drawing failed and is left out (OSError: no space left)") == 1


def test_pretraining_has_a_page_too(tiny_checkpoint: Path, tmp_path: Path, run_main: Callable[..., Finished]) -> None:
    write_task_files(tmp_path / "data", rows=40)
    flags = ["--model", tiny_checkpoint, "--data", tmp_path / "data", "--runs", tmp_path / "runs", "--name", "p"]
    done = run_main(pretrain, *flags, "--objective", "mlm", "--epochs", 1, "--batch_size", 8, "--report")
    assert done.status == 0, done.err
    page = Document((tmp_path / "runs" / "p" / "report.html").read_text())
    assert "perplexity" in page.text
    assert "Training loss, mlm" in page.text


def test_report_py_writes_the_page_and_every_plot_as_png(run: Path, run_main: Callable[..., Finished]) -> None:
    (run / "report.html").unlink()
    done = run_main(report, run)
    assert done.status == 0, done.err
    plots = sorted((run / "plots").glob("*.png"))
    assert len(plots) == len(run_page(read_record(run)).plots)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in plots)
    assert f"wrote {run / 'report.html'} and {len(plots)} plots in {run / 'plots'}" in done.out


def test_the_same_run_gives_the_same_plots(trained: Path) -> None:
    record = read_record(trained / "runs" / "surgery")
    one, other = ([plot.svg() for plot in run_page(record).plots[:3]] for _ in range(2))
    assert one == other


def test_colors_in_a_plot_are_the_pages_own(trained: Path) -> None:
    """Dark and light themes, and printing, change the variables only."""
    for plot in run_page(read_record(trained / "runs" / "surgery")).plots:
        assert not set(re.findall(r"#[0-9a-f]{6}\b", plot.svg())) & {*figures.SERIES, figures.INK, figures.FAINT}
    template = (ROOT / "report_template.html").read_text()
    for number in range(len(figures.SERIES) + 2):
        assert template.count(f"--color-{number}:") == 3


# --- several runs -----------------------------------------------------------------------------------------------------


def test_several_runs_are_compared_with_the_first(
    trained: Path, tmp_path: Path, run_main: Callable[..., Finished]
) -> None:
    folders = [trained / "runs" / name for name in ("sum-1", "sum-2", "surgery")]
    done = run_main(report, *folders, "--out", tmp_path / "out")
    assert done.status == 0, done.err
    page = Document((tmp_path / "out" / "report.html").read_text())
    for title in ("Leaderboard", "Against sum-1", "Seeds", "Flags in which the runs differ", "Intervals of overall"):
        assert title in page.text
    assert "--combiner" in page.text
    assert "pcgrad" in page.text
    assert "McNemar" in page.text


def test_runs_that_differ_in_their_seed_only_are_pooled(trained: Path) -> None:
    records = [read_record(trained / "runs" / name) for name in ("sum-1", "surgery", "sum-2")]
    assert [[record.name for record in group] for group in by_recipe(records)] == [["sum-1", "sum-2"], ["surgery"]]
    (table,) = pages._seeds(records).tables
    assert table.rows[0][:3] == ["sum-1, sum-2", "-", "1, 2"]
    values = [record.best["scores"]["sst"] for record in (records[0], records[2])]
    expected = f"{np.mean(values):.3f} ± {np.std(values, ddof=1) / np.sqrt(2):.3f}"
    assert table.rows[0][table.header.index("sst")] == expected


def test_only_flags_that_can_change_the_result_are_compared(trained: Path) -> None:
    records = [read_record(trained / "runs" / name) for name in ("sum-1", "surgery")]
    found = differing_flags(records)
    assert found["combiner"] == ["sum", "pcgrad"]
    assert found["seed"] == ["1", "11711"]
    assert not {"name", "report", "tensorboard", "sst_dev_out", "predictions"} & set(found)


def test_a_run_on_other_rows_has_no_paired_test(trained: Path, run: Path) -> None:
    first = read_record(trained / "runs" / "sum-1")
    found = first.predictions["sst"]
    write_logits(run / "sst-dev.npz", found._replace(ids=[f"other{i}" for i in range(len(found.ids))]))
    row = pages._row(read_record(run), "surgery", first)
    assert set(row.against_first) == {"para", "sts"}, "neither sst nor overall"
    assert comparison_page([first, read_record(run)]).render()


@pytest.mark.parametrize(
    ("recipe", "scores"),
    [
        ("recipes/smarter/cross-pcgrad-smart2.txt", {"sst": 0.5, "para": 0.825, "sts": 0.843, "overall": 0.748}),
        ("recipes/robust/2-dropout.txt", {"sst": 0.53, "para": 0.41, "sts": -0.043, "overall": 0.299}),
        ("recipes/stems/sst-mlp-full.txt", {"sst": 0.476}),
        ("recipes/best.txt", None),
        ("../../etc/passwd", None),
        ("recipes/missing.txt", None),
    ],
)
def test_a_papers_figures_stand_beside_its_recipe(recipe: str, scores: dict | None) -> None:
    record = Record(Path("runs/x"), {"args": {}, "data_sha256": {}, "command": ["x.py", f"@{recipe}"]}, [], True)
    paper = paper_of(record)
    assert (paper and paper.scores) == scores
    assert paper is None or (isinstance(paper, Paper) and "(" in paper.citation)


def test_every_row_of_a_paper_with_figures_is_found() -> None:
    texts = {path: path.read_text() for path in (ROOT / "recipes").rglob("*.txt")}
    with_figures = [
        path for path, text in texts.items() if re.search(r"^# Dev: \w+ -?\.", text, flags=re.M) and "# Paper" in text
    ]
    assert len(with_figures) > 30
    for path in with_figures:
        command = ["x.py", f"@{path.relative_to(ROOT)}"]
        paper = paper_of(Record(Path("x"), {"args": {}, "data_sha256": {}, "command": command}, [], True))
        assert paper is not None, path
        assert set(paper.scores) <= {*TASKS, "overall"}, path
        assert paper.scores, path


def test_the_name_of_part_1_stands_for_its_tasks(tmp_path: Path) -> None:
    for name in ("sst", "cfimdb"):
        (tmp_path / "part1" / name).mkdir(parents=True)
        (tmp_path / "part1" / name / "args.json").write_text("{}")
    assert find_runs([tmp_path / "part1"]) == [tmp_path / "part1" / "sst", tmp_path / "part1" / "cfimdb"]
    assert find_runs([tmp_path / "other"]) == [tmp_path / "other"]


# --- older, damaged and incomplete runs -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["finished", "interrupted"])
def test_a_run_of_an_older_version_has_a_page(name: str) -> None:
    text = Document(run_page(read_record(OLDER / name)).render()).text
    assert "Training loss, sst" in text
    assert ("Confusion matrix, sst" in text) == (name == "finished")


def test_a_run_without_a_log_is_refused(run: Path, run_main: Callable[..., Finished]) -> None:
    (run / "log.jsonl").unlink()
    assert run_page(read_record(run)).sections, "predictions alone have a page, as those of an ensemble"
    for path in run.glob("*.npz"):
        path.unlink()
    error = the_error(run_main(report, run))
    assert "must be a run that has logged an epoch" in error


def test_something_that_is_not_a_run_is_refused(tmp_path: Path, run_main: Callable[..., Finished]) -> None:
    assert "no such directory" in the_error(run_main(report, tmp_path / "missing"))
    assert "has no args.json" in the_error(run_main(report, tmp_path))


def test_an_incomplete_last_line_of_the_log_is_left_out(run: Path) -> None:
    log = run / "log.jsonl"
    log.write_text(log.read_text() + '{"epoch": 3, "losses": {"s')
    record = read_record(run)
    assert "log.jsonl line 3 is incomplete" in run_page(record).notes[0]
    assert len(record.epochs) == 2


@pytest.mark.parametrize(
    "line", ['{"epoch": "one"}', "[]", "nonsense", '{"epoch": 1, "seconds": 2, "losses": {"sst": "x"}}']
)
def test_a_damaged_log_is_refused_with_its_line(line: str, run: Path, run_main: Callable[..., Finished]) -> None:
    log = run / "log.jsonl"
    log.write_text(line + "\n" + log.read_text())
    assert f"{log} line 1" in the_error(run_main(report, run))


def test_damaged_predictions_are_left_out_with_a_note(run: Path, run_main: Callable[..., Finished]) -> None:
    (run / "sst-dev.npz").write_bytes(b"PK\x03\x04 not an archive")
    done = run_main(report, run)
    assert done.status == 0
    assert "sst-dev.npz: cannot be read as logits" in done.err
    assert "Confusion matrix, sst" not in (run / "report.html").read_text()
    assert "Confusion matrix, para" in (run / "report.html").read_text()


def test_a_dev_file_that_has_changed_is_not_shown(trained: Path, tmp_path: Path) -> None:
    record = read_record(trained / "runs" / "surgery")
    facts = dict(record.facts) | {"data_sha256": dict.fromkeys(record.facts["data_sha256"], "0" * 64)}
    changed = Record(record.folder, facts, record.epochs, True, record.predictions)
    assert dev_texts(changed, SST) is None
    assert "ids are shown instead of texts" in pages._errors(changed, SST, record.predictions["sst"]).caption


def test_a_bad_run_among_several_is_left_out_with_a_note(
    trained: Path, run: Path, tmp_path: Path, run_main: Callable[..., Finished]
) -> None:
    good = [trained / "runs" / "sum-1", trained / "runs" / "sum-2"]
    done = run_main(report, *good, tmp_path / "missing", "--out", tmp_path / "out")
    assert done.status == 0
    assert "missing: no such directory" in done.err
    assert "Comparison of 2 runs" in (tmp_path / "out" / "report.html").read_text()


def test_constant_and_perfect_predictions_have_a_page(run: Path) -> None:
    record = read_record(run)
    for task in record.tasks:
        found = record.predictions[task.name]
        flat = np.zeros_like(found.logits)
        values = task.predicts.decode(torch.from_numpy(flat)).numpy()
        constant = found._replace(logits=flat, values=values)
        right = found._replace(values=found.labels.astype(values.dtype))
        one = Predictions(found.ids[:1], flat[:1], values[:1], found.labels[:1])
        for predictions in (constant, right, one):
            changed = Record(run, record.facts, record.epochs, True, {task.name: predictions})
            assert all(plot.svg() for plot in pages._task(changed, task).plots)
            assert pages._cards(changed)


# --- TensorBoard ------------------------------------------------------------------------------------------------------


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_reads_the_events(trained: Path) -> None:
    found = scalars(trained / "runs" / "surgery" / "tensorboard")
    log = read_record(trained / "runs" / "surgery").epochs
    assert [step for step, _ in found["dev/overall"]] == [6, 12]
    assert [value for _, value in found["dev/overall"]] == pytest.approx([line["scores"]["overall"] for line in log])
    assert [step for step, _ in found["loss/sst"]] == [1, 6, 12]
    assert {"rate/lowest", "penalty/sst", "gradient/cosine_para_sst", "train/sts", "cost/minutes"} <= set(found)


def test_a_resumed_run_hides_the_events_that_are_made_again(tmp_path: Path) -> None:
    from trainer import Point

    first = observers.EventWriter(tmp_path / "t")
    first.start(0)
    for step in range(1, 6):
        first.point(step, Point(step, (1.0, 1.0), {"sst": float(step)}))
    first.writer.close()
    second = observers.EventWriter(tmp_path / "t")
    second.start(3)
    second.point(4, Point(4, (1.0, 1.0), {"sst": 40.0}))
    second.writer.close()
    assert scalars(tmp_path / "t")["loss/sst"] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
    third = observers.EventWriter(tmp_path / "t")
    third.start(0)
    third.writer.close()
    assert scalars(tmp_path / "t") == {}, "a run that starts again"


# --- a real browser ---------------------------------------------------------------------------------------------------

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PROBE = """<script>
window.problems = [];
addEventListener("error", e => problems.push(String(e.message)));
addEventListener("load", () => {
  const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  const clashes = [];
  for (const svg of document.querySelectorAll("svg")) {
    const boxes = [...svg.querySelectorAll("text")].map(t => [t.textContent, t.getBoundingClientRect()]);
    for (let i = 0; i < boxes.length; i++) for (let j = i + 1; j < boxes.length; j++) {
      const [a, b] = [boxes[i][1], boxes[j][1]];
      const x = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const y = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (x > 2 && y > 4) clashes.push(svg.getAttribute("aria-label") + ": " + boxes[i][0] + " / " + boxes[j][0]);
    }
  }
  const sections = [...document.querySelectorAll("h2")].map(h => h.textContent);
  const sizes = [...document.querySelectorAll("figure svg")].map(s => s.getBoundingClientRect().width);
  document.body.innerHTML = "<pre id=probe></pre>";
  document.getElementById("probe").textContent = "PROBE" + JSON.stringify(
    {title: document.title, problems, wide, clashes, sections, sizes}) + "END";
});
</script>"""


def in_chromium(page: Path, width: int, folder: Path) -> dict:
    """What a browser finds on the page at this width: its title, errors, sections, texts that overlap."""
    probed = folder / f"probed-{width}.html"
    probed.write_text(page.read_text().replace("<head>", f"<head>{PROBE}"))
    flags = [
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--dump-dom",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr",
        f"--user-data-dir={folder / 'profile'}", f"--window-size={width},900",
    ]  # fmt: skip
    done = subprocess.run([CHROMIUM, *flags, probed.as_uri()], capture_output=True, text=True, timeout=120)
    found = re.search(r'id="probe">PROBE(.*?)END', done.stdout, flags=re.S)
    assert found, done.stderr[-2000:]
    text = found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    return json.loads(text) | {"console": [line for line in done.stderr.splitlines() if "CONSOLE" in line]}


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_the_page_without_errors_and_without_overlaps(
    trained: Path, tmp_path: Path, width: int
) -> None:
    found = in_chromium(trained / "runs" / "surgery" / "report.html", width, tmp_path)
    assert found["title"] == "surgery", "no text of the data ran as a script"
    assert found["problems"] == found["console"] == []
    assert found["sections"] == SECTIONS
    assert found["wide"] <= 0, "the page is not wider than the window"
    assert found["clashes"] == []
    assert min(found["sizes"]) > 250


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")
def test_a_browser_shows_a_comparison(trained: Path, tmp_path: Path, run_main: Callable[..., Finished]) -> None:
    folders = [trained / "runs" / name for name in ("sum-1", "sum-2", "surgery")]
    assert run_main(report, *folders, "--out", tmp_path).status == 0
    found = in_chromium(tmp_path / "report.html", 390, tmp_path)
    assert found["problems"] == found["console"] == found["clashes"] == []
    assert found["wide"] <= 0


def test_the_page_of_a_run_can_be_turned_off(trained: Path) -> None:
    assert not (trained / "runs" / "sum-1" / "report.html").exists()


def test_reading_a_record_changes_nothing(trained: Path) -> None:
    folder = trained / "runs" / "sum-2"
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    run_page(read_record(folder)).render()
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    assert Run(folder).finished


# --- found by review --------------------------------------------------------------------------------------------------


def test_only_runs_on_the_same_data_with_different_seeds_are_pooled(trained: Path) -> None:
    one, surgery = (read_record(trained / "runs" / name) for name in ("sum-1", "surgery"))
    assert len(by_recipe([one, one])[0]) == 1, "a copy of a run is not another seed"
    other = dict(one.facts) | {"args": dict(one.flags) | {"seed": 5}, "data_sha256": {"data/other.csv": "0"}}
    assert len(by_recipe([one, Record(Path("x"), other, one.epochs, True)])) == 2
    assert not pages._seeds([one, one, surgery]).tables


def test_a_name_from_a_log_is_neither_markup_nor_a_path(run: Path, tmp_path: Path) -> None:
    for name in ('x"><script>alert(1)</script>', "x/../../../../escaped", "a\\q", "ß $x$"):
        lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
        for line in lines:
            line["losses"] = {name: 1.0}
            line["curve"]["losses"] = {name: [1.0] * len(line["curve"]["step"])}
        changed = Record(run, {"args": {}, "data_sha256": {}}, lines, True)
        page = run_page(changed)
        assert "<script" not in page.render()
        (plot,) = [plot for plot in page.plots if plot.name.startswith("loss-")]
        assert plot.save_png(tmp_path).parent == tmp_path
        assert [path.parent for path in tmp_path.rglob("*.png")] == [tmp_path] * len(list(tmp_path.rglob("*.png")))


@pytest.mark.parametrize(
    "change",
    [
        {"curve": []}, {"cosines": []}, {"memory": "x"}, {"curve": {"losses": [1]}},
        {"curve": {"step": [0], "rates": [[1.0], [1.0]], "losses": {}}},
        {"curve": {"step": [1, 2], "rates": [[1.0], [1.0]], "losses": {}}},
        {"cosines": {"a b": "x"}},
    ],
)  # fmt: skip
def test_a_log_whose_curves_do_not_fit_is_refused(change: dict, run: Path, run_main: Callable[..., Finished]) -> None:
    lines = (run / "log.jsonl").read_text().splitlines()
    (run / "log.jsonl").write_text("\n".join([json.dumps(json.loads(lines[0]) | change), lines[1]]) + "\n")
    assert "log.jsonl line 1: must be an epoch's log" in the_error(run_main(report, run))


def test_an_ensemble_that_was_fitted_on_dev_has_no_interval_and_no_test(trained: Path, run: Path) -> None:
    facts = {"method": "weighted", "scored_on": "the half of dev that no weight was fitted on"}
    (run / "ensemble.json").write_text(json.dumps(facts))
    record, first = read_record(run), read_record(trained / "runs" / "sum-1")
    page = run_page(record)
    assert {card.detail for card in page.cards if card.label in record.predictions} == {facts["scored_on"]}
    assert "fitted on a part of these rows" in next(s for s in page.sections if s.title == "sst").intro
    row = pages._row(record, "ensemble", first)
    assert row.scores == row.against_first == {}
    assert "fitted on a part of dev" in comparison_page([first, record]).notes[0]
    assert pages._row(first, "run", record).against_first == {}, "nor is anything compared with it"
    (run / "log.jsonl").unlink()  # an ensemble has none
    assert comparison_page([read_record(run), read_record(run)]).sections


def test_overall_is_compared_among_runs_with_the_same_tasks_only(trained: Path) -> None:
    first, other = (read_record(trained / "runs" / name) for name in ("sum-1", "sum-2"))
    fewer = Record(other.folder, other.facts, other.epochs, True, {k: other.predictions[k] for k in ("sst", "para")})
    assert "overall" in pages._row(other, "x", first).scores
    assert "overall" not in pages._row(fewer, "x", first).scores
    assert "overall" not in pages._row(fewer, "x", first).against_first


def test_the_time_of_a_run_does_not_include_that_of_its_page(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observers.Reporter, "epoch", lambda *_: time.sleep(1.5))
    done = run_multitask(tmp_path, tiny_checkpoint, *TUNED, "--report")
    first, second = done.log()
    assert second["seconds"] - first["seconds"] < 1.5


def test_short_epochs_do_not_get_a_page_each(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    reporter = observers.Reporter(Run(trained / "runs" / "sum-1"), dict)
    monkeypatch.setattr(observers.Reporter, "_write", lambda self, record: (time.sleep(0.05), written.append(1)))
    for _ in range(5):
        reporter.epoch(1, {})
    assert len(written) == 1
    reporter.end()
    assert len(written) == 2, "the last page is always written"


def test_the_starters_function_leaves_a_finished_page(tiny_checkpoint: Path, tmp_path: Path) -> None:
    write_task_files(tmp_path / "data")
    flags = ["--model", tiny_checkpoint, "--data", tmp_path / "data", "--runs", tmp_path, "--name", "r", "--epochs", 1]
    multitask_classifier.train_multitask(multitask_classifier.get_args([*map(str, flags), "--report"]))
    page = (tmp_path / "r" / "report.html").read_text()
    assert "finished · epoch 1 of 1" in page
    assert "Confusion matrix, sst" in page
