"""A person's clicks in Dagster's UI, as the GraphQL requests that the pages send."""

import json
import time
import urllib.error
import urllib.request

LAUNCH = """mutation($run: ExecutionParams!) { launchRun(executionParams: $run) { __typename
  ... on LaunchRunSuccess { run { runId } } ... on PythonError { message }
  ... on RunConfigValidationInvalid { errors { message } } ... on InvalidSubsetError { message } } }"""
AGAIN = """mutation($what: ReexecutionParams!) { launchRunReexecution(reexecutionParams: $what) { __typename
  ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } } }"""
TERMINATE = """mutation($id: String!) { terminateRun(runId: $id, terminatePolicy: SAFE_TERMINATE) { __typename
  ... on TerminateRunFailure { message } ... on PythonError { message } } }"""
RUN = """query($id: ID!) { runOrError(runId: $id) { ... on Run { status tags { key value }
  stats { ... on RunStatsSnapshot { enqueuedTime launchTime startTime endTime } }
  stepStats { stepKey status attempts { startTime } } } } }"""
RUNS = "query { runsOrError { ... on Runs { results { runId jobName status parentRunId tags { key value } } } } }"
EVENTS = """query($id: ID!) { logsForRun(runId: $id) { ... on EventConnection { events { __typename
  ... on MessageEvent { message level stepKey }
  ... on HandledOutputEvent { stepKey }
  ... on ExecutionStepUpForRetryEvent { error { message errorChain { error { message } } } }
  ... on ExecutionStepFailureEvent { error { message errorChain { error { message } } }
    failureMetadata { description metadataEntries { label } } } } } } }"""
ENDED = ("SUCCESS", "FAILURE", "CANCELED")


class UiClient:
    """Of a web server that answers at `url`."""

    def __init__(self, url: str):
        self.url = url

    def ask(self, query: str, **variables) -> dict:
        body = json.dumps({"query": query, "variables": variables}).encode()
        request = urllib.request.Request(f"{self.url}/graphql", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            told = json.loads(answer.read())
        assert "errors" not in told, told["errors"]
        return told["data"]

    def launch(self, job: str, config: dict, tags: dict[str, str] | None = None) -> str:
        """The launchpad's button; the new run's id."""
        metadata = {"tags": [{"key": key, "value": value} for key, value in (tags or {}).items()]}
        told = self.ask(
            LAUNCH,
            run={"selector": self._job(job), "runConfigData": config, "mode": "default", "executionMetadata": metadata},
        )["launchRun"]
        assert told["__typename"] == "LaunchRunSuccess", told
        return told["run"]["runId"]

    def launch_step(self, partition: str, config: dict) -> str:
        """The launchpad of `rl_step` with a partition chosen."""
        return self.launch("rl_step", config, {"dagster/partition": partition})

    def again(self, run_id: str, strategy: str = "FROM_FAILURE") -> str:
        """The button `Re-execute from failure`; the new run's id."""
        told = self.ask(AGAIN, what={"parentRunId": run_id, "strategy": strategy})["launchRunReexecution"]
        assert told["__typename"] == "LaunchRunSuccess", told
        return told["run"]["runId"]

    def terminate(self, run_id: str) -> None:
        told = self.ask(TERMINATE, id=run_id)["terminateRun"]
        assert told["__typename"] == "TerminateRunSuccess", told

    def run(self, run_id: str) -> dict:
        return self.ask(RUN, id=run_id)["runOrError"]

    def runs(self) -> list[dict]:
        """All runs, newest first."""
        return self.ask(RUNS)["runsOrError"]["results"]

    def status(self, run_id: str) -> str:
        return self.run(run_id)["status"]

    def events(self, run_id: str) -> list[dict]:
        return self.ask(EVENTS, id=run_id)["logsForRun"]["events"]

    def words(self, run_id: str) -> str:
        return "\n".join(event.get("message") or "" for event in self.events(run_id))

    def wait(self, run_id: str, *statuses: str, seconds: float = 200.0) -> str:
        """The run's status once it is one of these, by default once it has ended; AssertionError after so many seconds."""
        until = time.monotonic() + seconds
        while (status := self._status_if_up(run_id)) not in (statuses or ENDED):
            assert time.monotonic() < until, (
                f"run {run_id} is {status} after {seconds:g} s:\n{self._last_words(run_id)}"
            )
            assert statuses == () or status not in ENDED, f"run {run_id} is {status}:\n{self._last_words(run_id)}"
            time.sleep(0.2)
        return status

    def _status_if_up(self, run_id: str) -> str:
        try:
            return self.status(run_id)
        except (urllib.error.URLError, OSError):
            return "unknown, as the web server does not answer"

    def _last_words(self, run_id: str) -> str:
        try:
            return self.words(run_id)[-3000:]
        except (urllib.error.URLError, OSError) as err:
            return f"the web server does not answer: {err}"

    @staticmethod
    def _job(name: str) -> dict:
        return {
            "repositoryLocationName": "furlong",
            "repositoryName": "__repository__",
            "pipelineName": name,
            "assetSelection": None,
            "assetCheckSelection": None,
        }
