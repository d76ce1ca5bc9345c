"""What an SGLang server returns for one call, and the sample that the calls of one request make together."""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from furlong.ops.policy.architecture import Architecture
from furlong.ops.policy.routing import encode
from furlong.ops.protocols import GenerateRequest, Sample
from furlong.ops.rollouts.spans import Span, cover, merge, shifted
from furlong.resources.engines.step_gate import EngineError

_INSTALL = "this client speaks to SGLang 0.5.23 with Furlong's shim: run `make sglang`, or start the server as it says"


@dataclass(frozen=True)
class Part:
    """What one call brought of a reply. A request takes several when it is interrupted and goes on."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    model_logprobs: tuple[float, ...] = ()
    versions: tuple[tuple[int, int, int], ...] = ()
    finish: str = "abort"
    experts: np.ndarray | None = field(default=None, repr=False)
    """Ids of all tokens, from the first that had not been computed in an earlier part, but the last."""

    def before_flip(self, version: int) -> Part:
        """Without what was drawn after `version` was replaced; then it is to be drawn again."""
        kept = self.versions[0][2] if self.versions and self.versions[0][0] == version else 0
        cut = len(self.tokens) - kept
        if not cut:
            return self
        return Part(
            self.tokens[:kept],
            self.logprobs[:kept],
            self.model_logprobs[:kept],
            self.versions[:1] if kept else (),
            "abort",
            # Without a token, the pass over the prompt was one of the new weights too.
            None if self.experts is None else self.experts[: len(self.experts) - cut if kept else 0],
        )


def read_part(
    request: GenerateRequest, fed: int, first: int, answer: dict[str, Any], architecture: Architecture
) -> Part:
    """The server's answer to one call.

    Args:
        fed: tokens that it was given.
        first: position of the first token whose experts were asked for.
    Raises:
        EngineError: it is not what was asked for, or the model's logits are not finite.
    """
    name, meta = f"request {request.request_id!r}", answer["meta_info"]
    tokens, reason = tuple(answer.get("output_ids") or ()), meta["finish_reason"]
    if reason["type"] not in ("stop", "length", "abort") or reason.get("status_code"):
        raise EngineError(f"{name}: the server ended it with {reason}; see its log")
    sampled = meta.get("sampled") or []
    if len(sampled) != len(tokens):
        raise EngineError(
            f"{name}: the server returned {len(tokens)} tokens, {len(sampled)} log-probabilities; {_INSTALL}"
        )
    if None in sampled or not all(math.isfinite(number) for pair in sampled for number in pair):
        raise EngineError(
            f"{name}: the model's logits are not finite; check the digest of the weights version, and its temperature"
        )
    return Part(
        tokens=tokens,
        logprobs=tuple(pair[0] for pair in sampled),
        model_logprobs=tuple(pair[1] for pair in sampled),
        versions=_spans(name, meta.get("weight_versions") or [], len(tokens)),
        finish=reason["type"],
        experts=_experts(name, meta, max(0, fed + len(tokens) - 1 - first) if tokens else 0, architecture),
    )


def _experts(name: str, meta: dict[str, Any], rows: int, architecture: Architecture) -> np.ndarray | None:
    if not architecture.experts:
        return None
    if not rows:
        return np.zeros((0, len(architecture.expert_layers), architecture.top_k), np.int32)
    if meta.get("num_retractions"):
        raise EngineError(
            f"{name}: the server took it back for lack of memory and computed its tokens again, so which experts they went "
            "through first is lost; give the server more --max-total-tokens, or less to do for others"
        )
    found = np.frombuffer(base64.b64decode(meta.get("routed_experts") or ""), "<i4")
    if found.size != rows * architecture.layers * architecture.top_k:
        raise EngineError(
            f"{name}: the server returned {found.size} expert ids, not those of {rows} tokens; {_INSTALL}"
        )
    return found.reshape(rows, architecture.layers, architecture.top_k)[:, list(architecture.expert_layers)]


def _spans(name: str, found: list[dict[str, Any]], tokens: int) -> tuple[Span, ...]:
    # A version that was put in and taken out between two tokens leaves an empty span.
    spans = merge((int(span["version"]), span["start"], span["end"]) for span in found)
    if not cover(spans, tokens):
        raise EngineError(f"{name}: the server's weights versions {found} do not cover its {tokens} tokens; {_INSTALL}")
    return spans


def make_sample(
    request: GenerateRequest, parts: list[Part], finish: str, seconds: float, architecture: Architecture
) -> Sample:
    """The parts of one request, in order, as its sample."""
    versions, at = [], 0
    for part in parts:
        versions += shifted(part.versions, at)
        at += len(part.tokens)
    sample = Sample(
        request_id=request.request_id,
        tokens=tuple(token for part in parts for token in part.tokens),
        logprobs=tuple(number for part in parts for number in part.logprobs),
        model_logprobs=tuple(number for part in parts for number in part.model_logprobs),
        versions=merge(versions),
        finish_reason=finish,
        seconds=seconds,
    )
    if not architecture.experts:
        return sample
    rows = [part.experts for part in parts if part.experts is not None]
    empty = np.zeros((0, len(architecture.expert_layers), architecture.top_k), np.int32)
    routing = encode(
        first_row(request, 0), np.concatenate([empty, *rows]), architecture.expert_layers, architecture.experts
    )
    return replace(sample, routing=routing)


def first_row(request: GenerateRequest, drawn: int) -> int:
    """Position of the first token that no earlier pass has computed, when `drawn` tokens have been since the prefix."""
    before = len(request.prefix) + drawn
    return len(request.prompt) + before - 1 if before else 0
