"""sanity_check.py prints one line on success, and detects a wrong BERT."""

import importlib
import math
import sys

import pytest
import torch
from conftest import padded, run_script

import bert
import sanity_check
import utils
from utils import InputError


@pytest.mark.parametrize("script", ["sanity_check", "optimizer_test"])
def test_the_handouts_checks_have_help_and_refuse_arguments_in_one_line(script: str, monkeypatch, capsys) -> None:
    module = importlib.import_module(script)

    def status(*flags: str) -> int:
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *flags])
        monkeypatch.setattr(module, "main", lambda: pytest.fail("the check ran"))
        with pytest.raises(SystemExit) as stop:
            utils.run_script(module.script)
        return stop.value.code or 0

    for flag in ("-h", "--help"):
        assert status(flag) == 0
        assert capsys.readouterr().out.startswith(f"usage: {script}.py")
    assert status("--verbose") == 2
    assert capsys.readouterr().err == f"error: unknown flag --verbose. See {script}.py --help.\n"
    assert status("bert.py") == 2
    assert capsys.readouterr().err.startswith("error: unexpected argument 'bert.py'")


def test_sanity_check_prints_one_line_on_success() -> None:
    result = run_script("sanity_check.py")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("Your BERT implementation is correct!")
    assert result.stdout.count("\n") == 1


@pytest.mark.parametrize(("course", "named"), [(None, ""), (0.0, ", bert-base-uncased")])
def test_the_line_names_every_check_that_was_run(course, named: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sanity_check, "check_course", lambda: course)
    assert sanity_check.main() == 0
    expected = f"Your BERT implementation is correct! (minilm, a small random BERT{named})\n"
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize(("error", "status"), [(9e-6, 0), (2e-5, 1), (math.nan, 1)])
@pytest.mark.parametrize("check", ["check_minilm", "check_tiny", "check_course"])
def test_each_check_allows_an_error_of_at_most_1e_5(check: str, error: float, status: int, monkeypatch) -> None:
    for name in ("check_minilm", "check_tiny", "check_course"):
        monkeypatch.setattr(sanity_check, name, lambda: 0.0)
    monkeypatch.setattr(sanity_check, check, lambda: error)
    assert sanity_check.main() == status


def unscaled(query, key, value, mask, drop):
    return (query @ key.transpose(-2, -1) + mask).softmax(-1) @ value


def unmasked(query, key, value, mask, drop):
    return bert.written_attention(query, key, value, torch.zeros_like(mask), drop)


@pytest.mark.parametrize("wrong", [unscaled, unmasked])
def test_sanity_check_fails_on_a_wrong_attention(wrong, monkeypatch, capsys) -> None:
    original = bert.BertSelfAttention.attention

    def attention(self, *tensors):
        self.attend = wrong
        return original(self, *tensors)

    monkeypatch.setattr(bert.BertSelfAttention, "attention", attention)
    assert sanity_check.main() == 1
    assert "FAILED" in capsys.readouterr().err


def test_the_courses_own_reference_is_used_if_it_is_available(monkeypatch, tmp_path, tiny_checkpoint) -> None:
    """With the course's file and weights (here a tiny replacement for both), the third check runs and can fail."""
    from bert import BertModel
    from tokenizer import BertTokenizer

    tokenizer = BertTokenizer.from_pretrained(tiny_checkpoint)
    batch = padded(tokenizer, ["hello world", "hello neural network for NLP"])
    with torch.no_grad():
        outputs = BertModel.from_pretrained(str(tiny_checkpoint)).eval()(**batch)
    torch.save(outputs, tmp_path / "sanity_check.data")
    monkeypatch.setattr(sanity_check, "COURSE_FILE", tmp_path / "sanity_check.data")
    for name in ("base_bert", "tokenizer", "sanity_check"):
        monkeypatch.setattr(f"{name}.find_checkpoint", lambda *_, **settings: tiny_checkpoint)
    assert sanity_check.check_course() <= 0
    for wrong in outputs:
        torch.save(outputs | {wrong: outputs[wrong] + 1}, tmp_path / "sanity_check.data")
        assert sanity_check.check_course() > 0.1, wrong


def test_without_the_courses_weights_its_check_is_skipped(monkeypatch, tmp_path) -> None:
    def find_checkpoint(name: str) -> None:
        raise InputError(f"{name}: not available")

    (tmp_path / "sanity_check.data").touch()
    monkeypatch.setattr(sanity_check, "COURSE_FILE", tmp_path / "sanity_check.data")
    monkeypatch.setattr(sanity_check, "find_checkpoint", find_checkpoint)
    assert sanity_check.check_course() is None


def test_without_the_courses_file_its_check_is_skipped(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(sanity_check, "COURSE_FILE", tmp_path / "nowhere")
    assert sanity_check.check_course() is None
