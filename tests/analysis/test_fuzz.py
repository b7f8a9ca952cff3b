"""Parsers on bytes that once broke them, and the fuzzer that finds such bytes."""

from __future__ import annotations

import importlib.util
import json
import random
import time
from pathlib import Path

import pytest

from firmware_sim.errors import CallerError
from tests.measurements import fuzz
from tests.measurements.__main__ import main as measure
from tests.measurements._fuzz_child import Fuzzing
from tests.measurements._fuzz_mutations import mutate_json
from tests.measurements._fuzz_targets import World, accepts, prepare, targets

CORPUS = Path(__file__).parent / "corpus"
KEPT = sorted(path.relative_to(CORPUS).as_posix() for path in CORPUS.glob("*/*"))


@pytest.fixture(scope="module")
def parsers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    prepare(folder)
    return targets(World(folder))


@pytest.mark.parametrize("kept", KEPT)
def test_bytes_that_once_broke_a_parser_are_refused_at_once(parsers, kept):
    started = time.process_time()
    assert not accepts(parsers[kept.partition("/")[0]], (CORPUS / kept).read_bytes())
    assert time.process_time() - started < 5


def test_every_parser_accepts_its_seeds_and_survives_mutations_of_them(parsers):
    for name, target in parsers.items():
        rng = random.Random(name)
        for data in target.seeds():
            assert accepts(target, data), name
            for _ in range(20):
                changed = bytearray(data)
                for _ in range(rng.randint(1, 8)):
                    changed[rng.randrange(len(changed))] = rng.randrange(256)
                accepts(target, bytes(changed))
                if target.is_json:
                    accepts(target, mutate_json(data, rng))


def test_a_parser_that_breaks_is_a_finding(tmp_path, monkeypatch):
    def read(data: bytes) -> bool:
        if data.startswith(b"bad"):
            raise ZeroDivisionError
        return True

    monkeypatch.setattr("os._exit", lambda code: None)
    fuzzing = Fuzzing(read, tmp_path / "out.json", seconds=60)
    for data in (b"good", b"bad", b"bad again"):
        fuzzing.execute(data)
    fuzzing.finish()
    result = json.loads((tmp_path / "out.json").read_text())
    assert (result["executions"], result["accepted"]) == (3, 1)
    (finding,) = result["findings"]
    assert bytes.fromhex(finding["input"]) == b"bad"
    assert "ZeroDivisionError" in finding["text"]


def test_findings_are_reported():
    row = {
        "work": "step",
        "findings": [{"text": "KeyError at leaf.py:1"}],
        "executions": 5,
        "accepted": 1,
        "seconds": 1,
    }
    assert fuzz.verdict([{**row, "findings": []}]) is None
    assert fuzz.verdict([row]) == "parsers that fail: step (KeyError at leaf.py:1)"
    assert "KeyError" in fuzz.table([row])[1]


def test_rows_of_other_parsers_stay_in_the_file(tmp_path):
    out = tmp_path / "fuzz.json"
    fuzz.write([{"work": "step", "executions": 1}, {"work": "head", "executions": 2}], out)
    fuzz.write([{"work": "step", "executions": 3}], out)
    rows = {row["work"]: row["executions"] for row in json.loads(out.read_text())["rows"]}
    assert rows == {"head": 2, "step": 3}


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="Atheris is not installed")
def test_the_command_fuzzes_a_parser(capsys):
    assert measure(["fuzz", "--target", "epoch-keys", "--seconds", "1", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["work"] == "epoch-keys"
    assert row["executions"] > 10
    assert row["findings"] == []


def test_without_the_fuzzing_library_the_command_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CallerError, match=r"pip install 'chipwitness\[fuzz\]'"):
        fuzz.run()
