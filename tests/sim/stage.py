"""The stage of a schedule: a home, a store, later instances, and the real code as actors on them.

stage.client(verb)     a process at home that runs one verb of the real client; stage.finish waits for it
stage.draft(...)       what `homing launch` would have made of a run file
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import logging
import sys
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any
from unittest import mock

from tests.doubles.cloud_state import Settings
from tests.doubles.faults import Faults
from tests.sim import aws, modal, runpod, shadeform
from tests.sim.cloud import API_KEY, CLOUD_HOST, SimCloud
from tests.sim.host import HOME, Host
from tests.sim.kernel import Broken, Sim, Task
from tests.sim.programs import Programs
from tests.sim.truth import StoreDisk, Truth
from tests.sim.world import STORE, Proc, SimWorld

from homing.cloud.home import Home
from homing.cloud.launch.launch import Draft, LaunchOrder, draft
from homing.cloud.providers.base import Needs
from homing.cloud.providers.fake.provider import KEY_ENV, URL_ENV
from homing.errors import HomingError, NoOffer
from homing.wire import codec
from homing.wire.run_json import Cloud, Data, Limits, Model, Optimizer, Phase, Run, Sampling, Schedule, Sizes, Train
from homing.wire.shard_manifest import DataManifest, Shard, SourceFile, Split

__all__ = ["CLOUDS", "HOME", "Stage", "pace"]

DATA = "/home/me/data"
_FAKE_ENV = {URL_ENV: f"https://{CLOUD_HOST}", KEY_ENV: API_KEY}
# name -> its cloud on the stage, and what leads to it from home
_CLOUDS: dict[str, tuple[type[SimCloud], dict[str, str]]] = {
    "fake": (SimCloud, _FAKE_ENV),
    "runpod": (runpod.SimRunpod, runpod.ENV),
    "shadeform": (shadeform.SimShadeform, shadeform.ENV),
    "aws": (aws.SimAws, aws.ENV),
    "modal": (modal.SimModal, modal.ENV),
}
CLOUDS = tuple(_CLOUDS)
_SETTINGS = {"aws": {"aws": aws.SETTINGS}}  # what the run file says to its provider
VERB_DEADLINE_S = 1800.0  # no verb may take longer, whatever goes wrong


class Stage(Sim):
    def __init__(self, seed: int, *, trace: Callable[[str], None] | None = None, provider: str = "fake") -> None:
        super().__init__(seed, trace=trace)
        self.provider = provider  # the cloud that `rent` opens
        self.programs = Programs()
        self.hosts: dict[str, Host] = {}
        self.cloud: SimCloud | None = None
        disk = StoreDisk()
        self.store = self.add_host("store", disk=disk)
        self.truth = Truth(self, disk)
        self.store.disk.make(STORE)
        self.home = self.add_home("home")
        self.clients: list[Proc] = []

    def add_host(self, name: str, **how: Any) -> Host:
        host = self.hosts[name] = Host(self, name, **how)
        if name != "store":
            host.mounts[STORE] = self.store
        return host

    def add_home(self, name: str) -> Host:
        host = self.add_host(name)
        host.env.update(_CLOUDS[self.provider][1])
        self._lay_out(host)
        return host

    def rent(self, settings: Settings, faults: Faults, rate_usd_per_hour: str) -> SimCloud:
        """Opens the cloud of this schedule."""
        kind, _ = _CLOUDS[self.provider]
        self.cloud = kind(self, settings, faults, rate_usd_per_hour)
        return self.cloud

    def has_keys(self, proc: Proc) -> bool:
        """Whether it was started where something leads to the cloud."""
        return all(name in proc.env for name in _CLOUDS[self.provider][1])

    def on_cloud_change(self) -> None:
        self.truth.cloud_changed()

    def may_run(self, task: Task) -> bool:
        proc: Proc = task.proc  # type: ignore[attr-defined]
        if proc.host.is_frozen and not task.is_killed:
            proc.host.hold(task)
            return False
        return True

    def crashed(self, task: Task, exc: BaseException) -> None:
        proc: Proc = task.proc  # type: ignore[attr-defined]
        self.say(f"{proc} crashes: {type(exc).__name__}: {exc}")
        # Only these two may die of a full disk: the agent restarts them.
        if not (proc.role in ("trainer", "lookout") and isinstance(exc, OSError)):
            super().crashed(task, exc)

    # --- clients ---

    def client(
        self, role: str, verb: Callable[[Home], Any], host: Host | None = None, *, is_keyless: bool = False
    ) -> Client:
        """`is_keyless`: started where nothing leads to the cloud, as by cron or in another shell."""
        host = host or self.home
        hidden = _CLOUDS[self.provider][1] if is_keyless else {}
        env = {name: value for name, value in host.env.items() if name not in hidden}
        client = Client(self, role, verb, host, env)
        self.clients.append(client.proc)
        return client

    def finish(self, client: Client, deadline_s: float = VERB_DEADLINE_S) -> Client:
        """Waits for it; a verb that does not come back is a finding."""
        if not self.wait(lambda: not client.proc.is_alive, deadline_s, every_s=5.0):
            raise Broken(f"{client.proc} has not come back after {deadline_s:g} s")
        return client

    # --- a run ---

    def order(self, home: Home, name: str = "moss", **messages: Any) -> LaunchOrder:
        messages = {"limit": "1.00", "provider": "local", "resume": False, "limits": Limits(), **messages}
        run = _run(name, messages["limits"], messages["provider"])
        home.configure(run)
        offers = home.provider(messages["provider"]).offers(Needs(gpu="H100"))
        if not offers:  # its only one had a figure that cannot be right
            raise NoOffer(f"{messages['provider']} offers nothing that fits.")
        return LaunchOrder(
            run=run,
            run_file_text=f"name: {name}\n",
            is_prepared=True,
            offer=offers[0],
            spend_limit_usd=Decimal(messages["limit"]),
            resume=messages["resume"],
            # Where no machine can end itself a launch wants a guard on duty; these days do without, and say so.
            is_one_guard_enough=self.provider == "shadeform",
        )

    def draft(self, home: Home, **messages: Any) -> Draft:
        return draft(self.order(home, **messages), home)

    def close(self) -> None:
        super().close()
        for host in self.hosts.values():
            host.close()

    def _lay_out(self, host: Host) -> None:
        host.disk.make(str(HOME))
        host.disk.make(DATA)
        for name, data in _DATA_FILES.items():
            host.disk.put(f"{DATA}/{name}", data, 0.0)


class Client:
    """A verb at home as a process; what it said is here when it has ended."""

    def __init__(
        self, stage: Stage, role: str, verb: Callable[[Home], Any], host: Host, env: dict[str, str] | None = None
    ) -> None:
        self.answer: Any = None
        self.error: HomingError | OSError | None = None
        self._verb = verb
        self.proc = stage.programs.begin(host, role, self._main, dict(host.env) if env is None else env)

    def _main(self, world: SimWorld) -> int:
        try:
            self.answer = self._verb(Home(HOME, world))
        except (HomingError, OSError) as exc:  # the top of the command line turns both into words and an exit code
            self.error = exc
            self.proc.host.sim.say(f"{self.proc} says: {str(exc)!r}")
            return exc.exit_code if isinstance(exc, HomingError) else 1
        return 0


@contextlib.contextmanager
def pace() -> Iterator[None]:
    """Slower polling, so that a virtual hour costs little; and silence. No decision of the code changes by it."""
    logging.disable(logging.CRITICAL)
    _unlock()
    try:
        # Here the fake cloud represents a remote one, so another home may use it too.
        with (
            mock.patch("homing.cloud.watch.follow._POLL_S", 10.0),
            mock.patch("homing.cloud.launch.run_documents._heartbeat_s", _every_five_s),
            mock.patch("homing.cloud.home.HERE_ONLY", ("local",)),
            runpod.pace(),
            shadeform.pace(),
            aws.pace(),
            modal.pace(),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            yield
    finally:
        logging.disable(logging.NOTSET)


def _every_five_s(store: str) -> float:
    return 5.0


def _unlock() -> None:
    """Python 3.11's cached_property holds a lock of the class while it computes; a task that gives way inside would
    keep every other one out for ever. Only one thread runs here at a time, so nothing needs it."""
    for module in [module for name, module in sys.modules.items() if name.startswith("homing.")]:
        for cls in [item for item in vars(module).values() if isinstance(item, type)]:
            for item in vars(cls).values():
                if isinstance(item, functools.cached_property) and hasattr(item, "lock"):
                    item.lock = contextlib.nullcontext()


def _data_files() -> tuple[dict[str, bytes], str]:
    contents = {
        "tokenizer.json": b'{"version": "1.0"}',
        "train-00000.bin": bytes(range(64)),
        "train-00000.idx": b"\0" * 16,
    }
    sha = {name: _sha256(data) for name, data in contents.items()}
    shard = Shard("train-00000.bin", "train-00000.idx", 32, 1, 64, sha["train-00000.bin"], sha["train-00000.idx"])
    manifest = DataManifest(
        dtype="uint16",
        vocab_size=512,
        tokenizer_sha256=sha["tokenizer.json"],
        specials=["<|endoftext|>"],
        splits={"train": Split(32, 1, 64, [shard])},
        source=[SourceFile("moss.txt", 1, "0" * 64)],
        source_sha256="0" * 64,
    )
    contents["manifest.json"] = codec.dumps(manifest).encode()
    return contents, _sha256(contents["manifest.json"])


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


_DATA_FILES, _MANIFEST_SHA256 = _data_files()


def _run(name: str, limits: Limits, provider: str) -> Run:
    optimizer = Optimizer("adamw", 1e-3, 1e-3, 1e-3, 1e-3, 0.0)
    phase = Phase("pretrain", "full", 20, 64, 1, optimizer, Schedule("wsd", 1, 2, 0.0), 0, 64, 5, 0.0, 0, 2)
    return Run(
        name=name,
        seed=0,
        model=Model("stock", "llama", 2, 64, 4, 4, 16, 128, 64, 512, True),
        sizes=Sizes(100_000, 90_000, 600_000.0),
        data=Data(DATA, _MANIFEST_SHA256, "", 1024, 32),
        phases=[phase],
        train=Train(),
        sampling=Sampling(),
        limits=limits,
        cloud=Cloud(providers=[provider], settings=_SETTINGS.get(provider, {})),
        store=f"file:{STORE}/mine",
        run_file_sha256="f" * 64,
    )
