"""Mutation check: break the code in known ways and see whether the tests notice.

    python tests/mutants.py              # all mutants, a few minutes
    python tests/mutants.py --only smart # those of one file

Each mutant replaces one piece of code in a copy of the project. It is killed if one of its test files fails, and
survives if all pass. The exit status is the number of survivors.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Mutant(NamedTuple):
    file: str  # without .py
    old: str
    new: str
    tests: str  # test files that should notice, separated by spaces, without test_ and .py


MUTANTS = [
    Mutant(
        "smart",
        "output.embeddings + noise, output.random_state",
        "output.embeddings.detach() + noise, output.random_state",
        "smart",
    ),
    Mutant("smart", "noise = self.ascend(noise, gradient, mask)", "noise = noise + 0 * gradient", "smart"),
    Mutant("smart", "return x.clamp(-radius, radius)", "return radius * x / linf_norm(x).clamp_min(1e-30)", "smart"),
    Mutant("smart", "if logits.size(1) > 1 else 1", "if logits.size(1) > 0 else 1", "smart"),
    Mutant(
        "smart",
        "torch._foreach_lerp_(list(self.teacher.values()), live, 1 - self.momentum)",
        "torch._foreach_lerp_(list(self.teacher.values()), live, self.momentum)",
        "smart",
    ),
    Mutant(
        "smart",
        "return scaled_to_one(torch.autograd.grad(divergence.sum(), logits)[0], l2_norm)",
        "return torch.autograd.grad(divergence.sum(), logits)[0]",
        "smart",
    ),
    Mutant("trainer", "            self.regularizer.update(self.model)\n", "", "training"),
    Mutant("trainer", "            self.averager.update(self.model)\n", "", "training"),
    Mutant("trainer", " * share / draws", " * share", "training"),
    Mutant("trainer", "with self.side_stream.drawn(self.precision.device):", "if True:", "training"),
    Mutant(
        "training",
        "self.progress.epoch - self.progress.best_epoch >= self.patience",
        "self.progress.epoch - self.progress.best_epoch > self.patience",
        "training",
    ),
    Mutant("trainer", " * share / draws", " / draws", "memory_shortage"),
    Mutant("smart", "return whole[:, start:stop].flatten(0, 1)", "return torch.randn_like(x)", "memory_shortage"),
    Mutant("training", "itertools.islice(self.steps(epoch), progress.step, None)", "self.steps(epoch)", "survival"),
    Mutant("training", '"record": self.record.state_dict(),', '"record": EpochRecord().state_dict(),', "survival"),
    Mutant("training", "        self.check_finite()\n        self.world.bro", "        self.world.bro", "survival"),
    Mutant("checkpoints", 'if digest(saved["content"]) != saved["sha256"]:', "if False:", "survival"),
    Mutant("runs", "            fcntl.flock(run.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)\n", "", "survival"),
    Mutant("console", 'if "\\r" in text:', "if False:", "survival"),
    Mutant("distributed", "gradient[start:stop] * ctx.size", "gradient[start:stop]", "distributed"),
    Mutant("distributed", "            flat /= self.size\n", "", "distributed"),
    Mutant("pcgrad", "            self.world.average(self.kept[name])\n", "            pass\n", "distributed"),
    Mutant(
        "datasets",
        "yield from source.batches(batch_size, epoch_generator(seed, epoch, number))",
        "yield from source.batches(batch_size, epoch_generator(seed, epoch))",
        "datasets",
    ),
    Mutant("datasets", "p[costs[p].argsort(stable=True)]", "p", "datasets"),
    Mutant("datasets", ".clamp(max=room // 2)", "", "datasets starter"),
    Mutant(
        "datasets",
        "token_ids = torch.where(mask, self.token_ids[places], padding_id).long()",
        "token_ids = self.token_ids[places].long()",
        "datasets",
    ),
    Mutant("evaluation", "order = torch.cat(rows).argsort()", "order = torch.cat(rows)", "evaluation"),
    Mutant("evaluation", "    model.eval()\n    (logits,)", "    (logits,)", "evaluation multitask"),
    Mutant("evaluation", "for c in np.union1d(values, labels):", "for c in np.unique(labels):", "evaluation"),
    Mutant(
        "ensemble",
        "np.sort(order[:middle]), np.sort(order[middle:])",
        "np.sort(order[middle:]), np.sort(order[middle:])",
        "ensemble",
    ),
    Mutant("ensemble", "int(np.argmax(scores))", "int(np.argmin(scores))", "ensemble"),
    Mutant("ensemble", "return kept / kept.sum()", "return kept", "ensemble"),
    Mutant("loops", "min(i + 1, last), min(i + 2, last)", "min(i + 1, last), min(i + 1, last)", "kernels"),
    Mutant("products", ' and _error("medium") < EXACT', "", "products"),
    Mutant("teacher", "sorted(set(range(len(train))) - set(work.folds[fold]))", "list(range(len(train)))", "teacher"),
    Mutant("teacher", "torch.stack(of_more) * scale + offsets", "torch.stack(of_more)", "teacher"),
    Mutant("teacher", "logits = raw * scale + offsets", "logits = raw", "teacher"),
    Mutant("teacher", "* log_scale.exp() + offsets", "+ offsets", "teacher"),
    Mutant("teacher", "world.collect(lines)[1:]", "world.collect(lines)[2:]", "teacher"),
    Mutant("teacher", "if comparable(row) not in taken", "if row not in taken", "teacher"),
    Mutant("unlabeled", "known | {(b, a) for a, b in known}", "known", "teacher"),
]


def survives(mutant: Mutant, copy: Path) -> bool:
    path = copy / f"{mutant.file}.py"
    source = path.read_text(encoding="utf-8")
    if source.count(mutant.old) != 1:
        sys.exit(f"{mutant.file}.py must have {mutant.old!r} once, found {source.count(mutant.old)} times.")
    path.write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")
    tests = [f"tests/test_{name}.py" for name in mutant.tests.split()]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    path.write_text(source, encoding="utf-8")
    if done.returncode not in (0, 1):  # 1: a test failed
        sys.exit(f"pytest did not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    verdict = f"killed by {failed[0].split('::')[-1].split(' ')[0]}" if failed else "SURVIVED"
    print(f"{mutant.file}: {mutant.old.strip()} -> {mutant.new.strip() or '(nothing)'} | {verdict}", flush=True)
    return done.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="a file, without .py")
    only = parser.parse_args().only
    mutants = [mutant for mutant in MUTANTS if only in (None, mutant.file)]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "project"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", ".*cache"))
        survivors = sum(survives(mutant, copy) for mutant in mutants)
    print(f"{len(mutants) - survivors} of {len(mutants)} mutants killed")
    sys.exit(survivors)


if __name__ == "__main__":
    main()
