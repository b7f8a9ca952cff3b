"""Which owner answers for which records of a chip's log, where a chip changes hands.

The registry's signed view divides the log into spans, one for each owner in turn. An owner answers for its own span,
also when somebody else has the chip: the registry keeps what the chip had signed by the span's end. An inspection
blames no owner for another's span, and no one for what a chip did while it was gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from firmware_sim.errors import Unreadable

if TYPE_CHECKING:
    from inspector.inspection.document import SpanEvidence
    from inspector.inspection.trust import Trust
    from inspector.registry.statements import Position

__all__ = ["Span", "held_span", "past_spans", "span_named", "spans_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Records of a chip's log for which one lab answers.

    Attributes:
        lab: the owner.
        start: where it began; None at the chip's first record.
        end: where it ended; None where it goes on.
        why: what ended it, "" where it goes on.
        open_since: the lab that passed the chip on without a position, so that the owner of the records is unknown;
            "" where none did.
        gone: whether the owner did not have the chip during the span.
    """

    chip: str
    lab: str
    start: Position | None = None
    end: Position | None = None
    why: str = ""
    open_since: str = ""
    gone: bool = False

    def require_known(self) -> Span:
        """Return the span; Unreadable, with the remedy, if a transfer left open where it begins or ends."""
        if self.open_since:
            raise Unreadable(
                f"chip {self.chip}: {self.open_since} transferred it without the position of its log, so the owner of "
                "its records is unknown: both owners must sign that transfer again, with 'registry transfer "
                "--evidence'"
            )
        return self

    @property
    def name(self) -> str:
        """Its name in a bundle: the chip's for the present span, the digest of the deposit for one that has ended."""
        return self.chip if self.end is None else self.end.deposit.value.hex()

    @property
    def shows_nothing(self) -> bool:
        """Whether the chip was revoked before it had answered, so that there is no evidence to judge the span by."""
        return self.end is None and self.why == "revocation"

    def to_json(self) -> SpanEvidence:
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
        span = Span(chip=chip, lab=owner, gone=gone, start=start, end=end, why=why, open_since=unknown or here)
        found.append(span)
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
    """Ended spans of these labs, in order for each chip, with the spans after them in which the chip was gone."""
    wanted = set(labs)
    chips = sorted(() if trust.registry is None else trust.registry.chips)
    return [span for chip in chips for span in spans_of(chip, trust) if span.why and span.lab in wanted]


def span_named(name: str, trust: Trust) -> Span | None:
    """The span with a ``name``: the present one of a chip of the trust file, or one that has ended; None if none is."""
    if name in trust.chips:
        return held_span(name, trust)
    return next((span for span in past_spans(trust.labs, trust) if span.end is not None and span.name == name), None)
