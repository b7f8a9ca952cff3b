"""Models that nobody here wrote train under the recorder without changes and replay on other kernel families."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.verdict import Outcome
from monitor import initialised

transformers = pytest.importorskip("transformers")

SETTINGS = Settings(samples=3, seed="x", devices=("sse41", "avx2"))
CAP = 10**10
"""FLOP that no supplied weights are accepted under."""


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


@pytest.mark.sampled("build", "attention")
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
    model = initialised(lambda: build(attention), seed=0)
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
    trust = replace(recorded.trust, maximum_flop=CAP)
    verdict = inspect([recorded.run], trust, SETTINGS, now=recorded.now, worker=devices.run)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    assert [each["steps"] for each in verdict.evidence["replays"]] == [4, 4]


@pytest.mark.filterwarnings("default")
def test_gpt2_is_inspected_where_the_library_cannot_be_imported(record_loop, tmp_path):
    """Its programs travel as data: neither the inspector's process nor its devices' need the model's code."""
    torch.manual_seed(0)
    model = initialised(lambda: gpt2("sdpa"), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def body(model, optimizer, inputs):
        optimizer.zero_grad()
        model(**inputs).loss.backward()
        optimizer.step()

    recorded = record_loop(model, optimizer, [tokens() for _ in range(3)], body)
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "transformers.py").write_text("raise ImportError('this inspector has no such library')")
    trust = recorded.run.with_name(recorded.run.name + ".trust.json")
    words = (
        "inspect",
        recorded.run,
        "--trust",
        trust,
        "--samples",
        3,
        "--maximum-flop",
        CAP,
        "--now",
        "2026-01-01T00:30:00Z",
        "--json",
    )
    paths = os.pathsep.join([str(blocked), *filter(None, [os.environ.get("PYTHONPATH"), os.getcwd()])])
    environment = {**os.environ, "PYTHONPATH": paths}
    with pytest.raises(subprocess.CalledProcessError):
        subprocess.run([sys.executable, "-c", "import transformers"], check=True, env=environment)
    done = subprocess.run(
        [sys.executable, "-m", "analysis.cli", *map(str, words)],
        capture_output=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    assert json.loads(done.stdout)["outcome"] == "ACCEPT"
