"""megatron-core's model against transformers', in every layout, and the weights out of it against those put in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from furlong.ops.policy.architecture import read_architecture
from furlong.ops.policy.checkpoint import read_tensors
from furlong.ops.protocols import TrainBatch
from furlong.ops.weights.digest import tensor_digest
from furlong.ops.weights.layout import Piece, TensorSpec, check_tiling, cut, whole_piece

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from tiny_policy import CONFIGS, SHAPE, make_batch, make_tiny_moe

DENSE = ("llama", "qwen2", "qwen3")
KINDS = (*DENSE, "qwen3_moe")
LIMITS = {"fp32": 1e-5, "fp64": 1e-12}
"""On the difference of log-probabilities and entropies. Products of tiny models differ in the order of sums only."""
RANGE = 0.2
"""Of weights, whose four layers then give logits of a spread that trained models have (about 2)."""
LAYOUTS = {
    1: {"dp1": KINDS},
    2: {
        "tp2": DENSE,
        "tp2-sp": ("qwen2", "qwen3_moe"),
        "pp2": ("llama", "qwen3_moe"),
        "pp2-vpp2": ("llama", "qwen3"),
        "cp2": ("qwen3", "qwen3_moe"),
        "ep2-dp2": ("qwen3_moe",),
    },
    4: {
        "tp2-pp2": ("llama", "qwen2"),
        "tp2-cp2-sp": ("qwen3", "qwen3_moe"),
        "cp4": ("llama",),
        "pp4": ("llama", "qwen3_moe"),
        "tp2-ep4-dp2-sp": ("qwen3_moe",),
    },
}
"""Number of ranks -> layout -> models. Experts under tp without sp are refused."""
LIMIT_OF_RING = {"fp32": 2e-6, "fp64": 1e-14, "bf16": 4e-3, "bf16 gradients": 2e-2}
"""Of outputs and gradients, relative to the largest. bfloat16 outputs are rounded once, to 8 bits; gradients also have
the output's rounding in them, for the backward pass reads it as it was given out (as FlashAttention's does)."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of four layers, a batch, and what transformers makes of it in float32 and in float64 throughout."""
    folder = tmp_path_factory.mktemp("megatron")
    # Longer than BUDGET together, so that there are several micro-batches; few letters, so that they share beginnings.
    batch = make_batch(5, (4, 1, 3, 2, 4, 3), letters=4)
    (folder / "batch.json").write_text(json.dumps(asdict(batch)))
    for kind in KINDS:
        place = folder / kind
        place.mkdir()
        make_model(place, kind)
        for name, dtype in (("fp32", torch.float32), ("fp64", torch.float64)):
            save_file(expected(str(place), batch, dtype), folder / f"{kind}.{name}.safetensors")
    return folder


def make_model(place: Path, kind: str) -> None:
    if kind == "qwen3_moe":
        make_tiny_moe(place, num_hidden_layers=4, num_experts=8, initializer_range=RANGE)
        return
    small = CONFIGS[kind]
    more = {"head_dim": 12} if kind == "qwen3" else {}
    more |= {"num_hidden_layers": 4, "initializer_range": RANGE, "tie_word_embeddings": small.tie_word_embeddings}
    config = type(small)(**SHAPE | more)
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(config).save_pretrained(place)


def expected(folder: str, batch: TrainBatch, dtype: torch.dtype) -> dict[str, Tensor]:
    """Trajectory -> log-probability of every token at each of its replies' places, one unpacked sequence at a time."""
    slow = {"attn_implementation": "sdpa", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **slow).eval()
    if dtype == torch.float64:
        compute_in_float64(model)
    found = {}
    for index, reply in enumerate(batch.replies):
        prompt = batch.prompts[batch.group[index]]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + reply]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        found[str(index)] = torch.log_softmax(logits.double() / batch.temperature, -1).contiguous()
    return found


def compute_in_float64(model: nn.Module) -> None:
    """transformers computes norms and routers in float32 whatever the dtype; here they are what their formulas say."""

    def norm(module: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda x: module.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)

    def router(module: nn.Module) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
        def forward(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = F.linear(x.reshape(-1, module.hidden_dim), module.weight)
            shares, chosen = torch.softmax(logits, -1).topk(module.top_k)
            return logits, shares / shares.sum(-1, keepdim=True) if module.norm_topk_prob else shares, chosen

        return forward

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = norm(module)
        if type(module).__name__.endswith("TopKRouter"):
            module.forward = router(module)


def run(folder: Path, world: int) -> list[dict[str, dict[str, float]]]:
    """What each rank of a world found, all layouts of it one after another in the same processes."""
    script = Path(__file__).with_name("megatron_ranks.py")
    cases = [f"{layout}={','.join(kinds)}" for layout, kinds in LAYOUTS[world].items()]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(world), str(folder), *cases],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        told = [process.communicate(timeout=280)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * world, "\n".join(told)
    return [json.loads((folder / f"{world}.{rank}.json").read_text()) for rank in range(world)]


@pytest.fixture(scope="module", params=[1, 2, pytest.param(4, marks=pytest.mark.slow)])
def world(request: pytest.FixtureRequest, folder: Path) -> tuple[int, dict[str, dict[str, float]]]:
    """A number of ranks, and over them the worst and the sum of what they compared."""
    merged: dict[str, dict[str, float]] = defaultdict(lambda: {"worst": 0.0, "seen": 0})
    for found in run(folder, request.param):
        for case, values in found.items():
            assert values["worst"] == values["worst"], case
            merged[case]["worst"] = max(merged[case]["worst"], values["worst"])
            merged[case]["seen"] += values["seen"]
    return request.param, dict(merged)


def test_logits_equal_transformers(world):
    number, found = world
    cases = {case: values for case, values in found.items() if not case.startswith("ring")}
    models = [f"{layout}/{kind}" for layout, kinds in LAYOUTS[number].items() for kind in kinds]
    assert set(cases) == {f"{model}/{name}" for model in models for name in LIMITS}
    assert all(values["seen"] > 20 for values in cases.values())
    over = {case: values for case, values in cases.items() if values["worst"] > LIMITS[case.rpartition("/")[2]]}
    assert not over


def test_ring_equals_dense_attention(world):
    number, found = world
    cases = {case: values for case, values in found.items() if case.startswith("ring")}
    assert len(cases) == (30 if number > 1 else 0)
    limits = {f"{name}{what}": LIMIT_OF_RING[name] for name in ("fp32", "fp64", "bf16") for what in ("", " gradients")}
    limits |= LIMIT_OF_RING
    assert not {case: found for case, found in cases.items() if not found["worst"] <= limits[case.rpartition("/")[2]]}


def test_weights_come_back_bitwise(world, folder):
    number, _ = world
    for layout, kinds in LAYOUTS[number].items():
        for kind in kinds:
            architecture = read_architecture(str(folder / kind))
            original = read_tensors(str(folder / kind), architecture, torch.float32)
            parts: dict[str, dict[Piece, Tensor]] = defaultdict(dict)
            owned: dict[str, list[Piece]] = defaultdict(list)
            for rank in range(number):
                for key, tensor in load_file(folder / f"{layout}.{kind}.{rank}.safetensors").items():
                    name, *numbers, owner = key.split("|")
                    piece = Piece(name, *map(int, numbers))
                    replica = parts[name].setdefault(piece, tensor)
                    assert torch.equal(replica, tensor), f"{layout} {kind} rank {rank}: {piece}"
                    owned[name] += [piece] * (owner == "True")
            assert parts.keys() == original.keys()
            for name, pieces in parts.items():
                spec = TensorSpec(name, "float32", tuple(original[name].shape), "")
                check_tiling(owned[name], whole_piece(name, spec.shape), spec)
                whole = torch.empty(spec.shape)
                for piece, tensor in pieces.items():
                    cut(whole, piece).copy_(tensor)
                assert tensor_digest(whole) == tensor_digest(original[name]), f"{layout} {kind} {name}"
