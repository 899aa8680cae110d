"""`homing setup`: the first-time steps of a provider, announced before they run, and safe to repeat."""

from __future__ import annotations

import getpass
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from homing.api.tools.setup_provider import provider_policy, setup_provider
from homing.cli import output
from homing.cli.options import Json, Yes

__all__ = ["command"]


def command(
    provider: Annotated[
        str, typer.Argument(metavar="PROVIDER", help="Provider: runpod, shadeform, aws, modal, ssh or local.")
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
    if policy:
        _print_policy(provider_policy(provider, store=store))
        return
    done = setup_provider(
        provider,
        store=store,
        dry_run=dry_run,
        agrees=lambda question: output.ask(question, yes=yes),
        ask_key=_ask_key if sys.stdin.isatty() else None,
    )
    output.emit("setup/1", done.to_dict())
    for check in done.checks:
        if check.state in ("ok", "warning", "fault"):
            output.say(f"{check.state}: {check.name}: {check.text}")
    if dry_run:
        output.say("Nothing was created.")
    done.raise_fault()
    output.say(f"Next: homing offers --provider {provider}")


def _print_policy(policy: dict[str, Any]) -> None:
    output.emit("policy/1", {"policy": policy})
    if not output.is_json():
        print(json.dumps(policy, indent=2))


def _ask_key(name: str, path: Path) -> str:
    return getpass.getpass(f"{name} (hidden; saved in {path}, readable only by you; leave empty to skip): ")
