"""What can go wrong between host and chip, in one numbered table, and how many records of each kind a chip keeps."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType

from firmware_sim.errors import CallerError, DeviceError
from firmware_sim.evidence.chiplog import RecordKind

__all__ = ["DEFAULT_QUOTAS", "ChipFailure", "ErrorCode", "MailboxError", "checked_quotas"]


class ErrorCode(enum.IntEnum):
    """Codes of the mailbox; 1xx are the host's mistakes, 2xx the chip's condition."""

    BAD_ARGUMENT = 101
    QUOTA_EXCEEDED = 102
    NO_BEACON_KEY = 103
    BAD_BEACON = 104
    FIRMWARE_ROLLBACK = 105
    POWERED_OFF = 106
    ALREADY_POWERED = 107
    ALREADY_MANUFACTURED = 108
    BUSY = 109
    FOREIGN_PROCESS = 110
    FIRMWARE_UNSIGNED = 111
    CHIP_SPENT = 112
    SELF_TEST_FAILED = 201
    STORAGE_FAILED = 202
    LOG_FULL = 203


class MailboxError(CallerError):
    """The chip refuses a command; nothing changed."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(f"{message} (mailbox error {code.value}, {code.name})")
        self.code = code


class ChipFailure(DeviceError):
    """The chip can't go on: self-test, storage or log capacity."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(f"{message} (mailbox error {code.value}, {code.name})")
        self.code = code


DEFAULT_QUOTAS: Mapping[RecordKind, int] = MappingProxyType(
    {
        RecordKind.GENESIS: 1,
        RecordKind.BOOT: 1 << 16,
        RecordKind.EPOCH: 1 << 17,
        RecordKind.CLOSE_EPOCH: 1 << 17,
        RecordKind.POWER_OFF: 1 << 16,
        RecordKind.POWER_GAP: 1 << 16,
        RecordKind.REGIONS: 1 << 16,
        RecordKind.COMMIT: 1 << 20,
        RecordKind.SNAPSHOT: 1 << 20,
        RecordKind.BEACON: 1 << 16,
        RecordKind.QUOTE: 1 << 16,
        RecordKind.SPENT: 1,
    }
)


def checked_quotas(overrides: Mapping[RecordKind, int]) -> dict[RecordKind, int]:
    """Return the default quotas with `overrides`; each kind has its own space, so none can crowd out another."""
    if any(type(count) is not int or not 1 <= count < 1 << 32 for count in overrides.values()):
        raise CallerError("a quota is at least 1 and below 2^32")
    return {**DEFAULT_QUOTAS, **overrides}
