"""`homing new NAME --from hf:OWNER/NAME --chat FILE`: write a run file that fine-tunes open weights with adapters.

address or folder -> check that it is one -> conversations -> runs/NAME.yaml

The Hub is not asked here; `homing prep` asks it and reports what it cannot build. A folder is read immediately.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from homing.cli import output
from homing.cli.new_file import written_atomically, yaml_list, yaml_name
from homing.errors import UsageError

__all__ = ["is_open_weights", "new_open"]

_HUB = re.compile(r"hf:\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?")
_CHATS = "chats.jsonl"
_BODY = """\
# {name}: fine-tunes open weights on conversations with LoRA adapters. The result is a small file used with the weights.
name: {shown_name}

model:
  from: {weights}

phases:
  - kind: sft
    method: lora                # qlora: base weights in 4 bits; full: train all weights
    epochs: 3
    data:
      chat: {chats}  # check every line: homing data check
    lora:
      rank: 16

limits:
  # spend: $12.00               # maximum total cost; `homing launch` requires it here or as --spend-limit
  idle: 30m
"""


def is_open_weights(given: str) -> bool:
    """Return whether this is an address on the Hub or a path, and not the name of a preset."""
    return given.startswith("hf:") or "/" in given or given.startswith((".", "~"))


def new_open(name: str, given: str, chats: list[str], target: Path) -> None:
    from homing.config.text_files import fault_of, is_in_store
    from homing.config.weights.open_weights import read_source

    weights = _weights(name, given, chats)
    for chat in chats:
        if not is_in_store(chat) and (fault := fault_of(chat)):
            again = f"homing new {name} --from {shlex.quote(given)} --chat YOUR_CHATS.jsonl"
            raise UsageError(what=f"--chat: {fault}.", why=f"Looked from {Path.cwd()}.", fix=again)
    if not weights.startswith("hf:"):
        read_source(weights)  # report now what cannot be built, before the file exists
    shown = weights if _HUB.fullmatch(weights) else yaml_list([weights])[1:-1]
    words = {"name": name, "shown_name": yaml_name(name), "weights": shown, "chats": yaml_list(chats or [_CHATS])}
    with written_atomically(target, name) as draft:
        draft.write_text(_BODY.format(**words), encoding="utf-8")
    output.emit("new/1", {"run": name, "file": str(target), "from": weights, "next": f"homing prep {name}"})
    if not output.is_json():
        print(f"{target}: {weights}, with adapters.")
    if not chats and not Path(_CHATS).exists():
        output.say(f"No conversations found at {_CHATS}: put yours there, or change data.chat in {target}.")
    # Files in a store can only be checked through the run.
    looked_at = name if any(map(is_in_store, chats)) else shlex.join(chats or [_CHATS])
    output.say(f"Check the data: homing data check {looked_at}   Then: homing prep {name}")


def _weights(name: str, given: str, chats: list[str]) -> str:
    """Return the weights as written in the run file: an address, or an existing folder."""
    if _HUB.fullmatch(given):
        return given
    if not given.startswith("hf:") and Path(given).expanduser().is_dir():
        return given
    on_hub = f"hf:{given.removeprefix('hf:')}"
    meant = on_hub if _HUB.fullmatch(on_hub) else "hf:OWNER/NAME"
    raise UsageError(
        what=f"Open weights not found: {given!r}.",
        why="Use a folder with config.json, tokenizer.json and safetensors, or a model on the Hub: hf:OWNER/NAME.",
        fix=f"homing new {name} --from {meant}" + "".join(f" --chat {shlex.quote(chat)}" for chat in chats),
    )
