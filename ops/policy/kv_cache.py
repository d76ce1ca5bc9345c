"""Memory for keys and values: pages of 64 tokens, of which those in use stay side by side.

So attention of all replies reads one contiguous block per layer, and nothing is copied to gather it: when a page is
given back, the last one in use takes its place. Numbers are kept in the dtype of the projections that made them: values
as they are, keys rounded once after their rotation.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from furlong.ops.policy.architecture import Architecture
from furlong.ops.policy.row_bits import ALIGNED

PAGE = 64
"""Tokens per page."""


class CacheFull(RuntimeError):
    """No page is left; end or put off a reply, or enlarge the cache."""


class Held:
    """The pages of one reply, in the order of its tokens. `slot` names it within the cache while it holds any."""

    def __init__(self, slot: int):
        self.slot = slot
        self.pages: list[int] = []


class KVCache:
    """Pages of all replies under way."""

    def __init__(self, arch: Architecture, dtype: torch.dtype, most_bytes: int):
        """
        Args:
            arch: of the weights, or of the part of them that this rank has.
            dtype: of the weights.
            most_bytes: memory to use, at least one page; taken from the system as pages are first written.
        """
        self._shape = _page_shape(arch.kv_heads, arch.head_dim)
        self._layers, self._dtype = arch.layers, dtype
        self._draft: tuple[int, int, int] | None = None
        page_bytes = 2 * arch.layers * torch.Size(self._shape).numel() * dtype.itemsize
        self.used = 0
        self.slots: Int[np.ndarray, " pages"] = np.zeros(0, dtype=np.int64)
        """Which reply each page in use belongs to, by slot; the rest is undefined."""
        self.ordinals: Int[np.ndarray, " pages"] = np.zeros(0, dtype=np.int64)
        """Which of its reply's pages each one is, from 0."""
        self._held: dict[int, Held] = {}
        self._spare: list[int] = []
        self._memory = torch.empty(0)
        self._pages = 0
        self._draft_memory: Tensor | None = None
        self._allocate(max(1, most_bytes // page_bytes))

    @property
    def layers(self) -> int:
        """The policy's; a draft's are numbered from here on."""
        return self._layers

    def attach(self, layers: int, kv_heads: int, head_dim: int) -> bool:
        """Have every page hold a draft's keys and values too, beside `most_bytes`; whether it did not before, so that they
        are those of no token yet."""
        if self._draft == (layers, kv_heads, head_dim):
            return False
        self._draft = (layers, kv_heads, head_dim)
        self._draft_memory = self._made(layers, _page_shape(kv_heads, head_dim))
        self._draft_memory[:, :, : self.used] = 0.0
        return True

    @property
    def free(self) -> int:
        return self._pages - self.used

    @property
    def most_slots(self) -> int:
        """Slots are below this."""
        return len(self._held) + len(self._spare)

    def open(self) -> Held:
        """A reply without pages."""
        held = Held(self._spare.pop() if self._spare else len(self._held))
        self._held[held.slot] = held
        return held

    def close(self, held: Held) -> None:
        """Give all its pages back."""
        for page in sorted(held.pages, reverse=True):  # the last one first, which needs no other to move
            self._remove(page)
        held.pages = []
        del self._held[held.slot]
        self._spare.append(held.slot)

    def missing(self, held: Held, tokens: int) -> int:
        """Pages it lacks to hold this many tokens."""
        return max(0, pages_of(tokens) - len(held.pages))

    def extend(self, held: Held, tokens: int) -> None:
        """Add pages until it holds this many tokens; CacheFull, and nothing added, when there are not enough."""
        count = self.missing(held, tokens)
        if count > self.free:
            raise CacheFull(
                f"{count} pages of {PAGE} tokens are needed and {self.free} are free; end or put off another reply"
            )
        for _ in range(count):
            page = self.used
            # Old memory may hold NaN, which a probability of 0 does not hide.
            for memory in self._memories():
                memory[:, :, page] = 0.0
            self.slots[page], self.ordinals[page] = held.slot, len(held.pages)
            held.pages.append(page)
            self.used += 1

    def enlarge(self, tokens: int) -> None:
        """Make room for a single reply of this many tokens, when it is the only one and cannot be held."""
        self._allocate(max(self._pages, pages_of(tokens)))

    def copy(self, source: Held, target: Held, tokens: int) -> None:
        """The first tokens' keys and values of one reply become those of another, which has pages for them."""
        count = pages_of(tokens)
        for memory in self._memories():
            memory[:, :, target.pages[:count]] = memory[:, :, source.pages[:count]]

    def blank(self, held: Held, first: int) -> None:
        """Forget what a reply's positions from `first` on hold: a probability of 0 does not hide NaN. The draft's stay."""
        for at, page in enumerate(held.pages[first // PAGE :], start=first // PAGE):
            self._memory[:, :, page, :, max(0, first - at * PAGE) :] = 0.0

    def write(
        self,
        layer: int,
        pages: Int[Tensor, " tokens"],
        offsets: Int[Tensor, " tokens"],
        keys_values: Float[Tensor, "tokens 2 kv_heads d"],
    ) -> None:
        """Store tokens at these places of pages in use."""
        self._of(layer)[:, pages, :, offsets] = keys_values.to(self._dtype)

    def keys(self, layer: int) -> Float[Tensor, "used kv_heads page d"]:
        return self._of(layer)[0, : self.used]

    def values(self, layer: int) -> Float[Tensor, "used kv_heads page d"]:
        return self._of(layer)[1, : self.used]

    def _allocate(self, pages: int) -> None:
        if pages == self._pages:
            return
        self._pages = pages
        old = self._memory
        self._memory = self._made(self._layers, self._shape)
        if self.used:
            self._memory[:, :, : self.used] = old[:, :, : self.used]
        if self._draft_memory is not None:
            old, (layers, *sizes) = self._draft_memory, self._draft
            self._draft_memory = self._made(layers, _page_shape(*sizes))
            self._draft_memory[:, :, : self.used] = old[:, :, : self.used]
        self.slots = np.resize(self.slots, pages)
        self.ordinals = np.resize(self.ordinals, pages)

    def _made(self, layers: int, shape: tuple[int, int, int]) -> Tensor:
        return torch.empty((layers, 2, self._pages, *shape), dtype=self._dtype)

    def _memories(self) -> list[Tensor]:
        return [self._memory] if self._draft_memory is None else [self._memory, self._draft_memory]

    def _of(self, layer: int) -> Float[Tensor, "2 pages kv_heads page d"]:
        return self._memory[layer] if layer < self._layers else self._draft_memory[layer - self._layers]

    def _remove(self, page: int) -> None:
        last = self.used - 1
        if page != last:
            for memory in self._memories():
                memory[:, :, page] = memory[:, :, last]
            slot, ordinal = self.slots[last], self.ordinals[last]
            self._held[int(slot)].pages[int(ordinal)] = page
            self.slots[page], self.ordinals[page] = slot, ordinal
        self.used = last


def _page_shape(kv_heads: int, head_dim: int) -> tuple[int, int, int]:
    # Longer rows hold zeros at their end, which change no product.
    return (kv_heads, PAGE, head_dim + -head_dim % ALIGNED)


def pages_of(tokens: int) -> int:
    """Pages that hold this many tokens."""
    return -(-tokens // PAGE)
