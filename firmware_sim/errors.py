"""Errors, cut by who is to blame; the command line turns each branch into one exit code."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike

__all__ = [
    "CallerError",
    "ChipwitnessError",
    "Damaged",
    "DeviceError",
    "EvidenceError",
    "Unreadable",
    "file_error",
    "foreign",
    "is_about_name",
    "lacks_memory",
]

_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR})
_ABOUT_NAMES = _ABSENT | {
    errno.EEXIST, errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTEMPTY, errno.ENXIO, errno.EXDEV
}  # fmt: skip

_NO_MEMORY = ("memoryerror", "allocate memory", "out of memory", "outofmemory", "bad_alloc", "bad allocation")


class ChipwitnessError(Exception):
    """Root of every error that Chipwitness raises on purpose; its text is one clear line."""


class CallerError(ChipwitnessError):
    """The caller's flags, parameters or paths are wrong (exit code 2)."""


class EvidenceError(ChipwitnessError):
    """Evidence is malformed, missing, extra or altered: the lab's fault (exit code 1 of a command that judges)."""


class DeviceError(ChipwitnessError):
    """This machine, a device or a child process failed, so nothing could be concluded (exit code 3)."""


class Unreadable(DeviceError):
    """A file is there and may not be read here: it may be sound, and no party is to blame."""


class Damaged(Unreadable, EvidenceError):
    """A copy is not what was signed: it is no evidence, and no party is to blame for the damage.

    Attributes:
        found: what differs, and in which file.
    """

    def __init__(self, found: str) -> None:
        super().__init__(f"this copy is damaged: {found}; take another (`chipwitness run export`, then `run import`)")
        self.found = found


def is_about_name(error: OSError) -> bool:
    """Whether another path would help, and not another disk, user or machine."""
    return error.errno in _ABOUT_NAMES


def lacks_memory(text: str) -> bool:
    """Whether that is how Python, a library or a kernel says that there is not enough memory."""
    return any(words in text.lower() for words in _NO_MEMORY)


def file_error(text: str, error: OSError) -> CallerError | DeviceError:
    """What to raise where a file that the caller named cannot be read or written: is it the path, or this machine?

    Args:
        text: what could not be done to which file.
    """
    kind = CallerError if is_about_name(error) else DeviceError
    return kind(f"{text}: {error.strerror or error}")


@contextmanager
def foreign(name: str | PathLike[str], absent: type[EvidenceError] = EvidenceError) -> Iterator[None]:
    """Around an access to a file of somebody who is judged, and who is not to blame for this machine.

    Args:
        absent: what to raise where it is not there, or something else than a file is.

    Raises:
        EvidenceError: as ``absent`` says.
        Unreadable: it may not be read here, or its medium is broken.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _ABSENT:
            raise absent(f"{name} is missing") from None
        kind = absent if is_about_name(error) else Unreadable
        raise kind(f"cannot read {name}: {error.strerror or error}") from None
