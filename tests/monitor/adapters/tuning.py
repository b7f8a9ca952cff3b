"""Loops of the shape that fine-tuning libraries give theirs: smallest ones on ``transformers.Trainer``.

The backbone recomputes its activations; the head scores one part of the vocabulary after another, in a function with a
backward of its own; adapters lie over frozen weights; a preference loss compares with a frozen reference, and metrics
are gathered and read inside of the step: behind a short batch, an epoch's last, Accelerate tries to slice them.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from monitor.adapters.trainer import record_trainer

SEED, WORDS, PADDING, PART = 3, 64, 0, 48


class Scores(torch.autograd.Function):
    """Log-probabilities of the labels, and the entropies, with no more than a part of the logits at a time."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        most, found = hidden.new_full((len(hidden),), -torch.inf), hidden.new_zeros(len(hidden))
        total, weighted = torch.zeros_like(found), torch.zeros_like(found)
        for start in range(0, len(weight), PART):
            logits = hidden @ weight[start : start + PART].t()
            highest = torch.maximum(most, logits.amax(1))
            scale, powers = (most - highest).exp(), (logits - highest[:, None]).exp()
            total = total * scale + powers.sum(1)
            weighted = weighted * scale + (powers * logits).sum(1)
            most, here = highest, labels - start
            inside = (here >= 0) & (here < logits.shape[1])
            picked = logits.gather(1, here.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
            found = torch.where(inside, picked, found)
        whole = most + total.log()
        ctx.save_for_backward(hidden, weight, labels, whole)
        entropy = whole - weighted / total
        ctx.mark_non_differentiable(entropy)
        return found - whole, entropy

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        hidden, weight, labels, whole = ctx.saved_tensors
        to_hidden = torch.zeros_like(hidden)
        to_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for start in range(0, len(weight), PART):
            part = weight[start : start + PART]
            share = (hidden @ part.t()).sub_(whole[:, None]).exp_().neg_()
            here = labels - start
            inside = (here >= 0) & (here < len(part))
            share.scatter_add_(1, here.clamp(0, len(part) - 1)[:, None], inside.to(share.dtype)[:, None])
            share.mul_(given[0][:, None])
            to_hidden.addmm_(share, part)
            if to_weight is not None:
                to_weight[start : start + PART].addmm_(share.t(), hidden)
        return to_hidden, to_weight, None


class Adapted(nn.Module):
    """A frozen layer and a product of two small matrices beside it."""

    def __init__(self, layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.layer, self.drop = layer, nn.Dropout(0.1)
        self.into = nn.Linear(layer.in_features, rank, bias=False)
        self.out = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.out.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 2.0 * self.out(self.into(self.drop(x)))


class Tuning(Trainer):
    """Scores tokens; with a reference, each chosen text against its rejected one."""

    def __init__(self, *given: Any, reference: nn.Module | None = None, **named: Any) -> None:
        super().__init__(*given, **named)
        self.entropies: list[Any]
        self.margins: list[Any]
        self.reference, self.entropies, self.margins = reference, [], []

    def compute_loss(self, model: Any, inputs: Any, *options: Any, **named: Any) -> Any:
        mask = inputs["input_ids"].flatten(0, 1)[:, 1:] != PADDING
        scores, entropy = self.scored(model, inputs, mask)
        self.entropies.append(self.gathered(entropy[mask].mean()))
        if self.reference is None:
            return -scores.sum() / mask.sum().clamp(min=1)
        with torch.no_grad():
            before, _ = self.scored(self.reference, inputs, mask)
        chosen, rejected = (scores - before).sum(1).chunk(2)
        self.margins.append(self.gathered((chosen - rejected).detach().mean()))
        return -F.logsigmoid(0.1 * (chosen - rejected)).mean()

    def gathered(self, number: Tensor) -> float:
        return float(self.accelerator.gather_for_metrics(number).item())

    @staticmethod
    def scored(model: Any, inputs: Any, mask: Tensor) -> tuple[Tensor, Tensor]:
        ids = inputs["input_ids"].flatten(0, 1)
        hidden = model.model(input_ids=ids, attention_mask=(ids != PADDING).long(), use_cache=False).last_hidden_state
        rows = hidden[:, :-1].reshape(-1, hidden.shape[-1])
        scores, entropy = Scores.apply(rows, model.lm_head.weight, ids[:, 1:].reshape(-1))
        return scores.view(mask.shape).masked_fill(~mask, 0), entropy.view(mask.shape)


def adapted(model: Any) -> None:
    """Freeze all weights, and lay adapters over those of the attention."""
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj, layer.self_attn.v_proj = map(Adapted, (layer.self_attn.q_proj, layer.self_attn.v_proj))
    model.enable_input_require_grads()


def tune(kind: str, out: Path) -> Tuning:
    """Three recorded steps, the second on a short batch: ``full``, ``adapters`` or ``preference``."""
    torch.manual_seed(SEED)
    size: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16}
    model = LlamaForCausalLM(LlamaConfig(**size, **heads, pad_token_id=PADDING))
    reference = copy.deepcopy(model) if kind == "preference" else None
    if kind == "adapters":
        adapted(model)
    texts = torch.randint(1, WORDS, (6, 2 if reference else 1, 8))
    texts[::3, :, 6:] = PADDING
    settings = TrainingArguments(
        str(out) + ".library", max_steps=3, per_device_train_batch_size=4, gradient_checkpointing=True,
        remove_unused_columns=False, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    made = Tuning(model, settings, train_dataset=[{"input_ids": text} for text in texts], reference=reference)
    record_trainer(made, out=out, seed=SEED, chips=2)
    made.train()
    return made
