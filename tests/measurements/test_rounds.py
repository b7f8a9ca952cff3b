"""``rounds``: what it predicts, and that it tells where that was not measured."""

from __future__ import annotations

import pytest

from firmware_sim.errors import CallerError
from tests.guards import off
from tests.measurements import rounds

pytestmark = pytest.mark.usefixtures("kept_devices")


def test_a_prediction_that_was_not_met_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"always": (lambda scene: True, lambda: 1.0), "never": (lambda scene: False, lambda: 0.5)}
    monkeypatch.setattr(rounds, "LIES", told)
    rows = rounds.run(trials=40)
    assert [(row["trials"], row["caught"], row["agrees"]) for row in rows] == [(20, 20, True), (40, 0, False)]
    assert rounds.verdict(rows) == "caught otherwise than predicted: never (0 of 40)"
    assert rounds.verdict(rows[:1]) is None
    assert len(rounds.table(rows)) == 4
    with pytest.raises(CallerError, match="no measurement of a lie"):
        rounds.run(lies=["white"])


def test_what_is_predicted() -> None:
    predicted = {name: prediction() for name, (_, prediction) in rounds.LIES.items()}
    assert {name: each for name, each in predicted.items() if each < 1} == {
        "declares-nothing": pytest.approx(1 / 2),
        "grinds-its-root": pytest.approx(1 / 2),
        "swaps-weights-where-no-snapshot-is": pytest.approx(3 / 5),
    }


def test_a_secret_that_can_be_guessed_is_ground_against() -> None:
    """Of chips that a partner has trained in secret half are drawn; none is where the lab knows the secret."""
    with off("secret nobody can guess"):
        (row,) = rounds.run(trials=4, lies=["grinds-its-root"])
    assert row["caught"] == 0


def test_a_fork_at_a_resume_is_caught() -> None:
    """What happens with the guards off is shown among the attacks of law 3."""
    (row,) = rounds.run(trials=1, lies=["forks-at-a-resume"])
    assert (row["caught"], row["agrees"]) == (1, True)


def test_a_lie_in_one_world() -> None:
    (row,) = rounds.run(trials=1, lies=["sells-one-chip-twice"])
    assert (row["caught"], row["agrees"]) == (1, True)
