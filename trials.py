"""The trials of a hyper-parameter search: flags, trainings, workers.

sweep.py is the script; it imports this file after its flags are parsed, since Optuna and matplotlib load slowly.
"""

import argparse
import contextlib
import io
import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import optuna
import sqlalchemy
import torch
from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState

import multitask_classifier
import multitask_flags
from evaluation import read_logits
from flags import suggestion
from readers import read_examples
from results import best_number, outcome, recipe_header, write_results
from storage import BROKEN, GRACE, Locks, StudyFile, place_of, unreachable
from study import (
    PRUNERS,
    SEARCHES,
    Flags,
    Wait,
    at_point,
    corners,
    may_differ,
    next_sampler,
    read_space,
    running,
    score_of,
    settled,
    text_of,
    tokens,
)
from tasks import TASKS
from tokenizer import BertTokenizer
from utils import (
    InputError,
    choose_device,
    keep_freed_memory,
    out_of_memory,
    warn,
    writable_directory,
)

# --- flags ------------------------------------------------------------------------------------------------------------


def read_flags(given: list[str]) -> Flags:
    """Flags of multitask_classifier.py by destination; the later one wins. Parsing refuses unknown ones."""
    parser = multitask_flags.parser()
    actions = {group[0]: parser.flags.get(group[0].partition("=")[0]) for group in parser.by_flag(given)}
    return {actions[group[0]].dest: group for group in parser.by_flag(given) if actions[group[0]] is not None}


def effective(flags: list[str]) -> list[str]:
    """The flags without those that later ones made pointless, as a searched value may do with what all trials share."""
    return multitask_flags.parser().effective(flags, multitask_flags.complete, droppable=lambda flag: True)


def with_trials(args: argparse.Namespace) -> argparse.Namespace:
    """Add to the flags of sweep.py: `space`, `base` (what all trials share) and `flags` (the same, parsed).

    `study` becomes the place that it names.
    """
    args = argparse.Namespace(**vars(args))
    for flag, registry in (("method", SEARCHES), ("pruner", PRUNERS)):
        if (value := getattr(args, flag)) not in registry:
            hint = suggestion(value, registry)
            raise InputError(f"--{flag} must be one of {', '.join(registry)}; found {value!r}.{hint}")
    parser = multitask_flags.parser()
    for key in ("name", "resume", "predict_only", "run"):
        if key in read_flags(parser.expand(args.rest)):
            raise InputError(
                f"--{key} is not for sweep.py, which names its runs and continues by itself. Leave it out."
            )
    shared = effective(args.rest)
    args.flags = multitask_flags.complete(parser.parse_args(shared))
    args.base = read_flags(shared)
    args.space = read_space(args.search)
    if args.seeds and "seed" in args.base:
        raise InputError("--seed and --seeds cannot be combined. Use --seeds alone.")
    args.seeds = list(dict.fromkeys(args.seeds or [args.flags.seed]))
    args.study = place_of(args.study)
    args.write_recipe = args.write_recipe or args.study.recipe
    validate(args)
    return args


def validate(args: argparse.Namespace) -> None:
    """Refuse what no trial could run with, in one line with the remedy."""
    ranges = [key for key, d in args.space.items() if not isinstance(d, CategoricalDistribution)]
    if ranges and args.method != "tpe":
        raise InputError(
            f"--method {args.method} needs lists of values, but {ranges[0]} has a range. "
            f"Write {ranges[0]}=A,B,C, or use --method tpe."
        )
    if args.method == "tpe" and args.trials is None and not args.dry_run:
        raise InputError("--method tpe never ends by itself. Add --trials 30.")
    written = [*args.study.files, args.write_recipe]
    if len(set(written)) < len(written):
        raise InputError(
            f"--study {args.study.shown}, its plot and --write_recipe {args.write_recipe} must be three files. Rename "
            "one."
        )
    refused = []
    for point in itertools.islice(corners(args.space), 100):
        try:
            multitask_classifier.get_args(effective(tokens(at_point(args.base, point))))
            return
        except InputError as error:
            refused.append(error)
    raise InputError(f"no trial could run: {refused[0]}") from refused[0]


def check_inputs(args: argparse.Namespace) -> None:
    """Find what would make every trial fail, before the first one."""
    choose_device(args.flags.use_gpu, args.flags.precision, args.flags.deterministic)
    if "model" not in args.space:
        BertTokenizer.from_pretrained(args.flags.model)
    for name, split in itertools.product(args.flags.tasks, multitask_flags.SPLITS):
        if split == "train" and name not in args.flags.train_tasks:
            continue
        read_examples(
            TASKS[name], multitask_flags.data_paths(TASKS[name], args.flags, split), labeled=split != "test",
            strict=args.flags.strict_data, repeated_ids=args.flags.repeated_ids and split == "train",
        )  # fmt: skip
    for name, path in multitask_flags.teacher_files(args.flags).items():
        read_logits(path, TASKS[name], multitask_flags.logits_remedy(path.parent, train=True), labeled=False)
    writable_directory(args.flags.predictions, "--predictions")
    writable_directory(args.write_recipe.parent, "the directory of --write_recipe")
    if args.write_recipe.exists():
        try:
            ours = args.write_recipe.read_text(encoding="utf-8").startswith(recipe_header(args) + ",")
        except (OSError, UnicodeDecodeError):
            ours = False
        if not ours:
            raise InputError(
                f"--write_recipe {args.write_recipe}: exists, and is not this study's recipe. Use another."
            )


def dry(args: argparse.Namespace, folder: Path) -> argparse.Namespace:
    """The same sweep, shortened, in a temporary directory."""
    kept = {k: v for k, v in args.base.items() if k not in may_differ() | {"steps_per_epoch", "epochs"}}
    base = [*tokens(kept), "--dry_run", "--runs", str(folder), "--predictions", str(folder), "--epochs", "1"]
    own = {
        "study": StudyFile(folder / "study.db"),
        "write_recipe": folder / "best.txt",
        "trials": 2,
        "seeds": args.seeds[:1],
    }
    flags = multitask_flags.complete(multitask_flags.parser().parse_args(base))
    return argparse.Namespace(**vars(args) | own | {"base": read_flags(base), "flags": flags})


# --- trials -----------------------------------------------------------------------------------------------------------


def run_names(args: argparse.Namespace, trial: int) -> dict[int, str]:
    """The name of the run of each seed."""
    ends = {seed: f"-seed{seed}" if len(args.seeds) > 1 else "" for seed in args.seeds}
    return {seed: f"{args.study.run_prefix}-{trial}{end}" for seed, end in ends.items()}


def train(args: argparse.Namespace, trial: optuna.Trial) -> list[dict[str, float]]:
    """Train with every seed, and return the dev scores of each. The pruner sees the first seed's epochs."""
    scores_by_seed = []

    def report(epoch: int, scores: dict[str, float]) -> None:
        trial.report(score_of(scores), epoch)
        if epoch < flags.epochs and trial.should_prune():  # after its last epoch there is nothing to save
            raise optuna.TrialPruned

    for seed, name in run_names(args, trial.number).items():
        own = {"seed": ["--seed", str(seed)], "name": ["--name", name]}
        flags = multitask_classifier.get_args(effective(tokens(at_point(args.base, trial.params) | own)))
        watch = {} if scores_by_seed else {"on_epoch": report}
        with contextlib.nullcontext() if args.verbose else contextlib.redirect_stdout(io.StringIO()):
            scores_by_seed.append(multitask_classifier.train_multitask(flags, **watch))
    return scores_by_seed


def scores_of_twin(trial: optuna.Trial, study: optuna.Study, locks: Locks) -> list[dict[str, float]] | None:
    """The scores of a trial with the same flags, if there is one: tpe may return to a point of lists.

    If another worker is training that point, this waits for it. Only later trials wait for earlier ones, so no two
    trials wait for each other.
    """
    wanted = {key: text_of(value) for key, value in trial.params.items()}
    while True:
        twins = [t for t in study.trials if {k: text_of(v) for k, v in t.params.items()} == wanted]
        finished = next((t for t in twins if t.state == TrialState.COMPLETE), None)
        if finished is not None:
            return finished.user_attrs["scores"]
        if not any(t.state == TrialState.RUNNING and t.number < trial.number for t in twins):
            return None
        time.sleep(POLL)
        with locks.choosing():
            locks.fail_dead(study)


def start_trial(args: argparse.Namespace, study: optuna.Study, locks: Locks) -> optuna.Trial | Wait | None:
    """Choose the next trial and claim it, while no other worker chooses. None: the search has ended."""
    with locks.choosing():
        locks.fail_dead(study)
        sampler = next_sampler(args, study)
        if sampler is None or isinstance(sampler, Wait):
            return sampler
        for name in run_names(args, len(study.trials)).values():
            if (args.flags.runs / name).exists():
                raise InputError(
                    f"{args.flags.runs / name}: the run of the next trial would go there, but it exists, from another "
                    "study of that name. Move it, or use another --study or --runs."
                )
        study.sampler = sampler
        with warnings.catch_warnings(action="ignore"):  # Optuna expects its own loop where there are heartbeats
            trial = study.ask(args.space)
        locks.claim(trial)
        return trial


def run_trial(args: argparse.Namespace, study: optuna.Study, trial: optuna.Trial, locks: Locks) -> FrozenTrial:
    """Run one trial. A mistake in it is its result, and the study continues."""
    try:
        try:
            scores = scores_of_twin(trial, study, locks) or train(args, trial)
        except optuna.TrialPruned:
            return study.tell(trial, state=TrialState.PRUNED, skip_if_finished=True)
        except (InputError, torch.OutOfMemoryError) as error:
            trial.set_user_attr("reason", str(error).splitlines()[0])
            return study.tell(trial, state=TrialState.FAIL, skip_if_finished=True)
        trial.set_user_attr("scores", scores)
        return study.tell(trial, statistics.fmean(map(score_of, scores)), skip_if_finished=True)
    except optuna.exceptions.UpdateFinishedTrialError:
        warn(
            f"trial {trial.number}: it gave no sign of life for {GRACE} seconds, so it counts as killed and is "
            "repeated. Check the connection to the database."
        )
        return study.trials[trial.number]


def run_study(args: argparse.Namespace, study: optuna.Study, locks: Locks) -> None:
    """Train one trial after the other until the search has ended."""
    told = args.workers > 1
    while (trial := start_trial(args, study, locks)) is not None:
        if isinstance(trial, Wait):
            if not told:
                numbers = ", ".join(str(t.number) for t in running(study.trials))
                print(f"waiting for trial {numbers}, which other workers are training", flush=True)
                told = True
            time.sleep(POLL)
            continue
        started = time.monotonic()
        try:
            done = run_trial(args, study, trial, locks)
        except BaseException:  # Ctrl-C, for one: so that nobody waits until the trial looks dead
            with contextlib.suppress(*BROKEN):
                study.tell(trial, state=TrialState.FAIL, skip_if_finished=True)
            raise
        finally:
            locks.release(trial)
        line = [f"trial {done.number}", *(f"{key} {text_of(value)}" for key, value in done.params.items())]
        line += [outcome(done), "best" if done.number == best_number(study) else "    "]
        print(" | ".join([*line, f"{time.monotonic() - started:.0f} s"]), flush=True)


def work(args: argparse.Namespace, study: optuna.Study, locks: Locks) -> None:
    """Take part in the study until it has ended."""
    try:
        run_study(args, study, locks)
    except (optuna.exceptions.StorageInternalError, sqlalchemy.exc.SQLAlchemyError) as error:
        raise unreachable(args.study.shown, error) from error


# --- workers ----------------------------------------------------------------------------------------------------------

POLL = 1.0  # seconds between two looks at the study while waiting for another worker
PATIENCE = 30  # seconds that a worker has to end after Ctrl-C


def worker_environment(number: int, threads: int, gpus: Sequence[str]) -> dict[str, str]:
    """The environment variables of a worker: its share of the threads, and one of the GPUs in turn."""
    shared = {"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]} if gpus else {}
    return {"OMP_NUM_THREADS": str(threads)} | shared


def visible_gpus(use_gpu: bool) -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if not use_gpu:
        return []
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(i) for i in range(torch.cuda.device_count())]


@contextlib.contextmanager
def inherited(environment: dict[str, str]) -> Iterator[None]:
    """Let a process that is started in this context have these variables, and ignore Ctrl-C.

    Ctrl-C reaches every process of a terminal. The one that started the workers ends them by SIGTERM, which also works
    while they are still importing torch.
    """
    before = {name: os.environ.get(name) for name in environment}
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(environment)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


class NotATerminal:
    """A stream that shows no progress bars: those of several workers would overwrite each other."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def isatty(self) -> bool:
        return False


def worker(args: argparse.Namespace, threads: int, errors: Any) -> None:
    """A worker's process. It reports a mistake to the process that started it, and ends when that one does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parent = multiprocessing.parent_process()

    def end_with_parent() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_parent, daemon=True).start()
    sys.stderr = NotATerminal(sys.stderr)
    keep_freed_memory()
    torch.set_num_threads(threads)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        work(args, *args.study.open(args))
    except InputError as error:
        errors.put(str(error))
    except torch.OutOfMemoryError as error:
        errors.put(out_of_memory(error))
    except KeyboardInterrupt:
        sys.exit(130)


def run_workers(args: argparse.Namespace) -> None:
    """Start the workers and wait until they have ended. One that dies loses its trial, which the others repeat."""
    context = multiprocessing.get_context("spawn")  # a forked process could not use CUDA
    errors, gpus = context.SimpleQueue(), visible_gpus(args.flags.use_gpu)
    threads = max(1, torch.get_num_threads() // args.workers)
    processes = [context.Process(target=worker, args=(args, threads, errors)) for _ in range(args.workers)]
    try:
        for number, process in enumerate(processes):
            with inherited(worker_environment(number, threads, gpus)):
                process.start()
        alive = {process.sentinel: number for number, process in enumerate(processes)}
        while alive:
            for sentinel in multiprocessing.connection.wait(list(alive)):
                number = alive.pop(sentinel)
                processes[number].join()
                if processes[number].exitcode:
                    warn(f"worker {number + 1} died (exit status {processes[number].exitcode}); its trial is repeated.")
    finally:
        for process in filter(multiprocessing.Process.is_alive, started := [p for p in processes if p.pid]):
            process.terminate()
        for process in started:
            process.join(PATIENCE)
            process.kill()
    if not errors.empty():
        raise InputError(errors.get())


# --- the whole search ------------------------------------------------------------------------------------------------


def sweep(args: argparse.Namespace) -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    check_inputs(args)
    study, locks = args.study.open(args)
    start = [
        f"{args.method} search of {', '.join(args.space)}",
        f"{args.study.shown}: {len(settled(study.trials))} trials so far",
    ]
    print(" | ".join(start + [f"{args.workers} workers"] * (args.workers > 1)), flush=True)
    if args.workers > 1:
        run_workers(args)
        with locks.choosing():
            locks.fail_dead(study)
            left = next_sampler(args, study) is not None
        if left:
            raise InputError(
                f"--study {args.study.shown}: all workers ended before the search. Give the command again."
            )
    else:
        work(args, study, locks)
    write_results(args, study)
