"""`homing serve`: a trained model behind an OpenAI-compatible API, with a chat page, on this computer until Ctrl-C."""

from __future__ import annotations

import ipaddress
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from homing.api.extras import need
from homing.api.lookup.base_weights import find_base
from homing.api.lookup.find_models import find_model
from homing.api.models.chat_session import reported_refusals, warn_of_format
from homing.api.pages.local_server import given_token
from homing.cli import output
from homing.cli.options import Base, Json
from homing.cli.verbs.generate import Checkpoint, Device, Model, Phase, Temperature, Tokens, TopK
from homing.errors import UsageError

if TYPE_CHECKING:
    from homing.web.model_session import GenerationSession

__all__ = ["command"]

TOKEN = "HOMING_SERVE_TOKEN"


def command(
    run: Model = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Local port (another if it is in use); 0: any.")] = 8000,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Needs --network unless loopback.")] = "127.0.0.1",
    network: Annotated[bool, typer.Option("--network", help="Allow other computers to connect, unencrypted.")] = False,
    tokens: Tokens = 200,
    temperature: Temperature = 0.8,
    top_k: TopK = 50,
    checkpoint: Checkpoint = None,
    phase: Phase = None,
    device: Device = "auto",
    base: Base = "",
    json: Json = False,
) -> None:  # fmt: skip
    """Serve a trained model through an OpenAI-compatible API with a chat page, until Ctrl-C.

    Prints the address of the page, the variables for OpenAI clients and an example request. --tokens, --temperature and
    --top-k are the defaults for requests that do not set them. Set the access token with HOMING_SERVE_TOKEN; otherwise
    a new one is made each time.
    """
    need("lm", verb="serve")
    need("web", verb="serve")
    is_open = _is_open(host, is_allowed=network)
    given = given_token(TOKEN)
    folder = find_model(run, checkpoint=checkpoint, phase=phase)

    from homing.lm.device import describe_device
    from homing.lm.generate import load_for_use, read_card
    from homing.web.app import serving
    from homing.web.loopback_server import hosts_for, listen
    from homing.web.model_session import GenerationSession
    from homing.web.openai_format import Defaults

    model, tokenizer = load_for_use(folder, device, base=find_base(folder, base))
    with reported_refusals():
        session = GenerationSession(model, tokenizer, folder)
    output.say(f"{folder} on {describe_device(model.device)}. Request defaults:"
             f" {tokens} tokens, temperature {temperature:g}, top-k {top_k}.")  # fmt: skip
    if session.is_chat:
        warn_of_format(read_card(folder))
    else:
        output.say("This is a base model: /v1/completions completes text; /v1/chat/completions is refused.")
    token = given or secrets.token_urlsafe(24)
    sock = listen(host, port)
    here = sock.getsockname()[1]
    if port not in (0, here):
        output.say(f"Port {port} is in use; using {here}.")
    settings = Defaults(tokens, temperature, top_k)
    try:
        with serving(session, sock, token=token, hosts=hosts_for(host), defaults=settings) as server:
            _print_addresses(session, _url(host, here), token, is_made=not given, is_open=is_open)
            server.wait()
    except KeyboardInterrupt:
        output.say("Ended.")


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
        why="Other computers could reach the model there, with a token that travels unencrypted.",
        fix=f"To allow this: --host {host} --network   A tunnel is safer: ssh -L 8000:127.0.0.1:8000",
    )


def _url(host: str, port: int) -> str:
    """Return the URL for access from this computer."""
    with suppress(ValueError):
        address = ipaddress.ip_address(host)
        if address.is_unspecified:
            host = "127.0.0.1" if address.version == 4 else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _print_addresses(session: GenerationSession, url: str, token: str, *, is_made: bool, is_open: bool) -> None:
    """Print the address on stdout, even with -q: without the token no request is accepted.

    A given token is not repeated.
    """
    if is_open:
        output.say(
            "warning: other computers can reach this server, and traffic, including the token, is not encrypted."
        )
    mode = "chat" if session.is_chat else "completion"
    document = {"url": url, "base_url": f"{url}/v1", "model": session.name, "mode": mode}
    output.emit("serve/1", {**document, "token": token if is_made else None})
    if output.is_json():
        return
    shown = token if is_made else f"${TOKEN}"
    path, body = ("completions", '{"prompt": "Once", "max_tokens": 20}')
    if session.is_chat:
        path, body = ("chat/completions", '{"messages": [{"role": "user", "content": "Hello"}]}')
    # Each on its own line, for copying.
    print("Open in a browser:" if is_made else f"Open in a browser; it asks for the token of {TOKEN}:")
    print(f"  {url}/{f'#token={token}' if is_made else ''}")
    print("For OpenAI API clients:")
    print(f"  export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={shown}")
    print("Example request:")
    print(f"  curl -sS {url}/v1/{path} -H \"Authorization: Bearer {shown}\" -d '{body}'", flush=True)
    output.say(f"The model is called {session.name}. Ctrl-C stops the server.")
