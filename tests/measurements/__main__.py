"""Measurements that take long and are made once: ``python -m tests.measurements NAME``, from the root of a checkout.

Options, output and exit codes are those of ``chipwitness bench``. Their results are committed in ``analysis/data``,
or here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from analysis.commands.bench import ROWS, Work, add_works, option, presets
from analysis.commands.dispatch import run
from analysis.parser import Parser

__all__ = ["main"]

WORKS: Mapping[str, Work] = {
    "operator-database": Work(
        text="PyTorch's own databases of operators and modules under controlled numerics, forward and backward",
        keys=(
            "JSON, a list of rows: work (the entry), mode (numerics), form, type, outcome (passes, refused, "
            "differs, error, or untried where no sample could be tried), samples (how many of each), first (what the "
            "first that does not pass says), bits (digests of each sample and its results) and compared (samples that "
            "were the same on the other device). Exit code 3: an entry ends in an error"
        ),
        options=(
            option("--samples", type=int, metavar="N", help="of each entry (default: all)"),
            option("--numerics", action="append", choices=("exact", "rounded"), help="default: exact"),
            option(
                "--form",
                action="append",
                choices=("op_db", "out", "in_place", "module_db"),
                dest="forms",
                help="operators as functions, with out=, in place, or modules (default: op_db)",
            ),
            option(
                "--type",
                action="append",
                choices=("float32", "bfloat16", "complex64"),
                dest="types",
                help="default: float32",
            ),
            option("--against", metavar="DEVICE", help="compare the bits with those of this device"),
        ),
    ),
    "optimizers": Work(
        text="PyTorch's own optimizer database recorded: which optimizers are bound to their declared numbers",
        keys=(
            "JSON, a list of rows: work (the optimizer), mode (optim_db or package), outcome (bound, recorded or "
            "refused), inputs (how many) and why (it is not bound). Exit code 3: another than SparseAdam is "
            "refused, or a package's formula is not bound"
        ),
        options=(option("--inputs", type=int, metavar="N", help="of each optimizer (default: all)"),),
    ),
    "precision": Work(
        text="autocast, gradient scalers, FP32 masters, libraries' flags over several seeds",
        keys=(
            "JSON, a list of rows: work (the loop), mode (numerics), seeds, steps, outcome (inspected on two "
            "devices), resumed (whether a run that died went on to the same states), loss and native_loss (means over "
            "the seeds of the last 10 steps), native_deviation (over the seeds), and versions of the packages; exit "
            "code 3 where one is not accepted or not resumed, or its loss differs by a deviation or more"
        ),
        options=(
            option("--seeds", type=int, metavar="N", help="default: 5"),
            option("--steps", type=int, metavar="N", help="of each training, by libraries at most 12 (default: 60)"),
            option("--work", action="append", dest="works", metavar="NAME", help="default: all loops"),
        ),
    ),
    "demo": Work(
        text="the main job, part by part",
        keys=ROWS,
        device="native",
    ),
    "rounding-logs": Work(
        text="bytes of rounding logs beside entropy and the published codec",
        keys=ROWS,
    ),
    "calibration": Work(
        text="error bounds found on this machine's kernel families (Srivastava et al. 2024, Alg. 3)",
        keys=ROWS,
    ),
    "registry": Work(
        text="imports and censuses of a large registry",
        keys=ROWS,
    ),
    "replay": Work(
        text="a step repeated from its program, beside the recorded step and plain PyTorch",
        keys=(
            f"{ROWS}. Also: seconds is processor time of a step; numerics, step_ratio (to the recorded step), "
            "repetitions, peak_mib, peak_ratio. Exit code 3: a replay takes more than 1.2 times the recorded "
            "step"
        ),
        options=(
            presets("small ones; large ones are measured with a small batch, and exact alone"),
            option("--steps", type=int, metavar="N", help="steps that are measured (default: 12)"),
        ),
        device="native",
    ),
    "accuracy": Work(
        text="errors of every operator against FP64",
        keys="JSON: an object with hardware, operators, unmeasured, products and convolutions",
        device="native",
    ),
    "equality": Work(
        text="the bits of the same training on every device",
        resumes=True,
        keys=(
            "JSON: a list of rows, also of other machines in the file, with work, mode, machine, processor, "
            "device, kind, steps, batch_size, seed, status, weights, optimizer, losses (digests), seconds, "
            "log_bytes, recorded_on (a machine). Exit code 3: controlled rows do not all end in the same "
            "bits"
        ),
        options=(
            presets("all"),
            option("--steps", type=int, metavar="N", help="default: 20, for large presets 3"),
            option(
                "--device",
                action="append",
                metavar="NAME",
                dest="devices",
                help="the first records (default: every known one)",
            ),
            option("--numerics", action="append", choices=("native", "rounded", "exact"), help="default: all"),
        ),
    ),
    "honest-logs": Work(
        text=(
            "how often an honest rounding log decides unlike a device that replays it: the counts that inspections use"
        ),
        resumes=True,
        keys=(
            "JSON, a list of rows: work, mode (numerics), recorded_on, replayed_on, seed, steps, batch_size, "
            "seconds, entries, decisions (by class: kind, terms, logged, free, turned; and each result that "
            "differs); exit code 1 where the log of a pair is in doubt by the counts of all others"
        ),
        options=(
            presets("all"),
            option(
                "--numerics",
                action="append",
                choices=("rounded", "rounded-probabilistic", "rounded-calibrated"),
                help="default: rounded",
            ),
            option("--pairs", type=int, metavar="N", help="of each preset (default: 60, of large ones 10)"),
        ),
    ),
    "storage": Work(
        text="what a step costs on disk and in time, in the first thousand steps and in the last",
        keys=(
            "JSON, a list of rows: work (leaves: synthetic ones; training: recorded steps of a tiny model), "
            "mode, seconds, ratio (of processor time to the first thousand), steps, cpu_ms and bytes (a step), "
            "bytes_ratio. Exit code 3: the last thousand cost more than 1.5 times the first"
        ),
        options=(
            option("--leaves", type=int, metavar="N", help="synthetic steps (default: 1000000)"),
            option("--steps", type=int, metavar="N", help="steps that are trained (default: 20000)"),
        ),
    ),
    "evasions": Work(
        text="every lie told in real runs: how often it is caught, and how often it should be",
        keys=(
            "JSON, a list of rows: work (the lie), mode (lab or chip), seconds (a trial), ratio (null), "
            "trials, caught, low, high (Clopper-Pearson interval) and its confidence, predicted, agrees, scene; "
            "exit code 3 where a prediction lies outside what was measured"
        ),
        options=(
            option("--lie", action="append", metavar="NAME", dest="lies", help="default: all that train can tell"),
            option("--trials", type=int, metavar="N", help="worlds in which each lie is told (default: 20)"),
            option("--samples", type=int, metavar="S", help="chips that an inspection draws, of six (default: 2)"),
            option("--rates", type=Path, metavar="FILE", help="write rates for campaign; needs --samples 6"),
        ),
    ),
    "rounds": Work(
        text="what labs try in the rounds of an inspection: how often it is caught, and how often it should be",
        keys=(
            "JSON, a list of rows: work (the lie), mode, seconds (a world), ratio (null), trials, caught, "
            "low, high (Clopper-Pearson interval) and its confidence, predicted, agrees. Exit code 3: a "
            "prediction lies outside what was measured"
        ),
        options=(
            option("--lie", action="append", metavar="NAME", dest="lies", help="default: all"),
            option("--trials", type=int, metavar="N", help="worlds in which each lie is told (default: 20)"),
        ),
    ),
    "comparison": Work(
        text="what it costs to be convinced of a training, by scheme: measured on the same work, and as published",
        keys=(
            "JSON, a list of rows: scheme, mode (measured or as published), work, source, prover and verifier "
            "(processor time over that of native training, or what was published), bytes (received by the verifier), "
            "trust, covers and misses. Exit code 3: a referee spends as much as a replay"
        ),
        options=(
            option("--preset", metavar="NAME", help="of the training (default: tiny-gpt)"),
            option("--steps", type=int, metavar="N", help="of training, a multiple of 4 (default: 32)"),
        ),
    ),
    "whole-game": Work(
        text="a dispute about a large model, played to its end, with a lie in the largest product of a step",
        keys=(
            "JSON, a list of rows: work (the preset), mode, seconds (the referee's processor time), ratio (to that "
            "of a recorded step), step_seconds, providers_seconds (of both parties' answers), steps, guilty, step, "
            "operator, tile, case, rounds, bytes, bytes_by_question, evidence_bytes, verifies (the game's record, "
            "offline), memory_mib (of parties and referee together). Exit code 3: another party is guilty, over 20 "
            "MB, or over 5 % of a step"
        ),
        options=(
            option("--preset", metavar="NAME", required=True, help="what both labs train"),
            option("--folder", type=Path, metavar="DIR", required=True, help="keeps the recordings, or has them"),
            option("--steps", type=int, metavar="N", help="of each recording (default: 2)"),
            option("--batch-size", type=int, metavar="N", help="default: 2"),
        ),
        device="native",
    ),
    "machines": Work(
        text="many labs, each on its own machine, hand over heads and open runs in one round, over HTTP",
        keys=(
            f"{ROWS}. Also: mode (of the labs' runs), seconds (all transfers; its parts are heads, answers and "
            "openings; the inspectorate's own order between them is not in it), processor (of these, seconds of the "
            "inspectorate's and cluster's process), load (of the machine), ratio (null), labs, order (seconds), "
            "bytes and files that came, megabytes (peak memory of inspectorate and cluster in one process); exit "
            "code 3 where seconds or megabytes are above the target for 200 labs"
        ),
        options=(option("--labs", action="append", type=int, metavar="N", help="default: 50, 100 and 200"),),
    ),
    "snapshots": Work(
        text="snapshots in every step: replays on devices that differ must pass through each of them",
        keys=(
            f"{ROWS}. Also: mode (numerics), gradients (zeroed by a preset, dropped by a loop of one's own, with an "
            "optimizer that makes its state anew in each second step or without), chips, steps, snapshots, inside "
            "(of steps), in_updates (of these, inside of an optimizer's update), in_gradients (while gradients "
            "came to be), in_state (of in_updates, behind an operator that made state anew), operators, compared "
            "(by device), outcome. Exit code 3: one is not explained"
        ),
        options=(
            presets("tiny-gpt, digits-cnn and llama-small"),
            option("--chips", type=int, metavar="N", help="chips of each run (default: 16)"),
            option("--steps", type=int, metavar="N", help="steps of each run (default: 12)"),
        ),
    ),
    "honest": Work(
        text="honest runs of many models, with crashes in between: an inspection must accept each",
        keys=(
            "JSON, a list of rows: work (the model), mode (numerics), seconds, ratio (null), number, seed, "
            "batch_size, optimizer, schedule, steps, chips, idle_chips, checkpoint_every, crashes, devices, "
            "outcome and reasons. Exit code 3: a run is not accepted"
        ),
        options=(
            option("--runs", type=int, metavar="N", help="how many (default: 12)"),
            option("--seed", type=int, metavar="N", help="decides every run (default: 0)"),
        ),
        device="native-1",
    ),
    "loops": Work(
        text=(
            "training loops of many kinds: which are recorded and equal on devices that differ, which are refused "
            "and why"
        ),
        keys=(
            "JSON, a list of rows: work (the case), mode (numerics), seconds, ratio (null), package, version, "
            "seed, batch_size, recorded, equal, outcome and reasons (of the inspection), refusals (a list of "
            "cause and remedy), devices. Exit code 3: a recorded loop is not equal, or a refused one has no "
            "remedy"
        ),
        options=(
            option("--case", action="append", metavar="NAME", dest="cases", help="default: all"),
            option("--seeds", type=int, metavar="N", help="seeds, counted from 0 (default: 1)"),
            option(
                "--batch",
                action="append",
                type=int,
                metavar="N",
                dest="sizes",
                help="samples (default: each case's own)",
            ),
        ),
        device="native-1",
    ),
    "adversary": Work(
        text="a lab that lies in random ways and one that does not: what is accepted, what rejected",
        keys=(
            "JSON, a list of rows: work, mode, seconds (of all processes), ratio (null), sequences, outcomes, "
            "lies and deferred (by row), violations and kept (scenes with their actions). Exit code 3: a law "
            "does not hold"
        ),
        options=(
            option("--sequences", type=int, metavar="N", help="of the lying lab (default: 2000)"),
            option("--honest", type=int, metavar="N", help="sequences of the honest lab (default: 200)"),
            option("--seed", type=int, metavar="S", help="number of the first sequence (default: 0)"),
            option("--jobs", type=int, metavar="N", help="processes (default: 1)"),
            option(
                "--guards-off",
                action="store_true",
                help="also search, with each guard off in turn, for a lie that passes",
            ),
        ),
    ),
    "paths": Work(
        text="honest and dishonest steps over all operators: which paths past the losses are named",
        keys=(
            "JSON, a list of rows: work (honest or dishonest), mode, seconds (of a processor), ratio (null), "
            "seed, steps, operators, wrong (names of steps that are judged wrongly) and not_made (how many let no "
            "gradient pass, or cannot be recorded); exit code 1 where one is judged wrongly"
        ),
        options=(
            option("--trials", type=int, metavar="N", help="random dishonest steps (default: 400)"),
            option("--seed", type=int, metavar="N", help="of these (default: 0)"),
        ),
    ),
    "fuzz": Work(
        text="every parser that foreign bytes reach, on inputs that coverage leads to",
        keys=(
            "JSON, a list of rows: work (the parser), mode, seconds, ratio (null), seed, executions, "
            "accepted, commit, findings (a list of text, bytes, input in hex), and over sockets by (statuses of each "
            "kind of request) and megabytes (of each server). Exit code 3: there is a finding"
        ),
        options=(
            option("--target", action="append", metavar="NAME", dest="targets", help="a parser (default: all)"),
            option("--seconds", type=float, metavar="S", help="of a processor, for each parser (default: 60)"),
            option("--seed", type=int, metavar="N", help="of the fuzzing (default: 0)"),
            option("--jobs", type=int, metavar="N", help="parsers at a time (default: 1)"),
            option("--sockets", type=int, metavar="N", help="in place of parsers: mutated HTTP requests to servers"),
        ),
    ),
    "kills": Work(
        text="parties of rounds between machines, killed at random moments and started again, stopped, or flooded",
        keys=(
            "JSON, a list of rows: work (kill, stop or flood), mode, seconds (of a round), ratio (null), seed, "
            "kills, rounds, by (kills of each party) and problems. Exit code 3: a round does not end as it must"
        ),
        options=(
            option("--kills", type=int, metavar="N", help="in all (default: 200)"),
            option("--mode", action="append", dest="modes", metavar="NAME", help="default: all"),
            option("--seconds", type=float, metavar="S", help="begin no other round with kills after that"),
            option("--seed", type=int, metavar="S", help="who is killed, and when (default: 0)"),
        ),
    ),
    "faults": Work(
        text="a chip's life with one write that goes wrong, for each write and each way to go wrong",
        keys=(
            "JSON, a list of rows: work (raise, short, lost, flip or kill), mode (what the chip was doing), "
            "seconds, ratio (null), faults, lost (lives after which the log does not verify, lacks what was "
            "acknowledged or does not go on) and problems. Exit code 3: anything is lost"
        ),
        options=(
            option(
                "--faults",
                type=int,
                metavar="N",
                help="at least so many; in whole rounds where they are more than there are writes (default: 1000)",
            ),
            option("--seed", type=int, metavar="S", help="which bits flip and where writes end (default: 0)"),
        ),
    ),
    "bundle": Work(
        text="bytes of a signed verdict's bundle changed in turn: verifying it must fail each time",
        keys=(
            "JSON, a list of rows: work (minimal: one chip, one step; demo: as the demo's round makes), mode, "
            "seconds, ratio (null), bytes, changed, noticed, unchanged (the verdict of the bundle as it is), "
            "missed (places) and seed. Exit code 3: a change goes unnoticed"
        ),
        options=(
            option("--places", type=int, metavar="N", help="of the larger bundle (default: 2000)"),
            option("--seed", type=int, metavar="S", help="of places and bytes (default: 0)"),
        ),
    ),
    "crashes": Work(
        text=(
            "a recorded loop whose process or machine stops: what resuming makes of the files as that may leave them"
        ),
        keys=(
            "JSON, a list of rows: work (kill, power, or put back: all but the chips is as it was before), "
            "mode (sync or plain), seconds, ratio (null), crashes, resumed (that ended as the undisturbed run "
            "did), refused (by one line), lost (that ended elsewhere, or were refused or lost a step against the "
            "promise) and problems. Exit code 3: anything is lost"
        ),
        options=(
            option("--trials", type=int, metavar="N", help="crashes of each kind and mode (default: 200)"),
            option("--seed", type=int, metavar="S", help="when they come and what they leave (default: 0)"),
        ),
    ),
    "ledger": Work(
        text=(
            "labs that hide work in what nobody can replay, and honest ones that crash: what their chips' ledgers print"
        ),
        keys=(
            "JSON, a list of rows: work (a lie, or what happens to an honest lab), mode (lies or honest), "
            "seconds, ratio (null), seed, worlds, outcomes, problems and kept (worlds that broke a law); exit "
            "code 3 where slack hides more than is printed or allowed, or an honest lab is rejected or left open "
            "without need"
        ),
        options=(
            option("--lies", type=int, metavar="N", help="worlds of a lab that hides work (default: 400)"),
            option("--honest", type=int, metavar="N", help="worlds of an honest one (default: 300)"),
            option("--seed", type=int, metavar="S", help="decides every world (default: 0)"),
        ),
    ),
    "interference": Work(
        text="random host programs on two bare chips that differ in their draws, or in their secrets, alone",
        keys=(
            "JSON, a list of rows: work (draws or secrets), mode (bare chips), seconds, ratio (null), seed, "
            "programs, lines (compared) and problems. Exit code 3: a host sees a difference before the "
            "chips' snapshots differ"
        ),
        options=(
            option("--programs", type=int, metavar="N", help="host programs of at most 200 calls (default: 10000)"),
            option("--seed", type=int, metavar="S", help="decides every program (default: 0)"),
        ),
    ),
    "suppression": Work(
        text="bare chips whose hosts avoid snapshots that they foresee, and honest ones: the chance of as few",
        keys=(
            "JSON, a list of rows: work (a share that is avoided, or honest), mode (bare chips), seconds, "
            "ratio (null), seed, histories, expected and demanded (snapshots), rejected, doubted, predicted "
            "(both, on average), accepted, below (chances at most .1, .01 and .001), least and problems; exit "
            "code 3 where three quarters are missing and accepted, or honest chips have few snapshots more often "
            "than they say"
        ),
        options=(
            option("--lies", type=int, metavar="N", help="chips whose hosts avoid snapshots (default: 200)"),
            option("--honest", type=int, metavar="N", help="honest ones (default: 10000)"),
            option("--seed", type=int, metavar="S", help="decides every history (default: 0)"),
        ),
    ),
    "hiding": Work(
        text=(
            "labs that keep another model in their chips' memory as best they can, beside the chance that "
            "verdicts print"
        ),
        keys=(
            "JSON, a list of rows: work (the way), mode (chips and ticks), seconds, ratio (null), seed, "
            "tries, caught, doubted, low, high, confidence and printed. Exit code 3: a way is caught less "
            "often than is printed"
        ),
        options=(
            option("--tries", type=int, metavar="N", help="runs in each of six settings (default: 480)"),
            option("--seed", type=int, metavar="S", help="decides every run (default: 0)"),
        ),
    ),
    "disputes": Work(
        text=(
            "every lie of a lab about its numbers, told at random places: whom, which step, operator and tile a "
            "referee names"
        ),
        keys=(
            "JSON, a list of rows: work (the model), mode (numerics), lie, games, how many ended as convicted or "
            "no effect, parties (of a tournament with the honest one among them, 0: none), seed, wrong (a text for "
            "each game that ended otherwise) and untold (why a lie could not be told). Exit code 3: a game ended "
            "otherwise"
        ),
        options=(
            option("--places", type=int, metavar="N", help="of each lie in each model (default: 3)"),
            option("--model", action="append", dest="models", metavar="NAME", help="default: all"),
            option("--numerics", action="append", choices=("exact", "rounded"), help="default: both"),
            option("--lie", action="append", dest="lies", metavar="NAME", help="default: all"),
            option("--seed", type=int, metavar="S", help="of the places (default: 0)"),
        ),
    ),
    "declarations": Work(
        text=(
            "declarations that hide something, each under a rule that it must not pass, and honest ones, never rejected"
        ),
        keys=(
            "JSON, a list of rows: work (the family), mode (hiding or honest), seconds, ratio (null), seed, "
            "outcome, agreed and reasons. Exit code 3: one is not judged as it must be"
        ),
        options=(
            option("--cases", type=int, metavar="N", help="of either kind (default: 300)"),
            option("--seed", type=int, metavar="S", help="decides every case (default: 0)"),
        ),
    ),
    "cluster": Work(
        text="inspections on two nodes of a Ray cluster, with kills, and what a further run and dealing out cost",
        keys=(
            "JSON, a list of rows: work (scheduler, runs, verdicts or kills), mode, seconds (of the scheduler "
            "for a segment; of each run from the second on in one command; of an inspection or replay), ratio (to "
            "this process, or to a command with one run), and segments, workers and peak_kib; alone_seconds, runs "
            "and pairs; outcome and equal; or answered_before and complete. Exit code 3: a verdict differs, "
            "a replay is not complete, a further run takes over 0.5 s, or the scheduler takes over 10 ms or keeps "
            "over 256 bytes for a segment. Needs the extra `ray`, scheduler and runs apart"
        ),
        options=(
            option(
                "--cases",
                nargs="+",
                choices=("scheduler", "runs", "verdicts", "kills"),
                metavar="WORK",
                help="of scheduler, runs, verdicts, kills (default: all)",
            ),
            option("--pairs", type=int, metavar="N", help="of commands with one run and with five (default: 5)"),
            option("--segments", type=int, nargs="+", metavar="N", dest="sizes", help="default: 1000 10000 30000"),
        ),
    ),
    "planner": Work(
        text="plans beside exhaustive search, their bounds, and what the command for today's chips takes",
        keys=(
            "JSON, a list of rows: work (one, two, three or twelve sites, example, or what the command is asked), "
            "mode, seconds (of the processor), ratio (null), missed, and problems, equal, dearest, most_chips_above, "
            "beyond (dearer by 1 % and by a chip), least_bound and largest_bound (to the least work; of twelve sites "
            "to the plan's), or plan, bound and known. Exit code 3: something is missed"
        ),
        options=(
            option(
                "--cases",
                nargs="+",
                choices=("one", "two", "three", "twelve", "example", "commands"),
                metavar="CASE",
                help="of one, two, three, twelve, example, commands (default: all)",
            ),
            option("--problems", type=int, metavar="N", help="of each number of sites (default: 100, 60, 60 and 8)"),
            option("--seed", type=int, metavar="S", help="of the problems (default: 20261126)"),
        ),
    ),
    "ownership": Work(
        text="random histories of a chip that changes hands, by honest and lying owners: who is named, and who is not",
        keys=(
            "JSON, a list of rows: work (ownership), mode (real runs), seconds, ratio (null), seed, histories, "
            "actions, outcomes (by what a lab did), wrong and undecided (histories). Exit code 3: a verdict is "
            "wrong, or an honest lab is left open"
        ),
        options=(
            option("--histories", type=int, metavar="N", help="to play (default: 200)"),
            option("--seed", type=int, metavar="S", help="decides every history (default: 1)"),
        ),
    ),
    "placements": Work(
        text="files that one party puts anywhere into real rounds: nobody else's verdict may become worse",
        keys=(
            "JSON, a list of rows: work (placements), mode (real rounds), seconds, ratio (null), seed, rounds, "
            "placements, put (by kind), verdicts (by the party that misbehaved), wrong and "
            "processor_seconds_beyond_an_honest_command (by step). Exit code 3: something is wrong"
        ),
        options=(
            option("--placements", type=int, metavar="N", help="to make (default: 10000)"),
            option("--most-seconds", type=float, metavar="S", help="stop then (default: 600)"),
            option("--seed", type=int, metavar="S", help="decides every placement (default: 0)"),
            option("--each", type=int, metavar="N", help="in one round (default: 60)"),
        ),
    ),
    "engines": Work(
        text=(
            "closed form, aggregated and per-chip engine on random settings: detection, false alarm, excess, posterior"
        ),
        keys=(
            "JSON, a list of rows: setting, policy, chips, samples, refusals, evidence, engine, trials, seed, "
            "and detection, false_alarm, excess and posterior (closed_form, low, high: all intervals together err "
            "with 1e-3). Exit code 3: one leaves out its closed form"
        ),
        options=(
            option("--settings", type=int, metavar="N", help="random settings (default: 40)"),
            option("--trials", type=int, metavar="N", help="of the aggregated engine (default: 40000)"),
            option("--agents", type=int, metavar="N", help="trials of the per-chip engine (default: 3000)"),
            option("--seed", type=int, metavar="S", help="of settings and trials (default: 1)"),
        ),
    ),
}


def main(words: Sequence[str] | None = None) -> int:
    """Run one; returns its exit code, as ``chipwitness`` does."""
    return run(sys.argv[1:] if words is None else words, _parser)


def _parser(_: Sequence[str]) -> Parser:
    parser = Parser(prog="python -m tests.measurements", description=__doc__)
    parser.set_defaults(command="bench")
    add_works(parser, WORKS, "tests.measurements")
    return parser


if __name__ == "__main__":
    sys.exit(main())
