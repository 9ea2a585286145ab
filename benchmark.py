"""Speed against real peers, measured in the same run.

    python benchmark.py --only adamw,frozen,bert --json results.json

Ours and the peer take turns; times are medians over the rounds, so that a slow moment of the machine hits both. Needs
the test dependencies (source setup.sh --dev).
"""

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from base_bert import find_checkpoint
from bert import BertModel
from classifier import BertSentimentClassifier, cross_entropy
from datasets import Split, epoch_generator, read_split, training_batches
from evaluation import keep_vectors, predict
from optimizer import AdamW, build_schedule
from tasks import SST
from tokenizer import BertTokenizer
from training import Trainer
from utils import (
    ArgumentParser,
    InputError,
    Precision,
    keep_freed_memory,
    number,
    run_script,
    seed_everything,
    write_text,
)

SAMPLE = Path(__file__).parent / "data" / "sample"
CPU = torch.device("cpu")


@dataclass
class Result:
    name: str
    ours_ms: float
    peer: str
    peer_ms: float
    ratio: float
    target: float
    ok: bool

    @classmethod
    def of(cls, name: str, ours: list[float], peer: str, theirs: list[float], target: float) -> "Result":
        a, b = (1000 * statistics.median(times) for times in (ours, theirs))
        return cls(name, round(a, 3), peer, round(b, 3), round(a / b, 3), target, a / b <= target)


def seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def take_turns(
    actions: dict[str, Callable[[], float]], rounds: int, label: str, warm_up: int = 3
) -> dict[str, list[float]]:
    """Each action gives its own time in seconds; all are run once a round, one after the other."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for done in tqdm(range(warm_up + rounds), desc=label, leave=False, disable=None):
        for name, action in actions.items():
            spent = action()
            if done >= warm_up:
                times[name].append(spent)
    return times


# --- adamw: one update of all of minilm's weights ---------------------------------------------------------------------


def adamw(rounds: int) -> list[Result]:
    def prepared(kind: type[torch.optim.Optimizer], **options: object) -> Callable[[], float]:
        torch.manual_seed(0)
        model = BertModel.from_pretrained("minilm")
        for p in model.parameters():
            p.grad = 1e-3 * torch.randn_like(p)
        update = kind(model.parameters(), lr=1e-5, weight_decay=0.01, **options)
        return lambda: seconds(update.step)

    actions = {
        "ours": prepared(AdamW),
        "fused": prepared(torch.optim.AdamW, fused=True),
        "foreach": prepared(torch.optim.AdamW, foreach=True),
    }
    times = take_turns(actions, rounds, "adamw")
    return [
        Result.of("adamw", times["ours"], "torch.optim.AdamW(fused=True)", times["fused"], 1.5),
        Result.of("adamw_foreach", times["ours"], "torch.optim.AdamW(foreach=True)", times["foreach"], 1.0),
    ]


# --- frozen: ten epochs on kept features against one encoding pass ----------------------------------------------------


def frozen(rounds: int) -> list[Result]:
    """Both go over the sample data's train, dev and test rows; ours also trains and evaluates ten times."""
    tokenizer = BertTokenizer.from_pretrained("minilm")
    splits = {
        name: read_split(SST, [SAMPLE / SST.filename(name)], tokenizer, labeled=name != "test")
        for name in ("train", "dev", "test")
    }
    seed_everything(0)
    model = BertSentimentClassifier(BertModel.from_pretrained("minilm"), SST.num_outputs, 0.3, frozen=True)
    precision = Precision("fp32", CPU)

    def encode() -> dict[str, Split]:
        return {name: keep_vectors(model, split, 32, precision) for name, split in splits.items()}

    def ten_epochs() -> None:
        kept = encode()
        update = AdamW(model.linear.parameters(), lr=1e-3)
        trainer = Trainer(model, {"sst": cross_entropy}, update, build_schedule(update, "constant", 1, 0), precision)
        for epoch in range(10):
            batches = training_batches(kept["train"], 8, epoch_generator(0, epoch))
            trainer.epoch(((b,) for b in batches), "epoch", len(kept["train"]) // 8)
            predict(model, kept["dev"], 32, precision)

    actions = {"ours": lambda: seconds(ten_epochs), "pass": lambda: seconds(encode)}
    times = take_turns(actions, max(3, rounds // 6), "frozen", warm_up=1)
    return [Result.of("frozen", times["ours"], "one encoding pass of the same rows", times["pass"], 1.3)]


# --- bert: a training step -------------------------------------------------------------------------------------------


def _training_steps(kind: str, threads: int, pipe: Connection) -> None:
    """A worker: builds its model, then makes one step for every message and answers with the time it took."""
    torch.set_num_threads(threads)
    seed_everything(0)
    if kind == "ours":
        keep_freed_memory()  # as every script of ours does
        model = BertModel.from_pretrained("minilm")
    else:
        import transformers

        transformers.utils.logging.disable_progress_bar()
        model = transformers.BertModel.from_pretrained(find_checkpoint("minilm"), attn_implementation="sdpa")
    model.train()
    head = torch.nn.Linear(model.config.hidden_size, 5)
    ids = torch.randint(1000, 20000, (32, 32))
    mask, labels = torch.ones_like(ids), torch.randint(5, (32,))

    def step() -> None:
        outputs = model(input_ids=ids, attention_mask=mask)
        F.cross_entropy(head(outputs["pooler_output"]), labels).backward()
        model.zero_grad()

    pipe.send("ready")
    while pipe.recv():
        pipe.send(seconds(step))


def bert(rounds: int) -> list[Result]:
    """Forward and backward pass, 32 x 32 tokens, dropout on; each side in a process of its own, as users run it."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    workers = []
    for kind in ("ours", "transformers"):
        pipes[kind], other = context.Pipe()
        workers.append(
            context.Process(target=_training_steps, args=(kind, torch.get_num_threads(), other), daemon=True)
        )
        workers[-1].start()
        pipes[kind].recv()

    def one_step(pipe: Connection) -> float:
        pipe.send(True)
        return pipe.recv()

    actions = {kind: (lambda pipe=pipe: one_step(pipe)) for kind, pipe in pipes.items()}
    times = take_turns(actions, rounds, "bert")
    for pipe, worker in zip(pipes.values(), workers, strict=True):
        pipe.send(False)
        worker.join()
    return [Result.of("bert", times["ours"], "transformers.BertModel, sdpa", times["transformers"], 0.9)]


BENCHMARKS: dict[str, Callable[[int], list[Result]]] = {"adamw": adamw, "frozen": frozen, "bert": bert}


# --- script -----------------------------------------------------------------------------------------------------------


def get_args() -> argparse.Namespace:
    parser = ArgumentParser(prog="benchmark.py", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(BENCHMARKS), help="which benchmarks, separated by commas")
    parser.add_argument("--rounds", type=number(int, 1, 10000), default=30, help="measurements of each side")
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    args.only = [name for name in args.only.split(",") if name]
    unknown = [name for name in args.only if name not in BENCHMARKS]
    if unknown or not args.only:
        raise InputError(f"--only must name some of {', '.join(BENCHMARKS)}, found {', '.join(unknown) or 'none'}.")
    return args


def main() -> None:
    args = get_args()
    results = []
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, {args.rounds} rounds")
    for name in args.only:
        for result in BENCHMARKS[name](args.rounds):
            results.append(asdict(result))
            verdict = "ok" if result.ok else "MISSED"
            print(
                f"{result.name:14} ours {result.ours_ms:9.2f} ms | {result.peer_ms:9.2f} ms {result.peer} | "
                f"ratio {result.ratio:.2f}, target {result.target:.2f}: {verdict}",
                flush=True,
            )
    if args.json:
        try:
            write_text(args.json, json.dumps(results, indent=2) + "\n")
        except OSError as error:
            raise InputError(f"--json {args.json}: cannot be written; {error.strerror}.") from error


if __name__ == "__main__":
    run_script(main)
