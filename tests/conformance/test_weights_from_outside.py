"""A module starts from weights on the disk, in each rank's shards, as transformers reads them on one device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_autoparallel import load_weights
from lightning_autoparallel.cli.main import main
from lightning_autoparallel.errors import CheckpointError, ConfigError
from lightning_autoparallel.models import Llama3Module
from tests.conformance.outside import (
    OVERRIDES,
    SHAPE,
    Ours,
    Sgd,
    Started,
    Theirs,
    changed,
    run,
    saved_llama,
    weights_of,
)
from tests.conformance.saved import MESHES, Place
from tests.distributed.jobs import make_trainer
from tests.numerics.training import full
from tests.support.tiers import tiered
from tests.support.worlds import Worlds

pytestmark = pytest.mark.conformance

LARGEST = SHAPE["vocab_size"] * SHAPE["hidden_size"]
PLACES = [Place("1"), Place("2"), Place("2", "ddp"), Place("tp", "rules"), Place("2xtp", "rules"), Place("2x2", "hsdp")]


def shown(value: Any) -> str:
    return getattr(value, "__name__", str(value))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    """The same weights in every form that a module starts from."""
    base = tmp_path_factory.mktemp("outside")
    found = {"folder": saved_llama(base / "llama"), "tied": saved_llama(base / "tied", tied=True)}
    found["imported file"], found["imported shards"] = str(base / "llama.ckpt"), str(base / "llama.dir")
    assert main(["import-hf", found["folder"], found["imported file"]]) == 0
    assert main(["import-hf", found["folder"], found["imported shards"], "--kind", "folder"]) == 0
    assert Path(found["imported shards"]).is_dir()
    return found


def tensors_of(folder: str) -> dict[str, Tensor]:
    """What lies in a folder's files."""
    return {key: value for file in Path(folder).glob("*.safetensors") for key, value in load_file(file).items()}


def everywhere(worlds: Worlds, kind: type[Sgd], place: Place, *args: Any, **options: Any) -> list[Started]:
    return worlds(place.ranks).run(_run, kind, place, args, options)


def _run(kind: type[Sgd], place: Place, args: tuple[Any, ...], options: dict[str, Any]) -> Started:
    return run(kind, place.mesh, *args, plan=place.plan, **options)


FORMS: dict[type[Sgd], list[str]] = {Ours: ["folder", "imported file", "imported shards"], Theirs: ["folder"]}
LOADED = [(kind, place, form) for kind, forms in FORMS.items() for place in PLACES for form in forms]
QUICK = {
    (Ours, Place("2xtp", "rules"), "folder"),
    (Ours, Place("2"), "imported shards"),
    (Theirs, Place("2"), "folder"),
}


@pytest.mark.parametrize(("kind", "place", "form"), tiered(LOADED, QUICK.__contains__), ids=shown)
def test_shards_are_read_and_nothing_is_whole(kind, place, form, folders, worlds: Worlds) -> None:
    expected = tensors_of(folders["folder"])
    cut = 1 if place.plan == "ddp" else min(2, place.ranks) if place.plan == "hsdp" else place.ranks
    for started in everywhere(worlds, kind, place, folders[form], fits=0):
        assert started.error == ""
        torch.testing.assert_close(weights_of(started, kind), expected, rtol=0, atol=0)
        # the embedding is cut by dp only; stored shards are whole tensors that are read one by one
        rows = MESHES[place.mesh].get("dp_shard", 1) if place.plan == "rules" else cut
        assert form == "imported shards" or started.largest <= LARGEST // rows, started.largest


TRAINED = [(kind, place, tied) for kind in (Ours, Theirs) for place in PLACES for tied in (False, True)]


@pytest.mark.parametrize(
    ("kind", "place", "tied"),
    tiered(TRAINED, lambda _: False),  # the recipe below trains in the default tier
    ids=shown,
)
def test_trains_as_transformers_does_on_one_device(kind, place, tied, folders, worlds: Worlds) -> None:
    """Tied embeddings, and buffers that no file holds."""
    folder = folders["tied" if tied else "folder"]
    expected = run(Theirs, None, folder, by_transformers=True)
    for started in everywhere(worlds, kind, place, folder, tied=tied):
        assert started.error == ""
        torch.testing.assert_close(started.losses, expected.losses, rtol=1e-5, atol=0)
        torch.testing.assert_close(weights_of(started, kind), weights_of(expected, Theirs), rtol=0, atol=1e-5)
        if kind is Theirs:
            torch.testing.assert_close(started.buffers, expected.buffers, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [Ours, Theirs])
def test_without_the_strategy(kind, folders) -> None:
    """On one device, and files are read once: a second fit goes on."""
    expected = run(Theirs, None, folders["folder"], fits=2, by_transformers=True)
    started = run(kind, None, folders["folder"], fits=2)
    torch.testing.assert_close(started.losses, expected.losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(weights_of(started, kind), weights_of(expected, Theirs), rtol=0, atol=1e-5)


@pytest.mark.matrix
def test_a_second_fit_goes_on(folders, worlds: Worlds) -> None:
    expected = run(Theirs, None, folders["folder"], fits=2, by_transformers=True)
    for started in worlds(2).run(run_twice, folders["folder"]):
        torch.testing.assert_close(started.losses, expected.losses, rtol=1e-5, atol=0)


def run_twice(folder: str) -> Started:
    return run(Ours, "2", folder, fits=2)


def test_exported_again(folders, tmp_path: Path) -> None:
    """Through either form, in several files; what transformers reads has the same logits to the bit."""
    from transformers import AutoModelForCausalLM

    tokens = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folders["folder"])(tokens).logits
    for form in ("imported file", "imported shards"):
        folder = tmp_path / form
        assert (
            main(["export-hf", folders[form], str(folder), "--file-gb", "2e-5", "--files-from", folders["folder"]]) == 0
        )
        assert len(list(folder.glob("*.safetensors"))) > 2
        exported = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            torch.testing.assert_close(exported(tokens).logits, expected, rtol=0, atol=0)
    module = Llama3Module.load_from_checkpoint(folders["imported file"])
    with torch.no_grad():
        torch.testing.assert_close(module(tokens), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_training_is_exported(tied: bool, folders, tmp_path: Path) -> None:
    """With the dtype asked for, in one file, and from what a Trainer saved, optimizer and all."""
    from transformers import AutoModelForCausalLM

    folder = folders["tied" if tied else "folder"]
    module = Ours(folder, tied)
    trainer = make_trainer(None, 1, max_steps=1, limit_val_batches=0)
    trainer.fit(module, module.loader(0, 1))
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    assert main(["export-hf", str(tmp_path / "run.ckpt"), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert exported.dtype == torch.bfloat16
    tokens = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(exported.float()(tokens).logits, module(tokens), rtol=0, atol=0.05)


def test_dtypes_are_those_of_the_module(folders, tmp_path: Path) -> None:
    half = {name: value.bfloat16() for name, value in tensors_of(folders["folder"]).items()}
    save_file(half, tmp_path / "model.safetensors")
    changed_config = json.loads((Path(folders["folder"]) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(changed_config))
    for kind in (Ours, Theirs):
        started = run(kind, None, str(tmp_path), fits=0)
        expected = {name: value.float() for name, value in half.items()}
        torch.testing.assert_close(weights_of(started, kind), expected, rtol=0, atol=0)


def validated(path: str) -> Started:
    return run(Ours, "2", None, fits=0, ckpt_path=path)


@pytest.mark.parametrize("form", ["imported file", "imported shards"])
def test_what_was_imported_is_a_checkpoint(form, folders, worlds: Worlds) -> None:
    expected = tensors_of(folders["folder"])
    for started in worlds(2).run(validated, folders[form]):
        torch.testing.assert_close(weights_of(started, Ours), expected, rtol=0, atol=0)


def in_half(folder: str) -> Started:
    return run(Theirs, "2", folder, fits=0, precision="bf16-true")


def test_shards_of_another_precision(folders, worlds: Worlds) -> None:
    expected = {name: value.bfloat16() for name, value in tensors_of(folders["folder"]).items()}
    for started in worlds(2).run(in_half, folders["folder"]):
        torch.testing.assert_close(weights_of(started, Theirs), expected, rtol=0, atol=0)


def sharded_by_torch(folder: str) -> tuple[dict[str, Tensor], list[tuple[int, ...]]]:
    """Weights in a module on meta that `fully_shard` has cut, and the shapes of this rank's shards."""
    module = nn.ModuleDict({"net": llama_on_meta(folder)})
    fully_shard(module["net"], mesh=init_device_mesh("cpu", (2,)))
    load_weights(module, folder, into="net")
    shapes = [tuple(parameter.to_local().shape) for parameter in module.parameters()]
    return {name: full(parameter) for name, parameter in module["net"].named_parameters()}, shapes


def llama_on_meta(folder: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


def test_shards_of_another_strategy(folders, worlds: Worlds) -> None:
    expected = tensors_of(folders["folder"])
    for weights, shapes in worlds(2).run(sharded_by_torch, folders["folder"]):
        torch.testing.assert_close(weights, expected, rtol=0, atol=0)
        assert shapes == [(len(weight) // 2, *weight.shape[1:]) for weight in weights.values()]


# -- what does not fit -----------------------------------------------------------------------------------------------


def configure(folder: str) -> str:
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        Ours(folder).configure_model()
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"vocab_size": 65, "rms_norm_eps": 1e-6}, "vocab_size is 65 there and 64 in the module; norm_eps is 1e-06"),
        ({"intermediate_size": 49}, "ffn_dim is 49 there and 48 in the module"),
        ({"tie_word_embeddings": True}, "tie_embeddings is True there and False in the module"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_scaling is False there and True"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
            "no network that Llama3 computes: rope_type='yarn'",
        ),
        ({"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"type": "linear"}}, "rope_type='linear'"),
        ({"attention_bias": True, "hidden_act": "gelu"}, "hidden_act='gelu', attention_bias=True"),
        ({"head_dim": 16}, "head_dim=16"),
        ({"model_type": "qwen3"}, "model_type='qwen3'"),
        ({"hidden_size": None}, "does not describe a LLaMA: KeyError: 'hidden_size'"),
    ],
    ids=str,
)
def test_another_network_is_refused(config, said, folders, tmp_path: Path) -> None:
    assert said in configure(changed(folders["folder"], tmp_path, **config))


def test_a_config_of_transformers_4_is_read(folders, tmp_path: Path) -> None:
    rope = {**SHAPE["rope_parameters"]}
    theta = rope.pop("rope_theta")
    folder = changed(folders["folder"], tmp_path, rope_parameters=None, rope_theta=theta, rope_scaling=rope)
    Ours(folder).configure_model()


def test_tensors_that_do_not_fit_are_named(folders, tmp_path: Path) -> None:
    tensors = tensors_of(folders["folder"])
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.ones(3)
    tensors["lm_head.weight"] = torch.ones(64, 31)
    tensors["model.norm.weight"] = torch.ones(32).to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((Path(folders["folder"]) / "config.json").read_bytes())
    said = configure(str(tmp_path))
    assert said.startswith(
        f"{tmp_path} does not fit the submodule 'model': it has no model.layers.1.mlp.up_proj.weight;"
    )
    assert "it has model.layers.2.mlp.up_proj.weight, which the module has not" in said
    assert "lm_head.weight has shape (64, 31), (64, 32) in the module" in said
    assert "model.norm.weight is stored as F8_E4M3, which is not converted to torch.float32" in said
    assert main(["import-hf", str(tmp_path), str(tmp_path / "out")]) == 1
    assert not (tmp_path / "out").exists()


def test_files_that_are_not_there(folders, tmp_path: Path) -> None:
    assert f"{tmp_path / 'none'} is no file" in configure(str(tmp_path / "none"))
    assert "is no checkpoint" in configure(str(tmp_path))
    folder = changed(folders["folder"], tmp_path)
    first, second, *_ = sorted(tmp_path.glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:100])
    assert f"{first} is no whole safetensors file" in configure(folder)
    second.unlink()
    assert f"names files that are not there: {second.name}" in configure(folder)
    (tmp_path / "config.json").unlink()
    assert "has no config.json" in configure(folder)


def test_without_the_package(folders, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    assert "pip install 'lightning-autoparallel[hf]'" in configure(folders["folder"])


class Lonely(Ours):
    """Whose files cannot be read on rank 1."""

    def configure_model(self):
        if dist.get_rank() == 1:
            self.weights += "-elsewhere"
        super().configure_model()


class OneSided(Ours):
    """Rank 1 starts from nothing."""

    def configure_model(self):
        if dist.get_rank() == 1:
            self.weights = None
        super().configure_model()


def alone(kind: type[Ours], folder: str) -> str:
    return run(kind, "2", folder, fits=0).error


def test_what_fails_on_one_rank_is_an_error_on_all(folders, worlds: Worlds) -> None:
    for said in worlds(2).run(alone, Lonely, folders["folder"]):
        assert said.startswith("CheckpointError: ")
        assert "-elsewhere is no file of this machine" in said
    for rank, said in enumerate(worlds(2).run(alone, OneSided, folders["folder"])):
        asked = "nothing" if rank else "['model']"
        assert said.startswith(f"CheckpointError: load_weights was called for {asked} on this rank, and for something")


# -- any module ------------------------------------------------------------------------------------------------------


class Classifier(nn.Module):
    """A network of transformers with a head that no file has."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoConfig, AutoModelForSequenceClassification

        super().__init__()
        with torch.device("meta"):
            self.net = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(folder, num_labels=3))


def test_what_files_lack_is_initialised_by_the_module(folders) -> None:
    module = Classifier(folders["folder"])
    with pytest.raises(CheckpointError, match=r"it has no score.weight; it has lm_head.weight") as caught:
        load_weights(module, folders["folder"], into="net")
    assert str(caught.value).endswith("safetensors.torch.save_model(model, FILE) after from_pretrained")
    with pytest.warns(UserWarning, match=r"has no score.weight"):
        load_weights(module, folders["folder"], into="net", strict=False)
    head = module.net.score.weight
    assert 0.01 < head.std() < 0.03  # initializer_range, not that of nn.Linear
    stored = tensors_of(folders["folder"])
    torch.testing.assert_close(module.net.model.norm.weight.data, stored["model.norm.weight"])
    assert not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def test_names_with_another_beginning(folders) -> None:
    from transformers import AutoConfig, AutoModel

    with torch.device("meta"):
        module = nn.ModuleDict({"net": AutoModel.from_config(AutoConfig.from_pretrained(folders["folder"]))})
    with pytest.raises(CheckpointError, match="Names in the files are longer: give prefix='model'"):
        load_weights(module, folders["folder"], into="net")
    load_weights(module, folders["folder"], into="net", prefix="model")
    torch.testing.assert_close(module["net"].norm.weight.data, tensors_of(folders["folder"])["model.norm.weight"])
    with pytest.raises(CheckpointError, match="into='nets' is no submodule"):
        load_weights(module, folders["folder"], into="nets")


def test_a_checkpoint_by_its_own_names(folders) -> None:
    """Names of the whole LightningModule, into a part of it."""
    module = Llama3Module("debug", OVERRIDES)
    module.configure_model()
    load_weights(module, folders["imported file"], into="model")
    other = Llama3Module.load_from_checkpoint(folders["imported file"])
    torch.testing.assert_close(dict(module.state_dict()), dict(other.state_dict()), rtol=0, atol=0)


# -- the command line ------------------------------------------------------------------------------------------------


def test_commands_on_files_are_listed(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    assert all(f"\n    {name} " in said for name in ("fit", "consolidate", "import-hf", "export-hf"))


def test_export_refuses(folders, tmp_path: Path, capsys) -> None:
    (tmp_path / "file").touch()
    assert main(["export-hf", folders["imported file"], str(tmp_path)]) == 1
    assert "is there and not empty" in capsys.readouterr().err
    torch.save({"state_dict": {"a": torch.ones(1)}}, tmp_path / "other.ckpt")
    assert main(["export-hf", str(tmp_path / "other.ckpt"), str(tmp_path / "out")]) == 1
    assert "does not say which network it holds" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.matrix
def test_planning_reads_no_weights(capsys) -> None:
    options = ["--data.init_args.seq_len", "16", "--model.init_args.weights", "nowhere"]
    assert main(["plan", "--config", "llama3/debug", "--world-size", "2", *options]) == 0
    assert "all_gather" in capsys.readouterr().out


@pytest.mark.matrix
def test_a_recipe_starts_from_a_folder(tmp_path: Path) -> None:
    """The recipe's validation loss is that of transformers on the same rows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from lightning_autoparallel.models import TextDataModule

    torch.manual_seed(0)
    sizes = {**SHAPE, "vocab_size": 256, "hidden_size": 128, "intermediate_size": 352, "max_position_embeddings": 2048}
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, "rope_parameters": rope}))
    model.save_pretrained(tmp_path / "llama", max_shard_size="400KB")
    given = {
        "trainer.devices": "1",
        "trainer.default_root_dir": str(tmp_path),
        "trainer.logger": "false",
        "trainer.callbacks": "null",
        "strategy.compile": "false",
        "data.init_args.max_bytes": "200000",
        "model.init_args.weights": str(tmp_path / "llama"),
    }
    command = [sys.executable, "-m", "lightning_autoparallel.cli.main", "validate", "--config", "llama3/debug"]
    command += [text for key, value in given.items() for text in (f"--{key}", value)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    data = TextDataModule(seq_len=128, batch_size=8, val_fraction=0.01, max_bytes=200000, seed=42)
    data.setup("validate")
    losses = []
    for batch in data.val_dataloader():
        with torch.no_grad():
            logits = model(batch["inputs"]).logits
        losses.append(nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten()))
    expected = float(torch.stack(losses).mean())
    row = next(line for line in done.stdout.splitlines() if "val_loss" in line)
    assert float(row.split("│")[2]) == pytest.approx(expected, rel=1e-5)
