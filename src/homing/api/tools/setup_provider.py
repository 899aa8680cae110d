"""Run a provider's first-time setup. Each step is announced first and safe to repeat. Implements `homing setup`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homing.api import dotenv, notices
from homing.api.confirmation import Agrees, refuse
from homing.api.lookup.find_runs import open_home
from homing.cloud.api_key_table import ACCOUNTS, Account
from homing.cloud.home import Home
from homing.cloud.providers.aws.policy import policy_document
from homing.cloud.providers.registry import PROVIDERS, configured
from homing.cloud.setup import Step, steps_for, write_key
from homing.doctor.check import Check
from homing.doctor.provider_accounts import check_providers
from homing.doctor.subject import Examined
from homing.errors import ProviderRefused, UsageError
from homing.store.address import parse_s3

__all__ = ["AskKey", "SetUp", "provider_policy", "setup_provider"]

AskKey = Callable[[str, Path], str]  # (variable name, file that will store it) -> the key; "" for none


@dataclass(frozen=True)
class SetUp:
    provider: str
    steps: list[Step]
    made: list[Step]
    checks: list[Check]

    def raise_fault(self) -> None:
        """Raise ProviderRefused if one of the provider's checks failed."""
        for check in self.checks:
            if check.state == "fault":
                raise ProviderRefused(what=f"{self.provider} is not ready: {check.text}", fix=check.fix)

    def to_dict(self) -> dict[str, Any]:
        return {
            "provider": self.provider,
            "steps": [{"text": step.text, "is_done": step.is_done or step in self.made} for step in self.steps],
            "checks": [{"name": check.name, "state": check.state, "text": check.text} for check in self.checks],
        }


def setup_provider(
    provider: str,
    *,
    store: str = "",
    dry_run: bool = False,
    agrees: Agrees = refuse,
    ask_key: AskKey | None = None,
) -> SetUp:
    """Create what a provider needs: API key, SSH key, store and other one-time steps. Safe to repeat.

    `agrees` is called before each step; `dry_run` creates nothing. `ask_key` is called to prompt for a missing API key,
    which is then written to .env; without `ask_key`, a missing key is an error.
    """
    _check_name(provider)
    with open_home() as home:
        account = ACCOUNTS.get(provider)
        is_set = account is None or account.is_set(home.world.environment(), home.world)
        if account is not None and not is_set and provider not in configured(home.path, home.world):
            _take_key(account, home, None if dry_run else ask_key)
        steps = steps_for(provider, home, store)
        if provider == "aws":
            notices.say("Show the permissions your AWS user needs: homing setup aws --policy")
        for step in steps:
            notices.say(f"{'exists' if step.is_done else 'to create'}: {step.text}{_costs(step)}")
        todo = [step for step in steps if not step.is_done]
        made = [] if dry_run else _do(todo, agrees)
        checks = check_providers(Examined(home, Path.cwd(), named=(provider,)))
    return SetUp(provider, steps, made, checks)


def provider_policy(provider: str, *, store: str = "") -> dict[str, Any]:
    """Return the IAM policy that an AWS user needs. `store`: an s3:// URL, to name its bucket."""
    _check_name(provider)
    if provider != "aws":
        raise UsageError(
            what="--policy applies only to aws.",
            why=f"{provider} has no IAM policies.",
            fix="homing setup aws --policy",
        )
    document: dict[str, Any] = json.loads(policy_document(parse_s3(store).bucket if store.startswith("s3:") else ""))
    return document


def _check_name(provider: str) -> None:
    if provider not in PROVIDERS:
        raise UsageError(
            what=f"Unknown provider: {provider!r}." if provider else "No provider given.",
            why=f"Known providers: {', '.join(sorted(PROVIDERS))}.",
            fix="homing setup runpod",
        )


def _take_key(account: Account, home: Home, ask_key: AskKey | None) -> None:
    """Prompt for the key and write it to .env. Without `ask_key`, raise UsageError."""
    path = Path.cwd() / dotenv.FILE
    login = f"   or: {account.login}" if account.login else ""
    if ask_key is None:
        lines = ", ".join(f"{name}=..." for name in account.keys)
        raise UsageError(
            what=f"No API key for {account.title}.",
            why=f"Not set: {' and '.join(account.keys)}. Create a key at {account.key_page}",
            fix=f"Add to {path} (chmod 600): {lines}{login}",
        )
    notices.say(f"Create a key at {account.key_page}{login}")
    for name in account.keys:
        value = ask_key(name, path).strip()
        if not value:
            raise UsageError(what=f"No API key for {account.title}.", fix=f"homing setup {account.name}")
        write_key(path, name, value, home)
    dotenv.load(path.parent)
    if home.world.exists(path.parent / ".git"):
        ignored = home.world.run(["git", "-C", str(path.parent), "check-ignore", "-q", str(path)], timeout_s=10.0)
        if ignored.code:
            notices.say(f"warning: git does not ignore {path}. To ignore it: echo .env >> .gitignore")


def _do(todo: list[Step], agrees: Agrees) -> list[Step]:
    made = []
    for step in todo:
        if not agrees(f"Create {step.text}{_costs(step)}?"):
            notices.say("  skipped")
            continue
        step.do()
        made.append(step)
        notices.say("  created")
    return made


def _costs(step: Step) -> str:
    return f" ({step.costs})" if step.costs else ""
