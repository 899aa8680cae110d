"""Serve a trained model through an OpenAI-compatible API and a chat page. Implements `homing serve`."""

from __future__ import annotations

import ipaddress
import secrets
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from homing.api import notices
from homing.api.extras import need
from homing.api.models.chat_session import reported_refusals, warn_of_format
from homing.api.models.open_model import open_model
from homing.api.token_and_port import given_token
from homing.errors import UsageError
from homing.sampling_settings import DEFAULT_SAMPLING, SamplingSettings

if TYPE_CHECKING:
    import socket

    from homing.web.model_session import GenerationSession
    from homing.web.openai_requests import Defaults

__all__ = ["TOKEN", "ModelServer", "serve_model"]

TOKEN = "HOMING_SERVE_TOKEN"


class ModelServer:
    """A running server, in its own thread. Leaving its `with` block stops it; `wait` blocks until it fails."""

    def __init__(
        self, session: GenerationSession, sock: socket.socket, host: str, defaults: Defaults, given: str, is_open: bool
    ) -> None:
        from homing.web.app import serving
        from homing.web.threaded_server import hosts_for

        self.session, self.is_open, self.is_token_given = session, is_open, bool(given)
        self.token = given or secrets.token_urlsafe(24)
        self.url = _url(host, sock.getsockname()[1])
        self._ending = ExitStack()
        self._server = self._ending.enter_context(
            serving(session, sock, token=self.token, hosts=hosts_for(host), defaults=defaults)
        )

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
    port: int = 8000,
    host: str = "127.0.0.1",
    network: bool = False,
    tokens: int = 200,
    sampling: SamplingSettings = DEFAULT_SAMPLING,
    checkpoint: str | None = None,
    phase: str | None = None,
    device: str = "auto",
    base: str = "",
) -> ModelServer:
    """Load a model and start serving it. `network`: allow other computers to connect, unencrypted.

    `tokens` and `sampling` are the defaults for requests. The access token is the value of
    HOMING_SERVE_TOKEN, or a new one.
    """
    need("lm", verb="serve")
    need("web", verb="serve")
    is_open = _is_open(host, is_allowed=network)
    given = given_token(TOKEN)
    model = open_model(run, verb="serve", checkpoint=checkpoint, phase=phase, device=device, base=base)

    from homing.lm.device import describe_device
    from homing.lm.generate import read_card
    from homing.web.model_session import GenerationSession
    from homing.web.openai_requests import Defaults
    from homing.web.threaded_server import listen

    with reported_refusals():
        session = GenerationSession(model.model, model.tokenizer, model.folder)
    notices.say(
        f"{model.folder} on {describe_device(model.model.device)}. Request defaults:"
        f" {tokens} tokens, {sampling.describe().rpartition(',')[0]}."
    )
    if session.is_chat:
        warn_of_format(read_card(model.folder))
    else:
        notices.say("This is a base model: /v1/completions completes text; /v1/chat/completions is refused.")
    sock = listen(host, port)
    here = sock.getsockname()[1]
    if port not in (0, here):
        notices.say(f"Port {port} is in use; using {here}.")
    return ModelServer(session, sock, host, Defaults(tokens, sampling), given, is_open)


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
