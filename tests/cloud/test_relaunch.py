"""What a guard may not do when nobody is there to be asked. Its whole work is in test_guard."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tests.cloud.rig import make_run
from tests.doubles.shop import offer

from homing.cloud.ledger import LedgerLine
from homing.cloud.relaunch import _refuse_dear
from homing.errors import UsageError
from homing.wire.run import Limits


def line(rate: str) -> LedgerLine:
    return LedgerLine("m", "r", "moss", 1, "shop", "h100", rate, "100.00", intent_at=0.0)


def test_a_far_dearer_hour_is_not_taken_by_a_guard_unless_the_person_allowed_it(tmp_path: Path) -> None:
    run, dear = make_run(tmp_path), offer(num_gpus=8, rate="33.60")
    with pytest.raises(UsageError, match=r"costs \$33.60 an hour") as caught:
        _refuse_dear(dear, run, [line("2.49")])
    assert "limits.rate" in caught.value.fix
    _refuse_dear(dear, dataclasses.replace(run, limits=Limits(rate_usd_per_hour="40.00")), [line("2.49")])
    _refuse_dear(dear, run, [line("35.00")])  # it was as dear before, and a person said yes to that
    _refuse_dear(offer(rate="3.29"), run, [line("2.49")])
