"""LoRA against peft: the base stays frozen, dropout is exact, and peft opens the file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from homing.errors import DataError, IntegrityError, UsageError
from homing.lm.model import Decoder, config_json, fused_ops, layers, lora
from homing.lm.model import loss as loss_module
from homing.lm.model.frozen_linear import FrozenLinear
from homing.lm.train.optim.param_groups import build_optimizer
from homing.wire.run_json import Lora, Model, Optimizer

TINY = Model(
    family="stock", arch="qwen2", num_layers=2, width=32, num_heads=4, num_kv_heads=2, head_size=8, ffn_width=48,
    context=32, vocab_size=100, is_tied=False, rope_base=500.0, norm_eps=1e-5,
)  # fmt: skip
ALL = Lora(rank=4, alpha=8.0, targets=["all"])
ADAM = Optimizer(kind="adamw", lr=1e-2, lr_embedding=1e-2, lr_head=1e-2, lr_norm=1e-2, weight_decay=0.1, lr_scalar=1e-2)


def built(shape: Model = TINY, seed: int = 0) -> Decoder:
    model = Decoder(shape)
    model.init_weights(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms of 1 and biases of 0 would hide a forgotten one
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def adapted(settings: Lora = ALL, shape: Model = TINY, *, storage: str = "fp32", is_trained: bool = True) -> Decoder:
    model = built(shape)
    lora.freeze(model, storage)
    lora.add_lora(model, settings, seed=3)
    if is_trained:
        stir(model)
    return model


def stir(model: Decoder) -> None:
    """Adapters as training leaves them: B is zero only at the start."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise * (0.1 if name.endswith("lora_B") else 0.02))


def batch(rows: int = 2, length: int = 24, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(TINY.vocab_size, (rows, length + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def gradients(model: Decoder) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def opened_in_peft(model: Decoder, settings: Lora, folder: Path, shape: Model = TINY) -> torch.nn.Module:
    """Through the disk: the base as a folder, the adapter as a folder of its own."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base, own = folder / "base", folder / "adapter"
    base.mkdir()
    own.mkdir()
    (base / "config.json").write_text(json.dumps(config_json(shape)))
    save_file(built(shape).weights_for_disk(), base / "model.safetensors", metadata={"format": "pt"})
    (own / "adapter_config.json").write_text(json.dumps(lora.adapter_config(settings, str(base))))
    save_file(model.weights_for_disk(), own / "adapter_model.safetensors", metadata={"format": "pt"})
    reference = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    return PeftModel.from_pretrained(reference, own, is_trainable=True).eval()


@pytest.mark.parametrize("is_dora", [False, True], ids=["LoRA", "DoRA"])
def test_an_adapted_layer_computes_its_formula_and_its_derivative(is_dora: bool) -> None:
    model = adapted(dataclasses.replace(ALL, is_dora=is_dora, is_rslora=True))
    block: Any = model.model.layers[0]
    layer = block.self_attn.q_proj
    a, b, magnitude = layer.adapter.lora_A, layer.adapter.lora_B, layer.adapter.magnitude
    x = torch.randn(7, TINY.width, generator=torch.Generator().manual_seed(2), requires_grad=True)
    weight = layer.weight.dense_weight(torch.float32) + 8.0 / 4**0.5 * b @ a
    if is_dora:
        weight = weight * (magnitude / weight.detach().norm(dim=1)).unsqueeze(1)
    wanted = x @ weight.t() + layer.bias
    factor = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(3))
    trained = [x, a, b, *([magnitude] if is_dora else [])]
    torch.testing.assert_close(layer(x), wanted)
    one = torch.autograd.grad((layer(x) * factor).sum(), trained)
    other = torch.autograd.grad((wanted * factor).sum(), trained)
    for found, expected in zip(one, other, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.acceptance(94)
@pytest.mark.slow  # importing peft takes ten seconds
@pytest.mark.parametrize("arch", ["qwen2", "llama", "qwen3"])
@pytest.mark.parametrize(
    "settings",
    [
        ALL,
        Lora(rank=2, alpha=3.0, targets=["q", "v"]),
        Lora(rank=4, alpha=8.0, targets=["all"], is_rslora=True),
        Lora(rank=4, alpha=8.0, targets=["k", "up", "down"], is_dora=True),
    ],
    ids=["all", "q and v", "rsLoRA", "DoRA"],
)
@pytest.mark.filterwarnings("ignore")
def test_logits_and_gradients_equal_those_of_peft(settings: Lora, arch: str, tmp_path: Path) -> None:
    shape = dataclasses.replace(TINY, arch=arch)
    model = adapted(settings, shape)
    reference: Any = opened_in_peft(model, settings, tmp_path, shape)
    ids, targets = batch()
    ours = model(ids)
    logits = reference(input_ids=ids).logits
    torch.testing.assert_close(ours, logits, rtol=1e-4, atol=1e-4)
    model.loss(ids, targets).backward()
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    wanted = {
        name.replace(".default", "").removesuffix(".weight"): p.grad
        for name, p in reference.named_parameters()
        if p.grad is not None
    }
    found = {
        f"base_model.model.{name}".replace(".adapter.", ".").replace(".magnitude", ".lora_magnitude_vector"): grad
        for name, grad in gradients(model).items()
    }
    assert found.keys() == wanted.keys()
    for name, grad in found.items():
        torch.testing.assert_close(grad, wanted[name], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("storage", ["fp32", "bf16", "nf4"])
def test_a_fresh_adapter_changes_nothing(storage: str) -> None:
    ids, _ = batch()
    base = built()
    lora.freeze(base, storage)
    before = base(ids)
    assert torch.equal(adapted(storage=storage, is_trained=False)(ids), before)


@pytest.mark.parametrize("settings", [ALL, dataclasses.replace(ALL, is_dora=True)], ids=["LoRA", "DoRA"])
@pytest.mark.parametrize("storage", ["fp32", "nf4"])
def test_merged_weights_compute_what_base_and_adapter_did(settings: Lora, storage: str) -> None:
    model, (ids, _) = adapted(settings, storage=storage), batch()
    before = model(ids)
    lora.merge(model)
    torch.testing.assert_close(model(ids), before, rtol=1e-4, atol=1e-5)
    assert not any(isinstance(module, FrozenLinear) for module in model.modules())
    assert model.num_params() == built().num_params(), "a plain decoder again, which full training takes"
    assert model.weights_for_disk().keys() == built().weights_for_disk().keys()


def test_the_base_has_neither_gradient_nor_state_nor_master(capsys: pytest.CaptureFixture[str]) -> None:
    model, (ids, targets) = adapted(storage="bf16"), batch()
    optimizer = build_optimizer(model, ADAM)
    before = {name: b.clone() for name, b in model.named_buffers()}
    model.loss(ids, targets).backward()
    assert all(".adapter." in name for name in gradients(model))
    optimizer.step(1.0)
    assert {n.rsplit(".", 1)[0] for n in optimizer.state_tensors() if n != "num_steps"} == {*gradients(model)}
    assert all(torch.equal(before[name], b) for name, b in model.named_buffers())
    tensors = [*model.named_buffers(), *((name, p) for name, p in model.named_parameters() if not p.requires_grad)]
    matrices = [tensor for name, tensor in tensors if tensor.dim() == 2 and "rope" not in name]
    assert len(matrices) == 2 + 2 * 7
    assert all(matrix.dtype == torch.bfloat16 for matrix in matrices), "no fp32 copy of the base is kept"


def test_a_frozen_head_gets_no_gradient_and_leaves_other_gradients_unchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (ids, targets), whole, cut = batch(), adapted(), adapted()
    whole.loss(ids, targets).backward()
    monkeypatch.setattr(loss_module, "PIECE_LOGITS", 2**10)
    cut.loss(ids, targets).backward()
    one, other = gradients(whole), gradients(cut)
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name])


def test_products_side_by_side_equal_products_one_by_one() -> None:
    """The joined q, k, v and gate, up of the CUDA path, with biases, and adapters on some of them only."""
    model = adapted(dataclasses.replace(ALL, targets=["q", "v", "up"]))
    block: Any = model.model.layers[0]
    x = torch.randn(2, 5, TINY.width, generator=torch.Generator().manual_seed(2), requires_grad=True)
    for group in ([block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj],
                  [block.mlp.gate_proj, block.mlp.up_proj]):  # fmt: skip
        apart = torch.cat([layer(x) for layer in group], dim=-1)
        together = layers.joined(x, *group)
        torch.testing.assert_close(together, apart)
        weight = torch.randn(apart.shape, generator=torch.Generator().manual_seed(3))
        trained = [p for layer in group for p in layer.parameters() if p.requires_grad]
        one = torch.autograd.grad((apart * weight).sum(), [x, *trained])
        other = torch.autograd.grad((together * weight).sum(), [x, *trained])
        for left, right in zip(one, other, strict=True):
            torch.testing.assert_close(left, right)


def test_weights_that_read_the_same_are_slices_of_one_until_they_are_moved() -> None:
    mlp = adapted().model.layers[0].mlp
    gate, up = mlp.gate_proj.weight, mlp.up_proj.weight
    assert gate.together is not None
    assert gate.together.shape == (2 * TINY.ffn_width, TINY.width)
    assert up.dense.data_ptr() == gate.together[TINY.ffn_width :].data_ptr()
    mlp.to("cpu")
    assert gate.together is not None, "nothing was moved"
    mlp.to(torch.float64)
    assert gate.together is None
    four_bits = adapted(storage="nf4").model.layers[0].mlp.gate_proj.weight
    assert four_bits.together is None


def test_biases_of_trained_layers_ride_along_in_the_joined_product() -> None:
    attention: Any = built().model.layers[0].self_attn
    x = torch.randn(2, 5, TINY.width)
    group = [attention.q_proj, attention.k_proj, attention.v_proj]
    torch.testing.assert_close(layers.joined(x, *group), torch.cat([layer(x) for layer in group], dim=-1))


# -- dropout -----------------------------------------------------------------------------------------------------------

DROPPING = dataclasses.replace(ALL, dropout=0.3)


def loss_at(model: Decoder, step: int, chunks: int = 1) -> list[float]:
    ids, targets = batch(rows=4)
    lora.begin_step(model, step)
    parts = zip(ids.chunk(chunks), targets.chunk(chunks), strict=True)
    return [model.loss(i, t).item() for i, t in parts]


def test_dropout_follows_from_seed_step_and_row_and_from_nothing_else() -> None:
    model = adapted(DROPPING)
    first = loss_at(model, 5, chunks=2)
    torch.manual_seed(123)
    torch.rand(7)  # whatever else draws in between
    assert loss_at(model, 6, chunks=2) != first
    assert loss_at(model, 5, chunks=2) == first
    assert loss_at(adapted(DROPPING), 5, chunks=2) == first, "a resumed run drops the same numbers"
    ids, targets = batch(rows=2)
    lora.begin_step(model, 5)
    both = [model.loss(ids, targets).item() for _ in range(2)]
    assert both[0] != both[1], "two micro-batches of one step drop different elements"


def test_dropout_is_for_training_only() -> None:
    ids, _ = batch()
    with torch.no_grad():
        assert torch.equal(adapted(DROPPING)(ids), adapted()(ids))


def test_dropout_keeps_the_mean_and_its_gradient_is_of_what_was_kept() -> None:
    model = adapted(dataclasses.replace(DROPPING, targets=["q"]))
    block: Any = model.model.layers[0]
    layer = block.self_attn.q_proj
    assert model.dropout_clock is not None
    model.dropout_clock.next_piece(1)
    # One token, and A the identity: what is dropped can be read off h.
    with torch.no_grad():
        layer.adapter.lora_A.copy_(torch.eye(4, 32))
        layer.adapter.lora_B.copy_(torch.eye(32, 4))
    x = torch.ones(3000, 32, requires_grad=True)
    base = x.detach() @ layer.weight.dense_weight(torch.float32).t() + layer.bias
    kept = (layer(x) - base)[:, :4] / layer.adapter.scale
    values = {round(v, 3) for v in kept.detach().unique().tolist()}
    assert values == {0.0, round(1 / 0.7, 3)}
    assert kept.mean().item() == pytest.approx(1.0, abs=0.03)
    (dx,) = torch.autograd.grad(layer(x)[:, :4].sum(), x)
    through = dx - layer.weight.dense_weight(torch.float32)[:4].sum(0)
    torch.testing.assert_close(through[:, :4], kept.detach() * layer.adapter.scale, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["half", "all"])
def test_blocks_computed_again_have_the_same_gradients_dropout_included(kind: str) -> None:
    ids, targets = batch()
    plain, again = adapted(DROPPING), adapted(DROPPING).set_recompute(kind)
    for model in (plain, again):
        lora.begin_step(model, 2)
        model.loss(ids, targets).backward()
    one, other = gradients(plain), gradients(again)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


# -- the way to disk and back --------------------------------------------------------------------------------------


def test_an_adapter_and_its_optimizer_come_back_exactly() -> None:
    (ids, targets), (more, after) = batch(), batch(seed=5)

    def step(model: Decoder, optimizer: Any, number: int) -> None:
        lora.begin_step(model, number)
        pair = (ids, targets) if number % 2 else (more, after)
        model.loss(*pair).backward()
        optimizer.step(1.0)
        optimizer.zero_grad()

    straight = adapted(DROPPING, storage="nf4")
    optimizer = build_optimizer(straight, ADAM)
    for number in range(3):
        step(straight, optimizer, number)
    weights = {name: t.clone() for name, t in straight.weights_for_disk().items()}
    state = {name: t.clone() for name, t in optimizer.state_tensors().items()}
    assert all(name.startswith("base_model.model.model.layers.") for name in weights)
    step(straight, optimizer, 3)

    resumed = adapted(DROPPING, storage="nf4", is_trained=False)
    later = build_optimizer(resumed, ADAM)
    resumed.load_weights(weights)
    later.load_state_tensors(state)
    step(resumed, later, 3)
    one, other = straight.weights_for_disk(), resumed.weights_for_disk()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_an_adapter_of_another_rank_is_refused_by_name() -> None:
    model = adapted()
    with pytest.raises(DataError, match=r"(?s)does not fit.*q_proj.lora_A.weight has shape \(2, 32\), not \(4, 32\)"):
        model.load_weights(adapted(dataclasses.replace(ALL, rank=2)).weights_for_disk())


def test_the_base_is_named_by_a_hash_of_its_values_and_another_one_is_refused(tmp_path: Path) -> None:
    save_file(built().weights_for_disk(), tmp_path / "w.safetensors")
    shuffled = sorted(load_file(tmp_path / "w.safetensors").items(), reverse=True)
    with torch.device("meta"):
        model = Decoder(TINY)
    loaded = lora.load_base(model, shuffled, storage="nf4", device="cpu")
    assert loaded == lora.freeze(built(), "fp32"), "neither order nor storage counts"
    other = lora.freeze(built(seed=1), "fp32")
    lora.check_base(loaded, loaded)
    with pytest.raises(IntegrityError, match="different base weights"):
        lora.check_base(loaded, other)


@pytest.mark.parametrize("storage", ["fp32", "bf16", "nf4"])
def test_a_base_that_streams_in_computes_what_one_in_memory_does(storage: str) -> None:
    with torch.device("meta"):
        streamed = Decoder(TINY)
    lora.load_base(streamed, iter(built().weights_for_disk().items()), storage=storage, device="cpu")
    frozen = built()
    lora.freeze(frozen, storage)
    ids, _ = batch()
    assert torch.equal(streamed(ids), frozen(ids))


@pytest.mark.acceptance(95)
def test_loading_holds_one_matrix_at_a_time() -> None:
    """Each tensor handed over is gone when the next but one is asked for: nothing of the file is kept."""
    import weakref

    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def is_held(ref: weakref.ref[torch.Tensor]) -> bool:
        tensor = ref()
        return tensor is not None and tensor.dim() == 2

    def one_at_a_time() -> Any:
        nonlocal most
        for name, tensor in built().weights_for_disk().items():
            copy = tensor.to(torch.bfloat16)
            alive.append(weakref.ref(copy))
            yield name, copy
            del copy
            most = max(most, sum(map(is_held, alive)))

    with torch.device("meta"):
        model = Decoder(TINY)
    lora.load_base(model, one_at_a_time(), storage="nf4", device="cpu")
    assert most <= 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda t: t.update({"model.extra": torch.ones(2)}), "model.extra is not a weight"),
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), r"model.norm.weight has shape \(3,\)"),
    ],
)
def test_a_base_that_does_not_fit_is_refused_by_name(change: Any, words: str) -> None:
    tensors = built().weights_for_disk()
    change(tensors)
    with torch.device("meta"):
        model = Decoder(TINY)
    with pytest.raises(DataError, match=words):
        lora.load_base(model, tensors.items(), storage="fp32", device="cpu")


# -- what cannot be --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"targets": ["query"]}, "'query' is not one of q, k, v, o, gate, up, down, all"),
        ({"targets": []}, "nothing would be trained"),
        ({"rank": 0}, "must be at least 1"),
        ({"dropout": 1.0}, "less than 1"),
        ({"alpha": 0.0}, "greater than 0"),
    ],
)
def test_settings_that_cannot_work_are_named(changes: dict[str, Any], words: str) -> None:
    model = built()
    lora.freeze(model, "fp32")
    with pytest.raises(UsageError, match=words):
        lora.add_lora(model, dataclasses.replace(ALL, **changes), seed=0)


def test_swift_takes_no_adapters_and_fp8_no_frozen_weights() -> None:
    swift = Decoder(dataclasses.replace(TINY, family="swift", arch="swift"))
    with pytest.raises(UsageError, match="swift family does not support adapters"):
        lora.add_lora(swift, ALL, seed=0)
    with pytest.raises(UsageError, match="FP8"):
        adapted().set_precision("fp8")


def test_what_learns_and_how_the_base_is_read_is_said() -> None:
    said = lora.describe(adapted(Lora(rank=4, targets=["v", "q"], is_dora=True), storage="nf4"))
    assert said == (
        "Training 992 adapter parameters of rank 4 with DoRA on q, v; "
        "the base weights are frozen in nf4, dequantized by plain torch."
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's own compiler
@pytest.mark.parametrize("storage", ["fp32", "nf4"])
def test_compiled_blocks_have_the_gradients_of_plain_ones(storage: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ids, targets = batch()
    shape = dataclasses.replace(TINY, num_layers=4)
    plain, fast = adapted(DROPPING, shape, storage=storage), adapted(DROPPING, shape, storage=storage)
    fast.compile_blocks()
    fast.set_recompute("all")
    for model in (plain, fast):
        lora.begin_step(model, 1)
        model.loss(ids, targets).backward()
    assert torch._dynamo.utils.counters["graph_break"] == {}
    # Embedding, end, and the block twice: the input of the first one has no gradient.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4, "blocks share what was compiled"
    one, other = gradients(plain), gradients(fast)
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("storage", ["bf16", "nf4"])
def test_the_cuda_path_agrees_with_the_cpu(storage: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    assert fused_ops.HAS_TRITON
    ids, targets = batch()
    plain, fast = adapted(storage=storage), adapted(storage=storage).to("cuda").set_precision("bf16")
    plain.loss(ids, targets).backward()
    fast.loss(ids.cuda(), targets.cuda()).backward()
    one, other = gradients(plain), gradients(fast)
    for name in one:
        torch.testing.assert_close(one[name], other[name].cpu(), rtol=0.1, atol=2e-2 * one[name].abs().max().item())
