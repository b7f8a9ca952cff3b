from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firmware_sim import limits
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import canonical
from firmware_sim.limits import Limit

INTEGERS = st.integers(1 - (1 << 128), (1 << 128) - 1)
JSON = st.recursive(
    st.none() | st.booleans() | INTEGERS | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(), children, max_size=4),
    max_leaves=20,
)


@given(JSON)
def test_round_trip(value):
    data = canonical.encode(value)
    again = canonical.decode(data)
    assert again == value
    assert canonical.encode(again) == data


@given(st.dictionaries(st.text(), INTEGERS, min_size=2))
def test_order_of_insertion_does_not_matter(value):
    assert canonical.encode(dict(reversed(value.items()))) == canonical.encode(value)


@given(JSON, st.data())
def test_changed_byte_never_decodes_to_the_same_value(value, data):
    encoded = bytearray(canonical.encode(value))
    index = data.draw(st.integers(0, len(encoded) - 1))
    encoded[index] ^= data.draw(st.integers(1, 255))
    try:
        decoded = canonical.decode(bytes(encoded))
    except EvidenceError:
        return
    assert canonical.encode(decoded) == bytes(encoded)
    assert canonical.encode(decoded) != canonical.encode(value)


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        ({"b": 1, "a": [True, None, 1.0, 1]}, b'{"a":[true,null,1.0,1],"b":1}'),
        ({"é": "\n\u2028"}, '{"é":"\\n\u2028"}'.encode()),
        ((1, -0.0, 1e300, 5e-324), b"[1,-0.0,1e+300,5e-324]"),
        ({"\U0001f600": 0, "\uffff": 0}, '{"\uffff":0,"\U0001f600":0}'.encode()),
    ],
)
def test_known_encodings(value, encoded):
    assert canonical.encode(value) == encoded


@pytest.mark.parametrize(
    "value",
    [
        math.nan, math.inf, -math.inf, {1: 2}, {"a": b"x"}, object(), "\ud800", {"\udfff": 1}, {1, 2},
        [[float("nan")]], type("Text", (str,), {})("x"), type("Number", (int,), {})(1),
    ],
)  # fmt: skip
def test_values_without_an_encoding_are_the_callers_mistake(value):
    with pytest.raises(CallerError, match="no canonical encoding"):
        canonical.encode(value)


@pytest.mark.parametrize(
    "data",
    [
        b"", b" 1", b"1 ", b"1\n", b"\xef\xbb\xbf1", b"NaN", b"Infinity", b"-Infinity", b"1e400", b"1E5", b"01",
        b"1.50",        b"+1", b"-0", b'{"a":1,"a":2}', b'{"b":1,"a":2}', b'{"a": 1}', b"[1,]",
        b'"\\u0061"', b'"\\/"', b"\xff", b"'a'",
        b'"\\ud800"', b"[1] [2]", b"9" * 5000, b"[" * 200 + b"]" * 200, b"[" * 100_000, b"null\x00",
    ],
)  # fmt: skip
def test_other_encodings_are_refused(data):
    with pytest.raises(EvidenceError):
        canonical.decode(data)


def test_depth_and_size_are_bounded():
    def nest(depth):
        value: Any = 0
        for _ in range(depth):
            value = [value]
        return value

    deepest = limits.JSON_DEPTH.most
    assert canonical.decode(canonical.encode(nest(deepest)))
    with pytest.raises(CallerError, match=f"nested deeper than {deepest}"):
        canonical.encode(nest(deepest + 1))
    with pytest.raises(EvidenceError, match=f"{deepest + 1} levels of nesting"):
        canonical.decode(b"[" * (deepest + 1) + b"]" * (deepest + 1))
    three = Limit(3, "bytes")
    assert canonical.decode(b"[1]", most=three) == [1]
    with pytest.raises(EvidenceError, match="4 bytes; at most 3 are read"):
        canonical.decode(b"[12]", most=three)


def test_items_and_digits_are_bounded():
    with pytest.raises(EvidenceError, match="items in a JSON document"):
        canonical.decode(b"[" + b"[]," * limits.JSON_ITEMS.most + b"[]]")
    largest = 2**limits.JSON_INTEGER_BITS.most - 1
    assert canonical.decode(canonical.encode([largest, -largest])) == [largest, -largest]
    with pytest.raises(CallerError, match="an integer of 129 bits"):
        canonical.encode(largest + 1)
    with pytest.raises(EvidenceError, match="an integer of 129 bits"):
        canonical.decode(str(largest + 1).encode())


def test_marks_inside_texts_are_no_structure():
    for text in ("[", "]]", '"', "\\", '\\"[', "\n\\", '\\\n"', "{[" * 100):
        value = {text: [text, {}, [text]]}
        assert canonical.decode(canonical.encode(value)) == value


def test_parse_takes_any_form_of_the_same_values():
    most = Limit(100, "bytes")
    assert canonical.parse(b' { "b": 1, "a": [2.50] } ', most=most) == {"b": 1, "a": [2.5]}
    for data in (b"[NaN]", b"[1e999]", b"[" + b"9" * 60 + b"]", b"{", b" " * 101):
        with pytest.raises(EvidenceError):
            canonical.parse(data, most=most)


@pytest.mark.parametrize("text", ['{"a": 1, "a": 1}', '{"b": [{"a": 1, "\\u0061": 2}]}'])
def test_no_reader_takes_a_key_twice(text):
    with pytest.raises(ValueError, match="the key 'a' occurs twice"):
        canonical.loads(text)
    for refuse in (canonical.decode, lambda data: canonical.parse(data, most=Limit(100, "bytes"))):
        with pytest.raises(EvidenceError):
            refuse(text.encode())
    assert canonical.loads(text.replace("1,", "NaN,").replace('"a"', '"c"', 1).encode())
