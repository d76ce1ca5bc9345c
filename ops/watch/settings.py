"""What a root is to do unattended: `<root>/watch.yaml`, read anew at every look, so that an edit needs no restart."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml


class WatchError(ValueError):
    """watch.yaml cannot be used; the message says which line to correct, never a secret."""


@dataclass(frozen=True)
class Retrain:
    """A block of steps to request without a person."""

    spec: str
    run: str
    steps: int = 1
    """Steps per block."""
    overrides: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Watch:
    """Without the file, nobody is notified and nothing is trained by itself."""

    notify: list[str] = field(default_factory=list)
    """Apprise URLs, or names of environment variables that hold one."""
    continuous: Retrain | None = None
    nightly: Retrain | None = None


def read_watch(root: Path) -> Watch:
    """The settings of a root; defaults when there is no file. Raises WatchError."""
    path = root / "watch.yaml"
    if not path.is_file():
        return Watch()
    try:
        told = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError:
        raise WatchError(f"{path} is no YAML; correct it, see docs/unattended.md") from None
    _check(told, Watch, path, "the file")
    urls = told.get("notify", [])
    if not isinstance(urls, list) or not all(isinstance(url, str) and url for url in urls):
        raise WatchError(f"notify in {path} must be a list of texts: apprise URLs or names of environment variables")
    return Watch(urls, *(_retrain(told.get(name), name, path) for name in ("continuous", "nightly")))


def resolve_urls(notify: list[str]) -> list[str]:
    """URLs, with names of environment variables replaced by their values; WatchError when one is not set."""
    found = []
    for number, entry in enumerate(notify, 1):
        url = entry if "://" in entry else os.environ.get(entry, "")
        if not url:
            raise WatchError(
                f"entry {number} of notify in watch.yaml is neither a URL nor the name of an environment variable that "
                "is set; set the variable where `furlong ui` is started"
            )
        found.append(url)
    return found


def _retrain(told: Any, name: str, path: Path) -> Retrain | None:
    if told is None:
        return None
    _check(told, Retrain, path, name)
    if not told.get("spec") or not told.get("run"):
        raise WatchError(f"{name} in {path} needs both spec and run; write them")
    wanted = Retrain(**told)
    if type(wanted.steps) is not int or wanted.steps < 1 or not isinstance(wanted.overrides, dict):
        raise WatchError(f"{name} in {path} needs steps of 1 or more and overrides as key: value; correct them")
    return wanted


def _check(told: Any, kind: type, path: Path, where: str) -> None:
    known = [each.name for each in fields(kind)]
    if not isinstance(told, dict):
        raise WatchError(f"{where} in {path} must be key: value lines with {', '.join(known)}")
    if odd := sorted(str(key) for key in set(told) - set(known)):
        raise WatchError(f"{where} in {path} has unknown {', '.join(odd)}; known are {', '.join(known)}")
