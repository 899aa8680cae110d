"""`homing setup`: the first-time steps of a provider, announced before they run, and safe to repeat."""

from __future__ import annotations

import getpass
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from homing.api.lookup.find_runs import open_home
from homing.cli import dotenv, output
from homing.cli.options import Json, Yes
from homing.cloud.accounts import ACCOUNTS, Account
from homing.cloud.home import Home
from homing.cloud.providers.aws.policy import policy_document
from homing.cloud.providers.registry import PROVIDERS, configured
from homing.cloud.setup import Step, steps_for, write_key
from homing.doctor.check import Check
from homing.doctor.provider_accounts import check_providers
from homing.doctor.subject import Examined
from homing.errors import ProviderRefused, UsageError
from homing.store.address import parse_s3

__all__ = ["command"]


def command(
    provider: Annotated[
        str, typer.Argument(metavar="PROVIDER", help="runpod, shadeform, aws, modal, ssh, local.")
    ] = "",
    store: Annotated[
        str,
        typer.Option("--store", metavar="URL", help="Also create this store if it does not exist: s3://bucket/prefix"),
    ] = "",
    policy: Annotated[
        bool, typer.Option("--policy", help="Print the IAM policy that your AWS user needs, as JSON, and exit.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be created; create nothing.")] = False,
    yes: Yes = False,
    json_: Json = False,
) -> None:
    """Set up a provider: API key, SSH key, store and other one-time steps.

    Shows what it would create, asks first, and is safe to repeat.
    """
    if provider not in PROVIDERS:
        raise UsageError(
            what=f"Unknown provider: {provider!r}." if provider else "No provider given.",
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
            output.say("Show the permissions your AWS user needs: homing setup aws --policy")
        for step in steps:
            output.say(f"{'exists' if step.is_done else 'to create'}: {step.text}{_costs(step)}")
        todo = [step for step in steps if not step.is_done]
        made = [] if dry_run else _do(todo, yes=yes)
        checks = check_providers(Examined(home, Path.cwd(), named=(provider,)))
    output.emit("setup/1", _document(provider, steps, made, checks))
    _say_checks(checks)
    if dry_run:
        output.say("Nothing was created.")
    faults = [check for check in checks if check.state == "fault"]
    if faults:
        raise ProviderRefused(what=f"{provider} is not ready: {faults[0].text}", fix=faults[0].fix)
    output.say(f"Next: homing offers --provider {provider}")


def _print_policy(provider: str, store: str) -> None:
    if provider != "aws":
        raise UsageError(
            what="--policy is for aws.", why=f"{provider} has no policies of its own.", fix="homing setup aws --policy"
        )
    document = policy_document(parse_s3(store).bucket if store.startswith("s3:") else "")
    output.emit("policy/1", {"policy": json.loads(document)})
    if not output.is_json():
        print(document)


def _take_key(account: Account, home: Home, *, dry_run: bool) -> None:
    """Ask the user for the key and write it to .env; without a terminal, say what to do."""
    path = Path.cwd() / dotenv.FILE
    login = f"   or: {account.login}" if account.login else ""
    if dry_run or not sys.stdin.isatty():
        lines = ", ".join(f"{name}=..." for name in account.keys)
        raise UsageError(
            what=f"No API key for {account.title}.",
            why=f"{' and '.join(account.keys)} not set. Create one at {account.key_page}",
            fix=f"Add to {path} (chmod 600): {lines}{login}",
        )
    output.say(f"Create a key at {account.key_page}{login}")
    for name in account.keys:
        value = getpass.getpass(
            f"{name} (hidden; saved in {path}, readable only by you; leave empty to skip): "
        ).strip()
        if not value:
            raise UsageError(what=f"No API key for {account.title}.", fix=f"homing setup {account.name}")
        write_key(path, name, value, home)
    dotenv.load(path.parent)
    if home.world.exists(path.parent / ".git"):
        ignored = home.world.run(["git", "-C", str(path.parent), "check-ignore", "-q", str(path)], timeout_s=10.0)
        if ignored.code:
            output.say(f"warning: git does not ignore {path}: echo .env >> .gitignore")


def _do(todo: list[Step], *, yes: bool) -> list[Step]:
    made = []
    for step in todo:
        if not output.ask(f"Make {step.text}{_costs(step)}?", yes=yes):
            output.say("  left")
            continue
        step.do()
        made.append(step)
        output.say("  made")
    return made


def _costs(step: Step) -> str:
    return f" ({step.costs})" if step.costs else ""


def _say_checks(checks: list[Check]) -> None:
    for check in checks:
        if check.state in ("ok", "warning", "fault"):
            output.say(f"{check.state}: {check.name}: {check.text}")


def _document(provider: str, steps: list[Step], made: list[Step], checks: list[Check]) -> dict[str, object]:
    return {
        "provider": provider,
        "steps": [{"text": step.text, "is_done": step.is_done or step in made} for step in steps],
        "checks": [{"name": check.name, "state": check.state, "text": check.text} for check in checks],
    }
