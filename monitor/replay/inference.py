"""A preset's answers to prompts as steps of a run: step k answers prompt k, and writes row k of a tensor of the state.

So the root that step k commits to covers the first k answers, and the weights, which no step changes. The random
numbers of step k come from the declared seed and from k alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from firmware_sim.errors import CallerError
from monitor import numerics
from monitor.declaration.origin import Origin
from monitor.declaration.statement import Declaration, class_name, hyper_of, members_of
from monitor.loops.optimizers import NoOptimizer
from monitor.loops.state import LoopState
from monitor.presets import generate, preset
from monitor.programs.batches import batch_layout
from monitor.programs.capture import Capture
from monitor.programs.keys import RecordedKeys, step_seed
from monitor.programs.memory_watch import WriteWatch
from monitor.programs.program import Program
from monitor.transcript.orders import OrderFolder

__all__ = ["OUTPUTS", "Inference", "Inferred", "answers_of", "is_inference"]

OUTPUTS = "buffer/outputs"
"""The answers in the state: int64 [prompts, tokens], -1 where there is none yet."""
_BATCH = {"length", "request", "tokens"}
_LARGEST = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Inferred:
    """What an inference declares, its initial state, and the one program that all its steps run."""

    declaration: Declaration
    state: Mapping[str, Tensor]
    program: Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Inference:
    """Prompts to a model.

    Attributes:
        preset: name of the model, whose tokens are bytes.
        prompts: in the order in which they are answered.
        tokens: of each answer.
        temperature: divides the logits; 0 always takes the likeliest token.
        seed: of all random numbers.
        checkpoint_every: steps from one full state to the next.
    """

    preset: str
    prompts: tuple[bytes, ...]
    tokens: int
    temperature: float
    seed: int
    checkpoint_every: int

    def __post_init__(self) -> None:
        context = preset(self.preset).context
        if context is None:
            raise CallerError(f"{self.preset} takes no prompts: it does not read the bytes of a text")
        if not self.prompts or not all(self.prompts):
            raise CallerError("there must be a prompt, and none may be empty")
        longest = max(map(len, self.prompts))
        if longest > context:
            raise CallerError(f"a prompt has {longest} bytes, but {self.preset} reads at most {context} bytes")
        if not 1 <= self.tokens <= context + 1 - longest:
            raise CallerError(
                f"the longest prompt has {longest} bytes, which leaves room for 1 to {context + 1 - longest} tokens of "
                f"an answer, not {self.tokens}"
            )
        if not 0 <= self.temperature <= _LARGEST or 0 < self.temperature < 1 / _LARGEST:
            raise CallerError(
                f"the temperature must be 0, or from {1 / _LARGEST:g} to {_LARGEST:g}, not {self.temperature}"
            )

    @property
    def width(self) -> int:
        """Tokens that the model reads at most."""
        return max(map(len, self.prompts)) + self.tokens - 1

    def batches(self) -> Iterator[dict[str, Tensor]]:
        """The batch of each step."""
        for number, prompt in enumerate(self.prompts):
            tokens = torch.zeros(1, self.width, dtype=torch.int64)
            tokens[0, : len(prompt)] = torch.tensor(list(prompt))
            yield {"length": torch.tensor([len(prompt)]), "request": torch.tensor([number]), "tokens": tokens}

    def derive(self, weights: Mapping[str, Tensor]) -> Inferred:
        """Trace the answer to the first prompt, with this device's own arithmetic.

        Args:
            weights: of the model, with its buffers, under ``kind/name``; what else is there is left out.

        Raises:
            CallerError: they are not those of this model.
        """
        model = preset(self.preset).build().eval().requires_grad_(False)
        _load(model, weights)
        model.register_buffer("outputs", torch.full((len(self.prompts), self.tokens), -1))
        optimizer = NoOptimizer()
        state = LoopState(model, optimizer, (1,), complete=True)
        digest, start = state.memory.digest(), {name: each.clone() for name, each in state.memory.export().items()}
        declaration = Declaration(
            numerics="exact",
            seed=self.seed,
            checkpoint_every=self.checkpoint_every,
            shares=(1,),
            optimizer=class_name(optimizer),
            groups=tuple(hyper_of(group) for group in optimizer.param_groups),
            parameters=members_of(model, optimizer),
            state=state.entries,
            origin=Origin(state=str(digest.root)),
            length=len(self.prompts),
            steps=len(self.prompts),
        )
        return Inferred(declaration=declaration, state=start, program=self._traced(model, state))

    def _traced(self, model: nn.Module, state: LoopState) -> Program:
        keys, batch = RecordedKeys(self.seed, 1), next(self.batches())
        capture = Capture(keys, WriteWatch(1))
        capture.declare_inputs({name: each.detach() for name, each in state.memory.export().items()}, batch)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(step_seed(self.seed, 1))
            with numerics.recording("native", observer=capture, keys=keys):
                answer = generate(model, batch, self.tokens, self.temperature)
                model.get_buffer("outputs").index_copy_(0, batch["request"], answer)
        return capture.program(state.current(), batch_layout(batch), [])


def is_inference(order: OrderFolder) -> bool:
    """Whether the steps of a task answer prompts."""
    declared = order.order.declaration
    is_there = any(f"{entry.kind}/{entry.name}" == OUTPUTS for entry in declared.state)
    return is_there and declared.optimizer == class_name(NoOptimizer()) and set(order.batch(1)) == _BATCH


def answers_of(order: OrderFolder, state: Mapping[str, Tensor]) -> list[dict[str, object]]:
    """Prompt, answer and tokens of each request of an inference, from its final state.

    An answer that holds a token which is no byte is None.
    """
    found = []
    for number, tokens in enumerate(state[OUTPUTS].tolist(), 1):
        batch = order.batch(number)
        prompt = bytes(batch["tokens"].flatten().tolist()[: int(batch["length"])])
        is_text = all(0 <= token < 256 for token in tokens)
        found.append(
            {
                "request": number,
                "prompt": prompt.decode(errors="replace"),
                "answer": bytes(tokens).decode(errors="replace") if is_text else None,
                "tokens": tokens,
            }
        )
    return found


def _load(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give a model its weights and buffers; CallerError where these are another model's."""
    found = {
        name: (tensor.dtype, tuple(tensor.shape))
        for name, tensor in weights.items()
        if name.startswith(("weight/", "buffer/"))
    }
    mine: dict[str, Tensor] = {f"weight/{name}": each for name, each in model.named_parameters()}
    mine |= {f"buffer/{name}": each for name, each in model.named_buffers()}
    wanted = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in mine.items()}
    if odd := sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)):
        raise CallerError(f"the weights are not those of the model: the first difference is {odd[0]!a:.200}")
    for name, tensor in mine.items():
        tensor.copy_(weights[name])
