"""What `homing doctor` examines: the homing home directory, the current folder, and the named run and providers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from homing.cloud.home import Home
from homing.cloud.providers.registry import PROVIDERS, configured
from homing.errors import HomingError
from homing.wire.run_json import Run

__all__ = ["Examined"]

_FACTS_S = 60.0
# This code runs in a separate process, so that modules that are already loaded do not affect the result.
_FACTS = """
import json, re, sys
from importlib import metadata
try: wanted = metadata.requires("homing") or []
except metadata.PackageNotFoundError: wanted = []
found = []
for line in wanted:
    rule, _, marker = line.partition(";")
    name, bounds = re.match(r"([A-Za-z0-9._-]+)(?:\\[[^]]*\\])?(.*)", rule.strip()).groups()
    extra = re.search(r"extra == ['\\"](\\w+)", marker)
    try: version = metadata.version(name)
    except metadata.PackageNotFoundError: version = ""
    found.append({"name": name, "bounds": bounds.strip(), "extra": extra[1] if extra else "", "version": version})
print(json.dumps({"python": list(sys.version_info[:3]), "packages": found}))
"""


@dataclass
class Examined:
    home: Home
    folder: Path  # the folder that contains .env and runs/
    run: Run | None = None
    run_text: str = ""  # the text of the run file, as the user wrote it
    typed: str = ""  # the run name and options as the user typed them, for suggested commands
    run_error: HomingError | None = None  # why the run file could not be read
    is_prepared: bool = True
    named: tuple[str, ...] = ()  # providers named on the command line
    notify: Callable[[str], None] = lambda text: None  # called with the name of each check, to show it to the user

    @cached_property
    def providers(self) -> list[str]:
        """The providers to check: those on the command line, else those of the run, else all that are configured."""
        if self.named:
            return list(self.named)
        if self.run is not None:
            return list(self.run.cloud.providers)
        return configured(self.home.path, self.home.world)

    @property
    def is_needed(self) -> bool:
        """True if the user named providers or a run. If not, a provider that is not set up is not a fault."""
        return bool(self.named) or self.run is not None

    @cached_property
    def extras(self) -> set[str]:
        """The extras that the named run and providers need. Every run needs `lm` to prepare its data locally."""
        wanted = {extra for name in self.providers if self.is_needed and (extra := PROVIDERS.get(name, ("", None))[1])}
        if self.run is not None:
            by_store = {"s3": {"aws"}, "hf": {"hub"}, "modal": {"modal"}}
            wanted |= {"lm"} | by_store.get(self.run.store.partition(":")[0], set())
        return wanted

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The versions of Python and of the packages, or {} if the interpreter printed nothing usable."""
        world = self.home.world
        done = world.run([world.python(), "-c", _FACTS], timeout_s=_FACTS_S)
        try:
            facts = json.loads(done.out)
        except ValueError:
            return {}
        return facts if isinstance(facts, dict) else {}
