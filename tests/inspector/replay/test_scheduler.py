"""How parts are dealt out to workers that are made up: each answers when it is told to, dies or refuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firmware_sim.errors import DeviceError
from inspector.replay.scheduler import Died, Refused, Scheduler, cut

Part = Mapping[str, Any]
JOB = {"action": "replay", "segments": list(range(50))}


class Made:
    """Workers 0, 1, …, whose answers a function makes."""

    def __init__(self, count: int, answer: Callable[[int, str, Part], dict[str, Any]], why: str | None = None) -> None:
        self.left, self._answer, self._why = list(reversed(range(count))), answer, why
        self.begun: list[tuple[int, str, Part]] = []

    def hire(self, name: str) -> int | None:
        return self.left.pop() if self.left else None

    def suits(self, worker: int, name: str) -> bool:
        return True

    def begin(self, worker: int, name: str, part: Part) -> Future[dict[str, Any]]:
        self.begun.append((worker, name, part))
        future: Future[dict[str, Any]] = Future()
        try:
            future.set_result(self._answer(worker, name, part))
        except DeviceError as error:
            future.set_exception(error)
        return future

    def stays(self, worker: int) -> bool:
        return False

    def hopeless(self, name: str) -> str | None:
        return self._why


def answer(worker: int, name: str, part: Part) -> dict[str, Any]:
    return {"device": name, "fingerprint": "f", "seconds": 1.0, "replays": list(part.get("segments", []))}


def run(crew: Made, job: Part = JOB, parts: int | None = None, **options: int) -> dict[str, Any]:
    scheduler: Scheduler[int] = Scheduler(crew, parts=parts, **options)
    try:
        return scheduler.submit("d", job).result(30)
    finally:
        scheduler.close()


@given(st.integers(0, 40), st.none() | st.integers(1, 50))
def test_parts_are_the_job(segments, most):
    count, parts = cut({"action": "replay", "segments": list(range(segments)), "x": 1}, most)
    made = list(parts)
    assert len(made) == count <= max(1, min(segments, most or segments))
    assert [each for part in made for each in part["segments"]] == list(range(segments))
    assert all(part["x"] == 1 for part in made)
    assert len({part.get("part_of") for part in made}) == 1


def test_a_job_of_another_kind_is_not_cut():
    job = {"action": "examine", "segments": [1, 2]}
    count, parts = cut(job, None)
    assert (count, list(parts)) == (1, [job])


def test_answers_come_in_the_order_of_the_segments():
    crew = Made(3, answer)
    found = run(crew)
    assert found == {"device": "d", "fingerprint": "f", "seconds": 50.0, "replays": list(range(50))}
    assert len(crew.begun) == 50


def test_a_part_whose_worker_is_lost_goes_to_another_and_is_an_error_when_it_is_lost_again():
    tried: Counter[int] = Counter()

    def once(worker, name, part):
        segment = part["segments"][0]
        tried[segment] += 1
        if segment in (3, 30) and tried[segment] <= 2:
            raise Died("lost")
        return answer(worker, name, part)

    assert run(Made(9, once), attempts=3)["replays"] == list(range(50))
    assert tried[3] == tried[30] == 3
    tried.clear()
    with pytest.raises(Died, match="lost"):
        run(Made(9, once))


def test_a_worker_that_refuses_gets_no_other_part():
    def all_but_one(worker, name, part):
        if worker in (0, 2):
            raise Refused(f"worker {worker} is another device")
        return answer(worker, name, part)

    crew = Made(4, all_but_one)
    assert run(crew)["replays"] == list(range(50))
    refused = Counter(worker for worker, _, _ in crew.begun)
    assert refused[0] == 1
    assert refused[2] <= 1
    with pytest.raises(DeviceError, match="nobody is left"):
        run(Made(1, all_but_one, "nobody is left"))


def test_an_answer_that_is_no_answer_ends_the_job():
    for wrong in ({"device": "e"}, {"replays": None}, {"seconds": "1"}):
        with pytest.raises(DeviceError, match="malformed answer"):
            run(Made(1, lambda *given, wrong=wrong: {**answer(*given), **wrong}))
    with pytest.raises(DeviceError, match="do not all compute the same bits"):
        run(Made(1, lambda *given: {**answer(*given), "fingerprint": given[2]["segments"][0]}))


def test_of_evidence_that_cannot_be_read_the_first_is_named():
    def unread(worker, name, part):
        return {**answer(worker, name, part), "evidence_error": f"segment {part['segments'][0]}"}

    assert run(Made(2, unread))["evidence_error"] == "segment 0"
    assert "replays" not in run(Made(2, unread))


def test_jobs_and_devices_take_turns_and_none_waits_for_ever():
    crew = Made(1, answer)
    scheduler: Scheduler[int] = Scheduler(crew, parts=None)
    waiting = [scheduler.submit(name, JOB) for name in ("d", "e", "d", "e")]
    assert [each.result(30)["device"] for each in waiting] == ["d", "e", "d", "e"]
    names = [name for _, name, _ in crew.begun]
    assert abs(names[:100].count("d") - 50) < 40
    never = Scheduler(Made(0, answer), parts=None)
    left = never.submit("d", JOB)
    never.close()
    with pytest.raises(DeviceError, match="were closed"):
        left.result(30)
    scheduler.close()
    with pytest.raises(DeviceError, match="were closed"):
        scheduler.submit("d", JOB)


def test_a_lost_worker_is_forgotten_and_a_new_one_hired():
    crew = Made(1, answer)
    scheduler: Scheduler[int] = Scheduler(crew, parts=None)
    assert scheduler.submit("d", JOB).result(30)["replays"] == list(range(50))
    scheduler.lose(0)
    crew.left.append(7)
    scheduler.wake()
    assert scheduler.submit("d", JOB).result(30)["replays"] == list(range(50))
    assert {worker for worker, _, _ in crew.begun[50:]} == {7}
    scheduler.close()
