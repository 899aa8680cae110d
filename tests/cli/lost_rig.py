"""`homing` at a home with runs on the cloud double, so that losing or breaking something takes milliseconds."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from tests.cli.control_rig import RUN_FILE, Homing, typing
from tests.cloud.fake_world import OFFERS, FakeWorld
from tests.cloud.rig import make_run
from tests.contracts.providers import ProviderContract

from homing.cloud.home import LAUNCH_NOTE, Home
from homing.cloud.ledger.ledger import LedgerLine, RunRow
from homing.cloud.ledger.mark import make_mark
from homing.cloud.ledger.run_lease import write_record
from homing.config.home_and_run_files import PROJECT_NOTE, project_note
from homing.store import open_store
from homing.store.read_lease import lease_key
from homing.wire import codec, file_names
from homing.wire.run_record import Lease

OLD, NEW = "moss-20260101-000000-aaaa", "moss-20260102-000000-bbbb"
OFFER = OFFERS[0]  # what `ProviderContract.make_request` asks for


class HomeWorld(FakeWorld):
    """Home's clock may differ from the cloud's, and from its own a moment ago."""

    skew_s = 0.0

    def now(self) -> float:
        return self.t + self.skew_s


@dataclasses.dataclass
class Rig:
    cli: Homing
    world: HomeWorld
    path: Path  # of the home
    folder: Path  # of the project
    tmp_path: Path

    @property
    def home(self) -> Home:
        """As the next process opens it."""
        return Home(self.path, self.world)

    @property
    def billing(self) -> list[str]:
        """Ids of the instances that really bill."""
        return [line.id for line in self.world.cloud.bill() if line.kind == "instance" and line.until is None]

    def rent(self, run_id: str = NEW, *, name: str = "moss", limit: str = "12", is_recorded: bool = True) -> str:
        """Adds a live run (ledger, run documents at home, record in the store) and returns the instance's id."""
        home, now = self.home, self.world.now()
        store_url = f"file:{self.tmp_path / 'store'}"
        mark = make_mark(home.owner, run_id, 1)
        rate = "0.36"
        line = LedgerLine(mark, run_id, name, 1, "fake", "cpu-small", rate, limit, now)
        home.ledger.intend(RunRow(run_id, name, "launching", now, store_url, "f" * 64, limit), line)
        run = dataclasses.replace(make_run(self.tmp_path, name), id=run_id, store=store_url)
        run = dataclasses.replace(run, limits=dataclasses.replace(run.limits, spend_usd=limit))
        note = {"schema": "homing.launch/1", "offer": {"provider": "fake", "name": "cpu-small"}, "is_smoke": False}
        home.run_dir(run_id).mkdir(parents=True)
        (home.run_dir(run_id) / file_names.RUN).write_text(codec.dumps(run))
        (home.run_dir(run_id) / LAUNCH_NOTE).write_text(json.dumps(note))
        (home.run_dir(run_id) / PROJECT_NOTE).write_bytes(project_note(str(self.folder)))
        home.ledger.begin_create(mark, now)
        provider = home.provider("fake")
        instance = provider.create(ProviderContract().make_request(provider, mark, self.tmp_path))
        home.ledger.update(mark, instance_id=instance.id, state="running", billing="yes")
        home.ledger.set_run(run_id, state="running")
        if is_recorded:
            store = open_store(store_url, self.world)
            lease = Lease(1, run_id, home.owner, self.world.host(), mark, now, "0" * 16)
            store.create_if_absent(lease_key(run_id, 1), codec.dumps(lease).encode())
            write_record(home, run_id, store)
        return instance.id

    def lose_ledger(self) -> None:
        """`rm ledger.sqlite*`, as a person types it."""
        for path in self.path.glob("ledger.sqlite*"):
            path.unlink()


@pytest.fixture
def rig(tmp_path: Path, homing_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Rig:
    folder = tmp_path / "project"
    (folder / "runs").mkdir(parents=True)
    (folder / "runs/moss.yaml").write_text(RUN_FILE)
    monkeypatch.chdir(folder)
    world = HomeWorld()

    monkeypatch.setattr("homing.api.lookup.find_runs.World", lambda: world)
    return Rig(typing(capsys, monkeypatch), world, homing_home, folder, tmp_path)
