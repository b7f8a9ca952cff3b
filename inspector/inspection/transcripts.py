"""The runs that an inspection is given, and checks of their transcripts that need no re-execution.

A run is known by what it is and who signed it. Names of folders are for the eye: labs distinguish two that are alike,
then the beginnings of their ids, and their places among the arguments where no known party has signed them.

Are a run's samples and their order those that its declaration gives? Nothing of them is decoded before that.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path

from firmware_sim import limits
from firmware_sim.errors import Damaged, EvidenceError, Unreadable
from firmware_sim.evidence import MerkleTree, SignatureError, digest_bytes
from inspector.inspection.agreement import Agreement, agreement_of, unread_files
from inspector.inspection.disclosure import ThinRun, Withheld
from inspector.inspection.execution import ExecutionReport, examine_execution
from inspector.inspection.guards import Guard
from inspector.inspection.trust import Trust, signer_of
from inspector.inspection.verdict import COPY, Findings, Reason
from monitor.declaration.origin import TAKEN_OVER
from monitor.environment import accelerator
from monitor.programs.parts import is_recalled, require_recalled
from monitor.replay.derivation import meta_batch
from monitor.replay.ledger import Needs, needs_of
from monitor.replay.repetition import check_absent
from monitor.replay.steps import check_size, execution_of
from monitor.sharding import ShardedMemory
from monitor.transcript import Batches, Leaf, Manifest, RunFolder, parse_time
from monitor.transcript.data import agreement_digest, declared_data
from monitor.transcript.export import handed_over
from monitor.transcript.layout import MANIFEST, ORDER, SAMPLES, batch_path, checkpoint_path, log_path
from monitor.transcript.reader import read_manifest

__all__ = ["GivenRun", "Transcript", "check_agreed_data", "given_runs", "open_run", "read_transcript", "recalling"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenRun:
    """A run folder that was given: the run, or why it could not be opened.

    Attributes:
        where: ``run`` for the eye, and as far as a registered lab has signed its head ``run_id`` and ``lab``: no one
            else is to blame for what is found of it.
    """

    where: dict[str, str]
    found: RunFolder | EvidenceError | Unreadable

    def open(self) -> RunFolder:
        """The run; EvidenceError or Unreadable where it could not be opened."""
        if not isinstance(self.found, RunFolder):
            raise self.found
        return self.found


def given_runs(folders: Sequence[Path], trust: Trust, open_folder: Callable[[Path], RunFolder]) -> list[GivenRun]:
    """Open runs, and name them so that no two are called alike.

    Raises:
        CallerError: there is no such folder.
    """
    found = [_opened(folder, open_folder) for folder in folders]
    known = [_signed(folder, each, trust) for folder, each in zip(folders, found, strict=True)]
    names = [folder.name for folder in folders]
    signs = [
        [f" of {each['lab']}" if each else "" for each in known],
        [f" ({each['run_id'][:8]}…)" if each else "" for each in known],
        [f" (run {place} of {len(folders)})" for place in range(1, len(folders) + 1)],
    ]
    for sign in signs:
        alike = Counter(names)
        names = [name + more if alike[name] > 1 else name for name, more in zip(names, sign, strict=True)]
    for name, each in zip(names, found, strict=True):
        if isinstance(each, RunFolder):
            each.name = name
    return [
        GivenRun(where={"run": name, **who}, found=each) for name, who, each in zip(names, known, found, strict=True)
    ]


def _opened(folder: Path, open_folder: Callable[[Path], RunFolder]) -> RunFolder | EvidenceError | Unreadable:
    try:
        return open_folder(folder)
    except (EvidenceError, Unreadable) as error:
        return error


def _signed(folder: Path, found: RunFolder | EvidenceError | Unreadable, trust: Trust) -> dict[str, str]:
    """Id and lab of a run, by its head alone where the rest cannot be read; nothing if no known lab signed."""
    if isinstance(found, RunFolder):
        return {"run_id": found.manifest.run, "lab": found.metadata.lab}
    try:
        lab, manifest = signer_of(limits.read_file(folder / MANIFEST, limits.MANIFEST_BYTES), trust)
    except (OSError, EvidenceError):
        handed = handed_over(folder, trust.labs)
        return {} if handed is None else {"run_id": handed.run, "lab": handed.lab}
    return {"run_id": manifest.run, "lab": lab}


_INDEX_BYTES = 8


def check_agreed_data(run: RunFolder, agreed: Agreement, findings: Findings) -> bool:
    """Compare the data files of a preset's run, by digest, with what lab and inspector both know.

    They are the preset's own samples in the order that the declared seed gives, which the inspector computes from its
    own copy; or data of the lab's that were countersigned. Data that are neither leave the verdict open if the run
    says that they are another set, and reject it if the run says that they are the preset's.

    Returns whether the data may be read.

    Raises:
        EvidenceError: a data file is missing, or too short for the declared steps.
    """
    entries = {path: run.files.get(path) for path in (SAMPLES, ORDER)}
    found = {path: entry.sha256 for path, entry in entries.items() if entry is not None}
    order = entries[ORDER]
    if order is None or len(found) != len(entries):
        raise EvidenceError("the run holds no samples or no order of samples")
    task = run.task
    if order.length < task.steps * task.batch_size * _INDEX_BYTES:
        raise EvidenceError(f"{ORDER} is too short for {task.steps} batches of {task.batch_size}")
    if agreement_digest(found) in agreed.always("data"):
        return True
    own = declared_data(task, None)
    where = run.where
    if {path: hashlib.sha256(content).hexdigest() for path, content in own.files.items()} == found:
        return True
    if run.metadata.data.get("set") == own.name:
        findings.add(
            Guard.DATA,
            f"the samples or their order are not those that preset {task.preset} and seed {task.seed} give",
            **where,
        )
        return False
    findings.doubt(
        f"the data are not the inspector's copy of preset {task.preset}'s, and were not countersigned: "
        f"{agreement_digest(found)}",
        **where,
    )
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """A run whose files, log and data are consistent.

    Attributes:
        agreed: what lab and inspectorate both signed.
        leaves: steps 0 … committed.
        tree: their RFC 9162 log.
        region_tables: digest of each shard's region table, as the declaration gives it.
        execution: what its programs are and whether they may be executed.
        models: digest of weights and buffers alone, by the steps whose whole state somebody has read: 0, each
            checkpoint's, and the last.
    """

    run: RunFolder
    agreed: Agreement
    leaves: Sequence[Leaf]
    tree: MerkleTree
    data: Batches
    region_tables: list[bytes]
    execution: ExecutionReport
    models: Mapping[int, str] = field(default_factory=dict)

    def leaf(self, step: int) -> Leaf:
        """The leaf of a step; EvidenceError where it was not committed."""
        if step >= len(self.leaves):
            raise EvidenceError(f"step {step} of {self.run.name} was not committed")
        return self.leaves[step]

    def has_root(self, size: int, root: bytes) -> bool:
        """Whether it has so many leaves, and the first ``size`` of them this root."""
        return size <= len(self.tree) and self.tree.root(size) == root

    def has_state(self, step: int, shard: int, digest: bytes) -> bool:
        """Whether a step was committed that left a state whose shard of this number has this digest."""
        return step < len(self.leaves) and self.leaves[step].state.shard(shard).value == digest

    def needs(self, chip: str) -> Needs:
        """What the run's steps need of one of its chips, whose programs are all known."""
        works = self.execution.works
        assert works is not None
        share = self.run.declared.layout.share(self.run.metadata.chips.index(chip))
        return needs_of(self.run.declared, share, self.leaves, works, self.execution.dead, self.execution.made)


def open_run(folder: Path, trust: Trust, *, thin: bool = False, opened: Collection[str] | None = None) -> RunFolder:
    """Open a run under the key of one of the registered labs.

    The lab is found by trying the registered keys on the manifest, since nothing is parsed before it is verified.

    Args:
        thin: it holds no states and no samples (``thin.ThinRun``).
        opened: files that are there, where the lab hands over a part of the run.

    Raises:
        CallerError: there is no such folder.
        Damaged: no registered lab has signed the manifest, or another file is not what was signed.
        EvidenceError: what was signed is wrong, or names another lab than its signer.
        Unreadable: it may not be read here, or is not finished.
    """
    error: EvidenceError | None = None
    found = handed_over(folder, trust.labs)
    if found is not None and MANIFEST not in found.files:
        raise EvidenceError(f"lab {found.lab} signed that it handed over this run, but it has no {MANIFEST}")
    try:
        head = read_manifest(folder)
    except EvidenceError:
        head = b""  # which ``RunFolder`` says
    for lab, key in trust.signers(head):
        handed = found.files if found is not None and found.lab == lab else None
        try:
            run = ThinRun(folder, key) if thin else RunFolder(folder, key, opened=opened, handed=handed)
        except Unreadable:
            raise
        except EvidenceError as failure:
            error = failure if error is None or not isinstance(failure, SignatureError) else error
            continue
        if run.metadata.lab != lab:
            raise EvidenceError(f"lab {lab} signed this run, but the run names lab {run.metadata.lab}")
        return run
    if found is None and not any(Manifest.is_signed(read_manifest(folder), key) for key in trust.labs.values()):
        raise Damaged(f"no registered lab has signed its {MANIFEST}")
    raise error if error is not None else EvidenceError("no lab is registered")


def read_transcript(
    run: RunFolder, trust: Trust, findings: Findings, *, now: datetime, live: bool = False
) -> Transcript | None:
    """Check files, log, data, checkpoints and declared compute; None if too little is readable to go on.

    Args:
        live: chips at work are asked, so that the committed steps of a run that goes on can be judged.
    """
    contents = _read_contents(run, trust, findings)
    if contents is None:
        return None
    agreed, leaves = contents.agreed, contents.leaves
    if not run.finished:
        _unfinished(run, findings, now, live=live)
    elif len(leaves) != run.declared.steps + 1:
        text = f"the run is finished, but commits only {len(leaves) - 1} of {run.declared.steps} steps"
        findings.add(Guard.REPLAY, text, **run.where)
    if not leaves:
        return None  # begun, and nothing committed yet
    if run.finished and findings.read(lambda: _check_trained(leaves), **run.where) is None:
        return None
    if not agreed.may_load(leaves[0]):
        examine_execution(run, leaves, agreed, findings)
        return None
    memory = findings.read(lambda: _memory(run), **run.where)
    if memory is None:
        return None
    models = _check_states(run, contents, memory, findings)
    region_tables = [shard.table_digest().value for shard in memory.shards]
    del memory  # as large as the model with its optimizer; what follows may make another
    report = examine_execution(run, leaves, agreed, findings)
    return Transcript(
        run=run,
        agreed=agreed,
        leaves=leaves,
        tree=contents.tree,
        data=contents.data,
        region_tables=region_tables,
        execution=report,
        models=models,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Contents:
    """What a run's files hold, as far as it needs no state.

    Attributes:
        unread: files that the agreement does not let the inspector read.
    """

    agreed: Agreement
    leaves: Sequence[Leaf]
    tree: MerkleTree
    unread: Collection[str]
    data: Batches | Withheld


def _read_contents(run: RunFolder, trust: Trust, findings: Findings) -> _Contents | None:
    """Check files, agreement, log and samples; None if one of them cannot be read."""
    where = run.where
    if findings.read(run.check_listing, **where) is None:
        return None
    agreed = findings.read(lambda: agreement_of(run, trust), **where)
    if agreed is None:
        return None
    has_recipe = run.declared.recipe is not None
    if has_recipe and not findings.read(lambda: check_agreed_data(run, agreed, findings), **where):
        return None
    steps = findings.read(run.load_steps, **where)
    if steps is None:
        return None
    unread = findings.read(lambda: unread_files(run, steps[0], agreed, findings), **where)
    if unread is None or findings.read(lambda: run.check_contents(unread), **where) is None:
        return None
    is_thin = isinstance(run, ThinRun)
    data = Withheld() if is_thin else findings.read(run.batches, **where)
    if data is None or (
        has_recipe and not is_thin and findings.read(lambda: _check_samples(run, data), **where) is None
    ):
        return None
    return _Contents(agreed=agreed, leaves=steps[0], tree=steps[1], unread=unread, data=data)


def _check_states(run: RunFolder, contents: _Contents, memory: ShardedMemory, findings: Findings) -> Mapping[int, str]:
    """Check checkpoints, batches and rounding logs, or take over what a cluster says of them; digests of models."""
    if isinstance(run, ThinRun):
        return _take_checked(run, findings)
    leaves = contents.leaves
    check = partial(_check_checkpoints, run, leaves, contents.agreed, findings, memory)
    models = findings.read(check, **run.where) or {}
    check_batches = partial(_check_batches, run, leaves, contents.data, contents.unread, memory)
    findings.check(Guard.DATA, check_batches, **run.where)
    findings.read(lambda: _check_logs(run, leaves), **run.where)
    return models


def _take_checked(run: ThinRun, findings: Findings) -> Mapping[int, str]:
    """What a cluster says of the files that are not shown."""
    name = run.name
    if run.checked is None:
        findings.doubt(f"no cluster has checked the states and samples of {name}", **run.where)
        return {}
    for guard, step in run.checked.found:
        text = f"{name}: the cluster found that the check {guard} fails" + ("" if step is None else f" at step {step}")
        findings.found.append(Reason(guard=guard, text=text, where={**run.where, "step": step, "by": "cluster"}))
    for guard, step in run.checked.open:
        text = f"{name}: the cluster could not decide everything" + ("" if step is None else f" at step {step}")
        text = f"{name}: the files of this run that were opened to the cluster are damaged" if guard == COPY else text
        where = {**run.where, "by": "cluster"}
        findings.doubts.append(Reason(guard=COPY if guard == COPY else "evidence", text=text, where=where))
    return run.checked.models


def _check_trained(leaves: Sequence[Leaf]) -> bool:
    """A finished run has taken steps, declared beforehand or not."""
    if len(leaves) < 2:
        raise EvidenceError("the run is finished, but it has not committed any step")
    return True


def _memory(run: RunFolder) -> ShardedMemory:
    """Memory of the declared layout; the state must be as large as its first checkpoint's file allows."""
    check_size(run)
    return run.declared.empty_memory(accelerator())


def _unfinished(run: RunFolder, findings: Findings, now: datetime, *, live: bool) -> None:
    committed = max(run.committed, 0)
    whole = "" if run.declared.length is None else f"of {run.declared.length} "
    text = f"the run is unfinished: {committed} {whole}steps are committed"
    end = run.metadata.declared_end
    if now > parse_time(end):
        findings.add(Guard.REPLAY, f"{text}, and its declared end {end} has passed", **run.where)
    elif not live or committed < 1 or committed < run.manifest.steps:  # what is only announced is not there
        findings.doubt(f"{text}; its declared end is {end}", **run.where)


def _check_checkpoints(
    run: RunFolder, leaves: Sequence[Leaf], agreed: Agreement, findings: Findings, memory: ShardedMemory
) -> dict[int, str]:
    """Each W_i is there and is the state that its leaf commits to, but for what the step after it overwrites.

    It comes with that step. The first and the last are whole; of a program without an agreement, no step is replayed.
    One that was released is listed, and need not be there; nor need one that the lab was not asked for.

    Returns the digests of weights and buffers, of those that hold them whole.
    """
    models, last = {}, len(leaves) - 1
    due = {*range(0, last, run.declared.checkpoint_every), 0, *([last] if run.finished else [])}
    for step in sorted(due):
        if run.is_withheld(checkpoint_path(step)) or run.is_released(checkpoint_path(step)):
            continue
        absent, digest = memory.restore(run.checkpoint(step))
        if digest != leaves[step].state:
            raise EvidenceError(f"the checkpoint of step {step} is not the state that the step commits to")
        if absent and step in (0, last):
            raise EvidenceError(
                f"the checkpoint of step {step} leaves out {min(absent)!a}, but this checkpoint has to be complete"
            )
        following = execution_of(leaves[step + 1]).program if absent else ""
        if absent and agreed.may_decode(following):
            check_absent(absent, step + 1, run.program(following))
        if not any(name.partition("/")[0] in TAKEN_OVER for name in absent):
            models[step] = str(memory.digest_of(TAKEN_OVER))
    return models


def _check_samples(run: RunFolder, data: Batches) -> bool:
    """The samples have the names, types and shapes that the task's program reads."""
    expected = {name: (tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in meta_batch(run.task).items()}
    found = {name: (tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in data.batch(1).items()}
    if found != expected:
        raise EvidenceError(f"the samples are not those of preset {run.task.preset}: {found}, not {expected}")
    return True


def _check_batches(
    run: RunFolder, leaves: Sequence[Leaf], data: Batches, unread: Collection[str], memory: ShardedMemory
) -> None:
    for leaf in leaves[1:]:
        path = batch_path(leaf.step)
        if path in unread or (run.declared.recipe is None and run.is_withheld(path)):
            continue
        if leaf.batch != data.batch_root(leaf.step).hex():
            raise EvidenceError(f"step {leaf.step} commits to a batch that is not the one in the declared data order")
    for step in recalling(run, leaves):
        if not (batch_path(step) in unread or run.is_withheld(batch_path(step))):
            require_recalled(data.batch(step), step, memory, lambda earlier: leaves[earlier].state)


def recalling(run: RunFolder, leaves: Sequence[Leaf]) -> list[int]:
    """Steps whose batch holds tensors of an earlier state; a run whose data are declared has none."""
    digests = {leaf.step: execution_of(leaf).program for leaf in leaves[1:]}
    every = {} if run.declared.recipe is not None else run.programs()
    found = {each for each in {*digests.values()} if each in every and is_recalled(run.program(each).batch)}
    return [step for step, digest in digests.items() if digest in found]


def _check_logs(run: RunFolder, leaves: Sequence[Leaf]) -> None:
    for leaf in leaves[1:]:
        if run.is_withheld(log_path(leaf.step)):
            continue
        if leaf.log != str(digest_bytes("rounding-log", run.rounding_log(leaf.step))):
            raise EvidenceError(f"the rounding log of step {leaf.step} is not the one that the step committed to")
