"""Has another conduct tell a lie of a lab."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from monitor.lab.conduct import Conduct
from monitor.lab.lies import LAB_LIES


def tell_with(monkeypatch: pytest.MonkeyPatch, name: str, conduct: Callable[[int], Conduct]) -> None:
    """Until the test ends, `conduct` tells the lie of that name."""
    monkeypatch.setitem(LAB_LIES, name, replace(LAB_LIES[name], conduct=conduct))


def at_operator(conduct: Any, index: int) -> Callable[[int], Conduct]:
    """The conduct of a lie about one operator, given its step."""
    return lambda step: conduct(step, index)
