"""Whose the key is and what is left of the credit at RunPod: its REST API tells neither, and its older GraphQL does.

Each is one question without side effects, asked once. A key without that right or an answer of another shape is None:
then nobody knows, and nothing is guessed. Of the balance, which nothing hangs on, so is no answer.
"""

from __future__ import annotations

import logging

from homing.cloud.doctor_balance import Balance
from homing.cloud.figures import MOST_USD, read_figure
from homing.cloud.providers.rest import Api, Unsure, Unwelcome
from homing.errors import ProviderRefused, ProviderSilent

__all__ = ["GRAPHQL", "read_account", "read_balance"]

log = logging.getLogger(__name__)
GRAPHQL = "/graphql"  # beside /v2
_QUERY = "query { myself { clientBalance currentSpendPerHr } }"
_WHO = "query { myself { id } }"


def read_balance(api: Api) -> Balance | None:
    """`api` is that of the account, at the address above /v2."""
    try:
        body = api.post(GRAPHQL, {"query": _QUERY})
        told = body["data"]["myself"]
        left = read_figure(told["clientBalance"], MOST_USD, least=-MOST_USD)  # an account may owe
        rate = read_figure(told["currentSpendPerHr"] or 0, MOST_USD)
        if left is not None and rate is not None:
            return Balance(left, rate)
        log.warning("runpod tells a balance that cannot be right: %.100r", told)
    except (Unsure, ProviderRefused) as exc:
        log.info("runpod told nothing of its balance: %s", exc)
    except (KeyError, TypeError):  # GraphQL says no with 200, `errors` and no data
        log.info("runpod's answer has no balance in it: %s", body.get("errors"))
    return None


def read_account(api: Api) -> str | None:
    """The account's own id, which stays when its keys change. Raises where nobody answers: that is no other account."""
    try:
        body = api.post(GRAPHQL, {"query": _WHO})
        return str(body["data"]["myself"]["id"])
    except Unsure as exc:
        raise ProviderSilent(
            what="runpod cannot be asked now whose key this is.",
            why=f"{exc}.",
            doubt="What this key does not show may bill on.",
            fix="Try again in a minute: homing runs",
        ) from exc
    except Unwelcome as exc:
        if exc.status != 403:
            raise
        log.info("runpod does not tell this key whose it is: %s", exc.why)
    except (KeyError, TypeError):
        log.info("runpod's answer does not say whose key it is: %s", body.get("errors"))
    return None
