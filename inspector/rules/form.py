"""The kinds of rules, and what a file of rules may hold, as people are shown it."""

from __future__ import annotations

__all__ = ["FORM", "KINDS"]

KINDS = {
    "flop": {"per", "links"},
    "data": {"digests"},
    "hyper": {"parameter"},
    "change": set[str](),
    "meter": set[str](),
    "clock": set[str](),
    "score": {"test", "program"},
}
"""Kinds of rules, with the keys of each in addition to ``name``, ``kind``, ``at_least`` and ``at_most``."""

FORM = """A file of rules is TOML:

    [[rule]]                       # each has a name, a kind, and at_least or at_most, or both
    name = "below the threshold"
    kind = "flop"                  # total compute
    per = "job"                    # of each run, chain (a run and those that it continues), lab, or job
    links = ["parent", "start"]    # what joins runs to one job; also data, program (default: these two)
    at_most = 1e25

    [[rule]]
    name = "benchmark left out"
    kind = "data"                  # share of the places of all batches that hold one of these samples
    digests = "benchmark.txt"      # a list, or a file of them (`chipwitness rules digests`)
    at_most = 0                    # 0 also forbids them as rows of a constant or of the first state

    [[rule]]
    name = "rates"
    kind = "hyper"                 # a hyper-parameter of the optimizer, in every group and step
    parameter = "lr"
    at_most = 0.01

    [[rule]]
    name = "small changes"
    kind = "change"                # largest change of a weight in a replayed step, divided by its rate (Adam: 2 to 20)
    at_most = 50

    [[rule]]
    name = "meters"
    kind = "meter"                 # FLOP that a drawn chip's meter counts, divided by what its declared steps need
    at_most = 1

    [[rule]]
    name = "clocks"
    kind = "clock"                 # time of a drawn chip's work by its signed clock, divided by that of its steps
    at_most = 1

    [[rule]]
    name = "cannot do it"
    kind = "score"                 # mean loss of the final weights on a test set
    test = "test.safetensors"      # every countersigned program that trains computes it, and all must agree;
    at_least = 3.5                 # program = "its digest" names one program instead

    [require]                      # default: all rules; if given, it names each rule
    all = ["rates", "small changes", "meters", "clocks", "benchmark left out",
           {any = ["below the threshold", {not = "cannot do it"}]}]

Files are named relative to the file of rules.

A rule on lr bounds the learning rate; other numbers may multiply it by a thousand at most. For a plain optimizer, such
as SGD, the rate bounds no change of weights, because a loss has no canonical scale.

A lab answers for its own runs that links join, and for runs that it says they continue. Such a parent counts once the
inspection has found in its last state what was taken over. The link start joins a run of unknown origin to any run that
holds the same weights and buffers at its start, at a checkpoint or at its end; optimizer states are not compared. The
link data joins runs that train on the same sample, unless their presets have it. The link program joins runs that train
by the same program. A public seed, a false parent or a shared evaluation joins no runs. If a lab starts from another
lab's model, it alone answers for what it makes of it. A rule is undecided if only linked runs of other labs exceed its
limit, if weights are of unknown origin, or if links cannot be known (as for the data of loops without a preset).

Meters and clocks count evaluations and declared reads as steps. Steps repeated after a boot, parts of steps at power
cuts and work after the last step count as steps too, up to the slack that the chip is allowed. Unexplained work counts
against the lab.

Inside `not`, a rule that has found nothing of a lab is undecided for this lab.

A rule of kind data recognises a sample by all its bytes. It does not see a sample that has one changed bit, has another
type, is transposed, or is a part of a batch's row. The verdict says what was searched. A rule of kind score takes as
the loss what its program returns as the loss: the person who names or countersigns the program has to read it.
"""
