"""The plots of a report, by matplotlib: each is saved as PNG, and as SVG whose colors follow the page's theme.

All plots share one size, so that text has the same size in all of them, also on a phone. Series are told apart by color
(the palette of Okabe & Ito, which color-blind people can distinguish), by line style and by marker.
"""

import html
import io
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from intervals import Interval
from tasks import Predictions, Task
from utils import atomic_path

SIZE = (4.6, 3.1)  # inches; the page shows an inch as 96 pixels, and scales a plot to at most its own width
INK, FAINT = "#1f2328", "#d0d7de"  # text and axes; grid
# Okabe & Ito 2008, without yellow and black, which are too close to the backgrounds of the two themes.
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
STYLES, MARKERS = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1))), "os^Dv*"
SETTINGS = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "text.parse_math": False,  # the name of a run may have a $
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "svg.fonttype": "none",  # text stays text: it can be selected, and read aloud
    "svg.hashsalt": "minbert",  # the same plot has the same bytes
}


@dataclass(frozen=True)
class Plot:
    """A figure with what a reader needs to understand it."""

    name: str
    title: str
    caption: str
    figure: Figure

    @property
    def slug(self) -> str:
        """The name as it can be in a file's name and in HTML: it may come from a run of somebody else."""
        return re.sub(r"[^A-Za-z0-9_-]", "-", self.name)[:80]

    def svg(self) -> str:
        """The figure as an element for an HTML page; colors are the page's variables."""
        text = io.StringIO()
        with matplotlib.rc_context(SETTINGS):
            self.figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
        drawn = text.getvalue().partition("<svg ")[2]
        for number, color in enumerate((*SERIES, INK, FAINT)):
            drawn = drawn.replace(color, f"var(--color-{number})")
        # Several figures share a page, and an id may appear there once.
        drawn = re.sub(r'\bid="|url\(#|xlink:href="#', lambda found: f"{found[0]}{self.slug}-", drawn)
        return f'<svg role="img" aria-label="{html.escape(self.title)}" {drawn}'

    def save_png(self, folder: Path) -> Path:
        path = folder / f"{self.slug}.png"
        with atomic_path(path) as temporary, matplotlib.rc_context(SETTINGS):
            self.figure.savefig(temporary, format="png", dpi=150)
        return path


@contextmanager
def _axes(size: tuple[float, float] = SIZE) -> Iterator[tuple[Figure, Axes]]:
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=size, layout="constrained")
        yield figure, figure.subplots()


def _legend(axes: Axes) -> None:
    """Above the plot, where it covers nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        columns = max(1, 64 // (max(map(len, labels)) + 7))  # about 64 characters fit side by side
        axes.figure.legend(handles, labels, loc="outside upper left", ncols=min(len(labels), columns))


def _whole_epochs(axes: Axes) -> None:
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))


# --- curves -----------------------------------------------------------------------------------------------------------

Epochs = Sequence[Mapping[str, Any]]  # lines of the log


def _positions(epochs: Epochs) -> list[float]:
    """Where the points of all epochs' curves lie on an axis of epochs."""
    return [
        line["epoch"] - 1 + step / max(line["curve"]["step"])
        for line in epochs
        for step in line["curve"].get("step", ())
    ]


def loss_curve(epochs: Epochs, task: str, number: int) -> Plot:
    """A task's training loss. number: of its color."""
    color, style = SERIES[number % len(SERIES)], STYLES[number % len(STYLES)]
    with _axes() as (figure, axes):
        places = _positions(epochs)
        values = [
            value
            for line in epochs
            if line["curve"].get("step")
            for value in line["curve"]["losses"].get(task, [None] * len(line["curve"]["step"]))
        ]
        axes.plot(
            places,
            np.array(values, dtype=float),
            color=color,
            alpha=0.55,
            linewidth=1,
            label="mean since the last point",
        )
        ended = [(line["epoch"] - 0.5, line["losses"][task]) for line in epochs if task in line["losses"]]
        axes.plot(*zip(*ended, strict=True), color=color, linestyle=style, marker="o", label="mean of the epoch")
        axes.set_ylabel(f"training loss of {task}")
        _whole_epochs(axes)
        _legend(axes)
    caption = "Includes what the regularizer adds. A loss that falls while the dev score does not is overfitting."
    return Plot(f"loss-{task}", f"Training loss, {task}", caption, figure)


def score_curve(epochs: Epochs, names: Sequence[str], what: str = "dev and training scores") -> Plot:
    """Dev scores, and those of the training rows where they were recorded."""
    with _axes() as (figure, axes):
        for number, name in enumerate(names):
            style = {"color": SERIES[number % len(SERIES)], "marker": MARKERS[number % len(MARKERS)]}
            axes.plot([e["epoch"] for e in epochs], [e["scores"].get(name) for e in epochs], label=name, **style)
            seen = [(e["epoch"], e["train"][name]) for e in epochs if name in e["train"]]
            if seen:
                style |= {"linestyle": ":", "alpha": 0.7, "markerfacecolor": "none"}
                axes.plot(*zip(*seen, strict=True), **style)
        best = max((e["epoch"] for e in epochs if e.get("best")), default=None)
        if best is not None:
            axes.axvline(best, color=INK, linewidth=0.8, linestyle=(0, (2, 3)))
        axes.set_ylabel("score" if len(names) > 1 else names[0])
        _whole_epochs(axes)
        _legend(axes)
    caption = (
        "Solid: dev. Dotted: the training rows as they were seen, with dropout. The vertical line is the best epoch."
    )
    return Plot(f"scores-{what}", f"{what[0].upper()}{what[1:]}", caption, figure)


def rate_curve(epochs: Epochs) -> Plot:
    with _axes() as (figure, axes):
        places = _positions(epochs)
        columns = [[rate for e in epochs for rate in e["curve"].get("rates", ((), ()))[i]] for i in (0, 1)]
        if columns[0] == columns[1]:
            axes.plot(places, columns[0], color=SERIES[0], label="all parameters")
        else:
            lowest, highest = ([rate or None for rate in column] for column in columns)
            axes.plot(places, highest, color=SERIES[1], linestyle=STYLES[1], label="highest (heads)")
            axes.plot(places, lowest, color=SERIES[0], label="lowest")
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:.0e}")  # the usual one writes powers, which need mathematical text
        axes.set_ylabel("learning rate")
        _whole_epochs(axes)
        _legend(axes)
    caption = "Parameters have different rates under --head_lr and --layer_decay; zero is not shown on a log scale."
    return Plot("rate", "Learning rate", caption, figure)


def penalty_curve(epochs: Epochs, regularizer: str) -> Plot:
    tasks = list(dict.fromkeys(task for e in epochs for task in e["penalties"]))
    with _axes() as (figure, axes):
        for number, task in enumerate(tasks):
            share = [100 * e["penalties"].get(task, 0) / (e["losses"].get(task) or 1) for e in epochs]
            style = {"marker": MARKERS[number % 6], "linestyle": STYLES[number % 6], "color": SERIES[number % 6]}
            axes.plot([e["epoch"] for e in epochs], share, label=task, **style)
        axes.set_ylabel("% of the training loss")
        _whole_epochs(axes)
        _legend(axes)
    caption = f"What --regularizer {regularizer} adds to each task's loss. At 0% it has no effect."
    return Plot("penalties", "Penalty of the regularizer", caption, figure)


def cosine_curve(epochs: Epochs) -> Plot:
    pairs = list(dict.fromkeys(pair for e in epochs for pair in e["cosines"]))
    with _axes() as (figure, axes):
        for number, pair in enumerate(pairs):
            color = SERIES[number % 6]
            points = [
                (e["epoch"] - 1 + (i + 1) / len(e["cosines"][pair]), value)
                for e in epochs
                if pair in e["cosines"]
                for i, value in enumerate(e["cosines"][pair])
            ]
            axes.plot(*zip(*points, strict=True), color=color, alpha=0.3, linewidth=0.8)
            means = [(e["epoch"], e["gradients"].get(f"cosine {pair}")) for e in epochs]
            style = {"marker": MARKERS[number % 6], "linestyle": STYLES[number % 6]}
            axes.plot(*zip(*means, strict=True), color=color, label=pair.replace(" ", ", "), **style)
        axes.axhline(0, color=INK, linewidth=0.8)
        axes.set_ylabel("cosine of two tasks' gradients")
        _whole_epochs(axes)
        _legend(axes)
    caption = "Thin: every few steps. With markers: the mean of the epoch. Below zero, two tasks pull apart."
    return Plot("cosines", "Gradient cosines between tasks", caption, figure)


def conflict_curve(epochs: Epochs) -> Plot:
    names = list(dict.fromkeys(n for e in epochs for n in e["gradients"] if n.startswith("conflicts ")))
    with _axes() as (figure, axes):
        width = 0.8 / max(1, len(names))
        for number, name in enumerate(names):
            places = [e["epoch"] + (number - (len(names) - 1) / 2) * width for e in epochs]
            shares = [100 * e["gradients"].get(name, 0) for e in epochs]
            label = name.removeprefix("conflicts ").replace(" ", ", ")
            axes.bar(places, shares, width * 0.92, color=SERIES[number % 6], label=label)
        axes.set_ylabel("% of steps with a conflict")
        axes.set_ylim(0, 100)
        _whole_epochs(axes)
        _legend(axes)
    caption = "A conflict is a negative cosine. PCGrad and Gradient Vaccine change the gradients in these steps only."
    return Plot("conflicts", "Conflicts between tasks", caption, figure)


def cost_curve(epochs: Epochs) -> Plot:
    """Minutes per epoch, and the peak memory where it was recorded."""
    ends = [0.0, *(e["seconds"] for e in epochs)]
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=SIZE, layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True)
        above.bar([e["epoch"] for e in epochs], np.diff(ends) / 60, 0.6, color=SERIES[0])
        above.set_ylabel("minutes")
        below.bar([e["epoch"] for e in epochs], [(e.get("memory") or 0) / 1e9 for e in epochs], 0.6, color=SERIES[1])
        below.set_ylabel("peak GB")
        _whole_epochs(below)
    caption = "Per epoch, evaluation included. Memory is that of torch's tensors on a GPU, else of the whole process."
    return Plot("cost", "Time and memory", caption, figure)


# --- predictions ------------------------------------------------------------------------------------------------------


def confusion(task: Task, matrix: np.ndarray) -> Plot:
    """matrix: (G, G), rows are labels and columns predictions."""
    G = len(matrix)
    shares = matrix / np.maximum(1, matrix.sum(axis=1, keepdims=True))
    with _axes() as (figure, axes):
        for i in range(G):
            for j in range(G):
                axes.add_patch(
                    matplotlib.patches.Rectangle((j - 0.5, i - 0.5), 1, 1, color=SERIES[0], alpha=0.75 * shares[i, j])
                )
                axes.text(j, i, f"{matrix[i, j]}\n{100 * shares[i, j]:.0f}%", ha="center", va="center", fontsize=8)
        axes.set(xlim=(-0.5, G - 0.5), ylim=(G - 0.5, -0.5), xlabel="predicted", ylabel="label")
        axes.set_xticks(range(G), [str(c) for c in range(G)])
        axes.set_yticks(range(G), [f"{name} {c}" for c, name in enumerate(task.names)])
        axes.grid(visible=False)
    caption = "Rows of the dev file: how many, and as a share of the label's rows. The diagonal is right."
    return Plot(f"confusion-{task.name}", f"Confusion matrix, {task.name}", caption, figure)


def class_shares(task: Task, predictions: Predictions) -> Plot:
    G, rows = task.predicts.num_classes, len(predictions.ids)
    with _axes() as (figure, axes):
        for shift, name, values in ((-0.2, "labels", predictions.labels), (0.2, "predictions", predictions.values)):
            shares = 100 * np.bincount(values.astype(int), minlength=G) / rows
            hatch = {"hatch": "//", "edgecolor": INK, "linewidth": 0} if shift > 0 else {}
            bars = axes.bar(np.arange(G) + shift, shares, 0.38, color=SERIES[shift > 0], label=name, **hatch)
            axes.bar_label(bars, [f"{share:.0f}" for share in shares], fontsize=8, padding=1)
        axes.set_xticks(range(G), [textwrap.fill(name, 9, break_long_words=False) for name in task.names])
        axes.set_ylabel("% of the rows")
        axes.margins(y=0.1)
        axes.grid(visible=False, axis="x")
        _legend(axes)
    caption = "A class that is predicted far less often than it occurs is one that the model avoids."
    return Plot(f"distribution-{task.name}", f"Labels and predictions, {task.name}", caption, figure)


BINS = 10


def calibration(task: Task, confidence: np.ndarray, hits: np.ndarray, what: str) -> Plot:
    """Whether a probability of 0.8 is right eight times in ten. what: the probability that is meant."""
    from sklearn.calibration import calibration_curve  # a second to import

    observed, predicted = calibration_curve(hits, confidence, n_bins=BINS)
    with _axes() as (figure, axes):
        axes.plot([0, 1], [0, 1], color=INK, linewidth=0.8, linestyle=(0, (2, 3)), label="perfect")
        axes.plot(predicted, observed, color=SERIES[0], marker="o", label="found")
        counts, edges = np.histogram(confidence, bins=BINS, range=(0, 1))
        style = {"align": "edge", "color": SERIES[1], "alpha": 0.35, "label": "share of the rows"}
        axes.bar(edges[:-1], counts / len(confidence), 0.92 / BINS, **style)
        axes.set(xlim=(0, 1), ylim=(0, 1), xlabel=what, ylabel="share that is true")
        _legend(axes)
    error = expected_calibration_error(confidence, hits)
    caption = f"Expected calibration error {error:.3f}: the mean distance from the diagonal, weighted by the rows."
    return Plot(f"calibration-{task.name}", f"Calibration, {task.name}", caption, figure)


def expected_calibration_error(confidence: np.ndarray, hits: np.ndarray) -> float:
    """sum over bins of (rows in the bin / rows) |mean confidence - share of hits| (Naeini et al. 2015)."""
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps = [abs(np.sum(confidence[bins == b] - hits[bins == b])) for b in range(BINS)]
    return float(np.sum(gaps) / len(confidence))


MOST_POINTS = 1500  # of a scatter plot: more only make the page larger


def scatter(task: Task, predictions: Predictions) -> Plot:
    rows = np.random.default_rng(0).permutation(len(predictions.ids))[:MOST_POINTS]
    labels, values = predictions.labels[rows], predictions.values[rows]
    with _axes() as (figure, axes):
        axes.plot(labels, values, ".", color=SERIES[0], alpha=0.35, markersize=4)
        ends = np.array([labels.min(), labels.max()])
        axes.plot(ends, ends, color=INK, linewidth=0.8, linestyle=(0, (2, 3)), label="prediction = label")
        if np.ptp(labels) > 0:
            slope, offset = np.polyfit(labels, values, 1)
            axes.plot(ends, slope * ends + offset, color=SERIES[1], label="straight line through the points")
        axes.set(xlabel="label", ylabel="prediction")
        _legend(axes)
    caption = "Pearson's correlation, the score, does not change if predictions are shifted or scaled."
    return Plot(f"scatter-{task.name}", f"Predictions against labels, {task.name}", caption, figure)


def residuals(task: Task, predictions: Predictions) -> Plot:
    rows = np.random.default_rng(0).permutation(len(predictions.ids))[:MOST_POINTS]
    difference = predictions.values - predictions.labels
    with _axes() as (figure, axes):
        axes.plot(predictions.labels[rows], difference[rows], ".", color=SERIES[0], alpha=0.35, markersize=4)
        axes.axhline(0, color=INK, linewidth=0.8)
        edges = np.linspace(predictions.labels.min(), predictions.labels.max(), 7)
        bins = np.clip(np.digitize(predictions.labels, edges) - 1, 0, 5)
        means = [(edges[b : b + 2].mean(), difference[bins == b].mean()) for b in range(6) if np.any(bins == b)]
        axes.plot(*zip(*means, strict=True), color=SERIES[1], marker="s", label="mean")
        axes.set(xlabel="label", ylabel="prediction - label")
        _legend(axes)
    spread = np.sqrt(np.mean(difference**2))
    caption = f"Root mean squared error {spread:.3f}. A slope means that predictions stay near the middle."
    return Plot(f"residuals-{task.name}", f"Residuals, {task.name}", caption, figure)


def histogram(task: Task, predictions: Predictions) -> Plot:
    both = np.concatenate([predictions.labels, predictions.values])
    edges = np.linspace(both.min(), both.max(), 26) if np.ptp(both) > 0 else np.array([both[0] - 1, both[0] + 1])
    with _axes() as (figure, axes):
        axes.hist(predictions.labels, edges, color=SERIES[0], alpha=0.45, label="labels")
        axes.hist(predictions.values, edges, color=SERIES[1], histtype="step", linewidth=1.6, label="predictions")
        axes.set(xlabel="value", ylabel="rows")
        _legend(axes)
    caption = "Human annotators prefer round numbers: their labels have peaks that predictions lack."
    return Plot(f"distribution-{task.name}", f"Labels and predictions, {task.name}", caption, figure)


# --- several runs -----------------------------------------------------------------------------------------------------


def forest(name: str, rows: Sequence[tuple[str, Interval]]) -> Plot:
    """Scores of several runs with their intervals. name: of the score."""
    height = 0.9 + 0.32 * len(rows)
    with _axes((SIZE[0], max(SIZE[1] * 0.6, height))) as (figure, axes):
        for place, (_, found) in enumerate(rows):
            low, high = found.score - found.low, found.high - found.score
            axes.errorbar(found.score, place, xerr=[[low], [high]], color=SERIES[0], marker="o", capsize=3)
        axes.axvline(rows[0][1].score, color=INK, linewidth=0.8, linestyle=(0, (2, 3)))
        axes.set_yticks(range(len(rows)), [_short(label, 22) for label, _ in rows])
        axes.set(ylim=(len(rows) - 0.5, -0.5), xlabel=f"{name} on dev")
        axes.grid(visible=False, axis="y")
    caption = "Dots are scores, bars 95% bootstrap intervals. The dotted line is the first run."
    return Plot(f"intervals-{name}", f"Intervals of {name}", caption, figure)


def overall_curves(runs: Sequence[tuple[str, Epochs]], name: str) -> Plot:
    with _axes() as (figure, axes):
        for number, (label, epochs) in enumerate(runs):
            style = {"color": SERIES[number % 6], "marker": MARKERS[number % 6], "linestyle": STYLES[number // 6 % 6]}
            points = [(e["epoch"], e["scores"][name]) for e in epochs if name in e["scores"]]
            axes.plot(*zip(*points, strict=True), label=_short(label, 22), **style)
        axes.set_ylabel(f"{name} on dev")
        _whole_epochs(axes)
        _legend(axes)
    return Plot(f"curves-{name}", f"The epochs' {name}", "Each run's dev score.", figure)


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2 - 1]}…{text[-(most - most // 2) :]}"
