"""``chip show``, ``log``, ``quote`` and ``verify-log`` on a recorded run, its lab's folder and altered copies."""

from __future__ import annotations

import json
import shutil

import pytest

from analysis.cli import main
from firmware_sim import RECORD_BYTES, parse_log
from tests.guards import off


@pytest.fixture
def ask(capsys):
    """Runs ``chip …`` and returns exit code and output."""

    def call(*words):
        capsys.readouterr()
        code = main(["chip", *map(str, words)])
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return code, said.out + said.err

    return call


@pytest.fixture
def run(honest, tmp_path):
    """A copy of an honest run with its lab's folder and trust file, for altering."""
    for suffix in ("", ".lab"):
        place = honest.run.with_name(honest.run.name + suffix)
        shutil.copytree(place, tmp_path / place.name)
    shutil.copy(honest.run.with_name("run.trust.json"), tmp_path)
    return tmp_path / "run"


CHIP = "lab-chip-0001"


def test_show_of_a_run_and_of_its_lab_agree(run, ask):
    code, shown = ask("show", run, "--json")
    assert code == 0
    pages = json.loads(shown)
    assert [page["chip"] for page in pages] == [f"lab-chip-{number:04d}" for number in range(3)]
    code, shown = ask("show", run.with_name("run.lab"), "--json")
    assert code == 0
    for given, own in zip(pages, json.loads(shown), strict=True):
        for key in ("identity", "maker", "certificate", "firmware", "boot", "tick", "snapshot_rate", "problem"):
            assert given[key] == own[key], key
        assert given["epochs"][0] == own["epochs"][0]
        assert own["log_size"] > given["log_size"]  # the lab shut its chips down after they had answered
        assert given["memory"] is None
        assert own["memory"]["used_bytes"] < own["memory"]["capacity_bytes"]
        assert given["problem"] is None


def test_the_meter_as_a_clock_of_a_device(run, ask):
    code, shown = ask("show", run, "--clock", "H100 SXM", "--json")
    assert code == 0
    for page in json.loads(shown):
        assert page["clock"]["device"] == "H100 SXM"
        assert 0 < page["clock"]["busy_seconds"] < 1
        assert page["clock"]["busy_seconds"] >= page["work"]["flop"] / 9.9e14
    assert " s of work in this boot on H100 SXM, at " in ask("show", run, "--clock", "H100 SXM")[1]
    code, said = ask("show", run, "--clock", "abacus")
    assert code == 2
    assert "there is no device 'abacus'; known: V100" in said


def test_show_says_what_a_person_asks(run, ask):
    code, shown = ask("show", run, "--chip", CHIP)
    assert code == 0
    [page] = json.loads(ask("show", run, "--chip", CHIP, "--json")[1])
    for text in (
        f"chip         {CHIP}",
        "firmware     chipwitness-firmware 1.0, security version 1",
        f"counter      {page['counter']} changes",
        "schedule     a snapshot with probability 1/2 a tick, as sha256-tree/1048576",
        "problem      none",
    ):
        assert text in shown
    assert page["epochs"][0]["due"] == page["epochs"][0]["taken"]
    assert page["epochs"][0]["taken"]


def test_log_prints_every_record_in_words(run, ask):
    code, shown = ask("log", run, "--chip", CHIP)
    records = parse_log((run / "chips" / CHIP / "log.bin").read_bytes())
    lines = shown.splitlines()
    assert code == 0
    assert len(lines) == len(records) + 1
    for record, line in zip(records, lines[1:], strict=True):
        assert line.split()[0] == str(record.counter)
        assert line.split()[3] == record.kind.name
    [page] = json.loads(ask("log", run, "--chip", CHIP, "--json")[1])
    assert [each["digest"] for each in page["records"]] == [record.digest.hex() for record in records]
    assert "firmware" in page["records"][1]["says"]


def test_quote_prints_its_fields_and_what_they_were_compared_with(run, honest, ask):
    [page] = json.loads(ask("quote", run, "--chip", CHIP, "--json")[1])
    assert page["fields"]["nonce"] == {"value": honest.trust.nonce.hex(), "compared_with": "last record of the log"}
    assert page["fields"]["chip_id"] == {"value": CHIP, "compared_with": "certificate"}
    assert page["fields"]["snapshot_algorithm"]["compared_with"] is None
    code, shown = ask("quote", run, "--chip", CHIP)
    assert code == 0
    assert f"quote of chip {CHIP}, signed by {page['signed_by']}" in shown
    code, shown = ask("quote", run.with_name("run.lab"))
    assert code == 2
    assert "a chip does not keep its quotes" in shown


def test_one_chips_folder_may_be_named_too(run, ask):
    for folder in (run / "chips" / CHIP, run.with_name("run.lab") / "chips" / CHIP):
        code, shown = ask("show", folder)
        assert code == 0
        assert shown.startswith(f"chip         {CHIP}\n")


def test_what_is_not_there_is_the_callers_mistake(run, ask):
    for words in (
        ("show", run, "--chip", "lab-chip-0009"),
        ("show", run / "nothing"),
        ("log", run / "data"),
        ("verify-log", run / "chips" / CHIP / "nothing"),
        ("verify-log", run / "chips" / CHIP / "log.bin", "--trust", run.with_name("no.json")),
        ("verify-log", run / "chips" / CHIP / "log.bin", "--quote", run / "no.json"),
        ("verify-log", run.with_name("run.lab") / "chips" / CHIP / "log.bin"),
    ):
        code, shown = ask(*words)
        assert code == 2, words
        assert shown.startswith("chipwitness chip: ")


def test_verify_log_accepts_an_honest_chip(run, ask):
    code, shown = ask("verify-log", run / "chips" / CHIP / "log.bin", "--json")
    verdict = json.loads(shown)
    assert (code, verdict["outcome"]) == (0, "ACCEPT")
    assert verdict["evidence"]["chip"] == CHIP
    assert verdict["evidence"]["records"]["GENESIS"] == 1


def test_verify_log_takes_files_from_anywhere(run, tmp_path, ask):
    files = {}
    for number, name in enumerate(("log.bin", "chain.pem", "quote.json", "epochs.json")):
        files[name] = tmp_path / f"file{number}"
        shutil.copy(run / "chips" / CHIP / name, files[name])
    words = ["verify-log", files["log.bin"], "--chain", files["chain.pem"], "--quote", files["quote.json"]]
    words += ["--epoch-keys", files["epochs.json"]]
    assert ask(*words)[0] == 2
    words += ["--trust", run.with_name("run.trust.json")]
    assert ask(*words)[0] == 0
    code, shown = ask(*words, "--chip", "lab-chip-0000")
    assert code == 1
    assert f"chip lab-chip-0000: presents the identity of chip {CHIP}" in shown


def _shorten(folder):
    path = folder / "log.bin"
    path.write_bytes(path.read_bytes()[:-RECORD_BYTES])


def _other_log(folder):
    shutil.copy(folder.parent / "lab-chip-0000" / "log.bin", folder)


def _other_chip(folder):
    shutil.rmtree(folder)
    shutil.copytree(folder.parent / "lab-chip-0000", folder)


def _flip(name, place):
    def alter(folder):
        content = bytearray((folder / name).read_bytes())
        content[place] ^= 1
        (folder / name).write_bytes(content)

    return alter


@pytest.mark.parametrize(
    ("alter", "said"),
    [
        (_shorten, "but its quote gives"),
        (_other_log, "chip's genesis"),
        (_other_chip, "presents the identity of chip lab-chip-0000"),
        (_flip("log.bin", 3 * RECORD_BYTES + 20), "log record"),
        (_flip("quote.json", 60), "signature does not verify"),
        (_flip("chain.pem", 100), "certificate"),
        (_flip("epochs.json", 20), "epoch"),
        (lambda folder: (folder / "quote.json").unlink(), "quote.json"),
        (lambda folder: (folder / "log.bin").write_bytes(b""), "log is empty"),
    ],
)
def test_altered_evidence_is_rejected_by_all(run, ask, alter, said):
    folder = run / "chips" / CHIP
    alter(folder)
    code, shown = ask("verify-log", folder / "log.bin")
    assert code == 1
    assert shown.startswith("REJECT\n")
    for action in ("show", "log", "quote"):
        code, page = ask(action, run, "--chip", CHIP)
        assert code == 1, action
        assert said in page
        code, page = ask(action, run, "--json")
        assert code == 1
        assert [entry["chip"] for entry in json.loads(page) if entry["problem"]] == [CHIP]


def test_a_makers_chip_that_runs_other_firmware_is_shown_and_rejected(make_run, ask):
    run = make_run("odd", lie="run-old-firmware").run
    chip = "lab-chip-0000"
    code, shown = ask("show", run, "--chip", chip)
    assert code == 0
    assert "firmware     chipwitness-firmware 0.9, security version 0" in shown
    code, shown = ask("verify-log", run / "chips" / chip / "log.bin")
    assert code == 1
    assert "is not allowed" in shown


def test_a_chip_of_another_world_is_rejected(run, make_run, ask):
    """Whole in itself, but by no maker that the trust file names, and no chip that it lists."""
    other = make_run("other", seed=6, lab="elsewhere").run
    log = other / "chips" / "elsewhere-chip-0000" / "log.bin"
    assert ask("show", log.parent)[0] == 0
    code, shown = ask("verify-log", log, "--trust", run.with_name("run.trust.json"))
    assert code == 1
    assert "chip elsewhere-chip-0000 is not listed in the trust file" in shown


def test_foreign_names_are_escaped(run, ask):
    folder = run / "chips" / CHIP
    odd = folder.with_name("a\x1b[2Jb")
    folder.rename(odd)
    for action in ("show", "log", "quote"):
        shown = ask(action, run)[1]
        assert "\x1b" not in shown
        assert r"a\x1b[2Jb" in shown
    with off("visible text"):
        assert "\x1b" in ask("show", run)[1]
