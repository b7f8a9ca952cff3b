"""The inspectorate of a simulated world: it countersigns whatever its lab declares, and writes the trust file.

What it writes lies next to a run, on the inspector's side. Its key is no lab's, and the statement says that it is
simulated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from firmware_sim import Roofline
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import canonical
from monitor.declaration.countersignature import Admitted, Countersigned
from monitor.declaration.statement import Declaration
from monitor.files import Files
from monitor.lab.simulated_lab import LabConfig, SimulatedLab
from monitor.programs.paths import differentiates
from monitor.programs.program import Program
from monitor.recording.options import EVALUATIONS, RunConfig

__all__ = ["SimulatedInspectorate"]


class SimulatedInspectorate:
    """Signs a run's declaration, with each program as soon as it appears.

    Args:
        run: the run folder; the trust file's name is ``RUN.trust.json``.
        options: ``evaluations`` among its direct paths means each program that only computes and differentiates.
        files: writes the trust file.
    """

    def __init__(
        self,
        run: Path,
        config: LabConfig,
        options: RunConfig,
        files: Files,
    ) -> None:
        folder = run.resolve()
        self._path = folder.with_name(folder.name + ".trust.json")
        self._key, self._lab, self._signed = SimulatedLab.inspectorate_key(config), config.lab, config.begin
        self._is_own = options.reference is None
        self._reference = options.reference or SimulatedLab.reference_values(config)
        self._options, self._direct_paths = options, frozenset(options.direct_paths)
        self._data: frozenset[str] = frozenset()
        self._files = files
        self._admitted: dict[str, Admitted] = {}
        self._derived: set[str] = set()

    def recall(self) -> None:
        """Go on from the trust file of a run's first part, where it is still there."""
        if not self._path.exists():
            return
        try:
            trust = canonical.loads(self._path.read_text(encoding="utf-8"))
            for envelope in trust.pop("countersigned"):
                self._data |= Countersigned.open(envelope.encode(), self._key.verifying).data
        except (OSError, ValueError, LookupError, TypeError, AttributeError, EvidenceError) as error:
            raise CallerError(f"cannot read {self._path.name}, which the run's first part wrote: {error}") from None
        self._reference = trust

    def register(self, clocks: Mapping[str, Roofline], data: frozenset[str]) -> None:
        """Write down how long a tick of each chip is, as its maker says; a trust file of the caller's own says it.

        Args:
            data: digests of samples and orders that lab and inspector agreed on, where they are not a preset's own.
        """
        self._data = data
        if self._is_own:
            self._reference = {**self._reference, "clocks": {chip: asdict(each) for chip, each in clocks.items()}}

    def sign(self, declared: Declaration, programs: Mapping[str, Program], *, run: str) -> None:
        """Countersign a run's declaration with the programs so far, and replace the trust file."""
        admitted = {digest: self._admit(digest, program) for digest, program in programs.items()}
        paths = self._direct_paths | self._derived if EVALUATIONS in self._direct_paths else self._direct_paths
        signed = Countersigned(
            lab=self._lab,
            run=run,
            declaration=declared,
            programs=admitted,
            free=frozenset(self._options.free),
            direct_paths=paths - {EVALUATIONS},
            data=self._data,
            simulated=True,
            signed=self._signed,
        )
        if self._options.free_slots:
            signed = replace(signed, free=signed.free | frozenset(programs))
        trust = {**self._reference, "countersigned": [signed.sign(self._key).decode()]}
        self._files.replace(self._path, (json.dumps(trust, indent=2) + "\n").encode())

    def _admit(self, digest: str, program: Program) -> Admitted:
        if digest not in self._admitted:
            self._admitted[digest] = Admitted.of(program)
            self._derived |= {digest} if differentiates(program) else set()
        return self._admitted[digest]
