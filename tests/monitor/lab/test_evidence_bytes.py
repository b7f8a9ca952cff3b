"""An altered or missing byte under a run folder is never accepted; where the lab signed for it, it is a rejection."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest

from firmware_sim import RECORD_BYTES
from firmware_sim.errors import EvidenceError
from inspector.inspection.inspection import verify
from inspector.inspection.verdict import Outcome
from monitor.lab.simulated_lab import SimulatedLab, lab_path
from monitor.transcript.export import export_path
from tests.handing import hand_over

SMALL = 4096
OFFSETS = 32


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, record):
    return record(tmp_path_factory.mktemp("tiny") / "run", steps=2, chips=1, checkpoint_every=1, rate=Fraction(1))


def outcome(recorded, run: Path) -> Outcome:
    return verify(run, recorded.trust, now=recorded.now).outcome


def is_named(recorded, run: Path, path: Path) -> bool:
    """Whether the copy is damaged, and the file at fault is named: nobody is accused."""
    verdict = verify(run, recorded.trust, now=recorded.now)
    text = verdict.reasons[0].text
    said = text.startswith("this copy is damaged: ") and path.relative_to(run).as_posix() in text
    return said and (verdict.outcome, verdict.reasons[0].guard) == (Outcome.INCONCLUSIVE, "copy")


def is_rejected(recorded, run: Path) -> bool:
    """Whether the same is the lab's fault, once it has signed that this is what it hands over."""
    hand_over(run, SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(recorded.run))))
    found = outcome(recorded, run)
    export_path(run).unlink()
    return found is Outcome.REJECT


def test_untouched_run_is_accepted(tiny):
    assert outcome(tiny, tiny.run) is Outcome.ACCEPT


EACH = 13
"""Of how many bytes of a small file one is flipped; prime to the lengths of records, so that all their places occur."""


def flip_cases(size: int, name: str) -> list[int]:
    rng = random.Random(f"flip {name}")
    if size <= SMALL:
        return list(range(rng.randrange(EACH), size, EACH))
    return sorted({0, size - 1, *(rng.randrange(size) for _ in range(OFFSETS))})


def test_each_flipped_byte_is_damage_and_a_rejection_where_the_lab_signed_for_it(tiny, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(tiny.run, run)
    files = sorted(path for path in run.rglob("*") if path.is_file())
    assert len(files) == len([*tiny.run.rglob("*.*")])
    tried = 0
    for path in files:
        original = path.read_bytes()
        for offset in flip_cases(len(original), path.name):
            path.write_bytes(original[:offset] + bytes([original[offset] ^ 1]) + original[offset + 1 :])
            assert is_named(tiny, run, path), (path, offset)
            assert tried % 3 or is_rejected(tiny, run), (path, offset)
            tried += 1
        path.write_bytes(original)
    assert outcome(tiny, run) is Outcome.ACCEPT
    assert tried > 5000 // EACH


def test_each_missing_truncated_or_longer_file_is_damage_and_a_rejection_where_the_lab_signed_for_it(tiny, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(tiny.run, run)
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        original = path.read_bytes()
        for content in (b"", original[:-1], original + b"\n"):
            path.write_bytes(content)
            assert is_named(tiny, run, path), (path, len(content))
            assert is_rejected(tiny, run), (path, len(content))
        path.unlink()
        assert is_named(tiny, run, path), path
        assert is_rejected(tiny, run), path
        path.mkdir()
        assert is_named(tiny, run, path), path
        path.rmdir()
        path.symlink_to(tiny.run / path.relative_to(run))  # out of the folder
        assert is_named(tiny, run, path), path
        assert is_rejected(tiny, run), path
        path.unlink()
        path.symlink_to(path.with_name("same"))
        path.with_name("same").write_bytes(original)
        assert outcome(tiny, run) is Outcome.ACCEPT, path
        path.with_name("same").unlink()
        path.unlink()
        path.write_bytes(original)
    assert outcome(tiny, run) is Outcome.ACCEPT


@pytest.mark.parametrize("name", ["extra", "logs/00000099.rlog", "chips/lab-chip-0000/notes.txt", ".hidden"])
def test_extra_file_is_ignored_and_a_rejection_where_the_lab_signed_for_it(tiny, tmp_path, name):
    run = tmp_path / "run"
    shutil.copytree(tiny.run, run)
    (run / name).write_bytes(b"{}")
    verdict = verify(run, tiny.trust, now=tiny.now)
    assert verdict.outcome is Outcome.ACCEPT
    assert verdict.evidence["ignored"] == {"count": 1, "names": [f"'{name}'"]}
    assert f"ignored in run, unread: '{name}'" in verdict.reasons[0].text
    assert is_rejected(tiny, run)


def test_extra_folder_is_ignored(tiny, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(tiny.run, run)
    (run / "empty").mkdir()
    assert outcome(tiny, run) is Outcome.ACCEPT


def test_empty_folder_is_damage_and_a_rejection_where_the_lab_signed_for_it(tiny, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    assert outcome(tiny, run) is Outcome.INCONCLUSIVE
    assert is_rejected(tiny, run)


class Resigned:
    """A lab that edits one file of its own run and signs the manifest anew."""

    def __init__(self, recorded, run: Path) -> None:
        shutil.copytree(recorded.run, run)
        self.run = run
        self.key = SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(recorded.run)))

    def edit(self, path: str, content: bytes) -> None:
        from monitor.transcript.draft import Draft

        draft = Draft.read(self.run, self.key)
        draft.put(self.run, path, content)
        draft.sign(self.run, self.key)

    def edit_leaf(self, step: int, edit: Callable[[bytes], bytes]) -> None:
        from monitor.transcript.draft import Draft

        draft = Draft.read(self.run, self.key)
        assert edit(draft.leaves[step]) != draft.leaves[step]
        draft.leaves[step] = edit(draft.leaves[step])
        draft.sign(self.run, self.key)


@pytest.mark.parametrize(
    ("path", "edit"),
    [
        ("metadata.json", lambda data: data.replace(b'"seed":5', b'"seed": 5')),
        ("data/salt.bin", lambda data: bytes(32)),
        ("data/order.safetensors", lambda data: data[:-1] + b"\x01"),
        ("logs/00000001.rlog", lambda data: data + b"\x00"),
        ("checkpoints/00000001.safetensors", lambda data: data[:-4] + b"\x00\x00\x80\x3f"),
        ("chips/lab-chip-0000/epochs.json", lambda data: b"[]"),
        ("chips/lab-chip-0000/log.bin", lambda data: data[:-RECORD_BYTES]),
        ("chips/lab-chip-0000/quote.json", lambda data: data + b" "),
        ("chips/lab-chip-0000/chain.pem", lambda data: data + b"\n"),
    ],
)
def test_resigned_edit_is_still_a_rejection(tiny, tmp_path, path, edit):
    lab = Resigned(tiny, tmp_path / "run")
    content = (lab.run / path).read_bytes()
    lab.edit(path, content)
    assert outcome(tiny, lab.run) is Outcome.ACCEPT
    assert edit(content) != content
    lab.edit(path, edit(content))
    assert outcome(tiny, lab.run) is Outcome.REJECT


@pytest.mark.parametrize(
    "edit",
    [
        lambda leaf: leaf + b" ",
        lambda leaf: b"",
        lambda leaf: leaf.replace(b'"flop":', b'"flop":1'),
        lambda leaf: leaf.replace(b'"step":1', b'"step":2'),
    ],
)
def test_resigned_leaf_is_still_a_rejection(tiny, tmp_path, edit):
    lab = Resigned(tiny, tmp_path / "run")
    lab.edit_leaf(1, edit)
    assert outcome(tiny, lab.run) is Outcome.REJECT


def test_journal_cannot_list_a_trust_anchor(tiny, tmp_path):
    lab = Resigned(tiny, tmp_path / "run")
    lab.edit("trust.json", b"{}")
    verdict = verify(lab.run, tiny.trust, now=tiny.now)
    assert verdict.outcome is Outcome.REJECT
    assert "no run folder holds" in verdict.reasons[0].text


def test_nothing_parses_before_its_digest(tiny, tmp_path, monkeypatch):
    from monitor.transcript import RunFolder

    run = RunFolder(tiny.run, next(iter(tiny.trust.labs.values())))
    with pytest.raises(EvidenceError, match="missing from the journal"):
        run.read("logs/00000042.rlog")
