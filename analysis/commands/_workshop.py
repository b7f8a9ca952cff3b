"""How ``serve provider --tasks`` runs a task: in a process of its device, which executes the task's programs."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from firmware_sim.errors import ChipwitnessError, DeviceError
from inspector.devices import device
from inspector.dispute.prover import SigningProver
from inspector.registry.keyfiles import load_private, load_public
from monitor import processes
from monitor.lab.lies import conduct
from monitor.lab.prover import OwnProver
from monitor.transcript import RunFolder
from monitor.transcript.orders import OrderFolder

__all__ = ["TaskProcesses"]


@dataclass(slots=True, kw_only=True)
class TaskProcesses:
    """Runs tasks one after another.

    Attributes:
        key: file of the provider's private key.
        clients: files of the public keys of those who may order.
        name: of the provider.
        device: on which tasks run.
        lie, lie_step: what a simulated provider does otherwise in that step; None for an honest one.
    """

    key: Path
    clients: list[Path]
    name: str
    device: str
    lie: str | None = None
    lie_step: int = 1
    _running: subprocess.Popen[bytes] | None = field(default=None)

    def carry_out(self, folder: Path) -> None:
        """Run a task in another process, from its start; DeviceError with the line in which that process ended."""
        for name in ("run", "run.staging"):
            shutil.rmtree(folder / name, ignore_errors=True)
        words = [str(each.resolve()) for each in (folder, self.key)]
        words += [self.name, self.lie or "", str(self.lie_step), *(str(each.resolve()) for each in self.clients)]
        command = processes.python("analysis.commands._workshop", *words)
        with tempfile.TemporaryDirectory(prefix="chipwitness-", ignore_cleanup_errors=True) as empty:
            streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
            self._running = processes.start(command, empty, device(self.device).variables, **streams)
            _, errors = self._running.communicate()
        if self._running.returncode:
            lines = errors.decode(errors="replace").strip().splitlines()
            raise DeviceError(lines[-1] if lines else f"its process ended with {self._running.returncode}")

    def prover(self, folder: Path) -> tuple[RunFolder, SigningProver]:
        """The finished run of a task's folder, and what answers for it."""
        key = load_private(self.key)
        run = RunFolder(folder / "run", key.verifying)
        return run, OwnProver(run, key, conduct(self.lie, self.lie_step))

    def stop(self) -> None:
        """End the process of a task that runs."""
        if self._running is not None and self._running.poll() is None:
            self._running.kill()


def _main(folder: str, key: str, name: str, lie: str, lie_step: str, *clients: str) -> None:
    from inspector.devices.emulation import install_from_environment
    from monitor.recording.ordered_run import run_order

    install_from_environment()
    order = OrderFolder(Path(folder), *map(load_public, map(Path, clients)))
    run_order(order, Path(folder, "run"), load_private(Path(key)), name, behaviour=conduct(lie or None, int(lie_step)))


if __name__ == "__main__":
    try:
        _main(*sys.argv[1:])
    except (ChipwitnessError, OSError, MemoryError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
