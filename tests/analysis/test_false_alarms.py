"""No detection without its false alarms: a walk over the JSON and the text of commands that print one.

The data of a report and of the explorer's page are walked too.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from analysis.cli import main
from analysis.demo import _detection
from analysis.explorer.answers import answers, defaults
from analysis.explorer.campaign_tables import precomputed
from analysis.explorer.runs import _verdict

DETECTIONS = {
    "detection", "caught", "found", "linked", "any", "accused", "predicted", "evaded", "escapes", "guaranteed_flop",
    "eq_1", "in_time", "miss", "unseen", "caught_half", "stretch", "predicted_probability", "chances", "violations",
    "per_year", "drawn", "lower_bound", "samples_needed", "band", "needed",
}  # fmt: skip
"""Keys that say how often a violation is seen or is not, or what it takes to see it with a wanted probability."""

COMMANDS = """\
samples --flop 1e25 --chips 1e6
samples --flop lognormal(1e25,5e25) --chips 1e6 --draws 500
table
curve stretch --out {out}
curve chips --out {out}
curve rate --out {out}
curve cost --out {out}
curve leakage --out {out}
curve samples --flop 1e25 --chips 100000 --mark 40 --out {out}
curve time --flop 1e25 --chips 100000 --out {out}
curve evasion --flop 1e25 --chips 100000 --out {out}
plan --flop 1e25 --site all=1e5 --periods 90
plan --flop 1e25 --site all=1e5 --refusals 0.001
plan --flop 1e25 --site all=1e5 --periods 90 --segments 100 --inspector-cost 3e5 --replay-price 1e-20
plan --flop lognormal(1e25,2e25) --site all=1e5 --periods 365 --evasion declared --draws 20
alarms --flop 2.56e24 --chips 1e5 --refusals 1e-4 --prior 0.05
odds --steps 1000
odds --steps 1000 --audited 1,2,30 --draw x
odds --steps 1000 --intervals
registry leakage --fleet 1e6 --diverted 100 --census 1000 --months 12 --confidence 0.9
campaign paper-table-1 --trials 20 --prior 0.1
campaign regimes --trials 20
evidence weigh --trials 100 --alarm tips
evidence site
evidence split --trials 100
evidence unmetered
""".splitlines()


def alone(value: Any, path: str = "", above: bool = False) -> Iterator[str]:
    """Return the detections that no false alarm stands beside, in their object or one around it."""
    if isinstance(value, list):
        for each in value:
            yield from alone(each, f"{path}[]", above)
    elif isinstance(value, dict):
        beside = above or _has(value)
        for key, each in value.items():
            if key in DETECTIONS and not beside and each is not None and not _has(each):
                yield f"{path}.{key}"
            yield from alone(each, f"{path}.{key}", beside)


def _has(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("false_alarm"), int | float)


@pytest.mark.parametrize("line", COMMANDS)
def test_each_detection_stands_with_its_false_alarms(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(line.format(out=tmp_path / "f.svg"))
    assert main([*words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert not set(alone(data))
    # The walk sees what it looks for: without false alarms it finds something, or the command draws the numbers.
    assert set(alone(_without(data))) or words[0] == "curve"
    assert _without(data) != data
    assert main(words) == 0
    text = capsys.readouterr().out.lower()
    said = ("honest", "by construction", "false alarm")
    assert any(each in text for each in said), text
    if data.get("false_alarm") == 0 and words[0] != "plan":  # which says how many it accuses at most
        assert "by construction" in text or "no honest lab is accused" in text


def test_the_explorers_campaigns_stand_with_their_false_alarms() -> None:
    data = precomputed(["evidence", "regimes"], trials=10, seed=0)
    assert not set(alone(data))
    assert set(alone(_without(data)))


def test_answers_verdicts_and_the_reports_data_stand_with_theirs() -> None:
    verdict = {"outcome": "ACCEPT", "evidence": {"chances": [{"lie": "swap-weights", "probability": 0.5}]}}
    for data in (answers(defaults()), _verdict(verdict, "id"), _detection()):
        assert not set(alone(data)), data
        assert set(alone(_without(data)))


def _without(value: Any) -> Any:
    if isinstance(value, list):
        return [_without(each) for each in value]
    if isinstance(value, dict):
        return {key: _without(each) for key, each in value.items() if key != "false_alarm"}
    return value
