"""A run as one archive: a plain tar of its files, and first the list of their digests that its lab signed.

    export.json      what the lab hands over, and can be held to: length and digest of each file
    manifest.json …  the files

Unpacking keeps the list next to the run, as ``RUN.export.json``. A file of a copy that is not what the manifest
says proves nothing, since copies suffer; one that is what the list says was so when it left the lab.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from firmware_sim import limits
from firmware_sim.errors import CallerError, Damaged, EvidenceError, Unreadable, foreign
from firmware_sim.evidence import SigningKey, VerifyingKey, open_sealed, seal
from monitor.files import write_whole
from monitor.transcript.layout import JOURNAL, MANIFEST, is_allowed
from monitor.transcript.manifest import Entry, read_entry
from monitor.transcript.reader import RunFolder, entry_of

__all__ = ["Export", "export_path", "export_run", "handed_over", "import_run", "signed_list"]

_LIST = "export.json"
_PAYLOAD = "application/vnd.chipwitness.export+json"
_PIECE = 1 << 20
_NOTHING = bytes(tarfile.BLOCKSIZE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What a lab signed that it hands over: a run's id, and length and digest of each file by its path."""

    lab: str
    run: str
    files: Mapping[str, Entry]

    @classmethod
    def open(cls, content: bytes, labs: Mapping[str, VerifyingKey]) -> Export:
        """Verify and parse; EvidenceError unless one of these labs signed it, in this form."""
        for lab, key in labs.items():
            if key.key_id.encode() not in content:
                continue
            try:
                payload = open_sealed(content, _PAYLOAD, key, most=limits.EXPORT_BYTES)
                files = {path: read_entry(path, entry) for path, entry in payload["files"].items()}
                return cls(lab=lab, run=str(payload["run"]), files=files)
            except (EvidenceError, LookupError, TypeError, AttributeError):
                continue
        raise EvidenceError("no registered lab has signed the exported run")


def signed_list(run: str, files: Mapping[str, Entry], key: SigningKey) -> bytes:
    """The list of what is handed over of a run, signed by its lab."""
    listed = {path: [entry.length, entry.sha256] for path, entry in files.items()}
    return seal(_PAYLOAD, {"run": run, "files": listed}, key)


def export_path(run: Path) -> Path:
    """Where the signed list lies that came with a copy."""
    run = run if run.name else run.resolve()
    return run.with_name(f"{run.name}.export.json")


def handed_over(run: Path, labs: Mapping[str, VerifyingKey]) -> Export | None:
    """What a lab signed that it handed over as this copy: with the manifest that lies here, or none where none does."""
    try:
        with foreign(export_path(run)):
            found = Export.open(limits.read_file(export_path(run), limits.EXPORT_BYTES), labs)
        return found if found.files.get(MANIFEST) == entry_of(run, MANIFEST) else None
    except (EvidenceError, Unreadable):
        return None


def export_run(run: RunFolder, key: SigningKey, out: Path) -> str:
    """Write a run as an archive, as its files are found to be signed; returns the archive's SHA-256 in hex.

    Raises:
        CallerError: the archive's name is taken.
        Damaged: a file is not what was signed.
        OSError: it cannot be written.
    """
    run.check_listing()
    files = {path: run.files[path] for path in run.files if run.files[path].length}
    files |= {path: found for path in (MANIFEST, JOURNAL) if (found := entry_of(run.folder, path)) is not None}
    listed, draft = signed_list(run.manifest.run, files, key), out.with_name(f"{out.name}.{os.getpid()}.new")
    if out.exists():
        raise CallerError(f"{out}: exists already")
    try:
        with draft.open("xb") as archive:
            archive.write(_header(_LIST, len(listed)) + listed + _padding(len(listed)))
            for path, entry in sorted(files.items()):
                archive.write(_header(path, entry.length))
                with foreign(f"{run.folder.name}/{path}", Damaged), (run.folder / path).open("rb") as file:
                    _copy(file, archive, path, entry)
                archive.write(_padding(entry.length))
            archive.write(2 * _NOTHING)
        with draft.open("rb") as archive:
            digest = hashlib.file_digest(archive, "sha256").hexdigest()
        os.replace(draft, out)
    finally:
        draft.unlink(missing_ok=True)
    return digest


def import_run(archive: Path, labs: Mapping[str, VerifyingKey], out: Path) -> Export:
    """Unpack an archive into a new folder, once every file has the digest that a lab signed for.

    Nothing but plain files is read, under names that a run's files have, each once, and none longer than listed.

    Raises:
        CallerError: the folder's name is taken.
        Damaged: the archive is not what was signed, or holds anything else.
        EvidenceError: no registered lab has signed it.
        OSError: it cannot be read or written.
    """
    if out.exists() or export_path(out).exists():
        raise CallerError(f"{out if out.exists() else export_path(out)}: exists already")
    draft = out.with_name(f"{out.name}.{os.getpid()}.new")
    try:
        with archive.open("rb") as file:
            name, length = _member(file) or ("", 0)
            if name != _LIST:
                raise Damaged(f"{archive.name} does not begin with {_LIST}")
            listed = file.read(limits.EXPORT_BYTES.check(length))
            file.read(len(_padding(length)))
            found = Export.open(listed, labs)
            left = dict(found.files)
            draft.mkdir()
            while (member := _member(file)) is not None:
                path, length = member
                if path not in left or left[path].length != length:
                    raise Damaged(f"{archive.name} holds {path!a:.200} twice, unlisted or not with its listed length")
                (draft / path).parent.mkdir(parents=True, exist_ok=True)
                with (draft / path).open("xb") as target:
                    _copy(file, target, path, left.pop(path))
                file.read(len(_padding(length)))
            if left or file.read(len(_NOTHING) + 1) != _NOTHING:
                raise Damaged(f"{archive.name} ends without {min(left)!a:.200}" if left else f"{archive.name} goes on")
        write_whole(export_path(out), listed, new=True)
        os.rename(draft, out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return found


def _copy(source: IO[bytes], target: IO[bytes], path: str, entry: Entry) -> None:
    """Copy as many bytes as an entry says; Damaged unless they are those that it says."""
    hasher, left = hashlib.sha256(), entry.length
    while left and (piece := source.read(min(left, _PIECE))):
        hasher.update(piece)
        target.write(piece)
        left -= len(piece)
    if left or hasher.hexdigest() != entry.sha256:
        raise Damaged(f"{path} is not what was signed")


def _header(path: str, length: int) -> bytes:
    info = tarfile.TarInfo(path)
    info.size = length
    return info.tobuf(tarfile.GNU_FORMAT)


def _padding(length: int) -> bytes:
    return bytes(-length % tarfile.BLOCKSIZE)


def _member(archive: IO[bytes]) -> tuple[str, int] | None:
    """Name and length of the next file; None at the end; Damaged where anything else comes."""
    block = archive.read(tarfile.BLOCKSIZE)
    if block == _NOTHING:
        return None
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
    except (tarfile.HeaderError, ValueError):
        raise Damaged("the archive is cut short, or `chipwitness run export` did not write it") from None
    if info.type != tarfile.REGTYPE or not (is_allowed(info.name) or info.name in (_LIST, MANIFEST, JOURNAL)):
        raise Damaged(f"the archive holds {info.name!a:.200}, which is not a file of a run")
    return info.name, info.size
