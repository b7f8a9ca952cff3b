"""``bench``: measurements, each a work of its own with its own options."""

from __future__ import annotations

import argparse
import importlib
import sys
from argparse import ArgumentParser
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from analysis.commands._common import add_json, counted_bar, print_json
from analysis.commands.runs import trust_path

if TYPE_CHECKING:
    from argparse import _SubParsersAction

__all__ = ["register"]

_ROWS = "JSON: a list of rows with work, mode, seconds, ratio (to the native figure) and what else was measured"
_SIMPLE = {
    "demo": "the main job, part by part",
    "rounding-logs": "bytes of rounding logs beside entropy and the published codec",
    "calibration": "error bounds found on this machine's kernel families (Srivastava et al. 2024, Alg. 3)",
    "fleet": "detection probability of large fleets",
    "registry": "imports and censuses of a large registry",
}
_ON_NATIVE = ("demo", "accuracy", "replay")
_UNITS = {
    "bundle": "byte",
    "rounds": "world",
    "distributed": "job",
    "adversary": "sequence",
    "paths": "step",
    "storage": "step",
    "faults": "life",
    "crashes": "crash",
    "ledger": "world",
    "interference": "program",
    "suppression": "history",
    "hiding": "run",
    "declarations": "case",
    "chip": "part",
    "snapshots": "run",
    "engines": "setting",
    "inspection": "run",
    "cluster": "part",
    "recording": "step",
}
"""Works whose progress is a number of these."""


def register(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser("bench", help="measure in one run, with ratios to the native figure")
    works = parser.add_subparsers(dest="work", required=True, metavar="WORK")
    for name, text in _SIMPLE.items():
        _add(works, name, text, _ROWS)

    one = _add(works, "numerics", "native, FP64, rounded and exact on products and steps", _ROWS)
    _add_presets(one, "small ones")
    one.add_argument("--device", default="native", metavar="NAME", help="what to measure (default: native)")
    one.add_argument("--out", type=Path, metavar="FILE", help="put the rows there, beside those of other machines")

    one = _add(
        works,
        "distributed",
        "one training on one process, FSDP2 and DDP, and whether it reaches the same bits",
        f"{_ROWS}: mode (layout and processes), numerics, device, foreach, micro_batches, step_mib "
        "(the most that a rank's memory grows by in a step), freed (storages that FSDP2 let go), uneven (tensors in "
        "pieces of different lengths), norms and clip, roots (of the state after each step); ratio is step_mib at 48 "
        "micro-batches to that at 12, or a step's time on two processes to one process's at half the batch; exit code "
        "3 where a layout ends in other bits under exact numerics, memory or time grows, less is let go than "
        "natively, clipping or uneven pieces do not occur, or a lying rank is not named",
    )
    one.add_argument("--steps", type=int, metavar="N", help="steps of each training, at least 3 (default: 3)")
    kinds = ("equality", "elastic", "memory", "lie", "speed")
    one.add_argument("--cases", nargs="+", choices=kinds, metavar="WORK", help=f"of {', '.join(kinds)} (default: all)")
    one.add_argument("--out", type=Path, metavar="FILE", help="write the rows with this machine's description")

    one = _add(
        works,
        "replay",
        "a step repeated from its program, beside the recorded step and plain PyTorch",
        f"{_ROWS}: seconds is processor time of a step; numerics, step_ratio (to the recorded step), "
        "repetitions, peak_mib, peak_ratio; exit code 3 where a replay takes more than 1.2 times the recorded step",
    )
    _add_presets(one, "small ones; large ones are measured with a small batch, and exact alone")
    one.add_argument("--steps", type=int, metavar="N", help="steps that are measured (default: 12)")
    one.add_argument("--out", type=Path, metavar="FILE", help="write the rows with this machine's description")

    one = _add(
        works,
        "recording",
        "a step of a GPT of 5M parameters: plain, in controlled numerics, and recorded with them",
        f"{_ROWS}: ratio is to the same numerics alone; median_ratio, cpu_seconds, cpu_ratio, parameters, batch_size, "
        "steps; exit code 3 where a recorded step takes more than 1.3 times the numerics alone",
    )
    one.add_argument("--steps", type=int, metavar="N", help="steps that are measured (default: 32)")
    one.add_argument(
        "--batch", action="append", type=int, metavar="N", dest="sizes", help="sequences (default: 4 and 32)"
    )
    one.add_argument("--out", type=Path, metavar="FILE", help="write the rows with this machine's description")

    one = _add(
        works,
        "accuracy",
        "errors of every operator against FP64",
        "JSON: an object with hardware, operators, unmeasured, products and convolutions",
    )
    one.add_argument("--out", type=Path, metavar="FILE", help="write the report")

    one = _add(
        works,
        "equality",
        "the bits of the same training on every device",
        "JSON: a list of rows, also of other machines in the file, with work, mode, machine, processor, device, kind, "
        "steps, batch_size, seed, status, weights, optimizer, losses (digests), seconds, log_bytes, recorded_on (a "
        "machine); exit code 3 where controlled rows do not all end in the same bits",
    )
    _add_presets(one, "all")
    one.add_argument("--steps", type=int, metavar="N", help="default: 20, for large presets 3")
    one.add_argument(
        "--device", action="append", metavar="NAME", dest="devices", help="the first records (default: every known one)"
    )
    one.add_argument("--numerics", action="append", choices=("native", "rounded", "exact"), help="default: all")
    one.add_argument("--out", type=Path, metavar="FILE", help="keep rows here and run only others")

    one = _add(
        works,
        "honest-logs",
        "how often an honest rounding log decides unlike a device that replays it: the counts that inspections use",
        "JSON: a list of rows with work, mode (numerics), recorded_on, replayed_on, seed, steps, batch_size, seconds, "
        "entries, decisions (by class: kind, terms, logged, free, turned; and each result that differs); exit code 1 "
        "where the log of a pair is in doubt by the counts of all others",
    )
    _add_presets(one, "all")
    one.add_argument(
        "--numerics",
        action="append",
        choices=("rounded", "rounded-probabilistic", "rounded-calibrated"),
        help="default: rounded",
    )
    one.add_argument("--pairs", type=int, metavar="N", help="of each preset (default: 60, of large ones 10)")
    one.add_argument("--out", type=Path, metavar="FILE", help="keep rows here and measure only others")

    one = _add(
        works,
        "quality",
        "losses of controlled training beside native training",
        "JSON: a list of rows with work, mode, device, steps, seeds, loss, gap, bias, bias_error, threshold, passes, "
        "early_gap, early_ratio, passes_early; exit code 3 where exact or rounded training does not pass",
    )
    _add_presets(one, "tiny-gpt and digits-cnn")
    one.add_argument("--steps", type=int, metavar="N", help="default: 300")
    one.add_argument("--seeds", type=int, metavar="N", help="seeds, counted from 0 (default: 5)")
    one.add_argument("--out", type=Path, metavar="FILE", help="keep runs here and run only others")
    one.add_argument("--run", type=Path, metavar="RUN", help="compare a recorded run's own steps instead")
    one.add_argument("--trust", type=Path, action="append", metavar="FILE", help="with --run (default: RUN.trust.json)")

    one = _add(
        works,
        "storage",
        "what a step costs on disk and in time, in the first thousand steps and in the last",
        "JSON: a list of rows with work (leaves: synthetic ones; training: recorded steps of a tiny model), mode, "
        "seconds, ratio (of processor time to the first thousand), steps, cpu_ms and bytes (a step), bytes_ratio; exit "
        "code 3 where the last thousand cost more than 1.5 times the first",
    )
    one.add_argument("--leaves", type=int, metavar="N", help="synthetic steps (default: 1000000)")
    one.add_argument("--steps", type=int, metavar="N", help="steps that are trained (default: 20000)")
    one.add_argument("--out", type=Path, metavar="FILE", help="write the rows with this machine's description")

    one = _add(
        works,
        "evasions",
        "every lie told in real runs: how often it is caught, and how often it should be",
        "JSON: a list of rows with work (the lie), mode (lab or chip), seconds (a trial), ratio (null), trials, "
        "caught, low, high (Clopper-Pearson interval) and its confidence, predicted, agrees, scene; exit code 3 where "
        "a prediction lies outside what was measured",
    )
    one.add_argument("--lie", action="append", metavar="NAME", dest="lies", help="default: all that train can tell")
    one.add_argument("--trials", type=int, metavar="N", help="worlds in which each lie is told (default: 20)")
    one.add_argument("--samples", type=int, metavar="S", help="chips that an inspection draws, of six (default: 2)")
    one.add_argument("--out", type=Path, metavar="FILE", help="write the rows with this machine's description")
    one.add_argument("--rates", type=Path, metavar="FILE", help="write rates for campaign; needs --samples 6")

    one = _add(
        works,
        "rounds",
        "what labs try in the rounds of an inspection: how often it is caught, and how often it should be",
        "JSON: a list of rows with work (the lie), mode, seconds (a world), ratio (null), trials, caught, low, high "
        "(Clopper-Pearson interval) and its confidence, predicted, agrees; exit code 3 where a prediction lies outside "
        "what was measured",
    )
    one.add_argument("--lie", action="append", metavar="NAME", dest="lies", help="default: all")
    one.add_argument("--trials", type=int, metavar="N", help="worlds in which each lie is told (default: 20)")
    one.add_argument("--out", type=Path, metavar="FILE", help="write the rows with this machine's description")

    one = _add(
        works,
        "snapshots",
        "snapshots in every step: replays on devices that differ must pass through each of them",
        f"{_ROWS}: mode (numerics), gradients (zeroed by a preset, dropped by a loop of one's own, with an optimizer "
        "that makes its state anew in each second step or without), chips, steps, snapshots, inside (of steps), "
        "in_updates (of these, inside of an optimizer's update), in_gradients (while gradients came to be), in_state "
        "(of in_updates, behind an operator that made state anew), operators, compared (by device), outcome; exit code "
        "3 where one is not explained",
    )
    _add_presets(one, "tiny-gpt, digits-cnn and llama-small")
    one.add_argument("--chips", type=int, metavar="N", help="chips of each run (default: 16)")
    one.add_argument("--steps", type=int, metavar="N", help="steps of each run (default: 12)")
    one.add_argument("--out", type=Path, metavar="FILE", help="write the rows with this machine's description")

    one = _add(
        works,
        "honest",
        "honest runs of many models, with crashes in between: an inspection must accept each",
        "JSON: a list of rows with work (the model), mode (numerics), seconds, ratio (null), number, seed, batch_size, "
        "optimizer, schedule, steps, chips, idle_chips, checkpoint_every, crashes, devices, outcome and reasons; exit "
        "code 3 where a run is not accepted",
    )
    one.add_argument("--runs", type=int, metavar="N", help="how many (default: 12)")
    one.add_argument("--seed", type=int, metavar="N", help="decides every run (default: 0)")
    one.add_argument("--out", type=Path, metavar="FILE", help="write the rows with this machine's description")

    one = _add(
        works,
        "loops",
        "training loops of many kinds: which are recorded and equal on devices that differ, which are refused and why",
        "JSON: a list of rows with work (the case), mode (numerics), seconds, ratio (null), package, version, seed, "
        "batch_size, recorded, equal, outcome and reasons (of the inspection), refusals (a list of cause and remedy), "
        "devices; exit code 3 where a recorded loop is not equal, or a refused one has no remedy",
    )
    one.add_argument("--case", action="append", metavar="NAME", dest="cases", help="default: all")
    one.add_argument("--seeds", type=int, metavar="N", help="seeds, counted from 0 (default: 1)")
    one.add_argument(
        "--batch", action="append", type=int, metavar="N", dest="sizes", help="samples (default: each case's own)"
    )
    one.add_argument("--out", type=Path, metavar="FILE", help="write the rows with this machine's description")

    one = _add(
        works,
        "adversary",
        "a lab that lies in random ways and one that does not: what is accepted, what rejected",
        "JSON: a list of rows with work, mode, seconds (of all processes), ratio (null), sequences, outcomes, lies and "
        "deferred (by row), violations and kept (scenes with their actions); exit code 3 where a law does not hold",
    )
    one.add_argument("--sequences", type=int, metavar="N", help="of the lying lab (default: 2000)")
    one.add_argument("--honest", type=int, metavar="N", help="sequences of the honest lab (default: 200)")
    one.add_argument("--seed", type=int, metavar="S", help="number of the first sequence (default: 0)")
    one.add_argument("--jobs", type=int, metavar="N", help="processes (default: 1)")
    one.add_argument(
        "--guards-off", action="store_true", help="also search, with each guard off in turn, for a lie that passes"
    )
    one.add_argument("--out", type=Path, metavar="FILE", help="write the rows with this machine's description")

    one = _add(
        works,
        "paths",
        "honest and dishonest steps over all operators: which paths past the losses are named",
        "JSON: a list of rows with work (honest or dishonest), mode, seconds (of a processor), ratio (null), seed, "
        "steps, operators, wrong (names of steps that are judged wrongly) and not_made (how many let no gradient pass, "
        "or cannot be recorded); exit code 1 where one is judged wrongly",
    )
    one.add_argument("--trials", type=int, metavar="N", help="random dishonest steps (default: 400)")
    one.add_argument("--seed", type=int, metavar="N", help="of these (default: 0)")
    one.add_argument("--out", type=Path, metavar="FILE", help="write the rows with this machine's description")

    one = _add(
        works,
        "fuzz",
        "every parser that foreign bytes reach, on inputs that coverage leads to",
        "JSON: a list of rows with work (the parser), mode, seconds, ratio (null), seed, executions, accepted, "
        "commit, findings (a list of text, bytes, input in hex); exit code 3 where there is a finding",
    )
    one.add_argument("--target", action="append", metavar="NAME", dest="targets", help="a parser (default: all)")
    one.add_argument("--seconds", type=float, metavar="S", help="of a processor, for each parser (default: 60)")
    one.add_argument("--seed", type=int, metavar="N", help="of the fuzzing (default: 0)")
    one.add_argument("--jobs", type=int, metavar="N", help="parsers at a time (default: 1)")
    one.add_argument("--out", type=Path, metavar="FILE", help="write the rows with this machine's description")

    one = _add(
        works,
        "chip",
        "what a chip costs: freezes, digests, the meter, memory, audits, and ten years in 64 KiB under a flood",
        "JSON: a list of rows with work (freeze, digest, tiny-gpt, meter, chips, audit or decade), mode, seconds, "
        "ratio (to a plain copy, SHA-256 in one thread, a plain step, the youngest log) and what else was measured; "
        "exit code 3 where a target is missed",
    )
    one.add_argument("--chips", type=int, metavar="N", help="chips in one process (default: 1000)")
    one.add_argument("--megabytes", type=int, metavar="M", help="memory that is frozen and hashed (default: 512)")
    one.add_argument("--years", type=int, metavar="Y", help="of a chip in the field (default: 10)")
    one.add_argument("--out", type=Path, metavar="FILE", help="write the rows with this machine's description")

    one = _add(
        works,
        "faults",
        "a chip's life with one write that goes wrong, for each write and each way to go wrong",
        "JSON: a list of rows with work (raise, short, lost, flip or kill), mode (what the chip was doing), seconds, "
        "ratio (null), faults, lost (lives after which the log does not verify, lacks what was acknowledged or does "
        "not go on) and problems; exit code 3 where anything is lost",
    )
    one.add_argument(
        "--faults",
        type=int,
        metavar="N",
        help="at least so many; in whole rounds where they are more than there are writes (default: 1000)",
    )
    one.add_argument("--seed", type=int, metavar="S", help="which bits flip and where writes end (default: 0)")
    one.add_argument("--out", type=Path, metavar="FILE", help="write the rows with this machine's description")

    one = _add(
        works,
        "bundle",
        "bytes of a signed verdict's bundle changed in turn: verifying it must fail each time",
        "JSON: a list of rows with work (minimal: one chip, one step; demo: as the demo's round makes), mode, seconds, "
        "ratio (null), bytes, changed, noticed, unchanged (the verdict of the bundle as it is), missed (places) and "
        "seed; exit code 3 where a change goes unnoticed",
    )
    one.add_argument("--places", type=int, metavar="N", help="of the larger bundle (default: 2000)")
    one.add_argument("--seed", type=int, metavar="S", help="of places and bytes (default: 0)")
    one.add_argument("--out", type=Path, metavar="FILE", help="write the rows with this machine's description")

    one = _add(
        works,
        "crashes",
        "a recorded loop whose process or machine stops: what resuming makes of the files as that may leave them",
        "JSON: a list of rows with work (kill, power, or put back: all but the chips is as it was before), mode (sync "
        "or plain), seconds, ratio (null), crashes, resumed (that ended as the undisturbed run did), refused (by one "
        "line), lost (that ended elsewhere, or were refused or lost a step against the promise) and problems; exit "
        "code 3 where anything is lost",
    )
    one.add_argument("--trials", type=int, metavar="N", help="crashes of each kind and mode (default: 200)")
    one.add_argument("--seed", type=int, metavar="S", help="when they come and what they leave (default: 0)")
    one.add_argument("--out", type=Path, metavar="FILE", help="write the rows with this machine's description")

    one = _add(
        works,
        "ledger",
        "labs that hide work in what nobody can replay, and honest ones that crash: what their chips' ledgers print",
        "JSON: a list of rows with work (a lie, or what happens to an honest lab), mode (lies or honest), seconds, "
        "ratio (null), seed, worlds, outcomes, problems and kept (worlds that broke a law); exit code 3 where slack "
        "hides more than is printed or allowed, or an honest lab is rejected or left open without need",
    )
    one.add_argument("--lies", type=int, metavar="N", help="worlds of a lab that hides work (default: 400)")
    one.add_argument("--honest", type=int, metavar="N", help="worlds of an honest one (default: 300)")
    one.add_argument("--seed", type=int, metavar="S", help="decides every world (default: 0)")
    one.add_argument("--out", type=Path, metavar="FILE", help="write the rows with this machine's description")

    one = _add(
        works,
        "interference",
        "random host programs on two bare chips that differ in their draws, or in their secrets, alone",
        "JSON: a list of rows with work (draws or secrets), mode (bare chips), seconds, ratio (null), seed, programs, "
        "lines (compared) and problems; exit code 3 where a host sees a difference before the chips' snapshots differ",
    )
    one.add_argument("--programs", type=int, metavar="N", help="host programs of at most 200 calls (default: 10000)")
    one.add_argument("--seed", type=int, metavar="S", help="decides every program (default: 0)")
    one.add_argument("--out", type=Path, metavar="FILE", help="write the rows with this machine's description")

    one = _add(
        works,
        "suppression",
        "bare chips whose hosts avoid snapshots that they foresee, and honest ones: the chance of as few",
        "JSON: a list of rows with work (a share that is avoided, or honest), mode (bare chips), seconds, ratio "
        "(null), seed, histories, expected and demanded (snapshots), rejected, doubted, predicted (both, on average), "
        "accepted, below (chances at most .1, .01 and .001), least and problems; exit code 3 where three quarters are "
        "missing and accepted, or honest chips have few snapshots more often than they say",
    )
    one.add_argument("--lies", type=int, metavar="N", help="chips whose hosts avoid snapshots (default: 200)")
    one.add_argument("--honest", type=int, metavar="N", help="honest ones (default: 10000)")
    one.add_argument("--seed", type=int, metavar="S", help="decides every history (default: 0)")
    one.add_argument("--out", type=Path, metavar="FILE", help="write the rows with this machine's description")

    one = _add(
        works,
        "hiding",
        "labs that keep another model in their chips' memory as best they can, beside the chance that verdicts print",
        "JSON: a list of rows with work (the way), mode (chips and ticks), seconds, ratio (null), seed, tries, caught, "
        "doubted, low, high, confidence and printed; exit code 3 where a way is caught less often than is printed",
    )
    one.add_argument("--tries", type=int, metavar="N", help="runs in each of six settings (default: 480)")
    one.add_argument("--seed", type=int, metavar="S", help="decides every run (default: 0)")
    one.add_argument("--out", type=Path, metavar="FILE", help="write the rows with this machine's description")

    one = _add(
        works,
        "declarations",
        "declarations that hide something, each under a rule that it must not pass, and honest ones, never rejected",
        "JSON: a list of rows with work (the family), mode (hiding or honest), seconds, ratio (null), seed, outcome, "
        "agreed and reasons; exit code 3 where one is not judged as it must be",
    )
    one.add_argument("--cases", type=int, metavar="N", help="of either kind (default: 300)")
    one.add_argument("--seed", type=int, metavar="S", help="decides every case (default: 0)")
    one.add_argument("--out", type=Path, metavar="FILE", help="write the rows with this machine's description")

    one = _add(
        works,
        "inspection",
        "what an inspection costs: by checkpoint interval, of a long run, with one worker and two",
        f"{_ROWS}: work is interval, long or workers; ratio is the share of the steps that one device replays, or the "
        "time of one worker; interval, against, confidence, outcome, segments, replayed_segments, replayed_steps, "
        "predicted_steps, replay_seconds (by device), step_ms, training_seconds, bytes_a_step, checkpoint_bytes; exit "
        "code 3 where a run is not accepted, a tenth of the long one does not do, or two workers take more than 0.65",
    )
    costs = ("interval", "long", "workers")
    one.add_argument("--cases", nargs="+", choices=costs, metavar="WORK", help=f"of {', '.join(costs)} (default: all)")
    one.add_argument("--steps", type=int, metavar="N", help="steps of the long run (default: 10000)")
    one.add_argument("--curve-steps", type=int, metavar="N", help="steps of the run with each interval (default: 1024)")
    one.add_argument("--out", type=Path, metavar="FILE", help="write the rows with this machine's description")

    one = _add(
        works,
        "cluster",
        "inspections on two nodes of a Ray cluster, with kills, and what a further run and dealing out cost",
        "JSON: a list of rows with work (scheduler, runs, verdicts or kills), mode, seconds (of the scheduler for a "
        "segment; of each run from the second on in one command; of an inspection or replay), ratio (to this process, "
        "or to a command with one run), and segments, workers and peak_kib; alone_seconds, runs and pairs; outcome and "
        "equal; or answered_before and complete; exit code 3 where a verdict differs, a replay is not complete, a "
        "further run takes over 0.5 s, or the scheduler takes over 10 ms or keeps over 256 bytes for a segment. Needs "
        "the extra `ray`, scheduler and runs apart",
    )
    four = ("scheduler", "runs", "verdicts", "kills")
    one.add_argument("--cases", nargs="+", choices=four, metavar="WORK", help=f"of {', '.join(four)} (default: all)")
    one.add_argument("--pairs", type=int, metavar="N", help="of commands with one run and with five (default: 5)")
    one.add_argument("--segments", type=int, nargs="+", metavar="N", dest="sizes", help="default: 1000 10000 30000")
    one.add_argument("--out", type=Path, metavar="FILE", help="write the rows with this machine's description")

    one = _add(
        works,
        "engines",
        "closed form, aggregated and per-chip engine on random settings: detection, false alarm, excess, posterior",
        "JSON: a list of rows with setting, policy, chips, samples, refusals, evidence, engine, trials, seed, and "
        "detection, false_alarm, excess and posterior (closed_form, low, high: all intervals together err with 1e-3); "
        "exit code 3 where one leaves out its closed form",
    )
    one.add_argument("--settings", type=int, metavar="N", help="random settings (default: 40)")
    one.add_argument("--trials", type=int, metavar="N", help="of the aggregated engine (default: 40000)")
    one.add_argument("--agents", type=int, metavar="N", help="trials of the per-chip engine (default: 3000)")
    one.add_argument("--seed", type=int, metavar="S", help="of settings and trials (default: 1)")
    one.add_argument("--out", type=Path, metavar="FILE", help="write the rows with this machine's description")

    one = _add(
        works,
        "explore",
        "the explorer in a browser: JavaScript beside Python, first picture, slider to picture, requests",
        "JSON: a list of rows with points, seed, work, value, most (the largest value that is accepted) and unit; exit "
        "code 3 where a value is larger. Needs chromium and the extra `browser`",
    )
    one.add_argument("--points", type=int, metavar="N", help="random settings of the sliders (default: 10000)")
    one.add_argument("--seed", type=int, metavar="S", help="of these (default: 1)")
    one.add_argument("--out", type=Path, metavar="FILE", help="write the rows with this machine's description")


def _add(
    works: _SubParsersAction[ArgumentParser],
    name: str,
    text: str,
    epilog: str,
) -> ArgumentParser:
    """Add a work whose function ``run`` takes its options by name."""
    parser = works.add_parser(name, help=text, epilog=epilog)
    add_json(parser)
    parser.set_defaults(handler=_bench)
    return parser


def _add_presets(parser: ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--preset", action="append", metavar="NAME", dest="presets", help=f"what to train (default: {default})"
    )


def _bench(arguments: argparse.Namespace) -> int:
    """Run a work; exit code 3 where what it found is not what it promises."""
    from inspector.devices import enter

    if arguments.work in _ON_NATIVE:
        enter("native")
    if arguments.work in ("honest", "loops"):
        enter("native-1")
    if arguments.work == "numerics":
        enter(arguments.device)
    from tqdm import tqdm

    module = importlib.import_module(f"analysis.bench.{arguments.work.replace('-', '_')}")
    names = [
        "presets",
        "programs",
        "steps",
        "seeds",
        "devices",
        "numerics",
        "lies",
        "tries",
        "trials",
        "samples",
        "runs",
        "targets",
    ]
    names += ["programs", "seconds", "sequences", "honest", "seed", "jobs", "guards_off", "leaves", "faults", "chips"]
    names += ["megabytes", "years", "cases", "sizes", "points", "places", "settings", "agents", "curve_steps", "pairs"]
    options = {name: getattr(arguments, name) for name in names if getattr(arguments, name, None) is not None}
    if arguments.work == "evasions":
        found = module.run(progress=counted_bar("evasions", "world"), **options)
    elif arguments.work in ("equality", "quality", "honest", "honest-logs", "fuzz", "loops"):
        if arguments.work in ("equality", "quality", "honest-logs"):
            options["out"] = arguments.out
        if arguments.work == "quality" and arguments.run is not None:
            from inspector.inspection.trust import Trust

            trust = arguments.trust or [trust_path(arguments.run)]
            options["recorded"] = (arguments.run, Trust.load(trust, [arguments.run]))
        with tqdm(desc=arguments.work, unit="run", disable=not sys.stderr.isatty(), leave=False) as bar:
            found = module.run(progress=lambda _: bar.update() and None, **options)
    elif arguments.work in _UNITS:
        unit = _UNITS[arguments.work]
        with tqdm(desc=arguments.work, unit=unit, disable=not sys.stderr.isatty(), leave=False) as bar:
            found = module.run(progress=bar.update, **options)
    else:
        found = module.run(**options)
    written = ("accuracy", "numerics", "evasions", "honest", "fuzz", "loops", "replay", "explore", *_UNITS)
    if arguments.work in written and arguments.out is not None:
        module.write(found, arguments.out)
    if arguments.work == "evasions" and arguments.rates is not None:
        module.save_as_rates(found, arguments.rates)
    problem: str | None = _report(module, found, arguments.json)
    if problem is not None:
        print(f"chipwitness bench: {problem}", file=sys.stderr)
    return 0 if problem is None else 3


def _report(module: ModuleType, found: Any, as_json: bool) -> str | None:
    """Print what a work found; why it is not what the work promises, or None."""
    if as_json:
        print_json(found)
    else:
        print("\n".join(getattr(module, "table", _lines)(found)))
    return module.verdict(found) if hasattr(module, "verdict") else None


def _lines(rows: list[dict[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        rest = {key: value for key, value in row.items() if key not in ("work", "mode", "seconds", "ratio")}
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}×"
        lines.append(f"{row['work']:36} {row['mode']:20} {row['seconds']:10.3f} s {ratio:>8}  {rest or ''}")
    return lines
