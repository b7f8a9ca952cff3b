"""Fine-tuning, in full, by adapters and by preferences, is recorded and accepted on devices that differ."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from importlib.util import find_spec

import pytest

from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.transcripts import open_run
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome

if not all(map(find_spec, ("transformers", "accelerate"))):  # an import takes seconds, which each process would spend
    pytest.skip("an optional package is not installed", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("kind", ["full", "adapters", "preference"])
def test_fine_tuning_is_accepted(tmp_path, devices, kind):
    from tests.monitor.adapters.tuning import WORDS, tune

    out = tmp_path / kind
    made = tune(kind, out)
    assert len(made.entropies) == 3
    assert made.entropies == pytest.approx([math.log(WORDS)] * 3, rel=0.01)
    trust = Trust.load([out.with_name(f"{kind}.trust.json")], [out])
    settings = Settings(samples=2, seed="x", devices=("sse41", "mkl-compatible"))
    verdict = inspect([out], trust, settings, now=datetime.now(UTC), worker=devices.run)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    held = {entry.name for entry in open_run(out, trust).declared.state if entry.kind == "buffer"}
    assert made.model is not None
    weights = {f"reference.{name}" for name, _ in made.model.named_parameters()} if made.reference else set()
    assert {name for name in held if name.startswith("reference.")} >= weights
    assert not (out / "constants").exists()  # no weights of a reference in each program
