"""What evidence beyond chips says, in words."""

from __future__ import annotations

import argparse

from analysis.commands._common import plural
from analysis.commands._evidence_answers import SitesAnswer, SplitAnswer, WeighAnswer
from analysis.hidden_sites import sentence
from inspector.probability.evidence import Observed

__all__ = ["site_lines", "split_lines", "weigh_lines"]


def _ratio(value: float | None, detection: float = 1.0) -> str:
    if value is None:
        return "silent either way" if detection == 0 else "unbounded"
    return f"{value:.3g}"


def _odds(ratio: float | None, posterior: float | None) -> str:
    """Return the factor on the odds in words: nothing is said by what neither world gives."""
    return _ratio(ratio, 0.0 if posterior is None else 1.0)


def weigh_lines(data: WeighAnswer) -> list[str]:
    """What sources of evidence show together, from what ``--json`` prints."""
    from analysis.report.tables import aligned

    simulated = data.simulated
    lines = [
        f"Violation: {data.strategy}. A ratio is the factor on the odds of a violation, by one source alone.",
        *(map(sentence, data.hidden) if data.hidden else ["It works at no hidden site."]),
        "Finds it: a hidden site, false alarms aside; all other columns count those too.",
        *aligned(_source_table(data)),
        "",
        "Causes in common, of misses as of false alarms: "
        + (", ".join(f"{name} {share:g}" for name, share in data.dependence.items()) or "none"),
        f"All together: the rule that accuses the honest with {data.cap:g} at most "
        f"(exactly {data.false_alarm:.4g}; simulated {simulated.false_alarm.text})",
        *aligned(
            [
                ["violation", "accused", "if all is evaded"],
                *([each.strategy, f"{each.detection:.4f}", f"{each.evaded:.4f}"] for each in data.strategies),
            ]
        ),
        f"Of {data.strategy}, simulated: {simulated.detection.text} in {data.trials:,} trials, seed {data.seed}",
        "",
        "What a violator gets away with who can evade so many sources, the most harmful ones:",
        *(
            f"  {number:2}  {each.detection:.4f}  {', '.join(each.evades) or '-'}"
            for number, each in enumerate(data.evasions)
        ),
    ]
    lines += _observed_lines(data.observed)
    return [*lines, "", *(f"{each.name}: {each.origin}" for each in data.sources)]


def _source_table(data: WeighAnswer) -> list[list[str]]:
    """Each source by itself."""
    head = [
        "source",
        "finds it",
        "alarm if violated",
        "if evaded",
        "if honest",
        "ratio",
        "if evaded",
        "of silence",
        "group",
    ]
    body = [
        [
            each.name,
            "-" if each.found is None else f"{each.found:.4f}",
            *(f"{chance:.4f}" for chance in (each.detection, each.evaded, each.false_alarm)),
            _ratio(each.alarm_ratio, each.detection),
            _ratio(each.alarm_ratio_evaded, each.evaded),
            _ratio(each.silence_ratio),
            each.group or "-",
        ]
        for each in data.sources
    ]
    return [head, *body]


def _observed_lines(found: Observed | None) -> list[str]:
    if found is None:
        return []
    verdict = {True: "; the rule accuses", False: "; the rule does not accuse", None: ""}[found.accused]
    shown = ["-" if chance is None else f"{chance:.4f}" for chance in (found.posterior, found.posterior_evaded)]
    return [
        "",
        f"Alarm: {', '.join(found.alarm) or 'none'}; silent: {', '.join(found.silent) or 'not given'}{verdict}",
        f"The odds of a violation change by {_odds(found.ratio, found.posterior)} "
        f"(by {_odds(found.ratio_evaded, found.posterior_evaded)} if it evades "
        f"everything): from {found.prior:g} to {shown[0]} ({shown[1]})",
    ]


def site_lines(data: SitesAnswer) -> list[str]:
    """When hidden sites are seen, from what ``--json`` prints."""
    from analysis.report.tables import aligned

    rows, names = [], list(data.origins)
    for row in data.rows:
        cells = ["cannot do the run", *["-"] * (3 + len(names))]
        if (there := row.hidden) is not None and row.found is not None:
            cells = [f"{there['working']:,.0f}", f"{there['megawatts']:,.3g}", f"{there['chip_hours']:,.3g}"]
            cells += [*(f"{row.found[name]:.4f}" for name in names), f"{row.any:.4f}"]
        rows.append([f"{row.chips:,.0f}", *cells])
    known = [row.hidden for row in data.rows if row.hidden is not None]
    evaded = ", evading" if data.evaded else ""
    return [
        f"Chance to find {plural(data.sites, 'undeclared site')}{evaded}, by the end of the run; any: {data.rule}",
        *aligned([["chips held", "at work", "MW", "chip-hours", *names, "any"], *rows], left=0),
        *(f"The last: {sentence(there)}." for there in known[-1:]),
        "A site is found where there is one, so by construction no find is a false alarm; evidence weigh counts the "
        "sources' own.",
        *(
            (f"{name}: {origin}" for name, origin in data.origins.items())
            if data.scenario
            else ["The rate of finding is the caller's."]
        ),
    ]


def split_lines(data: SplitAnswer, arguments: argparse.Namespace) -> list[str]:
    """Who sees a job in parts, from what ``--json`` prints and how it was asked for."""
    return [
        f"{plural(data.nodes, 'node')} of {data.node_chips} chips ({data.chips:,} chips, {data.megawatts:.3g} MW) do "
        f"{data.flop:.3g} FLOP in {data.days:g} days.",
        f"{sentence(data.hidden)}.",
        f"{plural(data.visits, 'visit')} of whole periods draw {data.draws:,} chips over the job from "
        f"{arguments.chips:,}: each takes evidence of a given node with probability {data.hit:.3g}.",
        "Judged alone, each node stays below the threshold: 0.0000",
        f"Compared over nodes ({data.rule}): {data.linked:.4f} (simulated {data.simulated.text} in {data.trials:,} "
        f"trials, seed {data.seed})",
        f"Some node found from outside, at {arguments.per_year:g} a year of {arguments.at_megawatts:g} MW: "
        f"{data.found:.4f}. That says nothing of the job where nodes so small need not be declared.",
        "By construction honest labs have no parts of such a job, so none is linked by mistake.",
    ]
