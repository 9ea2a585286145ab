"""Command-line flags: recipes, flags that need each other, `a:w+b` specifications, and a help page that can be read.

A recipe is a file of flags: `@recipes/x.txt` on the command line stands for the flags in that file, and later flags
win. Every flag states what it needs in order to have an effect. A flag that would do nothing is an error, unless it is
a recipe's and a later flag made it pointless, as in `@recipes/quickstart.txt --regularizer none`: then it is dropped
with a note.
"""

import argparse
import contextlib
import difflib
import itertools
import math
import re
import sys
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

from utils import InputError, warn

PROJECT = Path(__file__).parent
WIDTH = 100  # columns of the help page

# --- what a flag needs ------------------------------------------------------------------------------------------------


class Need(NamedTuple):
    """A condition without which a flag has no effect."""

    what: str  # completes "--flag needs ..."
    is_met: Callable[[argparse.Namespace], bool]  # called with complete flags, as `complete` of the script returns them
    remedy: str = ""  # an imperative; by default "Use " and what is needed


ALWAYS: tuple[Need, ...] = ()  # of a flag that always has an effect
# A script without --option, such as pretrain.py, always trains the encoder.
ENCODER_TRAINS = Need(
    "an encoder that trains, which --option pretrain (the handout's default) freezes",
    lambda args: getattr(args, "option", "finetune") == "finetune",
    "Use --option finetune",
)


def chosen(flag: str, *values: str) -> Need:
    """The need for one of these values of another flag."""
    key = flag.removeprefix("--")
    return Need(f"{flag} {' or '.join(values)}", lambda args: getattr(args, key) in values)


# --- argparse types ---------------------------------------------------------------------------------------------------


def number(kind: type, low: float, high: float, *, above: bool = False) -> Callable[[str], Any]:
    """An argparse type: a number from low to high; `above` excludes low itself."""

    def parse(text: str) -> Any:
        kind_of_number = "a whole number" if kind is int else "a number"
        rule = f"must be {kind_of_number}, {'above' if above else 'at least'} {low:.10g} and at most {high:.10g}"
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{rule}, found {text!r}") from None
        if not (low < value if above else low <= value) or not value <= high:
            raise argparse.ArgumentTypeError(f"{rule}, found {text!r}")
        return value

    parse.__name__ = kind.__name__  # the help page shows it
    return parse


def parse_spec(text: str, choices: Iterable[str], flag: str) -> dict[str, float]:
    """Parse `a:0.5+b` into the weight of each part, 1 where none is given.

    Shared by losses, regularizers and pre-training objectives. flag: names the flag in messages.
    """
    weights: dict[str, float] = {}
    for term in text.split("+"):
        name, colon, weight = term.partition(":")
        if name not in choices:
            hint = suggestion(name, choices)
            raise InputError(
                f"{flag} {text}: must be made of {', '.join(choices)}, found {name!r}.{hint or ' Choose one.'}"
            )
        if name in weights:
            raise InputError(f"{flag} {text}: each name may appear once, found {name} twice. Remove one.")
        weights[name] = _weight(weight, f"{flag} {text}: the weight of {name}", name) if colon else 1.0
    return weights


def _weight(text: str, what: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise InputError(f"{what} must be a number above 0, found {text!r}. Write it like {name}:0.2, or leave it out.")
    return value


def suggestion(word: str, known: Iterable[str]) -> str:
    """A sentence that suggests the known word most like this one; empty if none is similar."""
    nearest = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean {nearest[0]}?" if nearest else ""


# --- the parser -------------------------------------------------------------------------------------------------------


class FromRecipe(str):
    """A word of a command line that comes from a recipe. `place` is its file and line, for messages.

    The file may be no recipe at all, and private: a message shows a word of it only if it is the value of a flag that
    the parser knows, or has the form of a flag.
    """

    place: str

    def __new__(cls, text: str, place: str = "a recipe") -> Self:  # the default is for copies
        word = super().__new__(cls, text)
        word.place = place
        return word


FLAG = re.compile(r"(--[a-z][a-z_-]{0,39})(=.*)?", re.DOTALL)  # the form of a flag, perhaps with a value
MOST_RECIPES = 100  # read for one command line: recipes that include others twice each double in number
LARGEST_RECIPE = 2**20  # bytes
LONGEST_WORD = 4096  # characters of a word in a recipe: the longest path of Linux
LONGEST_NAME = 255  # bytes of a file name, in every usual file system


class Switch(argparse.Action):
    """A flag without a value: --flag turns it on, --no-flag turns it off again."""

    def __init__(self, option_strings: Sequence[str], dest: str, default: bool = False, **options: Any):
        off = [f"--no-{name.removeprefix('--')}" for name in option_strings]
        super().__init__([*option_strings, *off], dest, nargs=0, default=default, **options)

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str = "") -> None:
        setattr(namespace, self.dest, not option_string.startswith("--no-"))


class HelpFormatter(argparse.HelpFormatter):
    """One short entry per flag: choices and defaults in words, flags that every task has shown once as --TASK_flag."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=30, width=WIDTH)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = (super(HelpFormatter, self)._fill_text(line, width, indent) for line in text.splitlines())
        return "\n".join("  " * line.startswith("python ") + line for line in lines)

    def add_argument(self, action: argparse.Action) -> None:
        if getattr(action, "shown", True):
            super().add_argument(action)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        name = getattr(action, "shown_as", None) or action.option_strings[0]
        if action.nargs == 0:
            return f"--[no-]{name.removeprefix('--')}" if isinstance(action, Switch) else name
        return f"{name} {self._format_args(action, self._get_default_metavar_for_optional(action))}"

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        if action.choices is not None:
            return "NAME"
        words = {"int": "N", "float": "X", "Path": "PATH"}
        kind = getattr(action.type, "__name__", "")
        return words.get(kind, "TEXT")

    def _metavar_formatter(self, action: argparse.Action, default_metavar: str) -> Callable[[int], tuple[str, ...]]:
        shown = default_metavar if action.metavar is None else action.metavar
        return lambda count: (shown,) * count

    def _get_help_string(self, action: argparse.Action) -> str:
        text, bracket, stated = (action.help or "").partition(" (default: ")
        if action.choices is not None and action.option_strings:
            text += f" {{{', '.join(map(str, action.choices))}}}"
        default = action.default
        if bracket:
            return text + bracket + stated
        if default is None or default is argparse.SUPPRESS or action.nargs == 0:
            return text
        shown = f"{default:g}".replace("e-0", "e-") if isinstance(default, float) else as_text(default)
        return f"{text} (default: {shown})"


class ArgumentParser(argparse.ArgumentParser):
    """argparse with recipes, needs, suggestions for misspelled flags, and dashes and underscores alike.

    Everything that is wrong with a command line is an InputError, whose message is one line.
    """

    def __init__(
        self,
        script: str,
        description: str,
        *examples: str,
        usage: str = "[flags]",
        sections: Sequence[str] = (),
        recipes: bool = True,
    ):
        """sections: the titles of the help page's sections in reading order.

        recipes: whether @FILE stands for flags; a script that takes sentences may get one that begins with @.
        """
        lines = [description, *(f"  {example}" for example in examples)]
        super().__init__(
            prog=script,
            usage=f"{script} {usage}",
            description="\n".join(lines),
            formatter_class=HelpFormatter,
            allow_abbrev=False,
            add_help=False,
        )
        self.recipes = recipes
        self.sections = {title: self.add_argument_group(title) for title in sections}

    def section(self, title: str) -> Callable[..., argparse.Action]:
        """The function that adds flags to this section of the help page; a new title adds a section at the end.

        It takes what add_argument takes, and: needs, a Need or several, or ALWAYS; of_task, the name of the task whose
        flag this is, so that the help page can show one entry for all tasks.
        """
        if title not in self.sections:
            self.sections[title] = self.add_argument_group(title)
        return partial(self._add_flag, self.sections[title])

    def _add_flag(
        self, group: Any, *names: str, needs: Need | tuple[Need, ...], of_task: str | None = None, **options: Any
    ) -> argparse.Action:
        action = group.add_argument(*names, **options)
        action.needs = (needs,) if isinstance(needs, Need) else needs
        if of_task is not None:
            action.shown_as = f"--TASK_{action.dest.removeprefix(of_task + '_')}"
            same = [a for a in self._actions if getattr(a, "shown_as", None) == action.shown_as]
            action.shown = len(same) == 1
        return action

    @property
    def flags(self) -> dict[str, argparse.Action]:
        """Every flag as it is written, and what argparse knows about it."""
        return self._option_string_actions

    def error(self, message: str) -> None:
        if match := re.match(r"unrecognized arguments: (\S+)", message):
            unknown = match[1]
            if unknown.endswith(".txt"):
                raise InputError(f"{unknown} is not a flag. A recipe is given as @{unknown}.")
            if not unknown.startswith("-"):
                raise InputError(f"unexpected argument {unknown!r}: it belongs to no flag. See {self.prog} --help.")
            hint = suggestion(unknown.partition("=")[0], self.flags)
            raise InputError(f"unknown flag {unknown}.{hint} See {self.prog} --help.")
        if match := re.match(r"argument (\S+): invalid choice: '?([^']*?)'? \(choose from (.*)\)", message):
            flag, found, known = match[1].split("/")[0], match[2], [c.strip(" '") for c in match[3].split(",")]
            hint = " Separate values by spaces." if "," in found else suggestion(found, known)
            raise InputError(
                f"{flag} must be one of {', '.join(known)}; found {found!r}.{hint} See {self.prog} --help."
            )
        message = re.sub(r"^argument ([^\s/:]+)\S*:", r"\1:", message)  # a flag with two names is shown once
        raise InputError(f"{message.rstrip('.')}. See {self.prog} --help.")

    # Recipes and spelling

    def expand(self, argv: Sequence[str]) -> list[str]:
        """Replace every @FILE by the flags in that file; write every flag as this parser spells it."""
        return self._expanded(argv, (), [])

    def _expanded(self, argv: Sequence[str], inside: tuple[Path, ...], read: list[Path]) -> list[str]:
        """inside: the recipes that include these words, the innermost last. read: all recipes read so far."""
        tokens: list[str] = []
        for token in argv:
            if not token.startswith("@") or not self.recipes:
                tokens.append(self._spelled(token))
                continue
            path = find_recipe(token, inside[-1].parent if inside else None)
            if path in inside:
                raise InputError(f"@{path}: a recipe must not include itself, found it inside {inside[-1]}. Remove it.")
            read.append(path)
            if len(read) > MOST_RECIPES:
                raise InputError(f"@{path}: at most {MOST_RECIPES} recipes may include each other. Remove some.")
            words = read_recipe(path)
            if words and not words[0].startswith("@") and not FLAG.fullmatch(words[0]) and not self._is_run(words[0]):
                raise not_a_recipe(words[0].place)  # here: its words would pass for values of the flag before it
            tokens += self._expanded(words, (*inside, path), read)
        return tokens

    def _spelled(self, token: str) -> str:
        name, equals, value = token.partition("=")
        if not name.startswith("--") or name in self.flags:
            return token
        plain = {flag.replace("-", "_"): flag for flag in self.flags}
        spelled = plain.get(name.replace("-", "_"), name) + equals + value
        return FromRecipe(spelled, token.place) if isinstance(token, FromRecipe) else spelled

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        tokens = self.expand(sys.argv[1:] if args is None else list(args))
        self.refuse_foreign_words(tokens)
        return super().parse_args(tokens, namespace)

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        tokens = self.expand(sys.argv[1:] if args is None else list(args))
        if {"-h", "--help"} & set(tokens):  # here, so that nothing else on the line can be wrong first
            self.print_help()
            self.exit()
        for token in tokens:
            if "\0" in token:
                raise InputError(f"an argument must not contain a NUL character, found {token!r:.80}. Remove it.")
        args, rest = super().parse_known_args(tokens, namespace)
        self._check_paths(args)
        return args, rest

    def refuse_foreign_words(self, tokens: Sequence[str]) -> None:
        """Refuse the words of a recipe that are neither a flag of this parser nor its value, without showing them."""
        for first, *_ in self.by_flag(list(tokens)):
            if not isinstance(first, FromRecipe) or first.partition("=")[0] in self.flags:
                continue
            if flag := FLAG.fullmatch(first):
                raise InputError(
                    f"unknown flag {flag[1]}.{suggestion(flag[1], self.flags)} It is in {first.place}; "
                    "its comment says which script it is for."
                )
            if not self._is_run(first):
                raise not_a_recipe(first.place)

    def _is_run(self, word: str) -> bool:
        """Whether a recipe's word can name a run, such as runs/NAME, and this parser takes such names."""
        takes_names = any(not action.option_strings for action in self._actions)
        return takes_names and re.fullmatch(r"(\w[\w.+-]*/)+\w[\w.+-]*", word) is not None

    def _check_paths(self, args: argparse.Namespace) -> None:
        """Refuse file names that no file system has; opening one would fail in the middle of a run."""
        for action in self._actions:
            value = getattr(args, action.dest, None)
            if action.type is not Path and "PATH" not in str(action.metavar) and action.dest not in ("model", "name"):
                continue
            for path in value if isinstance(value, list) else [value]:
                longest = max((len(part.encode(errors="replace")) for part in str(path).split("/")), default=0)
                if longest > LONGEST_NAME:
                    raise InputError(
                        f"{(action.option_strings or [action.dest])[0]}: a file name must have at most {LONGEST_NAME} "
                        f"bytes, found {longest}. Shorten it."
                    )

    # Flags that would do nothing

    def parse(
        self,
        argv: Sequence[str] | None,
        complete: Callable[[argparse.Namespace], argparse.Namespace] = lambda args: args,
    ) -> argparse.Namespace:
        """Parse a command line, drop flags that later flags made pointless, and refuse flags that do nothing.

        complete: fills in the defaults that follow from other flags.
        """
        args = complete(self.parse_args(self.effective(argv, complete)))
        self.refuse_idle_flags(args)
        return args

    def effective(
        self,
        argv: Sequence[str] | None,
        complete: Callable[[argparse.Namespace], argparse.Namespace] = lambda args: args,
        *,
        droppable: Callable[[str], bool] = lambda flag: isinstance(flag, FromRecipe),
    ) -> list[str]:
        """The command line without the flags that a later flag made pointless; a note names them.

        droppable: which flags may be dropped; by default those of recipes. Two flags that contradict each other on the
        command line itself are a mistake.
        """
        given = self.by_flag(self.expand(sys.argv[1:] if argv is None else argv))
        kept, switched_off = given, {}  # the latter: dropped flags, by the flag that made them pointless
        while True:  # dropping one flag can make another pointless
            idle = [action for action, _ in self.idle_flags(complete(self.parse_args(self.flat(kept))))]
            later = {action: self._switched_off_by(action, given, complete, droppable) for action in idle}
            dropped = [action for action in idle if later[action] is not None]
            if not dropped:
                break
            for action in dropped:
                switched_off.setdefault(" ".join(later[action]), []).append(f"--{action.dest}")
            kept = [tokens for tokens in kept if self._action(tokens) not in dropped]
        for flag, names in switched_off.items():
            warn(f"{', '.join(names)}: no effect with {flag}, so dropped.")
        return self.flat(kept)

    def idle_flags(self, args: argparse.Namespace) -> list[tuple[argparse.Action, Need]]:
        """The flags whose value differs from the default and has no effect, each with the need that is not met."""
        idle = []
        for action in self._actions:
            if getattr(args, action.dest, action.default) == action.default:
                continue
            unmet = next((need for need in action.needs if not need.is_met(args)), None)
            if unmet is not None:
                idle.append((action, unmet))
        return idle

    def refuse_idle_flags(self, args: argparse.Namespace, only: Container[str] | None = None) -> None:
        """only: the destinations of the flags to check; by default all."""
        for action, need in self.idle_flags(args):
            if only is None or action.dest in only:
                value = getattr(args, action.dest)
                flag = f"--{action.dest}" if value is True else f"--{action.dest} {as_text(value)}"
                remedy = need.remedy or f"Use {need.what}"
                raise InputError(f"{flag} needs {need.what}. {remedy}, or leave out --{action.dest}.")

    def by_flag(self, tokens: list[str]) -> list[list[str]]:
        """The command line as groups: each flag with its values; every positional argument is a group of its own."""
        groups: list[list[str]] = []
        room = 0  # for further values of the last flag
        for token in tokens:
            if token.startswith("--") and token != "--":
                name, equals, _ = token.partition("=")
                nargs = getattr(self.flags.get(name), "nargs", None)
                room = 0 if equals else {None: 1, 0: 0}.get(nargs, len(tokens))
                groups.append([token])
            elif room:
                room -= 1
                groups[-1].append(token)
            else:
                groups.append([token])
        return groups

    def flat(self, groups: Iterable[list[str]]) -> list[str]:
        """The inverse of by_flag; positional arguments come first, so that no flag can take them for its values."""
        ordered = sorted(groups, key=lambda tokens: self._action(tokens) is not None)
        return list(itertools.chain.from_iterable(ordered))

    def _action(self, tokens: list[str]) -> argparse.Action | None:
        return self.flags.get(tokens[0].partition("=")[0])

    def _switched_off_by(
        self,
        action: argparse.Action,
        given: list[list[str]],
        complete: Callable[[argparse.Namespace], Any],
        droppable: Callable[[str], bool],
    ) -> list[str] | None:
        """The later flag without which this one would have an effect; None if it never had one, or must stay."""
        last = max((i for i, tokens in enumerate(given) if self._action(tokens) is action), default=len(given))
        if last < len(given) and not droppable(given[last][0]):
            return None

        def has_effect(groups: list[list[str]]) -> bool:
            try:
                args = complete(self.parse_args(self.flat(groups)))
                return all(need.is_met(args) for need in action.needs)
            except InputError:
                return False

        later = range(len(given) - 1, last, -1)
        culprits = [i for i in later if has_effect([*given[:i], *given[i + 1 :]])]  # this one flag left out
        culprits += [i for i in later if has_effect(given[:i])]  # several flags switched it off, one after the other
        return given[culprits[0]] if culprits else None


def as_text(value: Any) -> str:
    """A flag's value as one would write it on the command line."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


# --- recipes ----------------------------------------------------------------------------------------------------------


def find_recipe(token: str, beside: Path | None = None) -> Path:
    """The file of flags; a relative path is also looked for beside the scripts and beside a recipe that includes it.

    token: as it was given, with the @.
    """
    name = token[1:]
    for path in (Path(name), PROJECT / name, (beside or PROJECT) / name):
        with contextlib.suppress(OSError, ValueError):  # a name that is too long, or has a NUL in it
            if path.is_file():
                return path.resolve()
    recipes = [path.relative_to(PROJECT).as_posix() for path in sorted((PROJECT / "recipes").rglob("*.txt"))]
    same_name = [recipe for recipe in recipes if Path(recipe).name == Path(name).name]
    hint = f" Did you mean {same_name[0]}?" if same_name else suggestion(name[:200], recipes)
    if isinstance(token, FromRecipe):
        raise InputError(f"{token.place}: includes a recipe that does not exist.{hint} Correct the name after the @.")
    raise InputError(f"{token}: no such recipe.{hint} recipes/README.md lists them all.")


def not_a_recipe(place: str) -> InputError:
    """The error for a line that has no place in a recipe. It does not show the line, which may be private."""
    return InputError(
        f"{place} is not a flag. A recipe must consist of flags and their values; recipes/README.md lists all recipes."
    )


def read_recipe(path: Path) -> list[FromRecipe]:
    """The words of a recipe without its comments. No message shows any text of a file that is not a recipe."""
    try:
        size = path.stat().st_size
        text = path.read_bytes().decode("utf-8-sig") if size <= LARGEST_RECIPE else ""
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InputError(f"@{path}: cannot be read; {reason}. recipes/README.md lists all recipes.") from error
    if size > LARGEST_RECIPE:
        raise InputError(f"@{path}: a recipe must have at most {LARGEST_RECIPE} bytes, found {size}. Is it a recipe?")
    words: list[FromRecipe] = []
    for number, line in enumerate(text.splitlines(), 1):
        place = f"{path} line {number}"
        if "\0" in line:
            raise InputError(f"{place}: must be text, found a NUL byte. Is the file a recipe?")
        in_line = line.partition("#")[0].split()
        longest = max(map(len, in_line), default=0)
        if longest > LONGEST_WORD:
            raise InputError(
                f"{place}: a word must have at most {LONGEST_WORD} characters, found {longest}. Is the file a recipe?"
            )
        words += [FromRecipe(word, place) for word in in_line]
    return words


# --- flags of an earlier run ------------------------------------------------------------------------------------------


def check_stored(parser: argparse.ArgumentParser, stored: dict[str, Any], source: Path) -> dict[str, Any]:
    """Return the stored flags of a run if each has a value that the parser could have given it.

    stored: read from JSON. Flags that the parser does not know are ignored, and flags may be missing: the run may be
    older, or newer. source: the file, for the message.
    """
    for action in parser._actions:
        if action.dest not in stored or action.default is argparse.SUPPRESS:
            continue
        value = stored[action.dest]
        if value is None and action.default is None:
            continue
        try:
            _check_value(action, value)
        except argparse.ArgumentTypeError as error:
            raise InputError(f"{source}: {action.dest} {error}. Restore the file, or train the run again.") from error
    return stored


def _check_value(action: argparse.Action, value: Any) -> None:
    """Raise an ArgumentTypeError that says what the value of this flag must be and what it is."""
    found = f"found {value!r:.80}"
    if isinstance(action, Switch):
        if not isinstance(value, bool):
            raise argparse.ArgumentTypeError(f"must be true or false, {found}")
        return
    several = action.nargs in ("+", "*")
    one_of_several = isinstance(value, str) and action.type is None and action.choices is None  # a default file
    if several and not one_of_several:
        if not isinstance(value, list) or (action.default and not value):
            raise argparse.ArgumentTypeError(f"must be a list of values, {found}")
        for item in value:
            _check_item(action, item)
    else:
        _check_item(action, value)


def _check_item(action: argparse.Action, value: Any) -> None:
    found = f"found {value!r:.80}"
    kind = {"int": int, "float": int | float}.get(getattr(action.type, "__name__", ""), str)
    if not isinstance(value, kind) or isinstance(value, bool):
        names = {int: "a whole number", str: "text"}
        raise argparse.ArgumentTypeError(f"must be {names.get(kind, 'a number')}, {found}")
    if isinstance(value, str) and "\0" in value:
        raise argparse.ArgumentTypeError(f"must not contain a NUL character, {found}")
    parsed = value if action.type in (None, Path) else action.type(str(value))  # raises the error of the command line
    if action.choices is not None and parsed not in action.choices:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(map(str, action.choices))}, {found}")
