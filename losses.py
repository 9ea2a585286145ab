"""What training makes small: LOSSES of one task, each the mean over the batch's examples, and WEIGHTINGS between tasks.

Shapes:  B batch   R sentences of a batch: B, or 2B for bi-encoded pairs   H hidden size   C outputs of a task
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tasks import TASKS, Batch, Output, Task
from utils import InputError, number

Objective = Callable[[Output, Batch], Tensor]

# --- losses: (Output, Batch) -> scalar, the mean over the examples really in the batch (TRAPS 12) ---------------------


def full(tensor: Tensor) -> Tensor:
    """In float32 at least: a mean of logarithms in half precision has three digits."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def cross_entropy(output: Output, batch: Batch) -> Tensor:
    """-log softmax(logits)[label]. Labels 0 .. C-1."""
    return F.cross_entropy(full(output.logits), batch.labels)


def smoothed_cross_entropy(output: Output, batch: Batch, label_smoothing: float = 0.1) -> Tensor:
    """Cross entropy with (1 - eps) of the target on the label and eps spread over all C. Labels 0 .. C-1.

    Szegedy et al. 2016 (arXiv:1512.00567), section 7. For labels that annotators disagree on, as in SST.
    """
    return F.cross_entropy(full(output.logits), batch.labels, label_smoothing=label_smoothing)


def binary_cross_entropy(output: Output, batch: Batch) -> Tensor:
    """-y log sigmoid(l) - (1 - y) log(1 - sigmoid(l)). Labels in [0, 1]."""
    logits = full(output.logits).squeeze(1)  # (B, 1) -> (B,): beside (B,) labels, (B, 1) would make (B, B) differences
    return F.binary_cross_entropy_with_logits(logits, batch.labels.to(logits.dtype))


def squared_error(output: Output, batch: Batch) -> Tensor:
    """(l - y)^2. Labels 0 to 5."""
    predicted = full(output.logits).squeeze(1)  # (B, 1) -> (B,)
    return F.mse_loss(predicted, batch.labels.to(predicted.dtype))


def distill(output: Output, batch: Batch, distill_temperature: float = 2.0) -> Tensor:
    """T^2 KL(P || Q) with P, Q = softmax(l / T) of the teacher's and of our logits; a number: (l - l_teacher)^2.

    Hinton et al. 2015 (arXiv:1503.02531), section 2. One logit l stands for a Bernoulli variable, which is the softmax
    of (l, 0). T^2 keeps the gradients' size while T varies, so that weights beside other losses stay valid. Their cross
    entropy with soft targets has the same gradients; KL is 0 where teacher and student agree. Labels play no part.
    """
    logits, teacher = full(output.logits), full(batch.teacher)  # (B, C) each
    kind = TASKS[batch.task].kind
    if kind == "number":
        return F.mse_loss(logits, teacher.to(logits.dtype))
    if kind == "probability":
        logits, teacher = (F.pad(x, (0, 1)) for x in (logits, teacher))  # (B, 1) -> (B, 2)
    log_q, log_p = ((x / distill_temperature).log_softmax(dim=1) for x in (logits, teacher.to(logits.dtype)))
    return distill_temperature**2 * (log_p.exp() * (log_p - log_q)).sum(dim=1).mean()


# --- losses on the sentences' vectors: pairs have to be encoded apart -------------------------------------------------


def cosines(u: Tensor, v: Tensor) -> Tensor:
    """cos(u_i, v_j), every one with every other: (B, H), (B, H) -> (B, B)."""
    with torch.autocast(u.device.type, enabled=False):  # or the product would have three digits
        return F.normalize(full(u), dim=1) @ F.normalize(full(v), dim=1).T


def cosine_embedding(output: Output, batch: Batch, cosine_margin: float = 0.0) -> Tensor:
    """p (1 - cos(u, v)) + (1 - p) max(0, cos(u, v) - margin), p = y for labels 0 and 1, p = y / 5 for labels 0 to 5.

    torch's CosineEmbeddingLoss, the handout's cosine-similarity fine-tuning (001, section 5.3): equivalent sentences
    are drawn to a cosine of 1, unrelated ones to 0. torch's targets are +1 and -1 and nothing else: of any other label
    its loss is 0. So a paraphrase is +1, another pair -1, and a grade is the mean over both targets, +1 with weight
    y / 5. That keeps how strongly a pair is drawn, |2p - 1|; but as each branch is linear, all above 2.5 are drawn to 1
    and all below to the margin: to learn the grades themselves add mse or cosent.
    """
    u, v = output.vectors
    cosine = F.cosine_similarity(full(u), full(v), dim=1)  # (B,)
    p = batch.labels.to(cosine.dtype) / (5 if TASKS[batch.task].kind == "number" else 1)
    return (p * (1 - cosine) + (1 - p) * (cosine - cosine_margin).relu()).mean()


def cosent(output: Output, batch: Batch, cosent_scale: float = 20.0) -> Tensor:
    """log(1 + sum over pairs of rows with y_i > y_j of exp(scale (cos_j - cos_i))): their cosines in the labels' order.

    Su 2022 (CoSENT, kexue.fm/archives/8847; scale 20 there and in sentence-transformers). Labels 0 and 1, or 0 to 5.
    Rows with equal labels make no pair; without any pair it is 0. The loss ranks a batch as a whole: it is no mean over
    the rows and grows with the batch, like the logarithm of the number of pairs at the most.
    """
    u, v = output.vectors
    cosine = cosent_scale * F.cosine_similarity(full(u), full(v), dim=1)  # (B,)
    in_order = batch.labels[:, None] > batch.labels  # (B, B), y_i > y_j
    differences = (cosine - cosine[:, None]).masked_fill(~in_order, -math.inf)  # (B, B), cos_j - cos_i
    return torch.cat([cosine.new_zeros(1), differences.flatten()]).logsumexp(dim=0)


def ranking(scores: Tensor, similar: Tensor, anchors: Tensor) -> Tensor:
    """-log softmax over the candidates, at the right one, which is number i for anchor i; the mean over the anchors.

    scores: (R, R), of anchor i and candidate j. similar: (R, R), where j must not count as wrong for i. anchors: (R,),
    which of them count. Exactly 0 where no anchor counts, or none has a wrong candidate (TRAPS 28).
    """
    itself = torch.eye(len(scores), dtype=torch.bool, device=scores.device)
    losses = -scores.masked_fill(similar & ~itself, -math.inf).log_softmax(dim=1).diagonal()  # (R,)
    return (losses * anchors).sum() / anchors.sum().clamp(min=1)


def negatives_ranking(scores: Tensor, batch: Batch, symmetric: bool, threshold: float) -> Tensor:
    """Multiple negatives ranking with the scores S(x_i, y_j), (B, B), of first sentence i and second sentence j.

    Henderson et al. 2017 (arXiv:1705.00652), section 4.4:  mean_i [log sum_j exp S(x_i, y_j) - S(x_i, y_i)]

    The anchors x_i are the first sentences of the positive rows: label 1, or a grade of at least `threshold`. The
    candidates are the second sentences of all rows, those of negative rows included, as hard negatives. Left out are
    texts known to mean the same as x_i: x_i and y_i themselves, and y_j where row j is positive and x_j is one of these
    two. symmetric: the mean with the same from second to first sentences. Deviations: hard negatives and the symmetric
    form, both as in sentence-transformers, and the texts left out.
    """
    first, second = batch.texts  # (B,) each
    positive = batch.labels >= (threshold if TASKS[batch.task].kind == "number" else 1)  # (B,)

    def one_way(scores: Tensor, x: Tensor, y: Tensor) -> Tensor:
        same_candidate = (x[:, None] == y) | (y[:, None] == y)  # (B, B), y_j is x_i or y_i
        same_anchor = (x[:, None] == x) | (y[:, None] == x)  # (B, B), x_j is x_i or y_i
        return ranking(scores, same_candidate | (same_anchor & positive), positive)

    forward = one_way(scores, first, second)
    return (forward + one_way(scores.T, second, first)) / 2 if symmetric else forward


def multiple_negatives(
    output: Output,
    batch: Batch,
    mnrl_scale: float = 20.0,
    mnrl_symmetric: bool = False,
    mnrl_threshold: float = 4.0,
) -> Tensor:
    """negatives_ranking with S = scale cos(u_i, v_j), as in sentence-transformers; Henderson et al. have u_i.v_j."""
    return negatives_ranking(mnrl_scale * cosines(*output.vectors), batch, mnrl_symmetric, mnrl_threshold)


def multiple_negatives_by_head(
    output: Output, batch: Batch, mnrl_symmetric: bool = False, mnrl_threshold: float = 4.0
) -> Tensor:
    """negatives_ranking with S = the head's logit for (x_i, y_j), as in paper 002, section 3.2.2; B^2 logits.

    Paper 002 has each of its K positive pairs compete with the other K - 1; here the negative rows' sentences compete
    too. Mind two things. Adding a constant to all logits changes nothing, so where the even chance lies, on which
    accuracy hangs, is not learned. And a linear head on (u, v) gives w.u + w'.v + b, of which only w'.v counts: it
    learns which sentences are likely paraphrases of anything. sbert and cosine_affine compare.
    """
    u, v = output.vectors
    pairs = u.repeat_interleave(len(v), dim=0), v.repeat(len(u), 1)  # (B, H) -> (B B, H), first sentences slowest
    scores = full(output.score(pairs)).view(len(u), len(v))  # (B B, 1) -> (B, B)
    return negatives_ranking(scores, batch, mnrl_symmetric, mnrl_threshold)


def simcse(output: Output, batch: Batch, simcse_temperature: float = 0.05) -> Tensor:
    """Unsupervised SimCSE, Gao et al. 2021 (arXiv:2104.08821), equation 4, on all R sentences of the batch:

        mean_i  -log  exp(cos(h_i, h'_i) / tau) / sum_j exp(cos(h_i, h'_j) / tau)

    h, h' are a sentence's vectors under two dropout masks: a second pass through the encoder. Labels play no part.
    Deviation: left out of the sum are i's own text, should it come again, and that of the other sentence of its row,
    which may mean the same.
    """
    h, other = (torch.cat(o.vectors) for o in (output, output.again()))  # (R, H) each
    texts = torch.cat(batch.texts)  # (R,)
    of_row = torch.stack(batch.texts, dim=1).repeat(len(batch.texts), 1)  # (R, 1 or 2), the texts in i's row
    similar = (of_row[:, :, None] == texts).any(dim=1)  # (R, 1 or 2, R) -> (R, R)
    return ranking(cosines(h, other) / simcse_temperature, similar, torch.ones_like(texts))


@dataclass(frozen=True)
class Loss:
    function: Callable[..., Tensor]
    kinds: tuple[str, ...]  # Task.kind that its labels and logits fit
    settings: tuple[str, ...] = ()  # flags that it takes as keyword arguments of the same name
    on_vectors: bool = False  # it compares the vectors of sentences, so that pairs have to be encoded apart
    trains_head: bool = True  # else the head learns nothing from it
    compares_rows: bool = False  # it is 0 for a batch of one
    needs_dropout: bool = False  # in the encoder, which a frozen one has not


PAIRS = ("probability", "number")  # the kinds of tasks on two sentences
LOSSES: dict[str, Loss] = {
    "ce": Loss(cross_entropy, ("category",)),
    "ce_smooth": Loss(smoothed_cross_entropy, ("category",), ("label_smoothing",)),
    "bce": Loss(binary_cross_entropy, ("probability",)),
    "mse": Loss(squared_error, ("number",)),
    "distill": Loss(distill, ("category", "probability", "number"), ("distill_temperature",)),
    "cosine_embedding": Loss(cosine_embedding, PAIRS, ("cosine_margin",), on_vectors=True, trains_head=False),
    "cosent": Loss(cosent, PAIRS, ("cosent_scale",), on_vectors=True, trains_head=False, compares_rows=True),
    "mnrl": Loss(
        multiple_negatives,
        PAIRS,
        ("mnrl_scale", "mnrl_symmetric", "mnrl_threshold"),
        on_vectors=True,
        trains_head=False,
        compares_rows=True,
    ),
    "mnrl_head": Loss(
        multiple_negatives_by_head, PAIRS, ("mnrl_symmetric", "mnrl_threshold"), on_vectors=True, compares_rows=True
    ),
    "simcse": Loss(
        simcse,
        ("category", *PAIRS),
        ("simcse_temperature",),
        on_vectors=True,
        trains_head=False,
        compares_rows=True,
        needs_dropout=True,
    ),
}
DEFAULT_LOSSES = {"category": "ce", "probability": "bce", "number": "mse"}  # by Task.kind


def build_objective(spec: str | None, task: Task, args: argparse.Namespace) -> Objective:
    """spec: a loss, or several with weights: `mse`, `bce+mnrl:0.2`. None: the usual one for the task's kind."""
    flag = f"--{task.name}_loss"
    names = names_in(spec or DEFAULT_LOSSES[task.kind])
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise InputError(f"{flag} {spec}: every loss may stand once, found {twice[0]} twice. Leave one out.")
    terms = [_term(text, f"{flag} {spec}", task) for text in (spec or DEFAULT_LOSSES[task.kind]).split("+")]
    weighted = [(w, partial(loss.function, **{s: getattr(args, s) for s in loss.settings})) for loss, w in terms]

    def objective(output: Output, batch: Batch) -> Tensor:
        return sum(weight * loss(output, batch) for weight, loss in weighted)

    return objective


def names_in(spec: str) -> list[str]:
    """`bce+mnrl:0.2` -> bce, mnrl"""
    return [term.partition(":")[0] for term in spec.split("+")]


def _term(text: str, flag: str, task: Task) -> tuple[Loss, float]:
    """`mse:0.2` -> the loss and its weight."""
    name, colon, weight = text.partition(":")
    if name not in LOSSES:
        raise InputError(f"{flag}: a loss must be one of {', '.join(sorted(LOSSES))}, found {name!r}. Choose one.")
    loss = LOSSES[name]
    if task.kind not in loss.kinds:
        fitting = " or ".join(sorted(n for n, other in LOSSES.items() if task.kind in other.kinds))
        raise InputError(
            f"{flag}: {name} is for a task whose output is a {' or a '.join(loss.kinds)}, "
            f"found {task.name}, whose output is a {task.kind}. Use {fitting}."
        )
    return loss, _weight(weight, f"{flag}: the weight of {name}") if colon else 1.0


def _weight(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise InputError(f"{what} must be a number above 0, found {text!r}. Write it like mse:0.2, or leave it out.")
    return value


# --- weightings: (name of the task, loss) -> loss ---------------------------------------------------------------------


class Equal(nn.Module):
    """Every task's loss as it is."""

    def __init__(self, tasks: list[Task], weights: dict[str, float]):
        super().__init__()

    def forward(self, name: str, loss: Tensor) -> Tensor:
        return loss


class Fixed(Equal):
    """Every task's loss times its weight of --task_weights; 1 for a task that is not named there."""

    def __init__(self, tasks: list[Task], weights: dict[str, float]):
        super().__init__(tasks, weights)
        self.weights = {task.name: weights.get(task.name, 1.0) for task in tasks}

    def forward(self, name: str, loss: Tensor) -> Tensor:
        return self.weights[name] * loss

    def extra_repr(self) -> str:
        return " ".join(f"{name}={weight:g}" for name, weight in self.weights.items())


class Uncertainty(Equal):
    """Kendall et al. 2018 (arXiv:1705.07115), equations 7 and 10, with a learned s = log sigma^2 for every task:

        classification    exp(-s) L + s/2             smallest at s = log 2L
        regression        exp(-s) L/2 + s/2           smallest at s = log L

    s starts at 0. It moves by about the learning rate a step: at the encoder's 1e-5 it all but stands still;
    --head_lr 1e-3 lets it learn. Deviation: none.
    """

    def __init__(self, tasks: list[Task], weights: dict[str, float]):
        super().__init__(tasks, weights)
        self.factors = {task.name: 0.5 if task.kind == "number" else 1.0 for task in tasks}
        self.log_variances = nn.ParameterDict({task.name: nn.Parameter(torch.zeros(())) for task in tasks})

    def forward(self, name: str, loss: Tensor) -> Tensor:
        s = self.log_variances[name]
        return self.factors[name] * torch.exp(-s) * loss + s / 2


WEIGHTINGS: dict[str, type[Equal]] = {"equal": Equal, "fixed": Fixed, "uncertainty": Uncertainty}


# --- flags ------------------------------------------------------------------------------------------------------------


def task_weight(text: str) -> str:
    """An argparse type: `sts=2`, checked and left as it is."""
    name, equals, weight = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"must be like sts=2, found {text!r}")
    number(float, 0, 1e6, above=True)(weight)
    return text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("losses")
    group.add_argument(
        "--label_smoothing", type=number(float, 0, 1), default=0.1, help="share of the target that ce_smooth spreads"
    )
    positive = number(float, 0, 1e6, above=True)
    group.add_argument("--cosine_margin", type=number(float, -1, 1), default=0.0, help="of cosine_embedding")
    group.add_argument("--cosent_scale", type=positive, default=20.0, help="of cosent: what cosines are multiplied by")
    group.add_argument("--mnrl_scale", type=positive, default=20.0, help="of mnrl: what cosines are multiplied by")
    group.add_argument(
        "--mnrl_symmetric", action="store_true", help="mnrl and mnrl_head also from second to first sentences"
    )
    group.add_argument(
        "--mnrl_threshold", type=number(float, 0, 5), default=4.0,
        help="similarity from which on a pair is positive for mnrl and mnrl_head",
    )  # fmt: skip
    group.add_argument("--simcse_temperature", type=positive, default=0.05, help="of simcse: tau")
    group.add_argument("--distill_temperature", type=positive, default=2.0, help="of distill: T")
    group.add_argument(
        "--weighting", choices=sorted(WEIGHTINGS), default="equal", help="how the tasks' losses are weighted"
    )
    group.add_argument(
        "--task_weights", type=task_weight, nargs="+", metavar="TASK=WEIGHT", help="for --weighting fixed; others: 1"
    )


def build_weighting(args: argparse.Namespace, tasks: list[Task]) -> nn.Module:
    """A module; what it learns has to be registered in the model, so that the optimizer owns it."""
    if (args.weighting == "fixed") != bool(args.task_weights):
        raise InputError(
            f"--task_weights and --weighting fixed need each other, found --weighting {args.weighting} "
            f"{'with' if args.task_weights else 'without'} --task_weights. Give both, or neither."
        )
    weights = {name: float(weight) for name, _, weight in (t.partition("=") for t in args.task_weights or ())}
    names = [task.name for task in tasks]
    for name in weights:
        if name not in names:
            raise InputError(f"--task_weights: a task must be one of {', '.join(names)}, found {name!r}. Correct it.")
    return WEIGHTINGS[args.weighting](tasks, weights)
