"""What can go wrong between host and chip, in one numbered table."""

from __future__ import annotations

import enum

from firmware_sim.errors import CallerError, DeviceError

__all__ = ["ChipFailure", "ErrorCode", "MailboxError"]


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
    BAD_CHECKPOINT = 113
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
