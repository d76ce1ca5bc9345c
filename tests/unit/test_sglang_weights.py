"""What a server must report of its parameters before anything is attested: all of them, nothing else, the right bytes."""

from __future__ import annotations

import pytest
import torch

from furlong.ops.policy.architecture import Architecture
from furlong.resources.engines.sglang_weights import Weights, compare, parameters, weigh
from furlong.resources.engines.step_gate import EngineError


def architecture(kind: str, tied: bool) -> Architecture:
    experts = {"experts": 3, "top_k": 2, "expert_ffn": 24, "expert_layers": (0, 1)} if kind == "qwen3_moe" else {}
    return Architecture(kind, 61, 32, 2, 4, 2, 8, 48, 1e-5, 1e4, 64, tied, **experts)


def some_weights(arch: Architecture) -> Weights:
    draw = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=draw) for name, shape in arch.shapes().items()}
    return weigh(3, tensors, arch, torch.float32)


@pytest.fixture(
    params=[("llama", True), ("llama", False), ("qwen2", False), ("qwen3", True), ("qwen3_moe", False)], ids=str
)
def arch(request: pytest.FixtureRequest) -> Architecture:
    return architecture(*request.param)


def test_every_tensor_is_in_one_parameter(arch: Architecture) -> None:
    held = [name for names in parameters(arch).values() for name in names]
    assert sorted(held) == sorted(arch.shapes())
    assert ("lm_head.weight" in parameters(arch)) is not arch.tied


def test_experts_of_a_layer_are_two_parameters() -> None:
    arch = architecture("qwen3_moe", False)
    held = parameters(arch)
    at = "model.layers.1.mlp.experts."
    assert held[f"{at}w13_weight"] == [f"{at}{e}.{part}_proj.weight" for e in range(3) for part in ("gate", "up")]
    assert held[f"{at}w2_weight"] == [f"{at}{e}.down_proj.weight" for e in range(3)]
    assert held["model.layers.1.mlp.gate.weight"] == ["model.layers.1.mlp.gate.weight"]
    assert not any("gate_up_proj" in name for name in held)


def test_exactly_the_parameters_of_the_version_are_accepted(arch: Architecture) -> None:
    weights = some_weights(arch)
    reported = dict(weights.checksums)
    compare(weights, reported, arch)
    for name in reported:
        with pytest.raises(EngineError, match=f"{name} .1 such. is only on one side"):
            compare(weights, {other: told for other, told in reported.items() if other != name}, arch)
        with pytest.raises(EngineError, match=f"does not hold version 3: parameter {name} "):
            compare(weights, reported | {name: "0" * 16}, arch)
    with pytest.raises(EngineError, match="only on one side"):
        compare(weights, reported | {"model.layers.0.self_attn.attn.k_scale": "0" * 16}, arch)
    with pytest.raises(EngineError, match="only on one side"):
        compare(weights, {}, arch)


def test_every_element_counts(arch: Architecture) -> None:
    weights = some_weights(arch)
    for name, tensor in weights.tensors.items():
        for place in (0, -1):
            other = tensor.clone()
            other.view(torch.int32).view(-1)[place] ^= 1
            altered = weigh(3, weights.tensors | {name: other}, arch, torch.float32, weights)
            wrong = [p for p, checksum in altered.checksums.items() if checksum != weights.checksums[p]]
            assert wrong == [p for p, names in parameters(arch).items() if name in names]
