"""A draft's reduced vocabulary: the most frequent tokens, and the maps between their numbers here and the policy's.

`d2t` holds offsets (target id = draft id + d2t[draft id], int64), `t2d` a flag per target id, as EAGLE-3 stores them. What
the vocabulary leaves out can't be proposed: its share of the policy's probability bounds acceptance.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from furlong.ops.draft.shape import DraftError, DraftShape


def count_tokens(sequences: Iterable[Sequence[int]], vocab: int) -> Int[Tensor, " vocab"]:
    """How often each token occurs.

    Raises:
        DraftError: a token is none of the vocabulary's.
    """
    counts = torch.zeros(vocab, dtype=torch.int64)
    for sequence in sequences:
        tokens = torch.as_tensor(sequence, dtype=torch.int64).reshape(-1)
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab:
            raise DraftError(
                f"tokens to count reach from {int(tokens.min())} to {int(tokens.max())}, the vocabulary has {vocab}; "
                "tokenize with the policy's own tokenizer"
            )
        counts += torch.bincount(tokens, minlength=vocab)
    return counts


def most_frequent(counts: Int[Tensor, " vocab"], size: int, keep: Iterable[int] = ()) -> Int[Tensor, " size"]:
    """The ids of the `size` most frequent tokens, ascending.

    Of tokens that occur equally often, the lower ids: byte-pair vocabularies number them by how early they were merged, so
    that with no counts at all, all 0, frequent ones still come first.

    Args:
        keep: tokens that must be among them, such as those that end a reply.
    Raises:
        DraftError: more than there are, or fewer than must be kept.
    """
    kept = torch.tensor(sorted(set(keep)), dtype=torch.int64)
    if not max(1, len(kept)) <= size <= len(counts):
        raise DraftError(
            f"a draft's vocabulary of {size} tokens out of {len(counts)}, {len(kept)} of which must be in it, cannot be; "
            "set draft.vocabulary between the two"
        )
    if len(kept) and not 0 <= int(kept.min()) <= int(kept.max()) < len(counts):
        raise DraftError(
            f"tokens {kept.tolist()} must be kept, the vocabulary has {len(counts)}; give ids of the policy"
        )
    rank = counts.clone()
    rank[kept] = counts.max() + 1
    return torch.argsort(rank, descending=True, stable=True)[:size].sort().values


def maps_of(ids: Int[Tensor, " draft_vocab"], vocab: int) -> dict[str, Tensor]:
    """d2t and t2d of these target ids, ascending."""
    flags = torch.zeros(vocab, dtype=torch.bool)
    flags[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": flags}


def target_ids(tensors: Mapping[str, Tensor], shape: DraftShape) -> Int[Tensor, " draft_vocab"]:
    """The policy's id of each of the draft's tokens; all ids in order where the vocabulary is the policy's."""
    ids = torch.arange(shape.draft_vocab)
    return ids + tensors["d2t"].cpu() if shape.reduced else ids


def check_maps(d2t: Int[Tensor, " draft_vocab"], t2d: Bool[Tensor, " vocab"], where: str) -> None:
    """DraftError unless the two say the same and lead into the vocabulary.

    Args:
        where: the folder or version, for the error.
    """
    if d2t.dtype != torch.int64 or t2d.dtype != torch.bool:
        raise DraftError(
            f"{where}: d2t is {d2t.dtype} and t2d {t2d.dtype}; store offsets in int64 and flags in bool, as EAGLE-3 does"
        )
    ids = torch.arange(len(d2t)) + d2t.cpu()
    if out := ids[(ids < 0) | (ids >= len(t2d))].tolist():
        raise DraftError(
            f"{where}: d2t leads to token {out[0]} of a vocabulary of {len(t2d)}; it must hold offsets (target id minus "
            "draft id), of this policy's vocabulary"
        )
    if bool((ids[1:] <= ids[:-1]).any()):
        raise DraftError(
            f"{where}: d2t does not lead to ascending target ids, each once; make it again from the token ids"
        )
    if not torch.equal(t2d.cpu().nonzero().flatten(), ids):
        raise DraftError(f"{where}: t2d flags other tokens than d2t leads to; take both from the same draft")
