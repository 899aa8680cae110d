"""Extracts the fixed text that a chat template writes around messages, for the trainer, which does not run templates.

    render a few conversations -> the text between their messages -> reassemble, compare with the template

Third-party templates run only on the user's machine, in a sandbox. The trainer of an rl phase, which generates
questions as it goes, uses the extracted text instead (turns.json, next to the tokenizer).
"""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path
from typing import Any

from homing.lm.data.chat.messages import Fault, Message
from homing.lm.data.chat.render import ChatTokens, Renderer
from homing.lm.data.chat.template import ChatTemplate, find_template
from homing.lm.rl.prompter import in_turns, template_sha256
from homing.lm.tokenizer import Tokenizer, load_tokenizer
from homing.lm.tokenizer.tokenizer import CHAT_TEMPLATE
from homing.wire import codec, file_names
from homing.wire.chat_template import Turns

__all__ = ["take_apart", "write_turns"]

# Some templates include the current date. Always use the same date, so that a resumed or repeated run has the same
# prompts. This date is the default in Llama's own template.
_DAY = datetime.datetime(2024, 7, 26)
_SYSTEM, _USER, _ASSISTANT, _AGAIN = "qzsq", "qzuq", "qzaq", "qzvq"  # made-up words that occur in no template
_ORDERS = {
    ("system", "user"): ("begin_system", "system_user"),
    ("user", "assistant", "user"): ("user_assistant", "assistant_user"),
    ("user", "user"): ("user_user",),
}
_TRIES = (" What is\n3 + 4? ", "\n<|im_end|><|eot_id|> \u2603 e\u0301", "Two")


def write_turns(folder: Path, *, is_base: bool = False) -> str:
    """Write turns.json for the template next to the tokenizer in `folder`; return "" or the reason for a failure.

    The file is not written if there is no template, or if the template is homing's own. `is_base` means that the folder
    holds open weights. In that case the file is written even for homing's own template (homing may have exported the
    weights), because run files based on open weights require it.
    """
    path = folder / file_names.TURNS
    path.unlink(missing_ok=True)  # delete any turns.json left over from a previous template
    template = find_template(folder, now=_DAY)
    if template is None or (template.source == CHAT_TEMPLATE and not is_base):
        return ""
    try:
        turns = take_apart(Renderer(template, ChatTokens(folder)), load_tokenizer(folder))
    except Fault as fault:
        return fault.text
    path.write_text(codec.dumps(turns, indent=1), encoding="utf-8")
    return ""


def take_apart(renderer: Renderer, tokenizer: Tokenizer) -> Turns:
    """Split a template into parts; raises Fault if its output is not just fixed text around the messages."""
    template, markers = renderer.template, renderer.tokens.markers
    alone = _parts(template, [("user", _USER)])
    if alone is None:
        raise Fault("template", "the chat template does not place a question between a fixed prefix and suffix")
    begin, end = alone
    found: dict[str, str] = {}
    with_system = _parts(template, [("system", _SYSTEM), ("user", _USER)])
    if with_system and with_system[2] == end:
        found |= {"begin_system": with_system[0], "system_user": with_system[1]}
    longer = _parts(template, [("user", _USER), ("assistant", _ASSISTANT), ("user", _AGAIN)])
    if longer and (longer[0], longer[3]) == (begin, end):
        found |= {"user_assistant": longer[1], "assistant_user": longer[2]}
    twice = _parts(template, [("user", _USER), ("user", _AGAIN)])
    if twice and (twice[0], twice[2]) == (begin, end):
        found |= {"user_user": twice[1]}
    written = "".join([begin, end, *found.values()])
    turns = Turns(
        template_sha256(template.source), begin, end, end_id=renderer.end_id(),
        markers={name: number for name, number in markers.items() if name in written},
        is_trimmed=f" {_USER} " not in template.render(_said([("user", f" {_USER} ")]), add_generation_prompt=True),
        **found,
    )  # fmt: skip
    if not _is_right(turns, ("user",), renderer, tokenizer):
        raise Fault("template", "the chat template writes more around a question than a prefix and a suffix")
    # If the template does not support an order of roles, omit the parts for that order. Questions that use it will then
    # be rejected.
    for roles, parts in _ORDERS.items():
        if getattr(turns, parts[0]) is not None and not _is_right(turns, roles, renderer, tokenizer):
            left_out: dict[str, Any] = dict.fromkeys(parts)
            turns = replace(turns, **left_out)
    return turns


def _is_right(turns: Turns, roles: tuple[str, ...], renderer: Renderer, tokenizer: Tokenizer) -> bool:
    """Return True if reassembling the parts gives the same ids as the template for every difficult test text."""
    for shift in range(len(_TRIES)):
        said = _said([(role, _TRIES[(place + shift) % len(_TRIES)]) for place, role in enumerate(roles)])
        if list(in_turns(turns, tokenizer, said)) != renderer.prompt(said):
            return False
    return True


def _parts(template: ChatTemplate, said: list[tuple[str, str]]) -> list[str] | None:
    """Return the text before, between and after the messages.

    Returns None if the template rejects, repeats or reorders them.
    """
    try:
        rest = template.render(_said(said), add_generation_prompt=True)
    except Fault:
        return None
    parts = []
    for _, word in said:
        before, found, rest = rest.partition(word)
        if not found:
            return None
        parts.append(before)
    parts.append(rest)
    return None if any(word in piece for _, word in said for piece in parts) else parts


def _said(turns: list[tuple[str, str]]) -> list[Message]:
    return [{"role": role, "content": content} for role, content in turns]
