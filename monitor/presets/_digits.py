"""scikit-learn's handwritten digits, read from its file: the library itself takes a second to import."""

from __future__ import annotations

import gzip
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from firmware_sim.errors import CallerError, file_error
from monitor.presets._preset import Samples

__all__ = ["digits"]


@cache
def digits() -> Samples:
    """1,797 images: {"pixels": uint8 [n, 8, 8] with values 0…16, "label": uint8 [n]}; parsed once per process.

    Raises:
        CallerError: scikit-learn is not installed, or keeps its digits elsewhere.
    """
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise CallerError("the handwritten digits come with scikit-learn, which is not installed")
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    try:
        with gzip.open(path, "rt", encoding="ascii") as file:
            rows = np.loadtxt(file, delimiter=",").astype(np.uint8)
    except OSError as error:
        raise file_error(f"cannot read scikit-learn's digits from {path}", error) from None
    return {"pixels": rows[:, :-1].reshape(-1, 8, 8), "label": rows[:, -1]}
