"""`homing setup`: the first-time steps of a provider, said before they are done, and safe to repeat."""

from __future__ import annotations

import getpass
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from homing.cli import dotenv, talk
from homing.cli.control import open_home
from homing.cli.options import Json, Yes
from homing.cloud.accounts import ACCOUNTS, Account
from homing.cloud.checks import Check
from homing.cloud.doctor_providers import check_providers
from homing.cloud.examined import Examined
from homing.cloud.home import Home
from homing.cloud.providers.aws_policy import policy_document
from homing.cloud.providers.registry import PROVIDERS, configured
from homing.cloud.setup import Step, steps_for, write_key
from homing.errors import ProviderRefused, UsageError
from homing.store.address import parse_s3

__all__ = ["command"]


def command(
    provider: Annotated[
        str, typer.Argument(metavar="PROVIDER", help="runpod, shadeform, aws, modal, ssh, local.")
    ] = "",
    store: Annotated[
        str, typer.Option("--store", metavar="URL", help="Also make this store, if it is not there: s3://bucket/prefix")
    ] = "",
    policy: Annotated[
        bool, typer.Option("--policy", help="Only print the IAM policy that your AWS user needs, as JSON.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be made.")] = False,
    yes: Yes = False,
    json_: Json = False,
) -> None:
    """Key, SSH key, store and whatever the provider needs once. Says what it would make, asks, and may be repeated."""
    if provider not in PROVIDERS:
        raise UsageError(
            what=f"There is no provider {provider!r}." if provider else "Which provider is to be set up?",
            why=f"Known: {', '.join(sorted(PROVIDERS))}.",
            fix="homing setup runpod",
        )
    if policy:
        _print_policy(provider, store)
        return
    with open_home() as home:
        account = ACCOUNTS.get(provider)
        is_set = account is None or account.is_set(home.world.environment(), home.world)
        if account is not None and not is_set and provider not in configured(home.path, home.world):
            _take_key(account, home, dry_run=dry_run)
        steps = steps_for(provider, home, store)
        if provider == "aws":
            talk.say("The permissions that your AWS user needs: homing setup aws --policy")
        for step in steps:
            talk.say(f"{'there' if step.is_done else 'to make'}: {step.text}{_costs(step)}")
        todo = [step for step in steps if not step.is_done]
        made = [] if dry_run else _do(todo, yes=yes)
        checks = check_providers(Examined(home, Path.cwd(), named=(provider,)))
    talk.emit("setup/1", _document(provider, steps, made, checks))
    _say_checks(checks)
    if dry_run:
        talk.say("Nothing was made.")
    faults = [check for check in checks if check.state == "fault"]
    if faults:
        raise ProviderRefused(what=f"{provider} is not ready: {faults[0].text}", fix=faults[0].fix)
    talk.say(f"Next: homing offers --provider {provider}")


def _print_policy(provider: str, store: str) -> None:
    if provider != "aws":
        raise UsageError(
            what="--policy is for aws.", why=f"{provider} has no policies of its own.", fix="homing setup aws --policy"
        )
    document = policy_document(parse_s3(store).bucket if store.startswith("s3:") else "")
    talk.emit("policy/1", {"policy": json.loads(document)})
    if not talk.is_json():
        print(document)


def _take_key(account: Account, home: Home, *, dry_run: bool) -> None:
    """Typed by a person into .env; where there is none to type, what to do."""
    path = Path.cwd() / dotenv.FILE
    login = f"   or: {account.login}" if account.login else ""
    if dry_run or not sys.stdin.isatty():
        lines = ", ".join(f"{name}=..." for name in account.keys)
        raise UsageError(
            what=f"{account.title} has no key here.",
            why=f"{' and '.join(account.keys)} not set. Make one at {account.key_page}",
            fix=f"Write into {path} (chmod 600): {lines}{login}",
        )
    talk.say(f"Make a key at {account.key_page}{login}")
    for name in account.keys:
        value = getpass.getpass(
            f"{name} (not shown; goes into {path}, readable by you alone; empty: not now): "
        ).strip()
        if not value:
            raise UsageError(what=f"{account.title} has no key here.", fix=f"homing setup {account.name}")
        write_key(path, name, value, home)
    dotenv.load(path.parent)
    if home.world.exists(path.parent / ".git"):
        ignored = home.world.run(["git", "-C", str(path.parent), "check-ignore", "-q", str(path)], timeout_s=10.0)
        if ignored.code:
            talk.say(f"warning: git does not ignore {path}: echo .env >> .gitignore")


def _do(todo: list[Step], *, yes: bool) -> list[Step]:
    made = []
    for step in todo:
        if not talk.ask(f"Make {step.text}{_costs(step)}?", yes=yes):
            talk.say("  left")
            continue
        step.do()
        made.append(step)
        talk.say("  made")
    return made


def _costs(step: Step) -> str:
    return f" ({step.costs})" if step.costs else ""


def _say_checks(checks: list[Check]) -> None:
    for check in checks:
        if check.state in ("ok", "warning", "fault"):
            talk.say(f"{check.state}: {check.name}: {check.text}")


def _document(provider: str, steps: list[Step], made: list[Step], checks: list[Check]) -> dict[str, object]:
    return {
        "provider": provider,
        "steps": [{"text": step.text, "is_done": step.is_done or step in made} for step in steps],
        "checks": [{"name": check.name, "state": check.state, "text": check.text} for check in checks],
    }
