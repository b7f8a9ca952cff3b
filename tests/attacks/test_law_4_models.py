"""Law 4: the model of which a verdict speaks is the files that users load, and each name in them one tensor."""

from __future__ import annotations

import base64
import json

import pytest
import torch
from safetensors.torch import save_file

from analysis.cli import main
from firmware_sim.errors import CallerError
from firmware_sim.evidence import SigningKey
from inspector.registry.keyfiles import write_keys
from monitor import Recorder
from monitor.transcript import RunFolder
from tests.guards import off

NOW = ["--now", "2026-01-01T00:30:00Z"]
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def world(tmp_path, capsys, kept_devices):
    """How to inspect a run with a model, and to verify the bundle; each gives exit code and what was said."""
    for name in ("inspectorate", "cluster"):
        write_keys(tmp_path / name, SigningKey.generate(name.encode().ljust(32)))
    keys = ["--key", str(tmp_path / "inspectorate"), "--cluster-key", str(tmp_path / "cluster")]
    public = ["--inspectorate", str(tmp_path / "inspectorate.pub"), "--cluster", str(tmp_path / "cluster.pub")]
    (tmp_path / "model").mkdir()

    class World:
        model = tmp_path / "model"
        bundle = tmp_path / "bundle.json"

        def call(self, *words):
            capsys.readouterr()
            code = main([*map(str, words)])
            said = capsys.readouterr()
            return code, said.out + said.err

        def inspect(self, recorded):
            self.trust = tmp_path / "trust.json"
            self.trust.write_text(json.dumps(recorded.trust.to_json()))
            words = ["inspect", recorded.run, "--trust", self.trust, "--samples", 1, "--seed", "x", *NOW]
            words += ["--device", "sse41", "--bundle", self.bundle, *keys, "--model", self.model]
            return self.call(*words)

        def verify(self, *words):
            return self.call("verify", self.bundle, "--trust", self.trust, *public, "--model", self.model, *words)

        def save(self, **files):
            for name, tensors in files.items():
                save_file(tensors, self.model / f"{name}.safetensors")

    return World()


def weights_of(recorded) -> dict[str, torch.Tensor]:
    run = RunFolder(recorded.run, recorded.trust.labs["lab"])
    state = run.checkpoint(run.declared.steps)
    return {name.removeprefix("weight/"): value for name, value in state.items() if name.startswith("weight/")}


def lies(world, recorded):
    """Right tensors in files that nobody loads; what loaders take is made up. Each refusal comes before a replay."""
    weights = weights_of(recorded)
    made_up = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    world.save(model=made_up, z=weights)
    yield "one tensor a name", "is not the same in 'model.safetensors' and in 'z.safetensors'"
    world.save(model=weights)
    (world.model / "z.safetensors").unlink()
    (world.model.parent / "elsewhere").mkdir()
    save_file(made_up, world.model.parent / "elsewhere" / "pytorch_model.safetensors")
    (world.model / "loaded").symlink_to("../elsewhere")
    yield "links of models", "loaded is a link that leads out of the model"
    (world.model / "loaded").unlink()
    torch.save(made_up, world.model / "pytorch_model.bin")
    index = {"weight_map": dict.fromkeys(weights, "pytorch_model.bin")}
    (world.model / "model.safetensors.index.json").write_text(json.dumps(index))
    yield "indexes of models", "in 'pytorch_model.bin', but no compared file"


def test_a23_files_that_users_load_are_those_that_were_compared(honest, world):
    for _, text in lies(world, honest):
        code, said = world.inspect(honest)
        assert (code, said.count("\n")) == (2, 1)
        assert text in said
        assert not world.bundle.exists()


@pytest.mark.parametrize("number", range(3))
def test_a23_guard_off_a_verdict_is_about_files_that_nobody_loads(honest, world, number):
    for at, (guard, _) in enumerate(lies(world, honest)):
        if at == number:
            with off(guard):
                assert world.inspect(honest)[0] == 0


def test_a23_names_are_bound_and_what_was_not_compared_is_listed(honest, world):
    tensors = list(weights_of(honest).items())
    world.save(**{SHARDS[0][:-12]: dict(tensors[:1]), SHARDS[1][:-12]: dict(tensors[1:])})
    for name in ("pytorch_model.bin", "OTHER.SafeTensors"):
        (world.model / name).write_text("other weights")
    (world.model / ".git").mkdir()
    code, said = world.inspect(honest)
    listed = "not compared: 'OTHER.SafeTensors', 'pytorch_model.bin'; ignored: '.git'"
    assert code == 0
    assert f"[model] 'model': 2 of 4 files compared with the last state of a run; {listed}" in said
    told = json.loads(base64.b64decode(json.loads(world.bundle.read_text())["verdict"]["payload"]))
    assert told["predicate"]["evidence"]["model"]["not_compared"] == ["OTHER.SafeTensors", "pytorch_model.bin"]
    code, said = world.verify()
    assert code == 0
    assert listed in said
    assert json.loads(world.verify("--json")[1])["evidence"]["model"]["ignored"] == [".git"]

    (world.model / SHARDS[1]).rename(world.model / "not-loaded.safetensors")  # in the same order, so one digest
    code, said = world.verify()
    assert (code, "the bundle is about another model: 'model-00002-of-00002.safetensors' is missing" in said) == (
        2,
        True,
    )
    with off("files by name"):
        assert world.verify()[0] == 0


class Loop:
    """A lab that trains a linear layer, and keeps other tensors under the names of its weights."""

    def __init__(self, record_loop):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 3)
        self.made_up = {"weight": torch.ones(3, 4), "bias": torch.ones(3)}
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

        def step(model, optimizer, batch):
            model.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

        self.recorded = record_loop(self.model, optimizer, torch.ones(2, 2, 4), step, chips=1, state=self.made_up)


def test_a51_a_buffer_with_the_name_of_a_weight_is_not_recorded(record_loop):
    with pytest.raises(CallerError, match="buffer 'weight' has the name of weight 'weight'; give it another"):
        Loop(record_loop)


def test_a51_weights_come_before_buffers_of_old_runs(record_loop, world):
    with off("names of buffers"):
        loop = Loop(record_loop)
    trained = {name: tensor.detach().clone() for name, tensor in loop.model.named_parameters()}
    world.save(model=loop.made_up)
    code, said = world.inspect(loop.recorded)
    assert (code, "'bias' (float32 [3]) differs from the run's (float32 [3])" in said) == (2, True)
    with off("weights before buffers"):
        world.inspect(loop.recorded)
    assert world.bundle.exists()
    world.bundle.unlink()
    world.save(model=trained)
    with off("weights before buffers"):
        assert world.inspect(loop.recorded)[0] == 2
    world.inspect(loop.recorded)
    assert json.loads(world.verify("--json")[1])["evidence"]["verifies"]


def model_with(name: str) -> torch.nn.Module:
    model = torch.nn.Linear(4, 3)
    model.register_buffer(name, torch.zeros(2))
    return model


@pytest.mark.parametrize(
    ("model", "state", "names"),
    [
        (model_with("mean"), {"mean": torch.ones(2)}, "buffer 'mean' has the name of buffer 'mean'"),
        (
            torch.nn.Linear(4, 3),
            {"a.b": torch.ones(2), "a": {"b": torch.ones(3)}},
            "buffer 'a.b' has the name of buffer 'a.b'",
        ),
        (torch.nn.Linear(4, 3), {"a": {1: torch.ones(2), "1": torch.ones(3)}}, "buffer 'a.1' has the name of"),
        (torch.nn.Sequential(torch.nn.Linear(4, 3)), {"0": {"bias": torch.ones(3)}}, "has the name of weight '0.bias'"),
    ],
)
def test_no_two_tensors_of_a_state_have_one_name(tmp_path, model, state, names):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CallerError, match=names):
        Recorder(model, optimizer, out=tmp_path / "run", chips=1, state=state)
