"""What a referee asks of a party of a dispute (Arun et al. 2025, Verde, section 3)."""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol

from firmware_sim.evidence import SigningKey
from monitor.numerics.operators.partial_sums import Part
from monitor.protocol.dispute import Opening, TraceHead
from monitor.transcript.data import BatchOpening

__all__ = ["Prover", "SigningProver"]


class Prover(Protocol):
    """A party's interface to the referee. Whoever does not answer, or answers with anything malformed, has lost."""

    @abstractmethod
    def step(self, number: int) -> Opening:
        """Open the leaf of a step in the log of steps."""

    @abstractmethod
    def outcome(self, step: int) -> bytes:
        """The encoded leaf to which a step leads as this party takes it; empty: it cannot be taken as recorded."""

    @abstractmethod
    def trace(self, step: int) -> TraceHead:
        """Run a step again and commit to its operators."""

    @abstractmethod
    def trace_prefix(self, step: int, size: int) -> tuple[bytes, tuple[bytes, ...]]:
        """Root over the first ``size`` operators, with the proof that the committed list extends them."""

    @abstractmethod
    def node(self, step: int, index: int) -> Opening:
        """Open one operator."""

    @abstractmethod
    def hashes(self, step: int, index: int, side: str, slot: int) -> tuple[bytes, ...]:
        """Hashes of all chunks of an operator's tensor: of the inputs (``in``) or the outputs (``out``)."""

    @abstractmethod
    def chunk(self, step: int, index: int, side: str, slot: int, number: int) -> bytes:
        """One chunk of such a tensor."""

    @abstractmethod
    def parts(self, step: int, index: int, slot: int, place: int, count: int) -> tuple[Part, ...]:
        """Numbers of so many equal parts of what an element of an operator's output is reduced over."""

    @abstractmethod
    def block(self, step: int, number: int, name: str) -> tuple[bytes, tuple[bytes, ...]]:
        """A block of a tensor of the state after a step, with the hashes that represent all others."""

    @abstractmethod
    def blocks(self, step: int, start: int, size: int) -> tuple[bytes, ...]:
        """Hashes of all blocks of a complete subtree of the state's tree after a step, or of 1024 subtrees of it."""

    @abstractmethod
    def batch(self, step: int) -> BatchOpening:
        """The batch of a step, with the salts of its commitment."""

    @abstractmethod
    def constant(self, step: int, number: int) -> bytes:
        """Bytes of a constant of the step's program."""

    @abstractmethod
    def rounding_entries(self, step: int, index: int) -> bytes:
        """Rounding-log entries of one operator."""

    @abstractmethod
    def log(self, step: int) -> bytes:
        """The rounding log that the leaf of a step commits to."""


class SigningProver(Prover, Protocol):
    """A party in this process, with the key that signs its answers."""

    key: SigningKey
