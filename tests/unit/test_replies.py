"""Many threads' replies from one engine: what is sent together, who gets what, and which threads are left."""

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from router_lake import drawn, request, until

from furlong.resources.actors import ActorLost
from furlong.resources.replies import Replies


class Desk:
    """Keeps the promises of `Engine.submit`, `collect` and `abort`; every call takes `delay`, as one elsewhere does."""

    def __init__(self, delay=0.0):
        self.delay, self.lost = delay, None
        self.submits, self.aborts, self.taken = [], [], []
        self.running, self.finished = {}, {}
        self.hold = False
        self.changed = threading.Condition()

    def submit(self, requests):
        self._travel()
        with self.changed:
            self.submits.append([r.request_id for r in requests])
            if any(not r.prompt for r in requests):
                raise ValueError("a prompt is empty")
            for r in requests:
                if r.request_id not in self.finished:
                    self.running[r.request_id] = drawn(r, 0)
            self._finish()

    def collect(self, seconds, taken):
        self._travel()
        with self.changed:
            self.taken += taken
            for name in taken:
                self.finished.pop(name, None)
            self.changed.wait_for(lambda: self.finished or self.lost, seconds)
            if self.lost:
                raise self.lost
            return list(self.finished.values())

    def abort(self, request_ids):
        with self.changed:
            names = list(self.running) if request_ids is None else request_ids
            self.aborts.append(list(names))
            ended = [name for name in names if self.running.pop(name, None)]
            self.finished |= {name: ended_reply(name) for name in ended}
            self.changed.notify_all()
            return len(ended)

    def let_go(self):
        with self.changed:
            self.hold = False
            self._finish()

    def lose(self, error):
        with self.changed:
            self.lost = error
            self.changed.notify_all()

    def _finish(self):
        if not self.hold:
            self.finished |= self.running
            self.running = {}
            self.changed.notify_all()

    def _travel(self):
        time.sleep(self.delay)
        if self.lost:
            raise self.lost


def ended_reply(name):
    return drawn(request(name), 0).__class__(name, (), (), (), (), "abort", 0.0)


@pytest.fixture
def desk():
    before = set(threading.enumerate())
    yield Desk()
    until(lambda: set(threading.enumerate()) <= before)


def replies_of(desk):
    return Replies(desk.submit, desk.collect, desk.abort)


def waiting(replies, count):
    until(lambda: len(replies._replies) == count)


def test_many_threads_need_few_calls_and_no_thread_is_left(desk):
    desk.delay = 0.02
    replies = replies_of(desk)
    with ThreadPoolExecutor(100) as pool:
        found = list(pool.map(lambda n: replies.generate([request(f"{n}", n), request(f"{n}b", n)], 10), range(300)))
    assert found == [[drawn(request(f"{n}", n), 0), drawn(request(f"{n}b", n), 0)] for n in range(300)]
    assert len(desk.submits) < 60
    until(lambda: len(desk.taken) == 600)
    assert desk.finished == {}, "nothing is left at the engine"
    assert (replies._replies, replies._early, replies._unwanted) == ({}, {}, set())


def test_one_unusable_request_is_its_callers_alone(desk):
    desk.delay = 0.05
    replies = replies_of(desk)
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(replies.generate, [request(str(n), n, (n,) if n else ())], 10) for n in range(8)]
        with pytest.raises(ValueError, match="a prompt is empty"):
            calls[0].result(10)
        assert [call.result(10)[0].request_id for call in calls[1:]] == [str(n) for n in range(1, 8)]


@pytest.mark.parametrize("found_by", ["collect", "submit"])
def test_a_lost_engine_fails_everybody_at_once(desk, found_by):
    desk.hold = True
    replies = replies_of(desk)
    with ThreadPoolExecutor(20) as pool:
        calls = [pool.submit(replies.generate, [request(str(n))], 30) for n in range(20)]
        until(lambda: len(desk.running) == 20)
        began = time.monotonic()
        if found_by == "collect":
            desk.lose(ActorLost("killed here"))
        else:
            desk.lost = ActorLost("killed here")
            with pytest.raises(ActorLost):
                replies.generate([request("late")], 30)
        for call in calls:
            with pytest.raises(ActorLost, match="killed here"):
                call.result(10)
        assert time.monotonic() - began < 5


def test_what_a_dead_driver_asked_for_is_kept_until_somebody_asks_for_the_same(desk):
    desk.submit([request("old", 5), request("unwanted", 6)])
    replies = replies_of(desk)
    replies.abort(["unwanted"])
    assert replies.generate([request("new", 7)], 10) == [drawn(request("new", 7), 0)]
    until(lambda: "old" in replies._early)
    sent = len(desk.submits)
    assert replies.generate([request("old", 5)], 10) == [drawn(request("old", 5), 0)]
    assert len(desk.submits) == sent
    until(lambda: not desk.finished)
    assert (replies._early, replies._unwanted) == ({}, set())


def test_what_a_dead_driver_has_running_is_not_begun_again(desk):
    desk.hold = True
    desk.submit([request("old", 5)])
    replies = replies_of(desk)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(replies.generate, [request("old", 5)], 10)
        until(lambda: len(desk.submits) == 2)
        assert list(desk.running) == ["old"]
        desk.let_go()
        assert call.result(10) == [drawn(request("old", 5), 0)]


def test_a_reply_that_is_too_late_is_ended_and_dropped(desk):
    desk.hold = True
    replies = replies_of(desk)
    with pytest.raises(TimeoutError):
        replies.generate([request("a")], 0.2)
    assert desk.aborts == [["a"]]
    desk.let_go()
    assert replies.generate([request("b")], 5)
    until(lambda: not desk.finished)
    assert (replies._early, replies._unwanted) == ({}, set())


def test_an_interrupt_ends_the_replies_of_its_thread_alone(desk):
    desk.hold = True
    replies = replies_of(desk)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(replies.generate, [request("other")], 20)
        waiting(replies, 1)

        def interrupt():
            until(lambda: "mine" in desk.running)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            replies.generate([request("mine")], 20)
        thread.join()
        assert desk.aborts == [["mine"]]
        desk.let_go()
        assert other.result(10)[0].finish_reason == "stop"


def test_an_abort_that_overtakes_its_request_is_said_again(desk):
    desk.delay, desk.hold = 0.2, True
    replies = replies_of(desk)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(replies.generate, [request("a")], 10)
        waiting(replies, 1)
        assert replies.abort(["a"]) == 0
        assert call.result(10) == [ended_reply("a")]
    assert desk.aborts == [["a"], ["a"]]


def test_two_threads_may_wait_for_one_reply(desk):
    desk.hold = True
    replies = replies_of(desk)
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(replies.generate, [request("a")], 10) for _ in range(2)]
        until(lambda: "a" in desk.running and replies._replies["a"].waiters == 2)
        desk.let_go()
        assert calls[0].result(10) == calls[1].result(10) == [drawn(request("a"), 0)]
    assert desk.submits == [["a"]]


def test_nothing_asked_is_nothing_sent(desk):
    assert replies_of(desk).generate([], 1) == []
    assert desk.submits == []


@pytest.mark.parametrize(("named", "failed"), [(["a"], {"a"}), (None, {"a", "b"})])
def test_an_error_that_comes_instead_of_samples_is_theirs_whom_it_names_or_everybodys(desk, named, failed):
    desk.hold = True
    replies = replies_of(desk)
    error = ArithmeticError("not finite")
    if named:
        error.request_ids = named
    with ThreadPoolExecutor(2) as pool:
        calls = {name: pool.submit(replies.generate, [request(name)], 10) for name in "ab"}
        until(lambda: len(desk.running) == 2)
        desk.lose(error)
        until(lambda: calls["a"].done())
        desk.lost = None
        desk.let_go()
        found = {name: call.exception(10) for name, call in calls.items()}
    assert {name for name, err in found.items() if err is error} == failed
