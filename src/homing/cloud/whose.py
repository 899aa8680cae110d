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
from homing.cloud.providers.base import KEY_ACCOUNT, Provider, names_of
from homing.errors import HomingError, OtherAccount, ProviderSilent

__all__ = ["accounts_unseen", "check_account", "check_own", "is_elsewhere", "note_account", "say", "use_again", "vouch"]

_ASK_AGAIN_S = 600.0


def check_account(home: Home, provider: Provider, line: LedgerLine) -> None:
    rented = _rented(home, line)
    if rented is None:
        return
    here = names_of(provider)
    if rented in here:
        return
    if line.instance_id is not None and provider.describe(line.instance_id).state != "gone":
        if not _is_untold(rented, here[0]):
            with contextlib.suppress(HomingError):  # this key shows it, so it speaks for it
                home.ledger.update(line.mark, account=here[0])
        return
    _check_told(provider.name, rented, here[0], f"homing destroy {line.run_id or line.mark}")
    raise OtherAccount(
        what=f"{line.mark} may bill: the key here is not of the account that rented it.",
        why=_why(provider.name, rented, here[0]),
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


def note_account(
    home: Home, provider: Provider, lines: Sequence[LedgerLine], *, patience_s: float | None = None
) -> None:
    """Asked only where it may be news: of a line from before, and where a changed key looks like a changed account.

    They are shown and alive, so nothing hangs on this today, and a guard has more to look at: once for all of them,
    with a deadline, and whoever did not answer is not asked again for a while.
    """
    unsure = [line for line in lines if line.account is None or line.account.startswith(KEY_ACCOUNT)]
    now, since = home.world.monotonic(), home.unanswered_at.get(provider.name)
    if not unsure or (since is not None and now - since < _ASK_AGAIN_S):
        return
    told = ask_all({provider.name: provider.account}, home.world, patience_s)[provider.name]
    if not isinstance(told, str):
        home.unanswered_at[provider.name] = now
        return
    with home.ledger.at_once():
        for line in unsure:
            if told != line.account:
                home.ledger.update(line.mark, account=told)


def check_own(home: Home, provider_name: str, lines: Sequence[LedgerLine]) -> None:
    """Nobody is there to be asked whether another account shall pay for it."""
    before = [line for line in lines if line.provider == provider_name and line.account is not None]
    if not before:
        return
    rented, here = str(before[-1].account), names_of(home.provider(provider_name))
    if rented not in here:
        name = before[-1].run_id
        _check_told(provider_name, rented, here[0], f"homing launch {name} --resume")
        raise OtherAccount(
            what=f"The key for {provider_name} here is not of the account that {name} was begun in.",
            why=_why(provider_name, rented, here[0]),
            fix=f"{use_again(provider_name)}, or go on in this one by hand: homing launch {name} --resume",
        )


def accounts_unseen(home: Home, lines: Sequence[LedgerLine]) -> list[str]:
    """Accounts in the ledger that the keys here are not of, one sentence for each provider: what was kept there by
    wish bills on, and no list shows it. A changed key alone is no other account."""
    rented: dict[str, set[str]] = {}
    for line in lines:
        if line.account is not None and not line.account.startswith(KEY_ACCOUNT) and home.is_ours(line.mark):
            rented.setdefault(line.provider, set()).add(line.account)
    told = []
    for name, here in ask_all({name: home.provider(name).account for name in rented}, home.world).items():
        is_told = isinstance(here, str) and not here.startswith(KEY_ACCOUNT)
        others = sorted(rented[name] - {here}) if is_told else []
        if others:
            told.append(f"{name}: the key here is of {here} and does not show what may be kept in {', '.join(others)}.")
    return told


def vouch(home: Home, lines: Sequence[LedgerLine]) -> list[str]:
    """Writes the account of the key here into these lines. Returns what that changes, one sentence each. Where it
    cannot be asked or written, the line stays as it is, and that is said: to end it is tried all the same."""
    told = []
    for line in lines:
        try:
            here = home.provider_of(line).account()
            home.ledger.update(line.mark, account=here)
        except (HomingError, OSError) as exc:
            why = (str(exc) or type(exc).__name__).splitlines()[0]
            told.append(f"warning: Your word for {line.mark} is not taken yet: {why}")
            continue
        if line.account is not None and line.account != here:
            told.append(
                f"{line.mark} was rented by {line.account}; by your word the key for {line.provider} is of it too."
            )
    return told


def say(exc: HomingError) -> str:
    """In one line: what, why and what to do."""
    return " ".join(part for part in (exc.what, exc.why, exc.fix) if part)


def _check_told(provider_name: str, rented: str, here: str, command: str) -> None:
    if not _is_untold(rented, here):
        return
    by_hand = f"{command} --same-account" if "destroy" in command else command
    raise ProviderSilent(
        what=f"{provider_name} does not say now whose key this is.",
        why=f"The account that rented it is {rented}.",
        doubt="What this key does not show may bill on.",
        fix=f"Try again in a minute: homing runs   or, if this key may not ask and is of that account: {by_hand}",
    )


def _is_untold(rented: str, here: str) -> bool:
    """A provider that has said whose account it is, and now knows no more than the key, has not named another one."""
    return here.startswith(KEY_ACCOUNT) and not rented.startswith(KEY_ACCOUNT)


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
        f"{use_again(provider.name)}, then: {destroy}{look}"
        f"   or, if the key here is of that account too: {destroy} --same-account"
    )


def use_again(provider_name: str) -> str:
    account = ACCOUNTS.get(provider_name)
    if account is None:
        return "Use the key of that account again"
    profile = " or its profile" if account.login else ""
    return f"Use the key of that account again ({', '.join(account.keys)}{profile})"
