"""What RunPod's refusals mean: no capacity is told apart from a bad request by its words alone."""

from __future__ import annotations

from homing.cloud.providers.base import Request
from homing.cloud.providers.rest import Unwelcome
from homing.cloud.providers.runpod_pod import KEY_ENV
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
            fix=f"Take another offer: {plan}",
        )
    told = {
        402: ("RunPod's balance is too low to start anything.", f"Add credit: {CONSOLE}/user/billing"),
        403: (
            f"RunPod does not let this key start {request.offer.name}.",
            f"Give {KEY_ENV} the right to write pods at {CONSOLE}/user/settings, or take another offer: {plan}",
        ),
        404: ("RunPod does not know what the pod was to be made of.", "Check cloud.runpod.template and .registry"),
        422: ("RunPod does not accept this pod.", "Check cloud.runpod in the run file: homing explain cloud.runpod"),
    }
    what, fix = told.get(exc.status, (exc.what, exc.fix))
    return Unwelcome(what, exc.why, fix, status=exc.status, text=exc.text)


def not_ours(thing_id: str, prefix: str) -> ProviderRefused:
    return ProviderRefused(what=f"{thing_id} is not ours.", why=f"Ours begin with {prefix}", fix="homing runs")
