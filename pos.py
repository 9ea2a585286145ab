"""Part-of-speech tags as an input feature (Hicks & Liu, "Parts of MinBERT").

The words of a data set are tagged once and the tags are stored on disk. A sentence's tags are embedded, averaged, and
added to its vector.

Shapes:  B batch   T tokens   H hidden size   P size of a tag's embedding
"""

import argparse
import functools
import hashlib
import importlib.util
import itertools
import json
import os
import pickle
import urllib.request
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import torch
from tokenizers import Encoding
from torch import Tensor, nn
from tqdm import tqdm

from base_bert import verify_sha256
from flags import ALWAYS, ArgumentParser, chosen, number
from tasks import Encoded
from tokenizer import BertTokenizer
from utils import InputError, atomic_path, read_arrays, warn, writable_directory

if TYPE_CHECKING:  # NLTK takes a second to import, so it is imported only if tags are needed
    from nltk.tag.perceptron import PerceptronTagger

# --- tags -------------------------------------------------------------------------------------------------------------

# The Penn Treebank's 36 tags for words and 9 for punctuation. Their order is part of every checkpoint.
TAGS = (
    "CC", "CD", "DT", "EX", "FW", "IN", "JJ", "JJR", "JJS", "LS", "MD", "NN", "NNP", "NNPS", "NNS", "PDT", "POS", "PRP",
    "PRP$", "RB", "RBR", "RBS", "RP", "SYM", "TO", "UH", "VB", "VBD", "VBG", "VBN", "VBP", "VBZ", "WDT", "WP", "WP$",
    "WRB", "#", "$", "''", "(", ")", ",", ".", ":", "``",
)  # fmt: skip
NOTHING, UNKNOWN = 0, 1  # 0: [CLS], [SEP] and padding; 1: a tag that is not in the list, a piece outside any word
TAG_IDS = {tag: i for i, tag in enumerate(TAGS, start=2)}
TAG_IDS |= {"-LRB-": TAG_IDS["("], "-RRB-": TAG_IDS[")"]}  # the treebank's own spelling of brackets
NUM_TAGS = 2 + len(TAGS)


# --- the tagger's weights ---------------------------------------------------------------------------------------------

NLTK_DATA = "averaged_perceptron_tagger_eng"
FETCH = f"python -m nltk.downloader {NLTK_DATA}"
# The perceptron that NLTK's is a port of, with its own weights, in a wheel whose code is never imported.
WHEEL, WHEEL_PACKAGE, WHEEL_FILE = "textblob-aptagger", "textblob_aptagger", "trontagger-0.1.0.pickle"
WHEEL_SHA256 = "1109164b3d28dce58f96b763128bab2fd8754c3921fd3330de2724ac6d1ada7c"
TAGGERS = ("auto", "nltk", "wheel")
PATIENCE = 5  # seconds to wait for NLTK's server
CHARACTERS = 4_000_000  # per process: about 25 seconds of work; starting a process, which imports torch, takes five


class _SetUnpickler(pickle.Unpickler):
    """Reads numbers, strings, tuples, dicts and sets; a pickle that refers to anything else is refused."""

    def find_class(self, module: str, name: str) -> type:
        if (module, name) != ("__builtin__", "set"):  # as Python 2 spelled it
            raise pickle.UnpicklingError(f"only sets are allowed, found {module}.{name}")
        return set


def _installed_by_nltk() -> "PerceptronTagger | None":
    from nltk.tag.perceptron import PerceptronTagger

    try:
        return PerceptronTagger()
    except LookupError:
        return None
    except (ValueError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"NLTK's {NLTK_DATA} cannot be read ({reason}). Run: {FETCH} --force, or use --pos_tagger wheel."
        ) from error


def _why_not_fetched() -> str:
    """Download the weights as `nltk.download` does; return why that failed, or an empty string.

    NLTK waits two minutes for a server that never answers, so a cheap request is made first.
    """
    from nltk.downloader import Downloader

    try:
        urllib.request.urlopen(urllib.request.Request(Downloader.DEFAULT_URL, method="HEAD"), timeout=PATIENCE).close()
        with open(os.devnull, "w") as nowhere:
            Downloader().download(NLTK_DATA, quiet=True, raise_on_error=True, print_error_to=nowhere)
    except (OSError, ValueError) as error:  # URLError is an OSError
        return str(getattr(error, "reason", error)).partition("\n")[0]
    return ""


def _carried_by_wheel() -> "PerceptronTagger | None":
    from nltk.tag.perceptron import PerceptronTagger

    spec = importlib.util.find_spec(WHEEL_PACKAGE)  # locates a top-level package without running any of its code
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / WHEEL_FILE
    verify_sha256(path, WHEEL_SHA256)
    tagger = PerceptronTagger(load=False)
    with path.open("rb") as file:
        tagger.decode_json_params(_SetUnpickler(file).load())  # weights, words with one tag only, tags
    return tagger


class Perceptron(NamedTuple):
    source: str  # nltk or wheel
    tagger: "PerceptronTagger"
    fingerprint: str  # of the weights: texts tagged with other weights are tagged again


@functools.cache  # one tagger per process, whatever happens to the network meanwhile
def find_perceptron(source: str) -> Perceptron:
    """NLTK's averaged perceptron (Honnibal 2013) with NLTK's weights, or with those in the wheel.

    auto: NLTK's weights if they are installed or can be downloaded, else the wheel's. The two were trained separately
    and differ on some words, so a run records which one it used.
    """
    reason = "not requested"  # why NLTK's weights are not used
    if source in ("auto", "nltk"):
        tagger = _installed_by_nltk()
        if tagger is None:
            reason = _why_not_fetched()
            tagger = None if reason else _installed_by_nltk()
        if tagger is not None:
            return Perceptron("nltk", tagger, _fingerprint(tagger))
    if source in ("auto", "wheel"):
        tagger = _carried_by_wheel()
        if tagger is not None:
            return Perceptron("wheel", tagger, _fingerprint(tagger))
    wheel = f"the wheel {WHEEL} is {'not requested' if source == 'nltk' else 'not installed'}"
    other = "" if source == "auto" else f" Or leave out --pos_tagger {source}."
    raise InputError(
        f"--feature pos needs a tagger's weights: NLTK's {NLTK_DATA} are not available ({reason}), and {wheel}. "
        f"Run: {FETCH}, or: source setup.sh.{other}"
    )


def _fingerprint(tagger: "PerceptronTagger") -> str:
    weights, words, tags = tagger.encode_json_obj()
    return hashlib.sha256(json.dumps([weights, words, sorted(tags)], sort_keys=True).encode()).hexdigest()


# --- texts -> tagged words, once --------------------------------------------------------------------------------------


class Words(NamedTuple):
    """The tagged words of many texts, concatenated."""

    counts: np.ndarray  # (texts,)
    begins: np.ndarray  # (words,), first character within its text
    ends: np.ndarray  # (words,), one past the last
    tags: np.ndarray  # (words,), ids


def tag_words(tagger: "PerceptronTagger", texts: list[str]) -> Words:
    from nltk.tokenize import NLTKWordTokenizer

    tokenizer = NLTKWordTokenizer()
    counts, spans, tags = [], [], []
    for text in texts:
        in_text = list(tokenizer.span_tokenize(text))
        counts.append(len(in_text))
        spans += in_text
        tags += [TAG_IDS.get(tag, UNKNOWN) for _, tag in tagger.tag([text[begin:end] for begin, end in in_text])]
    begins, ends = np.array(spans, dtype=np.int32).reshape(-1, 2).T
    return Words(np.array(counts, dtype=np.int32), begins, ends, np.array(tags, dtype=np.uint8))


def _tag_in_worker(source: str, texts: list[str]) -> Words:
    return tag_words(find_perceptron(source).tagger, texts)  # found once per process


def tag_in_processes(source: str, texts: list[str], chunk: int = 1000) -> Words:
    """Tag in as many processes as there is work for, but at most as many as there are cores.

    joblib starts new processes instead of forking, so torch's threads cannot make them hang.
    """
    from joblib import Parallel, cpu_count, delayed

    jobs = min(cpu_count(), 1 + sum(map(len, texts)) // CHARACTERS)
    chunks = [texts[i : i + chunk] for i in range(0, len(texts), chunk)]
    work = Parallel(n_jobs=jobs, return_as="generator")(delayed(_tag_in_worker)(source, c) for c in chunks)
    done = list(tqdm(work, desc="tag parts of speech", total=len(chunks), leave=False, disable=None))
    return Words(*map(np.concatenate, zip(*done, strict=True)))


class PosTagger:
    """Tags the texts of a data set, or reads their tags from the cache, and aligns them with word pieces."""

    VERSION: ClassVar = 1  # of the cache files; raise it whenever their content changes

    def __init__(self, perceptron: Perceptron, folder: Path | None):
        """folder: of the cache; None stores nothing, for texts that are seen once."""
        self.perceptron = perceptron
        self.folder = None if folder is None else writable_directory(folder, "--pos_cache")
        self.words: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}  # begins, ends, tags of a text's words

    def read(self, columns: Iterable[list[str]]) -> None:
        """Tag all texts of a data set, so that they can be aligned. A repeated text is tagged once."""
        texts = list(dict.fromkeys(itertools.chain.from_iterable(columns)))
        words = tag_words(self.perceptron.tagger, texts) if self.folder is None else self._from_cache(texts)
        edges = words.counts.cumsum()[:-1]
        split = (np.split(part, edges) for part in (words.begins, words.ends, words.tags))
        self.words = dict(zip(texts, zip(*split, strict=True), strict=True))

    def _from_cache(self, texts: list[str]) -> Words:
        path = self.folder / f"{self._key(texts)}.npz"
        words = _read_words(path, len(texts))
        if words is None:
            words = tag_in_processes(self.perceptron.source, texts)
            with atomic_path(path) as temporary, temporary.open("wb") as file:
                np.savez_compressed(file, **words._asdict())
        return words

    def _key(self, texts: list[str]) -> str:
        facts = [self.VERSION, version("nltk"), self.perceptron.fingerprint, texts]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def align(self, encoded: list[Encoding], sentences: list[str], pairs: list[str] | None = None) -> Tensor:
        """The tag ids of all word pieces, concatenated: a piece has the tag of the word in which it begins.

        All texts are laid end to end on one axis, so that a single search finds the words of all pieces.
        """
        columns = [sentences] if pairs is None else [sentences, pairs]
        texts = [text for row in zip(*columns, strict=True) for text in row]
        sizes = np.array([len(text) + 1 for text in texts], dtype=np.int64)
        bases = sizes.cumsum() - sizes
        tagged = [self.words[text] for text in texts]
        shifts = bases.repeat([len(tags) for *_, tags in tagged])
        # an empty word in front stands for "none", so that there is always one to the left
        begins, ends = (np.concatenate([[-1], shifts + np.concatenate([word[i] for word in tagged])]) for i in (0, 1))
        tags = np.concatenate([[UNKNOWN], *(word[2] for word in tagged)])

        rows = np.arange(len(encoded)).repeat([len(e.ids) for e in encoded])
        # 0 or 1: which text of the row; a special token belongs to neither
        column = np.array([-1 if i is None else i for e in encoded for i in e.sequence_ids])
        places = np.array([begin for e in encoded for begin, _ in e.offsets])
        places += bases[rows * len(columns) + column.clip(0)]
        word = begins.searchsorted(places, side="right") - 1
        ids = np.where(places < ends[word], tags[word], UNKNOWN)
        return torch.from_numpy(np.where(column < 0, NOTHING, ids).astype(np.uint8))


class TaggingTokenizer(BertTokenizer):
    """A tokenizer whose encodings come with part-of-speech tags."""

    reads_parts = False  # the tags of a data set are stored in one file

    def __init__(self, tokenizer: BertTokenizer, tagger: PosTagger):
        super().__init__(
            tokenizer.vocabulary,
            lowercase=tokenizer.lowercase,
            max_length=tokenizer.max_length,
            model_max_length=tokenizer.model_max_length,
        )
        self.tagger = tagger

    def prepare(self, columns: Iterable[list[str]]) -> None:
        self.tagger.read(columns)

    def tags(self, encoded: list[Encoding], sentences: list[str], pairs: list[str] | None) -> Tensor:
        return self.tagger.align(encoded, sentences, pairs)


def _read_words(path: Path, texts: int) -> Words | None:
    """The stored tags; None if there are none, or with a note if the file is damaged."""
    if not path.is_file():
        return None
    try:
        arrays = read_arrays(path)
        words = Words(*(arrays[name] for name in Words._fields))
        if len(words.counts) != texts or {len(part) for part in words[1:]} != {words.counts.sum()}:
            raise ValueError("its sizes do not fit")
        return words
    except (OSError, ValueError, KeyError, TypeError) as error:
        warn(f"{path}: the stored tags are damaged ({error}). Tagging the texts again.")
        return None


# --- features: sentence vectors (B, H), the sentences themselves -> (B, H) --------------------------------------------


class Feature(nn.Module):
    """No feature: the vector is returned unchanged."""

    own_parameters: ClassVar[bool] = False
    needs_tags: ClassVar[bool] = False

    def __init__(self, H: int, P: int):
        super().__init__()

    def forward(self, vectors: Tensor, sentences: Encoded | None) -> Tensor:
        return vectors


class PosFeature(Feature):
    """W [v; mean_t e(tag_t)] + b over the sentence's word pieces without [CLS] and [SEP]. Hicks & Liu, section 3.1.

    Deviations: the paper tags word pieces, in every pass, which took half a day; here words are tagged, once, as the
    tagger was trained to do. W starts as [I 0] and b as 0, so training starts from the unchanged vector; the paper
    starts from random weights. P is not given in the paper.
    """

    own_parameters = needs_tags = True

    def __init__(self, H: int, P: int):
        super().__init__(H, P)
        self.embedding = nn.Embedding(NUM_TAGS, P)
        self.projection = nn.Linear(H + P, H)
        nn.init.eye_(self.projection.weight)  # rectangular: [I 0]
        nn.init.zeros_(self.projection.bias)

    def forward(self, vectors: Tensor, sentences: Encoded | None) -> Tensor:
        if sentences is None or sentences.pos_ids is None:
            raise InputError(
                "--feature pos needs part-of-speech tags, which token ids alone do not carry. Use model.predict on a "
                "batch of a Split that was tokenized with a TaggingTokenizer, or train with --feature none."
            )
        real = (sentences.pos_ids != NOTHING).to(self.embedding.weight.dtype)  # (B, T)
        weights = real / real.sum(dim=1, keepdim=True).clamp(min=1)  # all 0 for an empty text
        tags = (weights[:, None, :] @ self.embedding(sentences.pos_ids)).squeeze(1)  # (B, 1, T) x (B, T, P) -> (B, P)
        return self.projection(torch.cat([vectors, tags], dim=1))  # (B, H + P) -> (B, H)


FEATURES: dict[str, type[Feature]] = {"none": Feature, "pos": PosFeature}


# --- flags ------------------------------------------------------------------------------------------------------------


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.section("input features")
    pos = chosen("--feature", "pos")
    add(
        "--feature", choices=sorted(FEATURES), default="none", needs=ALWAYS, help="what is added to a sentence's vector"
    )
    add("--pos_dim", type=number(int, 1, 4096), default=32, needs=pos, help="size of a tag's embedding")
    add("--pos_tagger", choices=TAGGERS, default="auto", needs=pos,
        help="weights of the tagger; auto uses NLTK's if available, else the wheel's")  # fmt: skip
    add("--pos_cache", type=Path, needs=pos, help="where tags are stored (default: minbert/pos in the user's cache)")


def build_feature(args: argparse.Namespace, H: int) -> Feature:
    return FEATURES[args.feature](H, args.pos_dim)


def build_tokenizer(args: argparse.Namespace, tokenizer: BertTokenizer, *, cached: bool = True) -> BertTokenizer:
    """The tokenizer, with tags if the feature reads them. cached: whether the tags of a data set are stored."""
    if not FEATURES[args.feature].needs_tags:
        return tokenizer
    if not cached:
        return TaggingTokenizer(tokenizer, PosTagger(find_perceptron(args.pos_tagger), None))
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(args.pos_cache or Path(caches) / "minbert" / "pos")
    return TaggingTokenizer(tokenizer, PosTagger(find_perceptron(args.pos_tagger), folder))


def describe(args: argparse.Namespace) -> str:
    needed = FEATURES[args.feature].needs_tags
    return f" | feature {args.feature}, tagger {args.pos_tagger}" if needed else ""


def available_tagger(args: argparse.Namespace) -> str:
    """The tagger that --pos_tagger selects on this machine, for a run to record."""
    needed = FEATURES[args.feature].needs_tags
    return find_perceptron(args.pos_tagger).source if needed else args.pos_tagger
