"""Errors of the chip-owner directory; each names the chip, party or record that it is about."""

from __future__ import annotations

from firmware_sim.errors import CallerError, DeviceError, EvidenceError

__all__ = [
    "ForgedStatement",
    "ImportRejected",
    "InvalidStatement",
    "RegistryMisuse",
    "RegistryUnavailable",
    "StatementOutOfOrder",
    "StatementRefused",
    "StatementReplayed",
    "UnknownChip",
    "UnknownParty",
]


class StatementRefused(EvidenceError):
    """A statement about chips was not accepted; the directory is unchanged."""


class InvalidStatement(StatementRefused):
    """The statement is malformed, for another registry, or not allowed in the chip's state."""


class ForgedStatement(StatementRefused):
    """A signature is missing, broken, or by a key other than the one enrolled for the party that must sign."""


class StatementReplayed(StatementRefused):
    """The statement's sequence number was used before."""


class StatementOutOfOrder(StatementRefused):
    """The statement skips sequence numbers, or lies before the chip's last record in time."""


class UnknownChip(StatementRefused):
    """The chip has no genesis record."""


class UnknownParty(StatementRefused):
    """The party is not enrolled, or not in the role that the statement needs."""


class ImportRejected(StatementRefused):
    """A file of chips or answers has a fault; the message gives file and line."""


class RegistryUnavailable(DeviceError):
    """The database cannot be reached, stayed locked, or broke."""


class RegistryMisuse(CallerError):
    """The caller named a registry that is not there, or one that already is."""
