"""Parts of RunPod's API beyond plain REST calls: the meaning of refusals, the account and balance, and a pod's log.

refusals  only the message distinguishes a lack of capacity from a bad request
account   read through the older GraphQL API, because REST v2 provides neither the account's id nor its balance. Both
          queries are sent once and have no side effects. They return None if the key lacks the permission or the
          response has an unexpected format
log       GET /pods/ID/logs?source=container&tail=N  ->  id: ...  data: {"ts", "source", "line"}  ->  text
          The response is an event stream that never ends. After a broken connection, reading resumes after the last
          event. If the stream is silent for a while, everything available has been read
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

from homing.cloud.check_numbers import MOST_USD, read_figure
from homing.cloud.providers.base import Request
from homing.cloud.providers.rest import Api, Unsure, Unwelcome
from homing.cloud.providers.runpod.create_request import KEY_ENV
from homing.doctor.check import Balance
from homing.errors import NoOffer, ProviderRefused, ProviderSilent
from homing.world import HttpRequest, NetworkError

__all__ = ["CONSOLE", "GRAPHQL", "not_ours", "read_account", "read_balance", "read_log", "refused"]

log = logging.getLogger(__name__)
CONSOLE = "https://console.runpod.io"
_NO_CAPACITY = ("no longer any instances available", "not enough free gpus")
GRAPHQL = "/graphql"  # next to /v2
_QUERY = "query { myself { clientBalance currentSpendPerHr } }"
_WHO = "query { myself { id } }"
_TAIL = 1000  # maximum number of log lines to request
_QUIET_S = 3.0
_LONGEST_S = 10.0  # maximum time per read, in case a program never stops writing
_READS = 4


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
            f"This RunPod key is not allowed to start {request.offer.name}.",
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
        what=f"{thing_id} does not belong to this homing home directory.",
        why=f"The names of its resources start with {prefix!r}.",
        fix="List its resources: homing runs",
    )


def read_balance(api: Api) -> Balance | None:
    """Return the account's balance, or None if it cannot be read. `api` has the base address without /v2."""
    try:
        body = api.post(GRAPHQL, {"query": _QUERY})
        myself = body["data"]["myself"]
        left = read_figure(myself["clientBalance"], MOST_USD, least=-MOST_USD)  # negative if the account owes money
        rate = read_figure(myself["currentSpendPerHr"] or 0, MOST_USD)
        if left is not None and rate is not None:
            return Balance(left, rate)
        log.warning("runpod returned an invalid balance: %.100r", myself)
    except (Unsure, ProviderRefused) as exc:
        log.info("runpod returned no balance: %s", exc)
    except (KeyError, TypeError):  # GraphQL reports a refusal with status 200, `errors` and no data
        log.info("runpod's answer has no balance: %s", body.get("errors"))
    return None


def read_account(api: Api) -> str | None:
    """Return the account's id, which is the same for all its keys, or None if the key may not query it.

    Raises ProviderSilent if there is no response, because None would suggest a different account.
    """
    try:
        body = api.post(GRAPHQL, {"query": _WHO})
        return str(body["data"]["myself"]["id"])
    except Unsure as exc:
        raise ProviderSilent(
            what="runpod could not identify this key's account.",
            why=f"{exc}.",
            doubt="Instances that this key does not show may still be billing.",
            fix="Check again in a minute: homing runs",
        ) from exc
    except Unwelcome as exc:
        if exc.status != 403:
            raise
        log.info("runpod does not identify the account of this key: %s", exc.why)
    except (KeyError, TypeError):
        log.info("runpod's answer does not name the account of this key: %s", body.get("errors"))
    return None


def read_log(api: Api, path: str) -> str:
    """Return the log's text, or "" if the pod does not exist."""
    lines: dict[str, str] = {}  # event id -> line, to drop duplicates
    last, problem = "", ""
    for _ in range(_READS):
        try:
            events = list(_events(_read(api, f"{path}?source=container&tail={_TAIL}", last)))
        except NetworkError as exc:
            problem = str(exc)
            continue
        new = {event: line for event, line in events if event not in lines}
        lines.update(new)
        if not new:
            return "\n".join(lines.values())
        last = next(reversed(new))
    if not lines and problem:
        raise ProviderSilent(
            what=f"Could not get the log from {api.name}.", why=problem, fix="Try again in a minute: homing logs RUN"
        )
    return "\n".join(lines.values())


def _read(api: Api, path: str, last: str) -> str:
    headers = {**api.headers, "accept": "text/event-stream", **({"last-event-id": last} if last else {})}
    reply = api.world.stream(HttpRequest("GET", api.url + path, headers, timeout_s=_QUIET_S), _LONGEST_S)
    if reply.status == 404:
        return ""
    if reply.status >= 500 or reply.status == 429:
        raise NetworkError(f"{api.name} answered {reply.status}")
    if reply.status != 200:
        text = reply.body.decode("utf-8", "replace")[:300]
        raise Unwelcome(
            f"{api.name} refused to return the log.", f"{reply.status} {text}", api.fix, status=reply.status, text=text
        )
    return reply.body.decode("utf-8", "replace")


def _events(text: str) -> Iterator[tuple[str, str]]:
    """Yield the id and the line of each complete event, skipping a truncated last event."""
    for block in text.replace("\r\n", "\n").split("\n\n"):
        fields = dict(line.split(":", 1) for line in block.splitlines() if ":" in line and not line.startswith(":"))
        try:
            body = json.loads(fields.get("data", ""))
        except ValueError:
            continue
        if isinstance(body, dict) and "line" in body:
            yield fields.get("id", str(body.get("ts", ""))).strip(), str(body["line"])
