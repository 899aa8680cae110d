"""Who may ask: every combination of host, origin, method, token and path, and what each answer tells a browser."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from typing import Any

import pytest
from tests.web.dashboard_rig import HERE, TOKEN, Messages, served

from homing.web.dashboard.access_check import OPEN
from homing.web.dashboard.dashboard_app import make_app
from homing.web.threaded_server import hosts_for

SECRET = "what only the owner may read"

HOSTS = {
    "127.0.0.1:8100": True,
    "localhost:8100": True,
    "[::1]:8100": True,
    "LOCALHOST": True,
    "evil.example:8100": False,
    "127.0.0.1.evil.example": False,
    "127.0.0.1:8100@evil.example": False,
    "localhost:8100.evil.example": False,
    "[::1].evil.example:80": False,
    "": False,
    None: False,
}
ORIGINS = {
    None: True,
    "own": True,
    "null": False,
    "http://evil.example": False,
    "https://127.0.0.1:8100": False,
    "http://127.0.0.1:9999": False,
}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
TOKENS = {f"Bearer {TOKEN}": True, f"bearer  {TOKEN} ": True, None: False, "Bearer ": False, f"Bearer {TOKEN}x": False,
          f"Basic {TOKEN}": False, TOKEN: False}  # fmt: skip
# Whether there is something; what is under none of the open ones wants the token first.
PATHS = {
    "/": True,
    "/page.js": True,
    "/uplot.css": True,
    "/health": True,
    "/api/runs": True,
    "/api/runs/live": True,
    f"/api/runs/{HERE}": True,
    f"/api/runs/{HERE}/live": True,
    "/api/compare": False,
    "/shared.js": True,
    "/api/runs/unknown": False,
    "/api/runs/..": False,
    "/api/runs/../../etc/passwd": False,
    "/api/runs/": False,
    "/api": False,
    "/API/runs": False,
    "//api/runs": False,
    "/./api/runs": False,
    "/page.js/../api/runs": False,
    "/page.html": False,
    "/feed.py": False,
    "/uplot.LICENSE": False,
    "/health/": False,
    "http://evil.example/": False,
}


def ask(app: Any, method: str, path: str, headers: list[tuple[str, str]]) -> tuple[int, dict[str, str], bytes]:
    """One request as a server hands it over; what a server itself would refuse (two hosts) comes through here."""
    sent: list[dict[str, Any]] = []
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
             "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
             "server": ("127.0.0.1", 8100),
             "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers]}  # fmt: skip

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False} if not sent else await asyncio.Future()

    async def send(message: Any) -> None:
        sent.append(message)

    async def go() -> None:
        await app(scope, receive, send)

    asyncio.run(go())
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], {name.decode(): value.decode() for name, value in sent[0]["headers"]}, body


@pytest.fixture(scope="module")
def app() -> Any:
    source = Messages()
    source.all.put("money", SECRET)
    source.one.put("head", SECRET)
    source.is_ending = True  # a stream says what is to be said of it and ends
    return make_app(source, token=TOKEN, hosts=hosts_for("127.0.0.1"))


def expected(host: str | None, origin: str | None, method: str, token: str | None, path: str) -> int:
    if not HOSTS[host]:
        return 400
    if not ORIGINS[origin]:
        return 403
    if method != "GET":
        return 405
    if path not in OPEN and not TOKENS[token]:
        return 401
    return 200 if PATHS[path] else 404


def request(host: str | None, origin: str | None, token: str | None) -> list[tuple[str, str]]:
    headers = [("host", host)] if host is not None else []
    if origin is not None:
        headers.append(("origin", f"http://{host}" if origin == "own" else origin))
    return [*headers, ("authorization", token)] if token is not None else headers


def combinations() -> list[tuple[str | None, str | None, str, str | None, str]]:
    """All of two dimensions at a time with the rest valid, and all of GET: thousands, of which none may be wrong."""
    good = ("127.0.0.1:8100", None, "GET", f"Bearer {TOKEN}", "/api/runs")
    sides: tuple[Any, ...] = (HOSTS, ORIGINS, METHODS, TOKENS, PATHS)
    found = set()
    for one, other in itertools.combinations(range(5), 2):
        for a, b in itertools.product(sides[one], sides[other]):
            each: list[Any] = list(good)
            each[one], each[other] = a, b
            found.add(tuple(each))
    found |= set(itertools.product(HOSTS, ORIGINS, ["GET", "POST"], TOKENS, ["/", "/api/runs", "/api/runs/.."]))
    return sorted(found, key=str)


@pytest.mark.slow
@pytest.mark.acceptance("X21")
def test_no_combination_of_host_origin_method_token_and_path_is_answered_wrongly(app: Any) -> None:
    tried = combinations()
    assert len(tried) >= 200
    wrong = []
    for host, origin, method, token, path in tried:
        status, headers, body = ask(app, method, path, request(host, origin, token))
        is_right = status == expected(host, origin, method, token, path)
        is_safe = (
            "default-src 'none'" in headers.get("content-security-policy", "")
            and headers.get("x-content-type-options") == "nosniff"
            and headers.get("referrer-policy") == "no-referrer"
            and headers.get("cache-control") == "no-store"
            and headers.get("cross-origin-resource-policy") == "same-origin"
            and not any(name.startswith("access-control-") or name == "set-cookie" for name in headers)
        )
        may_read = status == 200 and path not in OPEN
        if not is_right or not is_safe or (SECRET.encode() in body and not may_read):
            wrong.append((host, origin, method, token, path, status))
    assert wrong == [], f"{len(wrong)} of {len(tried)}"


def test_the_right_request_is_answered_with_what_there_is(app: Any) -> None:
    status, headers, body = ask(app, "GET", "/api/runs", request("localhost:8100", "own", f"Bearer {TOKEN}"))
    assert (status, SECRET.encode() in body) == (200, True)
    status, headers, _ = ask(app, "GET", "/api/runs", request("localhost:8100", None, None))
    assert (status, headers["www-authenticate"]) == (401, "Bearer")
    status, headers, _ = ask(app, "POST", "/api/runs", request("localhost:8100", None, f"Bearer {TOKEN}"))
    assert (status, headers["allow"]) == (405, "GET")


@pytest.mark.parametrize(
    ("site", "path", "status"),
    [
        ("same-origin", "/api/runs", 200),
        ("none", "/api/runs", 200),
        ("cross-site", "/api/runs", 403),
        ("same-site", "/api/runs", 403),
        ("cross-site", "/", 200),
    ],
)
def test_what_a_browser_says_of_who_asks_is_believed(app: Any, site: str, path: str, status: int) -> None:
    headers = [*request("localhost:8100", None, f"Bearer {TOKEN}"), ("sec-fetch-site", site)]
    assert ask(app, "GET", path, headers)[0] == status


def test_what_is_said_twice_is_not_believed_once(app: Any) -> None:
    good = request("localhost:8100", None, f"Bearer {TOKEN}")
    assert ask(app, "GET", "/api/runs", [*good, ("host", "localhost:8100")])[0] == 400
    assert ask(app, "GET", "/api/runs", [*good, ("authorization", f"Bearer {TOKEN}")])[0] == 401
    assert ask(app, "GET", "/api/runs", [*good, ("origin", "http://localhost:8100"), ("origin", "null")])[0] == 403


def test_a_mistake_of_ours_is_answered_with_the_same_headers(app: Any) -> None:
    class Broken(Messages):
        def all_runs(self) -> Any:
            raise ZeroDivisionError("inside")

    broken = make_app(Broken(), token=TOKEN, hosts=hosts_for("127.0.0.1"))
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def go() -> None:
        headers = [(b"host", b"localhost"), (b"authorization", f"Bearer {TOKEN}".encode())]
        scope = {"type": "http", "method": "GET", "path": "/api/runs", "headers": headers, "query_string": b"",
                 "root_path": ""}  # fmt: skip
        with pytest.raises(ZeroDivisionError):  # for the log
            await broken(scope, None, send)

    asyncio.run(go())
    names = {name for name, _ in sent[0]["headers"]}
    assert (sent[0]["status"], b"content-security-policy" in names) == (500, True)
    assert b"inside" not in sent[1]["body"]


# --- what a library would not send: over a real socket, byte by byte ---

HELD = "%TOKEN%"  # replaced by a valid header, so that only the trick itself can refuse the request
FOREIGN = (
    "evil.example",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "127.0.0.1@evil.example",
    "evil.example:8100",
    "[::1].evil.example",
    "127.0.0.1:80:80",
    "localhost:x",
    "localhost.",
    " localhost evil",
    "127.1",
    "0x7f.1",
    "2130706433",
    "[::ffff:127.0.0.1]",
    "0.0.0.0",
    "localhost%00",
    "localhost,evil.example",
    "local\thost",
)
ORIGIN = (
    "null",
    "http://evil.example",
    "https://localhost",
    "http://localhost:1",
    "http://localhost.evil.example",
    "file://",
    "http://localhost@evil.example",
    "chrome-extension://abc",
    "http://localhost, http://evil.example",
    "HTTP://EVIL",
)
WRONG_TOKENS = (
    "Bearer",
    "Bearer ",
    f"Basic {TOKEN}",
    TOKEN,
    f"Bearer {TOKEN}x",
    f"Bearer x{TOKEN}",
    f"Bearer {TOKEN[:-1]}",
    f"Bearer {TOKEN.upper()}",
    f"Bearer\t{TOKEN}",
    f"Bearer {TOKEN} {TOKEN}",
    f"Token {TOKEN}",
    f"Bearer {TOKEN}%00",
    "Bearer undefined",
    "Bearer null",
    "Bearer *",
    "Bearer ' OR 1=1",
    f"Bearer: {TOKEN}",
    f"Digest {TOKEN}",
)
VERBS = (
    "HEAD",
    "POST",
    "PUT",
    "PATCH",
    "DELETE",
    "OPTIONS",
    "TRACE",
    "CONNECT",
    "PROPFIND",
    "MOVE",
    "get",
    "GETT",
    "PURGE",
    "M-SEARCH",
)
SECRETS = ("etc/passwd", "ledger.sqlite", f"runs/{HERE}/run.json", "proc/self/environ", ".ssh/id_rsa")
UP = (
    "../",
    "..%2f",
    "%2e%2e/",
    "%2e%2e%2f",
    "..%252f",
    "..\\",
    "..%5c",
    "....//",
    "%c0%ae%c0%ae/",
    ".%00./",
    "..;/",
    "/./../",
)
UNDER = ("/", "/api/runs/", f"/api/runs/{HERE}/", "/page.js/")


def raw(line: str, *headers: str, body: bytes = b"") -> bytes:
    return "\r\n".join([line, *headers, "", ""]).encode("latin-1") + body


def hostile() -> dict[str, bytes]:
    """More than 300 requests, none of which may be answered with what only the owner may read."""
    ok = ("Host: localhost", HELD)
    found: dict[str, bytes] = {}
    for path in ("/api/runs", "/api/runs/live", f"/api/runs/{HERE}", f"/api/compare/live?run={HERE}"):
        get = f"GET {path} HTTP/1.1"
        found |= {f"{path} host {each!r}": raw(get, f"Host: {each}", HELD) for each in FOREIGN}
        found |= {f"{path} origin {each!r}": raw(get, *ok, f"Origin: {each}") for each in ORIGIN}
        found |= {
            f"{path} site {each}": raw(get, *ok, f"Sec-Fetch-Site: {each}") for each in ("cross-site", "same-site", "x")
        }
        found |= {
            f"{path} token {each!r}": raw(get, "Host: localhost", f"Authorization: {each}") for each in WRONG_TOKENS
        }
        found |= {f"{path} {verb}": raw(f"{verb} {path} HTTP/1.1", *ok, "Content-Length: 0") for verb in VERBS}
        found |= {
            f"{path} no host": raw(get, HELD),
            f"{path} no token": raw(get, "Host: localhost"),
            f"{path} two hosts": raw(get, "Host: localhost", *ok),
            f"{path} two tokens": raw(get, *ok, HELD),
            f"{path} token in the query": raw(f"GET {path}?token={TOKEN} HTTP/1.1", "Host: localhost"),
            f"{path} token in a cookie": raw(
                get, "Host: localhost", f"Cookie: token={TOKEN}; authorization=Bearer {TOKEN}"
            ),
            f"{path} token of a proxy": raw(get, "Host: localhost", f"Proxy-Authorization: Bearer {TOKEN}"),
            f"{path} forwarded host": raw(
                get, "Host: evil.example", HELD, "X-Forwarded-Host: localhost", "Forwarded: host=localhost"
            ),
            f"{path} other method": raw(
                f"POST {path} HTTP/1.1", *ok, "X-HTTP-Method-Override: GET", "Content-Length: 0"
            ),
            f"{path} websocket": raw(
                get,
                "Host: localhost",
                "Connection: Upgrade",
                "Upgrade: websocket",
                "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
                "Sec-WebSocket-Version: 13",
            ),
            f"{path} websocket with token": raw(
                get, *ok, "Connection: Upgrade", "Upgrade: websocket", "Origin: http://evil.example"
            ),
            f"{path} http2": raw(
                get, "Host: localhost", "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAAA"
            ),
            f"{path} absolute": raw(f"GET http://evil.example{path} HTTP/1.1", "Host: evil.example", HELD),
            f"{path} huge header": raw(get, "Host: localhost", "X: " + "a" * 200_000),
            f"{path} many headers": raw(get, "Host: localhost", *(f"X{n}: {n}" for n in range(5000))),
            f"{path} huge path": raw(f"GET {path}{'/a' * 60_000} HTTP/1.1", *ok),
            f"{path} folded header": raw(get, "Host: localhost", "X: y", f" Authorization: Bearer {TOKEN}"),
            f"{path} space before the colon": raw(get, "Host: localhost", f"Authorization : Bearer {TOKEN}"),
            f"{path} bare line feed": raw(get, f"Host: evil.example\nHost: localhost\nAuthorization: Bearer {TOKEN}"),
            f"{path} http 0.9": f"GET {path}\r\n".encode(),
            f"{path} http 3.0": raw(f"GET {path} HTTP/3.0", "Host: localhost"),
            # A second request is hidden in the body of the first, without a token of its own.
            f"{path} cl.te": raw(
                "POST / HTTP/1.1",
                "Host: localhost",
                "Content-Length: 4",
                "Transfer-Encoding: chunked",
                body=b"0\r\n\r\n" + raw(get, "Host: localhost"),
            ),
            f"{path} two lengths": raw(
                "POST / HTTP/1.1",
                "Host: localhost",
                "Content-Length: 0",
                "Content-Length: 60",
                body=raw(get, "Host: localhost"),
            ),
            f"{path} odd encoding": raw(
                "POST / HTTP/1.1", "Host: localhost", "Transfer-Encoding: xchunked", body=raw(get, "Host: localhost")
            ),
            f"{path} pipelined": raw("GET /health HTTP/1.1", *ok) + raw(get, "Host: localhost"),
        }
    for base, up, wanted in itertools.product(UNDER, UP, SECRETS):
        found[f"{base}{up}{wanted}"] = raw(f"GET {base}{up * 4}{wanted} HTTP/1.1", *ok)
    return found


def test_of_300_hostile_requests_none_is_answered_with_data() -> None:
    source = Messages()
    source.all.put("money", SECRET)
    source.one.put("head", SECRET)
    requests = hostile()
    assert len(requests) >= 300
    given = f"Authorization: Bearer {TOKEN}".encode()
    served_data = []
    with served(source, source.end) as client:
        where = (client.base_url.host, client.base_url.port)
        for name, text in requests.items():
            with socket.create_connection(where, timeout=30) as line, contextlib.suppress(ConnectionError):
                line.sendall(text.replace(HELD.encode(), given))
                line.shutdown(socket.SHUT_WR)
                answer = b"".join(iter(lambda line=line: line.recv(1 << 16), b""))  # type: ignore[misc]
                if SECRET.encode() in answer or b"root:" in answer or b"switching protocols" in answer.lower():
                    served_data.append(name)
        assert SECRET in client.get("/api/runs").text, "the server still answers its owner"
    assert served_data == []


RAW = [
    (b"GET /api/runs HTTP/1.0\r\n\r\n", b"400"),
    (b"GET /api/runs HTTP/1.1\r\nHost: a\r\nHost: localhost\r\n\r\n", b"400"),
    (b"GET http://evil.example/api/runs HTTP/1.1\r\nHost: evil.example\r\n\r\n", b"400"),
    (b"GET http://localhost/api/runs HTTP/1.1\r\nHost: localhost\r\n\r\n", b"401"),
    (b"GET /../../../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n%s\r\n", b"404"),
    (b"GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\nHost: localhost\r\n%s\r\n", b"404"),
    (b"GET /api/runs/..%2f..%2fledger.sqlite HTTP/1.1\r\nHost: localhost\r\n%s\r\n", b"404"),
    (b"GET /%61pi/runs HTTP/1.1\r\nHost: localhost\r\n\r\n", b"401"),
    (b"GET /api/runs%00 HTTP/1.1\r\nHost: localhost\r\n%s\r\n", b"404"),
    (b"GET /api/runs?token=" + TOKEN.encode() + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", b"401"),
    (b"CONNECT localhost:22 HTTP/1.1\r\nHost: localhost\r\n\r\n", b"405"),
    (b"GET /api/runs HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", b"401"),
]


def test_over_a_real_socket_the_tricks_of_the_wire_lead_nowhere() -> None:
    source = Messages()
    source.all.put("money", SECRET)
    given = f"Authorization: Bearer {TOKEN}\r\n".encode()
    answers = []
    with served(source, source.end) as client:
        where = (client.base_url.host, client.base_url.port)
        for text, _ in RAW:
            with socket.create_connection(where, timeout=30) as line:
                line.sendall(text.replace(b"%s", given))
                line.shutdown(socket.SHUT_WR)
                answers.append(b"".join(iter(lambda line=line: line.recv(1 << 16), b"")))  # type: ignore[misc]
    assert [answer.split(b" ")[1] for answer in answers] == [status for _, status in RAW]
    assert not any(SECRET.encode() in answer for answer in answers)
