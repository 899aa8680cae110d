"""`homing new NAME --from PRESET --text TEXT --chat FILE`: the preset, followed by an sft phase on conversations.

conversations -> their length in tokens -> model.context -> batch_tokens -> a phase of kind sft

There is no tokenizer yet, so tokens are estimated from bytes; `homing prep` counts them and warns if they do not fit.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from homing.cli.new_file import yaml_list
from homing.errors import UsageError
from homing.units import counted

if TYPE_CHECKING:
    from homing.wire.run_json import Run

__all__ = ["Chats", "check_chats", "measure_chats", "with_chats"]

_SHARE_WHOLE = 0.95  # fraction of the conversations that should fit into the context
_MOST_CONTEXT = 2048  # a preset's own may be larger
_TURN_TOKENS = 6  # tokens that a chat template adds around one message
_MOST_LOOKED_AT = 20_000  # conversations; enough to know their length
_EPOCHS = 3
_STEPS_WANTED, _MOST_ROWS = 200, 32
_PASSES = 4  # over the text before the sft phase, at most
_LEAST_STEPS = 20


@dataclass(frozen=True)
class Chats:
    """Statistics of the conversations; zeros if they are in a store."""

    num_conversations: int = 0
    num_tokens: int = 0  # estimated, of the conversations that were read
    num_long: int = 0  # length in tokens that nearly all of them fit into


def check_chats(chats: list[str], call: str) -> None:
    from homing.config.text_files import fault_of, is_in_store

    for chat in chats:
        if not is_in_store(chat) and (fault := fault_of(chat)):
            fix = f"{call} --chat YOUR_CHATS.jsonl"
            raise UsageError(what=f"--chat: {fault}.", why=f"Looked from {Path.cwd()}.", fix=fix)


def measure_chats(chats: list[str], vocab_size: int) -> Chats:
    from homing.config.estimate.params import BYTES_PER_TOKEN_RANGE, bytes_per_token
    from homing.config.text_files import is_in_store

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
    """Yield turns and bytes of each readable conversation. `data check` reports what is wrong with the others."""
    from homing.lm.data.chat.formats import to_messages, which_form
    from homing.lm.data.chat.messages import Fault
    from homing.lm.data.chat.read_rows import values_of
    from homing.lm.data.chat.rules import check
    from homing.lm.data.text.read_bytes import Reading
    from homing.text_sources import find_chat_files

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
    """Return the preset's run file with a context that holds the conversations, and with the sft phase."""
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


def _context(usual: int, seen: Chats) -> int:
    if seen.num_long <= usual:
        return usual
    return min(1 << (seen.num_long - 1).bit_length(), max(usual, _MOST_CONTEXT))


def _with_batch(body: str, batch_tokens: int, context: int) -> str:
    """Keep the preset's tokens per step, in whole rows."""
    rows = max(1, round(batch_tokens / context))
    line = f"    batch_tokens: {rows * context}          # {counted(rows, 'row')} of {context:,} tokens"
    return re.sub(r"(?m)^    batch_tokens: .*$", line, body, count=1)


def _with_steps(body: str, run: Run, context: int, num_text_tokens: int) -> str:
    """Reduce the steps if the preset's would read a short text too many times."""
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
    """Return the rows per step for about 200 steps, as a power of two from 1 to 32; 0 if nothing is known."""
    if not seen.num_tokens:
        return 0
    rows = _EPOCHS * seen.num_tokens / context / _STEPS_WANTED
    return int(2 ** round(math.log2(min(_MOST_ROWS, max(1.0, rows)))))
