"""The decode thread of an engine: it ends when it is idle, and no request comes too late for it."""

import threading
import time

import pytest
from tiny_policy import make_folder

from furlong.ops.protocols import GenerateRequest
from furlong.resources.engines import scheduler
from furlong.resources.engines.local import LocalEngine

DEADLINE = 20.0


class Late(threading.Condition):
    """A condition whose first wait times out, and somebody else has the lock before the waiting thread has it again."""

    def __init__(self, meanwhile) -> None:
        super().__init__()
        self.meanwhile = meanwhile

    def wait(self, timeout=None):
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is None:
            return super().wait(timeout)
        self.release()
        time.sleep(timeout)
        other = threading.Thread(target=meanwhile)
        other.start()
        other.join()
        self.acquire()
        return False


@pytest.fixture
def engine(tmp_path):
    engine = LocalEngine(make_folder(tmp_path), 0, "float32", 1, [3])
    yield engine
    engine.close()


def test_a_request_that_comes_as_the_thread_is_about_to_end_is_drawn(engine, monkeypatch):
    monkeypatch.setattr(scheduler, "IDLE_SECONDS", 0.05)
    second = GenerateRequest("second", (2, 1), 1, 4, 1.0)
    engine._scheduler._changed = Late(lambda: engine.submit([second]))
    engine.generate([GenerateRequest("first", (1, 2), 1, 4, 1.0)])
    until, found = time.monotonic() + DEADLINE, []
    while not found and time.monotonic() < until:
        found = [sample.request_id for sample in engine.collect(1.0, ["first"])]
    assert found == ["second"]
