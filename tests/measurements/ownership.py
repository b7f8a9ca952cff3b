"""``ownership``: random histories of one chip that is trained on, sold, lost, returned and revoked.

Owners are honest or lie. Chip, registry, runs and inspections are real; histories share recorded runs. Each ends with
an inspection of every lab that has had the chip: REJECT has to name all that lied, and nobody else. Where nothing shows
what a chip did, as of one that was revoked before it had answered, nobody is named.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from analysis.bench.origin import write
from inspector import registry as reg
from inspector.inspection.verdict import Outcome
from inspector.replay.pool import DevicePool
from tests.attacks.chip_trade import LABS, Trade

__all__ = ["history", "run", "verdict", "write"]

_MOST_ACTIONS = 6


def history(place: Path, kept: Path, seed: int, worker: Any) -> dict[str, Any]:
    """Play one history to its end; its actions, who lied, what each lab's inspection says, and what is wrong there."""
    random_ = random.Random(seed)
    trade = Trade(place, kept)
    actions, state = ["train"], "held"
    hides, proven, untold = set[str](), set[str](), set[str]()  # in the present span, in others, where nothing shows it
    trade.train()
    for _ in range(random_.randrange(1, _MOST_ACTIONS)):
        action, owner = random_.choice(_possible(trade, state)), trade.holder
        actions.append(action)
        match action.partition(" ")[::2]:
            case "train", how:
                trade.train(hidden=how == "hidden")
                hides |= {owner} if how == "hidden" else set()
            case "sell", buyer:
                trade.pass_on(buyer)
            case "lose", _:
                trade.claim(reg.ClaimKind.LOST, trade.answer())
                state = "lost"
            case "used", _:  # by whoever has it now
                trade.train(hidden=True)
                untold.add(owner)
            case "find", _:
                trade.claim(reg.ClaimKind.FOUND, trade.answer())
                state = "held"
            case "revoke", how:
                trade.revoke(trade.answer() if how == "with" else None)
                untold |= {owner} if how == "without" else set()
                hides = set() if how == "without" else hides
                state = "revoked"
        if not action.startswith("train"):
            proven, hides = proven | hides, set()
    proven |= hides
    if random_.random() < 0.1 and state == "held" and trade.holder in LABS:
        trade.refuses.add(trade.holder)
        proven.add(trade.holder)
        actions.append("refuse")
    labs = [name for name in LABS if name in trade.declared or name == trade.holder]
    verdict = trade.inspect(*labs, worker=worker)
    said = {lab: Outcome(outcome) for lab, outcome in verdict.evidence["labs"].items()}
    wrong = [lab for lab in labs if (said[lab] is Outcome.REJECT) != (lab in proven)]
    wrong += [lab for lab in labs if lab in untold and said[lab] is Outcome.ACCEPT and _matters(actions)]
    sure = [lab for lab in labs if lab in trade.declared and lab not in proven | untold]
    undecided = [lab for lab in sure if said[lab] is not Outcome.ACCEPT]
    return {
        "seed": seed,
        "actions": actions,
        "lied": sorted(proven),
        "untold": sorted(untold),
        "said": {lab: outcome.value for lab, outcome in said.items()},
        "wrong": wrong,
        "undecided": undecided,
        "why": [reason.text for reason in verdict.reasons][:8] if wrong or undecided else [],
    }


def _matters(actions: Sequence[str]) -> bool:
    """Whether the chip came back after somebody had used it while it was gone, or took part in what nothing shows."""
    return "find" in actions[actions.index("used") :] if "used" in actions else actions[-2:-1] == ["train hidden"]


def _possible(trade: Trade, state: str) -> list[str]:
    if state == "revoked":
        return ["stay"]
    if state == "lost":
        return ["find", "used", "stay"]
    others = [f"sell {lab}" for lab in (*LABS, "fab") if lab != trade.holder]
    if trade.holder == "fab":
        return others
    return ["train", "train", "train hidden", "lose", "revoke with", "revoke without", *others, *others]


def run(
    *, histories: int = 200, seed: int = 1, progress: Callable[[int], object] = lambda done: None
) -> list[dict[str, Any]]:
    """Play so many histories; one row, with every history that went wrong or left an honest lab open."""
    began, told = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder, DevicePool() as pool:
        kept = Path(folder) / "kept"
        kept.mkdir()
        for number in range(histories):
            with tempfile.TemporaryDirectory(dir=folder) as place:
                told.append(history(Path(place), kept, seed * 1_000_000 + number, pool.run))
            progress(1)
    seconds = time.monotonic() - began
    return [
        {"work": "ownership", "mode": "real runs", "seconds": seconds, "ratio": None, "seed": seed, **_summary(told)}
    ]


def verdict(rows: Sequence[dict[str, Any]]) -> str | None:
    """What is wrong, or None."""
    found = [(name, each) for row in rows for name in ("wrong", "undecided") for each in row[name]]
    return f"{len(found)} histories; history {found[0][1]['seed']} is {found[0][0]}" if found else None


def _summary(told: Sequence[dict[str, Any]]) -> dict[str, Any]:
    outcomes, actions = Counter[str](), Counter[str]()
    for each in told:
        actions.update(action.partition(" ")[0] for action in each["actions"])
        for lab, outcome in each["said"].items():
            what = "lied" if lab in each["lied"] else "untold" if lab in each["untold"] else "honest"
            outcomes[f"{what}: {outcome}"] += 1
    return {
        "histories": len(told),
        "actions": dict(sorted(actions.items())),
        "outcomes": dict(sorted(outcomes.items())),
        "wrong": [each for each in told if each["wrong"]],
        "undecided": [each for each in told if each["undecided"]],
    }
