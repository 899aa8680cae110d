"""boto3 reads megabytes that describe its services, and makes their classes, anew in each session. Tests open hundreds
of sessions: here one copy of these descriptions serves all of them."""

from __future__ import annotations

import functools
from typing import Any

import boto3
import botocore.client
import botocore.loaders
import botocore.session

__all__ = ["share_models"]

_create_methods = botocore.client.ClientCreator._create_methods
_setup_loader = boto3.session.Session._setup_loader
_methods: dict[tuple[str, str], dict[str, Any]] = {}


def share_models() -> None:
    botocore.session.create_loader = _loader
    botocore.client.ClientCreator._create_methods = _shared_methods
    boto3.session.Session._setup_loader = _set_up_once


@functools.cache
def _loader(search_path: str | None = None) -> Any:
    return botocore.loaders.create_loader(search_path)


def _shared_methods(self: Any, service_model: Any) -> dict[str, Any]:
    key = (service_model.service_name, service_model.api_version)
    if key not in _methods:
        _methods[key] = _create_methods(self, service_model)
    return dict(_methods[key])


def _set_up_once(self: Any) -> None:
    """boto3 appends its own folder once per session."""
    _setup_loader(self)
    paths = self._loader.search_paths
    paths[:] = dict.fromkeys(paths)
