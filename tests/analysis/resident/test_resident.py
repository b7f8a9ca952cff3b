"""Commands that a pool's resident process runs: the same words, codes and files as without one, and no memory."""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from analysis.commands import _resident_process
from analysis.resident import client
from analysis.resident.client import forward

ELSEWHERE = 99
FORWARD = """
import sys
from analysis.resident import client
{before}
code = client.forward(sys.argv[1:])
sys.exit(99 if code is None else code)
"""
ALTERED = "checkpoints/00000003.safetensors"
WORDS = ("--samples", "3", "--now", "2026-01-01T00:30:00Z", "--seed", "s", "--device", "sse41")


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


def environment(**changed: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return {**kept, **changed}


def ended(command: list[str], folder: Path, **changed: str) -> Ended:
    done = subprocess.run(command, cwd=folder, env=environment(**changed), capture_output=True, text=True)
    return Ended(done.returncode, done.stdout, done.stderr)


def alone(folder: Path, *words: str, **changed: str) -> Ended:
    """A command without a pool."""
    return ended([sys.executable, "-m", "analysis.cli", *words], folder, **changed)


def forwarded(*words: str, before: str = "") -> list[str]:
    return [sys.executable, "-c", FORWARD.format(before=before), *words]


def resident(folder: Path, *words: str, before: str = "", **changed: str) -> Ended:
    """A command by the resident process; code 99 where it would run in its own."""
    return ended(forwarded(*words, before=before), folder, **changed)


def without_seconds(text: str) -> str:
    text = re.sub(r'"seconds": [0-9.e-]+', '"seconds": …', text)
    return re.sub(r"in \S+ s; all of them would take \S+ s", "in … s", text)


def parents() -> dict[int, int]:
    """Parent of each process."""
    found = {}
    for place in Path("/proc").iterdir():
        try:
            found[int(place.name)] = int((place / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (ValueError, OSError):
            continue
    return found


def children(process: int) -> set[int]:
    return {child for child, parent in parents().items() if parent == process}


def threads(process: int) -> int:
    try:
        return len(list(Path(f"/proc/{process}/task").iterdir()))
    except OSError:
        return 0


def is_resident(process: int) -> bool:
    return b"analysis.commands._resident_process" in Path(f"/proc/{process}/cmdline").read_bytes()


def until(found: Callable[[], set[int]]) -> set[int]:
    """What is found within a minute."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if there := found():
            return there
        time.sleep(0.02)
    raise AssertionError("nothing was found within a minute")


@dataclass(frozen=True)
class Pool:
    socket: Path
    process: int

    @property
    def residence(self) -> int:
        (found,) = until(lambda: set(filter(is_resident, children(self.process))))
        return found

    def at_work(self) -> int:
        """The process of a command that waits for a device: it, what looks after who asked, and what asks the pool."""
        (found,) = until(lambda: set(filter(lambda child: threads(child) > 2, children(self.residence))))
        return found


@contextmanager
def serving(path: Path, **changed: str) -> Iterator[Pool]:
    command = [sys.executable, "-m", "analysis.cli", "pool", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(**changed)) as process:
        assert process.stdout is not None
        assert "interrupt to end" in process.stdout.readline()
        yield Pool(path, process.pid)
        process.terminate()


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with serving(tmp_path_factory.mktemp("pool") / "socket") as pool:
        yield pool


@pytest.fixture
def world(tmp_path: Path, honest) -> Path:
    """A folder with a run and its trust file."""
    shutil.copytree(honest.run, tmp_path / "run")
    shutil.copy(honest.run.with_name(f"{honest.run.name}.trust.json"), tmp_path / "run.trust.json")
    return tmp_path


INSPECT = ("inspect", "run", "--trust", "run.trust.json", *WORDS)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (INSPECT, 0),
        ((*INSPECT, "--json"), 0),
        (("replay", "run", "--segment", "1"), 0),
        (("replay", "run", "--segment", "9"), 2),
        ((*INSPECT, "--maximum-flop", "1"), 1),
        (("inspect", "nothing", "--trust", "run.trust.json", *WORDS), 2),
        ((*INSPECT, "--samples", "no number"), 2),
        (("inspect", "--help"), 0),
    ],
)
def test_a_command_says_the_same_in_the_resident_process(pool, world, words, code):
    here, there = alone(world, *words), resident(world, *words, "--pool", str(pool.socket))
    assert (there.code, without_seconds(there.out), there.err) == (here.code, without_seconds(here.out), here.err)
    assert there.code == code
    assert there.out or there.err


@pytest.mark.parametrize(("with_pool", "loaded"), [(True, 0), (False, 1)])
def test_the_program_itself_hands_its_command_over_and_loads_nothing(pool, world, with_pool, loaded):
    code = "import sys; from analysis.cli import main; code = main(); sys.exit(code or 50 + ('numpy' in sys.modules))"
    words = (*INSPECT, "--pool", str(pool.socket)) if with_pool else INSPECT
    done = ended([sys.executable, "-c", code, *words], world)
    assert (done.code, done.out.splitlines()[0]) == (50 + loaded, "ACCEPT")


def test_nothing_of_an_earlier_inspection_is_remembered(pool, world):
    words = (*INSPECT, "--pool", str(pool.socket))
    assert resident(world, *words).code == 0
    path = world / "run" / ALTERED
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    found = resident(world, *words)
    assert (found.code, found.out.splitlines()[0]) == (1, "REJECT")
    assert ALTERED in found.out
    path.write_bytes(whole)
    assert resident(world, *words).code == 0


def test_a_command_that_is_killed_accepts_nothing(pool, world):
    with subprocess.Popen(
        forwarded(*INSPECT, "--device", "avx2", "--pool", str(pool.socket)),  # which has to be started first
        cwd=world, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        os.kill(pool.at_work(), signal.SIGKILL)
        out, err = process.communicate()
    assert (process.returncode, out) == (3, "")
    assert err == f"chipwitness inspect: the pool at {pool.socket} ended without an answer\n"
    assert resident(world, *INSPECT, "--pool", str(pool.socket)).code == 0


def test_a_resident_process_that_is_killed_is_replaced(world):
    with serving(world / "socket") as pool:
        first = pool.residence
        os.kill(first, signal.SIGKILL)
        until(lambda: set() if first in parents() and is_resident(first) else {0})
        done = resident(world, *INSPECT, "--pool", "socket")
        assert (done.code, done.out.splitlines()[0]) == (0, "ACCEPT")
        assert pool.residence != first
    assert resident(world, *INSPECT, "--pool", "socket").code == ELSEWHERE
    assert not (world / "socket").exists()


def heeding_interrupts() -> None:
    """What a shell starts in the background ignores interrupts, and so does all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_an_interrupt_reaches_the_command(pool, world):
    with subprocess.Popen(
        forwarded(*INSPECT, "--device", "native-1", "--pool", str(pool.socket)),
        cwd=world, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=heeding_interrupts,
    ) as process:  # fmt: skip
        command = pool.at_work()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert (process.returncode, out) == (3, "")
    # Compiled code that met the first one says that it ignores it.
    assert err.endswith("chipwitness inspect: interrupted\n")
    until(lambda: set() if command in parents() else {0})


def test_two_commands_at_once_say_what_each_says_alone(pool, world):
    words = (*INSPECT, "--pool", str(pool.socket))
    several = [
        subprocess.Popen(forwarded(*words), cwd=world, env=environment(), stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate()[0] for process in several]
    assert [process.returncode for process in several] == [0, 0]
    assert {without_seconds(text) for text in said} == {without_seconds(alone(world, *INSPECT).out)}


def test_folder_umask_and_place_of_temporary_files_are_the_command_s(pool, world):
    words = (*INSPECT, "--memory", "memory.json", "--pool", str(pool.socket))
    done = resident(world, *words, before="import os; os.umask(0o027)")
    assert done.code == 0
    assert stat.S_IMODE((world / "memory.json").stat().st_mode) == 0o640
    there = resident(world, *words, TMPDIR=str(world / "nowhere"), COLUMNS="40", SHLVL="9")
    assert there.code != ELSEWHERE
    (world / "memory.json").unlink()
    here = alone(world, *INSPECT, "--memory", "memory.json", TMPDIR=str(world / "nowhere"))
    assert there.code == here.code


@pytest.mark.parametrize(
    ("before", "changed"),
    [
        ("import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))", {}),
        ("", {"OMP_NUM_THREADS": "7"}),
        ("", {"CHIPWITNESS_DEVICE": "sse41"}),
        ("", {"LC_ALL": "C"}),
        ("", {"A_VARIABLE_THAT_NOBODY_KNOWS": "1"}),
        ("sys.warnoptions.append('error')", {}),
        ("import os; os.close(0)", {}),
    ],
)
def test_a_command_in_other_circumstances_runs_in_its_own_process(pool, world, before, changed):
    words = ("inspect", "--help", "--pool", str(pool.socket))
    assert resident(world, *words).code == 0
    assert resident(world, *words, before=before, **changed) == Ended(ELSEWHERE, "", "")


def test_a_command_of_a_program_that_was_changed_is_refused(pool, world):
    before = "client.program_digest = lambda: '0' * 64"
    found = resident(world, *INSPECT, "--pool", str(pool.socket), before=before)
    text = "chipwitness inspect: the pool runs another version of this program: end it and start it again\n"
    assert found == Ended(2, "", text)


@pytest.mark.parametrize(
    "sent", ["b'!'", "b'!{}\\n'", "b'!' + bytes(99) + b'\\n'", "b'![]\\n'", 'b\'!{"program": 1, "words": []}\\n\'']
)
def test_what_is_no_command_runs_nothing(pool, world, sent):
    code = f"""
import os, socket, sys
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(sys.argv[1])
    socket.send_fds(connection, [{sent}], [os.open(".", os.O_RDONLY), 0, 1, 2])
    connection.shutdown(socket.SHUT_WR)
    print(b"exit" in connection.makefile("rb").read())
"""
    assert ended([sys.executable, "-c", code, str(pool.socket)], world).out == "False\n"
    assert resident(world, "inspect", "--help", "--pool", str(pool.socket)).code == 0


@pytest.mark.parametrize(
    ("words", "path"),
    [
        (["inspect", "run", "--pool", "p"], "p"),
        (["world", "round", "w", "--pool=p", "--json"], "p"),
        (["replay", "--segment", "-1", "--pool", "p", "run"], "p"),
        (["inspect", "run"], None),
        (["inspect", "run", "--pool"], None),
        (["train", "--pool", "p"], None),
        (["pool", "p"], None),
        ([], None),
    ],
)
def test_which_commands_name_a_pool(words, path):
    assert client._pool_of(words) == path


def test_a_socket_of_another_user_or_of_nobody_takes_no_command(pool, tmp_path, monkeypatch):
    words = ["inspect", "--help", "--pool"]
    assert forward([*words, str(tmp_path / "none")]) is None
    (tmp_path / "file").write_text("")
    assert forward([*words, str(tmp_path / "file")]) is None
    monkeypatch.setattr(client, "_user_of", lambda _: os.getuid() + 1)
    monkeypatch.setattr(client, "_ask", lambda *_: pytest.fail("the command was sent"))
    assert forward([*words, str(pool.socket)]) is None


def test_a_process_with_threads_is_not_copied():
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        assert not _resident_process._is_alone()
    finally:
        end.set()
        thread.join()
