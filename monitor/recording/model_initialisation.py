"""A model whose initial values are computed by a recorded program, from a seed and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from firmware_sim.errors import CallerError, EvidenceError
from monitor import numerics
from monitor.declaration.origin import Initialisation
from monitor.declaration.statement import Declaration
from monitor.programs import facts_of
from monitor.programs.capture import Capture
from monitor.programs.keys import RecordedKeys, step_seed
from monitor.programs.memory_watch import WriteWatch
from monitor.programs.program import Program
from monitor.replay.initialisation import initialised_memory
from monitor.transcript import RunFolder

__all__ = ["initialised", "start_again", "with_start"]

Model = TypeVar("Model", bound=nn.Module)

_STARTS: WeakKeyDictionary[nn.Module, tuple[int, Program]] = WeakKeyDictionary()
"""Seed and program of each model that ``initialised`` made; the program commits weights and buffers alone."""


def initialised(build: Callable[[], Model], *, seed: int) -> Model:
    """Build a model whose initial weights and buffers are a recorded program's, for a ``Recorder`` of this model.

        model = initialised(lambda: MyModel(), seed=1)

    An inspector computes W_0 from that program, on any device, and needs neither this Python nor the weights. What
    ``build`` draws are counter-based random numbers, equal everywhere. Values that are written afterwards make the
    run one of supplied weights.

    Args:
        build: makes the model; whatever else sets initial values belongs in here too.
        seed: of everything that ``build`` draws.

    Raises:
        CallerError: an operator that cannot be repeated, such as general eigenvalues, or a table that no operator
            made.
    """
    if type(seed) is not int or not 0 <= seed < 1 << 63:
        raise CallerError(f"seed must lie in 0 … 2^63-1, not {seed!r}")
    keys = RecordedKeys(seed, 0)
    capture = Capture(keys, WriteWatch(0))
    random = torch.get_rng_state()
    torch.default_generator.manual_seed(step_seed(seed, 0))
    try:
        with numerics.recording("exact", observer=capture, keys=keys):
            model = build()
        if not isinstance(model, nn.Module):
            raise CallerError(f"build must return a torch.nn.Module, but returned a {type(model).__name__}")
        state = {f"weight/{name}": tensor.detach() for name, tensor in model.named_parameters()}
        state |= {f"buffer/{name}": tensor.detach() for name, tensor in model.named_buffers()}
        program = capture.program({**state}, {}, [])
    except CallerError as error:
        raise CallerError(f"this initialisation cannot be recorded: {error}") from None
    finally:
        torch.set_rng_state(random)
    for number, constant in enumerate(facts_of(program, ()).constants):
        if not constant["uniform"]:
            raise CallerError(
                f"this initialisation cannot be recorded: {capture.reader_of(number)} reads a table of "
                f"{constant['bytes']} bytes that no operator made; compute it with PyTorch's operators"
            )
    _STARTS[model] = seed, program
    return model


def with_start(declared: Declaration, model: nn.Module, place: torch.device) -> tuple[Declaration, Program | None]:
    """A declaration of supplied weights as one of the program that made them, if it gives the declared state."""
    start = _start_of(model, declared)
    if start is None:
        return declared, None
    claimed = replace(declared, origin=replace(declared.origin, initialisation=start[0]))
    try:
        root = str(initialised_memory(claimed, start[1], device=place).digest().root)
    except EvidenceError as error:
        raise CallerError(f"this initialisation cannot be repeated: {error}") from None
    return (claimed, start[1]) if root == declared.origin.state else (declared, None)


def start_again(model: nn.Module, run: RunFolder) -> Program | None:
    """The initialisation of a run that goes on; CallerError if it is not on disk yet, and the model brings another."""
    begun = run.declared.origin.initialisation
    if begun is None or run.committed >= 0:
        return run.initialisation
    start = _start_of(model, run.declared)
    if start is None or start[0] != begun:
        raise CallerError("the model is not initialised in the same way as for the first part of the run")
    return start[1]


def _start_of(model: nn.Module, declared: Declaration) -> tuple[Initialisation, Program] | None:
    """The program that made a model, as one of the whole declared state; None unless ``initialised`` made it."""
    if model not in _STARTS:
        return None
    seed, program = _STARTS[model]
    names = [f"{entry.kind}/{entry.name}" for entry in declared.state]
    if not set(program.commit) <= set(names):
        return None
    program = replace(program, commit={name: program.commit.get(name) for name in names})
    return Initialisation(program=program.digest, seed=seed), program
