"""A verdict travels with the weights: the digest of a model's files is a subject of the bundle."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from analysis.cli import main
from firmware_sim.errors import CallerError
from inspector.bundle.models import digest_of_files, read_model, subject_of_model
from inspector.registry.keyfiles import write_keys
from monitor.transcript import RunFolder
from tests.inspector.bundle.conftest import CLUSTER, INSPECTORATE

NOW = ["--now", "2026-01-01T00:30:00Z"]


@pytest.fixture
def model(honest, tmp_path):
    """The final weights of the honest run, in a folder with a configuration."""
    state = RunFolder(honest.run, honest.trust.labs["lab"]).checkpoint(6)
    folder = tmp_path / "model"
    folder.mkdir()
    weights = {name.removeprefix("weight/"): value for name, value in state.items() if name.startswith("weight/")}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def test_a_bundle_is_about_a_model(honest, model, tmp_path, capsys, kept_devices):
    for name, key in (("inspectorate.key", INSPECTORATE), ("cluster.key", CLUSTER)):
        write_keys(tmp_path / name, key)
    (tmp_path / "trust.json").write_text(json.dumps(honest.trust.to_json()))
    trust, bundle = ["--trust", str(tmp_path / "trust.json")], str(tmp_path / "bundle.json")
    words = ["inspect", str(honest.run), *trust, "--samples", "2", "--seed", "x", "--device", "sse41", *NOW]
    assert main([*words, "--model", str(model)]) == 2
    keys = ["--key", str(tmp_path / "inspectorate.key"), "--cluster-key", str(tmp_path / "cluster.key")]
    assert main([*words, *keys, "--bundle", bundle, "--model", str(model)]) == 0
    payload = json.loads(base64.b64decode(json.loads((tmp_path / "bundle.json").read_text())["verdict"]["payload"]))
    told = read_model(model).summary
    digest, files = told["sha256"], told["files"]
    assert payload["subject"][-1] == {"name": "model/model", "digest": {"sha256": digest}}
    ordered = [bytes.fromhex(files[name]) for name in ("config.json", "model.safetensors")]
    assert digest == hashlib.sha256(b"".join(ordered)).hexdigest()
    public = ["--inspectorate", str(tmp_path / "inspectorate.key.pub"), "--cluster", str(tmp_path / "cluster.key.pub")]
    verify = ["verify", bundle, *trust, *public]
    capsys.readouterr()
    assert main([*verify, "--model", str(model)]) == 0
    assert "'model' holds the weights with which a run of these ended" in capsys.readouterr().out
    assert main(verify) == 0
    (model / "config.json").write_text("{ }")
    assert main([*verify, "--model", str(model)]) == 2
    assert "the bundle is about another model: 'config.json' is another" in capsys.readouterr().err


def test_files_count_in_the_order_of_their_paths_part_by_part():
    files = {"a.b": "00" * 32, "a/b": "11" * 32}
    assert digest_of_files(files) == hashlib.sha256(bytes.fromhex(files["a/b"] + files["a.b"])).hexdigest()


def test_only_the_last_weights_of_a_run_are_its_model(honest, model, accepted):
    transcripts = accepted.case.transcripts
    assert subject_of_model(read_model(model), transcripts)["run_id"] == transcripts[0].run.manifest.run
    alone: Any = subject_of_model(read_model(model / "model.safetensors"), transcripts)
    assert alone["files"].keys() == {"."}
    state = RunFolder(honest.run, honest.trust.labs["lab"]).checkpoint(3)
    earlier = {name.removeprefix("weight/"): value for name, value in state.items() if name.startswith("weight/")}
    for tensors in (earlier, {"other": torch.zeros(2)}, dict(list(earlier.items())[:1])):
        save_file(tensors, model / "model.safetensors")
        with pytest.raises(CallerError, match="are not the weights with which a run ended"):
            subject_of_model(read_model(model), transcripts)
    (model / "model.safetensors").write_bytes(b"x")
    with pytest.raises(CallerError, match="cannot be read as a file of a model: not a JSON document"):
        read_model(model)
    shutil.rmtree(model)
    with pytest.raises(CallerError, match="No such file"):
        read_model(model)
    model.mkdir()
    with pytest.raises(CallerError, match=r"has no file whose name ends in \.safetensors"):
        read_model(model)
