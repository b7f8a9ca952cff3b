"""Tables of the directory: events, genesis and heads are only appended to; all the others follow from them."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    UniqueConstraint,
)

__all__ = [
    "SCHEMA_VERSION",
    "batches",
    "census_draws",
    "censuses",
    "changes",
    "deposits",
    "events",
    "genesis",
    "heads",
    "holdings",
    "metadata",
    "parties",
    "properties",
    "tail",
]

SCHEMA_VERSION = 1

metadata = MetaData()

properties = Table(
    "properties",
    metadata,
    Column("name", String(32), primary_key=True),
    Column("value", Text, nullable=False),
)

# One row: the log's size and its frontier, the roots of the complete subtrees from left to right. A writer locks it.
tail = Table(
    "tail",
    metadata,
    Column("id", SmallInteger, primary_key=True, autoincrement=False),
    Column("size", BigInteger, nullable=False),
    Column("frontier", LargeBinary, nullable=False),
)

events = Table(
    "events",
    metadata,
    Column("event", BigInteger, primary_key=True, autoincrement=False),
    Column("kind", String(16), nullable=False),
    Column("received", BigInteger, nullable=False),
    Column("entry", LargeBinary, nullable=False),
)

heads = Table(
    "heads",
    metadata,
    Column("size", BigInteger, primary_key=True, autoincrement=False),
    Column("head", LargeBinary, nullable=False),
)

parties = Table(
    "parties",
    metadata,
    Column("party", Integer, primary_key=True, autoincrement=False),
    Column("name", String(64), nullable=False, unique=True),
    Column("role", String(16), nullable=False),
    Column("keyid", String(128), nullable=False, unique=True),
    Column("key", Text, nullable=False),
    Column("event", BigInteger, ForeignKey("events.event"), nullable=False),
)

genesis = Table(
    "genesis",
    metadata,
    Column("ordinal", BigInteger, primary_key=True, autoincrement=False),
    Column("chip", String(64), nullable=False, unique=True),
    Column("model", String(64), nullable=False),
    Column("identity", String(80), nullable=False),
)
# No two chips share a device certificate; "" means none.
Index(
    "genesis_identity",
    genesis.c.identity,
    unique=True,
    sqlite_where=genesis.c.identity != "",
    postgresql_where=genesis.c.identity != "",
)

batches = Table(
    "batches",
    metadata,
    Column("event", BigInteger, ForeignKey("events.event"), primary_key=True, autoincrement=False),
    Column("maker", Integer, ForeignKey("parties.party"), nullable=False),
    Column("first", BigInteger, nullable=False, unique=True),
    Column("count", BigInteger, nullable=False),
    Column("time", BigInteger, nullable=False),
)

holdings = Table(
    "holdings",
    metadata,
    Column("ordinal", BigInteger, ForeignKey("genesis.ordinal"), primary_key=True, autoincrement=False),
    Column("holder", Integer, ForeignKey("parties.party"), nullable=False),
    Column("state", SmallInteger, nullable=False),
    Column("sequence", Integer, nullable=False),
    Column("time", BigInteger, nullable=False),
    Column("event", BigInteger, ForeignKey("events.event"), nullable=False),
)

# The primary key is a second wall behind the sequence check: no chip has two records with one number.
changes = Table(
    "changes",
    metadata,
    Column("ordinal", BigInteger, ForeignKey("genesis.ordinal"), primary_key=True, autoincrement=False),
    Column("sequence", Integer, primary_key=True, autoincrement=False),
    Column("event", BigInteger, ForeignKey("events.event"), nullable=False),
    Column("time", BigInteger, nullable=False),
    Column("holder_before", Integer, nullable=False),
    Column("state_before", SmallInteger, nullable=False),
    Column("holder", Integer, nullable=False),
    Column("state", SmallInteger, nullable=False),
    Index("changes_by_time", "time"),
)

censuses = Table(
    "censuses",
    metadata,
    Column("census", Integer, primary_key=True, autoincrement=False),
    Column("drawn_event", BigInteger, ForeignKey("events.event"), nullable=False),
    Column("result_event", BigInteger, ForeignKey("events.event"), nullable=True),
)

census_draws = Table(
    "census_draws",
    metadata,
    Column("census", Integer, ForeignKey("censuses.census"), primary_key=True, autoincrement=False),
    Column("rank", Integer, primary_key=True, autoincrement=False),
    Column("ordinal", BigInteger, ForeignKey("genesis.ordinal"), nullable=False),
    UniqueConstraint("census", "ordinal"),
)

# What chips answered at the positions in statements, by the digest there. Older registries get the table when the first
# is deposited.
deposits = Table(
    "deposits",
    metadata,
    Column("deposit", String(80), primary_key=True),
    Column("name", String(32), primary_key=True),
    Column("content", LargeBinary, nullable=False),
)
