"""``chipwitness operators``."""

from __future__ import annotations

import json

import pytest

from analysis.cli import main


def test_table_lists_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["operators", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    kinds = {row["operator"]: row["kind"] for row in data["operators"]}
    assert kinds["aten.view.default"] == "exact"
    assert kinds["aten.mul.Tensor"] == "arithmetic"
    assert kinds["aten.mm.default"] == "implemented"
    assert kinds["aten.mish.default"] == "decomposed"
    assert "aten.linalg_eig.default" not in kinds
    tiles = {row["operator"]: row["tile"] for row in data["operators"]}
    assert [tiles[f"aten.{name}"] for name in ("addcdiv.default", "mm.default", "linalg_lstsq.default")] == [
        "elements",
        "matrix product",
        "whole",
    ]
    assert all(row["whole"] for row in data["operators"] if row["tile"] == "whole"), "each says why"
    assert data["counts"]["tiled"] == sum(tile != "whole" for tile in tiles.values())
    assert {row["battery"] for row in data["operators"]} == {"not run"}
    assert sum(data["counts"][kind] for kind in set(kinds.values())) == len(kinds)


def test_battery_reports_native_differences_and_unknown_devices(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["operators", "--battery", "--numerics", "native", "--device", "native-1", "--device", "sse41", "--json"]
    assert main(options) == 0
    rows = {row["operator"]: row for row in json.loads(capsys.readouterr().out)["operators"]}
    assert rows["aten.mm.default"]["battery"] == "differs"
    assert rows["aten.mm.default"]["groups"] == [["native-1"], ["sse41"]]
    assert rows["aten.eq.Tensor"]["battery"] == "equal"
    with pytest.raises(SystemExit):
        main(["operators", "--help"])
    _, _, keys = capsys.readouterr().out.partition("Each of operators:\n")
    listed = {key.strip() for line in keys.splitlines() for key in line.partition(":")[0].split(",")}
    assert set(rows["aten.mm.default"]) <= listed, "help names each key"
    assert main(["operators", "--battery", "--device", "abacus"]) == 2
