"""Further pre-training: objectives against transformers and float64 NumPy, masks by statistics, the script itself."""

import itertools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from conftest import COURSE_TASKS, Finished, padded, the_error, write_task_files
from safetensors.torch import load_file, save_file
from torch import Generator, Tensor

import pretrain
from base_bert import checkpoint_state
from bert import BertModel
from config import BertConfig
from corpus import (
    HELD_OUT_SEED,
    IGNORED,
    Corpus,
    MaskedSentences,
    Masking,
    NextSentences,
    Pair,
    PairCorpus,
    PositivePairs,
    SentencesTwice,
    at_most,
    hold_out,
    read_nli_pairs,
    read_paraphrases,
    read_text,
    split_sentences,
    task_documents,
    with_hard_negatives,
    without_repeats,
)
from datasets import Source, endless_batches
from heads import POOLERS
from pretrain import HELD_OUT_BATCH, OBJECTIVES, PretrainingBERT, measure, targets, weighted_loss
from tasks import CFIMDB, PARA, TASKS, Batch, Encoded
from tokenizer import SPECIAL_TOKENS, BertTokenizer
from trainer import Trainer
from training import Loop
from utils import InputError, Precision

FP32 = Precision("fp32", torch.device("cpu"))
WORDS = ["the", "cat", "sat", "on", "a", "warm", "mat", "while", "seven", "small", "dogs", "slept", "near", "old"]

pytestmark = pytest.mark.usefixtures("one_thread")


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def sentence(i: int, length: int = 8) -> str:
    """Words in an order that can be learned: each word is followed by the next one in the list."""
    return " ".join(WORDS[(i + k) % len(WORDS)] for k in range(length))


def write_documents(path: Path, documents: int = 12, sentences: int = 4) -> Path:
    texts = [
        "\n".join(sentence(5 * d + s, 5 + (d + s) % 4) + f" {d} ." for s in range(sentences)) for d in range(documents)
    ]
    path.write_text("\n\n".join(texts) + "\n")
    return path


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> BertTokenizer:
    return BertTokenizer.from_pretrained(str(tiny_checkpoint))


def build(*objectives: str, vocab_size: int = 30522, activation: str = "gelu", **options: object) -> PretrainingBERT:
    """Build a random model with weights and biases so large that each of them matters."""
    torch.manual_seed(3)
    shape = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    config = BertConfig(vocab_size=vocab_size, hidden_act=activation, **shape)
    model = PretrainingBERT(BertModel(config), objectives, **options)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def theirs(kind: type, model: PretrainingBERT, folder: Path) -> torch.nn.Module:
    """The model of transformers, loaded from the file that ours would save."""
    folder.mkdir(exist_ok=True)
    save_file(checkpoint_state(model), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(model.bert.config.to_dict()))
    loaded, report = kind.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    return loaded.eval()


def some_batch(task: str, model: PretrainingBERT, labels: Tensor, rows: int = 4, length: int = 9) -> Batch:
    ids = torch.randint(5, model.bert.config.vocab_size, (rows, length), generator=seeded(1))
    mask = (torch.arange(length) < torch.arange(length, length - rows, -1)[:, None]).long()
    types = ((torch.arange(length) > 3) & mask.bool()).long()
    return Batch(task, [], (Encoded(ids * mask, mask, types),), labels)


# --- masked words -----------------------------------------------------------------------------------------------------


def word_labels(model: PretrainingBERT) -> Tensor:
    ids = torch.randint(5, model.bert.config.vocab_size, (4, 9), generator=seeded(2))
    return torch.where(torch.rand((4, 9), generator=seeded(3)) < 0.4, ids, IGNORED)


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_word_logits_loss_and_gradients_are_those_of_transformers(activation: str, tmp_path: Path) -> None:
    model = build("mlm", vocab_size=300, activation=activation)
    batch = some_batch("mlm", model, word_labels(model))
    batch.labels[batch.sentences[0].attention_mask == 0] = IGNORED  # padding is never masked, and not computed
    their_model = theirs(transformers.BertForMaskedLM, model, tmp_path)
    (given,) = batch.sentences
    wanted = their_model(given.token_ids, given.attention_mask, given.token_type_ids, labels=batch.labels)
    output = model.predict(batch)
    loss = weighted_loss(output, batch, 1.0)
    torch.testing.assert_close(output.logits, wanted.logits[batch.labels != IGNORED], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss, wanted.loss, rtol=1e-5, atol=1e-5)
    loss.backward()
    wanted.loss.backward()
    for ours, other in (
        (model.bert.word_embedding.weight, their_model.bert.embeddings.word_embeddings.weight),  # the tied weight
        (model.cls["predictions"].bias, their_model.cls.predictions.bias),
        (model.cls["predictions"].transform["dense"].weight, their_model.cls.predictions.transform.dense.weight),
    ):
        torch.testing.assert_close(ours.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_only_masked_tokens_get_logits_over_the_vocabulary() -> None:
    model = build("mlm", vocab_size=300)
    labels = torch.full((4, 9), IGNORED)
    labels[1, 2] = labels[3, 4] = 7
    assert model.predict(some_batch("mlm", model, labels)).logits.shape == (2, 300)


def test_a_batch_without_masked_tokens_has_loss_zero_and_trains_nothing() -> None:
    model = build("mlm", vocab_size=300)
    batch = some_batch("mlm", model, torch.full((4, 9), IGNORED))
    loss = weighted_loss(model.predict(batch), batch, 1.0)
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def long_rows(tokenizer: BertTokenizer) -> Tensor:
    """Token ids (400, 64): ordinary pieces with [CLS], [UNK], [SEP] and padding."""
    ids = torch.randint(1996, 30522, (400, 64), generator=seeded(5))
    ids[:, 0], ids[:, 50] = tokenizer.cls_token_id, tokenizer.sep_token_id
    ids[:, 20] = tokenizer.unk_token_id
    ids[:, 51:] = tokenizer.pad_token_id
    return ids


@pytest.mark.parametrize("whole_word", [False, True])
def test_15_percent_are_chosen_and_replaced_80_10_10(tokenizer: BertTokenizer, whole_word: bool) -> None:
    ids = long_rows(tokenizer)
    masked_ids, labels = Masking.of(tokenizer, 0.15, whole_word)(ids, seeded())
    special = torch.isin(ids, torch.tensor([tokenizer.vocabulary.index(t) for t in SPECIAL_TOKENS]))
    chosen = labels != IGNORED
    n = int((~special).sum())  # 19,200: five standard errors are .013 of tokens; words are fewer
    assert not (chosen & special).any()
    assert chosen.sum() / n == pytest.approx(0.15, abs=0.013 if not whole_word else 0.02)
    assert torch.equal(labels[chosen], ids[chosen])
    assert torch.equal(masked_ids[~chosen], ids[~chosen])
    masked = (masked_ids == tokenizer.mask_token_id)[chosen].float().mean()
    same = (masked_ids == ids)[chosen].float().mean()
    assert masked == pytest.approx(0.8, abs=0.037)  # five standard errors of 2,880
    assert same == pytest.approx(0.1, abs=0.028)
    assert 1 - masked - same == pytest.approx(0.1, abs=0.028)


def test_random_replacements_are_all_ordinary_pieces_and_no_others(tokenizer: BertTokenizer) -> None:
    pieces = tokenizer.vocabulary
    ordinary = {i for i, p in enumerate(pieces) if p not in SPECIAL_TOKENS and not p.startswith("[unused")}
    assert set(Masking.of(tokenizer, 0.15, False).replacements.tolist()) == ordinary
    assert 29000 < len(ordinary) < len(pieces) - 900


def test_all_pieces_of_a_word_are_chosen_together(tokenizer: BertTokenizer) -> None:
    texts = ["unbelievably embarrassing cinematography, electroencephalograms unhappily misremembered"] * 200
    ids = padded(tokenizer, texts)["input_ids"]
    continues = torch.tensor([[tokenizer.vocabulary[i].startswith("##") for i in ids[0].tolist()]])
    assert continues.sum() >= 4
    chosen = Masking.of(tokenizer, 0.3, True)(ids, seeded())[1] != IGNORED
    assert torch.equal(chosen[:, 1:][:, continues[0, 1:]], chosen[:, :-1][:, continues[0, 1:]])
    apart = Masking.of(tokenizer, 0.3, False)(ids, seeded())[1] != IGNORED
    assert not torch.equal(apart[:, 1:][:, continues[0, 1:]], apart[:, :-1][:, continues[0, 1:]])
    words = chosen[:, ~continues[0]][:, 1:-1].float().mean(0)
    assert words.min() > 0.15
    assert words.max() < 0.45


def text_corpus(tokenizer: BertTokenizer, documents: int = 12, sentences: int = 4) -> Corpus:
    texts = [[sentence(7 * d + s, 4 + (d + s) % 5) + f" {d} {s}" for s in range(sentences)] for d in range(documents)]
    return Corpus.tokenize(texts, tokenizer)


def masked_sentences(tokenizer: BertTokenizer) -> MaskedSentences:
    return MaskedSentences(text_corpus(tokenizer), Masking.of(tokenizer, 0.15, False), tokenizer.pad_token_id)


def test_every_pass_draws_new_masks_and_has_every_sentence_once(tokenizer: BertTokenizer) -> None:
    source = masked_sentences(tokenizer)

    def masks(seed: int) -> dict[tuple[int, ...], list[bool]]:
        """Map each original sentence to the mask of its chosen tokens."""
        found = {}
        for batch in source.batches(5, seeded(seed)):
            chosen = batch.labels != IGNORED
            ids = torch.where(chosen, batch.labels, batch.sentences[0].token_ids)
            for row, real, hidden in zip(ids, batch.sentences[0].attention_mask.bool(), chosen, strict=True):
                found[tuple(row[real].tolist())] = hidden[real].tolist()
        return found

    one, other = masks(1), masks(2)
    assert one.keys() == other.keys()
    assert len(one) == len(source) == 48
    assert one != other


def test_every_epoch_has_its_own_masks_and_the_same_ones_when_it_is_run_again(tokenizer: BertTokenizer) -> None:
    source = masked_sentences(tokenizer)

    def labels(epoch: int, batches: int) -> list[list[list[int]]]:
        found = endless_batches(source, 48, 11711, epoch)
        return [batch.labels.tolist() for batch in itertools.islice(found, batches)]

    first, second = labels(1, 2)  # two passes within an epoch
    assert first != second
    assert labels(1, 1) == [first]
    assert labels(2, 1) not in ([first], [second])


# --- next sentences ---------------------------------------------------------------------------------------------------


def test_order_logits_and_loss_are_those_of_transformers(tmp_path: Path) -> None:
    model = build("nsp", vocab_size=300)
    batch = some_batch("nsp", model, torch.tensor([0, 1, 1, 0]))
    (given,) = batch.sentences
    wanted = theirs(transformers.BertForNextSentencePrediction, model, tmp_path)(
        given.token_ids, given.attention_mask, given.token_type_ids, labels=batch.labels
    )
    output = model.predict(batch)
    torch.testing.assert_close(output.logits, wanted.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weighted_loss(output, batch, 1.0), wanted.loss, rtol=1e-5, atol=1e-5)


def test_both_answers_count_in_the_loss() -> None:
    """A loss that ignores label 0 would leave out one of the classes (docs/PITFALLS.md, 30)."""
    model = build("nsp", vocab_size=300)
    for label in (0, 1):
        batch = some_batch("nsp", model, torch.full((4,), label))
        output = model.predict(batch)
        logits = output.logits.detach().double().numpy()
        wanted = np.mean(np.log(np.exp(logits).sum(1)) - logits[:, label])
        assert weighted_loss(output, batch, 2.0).item() == pytest.approx(2 * wanted, rel=1e-5)


@pytest.mark.parametrize("documents", [12, 1])
def test_half_of_the_pairs_are_consecutive_and_the_others_are_not(tokenizer: BertTokenizer, documents: int) -> None:
    sentences = 4 if documents > 1 else 48
    source = NextSentences(text_corpus(tokenizer, documents, sentences), tokenizer.pad_token_id, 128)
    assert len(source) == documents * (sentences - 1)
    labels, random = [], set()
    for seed in range(60):
        second, label = source.pairs(seeded(seed))
        following = second == source.first + 1
        assert torch.equal(following, label == 0)  # 0 means that it follows, as in transformers
        assert torch.equal(source.document[second[following]], source.document[source.first[following]])
        strangers, of = second[~following], source.first[~following]
        if documents > 1:
            assert not (source.document[strangers] == source.document[of]).any()
        else:
            assert not (strangers == of).any()
        labels.append(label.float())
        random |= set(strangers.tolist())
    assert torch.cat(labels).mean() == pytest.approx(0.5, abs=0.06)
    assert random == set(range(48))  # every sentence is drawn at some time


def test_pairs_are_joined_with_real_segments(tokenizer: BertTokenizer) -> None:
    corpus = Corpus.tokenize([["a cat", "two dogs", "red barns"], ["alone"]], tokenizer)
    source = NextSentences(corpus, tokenizer.pad_token_id, 128)
    texts = set()
    for seed in range(30):
        for batch in source.batches(2, seeded(seed)):
            (given,) = batch.sentences
            for ids, mask, types in zip(*given[:3], strict=True):
                words = [tokenizer.vocabulary[i] for i in ids[mask.bool()].tolist()]
                first = words.index("[SEP]") + 1
                assert types[mask.bool()].tolist() == [0] * first + [1] * (len(words) - first)
                texts.add(" ".join(words))
    assert {t for t in texts if t.startswith("[CLS] a cat")} == {
        "[CLS] a cat [SEP] two dogs [SEP]",
        "[CLS] a cat [SEP] red barns [SEP]",
    }
    assert not any("alone" in text for text in texts)


# --- SimCSE -----------------------------------------------------------------------------------------------------------


def info_nce(first: np.ndarray, others: np.ndarray, temperature: float, counts: np.ndarray | None = None) -> float:
    """Equations 4 and 5 of Gao et al. 2021, written out; counts[i, j] says whether j is in i's denominator."""
    total = 0.0
    for i, u in enumerate(first):
        exps = [math.exp(u @ v / (np.linalg.norm(u) * np.linalg.norm(v)) / temperature) for v in others]
        total -= math.log(exps[i] / sum(e for j, e in enumerate(exps) if counts is None or counts[i, j]))
    return total / len(first)


def vectors_of(model: PretrainingBERT, batch: Batch) -> list[np.ndarray]:
    found = []
    for given in batch.sentences:
        hidden = model.bert(*given[:2])["last_hidden_state"]
        found.append((hidden * given.attention_mask[..., None]).sum(1) / given.attention_mask.sum(1, keepdim=True))
    return [vector.detach().double().numpy() for vector in found]


def test_unsupervised_simcse_is_equation_4_with_two_dropout_masks_in_one_pass(
    tokenizer: BertTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("simcse", temperature=0.07).train()
    source = SentencesTwice(text_corpus(tokenizer), tokenizer.pad_token_id)
    batch = next(source.batches(6, seeded()))
    passes, encode = [], BertModel.encode

    def encoding(bert: BertModel, *given: Tensor) -> Tensor:
        passes.append(encode(bert, *given))
        return passes[-1]

    monkeypatch.setattr(BertModel, "encode", encoding)
    output = model.predict(batch)
    assert len(passes) == 1
    mask = torch.cat([batch.sentences[0].attention_mask] * 2)[..., None]
    one, other = ((passes[0] * mask).sum(1) / mask.sum(1)).detach().double().numpy().reshape(2, 6, 32)
    assert np.abs(one - other).max() > 0.01  # dropout
    assert weighted_loss(output, batch, 1.0).item() == pytest.approx(info_nce(one, other, 0.07), rel=1e-4)


def pair_batch(tokenizer: BertTokenizer, pairs: list[Pair]) -> Batch:
    source = PositivePairs(PairCorpus.tokenize(pairs, tokenizer), tokenizer.pad_token_id)
    (batch,) = source.batches(len(pairs), seeded())
    return batch


def test_supervised_simcse_is_equation_5_with_hard_negatives_of_some_rows(tokenizer: BertTokenizer) -> None:
    pairs = [
        Pair(f"{sentence(i)} one", f"two {sentence(i, 6)}", f"{sentence(i, 3)} no" * (i != 2) or None) for i in range(5)
    ]
    assert sum(pair.negative is None for pair in pairs) == 1
    model = build("simcse_supervised", temperature=0.2)
    batch = pair_batch(tokenizer, pairs)
    first, second, negatives = vectors_of(model, batch)
    assert len(negatives) == 4
    wanted = info_nce(first, np.concatenate([second, negatives]), 0.2)
    assert weighted_loss(model.predict(batch), batch, 1.0).item() == pytest.approx(wanted, rel=1e-4)


def test_equal_texts_in_a_batch_are_no_negatives_of_each_other(tokenizer: BertTokenizer) -> None:
    pairs = [Pair("a b", "c d", None), Pair("a b", "e f", None), Pair("g", "c d", None), Pair("h i", "a b", "c d")]
    model = build("simcse_supervised", temperature=0.2)
    batch = pair_batch(tokenizer, pairs)
    texts = [[tokenizer.rust.decode(row.tolist()) for row in given.token_ids] for given in batch.sentences]
    others = texts[1] + texts[2]
    counts = np.ones((4, 5), dtype=bool)
    for i, (x, positive) in enumerate(zip(texts[0], texts[1], strict=True)):
        for j, y in enumerate(others):
            same_first = j < 4 and texts[0][j] in (x, positive)  # y is known to mean the same as x or its positive
            counts[i, j] = j == i or not (y in (x, positive) or same_first)
    assert (~counts).sum() == 10
    first, *rest = vectors_of(model, batch)
    wanted = info_nce(first, np.concatenate(rest), 0.2, counts)
    output = model.predict(batch)
    assert weighted_loss(output, batch, 1.0).item() == pytest.approx(wanted, rel=1e-4)


def test_batches_of_simcse_have_hashes_that_are_equal_for_equal_texts(tokenizer: BertTokenizer) -> None:
    pairs = [Pair("a b", "c d", "e"), Pair("c d", "a b", None), Pair("e", "f g", "a b")]
    supervised = pair_batch(tokenizer, pairs)
    twice = SentencesTwice(Corpus.tokenize([["a b", "c d"], ["e", "a b"]], tokenizer), tokenizer.pad_token_id)
    (unsupervised,) = twice.batches(4, seeded())
    hash_of: dict[str, int] = {}
    for batch in (supervised, unsupervised):
        for given, hashes in zip(batch.sentences, batch.text_hashes, strict=True):
            texts = [tokenizer.rust.decode(row.tolist()) for row in given.token_ids]
            for text, number in zip(texts, hashes.tolist(), strict=True):
                assert hash_of.setdefault(text, number) == number
    assert sorted(hash_of) == ["a b", "c d", "e", "f g"]
    assert len(set(hash_of.values())) == 4


def test_a_repeated_sentence_is_no_negative_of_itself(tokenizer: BertTokenizer) -> None:
    """With nsp the text keeps its repeats, and simcse gets them too."""
    texts = Corpus.tokenize([["a b", "c d"], ["e f g", "a b"]], tokenizer)
    model = build("simcse", temperature=0.2)
    (batch,) = SentencesTwice(texts, tokenizer.pad_token_id).batches(4, seeded())
    names = [tokenizer.rust.decode(row.tolist()) for row in batch.sentences[0].token_ids]
    counts = np.array([[i == j or x != y for j, y in enumerate(names)] for i, x in enumerate(names)])
    assert (~counts).sum() == 2
    wanted = info_nce(*vectors_of(model, batch), 0.2, counts)
    output = model.predict(batch)
    assert torch.isinf(output.logits).sum() == 2
    assert weighted_loss(output, batch, 1.0).item() == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("pooling", POOLERS)
def test_every_pooling_trains_simcse(pooling: str, tokenizer: BertTokenizer) -> None:
    model = build("simcse", pooling=pooling).train()
    batch = next(SentencesTwice(text_corpus(tokenizer), tokenizer.pad_token_id).batches(6, seeded()))
    weighted_loss(model.predict(batch), batch, 1.0).backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


# --- measuring --------------------------------------------------------------------------------------------------------


def source_of(name: str, tokenizer: BertTokenizer) -> Source:
    flags = pretrain.get_args(["--objective", name])
    pairs = [Pair(sentence(i), sentence(i, 5), None) for i in range(12)]
    corpus = PairCorpus.tokenize(pairs, tokenizer) if OBJECTIVES[name].on_pairs else text_corpus(tokenizer)
    return OBJECTIVES[name].source(flags, tokenizer, corpus)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_held_out_figures_are_the_same_in_every_call_and_do_not_change_the_random_state(
    name: str, tokenizer: BertTokenizer
) -> None:
    model, source = build(name), source_of(name, tokenizer)
    torch.manual_seed(1)
    first = measure(model, name, source, FP32)
    after = torch.rand(())
    torch.manual_seed(1)
    assert torch.rand(()) == after
    assert measure(model, name, source, FP32) == first, "the random state is another one now"


@pytest.mark.parametrize("name", OBJECTIVES)
def test_held_out_text_is_scored_without_dropout_unless_dropout_is_the_objective(
    name: str, tokenizer: BertTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, modes, predict = build(name).train(name != "simcse"), set(), PretrainingBERT.predict

    def predicting(model: PretrainingBERT, batch: Batch) -> object:
        modes.add((model.training, torch.is_grad_enabled()))
        return predict(model, batch)

    monkeypatch.setattr(PretrainingBERT, "predict", predicting)
    measure(model, name, source_of(name, tokenizer), FP32)
    assert modes == {(name == "simcse", False)}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_learns_its_rows(name: str, tiny_checkpoint: Path, tokenizer: BertTokenizer) -> None:
    torch.manual_seed(0)
    model, source = PretrainingBERT(BertModel.from_pretrained(str(tiny_checkpoint)), [name]), source_of(name, tokenizer)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    before, _ = measure(model, name, source, FP32)
    for _ in range(25):
        model.train()
        for batch in source.batches(HELD_OUT_BATCH, seeded(HELD_OUT_SEED)):  # measure's masks
            optimizer.zero_grad()
            weighted_loss(model.predict(batch), batch, 1.0).backward()
            optimizer.step()
    after, _ = measure(model, name, source, FP32)
    assert after < 0.7 * before


def test_the_held_out_loss_is_the_mean_over_targets_not_over_batches(tokenizer: BertTokenizer) -> None:
    model, source = build("mlm"), masked_sentences(tokenizer)
    losses = []
    for batch in source.batches(HELD_OUT_BATCH, seeded(HELD_OUT_SEED)):
        logits = model.predict(batch).logits.detach().double().numpy()
        chosen = logits[np.arange(len(logits)), targets(batch).numpy()]
        losses += list(np.log(np.exp(logits).sum(1)) - chosen)
    assert measure(model, "mlm", source, FP32)[0] == pytest.approx(np.mean(losses), rel=1e-5)


# --- text -------------------------------------------------------------------------------------------------------------


def test_sentences_end_at_punctuation_before_a_capital() -> None:
    assert split_sentences('Etc . , etc . The end ! " Really ? " He (he!) left (He did.) 3 times .') == [
        "Etc . , etc .", "The end !", '" Really ?', '" He (he!) left (He did.)', "3 times .",
    ]  # fmt: skip
    assert split_sentences("  ") == []


def test_blank_lines_separate_documents(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(b"\xef\xbb\xbfone\r\n two \n\n \nthree")
    assert read_text(tmp_path / "t.txt") == [["one", "two"], ["three"]]


@pytest.mark.parametrize(
    "documents", [[[f"{d} {s}" for s in range(3)] for d in range(40)], [[str(s) for s in range(50)]]]
)
def test_a_tenth_is_held_out_and_nothing_is_on_both_sides(documents: list[list[str]]) -> None:
    train, held_out = hold_out(documents)
    flat = [[s for sentences in part for s in sentences] for part in (train, held_out)]
    assert sorted(flat[0] + flat[1]) == sorted(s for sentences in documents for s in sentences)
    assert len(flat[1]) == (12 if len(documents) == 40 else 5)
    assert hold_out(documents) == (train, held_out)


def test_a_repeated_sentence_counts_once() -> None:
    assert without_repeats([["a", "b", "a"], ["b"], ["c"]]) == [["a", "b"], ["c"]]


@pytest.mark.parametrize("most", [1, 5, 11])
def test_at_most_takes_random_documents_and_shortens_the_last(most: int) -> None:
    documents = [[f"{d} {s}" for s in range(3)] for d in range(4)]
    kept = at_most(documents, most, seed=1)
    assert sum(map(len, kept)) == most
    assert all(sentences in (d[: len(sentences)] for d in documents) for sentences in kept)
    assert [len(sentences) for sentences in kept[:-1]] == [3] * (len(kept) - 1)
    assert at_most(documents, most, seed=1) == kept
    assert len({str(at_most(documents, most, seed)) for seed in range(10)}) > 1


@pytest.mark.parametrize("most", [None, 12, 99])
def test_at_most_keeps_everything_if_there_is_no_more(most: int | None) -> None:
    documents = [[f"{d} {s}" for s in range(3)] for d in range(4)]
    assert at_most(documents, most, seed=1) == documents


def test_a_review_is_a_document_of_sentences_and_each_text_of_a_pair_is_its_own(tmp_path: Path) -> None:
    reviews, pairs = tmp_path / "reviews.csv", tmp_path / "pairs.csv"
    reviews.write_text("\tid\tsentence\tsentiment\n0\ta\tGood film . See it !\t1\n1\tb\tBad .\t0\n")
    assert task_documents(CFIMDB, reviews, strict=False) == [["Good film .", "See it !"], ["Bad ."]]
    rows = "0\ta\tWhy ? How ?\tWho ?\t1.0\n1\tb\t\tWhere ?\t0.0\n"
    pairs.write_text("\tid\tsentence1\tsentence2\tis_duplicate\n" + rows)
    assert task_documents(PARA, pairs, strict=False) == [["Why ? How ?"], ["Who ?"], ["Where ?"]]


# --- NLI --------------------------------------------------------------------------------------------------------------


def nli_line(first: str, second: str, label: str) -> str:
    return json.dumps({"sentence1": first, "sentence2": second, "gold_label": label, "annotator_labels": []})


def write_nli(path: Path, *extra: str, rows: int = 30) -> Path:
    lines = [
        nli_line(sentence(i) + f" {i}", other, label)
        for i in range(rows)
        for other, label in (
            (sentence(i, 4), "entailment"),
            (f"no {sentence(i, 3)}", "contradiction"),
            ("x", "neutral"),
        )
    ]
    path.write_text("\n".join([*lines, *extra]) + "\n")
    return path


def test_nli_gives_entailments_as_positives_and_contradictions_as_hard_negatives(tmp_path: Path) -> None:
    args = pretrain.get_args(["--objective", "simcse_supervised", "--nli", str(write_nli(tmp_path / "n.jsonl"))])
    pairs = pretrain.labeled_pairs(args)
    assert pairs == [Pair(sentence(i) + f" {i}", sentence(i, 4), f"no {sentence(i, 3)}") for i in range(30)]
    args.positives_only = True
    assert all(pair.negative is None for pair in pretrain.labeled_pairs(args))


def test_hard_negatives_belong_to_the_first_text_and_take_turns() -> None:
    positives = [("p", "h0"), ("p", "h1"), ("p", "h0"), ("", "h2"), ("q", ""), ("p", "h3"), ("r", "p")]
    pairs = with_hard_negatives(positives, {"p": ["c0", "c1", "c0"], "other": ["c2"]})
    assert pairs == [Pair("p", "h0", "c0"), Pair("p", "h1", "c1"), Pair("p", "h3", "c0"), Pair("r", "p", None)]


def test_several_hard_negatives_of_a_text_in_a_file_take_turns(tmp_path: Path) -> None:
    extra = [nli_line("p", f"h{i}", "entailment") for i in range(3)]
    extra += [nli_line("p", f"c{i}", "contradiction") for i in range(2)]
    path = write_nli(tmp_path / "n.jsonl", *extra)
    pairs = pretrain.labeled_pairs(pretrain.get_args(["--objective", "simcse_supervised", "--nli", str(path)]))
    assert [pair.negative for pair in pairs if pair.first == "p"] == ["c0", "c1", "c0"]


def test_lines_without_a_gold_label_are_skipped_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = write_nli(tmp_path / "n.jsonl", nli_line("a", "b", "-"), nli_line("c", "d", "-"), "", rows=1)
    positives, negatives = read_nli_pairs([path])
    assert (len(positives), len(negatives)) == (1, 1)
    assert f"{path}: 2 of 5 lines have no gold label. Skipped." in capsys.readouterr().err


def test_paraphrases_that_cannot_be_used_are_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "quora-train.csv"
    path.write_text("\tid\tsentence1\tsentence2\tis_duplicate\n0\ta\tone\ttwo\t1\n1\tb\tthree\tfour\t\n")
    assert read_paraphrases(path, strict=False) == ([("one", "two")], {})
    assert "line 3: is_duplicate is empty. Skipped (1 of 2 rows skipped" in capsys.readouterr().err


def test_paraphrases_are_positives_and_other_pairs_of_the_text_hard_negatives(tmp_path: Path) -> None:
    rows = [(f"q{i}", f"r{i}", 1.0) for i in range(20)] + [("x", "q3", 0.0), ("q4", "y", 0.0), ("u", "v", 0.0)]
    lines = [f"{i}\tid{i}\t{a}\t{b}\t{label}" for i, (a, b, label) in enumerate(rows)]
    (tmp_path / "quora-train.csv").write_text("\n".join(["\tid\tsentence1\tsentence2\tis_duplicate", *lines]) + "\n")
    pairs = pretrain.labeled_pairs(pretrain.get_args(["--objective", "simcse_supervised", "--data", str(tmp_path)]))
    assert len(pairs) == 20
    assert {pair.first: pair.negative for pair in pairs if pair.negative} == {"q3": "x", "q4": "y"}


# --- the script -------------------------------------------------------------------------------------------------------

Run = Callable[..., Finished]


@pytest.fixture
def run(
    tiny_checkpoint: Path,
    tmp_path: Path,
    run_main: Callable[..., Finished],
) -> Run:
    """Run pretrain.py in this process. Flags given here come last and override the others."""
    write_task_files(tmp_path / "data")

    def run(*more: object) -> Finished:
        given = {"--model": tiny_checkpoint, "--data": tmp_path / "data", "--runs": tmp_path / "runs", "--name": "r"}
        flags = [str(part) for pair in given.items() for part in pair]
        return run_main(pretrain, *flags, "--epochs", "1", *more)

    return run


def log_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_masked_words_lower_held_out_perplexity_and_the_run_is_a_checkpoint_for_all(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    text = write_documents(tmp_path / "t.txt", 40)
    done = run("--text", text, "--epochs", 3, "--batch_size", 8, "--lr", 3e-3)
    assert (done.status, done.err.count("has no head cls.predictions: its own weights start at random")) == (0, 1)
    shown = [float(x) for x in re.findall(r"^(?:before training|epoch \d).* perplexity ([\d.]+)", done.out, flags=re.M)]
    assert len(shown) == 4
    assert shown[3] < shown[0] / 50
    folder = tmp_path / "runs" / "r"
    logged = [line["scores"]["perplexity"] for line in log_of(folder)]
    assert logged == pytest.approx(shown, abs=1e-3)
    assert math.log(logged[1]) == pytest.approx(log_of(folder)[1]["scores"]["held-out loss"], rel=1e-5)
    # ours
    bert = BertModel.from_pretrained(str(folder))
    assert f"note: {folder}: only the encoder is used, not its cls." in capsys.readouterr().err
    assert BertTokenizer.from_pretrained(str(folder)).max_length == 512
    # theirs
    model, report = transformers.BertForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    torch.testing.assert_close(model.bert.embeddings.word_embeddings.weight, bert.word_embedding.weight)
    ids = torch.tensor(transformers.AutoTokenizer.from_pretrained(folder)("the cat sat on a [MASK] mat")["input_ids"])
    best = model.eval()(ids[None]).logits[0, 6].argmax().item()
    assert BertTokenizer.from_pretrained(str(folder)).vocabulary[best] in {*WORDS, "."}


def test_a_run_that_starts_from_another_run_uses_its_heads(run: Run, tmp_path: Path) -> None:
    flags = ["--text", write_documents(tmp_path / "t.txt", 20), "--batch_size", 8, "--lr", 3e-3]
    run(*flags, "--objective", "mlm+nsp")
    end = log_of(tmp_path / "runs" / "r")[-1]["scores"]
    done = run(*flags, "--objective", "mlm+nsp", "--model", tmp_path / "runs" / "r", "--name", "again")
    assert "note" not in done.err
    start = log_of(tmp_path / "runs" / "again")[0]["scores"]
    assert start == pytest.approx(end, rel=1e-5)


def test_heads_under_their_old_names_are_read(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """As in bert-base-uncased: gamma and beta, and a decoder that is stored beside the embeddings."""
    model = build("mlm", "nsp", vocab_size=300)
    state = checkpoint_state(model)
    old = {
        re.sub(r"LayerNorm\.weight", "LayerNorm.gamma", re.sub("LayerNorm.bias", "LayerNorm.beta", k)): t
        for k, t in state.items()
    }
    old["cls.predictions.decoder.weight"] = old["bert.embeddings.word_embeddings.weight"].clone()
    save_file(old, tmp_path / "model.safetensors")
    fresh = PretrainingBERT(BertModel(model.bert.config), ["mlm", "nsp"])
    pretrain.load_heads(fresh, tmp_path)
    assert capsys.readouterr().err == ""
    for name, parameter in fresh.cls.named_parameters():
        assert torch.equal(parameter, model.cls.get_parameter(name)), name


def test_an_incomplete_head_is_an_error(tmp_path: Path) -> None:
    model = build("mlm", vocab_size=300)
    state = checkpoint_state(model)
    del state["cls.predictions.transform.dense.weight"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"1 missing: cls\.predictions\.transform\.dense\.weight"):
        pretrain.load_heads(model, tmp_path)


ALL = "mlm+nsp:0.5+simcse+simcse_supervised:0.1"


def test_all_objectives_train_together_with_a_batch_of_each_per_draw(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, update = [], Trainer.update

    def updating(trainer: Trainer, step: list, *rest: object) -> None:
        drawn.append([[batch.task for batch in draw] for draw in step])
        update(trainer, step, *rest)

    monkeypatch.setattr(Trainer, "update", updating)
    text, nli = write_documents(tmp_path / "t.txt"), write_nli(tmp_path / "n.jsonl")
    done = run("--objective", ALL, "--text", text, "--nli", nli, "--batch_size", 10, "--accumulate", 2)
    assert done.status == 0, done.err
    assert drawn == [[list(OBJECTIVES)] * 2] * 2 + [[list(OBJECTIVES)]]  # 44 sentences in batches of 10
    log = log_of(tmp_path / "runs" / "r")[-1]
    assert list(log["losses"]) == list(OBJECTIVES)
    assert list(log["scores"]) == [
        "perplexity", "nsp accuracy", "simcse accuracy", "simcse_supervised accuracy", "held-out loss",
    ]  # fmt: skip


def test_weights_multiply_the_losses(run: Run, tmp_path: Path) -> None:
    text = write_documents(tmp_path / "t.txt")
    flags = ["--text", text, "--batch_size", 64, "--lr", 1e-9]  # one step: the loss at the start
    run("--objective", "mlm", *flags)
    run("--objective", "mlm:0.25", *flags, "--name", "quarter")
    one, quarter = (log_of(tmp_path / "runs" / name)[-1] for name in ("r", "quarter"))
    assert quarter["losses"]["mlm"] == pytest.approx(one["losses"]["mlm"] / 4, rel=1e-5)
    assert quarter["scores"]["held-out loss"] == pytest.approx(one["scores"]["held-out loss"] / 4, rel=1e-4)


def test_the_epoch_with_the_lowest_held_out_loss_is_kept(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([9.0, 3.0, 2.0, 5.0])
    monkeypatch.setattr(pretrain, "measure", lambda *given: (next(losses), 0.0))
    run("--text", write_documents(tmp_path / "t.txt"), "--epochs", 3)
    folder = tmp_path / "runs" / "r"
    assert [line.get("best") for line in log_of(folder)] == [None, True, True, False]
    assert json.loads((folder / "dev.json").read_text())["held-out loss"] == 2.0


def test_a_resumed_run_ends_bit_for_bit_like_an_uninterrupted_one(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = write_documents(tmp_path / "t.txt")
    flags = ["--objective", "mlm+nsp+simcse", "--text", text, "--batch_size", 16, "--epochs", 3, "--schedule", "linear"]
    assert run(*flags, "--name", "uninterrupted").status == 0
    with monkeypatch.context() as patch:
        train_epoch = Loop.train_epoch

        def interrupted(loop: Loop, epoch: int) -> object:
            if epoch == 3:
                raise KeyboardInterrupt
            return train_epoch(loop, epoch)

        patch.setattr(Loop, "train_epoch", interrupted)
        assert run(*flags).status == 130
    torch.manual_seed(99)
    done = run(*flags, "--resume")
    assert "epoch 3 " in done.out
    assert "before training" not in done.out
    one, other = (load_file(tmp_path / "runs" / name / "model.safetensors") for name in ("uninterrupted", "r"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    logs = (
        [line | {"seconds": 0, "memory": 0} for line in log_of(tmp_path / "runs" / n)] for n in ("uninterrupted", "r")
    )
    assert next(logs) == next(logs)


def test_by_default_the_texts_of_all_training_files_are_read_and_no_other_file(run: Run, tmp_path: Path) -> None:
    for path in (tmp_path / "data").iterdir():
        if "train" not in path.name:
            path.unlink()
    for path in (tmp_path / "data").glob("*.csv"):  # labels are not read
        path.write_text(re.sub(r"\t[\d.]+\n", "\t?\n", path.read_text()))
    done = run("--batch_size", 8)
    assert done.status == 0, done.err
    facts = json.loads((tmp_path / "runs" / "r" / "args.json").read_text())
    assert sorted(Path(path).name for path in facts["data_sha256"]) == sorted(
        t.filename("train") for t in COURSE_TASKS.values()
    )
    # sst has 8 texts and cfimdb the same 8; para has 8 first and 5 different second questions, sts the same
    assert "mlm: train 19, held out 2 sentences" in done.out


def test_by_default_only_tasks_whose_training_file_exists_are_read(run: Run, tmp_path: Path) -> None:
    for task in ("cfimdb", "sts"):
        (tmp_path / "data" / TASKS[task].filename("train")).unlink()
    done = run("--batch_size", 8)
    assert done.status == 0, done.err
    facts = json.loads((tmp_path / "runs" / "r" / "args.json").read_text())
    assert facts["args"]["tasks"] == ["sst", "para"]
    for path in (tmp_path / "data").glob("*-train.csv"):
        path.unlink()
    assert f"{tmp_path / 'data' / TASKS['sst'].filename('train')}: cannot be read" in the_error(run("--name", "none"))


def test_a_flag_that_a_later_one_makes_pointless_is_dropped_with_a_note(run: Run, tmp_path: Path) -> None:
    text = write_documents(tmp_path / "t.txt")
    recipe = tmp_path / "recipe.txt"
    recipe.write_text("--whole_word --mask_share 0.3\n")
    done = run("--text", text, f"@{recipe}", "--objective", "nsp", "--dry_run")
    assert done.status == 0, done.err
    assert "note: --mask_share, --whole_word: no effect with --objective nsp, so dropped.\n" in done.err


def test_max_train_and_max_held_out_limit_the_text(run: Run, tmp_path: Path) -> None:
    text, other = write_documents(tmp_path / "t.txt"), write_documents(tmp_path / "u.txt", 5)
    done = run("--text", text, "--held_out", other, "--max_train", 10, "--max_held_out", 7)
    assert "mlm: train 10, held out 7 sentences" in done.out


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_dry_run_succeeds_and_keeps_nothing(run: Run, tmp_path: Path, precision: str) -> None:
    text, nli = write_documents(tmp_path / "t.txt"), write_nli(tmp_path / "n.jsonl")
    flags = ["--text", text, "--nli", nli, "--objective", ALL, "--precision", precision, "--batch_size", 4]
    done = run("--dry_run", "--whole_word", *flags)
    assert done.status == 0, done.err
    assert done.out.endswith("dry run: two steps of everything went through; nothing was kept.\n")
    assert not (tmp_path / "runs").exists()


# --- bad input --------------------------------------------------------------------------------------------------------

REFUSED = {
    "--objective elmo": "--objective elmo: must be made of mlm, nsp, simcse, simcse_supervised, found 'elmo'. Choose",
    "--objective simsce": "must be made of mlm, nsp, simcse, simcse_supervised, found 'simsce'. Did you mean simcse?",
    "--objective mlm+": "must be made of mlm, nsp, simcse, simcse_supervised, found ''. Choose one.",
    "--objective mlm+mlm": "--objective mlm+mlm: each name may appear once, found mlm twice. Remove one.",
    "--objective mlm:0": "the weight of mlm must be a number above 0, found '0'. Write it like mlm:0.2, or leave it",
    "--objective mlm:": "the weight of mlm must be a number above 0, found ''. Write it like mlm:0.2, or leave it",
    "--objective mlm:inf": "the weight of mlm must be a number above 0, found 'inf'.",
    "--objective nsp --whole_word": "--whole_word needs --objective mlm. Use ",
    "--objective simcse --mask_share 0.2": "--mask_share 0.2 needs --objective mlm. Use ",
    "--temperature 0.1": "--temperature 0.1 needs --objective simcse or simcse_supervised. Use ",
    "--pooling cls": "--pooling cls needs --objective simcse or simcse_supervised. Use ",
    "--nli n.jsonl": "--nli n.jsonl needs --objective simcse_supervised. Use ",
    "--positives_only": "--positives_only needs --objective simcse_supervised. Use ",
    "--objective simcse_supervised --text t.txt": "--text t.txt needs --objective mlm or nsp or simcse. Use ",
    "--objective simcse_supervised --held_out t": "--held_out t needs --objective mlm or nsp or simcse. Use ",
    "--objective simcse_supervised --nli n --tasks sst": "--tasks sst needs an objective that reads the tasks' files. "
    "Leave out --nli, or leave out --tasks.",
    "--objective simcse_supervised+mlm --text t": "simcse_supervised needs labeled pairs, found neither --nli nor para",
    "--objective simcse_supervised --tasks sts": "simcse_supervised needs labeled pairs, found neither --nli nor para",
    "--objective simcse --batch_size 1": "simcse compares the rows of a batch, found --batch_size 1. Use 32 or more.",
    "--dry_run --resume": "--dry_run and --resume cannot be combined",
    "--ema_decay 0.5": "--ema_decay 0.5 needs --averager ema. Use --averager ema, or leave out --ema_decay.",
    "--average_start 0.1": "--average_start 0.1 needs --averager swa. Use ",
    "--mask_share 0": "--mask_share: must be a number, above 0 and at most 1, found '0'. See pretrain.py --help.",
    "--mask_shar 0.2": "unknown flag --mask_shar. Did you mean --mask_share? See pretrain.py --help.",
    "--objective nsp": "nsp needs three sentences, two of them consecutive, in the training text and in the held-out",
    "--objective nsp --tasks para": "Give text with --text, one sentence per line and a blank line between documents",
    "--objective simcse_supervised": "simcse_supervised needs at least 20 positive pairs",
    "--text nowhere.txt": "nowhere.txt: cannot be read; No such file or directory. Check the path.",
    "--held_out nowhere.txt": "nowhere.txt: cannot be read; No such file or directory. Check the path.",
    "--keep_layers 3": "--keep_layers must be 1 to 2 for",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_bad_flags_are_refused_in_one_line(flags: str, run: Run, tmp_path: Path) -> None:
    assert REFUSED[flags] in the_error(run(*flags.split()))
    assert not (tmp_path / "runs").exists()


BAD_TEXTS = {
    "only blank lines": (b"\n \n\t\n", "t.txt: has no sentence. A text file needs one sentence per line."),
    "empty": (b"", "t.txt: has no sentence. A text file needs one sentence per line."),
    "not UTF-8": (b"fine\nbad \xff\n", "t.txt line 2: must be UTF-8, found byte 0xff. Convert the file to UTF-8."),
    "too short": (
        b"one\ntwo\nthree\n",
        "holding out text needs at least 6 different sentences, found 3. Use more text, or",
    ),
    "nothing to predict": (b"[UNK]\n[SEP]\n[CLS]\n[PAD]\n[MASK]\n[UNK] [UNK]\n", "mlm finds nothing to predict in it."),
}


@pytest.mark.parametrize("case", BAD_TEXTS)
def test_a_bad_text_file_is_named(case: str, run: Run, tmp_path: Path) -> None:
    content, message = BAD_TEXTS[case]
    (tmp_path / "t.txt").write_bytes(content)
    assert message in the_error(run("--text", tmp_path / "t.txt"))
    assert not (tmp_path / "runs").exists()


BAD_NLI = {
    '{"sentence1": "a", "sen': "n.jsonl line 4: must be a JSON object; Unterminated string",
    '{"sentence1": "a", "gold_label": "neutral"}': "n.jsonl line 4: must be a JSON object with sentence1, sentence2,",
    "[1]": "n.jsonl line 4: must be a JSON object with sentence1, sentence2, gold_label",
    nli_line("a", "b", "yes"): "n.jsonl line 4: a label must be one of contradiction, neutral, entailment, found 'yes'",
}


@pytest.mark.parametrize("line", BAD_NLI)
def test_a_bad_nli_line_is_named(line: str, run: Run, tmp_path: Path) -> None:
    path = write_nli(tmp_path / "n.jsonl", line, rows=1)
    assert BAD_NLI[line] in the_error(run("--objective", "simcse_supervised", "--nli", path))
    assert not (tmp_path / "runs").exists()


def test_a_run_that_exists_is_not_touched_and_other_flags_do_not_resume_it(run: Run, tmp_path: Path) -> None:
    flags = ["--text", write_documents(tmp_path / "t.txt")]
    assert run(*flags).status == 0
    folder = tmp_path / "runs" / "r"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert f"{folder}: the run exists already" in the_error(run(*flags))
    assert "was started with --lr 5e-05 (now 0.1)" in the_error(run(*flags, "--lr", 0.1, "--resume"))
    write_documents(tmp_path / "t.txt", 13)
    assert "t.txt changed since the run was started. Use another --name." in the_error(run(*flags, "--resume"))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
