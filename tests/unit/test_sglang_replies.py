"""What an SGLang server answers becomes a sample exactly, over interruptions; what it should not have answered is told."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from furlong.ops.policy.architecture import Architecture
from furlong.ops.policy.routing import decode
from furlong.ops.protocols import GenerateRequest
from furlong.resources.engines.sglang_capacity import SPARE, choose, token_bytes
from furlong.resources.engines.sglang_reply import Part, first_row, make_sample, read_part
from furlong.resources.engines.step_gate import EngineError

DENSE = Architecture("qwen3", 61, 32, 2, 4, 2, 8, 48, 1e-5, 1e4, 64, False)
MOE = replace(DENSE, kind="qwen3_moe", experts=6, top_k=2, expert_ffn=24, expert_layers=(0, 1))
REQUEST = GenerateRequest("r", (1, 2, 3), 0, 8, 1.0)


def rows(first: int, count: int) -> np.ndarray:
    """Experts of consecutive positions, different ones for each."""
    at = np.arange(first, first + count)[:, None]
    return np.stack([np.concatenate([at % 6, (at + 1 + layer) % 6], axis=1) for layer in (0, 1)], axis=1).astype("<i4")


def answer(tokens: list[int], spans: list[tuple[str, int, int]], first: int, fed: int, **meta: Any) -> dict[str, Any]:
    experts = rows(first, fed + len(tokens) - 1 - first)
    return {
        "output_ids": tokens,
        "meta_info": {
            "finish_reason": {"type": "abort"},
            "sampled": [[-1.0 - t, -2.0 - t] for t in tokens],
            "weight_versions": [{"version": v, "start": a, "end": b} for v, a, b in spans],
            "routed_experts": base64.b64encode(experts.tobytes()).decode(),
            "num_retractions": 0,
            **meta,
        },
    }


@pytest.mark.parametrize("kept", [0, 1, 4])
def test_a_retracted_reply_keeps_what_was_drawn_before_the_flip(kept: int) -> None:
    """The rest, and the passes that were the first of their tokens by new weights, are as if they had not been."""
    spans = [span for span in (("3", 0, kept), ("4", kept, 4)) if span[1] < span[2]]
    part = read_part(REQUEST, 3, 0, answer([5, 6, 7, 8], spans, 0, 3), MOE).before_flip(3)
    assert part.tokens == (5, 6, 7, 8)[:kept]
    assert part.versions == (((3, 0, kept),) if kept else ())
    first = first_row(REQUEST, kept)
    end = {"type": "length"}
    rest = read_part(REQUEST, 3 + kept, first, answer([9, 9], [("4", 0, 2)], first, 3 + kept, finish_reason=end), MOE)
    sample = make_sample(REQUEST, [part, rest], "length", 1.5, MOE)
    assert sample.tokens == (*(5, 6, 7, 8)[:kept], 9, 9)
    assert sample.logprobs == tuple(-1.0 - token for token in sample.tokens)
    assert sample.model_logprobs == tuple(-2.0 - token for token in sample.tokens)
    assert sample.versions == (*part.versions, (4, kept, kept + 2))
    assert (sample.routing.first, sample.routing.rows) == (0, 3 + kept + 2 - 1)
    assert (decode(sample.routing) == rows(0, 3 + kept + 1)).all()


def test_a_part_of_one_version_is_left_as_it_is() -> None:
    part = read_part(REQUEST, 3, 0, answer([5, 6], [("3", 0, 1), ("3", 1, 2)], 0, 3), MOE)
    assert part.versions == ((3, 0, 2),)
    assert part.before_flip(3) is part
    assert Part().before_flip(3) == Part()


def test_after_a_prefix_the_routing_begins_at_its_last_token() -> None:
    request = replace(REQUEST, prefix=(4, 4))
    assert first_row(request, 0) == 4
    sample = make_sample(request, [read_part(request, 5, 4, answer([5], [("3", 0, 1)], 4, 5), MOE)], "stop", 0.1, MOE)
    assert (sample.routing.first, sample.routing.rows) == (4, 1)
    nothing = make_sample(request, [], "abort", 0.1, MOE)
    assert (nothing.routing.first, nothing.routing.rows, nothing.versions, nothing.tokens) == (4, 0, (), ())
    assert make_sample(REQUEST, [], "abort", 0.1, DENSE).routing is None


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        ({"sampled": [[-1.0, -1.0]]}, "1 log-probabilities"),
        ({"sampled": None}, "0 log-probabilities"),
        ({"sampled": [[-1.0, -1.0], None]}, "not finite"),
        ({"sampled": [[-1.0, -1.0], [float("nan"), -1.0]]}, "not finite"),
        ({"weight_versions": [{"version": "3", "start": 0, "end": 1}]}, "do not cover"),
        ({"weight_versions": None}, "do not cover"),
        ({"finish_reason": {"type": "abort", "status_code": 400, "message": "no"}}, "the server ended it"),
        ({"finish_reason": {"type": "other"}}, "the server ended it"),
        ({"routed_experts": None}, "expert ids"),
        ({"routed_experts": base64.b64encode(rows(0, 3).tobytes()).decode()}, "expert ids"),
        ({"num_retractions": 1}, "took it back"),
    ],
)
def test_an_answer_that_lacks_something_is_refused(meta: dict[str, Any], words: str) -> None:
    good = answer([5, 6], [("3", 0, 2)], 0, 3)
    read_part(REQUEST, 3, 0, good, MOE)
    good["meta_info"] |= meta
    with pytest.raises(EngineError, match=words):
        read_part(REQUEST, 3, 0, good, MOE)


def test_room_is_what_the_model_and_the_machine_allow() -> None:
    small = choose(MOE, 4, 2**40)
    assert (small.running, small.longest) == (32, 64)
    assert small.tokens >= 32 * (64 + SPARE)
    big = replace(DENSE, context=131_072)
    assert choose(big, 2, 2**40).tokens >= max(32 * 2048, 131_072 + SPARE)
    tight = choose(big, 2, 4 * 140_000 * token_bytes(big, 2))
    assert 131_072 + SPARE <= tight.tokens <= 140_000
    with pytest.raises(EngineError, match="free memory"):
        choose(big, 2, 4 * 100_000 * token_bytes(big, 2))
