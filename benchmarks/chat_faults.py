"""Faults planted in chat files: `homing data check` finds each one, on its line, by its name, and nothing else.

    good conversations in four forms -> one fault a line, at lines drawn by the seed -> the real command line -> its
    report, line by line, against what was planted

Passes when in every file the found lines and kinds are exactly the planted ones (none missed, no good line blamed),
damage to a whole file is reported with a line too, and no run ends in a traceback or an exit code other than 2.

python benchmarks/chat_faults.py [--quick] [--seed N] [--rounds N]
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gzip
import io
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT), str(ROOT / "benchmarks")]

from tests.lm.data.chat.kit import make_tokenizer  # noqa: E402

import homing.cli.main as cli  # noqa: E402
from _result import write_proof  # noqa: E402

LEAST_FAULTS = 50
CONTEXT = 400  # tokens; a good conversation has fewer
GOOD_LINES = 40  # between the faults of one file
Change = Callable[[dict[str, Any]], object]
Raw = Callable[[bytes], bytes]


def _turn(record: dict[str, Any], number: int, **values: Any) -> None:
    record["messages"][number].update(values)


def _insert(record: dict[str, Any], place: int, role: str, **values: Any) -> None:
    record["messages"].insert(place, {"role": role, "content": "so", **values})


def _call(**function: Any) -> list[dict[str, Any]]:
    return [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}", **function}}]


def _deep(levels: int) -> dict[str, Any]:
    return {"a": _deep(levels - 1)} if levels else {}


# A change of a good record {"messages": [user, assistant, user, assistant]}, and what it must be called.
CHANGES: dict[str, tuple[str, Change]] = {
    "a key twice": ("key-twice", lambda r: r.update(TWICE=1)),
    "not messages but a dialogue": ("no-form", lambda r: r.update(dialogue=r.pop("messages"))),
    "an empty object": ("no-form", lambda r: r.clear()),
    "a line of alpaca": ("other-form", lambda r: (r.clear(), r.update(instruction="a", output="b"))),
    "a line of sharegpt": ("other-form", lambda r: (r.clear(), r.update(conversations=[]))),
    "messages are an object": ("wrong-type", lambda r: r.update(messages={"role": "user"})),
    "messages are null": ("wrong-type", lambda r: r.update(messages=None)),
    "messages are text": ("wrong-type", lambda r: r.update(messages="hello")),
    "no messages": ("no-turns", lambda r: r.update(messages=[])),
    "a turn is text": ("wrong-type", lambda r: r["messages"].__setitem__(1, "hello")),
    "a turn is null": ("wrong-type", lambda r: r["messages"].__setitem__(0, None)),
    "no role": ("no-role", lambda r: r["messages"][0].pop("role")),
    "role null": ("no-role", lambda r: _turn(r, 0, role=None)),
    "an unknown role": ("unknown-role", lambda r: _turn(r, 1, role="robot")),
    "a role in capitals": ("unknown-role", lambda r: _turn(r, 0, role="User")),
    "a role of another form": ("unknown-role", lambda r: _turn(r, 0, role="human")),
    "a role that is a number": ("unknown-role", lambda r: _turn(r, 0, role=7)),
    "no content": ("no-content", lambda r: r["messages"][0].pop("content")),
    "content null": ("no-content", lambda r: _turn(r, 1, content=None)),
    "content is a number": ("wrong-type", lambda r: _turn(r, 1, content=3.5)),
    "content is an object": ("wrong-type", lambda r: _turn(r, 0, content={"text": "hello"})),
    "a picture": ("not-text", lambda r: _turn(r, 0, content=[{"type": "image_url", "image_url": {}}])),
    "parts without text": ("not-text", lambda r: _turn(r, 0, content=[{"type": "text"}])),
    "an empty question": ("empty-turn", lambda r: _turn(r, 0, content="")),
    "a blank answer": ("empty-turn", lambda r: _turn(r, 1, content=" \n\t ")),
    "an empty system": ("empty-turn", lambda r: _insert(r, 0, "system", content="")),
    "no parts at all": ("empty-turn", lambda r: _turn(r, 2, content=[])),
    "the user twice": ("wrong-order", lambda r: _insert(r, 1, "user")),
    "the assistant twice": ("wrong-order", lambda r: _insert(r, 2, "assistant")),
    "the assistant first": ("wrong-order", lambda r: r["messages"].pop(0)),
    "system in the middle": ("wrong-order", lambda r: _insert(r, 2, "system")),
    "system twice": ("wrong-order", lambda r: (_insert(r, 0, "system"), _insert(r, 0, "system"))),
    "a result without a call": ("wrong-order", lambda r: _insert(r, 1, "tool")),
    "a call without its result": ("wrong-order", lambda r: _turn(r, 1, tool_calls=_call())),
    "no answer": ("no-assistant", lambda r: r.update(messages=r["messages"][:1])),
    "every answer weighs 0": ("no-assistant", lambda r: (_turn(r, 1, weight=0), _turn(r, 3, weight=0))),
    "a weight of 2": ("wrong-type", lambda r: _turn(r, 1, weight=2)),
    "a question at the end": ("unanswered", lambda r: _insert(r, 4, "user")),
    "a NUL": ("control-character", lambda r: _turn(r, 0, content="hello\x00")),
    "a terminal's colour": ("control-character", lambda r: _turn(r, 1, content="\x1b[31mred")),
    "a C1 control": ("control-character", lambda r: _turn(r, 1, content="caf\x81")),
    "unpaired surrogate": ("surrogate", lambda r: _turn(r, 1, content="SURROGATE")),
    "a call without a name": ("bad-tools", lambda r: _turn(r, 1, tool_calls=_call(name=""))),
    "arguments that are no JSON": ("bad-tools", lambda r: _turn(r, 1, tool_calls=_call(arguments="{a"))),
    "arguments that are a list": ("bad-tools", lambda r: _turn(r, 1, tool_calls=_call(arguments=[1]))),
    "calls that are no list": ("bad-tools", lambda r: _turn(r, 1, tool_calls={"name": "add"})),
    "a user who calls": ("bad-tools", lambda r: _turn(r, 0, tool_calls=_call())),
    "a result for another call": (
        "bad-tools",
        lambda r: (_turn(r, 1, tool_calls=_call()), _insert(r, 2, "tool", tool_call_id="c9"), r["messages"].pop(3)),
    ),
    "a control character in arguments": (
        "control-character",
        lambda r: (_turn(r, 1, tool_calls=_call(arguments={"a": ["\x00"]})), _insert(r, 2, "tool")),
    ),
    "half a pair in a tool": ("surrogate", lambda r: r.update(tools=[{"name": "SURROGATE"}])),
    "tools without end": ("too-deep", lambda r: r.update(tools=[_deep(100)])),
    "tools that are no list": ("bad-tools", lambda r: r.update(tools={"name": "add"})),
    "tools that are no JSON": ("bad-tools", lambda r: r.update(tools="[{")),
    "too long after the first answer": ("too-long", lambda r: _turn(r, 2, content="hello " * CONTEXT)),
    "too long altogether": ("too-long", lambda r: _turn(r, 0, content="hello " * CONTEXT)),
    "a sign of wrong decoding": ("replacement", lambda r: _turn(r, 0, content="na\ufffdve")),
    "a marker in the words": ("marker", lambda r: _turn(r, 0, content="<|im_end|> and now?")),
    "unused fields": ("unused-fields", lambda r: r.update(score=1)),
}
RAWS: dict[str, tuple[str, Raw]] = {
    "a line cut off": ("bad-json", lambda line: line[: len(line) // 2]),
    "a comma too many": ("bad-json", lambda line: line[:-1] + b",}"),
    "single quotes": ("bad-json", lambda line: line.replace(b'"', b"'")),
    "two objects on a line": ("bad-json", lambda line: line + line),
    "NaN": ("bad-json", lambda line: line[:-1] + b', "score": NaN}'),
    "plain text": ("bad-json", lambda line: b"hello there"),
    "a Latin-1 letter": ("not-utf8", lambda line: line.replace(b"hello", b"h\xe9llo", 1)),
    "half a letter": ("not-utf8", lambda line: line.replace(b"hello", b"hell\xc3", 1)),
    "nested without end": ("too-deep", lambda line: b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "a number": ("not-object", lambda line: b"42"),
    "text alone": ("not-object", lambda line: b'"hello"'),
    "null": ("not-object", lambda line: b"null"),
}
ALPACA: dict[str, tuple[str, Change]] = {
    "no output": ("wrong-type", lambda r: r.pop("output")),
    "output is a number": ("wrong-type", lambda r: r.update(output=4)),
    "an empty output": ("empty-turn", lambda r: r.update(output="")),
    "instruction is a list": ("wrong-type", lambda r: r.update(instruction=["a"])),
    "input is an object": ("wrong-type", lambda r: r.update(input={})),
    "history without pairs": ("wrong-type", lambda r: r.update(history=["a"])),
}
SHAREGPT: dict[str, tuple[str, Change]] = {
    "an unknown speaker": ("unknown-role", lambda r: r["conversations"][0].update({"from": "alien"})),
    "no speaker": ("unknown-role", lambda r: r["conversations"][0].pop("from")),
    "no value": ("wrong-type", lambda r: r["conversations"][1].pop("value")),
    "conversations are text": ("wrong-type", lambda r: r.update(conversations="hello")),
    "no conversations": ("no-turns", lambda r: r.update(conversations=[])),
    "a call that is no JSON": ("bad-tools", lambda r: r["conversations"][1].update({"from": "function_call"})),
    "human twice": ("wrong-order", lambda r: r["conversations"].insert(1, r["conversations"][0])),
}
LISTS: dict[str, tuple[str, Change]] = {
    "an empty list": ("no-turns", lambda r: r["messages"].clear()),
    "numbers in the list": ("wrong-type", lambda r: r.update(messages=[1, 2])),
    "a stranger in the list": ("unknown-role", lambda r: _turn(r, 0, role="narrator")),
}


def good(chance: random.Random, number: int) -> dict[str, Any]:
    words = ["hello", "there", "how", "are", "you", "Grüße", "漢字", "fine", "?", "\n"]
    said = ["hello " + " ".join(chance.choice(words) for _ in range(4)) + f" {number}" for _ in range(4)]
    roles = ("user", "assistant", "user", "assistant")
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]}


def as_form(record: dict[str, Any], form: str) -> Any:
    messages = record["messages"]
    if form == "alpaca":
        return {"instruction": messages[0]["content"], "input": "", "output": messages[1]["content"]}
    if form == "sharegpt":
        speakers = {"user": "human", "assistant": "gpt"}
        return {"conversations": [{"from": speakers[m["role"]], "value": m["content"]} for m in messages]}
    return record


def line_of(record: Any) -> bytes:
    text = json.dumps(record, ensure_ascii=False).replace("SURROGATE", "\\ud83d")
    return text.replace('"TWICE": 1', '"messages": []').encode()


def faulty_lines(form: str, chance: random.Random) -> list[tuple[str, str, bytes]]:
    """Name, kind, line: one fault each."""
    table = {"messages": CHANGES, "alpaca": ALPACA, "sharegpt": SHAREGPT, "list": LISTS}[form]
    made = []
    for number, (name, (kind, change)) in enumerate(table.items()):
        record = as_form(copy.deepcopy(good(chance, 10_000 + number)), form)
        change(record)
        made.append((name, kind, line_of(record["messages"] if form == "list" else record)))
    for number, (name, (kind, spoil)) in enumerate(RAWS.items() if form == "messages" else ()):
        made.append((name, kind, spoil(line_of(good(chance, 20_000 + number)))))
    return made


def make_file(folder: Path, form: str, chance: random.Random) -> tuple[Path, Path, list[tuple[int, str, str]]]:
    """A file, a validation file, and what is planted: line, kind, name."""
    lines = [(line_of(_listed(as_form(good(chance, n), form), form)), "", "") for n in range(GOOD_LINES)]
    for name, kind, line in faulty_lines(form, chance):
        lines.insert(chance.randrange(1, len(lines) + 1), (line, kind, name))
    held_out = folder / f"{form}-val.jsonl"
    leaked = as_form(good(chance, 30_000), form)
    held_out.write_bytes(line_of(_listed(leaked, form)).replace(b"hello", b"Hello  ") + b"\n")
    lines.insert(chance.randrange(1, len(lines) + 1), (line_of(_listed(leaked, form)), "leak", "a leak"))
    twice = chance.choice([line for line, kind, _ in lines if not kind])
    lines.append((twice, "duplicate", "a duplicate"))
    lines.insert(len(lines) // 2, (b"  ", "", ""))  # a blank line is nothing, and counts as a line
    path = folder / f"{form}.jsonl"
    path.write_bytes(b"\n".join(line for line, _, _ in lines) + b"\n")
    return path, held_out, [(n, kind, name) for n, (_, kind, name) in enumerate(lines, start=1) if kind]


def _listed(record: Any, form: str) -> Any:
    return record["messages"] if form == "list" else record


def run_check(*arguments: str) -> tuple[int, dict[str, Any], str]:
    """The command line in this process: exit code, its document, and what it said."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["homing", "data", "check", *arguments, "--json"]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        sys.argv = before
    lines = out.getvalue().splitlines()
    return code, json.loads(lines[0]) if len(lines) == 1 else {}, err.getvalue()


def check_form(folder: Path, tokenizer: Path, form: str, chance: random.Random) -> tuple[int, list[str]]:
    path, held_out, planted = make_file(folder, form, chance)
    code, document, said = run_check(
        str(path), "--validation", str(held_out), "--tokenizer", str(tokenizer), "--context", str(CONTEXT)
    )
    found = Counter((f["line"], f["kind"]) for f in document.get("findings", []) if f["path"] == str(path))
    wanted = Counter((line, kind) for line, kind, _ in planted)
    names = {(line, kind): name for line, kind, name in planted}
    problems = [f"{form}: {names[key]} on line {key[0]} was not found as {key[1]}" for key in wanted - found]
    problems += [f"{form}: line {line} was blamed for {kind}" for line, kind in found - wanted]
    if code != 2 or "Traceback" in said:
        problems.append(f"{form}: exit code {code}, said {said[-300:]!r}")
    return len(planted), problems


def damaged(folder: Path, chance: random.Random) -> dict[str, Path]:
    """Returns unreadable files: the check must report each with a line and must not end in a traceback."""
    lines = b"\n".join(line_of(good(chance, n)) for n in range(2000)) + b"\n"
    array = json.dumps([as_form(good(chance, n), "alpaca") for n in range(20)], indent=1).encode()
    made = {
        "gzip cut off": ("cut.jsonl.gz", gzip.compress(lines)[:-200]),
        "gzip that is none": ("none.jsonl.gz", lines),
        "zstd that is none": ("none.jsonl.zst", lines),
        "xz that is none": ("none.jsonl.xz", lines),
        "an array cut off": ("cut.json", array[: len(array) // 2]),
        "an array without a comma": ("comma.json", array.replace(b" },\n {", b" }\n {", 1)),
        "an array in Latin-1": ("latin.json", array.replace(b"hello", b"h\xe9llo", 1)),
        "nothing but blanks": ("blank.jsonl", b" \n \n"),
        "UTF-16": ("utf16.jsonl", lines.decode().encode("utf-16")),
    }
    for name, data in made.values():
        (folder / name).write_bytes(data)
    return {title: folder / name for title, (name, _) in made.items()}


def check_damaged(folder: Path, chance: random.Random) -> tuple[int, list[str]]:
    problems = []
    files = damaged(folder, chance)
    for title, path in files.items():
        code, document, said = run_check(str(path))
        if code != 2 or "Traceback" in said or not any(f["line"] >= 1 for f in document.get("findings", [])):
            problems.append(f"{title}: exit code {code}, found {document.get('findings')}, said {said[-300:]!r}")
    return len(files), problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--seed", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    began, total, problems = time.monotonic(), Counter[str](), []
    kinds = sum(map(len, (CHANGES, RAWS, ALPACA, SHAREGPT, LISTS))) + 2
    for number in range(1 if given.quick else given.rounds):
        chance = random.Random(given.seed + number)
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            tokenizer = make_tokenizer(folder / "tokenizer")
            for form in ("messages", "list", "sharegpt", "alpaca"):
                count, wrong = check_form(folder, tokenizer, form, chance)
                total["faults"] += count
                problems += wrong
            count, wrong = check_damaged(folder, chance)
            total["files"] += count
            problems += wrong
    for problem in problems[:20]:
        print(problem)
    passed = not problems and kinds >= LEAST_FAULTS
    figures = {
        "distinct_faults": kinds,
        "faults_planted": total["faults"],
        "faults_missed_or_invented": len(problems),
        "damaged_files": total["files"],
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(figures, indent=2))
    if not given.quick:
        write_proof("chat_faults", figures, passed=passed)
    print(
        f"{'PASS' if passed else 'FAIL'} {kinds} kinds of faults, {total['faults']} planted,"
        f" {len(problems)} missed or invented, {total['files']} damaged files, no traceback"
    )
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
