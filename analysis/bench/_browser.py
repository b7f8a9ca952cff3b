"""Chromium, driven by playwright, for what only a browser can tell."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from firmware_sim.errors import CallerError

if TYPE_CHECKING:
    from playwright.sync_api import Browser

__all__ = ["browser", "missing"]


def missing() -> str | None:
    """Return what is not there of Chromium and the package playwright; None where both are."""
    import importlib.util

    if importlib.util.find_spec("playwright") is None:
        return "the package playwright is not installed (pip install -e '.[browser]')"
    return None if shutil.which("chromium") else "chromium is not installed"


@contextmanager
def browser() -> Iterator[Browser]:
    """Yield a headless Chromium.

    Raises:
        CallerError: something is ``missing``.
    """
    absent = missing()
    if absent is not None:
        raise CallerError(absent)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as tools:
        # Without its sandbox, since containers run as root; only pages of our own are opened.
        found = tools.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        try:
            yield found
        finally:
            found.close()
