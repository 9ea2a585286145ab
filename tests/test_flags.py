"""Command lines: recipes, spelling, suggestions, flags that need each other, help pages, and what a run imports."""

import argparse
import contextlib
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

import classifier
import ensemble
import flags
import losses
import multitask_classifier
import multitask_flags
import pretrain
import sweep
from flags import ALWAYS, ArgumentParser, Need, Switch, number, parse_spec
from tasks import TASKS
from utils import InputError

PARSERS: dict[str, Callable[[], ArgumentParser]] = {
    "classifier.py": classifier.parser,
    "multitask_classifier.py": multitask_flags.parser,
    "pretrain.py": pretrain.parser,
    "ensemble.py": ensemble.parser,
    "sweep.py": sweep.parser,
}
COMPLETE: dict[str, Callable[[argparse.Namespace], argparse.Namespace]] = {
    "classifier.py": classifier.complete,
    "multitask_classifier.py": multitask_flags.complete,
    "pretrain.py": pretrain.complete,
    "ensemble.py": ensemble.complete,
    "sweep.py": lambda args: args,
}
REQUIRED = {"ensemble.py": ["runs/a", "runs/b"], "sweep.py": ["--search", "lr=1e-4"]}  # flags that a script insists on
RECIPES = ROOT / "recipes"


def of_script(script: str) -> list[str]:
    """The recipes for this script, from the command in their comments."""
    names = [path.relative_to(ROOT).as_posix() for path in sorted(RECIPES.rglob("*.txt"))]
    return [name for name in names if re.search(rf"^# .*python3? {script} @{name}", (ROOT / name).read_text(), re.M)]


PART_2_RECIPES = of_script("multitask_classifier.py")


@pytest.fixture(autouse=True)
def in_the_projects_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths mean what they mean to a user who runs the scripts in their directory."""
    monkeypatch.chdir(ROOT)


def part_2(line: str, *more: str) -> argparse.Namespace:
    return multitask_classifier.get_args([*line.split(), *more, "--name", "r"])


def refusal(call: Callable[..., object], *arguments: object) -> str:
    """The message with which a command line is refused: one line."""
    with pytest.raises(InputError) as refused:
        call(*arguments)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def dropped_flags(err: str) -> set[str]:
    """The flags that the notes on stderr name as dropped; there must be nothing but such notes."""
    lines = err.splitlines()
    found = [re.fullmatch(r"note: (--.+?): no effect with (.+), so dropped\.", line) for line in lines]
    assert all(found), err
    names = [name for match in found for name in match[1].split(", ")]
    assert len(set(names)) == len(names), err
    return {name.removeprefix("--") for name in names}


# --- spelling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", PARSERS)
def test_every_flag_may_be_written_with_dashes_or_underscores(script: str):
    parser = PARSERS[script]()
    for name in parser.flags:
        for spelled in (name, "--" + name[2:].replace("_", "-"), "--" + name[2:].replace("-", "_")):
            for suffix in ("", "=1e-5", "=a-b_c"):
                (token,) = parser.expand([spelled + suffix])
                flag, equals, value = token.partition("=")
                assert parser.flags[flag] is parser.flags[name], spelled
                assert equals + value == suffix, "the value is left alone"


def test_dashes_and_underscores_mean_the_same_flag_and_values_are_left_alone():
    args = part_2("--batch-size 4 --sst-head=mlp --max_length=40 --sts-dev-out my-out_file.csv --no-use-gpu")
    assert (args.batch_size, args.sst_head, args.max_length, args.use_gpu) == (4, "mlp", 40, False)
    assert args.sts_dev_out == "my-out_file.csv"
    for flag in ("--fine-tune-mode", "--fine_tune_mode", "--fine-tune_mode"):
        assert part_2(f"{flag} full-model").option == "finetune"
    assert classifier.get_args(["--cfimdb-batch-size", "3"]).cfimdb_batch_size == 3


@pytest.mark.parametrize("script", PARSERS)
def test_every_switch_can_be_turned_off_again(script: str):
    parser = PARSERS[script]()
    switches = {action for action in parser._actions if isinstance(action, Switch)}
    assert all(action.nargs != 0 or action in switches for action in parser._actions), "every flag without a value"
    for action in switches:
        on = action.option_strings[0]
        off = f"--no-{on.removeprefix('--')}"
        for given, wanted in (([], False), ([on], True), ([on, off], False), ([off, on], True), ([off], False)):
            args = parser.parse_args([*REQUIRED.get(script, []), *given])
            assert getattr(args, action.dest) is wanted, given


def test_a_switch_of_a_recipe_is_turned_off_by_no(tmp_path: Path):
    recipe = tmp_path / "recipe.txt"
    recipe.write_text("--symmetric\n--strict_data\n")
    args = part_2(f"@{recipe}")
    assert (args.symmetric, args.strict_data) == (True, True)
    args = part_2(f"@{recipe} --no-symmetric --no_strict-data")
    assert (args.symmetric, args.strict_data) == (False, False)


def test_a_switch_takes_no_value():
    assert "use_gpu" in refusal(part_2, "--use_gpu=1")
    assert refusal(part_2, "--use_gpu True").startswith("unexpected argument 'True': it belongs to no flag.")


def test_flags_are_not_abbreviated():
    assert refusal(part_2, "--epoch 3") == (
        "unknown flag --epoch. Did you mean --epochs? See multitask_classifier.py --help."
    )


# --- suggestions ------------------------------------------------------------------------------------------------------

MISSPELLED = {
    "--lerning_rate 1": None,
    "--bach_size 3": "--batch_size",
    "--bach-size=3": "--batch_size",
    "--smart_step 3": "--smart_steps",
    "--no-use_gpus": "--no-use_gpu",
    "--xyzzy": None,
    "--combiner pcgard": "pcgrad",
    "--combiner=pcgard": "pcgrad",
    "--tasks sst paras": "para",
    "--sts_pooling maen": "mean",
    "--combiner xyzzy": None,
    "--sst_loss ce_smoth": "ce_smooth",
    "--option finetune --regularizer smart+rdorp": "rdrop",
    "@recipes/bets.txt": "recipes/best.txt",
    "@best.txt": "recipes/best.txt",
    "@recipes/more-data.txt": "recipes/smarter/more-data.txt",
    "@cross-pcgrad-smart2.txt": "recipes/smarter/cross-pcgrad-smart2.txt",
    "@cross.txt": "recipes/smarter/cross.txt",
    "@xyzzy": None,
}


@pytest.mark.parametrize("line", MISSPELLED)
def test_a_misspelled_flag_choice_or_recipe_is_answered_with_the_nearest_one(line: str):
    message = refusal(part_2, line)
    suggested = re.search(r"Did you mean (\S+)\?", message)
    if MISSPELLED[line] is None:
        assert not suggested, message
    else:
        assert suggested, message
        assert suggested[1] == MISSPELLED[line]
    assert line.split()[-1].partition("=")[2] in message


def test_a_suggestion_names_the_most_similar_word_or_none():
    assert flags.suggestion("pcgard", ["sum", "pcgrad", "cagrad"]) == " Did you mean pcgrad?"
    assert flags.suggestion("xyzzy", ["sum", "pcgrad", "cagrad"]) == ""
    assert flags.suggestion("sum", []) == ""


# --- recipes ----------------------------------------------------------------------------------------------------------


def test_a_recipe_is_found_beside_the_scripts_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    here = {name: vars(part_2(f"@{name}")) for name in (*PART_2_RECIPES[:3], "recipes/extensions/lora.txt")}
    monkeypatch.chdir(tmp_path)
    for name, wanted in here.items():
        assert vars(part_2(f"@{name}")) == wanted


def test_a_recipe_in_the_working_directory_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "quickstart.txt").write_text("--epochs 77\n")
    assert part_2("@recipes/quickstart.txt").epochs == 77
    assert part_2(f"@{ROOT / 'recipes' / 'quickstart.txt'}").epochs != 77


def test_a_recipe_has_comments_blank_lines_and_other_recipes_and_later_flags_win(tmp_path: Path):
    inner, outer = tmp_path / "inner.txt", tmp_path / "outer.txt"
    inner.write_text("# a comment\n--epochs 3 --lr 5e-5   # two flags\n\n--tasks\n  sst\n  sts\n")
    outer.write_text(f"--epochs 2\n@{inner}\n--seed 7")
    args = part_2(f"@{outer}")
    assert (args.epochs, args.lr, args.tasks, args.seed) == (3, 5e-5, ["sst", "sts"], 7)
    assert part_2(f"@{outer} --epochs 9").epochs == 9
    assert part_2(f"--epochs 9 @{outer}").epochs == 3


def test_a_recipe_that_includes_itself_is_refused(tmp_path: Path):
    one, other, third = (tmp_path / f"{name}.txt" for name in ("one", "other", "third"))
    one.write_text(f"--epochs 3\n@{one}\n")
    assert refusal(part_2, f"@{one}") == (
        f"@{one}: a recipe must not include itself, found it inside {one.resolve()}. Remove it."
    )
    one.write_text(f"@{other}\n")
    other.write_text(f"@{third}\n")
    third.write_text(f"--epochs 3 @{one}\n")
    assert f"@{one}: a recipe must not include itself, found it inside {third.resolve()}." in refusal(part_2, f"@{one}")


def test_a_recipe_may_be_included_twice(tmp_path: Path):
    one, other = tmp_path / "one.txt", tmp_path / "other.txt"
    one.write_text("--epochs 3\n")
    other.write_text(f"@{one} --epochs 4 @{one}\n")
    assert part_2(f"@{other} @{one}").epochs == 3


@pytest.mark.parametrize(
    ("content", "reason"), [(b"--name caf\xe9\n", "it is not UTF-8 text"), (None, "no such recipe.")]
)
def test_a_recipe_that_cannot_be_read_is_named(content: bytes | None, reason: str, tmp_path: Path):
    path = tmp_path / "recipe.txt"
    path.mkdir() if content is None else path.write_bytes(content)
    message = refusal(part_2, f"@{path}")
    assert message.startswith(f"@{path}: ")
    assert reason in message
    assert "recipes/README.md" in message


# --- flags that a later flag makes pointless --------------------------------------------------------------------------

# the setting, the flag that gives it an effect, the flag that takes it away
TURNED_OFF = [
    ("--smart_steps 3", "--regularizer smart", "--regularizer none"),
    ("--smart_variant 1", "--regularizer smart+bregman", "--regularizer rdrop"),
    ("--cagrad_c 0.5", "--combiner cagrad", "--combiner sum"),
    ("--combiner pcgrad", "--sampler round_robin", "--sampler uniform"),
    ("--combiner pcgrad", "--tasks sst para", "--tasks sst"),
    ("--regularizer rdrop", "--option finetune", "--option pretrain"),
    ("--regularizer rdrop", "--option finetune", "--fine-tune-mode last-linear-layer"),
    ("--lora_r 2", "--adapter lora", "--adapter none"),
    ("--adapter_only", "--adapter pal", "--adapter mixout"),
    ("--ema_decay 0.5", "--averager ema", "--averager none"),
    ("--decay_matrices_only", "--weight_decay 0.1", "--weight_decay 0"),
    ("--task_weights sts=2", "--weighting fixed", "--weighting equal"),
    ("--mnrl_scale 3", "--para_loss bce+mnrl", "--para_loss bce"),
    ("--mnrl_scale 3", "--para_loss=bce+mnrl", "--para_loss=bce"),
    ("--label_smoothing 0.2", "--sst_loss ce_smooth", "--sst_loss ce"),
    ("--para_head mlp", "--tasks sst para", "--tasks sst"),
    ("--para_loss bce:2", "--tasks sst para", "--tasks sst"),
    ("--pairing cross", "--tasks sst para", "--tasks sst"),
    ("--share_pair_layer", "--tasks para sts", "--tasks sst sts"),
    ("--pos_dim 8", "--feature pos", "--feature none"),
]


@pytest.mark.parametrize(("setting", "on", "off"), TURNED_OFF)
def test_a_flag_that_a_later_one_made_pointless_is_dropped_with_a_note(
    setting: str, on: str, off: str, capsys: pytest.CaptureFixture, tmp_path: Path
):
    """If it comes from a recipe."""
    tuned, recipe = "--option finetune ", tmp_path / "recipe.txt"
    plain = vars(part_2(tuned + on + " " + off))
    assert capsys.readouterr().err == ""
    for line in (f"{on} {setting}", f"{setting} {on}"):
        recipe.write_text(tuned + line)
        for later in (off, f"{off} --epochs 10 --lr 1e-5"):
            assert vars(part_2(f"@{recipe} {later}")) == plain, line
            flag = setting.split()[0]
            assert capsys.readouterr().err == f"note: {flag}: no effect with {off}, so dropped.\n"


@pytest.mark.parametrize(("setting", "on", "off"), TURNED_OFF)
def test_two_flags_of_the_command_line_that_contradict_each_other_are_refused(setting: str, on: str, off: str):
    message = refusal(part_2, f"--option finetune {on} {setting} {off}")
    assert message.endswith(f"leave out {setting.split()[0]}.")


@pytest.mark.parametrize(("setting", "on", "off"), TURNED_OFF)
def test_the_same_flag_is_refused_after_the_one_that_makes_it_pointless(
    setting: str, on: str, off: str, capsys: pytest.CaptureFixture
):
    for line in (f"{off} {setting}", f"{on} {off} {setting}", f"{on} {setting} {off} {setting}"):
        message = refusal(part_2, "--option finetune " + line)
        flag = setting.split()[0]
        assert re.match(rf"{flag}.* needs .*\. .*leave out {flag}\.$", message), message
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("setting", "on", "off"), TURNED_OFF)
def test_a_flag_has_its_effect_whether_it_comes_before_or_after_what_it_needs(
    setting: str, on: str, off: str, capsys: pytest.CaptureFixture
):
    for line in (f"{on} {setting}", f"{setting} {on}", f"{off} {setting} {on}"):
        args = vars(part_2("--option finetune " + line))
        name = setting.split()[0].removeprefix("--")
        assert args[name] != multitask_flags.parser().flags[f"--{name}"].default
        assert capsys.readouterr().err == ""


def test_a_flag_at_its_default_value_is_never_refused(capsys: pytest.CaptureFixture):
    part_2("--regularizer none --smart_steps 1 --combiner sum --cagrad_c 0.4 --no-adapter_only --tasks sst")
    assert capsys.readouterr().err == ""


def test_what_depends_on_a_dropped_flag_is_dropped_too(capsys: pytest.CaptureFixture, tmp_path: Path):
    """--regularizer smart needs an encoder that trains, and --smart_steps needs --regularizer smart."""
    recipe = tmp_path / "recipe.txt"
    line = "--option finetune --regularizer smart --smart_steps 3 --adapter lora --adapter_only --lora_r 2 --epochs 2"
    recipe.write_text(line)
    args = part_2(f"@{recipe} --option pretrain --seed 3")
    assert dropped_flags(capsys.readouterr().err) == {"regularizer", "smart_steps", "adapter", "adapter_only", "lora_r"}
    assert vars(args) == vars(part_2("--epochs 2 --seed 3"))


# What is dropped of a recipe if one flag follows it.
OVERRIDDEN = {
    ("recipes/quickstart.txt", "--regularizer none"): {"smart_variant"},
    ("recipes/quickstart.txt", "--tasks sst"): {"para_head", "sts_head", "para_fraction", "combiner"},
    ("recipes/quickstart.txt", "--option pretrain"): {"combiner", "regularizer", "smart_variant"},
    ("recipes/quickstart.txt", "--combiner sum"): set(),
    ("recipes/smarter/cross-pcgrad-smart1.txt", "--regularizer none"): {
        "smart_variant", "smart_start", "smart_radius", "smart_norm"
    },
    ("recipes/smarter/cross-pcgrad-smart1.txt", "--combiner sum"): set(),
    ("recipes/best.txt", "--tasks sst"): {"pairing", "para_head", "sts_head", "symmetric", "adapter", "own_layers"},
    ("recipes/fast.txt", "--tasks sst"): {
        "para_pairing", "sts_pairing", "sts_head", "symmetric", "adapter", "own_layers"
    },
    ("recipes/extensions/lora.txt", "--option pretrain"): {
        "regularizer", "adapter", "adapter_only", "lora_r", "lora_on"
    },
}  # fmt: skip


@pytest.mark.parametrize(("recipe", "flag"), OVERRIDDEN)
def test_one_flag_overrides_a_whole_recipe(recipe: str, flag: str, capsys: pytest.CaptureFixture):
    parser = multitask_flags.parser()
    given = {group[0].removeprefix("--") for group in parser.by_flag(parser.expand([f"@{recipe}"]))}
    expected = {name for name in OVERRIDDEN[recipe, flag] if name in given}
    args = vars(part_2(f"@{recipe} {flag}"))
    err = capsys.readouterr().err
    assert dropped_flags(err) == expected
    assert err.count(f"no effect with {flag}, so dropped.") == bool(expected), err
    plain = vars(parser.parse_args([f"@{recipe}", *flag.split()]))
    filled_in = {"name", "train_tasks", "fine_tune_mode"} | {key for key in args if re.match(r"(sst|para|sts)_", key)}
    for name in plain.keys() - filled_in - expected:
        assert args[name] == plain[name], f"--{name} is what the recipe or the flag says"
    for name in expected - filled_in:
        assert args[name] == parser.flags[f"--{name}"].default


@pytest.mark.parametrize("recipe", PART_2_RECIPES)
def test_every_recipe_of_part_2_can_be_cut_down_to_one_task(recipe: str, capsys: pytest.CaptureFixture):
    args = part_2(f"@{recipe} --regularizer none --combiner sum --tasks sst")
    assert (args.regularizer, args.combiner, args.tasks, args.train_tasks) == ("none", "sum", ["sst"], ["sst"])
    dropped_flags(capsys.readouterr().err)


def test_the_notes_of_a_dropped_flag_and_the_run_agree(
    tiny_checkpoint: Path, task_files: Path, tmp_path: Path, run_main: Callable[..., Any]
):
    usual = ["--model", tiny_checkpoint, "--data", task_files, "--runs", tmp_path / "runs", "--name", "r"]
    usual += ["--predictions", tmp_path / "predictions", "--epochs", 1]
    done = run_main(multitask_classifier, "@recipes/quickstart.txt", *usual, "--regularizer", "none")
    assert done.status == 0, done.err
    assert dropped_flags(done.err) == {"smart_variant"}
    stored = json.loads((tmp_path / "runs" / "r" / "args.json").read_text())["args"]
    assert (stored["regularizer"], stored["smart_variant"], stored["combiner"]) == ("none", 0, "pcgrad")


# --- flags that do nothing, in every script ---------------------------------------------------------------------------

IDLE = {
    "classifier.py": {
        "--ema_decay 0.9": "--ema_decay 0.9 needs --averager ema. Use --averager ema, or leave out --ema_decay.",
        "--average_start 0.1": "--average_start 0.1 needs --averager swa. Use ",
        "--layer_decay 0.9": "--layer_decay 0.9 needs an encoder that trains, which --option pretrain (the handout's",
        "--tasks sst --cfimdb_batch_size 3": "--cfimdb_batch_size 3 needs cfimdb among --tasks.",
        "--tasks cfimdb --batch_size 3": "--batch_size 3 needs sst among --tasks.",
        "--decay_matrices_only": "--decay_matrices_only needs --weight_decay. Use --weight_decay, or leave out",
    },
    "multitask_classifier.py": {
        "--smart_steps 3": "--smart_steps 3 needs --regularizer smart. Use ",
        "--cfimdb_head mlp": "--cfimdb_head mlp needs cfimdb among --tasks. Add ",
        "--predict_train": "--predict_train needs --predict_only. Use --predict_only, or leave out --predict_train.",
    },
    "pretrain.py": {
        "--objective simcse --mask_share 0.3": "--mask_share 0.3 needs --objective mlm. Use ",
        "--objective simcse --whole_word": "--whole_word needs --objective mlm. Use ",
        "--temperature 0.1": "--temperature 0.1 needs --objective simcse or simcse_supervised. Use ",
        "--objective mlm+simcse --positives_only": "--positives_only needs --objective simcse_supervised.",
        "--nli a.jsonl": "--nli a.jsonl needs --objective simcse_supervised. Use ",
        "--objective simcse_supervised --text a.txt": "--text a.txt needs --objective mlm or nsp or simcse.",
        "--objective simcse_supervised --nli a.jsonl --tasks para": "--tasks para needs an objective that reads the",
        "--averager swa --ema_decay 0.9": "--ema_decay 0.9 needs --averager ema. Use ",
    },
    "ensemble.py": {
        "--seed 3": "--seed 3 needs --method weighted. Use --method weighted, or leave out --seed.",
        "--method soup --seed 3": "--seed 3 needs --method weighted. Use --method weighted, or leave out --seed.",
        "--use_gpu": "--use_gpu needs --method soup. Use --method soup, or leave out --use_gpu.",
        "--method vote --average logits": "--average logits needs --method mean or weighted. Use ",
    },
}


@pytest.mark.parametrize(("script", "line"), [(script, line) for script in IDLE for line in IDLE[script]])
def test_a_flag_that_does_nothing_is_refused(script: str, line: str, capsys: pytest.CaptureFixture):
    get_args = importlib.import_module(script.removesuffix(".py")).get_args
    message = refusal(get_args, [*REQUIRED.get(script, []), *line.split()])
    assert message.startswith(IDLE[script][line])
    assert capsys.readouterr().err == ""


WITH_EFFECT = {
    "classifier.py": [
        "--averager ema --ema_decay 0.9",
        "--option finetune --layer_decay 0.9",
        "--tasks cfimdb --cfimdb_batch_size 3",
        "--weight_decay 0.1 --decay_matrices_only",
    ],
    "pretrain.py": [
        "--mask_share 0.3 --whole_word --tasks sst --held_out a.txt",
        "--objective simcse+mlm:0.5 --temperature 0.1 --pooling cls --text a.txt",
        "--objective simcse_supervised --positives_only",
        "--objective simcse_supervised --nli a.jsonl",
        "--objective simcse_supervised --tasks para",
        "--objective mlm+simcse_supervised --nli a.jsonl --tasks sst",
        "--layer_decay 0.9 --compile --checkpoint_activations",
    ],
    "ensemble.py": [
        "--method weighted --seed 3 --average logits",
        "--method soup --use_gpu",
        "--average logits",
        "--tasks sst",
    ],
}


@pytest.mark.parametrize(("script", "line"), [(script, line) for script in WITH_EFFECT for line in WITH_EFFECT[script]])
def test_a_flag_with_what_it_needs_is_accepted(script: str, line: str, capsys: pytest.CaptureFixture):
    get_args = importlib.import_module(script.removesuffix(".py")).get_args
    get_args([*REQUIRED.get(script, []), *line.split()])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "line", ["--average logits runs/a runs/b", "--use_gpu runs/a runs/b --method soup", "--tasks sst --average logits"]
)
def test_a_flag_is_dropped_without_the_runs_that_follow_it(line: str, tmp_path: Path, capsys: pytest.CaptureFixture):
    recipe = tmp_path / "recipe.txt"
    recipe.write_text(line)
    for later in ("--method vote", "--method vote --seed 11711"):
        runs = "" if "runs/a" in line else "runs/a runs/b "
        args = ensemble.get_args(f"{runs}@{recipe} {later}".split())
        assert "no effect with --method vote, so dropped." in capsys.readouterr().err
        assert (args.members, args.method) == ([Path("runs/a"), Path("runs/b")], "vote")
        assert (args.average, args.use_gpu) == ("probabilities", False)


# --- every flag says what it needs ------------------------------------------------------------------------------------


def undeclared(parser: ArgumentParser) -> list[str]:
    """The flags that do not say what they need."""

    def declares(action: argparse.Action) -> bool:
        needs = getattr(action, "needs", None)
        return isinstance(needs, tuple) and all(isinstance(need, Need) for need in needs)

    return [action.dest for action in parser._actions if not declares(action)]


@pytest.mark.parametrize("script", PARSERS)
def test_every_flag_says_what_it_needs(script: str):
    parser = PARSERS[script]()
    assert len(parser._actions) > 5
    assert undeclared(parser) == []


def test_a_flag_that_says_nothing_about_its_needs_is_found():
    parser = ArgumentParser("x.py", "A parser.")
    add = parser.section("files")
    add("--always", needs=ALWAYS)
    add("--one", needs=Need("two", lambda args: args.two))
    add("--two", needs=(Need("one", lambda args: args.one), Need("always", lambda args: args.always)))
    assert undeclared(parser) == []
    parser.add_argument("--outside")
    parser.sections["files"].add_argument("--inside")
    assert undeclared(parser) == ["outside", "inside"]
    with pytest.raises(TypeError, match="needs"):
        add("--forgotten")


@pytest.mark.parametrize("script", PARSERS)
def test_every_need_can_be_asked_of_complete_flags_and_is_a_phrase(script: str):
    parser = PARSERS[script]()
    args = COMPLETE[script](parser.parse_args(REQUIRED.get(script, [])))
    for need in (need for action in parser._actions for need in action.needs):
        assert isinstance(need.is_met(args), bool)
        assert not need.what.endswith(".")
        assert not need.remedy.endswith(".")
        assert need.remedy[:1].isupper() or not need.remedy, "it starts a sentence"


def other_value(parser: ArgumentParser, action: argparse.Action) -> list[str]:
    """The flag with a value that is not its default."""
    name = action.option_strings[0]
    if isinstance(action, Switch):
        return [name]
    default = action.default if isinstance(action.default, list) else [action.default]
    texts = (
        action.choices
        or {"--regularizer": ("rdrop",)}.get(name)
        or ("3", "64", "0.5", "0.25", "last-linear-layer", "sts=2")
    )
    for text in map(str, texts):
        with contextlib.suppress(InputError):
            value = getattr(parser.parse_args([*REQUIRED.get(parser.prog, []), name, text]), action.dest)
            if value not in (action.default, default) and value not in default:
                return [name, text]
    raise AssertionError(f"{name}: no other value found")


FLAGS_WITH_NEEDS = [
    (script, action.dest)
    for script, parser in PARSERS.items()
    for action in parser()._actions
    if getattr(action, "needs", ()) and action.option_strings
]


@pytest.mark.parametrize(("script", "name"), FLAGS_WITH_NEEDS)
def test_every_flag_that_needs_something_is_refused_without_it(script: str, name: str):
    """Given alone, a flag either has all it needs by default, or is refused with the need that is not met."""
    parser = PARSERS[script]()
    given = [*REQUIRED.get(script, []), *other_value(parser, parser.flags[f"--{name}"])]
    args = COMPLETE[script](parser.parse_args(given))
    unmet = [need for need in parser.flags[f"--{name}"].needs if not need.is_met(args)]
    if unmet:
        message = refusal(parser.parse, given, COMPLETE[script])
        assert re.match(rf"--{name}( \S+)? needs {re.escape(unmet[0].what)}\. ", message), message
    else:
        assert getattr(parser.parse(given, COMPLETE[script]), name) != parser.flags[f"--{name}"].default


def test_most_flags_with_needs_are_idle_by_default():
    """Otherwise the test above would show little."""
    parser, idle = multitask_flags.parser(), []
    for action in parser._actions:
        args = multitask_flags.complete(parser.parse_args([*other_value(parser, action), "--name", "r"]))
        idle += [action.dest] * any(not need.is_met(args) for need in action.needs)
    assert {"smart_steps", "rdrop_weight", "cfimdb_head", "teacher", "lora_on", "regularizer"} <= set(idle)
    assert len(idle) > 40


def test_the_flags_of_a_task_need_the_task():
    parser = multitask_flags.parser()
    for name in TASKS:
        of_task = [action for action in parser._actions if action.dest.startswith(f"{name}_")]
        assert len(of_task) >= 9
        for action in of_task:
            assert any(need.what.startswith(f"{name} among ") for need in action.needs), action.dest


def test_the_flags_of_a_method_need_the_method():
    """A flag that is named after a method of a registry has no effect without that method."""
    parser = multitask_flags.parser()
    prefixes = ("smart", "bregman", "rdrop", "cagrad", "gradvac", "ema", "average", "pal", "lora", "mixout", "pos")
    for prefix in prefixes:
        of_method = [action for action in parser._actions if action.dest.startswith(f"{prefix}_")]
        assert of_method, prefix
        args = multitask_flags.complete(parser.parse_args([]))
        assert all(not all(need.is_met(args) for need in action.needs) for action in of_method), prefix


# --- the settings of losses -------------------------------------------------------------------------------------------


def forgotten_settings(parser: ArgumentParser) -> list[str]:
    """The settings of losses that are not flags, or are flags that work without the loss."""
    known = {action.dest: action for action in parser._actions}
    settings = dict.fromkeys(setting for loss in losses.LOSSES.values() for setting in loss.settings)
    return [name for name in settings if name not in known or not known[name].needs]


def test_every_setting_of_a_loss_is_a_flag_with_a_need():
    assert forgotten_settings(multitask_flags.parser()) == []


def test_a_setting_without_a_flag_is_found(monkeypatch: pytest.MonkeyPatch):
    new = replace(losses.LOSSES["mnrl"], settings={"mnrl_scale": losses.GRADED, "mnrl_margin": losses.GRADED})
    monkeypatch.setitem(losses.LOSSES, "new", new)
    parser = ArgumentParser("x.py", "A parser.")
    losses.add_arguments(parser, TASKS.values())
    assert forgotten_settings(parser) == ["mnrl_margin"]
    parser.section("losses and their weights")("--mnrl_margin", needs=ALWAYS)
    assert forgotten_settings(parser) == ["mnrl_margin"]


@pytest.mark.parametrize("name", losses.LOSSES)
def test_the_settings_of_a_loss_are_its_keyword_arguments_with_the_flags_defaults(name: str):
    loss, known = losses.LOSSES[name], multitask_flags.parser().flags
    _, _, *keywords = inspect.signature(loss.function).parameters.values()
    assert [keyword.name for keyword in keywords] == list(loss.settings)
    for keyword in keywords:
        assert known[f"--{keyword.name}"].default == keyword.default
        assert set(loss.settings[keyword.name]) <= set(loss.fits)


SETTINGS = [
    (loss, setting, task)
    for loss, entry in losses.LOSSES.items()
    for setting in entry.settings
    for task in TASKS
    if isinstance(TASKS[task].predicts, entry.fits) and TASKS[task].is_pair >= entry.needs_pair
]


@pytest.mark.parametrize(("loss", "setting", "task"), SETTINGS)
def test_a_setting_has_an_effect_with_its_loss_and_the_targets_it_is_for(loss: str, setting: str, task: str):
    parser = multitask_flags.parser()
    value = other_value(parser, parser.flags[f"--{setting}"])
    line = ["--tasks", task, f"--{task}_loss", f"{TASKS[task].predicts.default_loss}+{loss}", *value]
    if isinstance(TASKS[task].predicts, losses.LOSSES[loss].settings[setting]):
        args = parser.parse(line, multitask_flags.complete)
        assert getattr(args, setting) != parser.flags[f"--{setting}"].default
    else:
        assert f"--{setting}" in refusal(parser.parse, line, multitask_flags.complete)
    without = ["--tasks", task, *value]
    assert f"needs the loss {loss}" in refusal(parser.parse, without, multitask_flags.complete) or loss == "mnrl_head"


# --- specifications ---------------------------------------------------------------------------------------------------


def test_a_specification_is_the_weight_of_each_part():
    known = ["smart", "rdrop", "none"]
    assert parse_spec("smart", known, "--x") == {"smart": 1.0}
    assert parse_spec("rdrop:0.5+smart", known, "--x") == {"rdrop": 0.5, "smart": 1.0}
    assert list(parse_spec("smart:1e-3+rdrop:2", known, "--x").items()) == [("smart", 1e-3), ("rdrop", 2.0)]


BAD_SPECS = {
    "smrat": "--x smrat: must be made of smart, rdrop, found 'smrat'. Did you mean smart?",
    "smart+xyz": "--x smart+xyz: must be made of smart, rdrop, found 'xyz'. Choose one.",
    "": "--x : must be made of smart, rdrop, found ''. Choose one.",
    "smart+": "--x smart+: must be made of smart, rdrop, found ''. Choose one.",
    "smart:1+rdrop+smart:2": "--x smart:1+rdrop+smart:2: each name may appear once, found smart twice. Remove one.",
    "smart:": "--x smart:: the weight of smart must be a number above 0, found ''. Write it like smart:0.2, or leave",
    "smart:0": "--x smart:0: the weight of smart must be a number above 0, found '0'. Write it like smart:0.2",
    "smart:-1": "the weight of smart must be a number above 0, found '-1'.",
    "smart:nan": "the weight of smart must be a number above 0, found 'nan'.",
    "smart:inf": "the weight of smart must be a number above 0, found 'inf'.",
    "smart:x+rdrop": "the weight of smart must be a number above 0, found 'x'.",
    "smart:1:2": "the weight of smart must be a number above 0, found '1:2'.",
}


@pytest.mark.parametrize("spec", BAD_SPECS)
def test_a_specification_that_is_wrong_is_refused(spec: str):
    assert BAD_SPECS[spec] in refusal(parse_spec, spec, ["smart", "rdrop"], "--x")


@pytest.mark.parametrize(
    ("kind", "low", "high", "above", "good", "bad"),
    [
        (int, 1, 5, False, ["1", "5"], ["0", "6", "1.5", "", "x"]),
        (float, 0, 1, False, ["0", "1", "1e-3"], ["-0.1", "1.1", "nan", "inf"]),
        (float, 0, 1, True, ["1e-9", "1"], ["0", "nan", "-1"]),
    ],
)
def test_a_number_lies_within_its_bounds(
    kind: type, low: float, high: float, above: bool, good: list[str], bad: list[str]
):
    parse = number(kind, low, high, above=above)
    assert [parse(text) for text in good] == [kind(text) for text in good]
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError, match=f"number, {'above' if above else 'at least'} {low:g} and"):
            parse(text)


# --- help pages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", PARSERS)
def test_a_help_page_is_narrow_and_says_nothing_about_none(script: str):
    page = PARSERS[script]().format_help()
    assert max(map(len, page.splitlines())) <= 100
    for text in ("None:", "(default: None)", "None", "==SUPPRESS==", "<function", "PosixPath"):
        assert text not in page
    assert "{sst" not in page.partition("\n\n")[0], "the usage line lists no flags"


@pytest.mark.parametrize("script", PARSERS)
def test_a_help_page_has_sections_in_order_and_every_flag_in_its_section(script: str):
    parser = PARSERS[script]()
    page = parser.format_help()
    titles = [title for title in re.findall(r"^(\S.*):$", page, flags=re.M) if not title.startswith("usage")]
    assert titles == list(parser.sections)
    assert titles[0] == "most used"
    if script == "multitask_classifier.py":
        assert titles == list(multitask_flags.SECTIONS)
    entries = dict(zip(titles, re.split(r"^\S.*:$", page, flags=re.M)[-len(titles) :], strict=True))
    for title, group in parser.sections.items():
        for action in group._group_actions:
            shown = getattr(action, "shown_as", None) or (action.option_strings or [action.metavar])[0]
            if isinstance(action, Switch):
                shown = f"--[no-]{shown.removeprefix('--')}"
            lines = re.findall(rf"^  {re.escape(shown)}(?: .*)?$", entries[title], flags=re.M)
            assert len(lines) == 1, (action.dest, lines)


@pytest.mark.parametrize("script", PARSERS)
def test_the_examples_of_a_help_page_work(script: str):
    page = PARSERS[script]().format_help()
    examples = re.findall(rf"^  python {re.escape(script)} (.+)$", page, flags=re.M)
    assert examples
    assert page.index(f"  python {script}") < page.index("most used:"), "they are easy to find"
    for example in examples:
        importlib.import_module(script.removesuffix(".py")).get_args(example.split())


def test_every_flag_has_a_help_text_and_a_task_has_no_lines_of_its_own():
    for script, parser in PARSERS.items():
        assert all(action.help for action in parser()._actions), script
    page = multitask_flags.parser().format_help()
    assert "--TASK_head NAME" in page
    assert not re.search(r"^  --(sst|para|sts|cfimdb)_", page, flags=re.M)


@pytest.mark.parametrize("line", ["--help", "-h", "--lr nonsense --help", "@recipes/quickstart.txt --help --xyzzy"])
def test_help_is_shown_whatever_else_is_on_the_line(line: str, capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as stopped:
        multitask_classifier.get_args(line.split())
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith("usage: multitask_classifier.py [@recipes/FILE.txt]")


# --- what a run costs -------------------------------------------------------------------------------------------------


def in_subprocess(program: str, **environment: str) -> str:
    """Run a program in the project's directory; return what its last line on stdout says."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


ONE_PARSER = """
import argparse, runpy, sys

built = []
initialize = argparse.ArgumentParser.__init__


def counting(parser, *args, **options):
    built.append(type(parser).__name__)
    initialize(parser, *args, **options)


argparse.ArgumentParser.__init__ = counting
sys.argv = {argv}
runpy.run_path(sys.argv[0], run_name="__main__")
print(built)
"""


def test_a_run_builds_one_parser(tiny_checkpoint: Path, task_files: Path, tmp_path: Path):
    given = ["multitask_classifier.py", "@recipes/quickstart.txt", "--model", tiny_checkpoint, "--data", task_files]
    given += ["--predictions", tmp_path / "p", "--runs", tmp_path / "r", "--regularizer", "none", "--dry_run"]
    assert in_subprocess(ONE_PARSER.format(argv=list(map(str, given)))) == "['ArgumentParser']"


HEAVY = ("numba", "optuna", "matplotlib", "nltk", "transformers", "sklearn")
IMPORTS = f"""
import contextlib, io, runpy, sys

status = []
for flags in (["--help"], ["--no_such_flag"], ["--help", "--no_such_flag"]):
    sys.argv = [SCRIPT, *flags]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            runpy.run_path(SCRIPT, run_name="__main__")
        except SystemExit as stop:
            status.append(stop.code)
print([status, sorted(set({HEAVY}) & set(sys.modules))])
"""


@pytest.mark.parametrize("script", [*PARSERS, "evaluation.py", "prepare_submit.py", "benchmark.py"])
def test_help_and_a_wrong_flag_import_nothing_heavy(script: str):
    assert in_subprocess(IMPORTS.replace("SCRIPT", repr(script))) == "[[0, 2, 0], []]"


def test_a_wrong_flag_is_one_line_on_stderr(capsys: pytest.CaptureFixture, run_main: Callable[..., Any]):
    for module in (classifier, multitask_classifier, pretrain, ensemble, sweep):
        script = f"{module.__name__}.py"
        done = run_main(module, *REQUIRED.get(script, []), "--no_such_flag", "--dry_run")
        assert (done.status, done.out) == (2, ""), script
        assert done.err.startswith("error: unknown flag --no_such_flag."), script
        assert done.err.count("\n") == 1


# --- the groups of a command line -------------------------------------------------------------------------------------


def test_a_command_line_is_split_into_flags_with_their_values_and_positional_arguments():
    parser = ensemble.parser()
    line = "runs/a --average=logits runs/b --tasks sst sts --use_gpu runs/c --seed 3 runs/d"
    assert parser.by_flag(line.split()) == [
        ["runs/a"], ["--average=logits"], ["runs/b"], ["--tasks", "sst", "sts"], ["--use_gpu"], ["runs/c"],
        ["--seed", "3"], ["runs/d"],
    ]  # fmt: skip
    assert parser.flat(parser.by_flag(line.split()))[:4] == ["runs/a", "runs/b", "runs/c", "runs/d"]


def test_a_note_names_the_flag_that_really_made_another_pointless(capsys: pytest.CaptureFixture, tmp_path: Path):
    recipe = tmp_path / "recipe.txt"
    recipe.write_text("--option finetune --adapter lora\n")
    part_2(f"@{recipe} --resume --option pretrain --name x")
    assert capsys.readouterr().err == "note: --adapter: no effect with --option pretrain, so dropped.\n"
    recipe.write_text("--option finetune --sts_loss bogus --mnrl_scale 3 --sts_pairing bi --sts_loss mse+mnrl\n")
    assert part_2(f"@{recipe}").mnrl_scale == 3


def test_several_flags_together_can_make_another_pointless(capsys: pytest.CaptureFixture):
    part_2("@recipes/quickstart.txt --regularizer none --option pretrain")
    assert dropped_flags(capsys.readouterr().err) == {"combiner", "smart_variant"}


def test_the_recipe_of_another_script_is_recognized():
    message = refusal(part_2, "@recipes/minilm/pretrain.txt")
    assert message.startswith("unknown flag --objective.")
    assert "its comment says which script it is for" in message


def test_a_recipe_is_looked_for_beside_the_one_that_includes_it_and_may_have_a_byte_order_mark(tmp_path: Path):
    (tmp_path / "inner.txt").write_bytes(b"\xef\xbb\xbf--epochs 7\n")
    (tmp_path / "outer.txt").write_text("@inner.txt\n")
    assert part_2(f"@{tmp_path / 'outer.txt'}").epochs == 7
    assert "no such recipe" in refusal(part_2, "@" + "x" * 5000)


@pytest.mark.parametrize("name", ["../x", "a/b", "..", "/tmp/x"])
def test_the_name_of_a_run_is_a_plain_name(name: str):
    assert "must be a plain name of at most 200 bytes" in refusal(multitask_classifier.get_args, ["--name", name])
