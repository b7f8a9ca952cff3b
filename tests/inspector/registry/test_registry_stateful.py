"""Random histories against a dictionary: the owner table never differs, and refusals are exactly the model's."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from firmware_sim.evidence import SigningKey
from inspector.registry import (
    ChipRecord,
    ChipState,
    ClaimKind,
    Registry,
    Role,
    StatementRefused,
    audit,
    draw_census,
    list_now,
    publish,
    read_view,
    record_census,
    revoke,
    show_chip,
)

CHIPS = ("a", "b", "c")
LABS = ("fab", "lab-1", "lab-2")
chips = st.sampled_from(CHIPS)
labs = st.sampled_from(LABS)


def key(name: str) -> SigningKey:
    return SigningKey.generate(name.encode().ljust(32, b"."))


class OwnerMap(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="cw-registry-")
        self.model: dict[str, tuple[str, ChipState, int]] = {}
        self.revoked: set[str] = set()

    @initialize()
    def begin(self) -> None:
        path = Path(self.folder.name) / "registry.db"
        self.registry = Registry.create(path, name="model", registrar=key("registrar"), clock=lambda: 1_700_000_000)
        for party, role in {"fab": Role.MAKER, "lab-1": Role.OWNER, "lab-2": Role.OWNER, "eye": Role.INSPECTOR}.items():
            self.registry.enrol(party, role, key(party).verifying)
        self.registry.import_chips([ChipRecord(chip) for chip in CHIPS], maker="fab", label="b", key=key("fab"))
        self.model = dict.fromkeys(CHIPS, ("fab", ChipState.FABRICATED, 0))

    def attempt(self, allowed: bool, act) -> bool:
        try:
            act()
        except StatementRefused:
            assert not allowed
            return False
        assert allowed
        return True

    @rule(chip=chips, sender=labs, receiver=labs)
    def transfer(self, chip: str, sender: str, receiver: str) -> None:
        if sender == receiver:
            return
        holder, state, sequence = self.model[chip]
        done = self.attempt(
            holder == sender and state.present,
            lambda: self.registry.transfer(
                [chip], sender=sender, receiver=receiver, release=key(sender), acceptance=key(receiver)
            ),
        )
        if done:
            self.model[chip] = (receiver, ChipState.OWNED, sequence + 1)

    @rule(chip=chips, claimant=labs, kind=st.sampled_from(ClaimKind))
    def claim(self, chip: str, claimant: str, kind: ClaimKind) -> None:
        holder, state, sequence = self.model[chip]
        witness: dict[str, Any] = {} if kind is ClaimKind.LOST else {"witness": "eye", "witness_key": key("eye")}
        done = self.attempt(
            holder == claimant and (state is ChipState.LOST if kind is ClaimKind.FOUND else state.present),
            lambda: self.registry.claim(kind, [chip], holder=claimant, key=key(claimant), **witness),
        )
        if done:
            after = {
                ClaimKind.LOST: ChipState.LOST,
                ClaimKind.FOUND: ChipState.OWNED,
                ClaimKind.DESTROYED: ChipState.DESTROYED,
            }
            self.model[chip] = (holder, after[kind], sequence + 1)

    @rule(shown=st.sets(chips))
    def census(self, shown: set[str]) -> None:
        held = [chip for chip, (_, state, _) in self.model.items() if state.present]
        if not held:
            return
        census = draw_census(self.registry, count=len(held), seed=bytes(32), inspector="eye", key=key("eye"))
        assert set(census.chips) == set(held)
        answers = {chip: chip for chip in held if chip in shown}
        outcome = record_census(self.registry, census.number, answers, inspector="eye", key=key("eye"))
        assert {gone.chip for gone in outcome.missing} == set(held) - shown
        for chip in set(held) - shown:
            holder, _, sequence = self.model[chip]
            self.model[chip] = (holder, ChipState.LOST, sequence + 1)

    @rule(chip=chips)
    def revoke(self, chip: str) -> None:
        """A revocation is one more record of the chip, once, and moves nothing."""
        if self.attempt(chip not in self.revoked, lambda: revoke(self.registry, [chip], reason="secrets are out")):
            holder, state, sequence = self.model[chip]
            self.model[chip] = (holder, state, sequence + 1)
            self.revoked.add(chip)

    @rule()
    def publish(self) -> None:
        """What the tables say and what the log implies are one list under one root."""
        publish(self.registry)
        view = read_view(self.registry, registrar=key("registrar").verifying)
        assert view.listing.root == view.publication.map_root == list_now(self.registry).root
        assert view.later == 0
        for chip, (holder, state, sequence) in self.model.items():
            entry = view.listing.chip(chip)
            assert entry is not None
            assert (entry["holder"], entry["state"], entry["sequence"]) == (holder, state.name.lower(), sequence)
            assert entry["revoked"] == (chip in self.revoked)

    @invariant()
    def table_equals_model(self) -> None:
        for chip, expected in self.model.items():
            view = show_chip(self.registry, chip)
            assert (view.holder, view.state, view.sequence) == expected

    def teardown(self) -> None:
        if self.model:
            assert audit(self.registry, registrar=key("registrar").verifying).findings == ()
            self.registry.close()
        self.folder.cleanup()


OwnerMap.TestCase.settings = settings(
    max_examples=12, stateful_step_count=15, deadline=None, derandomize=True, database=None
)
TestOwnerMap = OwnerMap.TestCase
