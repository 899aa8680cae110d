"""Arithmetic against the real decoder, and against figures computed manually."""

from __future__ import annotations

import itertools

import pytest

from homing.config.estimate.params_and_flops import BYTES_PER_TOKEN_RANGE, bytes_per_token, parameter_table, sizes
from homing.config.load import load_run, preset_dir
from homing.config.resolve.depth_dial import batch_for_steps, batch_for_tokens, batch_scale, muon_rates, shape_of_depth
from homing.wire.run_json import Model


def shape(arch: str = "qwen3", *, is_tied: bool = True, num_kv_heads: int = 2, **changes: int) -> Model:
    base = {
        "num_layers": 3, "width": 48, "num_heads": 4, "head_size": 12, "ffn_width": 112, "context": 16,
        "vocab_size": 301,
    }  # fmt: skip
    return Model(family="stock", arch=arch, is_tied=is_tied, num_kv_heads=num_kv_heads, **{**base, **changes})  # type: ignore[arg-type]


@pytest.mark.acceptance("P4")
@pytest.mark.parametrize(
    ("arch", "is_tied", "num_kv_heads"), list(itertools.product(("llama", "qwen2", "qwen3"), (True, False), (1, 2, 4)))
)
def test_the_parameter_table_is_the_decoders_own_count(arch: str, is_tied: bool, num_kv_heads: int) -> None:
    pytest.importorskip("torch")
    from homing.lm.model import Decoder

    model = shape(arch, is_tied=is_tied, num_kv_heads=num_kv_heads)
    assert sizes(model).num_params == Decoder(model).num_params()


def test_goethes_table_is_what_one_works_out_by_hand() -> None:
    model = load_run(str(preset_dir() / "goethe-75m.yaml")).run.model
    table = {part.name: part.num_params for part in parameter_table(model)}
    assert table["embedding"] == 32768 * 640
    assert table["attention k, v"] == 12 * 2 * 640 * 320
    assert table["feed-forward"] == 12 * 3 * 640 * 1728
    assert table["head"] == 0
    found = sizes(model)
    assert found.num_matmul_params == 12 * (2 * 640 * 640 + 2 * 640 * 320 + 3 * 640 * 1728) + 32768 * 640
    assert found.flops_per_token == 6 * found.num_matmul_params + 12 * 12 * 640 * 512


def test_the_dial_gives_shapes_in_whole_heads() -> None:
    for depth in range(1, 65):
        found = shape_of_depth(depth)
        assert found.width % 128 == 0
        assert found.num_heads * 128 == found.width
        assert found.ffn_width % 64 == 0


def test_the_batch_rule_starts_at_its_reference_and_stays_in_whole_rows() -> None:
    for tokens, context in itertools.product((10_000, 1e6, 1e9, 1e11), (128, 1000, 2048)):
        assert batch_for_tokens(tokens, context, 32768) % context == 0
    assert batch_for_steps(1000, 128, 2048) % 128 == 0
    assert batch_scale(2**19) == 1.0
    assert batch_scale(2**17) == 0.5


def test_short_runs_take_small_batches_and_both_rules_meet_at_the_reference() -> None:
    assert [batch_for_tokens(tokens, 2048, 32768) for tokens in (21e6, 160e6, 1.32e9)] == [2**15, 2**17, 2**19]
    assert [batch_for_steps(steps, 2048, 32768) for steps in (500, 1200, 2500)] == [2**15, 2**17, 2**19]
    sizes = [batch_for_tokens(million * 1e6, 2048, 32768) for million in range(5, 20_000, 50)]
    assert sizes == sorted(sizes)


def test_muons_rate_is_what_the_sweeps_found() -> None:
    model = shape(width=768)
    found = {
        (batch, steps): muon_rates(model, "pretrain", batch, steps)["lr"]
        for batch, steps in ((2**16, 320), (2**16, 1281), (2**17, 1273), (2**19, 2520), (2**11, 100_000), (2**21, 1))
    }
    assert [round(rate, 3) for rate in found.values()] == [0.028, 0.018, 0.020, 0.020, 0.01, 0.03]
    assert muon_rates(model, "pretrain", 2**19, 0) == muon_rates(model, "pretrain", 2**19, 2520)


def test_short_runs_of_deep_models_do_not_take_the_rate_of_shallow_ones() -> None:
    """20 x 1280 with 454 steps of 16,384 tokens went up from 7.0 to 12.1 at 0.0206."""

    def rate(num_layers: int, batch_tokens: int, num_steps: int) -> float:
        return muon_rates(shape(num_layers=num_layers), "pretrain", batch_tokens, num_steps)["lr"]

    assert [round(rate(layers, 2**14, 454), 4) for layers in (6, 12, 16, 20, 24, 32)] == [
        0.0206, 0.0206, 0.0154, 0.0123, 0.0119, 0.0119,
    ]  # fmt: skip
    for batch_tokens, num_steps in ((2**17, 1220), (2**16, 320), (2**15, 757), (2**19, 2520), (2**20, 9000)):
        assert rate(6, batch_tokens, num_steps) == rate(12, batch_tokens, num_steps)
    assert rate(12, 2**17, 1220) == pytest.approx(0.02049, abs=1e-5), "five minutes of a large card"
    for num_steps in (2520, 5000):
        assert rate(32, 2**19, num_steps) == rate(12, 2**19, num_steps), "long runs are as they were"
    deep, fewer = (rate(20, 2**19, num_steps) for num_steps in (2519, 2521))
    assert deep == pytest.approx(fewer, rel=1e-3), "no jump where the rule ends"


def test_only_later_phases_scale_all_their_rates_with_the_batch() -> None:
    small, large = (muon_rates(shape(width=768), "pretrain", batch, 1000) for batch in (2**17, 2**19))
    assert {name for name in small if small[name] != large[name]} == {"lr"}
    tiny = muon_rates(shape(width=768), "pretrain", 2**12, 1000)
    assert tiny["lr_embedding"] == pytest.approx(large["lr_embedding"] / 4)
    small, large = (muon_rates(shape(width=768), "sft", batch, 1000) for batch in (2**17, 2**19))
    assert all(small[name] == pytest.approx(large[name] / 2) for name in small)
    assert large["lr"] == pytest.approx(0.1 * 0.02)


@pytest.mark.parametrize(
    ("vocab_size", "counted"),
    [
        (256, [1.0]),
        # English novels, Shakespeare, Goethe in German, Python's own library; each by a tokenizer of its own.
        (512, [2.16, 2.04, 2.23, 2.11]),
        (1024, [2.74, 2.60, 2.86, 2.71]),
        (2048, [3.23, 3.14, 3.42, 3.27]),
        (4096, [3.67, 3.59, 3.96, 3.77]),
        (8192, [4.03, 3.94, 4.45, 4.21]),
        (10_000, [2048 * 1.048576 / 587.4]),  # CS336's TinyStories: 2048 MB are 587M tokens
        (16_384, [4.30, 4.15, 4.89, 4.52]),
        (32_768, [5.21]),
    ],
)
def test_the_estimate_of_bytes_per_token_is_near_what_was_counted(vocab_size: int, counted: list[float]) -> None:
    found = bytes_per_token(vocab_size)
    most, usual, least = BYTES_PER_TOKEN_RANGE
    assert usual == 1.0
    if len(counted) > 1:
        assert found == pytest.approx(sum(counted) / len(counted), rel=0.02), "between the kinds of text"
    assert all(least * found <= each <= most * found for each in counted), "the range that is printed holds"
    assert bytes_per_token(200_000) == bytes_per_token(32_768), "of a large one little is gained"
