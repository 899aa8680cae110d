"""`Home`: represents the folder $HOMING_HOME on the user's computer, and opens providers and stores for it.

    $HOMING_HOME/owner  ledger.sqlite  speed.json  runs/<run id>/  launching/<mark>  local/<instance id>/  store/

Nothing is created until something is written.
"""

from __future__ import annotations

import contextlib
from decimal import Decimal
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from homing.cloud.ledger.ledger import UNDONE, Ledger, LedgerLine, RunRow
from homing.cloud.ledger.mark import OWNER, owner_in, owner_of, owner_prefix, shown_mark
from homing.cloud.providers.base import Configurable, Provider
from homing.cloud.providers.registry import HERE_ONLY, AdoptedOnly, open_provider
from homing.errors import ProviderRefused
from homing.store import Store, open_store
from homing.wire import codec, file_names
from homing.wire.run_json import Run
from homing.world import World

if TYPE_CHECKING:
    from homing.cloud.providers.ssh.provider import Ssh

__all__ = ["LAUNCH_NOTE", "LEDGER", "Home"]

LEDGER = "ledger.sqlite"
LAUNCH_NOTE = "launch.json"  # a file in runs/<run id>/ that records the chosen offer and whether it was a smoke run


class Home:
    def __init__(self, path: Path, world: World) -> None:
        self.path = path
        self.world = world
        world.keep_private(path)
        self.ledger = Ledger(path / LEDGER, world)
        self._providers: dict[str, Provider] = {}
        # Maps a mark to the spend (in dollars) at this process's last check, and the monotonic time of that check.
        self.seen_spend: dict[str, tuple[Decimal, float]] = {}
        # Maps a provider to the monotonic time when it last failed to identify our key's account.
        self.unanswered_at: dict[str, float] = {}

    @cached_property
    def owner(self) -> str:
        return owner_of(self.path, self.world, self.owner_in_ledger)

    @property
    def owner_path(self) -> Path:
        return self.path / OWNER

    @property
    def has_owner(self) -> bool:
        """Return True if the owner file exists, without creating it."""
        return self.world.exists(self.owner_path)

    @property
    def has_ledger(self) -> bool:
        """Return True if a ledger exists. Check this first, because reading a missing ledger creates an empty one."""
        return self.ledger.file.is_there

    def is_ours(self, mark: str) -> bool:
        """Return True if the mark shows that the resource was created from this $HOMING_HOME."""
        return mark.startswith(owner_prefix(self.owner))

    def owner_in_ledger(self) -> str:
        """Return the owner id in the newest instance mark in the ledger, or "" if the ledger has no instances.

        Adopted marks do not count, because they belong to another $HOMING_HOME.
        """
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
        """Return the line's provider. For an adopted line, that provider lists only instances from the same owner."""
        if self.is_ours(line.mark):
            return self.provider(line.provider)
        adopted = self.ledger.adopted()
        mark = shown_mark(line.mark)
        if mark not in adopted:
            raise ProviderRefused(
                what=f"{line.mark} belongs to another homing home directory and has not been adopted by this one.",
                why=f"The names of this directory's instances begin with {owner_prefix(self.owner)}",
                fix="Adopt it: homing adopt STORE RUN",
            )
        its = adopted[mark]
        is_here = its.host == self.world.host()
        if line.provider in HERE_ONLY and not is_here:
            raise ProviderRefused(
                what=f"{line.mark} was launched from {its.host or 'another computer'};"
                " only that computer can query it.",
                why=f"The files that {line.provider} needs to find its instances are in {its.home} on that computer.",
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
        """Return the marks of the volumes that adopted runs refer to in their run files.

        All runs from the other $HOMING_HOME share these volumes, so their marks contain no attempt number. If that
        computer is lost, the volumes keep billing.
        """
        prefix, found = owner_prefix(owner), set[str]()
        for run_id in {line.run_id for line in self.ledger.lines() if shown_mark(line.mark) in marks}:
            # the adopted run's documents may not have been fetched
            with contextlib.suppress(OSError, codec.WireError):
                settings = codec.loads(Run, self.world.read(self.run_dir(run_id) / file_names.RUN)).cloud.settings
                name = settings.get(provider, {}).get("volume")
                # for some providers, `volume` is the size of a disk, not a name; that disk has the run's own mark
                if isinstance(name, str) and name:
                    found.add(prefix + name.removeprefix(prefix))
        return frozenset(found)

    def launch_lock(self, mark: str) -> Path:
        """Return the path of a launch's lock file.

        The launching process takes the lock for `mark` before it records the launch in the ledger, and holds it until
        the process exits for any reason. A process that tries several offers also holds a lock for the run's id.
        """
        return self.path / "launching" / mark

    def may_go_on(self, run: RunRow) -> bool:
        """Return True if the run has ended but a guard, or a launch that is in progress, may still resume it."""
        is_between = run.reason.startswith(UNDONE) and self.world.is_locked(self.launch_lock(run.id))
        return not run.is_live and (run.may_go_on or is_between)

    def configure(self, run: Run) -> None:
        """Pass the run file's provider settings to the providers. Call this before making any request."""
        if run.cloud.ssh is not None:
            cast("Ssh", self.provider("ssh")).configure(run.cloud.ssh)
        for name, settings in run.cloud.settings.items():
            cast(Configurable, self.provider(name)).configure(settings)

    def meet(self, run: Run) -> None:
        """Raise HostKeyUnknown if the run file names an ssh host whose key the user has not confirmed yet."""
        if run.cloud.ssh is not None:
            cast("Ssh", self.provider("ssh")).meet()

    def store_of(self, run: RunRow) -> Store:
        # The launch created the store. If it is missing now (for example, a disk is not mounted), do not recreate it
        # empty.
        return open_store(run.store, self.world, create=False)

    def run_dir(self, run_id: str) -> Path:
        return self.path / "runs" / run_id

    def kept_log(self, run_id: str, mark: str) -> Path:
        """Return the path of a failed launch's log. The provider deletes its own copy together with the machine."""
        return self.run_dir(run_id) / f"{mark}.log"
