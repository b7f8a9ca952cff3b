"""Servers whose certificates the keys of their parties have signed, and others that pretend to be such servers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from firmware_sim.evidence import SigningKey
from inspector.rounds.courier import Courier
from inspector.wire import tls
from inspector.wire.client import Http, Unproven
from inspector.wire.desk import Desk
from inspector.wire.messages import Silence
from inspector.wire.server import application, door
from monitor.transcript.manifest import Entry
from tests.inspector.wire.test_transport import PARTY, REFEREE, RUN, answer, ask, free_port, question

OTHER = SigningKey.generate(bytes([2]) * 32)
FOREIGN = "the server's certificate was not signed by its key: something else answers at this address"


@contextlib.contextmanager
def served(folder: Path, key: SigningKey | None) -> Iterator[str]:
    """The address, without its scheme, of a desk's server that runs in a thread."""
    desk, port = Desk(folder, answer, PARTY, [REFEREE.verifying], RUN), free_port()
    loop, stop, begun = asyncio.new_event_loop(), asyncio.Event(), threading.Event()

    async def serve() -> None:
        async with door([(application(desk), "127.0.0.1", port, key)]):
            begun.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert begun.wait(30)
        yield f"127.0.0.1:{port}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def asked(url: str, seconds: float = 20) -> bytes | None:
    return ask(Http(url, PARTY.verifying), question("ab 2"), seconds=seconds).body()


def test_who_knows_the_partys_key_needs_nothing_else(tmp_path):
    with served(tmp_path, PARTY) as place:
        assert asked(f"https://{place}") == b"abab"
        host, port = place.split(":")
        with socket.create_connection((host, int(port))) as silent:  # a handshake that never goes on
            assert asked(f"https://localhost:{port}") == b"abab"
            begun = time.monotonic()
            silent.settimeout(30)
            assert silent.recv(1) == b""
            assert time.monotonic() - begun < 20


@pytest.mark.parametrize(
    ("key", "changes", "why"),
    [
        (OTHER, {}, FOREIGN),
        (None, {}, "the server does not speak TLS: start it with --tls, or write http:// in its address"),
        (PARTY, {"_DAYS": -0.5}, "the server's certificate has expired: start its server anew"),
        (PARTY, {"_SKEW": timedelta(days=-1)}, "the server's certificate is not valid yet: compare the clocks"),
    ],
    ids=["another party's", "plain", "expired", "not yet valid"],
)
def test_any_other_server_is_refused_at_once_in_one_line(tmp_path, monkeypatch, key, changes, why):
    for name, value in changes.items():
        monkeypatch.setattr(tls, name, value)
    with served(tmp_path, key) as place:
        begun = time.monotonic()
        with pytest.raises(Unproven) as refused:
            asked(f"https://{place}")
        assert str(refused.value).startswith(why)
        assert "\n" not in str(refused.value)
        assert time.monotonic() - begun < 5


def leaf_at(place: str) -> bytes:
    """The certificate that a server shows to a new connection."""
    host, port = place.split(":")
    context = tls.context_for(PARTY.verifying)
    with socket.create_connection((host, int(port))) as plain, context.wrap_socket(plain) as secret:
        shown = secret.getpeercert(binary_form=True)
        assert shown is not None
        return shown


def test_a_server_makes_another_certificate_before_the_last_one_ends(tmp_path, monkeypatch):
    """One of 18 seconds is renewed after 12; a new connection finds a server before, then, and after it has ended."""
    monkeypatch.setattr(tls, "_DAYS", 18 / 86400)
    shown, begun = set(), time.monotonic()
    with served(tmp_path, PARTY) as place:
        assert asked(f"https://{place}") == b"abab"
        while time.monotonic() - begun < 20:
            shown.add(leaf_at(place))
            time.sleep(0.1)
        assert asked(f"https://{place}") == b"abab"
    assert len(shown) == 2


def issued(builder: x509.CertificateBuilder, signer: SigningKey) -> bytes:
    return builder.sign(signer.private_key, None).public_bytes(Encoding.PEM)


def forged(kind: str, own: SigningKey, middle: SigningKey) -> list[bytes]:
    """A chain for the key ``own`` that resembles the party's, by someone without the party's key."""
    now, party = datetime.now(UTC), PARTY.verifying
    dates = (now - timedelta(days=1), now + timedelta(days=1))
    leaf = tls._builder(own.verifying, party, "server", *dates)
    below = tls._builder(own.verifying, middle.verifying, "server", *dates)
    return {
        "names alone": [issued(leaf, own)],
        "the party's root, signed anew": [issued(leaf, own), issued(tls._builder(party, party, "x", *dates), own)],
        "below a server's certificate": [
            issued(below, middle),
            issued(tls._builder(middle.verifying, party, middle.verifying.raw.hex(), *dates), PARTY),
        ],
    }[kind]


@pytest.mark.parametrize("kind", ["names alone", "the party's root, signed anew", "below a server's certificate"])
def test_no_one_without_the_partys_key_makes_a_certificate_that_counts(tmp_path, kind):
    """Whoever got hold of a server's TLS key (``middle``) cannot make others with it."""
    own, middle = SigningKey.generate(), SigningKey.generate()
    key = own.private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (tmp_path / "chain.pem").write_bytes(b"".join(forged(kind, own, middle)))
    (tmp_path / "key.pem").write_bytes(key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "chain.pem", tmp_path / "key.pem")
    wrapped, came = partial(context.wrap_socket, server_side=True), list[bytes]()

    def serve(listening: socket.socket) -> None:
        with listening.accept()[0] as peer, contextlib.suppress(OSError), wrapped(peer) as secret:
            came.append(secret.recv(1))

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,))
        thread.start()
        with pytest.raises(Unproven, match=FOREIGN):
            asked(f"https://127.0.0.1:{listening.getsockname()[1]}")
        thread.join()
    assert not came, "nothing was sent to it"


def test_a_connection_that_breaks_off_is_tried_again():
    came: list[int] = []

    def serve(listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                with listening.accept()[0] as peer:
                    came.append(len(peer.recv(1)))

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,))
        thread.start()
        with pytest.raises(Silence, match="no complete answer within 1 s"):
            asked(f"https://127.0.0.1:{listening.getsockname()[1]}", seconds=1)
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert len(came) > 2


def relay(source: socket.socket, target: socket.socket, most: int) -> None:
    """Pass on what comes, and after so many bytes something that is no TLS."""
    with contextlib.suppress(OSError):
        passed = 0
        while piece := source.recv(1 << 16):
            target.sendall(piece)
            passed += len(piece)
            if passed > most:
                target.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    for each in (source, target):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def test_what_someone_puts_between_the_bytes_of_a_connection_breaks_it_off_and_no_more(tmp_path):
    """Case B: it ended the client with a traceback."""
    with ExitStack() as stack:
        place = stack.enter_context(served(tmp_path, PARTY))
        assert asked(f"https://{place}") == b"abab", "it listens from now on"
        host, port = place.split(":")
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        threads: list[threading.Thread] = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                for most in (600, 600, 1 << 20):
                    peer = stack.enter_context(listening.accept()[0])
                    server = stack.enter_context(socket.create_connection((host, int(port))))
                    for source, target, limit in ((peer, server, 1 << 20), (server, peer, most)):
                        threads.append(threading.Thread(target=relay, args=(source, target, limit)))
                        threads[-1].start()

        serving = threading.Thread(target=serve)
        serving.start()
        assert asked(f"https://127.0.0.1:{listening.getsockname()[1]}") == b"abab"
        serving.join()
        for each in threads:
            each.join()
        assert len(threads) == 6, "the third time nothing is put in"


def test_a_server_that_pretends_to_be_a_labs_does_not_make_its_files_missing(tmp_path, monkeypatch):
    """Three wrong answers of a lab end the search for a file; an impostor's answers are none of its own."""
    monkeypatch.setattr("inspector.rounds.courier._AGAIN", 0.01)
    world = SimpleNamespace(trust=lambda: SimpleNamespace(labs={"lab": PARTY.verifying}))
    logged: list[str] = []
    telemetry = SimpleNamespace(log=lambda event, **_: logged.append(event), count=lambda *_, **__: None)

    async def fetched(url: str) -> None:
        courier = Courier(world, "cluster", OTHER, {"lab": url}, telemetry, None)  # type: ignore[arg-type]
        async with courier._link("lab") as link, asyncio.timeout(1):
            await courier._get(link, "lab", "ab" * 32, "file", Entry(1, "cd" * 32), tmp_path / "draft")

    with served(tmp_path / "desk", OTHER) as place, pytest.raises(TimeoutError):
        asyncio.run(fetched(f"https://{place}"))
    assert logged.count("odd answer") > 3
