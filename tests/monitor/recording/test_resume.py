"""A run that is killed at any moment is a valid unfinished run, loses nothing, and resumes to the same bits."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from fractions import Fraction

import pytest

from analysis.cli import main
from firmware_sim import RecordKind, parse_log
from firmware_sim.errors import CallerError
from inspector.devices import device
from inspector.inspection.inspection import verify
from inspector.inspection.transcripts import open_run
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome
from monitor.lab.simulated_lab import SimulatedLab, lab_path
from monitor.recording.recipes import resume

OPTIONS = {"steps": 6, "chips": 2, "rate": Fraction(1, 2), "checkpoint_every": 3}


class Killed(BaseException):
    """Stands for the end of the process: no handler of the product catches it."""


def leaves_of(recorded):
    leaves, _ = open_run(recorded.run, recorded.trust).load_steps()
    return list(leaves)


def power_cut(monkeypatch):
    """Return a function that cuts the power of all chips that this process holds."""
    labs = []
    create = SimulatedLab.__init__

    def remember(self, *args):
        create(self, *args)
        labs.append(self)

    monkeypatch.setattr(SimulatedLab, "__init__", remember)
    return lambda: [chip.cut_power() for lab in labs for chip in lab.chips]


@pytest.mark.parametrize("numerics", ["rounded", "exact"])
def test_dying_at_each_replacement_of_a_file(record, tmp_path, monkeypatch, numerics):
    """Every file moves in by os.replace, so dying at the n-th, for each n, visits every state on disk."""
    whole = record(tmp_path / "whole", numerics=numerics, **OPTIONS)
    expected, replace = leaves_of(whole), os.replace
    calls = 0

    def counting(*args):
        nonlocal calls
        calls += 1
        return replace(*args)

    monkeypatch.setattr("monitor.files.os.replace", counting)
    record(tmp_path / "counted", numerics=numerics, **OPTIONS)
    total = calls
    assert total > 20
    monkeypatch.undo()
    rng = random.Random(f"dying {numerics}")
    seen: set[int | str] = set()
    for number in sorted({1, 2, 3, total - 1, total, *rng.sample(range(4, total - 1), 6)}):
        with monkeypatch.context() as patch:
            cut = power_cut(patch)
            left = number

            def dying(*args):
                nonlocal left
                left -= 1
                if left == 0:
                    raise Killed
                return replace(*args)

            patch.setattr("monitor.files.os.replace", dying)
            run = tmp_path / f"killed-{number}"
            with pytest.raises(Killed):
                record(run, numerics=numerics, **OPTIONS)
            cut()
        if not run.exists():
            seen.add("nothing")
            continue
        recorded = type(whole)(run, whole.trust)
        verdict = verify(run, recorded.trust, now=recorded.now)
        assert verdict.outcome is Outcome.INCONCLUSIVE, (number, verdict.reasons)
        assert verify(run, recorded.trust, now=recorded.late).outcome is Outcome.REJECT
        before = leaves_of(recorded)
        manifest = open_run(run, recorded.trust).manifest
        was_closing = manifest.is_closing
        assert before == expected[: len(before)]
        resume(run)
        assert leaves_of(recorded) == expected
        verdict = verify(run, recorded.trust, now=recorded.now)
        assert verdict.outcome is Outcome.ACCEPT, (number, verdict.reasons)
        log = parse_log((run / "chips/lab-chip-0000/log.bin").read_bytes())
        # The evidence of a run that died while it was closed had been read off the chips before.
        assert [record.kind for record in log].count(RecordKind.POWER_GAP) == (0 if was_closing else 1)
        seen.add(len(before))
    assert len(seen) >= 4


def records(run):
    journal = run / "journal.tsv"
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def command(*arguments, name="native"):
    environment = device(name).process_environment()
    return [sys.executable, "-m", "analysis.cli", *map(str, arguments)], environment


def run_command(*arguments):
    words, environment = command(*arguments)
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert "Traceback" not in done.stderr
    return done


@pytest.mark.sampled
@pytest.mark.parametrize("numerics", ["rounded", "exact"])
def test_killed_process_resumes_on_another_kernel_family(tmp_path, numerics, monkeypatch, capsys):
    monkeypatch.setattr("inspector.devices.enter", lambda name: None)

    def here(*arguments):
        """A command whose process is not the point."""
        return main([str(word) for word in arguments]), capsys.readouterr().out

    options = ["--preset", "digits-cnn", "--steps", "24", "--chips", "2", "--seed", "3", "--numerics", numerics]
    code, whole = here("train", *options, "--out", tmp_path / "whole", "--json")
    assert code == 0
    run, trust = tmp_path / "run", tmp_path / "run.trust.json"
    rng = random.Random(f"kill {numerics}")
    words, environment = command("train", *options, "--out", run, "--json")
    kills = 0
    while kills < 2:
        process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        steps = records(run)
        while records(run) < min(steps + rng.randint(2, 9), 22) and process.poll() is None:
            time.sleep(0.002)
        time.sleep(rng.random() * 0.02)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        kills += 1
        assert run.is_dir()
        now = datetime.now(UTC)
        late = now + timedelta(days=3)
        assert verify(run, Trust.load([trust]), now=now).outcome is Outcome.INCONCLUSIVE
        assert verify(run, Trust.load([trust]), now=late).outcome is Outcome.REJECT
        words, environment = command("train", "--resume", run, "--json", "--device", "sse41", name="sse41")
    assert here("verify", run, "--trust", trust)[0] == 3
    late_text = late.strftime("%Y-%m-%dT%H:%M:%SZ")
    assert here("verify", run, "--trust", trust, "--now", late_text)[0] == 1
    done = run_command("train", "--resume", run, "--json", "--device", "avx2")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["state_digest"] == json.loads(whole)["state_digest"]
    merged = Trust.load([trust])
    mine, _ = open_run(run, merged).load_steps()
    theirs, _ = open_run(tmp_path / "whole", merged).load_steps()
    assert list(mine) == list(theirs)
    code, verdict = here("verify", run, "--trust", trust)
    # A kill may hit a chip in the middle of a snapshot, which nothing can tell from a cut that spares it one.
    cut = code == 3 and "in the middle of a snapshot" in verdict
    assert code == 0 or cut, verdict
    log = parse_log((run / "chips/lab-1-chip-0000/log.bin").read_bytes())
    assert [record.kind for record in log].count(RecordKind.POWER_GAP) == 2


def test_finished_run_has_nothing_to_resume(honest):
    with pytest.raises(CallerError, match="finished"):
        resume(honest.run)


def test_only_the_lab_can_resume(honest, tmp_path):
    with pytest.raises(CallerError, match="no run folder"):
        resume(tmp_path / "nowhere")
    assert lab_path(tmp_path / "run").name == "run.lab"
