"""Run to needs, hours and dollars."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from tests.cloud.rig import make_run
from tests.cloud.shop import Shop, open_shops
from tests.cloud.shop import offer as shop_offer

from homing.cloud.home import LAUNCH_NOTE, Home
from homing.cloud.ledger.ledger import LedgerLine, RunRow
from homing.cloud.plan.plan import Plan, make_plan, needs_of, relay_of
from homing.cloud.plan.speed import (
    _PROBE,
    FILE,
    HOST_BYTES_PER_S,
    estimate,
    learn_here,
    remember,
    remember_speed,
)
from homing.cloud.plan.timing import timing_of
from homing.cloud.providers.base import Needs, Offer, lack
from homing.config.estimate.memory import training_memory
from homing.config.estimate.params_and_flops import sizes as sizes_of
from homing.errors import NoOffer
from homing.store import FileStore, run_key
from homing.units import format_bytes
from homing.wire import codec, file_names
from homing.wire.event_lines import Metric
from homing.wire.run_json import Cloud, Limits, Lora, Model, Rl, RlTask, Run
from homing.world import Completed, World

H100 = Offer("runpod", "h100", "H100", 1, 16, 80 * 2**30, Decimal("2.49"))


class NoTorch(World):
    """A computer with two cores, a little memory and no torch."""

    def run(self, argv: object, timeout_s: float, env: object = None) -> Completed:
        first = str(next(iter(argv)))  # type: ignore[call-overload]
        return Completed(0, "2\n", "") if first == "getconf" else Completed(1, "", "no module named torch")


@pytest.fixture
def plain(home: Home) -> Home:
    return Home(home.path, NoTorch())


@pytest.mark.acceptance(61)
def test_a_plan_counts_tokens_steps_flops_and_dollars(plain: Home, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    plan = make_plan(run, plain)
    assert (plan.num_tokens, plan.num_steps) == (20 * 64, 20)
    assert plan.flops == plan.num_tokens * run.sizes.flops_per_token
    (row,) = plan.offers
    assert row.cost_usd == Decimal("0.36") * Decimal(str(row.seconds)) / 3600
    assert 0 < row.minimum_usd < Decimal("0.05")
    assert plan.checkpoint_bytes > 8 * 30_000


@pytest.mark.acceptance(62, "P4")
def test_the_source_of_the_speed_is_always_given(plain: Home, tmp_path: Path) -> None:
    run = dataclasses.replace(make_run(tmp_path), id="moss-1")
    (offer,) = plain.provider("local").offers(Needs())
    assert estimate(run, offer, plain).text.startswith("assumed")
    remember(run, offer.device, 0, 5000.0, plain)
    known = estimate(run, offer, plain)
    assert (known.tokens_per_s, known.source) == (5000.0, "measured")
    assert "moss-1" in known.text
    other = dataclasses.replace(run, model=dataclasses.replace(run.model, width=128))
    assert estimate(other, offer, plain).source == "assumed"


@pytest.mark.regression("probe-under-load")
def test_later_plans_probe_again_and_keep_the_best_result(home: Home, tmp_path: Path) -> None:
    messages = ["1e10", "4e10", "2e10", "9e10"]  # the first while other programs were running

    class Probed(NoTorch):
        probes = 0
        at = 1000.0

        def now(self) -> float:
            return Probed.at

        def run(self, argv: object, timeout_s: float, env: object = None) -> Completed:
            if list(argv)[1:2] == ["-c"]:  # type: ignore[call-overload]
                Probed.probes += 1
                return Completed(0, f"{messages[Probed.probes - 1]}\n", "")
            return super().run(argv, timeout_s, env)

    probed = Home(home.path, Probed())
    run = make_run(tmp_path)
    (offer,) = probed.provider("local").offers(Needs())
    first, again = estimate(run, offer, probed), estimate(run, offer, probed)
    assert first == again, "the same load, so no other probe"
    assert (first.source, Probed.probes) == ("probed", 1)
    speeds = []
    for _ in range(3):
        Probed.at += 60.0
        speeds.append(estimate(run, offer, probed).tokens_per_s / first.tokens_per_s)
    assert speeds == [pytest.approx(4.0)] * 3, "the best of them"
    assert Probed.probes == 3, "afterwards the result is reused"


@pytest.mark.slow
def test_a_probe_on_a_busy_computer_is_not_many_times_too_slow() -> None:
    one_core = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    code = one_core + _PROBE
    alone = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    busy = [sys.executable, "-c", f"{one_core}while True: pass"]
    others = [subprocess.Popen(busy) for _ in range(3)]
    try:
        probed = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    finally:
        for each in others:
            each.kill()
            each.wait()
    assert probed > 0.5 * alone


def test_speeds_that_train_measured_here_are_used_by_the_next_plan(plain: Home, tmp_path: Path) -> None:
    run = dataclasses.replace(make_run(tmp_path), id="moss-1")
    store = FileStore(str(plain.path), plain.world)
    speeds = [900.0, 1400.0, 4000.0]
    lines = [Metric(float(n), "pretrain", n, 40, 100, 6.0, tokens_per_s=speed) for n, speed in enumerate(speeds)]
    text = "".join(codec.dumps(each) + "\n" for each in lines)
    store.put_bytes(run_key("moss-1", file_names.METRICS), text.encode())
    store.put_bytes(run_key("moss-1", file_names.RUN), codec.dumps(run).encode())
    (offer,) = plain.provider("local").offers(Needs())
    learn_here(plain)
    assert estimate(run, offer, plain).source != "measured", "it still trains"
    store.put_bytes(run_key("moss-1", file_names.OUTCOME), b"{}")
    learn_here(plain)
    known = estimate(run, offer, plain)
    assert (known.tokens_per_s, known.source) == (1400.0, "measured")


def test_the_worst_case_without_a_limit_is_at_least_the_minimum_spend(home: Home, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    short = dataclasses.replace(run, phases=[dataclasses.replace(run.phases[0], num_steps=1)])
    for each in (run, short):
        for row in make_plan(each, home).offers:
            assert row.minimum_usd <= row.worst_usd


@pytest.mark.acceptance(63)
def test_a_speed_above_the_peak_of_a_gpu_is_not_shown_or_stored(plain: Home, tmp_path: Path) -> None:
    run = dataclasses.replace(make_run(tmp_path), id="moss-1")
    peak = 989e12 / run.sizes.flops_per_token
    assert estimate(run, H100, plain).tokens_per_s < peak
    remember(run, "H100", 1, peak * 2, plain)
    assert not (plain.path / FILE).exists()
    forged = {"device": "H100", "num_gpus": 1, "shape": "", "tokens_per_s": peak * 2, "run_id": "x", "at": 0.0}
    from homing.cloud.plan.speed import shape_key

    plain.world.mkdir(plain.path)
    measured = [{**forged, "shape": shape_key(run.model)}]
    (plain.path / FILE).write_text(json.dumps({"measured": measured, "probes": {}}))
    assert estimate(run, H100, plain).source == "modelled"


def test_each_phase_of_a_run_that_came_home_has_a_speed_of_its_own(plain: Home, tmp_path: Path) -> None:
    run = dataclasses.replace(make_run(tmp_path), id="moss-1")
    first = run.phases[0]
    chat = dataclasses.replace(first, kind="sft")
    asked = dataclasses.replace(first, kind="rl", rl=Rl([RlTask("arithmetic")]))
    run = dataclasses.replace(run, phases=[first, chat, asked])
    (offer,) = plain.provider("local").offers(Needs())
    guessed = estimate(run, offer, plain)
    assert guessed.phases["rl"].tokens_per_s < guessed.phases["sft"].tokens_per_s == guessed.tokens_per_s
    remember(run, offer.device, 0, {"pretrain": 5000.0, "rl": 40.0}, plain)
    known = estimate(run, offer, plain)
    assert (known.tokens_per_s, known.phases["rl"].tokens_per_s) == (5000.0, 40.0)
    assert known.source == "assumed", "nothing is known of its sft"
    assert "sft: assumed" in known.text
    assert "rl: measured on" in known.text
    timing = timing_of(run, offer, known, plain)
    assert timing.step_s(asked) == pytest.approx(asked.batch_tokens / 40.0)


def test_measured_speeds_are_stored_per_phase(plain: Home, tmp_path: Path) -> None:
    """Each phase of a chain has its own speed; a phase with too few metrics is ignored."""
    run = dataclasses.replace(make_run(tmp_path), id="moss-1")
    kinds = ("pretrain", "sft", "rl")
    run = dataclasses.replace(run, phases=[dataclasses.replace(run.phases[0], kind=kind) for kind in kinds])
    folder, store = plain.run_dir(run.id), FileStore(str(tmp_path / "store"), World())
    folder.mkdir(parents=True)
    (folder / file_names.RUN).write_text(codec.dumps(run))
    (folder / LAUNCH_NOTE).write_text(json.dumps({"offer": {"device": "EPYC", "num_gpus": 0, "provider": "local"}}))
    seen = [("pretrain", 900.0), ("pretrain", 1000.0), ("pretrain", 1100.0), ("sft", 7.0)] + [("rl", 30.0)] * 4
    lines = [Metric(t=0.0, phase=kind, step=1, num_steps=9, num_tokens=1, tokens_per_s=rate) for kind, rate in seen]
    store.put_bytes(run_key(run.id, file_names.METRICS), "".join(codec.dumps(line) + "\n" for line in lines).encode())
    plain.ledger.adopt(LedgerLine("m-1", run.id, "moss", 1, "local", "x", "0.36", None, 0.0, "i", 0.0, 60.0))
    remember_speed(plain, RunRow(run.id, "moss", "done", 0.0, f"file:{tmp_path}/store", ""), store)
    (entry,) = json.loads((plain.path / FILE).read_text())["measured"]
    assert entry["phases"] == {"pretrain": 1000.0, "rl": 30.0}
    assert entry["tokens_per_s"] == 1000.0


@pytest.mark.acceptance(84)
def test_a_schedule_longer_than_its_limits_is_warned_of_with_time_and_dollars(plain: Home, tmp_path: Path) -> None:
    run = make_run(tmp_path, limits=Limits(spend_usd="0.001", time_s=1.0))
    long = dataclasses.replace(run, phases=[dataclasses.replace(run.phases[0], num_steps=10**8)])
    money, time = make_plan(long, plain).warnings[:2]
    assert "days" in money
    assert "$" in money
    assert "limits.time" in time


@pytest.mark.acceptance(49)
def test_when_nothing_covers_the_needs_each_provider_says_what_it_lacks(plain: Home, tmp_path: Path) -> None:
    run = dataclasses.replace(make_run(tmp_path), cloud=Cloud(gpu="H100", num_gpus=8))
    with pytest.raises(NoOffer) as caught:
        make_plan(run, plain)
    assert "local this-computer has no H100" in caught.value.why


def test_needs_follow_the_run(tmp_path: Path) -> None:
    needs = needs_of(make_run(tmp_path, limits=Limits(rate_usd_per_hour="2.00")))
    assert needs.max_rate_usd_per_hour == Decimal("2.00")
    assert needs.memory_bytes > 0
    assert needs.disk_bytes > 0


@pytest.mark.acceptance(64)
@pytest.mark.parametrize(
    ("needs", "word"),
    [
        (Needs(gpu="A100"), "no A100"),
        (Needs(num_gpus=2), "GPUs"),
        (Needs(memory_bytes=2**40), "memory"),
        (Needs(host_bytes=2**40), ""),  # its host memory is unknown
        (Needs(max_rate_usd_per_hour=Decimal(1)), "over the limit"),
        (Needs(gpu="NVIDIA H100 80GB HBM3"), ""),
    ],
)
def test_what_an_offer_lacks_is_said_in_a_few_words(needs: Needs, word: str) -> None:
    assert word in lack(H100, needs)
    assert bool(word) == bool(lack(H100, needs))


def test_an_offer_with_too_little_host_memory_is_excluded() -> None:
    needs, messages = Needs(host_bytes=40 * 10**9), dataclasses.replace(H100, host_bytes=32 * 10**9)
    assert lack(messages, needs) == "has 32.00 GB of 40.00 GB host memory"
    assert lack(dataclasses.replace(messages, host_bytes=64 * 10**9), needs) == ""
    assert "has no GPU" in lack(dataclasses.replace(messages, device="CPU", num_gpus=0, host_bytes=64 * 10**9), needs)


# --- several offers ---


def sell(monkeypatch: pytest.MonkeyPatch, *offers: Offer) -> None:
    open_shops(monkeypatch, north=Shop(list(offers)))


def planned(tmp_path: Path, home: Home, *, num_steps: int = 10**7, **changes: Any) -> Plan:
    run = make_run(tmp_path)
    phase = dataclasses.replace(run.phases[0], num_steps=num_steps, batch_tokens=2**19, save_every=num_steps // 10)
    cloud = Cloud(providers=["north"], **changes.pop("cloud", {}))
    return make_plan(dataclasses.replace(run, phases=[phase], cloud=cloud, **changes), home, explain=True)


@pytest.mark.acceptance(129)
def test_the_cheapest_to_finish_comes_first_and_not_the_lowest_rate(
    plain: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sell(monkeypatch, shop_offer("T4", rate="0.50"), shop_offer("H100", rate="3.00"))
    plan = planned(tmp_path, plain)
    assert [row.offer.device for row in plan.offers] == ["H100", "T4"]
    assert plan.more_usd(plan.offers[1]) == plan.offers[1].cost_usd - plan.best.cost_usd > 0


@pytest.mark.acceptance(129)
def test_the_plan_counts_the_time_and_cost_of_interruptions(
    plain: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steady = shop_offer(rate="3.00")
    spot = shop_offer(rate="2.90", is_spot=True, interruptions_per_hour=0.5, name="spot")
    sell(monkeypatch, steady, spot)
    plan = planned(tmp_path, plain)
    assert [row.offer.is_spot for row in plan.offers] == [False, True]
    taken = plan.offers[1]
    assert taken.seconds > plan.best.seconds
    assert taken.odds.num_interruptions == pytest.approx(0.5 * taken.seconds / 3600)
    # The difference is the time lost per interruption.
    assert taken.seconds - plan.best.seconds == pytest.approx(taken.odds.num_interruptions * taken.odds.lost_s)


def test_an_unknown_spot_interruption_rate_is_assumed_and_then_observed(
    plain: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sell(monkeypatch, shop_offer(is_spot=True))
    odds = planned(tmp_path, plain).best.odds
    assert (odds.per_hour, odds.text) == (1 / 20, "assumed: once every 20 h")
    for number, note in enumerate(["preempted by the provider", "deleted", "preempted by the provider"]):
        line = LedgerLine(f"m-{number}", "r", "moss", 1, "north", "1x_h100", "2.49", None, 0.0, "i", 0.0, 36000.0)
        plain.ledger.adopt(dataclasses.replace(line, note=note))
    odds = planned(tmp_path, plain).best.odds
    assert odds.per_hour == pytest.approx(3 / 50)
    assert "observed: 2 in 30.0 h" in odds.text


def test_an_offer_interrupted_faster_than_it_makes_progress_is_left_out(
    plain: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unusable = shop_offer(rate="0.10", interruptions_per_hour=1000.0)
    sell(monkeypatch, unusable, shop_offer(rate="3.00"))
    plan = planned(tmp_path, plain)
    assert len(plan.offers) == 1
    assert "faster than it makes progress" in plan.left_out[0].why
    sell(monkeypatch, unusable)
    with pytest.raises(NoOffer, match="ever finish"):
        planned(tmp_path, plain)


@pytest.mark.regression("unknown-gpu-as-cpu")
def test_an_unknown_gpu_is_unknown_and_never_planned_as_a_processor(
    plain: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sell(monkeypatch, shop_offer("H100", 1, "2.49"), shop_offer("Voodoo 3", 1, "0.50"))
    plan = planned(tmp_path, plain)
    assert [row.offer.device for row in plan.offers] == ["H100"]
    assert any("GPU unknown to homing (Voodoo 3)" in warning for warning in plan.warnings)
    sell(monkeypatch, shop_offer("Voodoo 3", 1, "0.50"))
    with pytest.raises(NoOffer, match="Cannot plan any offer") as refused:
        planned(tmp_path, plain)
    assert "Voodoo 3" in str(refused.value.why)
    own = dataclasses.replace(shop_offer("Voodoo 3", 1, "0.50"), provider="ssh")
    speed = estimate(make_run(tmp_path), own, plain)
    assert speed.source == "unknown"
    assert "unknown GPU: Voodoo 3" in speed.text


@pytest.mark.regression("old-gpus-offered")
def test_a_gpu_older_than_our_torch_supports_is_no_offer_on_any_provider(
    plain: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sell(monkeypatch, shop_offer("V100", 1, "0.50"), shop_offer("T4", 1, "0.60"))
    plan = planned(tmp_path, plain)
    assert [row.offer.device for row in plan.offers] == ["T4"]
    (left_out,) = plan.left_out
    assert "compute capability 7.0 (V100); the torch we install needs 7.5" in left_out.why


@pytest.mark.acceptance(61)
def test_the_parts_of_a_plan_add_up_to_its_total(plain: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sell(monkeypatch, shop_offer())
    plan = planned(tmp_path, plain)
    parts = plan.best.phases(plan.run)
    assert [part.name for part in parts] == ["boot and start", "pretrain", "home"]
    assert sum(part.seconds for part in parts) == pytest.approx(plan.best.seconds)
    assert float(sum(part.cost_usd for part in parts)) == pytest.approx(float(plan.best.cost_usd))


def test_storage_in_a_priced_store_is_part_of_the_cost(
    plain: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sell(monkeypatch, shop_offer())
    priced = planned(tmp_path, plain, store="s3://moss-bucket/x?region=us-east-1").best
    assert priced.storage_usd > 0
    assert planned(tmp_path, plain, store="hf:moss/moss").best.storage_usd == 0


def test_the_worst_case_is_the_spend_limit_or_twice_the_cost_without_one(
    plain: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sell(monkeypatch, shop_offer())
    free = planned(tmp_path, plain).best
    assert free.worst_usd == pytest.approx(free.cost_usd * 2)
    assert planned(tmp_path, plain, limits=Limits(spend_usd="7.00")).best.worst_usd == Decimal("7.00")


def test_an_offer_that_cannot_finish_within_the_limit_is_listed_last(
    plain: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick, slow = shop_offer("H100", 8, "24.00"), shop_offer("H100", 1, "5.00")
    sell(monkeypatch, quick, slow)
    free = planned(tmp_path, plain)
    assert free.best.offer.num_gpus == 8
    between = (free.best.minimum_usd + free.offers[1].minimum_usd) / 2
    assert planned(tmp_path, plain, limits=Limits(spend_usd=str(between))).best.offer.num_gpus == 1


@pytest.mark.acceptance(64, 150)
def test_what_does_not_fit_is_left_out_with_the_reason(
    plain: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sell(monkeypatch, shop_offer("T4", rate="0.50"), shop_offer("H100", rate="3.00"))
    plan = planned(tmp_path, plain, cloud={"gpu": "H100"})
    assert plan.left_out == []  # another card was not asked for, so it was not left out
    plan = planned(tmp_path, plain, limits=Limits(rate_usd_per_hour="1.00"))
    (left,) = plan.left_out
    assert (left.offer.device, "over the limit" in left.why) == ("H100", True)


def test_a_remote_offer_is_left_out_if_the_store_is_a_local_folder(
    plain: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = Shop([shop_offer(rate="0.01")], cannot={"file_store": "It cannot read a folder here."})
    open_shops(monkeypatch, north=Shop([shop_offer(rate="3.00")]), south=far)
    run = dataclasses.replace(make_run(tmp_path), cloud=Cloud(providers=["north", "south"]))
    plan = make_plan(run, plain, explain=True)
    assert [row.offer.provider for row in plan.offers] == ["north"]
    assert "cannot reach file:" in plan.left_out[0].why
    only = dataclasses.replace(run, cloud=Cloud(providers=["south"]))
    assert make_plan(only, plain).best.offer.provider == "south"  # a plan may come before a store


def test_the_plan_says_what_relaunches_a_run_longer_than_the_instance_lifetime(tmp_path: Path) -> None:
    run, day = make_run(tmp_path), 86400.0
    short = dataclasses.replace(H100, lifetime_s=day)
    assert relay_of(run, H100, 10 * day) == "", "this offer has no maximum lifetime"
    assert relay_of(run, short, 0.9 * day) == ""
    text = relay_of(run, short, 2.5 * day)
    assert "2 times" in text
    assert "homing guard" in text
    few = dataclasses.replace(run, limits=dataclasses.replace(run.limits, relaunches=1))
    assert "limits.relaunches is 1" in relay_of(few, short, 2.5 * day)
    stopping = dataclasses.replace(run, cloud=dataclasses.replace(run.cloud, on_preempt="stop"))
    assert "it would end with the first" in relay_of(stopping, short, 2.5 * day)


@pytest.mark.acceptance(8)
@pytest.mark.parametrize(("precision", "works"), [("bf16", "fp32"), ("fp8", "fp32")])
def test_a_gpu_without_the_precision_is_left_out_and_the_reason_names_one_that_works(
    precision: str, works: str
) -> None:
    t4 = dataclasses.replace(H100, device="T4")
    assert f"train.precision: {works} would work there" in lack(t4, Needs(precision=precision))
    assert lack(H100, Needs(precision=precision)) == ""
    for fine in ("auto", "fp32", ""):
        assert lack(t4, Needs(precision=fine)) == ""


def big_run(tmp_path: Path, **phase: Any) -> Run:
    """Qwen2.5-1.5B trained whole, which needs more than 24 GB."""
    run = make_run(tmp_path)
    model = Model("stock", "qwen2", 28, 1536, 12, 2, 128, 8960, 2048, 151936, True, rope_base=1e6)
    optimizer = dataclasses.replace(run.phases[0].optimizer, kind="adamw")
    settings = {"batch_tokens": 16 * 2048, "micro_batch": 1, "optimizer": optimizer, **phase}
    changed = dataclasses.replace(run.phases[0], **settings)
    train = dataclasses.replace(run.train, device="auto", precision="auto")
    return dataclasses.replace(
        run, model=model, sizes=sizes_of(model), phases=[changed], train=train, cloud=Cloud(providers=["north"])
    )


@pytest.mark.acceptance(64)
def test_if_nothing_fits_the_fix_names_the_setting_that_would(
    plain: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sell(monkeypatch, shop_offer("T4"), shop_offer("RTX4090", host_bytes=64 * 10**9))
    with pytest.raises(NoOffer) as caught:
        make_plan(big_run(tmp_path), plain)
    assert caught.value.fix.startswith("To fit RTX4090, lower phases.0.offload to optimizer. Or: ")
    plan = make_plan(big_run(tmp_path, offload="optimizer"), plain)
    assert plan.best.offer.device == "RTX4090"
    assert 16e9 < plan.needs.host_bytes < 32e9
    sell(monkeypatch, shop_offer("RTX4090", host_bytes=16 * 10**9))
    with pytest.raises(NoOffer, match="No provider can start") as caught:
        make_plan(big_run(tmp_path, offload="optimizer"), plain)
    assert "host memory" in caught.value.why
    assert "To fit" not in caught.value.fix


def test_offloading_the_optimizer_adds_transfer_time_to_every_step(plain: Home, tmp_path: Path) -> None:
    near, far = (estimate(big_run(tmp_path, offload=kind), H100, plain) for kind in ("none", "optimizer"))
    more_s = 16 * 2048 / far.tokens_per_s - 16 * 2048 / near.tokens_per_s
    state = training_memory(big_run(tmp_path, offload="optimizer")).host
    assert more_s == pytest.approx(state / HOST_BYTES_PER_S)
    assert "s per step for the optimizer's state, at an assumed 20 GB/s each way" in far.text
    assert far.source == "modelled"
    remember(dataclasses.replace(big_run(tmp_path), id="moss-1"), "H100", 1, 3000.0, plain)
    assert estimate(big_run(tmp_path), H100, plain).source == "measured"
    assert estimate(big_run(tmp_path, offload="optimizer"), H100, plain).source == "modelled", "another kind of step"


def test_a_phase_that_trains_all_weights_after_adapters_says_so_with_the_memory(plain: Home, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    full = dataclasses.replace(run.phases[0], kind="rl", rl=Rl([RlTask("arithmetic")]))
    adapters = dataclasses.replace(run.phases[0], kind="sft", method="lora", lora=Lora(rank=2, alpha=4.0))
    memory = training_memory(run, full)
    chain = dataclasses.replace(run, phases=[adapters, full])
    alone = dataclasses.replace(run, phases=[dataclasses.replace(full, init_from="/a", init_base="/b")])
    for each in (chain, alone):
        (said,) = (text for text in make_plan(each, plain).warnings if "weights in fp32" in text)
        assert said.startswith(f"rl trains all {run.sizes.num_params:,} weights in fp32. Weights, gradients and")
        assert format_bytes(memory.weights + memory.gradients + memory.optimizer) in said
        assert format_bytes(memory.peak(max(1, full.micro_batch))) in said
        assert "method: lora" in said
    kept = dataclasses.replace(full, method="lora", lora=Lora(rank=2, alpha=4.0))
    for phases in ([full], [adapters, kept]):
        messages = make_plan(dataclasses.replace(run, phases=phases), plain).warnings
        assert not any("weights in fp32" in text for text in messages)
