"""``serve``: a party answers over HTTP."""

from __future__ import annotations

import argparse
import tomllib
from argparse import ArgumentParser
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.commands._common import say
from firmware_sim import limits
from firmware_sim.errors import CallerError, EvidenceError, file_error

if TYPE_CHECKING:
    from argparse import _SubParsersAction

__all__ = ["register"]

_TEXTS = {"run", "store", "host", "device"}
_KEYS = {*_TEXTS, "port", "referees"}


def register(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Add ``serve``."""
    group = subparsers.add_parser("serve")
    actions = group.add_subparsers(dest="action", required=True, metavar="PARTY")
    text = "a lab answers a referee's questions about one finished run, until it is interrupted"
    parser = actions.add_parser("provider", help=text, description=text)
    parser.add_argument(
        "--config",
        type=Path,
        required=True,
        metavar="FILE",
        help="TOML: run (its folder, with RUN.lab), referees (their public keys' files), store (folder for questions "
        'and answers), port; host (default "127.0.0.1") and device (default "native")',
    )
    parser.set_defaults(handler=_provider)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Config:
    run: Path
    store: Path
    referees: tuple[Path, ...]
    host: str
    port: int
    device: str


def _read(path: Path) -> _Config:
    """Paths are relative to the file's folder; CallerError of one line on anything missing, unknown or out of range."""
    try:
        data = tomllib.loads(limits.read_file(path, limits.SCENARIO_BYTES).decode())
    except OSError as error:
        raise file_error(f"cannot read {path}", error) from None
    except (EvidenceError, ValueError, RecursionError) as error:
        raise CallerError(f"{path} is not TOML that can be read: {error}") from None
    data = {"host": "127.0.0.1", "device": "native", **data}
    if strange := sorted(set(data) - _KEYS):
        raise CallerError(f"{path}: {strange[0]!a:.100} is no key; write {', '.join(sorted(_KEYS))}")
    if missing := sorted(_KEYS - set(data)):
        raise CallerError(f"{path}: {missing[0]} is missing")
    for name in sorted(_TEXTS):
        if not isinstance(data[name], str) or not data[name]:
            raise CallerError(f"{path}: {name} is a text, not {data[name]!a:.100}")
    referees, port = data["referees"], data["port"]
    if type(port) is not int or not 0 < port < 1 << 16:
        raise CallerError(f"{path}: port is a number from 1 to 65535, not {port!a:.100}")
    if not isinstance(referees, list) or not referees or not all(isinstance(each, str) for each in referees):
        raise CallerError(f"{path}: referees is a list of at least one public key's file")
    return _config(path.parent, data)


def _config(folder: Path, data: dict[str, Any]) -> _Config:
    return _Config(
        run=folder / data["run"],
        store=folder / data["store"],
        referees=tuple(folder / each for each in data["referees"]),
        host=data["host"],
        port=data["port"],
        device=data["device"],
    )


def _provider(arguments: argparse.Namespace) -> int:
    config = _read(arguments.config)
    from inspector.devices import enter

    enter(config.device)
    from analysis.commands.runs import require_runs
    from inspector.dispute.provider import Provider
    from inspector.registry.keyfiles import load_public
    from inspector.wire.desk import Desk
    from monitor.lab.prover import LabProver
    from monitor.transcript import RunFolder

    try:
        from inspector.wire.server import serve
    except ImportError as error:
        raise CallerError(f"{error.name} is not installed: pip install 'chipwitness[server]'") from None
    require_runs([config.run])
    prover = LabProver(config.run)
    run = RunFolder(config.run, prover.key.verifying)
    desk = Desk(config.store, Provider(run, prover).answer, prover.key, list(map(load_public, config.referees)))
    say(f"lab {run.metadata.lab} answers for {config.run.name} on http://{config.host}:{config.port}")
    serve(desk, config.host, config.port)
    return 0
