"""Finished samples between the threads that draw, collect and wait."""

import threading
import time

import pytest

from furlong.ops.protocols import Sample
from furlong.resources.engines.outbox import Outbox


def sample(name, tokens=(1,)):
    return Sample(name, tokens, (0.0,) * len(tokens), (0.0,) * len(tokens), ((0, 0, len(tokens)),), "stop", 0.1)


def names(samples):
    return [one.request_id for one in samples]


def test_samples_are_returned_until_they_are_taken():
    box = Outbox()
    assert box.collect(0.0, []) == []
    box.put(sample("a"))
    box.put(sample("b"))
    assert names(box.collect(5.0, [])) == ["a", "b"]
    assert names(box.collect(5.0, [])) == ["a", "b"]
    assert "a" in box
    assert names(box.collect(5.0, ["a", "never there"])) == ["b"]
    assert "a" not in box
    assert box.collect(0.0, ["b"]) == []


def test_a_second_sample_of_one_id_does_not_replace_what_may_have_been_returned():
    box = Outbox()
    box.put(sample("a", (1,)))
    box.put(sample("a", (2,)))
    assert [s.tokens for s in box.collect(0.0, [])] == [(1,)]


def test_collect_waits_and_comes_back_in_time():
    box = Outbox()
    begin = time.monotonic()
    assert box.collect(0.1, []) == []
    assert time.monotonic() - begin >= 0.1
    timer = threading.Timer(0.1, box.put, [sample("a")])
    timer.start()
    assert names(box.collect(30.0, [])) == ["a"]
    assert time.monotonic() - begin < 10
    timer.join(5)


def test_claimed_samples_are_not_collected_nor_taken():
    box = Outbox()
    with box.claimed(["a", "b"]):
        box.put(sample("b"))
        box.put(sample("c"))
        assert names(box.collect(0.0, ["b"])) == ["c"]
        with pytest.raises(TimeoutError, match=r"request 'a' \(1 in all\) has not finished within 0\.05 s"):
            box.wait(["b", "a"], 0.05)
        box.put(sample("a"))
        assert names(box.wait(["b", "a"], 5.0)) == ["b", "a"]
    assert names(box.collect(0.0, [])) == ["c"]


def test_two_may_wait_for_one_sample():
    box, found = Outbox(), []

    def wait():
        with box.claimed(["a"]):
            found.extend(box.wait(["a"], 10.0))

    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    while box._claims["a"] < 2:
        time.sleep(0.001)
    box.put(sample("a"))
    for thread in threads:
        thread.join(10)
    assert names(found) == ["a", "a"]
    assert "a" not in box


def test_errors_are_told_once_and_take_no_sample_along():
    box = Outbox()
    box.put(sample("a"))
    box.fail(["b", "c"], ArithmeticError("both"))
    assert "b" in box
    with pytest.raises(ArithmeticError, match="both"):
        box.collect(5.0, [])
    assert "b" not in box
    assert names(box.collect(0.0, [])) == ["a"]
    with box.claimed(["d"]):
        box.fail(["d"], ArithmeticError("mine"))
        assert names(box.collect(0.0, [])) == ["a"]
        with pytest.raises(ArithmeticError, match="mine"):
            box.wait(["d"], 5.0)
    assert names(box.collect(0.0, [])) == ["a"]


def test_what_a_waiter_gave_up_is_dropped_when_it_comes_unless_somebody_asks_again():
    box = Outbox()

    def give_up():
        with box.claimed(["a", "b", "c"]):
            box.put(sample("a"))
            raise KeyError

    with pytest.raises(KeyError):
        give_up()
    assert "a" not in box
    box.expect(["c"])
    box.put(sample("b"))
    box.put(sample("c"))
    assert names(box.collect(0.0, [])) == ["c"]
    box.put(sample("b"))
    assert names(box.collect(0.0, [])) == ["c", "b"]


def test_an_error_tells_whose_it_is_even_in_another_process():
    import pickle

    from furlong.ops.policy.sampling import NonFiniteLogits

    box = Outbox()
    box.fail(["a", "b"], NonFiniteLogits(["a", "b"]))
    box.fail(["c"], ValueError("of another"))
    with pytest.raises(NonFiniteLogits) as caught:
        box.collect(0.0, [])
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.request_ids == ["a", "b"]
    assert str(again) == str(caught.value)
    with pytest.raises(ValueError, match="of another") as other:
        box.collect(0.0, [])
    assert other.value.request_ids == ["c"]
