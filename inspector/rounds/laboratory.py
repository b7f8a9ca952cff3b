"""What a lab does in a round: it hands over heads, lets its chips answer, and opens what was drawn.

The lab itself is an argument of the world: the inspector knows no more of it than ``world.Laboratory`` says.
"""

from __future__ import annotations

import base64
import hashlib
import shutil
from collections.abc import Collection
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from firmware_sim import RecordKind
from firmware_sim.errors import CallerError, EvidenceError, Unreadable
from firmware_sim.evidence import decode_base64, parse_log
from inspector.bundle.redraw import settings_from
from inspector.inspection.answers import Answers
from inspector.inspection.disclosure import thin_copy
from inspector.inspection.ownership import past_spans
from inspector.inspection.past_spans import deposited
from inspector.inspection.sampling import challenge_seed, draw, nonce_of
from inspector.rounds.exchange import announced_in, asked_in, needed, openings
from inspector.rounds.openings import copy_opened, require_drawn
from inspector.rounds.world import CLUSTER, INSPECTORATE, Message, World
from monitor.transcript import RunFolder
from monitor.transcript.layout import MANIFEST
from monitor.transcript.manifest import Manifest

__all__ = ["answer", "disclose", "hand"]


def hand(world: World, lab: str, *, runs: Collection[str] | None = None, now: datetime) -> list[str]:
    """A lab hands over the signed heads of its runs; the names of those that it does are returned.

    Args:
        runs: names of some of its runs, as a lab that hides others would give; None for all.
    """
    announced = announced_in(world, lab, now)
    known = world.runs(lab)
    chosen = sorted(known if runs is None else runs)
    if not set(chosen) <= set(known):
        raise CallerError(f"{lab} has no run {sorted(set(chosen) - set(known))[0]!a:.60}")
    side = world.side(lab)
    runs_now = [side.still(Path(known[name]), _copy_of(world, lab, name)) for name in chosen]
    heads = [(run / MANIFEST).read_bytes().decode() for run in runs_now]
    world.send("heads", lab, [INSPECTORATE], {"heads": heads, "names": chosen}, announced.digest, side.key)
    return chosen


def answer(world: World, lab: str, *, now: datetime) -> list[str]:
    """A lab's drawn chips answer their nonces, and the inspectorate is shown the lab's runs; returns the chips.

    Raises:
        EvidenceError: the secret is not the one whose hash was announced, or does not draw these chips' nonces.
    """
    announced, drawn = announced_in(world, lab, now), _revealed(world, lab)
    trust, side = world.trust(), world.side(lab)
    mine = {chip: nonce for chip, nonce in drawn.predicate["chips"].items() if chip in trust.chips_of(lab)}
    said: dict[str, dict[str, str]] = {}
    for chip, nonce in mine.items():
        files = side.ask(chip, bytes.fromhex(nonce), trust.challenge_of(lab)[0])
        said[chip] = {name: base64.b64encode(content).decode() for name, content in files.items()}
    for name, folder in _still_handed(world, lab).items():
        thin_copy(folder, openings(world, INSPECTORATE) / f"{lab}.{name}")
    world.send("answers", lab, [INSPECTORATE], {"chips": said}, announced.digest, side.key)
    return sorted(said)


def disclose(world: World, lab: str, *, now: datetime) -> list[str]:
    """Open to the cluster what was drawn of a lab's runs; returns the names of those of which anything was.

    Raises:
        EvidenceError: more is asked for than the opened secret draws.
    """
    announced, drawn, key = announced_in(world, lab, now), _revealed(world, lab), world.side(lab).key
    asked = asked_in(world, lab)
    seed = challenge_seed(drawn.predicate["secret"], drawn.predicate["heads"])
    kinds = {rule["kind"] for rule in announced.predicate.get("rules", {"rules": []})["rules"]}
    runs = [RunFolder(folder, key.verifying) for folder in _still_handed(world, lab).values()]
    heads = {run.manifest_digest: run for run in runs if run.manifest_digest in drawn.predicate["heads"]}
    mine = {name: heads[each.head] for name, each in asked.items() if each.head in heads and Path(name).name == name}
    for name, run in mine.items():
        try:
            require_drawn(
                asked[name],
                run,
                settings_from(announced.predicate["settings"]),
                seed,
                seen=_snapshots(world, lab, run),
                known=_known(world, lab, run),
                kinds=kinds,
                others=len(asked) > 1,
            )
        except EvidenceError as error:
            raise EvidenceError(f"the inspectorate asks for more of {name} than was drawn: {error}") from None
    opened = [copy_opened(run, asked[name], openings(world, CLUSTER) / name, key) for name, run in mine.items()]
    world.send("openings", lab, [INSPECTORATE, CLUSTER], {"runs": opened}, announced.digest, key)
    shutil.rmtree(_copy_of(world, lab, "").parent, ignore_errors=True)
    return sorted(mine)


def _revealed(world: World, lab: str) -> Message:
    """The draw, by a secret whose hash was announced."""
    announced, drawn = announced_in(world, lab), needed(world, lab, "draw")
    if hashlib.sha256(drawn.predicate["secret"].encode()).digest() != announced.about:
        raise EvidenceError("the secret that the inspectorate opened is not the one that it announced")
    _check_draw(announced, drawn)
    return drawn


def _check_draw(announced: Message, drawn: Message) -> None:
    """EvidenceError if the secret draws other chips of those announced, or gives them other nonces.

    A lab does not know which heads others handed over, and takes the inspectorate's word for those.
    """
    said = drawn.predicate
    seed, chips = challenge_seed(said["secret"], said["heads"]), announced.predicate["chips"]
    samples = settings_from(announced.predicate["settings"]).samples
    pool = [chip for chip, owner in chips.items() if owner in announced.predicate["labs"]]
    if said["chips"] != {chip: nonce_of(seed, chip).hex() for chip in draw(pool, samples, seed)}:
        raise EvidenceError("the secret that the inspectorate opened does not draw these chips and nonces")


def _still_handed(world: World, lab: str) -> dict[str, Path]:
    """By name, where those of a lab's runs lie whose heads it has handed over in this round."""
    handed = world.sent(lab, "heads", world.side(lab).key.verifying)
    heads = [] if handed is None else handed.predicate["heads"]
    copies = {name: (_copy_of(world, lab, name), Path(run)) for name, run in world.runs(lab).items()}
    folders = {name: copy if copy.exists() else run for name, (copy, run) in copies.items()}
    return {name: each for name, each in folders.items() if (each / MANIFEST).read_bytes().decode() in heads}


def _snapshots(world: World, lab: str, run: RunFolder) -> set[int]:
    """Steps of a run at or in which drawn chips, as they said, or chips that the lab has no more took snapshots."""
    said = world.sent(lab, "answers", world.side(lab).key.verifying)
    logs = {} if said is None else {chip: files.get("log.bin", "") for chip, files in said.predicate["chips"].items()}
    records = [record for chip, log in logs.items() for record in parse_log(decode_base64(log), chip=chip)]
    trust, kept = world.trust(), Answers(world.deposits())
    for span in past_spans([lab], trust):
        with suppress(EvidenceError, Unreadable):  # then the inspectorate cannot read it either
            records += parse_log(deposited(span, trust, kept).read("log.bin"), chip=span.chip)
    run_id = run.metadata.run_id
    mine = [each for each in records if each.kind is RecordKind.SNAPSHOT and each.run_id == run_id]
    return {each.step + (each.operators > 0) for each in mine}


def _known(world: World, lab: str, run: RunFolder) -> set[int]:
    """Numbers of steps that the run's heads had which the lab handed over in earlier rounds."""
    key = world.side(lab).key.verifying
    earlier = [world.sent(lab, "heads", key, number=number) for number in range(1, world.round)]
    heads = [Manifest.open(head.encode(), key) for each in earlier if each for head in each.predicate["heads"]]
    return {head.steps for head in heads if head.run == run.manifest.run}


def _copy_of(world: World, lab: str, name: str) -> Path:
    return world.home(lab) / "handed" / f"{world.round:04d}" / name
