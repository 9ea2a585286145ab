"""The flags of Part 2: the parser, flags of earlier runs, and the checks of what does not go together.

multitask_classifier.py trains from them; ensemble.py, sweep.py and benchmark.py read them too. The flags of a method
are defined in the file of that method; here are those of the tasks, the model and the data files. multitask_build.py
turns the flags into model, trainer and data.
"""

import argparse
import functools
import itertools
import sys
from pathlib import Path
from typing import Any

import adapters
import heads
import losses
import optimizer
import pcgrad
import pos
import sampling
import shared_flags
import smart
from base_bert import revision_of
from datasets import PAIRINGS
from flags import ALWAYS, ENCODER_TRAINS, ArgumentParser, FromRecipe, Need, Switch, as_text, check_stored, number
from losses import losses_of, task_trains, tasks_with
from manifest import MANIFEST
from model import Branch
from readers import reader_of, source_of
from runs import Run
from tasks import TASKS, Task
from utils import InputError

SPLITS = ("train", "dev", "test")
SCORED = ("dev", "test")  # the splits that predictions are written for
BATCH_SIZE = 8  # the handout's

# --- the parser -------------------------------------------------------------------------------------------------------


SECTIONS = (  # of the help page, in reading order
    "most used",
    "the model",
    "input features",
    "losses and their weights",
    "steps: which tasks, and how their gradients are combined",
    "regularization",
    "adapters",
    "optimization",
    "time and memory",
    "files",
)


@functools.cache  # one parser per process: it is large, and nothing changes it
def parser() -> ArgumentParser:
    new = ArgumentParser(
        "multitask_classifier.py",
        "Part 2: train one BERT for sentiment (sst), paraphrase (para) and similarity (sts), and write predictions. "
        "TASK in a flag stands for a task's name, as in --sst_head.",
        "python multitask_classifier.py @recipes/quickstart.txt",
        "python multitask_classifier.py @recipes/best.txt --data data --use_gpu --precision fp16",
        usage="[@recipes/FILE.txt] [flags; later ones win]",
        sections=SECTIONS,
    )
    shared_flags.add_option(new)
    shared_flags.add_most_used(new, epochs=10)
    add = new.section("most used")
    add(
        "--tasks",
        nargs="+",
        choices=sorted(TASKS),
        default=["sst", "para", "sts"],
        needs=ALWAYS,
        help="tasks to train and score",
    )
    add("--batch_size", type=number(int, 1, 4096), needs=shared_flags.ONE_SIZE, metavar="N",
        help=f"rows of a task per step; 64 fits a 12 GB GPU (default: {BATCH_SIZE})")  # fmt: skip
    shared_flags.add_max_tokens(new)
    optimizer.add_arguments(new, lr=1e-5)
    shared_flags.add_long_training(new)
    _add_model(new)
    pos.add_arguments(new)
    losses.add_arguments(new, TASKS.values())
    sampling.add_arguments(new)
    pcgrad.add_arguments(new)
    smart.add_arguments(new)
    adapters.add_arguments(new)
    shared_flags.add_eval_batch_size(new)
    new.section("time and memory")("--chunk_rows", type=number(int, 1, 10**6), needs=ENCODER_TRAINS, metavar="N",
        help="save memory: encode N sentences at a time and recompute them in the backward pass, so that a "
        "contrastive loss still sees every negative in the batch")  # fmt: skip
    _add_files(new)
    return new


def task_is_used(name: str) -> Need:
    return Need(f"{name} among --tasks", lambda args: name in args.tasks, f"Add {name} to --tasks")


def tasks_on_pairs(count: int) -> Need:
    words = {1: "a task on pairs", 2: "two tasks on pairs"}
    pairs = {1: " or ", 2: " and "}[count].join(task.name for task in TASKS.values() if task.is_pair)

    def is_met(args: argparse.Namespace) -> bool:
        return sum(TASKS[name].is_pair for name in args.tasks) >= count

    return Need(f"{words[count]} among --tasks", is_met, f"Add {pairs} to --tasks")


def not_overridden(what: str, *, pairs_only: bool = False) -> Need:
    """The need of --pooling, --head, --pairing and the dropout: a task that has no flag of its own."""

    def is_met(args: argparse.Namespace) -> bool:
        tasks = [name for name in args.tasks if TASKS[name].is_pair or not pairs_only]
        return any(getattr(args, f"{name}_{what}") is None for name in tasks)

    return Need(f"a task without its own --TASK_{what}", is_met, f"Leave out one --TASK_{what}")


def _add_model(new: ArgumentParser) -> None:
    shared_flags.add_encoder(new)
    add = new.section("the model")
    probability = number(float, 0, 0.99)
    add("--hidden_dropout_prob", type=probability, default=0.3, needs=not_overridden("dropout"), metavar="P",
        help="dropout before every head")  # fmt: skip
    add("--pairing", choices=sorted(PAIRINGS), default="bi",
        needs=(tasks_on_pairs(1), not_overridden("pairing", pairs_only=True)),
        help="bi encodes the sentences of a pair apart, cross joins them, both does both; *_symmetric scores both "
        "orders")  # fmt: skip
    add("--symmetric", action=Switch, needs=tasks_on_pairs(1), help="score dev and test pairs in both orders")
    add(
        "--pooling",
        choices=list(heads.POOLERS),
        default="pooler",
        needs=not_overridden("pooling"),
        help="how token vectors become a sentence vector",
    )
    add(
        "--head",
        choices=list(heads.HEADS),
        needs=not_overridden("head"),
        help="how sentence vectors become logits (default: linear)",
    )
    add("--share_pair_layer", action=Switch, needs=tasks_on_pairs(2), help="one more layer, shared by all pair heads")
    for task in TASKS.values():
        used = task_is_used(task.name)
        if task.is_pair:
            add(f"--{task.name}_pairing", choices=sorted(PAIRINGS), needs=used, of_task=task.name,
                help="for one task instead of --pairing")  # fmt: skip
        add(f"--{task.name}_pooling", choices=list(heads.POOLERS), needs=used, of_task=task.name,
            help="for one task instead of --pooling")  # fmt: skip
        add(f"--{task.name}_head", choices=list(heads.HEADS), needs=used, of_task=task.name,
            help="for one task instead of --head")  # fmt: skip
        add(f"--{task.name}_dropout", type=probability, needs=used, of_task=task.name, metavar="P",
            help="for one task instead of --hidden_dropout_prob")  # fmt: skip


def _add_files(new: ArgumentParser) -> None:
    shared_flags.add_files(new, max_length=512)
    shared_flags.add_predictions(new)
    add = new.section("files")
    add(
        "--train_tasks",
        nargs="+",
        choices=sorted(TASKS),
        needs=ALWAYS,
        help="train only these of --tasks; the others are only scored",
    )
    shared_flags.add_max_train(new)
    add("--repeated_ids", action=Switch, needs=ALWAYS, help="allow repeated ids in training files")
    predicts = Need("--predict_only", lambda args: args.predict_only)
    add("--predict_only", action=Switch, help="write the prediction files of --run without training",
        needs=Need("--run", lambda args: args.run is not None, "Add --run runs/NAME"))  # fmt: skip
    add("--run", type=Path, needs=predicts, help="the run's directory, for --predict_only")
    add(
        "--predict_train",
        action=Switch,
        needs=predicts,
        help="also write the logits of the training rows, for --teacher",
    )
    for task in TASKS.values():
        add(f"--{task.name}_train", nargs="+", needs=task_trains(task.name), of_task=task.name,
            metavar="[READER:]PATH", help="training files (default: the course's); readers: docs/USAGE.md")  # fmt: skip
        for split in SCORED:
            add(f"--{task.name}_{split}", needs=task_is_used(task.name), of_task=task.name, metavar="PATH",
                help="file to score" if split == "dev" else "file to predict")  # fmt: skip
            add(f"--{task.name}_{split}_out", needs=task_is_used(task.name), of_task=task.name, metavar="PATH",
                help=f"prediction file (default: TASK-{split}-output.csv in --predictions)")  # fmt: skip
        add(f"--{task.name}_fraction", type=number(float, 0, 1, above=True), default=1.0, of_task=task.name,
            needs=task_trains(task.name), metavar="X", help="train on a random fraction of the rows")  # fmt: skip


# --- complete flags ---------------------------------------------------------------------------------------------------


def complete(args: argparse.Namespace) -> argparse.Namespace:
    """Fill in the defaults that follow from other flags, for the tasks that are used."""
    args = argparse.Namespace(**vars(args))
    args.data, args.predictions = Path(args.data), Path(args.predictions)
    args.tasks = list(dict.fromkeys(args.tasks))
    args.train_tasks = list(dict.fromkeys(args.train_tasks or args.tasks))
    if args.batch_size is None and args.max_tokens is None:
        args.batch_size = BATCH_SIZE
    for task in map(TASKS.get, args.tasks):
        read = SPLITS if task.name in args.train_tasks else SCORED
        of_task = {split: str(args.data / task.filename(split)) for split in read}
        of_task |= {f"{split}_out": str(args.predictions / f"{task.name}-{split}-output.csv") for split in SCORED}
        for key, default in of_task.items():
            if getattr(args, f"{task.name}_{key}") is None:
                setattr(args, f"{task.name}_{key}", default)
    args.fine_tune_mode = {option: mode for mode, option in shared_flags.FINE_TUNE_MODES.items()}[args.option]
    args.name = shared_flags.run_name(args, args.option)
    return args


def with_defaults(config: Any) -> argparse.Namespace:
    """Complete flags from any namespace with some of them, such as the starter's; the rest are the defaults.

    Such a namespace may have flags of tasks that it does not use, such as the starter's file names: they are ignored.
    """
    given = shared_flags.with_option(vars(config))
    defaults = vars(parser().parse_args([]))
    tasks = given.get("tasks", defaults["tasks"])
    unused = [f"{name}_" for name in TASKS if name not in tasks]
    unused += [f"{name}_train" for name in tasks if name not in (given.get("train_tasks") or tasks)]
    used = {key: value for key, value in given.items() if not key.startswith(tuple(unused))}
    return complete(argparse.Namespace(**defaults | used))


# Flags that have an effect when a trained run predicts; all others were decided by its training.
PREDICTION_FLAGS = {"data", "predictions", "strict_data", "repeated_ids", "eval_batch_size"}
PREDICTION_FLAGS |= shared_flags.OF_THE_MACHINE | shared_flags.OF_CHECKPOINTS | shared_flags.OF_DISPLAY
PREDICTION_FLAGS |= {"attention", "symmetric", "max_length", "pos_cache", "predict_only", "predict_train", "run"}
PREDICTION_FLAGS |= {"model", "fine_tune_mode"}  # the checkpoint may have moved; the other follows from --option


def file_flags() -> set[str]:
    """The flags that name data files and prediction files."""
    return {f"{task}_{split}" for task in TASKS for split in (*SPLITS, *(f"{split}_out" for split in SCORED))}


def of_run(folder: Path, argv: list[str] | None = None) -> argparse.Namespace:
    """The flags that a run was trained with, overridden by those given now, such as --use_gpu or --data."""
    if folder.is_file():
        raise InputError(
            f"--run {folder}: must be the directory of a run, found a file. For a .pt file of a script in the "
            "starter's style, call test_multitask(args) with args.filepath there."
        )
    stored = Run.reopen(folder).facts["args"]
    if not (folder / "model.safetensors").is_file():  # an ensemble of logits has none
        raise InputError(f"{folder}: must have model.safetensors, found none. Use a trained run, or a soup.")
    if not isinstance(stored.get("tasks"), list) or "train_tasks" not in stored:
        raise InputError(f"{folder}: must be a run of multitask_classifier.py, or a soup. Choose another.")
    unknown = [name for name in stored["tasks"] if isinstance(name, str) and name not in TASKS]
    if unknown:
        raise InputError(
            f"{folder}: was trained on {unknown[0]}, which is not in tasks.py. Add the task, or choose another."
        )
    defaults = vars(parser().parse_args([]))
    stored = adapters.flags_of_run(checked(stored, folder / "args.json"), folder / "model.safetensors")
    flags = argparse.Namespace(**defaults | stored | {"use_gpu": False})  # the machine may be another one
    usual = complete(argparse.Namespace(**defaults | {k: getattr(flags, k) for k in ("data", "predictions", "tasks")}))
    for name, split in itertools.product(flags.tasks, SPLITS):
        for key in (f"{name}_{split}", f"{name}_{split}_out"):
            if hasattr(usual, key) and getattr(flags, key) == getattr(usual, key):
                setattr(flags, key, None)  # follows from --data and --predictions, which may be given again
    words = parser().expand(sys.argv[1:] if argv is None else argv)
    before = with_branches(complete(flags))
    flags = complete(parser().parse_args(argv, flags))  # argparse keeps what is set already and not given
    after = with_branches(flags)
    for key in sorted(vars(before).keys() - PREDICTION_FLAGS - file_flags(), key=lambda key: (key != "tasks", key)):
        then, now = as_text(getattr(before, key)), as_text(getattr(after, key))  # paths are stored as text
        if then != now:
            if any(isinstance(word, FromRecipe) for word in words):
                raise InputError(f"--predict_only takes its flags from {folder}. Leave out the recipe.")
            raise InputError(
                f"--{key} {now}: {folder} was trained with {then}, which cannot be changed afterwards. "
                f"Leave out --{key}."
            )
    given = {parser().flags[tokens[0].partition("=")[0]].dest for tokens in parser().by_flag(words)}
    parser().refuse_idle_flags(flags, only=given)
    check_outputs(flags)
    flags.runs, flags.name = folder.parent, folder.name
    return flags


# Flags that may differ between the start of a run and --resume; head, pooling, pairing and dropout are compared task by
# task.
MAY_DIFFER = {"runs", "fine_tune_mode", "eval_batch_size", "predict_only", "run", "pos_cache", "epochs"}
MAY_DIFFER |= {"head", "pooling", "pairing", "hidden_dropout_prob"} | shared_flags.OF_DISPLAY
MAY_DIFFER |= shared_flags.OF_THE_MACHINE | shared_flags.OF_CHECKPOINTS


def open_run(args: argparse.Namespace) -> Run:
    """A new run, or the one to resume."""
    folder, data = args.runs / args.name, data_files(args)
    if not args.resume:
        return Run.create(folder, args, data, model_revision=revision_of(args.model))
    unused = [f"{name}_" for name in TASKS if name not in args.tasks]
    unused += [f"{name}_train" for name in args.tasks if name not in args.train_tasks]
    of_unused = {key for key in vars(args) if key.startswith(tuple(unused))}
    upgrade = functools.partial(upgraded, source=folder / "args.json")
    extend = functools.partial(shared_flags.check_extension, args)
    return Run.resume(
        folder, with_branches(args), upgrade, data, MAY_DIFFER | of_unused, extend,
        model_revision=revision_of(args.model),
    )  # fmt: skip


def checked(stored: dict[str, Any], source: Path) -> dict[str, Any]:
    """Return the flags of a run if they are values that the command line takes too. source: their file."""
    check_stored(parser(), stored, source)
    args = argparse.Namespace(**vars(parser().parse_args([])) | stored)
    try:
        for name in complete(args).tasks:
            losses_of(args, name)
        smart.parts_of(args.regularizer)
        losses.build_weighting(args, [TASKS[name] for name in args.tasks])
    except InputError as error:
        raise InputError(f"{source}: {error}") from error
    return stored


def upgraded(stored: dict[str, Any], source: Path = Path("args.json")) -> dict[str, Any]:
    """The flags of a run as today's suite would write them. source: their file, for messages.

    The run may be older than some flags and tasks. Flags without an effect have today's defaults.
    """
    flags = complete(argparse.Namespace(**vars(parser().parse_args([])) | checked(stored, source)))
    for action, _ in parser().idle_flags(flags):
        setattr(flags, action.dest, action.default)
    return vars(with_branches(flags))


def with_branches(args: argparse.Namespace) -> argparse.Namespace:
    """The flags with every task's own pooling, head, pairing and dropout filled in, so that runs can be compared."""
    of_tasks = {
        f"{name}_{what}": getattr(branch, what)
        for name, branch in branches(args).items()
        for what in ("pooling", "head", "pairing", "dropout")
    }
    return argparse.Namespace(**vars(args) | of_tasks)


# --- checks -----------------------------------------------------------------------------------------------------------


def validate(args: argparse.Namespace) -> None:
    """Refuse flags that do nothing and combinations that are impossible, in one line with the remedy."""
    parser().refuse_idle_flags(args)
    absent = [name for name in args.train_tasks if name not in args.tasks]
    if absent:
        raise InputError(f"--train_tasks must be among --tasks, found {absent[0]}. Add it to --tasks, or leave it out.")
    for branch in branches(args).values():
        check_branch(branch, args)
        check_files(branch.task, args)
    check_outputs(args)
    check_teacher(args)
    check_chunks(args)
    losses.build_weighting(args, [TASKS[name] for name in args.tasks])  # refuses weights of other tasks
    adapters.check_arguments(args)
    if args.option == "pretrain":
        check_frozen(args)
    check_exclusive_modes(args)


def check_exclusive_modes(args: argparse.Namespace) -> None:
    given = [flag for flag in ("resume", "predict_only", "dry_run") if getattr(args, flag)]
    if len(given) > 1:
        raise InputError(f"--{given[0]} and --{given[1]} cannot be combined. Leave one out.")


def check_branch(branch: Branch, args: argparse.Namespace) -> None:
    """Refuse a head, pairing and loss that do not fit the task or each other."""
    task, spec = branch.task, getattr(args, f"{branch.task.name}_loss")
    vectors = len(branch.pairing_for("train").views[0])
    heads.check_head(branch.head, task, vectors, f"--{task.name}_head")
    terms = losses_of(args, task.name)
    for name, loss in terms.items():
        if loss.compares_rows and args.batch_size == 1:
            raise InputError(
                f"--{task.name}_loss {spec}: {name} compares the rows of a batch, found --batch_size 1. Use 8 or more."
            )
        if loss.on_vectors and task.is_pair and vectors != 2:
            made = "one vector per pair" if vectors == 1 else "a third one of the joined pair"
            raise InputError(
                f"--{task.name}_loss {spec}: {name} compares the vectors of sentences, but --{task.name}_pairing "
                f"{branch.pairing} makes {made}. Use --{task.name}_pairing bi."
            )
    if not any(loss.trains_head for loss in terms.values()) and not heads.HEADS[branch.head].works_untrained:
        other = f", or --{task.name}_head cosine_affine" if task.is_pair else ""
        raise InputError(
            f"--{task.name}_loss {spec} trains vectors only, but --{task.name}_head {branch.head} has to learn too. "
            f"Use --{task.name}_loss {task.predicts.default_loss}+{spec}{other}."
        )


def check_files(task: Task, args: argparse.Namespace) -> None:
    """Refuse unknown readers, readers that do not fit, and files to score that are not in the course's format."""
    for path in data_paths(task, args, "train"):
        reader_of(task, path)
    for split in SCORED:
        for path in data_paths(task, args, split):
            name, _ = source_of(path)
            if name != "handout":
                raise InputError(
                    f"--{task.name}_{split} {path}: must be in the course's format, found the reader {name}. "
                    f"Use it with --{task.name}_train."
                )


def check_outputs(args: argparse.Namespace) -> None:
    """Refuse a prediction file that would overwrite a data file or another prediction file."""
    taken = {
        source_of(path)[1].resolve(): f"--{name}_{split}"
        for name, split in itertools.product(args.tasks, SPLITS)
        for path in data_paths(TASKS[name], args, split)
    }
    for name, split in itertools.product(args.tasks, SCORED):
        flag, path = f"--{name}_{split}_out", Path(getattr(args, f"{name}_{split}_out"))
        if path.name == MANIFEST:
            raise InputError(
                f"{flag} {path}: must not be {MANIFEST}, which lists the prediction files. Use another path."
            )
        other = taken.setdefault(path.resolve(), flag)
        if other != flag:
            raise InputError(f"{flag} {path}: must be a file of its own, found that of {other}. Use another path.")


def check_teacher(args: argparse.Namespace) -> None:
    students = tasks_with(args, "distill")
    if students and args.teacher is None:
        raise InputError(
            f"--{students[0]}_loss {getattr(args, f'{students[0]}_loss')} needs the teacher's logits, found no "
            f"--teacher. Add --teacher DIR, a directory with {students[0]}-train.npz."
        )
    if students and args.repeated_ids:
        raise InputError(
            "--teacher and --repeated_ids cannot be combined: a row's teacher is found by its id. Leave one out."
        )


def check_chunks(args: argparse.Namespace) -> None:
    views = [branches(args)[name].pairing_for("train").views for name in args.train_tasks]
    most = max(1 + max(i for view in of_task for i in view) for of_task in views) * (args.batch_size or 0)
    most = args.max_tokens // 2 if args.max_tokens else most  # a sentence has two tokens or more
    if args.chunk_rows is not None and args.chunk_rows >= most:
        raise InputError(
            f"--chunk_rows must be below the number of sentences in a batch, at most {most} here, found "
            f"{args.chunk_rows}. Lower it, or leave it out."
        )


def check_frozen(args: argparse.Namespace) -> None:
    """Refuse a frozen encoder if nothing above it would learn, or if a loss trains the encoder only."""
    feature_learns = pos.FEATURES[args.feature].own_parameters
    for branch in (branches(args)[name] for name in args.train_tasks):
        name = branch.task.name
        pooler_learns = heads.POOLERS[branch.pooling].own_parameters
        shared_layer_learns = args.share_pair_layer and branch.task.is_pair
        head_learns = heads.HEADS[branch.head].own_parameters
        if not (shared_layer_learns or pooler_learns or feature_learns or head_learns):
            raise InputError(
                f"--{name}_head {branch.head} has no weights of its own, and --option pretrain, the handout's default, "
                f"freezes the encoder: nothing would learn. Use --option finetune, or --{name}_head linear."
            )
        for loss_name, loss in losses_of(args, name).items():
            if loss.needs_dropout or not (loss.trains_head or pooler_learns or feature_learns):
                raise InputError(
                    f"--{name}_loss {getattr(args, f'{name}_loss')}: {loss_name} trains the encoder, but --option "
                    f"pretrain, the handout's default, freezes it. Use --option finetune, or leave {loss_name} out."
                )


# --- tasks and files --------------------------------------------------------------------------------------------------


def branches(args: argparse.Namespace) -> dict[str, Branch]:
    """Pooling, head, pairing and dropout of every task."""

    def dropout(name: str) -> float:
        own = getattr(args, f"{name}_dropout")
        return args.hidden_dropout_prob if own is None else own

    return {
        name: Branch(
            TASKS[name],
            pooling=getattr(args, f"{name}_pooling") or args.pooling,
            head=getattr(args, f"{name}_head") or args.head or TASKS[name].predicts.default_head,
            pairing=getattr(args, f"{name}_pairing", None) or args.pairing,
            dropout=dropout(name),
            symmetric=args.symmetric,
        )
        for name in args.tasks
    }


def data_paths(task: Task, args: argparse.Namespace, split: str) -> list[Path]:
    """As given: a training file may have a reader's name in front, as in snli:data/train.jsonl.

    Empty for the training files of a task that does not train.
    """
    given = getattr(args, f"{task.name}_{split}")
    return [Path(path) for path in (given if isinstance(given, list) else [given] if given else [])]


def data_files(args: argparse.Namespace) -> list[Path]:
    """All files that a run reads."""
    files = [(name, split) for name in args.tasks for split in SCORED]
    files += [(name, "train") for name in args.train_tasks]
    data = [source_of(path)[1] for name, split in files for path in data_paths(TASKS[name], args, split)]
    return [*data, *teacher_files(args).values()]


def teacher_files(args: argparse.Namespace) -> dict[str, Path]:
    """The files with the teacher's logits, by task."""
    return {name: Path(args.teacher) / f"{name}-train.npz" for name in tasks_with(args, "distill")}


def logits_remedy(folder: Path, *, train: bool) -> str:
    """How to write a run's logits again, for messages."""
    if (folder / "ensemble.json").is_file():
        return f"Predict with its runs{' and --predict_train' * train}, then combine them again."
    return f"Predict again: multitask_classifier.py --predict_only{' --predict_train' * train} --run {folder}"
