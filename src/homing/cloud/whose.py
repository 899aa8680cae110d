"""Whose account rented a line: what another account's key does not show may live and bill, and is never gone.

    check_account   before anything is taken for gone: raises OtherAccount, or what the provider raises when asked
    note_account    what a key shows lives in the account of that key
    check_own       a guard goes on with a run in the account that it was begun in, or not at all
    vouch           a person's word that the key here is of the account that rented it

An account is what its provider calls it: a number, a workspace, a user; where an API tells nothing, a hash of the key.
None in the ledger is a line from before accounts were written down: the key at hand is taken for the right one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from homing.cloud.accounts import ACCOUNTS
from homing.cloud.ask import ask_all
from homing.cloud.home import Home
from homing.cloud.ledger import LedgerLine
from homing.cloud.providers.base import KEY_ACCOUNT, Provider
from homing.errors import HomingError, OtherAccount

__all__ = ["check_account", "check_own", "is_elsewhere", "note_account", "say", "vouch"]


def check_account(home: Home, provider: Provider, line: LedgerLine) -> None:
    rented = _rented(home, line)
    if rented is None:
        return
    here = provider.account()
    if here == rented:
        return
    if line.instance_id is not None and provider.describe(line.instance_id).state != "gone":
        with contextlib.suppress(HomingError):  # this key shows it, so it speaks for it
            home.ledger.update(line.mark, account=here)
        return
    raise OtherAccount(
        what=f"{line.mark} may bill: the key here is not of the account that rented it.",
        why=_why(provider.name, rented, here),
        fix=_fix(provider, line),
    )


def is_elsewhere(home: Home, line: LedgerLine) -> bool:
    """Whether it is known to be another account's. One that cannot be asked is not another one."""
    try:
        check_account(home, home.provider_of(line), line)
    except OtherAccount:
        return True
    except (HomingError, OSError):
        return False
    return False


def note_account(home: Home, provider: Provider, line: LedgerLine) -> None:
    """Asked only where it may be news: of a line from before, and where a changed key looks like a changed account."""
    if line.account is not None and not line.account.startswith(KEY_ACCOUNT):
        return
    # With a deadline: it is shown and alive, so nothing hangs on this today, and a guard has more to look at.
    told = ask_all({provider.name: provider.account}, home.world)[provider.name]
    if isinstance(told, str) and told != line.account:
        home.ledger.update(line.mark, account=told)


def check_own(home: Home, provider_name: str, lines: Sequence[LedgerLine]) -> None:
    """Nobody is there to be asked whether another account shall pay for it."""
    before = [line for line in lines if line.provider == provider_name and line.account is not None]
    if not before:
        return
    rented, here = str(before[-1].account), home.provider(provider_name).account()
    if here != rented:
        name = before[-1].run_id
        raise OtherAccount(
            what=f"The key for {provider_name} here is not of the account that {name} was begun in.",
            why=_why(provider_name, rented, here),
            fix=f"{_use_again(provider_name)}, or go on in this one by hand: homing launch {name} --resume",
        )


def vouch(home: Home, lines: Sequence[LedgerLine]) -> list[LedgerLine]:
    """Writes the account of the key here into these lines. Returns those that named another one before."""
    changed = []
    for line in lines:
        here = home.provider_of(line).account()
        if line.account is not None and line.account != here:
            changed.append(line)
        home.ledger.update(line.mark, account=here)
    return changed


def say(exc: HomingError) -> str:
    """In one line: what, why and what to do."""
    return " ".join(part for part in (exc.what, exc.why, exc.fix) if part)


def _rented(home: Home, line: LedgerLine) -> str | None:
    """As it stands now, or as it was read where the ledger cannot be (a full disk)."""
    with contextlib.suppress(HomingError):
        return home.ledger.account(line.mark) or line.account
    return line.account


def _why(provider_name: str, rented: str, here: str) -> str:
    text = f"It was rented by {_words(rented)}; the one here is {_words(here)}, which does not show what is of another."
    if rented.startswith(KEY_ACCOUNT) or here.startswith(KEY_ACCOUNT):
        text += f" Whether both are of one account {provider_name} does not tell."
    return text


def _words(account: str) -> str:
    is_key = account.startswith(KEY_ACCOUNT)
    return f"the key {account.removeprefix(KEY_ACCOUNT)}" if is_key else f"a key of {account}"


def _fix(provider: Provider, line: LedgerLine) -> str:
    destroy, look = f"homing destroy {line.run_id or line.mark}", f"   or see {provider.page}" if provider.page else ""
    return (
        f"{_use_again(provider.name)}, then: {destroy}{look}"
        f"   or, if the key here is of that account too: {destroy} --same-account"
    )


def _use_again(provider_name: str) -> str:
    account = ACCOUNTS.get(provider_name)
    if account is None:
        return "Use the key of that account again"
    profile = " or its profile" if account.login else ""
    return f"Use the key of that account again ({', '.join(account.keys)}{profile})"
