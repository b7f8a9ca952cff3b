"""Every limit on what foreign bytes can make a reader do, with its reason.

A reader checks a limit before it allocates, loops, decodes or prints: ``limits.JSON_DEPTH.check(depth)``. Limits lie
above everything that an honest party writes; what is beyond them is refused in one line and costs next to nothing.
Limits that follow from a declaration (the length of a checkpoint from the declared state) are computed where the
declaration is known, in ``monitor.transcript.listing``.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from firmware_sim.errors import EvidenceError

__all__ = ["Limit", "check_chip_id", "check_lab", "check_shape", "read_file"]

_KIB, _MIB = 1 << 10, 1 << 20
_LONGEST_SHOWN = 1 << 80


@dataclass(frozen=True, slots=True)
class Limit:
    """The largest number of something that a reader accepts."""

    most: int
    what: str

    def check(self, value: int) -> int:
        """Return the value; EvidenceError names what there is too much of."""
        if value > self.most:
            shown = str(value) if value < _LONGEST_SHOWN else f"2^{value.bit_length() - 1}"
            raise EvidenceError(f"{shown} {self.what}; at most {self.most} are read")
        return value


# Documents. Every item becomes an object, whose memory is many times its text.
JSON_ITEMS = Limit(1 << 21, "items in a JSON document")
"""The largest honest document but an agreed program is the leaf of a step in which many numbers change."""
JSON_DEPTH = Limit(64, "levels of nesting in a JSON document")
"""Parsers call themselves; programs, the deepest documents, have 10."""
JSON_INTEGER_BITS = Limit(128, "bits of a JSON integer")
"""Converts to a float and to decimal digits whatever it is multiplied with; counters have 64."""
JSON_BYTES = Limit(256 * _MIB, "bytes of a JSON document")
"""An agreed program may be that long; every other kind has its own limit below."""
WIDE_TEXT_BYTES = Limit(16 * _MIB, "bytes of a document with non-ASCII characters")
"""One character of four bytes makes Python store all of a text in four bytes a character."""
AGREED_ITEMS = Limit(1 << 26, "items in an agreed program")
"""Lab and inspector agreed on the program's digest, so it may be as large as their memory allows."""

# Files of a run whose length no declaration explains.
MANIFEST_BYTES = Limit(32 * _MIB, "bytes of a manifest")
"""The longest record that may come next, with each quotation mark escaped, in base64; honest ones have 3 KB."""
RECORD_BYTES = Limit(8 * _MIB, "bytes of a journal's record")
"""A step's leaf, or the lengths and digests of the four files of each of 4096 chips."""
JOURNAL_BYTES = Limit(16 << 30, "bytes of a journal")
"""Ten million steps of 1.6 KB each; a reader hashes a gigabyte in a second and keeps a thousandth of it in memory."""
JOURNAL_RECORDS = Limit(1 << 24, "records in a journal")
"""A reader keeps eight bytes for each."""
JOURNAL_FILES = Limit(1 << 26, "files in a journal")
"""Four for each record: log, batch, checkpoint and program."""
METADATA_BYTES = Limit(16 * _MIB, "bytes of metadata")
"""Names and shapes of 2^17 tensors."""
STEP_BYTES = Limit(4 * _MIB, "bytes of a step's leaf")
"""Its opened state has at most 3 MB; the rest are the numbers of scalars that change."""
ROUNDING_LOG_BYTES = Limit(64 * _MIB, "bytes of a step's rounding log")
"""A step of the largest preset logs less than 1 MB."""
ROUNDING_LOG_GROUPS = Limit(1 << 17, "results in a step's rounding log")
"""Each is seven bytes or more, and takes a reader as long as thousands of entries."""
PROGRAM_BYTES = Limit(256 * _MIB, "bytes of a program")
"""The digest of a program that was not agreed is checked, and nothing else: half a second."""
CONSTANTS_BYTES = Limit(64 * _MIB, "bytes of a program's constants")
"""A recorder refuses more. Not all of them need lie on disk: equal elements are in a program once."""
PROGRAMS_BYTES = Limit(4 << 30, "bytes of all programs of a run, with their constants")
"""4096 of a mebibyte each: as many lengths of a sequence, in a model of a thousand operators."""
SALT_BYTES = Limit(32, "bytes of a salt key")
SAMPLES_BYTES = Limit(256 * _MIB, "bytes of samples")
"""Held twice while they are parsed; data sets of the presets have less than 6 MB."""
HEADER_BYTES = Limit(16 * _MIB, "bytes of a safetensors header")
"""2^17 tensors; the format's own limit is 100 MB."""
PLACES = Limit(1 << 22, "places in the order of samples")
"""Each is hashed once when the data commitment is opened: 4 seconds."""

# Evidence of a chip.
CHAIN_BYTES = Limit(16 * _KIB, "bytes of a certificate chain")
"""Three certificates of 600 bytes."""
QUOTE_BYTES = Limit(16 * _KIB, "bytes of a quote")
"""A quote has 2 KB."""
CHIP_LOG_RECORDS = Limit(2_883_585, "records in a chip's log")
"""All that the firmware's quotas allow (firmware_sim.profiles)."""
STRANGE_LOG_RECORDS = Limit(1 << 14, "records in the log of a chip that no trusted maker vouches for")
"""Such a log can hold anything; of a maker's chip each record cost its firmware a step."""
EPOCH_KEYS = Limit(1 << 17, "epoch keys")
"""The firmware's quota of epochs."""
EPOCH_KEYS_BYTES = Limit(16 * _MIB, "bytes of epoch keys")
AUDITED_TICKS = Limit(1 << 21, "ticks in a chip's log")
"""Each takes one HMAC of the audit; an older chip's schedule stays unaudited."""
CHECKPOINT_BYTES = Limit(8 * _MIB, "bytes of a log checkpoint")
"""Less than 2,000 bytes for each run."""
CHECKPOINT_RUNS = Limit(1 << 12, "runs in a log checkpoint")
"""A run a day for ten years."""
NOTE_BYTES = Limit(4 * _KIB, "bytes of a signed log head")

CLONE_PROOFS = Limit(4, "proofs of clones that a verdict quotes in full")
"""Each holds two logs; the findings name every clone."""

# Declarations, programs and states.
STEPS = Limit(99_999_999, "steps of a run")
"""Eight digits in the names of files."""
SCHEDULE = Limit(1 << 17, "entries in a table of factors")
"""One for each step of a long run whose learning rate follows no formula; part of the metadata's 16 MB."""
TENSOR_RANK = Limit(32, "dimensions of a tensor")
"""PyTorch computes with at most 64; products over more take quadratic time."""
TENSOR_ELEMENTS = Limit(1 << 36, "elements of a tensor")
"""Also the largest size and stride, so that no product overflows 64 bits twice."""
TENSORS = Limit(1 << 17, "tensors")
STATE_BLOCKS = Limit(1 << 24, "blocks of a state")
"""16 TB, or 128 blocks for each of the most tensors."""
STATE_NODES = Limit(1 << 16, "subtrees that a state's digest opens")
"""3 MB of a step's leaf: what the edges of 4096 chips need in a state of 100 GB."""
HYPER_VALUES = Limit(1 << 14, "hyper-parameters in all groups of an optimizer")
"""Copied at each step: 1024 groups have 12 each."""
SCALARS = Limit(1 << 24, "scalars of a program")
GATHERED_BYTES = Limit(1 << 33, "bytes of memory under an operator's input")
"""What a referee allocates to cut an input out of its source."""

# Messages.
PROOF_HASHES = Limit(64, "hashes of a Merkle proof")
"""One for each level of a tree with 2^64 leaves."""
PROOF_NODES = Limit(128, "nodes of a Merkle proof")
"""Two for each level of a tree with 2^63 leaves."""
WORKER_BYTES = Limit(256 * _MIB, "bytes of a replay device's answer")
"""Leaves of 100,000 steps."""

# Files of the inspector's side: from people, but not always from careful ones.
TRUST_BYTES = Limit(64 * _MIB, "bytes of a trust file")
MEMORY_BYTES = Limit(64 * _MIB, "bytes of an inspector's memory")
SCENARIO_BYTES = Limit(256 * _KIB, "bytes of a scenario")
"""Finding the line of a key takes time in proportion to the file."""
STATEMENT_BYTES = Limit(64 * _MIB, "bytes of a registry statement or proof")
"""A census that misses 400,000 chips; lots of chips that change hands have less than 10 MB."""
COUNTERSIGNED_BYTES = Limit(32 * _MIB, "bytes of a countersigned declaration")
"""The declaration of the longest metadata, twice in base64."""
EXPORT_BYTES = Limit(256 * _MIB, "bytes of a list of what a lab hands over")
"""Two million files."""
BUNDLE_BYTES = Limit(256 * _MIB, "bytes of a verdict's bundle")
OPERANDS_BYTES = Limit(128 * _MIB, "bytes of the operands of a disputed operator")
"""In a game's evidence they are written in base64 twice."""
KEY_FILE_BYTES = Limit(4 * _KIB, "bytes of a key file")
CSV_BYTES = Limit(1 << 32, "bytes of a list of chips")
CSV_ROWS = Limit(1 << 24, "rows in a list of chips")

# What is shown.
LINE_CHARACTERS = Limit(2000, "characters in a line")
REASONS_SHOWN = Limit(200, "reasons")
"""More are counted; JSON output has them all."""

_LAB = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
_CHIP = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")


def read_file(path: Path, most: Limit) -> bytes:
    """Content of a file; EvidenceError where it is longer than that.

    OSError where it cannot be read, or is a pipe or device, which might never end.
    """
    check_ends(path)
    with path.open("rb") as file:
        content = file.read(most.most + 1)
    if len(content) > most.most:
        raise EvidenceError(f"{path.name} has more than {most.most} {most.what}")
    return content


def check_ends(path: Path) -> None:
    """OSError if a path is there and leads to neither a file nor a folder."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "it is not a plain file")


def check_lab(name: object) -> None:
    """EvidenceError unless a lab's name is 1 to 32 small letters, digits and "-", the first no "-"."""
    if not isinstance(name, str) or _LAB.fullmatch(name) is None:
        raise EvidenceError(f"a lab's name must be 1 to 32 small letters, digits and '-', not {name!r:.100}")


def check_chip_id(name: object) -> None:
    """EvidenceError unless a chip's id is 1 to 64 small letters, digits and "-", the first no "-"."""
    if not isinstance(name, str) or _CHIP.fullmatch(name) is None:
        raise EvidenceError(f"a chip's id must be 1 to 64 small letters, digits and '-', not {name!r:.100}")


def check_shape(shape: object) -> None:
    """EvidenceError unless it is a list of counts whose product, zeros left out, is a tensor's size."""
    if not isinstance(shape, Sequence) or isinstance(shape, str | bytes):
        raise EvidenceError("a tensor's shape is not a list")
    TENSOR_RANK.check(len(shape))
    elements = 1
    for size in shape:
        if type(size) is not int or size < 0:
            raise EvidenceError("a tensor's shape holds something that is not a count")
        elements = TENSOR_ELEMENTS.check(elements * max(size, 1))
