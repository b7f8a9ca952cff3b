"""A contested step, decided by one operator: what lab and cluster say of the step, each under its own signature.

Where a replay cluster says that a step leads elsewhere, the lab and the cluster both commit to all operators of the
step, and the first one about which they differ is opened: its inputs, nothing else. A holder of the bundle can execute
it, and then knows which of them is wrong without trusting either (Arun et al. 2025, section 3).

Where the cluster says that the lab's rounding log cannot be obeyed, what it has of the step ends with the operator that
stopped it. The log is opened then, whose digest is in the lab's leaf, and the operator is executed under its part:
either no honest device can have written that, or none can be stopped by it.

    {"format": "chipwitness/contest/2", "program": base64, "lab": DSSE envelope, "cluster": DSSE envelope}
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from firmware_sim import limits
from firmware_sim.errors import CallerError, EvidenceError, file_error
from firmware_sim.evidence import (
    SignatureError,
    SigningKey,
    VerifyingKey,
    canonical,
    decode_base64,
    leaf_hash,
)
from inspector.bundle.clusters import of_cluster
from inspector.bundle.replays import SignedReplay
from inspector.dispute.answers import Answers, Heard, Said
from inspector.dispute.following import Follower, Recorded, rule_on_step
from inspector.dispute.messages import Failure, Traffic
from inspector.dispute.operators import Ruling
from inspector.dispute.prover import Prover
from inspector.inspection.trust import Trust
from monitor.declaration.statement import Declaration
from monitor.programs.program import Program
from monitor.replay.prover import RunProver
from monitor.replay.steps import execution_of
from monitor.transcript import Leaf

__all__ = ["CLUSTER", "LAB", "Contest", "Contested", "Decision", "decide", "departure", "hold", "read_contest"]

FORMAT = "chipwitness/contest/2"
LAB, CLUSTER = "lab", "cluster"
_NO_ANSWER = "no valid answer"
_KEYS = {"format", "program", LAB, CLUSTER}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contested:
    """A run of which a bundle opens steps, as its lab signed it.

    Attributes:
        head: SHA-256, in hex, of the lab's head.
        leaves: opened leaves by step, with their bytes.
    """

    lab: str
    head: str
    declared: Declaration
    leaves: Mapping[int, tuple[Leaf, bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """What lab and cluster say of a step: two envelopes, and the step's program."""

    program: bytes
    lab: bytes
    cluster: bytes

    def encoded(self) -> bytes:
        """The file's bytes."""
        parts = {LAB: canonical.decode(self.lab, most=limits.BUNDLE_BYTES)}
        parts[CLUSTER] = canonical.decode(self.cluster, most=limits.BUNDLE_BYTES)
        return canonical.encode({"format": FORMAT, "program": base64.b64encode(self.program).decode(), **parts})

    @classmethod
    def decode(cls, data: bytes) -> Contest:
        """Parse; EvidenceError on another form."""
        parsed = canonical.decode(data, most=limits.BUNDLE_BYTES)
        if not isinstance(parsed, dict) or set(parsed) != _KEYS or parsed["format"] != FORMAT:
            raise EvidenceError(f"not a contest of the form {FORMAT}")
        lab, cluster = (canonical.encode(parsed[name]) for name in (LAB, CLUSTER))
        return cls(program=decode_base64(parsed["program"]), lab=lab, cluster=cluster)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Who is wrong about a step: ``lab``, ``cluster``, both, or none where nothing decides.

    Attributes:
        head: of the run, SHA-256 in hex.
        key: the cluster's.
    """

    head: str
    step: int
    key: VerifyingKey
    ruling: Ruling

    @property
    def text(self) -> str:
        """In words."""
        opened = "" if self.ruling.operator is None else f" by opened operator {self.ruling.operator}"
        how = f"decided{opened}" if self.ruling.guilty else "not decided"
        return f"step {self.step}: {how}: {self.ruling.text}"


def read_contest(path: Path) -> Contest:
    """A file of ``world contest``; CallerError if it cannot be read, or is none."""
    try:
        return Contest.decode(limits.read_file(path, limits.BUNDLE_BYTES))
    except OSError as error:
        raise file_error(f"cannot read {path}", error) from None
    except EvidenceError as error:
        raise CallerError(f"{path}: {error}; give a file that `world contest` wrote") from None


def hold(
    run: Contested,
    step: int,
    program: bytes,
    *,
    lab: Prover,
    lab_key: SigningKey,
    cluster: RunProver,
    cluster_key: SigningKey,
) -> Contest:
    """Let both parties answer for a step, and sign.

    Raises:
        EvidenceError: the bundle does not open the step, or a party cannot run it again.
    """
    heads = {LAB: lab.trace(step), CLUSTER: cluster.trace(step)}
    reached = cluster.reached(step)
    leaves = {LAB: _opened(run, step)[1], CLUSTER: b"" if reached is None else reached.encoded()}
    heard = {LAB: Heard(lab), CLUSTER: Heard(cluster)}
    _rule(run, step, Program.decode(program), leaves[CLUSTER], heard)

    def signed(mine: str, other: str, key: SigningKey) -> bytes:
        return Answers(
            head=run.head,
            step=step,
            leaf=leaves[mine],
            trace=heads[mine],
            against=heads[other],
            answers=heard[mine].answers,
        ).sign(key)

    return Contest(program=program, lab=signed(LAB, CLUSTER, lab_key), cluster=signed(CLUSTER, LAB, cluster_key))


def decide(
    contest: Contest, runs: Sequence[Contested], replays: Sequence[tuple[VerifyingKey, SignedReplay]], trust: Trust
) -> Decision:
    """Decide a contest by what is signed in it.

    Args:
        replays: of the bundle, each with the cluster's key that signed it.

    Raises:
        EvidenceError: it is not about a step of these runs of which a cluster signed that it leads elsewhere; or it
            puts together what was not said in one dispute.
    """
    key, mine = of_cluster(contest.cluster, trust, Answers.open, "a contest")
    run = next((each for each in runs if each.head == mine.head), None)
    if run is None:
        raise EvidenceError("a contest is about a run that the bundle does not hold")
    try:
        theirs = Answers.open(contest.lab, trust.key_of(run.lab))
    except SignatureError:
        raise EvidenceError("a contest holds answers that the lab did not sign") from None
    step = mine.step
    if (theirs.head, theirs.step, theirs.leaf) != (mine.head, step, _opened(run, step)[1]):
        raise EvidenceError("a contest holds the lab's answers about another step")
    if (theirs.trace, theirs.against) != (mine.against, mine.trace):
        raise EvidenceError("a contest combines two answers that were not given to each other")
    if (step, leaf_hash(mine.leaf) if mine.leaf else None) not in [
        departure(each, run) for signer, each in replays if (signer, each.head) == (key, run.head)
    ]:
        raise EvidenceError("a contest is not about the step at which the cluster's replay departs")
    digest = hashlib.sha256(contest.program).hexdigest()
    signed = [each for each in trust.agreed() if each.lab == run.lab and each.declaration == run.declared]
    if not any(digest in each.programs for each in signed):
        raise EvidenceError(f"a contest holds program {digest[:16]}…, which was not countersigned")
    said = {LAB: Said(theirs), CLUSTER: Said(mine)}
    ruling = _rule(run, step, Program.decode(contest.program), mine.leaf, said)
    for party in ruling.guilty if ruling.case == _NO_ANSWER else ():
        if said[party].unanswered:  # the other may have changed its answers since, and signed what was not asked
            text = f"{party} was not asked for {said[party].unanswered[0]}"
            ruling = Ruling(guilty=(), operator=None, text=text, case="not asked")
    return Decision(head=run.head, step=step, key=key, ruling=ruling)


def departure(result: SignedReplay, run: Contested) -> tuple[int, bytes | None] | None:
    """The first step that a replay reaches otherwise than the lab signed it, and the hash of the leaf it reaches.

    None means the leaf of a step that it could not take as it was recorded.
    """
    for replay in result.replays:
        for step, reached in enumerate(replay.leaves, start=replay.segment[1] + 1):
            if reached != leaf_hash(_opened(run, step)[1]):
                return step, reached
        if replay.contradicted_step is not None:
            return replay.contradicted_step, None
    return None


def _rule(run: Contested, step: int, program: Program, stated: bytes, provers: Mapping[str, Prover]) -> Ruling:
    """Rule between the lab's leaf and the cluster's, which start from one state.

    Args:
        stated: the cluster's leaf, encoded; empty where it says that the step cannot be taken as it was recorded.
    """
    leaf, before = _opened(run, step)[0], _opened(run, step - 1)[0]
    if program.digest != execution_of(leaf).program:
        raise EvidenceError("a contest contains a program that is not the one that the step runs")
    if run.declared.numerics == "native":
        raise EvidenceError("steps with native numerics cannot be decided: no two devices reach the same bits")
    layout, traffic = run.declared.layout, Traffic()
    try:
        reached = {step: Leaf.decode(stated, layout) if stated else leaf}
    except EvidenceError:
        reached = {}  # on which ``rule_on_step`` rules
    lab = Follower(LAB, provers[LAB], {step - 1: before, step: leaf}, layout, traffic)
    cluster = Follower(CLUSTER, provers[CLUSTER], {step - 1: before, **reached}, layout, traffic)
    recorded = Recorded(declared=run.declared, leaf=leaf, program=program)
    try:
        return rule_on_step(lab, cluster, recorded, stated, traffic)
    except Failure as failure:
        return Ruling(guilty=(failure.party,), operator=None, text=str(failure), case=_NO_ANSWER)


def _opened(run: Contested, step: int) -> tuple[Leaf, bytes]:
    if step not in run.leaves:
        raise EvidenceError(f"the bundle does not open step {step}")
    return run.leaves[step]
