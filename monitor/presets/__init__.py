"""Named training tasks on real data: the model, the samples and the loss of each.

The inspector owns a copy of this package, so replaying a preset never runs the prover's code.
"""

from __future__ import annotations

from firmware_sim.errors import CallerError
from monitor.presets._gpt import generate
from monitor.presets._preset import Preset, initialise
from monitor.presets.digits_cnn import DIGITS_CNN
from monitor.presets.gpt2_117m import GPT2_117M
from monitor.presets.llama_small import LLAMA_SMALL
from monitor.presets.resnet50_cifar import RESNET50_CIFAR
from monitor.presets.tiny_gpt import TINY_GPT

__all__ = ["PRESETS", "Preset", "generate", "initialise", "preset"]

PRESETS: dict[str, Preset] = {
    entry.name: entry for entry in (TINY_GPT, DIGITS_CNN, LLAMA_SMALL, GPT2_117M, RESNET50_CIFAR)
}


def preset(name: str) -> Preset:
    """Return the preset of that name; CallerError lists the known ones."""
    try:
        return PRESETS[name]
    except KeyError:
        raise CallerError(f"unknown preset {name!r}; known: {', '.join(PRESETS)}") from None
