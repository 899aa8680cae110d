"""`homing doctor`: every question that can be answered before money is spent. Creates nothing.

here        this computer: Python, packages, torch and card, SSH, disk, home, .env, clock
home        what homing keeps there: ledger, owner, guard, ends that nobody confirmed
run         the run file, its placeholders, its data, its store (a probe is written there and deleted again)
providers   each that is set up or named: key, rights, quota, offers
"""

from __future__ import annotations

from collections.abc import Callable

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
from homing.cloud.doctor_home import check_guard, check_ledger, check_owner, check_unconfirmed
from homing.cloud.doctor_providers import check_hub, check_providers
from homing.cloud.doctor_run import check_data, check_limit, check_placeholders, check_run_file, check_store
from homing.cloud.examined import Examined

__all__ = ["CHECKS", "examine"]

CHECKS: list[Callable[[Examined], list[Check]]] = [
    check_python,
    check_packages,
    check_extras,
    check_torch,
    check_ssh,
    check_ssh_keys,
    check_tools,
    check_container,
    check_home_folder,
    check_disk,
    check_env_file,
    check_env_values,
    check_owner,
    check_ledger,
    check_unconfirmed,
    check_guard,
    check_run_file,
    check_placeholders,
    check_data,
    check_limit,
    check_store,
    check_hub,
    check_clock,
    check_providers,
]


def examine(examined: Examined) -> list[Check]:
    return [check for question in CHECKS for check in question(examined)]
