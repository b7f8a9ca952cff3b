"""Batches: line-numbered refusals, all or nothing, one chip once; proofs that hold without the database."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from firmware_sim.errors import CallerError, EvidenceError
from inspector.registry import (
    ChipProof,
    ChipRecord,
    Genesis,
    ImportRejected,
    RegistryMisuse,
    Transfer,
    UnknownChip,
    log_consistency,
    prove_chip,
    read_chips,
    summarise,
    verify_chip,
    verify_extension,
)

DIGEST = "sha256:" + "ab" * 32


def write(tmp_path: Path, text: str, *, encoding: str = "utf-8") -> Path:
    path = tmp_path / "chips.csv"
    path.write_bytes(text.encode(encoding))
    return path


def test_reads_columns_in_any_order(tmp_path: Path) -> None:
    path = write(tmp_path, f"identity,chip,model\n{DIGEST},a-1,H100 SXM\n,a-2,\n")
    assert read_chips(path) == [ChipRecord("a-1", "H100 SXM", DIGEST), ChipRecord("a-2", "", "")]
    assert read_chips(write(tmp_path, '\ufeffchip\r\n"a"\r\nb\r\n')) == [ChipRecord("a"), ChipRecord("b")]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", 1, "empty"),
        ("serial\na\n", 1, "unknown column 'serial'"),
        ("model\nH100\n", 1, "column 'chip' is missing"),
        ("chip,chip\na,b\n", 1, "twice"),
        ("chip,model\na,x\nb\n", 3, "1 fields, but the header has 2"),
        ("chip\na\n\nb\n", 3, "0 fields"),
        ("chip\na\nb c\n", 3, "chip id 'b c'"),
        ("chip\na\n-b\n", 3, "chip id '-b'"),
        ("chip\n" + "a" * 65 + "\n", 2, "chip id"),
        ("chip\na\nb\na\n", 4, "chip a is on line 2 already"),
        (f"chip,identity\na,{DIGEST}\nb,{DIGEST}\n", 3, "identity of the chip on line 2"),
        ("chip,identity\na,abc\n", 2, "identity 'abc'"),
        ("chip,model\na,ta\tb\n", 2, "model"),
        ('chip\na\n"b\n', 3, "unexpected end"),
    ],
)
def test_refusals_name_file_and_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ImportRejected) as caught:
        read_chips(path)
    assert f"{path}: line {line}: " in str(caught.value)
    assert words in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(RegistryMisuse, match="No such file"):
        read_chips(tmp_path / "none.csv")
    with pytest.raises(ImportRejected, match="UTF-8"):
        read_chips(write(tmp_path, "chip\né\n", encoding="latin-1"))
    with pytest.raises(ImportRejected, match="no chips"):
        read_chips(write(tmp_path, "chip\n"))


def test_known_chips_are_refused_and_the_batch_with_them(world) -> None:
    before = (summarise(world.registry), world.registry.head())
    with pytest.raises(ImportRejected, match=r"chip chip-0007 \(number 2 of the batch\): chip is known already"):
        world.import_chips(["new-1", "chip-0007", "new-2"], label="second")
    with pytest.raises(ImportRejected, match="holds a chip twice"):
        world.import_chips(["new-1", "new-1"], label="second")
    assert (summarise(world.registry), world.registry.head()) == before
    world.import_chips(["new-1", "new-2"], maker="rival-fab", label="second")
    assert summarise(world.registry).chips == 22


def test_one_identity_serves_one_chip(world) -> None:
    def bring(*chips: ChipRecord) -> None:
        world.registry.import_chips(list(chips), maker="fab", label="b", key=world.keys["fab"])

    bring(ChipRecord("x", "", DIGEST), ChipRecord("y"), ChipRecord("z"))
    with pytest.raises(ImportRejected, match=r"chip clone \(number 1 of the batch\): identity is known already"):
        bring(ChipRecord("clone", "", DIGEST))
    with pytest.raises(ImportRejected, match="holds a identity twice"):
        bring(ChipRecord("p", "", DIGEST.replace("a", "c")), ChipRecord("q", "", DIGEST.replace("a", "c")))


def test_empty_batch(world) -> None:
    with pytest.raises(CallerError, match="at least one chip"):
        world.import_chips([])


def test_chip_records_without_a_csv_obey_the_same_rules() -> None:
    for fields in (("a b",), ("",), ("a", "x\0y"), ("a", "", "md5")):
        with pytest.raises(CallerError):
            ChipRecord(*fields)


def test_proof_of_a_chip(world) -> None:
    world.import_chips([f"b-{number}" for number in range(7)], label="second")
    world.pass_on("b-5", "chip-0001")
    world.now += 5
    world.pass_on("b-5", sender="lab-a", receiver="lab-b")
    anchor = {"origin": world.registry.origin, "registrar": world.keys["registrar"].verifying}
    proof = prove_chip(world.registry, "b-5")
    genesis, first, second = verify_chip(ChipProof.from_bytes(proof.to_bytes()), **anchor)
    assert isinstance(genesis, Genesis)
    assert (genesis.label, genesis.count) == ("second", 7)
    assert isinstance(first, Transfer)
    assert isinstance(second, Transfer)
    assert (first.receiver, second.receiver) == ("lab-a", "lab-b")
    with pytest.raises(UnknownChip, match="ghost"):
        prove_chip(world.registry, "ghost")

    other = prove_chip(world.registry, "chip-0001")
    lies = {
        "another record": replace(proof, record=ChipRecord("b-5", "A100")),
        "another chip": replace(proof, record=ChipRecord("b-4", "H100")),
        "another place": replace(proof, position=4),
        "another path": replace(proof, batch_path=other.batch_path),
        "a record left out": replace(proof, entries=(proof.entries[0], proof.entries[2])),
        "genesis left out": replace(proof, entries=proof.entries[1:]),
        "no record": replace(proof, entries=()),
        "another batch": replace(proof, entries=(other.entries[0], *proof.entries[1:])),
        "another event": replace(proof, entries=(replace(proof.entries[0], event=0), *proof.entries[1:])),
        "an altered entry": replace(
            proof,
            entries=(
                replace(proof.entries[0], entry=proof.entries[0].entry.replace(b"genesis", b"genesiz")),
                *proof.entries[1:],
            ),
        ),
        "no head": replace(proof, head=b""),
    }
    for lie in lies.values():
        with pytest.raises(EvidenceError):
            verify_chip(lie, **anchor)
    with pytest.raises(EvidenceError, match="not signed by key"):
        verify_chip(proof, origin=world.registry.origin, registrar=world.keys["fab"].verifying)
    with pytest.raises(EvidenceError):
        verify_chip(proof, origin="chipwitness-registry/other", registrar=anchor["registrar"])
    for garbage in (b"{}", b"[]", b"7", proof.to_bytes() + b" "):
        with pytest.raises(EvidenceError):
            ChipProof.from_bytes(garbage)


def test_the_log_extends_its_past(world) -> None:
    old, old_bytes = world.registry.head()
    world.pass_on("chip-0001")
    world.pass_on("chip-0002")
    proof, new_bytes = log_consistency(world.registry, old.size)
    anchor = {"origin": world.registry.origin, "registrar": world.keys["registrar"].verifying}
    verify_extension(old_bytes, new_bytes, proof, **anchor)
    with pytest.raises(EvidenceError):
        verify_extension(old_bytes, new_bytes, proof[:-1], **anchor)
    with pytest.raises(EvidenceError):
        verify_extension(new_bytes, old_bytes, proof, **anchor)
