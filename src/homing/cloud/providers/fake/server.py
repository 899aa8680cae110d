"""Serves the fake cloud on loopback: python -m homing.cloud.providers.fake.server --home DIR

    DIR/fake/server.json   address and key of the server; removed at a normal exit      (0600)
             state.json    instances, volumes and charges, saved before each response    (0600)
             machines/     see machines.py

The server may be killed at any moment and restarted: it uses the same port and key, continues billing by the clock, and
finds its machines again. It exits when no instance is alive and there have been no requests for a while. In
addition to the cloud's own paths, the server has /double/..., which a rehearsal uses to decide which faults occur and
when:

    PUT /double/faults   POST /double/preempt {instance, notice_s}   POST /double/hang {instance}
    GET /double/bill     POST /double/leave (stops the server once nothing is billing)

This module simulates something outside homing, so it is the only one in this folder that opens a socket.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import http.server
import json
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from homing.cloud.providers.base import Needs
from homing.cloud.providers.fake.cloud import KEY_HEADER, FakeCloud, FakeOffer, Settings
from homing.cloud.providers.fake.faults import Faults
from homing.cloud.providers.fake.machines import HostMachines
from homing.cloud.providers.fake.provider import SERVER
from homing.cloud.providers.local.provider import Local
from homing.errors import HomingError, UsageError
from homing.world import HttpRequest, HttpResponse, NetworkError, World

__all__ = ["Server", "main"]

IDLE_S = 600.0
_TICK_S = 0.1
_STATE = "fake/state.json"
_LOCK = "fake/server.lock"
_RATES = (("cpu-spot", "0.12", True), ("cpu-steady", "0.36", False))  # made-up rates, like the rate of `local`


class Server:
    def __init__(self, home: Path, world: World, *, settings: Settings, faults: Faults, seed: int, port: int) -> None:
        self.home, self.world = home, world
        world.mkdir(home / "fake")
        if not world.lock(home / _LOCK):
            raise UsageError(
                what=f"A fake cloud is already running in {home}.", fix=f"Use it; its address is in {home / SERVER}"
            )
        before = self._read_state()
        self.api_key = before["api_key"] if before else world.random_hex(32)
        self.machines = HostMachines(home / "fake" / "machines", world)
        # A restarted server continues the same cloud, so it keeps the saved settings.
        self.settings = Settings(**before["settings"]) if before else settings
        self.cloud = FakeCloud(
            now=world.now,
            machines=self.machines,
            offers=[FakeOffer(**body) for body in before["offers"]] if before else _offers(home, world),
            api_key=self.api_key,
            settings=self.settings,
            faults=faults,
            seed=seed,
            on_change=self._save,
        )
        self.turn = threading.RLock()
        self.asked_at = world.monotonic()
        self.is_leaving = False
        # The machines use the server's address, so a restart must not change it.
        self.http = _listen(before["port"] if before else port, self)
        self.port = int(self.http.server_address[1])
        if before:
            self.cloud.load(before["cloud"])
        self._save()
        address = {"schema": "homing.fake-server/1", "url": f"http://127.0.0.1:{self.port}", "api_key": self.api_key}
        world.write(home / SERVER, json.dumps({**address, "pid": world.pid()}).encode(), mode=0o600)

    def serve(self, idle_s: float) -> None:
        threading.Thread(target=self._tick_on, args=(idle_s,), daemon=True).start()
        with self.http:
            self.http.serve_forever(poll_interval=0.1)
        has_ended = self.machines.wait_until_ended()
        with self.turn:
            if has_ended and not self._lives():
                self.world.remove(self.home / SERVER)

    def answer(self, request: HttpRequest) -> HttpResponse:
        with self.turn:
            self.asked_at = self.world.monotonic()
            path = request.url.split("?")[0].strip("/")
            if path.startswith("double/"):
                return self._double(request, path.removeprefix("double/"))
            return self.cloud.handle(request)

    def _double(self, request: HttpRequest, what: str) -> HttpResponse:
        if request.headers.get(KEY_HEADER) != self.api_key:
            return _say(401, {"error": "the API key is wrong"})
        body = json.loads(request.body or b"{}")
        try:
            if what == "faults":
                self.cloud.change_faults(Faults.from_dict(body))
            elif what == "preempt":
                self.cloud.preempt(body["instance"], body.get("notice_s"))
            elif what == "hang":
                self.cloud.hang(body["instance"])
            elif what == "leave":
                self.is_leaving = True
            elif what != "bill":
                return _say(404, {"error": f"no such path: /double/{what}"})
        except (KeyError, TypeError, HomingError) as exc:
            return _say(400, {"error": str(exc) or type(exc).__name__})
        self._save()
        bill = [{**dataclasses.asdict(line), "usd": str(line.usd)} for line in self.cloud.bill()]
        return _say(200, {"bill": bill, "now": self.cloud.now()})

    def _tick_on(self, idle_s: float) -> None:
        while True:
            self.world.sleep(_TICK_S)
            with self.turn:
                self.cloud.tick()
                is_idle = self.world.monotonic() - self.asked_at > idle_s
                if (is_idle or self.is_leaving) and not self._lives():
                    break
        self.http.shutdown()

    def _lives(self) -> bool:
        return any(line.until is None for line in self.cloud.bill())

    def _read_state(self) -> dict[str, Any] | None:
        path = self.home / _STATE
        if not self.world.exists(path):
            return None
        state = json.loads(self.world.read(path))
        assert isinstance(state, dict), path
        return state

    def _save(self) -> None:
        state = {
            "schema": "homing.fake-state/1",
            "port": self.port,
            "api_key": self.api_key,
            "settings": dataclasses.asdict(self.settings),
            "offers": [dataclasses.asdict(offer) for offer in self.cloud.offers],
            "cloud": self.cloud.dump(),
        }
        self.world.write(self.home / _STATE, json.dumps(state).encode(), mode=0o600)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 30
    owner: Server

    def _handle(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.close_connection = True
        try:
            reply = self.owner.answer(HttpRequest(self.command, self.path, headers, self.rfile.read(length)))
        except NetworkError:
            with contextlib.suppress(OSError):  # close the connection without sending any response
                self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.send_response(reply.status)
        for name, value in {**reply.headers, "content-length": str(len(reply.body)), "connection": "close"}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(reply.body)

    do_GET = do_POST = do_PUT = do_DELETE = _handle

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _Listener(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        exc = sys.exc_info()[1]
        # A machine may be killed while it waits for a response, so broken connections are ignored.
        if not isinstance(exc, ConnectionError):
            super().handle_error(request, client_address)


def _listen(port: int, server: Server) -> _Listener:
    handler = type("Handler", (_Handler,), {"owner": server})
    try:
        return _Listener(("127.0.0.1", port), handler)
    except OSError as exc:
        raise UsageError(
            what=f"The fake cloud cannot listen on port {port}.",
            why=f"{exc}. The port cannot change, because the fake cloud's instances connect to it.",
            fix="Stop the other process on that port, or, if no fake instance is running, delete $HOMING_HOME/fake",
        ) from exc


def _offers(home: Path, world: World) -> list[FakeOffer]:
    """Return offers for this computer, at made-up rates."""
    (here,) = Local(home=home, owner="000000", world=world).offers(Needs(num_gpus=0))
    shape = (here.device, here.num_gpus, here.num_cores, here.memory_bytes)
    disk_gb = max(1, min(20, here.disk_bytes // 10**9))
    return [FakeOffer(name, *shape, rate, disk_gb, is_spot) for name, rate, is_spot in _RATES]


def _say(status: int, body: dict[str, Any]) -> HttpResponse:
    return HttpResponse(status, {"content-type": "application/json"}, json.dumps(body).encode())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m homing.cloud.providers.fake.server", description=__doc__)
    parser.add_argument("--home", required=True, type=Path, help="the $HOMING_HOME directory to serve")
    parser.add_argument(
        "--port",
        type=int,
        default=0,
        help="the port to listen on; 0 picks a free port; a restarted server keeps its previous port",
    )
    parser.add_argument(
        "--faults", default="{}", help="the faults to inject, as JSON, with the fields of fake.faults.Faults"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-guard", action="store_true", help="simulate a cloud that has no spend guard")
    parser.add_argument(
        "--settle-s", type=float, default=Settings.settle_s, help="maximum age of the instance list, in seconds"
    )
    parser.add_argument(
        "--idle-s", type=float, default=IDLE_S, help="exit after this many seconds with no instances and no requests"
    )
    given = parser.parse_args(argv)
    settings = Settings(has_guard=not given.no_guard, settle_s=given.settle_s)
    try:
        faults = Faults.from_dict(json.loads(given.faults))
        server = Server(
            given.home.resolve(), World(), settings=settings, faults=faults, seed=given.seed, port=given.port
        )
    except (HomingError, ValueError) as exc:
        sys.stderr.write(f"{exc}\n")
        return 2
    server.serve(given.idle_s)
    return 0


if __name__ == "__main__":
    sys.exit(main())
