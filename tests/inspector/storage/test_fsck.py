"""Each kind of file altered in each way: ``verify`` and the second opinion, which shares no code with it, say so."""

from __future__ import annotations

import ast
import json
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from firmware_sim.errors import CallerError
from firmware_sim.evidence import SigningKey
from inspector.inspection.inspection import verify
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome
from inspector.storage import _fsck_formats, fsck
from monitor import Recorder
from monitor.lab.simulated_lab import SimulatedLab, lab_path
from monitor.transcript.draft import Draft
from tests.conftest import NOW, STARTED
from tests.handing import hand_over


@dataclass(frozen=True)
class World:
    """A run, whom to trust, and its lab's key."""

    run: Path
    trust: Trust
    key: SigningKey

    def second_opinion(self, run: Path) -> fsck.Report:
        return fsck.fsck(run, {lab: key.raw for lab, key in self.trust.labs.items()})

    def both_refuse(self, run: Path) -> str:
        """What the second opinion says; both must refuse what the lab hands over."""
        assert verify(run, self.trust, now=NOW).outcome is not Outcome.ACCEPT
        hand_over(run, self.key)
        assert verify(run, self.trust, now=NOW).outcome is Outcome.REJECT
        problems = self.second_opinion(run).problems
        assert problems
        return "; ".join(problems)


@pytest.fixture(scope="module")
def preset(tmp_path_factory, record) -> World:
    folder = tmp_path_factory.mktemp("preset")
    made = record(folder / "run", steps=3, chips=2, checkpoint_every=2, numerics="rounded", rate=Fraction(1))
    return World(made.run, made.trust, SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(made.run))))


@pytest.fixture(scope="module")
def loop(tmp_path_factory) -> World:
    run = tmp_path_factory.mktemp("loop") / "run"
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    optimizer = torch.optim.Adam(model.parameters())
    table = torch.randn(4)
    recorder = Recorder(
        model, optimizer, out=run, seed=5, chips=3, checkpoint_every=2, lab="lab", started=STARTED, hours=1.0
    )
    for batch in torch.randn(3, 3, 4):
        with recorder.step(batch):
            optimizer.zero_grad()
            model(batch * table).square().mean().backward()
            optimizer.step()
    recorder.finish()
    trust = Trust.load([run.with_name("run.trust.json")])
    return World(run, trust, SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(run))))


@pytest.fixture(params=["preset", "loop"])
def world(request) -> World:
    return request.getfixturevalue(request.param)


def edits(data: bytes, name: str) -> Iterator[bytes]:
    rng = random.Random(name)
    for at in {0, len(data) - 1, *(rng.randrange(len(data)) for _ in range(3))}:
        yield data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    yield data[:-1]
    yield data + b"\n"


def test_an_honest_run_is_sound_and_recomputed(preset, loop):
    found = preset.second_opinion(preset.run)
    assert found.problems == []
    assert (found.lab, found.finished, found.steps, found.batches) == ("lab", True, 3, 3)
    found = loop.second_opinion(loop.run)
    assert found.problems == []
    assert (found.steps, found.batches, found.states) == (3, 3, 3)  # W_0, W_2 and W_3
    assert found.commits == 3 * 4


def test_each_altered_missing_or_extra_file_is_named_by_both(world, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(world.run, run)
    kinds = set()
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        original, name = path.read_bytes(), path.relative_to(run).as_posix()
        kinds.add(name.partition("/")[0])
        for content in edits(original, name):
            path.write_bytes(content)
            assert name in world.both_refuse(run)
        path.unlink()
        assert name in world.both_refuse(run)
        path.symlink_to(world.run / name)
        assert name in world.both_refuse(run)
        path.unlink()
        path.write_bytes(original)
    assert {"manifest.json", "journal.tsv", "metadata.json", "data", "checkpoints", "chips"} < kinds
    extra = ["chips/notes.txt", "empty", "hollow", "logs/00000099.rlog", "notes.txt"]
    for name in ("empty/file", *extra):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_bytes(b"") if "." in name or "/" in name else (run / name).mkdir(exist_ok=True)
    assert world.second_opinion(run).problems == []
    assert sorted(world.second_opinion(run).ignored) == extra


def _leaf(at: int, **changes: object) -> Callable[[World, Path, Draft], None]:
    def change(world: World, run: Path, draft: Draft) -> None:
        leaf = {**json.loads(draft.leaves[at]), **changes}
        draft.leaves[at] = json.dumps(leaf, sort_keys=True, separators=(",", ":")).encode()

    return change


def _file(path: str, edit: Callable[[bytes], bytes]) -> Callable[[World, Path, Draft], None]:
    return lambda world, run, draft: draft.put(run, path, edit((run / path).read_bytes()))


def _with_gap(data: bytes) -> bytes:
    """safetensors with eight bytes that belong to no tensor."""
    return data + bytes(8)


RESIGNED = {
    "another step's leaf": (_leaf(2, step=1), "another step"),
    "leaf's batch": (_leaf(2, batch="ab" * 32), "batch"),
    "leaf's log": (_leaf(2, log="sha256:" + "ab" * 32), "log"),
    "salt": (_file("data/salt.bin", lambda data: bytes(32)), "batch"),
    "chip's log cut": (_file("chips/lab-chip-0000/log.bin", lambda data: data[:-1]), "whole number"),
    "chip's log reordered": (
        _file("chips/lab-chip-0000/log.bin", lambda data: data[:142] + data[284:426] + data[142:284] + data[426:]),
        "chain",
    ),
    "checkpoint with a gap": (_file("checkpoints/00000002.safetensors", _with_gap), "after its last tensor"),
    "checkpoint's header": (
        _file(
            "checkpoints/00000002.safetensors",
            lambda data: struct.pack("<Q", int.from_bytes(data[:8], "little") + 8) + b" " * 8 + data[8:],
        ),
        "canonical encoding",
    ),
    "metadata": (_file("metadata.json", lambda data: data.replace(b'"lab":"lab"', b'"lab":"bal"')), "a different run"),
    "stray file": (lambda world, run, draft: draft.put(run, "logs/00000042.rlog", b"x"), "does not belong"),
}


@pytest.mark.parametrize("name", RESIGNED)
def test_what_the_lab_signs_anew_is_still_found(world, tmp_path, name):
    run = tmp_path / "run"
    shutil.copytree(world.run, run)
    draft = Draft.read(run, world.key)
    change, expected = RESIGNED[name]
    change(world, run, draft)
    draft.sign(run, world.key)
    assert expected in world.both_refuse(run)


def test_a_state_that_its_leaf_does_not_have_is_found_in_a_loop(loop, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(loop.run, run)
    draft = Draft.read(run, loop.key)
    path = "checkpoints/00000002.safetensors"
    data = (run / path).read_bytes()
    draft.put(run, path, data[:-1] + bytes([data[-1] ^ 1]))
    draft.sign(run, loop.key)
    assert loop.both_refuse(run) == f"{path} is not the state that its leaf commits to"


def _constants(run: Path) -> str:
    return next(f"constants/{path.name}" for path in sorted((run / "constants").iterdir()))


CONSTANTS = {
    "another table": (
        lambda run, draft, path: draft.put(run, path, bytes(range(16))),
        "holds constants that are not its program's",
    ),
    "a table cut": (
        lambda run, draft, path: draft.put(run, path, (run / path).read_bytes()[:-4]),
        "does not hold its program's constants",
    ),
    "a table without a program": (
        lambda run, draft, path: draft.put(run, f"constants/{'0' * 64}.bin", b"1"),
        "where it does not belong",
    ),
    "no table": (lambda run, draft, path: draft.drop(run, path), "is not listed"),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_that_are_not_their_programs_are_found(loop, tmp_path, name):
    run = tmp_path / "run"
    shutil.copytree(loop.run, run)
    draft = Draft.read(run, loop.key)
    change, expected = CONSTANTS[name]
    change(run, draft, _constants(run))
    draft.sign(run, loop.key)
    assert expected in loop.both_refuse(run)


def test_a_program_that_no_step_runs_is_found(loop, tmp_path):
    import hashlib

    run = tmp_path / "run"
    shutil.copytree(loop.run, run)
    draft = Draft.read(run, loop.key)
    content = b"{}"
    draft.put(run, f"programs/{hashlib.sha256(content).hexdigest()}.json", content)
    draft.sign(run, loop.key)
    assert "which no step runs" in loop.both_refuse(run)


def test_an_unregistered_key_and_a_missing_folder_are_refused(loop, tmp_path):
    stranger = SigningKey.generate(bytes(31) + b"\1").verifying.raw
    assert fsck.fsck(loop.run, {"lab": stranger}).problems == ["manifest.json is signed by no registered lab"]
    with pytest.raises(CallerError, match="no run folder"):
        fsck.fsck(tmp_path / "nowhere", {"lab": stranger})
    with pytest.raises(CallerError, match="no lab"):
        fsck.fsck(loop.run, {})


def test_it_shares_no_code_with_what_it_checks():
    """Nothing of monitor, and nothing of the evidence formats: a mistake there must not hide itself."""
    for module in (fsck, _fsck_formats):
        assert module.__file__ is not None
        tree = ast.parse(Path(module.__file__).read_text())
        names = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        own = {name for name in names if name.partition(".")[0] in ("monitor", "inspector", "firmware_sim", "analysis")}
        assert own <= {"firmware_sim.errors", "inspector.storage._fsck_formats"}
