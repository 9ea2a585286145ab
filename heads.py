"""Poolers turn hidden states into one vector per sentence; heads turn one or two vectors into logits.

Student papers are cited by their authors; recipes/README.md lists them.

Shapes:  B batch   R sentences of a batch: B, or 2B for bi-encoded pairs   T tokens   H hidden size   C outputs
"""

import math
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from kernels import dropout
from tasks import Category, Number, Probability, Target, Task
from utils import InputError

# --- what other libraries can express ---------------------------------------------------------------------------------


class Dense(NamedTuple):
    """activation(W x + b), a layer that sentence-transformers has as well."""

    weight: Tensor  # (outputs, inputs)
    bias: Tensor  # (outputs,)
    activation: type[nn.Module] = nn.Identity

    @classmethod
    def of(cls, linear: nn.Linear, activation: type[nn.Module] = nn.Identity) -> "Dense":
        return cls(linear.weight.detach(), linear.bias.detach(), activation)


# --- poolers: hidden states (R, T, H), mask (R, T) -> (R, H) ----------------------------------------------------------


class Pooler(nn.Module):
    """One vector per sentence. Padding has no influence: a row has one vector in any batch (docs/PITFALLS.md, 8)."""

    own_parameters: ClassVar[bool] = False  # without any, a frozen encoder's vectors can be stored
    published: ClassVar[str | None] = None  # its name in sentence-transformers; None if there is no such pooling

    def __init__(self, bert: nn.Module):
        super().__init__()

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        raise NotImplementedError

    def layers(self) -> tuple[Dense, ...]:
        """The layers after the published pooling."""
        return ()


class BertPooler(Pooler):
    """tanh(W h_[CLS] + b) with the checkpoint's dense layer, which remains part of the encoder (Devlin et al. 2019)."""

    published = "cls"

    def __init__(self, bert: nn.Module):
        super().__init__(bert)
        self.encoder = (bert,)  # in a tuple, so that its parameters are not registered twice

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        (bert,) = self.encoder
        return bert.pooler_af(bert.pooler_dense(hidden[:, 0]))

    def layers(self) -> tuple[Dense, ...]:
        (bert,) = self.encoder
        return (Dense.of(bert.pooler_dense, nn.Tanh),)


class ClsPooler(Pooler):
    """The last hidden state of [CLS], unchanged."""

    published = "cls"

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return hidden[:, 0]


class MeanPooler(Pooler):
    """The mean over the real tokens, including [CLS] and [SEP] (Reimers & Gurevych 2019, arXiv:1908.10084)."""

    published = "mean"

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        mask = mask.to(torch.promote_types(hidden.dtype, torch.float32))  # bfloat16 represents integers only up to 256
        weights = (mask / mask.sum(dim=1, keepdim=True)).to(hidden.dtype)  # (R, T), 0 for padding
        return (weights[:, None, :] @ hidden).squeeze(1)  # (R, 1, T) x (R, T, H) -> (R, H)


class MaxPooler(Pooler):
    """The largest value of every coordinate over the real tokens (Reimers & Gurevych 2019, arXiv:1908.10084)."""

    published = "max"

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return hidden.masked_fill(mask[:, :, None] == 0, -math.inf).amax(dim=1)


class AttentionPooler(Pooler):
    """sum_t a_t h_t with a = softmax(h q / sqrt(H)) over the real tokens and a learned query q.

    The word attention of Yang et al. 2016 (NAACL, Hierarchical Attention Networks). Deviations: the scores are scaled,
    and there is no hidden layer before the query. q starts at zero, so training starts from the mean.
    """

    own_parameters = True

    def __init__(self, bert: nn.Module):
        super().__init__(bert)
        self.query = nn.Parameter(torch.zeros(bert.config.hidden_size))

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        scores = hidden @ self.query / math.sqrt(hidden.size(-1))  # (R, T, H) x (H,) -> (R, T)
        weights = scores.masked_fill(mask == 0, -math.inf).softmax(dim=1).to(hidden.dtype)
        return (weights[:, None, :] @ hidden).squeeze(1)  # (R, 1, T) x (R, T, H) -> (R, H)


class BiGRUPooler(Pooler):
    """The concatenated last states of a forward and a backward GRU, H/2 wide each, over the real tokens only.

    Tlemcani & Sohn, "MinBERT and Downstream Tasks" (sentiment); Ranasinghe et al. 2019, RANLP (similarity). Padding
    must follow the real tokens.
    """

    own_parameters = True

    def __init__(self, bert: nn.Module):
        super().__init__(bert)
        H = bert.config.hidden_size
        if H % 2:
            raise InputError(f"bigru pooling needs an even hidden size, found {H}. Use --pooling mean.")
        self.gru = nn.GRU(H, H // 2, batch_first=True, bidirectional=True)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        lengths = mask.sum(dim=1).cpu()  # torch packs by lengths on the CPU
        packed = pack_padded_sequence(hidden, lengths, batch_first=True, enforce_sorted=False)
        _, last = self.gru(packed)  # (2, R, H/2), in the order of the rows
        return torch.cat([last[0], last[1]], dim=1)


POOLERS: dict[str, type[Pooler]] = {
    "pooler": BertPooler,
    "cls": ClsPooler,
    "mean": MeanPooler,
    "max": MaxPooler,
    "attention": AttentionPooler,
    "bigru": BiGRUPooler,
}


# --- heads: one vector (B, H), or two -> logits (B, C) ----------------------------------------------------------------


class Head(nn.Module):
    """Dropout, then logits.

    vectors: 1 for a sentence or a joined pair, 2 for a bi-encoded pair. target: what the task predicts.
    """

    needs_pair: ClassVar[bool] = False  # it compares the vectors of two sentences
    needs_joined: ClassVar[bool] = False  # and has the vector of the joined pair as a third
    own_parameters: ClassVar[bool] = True  # without any, something below the head has to be trained
    works_untrained: ClassVar[bool] = False  # whether its scores mean something if only the vectors are trained
    fits: ClassVar[tuple[type[Target], ...]] = (Category, Probability, Number)  # what it can predict

    def __init__(self, H: int, vectors: int, target: Target, dropout: float):
        super().__init__()
        self.target, self.p, self.vectors = target, dropout, vectors

    def drop(self, x: Tensor) -> Tensor:
        return dropout(x, self.p, self.training)

    def forward(self, *vectors: Tensor) -> Tensor:
        raise NotImplementedError

    def layers(self) -> tuple[Dense, ...] | None:
        """The head as layers on each single vector; None if it joins vectors, which other libraries cannot."""
        return self._layers() if self.vectors == 1 else None

    def _layers(self) -> tuple[Dense, ...] | None:
        return None

    def score_of_cosine(self) -> str | None:
        """The logit as a Python expression of `cosine`, that of the two vectors after `layers`; None if it is none."""
        return None

    def extra_repr(self) -> str:
        return f"p={self.p}"


class Linear(Head):
    """W [u; v] + b. Any real number. The baseline of the handout and of all four student papers."""

    features: ClassVar[int | None] = None  # vectors that the layer sees side by side; None: its inputs

    def __init__(self, H: int, vectors: int, target: Target, dropout: float):
        super().__init__(H, vectors, target, dropout)
        self.linear = nn.Linear((self.features or vectors) * H, target.num_logits)

    def join(self, *vectors: Tensor) -> Tensor:
        return torch.cat(vectors, dim=1)

    def forward(self, *vectors: Tensor) -> Tensor:
        return self.linear(self.drop(self.join(*vectors)))

    def _layers(self) -> tuple[Dense, ...]:
        return (Dense.of(self.linear),)


class Siamese(Linear):
    """W [u; v; |u - v|] + b. Any real number. Reimers & Gurevych 2019 (arXiv:1908.10084), section 3; Hicks & Liu."""

    needs_pair, features = True, 3

    def join(self, u: Tensor, v: Tensor) -> Tensor:
        return torch.cat([u, v, (u - v).abs()], dim=1)


class SBert(Linear):
    """W [u; v; |u - v|; u * v] + b. Any real number. Reimers & Gurevych 2019, table 6; InferSent (arXiv:1705.02364)."""

    needs_pair, features = True, 4

    def join(self, u: Tensor, v: Tensor) -> Tensor:
        return torch.cat([u, v, (u - v).abs(), u * v], dim=1)


class MLP(Head):
    """W2 gelu(W1 [u; v] + b1) + b2, H wide inside, dropout before each layer. Any real number. Tlemcani & Sohn."""

    def __init__(self, H: int, vectors: int, target: Target, dropout: float):
        super().__init__(H, vectors, target, dropout)
        self.inner = nn.Linear(vectors * H, H)
        self.outer = nn.Linear(H, target.num_logits)

    def forward(self, *vectors: Tensor) -> Tensor:
        return self.outer(self.drop(F.gelu(self.inner(self.drop(torch.cat(vectors, dim=1))))))

    def _layers(self) -> tuple[Dense, ...]:
        return (Dense.of(self.inner, nn.GELU), Dense.of(self.outer))


class Sigmoid(Linear):
    """low + (high - low) sigmoid(W [u; v] + b): the target's range, so for numbers only. Hicks & Liu."""

    fits = (Number,)

    def forward(self, *vectors: Tensor) -> Tensor:
        return self.target.low + self.target.range * super().forward(*vectors).sigmoid()

    def _layers(self) -> tuple[Dense, ...]:
        weight, bias = self.linear.weight, self.linear.bias
        scale = Dense(weight.new_full((1, 1), self.target.range), bias.new_full((1,), self.target.low))
        return (Dense.of(self.linear, nn.Sigmoid), scale)


class ScaledLinear(Linear):
    """low + (high - low) (W [u; v] + b): any real number, low to high if W [u; v] + b lies between 0 and 1.

    Ramos & Dalmia, section 4.4, iteration 1.
    """

    fits = (Number,)

    def forward(self, *vectors: Tensor) -> Tensor:
        return self.target.low + self.target.range * super().forward(*vectors)

    def _layers(self) -> tuple[Dense, ...]:
        weight, bias, _ = Dense.of(self.linear)
        return (Dense(self.target.range * weight, self.target.low + self.target.range * bias),)


class Cosine(Head):
    """cos(u, v). Range [-1, 1]. Ramos & Dalmia, section 4.4, iteration 2.

    For numbers only: as a logit, its sigmoid would stay within [.27, .73], above one half for nearly every pair
    (docs/PITFALLS.md, 27); use cosine_affine for that. Pearson's correlation ignores the scale, but the squared error
    against labels from 0 to 5 does not: it pushes nearly every pair towards a cosine of 1. cosine_relu, siamese_cosine
    and cosine_affine cover the whole range.

    Dropout uses one mask for both vectors, so that the mean cosine in training is that of evaluation (docs/PITFALLS.md,
    38).
    """

    needs_pair, own_parameters, works_untrained = True, False, True
    fits = (Number,)

    def cosine(self, u: Tensor, v: Tensor) -> Tensor:
        """(B, H), (B, H) -> (B, 1), in float32 at least: bfloat16 has three digits between 0.5 and 1."""
        u, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (u, v))
        return F.cosine_similarity(u, v, dim=1)[:, None]

    def drop_both(self, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Drop the same elements of both vectors. Separate masks would shrink the cosine by the factor 1 - p."""
        mask = self.drop(torch.ones_like(u))  # (B, H)
        return mask * u, mask * v

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return self.cosine(*self.drop_both(u, v))

    def layers(self) -> tuple[Dense, ...]:
        return ()

    def score_of_cosine(self) -> str:
        return "cosine"


class CosineAffine(Cosine):
    """a cos(u, v) + b with learned a and b. Range [b - a, b + a]. The remedy for docs/PITFALLS.md, 27.

    A number starts as low + (high - low) cos, a logit as 10 (cos - 0.75). a and b change by about the learning rate per
    step: at the encoder's 1e-5 they hardly move and the encoder does the work; --head_lr 1e-3 lets them learn. Under
    mnrl, cosent or cosine_embedding alone they keep their start values: a pair whose cosine is above 0.75 counts as a
    paraphrase.
    """

    own_parameters = True
    fits = (Probability, Number)

    def __init__(self, H: int, vectors: int, target: Target, dropout: float):
        super().__init__(H, vectors, target, dropout)
        scale, offset = target.cosine_scale
        self.scale = nn.Parameter(torch.tensor(scale))
        self.offset = nn.Parameter(torch.tensor(offset))

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return self.scale * super().forward(u, v) + self.offset

    def score_of_cosine(self) -> str:
        return f"{self.scale.item()!r} * cosine + {self.offset.item()!r}"


class CosineReLU(Cosine):
    """low + (high - low) relu(cos(u, v)). Range [low, high]; no gradient where the cosine is negative.

    Ramos & Dalmia, section 4.4, iteration 3.
    """

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return self.target.low + self.target.range * super().forward(u, v).relu()

    def score_of_cosine(self) -> str:
        return f"{self.target.low!r} + {self.target.range!r} * cosine.clamp(min=0)"


class SiameseCosine(Cosine):
    """low + (high - low) / 2 (cos(W u + b, W v + b) + 1), with one W (H, H) for both. Range [low, high].

    Hicks & Liu, for sts; Tlemcani & Sohn, section 3.3, second approach ("siamese linear layers", the cosine normalized
    and multiplied by 5).
    """

    own_parameters, works_untrained = True, False

    def __init__(self, H: int, vectors: int, target: Target, dropout: float):
        super().__init__(H, vectors, target, dropout)
        self.linear = nn.Linear(H, H)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        cosine = self.cosine(*map(self.linear, self.drop_both(u, v)))
        return self.target.low + (cosine + 1) * (self.target.range / 2)

    def layers(self) -> tuple[Dense, ...]:
        return (Dense.of(self.linear),)

    def score_of_cosine(self) -> str:
        return f"{self.target.low!r} + {self.target.range / 2!r} * (cosine + 1)"


class Both(CosineAffine):
    """a cos(u, v) + b + W [c; |u - v|; u * v]: u and v are the vectors of the two sentences, c of the joined pair.

    Any real number. Both views of a pair: the cosine, which a sentence encoder was trained for, and attention between
    the sentences. W starts at zero, so training starts from cosine_affine. Dropout acts on the input of W only. The
    encoder sees twice as many tokens as with bi or cross pairing.
    """

    needs_joined = True

    def __init__(self, H: int, vectors: int, target: Target, dropout: float):
        super().__init__(H, vectors, target, dropout)
        self.linear = nn.Linear(3 * H, target.num_logits, bias=False)
        nn.init.zeros_(self.linear.weight)

    def forward(self, u: Tensor, v: Tensor, c: Tensor) -> Tensor:
        compared = torch.cat([c, (u - v).abs(), u * v], dim=1)
        return self.scale * self.cosine(u, v) + self.offset + self.linear(self.drop(compared))

    def layers(self) -> None:
        return None

    def score_of_cosine(self) -> None:
        return None


HEADS: dict[str, type[Head]] = {
    "linear": Linear,
    "mlp": MLP,
    "siamese": Siamese,
    "sbert": SBert,
    "cosine": Cosine,
    "cosine_affine": CosineAffine,
    "cosine_relu": CosineReLU,
    "siamese_cosine": SiameseCosine,
    "both": Both,
    "sigmoid": Sigmoid,
    "scaled_linear": ScaledLinear,
}


def check_head(name: str, task: Task, vectors: int, flag: str = "--head") -> None:
    """Refuse a head that does not fit the task. vectors: how many of them the task's pairing gives a head.

    flag: the name of the flag, for the message.
    """
    head, remedy = HEADS[name], f"Use {flag} linear or mlp."
    if head.needs_pair and not task.is_pair:
        raise InputError(f"{flag} {name} compares two sentences, but {task.name} has one. {remedy}")
    if head.needs_pair and vectors == 1:
        raise InputError(
            f"{flag} {name} compares two vectors, but cross pairing makes one vector per pair. {remedy} "
            f"Or use --{task.name}_pairing {'both' if head.needs_joined else 'bi'}."
        )
    if head.needs_joined and vectors == 2:
        raise InputError(
            f"{flag} {name} needs the joined pair as well, but bi pairing encodes the two sentences only. "
            f"Use --{task.name}_pairing both, or {flag} cosine_affine."
        )
    if head.needs_pair and not head.needs_joined and vectors == 3:
        raise InputError(
            f"{flag} {name} compares two vectors, but both pairing makes three. Use {flag} both, or "
            f"--{task.name}_pairing bi."
        )
    if not isinstance(task.predicts, head.fits):
        nouns = " or a ".join(target.noun for target in head.fits)
        raise InputError(f"{flag} {name} predicts a {nouns}, but {task.name} needs a {task.predicts.noun}. {remedy}")


def build_head(name: str, H: int, vectors: int, task: Task, dropout: float) -> Head:
    check_head(name, task, vectors)
    return HEADS[name](H, vectors, task.predicts, dropout)
