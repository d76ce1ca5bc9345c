"""One weights version as the engine's process holds it, and what the server must report when it serves the same bytes.

SGLang keeps some tensors fused and some padded with zeros; it reports a checksum of each of its own parameters. For every
version the checksums that belong to our tensors are computed together with their digests, from the same bytes: a server
that reports them holds tensors of these digests.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

import torch
from jaxtyping import Shaped
from torch import Tensor

from furlong.ops.draft.shape import MAPS, PREFIX, DraftShape
from furlong.ops.draft.tensors import check_tensors, of_version
from furlong.ops.policy.architecture import Architecture
from furlong.ops.policy.checkpoint import is_extra
from furlong.ops.weights.digest import dtype_name, raw_bytes, tensor_digest
from furlong.resources.engines.step_gate import EngineError

_MULTIPLES = {
    "embed_tokens.weight": (64, 1),
    "lm_head.weight": (64, 1),
    ".gate_proj.weight": (32, 1),
    ".up_proj.weight": (32, 1),
    ".down_proj.weight": (1, 32),
}
"""SGLang adds zeros to these tensors on a CPU until rows and columns are multiples of this."""
_EMBEDDING = "model.embed_tokens.weight"
_FUSED = (
    (re.compile(r"\.experts\.\d+\.(gate|up)_proj\."), ".experts.w13_"),
    (re.compile(r"\.experts\.\d+\.down_proj\."), ".experts.w2_"),
    (re.compile(r"\.[qkv]_proj\."), ".qkv_proj."),
    (re.compile(r"\.(gate|up)_proj\."), ".gate_up_proj."),
)
"""Of an expert both come from one layer's tensors, expert after expert."""


@dataclass(frozen=True)
class Weights:
    """All tensors of one version by Hugging Face name, those of drafts and adapters included."""

    version: int
    tensors: dict[str, Tensor]
    digests: dict[str, str]
    """Digest of each tensor."""
    checksums: dict[str, str]
    """What the server must report for each of its parameters."""

    draft: DraftShape | None = None
    """Of the draft that the server holds too."""

    def served(self) -> dict[str, Tensor]:
        """The tensors that a server holds: the policy's, and those of a draft it draws with, but for the draft's maps,
        which it reads when it starts."""
        mine = set() if self.draft is None else {PREFIX + name for name in self.draft.parameters()}
        return {name: tensor for name, tensor in self.tensors.items() if not is_extra(name) or name in mine}

    def check_maps(self, other: Weights) -> None:
        """EngineError unless a draft of the one proposes from the same part of the vocabulary as the other's."""
        for name in (PREFIX + name for name in MAPS) if self.draft else ():
            if self.digests.get(name) != other.digests.get(name):
                raise EngineError(
                    f"version {self.version} has another {name} than version {other.version}, which an SGLang server reads "
                    "only when it starts; start the engine again from the folder of the new version"
                )

    def changed_from(self, other: Weights) -> dict[str, Tensor]:
        """Those of the served tensors whose bytes are not the other version's; these the server has to be given."""
        return {n: tensor for n, tensor in self.served().items() if self.digests[n] != other.digests.get(n)}


def weigh(
    version: int,
    tensors: dict[str, Tensor],
    architecture: Architecture,
    dtype: torch.dtype,
    known: Weights | None = None,
    draft: DraftShape | None = None,
) -> Weights:
    """Digest the tensors of a version; checksums of parameters whose bytes are those of `known` are taken from it.

    Args:
        draft: of the draft that the server holds beside the policy; None where it has none.
    Raises:
        EngineError: a policy tensor is missing, unexpected, or of another shape or dtype than the server's.
        DraftError: the version's draft is not of that shape.
    """
    shapes = architecture.shapes()
    policy = {name for name in tensors if not is_extra(name)}
    if odd := sorted(policy ^ set(shapes)):
        raise EngineError(
            f"version {version}: tensor {odd[0]} is {'missing' if odd[0] in shapes else 'not part of the model'} "
            f"({len(odd)} such); publish exactly the tensors of the served model"
        )
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape or tensors[name].dtype != dtype:
            raise EngineError(
                f"version {version}: {name} is {dtype_name(tensors[name])}{list(tensors[name].shape)}, the server holds "
                f"{str(dtype).removeprefix('torch.')}{list(shape)}; publish in the dtype the engine was started with"
            )
    if draft is not None:
        check_tensors(of_version(tensors), draft, f"the draft of version {version}")
    digests = {name: tensor_digest(tensor) for name, tensor in tensors.items()}
    same = {name for name in digests if known and known.digests.get(name) == digests[name]}
    checksums = {
        parameter: known.checksums[parameter]
        if known and same.issuperset(names)
        # A draft may be published in another format than the server computes in.
        else _checksum([_padded(name, tensors[name].to(dtype)) for name in names])
        for parameter, names in parameters(architecture, draft).items()
    }
    return Weights(version, tensors, digests, checksums, draft)


def parameters(architecture: Architecture, draft: DraftShape | None = None) -> dict[str, list[str]]:
    """The server's parameters, each with the names in a version of the tensors whose rows it holds, in order."""
    found: dict[str, list[str]] = {}
    for name in architecture.shapes():
        found.setdefault(_fused(name), []).append(name)
    for name in draft.parameters() if draft else ():
        parameter = name.replace("midlayer.", "layers.0.")
        parameter = _fused(parameter if parameter.startswith("lm_head.") else f"model.{parameter}")
        found.setdefault(PREFIX + parameter, []).append(PREFIX + name)
    if draft:
        # It is the policy's own.
        found[f"{PREFIX}{_EMBEDDING}"] = [_EMBEDDING]
    return found


def _fused(name: str) -> str:
    for pattern, fused in _FUSED:
        name = pattern.sub(fused, name)
    return name


def compare(weights: Weights, reported: dict[str, str], architecture: Architecture) -> None:
    """Raise EngineError unless the server reported exactly the checksums of `weights`."""
    if odd := sorted(set(weights.checksums) ^ set(reported)):
        raise EngineError(
            f"the server's parameters are not those of version {weights.version}: {odd[0]} ({len(odd)} such) is only on "
            "one side, so nothing can be attested; serve a model of type llama, qwen2, qwen3 or qwen3_moe on a CPU, "
            "without quantization"
        )
    wrong = sorted(name for name, checksum in reported.items() if checksum != weights.checksums[name])
    if wrong:
        parts = ", ".join(parameters(architecture, weights.draft)[wrong[0]])
        raise EngineError(
            f"the server does not hold version {weights.version}: parameter {wrong[0]} (tensors {parts}; {len(wrong)} "
            f"parameters in all) has checksum {reported[wrong[0]]}, expected {weights.checksums[wrong[0]]}; "
            "load the version again with load_anchor, or restart the engine"
        )


def _padded(name: str, tensor: Shaped[Tensor, ...]) -> Shaped[Tensor, ...]:
    """The tensor with the zero rows and columns that the server keeps with it."""
    rows, columns = next((extra for end, extra in _MULTIPLES.items() if name.endswith(end)), (1, 1))
    extra = [-tensor.shape[0] % rows, -tensor.shape[-1] % columns]
    return torch.nn.functional.pad(tensor, (0, extra[1], 0, extra[0])) if any(extra) else tensor


def _checksum(parts: list[Shaped[Tensor, ...]]) -> str:
    """16 hex digits, as SGLang 0.5.23 computes them for a tensor in host memory: the first 8 bytes of SHA-256.

    Args:
        parts: what the parameter is made of, one below the other.
    """
    digest = hashlib.sha256()
    for part in parts:
        digest.update(raw_bytes(part))
    return digest.hexdigest()[:16]
