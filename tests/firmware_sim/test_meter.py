"""The meter's table against PyTorch's own count of products, and the laws of what several chips count together."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from firmware_sim import (
    LABORATORY,
    NO_WORK,
    CallerError,
    DeviceMemory,
    FirmwareChip,
    Meter,
    RecordKind,
    Region,
    Work,
    open_quote,
    parse_log,
    read_chain,
    work_of,
)
from firmware_sim.meter import NEVER

SIZES = st.integers(1, 5)
COUNTS = st.integers(0, 2**64 - 1)
WORKS = st.builds(Work, COUNTS, COUNTS, COUNTS)


def of(operator, inputs, outputs, **options):
    """The work of a call on these tensors."""
    operands = [[("float32", tuple(tensor.shape)) for tensor in tensors] for tensors in (inputs, outputs)]
    return work_of(operator, *operands, **options)


def counted(function, *args, **kwargs):
    """FLOP and results, as PyTorch counts them."""
    with FlopCounterMode(display=False) as counter:
        result = function(*args, **kwargs)
    return counter.get_total_flops(), list(result) if isinstance(result, tuple) else [result]


@given(SIZES, SIZES, SIZES, SIZES)
def test_matrix_products_count_as_pytorch_counts_them(b, m, k, n):
    left, right, bias = torch.ones(m, k), torch.ones(k, n), torch.ones(n)
    batch, other = torch.ones(b, m, k), torch.ones(b, k, n)
    aten = torch.ops.aten
    for name, function, args in (
        ("aten.mm.default", aten.mm, (left, right)),
        ("aten.addmm.default", aten.addmm, (bias, left, right)),
        ("aten.bmm.default", aten.bmm, (batch, other)),
        ("aten.baddbmm.default", aten.baddbmm, (torch.ones(b, m, n), batch, other)),
    ):
        flop, results = counted(function, *args)
        moved = 4 * sum(tensor.numel() for tensor in (*args, *results))
        assert of(name, args, results) == Work(1, flop, moved)


@given(SIZES, SIZES)
def test_products_with_vectors_count_two_for_each_element_of_the_matrix(m, k):
    matrix, vector = torch.ones(m, k), torch.ones(k)
    assert of("aten.mv.default", [matrix, vector], [torch.ones(m)]).flop == 2 * m * k
    assert of("aten.addmv.default", [torch.ones(m), matrix, vector], [torch.ones(m)]).flop == 2 * m * k
    assert of("aten.dot.default", [vector, vector], [torch.ones(())]).flop == 2 * k
    assert of("aten.vdot.default", [vector, vector], [torch.ones(())]).flop == 2 * k


@pytest.mark.parametrize(
    ("left", "right", "out"),
    [
        ((12, 3), (4, 3, 5), (12, 5)),
        ((12, 3), (3, 5), (4, 12, 5)),
        ((4, 12, 3), (3, 5), (12, 5)),
        ((4, 12, 3), (4, 3, 5), (4, 12, 5)),
    ],
    ids=["rows", "inner", "columns", "batch"],
)
def test_grouped_products_count_each_group_once(left, right, out):
    """Groups share the rows, the inner size or the columns, so that together they are one product; a batch is many."""
    batch = 4 if len(left) == len(right) == 3 else 1
    tensors = [torch.ones(left), torch.ones(right), torch.ones(4)]
    assert of("aten._grouped_mm.default", tensors, [torch.ones(out)]).flop == 2 * batch * 12 * 3 * 5


@given(st.integers(1, 2), st.integers(1, 2), st.sampled_from([1, 2]), st.booleans(), st.integers(5, 7))
def test_convolutions_count_as_pytorch_counts_them(ins, outs, groups, transposed, size):
    held = torch.ones(2, ins * groups, size, size)
    weight = torch.ones(ins * groups, outs, 3, 2) if transposed else torch.ones(outs * groups, ins, 3, 2)
    options = ([2, 1], [1, 0], [1, 1], transposed, [0, 0], groups)
    forward, results = counted(torch.ops.aten.convolution, held, weight, None, *options)
    assert of("aten.convolution.default", [held, weight], results, transposed=transposed).flop == forward
    backward = torch.ops.aten.convolution_backward
    for mask in ([True, True, True], [False, True, False]):
        both, made = counted(backward, results[0], held, weight, [outs * groups], *options, mask)
        made = [tensor for tensor in made if tensor is not None]
        inputs = [results[0], held, weight]
        found = of("aten.convolution_backward.default", inputs, made, transposed=transposed).flop
        assert found == forward * (mask[0] + mask[1])
        assert found == both or groups > 1  # PyTorch does not divide the weight's gradient among groups


def test_what_is_no_product_counts_calls_and_bytes():
    tensors = [torch.ones(3, 4), torch.ones(4)]
    assert of("aten.add.Tensor", tensors, [torch.ones(3, 4)]) == Work(1, 0, 4 * (12 + 4 + 12))
    assert work_of("aten.mul_.Tensor", [("bfloat16", (3,)), ("int64", ())], [("bfloat16", (3,))]) == Work(1, 0, 20)


@given(WORKS, WORKS)
def test_work_adds_up_and_survives_its_encoding(one, other):
    assert (one + other) - other == one
    assert one <= one + other
    assert Work.from_bytes(one.to_bytes()) == one


def test_a_count_that_no_meter_can_hold_is_refused():
    with pytest.raises(CallerError, match=r"not in \[0, 2\^64\)"):
        Work(1 << 64, 0, 0).to_bytes()


@given(st.lists(st.integers(1, 1 << 40), min_size=1, max_size=9), WORKS, WORKS)
def test_shares_of_chips_never_fall_and_miss_less_than_one_unit_each(held, work, more):
    whole = sum(held)
    shares = [work.share(part, whole) for part in held]
    total = sum(shares, NO_WORK)
    assert total <= work
    assert work.calls - total.calls < len(held)
    assert work.moved - total.moved < len(held)
    assert all(share <= (work + more).share(part, whole) for share, part in zip(shares, held, strict=True))


def test_chips_log_and_quote_their_shares_of_what_runs_on_their_memory(world):
    meter, run = Meter(), b"r" * 32
    chips = [world.make(chip_id=f"chip-{number}") for number in (1, 2)]
    for chip, elements in zip(chips, (1, 3), strict=True):
        region = Region.of("w", torch.zeros(elements))
        chip.attach(DeviceMemory([region], meter=meter, share=(4 * elements, 16)), run, 0)
    meter.charge(Work(8, 80, 802))
    records = [chip.commit(run, 0, bytes(32)) for chip in chips]
    assert [record.work for record in records] == [Work(2, 20, 200), Work(6, 60, 601)]
    meter.charge(Work(2, 0, 2))
    chips[0].cut_power()
    again = FirmwareChip.power_on(world.folder / "chip-1")
    world.chips.append(again)
    gap, boot = [record for record in parse_log(again.log_bytes()) if record.counter > records[0].counter][:2]
    assert (gap.kind, gap.work) == (RecordKind.POWER_GAP, Work(2, 20, 201)), "the power supply's reserve keeps it"
    assert (boot.kind, boot.work) == (RecordKind.BOOT, NO_WORK)
    quote = open_quote(chips[1].quote(bytes(16), "v"), read_chain(chips[1].certificate_chain()).alias_key)
    assert (quote.calls, quote.flop, quote.moved) == (7, 60, 603)


def test_a_snapshot_holds_the_meter_of_its_moment_however_long_it_is_hashed(world):
    """What runs on the memory meanwhile belongs to the next step."""
    meter, run = Meter(), b"r" * 32
    chip = world.make(snapshot_rate=Fraction(1))
    chip.attach(DeviceMemory([Region.of("w", torch.zeros(1 << 22))], meter=meter), run, 0)
    meter.charge(Work(1, 2, LABORATORY.moved))
    meter.charge(Work(4, 5, 6))
    commit = chip.commit(run, 1, bytes(32))
    records = parse_log(chip.log_bytes())
    [snapshot] = [record for record in records if record.kind is RecordKind.SNAPSHOT]
    assert (snapshot.work, commit.work) == (Work(1, 2, LABORATORY.moved), Work(5, 7, LABORATORY.moved + 6))


def test_whoever_waits_for_an_operator_is_called_once_between_it_and_the_next():
    meter, seen = Meter(), []
    meter.charge(Work(2, 0, 0))
    for calls in (5, 3, 5):
        at = Work(calls, NEVER, NEVER)
        meter.wake(at, lambda *_, calls=calls: seen.append((calls, meter.total.calls)))
    for _ in range(6):
        meter.charge(Work(1, 0, 0))
    assert seen == [(3, 3), (5, 5), (5, 5)]


@pytest.mark.parametrize("at", [Work(4, NEVER, NEVER), Work(NEVER, 70, NEVER), Work(NEVER, NEVER, 25), Work(9, 70, 99)])
def test_whichever_count_is_reached_first_wakes(at):
    meter, seen = Meter(), []
    meter.wake(at, lambda *woken: seen.append((meter.total, woken)))
    for number in range(9):
        meter.charge(Work(1, 20, 7 + number))
    assert seen == [(Work(4, 80, 34), (Work(3, 60, 24), Work(4, 80, 34)))]


def test_who_waits_already_waits_for_the_new_count():
    meter, seen = Meter(), []

    def waiting(*_):
        seen.append(meter.total.calls)

    for calls in (2, 6, 4):
        meter.wake(Work(calls, NEVER, NEVER), waiting)
    for _ in range(9):
        meter.charge(Work(1, 0, 0))
    assert seen == [4]


def test_who_waits_is_called_even_where_another_is_interrupted():
    meter, seen = Meter(), []

    def interrupted(*_):
        seen.append(1)
        raise KeyboardInterrupt

    meter.wake(Work(1, NEVER, NEVER), interrupted)
    meter.wake(Work(1, NEVER, NEVER), lambda *_: seen.append(2))
    with pytest.raises(KeyboardInterrupt):
        meter.charge(Work(1, 0, 0))
    assert seen == [1, 2]


def test_who_is_called_may_wait_again():
    meter, seen = Meter(), []

    def again(*_):
        seen.append(meter.total.calls)
        meter.wake(Work(meter.total.calls + 2, NEVER, NEVER), again)

    meter.wake(Work(1, NEVER, NEVER), again)
    for _ in range(6):
        meter.charge(Work(1, 0, 0))
    assert seen == [1, 3, 5]


def test_operators_run_while_another_thread_waits_anew(switching):
    """A chip's command in one thread sets its next moment between operators of another one: none of these fails."""
    meter, seen = Meter(), []

    def waiting(before, after):
        seen.append(after.calls)

    def train():
        for _ in range(10_000):
            meter.charge(Work(1, 0, 1))

    with ThreadPoolExecutor(1) as threads:
        training = threads.submit(train)
        while not training.done():
            meter.wake(Work(meter.total.calls + 1, NEVER, NEVER), waiting)
        training.result()
    assert seen
    meter.wake(Work(meter.total.calls + 1, NEVER, NEVER), waiting)
    meter.charge(Work(1, 0, 1))
    assert seen[-1] == meter.total.calls
