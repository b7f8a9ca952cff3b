"""``task`` and ``delegate``: order training or inference from untrusted providers, and fetch the right result."""

from __future__ import annotations

import argparse
import json
import math
import secrets
import shutil
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from analysis.commands._addresses import add_witness, by_name, witness_of
from analysis.commands._common import (
    add_json,
    add_trust,
    count,
    finish,
    number,
    plural,
    print_json,
    progress,
    progress_bar,
    say,
)
from firmware_sim import limits
from firmware_sim.errors import CallerError, EvidenceError, file_error

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from torch import Tensor

    from firmware_sim.evidence import SigningKey
    from inspector.delegation.delegation import Delegated
    from monitor.transcript import RunFolder
    from monitor.transcript.orders import OrderFolder

__all__ = ["register"]

_SECONDS, _IDLE = 600, 3600
_LONGEST = 24 * 3600
_STATE, _OUTPUTS = "state.safetensors", "outputs.json"
_EVERY, _SEED_BITS = 4, 63
_TASK_KEYS = (
    "JSON keys: task (its digest), out, steps, seed, flop, bytes (that a provider needs), seen (what each provider "
    "sees: files, bytes, batches)"
)


def register(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Add ``task`` and ``delegate``."""
    group = subparsers.add_parser("task")
    actions = group.add_subparsers(dest="action", required=True, metavar="ACTION")
    _add_make(actions)
    _add_infer(actions)
    _add_trust_file(actions)
    parser = subparsers.add_parser("delegate")
    parser.add_argument("task", type=Path, metavar="TASK", help="folder that `task make` wrote")
    text = "a provider's name in the trust file, and the address of its `serve provider --tasks` (two or more)"
    parser.add_argument("--provider", action="append", default=[], required=True, metavar="NAME=URL", help=text)
    add_trust(parser)
    parser.add_argument("--key", type=Path, required=True, metavar="FILE", help="the client's private key")
    text = (
        "new folder for the result (state.safetensors, or outputs.json of an inference) and its evidence (games.json, "
        "audit.json, for `verify`)"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help=text)
    text = f"seconds for each answer; a provider that takes longer counts as absent (default {_SECONDS})"
    parser.add_argument("--seconds", type=count, default=_SECONDS, metavar="N", help=text)
    text = f"seconds without a new step after which a provider counts as absent (default {_IDLE})"
    parser.add_argument("--idle", type=count, default=_IDLE, metavar="N", help=text)
    add_witness(parser, "the providers that accept it as a witness")
    text = "share of the steps to rerun here, such as 0.1; they are drawn after the claim is signed"
    parser.add_argument("--audit", type=number, default=0.0, metavar="SHARE", help=text)
    parser.add_argument("--device", default="native", metavar="NAME", help="device on which the referee computes")
    add_json(parser)
    parser.epilog = (
        "The result is right if one provider is honest. Example: chipwitness delegate TASK --provider "
        "a=https://a:8443 --provider b=https://b:8443 --trust parties.json --key client --out result. ACCEPT: two "
        "providers claim the same result, or the provider with a different result is proved wrong, or --audit found "
        "no fault. INCONCLUSIVE: there is no result, or no second provider and no audit confirms it. REJECT: all "
        "claims are false. JSON "
        "keys: "
        "outcome, reasons, task, result (name of the provider that delivered it), state (root of the result), steps, "
        "prevails (who made "
        "the claim that stands), guilty, absent, not_done, losses (party, kind, step, operator, case, text), audited "
        "(steps that were rerun), found (probability that the audit would have found one false step), seen (what "
        "each provider sees: files, bytes, batches), files"
    )
    parser.set_defaults(handler=_delegate)


def _add_make(actions: _SubParsersAction[ArgumentParser]) -> None:
    text = "write a signed task: declaration, programs, initial state, and digests of the batches"
    parser = actions.add_parser("make", help=text)
    parser.add_argument(
        "run", type=Path, nargs="?", metavar="RUN", help="a recorded run, all of whose steps are ordered"
    )
    add_trust(parser, required=False)
    parser.add_argument("--preset", metavar="NAME", help="in place of RUN: model, data and loss of a preset")
    parser.add_argument("--data", type=Path, metavar="FILE", help="your own text, for presets that read one")
    parser.add_argument("--steps", type=count, default=16, metavar="N", help="of a preset (default 16)")
    parser.add_argument("--seed", type=count, default=0, metavar="S", help="of a preset: weights and data order")
    parser.add_argument("--batch-size", type=count, metavar="N", help="of a preset (default: its own)")
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), help="of a preset (default: its own)")
    parser.add_argument("--learning-rate", type=float, metavar="X", help="of a preset (default: its own)")
    parser.add_argument("--checkpoint-every", type=count, default=4, metavar="K", help="of a preset (default 4)")
    _add_task(parser, "task make --preset digits-cnn --key client --out task")
    parser.set_defaults(handler=_make)


def _add_infer(actions: _SubParsersAction[ArgumentParser]) -> None:
    text = "write a signed task of inference: a model's answers to prompts, of which each step gives one"
    parser = actions.add_parser("infer", help=text)
    text = "a recorded run of a preset's training, whose last weights answer"
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN", help=text)
    add_trust(parser, required=False)
    parser.add_argument("--preset", metavar="NAME", help="in place of RUN, with --weights: the model")
    text = "in place of RUN: the model's weights, such as a state.safetensors that `delegate` has fetched"
    parser.add_argument("--weights", type=Path, metavar="FILE", help=text)
    parser.add_argument("--prompts", type=Path, required=True, metavar="FILE", help="text with one prompt a line")
    parser.add_argument(
        "--tokens", type=count, default=16, metavar="N", help="number of tokens of each answer (default 16)"
    )
    text = "number by which the logits are divided (default 1); 0 always takes the likeliest token"
    parser.add_argument("--temperature", type=float, default=1.0, metavar="X", help=text)
    text = "seed of the random numbers that choose the tokens (default: a new one)"
    parser.add_argument("--seed", type=count, metavar="S", help=text)
    text = f"prompts from one checkpoint to the next (default: the root of their number, at least {_EVERY})"
    parser.add_argument("--checkpoint-every", type=count, metavar="K", help=text)
    _add_task(parser, "task infer RUN --prompts prompts.txt --key client --out task")
    parser.set_defaults(handler=_infer)


def _add_task(parser: ArgumentParser, example: str) -> None:
    """Add who signs a task, and where it goes."""
    parser.add_argument("--key", type=Path, required=True, metavar="FILE", help="the client's private key")
    parser.add_argument("--out", type=Path, required=True, metavar="TASK", help="folder to write")
    add_json(parser)
    parser.epilog = f"Example: chipwitness {example}. {_TASK_KEYS}"


def _add_trust_file(actions: _SubParsersAction[ArgumentParser]) -> None:
    text = "write the trust file of a delegation: the client's key and the providers' keys, and no chips"
    parser = actions.add_parser("trust", help=text)
    parser.add_argument("--client", type=Path, required=True, metavar="FILE", help="the client's public key")
    text = "a provider's name, and the file of its public key (repeatable)"
    parser.add_argument("--provider", action="append", default=[], metavar="NAME=FILE", help=text)
    text = "a witness's name, and the file of its public key (repeatable)"
    parser.add_argument("--witness", action="append", default=[], metavar="NAME=FILE", help=text)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="file to write")
    add_json(parser)
    parser.epilog = "JSON keys: out, client, providers, witnesses"
    parser.set_defaults(handler=_trust)


def _make(arguments: argparse.Namespace) -> int:
    if (arguments.run is None) == (arguments.preset is None):
        raise CallerError("give either RUN or --preset NAME")
    from inspector.registry.keyfiles import load_private
    from monitor.replay.ordering import order_preset, order_run

    key = load_private(arguments.key)
    if arguments.run is not None:
        run = _run(arguments)
        order_run(run, arguments.out, key, progress_bar(arguments, run.committed, "task"))
    else:
        from monitor.presets.task import Task

        names = ("seed", "steps", "batch_size", "optimizer", "learning_rate", "checkpoint_every")
        chosen = {name: getattr(arguments, name) for name in names}
        task = Task.for_preset(arguments.preset, numerics="exact", shards=1, **chosen)
        order_preset(task, arguments.data, arguments.out, key, progress_bar(arguments, task.steps, "task"))
    return _made(arguments, key)


def _infer(arguments: argparse.Namespace) -> int:
    from inspector.registry.keyfiles import load_private
    from monitor.replay.inference import Inference
    from monitor.replay.ordering import order_inference

    key, prompts, every = load_private(arguments.key), _prompts(arguments.prompts), arguments.checkpoint_every
    preset, weights = _weights(arguments)
    asked = Inference(
        preset=preset,
        prompts=prompts,
        tokens=arguments.tokens,
        temperature=arguments.temperature,
        seed=secrets.randbits(_SEED_BITS) if arguments.seed is None else arguments.seed,
        checkpoint_every=max(_EVERY, math.isqrt(len(prompts))) if every is None else every,
    )
    order_inference(asked, weights, arguments.out, key, progress_bar(arguments, len(prompts), "task"))
    return _made(arguments, key)


def _made(arguments: argparse.Namespace, key: SigningKey) -> int:
    """Show the task that was written."""
    from monitor.transcript.orders import OrderFolder

    order = OrderFolder(arguments.out, key.verifying)
    steps, flop, size = len(order.order.steps), order.order.flop, order.order.size
    seed, out = order.order.declaration.seed, str(arguments.out)
    data = {"task": order.digest, "out": out, "steps": steps, "seed": seed, "flop": flop, "bytes": size}
    lines = [f"{name:6} {value}" for name, value in data.items()]
    return finish(arguments, {**data, "seen": _seen(order)}, [*lines, _seen_text(order)])


def _run(arguments: argparse.Namespace) -> RunFolder:
    from analysis.commands.runs import require_runs, trust_path
    from inspector.inspection.transcripts import open_run
    from inspector.inspection.trust import Trust

    require_runs([arguments.run])
    trust = Trust.load(arguments.trust or [trust_path(arguments.run)], [arguments.run])
    return open_run(arguments.run, trust)


def _weights(arguments: argparse.Namespace) -> tuple[str, dict[str, Tensor]]:
    """A preset's name, and a state that holds the weights of its model."""
    given = [arguments.run is not None, arguments.preset is not None, arguments.weights is not None]
    if given not in ([True, False, False], [False, True, True]):
        raise CallerError("give either RUN, or --preset NAME and --weights FILE")
    if arguments.run is not None:
        run = _run(arguments)
        if run.declared.recipe is None or not run.manifest.finished:
            raise CallerError(f"{run.name} is not a finished run of `train --preset`, so its model is not known here")
        return run.declared.recipe.preset, run.checkpoint(run.committed)
    from monitor.transcript.state import decode_state

    try:
        state = decode_state(_content(arguments.weights), "it")
    except EvidenceError as error:
        raise CallerError(f"{arguments.weights} holds no weights: {error}") from None
    return arguments.preset, state


def _prompts(path: Path) -> tuple[bytes, ...]:
    """The lines of a file; CallerError where there is none, or one is empty."""
    lines = tuple(_content(path).splitlines())
    if not lines:
        raise CallerError(f"{path} holds no prompt; write one a line")
    if not all(lines):
        raise CallerError(f"{path}: line {lines.index(b'') + 1} is empty; write one prompt a line")
    return lines


def _content(path: Path) -> bytes:
    try:
        return limits.read_file(path, limits.Limit(path.stat().st_size, "bytes"))
    except OSError as error:
        raise file_error(f"cannot read {path}", error) from None


def _seen(order: OrderFolder) -> dict[str, int]:
    files = order.order.files
    return {
        "files": len(files),
        "bytes": sum(files.values()),
        "batches": len({step.batch for step in order.order.steps}),
    }


def _seen_text(order: OrderFolder) -> str:
    from monitor.replay.inference import is_inference

    state, batch = ("weights", "prompt") if is_inference(order) else ("initial state", "batch file")
    seen = _seen(order)
    size, batches = plural(seen["bytes"], "byte"), plural(seen["batches"], f"different {batch}")
    return f"each provider sees the {state}, the programs and {batches} in the clear: {size}"


def _trust(arguments: argparse.Namespace) -> int:
    from analysis.commands._common import write_new
    from firmware_sim.evidence import canonical
    from inspector.inspection.trust import Trust
    from inspector.registry.keyfiles import load_public

    if not arguments.provider and not arguments.witness:
        raise CallerError("give --provider NAME=FILE or --witness NAME=FILE at least once")
    client = load_public(arguments.client)
    providers, witnesses = (
        {name: load_public(Path(path)) for name, path in by_name(given, "FILE", option)}
        for given, option in ((arguments.provider, "provider"), (arguments.witness, "witness"))
    )
    trust = Trust.of_parties(providers, client, witnesses)
    write_new(arguments.out, canonical.encode(trust.to_json()))
    names = {"providers": list(providers), "witnesses": list(witnesses)}
    data = {"out": str(arguments.out), "client": client.key_id, **names}
    return finish(arguments, data, [f"wrote {arguments.out}: {', '.join([*providers, *witnesses])}"])


def _delegate(arguments: argparse.Namespace) -> int:
    places = by_name(arguments.provider, "URL", "provider")
    _check(arguments)
    from inspector.devices import enter

    enter(arguments.device)
    from inspector.delegation.delegation import Delegation
    from inspector.dispute.game import Party
    from inspector.inspection.trust import Trust
    from inspector.registry.keyfiles import load_private
    from monitor.transcript.orders import OrderFolder

    try:
        from inspector.wire.client import Http
    except ImportError as error:
        raise CallerError(f"{error.name} is not installed: pip install 'chipwitness[server]'") from None
    key = load_private(arguments.key)
    order = OrderFolder(arguments.task, key.verifying)
    if missing := order.missing():
        raise CallerError(
            f"{arguments.task} lacks {plural(len(missing), 'file')} of the task; the first is {missing[0][0][:16]}…"
        )
    trust = Trust.load(arguments.trust, chips=False)
    trust = replace(trust, orders=frozenset({order.envelope}), inspectorates=trust.inspectorates | {key.verifying})
    parties = []
    for name, url in places:
        if name not in trust.labs:
            raise CallerError(f"the trust file names no provider {name!a:.100}")
        carrier = Http(url, trust.labs[name])
        parties.append((Party(name=name, key=trust.labs[name], transport=carrier), carrier))
    if not arguments.json:
        say(_seen_text(order))
    delegation = Delegation(
        order=order,
        parties=parties,
        trust=trust,
        key=key,
        seconds=arguments.seconds,
        idle=arguments.idle,
        share=arguments.audit,
        witness=witness_of(arguments.witness, trust),
    )
    with _bars(arguments, [name for name, _ in places], len(order.order.steps)) as report:
        delegated = delegation.run(report)
    files = _write(arguments.out, delegated, order)
    return _show(arguments, delegated, order, files)


def _check(arguments: argparse.Namespace) -> None:
    for name in ("seconds", "idle"):
        if not 0 < getattr(arguments, name) <= _LONGEST:
            raise CallerError(f"--{name} must be 1 to {_LONGEST}, not {getattr(arguments, name)}")
    if not 0 <= arguments.audit <= 1:
        raise CallerError(f"--audit must be a share from 0 to 1, not {arguments.audit}")
    if arguments.out.exists():
        raise CallerError(f"{arguments.out}: exists already")


@contextmanager
def _bars(
    arguments: argparse.Namespace, names: list[str], steps: int
) -> Iterator[Callable[[str, str, int, int], None]]:
    """A bar for each provider, over steps."""
    bars, lock = {name: progress(arguments, steps, "step", name) for name in names}, Lock()

    def report(name: str, state: str, step: int, _: int) -> None:
        with lock:
            bars[name].update(max(min(step, steps) - bars[name].n, 0))
            bars[name].set_postfix_str(state)

    try:
        yield report
    finally:
        for bar in bars.values():
            bar.close()


def _write(out: Path, delegated: Delegated, order: OrderFolder) -> list[str]:
    """Write result and evidence to a new folder, whole; the names of its files."""
    from firmware_sim.evidence import canonical
    from monitor.files import write_whole
    from monitor.replay.inference import answers_of, is_inference
    from monitor.transcript import encode_state
    from monitor.transcript.orders import TASK

    files = {TASK: order.envelope, "verdict.json": canonical.encode(delegated.verdict.to_json())}
    files |= {
        name: found for name, found in (("games.json", delegated.games), ("audit.json", delegated.audit)) if found
    }
    if delegated.state is not None:
        if is_inference(order):
            lines = map(json.dumps, answers_of(order, delegated.state))
            files[_OUTPUTS] = ("[" + ",\n ".join(lines) + "]\n").encode()
        else:
            files[_STATE] = encode_state(delegated.state)
    draft = out.with_name(f".{out.name}.new")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        for name, content in files.items():
            write_whole(draft / name, content)
        draft.rename(out)
    except OSError as error:
        raise file_error(f"cannot write {out}", error) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return sorted(files)


def _show(arguments: argparse.Namespace, delegated: Delegated, order: OrderFolder, files: list[str]) -> int:
    verdict = delegated.verdict
    if arguments.json:
        print_json({**verdict.to_json(), **verdict.evidence, "seen": _seen(order), "files": files})
    else:
        say(verdict.outcome.value)
        for reason in verdict.reasons:
            say(f"  {reason.text}")
        if delegated.state is not None:
            name = _OUTPUTS if _OUTPUTS in files else _STATE
            say(f"  result of {verdict.evidence['result']}: {arguments.out / name}")
            say(f"  state {verdict.evidence['state']} after step {verdict.evidence['steps']}")
    if max(len(delegated.games), len(delegated.audit)) > limits.BUNDLE_BYTES.most:
        raise CallerError("the verdict is valid, but its evidence is too long for `verify`")
    return verdict.outcome.exit_code
