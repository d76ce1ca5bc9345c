"""The arithmetic of adapters: merged bits are the same for pieces and the whole; gradients are autograd's."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lora_samples import adapted, base_of
from tiny_policy import make_folder

from furlong.ops.policy.architecture import read_architecture
from furlong.ops.policy.lora import (
    SCALE,
    Adapter,
    adapters_of,
    gradients,
    is_adapted,
    merge,
    names_of,
    policy_of,
    start,
    weights_of,
)
from furlong.ops.policy.manifest import ModelError
from furlong.ops.policy.shard import pieces
from furlong.ops.weights.layout import Piece, cut

SMALL, LARGE = (48, 32), (700, 513)
"""The larger one is merged in several blocks, the last of them shorter, and its rows are no multiple of a vector."""


def sample(shape, rank=5, seed=0, dtype=torch.bfloat16, wide=torch.float32):
    draw = torch.Generator().manual_seed(seed)
    a, b = torch.randn(rank, shape[1], generator=draw), torch.randn(shape[0], rank, generator=draw)
    return torch.randn(shape, generator=draw).to(dtype), Adapter(a.to(wide), b.to(wide), float(np.float32(0.3)))


def same_bits(one, two):
    return one.dtype == two.dtype and torch.equal(
        one.contiguous().view(torch.uint8), two.contiguous().view(torch.uint8)
    )


def slowly(base, adapter):
    """Element by element in numpy's float32 scalars, each operation rounded on its own."""
    w, a, b = (tensor.float().numpy() for tensor in (base, adapter.a, adapter.b))
    out = np.empty(w.shape, np.float32)
    for i, j in np.ndindex(*w.shape):
        total = b[i, 0] * a[0, j]
        for r in range(1, len(a)):
            total = np.float32(total + np.float32(b[i, r] * a[r, j]))
        out[i, j] = np.float32(np.float32(total * np.float32(adapter.scale)) + w[i, j])
    return torch.from_numpy(out)


def test_the_merged_weight_is_what_the_formula_gives_operation_by_operation():
    base, adapter = sample(SMALL)
    assert same_bits(merge(base, adapter, torch.float32), slowly(base, adapter))
    assert same_bits(merge(base, adapter), slowly(base, adapter).bfloat16())
    one = Adapter(adapter.a[:1], adapter.b[:, :1], 1.0)
    assert same_bits(merge(base, one, torch.float32), slowly(base, one))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_a_piece_has_the_bits_of_the_whole(shape, dtype):
    base, adapter = sample(shape, dtype=dtype)
    base[0, :2] = torch.tensor([float("nan"), -0.0])
    whole = merge(base, adapter)
    for dim, count in ((0, 3), (1, 3), (0, 1), (0, shape[0]), (1, 4)):
        edges = [shape[dim] * at // count for at in range(count + 1)]
        for start_, stop in pairwise(edges):
            piece = Piece("w", dim, start_, stop)
            assert same_bits(merge(cut(base, piece), adapter.cut(piece)), cut(whole, piece)), piece
            # As a rank holds it: in memory of its own.
            mine = Adapter(adapter.cut(piece).a.clone(), adapter.cut(piece).b.clone(), adapter.scale)
            assert same_bits(merge(cut(base, piece).clone(), mine), cut(whole, piece)), piece
    empty = Piece("w", 0, shape[0], shape[0])
    assert merge(cut(base, empty), adapter.cut(empty)).shape == (0, shape[1])


def test_the_number_of_threads_changes_no_bit():
    base, adapter = sample(LARGE)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(merge(base, adapter))
    finally:
        torch.set_num_threads(threads)
    assert same_bits(found[0], found[1])
    assert same_bits(found[0], found[2])


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 40), st.integers(0, 9))
def test_merging_is_near_the_exact_product(rank, outputs, inputs, seed):
    base, adapter = sample((outputs, inputs), rank, seed, torch.float32)
    exact = base.double() + adapter.scale * (adapter.b.double() @ adapter.a.double())
    # Each of rank products, sums and the last two operations rounds by 2^-24 of what is there.
    most = (base.double().abs() + adapter.scale * (adapter.b.double().abs() @ adapter.a.double().abs())) * (rank + 3)
    assert ((merge(base, adapter).double() - exact).abs() <= most * 2**-24).all()


def test_a_zero_adapter_gives_the_base():
    base, adapter = sample(SMALL)
    assert torch.equal(merge(base, Adapter(adapter.a, torch.zeros_like(adapter.b), 2.0)), base)


def test_gradients_are_those_of_autograd_through_the_merged_weight():
    base, adapter = sample(SMALL, wide=torch.float64)
    a, b = adapter.a.clone().requires_grad_(), adapter.b.clone().requires_grad_()
    x, y = (torch.randn(size, dtype=torch.float64) for size in ((7, SMALL[1]), (7, SMALL[0])))
    weight = base.double() + adapter.scale * (b @ a)
    ((x @ weight.T).tanh() * y).sum().backward()
    merged = merge(base, adapter, torch.float64).requires_grad_()
    ((x @ merged.T).tanh() * y).sum().backward()
    found = gradients(merged.grad, adapter)
    torch.testing.assert_close(found[0], a.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[1], b.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dim", [0, 1])
def test_gradients_of_pieces_add_up(dim):
    _, adapter = sample(SMALL, wide=torch.float64)
    whole = torch.randn(SMALL, dtype=torch.float64)
    sums = Adapter(torch.zeros_like(adapter.a), torch.zeros_like(adapter.b), 1.0)
    half = SMALL[dim] // 3
    for piece in (Piece("w", dim, 0, half), Piece("w", dim, half, SMALL[dim])):
        mine = gradients(cut(whole, piece), adapter.cut(piece))
        sums.cut(piece).a.add_(mine[0])
        sums.cut(piece).b.add_(mine[1])
    wanted = gradients(whole, adapter)
    torch.testing.assert_close(sums.a, wanted[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sums.b, wanted[1], rtol=1e-12, atol=1e-12)


def test_the_start_depends_on_seed_and_name_alone():
    a, b = start(3, "model.layers.0.mlp.up_proj.weight", (48, 32), 4)
    again = start(3, "model.layers.0.mlp.up_proj.weight", (48, 32), 4)
    assert same_bits(a, again[0])
    assert (a.shape, b.shape, a.dtype, b.dtype) == ((4, 32), (48, 4), torch.float32, torch.float32)
    assert not b.any()
    assert a.abs().max() <= 32**-0.5
    assert a.std().item() == pytest.approx((32 * 3) ** -0.5, rel=0.2)
    for seed, name in ((4, "model.layers.0.mlp.up_proj.weight"), (3, "model.layers.1.mlp.up_proj.weight")):
        assert not torch.equal(a, start(seed, name, (48, 32), 4)[0])


def test_matrices_of_attention_feed_forward_and_experts_are_adapted():
    layer = "model.layers.3."
    yes = [f"{layer}self_attn.{part}_proj.weight" for part in "qkvo"]
    yes += [f"{layer}mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    yes += [f"{layer}mlp.experts.7.{part}_proj.weight" for part in ("gate", "up", "down")]
    no = ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", f"{layer}input_layernorm.weight",
          f"{layer}self_attn.q_norm.weight", f"{layer}self_attn.q_proj.bias", f"{layer}mlp.gate.weight",
          "adapter.model.layers.3.self_attn.q_proj.lora_A.weight"]  # fmt: skip
    assert all(map(is_adapted, yes))
    assert not any(map(is_adapted, no))
    names = [name for weight in yes for name in names_of(weight)]
    assert weights_of(names) == set(yes)
    assert names[0] == "adapter.model.layers.3.self_attn.q_proj.lora_A.weight"


def test_a_version_computes_with_merged_weights(tmp_path):
    folder = make_folder(tmp_path)
    zero = base_of(folder)
    version = adapted(zero, 1) | {"draft.head": torch.ones(2)}
    merged = policy_of(version)
    assert merged.keys() == zero.keys()
    for name, tensor in merged.items():
        assert (tensor is zero[name]) != is_adapted(name)
        assert tensor.dtype == torch.bfloat16
    assert same_bits(policy_of(zero)["model.norm.weight"], zero["model.norm.weight"])
    architecture = read_architecture(folder)
    adapters = adapters_of(version, architecture.shapes())
    assert adapters.keys() == set(filter(is_adapted, zero))
    for rank in (0, 1):
        for name, piece in pieces(architecture, rank, 2).items():
            if name in adapters:
                mine = merge(cut(zero[name], piece), adapters[name].cut(piece))
                assert same_bits(mine, cut(merged[name], piece)), name
    with pytest.raises(ModelError, match=r"adapter\.scale is missing"):
        policy_of({name: tensor for name, tensor in version.items() if name != SCALE})
