"""Law 8, row C19: who sells a chip answers for its records up to there, who buys it for those from there on.

Each owner is asked about its own span and blamed for that alone; and each busy tick of it is explained by a run that
this owner declares (law 2).
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace

import pytest

from analysis.cli import main
from firmware_sim import Draws, LogPosition
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import SigningKey
from inspector import registry as reg
from inspector.bundle.builder import bundle_of
from inspector.bundle.checker import check_bundle
from inspector.bundle.replays import signing
from inspector.inspection.casefile import CaseFile
from inspector.inspection.memory import remember
from inspector.inspection.verdict import Outcome
from inspector.registry.errors import InvalidStatement
from inspector.rounds import steps
from inspector.rounds.world import World
from inspector.rules.judgement import apply_rules
from inspector.rules.rule_files import read_rules
from monitor.lab.rounds import LabSide
from monitor.lab.simulated_lab import SimulatedLab, lab_path
from tests.attacks.chip_trade import CHIP, SETTINGS, Trade
from tests.conftest import NOW
from tests.guards import off
from tests.measurements.ownership import history

ACCEPT, REJECT, INCONCLUSIVE = Outcome.ACCEPT, Outcome.REJECT, Outcome.INCONCLUSIVE


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("kept")


@pytest.fixture
def trade(tmp_path, kept):
    return Trade(tmp_path, kept)


@pytest.fixture
def outcomes(trade, devices):
    """What an inspection of these labs says of each, and inspections of each alone where ``alone`` is set."""

    def outcomes(*labs, alone=False, **options):
        said = trade.inspect(*labs, worker=devices.run, **options).evidence["labs"]
        for lab in labs if alone else ():
            assert trade.inspect(lab, worker=devices.run, **options).outcome.value == said[lab]
        return {lab: Outcome(outcome) for lab, outcome in said.items()}

    return outcomes


def texts(verdict):
    return " ".join(reason.text for reason in verdict.reasons)


def test_who_trains_and_sells_and_who_buys_and_trains_are_both_accepted(trade, outcomes):
    trade.train()
    trade.pass_on("two")
    trade.train()
    assert outcomes("one", "two", alone=True) == {"one": ACCEPT, "two": ACCEPT}


def test_the_row_by_the_command_line(tmp_path, capsys, monkeypatch, kept_devices):
    """Lab-1 trains and sells, both sign, lab-2 trains; each is inspected, and the buyer looks before it signs."""
    monkeypatch.setattr("inspector.devices.enter", lambda name: None)
    monkeypatch.chdir(tmp_path)

    def call(words, code=0):
        capsys.readouterr()
        given = main([*words.split()])
        captured = capsys.readouterr()
        assert given == code, captured.out + captured.err
        return captured.out

    told = "train --preset digits-cnn --steps 2 --seed 5 --chips 1 --snapshot-rate 1 --registry world"
    call(f"{told} --out one")
    config = SimulatedLab.read_config(lab_path(tmp_path / "one"))
    for lab in ("lab-1", "lab-2"):
        reg.write_keys(tmp_path / lab, SimulatedLab.lab_key(replace(config, lab=lab)))
    db, chip, writes = "world/registry.db", "lab-1-chip-0000", "--registrar-key world/registrar.key"
    call(f"registry enrol {db} --party lab-2 --role owner --public lab-2.pub {writes}")
    sale = f"registry transfer {db} --from lab-1 --to lab-2 --chip {chip} --key lab-1"
    assert main([*f"{sale} --counter-key lab-2 {writes}".split()]) == 1
    assert f"chip {chip}: its records must be distinguished from those of its next owner" in capsys.readouterr().err
    asked = json.loads(call(f"registry challenge {db} --chip {chip} --json"))
    question = f"--verifier {asked['verifier']} --nonce {asked['nonces'][chip]}"
    call(f"chip challenge one.lab {question} --out sold")
    call(f"{sale} --evidence sold --out sale")
    assert main(["registry", "accept", "sale", "--key", "lab-2", "--out", "signed"]) == 2
    call("chip challenge one.lab --out bought")
    call("registry accept sale --key lab-2 --evidence bought --out signed")
    call(f"registry submit {db} signed --evidence sold {writes}")
    call(f"registry publish {db} {writes}")
    assert "are lab-1's (transfer)" in call(f"registry show {db} {chip}")
    call(f"{told} --after one --lab lab-2 --out two")
    for lab, run in (("lab-1", "one"), ("lab-2", "two")):
        asks = f"--registrar world/registrar.key.pub --lab {lab} --challenge {run}.trust.json"
        assert (
            "are lab-1's (transfer)" in call(f"registry trust {db} {asks} --deposits kept --out {lab}.json")
            or run == "two"
        )
        said = call(f"inspect {run} --trust {lab}.json --samples 1 --device sse41 --answers kept")
        assert f"chip {chip} changed hands" in said
    with off("spans of owners"):
        call("inspect two --trust lab-2.json --samples 1 --device sse41", 1)


def test_the_verdict_and_its_bundle_say_whose_records_they_are(trade, devices):
    trade.train()
    trade.pass_on("two")
    trade.train()
    key, cluster = SigningKey.generate(), SigningKey.generate()
    for lab, says in (("one", "its records from 0 to 19 are one's"), ("two", "its records from 19 on are two's")):
        case = CaseFile()
        verdict = trade.inspect(lab, worker=signing(devices.run, cluster), case=case)
        assert verdict.outcome is ACCEPT, verdict.reasons
        assert f"chip {CHIP} changed hands: {says}" in texts(verdict)
        trust = replace(trade.trust(lab), clusters=frozenset({cluster.verifying}))
        trust = replace(trust, inspectorates=trust.inspectorates | {key.verifying})
        data = bundle_of(case, verdict, trust, SETTINGS, key)
        assert check_bundle(data, trust).outcome is ACCEPT


def test_the_seller_who_hides_work_and_sells_is_blamed(trade, outcomes, devices):
    trade.train()
    trade.train(hidden=True)
    trade.pass_on("two")
    trade.train()
    assert outcomes("one", "two", alone=True) == {"one": REJECT, "two": ACCEPT}
    trade.refuses.add("two")
    verdict = trade.inspect("one", "two", worker=devices.run)
    assert verdict.evidence["labs"] == {"one": "REJECT", "two": "REJECT"}
    found = {(reason.where["lab"], reason.text.partition(": ")[2]) for reason in verdict.reasons}
    assert ("one", "this record belongs to a run that was not declared") in found
    assert {text for lab, text in found if lab == "two"} == {"one-chip-0000 is not shown"} or len(found) > 1
    with off("what the registry keeps"):
        assert trade.inspect("one", worker=devices.run).outcome is not REJECT


def test_the_buyer_who_hides_work_is_blamed(trade, outcomes):
    trade.train()
    trade.pass_on("two")
    trade.train()
    trade.train(hidden=True)
    assert outcomes("one", "two") == {"one": ACCEPT, "two": REJECT}


def test_sold_back_and_sold_on(trade, outcomes):
    trade.train()
    trade.pass_on("two")
    trade.train()
    trade.pass_on("one")
    trade.train()
    assert outcomes("one", "two") == {"one": ACCEPT, "two": ACCEPT}
    trade.pass_on("three")
    trade.train(hidden=True)
    assert outcomes("one", "two", "three") == {"one": ACCEPT, "two": ACCEPT, "three": REJECT}


def test_a_chip_is_not_sold_twice(trade):
    trade.train()
    evidence = trade.answer()
    trade.pass_on("two", evidence)
    with pytest.raises(InvalidStatement, match="held by two, not by one"):
        trade.pass_on("three", evidence, sender="one")


def test_a_position_is_neither_early_nor_late(trade):
    """What was quoted before the seller's hidden work, and what the buyer can see of it."""
    trade.train()
    early = trade.answer()
    trade.train(hidden=True)
    position = reg.positions_in([CHIP], early)[0]
    with pytest.raises(EvidenceError, match="worked after its signed position"):
        reg.check_in_hand(CHIP, position, trade.answer()[CHIP])
    with trade.registry as registry:
        reg.publish(registry)
    stale = trade.answer(nonce=b"\1" * 32)
    with pytest.raises(InvalidStatement, match="does not answer a challenge of this registry's newest views"):
        trade.pass_on("two", stale)
    reg.check_in_hand(CHIP, reg.positions_in([CHIP], stale)[0], trade.answer()[CHIP])
    with off("fresh positions"):
        trade.pass_on("two", stale)


def test_an_old_transfer_without_a_position_blames_nobody(trade, outcomes, devices):
    trade.train()
    evidence = trade.answer()
    with off("positions of transfers"):
        trade.pass_on("two", {})
    trade.train()
    assert outcomes("one", "two") == {"one": INCONCLUSIVE, "two": INCONCLUSIVE}
    assert "both owners must sign that transfer again, with 'registry transfer --evidence'" in texts(
        trade.inspect("two", worker=devices.run)
    )
    trade.pass_on("two", evidence, sender="one")
    assert outcomes("one", "two") == {"one": ACCEPT, "two": ACCEPT}


def test_lost_found_and_returned(trade, outcomes, devices):
    trade.train()
    trade.claim(reg.ClaimKind.LOST, trade.answer())
    assert outcomes("one") == {"one": ACCEPT}
    with pytest.raises(InvalidStatement, match="must say so now"):
        trade.claim(reg.ClaimKind.FOUND)
    trade.claim(reg.ClaimKind.FOUND, trade.answer())
    trade.train()
    assert outcomes("one") == {"one": ACCEPT}
    trade.pass_on("fab")
    assert outcomes("one") == {"one": ACCEPT}


def test_who_uses_a_chip_that_it_says_is_lost_is_not_accepted(trade, outcomes, devices):
    trade.train()
    trade.claim(reg.ClaimKind.LOST, trade.answer())
    trade.train(hidden=True)
    trade.claim(reg.ClaimKind.FOUND, trade.answer())
    assert outcomes("one") == {"one": INCONCLUSIVE}
    assert "worked while no lab held it" in texts(trade.inspect("one", worker=devices.run))


def test_who_loses_a_chip_at_a_position_before_what_was_seen_of_it_is_not_accepted(trade, devices):
    trade.train()
    early = trade.answer()
    trade.train(hidden=True)
    seen = trade.inspect("one", worker=devices.run)
    assert seen.outcome is REJECT
    memory = remember({}, seen)
    trade.claim(reg.ClaimKind.LOST, early)
    found = trade.inspect("one", worker=devices.run, memory=memory)
    assert found.outcome is INCONCLUSIVE
    assert "an earlier inspection saw it at record" in texts(found)
    with off("what was seen of lost chips"):
        assert trade.inspect("one", worker=devices.run, memory=memory).outcome is ACCEPT


def test_who_loses_a_chip_where_it_was_seen_last_is_accepted(trade, devices):
    trade.train()
    answer = trade.answer()
    trade.claim(reg.ClaimKind.LOST, answer)
    size, head = (getattr(reg.positions_in([CHIP], answer)[0], name) for name in ("size", "head"))
    memory = {CHIP: LogPosition(counter=size - 1, size=size, head=head, time=0)}
    assert trade.inspect("one", worker=devices.run, memory=memory).outcome is ACCEPT


def test_a_chip_that_is_revoked(trade, outcomes):
    trade.train()
    trade.pass_on("two")
    trade.train()
    trade.revoke()
    assert outcomes("one", "two") == {"one": ACCEPT, "two": INCONCLUSIVE}


def test_the_deposit_that_is_missing_or_altered_accuses_nobody(trade, outcomes, devices):
    trade.train()
    trade.pass_on("two")
    trade.train()
    assert outcomes("one", "two", deposits=False) == {"one": INCONCLUSIVE, "two": ACCEPT}
    given = trade.trust("one")
    [log] = trade.place.glob("deposits/*/log.bin")
    log.write_bytes(log.read_bytes()[:-1] + b"x")
    trade.trust = lambda *labs: given
    verdict = trade.inspect("one", worker=devices.run)
    assert verdict.outcome is INCONCLUSIVE
    assert "the copy of what the registry keeps of this chip is damaged" in texts(verdict)


def played(folder, trade, devices):
    """What a round says of who sold the chip and who bought it."""
    world = World.create(folder, LabSide)
    trust = replace(trade.trust("one", "two"), clusters=frozenset())
    for lab in ("one", "two"):
        world.join(trust, {f"of-{lab}": trade.declared[lab][0]})
    shutil.copytree(trade.place / "deposits", world.folder / "registry" / "deposits")
    steps.announce(world, SETTINGS, minutes=1, refusals=0, now=NOW)
    for act, everybody in ((steps.hand, steps.reveal), (steps.answer, steps.order), (steps.disclose, None)):
        for lab in ("one", "two"):
            act(world, lab, now=NOW)
        _ = everybody and everybody(world, now=NOW)
    steps.replay(world, now=NOW, worker=devices.run)
    decided = steps.decide(world, now=NOW)
    assert check_bundle(decided.bundle.read_bytes(), world.trust()).evidence["verifies"]
    return decided.verdict.evidence["labs"]


def test_a_round_looks_at_what_a_sold_chip_did(tmp_path, devices):
    """Steps of which only snapshots before the sale are known are asked for, and opened, too."""
    (tmp_path / "trade").mkdir()
    trade = Trade(tmp_path / "trade", tmp_path, every=1)
    trade.train()
    trade.pass_on("two")
    trade.train()
    assert played(tmp_path / "honest", trade, devices) == {"one": "ACCEPT", "two": "ACCEPT"}
    with off("what labs know that they sold"), pytest.raises(EvidenceError, match="asks for more of one"):
        played(tmp_path / "unknown", trade, devices)


def test_who_sells_a_chip_with_hidden_work_is_rejected_by_a_round(trade, devices, tmp_path):
    trade.train()
    trade.train(hidden=True)
    trade.pass_on("two")
    trade.train()
    assert played(tmp_path / "world", trade, devices) == {"one": "REJECT", "two": "ACCEPT"}
    with off("deposits of rounds"):
        assert played(tmp_path / "twin", trade, devices) == {"one": "INCONCLUSIVE", "two": "ACCEPT"}


def test_a_chip_that_is_sold_after_a_round_is_the_buyers_in_the_next(trade, devices, tmp_path):
    trade.train()
    world = World.create(tmp_path / "world", LabSide)

    def join(*labs):
        world.join(
            replace(trade.trust(*labs), clusters=frozenset()),
            {f"of-{lab}": run for lab, (run,) in trade.declared.items()},
        )

    join("one")
    steps.announce(world, SETTINGS, minutes=1, refusals=0, now=NOW)
    trade.pass_on("two")
    with pytest.raises(CallerError, match="decide that round first"):
        join("one", "two")
    late = steps.past(world, "results", NOW)
    steps.hand(world, "one", now=NOW)
    steps.reveal(world, now=late)
    steps.order(world, now=late)
    steps.decide(world, now=late)
    trade.train()
    with pytest.raises(CallerError, match="disagree about chip"):
        join("two")
    join("one", "two")
    assert world.trust().chips_of("two") == [CHIP]
    assert not world.trust().chips_of("one")


def test_a_snapshot_inside_of_a_sellers_step_is_the_sellers(trade, devices):
    """What the chip held within a step is compared with a replay, long after it was sold."""
    run = hashlib.sha256((trade.train() / "manifest.json").read_bytes()).hexdigest()
    trade.pass_on("two")
    trade.train()

    def worker(device, job):
        found = devices.run(device, job)
        for replay in found["replays"] if job["manifest"] == run else ():
            states = [state for *_, state in replay["inside"]]
            replay["inside"] = [[*place, states[0]] for *place, _ in replay["inside"]]
        return found

    assert trade.inspect("one", "two", worker=worker).evidence["labs"] == {"one": "REJECT", "two": "ACCEPT"}


@pytest.mark.parametrize(("place", "lab"), [(0, "two"), (1, "one")])
def test_snapshots_that_were_suppressed_count_against_whoever_had_the_chip(trade, devices, monkeypatch, place, lab):
    trade.train()
    trade.pass_on("two")
    trade.train()
    real, asked = Draws.chance, []

    def chance(draws, rate):  # as if that span, of the two, had been altered
        asked.append(draws)
        return 1e-30 if len(asked) == place + 1 else real(draws, rate)

    monkeypatch.setattr(Draws, "chance", chance)
    found = trade.inspect("one", "two", worker=devices.run).evidence
    assert found["labs"] == {"one": "ACCEPT", "two": "ACCEPT"} | {lab: "REJECT"}
    assert found["draws"]["demanded"] == sum(draws.due for draws in asked[:2])


def test_a_rule_on_meters_counts_what_a_sold_chip_signed(trade, devices, tmp_path):
    trade.train()
    trade.train(hidden=True)
    trade.pass_on("two")
    trade.train()
    (tmp_path / "rules.toml").write_text('[[rule]]\nname = "m"\nkind = "meter"\nat_most = 1\n')
    case, trust = CaseFile(), trade.trust("one", "two")
    verdict = trade.inspect("one", "two", worker=devices.run, case=case)
    rules = read_rules(tmp_path / "rules.toml")
    found = apply_rules(verdict, rules, case, trust, SETTINGS, worker=devices.run).evidence["rules"]["found"]["m"]
    said = {tuple(each["labs"]): (each["result"], each["chip"]) for each in found}
    assert said == {("one",): ("fail", CHIP), ("two",): ("undecided", CHIP)}


def test_nobody_loses_a_chip_before_it_was_theirs(trade):
    trade.train()
    early = trade.answer(nonce=b"\2" * 32)
    trade.pass_on("two")
    with pytest.raises(InvalidStatement, match="does not continue from the record at which it changed hands before"):
        trade.claim(reg.ClaimKind.LOST, early)


def test_random_histories_name_whoever_lied_and_nobody_else(tmp_path, kept, devices):
    """Some of those that ``python -m tests.measurements.ownership`` plays."""
    for seed in (1_000_005, 1_000_021):
        (tmp_path / str(seed)).mkdir()
        found = history(tmp_path / str(seed), kept, seed, devices.run)
        assert not found["wrong"], found
        assert not found["undecided"], found
