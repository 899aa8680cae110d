"""`homing doctor`: every check that is possible before money is spent. The checks rent nothing.

computer    this computer: Python, packages, torch and GPU, SSH, disk, home directory, .env, clock
home        the homing home directory: ledger, owner id, guard, instances not confirmed as destroyed
run         the run file, its placeholders, data and store (writes a probe to the store, then deletes it)
providers   every provider that is configured or named: key, permissions, quota, offers

This module contains the checks for a run, the table CHECKS, which lists all checks, and `examine`, which runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from homing.config.schema.value_types import is_placeholder
from homing.doctor.check import Check, fault, ok, skipped, warning
from homing.doctor.computer import (
    check_clock,
    check_container,
    check_disk,
    check_env_file,
    check_env_values,
    check_extras,
    check_home_folder,
    check_packages,
    check_python,
    check_ssh,
    check_ssh_keys,
    check_tools,
    check_torch,
)
from homing.doctor.home_state import check_guard, check_ledger, check_owner, check_privacy, check_unconfirmed
from homing.doctor.provider_accounts import check_hub, check_providers
from homing.doctor.subject import Examined
from homing.errors import HomingError
from homing.store.preflight import TO_BE_CREATED, preflight, try_out

__all__ = ["CHECKS", "check_data", "check_limit", "check_placeholders", "check_run_file", "check_store", "examine"]

_NO_RUN = "No run was specified. To check one: homing doctor RUN"
_STORES = "docs/guides/stores.md"


def check_run_file(examined: Examined) -> list[Check]:
    error = examined.run_error
    if error is not None:
        why = "; ".join(error.why.splitlines())
        return [fault("run.file", f"{error.what} {why}".strip(), error.fix, "docs/reference/run-file.md")]
    if examined.run is None:
        return [skipped("run.file", _NO_RUN)]
    return [ok("run.file", f"The run file of {examined.run.name} is valid.")]


def check_placeholders(examined: Examined) -> list[Check]:
    """Find placeholders such as YOUR_BUCKET in the run file, so that a launch does not fail later. Ignore comments."""
    if not examined.run_text:
        return [skipped("run.placeholders", _NO_RUN)]
    lines = [line.partition(" #")[0] for line in examined.run_text.splitlines()]
    bad = [
        f"line {number}: {line.strip()}"
        for number, line in enumerate(lines, start=1)
        if is_placeholder(line) and not line.lstrip().startswith("#")
    ]
    if bad:
        return [
            fault("run.placeholders", "; ".join(bad), "Replace them with your own names.", "docs/reference/run-file.md")
        ]
    return [ok("run.placeholders", "The run file has no placeholders.")]


def check_data(examined: Examined) -> list[Check]:
    if examined.run is None:
        return [skipped("run.data", _NO_RUN)]
    if not examined.is_prepared:
        text = f"The training text for {examined.run.name} has not been prepared yet."
        return [warning("run.data", text, f"homing prep {examined.typed or examined.run.name}")]
    return [ok("run.data", f"{examined.run.data.num_train_tokens:,} tokens are prepared.")]


def check_limit(examined: Examined) -> list[Check]:
    if examined.run is None:
        return [skipped("run.limit", _NO_RUN)]
    if examined.run.limits.spend_usd is None:
        text = "No spend limit is set; launch requires one."
        plan = f"homing plan {examined.typed or examined.run.name}"
        fix = f"{plan}   suggests an amount for launch --spend-limit or limits.spend"
        return [skipped("run.limit", text, fix)]
    return [ok("run.limit", f"The spend limit is ${examined.run.limits.spend_usd}.")]


def check_store(examined: Examined) -> list[Check]:
    """Check that the store is reachable.

    If the store exists, write a probe, read it back, test create-if-absent, and delete the probe.
    """
    if examined.run is None:
        return [skipped("store.reached", _NO_RUN), skipped("store.probe", _NO_RUN)]
    url, world = examined.run.store, examined.home.world
    if url.startswith("file:") and not world.exists(url.removeprefix("file:")):
        return _check_folder_to_be(url, examined)
    try:
        notes = preflight(url, world, needs_write=False)
    except HomingError as exc:
        text = " ".join(f"{exc.what} {exc.why}".split())
        return [fault("store.reached", text, exc.fix, _STORES), skipped("store.probe", "The store is not reachable.")]
    found = [ok("store.reached", "; ".join(notes) or f"{url} exists.")]
    if any(TO_BE_CREATED in note for note in notes):
        return [*found, skipped("store.probe", "The store does not exist yet, and doctor does not create it.")]
    try:
        try_out(url, world)
    except HomingError as exc:
        text = " ".join(f"{exc.what} {exc.why}".split())
        return [*found, fault("store.probe", text, exc.fix, _STORES)]
    return [*found, ok("store.probe", "A probe was written, read back and deleted.")]


def _check_folder_to_be(url: str, examined: Examined) -> list[Check]:
    path = Path(url.removeprefix("file:"))
    while not examined.home.world.exists(path) and path != path.parent:
        path = path.parent
    probe = skipped("store.probe", "The store does not exist yet, and doctor does not create it.")
    if not examined.home.world.may_write(path):
        text = f"{url} does not exist and cannot be created: {path} is not writable."
        return [
            fault("store.reached", text, "Change `store:` in the run file, or the folder's permissions.", _STORES),
            probe,
        ]
    return [ok("store.reached", f"{url} does not exist yet; {TO_BE_CREATED}."), probe]


# All checks, in order. Each row contains the text that the user sees while the check runs, and the check function.
CHECKS: list[tuple[str, Callable[[Examined], list[Check]]]] = [
    ("Python", check_python),
    ("packages", check_packages),
    ("optional packages (extras)", check_extras),
    ("torch and its GPUs (loading torch takes a few seconds)", check_torch),
    ("the SSH client", check_ssh),
    ("SSH keys", check_ssh_keys),
    ("git, docker and uv", check_tools),
    ("Docker's engine", check_container),
    ("the homing home directory", check_home_folder),
    ("the disk", check_disk),
    (".env", check_env_file),
    ("keys in the environment", check_env_values),
    ("the owner id", check_owner),
    ("the permissions of the homing home directory", check_privacy),
    ("the ledger", check_ledger),
    ("instances not confirmed as destroyed", check_unconfirmed),
    ("the guard", check_guard),
    ("the run file", check_run_file),
    ("placeholders", check_placeholders),
    ("the data", check_data),
    ("the spend limit", check_limit),
    ("the store", check_store),
    ("the Hub", check_hub),
    ("the clock, compared with a provider's", check_clock),
    ("providers", check_providers),
]


def examine(examined: Examined) -> Iterator[Check]:
    """Run all checks. Yield each result as soon as it is known, because checks that use the network may be slow."""
    for subject, question in CHECKS:
        examined.notify(subject)
        yield from question(examined)
