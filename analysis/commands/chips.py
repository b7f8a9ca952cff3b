"""``chip show|log|quote|challenge|prune|verify-log``: what a chip is, logs and signs, for who writes its firmware."""

from __future__ import annotations

import argparse
import os
import re
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.commands._answers import fields_of, keys_text
from analysis.commands._chip_answers import Answered, Asked, LoggedChip, Pruned, QuotedChip, ShownChip
from analysis.commands._common import add_json, finish, print_json, say, show_verdict
from analysis.commands.runs import trust_path
from firmware_sim import ErrorCode, MailboxError, limits
from firmware_sim.errors import CallerError, EvidenceError, file_error
from monitor.files import write_whole

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from firmware_sim.service import ChipView

__all__ = ["register"]

_PLACE = "run folder, RUN.lab, a folder of answers, or one chip's folder in any of them"


def register(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Add ``chip``."""
    group = subparsers.add_parser(
        "chip",
    )
    actions = group.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, help_, answer, handler in (
        ("show", "identity, firmware, time, counters, use of memory, snapshot schedule", ShownChip, _show),
        ("log", "the records of the log, one a line", LoggedChip, _log),
        ("quote", "the latest quote, and what each of its fields was compared with", QuotedChip, _quote),
    ):
        epilog = keys_text(answer, "JSON, an object for each chip")
        if name == "show":
            epilog += "\nExit code 1: a chip does not boot, or its evidence is not consistent"
        parser = actions.add_parser(name, help=help_, epilog=epilog)
        parser.add_argument("place", type=Path, metavar="RUN", help=_PLACE)
        parser.add_argument("--chip", metavar="ID", help="this chip only (default: all)")
        if name == "show":
            text = "also print the least time of the metered work on this device; an unknown name lists them"
            parser.add_argument("--clock", metavar="DEVICE", help=text)
        add_json(parser)
        parser.set_defaults(handler=handler)

    _add_challenge(actions)
    _add_prune(actions)
    _add_verify_log(actions)


def _add_challenge(actions: _SubParsersAction[ArgumentParser]) -> None:
    parser = actions.add_parser(
        "challenge",
        help="challenge a lab's chips now: each closes its part of the log (epoch) and signs a fresh nonce",
        epilog=keys_text(Answered, "JSON, an object for each chip") + " Exit code 1 where a chip does not answer.",
    )
    parser.add_argument("lab", type=Path, metavar="RUN.lab", help="a simulated lab's own folder, whose chips are off")
    parser.add_argument("--chip", metavar="ID", help="this chip only (default: all)")
    parser.add_argument("--nonce", metavar="HEX", help="32 to 128 hex digits (default: fresh for each chip)")
    parser.add_argument("--verifier", default="inspectorate", metavar="NAME", help="who asks (default: inspectorate)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="leave a folder with each chip's files there")
    add_json(parser)
    parser.set_defaults(handler=_challenge)


def _add_prune(actions: _SubParsersAction[ArgumentParser]) -> None:
    parser = actions.add_parser(
        "prune",
        help="give a lab's chips the log checkpoints that an inspector signed, so that the chips can delete older "
        "records",
        epilog=keys_text(Pruned, "JSON, an object for each chip") + " Exit code 1 where a chip refuses.",
    )
    parser.add_argument("lab", type=Path, metavar="RUN.lab", help="a simulated lab's own folder, whose chips are off")
    parser.add_argument(
        "--checkpoints", type=Path, required=True, metavar="DIR", help="what inspect --checkpoints DIR has written"
    )
    parser.add_argument("--chip", metavar="ID", help="this chip only (default: all whose checkpoint is there)")
    add_json(parser)
    parser.set_defaults(handler=_prune)


def _add_verify_log(actions: _SubParsersAction[ArgumentParser]) -> None:
    parser = actions.add_parser(
        "verify-log",
        help="verify a log without its run, against the chip's quote, certificates and epoch keys",
        epilog="JSON keys: outcome, reasons, evidence (chip, certificate, firmware, boot, tick, epoch, counter, "
        "log_start, log_head, records)",
    )
    parser.add_argument("log", type=Path, metavar="FILE", help="log.bin of a chip")
    for flag, file in (("--chain", "chain.pem"), ("--quote", "quote.json"), ("--epoch-keys", "epochs.json")):
        parser.add_argument(flag, type=Path, metavar="FILE", help=f"default: {file} next to the log")
    text = "log checkpoint, for a log that begins after record 0 (default: checkpoint.json next to the log)"
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help=text)
    parser.add_argument("--chip", metavar="ID", help="whose log it must be (default: the name of the log's folder)")
    parser.add_argument("--trust", type=Path, action="append", metavar="FILE", help="default: RUN.trust.json")
    parser.add_argument("--nonce", metavar="HEX", help="what the quote must answer (default: the trust file's nonce)")
    add_json(parser)
    parser.set_defaults(handler=_verify_log)


def _show(arguments: argparse.Namespace) -> int:
    from analysis.commands._chip_pages import show_json, show_lines
    from analysis.public_data import chip_named

    device = None if arguments.clock is None else chip_named(arguments.clock)
    return _print(arguments, partial(show_json, device=device), partial(show_lines, device=device))


def _log(arguments: argparse.Namespace) -> int:
    from analysis.commands._chip_pages import log_json, log_lines

    return _print(arguments, log_json, log_lines)


def _quote(arguments: argparse.Namespace) -> int:
    from analysis.commands._chip_pages import quote_json, quote_lines

    if _is_silicon(arguments.place):
        raise CallerError(f"a chip does not keep its quotes: they are in the run folder, not in {arguments.place}")
    return _print(arguments, quote_json, quote_lines)


def _challenge(arguments: argparse.Namespace) -> int:
    from firmware_sim.evidence.quote import open_quote
    from firmware_sim.identity import read_chain
    from monitor.lab.evidence import LiveChips

    there = LiveChips([arguments.lab])
    chips = there.chips if arguments.chip is None else [arguments.chip]
    given = None if arguments.nonce is None else _nonce(arguments.nonce)
    pages: list[Asked] = []
    for chip in chips:
        nonce = os.urandom(32) if given is None else given
        asked = Asked(chip=chip, nonce=nonce.hex(), verifier=arguments.verifier)
        try:
            answer = there.ask(chip, nonce, arguments.verifier)
            quote = open_quote(answer["quote.json"], read_chain(answer["chain.pem"]).alias_key)
        except EvidenceError as error:
            pages.append(replace(asked, problem=str(error)))
            continue
        folder = None if arguments.out is None else str(_keep(arguments.out / chip, answer))
        numbers = {name: getattr(quote, name) for name in ("counter", "log_size", "beacon")}
        pages.append(Answered(**fields_of(asked), **numbers, log_head=quote.log_head.hex(), folder=folder))
    finish(arguments, pages, [page.text for page in pages])
    return 1 if any(page.problem for page in pages) else 0


def _prune(arguments: argparse.Namespace) -> int:
    from monitor.lab.pruning import prune_chip
    from monitor.lab.simulated_lab import SimulatedLab
    from monitor.transcript.layout import CHIP_CHECKPOINT

    known = SimulatedLab.silicon_of(arguments.lab)
    if arguments.chip is not None and arguments.chip not in known:
        raise CallerError(f"there is no chip {arguments.chip} in {arguments.lab}")
    chips = [chip for chip in known if arguments.chip in (None, chip)]
    files = {chip: arguments.checkpoints / chip / CHIP_CHECKPOINT for chip in chips}
    files = {chip: path for chip, path in files.items() if path.is_file()}
    if not files:
        raise CallerError(f"{arguments.checkpoints} holds no checkpoint of {arguments.chip or 'a chip of this lab'}")
    pages = []
    for chip, path in files.items():
        try:
            content = limits.read_file(path, limits.CHECKPOINT_BYTES)
        except OSError as error:
            raise file_error(f"cannot read {path}", error) from None
        try:
            start, free = prune_chip(arguments.lab, chip, content)
            pages.append(Pruned(chip=chip, log_start=start, free_bytes=free))
        except (EvidenceError, MailboxError) as error:
            if isinstance(error, MailboxError) and error.code is ErrorCode.ALREADY_POWERED:
                raise
            pages.append(Pruned(chip=chip, problem=str(error)))
    finish(arguments, pages, [page.text for page in pages])
    return 1 if any(page.problem for page in pages) else 0


def _nonce(text: str) -> bytes:
    """A challenge from hex digits; CallerError if it is none."""
    if re.fullmatch(r"(?:[0-9a-f]{2}){16,64}", text) is None:
        raise CallerError(f"a nonce must have 32 to 128 hex digits, and an even number of them, not {text!r:.140}")
    return bytes.fromhex(text)


def _keep(folder: Path, answer: Mapping[str, bytes]) -> Path:
    from monitor.transcript.layout import CHIP_FILES

    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CHIP_FILES[0]).unlink(missing_ok=True)  # the file that says that there is an answer comes last
        for name in sorted(answer, key=CHIP_FILES[0].__eq__):
            write_whole(folder / name, answer[name])
    except OSError as error:
        raise file_error(f"cannot write {folder}", error) from None
    return folder


def _print(
    arguments: argparse.Namespace,
    as_json: Callable[[str, ChipView], object],
    as_lines: Callable[[str, ChipView], Iterable[str]],
) -> int:
    """Print each chip; exit code 1 if there is a problem with any."""
    pages: list[object] = []
    problems = 0
    for number, (name, look) in enumerate(_chips(arguments.place, arguments.chip)):
        if number and not arguments.json:
            say("")
        try:
            view = look()
        except EvidenceError as error:
            problems += 1
            pages.append({"chip": name, "problem": str(error)})
            if not arguments.json:
                say(f"chip {name}: {error}")
            continue
        problems += view.problem is not None
        if arguments.json:
            pages.append(as_json(name, view))
        else:
            for line in as_lines(name, view):
                say(line)
    if arguments.json:
        print_json(pages)
    return 1 if problems else 0


def _chips(place: Path, only: str | None) -> Iterator[tuple[str, Callable[[], ChipView]]]:
    """Name of each chip there, and how to look at it; CallerError if there is none."""
    folders = _folders(place)
    if only is not None:
        folders = [folder for folder in folders if folder.name == only]
    if not folders:
        raise CallerError(f"there is no chip {only} in {place}" if only else f"there is no chip in {place}")
    silicon = _is_silicon(place)
    for folder in folders:
        yield folder.name, partial(_look, folder, silicon)


def _look(folder: Path, silicon: bool) -> ChipView:
    from firmware_sim.checks import ChipEvidence
    from firmware_sim.service import read_evidence, read_silicon
    from inspector.inspection.answers import Answers
    from monitor.transcript.layout import CHIP_CHECKPOINT, CHIP_FILES

    if silicon:
        return read_silicon(folder)
    read = partial(Answers([folder.parent]).read, folder.name)
    chain, epoch_keys, log, quote = map(read, CHIP_FILES)
    checkpoint = read(CHIP_CHECKPOINT) if (folder / CHIP_CHECKPOINT).exists() else b""
    given = ChipEvidence(chain=chain, log=log, quote=quote, epoch_keys=epoch_keys, checkpoint=checkpoint)
    return read_evidence(given, folder.name)


def _is_silicon(place: Path) -> bool:
    """Whether this is a lab's own folder, or a chip of it; what lies in a run folder is evidence, whatever it is."""
    return any((place / name).is_file() for name in ("lab.json", "fuses.json"))


def _folders(place: Path) -> list[Path]:
    """The chips' folders, in order."""
    from monitor.lab.simulated_lab import SimulatedLab

    marks = ("fuses.json", "chain.pem")
    if any((place / mark).is_file() for mark in marks):
        return [place.resolve()]
    root = place / "chips"
    if (place / "lab.json").is_file():
        root = Path(SimulatedLab.read_config(place).silicon or root)
    try:
        if root.is_dir():
            return sorted(folder for folder in root.iterdir() if folder.is_dir())
        return sorted(folder for folder in place.iterdir() if any((folder / mark).is_file() for mark in marks))
    except OSError as error:
        raise file_error(f"cannot read {place}", error) from None


def _verify_log(arguments: argparse.Namespace) -> int:
    from firmware_sim.identity import read_chain
    from inspector.inspection.answers import EvidenceSource
    from inspector.inspection.chip_log import verify_log
    from inspector.inspection.trust import Trust
    from monitor.transcript.layout import CHIP_CHECKPOINT, MANIFEST
    from monitor.transcript.listing import CHIP_FILE_BYTES

    log: Path = arguments.log.absolute()
    if not log.is_file():
        raise CallerError(f"there is no log {arguments.log}")
    run = log.parent.parent.parent
    runs = [run] if (run / MANIFEST).is_file() else []
    files = arguments.trust or [trust_path(each) for each in runs]
    if not files:
        raise CallerError(f"{arguments.log} is not in a run folder: say whom to trust with --trust")
    trust = Trust.load(files, runs)
    nonce = None if arguments.nonce is None else _nonce(arguments.nonce)
    given = {"log.bin": log, "chain.pem": arguments.chain, "quote.json": arguments.quote}
    given |= {"epochs.json": arguments.epoch_keys, CHIP_CHECKPOINT: arguments.checkpoint}

    def read(name: str) -> bytes:
        path = given[name] or log.with_name(name)
        try:
            return limits.read_file(path, CHIP_FILE_BYTES[name])
        except OSError as error:
            if given[name] is None:
                raise EvidenceError(f"there is no {name} next to the log: {error.strerror}") from None
            raise file_error(f"cannot read {path}", error) from None

    named = log.parent.name
    chip = arguments.chip or (named if named in trust.chips else read_chain(read("chain.pem")).chip_id)
    return show_verdict(arguments, verify_log(chip, EvidenceSource(name=named, read=read, nonce=nonce), trust))
