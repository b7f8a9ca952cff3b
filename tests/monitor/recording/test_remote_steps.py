"""What chips see inside of steps that others took is what they would see if one process took them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from analysis.examples.train_on_two_processes import batches, gpt_job
from firmware_sim import NEVER, Work
from monitor import numerics
from monitor.distributed.recorder import DistributedRecorder
from monitor.programs.interpreter import Prepared
from monitor.programs.keys import RepeatedKeys
from monitor.recording import live_run, remote_steps
from monitor.replay.repetition import scalars_of
from monitor.sharding import ShardedMemory


def taken_whole(declared, memory, step, program, execution, batch, left):
    keys = RepeatedKeys(declared.seed, step)
    session = numerics.recording(declared.numerics, keys=keys)
    Prepared(program, memory).run(batch, scalars_of(program, execution), session, keys, left=left)


@pytest.fixture(scope="module", params=[False, True])
def steps(request, tmp_path_factory):
    """Arguments of ``count_step`` in a first step, whose optimizer makes its state, and in a later one."""
    found, count = [], remote_steps.count_step

    def noted(declared, memory, *rest):
        state = {key: tensor.clone() for key, tensor in memory.tensors.items()}
        found.append((partial(ShardedMemory, state, memory.layout), declared, *rest))
        count(declared, memory, *rest)

    job = gpt_job(2, layers=1, width=6, foreach=request.param)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(live_run, "count_step", noted)
        recording = DistributedRecorder(job, layout="alone", out=tmp_path_factory.mktemp("run") / "run", seed=1)
        for batch in batches(2, 2):
            recording.step(batch)
    return found


def seen(take, made, declared, *rest, moments):
    """Digests of the memory after some numbers of operators, and what its meter counts in all."""
    digests: dict[Any, Any]
    memory, digests = made(), {}
    for moment in moments:
        memory.meter.wake(
            Work(moment, NEVER, NEVER), lambda *_, at=moment: digests.setdefault(at, str(memory.digest().root))
        )
    take(declared, memory, *rest)
    return digests, memory.meter.total


@pytest.mark.parametrize("number", [0, 1])
def test_at_every_moment_chips_see_what_one_process_would_hold(steps, number):
    moments = range(1, steps[number][3].work.calls + 1)
    whole = seen(taken_whole, *steps[number], moments=moments)
    assert len(whole[0]) == len(moments)
    assert seen(remote_steps.count_step, *steps[number], moments=moments) == whole


def test_moments_after_the_state_is_written_see_other_memory(steps):
    program, left = steps[1][3], steps[1][-1]
    first = min(program.first_held(left).values())
    digests, _ = seen(remote_steps.count_step, *steps[1], moments=[first - 1, first])
    assert digests[first] != digests[first - 1]
