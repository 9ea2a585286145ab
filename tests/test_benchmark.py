"""The benchmarks' own arithmetic: medians, counted operations, generated data, what is refused."""

import math
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import benchmark
import benchmark_runs
import benchmark_steps
from bert import BertModel
from readers import read_examples
from tasks import PARA
from timing import Result, take_turns
from tokenizer import BertTokenizer
from utils import InputError


def test_a_result_compares_medians_with_the_target() -> None:
    result = Result.of("x", [0.003, 0.001, 0.1], "peer", [0.004, 0.004], target=0.75)
    assert (result.ours_ms, result.peer_ms, result.ratio, result.ok) == (3.0, 4.0, 0.75, True)
    assert not Result.of("x", [0.0031], "peer", [0.004], target=0.75).ok
    assert not Result.of("x", [math.inf], "peer", [1.0], target=9.0).ok


def test_sides_take_turns_and_the_warm_up_does_not_count() -> None:
    calls: list[str] = []
    actions = {name: (lambda name=name: calls.append(name) or float(len(calls))) for name in "ab"}
    assert take_turns(actions, 2, "", warm_up=1) == {"a": [3.0, 5.0], "b": [4.0, 6.0]}
    assert calls == list("ababab")


def test_the_operations_of_a_step_are_those_that_torch_counts() -> None:
    model = BertModel.from_pretrained("minilm").train()
    model.use_attention("written")
    ids = torch.randint(1000, 20000, (benchmark_steps.ROWS, benchmark_steps.LENGTH))
    with FlopCounterMode(display=False) as counter:
        hidden = model(ids, torch.ones_like(ids))["last_hidden_state"]
        hidden.sum().backward()
    assert benchmark_steps._step_operations(model.config) == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_generated_questions_are_all_different_and_readable(tmp_path: Path) -> None:
    path = tmp_path / "questions.csv"
    benchmark_runs._write_questions(path, 1500)
    examples = read_examples(PARA, [path], labeled=True)
    assert len(examples) == 1500
    assert len({*zip(*examples.texts, strict=True)}) == 1500
    assert set(examples.labels) == {0, 1}


def test_generated_questions_are_as_long_in_a_large_file_as_in_a_small_one(tmp_path: Path) -> None:
    """Once the numbers in them had more digits: at 140,000 rows, texts had 12% more tokens than at 2,000."""
    tokenizer, mean = BertTokenizer.from_pretrained("minilm"), {}
    for rows in (600, 30_000):
        benchmark_runs._write_questions(tmp_path / "questions.csv", rows)
        texts = read_examples(PARA, [tmp_path / "questions.csv"], labeled=True).texts
        some = [text for column in texts for text in column[-600:]]
        mean[rows] = sum(tokenizer.count_tokens(some)) / len(some)
    assert mean[30_000] == pytest.approx(mean[600], rel=0.02)


def test_whole_trainings_run_by_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "time_to_score" not in benchmark.get_args([]).only
    assert set(benchmark.get_args([]).only) | {*benchmark.BY_NAME_ONLY} == set(benchmark.BENCHMARKS)
    monkeypatch.delenv("COURSE_DATA", raising=False)
    with pytest.raises(InputError, match="Set COURSE_DATA"):
        benchmark_runs.time_to_score(1)


def test_an_unknown_benchmark_is_refused_in_one_line() -> None:
    with pytest.raises(InputError, match=r"--only must name some of adamw, .*found nonsense"):
        benchmark.get_args(["--only", "bert,nonsense"])
