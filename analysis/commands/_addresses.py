"""Providers and witnesses that options name by NAME=URL, for ``dispute`` and ``delegate``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firmware_sim.errors import CallerError

if TYPE_CHECKING:
    from argparse import ArgumentParser

    from inspector.inspection.trust import Trust
    from inspector.wire.witness import Known

__all__ = ["add_witness", "by_name", "witness_of"]


def add_witness(parser: ArgumentParser, whom: str) -> None:
    """Add ``--witness``."""
    text = (
        "a witness's name in the trust file, and the address of its `serve witness`. It forwards the questions of a "
        f"dispute to {whom}, and signs the time of each answer, so that `verify` says who was late"
    )
    parser.add_argument("--witness", metavar="NAME=URL", help=text)


def by_name(given: list[str], what: str, option: str) -> list[tuple[str, str]]:
    """Names and what belongs to them; CallerError unless each is NAME=..., and no name is there twice."""
    found = [(name, value) for name, _, value in (each.partition("=") for each in given)]
    if not all(name and value for name, value in found) or len({name for name, _ in found}) != len(found):
        raise CallerError(f"write --{option} NAME={what}, with a different name for each")
    return found


def witness_of(witness: str | None, trust: Trust) -> Known | None:
    """The witness that the option names; CallerError where the trust file does not."""
    from inspector.wire.client import Http
    from inspector.wire.witness import Known

    if witness is None:
        return None
    ((name, url),) = by_name([witness], "URL", "witness")
    if name not in trust.witnesses:
        raise CallerError(f"the trust file names no witness {name!a:.100}: `task trust --witness` adds one")
    key = trust.witnesses[name]
    return Known(name=name, key=key, transport=Http(url, key))
