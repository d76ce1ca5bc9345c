"""Adapters in place of masters, behind the interface of `masters.py`: the base is frozen as it was published, and AdamW
moves A and B alone.

The module computes with merged weights (`ops.policy.lora`), so a backward pass gives the gradient of those; that of A and
B is a product of it. Every rank has all of A and B, the same on each: it adds what its own pieces of the weights
contribute, and the sum over ranks goes to all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from furlong.ops.policy.lora import PREFIX, SCALE, Adapter, adapters_of, gradients, is_adapted, merge, names_of, start
from furlong.ops.policy.lora_settings import lora_chosen
from furlong.ops.spec import RunSpec
from furlong.ops.weights.layout import Piece, cut, whole_piece
from furlong.resources.trainers.masters import (
    MOMENTS,
    UPDATES,
    Shapes,
    make_adamw,
    master_dtype,
    require_finite_gradients,
    require_weights,
    state_shapes,
)
from furlong.resources.trainers.ranks import Ranks


@dataclass(frozen=True)
class Part:
    """A piece of one weight in the module of this rank."""

    piece: Piece
    """Of the tensor of that Hugging Face name."""
    write: Callable[[Tensor], None]
    """Have the module compute with these values, of any format."""
    owned: bool = True
    """Of all ranks that hold the piece, this is the one that counts. The owned pieces of all ranks tile the model."""


class LoraWeights:
    """`weights` are A and B of every adapted weight of the model. How a module lies over ranks is its subclasses' matter:
    they tell the parts, and call `add` with gradients."""

    def __init__(
        self, parts: Sequence[Part], shapes: Shapes, spec: RunSpec, compute: torch.dtype, ranks: Ranks,
        device: torch.device,
    ) -> None:  # fmt: skip
        """Without weights yet: `load_weights` or `load_state` gives them.

        Args:
            parts: of every weight of which this rank holds anything.
            shapes: of the model's complete weights.
            compute: format that the module computes in; adapters are float32, or float64 if it is that.
            device: of adapters and base.
        """
        self.algorithm, self.ranks = spec.algorithm, ranks
        self._compute, self._device, self._shapes, self._seed = compute, device, shapes, spec.seed
        self._published = getattr(torch, spec.model.dtype)
        lora = lora_chosen(spec.trainer)
        if lora is None:
            raise ValueError("trainer.lora is empty, so there are no adapters to train; set its rank")
        self._rank, self._scale = lora.rank, torch.tensor(lora.alpha / lora.rank, dtype=torch.float32)
        self._parts = {part.piece: part for part in parts}
        self._base = {piece: self._empty(piece) for piece in self._parts}
        self._gathered: dict[str, Tensor] | None = None
        self.weights: dict[str, nn.Parameter] = {}
        for name in filter(is_adapted, shapes):
            sizes = (self._rank, shapes[name][1]), (shapes[name][0], self._rank)
            for part, size in zip(names_of(name), sizes, strict=True):
                self.weights[part] = nn.Parameter(torch.zeros(size, dtype=master_dtype(compute), device=device))
        # One run of memory for all gradients, so that they are summed over ranks in one go.
        counts = [weight.numel() for weight in self.weights.values()]
        self._sums = torch.zeros(sum(counts), dtype=master_dtype(compute), device=device)
        for weight, part in zip(self.weights.values(), self._sums.split(counts), strict=True):
            weight.grad = part.view_as(weight)
        self.adamw = make_adamw(self.weights, spec.algorithm)

    @property
    def dtype(self) -> torch.dtype:
        """Of adapters and moments."""
        return self._sums.dtype

    @property
    def pieces(self) -> dict[str, Piece]:
        """What this rank holds of each weight that it holds anything of."""
        return {piece.name: piece for piece in self._parts}

    @torch.no_grad()
    def load_weights(self, fetch: Callable[[Piece], Tensor]) -> None:
        """Begin with the base that `fetch` gives, and with adapters that change nothing yet."""
        for name in filter(is_adapted, self._shapes):
            for part, values in zip(
                names_of(name), start(self._seed, name, self._shapes[name], self._rank), strict=True
            ):
                self.weights[part].copy_(values)
        self._hold(fetch)

    def begin(self) -> None:
        """Forget the gradients of the step before."""
        self._sums.zero_()

    def expect(self, last: bool) -> None:
        """Say, before each backward pass of a step, whether it is the last; here nothing depends on it."""

    @torch.no_grad()
    def add(self, piece: Piece, gradient: Float[Tensor, "rows columns"]) -> None:
        """Add what the gradient of this rank's piece of a merged weight gives for A and B."""
        if not self._parts[piece].owned or not is_adapted(piece.name):
            return
        a, b = (self.weights[name] for name in names_of(piece.name))
        mine = gradients(gradient.to(a.dtype), self._adapter(piece.name).cut(piece))
        sums = Adapter(a.grad, b.grad, 1.0).cut(piece)
        sums.a.add_(mine[0])
        sums.b.add_(mine[1])

    def gradient_norm(self) -> float:
        """Global L2 norm of the adapters' gradients, which are summed over the ranks here; the same on all.

        Raises:
            NonFiniteError: on all ranks: a gradient with a NaN or an infinity, by the tensor's name.
        """
        self.ranks.sum(self._sums)
        norms = torch.stack(torch._foreach_norm([weight.grad for weight in self.weights.values()]))
        require_finite_gradients(dict(zip(self.weights, norms.tolist(), strict=True)))
        return float(torch.linalg.vector_norm(norms.double()))

    def update(self, learning_rate: float, norm: float) -> None:
        """Clip to `max_grad_norm`, move A and B by AdamW, merge into the module."""
        if norm > self.algorithm.max_grad_norm:
            self._sums.mul_(self.algorithm.max_grad_norm / norm)
        self.adamw.param_groups[0]["lr"] = learning_rate
        self.adamw.step()
        self.round()

    def round(self) -> None:
        """Have the module compute with the base and the adapters as they are now."""
        adapters = {name: self._adapter(name) for name in {p.name for p in self._parts} if is_adapted(name)}
        self._write(self._base.__getitem__, adapters, self._compute)

    @contextmanager
    def placed(self, weights: dict[str, Tensor]) -> Iterator[None]:
        """Have the module compute with published weights, merged as engines merge them; afterwards it is as it was.

        Raises:
            ValueError: weights of another model.
        """
        require_weights({name: tensor for name, tensor in weights.items() if not name.startswith(PREFIX)}, self._shapes)
        adapters = adapters_of(weights, self._shapes)
        try:
            self._write(lambda piece: cut(weights[piece.name], piece), adapters, None)
            yield
        finally:
            self.round()

    def export(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """On rank 0, base and adapters by their published names, whole, on the CPU; nothing on the others.

        Before the first update there are no adapters, so that version 0 is the model as it was found. The base's tensors
        are the same objects every time.
        """
        if dtype != self._published:
            raise ValueError(f"the base was frozen in {self._published}, so it cannot be exported in {dtype}")
        base = self._whole_base()
        if not self.ranks.first or not self._updates:
            return base
        moved = {name: w.detach().to("cpu", torch.float32, copy=True).contiguous() for name, w in self.weights.items()}
        return base | moved | {SCALE: self._scale.clone()}

    def bad_weight(self) -> str | None:
        """Name of the first tensor, of base or adapters, with a NaN or an infinity, on any rank."""
        everything = [*((piece.name, tensor) for piece, tensor in self._base.items()), *self.weights.items()]
        bad = next((name for name, tensor in everything if not torch.isfinite(tensor).all()), None)
        return next((name for name in self.ranks.exchange(bad) if name), None)

    def complete(self) -> Iterator[tuple[str, Tensor]]:
        """A and B of every adapted weight, on the CPU of every rank."""
        for name, weight in self.weights.items():
            yield name, weight.detach().cpu()

    def shapes(self) -> Shapes:
        """Shapes of the complete tensors that `state` is made of."""
        adapters = {name: tuple(weight.shape) for name, weight in self.weights.items()}
        return state_shapes(adapters) | {f"base/{name}": shape for name, shape in self._shapes.items()}

    def dtypes(self) -> dict[str, torch.dtype]:
        """Number formats of those tensors, but for the number of updates."""
        names = self.shapes().keys() - {UPDATES}
        return {name: self._published if name.startswith("base/") else self.dtype for name in names}

    def state_pieces(self) -> list[Piece]:
        """What `load_state` will read, besides the number of updates."""
        return [*map(_stored, self._parts), *(whole_piece(n, t.shape) for n, t in self._held().items() if n != UPDATES)]

    def state(self) -> dict[Piece, Tensor]:
        """What this rank writes of base, adapters and moments; A and B, which all have, are rank 0's to write."""
        base = {_stored(piece): base.cpu() for piece, base in self._base.items() if self._parts[piece].owned}
        if not self.ranks.first:
            return base
        return base | {whole_piece(name, tensor.shape): tensor.cpu() for name, tensor in self._held().items()}

    @torch.no_grad()
    def load_state(self, fetch: Callable[[Piece], Tensor]) -> None:
        """Take over what `state` gave, under this or another layout."""
        for name, place in self._held().items():
            place.copy_(fetch(whole_piece(name, place.shape)))
        updates = fetch(whole_piece(UPDATES, (1,)))[0]
        for weight in self.weights.values():
            self.adamw.state[weight]["step"].copy_(updates)
        self._hold(lambda piece: fetch(_stored(piece)))

    def _hold(self, fetch: Callable[[Piece], Tensor]) -> None:
        """Freeze the base as published, to the bit: that is what engines hold."""
        # In memory of its own: what is held now may have been exported.
        self._base = {
            piece: fetch(piece).detach().to(self._device, self._published, copy=True).contiguous()
            for piece in self._parts
        }
        self._gathered = None
        self.round()

    @torch.no_grad()
    def _write(
        self, values: Callable[[Piece], Tensor], adapters: dict[str, Adapter], dtype: torch.dtype | None
    ) -> None:
        for piece, part in self._parts.items():
            value = values(piece)
            if adapter := adapters.get(piece.name):
                value = merge(value, adapter.cut(piece), dtype)
            part.write(value)

    def _whole_base(self) -> dict[str, Tensor]:
        """On rank 0, the complete base; nothing on the others."""
        if self._gathered is None:
            mine: dict[str, list[Piece]] = {name: [] for name in self._shapes}
            for piece, part in self._parts.items():
                if part.owned:
                    mine[piece.name].append(piece)
            whole = {name: self._gather(mine[name], shape) for name, shape in self._shapes.items()}
            self._gathered = whole if self.ranks.first else {}
        return dict(self._gathered)

    def _gather(self, mine: list[Piece], shape: tuple[int, ...]) -> Tensor:
        if self.ranks.world == 1:
            return self._base[mine[0]].cpu()
        whole = torch.zeros(shape, dtype=self._published, device=self._device)
        for piece in mine:
            cut(whole, piece).copy_(self._base[piece])
        # Of every byte all ranks but one have 0, so the sum is what that one has, even of -0.0.
        self.ranks.sum(whole.view(-1).view(torch.uint8))
        return whole.cpu()

    def _empty(self, piece: Piece) -> Tensor:
        sizes = list(self._shapes[piece.name])
        sizes[piece.dim] = piece.stop - piece.start
        return torch.zeros(sizes, dtype=self._published, device=self._device)

    @property
    def _updates(self) -> int:
        return int(self.adamw.state[next(iter(self.weights.values()))]["step"])

    def _adapter(self, weight: str) -> Adapter:
        a, b = (self.weights[name].detach() for name in names_of(weight))
        return Adapter(a, b, float(self._scale))

    def _held(self) -> dict[str, Tensor]:
        held = {}
        for name, weight in self.weights.items():
            held[f"master/{name}"] = weight.detach()
            for kind in MOMENTS:
                held[f"{kind}/{name}"] = self.adamw.state[weight][kind]
        return held | {UPDATES: self.adamw.state[next(iter(self.weights.values()))]["step"].reshape(1)}


def _stored(piece: Piece) -> Piece:
    """Under which name a piece of the base is saved."""
    return Piece(f"base/{piece.name}", piece.dim, piece.start, piece.stop)
