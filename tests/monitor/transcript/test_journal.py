"""The journal is read as it was signed, record by record, and in no other form."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firmware_sim.errors import Damaged, EvidenceError
from firmware_sim.evidence import SigningKey
from monitor.transcript import Entry, Manifest, journal
from monitor.transcript.journal import Journal
from monitor.transcript.layout import JOURNAL, checkpoint_path, log_path, program_path
from monitor.transcript.listing import Listing
from monitor.transcript.manifest import Extent, Record, decode_line

KEY = SigningKey.generate(bytes(32))
ENTRY = Entry.of(b"x")
PATHS = [log_path(7), checkpoint_path(7), program_path("0" * 64), "metadata.json", "chips/a/log.bin"]


def manifest_of(listed: list[Record], *, pending: bytes = b"", **changes: Any) -> Manifest:
    content = b"".join(record.line() for record in listed)
    extent: dict[str, Any] = {
        "records": len(listed),
        "files": sum(len(record.files) for record in listed),
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    return Manifest(run="run", journal=Extent(**{**extent, **changes}), pending=pending)


def put(folder: Path, records: list[Record], tail: bytes = b"") -> None:
    (folder / JOURNAL).write_bytes(b"".join(record.line() for record in records) + tail)


def long_records(count: int, seed: int) -> list[Record]:
    """Leaves of very different lengths, some longer than a page."""
    rng = random.Random(seed)
    return [
        Record(leaf=b'"%s"' % (b"a" * rng.choice([0, 3, 100, 70_000])), files={log_path(step): ENTRY})
        for step in range(count)
    ]


@given(
    st.text(alphabet=st.characters(codec="utf-8")),
    st.dictionaries(st.sampled_from(PATHS), st.integers(0, 2**60)),
)
@settings(max_examples=60, deadline=None)
def test_record_is_a_line_and_comes_back(text, lengths):
    from firmware_sim.evidence import canonical

    record = Record(leaf=canonical.encode(text), files={path: Entry(n, "ab" * 32) for path, n in lengths.items()})
    line = record.line()
    assert line.count(b"\n") == line.count(b"\t") == 1
    assert decode_line(line) == record


@pytest.mark.parametrize(
    "line",
    [
        b"{}\n",
        b"\t{}",
        b"\t{} \n",
        b"\t[]\n",
        b"\t{}\t{}\n",
        b'\t{"trust.json":[1,"%s"]}\n' % (b"0" * 64),
        b'\t{"metadata.json":[-1,"%s"]}\n' % (b"0" * 64),
        b'\t{"metadata.json":[true,"%s"]}\n' % (b"0" * 64),
        b'\t{"metadata.json":[1,"%s"]}\n' % (b"0" * 63),
        b'\t{"metadata.json":[1]}\n',
        b'\t{"logs/00000001.rlog":[1,"%s"],"batches/00000001.safetensors":[1,"%s"]}\n' % (b"0" * 64, b"0" * 64),
    ],
)
def test_any_other_form_of_a_record_is_refused(line):
    with pytest.raises(EvidenceError):
        decode_line(line)


@pytest.mark.parametrize("kept", [1, 4])
def test_records_are_found_in_any_order_across_pages(tmp_path, monkeypatch, kept):
    monkeypatch.setattr(journal, "_KEPT", kept)
    records = long_records(60, 1)
    put(tmp_path, records)
    read = Journal(tmp_path, manifest_of(records))
    order = random.Random(2).choices(range(60), k=200)
    assert [read.record(index) for index in order] == [records[index] for index in order]
    assert list(read) == records
    with pytest.raises(EvidenceError, match="no record 60"):
        read.record(60)


def test_a_text_is_found_wherever_it_lies(tmp_path):
    """Also across the border of two pages, for each offset of the border in the text."""
    for shift in range(12):
        files = {program_path("0" * 64): ENTRY}
        start = Record(files=files).line().index(b'"programs/')
        records = [
            Record(leaf=b"a" * (journal._PAGE - 4 - start - shift), files={}),
            Record(files=files),
            *long_records(3, shift),
        ]
        put(tmp_path, records)
        assert Journal(tmp_path, manifest_of(records)).find(b'"programs/') == [1]


@pytest.mark.parametrize(
    "changes", [{"records": 2}, {"records": 4}, {"bytes": 10}, {"bytes": 10**6}, {"sha256": "0" * 64}]
)
def test_a_wrong_account_is_refused(tmp_path, changes):
    records = long_records(3, 5)
    put(tmp_path, records)
    with pytest.raises(EvidenceError, match=r"as signed|altered"):
        Journal(tmp_path, manifest_of(records, **changes))


def test_only_a_beginning_of_the_pending_record_may_follow(tmp_path):
    records, pending = long_records(3, 6), Record(leaf=b"3", files={log_path(3): ENTRY})
    line = pending.line()
    for length in (0, 1, len(line) - 1, len(line)):
        put(tmp_path, records, line[:length])
        read = Journal(tmp_path, manifest_of(records, pending=line))
        assert len(read) == 4
        assert read.record(3) == pending
    for tail in (b"4", line[:-1] + b"x", line + b"x", b"\n"):
        put(tmp_path, records, tail)
        with pytest.raises(EvidenceError, match=JOURNAL):
            Journal(tmp_path, manifest_of(records, pending=line))


def test_whoever_writes_the_journal_after_it_was_hashed_is_noticed(tmp_path):
    """What is verified and what is used later are the same bytes."""
    records = long_records(60, 7)
    put(tmp_path, records)
    read = Journal(tmp_path, manifest_of(records))
    assert read.record(0) == records[0]
    content = (tmp_path / JOURNAL).read_bytes()
    (tmp_path / JOURNAL).write_bytes(content[:-3] + b"zz\n")
    with pytest.raises(EvidenceError, match="altered while it was read"):
        read.record(59)


def test_a_missing_journal_is_refused_and_a_link_is_followed_inside_the_folder_alone(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises(Damaged, match="missing"):
        Journal(run, manifest_of([]))
    (tmp_path / "elsewhere").write_bytes(b"")
    (run / JOURNAL).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Damaged, match="missing"):
        Journal(run, manifest_of([]))
    (tmp_path / "elsewhere").rename(run / "store")
    (run / JOURNAL).unlink()
    (run / JOURNAL).symlink_to("store")
    assert len(Journal(run, manifest_of([]))) == 0


def test_a_path_is_looked_up_in_the_one_record_it_belongs_to(tmp_path):
    """A file that is listed with another step is not held: nobody reads it by its name."""
    records = [
        Record(files={"metadata.json": ENTRY}),
        Record(leaf=b"0", files={checkpoint_path(0): ENTRY}),
        Record(leaf=b"1", files={log_path(2): ENTRY, program_path("1" * 64): ENTRY}),
        Record(leaf=b"2", files={"metadata.json": Entry.of(b"other")}),
        Record(files={checkpoint_path(2): ENTRY, "chips/a/log.bin": ENTRY}),
    ]
    put(tmp_path, records)
    seen = []
    files = Listing(
        Journal(tmp_path, manifest_of(records)), 2, {"chips/a/log.bin"}.__contains__, lambda path, _: seen.append(path)
    )
    assert files["metadata.json"] == ENTRY
    assert files.get(checkpoint_path(2)) == files.get(program_path("1" * 64)) == ENTRY
    assert log_path(2) not in files
    assert [path for path in ("chips/a/log.bin", "../x", program_path("2" * 64), log_path(99)) if path in files] == []
    assert seen == ["metadata.json", checkpoint_path(2), program_path("1" * 64)]
    assert len(files) == 6


@pytest.mark.parametrize("steps", [-1, 0, 2, 99_999_999])
def test_a_manifest_counts_a_record_for_each_step(steps):
    sealed = Manifest(run="run", steps=steps, journal=Extent(records=3, files=0, bytes=0, sha256="0" * 64)).seal(KEY)
    with pytest.raises(EvidenceError, match=f"the manifest gives {steps} steps, .* but its journal has 3"):
        Manifest.open(sealed, KEY.verifying)
