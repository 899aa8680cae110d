"""PyTorch's package index on a loopback port: one folder for each CUDA version, each with wheels of its own tag.

    with PackageIndex({"cu129": ["2.13.0"], "cpu": ["2.13.0"]}) as index:    index.url, index.asked

As at the real one, the same version is in several folders, built for the CUDA that its local version names
(torch-2.13.0+cu129), a folder has only the versions that were built for it, and the folder `cpu` has torches that see
no GPU. The wheels are real and small: `torch.__version__` is all that is in them.
"""

from __future__ import annotations

import base64
import hashlib
import http.server
import io
import threading
import zipfile
from types import TracebackType
from urllib.parse import quote, unquote

__all__ = ["PYTORCH_2026_11", "PackageIndex", "make_wheel"]

# What download.pytorch.org/whl has of our range, by folder.
PYTORCH_2026_11 = {
    "cpu": ["2.11.0", "2.12.0", "2.12.1", "2.13.0"],
    "cu118": ["2.6.0", "2.7.1"],
    "cu126": ["2.11.0", "2.12.0", "2.12.1", "2.13.0"],
    "cu128": ["2.10.0", "2.11.0"],
    "cu129": ["2.11.0", "2.12.0", "2.12.1", "2.13.0"],
    "cu130": ["2.11.0", "2.12.0", "2.12.1", "2.13.0"],
    "cu132": ["2.12.0", "2.12.1", "2.13.0"],
}


def make_wheel(name: str, version: str) -> bytes:
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": f"__version__ = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: double\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(text)}")
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""])
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return buffer.getvalue()


class PackageIndex:
    def __init__(self, builds: dict[str, list[str]]) -> None:
        self.builds = builds
        self.asked: list[str] = []  # paths, in their order
        index = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                index.asked.append(unquote(self.path))
                kind, body = index._answer(unquote(self.path))
                self.send_response(200 if body else 404)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None: ...

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}/whl"

    def __enter__(self) -> PackageIndex:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def _answer(self, path: str) -> tuple[str, bytes]:
        parts = [part for part in path.split("/") if part]
        if len(parts) == 3 and parts[2] == "torch" and parts[1] in self.builds:
            names = [f"torch-{version}+{parts[1]}-py3-none-any.whl" for version in self.builds[parts[1]]]
            links = "".join(f'<a href="/whl/{parts[1]}/{quote(name)}">{name}</a><br/>\n' for name in names)
            return "text/html", f"<!DOCTYPE html><html><body>{links}</body></html>".encode()
        if len(parts) == 3 and parts[2].endswith(".whl"):
            name, version = parts[2].split("-")[:2]
            public, _, tag = version.partition("+")
            if public in self.builds.get(tag, []) and tag == parts[1]:
                return "application/zip", make_wheel(name, version)
        return "text/plain", b""
