"""`homing new --from hf:OWNER/NAME` or a folder: a run file that fine-tunes open weights, and what is refused."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cloud.rig import Said, homing
from tests.config.weights.test_open_weights import documents, write

from homing.config.load import load_run

Say = Callable[[str], Said]


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my chats.jsonl").write_text('{"messages": []}\n')

    def run(line: str) -> Said:
        return homing(capsys, monkeypatch, *shlex.split(line))

    return run


def test_a_folder_of_open_weights_becomes_a_run_that_loads(say: Say, tmp_path: Path) -> None:
    write(tmp_path / "some base", documents())
    said = say("new tune --from './some base' --chat 'my chats.jsonl'")
    assert said.code == 0, said.err
    assert "Then: homing prep tune" in said.err
    run = load_run("tune", is_for_prep=True).run
    assert [(phase.kind, phase.method) for phase in run.phases] == [("sft", "lora")]
    assert run.base is not None
    assert run.base.address == str((tmp_path / "some base").resolve())


def test_a_folder_that_is_named_without_its_path_is_answered_with_it(say: Say, tmp_path: Path) -> None:
    write(tmp_path / "base", documents())
    said = say("new tune --from base --chat 'my chats.jsonl'")
    assert said.code == 2
    assert "homing new tune --from ./base --chat 'my chats.jsonl'" in said.err


def test_a_name_that_yaml_would_take_for_something_else_stays_a_name(say: Say, tmp_path: Path) -> None:
    write(tmp_path / "base", documents())
    for name, given in (("12", "./base --chat 'my chats.jsonl'"), ("1e5", "tiny"), ("null", "tiny"), ("on", "tiny")):
        said = say(f"new {name} --from {given}")
        assert said.code == 0, said.err
        assert load_run(name, is_for_prep=True).run.name == name


def test_new_writes_the_hub_address_without_asking_the_hub(say: Say) -> None:
    said = say("new tune --from hf:Qwen/Qwen3-0.6B@main --json")
    assert said.json["next"] == "homing prep tune"
    assert "\n  from: hf:Qwen/Qwen3-0.6B@main\n" in Path("runs/tune.yaml").read_text()
    assert "No conversations found at chats.jsonl" in said.err
    assert say("new tune --from hf:Qwen/Qwen3-0.6B").code == 2  # never written over


@pytest.mark.parametrize(
    ("line", "what", "fix"),
    [
        (
            "new t --from Qwen/Qwen3-0.6B",
            "Open weights not found: 'Qwen/Qwen3-0.6B'",
            "homing new t --from hf:Qwen/Qwen3-0.6B",
        ),
        ("new t --from hf:../..", "Open weights not found: 'hf:../..'", "homing new t --from hf:OWNER/NAME"),
        ("new t --from a/b --chat '{c}.jsonl'", "Open weights not found: 'a/b'", "--from hf:a/b --chat '{c}.jsonl'"),
        ("new t --from hf:Qwen", "Open weights not found: 'hf:Qwen'", "homing new t --from hf:OWNER/NAME"),
        ("new t --from hf:a/b --chat no.jsonl", "no file or folder 'no.jsonl'", "--chat YOUR_CHATS.jsonl"),
        ("new t --from hf:a/b --text 'my chats.jsonl'", "needs chat data", "--chat YOUR_CHATS.jsonl"),
        (
            "new t --from tiny --chat 'my chats.jsonl'",
            "also needs --text",
            "--text YOUR_TEXT.txt --chat 'my chats.jsonl'",
        ),
        (
            "new t --from tiny --text 'my chats.jsonl' --chat no.jsonl",
            "no file or folder 'no.jsonl'",
            "--chat YOUR_CHATS",
        ),
        ("new t --from ./", "is not a model that homing can open", ""),
    ],
)
def test_what_is_no_open_weights_or_no_chat_is_refused_and_leaves_no_file(
    say: Say, line: str, what: str, fix: str
) -> None:
    said = say(line)
    assert said.code == 2
    assert what in said.err
    assert fix in said.err.partition("  fix ")[2]
    assert not Path("runs/t.yaml").exists()


def test_conversations_in_a_store_are_looked_at_by_the_name_of_the_run(say: Say) -> None:
    said = say("new tune --from hf:a/b --chat 'hf:datasets/OWNER/NAME/*.jsonl'")
    assert said.code == 0, said.err
    assert "homing data check tune   Then: homing prep tune" in said.err
