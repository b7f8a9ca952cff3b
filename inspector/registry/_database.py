"""Connections to the directory's database: SQLite for one machine, PostgreSQL for many writers on many.

One writer at a time holds the log's tail, so that every append sees the state it depends on: SQLite by ``BEGIN
IMMEDIATE``, PostgreSQL by a row lock taken before anything is read. Readers see one snapshot and never wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url, select
from sqlalchemy.exc import ArgumentError, DBAPIError

from inspector.registry._schema import tail
from inspector.registry.errors import RegistryMisuse, RegistryUnavailable

__all__ = ["database_url", "describe", "open_engine", "reading", "writing"]

_LOCK_WAIT_S = 120.0


def database_url(where: str | Path) -> URL:
    """A path is an SQLite file; anything with ``://`` is an SQLAlchemy URL of SQLite or PostgreSQL.

    Raises:
        RegistryMisuse: the URL is malformed or of another database.
    """
    text = str(where)
    if "://" not in text:
        if not text:
            raise RegistryMisuse("the registry's path is empty")
        return URL.create("sqlite", database=text)
    try:
        url = make_url(text)
    except ArgumentError:
        raise RegistryMisuse("the registry's URL is malformed") from None
    backend = url.get_backend_name()
    if backend == "postgresql":
        return url.set(drivername="postgresql+psycopg")
    if backend == "sqlite" and url.database not in (None, "", ":memory:"):
        return url
    raise RegistryMisuse(f"a registry must be a file or a postgresql:// URL, not {describe(url)}")


def describe(url: URL) -> str:
    """The registry's place, without a password."""
    if url.get_backend_name() == "sqlite" and url.database:
        return url.database
    return url.render_as_string(hide_password=True)


def open_engine(url: URL, *, new: bool = False) -> Engine:
    """An engine whose transactions are explicit; it connects when first used. ``new`` sets a new SQLite file up.

    Raises:
        RegistryMisuse: the PostgreSQL driver is not installed.
    """
    if url.get_backend_name() == "sqlite":
        engine = create_engine(url, connect_args={"timeout": _LOCK_WAIT_S})
        if new:
            event.listen(engine, "connect", _set_up_new_sqlite)
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
        return engine
    try:
        return create_engine(url, connect_args={"connect_timeout": 10})
    except ModuleNotFoundError:
        raise RegistryMisuse("PostgreSQL needs the psycopg driver: install chipwitness[postgres]") from None


def _set_up_new_sqlite(connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode = WAL")  # The file remembers it: readers do not block the writer.
    cursor.close()


def _set_up_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # The driver's own BEGIN is deferred and would deadlock two writers.
    cursor = connection.cursor()
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.execute("PRAGMA cache_size = -131072")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    writing_now = connection.get_execution_options().get("registry_writer", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writing_now else "BEGIN")


@contextmanager
def writing(engine: Engine, *, lock: bool = True) -> Iterator[Connection]:
    """One transaction that holds the writer's lock from its first statement; commits on a clean exit."""
    with _translated(engine):
        connection = engine.connect().execution_options(registry_writer=True)
        with connection, connection.begin():
            if lock:
                connection.execute(select(tail.c.size).with_for_update()).all()
            yield connection


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """One transaction that sees a single snapshot and changes nothing."""
    with _translated(engine):
        connection = engine.connect()
        if engine.dialect.name == "postgresql":
            connection = connection.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
        with connection, connection.begin():
            yield connection


@contextmanager
def _translated(engine: Engine) -> Iterator[None]:
    try:
        yield
    except DBAPIError as error:
        reason = " ".join(str(error.orig).split())
        if getattr(error.orig, "sqlite_errorname", "") == "SQLITE_NOTADB":
            raise RegistryMisuse(f"{describe(engine.url)} is not a registry: {reason}") from error
        raise RegistryUnavailable(f"registry {describe(engine.url)}: {reason}") from error
