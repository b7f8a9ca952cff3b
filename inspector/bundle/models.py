"""A model's files as a bundle's subject, so that the verdict on its training travels with the weights.

The digest is the one that OpenSSF Model Signing (v1.0, method "files", default ignored paths) signs: SHA-256 over the
SHA-256 of each file, in the order of their paths.

Laws:
    1. The digest does not cover names. A verdict therefore lists the files by name, and a model needs the same list.
    2. The bytes that are hashed are the bytes that are compared: each file is opened once, and read once.
    3. A name means one tensor in all files. Where a run has a weight and a buffer of that name, the weight counts.
    4. What is not compared with the run is listed: files that hold no safetensors, and what the digest ignores.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from unicodedata import normalize

import torch
from torch import Tensor

from firmware_sim import limits
from firmware_sim.errors import CallerError, EvidenceError, file_error
from firmware_sim.evidence import canonical
from inspector.inspection.transcripts import Transcript
from monitor.declaration.statement import BESIDE_MODEL
from monitor.transcript import RunFolder, state_pieces
from monitor.transcript.state import DTYPES, PREFIX_BYTES, check_entries

__all__ = ["Model", "about_model", "check_files", "digest_of_files", "read_model", "subject_of_model"]

_TENSORS = ".safetensors"
_INDEX = re.compile(r".*\.safetensors\.index\b.*\.json", re.IGNORECASE | re.DOTALL)
_IGNORED = {".git", ".gitattributes", ".github", ".gitignore"}
"""What Model Signing leaves out where it lies in the model's own folder."""
_WRAPPER = re.compile(r"(?<![^.])(module|_orig_mod)\.")
"""What wrappers of a model put into names: those of data-parallel training, and of a compiler."""
_PIECE = 1 << 20
_SHOWN = 5


class _Content(NamedTuple):
    """A tensor's type, shape and SHA-256 of its bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    sha256: str

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


class Model(NamedTuple):
    """A model's files as they were read.

    Attributes:
        summary: what a verdict says: ``name`` of the file or folder, ``sha256``, ``files`` (SHA-256 of each by its
            name, "." for a model of one file), what is ``ignored``, and ``not_compared``: files that hold neither
            safetensors nor an index of some, the longest first.
        tensors: type, shape and digest of each tensor, by name; empty where none was asked for.
    """

    summary: dict[str, Any]
    tensors: Mapping[str, _Content]


def read_model(path: Path, *, tensors: bool = True) -> Model:
    """Read a model: a safetensors file, or a folder with some and whatever goes with them.

    A link in the folder may lead to a file among the blobs of the same repository in a cache of the Hugging Face Hub.

    Args:
        tensors: also parse the files that hold some, which must agree with each other and with their indexes.

    Raises:
        CallerError: there is no file, one is not as described, or two names are one to some file systems.
        DeviceError: a file may not be read.
    """
    files, ignored = _listed(path)
    digests: dict[str, str] = {}
    parts: dict[str, dict[str, _Content]] = {}
    indexes: dict[str, Any] = {}
    others: dict[str, int] = {}
    for name, place in sorted(files.items()):
        try:
            with _Hashed(place) as file:
                if tensors and (name == "." or name.endswith(_TENSORS)):
                    parts[name] = _tensors_of(file)
                elif tensors and _INDEX.fullmatch(name):
                    indexes[name] = canonical.parse(file.read(limits.HEADER_BYTES.most + 1), most=limits.HEADER_BYTES)
                else:
                    others[name] = file.status.st_size
                digests[name] = file.digest()
        except OSError as error:
            raise file_error(f"cannot read {path / name}", error) from None
        except EvidenceError as error:
            raise CallerError(f"{path / name} cannot be read as a file of a model: {error}") from None
    if tensors and not parts:
        raise CallerError(f"{path} has no file whose name ends in {_TENSORS}")
    held = _joined(parts)
    for name, index in indexes.items():
        _check_index(name, index, parts)
    summary = {
        "name": Path(os.path.abspath(path)).name,
        "sha256": digest_of_files(digests),
        "files": digests,
        "ignored": ignored,
        "not_compared": sorted(others, key=lambda name: (-others[name], name)),
    }
    return Model(summary, held)


def digest_of_files(files: Mapping[str, str]) -> str:
    """SHA-256, in hex, over the files' SHA-256 in the order of their paths, compared part by part."""
    return hashlib.sha256(b"".join(bytes.fromhex(files[name]) for name in sorted(files, key=PurePosixPath))).hexdigest()


def check_files(summary: Mapping[str, Any] | None, model: Model) -> dict[str, object]:
    """What a verdict says of a model, with what is ignored here.

    Raises:
        EvidenceError: it says nothing of a model, or it is not about these files under these names.
    """
    if summary is None:
        raise EvidenceError("the bundle is not about a model")
    known, files = summary["files"], model.summary["files"]
    for name in sorted(known.keys() | files.keys()):
        if known.get(name) != files.get(name):
            how = "is not among its files" if name not in known else "is missing" if name not in files else "is another"
            raise EvidenceError(f"the bundle is about another model: {name!a:.100} {how}")
    return {**summary, "ignored": model.summary["ignored"]}


def about_model(summary: Mapping[str, Any]) -> str:
    """What a verdict says of a model, in a line: what was compared with the run, and what was not."""
    count = len(summary["files"]) - len(summary["not_compared"])
    text = f"{summary['name']!a:.100}: {count} of {len(summary['files'])} files compared with the last state of a run"
    for key, label in (("not_compared", "not compared"), ("ignored", "ignored"), ("buffers", "among its buffers")):
        shown, more = ", ".join(f"{name!a:.100}" for name in summary[key][:_SHOWN]), len(summary[key]) - _SHOWN
        text += f"; {label}: {shown}{f' and {more} more' if more > 0 else ''}" if shown else ""
    return text


def subject_of_model(model: Model, transcripts: Iterable[Transcript]) -> dict[str, object]:
    """What a verdict says of a model: what was read, ``run_id``, and which tensors are ``buffers`` of the run.

    Args:
        transcripts: runs that were inspected, states included.

    Raises:
        CallerError: its tensors are not the weights (and the buffers that are among them) with which one of the runs
            ended; the first that differs is named.
    """
    found: list[tuple[int, str]] = []
    for run in (item.run for item in transcripts if item.run.finished):
        weights, buffers = _last_state(run)
        found.append(_differences(model.tensors, weights, buffers))
        if not found[-1][0]:
            return {**model.summary, "buffers": sorted(set(model.tensors) - set(weights)), "run_id": run.manifest.run}
    count, first = min(found, default=(1, "none has ended"))
    text = f"the tensors of {model.summary['name']!a:.100} are not the weights with which a run ended: {first}"
    raise CallerError(text + (f"; {count - 1} more differ" if count > 1 else ""))


class _Hashed(io.BufferedReader):
    """A plain file that is hashed as it is read, from its beginning to its end."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)))
        self._whole, self.status = hashlib.sha256(), os.fstat(self.fileno())
        if not stat.S_ISREG(self.status.st_mode):
            self.close()
            raise EvidenceError("it is not a plain file")

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self._whole.update(data)
        return data

    def part(self, count: int) -> str:
        """SHA-256 of so many bytes that come next."""
        part = hashlib.sha256()
        while count and (piece := self.read(min(count, _PIECE))):
            part.update(piece)
            count -= len(piece)
        return part.hexdigest()

    def digest(self) -> str:
        """SHA-256 of all, to the end."""
        while self.read(_PIECE):
            pass
        return self._whole.hexdigest()


def _listed(path: Path) -> tuple[dict[str, Path], list[str]]:
    """Where each file of a model lies, by name, and what of it is ignored."""
    if not path.is_dir():
        return {".": Path(os.path.realpath(path))}, []
    root, ignored = Path(os.path.realpath(path)), set[str]()
    files: dict[str, Path] = {}
    for folder, below, names in os.walk(root, onerror=_refuse):
        place = Path(folder)
        if place == root:
            ignored = _IGNORED & {*below, *names}
            below[:] = [each for each in below if each not in ignored]
            names = [each for each in names if each not in ignored]
        found = {each: _followed(place / each, root) for each in (*below, *names)}
        files |= {(place / each).relative_to(root).as_posix(): found[each] for each in names}
    _check_names(files)
    return files, sorted(ignored)


def _refuse(error: OSError) -> None:
    raise file_error(f"cannot read {error.filename}", error) from None


def _followed(path: Path, root: Path) -> Path:
    """The path itself, or the file to which it is a link in the cache of the same Hub repository."""
    if not path.is_symlink():
        return path
    target = Path(os.path.realpath(path))
    blobs, repository = target.parent, target.parent.parent
    cached = blobs.name == "blobs" and repository.name.startswith("models--") and repository in (root, *root.parents)
    if cached and target.is_file():
        return target
    raise CallerError(f"{path} is a link that leads out of the model's folder: replace it by the file that it leads to")


def _check_names(names: Iterable[str]) -> None:
    """CallerError if a name is no text, or two are one where case or Unicode forms do not count."""
    seen: dict[str, str] = {}
    for name in sorted(names):
        if name.encode(errors="replace").decode() != name:
            raise CallerError(f"the name of a model's file is not valid UTF-8: {name!a:.100}")
        other = seen.setdefault(normalize("NFC", normalize("NFD", name).casefold()), name)
        if other != name:
            raise CallerError(
                f"some file systems do not distinguish the names {other!a:.100} and {name!a:.100}: rename one of them"
            )


def _tensors_of(file: _Hashed) -> dict[str, _Content]:
    """Parse safetensors; EvidenceError unless the tensors fill the file without a gap."""
    size = limits.HEADER_BYTES.check(int.from_bytes(file.read(PREFIX_BYTES), "little"))
    header = canonical.parse(file.read(size), most=limits.HEADER_BYTES)
    if isinstance(header, dict):
        header.pop("__metadata__", None)
    check_entries(header, "it")
    found, start = {}, 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape = DTYPES.get(entry["dtype"]), torch.Size(entry["shape"])
        if dtype is None:
            raise EvidenceError(f"tensor {name!a:.100} is of type {entry['dtype']!a:.40}, which no run can have")
        end = start + shape.numel() * dtype.itemsize
        if entry["data_offsets"] != [start, end]:
            raise EvidenceError(f"tensor {name!a:.100} overlaps another, leaves a gap, or is not as long as its shape")
        found[name] = _Content(dtype, tuple(shape), file.part(end - start))
        start = end
    if file.tell() != PREFIX_BYTES + size + start or file.read(1):
        raise EvidenceError("it does not end with its last tensor")
    return found


def _joined(parts: Mapping[str, Mapping[str, _Content]]) -> dict[str, _Content]:
    """The tensors of all files; CallerError where two have one name."""
    found: dict[str, tuple[str, _Content]] = {}
    for file, tensors in parts.items():
        for name, content in tensors.items():
            other, same = found.setdefault(name, (file, content))
            if content != same:
                raise CallerError(f"tensor {name!a:.100} is not the same in {other!a:.100} and in {file!a:.100}")
    return {name: content for name, (_, content) in found.items()}


def _check_index(name: str, index: Any, parts: Mapping[str, Mapping[str, _Content]]) -> None:
    """CallerError unless an index says of each tensor of the model in which compared file it is."""
    listed = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise CallerError(f"{name!a:.100} is not an index: it has no map of tensors to files")
    for tensor, file in listed.items():
        if tensor not in parts.get((PurePosixPath(name).parent / file).as_posix(), ()):
            raise CallerError(
                f"{name!a:.100} says that tensor {tensor!a:.100} is in {file!a:.100}, but no compared file of that "
                "name has it"
            )
    missing = set[str]().union(*parts.values()) - set(listed)
    if missing:
        raise CallerError(f"{name!a:.100} leaves out tensor {min(missing)!a:.100}, which is in one of the files")


def _last_state(run: RunFolder) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and buffers with which a run ended; of a name that has both, as older recorders let it, the weight."""
    state = run.checkpoint(run.declared.steps)
    weights, buffers = (
        {name.removeprefix(f"{kind}/"): value for name, value in state.items() if name.startswith(f"{kind}/")}
        for kind in ("weight", "buffer")
    )
    return weights, {name: value for name, value in buffers.items() if name not in weights}


def _content(tensor: Tensor) -> _Content:
    _, raw = state_pieces({"": tensor})
    return _Content(tensor.dtype, tuple(tensor.shape), hashlib.sha256(raw).hexdigest())


def _differences(
    held: Mapping[str, _Content], weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
) -> tuple[int, str]:
    """How many tensors of files are not those of a run, and the first with what would explain it."""
    state = {**weights, **buffers}
    run = {name: _content(tensor) for name, tensor in state.items()}
    own = {name for name in weights if not name.startswith(BESIDE_MODEL)}
    names = sorted(name for name in own | held.keys() if held.get(name) != run.get(name))
    if not names:
        return 0, ""
    name = names[0]
    mine, its, shown = held.get(name), run.get(name), f"{name!a:.100}"
    if its is None:
        text = f"{shown} ({mine}) is unknown to the run{_other_name(name, mine, run)}"
    elif mine is None:
        text = f"{shown} ({its}) is missing{_other_name(name, its, held)}"
    else:
        text = f"{shown} ({mine}) differs from the run's ({its})"
        if mine.shape == its.shape and _content(state[name].to(mine.dtype)) == mine:
            text += ": it is the run's, cast to another type"
    return len(names), text


def _other_name(name: str, content: _Content | None, others: Mapping[str, _Content]) -> str:
    """What would explain that a tensor is on one side alone: it is on the other under another name."""
    for other in others:
        if _WRAPPER.sub("", other) == _WRAPPER.sub("", name):
            return f": the prefix of a wrapper explains it, since there is {other!a:.100}"
    same = next((other for other, each in others.items() if each == content), None)
    return "" if same is None else f": both names of a tied weight explain it, since {same!a:.100} has the same bytes"
