"""What a user can get wrong in Part 2 ends in one line with rule and remedy and status 2, and nothing is written."""

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

A_REMEDY = re.compile(r"[.?)] [A-Z]\w+ ")  # a further sentence after what was found
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
    """Runs multitask_classifier.py within this process; flags given here come last, so they win."""

    def run(*more: object, usual: bool = True) -> Finished:
        flags = usual_flags(tmp_path, tiny_checkpoint) if usual else []
        return run_main(multitask_classifier, *flags, *more)

    return run


# --- impossible flags -------------------------------------------------------------------------------------------------

TUNED = "--option finetune "
ENCODER = "works on the encoder, but --option pretrain, the handout's default, freezes it. Use --option finetune"
IMPOSSIBLE = {
    # a flag that would change nothing
    "--smart_weight 2": "--smart_weight only works with --regularizer smart, which is not set. Set it, or leave",
    TUNED + "--regularizer rdrop --smart_steps 3": "--smart_steps only works with --regularizer smart",
    TUNED + "--regularizer rdrop --smart_variant 1": "--smart_variant only works with --regularizer smart or bregman",
    TUNED + "--regularizer smart --bregman_momentum 0.5": "--bregman_momentum only works with --regularizer bregman",
    TUNED + "--regularizer smart --rdrop_weight 2": "--rdrop_weight only works with --regularizer rdrop",
    TUNED + "--combiner pcgrad --cagrad_c 0.5": "--cagrad_c only works with --combiner cagrad, which is not set",
    "--gradvac_beta 0.5": "--gradvac_beta only works with --combiner gradvac, which is not set",
    "--averager swa --ema_decay 0.5": "--ema_decay only works with --averager ema, which is not set",
    "--averager ema --average_start 0.1": "--average_start only works with --averager swa, which is not set",
    "--label_smoothing 0.2": "--label_smoothing only works with a loss ce_smooth, which is not set",
    "--tasks para sts --sst_loss ce_smooth --label_smoothing 0.2": "--label_smoothing only works with a loss ce_smooth",
    TUNED + "--para_loss bce+mnrl --batch_size 1": "--para_loss bce+mnrl: mnrl compares the rows of a batch, found",
    TUNED
    + "--sst_loss ce+simcse --batch_size 1": "simcse compares the rows of a batch, found --batch_size 1. Use 8 or",
    "--pooling attention --sst_loss ce+simcse": "--sst_loss ce+simcse: simcse trains the encoder, but --option",
    "--para_loss bce+bce": "--para_loss bce+bce: every loss may stand once, found bce twice. Leave one out.",
    "--mnrl_scale 10": "--mnrl_scale only works with a loss mnrl, which is not set. Set it, or leave --mnrl_scale out.",
    "--para_loss mnrl_head --mnrl_scale 10": "--mnrl_scale only works with a loss mnrl, which is not set",
    TUNED
    + "--para_loss bce+mnrl --mnrl_threshold 3": "--mnrl_threshold only works with a loss mnrl or mnrl_head of sts",
    "--mnrl_symmetric": "--mnrl_symmetric only works with a loss mnrl or mnrl_head, which is not set.",
    TUNED + "--para_loss bce+mnrl --train_tasks sst --mnrl_symmetric": "--mnrl_symmetric only works with a loss mnrl",
    "--cosent_scale 10": "--cosent_scale only works with a loss cosent, which is not set.",
    "--cosine_margin 0.5": "--cosine_margin only works with a loss cosine_embedding, which is not set.",
    "--simcse_temperature 0.1": "--simcse_temperature only works with a loss simcse, which is not set.",
    "--distill_temperature 3": "--distill_temperature only works with a loss distill of sst, cfimdb or para",
    "--sts_loss distill --teacher x --distill_temperature 3": "--distill_temperature only works with a loss distill of",
    "--teacher x": "--teacher only works with a loss distill, which is not set. Set it, or leave --teacher out.",
    "--predict_train": "--predict_train only works with --predict_only, which is not set.",
    "--pos_dim 8": "--pos_dim only works with --feature pos, which is not set. Set it, or leave --pos_dim out.",
    "--run runs/x": "--run only works with --predict_only, which is not set. Set it, or leave --run out.",
    TUNED + "--pal_dim 8": "--pal_dim only works with --adapter pal, which is not set. Set it, or leave",
    TUNED + "--adapter pal --lora_on key": "--lora_on only works with --adapter lora, which is not set.",
    TUNED + "--adapter lora --mixout_p 0.5": "--mixout_p only works with --adapter mixout, which is not set.",
    TUNED + "--adapter_only": "--adapter_only only works with --adapter pal or lora, which is not set.",
    TUNED + "--adapter mixout --adapter_only": "--adapter_only only works with --adapter pal or lora",
    # heads, pairings, losses
    "--sst_head cosine_affine": "--sst_head cosine_affine compares two sentences, but sst has one. Use --sst_head",
    "--head siamese": "--sst_head siamese compares two sentences, but sst has one. Use --sst_head linear or mlp.",
    "--pairing cross --sts_head siamese_cosine": (
        "--sts_head siamese_cosine compares two vectors, but --sts_pairing cross makes one of a pair. "
        "Use --sts_head linear or mlp. Or use --sts_pairing bi."
    ),
    "--para_pairing cross_symmetric --para_head sbert": "but --para_pairing cross_symmetric makes one of a pair.",
    "--para_head cosine": "--para_head cosine gives a number, but para needs a probability. Use --para_head linear or",
    "--sst_head sigmoid": "--sst_head sigmoid gives a number, but sst needs a category. Use --sst_head linear or mlp.",
    "--sts_loss bce": "--sts_loss bce: bce is for a task whose output is a probability, found sts, whose output is a",
    "--sst_loss hinge": "--sst_loss hinge: a loss must be one of",
    TUNED + "--sts_pairing cross --sts_loss mse+cosent": (
        "--sts_loss mse+cosent: cosent compares the vectors of sentences, but --sts_pairing cross makes one of a pair. "
        "Use --sts_pairing bi."
    ),
    TUNED
    + "--pairing cross_symmetric --para_loss bce+simcse:0.1": "--para_pairing cross_symmetric makes one of a pair.",
    TUNED + "--sst_loss ce+mnrl": "mnrl is for a task whose output is a probability or a number, found sst",
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
    "--sst_loss distill --teacher x --repeated_ids": "--teacher and --repeated_ids exclude each other: a row's teacher",
    TUNED + "--chunk_rows 16": (
        "--chunk_rows must be below the number of sentences in a batch, at most 16 here, found 16. Lower it, or leave"
    ),
    TUNED
    + "--pairing cross --chunk_rows 8": "--chunk_rows must be below the number of sentences in a batch, at most 8",
    "--chunk_rows 4": f"--chunk_rows 4 {ENCODER}",
    "--sts_loss mse:-1": "--sts_loss mse:-1: the weight of mse must be a number above 0, found '-1'. Write it like",
    "--sts_loss mse:": "the weight of mse must be a number above 0, found ''. Write it like mse:0.2",
    # surgery
    TUNED + "--tasks sst --combiner pcgrad": (
        "--combiner pcgrad needs at least two tasks, found sst alone. Use --combiner sum."
    ),
    TUNED + "--train_tasks sts --combiner pcgrad": "--combiner pcgrad needs at least two tasks, found sts alone.",
    "--tasks sst --train_tasks para": "--train_tasks must be among --tasks, found para. Add it to --tasks, or leave it",
    TUNED + "--combiner gradvac --sampler proportional": (
        "--combiner gradvac needs at least two tasks in a step; --sampler proportional gives one. "
        "Use --sampler round_robin, or --accumulate 3."
    ),
    TUNED + "--combiner mgda --sampler sequential": "--sampler sequential gives one. Use --sampler round_robin",
    # what needs an encoder that trains
    "--combiner pcgrad": f"--combiner pcgrad {ENCODER}",
    "--regularizer smart": f"--regularizer smart {ENCODER}",
    "--compile": f"--compile {ENCODER}",
    "--checkpoint_activations": f"--checkpoint_activations {ENCODER}",
    "--layer_decay 0.9": f"--layer_decay 0.9 {ENCODER}",
    "--adapter lora": f"--adapter lora {ENCODER}",
    TUNED + "--adapter pal --adapter_only --combiner pcgrad": (
        "--combiner pcgrad works on weights that tasks share; --adapter pal with --adapter_only trains none, found "
        "each task with its own. Use --combiner sum, or leave out --adapter_only."
    ),
    TUNED + "--adapter lora --adapter_only --layer_decay 0.9": (
        "--layer_decay 0.9 is for the encoder's layers, but --adapter_only freezes them. Leave one of them out"
    ),
    TUNED + "--adapter pal --pal_dim 6": (
        "--pal_dim must be a multiple of the encoder's 4 attention heads, found 6. Use 4, 8."
    ),
    "--sts_head cosine": (
        "--sts_head cosine has no weights of its own, and --option pretrain, the handout's default, freezes the "
        "encoder: nothing would learn. Use --option finetune, or --sts_head linear."
    ),
    # the rest
    "--share_pair_layer --tasks sst sts": "--share_pair_layer needs two tasks on pairs in --tasks, para and sts. Add",
    "--resume --predict_only --run runs/x": "--resume and --predict_only exclude each other: one trains, the other",
    "--dry_run --resume": "--dry_run and --resume exclude each other: a dry run keeps nothing. Choose one.",
    "--dry_run --predict_only --run runs/x": "--dry_run and --predict_only exclude each other",
    "--predict_only": "--predict_only needs the run to predict with. Add --run runs/NAME.",
    "--weighting fixed": "--task_weights and --weighting fixed need each other",
    "--task_weights sts=2": "--task_weights and --weighting fixed need each other",
    "--weighting fixed --tasks sst --task_weights sts=2": "a task must be one of sst, found 'sts'. Correct it.",
    "--keep_layers 3": "--keep_layers must be 1 to 2 for",
    # argparse's own
    "--combiner sgd": "argument --combiner: invalid choice: 'sgd'",
    "--tasks sst nli": "argument --tasks: invalid choice: 'nli'",
    "--fine-tune-mode half": "argument --fine-tune-mode: must be one of last-linear-layer, full-model, found 'half'",
    "--accumulate 0": "argument --accumulate: must be at least 1 and at most 4096, found '0'",
    "--para_fraction 0": "argument --para_fraction: must be above 0 and at most 1, found '0'",
    "--max_train 1": "argument --max_train: must be at least 2",
    "--max_length 513": "argument --max_length: must be at least 4 and at most 512, found '513'",
    "--patience -1": "argument --patience: must be at least 0 and at most 1000, found '-1'",
    "--weighting fixed --task_weights sts": "argument --task_weights: must be like sts=2, found 'sts'",
    TUNED + "--adapter prefix": "argument --adapter: invalid choice: 'prefix'",
    TUNED + "--adapter lora --lora_on pooler": "argument --lora_on: invalid choice: 'pooler'",
    "--optimizer lion": "argument --optimizer: invalid choice: 'lion'",
    "--smart True": "unrecognized arguments: --smart True",
}


@pytest.mark.parametrize("flags", IMPOSSIBLE)
def test_an_impossible_combination_of_flags_is_refused(flags: str, classify: Classify, tmp_path: Path):
    finished = classify(*flags.split())
    assert_refused(finished, tmp_path, IMPOSSIBLE[flags])
    if finished.err.startswith("error: ") and "--keep_layers" not in flags:
        assert A_REMEDY.search(finished.err)


def test_every_dependent_flag_is_a_case_and_exists():
    keys = vars(multitask_classifier.build_parser().parse_args([]))
    for flag, _, _ in multitask_classifier.DEPENDENT_FLAGS:
        assert any(key.startswith(flag) for key in keys)
        assert any(re.search(rf"--{flag}", case) for case in IMPOSSIBLE)


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
    assert len(list((tmp_path / "predictions").iterdir())) == 6


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
        "must hold 5 finite logits for each of its 8 ids, found an array of shape (8, 1). Predict again: ",
    ),
    "too few logits": (lambda folder: teacher(folder, logits=np.zeros((7, 5))), "found an array of shape (7, 5)."),
    "no numbers": (
        lambda folder: teacher(folder, logits=np.full((8, 5), np.nan)),
        "must hold 5 finite logits for each of its 8 ids, found NaN or infinity. Predict again: ",
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
    assert_refused(finished, tmp_path, "--sts_test_out", "found that of --sst_dev_out. Give another path.")
    assert classify("--tasks", "sst").status == 0
    finished = classify("--predict_only", "--run", tmp_path / "runs" / "r", "--sst_test_out", labels, usual=False)
    assert "--sst_test_out" in the_error(finished)
    assert labels.read_bytes() == before


def test_a_run_is_predicted_with_its_own_tasks(classify: Classify, tmp_path: Path):
    assert classify("--tasks", "sst", "sts").status == 0
    finished = classify("--predict_only", "--run", tmp_path / "runs" / "r", "--tasks", "sst", usual=False)
    assert f"--tasks sst: must be those of {tmp_path / 'runs' / 'r'}, sst sts. Leave it out." in the_error(finished)


def test_a_recipe_that_is_not_there_and_one_without_its_sign(classify: Classify):
    error = the_error(classify("@recipes/bets.txt"))
    assert (
        error
        == "error: recipes/bets.txt: cannot be read; No such file or directory. recipes/README.md lists all recipes."
    )
    assert "A file of flags is given as @FILE." in the_error(classify("recipes/best.txt"))


def test_resuming_needs_a_name(classify: Classify):
    assert "--resume needs the name of the run to go on with" in the_error(classify("--resume", usual=False))


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
    assert "--predict_train: logits are found by id, which must be unique in the training files" in the_error(finished)
    assert sorted((tmp_path / "runs" / "r").iterdir()) == before


# --- recipes ----------------------------------------------------------------------------------------------------------


def test_an_unknown_recipe_is_refused(classify: Classify, tmp_path: Path):
    assert_refused(classify("@recipes/nowhere.txt"), tmp_path, "recipes/nowhere.txt", "No such file")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("--epochs 1\n--learning_rate 3  # no such flag\n", "unrecognized arguments: --learning_rate 3"),
        ("--combiner pcgrod\n", "argument --combiner: invalid choice: 'pcgrod'"),
        ("pcgrad\n", "unrecognized arguments: pcgrad"),
        ("--lr\n", "argument --lr: expected one argument"),
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
    assert_refused(classify("--strict_data"), tmp_path, f"{path} line 10", "Mend the row, or leave out --strict_data")


@pytest.mark.parametrize(("pairing", "cut_rows"), [("bi", 0), ("cross", 1), ("cross_symmetric", 1)])
def test_pairs_longer_than_512_tokens_are_cut_and_counted(
    pairing: str, cut_rows: int, classify: Classify, task_files: Path, tmp_path: Path
):
    path = task_files / "quora-dev.csv"
    path.write_text(path.read_text().replace("1 bad, or not?\tA", "bad " * 300 + "\t" + "dull " * 300))
    finished = classify("--pairing", pairing, "--tasks", "para")
    assert finished.status == 0, finished.err
    note = f"note: {path}: {cut_rows} of 8 rows are longer than 512 tokens and were cut."
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
    assert_refused(finished, tmp_path, file / "x", "must be a directory that can be written to")
    assert file.read_text() == "kept"


def test_a_run_that_exists_is_refused_and_left_alone(classify: Classify, tmp_path: Path):
    log = tmp_path / "runs" / "r" / "log.jsonl"
    log.parent.mkdir(parents=True)
    log.write_text("kept")
    error = the_error(classify())
    for part in (f"{log.parent}: the run exists already", "--resume", "Give another --name"):
        assert part in error
    assert list((tmp_path / "runs").rglob("*.*")) == [log]
    assert log.read_text() == "kept"
    assert not list((tmp_path / "predictions").glob("*"))


# --- damaged runs -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Path:
    """The folder of a finished run, never to be changed."""
    folder = tmp_path_factory.mktemp("intact")
    write_task_files(folder / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["multitask_classifier.py", *usual_flags(folder, tiny_checkpoint), "--tasks", "sst"])
        multitask_classifier.main()
    return folder


@pytest.fixture
def run(intact: Path, tmp_path: Path) -> Path:
    """A copy of its run, in place of which this test may do what it likes."""
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
    torch.save(torch.load(path, weights_only=True) | {"progress": {"epochs": 3}}, path)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def test_an_undamaged_copy_of_a_run_predicts_and_resumes(run: Path, classify: Classify, tmp_path: Path):
    assert classify("--predict_only", "--run", run, usual=False).status == 0
    assert len(list((tmp_path / "predictions").iterdir())) == 2
    finished = classify("--tasks", "sst", "--resume")
    assert finished.status == 0, finished.err


WEIGHTS = {
    cut: "model.safetensors: not a whole weights file",
    garbled: "model.safetensors: not a whole weights file",
    emptied: "model.safetensors: not a whole weights file",
    Path.unlink: "model.safetensors: not a whole weights file",
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
    Path.unlink: "state.pt does not exist; no epoch was finished",
}


@pytest.mark.parametrize("damage", STATES, ids=lambda damage: damage.__name__)
def test_a_damaged_state_of_a_run_is_named(damage: Callable, run: Path, classify: Classify, tmp_path: Path):
    damage(run / "state.pt")
    weights = (run / "model.safetensors").read_bytes()
    error = the_error(classify("--tasks", "sst", "--resume"))
    assert f"--resume: {run}" in error
    assert STATES[damage] in error
    assert "Start anew with" in error
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
    (tmp_path / "empty" / "r").mkdir(parents=True)
    folder = tmp_path / "empty" / ("r" if "--run" in flags else "")
    finished = classify(*flags, folder)
    assert_refused(finished, tmp_path, tmp_path / "empty" / "r", "must be the directory of a run, but has no args.json")
    assert not list((tmp_path / "empty" / "r").iterdir())


def test_predict_only_with_the_flags_of_another_model_is_refused(run: Path, classify: Classify, tmp_path: Path):
    error = the_error(classify("--predict_only", "--run", run, "--sst_head", "mlp", usual=False))
    assert "the weights do not fit this model" in error
    assert "Build it with the flags of the run that wrote them" in error


def test_an_interrupt_ends_in_one_line(classify: Classify, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(multitask_classifier, "choose_device", interrupted)
    assert classify() == Finished(130, "", "error: interrupted\n")


# --- as a user sees it ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--option", "finetune", "--combiner", "pcgrad", "--sampler", "uniform"], "--combiner pcgrad needs at least"),
        (["--tasks", "sst"], "the run exists already"),
        (["--predict_only", "--run", "RUN"], "not a whole weights file"),
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
