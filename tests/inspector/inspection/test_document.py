"""The evidence of verdicts has the keys and the types that its form states, and no others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

import pytest

from inspector.inspection.document import Evidence, VerifiedRun
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect, verify
from inspector.inspection.sources import Past
from tests.conftest import Recorded


def required(hint: Any) -> set[str]:
    """Keys that an object of this type must have; annotations that are text hide from Python which are optional."""
    kinds = get_type_hints(hint, include_extras=True)
    return {name for name in hint.__required_keys__ if get_origin(kinds[name]) is not NotRequired}


def departures(value: object, hint: Any, place: str = "evidence") -> list[str]:
    """Where a JSON value is not of a type, in words."""
    origin = get_origin(hint)
    if hint is Any:
        return []
    if origin in (Union, UnionType):
        found = [departures(value, each, place) for each in get_args(hint)]
        return [] if [] in found else min(found, key=len)
    if is_typeddict(hint):
        if not isinstance(value, Mapping):
            return [f"{place} is {value!r:.40}"]
        hints = get_type_hints(hint)
        missing = [f"{place} lacks {key}" for key in sorted(required(hint) - set(value))]
        extra = [f"{place} has {key}" for key in sorted(set(value) - set(hints))]
        for key in sorted(set(value) & set(hints)):
            extra += departures(value[key], hints[key], f"{place}.{key}")
        return [*missing, *extra]
    if origin is not None and issubclass(origin, Mapping):
        items = value.items() if isinstance(value, Mapping) else [("", value)]
        wrong = [] if isinstance(value, Mapping) else [f"{place} is {value!r:.40}"]
        return wrong or [each for key, one in items for each in departures(one, get_args(hint)[1], f"{place}.{key}")]
    if origin is not None and issubclass(origin, Sequence):
        if not isinstance(value, list | tuple):
            return [f"{place} is {value!r:.40}"]
        return [each for one in value for each in departures(one, get_args(hint)[0], f"{place}[]")]
    allowed = (int, float) if hint is float else NoneType if hint is None else hint
    fits = isinstance(value, allowed) and (hint is bool or not isinstance(value, bool))
    return [] if fits else [f"{place} is {value!r:.40}, not {hint}"]


def test_the_check_sees_missing_extra_and_other_values() -> None:
    assert departures({"drawn_chips": ["a"], "labs": {}}, Evidence) == []
    assert departures({"drawn_chips": [1]}, Evidence) == ["evidence.drawn_chips[] is 1, not <class 'str'>"]
    assert departures({"unheard": 1}, Evidence) == ["evidence has unheard"]
    assert departures({"repeats": {"snapshots": 1}}, Evidence) == ["evidence.repeats lacks escapes"]
    assert departures({"registered_chips": True}, Evidence) != []


@pytest.mark.parametrize("every", [False, True])
def test_an_inspection(honest: Recorded, every: bool) -> None:
    labs = tuple(honest.trust.labs) if every else None
    settings = Settings(samples=2, seed="s", devices=("sse41",), labs=labs)
    past = Past(memory={}) if every else Past()
    verdict = inspect([honest.run], honest.trust, settings, now=honest.late, past=past)
    assert departures(verdict.evidence, Evidence) == []
    assert {"odds", "replays", "chips", "ledger", "draws", "chances"} <= set(verdict.evidence)


def test_a_run_that_is_verified(honest: Recorded) -> None:
    verdict = verify(honest.run, honest.trust, now=honest.late)
    assert departures(verdict.evidence, VerifiedRun) == []
