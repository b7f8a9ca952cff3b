"""Handlers of ``chipwitness registry``."""

from __future__ import annotations

import argparse
import csv
import io
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from analysis.commands._common import finish, parse_now, write_new
from firmware_sim import limits
from firmware_sim.errors import CallerError, file_error
from firmware_sim.evidence import SignedHead, SigningKey
from inspector import registry as reg
from inspector.inspection.answers import Answers
from inspector.registry.census import answers_from_rows
from inspector.registry.genesis_csv import read_rows
from monitor.transcript.layout import CHIP_CHECKPOINT, CHIP_FILES

__all__ = [
    "accept",
    "audit",
    "census_draw",
    "census_record",
    "challenge",
    "check_proof",
    "chosen_chips",
    "enrol",
    "finish_receipt",
    "found",
    "given_evidence",
    "head",
    "import_chips",
    "init",
    "keygen",
    "lost",
    "open_to_write",
    "prove",
    "read_bytes",
    "retire",
    "show",
    "submit",
    "transfer",
]


Evidence = Mapping[str, Mapping[str, bytes]]
"""By chip the files of its answer, by name."""


def keygen(arguments: argparse.Namespace) -> int:
    key = SigningKey.generate()
    public = reg.write_keys(arguments.file, key)
    data = {"private": str(arguments.file), "public": str(public), "key_id": key.verifying.key_id}
    return finish(arguments, data, [f"{arguments.file} (private), {public}", key.verifying.key_id])


def init(arguments: argparse.Namespace) -> int:
    key = reg.load_private(arguments.registrar_key)
    with reg.Registry.create(
        arguments.database, name=arguments.name, registrar=key, clock=clock(arguments)
    ) as registry:
        newest, _ = registry.head()
    data = {"database": arguments.database, "origin": registry.origin, "registrar": key.verifying.key_id}
    return finish(arguments, data | _head(newest), [f"{registry.origin}, registrar {key.verifying.key_id}"])


def enrol(arguments: argparse.Namespace) -> int:
    key = reg.load_public(arguments.public)
    with open_to_write(arguments) as registry:
        receipt = registry.enrol(arguments.party, reg.Role(arguments.role), key)
    data = {"event": receipt.event, **_head(receipt.head)}
    return finish(arguments, data, [f"event {receipt.event}: {arguments.party} enrolled as {arguments.role}"])


def import_chips(arguments: argparse.Namespace) -> int:
    key = reg.load_private(arguments.key)
    made = None if arguments.made is None else int(parse_now(arguments.made).timestamp())
    with open_to_write(arguments) as registry:
        chips = reg.read_chips(arguments.csv)
        receipt = registry.import_chips(
            chips, maker=arguments.maker, label=arguments.label or arguments.csv.stem, key=key, time=made
        )
    return finish_receipt(arguments, receipt, "imported")


def transfer(arguments: argparse.Namespace) -> int:
    def make(registry: reg.Registry, chips: tuple[reg.ChipRef, ...], time: int, evidence: Evidence) -> reg.Transfer:
        return reg.Transfer(
            registry=registry.origin,
            chips=chips,
            sender=arguments.sender,
            receiver=arguments.receiver,
            time=time,
            positions=reg.positions_in([ref.chip for ref in chips], evidence),
        )

    return _sign_and_submit(arguments, make, "transferred")


def lost(arguments: argparse.Namespace) -> int:
    return _claim(arguments, reg.ClaimKind.LOST, "lost")


def found(arguments: argparse.Namespace) -> int:
    return _claim(arguments, reg.ClaimKind.FOUND, "found")


def retire(arguments: argparse.Namespace) -> int:
    return _claim(arguments, reg.ClaimKind.DESTROYED, "destroyed")


def accept(arguments: argparse.Namespace) -> int:
    given = _read_statement(arguments.statement)
    statement = reg.decode_payload(given)
    if isinstance(statement, reg.Transfer) and statement.positions:
        evidence = given_evidence(arguments, [ref.chip for ref in statement.chips])
        if not evidence:
            raise CallerError("ask the chips once you hold them, and give their answers with --evidence DIR")
        for ref, position in zip(statement.chips, statement.positions, strict=True):
            reg.check_in_hand(ref.chip, position, evidence[ref.chip])
    signed = reg.countersign(given, reg.load_private(arguments.key))
    write_new(arguments.out, signed.to_bytes())
    names = [name for name, _ in reg.decode_payload(signed).subjects()]
    data = {"out": str(arguments.out), "kind": signed.kind, "chips": names, "signatures": len(signed.envelopes)}
    return finish(arguments, data, [f"{arguments.out}: {signed.kind} of {len(names)} chips accepted"])


def submit(arguments: argparse.Namespace) -> int:
    signed = _read_statement(arguments.statement)
    evidence = given_evidence(arguments, [name for name, _ in reg.decode_payload(signed).subjects()])
    with open_to_write(arguments) as registry:
        receipt = registry.submit(signed, evidence)
    return finish_receipt(arguments, receipt, "applied")


def challenge(arguments: argparse.Namespace) -> int:
    with reg.Registry.open(arguments.database) as registry:
        nonces = {chip: nonce.hex() for chip, nonce in registry.challenges(chosen_chips(arguments)).items()}
    data = {"verifier": registry.origin, "nonces": nonces}
    return finish(
        arguments, data, [f"{chip} --verifier {registry.origin} --nonce {each}" for chip, each in nonces.items()]
    )


def census_draw(arguments: argparse.Namespace) -> int:
    key = reg.load_private(arguments.key)
    if arguments.out is not None and arguments.out.exists():
        raise CallerError(f"{arguments.out}: exists already")
    seed = secrets.token_bytes(32) if arguments.seed is None else _seed(arguments.seed)
    with open_to_write(arguments) as registry:
        census = reg.draw_census(
            registry,
            count=arguments.sample,
            seed=seed,
            inspector=arguments.inspector,
            key=key,
            owner=arguments.owner,
        )
    pairs = list(zip(census.chips, census.holders, strict=True))
    if arguments.out is not None:
        text = io.StringIO(newline="")
        csv.writer(text).writerows([("chip", "holder"), *pairs])
        write_new(arguments.out, text.getvalue().encode())
    data = {
        "census": census.number,
        "event": census.event,
        "population": census.population,
        "chips": [{"chip": chip, "holder": holder} for chip, holder in pairs],
    }
    lines = [f"census {census.number}: {len(pairs)} of {census.population} chips", *(f"{c}  {h}" for c, h in pairs)]
    return finish(arguments, data, lines)


def census_record(arguments: argparse.Namespace) -> int:
    key = reg.load_private(arguments.key)
    with open_to_write(arguments) as registry:
        path = arguments.answers
        rows = list(read_rows(path, required=("chip", "observed"), optional=("identity",)))
        outcome = reg.record_census(
            registry,
            arguments.census,
            answers_from_rows(path, ((line, row[:2]) for line, row in rows)),
            inspector=arguments.inspector,
            key=key,
            identities={row[0]: row[2] for _, row in rows if row[2]},
        )
    data = {
        "census": outcome.number,
        "event": outcome.event,
        "present": outcome.present,
        "retired": list(outcome.retired),
        "resurfaced": list(outcome.resurfaced),
        "missing": [{"chip": chip.chip, "holder": chip.holder, "observed": chip.observed} for chip in outcome.missing],
    }
    lines = [
        f"census {outcome.number}: {outcome.present} present, {len(outcome.missing)} missing, "
        f"{len(outcome.retired)} destroyed since the draw",
        *(
            f"missing {gone.chip}: {gone.holder} answers for it, {gone.observed or 'nothing'} was shown"
            for gone in outcome.missing
        ),
        *(f"resurfaced {chip}" for chip in outcome.resurfaced),
    ]
    finish(arguments, data, lines)
    return 1 if outcome.missing else 0


def show(arguments: argparse.Namespace) -> int:
    with reg.Registry.open(arguments.database) as registry:
        if arguments.chip is not None:
            return _show_chip(arguments, reg.show_chip(registry, arguments.chip))
        summary = reg.summarise(registry)
    rows = [
        {"holder": holder, "state": state.name.lower(), "chips": count} for holder, state, count in summary.holdings
    ]
    data = {"events": summary.events, "chips": summary.chips, "holdings": rows}
    lines = [f"{summary.chips} chips, {summary.events} events"]
    lines += [f"{row['holder']:<24} {row['state']:<11} {row['chips']:>10}" for row in rows]
    return finish(arguments, data, lines)


def head(arguments: argparse.Namespace) -> int:
    with reg.Registry.open(arguments.database) as registry:
        newest, signed = registry.head()
    if arguments.out is not None:
        write_new(arguments.out, signed)
    data = {"size": newest.size, "root": newest.root.hex(), "signed": signed.decode()}
    return finish(arguments, data, signed.decode().rstrip("\n").split("\n"))


def audit(arguments: argparse.Namespace) -> int:
    key = reg.load_public(arguments.registrar)
    known = None if arguments.head is None else read_bytes(arguments.head)
    with reg.Registry.open(arguments.database) as registry:
        report = reg.audit(registry, registrar=key, known_head=known)
    data = {
        "ok": report.ok,
        "events": report.events,
        "chips": report.chips,
        "root": report.root.hex(),
        "findings": list(report.findings),
    }
    outcome = "consistent" if report.ok else f"{len(report.findings)} findings"
    finish(
        arguments,
        data,
        [f"{report.events} events, {report.chips} chips, root {report.root.hex()}: {outcome}", *report.findings],
    )
    return 0 if report.ok else 1


def prove(arguments: argparse.Namespace) -> int:
    with reg.Registry.open(arguments.database) as registry:
        proof = reg.prove_chip(registry, arguments.chip)
    write_new(arguments.out, proof.to_bytes())
    data = {"out": str(arguments.out), "chip": proof.record.chip, "records": len(proof.entries)}
    return finish(arguments, data, [f"{arguments.out}: {len(proof.entries)} records of chip {proof.record.chip}"])


def check_proof(arguments: argparse.Namespace) -> int:
    key = reg.load_public(arguments.registrar)
    proof = reg.ChipProof.from_bytes(read_bytes(arguments.proof))
    origin = f"chipwitness-registry/{arguments.name}"
    statements = reg.verify_chip(proof, origin=origin, registrar=key)
    newest = SignedHead.open(proof.head, key, origin)
    data = {
        "chip": proof.record.chip,
        "model": proof.record.model,
        "records": [statement.kind for statement in statements],
        **_head(newest),
    }
    lines = [f"chip {proof.record.chip}: {', '.join(s.kind for s in statements)} in the log of {newest.size} events"]
    return finish(arguments, data, lines)


def _claim(arguments: argparse.Namespace, claim: reg.ClaimKind, done: str) -> int:
    def make(registry: reg.Registry, chips: tuple[reg.ChipRef, ...], time: int, evidence: Evidence) -> reg.Claim:
        return reg.Claim(
            registry=registry.origin,
            chips=chips,
            claim=claim,
            holder=arguments.holder,
            witness=getattr(arguments, "witness", ""),
            reason=arguments.reason,
            time=time,
            positions=reg.positions_in([ref.chip for ref in chips], evidence),
        )

    return _sign_and_submit(arguments, make, done)


def _sign_and_submit(
    arguments: argparse.Namespace,
    make: Callable[[reg.Registry, tuple[reg.ChipRef, ...], int, Evidence], reg.Transfer | reg.Claim],
    done: str,
) -> int:
    out: Path | None = getattr(arguments, "out", None)
    counter: Path | None = getattr(arguments, "counter_key", None)
    if out is not None and counter is not None:
        raise CallerError("--out leaves the second signature to the other party: give --out without --counter-key")
    if out is None and arguments.registrar_key is None:
        raise CallerError("--registrar-key is needed to write into the registry")
    key = reg.load_private(arguments.key)
    now = clock(arguments)
    registrar = None if out is not None else reg.load_private(arguments.registrar_key)
    with reg.Registry.open(arguments.database, registrar=registrar, clock=now) as registry:
        chips = chosen_chips(arguments)
        evidence = given_evidence(arguments, chips)
        statement = make(registry, registry.refs(chips), now(), evidence)
        if out is not None:
            signed = reg.sign(statement, key)
            write_new(out, signed.to_bytes())
            data = {"out": str(out), "signatures": len(signed.envelopes)}
            return finish(arguments, data, [f"{out}: to be accepted with 'registry accept', then 'registry submit'"])
        keys = (key,) if counter is None else (key, reg.load_private(counter))
        if len(keys) != len(statement.signatories()):
            raise CallerError(
                "this needs two signatures: give --counter-key, or --out FILE for a file that the other party can sign"
            )
        receipt = registry.submit(reg.sign(statement, *keys), evidence)
    return finish_receipt(arguments, receipt, done)


def _show_chip(arguments: argparse.Namespace, view: reg.ChipView) -> int:
    history = [
        {
            "sequence": line.sequence,
            "event": line.event,
            "kind": line.kind,
            "time": _time(line.time),
            "holder": line.holder,
            "state": line.state.name.lower(),
        }
        for line in view.history
    ]
    data = {
        "chip": view.chip,
        "model": view.model,
        "identity": view.identity,
        "holder": view.holder,
        "state": view.state.name.lower(),
        "sequence": view.sequence,
        "digest": view.digest,
        "revoked": view.revoked,
        "history": history,
        "spans": list(view.spans),
    }
    lines = [f"{view.chip} {view.model}: {view.state.name.lower()}, {view.holder} answers for it"]
    lines += ["its certificate is revoked"] if view.revoked else []
    lines += [
        f"{line['sequence']:>4} {line['time']} {line['kind']:<13} {line['state']:<10} {line['holder']}"
        for line in history
    ]
    start = "0"
    for span in view.spans:
        end = "an unknown place" if span["size"] is None else str(span["size"])
        lines.append(f"records {start} to {end} are {span['holder'] or 'no one'}'s ({span['why']})")
        start = end
    return finish(arguments, data, lines)


def finish_receipt(arguments: argparse.Namespace, receipt: reg.Receipt, done: str) -> int:
    data = {"event": receipt.event, "chips": receipt.chips, **_head(receipt.head)}
    return finish(arguments, data, [f"event {receipt.event}: {receipt.chips} chips {done}"])


def _head(newest: SignedHead) -> dict[str, object]:
    return {"head_size": newest.size, "head_root": newest.root.hex()}


def open_to_write(arguments: argparse.Namespace) -> reg.Registry:
    key = reg.load_private(arguments.registrar_key)
    return reg.Registry.open(arguments.database, registrar=key, clock=clock(arguments))


def clock(arguments: argparse.Namespace) -> Callable[[], int]:
    if arguments.at is None:
        return reg.system_clock
    fixed = int(parse_now(arguments.at).timestamp())
    return lambda: fixed


def chosen_chips(arguments: argparse.Namespace) -> Sequence[str]:
    if arguments.chip is not None:
        chips: list[str] = arguments.chip
        return chips
    rows = [row[0] for _, row in read_rows(arguments.chips, required=("chip",), optional=("model", "identity"))]
    if not rows:
        raise CallerError(f"{arguments.chips}: no chips after the header")
    return rows


def given_evidence(arguments: argparse.Namespace, chips: Sequence[str]) -> Evidence:
    """What chips answered, from the folder that --evidence names; nothing where it names none."""
    if getattr(arguments, "evidence", None) is None:
        return {}
    answers = Answers([arguments.evidence])
    found: dict[str, dict[str, bytes]] = {}
    for chip in chips:
        found[chip] = {name: answers.read(chip, name) for name in CHIP_FILES}
        if (arguments.evidence / chip / CHIP_CHECKPOINT).exists():
            found[chip][CHIP_CHECKPOINT] = answers.read(chip, CHIP_CHECKPOINT)
    return found


def _seed(text: str) -> bytes:
    try:
        seed = bytes.fromhex(text)
    except ValueError:
        seed = b""
    if len(seed) != 32:
        raise CallerError("--seed takes 64 hex digits")
    return seed


def read_bytes(path: Path) -> bytes:
    try:
        return limits.read_file(path, limits.STATEMENT_BYTES)
    except OSError as error:
        raise file_error(str(path), error) from None


def _read_statement(path: Path) -> reg.SignedStatement:
    return reg.SignedStatement.from_bytes(read_bytes(path))


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
