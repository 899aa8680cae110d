"""`homing doctor`: every check that is possible before money is spent. Creates nothing.

here        this computer: Python, packages, torch and GPU, SSH, disk, home, .env, clock
home        homing's own files: ledger, owner, guard, unconfirmed destroys
run         the run file, its placeholders, data and store (writes a probe there and deletes it again)
providers   each one configured or named: key, permissions, quota, offers
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from homing.doctor.check import Check
from homing.doctor.computer import (
    check_clock,
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
from homing.doctor.container import check_container
from homing.doctor.home_state import check_guard, check_ledger, check_owner, check_privacy, check_unconfirmed
from homing.doctor.provider_accounts import check_hub, check_providers
from homing.doctor.run_file import check_data, check_limit, check_placeholders, check_run_file, check_store
from homing.doctor.subject import Examined

__all__ = ["CHECKS", "examine"]

# What a person reads while the check runs, and the check.
CHECKS: list[tuple[str, Callable[[Examined], list[Check]]]] = [
    ("Python", check_python),
    ("packages", check_packages),
    ("the packages of extras", check_extras),
    ("torch and the GPUs it sees; loading it takes seconds", check_torch),
    ("the SSH client", check_ssh),
    ("SSH keys", check_ssh_keys),
    ("git, docker and uv", check_tools),
    ("Docker's engine", check_container),
    ("the home folder", check_home_folder),
    ("the disk", check_disk),
    (".env", check_env_file),
    ("keys in the environment", check_env_values),
    ("our mark", check_owner),
    ("the permissions of the home", check_privacy),
    ("the ledger", check_ledger),
    ("unconfirmed destroys", check_unconfirmed),
    ("the guard", check_guard),
    ("the run file", check_run_file),
    ("placeholders", check_placeholders),
    ("the data", check_data),
    ("the limit", check_limit),
    ("the store", check_store),
    ("the Hub", check_hub),
    ("the clock, against a provider's", check_clock),
    ("providers", check_providers),
]


def examine(examined: Examined) -> Iterator[Check]:
    """Yield each result as it arrives: some checks use the network and may be slow."""
    for subject, question in CHECKS:
        examined.notify(subject)
        yield from question(examined)
