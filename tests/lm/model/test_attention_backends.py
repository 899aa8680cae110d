"""A race in which a wrong or refusing candidate cannot win, however fast it is."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from homing.lm.model.attention import KVCache
from homing.lm.model.attention import attend as attend_causally
from homing.lm.model.attention_backends import race, race_attention, race_segments, use_attention
from homing.lm.model.sdpa import attend_inside, isolate
from homing.wire.run_json import Model

SHAPE = Model("stock", "qwen3", 2, 32, 4, 2, 16, 48, 128, 100, is_tied=False)


def heads() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, num, 32, 16, generator=generator) for num in (4, 2, 2))
    return q, k, v


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def slow(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    time.sleep(0.02)
    return plain(q, k, v)


def looking_ahead(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def not_a_number(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain(q, k, v) * float("nan")


def refusing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raise RuntimeError("No available kernel.\nAborting.")


def wrong_backwards(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain(q, k, v.detach()) + 0.0 * v.sum()


@pytest.mark.acceptance(97)
def test_the_quickest_that_is_right_wins_and_the_others_are_out_with_a_reason() -> None:
    candidates = {
        "ahead": looking_ahead, "nan": not_a_number, "refusing": refusing, "backwards": wrong_backwards,
        "slow": slow, "plain": plain,
    }  # fmt: skip
    found = race(candidates, plain, heads(), last="auto")
    assert found.winner == "plain"
    assert set(found.seconds) == {"slow", "plain"}
    assert set(found.refused) == {"ahead", "nan", "refusing", "backwards"}
    assert found.refused["refusing"] == "No available kernel."
    assert "plain" in found.summary()
    assert "nan excluded: it differs" in found.summary()


def test_attention_falls_back_to_auto_if_every_candidate_is_wrong() -> None:
    assert race({"ahead": looking_ahead}, plain, heads(), last="auto").winner == "auto"


def test_the_backends_that_torch_has_here_run_the_race() -> None:
    found = race_attention(SHAPE, torch.device("cpu"), torch.float32)
    assert found.winner in {*found.seconds, "auto"}
    assert {"cudnn", "efficient"} <= set(found.refused)  # they are for CUDA


def test_flex_is_left_out_where_it_cannot_be() -> None:
    found = race_segments(SHAPE, torch.device("cpu"), torch.float32)
    assert found.winner == "mask"
    assert "CUDA" in found.refused["flex"]


def test_with_a_cache_cudnn_is_out_for_it_plans_anew_at_each_length(monkeypatch: pytest.MonkeyPatch) -> None:
    switches, seen, plain_one = torch.backends.cuda, [], F.scaled_dot_product_attention
    before = switches.cudnn_sdp_enabled()

    def attend(*args: Any, **settings: Any) -> Tensor:
        seen.append(switches.cudnn_sdp_enabled())
        if len(seen) == 4:
            raise RuntimeError("out of memory")
        return plain_one(*args, **settings)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    try:
        for is_on in (True, False):
            switches.enable_cudnn_sdp(is_on)
            cache = KVCache(SHAPE, capacity=4, device=torch.device("cpu"), dtype=torch.float32)
            with contextlib.suppress(RuntimeError):
                for T in (2, 1):
                    cache.attend(0, *(part[:1, :, :T] for part in heads()))
                    cache.length += T
            assert switches.cudnn_sdp_enabled() == is_on
    finally:
        switches.enable_cudnn_sdp(before)
    assert seen == [False] * 4


def test_a_choice_leaves_only_what_it_may_fall_back_to() -> None:
    switches = torch.backends.cuda
    before = (
        switches.cudnn_sdp_enabled(), switches.flash_sdp_enabled(), switches.mem_efficient_sdp_enabled(),
    )  # fmt: skip
    try:
        use_attention("flash")
        assert switches.flash_sdp_enabled()
        assert not switches.cudnn_sdp_enabled()
        use_attention("math")
        assert not switches.flash_sdp_enabled()
        assert not switches.mem_efficient_sdp_enabled()
        use_attention("auto")  # leaves all as it is
        assert not switches.mem_efficient_sdp_enabled()
    finally:
        switches.enable_cudnn_sdp(before[0])
        switches.enable_flash_sdp(before[1])
        switches.enable_mem_efficient_sdp(before[2])


# -- long contexts -----------------------------------------------------------------------------------------------------


@pytest.mark.regression("attention-race-memory")
def test_candidates_are_compared_on_2048_positions_and_timed_on_all() -> None:
    seen: dict[str, set[int]] = {"reference": set(), "candidate": set()}

    def of(name: str) -> Any:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            seen[name].add(q.shape[2])
            return plain(q, k, v)

        return attend

    q, k, v = (torch.randn(1, num, 2304, 8) for num in (2, 1, 1))
    assert race({"candidate": of("candidate")}, of("reference"), (q, k, v), last="auto").winner == "candidate"
    assert max(seen["reference"]) == 2048
    assert seen["candidate"] == {2048, 2304}


@pytest.mark.regression("attention-race-memory")
@pytest.mark.slow
def test_a_race_of_the_backends_holds_fp32_scores_of_2048_positions_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain way is the only one in fp32 here; at 32,768 positions its scores would fill any card."""
    seen: dict[torch.dtype, int] = {}
    plain_one = F.scaled_dot_product_attention

    def watched(q: Tensor, *args: Any, **settings: Any) -> Tensor:
        seen[q.dtype] = max(seen.get(q.dtype, 0), q.shape[2])
        return plain_one(q, *args, **settings)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    race_attention(dataclasses.replace(SHAPE, context=2304), torch.device("cpu"), torch.bfloat16)
    assert seen == {torch.float32: 2048, torch.bfloat16: 2304}


# -- grouped heads -----------------------------------------------------------------------------------------------------


@pytest.fixture
def switches() -> Iterator[Any]:
    """torch's switches, which use_attention turns, as they were before."""
    of = torch.backends.cuda
    before = (of.cudnn_sdp_enabled(), of.flash_sdp_enabled(), of.mem_efficient_sdp_enabled(), of.math_sdp_enabled())
    yield of
    use_attention("auto")
    of.enable_cudnn_sdp(before[0])
    of.enable_flash_sdp(before[1])
    of.enable_mem_efficient_sdp(before[2])
    of.enable_math_sdp(before[3])


class Call:
    """One call of torch's attention. `is_plain`: no kernel but the quadratic one takes it, by the table in `sdpa`."""

    def __init__(self, q: Tensor, k: Tensor, mask: Tensor | None, has_groups: bool) -> None:
        is_on, is_grouped = torch.backends.cuda, q.shape[1] != k.shape[1]
        assert has_groups == is_grouped
        has_16_bits = q.dtype in (torch.bfloat16, torch.float16)
        takes_groups = mask is None and has_16_bits and (is_on.flash_sdp_enabled() or is_on.cudnn_sdp_enabled())
        is_efficient = not is_grouped and is_on.mem_efficient_sdp_enabled()
        self.is_plain = not (takes_groups or is_efficient)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """What a card would be asked, found out with tensors that have a shape and a device and no memory."""
    made: list[Call] = []

    def note(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **settings: Any) -> Tensor:
        made.append(Call(q, k, attn_mask, settings.get("enable_gqa", False)))
        return torch.empty_like(q)

    monkeypatch.setattr(F, "scaled_dot_product_attention", note)
    return made


def fake_heads(T: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.empty(2, num, T, 16, device="cuda", dtype=dtype) for num in (4, 2, 2))
    return q, k, v


@pytest.mark.regression("masked-gqa")
@pytest.mark.usefixtures("switches")
@pytest.mark.parametrize("chosen", ["cudnn", "flash", "auto"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_attention_inside_segments_is_never_quadratic_on_a_card(
    calls: list[Call], chosen: str, dtype: torch.dtype
) -> None:
    use_attention(chosen)
    with FakeTensorMode():
        mask = torch.ones(2, 1, 32, 32, dtype=torch.bool, device="cuda")
        attend_inside(*fake_heads(32, dtype), mask)
    assert [call.is_plain for call in calls] == [False]


@pytest.mark.regression("masked-gqa")
@pytest.mark.usefixtures("switches")
@pytest.mark.parametrize("chosen", ["cudnn", "flash", "auto"])
def test_attention_with_a_cache_is_never_quadratic_on_a_card(
    calls: list[Call], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add(cache: KVCache, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        _, keys, values = fake_heads(cache.length + k.shape[2], k.dtype)
        return keys, values

    monkeypatch.setattr(KVCache, "add", add)
    use_attention(chosen)
    with FakeTensorMode():
        cache = KVCache(SHAPE, batch=2, capacity=32, device=torch.device("cuda"), dtype=torch.bfloat16)
        for T in (8, 4):  # a prompt, and more behind it
            cache.attend(0, *fake_heads(T, torch.bfloat16))
            cache.length += T
    assert [call.is_plain for call in calls] == [False, False]


@pytest.mark.usefixtures("switches")
@pytest.mark.parametrize("chosen", ["cudnn", "flash", "efficient", "auto"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_causal_attention_is_never_quadratic_on_a_card(calls: list[Call], chosen: str, dtype: torch.dtype) -> None:
    use_attention(chosen)
    with FakeTensorMode():
        attend_causally(*fake_heads(32, dtype), 0, None)
    assert [call.is_plain for call in calls] == [False]


def test_repeated_heads_compute_what_grouped_ones_do() -> None:
    from homing.lm.model.sdpa import expand_heads

    q, k, v = heads()
    for part in (q, k, v):
        part.requires_grad_()
    mask = isolate((torch.arange(32) // 9).expand(2, -1)).mask
    found = []
    for is_repeated in (True, False):
        keys, values = (expand_heads(k, 4), expand_heads(v, 4)) if is_repeated else (k, v)
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=not is_repeated)
        found.append((y.detach(), *torch.autograd.grad(y.square().sum(), (q, k, v))))
    for mine, right in zip(*found, strict=True):
        torch.testing.assert_close(mine, right, atol=1e-5, rtol=1e-5)


# -- on a card ---------------------------------------------------------------------------------------------------------

on_a_card = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def peak_gib(run: Any) -> float:
    """Return the peak memory that `run` adds to what is already allocated."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


@pytest.mark.parametrize("context", [pytest.param(context, marks=on_a_card) for context in (8192, 32768)])
def test_attention_race_at_a_long_context_leaves_memory_for_the_model(context: int) -> None:
    """28 query and 4 KV heads: the scores of the plain way in fp32 were 12 GiB at 8,192 positions, 196 at 32,768."""
    shape = dataclasses.replace(SHAPE, num_heads=28, num_kv_heads=4, head_size=128, context=context)
    found = []
    peak = peak_gib(lambda: found.append(race_attention(shape, torch.device("cuda"), torch.bfloat16)))
    print(f"race at {context:,} positions: peak {peak:.2f} GiB, {found[0].summary()}")
    assert found[0].winner != "auto", found[0].summary()
    assert peak < 8.0


@pytest.mark.usefixtures("switches")
@pytest.mark.parametrize("chosen", [pytest.param(name, marks=on_a_card) for name in ("cudnn", "flash", "efficient")])
def test_masked_and_cached_grouped_heads_stay_small_on_a_card(chosen: str) -> None:
    use_attention(chosen)
    T, shape = 8192, dataclasses.replace(SHAPE, num_heads=28, num_kv_heads=4, head_size=128, context=8192)
    q, k, v = (
        torch.randn(1, num, T, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for num in (28, 4, 4)
    )
    mask = isolate((torch.arange(T, device="cuda") // 1000).expand(1, -1)).mask

    def inside() -> None:
        y = attend_inside(q, k, v, mask)
        y.backward(torch.ones_like(y))

    def cached() -> None:
        with torch.no_grad():
            cache = KVCache(shape, batch=1, capacity=T, device=torch.device("cuda"), dtype=torch.bfloat16)
            for part in (slice(0, T // 2), slice(T // 2, T)):
                cache.attend(0, q[:, :, part], k[:, :, part], v[:, :, part])
                cache.length += T // 2

    for run in (inside, cached):
        peak = peak_gib(run)
        print(f"{chosen}, {run.__name__}, {T:,} positions: peak {peak:.2f} GiB")
        assert peak < 3.0  # the scores alone of the plain way are 3.5 GiB in bf16
