"""`homing serve`: serve trained models through an OpenAI-compatible API and a chat page, until Ctrl-C."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from homing.api.models.serve_model import TOKEN, ModelServer, serve_model
from homing.cli import output
from homing.cli.complete import run_words
from homing.cli.model_options import Checkpoint, Device, Model, Phase, Tokens, takes_sampling
from homing.cli.options import Base, Json
from homing.errors import UsageError
from homing.sampling_settings import DEFAULT_SAMPLING, SamplingSettings
from homing.units import parse_duration

__all__ = ["command"]


@takes_sampling
def command(
    run: Model = None,
    also: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RUN[:PHASE][:CHECKPOINT]",
            help="Serve this model too, such as first:step-400; repeatable.",
            autocompletion=run_words,
        ),
    ] = None,
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Local port. If it is in use, another one is chosen; 0: any free port."),
    ] = 8000,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on; all but loopback addresses need --network.")
    ] = "127.0.0.1",
    network: Annotated[bool, typer.Option("--network", help="Allow other computers to connect, unencrypted.")] = False,
    tokens: Tokens = 200,
    sampling: SamplingSettings = DEFAULT_SAMPLING,
    checkpoint: Checkpoint = None,
    phase: Phase = None,
    device: Device = "auto",
    base: Base = "",
    request_timeout: Annotated[
        str,
        typer.Option(metavar="DURATION", help="End a request after this time and return the text so far."),
    ] = "10m",
    json: Json = False,
) -> None:  # fmt: skip
    """Serve a trained model through an OpenAI-compatible API with a chat page, until Ctrl-C.

    RUN and every --also may name a phase and a checkpoint: first:step-400, first:sft, first@20260101-120000:sft:best.
    Requests choose among the models with the field `model`; GET /v1/models lists their names.

    Prints the address of the page, the variables for OpenAI clients and an example request. --tokens and the sampling
    options are the defaults for requests that do not set them. Set the access token with HOMING_SERVE_TOKEN; otherwise
    a new token is generated on every start.
    """
    server = serve_model(
        run,
        also=also or (),
        port=port,
        host=host,
        network=network,
        tokens=tokens,
        sampling=sampling,
        checkpoint=checkpoint,
        phase=phase,
        device=device,
        base=base,
        request_timeout_s=_duration(request_timeout),
    )
    try:
        with server:
            _print_addresses(server)
            server.wait()
    except KeyboardInterrupt:
        output.say("Server stopped.")


def _duration(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as exc:
        raise UsageError(
            what=f"Invalid --request-timeout: {text!r}.", why=f"{exc}.", fix="Use a duration such as 10m or 90s."
        ) from exc


def _print_addresses(server: ModelServer) -> None:
    """Print the address on stdout, even with -q, because no request is accepted without the token.

    A token that the user has set is not printed.
    """
    session, url, token, is_made = server.session, server.url, server.token, not server.is_token_given
    if server.is_open:
        output.say(
            "warning: other computers can reach this server, and traffic, including the token, is not encrypted."
        )
    document: dict[str, Any] = {"url": url, "base_url": f"{url}/v1", "model": session.name, "mode": server.mode}
    document["models"] = [each.name for each in server.sessions]
    output.emit("serve/1", {**document, "token": token if is_made else None})
    if output.is_json():
        return
    shown = token if is_made else f"${TOKEN}"
    path, body = ("completions", '{"prompt": "Once", "max_tokens": 20}')
    if session.is_chat:
        path, body = ("chat/completions", '{"messages": [{"role": "user", "content": "Hello"}]}')
    # Print each one on its own line, so that it is easy to copy.
    print("Open in a browser:" if is_made else f"Open in a browser and enter the token from {TOKEN}:")
    print(f"  {url}/{f'#token={token}' if is_made else ''}")
    print("For OpenAI API clients:")
    print(f"  export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={shown}")
    print("Example request:")
    print(f"  curl -sS {url}/v1/{path} -H \"Authorization: Bearer {shown}\" -d '{body}'", flush=True)
    if len(server.sessions) == 1:
        output.say(f"The model is called {session.name}. Ctrl-C stops the server.")
    else:
        names = ", ".join(each.name for each in server.sessions)
        output.say(f"The models are called {names}; {session.name} is the default. Ctrl-C stops the server.")
