"""Speculative decoding in an SGLang server: how it is asked for, and what the server says where it cannot.

SGLang 0.5.23 has no attention for EAGLE drafts on a CPU: it loads policy and draft, then refuses and ends. So these
arguments are for servers on a GPU, and on a CPU `LocalEngine` is what draws with a draft.
"""

from __future__ import annotations

import re
from pathlib import Path

from furlong.ops.draft.settings import DraftSettings
from furlong.ops.draft.shape import DraftShape
from furlong.ops.draft.start import shape_of
from furlong.ops.policy.architecture import Architecture
from furlong.resources.engines.step_gate import EngineError
from furlong.resources.weights.draft_folder import FOLDER

_REFUSAL = re.compile(r"EAGLE is not supported in (?:\w+ )?attention backend \S+")


def served_shape(settings: DraftSettings, architecture: Architecture) -> DraftShape:
    """The shape of the draft that a server is to draw with.

    Raises:
        EngineError: SGLang has no such draft. DraftError: it does not fit the policy.
    """
    if settings.kind != "eagle3":
        raise EngineError(
            f"draft.kind {settings.kind!r} is not drawn with by SGLang; set eagle3, or draw with the embedded engine "
            "(engine: local)"
        )
    if settings.verify != "rejection":
        raise EngineError(
            f"draft.verify {settings.verify!r} is a rule of the embedded engine; set rejection, or engine: local"
        )
    return shape_of(settings, architecture)


def launch_flags(settings: DraftSettings, shape: DraftShape, folder: str | Path) -> list[str]:
    """The arguments of `sglang.launch_server` for drawing with the draft beside a policy.

    A chain of k proposals is k steps of 1 and a verify of k + 1 tokens; with w alternatives a token, SGLang keeps the
    most likely ones of its tree, here as many as w chains have. Proposals are sampled and verified by rejection where SGLang
    has that rule: for chains, over the policy's whole vocabulary.

    Args:
        shape: from `served_shape`.
        folder: a policy with `draft/` in it, as `furlong weights rebuild` writes them.
    Raises:
        EngineError: there is no draft in it.
    """
    draft = Path(folder) / FOLDER
    if not (draft / "config.json").is_file():
        raise EngineError(
            f"{folder} has no {FOLDER}/config.json, and SGLang loads a draft when it starts; start from the folder of a "
            "weights version that has a draft (`furlong weights rebuild VERSION --to FOLDER`)"
        )
    steps, width = settings.proposals, settings.width
    return [
        *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(draft)),
        *("--speculative-num-steps", str(steps), "--speculative-eagle-topk", str(width)),
        *("--speculative-num-draft-tokens", str(1 + steps * width)),
        *(["--speculative-use-rejection-sampling"] if width == 1 and not shape.reduced else []),
    ]


def refused(log: str) -> str:
    """What to tell about a server that ended because of its draft; empty when that is not why."""
    found = _REFUSAL.search(log)
    if found is None:
        return ""
    return (
        f"SGLang refused to speculate ({found[0]}): it has no attention for EAGLE drafts on a CPU. The policy and the draft "
        "were loaded; to draw with the draft on a CPU, use the embedded engine (engine: local, LocalEngine(draft=...)), "
        "or start the engine without one. "
    )
