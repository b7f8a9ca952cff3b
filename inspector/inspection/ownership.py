"""Who answers for which records of a chip's log: a chip that changes hands has owners one after the other.

The registry's signed view says where each span ends. Records before that are their owner's, whoever has the chip now:
what the chip had signed was deposited then. An inspection of either owner asks about its own span, and blames that
owner alone. A chip that is gone is nobody's from its last position on; nobody is blamed for what it did meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from firmware_sim.errors import Unreadable

if TYPE_CHECKING:
    from inspector.inspection.trust import Trust
    from inspector.registry.statements import Position

__all__ = ["Span", "held_span", "past_spans", "span_named", "spans_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Records of a chip's log for which one lab answers.

    Attributes:
        lab: who held the chip, gone: and did not have it.
        start: where it began; None at the chip's first record.
        end: where it ended; None where it goes on.
        why: what ended it, "" where it goes on.
        open_since: the lab that passed the chip on without saying where; "" where the records can be told apart.
    """

    chip: str
    lab: str
    start: Position | None = None
    end: Position | None = None
    why: str = ""
    open_since: str = ""
    gone: bool = False

    def require_known(self) -> Span:
        """Itself; Unreadable, with the remedy, where a transfer left open which records these are."""
        if self.open_since:
            raise Unreadable(
                f"chip {self.chip}: {self.open_since} passed it on without a position, so that nobody can tell whose "
                "its records are: both owners sign that transfer again, with 'registry transfer --evidence'"
            )
        return self

    @property
    def name(self) -> str:
        """What a bundle calls it: the chip, or of a span that has ended the digest of what was deposited."""
        return self.chip if self.end is None else self.end.deposit.value.hex()

    @property
    def shows_nothing(self) -> bool:
        """Whether the chip was revoked, and nothing that it had signed was deposited: nobody is asked for it."""
        return self.end is None and self.why == "revocation"

    def to_json(self) -> dict[str, Any]:
        """Return JSON-able values."""
        return {
            "owner": "" if self.gone else self.lab,
            "from": 0 if self.start is None else self.start.size,
            "until": None if self.end is None else self.end.size,
            "ended": self.why,
        }


def spans_of(chip: str, trust: Trust) -> list[Span]:
    """All spans of a chip, its present one last; that alone where no registry says more.

    A chip that is gone, or whose certificate is revoked, has no present one.
    """
    holder = trust.chips.get(chip)
    entry = {} if trust.registry is None or chip not in trust.registry.chips else trust.registry.chips[chip].entry
    found: list[Span] = []
    start, unknown, owner = None, "", ""
    for lab, why, end in _closed(entry) if "spans" in entry else ():
        owner, gone, here = lab or owner, not lab, lab if end is None else ""
        told: dict[str, Any] = {"lab": owner, "gone": gone, "start": start, "end": end, "why": why}
        found.append(Span(chip=chip, open_since=unknown or here, **told))
        start, unknown = end, here
    if holder is not None:
        found.append(Span(chip=chip, lab=holder, start=start, open_since=unknown))
    return found


def _closed(entry: Mapping[str, Any]) -> list[tuple[str, str, Position | None]]:
    from inspector.registry.positions import read_spans  # brings a database library, which few trust files need

    return read_spans(entry)


def held_span(chip: str, trust: Trust) -> Span:
    """The present span of a chip of the trust file."""
    return spans_of(chip, trust)[-1]


def past_spans(labs: Iterable[str], trust: Trust) -> list[Span]:
    """Spans of these labs that have ended, each chip's in order, and those behind them in which nobody had the chip."""
    wanted = set(labs)
    chips = sorted(() if trust.registry is None else trust.registry.chips)
    return [span for chip in chips for span in spans_of(chip, trust) if span.why and span.lab in wanted]


def span_named(name: str, trust: Trust) -> Span | None:
    """The span with a ``name``: the present one of a chip of the trust file, or one that has ended; None if none is."""
    if name in trust.chips:
        return held_span(name, trust)
    return next((span for span in past_spans(trust.labs, trust) if span.end is not None and span.name == name), None)
