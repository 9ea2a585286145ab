"""The model card of an exported run, written from the run's own records.

The front matter is the hub's. The code in the card runs in the exported directory.
"""

import shlex
from pathlib import Path
from typing import Any, NamedTuple

import multitask_flags
import shared_flags
from evaluation import read_logits
from forms import CLASSIFIER, CROSS_ENCODER, Form
from intervals import Scored, overall_interval, score_interval
from runs import Run
from tasks import Task
from trained import TrainedRun
from utils import InputError, sha256_of, warn

DATA = Path(__file__).parent / "data"


ABOUT_SCORES = (
    "Accuracy, or Pearson's correlation for numbers, on the dev file. The epoch was chosen on these rows, so expect a "
    "little less on others. The interval (bootstrap over the rows) shows how much the choice of rows matters, not that "
    "of the seed."
)


class Base(NamedTuple):
    """A checkpoint whose license is known."""

    hub_id: str
    license: str


BASES = {"minilm": Base("sentence-transformers/all-MiniLM-L6-v2", "apache-2.0")}
# Flags that say where files are on somebody's machine, or nothing about the model.
NOT_IN_CARD = {"data", "predictions", "runs", "run", "name", "resume", "use_gpu", "save_minutes", "keep_state"}
NOT_IN_CARD |= {"predict_only", "predict_train", "fine_tune_mode", "pos_cache", "teacher", "dry_run", "option"}
NOT_IN_CARD |= shared_flags.OF_DISPLAY


def model_card(
    run: TrainedRun,
    encoder: Form | str,
    written: dict[str, Form | str],
    forms: dict[str, Form | str],
    differences: dict[str, float],
) -> str:
    """The text of README.md.

    encoder, written: the form of the encoder and of each exported task, or why there is none. forms: of all tasks that
    were asked for. differences: of the ONNX models' logits from torch's.
    """
    parts = [
        front_matter(run),
        f"# {plain(run.folder.resolve().name)}\n\n{introduction(run)}",
        f"## Use\n\nThe code runs in this directory.\n\n{usage(run, encoder, written, differences)}",
        f"## Scores\n\n{scores(run)}",
        f"## Training\n\n{training(run)}",
        f"## Limits\n\n{limits(run, forms, written)}",
        f"## License\n\n{licenses(run)}",
    ]
    return "\n\n".join(parts) + "\n"


def plain(text: Any) -> str:
    """Text from a file for a line of Markdown: no control characters, no markup."""
    return "".join(c if c.isprintable() and c not in "`|<>*[]" else "?" for c in str(text))


def base_of(run: TrainedRun) -> Base | None:
    return BASES.get(str(run.facts["args"].get("model")))


def front_matter(run: TrainedRun) -> str:
    base = base_of(run)
    pairs = any(task.is_pair for task in run.tasks.values())
    lines = [
        "---",
        "language: en",
        "library_name: sentence-transformers",
        f"license: {base.license if base else 'other'}",
    ]
    lines += [f"base_model: {base.hub_id}"] if base else []
    tags = ["text-classification", "bert", "minbert", *(["sentence-similarity"] if pairs else [])]
    return "\n".join([*lines, "tags:", *(f"- {tag}" for tag in tags), "---"])


def introduction(run: TrainedRun) -> str:
    base = base_of(run)
    model = plain(base.hub_id if base else Path(str(run.facts["args"].get("model"))).name)
    lines = [f"A BERT encoder ({model}) that was trained with the minBERT suite (Stanford CS 224N) on:", ""]
    lines += [f"* `{name}`: {about(task)}" for name, task in run.tasks.items()]
    return "\n".join(lines)


def about(task: Task) -> str:
    what = task.about or f"{task.label_column} from {' and '.join(task.text_columns)}"
    return f"{what}; it predicts {', '.join(task.names)}" if task.names else what


# --- how to load it ---------------------------------------------------------------------------------------------------


def code(*lines: str) -> str:
    return "\n".join(["```python", *lines, "```"])


def usage(run: TrainedRun, encoder: Form | str, written: dict[str, Form | str], differences: dict[str, float]) -> str:
    parts = []
    if isinstance(encoder, Form):
        parts += [f"The encoder with its pooling ({encoder.pooling}), for sentence vectors:", code(
            "from sentence_transformers import SentenceTransformer", "",
            'vectors = SentenceTransformer("encoder").encode(["A lovely film .", "A film that I love ."])',
        )]  # fmt: skip
    elif run.model.adapter.plain_encoder and not run.model.feature.needs_tags:
        parts += [f"The encoder, without a pooling ({encoder}):", code(
            "from transformers import AutoModel", "", 'encoder = AutoModel.from_pretrained("encoder")')]  # fmt: skip
    for name, form in written.items():
        task = run.tasks[name]
        if isinstance(form, Form):
            parts += [f"`{name}`: {what_it_returns(task, form)}", snippet(task, form)]
        if name in differences:
            parts += [f"`{name}` with onnxruntime; the logits differ from torch's by {differences[name]:.1e} at most:"]
            parts += [onnx_snippet(run, task)]
    parts.append(
        "Load these directories, not the directory of the training run: there, other libraries find the encoder only. "
        "They would put a head with random weights on it. Runs of this version make them stop with an error (`dropout "
        "probability has to be between 0 and 1`), runs of older versions do not."
    )
    return "\n\n".join(parts)


def what_it_returns(task: Task, form: Form) -> str:
    outputs = ", ".join(task.output_names)
    if form.score_of_cosine is not None:
        return "a sentence encoder; the score is a function of the cosine of two vectors:"
    kind = "a sequence classifier" if form.loader == CLASSIFIER else "a cross-encoder"
    if form.loader not in (CLASSIFIER, CROSS_ENCODER):
        kind = "an encoder whose output is the logits"
    return f"{kind} of {outputs}:"


def snippet(task: Task, form: Form) -> str:
    sentences = '[("How old are you?", "What is your age?")]' if task.is_pair else '["A lovely film ."]'
    if form.score_of_cosine is not None:
        lines = [f"logits = {form.score_of_cosine}", f"scores = {task.predicts.formula}"]
        return code(
            "from sentence_transformers import SentenceTransformer", "",
            f'model = SentenceTransformer("{task.name}")',
            'first, second = model.encode(["How old are you?"]), model.encode(["What is your age?"])',
            "cosine = model.similarity_pairwise(first, second)", *lines,
        )  # fmt: skip
    if form.loader == CROSS_ENCODER or (form.loader == CLASSIFIER and task.is_pair):
        lines = ["from sentence_transformers import CrossEncoder", ""]
        return code(*lines, f'scores = CrossEncoder("{task.name}").predict({sentences})')
    if form.loader == CLASSIFIER:
        lines = ["from transformers import pipeline", ""]
        lines += [f'classify = pipeline("text-classification", "{task.name}", truncation=True)']
        return code(*lines, f"scores = classify({sentences}, top_k=None)")
    lines = ["from sentence_transformers import SentenceTransformer", ""]
    lines += [f'logits = SentenceTransformer("{task.name}").encode({sentences}, convert_to_tensor=True)']
    return code(*lines, f"scores = {task.predicts.formula}", f"names = {list(task.output_names)!r}")


def onnx_snippet(run: TrainedRun, task: Task) -> str:
    views = run.branches[task.name].pairing_for("dev").views
    lines = ["import onnxruntime", "from transformers import AutoTokenizer", ""]
    lines += [f'tokenizer = AutoTokenizer.from_pretrained("{task.name}")']
    lines += [f'session = onnxruntime.InferenceSession("{task.name}/model.onnx")']
    settings = 'truncation=True, padding=True, return_tensors="np"'
    if max(map(len, views)) > 1:
        lines += [f'first, second = (tokenizer([s], {settings}) for s in ("How old are you?", "What is your age?"))']
        lines += ["sides = {1: first, 2: second}"]
        lines += ['inputs = {f"{k}_{side}": sides[side][k] for side in sides for k in ("input_ids", "attention_mask")}']
    else:
        texts = '["How old are you?"], ["What is your age?"]' if task.is_pair else '["A lovely film ."]'
        lines += [f"inputs = dict(tokenizer({texts}, {settings}))"]
    return code(*lines, '(logits,) = session.run(["logits"], inputs)')


# --- records of the run -----------------------------------------------------------------------------------------------


def scored_tasks(run: TrainedRun) -> dict[str, Scored]:
    """The run's saved predictions of its dev files, of each task that has them."""
    found = {}
    for name, task in run.tasks.items():
        path = run.folder / f"{name}-dev.npz"
        if not path.is_file():
            continue
        try:
            dev = read_logits(path, task, multitask_flags.logits_remedy(run.folder, train=False), labeled=True)
        except InputError as error:
            warn(f"{error} The model card has no interval for {name}.")
            continue
        found[name] = Scored(task.predicts, dev.values, dev.labels)
    return found


def scores(run: TrainedRun) -> str:
    found, recorded = scored_tasks(run), Run(run.folder)
    lines = ["| task | dev score | 95% interval | rows |", "|---|---|---|---|"]
    for name, scored in found.items():
        value = score_interval(scored)
        lines.append(f"| `{name}` | {value.score:.3f} | {value.low:.3f} to {value.high:.3f} | {len(scored.values)} |")
    if len(found) == len(run.tasks) > 1:
        value = overall_interval(found)
        lines.append(f"| overall (2024) | {value.score:.3f} | {value.low:.3f} to {value.high:.3f} | |")
    if not found and recorded.finished:
        lines += [f"| `{plain(name)}` | {value:.3f} | not known | |" for name, value in recorded.scores().items()]
    if len(lines) == 2:
        return "The run has no record of its dev scores."
    return "\n".join([*lines, "", ABOUT_SCORES])


def training(run: TrainedRun) -> str:
    facts = run.facts
    versions = facts.get("versions") if isinstance(facts.get("versions"), dict) else {}
    lines = [f"Flags that differ from the defaults: `{plain(shlex.join(changed_flags(run)))}`", ""]
    lines += [f"Versions: {plain(', '.join(f'{name} {value}' for name, value in versions.items()) or 'not known')}. "]
    lines[-1] += f"Commit: {plain(facts.get('commit') or 'not known')}."
    known = known_files()
    lines += ["", "| data file | from | sha256 |", "|---|---|---|"]
    for path, value in facts["data_sha256"].items():
        lines.append(f"| {plain(Path(path).name)} | {known.get(value, 'elsewhere')} | {plain(value)} |")
    return "\n".join(lines)


def known_files() -> dict[str, str]:
    """Where a data file comes from, by its sha256: the course, or the sample data that comes with the suite."""
    listed = DATA / "course-data.sha256"
    lines = listed.read_text(encoding="utf-8").splitlines() if listed.is_file() else []
    course = {line.split()[0]: "the course" for line in lines if line and not line.startswith("#")}
    return course | {sha256_of(path): "made-up sample data" for path in (DATA / "sample").glob("*.csv")}


def changed_flags(run: TrainedRun) -> list[str]:
    """The flags of the run that differ from today's defaults, without those that name files."""
    stored, words = run.facts["args"], ["--option", str(run.facts["args"].get("option"))]
    left_out = NOT_IN_CARD | multitask_flags.file_flags()
    unused = tuple(f"{name}_" for name in multitask_flags.TASKS if name not in run.tasks)
    for action in multitask_flags.parser()._actions:
        key, value = action.dest, stored.get(action.dest)
        if key in left_out or key.startswith(unused) or value is None or value == action.default:
            continue
        if value == [*run.tasks] and key == "train_tasks":
            continue
        name = Path(value).name if key == "model" else value  # a directory says where files are
        values = [] if value is True else name if isinstance(name, list) else [name]
        words += [
            f"--{key}" if value is not False else f"--no-{key}",
            *(map(str, values) if value is not False else ()),
        ]
    return words


def limits(run: TrainedRun, forms: dict[str, Form | str], written: dict[str, Form | str]) -> str:
    lines = [
        "* English only, and texts like those of the data above. A student's model: not for decisions about people.",
        "* The data may contain the prejudices of its authors, and the model may have learned them.",
        f"* Texts are truncated to {run.tokenizer.max_length} tokens.",
    ]
    for name, form in forms.items():
        if isinstance(form, str):
            lines.append(f"* `{name}` is {'here as ONNX only' if name in written else 'not here'}: {form}.")
        elif len(run.branches[name].pairing_for("dev").views) > 1 and form.score_of_cosine is None:
            lines.append(
                f"* `{name}` was scored in both orders of a pair, and the mean taken. These files compute one order; "
                "for the scores above, average the logits of both."
            )
    return "\n".join(lines)


def licenses(run: TrainedRun) -> str:
    base = base_of(run)
    of_base = f"{base.hub_id}: {base.license}." if base else "The encoder's: see the base model."
    return (
        f"The code: MIT. {of_base} The data: files of the course (SST, CFIMDB, Quora, STS) have the terms of their "
        "sources; read these before you publish or sell what was trained on them."
    )
