"""Flags that several scripts share: the encoder, the machine, data files, runs, long trainings."""

import argparse
import os
import time
from pathlib import Path
from typing import Any

from bert import ATTENTIONS
from flags import ALWAYS, ENCODER_TRAINS, ArgumentParser, Need, Switch, number
from submission import OPTIONS
from tasks import BatchSize, Tokens
from utils import InputError, Precision

OF_THE_MACHINE = {"use_gpu", "precision", "deterministic"}  # flags that may change when a run is resumed
OF_CHECKPOINTS = {"resume", "save_minutes", "keep_state"}  # these too
OF_DISPLAY = {"report", "tensorboard"}  # and these
FINE_TUNE_MODES = {later: option for option, later in OPTIONS.items()}


class SetOption(argparse.Action):
    """--option, or --fine-tune-mode: sets `option` to the earlier name, and `fine_tune_mode` to the later if given."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, value: Any, option_string: str = "") -> None:
        namespace.option = FINE_TUNE_MODES.get(value, value)
        namespace.fine_tune_mode = value if value in FINE_TUNE_MODES else None


def add_option(parser: ArgumentParser) -> None:
    """The last of both flags counts. Part 1 names its prediction files as that flag does."""
    add = parser.section("most used")
    add("--option", action=SetOption, choices=tuple(FINE_TUNE_MODES.values()), default="pretrain", needs=ALWAYS,
        help="pretrain freezes BERT, finetune trains all of it")  # fmt: skip
    add("--fine-tune-mode", "--fine_tune_mode", dest="option", action=SetOption, choices=tuple(FINE_TUNE_MODES),
        default=argparse.SUPPRESS, needs=ALWAYS, help="--option by its later name")  # fmt: skip
    parser.set_defaults(fine_tune_mode=None)


def with_option(given: dict[str, Any]) -> dict[str, Any]:
    """Any flags with --option filled in from the later starter's fine_tune_mode."""
    mode = given.get("fine_tune_mode")
    if mode is None or "option" in given:
        return given
    if mode not in FINE_TUNE_MODES:
        raise InputError(f"fine_tune_mode must be one of {', '.join(FINE_TUNE_MODES)}; found {mode!r}. Choose one.")
    return given | {"option": FINE_TUNE_MODES[mode]}


MODEL_HELP = "minilm, a hub id (or HUB_ID@COMMIT), or the directory of a checkpoint or run"


def add_most_used(
    parser: ArgumentParser, epochs: int, model: str = "bert-base-uncased", model_help: str = MODEL_HELP
) -> None:
    add = parser.section("most used")
    add("--model", default=model, needs=ALWAYS, metavar="NAME", help=model_help)
    add("--data", type=Path, default=Path("data"), needs=ALWAYS,
        help="directory with the course's files; data/sample comes with the project")  # fmt: skip
    add("--epochs", type=number(int, 1, 1000), default=epochs, needs=ALWAYS, metavar="N", help="passes over the data")
    add("--seed", type=number(int, 0, 2**31), default=11711, needs=ALWAYS, metavar="N",
        help="random seed of weights, batches and dropout")  # fmt: skip
    add("--use_gpu", action=Switch, needs=ALWAYS, help="train on CUDA")
    add("--precision", choices=sorted(Precision.DTYPES), default="fp32", needs=ALWAYS,
        help="fp32, or mixed precision; a T4 has no bf16, use fp16 there")  # fmt: skip
    parser.section("time and memory")("--deterministic", action=Switch, needs=ALWAYS,
        help="the same bits again on the same GPU, at some cost in time; a CPU gives them anyway")  # fmt: skip
    add("--name", needs=ALWAYS, help="name of the run (default: made from the time)")


# The default of --batch_size is filled in by `complete` of the script, so that one that was given can be told from it.
ROW_FLAGS = ("batch_size", "cfimdb_batch_size")  # the flags that give a number of rows
ONE_SIZE = Need(
    "one size of a batch, in rows or in tokens, but both are given",
    lambda args: args.max_tokens is None or all(getattr(args, flag, None) is None for flag in ROW_FLAGS),
    "Leave out --max_tokens",
)


def add_max_tokens(parser: ArgumentParser) -> None:
    add = parser.section("time and memory")
    add("--max_tokens", type=number(int, 1, 10**8), needs=ONE_SIZE, metavar="N",
        help="instead of --batch_size: as many rows as fit into N tokens, counting padding and both sentences of a "
        "pair, at least one")  # fmt: skip


def batch_size(args: argparse.Namespace, flag: str = "batch_size") -> BatchSize:
    """The size of a training batch: --max_tokens, or the flag that gives a number of rows."""
    return getattr(args, flag) if args.max_tokens is None else Tokens(args.max_tokens)


def add_encoder(parser: ArgumentParser) -> None:
    add = parser.section("the model")
    add(
        "--keep_layers",
        type=number(int, 1, 1000),
        needs=ALWAYS,
        metavar="N",
        help="keep only the first N layers of BERT",
    )
    add("--attention", choices=sorted(ATTENTIONS), default="fastest", needs=ALWAYS, help="how attention is computed")


def add_checkpoints(parser: ArgumentParser) -> None:
    parser.section("most used")("--resume", action=Switch, needs=ALWAYS,
        help="continue the run --name where it was saved last; start it if there is none yet")  # fmt: skip
    add = parser.section("files")
    add("--save_minutes", type=number(float, 0, 10**6), default=10.0, needs=ALWAYS, metavar="X",
        help="save the state for --resume every X minutes, and after every epoch")  # fmt: skip
    add("--keep_state", action=Switch, needs=ALWAYS,
        help="keep the state of a finished run, so that --resume --epochs N can extend it")  # fmt: skip
    add("--report", action=Switch, default=os.environ.get("MINBERT_REPORT", "1") != "0", needs=ALWAYS,
        help="write the run's report.html after every epoch (default: yes, unless the environment has "
        "MINBERT_REPORT=0)")  # fmt: skip
    add("--tensorboard", action=Switch, needs=ALWAYS,
        help="write event files for TensorBoard to the run's directory tensorboard")  # fmt: skip


def add_long_training(parser: ArgumentParser) -> None:
    """The flags of scripts whose runs take hours."""
    add_checkpoints(parser)
    add = parser.section("most used")
    add(
        "--dry_run", action=Switch, needs=ALWAYS, help="two steps of everything in a temporary directory; keeps nothing"
    )
    add = parser.section("time and memory")
    add("--accumulate", type=number(int, 1, 4096), default=1, needs=ALWAYS, metavar="N",
        help="average the gradients of N draws of the sampler, or N batches, into one update")  # fmt: skip
    add("--compile", action=Switch, needs=ENCODER_TRAINS, help="compile the layers of BERT with torch.compile")
    add("--checkpoint_activations", action=Switch, needs=ENCODER_TRAINS,
        help="save memory: recompute each layer in the backward pass")  # fmt: skip
    add("--patience", type=number(int, 0, 1000), default=0, needs=ALWAYS, metavar="N",
        help="stop after N epochs without a better one; 0 means never")  # fmt: skip


def add_files(parser: ArgumentParser, max_length: int) -> None:
    add = parser.section("files")
    add("--max_length", type=number(int, 4, 100_000), default=max_length, needs=ALWAYS, metavar="N",
        help="truncate longer texts to N tokens, at most what the checkpoint supports")  # fmt: skip
    add("--strict_data", action=Switch, needs=ALWAYS, help="stop at a row that cannot be used instead of skipping it")
    add("--runs", type=Path, default=Path("runs"), needs=ALWAYS, help="directory for runs: log, weights, state")


def add_max_train(parser: ArgumentParser) -> None:
    parser.section("files")("--max_train", type=number(int, 2, 10**9), needs=ALWAYS, metavar="N",
        help="train on at most N random rows per task, the same ones for the same seed")  # fmt: skip


def add_predictions(parser: ArgumentParser) -> None:
    add = parser.section("files")
    add(
        "--predictions", type=Path, default=Path("predictions"), needs=ALWAYS, help="directory for the prediction files"
    )


def add_eval_batch_size(parser: ArgumentParser) -> None:
    add = parser.section("time and memory")
    add("--eval_batch_size", type=number(int, 1, 4096), default=32, needs=ALWAYS, metavar="N",
        help="rows per forward pass in evaluation")  # fmt: skip


def run_name(args: argparse.Namespace, prefix: str) -> str:
    """--name, or a name made from the time."""
    if args.name is None and getattr(args, "resume", False):
        raise InputError("--resume needs the name of the run to continue, found no --name. Add --name NAME.")
    if args.name is not None:
        check_name(args.name)
    return args.name or f"{prefix}-{time.strftime('%Y%m%d-%H%M%S')}"


LONGEST_NAME = 200  # bytes; file systems allow 255, and temporary files have longer names


def check_name(name: str) -> None:
    """Refuse a name of a run that is not a plain file name."""
    odd = [c for c in name if c in "/\\" or not c.isprintable()]
    if odd or not name.strip(". ") or len(os.fsencode(name)) > LONGEST_NAME:
        shown = ascii(name if len(name) <= 60 else name[:57] + "...")
        raise InputError(
            f"--name {shown}: must be a plain name of at most {LONGEST_NAME} bytes without slashes and control "
            "characters. --runs sets the directory."
        )


# --- extending a run --------------------------------------------------------------------------------------------------


def check_extension(args: argparse.Namespace, epochs: int) -> None:
    """Refuse to resume a run of `epochs` epochs with another number if that would change what was trained already."""
    reasons = {
        f"--schedule {args.schedule} depends on the number of epochs": args.schedule != "constant",
        f"--warmup {args.warmup:g} depends on the number of epochs": args.warmup > 0,
        "--averager swa depends on the number of epochs": args.averager == "swa",
        "--sampler annealed depends on the number of epochs": getattr(args, "sampler", None) == "annealed",
    }
    for reason, holds in reasons.items():
        if holds:
            raise InputError(
                f"--resume --epochs {args.epochs}: the run was started with --epochs {epochs}, and {reason}, so its "
                f"epochs so far would have been different. Use --epochs {epochs}, or start anew with another --name."
            )
