"""Foreign text as something that can be shown."""

from __future__ import annotations

import unicodedata

from firmware_sim import limits

__all__ = ["visible"]

_SHOWN_AS_IS = ("L", "M", "N", "P", "S")
"""Unicode's general categories of letters, marks, numbers, punctuation and symbols; controls and formats are others."""


def visible(text: object) -> str:
    """Return text as one line that can only be read: controls, line ends, overrides of direction and the like escaped.

    Everything that a command prints or puts on a page goes through here, since names come from evidence too.
    """
    line = str(text)
    if len(line) > limits.LINE_CHARACTERS.most:
        line = line[: limits.LINE_CHARACTERS.most] + "…"
    return "".join(
        each if each == " " or unicodedata.category(each).startswith(_SHOWN_AS_IS) else ascii(each)[1:-1]
        for each in line
    )
