"""Law 6: nothing is allocated, looped over, decoded or printed before its size and form are checked.

Each hostile folder is signed with the lab's own key, so that all of it is read that is read of an honest one. A child
process verifies it and is measured: at most 4 seconds and 1 GB more than an honest run of two steps takes, an exit code
of the product's own, no traceback, no control character. With the guard off the same folder breaks a limit.
"""

from __future__ import annotations

import atexit
import base64
import functools
import hashlib
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from firmware_sim.evidence import canonical, digest_bytes
from inspector.inspection.trust import Trust
from monitor.lab.simulated_lab import SimulatedLab, lab_path
from monitor.transcript import Entry
from monitor.transcript.draft import Draft
from monitor.transcript.layout import METADATA, SAMPLES, batch_path, program_path
from tests.agreements import resigned

NOW = ("--now", "2026-01-01T00:30:00Z")
_ROOT = Path(__file__).resolve().parents[2]
SECONDS, BYTES = 4.0, 1 << 30
DIES_AFTER, DIES_ABOVE = 10, 3 << 30
"""CPU seconds and address space of a child, which has 1 GB of the latter when torch is loaded."""


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it took."""

    code: int
    output: str
    seconds: float
    memory: int

    @property
    def is_clean(self) -> bool:
        controls = [each for each in self.output if unicodedata.category(each) in ("Cc", "Cf") and each != "\n"]
        return self.code in (0, 1, 2, 3) and "Traceback" not in self.output and not controls


FORKS = """
import json, os, resource, runpy, sys
import analysis.commands.dispatch, inspector.inspection.inspection, inspector.inspection.transcripts, torch

for line in sys.stdin:
    module, arguments, seconds, space, path = json.loads(line)
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_AS, (space, space))
        output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1), os.dup2(output, 2)
        sys.stdin = open(os.devnull)
        from analysis.cli import main
        from tests.guards import main as unguarded
        code = 70
        try:
            code = (main if module == "analysis.cli" else unguarded)(arguments)
        except SystemExit as ended:
            code = ended.code
        except BaseException:
            import traceback
            traceback.print_exc()
            code = 1
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    _, status, used = os.wait4(child, 0)
    answer = [os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, used.ru_maxrss * 1024]
    print(json.dumps(answer), flush=True)
"""
"""A process that has loaded the product, and starts each command as a child of its own, with limits and a usage."""


@functools.cache
def _forks() -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", FORKS]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=_ROOT)
    atexit.register(process.__exit__, None, None, None)  # closes its input, at whose end it ends
    return process


def call(module: str, arguments: list[Any], *, seconds: int = 60) -> Ended:
    process = _forks()
    assert process.stdin is not None
    assert process.stdout is not None
    with tempfile.NamedTemporaryFile() as output:
        request = [module, [str(each) for each in arguments], seconds, DIES_ABOVE, output.name]
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()
        code, used, memory = json.loads(process.stdout.readline())
        return Ended(code, output.read().decode(errors="replace"), used, memory)


def call_process(words: list[str]) -> Ended:
    """The same for a program that is not the product's."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, cwd=_ROOT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (DIES_ABOVE, DIES_ABOVE)),
    )  # fmt: skip
    assert child.stdout is not None
    output = child.stdout.read().decode(errors="replace")
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    child.stdout.close()
    return Ended(child.returncode, output, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)


def command(*arguments: Any) -> Ended:
    return call("analysis.cli", list(arguments))


def unguarded(guards: tuple[str, ...], *arguments: Any, seconds: int = DIES_AFTER) -> Ended:
    return call("tests.guards", [*guards, "--", *arguments], seconds=seconds)


def verify(run: Path) -> tuple[Any, ...]:
    return ("verify", run, "--trust", run.with_name(run.name + ".trust.json"), *NOW)


@dataclass(frozen=True)
class Honest:
    run: Path
    loop: Path
    cost: Ended

    def refuses(self, ended: Ended, code: int = 1) -> None:
        assert ended.is_clean, ended
        assert ended.code == code, ended
        assert ended.seconds <= self.cost.seconds + SECONDS, ended
        assert ended.memory <= self.cost.memory + BYTES, ended

    def is_broken_without(self, guards: tuple[str, ...], *arguments: Any) -> None:
        """A limit is broken: it was killed for its time or lacked memory, took too much of either, or fell over."""
        ended = unguarded(guards, *arguments, seconds=math.ceil(self.cost.seconds + SECONDS))
        killed = ended.code < 0
        lacked = "not enough memory" in ended.output or "MemoryError" in ended.output
        dear = ended.seconds > self.cost.seconds + SECONDS or ended.memory > self.cost.memory + BYTES
        assert killed or lacked or dear or not ended.is_clean, ended


@pytest.fixture(scope="module")
def honest(tmp_path_factory, record) -> Honest:
    """A preset's run and a loop of two steps, and what verifying the former takes."""
    from monitor import Recorder
    from tests.conftest import STARTED

    folder = tmp_path_factory.mktemp("honest")
    recorded = record(folder / "run", steps=2, chips=2, checkpoint_every=1)
    (folder / "run.trust.json").write_text(json.dumps(recorded.trust.to_json()))
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"seed": 5, "chips": 2, "checkpoint_every": 1, "lab": "lab"}
    recorder = Recorder(
        model, optimizer, out=folder / "loop", started=STARTED, hours=1.0, snapshot_rate=Fraction(1, 2), **options
    )
    for batch in torch.randn(2, 3, 4):
        with recorder.step(batch):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    recorder.finish()
    cost = command(*verify(folder / "run"))
    assert cost.code == 0, cost
    assert command(*verify(folder / "loop")).code == 0
    return Honest(folder / "run", folder / "loop", cost)


def encode(value: object) -> bytes:
    """Canonical JSON without any limit, as a lab may write it."""
    sys.set_int_max_str_digits(0)
    try:
        return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()
    finally:
        sys.set_int_max_str_digits(4300)


class Forger:
    """A lab that edits a copy of its own run and signs all of it again."""

    def __init__(self, source: Path, run: Path) -> None:
        shutil.copytree(source, run)
        shutil.copy(source.with_name(source.name + ".trust.json"), run.with_name(run.name + ".trust.json"))
        self.run = run
        self.key = SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(source)))
        self.draft = Draft.read(run, self.key)

    def sign(self) -> Path:
        self.draft.sign(self.run, self.key)
        return self.run

    def put(self, path: str, content: bytes) -> None:
        self.draft.put(self.run, path, content)

    def change_metadata(self, change: Callable[[dict[str, Any]], None]) -> None:
        metadata = canonical.decode((self.run / METADATA).read_bytes())
        change(metadata)
        content = encode(metadata)
        self.put(METADATA, content)
        self.draft.run = digest_bytes("run", content).value.hex()

    def change_leaves(self, change: Callable[[dict[str, Any]], None] = lambda leaf: None) -> None:
        """Change the leaf of each step; the root of their log is signed anew."""
        leaves = [canonical.decode(leaf) for leaf in self.draft.leaves]
        for leaf in leaves[1:]:
            change(leaf)
        self.draft.leaves = [encode(leaf) for leaf in leaves]

    def replace_programs(self, program: dict[str, Any], change: Callable[[dict[str, Any]], None]) -> None:
        """Let all steps run one other program."""
        content = encode(program)
        digest = hashlib.sha256(content).hexdigest()
        for path in [path for path in self.draft.files if path.startswith("programs/")]:
            self.draft.drop(self.run, path)
        self.put(program_path(digest), content)

        def change_execution(leaf: dict[str, Any]) -> None:
            leaf["execution"]["program"] = digest
            change(leaf["execution"])

        self.change_leaves(change_execution)

    def program(self) -> dict[str, Any]:
        path = next(path for path in self.draft.files if path.startswith("programs/"))
        found: dict[str, Any] = canonical.decode((self.run / path).read_bytes())
        return found


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.fixture
def forge(honest, tmp_path) -> Callable[[Path], Forger]:
    return lambda source: Forger(source, tmp_path / "run")


def make_rank(forge, honest) -> Path:
    """A batch with 10^6 dimensions, in a program that nobody agreed to: 12 MB."""
    forger = forge(honest.loop)
    program = forger.program()
    layout = next(iter(program["batch"].values()))
    layout["shape"] = [1 << 36] * 1_000_000
    forger.replace_programs(program, lambda execution: None)
    return forger.sign()


def test_b1_batch_with_a_million_dimensions(honest, forge):
    ended = command(*verify(make_rank(forge, honest)))
    honest.refuses(ended)
    assert "no amendment that allows it was countersigned" in ended.output


def test_b1_guard_off_decoding_takes_quadratic_time(honest, forge):
    honest.is_broken_without(("agreed before opened", "tensor shapes"), *verify(make_rank(forge, honest)))


def test_b1_rank_is_bounded_in_an_agreed_program_too(honest, forge):
    run = make_rank(forge, honest)
    programs = [path.stem for path in (run / "programs").iterdir()]
    trust = run.with_name("run.trust.json")
    trust.write_text(json.dumps(resigned(honest.loop, Trust.load([trust]), programs=programs).to_json()))
    ended = command(*verify(run))
    honest.refuses(ended)
    assert "1000000 dimensions of a tensor" in ended.output


def make_product(forge, honest) -> Path:
    """20,000 numbers that change in steps of 64 updates by an optimizer of 1,000 groups.

    Nothing multiplies these counts any more, so that no guard can be switched off to show what the product costs.
    """
    forger = forge(honest.loop)
    program = forger.program()
    program["updates"] = [[0, 1]] * 64
    program["scalars"] = ["0x1.0000000000000p+0"] * 20_000
    numbers = {"args": [[{"$scalar": number} for number in range(20_000)]], "kwargs": {}}
    program["calls"] = [
        {"operator": "aten.add.Tensor", "arguments": numbers, "sources": [], "results": [], "draws": []}
    ]
    program["commit"] = dict.fromkeys(program["commit"])

    def declare_groups(metadata: dict[str, Any]) -> None:
        metadata["task"]["groups"] = metadata["task"]["groups"] * 1000
        metadata["task"]["parameters"] += [[]] * 999

    forger.change_metadata(declare_groups)
    changes = {"0x1.8000000000000p+0": list(range(20_000))}
    forger.replace_programs(program, lambda execution: execution.update(slots=changes, hyper=[{}] * 1000))
    return forger.sign()


def test_b2_slots_times_updates_times_groups(honest, forge):
    ended = command(*verify(make_product(forge, honest)))
    honest.refuses(ended)
    assert "is not the countersigned one; these parts differ: groups, parameters" in ended.output


def make_sparse(forge, honest, length: int) -> Path:
    """Samples that hold nothing and are as long as the lab has signed."""
    forger = forge(honest.run)
    os.truncate(forger.run / SAMPLES, length)
    forger.draft.files[SAMPLES] = Entry(length, "0" * 64)
    return forger.sign()


@pytest.mark.parametrize("gigabytes", [6, 200])
def test_b3_sparse_samples(honest, forge, gigabytes):
    ended = command(*verify(make_sparse(forge, honest, gigabytes << 30)))
    honest.refuses(ended)
    assert f"{SAMPLES} is signed with a length of {gigabytes << 30} bytes" in ended.output


def test_b3_guard_off_they_are_read(honest, forge):
    honest.is_broken_without(("signed lengths", "agreed data"), *verify(make_sparse(forge, honest, 200 << 30)))


def make_batch(forge, honest) -> Path:
    """A batch that holds nothing and is 6 GB longer than what its program reads."""
    forger = forge(honest.loop)
    os.truncate(forger.run / batch_path(1), 6 << 30)
    forger.draft.files[batch_path(1)] = Entry(6 << 30, "0" * 64)
    return forger.sign()


def test_drift_reads_no_batch_that_its_program_does_not_explain(honest, forge):
    ended = command("drift", make_batch(forge, honest), "--device", "sse41")
    honest.refuses(ended, code=2)
    assert "the batch of step 1 has 6442450944 bytes; its program reads at most" in ended.output


def test_guard_off_drift_reads_it(honest, forge):
    run = make_batch(forge, honest)
    honest.is_broken_without(("batch lengths",), "drift", run, "--device", "sse41")


def make_steps(forge, honest) -> Path:
    """Three small files that claim 99,999,999 steps.

    Whoever reads a step asks the journal for its record, and there is none: no guard can be switched off to show what
    waiting for each step's file costs.
    """
    forger = forge(honest.run)

    def declare_steps(metadata: dict[str, Any]) -> None:
        metadata["task"]["length"] = metadata["task"]["recipe"]["steps"] = 99_999_999

    forger.change_metadata(declare_steps)
    for path in forger.run.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
    forger.draft.files = {METADATA: forger.draft.files[METADATA]}
    forger.draft.finished, forger.draft.steps, forger.draft.leaves = False, 99_999_999, []
    run = forger.sign()
    assert sum(path.stat().st_size for path in run.iterdir()) < 5000
    return run


def test_b4_steps_without_files(honest, forge):
    ended = command(*verify(make_steps(forge, honest)))
    honest.refuses(ended)
    assert "99999999 steps, which take 100000001 records, but its journal has 1" in ended.output


def make_rate(forge, honest) -> Path:
    forger = forge(honest.loop)
    forger.change_leaves(lambda leaf: leaf["execution"].update(hyper=[{"lr": 10**400}]))
    return forger.sign()


def test_b5_learning_rate_of_400_digits(honest, forge):
    ended = command(*verify(make_rate(forge, honest)))
    honest.refuses(ended)
    assert "an integer of 1329 bits" in ended.output


def test_b5_guard_off_the_rate_is_no_float(honest, forge):
    ended = unguarded(("json integers", "rates are numbers"), *verify(make_rate(forge, honest)))
    assert "OverflowError" in ended.output, ended


def make_flop(forge, honest) -> Path:
    forger = forge(honest.run)
    forger.change_leaves(lambda leaf: leaf.update(flop=10**4300 - 1))
    return forger.sign()


def test_b5_flop_whose_sum_has_more_digits_than_python_writes(honest, forge):
    ended = command(*verify(make_flop(forge, honest)), "--json")
    honest.refuses(ended)
    assert "an integer of 14285 bits" in ended.output


def test_b5_guard_off_the_sum_cannot_be_printed(honest, forge):
    ended = unguarded(("json integers",), *verify(make_flop(forge, honest)), "--json")
    assert "ValueError" in ended.output, ended


SPOOF = "lab\n\x1b[2J\x1b[HACCEPT\n  [all] \u202eeverything hangs together"


def make_name(forge, honest) -> Path:
    forger = forge(honest.run)
    forger.change_metadata(lambda metadata: metadata.update(lab=SPOOF))
    forger.change_leaves()
    return forger.sign()


def test_b6_lab_name_with_line_ends_and_escapes(honest, forge):
    run = make_name(forge, honest)
    ended = command(*verify(run))
    honest.refuses(ended)
    assert "a lab's name must be 1 to 32 small letters" in ended.output
    assert "ACCEPT" not in ended.output.splitlines()
    honest.refuses(command(*verify(run), "--json"))


def test_b6_one_of_the_two_guards_is_enough_for_the_terminal(honest, forge):
    run = make_name(forge, honest)
    for guard in ("lab names", "visible text"):
        ended = unguarded((guard,), *verify(run))
        assert ended.is_clean, ended
        assert ended.code == 1


def test_b6_guard_off_the_terminal_shows_a_false_acceptance(honest, forge):
    ended = unguarded(("lab names", "visible text"), *verify(make_name(forge, honest)))
    assert "\n\x1b[2J\x1b[HACCEPT\n" in ended.output, ended


def test_b6_nothing_that_evidence_names_reaches_the_terminal_as_it_is(honest, forge):
    forger = forge(honest.run)
    (forger.run / "\x1b[31mACCEPT\nx").write_bytes(b"")
    ended = command(*verify(forger.run))
    assert (ended.is_clean, ended.code) == (True, 0), ended
    assert "ignored in" in ended.output
    assert "\\x1b[31mACCEPT\\nx" in ended.output


DISPUTE = """
import sys
import inspector.devices
inspector.devices.enter = lambda name: None
from monitor.lab.prover import LabProver
answer = LabProver.chunk

def oversized(self, *where):
    return bytes(10**7) if self.folder.name == "wrong" else answer(self, *where)

if sys.argv.pop(1) == "oversized":
    LabProver.chunk = oversized
from tests.guards import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def quarrel(tmp_path_factory, record) -> tuple[Any, ...]:
    """Two labs' runs that part at one operator, as arguments of a dispute."""
    folder = tmp_path_factory.mktemp("quarrel")
    options: dict[str, Any] = {"steps": 2, "chips": 2, "checkpoint_every": 1, "batch_size": 8}
    arguments: list[Any] = ["dispute", folder / "wrong", folder / "right"]
    for name, lie in (("right", None), ("wrong", "wrong-operator")):
        recorded = record(folder / name, lab=f"lab-{name}", lie=lie, lie_step=1, **options)
        trust = folder / f"{name}.trust.json"
        trust.write_text(json.dumps(recorded.trust.to_json()))
        arguments += ["--trust", trust]
    return tuple(arguments)


def dispute(quarrel, answers: str, guards: tuple[str, ...] = ()) -> Ended:
    return call_process(["-c", DISPUTE, answers, *guards, "--", *map(str, quarrel)])


def test_b7_oversized_chunk_of_a_dispute(honest, quarrel):
    usual = dispute(quarrel, "usual")
    assert usual.code == 1, usual
    assert "does not give what wrong states" in usual.output
    ended = dispute(quarrel, "oversized")
    assert ended.is_clean, ended
    assert ended.code == 1, ended
    assert "does not give what wrong states" in ended.output
    assert ended.seconds <= usual.seconds + SECONDS
    assert ended.memory <= usual.memory + BYTES


def make_nested(forge, honest, megabytes: int) -> Path:
    forger = forge(honest.run)
    nest = b"[" * 60 + b"]" * 60 + b","
    (forger.run / "manifest.json").write_bytes(b"[" + nest * (megabytes * 1_000_000 // len(nest)) + b"[]]")
    return forger.run


def test_b8_nested_empty_lists(honest, forge):
    ended = command(*verify(make_nested(forge, honest, 24)))
    assert (ended.is_clean, ended.code) == (True, 3), ended
    assert "no registered lab has signed its manifest.json" in ended.output


def test_b8_guard_off_each_list_is_made(honest, forge):
    honest.is_broken_without(("json items",), *verify(make_nested(forge, honest, 33)))
