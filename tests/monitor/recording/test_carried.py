"""What goes from step to step beside the state is recorded as a part of each step's batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from inspector.inspection.inspection import verify
from inspector.inspection.verdict import Outcome
from monitor import Recorder
from monitor.replay.steps import execution_of
from monitor.transcript import RunFolder


def tokens(steps):
    torch.manual_seed(1)
    return [torch.randint(0, 11, (5, 3)) for _ in range(steps)]


class Language:
    """A recurrent language model whose hidden state goes on from batch to batch, and a total of its losses."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.ModuleDict({"in": nn.Embedding(11, 6), "rnn": nn.GRU(6, 6), "out": nn.Linear(6, 11)})
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.hidden, self.total = torch.zeros(1, 3, 6), torch.zeros(())

    def body(self, model, optimizer, batch):
        made, hidden = model["rnn"](model["in"](batch[:-1]), self.hidden)
        self.hidden = hidden.detach()
        optimizer.zero_grad()
        loss = functional.cross_entropy(model["out"](made).flatten(0, 1), batch[1:].flatten())
        loss.backward()
        optimizer.step()
        self.total += loss.detach()


def test_hidden_state_and_total_of_losses_go_on_as_in_the_plain_loop_and_are_accepted(record_loop):
    plain, ours = Language(), Language()
    for batch in tokens(5):
        plain.body(plain.model, plain.optimizer, batch)
    recorded = record_loop(ours.model, ours.optimizer, tokens(5), ours.body, checkpoint_every=2)
    torch.testing.assert_close(ours.hidden, plain.hidden)
    torch.testing.assert_close(ours.total, plain.total)
    verdict = verify(recorded.run, recorded.trust, now=recorded.now)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    run = RunFolder(recorded.run, recorded.trust.labs["lab"])
    programs = [execution_of(run.leaf(step)).program for step in range(1, 6)]
    assert len(set(programs)) == 2  # the first step cannot know yet that they change
    assert set(run.batches().batch(3)) == {"batch", "carried.0", "carried.1"}


def test_a_carried_tensor_that_reaches_weights_without_a_loss_is_named_as_a_batch_is(record_loop):
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = [torch.zeros(8)]

    def body(model, optimizer, batch):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        with torch.no_grad():
            model.weight.grad.add_(kept[0])
        optimizer.step()
        kept[0] = batch.mean(0) * 0.01

    with pytest.warns(UserWarning, match="reaches .* without passing a loss"):
        recorded = record_loop(model, optimizer, [torch.randn(5, 8) for _ in range(4)], body)
    verdict = verify(recorded.run, recorded.trust, now=recorded.now)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert any("'batch:carried.0' reaches" in reason.text for reason in verdict.reasons)


def test_a_resumed_run_goes_on_with_what_its_loop_carries(tmp_path):
    def run(language, recorder, batches):
        for batch in batches:
            with recorder.step(batch):
                language.body(language.model, language.optimizer, batch)

    whole = Language()
    with_all = Recorder(whole.model, whole.optimizer, out=tmp_path / "whole", seed=5)
    run(whole, with_all, tokens(4))
    first, second = Language(), Language()
    recorder = Recorder(first.model, first.optimizer, out=tmp_path / "run", seed=5)
    run(first, recorder, tokens(4)[:2])
    with pytest.raises(ZeroDivisionError), recorder.step(tokens(4)[2]):
        raise ZeroDivisionError
    second.hidden, second.total = first.hidden, first.total
    recorder = Recorder.resume(second.model, second.optimizer, out=tmp_path / "run")
    run(second, recorder, tokens(4)[2:])
    assert torch.equal(second.model.get_parameter("out.weight"), whole.model.get_parameter("out.weight"))
    assert recorder.finish() == with_all.finish()
