"""--compile: every regularizer and adapter trains as it does without it, with at most two graphs for all layers."""

import itertools
from functools import partial
from pathlib import Path

import pytest
import torch
from test_training import Bench, assert_close
from torch._dynamo.utils import counters

from adapters import ADAPTERS
from bert import BertModel
from config import BertConfig

pytestmark = pytest.mark.usefixtures("one_thread")
TASKS = ("sst", "para", "sts")


@pytest.mark.parametrize("name", ADAPTERS)
def test_twelve_compiled_layers_and_three_tasks_need_one_graph_to_train_and_one_to_evaluate(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    """torch.compile gives up after eight graphs of one function and runs it uncompiled."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    shape = dict(vocab_size=50, hidden_size=16, num_hidden_layers=12, num_attention_heads=2, intermediate_size=32)
    bert = BertModel(BertConfig(**shape))
    adapter = ADAPTERS[name](bert, TASKS)
    torch._dynamo.reset()
    counters.clear()
    adapter.compile_layers()
    for training, graphs in ((True, 1), (False, 2)):
        for module in (bert, adapter):
            module.train(training)
        for task, T in itertools.product(TASKS, (7, 9, 12)):
            ids = torch.randint(1, 50, (3, T))
            with torch.set_grad_enabled(training):
                hidden = bert.encode(bert.embed(ids), torch.ones_like(ids), adapter.layers(task))
            if training:
                hidden.sum().backward()
        assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["unimplemented"], "no limit was reached"
    assert not counters["graph_break"]


REGULARIZED = {
    "none": [],
    "smart": ["--regularizer", "smart", "--smart_start", "logits"],
    "smart from the embeddings": ["--regularizer", "smart", "--smart_start", "embeddings", "--smart_sigma", 0.01],
    "bregman": ["--regularizer", "bregman"],
    "both": ["--regularizer", "smart+bregman"],
    "rdrop": ["--regularizer", "rdrop"],
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REGULARIZED)
def test_a_compiled_step_with_a_regularizer_is_that_of_the_plain_layers(case: str, tiny_checkpoint: Path):
    """SMART runs a backward pass through the graph of the clean pass and retains it for the loss."""
    torch._dynamo.reset()
    ends = []
    for compiled in (False, True):
        bench = Bench(tiny_checkpoint, *REGULARIZED[case]).with_sgd()
        if compiled:
            bench.model.adapter.compile_layers()
        torch.manual_seed(5)
        ends.append(bench.after([bench.draw(0, 1, 2)], [bench.draw(3, 4)]))
    assert_close(*ends, atol=1e-5)
