"""Train a policy by GRPO (Shao et al. 2024, section 4.1): rollouts and updates share one transcript.

Shows: a rollout is an evaluation, so that its program and the keys of its draws are recorded and repeated like those of
an update. The tokens that it drew are in the next step's batch, and the verdict says from which rollout they come. A
second lab rewards itself: one update takes other advantages than the step commits to. It is rejected, and only it.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor, nn

from chipwitness import Recorder, Settings, Trust, Verdict, initialised, inspect

WORDS, GROUP, LENGTH, ROUNDS = 12, 8, 8, 2


class Policy(nn.Module):
    """Logits (group, length, words) of the word after each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(WORDS, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, WORDS))

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.layers(ids)
        return logits


def chances(policy: Policy, ids: Tensor) -> Tensor:
    """Logarithms of the chances (group, length − 1) of all words but the first."""
    logs = policy(ids[:, :-1]).log_softmax(-1)
    return torch.gather(logs, 2, ids[:, 1:, None]).squeeze(2)


@torch.no_grad()
def rollout(policy: Policy, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Words drawn after a prompt, and the chances that they had."""
    for _ in range(LENGTH):
        drawn = torch.multinomial(policy(ids)[:, -1].softmax(-1), 1)
        ids = torch.cat([ids, drawn], 1)
    return ids, chances(policy, ids)


def advantages(ids: Tensor) -> Tensor:
    """The reward is how often word 2 occurs; each group is its own baseline."""
    rewards = (ids == 2).sum(1).float()
    return (rewards - rewards.mean()) / (rewards.std() + 1e-4)


def train(run: Path, *, lie: str | None = None) -> None:
    """A rollout and an update in turn; nothing else touches the policy."""
    torch.manual_seed(0)
    policy = initialised(Policy, seed=1)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    recorder = Recorder(policy, optimizer, out=run, numerics="exact", seed=1, lie=lie, lie_step=4)
    for _ in range(ROUNDS):
        prompt = torch.randint(WORDS, (1, 2)).repeat(GROUP, 1)
        with recorder.evaluation(prompt):
            ids, before = rollout(policy, prompt)
        batch = {"ids": ids, "before": before, "gain": advantages(ids)}
        with recorder.step(batch) as step:
            optimizer.zero_grad()
            ratio = (chances(policy, ids) - before).exp()
            gain = batch["gain"][:, None]
            loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            step.commit(loss=loss)
    recorder.finish()


def judge(run: Path) -> Verdict:
    """An inspection of all chips that repeats each step."""
    trust = Trust.load([run.with_name(f"{run.name}.trust.json")], [run])
    settings = Settings(samples=4, seed=None, devices=("sse41",))
    return inspect([run], trust, settings, now=datetime.now(UTC))


def main(folder: Path) -> dict[str, Verdict]:
    """Record an honest lab and one that lies; returns the verdicts."""
    verdicts = {}
    for name, lie in (("honest", None), ("lying", "change-sample")):
        train(folder / name, lie=lie)
        verdicts[name] = judge(folder / name)
        print(f"{name}: {verdicts[name].outcome.value}; {verdicts[name].reasons[0].text}")
    return verdicts


if __name__ == "__main__":
    main(Path(sys.argv[1]))
