"""`homing dashboard`: all runs and what bills, live in the browser, on this computer until Ctrl-C; it only shows."""

from __future__ import annotations

import secrets
from typing import Annotated

import typer

from homing.cli import talk
from homing.cli.extras import need
from homing.cli.options import Json
from homing.cli.web_token import given_token
from homing.config import home as home_path

__all__ = ["command"]

TOKEN = "HOMING_DASHBOARD_TOKEN"
_HOST = "127.0.0.1"


def command(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Another one if it is taken; 0 for any.")] = 8100,
    json: Json = False,
) -> None:
    """All runs and what bills, live in the browser; it only shows, and guards nothing. The token is
    HOMING_DASHBOARD_TOKEN, or a new one each time."""
    need("web", verb="dashboard")
    given = given_token(TOKEN)

    from homing.cli.dashboard_board import Board
    from homing.web.dashboard.app import make_app
    from homing.web.host import Server, hosts_for, listen

    token = given or secrets.token_urlsafe(24)
    sock = listen(_HOST, port)
    here = sock.getsockname()[1]
    if port not in (0, here):
        talk.say(f"Port {port} is taken on this computer, so it is {here}.")
    board = Board(home_path())
    server = Server(make_app(board, token=token, hosts=hosts_for(_HOST)), sock, board.end, "homing-dashboard")
    try:
        board.begin()
        _tell(f"http://{_HOST}:{here}", token, is_made=not given)
        server.wait()
    except KeyboardInterrupt:
        talk.say("Ended; every run goes on.")
    finally:
        server.end()


def _tell(url: str, token: str, *, is_made: bool) -> None:
    """On stdout, also where talk is silent: without the token nobody can look. One that was given is not repeated."""
    talk.emit("dashboard/1", {"url": url, "token": token if is_made else None})
    if talk.is_json():
        return
    print("Page, in a browser:" if is_made else f"Page, in a browser; it asks for the token of {TOKEN}:")
    print(f"  {url}/{f'#token={token}' if is_made else ''}", flush=True)
    talk.say("It shows and does nothing: it keeps no limit and ends nothing. Ctrl-C ends it; every run goes on.")
