"""What wrote each part of a storage last, against a list of all writes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from monitor.programs.wiring import Stretches

RANGE = st.tuples(st.integers(0, 20), st.integers(1, 8)).map(lambda each: (each[0], each[0] + each[1]))


@given(writes=st.lists(RANGE, max_size=12), read=RANGE)
def test_the_newest_write_that_a_read_reaches_into(writes, read):
    stretches = Stretches()
    for number, (start, stop) in enumerate(writes):
        stretches.write(start, stop, str(number))
    touching = [number for number, (start, stop) in enumerate(writes) if start < read[1] and read[0] < stop]
    found = stretches.newest(*read)
    if not touching:
        assert found is None
        return
    assert found is not None
    assert (found.source, found.origin) == (str(touching[-1]), writes[touching[-1]][0])


def source_of(found):
    assert found is not None
    return found.source


def test_memory_without_elements():
    empty = Stretches()
    assert empty.newest(0, 0) is None
    empty.write(0, 0, "made")
    assert source_of(empty.newest(0, 0)) == "made"
    whole = Stretches()
    whole.write(0, 4, "made")
    whole.write(0, 0, "nothing")
    assert source_of(whole.newest(0, 4)) == source_of(whole.newest(0, 0)) == "made"
    assert whole.newest(4, 4) is None
