"""What a command answers: a frozen dataclass or a typed dictionary, which ``--json`` prints and the help documents."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import groupby
from typing import Any, get_args, get_origin, get_type_hints, is_typeddict

__all__ = ["fields_of", "json_fields", "keys_text"]

_ENTRY = re.compile(r"^    (\w[\w, ]*): (.*)$")


def fields_of(answer: Any) -> dict[str, Any]:
    """Return the fields of an answer, or of a part of one, by name; TypeError if it is no dataclass."""
    return {field.name: getattr(answer, field.name) for field in fields(answer)}


def json_fields(answer: Any) -> dict[str, Any]:
    """Return the fields as JSON has them: a number that is not finite is null."""
    found = fields_of(answer)
    return {key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in found.items()}


def keys_text(answer: type, lead: str = "JSON keys") -> str:
    """Return what help says of ``--json``: every key of an answer, and of its parts, with what its docstring says."""
    return "\n".join(_sentences(answer, lead, "", set()))


def _sentences(answer: type, lead: str, within: str, shown: set[type]) -> Iterator[str]:
    shown.add(answer)
    texts, hints = _documented(answer), get_type_hints(answer)
    names = list(hints) if is_typeddict(answer) else [field.name for field in fields(answer)]
    groups = [(text, " and ".join(same)) for text, same in groupby(names, lambda name: texts.get(name, name))]
    yield f"{lead}: {', '.join(same if same == text else f'{same} ({text})' for text, same in groups)}."
    for name in names:
        for part, which in _parts(hints[name]):
            if part not in shown:
                yield from _sentences(part, f"{which} of {name}{within}", f" in {name}", shown)


def _parts(hint: Any, which: str = "Keys") -> Iterator[tuple[type, str]]:
    """The dataclasses, and types of JSON objects, that a field's type names, and whether it holds one or several."""
    if is_typeddict(hint) or (is_dataclass(hint) and isinstance(hint, type)):
        yield hint, which
    several = isinstance(origin := get_origin(hint), type) and issubclass(origin, Sequence | Mapping)
    for inner in get_args(hint):
        yield from _parts(inner, "Each" if several else which)


def _documented(answer: type) -> dict[str, str]:
    """What the section ``Attributes`` of a docstring says of each name; what is None there is null in JSON."""
    found = {name: text for base in answer.__bases__ if is_dataclass(base) for name, text in _documented(base).items()}
    names: list[str] = []
    _, _, section = re.sub(r"\b(None|NaN)\b", "null", inspect.getdoc(answer) or "").partition("Attributes:\n")
    for line in section.splitlines():
        if entry := _ENTRY.match(line):
            names = entry[1].split(", ")
            found |= dict.fromkeys(names, entry[2].rstrip("."))
        elif line.strip():
            found |= {name: f"{found[name]} {line.strip()}".rstrip(".") for name in names}
    return found
