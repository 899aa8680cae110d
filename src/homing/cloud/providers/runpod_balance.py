"""What is left of the credit at RunPod: the one thing that its REST API does not tell and its older GraphQL does.

One question without side effects, asked once. A key without that right, no answer, or an answer of another shape is
None: then nobody knows, and nothing is guessed.
"""

from __future__ import annotations

import logging
from decimal import Decimal, InvalidOperation

from homing.cloud.doctor_balance import Balance
from homing.cloud.providers.rest import Api, Unsure
from homing.errors import ProviderRefused

__all__ = ["GRAPHQL", "read_balance"]

log = logging.getLogger(__name__)
GRAPHQL = "/graphql"  # beside /v2
_QUERY = "query { myself { clientBalance currentSpendPerHr } }"


def read_balance(api: Api) -> Balance | None:
    """`api` is that of the account, at the address above /v2."""
    try:
        body = api.post(GRAPHQL, {"query": _QUERY})
        told = body["data"]["myself"]
        return Balance(Decimal(str(told["clientBalance"])), Decimal(str(told["currentSpendPerHr"] or 0)))
    except (Unsure, ProviderRefused) as exc:
        log.info("runpod told nothing of its balance: %s", exc)
    except (KeyError, TypeError, InvalidOperation):  # GraphQL says no with 200, `errors` and no data
        log.info("runpod's answer has no balance in it: %s", body.get("errors"))
    return None
