"""Law 6: a pipe in somebody else's folder keeps no command waiting."""

from __future__ import annotations

import os
import threading
import time

import pytest

from analysis.cli import main
from monitor.transcript.layout import METADATA
from tests.guards import off

COMMANDS = {
    "declare show": (("declare", "show"), METADATA),
    "program show": (("program", "show"), "programs/x.json"),
}


@pytest.fixture
def words(tmp_path, request):
    """A command on a folder in which one file is a pipe that nobody writes to; returns also the pipe."""
    command, name = COMMANDS[request.param]
    pipe = tmp_path / "run" / name
    pipe.parent.mkdir(parents=True)
    os.mkfifo(pipe)
    return [*command, str(tmp_path / "run")], pipe


def is_read(words, pipe) -> bool:
    """Tell whether the command begins to wait for the pipe, and end its waiting."""
    thread = threading.Thread(target=main, args=(words,))
    thread.start()
    while thread.is_alive():
        try:
            os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:
            time.sleep(0.01)
        else:
            thread.join()
            return True
    return False


@pytest.mark.parametrize("words", COMMANDS, indirect=True)
def test_nobody_waits_for_a_pipe(words, capsys):
    assert not is_read(*words)
    assert "it is not a plain file" in capsys.readouterr().err


@pytest.mark.parametrize("words", COMMANDS, indirect=True)
def test_guard_off_the_command_waits(words):
    with off("files that end"):
        assert is_read(*words)


NAMED = ("--contest", "--earlier", "--rules", "--memory", "--trust", "--key", "--verdict")
"""Options that name a file of the caller's (row B13)."""


@pytest.fixture
def named(honest, tmp_path, request):
    """A command for which the caller names a pipe that nobody writes to; returns also the pipe."""
    pipe, run, trust = tmp_path / "pipe", str(honest.run), str(honest.run.with_name("run.trust.json"))
    bundle = tmp_path / "bundle.json"
    bundle.write_text("{}")
    os.mkfifo(pipe)
    option = [request.param, str(pipe)]
    if request.param == "--verdict":
        return ["explore", run, *option, "--out", str(tmp_path / "out.html")], pipe
    if request.param in ("--contest", "--trust"):
        return ["verify", str(bundle), *(["--trust", trust] if request.param == "--contest" else []), *option], pipe
    more = ["--bundle", str(tmp_path / "new.json"), "--cluster-key", str(pipe)] if request.param == "--key" else []
    return ["inspect", run, "--trust", trust, "--samples", "1", *option, *more], pipe


@pytest.mark.parametrize("named", NAMED, indirect=True)
def test_b13_nobody_waits_for_a_pipe_that_the_caller_names(named, capsys):
    assert not is_read(*named)
    assert "it is not a plain file" in capsys.readouterr().err


def test_b13_guard_off_the_command_waits(named_rules):
    with off("files that end"):
        assert is_read(*named_rules)


@pytest.fixture
def named_rules(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    return ["rules", "show", str(pipe)], pipe
