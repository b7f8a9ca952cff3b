"""A simulated lab's chips in a registry: what their maker, the lab and the registrar do before a run begins.

The folder holds the directory (``registry.db``) and the registrar's keys. Maker and lab sign with keys that derive from
the lab's seed and are never stored; the registrar's private key lies next to the directory only because one hand plays
all parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from firmware_sim.errors import CallerError, file_error
from firmware_sim.evidence import SigningKey
from inspector import registry as reg
from inspector.inspection.registry_trust import trust_of
from inspector.inspection.trust import Trust
from monitor.lab.simulated_lab import SimulatedLab

if TYPE_CHECKING:
    from monitor.lab.simulated_lab import LabConfig

__all__ = ["REGISTRAR_KEY", "register_lab", "registered_trust"]

DATABASE = "registry.db"
REGISTRAR_KEY = "registrar.key"
_MODEL = "simulated chip"


def registered_trust(folder: Path, config: LabConfig, trust: Trust) -> Trust:
    """Register a simulated lab and return ``trust`` as the registry's published view has it.

    What an inspectorate countersigns, and how long the chips' ticks are, stays as ``trust`` has it.
    """
    register_lab(folder, config, trust)
    registrar = reg.load_public(folder / f"{REGISTRAR_KEY}.pub")
    with reg.Registry.open(folder / DATABASE) as registry:
        view = reg.read_view(registry, registrar=registrar)
    found = trust_of(view, registrar=registrar, labs=[config.lab], verifier=trust.verifier, nonce=trust.nonce)
    chips = replace(found.chip_trust, clocks=trust.chip_trust.clocks)
    return replace(found, chip_trust=chips, inspectorates=trust.inspectorates, countersigned=trust.countersigned)


def register_lab(folder: Path, config: LabConfig, trust: Trust) -> None:
    """Bring the lab, its maker and its chips into the registry in ``folder``, made if need be, and publish a view.

    Repeating it changes nothing but the view.

    Raises:
        CallerError: the registry knows the lab, its maker or a chip otherwise: as of another simulation.
    """
    lab, maker = SimulatedLab.lab_key(config), SimulatedLab.maker_key(config)
    (ca_digest,) = trust.chip_trust.ca_digests
    maker_name = f"maker-{ca_digest.value.hex()[:12]}"
    registrar = _registrar(folder)
    with reg.Registry.open(folder / DATABASE, registrar=registrar) as registry:
        listed = reg.list_now(registry)
        for name, role, key in (
            (maker_name, reg.Role.MAKER, maker.verifying),
            (config.lab, reg.Role.OWNER, lab.verifying),
        ):
            known = listed.party(name)
            if known is None:
                registry.enrol(name, role, key)
            elif known["key"] != key.raw.hex():
                raise CallerError(
                    f"the registry {folder} already has a different {name}: choose another --lab, or the same --seed "
                    "as before"
                )
        _give_values(registry, trust, maker_name, maker, listed.values(maker_name))
        issued = SimulatedLab.certificates(config, trust.chip_trust.clocks)
        certificates = {chip: str(digest) for chip, digest in issued.items()}
        new = _new_chips(listed, certificates, folder)
        if new:
            records = [reg.ChipRecord(chip, _MODEL, certificates[chip]) for chip in new]
            label = f"{config.lab}/{new[0]}"[:64]
            registry.import_chips(records, maker=maker_name, label=label, key=maker)
            registry.transfer(new, sender=maker_name, receiver=config.lab, release=maker, acceptance=lab)
        reg.publish(registry)


def _registrar(folder: Path) -> SigningKey:
    """The registrar's key in ``folder``; a registry that is not there yet is made."""
    if not (folder / DATABASE).exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise file_error(f"cannot make the registry {folder}", error) from None
        key = SigningKey.generate()
        reg.write_keys(folder / REGISTRAR_KEY, key)
        reg.Registry.create(folder / DATABASE, name="simulated", registrar=key).close()
    return reg.load_private(folder / REGISTRAR_KEY)


def _give_values(
    registry: reg.Registry, trust: Trust, maker: str, key: SigningKey, given: dict[str, object] | None
) -> None:
    chips = trust.chip_trust
    values = reg.ReferenceValues(
        registry=registry.origin,
        maker=maker,
        ca_digests=tuple(sorted(chips.ca_digests, key=str)),
        measurements=tuple(sorted(chips.measurements, key=str)),
        minimum_security_version=chips.minimum_security_version,
        snapshot_rate=Fraction(chips.snapshot_rate),
        snapshot_algorithm=chips.snapshot_algorithm,
        time=registry.clock(),
    )
    if given is None:
        registry.submit(reg.sign(values, key))
    elif {name: given[name] for name in values.content()} != values.content():
        raise CallerError(
            f"{maker} has published other reference values for its chips: choose another --seed or --snapshot-rate"
        )


def _new_chips(listed: reg.Listing, certificates: dict[str, str], folder: Path) -> Sequence[str]:
    new = []
    for chip, certificate in certificates.items():
        entry = listed.chip(chip)
        if entry is None:
            new.append(chip)
        elif entry["identity"] != certificate:
            raise CallerError(f"the registry {folder} already has a different chip {chip}: choose another --lab")
    return new
