"""A model's files as a bundle's subject, so that the verdict on its training travels with the weights.

The digest is that of the subject of a statement of OpenSSF Model Signing (v1.0, method "files", no file left out):
SHA-256 over the SHA-256 of each file, in the order of their paths.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from firmware_sim.errors import CallerError, file_error
from inspector.inspection.transcripts import Transcript
from monitor.programs.bits import same_bytes
from monitor.transcript import RunFolder

__all__ = ["digest_of_files", "model_digest", "subject_of_model"]

_KINDS = ("weight", "buffer")
_TENSORS = ".safetensors"


def model_digest(path: Path) -> tuple[str, dict[str, str]]:
    """The model's digest and each file's SHA-256 by its name, "." for a model of one file; all in hex.

    Raises:
        CallerError: there is no file, something is neither file nor folder, or a file cannot be read.
    """
    if path.is_dir():
        files = {each.relative_to(path).as_posix(): each for each in path.rglob("*") if not each.is_dir()}
    else:
        files = {".": path}
    digests = {}
    for name, file in sorted(files.items()):
        if not file.is_file() or (file.is_symlink() and name != "."):
            raise CallerError(f"{file} is no file of a model")
        try:
            with file.open("rb") as content:
                digests[name] = hashlib.file_digest(content, "sha256").hexdigest()
        except OSError as error:
            raise file_error(f"cannot read {file}", error) from None
    if not digests:
        raise CallerError(f"{path} holds no file of a model")
    return digest_of_files(digests), digests


def digest_of_files(files: Mapping[str, str]) -> str:
    """SHA-256, in hex, over the files' SHA-256 in the order of their paths, compared part by part."""
    return hashlib.sha256(b"".join(bytes.fromhex(files[name]) for name in sorted(files, key=PurePosixPath))).hexdigest()


def subject_of_model(path: Path, transcripts: Iterable[Transcript]) -> dict[str, Any]:
    """What a verdict says of a model: ``name``, ``sha256``, ``files``, and the ``run_id`` whose last state it is.

    Args:
        path: a safetensors file, or a folder with some and whatever goes with them.
        transcripts: runs that were inspected, states included.

    Raises:
        CallerError: the files cannot be read, or their tensors are not the weights (and the buffers that are among
            them) with which one of the runs ended.
    """
    digest, files = model_digest(path)
    tensors: dict[str, Tensor] = {}
    for file in sorted(path.rglob(f"*{_TENSORS}")) if path.is_dir() else [path]:
        try:
            tensors |= load_file(file)
        except (SafetensorError, OSError, ValueError) as error:
            raise CallerError(f"{file} is not safetensors: {error}") from None
    for item in transcripts:
        if item.run.finished and _is_final(tensors, item.run):
            return {"name": path.resolve().name, "sha256": digest, "files": files, "run_id": item.run.manifest.run}
    raise CallerError(f"the tensors of {path} are not the weights with which one of the runs ended")


def _is_final(tensors: dict[str, Tensor], run: RunFolder) -> bool:
    state = run.checkpoint(run.declared.steps)
    weights, buffers = (
        {name.removeprefix(f"{kind}/"): value for name, value in state.items() if name.startswith(f"{kind}/")}
        for kind in _KINDS
    )
    known = weights | buffers
    return set(weights) <= set(tensors) <= set(known) and all(_is_same(tensors[name], known[name]) for name in tensors)


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and same_bytes(one, other)
