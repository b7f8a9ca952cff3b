"""Rules: of each kind a run that keeps it and one that breaks it, with the evidence; and what nobody can decide."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from functools import reduce
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from analysis.cli import main
from firmware_sim.errors import CallerError, DeviceError
from firmware_sim.evidence import canonical
from inspector.bundle import contents
from inspector.bundle.builder import bundle_of
from inspector.bundle.checker import check_bundle
from inspector.bundle.replays import signing
from inspector.inspection.casefile import CaseFile
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.transcripts import open_run
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome
from inspector.replay.examination import content_digests
from inspector.rules.judgement import apply_rules
from inspector.rules.rule_files import read_rules
from inspector.rules.truth import Truth
from monitor.transcript.data import encode_arrays
from tests.guards import off
from tests.inspector.bundle.conftest import CLUSTER, INSPECTORATE, known

SETTINGS = Settings(samples=2, seed="x", devices=("sse41",))


@pytest.fixture(scope="module")
def small(tmp_path_factory, record):
    """A run of two steps on two chips, with batches of four."""
    folder = tmp_path_factory.mktemp("rules")
    return record(folder / "run", steps=2, chips=2, checkpoint_every=2, batch_size=4, rate=1)


@pytest.fixture(scope="module")
def inspected(small, devices):
    """Its verdict, and what it rests on."""
    case = CaseFile()
    return inspect(
        [small.run], small.trust, SETTINGS, now=small.now, worker=signing(devices.run, CLUSTER), case=case
    ), case


@pytest.fixture
def judge(small, inspected, devices, tmp_path):
    """The verdict under rules that are given as TOML."""

    def run(text, worker=devices.run):
        verdict, case = inspected
        case = replace(case, examinations=[])
        (tmp_path / "rules.toml").write_text(text)
        return apply_rules(verdict, read_rules(tmp_path / "rules.toml"), case, small.trust, SETTINGS, worker=worker)

    return run


def rule(kind, *lines, name="r"):
    return "\n".join(["[[rule]]", f'name = "{name}"', f'kind = "{kind}"', *lines, ""])


def only(verdict):
    """What the rule ``r`` found, of the first thing that it bounds."""
    return verdict.evidence["rules"]["found"]["r"][0]


@pytest.fixture(scope="module")
def data(small):
    return open_run(small.run, small.trust).data()


@pytest.mark.parametrize("per", ["run", "chain", "lab", "job"])
def test_compute_is_capped(judge, small, per):
    total = sum(leaf.flop for leaf in open_run(small.run, small.trust).load_steps()[0])
    kept = judge(rule("flop", f'per = "{per}"', "at_most = 1e18"))
    assert kept.outcome is Outcome.ACCEPT
    assert "what the rules require holds: r pass" in kept.reasons[0].text
    assert (only(kept)["value"], only(kept)["runs"]) == (total, ["run"])
    broken = judge(rule("flop", f'per = "{per}"', f"at_most = {total - 1}"))
    assert broken.outcome is Outcome.REJECT
    assert f"takes {total} FLOP" in broken.reasons[0].text
    ids = only(kept)["run_ids"]
    assert broken.reasons[0].where == {"lab": "lab", "rule": "r", "runs": ["run"], "run_ids": ids}
    assert broken.evidence["labs"] == {"lab": "REJECT"}
    hidden = judge(rule("flop", f'per = "{per}"', f"at_most = {total}"))  # elementwise work could hide more
    assert hidden.outcome is Outcome.INCONCLUSIVE
    assert "is undecided" in hidden.reasons[0].text


def test_forbidden_data_and_a_required_share(judge, data):
    rows = content_digests(data.samples["inputs"] if "inputs" in data.samples else next(iter(data.samples.values())))
    used = [max(content_digests(values)[int(data.order[1, 2])] for values in data.samples.values() if values.ndim > 1)]
    kept = judge(rule("data", f"digests = {['0' * 64]}", "at_most = 0"))
    assert (kept.outcome, only(kept)["value"]) == (Outcome.ACCEPT, 0.0)
    broken = judge(rule("data", f"digests = {used}", "at_most = 0"))
    assert broken.outcome is Outcome.REJECT
    assert "1 of 8 places hold a sample of set" in broken.reasons[0].text
    assert (broken.reasons[0].where["step"], broken.reasons[0].where["place"]) == (2, 2)
    share = judge(rule("data", f"digests = {used}", "at_least = 0.125"))
    assert share.outcome is Outcome.ACCEPT
    assert judge(rule("data", f"digests = {used}", "at_least = 0.2")).outcome is Outcome.REJECT
    assert judge(rule("data", f"digests = {rows}", "at_least = 1")).outcome is Outcome.ACCEPT


def test_batches_of_evaluations_count(record_loop, devices, tmp_path):
    torch.manual_seed(0)
    model, trained, shown = nn.Linear(4, 2), torch.randn(3, 4), torch.randn(3, 4)

    def body(model, optimizer, batch):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    def evaluate(recorder, step):
        if step == 2:
            with recorder.evaluation(shown), torch.no_grad():
                model(shown)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record_loop(model, optimizer, [trained] * 2, body, before=evaluate)
    case = CaseFile()
    worker = signing(devices.run, CLUSTER)
    verdict = inspect([recorded.run], recorded.trust, SETTINGS, now=recorded.now, worker=worker, case=case)
    (tmp_path / "rules.toml").write_text(
        rule("data", f"digests = {content_digests(shown.numpy())[1:2]}", "at_most = 0")
    )
    rules = read_rules(tmp_path / "rules.toml")
    judged = apply_rules(verdict, rules, case, recorded.trust, SETTINGS, worker=worker)
    assert judged.outcome is Outcome.REJECT
    assert "1 of 9 places hold a sample of set" in judged.reasons[0].text
    assert (judged.reasons[0].where["step"], judged.reasons[0].where["place"]) == (2, 1)


def test_hyper_parameters_are_bounded(judge, small):
    groups = open_run(small.run, small.trust).declared.groups
    rate = groups[0]["lr"]
    kept = judge(rule("hyper", 'parameter = "lr"', f"at_most = {rate}", "at_least = 0"))
    assert (kept.outcome, only(kept)["value"]) == (Outcome.ACCEPT, rate)
    broken = judge(rule("hyper", 'parameter = "lr"', f"at_most = {rate / 2}"))
    assert broken.outcome is Outcome.REJECT
    assert (
        broken.reasons[0]
        .text.removeprefix(f"rule 'r' (hyper at most {rate / 2}) is broken: run run: lr lies in {rate} … {rate}")
        .startswith(", which other numbers multiply by up to 10; in ")
    )
    unknown = judge(rule("hyper", 'parameter = "temperature"', "at_most = 1"))
    assert unknown.outcome is Outcome.INCONCLUSIVE
    assert "temperature is not declared" in unknown.reasons[0].text


@pytest.mark.parametrize(("kind", "unit"), [("meter", "FLOP"), ("clock", "busy µs")])
def test_meters_and_clocks_count_what_was_declared(judge, kind, unit):
    kept = judge(rule(kind, "at_least = 1", "at_most = 1"))
    assert (kept.outcome, only(kept)["value"]) == (Outcome.ACCEPT, 1.0)
    broken = judge(rule(kind, "at_most = 0.5"))
    assert broken.outcome is Outcome.REJECT
    assert broken.reasons[0].text.startswith(f"rule 'r' ({kind} at most 0.5) is broken: chip lab-chip-")
    assert f" {unit}, and its lab's declared steps need " in broken.reasons[0].text


@pytest.mark.parametrize("lie", ["extra-steps", "extra-ticks"])
def test_hidden_work_is_more_than_was_declared(make_run, devices, tmp_path, lie):
    """Steps on the lab's chips, in the declared memory and beside it: their clocks go by their meters."""
    lied = make_run(lie=lie, lie_step=1, steps=2, chips=2, checkpoint_every=2, batch_size=4)
    (tmp_path / "rules.toml").write_text(rule("meter", "at_most = 1") + rule("clock", "at_most = 1", name="c"))
    case = CaseFile()
    verdict = inspect([lied.run], lied.trust, SETTINGS, now=lied.now, worker=devices.run, case=case)
    judged = apply_rules(verdict, read_rules(tmp_path / "rules.toml"), case, lied.trust, SETTINGS, worker=devices.run)
    assert judged.evidence["rules"]["results"] == {"r": "fail", "c": "fail"}


def test_the_meters_of_a_lab_of_which_no_chip_was_drawn_are_not_known(small, inspected, devices, tmp_path):
    verdict, case = inspected
    undrawn = replace(verdict, evidence={**verdict.evidence, "chips": []})
    (tmp_path / "rules.toml").write_text(rule("meter", "at_most = 1"))
    rules = read_rules(tmp_path / "rules.toml")
    judged = apply_rules(undrawn, rules, case, small.trust, SETTINGS, worker=devices.run)
    assert judged.outcome is Outcome.INCONCLUSIVE
    assert "no chip of lab lab was drawn" in judged.reasons[0].text


def test_final_weights_are_scored_on_a_test_set(judge, data, tmp_path):
    test = {name: values[data.order[0]] for name, values in data.samples.items()}
    (tmp_path / "test.safetensors").write_bytes(
        encode_arrays({name: np.tile(x, (2,) + (1,) * (x.ndim - 1)) for name, x in test.items()})
    )
    kept = judge(rule("score", 'test = "test.safetensors"', "at_least = 0.01"))
    assert kept.outcome is Outcome.ACCEPT, kept.reasons
    score = only(kept)["value"]
    assert 0.1 < score < 10
    broken = judge(rule("score", 'test = "test.safetensors"', f"at_least = {score + 0.1}"))
    assert broken.outcome is Outcome.REJECT
    assert f"its final weights have loss {score:.6g} on test set" in broken.reasons[0].text
    assert broken.reasons[0].where["device"] == "sse41"
    (tmp_path / "test.safetensors").write_bytes(encode_arrays({name: values[:3] for name, values in test.items()}))
    unfit = judge(rule("score", 'test = "test.safetensors"', "at_least = 0"))
    assert unfit.outcome is Outcome.INCONCLUSIVE
    assert "no score" in unfit.reasons[0].text


def test_what_no_device_answered_is_undecided(judge):
    def broken(*_):
        raise DeviceError("device sse41 broke")

    verdict = judge(rule("data", f"digests = {['0' * 64]}", "at_most = 0"), broken)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "is undecided: run run: device sse41 broke" in verdict.reasons[0].text


@pytest.mark.parametrize("error", ["", None, 0, [], False], ids=repr)
def test_a60_an_error_that_is_nothing_next_to_what_was_examined(judge, devices, error):
    """What a cluster then signs is that it could read nothing: neither a lab's guilt nor its innocence follows."""

    def worker(device, job):
        return {**devices.run(device, job), "evidence_error": error}

    for bound in ("at_most = 0", "at_least = 0.5"):
        verdict = judge(rule("data", f"digests = {['0' * 64]}", bound), worker)
        assert verdict.outcome is Outcome.INCONCLUSIVE
        assert "malformed answer: its error has no text" in verdict.reasons[0].text


def test_a_bundle_shows_what_a_cluster_signed_of_samples(small, inspected, devices, data, tmp_path):
    """A breach that the cluster saw is a ground; none can be made up or hidden."""
    verdict, case = inspected
    array = max(data.samples.values(), key=lambda values: values.ndim)
    used, trust = content_digests(array), known(small.trust)
    worker = signing(devices.run, CLUSTER)
    shown = {}
    for name, digests in (("kept", ["0" * 64]), ("broken", used)):
        (tmp_path / "rules.toml").write_text(rule("data", f"digests = {digests}", "at_most = 0"))
        mine = replace(case, examinations=[])
        judged = apply_rules(verdict, read_rules(tmp_path / "rules.toml"), mine, small.trust, SETTINGS, worker=worker)
        data_ = bundle_of(mine, judged, small.trust, SETTINGS, INSPECTORATE)
        shown[name] = (judged, mine, check_bundle(data_, trust))
        envelope = canonical.decode(data_)["items"]["examinations/0.json"]
        schema = json.loads((Path(contents.__file__).parent / "schemas" / "examination.json").read_text())
        payload = json.loads(base64.b64decode(envelope))["payload"]
        pytest.importorskip("jsonschema").validate(json.loads(base64.b64decode(payload)), schema)
    assert shown["kept"][2].outcome is Outcome.ACCEPT, shown["kept"][2].reasons
    assert shown["broken"][2].outcome is Outcome.REJECT
    assert "8 of 8 places hold a sample" in shown["broken"][2].reasons[0].text
    assert "contested, rests on cluster key" in shown["broken"][2].reasons[0].text
    hidden = replace(shown["kept"][1], examinations=shown["broken"][1].examinations)
    lie = replace(shown["broken"][0], outcome=Outcome.ACCEPT)
    for judged, mine in ((lie, shown["broken"][1]), (shown["kept"][0], hidden)):
        found = check_bundle(bundle_of(mine, judged, small.trust, SETTINGS, INSPECTORATE), trust)
        assert (found.outcome, found.evidence["verifies"]) == (Outcome.REJECT, False)
        assert "does not meet the rules" in found.reasons[0].text
    made_up = check_bundle(bundle_of(shown["kept"][1], shown["broken"][0], small.trust, SETTINGS, INSPECTORATE), trust)
    assert made_up.outcome is Outcome.INCONCLUSIVE


HOLDS = rule("flop", 'per = "run"', "at_most = 1e18", name="holds")
BROKEN = rule("hyper", 'parameter = "lr"', "at_most = 0", name="broken")
OPEN = rule("hyper", 'parameter = "temperature"', "at_most = 0", name="open")


@pytest.mark.parametrize(
    ("require", "outcome", "blamed"),
    [
        ('any = ["broken", "holds", "open"]', Outcome.ACCEPT, []),
        ('any = ["broken", {all = ["holds", "open"]}]', Outcome.INCONCLUSIVE, ["broken", "open"]),
        ('all = ["holds", {not = "broken"}, {any = ["holds", "open"]}]', Outcome.ACCEPT, []),
        ('all = [{not = "holds"}, {any = ["broken", "open"]}]', Outcome.REJECT, ["holds", "broken", "open"]),
        ('not = {any = ["holds", "open", "broken"]}', Outcome.REJECT, ["holds", "open"]),
    ],
)
def test_rules_are_combined(judge, require, outcome, blamed):
    verdict = judge(f"{HOLDS}{BROKEN}{OPEN}[require]\n{require}\n")
    assert verdict.outcome is outcome
    assert [each.where["rule"] for each in verdict.reasons if "rule" in each.where] == blamed
    results = verdict.evidence["rules"]["results"]
    assert results == {"holds": "pass", "broken": "fail", "open": "undecided"}


@pytest.mark.parametrize(
    ("range_", "least", "most", "truth"),
    [
        ("at_most = 5", 5, 5, Truth.PASS),
        ("at_most = 5", 6, None, Truth.FAIL),
        ("at_most = 5", 5, 6, Truth.UNDECIDED),
        ("at_most = 5", 0, None, Truth.UNDECIDED),
        ("at_least = 5", 5, None, Truth.PASS),
        ("at_least = 5", 4, 4, Truth.FAIL),
        ("at_least = 5", 4, 5, Truth.UNDECIDED),
        ("at_least = 5", 4, None, Truth.UNDECIDED),
        ("at_least = 5\nat_most = 7", 5, 7, Truth.PASS),
        ("at_least = 5\nat_most = 7", 5, None, Truth.UNDECIDED),
    ],
)
def test_what_lies_between_bounds_is_judged_by_both(tmp_path, range_, least, most, truth):
    (tmp_path / "rules.toml").write_text(rule("meter", range_))
    assert read_rules(tmp_path / "rules.toml").rules["r"].judge(least, most) is truth


@pytest.mark.parametrize(
    ("range_", "words"),
    [
        ("at_most = 1e25", "at most 1e+25"),
        ("at_most = 10000000000000000000000000", "at most 10000000000000000000000000"),
        ("at_most = 823440", "at most 823440"),
        ("at_least = 0.5\nat_most = 1e5", "at least 0.5 and at most 100000"),
    ],
)
def test_a_large_bound_is_said_as_people_write_it(tmp_path, range_, words):
    (tmp_path / "rules.toml").write_text(rule("meter", range_))
    assert read_rules(tmp_path / "rules.toml").rules["r"].range == words


def test_a_lab_that_may_have_done_enough_is_not_blamed(judge, small):
    total = sum(leaf.flop for leaf in open_run(small.run, small.trust).load_steps()[0])
    assert judge(rule("flop", 'per = "run"', f"at_least = {total}")).outcome is Outcome.ACCEPT
    assert judge(rule("flop", 'per = "run"', f"at_least = {total + 1}")).outcome is Outcome.INCONCLUSIVE
    assert judge(rule("flop", 'per = "run"', "at_least = 1e18")).outcome is Outcome.REJECT


def test_three_values():
    yes, no, unknown = Truth.PASS, Truth.FAIL, Truth.UNDECIDED
    assert Truth.all([]) is yes
    assert Truth.any([]) is no
    assert (Truth.all([yes, unknown, no]), Truth.all([yes, unknown])) == (no, unknown)
    assert (Truth.any([yes, unknown, no]), Truth.any([no, unknown])) == (yes, unknown)
    assert [each.opposite for each in (yes, no, unknown)] == [no, yes, unknown]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "must have 1 … 256"),
        ("[[rule]", "not TOML"),
        ("x = 1\n" + HOLDS, "the file has an unknown key 'x'"),
        (HOLDS + "at_mots = 1\n", "unknown key 'at_mots'"),
        (HOLDS + HOLDS, "two rules have the same name"),
        (rule("flops", "at_most = 1"), "kind must be one of"),
        (rule("flop", "at_most = 1"), "the key 'per' must be one of"),
        (rule("flop", 'per = "lab"', 'links = ["start"]', "at_most = 1"), "links need per = job"),
        (rule("flop", 'per = "job"', 'links = ["moon"]', "at_most = 1"), "links must be some of"),
        (rule("flop", 'per = "lab"'), "neither at_least nor at_most"),
        (rule("flop", 'per = "lab"', "at_most = nan"), "must be a finite number"),
        (rule("flop", 'per = "lab"', "at_most = true"), "must be a finite number"),
        (rule("flop", 'per = "lab"', f"at_most = 0x{'f' * 5000}"), "must be a finite number"),
        (rule("flop", 'per = "lab"', "at_most = 1", "at_least = 2"), "no value is both at least 2"),
        (rule("data", "digests = []", "at_most = 1"), "with at least one"),
        (rule("data", 'digests = ["abc"]', "at_most = 1"), "'abc' is not a digest"),
        (rule("data", 'digests = "none.txt"', "at_most = 1"), "cannot read"),
        (rule("data", r'digests = "no\nne.txt"', "at_most = 1"), "cannot read"),
        (rule("data", r'digests = "no\u0000ne.txt"', "at_most = 1"), "null byte"),
        (rule("score", "at_most = 1"), "name of a safetensors file"),
        (
            rule("score", 'test = "rules.toml"', 'program = "abc"', "at_most = 1"),
            "program must be a digest of 64",
        ),
        (rule("data", 'program = "abc"', "at_most = 1"), "unknown key 'program'"),
        (rule("hyper", "at_most = 1"), "parameter must be the name"),
        (HOLDS + '[require]\nall = ["hold"]\n', "names 'hold', but there is no rule of that name"),
        (HOLDS + BROKEN + '[require]\nall = ["holds"]\n', "rule 'broken' is not used in require"),
        (HOLDS + "[require]\nall = []\n", "at least one part"),
        (HOLDS + '[require]\nsome = ["holds"]\n', "one of the keys all, any, not"),
    ],
)
def test_what_is_not_known_is_an_error_of_one_line(tmp_path, text, why):
    (tmp_path / "rules.toml").write_text(text)
    with pytest.raises(CallerError, match=why.replace("[", r"\[")) as caught:
        read_rules(tmp_path / "rules.toml")
    assert "\n" not in str(caught.value)


def test_the_command_line_applies_rules(small, tmp_path, capsys, data, kept_devices):
    (tmp_path / "trust.json").write_text(json.dumps(small.trust.to_json()))
    (tmp_path / "samples.safetensors").write_bytes(encode_arrays(dict(data.samples)))
    array = max(data.samples, key=lambda name: data.samples[name].ndim)
    assert main(["rules", "digests", str(tmp_path / "samples.safetensors"), "--array", array]) == 0
    (tmp_path / "forbidden.txt").write_text(capsys.readouterr().out)
    (tmp_path / "rules.toml").write_text(HOLDS + rule("data", 'digests = "forbidden.txt"', "at_most = 0", name="clean"))
    assert main(["rules", "show", str(tmp_path / "rules.toml"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    words = ["--trust", str(tmp_path / "trust.json"), "--samples", "2", "--device", "sse41", "--seed", "x", "--json"]
    words += ["--now", "2026-01-01T00:30:00Z", "--rules", str(tmp_path / "rules.toml")]
    assert main(["inspect", str(small.run), *words]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["evidence"]["rules"]["digest"] == shown["digest"]
    assert told["evidence"]["rules"]["results"] == {"holds": "pass", "clean": "fail"}
    assert [each["rule"] for each in told["reasons"] if "rule" in each] == ["clean"]


@pytest.fixture(scope="module")
def many(tmp_path_factory, record):
    """Fifty labs, each with a chip, a run of one step, and the same start."""
    folder = tmp_path_factory.mktemp("many")
    names = [f"lab-{number}" for number in range(50)]
    return [record(folder / lab, lab=lab, steps=1, chips=1, checkpoint_every=1, batch_size=2, rate=1) for lab in names]


def test_fifty_labs_that_start_from_one_public_seed_have_fifty_jobs(many, tmp_path, devices):
    """Anybody can start from it, so it joins nobody to a rival."""
    trust, case, settings = reduce(Trust.merge, (each.trust for each in many)), CaseFile(), replace(SETTINGS, samples=1)
    runs = [each.run for each in many]
    verdict = inspect(runs, trust, settings, now=many[0].now, worker=devices.run, case=case)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    flop = sum(leaf.flop for leaf in case.transcripts[0].leaves)
    (tmp_path / "rules.toml").write_text(rule("flop", 'per = "job"', f"at_most = {flop * 40}"))
    rules = read_rules(tmp_path / "rules.toml")
    found = apply_rules(verdict, rules, case, trust, SETTINGS, worker=devices.run)
    assert found.outcome is Outcome.ACCEPT, found.reasons
    assert {each["value"] for each in found.evidence["rules"]["found"]["r"]} == {flop}
    (tmp_path / "rules.toml").write_text(rule("flop", 'per = "job"', 'links = ["program"]', f"at_most = {flop * 40}"))
    rules = read_rules(tmp_path / "rules.toml")
    found = apply_rules(verdict, rules, case, trust, SETTINGS, worker=devices.run)
    assert set(found.evidence["labs"].values()) == {"INCONCLUSIVE"}  # together they may be one, which convicts nobody
    assert "the job of 1 runs of 1 labs (" in found.reasons[0].text
    assert "lab-3 of lab-3, lab-4 of lab-4 and 45 more may belong to it" in found.reasons[0].text
    with off("labs of one job added up"):
        assert apply_rules(verdict, rules, case, trust, SETTINGS, worker=devices.run).outcome is Outcome.ACCEPT
    fewer = replace(case, transcripts=case.transcripts[:19])
    assert apply_rules(verdict, rules, fewer, trust, SETTINGS, worker=devices.run).outcome is Outcome.ACCEPT
