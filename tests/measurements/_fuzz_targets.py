"""The parsers that foreign bytes reach, each with seeds from a tiny run, for ``fuzz``.

A target takes bytes and returns, or raises an error of the product's own. Where a signature stands before the parser
the bytes are the payload, and the target signs them first: a lab can do the same.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from analysis.registration import registered_trust
from firmware_sim import limits
from firmware_sim.audit import audit_schedule, check_epoch_keys
from firmware_sim.checks import check_life, check_registers
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import (
    Digest,
    SignedHead,
    SigningKey,
    canonical,
    check_chain,
    open_quote,
    open_sealed,
    pae,
    parse_log,
)
from firmware_sim.evidence.acceptance import LOG_STANDING_TYPE, Heard, Standing, open_acceptance, seal_acceptance
from firmware_sim.evidence.pruning import (
    BIRTH,
    LOG_CHECKPOINT_TYPE,
    LogCheckpoint,
    open_log_checkpoint,
    seal_log_checkpoint,
)
from firmware_sim.evidence.quote import QUOTE_PAYLOAD_TYPE, Quote
from firmware_sim.identity import read_chain
from firmware_sim.schedule import EpochKey, decode_epoch_keys
from inspector.bundle.checks import CHECK, SignedCheck
from inspector.bundle.examinations import EXAMINATION, SignedExamination
from inspector.campaign import load_regimes
from inspector.inspection.disclosure import Checked
from inspector.inspection.memory import load_memory
from inspector.inspection.replays import Job, judge
from inspector.inspection.transcripts import Transcript, read_transcript
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Findings
from inspector.registry import ChipRef, Publication, ReferenceValues, Revocation, Role
from inspector.registry.genesis_csv import read_chips
from inspector.registry.proof import ChipProof
from inspector.registry.signing import SignedStatement, decode_payload, sign
from inspector.registry.statements import Enrolment
from inspector.replay.segment import replay_segment, segments
from inspector.rules.observations import Counted, Examined
from inspector.rules.rule_files import read_rules
from monitor import Recorder
from monitor.declaration.countersignature import COUNTERSIGNED, Countersigned
from monitor.declaration.statement import Declaration
from monitor.lab.simulated_lab import LabConfig, SimulatedLab, lab_path
from monitor.numerics.rounding import codec
from monitor.numerics.rounding.bounds import Formats, bound_named
from monitor.presets.task import Task
from monitor.programs.program import Program
from monitor.programs.trace import Node
from monitor.recording.recipes import train
from monitor.transcript import Leaf, Manifest, Metadata, RunFolder
from monitor.transcript.data import decode_arrays
from monitor.transcript.layout import CHIP_FILES, METADATA, ORDER, SAMPLES, chip_path, log_path
from monitor.transcript.manifest import PAYLOAD_TYPE, decode_line
from monitor.transcript.state import decode_state, encode_state
from tests.measurements._fuzz_parties import READERS, PartyReader, prepare_parties
from tests.measurements._fuzz_protocol import (
    BundleReader,
    ContestReader,
    RoundReader,
    prepare_bundle,
    prepare_contest,
    prepare_round,
)

__all__ = ["Target", "World", "accepts", "prepare", "record_loop", "targets"]

_STARTED = datetime(2026, 1, 1, tzinfo=UTC)
_KEY = SigningKey.from_private_bytes(bytes(range(32)))
_SHARDS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A parser: what it reads, bytes that it accepts, and whether they are JSON."""

    read: Callable[[bytes], object]
    seeds: Callable[[], list[bytes]]
    is_json: bool = True


def accepts(target: Target, data: bytes) -> bool:
    """Whether the parser accepts the bytes; any exception but the product's own two comes through."""
    try:
        target.read(data)
    except (EvidenceError, CallerError):
        return False
    return True


def record_loop(out: Path, lab: str, **options: Any) -> None:
    """Record a loop of two steps."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    recorder = Recorder(
        model, optimizer, out=out, started=_STARTED, hours=1.0, seed=5, chips=_SHARDS, lab=lab, **options
    )
    for batch in torch.randn(2, 3, 4):
        with recorder.step(batch):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    recorder.finish()


def prepare(folder: Path) -> None:
    """Record the two runs that seeds are taken from, and what an honest replay device says of the first."""
    config = LabConfig(
        lab="lab", seed=5, chips=_SHARDS, snapshot_rate=Fraction(1), started=_STARTED, duration=timedelta(hours=1)
    )
    task = Task.for_preset("digits-cnn", seed=5, steps=2, batch_size=2, checkpoint_every=1, shards=_SHARDS)
    train(task, folder / "run", config, device="native")
    trust = Trust.load([folder / "run.trust.json"])
    (folder / "run.trust.json").write_bytes(canonical.encode(trust.to_json()))
    registered = registered_trust(folder / "registry", config, trust)
    (folder / "registered.trust.json").write_bytes(canonical.encode(registered.to_json()))
    record_loop(folder / "loop", "lab")
    record_loop(folder / "liar", "liar", lie="wrong-operator", lie_step=2)
    now = _STARTED + timedelta(minutes=30)
    prepare_bundle(folder / "run", trust, _KEY, folder / "bundle.json", now)
    prepare_round(folder / "world", folder / "run", trust, now)
    world = World(folder)
    prepare_contest(world.loop, world.trust("loop"), _KEY, folder / "contested.json", now)
    prepare_parties(folder, folder / "loop", folder / "liar")
    run = World(folder).preset
    answer = {"replays": [replay_segment(run, 0).to_json()]}
    document = {"device": "native", "fingerprint": "f", "seconds": 0.5, **answer}
    (folder / "answer.json").write_text(json.dumps(document), encoding="utf-8")


class World:
    """What ``prepare`` recorded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._parties: dict[str, PartyReader] = {}

    def trust(self, name: str) -> Trust:
        """What the inspector knows of a run."""
        return Trust.load([self.folder / f"{name}.trust.json"])

    @cached_property
    def preset(self) -> RunFolder:
        """A preset's run of two steps."""
        return RunFolder(self.folder / "run", self.trust("run").labs["lab"])

    @cached_property
    def loop(self) -> RunFolder:
        """A run without a preset, of two steps."""
        return RunFolder(self.folder / "loop", self.trust("loop").labs["lab"])

    @cached_property
    def transcript(self) -> Transcript:
        """The preset's run, verified."""
        findings = Findings()
        found = read_transcript(self.preset, self.trust("run"), findings, now=_STARTED)
        assert found is not None
        return found

    def files(self, *paths: str) -> list[bytes]:
        """Files of both runs."""
        return [run.read(path) for run in (self.preset, self.loop) for path in paths if path in run.files]

    def chip_files(self, name: str) -> list[bytes]:
        """Evidence of a chip in both runs."""
        return self.files(chip_path("lab-chip-0000", name))

    def programs(self) -> list[bytes]:
        """Programs of that run."""
        return [self.loop.read(path) for path in self.loop.programs().values()]

    @cached_property
    def bundle(self) -> BundleReader:
        """Reads bundles of that run."""
        return BundleReader(self.folder / "bundle.json", self.trust("run"), _KEY)

    @cached_property
    def contest(self) -> ContestReader:
        """Reads what a cluster answers about the loop's first step."""
        return ContestReader(self.folder / "contested.json", self.loop, self.trust("loop"), _KEY)

    @cached_property
    def round(self) -> RoundReader:
        """Reads what that run's lab says in a round, on a copy of the world for each process."""
        folder = self.folder / f"world-{os.getpid()}"
        shutil.copytree(self.folder / "world", folder)
        config = SimulatedLab.read_config(lab_path(self.folder / "run"))
        return RoundReader(folder, "lab", SimulatedLab.lab_key(config), _STARTED + timedelta(minutes=30))

    def party(self, name: str) -> PartyReader:
        """A party that reads what others send it, made once."""
        if name not in self._parties:
            self._parties[name] = READERS[name](self.folder)
        return self._parties[name]

    @cached_property
    def asked(self) -> tuple[tuple[EpochKey, ...], Quote]:
        """Epoch keys and quote of a chip."""
        chain, epochs, _, quote = (self.preset.read(chip_path("lab-chip-0000", name)) for name in CHIP_FILES)
        return decode_epoch_keys(epochs), open_quote(quote, read_chain(chain).alias_key)

    def check_log(self, data: bytes) -> None:
        """Every check of a log, as the guards make them, whatever those before have found."""
        keys, opened = self.asked
        records = parse_log(data, chip="c")
        checks: list[Callable[[], object]] = [
            lambda: check_chain(records, bytes(32), chip="c"),
            lambda: check_registers(records, opened),
            lambda: check_life(records, chip="c", roofline=opened.roofline),
            lambda: check_epoch_keys(records, keys, chip="c", roofline=opened.roofline),
            lambda: audit_schedule(
                records, keys, rate=Fraction(1), roofline=opened.roofline, chip="c", max_ticks=1 << 12
            ),
        ]
        for check in checks:
            with contextlib.suppress(EvidenceError):
                check()

    def judge_answer(self, data: bytes) -> None:
        """Compare a replay device's answer with the run."""
        answer = canonical.parse(data, most=limits.WORKER_BYTES)
        if isinstance(answer, dict):
            findings = Findings()
            judge(Job(device="native", transcript=self.transcript, chosen=segments(self.preset)[:1]), answer, findings)

    def as_file(self, read: Callable[[Path], object]) -> Callable[[bytes], object]:
        """A parser of files as one of bytes; each process has a file of its own."""

        def call(data: bytes) -> object:
            path = self.folder / f"input-{os.getpid()}"
            path.write_bytes(data)
            return read(path)

        return call


def _payload(envelope: bytes) -> bytes:
    return base64.b64decode(canonical.decode(envelope)["payload"])


def _sealed(payload_type: str, body: bytes) -> bytes:
    """An envelope over any bytes."""
    signature = base64.b64encode(_KEY.sign(pae(payload_type, body))).decode()
    return canonical.encode(
        {
            "payload": base64.b64encode(body).decode(),
            "payloadType": payload_type,
            "signatures": [{"keyid": _KEY.verifying.key_id, "sig": signature}],
        }
    )


def _read_metadata(value: object) -> None:
    """A run's declaration, and the memory that it describes where that is small."""
    task = Metadata.from_json(value).task
    if isinstance(task, Declaration) and task.byte_count < 1 << 20:
        task.empty_memory(torch.device("cpu"))


def _small_state() -> bytes:
    return encode_state({"weight/a": torch.zeros(2, 3), "weight/b": torch.zeros(0), "optimizer/c": torch.ones(())})


def _acceptance() -> dict[str, bytes]:
    """The envelopes of a log checkpoint with its standing."""
    standing = Standing(runs={bytes(32): Heard(1, 2)}, attached=bytes(32), counted=1)
    parts = canonical.decode(seal_acceptance("chip-1", LogCheckpoint(size=1), standing, _KEY))
    return {name: canonical.encode(part) for name, part in parts.items()}


def _read_acceptance(data: bytes) -> object:
    """A file whose standing holds these bytes, signed."""
    parts = {**_acceptance(), "standing": _sealed(LOG_STANDING_TYPE, data)}
    content = canonical.encode({name: canonical.decode(part) for name, part in parts.items()})
    return open_acceptance(content, "chip-1", [_KEY.verifying])


def _read_program(data: bytes) -> None:
    program = Program.decode(data)
    _ = program.flop, program.plan(torch.device("cpu"), every=False), program.digest


def _scenarios() -> list[bytes]:
    from analysis.scenarios import ready_scenarios

    return [entry.read_bytes() for entry in ready_scenarios().values()]


def _read_scenario(path: Path) -> object:
    from analysis.scenarios import public_catalogue

    return load_regimes(path, public_catalogue())


def _read_statement(data: bytes) -> object:
    return decode_payload(SignedStatement.from_bytes(data))


def _statements() -> list[bytes]:
    enrolment = Enrolment(registry="r", party="maker-1", role=Role.MAKER, key=_KEY.verifying, time=1)
    values = ReferenceValues(
        registry="r",
        maker="maker-1",
        ca_digests=(Digest("sha256", bytes(32)),),
        measurements=(Digest("sha256", bytes(32)),),
        minimum_security_version=1,
        snapshot_rate=Fraction(1, 4),
        snapshot_algorithm="sha256",
        time=1,
    )
    chips = (ChipRef("chip-1", Digest("sha256", bytes(32)), 1),)
    revocation = Revocation(registry="r", chips=chips, reason="opened", time=1)
    view = Publication(registry="r", size=1, root=bytes(32), entries=1, map_root=bytes(32), time=1)
    return [sign(statement, _KEY).to_bytes() for statement in (enrolment, values, revocation, view)]


def _proofs() -> list[bytes]:
    statement = _statements()[0]
    entry = {"received": 1, "event": 0, **canonical.decode(statement)}
    record = {"batch_path": ["00" * 32], "entries": [[0, canonical.encode(entry).decode(), []]]}
    return [canonical.encode({**record, "head": "h", "position": 0, "record": ["chip-1", "m", ""]})]


def _nodes() -> list[bytes]:
    place = {"source": "state:weight/w", "dtype": "float32", "shape": [2], "stride": [1], "offset": 0}
    layout = {"dtype": "float32", "shape": [2], "stride": [1]}
    digest = str(Digest("sha256", bytes(32)))
    node = Node(
        index=0,
        operator="aten.neg.default",
        arguments={"args": [{"$tensor": 0}], "kwargs": {}},
        sources=(place,),
        results=(layout,),
        inputs=(digest,),
        outputs=(digest,),
    )
    return [node.encoded()]


def _read_trust(path: Path) -> object:
    trust = Trust.load([path])
    trust.agreed()
    if trust.registry is not None:
        for chip, lab in trust.chips.items():
            trust.registry.check_listed(chip, lab)
    return trust


def _examinations() -> list[bytes]:
    head = bytes(32).hex()
    counts = {"unclear": 1, "hidden": 1, "batches": 2, "constants": 3, "tensors": 4, "unopened": 0}
    counted = Counted(places=4, matched=1, first=(1, 2), at=(head, 0), **counts)
    found = Examined(data={head: counted}, scores={head: {head: 2.5}, f"{head}/{head}": None})
    each = [SignedExamination(head=head, device="native", examined=result) for result in (found, None)]
    return [_payload(examination.sign(_KEY)) for examination in each]


def _checks() -> list[bytes]:
    checked = Checked(found=(("evidence", 2),), open=(("evidence", None),), counters={"optimizer/0.step": "00000000"})
    return [_payload(SignedCheck(head=bytes(32).hex(), checked=checked).sign(_KEY))]


_RULES = b"""require = {all = ["a", {not = "b"}]}
[[rule]]
name = "a"
kind = "flop"
per = "job"
links = ["parent", "data"]
at_most = 1e25
[[rule]]
name = "b"
kind = "data"
digests = ["%s"]
at_least = 0.5
""" % (b"0a" * 32)
_POSITIONS = {"format": "chipwitness/memory/2", "chips": {"c": {"counter": 1, "size": 1, "time": 0, "head": "00" * 32}}}


def _party_target(world: World, name: str) -> Target:
    return Target(
        read=lambda data: world.party(name).read(data),
        seeds=lambda: world.party(name).seeds(),
        is_json=name != "upload",
    )


def targets(world: World) -> dict[str, Target]:
    """Every parser that foreign bytes reach, by name."""
    return {
        "canonical-json": Target(read=canonical.decode, seeds=lambda: [b'{"a":[1,2.5,null,true,"x"]}']),
        "envelope": Target(
            read=lambda data: open_sealed(data, PAYLOAD_TYPE, _KEY.verifying),
            seeds=lambda: [_sealed(PAYLOAD_TYPE, b"{}")],
        ),
        "manifest": Target(
            read=lambda data: Manifest.open(_sealed(PAYLOAD_TYPE, data), _KEY.verifying),
            seeds=lambda: [_payload(run.manifest_bytes) for run in (world.preset, world.loop)],
        ),
        "metadata": Target(
            read=lambda data: _read_metadata(canonical.decode(data)), seeds=lambda: world.files(METADATA)
        ),
        "step": Target(
            read=lambda data: Leaf.decode(data, world.preset.layout),
            seeds=lambda: [world.preset.leaf(step).encoded() for step in (0, 1)],
        ),
        "record": Target(
            read=decode_line,
            seeds=lambda: [record.line() for run in (world.preset, world.loop) for record in run.journal],
            is_json=False,
        ),
        "head": Target(
            read=lambda data: SignedHead.open(data, _KEY.verifying, "origin"),
            seeds=lambda: [SignedHead("origin", 3, bytes(32)).sign(_KEY)],
            is_json=False,
        ),
        "state": Target(read=lambda data: decode_state(data, "state"), seeds=lambda: [_small_state()], is_json=False),
        "arrays": Target(
            read=lambda data: decode_arrays(data, "arrays"), seeds=lambda: world.files(SAMPLES, ORDER), is_json=False
        ),
        "rounding-log": Target(
            read=lambda data: codec.decode(data, Formats(), bound_named("worst-case")),
            seeds=lambda: [world.preset.read(log_path(step)) for step in (1, 2)],
            is_json=False,
        ),
        "program": Target(read=_read_program, seeds=world.programs),
        "chip-log": Target(read=world.check_log, seeds=lambda: world.chip_files("log.bin"), is_json=False),
        "epoch-keys": Target(read=decode_epoch_keys, seeds=lambda: world.chip_files("epochs.json")),
        "quote": Target(
            read=lambda data: open_quote(_sealed(QUOTE_PAYLOAD_TYPE, data), _KEY.verifying),
            seeds=lambda: [_payload(each) for each in world.chip_files("quote.json")],
        ),
        "log-checkpoint": Target(
            read=lambda data: open_log_checkpoint(_sealed(LOG_CHECKPOINT_TYPE, data), "chip-1", _KEY.verifying),
            seeds=lambda: [_payload(seal_log_checkpoint("chip-1", BIRTH, _KEY))],
        ),
        "log-acceptance": Target(read=_read_acceptance, seeds=lambda: [_payload(_acceptance()["standing"])]),
        "certificates": Target(read=read_chain, seeds=lambda: world.chip_files("chain.pem"), is_json=False),
        "operator": Target(read=lambda data: Node.from_json(canonical.decode(data)), seeds=_nodes),
        "answer": Target(read=world.judge_answer, seeds=lambda: [(world.folder / "answer.json").read_bytes()]),
        "trust": Target(
            read=world.as_file(_read_trust),
            seeds=lambda: [canonical.encode(world.trust(name).to_json()) for name in ("run", "loop", "registered")],
        ),
        "countersigned": Target(
            read=lambda data: Countersigned.open(_sealed(COUNTERSIGNED, data), _KEY.verifying),
            seeds=lambda: [_payload(each) for name in ("run", "loop") for each in world.trust(name).countersigned],
        ),
        "memory": Target(read=world.as_file(load_memory), seeds=lambda: [canonical.encode(_POSITIONS)]),
        "scenario": Target(read=world.as_file(_read_scenario), seeds=_scenarios, is_json=False),
        "bundle": Target(read=lambda data: world.bundle.read(data), seeds=lambda: [world.bundle.seed()]),
        "contest": Target(read=lambda data: world.contest.read(data), seeds=lambda: [world.contest.seed()]),
        "heads": Target(
            read=lambda data: world.round.read(data), seeds=lambda: [world.round.seed(world.preset.manifest_bytes)]
        ),
        "examination": Target(
            read=lambda data: SignedExamination.open(_sealed(EXAMINATION, data), _KEY.verifying), seeds=_examinations
        ),
        "check": Target(read=lambda data: SignedCheck.open(_sealed(CHECK, data), _KEY.verifying), seeds=_checks),
        "rules": Target(read=world.as_file(read_rules), seeds=lambda: [_RULES], is_json=False),
        "statement": Target(read=_read_statement, seeds=_statements),
        "proof": Target(read=ChipProof.from_bytes, seeds=_proofs),
        "chip-list": Target(
            read=world.as_file(read_chips), seeds=lambda: [b"chip,model,identity\na,m,\nb,m,\n"], is_json=False
        ),
        **{name: _party_target(world, name) for name in READERS},
    }
