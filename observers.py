"""What follows a training: the run's page, and event files for TensorBoard.

An observer is told about every few steps and every epoch. It reads and draws, and changes nothing in the training.
"""

import argparse
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from distributed import World
from pages import PAGE, run_page
from records import Record, read_record
from runs import Run
from tasks import Predictions
from trainer import Point
from training import NOBODY, Observer, Observers

# A page of a run that trains is written if this many times the time for a page has passed since the last one.
SHARE = 20
# The groups that TensorBoard shows, and the log's tables that they are of.
GROUPS = {"dev": "scores", "train": "train", "penalty": "penalties", "gradient": "gradients"}


class EventWriter(Observer):
    """Writes losses, rates and scores as TensorBoard's scalars, over the number of updates.

    A resumed run adds a file: TensorBoard then hides what an earlier process wrote about steps that are made again.
    """

    what, remedy = "writing event files (--tensorboard)", "log.jsonl has the same figures."

    def __init__(self, folder: Path):
        self.folder, self.writer = folder, None

    def start(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # two seconds to import

        if step == 0 and self.folder.is_dir():  # of a run that starts from the beginning
            shutil.rmtree(self.folder)
        self.writer = SummaryWriter(str(self.folder), purge_step=step + 1)

    def point(self, step: int, point: Point) -> None:
        for task, loss in point.losses.items():
            self.writer.add_scalar(f"loss/{task}", loss, step)
        self.writer.add_scalar("rate/highest", max(point.rates), step)
        self.writer.add_scalar("rate/lowest", min(point.rates), step)

    def epoch(self, step: int, line: Mapping[str, Any]) -> None:
        for group, table in GROUPS.items():
            for name, value in line[table].items():
                self.writer.add_scalar(f"{group}/{name.replace(' ', '_')}", value, step)
        if line.get("memory"):
            self.writer.add_scalar("cost/peak_GB", line["memory"] / 1e9, step)
        self.writer.add_scalar("cost/minutes", line["seconds"] / 60, step)
        self.writer.flush()

    def end(self) -> None:
        if self.writer is not None:
            self.writer.close()
            print(f"events: tensorboard --logdir {self.folder}", flush=True)


class Reporter(Observer):
    """Writes the page of a run that is being trained.

    predictions: returns the dev predictions of the last evaluation, by task. A page takes a second or two; if epochs
    are short, not each of them gets one, so that pages take a twentieth of the time at most.
    """

    what, remedy = "writing the report", "Write it later with: python report.py RUN"

    def __init__(self, run: Run, predictions: Callable[[], Mapping[str, Predictions]]):
        self.run, self.predictions = run, predictions
        self.next = 0.0  # the earliest time of the next page

    def epoch(self, step: int, line: Mapping[str, Any]) -> None:
        """Write the page after an epoch, with the predictions of that epoch."""
        started = time.monotonic()
        if started < self.next:
            return
        self._write(self._of_last_epoch(read_record(self.run.folder)))
        now = time.monotonic()
        self.next = now + SHARE * (now - started)

    def _of_last_epoch(self, record: Record) -> Record:
        at = f"epoch {record.epochs[-1]['epoch']}"
        return replace(record, predictions=dict(self.predictions()), predicted_at=at)

    def end(self) -> None:
        """Write the page of the trained model, and print where it is."""
        record = read_record(self.run.folder)
        self._write(record if record.predictions else self._of_last_epoch(record))
        print(f"report: {self.run.folder / PAGE}", flush=True)

    def _write(self, record: Record) -> None:
        run_page(record).write(self.run.folder / PAGE)


def build_observer(
    args: argparse.Namespace, run: Run, world: World, predictions: Callable[[], Mapping[str, Predictions]] = dict
) -> Observer:
    """What the flags ask for, in the first process. predictions: returns those of the last evaluation, by task."""
    if not world.is_main or getattr(args, "dry_run", False):
        return NOBODY
    members: list[Observer] = [EventWriter(run.folder / "tensorboard")] if args.tensorboard else []
    return Observers([*members, *([Reporter(run, predictions)] if args.report else [])])
