"""Law 8: a contest of any step clears who is honest, and what is not about a bundle changes nothing in it.

Rows C30, C31.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from analysis.cli import main
from firmware_sim.evidence import SigningKey, digest_bytes, leaf_hash
from inspector.bundle.contests import CLUSTER, LAB, Side, decide, hold
from inspector.bundle.replays import SignedReplay
from inspector.bundle.runs import HeldRun
from inspector.bundle.steps import Opened
from inspector.dispute.dispute import Disputant, settle
from inspector.inspection.transcripts import open_run
from inspector.replay.decisions import Decisions
from inspector.replay.result import Replayed, state_digest
from monitor.lab.conduct import Conduct
from monitor.lab.prover import LabProver
from monitor.lab.simulated_lab import SimulatedLab, lab_path
from monitor.replay.prover import RunProver
from monitor.replay.steps import execution_of
from monitor.transcript import RunFolder
from tests.guards import off
from tests.inspector.bundle.conftest import SETTINGS, made
from tests.inspector.rounds.test_contest import played
from tests.lying import tell_with

STEP = 2
NOW = "2026-01-01T00:30:00Z"
KEY = SigningKey.generate(b"c" * 32)


class Raised(Conduct):
    """Adds to one element of what the step's operator of that number gives or writes."""

    def __init__(self, at):
        self._at = at

    def observer(self, step):
        return self if step == STEP else None

    def before(self, index, func, args, kwargs):
        """Nothing."""

    def after(self, index, func, args, kwargs, out):
        with torch.no_grad():
            flat = [each for each in (out if isinstance(out, list | tuple) else [out]) if isinstance(each, Tensor)]
            flat += [each for each in args[:1] if "_." in str(func) and isinstance(each, Tensor)]
            if index == self._at and flat and flat[-1].numel() and flat[-1].is_floating_point():
                flat[-1][(0,) * flat[-1].dim()] += 1


def plain(model, optimizer, batch):
    optimizer.zero_grad()
    loss = model(batch["x"]).square().mean()
    loss.backward()
    optimizer.step()


def reads_its_loss(model, optimizer, batch):
    """Whoever takes another operator reads another value, and the lab's own code takes it into account."""
    optimizer.zero_grad()
    loss = model(batch["x"]).square().mean()
    (loss if loss.item() > 0 else loss * 2).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert norm.item() >= 0
    optimizer.step()


LOOPS = {
    "a loss": (reads_its_loss, lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)),
    "Adam's counter": (plain, lambda model: torch.optim.Adam(model.parameters(), lr=0.01)),
}


@pytest.fixture
def recorded(record_loop):
    def make(loop, **options):
        body, optimizer_of = LOOPS[loop]
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        batches = [{"x": torch.randn(2, 4)} for _ in range(3)]
        given = {"chips": 1, "checkpoint_every": 1, "numerics": "exact", **options}
        return record_loop(model, optimizer_of(model), batches, body, **given)

    return make


def contested(run):
    """The run as a bundle holds it that opens all steps."""
    return HeldRun(
        run_id=run.manifest.run,
        lab="lab",
        head=run.manifest,
        head_digest=run.manifest_digest,
        metadata=run.metadata,
        declared=run.declared,
        opened=Opened(leaves={leaf.step: leaf for leaf in run.load_steps()[0]}, roots={}),
    )


def decided(recorded, cluster, prover=None):
    """Who loses the contest between the lab that recorded this and a cluster; None where they agree."""
    contest = held(recorded, cluster, prover)
    if contest is None:
        return None
    made, about, signed = contest
    return decide(made, [about], [(KEY.verifying, signed)], trust_of(recorded))


def trust_of(recorded):
    return replace(recorded.trust, clusters=frozenset({KEY.verifying}))


def held(recorded, cluster, prover=None):
    """A contest, its run, and the replay that it is about; None where lab and cluster agree."""
    key = recorded.trust.labs["lab"]
    run = RunFolder(recorded.run, key)
    about, prover = contested(run), prover or RunProver(run, cluster)
    reached = prover._execute(STEP, capture=None).leaf
    leaves = list(about.opened.leaves.values())
    if reached == leaves[STEP]:
        return None
    lab_key = SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(recorded.run)))
    replayed = Replayed(
        segment=(0, 0, len(leaves) - 1),
        start_state=state_digest(leaves[0].state.to_json()),
        initial_state=None,
        leaves=tuple(leaf_hash(each.encoded()) for each in [*leaves[1:STEP], reached]),
        inside=(),
        witness=None,
        contradicted_step=None,
        decisions=Decisions(),
    )
    signed = SignedReplay(head=about.head_digest, device="sse41", fingerprint="", readable=True, replays=(replayed,))
    made = hold(
        about,
        [(KEY.verifying, signed)],
        trust_of(recorded),
        lab=Side(run=run, prover=LabProver(recorded.run), key=lab_key),
        cluster=Side(run=run, prover=prover, key=KEY),
        referee=KEY,
        now=recorded.now,
    )
    return made, about, signed


def operators(recorded):
    run = RunFolder(recorded.run, recorded.trust.labs["lab"])
    return run.program(execution_of(run.leaf(STEP)).program).calls


def lying(recorded, monkeypatch, loop, at, **options):
    """A lab that takes that operator otherwise."""
    tell_with(monkeypatch, "wrong-operator", lambda step: Raised(at))
    return recorded(loop, name=f"wrong-{at}", lie="wrong-operator", lie_step=STEP, **options)


@pytest.mark.parametrize("loop", LOOPS)
def test_c30_a_false_operator_anywhere_names_the_cluster(recorded, loop):
    """Every fifth operator of a step that reads values, many of which change what it reads."""
    honest = recorded(loop)
    rulings = [decided(honest, Raised(at)) for at in range(1, len(operators(honest)), 5)]
    found = [each for each in rulings if each is not None]
    assert len(found) > 4
    assert {each.guilty for each in found} == {(CLUSTER,)}, found


@pytest.mark.parametrize(("loop", "operators"), [("a loss", (1, 2, 3, 21, 28)), ("Adam's counter", (1, 18, 27))])
def test_c30_a_false_operator_anywhere_names_the_lab(recorded, loop, operators, monkeypatch):
    for at in operators:
        ruling = decided(lying(recorded, monkeypatch, loop, at), Conduct())
        assert ruling.guilty == (LAB,), at
        assert "does not give what lab states" in ruling.why, at


def test_c30_through_files_the_lab_is_named(recorded, monkeypatch, devices, tmp_path, capsys):
    """A round, a contest and whoever holds both files, by the command line."""
    wrong = lying(recorded, monkeypatch, "a loss", 3)
    world, bundle = played(tmp_path / "world", wrong, devices)
    trust, file = tmp_path / "trust.json", tmp_path / "contest.json"
    trust.write_text(json.dumps(world.trust().to_json()))
    assert main(["world", "contest", str(world.folder), "--out", str(file)]) == 0
    verify = ["verify", str(bundle), "--trust", str(trust), "--contest", str(file)]
    assert main(verify) == 1
    said = capsys.readouterr().out
    assert "decided by opened operator aten.mean.default: executing" in said
    assert "does not give what lab states" in said
    with off("reads are results"):
        file.unlink()
        assert main(["world", "contest", str(world.folder), "--out", str(file)]) == 0
        assert main(verify) == 3
    assert "because of what a cluster said, and the cluster is wrong" in capsys.readouterr().out


def test_c30_guard_off_the_honest_cluster_is_named(recorded, monkeypatch):
    wrong = lying(recorded, monkeypatch, "a loss", 3)
    with off("reads are results"):
        assert decided(wrong, Conduct()).guilty == (CLUSTER,)


class Misread(RunProver):
    """A cluster that computes as was recorded, and states other values that the step read, or other numbers."""

    def __init__(self, run, **changes):
        super().__init__(run, Conduct())
        self._changes = changes

    def _execute(self, step, *, capture):
        traced = super()._execute(step, capture=capture)
        if step != STEP:
            return traced
        assert traced.leaf is not None
        execution = replace(execution_of(traced.leaf), **self._changes)
        return replace(traced, leaf=replace(traced.leaf, execution=execution))


@pytest.mark.parametrize("changes", [{"reads": str(digest_bytes("reads", b""))}, {"slots": {"0x1.0p+0": (0,)}}])
def test_c30_a_cluster_that_states_other_values_is_named(recorded, changes):
    honest = recorded("a loss")
    run = RunFolder(honest.run, honest.trust.labs["lab"])
    assert decided(honest, None, prover=Misread(run, **changes)).guilty == (CLUSTER,)


@pytest.mark.parametrize(("loop", "at"), [("a loss", 3), ("a loss", 21), ("Adam's counter", 18)])
def test_c30_a_dispute_of_two_labs_names_the_liar(recorded, loop, at, monkeypatch):
    right = recorded(loop, name="right", lab="right")
    wrong = lying(recorded, monkeypatch, loop, at, lab="wrong")
    trust = replace(
        right.trust,
        labs={**right.trust.labs, **wrong.trust.labs},
        chips={**right.trust.chips, **wrong.trust.chips},
        countersigned=right.trust.countersigned | wrong.trust.countersigned,
    )
    first, second = (Disputant(run=open_run(each.run, trust), prover=LabProver(each.run)) for each in (right, wrong))
    evidence = settle(first, second, trust).evidence
    assert (evidence["guilty"], evidence["step"]) == (f"wrong-{at}", STEP), evidence


def files_of(made, folder):
    """A bundle and the trust file of who reads it."""
    bundle, trust = folder / "bundle.json", folder / "trust.json"
    bundle.write_bytes(made.data)
    trust.write_text(json.dumps(made.trust.to_json()))
    return ["verify", str(bundle), "--trust", str(trust)]


@pytest.fixture
def convicting(make_run, devices, tmp_path):
    """The command that verifies a bundle which rejects its lab."""
    lied = make_run(lie="wrong-operator", lie_step=2, numerics="exact", steps=3, chips=1)
    return files_of(made(lied, devices, settings=replace(SETTINGS, samples=1)), tmp_path)


@pytest.fixture
def beside(recorded, tmp_path):
    """What a caller may give beside a bundle, and should not: options by what they are."""
    model = tmp_path / "model.safetensors"
    model.write_bytes(b"weights")
    found = {"another model": ["--model", str(model)], "no file": ["--contest", str(tmp_path / "nowhere.json")]}
    other = held(recorded("a loss"), Raised(1))[0]
    forged = other.replace(b'"format"', b'"farmat"')
    for name, content in {"another run": other, "{}": b"{}", "no JSON": b"{", "another form": forged}.items():
        (tmp_path / f"{len(found)}.json").write_bytes(content)
        found[name] = ["--contest", str(tmp_path / f"{len(found)}.json")]
    return found


def test_c31_what_is_not_about_a_bundle_changes_nothing_in_it(convicting, beside, capsys):
    """The verdict stands on the first output, and names its lab; the caller's mistake is one line on the other."""
    assert main(convicting) == 1
    alone = capsys.readouterr().out
    assert f"says REJECT, judged at {NOW}: lab, run " in alone
    for name, words in beside.items():
        assert main([*convicting, *words]) == 2, name
        said = capsys.readouterr()
        assert said.out == alone, name
        assert said.err.count("\n") == 1, name
    assert "give a file that `world contest` wrote" in said.err


def test_c31_guard_off_the_lab_is_named_no_more(convicting, beside, capsys):
    with off("contests are the caller's"):
        assert main([*convicting, *beside["another run"]]) == 1
    assert "lab, run " not in capsys.readouterr().out
