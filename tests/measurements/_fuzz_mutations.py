"""Mutations of JSON documents that keep them well-formed, for ``fuzz``: mutated bytes rarely are JSON."""

from __future__ import annotations

import json
import random
from typing import Any

from firmware_sim.evidence import canonical

__all__ = ["mutate_json"]

_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**53, 2**63 - 1, 2**64, 10**40, 10**400, 0.5, -0.0, 1e308, 1e-320,
    "", "a", "\n", "\u202e", "x" * 300, "0" * 64, "f" * 64, "1/0", "sha256:" + "0" * 64, [], {}, [[]], [0] * 40,
    [1 << 40] * 40, {"a": 0}, {"$tensor": 0}, {"$scalar": 0},
)  # fmt: skip


def mutate_json(data: bytes, rng: random.Random, most: int = 1 << 20) -> bytes:
    """Return the document's canonical encoding with one to three of its parts changed; ValueError if it is no JSON.

    A document that has grown beyond `most` bytes is not changed any further: parts that are repeated within repeated
    parts would fill the memory.
    """
    try:
        for _ in range(rng.randint(1, 3)):
            value = _mutated(canonical.loads(data), rng)
            data = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()
            if len(data) > most:
                break
        return data
    except RecursionError:
        raise ValueError("the document is nested too deeply") from None


def _mutated(value: Any, rng: random.Random) -> Any:
    """Walk down at random and change what is there."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.15:
        return _changed(value, rng)
    key = rng.choice(sorted(value)) if isinstance(value, dict) else rng.randrange(len(value))
    value[key] = _mutated(value[key], rng)
    return value


def _changed(value: Any, rng: random.Random) -> Any:
    if rng.random() < 0.4:
        return rng.choice(_VALUES)
    if isinstance(value, bool) or value is None:
        return rng.choice((True, False, None))
    if isinstance(value, int):
        return value + rng.choice((-1, 1, 7, 1 << 20, 1 << 63)) * rng.choice((1, -1))
    if isinstance(value, str):
        at = rng.randint(0, len(value))
        return value[:at] + rng.choice(("", "0", "/", ":", "é", "\x00", value)) + value[at + rng.randint(0, 3) :]
    if isinstance(value, list):
        return rng.choice((value * 2, value[1:], value[::-1], [*value, rng.choice(_VALUES)], value[:1] * 70))
    if isinstance(value, dict):
        kept = dict(value)
        if kept and rng.random() < 0.5:
            kept.pop(rng.choice(sorted(kept)))
        else:
            kept[rng.choice(("", "a", "dtype", "lr", "step", "é"))] = rng.choice(_VALUES)
        return kept
    return -value
