"""`homing dashboard`: all runs and what is billing, live in the browser on this computer until Ctrl-C. Read-only."""

from __future__ import annotations

from typing import Annotated

import typer

from homing.api.pages.dashboard_server import TOKEN, open_dashboard
from homing.cli import output
from homing.cli.options import Json

__all__ = ["command"]


def command(
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Local port. If it is in use, another one is chosen; 0: any free port."),
    ] = 8100,
    json: Json = False,
) -> None:
    """Show all runs and what is billing, live in the browser.

    The page is read-only: it enforces no limits and destroys no instances. Set the access token with
    HOMING_DASHBOARD_TOKEN; otherwise a new token is generated on every start.
    """
    server = open_dashboard(port=port)
    try:
        with server:
            _print_address(server.url, server.token, is_made=not server.is_token_given)
            server.wait()
    except KeyboardInterrupt:
        output.say("Dashboard stopped; all runs continue.")


def _print_address(url: str, token: str, *, is_made: bool) -> None:
    """Print the address on stdout, even with -q, because the page cannot be opened without the token.

    A token that the user has set is not printed.
    """
    output.emit("dashboard/1", {"url": url, "token": token if is_made else None})
    if output.is_json():
        return
    print("Open in a browser:" if is_made else f"Open in a browser and enter the token from {TOKEN}:")
    print(f"  {url}/{f'#token={token}' if is_made else ''}", flush=True)
    output.say(
        "Read-only: the dashboard enforces no limits and destroys no instances. Ctrl-C stops only the dashboard."
    )
