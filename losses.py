"""Loss functions and the weighting between tasks. Unless noted, a loss is a mean over the batch's examples.

A loss has the signature (Output, Batch) -> scalar. `--para_loss bce+mnrl:0.2` adds several with weights. Student papers
are cited by their authors; recipes/README.md lists them.

Shapes:  B batch   R sentences of a batch: B, or 2B for bi-encoded pairs   H hidden size   C logits of a task
"""

import argparse
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flags import ALWAYS, ArgumentParser, Need, Switch, chosen, number, parse_spec
from kernels import no_tf32
from tasks import STS, TASKS, Batch, Category, Number, Output, Probability, Target, Task
from utils import InputError

TaskLoss = Callable[[Output, Batch], Tensor]

# --- supervised losses: the mean over the examples really in the batch (docs/PITFALLS.md, 12) -------------------------


def at_least_float32(tensor: Tensor) -> Tensor:
    """Half precision is converted to float32: a mean of logarithms in half precision has three digits."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def cross_entropy(output: Output, batch: Batch) -> Tensor:
    """-log softmax(logits)[label]. Labels 0 .. C-1."""
    return F.cross_entropy(at_least_float32(output.logits), batch.labels)


def smoothed_cross_entropy(output: Output, batch: Batch, label_smoothing: float = 0.1) -> Tensor:
    """Cross entropy with (1 - eps) of the target on the label and eps spread over all C classes. Labels 0 .. C-1.

    Szegedy et al. 2016 (arXiv:1512.00567), section 7. For labels that annotators disagree about, as in SST.
    """
    return F.cross_entropy(at_least_float32(output.logits), batch.labels, label_smoothing=label_smoothing)


def binary_cross_entropy(output: Output, batch: Batch) -> Tensor:
    """-y log sigmoid(l) - (1 - y) log(1 - sigmoid(l)). Labels in [0, 1]."""
    logits = at_least_float32(output.logits).squeeze(1)  # (B, 1) -> (B,); (B, 1) would broadcast to (B, B)
    return F.binary_cross_entropy_with_logits(logits, batch.labels.to(logits.dtype))


def mean_squared_error(output: Output, batch: Batch) -> Tensor:
    """(l - y)^2. Labels are numbers."""
    predicted = at_least_float32(output.logits).squeeze(1)  # (B, 1) -> (B,)
    return F.mse_loss(predicted, batch.labels.to(predicted.dtype))


def distill(output: Output, batch: Batch, distill_temperature: float = 2.0) -> Tensor:
    """T^2 KL(P || Q) with P, Q = softmax(l / T) of the teacher's and the student's logits; for a number (l - l_P)^2.

    Hinton et al. 2015 (arXiv:1503.02531), section 2. A single logit stands for a Bernoulli variable. The factor T^2
    keeps the size of the gradients while T varies, so weights relative to other losses stay valid. Hinton's cross
    entropy with soft targets has the same gradients; KL is 0 if teacher and student agree. Labels are not used.
    """
    logits = at_least_float32(output.logits)
    teacher = at_least_float32(batch.teacher).to(logits.dtype)  # (B, C) each
    return TASKS[batch.task].predicts.distillation(logits, teacher, distill_temperature)


# --- losses on the sentences' vectors: the two sentences of a pair must be encoded apart ------------------------------


def cosines(u: Tensor, v: Tensor) -> Tensor:
    """The cosines of all u_i with all v_j: (B, H), (S, H) -> (B, S)."""
    # in half precision, and in TF32, the product would have three digits
    with torch.autocast(u.device.type, enabled=False), no_tf32():
        return F.normalize(at_least_float32(u), dim=1) @ F.normalize(at_least_float32(v), dim=1).T


def cosine_embedding(output: Output, batch: Batch, cosine_margin: float = 0.0) -> Tensor:
    """p (1 - cos(u, v)) + (1 - p) max(0, cos(u, v) - margin), where p is the label as a fraction of its range.

    torch's CosineEmbeddingLoss, the handout's cosine-similarity fine-tuning (section 5.3): equivalent sentences are
    pulled towards a cosine of 1, unrelated ones towards 0. torch's targets are +1 and -1 and nothing else; for any
    other target its loss is 0. So a paraphrase is +1, any other pair -1, and a similarity is the mean over both
    targets with weights p and 1 - p. The strength of the pull, |2p - 1|, is kept; but since each branch is linear, all
    labels above the middle of the range are pulled towards 1 and all below towards the margin. To learn the labels
    themselves, add mse or cosent.
    """
    u, v = output.vectors
    cosine = F.cosine_similarity(at_least_float32(u), at_least_float32(v), dim=1)  # (B,)
    p = TASKS[batch.task].predicts.fraction(batch.labels.to(cosine.dtype))
    return (p * (1 - cosine) + (1 - p) * (cosine - cosine_margin).relu()).mean()


def cosent(output: Output, batch: Batch, cosent_scale: float = 20.0) -> Tensor:
    """log(1 + sum over pairs of rows with y_i > y_j of exp(scale (cos_j - cos_i))): ranks cosines like the labels.

    Su 2022 (CoSENT, kexue.fm/archives/8847; scale 20 there and in sentence-transformers). Rows with equal labels form
    no pair; without any pair the loss is 0. It ranks a batch as a whole: it is not a mean over the rows, and it grows
    at most like the logarithm of the number of pairs.
    """
    u, v = output.vectors
    cosine = cosent_scale * F.cosine_similarity(at_least_float32(u), at_least_float32(v), dim=1)  # (B,)
    in_order = batch.labels[:, None] > batch.labels  # (B, B), y_i > y_j
    differences = (cosine - cosine[:, None]).masked_fill(~in_order, -math.inf)  # (B, B), cos_j - cos_i
    return torch.cat([cosine.new_zeros(1), differences.flatten()]).logsumexp(dim=0)


# Contrastive ranking: a softmax over candidates, of which number i is the right one for anchor i


def same_meaning(x: Tensor, y: Tensor, candidates: Tensor, known: Tensor | None = None) -> Tensor:
    """Which candidates must not count as negatives, by the hashes of the texts: (B,), (B,), (S,) -> (B, S).

    x: the anchors. y: their positives, the first B candidates. A candidate is excluded for anchor i if it is x_i or y_i
    itself, or if it is the positive y_j of an anchor x_j that is x_i or y_i. known: (B,), which rows j really are
    positive pairs; by default all. Duplicates within a batch are common in Quora (docs/PITFALLS.md, 28).
    """
    excluded = (x[:, None] == candidates) | (y[:, None] == candidates)  # (B, S)
    same_anchor = (x[:, None] == x) | (y[:, None] == x)  # (B, B)
    excluded[:, : len(x)] |= same_anchor if known is None else same_anchor & known
    return excluded


def without_excluded(scores: Tensor, excluded: Tensor) -> Tensor:
    """The scores (B, S) with -inf for excluded candidates; the right candidate, number i for anchor i, always stays."""
    right = torch.eye(*scores.shape, dtype=torch.bool, device=scores.device)
    return scores.masked_fill(excluded & ~right, -math.inf)


def ranking(scores: Tensor, excluded: Tensor, anchors: Tensor) -> Tensor:
    """-log softmax over the candidates at the right one; the mean over the anchors that count.

    scores, excluded: (B, S). anchors: (B,), which of them count. Exactly 0 if no anchor counts, or if none has a wrong
    candidate (docs/PITFALLS.md, 28).
    """
    losses = -without_excluded(scores, excluded).log_softmax(dim=1).diagonal()  # (B,)
    return (losses * anchors).sum() / anchors.sum().clamp(min=1)


def negatives_ranking(scores: Tensor, batch: Batch, symmetric: bool, threshold: float) -> Tensor:
    """Multiple negatives ranking with the scores S(x_i, y_j), (B, B), of first sentence i and second sentence j.

    Henderson et al. 2017 (arXiv:1705.00652), section 4.4:  mean_i [log sum_j exp S(x_i, y_j) - S(x_i, y_i)]

    The anchors x_i are the first sentences of the positive rows: label 1, or a similarity of at least `threshold`. The
    candidates are the second sentences of all rows, including those of negative rows, as hard negatives, except texts
    known to mean the same as x_i (see same_meaning). symmetric: the mean with the same from second to first sentences.
    Deviations: hard negatives and the symmetric form, both as in sentence-transformers, and the excluded texts.
    """
    first, second = batch.text_hashes  # (B,) each
    positive = TASKS[batch.task].predicts.is_positive(batch.labels, threshold)  # (B,)

    def one_way(scores: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return ranking(scores, same_meaning(x, y, y, positive), positive)

    forward = one_way(scores, first, second)
    return (forward + one_way(scores.T, second, first)) / 2 if symmetric else forward


def multiple_negatives(
    output: Output,
    batch: Batch,
    mnrl_scale: float = 20.0,
    mnrl_symmetric: bool = False,
    mnrl_threshold: float = 4.0,
) -> Tensor:
    """negatives_ranking with S = scale cos(u_i, v_j), as in sentence-transformers; Henderson et al. use u_i.v_j."""
    return negatives_ranking(mnrl_scale * cosines(*output.vectors), batch, mnrl_symmetric, mnrl_threshold)


def multiple_negatives_by_head(
    output: Output, batch: Batch, mnrl_symmetric: bool = False, mnrl_threshold: float = 4.0
) -> Tensor:
    """negatives_ranking with S = the head's logit for (x_i, y_j), as in Tlemcani & Sohn, section 3.2.2; B^2 logits.

    In the paper each of K positive pairs competes with the other K - 1; here the negative rows' sentences compete too.
    Two limits: adding a constant to all logits changes nothing, so the loss does not learn where the threshold lies, on
    which accuracy depends. And a linear head on (u, v) gives w.u + w'.v + b, of which only w'.v matters: it learns
    which sentences are likely paraphrases of anything. sbert and cosine_affine really compare.
    """
    u, v = output.vectors
    pairs = u.repeat_interleave(len(v), dim=0), v.repeat(len(u), 1)  # (B, H) -> (B B, H), first sentences slowest
    scores = at_least_float32(output.score(pairs)).view(len(u), len(v))  # (B B, 1) -> (B, B)
    return negatives_ranking(scores, batch, mnrl_symmetric, mnrl_threshold)


def simcse_scores(u: Tensor, v: Tensor, temperature: float) -> Tensor:
    """The scores cos(u_i, v_j) / temperature of SimCSE (Gao et al. 2021): (B, H), (S, H) -> (B, S)."""
    return cosines(u, v) / temperature


def simcse(output: Output, batch: Batch, simcse_temperature: float = 0.05) -> Tensor:
    """Unsupervised SimCSE, Gao et al. 2021 (arXiv:2104.08821), equation 4, on all R sentences of the batch:

        mean_i  -log  exp(cos(h_i, h'_i) / tau) / sum_j exp(cos(h_i, h'_j) / tau)

    h and h' are a sentence's vectors under two dropout masks, so there is a second pass through the encoder. Labels are
    not used. Deviation: the sum leaves out i's own text, should it occur again, and the other sentence of i's row,
    which may mean the same.
    """
    h, other = (torch.cat(o.vectors) for o in (output, output.again()))  # (R, H) each
    texts = torch.cat(batch.text_hashes)  # (R,)
    partners = torch.cat(batch.text_hashes[::-1])  # (R,), the other text of the row, or the same if there is one
    return ranking(
        simcse_scores(h, other, simcse_temperature), same_meaning(texts, partners, texts), torch.ones_like(texts)
    )


# --- the registry -----------------------------------------------------------------------------------------------------


ANY = (Category, Probability, Number)
GRADED = (Probability, Number)  # targets whose labels say how alike the two sentences of a pair are


@dataclass(frozen=True)
class Loss:
    function: Callable[..., Tensor]
    fits: tuple[type[Target], ...]  # what a task may predict for its labels and logits to make sense here
    # Flags that it takes as keyword arguments of the same name, and the targets for which they have an effect.
    settings: dict[str, tuple[type[Target], ...]] = field(default_factory=dict)
    needs_pair: bool = False  # it compares the two sentences of a row
    on_vectors: bool = False  # it compares sentence vectors, so pairs must be encoded apart
    trains_head: bool = True  # False: the head learns nothing from it
    compares_rows: bool = False  # it is 0 for a batch of one
    reads_texts: bool = False  # it compares the texts of a batch by their hashes
    needs_dropout: bool = False  # in the encoder, so the encoder must not be frozen


LOSSES: dict[str, Loss] = {
    "ce": Loss(cross_entropy, (Category,)),
    "ce_smooth": Loss(smoothed_cross_entropy, (Category,), {"label_smoothing": (Category,)}),
    "bce": Loss(binary_cross_entropy, (Probability,)),
    "mse": Loss(mean_squared_error, (Number,)),
    "distill": Loss(distill, ANY, {"distill_temperature": (Category, Probability)}),
    "cosine_embedding": Loss(
        cosine_embedding, GRADED, {"cosine_margin": GRADED}, needs_pair=True, on_vectors=True, trains_head=False
    ),
    "cosent": Loss(
        cosent,
        GRADED,
        {"cosent_scale": GRADED},
        needs_pair=True,
        on_vectors=True,
        trains_head=False,
        compares_rows=True,
    ),
    "mnrl": Loss(
        multiple_negatives,
        GRADED,
        {"mnrl_scale": GRADED, "mnrl_symmetric": GRADED, "mnrl_threshold": (Number,)},
        needs_pair=True,
        on_vectors=True,
        trains_head=False,
        compares_rows=True,
        reads_texts=True,
    ),
    "mnrl_head": Loss(
        multiple_negatives_by_head,
        GRADED,
        {"mnrl_symmetric": GRADED, "mnrl_threshold": (Number,)},
        needs_pair=True,
        on_vectors=True,
        compares_rows=True,
        reads_texts=True,
    ),
    "simcse": Loss(
        simcse,
        ANY,
        {"simcse_temperature": ANY},
        on_vectors=True,
        trains_head=False,
        compares_rows=True,
        reads_texts=True,
        needs_dropout=True,
    ),
}


def losses_in(spec: str, task: Task) -> dict[str, float]:
    """Parse `bce+mnrl:0.2` into the weight of each loss; refuse losses that do not fit the task."""
    flag = f"--{task.name}_loss"
    weights = parse_spec(spec, LOSSES, flag)
    for name in weights:
        loss = LOSSES[name]
        if not isinstance(task.predicts, loss.fits):
            nouns = " or a ".join(target.noun for target in loss.fits)
            found = f"{task.name} predicts a {task.predicts.noun}"
        elif loss.needs_pair and not task.is_pair:
            nouns, found = "score for a pair of sentences", f"{task.name} has one sentence"
        else:
            continue
        fitting = [n for n, x in LOSSES.items() if isinstance(task.predicts, x.fits) and task.is_pair >= x.needs_pair]
        raise InputError(
            f"{flag} {spec}: {name} is for a task that predicts a {nouns}, but {found}. Use {' or '.join(fitting)}."
        )
    return weights


def build_objective(spec: str, task: Task, args: argparse.Namespace) -> TaskLoss:
    """The weighted sum of the losses in a specification such as `mse` or `bce+mnrl:0.2`."""
    weighted = []
    for name, weight in losses_in(spec, task).items():
        settings = {setting: getattr(args, setting) for setting in LOSSES[name].settings}
        weighted.append((weight, partial(LOSSES[name].function, **settings)))

    def objective(output: Output, batch: Batch) -> Tensor:
        return sum(weight * loss(output, batch) for weight, loss in weighted)

    return objective


def losses_of(args: argparse.Namespace, task: str) -> dict[str, Loss]:
    """The losses with which a task trains, by name."""
    return {name: LOSSES[name] for name in losses_in(getattr(args, f"{task}_loss"), TASKS[task])}


def tasks_with(args: argparse.Namespace, *names: str) -> list[str]:
    """The tasks that train with one of these losses."""
    return [task for task in args.train_tasks if set(names) & set(losses_of(args, task))]


# --- weightings: (name of the task, loss) -> loss ---------------------------------------------------------------------


class Equal(nn.Module):
    """Every loss counts as it is."""

    def __init__(self, tasks: list[Task], weights: dict[str, float]):
        super().__init__()

    def forward(self, name: str, loss: Tensor) -> Tensor:
        return loss


class Fixed(Equal):
    """Every task's loss times its weight in --task_weights; 1 for a task that is not named there."""

    def __init__(self, tasks: list[Task], weights: dict[str, float]):
        super().__init__(tasks, weights)
        self.weights = {task.name: weights.get(task.name, 1.0) for task in tasks}

    def forward(self, name: str, loss: Tensor) -> Tensor:
        return self.weights[name] * loss

    def extra_repr(self) -> str:
        return " ".join(f"{name}={weight:g}" for name, weight in self.weights.items())


class Uncertainty(Equal):
    """Kendall et al. 2018 (arXiv:1705.07115), equations 7 and 10, with a learned s = log sigma^2 per task:

        classification    exp(-s) L + s/2             smallest at s = log 2L
        regression        exp(-s) L/2 + s/2           smallest at s = log L

    s starts at 0. It changes by about the learning rate per step: at the encoder's 1e-5 it hardly moves; --head_lr 1e-3
    lets it learn. Deviation: none.
    """

    def __init__(self, tasks: list[Task], weights: dict[str, float]):
        super().__init__(tasks, weights)
        self.factors = {task.name: task.predicts.uncertainty_factor for task in tasks}
        self.log_variances = nn.ParameterDict({task.name: nn.Parameter(torch.zeros(())) for task in tasks})

    def forward(self, name: str, loss: Tensor) -> Tensor:
        s = self.log_variances[name]
        return self.factors[name] * torch.exp(-s) * loss + s / 2


WEIGHTINGS: dict[str, type[Equal]] = {"equal": Equal, "fixed": Fixed, "uncertainty": Uncertainty}


# --- flags ------------------------------------------------------------------------------------------------------------


def task_weight(text: str) -> str:
    """An argparse type: check a weight such as `sts=2` and return the text unchanged."""
    name, equals, weight = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"must be like sts=2, found {text!r}")
    number(float, 0, 1e6, above=True)(weight)
    return text


def task_trains(name: str) -> Need:
    return Need(f"{name} among the tasks that train", lambda args: name in args.train_tasks, f"Add {name} to --tasks")


def needs_loss(setting: str) -> Need:
    """The need of a flag that is a setting of losses: a trained task has such a loss, and the flag matters for it."""
    names = [name for name, loss in LOSSES.items() if setting in loss.settings]
    targets = {target for name in names for target in LOSSES[name].settings[setting]}
    fits = {target for name in names for target in LOSSES[name].fits}
    nouns = " or a ".join(target.noun for target in ANY if target in targets)
    only = f" of a task that predicts a {nouns}" if targets != fits else ""

    def is_met(args: argparse.Namespace) -> bool:
        return any(
            isinstance(TASKS[task].predicts, loss.settings[setting])
            for task in args.train_tasks
            for loss in losses_of(args, task).values()
            if setting in loss.settings
        )

    return Need(f"the loss {' or '.join(names)}{only}", is_met, f"Use it, as in --TASK_loss {names[0]}")


NEEDS_DISTILL = Need(
    "the loss distill", lambda args: bool(tasks_with(args, "distill")), "Use it, as in --sst_loss ce+distill"
)


def add_arguments(parser: ArgumentParser, tasks: Collection[Task]) -> None:
    add = parser.section("losses and their weights")
    for task in tasks:
        add(f"--{task.name}_loss", default=task.predicts.default_loss, metavar="LOSS[:WEIGHT][+...]", of_task=task.name,
            needs=task_trains(task.name),
            help=f"sum of {', '.join(sorted(LOSSES))} (default: the task's own: ce, bce or mse)")  # fmt: skip
    setting = {name: {"needs": needs_loss(name)} for loss in LOSSES.values() for name in loss.settings}
    positive = number(float, 0, 1e6, above=True)
    add("--label_smoothing", type=number(float, 0, 1), default=0.1, **setting["label_smoothing"],
        help="share of the target that ce_smooth spreads over all classes")  # fmt: skip
    add("--cosine_margin", type=number(float, -1, 1), default=0.0, **setting["cosine_margin"],
        help="cosine_embedding: unrelated sentences are pulled down to this cosine")  # fmt: skip
    add("--cosent_scale", type=positive, default=20.0, **setting["cosent_scale"], help="cosent: factor on the cosines")
    add("--mnrl_scale", type=positive, default=20.0, **setting["mnrl_scale"], help="mnrl: factor on the cosines")
    add("--mnrl_symmetric", action=Switch, **setting["mnrl_symmetric"],
        help="mnrl, mnrl_head: also rank first sentences for each second one")  # fmt: skip
    numbers = [task.predicts for task in tasks if isinstance(task.predicts, Number)] or [STS.predicts]
    low, high = min(target.low for target in numbers), max(target.high for target in numbers)
    add("--mnrl_threshold", type=number(float, low, high), default=4.0,
        **setting["mnrl_threshold"], help="mnrl, mnrl_head: minimum similarity of a positive pair")  # fmt: skip
    add(
        "--simcse_temperature",
        type=positive,
        default=0.05,
        **setting["simcse_temperature"],
        help="temperature of simcse",
    )
    add(
        "--distill_temperature",
        type=positive,
        default=2.0,
        **setting["distill_temperature"],
        help="temperature of distill",
    )
    add("--teacher", type=Path, needs=NEEDS_DISTILL,
        help="directory with <task>-train.npz: the logits that the loss distill learns from")  # fmt: skip
    add("--weighting", choices=sorted(WEIGHTINGS), default="equal", needs=ALWAYS, help="how tasks' losses are weighted")
    add("--task_weights", type=task_weight, nargs="+", metavar="TASK=WEIGHT", needs=chosen("--weighting", "fixed"),
        help="weights for --weighting fixed; 1 for tasks not named")  # fmt: skip


def build_weighting(args: argparse.Namespace, tasks: list[Task]) -> nn.Module:
    """A module; register it in the model, so that the optimizer updates what it learns."""
    if args.weighting == "fixed" and not args.task_weights:
        raise InputError("--weighting fixed needs --task_weights, found none. Add for example --task_weights sts=2.")
    weights = {name: float(weight) for name, _, weight in (t.partition("=") for t in args.task_weights or ())}
    if len(weights) < len(args.task_weights or ()):
        raise InputError("--task_weights: each task may appear once, found one twice. Remove one.")
    names = [task.name for task in tasks]
    for name in weights:
        if name not in names:
            raise InputError(f"--task_weights: a task must be one of {', '.join(names)}, found {name!r}. Correct it.")
    return WEIGHTINGS[args.weighting](tasks, weights)
