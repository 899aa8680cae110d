"""Each part against the same thing written in plain loops, in float64."""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
import pytest
import torch

from homing.lm.model.attention import Attention
from homing.lm.model.layers import Linear, RMSNorm, Rope, SwiGLU, joined
from homing.wire.run_json import Model

Part = TypeVar("Part", bound=torch.nn.Module)


def randomised(module: Part, seed: int = 0) -> Part:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return module


def random_input(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(9))


def numbers(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


def rms_norm_by_hand(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    out = np.zeros_like(x)
    for place in np.ndindex(*x.shape[:-1]):
        mean_square = sum(value * value for value in x[place]) / x.shape[-1]
        for i, value in enumerate(x[place]):
            out[(*place, i)] = value / math.sqrt(mean_square + eps) * weight[i]
    return out


def turn_by_hand(vector: np.ndarray, position: int, base: float) -> np.ndarray:
    half = len(vector) // 2
    out = np.zeros_like(vector)
    for i in range(half):
        angle = position / base ** (2 * i / len(vector))
        out[i] = vector[i] * math.cos(angle) - vector[i + half] * math.sin(angle)
        out[i + half] = vector[i + half] * math.cos(angle) + vector[i] * math.sin(angle)
    return out


def test_linear_is_a_product_with_the_transposed_weight() -> None:
    linear, x = randomised(Linear(5, 3, has_bias=True)), random_input(2, 5)
    weight, bias = numbers(linear.weight), numbers(linear.bias)
    by_hand = [[sum(weight[o, i] * x[b, i].item() for i in range(5)) + bias[o] for o in range(3)] for b in range(2)]
    np.testing.assert_allclose(numbers(linear(x)), by_hand, atol=1e-6)


def test_linear_computes_in_the_type_of_its_input() -> None:
    linear = randomised(Linear(5, 3, has_bias=True))
    assert linear(random_input(2, 5).bfloat16()).dtype == torch.bfloat16
    assert linear.weight.dtype == torch.float32


def test_rms_norm_equals_the_loop() -> None:
    norm, x = randomised(RMSNorm(6, eps=1e-2)), random_input(2, 3, 6)
    np.testing.assert_allclose(numbers(norm(x)), rms_norm_by_hand(numbers(x), numbers(norm.weight), 1e-2), atol=1e-6)


def test_rms_norm_in_bf16_takes_its_mean_in_fp32() -> None:
    norm = RMSNorm(4096, eps=1e-6)
    torch.nn.init.ones_(norm.weight)
    x = torch.full((1, 4096), 0.37).bfloat16()
    # Summing 4,096 squares in bf16 would stop at 256 equal terms; the norm of a constant is 1 only if it did not.
    np.testing.assert_allclose(numbers(norm(x)), 1.0, atol=0.005)


def test_rope_turns_channel_i_with_channel_i_plus_half() -> None:
    rope, x = Rope(8, context=16, base=100.0), random_input(1, 2, 16, 8)
    found = numbers(Rope.rotate(x, *rope.at(slice(0, 16))))
    for head in range(2):
        for position in range(16):
            by_hand = turn_by_hand(numbers(x)[0, head, position], position, 100.0)
            np.testing.assert_allclose(found[0, head, position], by_hand, atol=1e-5)


def test_rope_is_exact_far_out() -> None:
    rope = Rope(4, context=100_001, base=10.0)
    cos, _ = rope.at(slice(100_000, 100_001))
    np.testing.assert_allclose(numbers(cos)[0], [math.cos(100_000), math.cos(100_000 / math.sqrt(10))], atol=1e-6)


def test_swiglu_equals_the_loop() -> None:
    mlp, x = randomised(SwiGLU(4, 6)), random_input(1, 2, 4)
    gate, up, down = (numbers(layer.weight) for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    for t in range(2):
        vector = numbers(x)[0, t]
        hidden = []
        for f in range(6):
            g, u = (sum(w[f, i] * vector[i] for i in range(4)) for w in (gate, up))
            hidden.append(g / (1 + math.exp(-g)) * u)
        by_hand = [sum(down[o, f] * hidden[f] for f in range(6)) for o in range(4)]
        np.testing.assert_allclose(numbers(mlp(x))[0, t], by_hand, atol=1e-6)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_attention_equals_the_loop(arch: str) -> None:
    heads, kv_heads, size, width, length = 4, 2, 4, 16, 5
    shape = Model("stock", arch, 1, width, heads, kv_heads, size, 8, 8, 10, True, rope_base=50.0, norm_eps=1e-3)
    attention, x = randomised(Attention(shape, 0)), random_input(1, length, width)
    rope = Rope(size, context=8, base=50.0)
    found = numbers(attention(x, *rope.at(slice(0, length))))[0]

    def project(layer: Linear, num_heads: int, norm: RMSNorm | None) -> np.ndarray:
        flat = numbers(x)[0] @ numbers(layer.weight).T + (numbers(layer.bias) if layer.bias is not None else 0.0)
        split = flat.reshape(length, num_heads, size)
        return split if norm is None else rms_norm_by_hand(split, numbers(norm.weight), 1e-3)

    is_qwen3 = arch == "qwen3"
    q = project(attention.q_proj, heads, attention.q_norm if is_qwen3 else None)
    k = project(attention.k_proj, kv_heads, attention.k_norm if is_qwen3 else None)
    v = project(attention.v_proj, kv_heads, None)
    mixed = np.zeros((length, heads, size))
    for head in range(heads):
        shared = head // (heads // kv_heads)  # neighbouring query heads share a KV head
        for t in range(length):
            query = turn_by_hand(q[t, head], t, 50.0)
            scores = [query @ turn_by_hand(k[s, shared], s, 50.0) / math.sqrt(size) for s in range(t + 1)]
            weights = np.exp(scores) / np.exp(scores).sum()
            mixed[t, head] = sum(weights[s] * v[s, shared] for s in range(t + 1))
    by_hand = mixed.reshape(length, heads * size) @ numbers(attention.o_proj.weight).T
    np.testing.assert_allclose(found, by_hand, atol=1e-5)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 12), (2, 5, 12)])
def test_without_gradients_joined_weights_are_not_copied_together_and_compute_the_same(
    monkeypatch: pytest.MonkeyPatch, has_bias: bool, shape: tuple[int, ...]
) -> None:
    """For a single new token the product itself does no more than read them."""
    group = [randomised(Linear(12, num_out, has_bias=has_bias), seed=num_out) for num_out in (8, 4, 4)]
    x = random_input(*shape)
    wanted = joined(x, *group)
    assert wanted.requires_grad
    monkeypatch.setattr(torch, "cat", lambda *_: pytest.fail("copied"))
    with torch.no_grad():
        torch.testing.assert_close(joined(x, *group), wanted)
        half = [layer.bfloat16() for layer in group]
        narrow = joined(x.bfloat16(), *half)
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.float(), wanted, rtol=0.05, atol=0.05)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, while tracing
def test_without_gradients_too_joined_weights_trace_into_one_graph() -> None:
    """Evaluations of a compiled model: a graph break would show as an error here."""
    import torch._dynamo

    torch._dynamo.reset()
    group, x = [randomised(Linear(12, num_out), seed=num_out) for num_out in (8, 4)], random_input(2, 5, 12)
    compiled = torch.compile(lambda x: joined(x, *group), backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), joined(x, *group))
