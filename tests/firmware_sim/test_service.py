"""A look at a chip's folder: what it shows, and that it changes nothing."""

from __future__ import annotations

import dataclasses
import os
from fractions import Fraction

import pytest

from firmware_sim import EvidenceError, FirmwareChip, MailboxError, RecordKind, collect_evidence, seal_log_checkpoint
from firmware_sim.evidence import RECORD_BYTES, canonical, digest_bytes
from firmware_sim.nvram import NvramError
from firmware_sim.service import read_evidence, read_silicon
from tests.firmware_sim.conftest import work
from tests.guards import off

RUN = bytes(range(32))
RATE = Fraction(1, 3)


@pytest.fixture
def chip(world, tmp_path):
    """A chip that worked through 20 ticks of one epoch and 5 of the next."""
    made = FirmwareChip.manufacture(
        tmp_path / "chip", maker=world.maker, chip_id="chip-1", seed=b"seed", snapshot_rate=RATE
    )
    memory = world.attach(made)
    work(memory, 20, operators=20)
    made.close_epoch()
    work(memory, 5, operators=7)
    return made


def _bytes(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_look_shows_the_chip_and_changes_nothing(chip, tmp_path):
    counter, log, due, memory = chip._changes, chip.log_bytes(), chip.reveal(), chip.nvram
    chip.cut_power()
    before = _bytes(tmp_path / "chip")
    view = read_silicon(tmp_path / "chip")
    assert _bytes(tmp_path / "chip") == before
    assert (view.identity.chip_id, view.counter, view.tick, view.busy) == ("chip-1", counter, 25, 25)
    assert b"".join(record.to_bytes() for record in view.records) == log
    assert view.problem is None
    assert view.quote is None
    closed, still_open = view.epochs
    assert closed.due == closed.taken
    assert (closed.first, closed.last, closed.ended) == (0, 20, RecordKind.CLOSE_EPOCH)
    assert still_open.due is None
    assert still_open.ended is None
    assert view.counts()[RecordKind.SNAPSHOT] == len(closed.taken) + len(still_open.taken)
    assert [key.epoch for key in due] == [0]
    assert view.memory == memory


def test_evidence_and_folder_show_the_same(chip, tmp_path):
    evidence = collect_evidence(chip, bytes(16), "v")
    chip.cut_power()
    folder, given = read_silicon(tmp_path / "chip"), read_evidence(evidence, "chip-1")
    for name in (
        "identity",
        "records",
        "log_size",
        "log_head",
        "counter",
        "boot",
        "tick",
        "busy",
        "snapshot_rate",
        "snapshot_algorithm",
        "epochs",
    ):
        assert getattr(folder, name) == getattr(given, name), name
    assert given.problem is None
    assert given.quote is not None
    assert given.quote.verifier_id == "v"


def test_a_chip_that_released_records_shows_what_is_left(world):
    chip = world.make(beacon_key=world.beacon_key.verifying)
    world.train(chip, 30)
    checked = world.check(world.collect(chip, 0), number=0)
    chip.prune(seal_log_checkpoint("chip-1", checked.checkpoint(), world.beacon_key))
    chip.cut_power()
    bare = read_silicon(world.folder / "chip-1")
    assert (len(bare.records), bare.log_size, bare.log_head) == (0, len(checked.records), checked.quote.log_head)
    assert (bare.boot, bare.tick, bare.problem, bare.epochs) == (1, 30, None, ())
    chip = FirmwareChip.power_on(world.folder / "chip-1")
    world.train(chip, 5, start=30)
    memory = chip.nvram
    chip.cut_power()
    view = read_silicon(world.folder / "chip-1")
    assert view.problem is None
    assert view.memory == memory
    assert view.log_size == len(checked.records) + len(view.records)
    assert [row.epoch for row in view.epochs] == [1, 2]


def test_a_chip_that_runs_is_left_alone(chip, tmp_path):
    with pytest.raises(MailboxError, match="is powered on already"):
        read_silicon(tmp_path / "chip")
    chip.idle(1)


def test_a_folder_that_is_none_and_an_altered_one_are_named(chip, tmp_path):
    chip.cut_power()
    with pytest.raises(NvramError, match="can't be opened"):
        read_silicon(tmp_path)
    log = tmp_path / "chip" / "log.bin"
    content = bytearray(log.read_bytes())
    content[100] ^= 1
    log.write_bytes(content)
    view = read_silicon(tmp_path / "chip")
    assert "log record" in str(view.problem)
    assert view.epochs == ()
    (tmp_path / "chip" / "fuses.json").write_bytes(b"{}")
    with pytest.raises(NvramError, match="fuses are malformed"):
        read_silicon(tmp_path / "chip")


def _link(folder, tmp_path):
    (tmp_path / "elsewhere").write_bytes(b"")
    (folder / "more.bin").symlink_to(tmp_path / "elsewhere")


HOSTILE = {
    "a link": (_link, "'more.bin' in the chip's folder is not a plain file"),
    "a folder": (lambda folder, _: (folder / "more").mkdir(), "'more' in the chip's folder is not a plain file"),
    "a sparse log": (lambda folder, _: os.truncate(folder / "log.bin", 1 << 40), "bytes of a file in a chip's folder"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_only_plain_files_of_a_chips_size_are_copied(chip, tmp_path, name):
    chip.cut_power()
    make, text = HOSTILE[name]
    make(tmp_path / "chip", tmp_path)
    with pytest.raises(EvidenceError, match=text):
        read_silicon(tmp_path / "chip")


def test_guard_off_what_a_link_leads_to_is_copied(chip, tmp_path):
    chip.cut_power()
    _link(tmp_path / "chip", tmp_path)
    with off("plain chip files"):
        assert read_silicon(tmp_path / "chip").problem is None


@pytest.mark.parametrize(
    ("fuse", "value"),
    [("chip_id", None), ("chip_id", 7), ("chip_id", "x" * 10_000), ("device_certificate", ""), ("uds", 3)],
)
def test_fuses_that_no_maker_burns_are_an_error_of_the_evidence(chip, tmp_path, fuse, value):
    chip.cut_power()
    path = tmp_path / "chip" / "fuses.json"
    content = {**canonical.decode(path.read_bytes())["content"], fuse: value}
    path.write_bytes(
        canonical.encode({"content": content, "digest": str(digest_bytes("chip-fuses", canonical.encode(content)))})
    )
    with pytest.raises(EvidenceError):
        read_silicon(tmp_path / "chip")


def test_evidence_that_contradicts_itself_is_named(chip):
    evidence = collect_evidence(chip, bytes(16), "v")
    assert "presents the identity of chip chip-1" in str(read_evidence(evidence, "chip-2").problem)
    shorter = dataclasses.replace(evidence, log=evidence.log[:-RECORD_BYTES])
    assert "but its quote gives" in str(read_evidence(shorter, "chip-1").problem)
    keyless = dataclasses.replace(evidence, epoch_keys=b"[]")
    assert "the key of epoch 0 is missing" in str(read_evidence(keyless, "chip-1").problem)
    for change in ({"quote": b"{}"}, {"chain": b""}, {"log": b""}):
        with pytest.raises(EvidenceError):
            read_evidence(dataclasses.replace(evidence, **change), "chip-1")


def test_a_schedule_too_long_to_audit_is_no_fault(chip, monkeypatch):
    evidence = collect_evidence(chip, bytes(16), "v")
    for module in ("audit", "service"):
        monkeypatch.setattr(f"firmware_sim.{module}.MAX_AUDITED_TICKS", 3)
    view = read_evidence(evidence, "chip-1")
    assert view.problem is None
    assert [row.due for row in view.epochs] == [None, None, None]
