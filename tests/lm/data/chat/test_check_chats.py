"""Every line looked at: what is kept, cut and skipped, by number; one fault hides no other."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.lm.data.chat.kit import make_tokenizer

from homing.errors import DataError
from homing.lm.data.chat.chat_settings import find_chat_files, open_renderer
from homing.lm.data.chat.check_chats import Doctor, Kept

ROOT = Path(__file__).parents[4]


def chat(*words: str) -> list[dict[str, Any]]:
    roles = ["user", "assistant"] * len(words)
    return [{"role": role, "content": text} for role, text in zip(roles, words, strict=False)]


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def examine(path: Path, doctor: Doctor | None = None, side: str = "train") -> tuple[Doctor, list[Kept]]:
    doctor = doctor or Doctor()
    (source,) = find_chat_files([str(path)])[0]
    return doctor, list(doctor.examine(source, side))


def found(doctor: Doctor) -> list[tuple[int, str, str]]:
    return [(finding.line, finding.kind, finding.action) for finding in doctor.findings]


@pytest.mark.acceptance(20)
def test_fifty_faults_and_more_are_found_on_their_lines_and_none_is_invented() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/chat_faults.py"), "--quick"],
        capture_output=True,
        text=True,
        timeout=250,
    )
    last = (done.stdout.splitlines() or [""])[-1]
    assert done.returncode == 0, done.stdout + done.stderr
    assert last.startswith("PASS")
    assert int(last.split()[1]) >= 50


@pytest.mark.acceptance(32)
@pytest.mark.parametrize(
    ("form", "record"),
    [
        ("messages", {"messages": chat("hello", "well")}),
        ("list", chat("hello", "well")),
        ("alpaca", {"instruction": "hello", "input": "", "output": "well"}),
        ("sharegpt", {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "well"}]}),
        ("pair", {"prompt": "hello", "completion": "well"}),
        ("pair", {"prompt": chat("hello"), "completion": [{"role": "assistant", "content": "well"}]}),
        ("pair", {"prompt": "hello", "response": "well"}),
        ("pair", {"question": "hello", "answer": "well"}),
    ],
)
def test_every_form_gives_the_same_conversation(tmp_path: Path, form: str, record: Any) -> None:
    doctor, kept = examine(write(tmp_path / "a.jsonl", record))
    assert doctor.files[0].form == form
    assert [k.conversation.messages for k in kept] == [chat("hello", "well")]
    assert not doctor.findings


def test_a_pair_that_lacks_a_side_or_has_no_words_there_is_a_fault(tmp_path: Path) -> None:
    good = {"prompt": "hello", "completion": "well", "system": "be brief", "id": 7}
    doctor, kept = examine(write(tmp_path / "a.jsonl", good, {"prompt": "a"}, {"prompt": "a", "completion": 3}))
    assert [m["content"] for m in kept[0].conversation.messages] == ["be brief", "hello", "well"]
    assert (2, "no-form", "skipped") in found(doctor)
    assert (3, "wrong-type", "skipped") in found(doctor)
    assert any(finding.kind == "unused-fields" and "id" in finding.text for finding in doctor.findings)


def test_fields_next_to_the_turns_are_kept(tmp_path: Path) -> None:
    alpaca = {"instruction": "add", "input": "1 2", "output": "3", "system": "be brief", "history": [["a", "b"]]}
    _, kept = examine(write(tmp_path / "a.jsonl", alpaca))
    assert [m["content"] for m in kept[0].conversation.messages] == ["be brief", "a", "b", "add\n\n1 2", "3"]
    call = {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'}
    turns = [
        {"from": "human", "value": "?"},
        call,
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "2"},
    ]
    share = {"conversations": turns, "system": "s", "tools": '[{"name": "add"}]'}
    _, kept = examine(write(tmp_path / "s.jsonl", share))
    conversation = kept[0].conversation
    assert [m["role"] for m in conversation.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert conversation.messages[2]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert conversation.tools == [{"name": "add"}]
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        *chat("", "c")[1:],
    ]
    _, kept = examine(write(tmp_path / "p.jsonl", parts))
    assert kept[0].conversation.messages[0]["content"] == "ab"


def test_an_array_in_a_json_file_is_read_with_the_lines_of_its_elements(tmp_path: Path) -> None:
    good = {"instruction": "a", "output": "b"}
    path = tmp_path / "alpaca_data.json"
    path.write_text(json.dumps([good, {"instruction": "a"}, {**good, "output": "c"}], indent=2))
    doctor, kept = examine(path)
    assert len(kept) == 2
    assert found(doctor) == [(6, "wrong-type", "skipped")]
    path.write_text(json.dumps([good, {**good, "output": "c"}]))  # all on one line
    assert len(examine(path)[1]) == 2
    path.write_text("\n".join(json.dumps(chat("a", str(n))) for n in range(3)))  # lines all the same
    assert len(examine(path)[1]) == 3


def test_packed_files_a_mark_at_the_start_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    lines = "\ufeff" + "\r\n".join(json.dumps(chat("a", str(n))) for n in range(3))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    doctor, kept = examine(tmp_path / "a.jsonl.gz")
    assert len(kept) == 3
    assert not doctor.findings


@pytest.mark.acceptance(32)
def test_a_damaged_file_stops_and_nothing_takes_its_place(tmp_path: Path) -> None:
    lines = "\n".join(json.dumps(chat("a", str(n))) for n in range(500))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode())[:-40])
    with pytest.raises(DataError, match="not a complete gzip file"):
        examine(tmp_path / "a.jsonl.gz")
    with pytest.raises(DataError, match="does not exist"):
        find_chat_files([str(tmp_path / "absent.jsonl")])


def test_duplicates_are_skipped_and_named_with_the_first(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", chat("a", "b"), chat("c", "d"), chat("a", "b"))
    doctor, kept = examine(path)
    assert len(kept) == 2
    assert found(doctor) == [(3, "duplicate", "skipped")]
    assert f"{path}:1" in doctor.findings[0].text
    assert doctor.num_faults == 0


def test_a_leak_is_found_though_case_and_spaces_differ(tmp_path: Path) -> None:
    doctor, _ = examine(write(tmp_path / "val.jsonl", chat("Hello  there", "b")), side="val")
    doctor, kept = examine(write(tmp_path / "a.jsonl", chat("hello there", "B"), chat("x", "y")), doctor)
    assert [k.line for k in kept] == [2]
    assert found(doctor) == [(1, "leak", "skipped")]
    assert doctor.num_faults == 1


@pytest.mark.acceptance(20)
def test_a_long_conversation_is_cut_at_the_last_answer_that_fits_or_skipped(tmp_path: Path) -> None:
    renderer = open_renderer(make_tokenizer(tmp_path / "t"))
    long = "word " * 40
    records = [chat("a", "b", "c", "d"), chat("a", "b", long, "d", "e", "f"), chat(long, "b")]
    doctor, kept = examine(write(tmp_path / "a.jsonl", *records), Doctor(renderer, 100))
    assert [k.line for k in kept] == [1, 2]
    assert found(doctor) == [(2, "too-long", "cut"), (3, "too-long", "skipped")]
    assert "1 of 3 answers" in doctor.findings[0].text
    whole = renderer.render(kept[1].conversation)[0]
    assert kept[1].examples[0].ids.tolist() == whole.ids[: whole.turn_ends[0]].tolist()
    file = doctor.files[0]
    assert (file.num_lines, file.num_kept, file.num_cut, file.num_skipped) == (3, 2, 1, 1)


def test_a_conversation_of_context_plus_one_still_fits(tmp_path: Path) -> None:
    """The last token is only a target, so as many inputs as the context has are left."""
    renderer = open_renderer(make_tokenizer(tmp_path / "t"))
    path = write(tmp_path / "a.jsonl", chat("a", "bcd"))
    _, kept = examine(path, Doctor(renderer))
    length = len(kept[0].examples[0].ids)
    assert len(examine(path, Doctor(renderer, length - 1))[1]) == 1
    assert len(examine(path, Doctor(renderer, length - 2))[1]) == 0


def test_a_folder_gives_its_conversations_and_nothing_else(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.json", "c.ndjson.gz", "README.md", ".hidden.jsonl"):
        (tmp_path / name).write_text("x")
    assert [Path(s.path).name for s in find_chat_files([str(tmp_path)])[0]] == ["a.jsonl", "b.json", "c.ndjson.gz"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has no conversations"):
        find_chat_files([str(tmp_path / "empty")])
