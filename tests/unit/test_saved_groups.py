"""``eval.num_saved_groups``: how many groups of training samples a step's folder has, of all ranks."""

import pytest

from sfumato.config.diffusion_rl import TrajectoryRLConfig
from sfumato.config.load import load_config
from sfumato.errors import ConfigError
from sfumato.tracking.samples import read_samples
from tests.tiny import run_task_here, run_task_process, tiny_rl_config, write_config


def saved_groups(run, step):
    groups: dict[int, int] = {}
    for row in read_samples(run)[step]:
        if row["kind"] == "train":
            groups[row["group_id"]] = groups.get(row["group_id"], 0) + 1
    return groups


@pytest.mark.parametrize(("count", "groups"), [(0, {}), (3, {0: 4, 1: 4, 2: 4})])
def test_as_many_whole_groups_as_were_asked_for(tmp_path, count, groups):
    settings = {"train": {"max_steps": 1}, "eval": {"num_saved_groups": count}}
    assert saved_groups(run_task_here("rl_diffusion", tiny_rl_config(tmp_path, **settings)), 1) == groups


@pytest.mark.slow
def test_groups_of_other_ranks_follow_those_of_the_first(tmp_path):
    settings = {"train": {"max_steps": 1}, "eval": {"num_saved_groups": 3}}
    config = write_config(tiny_rl_config(tmp_path, **settings), tmp_path / "run.yaml")
    result = run_task_process("rl_diffusion", config, num_processes=2)
    assert result.returncode == 0, result.output
    assert saved_groups(result.output_dir, 1) == {0: 4, 1: 4, 2: 4}  # two of each rank there are


def test_more_groups_than_there_are(tmp_path):
    with pytest.raises(ConfigError, match=r"eval\.num_saved_groups 5: an iteration has rollout\.num_prompts 4 groups"):
        load_config(TrajectoryRLConfig, overrides=tiny_rl_config(tmp_path, eval={"num_saved_groups": 5}))
