"""A round and a dispute of the demo between processes, over HTTP (``demo --processes``)."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from analysis.machines import free_ports, lay_out, party_process, served_as
from firmware_sim.errors import CallerError, DeviceError
from firmware_sim.evidence import SigningKey, VerifyingKey, canonical
from inspector.dispute.game import Party, play
from inspector.inspection.verdict import Verdict
from inspector.registry.keyfiles import write_keys
from inspector.rounds.parts import parties_of
from inspector.rounds.world import INSPECTORATE, World

__all__ = ["dispute_between_processes", "require_server", "round_between_processes"]

_SECONDS = 300
"""For a round, and for each answer in a dispute, on a machine that is busy."""


def require_server() -> None:
    """CallerError unless what servers need is installed."""
    try:
        import inspector.rounds.party  # noqa: F401
    except ImportError as error:
        raise CallerError(f"{error.name} is not installed: pip install 'chipwitness[server]'") from None


def round_between_processes(world: World, out: Path, words: Sequence[str]) -> dict[str, Any]:
    """A round of inspectorate, cluster and labs; the verdict, as ``serve inspectorate --json`` prints it.

    Args:
        out: new folder for the parties' folders.
        words: what the inspectorate announces.

    Raises:
        DeviceError: there is no verdict.
    """
    parties = parties_of(world)
    lay_out(world, out, dict(zip(parties, free_ports(len(parties)), strict=True)), metrics=False)

    def process(party: str, stdout: int, *more: str) -> AbstractContextManager[subprocess.Popen[bytes]]:
        options = ["--config", str((out / f"{party}.toml").absolute()), *more]
        return party_process(served_as(party), out / f"{party}.log", *options, stdout=stdout)

    quiet = subprocess.DEVNULL
    with ExitStack() as stack:
        others = [stack.enter_context(process(party, quiet)) for party in parties if party != INSPECTORATE]
        for each in others:
            stack.callback(each.terminate)  # all of them, before the first is waited for
        inspectorate = stack.enter_context(process(INSPECTORATE, subprocess.PIPE, "--json", *words))
        try:
            printed, _ = inspectorate.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            raise DeviceError(f"no verdict in {_SECONDS} s; each party's log is in {out}") from None
    if not printed.strip():
        raise DeviceError(f"the inspectorate gave no verdict; each party's log is in {out}")
    found: dict[str, Any] = canonical.loads(printed.decode())
    return found


def dispute_between_processes(runs: Sequence[tuple[Path, VerifyingKey, str]], out: Path) -> Verdict:
    """A game between providers about a preset's training, with this process as referee.

    Args:
        runs: folder, the lab's key, and the device of each.
        out: new folder for the parties' logs, questions and answers.
    """
    from inspector.wire.client import Http

    out.mkdir()
    referee = SigningKey.generate()
    public = write_keys(out / "referee", referee)
    with ExitStack() as stack:
        parties, started = [], []
        for (run, key, device), port in zip(runs, free_ports(len(runs)), strict=True):
            store = str((out / run.name).absolute())
            options = ["--store", store, "--referees", str(public.absolute()), "--port", str(port), "--device", device]
            log, words = out / f"{run.name}.log", [str(run.absolute()), *options]
            begun = party_process("provider", log, *words, stdout=subprocess.DEVNULL)
            started.append(stack.enter_context(begun))
            parties.append(Party(name=run.name, key=key, transport=Http(f"http://127.0.0.1:{port}", key)))
        for each in started:
            stack.callback(each.terminate)
        return play(parties, None, referee, seconds=_SECONDS, now=datetime.now(UTC))[0]
