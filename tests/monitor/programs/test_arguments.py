"""What a program's call takes has the types of its operator's schema, so that all who read it read the same."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch.nn import functional

from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import canonical
from monitor.programs.calls import build_arguments, check_arguments, operator_of
from monitor.programs.flop import call_work, live_work
from monitor.programs.program import Program
from monitor.programs.trace import layout_of, result_tensors, written_arguments
from tests.documents import changed, places
from tests.monitor.programs.tracing import trace

ODD: list[Any] = [None, True, False, 0, 1, 2, -1, 0.0, 1.0, 2.0, 2**64, "", "x", [], [1], {}, {"$tensor": 0}]
ODD += [{"$tensor": True}, {"$tensor": 1.0}, {"$tensor": -1}, {"$scalar": 0}, {"$scalar": 0.0}, {"$dtype": 1}]


@pytest.fixture(scope="module")
def program() -> Program:
    """A step with a transposed convolution, a batch norm, numbers, a type and lists of tensors and numbers."""

    def body(state, batch):
        made = functional.conv_transpose2d(batch["x"], state["weight/w"], stride=2)
        made = functional.batch_norm(made, None, None, training=True).mul(1.5).sum(dim=(2, 3), dtype=torch.float32)
        joined = torch.cat([made, made[:, :1]], dim=1)
        torch._foreach_mul_([state["weight/v"]], [float(joined.shape[1])])
        return {"weight/v": joined.mean(0)}

    state = {"weight/w": torch.ones(2, 2, 3, 3), "weight/v": torch.ones(3)}
    return trace(body, state, {"x": torch.randn(2, 2, 4, 4)})


def altered(program: Program, number: int, place: tuple[Any, ...], value: Any) -> bytes:
    return canonical.encode(changed(program.to_json(), ("calls", number, "arguments", *place), value))


def test_each_argument_is_of_its_type(program):
    """Whatever else stands in its place is refused; where the schema says bool or int, it is of exactly this type."""
    maybe: set[type] = {bool, type(None)}
    plain: dict[str, set[type]] = {"bool": {bool}, "int": {int}, "SymInt": {int}, "Optional[bool]": maybe}
    taken = 0
    for number, call in enumerate(program.calls):
        schema = operator_of(call["operator"])._schema.arguments
        arguments: Any = call["arguments"]
        for at in range(len(arguments["args"])):
            for value in ODD:
                try:
                    found = Program.decode(altered(program, number, ("args", at), value))
                except EvidenceError:
                    continue
                taken += 1
                read: Any = found.calls[number]["arguments"]
                assert read["args"][at] == value
                assert type(value) in plain.get(str(schema[at].real_type), {type(value)})
    assert taken


@pytest.mark.parametrize("slot", [-1, -2, True, 1.0, 2, "0", None, [0]], ids=repr)
def test_a58_a_slot_that_only_pytorch_takes_for_a_source(program, slot):
    """A program whose batch norm reads slot -3 reads its batch, and the analysis of paths saw nothing that it reads."""
    number = next(n for n, call in enumerate(program.calls) if "batch_norm" in call["operator"])
    [at] = [n for n, each in enumerate(program.calls[number]["arguments"]["args"]) if each == {"$tensor": 0}]
    with pytest.raises(EvidenceError, match="batch_norm"):
        Program.decode(altered(program, number, ("args", at), {"$tensor": slot}))


@pytest.mark.parametrize("flag", [1, 1.0, "true", None, {"$scalar": 0}], ids=repr)
def test_a59_a_flag_that_only_pytorch_takes_for_true(program, flag):
    """A transposed convolution that is marked by 1 ran as one, and counted as the larger one that it is not."""
    [number] = [n for n, call in enumerate(program.calls) if "convolution" in call["operator"]]
    at = program.calls[number]["arguments"]["args"].index(True)
    with pytest.raises(EvidenceError, match=r"convolution.*'transposed'"):
        Program.decode(altered(program, number, ("args", at), flag))


def test_b24_a_scalar_whose_number_is_a_fraction(program):
    """2.0 equals 2: the program was taken, and inspections ended with an error of their own."""
    raw = deepcopy(program.to_json())
    text = canonical.encode(raw).replace(b'{"$scalar":0}', b'{"$scalar":0.0}')
    assert text != program.encoded
    with pytest.raises(EvidenceError):
        Program.decode(text)


def test_sources_that_no_argument_names_are_refused(program):
    """They would count as bytes that an operator reads, in whose place a chip could read others."""
    for number, call in enumerate(program.calls):
        raw: Any = deepcopy(program.to_json())
        if call["sources"]:
            raw["calls"][number]["sources"].append(raw["calls"][number]["sources"][0])
            with pytest.raises(EvidenceError, match="its sources once each"):
                Program.decode(canonical.encode(raw))


def test_sources_are_in_the_order_of_the_arguments(program):
    """What a call counts for depends on the shape of its first source, and not on that of its first argument."""
    number = next(n for n, call in enumerate(program.calls) if "convolution" in call["operator"])
    raw: Any = deepcopy(program.to_json())
    call = raw["calls"][number]
    call["sources"].reverse()
    call["arguments"]["args"][:2] = reversed(call["arguments"]["args"][:2])
    with pytest.raises(EvidenceError, match="in order"):
        Program.decode(canonical.encode(raw))


def test_an_argument_that_has_a_place_is_not_named(program):
    number = next(n for n, call in enumerate(program.calls) if "convolution" in call["operator"])
    raw: Any = deepcopy(program.to_json())
    arguments = raw["calls"][number]["arguments"]
    arguments["kwargs"]["groups"] = arguments["args"].pop()
    with pytest.raises(EvidenceError, match="has no such place"):
        Program.decode(canonical.encode(raw))


def test_arguments_that_an_operator_does_not_have_are_refused(program):
    with pytest.raises(EvidenceError, match="has no such place"):
        Program.decode(altered(program, 0, ("kwargs", "more"), 1))
    args = [*program.calls[0]["arguments"]["args"], *[None] * 9]
    with pytest.raises(EvidenceError, match="has no such place"):
        Program.decode(altered(program, 0, ("args",), args))


def works(program: Program, call: Any) -> tuple[Any, Any] | None:
    """What a call counts for by its program, and when it is run; None where it has not the results that it gives."""
    kinds = [getattr(torch, place["dtype"]) for place in call["sources"]]
    tensors = [
        torch.empty_strided(place["shape"], place["stride"], dtype=kind, device="meta")
        for place, kind in zip(call["sources"], kinds, strict=True)
    ]
    func = operator_of(call["operator"])
    try:
        args, kwargs = build_arguments(call["arguments"], tensors, program.numbers.__getitem__, torch.device("meta"))
        out = func(*args, **kwargs)
    except Exception:
        return None
    written = written_arguments(func, args, kwargs)
    made = [(each["dtype"], each["shape"]) for each in map(layout_of, [*result_tensors(out, written), *written])]
    if made != [(each["dtype"], each["shape"]) for each in call["results"]]:
        return None
    return call_work(call), live_work(func, args, kwargs, out)


def test_a_call_counts_for_what_running_it_counts_for(program):
    """Also where its arguments are others that its operator takes: by the two counts a chip and a program compare."""
    ran = altered_ran = 0
    for call in program.calls:
        arguments = canonical.decode(canonical.encode(call["arguments"]))
        for path in [(), *places(arguments)]:
            for value in ODD if path else [None]:
                other = {**call, "arguments": changed(arguments, path, value) if path else arguments}
                try:
                    check_arguments(other)
                except EvidenceError:
                    continue
                if found := works(program, other):
                    assert found[0] == found[1], (call["operator"], path, value)
                    ran += not path
                    altered_ran += bool(path)
    assert ran == len(program.calls)
    assert altered_ran > 50
