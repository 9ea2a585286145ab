"""The handout's check of bert.py: its outputs must equal those of a reference implementation.

    python sanity_check.py

There are three references: the outputs of minilm (computed by `transformers`, see tests/make_references.py); those of a
small random BERT, which needs no download; and the course's own sanity_check.data for bert-base-uncased, if that file
and the weights are available.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from base_bert import find_checkpoint
from bert import BertModel
from config import BertConfig
from flags import ArgumentParser
from tokenizer import BertTokenizer
from utils import InputError, run_script

HERE = Path(__file__).parent
REFERENCES = HERE / "tests" / "references"
COURSE_FILE = HERE / "sanity_check.data"
TOLERANCE = 1e-5


def distance(model: BertModel, inputs: dict[str, Tensor], expected: dict[str, Tensor], relative: float = 0.0) -> float:
    """Return the largest error at real tokens and in the pooled output.

    An error is |output - expected| - relative * |expected|.
    """
    with torch.no_grad():
        outputs = model.eval()(**inputs)
    real = inputs["attention_mask"].bool()
    pairs = [
        (outputs["last_hidden_state"][real], expected["last_hidden_state"][real]),
        (outputs["pooler_output"], expected["pooler_output"]),
    ]
    return max(((a - b).abs() - relative * b.abs()).max().item() for a, b in pairs)


def load(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Return (inputs, expected outputs, weights) of a reference file; its keys are `kind/name`."""
    saved = np.load(REFERENCES / name)
    kinds: dict[str, dict[str, Tensor]] = {"input": {}, "output": {}, "weight": {}}
    for key in saved.files:
        kind, _, rest = key.partition("/")
        kinds[kind][rest] = torch.from_numpy(saved[key])
    return kinds["input"], kinds["output"], kinds["weight"]


def check_minilm() -> float:
    inputs, expected, _ = load("sanity_minilm.npz")
    return distance(BertModel.from_pretrained("minilm"), inputs, expected)


def check_tiny() -> float:
    inputs, expected, weights = load("sanity_tiny.npz")
    words, H = weights["embeddings.word_embeddings.weight"].shape
    shape = {"vocab_size": words, "hidden_size": H, "intermediate_size": 4 * H, "num_hidden_layers": 2}
    model = BertModel(BertConfig(**shape, num_attention_heads=4, max_position_embeddings=16))
    model.load_published_weights(weights, REFERENCES / "sanity_tiny.npz")
    return distance(model, inputs, expected)


def check_course() -> float | None:
    """Compare with the course's reference; None if its file or bert-base-uncased is not available."""
    if not COURSE_FILE.is_file():
        return None
    try:
        find_checkpoint("bert-base-uncased")
    except InputError:
        return None
    expected = torch.load(COURSE_FILE, weights_only=True)
    texts = ["hello world", "hello neural network for NLP"]
    inputs = BertTokenizer.from_pretrained("bert-base-uncased")(texts, return_tensors="pt", padding=True)
    return distance(BertModel.from_pretrained("bert-base-uncased"), inputs, expected, relative=1e-3)


def main() -> int:
    checks = {"minilm": check_minilm, "a small random BERT": check_tiny, "bert-base-uncased": check_course}
    passed = []
    for name, check in checks.items():
        error = check()
        if error is None:
            continue
        if not error <= TOLERANCE:  # also catches NaN
            message = f"BERT sanity check FAILED ({name}): off by {error:.1e}, tolerance {TOLERANCE:.0e}"
            print(message, file=sys.stderr)
            return 1
        passed.append(name)
    print(f"Your BERT implementation is correct! ({', '.join(passed)})")
    return 0


def script() -> None:
    ArgumentParser("sanity_check.py", __doc__.splitlines()[0], "python sanity_check.py", usage="").parse(None)
    sys.exit(main())


if __name__ == "__main__":
    run_script(script)
