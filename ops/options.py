"""Settings that a spec passes on as they are, checked against the dataclass that takes them."""

from __future__ import annotations

import difflib
from dataclasses import fields
from typing import Any, TypeVar, get_type_hints

from furlong.ops.spec import Options, SpecError

T = TypeVar("T")


def chosen(where: str, kind: type[T], options: Options) -> T:
    """`kind(**options)`, a frozen dataclass of plain numbers, strings and flags.

    Args:
        where: the spec's field, for the error.
    Raises:
        SpecError: an unknown name, with the nearest known one, or a value of another type.
    """
    hints: dict[str, Any] = get_type_hints(kind)
    known = {field.name: hints[field.name] for field in fields(kind)}  # type: ignore[arg-type]
    for name, value in options.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            advice = f"did you mean {near[0]!r}?" if near else f"use {', '.join(known)}"
            raise SpecError(f"{where}: unknown setting {name!r}; {advice}")
        wanted = (int, float) if known[name] is float else (known[name],)
        if not isinstance(value, wanted) or (isinstance(value, bool) and known[name] is not bool):
            raise SpecError(f"{where}.{name}: {value!r} is no {known[name].__name__}; give one")
    return kind(**options)
