"""Digests see every bit, and nothing but dtype, shape and bits."""

import pytest
import torch
from blake3 import blake3

from furlong.ops.weights.digest import digest_start, manifest, raw_bytes, tensor_digest, weights_digest

DTYPES = [
    torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip


def test_digest_is_blake3_of_dtype_shape_and_bytes():
    tensor = torch.tensor([[1.0, -0.0, 2.5]], dtype=torch.float32)
    by_hand = blake3(b"float32[1,3]\n" + bytes.fromhex("0000803f0000008000002040")).hexdigest()
    assert tensor_digest(tensor) == by_hand


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layout_in_memory_does_not_matter(dtype):
    base = (torch.arange(60).reshape(5, 12) % 7).to(dtype)
    for view in (base.t(), base[:, ::2], base[1:4, 3:], base[2].expand(3, 12), base[0, 0]):
        assert tensor_digest(view) == tensor_digest(view.clone(memory_format=torch.contiguous_format))


def test_dtype_shape_and_every_bit_matter():
    zeros = torch.zeros(4, dtype=torch.float32)
    others = [
        zeros.to(torch.int32), zeros.reshape(2, 2), zeros.reshape(1, 4), zeros[:3], -zeros,
        torch.empty(0), torch.empty(0, 4), torch.empty(4, 0), torch.tensor(0.0), torch.zeros(1),
    ]  # fmt: skip
    digests = {tensor_digest(t) for t in [zeros, *others]}
    assert len(digests) == len(others) + 1


def test_a_digest_may_be_taken_in_parts():
    tensor = torch.arange(70, dtype=torch.float64).reshape(7, 10)
    for step in (1, 8, 33, 4096):
        hasher = digest_start(tensor.dtype, tensor.shape)
        for lo in range(0, tensor.nbytes, step):
            hasher.update(raw_bytes(tensor)[lo : lo + step])
        assert hasher.hexdigest() == tensor_digest(tensor)


def test_nan_payloads_are_told_apart():
    bits = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32)
    quiet, marked = bits[:1].view(torch.float32), bits[1:].view(torch.float32)
    assert quiet.isnan().all()
    assert marked.isnan().all()
    assert tensor_digest(quiet) != tensor_digest(marked)


def test_conjugate_and_negative_views_are_resolved():
    value = torch.tensor([1 + 2j, 3 - 4j])
    assert tensor_digest(value.conj()) == tensor_digest(value.conj().resolve_conj().clone())
    assert tensor_digest(value.conj()) != tensor_digest(value)
    assert tensor_digest(value.conj().imag) == tensor_digest(torch.tensor([-2.0, 4.0]))


def test_contiguous_bytes_are_a_view_and_gradients_are_no_obstacle():
    tensor = torch.zeros(8, dtype=torch.bfloat16, requires_grad=True)
    view = raw_bytes(tensor)
    with torch.no_grad():
        tensor[0] = 1.0
    assert view[:2].tolist() == [0x80, 0x3F]


def test_tensors_without_host_bytes_are_refused():
    for tensor in (torch.zeros(2, device="meta"), torch.eye(3).to_sparse()):
        with pytest.raises(ValueError, match="pass a dense CPU tensor"):
            tensor_digest(tensor)


def test_weights_digest_ignores_order_and_sees_every_name_and_digest():
    a, b = "a" * 64, "b" * 64
    assert weights_digest({"x": a, "y": b}) == weights_digest({"y": b, "x": a})
    variants = [{"x": a, "y": b}, {"x": b, "y": a}, {"x": a}, {"x": a, "z": b}, {"x": a, "y": b, "z": b}]
    assert len({weights_digest(v) for v in variants}) == len(variants)


@pytest.mark.parametrize("bad", [{}, {"x": "abc"}, {"x": "A" * 64}, {"x\ny": "a" * 64}], ids=str)
def test_weights_digest_refuses_what_could_be_ambiguous(bad):
    with pytest.raises(ValueError, match=r"pass all|give a one-line name"):
        weights_digest(bad)


def test_manifest_is_sorted_and_fits_the_table():
    rows = manifest({"b": torch.zeros(2, 3, dtype=torch.bfloat16), "a": torch.tensor(1.0)})
    assert [(r["name"], r["dtype"], r["shape"]) for r in rows] == [("a", "float32", []), ("b", "bfloat16", [2, 3])]
    assert rows[0]["digest"] == tensor_digest(torch.tensor(1.0))
    assert manifest({}) == []
