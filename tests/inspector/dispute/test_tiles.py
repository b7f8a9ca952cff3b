"""One tile decides: the injected lie is named with step, operator and tile, and no honest party is found guilty."""

from __future__ import annotations

import base64
import math
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from firmware_sim import limits
from firmware_sim.evidence import SigningKey, canonical, decode_base64
from inspector.dispute.claim import Claim
from inspector.dispute.game import Party, check_game, play
from inspector.dispute.messages import Failure, Traffic
from inspector.dispute.openings import Allowance, state_tensor
from inspector.dispute.provider import Provider, Remote
from inspector.inspection.transcripts import open_run
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome
from inspector.wire.desk import Desk, Local
from monitor import Recorder
from monitor.lab.conduct import Conduct
from monitor.lab.prover import LabProver
from tests.lying import tell_with

NOW = datetime(2026, 1, 1, tzinfo=UTC)
REFEREE = SigningKey.generate(bytes(32))
VOCABULARY, WIDTH, ROWS = 4200, 64, 70
STEP = 2
CHUNK = (1 << 20) // 4


class Wrong(Conduct):
    """One element of one result of the last call of an operator in a step is wrong."""

    def __init__(self, step: int, operator: str, slot: int, place: int, shape: tuple[int, ...]) -> None:
        self._step, self._operator, self._shape = step, operator, shape
        self._slot, self._place = slot, place

    def observer(self, step):
        return self if step == self._step else None

    def before(self, index, func, args, kwargs):
        pass

    def after(self, index, func, args, kwargs, out):
        results = [out] if isinstance(out, Tensor) else list(out) if isinstance(out, tuple) else []
        if str(func) == self._operator and tuple(results[self._slot].shape) == self._shape:
            with torch.no_grad():
                results[self._slot].view(-1)[self._place] += 1.0


class Model(nn.Module):
    """An embedding, a normalisation, and a head with a large vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, words):
        return self.head(self.norm(self.embedding(words)))


def record(folder: Path, name: str, numerics: str = "exact", lie: str | None = None) -> Path:
    torch.manual_seed(1)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    settings: dict[str, Any]
    settings = {"seed": 5, "chips": 2, "checkpoint_every": 2, "snapshot_rate": Fraction(1, 2), "hours": 1.0}
    more: dict[str, Any] = {"lie": lie, "lie_step": STEP} if lie else {}
    out, started = folder / name, NOW - timedelta(hours=1)
    recorder = Recorder(model, optimizer, out=out, lab=name, started=started, numerics=numerics, **settings, **more)
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        words = torch.randint(0, VOCABULARY, (ROWS,), generator=generator)
        with recorder.step({"words": words}):
            optimizer.zero_grad()
            functional.cross_entropy(model(words), words.roll(1)).backward()
            optimizer.step()
    recorder.finish()
    return out


def trust_of(*runs: Path) -> Trust:
    return Trust.load([run.with_name(f"{run.name}.trust.json") for run in runs])


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    return record(tmp_path_factory.mktemp("tiles"), "honest")


def wrong(monkeypatch, folder, *lie, numerics="exact"):
    tell_with(monkeypatch, "wrong-operator", lambda at: Wrong(at, *lie))
    return record(folder, "liar", numerics, "wrong-operator")


def party(folder, run, trust, change=None):
    """A party in this process; ``change(text, answer)`` gives another body, or raises."""
    prover = LabProver(run)
    provider = Provider(open_run(run, trust), prover)

    def answer(text):
        return provider.answer(text) if change is None else change(text, lambda: provider.answer(text))

    desk = Desk(folder / f"desk-{run.name}", answer, prover.key, [REFEREE.verifying], open_run(run, trust).manifest.run)
    return Party(name=run.name, key=prover.key.verifying, transport=Local(desk))


def played(folder, honest, liar, /, **changes):
    """Verdict of a game, which its evidence gives again when both are gone."""
    trust = trust_of(honest, liar)
    parties = [party(folder, run, trust, changes.get(run.name)) for run in (honest, liar)]
    verdict, data = play(parties, trust, REFEREE, seconds=5, now=NOW)
    again = check_game(data, trust)
    assert {**again.evidence, "verifies": None} == {**verdict.evidence, "verifies": None}
    assert again.evidence["verifies"]
    return verdict


LARGE = (VOCABULARY, WIDTH)
SCORES = (ROWS, VOCABULARY)
UPDATE = ("aten.addcdiv_.default", 0, 265_000, LARGE)
LIES_TOLD = {
    "update": UPDATE,
    "product": ("aten.addmm.default", 0, 265_000, SCORES),
    "softmax": ("aten._log_softmax.default", 0, 265_000, SCORES),
    "layer norm": ("aten.native_layer_norm.default", 0, 4000, (ROWS, WIDTH)),
    "gradient": ("aten.embedding_dense_backward.default", 0, 265_000, LARGE),
    "lookup": ("aten.embedding.default", 0, 4000, (ROWS, WIDTH)),
}


@pytest.mark.parametrize("kind", LIES_TOLD)
def test_the_lie_is_named_with_its_tile(honest, tmp_path, monkeypatch, kind):
    """Large results have two chunks, and the lie is in the second."""
    operator, slot, place, shape = LIES_TOLD[kind]
    verdict = played(tmp_path, honest, wrong(monkeypatch, tmp_path, operator, slot, place, shape))
    evidence = verdict.evidence
    assert verdict.outcome is Outcome.REJECT
    assert [evidence[key] for key in ("guilty", "step", "operator", "case")] == ["liar", STEP, operator, "output"]
    first, last = (0, math.prod(shape) - 1) if place < CHUNK else (CHUNK, math.prod(shape) - 1)
    assert evidence["tile"] == f"elements {first} to {last} of result {slot}"
    assert evidence["tile"] in verdict.reasons[0].text


@pytest.fixture(scope="module")
def rounding(tmp_path_factory):
    return record(tmp_path_factory.mktemp("rounding"), "honest", "rounded")


@pytest.mark.parametrize("kind", ["update", "product", "softmax", "layer norm", "lookup"])
def test_a_tile_decides_under_rounded_numerics_too(rounding, tmp_path, monkeypatch, kind):
    """Under the entries of its log that are about the tile; where nothing is rounded, as under exact numerics."""
    operator, slot, place, shape = LIES_TOLD[kind]
    evidence = played(tmp_path, rounding, wrong(monkeypatch, tmp_path, *LIES_TOLD[kind], numerics="rounded")).evidence
    assert [evidence[key] for key in ("guilty", "operator", "case")] == ["liar", operator, "output"]
    first, last = (0, math.prod(shape) - 1) if place < CHUNK else (CHUNK, math.prod(shape) - 1)
    assert evidence["tile"] == f"elements {first} to {last} of result {slot}"


@pytest.mark.parametrize("kind", ["product", "lookup", "layer norm"])
def test_a_party_with_a_malformed_log_is_guilty(rounding, tmp_path, monkeypatch, kind):
    def change(text, asked):
        return canonical.encode(base64.b64encode(b"junk").decode()) if text.startswith("entries") else asked()

    liar = wrong(monkeypatch, tmp_path, *LIES_TOLD[kind], numerics="rounded")
    evidence = played(tmp_path, rounding, liar, liar=change).evidence
    assert [evidence[key] for key in ("guilty", "operator")] == ["liar", LIES_TOLD[kind][0]]


def test_of_sums_of_scattered_rows_all_is_computed(rounding, tmp_path, monkeypatch):
    lie = LIES_TOLD["gradient"]
    evidence = played(tmp_path, rounding, wrong(monkeypatch, tmp_path, *lie, numerics="rounded")).evidence
    assert [evidence[key] for key in ("guilty", "operator", "case", "tile")] == ["liar", lie[0], "output", None]


@pytest.fixture(scope="module")
def liar(tmp_path_factory):
    """A lab with a wrong optimizer update."""
    with pytest.MonkeyPatch.context() as patch:
        yield wrong(patch, tmp_path_factory.mktemp("tiles"), *UPDATE)


def changed_byte(body: bytes) -> bytes:
    content = bytearray(decode_base64(canonical.decode(body)))
    content[-1] ^= 1
    return canonical.encode(base64.b64encode(content).decode())


def shorter(body: bytes) -> bytes:
    return canonical.encode(base64.b64encode(decode_base64(canonical.decode(body))[:-32]).decode())


@pytest.mark.parametrize("name", ["honest", "liar"])
@pytest.mark.parametrize(("kind", "change"), [("chunk", changed_byte), ("hashes", shorter)])
def test_a_party_that_signs_another_chunk_or_proof_has_lost(honest, liar, tmp_path, name, kind, change):
    """It contradicts what it has committed to, whatever else is true."""

    def tampered(text, answer):
        return change(answer()) if text.startswith(kind) else answer()

    trust = trust_of(honest, liar)
    parties = [party(tmp_path, run, trust, tampered if run.name == name else None) for run in (honest, liar)]
    if name == "liar":
        parties.reverse()
    verdict, data = play(parties, trust, REFEREE, seconds=5, now=NOW)
    assert (verdict.outcome, verdict.evidence["guilty"]) == (Outcome.REJECT, name)
    assert "that it opens is not" in verdict.reasons[0].text
    assert check_game(data, trust).evidence["guilty"] == name


def test_a_tile_decides_where_all_operands_are_too_many(honest, liar, tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "OPERANDS_BYTES", limits.Limit(3 << 20, "bytes of operands"))
    assert played(tmp_path / "tile", honest, liar).evidence["guilty"] == "liar"
    monkeypatch.setattr("inspector.dispute.tiles.find", lambda func: None)
    verdict = played(tmp_path / "whole", honest, liar)
    assert (verdict.outcome, verdict.evidence["guilty"]) == (Outcome.INCONCLUSIVE, None)
    assert "aten.addcdiv_.default is not computed in tiles: " in verdict.reasons[0].text


def test_without_tiles_all_of_the_operator_decides(honest, liar, tmp_path, monkeypatch):
    monkeypatch.setattr("inspector.dispute.tiles.find", lambda func: None)
    evidence = played(tmp_path, honest, liar).evidence
    assert [evidence[key] for key in ("guilty", "operator", "tile")] == ["liar", UPDATE[0], None]


def test_an_edited_state_is_named_by_a_tile_of_its_source(honest, tmp_path, monkeypatch):
    class Edited(Conduct):
        def __init__(self, step):
            self._step = step

        def before_commit(self, moment):
            if moment.step == self._step:
                moment.memory.tensors["weight", "head.weight"].view(-1)[265_000] += 1.0

    tell_with(monkeypatch, "wrong-operator", Edited)
    evidence = played(tmp_path, honest, record(tmp_path, "liar", lie="wrong-operator")).evidence
    assert [evidence[key] for key in ("guilty", "step", "case")] == ["liar", STEP, "input"]
    assert evidence["tile"].startswith(f"elements {CHUNK} to {math.prod(LARGE) - 1} of input ")


@pytest.mark.parametrize("change", ["value", "hash", "fewer hashes", "number", "step"])
def test_a_block_of_a_state_is_taken_by_its_proof_alone(honest, change):
    trust = trust_of(honest)
    prover = LabProver(honest)
    provider = Provider(open_run(honest, trust), prover)
    asked = {"is_honest": True}

    def ask(text, most):
        if asked["is_honest"] or not text.startswith("block"):
            return provider.answer(text)
        if change == "number":
            return provider.answer(text.replace("block 1 1", "block 1 0"))
        if change == "step":
            return provider.answer(text.replace("block 1 ", "block 2 "))
        stated = canonical.decode(provider.answer(text))
        content, proof = bytearray(decode_base64(stated["block"])), stated["proof"]
        content[0] ^= change == "value"
        proof[0] = "00" * 32 if change == "hash" else proof[0]
        block = base64.b64encode(content).decode()
        return canonical.encode({"block": block, "proof": proof[change == "fewer hashes" :]})

    def tensor():
        claim = Claim("honest", Remote(ask), prover.key.verifying, Traffic())
        return state_tensor([claim.party], Allowance(), claim.declared, 1, "weight/head.weight")

    truth = prover._reexecution.state(1).export()["weight/head.weight"].clone()
    assert torch.equal(tensor().whole(), truth)
    places = torch.tensor([5, 265_000])
    assert torch.equal(tensor().fetch(places), truth.view(-1)[places])
    asked["is_honest"] = False
    with pytest.raises(Failure):
        tensor().fetch(places[1:])
