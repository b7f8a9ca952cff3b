"""A registry on each database: SQLite always, PostgreSQL on a server of its own when its programs are installed."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from firmware_sim.evidence import SigningKey
from inspector.registry import ChipRecord, Registry, Role

_NUMBERS = itertools.count()
PARTIES = {
    "fab": Role.MAKER,
    "rival-fab": Role.MAKER,
    "lab-a": Role.OWNER,
    "lab-b": Role.OWNER,
    "agency": Role.INSPECTOR,
    "other-agency": Role.INSPECTOR,
}


@dataclass
class World:
    """A registry with enrolled parties, 20 chips of ``fab``, and a clock that moves only when told."""

    where: str
    registry: Registry
    keys: dict[str, SigningKey]
    now: int = 1_700_000_000
    chips: list[str] = field(default_factory=list)

    def clock(self) -> int:
        return self.now

    def pass_on(self, *chips: str, sender: str = "fab", receiver: str = "lab-a") -> int:
        return self.registry.transfer(
            chips, sender=sender, receiver=receiver, release=self.keys[sender], acceptance=self.keys[receiver]
        ).event

    def import_chips(self, chips: list[str], *, maker: str = "fab", label: str = "batch") -> int:
        records = [ChipRecord(chip, "H100") for chip in chips]
        return self.registry.import_chips(records, maker=maker, label=label, key=self.keys[maker]).event


def make_keys() -> dict[str, SigningKey]:
    names = ["registrar", *PARTIES, "outsider"]
    return {name: SigningKey.generate(bytes([number]) * 32) for number, name in enumerate(names, 1)}


def make_world(where: str, chips: int = 20) -> World:
    keys = make_keys()
    world = World(where=where, registry=None, keys=keys)  # type: ignore[arg-type]
    world.registry = Registry.create(where, name="test", registrar=keys["registrar"], clock=world.clock)
    for party, role in PARTIES.items():
        world.registry.enrol(party, role, keys[party].verifying)
    world.chips = [f"chip-{number:04d}" for number in range(chips)]
    world.import_chips(world.chips)
    return world


@pytest.fixture(params=["sqlite", "postgresql"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty place for a registry."""
    if request.param == "sqlite":
        return str(tmp_path / "registry.db")
    new_database: Callable[[], str] = request.getfixturevalue("postgresql")
    return new_database()


@pytest.fixture
def world(where: str) -> Iterator[World]:
    made = make_world(where)
    yield made
    made.registry.close()


@pytest.fixture
def sqlite_world(tmp_path: Path) -> Iterator[World]:
    made = make_world(str(tmp_path / "registry.db"))
    yield made
    made.registry.close()


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Callable[[], str]]:
    """A server that listens on a socket only; each call makes an empty database and returns its URL."""
    psycopg = pytest.importorskip("psycopg", reason="the PostgreSQL driver is not installed")
    programs = _programs()
    if programs is None:
        pytest.skip("PostgreSQL's initdb and pg_ctl are not installed")
    identity: dict[str, Any] = {}
    if os.geteuid() == 0:
        if not _user_exists("postgres"):
            pytest.skip("PostgreSQL refuses to run as root, and there is no user 'postgres'")
        identity = {"user": "postgres", "group": "postgres", "extra_groups": []}
    # A socket's path may have 107 bytes, which pytest's own folders exceed.
    with tempfile.TemporaryDirectory(prefix="cw-pg-") as folder:
        if identity:
            shutil.chown(folder, "postgres", "postgres")

        def run(program: str, *arguments: str) -> None:
            command = [str(programs / program), *arguments]
            done = subprocess.run(
                command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=120, **identity
            )
            if done.returncode:
                pytest.skip(f"PostgreSQL did not start: {done.stderr.decode(errors='replace')[-300:]}")

        data = f"{folder}/data"
        run("initdb", "-D", data, "-A", "trust", "-U", "chipwitness", "-E", "UTF8", "--locale=C", "--no-sync")
        options = f"-c listen_addresses='' -c unix_socket_directories='{folder}' -c fsync=off -c max_connections=40"
        run("pg_ctl", "-D", data, "-w", "-l", f"{folder}/log", "-o", options, "start")
        try:
            yield lambda: _new_database(psycopg, folder)
        finally:
            run("pg_ctl", "-D", data, "-w", "-m", "immediate", "stop")


def _new_database(psycopg: object, folder: str) -> str:
    name = f"registry_{next(_NUMBERS)}"
    connect = psycopg.connect  # type: ignore[attr-defined]
    with connect(f"host={folder} user=chipwitness dbname=postgres", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return f"postgresql://chipwitness@/{name}?host={folder}"


def _programs() -> Path | None:
    found = shutil.which("pg_ctl")
    folders = [Path(found).resolve().parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in folders if (folder / "initdb").exists() and (folder / "pg_ctl").exists()), None)


def _user_exists(name: str) -> bool:
    import pwd

    return any(user.pw_name == name for user in pwd.getpwall())
