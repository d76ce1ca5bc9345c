"""How a trainer's work is laid over processes (ranks). It changes rounding, never what is computed."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from furlong.ops.spec import SpecError


@dataclass(frozen=True)
class Layout:
    """Sizes of the dimensions that the ranks are arranged in; their product, without ep and vpp, is the world's size."""

    tp: int = 1
    """Tensor parallel: ranks that share every layer's matrices."""
    pp: int = 1
    """Pipeline parallel: ranks that hold consecutive layers."""
    vpp: int = 1
    """Chunks of layers per pipeline rank, interleaved; 1 for the plain 1F1B schedule."""
    cp: int = 1
    """Context parallel: ranks that share every sequence."""
    ep: int = 1
    """Expert parallel: ranks, among those of tp, cp and dp, that share the experts of a layer."""
    dp: int = 1
    """Data parallel: ranks that share the micro-batches of a step."""
    sp: bool = False
    """Sequence parallel: what tp does not split by matrix is split by position."""
    recompute: bool = False
    """Activations of a layer are computed again in the backward pass instead of kept."""

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.cp * self.dp

    def __str__(self) -> str:
        parts = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                parts.append(field.name if value is True else f"{field.name}{value}")
        return "-".join(parts) or "dp1"


def parse_layout(text: str) -> Layout:
    """`tp2-pp2-sp` as a Layout; the empty text is one rank.

    Raises:
        SpecError: a part that is no dimension, given twice, or sizes that contradict each other.
    """
    flags = {field.name for field in fields(Layout) if field.type == "bool"}
    sizes: dict[str, int | bool] = {}
    for part in filter(None, text.split("-")):
        match = re.fullmatch(r"([a-z]+)(\d*)", part)
        name, number = match.groups() if match else ("", "")
        known = name in flags if not number else name in {f.name for f in fields(Layout)} - flags
        if not known or name in sizes or number == "0":
            raise SpecError(
                f"trainer layout {text!r}: {part!r} is not usable; join sizes such as tp2, pp2, vpp2, cp2, ep2, dp2 and the "
                "words sp, recompute with '-', each once"
            )
        sizes[name] = int(number) if number else True
    layout = Layout(**sizes)  # type: ignore[arg-type]
    if layout.sp and layout.tp == 1:
        raise SpecError(
            f"trainer layout {text!r}: sp splits by position what tp does not; give tp2 or more, or leave out sp"
        )
    if layout.vpp > 1 and layout.pp == 1:
        raise SpecError(
            f"trainer layout {text!r}: vpp interleaves the chunks of pp; give pp2 or more, or leave out vpp"
        )
    if (layout.tp * layout.cp * layout.dp) % layout.ep:
        raise SpecError(f"trainer layout {text!r}: ep must divide tp * cp * dp; change one of them")
    return layout
