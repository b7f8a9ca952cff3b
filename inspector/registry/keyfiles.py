"""Keys as files: a private key readable by its owner only, its public half next to it; neither is in the database."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from firmware_sim import limits
from firmware_sim.errors import CallerError, EvidenceError, file_error
from firmware_sim.evidence import SigningKey, VerifyingKey
from monitor.files import write_whole

__all__ = ["load_private", "load_public", "write_keys"]

_PRIVATE = "chipwitness-private-key"
_PUBLIC = "chipwitness-public-key"


def write_keys(path: Path, key: SigningKey) -> Path:
    """Write ``path`` (private, mode 0600) and ``path`` + ``.pub``; returns the latter.

    Raises:
        CallerError: either file exists.
        DeviceError: it cannot be written.
    """
    public = path.with_name(path.name + ".pub")
    with ExitStack() as undo:  # both or none
        for file, label, value, mode in (
            (path, _PRIVATE, key.private_bytes(), 0o600),
            (public, _PUBLIC, key.verifying.raw, 0o644),
        ):
            try:
                write_whole(file, f"{label} ed25519 {value.hex()}\n".encode(), new=True, mode=mode)
            except FileExistsError:
                raise CallerError(f"{file}: exists already, and a key is never overwritten") from None
            except OSError as error:
                raise file_error(str(file), error) from None
            undo.callback(file.unlink, missing_ok=True)
        undo.pop_all()
    return public


def load_private(path: Path) -> SigningKey:
    """The signing key in a file that ``write_keys`` wrote; raises CallerError for anything else."""
    return SigningKey.from_private_bytes(_read(path, _PRIVATE, "private"))


def load_public(path: Path) -> VerifyingKey:
    """The verifying key in a ``.pub`` file; raises CallerError for anything else."""
    return VerifyingKey(_read(path, _PUBLIC, "public"))


def _read(path: Path, label: str, kind: str) -> bytes:
    try:
        words = limits.read_file(path, limits.KEY_FILE_BYTES).decode("ascii").split()
    except OSError as error:
        raise file_error(str(path), error) from None
    except (EvidenceError, UnicodeDecodeError):
        raise CallerError(f"{path}: not a {kind} key file") from None
    try:
        value = bytes.fromhex(words[2]) if len(words) == 3 else b""
    except ValueError:
        value = b""
    if words[:2] != [label, "ed25519"] or len(value) != 32:
        raise CallerError(f"{path}: not a {kind} key file")
    return value
