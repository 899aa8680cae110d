"""Shards that were made from other text, or with other settings, than the run file names now."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tests.cli.control_rig import Homing, cli_with
from tests.cli.typed import Homing as Typed

from homing.config.load import load_run

cli = cli_with(steps=12)

RUN_FILE = """\
data:
  text: [texts/*.txt]
  val_fraction: 0.1
tokenizer: {vocab_size: 300}
model: {layers: 2, width: 32, heads: 2, context: 64}
phases:
  - {kind: pretrain, steps: 4, batch_tokens: 128}
"""
CHAT_RUN_FILE = (
    RUN_FILE + "  - {kind: sft, steps: 2, batch_tokens: 128, data: {chat: [talk.jsonl], val_fraction: 0.2}}\n"
)


def lines(start: int) -> str:
    return "".join(
        f"Line {n}: the cat sat on the mat, and the {n % 7} hats were flat.\n\n\n" for n in range(start, start + 60)
    )


def conversation(n: int) -> str:
    turns = [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"A number, {n}."}]
    return json.dumps({"messages": turns}) + "\n"


@pytest.fixture
def here(homing: Typed, tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    (tmp_path / "texts").mkdir()
    for name, start in (("a.txt", 0), ("b.txt", 500)):
        (tmp_path / "texts" / name).write_text(lines(start))
    (tmp_path / "runs/cat.yaml").write_text(RUN_FILE)
    return tmp_path


@pytest.mark.regression("stale-shards")
@pytest.mark.parametrize(
    "argv",
    [
        ["plan", "moss"],
        ["verify", "moss", "--no-run"],
        ["train", "moss"],
        ["launch", "moss", "--yes", "--spend-limit", "1"],
    ],
    ids=lambda argv: argv[0],
)
def test_no_verb_uses_shards_of_other_text(cli: Homing, argv: list[str]) -> None:
    Path("fern.txt").write_text("ferns grow in the shade\n")
    text = Path("runs/moss.yaml").read_text()
    Path("runs/moss.yaml").write_text(text.replace("[moss.txt]", "[fern.txt]"))
    said = cli(*argv)
    assert said.code == 2
    assert "do not match" in said.err
    assert "fern.txt" in said.err
    assert "homing prep moss" in said.err


@pytest.mark.regression("stale-shards")
@pytest.mark.parametrize("change", ["longer", "same size", "added", "removed", "held out"])
def test_every_way_in_which_the_text_can_change_is_seen(here: Path, homing: Typed, change: str) -> None:
    code, _, said = homing("prep", "cat")
    assert code == 0, said
    code, _, said = homing("verify", "cat", "--no-run")
    assert code == 0, said
    file = here / "texts/b.txt"
    if change == "longer":
        file.write_text(lines(0) + "One more line.\n")
    elif change == "same size":
        file.write_text(lines(500).replace("cat", "dog"))
    elif change == "added":
        (here / "texts/c.txt").write_text(lines(900))
    elif change == "removed":
        file.unlink()
    else:
        (here / "runs/cat.yaml").write_text(RUN_FILE.replace("val_fraction: 0.1", "validation: [texts/b.txt]"))
    code, _, said = homing("verify", "cat", "--no-run")
    assert code == 2, said
    assert "homing prep cat" in said
    assert "c.txt" in said if change == "added" else "b.txt" in said
    assert homing("prep", "cat")[0] == 0
    code, _, said = homing("verify", "cat", "--no-run")
    assert code == 0, said


@pytest.mark.parametrize(
    ("old", "new", "difference"),
    [
        ("val_fraction: 0.1", "val_fraction: 0.2", "held-out fraction is 0.2 now and was 0.1 then"),
        ("val_fraction: 0.1", "val_fraction: 0.1\n  take: 3kB", "data.take is 3000 now and was 0 then"),
        ("vocab_size: 300", "vocab_size: 300, split: gpt2", "tokenizer.split is gpt2 now and was gpt4 then"),
    ],
)
def test_changed_settings_are_detected(here: Path, homing: Typed, old: str, new: str, difference: str) -> None:
    assert homing("prep", "cat")[0] == 0
    (here / "runs/cat.yaml").write_text(RUN_FILE.replace(old, new))
    code, _, said = homing("verify", "cat", "--no-run")
    assert code == 2
    assert difference in said


def test_a_touched_copied_or_removed_text_is_no_other_text(here: Path, homing: Typed) -> None:
    assert homing("prep", "cat")[0] == 0
    os.utime(here / "texts/a.txt", ns=(1, 1))
    assert homing("verify", "cat", "--no-run")[0] == 0
    (here / "runs/cat.yaml").write_text(RUN_FILE.replace("texts/*.txt", "texts/a.txt, texts/b.txt"))
    assert homing("verify", "cat", "--no-run")[0] == 0, "the same files by other names"
    (here / "texts").rename(here / "archive")
    assert homing("verify", "cat", "--no-run")[0] == 0, "who has the shards may move the text away"


@pytest.mark.regression("stale-shards")
def test_changed_conversations_are_detected(here: Path, homing: Typed) -> None:
    (here / "talk.jsonl").write_text("".join(conversation(n) for n in range(20)))
    (here / "runs/cat.yaml").write_text(CHAT_RUN_FILE)
    code, _, said = homing("prep", "cat")
    assert code == 0, said
    assert homing("verify", "cat", "--no-run")[0] == 0
    (here / "talk.jsonl").write_text("".join(conversation(n) for n in range(30)))
    code, _, said = homing("verify", "cat", "--no-run")
    assert code == 2
    assert "talk.jsonl" in said
    assert "homing prep cat" in said


@pytest.mark.slow
def test_doctor_and_rehearse_take_them_for_not_prepared(here: Path, homing: Typed) -> None:
    assert homing("prep", "cat")[0] == 0
    (here / "texts/b.txt").write_text(lines(3))
    assert load_run("cat").is_prepared
    _, out, said = homing("doctor", "cat")
    assert "has not been prepared yet" in out + said
