"""Verifier-signed beacons, which tie a chip's ticks to the world's time."""

from __future__ import annotations

from dataclasses import dataclass

from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence.digest import Digest, digest_bytes
from firmware_sim.evidence.envelope import SigningKey, VerifyingKey, open_sealed, seal

__all__ = ["BEACON_PAYLOAD_TYPE", "Beacon", "beacon_digest", "open_beacon", "seal_beacon"]

BEACON_PAYLOAD_TYPE = "application/vnd.chipwitness.beacon+json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Beacon:
    """`time` in seconds since 1970, never falling; `number` counts the verifier's beacons."""

    time: int
    number: int

    def __post_init__(self) -> None:
        if not (0 <= self.time < 1 << 63 and 0 <= self.number < 1 << 63):
            raise CallerError("a beacon's time and number are in [0, 2^63)")


def seal_beacon(beacon: Beacon, key: SigningKey) -> bytes:
    return seal(BEACON_PAYLOAD_TYPE, {"number": beacon.number, "time": beacon.time}, key)


def open_beacon(data: bytes, key: VerifyingKey) -> Beacon:
    """Return the beacon that the verifier's `key` signed, or raise EvidenceError."""
    payload = open_sealed(data, BEACON_PAYLOAD_TYPE, key)
    if not isinstance(payload, dict) or set(payload) != {"number", "time"}:
        raise EvidenceError("malformed beacon")
    number, time = payload["number"], payload["time"]
    if type(number) is not int or type(time) is not int:
        raise EvidenceError("malformed beacon")
    try:
        return Beacon(time=time, number=number)
    except CallerError as error:
        raise EvidenceError(str(error)) from None


def beacon_digest(data: bytes) -> Digest:
    """Return what the chip's BEACON record holds for a sealed beacon."""
    return digest_bytes("beacon", data)
