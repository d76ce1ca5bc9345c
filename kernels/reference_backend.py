"""Attention by its formulas, in float64 with dense masks: the backend that others are compared with."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from furlong.kernels.backends import wide
from furlong.kernels.trunk import TrunkPlan


class ReferenceBackend:
    """Computes in float64 whatever the inputs are, and rounds to the wide dtype at the end."""

    name = "reference"

    def trunk_forward(
        self,
        q: Float[Tensor, "queries heads head_dim"],
        k: Float[Tensor, "keys kv_heads head_dim"],
        v: Float[Tensor, "keys kv_heads head_dim"],
        plan: TrunkPlan,
        scale: float,
    ) -> tuple[Float[Tensor, "queries heads head_dim"], Float[Tensor, "queries heads"]]:
        mask = plan_mask(plan, q.device)
        q, k, v = _zeroed(mask.any(1), q), _zeroed(mask.any(0), k), _zeroed(mask.any(0), v)
        out, lse = self.branch_forward(q[None], k[None], v[None], mask, scale)
        return out[0], lse[0]

    def trunk_backward(
        self,
        grad: Float[Tensor, "queries heads head_dim"],
        q: Float[Tensor, "queries heads head_dim"],
        k: Float[Tensor, "keys kv_heads head_dim"],
        v: Float[Tensor, "keys kv_heads head_dim"],
        out: Float[Tensor, "queries heads head_dim"],
        lse: Float[Tensor, "queries heads"],
        plan: TrunkPlan,
        scale: float,
    ) -> tuple[
        Float[Tensor, "queries heads head_dim"],
        Float[Tensor, "keys kv_heads head_dim"],
        Float[Tensor, "keys kv_heads head_dim"],
    ]:
        mask = plan_mask(plan, q.device)
        grad, q, out, lse = (_zeroed(mask.any(1), x) for x in (grad, q, out, lse))
        k, v = (_zeroed(mask.any(0), x) for x in (k, v))
        one = (x[None] for x in (grad, q, k, v, out, lse))
        grad_q, grad_k, grad_v = self.branch_backward(*one, mask, scale)
        return grad_q[0], grad_k[0], grad_v[0]

    def branch_forward(
        self,
        q: Float[Tensor, "branches queries heads head_dim"],
        k: Float[Tensor, "branches entries kv_heads head_dim"],
        v: Float[Tensor, "branches entries kv_heads head_dim"],
        sees: Bool[Tensor, "queries entries"],
        scale: float,
    ) -> tuple[Float[Tensor, "branches queries heads head_dim"], Float[Tensor, "branches queries heads"]]:
        scores = _scores(q, k, sees, scale)
        lse = torch.logsumexp(scores, -1)
        shares = _shares(scores, lse)
        out = torch.einsum("bkgqe,bekd->bqkgd", shares, v.double()).flatten(2, 3)
        dtype = wide(q.dtype)
        return out.to(dtype), lse.permute(0, 3, 1, 2).flatten(2, 3).to(dtype)

    def branch_backward(
        self,
        grad: Float[Tensor, "branches queries heads head_dim"],
        q: Float[Tensor, "branches queries heads head_dim"],
        k: Float[Tensor, "branches entries kv_heads head_dim"],
        v: Float[Tensor, "branches entries kv_heads head_dim"],
        out: Float[Tensor, "branches queries heads head_dim"],
        lse: Float[Tensor, "branches queries heads"],
        sees: Bool[Tensor, "queries entries"],
        scale: float,
    ) -> tuple[
        Float[Tensor, "branches queries heads head_dim"],
        Float[Tensor, "branches entries kv_heads head_dim"],
        Float[Tensor, "branches entries kv_heads head_dim"],
    ]:
        heads = (k.shape[2], -1)
        grads, queries, outs = (x.double().unflatten(2, heads) for x in (grad, q, out))
        mass = lse.double().unflatten(2, heads).permute(0, 2, 3, 1)
        shares = _shares(_scores(q, k, sees, scale), mass)
        delta = (grads * outs).sum(-1).permute(0, 2, 3, 1)
        slope = shares * (torch.einsum("bqkgd,bekd->bkgqe", grads, v.double()) - delta[..., None]) * scale
        # The sum over no entries of a query that saw nothing is 0, but its scores may not be finite.
        slope = slope.masked_fill(shares == 0, 0.0)
        grad_q = torch.einsum("bkgqe,bekd->bqkgd", slope, k.double()).flatten(2, 3)
        grad_k = torch.einsum("bkgqe,bqkgd->bekd", slope, queries)
        grad_v = torch.einsum("bkgqe,bqkgd->bekd", shares, grads)
        return tuple(x.to(wide(q.dtype)) for x in (grad_q, grad_k, grad_v))


def plan_mask(plan: TrunkPlan, device: torch.device) -> Bool[Tensor, "queries keys"]:
    """What a plan's tiles say that the queries see, in the order of the arguments."""
    mask = torch.zeros(plan.queries, plan.keys, dtype=torch.bool, device=device)
    for tile in plan.tiles:
        keys = torch.arange(tile.keys.stop - tile.keys.start, device=device)
        ends = {"full": keys[-1:] + 1, "causal": keys + 1, "masked": tile.ends}[tile.kind]
        mask[tile.queries, tile.keys] |= keys < ends.to(device)[:, None]
    return plan.unsorted_keys(plan.unsorted_queries(mask).T).T


def _zeroed(used: Bool[Tensor, " rows"], x: Tensor) -> Tensor:
    """0 in rows that meet nothing: what lies in padding, NaN for one, would be 0 times NaN in a product over rows."""
    return x.masked_fill(~used.view(-1, *[1] * (x.ndim - 1)), 0.0)


def _scores(
    q: Tensor, k: Tensor, sees: Tensor, scale: float
) -> Float[Tensor, "branches kv_heads group queries entries"]:
    queries = q.double().unflatten(2, (k.shape[2], -1))
    return (torch.einsum("bqkgd,bekd->bkgqe", queries, k.double()) * scale).masked_fill(~sees, float("-inf"))


def _shares(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(score - lse), 0 where nothing is seen."""
    return torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
