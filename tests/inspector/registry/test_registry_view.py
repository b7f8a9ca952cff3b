"""An inspector who goes by the registry's signed view: each drawn chip is proven, and is who the registry says."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from fractions import Fraction

import pytest

from analysis.registration import DATABASE, REGISTRAR_KEY, register_lab, registered_trust
from firmware_sim.errors import CallerError
from firmware_sim.evidence import Digest, SigningKey
from inspector import registry as reg
from inspector.inspection.guards import Guard, Settings
from inspector.inspection.inspection import inspect, verify
from inspector.inspection.registry_trust import trust_of
from inspector.inspection.sources import Sources
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome
from monitor.lab.simulated_lab import SimulatedLab, lab_path
from tests.guards import blind, off

SETTINGS = Settings(samples=3, seed="x", devices=("sse41",))


@pytest.fixture(scope="module")
def world(honest, tmp_path_factory):
    """The registry's folder and the trust of its view, for the honest run."""
    folder = tmp_path_factory.mktemp("registry") / "world"
    return folder, registered_trust(folder, SimulatedLab.read_config(lab_path(honest.run)), honest.trust)


@pytest.fixture
def judge(honest, devices):
    def judge(trust, *, off=(), samples=3):
        settings = replace(SETTINGS, samples=samples)
        with blind(*off):
            return inspect([honest.run], trust, settings, now=honest.now, worker=devices.run)

    return judge


def altered(trust, change) -> Trust:
    data = copy.deepcopy(trust.to_json())
    change(data)
    return Trust.from_json(data, "here")


def view_again(folder, trust, labs=("lab",)):
    """The trust of the newest view in a registry's folder."""
    key = reg.load_public(folder / f"{REGISTRAR_KEY}.pub")
    with reg.Registry.open(folder / DATABASE) as registry:
        view = reg.read_view(registry, registrar=key)
    found = trust_of(view, registrar=key, labs=labs, verifier=trust.verifier, nonce=trust.nonce)
    return replace(found, inspectorates=trust.inspectorates, countersigned=trust.countersigned)


def test_the_verdict_says_who_listed_the_chips(honest, world, judge):
    folder, trust = world
    size = trust.registry.publication.size
    assert trust.chips == honest.trust.chips
    listed = f"chips as the registry's signed view of size {size} lists them"
    verdict = judge(trust)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    assert listed in verdict.reasons[0].text
    assert verdict.evidence["chips_listed"] == listed
    assert listed in verify(honest.run, trust, now=honest.now).reasons[0].text
    plain = judge(honest.trust)
    assert "chips as the trust file lists them" in plain.reasons[0].text
    assert (folder / DATABASE).is_file()


def test_the_trust_file_is_read_back_and_merged(honest, world):
    _, trust = world
    assert Trust.from_json(json.loads(json.dumps(trust.to_json())), "here") == trust
    assert trust.merge(trust) == trust
    both = trust.merge(honest.trust)
    assert both == honest.trust.merge(trust)
    assert both == replace(trust, chip_trust=replace(trust.chip_trust, clocks=honest.trust.chip_trust.clocks))
    more = honest.trust.to_json() | {"chips": {**honest.trust.chips, "lab-chip-0009": "lab"}}
    with pytest.raises(CallerError, match="names a registry but holds no proof of chip lab-chip-0009"):
        trust.merge(Trust.from_json(more, "here"))


def _entry(data, **values):
    data["registry"]["chips"]["lab-chip-0001"]["entry"].update(values)


def _path(data):
    path = data["registry"]["chips"]["lab-chip-0001"]["path"]
    path[0] = "00" * 32


def _index(data):
    data["registry"]["chips"]["lab-chip-0001"]["index"] += 1


@pytest.mark.parametrize(
    "change",
    [
        _path,
        _index,
        lambda data: data["registry"]["chips"]["lab-chip-0001"]["path"].pop(),
        lambda data: _entry(data, identity="sha256:" + "ab" * 32),
        lambda data: _entry(data, sequence=7),
        lambda data: _entry(data, model="another"),
    ],
)
def test_a_proof_that_proves_nothing_is_named(world, judge, change):
    trust = altered(world[1], change)
    verdict = judge(trust)
    assert verdict.outcome is Outcome.REJECT
    assert {(each.guard, each.where["chip"]) for each in verdict.reasons} == {("registry", "lab-chip-0001")}
    assert "chip lab-chip-0001: the registry's signed view does not list it like this" in verdict.reasons[0].text
    assert judge(trust, off=[Guard.REGISTRY]).outcome is Outcome.ACCEPT


def test_chips_of_another_lab_cannot_be_passed_off(honest, world, judge):
    """The lab's name and key stand in the trust file; that the chips are that lab's stands in the view."""
    trust = altered(world[1], lambda data: data.update(chips=dict.fromkeys(data["chips"], "lab-2"), labs=labs(data)))
    assert verify(honest.run, trust, now=honest.now).outcome is Outcome.REJECT
    with pytest.raises(CallerError, match="cannot draw 3 of 0"):
        judge(trust)


def labs(data):
    return {**data["labs"], "lab-2": "11" * 32}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data["registry"]["chips"].pop("lab-chip-0002"), "holds no proof of chip lab-chip-0002"),
        (lambda data: data["registry"].update(chips={}), "holds no proof of chip lab-chip-0000"),
        (lambda data: data["registry"].update(size=5), "head is not the one that the registrar signed"),
        (lambda data: data["registry"].update(root="00" * 32), "head is not the one that the registrar signed"),
        (lambda data: data["registry"].update(map_root="00" * 32), "head is not the one that the registrar signed"),
        (lambda data: data["registry"].update(origin="chipwitness-registry/b"), "not a published view of chipwitness"),
        (lambda data: data["registry"].update(key=SigningKey.generate().verifying.raw.hex()), "not enrolled"),
        (lambda data: data["registry"].update(key="00"), "malformed"),
        (lambda data: data["registry"].update(publication=1), "malformed"),
        (lambda data: data["registry"].update(publication="{}"), "not a signed registry statement"),
        (lambda data: data["registry"].pop("publication"), "its registry is malformed"),
        (lambda data: data.update(registry=None), "its registry is malformed"),
        (lambda data: _entry(data, state="anywhere"), "unknown state"),
        (lambda data: _entry(data, more=1), "not an entry of chip lab-chip-0001"),
        (lambda data: _entry(data, name="chip/lab-chip-0002"), "not an entry of chip lab-chip-0001"),
        (lambda data: _entry(data, revoked=0), "malformed"),
        (lambda data: _entry(data, identity=""), "registered without a certificate"),
    ],
)
def test_another_form_is_the_inspectors_mistake(world, change, message):
    with pytest.raises(CallerError, match=re.escape(message)):
        altered(world[1], change)


def test_a_chip_under_another_certificate_than_the_registered_one(honest, devices, judge, tmp_path, monkeypatch):
    """The maker registered one piece of silicon and issued a second certificate in its name to another."""
    genuine = SimulatedLab.certificates
    monkeypatch.setattr(
        SimulatedLab,
        "certificates",
        classmethod(
            lambda cls, config, clocks: genuine(config, clocks) | {"lab-chip-0002": Digest("sha256", b"\xab" * 32)}
        ),
    )
    trust = registered_trust(tmp_path / "world", SimulatedLab.read_config(lab_path(honest.run)), honest.trust)
    verdict = judge(trust)
    assert verdict.outcome is Outcome.REJECT
    assert [(each.guard, each.where["chip"]) for each in verdict.reasons] == [("registry", "lab-chip-0002")]
    assert re.search(
        f"presents the certificate .*, but the registered one is sha256:{'ab' * 32}", verdict.reasons[0].text
    )
    assert not next(chip for chip in verdict.evidence["chips"] if chip["chip"] == "lab-chip-0002")["sound"]
    with off("registered certificate"):
        assert judge(trust).outcome is Outcome.ACCEPT


@pytest.mark.parametrize("state", ["revoked", "lost"])
def test_a_run_on_a_chip_that_the_registry_has_withdrawn(honest, judge, tmp_path, state):
    folder = tmp_path / "world"
    config = SimulatedLab.read_config(lab_path(honest.run))
    before = registered_trust(folder, config, honest.trust)
    assert judge(before).outcome is Outcome.ACCEPT
    with reg.Registry.open(folder / DATABASE, registrar=reg.load_private(folder / REGISTRAR_KEY)) as registry:
        if state == "revoked":
            reg.revoke(registry, ["lab-chip-0001"], reason="secrets are out")
        else:
            registry.claim(reg.ClaimKind.LOST, ["lab-chip-0001"], holder="lab", key=SimulatedLab.lab_key(config))
        reg.publish(registry)
    after = view_again(folder, before)
    assert sorted(after.chips) == ["lab-chip-0000", "lab-chip-0002"]
    verdict = judge(after, samples=2)
    assert verdict.outcome is Outcome.INCONCLUSIVE  # the run may have ended before
    said = {"revoked": "has revoked its certificate", "lost": "records it as lost"}[state]
    text = (
        f"chip lab-chip-0001: the run uses it, but the registry {said}, and nothing that it signed before was deposited"
    )
    assert [each.text for each in verdict.reasons] == [text]
    assert verdict.evidence["labs"] == {"lab": "INCONCLUSIVE"}
    with off("revoked chips"):
        assert judge(after, samples=2).outcome is Outcome.ACCEPT
    with pytest.raises(CallerError, match="different views of a registry"):
        before.merge(after)
    drawn = replace(after, chips=honest.trust.chips)  # whoever draws a withdrawn chip all the same hears of it
    assert f"chip lab-chip-0001: the registry {said}" in [each.text for each in judge(drawn).reasons]


def test_a_registered_idle_chip_that_was_revoked_accuses_nobody(make_run, devices, tmp_path):
    recorded = make_run("run", idle_chips=1)
    folder = tmp_path / "world"
    trust = registered_trust(folder, SimulatedLab.read_config(lab_path(recorded.run)), recorded.trust)
    with reg.Registry.open(folder / DATABASE, registrar=reg.load_private(folder / REGISTRAR_KEY)) as registry:
        reg.revoke(registry, ["lab-chip-0003"], reason="broken")
        reg.publish(registry)
    verdict = inspect(
        [recorded.run],
        view_again(folder, trust),
        SETTINGS,
        now=recorded.now,
        worker=devices.run,
        sources=Sources(answers=[tmp_path / "run.answers"]),
    )
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons


def test_a_lab_registers_once_and_another_world_is_refused(honest, record, tmp_path):
    folder = tmp_path / "world"
    config = SimulatedLab.read_config(lab_path(honest.run))
    first = registered_trust(folder, config, honest.trust)
    again = registered_trust(folder, replace(config, idle_chips=2), honest.trust)
    assert set(again.chips) - set(first.chips) == {"lab-chip-0003", "lab-chip-0004"}
    stranger = record(tmp_path / "other", seed=6)
    with pytest.raises(CallerError, match="already has a different lab"):
        register_lab(folder, SimulatedLab.read_config(lab_path(stranger.run)), stranger.trust)
    faster = replace(config, lab="lab-2", snapshot_rate=Fraction(1))
    with pytest.raises(CallerError, match="other reference values"):
        register_lab(folder, faster, Trust.from_json(SimulatedLab.reference_values(faster), "here"))
