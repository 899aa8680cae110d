"""Registers ops that torch.compile treats as opaque: it optimizes around them and calls them unchanged.

    @opaque("swiglu", like=...)     `like` is a function that returns empty outputs of the right shape and dtype

At every call, torch's own decorator checks gradients, mutated arguments and aliasing on the host, which slows down
small batches. Our ops are called from autograd functions that make these checks unnecessary, so they are registered
directly. An op must not mutate its arguments or return one of them.
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
