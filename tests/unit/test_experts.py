"""The router and the experts against a float64 reference and transformers, and each token alone against all together."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tiny_policy import make_tiny_moe
from transformers import AutoModelForCausalLM

from furlong.ops.policy.architecture import Architecture, read_architecture
from furlong.ops.policy.checkpoint import read_tensors
from furlong.ops.policy.decoder import same_bits
from furlong.ops.policy.experts import Experts, route
from furlong.ops.policy.gated import gated
from furlong.ops.policy.manifest import ModelError
from furlong.ops.policy.shard import part_of, pieces
from furlong.ops.weights.layout import cut

ARCH = Architecture(
    kind="qwen3_moe", vocab=61, hidden=40, layers=2, heads=4, kv_heads=2, head_dim=12, ffn=48, norm_eps=1e-6,
    rope_theta=1e4, context=64, tied=False, experts=9, top_k=3, expert_ffn=22, renormalised=True, expert_layers=(1,),
)  # fmt: skip


def block(arch: Architecture = ARCH, dtype: torch.dtype = torch.float32, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: shape for name, shape in arch.shapes().items() if ".1.mlp." in name}
    tensors = {name: (torch.randn(shape, generator=generator) * 0.3).to(dtype) for name, shape in shapes.items()}
    return Experts(arch, 1, tensors), tensors


def tokens(count: int, dtype: torch.dtype = torch.float32, seed: int = 1):
    return torch.randn(count, ARCH.hidden, generator=torch.Generator().manual_seed(seed)).to(dtype)


def slow(arch: Architecture, tensors: dict, x: torch.Tensor):
    """One token and one expert at a time, in float64."""
    w = {name.removeprefix("model.layers.1.mlp."): tensor.double() for name, tensor in tensors.items()}
    out, chosen = torch.zeros(x.shape, dtype=torch.float64), []
    for t, token in enumerate(x.double()):
        likely = torch.softmax(w["gate.weight"] @ token, 0)
        best = sorted(range(arch.experts), key=lambda e: (-likely[e].item(), e))[: arch.top_k]
        total = sum(likely[e] for e in best) if arch.renormalised else 1.0
        for e in best:
            gate, up = w[f"experts.{e}.gate_proj.weight"] @ token, w[f"experts.{e}.up_proj.weight"] @ token
            out[t] += likely[e] / total * (w[f"experts.{e}.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up))
        chosen.append(best)
    return out, torch.tensor(chosen)


@pytest.mark.parametrize("renormalised", [True, False])
@pytest.mark.parametrize("top_k", [1, 3, 9])
def test_the_block_is_that_of_float64(top_k, renormalised):
    arch = replace(ARCH, top_k=top_k, renormalised=renormalised)
    experts, tensors = block(arch)
    x = tokens(64)
    out, chosen = experts(x)
    want, best = slow(arch, tensors, x)
    assert torch.equal(chosen, best)
    assert want.abs().max() > 0.5
    assert (out - want).abs().max() <= 1e-5


def test_bfloat16_differs_from_float64_by_roundings():
    """Inputs and weights are the same rounded numbers. Three products and the shares are rounded to 8 bits, of about
    2^-9 each: at most 2 % of the largest output, for tokens whose experts are the same."""
    experts, tensors = block(dtype=torch.bfloat16)
    x = tokens(200, torch.bfloat16)
    out, chosen = experts(x)
    want, best = slow(ARCH, tensors, x)
    same = (chosen.sort(-1)[0] == best.sort(-1)[0]).all(-1)
    assert same.float().mean() >= 0.95
    assert (out - want)[same].abs().max() <= 0.02 * want.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("company", [1, 2, 7, 33, 128])
def test_a_token_gets_the_same_bits_in_any_company(dtype, company):
    experts, _ = block(dtype=dtype)
    x = tokens(128, dtype)
    all_out, all_chosen = experts(x)
    order = torch.randperm(128, generator=torch.Generator().manual_seed(company))
    for some in order.split(company):
        out, chosen = experts(x[some])
        assert torch.equal(chosen, all_chosen[some])
        assert same_bits(out, all_out[some])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_activation_has_the_same_bits_in_any_company(dtype):
    """97 columns leave every vector some over; 3001 rows are split between threads amid a row."""
    both = torch.randn(3001, 2 * 97, generator=torch.Generator().manual_seed(2)).to(dtype)
    whole = gated(both)
    for count in (1, 5, 640):
        assert all(same_bits(gated(part), whole[i * count :][:count]) for i, part in enumerate(both.split(count)))
    gate, up = both.double().chunk(2, -1)
    assert (whole - F.silu(gate) * up).abs().max() <= (1e-5 if dtype == torch.float32 else 0.1)
    far = torch.tensor([[-1e4, -200.0, -90.0, 90.0, 1e4, 0.0] + [1.0] * 6])
    assert torch.equal(gated(far)[:, 3:], torch.tensor([[90.0, 1e4, 0.0]]))
    assert gated(far)[:, :3].abs().max() <= 1e-30


def test_ties_go_to_the_lowest_ids():
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0], [0.0] * 5, [3.0, 3.0, 5.0, -1e30, 3.0]])
    shares, chosen = route(logits, 3, True)
    assert chosen.tolist() == [[1, 2, 4], [0, 1, 2], [2, 0, 1]]
    assert (shares.sum(-1) - 1).abs().max() <= 1e-6
    assert chosen.is_contiguous()


def test_no_token_and_one_token():
    experts, _ = block()
    out, chosen = experts(tokens(0))
    assert (out.shape, chosen.shape) == ((0, 40), (0, 3))
    assert experts(tokens(1))[0].shape == (1, 40)


def test_what_is_not_finite_stays_with_its_token():
    experts, _ = block()
    x = tokens(8)
    want, choice = experts(x)
    x[3], x[5, 0] = float("nan"), float("inf")
    out, chosen = experts(x)
    rest = [0, 1, 2, 4, 6, 7]
    assert torch.equal(out[rest], want[rest])
    assert torch.equal(chosen[rest], choice[rest])
    assert out[[3, 5]].isnan().any(-1).all()
    assert all(len(set(row)) == 3 and 0 <= min(row) <= max(row) < 9 for row in chosen.tolist())


def test_served_bits_are_those_of_the_tensors():
    tensors = block(dtype=torch.bfloat16)[1]
    for tensor in tensors.values():
        bits = tensor.view(torch.int16).flatten()
        bits[:4] = torch.tensor([-0x8000, 1, 0x7FA5, -0x0001], dtype=torch.int16)
    served = Experts(ARCH, 1, tensors).served(ARCH, 1)
    assert served.keys() == tensors.keys() == set(Experts.names(ARCH, 1).values())
    assert all(same_bits(served[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("size", [1, 2])
def test_parts_of_the_experts_add_up(size):
    """Float32 sums in another order: 1e-5."""
    experts, tensors = block()
    x = tokens(50)
    want, choice = experts(x)
    total = torch.zeros_like(want)
    for rank in range(size):
        part, mine = part_of(ARCH, rank, size), pieces(ARCH, rank, size)
        own = {name: cut(tensor, mine[name]).contiguous() for name, tensor in tensors.items()}
        assert all(tuple(own[name].shape) == part.shapes()[name] for name in own)
        out, chosen = Experts(part, 1, own)(x)
        assert torch.equal(chosen, choice)
        total += out
    assert (total - want).abs().max() <= 1e-5


def test_sizes_that_split_the_experts_too():
    more = {"heads": 12, "kv_heads": 6}
    assert replace(ARCH, **more, ffn=24, expert_ffn=12).splits() == [1, 2, 3, 6]
    assert replace(ARCH, **more, ffn=24, expert_ffn=9).splits() == [1, 3]
    assert replace(ARCH, **more, ffn=9, expert_ffn=12).splits() == [1, 3]
    assert replace(ARCH, **more, ffn=7, expert_ffn=12, expert_layers=(0, 1)).splits() == [1, 2, 3, 6]
    assert Architecture(**json.loads(json.dumps(ARCH.__dict__))) == ARCH


@pytest.mark.parametrize("renormalised", [True, False])
def test_every_layer_chooses_what_transformers_chooses(tmp_path, renormalised):
    folder = make_tiny_moe(tmp_path, norm_topk_prob=renormalised)
    arch = read_architecture(folder)
    tensors = read_tensors(folder, arch, torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert arch.expert_layers == (0, 2)
    x = torch.randn(300, arch.hidden, generator=torch.Generator().manual_seed(3))
    for layer in arch.expert_layers:
        out, chosen = Experts(arch, layer, tensors)(x)
        mlp = model.model.layers[layer].mlp
        with torch.no_grad():
            assert torch.equal(chosen, mlp.gate(x)[2])
            assert (out - mlp(x[None])[0]).abs().max() <= 1e-5


BAD = [
    ({"num_local_experts": None}, "num_experts is missing"),
    ({"num_experts": 7}, r"num_experts is \[6, 7\]"),
    ({"num_local_experts": -1}, "num_experts=-1"),
    ({"num_local_experts": 2**16 + 1}, "num_experts=65537"),
    ({"num_experts_per_tok": 7}, "num_experts_per_tok=7 .* with 6 experts"),
    ({"num_experts_per_tok": None}, "num_experts_per_tok=None"),
    ({"moe_intermediate_size": None}, "moe_intermediate_size=None"),
    ({"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
    ({"use_sliding_window": True}, "use_sliding_window=True"),
    ({"num_local_experts": 5}, r"experts.5.* is not part of the model"),
    ({"mlp_only_layers": []}, r"layers.1.mlp.experts.* is missing"),
    ({"model_type": "qwen3"}, r"layers.0.mlp.* is missing"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_folders_that_contradict_themselves_are_refused(tmp_path, change, message):
    folder = make_tiny_moe(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ModelError, match=message):
        read_tensors(folder, read_architecture(folder), torch.float32)


def test_layers_with_experts_are_those_of_transformers(tmp_path):
    """Both names of the number of experts are read, as released checkpoints have the older one."""
    folder = make_tiny_moe(tmp_path, num_hidden_layers=5, mlp_only_layers=[3], decoder_sparse_step=2)
    arch = read_architecture(folder)
    assert arch.expert_layers == (1,)
    read_tensors(folder, arch, torch.float32)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["num_experts"] = config.pop("num_local_experts")
    path.write_text(json.dumps(config))
    assert read_architecture(folder) == arch
    path.write_text(json.dumps(config | {"num_experts": 0}))
    assert read_architecture(folder).expert_layers == ()
