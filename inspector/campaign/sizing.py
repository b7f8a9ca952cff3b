"""How many chips a period must be drawn so that detection, and not false alarm, reaches a wanted probability.

Both rise with the number drawn: an honest lab that cannot show a few chips is accused more often the more are asked
for. So the fewest samples that reach the wanted detection are also those that accuse the fewest honest labs, and where
even they accuse too many, no number serves. Where the regime may choose how many refusals it tolerates, it takes the
fewest that keep the cap; a dishonest lab uses them too, so more samples follow, and so on until both hold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from inspector.campaign.fleet import Inspection
from inspector.campaign.plan import Plan
from inspector.campaign.predictions import predict
from inspector.probability import alarms

__all__ = ["Sizing", "false_alarm", "fewest_refusals", "size"]

PlanOf = Callable[[Inspection], Plan]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """The samples that a wanted detection probability takes, or why it is out of reach.

    Attributes:
        samples: fewest a period; None where no number reaches the wanted probability within the cap.
        refusals_allowed: tolerated refusals that go with them, None without samples.
        reason: why there are no samples; empty if there are.
    """

    samples: int | None
    refusals_allowed: int | None
    reason: str


def size(
    inspection: Inspection, *, plan: PlanOf, honest: PlanOf, most: int, wanted: float, cap: float, chooses: bool
) -> Sizing:
    """Return the fewest samples whose closed form reaches ``wanted`` while honest labs stay within the cap.

    Args:
        inspection: the regime; its samples and capacity are replaced.
        plan: the plan to catch, by regime.
        honest: the plan of the world without violation, by regime.
        most: chips that can be drawn in a period.
        wanted: detection probability.
        cap: largest chance of accusing an honest lab.
        chooses: whether the tolerated refusals may be chosen; otherwise they are the regime's.
    """
    if not inspection.redraw:
        return _none("chips are not drawn again, so there is no closed form")
    evident = _evident(inspection, plan, most)
    if evident is not None and not alarms.within_cap(wanted - evident, cap):
        return _none(f"drawing all {most:,} chips finds evidence with {evident:.4g} only")
    allowed, least = 0 if chooses else inspection.refusals_allowed, 1
    while True:
        regime = dataclasses.replace(inspection, refusals_allowed=allowed, capacity=None)
        samples = _fewest_samples(regime, plan, least, most, wanted)
        if isinstance(samples, str):
            return _none(samples)
        least = samples  # where more refusals are tolerated, no fewer samples are enough
        regime = dataclasses.replace(regime, samples=samples)
        alarm = false_alarm(honest(regime))
        if alarms.within_cap(alarm, cap):
            return Sizing(samples=samples, refusals_allowed=allowed, reason="")
        if not chooses:
            return _none(
                f"the {samples:,} samples a period that reach {wanted:g} accuse an honest lab with {alarm:.2g}, "
                f"above the cap of {cap:g}"
            )
        more = fewest_refusals(regime, honest, cap)
        if more is None:
            text = f"an honest lab is accused with more than {cap:g}"
            return _none(f"{text}, however many chips that could not be shown are tolerated")
        allowed = more


def false_alarm(honest: Plan) -> float:
    """Return the exact chance that somebody is accused in a world without violation.

    Refusals of different draws are independent, so a closed form exists for every regime.
    """
    found = predict(honest).detection
    if honest.strata or found is None:
        raise ValueError(f"{honest.name!r} is not a plan of a world without violation")
    return found


def fewest_refusals(inspection: Inspection, honest: PlanOf, cap: float) -> int | None:
    """Return the fewest tolerated refusals that keep honest labs within the cap; None where no number does."""

    def alarm(allowed: int) -> float:
        return false_alarm(honest(dataclasses.replace(inspection, refusals_allowed=allowed)))

    return alarms.fewest_tolerated(alarm, most=inspection.samples_done(), cap=cap)


def _evident(inspection: Inspection, plan: PlanOf, most: int) -> float | None:
    """Return how often a census finds evidence; detection exceeds it by the false alarm at most."""
    census = dataclasses.replace(inspection, samples=most, capacity=None, honest_refusal_rate=0.0, refusals_allowed=0)
    return predict(plan(census)).detection


def _none(reason: str) -> Sizing:
    return Sizing(samples=None, refusals_allowed=None, reason=reason)


def _fewest_samples(inspection: Inspection, plan: PlanOf, least: int, most: int, wanted: float) -> int | str:
    """Return the fewest samples that reach ``wanted``, or why none do; fewer than ``least`` are known not to."""

    def detection(samples: int) -> float | str:
        found = predict(plan(dataclasses.replace(inspection, samples=samples)))
        return found.reason if found.detection is None else found.detection

    low, high, more = least - 1, least, 1
    while not isinstance(found := detection(high), str) and found < wanted:
        if high == most:
            return f"drawing all {most:,} chips reaches {found:.4g} only"
        low, high, more = high, min(high + more, most), 2 * more
    if isinstance(found, str):
        return found.replace("none: ", "no closed form: ")
    while high - low > 1:
        middle = (low + high) // 2
        found = detection(middle)
        low, high = (low, middle) if not isinstance(found, str) and found >= wanted else (middle, high)
    return high
