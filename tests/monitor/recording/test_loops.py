"""Loops as people write them, at their smallest: what each has to end in."""

from __future__ import annotations

import copy
import re
from fractions import Fraction
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributions import Beta, Categorical, Independent, Normal, kl_divergence
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.checkpoint import checkpoint

from firmware_sim.errors import CallerError, DeviceError
from inspector.inspection.verdict import Outcome
from tests.monitor.recording.whole_loops import plain, record, values


def pairs(steps=3, width=6, classes=3):
    return [(torch.randn(4, width), torch.randint(0, classes, (4,))) for _ in range(steps)]


def learn(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def perceptron():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


class Contrast(nn.Module):
    """A key encoder that follows the query encoder, and a ring of keys written at a place that is read back."""

    queue: torch.Tensor
    place: torch.Tensor

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(6, 4)
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", functional.normalize(torch.randn(8, 4), dim=1))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, one, other):
        asked = functional.normalize(self.query(one), dim=1)
        with torch.no_grad():
            for mine, theirs in zip(self.key.parameters(), self.query.parameters(), strict=True):
                mine.data = mine.data * 0.9 + theirs.data * 0.1
            keys = functional.normalize(self.key(other), dim=1)
        scores = torch.cat([(asked * keys).sum(1, keepdim=True), asked @ self.queue.clone().t()], 1)
        with torch.no_grad():
            place = int(self.place)
            self.queue[place : place + 4] = keys
            self.place[0] = (place + 4) % 8
        return functional.cross_entropy(scores / 0.1, torch.zeros(4, dtype=torch.long))


def momentum_contrast(make):
    model = Contrast()
    optimizer = torch.optim.SGD(model.query.parameters(), lr=0.1, momentum=0.9)
    recorder = make(model, optimizer, direct_paths=["buffer/queue"])
    for batch in [(torch.randn(4, 6), torch.randn(4, 6)) for _ in range(3)]:
        with recorder.step(batch):
            learn(optimizer, model(*batch))
    return model


def target_network(make):
    """Beside the model, averaged in each step and copied in one."""
    online = perceptron()
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.Adam(online.parameters(), lr=0.01)
    recorder = make(online, optimizer, state={"target": target})
    for number, (x, y) in enumerate(pairs()):
        with recorder.step((x, y)):
            with torch.no_grad():
                wanted = 0.9 * target(x).max(1).values
            learn(optimizer, functional.smooth_l1_loss(online(x).gather(1, y[:, None])[:, 0], wanted))
            with torch.no_grad():
                if number == 1:
                    target.load_state_dict(online.state_dict())
                for mine, theirs in zip(target.parameters(), online.parameters(), strict=True):
                    mine.data.copy_(0.1 * theirs.data + 0.9 * mine.data)
    return nn.ModuleList([online, target])


def bare_tensor(make):
    """A sum of losses that is no attribute of anything, listed as it is."""
    model, total = perceptron(), torch.zeros(())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    recorder = make(model, optimizer, state=[total])
    for x, y in pairs():
        with recorder.step((x, y)):
            loss = functional.cross_entropy(model(x), y)
            learn(optimizer, loss)
            total += loss.detach() * len(x)
    return model


def averaged(steps_for_statistics):
    """Weight averaging to its end: the statistics of the average, anew, between steps or as steps."""

    def loop(make):
        model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        average, rate = AveragedModel(model), SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
        recorder = make(model, optimizer, state={"average": average}, free_slots=True)
        batches = pairs()
        for x, y in batches:
            with recorder.step((x, y)):
                learn(optimizer, functional.cross_entropy(model(x), y))
                average.update_parameters(model)
                rate.step()
        if not steps_for_statistics:
            update_bn([x for x, _ in batches], average)
            return nn.ModuleList([model, average])
        layers: Any = average.module
        norm = layers[1]
        norm.momentum = None
        for number, (x, _) in enumerate(batches):
            with recorder.step(x), torch.no_grad():
                if not number:
                    norm.reset_running_stats()
                average(x)
        return nn.ModuleList([model, average])

    return loop


def unchecked_distributions(make):
    """Distributions that do not look at their arguments' values, as a policy's loss has them."""
    model = nn.ModuleDict({"mean": nn.Linear(6, 2), "kind": nn.Linear(6, 3)})
    model.register_parameter("spread", nn.Parameter(torch.zeros(2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    recorder = make(model, optimizer)
    for x, y in pairs():
        with recorder.step((x, y)):
            each = Normal(model["mean"](x), model.get_parameter("spread").exp(), validate_args=False)
            policy = Independent(each, 1, validate_args=False)
            kinds = Categorical(logits=model["kind"](x), validate_args=False)
            even = Categorical(logits=torch.zeros(3), validate_args=False)
            gain = policy.log_prob(x[:, :2]) + kinds.log_prob(y) + 0.1 * kinds.entropy()
            learn(optimizer, (kl_divergence(kinds, even) - gain).mean())
    return model


def clamped_where_used(make):
    return matched(make, lambda t: t.clamp(0, 2), lambda t: None)


def clamped_where_kept(make):
    return matched(make, lambda t: t, lambda t: t.clamp_(0, 2))


def matched(make, used, kept):
    """Two encoders and a temperature that is bounded."""
    model = nn.ModuleDict({"one": nn.Linear(6, 4), "other": nn.Linear(6, 4)})
    model.register_parameter("heat", nn.Parameter(torch.tensor(1.99)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    recorder = make(model, optimizer)
    for batch in [(torch.randn(4, 6), torch.randn(4, 6)) for _ in range(3)]:
        with recorder.step(batch):
            left, right = (functional.normalize(part(x), dim=1) for part, x in zip(model.values(), batch, strict=True))
            scores, wanted = used(model.heat).exp() * left @ right.t(), torch.arange(4)
            learn(optimizer, functional.cross_entropy(scores, wanted) + functional.cross_entropy(scores.t(), wanted))
            with torch.no_grad():
                kept(model.heat)
    return model


def clipped_critic(make):
    """A critic whose weights are clipped after each of its updates, and a generator that steps every second time."""
    model = nn.ModuleDict({"makes": nn.Linear(3, 6), "judges": nn.Linear(6, 1)})
    first, second = (torch.optim.RMSprop(part.parameters(), lr=0.01) for part in model.values())
    recorder = make(model, [first, second])
    for number, batch in enumerate([(torch.randn(4, 6), torch.randn(4, 3)) for _ in range(3)]):
        with recorder.step(batch):
            made = model["makes"](batch[1])
            learn(second, model["judges"](made.detach()).mean() - model["judges"](batch[0]).mean())
            for weight in model["judges"].parameters():
                weight.data.clamp_(-0.2, 0.2)
            if number % 2 == 0:
                learn(first, -model["judges"](made).mean())
    return model


def second_derivatives(make):
    """The residual of a differential equation."""
    model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    recorder = make(model, optimizer)
    for batch in [{"inside": torch.rand(4, 2), "edge": torch.rand(2, 2)} for _ in range(3)]:
        with recorder.step(batch):
            x = batch["inside"].clone().requires_grad_()
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            (curve,) = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
            residual = slope[:, 1] - 0.1 * curve[:, 0]
            learn(optimizer, residual.square().mean() + model(batch["edge"]).square().mean())
    return model


def learned_to_learn(make):
    """The gradient of a loss behind an update of functional parameters."""
    model = perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    recorder = make(model, optimizer)
    for batch in zip(pairs(), pairs(), strict=True):
        with recorder.step(batch):
            weights, ((x, y), (z, w)) = dict(model.named_parameters()), batch
            inner = functional.cross_entropy(functional_call(model, weights, x), y)
            slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
            moved = {name: each - 0.1 * slope for (name, each), slope in zip(weights.items(), slopes, strict=True)}
            learn(optimizer, functional.cross_entropy(functional_call(model, moved, z), w))
    return model


class Adapted(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.into = nn.Parameter(torch.randn(2, layer.in_features) * 0.1)
        self.out = nn.Parameter(torch.zeros(layer.out_features, 2))

    def forward(self, x):
        return self.layer(x) + x @ self.into.t() @ self.out.t()


def adapters(make):
    """Adapters alone learn; between steps they are merged into the frozen weights, and taken out again."""
    parts = Adapted(nn.Linear(6, 5)), Adapted(nn.Linear(5, 3))
    model = nn.Sequential(parts[0], nn.GELU(), parts[1])
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)
    recorder = make(model, optimizer)
    for x, y in pairs():
        with recorder.step((x, y)):
            learn(optimizer, functional.cross_entropy(model(x), y))
        with torch.no_grad():
            for sign in (1, -1):
                for part in parts:
                    part.layer.weight += sign * part.out @ part.into
    return model


HOLDS = {
    "momentum contrast": momentum_contrast,
    "target network": target_network,
    "bare tensor": bare_tensor,
    "statistics between steps": averaged(False),
    "statistics as steps": averaged(True),
    "distributions": unchecked_distributions,
    "clamped where used": clamped_where_used,
    "clamped where kept": clamped_where_kept,
    "clipped critic": clipped_critic,
    "second derivatives": second_derivatives,
    "learned to learn": learned_to_learn,
    "adapters": adapters,
}


@pytest.mark.parametrize("name", HOLDS)
def test_loop_ends_as_without_a_recorder_and_is_accepted(tmp_path, devices, name):
    expected = plain(HOLDS[name])
    model, verdict = record(HOLDS[name], tmp_path / "run", devices)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    torch.testing.assert_close(values(model), expected, rtol=1e-3, atol=1e-5)


def test_activations_that_are_computed_again_draw_the_masks_that_they_drew(tmp_path, devices):
    """So weights end in the bits of the loop that keeps its activations."""

    def loop(call):
        def train(make):
            model = nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 8)), nn.Linear(8, 3))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            recorder = make(model, optimizer)
            for x, y in pairs():
                with recorder.step((x, y)):
                    hidden = model[0](x)
                    for _ in range(2):
                        hidden = call(model[1], hidden)
                    learn(optimizer, functional.cross_entropy(model[2](hidden), y))
            return model

        return train

    again = loop(lambda part, x: checkpoint(part, x, use_reentrant=False))
    model, verdict = record(again, tmp_path / "again", devices)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    kept, _ = record(loop(lambda part, x: part(x)), tmp_path / "kept", devices)
    for name, tensor in values(kept).items():
        assert torch.equal(tensor, model.state_dict()[name]), name


class Climbing(torch.optim.Optimizer):
    """Sharpness-aware in two calls, neither of which is ``step``; weights come back by re-binding."""

    def __init__(self, params, **options):
        super().__init__(params, {"rho": 0.05, **options})
        self.base = torch.optim.SGD(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first(self):
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each]["old"] = each.data.clone()
                each.add_(each.grad, alpha=group["rho"])
        self.zero_grad()

    @torch.no_grad()
    def second(self):
        for group in self.param_groups:
            for each in group["params"]:
                each.data = self.state[each]["old"]
        self.base.step()
        self.zero_grad()

    def step(self, closure=None):
        """Nothing."""


def climbing(make):
    model = perceptron()
    optimizer = Climbing(model.parameters(), lr=0.1, momentum=0.9)
    recorder = make(model, optimizer)
    for x, y in pairs():
        with recorder.step((x, y)):
            functional.cross_entropy(model(x), y).backward()
            optimizer.first()
            functional.cross_entropy(model(x), y).backward()
            optimizer.second()
    return model


def climbing_by_hand(make):
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    recorder = make(model, optimizer)
    for x, y in pairs():
        with recorder.step((x, y)):
            functional.cross_entropy(model(x), y).backward()
            ways = [each.grad * 0.05 for each in model.parameters()]
            with torch.no_grad():
                torch._foreach_add_(list(model.parameters()), ways)
            model.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            with torch.no_grad():
                torch._foreach_sub_(list(model.parameters()), ways)
            optimizer.step()
            optimizer.zero_grad()
    return model


DOUBTED = {
    "an optimizer in two calls": (climbing, r"the arithmetic of optimizer '\S+\.Climbing' is not known here"),
    "writes beside an update": (climbing_by_hand, r"since step 1: aten\._foreach_\S+ writes 'weight/\S+' outside the"),
}


@pytest.mark.filterwarnings("ignore:.*reaches weight/")
@pytest.mark.parametrize("name", DOUBTED)
def test_loop_whose_update_is_its_own_leaves_that_alone_in_doubt(tmp_path, devices, name):
    loop, said = DOUBTED[name]
    expected = plain(loop)
    model, verdict = record(loop, tmp_path / "run", devices)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert all(re.search(said, each.text) for each in verdict.reasons), verdict.reasons
    torch.testing.assert_close(values(model), expected, rtol=1e-3, atol=1e-5)


def supervised(make_model, loss, batches, optimizer=torch.optim.AdamW, **keywords):
    """A loop that is of its kind by model and loss alone; ``loss(model, *batch)``."""

    def loop(make):
        model = make_model()
        chosen = optimizer(model.parameters(), lr=0.01)
        recorder = make(model, chosen, **keywords)
        for batch in batches():
            with recorder.step(batch):
                learn(chosen, loss(model, *batch))
        return model

    return loop


def own_generator(make):
    model, drawn = nn.Linear(6, 6), torch.Generator().manual_seed(7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    recorder = make(model, optimizer)
    for x, _ in pairs():
        with recorder.step(x):
            noise = torch.randn(x.shape, generator=drawn)
            learn(optimizer, functional.mse_loss(model(x + noise), noise))
    return model


def sampled_in_an_evaluation(make):
    """A policy draws tokens; the next step learns from them."""
    model = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 7))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    recorder = make(model, optimizer)
    for ids in [torch.randint(0, 7, (4, 2)) for _ in range(2)]:
        with recorder.evaluation(ids), torch.no_grad():
            drawn = torch.multinomial(model(ids)[:, -1].softmax(1), 1)
        with recorder.step((ids, drawn)):
            learn(optimizer, functional.cross_entropy(model(ids)[:, -1], drawn[:, 0]))
    return model


def checked_policy(model, x, y):
    return -Normal(model(x), torch.ones(3), validate_args=True).log_prob(functional.one_hot(y, 3).float()).mean()


def checked_latents(model, x, _):
    latent = Normal(model(x), torch.ones(3), validate_args=True)
    return latent.rsample().square().mean() + kl_divergence(latent, Normal(0.0, 1.0)).mean()


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, dtype=torch.cfloat))

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=6)


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(2, 3, batch_first=True)

    def forward(self, x):
        rows = pack_padded_sequence(x.view(4, 3, 2), torch.tensor([3, 1, 2, 3]), batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.layer(rows)[0], batch_first=True)[0].mean(1)


class Accuracy(nn.Module):
    """As libraries of metrics keep it: in tensors that are no buffers."""

    def __init__(self):
        super().__init__()
        self.right = self.all = torch.zeros(3, dtype=torch.long)

    def update(self, scores, labels):
        found = scores.argmax(1)
        self.right = self.right + torch.bincount(labels[found == labels], minlength=3)
        self.all = self.all + torch.bincount(labels, minlength=3)


def metric(listed):
    def loop(make):
        model, accuracy = perceptron(), Accuracy()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        recorder = make(model, optimizer, **({"state": {"accuracy": accuracy}} if listed else {}))
        for x, y in pairs():
            with recorder.step((x, y)):
                scores = model(x)
                learn(optimizer, functional.cross_entropy(scores, y))
                accuracy.update(scores.detach(), y)
        return model

    return loop


def best_weights_restored(make):
    model = perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    recorder = make(model, optimizer)
    for number, (x, y) in enumerate(pairs(4)):
        with recorder.step((x, y)):
            learn(optimizer, functional.cross_entropy(model(x), y))
        if number == 0:
            best = copy.deepcopy(model.state_dict())
        if number == 2:
            model.load_state_dict(best)
    return model


def largest_of_neighbours(model, x, y):
    scores = model(x)
    highest = torch.full((4, 3), -9.0).scatter_reduce(0, y[:, None].expand(4, 3), scores, "amax")
    return functional.cross_entropy(scores - highest.detach(), y)


def images_among_words(model, x, y):
    return model(torch.zeros(4, 6).masked_scatter(torch.ones(4, 6, dtype=torch.bool), x * model[0].bias.sum())).mean()


def mixed_by_a_drawn_share(model, x, y):
    share = Beta(torch.tensor(0.4), torch.tensor(0.4)).sample()
    scores = model(share * x + (1 - share) * x.flip(0))
    return share * functional.cross_entropy(scores, y) + (1 - share) * functional.cross_entropy(scores, y.flip(0))


def lengths_as_numbers(model, x, y):
    """PyTorch's own code writes the lengths into new memory."""
    return functional.ctc_loss(model(x)[:, None].log_softmax(-1), y[:2] % 2 + 1, cast(Any, (4,)), cast(Any, (2,)))


def advantages_row_by_row(make):
    """Between steps, into memory that nobody has read as a whole before."""
    model = nn.Linear(6, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    recorder = make(model, optimizer, maximum_slack=Fraction(1, 2))
    for x, _ in pairs(3):
        gains, last = torch.zeros(4, 2), torch.zeros(2)
        with torch.no_grad():
            scores = model(x).expand(4, 2)
        for row in reversed(range(4)):
            last = scores[row] + 0.9 * last
            gains[row] = last
        with recorder.step((x, gains)):
            learn(optimizer, functional.mse_loss(model(x).expand(4, 2), gains))
    return model


def two_kinds(make):
    """Matrices by one optimizer, all else by another."""
    model = perceptron()
    matrices = [each for each in model.parameters() if each.dim() == 2]
    others = [each for each in model.parameters() if each.dim() != 2]
    both = [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)]
    recorder = make(model, both)
    for x, y in pairs():
        with recorder.step((x, y)):
            functional.cross_entropy(model(x), y).backward()
            for each in both:
                each.step()
            model.zero_grad()
    return model


def loss_of(model, x, y):
    return functional.cross_entropy(model(x), y)


LATER = {
    "Muon": supervised(lambda: nn.Linear(6, 3, bias=False), loss_of, pairs, torch.optim.Muon),
    "Muon and AdamW": two_kinds,
    "own generator": own_generator,
    "sampled in an evaluation": sampled_in_an_evaluation,
    "a distribution that checks": supervised(perceptron, checked_policy, pairs),
    "a latent that is drawn": supervised(perceptron, checked_latents, pairs),
    "complex weights": supervised(lambda: nn.Sequential(Spectral(), nn.Linear(6, 3)), loss_of, pairs, torch.optim.Adam),
    "packed sequence": supervised(Packed, loss_of, pairs),
    "metric in a step": metric(False),
    "metric under state": metric(True),
    "best weights restored": best_weights_restored,
    "mixed by a drawn share": supervised(perceptron, mixed_by_a_drawn_share, pairs),
    "lengths as numbers": supervised(perceptron, lengths_as_numbers, pairs),
    "advantages row by row": advantages_row_by_row,
    "largest of neighbours": supervised(perceptron, largest_of_neighbours, pairs),
    "images among words": supervised(perceptron, images_among_words, pairs),
}
"""Not all are accepted yet; that is no reason to reject them, or to fail."""
ACCEPTED = frozenset(
    {"Muon", "Muon and AdamW", "sampled in an evaluation", "a distribution that checks", "a latent that is drawn"}
    | {"mixed by a drawn share", "lengths as numbers", "advantages row by row", "complex weights"}
    | {"own generator", "packed sequence", "best weights restored", "metric under state"}
    | {"metric in a step", "largest of neighbours", "images among words"}
)
WAY = r"(; |numerics: )\w+ \w+"
"""What a refusal has to say, as long as there is one."""


@pytest.mark.filterwarnings("ignore:.*leaves an inspection in doubt", "ignore:Complex modules")
@pytest.mark.parametrize("name", LATER)
def test_loop_that_is_not_taken_yet_is_refused_by_name_or_left_in_doubt_at_most(tmp_path, devices, name):
    plain(LATER[name])
    refusal, outcome = None, None
    try:
        outcome = record(LATER[name], tmp_path / "run", devices)[1].outcome
    except CallerError as error:
        refusal = str(error)
    assert outcome in (None, Outcome.ACCEPT, Outcome.INCONCLUSIVE)
    assert (outcome is Outcome.ACCEPT) == (name in ACCEPTED)
    if refusal is not None:
        assert "\n" not in refusal
        assert re.search(WAY, refusal), refusal


def test_a_thread_that_flushes_subnormal_numbers_is_told_what_to_call(tmp_path, devices):
    loop = supervised(perceptron, loss_of, pairs)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        with pytest.raises(DeviceError, match=r"call torch\.set_flush_denormal\(False\)"):
            record(loop, tmp_path / "run", devices)
    finally:
        torch.set_flush_denormal(False)
    assert record(loop, tmp_path / "run", devices)[1].outcome is Outcome.ACCEPT
