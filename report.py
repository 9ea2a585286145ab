"""One run, or several side by side, as a page with plots.

    python report.py runs/a                 writes runs/a/report.html and runs/a/plots/*.png
    python report.py runs/a runs/b runs/c   compares them with the first: report/report.html and report/plots/*.png

A page is one file: it needs no network and no other file, and opens from the disk. records.py reads the runs, pages.py
gathers the sections, figures.py draws the plots.
"""

import argparse
from pathlib import Path

from console import doing
from flags import ALWAYS, ArgumentParser
from pages import PAGE, comparison_page, run_page
from records import Record, find_runs, read_record
from utils import InputError, run_script, warn, writable_directory


def get_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(
        "report.py",
        __doc__.splitlines()[0],
        "python report.py runs/a",
        "python report.py runs/baseline runs/pcgrad-1 runs/pcgrad-2 --out report",
        usage="RUN [RUN ...] [--out DIRECTORY]",
        sections=("files",),
    )
    add = parser.section("files")
    add("runs", type=Path, nargs="+", needs=ALWAYS, metavar="RUN",
        help="directories of runs; several are compared with the first")  # fmt: skip
    add("--out", type=Path, needs=ALWAYS, metavar="DIRECTORY",
        help="where to write the page and the plots (default: the run's directory; report for several)")  # fmt: skip
    return parser.parse(argv)


def read_all(folders: list[Path]) -> list[Record]:
    """The records of all runs; a run that cannot be read is an error if it was named alone, else a note."""
    records = []
    for folder in folders:
        try:
            records.append(read_record(folder))
        except InputError as error:
            if len(folders) == 1:
                raise
            warn(f"{error} Left out of the comparison.")
    if not records:
        raise InputError("none of these runs can be shown; the notes above say why. Name others.")
    return records


def main() -> None:
    args = get_args()
    records = read_all(find_runs(args.runs))
    several = len(records) > 1
    folder = args.out or (Path("report") if several else records[0].folder)
    for record in records:
        for note in record.notes:
            warn(note)
    plots = writable_directory(folder / "plots", "--out")
    with doing("drawing"):
        page = comparison_page(records) if several else run_page(records[0])
        page.write(folder / PAGE)
        for plot in page.plots:
            plot.save_png(plots)
    for card in page.cards:
        print(f"{card.label}: {card.value}" + (f" ({card.detail})" if card.detail else ""))
    print(f"wrote {folder / PAGE} and {len(page.plots)} plots in {plots}")


if __name__ == "__main__":
    run_script(main)
