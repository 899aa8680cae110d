"""`homing chat`: read questions from a terminal or a pipe, and stream the answers to stdout."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from homing.api.models.chat_session import ChatSession, open_chat
from homing.cli import output
from homing.cli.model_options import Checkpoint, Device, Model, Phase, Seed, Stop, Tokens, takes_sampling
from homing.cli.options import Base, Json
from homing.errors import UsageError
from homing.sampling_settings import DEFAULT_SAMPLING, SamplingSettings

__all__ = ["command"]

HELP = "/new starts a new conversation, /quit (or Ctrl-D) exits, /help shows this."
HELP_BASE = "/quit (or Ctrl-D) exits, /help shows this."


@takes_sampling
def command(
    run: Model = None,
    tokens: Tokens = 200,
    sampling: SamplingSettings = DEFAULT_SAMPLING,
    stop: Stop = None,
    seed: Seed = None,
    checkpoint: Checkpoint = None,
    phase: Phase = None,
    device: Device = "auto",
    base: Base = "",
    json: Json = False,
) -> None:
    """Talk to a trained model. A base model completes what you type; a model fine-tuned on conversations replies."""
    session = open_chat(
        run,
        tokens=tokens,
        sampling=sampling,
        stop=stop or (),
        seed=seed,
        checkpoint=checkpoint,
        phase=phase,
        device=device,
        base=base,
    )
    help_text = HELP if session.is_conversation else HELP_BASE
    output.say(help_text)
    for line in _lines():
        if line == "/help":
            output.say(help_text)
        elif line == "/new":
            session.forget()
            output.say("Started a new conversation.")
        else:
            _answer(session, line, is_json=json)


def _answer(session: ChatSession, line: str, *, is_json: bool) -> None:
    chunks, seed = [], session.seed
    try:
        for piece in session.reply(line):
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
