"""Switches guards off: the one place that knows how, for tests that show what each guard is good for.

A guard is one function of the product that stands between a piece of evidence and its acceptance. Its entry in
``GUARDS`` says what takes its place while it is off. No option, variable or file of the product does the same.

    with off("snapshot moment"):
        ...                                                   # in this process
    python -m tests.guards "snapshot moment" -- inspect RUN   # a command in a process of its own
"""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

from firmware_sim import CHIP_GUARDS, MemoryCopy, ScheduleError
from firmware_sim.errors import EvidenceError
from firmware_sim.evidence.envelope import read_sealed
from firmware_sim.evidence.pruning import read_log_checkpoint
from firmware_sim.limits import Limit
from inspector.inspection.guards import Guard
from inspector.inspection.verdict import Findings
from monitor.replay.ledger import Kind

__all__ = ["GUARDS", "are_off", "blind", "off", "without"]

_stacks: list[ExitStack] = []


def _nothing(*_: Any, **__: Any) -> None:
    """In place of a check that raises or records what it finds."""


def _draw_any(wanted: list[Any], count: int, seed: bytes) -> list[Any]:
    """Draw among all segments, so that the first may be left out."""
    return sorted(wanted, key=lambda segment: hashlib.sha256(seed + str(segment.index).encode()).digest())[:count]


def _always(*_: Any, **__: Any) -> bool:
    """In place of a check that says whether something is so."""
    return True


def _agrees_by_itself(rule: Any, declared: float, used: float, step: int, largest: float) -> bool:
    """In place of ``Schedule.agrees``: to 2^-46 of the rate itself."""
    expected = rule.rate(declared, step)
    return bool(abs(used - expected) <= 2.0**-46 * abs(expected))


def _no(*_: Any, **__: Any) -> bool:
    """In place of a check that says whether something has to be."""
    return False


def _unbounded_shape(shape: list[int]) -> None:
    """In place of the check of a shape: its size, whatever its rank."""
    if math.prod(shape) > _ANY:
        raise EvidenceError("a tensor's size is impossible")


def _count_matrices(program: Any) -> Any:
    """Count products written as such, and none in disguise."""
    from monitor.programs.flop import Compute, counted

    return Compute(flop=sum(counted(call) or 0 for call in program.calls), elementwise=0)


def _sign_anything(run: Any, trust: Any, **_: Any) -> Any:
    """Countersign whatever a run declares, with all programs that it holds."""
    from monitor.declaration.countersignature import Countersigned

    programs: Any = dict.fromkeys(run.programs())
    told = {"lab": run.metadata.lab, "run": run.manifest.run, "signed": run.metadata.started}
    return (Countersigned(**told, declaration=run.declared, programs=programs),)


def _joined_statements(name: str, run_id: str, signed: Any) -> Any:
    """All that was agreed of equal declarations, together."""
    return tuple(each.joined(signed) for each in signed[:1])


def _last_program(rule: Any, item: Any) -> list[str]:
    """Score a run by the last program that it ran."""
    return [item.leaves[-1].execution.program]


def _unseen_by_chance(ticks: float, rate: Any) -> float:
    """What a lab can hope for that knows of no snapshot: its stretch begins in the middle of two ticks."""
    r = float(rate)
    return (1 - r) ** (math.ceil(ticks) - 1) * (1 - r * (1 + ticks - math.ceil(ticks)) / 2) ** 2


def _where_by_name() -> property:
    """Blame who signed the last run with a folder of the same name."""
    signers: dict[str, str] = {}
    seen: list[Any] = []

    def where(run: Any) -> dict[str, str]:
        if not any(each is run for each in seen):
            seen.append(run)
            signers[run.folder.name] = run.metadata.lab
        return {"run": run.folder.name, "lab": signers[run.folder.name]}

    return property(where)


def _any_replay(content: bytes, trust: Any) -> Any:
    """Take a replay's result for the cluster's, whoever signed it."""
    from firmware_sim.evidence import canonical, decode_base64
    from inspector.bundle.replays import SignedReplay

    payload = decode_base64(canonical.decode(content)["payload"])
    return min(trust.clusters, key=lambda key: key.raw), SignedReplay.parse(canonical.decode(payload))


_SECRET = {"data", "logs", "batches", "checkpoints"}
"""Folders that no inspectorate is shown, constants left out."""
_ANY = 1 << 62
"""In place of a limit."""


def _same_digest(told: Any, model: Any) -> Any:
    """Compare a model with a verdict by the digest alone, which leaves names out."""
    if told is None or told["sha256"] != model.summary["sha256"]:
        raise EvidenceError("it is about another model")
    return told


def _last_of_each(parts: Any) -> dict[str, Any]:
    """Of tensors with the same name take the last."""
    return {name: content for tensors in parts.values() for name, content in tensors.items()}


def _buffers_first(run: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of a weight and a buffer with the same name take the buffer."""
    state = run.checkpoint(run.declared.steps)
    names = [name.removeprefix("weight/") for name in state if name.startswith("weight/")]
    return {name: state.get(f"buffer/{name}", state[f"weight/{name}"]) for name in names}, {}


def _no_marks(*_: Any) -> Any:
    """In place of what is known of the state that a run begins with."""
    from monitor.declaration.writes import Marks

    return Marks()


def _any_writes(*_: Any) -> Any:
    """Whatever a step writes beside its updates counts as declared."""
    from monitor.declaration.writes import Marks

    return Marks(), {}, frozenset()


def _of_one_storage(between: Any, tensor: Any) -> bool:
    """Know the memory of the state by its storage objects."""
    return tensor.untyped_storage()._cdata in between._state


def _copied_by_the_host(copy: Any, slices: Any) -> Any:
    """Read memory as any code of the process does."""
    import numpy as np

    for mine, part in zip(copy.slices, slices, strict=True):
        np.copyto(mine.data, part.data)
    return copy


@contextmanager
def _at_once(*_: Any, **__: Any) -> Iterator[None]:
    """In place of a lock."""
    yield


def _taken_with_reads(leaf: Any, other: Any) -> Any:
    """In place of ``taken_by``: what a step read is what it took."""
    return replace(leaf, state=other.state, loss=other.loss, flop=other.flop)


def _decided_within(*words: Any) -> Any:
    """In place of ``_decision``: a contest that is about something else spoils the bundle."""
    from inspector.bundle.contests import decide

    return decide(*words)


def _any_run(folder: Any, trust: Any) -> Any:
    """In place of ``executable_run``: whatever programs a run holds may be run."""
    from inspector.inspection.transcripts import open_run

    return open_run(folder, trust), {}


def _extends_nothing(**given: Any) -> None:
    """In place of ``verify_consistency``: anything extends the empty tree, whatever its root is said to be."""
    from firmware_sim.evidence import verify_consistency

    if given["old"]:
        verify_consistency(**given)


def _blamed(run: Any, path: str, found: str) -> EvidenceError:
    """Blame the lab for whatever is not as it signed."""
    return EvidenceError(found)


def _replayed_unchecked(worker: Any, name: str, job: dict[str, Any]) -> dict[str, Any]:
    """Replay in this process, and follow rounding logs whatever they choose."""
    from inspector.replay import _worker
    from inspector.replay.segment import replay_segment

    with mock.patch.object(_worker, "replay_segment", partial(replay_segment, check_rounding=False)):
        return {"fingerprint": name, **_worker._ACTIONS["replay"](job)}


GUARDS: Mapping[str, tuple[tuple[str, Any], ...]] = {
    # law 8: what befalls a copy
    "damaged copies": (("monitor.transcript.reader.RunFolder._whose", _blamed),),
    "what was handed over": (("inspector.inspection.transcripts.handed_over", _nothing),),
    "damaged again": (("inspector.rounds.steps._damaged_again", lambda *_: []),),
    "nodes' findings": (("inspector.replay.ray_pool._is_against", _no),),
    "lengths in fsck": (("inspector.storage.fsck._Run._longest", lambda *_: _ANY),),
    "memory held": (("inspector.inspection.memory.hold_memory", _at_once),),
    "plain files in inboxes": (("inspector.rounds.world._content", lambda path: path.read_bytes()),),
    "runs that a lab says it opened": (("inspector.rounds.steps._reported_open", lambda *_: set()),),
    "one message of a kind": (("inspector.rounds.steps.twice", lambda world: []),),
    "senseless results": (("inspector.rounds.steps._MALFORMED", ()), ("inspector.rounds.steps.check_signed", _nothing)),
    "who signed a message": (
        (
            "inspector.rounds.world.open_sealed",
            lambda data, kind, key, most=None: read_sealed(data, kind, most=most)[0],
        ),
    ),
    "labs of the announcement": (("inspector.rounds.steps._trust", lambda world, announced: world.trust()),),
    "chips of the draw": (("inspector.rounds.laboratory._check_draw", _nothing),),
    "names of parties": (("inspector.rounds.world.World._lab", lambda self, lab: self.folder / "labs" / lab),),
    "folders that can be named": (("inspector.rounds.steps._named", lambda folder: sorted(folder.iterdir())),),
    "arrived before the draw": (("inspector.rounds.receipts.is_late", _no),),
    "sound folder of a run": (("inspector.rounds.steps.soundest", lambda folders, trust: folders[-1]),),
    "declared writes": (("monitor.declaration.slots.declared_writes", _any_writes),),
    "recalled tensors": (("inspector.inspection.transcripts.require_recalled", _nothing),),
    # law 1: a snapshot's moment
    "snapshot moment": (("inspector.inspection.commits.SnapshotMoment.take", _nothing),),
    "snapshots inside steps": (("inspector.inspection.explanation._match_inside", _nothing),),
    "snapshots in time": (("inspector.inspection.mid_step_snapshots.check_in_time", _nothing),),
    # a snapshot's bytes
    "memory read by the kernel": (("firmware_sim.memory.MemoryCopy.refill", _copied_by_the_host),),
    "memory of one process": (("firmware_sim.memory.check_own", _nothing),),
    # law 2: work, and the time that it takes
    "missing snapshots": (("inspector.inspection.suppression._judge", _nothing),),
    "own clock": (
        ("firmware_sim.checks.check_life", _nothing),
        ("firmware_sim.checks.audit_schedule", _nothing),
    ),
    "metered work": (("monitor.replay.ledger.Ledger.take", _nothing),),
    "ranks between steps": (("monitor.distributed.metering.Apart._is_ours", _no),),
    "bytes between ranks": (("monitor.distributed.statements.Statements.require", _nothing),),
    "memory by address": (("monitor.recording.loop_writes.Between._is_state", _of_one_storage),),
    "limited slack": (("inspector.inspection.slack._Sheet.fits", lambda *_: True),),
    "closed runs": (("inspector.inspection.commits.CommitOrder._check_open", _nothing),),
    "commits of the attached run": (("inspector.inspection.commits.CommitOrder._check_latest", _nothing),),
    "share of the state": (("inspector.inspection.explanation._check_share", _nothing),),
    "work beside programs": (("inspector.inspection.execution._check_beside", _nothing),),
    "bounded reads": (("inspector.inspection.execution._check_reads", _nothing),),
    "evaluations write nothing": (("inspector.inspection.execution._check_evaluation", _nothing),),
    "held results": (("inspector.inspection.commits.HeldResults.take", _nothing),),
    "open epoch": (("firmware_sim.audit.check_open_epoch", _nothing),),
    # law 3: draws
    "fresh draw": (("inspector.inspection.inspection.secret_of", lambda settings: settings.seed or "0"),),
    "secret nobody can guess": (("inspector.rounds.steps.fresh_secret", lambda: "0" * 64),),
    "first segment": (("inspector.inspection.sampling.first_and_drawn", _draw_any),),
    "labs that declare nothing": (
        (
            "inspector.inspection.inspection.under_inspection",
            lambda declared, trust, labs: sorted(declared),
        ),
    ),
    "undeclared runs": (
        ("inspector.inspection.explanation.note_undeclared", _nothing),
        ("monitor.replay.ledger.Ledger.take", _nothing),
        ("inspector.inspection.commits.HeldResults.take", _nothing),
    ),
    "heads handed over again": (("inspector.rounds.steps.dropped", lambda *_: []),),
    "heads keep up": (("inspector.inspection.explanation.check_behind", _nothing),),
    "challenge of each lab": (
        ("inspector.inspection.trust.Trust.challenge_of", lambda trust, lab: (trust.verifier, trust.nonce)),
    ),
    "one owner": (("inspector.inspection.trust.check_agree", _nothing),),
    "orders of what was drawn": (("inspector.rounds.laboratory.require_drawn", _nothing),),
    "deadlines": (("inspector.rounds.receipts.is_late", _no),),
    "uniform segments": (("inspector.inspection.sampling.drawn_uniformly", lambda every, count, seed: [every[0]]),),
    "pace": (("inspector.inspection.commits.Pace.take", _nothing),),
    "beacons": (("inspector.inspection.commits.Beacons.take", _nothing),),
    "live challenge": (("inspector.inspection.answers.Answers.challenge", _nothing),),
    "fresh answer": (("firmware_sim.checks.check_quote_request", _nothing),),
    "answer goes on": (("firmware_sim.checks.check_extends", _nothing),),
    "signs of life": (("inspector.inspection.commits.SignsOfLife.take", _nothing),),
    # law 3: who is drawn, and is who it says
    "registry proof": (("inspector.registry.registry_view.verify_inclusion", _nothing),),
    "registered certificate": (("inspector.registry.registry_view.RegisteredChips.check_certificate", _nothing),),
    "spans of owners": (("inspector.registry.positions.read_spans", lambda *_: ()),),
    "what the registry keeps": (("inspector.inspection.inspection.examine_past", lambda *_: ([], {}, {})),),
    "what was seen of lost chips": (("inspector.inspection.past_spans._check_seen", _nothing),),
    "deposits of rounds": (("inspector.rounds.world.World.deposits", lambda world: []),),
    "what labs know that they sold": (("inspector.rounds.laboratory.past_spans", lambda *_: []),),
    "fresh positions": (("inspector.registry._rules.challenge_of", lambda *_: b"\1" * 32),),
    "positions of transfers": (("inspector.registry._rules.check_positions", _nothing),),
    "revoked chips": (("inspector.inspection.inspection.check_registered", _nothing),),
    "one chip, one identity": (("inspector.inspection.identities.check_distinct", _nothing),),
    # law 4: the same bytes
    "verified manifest": (("inspector.inspection.replays.verified_manifest", _nothing),),
    "root of the empty tree": (("inspector.bundle.steps.verify_consistency", _extends_nothing),),
    "one history": (("inspector.inspection.inspection.check_goes_on", lambda *_: []),),
    "signed replays": (("inspector.bundle.checker.signed_replay", _any_replay),),
    "installed code": (
        ("monitor.processes.python", lambda module, *words, **_: [sys.executable, "-m", module, *words]),
        (
            "monitor.processes.start",
            lambda command, folder, variables, **streams: subprocess.Popen(
                command, env={**os.environ, **variables}, **streams
            ),
        ),
    ),
    "contests are the caller's": (("inspector.bundle.checker._decision", _decided_within),),
    "reads are results": (("inspector.dispute.following.taken_by", _taken_with_reads),),
    "log of the leaf": (("inspector.dispute.messages.check_log", _nothing),),
    "what logs decide": (("inspector.inspection.rounding_logs._doubts", lambda *_: ()),),
    "entries refereed": (("monitor.numerics.rounding.log_rules.Judge._rule", _nothing),),
    "constants as named": (("monitor.programs.constants.check_named", _nothing),),
    "constants as listed": (("monitor.transcript.reader.RunFolder._check_constants", _nothing),),
    "constants in one form": (("monitor.programs.constants.check_form", _nothing),),
    "constants withheld": (
        ("inspector.inspection.disclosure._is_thin", lambda path: path.split("/")[0] not in _SECRET),
    ),
    # law 4: a model's files
    "files by name": (("inspector.bundle.checker.check_files", _same_digest),),
    "one tensor a name": (("inspector.bundle.models._joined", _last_of_each),),
    "weights before buffers": (("inspector.bundle.models._last_state", _buffers_first),),
    "names of buffers": (("monitor.loops.state._check_free", _nothing),),
    "indexes of models": (("inspector.bundle.models._check_index", _nothing),),
    "links of models": (("inspector.bundle.models._followed", lambda path, root: path),),
    # law 4: what a checkpoint leaves out
    "left out unread": (
        ("monitor.replay.repetition.check_absent", _nothing),
        ("inspector.inspection.transcripts.check_absent", _nothing),
    ),
    "retained checkpoints": (("monitor.declaration.statement.is_retained", _no),),
    # law 5: declared numbers
    "agreed data": (("inspector.inspection.transcripts.check_agreed_data", lambda *_: True),),
    "numbers bound": (("inspector.inspection.execution._check_bound", _nothing),),
    "numbers equal": (("monitor.declaration.slots._is_close", _always),),
    "number ranges": (("inspector.inspection.execution.outside", lambda *_: {}),),
    "changes measured": (("inspector.inspection.replays.joined_changes", lambda parts, count: [0.0]),),
    "largest rate": (("monitor.declaration.schedules.Schedule.agrees", _agrees_by_itself),),
    "rates are numbers": (
        (
            "inspector.inspection.execution._rates",
            lambda groups, step: [float(group.get("lr", 0.0)) for group in groups],
        ),
    ),
    "products counted": (("monitor.programs.program.compute_of", _count_matrices),),
    "direct paths": (("inspector.inspection.paths.not_agreed", lambda *_: []),),
    "gradients bound": (("inspector.inspection.execution.check_tensors", _nothing),),
    "new optimizers": (("monitor.declaration.reference._is_made", _always),),
    "scales of gradients": (("monitor.declaration.values.Made.is_scale", False),),
    "started as copies": (("monitor.declaration.slots.Marks.of_start", _no_marks),),
    "copies of weights": (("inspector.inspection.execution.made_of_weights", lambda *_: {}),),
    "evaluations that differentiate": (("inspector.inspection.execution.check_differentiating", _nothing),),
    "results that come back": (("inspector.inspection.replays.check_returned", lambda *_: []),),
    "witness": (
        ("inspector.inspection.witnesses.witness_in", _nothing),
        ("inspector.bundle.grounds.witness_in", _nothing),
    ),
    "countersigned": (("inspector.inspection.agreement.countersigned", _sign_anything),),
    "statements of one run": (("inspector.inspection.agreement.statements_of", _joined_statements),),
    "what was shown": (("inspector.inspection.proposals.is_shown", _always),),
    "programs of a score": (("inspector.rules.judgement.scoring", _last_program),),
    "samples elsewhere": (("inspector.replay.examination.hidden_in", lambda *_: set()),),
    "countersigned costs": (("inspector.inspection.execution.is_same_cost", _always),),
    "amendments": (
        ("inspector.inspection.agreement.Agreement.may_decode", _always),
        ("inspector.inspection.execution.strangers_of", lambda *_: []),
    ),
    "weights of the parent": (("inspector.inspection.lineage.check_taken_over", lambda *_: []),),
    "initialisation executed": (("inspector.inspection.replays.check_initialised", _nothing),),
    "initialisation brings nothing": (("inspector.inspection.execution.brings", lambda program: ""),),
    "text in proportion": (("inspector.inspection.execution.most_text", lambda made: 1024 * len(made)),),
    "labs of one job added up": (
        (
            "inspector.rules.jobs._Links._around",
            lambda self, job, items: [item for item in items if item.run.manifest.run in job],
        ),
        ("inspector.rules.jobs.chain_of", lambda item, parents: [item]),
    ),
    "chains added up": (("inspector.inspection.lineage.exceeds", lambda *_: False),),
    "past counted": (("inspector.inspection.lineage.past_unknown", _nothing),),
    "changes declared": (("inspector.inspection.execution._check_changed", _nothing),),
    # law 9: what a bundle is worth
    "what a bundle is worth": (("inspector.bundle.checker._worth", lambda *_: ""),),
    "what a bundle reveals": (("inspector.bundle.checker.REVEALS", ""),),
    # law 6: bounds and printing
    "forms of ranks' statements": (("monitor.distributed.statements.has_form", _always),),
    "ranks run what was agreed": (("inspector.inspection.drift.executable_run", _any_run),),
    "json items": (("firmware_sim.limits.JSON_ITEMS", Limit(_ANY, "items")),),
    "json integers": (("firmware_sim.limits.JSON_INTEGER_BITS", Limit(_ANY, "bits")),),
    "state blocks": (("firmware_sim.limits.STATE_BLOCKS", Limit(_ANY, "blocks")),),
    "opened subtrees": (("firmware_sim.limits.STATE_NODES", Limit(_ANY, "subtrees")),),
    "tensor shapes": (("firmware_sim.limits.check_shape", _unbounded_shape),),
    "signed lengths": (("monitor.transcript.reader.check_lengths", _nothing),),
    "agreed before opened": (("inspector.inspection.agreement.Agreement.may_decode", _always),),
    "files that end": (("firmware_sim.limits.check_ends", _nothing),),
    "plain chip files": (("firmware_sim.service.check_chip_file", _nothing),),
    "batch lengths": (
        ("inspector.inspection.drift.unread_files", _nothing),
        ("inspector.dispute.claim.batch_most", lambda program: _ANY),
    ),
    "lab names": (("firmware_sim.limits.check_lab", _nothing),),
    "visible text": (("analysis.commands._common.visible", str),),
    # law 9: stated chances
    "labs see snapshots": (("inspector.probability.chances.unseen", _unseen_by_chance),),
    "steps of training": (("inspector.inspection.replays.evaluations_in", lambda every, leaves: {}),),
    # chips that were pruned
    "signed checkpoints": (
        (
            "firmware_sim.evidence.acceptance.open_log_checkpoint",
            lambda data, chip, key: read_log_checkpoint(data, chip)[0],
        ),
        ("firmware_sim.evidence.acceptance.open_sealed", lambda data, kind, key: read_sealed(data, kind)[0]),
    ),
    # who a chip is
    "listed chip": (("inspector.inspection.chip_log.is_listed", _always),),
    "certificate as issued": (("firmware_sim.identity.check_issued", _nothing),),
    "layer in normal operation": (("firmware_sim.identity._check_layer", _nothing),),
    "opened shards": (
        ("inspector.inspection.shards._opened", lambda content, like, *_: MemoryCopy.from_bytes(content, like)),
    ),
    # law 7: no host code in firmware
    "plain memory": (("firmware_sim.memory.check_plain", _nothing),),
    "snapshot of its own": (("firmware_sim._snapshots._own", lambda event: event),),
    "exact arguments": tuple(
        (f"firmware_sim.firmware.check_{name}", _nothing)
        for name in ("coordinate", "digest", "request", "sealed", "ticks")
    ),
    "one command at a time": (
        ("firmware_sim._commands.Gate.enter", _nothing),
        ("firmware_sim._commands.Gate.leave", _nothing),
    ),
    "own process": (("firmware_sim._commands.Gate.check_process", _nothing),),
    "unlocked by its process": (("firmware_sim._silicon.Silicon.is_own", False),),
    "signed firmware": (("firmware_sim.firmware.FirmwareChip._check_signature", _nothing),),
    # law 8: honest labs
    "who continued": (
        (
            "inspector.rules.quantities._answering",
            lambda group: tuple(sorted({item.run.metadata.lab for item in group.items})),
        ),
    ),
    "public seeds": (
        ("inspector.rules.jobs._Links._start", lambda self, item: item.models.get(0)),
        ("inspector.rules.jobs._Links._models", lambda self, item: set(item.models.values())),
    ),
    "links of a rival alone": (("inspector.rules.jobs._joins", _always),),
    "programs that train": (("monitor.transcript.leaf.Leaf.trains", True),),
    "slack as what it is": (("inspector.rules.quantities._EXPLAINED", ()),),
    "unexplained slack": (("inspector.rules.quantities._EXPLAINED", tuple(Kind)[3:]),),
    "nothing found": (
        (
            "inspector.rules.judgement._of_lab",
            lambda found, lab, wanted: [each for each in found if lab in each.labs],
        ),
    ),
    "verdicts with reasons": (
        ("inspector.inspection.verdict.Verdict.__post_init__", _nothing),
        ("inspector.inspection.verdict._require_reasons", _nothing),
    ),
    "answers outside runs": (("inspector.inspection.answers.Answers.holds", lambda self, chip: False),),
    "blame by lab": (("monitor.transcript.reader.RunFolder.where", _where_by_name()),),
    "evidence of the chip's own lab": (
        ("inspector.inspection.provenance.runs_of_owner", lambda chip, transcripts, trust: list(transcripts)),
    ),
    "room for evidence": (("firmware_sim.firmware.FirmwareChip._has_room", _always),),
    "read back": (("firmware_sim.nvram._until", lambda done, write: write()),),
    "lost write": (("firmware_sim.nvram.LogFile._restore", _nothing),),
    "long life": (("firmware_sim.audit.Unaudited", ScheduleError),),
    "false-alarm cap": (("inspector.probability.alarms.within_cap", lambda *_: True),),
    "equal layouts": (("monitor.numerics.strides.canonical_strides", lambda tensor: tensor.stride()),),
    "watched memory": (("monitor.programs.memory_watch.unwritten", lambda now, copy: True),),
    "repeated steps": (("monitor.recording.recording._is_picked", lambda seed, step, one_in: False),),
}
"""Name of each guard, and what is put in place of which attribute while it is off."""


_CHECKS: Mapping[Guard, tuple[tuple[str, Any], ...]] = {
    Guard.DATA: (("inspector.inspection.transcripts.check_agreed_data", _always),),
    Guard.INITIALISATION: (("inspector.inspection.agreement.Agreement.may_load", _always),),
    Guard.METER: (
        ("inspector.inspection.slack._Sheet.fits", _always),
        ("inspector.inspection.explanation._meter_law", lambda *_: []),
    ),
    Guard.PROGRAM: (
        ("inspector.inspection.agreement.Agreement.may_decode", _always),
        ("inspector.inspection.execution.strangers_of", lambda *_: {}),
        ("inspector.inspection.execution.check_tensors", _nothing),
        ("inspector.inspection.paths.not_agreed", lambda *_: []),
        ("inspector.inspection.replays.check_returned", lambda *_: []),
    ),
    Guard.REPLAY: (("inspector.inspection.replays.compare_inside", lambda *_: 0),),
    Guard.RULES: (
        ("inspector.inspection.lineage._check_cap", _nothing),
        ("inspector.inspection.inspection.check_signed", _nothing),
    ),
    Guard.ROUNDING: (
        ("inspector.inspection.replays._attempt", _replayed_unchecked),
        ("inspector.inspection.rounding_logs._doubts", lambda *_: ()),
    ),
}
"""What takes the place of parts of an inspection's check that neither find nor call, as ``GUARDS``."""


@contextmanager
def _entered() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        _stacks.append(stack)
        stack.callback(_stacks.remove, stack)
        yield stack


def are_off() -> bool:
    """Whether any guard is off by now."""
    return bool(_stacks)


@contextmanager
def blind(*guards: Guard) -> Iterator[None]:
    """Inspect by all checks but these."""
    add, check = Findings.add, Findings.check

    def some(self: Findings, guard: Guard, text: str, **where: Any) -> None:
        if guard not in guards:
            add(self, guard, text, **where)

    def some_checks(self: Findings, guard: Guard, function: Any, **where: Any) -> Any:
        return None if guard in guards else check(self, guard, function, **where)

    with _entered() as stack:
        stack.enter_context(mock.patch.multiple(Findings, add=some, check=some_checks))
        for target, replacement in (each for guard in guards for each in _CHECKS.get(guard, ())):
            stack.enter_context(mock.patch(target, replacement))
        yield


@contextmanager
def off(*names: str) -> Iterator[None]:
    """Switch guards off in this process, which meanwhile neither keeps nor takes what it found out with or without."""
    with _entered() as stack:
        stack.enter_context(mock.patch("monitor.programs.program._SMALL", -1))
        for name in names:
            for target, replacement in GUARDS[name]:
                stack.enter_context(mock.patch(target, replacement))
        yield


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Check chips by all guards of their evidence but these."""
    fewer = dict(CHIP_GUARDS)
    for name in names:
        del fewer[name]
    with _entered() as stack:
        stack.enter_context(mock.patch("firmware_sim.checks.CHIP_GUARDS", fewer))
        yield


def main(arguments: list[str]) -> int:
    """Run a command of the product with guards off."""
    from analysis.cli import main as command

    split = arguments.index("--")
    with off(*arguments[:split]):
        return command(arguments[split + 1 :])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
