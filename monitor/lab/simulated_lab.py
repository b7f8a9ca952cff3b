"""A simulated lab's private side: its secret, its signing key and its chips.

Everything here simulates what no inspector sees: the ``RUN.lab`` folder is simulated silicon and a simulated
key store. The run folder ``RUN`` holds only evidence.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

from firmware_sim import (
    CURRENT_FIRMWARE,
    DEFAULT_ALGORITHM,
    Chip,
    ChipLie,
    ChipType,
    LabLie,
    MakerCA,
    PosixDisk,
    Roofline,
    make_chip,
    parse_lie,
    power_on_chip,
)
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import Digest, SigningKey, VerifyingKey, canonical
from monitor.files import Files

__all__ = [
    "STEP_SECONDS",
    "LabConfig",
    "SimulatedLab",
    "chip_ids",
    "lab_path",
    "new_lab_config",
    "next_lab_config",
    "simulated_secret",
]

_TIME = "%Y-%m-%dT%H:%M:%SZ"
_CONFIG = "lab.json"
_CLOCKS = "clocks.json"
STEP_SECONDS = 60
"""What a step takes by the clock of a simulated world, whatever it takes by any other."""


def lab_path(run: Path) -> Path:
    """The private folder next to a run folder."""
    run = run if run.name else run.resolve()
    return run.with_name(run.name + ".lab")


def simulated_secret(seed: int) -> str:
    """Derive all secrets of a simulated world from a seed, so that a simulation can be repeated: 64 hex digits."""
    return hashlib.sha256(f"chipwitness/simulated-secret/{seed}".encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class LabConfig:
    """Configuration of a simulated lab besides its task.

    Attributes:
        secret: 64 hex digits; keys, salts and the chips' secrets derive from it.
        lie: name of the one lie that this lab tells, or None.
        lie_step: step at which it departs from honesty.
        snapshot_rate: snapshots per chip and tick of its clock, as numerator and denominator.
        challenge: 64 hex digits, the verifier's nonce that the chips' quotes answer.
        source: the user's data file, or None.
        silicon: folder of the chips of an earlier run that go on in this one, or None for new chips.
        idle_chips: registered chips that take no part in the run.
        beacon_every: steps from one beacon of the simulated inspectorate to the next; 0 for none.
        inspectorate: public key of the inspectorate that the chips are made to obey, 64 hex digits; None for the
            simulated one.
        keep_snapshots: how many of the newest snapshots of each chip the lab stores with their bytes.
        number: of the run among those of its lab, so that each has its own salts.
        made_for: the lab whose name the chips bear, where that is another: it has passed them on.
    """

    lab: str
    secret: str
    chips: int
    lie: str | None
    lie_step: int
    snapshot_rate: tuple[int, int]
    challenge: str
    verifier: str
    source: str | None
    started: str
    declared_end: str
    silicon: str | None = None
    idle_chips: int = 0
    beacon_every: int = 0
    number: int = 0
    inspectorate: str | None = None
    keep_snapshots: int = 0
    made_for: str | None = None

    @property
    def nonce(self) -> bytes:
        """The challenge as bytes."""
        return bytes.fromhex(self.challenge)


def new_lab_config(
    *,
    lab: str,
    seed: int,
    chips: int,
    idle_chips: int = 0,
    lie: str | None = None,
    lie_step: int = 1,
    snapshot_rate: Fraction = Fraction(1, 4),
    source: Path | None = None,
    beacon_every: int = 0,
    inspectorate: VerifyingKey | None = None,
    keep_snapshots: int = 0,
    started: datetime,
    duration: timedelta,
) -> LabConfig:
    """Describe a simulated lab whose secrets all derive from a seed.

    Raises:
        CallerError: an impossible number of chips or an impossible name.
    """
    if chips < 1 or idle_chips < 0 or chips + idle_chips > 4096:
        raise CallerError(f"a lab has 1 … 4096 chips, not {chips} and {idle_chips} idle ones")
    if lie == ChipLie.CLONE_IDENTITY.value and chips < 2:
        raise CallerError("a clone needs another chip: take at least two")
    if re.fullmatch(r"[a-z0-9][a-z0-9-]{0,31}", lab) is None:
        raise CallerError(f"a lab's name is 1 to 32 small letters, digits and '-', not {lab!r}")
    if type(keep_snapshots) is not int or not 0 <= keep_snapshots <= 1 << 20:
        raise CallerError(f"a lab keeps 0 … {1 << 20} snapshots of each chip, not {keep_snapshots!r}")
    if beacon_every < 0:
        raise CallerError(f"beacons come every so many steps, not {beacon_every}")
    if beacon_every and inspectorate is not None:
        raise CallerError("beacons of simulated time are the simulated inspectorate's, which these chips do not obey")
    if not 0 <= seed < 1 << 63:
        raise CallerError(f"seed must lie in 0 … 2^63-1, not {seed}")
    secret = simulated_secret(seed)
    return LabConfig(
        lab=lab,
        secret=secret,
        chips=chips,
        idle_chips=idle_chips,
        beacon_every=beacon_every,
        keep_snapshots=keep_snapshots,
        inspectorate=None if inspectorate is None else inspectorate.raw.hex(),
        lie=lie,
        lie_step=lie_step,
        snapshot_rate=(snapshot_rate.numerator, snapshot_rate.denominator),
        challenge=hashlib.sha256(f"chipwitness/challenge/{secret}".encode()).hexdigest(),
        verifier="inspectorate",
        source=None if source is None else str(source.absolute()),
        started=started.strftime(_TIME),
        declared_end=(started + duration).strftime(_TIME),
    )


def next_lab_config(
    run: Path,
    *,
    lie: str | None,
    lie_step: int,
    source: Path | None,
    started: datetime,
    duration: timedelta,
    lab: str | None = None,
) -> LabConfig:
    """Describe the same lab's next run on the chips of an earlier one, or another ``lab``'s, which has them now.

    Raises:
        CallerError: the earlier run's lab folder is not there.
    """
    earlier = SimulatedLab.read_config(lab_path(run))
    silicon = earlier.silicon or str((lab_path(run) / "chips").absolute())
    return replace(
        earlier,
        lab=lab or earlier.lab,
        made_for=earlier.made_for or earlier.lab,
        lie=lie,
        lie_step=lie_step,
        source=None if source is None else str(source.absolute()),
        started=started.strftime(_TIME),
        declared_end=(started + duration).strftime(_TIME),
        silicon=silicon,
        number=earlier.number + 1,
    )


def chip_ids(config: LabConfig) -> list[str]:
    """Ids of the chips that a lab trains on, bound to the lab so that no two labs of a simulation share one."""
    return [f"{config.made_for or config.lab}-chip-{index:04d}" for index in range(config.chips)]


def idle_chip_ids(config: LabConfig) -> list[str]:
    """Ids of the lab's registered chips that take no part in its run."""
    return [f"{config.made_for or config.lab}-chip-{config.chips + index:04d}" for index in range(config.idle_chips)]


class SimulatedLab:
    """A lab with its key and chips, kept under one folder.

    Attributes:
        chips: those that the run is spread over.
        idle: registered ones that take no part.
        files: writes what lies on the lab's side; with ``sync``, so do the chips.
    """

    def __init__(self, folder: Path, config: LabConfig, chips: list[Chip], files: Files) -> None:
        """``chips`` holds those that train first, then the idle ones."""
        self.files = files
        self.folder = folder
        self.config = config
        self.chips, self.idle = chips[: config.chips], chips[config.chips :]
        self.key = self.lab_key(config)
        self.staging = folder / "staging"
        self.staging.mkdir(exist_ok=True)

    @classmethod
    def create(
        cls, folder: Path, config: LabConfig, clocks: Sequence[Roofline], files: Files | None = None
    ) -> SimulatedLab:
        """Manufacture the chips and set the lab up; an abandoned lab that never began a run is replaced.

        Args:
            clocks: as ``clocks_by_chip``, if the chips are new.
        """
        files = files or Files()
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        files.write(str(folder / _CONFIG), canonical.encode(asdict(config)))
        if config.silicon is not None:
            return cls(folder, config, cls._power_on(folder, config, files), files)
        rate = Fraction(*config.snapshot_rate)
        maker = cls.maker(config)
        chips: list[Chip] = []
        rooflines = cls.clocks_by_chip(config, clocks)
        noted = {name: asdict(each) for name, each in rooflines.items()}
        files.write(str(folder / _CLOCKS), canonical.encode(noted))
        for number, (chip_id, roofline) in enumerate(rooflines.items()):
            lie = _chip_lie(config, number)
            secrets_of = {"clone_of": chip_ids(config)[1]} if lie is ChipLie.CLONE_IDENTITY else {}
            chips.append(
                make_chip(
                    lie,
                    folder / "chips" / chip_id,
                    maker=maker,
                    chip_id=chip_id,
                    seed=_chip_seed(config, secrets_of.get("clone_of", chip_id)),
                    snapshot_rate=rate,
                    roofline=roofline,
                    beacon_key=cls.obeyed_key(config),
                    disk=PosixDisk(durable=files.sync),
                    **secrets_of,
                )
            )
        return cls(folder, config, chips, files)

    @staticmethod
    def clocks_by_chip(config: LabConfig, clocks: Sequence[Roofline]) -> dict[str, Roofline]:
        """What each of its chips does in a tick at most, given those of its run; idle ones do as much as the first."""
        names = [*chip_ids(config), *idle_chip_ids(config)]
        return dict(zip(names, [*clocks, *[clocks[0]] * config.idle_chips], strict=True))

    @classmethod
    def reopen(cls, folder: Path, files: Files | None = None) -> SimulatedLab:
        """Come back after a crash: every chip boots from its non-volatile memory."""
        config, files = cls.read_config(folder), files or Files()
        return cls(folder, config, cls._power_on(folder, config, files), files)

    @staticmethod
    def _power_on(folder: Path, config: LabConfig, files: Files) -> list[Chip]:
        disk = PosixDisk(durable=files.sync)
        return [power_on_chip(lie, silicon, disk=disk) for lie, silicon in _silicon(folder, config).values()]

    @classmethod
    def silicon_of(cls, folder: Path) -> list[str]:
        """Ids of all chips of the lab with this folder; CallerError if there is none."""
        return list(_silicon(folder, cls.read_config(folder)))

    @classmethod
    def power_on(cls, folder: Path, chip_id: str) -> Chip:
        """Boot one of the chips of the lab with this folder."""
        lie, silicon = _silicon(folder, cls.read_config(folder))[chip_id]
        return power_on_chip(lie, silicon)

    @classmethod
    def home_of(cls, folder: Path) -> Path:
        """The folder of the lab that made the chips with which the lab of this folder works."""
        silicon = cls.read_config(folder).silicon
        return folder if silicon is None else Path(silicon).parent

    def power_off(self) -> None:
        """Shut all chips down in order, so that a later run starts without a power gap."""
        for chip in (*self.chips, *self.idle):
            chip.power_off()

    def restart(self) -> None:
        """Shut all chips down in order and boot them again."""
        self.power_off()
        chips = self._power_on(self.folder, self.config, self.files)
        self.chips[:], self.idle[:] = chips[: self.config.chips], chips[self.config.chips :]

    def cut_power(self) -> None:
        """Take the power from all chips at once, as a crash does; `reopen` boots them again."""
        for chip in (*self.chips, *self.idle):
            chip.cut_power()

    @staticmethod
    def read_config(folder: Path) -> LabConfig:
        """Read what the lab was set up with; CallerError if this is no lab folder."""
        path = folder / _CONFIG
        if not path.is_file():
            raise CallerError(f"there is no lab folder {folder}; only the lab that began a run can act for it")
        try:
            raw: Any = canonical.decode(path.read_bytes())
            return LabConfig(**{**raw, "snapshot_rate": tuple(raw["snapshot_rate"])})
        except (EvidenceError, LookupError, TypeError) as error:
            raise CallerError(f"cannot read {path}: {error}") from None

    @staticmethod
    def lab_key(config: LabConfig) -> SigningKey:
        """The key that signs the lab's transcripts."""
        return SigningKey.generate(_derive(config, f"{config.lab}/lab-key"))

    @staticmethod
    def maker(config: LabConfig) -> MakerCA:
        """The chip maker of this simulated world; its key is never stored."""
        return MakerCA.create(_derive(config, "maker"))

    @classmethod
    def certificates(cls, config: LabConfig, clocks: Mapping[str, Roofline]) -> dict[str, Digest]:
        """The device certificate that the maker issues to each chip which it registers, as a digest."""
        maker, rate = cls.maker(config), Fraction(*config.snapshot_rate)
        kinds = {chip: ChipType(rate, clock) for chip, clock in clocks.items()}
        return {
            chip: maker.issue_device(chip, _chip_seed(config, chip), kinds.get(chip)).certificate_digest
            for chip in _registered(config)
        }

    @staticmethod
    def maker_key(config: LabConfig) -> SigningKey:
        """The key with which the maker speaks to a registry; like its CA's, it is never stored."""
        return SigningKey.generate(_derive(config, "maker-registry-key"))

    @staticmethod
    def inspectorate_key(config: LabConfig) -> SigningKey:
        """The key with which the inspectorate of this simulated world signs; no lab's, and never stored."""
        return SigningKey.generate(_derive(config, "inspectorate"))

    @classmethod
    def obeyed_key(cls, config: LabConfig) -> VerifyingKey:
        """Of the inspectorate whose beacons and log checkpoints the chips take."""
        if config.inspectorate is None:
            return cls.inspectorate_key(config).verifying
        return VerifyingKey(bytes.fromhex(config.inspectorate))

    @classmethod
    def reference_values(cls, config: LabConfig, clocks: Mapping[str, Roofline] | None = None) -> dict[str, Any]:
        """Reference values of this simulated world, from maker, registry and inspectorate, as a trust file.

        Args:
            clocks: by chip, as the maker says; None where that is not known yet.
        """
        known = {chip: asdict(clock) for chip, clock in (clocks or {}).items() if chip in _registered(config)}
        key = cls.lab_key(config)
        inspectorates = {cls.inspectorate_key(config).verifying, cls.obeyed_key(config)}
        return {
            "format": "chipwitness/trust/1",
            "makers": [str(cls.maker(config).certificate_digest)],
            "measurements": [str(CURRENT_FIRMWARE.measurement)],
            "minimum_security_version": CURRENT_FIRMWARE.security_version,
            "snapshot_rate": str(Fraction(*config.snapshot_rate)),
            "snapshot_algorithm": DEFAULT_ALGORITHM,
            "labs": {config.lab: key.verifying.raw.hex()},
            "chips": dict.fromkeys(_registered(config), config.lab),
            "verifier": config.verifier,
            "nonce": config.challenge,
            "inspectorates": sorted(each.raw.hex() for each in inspectorates),
            "beacon_seconds": STEP_SECONDS * config.beacon_every or None,
            **({"clocks": known} if known else {}),
        }

    @property
    def clocks(self) -> dict[str, Roofline]:
        """How long a tick of each registered chip is, as the maker of this simulated world noted when it made it."""
        return self.noted_clocks(self.config, self.folder)

    @staticmethod
    def noted_clocks(config: LabConfig, folder: Path) -> dict[str, Roofline]:
        """The same of the chips of a lab with this private folder, or of the one whose chips it goes on with."""
        path = (folder if config.silicon is None else Path(config.silicon).parent) / _CLOCKS
        try:
            noted = canonical.decode(path.read_bytes())
        except OSError:  # of a lab from before the maker noted any
            return {}
        return {chip: Roofline(**noted[chip]) for chip in _registered(config) if chip in noted}

    def remove_staging(self) -> None:
        """Forget files that were staged but never announced."""
        shutil.rmtree(self.staging, ignore_errors=True)
        os.makedirs(self.staging)
        self.files.flush(self.folder)


def _registered(config: LabConfig) -> list[str]:
    """The chips that the registry knows: all, or all but the last where the lab has one that it did not register."""
    working, idle = chip_ids(config), idle_chip_ids(config)
    return [*(working[:-1] if config.lie == LabLie.UNDECLARED_CHIPS.value else working), *idle]


def _silicon(folder: Path, config: LabConfig) -> dict[str, tuple[ChipLie | None, Path]]:
    """Which lie each chip of a lab tells, and the folder that it lies in; those that train first."""
    home = folder / "chips" if config.silicon is None else Path(config.silicon)
    names = [*chip_ids(config), *idle_chip_ids(config)]
    return {name: (_chip_lie(config, number), home / name) for number, name in enumerate(names)}


def _chip_lie(config: LabConfig, number: int) -> ChipLie | None:
    """A lying chip is the lab's first; the others are honest."""
    lie = None if config.lie is None or number else parse_lie(config.lie)
    return lie if isinstance(lie, ChipLie) else None


def _chip_seed(config: LabConfig, chip_id: str) -> bytes:
    return _derive(config, f"chip/{chip_id}")


def _derive(config: LabConfig, label: str) -> bytes:
    return hashlib.sha256(f"chipwitness/derive/{config.secret}/{label}".encode()).digest()
