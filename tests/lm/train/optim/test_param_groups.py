"""AdamW against torch's, Muon against one matrix at a time, and the state on its way to disk and back."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from homing.errors import DataError
from homing.lm.model import Decoder
from homing.lm.train.optim.adamw import AdamGroup
from homing.lm.train.optim.muon import POLAR_EXPRESS, momentum_at, orthogonalize
from homing.lm.train.optim.offload import Now
from homing.lm.train.optim.param_groups import build_optimizer, clip_gradients, grad_norm
from homing.wire.run_json import Model, Optimizer

SHAPE = Model("stock", "qwen2", 2, 32, 4, 2, 8, 48, 16, 100, False)
SPEC = Optimizer("adamw", lr=0.01, lr_embedding=0.02, lr_head=0.03, lr_norm=0.04, weight_decay=0.1, eps=1e-8)
MUON = dataclasses.replace(SPEC, kind="muon", lr=0.02)


def built(shape: Model = SHAPE) -> Decoder:
    model = Decoder(shape)
    model.init_weights(0)
    return model


def backward(model: Decoder, step: int) -> None:
    tokens = torch.randint(model.shape.vocab_size, (2, 17), generator=torch.Generator().manual_seed(step))
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()


def give_gradients(model: Decoder, step: int) -> None:
    """The same for any two models: real ones differ by rounding, and Adam blows up the difference where they are 0."""
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


def train(model: Decoder, optimizer: object, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step(1.0 / (1 + step))


def weights(model: Decoder) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in model.weights_for_disk().items()}


@pytest.mark.acceptance(81)
def test_adamw_equals_torchs_with_a_rate_and_a_decay_per_part() -> None:
    ours, reference_value = built(), built()
    optimizer = build_optimizer(ours, SPEC)

    def rate(name: str) -> float:
        if "embed_tokens" in name:
            return SPEC.lr_embedding
        if "lm_head" in name:
            return SPEC.lr_head
        return SPEC.lr if name.endswith("proj.weight") else SPEC.lr_norm

    reference = torch.optim.AdamW(
        [
            {"params": [p], "lr": rate(name), "weight_decay": 0.1 if name.endswith("proj.weight") else 0.0}
            for name, p in reference_value.named_parameters()
        ],
        betas=(SPEC.beta1, SPEC.beta2),
        eps=SPEC.eps,
        foreach=False,
        fused=False,
    )
    peaks = [group["lr"] for group in reference.param_groups]
    for step in range(5):
        scale = 1.0 / (1 + step)
        give_gradients(ours, step)
        give_gradients(reference_value, step)
        for group, peak in zip(reference.param_groups, peaks, strict=True):
            group["lr"] = peak * scale
        optimizer.step(scale)
        reference.step()
        mine = weights(ours)
        for name, tensor in weights(reference_value).items():
            torch.testing.assert_close(mine[name], tensor, atol=1e-6, rtol=1e-5, msg=name)


def test_adamw_equals_the_formula() -> None:
    parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    group = AdamGroup([("p", parameter)], lr=0.1, betas=(0.8, 0.9), eps=1e-3, decay=0.5)
    p, m, v = np.array([1.0, -2.0, 3.0]), np.zeros(3), np.zeros(3)
    for t, g in enumerate(([0.1, -0.2, 0.0], [0.3, 0.1, -5.0], [0.0, 0.0, 1.0]), start=1):
        parameter.grad = torch.tensor(g)
        (load,) = group.loads()
        load.step(load.states, Now(0.5, torch.tensor(float(t)), torch.ones(())))
        g = np.array(g)
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        p = p * (1 - 0.05 * 0.5) - 0.05 * (m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.9**t)) + 1e-3)
    np.testing.assert_allclose(parameter.detach().numpy(), p, atol=1e-6)


def test_the_plain_form_of_adamw_equals_the_fused_one() -> None:
    fused, plain = built(), built()
    one, other = build_optimizer(fused, SPEC), build_optimizer(plain, SPEC)
    assert all(group.is_fused for group in one.adam)
    for group in other.adam:
        group.is_fused = False
    for step in range(5):
        for model, optimizer in ((fused, one), (plain, other)):
            give_gradients(model, step)
            optimizer.step(0.5)
    mine = weights(fused)
    for name, tensor in weights(plain).items():
        torch.testing.assert_close(mine[name], tensor, atol=1e-6, rtol=1e-5, msg=name)


# -- Muon --------------------------------------------------------------------------------------------------------------


def muon_by_hand(
    weight: np.ndarray, grads: list[np.ndarray], *, lr: float, momentum: float, decay: float
) -> np.ndarray:
    """One matrix, in float64, as the publications define it."""
    buffer = np.zeros_like(weight)
    for grad in grads:
        buffer = momentum * buffer + (1 - momentum) * grad
        x = (1 - momentum) * grad + momentum * buffer
        is_tall = x.shape[0] > x.shape[1]
        x = x.T if is_tall else x
        x = x / (np.linalg.norm(x) * 1.02 + 1e-7)
        for a, b, c in POLAR_EXPRESS:
            gram = x @ x.T
            x = a * x + b * gram @ x + c * gram @ gram @ x
        x = x.T if is_tall else x
        weight = weight * (1 - lr * decay) - lr * max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5 * x
    return weight


def test_muon_equals_one_matrix_at_a_time() -> None:
    model = built()
    optimizer = build_optimizer(model, MUON)
    start = {name: t.double().numpy() for name, t in weights(model).items()}
    grads: dict[str, list[np.ndarray]] = {name: [] for name in start}
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        for name, p in model.named_parameters():
            grads[name].append(p.grad.double().numpy().copy())
        optimizer.step(0.5)
    found = weights(model)
    matrices = [name for name in start if name.endswith("proj.weight")]
    assert len(matrices) == 2 * 7
    for name in matrices:
        by_hand = muon_by_hand(start[name], grads[name], lr=MUON.lr * 0.5, momentum=MUON.momentum, decay=0.1)
        np.testing.assert_allclose(found[name].numpy(), by_hand, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("size", [(3, 24, 24), (2, 16, 48), (2, 48, 16)])
def test_the_update_of_muon_is_nearly_orthogonal_and_points_where_the_gradient_does(size: tuple[int, ...]) -> None:
    random = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, _, vh = torch.linalg.svd(random, full_matrices=False)
    stretch = torch.logspace(-1.5, 0, min(size[1:]), dtype=torch.float64)  # directions that differ 30-fold in size
    update = orthogonalize((u * stretch @ vh).float()).double()
    assert update.shape == size
    singular = torch.linalg.svdvals(update)
    assert singular.min() > 0.8
    assert singular.max() < 1.2
    assert torch.linalg.matrix_norm(update - u @ vh, ord=2).max() < 0.2


def test_a_gradient_of_zeros_moves_nothing() -> None:
    assert orthogonalize(torch.zeros(2, 4, 6)).abs().max() == 0


def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest() -> None:
    optimizer = build_optimizer(built(), MUON)
    by_muon = {name for group in optimizer.muon for name in group.names}
    by_adam = {name for group in optimizer.adam for name in group.names}
    assert by_muon == {name for name in weights(built()) if name.endswith("proj.weight")}
    assert by_muon | by_adam == set(weights(built()))
    assert not by_muon & by_adam
    assert len(optimizer.muon) == 4  # q and o, k and v, gate and up, down
    assert all(group.decay == 0 for group in optimizer.adam)


def test_a_tied_matrix_takes_the_rate_of_the_head_and_no_decay() -> None:
    optimizer = build_optimizer(built(dataclasses.replace(SHAPE, is_tied=True)), SPEC)
    group = next(g for g in optimizer.adam if g.names == ["model.embed_tokens.weight"])
    assert group.lr == SPEC.lr_head
    assert group.decay == 0


def test_both_optimizers_learn_a_batch_by_heart() -> None:
    for spec in (dataclasses.replace(SPEC, weight_decay=0.0), dataclasses.replace(MUON, weight_decay=0.0)):
        model = built()
        optimizer = build_optimizer(model, spec)
        for _ in range(60):
            optimizer.zero_grad()
            backward(model, 0)
            clip_gradients(model, 1.0)
            optimizer.step(1.0)
        tokens = torch.randint(100, (2, 17), generator=torch.Generator().manual_seed(0))
        assert model.loss(tokens[:, :-1], tokens[:, 1:]).item() < 0.1, spec.kind


# -- clipping ----------------------------------------------------------------------------------------------------------


def test_clipping_scales_all_gradients_alike_and_returns_the_norm_before() -> None:
    ours, reference_value = built(), built()
    backward(ours, 0)
    backward(reference_value, 0)
    before = torch.nn.utils.clip_grad_norm_(reference_value.parameters(), 0.05)
    assert before > 0.05
    found = clip_gradients(ours, 0.05)
    torch.testing.assert_close(found, before)
    assert found.dim() == 0
    torch.testing.assert_close(grad_norm(ours), torch.tensor(0.05), atol=1e-5, rtol=1e-4)
    for mine, other in zip(ours.parameters(), reference_value.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.parametrize("max_norm", [0.0, 1e9])
def test_gradients_within_the_norm_or_with_clipping_off_are_left_alone(max_norm: float) -> None:
    model = built()
    backward(model, 0)
    before = [p.grad.clone() for p in model.parameters()]
    norm = clip_gradients(model, max_norm)
    assert norm == grad_norm(model)
    assert all(torch.equal(p.grad, b) for p, b in zip(model.parameters(), before, strict=True))


def test_a_gradient_that_is_not_finite_shows_in_the_norm() -> None:
    model = built()
    backward(model, 0)
    model.model.norm.weight.grad[3] = float("nan")
    assert not torch.isfinite(clip_gradients(model, 1.0))


# -- state -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [SPEC, MUON], ids=["adamw", "muon"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_step_after_going_through_the_disk_is_bit_for_bit_the_step_without(
    spec: Optimizer, is_tied: bool, tmp_path: Path
) -> None:
    shape = dataclasses.replace(SHAPE, is_tied=is_tied)
    model = built(shape)
    optimizer = build_optimizer(model, spec)
    train(model, optimizer, range(3))
    save_file(optimizer.state_tensors(), tmp_path / "optimizer.safetensors")
    save_file(model.weights_for_disk(), tmp_path / "model.safetensors")
    train(model, optimizer, range(3, 6))

    resumed = Decoder(shape)
    resumed.load_weights(load_file(tmp_path / "model.safetensors"))
    other = build_optimizer(resumed, spec)
    other.load_state_tensors(load_file(tmp_path / "optimizer.safetensors"))
    assert other.num_steps == 3
    train(resumed, other, range(3, 6))
    for name, tensor in weights(model).items():
        assert torch.equal(weights(resumed)[name], tensor), name
    for name, tensor in optimizer.state_tensors().items():
        assert torch.equal(other.state_tensors()[name], tensor), name


def test_state_is_named_after_its_parameter_and_has_no_padding_rows() -> None:
    state = build_optimizer(built(), MUON).state_tensors()
    assert state["model.embed_tokens.weight.exp_avg"].shape == (100, 32)
    assert state["lm_head.weight.exp_avg_sq"].shape == (100, 32)
    assert state["model.layers.1.mlp.down_proj.weight.momentum"].shape == (32, 48)
    assert state["num_steps"].dtype == torch.int64


def test_state_of_another_optimizer_is_refused_by_name_and_changes_nothing() -> None:
    optimizer = build_optimizer(built(), MUON)
    before = copy.deepcopy(optimizer.state_tensors())
    foreign = build_optimizer(built(), SPEC).state_tensors()
    with pytest.raises(DataError) as caught:
        optimizer.load_state_tensors(foreign)
    assert "momentum is missing" in caught.value.why
    assert all(torch.equal(before[name], t) for name, t in optimizer.state_tensors().items())


SWIFT = Model("swift", "swift", 3, 32, 4, 2, 8, 128, 16, 100, False)
PLUS = dataclasses.replace(
    MUON, lr_scalar=0.05, momentum=0.97, momentum_start=0.85, variance_beta=0.9, is_cautious=True, weight_decay=0.5
)


@pytest.mark.parametrize("spec", [SPEC, MUON, PLUS], ids=["adamw", "muon", "plus"])
def test_a_step_that_is_not_good_changes_nothing_whatever_its_gradients(spec: Optimizer) -> None:
    model = built(SWIFT)
    optimizer = build_optimizer(model, spec)
    train(model, optimizer, range(2))
    before, state = weights(model), {name: t.clone() for name, t in optimizer.state_tensors().items()}
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    optimizer.step(1.0, torch.tensor(False), num_steps=2)
    after = optimizer.state_tensors()
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(model).items())
    assert all(torch.equal(state[name], tensor) for name, tensor in after.items())
    assert optimizer.num_steps == 2


def test_every_part_of_swift_has_a_rate_of_its_own_and_moves() -> None:
    model = built(SWIFT)
    optimizer = build_optimizer(model, PLUS)
    before = weights(model)
    train(model, optimizer, range(3))
    assert [name for name, tensor in weights(model).items() if torch.equal(before[name], tensor)] == []
    rates = {name: group.lr for group in optimizer.adam for name in group.names}
    assert rates["model.layers.0.self_attn.value_embed.weight"] == pytest.approx(0.5 * PLUS.lr_embedding)
    assert rates["model.first_scales"] == PLUS.lr_scalar
    assert rates["model.keep_scales"] == pytest.approx(0.01 * PLUS.lr_scalar)
    assert "model.layers.0.mlp.up_proj.weight" not in rates


def test_evening_out_slows_the_rows_that_move_most_and_keeps_the_size_of_the_step() -> None:
    plain, even = built(), built()
    one, other = build_optimizer(plain, MUON), build_optimizer(even, dataclasses.replace(MUON, variance_beta=0.9))
    before = weights(plain)
    for step in range(4):
        for model, optimizer in ((plain, one), (even, other)):
            give_gradients(model, step)
            optimizer.step(1.0, num_steps=step)
    name = "model.layers.0.mlp.up_proj.weight"
    moved, moved_evenly = (weights(model)[name] - before[name] for model in (plain, even))
    assert not torch.equal(moved, moved_evenly)
    assert float(moved_evenly.norm()) == pytest.approx(float(moved.norm()), rel=0.2)
    spread, spread_evenly = (float(m.norm(dim=1).std() / m.norm(dim=1).mean()) for m in (moved, moved_evenly))
    assert spread_evenly <= spread


def test_cautious_decay_never_works_against_the_step() -> None:
    cautious = dataclasses.replace(MUON, weight_decay=1.0, is_cautious=True)
    without = dataclasses.replace(MUON, weight_decay=0.0)
    ends = []
    for spec in (cautious, without):
        model = built()
        optimizer = build_optimizer(model, spec)
        give_gradients(model, 0)
        optimizer.step(1.0)
        ends.append(weights(model))
    name = "model.layers.0.mlp.up_proj.weight"
    begun, decayed, undecayed = weights(built())[name], ends[0][name], ends[1][name]
    step = undecayed - begun
    is_decayed = (decayed - undecayed).abs() > 1e-9
    assert is_decayed.any()
    assert not (is_decayed & (begun * step > 0)).any()  # where the step grows the weight, nothing is taken from it


def test_the_momentum_grows_from_its_start_to_its_full_length() -> None:
    assert momentum_at(MUON, 0) == MUON.momentum
    assert momentum_at(PLUS, 0) == 0.85
    assert momentum_at(PLUS, 150) == pytest.approx(0.91)
    assert momentum_at(PLUS, 10_000) == 0.97


def test_the_state_of_swift_comes_back_from_disk(tmp_path: Path) -> None:
    model, other = built(SWIFT), built(SWIFT)
    first, second = build_optimizer(model, PLUS), build_optimizer(other, PLUS)
    train(model, first, range(3))
    save_file({name: t.contiguous() for name, t in first.state_tensors().items()}, tmp_path / "state.safetensors")
    other.load_weights(model.weights_for_disk())
    second.load_state_tensors(load_file(tmp_path / "state.safetensors"))
    train(model, first, range(3, 5))
    train(other, second, range(3, 5))
    assert all(torch.equal(weights(model)[name], tensor) for name, tensor in weights(other).items())


# -- compiled ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_compiled_step_equals_the_eager_one_and_no_rate_or_momentum_compiles_it_anew() -> None:
    # Traced and functionalized as for a card; turning it into kernels takes a compiler half a minute on a CPU.
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    eager, other = built(SWIFT), built(SWIFT)
    one, two = build_optimizer(eager, PLUS), build_optimizer(other, PLUS)
    two.compile_steps(backend="aot_eager")
    begun = counters["stats"]["unique_graphs"]
    two.rehearse()
    num_graphs = counters["stats"]["unique_graphs"] - begun
    assert num_graphs == 2 * len(two.muon)
    assert all(torch.equal(weights(eager)[name], tensor) for name, tensor in weights(other).items())
    assert two.num_steps == 0
    for step in range(5):
        for model, optimizer in ((eager, one), (other, two)):
            give_gradients(model, step)
            optimizer.step(1.0 / (1 + step), torch.tensor(step != 2), num_steps=60 * step)
    assert counters["stats"]["unique_graphs"] - begun == num_graphs
    mine = weights(other)
    for name, tensor in weights(eager).items():
        torch.testing.assert_close(mine[name], tensor, atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_muon_in_sixteen_bits_goes_where_it_goes_in_thirty_two(kind: torch.dtype) -> None:
    gradient = torch.randn(3, 48, 96, generator=torch.Generator().manual_seed(0))
    exact, rough = orthogonalize(gradient), orthogonalize(gradient, kind)
    assert rough.dtype == kind
    for one, other in zip(exact, rough.float(), strict=True):
        assert torch.nn.functional.cosine_similarity(one.flatten(), other.flatten(), dim=0) > 0.999


def test_parameters_are_slices_of_their_groups_weights() -> None:
    model = built()
    optimizer = build_optimizer(model, MUON)
    for group in optimizer.muon:
        group.weights_MRC.fill_(3.0)
    assert torch.unique(model.get_parameter("model.layers.1.mlp.up_proj.weight").detach()).tolist() == [3.0]


def test_a_model_that_lost_its_group_is_not_stepped_in_silence() -> None:
    model = built()
    optimizer = build_optimizer(model, MUON)
    build_optimizer(model, MUON)  # now the parameters are slices of this one's weights
    backward(model, 0)
    with pytest.raises(AssertionError, match="moved after"):
        optimizer.step(1.0)
