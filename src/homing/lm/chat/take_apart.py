"""A chat template taken apart into what it writes around what is said, for a trainer that knows no templates.

    a few conversations rendered -> the pieces between their words -> put together again, compared with the template

Templates come from strangers and are run at home, in a sandbox, and nowhere else; the trainer of a phase of rl, which
makes questions up as it goes, gets the pieces (turns.json beside the tokenizer).
"""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path
from typing import Any

from homing.lm.chat.messages import Fault, Message
from homing.lm.chat.render import Renderer
from homing.lm.chat.template import ChatTemplate, find_template
from homing.lm.chat.tokens import ChatTokens
from homing.lm.rl.prompter import in_turns, template_sha256
from homing.lm.tokenizer import Tokenizer, load_tokenizer
from homing.lm.tokenizer.specials import CHAT_TEMPLATE
from homing.wire import codec, names
from homing.wire.turns import Turns

__all__ = ["take_apart", "write_turns"]

# Some templates tell the model which day it is. Always the same one: a run that is resumed, or prepared again, asks the
# same. It is the day that Llama's own template takes where it is told none.
_DAY = datetime.datetime(2024, 7, 26)
_SYSTEM, _USER, _ASSISTANT, _AGAIN = "qzsq", "qzuq", "qzaq", "qzvq"  # words that no template has
_ORDERS = {
    ("system", "user"): ("begin_system", "system_user"),
    ("user", "assistant", "user"): ("user_assistant", "assistant_user"),
    ("user", "user"): ("user_user",),
}
_TRIES = (" What is\n3 + 4? ", "\n<|im_end|><|eot_id|> \u2603 e\u0301", "Two")


def write_turns(folder: Path, *, is_base: bool = False) -> str:
    """turns.json for the template beside the tokenizer in `folder`; "" or why it cannot be written. homing's own
    template needs none, and no template has none. `is_base`: of open weights, whose run files are not read without it;
    homing itself may have exported them."""
    path = folder / names.TURNS
    path.unlink(missing_ok=True)  # of another template
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
    """A Fault where it writes something else than pieces around words."""
    template, markers = renderer.template, renderer.tokens.markers
    alone = _pieces(template, [("user", _USER)])
    if alone is None:
        raise Fault("template", "the chat template does not put a question between two pieces")
    begin, end = alone
    found: dict[str, str] = {}
    with_system = _pieces(template, [("system", _SYSTEM), ("user", _USER)])
    if with_system and with_system[2] == end:
        found |= {"begin_system": with_system[0], "system_user": with_system[1]}
    longer = _pieces(template, [("user", _USER), ("assistant", _ASSISTANT), ("user", _AGAIN)])
    if longer and (longer[0], longer[3]) == (begin, end):
        found |= {"user_assistant": longer[1], "assistant_user": longer[2]}
    twice = _pieces(template, [("user", _USER), ("user", _AGAIN)])
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
        raise Fault("template", "the chat template writes more around a question than two pieces")
    # An order that it does not come to is left out, and a question in that order is refused.
    for roles, pieces in _ORDERS.items():
        if getattr(turns, pieces[0]) is not None and not _is_right(turns, roles, renderer, tokenizer):
            left_out: dict[str, Any] = dict.fromkeys(pieces)
            turns = replace(turns, **left_out)
    return turns


def _is_right(turns: Turns, roles: tuple[str, ...], renderer: Renderer, tokenizer: Tokenizer) -> bool:
    """Put together again, awkward words come to the ids that the template gives."""
    for shift in range(len(_TRIES)):
        said = _said([(role, _TRIES[(place + shift) % len(_TRIES)]) for place, role in enumerate(roles)])
        if list(in_turns(turns, tokenizer, said)) != renderer.prompt(said):
            return False
    return True


def _pieces(template: ChatTemplate, said: list[tuple[str, str]]) -> list[str] | None:
    """What stands before, between and after the words; None where the template refuses, repeats or reorders them."""
    try:
        rest = template.render(_said(said), add_generation_prompt=True)
    except Fault:
        return None
    pieces = []
    for _, word in said:
        before, found, rest = rest.partition(word)
        if not found:
            return None
        pieces.append(before)
    pieces.append(rest)
    return None if any(word in piece for _, word in said for piece in pieces) else pieces


def _said(turns: list[tuple[str, str]]) -> list[Message]:
    return [{"role": role, "content": content} for role, content in turns]
