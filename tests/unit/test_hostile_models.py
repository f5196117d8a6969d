"""Folders of models that would run a program when they are loaded."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sfumato.config.sections import ModelConfig
from sfumato.config.text import LanguageModelConfig
from sfumato.errors import ConfigError, DataError, UserError
from sfumato.models.diffusion.load import build_diffusion_model, family_of
from sfumato.models.language.load import read_model_config
from sfumato.rewards.convert import convert
from sfumato.rewards.networks.folder import load_model
from tests.tiny import write_tiny_pipeline
from tests.tiny_reward_models import write_clip


class Harm:
    """What a pickle of it does when it is loaded: it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.mark), "w")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_pipeline(tmp_path_factory.mktemp("models") / "pipeline")


@pytest.fixture
def pipeline(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "pipeline"))


def pickled(folder: Path, name: str, mark: Path) -> Path:
    """Puts a pickle that makes ``mark`` in the place of a folder's weights."""
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / name).write_bytes(pickle.dumps(Harm(mark), protocol=2))
    return folder / name


PLACES = [
    ("text_encoder", "pytorch_model.bin", "model.safetensors"),
    ("text_encoder", "model.ckpt", "model.safetensors"),
    ("transformer", "diffusion_pytorch_model.bin", "diffusion_pytorch_model.safetensors"),
    ("vae", "diffusion_pytorch_model.bin", "diffusion_pytorch_model.safetensors"),
]


@pytest.mark.parametrize(("part", "name", "target"), PLACES)
def test_pickles_of_a_pipeline_are_refused_with_what_converts_them(
    pipeline: Path, tmp_path: Path, part: str, name: str, target: str
) -> None:
    path = pickled(pipeline / part, name, tmp_path / "mark")
    with pytest.raises(ConfigError) as caught:
        build_diffusion_model(ModelConfig(model_path=str(pipeline)))
    assert str(caught.value) == (
        f"model.model_path: {path} is not read, since it may run a program; only safetensors files are: take those of "
        f"the model, or make them: python -m sfumato.rewards.convert weights {path} {path.with_name(target)}"
    )
    assert not (tmp_path / "mark").exists()
    with pytest.raises(DataError, match="more than weights, which is not executed"):
        convert("weights", path, path.with_name(target))
    assert not (tmp_path / "mark").exists()
    pickle.loads(path.read_bytes())  # so it would have run
    assert (tmp_path / "mark").exists()


def test_pickles_in_several_files_are_refused_and_what_is_named_converts_them(pipeline: Path, tmp_path: Path) -> None:
    folder = pipeline / "text_encoder"
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {"pytorch_model-00001-of-00002.bin": names[::2], "pytorch_model-00002-of-00002.bin": names[1::2]}
    for shard, keys in shards.items():
        torch.save({key: weights[key] for key in keys}, folder / shard)
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {key: shard for shard, keys in shards.items() for key in keys}}))
    command = f"python -m sfumato.rewards.convert weights {index} {folder / 'model.safetensors'}"
    with pytest.raises(ConfigError, match=command):
        family_of(ModelConfig(model_path=str(pipeline)))
    convert("weights", index, folder / "model.safetensors")
    torch.testing.assert_close(load_file(folder / "model.safetensors"), weights)
    build_diffusion_model(ModelConfig(model_path=str(pipeline)))


def test_code_that_a_pipeline_brings_does_not_run(pipeline: Path, tmp_path: Path) -> None:
    (pipeline / "text_encoder" / "own.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\nclass Encoder: pass\n")
    path = pipeline / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"text_encoder": ["own", "Encoder"]}))
    with pytest.raises(ConfigError, match=r"own\.py is Python code that the pipeline would run: remove it"):
        build_diffusion_model(ModelConfig(model_path=str(pipeline)))
    assert not (tmp_path / "mark").exists()


def test_a_part_outside_of_the_folder_is_refused(pipeline: Path, tmp_path: Path) -> None:
    path = pipeline / "model_index.json"
    shutil.copytree(pipeline / "text_encoder", tmp_path / "elsewhere")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"../elsewhere": ["transformers", "CLIPTextModel"]}))
    with pytest.raises(ConfigError, match=r"names '\.\./elsewhere', which lies outside of it"):
        family_of(ModelConfig(model_path=str(pipeline)))


@pytest.mark.parametrize("shard", ["../evil.safetensors", "/evil.safetensors", "evil.bin", 3])
def test_an_index_names_only_safetensors_files_beside_it(pipeline: Path, shard: object) -> None:
    index = pipeline / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": shard}}))
    with pytest.raises(ConfigError, match=r"safetensors\.index\.json (names '(\.\./|/)?evil|is not an index)"):
        family_of(ModelConfig(model_path=str(pipeline)))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_language_models_and_reward_models_are_held_to_the_same(tmp_path: Path, name: str) -> None:
    from transformers import AutoModel

    folder = write_clip(tmp_path / "model")
    path = pickled(folder, name, tmp_path / "mark")
    with pytest.raises(UserError, match=f"{name} is not read, since it may run a program; .*convert weights {path}"):
        read_model_config(LanguageModelConfig(model_path=str(folder)))
    with pytest.raises(UserError, match=f"{name} is not read, since it may run a program; .*convert weights {path}"):
        load_model(AutoModel, folder, torch.float32, torch.device("cpu"))
    assert not (tmp_path / "mark").exists()


def test_weights_that_are_safetensors_are_read_beside_pickles(pipeline: Path, tmp_path: Path) -> None:
    (pipeline / "text_encoder" / "pytorch_model.bin").write_bytes(pickle.dumps(Harm(tmp_path / "mark")))
    build_diffusion_model(ModelConfig(model_path=str(pipeline)))
    assert not (tmp_path / "mark").exists()
