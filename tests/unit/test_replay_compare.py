"""The comparison behind `furlong replay` fails closed."""

import pytest

from furlong.resources.replay import COMPARED, compare

RECORD = dict.fromkeys(COMPARED, "a" * 64)
TENSORS = [{"name": "one", "digest": "1"}, {"name": "two", "digest": "2"}]


def test_the_same_is_identical():
    told = compare(RECORD, dict(RECORD), TENSORS, list(reversed(TENSORS)))
    assert (told.identical, told.first_difference, told.tensors) == (True, "", 2)
    assert compare(RECORD, dict(RECORD), [], TENSORS).identical


@pytest.mark.parametrize(
    ("made", "tensors", "words"),
    [
        (RECORD, [TENSORS[0], {"name": "two", "digest": "x"}], "tensor two: x, recorded 2"),
        (RECORD, TENSORS[:1], "tensor two is not in the replay"),
        (RECORD, [], "tensor one is not in the replay"),
        (RECORD, [*TENSORS, {"name": "three", "digest": "3"}], "tensor three is not in the lake"),
        (RECORD | {"master_digest_after": "b"}, TENSORS, "master_digest_after: b"),
        (RECORD | {"batch_digest": ""}, TENSORS, "batch_digest"),
    ],
)
def test_any_difference_is_named(made, tensors, words):
    told = compare(RECORD, made, TENSORS, tensors)
    assert not told.identical
    assert told.first_difference.startswith(words)


def test_two_records_without_digests_are_not_identical():
    empty = dict.fromkeys(COMPARED, "")
    assert not compare(empty, empty, [], []).identical
