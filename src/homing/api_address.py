"""The addresses that API keys are sent to: HTTPS, or this computer itself.

api_address(environment, "RUNPOD_API_URL", default)   the address from the environment, else the provider's own
check_address(url, source)                            the same check for an address that an SDK has found by itself
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

from homing.errors import UsageError

__all__ = ["api_address", "check_address"]


def api_address(environment: Mapping[str, str], name: str, default: str) -> str:
    """The address in this variable without a trailing slash, or the default; raises UsageError for plain HTTP."""
    return check_address((environment.get(name) or default).rstrip("/"), name)


def check_address(url: str, source: str) -> str:
    """Returns the address unchanged; raises UsageError where a key would travel to it unencrypted."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError as exc:
        raise _refused(url, source, f"It is not a valid address: {exc}.") from exc
    if parts.scheme == "https" and host:
        return url
    if parts.scheme == "http" and _is_loopback(host):
        return url
    if parts.scheme == "http":
        raise _refused(url, source, "Over plain HTTP everyone on the way can read the API key and change the answers.")
    raise _refused(url, source, "It does not begin with https:// and the name of a host.")


def _refused(url: str, source: str, why: str) -> UsageError:
    shown = url.rpartition("@")[2].partition("?")[0]  # no user, password or token
    return UsageError(
        what=f"{source} points to {shown!r}, and nothing was sent there.",
        why=why,
        fix=f"Unset {source}, or use an https:// address (plain HTTP only on this computer: http://127.0.0.1:PORT)",
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
