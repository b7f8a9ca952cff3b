"""Which statement counts for a step, against a count of every step by hand."""

from __future__ import annotations

import random

from inspector.inspection.agreement import Agreement
from monitor.declaration.countersignature import Admitted, Countersigned, in_force
from tests.monitor.declaration.test_countersignature import DECLARATION

PROGRAMS = ["a" * 64, "b" * 64, "c" * 64]
NAMES = ["buffer/x", "buffer/y"]
NOTHING = Admitted(flop=0, most_flop=0, bytes=0)


def test_each_step_has_the_consents_of_its_newest_statement_and_of_no_other():
    rng = random.Random(0)
    for _ in range(400):
        steps = rng.randrange(1, 8)
        statements = [
            Countersigned(
                lab="lab",
                run="d" * 64,
                declaration=DECLARATION,
                programs=dict.fromkeys(rng.sample(PROGRAMS, rng.randrange(4)), NOTHING),
                direct_paths=frozenset(rng.sample(NAMES, rng.randrange(3))),
                free=frozenset(rng.sample(["lr", "eps"], rng.randrange(3))),
                number=number,
                since=1 if number == 1 else rng.randrange(1, 9),
                signed="2026-01-01T00:00:00Z",
            )
            for number in range(1, rng.randrange(2, 6))
        ]
        newest = [
            max((x for x in statements if x.since <= step), key=lambda x: x.number) for step in range(1, steps + 1)
        ]
        terms = in_force(statements, steps)
        assert {each.number for each in terms} == {each.number for each in newest}
        agreed = Agreement(programs={}, start=None, terms=terms, recipe=None)
        assert [agreed.at(step) for step in range(1, steps + 1)] == newest
        assert agreed.at(0) == newest[0]
        assert agreed.always("free") == frozenset.intersection(*(each.free for each in newest))
        ran = [(rng.choice(PROGRAMS), step) for step in range(steps + 1)]
        for program, numbers in agreed.numbers_for(ran).items():
            mine = [newest[max(step, 1) - 1].direct_paths for name, step in ran if name == program]
            assert agreed.always("direct_paths", numbers) == frozenset.intersection(*mine)
