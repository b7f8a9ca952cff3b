"""Errors, cut by who is to blame; the command line turns each branch into one exit code."""

__all__ = ["CallerError", "ChipwitnessError", "DeviceError", "EvidenceError"]


class ChipwitnessError(Exception):
    """Root of every error that Chipwitness raises on purpose; its text is one clear line."""


class CallerError(ChipwitnessError):
    """The caller's flags, parameters or paths are wrong (exit code 2)."""


class EvidenceError(ChipwitnessError):
    """Evidence is malformed, missing, extra or altered: the lab's fault (exit code 1)."""


class DeviceError(ChipwitnessError):
    """A device or a child process broke, so nothing could be concluded (exit code 3)."""
