"""Who gets which request, what happens to those of a lost engine, and when another one is let in."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from router_lake import Versions, drawn, request, until
from router_samples import Drawer

from furlong.ops.rollouts.trajectory import EngineLost
from furlong.ops.stages.context import StageError
from furlong.resources.router import SLACK, Router
from furlong.resources.weights.fleet import Fleet

PERIOD = 0.05


class Ring:
    """A router over a few drawers, and all that were ever started."""

    def __init__(self, count=2, versions=3, make=Drawer, **options):
        self.make, self.started = make, []
        members = [self.start(number) for number in range(count)]
        self.lake = Versions(versions)
        self.fleet = Fleet("r", self.lake, "base", members, self.start)
        self.router = Router(self.fleet, PERIOD, **{"patience": 5.0, **options})

    def start(self, number):
        self.started.append(self.make(f"drawer {number}.{len(self.started)}"))
        return self.started[-1]

    def served(self):
        """Which engine each call went to, by the call's first request."""
        return {names[0]: drawer for drawer in self.started for names in drawer.asked}


@pytest.fixture
def ring():
    made = []

    def make(*args, **options):
        made.append(Ring(*args, **options))
        return made[-1]

    before = set(threading.enumerate())
    yield make
    for one in made:
        one.router.close()
    until(lambda: set(threading.enumerate()) <= before)


def all_serve(one):
    one.router.bring(0, 1)
    until(lambda: len(one.fleet.serving()) == len(one.fleet.members))


def hold(one):
    for drawer in one.fleet.members:
        drawer.gate.clear()


def release(one):
    for drawer in one.started:
        drawer.gate.set()


def test_calls_go_to_the_least_loaded_engine_whole_and_their_keys_stay_there(ring):
    one = ring(2)
    all_serve(one)
    with ThreadPoolExecutor(8) as pool:
        for turn in range(2):
            hold(one)
            calls = []
            for n in range(4):
                requests = [request(f"{turn}.{n}.{part}") for part in range(3)]
                calls.append(pool.submit(one.router.generate, requests, f"key {n}"))
                until(lambda n=n: sum(row["in_flight"] for row in one.router.loads()) == 3 * (n + 1))
            assert [row["in_flight"] for row in one.router.loads()] == [6, 6]
            release(one)
            for call, n in zip(calls, range(4), strict=True):
                wanted = [drawn(request(f"{turn}.{n}.{part}"), 0) for part in range(3)]
                assert call.result(10) == wanted
    served = one.served()
    assert [served[f"1.{n}.0"] for n in range(4)] == [served[f"0.{n}.0"] for n in range(4)]
    assert one.router.drawn_by("0.0.2") == served["0.0.0"].name
    assert [row["in_flight"] for row in one.router.loads()] == [0, 0]


def test_a_key_leaves_an_engine_that_is_much_busier_than_another(ring):
    one = ring(2)
    all_serve(one)
    one.router.generate([request("first")], "key")
    hold(one)
    with ThreadPoolExecutor(4) as pool:
        try:
            for name, count in (("second", SLACK), ("third", 1), ("fourth", 1)):
                pool.submit(one.router.generate, [request(f"{name}{n}") for n in range(count)], "key")
                until(lambda name=name: f"{name}0" in one.served())
        finally:
            release(one)
    served = one.served()
    assert served["first"] is served["second0"] is served["third0"] is not served["fourth0"]


def test_an_engine_whose_proof_is_another_gets_nothing_and_that_is_seen(ring):
    one = ring(2, make=lambda name: Drawer(name, lies=name.startswith("drawer 1")))
    one.router.bring(0, 1)
    for n in range(20):
        one.router.generate([request(str(n))], str(n))
    until(lambda: one.router.loads()[1]["trouble"])
    assert [drawer.asked for drawer in one.started if drawer.lies] == [[]]
    assert "digest" in one.router.loads()[1]["trouble"]
    assert [row["serving"] for row in one.router.loads()] == [True, False]
    one.started[1].lies = False
    until(lambda: one.router.loads()[1]["serving"])
    assert one.router.loads()[1]["trouble"] == ""


def test_when_no_engine_can_prove_the_version_the_reason_comes_at_once(ring):
    one = ring(2, make=lambda name: Drawer(name, lies=True), patience=60.0)
    with pytest.raises(StageError, match="tensor w has digest"):
        one.router.bring(0, 1)
    with pytest.raises(StageError, match="version 7 is not in the lake"):
        one.router.bring(7, 1)


@pytest.mark.parametrize("seen_by", ["call", "probe"])
def test_a_lost_engine_s_calls_move_and_its_successor_serves_only_after_its_proof(ring, seen_by):
    one = ring(2)
    all_serve(one)
    lost = one.fleet.members[0]
    hold(one)
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(one.router.generate, [request(str(n), n)], str(n)) for n in range(4)]
        until(lambda: len(one.served()) == 4)
        # A call on its way notices either at once, or only when its engine was found out and replaced.
        lost.blind = seen_by == "probe"
        lost.dead = True
        until(lambda: len(one.started) == 3)
        release(one)
        assert [call.result(10) for call in calls] == [[drawn(request(str(n), n), 0)] for n in range(4)]
    until(lambda: len(one.fleet.serving()) == 2)
    assert one.fleet.members[0] is one.started[2]
    hold(one)
    release(one)
    for n in range(10, 30):
        one.router.generate([request(str(n))], str(n))
    asked = [what for what, _ in one.started[2].calls]
    assert "generate" not in asked[: asked.index("load_anchor") + 2]
    assert asked[: asked.index("load_anchor") + 2][-1] == "attest"
    assert set(one.started[2].said("generate")) <= {0}


def test_calls_wait_while_no_engine_serves_and_say_why_when_they_give_up(ring):
    one = ring(1, patience=0.5)
    all_serve(one)
    one.make = lambda name: Drawer(name, lies=True)
    one.fleet.members[0].dead = True
    with pytest.raises(
        EngineLost, match=r"no engine served version 0 for 0.5 s: engine 0: StageError.*tensor w has digest"
    ):
        one.router.generate([request("a")], "a")
    assert len(one.started) >= 2


def test_a_call_that_kills_every_engine_is_given_up_and_others_go_on(ring):
    class Frail(Drawer):
        def generate(self, requests):
            self.dead = self.dead or any(request.request_id.startswith("poison") for request in requests)
            return super().generate(requests)

    one = ring(3, make=Frail, tries=2, patience=10.0)
    all_serve(one)
    with pytest.raises(EngineLost, match=r"poison \(1 in this call\) lost 2 engines.*was lost in generate"):
        one.router.generate([request("poison")], "p")
    assert one.router.generate([request("a")], "a") == [drawn(request("a"), 0)]
    until(lambda: len(one.fleet.serving()) == 3)
    assert len(one.started) == 5


def test_an_error_about_the_request_is_the_caller_s_and_costs_no_engine(ring):
    class Strict(Drawer):
        def generate(self, requests):
            if not requests[0].prompt:
                raise ValueError("the prompt is empty")
            return super().generate(requests)

    one = ring(1, make=Strict)
    all_serve(one)
    with pytest.raises(ValueError, match="the prompt is empty"):
        one.router.generate([request("a", prompt=())], "a")
    assert one.router.generate([request("b")], "b") == [drawn(request("b"), 0)]
    assert len(one.started) == 1
    assert one.router.loads()[0]["in_flight"] == 0


def test_a_publication_goes_to_those_present_and_who_comes_later_starts_with_the_new_version(ring):
    one = ring(2)
    all_serve(one)
    starting, go_on = threading.Event(), threading.Event()
    real = one.fleet._replace

    def slow(number):
        starting.set()
        assert go_on.wait(10)
        return real(number)

    one.fleet._replace = slow
    one.fleet.lose(1, one.fleet.members[1], RuntimeError("killed here"))
    assert starting.wait(10)
    with one.fleet.publication():
        members = one.fleet.before(Versions.row(1), 2)
        assert members == [one.fleet.members[0]]
        go_on.set()
        until(lambda: len(one.started) == 3 and one.fleet.members[1] is one.started[2])
        time.sleep(4 * PERIOD)
        assert one.started[2].said("load_anchor") == [], "nothing is done to it meanwhile"
        members[0].version = 1
        assert one.router.generate([request("during")], "k"), "the others go on"
        one.fleet.proved(1)
    assert one.router.live_version() == 1
    until(lambda: len(one.fleet.serving()) == 2)
    assert [one.started[2].version, one.started[2].said("load_anchor")] == [1, [-1]]


def test_a_publication_waits_for_one_engine_and_leaves_behind_what_cannot_be_started(ring):
    one = ring(2)
    all_serve(one)
    one.fleet.members[1].dead = True
    one.fleet._replace = lambda number: (_ for _ in ()).throw(RuntimeError("no memory"))
    with one.fleet.publication():
        members = one.fleet.before(Versions.row(1), 2)
        assert members == [one.fleet.members[0]]
        members[0].version = 1
        one.fleet.proved(1)
    assert one.router.generate([request("a")], "a") == [drawn(request("a"), 1)]
    until(lambda: "no memory" in one.router.loads()[1]["trouble"])
    one.fleet._replace = one.start
    one.router.bring(1, 3)
    until(lambda: len(one.fleet.serving()) == 2)


def test_a_failed_publication_leaves_the_members_serving_what_is_live(ring):
    one = ring(2)
    all_serve(one)

    def fail():
        with one.fleet.publication():
            one.fleet.before(Versions.row(1), 2)
            raise OSError("in the middle")

    with pytest.raises(OSError, match="in the middle"):
        fail()
    assert len(one.fleet.serving()) == 2
    assert one.router.generate([request("a")], "a") == [drawn(request("a"), 0)]


def test_an_engine_that_changed_its_version_by_itself_is_brought_back_first(ring):
    one = ring(2)
    all_serve(one)
    one.fleet.members[0].version = -1
    until(lambda: one.fleet.members[0].said("load_anchor") == [-1, -1])
    until(lambda: len(one.fleet.serving()) == 2)
    assert len(one.started) == 2


def test_aborted_requests_are_not_begun_when_an_engine_comes(ring):
    one = ring(1)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(one.router.generate, [request("a"), request("b")], "k")
        until(lambda: "b" in one.router._places)
        one.router.abort(["a"])
        all_serve(one)
        first, second = call.result(10)
    assert (first.request_id, first.tokens, first.finish_reason) == ("a", (), "abort")
    assert second == drawn(request("b"), 0)
    assert one.fleet.members[0].asked == [["b"]]
    assert (one.router._places, one.router._aborted) == ({}, set())


def test_an_abort_goes_to_the_engine_that_has_the_request_or_to_all_when_nobody_here_asked_for_it(ring):
    told = []

    class Told(Drawer):
        def abort(self, request_ids=None):
            told.append((self.name, request_ids))
            return super().abort(request_ids)

    one = ring(2, make=Told)
    all_serve(one)
    hold(one)
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(one.router.generate, [request(name)], name) for name in "ab"]
        until(lambda: len(one.served()) == 2)
        assert one.router.abort(["a"]) == 1
        assert told == [(one.served()["a"].name, ["a"])]
        assert one.router.abort(["elsewhere"]) == 2
        assert sorted(told[1:]) == [("drawer 0.0", ["elsewhere"]), ("drawer 1.1", ["elsewhere"])]
        assert [call.result(10)[0].request_id for call in calls] == ["a", "b"]
    assert one.router.abort() == 2
    assert sorted(told[3:]) == [("drawer 0.0", None), ("drawer 1.1", None)]


def test_a_list_of_many_questions_is_divided_between_engines_in_order(ring):
    one = ring(2)
    all_serve(one)
    requests = [request(f"{q}.{n}", n, (q,)) for q in range(6) for n in range(2)]
    engines = one.router.at(0, 1)
    assert engines.generate(requests) == [drawn(r, 0) for r in requests]
    assert [len(names) for drawer in one.started for names in drawer.asked] == [6, 6]
    assert engines.fingerprint() == "drawer 0.0 | drawer 1.1"
    assert engines.generate([]) == []


def test_close_is_quick_and_frees_whoever_waits(ring):
    one = ring(1)
    all_serve(one)
    hold(one)
    with ThreadPoolExecutor(2) as pool:
        drawing = pool.submit(one.router.generate, [request("a")], "a")
        until(lambda: one.served())
        began = time.monotonic()
        one.router.close()
        assert time.monotonic() - began < 5
        with pytest.raises(EngineLost, match="not driven any more"):
            drawing.result(10)
    with pytest.raises(EngineLost, match="not driven any more"):
        one.router.generate([request("b")], "b")


class Brittle(Drawer):
    """Dies at some call, with all calls that are at it then."""

    def generate(self, requests):
        self.dead = self.dead or len(self.asked) >= 20 + 40 * (len(self.name) % 3)
        time.sleep(0.001)
        return super().generate(requests)


def test_two_hundred_threads_lose_nothing_while_engines_die(ring):
    one = ring(3, make=Brittle, tries=8, patience=20.0)
    all_serve(one)
    names = [str(n) for n in range(2000)]
    with ThreadPoolExecutor(200) as pool:
        replies = list(pool.map(lambda n: one.router.generate([request(n, int(n))], n), names))
    assert replies == [[drawn(request(n, int(n)), 0)] for n in names]
    assert len(one.started) > 10
    assert [row["in_flight"] for row in one.router.loads()] == [0, 0, 0]
    for drawer in one.started:
        assert set(drawer.said("generate")) <= {0}, "never before its proof"
