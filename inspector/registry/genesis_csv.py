"""Reading a maker's list of new chips: CSV with a header line, columns ``chip`` and maybe ``model``, ``identity``."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from pathlib import Path

from firmware_sim import limits
from firmware_sim.errors import CallerError, EvidenceError
from inspector.registry._values import ChipRecord
from inspector.registry.errors import ImportRejected, RegistryMisuse

__all__ = ["read_chips", "read_rows"]


def read_chips(path: Path) -> list[ChipRecord]:
    """Return the chips of a CSV file in the file's order.

    Raises:
        RegistryMisuse: the file cannot be read.
        ImportRejected: a row is malformed or repeats a chip or identity; the message gives file and line.
    """
    records: list[ChipRecord] = []
    chips: dict[str, int] = {}
    identities: dict[str, int] = {}
    for line, row in read_rows(path, required=("chip",), optional=("model", "identity")):
        chip, model, identity = row
        try:
            records.append(ChipRecord(chip, model, identity))
        except CallerError as error:
            raise ImportRejected(f"{path}: line {line}: {error}") from None
        if chips.setdefault(chip, line) != line:
            raise ImportRejected(f"{path}: line {line}: chip {chip} is on line {chips[chip]} already")
        if identity and identities.setdefault(identity, line) != line:
            raise ImportRejected(
                f"{path}: line {line}: chip {chip} has the identity of the chip on line {identities[identity]}"
            )
    if not records:
        raise ImportRejected(f"{path}: no chips after the header")
    return records


def read_rows(
    path: Path, *, required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, fields in the order required + optional, "" for an absent optional column) of a CSV file."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            limits.CSV_BYTES.check(os.fstat(file.fileno()).st_size)
            reader = csv.reader(file, strict=True)
            header = next(reader, None)
            if header is None:
                raise ImportRejected(f"{path}: line 1: the file is empty, a header is needed")
            positions = _columns(path, header, required, optional)
            width = len(header)
            for number, row in enumerate(reader, start=1):
                limits.CSV_ROWS.check(number)
                if len(row) != width:
                    raise ImportRejected(
                        f"{path}: line {reader.line_num}: {len(row)} fields, but the header has {width}"
                    )
                yield reader.line_num, [row[position] if position >= 0 else "" for position in positions]
    except OSError as error:
        raise RegistryMisuse(f"{path}: {error.strerror or error}") from None
    except EvidenceError as error:
        raise ImportRejected(f"{path}: {error}") from None
    except UnicodeDecodeError as error:
        raise ImportRejected(f"{path}: not UTF-8 text: {error.reason}") from None
    except csv.Error as error:
        raise ImportRejected(f"{path}: line {reader.line_num}: {error}") from None


def _columns(path: Path, header: list[str], required: tuple[str, ...], optional: tuple[str, ...]) -> list[int]:
    known = (*required, *optional)
    for name in header:
        if name not in known:
            raise ImportRejected(f"{path}: line 1: unknown column {name!r:.80}, expected {', '.join(known)}")
    if len(set(header)) != len(header):
        raise ImportRejected(f"{path}: line 1: a column occurs twice")
    for name in required:
        if name not in header:
            raise ImportRejected(f"{path}: line 1: column {name!r} is missing")
    return [header.index(name) if name in header else -1 for name in known]
