"""Checks of the providers and the Hub: is there a key, does it work, are its permissions sufficient, are there offers?

All providers are checked in parallel, with a deadline. The checks of each provider, in order:
key -> list_owned -> its own checks() -> balance -> offers
"""

from __future__ import annotations

import json
from decimal import Decimal
from functools import partial
from typing import Any, cast

from homing.cloud.api_key_table import ACCOUNTS, Account
from homing.cloud.home import Home
from homing.cloud.ledger.mark import owner_prefix
from homing.cloud.ledger.meter import billing_lines
from homing.cloud.plan.plan import needs_of
from homing.cloud.providers.base import Configurable, Provider
from homing.cloud.providers.registry import PROVIDERS, configured, open_provider
from homing.doctor.check import Check, Checked, Prepaid, check_balance, fault, ok, skipped, warning
from homing.doctor.subject import Examined
from homing.errors import HomingError, MissingExtra, UsageError
from homing.hub_token import token_in
from homing.units import counted
from homing.wire.run_json import Run
from homing.world import HttpRequest, NetworkError

__all__ = ["check_hub", "check_providers"]

ANSWER_S = 45.0
_DUMMY_OWNER = "000000"  # placeholder for the owner id, because a check must not create an owner id


def check_providers(examined: Examined) -> list[Check]:
    found = list[Check]()
    names = [name for name in examined.providers if name in PROVIDERS]
    for name in examined.providers:
        if name not in PROVIDERS:
            text = f"Unknown provider: {name!r}."
            found.append(fault(f"{name}.known", text, f"Use one of: {', '.join(sorted(PROVIDERS))}"))
    for name, answer in zip(names, _ask_all(names, examined), strict=True):
        if isinstance(answer, TimeoutError):
            found.append(_silent(name, f"No answer within {ANSWER_S:g} s."))
        elif isinstance(answer, Exception):
            raise answer
        else:
            found += answer
    unset = [name for name in ACCOUNTS if name in PROVIDERS and name not in names]
    return [*found, *(_unset(ACCOUNTS[name], examined, is_needed=False) for name in unset)]


def _ask_all(names: list[str], examined: Examined) -> list[Any]:
    """Check all providers in parallel, and show the user which of them have not responded yet."""
    waiting = list(names)

    def notify() -> None:
        if waiting:
            examined.notify(f"{', '.join(waiting)} (at most {ANSWER_S:g} s)")

    def ask(name: str) -> list[Check]:
        try:
            return _check_provider(name, examined)
        finally:
            if name in waiting:  # if the provider responds after the deadline, the list has already been cleared
                waiting.remove(name)
                notify()

    notify()
    answers = examined.home.world.together([partial(ask, name) for name in names], ANSWER_S)
    waiting.clear()
    return answers


def check_hub(examined: Examined) -> list[Check]:
    """Check that the Hub accepts the token, if one is set, and that the token has write access."""
    account, world = ACCOUNTS["hub"], examined.home.world
    token, source = token_in(world.environment())
    is_needed = examined.run is not None and examined.run.store.startswith("hf:")
    if not token:
        text = f"HF_TOKEN is not set; `{account.login}` may have saved a token."
        return [skipped("hub.token", text, f"{account.login}   or export HF_TOKEN=...", account.key_page)]
    url = (world.environment().get(account.url_env) or account.url).rstrip("/") + "/api/whoami-v2"
    try:
        reply = world.http(HttpRequest("GET", url, {"authorization": f"Bearer {token}"}, timeout_s=20.0))
    except NetworkError as exc:
        make = fault if is_needed else warning
        return [make("hub.token", f"Cannot reach the Hub: {exc}", "Try again in a minute.", account.usage_page)]
    return [_judge_token(source, reply.status, reply.body, account, is_needed=is_needed)]


def _judge_token(source: str, status: int, body: bytes, account: Account, *, is_needed: bool) -> Check:
    fix = f"Create a token with write access, then: export {source}=..."
    if status != 200:
        return fault("hub.token", f"The Hub rejects {source} with HTTP status {status}.", fix, account.key_page)
    try:
        token = json.loads(body)["auth"]["accessToken"]
        role = str(token["role"])
    except (ValueError, KeyError, TypeError):
        return warning("hub.token", f"The Hub does not report what {source} may do.", fix, account.key_page)
    if role == "read":
        make = fault if is_needed else warning
        return make("hub.token", f"{source} has read-only access.", fix, account.key_page)
    return ok("hub.token", f"{source} is valid; its role is {role}.")


def _check_provider(name: str, examined: Examined) -> list[Check]:
    home, account = examined.home, ACCOUNTS.get(name)
    try:
        is_set = account is None or account.is_set(home.world.environment(), home.world)
        if account is not None and not is_set and name not in configured(home.path, home.world):
            return [_unset(account, examined, is_needed=examined.is_needed)]
        provider = _open(name, examined)
        if examined.run is not None:
            _configure(provider, name, examined.run)
        provider.list_owned()
    except MissingExtra as exc:
        return [fault(f"{name}.client", f"{exc.what} {exc.why}", exc.fix)]
    except UsageError as exc:
        # This provider needs more than an account, such as a host or a running server. Report a fault only if the user
        # named the provider or a run.
        make = fault if examined.is_needed else skipped
        return [make(f"{name}.key", " ".join(f"{exc.what} {exc.why}".split()), exc.fix)]
    except (HomingError, OSError) as exc:
        return [_refused(name, exc)]
    found = [ok(f"{name}.key", "The key works and can list instances.")]
    if isinstance(provider, Checked):
        found += _ask_itself(provider, name)
    if isinstance(provider, Prepaid):
        limit = examined.run.limits.spend_usd if examined.run is not None else None
        found.append(check_balance(provider, None if limit is None else Decimal(limit)))
    return [*found, *_check_offers(provider, name, examined)]


def _ask_itself(provider: Checked, name: str) -> list[Check]:
    """Return the results of the provider's own checks, or one fault if the provider no longer responds."""
    try:
        return provider.checks()
    except (HomingError, OSError) as exc:
        return [_refused(name, exc, "checks")]


def _check_offers(provider: Provider, name: str, examined: Examined) -> list[Check]:
    if examined.run is None:
        return []
    try:
        offers = provider.offers(needs_of(examined.run))
    except (HomingError, OSError) as exc:
        return [_refused(name, exc, "offers")]
    if offers:
        return [ok(f"{name}.offers", f"{len(offers)} offers fit {examined.run.name}.")]
    fix = (
        f"homing offers --provider {name} --all-configs   Then change cloud.gpu or limits.rate, or use a smaller model"
    )
    make = fault if examined.providers == [name] else warning
    return [make(f"{name}.offers", f"No current offer fits {examined.run.name}.", fix, provider.page)]


def _open(name: str, examined: Examined) -> Provider:
    home = examined.home
    if home.world.exists(home.path / "owner"):
        return home.provider(name)
    return open_provider(name, home=home.path, owner=_DUMMY_OWNER, world=home.world)


def _configure(provider: Provider, name: str, run: Run) -> None:
    settings: Any = run.cloud.ssh if name == "ssh" else run.cloud.settings.get(name)
    if settings is not None:
        cast(Configurable, provider).configure(settings)


def _unset(account: Account, examined: Examined, *, is_needed: bool) -> Check:
    text = f"{account.title} is not set up: no {' or '.join(account.keys)} in the environment."
    login = f"   or {account.login}" if account.login else ""
    fix = f"export {account.keys[0]}=...{login}, then: homing setup {account.name}"
    num_open = _open_lines(account.name, examined.home)
    if num_open is not None:
        text += f" Runs were launched there before, and without a key, homing cannot check whether {_left(num_open)}."
        return (fault if is_needed or num_open else warning)(f"{account.name}.key", text, fix, account.usage_page)
    return (fault if is_needed else skipped)(f"{account.name}.key", text, fix, account.key_page)


def _left(num_open: int) -> str:
    if num_open:
        return f"{counted(num_open, 'instance')} in the ledger {'is' if num_open == 1 else 'are'} still billing"
    return "anything was left there. According to the ledger, everything ended"


def _open_lines(name: str, home: Home) -> int | None:
    """Return how many instances there may still be billing, or None if nothing was ever launched there."""
    try:
        if not (home.has_owner and home.has_ledger) or name not in home.ledger.providers(owner_prefix(home.owner)):
            return None
        return sum(line.provider == name for line in billing_lines(home.ledger.open_lines()))
    except (HomingError, OSError):  # another check reports an unreadable ledger
        return None


def _refused(name: str, exc: HomingError | OSError, question: str = "key") -> Check:
    account = ACCOUNTS.get(name)
    text = " ".join((f"{exc.what} {exc.why}" if isinstance(exc, HomingError) else str(exc)).split())
    fix = exc.fix if isinstance(exc, HomingError) else ""
    page = account.key_page if account else ""
    return fault(f"{name}.{question}", text, fix or "Try again in a minute.", page)


def _silent(name: str, text: str) -> Check:
    account = ACCOUNTS.get(name)
    fix = "Check that the provider is up and that no proxy or firewall blocks it."
    return fault(f"{name}.key", text, fix, account.usage_page if account else "")
