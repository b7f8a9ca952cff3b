"""A campaign in words: a line for each strategy, and what the figures rest on."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.commands import _regimes
from analysis.commands._answers import fields_of
from analysis.commands._campaign_answer import CampaignAnswer, ScenarioFacts
from analysis.commands._common import plural
from analysis.hidden_sites import hidden_lines

__all__ = ["campaign_lines"]

_LEGEND = (
    "caught: by draws of chips, or by searches, claimed losses and evidence beyond chips as far as the regime has "
    "them; day: median of the trials that were caught, before or after the run ended, with its interval; in time: "
    "caught before; unseen: not caught by the end of all days"
)


def campaign_lines(data: CampaignAnswer) -> list[str]:
    """A campaign in words, from the document that ``--json`` prints."""
    rows, about = data.rows, data.scenario
    lines = [*_head(about), *_table(data), ""]
    lines += [
        f"no samples for {about.wanted:g} against {row.strategy!r}: {row.needed_reason}"
        for row in rows
        if row.needed_reason
    ]
    lines += [
        f"no violation in {row.strategy!r}: run {run!r} spends no more than the {about.threshold_flop:.3g} FLOP "
        "that are allowed, so nothing incriminates it"
        for row in rows
        for run in row.lawful_runs
    ]
    lines += [*_posteriors(data), *_bands(data), *hidden_lines({row.strategy: row.hidden for row in rows})]
    for row in rows:
        if row.hidden and row.evidence and row.evidence.found:
            found = ", ".join(f"{name} {chance:.4f}" for name, chance in row.evidence.found.items())
            lines.append(f"{row.strategy!r} is found, false alarms aside, by {found}")
    lines += _outside(data)
    none = [repr(row.strategy) for row in rows[1:] if _regimes.no_evidence(row.predicted, row.false_alarm)]
    if none:
        lines.append(f"caught no more often than the honest are accused, so no evidence: {', '.join(none)}")
    assumed = sorted({lie for row in rows for lie in row.assumed_lies})
    measured = sorted({lie for row in rows for lie in row.measured_lies})
    rates = f"detection rates measured: {', '.join(measured) or 'none'}; assumed: {', '.join(assumed) or 'none'}"
    return [*lines, _LEGEND, rates]


def _head(about: ScenarioFacts) -> list[str]:
    return [
        about.title,
        f"{about.registered_chips:,} registered chips, {about.samples_per_period:,} inspected in each of "
        f"{about.periods} periods ({about.samples_per_year:,} a year: "
        f"{plural(about.inspectors, 'inspector')})",
        f"honest labs are accused with probability {about.false_alarm:.4f} ({about.refusals_allowed} chips "
        f"that could not be shown are tolerated in a draw), {_against(about)} the cap of {about.false_alarms:g}",
        *_regimes.stock_lines(about.stocks_as_of),
        "",
    ]


def _table(data: CampaignAnswer) -> Iterator[str]:
    width = max(len(row.strategy) for row in data.rows)
    percent = f"{100 * data.confidence:g} % interval"
    yield (
        f"{'strategy':{width}}  caught  {percent:>18}  honest  excess  theory  in time   unseen       day (median)  "
        f"  chips  samples for {data.scenario.wanted:g}"
    )
    for row in data.rows:
        caught, days, middle = row.detection, row.days_to_detection, row.median_interval
        interval = f"{caught.low:.4f} to {caught.high:.4f}"
        theory = "-" if row.predicted is None else f"{row.predicted:.4f}"
        needed = "-" if row.samples_needed is None else f"{row.samples_needed:,}"
        median = "-" if days is None or middle is None else f"{days[1]:g} ({middle[0]:g}-{middle[1]:g})"
        in_time = "-" if row.in_time is None else f"{row.in_time:.4f}"
        chips = row.involved_chips + row.hidden_chips
        yield (
            f"{row.strategy:{width}}  {caught.value:.4f}  {interval:>18}  {row.false_alarm:.4f}  "
            f"{row.excess.value:6.3f}  {theory:>6}  {in_time:>7}  {row.miss.value:7.1e}  {median:>17}  "
            f"{chips:>7,}  {needed:>7}"
        )


def _posteriors(data: CampaignAnswer) -> Iterator[str]:
    """What a verdict makes of the chance beforehand, where one is given."""
    if data.prior is None:
        return
    yield f"with a prior of {data.prior:g}, a violation by (after an accusation, after a pass, ratio):"
    for row in data.rows:
        if row.posterior is not None:
            words = ("-" if value is None else f"{value:.4g}" for value in fields_of(row.posterior).values())
            yield f"  {row.strategy}: {', '.join(words)}"


def _bands(data: CampaignAnswer) -> Iterator[str]:
    """The closed forms over the draws of uncertain numbers, where the scenario has some."""
    if not data.uncertain:
        return
    known = ", ".join(f"{name} {text}" for name, text in data.uncertain.items())
    yield f"theory over {data.draws:,} draws of {known}: median (5 % to 95 %); all else is assumed"
    for row in data.rows:
        found = row.band
        if found is not None and found.median is not None:
            part = "" if found.possible == 1 else f" in {100 * found.possible:.3g} % of the draws"
            yield f"  {row.strategy}: {found.median:.4f} ({found.low:.4f} to {found.high:.4f}){part}"


def _outside(data: CampaignAnswer) -> list[str]:
    """Say which closed forms lie outside of their interval, and how many would by chance alone."""
    compared = [(row, row.predicted) for row in data.rows if row.predicted is not None]
    odd = [repr(row.strategy) for row, law in compared if not row.detection.low <= law <= row.detection.high]
    level, expected = data.confidence, (1 - data.confidence) * len(compared)
    return odd and [
        f"theory lies outside the interval of {', '.join(odd)}: {len(odd)} of {len(compared)}, where intervals of "
        f"{100 * level:g} % let {expected:.2g} do so by chance; more --trials tell"
    ]


def _against(about: ScenarioFacts) -> str:
    return "within" if about.false_alarm <= about.false_alarms else "above"
