from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML

import homing.presets
from homing.api.tools.explain_key import run_file_schema
from homing.cli import main as cli
from homing.config.schema.keys import all_keys, sections

PRESETS = Path(homing.presets.__file__ or "").parent


def run_homing(monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    monkeypatch.setattr(sys, "argv", ["homing", *argv])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.mark.acceptance(143)
def test_every_key_has_words_a_type_a_default_and_an_example() -> None:
    for found in all_keys().values():
        assert found.about.endswith((".", "yet.")), found.path
        assert found.kind, found.path
        assert found.default, found.path
        assert found.example, found.path
    assert all(about.endswith(".") for about in sections().values())


def test_a_key_is_explained_by_any_way_of_writing_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for way in ("phases.0.lr", "phases[0].lr", "phases.N.lr", "phases.lr", "lr"):
        assert run_homing(monkeypatch, "explain", way) == 0
        said = capsys.readouterr().out
        assert "phases.0.lr" in said
        assert "more than 0" in said
        assert "--set phases.0.lr=3e-4" in said


@pytest.mark.acceptance(150)
@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("cloud.runpod.image", "Otherwise, torch is installed at boot"),
        ("cloud.runpod.min_cuda", "An image does not start if it was built for a newer CUDA version"),
        ("phases.0.epochs", "beyond about 4, further passes teach little"),
    ],
)
def test_a_choice_of_image_cuda_or_epochs_is_explained_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], key: str, why: str
) -> None:
    assert run_homing(monkeypatch, "explain", key) == 0
    assert why in " ".join(capsys.readouterr().out.split())


@pytest.mark.acceptance("X18")
@pytest.mark.parametrize(
    ("reference", "ours"), [("test_fraction", "phases.0.data.val_fraction"), ("test_mode", "phases.0.steps")]
)
def test_a_trial_on_little_data_by_the_names_of_others_is_answered_with_smoke(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], reference: str, ours: str
) -> None:
    assert run_homing(monkeypatch, "explain", reference) == 0
    said = capsys.readouterr()
    assert f"{reference} is called {ours}" in said.err
    assert "add --smoke to any command" in said.err
    assert ours in said.out


def test_a_name_that_several_sections_have_shows_all_of_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_homing(monkeypatch, "explain", "every", "--json") == 0
    paths = {entry["path"] for entry in json.loads(capsys.readouterr().out)["keys"]}
    assert {"eval.every", "checkpoint.every", "sample.every"} <= paths


def test_alone_it_lists_all_sections_and_keys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_homing(monkeypatch, "explain") == 0
    said = capsys.readouterr().out
    assert all(section in said for section in sections())
    assert all(found.name in said for found in all_keys().values())


@pytest.mark.parametrize("section", ["limits", "phases", "phases.0", "phases.0.eval", "model"])
def test_a_section_lists_its_keys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], section: str
) -> None:
    assert run_homing(monkeypatch, "explain", section) == 0
    assert "description" in capsys.readouterr().out


@pytest.mark.acceptance(98)
def test_another_trainers_name_is_answered_with_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_homing(monkeypatch, "explain", "num_train_epochs") == 0
    said = capsys.readouterr()
    assert "is called phases.0.epochs" in said.err
    assert "phases.0.epochs" in said.out


@pytest.mark.parametrize(("typed", "ours"), [("model.widht", "model.width"), ("limts", "limits"), (".", ""), ("", "")])
def test_an_unknown_key_is_refused_with_the_nearest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], typed: str, ours: str
) -> None:
    assert run_homing(monkeypatch, "explain", typed) == 2
    assert ours in capsys.readouterr().err


def test_a_section_is_found_by_its_last_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for word, path in (("runpod", "cloud.runpod"), ("lora", "phases.N.lora"), ("ssh", "cloud.ssh")):
        assert run_homing(monkeypatch, "explain", word) == 0
        assert capsys.readouterr().out.startswith(f"{path}: ")


def test_the_fix_of_a_mistyped_key_is_the_command_with_the_right_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_homing(monkeypatch, "explain", "modle.depht") == 2
    assert "fix homing explain model.depth " in capsys.readouterr().err
    assert run_homing(monkeypatch, "explain", "zork") == 2
    assert "fix homing explain\n" in capsys.readouterr().err


def test_an_example_can_be_pasted_into_a_shell_unchanged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_homing(monkeypatch, "explain", "limits.spend") == 0
    assert "--set 'limits.spend=$12.00'" in capsys.readouterr().out  # unquoted, a shell makes 2.00 of it


def test_a_key_typed_without_its_underscore_is_answered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_homing(monkeypatch, "explain", "spendlimit") == 2
    assert "limits.spend" in capsys.readouterr().err


def test_a_mistyped_verb_is_answered_with_the_whole_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_homing(monkeypatch, "explian", "limits.spend") == 2
    assert "fix homing explain limits.spend" in capsys.readouterr().err


def test_a_wrong_option_is_an_error_like_any_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_homing(monkeypatch, "explain", "--loud", "--json") == 2
    said = capsys.readouterr()
    assert "--loud" in json.loads(said.out)["what"]
    assert "fix homing explain --help" in said.err


def test_a_numeric_key_is_called_a_number_and_not_a_text() -> None:
    """The range of a key is numeric, so its type must be too."""
    wrong = [found.path for found in all_keys().values() if found.allowed and found.kind == "a string"]
    assert wrong == []


def test_the_json_schema_accepts_what_the_run_file_accepts() -> None:
    check = Draft202012Validator(run_file_schema())
    for preset in PRESETS.glob("*.yaml"):
        assert [error.message for error in check.iter_errors(YAML(typ="safe").load(preset))] == [], preset.name
    for found in all_keys().values():
        document = nested(found.path, YAML(typ="safe").load(found.example))
        assert [error.message for error in check.iter_errors(document)] == [], found.path


def test_the_json_schema_refuses_an_unknown_key_and_a_wrong_type() -> None:
    check = Draft202012Validator(run_file_schema())
    for wrong in ({"modle": {}}, {"model": {"dept": 4}}, {"model": {"depth": [4]}}, {"phases": [{"kind": "pretrian"}]}):
        assert list(check.iter_errors(wrong)), wrong


def nested(path: str, value: object) -> dict[str, object]:
    """Put a value at its path, with a phase of the right shape around a key of `phases.N`."""
    for part in reversed(path.split(".")):
        value = [value] if part == "N" else {part: value}
    phases = value.get("phases") if isinstance(value, dict) else None
    for phase in phases if isinstance(phases, list) else []:
        phase.setdefault("kind", "pretrain")
    assert isinstance(value, dict)
    return value


def test_explain_prints_the_json_schema(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_homing(monkeypatch, "explain", "--schema") == 0
    assert json.loads(capsys.readouterr().out) == run_file_schema()
    assert run_homing(monkeypatch, "explain", "--schema", "--json") == 0
    assert json.loads(capsys.readouterr().out)["json_schema"] == run_file_schema()
    assert run_homing(monkeypatch, "explain", "--schema", "model.depth") == 2
    assert "homing explain model.depth" in capsys.readouterr().err
