"""The garbage collector is off while training, and afterwards as the calling program had it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from homing.lm.train.open_session import quiet_gc


@pytest.fixture
def _nothing_frozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


@pytest.mark.usefixtures("_nothing_frozen")
def test_the_collector_is_off_while_training_and_passes_over_what_is_there() -> None:
    with quiet_gc() as settle:
        assert gc.isenabled(), "until the first step is taken"
        settle()
        assert (gc.isenabled(), gc.get_freeze_count() > 0) == (False, True)
    assert (gc.isenabled(), gc.get_freeze_count()) == (True, 0)


def test_what_the_calling_program_has_frozen_stays_frozen() -> None:
    gc.freeze()
    objects = [[number] for number in range(1000)]
    gc.freeze()
    frozen = gc.get_freeze_count()
    with quiet_gc() as settle:
        settle()
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() > frozen - len(objects)
