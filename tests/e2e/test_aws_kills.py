"""kill -9 of real processes around an instance of AWS's double; `benchmarks/kill_points.py --only aws` strikes more."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.doubles.sshd import need_sshd
from tests.e2e.real_kills import strikes

pytestmark = [pytest.mark.machine, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.acceptance(69)
def test_a_launch_and_what_it_started_may_die_anywhere(tmp_path: Path) -> None:
    need_sshd()
    struck = list(strikes("aws", 3, tmp_path))
    assert [(each.what, each.broken) for each in struck if each.broken] == []
    assert sum(each.was_hit for each in struck) >= 3
