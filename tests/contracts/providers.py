"""What every provider promises. A provider's test subclasses `ProviderContract` and supplies three fixtures.

provider        opened for `owner`
owner           six characters
stranger        the same provider, opened for another owner
"""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import get_args

import pytest

from homing.cloud.ledger.mark import make_mark
from homing.cloud.providers.base import (
    Billing,
    InputFile,
    Instance,
    InstanceState,
    Needs,
    Order,
    Provider,
    Remembering,
    Request,
    lack,
    wait_until,
)
from homing.errors import ProviderRefused
from homing.wire.boot_json import Boot
from homing.world import World

SECRET = "hunter2-this-is-a-secret"
# Replaces the agent: it lives until it is ended.
SLEEPER = "import time\ntime.sleep(600)\n"


class ProviderContract:
    @pytest.fixture
    def owner(self) -> str:
        """Another for each test: `local` sees every process on this computer, also of tests that run in parallel."""
        return uuid.uuid4().hex[:6]

    @pytest.fixture
    def provider(self, owner: str, tmp_path: Path) -> Provider:
        raise AssertionError("a provider's test supplies its provider")

    @pytest.fixture
    def stranger(self, tmp_path: Path) -> Provider:
        raise AssertionError("a provider's test supplies the same provider of another owner")

    @pytest.fixture
    def request_(self, provider: Provider, owner: str, tmp_path: Path) -> Iterator[Request]:
        request = self.make_request(provider, make_mark(owner, "moss-20260101-000000-abcd", 1), tmp_path)
        yield request
        for instance in provider.list_owned():
            provider.destroy(instance.id)

    def make_request(self, provider: Provider, mark: str, tmp_path: Path) -> Request:
        agent = tmp_path / "agent.zip"
        agent.write_text(SLEEPER)
        place = provider.place(mark)
        boot = Boot(
            run_id="moss-20260101-000000-abcd",
            run_name="moss",
            mark=mark,
            attempt=1,
            work_dir=place.work_dir,
            store=f"file:{tmp_path}/store",
            inputs=[],
            trainer_argv=["true"],
            sync_argv=["true"],
            end_billing=place.end_billing,
            started_at=World().now(),
            rate_usd_per_hour="0.36",
            spent_before_usd="0",
            spend_limit_usd="1.00",
            time_limit_s=0.0,
            idle_limit_s=1800.0,
            stall_factor=10.0,
        )
        offer = provider.offers(Needs())[0]
        files = (InputFile("agent.zip", str(agent)),)
        return provider.plan(offer, Order(mark, "moss", boot, files, secrets={"MOSS_API_KEY": SECRET}))

    def gone(self, provider: Provider, instance_id: str) -> Instance:
        """The instance once the provider shows it gone, within a deadline."""
        world = World()
        assert wait_until(
            lambda: provider.describe(instance_id).state == "gone", timeout_s=20, every_s=0.05, world=world
        )
        return provider.describe(instance_id)

    def test_account_returns_the_same_name_every_time(
        self, provider: Provider, stranger: Provider, request_: Request
    ) -> None:
        messages = provider.account()
        assert messages
        assert len(messages.splitlines()) == 1
        provider.create(request_)
        assert provider.account() == messages
        assert stranger.account() == messages, "one account may be that of several homes"

    def test_offers_cover_the_needs_they_were_asked_for(self, provider: Provider) -> None:
        offers = provider.offers(Needs())
        assert offers
        for offer in offers:
            assert offer.rate_usd_per_hour > 0
            needs = Needs(memory_bytes=offer.memory_bytes, max_rate_usd_per_hour=offer.rate_usd_per_hour)
            assert all(not lack(found, needs) for found in provider.offers(needs))
        assert provider.offers(Needs(memory_bytes=10**18)) == []
        assert provider.offers(Needs(max_rate_usd_per_hour=Decimal("0.000001"))) == []

    def test_planning_changes_nothing_and_gives_the_same_twice(
        self, provider: Provider, request_: Request, tmp_path: Path
    ) -> None:
        again = self.make_request(provider, request_.mark, tmp_path)
        same = dataclasses.replace(again.order.boot, started_at=request_.order.boot.started_at)
        assert dataclasses.replace(again, order=dataclasses.replace(again.order, boot=same)).to_dict() == (
            request_.to_dict()
        )
        assert provider.list_owned() == []

    def test_a_dry_run_prints_no_secret(self, request_: Request) -> None:
        shown = json.dumps(request_.to_dict())
        assert SECRET not in shown
        assert "MOSS_API_KEY" in shown
        assert SECRET not in repr(request_)

    def test_how_to_end_billing_is_decided_before_boot(self, request_: Request) -> None:
        end = request_.order.boot.end_billing
        assert end.argv or (end.method and end.url)

    def test_create_repeated_with_one_mark_makes_one_instance(self, provider: Provider, request_: Request) -> None:
        first = provider.create(request_)
        second = provider.create(request_)
        assert first.id == second.id
        assert [instance.id for instance in provider.list_owned()] == [first.id]
        assert first.rate_usd_per_hour == request_.offer.rate_usd_per_hour

    def test_what_was_created_bills_and_is_listed_under_its_mark(self, provider: Provider, request_: Request) -> None:
        made = provider.create(request_)
        assert made.billing == "yes"
        assert made.mark == request_.mark
        assert [instance.mark for instance in provider.list_owned()] == [request_.mark]
        assert made.state in get_args(InstanceState)
        assert made.billing in get_args(Billing)

    def test_what_was_destroyed_is_gone_and_bills_no_more(self, provider: Provider, request_: Request) -> None:
        made = provider.create(request_)
        provider.destroy(made.id)
        gone = self.gone(provider, made.id)
        assert gone.billing == "no"
        assert provider.list_owned() == []

    def test_destroying_twice_is_success(self, provider: Provider, request_: Request) -> None:
        made = provider.create(request_)
        provider.destroy(made.id)
        self.gone(provider, made.id)
        provider.destroy(made.id)
        assert provider.describe(made.id).state == "gone"

    def test_an_instance_that_never_was_is_gone_and_destroying_it_is_success(
        self, provider: Provider, owner: str
    ) -> None:
        never = make_mark(owner, "never-20260101-000000-0000", 1)
        assert provider.describe(never).state == "gone"
        assert provider.describe(never).billing == "no"
        provider.destroy(never)

    def test_only_our_own_are_listed(
        self, provider: Provider, stranger: Provider, request_: Request, tmp_path: Path
    ) -> None:
        provider.create(request_)
        assert stranger.list_owned() == []
        assert len(provider.list_owned()) == 1

    def test_every_feature_that_is_lacking_has_a_sentence(self, provider: Provider) -> None:
        assert all(text.endswith(".") for text in provider.cannot.values())

    def test_either_it_has_a_guard_of_its_own_or_it_says_that_it_has_none(self, provider: Provider) -> None:
        assert bool(provider.guard) != ("native_spend_limit" in provider.cannot)

    def test_setting_the_guard_leaves_a_living_instance_alive(self, provider: Provider, request_: Request) -> None:
        made = provider.create(request_)
        provider.set_guard(made.id, Decimal("5.00"), World().now() + 86400)
        assert [instance.id for instance in provider.list_owned()] == [made.id]

    def test_setting_the_guard_of_what_is_gone_is_no_error(self, provider: Provider, request_: Request) -> None:
        made = provider.create(request_)
        provider.destroy(made.id)
        self.gone(provider, made.id)
        provider.set_guard(made.id, Decimal("5.00"), None)

    def test_a_new_owner_has_no_other_resources(self, provider: Provider, stranger: Provider) -> None:
        assert provider.list_resources() == []
        assert stranger.list_resources() == []

    def test_an_instance_is_reached_by_ssh_or_it_says_why_not(self, provider: Provider, request_: Request) -> None:
        made = provider.create(request_)
        assert (provider.connection(made.id) is None) == ("ssh" in provider.cannot)

    def test_what_a_stranger_started_is_not_ours_to_end(
        self, provider: Provider, stranger: Provider, request_: Request
    ) -> None:
        made = provider.create(request_)
        with pytest.raises(ProviderRefused):
            stranger.destroy(made.id)
        assert [instance.id for instance in provider.list_owned()] == [made.id]

    def test_its_log_is_text_and_that_of_what_never_was_is_empty(
        self, provider: Provider, request_: Request, owner: str
    ) -> None:
        made = provider.create(request_)
        assert isinstance(provider.log(made.id), str)
        assert provider.log(make_mark(owner, "never-20260101-000000-0000", 1)) == ""


class RememberingContract(ProviderContract):
    """Of a provider that is ours too, and keeps what has ended."""

    def test_it_knows_by_the_mark_alone_what_has_ended_and_what_never_was(
        self, provider: Provider, request_: Request
    ) -> None:
        assert isinstance(provider, Remembering)
        assert provider.remember(request_.mark) is None
        provider.destroy(provider.create(request_).id)
        kept = provider.remember(request_.mark)
        assert kept is not None
        assert (kept.state, kept.created_at is None, kept.ended_at is None) == ("gone", False, False)
