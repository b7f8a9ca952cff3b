"""Law 8, row C16: two honest labs of other seeds, each of which was asked by a challenge of its own."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from analysis.cli import main
from analysis.commands.runs import trust_path
from firmware_sim.evidence import SigningKey
from inspector.inspection.trust import Trust
from inspector.registry.keyfiles import write_keys
from tests.guards import off
from tests.inspector.bundle.conftest import CLUSTER, INSPECTORATE

pytestmark = pytest.mark.usefixtures("kept_devices")
NOW = ("--now", "2026-01-01T00:30:00Z")


@pytest.fixture
def labs(make_run):
    """Runs of two labs with other seeds, so that their trust files hold other nonces."""
    made = [make_run(lab, lab=lab, seed=seed, steps=2, chips=1, rate=1) for lab, seed in (("alpha", 5), ("beta", 6))]
    assert made[0].trust.nonce != made[1].trust.nonce
    return made


def inspect(labs, *more):
    trust = [word for each in labs for word in ("--trust", str(trust_path(each.run)))]
    draw = ["--samples", "2", "--seed", "x", "--device", "sse41", *NOW]
    return main(["inspect", *(str(each.run) for each in labs), *trust, *draw, *more])


@pytest.mark.parametrize("order", [1, -1])
def test_c16_each_lab_is_judged_by_its_own_challenge(labs, order, capsys):
    assert inspect(labs[::order], "--json") == 0
    found = json.loads(capsys.readouterr().out)["evidence"]
    assert found["labs"] == {"alpha": "ACCEPT", "beta": "ACCEPT"}
    assert len(found["drawn_chips"]) == 2


def test_c16_guard_off_the_second_lab_is_rejected(labs, capsys):
    with off("challenge of each lab"):
        assert inspect(labs) == 1
    assert "has nonce" in capsys.readouterr().out


def test_c16_and_so_is_it_by_whoever_holds_the_bundle(labs, tmp_path, capsys):
    for name, key in (("inspectorate", INSPECTORATE), ("cluster", CLUSTER)):
        write_keys(tmp_path / f"{name}.key", key)
    keys = ["--key", str(tmp_path / "inspectorate.key"), "--cluster-key", str(tmp_path / "cluster.key")]
    bundle = str(tmp_path / "bundle.json")
    assert inspect(labs, *keys, "--bundle", bundle) == 0
    merged = tmp_path / "both.json"
    merged.write_text(json.dumps(Trust.load([trust_path(each.run) for each in labs]).to_json()))
    public = ["--inspectorate", str(tmp_path / "inspectorate.key.pub"), "--cluster", str(tmp_path / "cluster.key.pub")]
    assert main(["verify", bundle, "--trust", str(merged), *public]) == 0
    assert main(["inspect", *(str(each.run) for each in labs), "--trust", str(merged), "--samples", "2", *NOW]) == 0
    assert "says ACCEPT: 2 drawn chips" in capsys.readouterr().out


def test_c16_one_lab_has_one_challenge(labs, tmp_path, capsys):
    """Two files that ask the same lab's chips otherwise: one of them is out of date, and nobody can tell which."""
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**json.loads(trust_path(labs[0].run).read_text()), "nonce": "11" * 32}))
    assert inspect(labs, "--trust", str(other)) == 2
    assert "two trust files disagree about the challenge of lab alpha" in capsys.readouterr().err


@pytest.mark.parametrize(
    "challenges",
    [[], {"alpha": {}}, {"alpha": {"verifier": 1, "nonce": "11" * 32}}, {"alpha": {"verifier": "x", "nonce": "1"}}],
)
def test_a_challenge_of_another_form_is_no_trust_file(labs, tmp_path, challenges, capsys):
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**json.loads(trust_path(labs[0].run).read_text()), "challenges": challenges}))
    assert main(["verify", str(labs[0].run), "--trust", str(other), *NOW]) == 2
    assert "is malformed" in capsys.readouterr().err


def test_a_file_without_chips_states_no_challenge(labs):
    """As of a witness, which lists parties' keys at most."""
    trust = Trust.load([trust_path(labs[0].run)])
    notary, client = (SigningKey.generate(bytes([number]) * 32).verifying for number in (1, 2))
    for parties in ({}, trust.labs):
        other = Trust.of_parties(parties, client, {"notary": notary})
        for both in (trust.merge(other), other.merge(trust)):
            assert both.challenge_of("alpha") == trust.challenge_of("alpha") != other.challenge_of("alpha")
            assert both.chip_trust == trust.chip_trust
            raised = replace(other, chip_trust=replace(other.chip_trust, minimum_security_version=9))
            assert trust.merge(raised).chip_trust.minimum_security_version == 9, "what it does state counts"
            assert (both.witnesses, both.inspectorates) == ({"notary": notary}, trust.inspectorates | {client})
