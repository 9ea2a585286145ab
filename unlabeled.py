"""Texts without labels, for a teacher to label: parts of sentences, sentences of reviews, and new pairs of questions.

A student that learns a teacher's predictions on more texts than the training file has learns more of the teacher.
"""

import random
import re
from collections.abc import Iterable

import torch
from torch import Tensor

# a clause ends at these, so that the parts of a sentence are phrases with an opinion of their own
CLAUSE_ENDS = re.compile(r"\s(?:(?:,|--|;|:|but|and|while|although|with)\s)+")
SENTENCE_ENDS = re.compile(r"(?<=[.!?])\s+")
LINE_BREAK = re.compile(r"<br\s*/?>")
SHORTEST, LONGEST = 4, 45  # words of a part


def parts_of(texts: Iterable[str], rng: random.Random) -> list[str]:
    """Sentences of long texts, and up to two clauses of each sentence, in random order; whole texts are left out."""
    found = []
    for text in texts:
        sentences = SENTENCE_ENDS.split(LINE_BREAK.sub(" . ", text))
        clauses = [clause for sentence in sentences for clause in CLAUSE_ENDS.split(sentence)]
        pieces = sentences if len(sentences) > 2 else rng.sample(clauses, min(2, len(clauses)))
        found += [" ".join(words) for words in map(str.split, pieces) if SHORTEST <= len(words) <= LONGEST]
    found = list(dict.fromkeys(found))
    rng.shuffle(found)
    return found


def neighbors(vectors: Tensor, known: set[tuple[int, int]], rng: random.Random, most: int = 4) -> list[tuple[int, int]]:
    """For every text, a random one of its `most` nearest neighbors: new pairs that are alike, in random order.

    vectors: (rows, H), of which the cosines count. known: pairs that exist, in either order. Near neighbors are the
    pairs that are hard to tell apart; random pairs hardly ever are (Thakur et al. 2021, arXiv:2010.08240).
    """
    unit = torch.nn.functional.normalize(vectors.float(), dim=1)
    exist = known | {(b, a) for a, b in known}
    pairs: dict[tuple[int, int], None] = {}  # a dict keeps the order, a set would not
    for start in range(0, len(unit), 1024):
        cosines = unit[start : start + 1024] @ unit.T  # (1024, rows)
        nearest = cosines.topk(min(2 * most, len(unit)), dim=1).indices.tolist()
        for a, row in enumerate(nearest, start):
            candidates = [b for b in row if b != a and (a, b) not in exist][:most]
            if candidates:
                b = rng.choice(candidates)
                pairs[min(a, b), max(a, b)] = None
    found = [pair if rng.random() < 0.5 else pair[::-1] for pair in pairs]
    rng.shuffle(found)
    return found
