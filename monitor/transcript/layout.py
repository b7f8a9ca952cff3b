"""Where each file of a run folder lies: pure functions, and the grammar of all allowed paths.

A run folder holds {M, D, W} of Shavit 2023, section 4.1, the rounding logs and the chips' evidence:

    manifest.json                    signed head: steps, root of their log, length and digest of the journal, what comes
                                     next; the only file that is ever replaced, as long at step 10^6 as at step 1
    journal.tsv                      grows by one record a commit: the step's leaf, and length and digest of its files
    metadata.json                    M
    data/samples.safetensors         D: the samples that were used, data/order.safetensors their order
    data/salt.bin                    key of the salts of the sample digests
    logs/00000012.rlog               rounding log of step 12
    checkpoints/00000012.safetensors W_12, without what step 13 overwrites before it reads it
    batches/00000012.safetensors     of a run without a preset, in place of data/: the batch of step 12, and a salt
    programs/<sha256>.json           a program that steps execute
    constants/<sha256>.bin           of that program: the bytes of those constants of which it holds only the digests
    chips/<id>/log.bin …             what each chip says: log, quote, certificate chain, revealed epoch keys
    chips/<id>/checkpoint.json       of a chip that has released older records: what an inspector accepted of them

The journal's record 0 lists M and D, record s + 1 what step s added, and one after the last step what came when the run
was closed. A checkpoint is listed by the record after its step's own, when it is known what is read of it; the last one
with the chips' evidence; W_0 alone with its step. So the record of a path follows from the path, but for programs and
their constants, which are in the record of the first step that runs them. A file of no bytes, such as the log of a
step under exact numerics, is listed and not stored; a checkpoint that the declaration releases is listed and deleted.
"""

from __future__ import annotations

import re

__all__ = [
    "CHIP_CHECKPOINT",
    "CHIP_FILES",
    "CREATION",
    "JOURNAL",
    "MANIFEST",
    "MAXIMUM_STEP",
    "METADATA",
    "ORDER",
    "SALT",
    "SAMPLES",
    "batch_path",
    "checkpoint_path",
    "chip_path",
    "closing_record",
    "constants_path",
    "is_allowed",
    "log_path",
    "program_of",
    "program_path",
    "record_of",
    "step_of",
    "step_record",
]

MANIFEST = "manifest.json"
JOURNAL = "journal.tsv"
METADATA = "metadata.json"
SAMPLES = "data/samples.safetensors"
ORDER = "data/order.safetensors"
SALT = "data/salt.bin"
CHIP_FILES = ("chain.pem", "epochs.json", "log.bin", "quote.json")
"""Each chip's; one whose log begins later than its life has ``CHIP_CHECKPOINT`` too."""
CHIP_CHECKPOINT = "checkpoint.json"
CREATION = 0
"""Number of the journal's record that lists M and D."""

MAXIMUM_STEP = 99_999_999
_ALLOWED = re.compile(
    r"metadata\.json|data/(samples\.safetensors|order\.safetensors|salt\.bin)"
    r"|logs/(?P<log>\d{8})\.rlog|batches/(?P<batch>\d{8})\.safetensors|(programs/(?P<program>[0-9a-f]{64})\.json|constants/(?P<constants>[0-9a-f]{64})\.bin)"
    r"|checkpoints/(?P<checkpoint>\d{8})\.safetensors"
    r"|chips/[a-z0-9][a-z0-9-]{0,63}/(chain\.pem|checkpoint\.json|epochs\.json|log\.bin|quote\.json)",
    re.ASCII,
)


def step_record(step: int) -> int:
    """Number of the journal's record of a step; step 0 is the initial state."""
    return step + 1


def closing_record(steps: int) -> int:
    """Number of the journal's record that closes a run of so many steps."""
    return steps + 2


def log_path(step: int) -> str:
    """Path of the rounding log of a step, 1 or more."""
    return f"logs/{_number(step)}.rlog"


def checkpoint_path(step: int) -> str:
    """Path of the state after a step."""
    return f"checkpoints/{_number(step)}.safetensors"


def batch_path(step: int) -> str:
    """Path of the batch of a step, where batches were not declared beforehand."""
    return f"batches/{_number(step)}.safetensors"


def program_path(digest: str) -> str:
    """Path of the program with that SHA-256, lower-case hex."""
    return f"programs/{digest}.json"


def constants_path(digest: str) -> str:
    """Path of the bytes of that program's constants that it holds by their digests."""
    return f"constants/{digest}.bin"


def program_of(path: str) -> str | None:
    """Digest of the program whose file, or whose constants, that is; None for any other file."""
    match = _ALLOWED.fullmatch(path)
    return match and (match["program"] or match["constants"])


def chip_path(chip_id: str, name: str) -> str:
    """Path of one of a chip's files."""
    return f"chips/{chip_id}/{name}"


def is_allowed(path: str) -> bool:
    """Tell whether the grammar has that path; no trust anchor is among them."""
    return _ALLOWED.fullmatch(path) is not None


def step_of(path: str) -> int | None:
    """The step whose file that is; None for a file of no single step, or none that a run may hold."""
    match = _ALLOWED.fullmatch(path)
    number = match and (match["log"] or match["batch"] or match["checkpoint"])
    return int(number) if number else None


def record_of(path: str) -> int | None:
    """Number of the journal's record that lists a step's file; None for a file of no single step."""
    step = step_of(path)
    if step is None:
        return None
    return step_record(step + 1 if step and path.startswith("checkpoints/") else step)


def _number(step: int) -> str:
    if not 0 <= step <= MAXIMUM_STEP:
        raise ValueError(f"step {step} is outside 0 … {MAXIMUM_STEP}")
    return f"{step:08d}"
