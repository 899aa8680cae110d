"""`homing store ls|get|put|rm`: look into a store, bring things home, put things there, remove old checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from homing.cli import talk
from homing.cli.control import open_home
from homing.cli.options import Json, Yes
from homing.cli.verb_help import Verb
from homing.cloud.checkpoints import known_hash
from homing.cloud.home import Home
from homing.cloud.keep import not_there, plan_removal, remove
from homing.errors import UsageError
from homing.store import NotInStore, Store, open_store
from homing.units import format_bytes

__all__ = ["app"]

_REDRAW_S = 0.2
_LINE_S = 30.0

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True, help="Look into a store.")

Url = Annotated[
    str | None,
    typer.Option(
        "--store", metavar="URL", help="Such as s3://bucket/prefix or hf:OWNER/NAME; else the one under $HOMING_HOME."
    ),
]
Key = Annotated[str, typer.Argument(metavar="KEY", help="A key or a folder, as `homing store ls` shows it.")]


@app.command("ls", cls=Verb)
def ls(
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="Only keys that begin so.")] = "",
    store: Url = None,
    json_: Json = False,
) -> None:
    """Every key with its size."""
    with open_home() as home:
        entries = _open(home, store).list(prefix)
        document = {"files": [{"key": entry.key, "num_bytes": entry.num_bytes} for entry in entries]}
        talk.emit("store/1", document)
        talk.table(["key", "size"], [(entry.key, format_bytes(entry.num_bytes)) for entry in entries])
        talk.say(f"{len(entries)} files, {format_bytes(sum(entry.num_bytes for entry in entries))}.")


@app.command("get", cls=Verb)
def get(
    key: Key,
    to: Annotated[Path | None, typer.Argument(metavar="PATH", help="Its own name here, if left out.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that exists.")] = False,
    store: Url = None,
    json_: Json = False,
) -> None:
    """Bring one file home, whole or not at all."""
    target = to or Path(key.rsplit("/", 1)[-1])
    target = target / key.rsplit("/", 1)[-1] if target.is_dir() else target
    if target.exists() and not force:
        raise UsageError(f"{target} exists.", "Nothing is written over unasked.", "Add --force, or name another path.")
    with open_home() as home:
        opened = _open(home, store)
        target.parent.mkdir(parents=True, exist_ok=True)
        sha256 = known_hash(opened, key)
        try:
            with _progress(home, opened, key):
                opened.get(key, str(target), sha256)
        except NotInStore as exc:
            known = not_there(opened, key)
            raise NotInStore(known.what, known.why, known.fix) from exc
        document = {"key": key, "path": str(target), "num_bytes": target.stat().st_size, "is_checked": bool(sha256)}
        talk.emit("store-get/1", document)
        checked = "checked by its hash" if sha256 else "whole by its length; nothing in the store tells its hash"
        talk.say(f"{target}: {format_bytes(target.stat().st_size)}, {checked}.")


@app.command("put", cls=Verb)
def put(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A file here.")],
    key: Annotated[str, typer.Argument(metavar="KEY", help="Such as files/notes.txt.")],
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
    store: Url = None,
    json_: Json = False,
) -> None:
    """Put one file there, verified by reading it back."""
    if not path.is_file():
        raise UsageError(f"{path} is not a file.", "Folders are put file by file.", "Name a file.")
    with open_home() as home:
        opened = _open(home, store)
        if opened.exists(key) and not force:
            raise UsageError(f"{key} is there already.", "Nothing is replaced unasked.", "Add --force.")
        with _progress(home, opened, key):
            entry = opened.put(key, str(path))
        if opened.sha256(key) != entry.sha256:
            raise UsageError(f"{key} does not read back as it was written.", opened.url, "Try again; check the disk.")
        talk.emit("store-put/1", {"key": key, "num_bytes": entry.num_bytes, "sha256": entry.sha256})
        talk.say(f"{key}: {format_bytes(entry.num_bytes)}, read back and equal.")


@app.command("rm", cls=Verb)
def rm(key: Key, yes: Yes = False, store: Url = None, json_: Json = False) -> None:
    """Remove a key or a folder. The best and the last checkpoint of a run stay; so does all of a live run."""
    with open_home() as home:
        opened = _open(home, store)
        removal = plan_removal(opened, key, home)
        what = f"{len(removal.keys)} files, {format_bytes(removal.num_bytes)}"
        question = f"Remove {what}, from {opened.url}? {removal.warning}".rstrip()
        if not talk.ask(question, yes=yes):
            talk.say("Nothing was removed.")
            return
        remove(opened, removal)
        talk.emit("store-rm/1", {"keys": removal.keys, "num_bytes": removal.num_bytes})
        talk.say(f"Removed {key}: {format_bytes(removal.num_bytes)}, seen absent.")


@contextmanager
def _progress(home: Home, store: Store, key: str) -> Iterator[None]:
    """A running line on a terminal, elsewhere one every half minute; a file that moves at once says nothing."""
    is_terminal, world = sys.stderr.isatty(), home.world
    begun, told, is_open = world.monotonic(), world.monotonic(), False

    def tell(done: int, total: int) -> None:
        nonlocal told, is_open
        now = world.monotonic()
        if now - told < (_REDRAW_S if is_terminal else _LINE_S):
            return
        told, is_open = now, is_terminal
        speed = f"{format_bytes(int(done / max(now - begun, 1e-9)))}/s"
        text = f"{key}: {format_bytes(done)} of {format_bytes(total)}, {done / max(total, 1):.0%}, {speed}"
        (talk.redraw if is_terminal else talk.say)(text)

    store.progress = tell
    try:
        yield
    finally:
        if is_open:
            talk.say()


def _open(home: Home, url: str | None) -> Store:
    return open_store(url or f"file:{home.path / 'store'}", home.world, create=False)
