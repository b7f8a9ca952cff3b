"""What evidence beyond chips says, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from analysis.commands._common import plural
from analysis.hidden_sites import sentence

__all__ = ["interval", "site_lines", "weigh_lines"]


def _ratio(value: float | None, detection: float = 1.0) -> str:
    if value is None:
        return "silent either way" if detection == 0 else "unbounded"
    return f"{value:.3g}"


def _odds(found: Mapping[str, Any], suffix: str) -> str:
    """Return the factor on the odds in words: nothing is said by what neither world gives."""
    return _ratio(found[f"ratio{suffix}"], 0.0 if found[f"posterior{suffix}"] is None else 1.0)


def weigh_lines(data: Mapping[str, Any]) -> list[str]:
    """What sources of evidence show together, from the document that ``--json`` prints."""
    from analysis.report.tables import aligned

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
            each["name"],
            "-" if each["found"] is None else f"{each['found']:.4f}",
            *(f"{each[key]:.4f}" for key in ("detection", "evaded", "false_alarm")),
            *(
                _ratio(each[key], each[of])
                for key, of in (("alarm_ratio", "detection"), ("alarm_ratio_evaded", "evaded"))
            ),
            _ratio(each["silence_ratio"]),
            each["group"] or "-",
        ]
        for each in data["sources"]
    ]
    simulated = data["simulated"]
    lines = [
        f"Violation: {data['strategy']}. A ratio is the factor on the odds of a violation, by one source alone.",
        *(map(sentence, data["hidden"]) if data["hidden"] else ["It works at no hidden site."]),
        "Finds it: a hidden site, false alarms aside; all other columns count those too.",
        *aligned([head, *body]),
        "",
        "Causes in common, of misses as of false alarms: "
        + (", ".join(f"{name} {share:g}" for name, share in data["dependence"].items()) or "none"),
        f"All together: the rule that accuses the honest with {data['cap']:g} at most "
        f"(exactly {data['false_alarm']:.4g}; simulated {interval(simulated['false_alarm'])})",
        *aligned(
            [
                ["violation", "accused", "if all is evaded"],
                *(
                    [each["strategy"], f"{each['detection']:.4f}", f"{each['evaded']:.4f}"]
                    for each in data["strategies"]
                ),
            ]
        ),
        f"Of {data['strategy']}, simulated: {interval(simulated['detection'])} in {data['trials']:,} trials, seed "
        f"{data['seed']}",
        "",
        "What a violator gets away with who can evade so many sources, the most harmful ones:",
        *(
            f"  {number:2}  {each['detection']:.4f}  {', '.join(each['evades']) or '-'}"
            for number, each in enumerate(data["evasions"])
        ),
    ]
    lines += _observed_lines(data["observed"])
    return [*lines, "", *(f"{each['name']}: {each['origin']}" for each in data["sources"])]


def interval(found: Mapping[str, float]) -> str:
    """A simulated probability with its interval, in words."""
    return f"{found['value']:.4f} ({found['low']:.4f} to {found['high']:.4f})"


def _observed_lines(found: Mapping[str, Any] | None) -> list[str]:
    if found is None:
        return []
    verdict = {True: "; the rule accuses", False: "; the rule does not accuse", None: ""}[found["accused"]]
    shown = ["-" if found[key] is None else f"{found[key]:.4f}" for key in ("posterior", "posterior_evaded")]
    return [
        "",
        f"Alarm: {', '.join(found['alarm']) or 'none'}; silent: {', '.join(found['silent']) or 'not given'}{verdict}",
        f"The odds of a violation change by {_odds(found, '')} (by {_odds(found, '_evaded')} if it evades "
        f"everything): from {found['prior']:g} to {shown[0]} ({shown[1]})",
    ]


def site_lines(data: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """When hidden sites are seen, from the document that ``--json`` prints."""
    from analysis.report.tables import aligned

    rows = []
    for row in data["rows"]:
        cells = ["cannot do the run", *["-"] * (3 + len(names))]
        if (there := row["hidden"]) is not None:
            cells = [f"{there['working']:,.0f}", f"{there['megawatts']:,.3g}", f"{there['chip_hours']:,.3g}"]
            cells += [*(f"{row['found'][name]:.4f}" for name in names), f"{row['any']:.4f}"]
        rows.append([f"{row['chips']:,.0f}", *cells])
    known = [row["hidden"] for row in data["rows"] if row["hidden"] is not None]
    evaded = ", evading" if data["evaded"] else ""
    return [
        f"Chance to find {plural(data['sites'], 'undeclared site')}{evaded}, by the end of the run; any: "
        f"{data['rule']}",
        *aligned([["chips held", "at work", "MW", "chip-hours", *names, "any"], *rows], left=0),
        *(f"The last: {sentence(there)}." for there in known[-1:]),
        "A site is found where there is one, so by construction no find is a false alarm; evidence weigh counts the "
        "sources' own.",
        *(
            (f"{name}: {origin}" for name, origin in data["origins"].items())
            if data["scenario"]
            else ["The rate of finding is the caller's."]
        ),
    ]
