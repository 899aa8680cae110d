"""`homing serve`: a trained model as OpenAI's API, and a page to talk to it, on this computer until Ctrl-C."""

from __future__ import annotations

import ipaddress
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from homing.cli import talk
from homing.cli.chat import refusals_told, say_format
from homing.cli.extras import need
from homing.cli.find_base import Base, find_base
from homing.cli.find_model import find_model
from homing.cli.generate import Checkpoint, Device, Model, Phase, Temperature, Tokens, TopK
from homing.cli.options import Json
from homing.cli.web_token import given_token
from homing.errors import UsageError

if TYPE_CHECKING:
    from homing.web.voice import Voice

__all__ = ["command"]

TOKEN = "HOMING_SERVE_TOKEN"


def command(
    run: Model = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Another one if it is taken; 0 for any.")] = 8000,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Any but loopback needs --network.")] = "127.0.0.1",
    network: Annotated[bool, typer.Option("--network", help="Let other computers ask, unencrypted.")] = False,
    tokens: Tokens = 200,
    temperature: Temperature = 0.8,
    top_k: TopK = 50,
    checkpoint: Checkpoint = None,
    phase: Phase = None,
    device: Device = "auto",
    base: Base = "",
    json: Json = False,
) -> None:  # fmt: skip
    """Serve a trained model as OpenAI's API with a chat page, until Ctrl-C. It prints the address of the page, the
    variables for OpenAI's clients and a first request. --tokens, --temperature and --top-k are for requests that do
    not say theirs. The token is HOMING_SERVE_TOKEN, or a new one each time."""
    need("lm", verb="serve")
    need("web", verb="serve")
    is_open = _is_open(host, is_allowed=network)
    given = given_token(TOKEN)
    folder = find_model(run, checkpoint=checkpoint, phase=phase)

    from homing.lm.device import describe_device
    from homing.lm.generate import load_for_use, read_card
    from homing.web.openai import Defaults
    from homing.web.server import hosts_for, listen, serving
    from homing.web.voice import Voice

    model, tokenizer = load_for_use(folder, device, base=find_base(folder, base))
    with refusals_told():
        voice = Voice(model, tokenizer, folder)
    talk.say(f"{folder} on {describe_device(model.device)}. Where a request does not say it:"
             f" {tokens} tokens, temperature {temperature:g}, top-k {top_k}.")  # fmt: skip
    if voice.is_chat:
        say_format(read_card(folder))
    else:
        talk.say("This is a base model: /v1/completions goes on with a text; /v1/chat/completions is refused.")
    token = given or secrets.token_urlsafe(24)
    sock = listen(host, port)
    here = sock.getsockname()[1]
    if port not in (0, here):
        talk.say(f"Port {port} is taken on this computer, so it is {here}.")
    settings = Defaults(tokens, temperature, top_k)
    try:
        with serving(voice, sock, token=token, hosts=hosts_for(host), defaults=settings) as server:
            _tell(voice, _url(host, here), token, is_made=not given, is_open=is_open)
            server.wait()
    except KeyboardInterrupt:
        talk.say("Ended.")


def _is_open(host: str, *, is_allowed: bool) -> bool:
    """Whether other computers can ask; refused where nobody said that they may."""
    if host == "localhost":
        return False
    with suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return False
    if is_allowed:
        return True
    raise UsageError(
        what=f"{host} is not this computer's loopback.",
        why="Other computers could reach the model there, with a token that travels unencrypted.",
        fix=f"If that is meant: --host {host} --network; from elsewhere a tunnel is safer: ssh -L 8000:127.0.0.1:8000",
    )


def _url(host: str, port: int) -> str:
    """As this computer asks for it."""
    with suppress(ValueError):
        address = ipaddress.ip_address(host)
        if address.is_unspecified:
            host = "127.0.0.1" if address.version == 4 else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _tell(voice: Voice, url: str, token: str, *, is_made: bool, is_open: bool) -> None:
    """On stdout, also where talk is silent: without the token nobody can ask. One that was given is not repeated."""
    if is_open:
        talk.say(
            "warning: other computers can reach this, and what they send and get, token included, is not encrypted."
        )
    mode = "chat" if voice.is_chat else "completion"
    document = {"url": url, "base_url": f"{url}/v1", "model": voice.name, "mode": mode}
    talk.emit("serve/1", {**document, "token": token if is_made else None})
    if talk.is_json():
        return
    shown = token if is_made else f"${TOKEN}"
    path, body = ("completions", '{"prompt": "Once", "max_tokens": 20}')
    if voice.is_chat:
        path, body = ("chat/completions", '{"messages": [{"role": "user", "content": "Hello"}]}')
    # Each on a line of its own, to be copied whole.
    print("Page, in a browser:" if is_made else f"Page, in a browser; it asks for the token of {TOKEN}:")
    print(f"  {url}/{f'#token={token}' if is_made else ''}")
    print("Programs that speak OpenAI's API:")
    print(f"  export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={shown}")
    print("A first request:")
    print(f"  curl -sS {url}/v1/{path} -H \"Authorization: Bearer {shown}\" -d '{body}'", flush=True)
    talk.say(f"The model is called {voice.name}. Ctrl-C ends it.")
