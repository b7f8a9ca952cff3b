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
    assert "it is no plain file" in capsys.readouterr().err


@pytest.mark.parametrize("words", COMMANDS, indirect=True)
def test_guard_off_the_command_waits(words):
    with off("files that end"):
        assert is_read(*words)
