"""Credentials that an instance needs to reach the store: environment variables, never in a file, argv or log.

s3     AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN), region and endpoint
hf     the token under both of its names, whichever is set here, and HF_ENDPOINT if set
file   nothing
modal  the account's token, only for instances on this computer; a rented one never gets it (a sandbox has the Volume
       mounted, and other providers cannot use this store)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from homing.hub_token import NAMES, token_in
from homing.store.address import parse_modal, parse_s3, scheme_of

__all__ = ["secrets"]

_S3_AS_THEY_ARE = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_CA_BUNDLE")
_MODAL_AS_THEY_ARE = (
    "MODAL_TOKEN_ID",
    "MODAL_TOKEN_SECRET",
    "MODAL_PROFILE",
    "MODAL_CONFIG_PATH",
    "MODAL_ENVIRONMENT",
    "MODAL_SERVER_URL",
)
_HUB_AS_THEY_ARE = ("HF_ENDPOINT",)


def secrets(url: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables for the instance; empty if the user has no keys.

    A role on the machine may suffice instead.
    """
    scheme = scheme_of(url)
    if scheme == "s3":
        return {**_plain(environment, _S3_AS_THEY_ARE), **_aws_keys(url, environment)}
    if scheme == "hf":
        return {**_plain(environment, _HUB_AS_THEY_ARE), **_hub_token(environment)}
    if scheme == "modal" and not parse_modal(url).mount:
        return _plain(environment, _MODAL_AS_THEY_ARE)
    return {}


def _plain(environment: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    return {name: environment[name] for name in names if environment.get(name)}


def _aws_keys(url: str, environment: Mapping[str, str]) -> dict[str, str]:
    if environment.get("AWS_ACCESS_KEY_ID") and environment.get("AWS_SECRET_ACCESS_KEY"):
        return _plain(environment, ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"))
    from homing.store.s3.client import connect

    # From a profile, single sign-on or a role: the instance cannot read those files, so pass their current values.
    connection = connect(parse_s3(url))
    found: Any = connection.credentials
    if found is None:
        return {}
    frozen = found.get_frozen_credentials()
    named = {
        "AWS_ACCESS_KEY_ID": frozen.access_key,
        "AWS_SECRET_ACCESS_KEY": frozen.secret_key,
        "AWS_SESSION_TOKEN": frozen.token,
        "AWS_REGION": str(connection.client.meta.region_name or ""),
    }
    return {name: value for name, value in named.items() if value}


def _hub_token(environment: Mapping[str, str]) -> dict[str, str]:
    token, _ = token_in(environment)
    if not token:
        try:
            from huggingface_hub import get_token
        except ImportError:
            return {}  # opening the store reports the missing extra
        token = get_token() or ""
    return dict.fromkeys(NAMES, token) if token else {}  # on the instance, too, the first one takes precedence
