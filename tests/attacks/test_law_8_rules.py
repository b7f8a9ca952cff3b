"""Law 8: rules do not punish what is allowed, and nobody is rejected without a reason (C29, B14)."""

from __future__ import annotations

import json
import re
import textwrap
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from analysis.cli import main
from firmware_sim import Work
from firmware_sim.errors import CallerError
from inspector.inspection.verdict import Outcome, Reason, Verdict
from inspector.rules.form import FORM, KINDS
from monitor.lab.conduct import Conduct
from monitor.transcript.data import encode_arrays
from tests.attacks.jobs import BATCH, Labs, built
from tests.attacks.test_law_2_ledger import Repeats
from tests.guards import off

NOT = '[[rule]]\nname = "r"\nkind = "flop"\nper = "run"\nat_most = 1\n[require]\nnot = "r"\n'


@pytest.fixture(scope="module")
def labs(tmp_path_factory, devices):
    return Labs(tmp_path_factory.mktemp("labs"), devices)


def steps(labs, recorder, model, optimizer, count):
    for _ in range(count):
        labs.step(recorder, model, optimizer)


def plain(labs, name, **options):
    return [labs.record(name, name, built(), **options)]


def ends(labs, name, last):
    """``last(model)`` runs behind the last step."""
    model = built()
    recorder, optimizer = labs.begin(name, name, model)
    steps(labs, recorder, model, optimizer, 4)
    last(model)
    recorder.finish()
    return [name]


def predicts(model):
    with torch.no_grad():
        model(BATCH[:4]).argmax(1).tolist()


def logs_norms(model):
    with torch.no_grad():
        [float(each.norm()) for each in model.parameters()]


def goes_on(labs, name, stop, **options):
    """Is stopped after five steps by ``stop(recorder, model, optimizer)``, and resumed."""
    model = built()
    recorder, optimizer = labs.begin(name, name, model, **options)
    steps(labs, recorder, model, optimizer, 5)
    stop(recorder, model, optimizer)
    model = built()
    recorder, optimizer = labs.resume(name, model)
    steps(labs, recorder, model, optimizer, 3)
    recorder.finish()
    return [name]


def shut_down(recorder, *_):
    recorder.shutdown()


def fails(recorder, model, optimizer):
    """In the middle of a step."""
    with suppress(RuntimeError), recorder.step(BATCH):
        optimizer.zero_grad()
        model(BATCH).square().mean().backward()
        raise RuntimeError


def predicts_and_shuts_down(recorder, model, optimizer):
    predicts(model)
    recorder.shutdown()


def evaluates(recorder, model):
    with recorder.evaluation(BATCH), torch.no_grad():
        model(BATCH).square().mean()


HISTORIES = {
    "plain": plain,
    "predicts": lambda labs, name: ends(labs, name, predicts),
    "norms": lambda labs, name: ends(labs, name, logs_norms),
    "shut-down": lambda labs, name: goes_on(labs, name, shut_down),
    "failed": lambda labs, name: goes_on(labs, name, fails, chips=3),  # of unequal shares
    "predicted-before": lambda labs, name: goes_on(labs, name, predicts_and_shuts_down),
    "evaluations": lambda labs, name: plain(labs, name, between=evaluates),
    "reads": lambda labs, name: plain(labs, name, between=lambda _, model: logs_norms(model)),
    "adamw": lambda labs, name: plain(labs, name, optimizer=torch.optim.AdamW),
    "two-runs": lambda labs, name: [
        labs.record(f"{name}-1", name, built()),
        labs.record(f"{name}-2", name, built(2), optimizer=torch.optim.AdamW, between=evaluates),
    ],
    "chain": lambda labs, name: [
        labs.record(f"{name}-1", f"{name}-a", built()),
        labs.record(f"{name}-2", f"{name}-b", built(), parent=f"{name}-1"),
    ],
    "two-chips": lambda labs, name: plain(labs, name, chips=2),
}


@pytest.fixture(scope="module")
def histories(labs):
    """Twelve honest histories, inspected."""
    return {name: labs.inspected(*record(labs, name)) for name, record in HISTORIES.items()}


def examples():
    """Each file of rules that the manual shows."""
    page = Path("analysis/docs/rules.md").read_text()
    shown = re.findall(r"```toml\n# rules.toml\n(\[\[rule\]\].*?)```", page, re.DOTALL)
    indented = "\n".join(line for line in FORM.splitlines() if line.startswith("    ") or not line)
    return [*shown, textwrap.dedent(indented)]


@pytest.fixture
def files(tmp_path):
    """The manual's files of rules, and each rule of theirs by itself."""
    (tmp_path / "benchmark.txt").write_text("0" * 64)
    (tmp_path / "test.safetensors").write_bytes(encode_arrays({"batch": BATCH.numpy()}))
    texts = examples()
    texts += [each for text in texts for each in re.split(r"(?=\[\[rule\]\])", text.split("[require]")[0])[1:]]
    assert len(texts) == 2 + 2 + len(KINDS)
    paths = [tmp_path / f"{number}.toml" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    return paths


@pytest.mark.parametrize("history", HISTORIES)
def test_c29_the_manuals_examples_accept_honest_histories(labs, histories, files, history):
    seen = histories[history]
    assert seen[0].outcome is Outcome.ACCEPT, seen[0].reasons
    for path in files:
        verdict = labs.judge(seen, path)
        if re.findall(r'kind = "(\w+)"', path.read_text()) == ["score"]:  # on what a model cannot do; honest ones may
            assert "(score at least 3.5)" in verdict.reasons[0].text
        else:
            assert verdict.outcome is Outcome.ACCEPT, (path.read_text(), verdict.reasons)


STOPPED = {"failed", "predicted-before"}
"""Histories in which chips count what no step tells."""


@pytest.mark.parametrize("kind", ["meter", "clock"])
def test_c29_at_most_binds_what_nothing_explains(labs, histories, kind):
    rule = f'[[rule]]\nname = "r"\nkind = "{kind}"\nat_least = 1\nat_most = 1\n'
    for history, seen in histories.items():
        verdict = labs.judge(seen, rule)
        assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
        told = [each["text"] for each in verdict.evidence["rules"]["found"]["r"]]
        assert ("more were repeated steps" in told[0]) is (history in STOPPED), told
        with off("slack as what it is"):
            assert labs.judge(seen, rule).outcome is (Outcome.REJECT if history in STOPPED else Outcome.ACCEPT)


@pytest.mark.parametrize("kind", ["meter", "clock"])
def test_c29_slack_above_its_limit_is_explained_by_nothing(labs, monkeypatch, kind):
    """It could have been any work."""
    monkeypatch.setattr("monitor.recording.recorder.conduct", lambda *_: Repeats(last=6, times=10))
    seen = labs.inspected(labs.record(f"again-{kind}", f"again-{kind}", built(), steps=6, checkpoint_every=1000))
    verdict = labs.judge(seen, f'[[rule]]\nname = "r"\nkind = "{kind}"\nat_most = 1\n')
    assert verdict.evidence["rules"]["results"]["r"] == "undecided"
    assert "which is more slack than is allowed" in verdict.reasons[0].text


class Beside(Conduct):
    """Works for itself behind a step, more than any loop may."""

    def after_step(self, step, host):
        if step == 3:
            host.memory.meter.charge(Work(1, 10**7, 10**7))


@pytest.mark.parametrize("kind", ["meter", "clock"])
def test_c29_what_nothing_explains_counts(labs, monkeypatch, kind):
    monkeypatch.setattr("monitor.recording.recorder.conduct", lambda *_: Beside())
    seen = labs.inspected(labs.record(f"beside-{kind}", f"beside-{kind}", built(), steps=6))
    rule = f'[[rule]]\nname = "r"\nkind = "{kind}"\nat_most = 1\n'
    assert labs.judge(seen, rule).evidence["rules"]["results"]["r"] == "fail"
    with off("unexplained slack"):
        assert labs.judge(seen, rule).evidence["rules"]["results"]["r"] != "fail"


def with_idle(labs, require):
    """What is found of two labs, of which one hands over no run."""
    verdict, case, trust, settings = labs.inspected("at-work")
    verdict = replace(verdict, evidence={**verdict.evidence, "labs": {**verdict.evidence["labs"], "idle": "ACCEPT"}})
    text = f'[[rule]]\nname = "r"\nkind = "flop"\nper = "run"\nat_most = 1\n[require]\n{require}\n'
    return labs.judge((verdict, case, trust, settings), text)


def test_b14_not_is_undecided_for_a_lab_of_which_nothing_was_found(labs):
    labs.record("at-work", "at-work", built())
    verdict = with_idle(labs, 'not = "r"')
    assert verdict.evidence["labs"] == {"at-work": "ACCEPT", "idle": "INCONCLUSIVE"}
    assert [each.text for each in verdict.reasons if each.where.get("lab") == "idle"] == [
        "rule 'r' (flop at most 1) is undecided: nothing of lab idle was found that it bounds"
    ]
    assert with_idle(labs, 'not = {not = {not = "r"}}').evidence["labs"] == verdict.evidence["labs"]
    for require in ('all = ["r"]', 'not = {not = "r"}', 'any = ["r", {not = "r"}]'):
        assert with_idle(labs, require).evidence["labs"]["idle"] == "ACCEPT"
    with off("nothing found"), pytest.raises(CallerError, match="a verdict on lab idle needs a reason"):
        with_idle(labs, 'not = "r"')
    with off("nothing found", "verdicts with reasons"):
        verdict = with_idle(labs, 'not = "r"')
    assert verdict.evidence["labs"] == {"at-work": "ACCEPT", "idle": "REJECT"}
    assert [each.where.get("lab") for each in verdict.reasons if each.where.get("lab") == "idle"] == []


def test_b14_every_lab_of_the_trust_file_is_judged_by_the_command(labs, tmp_path, capsys, kept_devices):
    first, second = (labs.record(f"command-{name}", f"command-{name}", built()) for name in "ab")
    (tmp_path / "trust.json").write_text(json.dumps(labs.trust(first, second).to_json()))
    (tmp_path / "rules.toml").write_text(NOT)
    words = ["--trust", str(tmp_path / "trust.json"), "--samples", "2", "--device", "sse41", "--seed", "x", "--json"]
    words += ["--now", "2026-01-01T00:30:00Z", "--rules", str(tmp_path / "rules.toml"), "--every-lab"]
    main(["inspect", str(labs.folder / first), *words, "--answers", str(labs.folder / second)])
    told = json.loads(capsys.readouterr().out)
    mine = [each["text"] for each in told["reasons"] if each.get("lab") == "command-b" and "rule" in each]
    assert mine == ["rule 'r' (flop at most 1) is undecided: nothing of lab command-b was found that it bounds"]


@pytest.mark.parametrize("outcome", [Outcome.REJECT, Outcome.INCONCLUSIVE])
def test_b14_a_verdict_without_a_reason_cannot_be_built(outcome):
    with pytest.raises(CallerError, match="needs a reason"):
        Verdict(outcome=outcome, reasons=(), evidence={})
    fine = Verdict(outcome=Outcome.ACCEPT, reasons=(), evidence={"labs": {"a": "ACCEPT"}})
    about = Reason(guard="rules", text="of somebody else", where={"lab": "b"})
    with pytest.raises(CallerError, match="a verdict on lab a needs a reason"):
        fine.joined((about,), {"a": outcome, "b": outcome}, {})
    with off("verdicts with reasons"):
        assert Verdict(outcome=outcome, reasons=(), evidence={}).outcome is outcome
