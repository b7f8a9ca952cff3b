"""``bench equality``: the command on a tiny setting, resuming, and what its table claims."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analysis.bench import equality
from analysis.cli import main
from firmware_sim.errors import CallerError, DeviceError

DEVICES = ("native-1", "emulated-tensor-core")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a table with two devices and CUDA."""
    out = tmp_path_factory.mktemp("equality") / "table.json"
    equality.run(presets=["digits-cnn"], steps=2, devices=(*DEVICES, equality.CUDA), out=out)
    return out


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = equality.load(path)["rows"]
    return rows


def test_controlled_modes_end_alike_and_native_ones_do_not(made: Path) -> None:
    rows = rows_of(made)
    found = equality.counts(rows)
    on = len({row["device"] for row in rows if row["status"] == "run"})
    assert on >= len(DEVICES)
    assert found["digits-cnn", "exact"] == found["digits-cnn", "rounded"] == (on, 1)
    assert found["digits-cnn", "native"] == (on, on)
    assert equality.verdict(rows) is None
    rounded = [row for row in rows if row["mode"] == "rounded" and row["status"] == "run"]
    assert [row["role"] for row in rounded] == ["recording"] + ["replaying"] * (len(rounded) - 1)
    assert len({row["log_bytes"] for row in rounded}) == 1
    assert rounded[0]["log_bytes"] > 0


def test_cuda_reads_not_run_where_there_is_none(made: Path) -> None:
    import torch

    rows = [row for row in rows_of(made) if row["device"] == equality.CUDA]
    assert {row["status"] for row in rows} == {"run" if torch.cuda.is_available() else "not run"}


def test_rows_of_the_file_are_not_run_again(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a finished row was run again")

    monkeypatch.setattr(equality, "_measured", refuse)
    before = rows_of(made)
    after = equality.run(presets=["digits-cnn"], steps=2, devices=(*DEVICES, equality.CUDA), out=made)
    assert sorted(map(str, after)) == sorted(map(str, before))


def test_the_command_shows_the_rows_of_a_file(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "equality", "--preset", "digits-cnn", "--steps", "2", "--out", str(made)]
    command += [text for name in DEVICES for text in ("--device", name)]
    assert main([*command, "--json"]) == 0
    assert {row["device"] for row in json.loads(capsys.readouterr().out)} == set(DEVICES)
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "1 on 2" in shown
    assert "2 on 2" in shown


def test_one_other_bit_fails_the_command(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = equality.load(made)
    row = next(r for r in document["rows"] if r["mode"] == "exact" and r["device"] == DEVICES[1])
    row["optimizer"] = row["optimizer"][:-1] + ("0" if row["optimizer"][-1] != "0" else "1")
    forged = tmp_path / "forged.json"
    forged.write_text(json.dumps(document))
    command = ["bench", "equality", "--preset", "digits-cnn", "--steps", "2", "--out", str(forged)]
    assert main([*command, *(text for name in DEVICES for text in ("--device", name))]) == 1
    assert "exact: 2 endings" in capsys.readouterr().err


def test_a_device_that_breaks_is_not_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> dict[str, Any]:
        raise DeviceError("no answer")

    monkeypatch.setattr(equality.DevicePool, "run", broken)
    rows = equality.run(presets=["digits-cnn"], steps=1, devices=["native"], numerics=["exact"])
    assert [row["status"] for row in rows] == ["broke: no answer"]
    with pytest.raises(DeviceError, match="digits-cnn, exact, native: broke"):
        equality.verdict(rows)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("nonsense", "cannot read"),
        ("[]", "not a table"),
        ('{"hardware": {}, "rows": [{"work": "x"}]}', "a row that is not"),
        ('{"hardware": {"processor": "other"}, "rows": []}', "another machine"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(content)
    with pytest.raises(CallerError, match=message):
        equality.run(presets=["digits-cnn"], steps=1, out=path)


def test_names_and_numbers_are_checked() -> None:
    for options in ({"presets": ["nothing"]}, {"devices": ["nothing"]}, {"numerics": ["nothing"]}, {"steps": 0}):
        with pytest.raises(CallerError):
            equality.run(**options)
    assert main(["bench", "equality", "--steps", "0"]) == 2
