"""The beacons of a simulated world: its inspectorate shows each chip the time, by a simulated clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from firmware_sim import Beacon, BeaconIssuer, Chip, RecordKind, parse_log
from firmware_sim.errors import CallerError
from firmware_sim.evidence import canonical
from monitor.files import Files
from monitor.lab.simulated_lab import STEP_SECONDS, LabConfig, SimulatedLab
from monitor.transcript import parse_time

__all__ = ["SimulatedBeacons"]


class SimulatedBeacons:
    """Shows chips beacons, and remembers the last of each next to the runs, on the inspectorate's side.

    A step takes a simulated minute, so that a seed repeats a run.
    """

    def __init__(self, config: LabConfig, folder: Path, files: Files) -> None:
        """``folder`` is the lab's own; chips that go on from an earlier run have that one's beacons."""
        self._files = files
        self._shown: set[str] = set()
        home = folder if config.silicon is None else Path(config.silicon).parent
        self._path = home.with_name(f"{home.name.removesuffix('.lab')}.beacons.json")
        self._started = int(parse_time(config.begin).timestamp())
        self._every = config.beacon_every
        last = {}
        if self._path.exists():
            try:
                last = {each["chip_id"]: Beacon(**each) for each in canonical.decode(self._path.read_bytes())}
            except (OSError, KeyError, TypeError, ValueError) as error:
                raise CallerError(f"cannot read the simulated inspectorate's beacons {self._path}: {error}") from None
        self._issuer = BeaconIssuer(SimulatedLab.inspectorate_key(config), last)

    def after(self, step: int, chips: Iterable[Chip]) -> None:
        """Show them one where one is due after a step."""
        if self._every and step % self._every == 0:
            self.show(step, chips)

    def show(self, step: int, chips: Iterable[Chip]) -> None:
        """Show each chip a beacon of the time after a step; EvidenceError if one was put back to a copy."""
        if not self._every:
            return
        for chip in chips:
            time = max(self._started + STEP_SECONDS * step, self._newest(chip) + 1)
            chip.beacon(self._issuer.issue(chip.chip_id, chip.position, time))
            self._shown.add(chip.chip_id)
        last = sorted(self._issuer.last.items())
        self._files.replace(self._path, canonical.encode([asdict(beacon) for _, beacon in last]))

    def _newest(self, chip: Chip) -> int:
        """Time of the last beacon that a chip was shown; a process that died may not have remembered it."""
        last = self._issuer.last.get(chip.chip_id)
        remembered = 0 if last is None else last.time
        if chip.chip_id in self._shown:
            return remembered
        log = chip.log_bytes()
        shown = [each.step for each in parse_log(log) if each.kind is RecordKind.BEACON] if log else []
        return max(remembered, *shown, 0)
