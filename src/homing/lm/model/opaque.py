"""Ops that torch.compile does not look into: it plans everything around them, and calls them as they are.

    @opaque("swiglu", like=...)     `like` says of given tensors what comes out, in shapes and types alone

torch's own decorator for this looks after gradients, changed arguments and shared memory at every call, on the host,
and a small batch waits for it. Ours are called from autograd functions that know all that, so they are
registered plainly. No op may change its arguments or return one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["opaque"]

_LIBRARY = torch.library.Library("homing", "DEF")


def opaque(name: str, *, like: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(compute: Callable[..., Any]) -> Callable[..., Any]:
        schema = name + torch.library.infer_schema(compute, mutates_args=())
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, compute, "CompositeExplicitAutograd")
        torch.library.register_fake(f"homing::{name}", like, lib=_LIBRARY)
        op: Callable[..., Any] = getattr(torch.ops.homing, name).default
        return op

    return register
