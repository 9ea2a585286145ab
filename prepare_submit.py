"""Check the prediction files that the handout requires, then pack them with the code for Gradescope.

    python prepare_submit.py

Writes cs224n_default_final_project_submission.zip, or nothing if there is a problem. The zip contains the project's
top-level *.py files and the prediction files, as the handout asks, and the rest of "all necessary code for replicating
your results": README, setup.sh, requirements and recipes. Files of your own are packed if --include names them. Links
and hidden files are never packed. The same files always give the same bytes.
"""

import argparse
import sys
import zipfile
from pathlib import Path

from evaluation import PREDICTION_FILES, check_file, print_scores
from flags import ALWAYS, ArgumentParser
from utils import InputError, atomic_path, run_script, warn, writable_directory

ROOT = Path(__file__).parent
OUTPUT = "cs224n_default_final_project_submission.zip"
# The project's own top-level code. Any other file there may be private, and is packed only if --include names it.
SCRIPTS = (
    "adapters.py",
    "base_bert.py",
    "benchmark.py",
    "bert.py",
    "checkpoints.py",
    "classifier.py",
    "config.py",
    "console.py",
    "corpus.py",
    "datasets.py",
    "distributed.py",
    "ensemble.py",
    "evaluation.py",
    "flags.py",
    "heads.py",
    "interruption.py",
    "kernels.py",
    "loops.py",
    "losses.py",
    "members.py",
    "memory.py",
    "model.py",
    "multitask_build.py",
    "multitask_classifier.py",
    "multitask_flags.py",
    "optimizer.py",
    "optimizer_test.py",
    "pcgrad.py",
    "pos.py",
    "prepare_submit.py",
    "pretrain.py",
    "readers.py",
    "results.py",
    "runs.py",
    "sampling.py",
    "sanity_check.py",
    "shared_flags.py",
    "smart.py",
    "starter.py",
    "storage.py",
    "study.py",
    "sweep.py",
    "tasks.py",
    "tokenizer.py",
    "trainer.py",
    "training.py",
    "trials.py",
    "utils.py",
    "watch.py",
)
CODE = (*SCRIPTS, "README.md", "setup.sh", "requirements*.txt", "recipes/**/*.txt")
REQUIRED_CODE = ("bert.py", "classifier.py", "optimizer.py")  # the handout's list for Part 1
PARTS = {"1": ("1",), "2": ("2",), "all": ("1", "2")}
MAKERS = {"1": "classifier.py with --option pretrain and with --option finetune", "2": "multitask_classifier.py"}


def check_places(args: argparse.Namespace) -> list[str]:
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
    own += [path for path in (args.predictions / name for name in names_of(args.part)) if path.is_symlink()]
    problems += [f"{path}: must be a file, found a link. Replace it by a copy of the file." for path in own]
    return problems


def check_predictions(args: argparse.Namespace) -> tuple[dict[str, float], list[str]]:
    """Return the dev scores of the part's files, by file name, and all problems without duplicates."""
    scores: dict[str, float] = {}
    problems: list[str] = []
    for name in names_of(args.part):
        part, task, split = PREDICTION_FILES[name]
        path = args.predictions / name
        if not path.exists():
            problems.append(f"{path}: Part {part} needs this file, but it does not exist. Run {MAKERS[part]}.")
            continue
        value, problems_of_file = check_file(path, task, args.data / task.filename(split), labeled=split == "dev")
        problems += problems_of_file
        if value is not None:
            scores[name] = value
    return scores, list(dict.fromkeys(problems))  # a broken data file gives the same problem for two prediction files


def names_of(part: str) -> list[str]:
    return [name for name, file in PREDICTION_FILES.items() if file.part in PARTS[part]]


def files_to_pack(args: argparse.Namespace) -> dict[str, Path]:
    """Return a dict from the name in the zip to the file, sorted by name."""
    found = sorted({path for pattern in CODE for path in ROOT.glob(pattern) if path.is_file()})
    visible = [path for path in found if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)]
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
    files |= {f"predictions/{name}": args.predictions / name for name in names_of(args.part)}
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


def main() -> None:
    args = get_args()
    problems = check_places(args)
    scores: dict[str, float] = {}
    if args.data.is_dir() and args.predictions.is_dir():
        scores, problems_of_files = check_predictions(args)
        problems += problems_of_files
    if problems:
        for problem in problems:
            print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
    files = files_to_pack(args)
    write_zip(args.output, files)
    others = sorted(path.name for path in args.predictions.glob("*.csv") if f"predictions/{path.name}" not in files)
    if others:
        warn(f"not on the handout's list for --part {args.part}, so left out: {', '.join(others)}.")
    print_scores(scores)
    print(f"wrote {args.output}: {len(files)} files, {len(names_of(args.part))} of them predictions")


if __name__ == "__main__":
    run_script(main)
