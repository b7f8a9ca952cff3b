"""An inspection with a trust file: this process plays inspectorate, cluster and, of a simulated lab, the lab."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

from analysis.commands._common import parse_now, say, show_verdict, write_new
from analysis.commands._inspection_options import executor, settings_of
from analysis.commands.runs import require_runs
from firmware_sim.errors import CallerError

if TYPE_CHECKING:
    from firmware_sim.evidence import SigningKey
    from inspector.inspection.guards import Settings
    from inspector.inspection.sources import Sources
    from inspector.inspection.trust import Trust
    from inspector.inspection.verdict import Verdict

__all__ = ["costs", "inspect_alone"]

Result = TypeVar("Result")


def inspect_alone(arguments: argparse.Namespace) -> int:
    """One process plays all parties, by the trust file that is given."""
    from inspector.bundle.builder import bundle_of, settings_json
    from inspector.bundle.contents import accepted_in, heads_in, read_bundle
    from inspector.bundle.models import read_model, subject_of_model
    from inspector.bundle.replays import signing
    from inspector.inspection.casefile import CaseFile
    from inspector.inspection.checkpoints import sign_checkpoints
    from inspector.inspection.inspection import inspect
    from inspector.inspection.memory import load_memory, remember, save_memory
    from inspector.inspection.sources import Past
    from inspector.registry.keyfiles import load_private
    from inspector.rules.judgement import apply_rules
    from inspector.rules.rule_files import read_rules

    now = parse_now(arguments.now)
    _require_options(arguments)
    key = _given(load_private, arguments.key)
    prune_key = _given(load_private, arguments.prune_key)
    cluster = _given(load_private, arguments.cluster_key)
    bundles = [read_bundle(path) for path in arguments.earlier]
    heads = [head for data in bundles for head in heads_in(data)]
    rules = _given(read_rules, arguments.rules)
    settings, trust = _terms(arguments, prune_key)
    memory = _given(load_memory, arguments.memory)
    sources = _sources(arguments)
    model = _given(read_model, arguments.model)
    past = Past(memory=memory, heads=heads, accepted=accepted_in(bundles, trust.inspectorates, settings_json(settings)))
    case = CaseFile()
    with TemporaryDirectory() as place, executor(arguments) as devices:
        devices.prepare(settings.devices)
        worker = devices.run if cluster is None else signing(devices.run, cluster)
        runs = [_still(run, arguments.live, Path(place) / str(at)) for at, run in enumerate(arguments.runs)]
        verdict = inspect(runs, trust, settings, now=now, worker=worker, sources=sources, past=past, case=case)
        if rules is not None:
            verdict = apply_rules(verdict, rules, case, trust, settings, worker=worker)
        more = {} if model is None else {"model": subject_of_model(model, case.transcripts)}
        verdict = replace(verdict, evidence={**verdict.evidence, **more, "one_process": True})
        bundle = None if key is None else bundle_of(case, verdict, trust, settings, key)
    if prune_key is not None:
        signed = sign_checkpoints(arguments.checkpoints, verdict, case.prunable, prune_key)
        verdict = replace(verdict, evidence={**verdict.evidence, "checkpoints": signed})
    if memory is not None:
        save_memory(arguments.memory, remember(memory, verdict))
    if bundle is not None:  # it comes last: until it is there, all of this can be done again
        write_new(arguments.bundle, bundle)
    code = show_verdict(arguments, verdict)
    if not arguments.json:
        _say_more(arguments, verdict, settings)
    return code


def _require_options(arguments: argparse.Namespace) -> None:
    """CallerError where options of an inspection by one process do not go together."""
    require_runs(arguments.runs)
    if len({arguments.bundle is None, arguments.key is None, arguments.cluster_key is None}) > 1:
        raise CallerError("--bundle FILE, --key FILE and --cluster-key FILE have to be given together")
    if arguments.model is not None and arguments.bundle is None:
        raise CallerError("--model PATH needs --bundle FILE, which is then about that model")
    if arguments.bundle is not None and arguments.bundle.exists():
        raise CallerError(f"{arguments.bundle}: exists already")
    if (arguments.checkpoints is None) != (arguments.prune_key is None):
        raise CallerError("--checkpoints DIR and --prune-key FILE have to be given together")


def _given(read: Callable[[Path], Result], path: Path | None) -> Result | None:
    return None if path is None else read(path)


def _terms(arguments: argparse.Namespace, prune_key: SigningKey | None) -> tuple[Settings, Trust]:
    """Settings and trust as the options say; CallerError if the trust file does not know who prunes."""
    from analysis.public_data import chip_named
    from inspector.inspection.trust import Trust

    trust = Trust.load(arguments.trust, arguments.runs)
    if prune_key is not None and prune_key.verifying not in trust.inspectorates:
        raise CallerError(f"the trust file names no inspectorate with the key {arguments.prune_key}")
    settings = settings_of(arguments, seed=arguments.seed)
    if arguments.every_lab:
        settings = replace(settings, labs=tuple(trust.labs))
    if arguments.maximum_flop is not None:
        trust = replace(trust, maximum_flop=arguments.maximum_flop)
    if arguments.clock is not None:
        trust = replace(trust, rates=dict.fromkeys(trust.chips, chip_named(arguments.clock).roofline))
    return settings, trust


def _sources(arguments: argparse.Namespace) -> Sources:
    """Where evidence comes from other than the runs, as the options say."""
    from inspector.inspection.sources import Sources
    from monitor.lab.evidence import LiveChips
    from monitor.lab.host import StoredShards

    return Sources(
        answers=arguments.answers,
        ask=LiveChips(arguments.live).ask if arguments.live else None,
        open_shard=StoredShards(arguments.shards).open if arguments.shards else None,
    )


def _say_more(arguments: argparse.Namespace, verdict: Verdict, settings: Settings) -> None:
    """Say what the text of an inspection by one process adds to its verdict."""
    from inspector.inspection.wording import ONE_PROCESS, REVEALS

    for line in costs(verdict.evidence):
        say(line)
    if arguments.checkpoints is not None:
        of = f"{len(verdict.evidence['checkpoints'])} of {settings.samples} drawn chips"
        say(f"  [checkpoints] signed for {of} in {arguments.checkpoints}")
    if arguments.bundle is not None:
        say(f"  [reveals] {REVEALS}")
    say(f"  [parties] {ONE_PROCESS}; in a world (--world) each party acts by itself")


def costs(evidence: Mapping[str, Any]) -> list[str]:
    """What the replays of each run took, and what all of its steps would take on the same device."""
    lines = []
    steps = {each["run_id"]: each["steps"] for each in evidence["runs"]}
    for each in evidence.get("replays", []):
        taken, seconds = each.get("steps"), each["seconds"]
        if taken and seconds is not None:
            whole = steps[each["run_id"]]
            text = (
                f"  [cost] {each['run']} on {each['device']}: {taken} of {whole} steps replayed ({taken / whole:.0%})"
            )
            lines.append(f"{text} in {seconds:.2g} s; all of them would take {seconds * whole / taken:.2g} s")
    return lines


def _still(run: Path, live: list[Path], place: Path) -> Path:
    """The run, or where a lab that was named is at work on it a copy, as it is between two steps."""
    from monitor.lab.desk import is_at_work
    from monitor.lab.evidence import copy_run
    from monitor.lab.simulated_lab import lab_path

    lab = lab_path(run).resolve()
    if lab not in {each.resolve() for each in live} or not is_at_work(lab):
        return run
    place.mkdir()
    copy_run(run, place / run.resolve().name)
    return place / run.resolve().name
