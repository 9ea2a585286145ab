"""Memory: the peak of this process, and a formula for the peak of a training step.

    python memory.py                     # the largest batches of bert-base that fit into 8, 16 and 24 GB
    python memory.py --gb 40 --lengths 128 512

`peak_memory` is what the training loop logs. `peak` computes from plain values how much a step needs, in three terms:
what is there all the time, the gradients, and the activations. tests/test_memory.py compares it with the tensors that
are really alive in a step; docs/GPU.md has the table.

Shapes:  B batch   R rows of one pass: B, or 2 B for a bi-encoder   T tokens   H hidden size   N attention heads
         I intermediate size   K tasks
"""

import argparse
import contextlib
import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from config import BertConfig
from flags import ALWAYS, ArgumentParser, number
from kernels import CHUNK
from utils import run_script

# --- measured ---------------------------------------------------------------------------------------------------------

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")  # of Linux


def peak_memory(device: torch.device) -> int | None:
    """The peak in bytes since reset_peak: of torch's tensors on a GPU, otherwise of this process's resident memory.

    None if it is unknown. If the kernel refuses to reset the peak, that of a CPU counts from the start of the process.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type != "cpu":
        return None
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = STATUS.read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    unit = {"linux": 1024, "darwin": 1}.get(sys.platform)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit if unit else None


def reset_peak(device: torch.device) -> None:
    """Start a new measurement; where that is not possible, do nothing."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif device.type == "cpu":
        with contextlib.suppress(OSError):
            CLEAR_REFS.write_text("5")  # proc(5): resets the peak of the resident set to its present size


# --- the formula ------------------------------------------------------------------------------------------------------

FLOAT = 4  # bytes
HALF = 2


@dataclass(frozen=True)
class Step:
    """What decides how much memory a training step needs, besides the encoder.

    The defaults are those of one batch, trained in fp32 on a GPU. A step with several tasks, or with --accumulate, has
    several batches, one after the other: only one batch's activations are there at a time.
    """

    rows: int  # R
    length: int  # T, including padding
    batches: int = 1  # of the step: one per task and draw
    kept_tasks: int = 0  # K if --combiner is not sum: the gradients of every task are kept; otherwise 0
    passes: int = 1  # whose activations are saved: 2 with --regularizer smart or rdrop, 3 with both
    lookups: int = 1  # passes that run the embedding layer: 2 with --regularizer rdrop
    copies: int = 0  # of the weights: 1 for --averager ema or swa, 1 for --regularizer bregman
    half: bool = False  # --precision fp16 or bf16
    on_gpu: bool = True  # with torch's fused attention and dropout; on a CPU ours, in fp32
    stores_scores: bool | None = None  # whether attention stores its weights; by default on a CPU only
    checkpoint_activations: bool = False
    chunk_rows: int | None = None
    predicted_tokens: int = 0  # tokens of a batch whose word pieces are predicted: about 0.15 R T for --objective mlm

    @property
    def scores_are_stored(self) -> bool:
        return not self.on_gpu if self.stores_scores is None else self.stores_scores


def parameters(config: BertConfig) -> int:
    """The number of weights of the encoder. Heads are small."""
    H = config.hidden_size
    embeddings = (config.vocab_size + config.max_position_embeddings + config.type_vocab_size) * H + 2 * H
    return embeddings + linear_parameters(config) + config.num_hidden_layers * 4 * H


def linear_parameters(config: BertConfig) -> int:
    """The weights that mixed precision casts: those of the linear layers."""
    H, inner = config.hidden_size, config.intermediate_size
    return config.num_hidden_layers * (4 * (H + 1) * H + 2 * H * inner + H + inner) + (H + 1) * H


def layer_bytes(config: BertConfig, step: Step) -> int:
    """The bytes per token that one layer keeps for its backward pass.

    In fp32: the input (H), query, key and value (3 H), the heads' output (H), the input of both LayerNorms (2 H), the
    input of the feed-forward part (H), and its inner values before and after the activation (2 I). In mixed precision
    the linear layers keep these in half precision, and the LayerNorms in fp32. torch's dropout keeps a mask of one byte
    per element; ours on the CPU keeps none. Attention that is not fused keeps its weights before and after dropout
    (2 N T), in fp32, and in mixed precision their cast.
    """
    H, inner = config.hidden_size, config.intermediate_size
    if step.half:
        kept = HALF * ((1 + 3 + 1 + 1) * H + 2 * inner) + FLOAT * 2 * H
    else:
        kept = FLOAT * ((1 + 3 + 1 + 2 + 1) * H + 2 * inner)
    masks = 2 * H if step.on_gpu else 0
    if step.scores_are_stored:
        weights = config.num_attention_heads * step.length
        kept += FLOAT * 2 * weights + (HALF * weights if step.half else 0)
        masks += weights if step.on_gpu else 0
    return kept + masks


def embedding_bytes(config: BertConfig, step: Step) -> int:
    """The bytes per token of a pass before and after the layers: LayerNorm's input, the embeddings, the last output."""
    return FLOAT * 3 * config.hidden_size + (config.hidden_size if step.on_gpu else 0)


def activation_bytes(config: BertConfig, step: Step) -> int:
    """What all passes keep for the backward pass, including what is recomputed at a time."""
    tokens, layer = step.rows * step.length, layer_bytes(config, step)
    total = step.passes * tokens * embedding_bytes(config, step)
    together = tokens  # encoded, or recomputed, at a time
    passes = step.passes
    if step.chunk_rows is not None and step.chunk_rows < step.rows:
        together, passes = step.chunk_rows * step.length, 1
    if step.checkpoint_activations:
        inputs = FLOAT * config.hidden_size * config.num_hidden_layers
        return total + passes * together * inputs + together * layer
    return total + passes * together * config.num_hidden_layers * layer


def workspace_bytes(config: BertConfig, step: Step) -> int:
    """What the backward pass adds at a time: in a layer's feed-forward part, in its attention, or for word logits."""
    rows = min(step.rows, step.chunk_rows or step.rows)
    H, inner, size = config.hidden_size, config.intermediate_size, HALF if step.half else FLOAT
    feed_forward = size * inner + FLOAT * 2 * H
    attention = FLOAT * (2 * config.num_attention_heads * step.length + 2 * H) - size * 2 * inner
    of_layer = rows * step.length * max(feed_forward, attention * step.scores_are_stored)
    # the logits, their log-softmax, and the gradients of both
    of_logits = step.predicted_tokens * config.vocab_size * (4 * FLOAT + (HALF if step.half else 0))
    return max(of_layer, of_logits)


def parts(config: BertConfig, step: Step) -> dict[str, int]:
    """The bytes at the peak of a step, by what they are for.

    The peak is at one of four moments: when the last batch's backward pass starts, and all activations are there; when
    it is through with one of several passes, whose gradients wait for those of the others; when it ends, and all
    gradients are there; or when the tasks' gradients are combined, for which a GPU copies a part of them. A gradient
    that is added to an earlier one exists beside it for a moment; the largest is that of the word embeddings. Those of
    two uses in a batch are added first, into a third.
    """
    weights = FLOAT * parameters(config)
    sets = max(1, step.kept_tasks)  # of gradients
    casts = HALF * linear_parameters(config) if step.half else 0
    used_twice = step.lookups > 1 or step.predicted_tokens > 0  # word pieces are predicted by the same matrix
    added = FLOAT * config.vocab_size * config.hidden_size * ((step.batches > sets) + 2 * used_twice)
    copied = FLOAT * step.kept_tasks * min(CHUNK, parameters(config)) if step.on_gpu else 0
    activations, workspace = activation_bytes(config, step), workspace_bytes(config, step)
    others = activations * (step.passes - 1) // step.passes  # of the passes that are not through
    waiting = linear_parameters(config) * (HALF if step.half else FLOAT) * (step.passes > 1)
    names = "gradients", "weights in half precision", "activations", "workspace"
    moments = [
        (min(step.batches - 1, sets) * weights, casts, activations, workspace),
        (min(step.batches - 1, sets) * weights, casts, others, workspace + waiting),
        (min(step.batches, sets) * weights, casts, 0, added),
        (min(step.batches, sets) * weights, 0, 0, copied),
    ]
    fixed = {"weights": weights, "moments of AdamW": 2 * weights, "copies of the weights": step.copies * weights}
    return fixed | dict(zip(names, max(moments, key=sum), strict=True))


def peak(config: BertConfig, step: Step) -> int:
    """The peak of a training step in bytes, counting tensors: without the CUDA context and without fragmentation."""
    return sum(parts(config, step).values())


# --- what fits --------------------------------------------------------------------------------------------------------

GIB = 2**30
# Assumed, not measured: no GPU was available where this project was written.
USABLE = 0.92  # share of a card's nominal memory that a process can have: a T4 with ECC has 14.75 of 16 GiB
CONTEXT = GIB // 2  # CUDA's context with its kernels, and cuBLAS's workspaces
FRAGMENTS = 0.10  # share of the rest that the allocator cannot use

METHODS: dict[str, Callable[[Step], Step]] = {
    "plain": lambda step: step,
    "PCGrad": lambda step: replace(step, kept_tasks=3),
    "SMART": lambda step: replace(step, passes=2),
    "both": lambda step: replace(step, kept_tasks=3, passes=2),
}


def room(gigabytes: float) -> float:
    """The bytes that tensors can have on a GPU of this nominal size."""
    return (gigabytes * GIB * USABLE - CONTEXT) * (1 - FRAGMENTS)


def largest_rows(config: BertConfig, step: Step, limit: float) -> int:
    """The largest R with which the step's peak is within the limit; 0 if one row does not fit."""
    low, high = 0, 2**20
    while low < high:  # the peak grows with R
        middle = (low + high + 1) // 2
        low, high = (middle, high) if peak(config, replace(step, rows=middle)) <= limit else (low, middle - 1)
    return low


def table(config: BertConfig, sizes: Sequence[float], lengths: Sequence[int]) -> list[str]:
    """Lines of Markdown: the largest batches of a step of three tasks."""
    lines = [
        "| | " + " | ".join(f"T = {length}" for length in lengths) + " |",
        "|---" * (len(lengths) + 1) + "|",
    ]
    for half in (False, True):
        for name, method in METHODS.items():
            cells = []
            for length in lengths:
                step = method(Step(1, length, batches=3, half=half))
                cells.append(" / ".join(str(largest_rows(config, step, room(size))) for size in sizes))
            lines.append(f"| {name}, {'fp16' if half else 'fp32'} | " + " | ".join(cells) + " |")
    return lines


def get_args(argv: list[str] | None = None) -> argparse.Namespace:
    new = ArgumentParser(
        "memory.py",
        "Print the largest batches of bert-base that fit into a GPU's memory, in rows of one task; pairs that are "
        "encoded apart count twice. Derived, not measured.",
        "python memory.py --gb 40 --lengths 128 512",
    )
    add = new.section("flags")
    add("--gb", type=number(float, 1, 1000), nargs="+", default=[8, 16, 24], needs=ALWAYS, help="sizes of GPUs")
    add("--lengths", type=number(int, 1, 512), nargs="+", default=[32, 64, 128, 256, 512], needs=ALWAYS,
        help="tokens per sentence or joined pair")  # fmt: skip
    return new.parse(argv)


def main() -> None:
    args = get_args()
    print(f"Rows of a batch for {' / '.join(f'{size:g}' for size in args.gb)} GB, three tasks per step:\n")
    print("\n".join(table(BertConfig(), args.gb, args.lengths)))


if __name__ == "__main__":
    run_script(main)
