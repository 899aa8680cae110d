"""Serve trained models through an OpenAI-compatible API and a chat page. Implements `homing serve`."""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from homing.api import notices
from homing.api.extras import need
from homing.api.lookup.find_adapter_base import find_base
from homing.api.models.chat_session import reported_refusals, warn_of_format
from homing.api.models.open_model import ModelWord, find_folder, read_model_word
from homing.api.token_and_port import given_token
from homing.errors import UsageError
from homing.sampling_settings import DEFAULT_SAMPLING, SamplingSettings

if TYPE_CHECKING:
    import socket

    from homing.lm.generate import Card
    from homing.web.model_session import GenerationSession
    from homing.web.openai_requests import Defaults

__all__ = ["TOKEN", "ModelServer", "model_names", "serve_model"]

TOKEN = "HOMING_SERVE_TOKEN"


class ModelServer:
    """A running server, in its own thread. Leaving its `with` block stops it; `wait` blocks until it fails."""

    def __init__(
        self, sessions: Sequence[GenerationSession], sock: socket.socket, host: str, defaults: Defaults, given: str,
        is_open: bool, request_timeout_s: float,
    ) -> None:  # fmt: skip
        from homing.web.app import serving
        from homing.web.threaded_server import hosts_for

        self.sessions, self.is_open, self.is_token_given = list(sessions), is_open, bool(given)
        self.token = given or secrets.token_urlsafe(24)
        self.url = _url(host, sock.getsockname()[1])
        self._ending = ExitStack()
        self._server = self._ending.enter_context(
            serving(
                sessions, sock, token=self.token, hosts=hosts_for(host), defaults=defaults,
                request_timeout_s=request_timeout_s,
            )
        )  # fmt: skip

    @property
    def session(self) -> GenerationSession:
        """The default model."""
        return self.sessions[0]

    @property
    def mode(self) -> str:
        return "chat" if self.session.is_chat else "completion"

    def wait(self) -> None:
        self._server.wait()

    def end(self) -> None:
        self._ending.close()

    def __enter__(self) -> ModelServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def serve_model(
    run: str | Path | None = None,
    *,
    also: Sequence[str] = (),
    port: int = 8000,
    host: str = "127.0.0.1",
    network: bool = False,
    tokens: int = 200,
    sampling: SamplingSettings = DEFAULT_SAMPLING,
    checkpoint: str | None = None,
    phase: str | None = None,
    device: str = "auto",
    base: str = "",
    request_timeout_s: float = 600.0,
) -> ModelServer:
    """Load a model, and those in `also`, and start serving them. `network`: allow other computers to connect.

    `run` and each of `also` is a run, NAME@RUN or a folder, which may be followed by a phase and a checkpoint, such as
    first:step-400. Requests that name no model get the answer of `run`. Adapters on the same base weights share them.
    `tokens` and `sampling` are the defaults for requests. After `request_timeout_s`, a request ends with the text so
    far. The access token is the value of HOMING_SERVE_TOKEN, or a new one.
    """
    need("lm", verb="serve")
    need("web", verb="serve")
    is_open = _is_open(host, is_allowed=network)
    if request_timeout_s <= 0:
        raise UsageError(
            what=f"Invalid time limit for requests: {request_timeout_s:g} s.",
            why="No request could be answered.",
            fix="Use a duration such as --request-timeout 10m",
        )
    given = given_token(TOKEN)
    folders = _find_folders(run, also, checkpoint, phase)

    from homing.lm.device import describe_device
    from homing.lm.generate import read_card
    from homing.lm.generate.load_together import Source, load_together
    from homing.web.model_session import GenerationSession
    from homing.web.openai_requests import Defaults
    from homing.web.threaded_server import listen

    cards = [read_card(folder) for folder in folders]
    names = model_names(cards)
    sources = [Source(name, folder, find_base(folder, base)) for name, folder in zip(names, folders, strict=True)]
    loaded = load_together(sources, device)
    with reported_refusals():
        sessions = [
            GenerationSession(model, tokenizer, source.folder, name=source.name)
            for (model, tokenizer), source in zip(loaded, sources, strict=True)
        ]
    listed = ", ".join(map(str, folders))
    notices.say(
        f"{listed} on {describe_device(loaded[0][0].device)}. Request defaults:"
        f" {tokens} tokens, {sampling.describe().rpartition(',')[0]}."
    )
    for session, card in zip(sessions, cards, strict=True):
        if session.is_chat:
            warn_of_format(card)
        else:
            which = "This" if len(sessions) == 1 else session.name
            notices.say(f"{which} is a base model: /v1/completions completes text; /v1/chat/completions is refused.")
    sock = listen(host, port)
    here = sock.getsockname()[1]
    if port not in (0, here):
        notices.say(f"Port {port} is in use; using {here}.")
    return ModelServer(sessions, sock, host, Defaults(tokens, sampling), given, is_open, request_timeout_s)


def _find_folders(run: str | Path | None, also: Sequence[str], checkpoint: str | None, phase: str | None) -> list[Path]:
    """Return the checkpoint folders of all models, the default first. Raises UsageError if one is given twice."""
    first = ModelWord("") if run is None or isinstance(run, Path) else read_model_word(run)
    if (checkpoint and first.checkpoint) or (phase and first.phase):
        raise UsageError(
            what=f"The checkpoint of {run} is given twice.",
            why="It is given in the name of the model and by --checkpoint or --phase.",
            fix=f"Leave out the options: homing serve {run}",
        )
    which = run if run is None or isinstance(run, Path) else first.run
    folders = [find_folder(which, checkpoint=checkpoint or first.checkpoint, phase=phase or first.phase)]
    for word in also:
        model = read_model_word(word)
        folder = find_folder(model.run, checkpoint=model.checkpoint, phase=model.phase)
        if folder.resolve() in [each.resolve() for each in folders]:
            raise UsageError(
                what=f"The model {word} is served already.",
                why=f"Both names stand for {folder}.",
                fix=f"Name another checkpoint, such as --also {model.run}:latest, or leave it out.",
            )
        folders.append(folder)
    return folders


def model_names(cards: Sequence[Card]) -> list[str]:
    """Return a name for each model, which requests use: the run's, and for further checkpoints of it also the step.

    A phase is added if it is another one, and the run's id is used in place of its name if it is another run.
    """
    taken: dict[str, Card] = {}
    for card in cards:
        name = plain = card.run_name or card.folder.resolve().name
        if holder := taken.get(plain):
            is_other_run = None not in (card.run, holder.run) and card.run.id != holder.run.id  # type: ignore[union-attr]
            parts = [card.run.id if is_other_run and card.run is not None else plain]
            parts += [card.phase] if card.phase != holder.phase else []
            parts += [f"step-{card.step}"] if card.step is not None else []
            name = parts[0] if is_other_run and parts[0] not in taken else ":".join(parts)
        unique, number = name, 1
        while unique in taken:
            number += 1
            unique = f"{name}-{number}"
        taken[unique] = card
    return list(taken)


def _is_open(host: str, *, is_allowed: bool) -> bool:
    """Return whether other computers can connect. Raises UsageError if that was not allowed explicitly."""
    if host == "localhost":
        return False
    with suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return False
    if is_allowed:
        return True
    raise UsageError(
        what=f"{host} is not a loopback address.",
        why="Other computers could then reach the model, and the access token would be sent unencrypted.",
        fix=f"To allow this: --host {host} --network   A tunnel is safer: ssh -L 8000:127.0.0.1:8000",
    )


def _url(host: str, port: int) -> str:
    """Return the URL for access from this computer."""
    with suppress(ValueError):
        address = ipaddress.ip_address(host)
        if address.is_unspecified:
            host = "127.0.0.1" if address.version == 4 else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
