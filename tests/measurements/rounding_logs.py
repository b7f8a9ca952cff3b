"""``bench rounding_logs``: bytes of one step's rounding log under each error bound, beside its entropy.

The entropy is that of positions drawn at random among the elements of each operator, plus one bit a direction. The
published code spends 1.6 bits on every element that is rounded.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from analysis.bench.published_scheme import encode_dense
from monitor.numerics import recording
from monitor.numerics.rounding import codec
from monitor.numerics.rounding.bounds import BOUNDS, Formats, bound_named
from monitor.presets import preset
from monitor.presets.task import Task
from monitor.replay.derivation import DerivedSteps
from monitor.transcript import to_batch

__all__ = ["PRESETS_MEASURED", "log_rows", "run"]

PRESETS_MEASURED = ("tiny-gpt", "digits-cnn", "resnet50-cifar")


def log_rows(name: str) -> list[dict[str, Any]]:
    """One row for each bound; ratio is that of the log to its entropy."""
    entry = preset(name)
    batch = to_batch(entry.samples(None), np.arange(entry.batch_size))
    task = Task.for_preset(name, seed=1, steps=1)
    rows = []
    for kind in BOUNDS:
        bound = bound_named(kind)
        steps = DerivedSteps(task)
        started = time.perf_counter()
        session, _ = steps.take_under(partial(recording, "rounded", bound=bound), batch=batch)
        seen = session.statistics
        groups = len(codec.decode(session.log, Formats(), bound))
        entropy = seen.entropy_bits / 8
        rows.append(
            {
                "work": f"log of {name}, batch {entry.batch_size}",
                "mode": kind,
                "seconds": time.perf_counter() - started,
                "ratio": len(session.log) / entropy if entropy else None,
                "log_bytes": len(session.log),
                "entropy_bytes": round(entropy),
                "allowed_bytes": round(1.2 * entropy) + 16 * groups,
                "non_empty_operators": groups,
                "entries": seen.entries,
                "elements": seen.elements,
                "published_code_bytes": len(encode_dense(np.zeros(seen.elements, dtype=np.uint8))),
            }
        )
    return rows


def run(presets: Sequence[str] = PRESETS_MEASURED) -> list[dict[str, Any]]:
    """The logs of a step of each preset."""
    return [row for name in presets for row in log_rows(name)]
