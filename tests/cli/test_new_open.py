"""`homing new --from hf:OWNER/NAME` or a folder: a run file that fine-tunes open weights, and what is refused."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cloud.rig import Said, homing
from tests.config.test_open_weights import papers, write

from homing.config import load_run

Say = Callable[[str], Said]


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my chats.jsonl").write_text('{"messages": []}\n')

    def run(line: str) -> Said:
        return homing(capsys, monkeypatch, *shlex.split(line))

    return run


def test_a_folder_of_open_weights_becomes_a_run_that_loads(say: Say, tmp_path: Path) -> None:
    write(tmp_path / "some base", papers())
    said = say("new tune --from './some base' --chat 'my chats.jsonl'")
    assert said.code == 0, said.err
    assert "Then: homing prep tune" in said.err
    run = load_run("tune", is_for_prep=True).run
    assert [(phase.kind, phase.method) for phase in run.phases] == [("sft", "lora")]
    assert run.base is not None
    assert run.base.address == str((tmp_path / "some base").resolve())


def test_the_hub_is_not_asked_and_the_address_stands_in_the_file(say: Say) -> None:
    said = say("new tune --from hf:Qwen/Qwen3-0.6B@main --json")
    assert said.json["next"] == "homing prep tune"
    assert "\n  from: hf:Qwen/Qwen3-0.6B@main\n" in Path("runs/tune.yaml").read_text()
    assert "There are no conversations at chats.jsonl yet" in said.err
    assert say("new tune --from hf:Qwen/Qwen3-0.6B").code == 2  # never written over


@pytest.mark.parametrize(
    ("line", "what", "fix"),
    [
        ("new t --from Qwen/Qwen3-0.6B", "no open weights 'Qwen/Qwen3-0.6B'", "homing new t --from hf:Qwen/Qwen3-0.6B"),
        ("new t --from hf:Qwen", "no open weights 'hf:Qwen'", "homing new t --from hf:OWNER/NAME"),
        ("new t --from hf:a/b --chat no.jsonl", "no file or folder 'no.jsonl'", "--chat YOUR_CHATS.jsonl"),
        ("new t --from hf:a/b --text 'my chats.jsonl'", "learns from conversations", "--chat YOUR_CHATS.jsonl"),
        ("new t --from tiny --chat 'my chats.jsonl'", "goes with open weights", "--chat 'my chats.jsonl'"),
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
