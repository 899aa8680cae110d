"""The parts of a new run file that come from the user's conversations or from open weights.

with_chats    `homing new NAME --from PRESET --text TEXT --chat FILE`: the preset, followed by an sft phase
write_open    `homing new NAME --from hf:OWNER/NAME --chat FILE`: fine-tune open weights with adapters

conversations -> their length in tokens -> model.context -> batch_tokens -> a phase of kind sft

There is no tokenizer yet, so the number of tokens is estimated from bytes. `homing prep` counts the tokens and
warns if conversations do not fit into the context. Weights in a local folder are checked here; weights on the Hub are
checked by `homing prep`, which contacts the Hub.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from homing.errors import UsageError
from homing.units import counted

if TYPE_CHECKING:
    from homing.wire.run_json import Run

__all__ = [
    "CHATS",
    "Chats",
    "changes_for_chats",
    "check_chats",
    "is_open_weights",
    "measure_chats",
    "with_chats",
    "write_open",
    "written_atomically",
    "yaml_list",
    "yaml_name",
]

_SHARE_WHOLE = 0.95  # fraction of the conversations that should fit into the context
_MOST_CONTEXT = 2048  # do not raise the context beyond this; the context of a preset may be larger
_TURN_TOKENS = 6  # tokens that a chat template adds around one message
_MOST_LOOKED_AT = 20_000  # number of conversations to measure; enough to estimate how long they are
_EPOCHS = 3
_STEPS_WANTED, _MOST_ROWS = 200, 32
_PASSES = 4  # maximum number of passes over the text before the sft phase
_LEAST_STEPS, _FEW_STEPS = 20, 100


@contextlib.contextmanager
def written_atomically(target: Path, name: str) -> Iterator[Path]:
    """Yield a temporary path, which is renamed to `target` at the end. If an error occurs, neither file is left."""
    draft = target.parent / f".{name}.new.yaml"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield draft
        draft.replace(target)
    except OSError as exc:
        is_full = exc.errno in (errno.ENOSPC, errno.EDQUOT)
        fix = "Free some space, or use a folder on another disk." if is_full else "Use a writable folder."
        raise UsageError(what=f"Cannot write {target}.", why=exc.strerror or str(exc), fix=fix) from exc
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


def yaml_name(name: str) -> str:
    """Quote a name that YAML would read as a number or keyword: 12, 1e5, null."""
    is_plain = name[0].isalpha() and name not in ("null", "true", "false", "yes", "no", "on", "off", "y", "n")
    return name if is_plain else f'"{name}"'


def yaml_list(paths: list[str]) -> str:
    plain = re.compile(r"[A-Za-z0-9_./~*-][A-Za-z0-9_./~*+-]*")
    # A JSON string is also a YAML string. An unquoted leading `*` would be an alias.
    quoted = [p if plain.fullmatch(p) and p[0] not in "*-~" else json.dumps(p, ensure_ascii=False) for p in paths]
    return f"[{', '.join(quoted)}]"


@dataclass(frozen=True)
class Chats:
    """Statistics of the conversations; zeros if they are in a store."""

    num_conversations: int = 0
    num_tokens: int = 0  # estimated length, for the conversations that were read
    num_long: int = 0  # nearly all conversations have at most this many tokens


def check_chats(chats: list[str], call: str) -> None:
    from homing.find_source_files import fault_of, is_in_store

    for chat in chats:
        if not is_in_store(chat) and (fault := fault_of(chat)):
            fix = f"{call} --chat YOUR_CHATS.jsonl"
            raise UsageError(what=f"--chat: {fault}.", why=f"Looked in {Path.cwd()}.", fix=fix)


def measure_chats(chats: list[str], vocab_size: int) -> Chats:
    from homing.config.estimate.params_and_flops import BYTES_PER_TOKEN_RANGE, bytes_per_token
    from homing.find_source_files import is_in_store

    if any(map(is_in_store, chats)):
        return Chats()
    # The tokenizer is trained on the text, so conversations take more tokens per byte than the text.
    per_token = bytes_per_token(vocab_size) * BYTES_PER_TOKEN_RANGE[-1]
    sizes = islice(_sizes(chats), _MOST_LOOKED_AT)
    lengths = sorted(int(num_bytes / per_token) + _TURN_TOKENS * turns for turns, num_bytes in sizes)
    if not lengths:
        raise UsageError(
            what=f"--chat: no conversations found in {', '.join(chats)}.",
            why="Each line must be a conversation with at least one answer.",
            fix=f"homing data check {shlex.join(chats)}",
        )
    return Chats(len(lengths), sum(lengths), lengths[math.ceil(_SHARE_WHOLE * len(lengths)) - 1])


def _sizes(chats: list[str]) -> Iterator[tuple[int, int]]:
    """Yield the number of turns and bytes of each valid conversation. `data check` explains why others are invalid."""
    from homing.find_source_files import find_chat_files
    from homing.lm.data.chat.messages import Fault, to_messages, which_form
    from homing.lm.data.chat.read_rows import values_of
    from homing.lm.data.chat.rules import check
    from homing.lm.data.text.read_bytes import Reading

    for source in find_chat_files(chats, key="--chat")[0]:
        form = ""
        with Reading(source) as reading:
            for line in values_of(reading):
                try:
                    if isinstance(line.value, Fault):
                        raise line.value
                    form = form or which_form(line.value)
                    messages = check(to_messages(line.value, form)).messages
                except Fault:
                    continue
                yield len(messages), sum(len(str(message["content"]).encode()) for message in messages)


def with_chats(body: str, run: Run, chats: list[str], seen: Chats, num_text_tokens: int) -> str:
    """Return the preset's run file with an sft phase, and with a context long enough for the conversations."""
    context = _context(run.model.context, seen)
    if context != run.model.context:
        why = f"fits {_SHARE_WHOLE:.0%} of your conversations; the preset has {run.model.context:,}"
        body = re.sub(r"(?m)^  context: .*$", f"  context: {context}               # {why}", body, count=1)
        body = _with_batch(body, run.phases[0].batch_tokens, context)
    body = _with_steps(body, run, context, num_text_tokens)
    rows = _rows_of_sft(context, seen)
    how_many = f"         # {counted(rows, 'row')} of {context:,} tokens" if rows else ""
    batch = f"    batch_tokens: {rows * context}{how_many}\n" if rows else ""
    sft = (
        "  - kind: sft                   # fine-tunes on your conversations\n"
        f"    epochs: {_EPOCHS}\n{batch}"
        f"    data:\n      chat: {yaml_list(chats)}  # check every line: homing data check\n"
    )
    return re.sub(r"(?m)^phases:\n(?:[ #].*\n|\n)*", lambda m: f"{m[0].rstrip()}\n{sft}\n", body, count=1)


def changes_for_chats(preset: Run, run: Run) -> list[str]:
    """Return a sentence for each number of the preset that the conversations changed."""
    found = []
    if run.model.context != preset.model.context:
        found.append(
            f"model.context is {run.model.context:,} tokens instead of the preset's {preset.model.context:,}, so that"
            f" {_SHARE_WHOLE:.0%} of your conversations fit. Training takes more memory per row."
        )
    now, then = run.phases[0], preset.phases[0]
    if now.batch_tokens != then.batch_tokens:
        found.append(f"phases.0.batch_tokens is {now.batch_tokens:,} instead of {then.batch_tokens:,}, in whole rows.")
    if now.num_steps and then.num_steps and now.num_steps != then.num_steps:
        few = " A model learns little in so few steps: add text." if now.num_steps < _FEW_STEPS else ""
        found.append(
            f"phases.0.steps is {now.num_steps:,} instead of {then.num_steps:,}, because your text is short.{few}"
        )
    return found


def _context(usual: int, seen: Chats) -> int:
    if seen.num_long <= usual:
        return usual
    return min(1 << (seen.num_long - 1).bit_length(), max(usual, _MOST_CONTEXT))


def _with_batch(body: str, batch_tokens: int, context: int) -> str:
    """Return the run file with the preset's batch_tokens, rounded to whole rows of `context` tokens."""
    rows = max(1, round(batch_tokens / context))
    line = f"    batch_tokens: {rows * context}          # {counted(rows, 'row')} of {context:,} tokens"
    return re.sub(r"(?m)^    batch_tokens: .*$", line, body, count=1)


def _with_steps(body: str, run: Run, context: int, num_text_tokens: int) -> str:
    """Return the run file with fewer steps if the preset's step count would repeat a short text too many times."""
    steps = re.search(r"(?m)^    steps: (\d+).*$", body)
    batch = re.search(r"(?m)^    batch_tokens: (\d+)", body)
    if not steps or not batch or not num_text_tokens:
        return body
    most = max(_LEAST_STEPS, int(_PASSES * num_text_tokens / int(batch[1])))
    if int(steps[1]) <= most:
        return body
    line = f"    steps: {most}                  # about {_PASSES} passes over your text; the preset has {steps[1]}"
    body = body.replace(steps[0], line, 1)
    warmup = re.search(r"(?m)^    warmup_steps: (\d+)", body)
    if warmup and int(warmup[1]) * 4 > most:
        body = body.replace(warmup[0], f"    warmup_steps: {max(1, most // 10)}", 1)
    return body


def _rows_of_sft(context: int, seen: Chats) -> int:
    """Return the batch size in rows that results in about 200 steps, as a power of two.

    It is at most 32, and 0 if the size of the conversations is unknown.
    """
    if not seen.num_tokens:
        return 0
    rows = _EPOCHS * seen.num_tokens / context / _STEPS_WANTED
    return int(2 ** round(math.log2(min(_MOST_ROWS, max(1.0, rows)))))


_HUB = re.compile(r"hf:\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?")
CHATS = "chats.jsonl"
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
    """Return True if this is a Hub address or a path rather than a preset name."""
    return given.startswith("hf:") or "/" in given or given.startswith((".", "~"))


def write_open(name: str, given: str, chats: list[str], target: Path) -> str:
    """Write the run file, and return the weights as named in it."""
    from homing.config.weights.open_weights import read_source
    from homing.find_source_files import fault_of, is_in_store

    weights = _weights(name, given, chats)
    for chat in chats:
        if not is_in_store(chat) and (fault := fault_of(chat)):
            again = f"homing new {name} --from {shlex.quote(given)} --chat YOUR_CHATS.jsonl"
            raise UsageError(what=f"--chat: {fault}.", why=f"Looked in {Path.cwd()}.", fix=again)
    if not weights.startswith("hf:"):
        read_source(weights)  # fail before the file exists if this model cannot be built
    shown = weights if _HUB.fullmatch(weights) else yaml_list([weights])[1:-1]
    words = {"name": name, "shown_name": yaml_name(name), "weights": shown, "chats": yaml_list(chats or [CHATS])}
    with written_atomically(target, name) as draft:
        draft.write_text(_BODY.format(**words), encoding="utf-8")
    return weights


def _weights(name: str, given: str, chats: list[str]) -> str:
    """Return the weights as named in the run file: an address, or an existing folder."""
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
