"""A writer in a process of its own: passes random chips between random holders until stopped, and says what it did.

Usage: writer_process.py URL SEED (moves without end, one line "event chip receiver" for each acknowledged move),
or writer_process.py URL crash POINT (one move of chip-0000, killed with SIGKILL at the POINT-th database step), or
writer_process.py URL import PREFIX (imports the chips shared-0 … shared-49 after ten of its own).
"""

from __future__ import annotations

import os
import random
import signal
import sys

from sqlalchemy import event

from firmware_sim.evidence import SigningKey
from inspector.registry import ChipRecord, ImportRejected, Registry, StatementRefused, show_chip

HOLDERS = ("fab", "rival-fab", "lab-a", "lab-b")
NUMBERS = {"registrar": 1, "fab": 2, "rival-fab": 3, "lab-a": 4, "lab-b": 5}


def key(name: str) -> SigningKey:
    return SigningKey.generate(bytes([NUMBERS[name]]) * 32)


def move(registry: Registry, chip: str, receiver: str) -> str:
    view = show_chip(registry, chip)
    if receiver == view.holder:
        return ""
    receipt = registry.transfer(
        [chip], sender=view.holder, receiver=receiver, release=key(view.holder), acceptance=key(receiver)
    )
    return f"{receipt.event} {chip} {receiver}"


def write(registry: Registry, seed: int) -> None:
    choice = random.Random(seed)
    while True:
        try:
            done = move(registry, f"chip-{choice.randrange(20):04d}", choice.choice(HOLDERS))
        except StatementRefused:  # Another writer moved that chip in between.
            continue
        if done:
            print(done, flush=True)


def crash(registry: Registry, point: int) -> None:
    steps = 0

    def step(*_: object) -> None:
        nonlocal steps
        steps += 1
        if steps == point:
            os.kill(os.getpid(), signal.SIGKILL)

    event.listen(registry.engine, "before_cursor_execute", step)
    event.listen(registry.engine, "after_cursor_execute", step)
    event.listen(registry.engine, "commit", step)
    print(move(registry, "chip-0000", "lab-b"), flush=True)


def bring(registry: Registry, prefix: str) -> None:
    names = [f"{prefix}-{number}" for number in range(10)] + [f"shared-{number}" for number in range(50)]
    try:
        registry.import_chips([ChipRecord(name) for name in names], maker="fab", label=prefix, key=key("fab"))
    except ImportRejected as error:
        print("refused", error, flush=True)
    else:
        print("taken", flush=True)


def main() -> None:
    with Registry.open(sys.argv[1], registrar=key("registrar"), clock=lambda: 1_700_000_000) as registry:
        if sys.argv[2] == "crash":
            for point in map(int, sys.argv[3:]):
                # A fresh process for each point, before this one has a connection to share.
                registry.engine.dispose()
                child = os.fork()
                if child == 0:
                    crash(registry, point)
                    os._exit(0)
                _, status = os.waitpid(child, 0)
                print(point, "survived" if os.WIFEXITED(status) else "killed", flush=True)
        elif sys.argv[2] == "import":
            bring(registry, sys.argv[3])
        else:
            write(registry, int(sys.argv[2]))


if __name__ == "__main__":
    main()
