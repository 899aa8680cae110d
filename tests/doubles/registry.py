"""A container registry on loopback, as far as `docker push` goes; it can require a login that always fails.

    HEAD blob, POST upload, PATCH bytes, PUT digest -> each layer once        PUT manifest -> the tag, by its digest

Docker takes a registry on loopback without TLS, so a real engine pushes to it.
"""

from __future__ import annotations

import hashlib
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit


class Registry(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, *, wants_login: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.wants_login = wants_login
        self.blobs: dict[str, bytes] = {}
        self.uploads: dict[str, bytes] = {}
        self.manifests: dict[str, bytes] = {}  # NAME:TAG

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Registry

    def handle_any(self) -> None:
        body, parts = self._body(), urlsplit(self.path)
        words = parts.path.strip("/").split("/")
        if self.server.wants_login:
            self._answer(401, {"WWW-Authenticate": 'Basic realm="registry"'})
        elif words == ["v2"]:
            self._answer(200)
        elif "uploads" in words:
            self._upload(words, parse_qs(parts.query), body)
        elif "blobs" in words:
            self._answer(200 if words[-1] in self.server.blobs else 404)
        else:
            self._manifest(words, body)

    do_HEAD = do_GET = do_POST = do_PATCH = do_PUT = handle_any

    def log_message(self, *_: object) -> None:
        pass

    def _upload(self, words: list[str], query: dict[str, list[str]], body: bytes) -> None:
        uploads, number = self.server.uploads, words[-1]
        if self.command == "POST":
            number = uuid.uuid4().hex
            words = [*words, number]
        uploads[number] = uploads.get(number, b"") + body
        if self.command == "PUT":
            data, digest = uploads.pop(number), query["digest"][0]
            assert digest == "sha256:" + hashlib.sha256(data).hexdigest()
            self.server.blobs[digest] = data
            self._answer(201, {"Docker-Content-Digest": digest, "Location": f"/v2/{digest}"})
            return
        last = max(0, len(uploads[number]) - 1)
        self._answer(202, {"Location": "/" + "/".join(words), "Range": f"0-{last}", "Docker-Upload-UUID": number})

    def _manifest(self, words: list[str], body: bytes) -> None:
        name = f"{'/'.join(words[1:-2])}:{words[-1]}"
        if self.command == "PUT":
            self.server.manifests[name] = body
        found = self.server.manifests.get(name)
        digest = "sha256:" + hashlib.sha256(found or b"").hexdigest()
        code = 404 if found is None else 201 if self.command == "PUT" else 200
        self._answer(code, {"Docker-Content-Digest": digest})

    def _answer(self, code: int, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in {"Docker-Distribution-Api-Version": "registry/2.0", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)


@contextmanager
def registry(*, wants_login: bool = False) -> Iterator[Registry]:
    made = Registry(wants_login=wants_login)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield made
    finally:
        made.shutdown()
        thread.join()
        made.server_close()
