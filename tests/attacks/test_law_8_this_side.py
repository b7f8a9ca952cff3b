"""Law 8, rows B15, B20, B21: what fails on the inspector's side is nobody's guilt, and nobody's acquittal."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import nullcontext

import pytest

from analysis.cli import main
from analysis.commands.runs import trust_path
from firmware_sim.errors import EvidenceError
from tests.denied import permissions_bind

NOW = ("--now", "2026-01-01T00:30:00Z")


@pytest.fixture
def run(honest, tmp_path):
    """An honest run with its trust file."""
    run = tmp_path / "run"
    shutil.copytree(honest.run, run)
    trust_path(run).write_text(json.dumps(honest.trust.to_json()))
    return run


def verify(run, capsys) -> tuple[int, str]:
    code = main(["verify", str(run), "--trust", str(trust_path(run)), *NOW])
    said = capsys.readouterr()
    return code, said.out + said.err


@pytest.mark.parametrize("is_guarded", [True, False])
def test_b15_a_manifest_that_the_inspector_may_not_read(is_guarded, run, capsys, monkeypatch):
    (run / "manifest.json").chmod(0)
    if not is_guarded:

        class Blaming(nullcontext):
            """As readers did it: whatever goes wrong is the lab's fault."""

            def __exit__(self, *raised: object) -> None:
                error = raised[1]
                if isinstance(error, OSError):
                    raise EvidenceError(f"cannot read it: {error.strerror}")

        monkeypatch.setattr("monitor.transcript.reader.foreign", lambda name, _=None: Blaming(name))
    with permissions_bind():
        code, said = verify(run, capsys)
    assert (code, said.split()[0]) == ((3, "INCONCLUSIVE") if is_guarded else (1, "REJECT"))
    assert "Permission denied" in said or not is_guarded


@pytest.mark.parametrize("is_guarded", [True, False])
def test_b20_a_rule_that_stands_twice_in_a_trust_file(is_guarded, run, capsys, monkeypatch):
    """A person reads the first, a program the last: a run beyond the first limit is accepted."""
    text = trust_path(run).read_text()
    strict = text.replace('"labs"', '"maximum_flop": 1, "labs"', 1)
    trust_path(run).write_text(strict.rstrip().removesuffix("}") + ', "maximum_flop": 1000000000}')
    if not is_guarded:
        monkeypatch.setattr("firmware_sim.evidence.canonical._once", dict)
    code, said = verify(run, capsys)
    assert code == (2 if is_guarded else 0), said
    assert ("the key 'maximum_flop' occurs twice" in said) is is_guarded
    trust_path(run).write_text(strict)
    assert verify(run, capsys)[0] == 1


_SHORT = """
import os, resource, sys
import inspector.devices
inspector.devices.enter = lambda name: None
from analysis.cli import main
words = ["train", "--chips", "1", "--steps", "1", "--batch-size", "2"]
main([*words, "--preset", "digits-cnn", "--out", "warm"])
for number, more in enumerate(map(int, sys.argv[1:])):
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (more << 20), resource.RLIM_INFINITY))
    code = main([*words, "--preset", "resnet50-cifar", "--out", f"run{number}"])
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    print("ended", code, sorted(name for name in os.listdir() if name.startswith(f"run{number}")), flush=True)
"""


def test_b21_too_little_memory(tmp_path):
    """Wherever it runs out, that is one line: no abort, no foreign backtrace, and the run's name is free or goes on."""
    done = subprocess.run(
        [sys.executable, "-c", _SHORT, "40", "120", "250"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    ended = [line for line in done.stdout.splitlines() if line.startswith("ended")]
    assert (done.returncode, len(ended)) == (0, 3), done.stdout + done.stderr
    assert set(ended) == {"ended 3 []"}
    told = [line for line in done.stderr.splitlines() if line.startswith("chipwitness")]
    assert set(told) == {"chipwitness train: there is not enough memory"}
    assert "Traceback" not in done.stderr
