"""Models that nobody here wrote train under the recorder without changes and replay on other kernel families."""

from __future__ import annotations

import pytest
import torch

from inspector.guards import Settings
from inspector.session import inspect
from inspector.verdict import Outcome

transformers = pytest.importorskip("transformers")

SETTINGS = Settings(samples=3, seed="x", devices=("sse41", "avx2"))


def gpt2(attention: str):
    config = transformers.GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=32,
        vocab_size=101,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation=attention,
    )
    return transformers.GPT2LMHeadModel(config)


def vit(attention: str):
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
        num_labels=5,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        attn_implementation=attention,
    )
    return transformers.ViTForImageClassification(config)


def resnet(_: str):
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=5
    )
    return transformers.ResNetForImageClassification(config)


def tokens():
    ids = torch.randint(0, 101, (4, 16))
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones(4, 16, dtype=torch.long)}


def images():
    return {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.randint(0, 5, (4,))}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("numerics", ["exact", "rounded"])
@pytest.mark.parametrize(
    ("build", "attention", "batch"),
    [
        (gpt2, "sdpa", tokens),
        (gpt2, "eager", tokens),
        (vit, "sdpa", images),
        (vit, "eager", images),
        (resnet, "eager", images),
    ],
    ids=["gpt2-sdpa", "gpt2-eager", "vit-sdpa", "vit-eager", "resnet"],
)
def test_model_from_its_configuration_replays_on_other_kernel_families(
    record_loop, devices, numerics, build, attention, batch
):
    torch.manual_seed(0)
    model = build(attention)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 2, 10)

    def body(model, optimizer, inputs):
        optimizer.zero_grad()
        model(**inputs).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()

    recorded = record_loop(model, optimizer, [batch() for _ in range(4)], body, numerics=numerics)
    verdict = inspect([recorded.run], recorded.trust, SETTINGS, now=recorded.now, worker=devices.run)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    assert [each["steps"] for each in verdict.evidence["replays"]] == [4, 4]
