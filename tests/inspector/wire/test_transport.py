"""One desk behind two doors, in this process and over HTTP: the same questions, the same answers, the same files."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from firmware_sim.errors import CallerError, DeviceError, EvidenceError
from firmware_sim.evidence import SigningKey
from inspector.wire.client import Http
from inspector.wire.desk import Desk, Local
from inspector.wire.messages import Question, Reader, Silence
from inspector.wire.server import SECONDS

RUN = "ab" * 32
REFEREE, PARTY = SigningKey.generate(bytes(32)), SigningKey.generate(bytes([1]) * 32)
SERVER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from test_transport import PARTY, REFEREE, RUN, answer
from inspector.wire.desk import Desk
from inspector.wire.server import serve
serve(Desk(Path(sys.argv[1]), answer, PARTY, [REFEREE.verifying], RUN), "127.0.0.1", int(sys.argv[2]))
"""


def answer(text: str) -> bytes:
    """What the party of these tests answers."""
    if text == "broken disk":
        raise DeviceError("the disk is full")
    if text == "broken library":
        raise RuntimeError("can't start new thread")
    if text == "nonsense":
        raise EvidenceError("no question begins with nonsense")
    kind, _, count = text.partition(" ")
    return kind.encode() * int(count)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def start(folder: Path, port: int) -> subprocess.Popen[bytes]:
    here = str(Path(__file__).parent)
    return subprocess.Popen([sys.executable, "-c", SERVER, str(folder), str(port), here], env=dict(os.environ))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Folder and port of a served desk."""
    folder, port = tmp_path_factory.mktemp("served"), free_port()
    process = start(folder, port)
    yield folder, port
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0, "it stops when it is asked to"


@pytest.fixture(params=["local", "http"])
def door(request, tmp_path):
    """A desk's folder and a transport to it."""
    if request.param == "local":
        return tmp_path, Local(Desk(tmp_path, answer, PARTY, [REFEREE.verifying], RUN))
    folder, port = request.getfixturevalue("server")
    return folder, Http(f"http://127.0.0.1:{port}", PARTY.verifying)


def question(
    text: str, *, key: SigningKey = REFEREE, to: SigningKey = PARTY, run: str = RUN, most: int = 1 << 22
) -> bytes:
    to_id = to.verifying.key_id
    return Question(game="00" * 32, number=0, to=to_id, run=run, text=text, most=most, seconds=20).seal(key)


def ask(transport, envelope: bytes, *, seconds: float = 20, most: int = 1 << 22) -> Reader:
    reader = Reader(envelope, PARTY.verifying, most)
    transport.ask(envelope, reader, seconds)
    return reader


def test_an_answer_is_kept_and_given_again(door):
    folder, transport = door
    envelope = question("ab 1000000")
    first, again = ask(transport, envelope), ask(transport, envelope)
    assert first.body() == again.body() == b"ab" * 1000000
    assert first.envelope == again.envelope
    assert len([each for each in (folder / "bodies").iterdir() if each.stat().st_size == 2000000]) == 1
    assert envelope in [each.read_bytes() for each in (folder / "questions").iterdir()]


def test_a_refusal_is_signed(door):
    reader = ask(door[1], question("nonsense"))
    assert reader.body() is None
    assert reader.answer is not None
    assert "no question begins with nonsense" in reader.answer.refused


@pytest.mark.parametrize(
    "envelope",
    [
        question("ab 1", key=PARTY),
        question("ab 1", to=REFEREE),
        question("ab 1", run="cd" * 32),
        b"{}",
        b"\xff" * 100,
    ],
    ids=range(5),
)
def test_strangers_get_nothing(door, envelope):
    with pytest.raises(Silence):
        ask(door[1], envelope)


@pytest.mark.parametrize("text", ["broken disk", "broken library", "ab 3000000"])
def test_what_a_machine_cannot_is_not_signed(door, text):
    with pytest.raises(Silence):
        ask(door[1], question(text), seconds=1)


def request(port: int, headers: dict[str, str], body: bytes | None, path: str = "/questions") -> int:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
        connection.request("GET" if body is None else "POST", path, body=body, headers=headers)
        return connection.getresponse().status


def test_the_door_refuses_what_is_no_question(server):
    port = server[1]
    ask(Http(f"http://127.0.0.1:{port}", PARTY.verifying), question("ab 1"))
    assert request(port, {"content-encoding": "gzip"}, question("ab 1")) == 415
    assert request(port, {}, bytes(1 << 20)) == 413
    assert request(port, {}, b"{}") == 403
    assert request(port, {}, None) == 405
    sound = question("ab 1")
    both = {"content-length": str(len(sound)), "transfer-encoding": "chunked"}
    assert request(port, both, b"%x\r\n%s\r\n0\r\n\r\n" % (len(sound), sound)) == 411
    assert request(port, {"host": "evil"}, b"{}", "/questions/") == 404  # and no redirect to a foreign host


def test_headers_and_bodies_of_a_byte_a_second_end_at_their_deadline_while_others_are_served(server):
    head = b"POST /questions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n"
    transport = Http(f"http://127.0.0.1:{server[1]}", PARTY.verifying)
    ask(transport, question("ab 1"), seconds=120)
    with ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(("127.0.0.1", server[1]))) for _ in range(100)]
        for number, each in enumerate(slow):
            each.sendall(head if number % 2 else head + b"\r\n")
        ended: dict[Any, Any]
        begun, ended = time.monotonic(), {}
        pool = stack.enter_context(ThreadPoolExecutor(50))
        honest = [pool.submit(ask, transport, question(f"honest{number} 9"), seconds=60) for number in range(50)]
        while len(ended) < len(slow) and time.monotonic() - begun < 60:
            for each in set(slow) - set(ended):
                try:
                    each.sendall(b"x")
                    each.settimeout(0.001)
                    ended[each] = each.recv(1000)
                except TimeoutError:
                    continue
                except OSError:
                    ended[each] = b""
            time.sleep(1)
        took = time.monotonic() - begun
        assert {each.result().body() for each in honest} == {f"honest{number}".encode() * 9 for number in range(50)}
    assert len(ended) == len(slow)
    assert SECONDS - 2 < took < 2 * SECONDS + 20
    assert {each[:12] for each in ended.values()} <= {b"", b"HTTP/1.1 408"}


def test_a_client_goes_on_after_the_server_was_killed(tmp_path):
    port = free_port()
    first = start(tmp_path, port)
    transport, envelope = Http(f"http://127.0.0.1:{port}", PARTY.verifying), question("ab 10")
    before = ask(transport, envelope, seconds=60).envelope
    first.kill()
    first.wait()
    readers = []
    waiting = threading.Thread(target=lambda: readers.append(ask(transport, envelope, seconds=60)))
    waiting.start()
    second = start(tmp_path, port)
    waiting.join()
    second.terminate()
    second.wait()
    assert readers[0].envelope == before


class Odd:
    """A server that sends something, and then holds the connection open."""

    def __init__(self, *pieces: bytes, pause: float = 0) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._pieces, self._pause = pieces, pause
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def _serve(self) -> None:
        try:
            with self._socket.accept()[0] as peer:
                peer.recv(1 << 16)
                for piece in self._pieces:
                    peer.sendall(piece)
                    time.sleep(self._pause)
                peer.recv(1)  # until the other side has had enough
        except OSError:
            return

    def __enter__(self) -> str:
        self._thread.start()
        return self.url

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000\r\n"


@pytest.mark.parametrize(
    ("pieces", "pause", "why"),
    [
        ((), 0, "no complete answer within 1 s"),
        ([bytes([each]) for each in OK], 0.1, "no complete answer within 1 s"),
        ([OK, b"\r\n", *[b"x"] * 50], 0.1, "no complete answer within 1 s"),
        ([OK, b"\r\n", *[bytes(1 << 16)] * 100], 0, "bytes hold no signed answer"),
        ([OK, b"content-encoding: gzip\r\n\r\n", b"x"], 0, "unencoded answer"),
        ([b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n"], 0, "HTTP status 302"),
    ],
    ids=["nothing", "slow headers", "slow body", "flood", "encoded", "elsewhere"],
)
def test_a_deadline_and_bounds_hold_against_odd_servers(pieces, pause, why):
    with Odd(*pieces, pause=pause) as url, pytest.raises(Silence, match=why):
        ask(Http(url, PARTY.verifying), question("ab 1"), seconds=1)


@pytest.mark.parametrize("url", ["ftp://a", "http://", "127.0.0.1:80", "http://a/path", "http://a?x=1"])
def test_an_address_of_another_form_is_the_callers_mistake(url):
    with pytest.raises(CallerError, match="write https://HOST:PORT"):
        Http(url, PARTY.verifying)
