"""One chip that passes from lab to lab, with a registry and real recorded runs, and what an inspection of each says.

Recorded runs are shared: what a chip did up to a place in a history is copied from whoever came by there before.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

from firmware_sim import LogPosition
from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import SigningKey
from inspector import registry as reg
from inspector.inspection.casefile import CaseFile
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.ownership import past_spans
from inspector.inspection.registry_trust import trust_of
from inspector.inspection.sources import Past, Sources
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Verdict
from monitor.lab.evidence import LiveChips
from monitor.lab.simulated_lab import LabConfig, SimulatedLab, lab_path
from monitor.presets.task import Task
from monitor.recording.recipes import train
from tests.conftest import NOW, STARTED

CHIP = "one-chip-0000"
LABS = ("one", "two", "three")
STEPS = 2
HOUR = timedelta(hours=1)
SETTINGS = Settings(samples=1, seed="x", devices=("sse41",))


def key_of(name: str) -> SigningKey:
    return SigningKey.generate(name.encode().ljust(32, b"."))


@dataclass
class Trade:
    """A chip's history so far: who has it, the runs that were done on it, and the registry.

    Attributes:
        declared: by lab the runs that it hands over.
        guilty: labs that have done what they do not declare, while the chip was theirs.
        refuses: labs that answer no question.
        every: steps from one checkpoint to the next.
    """

    place: Path
    kept: Path
    holder: str = "one"
    runs: list[Path] = field(default_factory=list)
    declared: dict[str, list[Path]] = field(default_factory=dict)
    guilty: set[str] = field(default_factory=set)
    refuses: set[str] = field(default_factory=set)
    done: list[str] = field(default_factory=list)
    every: int = STEPS

    def train(self, *, hidden: bool = False, lab: str | None = None) -> Path:
        """Record a run on the chip; a hidden one is not declared, and not the lab's whose chip it is."""
        lab = lab or self.holder
        run = self.place / f"run{len(self.runs)}"
        trust = run.with_name(f"{run.name}.trust.json")
        self._share(f"{lab}{len(self.runs)}", lambda: self._record(run, lab), run, trust, lab_path(run))
        self.runs.append(run)
        if hidden:
            self.guilty.add(self.holder)
        else:
            self.declared.setdefault(lab, []).append(run)
        return run

    def _share(self, label: str, make: Callable[[], object], *made: Path) -> None:
        """Do what changes the chip, or copy what it has made of it and its folder where that was done already."""
        self.done.append(label)
        kept = self.kept / hashlib.sha256("-".join(self.done).encode()).hexdigest()
        parts = {each.name: each for each in (*made, self.lab)}
        if not kept.exists():
            make()
            started = kept.with_name(f"{kept.name}.started")
            started.mkdir()
            for each in parts.values():
                if each.exists():
                    (shutil.copytree if each.is_dir() else shutil.copy)(each, started / each.name)
            started.rename(kept)
            return
        for each in kept.iterdir():
            target = self.place / each.name
            if target.is_dir():
                shutil.rmtree(target)
            (shutil.copytree if each.is_dir() else shutil.copy)(each, target)
            if (config := target / "lab.json").is_file():
                self._bring_here(config)

    def _bring_here(self, path: Path) -> None:
        """Let a lab that was copied find the chip in this place, and not where its copy was recorded."""
        config = SimulatedLab.read_config(path.parent)
        if config.silicon is not None:
            path.write_bytes(replace(config, silicon=str(self.silicon)).encoded())

    def _record(self, run: Path, lab: str) -> None:
        task = Task.for_preset(
            "digits-cnn", seed=5 + len(self.runs), steps=STEPS, checkpoint_every=self.every, shards=1
        )
        told: dict[str, Any] = {"lie": None, "lie_step": 1, "source": None, "started": STARTED, "duration": HOUR}
        if not self.runs:
            config = LabConfig(lab=lab, seed=5, chips=1, snapshot_rate=Fraction(1), **told)
        else:
            config = replace(LabConfig.following(self.runs[-1], lab=lab, **told), silicon=str(self.silicon))
        train(task, run, config, device="native")

    @property
    def silicon(self) -> Path:
        return self.place / "run0.lab" / "chips"

    @property
    def lab(self) -> Path:
        """The private folder of whoever has the chip."""
        return self.place / "run0.lab"

    @property
    def config(self) -> Any:
        return SimulatedLab.read_config(self.lab)

    def lab_key(self, lab: str) -> SigningKey:
        return SimulatedLab.lab_key(replace(self.config, lab=lab))

    def trust_of_runs(self) -> Trust:
        return Trust.load([run.with_name(f"{run.name}.trust.json") for run in self.runs])

    @property
    def registry(self) -> reg.Registry:
        """The registry, which lists the chip as new in the hands of lab one."""
        where = self.place / "registry.db"
        if where.exists():
            return reg.Registry.open(where, registrar=key_of("registrar"), clock=self.clock)
        made = reg.Registry.create(where, name="trade", registrar=key_of("registrar"), clock=self.clock)
        made.enrol("fab", reg.Role.MAKER, key_of("fab").verifying)
        made.enrol("eye", reg.Role.INSPECTOR, key_of("eye").verifying)
        for lab in LABS:
            made.enrol(lab, reg.Role.OWNER, self.lab_key(lab).verifying)
        chips = Trust.load([self.runs[0].with_name("run0.trust.json")]).chip_trust
        issued = SimulatedLab.certificates(self.config, chips.clocks)
        records = [reg.ChipRecord(chip, "simulated", str(digest)) for chip, digest in issued.items()]
        made.import_chips(records, maker="fab", label="batch", key=key_of("fab"))
        made.transfer([CHIP], sender="fab", receiver="one", release=key_of("fab"), acceptance=self.key("one"))
        values = reg.ReferenceValues(
            registry=made.origin,
            maker="fab",
            ca_digests=tuple(chips.ca_digests),
            measurements=tuple(chips.measurements),
            minimum_security_version=chips.minimum_security_version,
            snapshot_rate=Fraction(chips.snapshot_rate),
            snapshot_algorithm=chips.snapshot_algorithm,
            time=self.clock(),
        )
        made.submit(reg.sign(values, key_of("fab")))
        reg.publish(made)
        return made

    @staticmethod
    def clock() -> int:
        return int(STARTED.timestamp())

    def key(self, party: str) -> SigningKey:
        return self.lab_key(party) if party in LABS else key_of(party)

    def answer(self, nonce: bytes | None = None) -> dict[str, dict[str, bytes]]:
        """What the chip answers to the registry's challenge, in the hands of whoever has it."""
        with self.registry as registry:
            nonce = registry.challenges([CHIP])[CHIP] if nonce is None else nonce
            origin = registry.origin
        folder = self.place / f"answer{len(self.done)}"

        def ask() -> None:
            folder.mkdir()
            for name, content in LiveChips([self.lab]).ask(CHIP, nonce, origin).items():
                (folder / name).write_bytes(content)

        self._share(f"answer-{nonce.hex()}", ask, folder)
        return {CHIP: {each.name: each.read_bytes() for each in folder.iterdir()}}

    def pass_on(self, receiver: str, evidence: dict[str, dict[str, bytes]] | None = None, sender: str = "") -> None:
        """Sell the chip, or give it back to its maker, at its position."""
        evidence = self.answer() if evidence is None else evidence
        sender = sender or self.holder
        with self.registry as registry:
            registry.transfer(
                [CHIP],
                sender=sender,
                receiver=receiver,
                release=self.key(sender),
                acceptance=self.key(receiver),
                evidence=evidence,
            )
            reg.publish(registry)
        self.holder = receiver
        self.done.append(f"to-{receiver}")

    def claim(self, kind: reg.ClaimKind, evidence: dict[str, dict[str, bytes]] | None = None) -> None:
        """Declare the chip lost or found."""
        with self.registry as registry:
            witness: dict[str, Any] = (
                {} if kind is reg.ClaimKind.LOST else {"witness": "eye", "witness_key": key_of("eye")}
            )
            registry.claim(kind, [CHIP], holder=self.holder, key=self.key(self.holder), evidence=evidence, **witness)
            reg.publish(registry)
        self.done.append(kind.value)

    def revoke(self, evidence: dict[str, dict[str, bytes]] | None = None) -> None:
        with self.registry as registry:
            reg.revoke(registry, [CHIP], reason="secrets are out", evidence=evidence)
            reg.publish(registry)
        self.done.append("revoked")

    def trust(self, *labs: str) -> Trust:
        """What the registry's view says of these labs, to an inspector."""
        told = self.trust_of_first()
        with self.registry as registry:
            view = reg.read_view(registry, registrar=key_of("registrar").verifying)
            verifier: dict[str, Any] = {"verifier": told.verifier, "nonce": told.nonce}
            made = trust_of(view, registrar=key_of("registrar").verifying, labs=labs, **verifier)
            for span in past_spans(labs, made):
                if span.end is not None:
                    folder = self.place / "deposits" / str(span.end.deposit).replace(":", "-")
                    folder.mkdir(parents=True, exist_ok=True)
                    for name, content in registry.deposits([str(span.end.deposit)])[str(span.end.deposit)].items():
                        (folder / name).write_bytes(content)
        signed = frozenset().union(
            *(Trust.load([run.with_name(f"{run.name}.trust.json")]).countersigned for run in self.runs)
        )
        return replace(made, inspectorates=told.inspectorates, countersigned=signed)

    def trust_of_first(self) -> Trust:
        return Trust.load([self.runs[0].with_name("run0.trust.json")])

    def inspect(
        self,
        *labs: str,
        worker: Any,
        deposits: bool = True,
        case: CaseFile | None = None,
        memory: Mapping[str, LogPosition] | None = None,
    ) -> Verdict:
        """Inspect these labs, whose chip is asked live where they have it."""
        copy = self.place / "asked.lab"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.lab, copy)
        live = LiveChips([copy])

        def ask(chip: str, nonce: bytes, verifier: str) -> dict[str, bytes]:
            if self.holder in self.refuses:
                raise EvidenceError(f"chip {chip} is not shown")
            return live.ask(chip, nonce, verifier)

        (self.place / "deposits").mkdir(exist_ok=True)
        return inspect(
            [run for lab in labs for run in self.declared.get(lab, [])],
            self.trust(*labs),
            replace(SETTINGS, labs=labs),
            now=NOW,
            worker=worker,
            sources=Sources(answers=[self.place / "deposits"] if deposits else [], ask=ask),
            past=Past(memory=memory),
            case=case,
        )
