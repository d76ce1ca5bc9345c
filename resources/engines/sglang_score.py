"""Log-probabilities of given tokens from an SGLang server: passes over prompts after which nothing is drawn."""

from __future__ import annotations

import math
from typing import Any

from furlong.ops.policy.architecture import Architecture
from furlong.ops.policy.generate import RequestError
from furlong.ops.policy.sampling import NonFiniteLogits
from furlong.ops.policy.score import Scored, check_rows
from furlong.resources.engines.sglang_http import ServerClient
from furlong.resources.engines.step_gate import EngineError

ROWS = 8
"""Rows of one call: few, as the server takes them beside the replies that fill its memory."""
CALL_DEADLINE = 600.0
"""Seconds one call may take, also beside replies."""


def server_scores(
    server: ServerClient, rows: list[Scored], temperature: float, architecture: Architecture, cache_key: str
) -> list[list[float]]:
    """See `Engine.score`.

    Args:
        cache_key: names the weights that serve; prompts share cached keys and values only under one key.
    Raises:
        RequestError: an unusable row, or a temperature that the server does not score at.
        NonFiniteLogits: naming rows whose log-probabilities are not finite.
        EngineError: an answer that does not fit the question.
    """
    check_rows(rows, temperature, architecture)
    if temperature != 1:
        raise RequestError(
            f"temperature={temperature}: an SGLang server gives log-probabilities of a prompt at temperature 1 only; set "
            "sampling.temperature to 1, or engine to local"
        )
    found: list[list[float]] = [[] for _ in rows]
    asked = [number for number, (tokens, first) in enumerate(rows) if first < len(tokens)]
    for at in range(0, len(asked), ROWS):
        numbers = asked[at : at + ROWS]
        body = {
            "input_ids": [list(rows[number][0]) for number in numbers],
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            # The answer begins with this token, whose own is never given.
            "logprob_start_len": [rows[number][1] - 1 for number in numbers],
            "extra_key": [cache_key] * len(numbers),
        }
        answers = server.post("/generate", body, CALL_DEADLINE)
        if not isinstance(answers, list) or len(answers) != len(numbers):
            raise EngineError(f"the server answered {str(answers)[:200]} to {len(numbers)} rows; see its log")
        for number, answer in zip(numbers, answers, strict=True):
            found[number] = _read(number, rows[number], answer, architecture.vocab)
    return found


def _read(number: int, row: Scored, answer: dict[str, Any], vocab: int) -> list[float]:
    tokens, first = row
    pairs = [(entry[0], entry[1]) for entry in answer["meta_info"].get("input_token_logprobs") or []][1:]
    # The server scores the last token of the vocabulary like any other, but calls it 0.
    if [token for _, token in pairs] != [0 if token == vocab - 1 else token for token in tokens[first:]]:
        raise EngineError(
            f"row {number}: the server gave log-probabilities of {len(pairs)} tokens, or of other ones than the "
            f"{len(tokens) - first} asked for; see its log"
        )
    values = [math.nan if value is None else float(value) for value, _ in pairs]
    if not all(map(math.isfinite, values)):
        raise NonFiniteLogits([f"row {number}"])
    return values
