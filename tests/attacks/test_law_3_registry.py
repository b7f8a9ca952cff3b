"""Law 3, by files and the command line: which chips there are is what the registry signed; a chip is only itself."""

from __future__ import annotations

import json

import pytest

from analysis.cli import main
from tests.guards import off

TRAIN = ("train", "--preset", "digits-cnn", "--steps", "4", "--chips", "3", "--seed", "5", "--snapshot-rate", "1/2")


@pytest.fixture(autouse=True)
def _stay_in_this_process(monkeypatch, kept_devices):
    monkeypatch.setattr("inspector.devices.enter", lambda name: None)


@pytest.fixture
def shell(tmp_path, capsys):
    """Runs a command whose words {…} name files of this test's folder; returns code and output."""

    def call(*words):
        capsys.readouterr()
        code = main([str(word).format(here=tmp_path) for word in words])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out + captured.err

    return call


@pytest.fixture
def registered(shell, tmp_path):
    """A lab that trained on registered chips."""

    def make(*lie):
        assert shell(*TRAIN, *lie, "--registry", "{here}/world", "--out", "{here}/run")[0] == 0
        return tmp_path

    return make


TRUST = ("registry", "trust", "{here}/world/registry.db", "--registrar", "{here}/world/registrar.key.pub")
CHALLENGE = ("--challenge", "{here}/run.trust.json", "--out")


def look(shell, trust, *words, samples=3):
    given = ("--trust", "{here}/" + trust, "--samples", samples, "--device", "sse41")
    return shell("inspect", "{here}/run", *words, *given)


def test_the_registry_is_asked_and_its_view_is_named(shell, registered):
    registered()
    code, out = shell(*TRUST, "--lab", "lab-1", *CHALLENGE, "{here}/trust.json")
    assert code == 0
    assert "3 chips of lab-1, as the registry's signed view of size 6 lists them" in out
    for trust in ("trust.json", "run.trust.json"):
        code, out = look(shell, trust)
        assert code == 0
        assert "chips as the registry's signed view of size 6 lists them" in out


def test_a_lab_goes_on_with_its_registered_chips(shell, registered):
    registered()
    words = ("--steps", "5", "--registry", "{here}/world", "--after", "{here}/run", "--out", "{here}/next")
    assert shell(*TRAIN, *words)[0] == 0
    assert shell(*TRUST, *CHALLENGE, "{here}/trust.json")[0] == 0
    code, out = look(shell, "trust.json", "{here}/next", "--trust", "{here}/next.trust.json")
    assert code == 0, out
    assert "as the registry's signed view of size 7 lists them" in out
    code, out = shell("train", "--resume", "{here}/run", "--registry", "{here}/world")
    assert code == 2
    assert "leave out --registry" in out


def test_a_chip_that_the_view_does_not_list_like_this(shell, registered):
    """Somebody adds a chip to the inspector's file, with the entry and the path of another one."""
    folder = registered()
    data = json.loads((folder / "run.trust.json").read_text())
    listed = data["registry"]["chips"]
    listed["lab-1-chip-0001"]["entry"]["identity"] = listed["lab-1-chip-0000"]["entry"]["identity"]
    (folder / "edited.json").write_text(json.dumps(data))
    code, out = look(shell, "edited.json")
    assert code == 1
    assert "chip lab-1-chip-0001: the registry's signed view does not list it like this" in out
    with off("registry proof", "registered certificate"):
        assert look(shell, "edited.json")[0] == 0
    del listed["lab-1-chip-0001"]
    (folder / "without.json").write_text(json.dumps(data))
    code, out = look(shell, "without.json")
    assert code == 2
    assert "names a registry but holds no proof of chip lab-1-chip-0001" in out


def test_evidence_of_a_revoked_chip(shell, registered):
    registered()
    writes = ("{here}/world/registry.db", "--registrar-key", "{here}/world/registrar.key")
    assert shell("registry", "revoke", *writes, "--chip", "lab-1-chip-0002", "--reason", "opened")[0] == 0
    code, out = shell(*TRUST, *CHALLENGE, "{here}/trust.json")
    assert code == 2
    assert "lab-1-chip-0002 was revoked after the newest view was published" in out
    assert shell("registry", "publish", *writes)[0] == 0
    assert shell(*TRUST, *CHALLENGE, "{here}/trust.json")[0] == 0
    code, out = look(shell, "trust.json", samples=2)
    assert code == 3
    assert "chip lab-1-chip-0002: the run uses it, but the registry has revoked its certificate" in out
    assert shell("verify", "{here}/run", "--trust", "{here}/trust.json")[0] == 3
    with off("revoked chips"):
        assert look(shell, "trust.json", samples=2)[0] == 0


def test_a_clone_that_is_not_drawn(shell, registered):
    """Chip 0 holds the secrets of chip 1, and another one is drawn."""
    registered("--lie", "clone-identity")
    verdicts = {}
    for seed in range(12):
        code, out = look(shell, "run.trust.json", "--seed", seed, "--json", samples=1)
        verdict = json.loads(out)
        assert code == 1
        assert verdict["evidence"]["clones"][0]["stands_alone"]
        verdicts[verdict["evidence"]["drawn_chips"][0]] = seed
        if len(verdicts) > 1:
            break
    missed = [seed for chip, seed in verdicts.items() if chip != "lab-1-chip-0000"]
    assert missed
    with off("one chip, one identity"):
        assert look(shell, "run.trust.json", "--seed", missed[0], samples=1)[0] == 0
