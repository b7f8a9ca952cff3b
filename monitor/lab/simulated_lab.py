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
from dataclasses import InitVar, asdict, dataclass, field, fields, replace
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

from firmware_sim import (
    CHIP_LIES,
    CURRENT_FIRMWARE,
    DEFAULT_ALGORITHM,
    Chip,
    ChipType,
    MakerCA,
    PosixDisk,
    Roofline,
    make_chip,
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
    "simulated_secret",
]

_TIME = "%Y-%m-%dT%H:%M:%SZ"
_CONFIG = "lab.json"
_CLONE = "clone-identity"
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
    """A simulated lab: all that there is to say of it but its task.

    Attributes:
        lab: its name: small letters, digits and ``-``; runs of one world have labs of different names.
        seed: from which the secret derives, unless one is given; 0 … 2^63-1.
        secret: 64 hex digits; keys, salts and the chips' secrets derive from it.
        chips: number of chips that the state is spread over.
        idle_chips: registered chips that take no part in the run; what they say is left in ``RUN.answers``.
        lie: name of the one lie that this lab tells (``train --lie list``), or None. Its recorder repeats no steps.
        lie_step: step at which it departs from honesty.
        snapshot_rate: how likely a chip takes a snapshot in a tick of its clock. In a tick it reads or writes its part
            of the state about four times, as the smallest steps do; most steps take several.
        challenge: 64 hex digits, the verifier's nonce that the chips' quotes answer; it derives from the secret.
        verifier: the name under which the verifier challenges the chips.
        source: the user's data file, or None.
        started: UTC time of the start; by default now.
        duration: until the declared end of the run.
        silicon: folder of the chips of an earlier run that go on in this one, or None for new chips.
        beacon_every: steps from one beacon of the simulated inspectorate to the next; 0 for none.
        inspectorate: public key of the inspectorate that the chips are made to obey; None for the simulated one.
        keep_snapshots: of how many of each chip's newest snapshots the lab stores the bytes, to open them on demand.
        number: of the run among those of its lab, so that each has its own salts.
        made_for: the lab whose name the chips bear, where that is another: it has passed them on.

    Raises:
        CallerError: an impossible number or name.
    """

    lab: str = "lab-1"
    seed: InitVar[int] = 0
    secret: str = ""
    chips: int = 4
    idle_chips: int = 0
    lie: str | None = None
    lie_step: int = 1
    snapshot_rate: Fraction = Fraction(1, 4)
    challenge: str = ""
    verifier: str = "inspectorate"
    source: Path | None = None
    started: datetime = field(default_factory=lambda: datetime.now(UTC).replace(microsecond=0))
    duration: timedelta = timedelta(hours=24)
    silicon: str | None = None
    beacon_every: int = 0
    number: int = 0
    inspectorate: VerifyingKey | None = None
    keep_snapshots: int = 0
    made_for: str | None = None

    def __post_init__(self, seed: int) -> None:
        chips, idle_chips, keep_snapshots = self.chips, self.idle_chips, self.keep_snapshots
        if chips < 1 or idle_chips < 0 or chips + idle_chips > 4096:
            raise CallerError(f"a lab must have 1 … 4096 chips, not {chips} and {idle_chips} idle ones")
        if self.lie == _CLONE and chips < 2:
            raise CallerError("a clone needs another chip: take at least two")
        if re.fullmatch(r"[a-z0-9][a-z0-9-]{0,31}", self.lab) is None:
            raise CallerError(f"a lab's name must be 1 to 32 small letters, digits and '-', not {self.lab!r}")
        if type(keep_snapshots) is not int or not 0 <= keep_snapshots <= 1 << 20:
            raise CallerError(f"a lab can keep 0 … {1 << 20} snapshots of each chip, not {keep_snapshots!r}")
        if self.beacon_every < 0:
            raise CallerError(f"beacons come every N steps, where N must be at least 0, not {self.beacon_every}")
        if self.beacon_every and self.inspectorate is not None:
            raise CallerError(
                "these chips accept time beacons of another inspectorate, not those of the simulated one: leave "
                "beacon_every out"
            )
        if not 0 <= seed < 1 << 63:
            raise CallerError(f"seed must lie in 0 … 2^63-1, not {seed}")
        secret = self.secret or simulated_secret(seed)
        challenge = self.challenge or hashlib.sha256(f"chipwitness/challenge/{secret}".encode()).hexdigest()
        object.__setattr__(self, "snapshot_rate", Fraction(self.snapshot_rate))
        object.__setattr__(self, "secret", secret)
        object.__setattr__(self, "challenge", challenge)

    @classmethod
    def following(cls, run: Path, **changes: Any) -> LabConfig:
        """The same lab's next run on the chips of an earlier one, or another ``lab``'s, which has them now.

        Args:
            changes: fields of the next run: its times, its lie and its data.

        Raises:
            CallerError: the earlier run's lab folder is not there.
        """
        earlier = SimulatedLab.read_config(lab_path(run))
        return replace(
            earlier,
            **{"lie": None, "lie_step": 1, "source": None, **changes},
            silicon=earlier.silicon or str((lab_path(run) / "chips").absolute()),
            made_for=earlier.made_for or earlier.lab,
            number=earlier.number + 1,
        )

    @property
    def nonce(self) -> bytes:
        """The challenge as bytes."""
        return bytes.fromhex(self.challenge)

    @property
    def begin(self) -> str:
        """Time of the start, as evidence states it."""
        return self.started.strftime(_TIME)

    @property
    def end(self) -> str:
        """Time of the declared end."""
        return (self.started + self.duration).strftime(_TIME)

    def encoded(self) -> bytes:
        """What ``decode`` reads."""
        values: dict[str, object] = {each.name: getattr(self, each.name) for each in fields(self)}
        del values["duration"]
        values |= {
            "snapshot_rate": self.snapshot_rate.as_integer_ratio(),
            "started": self.begin,
            "declared_end": self.end,
        }
        values["source"] = None if self.source is None else str(self.source.absolute())
        values["inspectorate"] = None if self.inspectorate is None else self.inspectorate.raw.hex()
        return canonical.encode(values)

    @classmethod
    def decode(cls, data: bytes) -> LabConfig:
        """Parse; EvidenceError, LookupError, TypeError or ValueError on another form."""
        raw: Any = canonical.decode(data)
        started, end = (
            datetime.strptime(raw.pop(name), _TIME).replace(tzinfo=UTC) for name in ("started", "declared_end")
        )
        key, source, rate = (raw.pop(name, None) for name in ("inspectorate", "source", "snapshot_rate"))
        return cls(
            **raw,
            started=started,
            duration=end - started,
            snapshot_rate=Fraction(*rate),
            source=None if source is None else Path(source),
            inspectorate=None if key is None else VerifyingKey(bytes.fromhex(key)),
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
        files.write(str(folder / _CONFIG), config.encoded())
        if config.silicon is not None:
            return cls(folder, config, cls._power_on(folder, config, files), files)
        maker = cls.maker(config)
        chips: list[Chip] = []
        rooflines = cls.clocks_by_chip(config, clocks)
        noted = {name: asdict(each) for name, each in rooflines.items()}
        files.write(str(folder / _CLOCKS), canonical.encode(noted))
        for number, (chip_id, roofline) in enumerate(rooflines.items()):
            lie = _chip_lie(config, number)
            secrets_of = {"clone_of": chip_ids(config)[1]} if lie == _CLONE else {}
            chips.append(
                make_chip(
                    lie,
                    folder / "chips" / chip_id,
                    maker=maker,
                    chip_id=chip_id,
                    seed=_chip_seed(config, secrets_of.get("clone_of", chip_id)),
                    snapshot_rate=config.snapshot_rate,
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
            return LabConfig.decode(path.read_bytes())
        except (CallerError, EvidenceError, LookupError, TypeError, ValueError) as error:
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
        maker, rate = cls.maker(config), config.snapshot_rate
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
        return config.inspectorate or cls.inspectorate_key(config).verifying

    @classmethod
    def reference_values(cls, config: LabConfig, clocks: Mapping[str, Roofline] | None = None) -> dict[str, object]:
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
            "snapshot_rate": str(config.snapshot_rate),
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
    return [*(working[:-1] if config.lie == "undeclared-chips" else working), *idle]


def _silicon(folder: Path, config: LabConfig) -> dict[str, tuple[str | None, Path]]:
    """Which lie each chip of a lab tells, and the folder that it lies in; those that train first."""
    home = folder / "chips" if config.silicon is None else Path(config.silicon)
    names = [*chip_ids(config), *idle_chip_ids(config)]
    return {name: (_chip_lie(config, number), home / name) for number, name in enumerate(names)}


def _chip_lie(config: LabConfig, number: int) -> str | None:
    """A lying chip is the lab's first; the others are honest."""
    return config.lie if config.lie in CHIP_LIES and not number else None


def _chip_seed(config: LabConfig, chip_id: str) -> bytes:
    return _derive(config, f"chip/{chip_id}")


def _derive(config: LabConfig, label: str) -> bytes:
    return hashlib.sha256(f"chipwitness/derive/{config.secret}/{label}".encode()).digest()
