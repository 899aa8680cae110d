"""Checks which account rented an instance. A key cannot see other accounts' instances, which may still be billing.

    check_account   called before an instance counts as gone: raises OtherAccount, or the provider's error
    note_account    records that an instance visible to a key is in that key's account
    check_own       makes sure that a guard resumes a run only in the account where the run started
    vouch           records the user's assurance that this key belongs to the account that rented the instance

An account is identified by the provider's name for it (a number, a workspace or a user), or by a hash of the key if the
API does not report a name. None in the ledger means that the account is unknown. In that case, the current key is
assumed to be the right one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from homing.cloud.api_key_table import ACCOUNTS
from homing.cloud.ask_providers import ask_all
from homing.cloud.home import Home
from homing.cloud.ledger.ledger import LedgerLine
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
        if not _is_unreported(rented, here[0]):
            with contextlib.suppress(HomingError):  # the instance is visible to this key, so its account is known
                home.ledger.update(line.mark, account=here[0])
        return
    _check_known(provider.name, rented, here[0], f"homing destroy {line.run_id or line.mark}")
    raise OtherAccount(
        what=f"{line.mark} may be billing: the current key does not belong to the account that rented it.",
        why=_why(provider.name, rented, here[0]),
        fix=_fix(provider, line),
    )


def is_elsewhere(home: Home, line: LedgerLine) -> bool:
    """Return True if the instance is known to be in a different account.

    If the provider cannot be queried, the account does not count as different.
    """
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
    """Record the account of instances that this key can see, unless the provider's name for it is already recorded.

    This is not urgent, because these instances are visible, and a guard has more important work. So one request is sent
    for all of them, with a deadline. If the provider does not answer, it is not queried again for a while.
    """
    unsure = [line for line in lines if line.account is None or line.account.startswith(KEY_ACCOUNT)]
    now, since = home.world.monotonic(), home.unanswered_at.get(provider.name)
    if not unsure or (since is not None and now - since < _ASK_AGAIN_S):
        return
    account = ask_all({provider.name: provider.account}, home.world, patience_s)[provider.name]
    if not isinstance(account, str):
        home.unanswered_at[provider.name] = now
        return
    with home.ledger.at_once():
        for line in unsure:
            if account != line.account:
                home.ledger.update(line.mark, account=account)


def check_own(home: Home, provider_name: str, lines: Sequence[LedgerLine]) -> None:
    """Raise OtherAccount if this key belongs to another account, because no user is present to agree to pay from it."""
    before = [line for line in lines if line.provider == provider_name and line.account is not None]
    if not before:
        return
    rented, here = str(before[-1].account), names_of(home.provider(provider_name))
    if rented not in here:
        name = before[-1].run_id
        _check_known(provider_name, rented, here[0], f"homing launch {name} --resume")
        raise OtherAccount(
            what=f"The current {provider_name} key does not belong to the account that {name} started in.",
            why=_why(provider_name, rented, here[0]),
            fix=f"{use_again(provider_name)}, or resume in this account: homing launch {name} --resume",
        )


def accounts_unseen(home: Home, lines: Sequence[LedgerLine]) -> list[str]:
    """Return a sentence for each provider with accounts in the ledger that the current key does not belong to.

    Resources that the user keeps in such an account continue to bill, but no list shows them. Accounts known only by a
    hash of their key are left out, because a new key alone does not mean a different account.
    """
    rented: dict[str, set[str]] = {}
    for line in lines:
        if line.account is not None and not line.account.startswith(KEY_ACCOUNT) and home.is_ours(line.mark):
            rented.setdefault(line.provider, set()).add(line.account)
    notes = []
    for name, here in ask_all({name: home.provider(name).account for name in rented}, home.world).items():
        is_known = isinstance(here, str) and not here.startswith(KEY_ACCOUNT)
        others = sorted(rented[name] - {here}) if is_known else []
        if others:
            kept = ", ".join(others)
            notes.append(f"{name}: the current key belongs to {here}, so homing cannot list any resources in {kept}.")
    return notes


def vouch(home: Home, lines: Sequence[LedgerLine]) -> list[str]:
    """Set these lines' account to this key's account, as confirmed by the user. Return the changes as sentences.

    If the provider or the ledger fails, the line stays unchanged and the result contains a warning. The caller still
    tries to destroy the instance.
    """
    notes = []
    for line in lines:
        try:
            here = home.provider_of(line).account()
            home.ledger.update(line.mark, account=here)
        except (HomingError, OSError) as exc:
            why = (str(exc) or type(exc).__name__).splitlines()[0]
            notes.append(f"warning: Could not record that {line.mark} is in the current key's account: {why}")
            continue
        if line.account is not None and line.account != here:
            notes.append(
                f"{line.mark} was rented by {line.account}; as you confirmed,"
                f" your {line.provider} key belongs to the same account."
            )
    return notes


def say(exc: HomingError) -> str:
    """Return the error's `what`, `why` and `fix`, joined into one line."""
    return " ".join(part for part in (exc.what, exc.why, exc.fix) if part)


def _check_known(provider_name: str, rented: str, here: str, command: str) -> None:
    if not _is_unreported(rented, here):
        return
    by_hand = f"{command} --same-account" if "destroy" in command else command
    raise ProviderSilent(
        what=f"{provider_name} currently does not report which account this key belongs to.",
        why=f"The account that rented the instance is {rented}.",
        doubt="Instances that this key cannot see may keep billing.",
        fix=f"Try again in a minute: homing runs   or, if this key has no permission to query its account: {by_hand}",
    )


def _is_unreported(rented: str, here: str) -> bool:
    """Return True if the provider identified the account earlier but now only a hash of the key is available.

    A missing account name alone does not mean that the account is different.
    """
    return here.startswith(KEY_ACCOUNT) and not rented.startswith(KEY_ACCOUNT)


def _rented(home: Home, line: LedgerLine) -> str | None:
    """Return the line's account from the ledger, or from `line` if the ledger cannot be read (full disk)."""
    with contextlib.suppress(HomingError):
        return home.ledger.account(line.mark) or line.account
    return line.account


def _why(provider_name: str, rented: str, here: str) -> str:
    text = f"It was rented with {_words(rented)}; the current one is {_words(here)}, which sees only its own account."
    if rented.startswith(KEY_ACCOUNT) or here.startswith(KEY_ACCOUNT):
        text += f" {provider_name} does not report whether both belong to the same account."
    return text


def _words(account: str) -> str:
    is_key = account.startswith(KEY_ACCOUNT)
    return f"the key {account.removeprefix(KEY_ACCOUNT)}" if is_key else f"a key from {account}"


def _fix(provider: Provider, line: LedgerLine) -> str:
    destroy, look = f"homing destroy {line.run_id or line.mark}", f"   or see {provider.page}" if provider.page else ""
    return (
        f"{use_again(provider.name)}, then: {destroy}{look}"
        f"   or, if the current key is from the same account: {destroy} --same-account"
    )


def use_again(provider_name: str) -> str:
    account = ACCOUNTS.get(provider_name)
    if account is None:
        return "Use the key of that account again"
    profile = " or its profile" if account.login else ""
    return f"Use the key of that account again ({', '.join(account.keys)}{profile})"
