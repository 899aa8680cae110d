"""`homing chat`: lines in, answers on stdout as they come; on a terminal or through a pipe.

A model that learned from conversations is talked to in turns, written by the chat template that lies beside it, and
remembers them. A base model only completes text, one line at a time, and the person is told so.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from homing.cli import talk
from homing.cli.extras import need
from homing.cli.find_base import Base, find_base
from homing.cli.find_model import find_model
from homing.cli.generate import Checkpoint, Device, Model, Phase, Seed, Temperature, Tokens, TopK
from homing.cli.options import Json
from homing.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from homing.lm.generate import Card
    from homing.lm.model import Decoder
    from homing.lm.tokenizer import Tokenizer

__all__ = ["command", "refusals_told", "say_format"]

HELP = "/new forgets the conversation, /quit (or Ctrl-D) ends it, /help says this."
HELP_BASE = "/quit (or Ctrl-D) ends it, /help says this."


def command(
    run: Model = None,
    tokens: Tokens = 200,
    temperature: Temperature = 0.8,
    top_k: TopK = 50,
    seed: Seed = None,
    checkpoint: Checkpoint = None,
    phase: Phase = None,
    device: Device = "auto",
    base: Base = "",
    json: Json = False,
) -> None:
    """Talk to a trained model. A base model completes what you type; one that was fine-tuned on chat answers it."""
    need("lm", verb="chat")
    folder = find_model(run, checkpoint=checkpoint, phase=phase)

    from homing.lm.chat.turns import learned_to_answer
    from homing.lm.device import describe_device
    from homing.lm.generate import load_for_use, read_card

    model, tokenizer = load_for_use(folder, device, base=find_base(folder, base))
    card = read_card(folder)
    seed = secrets.randbelow(2**31) if seed is None else seed
    talk.say(f"{folder} on {describe_device(model.device)}, temperature {temperature:g}, top-k {top_k}, seed {seed}")
    settings = {"num_tokens": tokens, "temperature": temperature, "top_k": top_k}
    if learned_to_answer(card):
        voice: _Completer | _Converser = _Converser(model, tokenizer, settings, folder)
        say_format(card)
        talk.say(HELP)
    else:
        voice = _Completer(model, tokenizer, settings)
        talk.say("This is a base model: it goes on with the text you type, and was never taught to answer.")
        talk.say(HELP_BASE)
    for number, line in enumerate(_lines()):
        if line == "/help":
            talk.say(HELP if isinstance(voice, _Converser) else HELP_BASE)
            continue
        if line == "/new":
            voice.forget()
            talk.say("Forgotten.")
            continue
        # Another seed for each turn: the same question asked twice may have two answers, and the whole is repeatable.
        _answer(voice, line, seed + number, is_json=json)


def say_format(card: Card) -> None:
    """Turns that are not written as in training get answers that are worse than they need be."""
    from homing.lm.chat.template import find_template
    from homing.lm.generate.load import whose_template

    if find_template(card.folder) is None:
        talk.say(
            f"warning: {card.folder} has no chat template, so it is asked in ChatML (<|im_start|>user ...),"
            " which may not be what it was trained with."
            f" Copy the file with the template there: {whose_template(card)}"
        )


def _answer(voice: _Completer | _Converser, line: str, seed: int, *, is_json: bool) -> None:
    pieces = []
    try:
        for piece in voice.reply(line, seed):
            pieces.append(piece)
            if not is_json:
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        talk.say(" (cut short; Ctrl-D ends the conversation)")  # at a terminal Ctrl-C ends an answer, not the talk
    if not is_json:
        print(flush=True)
    talk.emit("chat-turn/1", {"prompt": line, "text": "".join(pieces), "mode": voice.mode, "seed": seed})


def _lines() -> Iterator[str]:
    """What the person types, until /quit or the end of input. Empty lines are not sent."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401  (line editing and history for input())
    while True:
        if is_terminal:
            try:
                # input() writes its prompt on stdout, so it is asked for none; stdout is for the model's words.
                talk.say("> ", end="")
                line = input()
            except EOFError:
                talk.say()
                return
        else:
            line = _read_line()
            if not line:
                return
        line = line.strip()
        if line in ("/quit", "/exit"):
            return
        if line:
            yield line


def _read_line() -> str:
    try:
        return sys.stdin.readline()
    except UnicodeDecodeError as exc:
        raise UsageError(
            what="What came in is not UTF-8.", why=str(exc), fix="iconv -t utf-8 FILE | homing chat RUN"
        ) from exc


class _Completer:
    mode = "completion"

    def __init__(self, model: Decoder, tokenizer: Tokenizer, settings: dict[str, Any]) -> None:
        self.model, self.tokenizer, self.settings = model, tokenizer, settings

    def reply(self, line: str, seed: int) -> Iterator[str]:
        from homing.lm.generate import complete

        return complete(self.model, self.tokenizer, line, seed=seed, **self.settings)

    def forget(self) -> None:
        """Every line is already a text of its own."""


class _Converser:
    mode = "chat"

    def __init__(self, model: Decoder, tokenizer: Tokenizer, settings: dict[str, Any], folder: Path) -> None:
        self.model, self.tokenizer, self.settings, self.folder = model, tokenizer, settings, folder
        self.forget()

    def reply(self, line: str, seed: int) -> Iterator[str]:
        from homing.lm.generate import generate, text_pieces

        said: list[int] = []

        def remember(ids: Iterator[int]) -> Iterator[int]:
            for i in ids:
                said.append(i)
                yield i

        picked = generate(self.model, self._ask(line), stop_ids=self.turns.stop_ids, seed=seed, **self.settings)
        try:
            yield from text_pieces(self.tokenizer, remember(picked))
        finally:
            # Also when it was cut short: what was said stays said, and the next turn begins well-formed.
            self.turns.answered(said)

    def _ask(self, line: str) -> list[int]:
        with refusals_told():
            return self.turns.ask(line)

    def forget(self) -> None:
        from homing.lm.chat.order import open_renderer
        from homing.lm.chat.template import find_template
        from homing.lm.chat.turns import TemplateTurns
        from homing.lm.generate import ChatTurns

        if find_template(self.folder) is None:  # `say_format` has said it
            self.turns: ChatTurns | TemplateTurns = ChatTurns(self.tokenizer)
        else:
            with refusals_told():
                renderer = open_renderer(self.folder)
                self.turns = TemplateTurns(renderer, self.tokenizer.decode, self.tokenizer.end_of_text_id)


@contextmanager
def refusals_told() -> Iterator[None]:
    from homing.lm.chat.messages import Fault

    try:
        yield
    except Fault as fault:
        raise UsageError(
            what="The model cannot be talked to like this.",
            why=f"{fault.text[:1].upper()}{fault.text[1:]}.",
            fix="Begin anew with other words; homing generate completes text without a template.",
        ) from fault
