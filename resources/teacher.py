"""The teacher of a run that distils: a model that nobody trains; an engine of its own scores the policy's tokens with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from furlong.ops.policy.algorithms import needs
from furlong.ops.policy.architecture import read_architecture, read_stop_ids
from furlong.ops.policy.manifest import ModelError, inspect
from furlong.ops.spec import Placement, RunSpec, SpecError
from furlong.resources.actors import ActorLost, ActorTimeout, find_or_start
from furlong.resources.lake import Lake
from furlong.resources.models import ModelFolder
from furlong.resources.remote_engine import CONCURRENCY, TEACHER, RemoteEngine


def check_teacher(spec: RunSpec, model: ModelFolder, lake: Lake, run: str) -> str:
    """Digest of the teacher's folder; empty when the run has none. Nothing is started.

    Raises:
        SpecError: it cannot be used or has other tokens than the policy, or is another one than the run began with.
    """
    if "teacher" not in needs(spec.algorithm):
        return ""
    folder, where = Path(spec.algorithm.teacher), f"algorithm.teacher={spec.algorithm.teacher}"
    try:
        digest = inspect(folder)
        theirs, ours = read_architecture(str(folder)).vocab, read_architecture(str(model.path)).vocab
        same = _tokens(folder) == _tokens(model.path)
        read_stop_ids(str(folder))
    except ModelError as err:
        raise SpecError(f"{where} cannot be used: {err}") from err
    if theirs != ours or not same:
        raise SpecError(
            f"{where} has a vocabulary of {theirs} tokens, the policy one of {ours}, and they are not the same tokens with "
            "the same ids; a teacher scores the policy's own tokens: give a model of the same tokenizer"
        )
    if spec.engine == "sglang" and spec.sampling.temperature != 1:
        raise SpecError(
            f"sampling.temperature={spec.sampling.temperature} with engine=sglang: an SGLang server scores at temperature 1 "
            "only; set it to 1, or engine to local"
        )
    known = set(lake.read("teacher_scores", {"run": run}, ["teacher"])["teacher"].to_pylist())
    if other := known - {digest}:
        raise SpecError(
            f"{where} has changed since run {run} began ({digest[:12]}, was {other.pop()[:12]}); restore the folder, or "
            "begin another run"
        )
    return digest


def _tokens(folder: Path) -> Any:
    """Id by token, and what was added to it, as the tokenizer's file has them."""
    try:
        body = json.loads((folder / "tokenizer.json").read_text())
        return body["model"]["vocab"], [(added["id"], added["content"]) for added in body["added_tokens"]]
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise ModelError(
            f"{folder / 'tokenizer.json'} cannot be read ({err}); save the complete tokenizer there"
        ) from err


class Teacher:
    """Implements `ops.stages.context.Teacher`; the engine is found or started when it is first asked."""

    def __init__(self, run: str, spec: RunSpec, placement: Placement, digest: str):
        self.digest = digest
        self._run, self._spec, self._placement = run, spec, placement
        self._engine: RemoteEngine | None = None

    def start(self) -> None:
        """Find or start the engine; harmless when it was."""
        if self._engine is None:
            name, args = _recipe(self._spec, self._placement)
            self._engine = RemoteEngine(find_or_start(TEACHER, self._run, name, args, self._placement, CONCURRENCY))

    def score(self, rows: list[tuple[tuple[int, ...], int]], temperature: float) -> list[list[float]]:
        """See `Engine.score`. An engine that was lost is replaced once: it has nothing but the folder's weights to lose."""
        self.start()
        try:
            return self._engine.score(rows, temperature)
        except ActorTimeout:
            self._engine = None  # it was ended; whoever asks next starts another one
            raise
        except ActorLost as err:
            print(f"the teacher of run {self._run} is replaced: {err}", flush=True)
            self._engine = None
            self.start()
            return self._engine.score(rows, temperature)


def _recipe(spec: RunSpec, placement: Placement) -> tuple[str, tuple[Any, ...]]:
    """Class and arguments. The model is not split: an engine scores in one process."""
    folder = str(Path(spec.algorithm.teacher).resolve())
    args = (folder, 0, spec.model.dtype, placement.threads, read_stop_ids(folder))
    if spec.engine == "local":
        return "furlong.resources.engines.local:LocalEngine", args
    return "furlong.resources.engines.sglang:SGLangEngine", args
