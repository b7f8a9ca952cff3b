"""Law 8, rows C20, C21, C25 and B19: what befalls a copy is nobody's guilt, and what a lab signs for stays its own."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tarfile
import tracemalloc
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from fractions import Fraction
from typing import Any

import pytest

from analysis.cli import main
from firmware_sim.errors import Damaged, EvidenceError
from firmware_sim.evidence import SigningKey
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect, verify
from inspector.inspection.verdict import Outcome
from inspector.replay.ray_pool import RayPool
from inspector.rounds import steps
from inspector.rounds.world import World
from inspector.storage.fsck import fsck
from monitor.lab.rounds import LabSide
from monitor.lab.simulated_lab import SimulatedLab, lab_path
from monitor.transcript import RunFolder
from monitor.transcript.draft import Draft
from monitor.transcript.export import export_path, export_run, import_run
from tests.attacks.copying import CHECKPOINT, DAMAGE, HARMLESS, LOG
from tests.conftest import NOW, STARTED
from tests.guards import off
from tests.handing import hand_over

WORDS = ("--now", "2026-01-01T00:30:00Z", "--json")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, record):
    made = record(tmp_path_factory.mktemp("copies") / "run", steps=2, chips=1, checkpoint_every=1, rate=Fraction(1))
    made.run.with_name("run.trust.json").write_text(json.dumps(made.trust.to_json()))
    return made


@pytest.fixture
def copy(tiny, tmp_path):
    shutil.copytree(tiny.run, tmp_path / "run")
    return tmp_path / "run"


def key_of(recorded):
    return SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(recorded.run)))


def command(capsys, *words: str) -> tuple[int, str]:
    code = main([*map(str, words)])
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return code, said.out + said.err


def judged(capsys, name: str, run, recorded, *words: str) -> tuple[str, dict]:
    trust = recorded.run.with_name("run.trust.json")
    told = json.loads(command(capsys, name, run, "--trust", trust, *WORDS, *words)[1])
    return told["outcome"], told


INSPECT = ("--samples", "1", "--seed", "s", "--device", "sse41", "--segments", "1")
LOOKED_INTO = {"a Mac's Finder", "git-annex", "CRLF", "a full disk", "a bit of a disk"}
"""Ways after which the copy is inspected too."""


@pytest.mark.parametrize("way", HARMLESS)
def test_c20_a_copy_that_holds_the_run_is_as_good_as_the_run(way, tiny, copy, capsys, kept_devices):
    HARMLESS[way](copy)
    outcome, told = judged(capsys, "verify", copy, tiny)
    assert outcome == "ACCEPT", told["reasons"]
    ignored = told["evidence"]["ignored"]
    assert len(ignored["names"]) <= 20
    assert ("ignored in run, unread: " in told["reasons"][0]["text"]) is (ignored["count"] > 0)
    assert "\x1b" not in json.dumps(told, ensure_ascii=False)
    assert fsck(copy, {lab: key.raw for lab, key in tiny.trust.labs.items()}).problems == []
    if way in LOOKED_INTO:
        assert judged(capsys, "inspect", copy, tiny, *INSPECT)[0] != "REJECT"


@pytest.mark.parametrize("way", DAMAGE)
def test_c20_a_damaged_copy_accuses_nobody_and_says_which_file_and_what_to_do(way, tiny, copy, capsys, kept_devices):
    path, spoil = DAMAGE[way]
    spoil(copy)
    for name, words in (("verify", ()), *((("inspect", INSPECT),) if way in LOOKED_INTO else ())):
        outcome, told = judged(capsys, name, copy, tiny, *words)
        (reason,) = told["reasons"]
        assert (outcome, reason["guard"]) == ("INCONCLUSIVE", "copy")
        assert path in reason["text"]
        assert "take another (`chipwitness run export`, then `run import`)" in reason["text"]
    with off("damaged copies"):
        assert judged(capsys, "verify", copy, tiny)[0] == ("INCONCLUSIVE" if path in _UNSIGNED else "REJECT")


_UNSIGNED = ("manifest.json", "chips")
"""Where the twin does not blame either: nobody signed what lies there, or a link is followed nowhere."""


def test_c20_sixty_ways():
    assert len(HARMLESS) + len(DAMAGE) >= 60


def test_c20_what_the_lab_signed_for_is_the_labs(tiny, copy):
    """The twin: without the signed list the lab could call each lie a damaged copy."""
    assert verify(copy, tiny.trust, now=NOW).outcome is Outcome.ACCEPT
    (copy / LOG).write_bytes((copy / LOG).read_bytes()[:-1])
    hand_over(copy, key_of(tiny))
    verdict = verify(copy, tiny.trust, now=NOW)
    assert verdict.outcome is Outcome.REJECT
    assert "and its lab has signed that it handed it over so" in verdict.reasons[0].text
    with off("what was handed over"):
        assert verify(copy, tiny.trust, now=NOW).outcome is Outcome.INCONCLUSIVE
    (copy / CHECKPOINT).unlink()  # what the list has otherwise, befell the copy
    hand_over(tiny.run, key_of(tiny))
    os.replace(export_path(tiny.run), export_path(copy))
    assert verify(copy, tiny.trust, now=NOW).outcome is Outcome.INCONCLUSIVE


def test_c20_another_labs_list_changes_nothing(tiny, copy):
    (copy / LOG).unlink()
    rival = SigningKey.generate(bytes(32))
    trust = replace(tiny.trust, labs={"another": rival.verifying, **tiny.trust.labs})
    for key, outcome in ((rival, Outcome.INCONCLUSIVE), (key_of(tiny), Outcome.REJECT)):
        hand_over(copy, key)
        assert verify(copy, trust, now=NOW).outcome is outcome


def test_c20_export_and_import(tiny, tmp_path, capsys, kept_devices):
    archive, copy = tmp_path / "a.tar", tmp_path / "copy"
    trust = tiny.run.with_name("run.trust.json")
    code, said = command(capsys, "run", "export", tiny.run, "--out", archive)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    assert (code, digest in said) == (0, True)
    assert command(capsys, "run", "export", tiny.run, "--out", archive)[0] == 2
    code, said = command(capsys, "run", "import", archive, "--out", copy, "--trust", trust, "--sha256", "00")
    assert (code, copy.exists()) == (3, False)
    code, said = command(capsys, "run", "import", archive, "--out", copy, "--trust", trust, "--sha256", digest)
    assert code == 0, said
    names = {path.relative_to(tiny.run) for path in tiny.run.rglob("*")}
    assert names == {path.relative_to(copy) for path in copy.rglob("*")}
    assert judged(capsys, "verify", copy, tiny)[0] == "ACCEPT"
    assert judged(capsys, "inspect", copy, tiny, *INSPECT)[0] == "ACCEPT"
    assert command(capsys, "run", "import", archive, "--out", copy, "--trust", trust)[0] == 2
    with tarfile.open(archive) as read:  # any program unpacks it
        assert {member.name for member in read} >= {"export.json", "manifest.json", LOG}
    (copy / LOG).unlink()
    assert command(capsys, "run", "export", copy)[0] == 2  # who is no lab signs for nothing


def hostile(archive, member: tarfile.TarInfo, content: bytes = b"") -> bytes:
    """The archive with another member in front of its end."""
    return archive.read_bytes()[:-1024] + member.tobuf(tarfile.GNU_FORMAT) + content + bytes(-len(content) % 512 + 1024)


def test_c20_an_archive_holds_files_of_a_run_and_nothing_else(tiny, tmp_path, capsys):
    archive, bad = tmp_path / "a.tar", tmp_path / "bad.tar"
    export_run(RunFolder(tiny.run, key_of(tiny).verifying), key_of(tiny), archive)
    members = []
    for name in ("../out", "/tmp/out", "stranger.txt", "chips/../../out", "programs/x", LOG):
        members.append(tarfile.TarInfo(name))
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE, b"x", b"L"):
        member = tarfile.TarInfo("metadata.json")
        member.type, member.linkname = kind, "/etc/passwd" if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
        members.append(member)
    whole = archive.read_bytes()
    flips = [
        whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(600, len(whole) - 1024, len(whole) // 60)
    ]
    contents = [hostile(archive, member) for member in members]
    contents += [whole[:-1024], whole[: len(whole) // 2], whole[:100], b"", whole + b"x", whole[1024:]]
    for content in contents:
        bad.write_bytes(content)
        with pytest.raises(EvidenceError):
            run_import(bad, tiny, tmp_path / "copy")
    harmless = 0
    for content in flips:
        bad.write_bytes(content)
        try:
            run_import(bad, tiny, tmp_path / "copy")
        except EvidenceError:
            continue
        harmless += 1  # in the padding, or a date in a header
        shutil.rmtree(tmp_path / "copy")
        export_path(tmp_path / "copy").unlink()
    assert harmless < len(flips) // 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar", "bad.tar"]
    assert not (tmp_path.parent / "out").exists()


def run_import(archive, recorded, out):
    return import_run(archive, recorded.trust.labs, out)


@pytest.fixture
def goes_on(record_loop, tmp_path):
    """A run's folder as it was after each of its steps: older states are released on the way."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    states = []

    def body(model, optimizer, batch):
        optimizer.zero_grad()
        model(batch).square().sum().backward()
        optimizer.step()

    def keep(recorder, step):
        states.append(shutil.copytree(recorder.folder, tmp_path / f"state{step}"))

    made = record_loop(
        model, torch.optim.SGD(model.parameters(), lr=0.1), list(torch.randn(8, 2, 3)), body, before=keep,
        checkpoint_every=1, keep=1, chips=1,
    )  # fmt: skip
    made.run.with_name("run.trust.json").write_text(json.dumps(made.trust.to_json()))
    return made, states


def put(state, run) -> None:
    """The lab has gone on: the folder holds what it held later."""
    shutil.rmtree(run)
    shutil.copytree(state, run)


@pytest.mark.parametrize("name", ["verify", "inspect", "fsck", "run stats"])
def test_c21_a_run_that_is_recorded_meanwhile_is_not_finished(name, goes_on, tmp_path, capsys, monkeypatch):
    made, states = goes_on
    run, trust = shutil.copytree(states[3], tmp_path / "run"), made.run.with_name("run.trust.json")
    words = {"verify": WORDS, "inspect": (*WORDS, *INSPECT)}.get(name, ())
    code, said = command(capsys, *name.split(), run, "--trust", trust, *words)
    assert (code, "not finished" in said) == (3 if words else 0, False)
    asked = []

    def later(*given):
        asked.append(given)
        if len(asked) == 1:
            put(states[7], run)

    where = "inspector.storage.fsck._Run._check_digest" if name == "fsck" else "monitor.transcript.journal.file_size"
    real = _attribute(where)
    monkeypatch.setattr(where, lambda *given: (later(*given), real(*given))[1])
    code, said = command(capsys, *name.split(), run, "--trust", trust, *words)
    assert code == 3, said
    assert "run is not finished: it changed while it was read" in said


def _attribute(where: str):
    import importlib

    parts = where.split(".")
    at = next(at for at in range(len(parts), 0, -1) if _is_module(".".join(parts[:at])))
    found = importlib.import_module(".".join(parts[:at]))
    for part in parts[at:]:
        found = getattr(found, part)
    return found


def _is_module(name: str) -> bool:
    import importlib.util

    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def test_c21_released_states_of_a_run_that_goes_on(goes_on, tmp_path):
    """Every moment of reading is a moment at which the lab may go on; the twin blames it."""
    made, states = goes_on
    run = tmp_path / "run"
    outcomes: dict[Any, Any] = {}
    for guards in ((), ("damaged copies",)):
        for at in range(12):
            put(states[2], _new(run))
            with pytest.MonkeyPatch.context() as patch, off(*guards):
                asked: list[Any] = []
                for place in ("monitor.transcript.journal.file_size", "monitor.transcript.reader.file_size"):
                    patch.setattr(place, _then(_attribute(place), asked, at, lambda: put(states[7], run)))
                found = verify(run, made.trust, now=NOW).outcome
                outcomes.setdefault(guards, set()).add(found)
    assert outcomes == {(): {Outcome.INCONCLUSIVE}, ("damaged copies",): {Outcome.INCONCLUSIVE, Outcome.REJECT}}


def _new(run):
    run.mkdir(exist_ok=True)
    return run


def _then(real, asked, at, change):
    def call(*given):
        asked.append(given)
        if len(asked) == at + 1:
            change()
        return real(*given)

    return call


class Nodes:
    """A Ray cluster's scheduler, whose nodes have a copy of their own of each run."""

    def __init__(self, answer) -> None:
        self.wanted: dict[Any, Any]
        self.refusals: dict[Any, Any]
        self.answer, self.wanted, self.refusals = answer, {}, {}

    def submit(self, name, job):
        done: Future = Future()
        done.set_result(self.answer(name, job))
        return done


def on_nodes(answer) -> RayPool:
    pool: Any = RayPool.__new__(RayPool)
    pool._scheduler = pool._seats = Nodes(answer)
    pool.prepare = lambda names: (
        pool._seats.wanted.update({name: Future() for name in names})
        or [each.set_result({}) for each in pool._seats.wanted.values()]
    )
    return pool


@pytest.mark.parametrize("wrong", ["cannot be read", "contradicts itself", "reaches another step"])
def test_c25_what_a_node_finds_wrong_is_repeated_here(wrong, tiny, devices, monkeypatch):
    """A node with bad memory or another copy; the twin believes it."""

    def answer(name, job):
        found = devices.run(name, job)
        if wrong == "cannot be read":
            return {**{key: found[key] for key in found if key != "replays"}, "evidence_error": "log was altered"}
        for each in found["replays"]:
            if wrong == "contradicts itself":
                each["contradiction"] = {"step": each["segment"][1] + 1, "text": "the step cannot be executed"}
                each["leaves"] = []
            else:
                each["leaves"][-1]["flop"] += 1
        return found

    monkeypatch.setattr("inspector.replay.ray_pool.run_worker", devices.run)
    settings = Settings(samples=1, seed="s", devices=("sse41",))
    for guards, outcome in (((), Outcome.ACCEPT), (("nodes' findings",), Outcome.REJECT)):
        with off(*guards):
            verdict = inspect([tiny.run], tiny.trust, settings, now=NOW, worker=on_nodes(answer).run)
        assert verdict.outcome is outcome, verdict.reasons


@pytest.fixture
def damaging(make_run, devices, tmp_path):
    """Rounds in which what the lab opens is damaged in the inspectorate's folder."""

    def play(rounds: int, *, to: str = "inspectorate", path: str = "metadata.json", others=()):
        recorded = make_run(steps=2, chips=2)
        world = World.create(tmp_path / "world", LabSide)
        world.join(recorded.trust, {"run": recorded.run})
        for lab in others:
            world.join(others[lab].trust, {lab: others[lab].run})
        settings = Settings(samples=2 + 2 * len(others), seed=None, devices=("sse41",))
        found = []
        for number in range(1, rounds + 1):
            now = STARTED + timedelta(minutes=number)
            steps.announce(world, settings, minutes=1, refusals=0, now=now)
            for lab in ("lab", *others):
                steps.hand(world, lab, now=now)
            steps.reveal(world, now=now)
            for lab in ("lab", *others):
                steps.answer(world, lab, now=now)
            opened = world.folder / "{}" / "openings" / f"{number:04d}" / "lab.run" / path
            if to == "inspectorate":
                os.truncate(str(opened).format(to), 10)
            steps.order(world, now=now)
            for lab in ("lab", *others):
                steps.disclose(world, lab, now=now)
            if to == "cluster":
                os.truncate(str(opened).format(to), 10)
            steps.replay(world, now=now, worker=devices.run)
            found.append(steps.decide(world, now=now).verdict)
        return found

    return play


@pytest.mark.parametrize(("to", "path"), [("inspectorate", "metadata.json"), ("cluster", CHECKPOINT)])
def test_c20_a_damaged_opening_leaves_its_lab_alone_open(damaging, make_run, to, path):
    other = make_run(name="other", lab="other", seed=5, steps=2, chips=2)
    (verdict,) = damaging(1, to=to, path=path, others={"other": other})
    assert verdict.evidence["labs"] == {"lab": "INCONCLUSIVE", "other": "ACCEPT"}, verdict.reasons


@pytest.mark.parametrize(("to", "path"), [("inspectorate", "metadata.json"), ("cluster", CHECKPOINT)])
def test_c20_an_opening_that_is_damaged_again_is_a_refusal(to, path, damaging):
    first, again = damaging(2, to=to, path=path)
    assert first.outcome is Outcome.INCONCLUSIVE
    assert "copy" in {each.guard for each in first.reasons}
    assert again.outcome is Outcome.REJECT
    assert [each.where["lab"] for each in again.reasons if each.guard == "refusal"] == ["lab"]
    assert "damaged again, after it was asked for a second time" in again.reasons[0].text


def test_c20_guard_off_a_lab_hides_behind_damaged_openings(damaging):
    with off("damaged again"):
        assert {each.outcome for each in damaging(2)} == {Outcome.INCONCLUSIVE}


@pytest.mark.parametrize("is_guarded", [True, False])
def test_b19_fsck_reads_no_more_than_a_kind_of_file_may_have(is_guarded, tiny, copy):
    """A lab signs a sparse file of metadata, which takes no room on its disk."""
    size = 24 << 20
    draft = Draft.read(copy, key_of(tiny))
    draft.put(copy, "metadata.json", b"x")
    os.truncate(copy / "metadata.json", 0)
    os.truncate(copy / "metadata.json", size)
    draft.files["metadata.json"] = type(draft.files["metadata.json"]).of(bytes(size))
    draft.sign(copy, key_of(tiny))
    tracemalloc.start()
    with off(*([] if is_guarded else ["lengths in fsck"])):
        problems = fsck(copy, {lab: key.raw for lab, key in tiny.trust.labs.items()}).problems
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    said = f"metadata.json is signed as {size} bytes long, which is too long"
    assert (said in problems, peak > size) == (is_guarded, not is_guarded)


def test_b19_a_file_that_shrinks_is_a_line(tiny, copy, monkeypatch):
    real = _attribute("inspector.storage.fsck._require_plain")

    def shrinking(path, folder):
        real(path, folder)
        if path.name == "00000001.safetensors":
            shrunk.append(path)

    shrunk: list = []
    monkeypatch.setattr("inspector.storage.fsck._require_plain", shrinking)
    real_content = _attribute("inspector.storage.fsck._content")

    def content(path, most):
        if path in shrunk:
            os.truncate(path, 100)
        return real_content(path, most)

    monkeypatch.setattr("inspector.storage.fsck._content", content)
    problems = fsck(copy, {lab: key.raw for lab, key in tiny.trust.labs.items()}).problems
    assert problems == ["checkpoints/00000001.safetensors does not have the signed digest"]


def test_an_export_of_a_damaged_folder_is_refused(tiny, copy, tmp_path):
    (copy / LOG).write_bytes(b"")
    with pytest.raises(Damaged, match=r"log\.bin"):
        export_run(RunFolder(copy, key_of(tiny).verifying), key_of(tiny), tmp_path / "a.tar")
    assert not (tmp_path / "a.tar").exists()
