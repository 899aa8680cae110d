"""AdamW in eight bits: bitsandbytes' numbers, fp32's results on a small problem, exact on disk."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save
from torch import nn

from homing.lm.model import Decoder
from homing.lm.train.optim import adamw
from homing.lm.train.optim.adamw import Adam8Group, AdamGroup
from homing.lm.train.optim.offload import Now
from homing.lm.train.optim.param_groups import build_optimizer
from homing.wire.run_json import Model, Optimizer

SPEC = Optimizer(
    kind="adamw", lr=1e-2, lr_embedding=1e-2, lr_head=1e-2, lr_norm=1e-2, weight_decay=0.1, lr_scalar=1e-2,
    states="int8",
)  # fmt: skip
SHAPE = Model(
    family="stock", arch="llama", num_layers=1, width=64, num_heads=2, num_kv_heads=2, head_size=32, ffn_width=96,
    context=16, vocab_size=100, is_tied=False,
)  # fmt: skip
ONE = torch.ones(())


def group(parameter: nn.Parameter, kind: type, **more: Any) -> Any:
    return kind([("w", parameter)], **{"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "decay": 0.1, **more})


def step_group(one: Any, lr_scale: float, step_count: torch.Tensor, is_good: torch.Tensor) -> None:
    for load in one.loads():
        load.step(load.states, Now(lr_scale, step_count, is_good))


@pytest.mark.acceptance("X18")
def test_the_loss_falls_as_it_does_with_fp32_states() -> None:
    """A least-squares problem with a condition number of one hundred."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 64, generator=generator) * torch.logspace(-1, 1, 64)
    y = x @ torch.randn(64, 96, generator=generator) / 8
    losses = {}
    for kind in (AdamGroup, Adam8Group):
        weight = nn.Parameter(torch.zeros(64, 96))
        optimizer, curve = group(weight, kind, decay=0.0), []
        for step in range(1, 301):
            loss = (x @ weight - y).square().mean()
            weight.grad = torch.autograd.grad(loss, weight)[0]
            step_group(optimizer, 1.0 - step / 400, torch.tensor(float(step)), ONE)
            curve.append(loss.item())
        losses[kind] = curve
    start, fp32, int8 = losses[AdamGroup][0], losses[AdamGroup][-1], losses[Adam8Group][-1]
    assert fp32 < 0.01 * start
    assert int8 < 1.1 * fp32 + 1e-3 * start


@pytest.mark.acceptance("X18")
def test_one_step_and_its_bytes_are_those_of_bitsandbytes() -> None:
    bnb = pytest.importorskip("bitsandbytes")
    generator = torch.Generator().manual_seed(1)
    ours, reference = (nn.Parameter(torch.ones(80, 100) * 0.5) for _ in range(2))
    optimizer = group(ours, Adam8Group)
    other = bnb.optim.AdamW8bit([reference], lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    for step in range(1, 6):
        grad = torch.randn(80, 100, generator=generator) * 0.01
        ours.grad, reference.grad = grad.clone(), grad.clone()
        step_group(optimizer, 1.0, torch.tensor(float(step)), ONE)
        other.step()
    state = other.state[reference]
    # Their CPU code rounds by a table of 65,536 entries, so a number at the edge of a step may fall on either side.
    apart = (optimizer.means[0].indices.view(-1).int() - state["state1"].view(-1).int()).abs()
    assert apart.max() <= 1
    assert (apart > 0).float().mean() < 0.01
    torch.testing.assert_close(optimizer.means[0].magnitudes, state["absmax1"], rtol=1e-2, atol=0)
    torch.testing.assert_close(ours, reference, rtol=0, atol=2e-3)
    assert (ours - reference).abs().mean() < 1e-5


def test_stretches_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def stepped() -> torch.Tensor:
        weight = nn.Parameter(torch.ones(90, 100))
        optimizer = group(weight, Adam8Group)
        for step in (1.0, 2.0):
            weight.grad = torch.randn(90, 100, generator=torch.Generator().manual_seed(int(step)))
            step_group(optimizer, 1.0, torch.tensor(step), ONE)
        return weight.detach()

    whole = stepped()
    monkeypatch.setattr(adamw, "STRETCH", 2 * adamw.BLOCK)
    assert torch.equal(stepped(), whole)


def test_a_step_that_is_not_good_changes_no_byte() -> None:
    weight = nn.Parameter(torch.ones(80, 100))
    optimizer = group(weight, Adam8Group)
    weight.grad = torch.randn(80, 100)
    step_group(optimizer, 1.0, torch.tensor(1.0), ONE)
    moments = [optimizer.means[0], optimizer.squares[0]]
    before = [weight.detach().clone(), *(t.clone() for m in moments for t in (m.indices, m.magnitudes))]
    weight.grad = torch.full((80, 100), torch.nan)
    step_group(optimizer, 1.0, torch.tensor(1.0), torch.zeros(()))
    after = [weight.detach(), *(t for m in moments for t in (m.indices, m.magnitudes))]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def trained(model: Decoder, optimizer: Any, steps: range) -> None:
    for step in steps:
        tokens = torch.randint(SHAPE.vocab_size, (4, 17), generator=torch.Generator().manual_seed(step))
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step(1.0)
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_states_come_back_from_disk_exactly_without_padding_rows(kind: str) -> None:
    """The vocabulary of 100 is 128 rows in memory, and 100 rows end inside a block of the moments."""
    spec = dataclasses.replace(SPEC, kind=kind)
    straight = Decoder(SHAPE)
    straight.init_weights(0)
    optimizer = build_optimizer(straight, spec)
    trained(straight, optimizer, range(3))
    disk = load_tensors(save({name: t.clone().contiguous() for name, t in optimizer.state_tensors().items()}))
    weights = {name: t.clone() for name, t in straight.weights_for_disk().items()}
    assert disk["model.embed_tokens.weight.exp_avg.uint8"].shape == (100, 64)
    assert disk["model.embed_tokens.weight.exp_avg.magnitudes"].shape == (25,)
    assert disk["model.norm.weight.exp_avg"].dtype == torch.float32, "small tensors stay in fp32"
    trained(straight, optimizer, range(3, 6))

    resumed = Decoder(SHAPE)
    resumed.load_weights(weights)
    later = build_optimizer(resumed, spec)
    later.load_state_tensors(disk)
    trained(resumed, later, range(3, 6))
    one, other = straight.weights_for_disk(), resumed.weights_for_disk()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_states_take_a_quarter_of_the_bytes() -> None:
    model = Decoder(SHAPE)
    model.init_weights(0)
    sizes = {}
    for states in ("fp32", "int8"):
        tensors = build_optimizer(model, dataclasses.replace(SPEC, states=states)).state_tensors()
        sizes[states] = sum(t.numel() * t.element_size() for t in tensors.values())
    assert sizes["int8"] < 0.27 * sizes["fp32"]
