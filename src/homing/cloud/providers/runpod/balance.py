"""Account id and remaining credit at RunPod, from its older GraphQL API: the REST API has neither.

Each is one query without side effects, sent once. Both return None if the key lacks the permission or the answer has an
unexpected form; nothing is guessed. The balance, which nothing depends on, is also None if there is no answer.
"""

from __future__ import annotations

import logging

from homing.cloud.figures import MOST_USD, read_figure
from homing.cloud.providers.rest import Api, Unsure, Unwelcome
from homing.doctor.check import Balance
from homing.errors import ProviderRefused, ProviderSilent

__all__ = ["GRAPHQL", "read_account", "read_balance"]

log = logging.getLogger(__name__)
GRAPHQL = "/graphql"  # next to /v2
_QUERY = "query { myself { clientBalance currentSpendPerHr } }"
_WHO = "query { myself { id } }"


def read_balance(api: Api) -> Balance | None:
    """Return the balance, or None; `api` is the account's API at the address above /v2."""
    try:
        body = api.post(GRAPHQL, {"query": _QUERY})
        myself = body["data"]["myself"]
        left = read_figure(myself["clientBalance"], MOST_USD, least=-MOST_USD)  # an account may owe money
        rate = read_figure(myself["currentSpendPerHr"] or 0, MOST_USD)
        if left is not None and rate is not None:
            return Balance(left, rate)
        log.warning("runpod returned an invalid balance: %.100r", myself)
    except (Unsure, ProviderRefused) as exc:
        log.info("runpod returned no balance: %s", exc)
    except (KeyError, TypeError):  # GraphQL refuses with status 200, `errors` and no data
        log.info("runpod's answer has no balance: %s", body.get("errors"))
    return None


def read_account(api: Api) -> str | None:
    """Return the account's id, which stays the same when its keys change, or None.

    Raises ProviderSilent if there is no answer: that does not mean another account.
    """
    try:
        body = api.post(GRAPHQL, {"query": _WHO})
        return str(body["data"]["myself"]["id"])
    except Unsure as exc:
        raise ProviderSilent(
            what="runpod could not identify the account of this key.",
            why=f"{exc}.",
            doubt="Instances that this key does not show may still be billing.",
            fix="Try again in a minute: homing runs",
        ) from exc
    except Unwelcome as exc:
        if exc.status != 403:
            raise
        log.info("runpod does not identify the account of this key: %s", exc.why)
    except (KeyError, TypeError):
        log.info("runpod's answer does not name the account of this key: %s", body.get("errors"))
    return None
