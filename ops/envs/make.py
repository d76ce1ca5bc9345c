"""From a spec's `data.env` to the environment it names."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from furlong.ops.envs.protocol import Env
from furlong.ops.envs.single_turn import SingleTurn
from furlong.ops.envs.tools import RunPython, Tools, toolbox
from furlong.ops.spec import DataSpec, SpecError


def make_env(data: DataSpec, run_python: RunPython) -> Env:
    """The environment that the questions of `data` are played in.

    Args:
        data: its `env` names the environment, its `system` is the system message.
        run_python: runs a program in a sandbox and returns what it printed (`resources.envs.sandbox`); called only when
            the policy may use Python.
    Raises:
        SpecError: no such environment, or options that it refuses; the message names both.
    """
    name, options = data.env.name, dict(data.env.options)
    if name == "single_turn":
        _refuse_unknown(name, options, ())
        return SingleTurn(data.system)
    if name == "tools":
        _refuse_unknown(name, options, ("max_turns", "tools"))
        return _tools(data.system, options, run_python)
    return _imported(name, data.system, options)


def _tools(system: str, options: dict[str, Any], run_python: RunPython) -> Env:
    turns, names = options.get("max_turns", 4), options.get("tools", "calculator,python")
    if type(turns) is not int or turns < 1:
        raise SpecError(f"data.env: max_turns={turns!r}; set the most replies of a conversation, at least 1")
    if type(names) is not str:
        raise SpecError(f"data.env: tools={names!r}; write their names with commas between, e.g. `calculator,python`")
    return Tools(system, toolbox(names, run_python), turns)


def _imported(name: str, system: str, options: dict[str, Any]) -> Env:
    module, _, attribute = name.partition(":")
    factory: Callable[..., Env] | None = None
    if attribute:
        try:
            factory = getattr(importlib.import_module(module), attribute, None)
        except ModuleNotFoundError as err:
            raise SpecError(f"data.env: {name!r} cannot be imported ({err}); install it or correct the name") from err
    if not callable(factory):
        raise SpecError(
            f"data.env: no environment {name!r}; set `single_turn`, `tools`, or module:factory of your own, which is "
            "called with the system message and the options"
        )
    try:
        return factory(system, **options)
    except TypeError as err:
        raise SpecError(f"data.env: {name} refuses the options {options} ({err}); correct them") from err


def _refuse_unknown(name: str, options: dict[str, Any], known: tuple[str, ...]) -> None:
    odd = sorted(options.keys() - set(known))
    if odd:
        raise SpecError(f"data.env: {name} has no option {odd[0]!r}; it takes {', '.join(known) or 'none'}")
