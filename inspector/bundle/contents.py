"""The form of a bundle: a signed verdict, and every piece of evidence that it names by path and digest.

    {"format": "chipwitness/bundle/2", "verdict": DSSE envelope, "items": {path: base64}}

Paths, with the run's id and the chip's in them:

    runs/<id>/head.json          what the lab signed: the run's manifest, a DSSE envelope
    runs/<id>/metadata.json      the declaration, whose digest is the run's id
    runs/<id>/steps.json         opened leaves of the run's log, with proofs against the head
    heads/<n>.json               other heads of one of these runs, which the lab signed at another time
    declarations/<n>.json        what inspectorates countersigned, DSSE envelopes
    chips/<id>/chain.pem …       certificate chain, quote, log and epoch keys of a drawn chip, and the checkpoint behind
                                 which its log begins, if it does
    replays/<n>.json             what the replay cluster signed, a DSSE envelope
    checks/<n>.json              what it signed of the files that the inspectorate is not shown, a DSSE envelope
    examinations/<n>.json        what it signed of samples and weights for the sake of rules, a DSSE envelope
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firmware_sim import limits
from firmware_sim.errors import EvidenceError, file_error
from firmware_sim.evidence import (
    SHA256,
    Digest,
    SignatureError,
    SigningKey,
    VerifyingKey,
    canonical,
    decode_base64,
    open_sealed,
    open_statement,
    seal,
    statement,
)
from monitor.transcript.layout import CHIP_CHECKPOINT, CHIP_FILES

__all__ = ["FORMAT", "VERDICT", "VERDICT_PREDICATE", "Bundle", "accepted_in", "heads_in", "read_bundle"]

FORMAT = "chipwitness/bundle/2"
VERDICT = "application/vnd.chipwitness.verdict.v2+json"
"""DSSE payload type of what an inspectorate signs."""
VERDICT_PREDICATE = "https://chipwitness.org/verdict/v2"
_KEYS = {"outcome", "reasons", "evidence", "settings", "challenge", "items"}
_PATH = re.compile(
    r"runs/[0-9a-f]{64}/(head|metadata|steps)\.json|(heads|declarations|replays|examinations|checks)/\d{1,6}\.json"
    rf"|chips/[a-z0-9][a-z0-9-]{{0,63}}/({'|'.join(map(re.escape, (*CHIP_FILES, CHIP_CHECKPOINT)))})",
    re.ASCII,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A verdict with its evidence; nothing in it is verified but that each item is the one that the verdict names.

    Attributes:
        envelope: the verdict's DSSE envelope, canonical.
        predicate: what it says.
        items: content by path.
    """

    envelope: bytes
    predicate: Mapping[str, Any]
    items: Mapping[str, bytes]

    @classmethod
    def sign(cls, predicate: Mapping[str, Any], items: Mapping[str, bytes], key: SigningKey) -> bytes:
        """The bundle as a file: the predicate, with the items' digests, under the inspectorate's key."""
        digests = {path: hashlib.sha256(content).hexdigest() for path, content in sorted(items.items())}
        whole = {**predicate, "items": digests}
        payload = statement(VERDICT_PREDICATE, _subjects(whole, digests), whole)
        data = {
            "format": FORMAT,
            "verdict": canonical.decode(seal(VERDICT, payload, key)),
            "items": {path: base64.b64encode(content).decode() for path, content in sorted(items.items())},
        }
        return canonical.encode(data)

    @classmethod
    def open(cls, data: bytes, key: VerifyingKey) -> Bundle:
        """Verify the verdict's signature and that the items are those that it names; EvidenceError if not."""
        envelope, items = _parse(data)
        subjects, predicate = open_statement(open_sealed(envelope, VERDICT, key), VERDICT_PREDICATE)
        if set(predicate) != _KEYS:
            raise EvidenceError("a verdict has missing or extra keys")
        digests = {path: hashlib.sha256(content).hexdigest() for path, content in items.items()}
        if predicate["items"] != digests:
            raise EvidenceError("the items in the bundle are not those that its verdict names")
        if subjects != _subjects(predicate, digests):
            raise EvidenceError("the heads that the verdict is about are not those in the bundle")
        return cls(envelope=envelope, predicate=predicate, items=items)


def read_bundle(path: Path) -> bytes:
    """A bundle's bytes; CallerError if the file cannot be read, EvidenceError if it is too long."""
    try:
        return limits.read_file(path, limits.BUNDLE_BYTES)
    except OSError as error:
        raise file_error(f"cannot read the bundle {path}", error) from None


def heads_in(data: bytes) -> list[bytes]:
    """The heads in a bundle, which labs signed themselves; EvidenceError if it is no bundle."""
    return [content for path, content in _parse(data)[1].items() if _is_head(path)]


def accepted_in(bundles: Iterable[bytes], keys: Collection[VerifyingKey], wanted: Mapping[str, Any]) -> dict[str, int]:
    """By id, the last step up to which any of these bundles accepts a run, where one of these keys signed it.

    Args:
        wanted: the settings of an inspection that is to go on from there; others than with these count for nothing.

    Raises:
        EvidenceError: one is no bundle.
    """
    found: dict[str, int] = {}
    for data in bundles:
        for run, step in _accepted(data, keys, wanted).items():
            found[run] = max(step, found.get(run, 0))
    return found


def _accepted(data: bytes, keys: Iterable[VerifyingKey], wanted: Mapping[str, Any]) -> dict[str, int]:
    for key in keys:
        try:
            said = Bundle.open(data, key).predicate
        except SignatureError:
            continue
        settings, alike = said["settings"], ("confidence", "against", "devices", "shared")
        same = set(settings) == set(wanted) and all(settings[name] == wanted[name] for name in alike)
        evidence = said["evidence"]
        if said["outcome"] != "ACCEPT" or not same or not all(each["affordable"] for each in evidence.get("odds", [])):
            return {}
        return {str(run["run_id"]): int(run["steps"]) for run in evidence["runs"]}
    return {}


def _parse(data: bytes) -> tuple[bytes, dict[str, bytes]]:
    parsed = canonical.decode(data, most=limits.BUNDLE_BYTES)
    if not isinstance(parsed, dict) or set(parsed) != {"format", "verdict", "items"} or parsed["format"] != FORMAT:
        raise EvidenceError(f"not a bundle of the form {FORMAT}")
    if not isinstance(parsed["items"], dict) or not all(map(_PATH.fullmatch, parsed["items"])):
        raise EvidenceError("the bundle's items are malformed")
    return canonical.encode(parsed["verdict"]), {path: decode_base64(text) for path, text in parsed["items"].items()}


def _subjects(predicate: Mapping[str, Any], digests: Mapping[str, str]) -> list[tuple[str, Digest]]:
    """The challenge that was put, each head that was judged, and the model whose weights a run ended with, if named."""
    asked = Digest(SHA256, hashlib.sha256(canonical.encode(predicate["challenge"])).digest())
    named = [(path, value) for path, value in sorted(digests.items()) if _is_head(path)]
    if "model" in predicate["evidence"]:
        model = predicate["evidence"]["model"]
        named.append((f"model/{model['name']}", model["sha256"]))
    return [("challenge", asked), *((path, Digest(SHA256, bytes.fromhex(value))) for path, value in named)]


def _is_head(path: str) -> bool:
    return path.startswith("heads/") or path.endswith("/head.json")
