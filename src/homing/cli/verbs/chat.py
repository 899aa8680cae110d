"""`homing chat`: read lines, stream answers to stdout; on a terminal or through a pipe.

A model trained on conversations is prompted in turns, formatted by the chat template in its folder, and remembers them.
A base model only completes text, one line at a time, and the user is told so.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from homing.api.extras import need
from homing.api.lookup.base_weights import find_base
from homing.api.lookup.find_models import find_model
from homing.cli import output
from homing.cli.options import Base, Json
from homing.cli.verbs.generate import Checkpoint, Device, Model, Phase, Seed, Temperature, Tokens, TopK
from homing.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from homing.lm.generate import Card
    from homing.lm.model import Decoder
    from homing.lm.tokenizer import Tokenizer

__all__ = ["command", "reported_refusals", "say_format"]

HELP = "/new starts a new conversation, /quit (or Ctrl-D) exits, /help shows this."
HELP_BASE = "/quit (or Ctrl-D) exits, /help shows this."


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
    """Talk to a trained model. A base model completes what you type; a model fine-tuned on conversations answers it."""
    need("lm", verb="chat")
    folder = find_model(run, checkpoint=checkpoint, phase=phase)

    from homing.lm.data.chat.prompt_ids import learned_to_answer
    from homing.lm.device import describe_device
    from homing.lm.generate import load_for_use, read_card

    model, tokenizer = load_for_use(folder, device, base=find_base(folder, base))
    card = read_card(folder)
    seed = secrets.randbelow(2**31) if seed is None else seed
    output.say(f"{folder} on {describe_device(model.device)}, temperature {temperature:g}, top-k {top_k}, seed {seed}")
    settings = {"num_tokens": tokens, "temperature": temperature, "top_k": top_k}
    if learned_to_answer(card):
        session: _Completer | _Converser = _Converser(model, tokenizer, settings, folder)
        say_format(card)
        output.say(HELP)
    else:
        session = _Completer(model, tokenizer, settings)
        output.say("This is a base model: it completes the text you type and was not trained to answer.")
        output.say(HELP_BASE)
    for number, line in enumerate(_lines()):
        if line == "/help":
            output.say(HELP if isinstance(session, _Converser) else HELP_BASE)
            continue
        if line == "/new":
            session.forget()
            output.say("Forgotten.")
            continue
        # A new seed for each turn: asking the same question twice may give two answers, and the whole session is
        # reproducible.
        _answer(session, line, seed + number, is_json=json)


def say_format(card: Card) -> None:
    """Warn if the model has no chat template: prompts formatted differently than in training give worse answers."""
    from homing.lm.data.chat.template import find_template
    from homing.lm.generate.load_model import template_owner

    if find_template(card.folder) is None:
        output.say(
            f"warning: {card.folder} has no chat template. Using ChatML (<|im_start|>user ...),"
            " which may differ from the format it was trained with."
            f" Copy the template file into the folder: {template_owner(card)}"
        )


def _answer(session: _Completer | _Converser, line: str, seed: int, *, is_json: bool) -> None:
    chunks = []
    try:
        for piece in session.reply(line, seed):
            chunks.append(piece)
            if not is_json:
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        output.say(
            " (interrupted; Ctrl-D ends the conversation)"
        )  # at a terminal, Ctrl-C ends the answer, not the chat
    if not is_json:
        print(flush=True)
    output.emit("chat-turn/1", {"prompt": line, "text": "".join(chunks), "mode": session.mode, "seed": seed})


def _lines() -> Iterator[str]:
    """Yield the lines that the user types, until /quit or the end of input. Empty lines are skipped."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401  (line editing and history for input())
    while True:
        if is_terminal:
            try:
                # input() would write its prompt to stdout, which is reserved for the model's output.
                output.say("> ", end="")
                line = input()
            except EOFError:
                output.say()
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
            what="The input is not UTF-8.", why=str(exc), fix="iconv -t utf-8 FILE | homing chat RUN"
        ) from exc


class _Completer:
    mode = "completion"

    def __init__(self, model: Decoder, tokenizer: Tokenizer, settings: dict[str, Any]) -> None:
        self.model, self.tokenizer, self.settings = model, tokenizer, settings

    def reply(self, line: str, seed: int) -> Iterator[str]:
        from homing.lm.generate import complete

        return complete(self.model, self.tokenizer, line, seed=seed, **self.settings)

    def forget(self) -> None:
        """Do nothing: every line is already an independent text."""


class _Converser:
    mode = "chat"

    def __init__(self, model: Decoder, tokenizer: Tokenizer, settings: dict[str, Any], folder: Path) -> None:
        self.model, self.tokenizer, self.settings, self.folder = model, tokenizer, settings, folder
        self.forget()

    def reply(self, line: str, seed: int) -> Iterator[str]:
        from homing.lm.generate import decode_stream, generate

        said: list[int] = []

        def remember(ids: Iterator[int]) -> Iterator[int]:
            for i in ids:
                said.append(i)
                yield i

        picked = generate(self.model, self._ask(line), stop_ids=self.turns.stop_ids, seed=seed, **self.settings)
        try:
            yield from decode_stream(self.tokenizer, remember(picked))
        finally:
            # Also when the answer was cut short: keep what was generated, so that the next turn is well formed.
            self.turns.answered(said)

    def _ask(self, line: str) -> list[int]:
        with reported_refusals():
            return self.turns.ask(line)

    def forget(self) -> None:
        from homing.lm.data.chat.chat_settings import open_renderer
        from homing.lm.data.chat.prompt_ids import TemplateTurns
        from homing.lm.data.chat.template import find_template
        from homing.lm.generate import ChatTurns

        if find_template(self.folder) is None:  # `say_format` has already warned
            self.turns: ChatTurns | TemplateTurns = ChatTurns(self.tokenizer)
        else:
            with reported_refusals():
                renderer = open_renderer(self.folder)
                self.turns = TemplateTurns(renderer, self.tokenizer.decode, self.tokenizer.end_of_text_id)


@contextmanager
def reported_refusals() -> Iterator[None]:
    from homing.lm.data.chat.messages import Fault

    try:
        yield
    except Fault as fault:
        raise UsageError(
            what="The chat template cannot render this conversation.",
            why=f"{fault.text[:1].upper()}{fault.text[1:]}.",
            fix="Start a new conversation with /new, or complete text without a template: homing generate",
        ) from fault
