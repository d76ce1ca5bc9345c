"""Settings, decisions and messages of what happens without a person."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import yaml
from dagster import (
    DagsterInstance,
    RunRequest,
    SkipReason,
    build_run_status_sensor_context,
    build_sensor_context,
    job,
    op,
)

from furlong.ops.watch.continuous import next_block
from furlong.ops.watch.settings import Watch, WatchError, read_watch, resolve_urls
from furlong.pipelines.sensors import NOTIFIED, continuous_training, failed_runs
from furlong.resources.notify import NotifyError, notify
from furlong.resources.stopping import request_stop


@pytest.fixture
def receiver():
    """The URL of a web hook, and what it was sent."""
    got = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            got.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(500 if "refuse" in self.path else 200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"json://127.0.0.1:{server.server_port}", got
    finally:
        server.shutdown()
        server.server_close()


def write(root, **told):
    (root / "watch.yaml").write_text(yaml.safe_dump(told))


def test_settings(tmp_path, monkeypatch):
    assert read_watch(tmp_path) == Watch()
    for wrong in ({"notfy": []}, {"notify": "x"}, {"nightly": {"spec": "tiny"}},
                  {"continuous": {"spec": "tiny", "run": "a", "steps": 0}}):  # fmt: skip
        write(tmp_path, **wrong)
        with pytest.raises(WatchError, match=r"watch\.yaml"):
            read_watch(tmp_path)
    monkeypatch.setenv("HOOK", "json://there")
    assert resolve_urls(["HOOK", "json://x"]) == ["json://there", "json://x"]
    with pytest.raises(WatchError, match="entry 1"):
        resolve_urls(["UNSET_HOOK"])


def test_a_block_is_requested_once_per_first_step():
    assert next_block("a", 3, 5, False, False) == ("a-00003", "")
    for first, last, halted, busy in ((6, 5, False, False), (3, 5, True, False), (3, 5, False, True)):
        key, why = next_block("a", first, last, halted, busy)
        assert not key
        assert why


def test_messages_arrive_and_errors_hide_secrets(receiver):
    url, got = receiver
    notify([url], "title", "body é <b>")
    assert len(got) == 1
    assert "title" in got[0]
    for wrong in (url + "/refuse-s3cret", "nonsense-s3cret"):
        with pytest.raises(NotifyError) as failed:
            notify([wrong], "t", "b")
        assert "receiver 1" in str(failed.value)
        assert "s3cret" not in str(failed.value)


def test_continuous_training(tmp_path, monkeypatch):
    monkeypatch.setenv("FURLONG_ROOT", str(tmp_path))
    with DagsterInstance.ephemeral() as instance:
        assert isinstance(continuous_training(build_sensor_context(instance)), SkipReason)
        write(tmp_path, continuous={"spec": "tiny", "run": "a"})
        asked = continuous_training(build_sensor_context(instance))
        assert isinstance(asked, RunRequest)
        assert asked.run_key == "a-00001"
        request_stop(tmp_path, "a", "lunch")
        assert isinstance(continuous_training(build_sensor_context(instance)), SkipReason)


def test_a_failure_is_told_once(tmp_path, monkeypatch, receiver):
    url, got = receiver
    monkeypatch.setenv("FURLONG_ROOT", str(tmp_path))
    write(tmp_path, notify=[url])

    @op
    def broken():
        raise ValueError("the reason")

    @job
    def breaks():
        broken()

    with DagsterInstance.ephemeral() as instance:
        done = breaks.execute_in_process(instance=instance, raise_on_error=False)
        context = build_run_status_sensor_context(
            sensor_name="failed_runs", dagster_instance=instance, dagster_run=done.dagster_run,
            dagster_event=done.get_run_failure_event(),
        ).for_run_failure()  # fmt: skip
        for _ in range(2):
            failed_runs(context)
        assert len(got) == 1
        assert "the reason" in got[0]
        assert "broken" in got[0]
        assert NOTIFIED in instance.get_run_by_id(done.run_id).tags
