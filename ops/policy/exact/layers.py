"""The two halves of a decoder layer around attention: the engine's arithmetic forward, the plain gradient backward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Complex, Int
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from furlong.ops.policy.architecture import Architecture
from furlong.ops.policy.exact import gradients
from furlong.ops.policy.exact.gradients import normed
from furlong.ops.policy.layer import Layer, in_pairs
from furlong.ops.policy.shard import WHOLE


@dataclass(frozen=True)
class Context:
    """What a layer computes with, beside its weights."""

    arch: Architecture
    index: int
    layer: Layer
    turn: Complex[Tensor, "nodes rotated_heads pairs"]
    experts: Int[Tensor, "nodes top_k"] | None
    """To be replayed; -1 where the layer chooses. None for a layer that chooses everywhere, or has no experts."""


def attention_weights(arch: Architecture, index: int) -> list[str]:
    """Hugging Face names of the weights that `Project` takes, in its order."""
    names = Layer.names(arch, index)
    parts = ["norm1", "q", "k", "v"]
    parts += ["q_bias", "k_bias", "v_bias"] if arch.qkv_bias else []
    parts += ["q_norm", "k_norm"] if arch.qk_norm else []
    return [names[part] for part in parts]


def block_weights(arch: Architecture, index: int) -> list[str]:
    """Hugging Face names of the weights that `Finish` takes, in its order."""
    names = Layer.names(arch, index)
    parts = ["o", "norm2"]
    if index in arch.expert_layers:
        parts += ["router", *(f"{e}.{part}" for e in range(arch.experts) for part in ("gate", "up", "down"))]
    else:
        parts += ["gate", "up", "down"]
    return [names[part] for part in parts]


class Project(torch.autograd.Function):
    """Queries, keys and values as `Layer.project` gives them, of the residual stream and `attention_weights`."""

    @staticmethod
    def forward(ctx: FunctionCtx, context: Context, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.context = context
        ctx.save_for_backward(x, *weights)
        return context.layer.project(x, context.arch, context.turn)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, norm, *weights = ctx.saved_tensors
        arch = ctx.context.arch
        N, K, D, qkv = arch.heads, arch.kv_heads, arch.head_dim, weights[:3]
        inputs = normed(x, norm, arch.norm_eps)
        grad = grad.clone()
        # The gradient of a rotation is the rotation back, and the queries' scale once more.
        torch.view_as_complex(grad.view(len(x), N + 2 * K, D // 2, 2))[:, : N + K].mul_(ctx.context.turn.conj())
        grad[:, : N + K] = grad[:, : N + K, torch.argsort(in_pairs(D))]
        others: list[Tensor] = []
        if arch.qk_norm:
            spans = ((qkv[0], slice(0, N)), (qkv[1], slice(N, N + K)))
            for (weight, span), norm_of_head in zip(spans, weights[-2:], strict=True):
                raw = (inputs @ weight.T).float().view(len(x), -1, D)
                grad[:, span], own = gradients.rms_norm(raw, norm_of_head, arch.norm_eps, grad[:, span])
                others.append(own.to(norm.dtype))
        flat = grad.view(len(x), -1)
        if arch.qkv_bias:
            others += [part.sum(dim=0).to(norm.dtype) for part in flat.split([len(w) for w in qkv], dim=1)]
        back, own = gradients.product(inputs, qkv, flat.to(norm.dtype))
        grad_x, grad_norm = gradients.rms_norm(x, norm, arch.norm_eps, back)
        return None, grad_x, grad_norm.to(norm.dtype), *own, *others


class Finish(torch.autograd.Function):
    """The residual stream after the layer, as `Layer` makes it of the stream before, attention's output and
    `block_weights`; and the experts chosen, None where there are none."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, context: Context, x: Tensor, seen: Tensor, *weights: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        layer, arch = context.layer, context.arch
        middle = x.clone()
        layer.add_attention(middle, seen, WHOLE)
        out = middle.clone()
        chosen = layer.add_block(out, arch, WHOLE, context.experts)
        ctx.context = context
        ctx.save_for_backward(middle, seen, chosen, *weights)
        if chosen is not None:
            ctx.mark_non_differentiable(chosen)
        return out, chosen

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        middle, seen, chosen, out, norm, *weights = ctx.saved_tensors
        arch, dtype = ctx.context.arch, norm.dtype
        inputs = normed(middle, norm, arch.norm_eps)
        if chosen is None:
            back, own, _ = gradients.feed_forward(inputs, *weights, grad.to(dtype))
        else:
            router, *each = weights
            triples = list(zip(each[::3], each[1::3], each[2::3], strict=True))
            back, own = gradients.experts(inputs, router, triples, chosen, arch.renormalised, grad.to(dtype))
        back, grad_norm = gradients.rms_norm(middle, norm, arch.norm_eps, back)
        grad_x = back.add_(grad)
        grad_seen, (grad_out,) = gradients.product(seen.to(dtype), [out], grad_x.to(dtype))
        return None, grad_x, grad_seen, grad_out, grad_norm.to(dtype), *own
