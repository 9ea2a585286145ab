"""Write a trained run as a directory that transformers and sentence-transformers load with the same outputs.

    python export.py --run runs/x --to shared/x
    python export.py --run runs/x --to shared/x --tasks sst --onnx

DIR/encoder           the encoder with its pooling, for transformers.AutoModel and SentenceTransformer
DIR/TASK              a task's model, in the first of these forms that gives the run's outputs:
                        BertForSequenceClassification: pooling pooler and head linear; for pairs a CrossEncoder as well
                        CrossEncoder: joined pairs with another pooling or head
                        SentenceTransformer: one sentence with another pooling or head; it encodes to the logits
                        SentenceTransformer: pairs apart with a cosine head; the card has the formula of the score
DIR/TASK/model.onnx   with --onnx, for any head, compared with the model by onnxruntime
DIR/README.md         the model card

Neither library is needed here: their formats are JSON and safetensors files.
"""

import argparse
import contextlib
import importlib.util
import json
import logging
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from base_bert import checkpoint_state
from cards import model_card
from checkpoints import NO_FOREIGN_HEAD
from flags import ALWAYS, ArgumentParser, Switch
from forms import CLASSIFIER, CROSS_ENCODER, SENTENCE_TRANSFORMER, Form, encoder_form, form_of, why_not_plain
from heads import Dense
from tasks import TASKS, Batch, Encoded, Task
from tokenizer import BertTokenizer
from trained import TrainedRun, open_trained
from utils import (
    InputError,
    Precision,
    atomic_path,
    could_not_write,
    megabytes,
    run_script,
    warn,
    writable_directory,
    write_text,
)

CPU = Precision("fp32", torch.device("cpu"))
MODULES = "sentence_transformers."  # where its modules are, in the names that its versions 3 to 6 accept

# --- files ------------------------------------------------------------------------------------------------------------


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    with atomic_path(path) as temporary:  # safetensors itself would make the file private
        save_file({name: t.contiguous() for name, t in tensors.items()}, temporary, metadata={"format": "pt"})


def write_encoder(folder: Path, run: TrainedRun, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """config.json, model.safetensors and the tokenizer's files. config: what is added to the encoder's."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / "model.safetensors", tensors)
    write_json(folder / "config.json", run.model.bert.config.to_dict() | config)
    write_tokenizer(folder, run.tokenizer)


def write_tokenizer(folder: Path, tokenizer: BertTokenizer) -> None:
    """The tokenizer's files, with the run's --max_length as the most that the model takes."""
    folder.mkdir(parents=True, exist_ok=True)
    most = tokenizer.max_length
    BertTokenizer(tokenizer.vocabulary, lowercase=tokenizer.lowercase, max_length=most).save_pretrained(folder)


def encoder_tensors(run: TrainedRun, prefix: str) -> dict[str, Tensor]:
    """The encoder's tensors under their published names, after this prefix; an update such as LoRA's is merged."""
    tensors = checkpoint_state(run.model)
    return {prefix + name.removeprefix("bert."): t for name, t in tensors.items() if name.startswith("bert.")}


def label_names(task: Task) -> dict[str, Any]:
    names = dict(enumerate(task.output_names))
    return {
        "id2label": names,
        "label2id": {name: number for number, name in names.items()},
        "problem_type": task.predicts.problem_type,
    }


def full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def write_classifier(folder: Path, run: TrainedRun, task: Task, form: Form) -> None:
    """BertForSequenceClassification: [CLS] -> dense, tanh -> dropout -> linear."""
    classifier = form.layers[-1]
    tensors = encoder_tensors(run, "bert.")
    tensors |= {"classifier.weight": classifier.weight, "classifier.bias": classifier.bias}
    config = {
        "architectures": [CLASSIFIER],
        "classifier_dropout": run.branches[task.name].dropout,
        "sentence_transformers": {"activation_fn": full_name(task.predicts.activation)},
        **label_names(task),
    }
    write_encoder(folder, run, config, tensors)


def write_modules(folder: Path, run: TrainedRun, form: Form, task: Task | None = None) -> None:
    """The layout of sentence-transformers: the encoder, its pooling, and the layers after it, each a directory."""
    write_encoder(folder, run, NO_FOREIGN_HEAD | (label_names(task) if task else {}), encoder_tensors(run, ""))
    H = run.model.bert.config.hidden_size
    modules = [("", "models.Transformer"), ("1_Pooling", "models.Pooling")]
    modules += [(f"{number}_Dense", "models.Dense") for number, _ in enumerate(form.layers, 2)]
    write_json(folder / "modules.json", [
        {"idx": i, "name": str(i), "path": path, "type": MODULES + kind} for i, (path, kind) in enumerate(modules)
    ])  # fmt: skip
    write_json(folder / "sentence_bert_config.json",
               {"max_seq_length": run.tokenizer.max_length, "do_lower_case": False})  # fmt: skip
    activation = full_name(task.predicts.activation) if task else None
    facts = {"model_type": form.loader, "similarity_fn_name": "cosine", "activation_fn": activation}
    write_json(folder / "config_sentence_transformers.json", {k: v for k, v in facts.items() if v is not None})
    flags = {
        f"pooling_mode_{kind}": kind.startswith(form.pooling) for kind in ("cls_token", "mean_tokens", "max_tokens")
    }
    (folder / "1_Pooling").mkdir()
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": H, **flags})
    for number, layer in enumerate(form.layers, 2):
        last = form.loader == CROSS_ENCODER and number == len(form.layers) + 1
        write_dense(folder / f"{number}_Dense", layer, "scores" if last else "sentence_embedding")


def write_dense(folder: Path, layer: Dense, output: str) -> None:
    folder.mkdir()
    outputs, inputs = layer.weight.shape
    write_json(folder / "config.json", {
        "in_features": inputs, "out_features": outputs, "bias": True,
        "activation_function": full_name(layer.activation),
        "module_input_name": "sentence_embedding", "module_output_name": output,
    })  # fmt: skip
    write_tensors(folder / "model.safetensors", {"linear.weight": layer.weight, "linear.bias": layer.bias})


# --- ONNX -------------------------------------------------------------------------------------------------------------

ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
LARGEST_DIFFERENCE = 1e-4  # between the logits of torch and of onnxruntime
EXAMPLES = (  # real sentences of different lengths, to compare the two
    ("A lovely film .", "A film that I love ."),
    ("Dull .", "It is not the worst that has been made of this old story, though not the best either ."),
    ("How do I learn to play the guitar in a month?", "Can one learn the guitar within four weeks?"),
)


class Answering(nn.Module):
    """A task's logits from token ids: of one sentence or joined pair (with segment ids), or of two sentences."""

    def __init__(self, run: TrainedRun, name: str):
        super().__init__()
        self.model, self.name = run.model, name
        self.pairing = run.branches[name].pairing_for("dev")
        self.apart = max(map(len, self.pairing.views)) > 1
        self.views = self.pairing.views if self.apart else ((0,),)  # of a joined pair, the order that is given

    def forward(self, *inputs: Tensor) -> Tensor:
        if self.apart:
            pairs = zip(inputs[::2], inputs[1::2], strict=True)
            sentences = (Encoded(ids, mask, torch.zeros_like(ids)) for ids, mask in pairs)
            sentences = self.pairing.join(*sentences, self.model.max_length)
        else:
            sentences = (Encoded(*inputs),)
        return self.model.predict(Batch(self.name, [], sentences, None, views=self.views)).logits

    @property
    def input_names(self) -> list[str]:
        if self.apart:
            return [f"{name}_{side}" for side in (1, 2) for name in ("input_ids", "attention_mask")]
        return ["input_ids", "attention_mask", "token_type_ids"]

    def inputs(self, run: TrainedRun, rows: slice) -> tuple[Tensor, ...]:
        """Token ids of some of the EXAMPLES."""
        texts = tuple(list(column) for column in zip(*EXAMPLES[rows], strict=True))
        split = run.split(self.name, texts[: len(run.tasks[self.name].text_columns)])
        sentences = split.batch(torch.arange(len(split))).sentences
        if self.apart:
            return tuple(tensor for encoded in sentences[:2] for tensor in encoded[:2])
        return sentences[0][:3]

    def shapes(self, most: int) -> tuple[tuple[dict[int, Any], ...]]:
        """Batches of any size, and sentences of any length."""
        B = torch.export.Dim("batch")
        T = [torch.export.Dim(f"tokens_{side}", max=most) for side in (1, 2)]
        return (tuple({0: B, 1: T[i // 2 if self.apart else 0]} for i in range(len(self.input_names))),)


def check_onnx_packages() -> None:
    absent = [name for name in ONNX_PACKAGES if importlib.util.find_spec(name) is None]
    if absent:
        raise InputError(
            f"--onnx needs {', '.join(ONNX_PACKAGES)}; {absent[0]} is not installed. Run: source setup.sh --dev"
        )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the exporter's remarks, about packages that are not installed and its own future, from the terminal."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(logging.NOTSET)


def write_onnx(path: Path, run: TrainedRun, name: str) -> float:
    """Write model.onnx; return the largest difference of its logits from torch's."""
    answering = Answering(run, name).eval()
    path.parent.mkdir(parents=True, exist_ok=True)
    with quiet(), torch.no_grad():
        try:
            program = torch.export.export(
                answering, answering.inputs(run, slice(0, 3)), dynamic_shapes=answering.shapes(run.tokenizer.max_length)
            )
            names = {"input_names": answering.input_names, "output_names": ["logits"]}
            torch.onnx.export(program, dynamo=True, verbose=False, **names).save(path)
        except (RuntimeError, TypeError, ValueError) as error:  # torch's errors of this kind have no common class
            pooling = run.branches[name].pooling
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:120]
            raise InputError(
                f"--onnx: torch cannot export {name} with --{name}_pooling {pooling} ({reason}). Leave out --onnx, or "
                f"name other --tasks."
            ) from error
    return check_onnx(path, run, answering)


def check_onnx(path: Path, run: TrainedRun, answering: Answering) -> float:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    worst = 0.0
    for rows in (slice(0, 3), slice(0, 1), slice(1, 3)):
        inputs = answering.inputs(run, rows)
        with torch.no_grad():
            expected = answering(*inputs)
        given = {name: tensor.numpy() for name, tensor in zip(answering.input_names, inputs, strict=True)}
        (logits,) = session.run(["logits"], given)
        worst = max(worst, (torch.from_numpy(logits) - expected).abs().max().item())
    if not worst <= LARGEST_DIFFERENCE:
        raise InputError(
            f"--onnx: the logits of {answering.name} must be torch's within {LARGEST_DIFFERENCE:g}, found a difference "
            f"of {worst:.2g}. Nothing was written; leave out --onnx."
        )
    return worst


# --- the directory ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory beside `path`; it gets this name at the end, or is removed after an error."""
    writable_directory(path.parent, "the directory of --to")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir()
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise InputError(could_not_write(path, error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def chosen_forms(run: TrainedRun, args: argparse.Namespace) -> dict[str, Form | str]:
    """The form of each task to export. A task that was named must have one; of all tasks, at least one must."""
    absent = [name for name in args.tasks or () if name not in run.tasks]
    if absent:
        raise InputError(f"--tasks {absent[0]}: {run.folder} was trained on {', '.join(run.tasks)}. Choose from these.")
    forms = {name: form_of(run, name) for name in dict.fromkeys(args.tasks or run.tasks)}
    if args.onnx and run.model.feature.needs_tags:
        raise InputError(f"--onnx: {why_not_plain(run)}. Predict with predict.py, or train with --feature none.")
    if args.onnx:
        return forms
    refused = {name: form for name, form in forms.items() if isinstance(form, str)}
    if refused and (args.tasks or len(refused) == len(forms)):
        name, reason = next(iter(refused.items()))
        other = "Train with --feature none" if run.model.feature.needs_tags else "Add --onnx, which exports any head"
        raise InputError(f"{name} cannot be exported: {reason}. {other}, or predict with predict.py.")
    return forms


def write_task(folder: Path, run: TrainedRun, name: str, form: Form | str) -> str:
    """Write a task's model; return what loads it."""
    task = run.tasks[name]
    if isinstance(form, str):
        write_tokenizer(folder, run.tokenizer)
        return "onnxruntime"
    if form.loader == CLASSIFIER:
        write_classifier(folder, run, task, form)
        return f"{CLASSIFIER}, {CROSS_ENCODER}" if task.is_pair else CLASSIFIER
    write_modules(folder, run, form, task)
    return form.loader


def export_run(run: TrainedRun, args: argparse.Namespace) -> None:
    forms, encoder = chosen_forms(run, args), encoder_form(run)
    written = {name: form for name, form in forms.items() if args.onnx or isinstance(form, Form)}
    with new_directory(args.to) as folder:
        if isinstance(encoder, Form):
            write_modules(folder / "encoder", run, encoder)
            print(f"encoder: {args.to / 'encoder'} | {SENTENCE_TRANSFORMER}, AutoModel | pooling {encoder.pooling}")
        elif not why_not_plain(run):
            write_encoder(folder / "encoder", run, NO_FOREIGN_HEAD, encoder_tensors(run, ""))
            print(f"encoder: {args.to / 'encoder'} | AutoModel; {encoder}")
        differences = {}
        for name, form in written.items():
            loaded_by = write_task(folder / name, run, name, form)
            print(f"{name}: {args.to / name} | {loaded_by}", flush=True)
            if args.onnx:
                differences[name] = write_onnx(folder / name / "model.onnx", run, name)
                print(f"{name}: {args.to / name / 'model.onnx'} | logits differ by {differences[name]:.1e} at most")
        for name, reason in forms.items():
            if isinstance(reason, str):
                warn(f"{name} is {'ONNX only' if name in written else 'left out'}: {reason}.")
        write_text(folder / "README.md", model_card(run, encoder, written, forms, differences))
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"wrote {args.to}, {megabytes(size)} | {args.to / 'README.md'} is the model card: read and complete it")


# --- script -----------------------------------------------------------------------------------------------------------


def get_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(
        "export.py",
        "Write a trained run as a directory that transformers and sentence-transformers load with the same outputs, "
        "with a model card.",
        "python export.py --run runs/x --to shared/x",
        "python export.py --run runs/x --to shared/x --tasks sst --onnx",
        usage="--run runs/NAME --to DIR [flags]",
        sections=("flags",),
    )
    add = parser.section("flags")
    add("--run", type=Path, required=True, needs=ALWAYS, help="directory of the run, which is only read")
    add("--to", type=Path, required=True, needs=ALWAYS, help="directory to write; it must be new or empty")
    add("--tasks", nargs="+", choices=sorted(TASKS), needs=ALWAYS,
        help="tasks to export, an error if one cannot be expressed (default: all that can)")  # fmt: skip
    add("--onnx", action=Switch, needs=ALWAYS,
        help="also write TASK/model.onnx, for any head, and compare it with the model")  # fmt: skip
    args = parser.parse(argv)
    if args.to.exists() and not (args.to.is_dir() and not any(args.to.iterdir())):
        raise InputError(f"--to {args.to}: must be a new or an empty directory, found something there. Choose another.")
    if args.run.resolve() in (args.to.resolve(), *args.to.resolve().parents):
        raise InputError(f"--to {args.to}: must be outside the run, which is only read. Choose another.")
    if args.onnx:
        check_onnx_packages()
    return args


def main() -> None:
    args = get_args()
    export_run(open_trained(args.run, CPU), args)


if __name__ == "__main__":
    run_script(main)
