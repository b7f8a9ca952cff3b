"""How many files of the product a step and an inspection enter: a reader has to hold them in their head."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("firmware_sim", "monitor", "inspector", "analysis")
NUMERICS = "monitor/numerics/"


@contextmanager
def entered() -> Iterator[set[str]]:
    """Files of the product in which a function begins, those of the numerics left out."""
    found: set[str] = set()

    def enter(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            found.add(frame.f_code.co_filename)

    before = sys.getprofile()
    threading.setprofile(enter)
    sys.setprofile(enter)
    try:
        yield found
    finally:
        sys.setprofile(before)
        threading.setprofile(before)
        inside = {str(Path(each).relative_to(ROOT)) for each in found if Path(each).is_relative_to(ROOT)}
        found.clear()
        found |= {each for each in inside if each.startswith(PRODUCT) and not each.startswith(NUMERICS)}


def test_a_recorded_step_enters_few_files(tmp_path):
    import torch

    from monitor import Recorder

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(model, optimizer, out=tmp_path / "run", lab="lab", chips=2, seed=1)
    batch = {"x": torch.randn(4, 8), "y": torch.tensor([0, 1, 0, 1])}

    def step() -> None:
        with recorder.step(batch):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"]).backward()
            optimizer.step()

    step()
    with entered() as files:
        step()
    recorder.finish()
    print("\n".join(sorted(files)))
    assert 10 < len(files) <= 75


def test_an_inspection_enters_few_files(honest, devices):
    from inspector.inspection.guards import Settings
    from inspector.inspection.inspection import inspect

    settings = Settings(samples=3, seed="x", devices=("sse41",))
    with entered() as files:
        inspect([honest.run], honest.trust, settings, now=honest.now, worker=devices.run)
    print("\n".join(sorted(files)))
    assert 10 < len(files) <= 116
