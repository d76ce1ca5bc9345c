"""Settings of the draft. Torch-free, so that a spec is checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from furlong.ops.spec import SpecError

if TYPE_CHECKING:
    from furlong.ops.spec import RunSpec

KINDS = ("eagle3", "block")
LOSSES = ("ce", "tv", "mixed")
RULES = ("rejection", "match")


@dataclass(frozen=True)
class DraftSettings:
    """What `draft` of a spec may set; an empty `draft` means that replies are drawn without one."""

    kind: str = "eagle3"
    """`eagle3`: one layer that proposes token after token; `block`: all proposals in one pass over a block of slots."""
    proposals: int = 4
    """Tokens that the draft proposes one after the other before the policy verifies them (k): a tree's levels."""
    width: int = 1
    """Tokens proposed in each place: 1 is a chain. More is a tree, of which as many nodes of each level go on
    (`eagle3` only)."""
    depths: int = 4
    """How far ahead training unrolls the draft (`eagle3`); a block is trained whole."""
    layers: int = 1
    """Decoder layers of a `block` draft; `eagle3` has one."""
    taps: str = ""
    """Layers of the policy after which the residual stream is the draft's input, from 0, separated by commas; empty for
    an early, a middle and a late one."""
    vocabulary: int = 0
    """Tokens that the draft can propose, the most frequent ones; 0 for all of the policy's."""
    start: str = ""
    """Folder of a draft to start from, as SGLang or `speculators` reads it; empty to make one from the policy."""
    train: bool = True
    """Whether the draft learns beside the policy; a frozen one falls behind it."""
    loss: str = "ce"
    """`ce`: cross-entropy to the policy's distribution; `tv`: total variation, one minus the expected acceptance;
    `mixed`: from the one to the other over the run."""
    depth_decay: float = 0.8
    """Weight of a depth's loss relative to the one before."""
    learning_rate: float = 1e-4
    """Peak learning rate of the draft's own AdamW."""
    warmup_steps: int = 10
    """Steps of linear warm-up of the draft's learning rate."""
    max_grad_norm: float = 1.0
    """Clipping of the draft's gradient by its own global L2 norm."""
    verify: str = "match"
    """`match`: keep proposals that equal what the policy would have drawn, so that replies are the same bits with and
    without a draft, and again from the same seeds; `rejection`: accept with min(1, p/q), so that more are kept, but which
    replies come depends on how many are proposed, which is decided by measured time. Both have exactly the policy's
    distribution."""
    adaptive: bool = True
    """Whether batches are drawn without the draft while that is measured to be faster; false speculates always, for
    experiments about acceptance."""
    shadow: float = 0.0625
    """Share of requests drawn without the draft, against which its speed-up is measured."""

    def __post_init__(self) -> None:
        for name, allowed in (("kind", KINDS), ("loss", LOSSES), ("verify", RULES)):
            if (value := getattr(self, name)) not in allowed:
                raise SpecError(f"draft.{name}: {value!r} is none of {', '.join(allowed)}; set one of them")
        for name, least in (
            ("proposals", 1), ("width", 1), ("depths", 1), ("layers", 1), ("vocabulary", 0), ("warmup_steps", 0),
        ):  # fmt: skip
            if (value := getattr(self, name)) < least:
                raise SpecError(f"draft.{name}: {value} is too small; set {least} or more")
        for name in ("learning_rate", "max_grad_norm", "depth_decay"):
            # Written so that NaN fails too.
            if not 0 < (value := getattr(self, name)) < float("inf"):
                raise SpecError(
                    f"draft.{name}: {value} is no positive number; set one, or train: false to learn nothing"
                )
        if self.depth_decay > 1:
            raise SpecError(f"draft.depth_decay: {self.depth_decay} weighs far depths above near ones; set at most 1")
        if not 0 <= self.shadow < 1:
            raise SpecError(f"draft.shadow: {self.shadow} is no share of requests; set 0 or more and less than 1")
        if self.kind == "block" and self.width > 1:
            raise SpecError("draft.width: a block drafter proposes a chain; leave it at 1, or set kind: eagle3")
        if self.kind == "eagle3" and self.layers > 1:
            raise SpecError("draft.layers: an eagle3 draft has one layer; leave it at 1, or set kind: block")
        self.tap_layers()

    def tap_layers(self) -> tuple[int, ...]:
        """The layers named in `taps`, ascending; empty for the policy's default ones.

        Raises:
            SpecError: one is no layer, or they do not ascend.
        """
        try:
            layers = tuple(int(part) for part in self.taps.split(",")) if self.taps.strip() else ()
        except ValueError as err:
            raise SpecError(f"draft.taps: {self.taps!r} is no list of layers; give e.g. '1,14,26' ({err})") from err
        if any(layer < 0 for layer in layers) or list(layers) != sorted(set(layers)):
            raise SpecError(f"draft.taps: {self.taps!r} must be layers from 0, each once, ascending; sort them")
        return layers


def draft_of(spec: RunSpec) -> DraftSettings | None:
    """The draft that the spec asks for; None for none.

    Raises:
        SpecError: an unknown setting, one of another type, or one that cannot be.
    """
    from furlong.ops.options import chosen  # which can be loaded only after the spec's module

    return chosen("draft", DraftSettings, spec.draft) if spec.draft else None
