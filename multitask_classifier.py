"""Part 2 of the handout: one BERT for sentiment (sst), paraphrase (para) and similarity (sts), with every extension.

    python multitask_classifier.py --fine-tune-mode full-model --lr 1e-5 --use_gpu
    python multitask_classifier.py @recipes/quickstart.txt

Trains, keeps the best epoch by the 2024 overall score, and writes predictions/{sst,para,sts}-{dev,test}-output.csv.
"""

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import adapters
import heads
import losses
import optimizer
import pcgrad
import pos
import sampling
import smart
import training
from bert import BertModel, Layer
from datasets import (
    PAIRINGS,
    READERS,
    SINGLE,
    Pairing,
    Split,
    endless_batches,
    epoch_generator,
    read_examples,
    read_split,
    reader_of,
    source_of,
)
from evaluation import (
    keep_vectors,
    overall,
    predict,
    read_logits,
    score,
    score_line,
    write_logits,
    write_predictions,
)
from tasks import TASKS, Batch, Encoded, Output, Task, stack
from tokenizer import BertTokenizer
from training import Step, Trainer, fit, grouped, restore_best
from utils import (
    FINE_TUNE_MODES,
    ArgumentParser,
    InputError,
    Precision,
    Run,
    choose_device,
    count_parameters,
    fine_tune_mode,
    number,
    random_states,
    replayed,
    run_script,
    seed_everything,
    writable_directory,
)

# --- the model --------------------------------------------------------------------------------------------------------


class MultitaskBERT(nn.Module):
    """One BERT; for every task a pooler and a head.

    config: the script's flags, or any namespace with some of them, such as the starter's; the rest are the defaults.
    """

    def __init__(self, config: Any):
        super().__init__()
        flags = with_defaults(config)
        self.bert = BertModel.from_pretrained(flags.model, keep_layers=flags.keep_layers)
        self.bert.use_attention(flags.attention)
        self.bert.checkpoint_activations = flags.checkpoint_activations
        self.chunk_rows = flags.chunk_rows
        self.max_length = min(flags.max_length, self.bert.config.max_position_embeddings)
        self.frozen = flags.option == "pretrain"
        self.bert.requires_grad_(not (self.frozen or flags.adapter_only))
        self.pairings = {name: pairing_of(TASKS[name], flags, "train") for name in flags.tasks}
        self.dev_pairings = {name: pairing_of(TASKS[name], flags, "dev") for name in flags.tasks}
        H, dropout = self.bert.config.hidden_size, flags.hidden_dropout_prob
        self.poolers = nn.ModuleDict()
        self.heads = nn.ModuleDict()
        for name in flags.tasks:
            vectors = len(self.pairings[name].views[0])
            self.poolers[name] = heads.build_pooler(chosen(flags, name, "pooling"), self.bert)
            head = chosen(flags, name, "head")
            self.heads[name] = heads.build_head(head, H, vectors, TASKS[name].num_outputs, dropout, TASKS[name].kind)
        shared = nn.Sequential(nn.Linear(H, H), nn.GELU()) if flags.share_pair_layer else nn.Identity()
        self.shared_pair_layer = shared
        self.feature = pos.build_feature(flags, H)
        self.weighting = losses.build_weighting(flags, [TASKS[name] for name in flags.tasks])  # the optimizer owns it
        self.adapter = adapters.build_adapter(flags, self.bert, flags.tasks)  # last: the heads start as without it

    def train(self, mode: bool = True) -> "MultitaskBERT":
        super().train(mode)
        if self.frozen:
            self.bert.eval()  # or its dropout would stay on
        return self

    @property
    def keeps_vectors(self) -> bool:
        """Whether what comes before feature and heads never changes, so that one pass over the data does."""
        return self.frozen and not any(p.requires_grad for p in self.poolers.parameters())

    def shared_parameters(self) -> list[nn.Parameter]:
        """What every task's gradient reaches: gradient surgery works on these; heads and PALs keep their gradients."""
        shared = (*self.bert.parameters(), *self.feature.parameters(), *self.adapter.shared_parameters())
        return [p for p in shared if p.requires_grad]

    def embed(self, batch: Batch) -> Tensor:
        """The embedding layer's output for all sentences of the batch, below each other: (R, T, H)."""
        sentences = stack(batch.sentences)
        return self.bert.embed(sentences.token_ids, sentences.token_type_ids)

    def vectors(self, batch: Batch, embeddings: Tensor | None = None) -> tuple[Tensor, ...]:
        """One (B, H) for each sentence of a row; both sentences of a pair go through BERT in ONE pass.

        With chunk_rows, in passes of so many sentences. Of each only the vectors stay; going back, it is computed again
        with the same dropout masks. So a loss sees all vectors of the batch, as many negatives as rows, while the
        layers' activations of one chunk are alive, and the gradients are those of one pass: GradCache of Gao et al.
        2021 (arXiv:2101.06983), by checkpointing. Deviation: the embedding layer, whose output SMART perturbs, is not
        cut.
        """
        embeddings = self.embed(batch) if embeddings is None else embeddings
        mask = stack(batch.sentences).attention_mask  # (R, T)
        encode = partial(self._encode, self.adapter.layers(batch.task), self.poolers[batch.task])
        if self.chunk_rows and torch.is_grad_enabled():
            chunks = zip(embeddings.split(self.chunk_rows), mask.split(self.chunk_rows), strict=True)
            vectors = torch.cat([checkpoint(encode, *chunk, use_reentrant=False) for chunk in chunks])  # (R, H)
        else:
            vectors = encode(embeddings, mask)
        return vectors.chunk(len(batch.sentences))

    def _encode(self, layers: Iterable[Layer], pooler: heads.Pooler, embeddings: Tensor, mask: Tensor) -> Tensor:
        return pooler(self.bert.encode(embeddings, mask, layers), mask)  # (R, T, H) -> (R, H)

    def with_feature(self, batch: Batch, vectors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The pooled vectors with what the batch tells beside its tokens; kept vectors may come without the tokens."""
        sentences = batch.sentences or (None,) * len(vectors)
        return tuple(map(self.feature, vectors, sentences))

    def logits(self, task: str, vectors: tuple[Tensor, ...], views: tuple[tuple[int, ...], ...]) -> Tensor:
        """(B, C): the mean over the views, of which there are two where pairs are scored both ways."""
        if len(TASKS[task].text_columns) == 2:
            vectors = tuple(map(self.shared_pair_layer, vectors))
        scored = [self.heads[task](*(vectors[i] for i in view)) for view in views]
        return sum(scored[1:], start=scored[0]) / len(views)

    def predict(
        self, batch: Batch, embeddings: Tensor | None = None, random_state: dict[str, Tensor] | None = None
    ) -> Output:
        """embeddings: use these instead of the batch's own. random_state: with the dropout masks of an earlier pass."""
        scored = partial(self.logits, batch.task, views=batch.views)
        if batch.vectors is not None:
            vectors = self.with_feature(batch, batch.vectors)
            return Output(scored(vectors), vectors, score=scored)
        if embeddings is None:
            embeddings = self.embed(batch)
            if torch.is_grad_enabled() and self.training and not (self.frozen or embeddings.requires_grad):
                embeddings.requires_grad_()  # frozen ones too: a regularizer may ask for the gradient by them
        state = random_states(embeddings.device) if self.training and random_state is None else random_state
        with replayed(random_state, embeddings.device):
            vectors = self.with_feature(batch, self.vectors(batch, embeddings))
            again = partial(self.predict, batch) if self.training else None
            return Output(scored(vectors), vectors, embeddings, state, scored, again)

    # The handout's signatures.

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Sentence vectors: (B, T), (B, T) -> (B, H)."""
        name = next(iter(self.heads))
        batch = self._batch(name, (input_ids, attention_mask))
        return self.with_feature(batch, self.vectors(batch))[0]

    def predict_sentiment(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Five logits a sentence: (B, 5)."""
        return self.predict(self._batch("sst", (input_ids, attention_mask))).logits

    def predict_paraphrase(
        self, input_ids_1: Tensor, attention_mask_1: Tensor, input_ids_2: Tensor, attention_mask_2: Tensor
    ) -> Tensor:
        """One logit a pair, before the sigmoid: (B, 1)."""
        return self.predict(
            self._batch("para", (input_ids_1, attention_mask_1), (input_ids_2, attention_mask_2))
        ).logits

    def predict_similarity(
        self, input_ids_1: Tensor, attention_mask_1: Tensor, input_ids_2: Tensor, attention_mask_2: Tensor
    ) -> Tensor:
        """One number a pair, 0 to 5: (B, 1)."""
        return self.predict(self._batch("sts", (input_ids_1, attention_mask_1), (input_ids_2, attention_mask_2))).logits

    def _batch(self, task: str, *given: tuple[Tensor, Tensor]) -> Batch:
        sentences = tuple(Encoded(ids, mask, torch.zeros_like(ids)) for ids, mask in given)
        if len(sentences) == 1:
            return Batch(task, [], sentences, None)
        pairing = (self.pairings if self.training else self.dev_pairings)[task]
        joined = pairing.join(*sentences, self.max_length)
        return Batch(task, [], joined, None, views=pairing.views)


def pairing_of(task: Task, flags: argparse.Namespace, split: str) -> Pairing:
    if len(task.text_columns) == 1:
        return SINGLE
    name = chosen(flags, task.name, "pairing")
    both_ways = flags.symmetric and split != "train"
    return PAIRINGS[f"{name.removesuffix('_symmetric')}_symmetric" if both_ways else name]


def chosen(flags: argparse.Namespace, task: str, what: str) -> str:
    """A task's own --<task>_<what>, or the --<what> of all."""
    return getattr(flags, f"{task}_{what}") or getattr(flags, what)


def loss_of(flags: argparse.Namespace, task: str) -> str:
    return getattr(flags, f"{task}_loss") or losses.DEFAULT_LOSSES[TASKS[task].kind]


def learning_by(flags: argparse.Namespace, *names: str) -> list[str]:
    """The tasks that train with one of these losses."""
    return [task for task in flags.train_tasks if set(names) & set(losses.names_in(loss_of(flags, task)))]


def with_defaults(config: Any) -> argparse.Namespace:
    """The flags' defaults below what `config` says; the starter's fine_tune_mode is our option."""
    given = dict(vars(config))
    if "fine_tune_mode" in given and "option" not in given:
        given["option"] = fine_tune_mode(given["fine_tune_mode"])
    return fill_in(argparse.Namespace(**(vars(build_parser().parse_args([])) | given)))


# --- data -------------------------------------------------------------------------------------------------------------


def data_paths(task: Task, args: argparse.Namespace, split: str) -> list[Path]:
    """As given: a training file may have its reader's name before it, as in snli:data/train.jsonl."""
    given = getattr(args, f"{task.name}_{split}")
    return [Path(path) for path in (given if isinstance(given, list) else [given])]


Splits = dict[str, dict[str, Split]]  # by task, then by train, dev, test


def load_splits(args: argparse.Namespace, tokenizer: BertTokenizer, which: tuple[str, ...]) -> Splits:
    found: Splits = {}
    tagger = pos.build_tagger(args)
    for name in args.tasks:
        task = TASKS[name]
        found[name] = {
            split: read_split(
                task,
                data_paths(task, args, split),
                tokenizer,
                pairing_of(task, args, split),
                labeled=split != "test",
                strict=args.strict_data,
                repeated_ids=args.repeated_ids and split == "train",
                tagger=tagger,
            )
            for split in which
            if split != "train" or name in args.train_tasks
        }
        if "train" in found[name]:
            found[name]["train"] = cut_training_rows(found[name]["train"], args)
        if args.dry_run:
            two_steps = 2 * args.batch_size * args.accumulate
            found[name] = {s: rows.select(torch.arange(min(len(rows), two_steps))) for s, rows in found[name].items()}
    return found


def cut_training_rows(split: Split, args: argparse.Namespace) -> Split:
    """A random share of the rows, or so many at the most; the same ones for the same seed."""
    wanted = max(2, round(getattr(args, f"{split.task.name}_fraction") * len(split)))
    wanted = min(wanted, args.max_train or wanted)
    if wanted >= len(split):
        return split
    rows = torch.randperm(len(split), generator=epoch_generator(args.seed, 0))[:wanted]
    return split.select(rows.sort().values)


def teacher_files(args: argparse.Namespace) -> dict[str, Path]:
    """By task, the logits from which it learns."""
    return {name: Path(args.teacher) / f"{name}-train.npz" for name in learning_by(args, "distill")}


def with_teacher(split: Split, path: Path) -> Split:
    """The training rows with the teacher's logits, found by id; the teacher may know more rows."""
    found = read_logits(path, split.task, labeled=False)
    places = {identifier: row for row, identifier in enumerate(found.ids)}
    absent = [identifier for identifier in split.ids if identifier not in places]
    if absent:
        raise InputError(
            f"{path}: must have logits for every training row of {split.task.name}; {len(absent)} of {len(split)} are "
            f"missing, such as {absent[0]}. Write them with --predict_only --predict_train --run RUN on this data."
        )
    return split.with_teacher(torch.from_numpy(found.logits)[[places[identifier] for identifier in split.ids]])


# --- training and testing ---------------------------------------------------------------------------------------------


def build_trainer(args: argparse.Namespace, model: MultitaskBERT, precision: Precision, total_steps: int) -> Trainer:
    update = optimizer.build_optimizer(args, model)
    return Trainer(
        model,
        {name: losses.build_objective(loss_of(args, name), TASKS[name], args) for name in args.tasks},
        update,
        optimizer.build_schedule(update, args.schedule, total_steps, args.warmup),
        precision,
        args.clip,
        smart.build_regularizer(args, model),
        model.weighting,
        pcgrad.build_combiner(args, model.shared_parameters()),
        optimizer.build_averager(args, model),
    )


def data_files(args: argparse.Namespace) -> list[Path]:
    """All that a run reads."""
    files = [(name, split) for name in args.tasks for split in ("dev", "test")]
    files += [(name, "train") for name in args.train_tasks]
    data = [source_of(path)[1] for name, split in files for path in data_paths(TASKS[name], args, split)]
    return [*data, *teacher_files(args).values()]


def open_run(args: argparse.Namespace) -> Run:
    folder, data = args.runs / args.name, data_files(args)
    if not args.resume:
        return Run.create(folder, args, data)
    run = Run.reopen(folder)
    own = {"resume", "runs", "fine_tune_mode", "use_gpu", "eval_batch_size", "predict_only", "run", "pos_cache"}
    run.must_match(args, data, may_differ=own)
    return run


def train_multitask(
    args: argparse.Namespace, on_epoch: Callable[[int, dict[str, float]], None] = lambda epoch, scores: None
) -> dict[str, float]:
    """Trains; the run's directory keeps the best epoch by the overall score of what trains. Returns its dev scores."""
    args = with_defaults(args)
    validate(args)
    args.pos_tagger = pos.tagger_at_hand(args)
    precision = Precision(args.precision, choose_device(args.use_gpu))
    tokenizer = BertTokenizer.from_pretrained(args.model, max_length=args.max_length)
    splits = load_splits(args, tokenizer, ("train", "dev"))
    for name, path in teacher_files(args).items():
        splits[name]["train"] = with_teacher(splits[name]["train"], path)
    for task in map(TASKS.get, args.tasks):  # what is wrong with a test file shows before hours of training go by
        read_examples(task, data_paths(task, args, "test"), labeled=False, strict=args.strict_data)
    seed_everything(args.seed)
    model = MultitaskBERT(args).to(precision.device)
    if args.compile:
        model.adapter.compile_layers()
    for path in {Path(getattr(args, f"{n}_{s}_out")).parent for n in args.tasks for s in ("dev", "test")}:
        writable_directory(path, "the prediction files' directory")
    run = open_run(args)
    tokenizer.save_pretrained(run.folder)
    describe(args, model, splits, precision)
    if model.keeps_vectors:
        splits = {
            name: {split: keep_vectors(model, rows, args.eval_batch_size, precision) for split, rows in of_task.items()}
            for name, of_task in splits.items()
        }
    training_rows = {name: splits[name]["train"] for name in args.train_tasks}
    sampler = sampling.build_sampler(args, {n: -(-len(rows) // args.batch_size) for n, rows in training_rows.items()})

    def steps(epoch: int) -> Iterator[Step]:
        sources = {n: endless_batches(rows, args.batch_size, args.seed, epoch) for n, rows in training_rows.items()}
        draws = (tuple(next(sources[name]) for name in names) for names in sampler.steps(epoch))
        return grouped(draws, args.accumulate)

    def steps_in(epoch: int) -> int:
        return -(-sum(1 for _ in sampler.steps(epoch)) // args.accumulate)

    select = "overall" if set(args.train_tasks) == set(args.tasks) else "trained"  # what trains decides

    def evaluate() -> dict[str, float]:
        scores = {
            name: score(of_task["dev"].task, predict(model, of_task["dev"], args.eval_batch_size, precision))
            for name, of_task in splits.items()
        }
        trained = {select: overall({name: scores[name] for name in args.train_tasks})}
        return scores | {"overall": overall(scores)} | trained

    trainer = build_trainer(args, model, precision, sum(steps_in(epoch) for epoch in range(1, args.epochs + 1)))
    best = fit(
        trainer, steps, evaluate, select, args.epochs, run,
        steps_in=steps_in, patience=args.patience, keep_state=not args.dry_run, resume=args.resume,
        on_epoch=on_epoch,
    )  # fmt: skip
    print(f"best dev: {score_line({name: best[name] for name in args.tasks})} | {run.folder}", flush=True)
    return best


def describe(args: argparse.Namespace, model: MultitaskBERT, splits: Splits, precision: Precision) -> None:
    """Device, precision, parameters and data, once, first."""
    trainable, total = count_parameters(model)
    print(
        f"{args.option} {args.model} | {precision.device.type} {args.precision} | {torch.get_num_threads()} threads | "
        f"{trainable:,} of {total:,} parameters train | lr {args.lr:g}"
    )
    chain = f"sampler {args.sampler} | combiner {args.combiner} | regularizer {args.regularizer}{pos.describe(args)}"
    print(chain + model.adapter.summary())
    for name, of_task in splits.items():
        sizes = ", ".join(f"{split} {len(rows)}" for split, rows in of_task.items())
        parts = [f"{what} {chosen(args, name, what)}" for what in ("pooling", "head")]
        if len(TASKS[name].text_columns) == 2:
            parts.append(f"pairing {chosen(args, name, 'pairing')}")
        print(f"{name}: {sizes} rows | {' | '.join(parts)} | loss {loss_of(args, name)}", flush=True)


def test_multitask(args: argparse.Namespace) -> None:
    """Writes the prediction files and the logits of a run's best epoch."""
    args = with_defaults(args)
    if args.predict_train and args.repeated_ids:
        raise InputError(
            "--predict_train: logits are found by id, which must be unique in the training files, but the run has "
            "--repeated_ids. Give every row its own id, and train without the flag."
        )
    precision = Precision(args.precision, choose_device(args.use_gpu))
    run = Run.reopen(args.runs / args.name)
    model = MultitaskBERT(args).to(precision.device)
    restore_best(model, run)
    tokenizer = BertTokenizer.from_pretrained(args.model, max_length=args.max_length)
    for name, of_task in load_splits(args, tokenizer, ("dev", "test")).items():
        for split, rows in of_task.items():
            found = predict(model, rows, args.eval_batch_size, precision)
            path = Path(getattr(args, f"{name}_{split}_out"))
            writable_directory(path.parent, f"--{name}_{split}_out")
            write_predictions(path, rows.task, found)
            write_logits(run.folder / f"{name}-{split}.npz", found)
            shown = f" | dev score {score(rows.task, found):.4f}" if found.labels is not None else ""
            print(f"{name}: wrote {path}, {len(found.ids)} rows{shown}", flush=True)
    if args.predict_train:
        predict_training_rows(args, model, tokenizer, run, precision)


def predict_training_rows(
    args: argparse.Namespace, model: MultitaskBERT, tokenizer: BertTokenizer, run: Run, precision: Precision
) -> None:
    """Writes the logits for ALL rows of the training files, whatever share of them was trained on: a teacher's."""
    tagger = pos.build_tagger(args)
    for task in map(TASKS.get, args.train_tasks):
        pairing = pairing_of(task, args, "dev")  # both ways where pairs are scored so
        paths = data_paths(task, args, "train")
        rows = read_split(task, paths, tokenizer, pairing, labeled=True, strict=args.strict_data, tagger=tagger)
        found = predict(model, rows, args.eval_batch_size, precision)
        path = run.folder / f"{task.name}-train.npz"
        write_logits(path, found)
        print(f"{task.name}: wrote {path}, {len(found.ids)} rows | train score {score(task, found):.4f}", flush=True)


# --- flags ------------------------------------------------------------------------------------------------------------


def build_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="multitask_classifier.py",
        usage="multitask_classifier.py [@recipes/FILE.txt] [flags; later ones win]",
        description=__doc__.splitlines()[0],
    )
    add = parser.add_argument
    add("--option", choices=("pretrain", "finetune"), default="pretrain", help="pretrain: BERT is frozen")
    add("--fine-tune-mode", dest="option", type=fine_tune_mode, metavar="{" + ",".join(FINE_TUNE_MODES) + "}",
        default=argparse.SUPPRESS, help="the later handouts' name for --option")  # fmt: skip
    training.add_arguments(parser)
    training.add_loop_arguments(parser)
    add("--tasks", nargs="+", choices=sorted(TASKS), default=["sst", "para", "sts"], help="which tasks")
    add("--train_tasks", nargs="+", choices=sorted(TASKS), help="train on these only, score all; None: as --tasks")
    add("--epochs", type=number(int, 1, 1000), default=10, help="how often the sampler is run through")
    add("--batch_size", type=number(int, 1, 4096), default=8, help="rows of a task in a step: 64 fits a 12 GB GPU")
    add("--eval_batch_size", type=number(int, 1, 4096), default=32, help="rows a forward pass, without gradients")
    add("--hidden_dropout_prob", type=number(float, 0, 0.99), default=0.3, help="dropout before every head")
    add(
        "--chunk_rows",
        type=number(int, 1, 10**6),
        help="less memory: so many sentences of a batch at a time, computed again when going back, while the loss sees "
        "all, as contrastive ones must; None: all at once",
    )
    _add_model_arguments(parser)
    _add_data_arguments(parser)
    for owner in (optimizer, sampling, losses, pcgrad, smart, adapters, pos):
        owner.add_arguments(parser)
    parser.set_defaults(lr=1e-5)
    return parser


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("from tokens to scores, for all tasks or one by one").add_argument
    add("--pairing", choices=sorted(PAIRINGS), default="bi", help="bi: sentences apart; cross: joined before padding")
    add(
        "--symmetric",
        action="store_true",
        help="score pairs of dev and test both ways, (a, b) and (b, a); take the mean",
    )
    add("--pooling", choices=sorted(heads.POOLERS), default="pooler", help="a sentence's vector from its tokens'")
    add("--head", choices=sorted(heads.HEADS), default="linear", help="scores from vectors")
    add("--share_pair_layer", action="store_true", help="one layer between the poolers and all heads of pairs")
    for task in TASKS.values():
        if len(task.text_columns) == 2:
            add(f"--{task.name}_pairing", choices=sorted(PAIRINGS), help="None: as --pairing")
        add(f"--{task.name}_pooling", choices=sorted(heads.POOLERS), help="None: as --pooling")
        add(f"--{task.name}_head", choices=sorted(heads.HEADS), help="None: as --head")
        add(f"--{task.name}_loss", default=losses.DEFAULT_LOSSES[task.kind], metavar="LOSS[:WEIGHT][+...]",
            help=f"of {', '.join(sorted(losses.LOSSES))}")  # fmt: skip


def _add_data_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("files").add_argument
    add("--data", type=Path, default=Path("data"), help="directory with the course's files; data/sample is at hand")
    add("--predictions", type=Path, default=Path("predictions"), help="where the prediction files go")
    for task in TASKS.values():
        readers = ", ".join(name for name, reader in READERS.items() if task.name in reader.tasks)
        for split in ("train", "dev", "test"):
            many = {"nargs": "+", "metavar": "[READER:]PATH"} if split == "train" else {}
            known = f"; readers: {readers}" if split == "train" else ""
            add(f"--{task.name}_{split}", help=f"None: {task.filename(split)} in --data{known}", **many)
        for split in ("dev", "test"):
            add(f"--{task.name}_{split}_out", help=f"None: {task.name}-{split}-output.csv in --predictions")
        add(f"--{task.name}_fraction", type=number(float, 0, 1, above=True), default=1.0,
            help="train on a random share of the rows")  # fmt: skip
    add("--max_train", type=number(int, 2, 10**9), help="train on so many rows of a task at the most; None: all")
    add("--max_length", type=number(int, 4, 512), default=512, help="longer texts are cut to so many tokens, counted")
    add("--strict_data", action="store_true", help="a row that cannot be used is an error")
    add("--repeated_ids", action="store_true", help="training files may hold an id twice")
    add("--runs", type=Path, default=Path("runs"), help="where runs go: log, weights, state")
    add("--name", help="name of the run; None: option and time")
    add("--resume", action="store_true", help="go on with the run --name after its last finished epoch")
    add("--predict_only", action="store_true", help="write the prediction files of the run --run, without training")
    add("--run", type=Path, help="a run's directory, with --predict_only")
    add("--predict_train", action="store_true", help="with --predict_only: logits of the training rows too, to --run")
    add("--teacher", type=Path, help="directory with <task>-train.npz, the logits that the loss distill learns from")


def fill_in(args: argparse.Namespace) -> argparse.Namespace:
    """Defaults that follow from other flags."""
    for task in TASKS.values():
        for split in ("train", "dev", "test"):
            if getattr(args, f"{task.name}_{split}") is None:
                setattr(args, f"{task.name}_{split}", str(args.data / task.filename(split)))
        for split in ("dev", "test"):
            if getattr(args, f"{task.name}_{split}_out") is None:
                setattr(args, f"{task.name}_{split}_out", str(args.predictions / f"{task.name}-{split}-output.csv"))
    args.fine_tune_mode = {option: mode for mode, option in FINE_TUNE_MODES.items()}[
        args.option
    ]  # the starter reads it
    args.name = args.name or f"{args.option}-{time.strftime('%Y%m%d-%H%M%S')}"
    args.tasks = list(dict.fromkeys(args.tasks))
    args.train_tasks = list(dict.fromkeys(args.train_tasks or args.tasks))
    return args


def get_args(argv: list[str] | None = None) -> argparse.Namespace:
    args = build_parser().parse_args(argv)
    training.must_name_the_run(args)
    args = fill_in(args)
    validate(args)
    return args


def parts(args: argparse.Namespace) -> list[str]:
    """Of a regularizer such as smart+bregman."""
    return args.regularizer.split("+")


# A flag that would change nothing is refused, not passed over: (the flag or its prefix, what it needs, is it so); the
# first row that fits counts.
DEPENDENT_FLAGS = (
    (
        "smart_variant",
        "--regularizer smart or bregman",
        lambda args: "smart" in parts(args) or "bregman" in parts(args),
    ),
    ("smart_", "--regularizer smart", lambda args: "smart" in parts(args)),
    ("bregman_", "--regularizer bregman", lambda args: "bregman" in parts(args)),
    ("rdrop_", "--regularizer rdrop", lambda args: "rdrop" in parts(args)),
    ("cagrad_", "--combiner cagrad", lambda args: args.combiner == "cagrad"),
    ("gradvac_", "--combiner gradvac", lambda args: args.combiner == "gradvac"),
    ("ema_", "--averager ema", lambda args: args.averager == "ema"),
    ("pal_", "--adapter pal", lambda args: args.adapter == "pal"),
    ("lora_", "--adapter lora", lambda args: args.adapter == "lora"),
    ("mixout_", "--adapter mixout", lambda args: args.adapter == "mixout"),
    ("adapter_only", "--adapter pal or lora", lambda args: adapters.ADAPTERS[args.adapter].own_parameters),
    ("average_start", "--averager swa", lambda args: args.averager == "swa"),
    ("label_smoothing", "a loss ce_smooth", lambda args: any("ce_smooth" in loss_of(args, t) for t in args.tasks)),
    ("cosine_margin", "a loss cosine_embedding", lambda args: learning_by(args, "cosine_embedding")),
    ("cosent_", "a loss cosent", lambda args: learning_by(args, "cosent")),
    ("mnrl_scale", "a loss mnrl", lambda args: learning_by(args, "mnrl")),
    (
        "mnrl_threshold",
        "a loss mnrl or mnrl_head of sts",
        lambda args: any(TASKS[task].kind == "number" for task in learning_by(args, "mnrl", "mnrl_head")),
    ),
    ("mnrl_", "a loss mnrl or mnrl_head", lambda args: learning_by(args, "mnrl", "mnrl_head")),
    ("simcse_", "a loss simcse", lambda args: learning_by(args, "simcse")),
    (
        "distill_",
        "a loss distill of sst, cfimdb or para",
        lambda args: any(TASKS[task].kind != "number" for task in learning_by(args, "distill")),
    ),
    ("teacher", "a loss distill", lambda args: learning_by(args, "distill")),
    ("pos_", "--feature pos", lambda args: args.feature == "pos"),
    ("run", "--predict_only", lambda args: args.predict_only),
    ("predict_train", "--predict_only", lambda args: args.predict_only),
)


def validate(args: argparse.Namespace) -> None:
    """Refuses what cannot be, or would silently do nothing; one line each, with the remedy."""
    defaults = vars(build_parser().parse_args([]))
    for key in (k for k, default in defaults.items() if getattr(args, k) != default):
        owners = (row for row in DEPENDENT_FLAGS if key == row[0] or (row[0].endswith("_") and key.startswith(row[0])))
        _, needed, holds = next(owners, ("", "", lambda args: True))
        if not holds(args):
            raise InputError(f"--{key} only works with {needed}, which is not set. Set it, or leave --{key} out.")
    for name in args.tasks:
        validate_task(TASKS[name], args)
        validate_files(TASKS[name], args)
    absent = [name for name in args.train_tasks if name not in args.tasks]
    if absent:
        raise InputError(f"--train_tasks must be among --tasks, found {absent[0]}. Add it to --tasks, or leave it out.")
    validate_outputs(args)
    if args.combiner != "sum":
        validate_surgery(args)
    validate_teacher(args)
    validate_chunks(args)
    if args.option == "pretrain":
        validate_frozen(args)
    if args.adapter_only:
        validate_adapter_only(args)
    if args.share_pair_layer and sum(len(TASKS[name].text_columns) == 2 for name in args.tasks) < 2:
        raise InputError(
            "--share_pair_layer needs two tasks on pairs in --tasks, para and sts. Add one, or leave it out."
        )
    if args.symmetric and not any(len(TASKS[name].text_columns) == 2 for name in args.tasks):
        raise InputError("--symmetric needs a task on pairs in --tasks, para or sts. Add one, or leave it out.")
    if args.resume and args.predict_only:
        raise InputError("--resume and --predict_only exclude each other: one trains, the other does not. Choose one.")
    if args.dry_run and (args.resume or args.predict_only):
        flag = "--resume" if args.resume else "--predict_only"
        raise InputError(f"--dry_run and {flag} exclude each other: a dry run keeps nothing. Choose one.")
    if args.predict_only and args.run is None:
        raise InputError("--predict_only needs the run to predict with. Add --run runs/NAME.")


def validate_task(task: Task, args: argparse.Namespace) -> None:
    """What a task's head, pairing and loss ask of each other."""
    name = chosen(args, task.name, "head")
    head, remedy = heads.HEADS[name], f"Use --{task.name}_head linear or mlp."
    if head.needs_pair and len(task.text_columns) == 1:
        raise InputError(f"--{task.name}_head {name} compares two sentences, but {task.name} has one. {remedy}")
    if head.needs_pair and len(pairing_of(task, args, "train").views[0]) == 1:
        pairing = chosen(args, task.name, "pairing")
        raise InputError(
            f"--{task.name}_head {name} compares two vectors, but --{task.name}_pairing {pairing} makes one of a pair. "
            f"{remedy} Or use --{task.name}_pairing bi."
        )
    if task.kind not in head.kinds:
        gives = " or a ".join(head.kinds)
        raise InputError(f"--{task.name}_head {name} gives a {gives}, but {task.name} needs a {task.kind}. {remedy}")
    losses.build_objective(loss_of(args, task.name), task, args)  # refuses what does not fit
    validate_loss(task, args)


def validate_loss(task: Task, args: argparse.Namespace) -> None:
    """What losses on the sentences' vectors ask of pairing and head."""
    spec, head = loss_of(args, task.name), chosen(args, task.name, "head")
    terms = {name: losses.LOSSES[name] for name in losses.names_in(spec)}
    pair = len(task.text_columns) == 2
    for name in (name for name, loss in terms.items() if loss.compares_rows and args.batch_size == 1):
        raise InputError(
            f"--{task.name}_loss {spec}: {name} compares the rows of a batch, found --batch_size 1. Use 8 or more."
        )
    for name in (name for name, loss in terms.items() if loss.on_vectors):
        if pair and len(pairing_of(task, args, "train").views[0]) == 1:
            raise InputError(
                f"--{task.name}_loss {spec}: {name} compares the vectors of sentences, but --{task.name}_pairing "
                f"{chosen(args, task.name, 'pairing')} makes one of a pair. Use --{task.name}_pairing bi."
            )
    if not any(loss.trains_head for loss in terms.values()) and not heads.HEADS[head].works_untrained:
        other = f", or --{task.name}_head cosine_affine" if pair else ""
        raise InputError(
            f"--{task.name}_loss {spec} trains vectors only, but --{task.name}_head {head} has to learn too. "
            f"Use --{task.name}_loss {losses.DEFAULT_LOSSES[task.kind]}+{spec}{other}."
        )


def validate_teacher(args: argparse.Namespace) -> None:
    pupils = learning_by(args, "distill")
    if pupils and args.teacher is None:
        raise InputError(
            f"--{pupils[0]}_loss {loss_of(args, pupils[0])} needs the teacher's logits, found no --teacher. "
            f"Add --teacher DIR, a directory with {pupils[0]}-train.npz."
        )
    if pupils and args.repeated_ids:
        raise InputError(
            "--teacher and --repeated_ids exclude each other: a row's teacher is found by its id. Leave one out."
        )


def validate_chunks(args: argparse.Namespace) -> None:
    views = [pairing_of(TASKS[name], args, "train").views for name in args.train_tasks]
    most = args.batch_size * max(1 + max(i for view in of_task for i in view) for of_task in views)
    if args.chunk_rows is not None and args.chunk_rows >= most:
        raise InputError(
            f"--chunk_rows must be below the number of sentences in a batch, at most {most} here, found "
            f"{args.chunk_rows}. Lower it, or leave it out."
        )


def validate_files(task: Task, args: argparse.Namespace) -> None:
    """Readers exist and fit their task; what is scored is in the course's format, whose ids the leaderboard knows."""
    for path in data_paths(task, args, "train"):
        reader_of(task, path)
    for split in ("dev", "test"):
        for path in data_paths(task, args, split):
            name, _ = source_of(path)
            if name != "handout":
                raise InputError(
                    f"--{task.name}_{split} {path}: must be in the course's format, found the reader {name}. "
                    f"Use it with --{task.name}_train."
                )


def validate_outputs(args: argparse.Namespace) -> None:
    """A prediction file never takes the place of data, or of another prediction file."""
    taken = {
        source_of(path)[1].resolve(): f"--{name}_{split}"
        for name, split in itertools.product(args.tasks, ("train", "dev", "test"))
        for path in data_paths(TASKS[name], args, split)
    }
    for name, split in itertools.product(args.tasks, ("dev", "test")):
        flag, path = f"--{name}_{split}_out", Path(getattr(args, f"{name}_{split}_out"))
        other = taken.setdefault(path.resolve(), flag)
        if other != flag:
            raise InputError(f"{flag} {path}: must be a file of its own, found that of {other}. Give another path.")


def validate_surgery(args: argparse.Namespace) -> None:
    flag = f"--combiner {args.combiner}"
    if len(args.train_tasks) < 2:
        raise InputError(f"{flag} needs at least two tasks, found {args.train_tasks[0]} alone. Use --combiner sum.")
    if sampling.SAMPLERS[args.sampler].tasks_per_step == "one" and args.accumulate == 1:
        raise InputError(
            f"{flag} needs at least two tasks in a step; --sampler {args.sampler} gives one. "
            "Use --sampler round_robin, or --accumulate 3."
        )


def validate_frozen(args: argparse.Namespace) -> None:
    """What only makes sense where the encoder trains."""
    needs_training = {
        f"--combiner {args.combiner}": args.combiner != "sum",
        f"--regularizer {args.regularizer}": args.regularizer != "none",
        f"--adapter {args.adapter}": args.adapter != "none",
        "--compile": args.compile,
        "--checkpoint_activations": args.checkpoint_activations,
        f"--chunk_rows {args.chunk_rows}": args.chunk_rows is not None,
        f"--layer_decay {args.layer_decay:g}": args.layer_decay != 1,
    }
    for flag, is_set in needs_training.items():
        if is_set:
            raise InputError(
                f"{flag} works on the encoder, but --option pretrain, the handout's default, freezes it. "
                "Use --option finetune, or leave it out."
            )
    for task in map(TASKS.get, args.train_tasks):
        head, pooling = chosen(args, task.name, "head"), chosen(args, task.name, "pooling")
        shared = args.share_pair_layer and len(task.text_columns) == 2
        chain = heads.POOLERS[pooling], pos.FEATURES[args.feature], heads.HEADS[head]
        if not (shared or any(part.own_parameters for part in chain)):
            raise InputError(
                f"--{task.name}_head {head} has no weights of its own, and --option pretrain, the handout's default, "
                f"freezes the encoder: nothing would learn. Use --option finetune, or --{task.name}_head linear."
            )
        below = heads.POOLERS[pooling].own_parameters or pos.FEATURES[args.feature].own_parameters
        for name in losses.names_in(loss_of(args, task.name)):
            loss = losses.LOSSES[name]
            if loss.needs_dropout or not (loss.trains_head or below):
                raise InputError(
                    f"--{task.name}_loss {loss_of(args, task.name)}: {name} trains the encoder, but --option pretrain, "
                    f"the handout's default, freezes it. Use --option finetune, or leave {name} out."
                )


def validate_adapter_only(args: argparse.Namespace) -> None:
    """What needs an encoder that trains itself, not only what lies over it."""
    if args.combiner != "sum" and not adapters.ADAPTERS[args.adapter].shared:
        raise InputError(
            f"--combiner {args.combiner} works on weights that tasks share; --adapter {args.adapter} with "
            "--adapter_only trains none, found each task with its own. Use --combiner sum, or leave out --adapter_only."
        )
    if args.layer_decay != 1:
        raise InputError(
            f"--layer_decay {args.layer_decay:g} is for the encoder's layers, but --adapter_only freezes them. "
            "Leave one of them out; --head_lr sets the adapter's rate."
        )


def flags_of_run(argv: list[str] | None, folder: Path) -> argparse.Namespace:
    """The flags that a run was trained with, and over them those given now, such as --use_gpu or --data."""
    flags = argparse.Namespace(**Run.reopen(folder).facts["args"])
    weights = folder / "model.safetensors"
    if not weights.is_file():  # an ensemble of logits has none
        raise InputError(f"{weights}: not a whole weights file (none is there). Give a trained run, or a soup.")
    if "sts_dev_out" not in flags:
        raise InputError(f"{folder}: must be a run of multitask_classifier.py, or a soup. Choose another.")
    default = fill_in(build_parser().parse_args(["--data", flags.data, "--predictions", flags.predictions]))
    for task in TASKS.values():
        for key in (f"{task.name}_{kind}" for kind in ("train", "dev", "test", "dev_out", "test_out")):
            if getattr(flags, key) == getattr(default, key):
                setattr(flags, key, None)  # follows from --data and --predictions, which may be given anew
    flags.data, flags.predictions = Path(flags.data), Path(flags.predictions)
    flags.use_gpu = False  # a matter of the machine at hand
    tasks = flags.tasks
    flags = fill_in(build_parser().parse_args(argv, flags))  # argparse leaves alone what is set already and not given
    if flags.tasks != tasks:
        raise InputError(
            f"--tasks {' '.join(flags.tasks)}: must be those of {folder}, {' '.join(tasks)}. Leave it out."
        )
    validate_outputs(flags)
    flags.runs, flags.name = folder.parent, folder.name
    return flags


def main() -> None:
    args = get_args()
    if args.predict_only:
        test_multitask(flags_of_run(None, args.run))
        return
    if not args.dry_run:
        train_multitask(args)
        test_multitask(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        args.runs, args.predictions, args.epochs = Path(folder) / "runs", Path(folder), 1
        args.steps_per_epoch = None  # as many as the few rows give
        for name in TASKS:
            for split in ("dev", "test"):
                setattr(args, f"{name}_{split}_out", str(Path(folder) / f"{name}-{split}-output.csv"))
        train_multitask(args)
        test_multitask(args)
    print("dry run: two steps of everything went through; nothing was kept.")


if __name__ == "__main__":
    run_script(main)
