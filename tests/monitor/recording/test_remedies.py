"""What a recorder says of a run that cannot go on as it is; and that no way which it can name goes without a test."""

from __future__ import annotations

import ast
import importlib
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from firmware_sim.errors import CallerError
from inspector.inspection.inspection import inspect
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome
from monitor import Recorder
from monitor.distributed.job import Job
from monitor.distributed.recorder import DistributedRecorder
from monitor.lab.simulated_lab import lab_path
from monitor.transcript import TranscriptWriter
from tests.monitor.recording.remedies import in_message, learn, linear, loss_of, pairs, sgd
from tests.monitor.recording.test_remedies_of_loops import LOOPS
from tests.monitor.recording.test_remedies_of_objects import OBJECTS
from tests.monitor.recording.test_remedies_of_operators import OPERATORS
from tests.monitor.recording.whole_loops import SETTINGS, STARTED

ROOT = Path(__file__).parents[3]


class Process:
    """A process that trains the same loop, from its beginning or from where another one ended."""

    def __init__(self, run, **options):
        torch.manual_seed(0)
        self.model = linear()
        self.optimizer = sgd(self.model)
        self.rate = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        options = {name: self.rate if value is ... else value for name, value in options.items()}
        if "stateful" in options and not isinstance(options["stateful"], dict):
            options["stateful"] = {"rate": options["stateful"]}
        if run.exists() and options.pop("resumes", True):
            self.recorder = Recorder.resume(self.model, self.optimizer, out=run, **options)
        else:
            options = {"seed": 5, "chips": 2, "lab": "lab", **options}
            self.recorder = Recorder(self.model, self.optimizer, out=run, started=STARTED, hours=1.0, **options)

    def train(self, steps, *, inside=True):
        torch.manual_seed(1)
        for batch in pairs(steps)[self.recorder.steps :]:
            with self.recorder.step(batch):
                learn(self.optimizer, loss_of(self.model, batch))
                if inside:
                    self.rate.step()
            if not inside:
                self.rate.step()

    def die(self):
        """The process ends within a step."""
        with suppress(ZeroDivisionError), self.recorder.step(pairs(1)[0]):
            raise ZeroDivisionError


@pytest.fixture
def judge(devices):
    def judged(run):
        trust = Trust.load([run.with_name(f"{run.name}.trust.json")], [run])
        return inspect([run], trust, SETTINGS, now=STARTED, worker=devices.run)

    return judged


def accepted(process, run, judge):
    process.train(3)
    process.recorder.finish()
    verdict = judge(run)
    return verdict.outcome is Outcome.ACCEPT or verdict.reasons


def test_a_folder_that_is_there_is_left_or_gone_on_in(tmp_path, judge):
    first = Process(tmp_path / "run")
    first.train(1)
    first.die()
    with pytest.raises(CallerError, match=r"choose another folder, or go on with Recorder\.resume"):
        Process(tmp_path / "run", resumes=False)
    assert accepted(Process(tmp_path / "other"), tmp_path / "other", judge) is True
    assert accepted(Process(tmp_path / "run"), tmp_path / "run", judge) is True


def test_who_has_failed_goes_on_from_the_last_step(tmp_path, judge):
    first = Process(tmp_path / "run")
    first.train(1)
    first.die()
    with pytest.raises(
        CallerError, match=r"so this recorder cannot go on; continue from the last step with Recorder\.resume"
    ):
        first.train(2)
    assert accepted(Process(tmp_path / "run"), tmp_path / "run", judge) is True


def test_who_is_refused_at_once_begins_anew(tmp_path, judge):
    first = Process(tmp_path / "run")
    with pytest.raises(CallerError), first.recorder.step(pairs(1)[0]):
        torch.special.bessel_j0(torch.ones(3, 3))
    with pytest.raises(CallerError, match="the run's folder was removed; create model, optimizer and recorder again"):
        first.train(1)
    assert accepted(Process(tmp_path / "run"), tmp_path / "run", judge) is True


def test_who_has_shut_down_goes_on(tmp_path, judge):
    first = Process(tmp_path / "run")
    first.train(1)
    first.recorder.shutdown()
    with pytest.raises(
        CallerError, match=r"the run was shut down; use Recorder\.resume to continue from its last step"
    ):
        first.train(2)
    assert accepted(Process(tmp_path / "run"), tmp_path / "run", judge) is True


def test_who_died_behind_the_evidence_of_the_chips_only_finishes(tmp_path, judge, monkeypatch):
    run = tmp_path / "run"
    first = Process(run)
    first.train(3)
    with monkeypatch.context() as patch:
        patch.setattr(TranscriptWriter, "_announce", killed_at_the_end)
        with pytest.raises(KeyboardInterrupt):
            first.recorder.finish()
    first.recorder._run.break_off()
    second = Process(run)
    with pytest.raises(CallerError, match=r"the chips have given their evidence; the only call left is finish\(\)"):
        second.train(4)
    second.recorder.finish()
    verdict = judge(run)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons


def killed_at_the_end(writer, record, announce=TranscriptWriter._announce, **counts):
    if record is None:
        raise KeyboardInterrupt
    announce(writer, record, **counts)


def test_a_step_that_is_open_is_left_first(tmp_path, judge):
    process = Process(tmp_path / "run")
    torch.manual_seed(1)
    batch = pairs(3)[0]
    with process.recorder.step(batch):
        learn(process.optimizer, loss_of(process.model, batch))
        process.rate.step()
        with pytest.raises(CallerError, match="a step is open; leave its with statement first"):
            process.recorder.finish()
    assert accepted(process, tmp_path / "run", judge) is True


@pytest.mark.parametrize(("way", "every"), [("crashes", 1000), ("shuts down", 1000), ("crashes", 1)])
def test_who_repeats_too_much_shuts_down_or_saves_more_often(tmp_path, judge, way, every):
    run, last = tmp_path / "run", 60
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        process = Process(run, checkpoint_every=every)
        for end in (15, 30, 45):
            process.train(end)
            process.recorder.shutdown() if way == "shuts down" else process.die()
            process = Process(run)
        process.train(last)
        process.recorder.finish()
    said = [str(each.message) for each in found if "chips count" in str(each.message)]
    is_told = any(
        "end a process with Recorder.shutdown(), after which nothing is repeated, or lower" in each for each in said
    )
    assert is_told is (way == "crashes" and every > 1), said
    assert judge(run).outcome is (Outcome.INCONCLUSIVE if is_told else Outcome.ACCEPT)


def test_a_run_that_keeps_states_moves_its_schedule_inside_of_steps(tmp_path, judge):
    with pytest.raises(CallerError, match=r"call schedule\.step\(\) inside the step's with statement"):
        Process(tmp_path / "run", stateful=...).train(2, inside=False)
    assert accepted(Process(tmp_path / "other", stateful=...), tmp_path / "other", judge) is True


def test_a_run_that_keeps_states_resumes_with_them_or_without_their_files(tmp_path, judge):
    for name in ("with", "without"):
        first = Process(tmp_path / name, stateful=...)
        first.train(2)
        first.die()
        with pytest.raises(CallerError, match=r"resume with stateful=\{'rate': …\}"):
            Process(tmp_path / name)
    assert accepted(Process(tmp_path / "with", stateful=...), tmp_path / "with", judge) is True
    newest = lab_path(tmp_path / "without") / "host-state-0.json"  # after an even number of steps
    newest.write_bytes(b"torn")
    gone = "without stateful, after you delete host-state-\\*\\.json from the lab's folder"
    for options in ({}, {"stateful": ...}):
        with pytest.raises(CallerError, match=f"resume {gone}"):
            Process(tmp_path / "without", **options)
    for file in newest.parent.glob("host-state-*.json"):
        file.unlink()
    process = Process(tmp_path / "without")
    process.rate.last_epoch = 2
    process.optimizer.param_groups[0]["lr"] = 0.1 * 0.9**2
    assert accepted(process, tmp_path / "without", judge) is True


class Keeps:
    """Keeps one thing."""

    def __init__(self, thing):
        self.thing = thing

    def state_dict(self):
        return {"thing": self.thing}

    def load_state_dict(self, state):
        self.thing = state["thing"]


def test_a_state_is_given_as_json_has_it(tmp_path, judge):
    with pytest.raises(CallerError, match="which JSON cannot hold; give numbers, text or a tensor"):
        Process(tmp_path / "run", stateful=Keeps(frozenset({1})))
    for name, thing in {"numbers": [1], "text": "1", "tensor": torch.ones(1)}.items():
        assert accepted(Process(tmp_path / name, stateful=Keeps(thing)), tmp_path / name, judge) is True


@pytest.fixture
def alone():
    """This process is all of a job."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_what_many_processes_share_is_for_another_recorder(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this module of torch's uses what torch warns of
        from torch.distributed.optim import ZeroRedundancyOptimizer
    model = linear()
    shared = nn.parallel.DistributedDataParallel(linear())
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    cut = fully_shard(linear(), mesh=init_device_mesh("cpu", (1,)))  # another test may have registered an accelerator
    for objects in ((shared, sgd(shared)), (cut, sgd(cut)), (model, zero), (model, [zero])):
        with pytest.raises(CallerError, match=r"use monitor\.distributed\.recorder\.DistributedRecorder"):
            Recorder(*objects, out=tmp_path / "run")


@pytest.mark.usefixtures("alone")
def test_what_changes_from_step_to_step_goes_into_the_batch_of_many_processes(tmp_path, judge):
    def train(run, loss, batches):
        def optimizer(parameters):
            return torch.optim.SGD(parameters, lr=0.1)

        torch.manual_seed(0)
        job = Job(model=linear, optimizer=optimizer, loss=loss, micro_batches=1, units=lambda model: [])
        recorder = DistributedRecorder(job, layout="alone", out=run, seed=1, lab="lab", started=STARTED)
        for number, batch in enumerate(batches, start=1):
            kept[0] = torch.tensor(1.0 / number)
            recorder.step(batch)
        recorder.finish()

    kept, inputs = [torch.ones(())], [x for x, _ in pairs()]
    with pytest.raises(
        CallerError, match="changes from step to step and that the step did not compute; pass it in the batch"
    ):
        train(tmp_path / "run", lambda model, x: model(x).square().mean() * kept[0], inputs)
    given = [(x, torch.full((4, 1), 1.0 / number)) for number, x in enumerate(inputs, start=1)]
    train(tmp_path / "other", lambda model, batch: (model(batch[0]) * batch[1]).square().mean(), given)
    verdict = judge(tmp_path / "other")
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons


PACKAGES = ("recording", "loops", "programs", "declaration", "adapters", "numerics")
HERE = (
    "exists already; choose another folder, or go on with Recorder.resume",
    "the step {}; pass it in the batch",
    "a Recorder records one process; use monitor.distributed.recorder.DistributedRecorder",
    "end a process with Recorder.shutdown(), after which nothing is repeated, or lower checkpoint_every",
    "a step is open; leave its with statement first",
    "a step failed, so this recorder cannot go on; continue from the last step with Recorder.resume",
    "the first step was refused and the run's folder was removed; create model, optimizer and recorder again",
    "the run was shut down; use Recorder.resume to continue from its last step",
    "the chips have given their evidence; the only call left is finish()",
    "resume with stateful={",
    "resume without stateful, after you delete host-state-*.json from the lab's folder",
    "in a run with stateful, call schedule.step() inside the step's with statement",
    "which JSON cannot hold; give numbers, text or a tensor",
)
"""Followed by the tests above."""
ELSEWHERE = {
    "leave it out to go on as it began": (
        "tests/monitor/recording/test_options.py",
        "leave it out to go on as it began",
    ),
    "exists already; choose another --out or resume it": ("tests/analysis/test_run_commands.py", "exists already"),
    "give it another where the model registers it, or in state=": (
        *("tests/attacks/test_law_4_models.py", "give it another"),
    ),
    "cannot be recorded; train without it": ("tests/monitor/adapters/test_adapters.py", "cannot be recorded"),
    "declare no schedule, and the rates are listed step by step": (
        *("tests/attacks/test_law_8_schedules.py", "declare no schedule"),
    ),
    "is not a schedule; take Schedule.of_scheduler(scheduler, steps=…)": (
        *("tests/monitor/declaration/test_schedules.py", "is not a schedule"),
    ),
    "declare Schedule.of_scheduler(scheduler, steps=…), with every=… if it goes on less often": (
        *("tests/attacks/test_law_8_schedules.py", "every=2"),
    ),
    "{} reaches {} by {} {}, {}{}{}": (*("tests/monitor/recording/test_path_warnings.py", "without passing a loss"),),
    "by numbers that nothing declares, which leaves an inspection in doubt; make it a parameter of the optimizer": (
        *("tests/attacks/test_law_5_buffers.py", "make it a parameter of the optimizer"),
    ),
    "which leaves an inspection in doubt; compute under torch.no_grad()": (
        *("tests/attacks/test_law_5_evaluations.py", "evaluations"),
    ),
    "its value has changed; a recorded run takes plain numbers: set group[{}] of optimizer.param_groups": (
        *("tests/monitor/declaration/test_formulas.py", "its value has changed"),
    ),
    "a gradient scaler's scale; write scaler.step(optimizer) or, before it, scaler.unscale_(optimizer)": (
        *("tests/attacks/test_law_5_working_copies.py", "gradient scaler's scale"),
    ),
    "begins with what its class does not make and no step of this run has left; begin with a new optimizer": (
        *("tests/monitor/declaration/test_formulas.py", "begins with what its class does not make"),
    ),
    "call torch.set_flush_denormal(False)": ("tests/monitor/recording/test_loops.py", "set_flush_denormal"),
}
"""Followed by tests of commands, of libraries that take long to load and of whole loops."""
NO_WAY = (
    # nothing is refused
    "the model is compiled; its original is recorded, operator by operator",
    # there is no way
    "the chip lost its record of the steps between in a power loss, so this run cannot be resumed",
    "heard of are not those of {}; this run cannot be resumed",
    "does not give its committed state when it is repeated; this run cannot be resumed",
    "this run's data were declared in advance and hold no such tensor",
    "there is nothing to say about this loop",
    "no step was recorded; there is no run to finish",
    "declared steps are recorded; the run is not finished",
    "bicubic samples of a volume; PyTorch has none",
    "an empty integer tensor has no median; give at least one element",
    # on an accelerator alone
    "something other than a recorded operator wrote {}; write it with PyTorch's operators",
    "record a recurrent layer on a CPU, or write its cell with plain operators",
    "switch cuDNN off for this operator",
    "pass a CPU generator or none",
    "this device fails the known-answer test of {}; it cannot be used",
    "fails its test; {} serve",
    # an argument, with what it may be
    "unknown schedule {}; known: {}",
    "the state has {} tensors, but only 1 … {} can be recorded",
    "the optimizer has {} parameter groups, but only 1 … {} can be recorded",
    "the optimizer has {} hyper-parameters, but at most {} can be recorded",
    "no exact function {}; there are {}",
    "unknown error bound {}; known: {}",
    "take (float64, float32) or (float32, bfloat16)",
    "take a probabilistic or calibrated bound",
    "this calibration was measured in FP64; give a factor instead",
    "unknown numerics {}; choose {}",
    # PyTorch refuses it before
    "weights of samples go with mode='sum'",
    "neither lengths nor offsets",
    "add the bias afterwards",
    "only 1-D, 2-D and 3-D convolutions are built",
    "evaluation needs running statistics",
    "{} is not a probability",
    "its sizes are not those of the forward pass",
    # a recorded step refuses it before, by other words
    "{} input; use float32",
    "a program that is replayed must not copy a value to Python, as `.item()` does",
    "the type of its result for half-precision operands is not known ({})",
    # of replays and of the session's own callers
    "the log counts {} elements of sub-operation {}; there are {}",
    "{} numerics have an empty rounding log; this one has {} bytes",
    "the step had {} calls, so there is no call {}",
    "this session has already controlled one training step; build a new one for the next",
)


def texts_of(node: ast.AST, module: object) -> list[str]:
    """What stands in the source; what is put in is {}, unless that is a constant of its module."""
    if isinstance(node, ast.IfExp):
        return texts_of(node.body, module) + texts_of(node.orelse, module)
    if isinstance(node, ast.Dict):
        return [text for value in node.values for text in texts_of(value, module)]
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.JoinedStr):
        return ["".join(texts_of(part, module)[0] for part in node.values)]
    if isinstance(node, ast.BinOp):
        return [texts_of(node.left, module)[0] + texts_of(node.right, module)[0]]
    if isinstance(node, ast.FormattedValue):
        return texts_of(node.value, module)[:1]
    found = getattr(module, node.id, None) if isinstance(node, ast.Name) else None
    return [found if isinstance(found, str) else "{}"]


def sources() -> Iterator[tuple[str, ast.AST, object]]:
    for package in PACKAGES:
        for path in sorted((ROOT / "monitor" / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            yield name, ast.parse(path.read_text(encoding="utf-8")), importlib.import_module(name)


def strings_in(tree: ast.AST, module: object) -> Iterator[str]:
    """Texts that are no docstrings."""
    documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr | ast.Constant) and id(node) not in documents | parts:
            yield from texts_of(node, module)


def remedies_in(tree: ast.AST, module: object) -> Iterator[str]:
    """Texts with a semicolon, and whatever is called a remedy or a way."""
    yield from (text for text in strings_in(tree, module) if "; " in text.strip())
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "UnsupportedOperator":
            yield from texts_of(node.args[1], module)
        elif isinstance(node, ast.FunctionDef) and ("remedy" in node.name or node.name.startswith("way_")):
            for each in ast.walk(node):
                if isinstance(each, ast.Return) and each.value is not None:
                    yield from texts_of(each.value, module)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("remedy", "_REMEDIES"):
            yield from texts_of(node.value, module)


def is_in(words: str, text: str) -> bool:
    return all(part in text for part in in_message(words))


ROWS = [each.says for table in (LOOPS, OBJECTS, OPERATORS) for each in table.values()]


def test_each_way_that_a_message_names_is_followed():
    """A remedy that is new needs a row, or a test of its own."""
    missing = [
        f"{name}: {text}"
        for name, tree, module in sources()
        for text in remedies_in(tree, module)
        if in_message(text) and not text.endswith("; {}")
        if not any(is_in(words, text) for words in (*ROWS, *HERE, *ELSEWHERE, *NO_WAY))
    ]
    assert not missing, "no row, and no test, follows: " + " | ".join(missing)


def test_no_way_is_followed_that_no_message_names():
    texts = [text for _, tree, module in sources() for text in strings_in(tree, module)]
    assert not [words for words in (*ROWS, *HERE, *ELSEWHERE, *NO_WAY) if not any(is_in(words, text) for text in texts)]


def test_tests_elsewhere_ask_for_the_same_words():
    for path, words in ELSEWHERE.values():
        assert words in (ROOT / path).read_text(encoding="utf-8")
