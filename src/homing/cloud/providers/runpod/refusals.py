"""Interprets RunPod's refusals: only the message distinguishes lack of capacity from a bad request."""

from __future__ import annotations

from homing.cloud.providers.base import Request
from homing.cloud.providers.rest import Unwelcome
from homing.cloud.providers.runpod.machine import KEY_ENV
from homing.errors import NoOffer, ProviderRefused

__all__ = ["CONSOLE", "not_ours", "refused"]

CONSOLE = "https://console.runpod.io"
_NO_CAPACITY = ("no longer any instances available", "not enough free gpus")


def refused(exc: Unwelcome, request: Request) -> NoOffer | ProviderRefused:
    plan = request.order.words.to("plan")
    if exc.status == 400 and any(words in exc.text.lower() for words in _NO_CAPACITY):
        return NoOffer(
            what=f"runpod cannot start {request.offer.name} now.",
            why=exc.text,
            fix=f"Choose another offer: {plan}",
        )
    known = {
        402: ("The RunPod balance is too low to start a pod.", f"Add credit: {CONSOLE}/user/billing"),
        403: (
            f"This RunPod key may not start {request.offer.name}.",
            f"Grant {KEY_ENV} write access to pods at {CONSOLE}/user/settings, or choose another offer: {plan}",
        ),
        404: (
            "RunPod does not know the template or registry credentials of the pod.",
            "Check cloud.runpod.template and .registry",
        ),
        422: ("RunPod rejected this pod.", "Check cloud.runpod in the run file: homing explain cloud.runpod"),
    }
    what, fix = known.get(exc.status, (exc.what, exc.fix))
    return Unwelcome(what, exc.why, fix, status=exc.status, text=exc.text)


def not_ours(thing_id: str, prefix: str) -> ProviderRefused:
    return ProviderRefused(
        what=f"{thing_id} does not belong to this home.",
        why=f"Resources of this home start with {prefix}",
        fix="homing runs",
    )
