"""A Modal of one process: a gRPC server on the stubs that the SDK itself ships, with state, a billing clock and faults.

It keeps the promises that the adapter leans on: a name is unique among the running sandboxes of an app; a sandbox ends
when its command does, at its timeout (300 s where none was set), or when it is terminated, and bills from the moment it
is scheduled; where no GPU is free it waits in a queue without an error; secrets reach the sandbox's environment and no
listing; a Dict's put tells one of many that it was first. What it does not have answers UNIMPLEMENTED.

    modal.faults        the next calls of a method fail: before the deed, or after it (a lost reply)
    modal.list_delay_s  how late lists and names are        modal.clock_s  moves time on, for timeouts and bills
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpclib.server
import pytest
from grpclib import GRPCError, Status
from modal_proto import api_pb2
from modal_proto.api_grpc import ModalClientBase
from modal_proto.task_command_router_grpc import TaskCommandRouterBase
from tests.doubles.modal_cloud import DEFAULT_TIMEOUT_S, TOKEN_ID, TOKEN_SECRET, Fault, Modal
from tests.doubles.modal_rpc import Services

from homing.store.modal import client

_TICK_S = 0.1


def _answering(base: type, services: Services) -> Any:
    """A servicer on the SDK's own base: each RPC goes to the method of its name, or answers UNIMPLEMENTED."""

    def handler(name: str) -> Any:
        async def handle(self: Any, stream: Any) -> None:
            modal = services.modal
            ask = await stream.recv_message()
            modal.calls.append(name)
            workspace = _workspace(modal, stream, name)
            fault = next((one for one in modal.faults if one.method in (name, "*") and one.times > 0), None)
            if fault is not None:
                fault.times -= 1
                if not fault.is_after:
                    raise GRPCError(fault.status, fault.text)
            method = getattr(services if workspace is modal else Services(workspace), name, None)
            if method is None:
                raise GRPCError(Status.UNIMPLEMENTED, f"the double has no {name}")
            # In a thread: a sandbox that is started or ended must not hold up the others.
            answer = await asyncio.get_running_loop().run_in_executor(None, _whole, method, ask)
            if fault is not None:
                raise GRPCError(fault.status, fault.text)
            for message in answer:
                await stream.send_message(message)

        return handle

    names = [name for name, _ in inspect.getmembers(base, inspect.isfunction) if name[0].isupper()]
    return type(f"Double{base.__name__}", (base,), {name: handler(name) for name in names})()


def _whole(method: Any, ask: Any) -> list[Any]:
    answer = method(ask)
    return list(answer) if inspect.isgenerator(answer) else [answer]


def _workspace(modal: Modal, stream: Any, name: str) -> Modal:
    """Return the workspace of the token; two workspaces share only the server."""
    if name.startswith("Task") and not name.startswith("TaskGet"):
        return modal  # by the token that the router's access brought
    metadata = stream.metadata
    token_id, secret = metadata.get("x-modal-token-id"), metadata.get("x-modal-token-secret")
    if secret != TOKEN_SECRET or token_id not in (TOKEN_ID, *modal.workspaces):
        raise GRPCError(Status.UNAUTHENTICATED, "Token validation failed")
    return modal.workspaces.get(token_id, modal)


async def _serve(modal: Modal, is_up: threading.Event, is_over: threading.Event) -> None:
    from aiohttp import web

    async def block(request: web.Request) -> web.Response:
        sha = request.match_info["sha"]
        if request.method == "PUT":
            body = await request.read()
            if hashlib.sha256(body).hexdigest() != sha:
                return web.Response(status=400, text="other bytes than were announced")
            modal.data[sha] = body
            return web.Response(body=b"taken")
        return web.Response(body=modal.data[sha])

    application = web.Application(client_max_size=1 << 30)
    application.router.add_route("*", "/block/{sha}", block)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    modal.blocks_port = runner.addresses[0][1]
    services = Services(modal)
    server = grpclib.server.Server([_answering(ModalClientBase, services), _answering(TaskCommandRouterBase, services)])
    await server.start("127.0.0.1", 0)
    modal.port = server._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    is_up.set()
    while not is_over.is_set():
        await asyncio.get_running_loop().run_in_executor(None, modal.tick)
        await asyncio.sleep(_TICK_S)
    server.close()
    await runner.cleanup()


@contextlib.contextmanager
def running(folder: Path, replace: dict[str, str] | None = None) -> Iterator[Modal]:
    """Up, until the block ends; then every sandbox that still lives is ended."""
    modal = Modal(folder, replace or {})
    is_up, is_over = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(_serve(modal, is_up, is_over)), daemon=True)
    thread.start()
    assert is_up.wait(20), "the Modal double did not come up"
    try:
        yield modal
    finally:
        for one in list(modal.sandboxes.values()):
            modal.end(one, api_pb2.GenericResult.GENERIC_STATUS_TERMINATED)
        _hang_up(modal.url)
        is_over.set()
        thread.join(10)


def shorten_the_waits_of_the_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK tries again as often as ever, without its pauses."""
    import modal._utils.grpc_utils as reference

    class Hurried:
        def __getattr__(self, name: str) -> Any:
            return getattr(asyncio, name)

        async def sleep(self, seconds: float) -> None:
            await asyncio.sleep(min(seconds, 0.002))

    monkeypatch.setattr(reference, "asyncio", Hurried())


def _hang_up(url: str) -> None:
    """The SDK closes a client when its process ends, and this server ends before."""
    for key in [key for key in client._CLIENTS if key[0] == url]:
        client._CLIENTS.pop(key)._close()


__all__ = [
    "DEFAULT_TIMEOUT_S",
    "TOKEN_ID",
    "TOKEN_SECRET",
    "Fault",
    "Modal",
    "api_pb2",
    "running",
    "shorten_the_waits_of_the_sdk",
]
