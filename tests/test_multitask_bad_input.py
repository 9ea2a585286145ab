"""User errors in Part 2 end in one line with rule and remedy and in exit status 2, and nothing is written."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Finished, assert_refused, run_script, the_error, write_task_files
from safetensors.torch import load_file, save_file

import multitask_classifier
import multitask_flags
from utils import digest

A_REMEDY = re.compile(r"[.?)] [A-Z]\w+ ")  # another sentence after the found value
FILES = {"sst": "ids-sst", "para": "quora", "sts": "sts"}


Classify = Callable[..., Finished]


pytestmark = pytest.mark.usefixtures("one_thread")


def usual_flags(folder: Path, model: Path) -> list[str]:
    given = {"--model": model, "--data": folder / "data", "--runs": folder / "runs", "--name": "r"}
    given |= {"--predictions": folder / "predictions", "--epochs": 1}
    return [str(part) for pair in given.items() for part in pair]


@pytest.fixture
def classify(
    tiny_checkpoint: Path,
    task_files: Path,
    tmp_path: Path,
    run_main: Callable[..., Finished],
) -> Classify:
    """Run multitask_classifier.py in this process. Flags given here come last and override the others."""

    def run(*more: object, usual: bool = True) -> Finished:
        flags = usual_flags(tmp_path, tiny_checkpoint) if usual else []
        return run_main(multitask_classifier, *flags, *more)

    return run


# --- impossible flags -------------------------------------------------------------------------------------------------

TUNED = "--option finetune "
ENCODER = (
    "needs an encoder that trains, which --option pretrain (the handout's default) freezes. Use --option finetune, or "
    "leave out"
)
IDLE = {  # flags that would do nothing
    "--batch_size 8 --max_tokens 512": "--batch_size 8 needs one size of a batch, in rows or in tokens, but both are "
    "given. Leave out --max_tokens, or ",
    "--smart_weight 2": "--smart_weight 2.0 needs --regularizer smart. Use ",
    TUNED + "--regularizer rdrop --smart_steps 3": "--smart_steps 3 needs --regularizer smart. Use ",
    TUNED + "--regularizer smart --smart_sigma 1e-4": "--smart_sigma 0.0001 needs --smart_start embeddings. Use ",
    "--sst_dropout 0.1 --para_dropout 0.1 --sts_dropout 0.1 --hidden_dropout_prob 0.2": "--hidden_dropout_prob 0.2 "
    "needs a task without its own --TASK_dropout. Leave out one --TASK_dropout, or ",
    TUNED + "--regularizer rdrop --smart_variant 1": "--smart_variant 1 needs --regularizer smart or bregman. Use ",
    TUNED + "--regularizer smart+rdrop --bregman_momentum 0.5": "--bregman_momentum 0.5 needs --regularizer bregman.",
    TUNED + "--regularizer smart:0.5+bregman --rdrop_weight 2": "--rdrop_weight 2.0 needs --regularizer rdrop. Use ",
    TUNED
    + "--combiner pcgrad --cagrad_c 0.5": "--cagrad_c 0.5 needs --combiner cagrad. Use --combiner cagrad, or leave out",
    TUNED
    + "--combiner pcgrad --log_gradients": "--log_gradients needs --combiner sum. Use --combiner sum, or leave out",
    "--gradvac_beta 0.5": "--gradvac_beta 0.5 needs --combiner gradvac. Use ",
    "--averager swa --ema_decay 0.5": "--ema_decay 0.5 needs --averager ema. Use ",
    "--averager ema --average_start 0.1": "--average_start 0.1 needs --averager swa. Use ",
    "--decay_matrices_only": "--decay_matrices_only needs --weight_decay. Use ",
    "--label_smoothing 0.2": "--label_smoothing 0.2 needs the loss ce_smooth. Use ",
    "--train_tasks para --label_smoothing 0.2": "--label_smoothing 0.2 needs the loss ce_smooth.",
    "--mnrl_scale 10": "--mnrl_scale 10.0 needs the loss mnrl. Use ",
    "--para_loss mnrl_head --mnrl_scale 10": "--mnrl_scale 10.0 needs the loss mnrl. Use ",
    TUNED + "--para_loss bce+mnrl --mnrl_threshold 3": (
        "--mnrl_threshold 3.0 needs the loss mnrl or mnrl_head of a task that predicts a number. Use "
    ),
    "--mnrl_symmetric": "--mnrl_symmetric needs the loss mnrl or mnrl_head. Use ",
    TUNED + "--train_tasks sst --mnrl_symmetric": "--mnrl_symmetric needs the loss mnrl or mnrl_head. Use ",
    "--cosent_scale 10": "--cosent_scale 10.0 needs the loss cosent. Use ",
    "--cosine_margin 0.5": "--cosine_margin 0.5 needs the loss cosine_embedding. Use ",
    "--simcse_temperature 0.1": "--simcse_temperature 0.1 needs the loss simcse. Use ",
    "--distill_temperature 3": (
        "--distill_temperature 3.0 needs the loss distill of a task that predicts a category or a probability. Use "
    ),
    "--sts_loss distill --teacher x --distill_temperature 3": "--distill_temperature 3.0 needs the loss distill of a",
    "--teacher x": "--teacher x needs the loss distill. Use it, as in --sst_loss ce+distill, or leave out",
    "--task_weights sts=2 sst=3": "--task_weights sts=2 sst=3 needs --weighting fixed. Use ",
    "--predict_only": "--predict_only needs --run. Add --run runs/NAME, or leave out --predict_only.",
    "--predict_train": "--predict_train needs --predict_only. Use --predict_only, or leave out --predict_train.",
    "--run runs/x": "--run runs/x needs --predict_only. Use --predict_only, or leave out --run.",
    "--pos_dim 8": "--pos_dim 8 needs --feature pos. Use --feature pos, or leave out --pos_dim.",
    TUNED + "--pal_dim 8": "--pal_dim 8 needs --adapter pal. Use --adapter pal, or leave out --pal_dim.",
    TUNED
    + "--adapter pal --lora_on key value": "--lora_on key value needs --adapter lora. Use --adapter lora, or leave out",
    TUNED + "--adapter lora --mixout_p 0.5": "--mixout_p 0.5 needs --adapter mixout. Use ",
    TUNED + "--tasks sst --adapter own_layers": (
        "--adapter own_layers needs at least two tasks. Add another to --tasks, or use --adapter none, or leave out"
    ),
    TUNED + "--adapter mixout --own_layers 1": "--own_layers 1 needs --adapter own_layers. Use ",
    TUNED + "--adapter_only": "--adapter_only needs --adapter pal or lora or own_layers. Use ",
    TUNED + "--adapter mixout --adapter_only": "--adapter_only needs --adapter pal or lora or own_layers. Use ",
    # tasks that are not used, or not trained
    "--tasks para sts --sst_head mlp": "--sst_head mlp needs sst among --tasks. Add ",
    "--tasks sst sts --para_pairing cross": "--para_pairing cross needs para among --tasks. Add ",
    "--tasks sst --sts_dev_out x.csv": "--sts_dev_out x.csv needs sts among --tasks. Add sts to --tasks, or leave out",
    "--cfimdb_pooling mean": "--cfimdb_pooling mean needs cfimdb among --tasks. Add ",
    "--tasks para sts --sst_loss ce_smooth": "--sst_loss ce_smooth needs sst among the tasks that train. Add ",
    "--train_tasks sst --para_fraction 0.5": "--para_fraction 0.5 needs para among the tasks that train. Add ",
    "--train_tasks sst --sts_train a.csv b.csv": "--sts_train a.csv b.csv needs sts among the tasks that train. Add ",
    "--cfimdb_train a.csv": "--cfimdb_train a.csv needs cfimdb among the tasks that train. Add ",
    "--tasks sst --pooling max --sst_pooling cls": "--pooling max needs a task without its own --TASK_pooling.",
    "--head mlp --sst_head mlp --para_head mlp --sts_head mlp": "--head mlp needs a task without its own --TASK_head.",
    "--pairing cross --para_pairing bi --sts_pairing bi": "cross needs a task without its own --TASK_pairing.",
    "--tasks sst cfimdb --symmetric": "--symmetric needs a task on pairs among --tasks. Add para or sts to --tasks, or",
    "--tasks sst --pairing cross": "--pairing cross needs a task on pairs among --tasks. Add para or sts to",
    "--tasks sst sts --share_pair_layer": "--share_pair_layer needs two tasks on pairs among --tasks. Add ",
    # surgery
    TUNED + "--tasks sst --combiner pcgrad": (
        "--combiner pcgrad needs at least two tasks that train. Use two tasks, or --combiner sum, or leave out"
    ),
    TUNED + "--train_tasks sts --combiner pcgrad": "--combiner pcgrad needs at least two tasks that train. Use two",
    TUNED + "--sampler proportional --combiner gradvac": (
        "--combiner gradvac needs at least two tasks in a step. Use --sampler round_robin or --accumulate 3, or leave "
        "out --combiner."
    ),
    TUNED + "--sampler sequential --combiner mgda": "--combiner mgda needs at least two tasks in a step. Use --sampler",
    # what needs an encoder that trains
    "--combiner pcgrad": f"--combiner pcgrad {ENCODER} --combiner.",
    "--regularizer smart": f"--regularizer smart {ENCODER} --regularizer.",
    "--regularizer bregman+rdrop:2": f"--regularizer bregman+rdrop:2 {ENCODER} --regularizer.",
    "--compile": f"--compile {ENCODER} --compile.",
    "--checkpoint_activations": f"--checkpoint_activations {ENCODER} --checkpoint_activations.",
    "--layer_decay 0.9": f"--layer_decay 0.9 {ENCODER} --layer_decay.",
    "--adapter lora": f"--adapter lora {ENCODER} --adapter.",
    "--chunk_rows 4": f"--chunk_rows 4 {ENCODER} --chunk_rows.",
    TUNED + "--adapter lora --adapter_only --layer_decay 0.9": (
        "--layer_decay 0.9 needs an encoder whose own layers train, which --adapter_only freezes. Leave out --adapter_"
    ),
}
IMPOSSIBLE = IDLE | {
    # specifications
    "--para_loss bce+bce": "--para_loss bce+bce: each name may appear once, found bce twice. Remove one.",
    "--sst_loss hinge": "--sst_loss hinge: must be made of ce, ce_smooth, bce, mse, distill,",
    "--sst_loss cee": "--sst_loss cee: must be made of ce, ce_smooth, bce, mse, distill,",
    "--sts_loss mse:-1": "--sts_loss mse:-1: the weight of mse must be a number above 0, found '-1'. Write it like",
    "--sts_loss mse:": "the weight of mse must be a number above 0, found ''. Write it like mse:0.2",
    TUNED + "--regularizer smart+smart": "--regularizer smart+smart: each name may appear once, found smart twice.",
    TUNED + "--regularizer none+smart": "--regularizer none+smart: none must stand alone, found 2 names. Remove it.",
    TUNED + "--regularizer rdorp": (
        "--regularizer rdorp: must be made of none, smart, bregman, rdrop, found 'rdorp'. Did you mean rdrop?"
    ),
    TUNED + "--regularizer smart:x": "--regularizer smart:x: the weight of smart must be a number above 0, found 'x'.",
    # heads, pairings, losses
    TUNED + "--para_loss bce+mnrl --batch_size 1": "--para_loss bce+mnrl: mnrl compares the rows of a batch, found",
    TUNED
    + "--sst_loss ce+simcse --batch_size 1": "simcse compares the rows of a batch, found --batch_size 1. Use 8 or",
    "--pooling attention --sst_loss ce+simcse": "--sst_loss ce+simcse: simcse trains the encoder, but --option",
    "--sst_head cosine_affine": "--sst_head cosine_affine compares two sentences, but sst has one. Use --sst_head",
    "--head siamese": "--sst_head siamese compares two sentences, but sst has one. Use --sst_head linear or mlp.",
    "--pairing cross --sts_head siamese_cosine": (
        "--sts_head siamese_cosine compares two vectors, but cross pairing makes one vector per pair. "
        "Use --sts_head linear or mlp. Or use --sts_pairing bi."
    ),
    "--para_pairing cross_symmetric --para_head sbert": "but cross pairing makes one vector per pair.",
    "--para_head cosine": "--para_head cosine predicts a number, but para needs a probability. Use --para_head linear",
    "--sst_head sigmoid": "--sst_head sigmoid predicts a number, but sst needs a category. Use --sst_head linear or",
    "--sts_loss bce": (
        "--sts_loss bce: bce is for a task that predicts a probability, but sts predicts a number. Use mse or distill"
    ),
    TUNED + "--sts_pairing cross --sts_loss mse+cosent": (
        "--sts_loss mse+cosent: cosent compares the vectors of sentences, but --sts_pairing cross makes one vector per "
        "pair. Use --sts_pairing bi."
    ),
    TUNED
    + "--pairing cross_symmetric --para_loss bce+simcse:0.1": "--para_pairing cross_symmetric makes one vector per",
    TUNED + "--sst_loss ce+mnrl": (
        "mnrl is for a task that predicts a probability or a number, but sst predicts a category. Use ce or ce_smooth"
    ),
    TUNED + "--para_loss mnrl": (
        "--para_loss mnrl trains vectors only, but --para_head linear has to learn too. Use --para_loss bce+mnrl, or "
        "--para_head cosine_affine."
    ),
    TUNED
    + "--sts_loss cosent --sts_head siamese_cosine": "but --sts_head siamese_cosine has to learn too. Use --sts_l",
    TUNED + "--sst_loss simcse": "but --sst_head linear has to learn too. Use --sst_loss ce+simcse.",
    "--para_loss bce+mnrl:0.2": (
        "--para_loss bce+mnrl:0.2: mnrl trains the encoder, but --option pretrain, the handout's default, freezes it. "
        "Use --option finetune, or leave mnrl out."
    ),
    "--sst_loss distill": (
        "--sst_loss distill needs the teacher's logits, found no --teacher. Add --teacher DIR, a directory with "
        "sst-train.npz."
    ),
    "--sst_loss distill --teacher x --repeated_ids": "--teacher and --repeated_ids cannot be combined: a row's teacher",
    TUNED + "--chunk_rows 16": (
        "--chunk_rows must be below the number of sentences in a batch, at most 16 here, found 16. Lower it, or leave"
    ),
    TUNED
    + "--pairing cross --chunk_rows 8": "--chunk_rows must be below the number of sentences in a batch, at most 8",
    # adapters
    TUNED + "--adapter pal --adapter_only --combiner pcgrad": (
        "--combiner pcgrad works on weights that tasks share, but --adapter pal with --adapter_only trains none. Use "
        "--combiner sum, or leave out --adapter_only."
    ),
    TUNED + "--adapter pal --pal_dim 6": (
        "--pal_dim must be a multiple of the encoder's 4 attention heads, found 6. Use 4, 8."
    ),
    "--sts_head cosine": (
        "--sts_head cosine has no weights of its own, and --option pretrain, the handout's default, freezes the "
        "encoder: nothing would learn. Use --option finetune, or --sts_head linear."
    ),
    # the rest
    "--tasks sst --train_tasks para": "--train_tasks must be among --tasks, found para. Add it to --tasks, or leave it",
    "--resume --predict_only --run runs/x": "--resume and --predict_only cannot be combined. Leave one out.",
    "--dry_run --resume": "--resume and --dry_run cannot be combined. Leave one out.",
    "--dry_run --predict_only --run runs/x": "--predict_only and --dry_run cannot be combined. Leave one out.",
    "--weighting fixed": "--weighting fixed needs --task_weights, found none. Add for example --task_weights sts=2.",
    "--weighting fixed --tasks sst --task_weights sts=2": "a task must be one of sst, found 'sts'. Correct it.",
    "--keep_layers 3": "--keep_layers must be 1 to 2 for",
    # values
    "--combiner sgd": "--combiner must be one of cagrad, gradvac, mgda, pcgrad, sum; found 'sgd'. See multitask_cl",
    "--combiner pcgard": "found 'pcgard'. Did you mean pcgrad? See multitask_classifier.py --help.",
    "--tasks sst nli": "--tasks must be one of cfimdb, para, sst, sts; found 'nli'.",
    "--fine-tune-mode half": "must be one of last-linear-layer, full-model; found 'half'. See multitask_classifier.py",
    "--accumulate 0": "--accumulate: must be a whole number, at least 1 and at most 4096, found '0'. See",
    "--para_fraction 0": "--para_fraction: must be a number, above 0 and at most 1, found '0'",
    "--max_train 1": "--max_train: must be a whole number, at least 2",
    "--max_length 3": "--max_length: must be a whole number, at least 4 and at most 100000, found '3'",
    "--patience -1": "--patience: must be a whole number, at least 0 and at most 1000, found '-1'",
    "--weighting fixed --task_weights sts": "--task_weights: must be like sts=2, found 'sts'",
    TUNED + "--adapter prefix": "--adapter must be one of lora, mixout, none, own_layers, pal; found 'prefix'.",
    TUNED + "--adapter lora --lora_on pooler": "--lora_on must be one of query, key, value, attention_dense, interm_",
    "--optimizer lion": "--optimizer must be one of adafactor, adamax, adamw, nadam, radam, sgd, torch_adamw; found",
    TUNED + "--regularizer smart --smart_variant 3": "--smart_variant must be one of 0, 1, 2; found '3'.",
    "--smart True": "unknown flag --smart.",
    "--learning_rate 3": "unknown flag --learning_rate.",
    "sst": "unexpected argument 'sst': it belongs to no flag.",
}


@pytest.mark.parametrize("flags", IMPOSSIBLE)
def test_an_impossible_combination_of_flags_is_refused(flags: str, classify: Classify, tmp_path: Path):
    finished = classify(*flags.split())
    assert_refused(finished, tmp_path, IMPOSSIBLE[flags])
    assert finished.err.startswith("error: "), "no flag is dropped before the error"
    assert A_REMEDY.search(finished.err)


def test_every_need_of_a_flag_is_a_case():
    needs = {need.what for action in multitask_flags.parser().flags.values() for need in action.needs}
    assert len(needs) > 30
    for what in needs:
        if re.fullmatch(r"\w+ among .*", what):
            what = what.partition(" ")[2]  # for one of the tasks
        assert any(f" {what}." in message for message in IDLE.values()), what


SWITCHED_OFF = {  # flags that the last one makes pointless
    TUNED + "--combiner gradvac --gradvac_beta 0.5 --sampler proportional": {"combiner", "gradvac_beta"},
    TUNED + "--combiner mgda --sampler sequential": {"combiner"},
    TUNED + "--regularizer smart --smart_steps 2 --option pretrain": {"regularizer", "smart_steps"},
    TUNED + "--para_loss bce+mnrl --mnrl_symmetric --train_tasks sst sts": {"para_loss", "mnrl_symmetric"},
    "--sst_fraction 0.5 --train_tasks para": {"sst_fraction"},
    "--share_pair_layer --tasks sst sts": {"share_pair_layer"},
    "--para_head mlp --tasks sst": {"para_head"},
}


@pytest.mark.parametrize("flags", SWITCHED_OFF)
def test_flags_that_a_later_one_made_pointless_are_dropped_with_a_note(flags: str, classify: Classify, tmp_path: Path):
    last = flags[flags.rindex("--") :]
    recipe = tmp_path / "recipe.txt"
    recipe.write_text(flags.removesuffix(last))
    finished = classify(f"@{recipe}", *last.split())
    assert finished.status == 0, finished.err
    notes = re.findall(rf"^note: (.*): no effect with {last}, so dropped\.$", finished.err, flags=re.MULTILINE)
    assert {flag.removeprefix("--") for note in notes for flag in note.split(", ")} == SWITCHED_OFF[flags]
    stored = json.loads((tmp_path / "runs" / "r" / "args.json").read_text())["args"]
    defaults = vars(multitask_flags.parser().parse_args([]))
    assert all(stored[flag] == defaults[flag] for flag in SWITCHED_OFF[flags])


@pytest.mark.parametrize(
    "flags",
    [
        "--label_smoothing 0.2 --sst_loss ce_smooth",
        TUNED + "--regularizer smart+bregman --smart_weight 2 --bregman_weight 2",
        TUNED + "--regularizer bregman --smart_variant 1",
        TUNED + "--combiner pcgrad --sampler proportional --accumulate 3",
        TUNED + "--adapter lora --adapter_only --combiner pcgrad --lora_r 2 --lora_on key out_dense",
        TUNED + "--adapter pal --adapter_only --regularizer smart --sts_head cosine --pal_dim 4",
        "--sts_head cosine --pooling bigru",
        "--sts_head cosine --share_pair_layer",
        TUNED + "--sts_head cosine",
        TUNED + "--pairing cross --sts_pairing bi --sts_head siamese_cosine",
        "--weighting fixed --task_weights sts=2 sst=0.5",
        "--para_loss bce+mnrl:0.2 --para_pooling bigru --mnrl_scale 10 --mnrl_symmetric",
        TUNED + "--sts_loss mse+mnrl+cosent --mnrl_threshold 2 --cosent_scale 10 --chunk_rows 15",
        TUNED + "--sts_loss cosine_embedding --sts_head cosine_affine --cosine_margin 0.1",
        TUNED + "--regularizer smart --sst_loss ce+simcse:0.1 --simcse_temperature 0.1 --chunk_rows 3",
        TUNED + "--regularizer bregman --combiner pcgrad --para_loss bce+mnrl --chunk_rows 3 --checkpoint_activations",
        TUNED + "--precision bf16 --para_loss bce+mnrl+mnrl_head --sts_loss mse+cosent+simcse --chunk_rows 5",
    ],
)
def test_what_needs_something_runs_where_it_is_given(flags: str, classify: Classify, tmp_path: Path):
    finished = classify(*flags.split())
    assert finished.status == 0, finished.err
    assert len(list((tmp_path / "predictions").glob("*.csv"))) == 6


# --- teachers ---------------------------------------------------------------------------------------------------------


def teacher(folder: Path, rows: int = 8, outputs: int = 5, **arrays: object) -> Path:
    ids = np.array([f"train{i:020d}" for i in range(rows)])
    np.savez(folder / "sst-train.npz", **{"ids": ids, "logits": np.zeros((rows, outputs), np.float32)} | arrays)
    return folder


def test_a_teacher_that_fits_is_accepted(classify: Classify, tmp_path: Path):
    flags = ["--tasks", "sst", "--sst_loss", "distill", "--teacher", teacher(tmp_path)]
    assert classify(*flags).status == 0


TEACHERS = {
    "no file": (
        lambda folder: None,
        "No such file or directory. Predict again: multitask_classifier.py --predict_only --predict_train --run",
    ),
    "a text": (lambda folder: (folder / "sst-train.npz").write_text("text"), "it is not an .npz file with ids and"),
    "half a file": (
        lambda folder: cut(teacher(folder) / "sst-train.npz"),
        "it is not an .npz file with ids and logits",
    ),
    "one array": (lambda folder: np.save((folder / "sst-train.npz").open("wb"), np.ones(3)), "it is not an .npz file"),
    "no logits": (
        lambda folder: np.savez(folder / "sst-train.npz", ids=np.array(["a"])),
        "it is not an .npz file with",
    ),
    "pickled ids": (
        lambda folder: teacher(folder, ids=np.array([{}] * 8)),
        "it is not an .npz file with ids and logits",
    ),
    "another task's": (
        lambda folder: teacher(folder, outputs=1),
        "must have 5 finite logits for each of its 8 ids, found an array of shape (8, 1). Predict again: ",
    ),
    "too few logits": (lambda folder: teacher(folder, logits=np.zeros((7, 5))), "found an array of shape (7, 5)."),
    "no numbers": (
        lambda folder: teacher(folder, logits=np.full((8, 5), np.nan)),
        "must have 5 finite logits for each of its 8 ids, found NaN or infinity. Predict again: ",
    ),
    "text as logits": (lambda folder: teacher(folder, logits=np.full((8, 5), "x")), "it is not an .npz file with ids"),
    "an id twice": (
        lambda folder: teacher(folder, ids=np.array(["a"] * 8)),
        "ids must be unique, found 7 of 8 repeated.",
    ),
    "rows missing": (
        lambda folder: teacher(folder, rows=6),
        "must have logits for every training row of sst; 2 of 8 are missing, such as train00000000000000000006. Write",
    ),
    "other data": (
        lambda folder: teacher(folder, ids=np.arange(8).astype(str)),
        "8 of 8 are missing, such as train0000",
    ),
}


@pytest.mark.parametrize("case", TEACHERS)
def test_a_teacher_that_does_not_fit_is_refused(case: str, classify: Classify, tmp_path: Path):
    make, message = TEACHERS[case]
    make(tmp_path)
    finished = classify("--tasks", "sst", "--sst_loss", "ce+distill", "--teacher", tmp_path)
    assert_refused(finished, tmp_path, tmp_path / "sst-train.npz", message)


def test_a_prediction_file_never_takes_the_place_of_data(classify: Classify, tmp_path: Path):
    labels = tmp_path / "data" / "ids-sst-dev.csv"
    before = labels.read_bytes()
    for more in ((), ("--option", "finetune")):
        finished = classify("--sst_dev_out", labels, *more)
        assert_refused(
            finished, tmp_path, f"--sst_dev_out {labels}: must be a file of its own, found that of --sst_dev."
        )
    finished = classify("--sst_dev_out", tmp_path / "same", "--sts_test_out", tmp_path / "same")
    assert_refused(finished, tmp_path, "--sts_test_out", "found that of --sst_dev_out. Use another path.")
    assert classify("--tasks", "sst").status == 0
    finished = classify("--predict_only", "--run", tmp_path / "runs" / "r", "--sst_test_out", labels, usual=False)
    assert "--sst_test_out" in the_error(finished)
    assert labels.read_bytes() == before


def test_a_run_is_predicted_with_its_own_tasks(classify: Classify, tmp_path: Path):
    assert classify("--tasks", "sst", "sts").status == 0
    finished = classify("--predict_only", "--run", tmp_path / "runs" / "r", "--tasks", "sst", usual=False)
    error = the_error(finished)
    assert error.startswith("error: --tasks ")
    assert f"{tmp_path / 'runs' / 'r'} was trained with " in error
    assert error.endswith(", which cannot be changed afterwards. Leave out --tasks.")


def test_a_recipe_that_is_not_there_and_one_without_its_sign(classify: Classify):
    error = the_error(classify("@recipes/bets.txt"))
    assert error == (
        "error: @recipes/bets.txt: no such recipe. Did you mean recipes/best.txt? recipes/README.md lists them all."
    )
    error = the_error(classify("recipes/best.txt"))
    assert error == "error: recipes/best.txt is not a flag. A recipe is given as @recipes/best.txt."


def test_resuming_needs_a_name(classify: Classify):
    assert "--resume needs the name of the run to continue" in the_error(classify("--resume", usual=False))


def test_a_run_of_another_script_is_refused(classify: Classify, tmp_path: Path):
    folder = tmp_path / "pretrained"
    folder.mkdir()
    (folder / "args.json").write_text('{"args": {"objective": "mlm"}, "data_sha256": {}}')
    (folder / "model.safetensors").write_bytes(b"")
    finished = classify("--predict_only", "--run", folder, usual=False)
    assert f"{folder}: must be a run of multitask_classifier.py, or a soup." in the_error(finished)


def test_training_rows_are_not_predicted_for_a_run_with_repeated_ids(classify: Classify, tmp_path: Path):
    assert classify("--tasks", "sst", "--repeated_ids").status == 0
    before = sorted((tmp_path / "runs" / "r").iterdir())
    finished = classify("--predict_only", "--predict_train", "--run", tmp_path / "runs" / "r", usual=False)
    assert "--predict_train: logits are looked up by id, which must be unique in the training" in the_error(finished)
    assert sorted((tmp_path / "runs" / "r").iterdir()) == before


# --- recipes ----------------------------------------------------------------------------------------------------------


def test_an_unknown_recipe_is_refused(classify: Classify, tmp_path: Path):
    assert_refused(classify("@recipes/nowhere.txt"), tmp_path, "@recipes/nowhere.txt: no such recipe.")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("--epochs 1\n--learning_rate 3  # no such flag\n", "unknown flag --learning_rate."),
        ("--combiner pcgrod\n", "found 'pcgrod'. Did you mean pcgrad?"),
        ("pcgrad\n", "recipe.txt line 1 is not a flag. A recipe must consist of flags and their values;"),
        ("--lr\n", "--lr: expected one argument"),
    ],
)
def test_an_unknown_key_or_value_within_a_recipe_is_refused(text: str, part: str, classify: Classify, tmp_path: Path):
    recipe = tmp_path / "recipe.txt"
    recipe.write_text(text)
    assert_refused(classify(f"@{recipe}"), tmp_path, part)


# --- data -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["train", "dev", "test-student"])
@pytest.mark.parametrize("task", FILES)
def test_a_missing_file_is_refused_before_training(
    task: str, split: str, classify: Classify, task_files: Path, tmp_path: Path
):
    path = task_files / f"{FILES[task]}-{split}.csv"
    path.unlink()
    assert_refused(classify(), tmp_path, f"{path}: cannot be read; No such file", "sample data: --data data/sample")


@pytest.mark.parametrize("split", ["train", "dev"])
@pytest.mark.parametrize("task", FILES)
def test_a_data_set_with_one_row_is_refused(
    task: str, split: str, classify: Classify, task_files: Path, tmp_path: Path
):
    path = task_files / f"{FILES[task]}-{split}.csv"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    parts = ("needs rows with at least two different labels, found 1 row, all labeled", "nothing to learn")
    assert_refused(classify(), tmp_path, path, *parts)


@pytest.mark.parametrize(("task", "label"), [("sst", "3"), ("para", "1.0"), ("sts", "2.5")])
def test_a_data_set_with_one_class_is_refused(
    task: str, label: str, classify: Classify, task_files: Path, tmp_path: Path
):
    path = task_files / f"{FILES[task]}-train.csv"
    header, *rows = path.read_text().splitlines()
    path.write_text("\n".join([header, *(row.rpartition("\t")[0] + f"\t{label}" for row in rows)]) + "\n")
    assert_refused(classify(), tmp_path, path, "at least two different labels, found 8 rows, all labeled")


@pytest.mark.parametrize(("task", "column"), [("sst", "sentiment"), ("para", "is_duplicate"), ("sts", "similarity")])
def test_a_training_file_without_its_label_column_is_refused(
    task: str, column: str, classify: Classify, task_files: Path, tmp_path: Path
):
    path = task_files / f"{FILES[task]}-train.csv"
    path.write_text("".join(line.rpartition("\t")[0] + "\n" for line in path.read_text().splitlines()))
    assert_refused(classify(), tmp_path, path, f"{column} not found", f"Check that this is a {task} file")


@pytest.mark.parametrize(
    ("task", "label", "rule"),
    [
        ("sst", "5", "sentiment must be a whole number from 0 to 4, found '5'"),
        ("para", "0.5", "is_duplicate must be 0 or 1, found '0.5'"),
        ("sts", "5.1", "similarity must be a number from 0 to 5, found '5.1'"),
        ("sts", "nan", "similarity must be a number from 0 to 5, found 'nan'"),
    ],
)
def test_a_label_outside_its_range_is_refused_with_its_line(
    task: str, label: str, rule: str, classify: Classify, task_files: Path, tmp_path: Path
):
    path = task_files / f"{FILES[task]}-train.csv"
    lines = path.read_text().splitlines()
    lines[3] = lines[3].rpartition("\t")[0] + f"\t{label}"
    path.write_text("\n".join(lines) + "\n")
    assert_refused(classify(), tmp_path, f"{path} line 4: {rule}")


def test_a_test_file_with_an_unusable_row_is_refused_before_training_where_data_are_strict(
    classify: Classify, task_files: Path, tmp_path: Path
):
    path = task_files / "sts-test-student.csv"
    path.write_text(path.read_text() + '8\tid8\t"an open quotation mark\tx\n')
    assert_refused(classify("--strict_data"), tmp_path, f"{path} line 10", "Fix the row, or leave out --strict_data")


@pytest.mark.parametrize(("pairing", "cut_rows"), [("bi", 0), ("cross", 1), ("cross_symmetric", 1)])
def test_pairs_longer_than_512_tokens_are_truncated_and_counted(
    pairing: str, cut_rows: int, classify: Classify, task_files: Path, tmp_path: Path
):
    path = task_files / "quora-dev.csv"
    path.write_text(path.read_text().replace("1 bad, or not?\tA", "bad " * 300 + "\t" + "dull " * 300))
    finished = classify("--pairing", pairing, "--tasks", "para", "--lr", 1e-3)
    assert finished.status == 0, finished.err
    note = f"note: {path}: {cut_rows} of 8 rows are longer than 512 tokens and were truncated."
    assert set(finished.err.splitlines()) == ({note} if cut_rows else set())
    assert (tmp_path / "predictions" / "para-dev-output.csv").read_text().count("\n") == 9


# --- devices and directories ------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_use_gpu_without_cuda_is_refused(classify: Classify, tmp_path: Path):
    assert_refused(classify("--use_gpu"), tmp_path, "--use_gpu needs a CUDA device, found none", "Leave the flag out")


@pytest.mark.parametrize("flag", ["--predictions", "--runs"])
def test_an_output_directory_that_cannot_be_made_is_refused(flag: str, classify: Classify, tmp_path: Path):
    file = tmp_path / "a file"
    file.write_text("kept")
    finished = classify(flag, file / "x")
    assert_refused(finished, tmp_path, file / "x", "must be a writable directory")
    assert file.read_text() == "kept"


def test_a_run_that_exists_is_refused_and_left_alone(classify: Classify, tmp_path: Path):
    log = tmp_path / "runs" / "r" / "log.jsonl"
    log.parent.mkdir(parents=True)
    log.write_text("kept")
    error = the_error(classify())
    assert f"{log.parent}: the run exists already. Use another --name, or remove the directory." in error
    assert list((tmp_path / "runs").rglob("*.*")) == [log]
    assert log.read_text() == "kept"
    assert not list((tmp_path / "predictions").glob("*"))


# --- damaged runs -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Path:
    """The folder of a finished run, which no test may change."""
    folder = tmp_path_factory.mktemp("intact")
    write_task_files(folder / "data")
    with pytest.MonkeyPatch.context() as patch:
        flags = [*usual_flags(folder, tiny_checkpoint), "--tasks", "sst", "--keep_state"]
        patch.setattr(sys, "argv", ["multitask_classifier.py", *flags])
        multitask_classifier.main()
    return folder


@pytest.fixture
def run(intact: Path, tmp_path: Path) -> Path:
    """A copy of the intact run, which the test may damage."""
    shutil.copytree(intact / "runs", tmp_path / "runs")
    facts = json.loads((tmp_path / "runs" / "r" / "args.json").read_text().replace(str(intact), str(tmp_path)))
    (tmp_path / "runs" / "r" / "args.json").write_text(json.dumps(facts))
    return tmp_path / "runs" / "r"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def garbled(path: Path) -> None:
    path.write_text("garbage\n")


def without_a_head(path: Path) -> None:
    tensors = load_file(path)
    del tensors["heads.sst.linear.bias"]
    save_file(tensors, path)


def of_another_shape(path: Path) -> None:
    tensors = load_file(path)
    tensors["heads.sst.linear.bias"] = torch.zeros(7)
    save_file(tensors, path)


def pickled_object(path: Path) -> None:
    torch.save({"progress": Path("x"), "trainer": {}}, path)


def without_parts(path: Path) -> None:
    torch.save({"progress": {}, "trainer": {}}, path)


def with_other_progress(path: Path) -> None:
    content = torch.load(path, weights_only=True)["content"] | {"progress": {"epochs": 3}}
    torch.save({"content": content, "sha256": digest(content)}, path)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def test_an_undamaged_copy_of_a_run_predicts_and_resumes(run: Path, classify: Classify, tmp_path: Path):
    assert classify("--predict_only", "--run", run, usual=False).status == 0
    assert len(list((tmp_path / "predictions").glob("*.csv"))) == 2
    finished = classify("--tasks", "sst", "--resume")
    assert finished.status == 0, finished.err


WEIGHTS = {
    cut: "model.safetensors: not a complete weights file",
    garbled: "model.safetensors: not a complete weights file",
    emptied: "model.safetensors: not a complete weights file",
    Path.unlink: "must have model.safetensors, found none. Use a trained run, or a soup.",
    without_a_head: "model.safetensors: the weights do not fit this model. 1 missing: heads.sst.linear.bias.",
    of_another_shape: "1 mis-shaped: heads.sst.linear.bias (7,), not (5,). Build it with the flags of the run",
}


@pytest.mark.parametrize("damage", WEIGHTS, ids=lambda damage: damage.__name__)
def test_damaged_weights_of_a_run_are_named(damage: Callable, run: Path, classify: Classify, tmp_path: Path):
    damage(run / "model.safetensors")
    kept = sorted(path.name for path in run.iterdir())
    error = the_error(classify("--predict_only", "--run", run, usual=False))
    assert WEIGHTS[damage] in error
    assert A_REMEDY.search(error)
    assert not (tmp_path / "predictions").exists()
    assert sorted(path.name for path in run.iterdir()) == kept


STATES = {
    cut: "state.pt cannot be used",
    garbled: "state.pt cannot be used",
    emptied: "state.pt cannot be used",
    pickled_object: "state.pt cannot be used",
    without_parts: "state.pt cannot be used",
    with_other_progress: "state.pt cannot be used",
}


@pytest.mark.parametrize("damage", STATES, ids=lambda damage: damage.__name__)
def test_a_damaged_state_of_a_run_is_named(damage: Callable, run: Path, classify: Classify, tmp_path: Path):
    damage(run / "state.pt")
    weights = (run / "model.safetensors").read_bytes()
    error = the_error(classify("--tasks", "sst", "--resume"))
    assert f"--resume: {run}" in error
    assert STATES[damage] in error
    assert "Remove the file to start over, or use another --name" in error
    assert (run / "model.safetensors").read_bytes() == weights
    assert not list((tmp_path / "predictions").glob("*"))


@pytest.mark.parametrize("ask", ["predict", "resume"])
@pytest.mark.parametrize(
    "text",
    ["garbage", "", '{"args": {"mo', "{}", "[]", '{"args": 3}'],
)
def test_damaged_flags_of_a_run_are_named(text: str, ask: str, run: Path, classify: Classify, tmp_path: Path):
    (run / "args.json").write_text(text)
    if ask == "predict":
        error = the_error(classify("--predict_only", "--run", run, usual=False))
    else:
        error = the_error(classify("--tasks", "sst", "--resume"))
    assert f"{run / 'args.json'}: " in error
    assert A_REMEDY.search(error)
    assert not list((tmp_path / "predictions").glob("*"))


@pytest.mark.parametrize("flags", [["--predict_only", "--run"], ["--resume", "--runs"]])
def test_a_directory_that_is_no_run_is_refused(flags: list[str], classify: Classify, tmp_path: Path):
    (tmp_path / "other" / "r").mkdir(parents=True)
    (tmp_path / "other" / "r" / "mine.txt").touch()
    folder = tmp_path / "other" / ("r" if "--run" in flags else "")
    finished = classify(*flags, folder)
    assert_refused(finished, tmp_path, tmp_path / "other" / "r", "must be the directory of a run, but has no args.json")
    assert [path.name for path in (tmp_path / "other" / "r").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("flags", "before"),
    [
        ("--sst_head mlp", "linear"),
        ("--sst_pooling mean", "pooler"),
        ("--option finetune", "pretrain"),
        ("--lr 1", "1e-05"),
    ],
)
def test_predict_only_with_flags_that_the_training_decided_is_refused(
    flags: str, before: str, run: Path, classify: Classify, tmp_path: Path
):
    error = the_error(classify("--predict_only", "--run", run, *flags.split(), usual=False))
    flag = flags.split()[0]
    assert error.startswith(f"error: {flag} ")
    assert f"{run} was trained with {before}, which cannot be changed afterwards. Leave out {flag}." in error
    assert not (tmp_path / "predictions").exists()


@pytest.mark.parametrize("flags", ["--eval_batch_size 3", "--precision bf16", "--attention written", "--strict_data"])
def test_predict_only_takes_flags_that_matter_when_predicting(
    flags: str, run: Path, classify: Classify, tmp_path: Path
):
    finished = classify("--predict_only", "--run", run, *flags.split(), usual=False)
    assert finished.status == 0, finished.err
    assert len(list((tmp_path / "predictions").glob("*.csv"))) == 2


def test_an_interrupt_ends_in_one_line(classify: Classify, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(multitask_classifier, "choose_device", interrupted)
    assert classify() == Finished(130, "", "error: interrupted\n")


# --- as a user sees it ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--option", "finetune", "--sampler", "uniform", "--combiner", "pcgrad"], "--combiner pcgrad needs at least"),
        (["--tasks", "sst"], "the run exists already"),
        (["--predict_only", "--run", "RUN"], "not a complete weights file"),
    ],
)
def test_a_user_sees_one_line_and_status_2(
    flags: list[str], part: str, run: Path, tiny_checkpoint: Path, tmp_path: Path
):
    write_task_files(tmp_path / "data")
    garbled(run / "model.safetensors")
    given = [str(run) if flag == "RUN" else flag for flag in flags]
    usual = [] if "--run" in flags else usual_flags(tmp_path, tiny_checkpoint)
    done = run_script("multitask_classifier.py", *usual, *given, OMP_NUM_THREADS="1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert part in done.stderr
    assert not list((tmp_path / "predictions").glob("*"))
