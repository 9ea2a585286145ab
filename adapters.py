"""Adapters that change the layers of an encoder when the model is built: PALs, LoRA, mixout, own layers.

BERT's code is not changed: an adapter says which layers a task's batch runs through, and owns its weights.

Shapes:  B batch   T tokens   H hidden size   N attention heads   d width of a PAL   r rank of LoRA
"""

import argparse
import contextlib
import copy
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.func import functional_call

from bert import BertLayer, BertModel, BertSelfAttention, Layer, compile_all
from config import BertConfig
from flags import ENCODER_TRAINS, ArgumentParser, Need, Switch, chosen, number
from kernels import dropout
from utils import InputError


class Adapter(nn.Module):
    """No adapter. Every adapter gives the same outputs as this one before its first step (docs/PITFALLS.md, 31).

    bert: with its weights, and with the attention that it will use. tasks: their names.
    """

    own_parameters: ClassVar[bool] = False  # without any, it cannot train alone
    shared: ClassVar[bool] = True  # whether all tasks share its parameters
    plain_encoder: ClassVar[bool] = True  # whether the saved encoder computes the same without the adapter
    settings: ClassVar[dict[str, str]] = {}  # keyword arguments of __init__, and the flags that set them

    def __init__(self, bert: BertModel, tasks: Sequence[str]):
        super().__init__()
        self.encoder = (bert,)  # in a tuple, so that its parameters are not registered twice

    def layers(self, task: str) -> Iterable[Layer]:
        """The layers that a batch of this task runs through."""
        (bert,) = self.encoder
        return bert.bert_layers

    def compile_layers(self) -> None:
        (bert,) = self.encoder
        bert.compile_layers()

    def shared_parameters(self) -> list[nn.Parameter]:
        return list(self.parameters()) if self.shared else []

    def summary(self) -> str:
        """For the line that describes a run."""
        return ""


# --- projected attention layers ---------------------------------------------------------------------------------------


class ProjectedAttention(nn.Module):
    """TS_l(h) = V_D MH_l(V_E h) of one task: V_E (d, H) and V_D (H, d) for all layers, an attention per layer l."""

    def __init__(self, config: BertConfig, d: int):
        super().__init__()
        small = replace(config, hidden_size=d)
        self.encoder = nn.Linear(config.hidden_size, d, bias=False)
        self.decoder = nn.Linear(d, config.hidden_size, bias=False)
        self.attentions = nn.ModuleList(BertSelfAttention(small) for _ in range(config.num_hidden_layers))
        for name, parameter in self.named_parameters():  # initialized like BERT itself
            std = 0.0 if name.endswith("bias") else config.initializer_range
            nn.init.normal_(parameter, std=std)
        nn.init.zeros_(self.decoder.weight)


class LayerWithPAL(nn.Module):
    """One layer of the shared encoder with a task's TS_l beside it; both belong to others, which register them.

    A module, so that torch.compile takes the weights as inputs of one graph: a function with the layer's number would
    be compiled for every number, and for no more than eight.
    """

    def __init__(self, layer: BertLayer, pals: ProjectedAttention, number: int):
        super().__init__()
        self.parts = (layer, pals.encoder, pals.attentions[number], pals.decoder)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, T, H), (B, 1, 1, T) -> (B, T, H)"""
        layer, encoder, attention, decoder = self.parts
        x = layer.attend(hidden_states, attention_mask)
        beside = decoder(attention(encoder(hidden_states), attention_mask))  # (B, T, H) -> (B, T, d) -> (B, T, H)
        return layer.feed_forward(x, x + beside)


class PAL(Adapter):
    """Projected attention layers, Stickland & Murray 2019 (arXiv:1902.02671), section 3:

        h_{l+1} = LayerNorm(x + FFN(x) + TS_l(h_l)),        x = LayerNorm(h_l + MH(h_l))

    Each task has its own TS parallel to every layer of the shared encoder; as in the paper, its attention has no output
    matrix. The paper's d = 204 gives each task 1.8 M parameters in bert-base. The default is about the same fraction of
    H, in heads whose size is a multiple of 8, which fused attention needs in half precision: d = 192 for bert-base. V_D
    starts at zero, so TS does too, and the first step has a gradient for V_D only.
    Deviations: the default d, and the zero start. Attention has biases, as in the authors' code; their gelu after V_D,
    which is not in the paper, is left out.
    """

    own_parameters, shared, plain_encoder = True, False, False
    settings: ClassVar = {"dim": "pal_dim"}

    def __init__(self, bert: BertModel, tasks: Sequence[str], dim: int | None = None):
        """dim: d, a multiple of the number of attention heads; by default about 17/64 of H."""
        super().__init__(bert, tasks)
        d = self.width(bert.config, dim)
        self.tasks = nn.ModuleDict({task: ProjectedAttention(bert.config, d) for task in tasks})
        for pals in self.tasks.values():
            for layer, attention in zip(bert.bert_layers, pals.attentions, strict=True):
                attention.attend = layer.self_attention.attend
        self.of_task = {
            task: [LayerWithPAL(layer, pals, number) for number, layer in enumerate(bert.bert_layers)]
            for task, pals in self.tasks.items()
        }

    @staticmethod
    def width(config: BertConfig, wanted: int | None) -> int:
        N = config.num_attention_heads
        if wanted is None:
            return N * max(8, 8 * round(config.hidden_size / N * 17 / 64 / 8))
        if wanted % N:
            near = ", ".join(str(n) for n in (wanted // N * N, wanted // N * N + N) if n)
            raise InputError(
                f"--pal_dim must be a multiple of the encoder's {N} attention heads, found {wanted}. Use {near}."
            )
        return wanted

    def layers(self, task: str) -> Iterable[Layer]:
        return self.of_task[task]

    def compile_layers(self) -> None:
        compile_all(layer for layers in self.of_task.values() for layer in layers)

    def summary(self) -> str:
        each = next(iter(self.tasks.values()))
        return f" | adapter pal: {_count(each):,} parameters for each task"


# --- low-rank updates -------------------------------------------------------------------------------------------------


class LowRank(nn.Module):
    """x -> scale B A x, where A (r, in) starts at random and B (out, r) at zero."""

    def __init__(self, linear: nn.Linear, r: int, alpha: float):
        super().__init__()
        self.scale = alpha / r
        self.A = nn.Parameter(torch.randn(r, linear.in_features) / math.sqrt(linear.in_features))
        self.B = nn.Parameter(torch.zeros(linear.out_features, r))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * F.linear(F.linear(x, self.A), self.B)  # (B, T, in) -> (B, T, r) -> (B, T, out)


class LinearWithUpdate(nn.Module):
    """A linear layer with a low-rank update added; it replaces the layer and keeps its weights and parameter names.

    Not a forward hook: torch.compile does not guard hooks, and used those of one layer for another.
    """

    def __init__(self, linear: nn.Linear, update: LowRank):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.update = (update,)  # in a tuple: it belongs to the adapter

    def forward(self, x: Tensor) -> Tensor:
        (update,) = self.update
        return F.linear(x, self.weight, self.bias) + update(x)

    @contextlib.contextmanager
    def merged(self) -> Iterator[None]:
        """Inside this context the weight is W + scale B A, and B is zero: the same outputs without the update."""
        (update,) = self.update
        weight, B = self.weight.data, update.B.data
        self.weight.data = torch.addmm(weight, B, update.A.data, alpha=update.scale)
        update.B.data = torch.zeros_like(B)
        try:
            yield
        finally:
            self.weight.data, update.B.data = weight, B


# The values of --lora_on, and where each matrix is in a BertLayer
LINEARS = {
    "query": "self_attention.query",
    "key": "self_attention.key",
    "value": "self_attention.value",
    "attention_dense": "attention_dense",
    "interm_dense": "interm_dense",
    "out_dense": "out_dense",
}


class LoRA(Adapter):
    """Low-rank adaptation, Hu et al. 2021 (arXiv:2106.09685), equation 3: h = W x + alpha / r B A x.

    Applied to query and value of every layer, as in the paper, or to the matrices in `on`; one update for all tasks. It
    can be merged: a run's weights file holds W + alpha / r B A in place of W, and B = 0, so the encoder alone contains
    all of it. Deviations: A starts with standard deviation 1 / sqrt(in), which the paper leaves open; no dropout on x.
    """

    own_parameters = True
    settings: ClassVar = {"r": "lora_r", "alpha": "lora_alpha", "on": "lora_on"}

    def __init__(
        self,
        bert: BertModel,
        tasks: Sequence[str],
        r: int = 8,
        alpha: float = 8.0,
        on: Sequence[str] = ("query", "value"),
    ):
        super().__init__(bert, tasks)
        self.updates = nn.ModuleList()
        for layer in bert.bert_layers:
            self.updates.append(nn.ModuleDict())
            for name in dict.fromkeys(on):
                linear = layer.get_submodule(LINEARS[name])
                update = self.updates[-1][name] = LowRank(linear, r, alpha)
                parent, _, child = LINEARS[name].rpartition(".")
                setattr(layer.get_submodule(parent), child, LinearWithUpdate(linear, update))

    def summary(self) -> str:
        return f" | adapter lora: {_count(self):,} parameters"


# --- mixout -----------------------------------------------------------------------------------------------------------


class MixoutLayer(nn.Module):
    """A layer whose matrices are mixed anew in every training pass; in eval mode it is the plain layer."""

    def __init__(self, layer: BertLayer, p: float):
        super().__init__()
        self.layer, self.p = (layer,), p
        for i, weight in enumerate(self.matrices().values()):  # not saved: the checkpoint has them
            self.register_buffer(str(i), weight.detach().clone(), persistent=False)

    def matrices(self) -> dict[str, Tensor]:
        (layer,) = self.layer
        return {name: weight for name, weight in layer.named_parameters() if weight.ndim == 2}

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        (layer,) = self.layer
        if not self.training:
            return layer(hidden_states, attention_mask)
        pairs = zip(self.matrices().items(), self.buffers(), strict=True)
        mixed = {name: start + dropout(weight - start, self.p, True) for (name, weight), start in pairs}
        return functional_call(layer, mixed, (hidden_states, attention_mask))


class Mixout(Adapter):
    """Mixout, Lee et al. 2020 (arXiv:1909.11299), section 3. In training, each weight w of the layers' matrices is
    replaced with probability p by its pre-trained value u, and otherwise moved away from u so that the mean stays w:

        (M u + (1 - M) w - p u) / (1 - p)  =  u + dropout_p(w - u),        M ~ Bernoulli(p)

    Regularizes towards the pre-trained weights, for small data sets. A regularizer that repeats dropout masks repeats
    those of mixout too. It has no weights of its own; the copy of u takes as much memory as the layers.
    Deviations: BERT's dropout stays on, while the paper mostly replaces it; the pooler and the heads are not mixed.
    """

    settings: ClassVar = {"p": "mixout_p"}

    def __init__(self, bert: BertModel, tasks: Sequence[str], p: float = 0.7):
        super().__init__(bert, tasks)
        self.mixed = nn.ModuleList(MixoutLayer(layer, p) for layer in bert.bert_layers)

    def layers(self, task: str) -> Iterable[Layer]:
        return self.mixed

    def summary(self) -> str:
        return " | adapter mixout: no parameters"


# --- own layers -------------------------------------------------------------------------------------------------------


class TaskLayers(nn.Module):
    """A task's copies of the encoder's last n layers, under the numbers that the layers have there."""

    def __init__(self, bert: BertModel, n: int):
        super().__init__()
        numbered = list(enumerate(bert.bert_layers))[-n:]
        # The name tells the optimizer that these are layers of the encoder, with the encoder's learning rate.
        self.bert_layers = nn.ModuleDict({str(number): copy.deepcopy(layer) for number, layer in numbered})


class OwnLayers(Adapter):
    """Every task has its own copy of the encoder's last n layers and shares the layers below.

    Tasks that need different things of a sentence conflict most in the layers near the heads. This is hard parameter
    sharing with a branch per task (Caruana 1997; Ruder 2017, arXiv:1706.05098, section 3.1). A pass takes as long as
    without it. The layers that were copied remain in the weights file with their pre-trained weights, unused.
    """

    own_parameters, shared, plain_encoder = True, False, False
    settings: ClassVar = {"n": "own_layers"}

    def __init__(self, bert: BertModel, tasks: Sequence[str], n: int = 2):
        super().__init__(bert, tasks)
        if n > len(bert.bert_layers):
            raise InputError(
                f"--own_layers must be at most the number of the encoder's layers, {len(bert.bert_layers)}, found {n}. "
                "Use a smaller number."
            )
        self.below = len(bert.bert_layers) - n
        self.tasks = nn.ModuleDict({task: TaskLayers(bert, n) for task in tasks})
        self.tasks.requires_grad_()  # also if the encoder's own weights are fixed
        bert.bert_layers[self.below :].requires_grad_(False)

    def layers(self, task: str) -> Iterable[Layer]:
        (bert,) = self.encoder
        return [*bert.bert_layers[: self.below], *self.tasks[task].bert_layers.values()]

    def compile_layers(self) -> None:
        (bert,) = self.encoder
        own = (layer for layers in self.tasks.values() for layer in layers.bert_layers.values())
        compile_all([*bert.bert_layers[: self.below], *own])

    def summary(self) -> str:
        each = next(iter(self.tasks.values()))
        return f" | adapter own_layers: {_count(each):,} parameters for each task"


ADAPTERS: dict[str, type[Adapter]] = {
    "none": Adapter,
    "pal": PAL,
    "lora": LoRA,
    "mixout": Mixout,
    "own_layers": OwnLayers,
}


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


# --- flags ------------------------------------------------------------------------------------------------------------


NEEDS_OWN_PARAMETERS = Need(
    f"--adapter {' or '.join(name for name, adapter in ADAPTERS.items() if adapter.own_parameters)}",
    lambda args: ADAPTERS[args.adapter].own_parameters,
)
SEVERAL_TASKS = Need(
    "at least two tasks",
    lambda args: args.adapter != "own_layers" or len(args.tasks) > 1,
    "Add another to --tasks, or use --adapter none",
)


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.section("adapters")
    pal, lora, mixout, own = (chosen("--adapter", name) for name in ("pal", "lora", "mixout", "own_layers"))
    add(
        "--adapter",
        choices=sorted(ADAPTERS),
        default="none",
        needs=(ENCODER_TRAINS, SEVERAL_TASKS),
        help="what is added to BERT's layers",
    )
    add("--adapter_only", action=Switch, needs=NEEDS_OWN_PARAMETERS,
        help="freeze BERT's weights, not its dropout; train the adapter, poolers and heads")  # fmt: skip
    add(
        "--pal_dim",
        type=number(int, 1, 4096),
        needs=pal,
        help="width of a PAL (default: about 17/64 of BERT's in heads of a multiple of 8, 192 for bert-base)",
    )
    add("--lora_r", type=number(int, 1, 1024), default=8, needs=lora, help="rank of the updates")
    add(
        "--lora_alpha",
        type=number(float, 0, 1e6, above=True),
        default=8.0,
        needs=lora,
        help="updates are scaled by alpha / r",
    )
    add(
        "--lora_on",
        nargs="+",
        choices=list(LINEARS),
        default=["query", "value"],
        needs=lora,
        help="which matrices LoRA adapts",
    )
    add("--mixout_p", type=number(float, 0, 0.99, above=True), default=0.7, needs=mixout,
        help="fraction of the weights that are replaced by pre-trained ones")  # fmt: skip
    add("--own_layers", type=number(int, 1, 1000), default=2, needs=own,
        help="how many of the last layers every task has for itself")  # fmt: skip


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse gradient surgery without shared weights."""
    if args.adapter_only and args.combiner != "sum" and not ADAPTERS[args.adapter].shared:
        raise InputError(
            f"--combiner {args.combiner} works on weights that tasks share, but --adapter {args.adapter} with "
            "--adapter_only trains none. Use --combiner sum, or leave out --adapter_only."
        )


def flags_of_run(stored: dict[str, Any], weights: Path) -> dict[str, Any]:
    """Add the width of a stored run's PALs if it was the default, which was 204 for bert-base at first.

    weights: its file. If it cannot be read, nothing is added, and loading it reports the error.
    """
    if stored.get("adapter") != "pal" or stored.get("pal_dim") is not None:
        return stored
    with contextlib.suppress(OSError, SafetensorError, StopIteration), safe_open(weights, "pt") as file:
        name = next(name for name in file.keys() if re.fullmatch(r"adapter\.tasks\.\w+\.encoder\.weight", name))  # noqa: SIM118
        return stored | {"pal_dim": file.get_slice(name).get_shape()[0]}
    return stored


def build_adapter(args: argparse.Namespace, bert: BertModel, tasks: Sequence[str]) -> Adapter:
    """Call this once the encoder has its pre-trained weights: mixout copies them."""
    adapter = ADAPTERS[args.adapter]
    return adapter(bert, tasks, **{name: getattr(args, flag) for name, flag in adapter.settings.items()})
