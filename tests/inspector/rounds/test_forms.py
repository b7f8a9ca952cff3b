"""Messages of another form are no messages, and none of them ends the process of who reads it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import SigningKey
from inspector.rounds import party
from inspector.rounds.forms import check_form
from inspector.rounds.party import Place, play_party
from inspector.rounds.world import CLUSTER, World
from monitor.lab.rounds import LabSide
from tests.documents import changed
from tests.inspector.rounds.test_machines import free_ports

_DRAW = {"time": "t", "secret": "s", "heads": [], "silent": [], "receipts": [], "chips": {"chip": "0a" * 32}}
_JOB = {"run": "r", "action": "replay", "manifest": "m", "lab_key": "k", "segments": [1]}
_ORDER = {"time": "t", "jobs": [{"device": "sse41", "job": _JOB}], "open": {}}


_ANNOUNCED = {
    **{"round": 1, "time": "t", "settings": {}, "refusals": 0, "labs": [], "chips": {}},
    "deadlines": dict.fromkeys(("heads", "answers", "openings", "results"), "t"),
}


@pytest.mark.parametrize("value", [None, 1, "x", [], {}, {"rules": None}, {"rules": [1]}, {"rules": [{"kind": []}]}])
def test_rules_that_are_announced_have_kinds(value: Any) -> None:
    check_form("announcement", _ANNOUNCED)
    check_form("announcement", {**_ANNOUNCED, "rules": {"rules": [{"kind": "meter"}], "more": 1}})
    with pytest.raises(EvidenceError, match="announcement is malformed"):
        check_form("announcement", {**_ANNOUNCED, "rules": value})


@pytest.mark.parametrize("value", [None, 1, "", "x", "0a", "0A" * 32, "é" * 64, "0a" * 33, ["0a" * 32]])
def test_a_nonce_is_32_bytes_in_hex(value: Any) -> None:
    check_form("draw", _DRAW)
    with pytest.raises(EvidenceError, match="draw is malformed"):
        check_form("draw", changed(_DRAW, ("chips", "chip"), value))


@pytest.mark.parametrize("key", ["run", "action", "manifest", "lab_key"])
@pytest.mark.parametrize("value", [None, 1, ["x"], {}, KeyError])
def test_a_job_has_what_the_cluster_reads_of_it(key: str, value: Any) -> None:
    check_form("order", _ORDER)
    with pytest.raises(EvidenceError, match="order is malformed"):
        check_form("order", changed(_ORDER, ("jobs", 0, "job", key), value))


def test_a62_no_step_ends_the_process_of_a_party(tmp_path, monkeypatch, capsys) -> None:
    """Whoever ended a lab's process by a message would make the lab silent, which counts against it."""
    failed = asyncio.Event()

    def act(*_: object, **__: object) -> None:
        loop.call_soon_threadsafe(failed.set)
        raise KeyError("run")

    monkeypatch.setattr(party, "due", lambda *_: "replay")
    monkeypatch.setattr(party, "act", act)
    world = World.create(tmp_path / "world", LabSide)
    [port] = free_ports(1)

    async def play() -> None:
        stop = asyncio.Event()
        place = Place(host="127.0.0.1", port=port, peers={})
        playing = asyncio.create_task(play_party(world, CLUSTER, SigningKey.generate(), place, stop))
        await asyncio.wait_for(failed.wait(), 30)
        await asyncio.sleep(0.2)
        assert not playing.done()
        stop.set()
        await playing

    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(play())
    finally:
        loop.close()
    told = capsys.readouterr()
    assert "KeyError: 'run'" in told.out + told.err
