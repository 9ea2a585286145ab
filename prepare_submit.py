"""Check the prediction files that the handout requires, then pack them with the code for Gradescope.

    python prepare_submit.py

Writes cs224n_default_final_project_submission.zip, or nothing if there is a problem. The zip contains the project's
top-level *.py files and the prediction files, as the handout asks, and the rest of "all necessary code for replicating
your results": README, setup.sh, requirements and recipes. Files of your own are packed if --include names them. Links
and hidden files are never packed, nor is predictions/manifest.json: it is not on the handout's list, and its commands
name directories of your machine. The same files always give the same bytes.
"""

import argparse
import shlex
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import manifest
from evaluation import print_scores
from flags import ALWAYS, ArgumentParser
from intervals import Scored
from manifest import Found, listed
from submission import LATER_NAMES, OPTIONS, PREDICTION_FILES, check_file
from utils import InputError, atomic_path, megabytes, printable, run_script, warn, writable_directory

ROOT = Path(__file__).parent
OUTPUT = "cs224n_default_final_project_submission.zip"
# The project's own top-level code. Any other file there may be private, and is packed only if --include names it.
SCRIPTS = (
    "adapters.py",
    "audit.py",
    "base_bert.py",
    "benchmark.py",
    "benchmark_runs.py",
    "benchmark_steps.py",
    "bert.py",
    "cards.py",
    "checkpoints.py",
    "classifier.py",
    "config.py",
    "console.py",
    "corpus.py",
    "datasets.py",
    "distributed.py",
    "ensemble.py",
    "evaluation.py",
    "export.py",
    "figures.py",
    "flags.py",
    "forms.py",
    "heads.py",
    "interruption.py",
    "intervals.py",
    "kernels.py",
    "loops.py",
    "losses.py",
    "manifest.py",
    "members.py",
    "memory.py",
    "model.py",
    "multitask_build.py",
    "multitask_classifier.py",
    "multitask_flags.py",
    "observers.py",
    "optimizer.py",
    "optimizer_test.py",
    "pages.py",
    "pcgrad.py",
    "pos.py",
    "predict.py",
    "prepare_submit.py",
    "pretrain.py",
    "products.py",
    "readers.py",
    "records.py",
    "report.py",
    "results.py",
    "runs.py",
    "sampling.py",
    "sanity_check.py",
    "shared_flags.py",
    "smart.py",
    "starter.py",
    "starting.py",
    "storage.py",
    "study.py",
    "submission.py",
    "sweep.py",
    "tables.py",
    "tasks.py",
    "teacher.py",
    "timing.py",
    "tokenizer.py",
    "trained.py",
    "trainer.py",
    "training.py",
    "trials.py",
    "unlabeled.py",
    "utils.py",
    "watch.py",
)
CODE = (*SCRIPTS, "README.md", "setup.sh", "requirements*.txt", "report_template.html", "recipes/**/*.txt")
REQUIRED_CODE = ("bert.py", "classifier.py", "optimizer.py")  # the handout's list for Part 1
PARTS = {"1": ("1",), "2": ("2",), "all": ("1", "2")}
RATES = {"pretrain": "1e-3", "finetune": "1e-5"}  # the handout's learning rates


def check_places(args: argparse.Namespace, found: Mapping[str, Found]) -> list[str]:
    """Return the problems that do not depend on the contents of the prediction files."""
    problems = [
        f"--{flag} {folder}: must be a directory, found none. Check the path."
        for flag, folder in (("data", args.data), ("predictions", args.predictions))
        if not folder.is_dir()
    ]
    if args.output.suffix != ".zip" or args.output.is_dir():
        actual = "a directory" if args.output.is_dir() else f"the suffix {args.output.suffix!r}"
        problems.append(f"--output {args.output}: must be a file that ends in .zip, found {actual}. Choose another.")
    if "1" in PARTS[args.part]:
        missing = [name for name in REQUIRED_CODE if not (ROOT / name).is_file()]
        problems += [f"{ROOT / name}: Part 1 needs this file, but it does not exist. Restore it." for name in missing]
    problems += [
        f"--include {path}: must be a file, found {'a link' if path.is_symlink() else 'none'}. Check the path."
        for path in args.include
        if path.is_symlink() or not path.is_file()
    ]
    own = [path for path in (ROOT / name for name in SCRIPTS) if path.is_symlink()]
    own += [of.path for of in found.values() if of.path.is_symlink()]
    problems += [f"{path}: must be a file, found a link. Replace it by a copy of the file." for path in own]
    return problems


def check_predictions(args: argparse.Namespace, found: Mapping[str, Found]) -> tuple[dict[str, Scored], list[str]]:
    """Return the dev files with their labels, and all problems without duplicates; print a line per complete part."""
    scored: dict[str, Scored] = {}
    problems: list[str] = []
    for part in PARTS[args.part]:
        of_part = {name: of for name, of in found.items() if of.file.part == part}
        missing = [name for name in names_of(part) if name not in of_part]
        wrong = [f"part {part}: {what_is_missing(missing, of_part, args)}"] if missing else []
        for name, (path, (_, task, split), *_) in of_part.items():
            of_file, problems_of_file = check_file(path, task, args.data / task.filename(split), labeled=split == "dev")
            wrong += problems_of_file
            if of_file is not None:
                scored[name] = of_file
        problems += wrong
        if not wrong:
            print(f"part {part}: complete, {len(of_part)} files")
    return scored, list(dict.fromkeys(problems))  # a broken data file gives the same problem for two prediction files


# --- the commands that write missing files ----------------------------------------------------------------------------


def what_is_missing(missing: list[str], present: Mapping[str, Found], args: argparse.Namespace) -> str:
    """One line: the missing files of a part, and the commands that write them."""
    commands = part_1_commands(missing, present) if missing[0] in LATER_NAMES else [part_2_command(missing, present)]
    places = {"--data": args.data, "--predictions": args.predictions}
    usual = {"--data": Path("data"), "--predictions": Path("predictions")}
    flags = shlex.join(str(word) for flag, path in places.items() if path != usual[flag] for word in (flag, path))
    shown = " && ".join(f"{command} {flags}".rstrip() for command in commands)
    total = len(missing) + len(present)
    names = listed([LATER_NAMES[name] if later(present) else name for name in missing])
    return f"needs {total} files in {args.predictions}, found {len(present)}; missing: {names}. Write with: {shown}"


def later(present: Mapping[str, Found]) -> bool:
    """Whether files have the names of later years."""
    return any(of.path.name == LATER_NAMES.get(name) for name, of in present.items())


def part_1_commands(missing: list[str], present: Mapping[str, Found]) -> list[str]:
    """One command per --option. If other files have the later names, so will the missing ones."""
    commands = []
    for option, mode in OPTIONS.items():
        names = [name for name in missing if name.startswith(option)]
        tasks = list(dict.fromkeys(PREDICTION_FILES[name].task.name for name in names))
        only = f" --tasks {tasks[0]}" if len(tasks) == 1 else ""
        flag = f"--fine-tune-mode {mode}" if later(present) else f"--option {option}"
        commands += [f"python classifier.py {flag} --lr {RATES[option]}{only}"] * bool(names)
    return commands


def part_2_command(missing: list[str], present: Mapping[str, Found]) -> str:
    """Predict with the run of the other files, if it has the missing tasks; otherwise train."""
    runs = {of.origin.run for of in present.values() if of.origin is not None}
    tasks = {of.file.task.name for of in present.values() if of.origin is not None}
    run = next(iter(runs), "")
    has_all = all(PREDICTION_FILES[name].task.name in tasks for name in missing)
    if len(runs) == 1 and has_all and (Path(run) / "model.safetensors").is_file():
        return f"python multitask_classifier.py --predict_only --run {shlex.quote(run)}"
    return f"python multitask_classifier.py --option finetune --lr {RATES['finetune']}"


# --- the zip ----------------------------------------------------------------------------------------------------------


def names_of(part: str) -> list[str]:
    return [name for name, file in PREDICTION_FILES.items() if file.part in PARTS[part]]


def files_to_pack(args: argparse.Namespace, found: Mapping[str, Found]) -> dict[str, Path]:
    """Return a dict from the name in the zip to the file, sorted by name."""
    code = sorted({path for pattern in CODE for path in ROOT.glob(pattern) if path.is_file()})
    visible = [path for path in code if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)]
    links = [path for path in visible if is_link(path)]
    if links:
        names = ", ".join(path.relative_to(ROOT).as_posix() for path in links)
        warn(f"links are not packed, so left out: {names}.")
    files = {path.relative_to(ROOT).as_posix(): path for path in visible if path not in links}
    for path in args.include:
        inside = path.resolve().is_relative_to(ROOT.resolve())
        name = path.resolve().relative_to(ROOT.resolve()).as_posix() if inside else path.name
        if name in files and files[name].resolve() != path.resolve():
            raise InputError(f"--include {path}: the project has another {name} already. Rename one.")
        files[name] = path
    others = sorted(path.name for path in ROOT.glob("*.py") if path.name not in files and path not in links)
    if others:
        warn(f"not files of the project, so left out: {', '.join(others)}. --include FILE packs one.")
    files |= {f"predictions/{of.path.name}": of.path for of in found.values()}
    return dict(sorted(files.items()))


def is_link(path: Path) -> bool:
    """Whether the file, or a directory between the project and it, is a symbolic link."""
    return any(step.is_symlink() for step in (path, *path.parents) if step != ROOT and step.is_relative_to(ROOT))


def write_zip(output: Path, files: dict[str, Path]) -> None:
    writable_directory(output.parent, "the directory of --output")
    with atomic_path(output) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for name, path in files.items():
            entry = zipfile.ZipInfo(name)  # its date is always 1980, so the same files give the same bytes
            entry.create_system, entry.compress_type = 3, zipfile.ZIP_DEFLATED  # 3: Unix, for the file modes below
            entry.external_attr = (0o100755 if name.endswith(".sh") else 0o100644) << 16
            archive.writestr(entry, path.read_bytes())


def get_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(
        "prepare_submit.py", __doc__.splitlines()[0], "python prepare_submit.py --part 2", sections=("files",)
    )
    add = parser.section("files")
    add("--data", type=Path, default=Path("data"), needs=ALWAYS,
        help="directory with the course's files; every id in them needs a prediction")  # fmt: skip
    add("--predictions", type=Path, default=Path("predictions"), needs=ALWAYS,
        help="directory with the prediction files")  # fmt: skip
    add("--output", type=Path, default=Path(OUTPUT), needs=ALWAYS, help="the zip file to write")
    add("--part", choices=sorted(PARTS), default="all", needs=ALWAYS,
        help="which part's prediction files to check and pack")  # fmt: skip
    add("--include", type=Path, nargs="+", default=[], needs=ALWAYS, metavar="FILE",
        help="files of your own to pack as well")  # fmt: skip
    return parser.parse(argv)


def print_contents(output: Path, files: Mapping[str, Path]) -> None:
    """Print what the zip holds: a line per kind of file."""
    print(f"wrote {output}: {len(files)} files, {megabytes(output.stat().st_size)}")
    kinds = {
        "predictions/": [name for name in files if name.startswith("predictions/")],
        "recipes/": [name for name in files if name.startswith("recipes/")],
        "*.py": [name for name in files if name.endswith(".py")],
    }
    rest = sorted(set(files) - {name for names in kinds.values() for name in names})
    for kind, names in kinds.items():
        print(f"  {kind:12}  {len(names)} files")
    print(f"  {'and':12}  {', '.join(rest)}")


def note_others(args: argparse.Namespace, packed: Mapping[str, Path]) -> None:
    """Name the files of the directory that are not packed. Of two names of a file, the older one was named before."""
    known = {name for pair in LATER_NAMES.items() for name in pair if "1" in PARTS[args.part]}
    names = {path.name for path in args.predictions.glob("*.csv")} - known
    if others := sorted(name for name in names if f"predictions/{name}" not in packed):
        warn(f"not on the handout's list for --part {args.part}, so left out: {', '.join(others)}.")


def main() -> None:
    args = get_args()
    found = manifest.find_files(args.predictions, {name: PREDICTION_FILES[name] for name in names_of(args.part)})
    problems = check_places(args, found)
    scored: dict[str, Scored] = {}
    if args.data.is_dir() and args.predictions.is_dir():
        scored, problems_of_files = check_predictions(args, found)
        problems += problems_of_files
    if problems:
        for problem in problems:
            print(printable(f"error: {problem}"), file=sys.stderr)
        sys.exit(2)
    files = files_to_pack(args, found)
    write_zip(args.output, files)
    note_others(args, files)
    print_scores({name: found[name] for name in scored}, scored)
    manifest.report_origins(found, args.data)
    print_contents(args.output, files)


if __name__ == "__main__":
    run_script(main)
