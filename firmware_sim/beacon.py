"""Beacons: the verifier's signed time, for one chip at one place of its log.

A verifier that remembers each chip's position when it last issued one finds a chip that was put back to a copy: its
log would have to grow once more from where it has been.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence.digest import Digest, digest_bytes
from firmware_sim.evidence.envelope import SigningKey, VerifyingKey, open_sealed, seal

__all__ = ["BEACON_PAYLOAD_TYPE", "Beacon", "BeaconIssuer", "beacon_digest", "open_beacon", "seal_beacon"]

BEACON_PAYLOAD_TYPE = "application/vnd.chipwitness.beacon+json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Beacon:
    """`time` in seconds since 1970, for the chip `chip_id` whose log holds `size` records in its boot `boot`."""

    chip_id: str
    boot: int
    size: int
    time: int

    def __post_init__(self) -> None:
        numbers = (self.boot, self.size, self.time)
        if type(self.chip_id) is not str or any(type(number) is not int for number in numbers):
            raise CallerError("a beacon's chip must be a string, and its boot, size and time must be integers")
        if not all(0 <= number < 1 << 63 for number in numbers):
            raise CallerError("a beacon's boot, size and time must be in [0, 2^63)")


def seal_beacon(beacon: Beacon, key: SigningKey) -> bytes:
    return seal(BEACON_PAYLOAD_TYPE, asdict(beacon), key)


def open_beacon(data: bytes, key: VerifyingKey) -> Beacon:
    """Return the beacon that the verifier's `key` signed, or raise EvidenceError."""
    payload = open_sealed(data, BEACON_PAYLOAD_TYPE, key)
    if not isinstance(payload, dict) or set(payload) != {field.name for field in fields(Beacon)}:
        raise EvidenceError("malformed beacon")
    try:
        return Beacon(**payload)
    except CallerError as error:
        raise EvidenceError(str(error)) from None


def beacon_digest(data: bytes) -> Digest:
    """Return what the chip's BEACON record holds for a sealed beacon."""
    return digest_bytes("beacon", data)


class BeaconIssuer:
    """Issues beacons, each for a chip that has gone on since its last one.

    Args:
        key: the verifier's, which is fused into the chips.
        last: the newest beacon of each chip, where any were issued before.
    """

    def __init__(self, key: SigningKey, last: dict[str, Beacon]) -> None:
        self._key = key
        self.last = last

    def issue(self, chip_id: str, position: tuple[int, int], time: int) -> bytes:
        """Return the sealed beacon for a chip that reports its position as (boot, records).

        Raises:
            EvidenceError: it was there, or further, when it got its last one; or time has not gone on.
        """
        boot, size = position
        last = self.last.get(chip_id)
        if last is not None and not (size > last.size and boot >= last.boot):
            raise EvidenceError(
                f"chip {chip_id}: reports boot {boot} with {size} records, but its last beacon was for boot "
                f"{last.boot} with {last.size}: it was put back to an earlier state, or two copies of it exist"
            )
        if last is not None and time <= last.time:
            raise EvidenceError(
                f"chip {chip_id}: a beacon of time {time} is not later than its last one, of time {last.time}"
            )
        self.last[chip_id] = beacon = Beacon(chip_id=chip_id, boot=boot, size=size, time=time)
        return seal_beacon(beacon, self._key)
