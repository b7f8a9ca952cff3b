"""How much of a chip's evidence is looked at before anybody has vouched for the chip."""

from __future__ import annotations

from firmware_sim import RECORD_BYTES, limits
from firmware_sim.checks import ChipTrust
from firmware_sim.errors import EvidenceError
from firmware_sim.identity import ChipIdentity

__all__ = ["admitted"]


def admitted(log: bytes, identity: ChipIdentity, trust: ChipTrust, *, chip: str) -> bytes:
    """Return a chip's log, if its maker is trusted or it is short; EvidenceError otherwise.

    What a maker's chip has logged is bounded by its firmware; a chip that was made up can have any log.
    """
    records = len(log) // RECORD_BYTES
    if identity.maker_digest not in trust.ca_digests and records > limits.STRANGE_LOG_RECORDS.most:
        raise EvidenceError(
            f"chip {chip}: no trusted maker vouches for it, and its log of {records} records is longer than such a "
            "chip may have"
        )
    return log
