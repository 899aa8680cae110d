"""`homing new NAME --from hf:OWNER/NAME --chat FILE`: a run file that fine-tunes open weights by adapters.

    address or folder -> is it one -> conversations -> runs/NAME.yaml

The Hub is not asked here: `homing prep` asks it, and says what it cannot build. A folder is read at once.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from homing.cli import talk
from homing.cli.new_file import written_aside, yaml_list, yaml_name
from homing.errors import UsageError

__all__ = ["is_open_weights", "new_open"]

_HUB = re.compile(r"hf:\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?")
_CHATS = "chats.jsonl"
_BODY = """\
# {name}: open weights, fine-tuned on conversations by adapters. What comes out is a small file that belongs to them.
name: {shown_name}

model:
  from: {weights}

phases:
  - kind: sft
    method: lora                # qlora: the same beside weights in four bits; full: every weight learns
    epochs: 3
    data:
      chat: {chats}  # `homing data check` looks at every line
    lora:
      rank: 16

limits:
  # spend: $12.00               # what renting may cost in all; `homing launch` needs it, here or as --spend-limit
  idle: 30m
"""


def is_open_weights(given: str) -> bool:
    """An address on the Hub, or a path; the name of a preset is neither."""
    return given.startswith("hf:") or "/" in given or given.startswith((".", "~"))


def new_open(name: str, given: str, chats: list[str], target: Path) -> None:
    from homing.config.open_weights import read_source
    from homing.config.text_files import fault_of, is_in_store

    weights = _weights(name, given, chats)
    for chat in chats:
        if not is_in_store(chat) and (fault := fault_of(chat)):
            again = f"homing new {name} --from {shlex.quote(given)} --chat YOUR_CHATS.jsonl"
            raise UsageError(what=f"--chat: {fault}.", why=f"Looked from {Path.cwd()}.", fix=again)
    if not weights.startswith("hf:"):
        read_source(weights)  # what cannot be built is said now, before there is a file
    shown = weights if _HUB.fullmatch(weights) else yaml_list([weights])[1:-1]
    words = {"name": name, "shown_name": yaml_name(name), "weights": shown, "chats": yaml_list(chats or [_CHATS])}
    with written_aside(target, name) as aside:
        aside.write_text(_BODY.format(**words), encoding="utf-8")
    talk.emit("new/1", {"run": name, "file": str(target), "from": weights, "next": f"homing prep {name}"})
    if not talk.is_json():
        print(f"{target}: {weights}, by adapters.")
    if not chats and not Path(_CHATS).exists():
        talk.say(f"There are no conversations at {_CHATS} yet: put yours there, or change data.chat in {target}.")
    # What lies in a store is brought for a run alone.
    looked_at = name if any(map(is_in_store, chats)) else shlex.join(chats or [_CHATS])
    talk.say(f"Look at every line: homing data check {looked_at}   Then: homing prep {name}")


def _weights(name: str, given: str, chats: list[str]) -> str:
    """As the run file has it: an address, or a folder that is there."""
    if _HUB.fullmatch(given):
        return given
    if not given.startswith("hf:") and Path(given).expanduser().is_dir():
        return given
    on_hub = f"hf:{given.removeprefix('hf:')}"
    meant = on_hub if _HUB.fullmatch(on_hub) else "hf:OWNER/NAME"
    raise UsageError(
        what=f"There are no open weights {given!r}.",
        why="Weights are a folder with config.json, tokenizer.json and safetensors, or on the Hub: hf:OWNER/NAME.",
        fix=f"homing new {name} --from {meant}" + "".join(f" --chat {shlex.quote(chat)}" for chat in chats),
    )
