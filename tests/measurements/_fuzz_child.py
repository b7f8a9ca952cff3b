"""Fuzzes parsers: ``python -m tests.measurements._fuzz_child SECONDS SEED WORLD PARSER …``.

Seconds are those that a processor spends, whatever else it does meanwhile.

Loaded modules carry probes that tell the fuzzing library which lines ran, but those whose kernels are compiled.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.measurements._fuzz_mutations import mutate_json

if TYPE_CHECKING:
    from tests.measurements._fuzz_targets import Target

MOST_SECONDS = 1.0
MOST_BYTES = 256 << 20
_KEPT_BYTES = 8192
_OURS = ["firmware_sim", "monitor", "inspector", "analysis"]
_COMPILED = ("monitor/numerics", "firmware_sim/compilation.py", "firmware_sim/evidence/batch_hashing.py")
"""Where kernels are: they would not compile with probes in them."""


class Fuzzing:
    """Executions of one target, and what went wrong: each kind of failure once, with the input that showed it."""

    def __init__(self, read: Callable[[bytes], bool], out: Path, seconds: float) -> None:
        self._read, self._out = read, out
        self._end = time.process_time() + seconds
        self.executions = self.accepted = 0
        self.findings: dict[str, dict[str, Any]] = {}

    def execute(self, data: bytes) -> None:
        """Let the parser read the bytes; the process ends when the time is over."""
        self.executions += 1
        before, started = _peak(), time.process_time()
        try:
            self.accepted += self._read(data)
        except BaseException as error:  # a parser written in Rust panics with neither Exception nor exit code
            self._note(_where(error), data)
        if (seconds := time.process_time() - started) > MOST_SECONDS:
            self._note(f"takes {seconds:.1f} s", data, kind="time")
        if _peak() - before > MOST_BYTES:
            self._note(f"takes {(_peak() - before) >> 20} MB", data, kind="memory")
        if time.process_time() > self._end:
            self.finish()

    def _note(self, text: str, data: bytes, kind: str = "") -> None:
        kept = data.hex() if len(data) <= _KEPT_BYTES else None
        self.findings.setdefault(kind or text, {"text": text, "bytes": len(data), "input": kept})

    def finish(self) -> None:
        """Write the result and end the process, which the fuzzing library would otherwise go on with."""
        result = {
            "executions": self.executions,
            "accepted": self.accepted,
            "seconds": time.process_time(),
            "findings": list(self.findings.values()),
        }
        self._out.write_text(json.dumps(result), encoding="utf-8")
        os._exit(0)


def _peak() -> int:
    """Largest memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _where(error: BaseException) -> str:
    """The exception and the innermost line of the product that it went through."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if any(part in frame.filename for part in _OURS)
    ]
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"


def _compiled() -> list[str]:
    """Names of the modules that carry no probes."""
    root = Path(__file__).parents[2]
    found = [each for place in _COMPILED for each in ((root / place).rglob("*.py"), [root / place])]
    paths = [path for each in found for path in each if path.suffix == ".py"]
    return [".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__") for path in paths]


def main(seconds: float, seed: int, folder: Path, names: Sequence[str]) -> None:
    """Fuzz each of the named parsers in a copy of this process, and print its name when that has ended."""
    import atheris

    with atheris.instrument_imports(include=_OURS, exclude=_compiled(), enable_loader_override=False):
        from tests.measurements._fuzz_targets import World, targets
    parsers = targets(World(folder))
    for name in names:
        child = os.fork()
        if not child:
            _fuzz(name, parsers[name], seconds, seed, folder)
        os.waitpid(child, 0)
        print(name, flush=True)


def _fuzz(name: str, target: Target, seconds: float, seed: int, folder: Path) -> None:
    """Never returns: the process ends with the time."""
    import atheris

    from tests.measurements._fuzz_targets import accepts

    corpus = folder / f"corpus-{name}"
    corpus.mkdir()
    seeds = target.seeds()
    for number, data in enumerate(seeds):
        if not accepts(target, data):
            raise RuntimeError(f"seed {number} of {name} is refused")
        (corpus / f"seed-{number}").write_bytes(data)
    fuzzing = Fuzzing(lambda data: accepts(target, data), folder / f"{name}.json", seconds)

    def mutate(data: bytes, size: int, number: int) -> bytes:
        rng = random.Random(number)
        if target.is_json and rng.random() < 0.7:
            try:
                return mutate_json(data, rng, most=size)[:size]
            except ValueError:
                pass
        return bytes(atheris.Mutate(data, size))

    longest = max(65536, *(4 * len(data) for data in seeds))
    options = [f"-seed={seed + 1}", f"-max_len={longest}", "-timeout=600", "-rss_limit_mb=4096", "-verbosity=0"]
    options.append(f"-artifact_prefix={folder}/")
    atheris.Setup(
        [sys.argv[0], *options, str(corpus)], lambda data: fuzzing.execute(bytes(data)), custom_mutator=mutate
    )
    atheris.Fuzz()
    fuzzing.finish()


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
