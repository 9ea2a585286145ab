"""What README and docs promise: links, flags, commands and messages exist."""

import ast
import functools
import importlib
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from conftest import ROOT

import flags
from utils import InputError

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md")), ROOT / "recipes" / "README.md"]
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
README = PAGES[0].read_text(encoding="utf-8")

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
CODE = re.compile(r"(`+)(.+?)\1", re.S)


def without_code(text: str) -> str:
    """Markdown without fenced blocks and inline code, in which nothing is a heading or a link."""
    return CODE.sub("code", FENCE.sub("", text))


def test_the_readme_has_at_most_250_lines() -> None:
    assert len(README.splitlines()) <= 250


def test_the_readme_answers_in_the_promised_order() -> None:
    headings = re.findall(r"^## (.*)$", README, flags=re.M)
    assert headings == [
        "Quickstart", "I want to ...", "Expected scores and minutes", "The five most used extensions",
        "When something goes wrong", "Documentation",
    ]  # fmt: skip


def test_the_readme_links_every_page() -> None:
    for page in PAGES[1:]:
        assert f"]({page.relative_to(ROOT).as_posix()})" in README, page.name


# --- links ------------------------------------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """The anchors that GitHub makes of the headings.

    Lower case; letters, digits, underscores, hyphens and spaces are kept, and spaces become hyphens. A heading that
    appears again gets -1, -2 and so on.
    """
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", FENCE.sub("", text), flags=re.M):
        shown = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)  # a link is shown as its text
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("## Part 1: sentiment", {"part-1-sentiment"}),
        ("## 9. Add your own head", {"9-add-your-own-head"}),
        ("# `torch.load` of a [model](x.md)", {"torchload-of-a-model"}),
        ("## a_b - c, d\n## a_b - c, d", {"a_b---c-d", "a_b---c-d-1"}),
        ("```\n# no heading\n```\n### **Yes** ##", {"yes"}),
    ],
)
def test_anchors_follow_githubs_rule(text: str, expected: set[str]) -> None:
    assert anchors(text) == expected


@every_page
def test_every_link_resolves(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", without_code(text))
    for link in links:
        path, _, anchor = link.partition("#")
        if re.match(r"\w+:", link):
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: no such file"
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{link}: no such heading"


# --- flags and commands -----------------------------------------------------------------------------------------------


class Built(Exception):  # noqa: N818
    """Carries a script's parser out of its get_args."""


def module_of(script: str) -> ModuleType:
    return importlib.import_module(script.removesuffix(".py"))


@functools.cache
def parser_of(script: str) -> flags.ArgumentParser:
    def carry(self: flags.ArgumentParser, *_: object, **__: object) -> None:
        raise Built(self)

    with pytest.MonkeyPatch.context() as patch:
        for method in ("parse", "parse_args", "parse_known_args"):
            patch.setattr(flags.ArgumentParser, method, carry)
        with pytest.raises(Built) as built:
            module_of(script).get_args([])
    return built.value.args[0]


def scripts() -> list[str]:
    texts = {path.name: path.read_text(encoding="utf-8") for path in ROOT.glob("*.py")}
    return sorted(name for name, text in texts.items() if "\ndef get_args(" in text)


# Flags of torchrun, pip, TensorBoard and ruff, and one that PITFALLS.md found in other implementations.
OTHERS = {"--nproc_per_node", "--nnodes", "--rdzv_backend", "--rdzv_endpoint", "--no-deps", "--logdir", "--check"}
OTHERS |= {"--smart"}


@functools.cache
def known_flags() -> set[str]:
    known = {flag for script in scripts() for flag in parser_of(script).flags} | OTHERS
    for path in (ROOT / "setup.sh", *ROOT.glob("docs/*.py"), *ROOT.glob("tests/*.py"), *ROOT.glob("data/*.py")):
        if path != Path(__file__):
            known |= set(re.findall(r"(?:^ +|\| |\(\")(--[a-z][\w-]*)", path.read_text(encoding="utf-8"), flags=re.M))
    return {flag.replace("-", "_") for flag in known}


@every_page
def test_every_flag_that_a_page_names_exists(page: Path) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", page.read_text(encoding="utf-8")))
    assert {flag for flag in named if flag.replace("-", "_") not in known_flags()} == set()


PLACEHOLDERS = {"S": "1", "...": None}  # for a reader: a seed, and "whatever else"
COMMAND = re.compile(r"^(?:python3?|torchrun(?: --\S+)*) ((?:\w+/)*[a-z_]+\.py)\b(.*)$")


def commands_in(text: str) -> Iterator[tuple[str, str]]:
    """Script and flags of every command in fenced bash blocks and in inline code."""
    blocks = [body.replace("\\\n", " ") for language, body in FENCE.findall(text) if language == "bash"]
    inline = [" ".join(span.split()) for _, span in CODE.findall(FENCE.sub("", text))]
    for line in "\n".join([*blocks, *inline]).splitlines():
        for part in re.sub(r"\s+#.*", "", line).split(" && "):
            if match := COMMAND.match(part.strip()):
                yield match[1], match[2].strip()


EXECUTED = ROOT / "docs" / "TUTORIAL.md"  # by test_tutorial.py, after its code has been added to a copy
COMMANDS = sorted(
    {command for page in PAGES if page != EXECUTED for command in commands_in(page.read_text(encoding="utf-8"))}
)
READERS_OWN = re.compile(r"^@?runs/\S+: no such|^--(study|teacher) ")  # the reader's runs do not exist here


def test_the_docs_have_commands_of_every_script() -> None:
    assert {script for script, _ in COMMANDS} >= set(scripts())
    assert len(COMMANDS) > 60


@pytest.mark.parametrize(("script", "words"), COMMANDS, ids=lambda value: value.replace("/", "-")[:100] or "alone")
def test_every_command_of_the_docs_parses(script: str, words: str) -> None:
    assert (ROOT / script).is_file()
    tokens = [PLACEHOLDERS.get(word, word) for word in shlex.split(words)]
    tokens = [word for word in tokens if word is not None]
    if script in scripts() and "--help" not in tokens:
        try:
            module_of(script).get_args(tokens)
        except InputError as error:
            if not READERS_OWN.search(str(error)):
                raise


# --- messages ---------------------------------------------------------------------------------------------------------


@functools.cache
def texts_of_the_code() -> str:
    """Every piece of text between two placeholders in the project's strings, one per line."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in ROOT.glob("*.py")]
    strings = [
        node.value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return "\n".join([*strings, (ROOT / "setup.sh").read_text(encoding="utf-8")])


def test_every_message_that_the_readme_explains_is_one_of_the_code() -> None:
    table = README.split("\n## When something goes wrong\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", table, flags=re.M)
    assert len(rows) >= 10
    for message in (message for row in rows for message in re.findall(r"`([^`]+)`", row)):
        assert message in texts_of_the_code() or message in the_message_about_an_idle_flag(), message


def the_message_about_an_idle_flag() -> str:
    with pytest.raises(InputError) as error:
        module_of("multitask_classifier.py").get_args(["--option", "finetune", "--smart_steps", "3"])
    return str(error.value)
