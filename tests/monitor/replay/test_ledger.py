"""What is kept of a chip's ledger at a log checkpoint."""

from __future__ import annotations

import pytest

from firmware_sim import NO_WORK, Work
from firmware_sim.errors import EvidenceError
from monitor.replay.ledger import Book, Kind


@pytest.fixture
def book():
    made = Book()
    for number, kind in enumerate(Kind, start=1):
        made.add(kind, Work(number, 10 * number, 100 * number))
    made.close()
    return made


def test_a_book_is_kept_whole(book):
    again = Book.from_works(book.to_works())
    assert (again.counts, again.restarts, again.slack) == (book.counts, book.restarts, book.slack)


def test_one_that_was_kept_before_there_was_dead_work_is_read(book):
    at = list(Kind).index(Kind.DEAD)
    works = book.to_works()
    again = Book.from_works([*works[:at], *works[at + 1 :]])
    assert again.counts == {**book.counts, Kind.DEAD: NO_WORK}
    assert again.restarts == book.restarts


def test_one_of_another_length_is_refused(book):
    for works in ((), book.to_works()[:-2], (*book.to_works(), NO_WORK)):
        with pytest.raises(EvidenceError, match="is malformed"):
            Book.from_works(works)
