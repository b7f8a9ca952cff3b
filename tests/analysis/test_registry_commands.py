"""``chipwitness registry`` from key files to audit, as a person and as a program use it."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from analysis.cli import main
from tests.measurements.registry import run as run_bench

AT = "2026-01-01T00:00:00Z"


class Shell:
    """Runs ``chipwitness registry`` in a folder and keeps what it printed."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.capsys = capsys

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def run(self, line: str, *, code: int = 0) -> str:
        """Words ending in a known suffix are files of the folder."""
        words = [
            self.path(word) if word.endswith((".db", ".key", ".pub", ".csv", ".json", ".head")) else word
            for word in line.split()
        ]
        self.capsys.readouterr()
        assert main(["registry", *words]) == code, self.capsys.readouterr()
        captured = self.capsys.readouterr()
        if code and not captured.out:
            assert captured.err.startswith("chipwitness registry: ")
            assert captured.err.count("\n") == 1
            return captured.err
        return captured.out

    def json(self, line: str, *, code: int = 0) -> dict[str, Any]:
        answer = json.loads(self.run(line + " --json", code=code))
        assert isinstance(answer, dict)
        return answer

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def help(self, *words: str) -> str:
        """What ``--help`` prints."""
        with pytest.raises(SystemExit):
            main(["registry", *words, "--help"])
        return self.capsys.readouterr().out


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Shell:
    """A registry r.db with the parties fab, a, b, eye and the chips c-0 … c-9 made by fab."""
    shell = Shell(tmp_path, capsys)
    for name in ("registrar", "fab", "a", "b", "eye"):
        shell.run(f"keygen {name}.key")
    shell.run(f"init r.db --name world --registrar-key registrar.key --at {AT}")
    for name, role in (("fab", "maker"), ("a", "owner"), ("b", "owner"), ("eye", "inspector")):
        shell.run(
            f"enrol r.db --party {name} --role {role} --public {name}.key.pub --registrar-key registrar.key --at {AT}"
        )
    shell.write("chips.csv", "chip,model\n" + "".join(f"c-{n},H100\n" for n in range(10)))
    shell.run(f"import r.db chips.csv --maker fab --key fab.key --registrar-key registrar.key --at {AT}")
    return shell


WRITES = f"--registrar-key registrar.key --at {AT}"


def sell(shell: Shell, chips: str, sender: str = "fab", receiver: str = "a") -> dict[str, Any]:
    return shell.json(
        f"transfer r.db --from {sender} --to {receiver} {chips} "
        f"--key {sender}.key --counter-key {receiver}.key {WRITES}"
    )


def test_json_keys(shell: Shell) -> None:
    shell.run("keygen other.key")
    receipt = {"event", "chips", "head_size", "head_root"}
    assert set(shell.json("keygen more.key")) == {"private", "public", "key_id"}
    assert set(shell.json(f"init s.db --name s {WRITES}")) == {
        "database", "origin", "registrar", "head_size", "head_root",
    }  # fmt: skip
    assert set(shell.json(f"enrol r.db --party z --role owner --public other.key.pub {WRITES}")) == receipt - {"chips"}
    shell.write("more.csv", "chip\nd-0\n")
    assert set(shell.json(f"import r.db more.csv --maker fab --key fab.key {WRITES}")) == receipt
    assert set(sell(shell, "--chip c-0")) == receipt
    assert set(shell.json("show r.db")) == {"events", "chips", "holdings"}
    assert set(shell.json("show r.db c-0")) == {
        "chip", "model", "identity", "holder", "state", "sequence", "digest", "revoked", "history", "spans",
    }  # fmt: skip
    assert set(shell.json("head r.db")) == {"size", "root", "signed"}
    assert set(shell.json("audit r.db --registrar registrar.key.pub")) == {"ok", "events", "chips", "root", "findings"}


def test_from_reference_values_to_a_trust_file(shell: Shell) -> None:
    digest = "sha256:" + "ab" * 32
    shell.write("more.csv", f"chip,identity\nd-0,{digest}\nd-1,sha256:{'cd' * 32}\n")
    shell.run(f"import r.db more.csv --maker fab --key fab.key {WRITES}")
    sell(shell, "--chip d-0 --chip d-1")
    given = f"--ca {digest} --measurement {digest} --minimum-security-version 1 --snapshot-rate 1/4"
    values = shell.json(f"reference-values r.db --maker fab --key fab.key {given} {WRITES}")
    assert set(values) == {"event", "chips", "head_size", "head_root"}
    ask = "trust r.db --registrar registrar.key.pub --verifier eye"
    assert "not published a view yet" in shell.run(f"{ask} --out t.json", code=2)
    published = shell.json(f"publish r.db {WRITES}")
    assert set(published) == {"event", "size", "root", "map_root", "entries", "head_size", "head_root"}
    made = shell.json(f"{ask} --out t.json")
    assert set(made) == {
        "out", "size", "root", "map_root", "labs", "chips", "withdrawn", "verifier", "nonce", "later_events",
        "inspectorates",
        "countersigned",
        "spans",
        "deposits",
    }  # fmt: skip
    assert (made["labs"], made["chips"], made["withdrawn"]) == (["a"], 2, [])
    assert (made["size"], made["map_root"]) == (published["size"], published["map_root"])
    again = shell.json("trust r.db --registrar registrar.key.pub --challenge t.json --out again.json")
    assert (again["verifier"], again["nonce"]) == ("eye", made["nonce"])
    assert json.loads((shell.folder / "again.json").read_text()) == json.loads((shell.folder / "t.json").read_text())
    assert shell.json(f"{ask} --out fresh.json")["nonce"] != made["nonce"]
    assert shell.json(f"revoke r.db --chip d-1 --reason stolen {WRITES}")["chips"] == 1
    assert "its certificate is revoked" in shell.run("show r.db d-1")
    assert "d-1 was revoked after the newest view" in shell.run(f"{ask} --out late.json", code=2)
    shell.run(f"publish r.db {WRITES}")
    assert "revoked, lost or destroyed: d-1" in shell.run(f"{ask} --out late.json")
    assert "exists already" in shell.run(f"{ask} --out late.json", code=2)
    for words, message in (
        ("--nonce 00", "64 hex digits"),
        ("--challenge t.json", "leave out --verifier and --nonce"),
        ("--lab fab", "not enrolled as an owner"),
    ):
        assert message in shell.run(f"{ask} {words} --out x.json", code=2)
    no_verifier = "trust r.db --registrar registrar.key.pub --out x.json"
    assert "--verifier NAME is needed" in shell.run(no_verifier, code=2)
    assert not (shell.folder / "x.json").exists()
    assert shell.json("audit r.db --registrar registrar.key.pub")["ok"]


def test_a_clone_shown_at_a_census(shell: Shell) -> None:
    shell.write("more.csv", f"chip,identity\nd-0,sha256:{'ab' * 32}\nd-1,sha256:{'cd' * 32}\n")
    shell.run(f"import r.db more.csv --maker fab --key fab.key {WRITES}")
    sell(shell, "--chip d-0 --chip d-1")
    shell.run(f"census draw r.db --sample 2 --owner a --inspector eye --key eye.key {WRITES}")
    same = f"sha256:{'ab' * 32}"
    shell.write("answers.csv", f"chip,observed,identity\nd-0,d-0,{same}\nd-1,d-1,{same}\n")
    found = shell.json(
        f"census record r.db --census 1 --answers answers.csv --inspector eye --key eye.key {WRITES}", code=1
    )
    assert found["present"] == 1
    assert found["missing"] == [{"chip": "d-1", "holder": "a", "observed": "d-0"}]


def test_sale_loss_recovery_and_retirement(shell: Shell) -> None:
    shell.write("lot.csv", "chip\nc-1\nc-2\n")
    assert sell(shell, "--chips lot.csv")["chips"] == 2
    shell.run(f"lost r.db --holder a --chip c-1 --key a.key --reason stolen {WRITES}")
    assert shell.json("show r.db c-1")["state"] == "lost"
    shell.run(f"found r.db --holder a --witness eye --chip c-1 --key a.key --counter-key eye.key {WRITES}")
    shell.run(f"retire r.db --holder a --witness eye --chip c-1 --key a.key --counter-key eye.key {WRITES}")
    view = shell.json("show r.db c-1")
    assert (view["state"], view["holder"], view["sequence"]) == ("destroyed", "a", 4)
    assert [line["state"] for line in view["history"]] == ["fabricated", "owned", "lost", "owned", "destroyed"]
    assert "destroyed, a answers for it" in shell.run("show r.db c-1")
    assert "10 chips" in shell.run("show r.db")


def test_two_hands_that_never_share_a_key(shell: Shell) -> None:
    shell.run(f"transfer r.db --from fab --to a --chip c-3 --key fab.key --out half.json --at {AT}")
    assert "1 signatures are given, but 2 are needed" in shell.run(f"submit r.db half.json {WRITES}", code=1)
    answer = shell.json("accept half.json --key a.key --out whole.json")
    assert (answer["chips"], answer["signatures"]) == (["c-3"], 2)
    shell.run(f"submit r.db whole.json {WRITES}")
    assert "c-3: this statement is for record 1, which the log already has" in shell.run(
        f"submit r.db whole.json {WRITES}", code=1
    )
    shell.run("accept half.json --key b.key --out forged.json")
    assert "acceptance is signed by b, not by a" in shell.run(f"submit r.db forged.json {WRITES}", code=1)
    shell.run(f"retire r.db --holder a --witness eye --chip c-3 --key a.key --out scrap.json --at {AT}")
    shell.run("accept scrap.json --key eye.key --out scrapped.json")
    shell.run(f"submit r.db scrapped.json {WRITES}")
    assert shell.json("show r.db c-3")["state"] == "destroyed"


def test_census(shell: Shell) -> None:
    sell(shell, "--chip c-0 --chip c-1")
    seed = "ab" * 32
    drawn = shell.json(
        f"census draw r.db --sample 10 --seed {seed} --inspector eye --key eye.key --out drawn.csv {WRITES}"
    )
    assert set(drawn) == {"census", "event", "population", "chips"}
    assert {row["chip"]: row["holder"] for row in drawn["chips"]} == {
        f"c-{n}": "a" if n < 2 else "fab" for n in range(10)
    }
    assert (shell.folder / "drawn.csv").read_text().splitlines()[0] == "chip,holder"
    shell.write("answers.csv", "chip,observed\nc-1,c-7\n" + "".join(f"c-{n},c-{n}\n" for n in range(2, 7)))
    outcome = shell.json(
        f"census record r.db --census 1 --answers answers.csv --inspector eye --key eye.key {WRITES}", code=1
    )
    assert outcome["present"] == 5
    assert {(row["chip"], row["holder"], row["observed"]) for row in outcome["missing"]} == {
        ("c-0", "a", ""), ("c-1", "a", "c-7"), ("c-7", "fab", ""), ("c-8", "fab", ""), ("c-9", "fab", ""),
    }  # fmt: skip
    again = shell.run(
        f"census record r.db --census 1 --answers answers.csv --inspector eye --key eye.key {WRITES}", code=1
    )
    assert "recorded already" in again
    text = shell.run(f"census draw r.db --sample 1 --owner fab --inspector eye --key eye.key {WRITES}")
    assert "census 2: 1 of 5 chips" in text
    assert "exists already" in shell.run(
        f"census draw r.db --sample 1 --inspector eye --key eye.key --out drawn.csv {WRITES}", code=2
    )
    assert shell.json("show r.db")["events"] == 5 + 1 + 1 + 1 + 1 + 1


def test_a_census_that_misses_nothing_exits_with_0(shell: Shell) -> None:
    shell.run(f"census draw r.db --sample 10 --inspector eye --key eye.key {WRITES}")
    shell.write("answers.csv", "chip,observed\n" + "".join(f"c-{n},c-{n}\n" for n in range(10)))
    outcome = shell.json(f"census record r.db --census 1 --answers answers.csv --inspector eye --key eye.key {WRITES}")
    assert (outcome["present"], outcome["missing"]) == (10, [])
    assert "Exit code 1: a chip is lost" in " ".join(shell.help("census", "record").split())


def test_import_tells_the_form_of_an_identity(shell: Shell) -> None:
    text = " ".join(shell.help("import").split())
    assert "as sha256:HEX with 64 digits in small letters" in text
    shell.write("more.csv", f"chip,identity\nd-0,{'ab' * 32}\n")
    refused = shell.run(f"import r.db more.csv --maker fab --key fab.key {WRITES}", code=1)
    assert "is not a digest like sha256:HEX, 64 digits in small letters" in refused


def test_answers_are_refused_by_line(shell: Shell) -> None:
    shell.run(f"census draw r.db --sample 3 --inspector eye --key eye.key {WRITES}")
    record = f"census record r.db --census 1 --answers bad.csv --inspector eye --key eye.key {WRITES}"
    shell.write("bad.csv", "chip,observed\nc-1,c-1\nc-1,\n")
    assert "bad.csv: line 3: chip c-1 is answered for twice" in shell.run(record, code=1)
    shell.write("bad.csv", "chip,observed\nc-1,no good\n")
    assert "bad.csv: line 2: observed serial" in shell.run(record, code=1)


def test_audit_finds_what_was_changed(shell: Shell) -> None:
    shell.run("head r.db --out kept.head")
    sell(shell, "--chip c-0")
    assert shell.json("audit r.db --registrar registrar.key.pub --head kept.head")["ok"] is True
    with closing(sqlite3.connect(shell.folder / "r.db", isolation_level=None)) as database:
        database.execute("UPDATE holdings SET holder = 3 WHERE ordinal = 0")
    report = shell.json("audit r.db --registrar registrar.key.pub", code=1)
    assert report["ok"] is False
    assert "owner table" in report["findings"][0]
    assert "1 findings" in shell.run("audit r.db --registrar registrar.key.pub", code=1)
    assert shell.json("audit r.db --registrar fab.key.pub", code=1)["ok"] is False


def test_proof_travels_without_the_database(shell: Shell) -> None:
    sell(shell, "--chip c-4")
    shell.run("prove r.db c-4 --out c-4.json")
    (shell.folder / "r.db").unlink()
    answer = shell.json("check-proof c-4.json --name world --registrar registrar.key.pub")
    assert (answer["chip"], answer["records"]) == ("c-4", ["genesis", "transfer"])
    shell.run("check-proof c-4.json --name other --registrar registrar.key.pub", code=1)
    shell.run("check-proof c-4.json --name world --registrar fab.key.pub", code=1)
    (shell.folder / "c-4.json").write_bytes((shell.folder / "c-4.json").read_bytes().replace(b"H100", b"H200"))
    shell.run("check-proof c-4.json --name world --registrar registrar.key.pub", code=1)


def test_losses(shell: Shell) -> None:
    window = "--since 2025-12-31T00:00:00Z --until 2026-02-01T00:00:00Z"
    honest = shell.json(f"losses r.db --rate 0.01 {window}")
    assert set(honest) == {"suspicious", "model", "rate_per_chip_year", "false_alarm", "attained", "owners", "pooled"}
    assert honest["suspicious"] is False
    shell.write("gone.csv", "chip\n" + "".join(f"c-{n}\n" for n in range(4)))
    shell.run(f"lost r.db --holder fab --chips gone.csv --key fab.key {WRITES}")
    report = shell.json(f"losses r.db --rate 0.01 {window}", code=1)
    assert (report["suspicious"], report["owners"][0]["lost"]) == (True, 4)
    assert "SUSPICIOUS" in shell.run(f"losses r.db --rate 0.01 --model binomial {window}", code=1)
    assert "empty" in shell.run(
        "losses r.db --rate 0.01 --since 2026-01-01T00:00:00Z --until 2025-01-01T00:00:00Z", code=2
    )


def test_leakage(shell: Shell) -> None:
    answer = shell.json("leakage --fleet 7 --census 3 --diverted 2 6 --months 0 1 2 --confidence 0.9")
    assert [(row["diverted"], row["months"], row["unseen"]) for row in answer["rows"]] == [
        (2, 0, 1.0),
        (2, 1, pytest.approx(2 / 7)),
        (2, 2, pytest.approx(4 / 49)),
        (6, 0, 1.0),
        (6, 1, 0.0),
        (6, 2, 0.0),
    ]
    assert answer["rows"][-1]["log_unseen"] is None
    assert answer["months_until_seen"] == [{"diverted": 2, "months": 2.0}, {"diverted": 6, "months": 1.0}]
    assert "seen with probability 0.9 never" in shell.run(
        "leakage --fleet 7 --census 3 --diverted 0 --months 1 --confidence 0.9"
    )
    [row] = shell.json("leakage --registry r.db --census 5 --diverted 1 --months 1")["rows"]
    assert row["unseen"] == pytest.approx(0.5)
    far = "leakage --fleet 1000000 --census 100000 --diverted 10000 --months 12"
    assert "8.825e-5521\n" in shell.run(far)
    assert shell.json(far)["rows"][0]["log_unseen"] == pytest.approx(-12710.39, abs=0.01)
    assert "exceed the fleet" in shell.run("leakage --fleet 7 --census 8 --diverted 2 --months 1", code=2)
    assert "months" in shell.run("leakage --fleet 7 --census 3 --diverted 2 --months nan", code=2)


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("show none.db", 2, "no such registry"),
        ("show r.db ghost", 1, "chip ghost"),
        ("show chips.csv", 2, "not a database"),
        (f"init r.db --name again {WRITES}", 2, "exists already"),
        ("keygen fab.key", 2, "exists already"),
        (f"enrol r.db --party fab --role maker --public fab.key.pub {WRITES}", 1, "enrolled already"),
        (f"enrol r.db --party z --role owner --public fab.key {WRITES}", 2, "not a public key file"),
        (f"enrol r.db --party z --role owner --public none.pub {WRITES}", 2, "No such file"),
        (f"import r.db none.csv --maker fab --key fab.key {WRITES}", 2, "No such file"),
        (f"import r.db chips.csv --maker fab --key fab.key {WRITES}", 1, "c-0 (number 1 of the batch): chip is known"),
        (f"import r.db chips.csv --maker fab --key a.key {WRITES}", 1, "signed by a, not by fab"),
        (f"import r.db chips.csv --maker fab --key fab.key.pub {WRITES}", 2, "not a private key file"),
        ("import r.db chips.csv --maker fab --key fab.key --registrar-key fab.key", 2, "belongs to registrar"),
        (f"transfer r.db --from fab --to a --chip c-1 --key fab.key {WRITES}", 2, "two signatures: give --counter-key"),
        ("transfer r.db --from fab --to a --chip c-1 --key fab.key --counter-key a.key", 2, "-key is needed"),
        ("transfer r.db --from fab --to a --chip c-1 --key fab.key --counter-key a.key --out x.json", 2, "--out"),
        (f"transfer r.db --from fab --to fab --chip c-1 --key fab.key --counter-key fab.key {WRITES}", 2, "itself"),
        (f"transfer r.db --from a --to b --chip c-1 --key a.key --counter-key b.key {WRITES}", 1, "c-1 is held by fab"),
        (f"transfer r.db --from fab --to a --chip ghost --key fab.key --counter-key a.key {WRITES}", 1, "chip ghost"),
        (f"census draw r.db --sample 11 --inspector eye --key eye.key {WRITES}", 2, "10 are held"),
        (f"census draw r.db --sample 1 --seed 12 --inspector eye --key eye.key {WRITES}", 2, "64 hex digits"),
        (f"submit r.db chips.csv {WRITES}", 1, "JSON"),
        ("audit r.db --registrar none.pub", 2, "No such file"),
        ("show mysql://host/x", 2, "not mysql"),
        ("show r.db --at yesterday", None, ""),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(shell: Shell, line: str, code: int | None, words: str) -> None:
    if code is None:
        with pytest.raises(SystemExit) as caught:
            main(["registry", *line.split()])
        assert caught.value.code == 2
    else:
        assert words in shell.run(line, code=code)


def test_bad_time(shell: Shell) -> None:
    assert "is not a time" in shell.run("init t.db --name t --registrar-key registrar.key --at yesterday", code=2)


def test_private_key_file_is_private(shell: Shell) -> None:
    assert (shell.folder / "fab.key").stat().st_mode & 0o077 == 0


def test_bench_rows() -> None:
    rows = run_bench(chips=2_000, census=100, transfers=3)
    assert [(row["work"], row["mode"]) for row in rows] == [
        ("import 2,000 chips", "plain"),
        ("import 2,000 chips", "registry"),
        ("3 transfers", "plain"),
        ("3 transfers", "registry"),
        ("census of 100", "plain"),
        ("census of 100", "registry"),
        ("audit 2,000 chips", "registry"),
    ]
    assert all(row["seconds"] > 0 for row in rows)
    assert [row["ratio"] for row in rows if row["mode"] == "plain"] == [1.0, 1.0, 1.0]
    assert rows[-1]["ratio"] is None
