"""Every key of a scenario file, for the reader's errors, for `chipwitness campaign --keys`, and for the manual.

A test compares this list with the keys that the readers ask for.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inspector.campaign.fleet import Evidence, LogSpan, Sampling, Status
from inspector.campaign.policies import POLICIES
from inspector.campaign.reactions import Reaction

__all__ = ["SECTIONS", "SPANS", "Key", "PolicyPage", "Section", "policy_pages"]

NUMBER, SHARE, WHOLE, TEXT, TEXTS, SWITCH, TABLE = (
    "number",
    "share",
    "whole number",
    "text",
    "list of texts",
    "true or false",
    "table",
)
"""Numbers, shares (0 to 1), whole numbers may be uncertain: as `inspector.probability.distributions` reads them."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key.

    Attributes:
        name: in the file.
        kind: what it holds.
        default: what a file without it means; None where it must be there or only one of several is.
        text: what it says, with its unit.
        span: the least and the greatest number that anybody can mean; outside, its unit is another.
    """

    name: str
    kind: str
    default: str | None
    text: str
    span: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Section:
    """One table of the file; ``header`` is how it is written, ``text`` what it is for."""

    path: str
    header: str
    text: str
    keys: tuple[Key, ...]


def _choice(kind: type[Any]) -> str:
    return " | ".join(f'"{each}"' for each in kind)


_DAYS, _FLOPS = (1, 36_525), (1e15, 1e35)

_INSPECTION = (
    Key("period_days", NUMBER, None, "T_m, days between inspections", (0.01, 3_660)),
    Key("samples", 'whole number or "all"', None, "chips drawn in a period; without it `confidence` sets them",
        (0, 1e9)),
    Key("confidence", SHARE, "0.9", "wanted detection, which sizing reaches against the first strategy"),
    Key("snapshot_rate", NUMBER, None, "f, snapshots per chip and day; 0: none", (0, 1_440)),
    Key("sampling", _choice(Sampling), f'"{Sampling.POOLED}"', "over which stock one draw is made"),
    Key("replacement", SWITCH, "false", "whether one inspection may draw a chip twice (Eq. 1 does)"),
    Key("redraw", SWITCH, "true", "whether a chip inspected once may be drawn in a later period"),
    Key("log", _choice(LogSpan), f'"{LogSpan.PERIOD}"', "how far back a chip's log reaches"),
    Key("honest_refusal_rate", SHARE, "0", "chance that a drawn chip cannot be shown for an innocent reason"),
    Key("refusals_allowed", 'whole number or "fewest"', "0", "chips tolerated in a draw that could "
        "not be shown; fewest: that keep the cap", (0, 1e6)),
    Key("false_alarms", SHARE, "0.01", "largest chance of accusing honest labs that sizing may propose"),
    Key("searches", SWITCH, "false", "whether declared sites are searched for unregistered chips each period"),
    Key("search_chips", WHOLE, "no number", "chips that a search looks at; without it a search finds hidden chips "
        "with the assumed rate, however many they are", (0, 1e9)),
    Key("aggregates", SHARE, "0", "chance that parts of one job are recognised over labs; 0: labs are judged alone"),
    Key("loss_rate_per_year", NUMBER, "0", "honest losses per registered chip and year", (0, 1)),
    Key("loss_alarm", SHARE, "no test", "false-alarm chance of the test on chips claimed lost, at the end"),
    Key("inspectors", NUMBER, "no limit", "inspectors that there are", (0, 1e6)),
    Key("chips_per_inspector_year", NUMBER, "1000", "chips that keep one busy for a year", (1, 1e9)),
    Key("inspector_cost", NUMBER, "0", "money for an inspector's year", (0, 1e9)),
    Key("fixed_cost", NUMBER, "0", "money a year for everything else", (0, 1e13)),
    Key("evidence", TEXTS, '"all"', "evidence beyond chips that the regime has, by name; []: none"),
    Key("evidence_false_alarms", SHARE, "0.01", "cap of the rule that weighs it"),
)  # fmt: skip

_FLOP = (
    Key("model", TEXT, None, "a public model's name, instead of a number of FLOP"),
    Key("times", NUMBER, "1", "factor on that model's FLOP", (0.001, 1_000)),
)

SECTIONS = (
    Section("", "at the top", "what the file is", (
        Key("title", TEXT, None, "one line"),
        Key("description", TEXT, '""', "for people: sources, what is assumed"),
        Key("days", NUMBER, None, "the horizon", _DAYS),
        Key("money", TEXT, '""', "currency and year of every price, as USD 2026"),
    )),
    Section("rule", "[rule]", "what must be found", (
        Key("threshold_flop", NUMBER, None, "H, FLOP of a run that breaks the rule; or `model`", _FLOPS),
        *_FLOP,
        Key("exempt_chips", NUMBER, "no limit", "H100 equivalents that a site may hold at most if its chips are exempt",
            (0, 1e9)),
        Key("evidence", _choice(Evidence), f'"{Evidence.AFTER_THRESHOLD}"', "which snapshots incriminate: with the "
            "first, those taken once H FLOP were spent (hence the 2H guarantee)"),
    )),
    Section("inspection", "[inspection]", "how the inspector looks; or [[regime]], several times", _INSPECTION),
    Section("regime", "[[regime]]", "instead of [inspection], regimes to compare: the keys of [inspection], and", (
        Key("name", TEXT, None, "unique"),
        Key("source", TEXT, '""', "where its numbers are from: a place to look, or `assumed`"),
        Key("threshold_flop", NUMBER, "that of [rule]", "H of this regime, where an agreement has several", _FLOPS),
        Key("assumed", TABLE, "{}", "lie = rate: detection rates of this regime, before those of [detection]"),
    )),
    Section("detection", "[detection]", "how often a look at evidence sees through a lie", (
        Key("table", TEXT, "no table", "JSON file of measured rates, relative to the scenario's folder"),
        Key("device", TEXT, "any", "takes the rows of this device"),
        Key("settings", TEXT, "any", "takes the rows with these settings"),
        Key("assumed", TABLE, "{}", "lie = rate, for lies that were not measured"),
    )),
    Section("evidence", "[[evidence]]", "what others than chips see; one of `detection`, `found_per_year` and "
            "`error_chips` says which kind it is", (
        Key("name", TEXT, None, "unique"),
        Key("source", TEXT, '"assumed"', "where its numbers are from: a place to look, or `assumed`"),
        Key("group", TEXT, '""', "sources that share causes, see [dependence]"),
        Key("false_alarm", SHARE, "0", "chance of an alarm where there is no violation"),
        Key("detection", SHARE, None, "monitor of declared sites: chance of an alarm while a run breaks the rule"),
        Key("evaded", SHARE, "as detection", "the same against a lab that evades it"),
        Key("per", '"run"', '"run"', "what `detection` is a chance for; a cited source must say. What is stated "
            "per workload, chip or hour is no run's"),
        Key("found_per_year", NUMBER, None, "search for undeclared sites: finds a year of one of the reference power",
            (0, 1_000)),
        Key("at_megawatts", NUMBER, "10", "that power", (0.001, 1e5)),
        Key("exponent", NUMBER, "0.5", "the rate grows with this power of the site's megawatts", (0, 3)),
        Key("least_megawatts", NUMBER, "0", "sites below are never found", (0, 1e5)),
        Key("concealed", SHARE, "0", "share of a site's power that evasion hides"),
        Key("error_chips", NUMBER, None, "books of chips: their standard deviation, in chips", (1, 1e8)),
        Key("explained", SHARE, "0", "share of the missing chips that evasion explains away"),
    )),
    Section("dependence", "[dependence]", "group = share of causes in common, for each group of [[evidence]]", ()),
    Section("kind", "[[kind]]", "a chip model, in addition to the public ones", (
        Key("name", TEXT, None, "unique"),
        Key("flop_per_second", NUMBER, None, "peak, dense", (1e9, 1e18)),
        Key("link_gbps", NUMBER, "never limits", "GB/s to other chips, for the policy `consumer`", (0.01, 1e6)),
        Key("watts", NUMBER, "1400", "at work, with its share of server and cooling", (10, 1e5)),
    )),
    Section("lab", "[[lab]]", "an owner of chips", (
        Key("name", TEXT, None, "unique"),
        Key("site", "[[lab.site]]", None, "its sites"),
    )),
    Section("lab.site", "[[lab.site]]", "a data centre", (
        Key("name", TEXT, None, "unique within the lab"),
        Key("declared", SWITCH, "true", "false: never searched, only found by [[evidence]]"),
        Key("age_days", NUMBER, "0", "an undeclared one: it had existed before day 0, its chips idle", (0, 36_525)),
        Key("sites", WHOLE, "1", "an undeclared one: it represents so many, which share its chips equally", (1, 1e6)),
        Key("idle_power", SHARE, "0.1", "an undeclared one: what an idle chip draws, of its watts at work"),
        Key("chips", "[[lab.site.chips]]", None, "its pools of chips"),
    )),
    Section("lab.site.chips", "[[lab.site.chips]]", "equal chips", (
        Key("kind", TEXT, None, "with `count`"),
        Key("count", WHOLE, None, "chips", (1, 1e9)),
        Key("stock", TEXT, None, "instead: a public holder, with `as_of`"),
        Key("as_of", TEXT, None, "month of the stock, as 2025-12"),
        Key("share", SHARE, "1", "of the stock"),
        Key("status", _choice(Status), f'"{Status.REGISTERED}"', "only registered chips can be drawn"),
    )),
    Section("run", "[[run]]", "a training run that breaks the rule", (
        Key("name", TEXT, None, "unique"),
        Key("lab", TEXT, None, "whose"),
        Key("flop", NUMBER, None, "or `model`", _FLOPS),
        *_FLOP,
        Key("days", NUMBER, None, "that it lasts as planned", (0.01, 36_525)),
        Key("start", NUMBER, "0", "day on which it begins", (0, 36_525)),
        Key("utilisation", SHARE, "1", "share of the peak that its chips reach"),
    )),
    Section("strategy", "[[strategy]]", "how the labs carry out their runs", (
        Key("name", TEXT, None, "unique"),
        Key("policies", "list of tables", "[]", "{ policy = NAME, ... }, applied in order; see the policies"),
        Key("evades", TEXTS, "[]", 'evidence that it does something against, by name, or "all"'),
    )),
)  # fmt: skip
"""Sections in the order of a file."""


def _spans() -> dict[tuple[str, str], tuple[float, float]]:
    """Return the span of each number, by table and key; the keys of [inspection] serve [[regime]] too."""
    paths = [(section.path, section) for section in SECTIONS]
    paths += [("regime", section) for section in SECTIONS if section.path == "inspection"]
    return {
        (path, key.name): span
        for path, section in paths
        for key in section.keys
        if (span := key.span or ((0, 1) if key.kind == SHARE else None))
    }


SPANS = _spans()
"""The least and the greatest number of each key that holds one."""


@dataclass(frozen=True, slots=True)
class PolicyPage:
    """One policy: its name, what it does, and its parameters with their defaults (None: must be given)."""

    name: str
    text: str
    parameters: Mapping[str, str | None]


def policy_pages() -> tuple[PolicyPage, ...]:
    """Return the policies, as their classes describe them."""
    return tuple(_policy(name, kind) for name, kind in POLICIES.items())


def _policy(name: str, kind: type[Any]) -> PolicyPage:
    parameters: dict[str, str | None] = {}
    for field in dataclasses.fields(kind):
        missing = field.default is dataclasses.MISSING
        parameters[field.name] = None if missing else "none" if field.default is None else f"{field.default}"
    first = (inspect.getdoc(kind) or "").split("\n\n")[0].replace("\n", " ")
    return PolicyPage(
        name=name, text=f"{first} (a reaction)" if issubclass(kind, Reaction) else first, parameters=parameters
    )
