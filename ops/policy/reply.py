"""One request under way: its tokens, what is known of each, and how much of it keys and values have been computed for."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from jaxtyping import Int

from furlong.ops.policy.architecture import Architecture
from furlong.ops.policy.draft_rows import DraftRows
from furlong.ops.policy.kv_cache import Held
from furlong.ops.policy.routing import encode
from furlong.ops.protocols import GenerateRequest, Routing, Sample


@dataclass(eq=False)
class Reply:
    """Grows once all its tokens but the last are `fed`: by one token a step, or by what a step accepts of a draft's."""

    request: GenerateRequest
    tokens: list[int] = field(init=False)
    """Prompt, prefix and what was drawn."""
    given: int = field(init=False)
    """Tokens that were not drawn here."""
    fed: int = 0
    """Tokens whose keys and values the cache has."""
    held: Held | None = None
    draft: DraftRows = field(default_factory=DraftRows)
    serial: int | None = None
    """Of the weights that computed the prompt's keys and values; None when they are of several."""
    logprobs: list[float] = field(default_factory=list)
    model_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Of the weights that drew each token."""
    drafted: list[bool] | None = None
    """Whether each token drawn was a proposal; None where there is no draft."""
    chosen: list[Int[np.ndarray, "tokens layers top_k"]] = field(default_factory=list)
    """Experts of the tokens from position `first_chosen` on, at the first forward pass of each."""
    choices: int = 0
    """Tokens in `chosen`."""
    chosen_serial: int | None = None
    """Of the weights that chose the prompt's experts; None when they are of several, or not recorded here."""

    def __post_init__(self) -> None:
        self.tokens = [*self.request.prompt, *self.request.prefix]
        self.given = len(self.tokens)

    @property
    def left(self) -> int:
        """Tokens to feed before the next can be drawn."""
        return len(self.tokens) - self.fed

    @property
    def position(self) -> int:
        """Of the next token in the reply, prefix included: what its random number is of."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def first_chosen(self) -> int:
        """The last token of a prefix is the first whose forward pass was not recorded with the prefix."""
        return self.given - 1 if self.request.prefix else 0

    def forget(self) -> None:
        """Keys and values are to be computed again; what was recorded of them stays."""
        self.fed, self.serial = 0, None
        self.draft.forget()

    def feed(self, count: int, serial: int, chosen: Int[np.ndarray, "count layers top_k"] | None) -> None:
        """The next `count` tokens have gone through the model."""
        prompt = len(self.request.prompt)
        if self.fed < prompt:
            self.serial = serial if self.fed == 0 or self.serial == serial else None
        if chosen is not None:
            known = self.first_chosen + self.choices
            if known < prompt:
                self.chosen_serial = serial if known == 0 or self.chosen_serial == serial else None
            self._record(chosen[max(known - self.fed, 0) :])
        self.fed += count

    def knows_prompt(self, serial: int, experts: bool) -> bool:
        """Whether its prompt's keys and values are of the weights `serial`, and its experts, if the model has any. A
        resumed reply did not record them, and one that is computed again keeps those of older weights."""
        return self.serial == serial and not (experts and (self.first_chosen or self.chosen_serial != serial))

    def shareable(self, other: Reply, serial: int, experts: bool) -> int | None:
        """How many first tokens of this reply another one with the same prompt gives it the state of, as the weights
        `serial` compute it, now or once it has computed it itself; None when it never will.

        Args:
            experts: whether the model has any.
        """
        count = min(len(self.request.prompt), len(self.tokens) - 1)
        coming = other.fed < count and (other.fed == 0 or other.serial == serial)
        if self.fed or not (coming or other.serial == serial):
            return None
        needs = experts and self.first_chosen + self.choices < count
        if needs and (other.first_chosen or (other.choices and other.chosen_serial != serial)):
            return None
        return count

    def take(self, other: Reply, count: int) -> None:
        """Its first tokens have the other's keys, values and experts."""
        self.fed, self.serial = count, other.serial
        self.draft.share(other.draft, count)
        if other.chosen and self.first_chosen + self.choices < count:
            self.chosen_serial = other.chosen_serial
            self._record(np.concatenate(other.chosen)[self.choices : count])

    def _record(self, rows: Int[np.ndarray, "some layers top_k"]) -> None:
        if len(rows):
            self.chosen.append(rows)
            self.choices += len(rows)

    def draw(self, token: int, logprob: float, model_logprob: float, version: int, drafted: bool = False) -> str:
        """Add a token; the reason why the reply has ended, else an empty string."""
        if self.drafted is not None:
            self.drafted.append(drafted)
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.model_logprobs.append(model_logprob)
        self.versions.append(version)
        if token in self.request.stop_ids:
            return "stop"
        full = len(self.tokens) - len(self.request.prompt) >= self.request.max_new_tokens
        return "length" if full else ""

    def sample(self, reason: str, architecture: Architecture, seconds: float) -> Sample:
        """What `Engine.collect` returns of it."""
        spans, start = [], 0
        for version, group in groupby(self.versions):
            end = start + len(list(group))
            spans.append((version, start, end))
            start = end
        return Sample(
            request_id=self.request.request_id,
            tokens=tuple(self.tokens[self.given :]),
            logprobs=tuple(self.logprobs),
            model_logprobs=tuple(self.model_logprobs),
            versions=tuple(spans),
            finish_reason=reason,
            seconds=seconds,
            routing=self._routing(architecture),
            drafted=None if self.drafted is None else tuple(self.drafted),
        )

    def _routing(self, arch: Architecture) -> Routing | None:
        if not arch.expert_layers:
            return None
        rows = np.zeros((0, len(arch.expert_layers), arch.top_k), dtype=np.uint16)
        # Without a token, there is no prefix to go on after: the whole prompt will be fed, and recorded, again.
        if self.logprobs:
            rows = np.concatenate(self.chosen)
        return encode(self.first_chosen, rows, arch.expert_layers, arch.experts)
