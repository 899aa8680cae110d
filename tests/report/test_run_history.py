"""Lines of a run to phases and to what is worth knowing."""

from __future__ import annotations

from homing.report.run_history import happenings, phases
from homing.wire.event_lines import Event, Metric


def metric(step: int, **messages: float) -> Metric:
    return Metric(float(step), "pretrain", step, 1000, step, loss=1.0, **messages)  # type: ignore[arg-type]


def test_of_many_events_alike_the_first_and_the_last_are_shown_with_their_count() -> None:
    events = [Event(float(t), "trainer", "step_skipped", f"Step {t}.", "pretrain", t) for t in range(1, 8)]
    events.append(Event(9.0, "agent", "preempted", "Taken away."))
    shown = happenings(events)
    assert [(each.text, each.num_alike) for each in shown] == [("Step 1.", 5), ("Step 7.", 0), ("Taken away.", 0)]


def test_an_unknown_event_kind_is_shown() -> None:
    assert [
        each.kind for each in happenings([Event(1.0, "trainer", "new_kind", "So."), Event(2.0, "sync", "pushed", "")])
    ] == ["new_kind"]


def test_time_between_attempts_is_not_time_in_steps() -> None:
    lines = [metric(10, step_s=0.5), Metric(9999.0, "pretrain", 20, 1000, 20, loss=1.0, step_s=1.0)]
    (phase,) = phases([], lines, {})
    assert phase.seconds == 15.0
    assert phases([], [metric(10)], {})[0].seconds is None


def test_a_long_curve_is_thinned_to_points_that_were_measured_and_keeps_its_end() -> None:
    (phase,) = phases([], [metric(step) for step in range(1, 1002)], {})
    assert len(phase.curve) <= 401
    assert (phase.curve[0][0], phase.curve[-1][0]) == (1, 1001)


def test_in_rl_the_curve_is_the_reward() -> None:
    lines = [Metric(1.0, "rl", step, 2, step, loss=0.0, val_loss=0.5, more={"reward": step / 4}) for step in (1, 2)]
    (phase,) = phases([], lines, {})
    assert (phase.curve_of, phase.curve, phase.figures) == ("reward", [(1, 0.25), (2, 0.5)], {"reward": 0.5})


def test_a_phase_counts_as_far_as_its_checkpoints_where_its_lines_end_before() -> None:
    assert phases([], [metric(10)], {"pretrain": 12})[0].step == 12
