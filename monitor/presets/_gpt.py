"""What the language models share: text as samples, causal attention, the loss of the next token, answers to prompts."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from firmware_sim.errors import CallerError, file_error
from monitor.presets._preset import Preset

__all__ = ["CONTEXT", "byte_level", "causal_weights", "generate", "next_token_loss", "text_windows"]

CONTEXT = 64
"""Tokens of a byte-level model's context."""


def byte_level(*, name: str, summary: str, build: Callable[[], nn.Module]) -> Preset:
    """A preset on windows of a text, {"tokens": uint8 [n, CONTEXT + 1]}."""
    return Preset(
        name=name,
        summary=summary,
        build=build,
        samples=lambda source: {"tokens": text_windows(source, CONTEXT + 1, name)},
        loss=next_token_loss,
        optimizer="adamw",
        learning_rate=1e-3,
        weight_decay=0.1,
        batch_size=8,
        context=CONTEXT,
    )


def causal_weights(query: Tensor, key: Tensor) -> Tensor:
    """Attention weights [batch, heads, length, length] of queries and keys [batch, heads, length, width].

    Written out: the fused attention operator is another one on each kind of device.
    """
    length, width = query.shape[-2:]
    future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    scores = (query @ key.transpose(-2, -1) * width**-0.5).masked_fill(future, float("-inf"))
    return scores.softmax(-1)  # type: ignore[no-any-return]


def text_windows(source: Path | None, window: int, name: str) -> np.ndarray:
    """Non-overlapping windows of a text, uint8 [n, window]; Python's own help topics unless a file is given.

    Args:
        window: bytes in a window.
        name: the preset, for messages.

    Raises:
        CallerError: the file cannot be read or holds less than one window.
    """
    if source is None:
        topics = pydoc_data.topics.topics
        text = "\n".join(topics[topic] for topic in sorted(topics)).encode()
    else:
        try:
            text = source.read_bytes()
        except OSError as error:
            raise file_error(f"cannot read the text {source}", error) from None
    if len(text) < window:
        raise CallerError(f"the text {source} holds {len(text)} bytes, but {name} needs at least {window}")
    count = len(text) // window
    return np.frombuffer(text[: count * window], dtype=np.uint8).reshape(count, window)


def next_token_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Mean cross-entropy of each token of {"tokens": [batch, length + 1]} after the ones before it."""
    tokens = batch["tokens"].long()
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1))


def generate(model: nn.Module, batch: Mapping[str, Tensor], count: int, temperature: float) -> Tensor:
    """Answer {"tokens": int64 [1, n], "length": int64 [1]}, a prompt with zeros after it, by int64 [1, count] tokens.

    Every prompt takes the same operators, whatever its length. Token t with probability p(t) is the one with the
    largest p(t) / e(t), where the e(t) are exponential random numbers (a race, Efraimidis and Spirakis 2006). Of equal
    ones the first counts.

    Args:
        temperature: divides the logits; 0 takes the token with the largest one.
    """
    tokens, found = batch["tokens"], list[Tensor]()
    for place in range(count):
        last = batch["length"] + (place - 1)
        if found:
            tokens = tokens.index_copy(1, last, found[-1])
        logits = model(tokens).index_select(1, last)[:, 0]
        if temperature:
            odds = (logits / temperature).softmax(-1)
            logits = odds / torch.zeros_like(odds).exponential_()
        found.append(logits.argmax(-1, keepdim=True))
    return torch.cat(found, 1)
