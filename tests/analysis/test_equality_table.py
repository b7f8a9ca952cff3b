"""``equality``: the command on a tiny setting, resuming, rows of several machines, and what its table claims."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from analysis.bench.origin import commit, hardware
from firmware_sim.errors import CallerError, DeviceError
from inspector.replay.pool import DevicePool
from tests.measurements import equality
from tests.measurements.__main__ import main as measure

pytestmark = pytest.mark.usefixtures("kept_devices")
DIGESTS = ("weights", "optimizer", "losses")
DEVICES = ("native-1", "emulated-tensor-core")
ELSEWHERE = {"processor": "Other(R) Chip 9 64-Core Processor @ 2.00GHz", "cores": 7}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, devices: DevicePool) -> Path:
    """The file of a table with two devices and CUDA."""
    out = tmp_path_factory.mktemp("equality") / "table.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("inspector.replay.pool.DevicePool.__enter__", lambda _: devices)
        equality.run(presets=["digits-cnn"], steps=2, devices=(*DEVICES, "cuda"), out=out)
    return out


@pytest.fixture
def elsewhere(made: Path, tmp_path: Path) -> Path:
    """The same file and logs as another machine would have left them, with a line by hand."""
    document = equality.load(made)
    out = tmp_path / "table.json"
    rows = [row for row in document["rows"] if row["device"] != "cuda"]
    out.write_text(json.dumps({"about": "by hand", "hardware": [ELSEWHERE], "rows": rows}))
    shutil.copytree(made.with_suffix(".logs"), out.with_suffix(".logs"))
    return out


def run_here(out: Path, **options: Any) -> list[dict[str, Any]]:
    options = {"devices": ["native-1"], "numerics": ["rounded", "exact"]} | options
    return equality.run(presets=["digits-cnn"], steps=2, out=out, **options)


def with_other_bits(row: dict[str, Any]) -> dict[str, Any]:
    last = "0" if row["optimizer"][-1] != "0" else "1"
    return {**row, "optimizer": row["optimizer"][:-1] + last}


def bytes_of(out: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in out.with_suffix(".logs").rglob("*.log")}


def assert_refused(document: dict[str, Any], path: Path, message: str) -> None:
    path.write_text(json.dumps(document))
    with pytest.raises(CallerError, match=message):
        equality.load(path)


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

    rows = [row for row in rows_of(made) if row["device"] == "cuda"]
    assert {row["status"] for row in rows} == {"run" if torch.cuda.is_available() else "not run"}


def test_rows_of_the_file_are_not_run_again(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a finished row was run again")

    monkeypatch.setattr(equality, "_measured", refuse)
    before = rows_of(made)
    after = equality.run(presets=["digits-cnn"], steps=2, devices=(*DEVICES, "cuda"), out=made)
    assert len({row.pop("processor") for row in after}) == 1
    assert sorted(map(str, after)) == sorted(map(str, before))


def test_the_command_shows_the_rows_of_a_file(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["equality", "--preset", "digits-cnn", "--steps", "2", "--out", str(made)]
    command += [text for name in DEVICES for text in ("--device", name)]
    assert measure([*command, "--json"]) == 0
    assert {row["device"] for row in json.loads(capsys.readouterr().out)} == set(DEVICES)
    assert measure(command) == 0
    shown = capsys.readouterr().out
    assert "1 on 2" in shown
    assert "2 on 2" in shown


def test_one_other_bit_fails_the_command(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = equality.load(made)
    row = next(r for r in document["rows"] if r["mode"] == "exact" and r["device"] == DEVICES[1])
    row.update(with_other_bits(row))
    forged = tmp_path / "forged.json"
    forged.write_text(json.dumps(document))
    command = ["equality", "--preset", "digits-cnn", "--steps", "2", "--out", str(forged)]
    assert measure([*command, *(text for name in DEVICES for text in ("--device", name))]) == 3
    assert f"exact: 2 endings on 2 devices; unlike most: {DEVICES[1]}" in capsys.readouterr().err


def test_a_device_that_breaks_is_not_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> dict[str, Any]:
        raise DeviceError("no answer")

    monkeypatch.setattr(DevicePool, "run", broken)
    rows = equality.run(presets=["digits-cnn"], steps=1, devices=["native"], numerics=["exact"])
    assert [row["status"] for row in rows] == ["broke: no answer"]
    with pytest.raises(DeviceError, match="digits-cnn, exact, native: broke"):
        equality.verdict(rows)


def test_another_machine_adds_its_rows_and_replays_the_logs_that_it_finds(elsewhere: Path) -> None:
    before, logs = json.loads(elsewhere.read_text()), bytes_of(elsewhere)
    rows = run_here(elsewhere)
    after = equality.load(elsewhere)
    assert after["about"] == "by hand"
    assert after["hardware"] == [ELSEWHERE, hardware()]
    assert after["rows"][:-2] == before["rows"]
    assert bytes_of(elsewhere) == logs
    rounded, exact = after["rows"][-2:]
    assert (rounded["machine"], rounded["recorded_on"], rounded["role"]) == (1, 0, "replaying")
    assert {row["log_digest"] for row in after["rows"] if row["mode"] == "rounded"} == {rounded["log_digest"]}
    assert (exact["machine"], exact["device"], "recorded_on" in exact) == (1, "native-1", False)
    assert {row["mode"] for row in rows} == {"rounded", "exact"}
    assert len({row["processor"] for row in rows}) == 2
    assert equality.counts(rows) == {("digits-cnn", "rounded"): (3, 1), ("digits-cnn", "exact"): (3, 1)}
    assert equality.verdict(rows) is None
    (line,) = equality.summary(after["rows"])
    assert (line["machines"], line["devices"], line["exact"], line["rounded"], line["native"]) == (2, 3, 1, 1, 2)
    shown = "\n".join(equality.table(rows))
    assert "Other Chip 9 emulated-tensor-core  " in shown
    assert "1 on 3" in shown
    assert run_here(elsewhere) == rows


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices that do not train: a recording leaves logs, and everything ends alike."""

    def run(_: object, name: str, job: dict[str, Any]) -> dict[str, Any]:
        logs = Path(job["logs"])
        for step in range(1, job["steps"] + 1) if job["numerics"] == "rounded" else ():
            log = logs / f"step-{step:04d}.log"
            if job["role"] == "recording":
                logs.mkdir(parents=True, exist_ok=True)
                log.write_text(f"by {name}")
            elif not log.exists():
                raise DeviceError("no log")
        rest = ("last_loss", "step_seconds", "seconds", "log_bytes", "entries", "forced")
        return dict.fromkeys(DIGESTS, "sha256-list:" + "0" * 64) | dict.fromkeys(rest, 0)

    monkeypatch.setattr(DevicePool, "run", run)


def rounded_of(out: Path, machine: int) -> dict[str, tuple[str, int]]:
    """Role and origin of the logs by device."""
    rows = (row for row in rows_of(out) if (row["mode"], row["machine"]) == ("rounded", machine))
    return {row["device"]: (row["role"], row["recorded_on"]) for row in rows}


@pytest.mark.usefixtures("pretended")
def test_a_machine_without_the_logs_records_its_own(elsewhere: Path) -> None:
    before = rounded_of(elsewhere, 0)
    shutil.rmtree(elsewhere.with_suffix(".logs"))
    run_here(elsewhere, devices=["native-1", "avx2"])
    assert rounded_of(elsewhere, 1) == {"native-1": ("recording", 1), "avx2": ("replaying", 1)}
    logs = bytes_of(elsewhere)
    shutil.rmtree(elsewhere.with_suffix(".logs"))
    run_here(elsewhere, devices=["sse41"])
    assert bytes_of(elsewhere) == logs
    assert rounded_of(elsewhere, 1)["native-1"] == ("recording", 1)
    assert rounded_of(elsewhere, 1)["sse41"] == ("replaying", 1)
    assert rounded_of(elsewhere, 0) == before


@pytest.mark.usefixtures("pretended")
def test_a_recording_of_this_machine_is_replayed_by_every_later_device(tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    run_here(out, devices=["native-1"])
    next(iter(bytes_of(out))).unlink()  # as if the recording had broken off
    run_here(out, devices=["avx2", "native-1"])
    run_here(out, devices=["native"])
    assert rounded_of(out, 0) == {"native-1": ("recording", 0), "avx2": ("replaying", 0), "native": ("replaying", 0)}


@pytest.mark.parametrize("change", ["row", "logs"])
def test_logs_that_no_row_recorded_are_not_replayed(elsewhere: Path, change: str) -> None:
    if change == "row":
        document = equality.load(elsewhere)
        document["rows"] = [row for row in document["rows"] if row["mode"] != "rounded"]
        elsewhere.write_text(json.dumps(document))
    else:
        path = min(bytes_of(elsewhere))
        path.write_bytes(path.read_bytes() + b"x")
    logs = bytes_of(elsewhere)
    with pytest.raises(CallerError, match="no row tells which machine recorded"):
        run_here(elsewhere)
    assert bytes_of(elsewhere) == logs


@pytest.mark.parametrize("change", ["no recording", "other logs"])
def test_a_replay_belongs_to_a_recording_of_the_table(elsewhere: Path, change: str) -> None:
    document = equality.load(elsewhere)
    recording = next(row for row in document["rows"] if (row["mode"], row["role"]) == ("rounded", "recording"))
    if change == "no recording":
        document["rows"].remove(recording)
    else:
        recording["log_digest"] = recording["log_digest"][:-1] + "x"
    assert_refused(document, elsewhere, "has no recording for digits-cnn")


@pytest.mark.usefixtures("pretended")
def test_a_recording_that_broke_leaves_no_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would stand in the way of every later call: no row tells who made them."""
    pretend = DevicePool.run

    def breaking(pool: Any, name: str, job: dict[str, Any]) -> dict[str, Any]:
        pretend(pool, name, job)
        raise DeviceError("died at the end")

    out = tmp_path / "table.json"
    with monkeypatch.context() as patch:
        patch.setattr(DevicePool, "run", breaking)
        with pytest.raises(DeviceError, match="died"):
            equality.verdict(run_here(out))
    assert bytes_of(out) == {}
    assert equality.verdict(run_here(out)) is None


@pytest.mark.usefixtures("pretended")
def test_a_recording_that_cannot_be_made_again_keeps_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaking(*_: object) -> dict[str, Any]:
        raise DeviceError("died")

    out = tmp_path / "table.json"
    run_here(out, devices=["native-1"])
    before = rows_of(out)
    shutil.rmtree(out.with_suffix(".logs"))
    with monkeypatch.context() as patch:
        patch.setattr(DevicePool, "run", breaking)
        with pytest.raises(DeviceError, match="avx2: broke: died"):
            equality.verdict(run_here(out, devices=["avx2"]))
    assert [row for row in rows_of(out) if row["device"] == "native-1"] == before
    assert equality.verdict(run_here(out, devices=["avx2"])) is None


@pytest.mark.usefixtures("pretended")
def test_lost_logs_that_come_out_otherwise_are_not_passed_off_as_the_old_ones(tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    run_here(out, devices=["native-1"])
    shutil.rmtree(out.with_suffix(".logs"))
    document = equality.load(out)
    for row in document["rows"]:
        row["weights"] = with_other_bits({**row, "optimizer": row["weights"]})["optimizer"]
    out.write_text(json.dumps(document))
    with pytest.raises(CallerError, match="cannot be made again"):
        run_here(out, devices=["avx2"])


def test_a_table_in_which_nothing_ran_shows_nothing(made: Path) -> None:
    rows = [row for row in equality.labelled(equality.load(made)) if row["status"] == "not run"]
    assert rows
    assert equality.verdict(rows) == "nothing ran"


def another_machine(rows: list[dict[str, Any]], **changes: Any) -> list[dict[str, Any]]:
    """Rows of two machines: those given, and the same again as of a second, changed."""
    document = {"hardware": [ELSEWHERE, {"processor": "Third Chip"}]}
    rows = [row for row in rows if row["device"] != "cuda"]
    return equality.labelled({**document, "rows": [*rows, *({**row, "machine": 1, **changes} for row in rows)]})


def test_another_ending_on_another_machine_is_named(made: Path) -> None:
    rows = another_machine(rows_of(made))
    assert equality.verdict(rows) is None
    last = max(number for number, row in enumerate(rows) if row["mode"] == "exact")
    rows[last] = with_other_bits(rows[last])
    assert equality.verdict(rows) == (
        "digits-cnn, exact: 2 endings on 4 devices; unlike most: Third Chip emulated-tensor-core"
    )
    rows[last]["status"] = "broke: no answer"
    with pytest.raises(DeviceError, match="exact, Third Chip emulated-tensor-core: broke"):
        equality.verdict(rows)


def test_only_replays_of_one_recording_have_to_end_alike(made: Path) -> None:
    rounded = [row for row in rows_of(made) if row["mode"] == "rounded"]
    rows = another_machine(rounded, recorded_on=1)
    rows[2:] = [with_other_bits(row) for row in rows[2:]]
    assert equality.verdict(rows) is None
    assert equality.counts(rows) == {("digits-cnn", "rounded"): (4, 1)}
    rows[2:] = [{**row, "recorded_on": 0} for row in rows[2:]]
    assert equality.counts(rows) == {("digits-cnn", "rounded"): (4, 2)}
    assert "Third Chip native-1, Third Chip emulated-tensor-core" in str(equality.verdict(rows))


def test_machines_of_one_name_are_told_apart() -> None:
    hardware = [{"processor": "Intel(R) Xeon(R) CPU @ 2.20GHz", "cores": cores} for cores in (2, 4)]
    rows = [{"machine": 0}, {"machine": 1}, {"machine": 2}]
    found = equality.labelled({"hardware": [*hardware, {"processor": "AMD EPYC 9B14 96-Core Processor"}], "rows": rows})
    assert [row["processor"] for row in found] == ["Intel Xeon #0", "Intel Xeon #1", "AMD EPYC 9B14"]


def test_rows_name_their_commit(made: Path) -> None:
    (name,) = {str(row.get("commit")).removesuffix("+") for row in rows_of(made)}
    assert name == str(commit().get("commit")).removesuffix("+")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("nonsense", "cannot read"),
        ("[]", "was not written by this command"),
        ('{"hardware": [{"processor": "x"}]}', "was not written by this command"),
        ('{"rows": []}', "does not list the machines"),
        ('{"hardware": {"processor": "x"}, "rows": []}', "does not list the machines"),
        ('{"hardware": [], "rows": []}', "does not list the machines"),
        ('{"hardware": ["x"], "rows": []}', "does not list the machines"),
        ('{"hardware": [{"cores": 2}], "rows": []}', "does not list the machines"),
        ('{"hardware": [{"processor": "x"}, {"processor": "x"}], "rows": []}', "a machine twice"),
        ('{"hardware": [{"processor": "x"}], "rows": [{"work": "x"}]}', "has a row that this command does not write"),
        ('{"hardware": [{"processor": "x"}], "rows": ["x"]}', "has a row that this command does not write"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(content)
    with pytest.raises(CallerError, match=message):
        equality.run(presets=["digits-cnn"], steps=1, out=path)


def drop(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda row: row.pop(name)


def put(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda row: row.update(values)


@pytest.mark.parametrize(
    "change",
    [
        *(drop(name) for name in ("work", "mode", "steps", "batch_size", "seed", "machine", "device", "status")),
        *(drop(name) for name in ("recorded_on", "weights", "optimizer", "losses")),
        *(put(machine=value) for value in (-1, 1, "0", True, 0.0, None)),
        *(put(recorded_on=value) for value in (-1, 2, "0", False, None)),
        put(mode="other"),
        put(work=["digits-cnn"]),
        put(status=None),
        put(weights=None),
    ],
)
def test_a_row_of_another_kind_is_refused(
    made: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    document = equality.load(made)
    change(next(row for row in document["rows"] if row["mode"] == "rounded" and row["role"] == "recording"))
    assert_refused(document, tmp_path / "table.json", "has a row that this command does not write")


def test_one_run_has_one_row_a_machine(made: Path, tmp_path: Path) -> None:
    document = equality.load(made)
    document["hardware"].append(ELSEWHERE)
    path = tmp_path / "table.json"
    document["rows"].append({**document["rows"][0], "machine": 1})
    path.write_text(json.dumps(document))
    assert equality.load(path) == document
    document["rows"].append({**document["rows"][0], "status": "not run"})
    assert_refused(document, path, "two rows of the same run")


def test_a_recording_was_made_on_its_own_machine(made: Path, tmp_path: Path) -> None:
    document = equality.load(made)
    document["hardware"].append(ELSEWHERE)
    next(row for row in document["rows"] if row["mode"] == "rounded")["recorded_on"] = 1
    assert_refused(document, tmp_path / "table.json", "has a row that this command does not write")


def test_names_and_numbers_are_checked() -> None:
    for options in ({"presets": ["nothing"]}, {"devices": ["nothing"]}, {"numerics": ["nothing"]}, {"steps": 0}):
        with pytest.raises(CallerError):
            equality.run(**options)
    assert measure(["equality", "--steps", "0"]) == 2
