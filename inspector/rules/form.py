"""What a file of rules may hold, as people are shown it."""

from __future__ import annotations

__all__ = ["FORM"]

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
    at_most = 0                    # 0: nor may a row of a constant, or of the first state, be one of them

    [[rule]]
    name = "rates"
    kind = "hyper"                 # a hyper-parameter of the optimizer, in every group and step; of lr, which other
                                   # numbers may multiply a thousandfold at most; as a loss has no canonical scale, the
                                   # rate of a plain class, such as SGD, bounds no change of weights
    parameter = "lr"
    at_most = 0.01

    [[rule]]
    name = "small changes"
    kind = "change"                # largest change of a weight in a replayed step, over its rate: of Adam some 2 to 20
    at_most = 50

    [[rule]]
    name = "meters"
    kind = "meter"                 # FLOP that a drawn chip's meter counts, to what its declared steps need of it
    at_most = 1

    [[rule]]
    name = "clocks"
    kind = "clock"                 # time that a drawn chip's work took, by its signed clock, to that of declared steps
    at_most = 1

    [[rule]]
    name = "cannot do it"
    kind = "score"                 # mean loss of the final weights on a test set
    test = "test.safetensors"      # by each countersigned program that trains: all have to read it, and agree,
    at_least = 3.5                 # unless one is named: program = "its digest"

    [require]                      # default: all rules; it names every rule
    all = ["rates", "small changes", "meters", "clocks", "benchmark left out",
           {any = ["below the threshold", {not = "cannot do it"}]}]

Files are named relative to the rules'.

A lab answers for its own runs that links join, and for those that they continue by its own word: a parent counts once
what was taken over was found in its last state. Link start joins a run of unknown origin to any that holds the same
weights and buffers at its start, at a checkpoint or at its end, whatever the optimizers hold; data joins runs that
train on a sample which their presets do not have; program joins runs that train by one program. A public seed, a false
parent and a shared evaluation join no runs. Who starts from a lab's model answers alone for what it makes of it. What
only other labs' linked runs bring above a limit leaves the rule undecided; so do weights of unknown origin, and links
that cannot be known, such as the data of loops without a preset.

Meters and clocks count evaluations and declared reads as steps. Steps that boots made again, parts of steps at power
cuts and work behind last steps count as that, up to the slack that the chip is allowed; what nothing explains counts.

Inside of not, a rule is undecided for a lab of which it has found nothing.

A rule of kind data knows a sample by all its bytes: one that is changed in a bit, of another type, turned, or a part of
a batch's row is not seen. The verdict says what was searched. A rule of kind score takes for the loss what its
program gives out as such: who names or countersigns one has read it.
"""
