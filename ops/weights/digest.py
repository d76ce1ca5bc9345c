"""Digests of weights: one per tensor over its exact bits, and one over all of them.

Two tensors share a digest exactly when dtype, shape and every bit agree, so NaN payloads and the sign of zero count.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from jaxtyping import Shaped, UInt8
from torch import Tensor


def dtype_name(tensor: Shaped[Tensor, ...]) -> str:
    """The dtype as stored in the lake, e.g. `bfloat16`."""
    return str(tensor.dtype).removeprefix("torch.")


def raw_bytes(tensor: Shaped[Tensor, ...]) -> UInt8[np.ndarray, " nbytes"]:
    """The tensor's little-endian bytes in row-major order; a view of its memory where it is contiguous.

    Raises:
        ValueError: the tensor is not a dense CPU tensor, or this machine is big-endian.
    """
    if sys.byteorder != "little":
        raise ValueError("weights are stored little-endian and this machine is big-endian; use a little-endian machine")
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_quantized:
        raise ValueError(
            f"cannot take the bytes of a {tensor.layout} tensor on {tensor.device} (quantized: {tensor.is_quantized}): "
            "they are read from host memory; pass a dense CPU tensor"
        )
    # A conjugate or negative view keeps the change in a flag, not in its bytes.
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()


def tensor_digest(tensor: Shaped[Tensor, ...]) -> str:
    """64 hex digits of blake3 over dtype name, shape and bytes of a dense CPU tensor; empty and 0-d are legal."""
    return digest_start(tensor.dtype, tensor.shape).update(raw_bytes(tensor)).hexdigest()


def digest_start(dtype: torch.dtype, shape: Sequence[int]) -> blake3:
    """The hasher that gives `tensor_digest` once it was fed the tensor's bytes in order, in runs of any length."""
    return blake3(f"{str(dtype).removeprefix('torch.')}[{','.join(map(str, shape))}]\n".encode())


def weights_digest(digests: dict[str, str]) -> str:
    """64 hex digits of blake3 over the sorted lines `name digest`.

    Args:
        digests: digest of each tensor by Hugging Face name, as `tensor_digest` gives it.
    Raises:
        ValueError: no tensors, a name with a line break, or a digest that is not 64 hex digits.
    """
    if not digests:
        raise ValueError("cannot digest weights of no tensors: an empty set would match any other empty set; pass all")
    for name, digest in digests.items():
        if "\n" in name or len(digest) != 64 or set(digest) - set("0123456789abcdef"):
            raise ValueError(f"tensor {name!r} has digest {digest!r}: give a one-line name and 64 hex digits")
    return blake3("".join(f"{name} {digests[name]}\n" for name in sorted(digests)).encode()).hexdigest()


def manifest(tensors: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Rows of the `tensors` column of `weight_versions` (name, dtype, shape, digest), sorted by name."""
    return [
        {
            "name": name,
            "dtype": dtype_name(tensors[name]),
            "shape": list(tensors[name].shape),
            "digest": tensor_digest(tensors[name]),
        }
        for name in sorted(tensors)
    ]
