"""Families, objectives, advantages, rewards and formats in a user's own files; nothing else is edited."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import yaml

from sfumato.algorithms.advantages import Advantages, GroupAdvantage
from sfumato.config.load import merge
from sfumato.config.sections import LoraConfig, ModelConfig, TrainConfig
from sfumato.errors import ConfigError
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.models.diffusion.load import build_diffusion_model, find_families
from sfumato.models.estimate.memory_plan import plan_memory
from sfumato.models.estimate.meta_models import diffusion_model_on_meta, plan_diffusion_model
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.tracking.json_lines import read_jsonl
from sfumato.tracking.run import Run
from tests.tiny import ROOT, run_task_here, tiny_dit_config, tiny_rl_config, tiny_text_config, write_config

EXAMPLES = ROOT / "docs" / "examples"
FAMILY, OBJECTIVE = "pixel_mixer:PixelMixerFamily", "reinforce:Reinforce"


@pytest.fixture(autouse=True, scope="module")
def on_the_path() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        patch.setattr(Run, "write_report", lambda run, **_: None)
        yield


def config_of(folder: Path, **overrides: Any) -> dict[str, Any]:
    """Two iterations of the family and the objective of the examples, with all weights from scratch."""
    description = write_config({"pipeline": "PixelMixerPipeline", "transformer": {"width": 16}}, folder / "mixer.yaml")
    config = tiny_rl_config(
        folder,
        rollout={"height": 8, "width": 8},
        train={"max_steps": 2, "global_batch_size": None},
        eval={"every_steps": 2, "num_prompts": 1},
    )
    config["model"] = {"config_path": str(description), "family": FAMILY}
    config["algorithm"] |= {"objective": {"type": OBJECTIVE}}
    return merge(config, overrides)


def velocity(model: DiffusionModel) -> torch.Tensor:
    latents = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model.predict_velocity(latents, torch.tensor([0.9, 0.3]), model.encode_prompts(["AB", "C"]))


@pytest.fixture(scope="module")
def trained(on_the_path: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder after two iterations."""
    return run_task_here("rl_diffusion", config_of(tmp_path_factory.mktemp("trained")))


def test_two_iterations_of_both(trained: Path) -> None:
    lines = read_jsonl(trained / "metrics.jsonl")[1:]
    assert [line["updates"] for line in lines] == [1, 1]
    for line in lines:
        assert all(math.isfinite(value) for value in line.values()) and line["grad_norm"] > 0
        assert line["ratio/replay_error"] == line["reinforce/log_ratio"] == 0
    family = sys.modules["pixel_mixer"].PixelMixerFamily
    before = family(family.build({"pipeline": "PixelMixerPipeline", "transformer": {"width": 16}}, seed=42))
    after = family(family.pipeline_type().from_pretrained(trained / "hf_ckpt"))
    assert (velocity(after) - velocity(before)).abs().max() > 1e-4
    assert "PixelMixerPipeline" not in find_families(), "it is not part of the package"


def test_its_folder_trains_again_with_adapters(trained: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    config["model"] = {"model_path": str(trained / "hf_ckpt"), "family": FAMILY, "lora": {"rank": 2, "alpha": 4}}
    run = run_task_here("rl_diffusion", config)
    stored_config = yaml.safe_load((run / "config.yaml").read_text())
    assert stored_config["algorithm"]["objective"]["type"] == OBJECTIVE and stored_config["model"]["family"] == FAMILY
    family = sys.modules["pixel_mixer"].PixelMixerFamily
    pipeline = family.pipeline_type().from_pretrained(trained / "hf_ckpt")
    base = velocity(family(pipeline))
    pipeline.load_lora_weights(run / "hf_ckpt")
    assert (velocity(family(pipeline)) - base).abs().max() > 1e-5


@dataclass(frozen=True)
class Ranked(GroupAdvantage):
    """An advantage of one's own: places within the group instead of rewards."""

    type: ClassVar[str] = "ranked"

    def compute(self, rewards: torch.Tensor, group_ids: torch.Tensor, *further: Any) -> Advantages:
        places = [
            (rewards[group_ids == group] < reward).sum() for reward, group in zip(rewards, group_ids, strict=True)
        ]
        return super().compute(torch.stack(places).double(), group_ids, *further)


def test_a_part_of_each_kind_is_named_by_import_path_and_they_go_together(tmp_path: Path) -> None:
    """A family, an objective, an advantage and a reward in one run, and a format of text in another, side by side."""
    reward, advantage = "tests.dist.rewards:CoarseBrightness", f"{__name__}:Ranked"
    parts = {"reward": {"rewards": [{"type": reward}]}, "algorithm": {"advantage": {"type": advantage}}}
    (tmp_path / "pictures").mkdir()
    run = run_task_here("rl_diffusion", config_of(tmp_path / "pictures", **parts))
    line = read_jsonl(run / "metrics.jsonl")[-1]
    assert line["grad_norm"] > 0 and "reinforce/log_ratio" in line and 0 < line["advantage/abs_mean"] < 3
    stored_config = yaml.safe_load((run / "config.yaml").read_text())
    algorithm = stored_config["algorithm"]
    named = algorithm["objective"], algorithm["advantage"], stored_config["reward"]["rewards"][0]
    assert [part["type"] for part in named] == [OBJECTIVE, advantage, reward]
    assert stored_config["model"]["family"] == FAMILY

    rows = [{"question": f"{number} + 1", "answer": str(number + 1)} for number in range(9)]
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = {"data_type": "tests.question_answer:QuestionAnswer", "synthetic": None}
    data |= {"train_path": str(path), "eval_path": str(path)}
    run = run_task_here("train_text", tiny_text_config(tmp_path / "text", data=data, train={"max_steps": 2}))
    assert all(line["loss"] > 0 for line in read_jsonl(run / "metrics.jsonl") if line["step"])


def test_supervised_training_takes_it(trained: Path, tmp_path: Path) -> None:
    config = tiny_dit_config(tmp_path, train={"max_steps": 2}, data={"height": 8, "width": 8})
    config["model"] = {"model_path": str(trained / "hf_ckpt"), "family": FAMILY}
    run = run_task_here("train_dit", config)
    assert all(line["loss"] > 0 and line["grad_norm"] > 0 for line in read_jsonl(run / "metrics.jsonl"))
    assert (run / "hf_ckpt" / "transformer").is_dir()


def test_the_other_ways_to_build_it(trained: Path) -> None:
    config = ModelConfig(model_path=str(trained / "hf_ckpt"), family=FAMILY)
    whole, train = build_diffusion_model(config), TrainConfig(output_dir=str(trained))
    later = build_diffusion_model(config, init_device="meta")
    assert all(parameter.is_meta for parameter in later.denoiser.parameters())
    later.parallelize(Mesh(Layout(), torch.device("cpu")), train)
    assert torch.equal(velocity(later), velocity(whole))
    (memory,) = plan_memory(plan_diffusion_model(diffusion_model_on_meta(config, "no"), Layout(), 2, (8, 8)), train, 1)
    assert memory.parts["weights"] == sum(parameter.nbytes for parameter in whole.denoiser.parameters())
    with_adapters = build_diffusion_model(config.model_copy(update={"lora": LoraConfig(rank=2)}))
    assert torch.equal(velocity(with_adapters), velocity(whole))


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (None, r"'PixelMixerPipeline' is not known; known: .*model\.family: my_module:MyFamily"),
        ("pixel_mixers:PixelMixerFamily", r"model\.family pixel_mixers:.*No module named 'pixel_mixers'.*PYTHONPATH"),
        ("pixel_mixer:PixelMixr", r"has no attribute 'PixelMixr'"),
        ("pixel_mixer", r"Give module:Class"),
        ("pixel_mixer:PixelMixer", r"not a subclass of DiffusionModel"),
        ("sfumato.models.diffusion.base:DiffusionModel", r"not a subclass of DiffusionModel with all"),
        (
            "sfumato.models.diffusion.families.sd3:StableDiffusion3",
            r"is for pipeline class 'StableDiffusion3Pipeline', not",
        ),
    ],
)
def test_families_that_cannot_be(family: str | None, message: str, tmp_path: Path) -> None:
    config = config_of(tmp_path)["model"]
    with pytest.raises(ConfigError, match=message):
        build_diffusion_model(ModelConfig(**{**config, "family": family}))


@pytest.mark.parametrize(("page", "file"), [("model_families", "pixel_mixer"), ("rl_diffusion", "reinforce")])
def test_the_pages_show_these_files(page: str, file: str) -> None:
    assert f"(examples/{file}.py)" in (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    assert (EXAMPLES / f"{file}.py").is_file()
