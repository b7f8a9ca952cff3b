"""Handlers of ``chipwitness registry`` that serve inspectors: reference values, revocations, views and trust files."""

from __future__ import annotations

import argparse
import json
import secrets
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from analysis.commands._common import finish, write_new
from analysis.commands._registry_actions import chosen_chips, finish_receipt, given_evidence, open_to_write, read_bytes
from firmware_sim import DEFAULT_ALGORITHM
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import Digest
from inspector import registry as reg
from inspector.inspection.ownership import Span, past_spans, spans_of
from inspector.inspection.registry_trust import trust_of
from inspector.inspection.trust import Trust

__all__ = ["publish", "reference_values", "revoke", "trust"]


def reference_values(arguments: argparse.Namespace) -> int:
    key = reg.load_private(arguments.key)
    try:
        rate = Fraction(arguments.snapshot_rate)
    except (ValueError, ZeroDivisionError):
        raise CallerError(f"{arguments.snapshot_rate!r} is not a rate such as 1/4") from None
    with open_to_write(arguments) as registry:
        statement = reg.ReferenceValues(
            registry=registry.origin,
            maker=arguments.maker,
            ca_digests=_digests(arguments.ca),
            measurements=_digests(arguments.measurement),
            minimum_security_version=arguments.minimum_security_version,
            snapshot_rate=rate,
            snapshot_algorithm=arguments.snapshot_algorithm or DEFAULT_ALGORITHM,
            time=registry.clock(),
        )
        receipt = registry.submit(reg.sign(statement, key))
    return finish_receipt(arguments, receipt, "concerned: a maker's reference values")


def revoke(arguments: argparse.Namespace) -> int:
    chips = chosen_chips(arguments)
    evidence = given_evidence(arguments, chips)
    with open_to_write(arguments) as registry:
        receipt = reg.revoke(registry, chips, reason=arguments.reason, evidence=evidence)
    return finish_receipt(arguments, receipt, "revoked")


def publish(arguments: argparse.Namespace) -> int:
    with open_to_write(arguments) as registry:
        receipt, view = reg.publish(registry)
    data = {
        "event": receipt.event,
        "size": view.size,
        "root": view.root.hex(),
        "map_root": view.map_root.hex(),
        "entries": view.entries,
        "head_size": receipt.head.size,
        "head_root": receipt.head.root.hex(),
    }
    text = f"event {receipt.event}: view of {view.size} events published, {view.entries} entries, {view.map_root.hex()}"
    return finish(arguments, data, [text])


def trust(arguments: argparse.Namespace) -> int:
    key = reg.load_public(arguments.registrar)
    verifier, nonce, earlier = _challenge(arguments)
    known = None if arguments.head is None else read_bytes(arguments.head)
    with reg.Registry.open(arguments.database) as registry:
        view = reg.read_view(registry, registrar=key, known_head=known)
    made = trust_of(view, registrar=key, labs=arguments.lab, verifier=verifier, nonce=nonce)
    keys = frozenset(reg.load_public(path) for path in arguments.inspectorate)
    made = replace(made, inspectorates=keys, maximum_flop=arguments.maximum_flop)
    if earlier is not None:
        keys, signed = keys or earlier.inspectorates, earlier.countersigned
        made = replace(made, inspectorates=keys, countersigned=signed, challenges=earlier.challenges)
    past = past_spans(made.labs, made)
    deposits = 0 if arguments.deposits is None else _write_deposits(arguments, past)
    write_new(arguments.out, (json.dumps(made.to_json(), indent=2) + "\n").encode())
    listed = made.registry.chips if made.registry is not None else {}
    withdrawn = sorted(set(listed) - set(made.chips))
    data = {
        "out": str(arguments.out),
        "size": view.publication.size,
        "root": view.publication.root.hex(),
        "map_root": view.publication.map_root.hex(),
        "labs": sorted(made.labs),
        "chips": len(made.chips),
        "withdrawn": withdrawn,
        "verifier": made.verifier,
        "nonce": made.nonce.hex(),
        "inspectorates": len(made.inspectorates),
        "countersigned": len(made.countersigned),
        "later_events": view.later,
        "spans": {span.chip: [each.to_json() for each in spans_of(span.chip, made)] for span in past},
        "deposits": deposits,
    }
    lines = [
        f"{arguments.out}: {len(made.chips)} chips of {', '.join(sorted(made.labs))}, "
        f"as the registry's signed view of size {view.publication.size} lists them"
    ]
    if withdrawn:
        lines.append(f"revoked, lost or destroyed: {', '.join(withdrawn)}")
    lines += [
        f"chip {span.chip}: records {span.to_json()['from']} to {span.to_json()['until']} are "
        f"{span.to_json()['owner'] or 'no one'}'s ({span.why})"
        for span in past
    ]
    if view.later:
        lines.append(f"{view.later} later events are not in that view")
    return finish(arguments, data, lines)


def _write_deposits(arguments: argparse.Namespace, past: Sequence[Span]) -> int:
    """Write what chips answered when they changed hands; how often they did."""
    with reg.Registry.open(arguments.database) as registry:
        deposits = registry.deposits([str(span.end.deposit) for span in past if span.end is not None])
    for deposit, files in deposits.items():
        folder = arguments.deposits / deposit.replace(":", "-")
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
    return len(deposits)


def _challenge(arguments: argparse.Namespace) -> tuple[str, bytes, Trust | None]:
    """Verifier and nonce, as given or as in another trust file, which is returned; a fresh nonce if none is given."""
    if arguments.challenge is not None:
        if arguments.verifier is not None or arguments.nonce is not None:
            raise CallerError("--challenge already gives verifier and nonce: leave out --verifier and --nonce")
        earlier = Trust.load([arguments.challenge])
        return earlier.verifier, earlier.nonce, earlier
    if arguments.verifier is None:
        raise CallerError("--verifier NAME is needed, or --challenge TRUST")
    if arguments.nonce is None:
        return arguments.verifier, secrets.token_bytes(32), None
    try:
        nonce = bytes.fromhex(arguments.nonce)
    except ValueError:
        nonce = b""
    if len(nonce) != 32:
        raise CallerError("--nonce takes 64 hex digits")
    return arguments.verifier, nonce, None


def _digests(texts: list[str]) -> tuple[Digest, ...]:
    try:
        return tuple(sorted({Digest.parse(text) for text in texts}, key=str))
    except EvidenceError as error:
        raise CallerError(str(error)) from None
