"""When a chip takes snapshots: by one Bernoulli draw per tick, from a key that no one else holds yet.

Epoch n has the key PRF(secret, n); its commitment is logged when the epoch starts and the key is revealed only after
the epoch closed. Tick t of boot b, the time from t to t + 1 by the chip's own clock (`firmware_sim.roofline`), holds a
snapshot exactly if PRF(key, b, t) < ⌊rate · 2^256⌋, and then at t + PRF'(key, b, t) / 2^32: between the operator with
which the clock passes that moment and the next one. All in integers, so the inspector recomputes the same schedule. An
epoch that begins or ends within a tick holds the snapshots whose moments lie in it.

Shavit 2023 (App. B) lets snapshots be Poisson with f per chip-day. With n ticks a day and rate = f/n the number in a
day is Binomial(n, f/n), whose distance from Poisson(f) in total variation is at most f²/n (Le Cam), and the
probability of none in d days is (1 - f/n)^(n·d) ≤ e^(-f·d): never worse than the paper's.
"""

from __future__ import annotations

import hmac
import itertools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from firmware_sim import limits
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import canonical
from firmware_sim.evidence.digest import Digest, digest_bytes, length_prefixed
from firmware_sim.evidence.work import TICK

__all__ = [
    "EpochKey",
    "ScheduleError",
    "Unaudited",
    "commit_epoch",
    "decode_epoch_keys",
    "derive_epoch_key",
    "encode_epoch_keys",
    "is_scheduled",
    "moment_of",
    "rate_per_tick",
    "scheduled",
    "threshold",
]

_PRF_BITS = 256
_KEY_BYTES = 32
_TICK_LABEL = b"chipwitness/snapshot-tick/2"
_MOMENT_LABEL = b"chipwitness/snapshot-moment/2"
_EPOCH_LABEL = b"chipwitness/epoch-key/1"


class ScheduleError(EvidenceError):
    """Snapshots are missing or extra, or an epoch key does not open its commitment."""


class Unaudited(ScheduleError):
    """A log holds more ticks than an audit looks at: nothing is known against the chip, and nothing for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochKey:
    """The revealed key of a closed epoch."""

    epoch: int
    key: bytes

    def __post_init__(self) -> None:
        if self.epoch < 0 or len(self.key) != _KEY_BYTES:
            raise CallerError("an epoch key must have 32 bytes and a number of at least 0")


def rate_per_tick(snapshots_per_day: Fraction, ticks_per_day: int) -> Fraction:
    """Return the rate (snapshots per tick) for f snapshots per chip-day."""
    if ticks_per_day < 1 or not 0 <= snapshots_per_day <= ticks_per_day:
        raise CallerError("a schedule needs at least one tick a day, and no more snapshots than ticks")
    return snapshots_per_day / ticks_per_day


def threshold(rate: Fraction) -> int:
    """Return ⌊rate · 2^256⌋ for a rate in [0, 1]."""
    if not 0 <= rate <= 1:
        raise CallerError(f"snapshot rate {rate} is not between 0 and 1")
    return (rate.numerator << _PRF_BITS) // rate.denominator


def derive_epoch_key(secret: bytes, epoch: int) -> bytes:
    return hmac.digest(secret, _EPOCH_LABEL + struct.pack(">Q", epoch), "sha256")


def commit_epoch(chip_id: str, epoch: int, key: bytes) -> Digest:
    """Return the commitment to an epoch's key, bound to the chip and the epoch's number."""
    return digest_bytes("epoch-commitment", length_prefixed(chip_id, struct.pack(">Q", epoch), key))


def is_scheduled(key: bytes, boot: int, tick: int, limit: int) -> bool:
    """Say whether the tick holds a snapshot; `limit` is `threshold(rate)`."""
    draw = hmac.digest(key, _TICK_LABEL + struct.pack(">IQ", boot, tick), "sha256")
    return int.from_bytes(draw, "big") < limit


def moment_of(key: bytes, boot: int, tick: int) -> int:
    """The moment within a tick at which its snapshot falls, if it holds one: a time in 2^-32 ticks, uniform."""
    draw = hmac.digest(key, _MOMENT_LABEL + struct.pack(">IQ", boot, tick), "sha256")
    return tick * TICK + int.from_bytes(draw[:4], "big")


def scheduled(key: bytes, boot: int, start: int, end: int, limit: int) -> Iterator[int]:
    """Yield the moments in (start, end] of an epoch at which a snapshot falls; `limit` is `threshold(rate)`.

    Times are in 2^-32 ticks.
    """
    for tick in range(start // TICK, end // TICK + 1):
        if is_scheduled(key, boot, tick, limit) and start < (moment := moment_of(key, boot, tick)) <= end:
            yield moment


def encode_epoch_keys(keys: Sequence[EpochKey]) -> bytes:
    """Return the keys as canonical JSON, in the order of their epochs."""
    ordered = sorted(keys, key=lambda key: key.epoch)
    return canonical.encode([{"epoch": key.epoch, "key": key.key.hex()} for key in ordered])


def decode_epoch_keys(data: bytes) -> tuple[EpochKey, ...]:
    """Return the keys that `encode_epoch_keys` wrote.

    Raises:
        EvidenceError: malformed, out of order, or an epoch twice.
    """
    lines = canonical.decode(data, most=limits.EPOCH_KEYS_BYTES)
    if not isinstance(lines, list):
        raise EvidenceError("epoch keys are not a list")
    limits.EPOCH_KEYS.check(len(lines))
    keys = tuple(_decode_key(line) for line in lines)
    if any(following.epoch <= key.epoch for key, following in itertools.pairwise(keys)):
        raise EvidenceError("epoch keys are out of order or name an epoch twice")
    return keys


def _decode_key(line: object) -> EpochKey:
    if not isinstance(line, dict) or set(line) != {"epoch", "key"}:
        raise EvidenceError("malformed epoch key")
    epoch, text = line["epoch"], line["key"]
    if type(epoch) is not int or not 0 <= epoch < 1 << 64 or not isinstance(text, str) or len(text) != 2 * _KEY_BYTES:
        raise EvidenceError("malformed epoch key")
    try:
        key = bytes.fromhex(text)
    except ValueError:
        raise EvidenceError("malformed epoch key") from None
    if key.hex() != text:
        raise EvidenceError("malformed epoch key")
    return EpochKey(epoch=epoch, key=key)
