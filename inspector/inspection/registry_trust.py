"""An inspector's trust, put together from what the registry has signed and from the inspector's own challenge."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from firmware_sim import limits
from firmware_sim.checks import ChipTrust
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import Digest, VerifyingKey
from inspector.inspection.trust import Trust
from inspector.registry import PublishedView, Role
from inspector.registry.listing import Listing, Proven, read_chip_entry
from inspector.registry.positions import read_spans
from inspector.registry.registry_view import RegisteredChips

__all__ = ["trust_of"]


def trust_of(
    view: PublishedView, *, registrar: VerifyingKey, labs: Sequence[str] = (), verifier: str, nonce: bytes
) -> Trust:
    """The trust file of an inspector who goes by a published view.

    Chips that are lost, destroyed or revoked are listed with their proofs but never drawn: a run that uses one is
    rejected. The minimum security version is the largest that a maker demands.

    Args:
        labs: whose runs are inspected; all owners who have a chip, if none is named.
        verifier: this inspector's id; nonce: its challenge of 32 bytes.

    Raises:
        CallerError: a lab is not enrolled as an owner or has no chip, a chip has no certificate, a maker has given no
            reference values, two makers' chips take snapshots on different schedules, or a chip was revoked since.
    """
    if len(nonce) != 32:
        raise CallerError("a nonce must have 32 bytes")
    listing = view.listing
    proven = listing.chips_of(labs or listing.owners())
    outdated = sorted(view.revoked_later & set(proven))
    if outdated:
        raise CallerError(f"chip {outdated[0]} was revoked after the newest view was published: publish another first")
    past = {chip: {lab for lab, _, _ in read_spans(each.entry)} for chip, each in proven.items()}
    usable = _usable(proven, labs or listing.owners())
    owners = set(listing.owners())
    had = owners.intersection(*[set().union(*past.values())])
    names = sorted(set(labs or [*usable.values(), *had]))
    if not names:
        raise CallerError("no owner has a chip in the registry's published view")
    keys = {name: _key(listing, name) for name in names}
    for lab in names:
        if lab not in usable.values() and lab not in had:
            raise CallerError(f"the registry gives no chip to {lab}")
    _check_names(names, usable)
    return Trust(
        chip_trust=_chip_trust(
            listing, {proven[chip].entry["maker"] for chip in [*usable, *(chip for chip in past if past[chip])]}
        ),
        labs=keys,
        chips=usable,
        verifier=verifier,
        nonce=nonce,
        registry=RegisteredChips.open(view.signed, proven, key=registrar, origin=view.publication.registry),
    )


def _usable(proven: Mapping[str, Proven], holders: Sequence[str]) -> dict[str, str]:
    """Who holds each chip that may be drawn."""
    return {
        chip: each.entry["holder"]
        for chip, each in proven.items()
        if read_chip_entry(each.entry, chip).present and not each.entry["revoked"] and each.entry["holder"] in holders
    }


def _key(listing: Listing, lab: str) -> VerifyingKey:
    entry = listing.party(lab)
    if entry is None or entry["role"] != Role.OWNER.value:
        raise CallerError(f"{lab} is not enrolled as an owner in the registry's published view")
    return VerifyingKey(bytes.fromhex(entry["key"]))


def _check_names(labs: Iterable[str], chips: Iterable[str]) -> None:
    """A registry takes names that no run folder can have."""
    try:
        for lab in labs:
            limits.check_lab(lab)
        for chip in chips:
            limits.check_chip_id(chip)
    except EvidenceError as error:
        raise CallerError(f"the registry has a lab whose name no run can use: {error}") from None


def _chip_trust(listing: Listing, makers: Iterable[str]) -> ChipTrust:
    values = []
    for maker in sorted(makers):
        given = listing.values(maker)
        if given is None:
            raise CallerError(f"{maker} has not published reference values: run 'registry reference-values' first")
        values.append(given)
    schedules = {(each["snapshot_rate"], each["snapshot_algorithm"]) for each in values}
    if len(schedules) > 1:
        raise CallerError(
            "the chips of these makers take snapshots on different schedules, but a trust file can hold only one "
            "schedule"
        )
    ((rate, algorithm),) = schedules
    return ChipTrust(
        ca_digests=frozenset(Digest.parse(text) for each in values for text in each["makers"]),
        measurements=frozenset(Digest.parse(text) for each in values for text in each["measurements"]),
        minimum_security_version=max(each["minimum_security_version"] for each in values),
        snapshot_rate=Fraction(rate),
        snapshot_algorithm=algorithm,
    )
