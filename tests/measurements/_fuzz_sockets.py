"""Mutated HTTP requests over sockets to servers as users start them, for ``fuzz --sockets``.

A provider's server, one that takes tasks, and a lab's door of rounds get requests that no client of theirs sends:
ambiguous lengths, second requests within a body, headers and bodies beyond all bounds, encodings, foreign passes,
noise. None may be answered as an honest one is, or with an internal error; afterwards honest ones are answered as
before.
"""

from __future__ import annotations

import hashlib
import random
import socket
import subprocess
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firmware_sim.evidence import SigningKey, VerifyingKey
from inspector.inspection.trust import Trust
from inspector.registry.keyfiles import write_keys
from inspector.rounds.door import HEADER
from inspector.rounds.parts import split
from inspector.rounds.world import CLUSTER, INSPECTORATE, World
from inspector.wire.messages import Pass, Question
from monitor import processes
from monitor.lab.prover import LabProver
from monitor.lab.rounds import LabSide
from monitor.transcript import RunFolder

__all__ = ["send_all"]

_ASKER = SigningKey.from_private_bytes(bytes([6]) * 32)
_STRANGER = SigningKey.from_private_bytes(bytes([7]) * 32)
_THREADS = 16
_WAIT = 0.5
"""Seconds for which an answer is waited for: a server waits longer for what is not whole."""
_MOST_MEMORY = 1 << 30
_BOMB = zlib.compress(bytes(1 << 20))


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server's process, and an honest request with the status that it is answered with."""

    name: str
    port: int
    process: subprocess.Popen[bytes]
    honest: Callable[[], tuple[bytes, dict[str, str], bytes]]
    status: int

    def send(self, content: bytes, seconds: float = _WAIT) -> bytes:
        """What comes back within a time; empty where the connection is refused or closed."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as peer:
                peer.settimeout(seconds)
                peer.sendall(content)
                return peer.recv(4096)
        except OSError:
            return b""

    def memory(self) -> int:
        """The most memory that the process has had, in bytes."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def request(line: bytes, headers: dict[str, str], body: bytes, *more: bytes) -> bytes:
    """A request's bytes, with further header lines."""
    lines = [line, *(f"{name}: {value}".encode() for name, value in headers.items()), *more]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


@contextmanager
def served(folder: Path, run: Path) -> Iterator[list[Server]]:
    """The three servers, of a loop's run, until the end."""
    trust = Trust.load([run.with_name(f"{run.name}.trust.json")], [run])
    world = World.create(folder / "world", LabSide)
    world.join(trust, {"run": run})
    lab = split(world, "lab", folder / "lab", LabSide)
    write_keys(folder / "asker", _ASKER)
    write_keys(folder / "provider", provider := SigningKey.from_private_bytes(bytes([8]) * 32))
    prover = LabProver(run)
    head = RunFolder(run, prover.key.verifying).manifest.run
    peers = [word for name in (INSPECTORATE, CLUSTER) for word in ("--peer", f"{name}=http://127.0.0.1:9")]
    asked = ["--referees", str(folder / "asker.pub")]
    tasks = ["--tasks", str(folder / "tasks"), "--key", str(folder / "provider"), "--lab", "p"]
    words = {
        "provider": ["provider", str(run), "--store", str(folder / "asked"), *asked],
        "tasks": ["provider", *tasks, "--store", str(folder / "ordered"), *asked],
        "lab": ["lab", "--folder", str(lab.folder), "--name", "lab", *peers],
    }
    inspectorate = world.key(INSPECTORATE)
    honest = {
        "provider": (lambda: _question(prover.key.verifying, head, "claim"), 200),
        "tasks": (lambda: _question(provider.verifying, "", f"task {'ab' * 32} 1000"), 200),
        "lab": (lambda: _file(prover.key.verifying, inspectorate), 404),
    }
    with ExitStack() as stack:
        ports = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in words]
        numbers = [each.getsockname()[1] for each in ports]
        stack.close()
        found = []
        for (name, each), port in zip(words.items(), numbers, strict=True):
            command = processes.python("analysis.cli", "serve", *each, "--port", str(port))
            streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            process = processes.start(command, str(folder), {}, **streams)
            stack.callback(process.wait)
            stack.callback(process.kill)
            found.append(Server(name=name, port=port, process=process, honest=honest[name][0], status=honest[name][1]))
        for server in found:
            _until_served(server)
        yield found


def _until_served(server: Server) -> None:
    ends = time.monotonic() + 180
    while time.monotonic() < ends:
        if server.send(request(*server.honest()), 5).startswith(f"HTTP/1.1 {server.status} ".encode()):
            return
        time.sleep(0.2)
    raise RuntimeError(f"the server {server.name} does not answer an honest request")


def _question(to: VerifyingKey, run: str, text: str, key: SigningKey = _ASKER) -> tuple[bytes, dict[str, str], bytes]:
    question = Question(game="00" * 32, number=0, to=to.key_id, run=run, text=text, most=1 << 22, seconds=9)
    body = question.seal(key)
    return b"POST /questions HTTP/1.1", {"host": "x", "content-length": str(len(body))}, body


def _file(to: VerifyingKey, key: SigningKey) -> tuple[bytes, dict[str, str], bytes]:
    """A request of the inspectorate's for a file that was not opened, which the lab refuses with 404."""
    asked = Pass(to=to.key_id, what="file", sha256="00" * 32, length=9, path="x", until=int(time.time()) + 60)
    headers = {"host": "x", HEADER: asked.header(INSPECTORATE, key), "content-length": "0"}
    return b"POST /files HTTP/1.1", headers, b""


def mutated(server: Server, rng: random.Random) -> tuple[str, bytes]:
    """A request that the server must not take for an honest one, and its kind."""
    line, headers, body = server.honest()
    kind = rng.choice(tuple(_KINDS))
    return kind, _KINDS[kind](line, headers, body, rng)


def _lengths(line: bytes, headers: dict[str, str], body: bytes, rng: random.Random) -> bytes:
    """Two lengths, or a length and chunks, with a second request where they disagree."""
    inner = request(line, headers, body)
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    more = rng.choice([
        b"content-length: 0", b"content-length: 999999", b"Content-Length: +5", b"content-length: 1,2",
        b"transfer-encoding: chunked", b"transfer-encoding: xchunked", b"transfer-encoding: chunked, identity",
        b"transfer-encoding : chunked", b"content-length: 0x5", b"content-length: -1",
    ])  # fmt: skip
    return request(line, headers, rng.choice([body, chunked, b"0\r\n\r\n", b""]) + inner, more)


def _encoded(line: bytes, headers: dict[str, str], body: bytes, rng: random.Random) -> bytes:
    content = rng.choice([_BOMB, zlib.compress(body), body])
    headers = {**headers, "content-length": str(len(content))}
    return request(
        line, headers, content, b"content-encoding: " + rng.choice([b"gzip", b"deflate", b"br", b"identity"])
    )


def _oversized(line: bytes, headers: dict[str, str], body: bytes, rng: random.Random) -> bytes:
    big = rng.choice([b"x: " + b"a" * (1 << 17), b"\r\n".join(b"h%d: x" % n for n in range(5000))])
    if rng.random() < 0.3:
        return request(line.replace(b" /", b" /" + b"a" * (1 << 17)), headers, body)
    if rng.random() < 0.3:
        content = bytes(1 << 20)
        return request(line, {**headers, "content-length": str(len(content))}, content)
    return request(line, headers, body, big)


def _foreign(line: bytes, headers: dict[str, str], body: bytes, rng: random.Random) -> bytes:
    """No signature, one of another key, or one for another party."""
    to = _STRANGER.verifying
    if HEADER not in headers:
        _, headers, body = _question(to, "", "claim", rng.choice([_STRANGER, _ASKER]))
        return request(line, headers, rng.choice([body, b"{}".ljust(len(body))]))
    shown = rng.choice(["", "lab", "inspectorate e30=", "../x e30=", _file(to, _STRANGER)[1][HEADER], "a" * 9000])
    return request(line, {**headers, HEADER: shown}, body)


def _noise(line: bytes, headers: dict[str, str], body: bytes, rng: random.Random) -> bytes:
    """Changed, left out or added bytes in a request that a stranger signed."""
    content = bytearray(_foreign(line, headers, body, rng))
    for _ in range(rng.randint(1, 6)):
        place = rng.randrange(len(content))
        content[place : place + rng.choice([0, 1, 1, 20])] = rng.choice(
            [bytes([rng.randrange(256)]), b"", b"\r\n", b"\n", b"\x00", b" ", b"%00", b"//", b"\xff" * 9]
        )
    return bytes(content)


def _strange(line: bytes, headers: dict[str, str], body: bytes, rng: random.Random) -> bytes:
    """Another method, path or protocol."""
    name = hashlib.sha256(rng.randbytes(4)).hexdigest()
    lines = [
        b"GET /questions HTTP/1.1", b"PUT /files/" + name.encode() + b" HTTP/1.1", b"PUT /files/.. HTTP/1.1",
        b"PUT /files/%2e%2e%2fx HTTP/1.1", b"POST http://evil/x HTTP/1.1", b"CONNECT evil:80 HTTP/1.1",
        b"POST /questions HTTP/9.9", b"POST /questions", b"PRI * HTTP/2.0", b"TRACE / HTTP/1.1",
        b"GET /metrics HTTP/1.1",
    ]  # fmt: skip
    return request(rng.choice(lines), {"host": "x", "content-length": str(len(body))}, b"{}".ljust(len(body)))


_KINDS: dict[str, Callable[[bytes, dict[str, str], bytes, random.Random], bytes]] = {
    "lengths": _lengths,
    "encoded": _encoded,
    "oversized": _oversized,
    "foreign": _foreign,
    "noise": _noise,
    "strange": _strange,
}


def send_all(folder: Path, run: Path, count: int, seed: int) -> dict[str, Any]:
    """Send so many requests; how many of each kind got which status, and findings.

    Args:
        run: of a loop, with its lab next to it.
    """
    found: Counter[tuple[str, str, str]] = Counter()
    findings: dict[str, dict[str, Any]] = {}
    with served(folder, run) as servers, ThreadPoolExecutor(_THREADS) as pool:

        def one(number: int) -> None:
            rng = random.Random(f"{seed} {number}")
            server = rng.choice(servers)
            kind, content = mutated(server, rng)
            answer = server.send(content)
            status = answer[9:12].decode(errors="replace") if answer.startswith(b"HTTP/1.") else "none"
            found[server.name, kind, status] += 1
            if status == "200" or (status.startswith("5") and status not in ("501", "503", "505")):
                text = f"{server.name} answers {kind} with {status}"
                findings.setdefault(text, {"text": text, "bytes": len(content), "input": content[:2000].hex()})

        list(pool.map(one, range(count)))
        memory = {each.name: each.memory() >> 20 for each in servers}
        for each in servers:
            _until_served(each)
            if each.process.poll() is not None or memory[each.name] << 20 > _MOST_MEMORY:
                text = f"{each.name} has ended, or took {memory[each.name]} MB"
                findings[text] = {"text": text, "bytes": 0, "input": None}
    by: dict[str, dict[str, int]] = {kind: {} for kind in _KINDS}
    for (_, kind, status), number in sorted(found.items()):
        by[kind][status] = by[kind].get(status, 0) + number
    return {"by": by, "megabytes": memory, "findings": list(findings.values())}
