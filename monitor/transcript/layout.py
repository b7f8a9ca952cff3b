"""Where each file of a run folder lies: pure functions, and the grammar of all allowed paths.

A run folder holds {M, D, W} of Shavit 2023, section 4.1 (PAPERS S5), the rounding logs and the chips' evidence:

    manifest.json                    signed list of every other file, the only file that is ever replaced
    metadata.json                    M
    data/samples.safetensors         D: the samples that were used, data/order.safetensors their order
    data/salt.bin                    key of the salts of the sample digests
    steps/00000012.json              leaf of step 12 and the signed head of the log that ends with it
    logs/00000012.rlog               rounding log of step 12
    checkpoints/00000012.safetensors W_12
    batches/00000012.safetensors     of a run without a recipe, in place of data/: the batch of step 12
    programs/<sha256>.json           a program that steps execute
    chips/<id>/log.bin …             what each chip says: log, quote, certificate chain, revealed epoch keys
"""

from __future__ import annotations

import re

__all__ = [
    "CHIP_FILES",
    "MANIFEST",
    "MAXIMUM_STEP",
    "METADATA",
    "ORDER",
    "SALT",
    "SAMPLES",
    "batch_path",
    "checkpoint_path",
    "chip_path",
    "is_allowed",
    "log_path",
    "program_path",
    "step_path",
]

MANIFEST = "manifest.json"
METADATA = "metadata.json"
SAMPLES = "data/samples.safetensors"
ORDER = "data/order.safetensors"
SALT = "data/salt.bin"
CHIP_FILES = ("chain.pem", "epochs.json", "log.bin", "quote.json")

MAXIMUM_STEP = 99_999_999
_ALLOWED = re.compile(
    r"metadata\.json|data/(samples\.safetensors|order\.safetensors|salt\.bin)"
    r"|steps/\d{8}\.json|logs/\d{8}\.rlog|(checkpoints|batches)/\d{8}\.safetensors|programs/[0-9a-f]{64}\.json"
    r"|chips/[a-z0-9][a-z0-9-]{0,63}/(chain\.pem|epochs\.json|log\.bin|quote\.json)",
    re.ASCII,
)


def step_path(step: int) -> str:
    """Path of the leaf of a step; step 0 is the initial state."""
    return f"steps/{_number(step)}.json"


def log_path(step: int) -> str:
    """Path of the rounding log of a step, 1 or more."""
    return f"logs/{_number(step)}.rlog"


def checkpoint_path(step: int) -> str:
    """Path of the full state after a step."""
    return f"checkpoints/{_number(step)}.safetensors"


def batch_path(step: int) -> str:
    """Path of the batch of a step of somebody's own loop."""
    return f"batches/{_number(step)}.safetensors"


def program_path(digest: str) -> str:
    """Path of the program with that SHA-256, lower-case hex."""
    return f"programs/{digest}.json"


def chip_path(chip_id: str, name: str) -> str:
    """Path of one of ``CHIP_FILES`` of a chip."""
    return f"chips/{chip_id}/{name}"


def is_allowed(path: str) -> bool:
    """Tell whether the grammar has that path; no trust anchor is among them."""
    return _ALLOWED.fullmatch(path) is not None


def _number(step: int) -> str:
    if not 0 <= step <= MAXIMUM_STEP:
        raise ValueError(f"step {step} is outside 0 … {MAXIMUM_STEP}")
    return f"{step:08d}"
