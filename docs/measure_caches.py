"""Memory and speed of training on a CPU with and without bounds on oneDNN's caches; docs/GPU.md has the result.

    python docs/measure_caches.py --steps 300 --regularizer rdrop --lengths 3 200 --rows 2

Two processes train minilm in bf16 on the same random batches, one with torch's own limit of 1024 and one with that of
utils.py. They take turns of four steps, so that both see the same load of the machine. Times are CPU times.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
TURN = 4  # steps
VARIABLES = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"


def train(args: argparse.Namespace) -> None:
    """Answer every line on stdin with the CPU times of a turn's steps and the resident memory in MB."""
    sys.path.insert(0, str(ROOT))
    import torch

    import multitask_build
    from multitask_classifier import get_args
    from tasks import TASKS, Batch, Encoded
    from training import EpochRecord
    from utils import Precision, keep_freed_memory

    keep_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    given = ["--model", "minilm", "--tasks", *args.tasks, "--option", "finetune", "--precision", "bf16"]
    flags = get_args([*given, "--regularizer", args.regularizer])
    model = multitask_build.build_model(flags).train()
    trainer = multitask_build.build_trainer(flags, model, Precision("bf16", torch.device("cpu")), args.steps)
    generator = torch.Generator().manual_seed(0)

    def batch(task: str) -> Batch:
        """A batch of one task; both sentences of a pair have the same length."""
        T = int(torch.randint(args.lengths[0], args.lengths[1] + 1, (), generator=generator))
        ids = torch.randint(1000, 20000, (args.rows, T), generator=generator)
        sentences = (Encoded(ids, torch.ones_like(ids), torch.zeros_like(ids)),) * (1 + TASKS[task].is_pair)
        labels = torch.arange(args.rows) % 2
        view = tuple(range(len(sentences)))
        return Batch(task, ["a"] * args.rows, sentences, labels if task == "sst" else labels.float(), views=(view,))

    for _ in sys.stdin:
        times = []
        for _ in range(TURN):
            draw, started = [batch(task) for task in args.tasks], time.process_time()
            trainer.update([draw], EpochRecord(trainer.targets), 1)
            times.append(time.process_time() - started)
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") >> 20
        print(json.dumps({"times": times, "resident": resident}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tasks", nargs="+", default=["sst"], help="one batch of each per step")
    parser.add_argument("--regularizer", default="none")
    parser.add_argument("--lengths", type=int, nargs=2, default=[3, 200])
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--capacity", help="instead of that of utils.py")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        train(args)
        return
    usual = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    chosen = dict.fromkeys(VARIABLES, args.capacity) if args.capacity else {}
    environments = {"1024 each": usual | dict.fromkeys(VARIABLES, "1024"), "bounded": usual | chosen}
    command = [sys.executable, __file__, *sys.argv[1:], "--worker"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    workers = {name: subprocess.Popen(command, env=env, **pipes) for name, env in environments.items()}
    turns: dict[str, list[dict]] = {name: [] for name in workers}
    for turn in range(args.steps // TURN):
        for name in sorted(workers, reverse=turn % 2 == 0):
            workers[name].stdin.write("\n")
            workers[name].stdin.flush()
            turns[name].append(json.loads(workers[name].stdout.readline()))
    for worker in workers.values():
        worker.stdin.close()
        worker.wait()
    for name, found in turns.items():
        print(f"{name}: MB after each sixth of the steps {[t['resident'] for t in found][:: max(1, len(found) // 6)]}")
        steps = [seconds for t in found[2:] for seconds in t["times"]]
        print(f"{name}: median of {len(steps)} steps {1000 * statistics.median(steps):.0f} ms of CPU time")
    pairs = zip(turns["bounded"][2:], turns["1024 each"][2:], strict=True)
    ratios = [sum(bounded["times"]) / sum(other["times"]) for bounded, other in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"time of a turn, bounded / 1024 each: median {middle:.3f}, quartiles {low:.3f} and {high:.3f}")


if __name__ == "__main__":
    main()
