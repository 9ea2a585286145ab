"""What only a GPU can show: parity with the CPU, every combination, overflow, resuming, memory and speed.

    python -m pytest tests/gpu

Ends with a table to paste into docs/GPU.md. Without CUDA everything is skipped. MINBERT_GPU_TESTS_DEVICE=cpu runs the
same code on the CPU with a tiny model: it shows that the tests themselves work, not that a GPU does.
"""

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import run_script, write_task_files
from safetensors.torch import load_file
from test_distributed import torchrun
from test_machine import REGIONS, Operations
from test_training import Bench, Start, assert_close, same, weights_of
from torch import Tensor

import utils
from bert import BertModel
from checkpoints import load_state, save_state
from config import BertConfig
from datasets import Split
from evaluation import predict
from optimizer import AdamW
from pcgrad import GradientCombiner, Method
from readers import Examples
from runs import Run
from tasks import TASKS, Batch, Encoded
from tokenizer import BertTokenizer
from trainer import EpochRecord
from utils import Precision

CPU = torch.device("cpu")
DEVICE = torch.device(os.environ.get("MINBERT_GPU_TESTS_DEVICE", "cuda"))
ON_GPU = DEVICE.type == "cuda"
HALF = "fp16" if ON_GPU else "bf16"  # fp16 products are slow and rarely implemented on a CPU

if ON_GPU and not torch.cuda.is_available():
    reason = utils.why_no_gpu(torch.__version__, torch.version.cuda, utils.driver_version())
    pytest.skip(reason.removeprefix("--use_gpu "), allow_module_level=True)
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="measures a GPU")
has_bf16 = not ON_GPU or torch.cuda.get_device_capability() >= utils.BF16_CAPABILITY


@pytest.fixture
def bench(tiny_checkpoint: Path) -> Start:
    """On the device that is tested; device=CPU gives the reference."""
    return lambda *flags, **options: Bench(tiny_checkpoint, *flags, **{"device": DEVICE} | options)


def on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


# --- parity with the CPU ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["written", "fused", "fastest"])
@pytest.mark.parametrize("task", ["sst", "para", "sts"])
def test_logits_are_those_of_the_cpu(task: str, attention: str, bench: Start):
    one, other = bench("--attention", attention), bench(device=CPU)
    with torch.no_grad():
        found, wanted = (b.model.eval().predict(b.batch(task, 0, 3, 5)).logits.cpu() for b in (one, other))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


def split_of(one: Bench) -> Split:
    texts = [f"sentence {i} is {'good ' * (i % 7)}" for i in range(20)]
    examples = Examples(TASKS["sst"], list(map(str, range(20))), (texts,), [i % 5 for i in range(20)])
    return Split.tokenize(examples, one.tokenizer)


@pytest.mark.parametrize(("precision", "atol"), [("fp32", 1e-4), (HALF, 0.02)])
def test_predictions_are_those_of_the_cpu(precision: str, atol: float, bench: Start):
    one, other = bench(), bench(device=CPU)
    found = predict(one.model, split_of(one), 6, Precision(precision, DEVICE))
    wanted = predict(other.model, split_of(other), 6, Precision("fp32", CPU))
    assert found.ids == wanted.ids
    np.testing.assert_allclose(found.logits, wanted.logits, rtol=0, atol=atol)


STEPS = {
    "sum": [],
    "pcgrad": ["--combiner", "pcgrad"],
    "cagrad, clipped": ["--combiner", "cagrad", "--clip", 1],
    "joined pairs": ["--pairing", "cross", "--pooling", "mean"],
    "written attention": ["--attention", "written"],
    "recomputed activations": ["--checkpoint_activations"],
    "chunks": ["--chunk_rows", 2],
    "lora": ["--adapter", "lora"],
    "pal": ["--adapter", "pal"],
    "rdrop": ["--regularizer", "rdrop"],
    "bregman": ["--regularizer", "bregman"],
}


@pytest.mark.parametrize("case", STEPS)
def test_two_steps_of_gradient_descent_are_those_of_the_cpu(case: str, bench: Start):
    """Without dropout, and with SGD, which does not amplify the rounding errors of the gradients."""
    one, other = (bench(*STEPS[case], device=device).with_sgd() for device in (DEVICE, CPU))
    before = weights_of(other.model)
    found, wanted = (on_cpu(b.after([b.draw(0, 1, 2)], [b.draw(3, 4, 5)])) for b in (one, other))
    assert_close(found, wanted, atol=1e-4)
    assert max((wanted[name] - before[name]).abs().max() for name in wanted) > 1e-2


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_adamw_is_that_of_the_cpu(weight_decay: float):
    shapes, updates = [(300, 200), (200,), (7, 3, 5), (1,)], {}
    for device in (DEVICE, CPU):
        generator = torch.Generator().manual_seed(0)
        parameters = [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in shapes]
        optimizer = AdamW(parameters, lr=1e-2, weight_decay=weight_decay)
        for _ in range(20):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(device)
            optimizer.step()
        updates[device] = {str(i): p.detach().cpu() for i, p in enumerate(parameters)}
    assert_close(updates[DEVICE], updates[CPU], atol=1e-5)


class Recording(Method):
    """Keeps the Gram matrix and returns given weights."""

    def __init__(self, *weights: float):
        self.given, self.gramian = torch.tensor(weights, dtype=torch.float64), None

    def weights(self, gramian: Tensor, names: tuple[str, ...]) -> Tensor:
        self.gramian = gramian
        return self.given


def combined(shapes: list[tuple[int, ...]], scale: float) -> tuple[np.ndarray, np.ndarray, list[Tensor], Recording]:
    """The gradients of three tasks as vectors, their weights, the combined gradients, and the method."""
    shared = [torch.zeros(shape, device=DEVICE, requires_grad=True) for shape in shapes]
    generator = torch.Generator().manual_seed(1)
    method, vectors = Recording(0.5, -2.0, 1e-3), []
    combiner = GradientCombiner(shared, method)
    for task in ("a", "b", "c"):
        gradients = [scale * torch.randn(shape, generator=generator) for shape in shapes]
        vectors.append(torch.cat([g.flatten() for g in gradients]).double().numpy())
        combiner.backward(task, sum((g.to(DEVICE) * p).sum() for g, p in zip(gradients, shared, strict=True)))
    combiner.write_gradients()
    return np.stack(vectors), method.given.numpy(), [p.grad for p in shared], method


@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e12])
def test_gram_matrix_and_weighted_sum_are_those_of_float64(scale: float):
    vectors, weights, gradients, method = combined([(500, 384), (384,), (1000, 37), (3,)], scale)
    gramian, wanted = method.gramian.cpu().numpy(), vectors @ vectors.T
    norms = np.sqrt(np.diag(wanted))
    np.testing.assert_allclose(gramian / np.outer(norms, norms), wanted / np.outer(norms, norms), rtol=0, atol=1e-6)
    np.testing.assert_allclose(np.sqrt(np.diag(gramian)), norms, rtol=1e-6)
    found = torch.cat([g.flatten() for g in gradients]).cpu().double().numpy()
    np.testing.assert_allclose(found, weights @ vectors, rtol=0, atol=1e-6 * np.abs(vectors).max())


# --- combinations -----------------------------------------------------------------------------------------------------

ALL = ["--combiner", "pcgrad", "--regularizer", "smart+bregman", "--averager", "ema", "--clip", 1]
COMBINATIONS = {
    "half precision, pcgrad, smart, bregman and ema": [*ALL, "--precision", HALF],
    "the same with recomputed activations": [*ALL, "--precision", HALF, "--checkpoint_activations"],
    "the same in chunks": [*ALL, "--precision", HALF, "--chunk_rows", 2],
    "the same on joined pairs": [*ALL, "--precision", HALF, "--pairing", "cross"],
    "bigru": ["--pooling", "bigru", "--precision", HALF],
    "pal in half precision": ["--adapter", "pal", "--precision", HALF],
    "contrastive losses": ["--sts_loss", "mse+cosent", "--para_loss", "bce+mnrl", "--precision", HALF],
    "nadam": ["--optimizer", "nadam"],
    "adafactor": ["--optimizer", "adafactor", "--precision", HALF],
    "compiled, smart": ["--compile", "--regularizer", "smart"],
    "compiled, pal": ["--compile", "--adapter", "pal"],
    "compiled, all": ["--compile", *ALL, "--precision", HALF],
}


@pytest.mark.parametrize("case", COMBINATIONS)
def test_every_combination_trains(case: str, bench: Start):
    one = bench(*COMBINATIONS[case], dropout=True)
    if one.args.compile:
        one.model.adapter.compile_layers()
    before, record = weights_of(one.model), EpochRecord(one.trainer.targets)
    one.trainer.precision.scaler = torch.amp.GradScaler(DEVICE.type, init_scale=64.0, enabled=HALF == "fp16")
    for number in range(1, 4):
        one.trainer.update([one.draw(0, 1, 2, 3)], record, number)
    record.check()
    after = weights_of(one.model)
    assert all(weight.isfinite().all() for weight in after.values())
    assert sum(not torch.equal(before[name], after[name]) for name in after) > len(after) / 2


@pytest.mark.parametrize("flags", [[], ["--combiner", "pcgrad"], ["--regularizer", "smart", "--clip", 1]])
def test_an_fp16_overflow_skips_exactly_one_step(flags: list, bench: Start):
    one = bench("--precision", "fp16", "--averager", "ema", "--schedule", "linear", *flags)
    trainer, objective = one.trainer, one.trainer.objectives["para"]
    trainer.precision.scaler = torch.amp.GradScaler(DEVICE.type, init_scale=64.0)
    before = weights_of(one.model)
    trainer.objectives["para"] = lambda output, batch: objective(output, batch) * 1e38
    assert same(one.after([one.draw(0, 1, 2)]), before)
    assert (trainer.averager.count, trainer.schedule.last_epoch, trainer.precision.scaler.get_scale()) == (0, 0, 32.0)
    trainer.objectives["para"] = objective
    assert not same(one.after([one.draw(0, 1, 2)]), before)
    assert (trainer.averager.count, trainer.schedule.last_epoch, trainer.precision.scaler.get_scale()) == (1, 1, 32.0)


# --- resuming and repeating -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("start", "end"), [(CPU, DEVICE), (DEVICE, CPU), (DEVICE, DEVICE)], ids=str)
@pytest.mark.parametrize("optimizer", ["adamw", "nadam", "adafactor"])
def test_a_run_is_resumed_on_another_device(
    optimizer: str, start: torch.device, end: torch.device, bench: Start, tmp_path: Path
):
    flags = ["--optimizer", optimizer, "--averager", "ema", "--regularizer", "bregman", "--combiner", "gradvac"]
    one, other, whole = (bench(*flags, device=device) for device in (start, end, CPU))
    one.after([one.draw(0, 1, 2)], [one.draw(3, 4)])
    save_state(one.trainer.state_dict(), Run(tmp_path))
    other.trainer.load_state_dict(load_state(Run(tmp_path)))
    found = on_cpu(other.after([other.draw(5, 6)]))
    wanted = whole.after([whole.draw(0, 1, 2)], [whole.draw(3, 4)], [whole.draw(5, 6)])
    distance = {name: (found[name] - wanted[name]).abs().mean() for name in found}
    assert max(distance.values()) < 2e-3  # a step of Adam has the size 1e-2 wherever a gradient's sign is certain


@pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_end_where_one_ends(tmp_path: Path):
    """NCCL, and gradients averaged before they are combined; without dropout, whose masks differ."""
    write_task_files(tmp_path / "data")
    torch.manual_seed(0)
    shape = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    off = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    BertModel(BertConfig(**shape, **off)).save_pretrained(tmp_path / "tiny")
    BertTokenizer.from_pretrained("minilm").save_pretrained(tmp_path / "tiny")
    for size in (1, 2):
        flags = ["--model", tmp_path / "tiny", "--data", tmp_path / "data", "--runs", tmp_path, "--name", str(size)]
        flags += ["--predictions", tmp_path / "predictions", "--option", "finetune", "--combiner", "pcgrad"]
        flags += ["--regularizer", "smart", "--hidden_dropout_prob", 0, "--epochs", 2, "--batch_size", 3]
        flags += ["--deterministic", "--lr", "1e-3"] + ["--use_gpu"] * ON_GPU
        with torchrun(size, flags) as run:
            output, _ = run.communicate(timeout=300)
        assert run.returncode == 0, output
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in "12")
    differences = {name: float((one[name] - two[name]).abs().max()) for name in one if not name.endswith("key.bias")}
    assert max(differences.values()) < 1e-4, differences


def test_deterministic_training_gives_the_same_bits_twice(tiny_checkpoint: Path, tmp_path: Path):
    write_task_files(tmp_path / "data")
    flags = ["--model", tiny_checkpoint, "--data", tmp_path / "data", "--option", "finetune", "--epochs", 2]
    flags += ["--predictions", tmp_path / "p", "--combiner", "pcgrad", "--regularizer", "smart", "--deterministic"]
    flags += ["--precision", HALF, *(["--use_gpu"] if ON_GPU else [])]
    weights = []
    for name in ("one", "two"):
        done = run_script("multitask_classifier.py", *flags, "--runs", tmp_path, "--name", name)
        assert done.returncode == 0, done.stderr
        weights.append(load_file(tmp_path / name / "model.safetensors"))
    assert same(*weights)


# --- waiting, memory and speed, with bert-base ------------------------------------------------------------------------


@pytest.mark.parametrize("case", REGIONS)
def test_a_step_casts_every_weight_once_for_all_batches(case: str, bench: Start):
    one = bench("--precision", HALF, *REGIONS[case], dropout=True)
    step = [one.draw(0, 1, 2), one.draw(3, 4)]
    with Operations(dict(one.model.named_parameters())) as counted:
        one.trainer.update(step, EpochRecord(), 1)
    assert set(counted.casts.values()) == {1}, counted.casts.most_common(3)


@needs_gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("flags", [[], ["--regularizer", "smart+bregman", "--averager", "ema", "--clip", 1]])
def test_a_step_never_waits_for_the_gpu(precision: str, flags: list, bench: Start):
    if precision == "bf16" and not has_bf16:
        pytest.skip("this GPU has no bf16")
    one = bench("--precision", precision, *flags)
    step, record = [one.draw(0, 1, 2)], EpochRecord(one.trainer.targets)
    one.trainer.update(step, record, 1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        one.trainer.update(step, record, 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")


SHAPE = {} if ON_GPU else dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)


@pytest.fixture(scope="module")
def base_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random bert-base (tiny on a CPU), so that nothing has to be fetched."""
    folder = tmp_path_factory.mktemp("base")
    BertModel(BertConfig(**SHAPE)).save_pretrained(folder)
    BertTokenizer.from_pretrained("minilm").save_pretrained(folder)
    return folder


def random_batch(task: str, B: int, T: int) -> Batch:
    generator = torch.Generator().manual_seed(B * T)
    sentences = []
    for _ in TASKS[task].text_columns:
        ids = torch.randint(1000, 20000, (B, T), generator=generator)
        sentences.append(Encoded(ids, torch.ones_like(ids), torch.zeros_like(ids)))
    labels = {"sst": torch.arange(B) % 5, "para": torch.arange(B) % 2, "sts": torch.arange(B) % 5 * 1.0}[task]
    views = ((0, 1),) if len(sentences) == 2 else ((0,),)
    return Batch(task, list(map(str, range(B))), tuple(sentences), labels, views=views).to(DEVICE)


def stepper(checkpoint: Path, B: int, T: int, *flags: object) -> tuple[Bench, Callable[[], None]]:
    """A trainer with all three tasks, dropout on, and the function that makes one of its steps."""
    one = Bench(checkpoint, *flags, dropout=True, device=DEVICE)
    if one.args.compile:
        one.model.adapter.compile_layers()
    step, record = [[random_batch(task, B, T) for task in one.args.tasks]], EpochRecord()
    return one, lambda: one.trainer.update(step, record, 1)


GIB = 2**30


def expected_peak(B: int, T: int, *, surgery: bool, copies: int, passes: int) -> float:
    """The formula of docs/GPU.md, in bytes; copies: of the weights, by EMA and teacher; passes: whose activations."""
    weights = 0.41 * GIB * (3 + (3 if surgery else 1) + copies)
    return weights + 382 * 1024 * 2 * B * T * passes + 0.7 * GIB


@needs_gpu
@pytest.mark.parametrize(
    ("flags", "facts"),
    [
        ([], dict(surgery=False, copies=0, passes=1)),
        (ALL, dict(surgery=True, copies=2, passes=2)),
    ],
    ids=["plain", "all"],
)
@pytest.mark.parametrize(("B", "T"), [(16, 64), (32, 64)])
def test_the_peak_of_memory_is_that_of_the_formula(
    B: int, T: int, flags: list, facts: dict, base_checkpoint: Path, figures: dict[str, str]
):
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    _, step = stepper(base_checkpoint, B, T, "--precision", "fp16", *flags)
    for _ in range(3):
        step()
    found, expected = torch.cuda.max_memory_allocated(), expected_peak(B, T, **facts)
    name = f"peak, fp16, B={B}, T={T}, {'pcgrad+smart+bregman+ema' if flags else 'plain'}"
    figures[name] = f"{found / GIB:.2f} GiB (formula {expected / GIB:.2f})"
    assert 0.6 * expected < found < 1.15 * expected, figures[name]


@pytest.fixture(scope="module")
def figures(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """What was measured, by name; printed as a table at the end."""
    found: dict[str, str] = {}
    yield found
    name = torch.cuda.get_device_name() if ON_GPU else "CPU, tiny model: shows only that the tests run"
    lines = [f"{name} | torch {torch.__version__} | CUDA {torch.version.cuda} | driver {utils.driver_version()}"]
    lines += ["", "| measured | |", "|---|---|", *(f"| {key} | {value} |" for key, value in found.items())]
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("\n\n" + "\n".join(lines))


def wait() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def milliseconds(function: Callable[[], object], rounds: int = 20 if ON_GPU else 2) -> str:
    """The median of the rounds, after three that do not count."""
    times = []
    for _ in range(3 + rounds):
        wait()
        started = time.perf_counter()
        function()
        wait()
        times.append(1000 * (time.perf_counter() - started))
    return f"{sorted(times[3:])[rounds // 2]:.1f} ms"


SPEEDS = {
    "step, fp32": ["--precision", "fp32"],
    "step, fp32 with TF32": ["--precision", "fp32"],
    "step, fp16": ["--precision", "fp16"],
    "step, bf16": ["--precision", "bf16"],
    "step, half precision, compiled": ["--precision", HALF, "--compile"],
    "step, half precision, pcgrad": ["--precision", HALF, "--combiner", "pcgrad"],
    "step, half precision, smart": ["--precision", HALF, "--regularizer", "smart"],
    "step, half precision, pcgrad+smart+bregman+ema": ["--precision", HALF, *ALL],
    "step, half precision, written attention": ["--precision", HALF, "--attention", "written"],
    "step, half precision, recomputed activations": ["--precision", HALF, "--checkpoint_activations"],
}


@pytest.mark.parametrize("case", SPEEDS)
def test_the_speed_of_a_step(case: str, base_checkpoint: Path, figures: dict[str, str]):
    """Three tasks, batch 16, 30 tokens, pairs encoded apart."""
    if "bf16" in case and not has_bf16:
        pytest.skip("this GPU has no bf16")
    if "compiled" in case and not ON_GPU:
        pytest.skip("compiling takes minutes on a CPU; tests/test_training.py has it")
    torch.set_float32_matmul_precision("high" if "TF32" in case else "highest")
    try:
        _, step = stepper(base_checkpoint, 16, 30, *SPEEDS[case])
        figures[case] = milliseconds(step)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_the_speed_of_the_parts_of_a_step(base_checkpoint: Path, figures: dict[str, str]):
    one, _ = stepper(base_checkpoint, 16, 30)
    parameters = list(one.model.parameters())
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    figures["AdamW, one update"] = milliseconds(one.trainer.optimizer.step)
    shared = one.model.shared_parameters()
    kept = {task: [torch.randn_like(p) for p in shared] for task in one.args.tasks}

    def combine() -> None:
        combiner = GradientCombiner(shared, Recording(1.0, 1.0, 1.0))
        combiner.kept = {task: list(gradients) for task, gradients in kept.items()}
        combiner.write_gradients()

    figures["Gram matrix and weighted sum, three tasks"] = milliseconds(combine)
    batch = random_batch("sst", 32, 30)
    evaluate = partial(one.model.eval().predict, batch)
    with torch.no_grad(), Precision(HALF, DEVICE).autocast():
        figures["evaluation, half precision, 32 rows"] = milliseconds(evaluate)
