from __future__ import annotations

import contextlib
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import Digest, digest_bytes
from firmware_sim.evidence.tcb import TcbInfo

INFO = TcbInfo(vendor="v", model="m", version="1.0", svn=1, layer=1, index=0, fwid=digest_bytes("x", b""))
TEXT = st.text(st.characters(categories=("L", "N", "P", "S")), min_size=1, max_size=200)
NUMBER = st.integers(0, 2**32 - 1)
INFOS = st.builds(
    TcbInfo,
    vendor=TEXT, model=TEXT, version=TEXT, svn=NUMBER, layer=NUMBER, index=NUMBER,
    fwid=st.binary(min_size=32, max_size=32).map(lambda value: Digest("sha256", value)),
    flags=st.frozensets(st.sampled_from(["notConfigured", "notSecure", "recovery", "debug"])),
)  # fmt: skip


@given(INFOS)
def test_what_is_encoded_is_read_back(info):
    assert TcbInfo.from_der(info.to_der()) == info


def test_encoding_is_that_of_the_standard():
    """Tags, lengths and values by hand, from the ASN.1 module."""
    algorithm = bytes.fromhex("0609608648016503040201")
    fwid = algorithm + b"\x04\x20" + INFO.fwid.value
    fwids = b"\x30" + bytes([len(fwid)]) + fwid
    fields = bytes.fromhex("800176 81016d 8203312e30 830101 840101 850100") + b"\xa6" + bytes([len(fwids)]) + fwids
    for flags, bits in (((), "870100"), (("debug",), "87020410"), (("notConfigured", "recovery"), "870205a0")):
        content = fields + bytes.fromhex(bits)
        der = dataclasses.replace(INFO, flags=frozenset(flags)).to_der()
        assert der == b"\x30" + bytes([len(content)]) + content


@given(INFOS, st.data())
def test_altered_bytes_are_refused_or_say_something_else(info, data):
    der = bytearray(info.to_der())
    der[data.draw(st.integers(0, len(der) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(EvidenceError):
        assert TcbInfo.from_der(bytes(der)) != info


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("830101", "83020001"),  # a number with a leading zero
        ("830101", "8301ff"),  # a negative one
        ("870100", "87020700"),  # no flag, in a byte
        ("870100", "87020008"),  # a flag that the standard does not have
        ("608648016503040201", "608648016503040202"),  # SHA-384
        ("800176", "80010a"),  # not printable
        ("800176", ""),
    ],
)
def test_another_encoding_or_meaning_is_refused(old, new):
    content = INFO.to_der()[2:].replace(bytes.fromhex(old), bytes.fromhex(new), 1)
    with pytest.raises(EvidenceError, match="DiceTcbInfo"):
        TcbInfo.from_der(b"\x30" + bytes([len(content)]) + content)


def test_no_code_or_more_than_one_is_refused():
    der = INFO.to_der()
    start = der.index(b"\xa6")
    one = der[start + 2 : -3]
    for several in (b"", one * 2):
        content = der[2:start] + b"\xa6" + bytes([len(several)]) + several + der[-3:]
        length = bytes([len(content)]) if len(content) < 128 else b"\x81" + bytes([len(content)])
        with pytest.raises(EvidenceError, match="malformed DiceTcbInfo"):
            TcbInfo.from_der(b"\x30" + length + content)


@pytest.mark.parametrize(
    "change",
    [
        {"vendor": ""}, {"model": "a\nb"}, {"version": "x" * 201}, {"svn": -1}, {"layer": 2**32},
        {"fwid": Digest("blake3", bytes(32))}, {"flags": frozenset({"odd"})},
    ],
)  # fmt: skip
def test_cannot_be_built_invalid(change):
    with pytest.raises(CallerError, match="DiceTcbInfo"):
        dataclasses.replace(INFO, **change)
