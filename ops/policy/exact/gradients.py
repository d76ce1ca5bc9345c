"""Gradients of a decoder layer's parts from their inputs alone, in float32 between products.

Products are in the dtype of the weights, as they are forward; what is cheap is computed again rather than kept.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


def rms_norm(
    x: Float[Tensor, "*batch size"], weight: Float[Tensor, " size"], eps: float, grad: Float[Tensor, "*batch size"]
) -> tuple[Float[Tensor, "*batch size"], Float[Tensor, " size"]]:
    """Of x r w with r = 1 / sqrt(mean x^2 + eps) (Zhang & Sennrich 2019): with u = x r and g = grad w they are
    r (g - u mean(g u)), and the sum of grad u over rows."""
    scale = x.square().mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
    u = x * scale
    along = grad * u
    grad_weight = along.flatten(0, -2).sum(dim=0)
    mean = (along @ weight.float())[..., None] / x.shape[-1]
    return (grad * weight.float()).sub_(u * mean).mul_(scale), grad_weight


def product(
    x: Float[Tensor, "rows inputs"], weights: list[Float[Tensor, "_ inputs"]], grad: Float[Tensor, "rows outputs"]
) -> tuple[Float[Tensor, "rows inputs"], list[Float[Tensor, "_ inputs"]]]:
    """Of x W^T for W stacked from several weights."""
    parts = grad.split([len(weight) for weight in weights], dim=1)
    total = sum((part @ weight).float() for part, weight in zip(parts, weights, strict=True))
    return total, [part.T @ x for part in parts]


def feed_forward(
    normed: Float[Tensor, "rows hidden"],
    gate: Float[Tensor, "ffn hidden"],
    up: Float[Tensor, "ffn hidden"],
    down: Float[Tensor, "hidden ffn"],
    grad: Float[Tensor, "rows hidden"],
    share: Float[Tensor, "rows 1"] | None = None,
) -> tuple[Float[Tensor, "rows hidden"], list[Tensor], Float[Tensor, " rows"]]:
    """Of share * down(silu(gate) * up) (Shazeer 2020): for the input, for gate, up and down, and for the share.

    Args:
        grad: in the weights' dtype; share: 1 when it is None.
    """
    g, u = (normed @ gate.T).float(), (normed @ up.T).float()
    slope = torch.sigmoid(g)
    silu = g * slope
    slope.mul_(torch.addcmul(torch.ones_like(g), g, 1 - slope))  # s (1 + g (1 - s))
    act = silu * u
    back = (grad @ down).float()
    grad_share = torch.linalg.vecdot(back, act)
    if share is not None:
        back.mul_(share)
        grad = (grad.float() * share).to(grad.dtype)
    act = act.to(grad.dtype)
    dg, du = (back * u).mul_(slope).to(grad.dtype), (back * silu).to(grad.dtype)
    grad_normed = (dg @ gate).float().add_(du @ up)
    return grad_normed, [dg.T @ normed, du.T @ normed, grad.T @ act], grad_share


def experts(
    normed: Float[Tensor, "tokens hidden"],
    router: Float[Tensor, "experts hidden"],
    weights: list[tuple[Tensor, Tensor, Tensor]],
    chosen: Int[Tensor, "tokens top_k"],
    renormalised: bool,
    grad: Float[Tensor, "tokens hidden"],
) -> tuple[Float[Tensor, "tokens hidden"], list[Tensor]]:
    """Of a mixture of experts whose choice is given: for the input, and for the router and each expert's weights.

    The choice has no gradient; the shares of the chosen ones do, so the router learns.
    """
    likely = torch.softmax((normed @ router.T).float(), dim=-1)
    picked = likely.gather(1, chosen)
    total = picked.sum(dim=-1, keepdim=True) if renormalised else torch.ones_like(picked[:, :1])
    shares = picked / total
    grad_shares = torch.empty_like(shares)
    grad_normed = torch.zeros(normed.shape)
    found = []
    for expert, (gate, up, down) in enumerate(weights):
        token, nth = (chosen == expert).nonzero(as_tuple=True)
        if not len(token):
            found += [torch.zeros_like(gate), torch.zeros_like(up), torch.zeros_like(down)]
            continue
        back, own, grad_shares[token, nth] = feed_forward(
            normed[token], gate, up, down, grad[token], shares[token, nth, None]
        )
        grad_normed.index_add_(0, token, back)
        found += own
    if renormalised:
        grad_shares = (grad_shares - torch.linalg.vecdot(grad_shares, shares)[:, None]) / total
    slope = torch.zeros_like(likely).scatter_(1, chosen, grad_shares)
    slope = likely * (slope - torch.linalg.vecdot(slope, likely)[:, None])
    back, (grad_router,) = product(normed, [router], slope.to(router.dtype))
    return grad_normed.add_(back), [grad_router, *found]


def normed(x: Float[Tensor, "rows size"], weight: Float[Tensor, " size"], eps: float) -> Float[Tensor, "rows size"]:
    """RMSNorm in float32, rounded to the weight's dtype: the input of the products after it."""
    return F.rms_norm(x, x.shape[-1:], weight.float(), eps).to(weight.dtype)
