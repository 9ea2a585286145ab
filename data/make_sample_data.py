"""Write data/sample: small files for all four tasks in the course's formats, so that everything runs offline.

    python data/make_sample_data.py [--out data/sample] [--check]

All text is drawn from the patterns in sample_words.py. They are designed so that the words of a sentence do not give
away its label: bad reviews contain praise and good ones contain blame, and paraphrases share fewer words than questions
that differ. The label depends on who does what to whom, on what is negated, and on what is merely conceded. On every
task a bag of words scores far below a fine-tuned BERT, as on the real data; tests/test_sample_data.py checks this.

Sections, top to bottom: single sentences (sst, cfimdb), pairs (para, sts), rows, files and flags.
"""

import argparse
import csv
import hashlib
import io
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for tasks.py

from sample_words import (
    CFIMDB_GRAMMAR,
    QUORA_FRAMES,
    QUORA_WORDS,
    SST_GRAMMAR,
    STS_FRAMES,
    STS_WORDS,
    Frame,
    Grammar,
    Vocabularies,
)

from tasks import CFIMDB, PARA, SST, STS, Task

SEED = 224
SIZES = {"train": 600, "dev": 150, "test-student": 150}  # split, as in the file names -> rows of every task
TEST = "test-student"
MAX_SHARED_WORDS = 0.9  # two rows of a task must share less than this fraction of their words


class Row(NamedTuple):
    texts: tuple[str, ...]
    label: str  # as the file spells it


# --- single sentences: sst and cfimdb ---------------------------------------------------------------------------------


def expand(rng: Random, grammar: Grammar, text: str, used: set[str]) -> str:
    """Replace every {symbol} by one of its productions; repeat a production only when all others are used."""

    def replace(symbol: re.Match[str]) -> str:
        options = grammar[symbol[1]]
        chosen = rng.choice([option for option in options if option not in used] or options)
        used.add(chosen)
        return expand(rng, grammar, chosen, used)

    return re.sub(r"\{(\w+)\}", replace, text)


def fix_articles_and_capitals(text: str) -> str:
    """Write `an` instead of `a` before a vowel, and start each sentence with a capital letter."""
    text = re.sub(r"\b([Aa]) (?=[aeioAEIO]|[uU](?!ni|se|su))", r"\1n ", text)
    return re.sub(r"(^|[.?!] |<br />)([a-z])", lambda m: m[1] + m[2].upper(), text)


def draw_review(rng: Random, grammar: Grammar, symbol: str, label: int) -> Row:
    text = expand(rng, grammar, f"{{{symbol}}}", set())
    return Row((" " + fix_articles_and_capitals(text),), str(label))


def draw_sst(rng: Random, grade: int) -> Row:
    """Draw a sentence of a grade. In 6% of the rows the text is one grade off, as annotators disagree too."""
    grade_of_text = grade
    if rng.random() < 0.06:
        grade_of_text = rng.choice([g for g in (grade - 1, grade + 1) if 0 <= g <= 4])
    return draw_review(rng, SST_GRAMMAR, f"grade{grade_of_text}", grade)


def draw_cfimdb(rng: Random, label: int) -> Row:
    return draw_review(rng, CFIMDB_GRAMMAR, f"review{label}", label)


# --- slots of a pair --------------------------------------------------------------------------------------------------

Values = dict[str, str]  # slot -> the entry that fills it, with all of its synonyms


def unused_entries(slot: str, vocabularies: Vocabularies, values: Values) -> list[str]:
    """The entries of a slot's vocabulary that fill no slot yet; {city} and {city2} share a vocabulary."""
    return [entry for entry in vocabularies[slot.rstrip("2")] if entry not in values.values()]


def draw_values(rng: Random, frame: Frame, vocabularies: Vocabularies) -> Values:
    """Draw an entry for every slot; two slots of the same vocabulary get different entries."""
    values: Values = {}
    for slot in frame.slots():
        values[slot] = rng.choice(unused_entries(slot, vocabularies, values))
    return values


def replace_slot(rng: Random, slot: str, values: Values, vocabularies: Vocabularies) -> Values:
    """Fill one slot with another entry."""
    return values | {slot: rng.choice(unused_entries(slot, vocabularies, values))}


def has_second(values: Values) -> bool:
    """Whether two slots share a vocabulary, as {city} and {city2} do."""
    return any(slot.endswith("2") for slot in values)


def swap_slots(values: Values) -> Values:
    """Swap the two slots that share a vocabulary."""
    (second,) = [slot for slot in values if slot.endswith("2")]
    first = second.rstrip("2")
    return values | {first: values[second], second: values[first]}


def fill_slots(rng: Random, wording: str, values: Values, avoid: str = "") -> str:
    """Fill the slots of a wording, preferring synonyms that do not occur in the text `avoid`.

    `car|automobile` are synonyms. `man:men` are forms of one word; {who.1} asks for the second form.
    """
    plural = values.get("n", "a") != "a"

    def replace(slot: re.Match[str]) -> str:
        if slot[1] == "be":
            return "are" if plural else "is"
        synonyms = values[slot[1]].split("|")
        forms = rng.choice([s for s in synonyms if s.split(":")[0] not in avoid] or synonyms).split(":")
        return forms[int(slot[2] or (plural and slot[1] == "who"))]

    return fix_articles_and_capitals(re.sub(r"\{([a-z]+2?)(?:\.(\d))?\}", replace, wording))


# --- para: two questions ----------------------------------------------------------------------------------------------


class Question(NamedTuple):
    frame: Frame
    wordings: tuple[str, ...]  # one of the frame's meanings
    values: Values


def keep_meaning(rng: Random, question: Question) -> Question:
    """The same question; where the order of the two slots does not matter, swap them half of the time."""
    if question.frame.symmetric and rng.random() < 0.5:
        return question._replace(values=swap_slots(question.values))
    return question


def change_topic(rng: Random, question: Question) -> Question:
    frame = rng.choice([frame for frame in QUORA_FRAMES if frame is not question.frame])
    return Question(frame, rng.choice(frame.meanings), draw_values(rng, frame, QUORA_WORDS))


def change_meaning(rng: Random, question: Question) -> Question:
    others = [wordings for wordings in question.frame.meanings if wordings is not question.wordings]
    return question._replace(wordings=rng.choice(others))


def change_slot(rng: Random, question: Question) -> Question:
    slot = rng.choice(list(question.values))
    return question._replace(values=replace_slot(rng, slot, question.values, QUORA_WORDS))


def change_order(rng: Random, question: Question) -> Question:
    """Swap the two slots, or change one slot if swapping is impossible or would not change the meaning."""
    if has_second(question.values) and not question.frame.symmetric:
        return question._replace(values=swap_slots(question.values))
    return change_slot(rng, question)


# Ways in which two questions differ; each entry is drawn equally often.
CHANGES = [change_topic] * 2 + [change_meaning] * 4 + [change_slot] * 3 + [change_order]


def draw_para(rng: Random, label: int) -> Row:
    """Draw two questions; label 1 means that they are paraphrases. The choice of wordings does not depend on it."""
    frame = rng.choice(QUORA_FRAMES)
    values = draw_values(rng, frame, QUORA_WORDS)
    question = Question(frame, rng.choice(frame.meanings), values)
    change = keep_meaning if label else rng.choice(CHANGES)
    other = change(rng, question)
    first, second = rng.sample(range(3), 2) if rng.random() < 0.8 else (0, 0)
    text = fill_slots(rng, question.wordings[first], question.values)
    return Row((text, fill_slots(rng, other.wordings[second], other.values, text)), f"{label}.0")


# --- sts: two sentences and their similarity --------------------------------------------------------------------------


def draw_sts(rng: Random, whole: int) -> Row:
    """Draw pairs until the integer part of the score is `whole`."""
    while True:
        first, second, score = draw_graded_pair(rng)
        score = round(min(5.0, max(0.0, score + rng.choice((-0.2, 0.0, 0.0, 0.2)))), 1)
        if int(score) == whole:
            return Row((first, second), str(score))


def draw_graded_pair(rng: Random) -> tuple[str, str, float]:
    """Start from two equal meanings with score 5 and subtract the cost of each difference.

    Two different frames are unrelated and score nearly 0.
    """
    frame = rng.choice(STS_FRAMES)
    values = draw_values(rng, frame, STS_WORDS)
    first = fill_slots(rng, rng.choice(frame.meanings[0]), values)

    def second_text(wordings: tuple[str, ...], values: Values) -> str:
        return fill_slots(rng, rng.choice(wordings), values, first)

    if rng.random() < 0.12:
        other = rng.choice([f for f in STS_FRAMES if f is not frame])
        return first, second_text(other.meanings[0], draw_values(rng, other, STS_WORDS)), rng.choice((0.0, 0.0, 0.4))
    score, (wordings, opposite) = 5.0, frame.meanings
    if has_second(values) and rng.random() < 0.25:
        values, score = swap_slots(values), score - frame.costs["swap"]
    if rng.random() < 0.2:
        wordings, score = opposite, score - frame.costs["opposite"]
    for slot in rng.sample(list(values), rng.choice((0, 0, 1, 1, 2, 3, len(values)))):
        values, score = replace_slot(rng, slot, values, STS_WORDS), score - frame.costs[slot]
    return first, second_text(wordings, values), score


# --- rows -------------------------------------------------------------------------------------------------------------


class Sample(NamedTuple):
    """The share of each kind of row in every split of a task's files, and how to draw a row of a kind."""

    task: Task
    name: str  # seeds the generator and the ids
    shares: dict[int, float]  # kind (the label, for sts its integer part) -> share of rows
    draw: Callable[[Random, int], Row]


SAMPLES = (
    Sample(SST, "sst", {0: 0.128, 1: 0.26, 2: 0.19, 3: 0.272, 4: 0.15}, draw_sst),
    Sample(CFIMDB, "cfimdb", {0: 0.5, 1: 0.5}, draw_cfimdb),
    Sample(PARA, "quora", {0: 0.625, 1: 0.375}, draw_para),
    Sample(STS, "sts", {0: 0.173, 1: 0.162, 2: 0.172, 3: 0.263, 4: 0.183, 5: 0.047}, draw_sts),
)


def draw_kinds(shares: dict[int, float], size: int, rng: Random) -> list[int]:
    """Return `size` kinds in random order, each with its share; rounding errors go to the first kind."""
    counts = {kind: round(share * size) for kind, share in shares.items()}
    counts[next(iter(counts))] += size - sum(counts.values())
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    rng.shuffle(kinds)
    return kinds


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def make_rows(sample: Sample) -> dict[str, list[Row]]:
    """Draw all rows of a task by split. No sentence occurs twice, and no two rows have nearly the same words."""
    rng = Random(f"{SEED} {sample.name}")
    splits: dict[str, list[Row]] = {}
    seen: set[str] = set()
    bags: list[set[str]] = []  # the words of each row

    def is_new(row: Row) -> bool:
        sentences = [" ".join(words_of(text)) for text in row.texts]
        bag = set(" ".join(sentences).split())
        if len({*sentences} - seen) < len(sentences):
            return False
        if any(len(bag & other) >= MAX_SHARED_WORDS * len(bag | other) for other in bags):
            return False
        seen.update(sentences)
        bags.append(bag)
        return True

    for split, size in SIZES.items():
        splits[split] = []
        for kind in draw_kinds(sample.shares, size, rng):
            row = sample.draw(rng, kind)
            while not is_new(row):
                row = sample.draw(rng, kind)
            splits[split].append(row)
    return splits


# --- files and flags --------------------------------------------------------------------------------------------------


def make_id(name: str, split: str, number: int) -> str:
    return hashlib.sha256(f"{name} {split} {number}".encode()).hexdigest()[:25]


def file_text(sample: Sample, split: str, rows: list[Row]) -> str:
    """The text of one file, in the course's format.

    A test file has no label column. The course's test files of single sentences have one more number column.
    """
    task, is_test = sample.task, split == TEST
    two_numbers = is_test and len(task.text_columns) == 1
    text = io.StringIO()
    writer = csv.writer(text, delimiter="\t", lineterminator="\n")
    number_columns = ["0", ""] if two_numbers else [""]
    label_columns = [] if is_test else [task.label_column]
    writer.writerow([*number_columns, "id", *task.text_columns, *label_columns])
    for number, row in enumerate(rows):
        numbers = [number + 1, float(number)] if two_numbers else [number]
        label = [] if is_test else [row.label]
        writer.writerow([*numbers, make_id(sample.name, split, number), *row.texts, *label])
    return text.getvalue()


def make_files() -> Iterator[tuple[str, str]]:
    """Yield (name, text) of every file."""
    for sample in SAMPLES:
        for split, rows in make_rows(sample).items():
            yield sample.task.filename(split), file_text(sample, split, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("data/sample"), help="directory to write to")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the files differ")
    args = parser.parse_args()
    files = {args.out / name: text.encode() for name, text in make_files()}
    if args.check:
        differing = [str(path) for path, text in files.items() if not path.is_file() or path.read_bytes() != text]
        if differing:
            print(
                f"{', '.join(differing)}: differs from what this script writes. "
                f"Run: python data/make_sample_data.py --out {args.out}"
            )
        return 1 if differing else 0
    args.out.mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        path.write_bytes(text)
        print(f"wrote {path}: {len(text)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
