"""The run's own record in the store: who launched it, what it may spend, what its attempts spent.

Written by home whenever an attempt begins or ends, so that another machine can find the run and adopt it.
"""

from __future__ import annotations

from homing.cloud import meter
from homing.cloud.home import Home
from homing.store import Store, run_key
from homing.wire import codec, names
from homing.wire.record import Attempt, RunRecord

__all__ = ["write_record"]


def write_record(home: Home, run_id: str, store: Store) -> None:
    run = home.ledger.run(run_id)
    assert run is not None, run_id
    now = home.world.now()
    attempts = [
        Attempt(
            number=line.attempt,
            provider=line.provider,
            mark=line.mark,
            instance_id=line.instance_id,
            rate_usd_per_hour=line.rate_usd_per_hour,
            requested_at=line.created_at or line.intent_at,
            ended_at=line.destroyed_at,
            spend_usd=str(meter.line_spend(line, now)),
        )
        for line in home.ledger.lines(run_id)
    ]
    record = RunRecord(
        run_id=run.id,
        run_name=run.name,
        owner=home.owner,
        state=run.state,
        spend_limit_usd=run.spend_limit_usd,
        attempts=attempts,
        updated_at=now,
    )
    store.put_bytes(run_key(run_id, names.RECORD), codec.dumps(record, indent=1).encode())
