"""The pages of a report: one run, or several side by side, as a single HTML file without any other file or network.

`run_page` and `comparison_page` gather sections; report_template.html has the layout. Everything that comes from a file
(texts of the data, names, flags) is escaped by the template.
"""

import functools
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from flags import PROJECT
from intervals import Comparison, Interval, compare, compare_overall, overall_interval, score_interval
from records import (
    Record,
    by_recipe,
    comparable,
    dev_texts,
    differing_flags,
    paper_of,
    recipe_of,
    worst_rows,
)
from runs import Run
from tasks import TASKS, Predictions, Task
from utils import in_words, printable, write_text

TEMPLATE = PROJECT / "report_template.html"
PAGE = "report.html"
WORST = 12  # errors that are listed per task
LONGEST_TEXT = 400  # characters of a text that are shown


@dataclass
class Table:
    """Rows of text under a header; columns that hold numbers are aligned to the right."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    caption: str = ""
    texts: frozenset[int] = frozenset()  # columns with prose, whose direction follows from their first letter

    @property
    def numeric(self) -> list[bool]:
        """Which columns hold numbers, apart from missing ones."""
        columns = [[cell for cell in column if cell not in ("", "-")] for column in zip(*self.rows, strict=True)]
        return [bool(column) and all(_is_number(cell) for cell in column) for column in columns]


def _is_number(cell: str) -> bool:
    try:
        float(cell.split()[0].rstrip("%").replace(",", ""))
    except (ValueError, IndexError):
        return False
    return True


@dataclass
class Section:
    """A part of the page: plots side by side, then tables."""

    title: str
    intro: str = ""
    plots: list[Any] = field(default_factory=list)  # figures.Plot; matplotlib takes half a second to import
    tables: list[Table] = field(default_factory=list)

    @property
    def anchor(self) -> str:
        return "".join(c if c.isalnum() else "-" for c in self.title.lower())


class Card(NamedTuple):
    """A figure at the top of the page."""

    label: str
    value: str
    detail: str = ""


@dataclass
class Page:
    title: str
    subtitle: str
    cards: list[Card]
    sections: list[Section]
    notes: Sequence[str] = ()
    refresh: int = 0  # seconds after which a browser loads the page again; 0: never

    def write(self, path: Path) -> None:
        write_text(path, self.render())

    def render(self) -> str:
        return _template().render(page=self, written=time.strftime("%Y-%m-%d %H:%M"))

    @property
    def plots(self) -> list[Any]:
        return [plot for section in self.sections for plot in section.plots]


@functools.cache
def _template() -> Any:
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters["svg"] = lambda plot: jinja2.utils.markupsafe.Markup(plot.svg())
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8"))


def clipped(text: str, most: int = LONGEST_TEXT) -> str:
    """Text that changes nothing around it: control characters are escaped, and its length is bounded."""
    text = printable(text)
    return text if len(text) <= most else f"{text[:most]} …"


# --- one run ----------------------------------------------------------------------------------------------------------


def run_page(record: Record) -> Page:
    sections = [_curves(record), _gradients(record), *(_task(record, task) for task in record.tasks)]
    sections += [_cost(record), _origin(record)]
    status = "finished" if record.finished else "training" if record.epochs else "combined"
    total = record.flags.get("epochs")
    done = f"epoch {len(record.epochs)} of {total}" if record.epochs else ""
    known = {"encoder": record.flags.get("model"), "data": record.flags.get("data"), "seed": record.flags.get("seed")}
    parts = [status, done, *(f"{name} {value}" for name, value in known.items() if value is not None), _date(record)]
    return Page(
        clipped(record.name),
        clipped(" · ".join(part for part in parts if part)),
        _cards(record),
        [section for section in sections if section.plots or section.tables],
        [clipped(note) for note in record.notes],
        refresh=30 if status == "training" else 0,
    )


def _date(record: Record) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime((record.folder / "args.json").stat().st_mtime))
    except OSError:
        return ""


def _cards(record: Record) -> list[Card]:
    cards = []
    scored = {} if record.is_fitted_on_dev else record.all_scored
    for name, found in scored.items():
        cards.append(Card(name, f"{found.score:.3f}", _bounds(score_interval(found))))
    if len(scored) > 1:
        cards.append(Card("overall", f"{(found := overall_interval(scored)).score:.3f}", _bounds(found)))
    if not scored:
        found = _own_scores(record)
        where = str(record.ensemble.get("scored_on", "best epoch"))
        cards += [Card(name, f"{value:.3f}", where) for name, value in found.items()]
    if record.epochs:
        last, count = record.epochs[-1], len(record.epochs)
        cards.append(Card("time", in_words(last["seconds"]), f"{count} epoch{'s' * (count > 1)}"))
        peaks = [line["memory"] for line in record.epochs if line.get("memory")]
        cards += [Card("peak memory", f"{max(peaks) / 1e9:.1f} GB")] if peaks else []
    return cards


def _own_scores(record: Record) -> dict[str, float]:
    """The scores that the run itself has recorded: of its best epoch, or of an ensemble."""
    if record.finished:
        return Run(record.folder).scores()
    return record.best["scores"] if record.epochs else {}


def _bounds(found: Interval) -> str:
    return f"95%: {found.low:.3f} to {found.high:.3f}"


def _curves(record: Record) -> Section:
    import figures

    section, epochs = Section("Curves"), record.epochs
    if not epochs:
        return section
    names = list(dict.fromkeys(name for line in epochs for name in line["scores"]))
    tasks = list(dict.fromkeys(task for line in epochs for task in line["losses"]))
    if record.tasks:
        section.plots.append(figures.score_curve(epochs, names))
    else:  # figures of different kinds, such as a perplexity and a loss
        start = [{"epoch": 0, "scores": record.before, "train": {}}] if record.before else []
        section.plots += [figures.score_curve([*start, *epochs], [name], name) for name in names]
    section.plots += [figures.loss_curve(epochs, task, number) for number, task in enumerate(tasks)]
    if any(line["curve"].get("rates") for line in epochs):
        section.plots.append(figures.rate_curve(epochs))
    if any(value for line in epochs for value in line["penalties"].values()):
        section.plots.append(figures.penalty_curve(epochs, str(record.flags.get("regularizer"))))
    return section


def _gradients(record: Record) -> Section:
    import figures

    section = Section("Gradients of the tasks")
    if any(line["cosines"] for line in record.epochs):
        section.plots.append(figures.cosine_curve(record.epochs))
    if any(name.startswith("conflicts ") for line in record.epochs for name in line["gradients"]):
        section.plots.append(figures.conflict_curve(record.epochs))
    return section


def _task(record: Record, task: Task) -> Section:
    """Where the model is right and wrong on a task's dev rows."""
    found = record.predictions[task.name]
    section = Section(task.name, f"{len(found.ids):,} dev rows, predicted {_predictor(record)}")
    if task.predicts.num_classes:
        _add_classes(section, task, found)
    else:
        _add_numbers(section, task, found)
    section.tables.append(_errors(record, task, found))
    return section


def _predictor(record: Record) -> str:
    """What the predictions are of, and whether the rows had a say in it."""
    if record.is_fitted_on_dev:
        return (
            f"by an ensemble ({record.ensemble.get('method')}) whose weights were fitted on a part of these rows. Its "
            f"score is that on {record.ensemble.get('scored_on')}; the figures here are of all rows, and too good."
        )
    if record.ensemble:
        return f"by an ensemble ({record.ensemble.get('method')}), scored on {record.ensemble.get('scored_on')}."
    if record.predicted_at == "the best epoch":
        return (
            "with the weights of the best epoch. The epoch was chosen on these rows, so a new sample would score a "
            "little lower."
        )
    return f"with the weights of {record.predicted_at}."


def _add_classes(section: Section, task: Task, found: Predictions) -> None:
    from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

    import figures

    G = task.predicts.num_classes
    labels, values = found.labels.astype(int), found.values.astype(int)
    section.plots.append(figures.confusion(task, confusion_matrix(labels, values, labels=range(G))))
    section.plots.append(figures.class_shares(task, found))
    probabilities = task.predicts.log_probabilities(torch.from_numpy(found.logits).double()).exp().numpy()
    if G == 2:
        what = f'probability of "{task.names[1]}"'
        section.plots.append(figures.calibration(task, probabilities[:, 1], labels == 1, what))
    else:
        what = "probability of the predicted class"
        section.plots.append(figures.calibration(task, probabilities.max(axis=1), labels == values, what))
    columns = precision_recall_fscore_support(labels, values, labels=range(G), zero_division=0)
    means = precision_recall_fscore_support(labels, values, labels=range(G), average="macro", zero_division=0)[:3]
    rows = [
        [name, *(f"{x:.3f}" for x in row[:3]), f"{row[3]}"] for name, *row in zip(task.names, *columns, strict=True)
    ]
    rows.append(["mean of the classes", *(f"{x:.3f}" for x in means), f"{len(labels)}"])
    header = ["class", "precision", "recall", "F1", "rows"]
    section.tables.append(Table(header, rows, "Precision, recall and F1"))


def _add_numbers(section: Section, task: Task, found: Predictions) -> None:
    from scipy.stats import spearmanr

    import figures

    section.plots += [figures.scatter(task, found), figures.residuals(task, found), figures.histogram(task, found)]
    difference = found.values - found.labels
    varies = np.ptp(found.values) > 0 and np.ptp(found.labels) > 0
    figures_of_fit = {
        "Pearson's correlation": task.predicts.score(found.values, found.labels),
        "Spearman's rank correlation": float(spearmanr(found.values, found.labels).statistic) if varies else 0.0,
        "root mean squared error": math.sqrt(float(np.mean(difference**2))),
        "mean absolute error": float(np.mean(np.abs(difference))),
        "mean of the labels": float(found.labels.mean()),
        "mean of the predictions": float(found.values.mean()),
    }
    rows = [[name, f"{value:.3f}"] for name, value in figures_of_fit.items()]
    section.tables.append(Table(["figure", "value"], rows, "Fit"))


def _errors(record: Record, task: Task, found: Predictions) -> Table:
    """The worst predictions with their texts."""
    texts, names = dev_texts(record, task), task.names
    texts = texts if texts and texts.keys() >= set(found.ids) else None
    wrong = task.predicts.mistakes(torch.from_numpy(found.logits), torch.from_numpy(np.asarray(found.labels)))

    def shown(value: float) -> str:
        return f"{names[int(value)]} ({int(value)})" if names else f"{value:.2f}"

    rows = []
    for row in worst_rows(task, found, WORST):
        cells = [clipped(text) for text in texts[found.ids[row]]] if texts else [found.ids[row]]
        rows.append([*cells, shown(found.labels[row]), shown(found.values[row]), f"{float(wrong[row]):.2f}"])
    columns = list(task.text_columns) if texts else ["id"]
    measure = "confidence" if names else "distance"
    caption = "" if texts else "The dev file is not where it was, or has changed, so ids are shown instead of texts."
    header = [*columns, "label", "prediction", measure]
    title = "Most confident errors" if names else "Largest errors"
    return Table(header, rows, title, caption, frozenset(range(len(columns))))


def _cost(record: Record) -> Section:
    import figures

    section = Section("Time and memory")
    if not record.epochs:
        return section
    section.plots.append(figures.cost_curve(record.epochs))
    names = list(dict.fromkeys(name for line in record.epochs for name in line["scores"]))
    tasks = list(dict.fromkeys(task for line in record.epochs for task in line["losses"]))
    rows, before = [], 0.0
    for line in record.epochs:
        cells = [str(line["epoch"]), *(_cell(line["losses"].get(task)) for task in tasks)]
        cells += [_cell(line["scores"].get(name)) for name in names]
        memory = line.get("memory")
        cells += [f"{line['seconds'] - before:.0f}", f"{memory / 1e9:.2f}" if memory else "-"]
        rows.append([*cells, "best" if line.get("best") else ""])
        before = line["seconds"]
    header = ["epoch", *(f"{task} loss" for task in tasks), *names, "seconds", "GB", ""]
    section.tables.append(Table(header, rows, "Epochs"))
    return section


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _origin(record: Record) -> Section:
    """How the run was made: enough to make it again."""
    facts, versions = record.facts, record.facts.get("versions")
    command = facts.get("command")
    words = " ".join(map(str, command)) if isinstance(command, list) else "-"
    rows = [["command", words], ["commit", str(facts.get("commit"))], ["recipe", recipe_of(record) or "-"]]
    rows += [[name, str(version)] for name, version in versions.items()] if isinstance(versions, dict) else []
    given = [[f"--{key}", _flag(value)] for key, value in sorted(record.flags.items()) if value not in (None, [], "")]
    data = [[path, str(value)[:16]] for path, value in sorted(facts["data_sha256"].items())]
    return Section(
        "How it was made",
        tables=[
            Table(["", ""], _clipped(rows), "Origin"),
            Table(["file", "sha256 (start)"], _clipped(data), "Data"),
            Table(["flag", "value"], _clipped(given), "Flags"),
        ],
    )


def _flag(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _clipped(rows: list[list[str]]) -> list[list[str]]:
    return [[clipped(cell, 1000) for cell in row] for row in rows]


# --- several runs -----------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """A run in the leaderboard."""

    record: Record
    label: str
    scores: dict[str, Interval]  # by task, and overall
    against_first: dict[str, Comparison]  # by task, and overall; empty for the first run


def comparison_page(records: list[Record]) -> Page:
    """The runs in the order in which they were given; the first is what the others are compared with."""
    labels = _labels(records)
    rows = [_row(record, label, records[0]) for record, label in zip(records, labels, strict=True)]
    sections = [_leaderboard(rows), _seeds(records), _papers(rows), _overlays(rows), _differences(records, labels)]
    notes = [
        clipped(f"{label}: {note}") for record, label in zip(records, labels, strict=True) for note in record.notes
    ]
    notes += [
        f"{row.label}: its weights were fitted on a part of dev, so it has no intervals and no tests here."
        for row in rows
        if row.record.is_fitted_on_dev
    ]
    best = max((row for row in rows if "overall" in row.scores), key=lambda r: r.scores["overall"].score, default=None)
    cards = [Card("runs", str(len(records)))]
    if best is not None:
        cards.append(Card("best overall", f"{best.scores['overall'].score:.3f}", best.label))
    return Page(
        f"Comparison of {len(records)} runs",
        f"compared with {labels[0]}, on dev",
        cards,
        [section for section in sections if section.plots or section.tables],
        notes,
    )


def _labels(records: list[Record]) -> list[str]:
    """The names of the runs; with their directory where two have the same."""
    names = [record.name for record in records]
    return [clipped(n if names.count(n) == 1 else str(r.folder), 80) for n, r in zip(names, records, strict=True)]


def _row(record: Record, label: str, first: Record) -> Row:
    scored = {} if record.is_fitted_on_dev else record.all_scored
    scores = {name: score_interval(found) for name, found in scored.items()}
    if len(scored) > 1 and set(scored) == set(first.predictions):  # a mean over other tasks is another score
        scores["overall"] = overall_interval(scored)
    against: dict[str, Comparison] = {}
    if record is not first and not first.is_fitted_on_dev:
        same = [n for n in scored if n in first.predictions and _same_rows(record, first, n)]
        against = {name: compare(first.scored(TASKS[name]), scored[name]) for name in same}
        if len(scored) > 1 and set(same) == set(scored) == set(first.predictions):
            against["overall"] = compare_overall(first.all_scored, scored)
    return Row(record, label, scores, against)


def _same_rows(one: Record, other: Record, task: str) -> bool:
    return comparable(one.predictions[task], other.predictions[task])


def _leaderboard(rows: list[Row]) -> Section:
    names = list(dict.fromkeys(name for row in rows for name in row.scores))
    names = [n for n in names if n != "overall"] + ["overall"] * ("overall" in names)
    order = sorted(rows, key=lambda row: -row.scores[names[-1]].score if names and names[-1] in row.scores else 1)
    cells = [[row.label, *(str(row.scores[n]) if n in row.scores else "-" for n in names)] for row in order]
    caption = "On dev, with 95% bootstrap intervals, best first. Overall is that of runs with the first run's tasks."
    tables = [Table(["run", *names], cells, "Scores", caption)]
    others = [row for row in rows if row.against_first]
    if others:
        changes = [[row.label, *(_change(row.against_first.get(n)) for n in names)] for row in others]
        caption = (
            "Difference and p-value, on the same rows: McNemar's exact test for accuracies, the paired bootstrap for "
            "correlations and for overall. A star marks p < 0.05. With many comparisons, some stars are chance."
        )
        tables.append(Table(["run", *names], changes, f"Against {rows[0].label}", caption))
    intro = "" if names else "None of these runs has saved dev predictions, so there are no intervals and no tests."
    if not names:
        tables = [_plain_scores(rows)]
    return Section("Leaderboard", intro, tables=tables)


def _plain_scores(rows: list[Row]) -> Table:
    own = {row.label: _own_scores(row.record) for row in rows}
    names = list(dict.fromkeys(name for scores in own.values() for name in scores))
    cells = [[label, *(_cell(scores.get(name)) for name in names)] for label, scores in own.items()]
    return Table(["run", *names], cells, "Scores that the runs recorded")


def _change(found: Comparison | None) -> str:
    if found is None:
        return "-"
    p = f"{found.p:.3f}" if found.p >= 0.001 else "<0.001"
    difference = "0.000" if abs(found.difference) < 0.0005 else f"{found.difference:+.3f}"
    return f"{difference} (p {p}){'*' * (found.p < 0.05)}"


def _seeds(records: list[Record]) -> Section:
    """Runs that differ in their seed only, pooled."""
    groups = [group for group in by_recipe([record for record in records if record.epochs]) if len(group) > 1]
    names = list(dict.fromkeys(name for group in groups for record in group for name in record.best["scores"]))
    rows = []
    for group in groups:
        runs = ", ".join(record.name for record in group)
        seeds = ", ".join(str(record.flags.get("seed")) for record in group)
        means = [_mean_and_error([record.best["scores"].get(name) for record in group]) for name in names]
        rows.append([runs, recipe_of(group[0]) or "-", seeds, *means])
    caption = "Mean and standard error over the seeds, of each run's best epoch."
    header = ["runs", "recipe", "seeds", *names]
    return Section("Seeds", tables=[Table(header, _clipped(rows), "", caption)] if rows else [])


def _mean_and_error(values: list[float | None]) -> str:
    if None in values:
        return "-"
    return f"{statistics.fmean(values):.3f} ± {statistics.stdev(values) / math.sqrt(len(values)):.3f}"


def _papers(rows: list[Row]) -> Section:
    cells = []
    for row in rows:
        paper = paper_of(row.record)
        if paper is not None:
            names = [name for name in paper.scores if name in row.scores]
            theirs = " · ".join(f"{name} {value:.3f}" for name, value in paper.scores.items())
            ours = " · ".join(f"{name} {row.scores[name].score:.3f}" for name in names)
            cells.append([row.label, paper.citation, theirs, ours or "-"])
    caption = (
        "The papers used bert-base-uncased and the course's whole data. Their overall score may follow another formula "
        "(recipes/README.md)."
    )
    tables = [Table(["run", "paper", "its dev scores", "ours"], _clipped(cells), "", caption)] if cells else []
    return Section("The papers' figures", tables=tables)


def _overlays(rows: list[Row]) -> Section:
    import figures

    section = Section("Plots")
    names = list(dict.fromkeys(name for row in rows for name in row.scores))
    for name in names:
        of_name = [(row.label, row.scores[name]) for row in rows if name in row.scores]
        section.plots.append(figures.forest(name, of_name))
    logged = list(dict.fromkeys(n for row in rows for line in row.record.epochs for n in line["scores"]))
    for name in ("overall",) if "overall" in names else logged:
        shown = [row for row in rows if name not in names or name in row.scores]
        runs = [(r.label, r.record.epochs) for r in shown if any(name in line["scores"] for line in r.record.epochs)]
        section.plots += [figures.overall_curves(runs, name)] if runs else []
    return section


def _differences(records: list[Record], labels: list[str]) -> Section:
    rows = [[f"--{key}", *values] for key, values in differing_flags(records).items()]
    caption = "Flags that can change the result. The other ones are the same in all runs."
    tables = [Table(["flag", *labels], _clipped(rows), "", caption)] if rows else []
    intro = "" if rows else "The runs have the same flags."
    return Section("Flags in which the runs differ", intro, tables=tables)
