"""Putting a batch's genesis records into the database."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from sqlalchemy import Connection, insert
from sqlalchemy.exc import IntegrityError

from inspector.registry._schema import genesis
from inspector.registry._values import ChipRecord
from inspector.registry.errors import RegistryUnavailable

__all__ = ["DuplicateGenesis", "insert_genesis"]

_ROWS = 20_000
_COPY = "COPY genesis (ordinal, chip, model, identity) FROM STDIN"


class DuplicateGenesis(Exception):
    """A chip or identity has a genesis record already; the transaction is lost."""


def insert_genesis(connection: Connection, first: int, chips: Sequence[ChipRecord]) -> None:
    """Insert ``chips`` at the ordinals from ``first`` on, in their order; PostgreSQL takes them by COPY.

    Raises:
        DuplicateGenesis: one of them is known already.
    """
    rows = ((first + position, chip.chip, chip.model, chip.identity) for position, chip in enumerate(chips))
    if connection.dialect.name == "postgresql":
        _copy(connection, rows)
        return
    statement = str(insert(genesis).compile(dialect=connection.dialect))
    try:
        while some := list(islice(rows, _ROWS)):
            connection.exec_driver_sql(statement, some)
    except IntegrityError:
        raise DuplicateGenesis from None


def _copy(connection: Connection, rows: Iterable[tuple[int, str, str, str]]) -> None:
    import psycopg

    driver: Any = connection.connection
    try:
        with driver.cursor() as cursor, cursor.copy(_COPY) as copy:
            for row in rows:
                copy.write_row(row)
    except psycopg.IntegrityError:
        raise DuplicateGenesis from None
    except psycopg.Error as error:
        raise RegistryUnavailable(f"import failed: {' '.join(str(error).split())}") from error
