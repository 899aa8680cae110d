"""`homing dashboard`: all runs and what bills, live in the browser on this computer until Ctrl-C. Read-only."""

from __future__ import annotations

import secrets
from typing import Annotated

import typer

from homing.api.extras import need
from homing.api.pages.local_server import given_token
from homing.cli import output
from homing.cli.options import Json
from homing.config.paths import home as home_path

__all__ = ["command"]

TOKEN = "HOMING_DASHBOARD_TOKEN"
_HOST = "127.0.0.1"


def command(
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Local port. If it is in use, another one is chosen; 0: any free port."),
    ] = 8100,
    json: Json = False,
) -> None:
    """Show all runs and what bills, live in the browser. Read-only: it enforces no limit and ends nothing.

    Set the access token with HOMING_DASHBOARD_TOKEN; otherwise a new one is made each time.
    """
    need("web", verb="dashboard")
    given = given_token(TOKEN)

    from homing.api.pages.dashboard import Board
    from homing.web.dashboard.dashboard_app import make_app
    from homing.web.loopback_server import Server, hosts_for, listen

    token = given or secrets.token_urlsafe(24)
    sock = listen(_HOST, port)
    here = sock.getsockname()[1]
    if port not in (0, here):
        output.say(f"Port {port} is in use; using {here}.")
    board = Board(home_path())
    server = Server(make_app(board, token=token, hosts=hosts_for(_HOST)), sock, board.end, "homing-dashboard")
    try:
        board.begin()
        _print_address(f"http://{_HOST}:{here}", token, is_made=not given)
        server.wait()
    except KeyboardInterrupt:
        output.say("Dashboard stopped; all runs continue.")
    finally:
        server.end()


def _print_address(url: str, token: str, *, is_made: bool) -> None:
    """Print the address on stdout, even with -q: without the token the page cannot be opened.

    A given token is not repeated.
    """
    output.emit("dashboard/1", {"url": url, "token": token if is_made else None})
    if output.is_json():
        return
    print("Open in a browser:" if is_made else f"Open in a browser; it asks for the token of {TOKEN}:")
    print(f"  {url}/{f'#token={token}' if is_made else ''}", flush=True)
    output.say("Read-only: the dashboard enforces no limits and ends nothing. Ctrl-C stops it; all runs continue.")
