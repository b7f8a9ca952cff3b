"""Which release this is."""

from __future__ import annotations

from importlib import metadata

__all__ = ["version"]


def version() -> str:
    """Return the installed release, or "unknown" where the package is used without being installed."""
    try:
        return metadata.version("chipwitness")
    except metadata.PackageNotFoundError:
        return "unknown"
