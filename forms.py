"""In which form other libraries can express a trained run: its encoder, and the model of each task."""

from typing import NamedTuple

from torch import nn

from heads import Dense
from tasks import Task
from trained import TrainedRun

CLASSIFIER, CROSS_ENCODER, SENTENCE_TRANSFORMER = "BertForSequenceClassification", "CrossEncoder", "SentenceTransformer"


class Form(NamedTuple):
    """How another library computes the outputs of a task, or the vectors of the encoder."""

    loader: str  # the class that loads it: CLASSIFIER, CROSS_ENCODER or SENTENCE_TRANSFORMER
    pooling: str  # as sentence-transformers names it
    layers: tuple[Dense, ...]  # after the pooling
    score_of_cosine: str | None = None  # the logit of a pair as an expression of its cosine


def why_not_plain(run: TrainedRun) -> str:
    """Why the encoder computes more than a BERT of other libraries; empty if it does not."""
    if not run.model.adapter.plain_encoder:
        return f"--adapter {run.args.adapter} gives every task layers of its own, which no other library has"
    if run.model.feature.needs_tags:
        return f"--feature {run.args.feature} reads part-of-speech tags, which no other library computes"
    return ""


def form_of(run: TrainedRun, name: str) -> Form | str:
    """The form of a task's model, or why there is none."""
    branch, pooler, head = run.branches[name], run.model.poolers[name], run.model.heads[name]
    if reason := why_not_plain(run):
        return reason
    if pooler.published is None:
        return (
            f"--{name}_pooling {branch.pooling} has no counterpart in other libraries; mean, cls, max and pooler have"
        )
    layers = head.layers()
    if layers is None:
        return (
            f"--{name}_head {branch.head} joins several vectors (--{name}_pairing {branch.pairing}), which no other "
            f"library does; --{name}_pairing cross and the cosine heads can be expressed"
        )
    layers = (*pooler.layers(), *shared_layers(run, branch.task), *layers)
    if head.score_of_cosine() is not None:
        return Form(SENTENCE_TRANSFORMER, pooler.published, layers, head.score_of_cosine())
    if pooler.published == "cls" and [layer.activation for layer in layers] == [nn.Tanh, nn.Identity]:
        return Form(CLASSIFIER, pooler.published, layers)
    return Form(CROSS_ENCODER if branch.task.is_pair else SENTENCE_TRANSFORMER, pooler.published, layers)


def shared_layers(run: TrainedRun, task: Task) -> tuple[Dense, ...]:
    """The layer of --share_pair_layer, if the task has it."""
    linears = [part for part in run.model.shared_pair_layer.modules() if isinstance(part, nn.Linear)]
    return tuple(Dense.of(linear, nn.GELU) for linear in linears) if task.is_pair else ()


def encoder_form(run: TrainedRun) -> Form | str:
    """The encoder with the pooling that all tasks share, or why there is none."""
    if reason := why_not_plain(run):
        return reason
    poolings = {branch.pooling for branch in run.branches.values()}
    pooler = next(iter(run.model.poolers.values()))
    if len(poolings) > 1 or pooler.published is None:
        return f"sentence-transformers cannot express its pooling ({', '.join(sorted(poolings))})"
    return Form(SENTENCE_TRANSFORMER, pooler.published, pooler.layers())
