"""``digits-cnn``: convolution and batch norm on scikit-learn's handwritten digits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn
from torch.nn import functional

from firmware_sim.errors import CallerError
from monitor.presets._digits import digits
from monitor.presets._preset import Preset, Samples

__all__ = ["DIGITS_CNN"]


class _DigitsCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(1, 16, 3, padding=1, bias=False)
        self.norm_1 = nn.BatchNorm2d(16)
        self.conv_2 = nn.Conv2d(16, 32, 3, padding=1, bias=False)
        self.norm_2 = nn.BatchNorm2d(32)
        self.head = nn.Linear(32 * 4, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.norm_1(self.conv_1(pixels))), 2)
        x = functional.max_pool2d(functional.relu(self.norm_2(self.conv_2(x))), 2)
        return self.head(x.flatten(1))  # type: ignore[no-any-return]


def _samples(source: Path | None) -> Samples:
    """1,797 images: {"pixels": uint8 [n, 8, 8] with values 0…16, "label": uint8 [n]}."""
    if source is not None:
        raise CallerError("digits-cnn has its own data, so it takes no data file")
    return {name: array.copy() for name, array in digits().items()}


def _loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    pixels = (batch["pixels"].float() * 0.0625).unsqueeze(1)
    return functional.cross_entropy(model(pixels), batch["label"].long())


DIGITS_CNN = Preset(
    name="digits-cnn",
    summary="two convolutions with batch norm on scikit-learn's 8x8 handwritten digits",
    build=_DigitsCNN,
    samples=_samples,
    loss=_loss,
    optimizer="sgd",
    learning_rate=0.05,
    weight_decay=1e-4,
    batch_size=32,
)
