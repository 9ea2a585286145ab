"""A hand-written BERT: attention, transformer layer, model (Devlin et al. 2019, arXiv:1810.04805).

Shapes:  B batch   T tokens   H hidden size   N attention heads   D head size (H = N * D)
         n tokens of a batch without its padding

Padding is computed for nothing, so on a CPU the layers work on packed hidden states: (n, H) instead of (B, T, H). Only
attention needs to know which tokens form a sentence: it unpacks query, key and value, and packs its result.
"""

import math
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from base_bert import BertPreTrainedModel
from config import ACTIVATIONS, BertConfig
from kernels import FLOATS, dropout, gelu, lookup, runs_here


class Dropout(nn.Module):
    """Zero a random share p of the input and scale the rest by 1 / (1 - p); the identity in eval mode."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.p, self.training)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def cast_once(x: Tensor) -> Tensor:
    """In mixed precision, x in half precision: otherwise each of several linear layers casts it for itself."""
    device = x.device.type
    is_mixed = device in ("cpu", "cuda") and torch.is_autocast_enabled(device)
    return x.to(torch.get_autocast_dtype(device)) if is_mixed else x


def written_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, drop: Dropout) -> Tensor:
    """softmax(Q K^T / sqrt(D)) V, equation 1 of Vaswani et al. 2017 (arXiv:1706.03762), with dropout on the weights.

    query, key, value: (B, N, T, D); mask: (B, 1, 1, T), 0 for a real token and -inf for padding. Returns (B, N, T, D).
    """
    D = query.size(-1)
    scores = query @ key.transpose(-2, -1)  # (B, N, T, D) x (B, N, D, T) -> (B, N, T, T)
    scores = torch.add(mask, scores, alpha=1 / math.sqrt(D))  # scale and mask in one pass over memory
    weights = drop(scores.softmax(dim=-1))  # (B, N, T, T), each row sums to 1 before dropout
    return weights @ value  # (B, N, T, T) x (B, N, T, D) -> (B, N, T, D)


def fused_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, drop: Dropout) -> Tensor:
    """The same, computed by torch's own kernel. Its flash versions never store the (T, T) weights."""
    p = drop.p if drop.training else 0.0
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=p)


def fastest_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, drop: Dropout) -> Tensor:
    """The faster of the two: "written" on a CPU with dropout, where torch has no fused kernel and draws masks slowly.

    Otherwise "fused".
    """
    draws_a_mask = drop.training and drop.p > 0
    attend = written_attention if draws_a_mask and query.device.type == "cpu" else fused_attention
    return attend(query, key, value, mask, drop)


ATTENTIONS: dict[str, Callable[..., Tensor]] = {
    "written": written_attention,
    "fused": fused_attention,
    "fastest": fastest_attention,
}


# --- packing: hidden states without padding ---------------------------------------------------------------------------

WORTHWHILE = 0.03  # the share of padding above which packing saves more time than it takes
MULTIPLE = 16  # of which n is one: a new size of matrices costs oneDNN time, so some padding stays


class _Pack(torch.autograd.Function):
    """The rows at these places: (B T, H) -> (n, H). Its backward pass is _Unpack."""

    @staticmethod
    def forward(ctx, x: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.rows = x.size(0)
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        return _Unpack.apply(grad, places, ctx.rows), None


class _Unpack(torch.autograd.Function):
    """The rows at their places, and zeros elsewhere: (n, H) -> (B T, H). Its backward pass is _Pack."""

    @staticmethod
    def forward(ctx, x: Tensor, places: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(places)
        return x.new_zeros(rows, x.size(1)).index_copy_(0, places, x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return _Pack.apply(grad, places), None, None


def packed_places(mask: Tensor) -> Tensor:
    """The places of the real tokens, and of some padding, in a flattened batch: (B, 1, 1, T), 0 or -inf -> (n,)."""
    is_real = mask.flatten() == 0
    padding = (~is_real).nonzero().squeeze(1)
    real = is_real.nonzero().squeeze(1)
    return torch.cat([real, padding[: -len(real) % MULTIPLE]])


def pack(x: Tensor, places: Tensor) -> Tensor:
    """Leave out the padding: (B, T, H) -> (n, H)."""
    return _Pack.apply(x.flatten(0, 1), places)


def unpack(x: Tensor, places: Tensor, mask: Tensor) -> Tensor:
    """Put zeros where the padding is: (n, H) -> (B, T, H)."""
    B, _, _, T = mask.shape
    return _Unpack.apply(x, places, B * T).view(B, T, -1)


# --- the layers -------------------------------------------------------------------------------------------------------


class BertSelfAttention(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        H = config.hidden_size
        self.num_attention_heads = config.num_attention_heads
        self.attention_head_size = H // config.num_attention_heads
        self.query = nn.Linear(H, H)
        self.key = nn.Linear(H, H)
        self.value = nn.Linear(H, H)
        self.dropout = Dropout(config.attention_probs_dropout_prob)
        self.attend = fastest_attention

    def transform(self, x: Tensor, linear: nn.Linear) -> Tensor:
        """Project and split into heads: (B, T, H) -> (B, N, T, D)."""
        return self.split(linear(x))

    def split(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        return x.view(B, T, self.num_attention_heads, self.attention_head_size).transpose(1, 2)

    def attention(self, key: Tensor, query: Tensor, value: Tensor, attention_mask: Tensor) -> Tensor:
        """Apply attention in every head and concatenate the heads: three (B, N, T, D) and (B, 1, 1, T) -> (B, T, H)."""
        heads = self.attend(query, key, value, attention_mask, self.dropout)  # (B, N, T, D)
        return heads.transpose(1, 2).flatten(2)  # (B, T, N, D) -> (B, T, H)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, T, H) or packed (n, H), and (B, 1, 1, T) -> the shape of hidden_states."""
        hidden_states = cast_once(hidden_states)
        if hidden_states.dim() == 2:
            return self.forward_packed(hidden_states, attention_mask)
        key = self.transform(hidden_states, self.key)
        query = self.transform(hidden_states, self.query)
        value = self.transform(hidden_states, self.value)
        return self.attention(key, query, value, attention_mask)

    def forward_packed(self, x: Tensor, mask: Tensor) -> Tensor:
        """The same without padding: (n, H), (B, 1, 1, T) -> (n, H)."""
        places = packed_places(mask)
        projected = (unpack(linear(x), places, mask) for linear in (self.key, self.query, self.value))  # (B, T, H) each
        return pack(self.attention(*map(self.split, projected), mask), places)


class BertLayer(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        H, inner = config.hidden_size, config.intermediate_size
        self.self_attention = BertSelfAttention(config)
        self.attention_dense = nn.Linear(H, H)
        self.attention_layer_norm = nn.LayerNorm(H, eps=config.layer_norm_eps)
        self.attention_dropout = Dropout(config.hidden_dropout_prob)
        self.interm_dense = nn.Linear(H, inner)
        # kernels.gelu is F.gelu, but faster on a CPU
        self.interm_af = gelu if config.hidden_act == "gelu" else ACTIVATIONS[config.hidden_act]
        self.out_dense = nn.Linear(inner, H)
        self.out_layer_norm = nn.LayerNorm(H, eps=config.layer_norm_eps)
        self.out_dropout = Dropout(config.hidden_dropout_prob)

    def add_norm(
        self, input: Tensor, output: Tensor, dense_layer: nn.Linear, dropout: nn.Module, ln_layer: nn.LayerNorm
    ) -> Tensor:
        """Return LayerNorm(input + dropout(dense(output))): dropout comes after the projection and before the sum."""
        return ln_layer(input + dropout(dense_layer(output)))

    def attend(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        """The first half of the layer: x = LayerNorm(h + attention(h)), (B, T, H) -> (B, T, H)."""
        attended = self.self_attention(hidden_states, attention_mask)
        return self.add_norm(
            hidden_states, attended, self.attention_dense, self.attention_dropout, self.attention_layer_norm
        )

    def feed_forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """The second half of the layer: LayerNorm(residual + FFN(x)), (B, T, H) -> (B, T, H). In BERT, residual = x."""
        inner = self.interm_af(self.interm_dense(x))  # (B, T, 4H)
        return self.add_norm(residual, inner, self.out_dense, self.out_dropout, self.out_layer_norm)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        """Both halves: (B, T, H) -> (B, T, H)."""
        x = self.attend(hidden_states, attention_mask)
        return self.feed_forward(x, x)


Layer = Callable[[Tensor, Tensor], Tensor]  # hidden states (B, T, H), mask (B, 1, 1, T) of 0 and -inf -> (B, T, H)


def compile_all(layers: Iterable[nn.Module]) -> None:
    """Compile layers in place, for sentences of any length. Layers of one structure share a graph."""
    from torch._functorch import config

    config.donated_buffer = False  # else a backward pass overwrites saved activations, but SMART runs that pass twice
    for layer in layers:
        layer.compile(dynamic=True)


class BertModel(BertPreTrainedModel):
    """Embeddings, a stack of BertLayers, and the pooler: tanh(dense(hidden state of [CLS]))."""

    def __init__(self, config: BertConfig):
        super().__init__(config)
        H = config.hidden_size
        self.word_embedding = nn.Embedding(config.vocab_size, H, padding_idx=config.pad_token_id)
        self.pos_embedding = nn.Embedding(config.max_position_embeddings, H)
        self.tk_type_embedding = nn.Embedding(config.type_vocab_size, H)
        self.embed_layer_norm = nn.LayerNorm(H, eps=config.layer_norm_eps)
        self.embed_dropout = Dropout(config.hidden_dropout_prob)
        self.bert_layers = nn.ModuleList(BertLayer(config) for _ in range(config.num_hidden_layers))
        self.pooler_dense = nn.Linear(H, H)
        self.pooler_af = nn.Tanh()
        self.packs = True  # hidden states without padding, on a CPU
        self.checkpoint_activations = False  # True: store the layers' inputs only, recompute the rest in backward
        self.init_weights()

    def compile_layers(self) -> None:
        """Compile every layer for sentences of any length; the parameters keep their names."""
        compile_all(self.bert_layers)

    def use_attention(self, name: str) -> None:
        """Make every layer use this entry of ATTENTIONS; "written" computes the padding too."""
        self.packs = name != "written"
        for layer in self.bert_layers:
            layer.self_attention.attend = ATTENTIONS[name]

    def embed(self, input_ids: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """Sum of word, position and segment embeddings, normalized, with dropout: (B, T) -> (B, T, H)."""
        T = input_ids.size(1)
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)
        words = lookup(self.word_embedding.weight, input_ids, self.config.pad_token_id)  # (B, T, H)
        positions = self.pos_embedding.weight[:T]  # (T, H)
        segments = self.tk_type_embedding(token_type_ids)  # (B, T, H)
        return self.embed_dropout(self.embed_layer_norm(words + positions + segments))

    def encode(self, hidden_states: Tensor, attention_mask: Tensor, layers: Iterable[Layer] | None = None) -> Tensor:
        """Run the layers: (B, T, H) -> (B, T, H). attention_mask: (B, T), 1 for a real token.

        layers: run these instead of the model's own.
        """
        # Padding gets attention weight exactly 0, so the other sentences of a batch cannot influence this one.
        mask = torch.zeros_like(attention_mask, dtype=hidden_states.dtype)
        mask = mask.masked_fill(attention_mask == 0, -math.inf)[:, None, None, :]  # (B, 1, 1, T)
        places = packed_places(mask) if self.packs and self.saves_time(hidden_states, attention_mask) else None
        hidden_states = hidden_states if places is None else pack(hidden_states, places)
        keep_activations = not (self.checkpoint_activations and torch.is_grad_enabled())
        for layer in self.bert_layers if layers is None else layers:
            if keep_activations:
                hidden_states = layer(hidden_states, mask)
            else:  # checkpoint restores the random state, so the recomputed layer has the same dropout masks
                hidden_states = checkpoint(layer, hidden_states, mask, use_reentrant=False)
        return hidden_states if places is None else unpack(hidden_states, places, mask)

    @staticmethod
    def saves_time(hidden_states: Tensor, attention_mask: Tensor) -> bool:
        """Whether to pack: only on a CPU, where looking at the mask is no synchronization."""
        if not runs_here(hidden_states, dtypes=FLOATS):
            return False
        return int((attention_mask == 0).sum()) > WORTHWHILE * attention_mask.numel()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> dict[str, Tensor]:
        hidden_states = self.encode(self.embed(input_ids, token_type_ids), attention_mask)  # (B, T, H)
        pooled = self.pooler_af(self.pooler_dense(hidden_states[:, 0]))  # (B, H)
        return {"last_hidden_state": hidden_states, "pooler_output": pooled}
