"""What an engine checks of new weights before it spends memory on them."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from furlong.ops.policy.architecture import Architecture
from furlong.ops.policy.checkpoint import is_extra
from furlong.ops.weights.layout import Offer
from furlong.resources.engines.step_gate import EngineError


def check_chain(version: int, chain: Sequence[pa.Table]) -> None:
    """EngineError unless each table is of one version, builds on the one before, and the last one gives `version`."""
    last: int | None = None
    for number, deltas in enumerate(chain):
        found = _origins(deltas)
        if len(found) > 1:
            raise EngineError(
                f"table {number} of the chain mixes (version, base_version) {sorted(found)[:2]}; give one version's "
                "rows per table"
            )
        if not found:
            last = None  # a version of the same weights as the one before has no rows, so no number is known here
        for made, base in found:
            if last is not None and base != last:
                raise EngineError(
                    f"table {number} of the chain builds version {made} on {base}, but the one before gives {last}; "
                    "give the rows of every version, in order"
                )
            last = made
    if chain and chain[-1].num_rows and last != version:
        raise EngineError(f"the chain ends at version {last}, but version {version} was asked for; give all its rows")


def check_digests(version: int, live: int, found: dict[str, str], wanted: dict[str, str] | None) -> None:
    """EngineError naming the first tensor whose digest is not the wanted one; `live` is the version that goes on serving."""
    if wanted is None:
        return
    odd = sorted(name for name in wanted.keys() | found.keys() if found.get(name) != wanted.get(name))
    if odd:
        raise EngineError(
            f"tensor {odd[0]} of version {version} has digest {str(found.get(odd[0]))[:12]} when read from the lake, the "
            f"manifest says {str(wanted.get(odd[0]))[:12]} ({len(odd)} differ in all); version {live} goes on serving: "
            "restore the anchor file and the rows of weight_deltas, which `furlong weights verify` checks"
        )


def check_base(version: int, base_version: int, live: int) -> None:
    """EngineError unless a version made from `base_version` can be made from the live one, and is another."""
    if base_version != live:
        raise EngineError(
            f"version {version} builds on {base_version}, but version {live} is live; load the anchor and deltas up to "
            f"{base_version} first"
        )
    if version == live:
        raise EngineError(f"version {version} is live already; give the new weights a number of their own")


def check_origin(version: int, base_version: int, deltas: pa.Table) -> None:
    """EngineError unless all rows are of this version and base."""
    found = _origins(deltas)
    if found - {(version, base_version)}:
        raise EngineError(
            f"rows of (version, base_version) {sorted(found)[:2]} were given for ({version}, {base_version}); "
            "select the version's own rows"
        )


def check_rows(architecture: Architecture, dtype: str, deltas: pa.Table) -> None:
    """EngineError unless the rows' tensors are the model's, in shape and dtype, or a draft's or adapter's."""
    shapes = architecture.shapes()
    columns = (deltas[column].to_pylist() for column in ("name", "dtype", "shape"))
    for name, kind, shape in zip(*columns, strict=True):
        _check(shapes, dtype, name, kind, shape)


def check_offer(architecture: Architecture, dtype: str, offer: Offer, engine: int, tp: int) -> None:
    """EngineError unless the offer has all tensors of the model, in shape and dtype, and else drafts' and adapters'.

    Args:
        engine: this engine's number in the offer; tp: its number of ranks.
    """
    ranks = offer.engine_ranks[engine] if 0 <= engine < len(offer.engine_ranks) else 0
    if ranks != tp:
        raise EngineError(
            f"the offer of version {offer.version} counts {ranks} ranks of engine {engine}, which has {tp}; plan with the "
            "engines' own layouts"
        )
    shapes = architecture.shapes()
    for spec in offer.tensors:
        _check(shapes, dtype, spec.name, spec.dtype, spec.shape)
    if missing := sorted(set(shapes) - {spec.name for spec in offer.tensors}):
        raise EngineError(
            f"tensor {missing[0]} is not part of the offered version {offer.version} ({len(missing)} in all); offer "
            "every tensor of the policy, sent or not"
        )


def _check(shapes: dict[str, tuple[int, ...]], dtype: str, name: str, kind: str, shape: Sequence[int]) -> None:
    if is_extra(name):
        return
    wanted = shapes.get(name)
    if wanted is None:
        raise EngineError(
            f"tensor {name} is not part of this engine's model, nor of a draft or adapter, whose names begin with "
            "draft. or adapter.; publish the policy that the engine was started with"
        )
    if (kind, tuple(shape)) != (dtype, wanted):
        raise EngineError(
            f"tensor {name} is {kind} {tuple(shape)}, this engine serves {dtype} {wanted}; start an engine for the other "
            "model"
        )


def _origins(deltas: pa.Table) -> set[tuple[int, int]]:
    return set(zip(deltas["version"].to_pylist(), deltas["base_version"].to_pylist(), strict=True))
