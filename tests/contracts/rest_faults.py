"""What every adapter of a REST cloud does when that cloud misbehaves: lost answers, late lists, twins, odd words.

class TestFaults(RestFaults):    names the rig of its cloud, and the path of its create call

Time is a number and the cloud is in this process, so a bad hour takes milliseconds.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.contracts.figures import Spoiled, check_absurd_figures
from tests.doubles.absurd import ABSURD, figures_of, spoil
from tests.doubles.faults import Faults, Strike

from homing.cloud.providers.base import Instance, Provider
from homing.errors import CreateFailed, ProviderRefused, ProviderSilent
from homing.world import HttpRequest, HttpResponse

WAYS = ["lost_before", "lost_after", "error_before", "error_after", "busy"]


class RestFaults:
    Rig: Callable[..., Any]  # Rig(tmp_path, *strikes, **faults): provider, world, cloud, create(), num_living
    create_path: str
    list_key: str  # what its list of instances is called
    nth_look = 1  # which look at an instance is the first after create
    late: dict[str, Any] = {"rates": {"list_late": 1.0}, "list_lag_s": 15.0}  # noqa: RUF012

    def is_create(self, request: HttpRequest) -> bool:
        return request.method == "POST" and request.url.endswith(self.create_path)

    def num_creates(self, rig: Any) -> int:
        return sum(self.is_create(request) for request in rig.world.requests)

    # --- create ---

    @pytest.mark.parametrize("way", ["lost_after", "error_after"])
    def test_create_finds_the_instance_by_its_mark_and_is_not_repeated_if_the_answer_was_lost(
        self, tmp_path: Path, way: str
    ) -> None:
        rig = self.Rig(tmp_path, Strike(way, 1, "create"))
        made: Instance = rig.create()
        assert (rig.num_living, self.num_creates(rig)) == (1, 1)
        assert [made.id] == [instance.id for instance in rig.provider.list_owned()]

    @pytest.mark.parametrize("way", ["lost_before", "error_before"])
    def test_a_create_that_never_arrived_is_repeated_after_the_list_had_time_to_show_it(
        self, tmp_path: Path, way: str
    ) -> None:
        rig = self.Rig(tmp_path, Strike(way, 1, "create"))
        began = rig.world.t
        rig.create()
        assert (rig.num_living, self.num_creates(rig)) == (1, 2)
        assert rig.world.t - began >= rig.provider.settle_s > 0

    def test_a_late_list_does_not_make_us_create_twice(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        rig = self.Rig(tmp_path, Strike("lost_after", 1, "create"), **self.late)
        monkeypatch.setattr(type(rig.provider), "settle_s", 20.0)
        rig.create()
        assert rig.num_living == 1

    def test_a_create_that_stays_unclear_is_given_up_and_carries_no_invented_id(self, tmp_path: Path) -> None:
        rig = self.Rig(tmp_path, rates={"create.lost_before": 1.0})
        with pytest.raises(CreateFailed, match="no clear answer") as caught:
            rig.create()
        assert caught.value.instance_id is None
        assert (rig.num_living, self.num_creates(rig)) == (0, 2)

    def test_the_error_says_so_if_it_is_unknown_whether_an_instance_was_created(self, tmp_path: Path) -> None:
        rig = self.Rig(tmp_path)
        rig.provider.list_owned()  # whatever it asks for once is known
        lists = (Strike("error_before", nth, "list") for nth in range(2, 30))
        rig.cloud.change_faults(Faults(strikes=(Strike("lost_after", 1, "create"), *lists)))
        with pytest.raises(CreateFailed, match="may have started"):
            rig.create()
        assert (rig.num_living, self.num_creates(rig)) == (1, 1), "and launch ends it by its mark"

    def test_two_under_one_mark_are_reduced_to_one(self, tmp_path: Path) -> None:
        """The cloud did what it had seemed to lose, after we had asked again."""
        rig = self.Rig(tmp_path)
        real_http, late = rig.world.http, list[HttpRequest]()

        def http(request: HttpRequest) -> HttpResponse:
            if self.is_create(request) and not late:
                late.append(request)
                return HttpResponse(504, {}, b"")
            if self.is_create(request):
                rig.cloud.handle(late[0])
            response: HttpResponse = real_http(request)
            return response

        rig.world.http = http
        made = rig.create()
        assert rig.num_living == 1
        assert [instance.id for instance in rig.provider.list_owned()] == [made.id]

    def test_a_refusal_after_a_lost_answer_is_no_clear_no(self, tmp_path: Path) -> None:
        """The first call may be late, and have taken what the second one did not get."""
        rig = self.Rig(tmp_path, Strike("lost_before", 1, "create"), Strike("no_capacity", 2, "create"))
        with pytest.raises(CreateFailed, match="no clear answer"):
            rig.create()

    def test_a_busy_provider_is_asked_again_when_it_said(self, tmp_path: Path) -> None:
        rig = self.Rig(tmp_path, Strike("busy", 1, "create"), retry_after_s=17.0)
        rig.create()
        assert 17.0 in rig.world.slept
        assert rig.num_living == 1

    # --- looking ---

    def test_an_undocumented_state_is_unknown_and_bills(self, tmp_path: Path) -> None:
        rig = self.Rig(tmp_path, Strike("odd_state", self.nth_look, "describe"))
        made = rig.create()
        rig.world.pass_time(60)
        odd = rig.provider.describe(made.id)
        assert (odd.state, odd.billing, odd.detail.lower()) == ("unknown", "yes", "migrating")

    @pytest.mark.parametrize("way", WAYS)
    def test_one_bad_answer_is_asked_again_and_many_raise_and_never_read_as_gone(
        self, tmp_path: Path, way: str
    ) -> None:
        rig = self.Rig(tmp_path)
        made = rig.create()
        rig.world.pass_time(60)
        rig.cloud.change_faults(Faults(strikes=(Strike(way, 1, "describe"), Strike(way, 1, "list"))))
        assert rig.provider.describe(made.id).state == "ready"
        assert len(rig.provider.list_owned()) == 1
        rig.world.pass_time(60)
        rig.cloud.change_faults(Faults(rates={way: 1.0}))
        for ask in (lambda: rig.provider.describe(made.id), rig.provider.list_owned, rig.provider.list_resources):
            with pytest.raises(ProviderSilent, match="may still be billing"):
                ask()

    @pytest.mark.parametrize("body", ["<html>Bad gateway</html>", "[]", "{}", '{"KEY": null}'])
    def test_an_answer_that_is_none_is_never_an_empty_list(self, tmp_path: Path, body: str) -> None:
        rig = self.Rig(tmp_path)
        said = body.replace("KEY", self.list_key).encode()
        rig.world.http = lambda request: HttpResponse(200, {}, said)
        with pytest.raises(ProviderSilent):
            rig.provider.list_owned()

    @pytest.mark.parametrize("is_null", [False, True])
    def test_an_instance_that_lacks_what_it_must_say_is_never_gone_and_ends_no_look_with_our_own_mistake(
        self, tmp_path: Path, is_null: bool
    ) -> None:
        rig = self.Rig(tmp_path)
        made, real = rig.create(), rig.world.http
        rig.world.pass_time(60)

        def lacking(body: Any, field: str) -> Any:
            if isinstance(body, list):
                return [lacking(each, field) for each in body]
            messages = {key: lacking(value, field) if key == self.list_key else value for key, value in body.items()}
            return (
                {**messages, field: None}
                if is_null and field in messages
                else {k: messages[k] for k in messages if k != field}
            )

        def answer(request: HttpRequest, field: str) -> HttpResponse:
            reply = real(request)
            if request.method != "GET" or reply.status != 200:
                return reply
            return HttpResponse(200, reply.headers, json.dumps(lacking(json.loads(reply.body), field)).encode())

        shown = json.loads(real(self.look_request(rig)).body)[self.list_key][0]
        for field in shown:
            rig.world.http = lambda request, field=field: answer(request, field)
            rig.world.pass_time(60)
            with contextlib.suppress(ProviderSilent):
                assert all(each.billing == "yes" for each in rig.provider.list_owned()), field
            with contextlib.suppress(ProviderRefused):  # without a name it is not ours, and without words it is silent
                assert rig.provider.describe(made.id).state != "gone", field
        assert rig.num_living == 1

    def look_request(self, rig: Any) -> HttpRequest:
        """The last that asked for a list of instances."""
        rig.provider.list_owned()
        path = f"/{self.list_key}"
        return next(each for each in reversed(rig.world.requests) if path in each.url and each.method == "GET")

    def test_what_was_destroyed_is_looked_at_afresh(self, tmp_path: Path) -> None:
        rig = self.Rig(tmp_path)
        made = rig.create()
        assert rig.provider.describe(made.id).state in ("requested", "booting", "ready")
        rig.provider.destroy(made.id)
        assert rig.provider.describe(made.id).state == "gone"

    # --- absurd figures ---

    @pytest.mark.regression("provider-figures")
    def test_absurd_figures_are_no_bill_and_keep_nothing_from_being_ended(self, tmp_path: Path) -> None:
        rig = self.Rig(tmp_path)
        real, values, seen = rig.world.http, dict[str, Any](), set[str]()
        owner = rig.provider._prefix.split("-")[1]

        def http(request: HttpRequest) -> HttpResponse:
            reply: HttpResponse = real(request)
            seen.update(figures_of(reply))
            return spoil(reply, values)

        def names(provider: Provider) -> set[str]:
            seen.clear()
            made = provider.list_owned()
            provider.describe(made[0].id)
            provider.list_resources()
            provider.destroy(made[0].id)
            return set(seen)

        def put(messages: dict[str, Any]) -> None:
            values.clear()
            values.update(messages)

        rig.world.http = http
        open_ = lambda: type(rig.provider)(home=tmp_path / "home", owner=owner, world=rig.world)  # noqa: E731
        check_absurd_figures(
            Spoiled(open_, rig.create, names, put, lambda: rig.num_living, lambda: rig.world.now()), ABSURD
        )

    # --- destroy ---

    @pytest.mark.parametrize("way", WAYS)
    def test_a_destroy_is_repeated_until_it_is_answered(self, tmp_path: Path, way: str) -> None:
        rig = self.Rig(tmp_path, Strike(way, 1, "destroy"))
        rig.provider.destroy(rig.create().id)
        assert rig.num_living == 0

    def test_one_that_is_not_shown_yet_is_ended_all_the_same(self, tmp_path: Path) -> None:
        # Made a moment ago by another process: the ledger knows it, and what answers us does not.
        rig = self.Rig(tmp_path)
        made, real = rig.create(), rig.world.http
        owner = rig.provider._prefix.split("-")[1]
        fresh = type(rig.provider)(home=tmp_path / "home", owner=owner, world=rig.world)
        rig.world.http = lambda request: (
            HttpResponse(404, {}, b"{}") if request.method == "GET" and made.id in request.url else real(request)
        )
        fresh.destroy(made.id)
        assert rig.num_living == 0

    def test_a_destroy_that_gets_no_answer_raises(self, tmp_path: Path) -> None:
        rig = self.Rig(tmp_path, rates={"destroy.lost_before": 1.0})
        made = rig.create()
        with pytest.raises(ProviderSilent):
            rig.provider.destroy(made.id)
        assert rig.num_living == 1
