"""Settings of an inspection, as an inspectorate signs them: read in one form only."""

from __future__ import annotations

from typing import Any

import pytest

from firmware_sim.errors import EvidenceError
from inspector.bundle.builder import settings_json
from inspector.bundle.redraw import settings_from
from inspector.inspection.guards import Sampling, Settings
from inspector.probability.odds import Violation
from tests.documents import changed, places

_SAMPLING = Sampling(confidence=0.5, against=Violation.parse("together:3"))
_WHOLE = Settings(samples=2, seed=None, devices=("sse41", "avx2"), segments=3, shared=0.25, sampling=_SAMPLING)
_OTHERS: tuple[Any, ...] = (True, False, -1, 1.5, -0.5, "", "x", [], {}, [[]], 2**70, KeyError)
_TAKEN: dict[str, tuple[Any, ...]] = {
    "samples": (2**70,),
    "segments": (2**70,),
    "devices": ([],),
    "devices.0": ("", "x"),
    "devices.1": ("", "x"),
}


@pytest.mark.parametrize("settings", [_WHOLE, Settings(samples=1, seed=None, devices=())])
def test_settings_are_read_as_they_were_written(settings: Settings) -> None:
    assert settings_from(settings_json(settings)) == settings


@pytest.mark.parametrize("place", list(places(settings_json(_WHOLE))), ids=str)
def test_settings_of_another_form_are_refused(place: tuple[Any, ...]) -> None:
    """A lab opens what they draw, and a bundle shows what they drew; there are no 2.5 chips, and no -1 segments."""
    written = settings_json(_WHOLE)
    for value in _OTHERS:
        if value in _TAKEN.get(".".join(map(str, place)), ()):
            assert settings_from(changed(written, place, value))
        elif value is not KeyError or place[-1] not in (0, 1):
            with pytest.raises(EvidenceError, match=r"settings of the inspection|is not a violation"):
                settings_from(changed(written, place, value))


@pytest.mark.parametrize(("key", "value"), [("confidence", None), ("against", None), ("confidence", 1.0)])
def test_a_confidence_and_what_it_is_against_belong_together(key: str, value: object) -> None:
    with pytest.raises(EvidenceError, match="settings of the inspection"):
        settings_from({**settings_json(_WHOLE), key: value})
