"""The presets: their structure, the operators that they are made of, and the bits of their training."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import is_tensor
from torch.utils._pytree import tree_leaves, tree_map

from firmware_sim.errors import CallerError
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.verdict import Outcome
from monitor import numerics
from monitor.lab.simulated_lab import SimulatedLab, lab_path
from monitor.numerics import exact
from monitor.numerics.operators import functional_name, operator_table
from monitor.presets import PRESETS, Preset, initialise, preset
from monitor.presets._dropout import MaskStream
from monitor.presets.gpt2_117m import GPT2, GPT2Config, preset_of
from monitor.presets.task import Task
from monitor.programs.interpreter import loss_of
from monitor.replay.derivation import DerivedSteps, derive, initial_state, meta_batch
from monitor.transcript import RunFolder
from tests.leaves import execution_of

SMALL_GPT2 = preset_of(
    "small-gpt2",
    "GPT-2 with dropout at a test's size",
    GPT2Config(layers=2, width=16, heads=2, vocabulary=300, context=8, dropout=0.25),
)


@pytest.fixture
def small_gpt2(monkeypatch) -> Preset:
    """A preset of GPT-2's code that trains in a moment; worker processes do not know it."""
    monkeypatch.setitem(PRESETS, SMALL_GPT2.name, SMALL_GPT2)
    return SMALL_GPT2


def on_meta(build):
    with torch.device("meta"):
        return build()


def parameters_of(model):
    return sum(parameter.numel() for parameter in model.parameters())


SIZES = {
    "tiny-gpt": (136_960, 402_653_184),
    "digits-cnn": (6_138, 15_581_184),
    "llama-small": (492_384, 1_585_446_912),
    "gpt2-117m": (123_702_528, 383_114_280_960),
    "resnet50-cifar": (23_520_842, 124_535_046_144),
}
"""Parameters, and FLOP of matrix products and convolutions, forward and backward, at the preset's own batch."""


@pytest.mark.parametrize("name", PRESETS)
def test_size_and_work(name):
    parameters, flop = SIZES[name]
    assert parameters_of(on_meta(preset(name).build)) == parameters
    assert derive(Task.for_preset(name, seed=1, steps=1)).program.flop == flop


def test_gpt2_at_its_own_context_has_the_published_number_of_parameters():
    model = on_meta(lambda: GPT2(GPT2Config(context=1024)))
    assert parameters_of(model) == 124_439_808
    assert parameters_of(model) - parameters_of(on_meta(lambda: GPT2(GPT2Config()))) == (1024 - 64) * 768


def test_resnet50_has_fifty_layers_with_weights_besides_its_shortcuts():
    model = on_meta(preset("resnet50-cifar").build)
    layers = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Conv2d | torch.nn.Linear)]
    assert sum("shortcut" not in name for name in layers) == 50
    assert sum("shortcut" in name for name in layers) == 4
    assert model(torch.empty(2, 3, 32, 32, device="meta")).shape == (2, 10)


@pytest.mark.parametrize("name", list(PRESETS))
def test_step_is_made_of_operators_that_controlled_numerics_have(name):
    """On shapes alone and without a rounding engine, so that the big ones take part; the rows are the table's."""
    known = operator_table()
    task = Task.for_preset(name, seed=1, steps=1, batch_size=2)
    for call in derive(task).program.calls:
        operator = call["operator"]
        rule = known.get(operator) or known.get(functional_name(operator) or "")
        assert rule is not None, operator


@pytest.mark.parametrize("name", list(PRESETS))
def test_samples_have_the_shapes_and_ranges_that_the_model_takes(name):
    entry = preset(name)
    samples, again = entry.samples(None), entry.samples(None)
    assert len({len(values) for values in samples.values()}) == 1
    assert {key: values.tobytes() for key, values in samples.items()} == {k: v.tobytes() for k, v in again.items()}
    if "tokens" in samples:
        model = on_meta(entry.build)
        assert samples["tokens"].shape[1] == 65
        assert 0 <= samples["tokens"].min() <= samples["tokens"].max() < model.tokens.num_embeddings
    elif "pixels" in samples:
        assert 0 <= samples["pixels"].min() <= samples["pixels"].max() <= 16
        assert set(samples["label"]) == set(range(10))
    assert meta_batch(Task.for_preset(name, seed=1, steps=1)).keys() == samples.keys()


def test_digits_are_enlarged_by_copying():
    small, large = preset("digits-cnn").samples(None), preset("resnet50-cifar").samples(None)
    assert large["pixels"].shape == (1797, 3, 32, 32)
    assert (large["label"] == small["label"]).all()
    for channel in range(3):
        for row, column in ((0, 0), (3, 3), (1, 2)):
            assert (large["pixels"][:, channel, row::4, column::4] == small["pixels"]).all()


def test_tokens_of_gpt2_are_pairs_of_bytes_one_to_one_on_ascii(tmp_path):
    entry = preset("gpt2-117m")
    text = bytes(value % 128 for value in range(0, 7 * 260, 7)).ljust(260, b".")
    (tmp_path / "text").write_bytes(text)
    tokens = entry.samples(tmp_path / "text")["tokens"]
    assert tokens.shape == (2, 65)
    decoded = b"".join(bytes(divmod(token, 256)) for token in tokens.reshape(-1).tolist())
    assert decoded == text
    (tmp_path / "short").write_bytes(text[:129])
    with pytest.raises(CallerError, match="129 bytes, but gpt2-117m needs at least 130"):
        entry.samples(tmp_path / "short")
    with pytest.raises(CallerError, match="cannot read the text"):
        entry.samples(tmp_path / "nothing")


def test_resnet50_takes_no_data_file(tmp_path):
    with pytest.raises(CallerError, match="takes no data file"):
        preset("resnet50-cifar").samples(tmp_path)


def test_sizes_of_a_gpt2_are_checked():
    with pytest.raises(CallerError, match="cannot be divided by 5 heads"):
        GPT2Config(width=16, heads=5)
    with pytest.raises(CallerError, match="at least 1"):
        GPT2Config(layers=0)


def test_rotary_turns_each_pair_by_its_position(monkeypatch):
    """cos² + sin² = 1, position 0 stands still, and the slowest angle is position·10000^(-(w-2)/w)."""
    model: Any = preset("llama-small").build()
    cosine, sine = model.rotary(64)
    assert torch.allclose(cosine * cosine + sine * sine, torch.ones_like(cosine), atol=1e-6)
    assert (cosine[0] == 1).all()
    assert (sine[0] == 0).all()
    width = 2 * cosine.shape[1]
    for index in range(width // 2):
        angle = 63 * 10000.0 ** (-2 * index / width)
        assert math.isclose(float(sine[63, index]), math.sin(angle), abs_tol=1e-5)


def masks_at(step, *shapes, probability=0.25, seed=9):
    stream = MaskStream(probability)
    stream.seed_from(seed)
    stream.passes.fill_(step - 1)
    masks = stream()
    return [factor for shape in shapes for factor in masks.draw(torch.float32, shape)]


@pytest.mark.parametrize("step", [1, 2, 70_000])
def test_masks_are_the_philox_stream_of_seed_and_step(step):
    stream = MaskStream(0.25)
    stream.seed_from(9)
    low, high = stream.key.tolist()
    words = exact.philox.bits(high << 32 | low, step << 32, 4 * 15)
    halves = torch.stack((words & 0xFFFF, words >> 16), dim=1).reshape(-1)
    expected = (halves >= 16384).float() * (65536 / 49152)
    first, second = masks_at(step, (3, 7), (5, 17))
    assert torch.equal(first.reshape(-1), expected[:21])
    assert torch.equal(second.reshape(-1), expected[24 : 24 + 85])  # the second draw starts at a fresh block


def test_masks_differ_between_steps_seeds_and_draws():
    first, second = masks_at(1, (64, 64), (64, 64))
    others = [second, *masks_at(2, (64, 64)), *masks_at(1, (64, 64), seed=10)]
    assert all(not torch.equal(first, other) for other in others)


def test_masks_keep_the_mean():
    """n = 2^20 numbers, p = 0.1, seed 9: the fraction dropped lies within 5 standard deviations (1.5e-3) of
    6554/65536; a fair generator fails with probability 6e-7, and this one always gives the same numbers."""
    (factors,) = masks_at(3, (1 << 20,), probability=0.1)
    dropped = float((factors == 0).double().mean())
    assert abs(dropped - 6554 / 65536) < 5 * math.sqrt(0.1 * 0.9 / (1 << 20))
    assert set(factors.unique().tolist()) == {0.0, float(torch.tensor(65536 / (65536 - 6554), dtype=torch.float32))}


@pytest.mark.parametrize("probability", [-0.1, 1.0])
def test_impossible_dropout_is_refused(probability):
    with pytest.raises(CallerError, match="dropout probability"):
        MaskStream(probability)


def test_evaluation_draws_no_masks_and_counts_no_pass(small_gpt2):
    model = small_gpt2.build()
    initialise(model, 4)
    tokens = torch.arange(8).unsqueeze(0)
    model.eval()
    assert torch.equal(model(tokens), model(tokens))
    assert model.masks.passes == 0
    model.train()
    assert not torch.equal(model(tokens), model(tokens))
    assert model.masks.passes == 2


@pytest.mark.parametrize("mode", ["exact", "rounded"])
def test_dropout_in_the_middle_of_a_run_is_that_of_the_whole_run(small_gpt2, mode):
    """Nothing outside the state counts: torch's generator is moved in between, and a checkpoint is enough."""
    task = Task.for_preset(small_gpt2.name, seed=4, steps=3, batch_size=2, numerics=mode)
    whole, states, logs = DerivedSteps(task), [], []
    for number in range(3):
        torch.manual_seed(number)
        session, _ = whole.take_under(partial(numerics.recording, mode))
        logs.append(session.log)
        states.append({name: tensor.clone() for name, tensor in whole.training.memory.export().items()})
    assert [int(state["buffer/masks.passes"]) for state in states] == [1, 2, 3]

    def ends(passes: int, control):
        """The third step, from the second one's state."""
        part = DerivedSteps(task)
        for _ in range(2):
            part.take_under(partial(numerics.recording, "native"))
        torch.manual_seed(99)
        part.training.memory.load(states[1])
        part.training.memory.tensors["buffer", "masks.passes"].fill_(passes)
        part.take_under(control)
        return part.training.memory.digest()

    assert ends(2, partial(numerics.replaying, mode, logs[2])) == whole.training.memory.digest()
    # The test of the test: with another step's masks the bits are others.
    assert ends(5, partial(numerics.recording, mode)) != whole.training.memory.digest()


class EachAlone:
    """Executes each operator of a step once more as a referee does: from its inputs and nothing else."""

    def __init__(self) -> None:
        self.differing: list[Any] = []
        self.count = 0

    def before(self, index, func, args, kwargs):
        self._inputs = copy.deepcopy(tree_map(lambda value: value.detach() if is_tensor(value) else value, args))
        self._options = dict(kwargs)

    def after(self, index, func, args, kwargs, out):
        if "empty" in str(func):
            return
        torch.manual_seed(index)
        again = numerics.execute("exact", str(func), self._inputs, self._options, entries=None)
        pairs = zip(tree_leaves((out, args)), tree_leaves((again, self._inputs)), strict=True)
        self.count += 1
        if not all(torch.equal(ours, theirs) for ours, theirs in pairs if is_tensor(ours)):
            self.differing.append(str(func))


def test_each_operator_of_a_step_with_dropout_is_a_function_of_its_inputs(small_gpt2):
    task = Task.for_preset(small_gpt2.name, seed=4, steps=1, batch_size=2, numerics="exact")
    observer = EachAlone()
    DerivedSteps(task).take_under(partial(numerics.recording, "exact", observer=observer))
    assert observer.count > 1000
    assert observer.differing == []


def test_torch_dropout_is_no_function_of_its_inputs():
    """Why the presets have their own; and the test above would see it."""
    observer = EachAlone()
    with numerics.recording("exact", observer=observer):
        torch.nn.functional.dropout(torch.ones(64), 0.5)
    assert "aten.bernoulli_.float" in observer.differing


@pytest.mark.parametrize("mode", ["exact", "rounded", "rounded-probabilistic", "native"])
@pytest.mark.parametrize("name", ["llama-small", "small-gpt2", "digits-cnn"])
def test_declaration_and_program_derived_without_arithmetic_are_those_of_the_run(small_gpt2, make_run, name, mode):
    options = {"warmup": 2} if name == "digits-cnn" else {}
    recorded = make_run(preset=name, steps=2, batch_size=2, numerics=mode, **options)
    run = RunFolder(recorded.run, SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(recorded.run))).verifying)
    derived = derive(run.task)
    assert run.declared == derived.declaration
    assert {execution_of(leaf).program for leaf in run.load_steps()[0][1:]} == {derived.program.digest}
    assert run.program(derived.program.digest).encoded == derived.program.encoded
    assert run.load_steps()[0][0].state == initial_state(run.task)


@pytest.mark.parametrize("mode", ["exact", "rounded"])
def test_llama_small_trains_to_the_same_bits_on_another_kernel_family(make_run, devices, mode):
    recorded = make_run(preset="llama-small", steps=3, checkpoint_every=3, numerics=mode, batch_size=2)
    settings = Settings(samples=3, seed="x", devices=("sse41",))
    verdict = inspect([recorded.run], recorded.trust, settings, now=recorded.now, worker=devices.run)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    (replay,) = verdict.evidence["replays"]
    assert replay["equal"]
    assert replay["steps"] == 3
    trained_on = verdict.evidence["runs"][0]["training_device"]["fingerprint"]
    assert replay["fingerprint"] != trained_on


def test_resnet50_takes_an_exact_step():
    """One sample: each weight changes and stays finite."""
    task = Task.for_preset("resnet50-cifar", seed=1, steps=1, batch_size=1, numerics="exact")
    steps = DerivedSteps(task)
    before = {name: tensor.clone() for name, tensor in steps.training.memory.export().items()}
    _, loss = steps.take_under(partial(numerics.recording, "exact"))
    assert math.isfinite(loss_of(loss))
    for name, tensor in steps.training.memory.export().items():
        if name.startswith("weight/"):
            assert tensor.isfinite().all(), name
            assert not torch.equal(tensor, before[name]), name
