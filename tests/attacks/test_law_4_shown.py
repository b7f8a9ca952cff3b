"""Law 4: what an inspectorate signs is what it was shown, byte for byte."""

from __future__ import annotations

import json

import pytest
import torch

from analysis.cli import main
from monitor import Recorder
from tests.guards import off


@pytest.fixture
def growing(tmp_path, capsys):
    """A run with two programs that are shown, and a lab that adds another before the signature; how to sign it."""
    model = torch.nn.Linear(4, 3)
    recorder = Recorder(model, torch.optim.SGD(model.parameters(), lr=0.1), out=tmp_path / "run", chips=1)

    def step(rows):
        batch = torch.ones(rows, 4)
        with recorder.step(batch):
            model.zero_grad(set_to_none=False)
            model(batch).square().mean().backward()
            recorder._run.loop.optimizer.step()

    def call(*words):
        capsys.readouterr()
        return main([*map(str, words)]), capsys.readouterr()

    step(4)
    step(4)
    assert call("registry", "keygen", tmp_path / "key")[0] == 0
    shown = json.loads(call("declare", "show", tmp_path / "run", "--json")[1].out)
    assert len(shown["programs"]) == 2
    assert f"shown          {shown['shown']}" in call("declare", "show", tmp_path / "run")[1].out

    def countersign():
        words = ("--shown", shown["shown"], "--key", tmp_path / "key", "--out", tmp_path / "signed.json", "--json")
        return call("declare", "countersign", tmp_path / "run", *words)

    return lambda: step(2), step, countersign, tmp_path


def test_a56_a_program_that_was_added_after_the_show_is_not_signed(growing):
    add, _, countersign, folder = growing
    add()
    code, said = countersign()
    assert (code, said.err.count("\n")) == (2, 1)
    assert "no longer has the digest" in said.err
    assert not (folder / "signed.json").exists()


def test_a56_guard_off_more_is_signed_than_was_shown(growing):
    add, _, countersign, _ = growing
    add()
    with off("what was shown"):
        code, said = countersign()
    assert code == 0
    assert len(json.loads(said.out)["programs"]) == 3


def test_a56_a_lab_that_only_goes_on_changes_nothing(growing):
    """Further steps of the same program do."""
    _, step, countersign, _ = growing
    step(4)
    code, said = countersign()
    assert code == 0
    assert len(json.loads(said.out)["programs"]) == 2
