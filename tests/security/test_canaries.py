"""Twenty secrets in the environment of a whole launch: each is a canary, and none may be found where it could leak.

They are looked for in every argument list and in the environment of every process that has no need of them while the
run lives, and afterwards in every file of home and store, in the dry run, and in all that was said.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cloud.rig import clear, make_draft, make_run, trainer_argv
from tests.doubles.s3_servers import ACCESS_KEY, SECRET_KEY, Server

from homing.cloud.destroy import destroy_run
from homing.cloud.home import Home
from homing.cloud.launch.launch import Draft, draft, dry_run, launch
from homing.cloud.providers.base import wait_until
from homing.cloud.reconcile.reconcile import refresh
from homing.wire import file_names
from homing.world import World

NAMES = [
    *("RUNPOD_API_KEY", "SHADEFORM_API_KEY", "MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET", "WANDB_API_KEY", "HF_TOKEN"),
    *("HUGGING_FACE_HUB_TOKEN", "OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GITHUB_TOKEN", "MLFLOW_TRACKING_PASSWORD"),
    *("AWS_SESSION_TOKEN_OF_OTHERS", "DOCKER_PASSWORD", "SSH_PASSPHRASE", "DATABASE_URL", "GOOGLE_API_KEY"),
    *("AZURE_CLIENT_SECRET", "NETRC_PASSWORD", "HUGGINGFACEHUB_API_TOKEN"),
]
CANARIES = {name: f"canary-{number:02d}-{name.lower()[::-1]}-x7Q" for number, name in enumerate(NAMES)}
# The twentieth is needed there: by sync, which talks to the bucket, and by the agent, which starts it.
CANARIES["AWS_SECRET_ACCESS_KEY"] = SECRET_KEY


@pytest.fixture
def home(homing_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    for name, value in CANARIES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    for name in ("RUNPOD_API_URL", "HOMING_SHADEFORM_URL", "AWS_ENDPOINT_URL_EC2", "MODAL_SERVER_URL"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # no server listens: these clouds cannot be asked
    found = Home(homing_home, World())
    yield found
    clear(homing_home)


def draft_in(store: str, home: Home, tmp_path: Path) -> Draft:
    like = make_draft(home, tmp_path)
    ready = draft(dataclasses.replace(like.order, run=dataclasses.replace(make_run(tmp_path), store=store)), home)
    argv = trainer_argv(tmp_path, home.provider("local").place(ready.mark).work_dir, steps=40, step_s=0.1)
    return dataclasses.replace(ready, order=dataclasses.replace(ready.order, trainer_argv=tuple(argv), heartbeat_s=0.2))


def processes(mark: str) -> dict[str, tuple[bytes, bytes]]:
    """Argument list and environment of all that runs under the mark, by what it is."""
    found = {}
    for process, _ in World().marked(file_names.MARK_ENV, mark):
        try:
            argv = Path(f"/proc/{process.pid}/cmdline").read_bytes()
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
        except OSError:
            continue  # it has just ended
        kind = "trainer" if b"trainer" in argv else "sync" if b"store.sync" in argv else "agent"
        found[f"{kind} {process.pid}"] = (argv, environment)
    return found


def found_in(text: bytes) -> list[str]:
    return [name for name, value in CANARIES.items() if value.encode() in text]


@pytest.mark.acceptance(66)
@pytest.mark.slow
def test_none_of_twenty_secrets_leaks(moto: Server, new_bucket, home: Home, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    ready = draft_in(f"s3://{new_bucket(moto)}/homing?endpoint={moto.endpoint}", home, tmp_path)
    assert len(CANARIES) == 20
    assert found_in(json.dumps(dry_run(ready, home).to_dict()).encode()) == []
    messages: list[str] = []
    launched = launch(ready, home, notify=messages.append)
    seen: dict[str, tuple[bytes, bytes]] = {}

    def all_ended() -> bool:
        alive = processes(ready.mark)
        seen.update(alive)
        return not alive

    def is_over() -> bool:
        refresh(home)
        row = home.ledger.run(launched.run.id)
        return row is not None and not row.is_live

    assert wait_until(all_ended, timeout_s=200, every_s=0.05, world=World())
    assert wait_until(is_over, timeout_s=200, every_s=0.2, world=World())
    kinds = {name.split()[0] for name in seen}
    assert kinds == {"agent", "sync", "trainer"}
    for name, (argv, environment) in seen.items():
        assert found_in(argv) == [], name
        needed = [] if name.startswith("trainer") else ["AWS_SECRET_ACCESS_KEY"]
        assert [canary for canary in found_in(environment) if canary not in needed] == [], name
    row = home.ledger.run(launched.run.id)
    assert row is not None
    assert row.state == "done", row.reason
    destroy_run(home, row)
    files = [path for path in home.path.rglob("*") if path.is_file()]
    assert re.search(r"ledger\.sqlite", " ".join(map(str, files)))
    assert {str(path): found for path in files if (found := found_in(path.read_bytes()))} == {}
    store = home.store_of(row)
    entries = store.list("")
    assert entries
    assert {entry.key: found for entry in entries if (found := found_in(store.read(entry.key)))} == {}
    assert found_in("\n".join(messages).encode()) == []
