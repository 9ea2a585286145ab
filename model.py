"""MultitaskBERT: one encoder, and for every task a pooler and a head.

What happens to a batch here, in order (`predict`):

  1. `embed`: the sentences of the batch are stacked, so that both sentences of a pair go through BERT in ONE pass, and
     BERT's embedding layer turns token ids into embeddings (R, T, H). SMART perturbs these.
  2. `vectors`: the embeddings run through BERT's layers (with the adapter, if there is one), and the task's pooler
     makes one vector (B, H) of each sentence, or of each joined pair, or of all three.
  3. `with_feature`: an input feature, such as part-of-speech tags, may be added to the vectors.
  4. `logits`: the task's head turns the vectors into logits (B, C).

The result is an `Output`: logits and vectors, and what a regularizer needs to repeat the pass.

The model is built from plain values: a `Branch` per task says which pooling, head, pairing and dropout it has. Where to
go next: bert.py (the layers), heads.py (poolers and heads), adapters.py, pos.py (the feature), tasks.py (Batch and
Output), and multitask_build.build_model, which turns flags into these values.

Shapes:  B batch   T tokens   H hidden size   C logits of a task
         R sentences of a batch: B, 2B for bi-encoded pairs, 3B for both views of a pair
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from adapters import Adapter
from bert import BertModel, Layer
from datasets import PAIRINGS, SINGLE, Pairing
from distributed import World, local_sentences
from heads import POOLERS, Pooler, build_head
from losses import Equal
from pos import Feature
from tasks import Batch, Encoded, Output, Task, stack
from utils import random_states, replayed


@dataclass(frozen=True)
class Branch:
    """A task's own part of the model. pooling, head, pairing: keys of POOLERS, HEADS and PAIRINGS."""

    task: Task
    pooling: str = "pooler"
    head: str = "linear"
    pairing: str = "bi"  # of a task on pairs
    dropout: float = 0.3  # before the head
    symmetric: bool = False  # whether pairs of dev and test are scored in both orders

    def pairing_for(self, split: str) -> Pairing:
        if not self.task.is_pair:
            return SINGLE
        both_orders = self.symmetric and split != "train"
        return PAIRINGS[f"{self.pairing.removesuffix('_symmetric')}_symmetric" if both_orders else self.pairing]


class MultitaskBERT(nn.Module):
    """One BERT and a branch per task.

    frozen: BERT is not trained and stays in eval mode. train_encoder: False if BERT's own weights are fixed, but its
    dropout and its adapter are not. share_pair_layer: one layer between the poolers and the heads of all tasks on
    pairs. max_length: of a joined pair, for the starter's calls. chunk_rows: see `vectors`. weighting: the module that
    weighs the tasks' losses; it is part of the model so that the optimizer updates what it learns.

    feature and adapter are functions that build these parts: they are called after the heads are built, so that the
    heads start from the same random numbers with and without them.
    """

    # Prefixes of the names of tensors that matter in training only.
    TRAINING_ONLY = ("weighting.",)

    def __init__(
        self,
        bert: BertModel,
        branches: Sequence[Branch],
        *,
        frozen: bool = False,
        train_encoder: bool = True,
        share_pair_layer: bool = False,
        max_length: int = 512,
        chunk_rows: int | None = None,
        weighting: nn.Module | None = None,
        feature: Callable[[int], Feature] = lambda H: Feature(H, 0),
        adapter: Callable[[BertModel, list[str]], Adapter] = Adapter,
    ):
        super().__init__()
        self.bert, self.frozen, self.chunk_rows = bert, frozen, chunk_rows
        self.max_length = min(max_length, bert.config.max_position_embeddings)
        self.bert.requires_grad_(train_encoder and not frozen)
        self.branches = {branch.task.name: branch for branch in branches}
        for name, branch in self.branches.items():
            if branch.task.is_pair and branch.pairing.startswith(("cross", "both")):
                bert.check_segments(f"--{name}_pairing {branch.pairing}", f"--{name}_pairing bi")
        H = bert.config.hidden_size
        self.poolers = nn.ModuleDict()
        self.heads = nn.ModuleDict()
        for name, branch in self.branches.items():
            vectors = len(branch.pairing_for("train").views[0])
            self.poolers[name] = POOLERS[branch.pooling](bert)
            self.heads[name] = build_head(branch.head, H, vectors, branch.task, branch.dropout)
        self.shared_pair_layer = nn.Sequential(nn.Linear(H, H), nn.GELU()) if share_pair_layer else nn.Identity()
        self.feature = feature(H)
        self.weighting = Equal([], {}) if weighting is None else weighting
        self.adapter = adapter(bert, list(self.branches))
        self.world = World()  # the processes that train this model together

    @staticmethod
    def parts_of(task: str) -> tuple[str, ...]:
        """Prefixes of the names of the tensors that belong to one task only."""
        return f"heads.{task}.", f"poolers.{task}.", f"adapter.tasks.{task}."

    def train(self, mode: bool = True) -> "MultitaskBERT":
        super().train(mode)
        if self.frozen:
            self.bert.eval()  # otherwise its dropout would stay on
        return self

    @property
    def vectors_are_fixed(self) -> bool:
        """Whether what comes before the feature and the heads never changes, so one pass over the data is enough."""
        return self.frozen and not any(p.requires_grad for p in self.poolers.parameters())

    def shared_parameters(self) -> list[nn.Parameter]:
        """The parameters that all tasks share: gradient surgery works on these, but not on heads and PALs."""
        shared = (*self.bert.parameters(), *self.feature.parameters(), *self.adapter.shared_parameters())
        return [p for p in shared if p.requires_grad]

    # How a batch flows through the model

    def predict(
        self, batch: Batch, embeddings: Tensor | None = None, random_state: dict[str, Tensor] | None = None
    ) -> Output:
        """Run the model.

        embeddings: use these instead of the batch's own. random_state: repeat the dropout masks of an earlier pass.
        """
        score = partial(self.logits, batch.task, views=batch.views)
        if batch.vectors is not None:
            vectors = self.with_feature(batch, batch.vectors)
            return Output(score(vectors), vectors, score=score)
        if embeddings is None:
            embeddings = self.embed(batch)
            if torch.is_grad_enabled() and self.training and not (self.frozen or embeddings.requires_grad):
                embeddings.requires_grad_()  # a regularizer may need their gradient, even if they are fixed
        state = random_states(embeddings.device) if self.training and random_state is None else random_state
        with replayed(random_state, embeddings.device):
            vectors = self.with_feature(batch, self.vectors(batch, embeddings))
            again = partial(self.predict, batch) if self.training else None
            return Output(score(vectors), vectors, embeddings, state, score, again, self.world.local)

    def embed(self, batch: Batch) -> Tensor:
        """The embedding layer's output for all sentences of the batch, stacked: (R, T, H).

        If several processes train together, R here and in `vectors` is this process's share until all are gathered.
        """
        sentences = local_sentences(self.world, stack(batch.sentences))
        return self.bert.embed(sentences.token_ids, sentences.token_type_ids)

    def vectors(self, batch: Batch, embeddings: Tensor | None = None) -> tuple[Tensor, ...]:
        """One (B, H) for each sentence of a row.

        With chunk_rows, BERT encodes that many sentences at a time. Only their vectors are stored; the backward pass
        recomputes each chunk with the same dropout masks. So a contrastive loss still sees all vectors of the batch,
        with as many negatives as rows, while only one chunk's activations are in memory, and the gradients are those of
        a single pass: GradCache of Gao et al. 2021 (arXiv:2101.06983), implemented by checkpointing. Deviation: the
        embedding layer, whose output SMART perturbs, is not chunked.
        """
        embeddings = self.embed(batch) if embeddings is None else embeddings
        of_all = stack(batch.sentences).attention_mask
        mask = self.world.local(of_all)  # (R, T)
        encode = partial(self._encode, self.adapter.layers(batch.task), self.poolers[batch.task])
        if self.chunk_rows and torch.is_grad_enabled():
            chunks = zip(embeddings.split(self.chunk_rows), mask.split(self.chunk_rows), strict=True)
            vectors = torch.cat([checkpoint(encode, *chunk, use_reentrant=False) for chunk in chunks])  # (R, H)
        else:
            vectors = encode(embeddings, mask)
        vectors = self.world.gather(vectors, of_all.size(0))
        return vectors.unflatten(0, (len(batch.sentences), -1)).unbind()  # (R, H) -> one (B, H) per sentence

    def _encode(self, layers: Iterable[Layer], pooler: Pooler, embeddings: Tensor, mask: Tensor) -> Tensor:
        return pooler(self.bert.encode(embeddings, mask, layers), mask)  # (R, T, H) -> (R, H)

    def with_feature(self, batch: Batch, vectors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The pooled vectors with the input feature added; stored vectors may come without their sentences."""
        sentences = batch.sentences or (None,) * len(vectors)
        return tuple(map(self.feature, vectors, sentences))

    def logits(self, task: str, vectors: tuple[Tensor, ...], views: tuple[tuple[int, ...], ...]) -> Tensor:
        """(B, C): the mean over the views, of which there are two if pairs are scored in both orders."""
        if self.branches[task].task.is_pair:
            vectors = tuple(map(self.shared_pair_layer, vectors))
        scores = [self.heads[task](*(vectors[i] for i in view)) for view in views]
        return sum(scores[1:], start=scores[0]) / len(views)

    # The starter's signatures

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Sentence vectors: (B, T), (B, T) -> (B, H)."""
        batch = self._batch(next(iter(self.branches)), (input_ids, attention_mask))
        return self.with_feature(batch, self.vectors(batch))[0]

    def predict_sentiment(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Five logits per sentence: (B, 5)."""
        return self.predict(self._batch("sst", (input_ids, attention_mask))).logits

    def predict_paraphrase(
        self, input_ids_1: Tensor, attention_mask_1: Tensor, input_ids_2: Tensor, attention_mask_2: Tensor
    ) -> Tensor:
        """One logit per pair, before the sigmoid: (B, 1)."""
        pair = (input_ids_1, attention_mask_1), (input_ids_2, attention_mask_2)
        return self.predict(self._batch("para", *pair)).logits

    def predict_similarity(
        self, input_ids_1: Tensor, attention_mask_1: Tensor, input_ids_2: Tensor, attention_mask_2: Tensor
    ) -> Tensor:
        """One number per pair, 0 to 5: (B, 1)."""
        pair = (input_ids_1, attention_mask_1), (input_ids_2, attention_mask_2)
        return self.predict(self._batch("sts", *pair)).logits

    def _batch(self, task: str, *tensors: tuple[Tensor, Tensor]) -> Batch:
        sentences = tuple(Encoded(ids, mask, torch.zeros_like(ids)) for ids, mask in tensors)
        if len(sentences) == 1:
            return Batch(task, [], sentences, None)
        pairing = self.branches[task].pairing_for("train" if self.training else "dev")
        return Batch(task, [], pairing.join(*sentences, self.max_length), None, views=pairing.views)
