"""A party of a dispute as a desk answers for it, and as a referee elsewhere asks it.

claim               the run's signed head, its metadata, and digests of its declared data
step N              commitment at a step: its leaf, with an inclusion proof against the head
leaves N            commitments between: leaves from step N on, as many as fit
results             commitment to what all steps led to (``claim.Results``): number of entries, and root
results N ...       roots over the first N of them, each with a consistency proof
result N            inclusion proof of one of them
program DIGEST      a program, without large constants
outcome N           the leaf to which step N leads as the party takes it; empty where it cannot be taken as recorded
trace N             commitment to the operators of a step, which the party runs again
prefix N K          root over the first K of them, with a consistency proof
node N I            one operator, with an inclusion proof
hashes N I in S     of all chunks of its input S; with ``out``, of an output
chunk N I in S K    chunk K of that
parts N I S P C     numbers of C equal parts of what element P of its output S is reduced over (``reduction``)
block N K NAME      block K of a tensor of the state after a step, with the hashes of all other blocks (a chunk proof)
blocks N START SIZE hashes of a subtree of that state's tree: of all its blocks, or of 1024 subtrees of it
batch N, constant N C, log N, entries N I
of HEAD ...         the same about another party's run with that head, taken again under the rounding logs of that run
of HEAD objection   the first step of that run which leads elsewhere, or was not taken as its own run was; or none
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from firmware_sim import limits
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import MerkleTree, VerifyingKey, canonical, decode_base64
from inspector.dispute.answers import Heard, Stated
from inspector.dispute.prover import Prover, SigningProver
from inspector.wire.desk import Desk
from monitor.programs.bits import same_bytes
from monitor.programs.program import Program, read_program
from monitor.replay.prover import RunProver
from monitor.replay.steps import execution_of
from monitor.transcript import Leaf, RunFolder
from monitor.transcript.layout import METADATA, ORDER, SAMPLES, program_path

__all__ = ["Provider", "Remote", "desk_of"]

_LEAVES = 4 << 20
"""Bytes of leaves in one answer, but at least one leaf."""
_MOST = {
    "trace": 1 << 10,
    "prefix": 1 << 16,
    "step": 3 << 22,
    "outcome": 3 << 22,
    "node": 3 << 22,
    "leaves": 3 << 22,
    "claim": 9 << 23,
    "results": 1 << 16,
    "result": 1 << 14,
    "hashes": 3 << 22,
    "chunk": 3 << 19,
    "parts": 3 << 20,
    "blocks": 1 << 16,
    "block": 3 << 19,
    "objection": 3 << 22,
}
"""Bytes of answers that are short by their form; a leaf has 4 MB at most. Of others ``BUNDLE_BYTES``."""
_KEPT = 1 << 20
"""Bytes of an answer that is kept, so that it is asked for once."""


class Provider:
    """Answers questions about a run.

    Args:
        run: what it committed to.
        prover: runs its steps again.
        followed: runs of other parties that lie here, by the SHA-256, in hex, of their heads.
    """

    def __init__(self, run: RunFolder, prover: Prover, followed: Mapping[str, RunFolder] | None = None) -> None:
        self._run, self._prover = run, prover
        self._followed = followed or {}
        self._followers: dict[str, tuple[Provider, RunProver]] = {}
        self._heard = heard = Heard(prover)
        self._noted: dict[str, tuple[Callable[..., Any], int]] = {
            "step": (heard.step, 1),
            "outcome": (heard.outcome, 1),
            "prefix": (heard.trace_prefix, 2),
            "node": (heard.node, 2),
            "batch": (heard.batch, 1),
            "constant": (heard.constant, 2),
            "parts": (heard.parts, 5),
            "blocks": (heard.blocks, 3),
            "entries": (heard.rounding_entries, 2),
            "log": (heard.log, 1),
        }

    def answer(self, question: str) -> bytes:
        """The body of an answer; EvidenceError for what is no question."""
        kind, _, rest = question.partition(" ")
        if kind == "of":
            head, _, about = rest.partition(" ")
            follower, prover = self._follower(head)
            return canonical.encode(self._objection(head, prover)) if about == "objection" else follower.answer(about)
        if kind in self._noted:
            ask, count = self._noted[kind]
            ask(*_numbers(rest, count))
        elif kind == "block":
            words = [*rest.split(" ", 2), "", ""]
            step, number = _numbers(" ".join(words[:2]), 2)
            self._heard.block(step, number, words[2])
        elif kind in ("hashes", "chunk"):
            self._opened(kind, rest)
        else:
            return canonical.encode(self._stated(kind, rest))
        return canonical.encode(self._heard.answers.pop(question))

    def _follower(self, head: str) -> tuple[Provider, RunProver]:
        if head not in self._followed:
            raise EvidenceError(f"it holds no copy of the run with the head {head!a:.100}")
        if head not in self._followers:
            prover = RunProver(self._followed[head])
            self._followers[head] = Provider(self._followed[head], prover), prover
        return self._followers[head]

    def _objection(self, head: str, prover: RunProver) -> list[Any]:
        """Number of the step, what differs (``task`` or ``result``) and the leaf that it reaches; empty where none is.

        A step that it cannot take as it was recorded has an empty leaf.
        """
        other = self._followed[head]
        last = min(map(_last_whole, (self._run, other)))
        unlike = next((step for step in range(1, last + 1) if not _is_of_one_task(self._run, other, step)), None)
        found = prover.departure(_last_whole(other) if unlike is None else unlike - 1)
        if found is not None:
            return [found[0], "result", "" if found[1] is None else _text(found[1].encoded())]
        return [] if unlike is None else [unlike, "task", ""]

    def _opened(self, kind: str, rest: str) -> None:
        words = rest.split(" ")
        side = words.pop(2) if len(words) > 2 else ""
        if side not in ("in", "out"):
            raise EvidenceError(f"a tensor of an operator is named by 'in' or 'out', not {side!a:.100}")
        step, index, *others = _numbers(" ".join(words), 3 if kind == "hashes" else 4)
        getattr(self._heard, kind)(step, index, side, *others)

    def _stated(self, kind: str, rest: str) -> object:
        if kind == "claim" and not rest:
            data = [self._run.files.get(path) for path in (SAMPLES, ORDER)]
            return {
                "manifest": _text(self._run.manifest_bytes),
                "metadata": _text(self._run.read(METADATA)),
                "data": [each.sha256 for each in data if each is not None],
            }
        if kind == "leaves":
            (first,) = _numbers(rest, 1)
            return self._leaves(first)
        if kind == "results":
            return self._results_at([_numbers(size, 1)[0] for size in rest.split(" ") if rest])
        if kind == "result":
            return [each.hex() for each in self._results.inclusion_proof(*_numbers(rest, 1))]
        if kind == "program":
            return _text(self._run.read(program_path(rest)))
        if kind == "trace":
            head = self._prover.trace(*_numbers(rest, 1))
            return [head.size, head.root.hex()]
        raise EvidenceError(f"no question begins with {kind!a:.100}")

    def _leaves(self, first: int) -> list[str]:
        held = 0
        found: list[str] = []
        for leaf in map(self._run.leaf, range(first, self._run.manifest.steps + 1)):
            content = leaf.encoded()
            held += len(content)
            if found and held > _LEAVES:
                break
            found.append(_text(content))
        return found

    @cached_property
    def _results(self) -> MerkleTree:
        return results_of(map(self._run.leaf, range(self._run.manifest.steps + 1)))

    def _results_at(self, sizes: Sequence[int]) -> list[Any]:
        tree = self._results
        if not sizes:
            return [tree.size, tree.root().hex()]
        return [[tree.root(size).hex(), *(each.hex() for each in tree.consistency_proof(size))] for size in sizes]


def _last_whole(run: RunFolder) -> int:
    head = run.manifest
    return head.steps if head.is_closing or not head.pending else head.steps - 1


def _is_of_one_task(run: RunFolder, other: RunFolder, step: int) -> bool:
    """Whether two runs took a step by the same program, with the same numbers and batch.

    The values that it read are results, and differ where two labs round differently.
    """
    executions = [execution_of(each.leaf(step)) for each in (run, other)]
    mine, theirs = ((each.program, each.slots, each.hyper) for each in executions)
    if mine != theirs:
        return False
    batch, another = (each.batches().batch(step) for each in (run, other))
    return set(batch) == set(another) and all(same_bytes(batch[name], another[name]) for name in batch)


def desk_of(
    run: RunFolder,
    prover: SigningProver,
    folder: Path,
    askers: Collection[VerifyingKey],
    followed: Collection[RunFolder] = (),
    task: str = "",
) -> Desk:
    """The desk, with its files in a folder, at which a party answers about its run, or the task that it did.

    Args:
        followed: runs of others, about which it answers, too.
    """
    provider = Provider(run, prover, {each.manifest_digest: each for each in followed})
    return Desk(folder, provider.answer, prover.key, askers, run.manifest.run, task)


class Remote(Stated):
    """A party that a referee asks by a line.

    Attributes:
        most: bytes that answers may have, by the first word of their question.

    Args:
        ask: brings back the body of the answer to a question, within so many bytes.
    """

    def __init__(self, ask: Callable[[str, int], bytes]) -> None:
        self._ask = ask
        self._kept: dict[str, bytes] = {}
        self.most = dict(_MOST)

    def _answer(self, question: str) -> Any:
        body = self._kept.get(question)
        if body is None:
            body = self._ask(question, self.most.get(question.partition(" ")[0], limits.BUNDLE_BYTES.most))
            if len(body) <= _KEPT:
                self._kept[question] = body
        return canonical.decode(body, most=limits.BUNDLE_BYTES)

    def following(self, head: str) -> Remote:
        """The same party, asked about another's run with that head."""
        return Remote(lambda question, most: self._ask(f"of {head} {question}", most))

    def objection(self) -> tuple[int, str, bytes] | None:
        """The step of a run that it followed to which it objects, what differs there, and the leaf that it reached."""
        found = self._answer("objection")
        if found == []:
            return None
        step, what, leaf = found
        if type(step) is not int or what not in ("task", "result"):
            raise EvidenceError("an objection is malformed")
        return step, what, decode_base64(leaf)

    def claim(self) -> tuple[bytes, bytes, list[str]]:
        """The signed head, the metadata, and digests of declared data."""
        stated = self._answer("claim")
        if not isinstance(stated, dict) or set(stated) != {"manifest", "metadata", "data"}:
            raise EvidenceError("a claim has missing or extra keys")
        return decode_base64(stated["manifest"]), decode_base64(stated["metadata"]), stated["data"]

    def leaves(self, first: int) -> list[bytes]:
        """Encoded leaves from a step on, at least one."""
        found = [decode_base64(each) for each in self._answer(f"leaves {first}")]
        if not found:
            raise EvidenceError(f"it shows no leaf from step {first} on")
        return found

    def results(self) -> tuple[int, bytes]:
        """Number of entries and root of the list of results."""
        size, root = self._answer("results")
        return size, bytes.fromhex(root)

    def results_at(self, sizes: Sequence[int]) -> list[tuple[bytes, list[bytes]]]:
        """Roots over the first entries of that list, each with the proof that the list extends them."""
        answers = self._answer(" ".join(["results", *map(str, sizes)]))
        return [(root, proof) for root, *proof in (map(bytes.fromhex, each) for each in answers)]

    def result(self, step: int) -> list[bytes]:
        """The proof that the list holds a step's entry."""
        return list(map(bytes.fromhex, self._answer(f"result {step}")))

    def program(self, digest: str) -> Program:
        """A program, which has that digest; its large constants are known by theirs."""
        program = read_program(decode_base64(self._answer(f"program {digest}")))
        if program.digest != digest:
            raise EvidenceError(f"the program that it opens is not {digest[:16]}…")
        return program


def _numbers(text: str, count: int) -> list[int]:
    words = text.split(" ")
    if len(words) != count or not all(word.isascii() and word.isdecimal() for word in words):
        raise EvidenceError(f"this question takes {count} whole numbers, not {text!a:.100}")
    return [int(word) for word in words]


def _text(content: bytes) -> str:
    if type(content) is not bytes:
        raise CallerError(f"an answer holds {type(content).__name__} where bytes belong")
    return base64.b64encode(content).decode()


def result_of(leaf: Leaf) -> bytes:
    """The entry of a step: its state, loss, FLOP, program and the values that it read."""
    ran = None if leaf.execution is None else [leaf.execution.program, leaf.execution.reads]
    return canonical.encode([leaf.step, str(leaf.state.root), leaf.loss, leaf.flop, ran])


def results_of(leaves: Iterable[Leaf]) -> MerkleTree:
    """The list of a run."""
    return MerkleTree(map(result_of, leaves))
