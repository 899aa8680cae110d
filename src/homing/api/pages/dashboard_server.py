"""The dashboard as a server on this computer. Implements `homing dashboard`. Read-only."""

from __future__ import annotations

import secrets

from homing.api import notices
from homing.api.extras import need
from homing.api.token_and_port import given_token
from homing.config import home as home_path

__all__ = ["TOKEN", "DashboardServer", "open_dashboard"]

TOKEN = "HOMING_DASHBOARD_TOKEN"
_HOST = "127.0.0.1"


class DashboardServer:
    """A running dashboard, in its own thread. Leaving its `with` block stops only the dashboard.

    All runs continue. `wait` blocks until the server fails."""

    def __init__(self, port: int, given: str) -> None:
        from homing.api.pages.dashboard_overview import Board
        from homing.web.dashboard.dashboard_app import make_app
        from homing.web.threaded_server import Server, hosts_for, listen

        self.token, self.is_token_given = given or secrets.token_urlsafe(24), bool(given)
        sock = listen(_HOST, port)
        self.port = sock.getsockname()[1]
        self.url = f"http://{_HOST}:{self.port}"
        self._board = Board(home_path())
        app = make_app(self._board, token=self.token, hosts=hosts_for(_HOST))
        self._server = Server(app, sock, self._board.end, "homing-dashboard")

    def wait(self) -> None:
        self._server.wait()

    def end(self) -> None:
        self._server.end()

    def __enter__(self) -> DashboardServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def open_dashboard(*, port: int = 8100) -> DashboardServer:
    """Start the dashboard, on another port if this one is in use; 0: any free port.

    The access token is the value of HOMING_DASHBOARD_TOKEN, or a new one.
    """
    need("web", verb="dashboard")
    server = DashboardServer(port, given_token(TOKEN))
    if port not in (0, server.port):
        notices.say(f"Port {port} is in use; using {server.port}.")
    try:
        server._board.begin()
    except BaseException:
        server.end()
        raise
    return server
