"""`swift` against its formulas, written down a second time: one row, one head, one token before it at a time.

Nothing of the model's own code computes here. It is asked for its parameters, its logits and its gradients; the other
side is sums and matrix products on those same tensors, as docs/guides/families.md and the head of `swift` describe
them, in float64: what is left between the two is the rounding of the model alone.

Shapes: T positions, D width, K head size, V vocabulary.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from homing.lm.model import Decoder
from homing.wire.run_json import Model

CAP = 15.0
SHARPNESS = 1.2
MOST_VALUE = 3.0
VALUE_CHANNELS = 12
SMEAR_CHANNELS = 24

# Heads that share keys and values, an odd and an even number of layers, a vocabulary that is no whole tile.
ODD = Model("swift", "swift", 5, 48, 4, 2, 12, 80, 24, 101, False, rope_base=3e3, norm_eps=1e-5)
EVEN = Model("swift", "swift", 4, 32, 2, 2, 16, 64, 24, 130, False, rope_base=1e5)
ONE = Model("swift", "swift", 1, 32, 4, 1, 8, 48, 24, 70, False)

Weights = dict[str, Tensor]


def make(shape: Model) -> Decoder:
    """No parameter is 0 or 1 as in a fresh model, where half of the formulas would change nothing."""
    model = Decoder(shape)
    noise = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_table = name.endswith(("embed_tokens.weight", "lm_head.weight", "value_embed.weight"))
            # The head so large that the cap bends the logits; other products keep the size of what they are given.
            size = 0.6 if is_table else 0.1 if parameter.dim() == 1 else parameter.shape[1] ** -0.5
            parameter.copy_(size * torch.randn(parameter.shape, generator=noise))
            if parameter.dim() == 1:  # the scales: no two alike, and none near 0
                parameter.add_(1.1 if name.endswith("keep_scales") else 0.4)
    return model


# -- the formulas ----------------------------------------------------------------------------------------------------


def norm(x: Tensor, eps: float) -> Tensor:
    return x / ((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps) ** 0.5


def sigmoid(x: Tensor) -> Tensor:
    return 1.0 / (1.0 + torch.exp(-x))


def rotate(x_TK: Tensor, base: float) -> Tensor:
    """Channel i and channel i + K/2 are a point in the plane, turned by position * base^(-2i/K)."""
    T, K = x_TK.shape
    columns: list[Tensor] = [torch.empty(0)] * K
    for i in range(K // 2):
        angles = [position * base ** (-2 * i / K) for position in range(T)]
        cos = torch.tensor([math.cos(angle) for angle in angles], dtype=x_TK.dtype)
        sin = torch.tensor([math.sin(angle) for angle in angles], dtype=x_TK.dtype)
        a, b = x_TK[:, i], x_TK[:, i + K // 2]
        columns[i], columns[i + K // 2] = a * cos - b * sin, b * cos + a * sin
    return torch.stack(columns, dim=1)


def attention(x_TD: Tensor, ids: list[int], w: Weights, shape: Model, layer: int) -> Tensor:
    T, K = x_TD.shape[0], shape.head_size
    at = f"model.layers.{layer}.self_attn."
    heads = []
    for head in range(shape.num_heads):
        group = head // (shape.num_heads // shape.num_kv_heads)
        own, shared = slice(head * K, (head + 1) * K), slice(group * K, (group + 1) * K)
        q = rotate(SHARPNESS * norm(x_TD @ w[at + "q_proj.weight"][own].T, shape.norm_eps), shape.rope_base)
        k = rotate(SHARPNESS * norm(x_TD @ w[at + "k_proj.weight"][shared].T, shape.norm_eps), shape.rope_base)
        v = x_TD @ w[at + "v_proj.weight"][shared].T
        if (shape.num_layers - 1 - layer) % 2 == 0:  # the last layer, and every second one before it
            gate = MOST_VALUE * sigmoid(x_TD[:, :VALUE_CHANNELS] @ w[at + "value_gate.weight"][group])
            v = v + gate[:, None] * w[at + "value_embed.weight"][ids][:, shared]
        rows = []
        for t in range(T):
            scores = torch.exp(k[: t + 1] @ q[t] / math.sqrt(K))
            rows.append((scores / scores.sum()) @ v[: t + 1])
        heads.append(torch.stack(rows))
    return torch.cat(heads, dim=1) @ w[at + "o_proj.weight"].T


def feed_forward(x_TD: Tensor, w: Weights, layer: int) -> Tensor:
    at = f"model.layers.{layer}.mlp."
    up = x_TD @ w[at + "up_proj.weight"].T
    return (up * up * (up > 0)) @ w[at + "down_proj.weight"].T


def swift(ids: list[int], w: Weights, shape: Model) -> Tensor:
    """Logits (T, V) of one text."""
    eps = shape.norm_eps
    embedded = norm(w["model.embed_tokens.weight"][ids], eps)
    first_rows = [embedded[0]]
    for t in range(1, len(ids)):
        gate = sigmoid(embedded[t, :SMEAR_CHANNELS] @ w["model.smear_gate.weight"][0])
        first_rows.append(embedded[t] + w["model.smear_scale"] * gate * embedded[t - 1])
    x = first = middle = torch.stack(first_rows)
    for layer in range(shape.num_layers):
        x = w["model.keep_scales"][layer] * x + w["model.first_scales"][layer] * first
        x = x + attention(norm(x, eps), ids, w, shape, layer)
        x = x + feed_forward(norm(x, eps), w, layer)
        if layer == shape.num_layers // 2:
            middle = x
    x = norm(x - w["model.backout_scale"] * middle, eps)
    return CAP * torch.tanh(x @ w["lm_head.weight"][: shape.vocab_size].T / CAP)


def mean_nats(logits_TV: Tensor, targets: list[int]) -> Tensor:
    exps = torch.exp(logits_TV)
    chosen = [exps[t, target] / exps[t].sum() for t, target in enumerate(targets) if target >= 0]
    return -torch.log(torch.stack(chosen)).mean()


# -- the comparison --------------------------------------------------------------------------------------------------


def compare(model: Decoder, loss: Tensor, wanted_loss: Tensor, weights: Weights) -> None:
    assert abs(loss.item() - wanted_loss.item()) < 1e-4
    loss.backward()
    wanted_loss.backward()
    for name, parameter in model.named_parameters():
        ours, wanted = parameter.grad, weights[name].grad
        assert ours is not None, name
        assert wanted is not None, name
        assert wanted.abs().max() > 1e-5, f"{name} has no part in this loss: nothing is compared"
        assert (ours - wanted).abs().max() < 1e-4, name


def drawn(shape: Model, seed: int, *size: int) -> Tensor:
    return torch.randint(0, shape.vocab_size, size, generator=torch.Generator().manual_seed(seed))


def copied(model: Decoder) -> Weights:
    return {name: parameter.detach().double().requires_grad_() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("shape", [ODD, EVEN, ONE], ids=["odd", "even", "one"])
def test_swift_computes_its_formulas_and_their_gradient(shape: Model) -> None:
    model = make(shape)
    weights = copied(model)
    ids, targets = drawn(shape, 1, 2, 19), drawn(shape, 2, 2, 19)
    targets[0, :4] = -100
    wanted = [swift(row, weights, shape) for row in ids.tolist()]
    logits = model(ids)
    assert (logits - torch.stack(wanted)).abs().max() < 1e-4
    assert logits.abs().max() > 0.5 * CAP, "the cap has something to do"
    nats = mean_nats(torch.cat(wanted), targets.flatten().tolist())
    compare(model, model.loss(ids, targets), nats, weights)


def test_texts_in_one_row_are_computed_as_the_formulas_compute_each_alone() -> None:
    """Also what the first token of the second text sees of the one before it: nothing."""
    model = make(ODD)
    weights = copied(model)
    ids, targets = drawn(ODD, 3, 1, 20), drawn(ODD, 4, 1, 20)
    segments = torch.tensor([[0] * 8 + [1] * 12])
    row = ids[0].tolist()
    wanted = torch.cat([swift(row[:8], weights, ODD), swift(row[8:], weights, ODD)])
    assert (model(ids, segments=segments)[0] - wanted).abs().max() < 1e-4
    nats = mean_nats(wanted, targets[0].tolist())
    compare(model, model.loss(ids, targets, segments=segments), nats, weights)


def test_what_is_read_token_by_token_is_what_the_formulas_say_of_the_whole() -> None:
    model = make(ODD)
    ids = drawn(ODD, 6, 1, 15)
    with torch.no_grad():
        wanted = swift(ids[0].tolist(), copied(model), ODD)
        cache = model.new_cache(capacity=15)
        parts = [model(ids[:, :6], cache=cache), *(model(ids[:, t : t + 1], cache=cache) for t in range(6, 15))]
    assert (torch.cat(parts, dim=1)[0] - wanted).abs().max() < 1e-4
