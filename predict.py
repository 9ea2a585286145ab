"""Predict sentences of your own with a trained run.

    python predict.py --run runs/x "A lovely film ."
    python predict.py --run runs/x "How old are you?" "What is your age?"
    python predict.py --run runs/x --tasks para --file pairs.tsv --out scored.tsv
    cat reviews.txt | python predict.py --run runs/x --file - > scored.tsv

A file is read in windows of a few thousand rows. The rows of a window are sorted by length, predicted in batches, and
written in their own order, so a file of any length takes the same memory. The run itself is only read.
"""

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from flags import ALWAYS, ArgumentParser, Need, Switch, number
from tables import FORMATS, STANDARD_INPUT, Format, Record, Table, count_lines, format_of, name_of, open_input
from tasks import TASKS, TWO_SENTENCES, Task
from trained import Answers, TrainedRun, open_trained
from utils import InputError, Precision, atomic_path, choose_device, could_not_write, printable, run_script, warn

WINDOW_ROWS = 4096  # read, sorted by length and written together: enough for batches of nearly equal lengths
WINDOW_CHARACTERS = 4_000_000  # of all texts in a window, so that long texts do not fill the memory
BAR = 24  # characters of a full bar

# --- rows of a file ---------------------------------------------------------------------------------------------------


def windows(records: Iterator[Record]) -> Iterator[list[Record]]:
    """The records in lists of limited size. The records before a bad line come first, then its error."""
    window: list[Record] = []
    characters = 0
    try:
        for record in records:
            window.append(record)
            characters += sum(len(value) for value in record.values.values() if isinstance(value, str))
            if len(window) == WINDOW_ROWS or characters >= WINDOW_CHARACTERS:
                yield window
                window, characters = [], 0
    except InputError:
        if window:
            yield window
        raise
    if window:
        yield window


def checked(records: Iterator[Record], columns: set[str], new: list[str]) -> Iterator[Record]:
    """The records, as long as they have a text in each of these columns and none of the new ones."""
    for record in records:
        taken = [column for column in new if column in record.values]
        if taken:
            raise InputError(
                f"{record.place}: must not have a column {taken[0]}, which is written here. Rename or remove it."
            )
        for column in columns:
            if not isinstance(record.values.get(column), str):
                found = "none" if column not in record.values else repr(record.values[column])
                raise InputError(f"{record.place}: {column} must be a text, found {found:.80}. Fix the row.")
        yield record


def texts_of(task: Task, window: list[Record]) -> tuple[list[str], ...]:
    """A list of sentences for each text column of the task."""
    return tuple([record.values[column] for record in window] for column in task.text_columns)


def tasks_for(run: TrainedRun, wanted: list[str] | None, columns: list[str], source: str) -> list[Task]:
    """The tasks to predict: those of --tasks, or all tasks of the run whose text columns are there."""
    check_tasks(run, wanted)
    if wanted is None:
        tasks = [task for task in run.tasks.values() if set(task.text_columns) <= set(columns)]
        if tasks:
            return tasks
    missing = [task for task in of_names(run, wanted) if not set(task.text_columns) <= set(columns)]
    if missing:
        needed = " and a column ".join(missing[0].text_columns)
        raise InputError(
            f"{source}: {missing[0].name} needs a column {needed}, found {', '.join(columns)[:80] or 'none'}. Use "
            "--format tsv with a header whose names are separated by tabs, or --format jsonl."
        )
    return of_names(run, wanted)


def of_names(run: TrainedRun, wanted: list[str] | None) -> list[Task]:
    return [run.tasks[name] for name in dict.fromkeys(wanted or run.tasks)]


def check_tasks(run: TrainedRun, wanted: list[str] | None) -> None:
    absent = [name for name in wanted or () if name not in run.tasks]
    if absent:
        raise InputError(f"--tasks {absent[0]}: {run.folder} was trained on {', '.join(run.tasks)}. Choose from these.")


# --- predictions as columns -------------------------------------------------------------------------------------------


def new_columns(task: Task) -> list[str]:
    """TASK_label if there are classes, TASK_prediction, and the probabilities TASK_p_0 .. or TASK_p."""
    names = ["label"] * bool(task.names) + ["prediction", *task.predicts.probability_names]
    return [f"{task.name}_{name}" for name in names]


def new_values(task: Task, logits: Tensor) -> list[list[Any]]:
    """The values of the new columns, a list for each row of the logits (rows, C)."""
    values = [task.predicts.plain(value) for value in task.predicts.decode(logits).tolist()]
    probabilities = task.predicts.probabilities(logits.double()).tolist()
    return [
        [*([task.names[value]] if task.names else []), value, *(round(p, 6) for p in of_row)]
        for value, of_row in zip(values, probabilities, strict=True)
    ]


# --- output -----------------------------------------------------------------------------------------------------------


class Output:
    """Where the rows go: a file that appears when it is complete, or the standard output."""

    def __init__(self, file: IO[bytes], path: Path | None):
        self.file, self.path, self.rows = file, path, 0

    def write(self, text: str, rows: int = 0) -> None:
        try:
            self.file.write(text.encode())
            self.file.flush()
        except BrokenPipeError:  # the reader has what it wants, as in `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it again when it exits
            sys.exit(128 + signal.SIGPIPE)
        except OSError as error:
            raise InputError(could_not_write(self.path or Path("standard output"), error)) from error
        self.rows += rows

    def fate(self) -> str:
        """What became of the rows before an error."""
        if self.path is not None:
            return f"{self.path} was not written."
        return f"Rows written before it: {self.rows:,}." if self.rows else "Nothing was written."


@contextlib.contextmanager
def open_output(path: Path | None) -> Iterator[Output]:
    if path is None:
        yield Output(sys.stdout.buffer, None)
        return
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        yield Output(file, path)


class VectorFile:
    """A .npy file of unknown length: the header is written again at the end, when the number of rows is known."""

    def __init__(self, file: IO[bytes]):
        self.file, self.rows, self.shape = file, 0, (0,)

    def append(self, vectors: tuple[Tensor, ...]) -> None:
        """One (rows, H), or several that are stored as (rows, several, H)."""
        block = vectors[0] if len(vectors) == 1 else torch.stack(vectors, dim=1)
        if not self.rows:
            self.shape = tuple(block.shape[1:])
            self.write_header()
        self.file.write(block.numpy().astype("<f4").tobytes())
        self.rows += len(block)

    def write_header(self) -> None:
        """Write the header to the start of the file; numpy pads it, so that any number of rows fits."""
        self.file.seek(0)
        facts = {"descr": "<f4", "fortran_order": False, "shape": (self.rows, *self.shape)}
        np.lib.format.write_array_header_1_0(self.file, facts)


@contextlib.contextmanager
def open_vectors(path: Path | None) -> Iterator[VectorFile | None]:
    if path is None:
        yield None
        return
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        vectors = VectorFile(file)
        yield vectors
        vectors.write_header()


# --- a file, from its first row to its last ---------------------------------------------------------------------------


def predict_file(run: TrainedRun, args: argparse.Namespace) -> None:
    name, kind = name_of(args.file), args.format or format_of(args.file)
    if args.file == STANDARD_INPUT and args.format is None:
        warn(f"standard input is read as {kind}, {FORMATS[kind].what}; --format reads another.")
    total = count_lines(args.file)
    with contextlib.ExitStack() as stack:
        table = FORMATS[kind].read(stack.enter_context(open_input(args.file)), name)
        tasks = tasks_for(run, args.tasks, table.columns, name) if table.columns else []
        if args.vectors is not None and len(tasks) > 1:
            known = " or ".join(task.name for task in tasks)
            raise InputError(f"--vectors needs one task, found {len(tasks)}. Use --tasks {known}.")
        output = stack.enter_context(open_output(args.out))
        vectors = stack.enter_context(open_vectors(args.vectors))
        hidden = True if args.out is None and sys.stdout.isatty() else None  # a bar would run into the rows
        bar = stack.enter_context(tqdm(total=total, unit=" rows", desc="predict", disable=hidden))
        try:
            truncated = predict_table(run, tasks, table, FORMATS[kind], args.batch_size, output, vectors, bar)
        except InputError as error:
            raise InputError(f"{error} {output.fate()}") from error
        if not output.rows:
            raise InputError(f"{name}: must have at least one row, found none. {output.fate()}")
    for path, what in ((args.out, f"{output.rows:,} rows"), (args.vectors, "the vectors")):
        if path is not None:
            print(f"wrote {path}, {what}", file=sys.stderr)
    if truncated:
        most = run.tokenizer.max_length
        warn(f"{name}: {truncated} of {output.rows} rows are longer than {most} tokens and were truncated.")


def predict_table(
    run: TrainedRun,
    tasks: list[Task],
    table: Table,
    kind: Format,
    batch_size: int,
    output: Output,
    vectors: VectorFile | None,
    bar: tqdm,
) -> int:
    """Predict all rows, window by window; return the number of rows that were truncated."""
    new = [column for task in tasks for column in new_columns(task)]
    columns, truncated = table.columns + new, 0
    for window in windows(checked(table.records, {column for task in tasks for column in task.text_columns}, new)):
        answers = {task.name: run.answers(task.name, texts_of(task, window), batch_size) for task in tasks}
        if not output.rows:
            output.write(kind.head(columns))
        output.write(kind.write(columns, scored_rows(tasks, window, answers)), len(window))
        if vectors is not None:
            vectors.append(next(iter(answers.values())).vectors)
        truncated += max(answer.truncated for answer in answers.values())
        bar.update(len(window))
    return truncated


def scored_rows(tasks: list[Task], window: list[Record], answers: dict[str, Answers]) -> list[dict[str, Any]]:
    """The records with the new columns."""
    rows = [dict(record.values) for record in window]
    for task in tasks:
        names = new_columns(task)
        for row, values in zip(rows, new_values(task, answers[task.name].logits), strict=True):
            row.update(zip(names, values, strict=True))
    return rows


# --- sentences on the command line ------------------------------------------------------------------------------------


def described(task: Task, logits: Tensor) -> Iterator[str]:
    """A prediction for a person: in words, then a bar for each class, or one for a number. logits: (1, C)."""
    (value,) = task.predicts.decode(logits).tolist()
    (fractions,) = task.predicts.fractions(logits.double()).tolist()
    yield f"  {task.name}: {task.predicts.in_words(value, task.names)}"
    width = max(map(len, task.names), default=0)
    shown = [f"{name:{width}}  {p:6.1%}  " for name, p in zip(task.names, fractions, strict=False)] or [""]
    for text, fraction in zip(shown, fractions, strict=True):
        yield f"    {text}{'#' * round(BAR * fraction)}".rstrip()


def show(run: TrainedRun, tasks: list[Task], sentences: tuple[str, ...]) -> None:
    """Print the predictions of the tasks for one sentence, or one pair."""
    print(" | ".join(map(printable, sentences)))
    for task in tasks:
        answers = run.answers(task.name, tuple([sentence] for sentence in sentences), batch_size=1)
        print("\n".join(described(task, answers.logits)), flush=True)


def tasks_on(run: TrainedRun, wanted: list[str] | None, sentences: int) -> list[Task]:
    """The tasks with this number of sentences."""
    return [task for task in of_names(run, wanted) if len(task.text_columns) == sentences]


def predict_sentences(run: TrainedRun, args: argparse.Namespace) -> None:
    check_tasks(run, args.tasks)
    count = len(args.sentences)
    tasks = tasks_on(run, args.tasks, count)
    others = [task.name for task in of_names(run, args.tasks) if task not in tasks]
    if not tasks or (args.tasks and others):
        other = {1: "two sentences", 2: "one sentence"}[count]
        raise InputError(f"{others[0]} needs {other}, found {count}. Give {other}, each in quotation marks.")
    for sentence in args.sentences:
        check_text(sentence)
    show(run, tasks, tuple(args.sentences))


def check_text(sentence: str) -> None:
    if any("\ud800" <= c <= "\udfff" for c in sentence):  # how Python passes on bytes that are no text
        raise InputError(f"a sentence must be UTF-8 text, found {sentence!r:.80}. Set the terminal to UTF-8.")


def ask(prompt: str) -> str | None:
    """A line that the user types, or None at the end of the input.

    With the terminal's own streams, so that the line can be edited.
    """
    terminal = getattr(sys.stdout, "stream", sys.stdout)
    with contextlib.redirect_stdout(terminal), contextlib.suppress(ImportError):
        import readline  # noqa: F401  input() uses it once it is imported
    with contextlib.redirect_stdout(terminal), contextlib.suppress(EOFError):
        return input(prompt)
    return None


def converse(run: TrainedRun, args: argparse.Namespace) -> None:
    """Ask for sentences and show predictions until the user ends the input."""
    check_tasks(run, args.tasks)
    on_one, on_two = (tasks_on(run, args.tasks, count) for count in (1, 2))
    print(f"{run.folder}: {', '.join(task.name for task in of_names(run, args.tasks))}. End with Ctrl-D.")
    second = "second sentence, or Enter for none> " if on_one else "second sentence> "
    while (first := ask("sentence> ")) is not None:
        if not first.strip():
            continue
        other = ask(second) if on_two else ""
        if (other or "").strip() or (other is not None and not on_one):
            show(run, on_two, (first, other))
        elif on_one:
            show(run, on_one, (first,))
        if other is None:
            break
    print()


# --- script -----------------------------------------------------------------------------------------------------------


def get_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(
        "predict.py",
        "Predict sentences of your own with a trained run, which is only read. The rows of a file are written again "
        "with new columns: TASK_label, the name of the class; TASK_prediction, its number, or the predicted number; "
        "and the probabilities, TASK_p_0, TASK_p_1 ... of the classes, or TASK_p of a paraphrase. Text has a sentence "
        "per line, and the result is a table. A table (tsv) has tabs and a header with sentence, or sentence1 and "
        "sentence2. Lines of JSON (jsonl) have objects with these keys. Other columns are kept.",
        'python predict.py --run runs/x "A lovely film ."',
        'python predict.py --run runs/x "How old are you?" "What is your age?"',
        "python predict.py --run runs/x --tasks para --file pairs.tsv --out scored.tsv",
        "python predict.py --run runs/x --file - < reviews.txt > scored.tsv",
        usage='--run runs/NAME ["SENTENCE" ["SENTENCE"] | --file FILE | --interactive] [flags]',
        sections=("what to predict", "how"),
        recipes=False,
    )
    reads_file = Need("--file", lambda args: args.file is not None, "Add --file FILE")
    add = parser.section("what to predict")
    add("sentences", nargs="*", metavar="SENTENCE", needs=ALWAYS, help="one sentence, or two for tasks on pairs")
    add("--run", type=Path, required=True, needs=ALWAYS, help="directory of the run")
    add("--tasks", nargs="+", choices=sorted(TASKS), needs=ALWAYS,
        help="some of the run's tasks (default: all that the input has sentences for)")  # fmt: skip
    add("--file", type=Path, needs=ALWAYS, metavar="PATH", help="file of sentences; - reads the standard input")
    add("--out", type=Path, needs=reads_file, metavar="PATH", help="file for the result (default: standard output)")
    add("--format", choices=list(FORMATS), needs=reads_file,
        help="how --file is written (default: by its suffix, .tsv, .csv or .jsonl, else text)")  # fmt: skip
    add("--vectors", type=Path, needs=reads_file, metavar="PATH",
        help=".npy file for the vectors of one task: (rows, H), or (rows, N, H) with N texts a row")  # fmt: skip
    add("--interactive", action=Switch, needs=ALWAYS, help="ask for sentences")
    add = parser.section("how")
    add("--batch_size", type=number(int, 1, 4096), default=32, needs=reads_file, metavar="N", help="rows per pass")
    add("--max_length", type=number(int, 4, 100_000), needs=ALWAYS, metavar="N",
        help="truncate longer texts to N tokens (default: as the run did)")  # fmt: skip
    add("--use_gpu", action=Switch, needs=ALWAYS, help="predict on CUDA")
    add("--precision", choices=sorted(Precision.DTYPES), default="fp32", needs=ALWAYS,
        help="fp32, or mixed precision")  # fmt: skip
    args = parser.parse(argv)
    if args.sentences == ["-"]:
        args.sentences, args.file = [], STANDARD_INPUT
    validate(args)
    return args


def validate(args: argparse.Namespace) -> None:
    modes = {"sentences": bool(args.sentences), "--file": args.file is not None, "--interactive": args.interactive}
    chosen = [name for name, given in modes.items() if given]
    if len(chosen) != 1:
        found = " and ".join(chosen) or "none of them"
        raise InputError(f'give sentences, as in "A lovely film .", or --file, or --interactive; found {found}.')
    if len(args.sentences) > len(TWO_SENTENCES):
        raise InputError(
            f"give one sentence or two, found {len(args.sentences)}. Put each into quotation marks, or use --file."
        )
    folder = args.run.resolve()
    for flag in ("out", "vectors"):
        path = getattr(args, flag)
        if path is None:
            continue
        if folder in path.resolve().parents:
            raise InputError(f"--{flag} {path}: must be outside the run, which is only read. Choose another path.")
        if args.file.resolve() == path.resolve():
            raise InputError(f"--{flag} {path}: must be another file than --file, which it would overwrite.")
    if args.vectors is not None and args.vectors.suffix != ".npy":
        raise InputError(f"--vectors {args.vectors}: must end in .npy, the format that is written.")
    if args.out is not None and args.vectors is not None and args.out.resolve() == args.vectors.resolve():
        raise InputError(f"--vectors {args.vectors}: must be another file than --out. Choose another path.")


def main() -> None:
    args = get_args()
    run = open_trained(
        args.run, Precision(args.precision, choose_device(args.use_gpu, args.precision)), args.max_length
    )
    if args.interactive:
        converse(run, args)
    elif args.file is not None:
        predict_file(run, args)
    else:
        predict_sentences(run, args)


if __name__ == "__main__":
    run_script(main)
