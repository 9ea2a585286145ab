"""Further pre-training on the tasks' own text or any other: masked language modeling, next sentence, SimCSE.

    python pretrain.py --model minilm --objective mlm --name on-course-text
    python pretrain.py --model minilm --objective mlm+simcse:0.5 --text my.txt --epochs 1
    python multitask_classifier.py --model runs/on-course-text --option finetune

The run's directory is a checkpoint that --model accepts; `transformers.BertForMaskedLM` loads it as well. By default
only training files are read: their texts, and for simcse_supervised the labels of the paraphrases. corpus.py turns
files into batches.

Shapes:  B batch   R rows of one pass   T tokens   H hidden size   V word pieces   M masked tokens of a batch
"""

import starting  # noqa: F401

# isort: split

import argparse
import functools
import itertools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

import corpus
import distributed
import heads
import optimizer
import shared_flags
from base_bert import copy_tensors, find_checkpoint, modern_name, read_weights, revision_of
from bert import BertModel
from checkpoints import STATE
from config import ACTIVATIONS
from corpus import HELD_OUT_SEED, IGNORED, Corpus, Documents, Masking, Pair, PairCorpus
from datasets import Source, check_rows_meet, endless_batches, epoch_generator
from distributed import World, local_sentences
from flags import ALWAYS, ArgumentParser, Need, Switch, check_stored, number, parse_spec
from losses import at_least_float32, same_meaning, simcse_scores, without_excluded
from observers import build_observer
from runs import Run, shared_run
from tasks import PARA, TASKS, Batch, Output, stack
from tokenizer import BertTokenizer
from trainer import Step, Trainer
from training import fit, grouped
from utils import (
    InputError,
    Precision,
    SideStream,
    choose_device,
    count_parameters,
    dry_run_directory,
    run_script,
    seed_everything,
    warn,
)

BATCH_SIZE = 32
HELD_OUT_BATCH = 32  # not a flag: held-out figures of different runs must be comparable

# --- the model --------------------------------------------------------------------------------------------------------


class WordHead(nn.Module):
    """Logits over all word pieces: W LayerNorm(act(dense(h))) + b, where W is the word embedding matrix.

    Devlin et al. 2019, section 3.1, task 1, as in their code, where act is the encoder's activation. The parameters
    have transformers' names.
    """

    def __init__(self, bert: BertModel):
        super().__init__()
        H = bert.config.hidden_size
        norm = nn.LayerNorm(H, eps=bert.config.layer_norm_eps)
        self.transform = nn.ModuleDict({"dense": nn.Linear(H, H), "LayerNorm": norm})
        self.bias = nn.Parameter(torch.zeros(bert.config.vocab_size))
        self.activation = ACTIVATIONS[bert.config.hidden_act]
        self.encoder = (bert,)  # in a tuple, so that its parameters are not registered twice
        self.apply(bert.init_module)

    def forward(self, hidden: Tensor) -> Tensor:
        """(M, H) -> (M, V)"""
        (bert,) = self.encoder
        hidden = self.transform["LayerNorm"](self.activation(self.transform["dense"](hidden)))
        return F.linear(hidden, bert.word_embedding.weight, self.bias)


class PretrainingBERT(nn.Module):
    """BERT with a head per objective; the heads `cls.*` have the names that transformers gives them."""

    is_checkpoint: ClassVar[bool] = True  # other libraries may put a new head on the encoder (checkpoints.save_best)

    def __init__(self, bert: BertModel, objectives: Iterable[str], pooling: str = "mean", temperature: float = 0.05):
        super().__init__()
        self.bert, self.temperature = bert, temperature
        self.chunk_rows: int | None = None  # encode this many sentences at a time (see model.MultitaskBERT.vectors)
        self.world = World()  # the processes that train this model together
        self.cls, self.poolers = nn.ModuleDict(), nn.ModuleDict()
        names = set(objectives)
        if "mlm" in names:
            self.cls["predictions"] = WordHead(bert)
        if "nsp" in names:
            bert.check_segments("--objective nsp", "--objective mlm")
            self.cls["seq_relationship"] = nn.Linear(bert.config.hidden_size, 2).apply(bert.init_module)
        if names & CONTRASTIVE:
            self.poolers["simcse"] = heads.POOLERS[pooling](bert)
        bert.pooler_dense.requires_grad_("nsp" in names or (bool(names & CONTRASTIVE) and pooling == "pooler"))

    def predict(self, batch: Batch) -> Output:
        """The logits of the batch's objective (rows, choices), one row for each of its `targets`."""
        of_all = stack(batch.sentences)
        sentences = local_sentences(self.world, of_all)
        embeddings, mask = self.bert.embed(sentences.token_ids, sentences.token_type_ids), sentences.attention_mask
        if self.chunk_rows and torch.is_grad_enabled():
            chunks = zip(embeddings.split(self.chunk_rows), mask.split(self.chunk_rows), strict=True)
            hidden = torch.cat([checkpoint(self.bert.encode, *chunk, use_reentrant=False) for chunk in chunks])
        else:
            hidden = self.bert.encode(embeddings, mask)
        hidden = self.world.gather(hidden, of_all.token_ids.size(0))  # (R, T, H)
        return Output(OBJECTIVES[batch.task].logits(self, hidden, batch), ())

    def word_logits(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Logits of the masked tokens only: with 30,000 word pieces, all others would be most of the cost. -> (M, V)"""
        return self.cls["predictions"](hidden[batch.labels != IGNORED])  # (B, T, H) -> (M, H) -> (M, V)

    def order_logits(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Whether the second sentence is the next one, from the pooled [CLS]: (B, T, H) -> (B, 2)."""
        return self.cls["seq_relationship"](self.bert.pooler_af(self.bert.pooler_dense(hidden[:, 0])))

    def similarity_logits(self, hidden: Tensor, batch: Batch) -> Tensor:
        """The scores of SimCSE (losses.simcse_scores) of every first text with every other text of the batch.

        The positive of row i is column i. If it is the sentence itself under another dropout mask, the cross entropy of
        these logits is equation 4 of Gao et al. 2021; with labeled positives and hard negatives, equation 5.
        -> (B, B + negatives)
        Deviations: mean pooling is the default (`--pooling pooler` is the paper's [CLS] with an MLP, cls its variant
        without); texts known to mean the same as text i are not negatives of i (losses.same_meaning); rows without a
        hard negative are kept.
        """
        vectors = self.poolers["simcse"](hidden, stack(batch.sentences).attention_mask)  # (R, H)
        B = len(batch.labels)
        scores = simcse_scores(vectors[:B], vectors[B:], self.temperature)
        first, second, *_ = batch.text_hashes
        return without_excluded(scores, same_meaning(first, second, torch.cat(batch.text_hashes[1:])))


def load_heads(model: PretrainingBERT, folder: Path) -> None:
    """Load the checkpoint's own pre-training heads; a head that it does not have starts at random."""
    tensors = {modern_name(name): tensor for name, tensor in read_weights(folder).items()}
    if "cls.predictions.decoder.bias" in tensors:  # the same tensor under its other name
        tensors.setdefault("cls.predictions.bias", tensors["cls.predictions.decoder.bias"])
    for head in model.cls:
        wanted = {name: p for name, p in model.named_parameters() if name.startswith(f"cls.{head}.")}
        given = {name: tensors[name] for name in wanted if name in tensors}
        if given:
            misfit = "the pre-training head does not fit its config.json", "Check that both belong together"
            copy_tensors(given, wanted, folder, misfit)
        else:
            warn(f"{folder} has no head cls.{head}: its own weights start at random.")


# --- objectives -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Objective:
    """A cross entropy over `logits`, one row for each target of a batch from `source`."""

    logits: Callable[[PretrainingBERT, Tensor, Batch], Tensor]  # (model, hidden states, batch) -> (rows, choices)
    source: Callable[[argparse.Namespace, BertTokenizer, Corpus | PairCorpus], Source]
    unit: str = "sentences"  # what its rows are
    on_pairs: bool = False  # its data are labeled pairs, not text
    dropout_is_noise: bool = False  # held-out text is scored under dropout too


OBJECTIVES: dict[str, Objective] = {
    "mlm": Objective(
        PretrainingBERT.word_logits,
        lambda args, tokenizer, text: corpus.MaskedSentences(
            text, Masking.of(tokenizer, args.mask_share, args.whole_word), tokenizer.pad_token_id
        ),
    ),
    "nsp": Objective(
        PretrainingBERT.order_logits,
        lambda args, tokenizer, text: corpus.NextSentences(text, tokenizer.pad_token_id, tokenizer.max_length),
        unit="sentence pairs",
    ),
    "simcse": Objective(
        PretrainingBERT.similarity_logits,
        lambda args, tokenizer, text: corpus.SentencesTwice(text, tokenizer.pad_token_id),
        dropout_is_noise=True,
    ),
    "simcse_supervised": Objective(
        PretrainingBERT.similarity_logits,
        lambda args, tokenizer, pairs: corpus.PositivePairs(pairs, tokenizer.pad_token_id),
        unit="positive pairs",
        on_pairs=True,
    ),
}
CONTRASTIVE = {"simcse", "simcse_supervised"}


def parse_objectives(spec: str) -> dict[str, float]:
    """Parse `mlm+simcse:0.5` into the weight of each objective."""
    return parse_spec(spec, OBJECTIVES, "--objective")


def targets(batch: Batch) -> Tensor:
    return batch.labels[batch.labels != IGNORED]


def summed_loss(output: Output, batch: Batch) -> Tensor:
    """Cross entropy, summed over the targets. No class is ignored, not even 0 (docs/PITFALLS.md, 30)."""
    return F.cross_entropy(at_least_float32(output.logits), targets(batch), reduction="sum")


def weighted_loss(output: Output, batch: Batch, weight: float) -> Tensor:
    """The mean over the targets times the weight; 0 for a batch without targets."""
    return weight * summed_loss(output, batch) / max(1, len(output.logits))


@torch.no_grad()
def measure(model: PretrainingBERT, name: str, source: Source, precision: Precision) -> tuple[float, float]:
    """The mean loss and the accuracy on the held-out targets, with the same masks, pairs and dropout in every call."""
    loss = correct = count = 0.0
    model.train(OBJECTIVES[name].dropout_is_noise)
    batches = source.batches(HELD_OUT_BATCH, Generator().manual_seed(HELD_OUT_SEED))
    total = -(-len(source) // HELD_OUT_BATCH)
    gpus = [precision.device] if precision.device.type == "cuda" else []
    with torch.random.fork_rng(gpus), precision.autocast():  # one region, so that each weight is cast once
        for i, batch in enumerate(tqdm(batches, desc=f"held out {name}", total=total, leave=False, disable=None)):
            if i % model.world.size != model.world.rank:  # another process measures it
                continue
            torch.manual_seed(HELD_OUT_SEED + i)
            batch = batch.to(precision.device)
            output = model.predict(batch)
            loss += summed_loss(output, batch).double()  # stays on the device until all batches are done
            correct += (output.logits.argmax(dim=1) == targets(batch)).sum()
            count += len(output.logits)
    loss, correct, count = model.world.sum([float(loss), float(correct), float(count)])
    return loss / count, correct / count


# --- data -------------------------------------------------------------------------------------------------------------


class Sources(NamedTuple):
    train: Source
    held_out: Source


def data_files(args: argparse.Namespace) -> list[Path]:
    """All files that a run reads."""
    of_tasks = [args.data / TASKS[name].filename("train") for name in args.tasks]
    return [*of_tasks, *(args.text or ()), *(args.nli or ()), *([args.held_out] if args.held_out else [])]


def text_splits(args: argparse.Namespace, names: list[str]) -> tuple[Documents, Documents]:
    """The training text and the held-out text."""
    documents: Documents = []
    for name in args.tasks:
        documents += corpus.task_documents(TASKS[name], args.data / TASKS[name].filename("train"), args.strict_data)
    for path in args.text or ():
        documents += corpus.read_text(path)
    if "nsp" not in names:  # which needs documents as they are
        documents = corpus.without_repeats(documents)
    train, held_out = (documents, corpus.read_text(args.held_out)) if args.held_out else corpus.hold_out(documents)
    return corpus.at_most(train, args.max_train, args.seed), corpus.at_most(held_out, args.max_held_out, HELD_OUT_SEED)


def labeled_pairs(args: argparse.Namespace) -> list[Pair]:
    """Every positive pair of --nli, or of para's training file, with a hard negative of its first text."""
    if args.nli:
        positives, negatives = corpus.read_nli_pairs(args.nli)
    else:
        positives, negatives = corpus.read_paraphrases(args.data / PARA.filename("train"), args.strict_data)
    pairs = corpus.with_hard_negatives(positives, {} if args.positives_only else negatives)
    if len(pairs) < 20:
        source = ", ".join(map(str, args.nli or [args.data / PARA.filename("train")]))
        raise InputError(
            f"{source}: simcse_supervised needs at least 20 positive pairs (entailment, or paraphrases), found "
            f"{len(pairs)}. Use more data."
        )
    return pairs


def pair_splits(args: argparse.Namespace) -> tuple[list[Pair], list[Pair]]:
    """The training pairs and the held-out pairs, a random tenth."""
    train, held_out = corpus.hold_out([[pair] for pair in labeled_pairs(args)])
    train, held_out = (
        corpus.at_most(train, args.max_train, args.seed),
        corpus.at_most(held_out, args.max_held_out, HELD_OUT_SEED),
    )
    return [pair for (pair,) in train], [pair for (pair,) in held_out]


def build_sources(args: argparse.Namespace, tokenizer: BertTokenizer) -> dict[str, Sources]:
    """Read and tokenize what the objectives need."""
    names = list(parse_objectives(args.objective))
    corpora: dict[bool, list] = {}
    if not all(OBJECTIVES[name].on_pairs for name in names):
        corpora[False] = [Corpus.tokenize(documents, tokenizer) for documents in text_splits(args, names)]
        for text, which in zip(corpora[False], ("training", "held-out"), strict=True):
            if cut := int(text.tokens.truncated.sum()):
                total = len(text.document)
                warn(f"{cut} of {total} {which} sentences are longer than {args.max_length} tokens and were truncated.")
    if any(OBJECTIVES[name].on_pairs for name in names):
        corpora[True] = [PairCorpus.tokenize(pairs, tokenizer) for pairs in pair_splits(args)]
    sources = {
        name: Sources(*(OBJECTIVES[name].source(args, tokenizer, c) for c in corpora[OBJECTIVES[name].on_pairs]))
        for name in names
    }
    for name in CONTRASTIVE & set(names):
        check_rows_meet(sources[name].train.costs, shared_flags.batch_size(args), f"--objective {name}")
    for name, of_name in sources.items():
        batches = of_name.held_out.batches(HELD_OUT_BATCH, Generator().manual_seed(HELD_OUT_SEED))
        if not any(len(targets(batch)) for batch in batches):
            raise InputError(f"the held-out text is too short: {name} finds nothing to predict in it. Use more text.")
    return sources


# --- training ---------------------------------------------------------------------------------------------------------


def build_model(args: argparse.Namespace, precision: Precision) -> PretrainingBERT:
    bert = BertModel.from_pretrained(args.model, keep_layers=args.keep_layers, others_read={"cls"})
    bert.use_attention(args.attention)
    bert.checkpoint_activations = args.checkpoint_activations
    model = PretrainingBERT(bert, parse_objectives(args.objective), args.pooling, args.temperature)
    load_heads(model, find_checkpoint(args.model))
    if args.compile:
        bert.compile_layers()
    return model.to(precision.device)


# Flags that may differ between the start of a run and --resume.
MAY_DIFFER = {"runs", "epochs"} | shared_flags.OF_DISPLAY
MAY_DIFFER |= shared_flags.OF_THE_MACHINE | shared_flags.OF_CHECKPOINTS


def open_run(args: argparse.Namespace) -> Run:
    """A new run, or the one to resume."""
    folder = args.runs / args.name
    if not args.resume:
        return Run.create(folder, args, data_files(args), model_revision=revision_of(args.model))

    def upgraded(stored: dict[str, Any]) -> dict[str, Any]:
        """The flags of a run that may be older than some of them."""
        return vars(parser().parse_args([])) | check_stored(parser(), stored, folder / "args.json")

    extend = partial(shared_flags.check_extension, args)
    revision = revision_of(args.model)
    return Run.resume(folder, args, upgraded, data_files(args), MAY_DIFFER, extend, model_revision=revision)


def build_trainer(args: argparse.Namespace, model: PretrainingBERT, precision: Precision, total_steps: int) -> Trainer:
    update = optimizer.build_optimizer(args, model)
    return Trainer(
        model,
        {name: partial(weighted_loss, weight=weight) for name, weight in parse_objectives(args.objective).items()},
        update,
        optimizer.build_schedule(update, args.schedule, total_steps, args.warmup),
        precision,
        args.clip,
        averager=optimizer.build_averager(args, model),
        side_stream=SideStream(args.seed),
        compare_rows=CONTRASTIVE,
        world=model.world,
    )


def pretrain(args: argparse.Namespace, world: World) -> dict[str, float]:
    """Train, keep the best epoch by the held-out loss, and return its held-out figures."""
    if not args.resume:
        world.on_main(lambda: Run.must_be_new(args.runs / args.name))
    weights = parse_objectives(args.objective)
    precision = Precision(args.precision, choose_device(args.use_gpu, args.precision, args.deterministic))
    sources = build_sources(args, BertTokenizer.from_pretrained(args.model, max_length=args.max_length))
    seed_everything(args.seed)
    model = build_model(args, precision)
    model.world = world
    with shared_run(world, lambda: open_run(args)) as run:
        tokenizer = BertTokenizer.from_pretrained(args.model)  # with the checkpoint's own --max_length
        world.on_main(lambda: tokenizer.save_pretrained(run.folder))
        describe(args, model, sources, precision)
        best = fit_model(args, model, sources, weights, precision, run)
    print(" | ".join(["best", *(f"{name} {value:.3f}" for name, value in best.items()), str(run.folder)]), flush=True)
    return best


def fit_model(
    args: argparse.Namespace,
    model: PretrainingBERT,
    sources: dict[str, Sources],
    weights: dict[str, float],
    precision: Precision,
    run: Run,
) -> dict[str, float]:
    """Measure the model, train it, and return the best epoch's held-out figures."""

    def evaluate() -> dict[str, float]:
        scores, total = {}, 0.0
        for name, weight in weights.items():
            loss, accuracy = measure(model, name, sources[name].held_out, precision)
            total += weight * loss
            scores |= (
                {"perplexity": torch.tensor(loss).exp().item()} if name == "mlm" else {f"{name} accuracy": accuracy}
            )
        return scores | {"held-out loss": total}

    if not model.world.broadcast((run.folder / STATE).exists() or run.finished):
        before = evaluate()
        run.log(epoch=0, scores=before)
        model.world.on_main(run.write_log)
        print(" | ".join(["before training", *(f"{name} {value:.3f}" for name, value in before.items())]), flush=True)
    batch_size = shared_flags.batch_size(args)

    def draws(epoch: int) -> int:
        """The number of batches in a pass over the source that has most; --max_tokens can make nsp's vary."""
        passes = (s.train.count_batches(batch_size, epoch_generator(args.seed, epoch)) for s in sources.values())
        return min(max(passes), 2 * args.accumulate if args.dry_run else sys.maxsize)

    def steps(epoch: int) -> Iterator[Step]:
        """One batch of every objective per draw; an epoch is a pass over the largest source, the others start again."""
        streams = [endless_batches(s.train, batch_size, args.seed, epoch) for s in sources.values()]
        return grouped(itertools.islice(zip(*streams, strict=True), draws(epoch)), args.accumulate)

    def steps_in(epoch: int) -> int:
        return -(-draws(epoch) // args.accumulate)

    trainer = build_trainer(args, model, precision, sum(steps_in(epoch) for epoch in range(1, args.epochs + 1)))
    model.world.seed_apart(args.seed)
    observer = build_observer(args, run, model.world)
    best = fit(
        trainer, steps, evaluate, "held-out loss", args.epochs, run, better=operator.lt, steps_in=steps_in,
        patience=args.patience, save_minutes=None if args.dry_run else args.save_minutes, keep_state=args.keep_state,
        resume=args.resume, observer=observer,
    )  # fmt: skip
    observer.end()
    return best


def describe(
    args: argparse.Namespace, model: PretrainingBERT, sources: dict[str, Sources], precision: Precision
) -> None:
    """Print device, precision, parameters and data."""
    trainable, total = count_parameters(model)
    print(
        f"{args.objective} {args.model} | {precision.device.type} {args.precision} | {torch.get_num_threads()} threads "
        f"| {trainable:,} of {total:,} parameters train | lr {args.lr:g}"
    )
    for name, of_name in sources.items():
        sizes = f"train {len(of_name.train)}, held out {len(of_name.held_out)}"
        print(f"{name}: {sizes} {OBJECTIVES[name].unit}", flush=True)


# --- flags ------------------------------------------------------------------------------------------------------------


def uses(*names: str) -> Need:
    return Need(
        f"--objective {' or '.join(names)}", lambda args: bool(set(names) & set(parse_objectives(args.objective)))
    )


ON_TEXT = uses(*(name for name, objective in OBJECTIVES.items() if not objective.on_pairs))
READS_TASKS = Need(
    "an objective that reads the tasks' files",
    lambda args: ON_TEXT.is_met(args) or not (args.nli and args.tasks),
    "Leave out --nli",
)


@functools.cache
def parser() -> ArgumentParser:
    new = ArgumentParser(
        "pretrain.py",
        "Pre-train BERT further on text; the result is a checkpoint for --model.",
        "python pretrain.py --model minilm --objective mlm --data data/sample --name on-sample-text",
        usage="[@recipes/FILE.txt] [flags; later ones win]",
        sections=("most used", "objectives", "the model", "optimization", "time and memory", "files"),
    )
    add = new.section("most used")
    add(
        "--objective",
        default="mlm",
        metavar="NAME[:WEIGHT][+...]",
        needs=ALWAYS,
        help=f"sum of {', '.join(OBJECTIVES)}",
    )
    shared_flags.add_most_used(new, epochs=3)
    add("--batch_size", type=number(int, 1, 4096), needs=shared_flags.ONE_SIZE, metavar="N",
        help=f"rows of each objective per step (default: {BATCH_SIZE})")  # fmt: skip
    shared_flags.add_max_tokens(new)
    optimizer.add_arguments(new, lr=5e-5)
    shared_flags.add_long_training(new)
    _add_objectives(new)
    shared_flags.add_encoder(new)
    _add_files(new)
    return new


def _add_objectives(new: ArgumentParser) -> None:
    add = new.section("objectives")
    contrastive, supervised = uses(*sorted(CONTRASTIVE)), uses("simcse_supervised")
    add("--mask_share", type=number(float, 0, 1, above=True), default=0.15, needs=uses("mlm"),
        help="mlm: fraction of the tokens to predict")  # fmt: skip
    add("--whole_word", action=Switch, needs=uses("mlm"), help="mlm: mask all pieces of a word together")
    add("--pooling", choices=sorted(heads.POOLERS), default="mean", needs=contrastive,
        help="simcse: how a sentence's vector is made; the paper has pooler")  # fmt: skip
    add("--temperature", type=number(float, 0, 100, above=True), default=0.05, needs=contrastive,
        help="simcse: divides the cosines")  # fmt: skip
    add("--positives_only", action=Switch, needs=supervised, help="simcse_supervised: no hard negatives")


def _add_files(new: ArgumentParser) -> None:
    add = new.section("files")
    add("--tasks", nargs="+", choices=sorted(TASKS), needs=READS_TASKS,
        help="whose training files to read (default: all that are in --data; none with --text)")  # fmt: skip
    add("--text", nargs="+", type=Path, needs=ON_TEXT,
        help="text files, one sentence per line, a blank line between documents")  # fmt: skip
    add("--nli", nargs="+", type=Path, needs=uses("simcse_supervised"),
        help="simcse_supervised: jsonl files of SNLI or MultiNLI (default: para's training file)")  # fmt: skip
    add("--held_out", type=Path, needs=ON_TEXT, help="text file to measure on (default: a tenth of the text)")
    add("--max_train", type=number(int, 2, 10**9), needs=ALWAYS, help="train on at most N sentences, or pairs")
    add("--max_held_out", type=number(int, 2, 10**9), default=5000, needs=ALWAYS, help="measure on at most N")
    shared_flags.add_files(new, max_length=128)


def validate(args: argparse.Namespace) -> None:
    """Refuse combinations that are impossible, in one line with the remedy."""
    names = set(parse_objectives(args.objective))
    if names & CONTRASTIVE and args.batch_size == 1:
        raise InputError("simcse compares the rows of a batch, found --batch_size 1. Use 32 or more.")
    if "simcse_supervised" in names and not args.nli and "para" not in args.tasks:
        raise InputError(
            "simcse_supervised needs labeled pairs, found neither --nli nor para among --tasks. Add --nli FILE, or "
            "add para to --tasks."
        )
    if args.dry_run and args.resume:
        raise InputError("--dry_run and --resume cannot be combined: a dry run keeps nothing. Choose one.")


def complete(args: argparse.Namespace) -> argparse.Namespace:
    """Fill in the defaults that follow from other flags."""
    args = argparse.Namespace(**vars(args))
    only_pairs = set(parse_objectives(args.objective)) == {"simcse_supervised"}
    if args.tasks is None:
        args.tasks = [] if args.text or (only_pairs and args.nli) else ["para"] if only_pairs else tasks_in(args.data)
    args.tasks = list(dict.fromkeys(args.tasks))
    if args.batch_size is None and args.max_tokens is None:
        args.batch_size = BATCH_SIZE
    args.name = shared_flags.run_name(args, "pretrain")
    return args


def tasks_in(folder: Path) -> list[str]:
    """The tasks whose training file is in the folder; all of them if none is, so that reading says what is missing."""
    return [name for name, task in TASKS.items() if (folder / task.filename("train")).is_file()] or list(TASKS)


def get_args(argv: list[str] | None = None) -> argparse.Namespace:
    args = parser().parse(argv, complete)
    validate(args)
    return args


def main() -> None:
    args = get_args()
    if not args.dry_run:
        with distributed.started(args.use_gpu) as world:
            pretrain(args, world)
        return
    with dry_run_directory() as folder:
        rows = {"max_train": 2 * (args.batch_size or args.max_tokens) * args.accumulate}  # a row has a token or more
        rows["max_held_out"] = 2 * HELD_OUT_BATCH
        pretrain(argparse.Namespace(**vars(args) | rows | {"runs": folder / "runs", "epochs": 1}), World())


if __name__ == "__main__":
    run_script(main)
