"""Reduced vocabularies: which tokens are in, and maps that must agree with each other."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from furlong.ops.draft.shape import DraftError
from furlong.ops.draft.vocabulary import check_maps, count_tokens, maps_of, most_frequent


def test_tokens_are_counted_over_all_sequences():
    counts = count_tokens([(1, 1, 3), (), (0, 1)], vocab=5)
    assert counts.tolist() == [1, 3, 0, 1, 0]


@pytest.mark.parametrize("tokens", [(5,), (-1,)])
def test_another_tokenizers_tokens_are_refused(tokens):
    with pytest.raises(DraftError, match="vocabulary has 5"):
        count_tokens([tokens], vocab=5)


def test_the_most_frequent_are_in_and_what_must_be_kept():
    counts = torch.tensor([0, 5, 2, 5, 9, 0])
    assert most_frequent(counts, 3).tolist() == [1, 3, 4]
    assert most_frequent(counts, 3, keep=(5, 0)).tolist() == [0, 4, 5]
    assert most_frequent(counts, 2).tolist() == [1, 4]
    assert most_frequent(torch.zeros(6, dtype=torch.int64), 2, keep=(4,)).tolist() == [0, 4]
    assert most_frequent(counts, 6).tolist() == list(range(6))


@pytest.mark.parametrize(("size", "keep"), [(0, ()), (7, ()), (1, (0, 1)), (2, (6,)), (2, (-1,))])
def test_vocabularies_that_cannot_be_are_refused(size, keep):
    with pytest.raises(DraftError):
        most_frequent(torch.tensor([0, 5, 2, 5, 9, 0]), size, keep)


@given(
    st.lists(st.integers(0, 9), min_size=12, max_size=12), st.integers(1, 12), st.sets(st.integers(0, 11), max_size=1)
)
def test_maps_lead_to_the_chosen_tokens(counts, size, keep):
    ids = most_frequent(torch.tensor(counts), size, keep)
    maps = maps_of(ids, 12)
    assert torch.equal(torch.arange(size) + maps["d2t"], ids)
    assert maps["t2d"].nonzero().flatten().tolist() == ids.tolist()
    assert keep <= set(ids.tolist())
    check_maps(**maps, where="here")
    # None outside occurs oftener than one inside that need not be kept.
    outside = [counts[token] for token in range(12) if not maps["t2d"][token]]
    assert max(outside, default=0) <= min((counts[i] for i in ids.tolist() if i not in keep), default=9)


def test_maps_that_disagree_are_refused():
    good = maps_of(torch.tensor([1, 4, 5]), 8)
    check_maps(**good, where="here")

    def refused(words, **change):
        with pytest.raises(DraftError, match=f"here: .*{words}"):
            check_maps(**{**good, **change}, where="here")

    refused("int64", d2t=good["d2t"].int())
    refused("bool", t2d=good["t2d"].long())
    refused("leads to token 8", d2t=torch.tensor([1, 3, 6]))
    refused("leads to token -1", d2t=torch.tensor([-1, 3, 3]))
    # Absolute ids in place of offsets: the commonest mistake.
    refused("other tokens", d2t=torch.tensor([1, 4, 5]))
    refused("ascending", d2t=torch.tensor([1, 0, 3]))
    refused("ascending", d2t=torch.tensor([4, 0, 3]))
    refused("other tokens", t2d=torch.roll(good["t2d"], 1))
    refused("other tokens", t2d=torch.ones(8, dtype=torch.bool))
