"""`homing.load`: generate, chat, logits and scores of a trained model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from tests.cli.trained import make_checkpoint
from tests.cli.typed import Homing

import homing as package


@pytest.fixture(autouse=True)
def printed_notices() -> None:
    """The library alone: nothing listens to its notices."""


@pytest.fixture
def model(homing: Homing, tmp_path: Path) -> package.Model:
    make_checkpoint(tmp_path / "models" / "tiny", tmp_path / "data")
    return package.load("tiny", device="cpu")


def test_generate_gives_the_text_of_the_verb(
    model: package.Model, homing: Homing, capsys: pytest.CaptureFixture[str]
) -> None:
    text = model.generate("the cat", tokens=12, seed=1)
    assert capsys.readouterr() == ("", "")
    _, out, _ = homing("generate", "tiny", "--prompt", "the cat", "--tokens", "12", "--seed", "1", "-q", "--json")
    assert json.loads(out)["text"] == text


def test_a_score_is_the_sum_of_its_tokens(model: package.Model) -> None:
    score = model.score("the cat")
    assert len(score.tokens) == len(score.log_probs) == len(model.logits("the cat")) - 1
    assert score.bits_per_byte == pytest.approx(-sum(score.log_probs) / math.log(2) / len("the cat"))
    assert all(each < 0 for each in score.log_probs)


def test_chat_answers_and_refuses_what_is_no_conversation(model: package.Model) -> None:
    assert model.chat("hello", tokens=4, seed=1) == model.chat([{"role": "user", "content": "hello"}], tokens=4, seed=1)
    with pytest.raises(package.UsageError, match="not a conversation"):
        model.chat([{"role": "assistant", "content": "hello"}])


def test_a_folder_is_loaded_and_shown(model: package.Model, homing: Homing) -> None:
    assert package.load(Path("models/tiny"), device="cpu").folder == model.folder
    assert "parameters, cpu" in repr(model)
    with pytest.raises(package.DataError):
        package.load("nothing-here")


def test_eval_gives_the_document_of_the_verb_and_writes_its_report(
    model: package.Model, homing: Homing, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("the cat sat on a mat. " * 200)
    measured = model.eval(text=["text.txt"], out="by-call.md")
    assert capsys.readouterr() == ("", "")
    _, out, _ = homing("eval", "tiny", "--text", "text.txt", "--device", "cpu", "--out", "typed.md", "--json")
    typed = json.loads(out)
    assert (measured["models"], measured["results"]) == (typed["models"], typed["results"])
    assert {path.name for path in tmp_path.glob("*.*") if path.stem in ("by-call", "typed")} == {
        "by-call.md", "by-call.json", "typed.md", "typed.json",
    }  # fmt: skip
    with pytest.raises(package.UsageError, match="no set has questions"):
        model.eval(text=["text.txt"], pass_at=[2])
