"""Law 9: a bundle says what it is worth, and what whoever reads it learns.

Rows A55, A56 (what a bundle tells somebody who can guess).
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from analysis.cli import main
from analysis.commands.runs import trust_path
from firmware_sim.evidence import canonical, decode_base64
from inspector.bundle.contents import Bundle
from inspector.inspection.guards import Settings
from inspector.inspection.trust import Trust
from inspector.registry.keyfiles import write_keys
from monitor import Recorder
from monitor.replay.repetition import ProgramTraining
from monitor.transcript import RunFolder
from tests.conftest import STARTED, Recorded
from tests.guards import off
from tests.inspector.bundle.conftest import CLUSTER, INSPECTORATE, made
from tests.leaves import execution_of

NOW = "2026-01-01T00:30:00Z"
LINE = "Who knows the state before a step can check a guess of its whole batch"


@pytest.fixture
def supplied(tmp_path):
    """A run of a loop of one's own, whose weights come from nobody knows where; each batch is one sample."""
    torch.manual_seed(0)
    run, model = tmp_path / "loop", nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given: dict[str, Any]
    given = {"seed": 5, "chips": 1, "checkpoint_every": 3, "snapshot_rate": 1, "lab": "lab", "numerics": "exact"}
    recorder = Recorder(model, optimizer, out=run, started=STARTED, hours=1.0, **given)
    for number in (7, 11, 5):
        batch = {"x": sample(number)}
        with recorder.step(batch) as step:
            optimizer.zero_grad()
            loss = model(batch["x"]).square().mean()
            loss.backward()
            optimizer.step()
            step.commit(loss=loss)
    recorder.finish()
    return Recorded(run, Trust.load([trust_path(run)], [run]))


def sample(number):
    return torch.tensor([[float(number), 1.0, 0.0]])


def inspected(recorded, folder, capsys, *more):
    """What the inspection said, and the command that verifies its bundle."""
    for name, key in (("inspectorate", INSPECTORATE), ("cluster", CLUSTER)):
        write_keys(folder / f"{name}.key", key)
    trust, bundle = folder / "trust.json", folder / "bundle.json"
    trust.write_text(json.dumps(recorded.trust.to_json()))
    keys = ["--key", str(folder / "inspectorate.key"), "--cluster-key", str(folder / "cluster.key")]
    words = ["inspect", str(recorded.run), "--trust", str(trust), "--samples", "1", "--seed", "x", "--device", "sse41"]
    assert main([*words, *keys, "--bundle", str(bundle), "--now", NOW, *more]) == 0
    public = ["--inspectorate", str(folder / "inspectorate.key.pub"), "--cluster", str(folder / "cluster.key.pub")]
    return capsys.readouterr().out, ["verify", str(bundle), "--trust", str(trust), *public]


CAVEATS = (
    "past FLOP is unknown: the weights that",
    "a lab that knows everything except the secret of the draw escapes with these chances",
    f"judged at {NOW}",
    "simulated draw: anyone who knows the seed knew it beforehand",
    "countersigned by a simulated inspectorate",
    "one process played inspectorate and cluster",
    "[scope] not covered:",
    "unmetered work",
    "labs that declare nothing",
    LINE,
)


@pytest.mark.usefixtures("kept_devices")
def test_a55_verify_says_what_inspect_says(supplied, tmp_path, capsys):
    said, verify = inspected(supplied, tmp_path, capsys)
    assert main(verify) == 0
    shown = capsys.readouterr().out
    for caveat in CAVEATS:
        assert caveat in said, caveat
        assert caveat in shown, caveat
    scopes = [each.partition("[scope]")[2].partition("\n  [")[0] for each in (said, shown)]
    assert scopes[0] == scopes[1]
    assert main([*verify, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["evidence"]
    [line] = found["lineages"]
    assert line["origin"] == "supplied"
    assert "were supplied" in line["past_unknown"]
    names = ("time", "simulated_draw", "one_process", "countersigned_by_simulation")
    assert [found[name] for name in names] == [NOW, True, True, True]
    assert found["odds"][0]["violations"]
    assert [f"    - {each}" for each in found["scope"].removeprefix("not covered: ").split("; ")] == scopes[
        1
    ].splitlines()[1:]


def test_a55_what_a_verdict_leaves_out_stands_in_what_the_lab_signed(supplied, devices, tmp_path, capsys):
    """An inspectorate that calls the weights fresh, and the chips asked live, is not repeated."""
    one = made(supplied, devices, settings=replace(SETTINGS, samples=1))
    bundle = Bundle.open(one.data, INSPECTORATE.verifying)
    told = canonical.decode(
        canonical.encode({key: bundle.predicate[key] for key in bundle.predicate if key != "items"})
    )
    told["evidence"]["lineages"][0] |= {"origin": "seed", "past_unknown": None}
    told["reasons"] = [{"guard": "all", "text": "everything is well"}]
    (tmp_path / "bundle.json").write_bytes(Bundle.sign(told, bundle.items, INSPECTORATE))
    (tmp_path / "trust.json").write_text(json.dumps(one.trust.to_json()))
    words = ["verify", str(tmp_path / "bundle.json"), "--trust", str(tmp_path / "trust.json")]
    assert main(words) == 0
    assert "past FLOP is unknown: the weights that run " in capsys.readouterr().out
    with off("what a bundle is worth"):
        assert main(words) == 0
    assert "past FLOP is unknown" not in capsys.readouterr().out


SETTINGS = Settings(samples=1, seed="x", devices=("sse41",))


def guesser(one, trust, run):
    """Somebody with a bundle and the public start of a run: tells whether a sample was that of the first step.

    Returns a function of the guess; what it gives names the parts of the bundle that confirm it.
    """
    items = Bundle.open(one.data, INSPECTORATE.verifying).items
    [path] = [path for path in items if path.endswith("/steps.json")]
    opened = canonical.decode(items[path])["leaves"]
    leaf = canonical.decode(decode_base64(opened["1"]["leaf"]))
    folder = RunFolder(run, trust.labs["lab"])  # of which the guesser uses what is public: the start, and the program
    declared, start = folder.declared, folder.checkpoint(0)
    execution = execution_of(folder.leaf(1))
    program = folder.program(execution.program)

    def confirmed(guess):
        training = ProgramTraining(declared)
        training.restore(start, 0)
        mine, _ = training.take_step(program, execution, {"x": guess}, bytes(32), b"")
        found = mine.to_json()
        return {name for name in ("batch", "state", "loss", "log") if found[name] == leaf[name]}

    return confirmed


def test_a56_a_guesser_confirms_a_sample_and_is_said_to(supplied, devices, tmp_path, capsys):
    """What a bundle reveals is what its line says: state and loss confirm a guess, the salted root of a batch does not.

    Of a hundred guesses the right one alone is confirmed.
    """
    one = made(supplied, devices, settings=SETTINGS)
    confirmed = guesser(one, supplied.trust, supplied.run)
    found = {guess: confirmed(sample(guess)) for guess in range(100)}
    assert found[7] >= {"state", "loss"}
    assert "batch" not in found[7]
    assert [guess for guess, parts in found.items() if parts & {"state", "loss"}] == [7]
    (tmp_path / "bundle.json").write_bytes(one.data)
    (tmp_path / "trust.json").write_text(json.dumps(one.trust.to_json()))
    words = ["verify", str(tmp_path / "bundle.json"), "--trust", str(tmp_path / "trust.json")]
    assert main(words) == 0
    assert LINE in capsys.readouterr().out
    with off("what a bundle reveals"):
        assert main(words) == 0
    assert LINE not in capsys.readouterr().out
