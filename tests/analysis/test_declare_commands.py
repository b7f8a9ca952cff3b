"""``declare``: a lab proposes, an inspectorate with a key of its own countersigns, also what came later."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from fractions import Fraction

import pytest
import torch
from torch.nn import functional

from analysis.cli import main
from firmware_sim.evidence import SigningKey
from monitor import Recorder
from tests.guards import off

NOW = ("--now", "2026-01-01T00:30:00Z")


@pytest.fixture
def shell(tmp_path, capsys, kept_devices):
    """Runs a command whose words {…} name files of this test's folder; returns code and output."""

    def call(*words):
        capsys.readouterr()
        code = main([str(word).format(here=tmp_path) for word in words])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out + captured.err

    return call


@pytest.fixture
def countersign(shell):
    """Signs what is shown of ``run``; returns code and output."""

    def call(out, *words):
        shown = json.loads(shell("declare", "show", "{here}/run", "--json")[1])["shown"]
        given = ("--shown", shown, "--key", "{here}/key", "--out", f"{{here}}/{out}")
        return shell("declare", "countersign", "{here}/run", *given, *NOW, *words)

    return call


@pytest.fixture
def signed(shell, countersign, tmp_path):
    """A loop that an inspectorate with a key of its own countersigned when one step was there, and whose last differs.

    ``trust.json`` names the key and no declaration; ``first.json`` is the signature.
    """
    assert shell("registry", "keygen", "{here}/key")[0] == 0
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    recorder = Recorder(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        out=tmp_path / "run",
        chips=3,
        snapshot_rate=Fraction(1),
        started=datetime(2026, 1, 1, tzinfo=UTC),
        hours=1.0,
    )
    for step, rows in enumerate((4, 4, 4, 2), start=1):
        batch = {"x": torch.randn(rows, 4), "y": torch.randint(0, 3, (rows,))}
        with recorder.step(batch):
            model.zero_grad(set_to_none=False)
            functional.cross_entropy(model(batch["x"]), batch["y"]).backward()
            recorder._run.loop.optimizer.step()
        if step == 2:
            assert countersign("first.json")[0] == 0
    recorder.finish()
    trust = json.loads((tmp_path / "run.trust.json").read_text())
    public = (tmp_path / "key.pub").read_text().split()[2]
    del trust["countersigned"]
    (tmp_path / "trust.json").write_text(json.dumps({**trust, "inspectorates": [public]}))
    return tmp_path


def look(shell, *files):
    given = [word for file in ("trust.json", *files) for word in ("--trust", "{here}/" + file)]
    return shell("inspect", "{here}/run", *given, "--samples", 3, "--device", "sse41", *NOW)


def test_an_amendment_is_open_until_it_is_countersigned_too(shell, countersign, signed):
    code, out = look(shell)
    assert code == 3
    assert "run: no inspectorate in the trust file has countersigned a declaration of lab lab-1" in out
    code, out = look(shell, "first.json")
    assert code == 3
    assert "step 3: runs program" not in out
    assert "step 4: runs program " in out
    assert ", and no amendment that allows it was countersigned" in out
    with off("amendments"):
        assert look(shell, "first.json")[0] == 0
    words = ("second.json", "--amends", "{here}/first.json", "--since", 4)
    assert countersign(*words)[0] == 0
    code, out = look(shell, "first.json", "second.json")
    assert code == 0, out
    assert "simulated inspectorate" not in out
    assert "    - amended: run since step 4 by statement 2 of 2026-01-01T00:30:00Z" in out
    changes = json.loads(shell("declare", "show", "{here}/second.json", "--amends", "{here}/first.json", "--json")[1])
    assert [each[:10] for each in changes["changes"]] == ["+ programs"]
    code, out = shell("declare", "show", "{here}/run", "--amends", "{here}/first.json")
    assert "against statement 1, of 2026-01-01T00:30:00Z:\n+              programs " in out
    assert countersign(*words) == (2, f"chipwitness declare: {signed}/second.json: exists already\n")


def test_a_declaration_that_another_key_signed_counts_for_nothing(shell, countersign, signed):
    (signed / "key").unlink()
    (signed / "key").write_text(f"chipwitness-private-key ed25519 {SigningKey.generate().private_bytes().hex()}\n")
    assert countersign("other.json")[0] == 0
    assert look(shell, "other.json")[0] == 3
    with off("countersigned"):
        assert look(shell, "other.json")[0] == 0


def test_a_run_that_departs_from_its_countersigned_declaration_is_rejected(shell, signed, record_loop):
    """The inspectorate signed this training with rate 0.1; the lab runs another with 5.0 in its place."""
    model = torch.nn.Linear(4, 3)

    def body(model, optimizer, batch):
        model(batch).sum().backward()
        optimizer.step()

    other = record_loop(
        model,
        torch.optim.SGD(model.parameters(), lr=5.0),
        [torch.ones(2, 4)],
        body,
        name="other",
        lab="lab-1",
        seed=0,
        snapshot_rate=Fraction(1),
    )
    given = ("--trust", "{here}/trust.json", "--trust", "{here}/first.json")
    words = ("inspect", other.run, *given, "--samples", 3, "--device", "sse41", *NOW)
    code, out = shell(*words)
    assert code == 1
    assert (
        "the declaration of other is not the countersigned one; these parts differ: checkpoint_every, groups, origin"
        in out
    )
    with off("countersigned"):
        assert shell(*words)[0] == 0


def test_show_says_what_is_declared_and_who_signed(shell, signed):
    code, out = shell("declare", "show", "{here}/run")
    assert code == 0
    for text in ("open end", "numerics       exact", "supplied: past FLOP is unknown", "'lr' 0.1", "no one yet"):
        assert text in out
    assert out.count("FLOP a step, at most") == 3
    shown = json.loads(shell("declare", "show", "{here}/run", "--json")[1])
    assert shown["signer"] is None
    assert [each["flop"] for each in shown["programs"]] != []
    stated = json.loads(shell("declare", "show", "{here}/first.json", "--json")[1])
    assert stated["digest"] == shown["digest"]
    assert stated["programs"] == [each for each in shown["programs"] if each in stated["programs"]] != []
    assert stated["signer"].startswith("sha256:")
    code, out = shell("declare", "show", "{here}/first.json")
    assert f"key {stated['signer']} (not checked here)" in out


@pytest.mark.parametrize("content", [b"", b"{}", b'{"payload":"","payloadType":"","signatures":[]}', b"[]"])
def test_what_is_no_declaration_is_refused_in_one_line(shell, tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    code, out = shell("declare", "show", "{here}/file")
    assert code == 2
    assert out.count("\n") == 1
    assert shell("declare", "show", "{here}/nowhere")[0] == 2


def test_an_altered_statement_is_worth_nothing(shell, signed):
    path = signed / "first.json"
    envelope = json.loads(path.read_text())
    envelope["signatures"][0]["sig"] = "A" * 86 + "=="
    path.write_text(json.dumps(envelope, sort_keys=True, separators=(",", ":")))
    assert look(shell, "first.json")[0] == 3
    envelope["signatures"] = []
    path.write_text(json.dumps(envelope, sort_keys=True, separators=(",", ":")))
    assert look(shell, "first.json")[0] == 2


def test_fine_tuning_by_commands(shell, monkeypatch):
    monkeypatch.setattr("inspector.devices.enter", lambda name: None)
    preset = (
        "train",
        "--preset",
        "digits-cnn",
        "--batch-size",
        8,
        "--snapshot-rate",
        "1/2",
        "--steps",
        3,
        "--chips",
        3,
    )
    assert shell(*preset, "--out", "{here}/parent")[0] == 0
    tuned = ("--parent", "{here}/parent", "--after", "{here}/parent", "--learning-rate", 0.01, "--out", "{here}/child")
    assert shell(*preset, *tuned)[0] == 0
    trust = ("--trust", "{here}/parent.trust.json", "--trust", "{here}/child.trust.json")
    words = ("inspect", "{here}/parent", "{here}/child", *trust, "--samples", 3, "--device", "sse41")
    code, out = shell(*words)
    assert code == 0, out
    assert "parent → child take " in out
    assert "countersigned by a simulated inspectorate" in out
    code, out = shell(*words, "--maximum-flop", 100_000)
    assert code == 1
    assert "the chain parent → child takes " in out
    assert "after its last step 3, else zero" in shell("declare", "show", "{here}/child")[1]
