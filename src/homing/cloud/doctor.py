"""`homing doctor`: every question that can be answered before money is spent. Creates nothing.

here        this computer: Python, packages, torch and card, SSH, disk, home, .env, clock
home        what homing keeps there: ledger, owner, guard, ends that nobody confirmed
run         the run file, its placeholders, its data, its store (a probe is written there and deleted again)
providers   each that is set up or named: key, rights, quota, offers
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from homing.cloud.checks import Check
from homing.cloud.doctor_container import check_container
from homing.cloud.doctor_here import (
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
from homing.cloud.doctor_home import check_guard, check_ledger, check_owner, check_privacy, check_unconfirmed
from homing.cloud.doctor_providers import check_hub, check_providers
from homing.cloud.doctor_run import check_data, check_limit, check_placeholders, check_run_file, check_store
from homing.cloud.examined import Examined

__all__ = ["CHECKS", "examine"]

# What a person reads while it is asked, and the question.
CHECKS: list[tuple[str, Callable[[Examined], list[Check]]]] = [
    ("Python", check_python),
    ("packages", check_packages),
    ("the packages of the extras", check_extras),
    ("torch, and the cards it sees; loading it takes seconds", check_torch),
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
    ("ends that nobody confirmed", check_unconfirmed),
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
    """Each as it comes: some are asked over the network, and one may keep a person waiting."""
    for subject, question in CHECKS:
        examined.tell(subject)
        yield from question(examined)
