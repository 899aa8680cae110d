"""A Hugging Face Hub of one process: repositories, commits, LFS and tokens, as the real client asks for them.

It keeps the Hub's promises that a store leans on: a commit that names an old parent is refused (412), a missing or
private repository is one answer, a read-only token may not commit, file bytes lie behind a redirect to another place
that must not see the token, and the client learns which files would not change, and skips the commit.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from uuid import uuid4

LFS_FROM = 100_000
LICENCES = {"apache-2.0", "mit", "cc-by-4.0", "llama3.1", "other"}  # a few of those that the Hub lists
PAGE = 3

WRITE, READ, STRANGER = "hf_writewritewrite", "hf_readreadread", "hf_strangerstranger"
TOKENS = {WRITE: ("me", "write"), READ: ("me", "read"), STRANGER: ("stranger", "write")}


@dataclass
class File:
    data: bytes
    is_lfs: bool

    @property
    def oid(self) -> str:
        if self.is_lfs:
            return hashlib.sha256(self.data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(self.data) + self.data).hexdigest()


@dataclass
class Commit:
    oid: str
    title: str
    files: dict[str, File]


@dataclass
class Repo:
    is_private: bool = True
    is_gated: bool = False
    commits: list[Commit] = field(default_factory=lambda: [Commit(uuid4().hex + "0" * 8, "initial commit", {})])

    @property
    def head(self) -> Commit:
        return self.commits[-1]

    def at(self, revision: str) -> Commit | None:
        return self.head if revision == "main" else next((c for c in self.commits if c.oid == revision), None)


class Refusal(Exception):
    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        self.status, self.code, self.message = status, code, message


class Hub:
    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], Repo] = {}
        self.blobs: dict[str, bytes] = {}
        self.failures: list[tuple[str, int]] = []  # part of a path, status: said once instead of doing it
        self.lose_answers: list[str] = []  # part of a path: done, and then the line is cut
        self.cuts: list[tuple[str, int]] = []  # part of a path, bytes of the body: after them the line is cut, once
        self.spoiled: list[str] = []  # part of a path: its body has one wrong byte
        self.seen: list[tuple[str, str, str, str]] = []  # method, path, token, range
        self.before_commit: Callable[[], None] | None = None
        self.leaks: list[str] = []  # places that saw a token and should not have
        self.lock = threading.RLock()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                pass

            def answer(self) -> None:
                hub.answer(self)

            do_GET = do_HEAD = do_POST = do_PUT = answer

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}"

    def add(self, repo_id: str, kind: str = "model", **what: Any) -> Repo:
        return self.repos.setdefault((kind, repo_id), Repo(**what))

    # --- one request ---

    def answer(self, ask: BaseHTTPRequestHandler) -> None:
        body = ask.rfile.read(int(ask.headers.get("Content-Length") or 0))
        where = urlsplit(ask.path)
        path, query = unquote(where.path), parse_qs(where.query)
        self.seen.append((ask.command, path, ask.headers.get("Authorization") or "", ask.headers.get("Range") or ""))
        try:
            with self.lock:
                for number, (part, status) in enumerate(self.failures):
                    if part in path:
                        del self.failures[number]
                        raise Refusal(status)
            status, headers, reply = self.route(ask, path, query, body)
        except Refusal as no:
            reply = json.dumps({"error": no.message or no.code or str(no.status)}).encode()
            status, headers = no.status, {"X-Error-Code": no.code, "X-Error-Message": no.message}
        with self.lock:
            lost = next((part for part in self.lose_answers if part in path and ask.command == "POST"), None)
            if lost is not None:
                self.lose_answers.remove(lost)
        if lost is not None:
            ask.close_connection = True
            return
        if status in (200, 206) and reply and any(part in path for part in self.spoiled):
            reply = bytes([reply[0] ^ 1]) + reply[1:]
        ask.send_response(status)
        for name, value in headers.items():
            if value:
                ask.send_header(name, value)
        ask.send_header("Content-Length", str(len(reply)))
        ask.end_headers()
        with self.lock:
            cut = next((cut for cut in self.cuts if cut[0] in path and ask.command == "GET" and reply), None)
            if cut is not None:
                self.cuts.remove(cut)
        if cut is not None:
            ask.close_connection, reply = True, reply[: cut[1]]
        if ask.command != "HEAD":
            ask.wfile.write(reply)

    def route(
        self, ask: BaseHTTPRequestHandler, path: str, query: dict[str, list[str]], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        token = (ask.headers.get("Authorization") or "").removeprefix("Bearer ").strip()
        if path.startswith(("/lfs/", "/cdn/")):
            return self.blob(ask, path, token, body)
        user, role = self.who(token)
        if path == "/api/repos/create":
            return self.create(json.loads(body), user, role)
        if path == "/api/whoami-v2":
            if not user:
                raise Refusal(401, "", "Invalid credentials in Authorization header")
            return _json({"name": user, "auth": {"accessToken": {"role": role}}})
        if path == "/api/validate-yaml":
            faults = _card_faults(json.loads(body)["content"])
            return 400 if faults["errors"] else 200, {"Content-Type": "application/json"}, json.dumps(faults).encode()
        kind, repo_id, rest = _place(path)
        repo = self.visible(kind, repo_id, user)
        needs_write = rest.startswith(("commit/", "preupload/")) or rest == "lfs"
        if needs_write and (role != "write" or repo_id.split("/")[0] != user):
            raise Refusal(403, "", "You don't have the rights to write here")
        with self.lock:
            return self.inside(ask, repo, repo_id, rest, query, body)

    def who(self, token: str) -> tuple[str, str]:
        if token and token not in TOKENS:
            raise Refusal(401, "", "Invalid credentials in Authorization header")
        return TOKENS.get(token, ("", ""))

    def visible(self, kind: str, repo_id: str, user: str) -> Repo:
        repo = self.repos.get((kind, repo_id))
        if repo is None or (repo.is_private and repo_id.split("/")[0] != user):
            raise Refusal(404 if user else 401, "RepoNotFound", "Repository not found")
        if repo.is_gated and repo_id.split("/")[0] != user:
            raise Refusal(403, "GatedRepo", "Access is restricted")
        return repo

    def create(self, request: dict[str, Any], user: str, role: str) -> tuple[int, dict[str, str], bytes]:
        owner = request.get("organization") or user
        if role != "write" or owner != user:
            raise Refusal(403, "", "You don't have the rights to create a repository there")
        key = (request.get("type") or "model", f"{owner}/{request['name']}")
        with self.lock:
            if key in self.repos:
                return 409, {}, json.dumps({"error": "exists", "url": f"{self.endpoint}/{key[1]}"}).encode()
            is_private = request.get("visibility") == "private" or bool(request.get("private"))
            self.repos[key] = Repo(is_private=is_private)
        return _json({"url": f"{self.endpoint}/{key[1]}", "name": key[1]})

    # --- inside a repository ---

    def inside(
        self, ask: BaseHTTPRequestHandler, repo: Repo, repo_id: str, rest: str, query: dict[str, list[str]], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        verb, _, after = rest.partition("/")
        if rest == "" or verb == "revision":
            named = repo.at(after or "main")
            if named is None:
                raise Refusal(404, "RevisionNotFound", "no such revision")
            messages = {"id": repo_id, "sha": named.oid, "private": repo.is_private, "siblings": []}
            return _json({**messages, "gated": "manual" if repo.is_gated else False})
        if verb == "lfs":
            return self.lfs_batch(json.loads(body))
        revision, _, name = after.partition("/")
        commit = repo.at(revision)
        if commit is None:
            raise Refusal(404, "RevisionNotFound", "no such revision")
        if verb == "tree":
            return self.tree(commit, ask.path, name, query)
        if verb == "commits":
            known = repo.commits[: repo.commits.index(commit) + 1]
            return _json([{"id": c.oid, "title": c.title, "message": "", "authors": []} for c in reversed(known)])
        if verb == "preupload":
            return self.preupload(commit, json.loads(body))
        if verb == "commit":
            return self.commit(repo, repo_id, body)
        if verb == "resolve":
            return self.resolve(ask, commit, name)
        raise Refusal(404, "", f"no such route: {rest}")

    def tree(
        self, commit: Commit, path: str, folder: str, query: dict[str, list[str]]
    ) -> tuple[int, dict[str, str], bytes]:
        inside = f"{folder}/" if folder else ""
        names = sorted(name for name in commit.files if name.startswith(inside))
        if folder and not names:
            raise Refusal(404, "EntryNotFound", "no such folder")
        begin = int(query.get("cursor", ["0"])[0])
        items = []
        for name in names[begin : begin + PAGE]:
            file = commit.files[name]
            lfs = {"lfs": {"oid": file.oid, "size": len(file.data), "pointerSize": 130}} if file.is_lfs else {}
            items.append({"type": "file", "oid": file.oid, "size": len(file.data), "path": name, **lfs})
        headers = {}
        if begin + PAGE < len(names):
            base = path.split("?")[0]
            headers["Link"] = f'<{self.endpoint}{base}?recursive=true&cursor={begin + PAGE}>; rel="next"'
        status, more, reply = _json(items)
        return status, {**more, **headers}, reply

    def preupload(self, commit: Commit, request: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        answers = []
        for file in request["files"]:
            there = commit.files.get(file["path"])
            mode = "lfs" if file["size"] > LFS_FROM else "regular"
            oid = there.oid if there else None
            answers.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return _json({"files": answers})

    def commit(self, repo: Repo, repo_id: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        if self.before_commit is not None:
            act, self.before_commit = self.before_commit, None
            act()
        files, title = dict(repo.head.files), ""
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                title = value["summary"]
                if value.get("parentCommit") and value["parentCommit"] != repo.head.oid:
                    raise Refusal(412, "", "A commit has happened since. Please refresh and try again.")
            elif line["key"] == "file":
                files[value["path"]] = File(base64.b64decode(value["content"]), is_lfs=False)
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.blobs:
                    raise Refusal(400, "", "LFS object is not there")
                files[value["path"]] = File(self.blobs[value["oid"]], is_lfs=True)
            elif line["key"] == "deletedFile" and files.pop(value["path"], None) is None:
                raise Refusal(404, "EntryNotFound", "A file with this name doesn't exist")
        repo.commits.append(Commit(uuid4().hex + "0" * 8, title, files))
        return _json({"commitUrl": f"{self.endpoint}/{repo_id}/commit/{repo.head.oid}", "commitOid": repo.head.oid})

    def resolve(self, ask: BaseHTTPRequestHandler, commit: Commit, name: str) -> tuple[int, dict[str, str], bytes]:
        file = commit.files.get(name)
        if file is None:
            raise Refusal(404, "EntryNotFound", "Entry not found")
        headers = {"X-Repo-Commit": commit.oid, "ETag": f'"{file.oid}"'}
        if file.is_lfs:
            self.blobs[file.oid] = file.data
            linked = {"X-Linked-Size": str(len(file.data)), "X-Linked-Etag": f'"{file.oid}"'}
            return 302, {**headers, **linked, "Location": f"{self.elsewhere}/cdn/{file.oid}"}, b""
        return _ranged(ask, file.data, headers)

    @property
    def elsewhere(self) -> str:
        """The same server under another name: to a client it is another host."""
        return self.endpoint.replace("127.0.0.1", "localhost")

    # --- large files ---

    def lfs_batch(self, request: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        objects = []
        for item in request["objects"]:
            upload = {"actions": {"upload": {"href": f"{self.endpoint}/lfs/{item['oid']}"}}}
            objects.append({**item, **({} if item["oid"] in self.blobs else upload)})
        return _json({"transfer": "basic", "objects": objects})

    def blob(
        self, ask: BaseHTTPRequestHandler, path: str, token: str, body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        oid = path.rsplit("/", 1)[1]
        if token:
            self.leaks.append(path)
        if ask.command == "HEAD":
            raise Refusal(403, "", "this address is signed for GET")
        if ask.command == "PUT":
            if hashlib.sha256(body).hexdigest() != oid:
                raise Refusal(400, "", "other bytes than were announced")
            self.blobs[oid] = body
            return 200, {}, b""
        return _ranged(ask, self.blobs[oid], {})


@contextlib.contextmanager
def running() -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.server.shutdown()
        hub.server.server_close()
        thread.join(5)


def _place(path: str) -> tuple[str, str, str]:
    """Kind, owner/name and what follows, of `/api/models/o/n/...`, `/o/n/resolve/...` or `/o/n.git/info/lfs/...`."""
    parts = path.strip("/").split("/")
    parts = parts[1:] if parts[0] == "api" else parts
    kind = "dataset" if parts[0] == "datasets" else "model"
    parts = parts[1:] if parts[0] in ("datasets", "models") else parts
    if len(parts) < 2:
        raise Refusal(404, "", path)
    name, rest = parts[1], "/".join(parts[2:])
    if name.endswith(".git"):
        name, rest = name.removesuffix(".git"), "lfs"
    return kind, f"{parts[0]}/{name}", rest


def _card_faults(card: str) -> dict[str, Any]:
    """The Hub reads the front matter of a README before it takes it; a licence must be one that it lists."""
    front = card.split("---")[1].splitlines() if card.startswith("---") else []
    licences = [line.partition(":")[2].strip(' "') for line in front if line.startswith("license:")]
    faults = [f'"license" must be one of [apache-2.0, mit, ...], not {one}' for one in licences if one not in LICENCES]
    return {"errors": [{"message": fault} for fault in faults], "warnings": []}


def _json(value: Any) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


def _ranged(ask: BaseHTTPRequestHandler, data: bytes, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
    wanted = ask.headers.get("Range")
    if not wanted:
        return 200, headers, data
    begin, _, end = wanted.removeprefix("bytes=").partition("-")
    first, last = int(begin), min(int(end or len(data)), len(data) - 1)
    if first > last:
        return 416, {**headers, "Content-Range": f"bytes */{len(data)}"}, b""
    return 206, {**headers, "Content-Range": f"bytes {first}-{last}/{len(data)}"}, data[first : last + 1]
