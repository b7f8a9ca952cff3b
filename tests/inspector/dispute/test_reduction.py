"""An element that is too large for a tile is decided by one part of it; no honest party is found guilty."""

from __future__ import annotations

import base64
from typing import cast

import pytest
import torch

from firmware_sim.evidence import Node, canonical, merge
from inspector.dispute.messages import CheckedProver, Contradiction, Failure, Traffic
from inspector.dispute.provider import Remote
from monitor.lab.prover import LabProver
from monitor.numerics.operators.partial_sums import Part, combined
from monitor.sharding import Layout
from tests.inspector.dispute import test_tiles as tiles
from tests.inspector.dispute.test_tiles import ROWS, STEP, WIDTH

VOCABULARY, PARTS = 300, 16

GRADIENT = ("aten.mm.default", 0, 100, (ROWS, WIDTH))
REDUCED = {
    "product": GRADIENT,
    "loss": ("aten.nll_loss_forward.default", 1, 0, ()),
    "sum": ("aten.sum.dim_IntList", 0, 250, (1, VOCABULARY)),
}


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_small():
    """A small model, of which all is divided that can be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "VOCABULARY", VOCABULARY)
        patch.setattr("inspector.dispute.tiles.OF_A_TILE", 0)
        for name, value in {"OF_A_TILE": 0, "OF_A_PART": 0, "MOST_PARTS": PARTS}.items():
            patch.setattr(f"inspector.dispute.reduction.{name}", value)
        yield


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    return tiles.record(tmp_path_factory.mktemp("reduction"), "honest")


@pytest.fixture(scope="module")
def liar(tmp_path_factory):
    """A lab with one wrong element of the gradient that the head passes on."""
    with pytest.MonkeyPatch.context() as patch:
        yield tiles.wrong(patch, tmp_path_factory.mktemp("reduction"), *GRADIENT)


def decided(evidence):
    return [evidence[key] for key in ("guilty", "step", "operator", "case", "tile")]


@pytest.fixture(scope="module")
def rounding(tmp_path_factory):
    return tiles.record(tmp_path_factory.mktemp("rounding"), "honest", "rounded")


@pytest.mark.parametrize("numerics", ["exact", "rounded"])
@pytest.mark.parametrize("kind", REDUCED)
def test_who_states_another_element_than_its_parts_give_is_named(
    honest, rounding, tmp_path, monkeypatch, kind, numerics
):
    operator, slot, place, shape = REDUCED[kind]
    right, lie = (honest if numerics == "exact" else rounding), (operator, slot, place, shape)
    verdict = tiles.played(tmp_path, right, tiles.wrong(monkeypatch, tmp_path, *lie, numerics=numerics))
    tile = f"the sum of {PARTS} parts of element {place} of result {slot}"
    assert decided(verdict.evidence) == ["liar", STEP, operator, "output", tile]
    assert verdict.evidence["rounds"] <= 1 + 1 + 6 + 4


def test_under_rounded_numerics_the_part_that_is_another_is_named(rounding, tmp_path, monkeypatch):
    def forge(parts):
        parts[7][1][0] += 1 << 344  # one more, as the liar's element is

    liar = tiles.wrong(monkeypatch, tmp_path, *GRADIENT, numerics="rounded")
    verdict = tiles.played(tmp_path, rounding, liar, liar=changing(forge))
    tile = f"part 8 of {PARTS} of element {GRADIENT[2]} of result {GRADIENT[1]}"
    assert decided(verdict.evidence) == ["liar", STEP, GRADIENT[0], "output", tile]


@pytest.fixture(scope="module")
def wanted(liar):
    """The element that it states."""
    operator, slot, place, _ = GRADIENT
    prover = LabProver(liar)
    index = next(node.index for node in prover._trace(STEP)[0] if node.operator == operator)
    return torch.frombuffer(bytearray(prover._contents(STEP, index)["out"][slot]), dtype=torch.float32)[place].item()


def changing(change):
    """Changes a party's parts."""

    def answer(text, asked):
        body = asked()
        if not text.startswith("parts"):
            return body
        parts = [[[int(x, 16) for x in kind] for kind in part] for part in canonical.decode(body)]
        change(parts)
        return canonical.encode([[[f"{x:x}" for x in kind] for kind in part] for part in parts])

    return answer


def forging(wanted, change):
    """Changes parts, and then the exact product of one of them so that they give another element."""

    def forge(parts):
        change(parts)
        dot = combined([cast(Part, tuple(map(tuple, part))) for part in parts]).sums[-1]
        parts[7][1][-1] += int(wanted * 2.0**172) * 2**172 - dot

    return changing(forge)


def raised(number, kind, place, by):
    def change(parts):
        parts[number][kind][place] += by

    return change


NAMED = ["liar", STEP, GRADIENT[0], "output"]
LIES = {
    "sum of a part": (raised(7, 1, 0, 0), 8),
    "sum of an earlier part": (raised(2, 1, 0, 1), 3),
    "scale": (raised(4, 0, 0, 3 << 23), 5),
    "scale of the other factor": (raised(9, 0, 1, 1), 10),
    "numbers of small elements": (raised(1, 1, 2, 3), 2),
}


@pytest.mark.parametrize("kind", LIES)
def test_the_part_that_is_another_is_named(honest, liar, wanted, tmp_path, kind):
    change, number = LIES[kind]
    runs = (honest, liar) if number % 2 else (liar, honest)
    evidence = tiles.played(tmp_path, *runs, liar=forging(wanted, change)).evidence
    assert decided(evidence) == [*NAMED, f"part {number} of {PARTS} of element 100 of result 0"]


def infinite(parts):
    parts[3][0][0] = 0x7F80_0000


IMPOSSIBLE = {"an infinity": infinite, "a long sum": raised(3, 1, 5, 1 << 799)}


@pytest.mark.parametrize("kind", IMPOSSIBLE)
def test_impossible_numbers_are_a_sum_that_is_another(honest, liar, tmp_path, kind):
    evidence = tiles.played(tmp_path, honest, liar, honest=changing(IMPOSSIBLE[kind])).evidence
    tile = f"the sum of {PARTS} parts of element 100 of result 0"
    assert decided(evidence) == ["honest, liar", *NAMED[1:], tile]


GOOD = [["3f800000", "0"], ["0", "-1", "a" * 200, "1", "2", "3"]]
MALFORMED = {
    "fewer parts": [GOOD],
    "no parts": [],
    "another sum": [GOOD, [GOOD[0], [*GOOD[1], "0"]]],
    "a long number": [GOOD, [GOOD[0], ["a" * 201, *GOOD[1][1:]]]],
    "a negative magnitude": [GOOD, [["-1", "0"], GOOD[1]]],
    "a magnitude beyond FP32": [GOOD, [["80000000", "0"], GOOD[1]]],
    "numbers as numbers": [GOOD, [[1, 2], GOOD[1]]],
    "one kind of number": [GOOD, GOOD[:1]],
    "an object": {"parts": [GOOD, GOOD]},
    "nothing": None,
}


def party_that(stated):
    remote = Remote(lambda text, most: canonical.encode(stated))
    return CheckedProver("party", remote, size=1, root=b"", layout=cast(Layout, None), traffic=Traffic())


def test_parts_that_are_none_are_their_partys_fault():
    assert party_that([GOOD, GOOD]).parts(1, 2, 0, 100, [(2, 6)] * 2)[1].most == (0x3F80_0000, 0)
    for stated in MALFORMED.values():
        with pytest.raises(Failure, match="party gave no valid answer"):
            party_that(stated).parts(1, 2, 0, 100, [(2, 6)] * 2)


def test_a_tree_that_is_not_the_committed_one_is_its_partys_fault():
    hashes = [bytes([number]) * 32 for number in range(4)]
    (tree,) = merge(Node(4 + number, 1, value) for number, value in enumerate(hashes))
    text = base64.b64encode(b"".join(hashes)).decode()
    assert party_that(text).blocks(1, 4, 4, tree.hash) == tuple(hashes)
    with pytest.raises(Contradiction, match="the state after step 1 that it opens is not the one"):
        party_that(text).blocks(1, 4, 4, bytes(32))
    for other in (text[:44], "", None, [text], base64.b64encode(b"".join(hashes)[:-1]).decode()):
        with pytest.raises(Failure):
            party_that(other).blocks(1, 4, 4, tree.hash)
