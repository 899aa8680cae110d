"""Checks that API keys are sent only to addresses that use HTTPS or are on this computer.

api_address(environment, "RUNPOD_API_URL", default)   the address from the environment, else the provider's default
check_address(url, source)                            the same check for an address that an SDK chose itself
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

from homing.errors import UsageError

__all__ = ["api_address", "check_address"]


def api_address(environment: Mapping[str, str], name: str, default: str) -> str:
    """Return the address set in this environment variable, or the default, without a trailing slash.

    Raises UsageError for plain HTTP, except to this computer.
    """
    return check_address((environment.get(name) or default).rstrip("/"), name)


def check_address(url: str, source: str) -> str:
    """Return the address unchanged, or raise UsageError if a key would be sent to it unencrypted."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError as exc:
        raise _refused(url, source, f"The address is not valid: {exc}.") from exc
    if parts.scheme == "https" and host:
        return url
    if parts.scheme == "http" and _is_loopback(host):
        return url
    if parts.scheme == "http":
        raise _refused(
            url, source, "Over plain HTTP, anyone on the network path can read the API key and change the responses."
        )
    raise _refused(url, source, "The address does not start with https:// and a host name.")


def _refused(url: str, source: str, why: str) -> UsageError:
    shown = url.rpartition("@")[2].partition("?")[0]  # the URL without user name, password and token
    return UsageError(
        what=f"{source} points to {shown!r}; nothing was sent.",
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
