"""From hidden states to logits: POOLERS make one vector of a sentence, HEADS make logits of one vector or of two.

Shapes:  B batch   R sentences of a batch: B, or 2B for bi-encoded pairs   T tokens   H hidden size   C outputs
"""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from kernels import dropout
from utils import InputError

# --- poolers: hidden states (R, T, H), mask (R, T) -> (R, H) ----------------------------------------------------------


class Pooler(nn.Module):
    """One vector of a sentence. Padding has no influence: a row gives the same vector in any batch (TRAPS 8)."""

    own_parameters: ClassVar[bool] = False  # if it has none, a frozen encoder's vectors can be computed once and kept

    def __init__(self, bert: nn.Module):
        super().__init__()

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        raise NotImplementedError


class BertPooler(Pooler):
    """tanh(W h_[CLS] + b) with the checkpoint's own dense layer, which stays the encoder's (Devlin et al. 2019)."""

    def __init__(self, bert: nn.Module):
        super().__init__(bert)
        self.encoder = (bert,)  # within a tuple, so that its parameters are not registered a second time

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        (bert,) = self.encoder
        return bert.pooler_af(bert.pooler_dense(hidden[:, 0]))


class ClsPooler(Pooler):
    """The last hidden state of [CLS], as it is."""

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return hidden[:, 0]


class MeanPooler(Pooler):
    """The mean over the real tokens, [CLS] and [SEP] among them (Reimers & Gurevych 2019, arXiv:1908.10084)."""

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        mask = mask.to(torch.promote_types(hidden.dtype, torch.float32))  # bfloat16 counts to 256
        weights = (mask / mask.sum(dim=1, keepdim=True)).to(hidden.dtype)  # (R, T), 0 for padding
        return (weights[:, None, :] @ hidden).squeeze(1)  # (R, 1, T) x (R, T, H) -> (R, H)


class MaxPooler(Pooler):
    """The largest value of every coordinate over the real tokens (Reimers & Gurevych 2019, arXiv:1908.10084)."""

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return hidden.masked_fill(mask[:, :, None] == 0, -math.inf).amax(dim=1)


class AttentionPooler(Pooler):
    """sum_t a_t h_t with a = softmax(h q / sqrt(H)) over the real tokens and a learned query q.

    The word attention of Yang et al. 2016 (NAACL, Hierarchical Attention Networks). Deviations: scaled, and without
    their hidden layer in front of the query. q starts at zero, so training starts from the mean.
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
    """Last states of a GRU read forward and of one read backward, H/2 wide each, joined; over the real tokens only.

    Paper 002 (sentiment); Ranasinghe et al. 2019, RANLP (similarity). Padding must follow the real tokens.
    """

    own_parameters = True

    def __init__(self, bert: nn.Module):
        super().__init__(bert)
        H = bert.config.hidden_size
        if H % 2:
            raise InputError(f"bigru pooling needs an even hidden size, found {H}. Choose another pooling.")
        self.gru = nn.GRU(H, H // 2, batch_first=True, bidirectional=True)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        lengths = mask.sum(dim=1).cpu()  # torch packs by lengths on the CPU
        packed = pack_padded_sequence(hidden, lengths, batch_first=True, enforce_sorted=False)
        _, last = self.gru(packed)  # (2, R, H/2), in the rows' own order
        return torch.cat([last[0], last[1]], dim=1)


POOLERS: dict[str, type[Pooler]] = {
    "pooler": BertPooler,
    "cls": ClsPooler,
    "mean": MeanPooler,
    "max": MaxPooler,
    "attention": AttentionPooler,
    "bigru": BiGRUPooler,
}


def build_pooler(name: str, bert: nn.Module) -> Pooler:
    return POOLERS[name](bert)


# --- heads: one vector (B, H), or two -> logits (B, C) ----------------------------------------------------------------

CATEGORY, PROBABILITY, NUMBER = "category", "probability", "number"  # Task.kind
HIGHEST = 5.0  # similarities are graded from 0 to 5


class Head(nn.Module):
    """Dropout, then logits. vectors: 1 for a sentence or a joined pair, 2 for a bi-encoded pair."""

    needs_pair: ClassVar[bool] = False
    own_parameters: ClassVar[bool] = True  # if it has none, something below it has to be trained
    works_untrained: ClassVar[bool] = False  # whether its scores mean something where only the vectors are trained
    kinds: ClassVar[tuple[str, ...]] = (CATEGORY, PROBABILITY, NUMBER)  # of task that its output range suits

    def __init__(self, H: int, vectors: int, outputs: int, dropout: float, kind: str | None = None):
        super().__init__()
        self.p = dropout

    def drop(self, x: Tensor) -> Tensor:
        return dropout(x, self.p, self.training)

    def forward(self, *vectors: Tensor) -> Tensor:
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"p={self.p}"


class Linear(Head):
    """W [u; v] + b. Any real number. The handout's baseline and that of all four papers."""

    features: ClassVar[int | None] = None  # vectors that the layer sees side by side; None: just those that come in

    def __init__(self, H: int, vectors: int, outputs: int, dropout: float, kind: str | None = None):
        super().__init__(H, vectors, outputs, dropout, kind)
        self.linear = nn.Linear((self.features or vectors) * H, outputs)

    def join(self, *vectors: Tensor) -> Tensor:
        return torch.cat(vectors, dim=1)

    def forward(self, *vectors: Tensor) -> Tensor:
        return self.linear(self.drop(self.join(*vectors)))


class Siamese(Linear):
    """W [u; v; |u - v|] + b. Any real number. Reimers & Gurevych 2019 (arXiv:1908.10084), section 3; paper 000."""

    needs_pair, features = True, 3

    def join(self, u: Tensor, v: Tensor) -> Tensor:
        return torch.cat([u, v, (u - v).abs()], dim=1)


class SBert(Linear):
    """W [u; v; |u - v|; u * v] + b. Any real number. Reimers & Gurevych 2019, table 6; InferSent (arXiv:1705.02364)."""

    needs_pair, features = True, 4

    def join(self, u: Tensor, v: Tensor) -> Tensor:
        return torch.cat([u, v, (u - v).abs(), u * v], dim=1)


class MLP(Head):
    """W2 gelu(W1 [u; v] + b1) + b2, H wide inside, dropout before each layer. Any real number. Paper 002."""

    def __init__(self, H: int, vectors: int, outputs: int, dropout: float, kind: str | None = None):
        super().__init__(H, vectors, outputs, dropout, kind)
        self.inner = nn.Linear(vectors * H, H)
        self.outer = nn.Linear(H, outputs)

    def forward(self, *vectors: Tensor) -> Tensor:
        return self.outer(self.drop(F.gelu(self.inner(self.drop(torch.cat(vectors, dim=1))))))


class Sigmoid(Linear):
    """5 sigmoid(W [u; v] + b). Range (0, 5), so for numbers only. Paper 000, on the similarity head."""

    kinds = (NUMBER,)

    def forward(self, *vectors: Tensor) -> Tensor:
        return HIGHEST * super().forward(*vectors).sigmoid()


class ScaledLinear(Linear):
    """5 (W [u; v] + b). Any real number; 0 to 5 where W [u; v] + b is 0 to 1. Paper 004, section 4.4, iteration 1."""

    kinds = (NUMBER,)

    def forward(self, *vectors: Tensor) -> Tensor:
        return HIGHEST * super().forward(*vectors)


class Cosine(Head):
    """cos(u, v). Range [-1, 1]. Paper 004, section 4.4, iteration 2.

    For numbers only: as a logit its sigmoid stays within [.27, .73], and above one half for nearly every pair (TRAPS
    27); cosine_affine is for that. Pearson's correlation does not mind the scale, but mse against labels of 0 to 5
    does: it drives nearly every pair towards a cosine of 1. cosine_relu, siamese_cosine and cosine_affine reach 5.
    """

    needs_pair, own_parameters, works_untrained = True, False, True
    kinds = (NUMBER,)

    def cosine(self, u: Tensor, v: Tensor) -> Tensor:
        """(B, H), (B, H) -> (B, 1), in float32 at least: bfloat16 has three digits between 0.5 and 1."""
        u, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (u, v))
        return F.cosine_similarity(u, v, dim=1)[:, None]

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return self.cosine(self.drop(u), self.drop(v))


class CosineAffine(Cosine):
    """a cos(u, v) + b, a and b learned. Range [b - a, b + a]. The remedy of TRAPS 27.

    A number starts as 5 cos, a logit as 10 (cos - 0.75): BERT's cosines are nearly all positive, so the even chance has
    to lie high. a and b move by about the learning rate a step: at the encoder's 1e-5 they all but stand still and the
    encoder does the work; --head_lr 1e-3 lets them learn. Under mnrl, cosent or cosine_embedding alone they stay as
    they start: a pair whose cosine is above 0.75 is a paraphrase.
    """

    own_parameters = True
    kinds = (PROBABILITY, NUMBER)
    START: ClassVar = {PROBABILITY: (10.0, -7.5), NUMBER: (HIGHEST, 0.0)}

    def __init__(self, H: int, vectors: int, outputs: int, dropout: float, kind: str | None = None):
        super().__init__(H, vectors, outputs, dropout, kind)
        scale, offset = self.START[kind or NUMBER]
        self.scale = nn.Parameter(torch.tensor(scale))
        self.offset = nn.Parameter(torch.tensor(offset))

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return self.scale * super().forward(u, v) + self.offset


class CosineReLU(Cosine):
    """5 relu(cos(u, v)). Range [0, 5]; no gradient where cos is negative. Paper 004, section 4.4, iteration 3."""

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return HIGHEST * super().forward(u, v).relu()


class SiameseCosine(Cosine):
    """(cos(W u + b, W v + b) + 1) 5/2, with one W (H, H) for both. Range [0, 5].

    Paper 000, on the similarity head; paper 002, section 3.3, second approach ("siamese linear layers", the cosine
    normalized and multiplied by 5).
    """

    own_parameters, works_untrained = True, False

    def __init__(self, H: int, vectors: int, outputs: int, dropout: float, kind: str | None = None):
        super().__init__(H, vectors, outputs, dropout, kind)
        self.linear = nn.Linear(H, H)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        cosine = self.cosine(self.linear(self.drop(u)), self.linear(self.drop(v)))
        return (cosine + 1) * (HIGHEST / 2)


HEADS: dict[str, type[Head]] = {
    "linear": Linear,
    "mlp": MLP,
    "siamese": Siamese,
    "sbert": SBert,
    "cosine": Cosine,
    "cosine_affine": CosineAffine,
    "cosine_relu": CosineReLU,
    "siamese_cosine": SiameseCosine,
    "sigmoid": Sigmoid,
    "scaled_linear": ScaledLinear,
}


def build_head(name: str, H: int, vectors: int, outputs: int, dropout: float, kind: str | None = None) -> Head:
    """kind: the task's; where it is given, a head whose range does not suit it is refused."""
    head = HEADS[name]
    if head.needs_pair and vectors != 2:
        raise InputError(f"head {name} needs two vectors, found {vectors}. Use bi pairing, or head linear.")
    if kind is not None and kind not in head.kinds:
        rule = " or ".join(f"a {k}" for k in head.kinds)
        raise InputError(f"head {name} is for {rule}, found a task whose output is a {kind}. Use head linear.")
    if CATEGORY not in head.kinds and outputs != 1:
        raise InputError(f"head {name} gives one output, found a task with {outputs}. Use head linear.")
    return head(H, vectors, outputs, dropout, kind)
