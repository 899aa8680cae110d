"""A race in which a wrong or refusing candidate cannot win, however fast it is."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from homing.lm.model.attend import KVCache
from homing.lm.model.backends import race, race_attention, race_segments, use_attention
from homing.wire.run import Model

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
    assert "plain" in found.told()
    assert "nan is out: it differs" in found.told()


def test_where_nobody_is_right_torchs_own_choice_stays() -> None:
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
