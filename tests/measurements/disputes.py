"""``disputes``: every lie of a lab about its numbers, told at random places, and what a referee rules on it.

An honest party and one that lies train the same loop, or answer the same prompts. The referee has to name the liar, the
first step at which the two runs differ, the operator that gave the wrong result, and a tile with the first element that
it altered; a lie that changes no committed result is to be accepted. Then up to four of these liars and the honest
party play a tournament, in which the honest one has to stand alone. Runs and games are real.
"""

from __future__ import annotations

import hashlib
import random
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any, Protocol, cast
from unittest import mock

import torch
from torch import Tensor

from analysis.bench.origin import write_among
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import SigningKey
from firmware_sim.lies import Chance, Scenery
from inspector.dispute.arena import check_tournament
from inspector.dispute.dispute import Disputant, play_here, settle_all
from inspector.dispute.game import check_game
from inspector.dispute.provider import result_of
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome
from monitor import Recorder
from monitor.lab.conduct import Conduct, LabLie
from monitor.lab.lies import LAB_LIES
from monitor.lab.prover import LabProver, OwnProver
from monitor.loops.optimizers import NoOptimizer
from monitor.numerics import Observer
from monitor.presets import initialise, preset
from monitor.recording.ordered_run import run_order
from monitor.replay.inference import Inference
from monitor.replay.ordering import order_inference
from monitor.transcript import RunFolder
from monitor.transcript.orders import OrderFolder
from tests.inspector.inspection.test_every_lie import LOOPS

__all__ = ["LIES", "OPERATOR", "WORKS", "holds_element", "run", "table", "verdict", "write"]

Row = dict[str, Any]
STEPS = 5
LIES = [
    name
    for name, lie in LAB_LIES.items()
    if lie.scenery in (Scenery.RUN, Scenery.EVALUATIONS) and lie.chance in (Chance.STEP, Chance.REST, Chance.ALWAYS)
]
"""Lies of one recording of any loop that alter what a replay reaches, or what is declared."""
OPERATOR, RESULT = "wrong-operator", "wrong-result"
LIES.append(RESULT)
_PLACED = frozenset(("change-sample", "unseen-write", "edited-optimizer", "edited-rounding-log", OPERATOR, RESULT))
"""Lies that take the place of what they alter, besides their step."""
_PLACES = 1 << 20
_INFERENCE, _ANSWERS, _WIDE = "delegated inference", " that answers", "wide"


def _wide_batch(step: int) -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(step)
    label = torch.randint(10, (1024,), generator=chance)
    return {"pixels": torch.randn(1024, 64, generator=chance), "label": label}


_LOOPS: Mapping[str, Any] = {
    **LOOPS,
    _WIDE: (
        lambda: torch.nn.Sequential(torch.nn.Linear(64, 640), torch.nn.GELU(), torch.nn.Linear(640, 10)),
        _wide_batch,
        LOOPS["convolutional"][2],
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    ),
}
"""Those of the inspection's tests, and one with results of several chunks, of which one is the tile."""
WORKS = (*_LOOPS, *(f"{model}{_ANSWERS}" for model in LOOPS), _INFERENCE)
_PROMPTS = (b"The with statement", b"import", b"A list", b"for", b"while x")
_HONEST = "honest"
_COLLUDERS = 4
_CLIENT = SigningKey.generate(bytes(32))
_ENDS = ("convicted", "no effect")
_STARTED = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(slots=True)
class _Told:
    """A lie, and the operators whose results it altered, each with the first element, as its run has seen them."""

    lie: LabLie
    step: int
    altered: list[tuple[str, int]] = field(default_factory=list)


class _Seen:
    """Notes each operator whose result another observer alters."""

    def __init__(self, inner: Observer, altered: list[tuple[str, int]]) -> None:
        self._inner, self._altered = inner, altered

    def before(self, index: int, func: Any, args: Any, kwargs: Any) -> None:
        """As the other one."""
        self._inner.before(index, func, args, kwargs)

    def after(self, index: int, func: Any, args: Any, kwargs: Any, out: object) -> None:
        """As the other one; compares the bits before and after it."""
        bits = out.detach().clone() if isinstance(out, Tensor) else None
        self._inner.after(index, func, args, kwargs, out)
        if bits is not None and not torch.equal(bits, cast(Tensor, out)):
            unlike = (bits != out) & ~(bits.isnan() & cast(Tensor, out).isnan())
            self._altered.append((str(func), int(unlike.reshape(-1).nonzero()[0])))


class _Reversed:
    """Reverses the rows of the first floating-point result at or after one operator index; of no view."""

    def __init__(self, index: int) -> None:
        self._index, self._done = index, False

    def before(self, index: int, func: Any, args: Any, kwargs: Any) -> None:
        """Nothing to do."""

    def after(self, index: int, func: Any, args: Any, kwargs: Any, out: object) -> None:
        """Alter the result once."""
        if self._done or index < self._index or not isinstance(out, Tensor) or not out.numel():
            return
        held = {each.untyped_storage().data_ptr() for each in args if isinstance(each, Tensor)}
        is_view = out.untyped_storage().data_ptr() in held and not func._schema.is_mutable
        if not out.is_floating_point() or is_view:
            return
        with torch.no_grad():
            out.copy_(out.flip(-1) if out.dim() and out.shape[-1] > 1 else out * 2 + 1)
        self._done = True


class _WrongResult(Conduct):
    """Returns the rows of one operator's result reversed, in one step."""

    def __init__(self, step: int, place: int = 0) -> None:
        self._step, self._place = step, place

    def observer(self, step: int) -> Observer | None:
        return _Reversed(self._place) if step == self._step else None


_REVERSING = replace(LAB_LIES[OPERATOR], name=RESULT, conduct=_WrongResult)


class _Work(Protocol):
    """Something that an honest party and a liar do."""

    def record(self, out: Path, told: _Told | None = None) -> None:
        """Do it once."""

    def prover(self, folder: Path, told: _Told | None = None) -> OwnProver:
        """Whoever answers for what it has done."""

    def trust(self, folders: Sequence[Path]) -> Trust:
        """Whom a referee trusts."""


class _Training(_Work):
    """A loop, with a lab's chips; ``evaluates``: it evaluates its model before each step, and after the last one."""

    def __init__(self, model: str, options: Mapping[str, Any], evaluates: bool) -> None:
        self._model, self._options, self._evaluates = model, options, evaluates

    def _loop(self) -> tuple[Any, Any, Any, Any]:
        """Model, optimizer, batches by the step's number, and what a step does with all three."""
        kind, batches, body, optimizer_of = _LOOPS[self._model]
        net = kind()
        return net, optimizer_of(net.parameters()), batches, body

    def record(self, out: Path, told: _Told | None = None) -> None:
        torch.manual_seed(3)
        net, optimizer, batches, body = self._loop()
        chosen = {"seed": 5, "chips": 2, "checkpoint_every": 2, "started": _STARTED, "hours": 1.0, **self._options}
        if told is not None:
            chosen |= {"lie": told.lie.name, "lie_step": told.step}
        recorder = Recorder(net, optimizer, out=out, lab=out.name, **chosen)
        for number in range(1, STEPS + 1):
            batch = batches(number)
            self._evaluate(recorder, net, batch)
            with recorder.step(batch):
                body(net, optimizer, batch)
        self._evaluate(recorder, net, batches(STEPS))
        recorder.finish()

    def _evaluate(self, recorder: Recorder, net: torch.nn.Module, batch: Mapping[str, Tensor]) -> None:
        if self._evaluates:
            net.eval()
            with recorder.evaluation(batch), torch.no_grad():
                net(_read(batch))
            net.train()

    def prover(self, folder: Path, told: _Told | None = None) -> OwnProver:
        return LabProver(folder)

    def trust(self, folders: Sequence[Path]) -> Trust:
        return Trust.load([run.with_name(f"{run.name}.trust.json") for run in folders], folders)


class _Answering(_Training):
    """A loop's model that answers: step k writes what it gives for batch k to row k of a buffer of its state."""

    def _loop(self) -> tuple[Any, Any, Any, Any]:
        net, _, batches, _ = super()._loop()
        net.eval().requires_grad_(False)
        net.register_buffer("answers", torch.zeros(STEPS, net(_read(batches(1))).numel()))

        def asked(number: int) -> dict[str, Tensor]:
            return {**batches(number), "request": torch.tensor([number - 1])}

        def answer(net: torch.nn.Module, _: object, batch: Mapping[str, Tensor]) -> None:
            net.get_buffer("answers").index_copy_(0, batch["request"], net(_read(batch)).flatten()[None])

        return net, NoOptimizer(), asked, answer


def _read(batch: Mapping[str, Tensor]) -> Tensor:
    return batch["pixels"] if "pixels" in batch else batch["tokens"][:, :-1]


class _Delegated(_Work):
    """A delegated inference, whose providers have no chips."""

    def __init__(self, place: Path) -> None:
        asked = Inference(preset="tiny-gpt", prompts=_PROMPTS, tokens=3, temperature=0.9, seed=7, checkpoint_every=2)
        model = preset(asked.preset).build().eval()
        initialise(model, 3)
        weights = {f"weight/{name}": each.detach() for name, each in model.named_parameters()}
        if not place.exists():
            order_inference(asked, weights, place, _CLIENT)
        self._order = OrderFolder(place, _CLIENT.verifying)

    def record(self, out: Path, told: _Told | None = None) -> None:
        run_order(self._order, out, _key(out.name), out.name, behaviour=self._behaviour(told))

    def prover(self, folder: Path, told: _Told | None = None) -> OwnProver:
        key = _key(folder.name)
        return OwnProver(RunFolder(folder, key.verifying), key, self._behaviour(told))

    def trust(self, folders: Sequence[Path]) -> Trust:
        names = [folder.name for folder in folders]
        trust = Trust.of_parties({name: _key(name).verifying for name in names}, _CLIENT.verifying)
        return replace(trust, orders=frozenset({self._order.envelope}))

    @staticmethod
    def _behaviour(told: _Told | None) -> Conduct:
        return Conduct() if told is None else told.lie.conduct(told.step)


@contextmanager
def _noted(told: _Told) -> Iterator[None]:
    """Have each conduct of this lie note what it alters; where a run is resumed or disputed, too."""
    conduct = told.lie.conduct

    def noting(step: int) -> Conduct:
        mine = conduct(step)
        observe = mine.observer

        def observer(at: int) -> Observer | None:
            inner = observe(at)
            return None if inner is None else _Seen(inner, told.altered)

        vars(mine)["observer"] = observer
        return mine

    told.lie = replace(told.lie, conduct=noting)
    with mock.patch.dict(LAB_LIES, {told.lie.name: told.lie}):
        yield


def _key(name: str) -> SigningKey:
    """A party's key, from its name."""
    return SigningKey.generate(hashlib.sha256(name.encode()).digest())


def _places(name: str, operators: int, places: int, chance: random.Random) -> list[_Told]:
    """Steps at which the lie is told, and for lies that take one the number of what they alter."""
    lie = _lie(name)
    steps = [chance.randint(1, STEPS) for _ in range(places)]
    if name not in _PLACED:
        return [_Told(lie, step) for step in dict.fromkeys(steps)]
    conduct: Any = lie.conduct

    def at(place: int) -> Callable[[int], Conduct]:
        return lambda step: conduct(step, place=place)

    most = operators if name in (OPERATOR, RESULT) else _PLACES
    return [_Told(replace(lie, conduct=at(chance.randrange(most))), step) for step in steps]


def _lie(name: str) -> LabLie:
    return _REVERSING if name == RESULT else LAB_LIES[name]


def _difference(first: Disputant, second: Disputant) -> int | None:
    """The first step about whose result two runs differ."""
    leaves = [[result_of(leaf) for leaf in each.run.load_steps()[0]] for each in (first, second)]
    return next((step for step, pair in enumerate(zip(*leaves, strict=False)) if pair[0] != pair[1]), None)


def _disputed(first: Disputant, second: Disputant, trust: Trust, told: _Told) -> tuple[str, str]:
    """What came of the game: convicted, no effect, or what is wrong; and the referee's words."""
    step, liar = _difference(first, second), second.run.folder.name
    found, game = play_here(first, second, trust)
    words = found.reasons[0].text
    if check_game(game, trust).outcome is not found.outcome:
        return "does not verify", words
    guilty = found.evidence["guilty"]
    if guilty is not None and guilty != liar:
        return "honest party found guilty", words
    if guilty is None:
        return ("no effect" if found.outcome is Outcome.ACCEPT and step is None else "undecided"), words
    if step is not None and found.evidence["step"] != step:
        return "another step", words
    operator = found.evidence["operator"] or ""  # of another name where what the liar declares decides
    if told.altered and step == told.step and operator.startswith("aten."):
        wanted, element = told.altered[0]
        if operator != wanted:
            return f"another operator than {wanted}", words
        if not holds_element(found.evidence["tile"], element):
            return f"another tile than that of element {element}", words
    return "convicted", words


def holds_element(tile: str | None, element: int) -> bool:
    """Whether an element of the first result lies in a tile; where all of an operator was computed, it does."""
    if tile is None:
        return True
    found = re.search(r"elements? (\d+)(?: to (\d+))? of result 0", tile)
    return found is not None and int(found[1]) <= element <= int(found[2] or found[1])


def _tournament(honest: Disputant, liars: Sequence[Disputant], trust: Trust) -> str:
    """What is wrong about a tournament between an honest party and liars that it alone outnumbers; else empty."""
    middle = len(liars) // 2
    verdict, games = settle_all([*liars[:middle], honest, *liars[middle:]], trust)
    found = verdict.evidence
    lied = {each.run.folder.name for each in liars}
    if check_tournament(games, trust).outcome is not verdict.outcome:
        return "its evidence does not verify"
    is_right = found["prevails"] == [_HONEST] and set(found["guilty"]) == lied
    return "" if is_right else f"{found['prevails']} prevails, {found['guilty']} guilty: {verdict.reasons[0].text}"


def _honest(place: Path, name: str, options: Mapping[str, Any], evaluates: bool) -> tuple[_Work, Path]:
    """The work, done once by an honest party, and its folder."""
    honest = place / f"{name} {evaluates} {sorted(options.items())}" / _HONEST
    is_new = not honest.exists()
    if is_new:
        honest.parent.mkdir()
    task = honest.with_name("task")
    kind = _Answering if name.endswith(_ANSWERS) else _Training
    work = _Delegated(task) if name == _INFERENCE else kind(name.removesuffix(_ANSWERS), options, evaluates)
    if is_new:
        work.record(honest)
    return work, honest


def run(
    *,
    places: int = 3,
    models: Sequence[str] = WORKS,
    numerics: Sequence[str] = ("exact", "rounded"),
    lies: Sequence[str] = tuple(LIES),
    seed: int = 0,
    progress: Callable[[int], object] | None = None,
) -> list[Row]:
    """A row for each work, numerics and lie; ``wrong`` lists each game that did not end as it has to."""
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for model, mode, name in product(models, numerics, lies):
            options = {"numerics": mode, **_lie(name).options}
            evaluates = _lie(name).scenery is Scenery.EVALUATIONS
            if options["numerics"] != mode or (model == _INFERENCE and (evaluates or options != {"numerics": "exact"})):
                continue  # an inference declares nothing else
            work, honest = _honest(Path(place), model, options, evaluates)
            rows.append(
                {
                    "work": model,
                    "mode": mode,
                    "lie": name,
                    **_played(work, honest, name, places, f"{seed} {model} {mode} {name}"),
                    "seed": seed,
                }
            )
            if progress is not None:
                progress(len(rows))
    return rows


def _played(work: _Work, honest: Path, name: str, places: int, seed: str) -> Row:
    """How the games about one lie, and a tournament with some of its liars, end."""
    prover = work.prover(honest)
    first = Disputant(run=RunFolder(honest, prover.key.verifying), prover=prover)
    count: Counter[str] = Counter()
    wrong: list[str] = []
    untold: set[str] = set()
    kept: list[Disputant] = []
    for number, told in enumerate(_places(name, prover.trace(1).size, places, random.Random(seed))):
        liar = honest.with_name(f"{name}-{number}")
        with _noted(told):
            try:
                work.record(liar, told)
            except (CallerError, EvidenceError) as error:
                untold.add(f"{error!s:.300}")
                continue
            its = work.prover(liar, told)
            second = Disputant(run=RunFolder(liar, its.key.verifying), prover=its)
            came, words = _disputed(first, second, work.trust([honest, liar]), told)
        count[came] += 1
        if came not in _ENDS:
            wrong.append(f"step {told.step}: {came}: {words}")
        if came == "convicted" and len(kept) < _COLLUDERS:
            kept.append(second)
        else:
            shutil.rmtree(liar)
    parties = len(kept) + 1
    if len(kept) > 1:
        fault = _tournament(first, kept, work.trust([honest, *(each.run.folder for each in kept)]))
        wrong += [f"a tournament of {parties}: {fault}"] if fault else []
    for each in kept:
        shutil.rmtree(each.run.folder)
    tournament = parties if parties > 2 else 0
    return {
        "games": sum(count.values()),
        "parties": tournament,
        **dict(count),
        "wrong": wrong,
        "untold": sorted(untold),
    }


def table(rows: Sequence[Row]) -> list[str]:
    """Return the rows as lines for people."""
    return [
        f"{row['work']:13} {row['mode']:8} {row['lie']:24} {row['games']:4} games: "
        + ", ".join(f"{row[end]} {end}" for end in _ENDS if end in row)
        + (f"; a tournament of {row['parties']}" if row["parties"] else "")
        + "".join(f"\n  {text}" for text in row["wrong"])
        + "".join(f"\n  cannot be told: {text}" for text in row["untold"])
        for row in rows
    ]


def verdict(rows: Sequence[Row]) -> str | None:
    """What did not end as it has to; None where each liar was named or its lie had no effect."""
    wrong = [f"{row['work']}, {row['mode']}, {row['lie']}: {text}" for row in rows for text in row["wrong"]]
    return f"{len(wrong)} games ended otherwise; {wrong[0]}" if wrong else None


def write(rows: Sequence[Row], path: Path) -> None:
    """Add the rows to a file of earlier ones."""
    write_among(rows, path, by=("work", "mode", "lie"))
