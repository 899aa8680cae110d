"""Home: what the control plane keeps on the person's machine, and the doors it opens from there.

    $HOMING_HOME/owner  ledger.sqlite  speed.json  runs/<run id>/  launching/<mark>  local/<instance id>/  store/

Nothing is created until something is written.
"""

from __future__ import annotations

import contextlib
from decimal import Decimal
from functools import cached_property, partial
from pathlib import Path
from typing import cast

from homing.cloud.ledger import UNDONE, Ledger, LedgerLine, RunRow
from homing.cloud.mark import OWNER, owner_in, owner_of, owner_prefix, shown_mark
from homing.cloud.providers.adopted import AdoptedOnly
from homing.cloud.providers.base import Configurable, Provider
from homing.cloud.providers.registry import HERE_ONLY, open_provider
from homing.cloud.providers.ssh import Ssh
from homing.errors import ProviderRefused
from homing.store import Store, open_store
from homing.wire import codec, names
from homing.wire.run import Run
from homing.world import World

__all__ = ["LAUNCH_NOTE", "LEDGER", "Home"]

LEDGER = "ledger.sqlite"
LAUNCH_NOTE = "launch.json"  # in runs/<run id>/: the offer that was taken, and whether it was a smoke run


class Home:
    def __init__(self, path: Path, world: World) -> None:
        self.path = path
        self.world = world
        world.keep_private(path)
        self.ledger = Ledger(path / LEDGER, world)
        self._providers: dict[str, Provider] = {}
        # Mark -> dollars when this process last looked, and when that was by its stop watch.
        self.seen_spend: dict[str, tuple[Decimal, float]] = {}
        # Provider -> when, by the same watch, it did not tell whose key it is asked with.
        self.unanswered_at: dict[str, float] = {}

    @cached_property
    def owner(self) -> str:
        return owner_of(self.path, self.world, self.owner_in_ledger)

    @property
    def owner_path(self) -> Path:
        return self.path / OWNER

    @property
    def has_owner(self) -> bool:
        """Whether there is one, without making one."""
        return self.world.exists(self.owner_path)

    @property
    def has_ledger(self) -> bool:
        """Whether anything was ever written down here; reading it would make an empty one."""
        return self.ledger.file.is_there

    def is_ours(self, mark: str) -> bool:
        """Whether this home made what carries the mark: not another home, nor somebody without homing."""
        return mark.startswith(owner_prefix(self.owner))

    def owner_in_ledger(self) -> str:
        """Whose marks the ledger holds, the newest counting; "" where it has none. Adopted ones are another home's."""
        if not self.has_ledger:
            return ""
        adopted = self.ledger.adopted()
        owners = [owner_in(line.mark) for line in self.ledger.lines() if shown_mark(line.mark) not in adopted]
        return next((owner for owner in reversed(owners) if owner), "")

    def provider(self, name: str) -> Provider:
        if name not in self._providers:
            self._providers[name] = open_provider(name, home=self.path, owner=self.owner, world=self.world)
        return self._providers[name]

    def provider_of(self, line: LedgerLine) -> Provider:
        """Who can be asked about this line: our provider, or one that sees what was adopted and nothing beside it."""
        if self.is_ours(line.mark):
            return self.provider(line.provider)
        adopted = self.ledger.adopted()
        mark = shown_mark(line.mark)
        if mark not in adopted:
            raise ProviderRefused(
                what=f"{line.mark} carries another home's mark and was not adopted here.",
                why=f"Ours begin with {owner_prefix(self.owner)}",
                fix="homing adopt STORE RUN",
            )
        its = adopted[mark]
        is_here = its.host == self.world.host()
        if line.provider in HERE_ONLY and not is_here:
            raise ProviderRefused(
                what=f"{line.mark} was launched from {its.host or 'another computer'}; only that one can ask about it.",
                why=f"What {line.provider} needs to find its instances lies in the home {its.home} there.",
                fix=f"On {its.host or 'that computer'}: homing destroy {line.run_id}",
            )
        path = Path(its.home) if line.provider in HERE_ONLY else self.path
        key = f"{line.provider} of {its.owner} at {path}"
        if key not in self._providers:
            self._providers[key] = open_provider(line.provider, home=path, owner=its.owner, world=self.world)
        marks = frozenset(mark for mark, each in adopted.items() if each.owner == its.owner)
        named = partial(self._named_volumes, line.provider, its.owner, marks)
        return cast(Provider, AdoptedOnly(self._providers[key], marks, named))

    def _named_volumes(self, provider: str, owner: str, marks: frozenset[str]) -> frozenset[str]:
        """Marks of the volumes that adopted runs name in their run files: made for all runs of the other home, so that
        no attempt's mark finds them, and billing on when that home is lost."""
        prefix, found = owner_prefix(owner), set[str]()
        for run_id in {line.run_id for line in self.ledger.lines() if shown_mark(line.mark) in marks}:
            with contextlib.suppress(OSError, codec.WireError):  # its papers could not be brought here
                told = codec.loads(Run, self.world.read(self.run_dir(run_id) / names.RUN)).cloud.settings
                name = told.get(provider, {}).get("volume")
                if isinstance(name, str) and name:  # elsewhere it is a size, of a disk that has its run's mark
                    found.add(prefix + name.removeprefix(prefix))
        return frozenset(found)

    def launch_lock(self, mark: str) -> Path:
        """Held by the process that launches `mark`, from before its intent until it ends, however it ends. That of a
        run's id by one that would take the next offer for it, where the first is gone."""
        return self.path / "launching" / mark

    def may_go_on(self, run: RunRow) -> bool:
        """Ended, and perhaps not for good: a guard may rent the next machine for it, or a launch that lives will."""
        is_between = run.reason.startswith(UNDONE) and self.world.is_locked(self.launch_lock(run.id))
        return not run.is_live and (run.may_go_on or is_between)

    def configure(self, run: Run) -> None:
        """What the run file says about where its providers are; before they are asked for anything."""
        if run.cloud.ssh is not None:
            cast(Ssh, self.provider("ssh")).configure(run.cloud.ssh)
        for name, settings in run.cloud.settings.items():
            cast(Configurable, self.provider(name)).configure(settings)

    def meet(self, run: Run) -> None:
        """Raises HostKeyUnknown where the run file names an ssh host that nobody has vouched for yet."""
        if run.cloud.ssh is not None:
            cast(Ssh, self.provider("ssh")).meet()

    def store_of(self, run: RunRow) -> Store:
        # Launch has made it: one that is gone now (a disk not mounted) must not come back empty.
        return open_store(run.store, self.world, create=False)

    def run_dir(self, run_id: str) -> Path:
        return self.path / "runs" / run_id

    def kept_log(self, run_id: str, mark: str) -> Path:
        """What an instance wrote whose launch failed: with the machine its provider's own copy goes."""
        return self.run_dir(run_id) / f"{mark}.log"
