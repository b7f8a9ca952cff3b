"""The digits are scikit-learn's, without the library."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from firmware_sim.errors import CallerError
from monitor.presets import _digits
from monitor.presets._digits import digits


def test_they_are_what_the_library_loads():
    from sklearn.datasets import load_digits

    theirs, mine = load_digits(), digits()
    assert mine["pixels"].dtype == mine["label"].dtype == np.uint8
    assert np.array_equal(mine["pixels"], theirs.images)
    assert np.array_equal(mine["label"], theirs.target)


def test_the_library_is_not_imported():
    words = "import sys; from monitor.presets import preset; preset('digits-cnn').samples(None)"
    done = subprocess.run([sys.executable, "-c", f"{words}; sys.exit('sklearn' in sys.modules)"], check=False)
    assert done.returncode == 0


def test_without_the_library_there_is_one_clear_line(monkeypatch, tmp_path):
    monkeypatch.setattr(_digits, "find_spec", lambda name: None)
    with pytest.raises(CallerError, match="scikit-learn, which is not installed"):
        digits.__wrapped__()
    (tmp_path / "__init__.py").touch()
    found = type("Spec", (), {"origin": str(tmp_path / "__init__.py")})
    monkeypatch.setattr(_digits, "find_spec", lambda name: found)
    with pytest.raises(CallerError, match="cannot read scikit-learn's digits"):
        digits.__wrapped__()
