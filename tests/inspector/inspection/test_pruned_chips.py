"""Chips that let old records go for a checkpoint: a later inspection goes on from that one, and from no other."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest

from firmware_sim import (
    BIRTH,
    MailboxError,
    RecordKind,
    collect_evidence,
    decode_epoch_keys,
    encode_epoch_keys,
    parse_log,
)
from firmware_sim.errors import DeviceError, EvidenceError
from firmware_sim.evidence import NEWBORN, SigningKey, canonical, open_acceptance, seal_acceptance
from inspector.inspection.casefile import CaseFile
from inspector.inspection.checkpoints import sign_checkpoints
from inspector.inspection.commits import CommitOrder, HeldResults, SnapshotMoment
from inspector.inspection.guards import Guard, Settings
from inspector.inspection.inspection import inspect, verify
from inspector.inspection.memory import remember
from inspector.inspection.sources import Past, Sources
from inspector.inspection.transcripts import open_run, read_transcript
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Findings, Outcome
from inspector.rules.judgement import apply_rules
from inspector.rules.rule_files import read_rules
from monitor.lab import pruning
from monitor.lab.evidence import LiveChips, open_desk
from monitor.lab.host import Host
from monitor.lab.pruning import prune_chip, prune_powered
from monitor.lab.simulated_lab import SimulatedLab, lab_path
from monitor.recording.recipes import resume
from monitor.replay.ledger import Ledger
from monitor.transcript.layout import CHIP_CHECKPOINT, CHIP_FILES, chip_path
from tests.conftest import Recorded
from tests.guards import off

ACCEPT, REJECT, INCONCLUSIVE = Outcome.ACCEPT, Outcome.REJECT, Outcome.INCONCLUSIVE
SETTINGS = Settings(samples=2, seed="x", devices=("sse41",), segments=1)
RUN = {"steps": 4, "chips": 2, "checkpoint_every": 2}
CHIP = "lab-chip-0000"
LAB = SigningKey.generate(b"l" * 32)
FILE = "checkpoint.json"


def key_of(recorded):
    """The key of the simulated inspectorate whom the chips obey."""
    return SimulatedLab.inspectorate_key(SimulatedLab.read_config(lab_path(recorded.run)))


def texts(verdict):
    return " ".join(reason.text for reason in verdict.reasons)


def no_device(name, job):
    raise DeviceError("no device")


def look(first, *others, worker=no_device, ask=None, answers=(), memory=None, case=None):
    trust = (others or (first,))[-1].trust
    runs = [first.run, *(each.run for each in others)]
    sources, past = Sources(ask=ask, answers=answers), Past(memory=memory)
    return inspect(runs, trust, SETTINGS, now=first.now, worker=worker, sources=sources, past=past, case=case)


def pruned(recorded, folder, worker, *, ask=None, memory=None):
    """Inspect a run, sign checkpoints, and let its chips go by them; the verdict."""
    case = CaseFile()
    verdict = look(recorded, worker=worker, ask=ask, case=case, memory=memory)
    assert verdict.outcome is ACCEPT, verdict.reasons
    signed = sign_checkpoints(folder, verdict, case.prunable, key_of(recorded))
    assert set(signed) == set(recorded.trust.chips)
    for chip, size in signed.items():
        start, free = prune_chip(lab_path(recorded.run), chip, (folder / chip / FILE).read_bytes())
        assert start == size
        assert free > 0
    return verdict


@pytest.fixture(scope="module")
def world(record, devices, tmp_path_factory):
    """Two runs on the same chips, which were pruned in between; and copies of the chips' folder before and after."""
    place = tmp_path_factory.mktemp("pruned")
    first = record(place / "first", **RUN)
    shutil.copytree(lab_path(first.run) / "chips", place / "whole")
    memory = remember({}, pruned(first, place / "checkpoints", devices.run))
    for name in ("chips", "checkpoints"):
        shutil.copytree(lab_path(first.run) / name, place / f"kept-{name}")
    second = record(place / "second", after=first.run, **{**RUN, "seed": 6})
    return place, first, second, memory


@pytest.fixture
def again(world, tmp_path):
    """A copy of the first run's lab with its chips as they had just been pruned, for another run."""
    place, first, _, _ = world
    lab = tmp_path / "first.lab"
    shutil.copytree(lab_path(first.run), lab, ignore=shutil.ignore_patterns("chips", "checkpoints"))
    for name in ("chips", "checkpoints"):
        shutil.copytree(place / f"kept-{name}", lab / name)
    shutil.copy(first.run.with_name("first.trust.json"), tmp_path)
    return replace(first, run=tmp_path / "first")


def test_an_honest_chip_that_was_pruned_is_accepted(world, devices):
    _, first, second, memory = world
    records = parse_log((second.run / chip_path(CHIP, "log.bin")).read_bytes())
    assert records[0].counter > 0
    assert (second.run / chip_path(CHIP, CHIP_CHECKPOINT)).is_file()
    verdict = look(second, worker=devices.run, memory=memory)
    assert verdict.outcome is ACCEPT, verdict.reasons
    assert "the logs of 2 drawn chips begin after checkpoints that an inspectorate signed" in texts(verdict)
    assert verdict.evidence["extended_chips"] == sorted(memory)
    for report in verdict.evidence["chips"]:
        assert report["log_start"] == memory[report["chip"]].size
    whole = look(first, worker=devices.run).evidence["draws"]
    assert verdict.evidence["draws"]["expected"] > whole["expected"], "what was counted before the pruning counts on"
    assert verdict.evidence["draws"]["demanded"] >= whole["demanded"]
    assert look(first, second, worker=devices.run, memory=memory).outcome is ACCEPT
    assert look(second, worker=devices.run, ask=LiveChips([lab_path(second.run)]).ask).outcome is ACCEPT
    assert verify(second.run, second.trust, now=second.now).outcome is ACCEPT
    assert verify(first.run, first.trust, now=first.now).outcome is ACCEPT


def test_nothing_is_signed_where_nothing_was_accepted(world, tmp_path):
    _, first, second, _ = world
    case = CaseFile()
    verdict = look(second, case=case)
    assert verdict.outcome is INCONCLUSIVE
    assert case.prunable
    assert sign_checkpoints(tmp_path, verdict, case.prunable, key_of(first)) == {}
    assert not list(tmp_path.iterdir())


def answers(second, alter):
    """Chips that are asked live, and what their lab makes of the answer."""
    live = LiveChips([lab_path(second.run)])

    def ask(chip, nonce, verifier):
        return alter(chip, live.ask(chip, nonce, verifier))

    return ask


def opened(second, chip, files):
    return open_acceptance(files[FILE], chip, second.trust.inspectorates)


def _forged(second, chip, files):
    since, standing = opened(second, chip, files)
    return seal_acceptance(chip, since, standing, LAB)


def _of_another_size(difference, second, chip, files):
    since, standing = opened(second, chip, files)
    return seal_acceptance(chip, replace(since, size=since.size + difference), standing, key_of(second))


def _of_birth(second, chip, files):
    return seal_acceptance(chip, BIRTH, NEWBORN, key_of(second))


def _of_another_chip(second, chip, files):
    since, standing = opened(second, chip, files)
    return seal_acceptance("lab-chip-0009", since, standing, key_of(second))


def _with_another_head(second, chip, files):
    since, standing = opened(second, chip, files)
    return seal_acceptance(chip, replace(since, head=bytes(32)), standing, key_of(second))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda *_: None, "begins at record .*, but there is no checkpoint for what came before"),
        (lambda *_: b"{}", "not a log checkpoint"),
        (_forged, "not signed by any inspectorate in the trust file"),
        (_of_another_chip, "belongs to another chip"),
        (partial(_of_another_size, -1), "its log begins at record .*, but its checkpoint covers the first"),
        (partial(_of_another_size, 1), "its log begins at record .*, but its checkpoint covers the first"),
        (_of_birth, "is at record 0"),
        (_with_another_head, "previous is not the hash of the record before"),
    ],
)
def test_a_log_that_begins_at_no_signed_checkpoint_is_rejected(world, make, said):
    _, _, second, _ = world

    def alter(chip, files):
        made = make(second, chip, files)
        rest = {name: content for name, content in files.items() if name != FILE}
        return rest if made is None else {**rest, FILE: made}

    verdict = look(second, ask=answers(second, alter))
    assert verdict.outcome is REJECT
    with pytest.raises(EvidenceError, match=said):
        raise EvidenceError(texts(verdict))


def test_no_other_transcript_takes_the_place_of_one_that_was_accepted(world, devices):
    """The inspectorate has signed what chips had heard of the first run; the one that is handed over now is another."""
    _, first, second, _ = world

    def alter(chip, files):
        since, standing = opened(second, chip, files)
        other = {run: heard._replace(head=b"x" * 32) for run, heard in standing.runs.items()}
        return {**files, FILE: seal_acceptance(chip, since, replace(standing, runs=other), key_of(second))}

    honest = look(first, second, ask=answers(second, lambda chip, files: files), worker=devices.run)
    assert honest.outcome is ACCEPT, honest.reasons
    verdict = look(first, second, ask=answers(second, alter), worker=devices.run)
    assert verdict.outcome is REJECT
    assert f"accepted run {first.run.name} up to step {RUN['steps']} with another log head" in texts(verdict)


def test_a_lab_that_lets_go_of_what_nobody_accepted_is_rejected(world, devices):
    """It cuts a log itself, and signs that somebody had accepted what is gone."""
    _, _, second, _ = world

    def alter(chip, files):
        records = parse_log(files["log.bin"])
        cut = next(number for number, record in enumerate(records) if record.kind is RecordKind.REGIONS)
        since, standing = (each.extend(records[:cut]) for each in opened(second, chip, files))
        keys = [key for key in decode_epoch_keys(files["epochs.json"]) if key.epoch >= since.epochs - 1]
        return files | {
            FILE: seal_acceptance(chip, since, standing, LAB),
            "log.bin": b"".join(record.to_bytes() for record in records[cut:]),
            "epochs.json": encode_epoch_keys(keys),
        }

    verdict = look(second, ask=answers(second, alter))
    assert verdict.outcome is REJECT
    assert {reason.guard for reason in verdict.reasons[:2]} == {"evidence"}
    assert "not signed by any inspectorate" in texts(verdict)
    with off("signed checkpoints"):
        accepted = look(second, ask=answers(second, alter), worker=devices.run)
    assert accepted.outcome is ACCEPT, accepted.reasons


@pytest.mark.parametrize(("lie", "guard"), [("extra-steps", Guard.METER), ("skip-snapshots", Guard.SCHEDULE)])
def test_a_lie_after_the_pruning_is_found(again, record, tmp_path, lie, guard):
    cheat = record(tmp_path / "cheat", after=again.run, lie=lie, rate=1, lie_step=2, **{**RUN, "seed": 7})
    verdict = look(cheat)
    assert verdict.outcome is REJECT
    assert guard.value in {reason.guard for reason in verdict.reasons}


def test_a_chip_whose_records_were_let_go_and_that_was_put_back_contradicts_itself(world, tmp_path):
    """The copy was made before the pruning, and has a past that nobody accepted."""
    place, first, second, _ = world
    lab = tmp_path / "copy.lab"
    shutil.copytree(lab_path(first.run), lab, ignore=shutil.ignore_patterns("chips", "checkpoints"))
    shutil.copytree(place / "whole", lab / "chips")
    files = LiveChips([lab]).ask(CHIP, second.trust.nonce, second.trust.verifier)
    folder = tmp_path / "answers" / CHIP
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    verdict = look(second, answers=[folder.parent])
    assert verdict.outcome is REJECT
    assert f"chip {CHIP}: its logs in" in texts(verdict)
    assert {Guard.CLONE.value} <= {reason.guard for reason in verdict.reasons}


def copied(world, tmp_path):
    """A copy of the lab as it was before its chips were pruned."""
    place, first, _, _ = world
    lab = tmp_path / "copy.lab"
    shutil.copytree(lab_path(first.run), lab, ignore=shutil.ignore_patterns("chips", "checkpoints"))
    shutil.copytree(place / "whole", lab / "chips")
    return lab, (place / "checkpoints" / CHIP / FILE).read_bytes()


def test_a_chip_takes_no_checkpoint_of_another_hand(world, tmp_path):
    _, first, _, _ = world
    lab, good = copied(world, tmp_path)
    since, standing = open_acceptance(good, CHIP, first.trust.inspectorates)
    for sealed, said in (
        (seal_acceptance(CHIP, since, standing, LAB), "not signed by the inspectorate that it obeys"),
        (seal_acceptance("lab-chip-0001", since, standing, key_of(first)), "belongs to another chip"),
        (seal_acceptance(CHIP, replace(since, busy=0), standing, key_of(first)), "never was"),
    ):
        with pytest.raises((EvidenceError, MailboxError), match=said):
            prune_chip(lab, CHIP, sealed)
    assert not list((lab / "checkpoints" / CHIP).iterdir())
    assert prune_chip(lab, CHIP, good)[0] == since.size
    with pytest.raises(MailboxError, match="never was"):
        prune_chip(lab, CHIP, good)
    assert [path.name for path in (lab / "checkpoints" / CHIP).iterdir()] == [f"{since.size}.json"]


class Killed(BaseException):
    """Stands for the end of the process."""


def test_chips_pruned_in_the_middle_of_a_run(record, devices, tmp_path, monkeypatch):
    """It is killed after three steps, inspected, resumed from its last checkpoint, and inspected again."""
    labs, create, announce = [], SimulatedLab.__init__, Host.announce

    def remembered(self, *args):
        create(self, *args)
        labs.append(self)

    def dying(self, step):
        announce(self, step)
        if step == 1:
            shutil.copytree(run, older.run)
        if step == 3:
            raise Killed

    run = tmp_path / "run"
    older = Recorded(tmp_path / "older", cast(Any, None))
    with monkeypatch.context() as patch:
        patch.setattr(SimulatedLab, "__init__", remembered)
        patch.setattr(Host, "announce", dying)
        with pytest.raises(Killed):
            record(run, **RUN)
    for chip in labs[0].chips:
        chip.cut_power()
    half = Recorded(run, Trust.load([run.with_name("run.trust.json")], [run]))
    live = LiveChips([lab_path(run)])
    verdict = pruned(half, tmp_path / "checkpoints", devices.run, ask=live.ask)
    assert "is unfinished, and this covers its first 3 of 4 steps" in texts(verdict)
    withheld = look(replace(half, run=older.run), ask=live.ask)
    assert withheld.outcome is REJECT
    assert "an earlier inspection accepted step 3 of run older, which lies beyond the head" in texts(withheld)
    resume(run)
    whole = look(half, worker=devices.run)
    assert whole.outcome is ACCEPT, whole.reasons
    assert all(chip["log_start"] for chip in whole.evidence["chips"])


def test_chips_pruned_at_work_between_two_steps(record, devices, tmp_path, monkeypatch):
    """Their memory is attached, and stays so: the next record's work adds to what was counted before the checkpoint."""
    run, announce, seen = tmp_path / "run", Host.announce, []

    def inspected(self, step):
        announce(self, step)
        if step != 2:
            return
        chips = {chip.chip_id: chip for chip in self.lab.chips}

        def ask(chip, nonce, verifier):
            given = collect_evidence(chips[chip], nonce, verifier)
            contents = (given.chain, given.epoch_keys, given.log, given.quote)
            return dict(zip(CHIP_FILES, contents, strict=True))

        here = Recorded(run, Trust.load([run.with_name("run.trust.json")], [run]))
        case = CaseFile()
        seen.append(look(here, worker=devices.run, ask=ask, case=case))
        signed = sign_checkpoints(tmp_path, seen[0], case.prunable, key_of(here))
        for chip in signed:
            prune_powered(self.lab.folder, chips[chip], (tmp_path / chip / FILE).read_bytes())

    monkeypatch.setattr(Host, "announce", inspected)
    whole = record(run, rate=1, **RUN)
    assert seen[0].outcome is ACCEPT, seen[0].reasons
    records = parse_log((run / chip_path(CHIP, "log.bin")).read_bytes())
    assert [each.step for each in records if each.kind is RecordKind.COMMIT] == [3, 4]
    assert RecordKind.REGIONS not in {each.kind for each in records}
    verdict = look(whole, worker=devices.run)
    assert verdict.outcome is ACCEPT, verdict.reasons


def laws_of(transcript, since=BIRTH, standing=NEWBORN):
    needs = {transcript.run.metadata.run_id: transcript.needs(CHIP)}
    return [
        CommitOrder(CHIP, standing),
        SnapshotMoment(CHIP, standing),
        Ledger(CHIP, needs, since, standing),
        HeldResults(CHIP, needs, standing),
    ]


def findings_of(laws, records):
    found = []
    for record in records:
        for law in laws:
            try:
                law.take(record)
            except EvidenceError as error:
                found.append(str(error))
    return found


@pytest.mark.parametrize("change", [{}, {"step": 1}, {"op": 1 << 40}, {"work": None}])
def test_laws_say_of_the_rest_what_they_say_of_a_whole_log(honest, change):
    """From wherever it is cut."""
    findings = Findings()
    transcript = read_transcript(open_run(honest.run, honest.trust), honest.trust, findings, now=honest.now)
    assert transcript is not None
    records = parse_log((honest.run / chip_path(CHIP, "log.bin")).read_bytes())
    assert findings_of(laws_of(transcript), records) == []
    said = 0
    for place, record in enumerate(records):
        more = {name: getattr(record, name) + value for name, value in change.items() if value is not None}
        more |= {"work": record.work + transcript.needs(CHIP).most} if "work" in change else {}
        altered = [*records[:place], replace(record, **more), *records[place + 1 :]]
        whole = findings_of(laws_of(transcript), altered)
        said += len(whole)
        for cut in range(1, place + 1):
            since, standing = BIRTH.extend(records[:cut]), NEWBORN.extend(records[:cut])
            assert findings_of(laws_of(transcript, since, standing), altered[cut:]) == whole, (cut, place)
    assert bool(said) == bool(change)


def test_who_prunes_again_after_a_crash_keeps_the_checkpoint(world, tmp_path, monkeypatch):
    """The chip had let go, and the process died before the file had its name."""
    _, _, second, _ = world
    lab, good = copied(world, tmp_path)

    starts = iter([pruning._start])

    def dying(chip):
        for real in starts:
            return real(chip)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(pruning, "_start", dying)
        with pytest.raises(Killed):
            prune_chip(lab, CHIP, good)
    assert LiveChips([lab]).ask(CHIP, second.trust.nonce, second.trust.verifier)[FILE] == good
    with pytest.raises(MailboxError, match="never was"):
        prune_chip(lab, CHIP, good)
    assert LiveChips([lab]).ask(CHIP, second.trust.nonce, second.trust.verifier)[FILE] == good


def test_no_chip_lets_go_for_a_file_that_nobody_will_take(world, tmp_path):
    """What the chip is shown is in order; what its lab has to hand over beside it is not."""
    _, first, _, _ = world
    lab, good = copied(world, tmp_path)
    since, standing = open_acceptance(good, CHIP, first.trust.inspectorates)
    parts = canonical.decode(good)
    foreign = canonical.decode(seal_acceptance(CHIP, since, standing, LAB))
    later = canonical.decode(seal_acceptance(CHIP, replace(since, head=bytes(32)), standing, key_of(first)))
    other: Any
    for other in ({}, foreign["standing"], later["standing"]):
        with pytest.raises(EvidenceError):
            prune_chip(lab, CHIP, canonical.encode({**parts, "standing": other}))
    assert prune_chip(lab, CHIP, good)[0] == since.size


def test_a_lab_at_work_goes_on_where_a_chip_cannot_be_pruned(world, tmp_path):
    """There is no room for the file; the process that trains says so, and lives."""
    lab, good = copied(world, tmp_path)
    (lab / "checkpoints").write_bytes(b"")
    powered = SimulatedLab.reopen(lab)
    desk = open_desk(powered, tmp_path / "run")
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(prune_chip, lab, CHIP, good)
        try:
            while not asked.done():
                desk.serve()
        finally:
            desk.close()
    with pytest.raises(EvidenceError, match="cannot write"):
        asked.result()
    assert parse_log(powered.chips[0].log_bytes())[0].counter == 0


def test_no_run_is_left_out_of_a_total_because_it_was_accepted_before(world, devices, tmp_path):
    """Of a lab whose chips hold their whole logs, a run that is not handed over is an undeclared one."""
    _, first, second, _ = world
    capped = replace(second, trust=replace(second.trust, maximum_flop=1 << 60))
    alone = look(capped, worker=devices.run)
    assert alone.outcome is INCONCLUSIVE
    assert "was accepted at an earlier inspection and is not handed over, so that its FLOP are not known" in texts(
        alone
    )
    assert look(first, capped, worker=devices.run).outcome is ACCEPT
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\nname = "r"\nkind = "flop"\nper = "lab"\nat_most = 1e18\n')
    for runs, outcome in (((second,), INCONCLUSIVE), ((first, second), ACCEPT)):
        case = CaseFile()
        verdict = look(*runs, worker=devices.run, case=case)
        judged = apply_rules(verdict, read_rules(rules), case, second.trust, SETTINGS, worker=devices.run)
        assert judged.outcome is outcome, judged.reasons
