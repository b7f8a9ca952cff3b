"""The three rules of a rounding log (4β, 2β, 6β) against every single-entry edit of one matrix product."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from firmware_sim.errors import CallerError, EvidenceError
from monitor.numerics import Bound, Formats, LogContradiction, UnsupportedOperator, execute, recording, replaying
from monitor.numerics.engines.eager.rounded.norms import norms
from monitor.numerics.engines.eager.rounded.rounding_rule import decide
from monitor.numerics.rounding import codec
from monitor.numerics.rounding.codec import Group

FORMATS, BOUND = Formats(), Bound()
UNCHECKED = Bound(check=False)


@pytest.fixture(scope="module")
def operands() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(96, 512, generator=generator), torch.randn(512, 256, generator=generator)


@pytest.fixture(scope="module")
def recorded(operands: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, Group, np.ndarray]:
    """Result, entries, and distance of every element to its midpoint in units of β."""
    a, b = operands
    with recording("rounded") as session:
        out = torch.mm(a, b)
    (group,) = codec.decode(session.log, FORMATS, BOUND)
    beta = norms(a, -1) * BOUND.of_products(512, FORMATS) * norms(b, -2)
    found = decide(a.double() @ b.double(), beta, 24)
    return out, group, (found.distance / found.beta).reshape(-1).numpy()


def replay(operands: tuple[torch.Tensor, torch.Tensor], groups: list[Group], bound: Bound = BOUND) -> torch.Tensor:
    log = codec.encode(groups, FORMATS, bound)
    out: torch.Tensor = execute("rounded", "aten.mm.default", operands, {}, entries=log, bound=bound)
    return out


def edited(group: Group, positions: np.ndarray, upward: np.ndarray) -> list[Group]:
    if len(positions) == 0:
        return []
    return [Group(call=0, part=0, size=group.size, positions=positions, upward=upward)]


def test_recorder_logs_exactly_the_elements_within_4_beta(recorded: tuple[torch.Tensor, Group, np.ndarray]) -> None:
    _, group, distance = recorded
    assert len(group.positions) >= 8, "the case must hold enough ambiguous elements to mean something"
    np.testing.assert_array_equal(group.positions, np.flatnonzero(distance <= 4.0))


def test_a_call_that_fails_leaves_no_entries(
    operands: tuple[torch.Tensor, torch.Tensor], recorded: tuple[torch.Tensor, Group, np.ndarray]
) -> None:
    (out, group, _), bias = recorded, torch.zeros(3)
    with recording("rounded") as session:
        with pytest.raises(RuntimeError, match="must match"):
            torch.addmm(bias, *operands)
        again = torch.mm(*operands)
    assert torch.equal(again, out)
    assert session.log == codec.encode([group], FORMATS, BOUND)


def test_honest_log_replays_to_the_same_bits(
    operands: tuple[torch.Tensor, torch.Tensor], recorded: tuple[torch.Tensor, Group, np.ndarray]
) -> None:
    out, group, _ = recorded
    assert torch.equal(replay(operands, [group]), out)


def test_dropping_an_entry_is_rejected_within_2_beta_and_harmless_beyond(
    operands: tuple[torch.Tensor, torch.Tensor], recorded: tuple[torch.Tensor, Group, np.ndarray]
) -> None:
    out, group, distance = recorded
    rejected = 0
    for i, position in enumerate(group.positions):
        groups = edited(group, np.delete(group.positions, i), np.delete(group.upward, i))
        if distance[position] <= 2.0:
            with pytest.raises(LogContradiction) as caught:
                replay(operands, groups)
            assert (caught.value.call, caught.value.operator) == (0, "aten.mm.default")
            assert caught.value.element == position
            assert "no entry" in caught.value.rule
            rejected += 1
        else:
            assert torch.equal(replay(operands, groups), out)
    assert 0 < rejected < len(group.positions)


def test_flipping_an_entry_is_rejected_where_no_device_decides_so_and_one_step_elsewhere(
    operands: tuple[torch.Tensor, torch.Tensor], recorded: tuple[torch.Tensor, Group, np.ndarray]
) -> None:
    out, group, distance = recorded
    rejected = {1.0: 0, 2.0: 0}
    for i, position in enumerate(group.positions):
        upward = group.upward.copy()
        upward[i] = not upward[i]
        groups = edited(group, group.positions, upward)
        if distance[position] > 1.0:
            beyond = 2.0 if distance[position] > 2.0 else 1.0
            rule = "a value further than 2β" if beyond == 2.0 else "an exact value further than β"
            with pytest.raises(LogContradiction, match=rule) as caught:
                replay(operands, groups)
            assert caught.value.element == position
            rejected[beyond] += 1
        else:
            changed = (replay(operands, groups) != out).reshape(-1).nonzero().reshape(-1)
            assert changed.tolist() == [position]
    assert min(rejected.values()) > 0
    assert sum(rejected.values()) < len(group.positions)


def test_adding_an_entry_is_rejected_beyond_6_beta(
    operands: tuple[torch.Tensor, torch.Tensor], recorded: tuple[torch.Tensor, Group, np.ndarray]
) -> None:
    _, group, distance = recorded
    for position in np.flatnonzero(distance > 6.0)[:: len(distance) // 16]:
        at = int(np.searchsorted(group.positions, position))
        groups = edited(group, np.insert(group.positions, at, position), np.insert(group.upward, at, True))
        with pytest.raises(LogContradiction, match="further than 6β") as caught:
            replay(operands, groups)
        assert caught.value.element == position


def test_without_the_bound_check_every_edit_passes(
    operands: tuple[torch.Tensor, torch.Tensor], recorded: tuple[torch.Tensor, Group, np.ndarray]
) -> None:
    """The twin: the rules above, and nothing else, stop an edited log."""
    out, group, distance = recorded
    far = np.flatnonzero(distance > 6.0)[:1]
    magnitude_up = torch.nextafter(out.reshape(-1)[far].abs(), torch.tensor(torch.inf))
    for upward in (True, False):
        altered = replay(operands, edited(group, far, np.array([upward])), UNCHECKED).reshape(-1)[far]
        assert altered.abs() in (out.reshape(-1)[far].abs(), magnitude_up) or not upward
    flipped = replay(operands, edited(group, group.positions, ~group.upward), UNCHECKED)
    assert int((flipped != out).sum()) == len(group.positions)


def test_entry_on_an_exact_result_is_rejected() -> None:
    """A single product is exact in FP64: no device has a choice there."""
    a, b = torch.full((1, 1), 1.0 + 2.0**-12), torch.full((1, 1), 1.0 + 2.0**-12)
    with recording("rounded") as session:
        torch.mm(a, b)
    assert codec.decode(session.log, FORMATS, BOUND) == []
    with pytest.raises(LogContradiction, match="exact"):
        replay((a, b), [Group(call=0, part=0, size=1, positions=np.array([0]), upward=np.array([True]))])


def test_entries_that_no_call_uses_are_rejected(operands: tuple[torch.Tensor, torch.Tensor]) -> None:
    a, b = operands
    stray = Group(call=3, part=0, size=10, positions=np.array([4]), upward=np.array([True]))
    with recording("rounded") as session:
        torch.mm(a, b)
    log = codec.encode([*codec.decode(session.log, FORMATS, BOUND), stray], FORMATS, BOUND)
    with pytest.raises(LogContradiction) as caught, replaying("rounded", log):
        torch.mm(a, b)
    assert (caught.value.call, caught.value.element) == (3, 4)


def test_entry_counts_for_another_shape_are_rejected(
    operands: tuple[torch.Tensor, torch.Tensor], recorded: tuple[torch.Tensor, Group, np.ndarray]
) -> None:
    a, b = operands
    with pytest.raises(EvidenceError, match=f"counts {96 * 256} elements .* there are {95 * 256}"):
        replay((a[1:], b), [recorded[1]])


def test_replay_counts_decisions_that_this_device_would_take_the_other_way(
    operands: tuple[torch.Tensor, torch.Tensor], recorded: tuple[torch.Tensor, Group, np.ndarray]
) -> None:
    _, group, distance = recorded
    near = distance[group.positions] <= 1.0
    log = codec.encode(edited(group, group.positions, group.upward ^ near), FORMATS, BOUND)
    with replaying("rounded", log) as session:
        torch.mm(*operands)
    assert session.statistics.forced == int(near.sum())
    assert session.log == log
    (decided,) = session.statistics.decided
    assert (decided.kind, decided.terms) == ("product", operands[0].shape[1])
    assert (decided.logged, decided.free) == (len(group.positions), int((distance[group.positions] <= 2.0).sum()))


def test_entries_of_one_call_serve_a_referee() -> None:
    generator = torch.Generator().manual_seed(3)
    x, w = torch.randn(64, 300, generator=generator), torch.randn(300, 300, generator=generator)
    with recording("rounded") as session:
        first = torch.mm(x, w)
        second = torch.mm(torch.relu(first), w)
    entries = session.entries_of(2)
    again = execute("rounded", "aten.mm.default", (torch.relu(first), w), {}, entries=entries)
    assert len(entries) > len(codec.encode((), FORMATS, BOUND))
    assert torch.equal(again, second)


def test_tolerated_contradictions_are_counted_and_bounded(
    operands: tuple[torch.Tensor, torch.Tensor], recorded: tuple[torch.Tensor, Group, np.ndarray]
) -> None:
    a, b = operands
    with recording("rounded", bound=Bound(kind="calibrated")) as session:
        torch.mm(a, b)
    bound = Bound(kind="calibrated", contradictions=1)
    (group,) = codec.decode(session.log, FORMATS, bound)
    far = np.array([p for p in range(200) if p not in group.positions][:2])
    for count in (1, 2):
        positions = np.sort(np.concatenate([group.positions, far[:count]]))
        upward = np.isin(positions, far) | group.upward[np.searchsorted(group.positions, positions).clip(max=0)]
        log = codec.encode(edited(group, positions, upward), FORMATS, bound)
        unlimited = Bound(kind="calibrated", contradictions=10**6)
        with replaying("rounded", log, bound=unlimited) as counting:
            torch.mm(a, b)
        assert counting.statistics.contradictions >= count
        if counting.statistics.contradictions > 1:
            with pytest.raises(LogContradiction), replaying("rounded", log, bound=bound):
                torch.mm(a, b)


@pytest.mark.parametrize("numerics", ["native", "exact"])
def test_numerics_without_a_log_accept_only_the_empty_one(numerics: str) -> None:
    with pytest.raises(EvidenceError, match="1 bytes"):
        replaying(numerics, b"\0")


def test_unknown_numerics_and_double_use_are_the_callers_mistake() -> None:
    with pytest.raises(CallerError, match="'fast'"):
        recording("fast")
    with recording("rounded") as session:
        pass
    with pytest.raises(CallerError, match="one training step"), session:
        pass


def test_unknown_operator_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedOperator, match=r"aten\.igamma\.default"), recording("rounded"):
        torch.igamma(torch.ones(3), torch.ones(3))
    with pytest.raises(UnsupportedOperator, match=r"aten\.system\.default"):
        execute("rounded", "aten.system.default", (), {}, entries=None)


def test_worst_case_bounds_do_not_exist_for_bfloat16() -> None:
    formats = Formats(compute="float32", grid="bfloat16")
    with pytest.raises(CallerError, match="probabilistic or calibrated"), recording("rounded", formats=formats):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
