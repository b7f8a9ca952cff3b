"""Image models of ``timm``, from small configurations; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn import functional

from tests.measurements._loop_cases import Batch, Case, Loop

__all__ = ["image_cases"]

_CLASSES = 5
_SIDE = 32

_MODELS: Mapping[str, Mapping[str, Any]] = {
    "test_vit": {"img_size": _SIDE},
    "test_vit3": {"img_size": _SIDE},
    "test_vit_relpos": {"img_size": _SIDE},
    "test_resnet": {},
    "test_byobnet": {},
    "test_convnext": {},
    "test_efficientnet": {},
    "test_efficientnet_evos": {},
    "test_nfnet": {},
    "test_mambaout": {},
    "mobilenetv3_small_050": {},
    "deit_tiny_patch16_224": {"img_size": _SIDE, "embed_dim": 32, "depth": 2, "num_heads": 2},
    "swin_tiny_patch4_window7_224": {
        "img_size": _SIDE,
        "window_size": 4,
        "embed_dim": 16,
        "depths": (1, 1),
        "num_heads": (1, 2),
    },
    "densenet121": {"growth_rate": 4, "block_config": (2, 2)},
    "xcit_nano_12_p16_224": {"img_size": _SIDE, "embed_dim": 32, "depth": 2},
}
"""Settings by the library's name of a model."""


def image_cases() -> Iterator[Case]:
    """The cases of ``timm``; an ImportError or RuntimeError where it, or what it needs, cannot be imported."""
    import timm  # noqa: F401

    for name, settings in _MODELS.items():
        yield Case(name=name, package="timm", make=_loop(name, settings), samples=3)


def _loop(name: str, settings: Mapping[str, Any]) -> Callable[[], Loop]:
    def make() -> Loop:
        import timm

        model: Any = timm.create_model(name, num_classes=_CLASSES, **settings)
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def batch(size: int, generator: torch.Generator) -> Batch:
            labels = torch.randint(_CLASSES, (size,), generator=generator)
            return torch.randn(size, 3, _SIDE, _SIDE, generator=generator), labels

        def body(given: Batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(given[0]), given[1])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            return loss

        return Loop(model=model, optimizer=optimizer, batch=batch, body=body)

    return make
