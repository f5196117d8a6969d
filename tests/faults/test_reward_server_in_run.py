"""A run whose rewards come from a server that fails: it ends as if nothing had been, or it stops and can go on."""

from __future__ import annotations

import re
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from sfumato.config.load import merge
from sfumato.config.yaml_text import read_yaml
from sfumato.errors import RewardError
from sfumato.tracking.atomic_folders import list_checkpoints
from sfumato.tracking.json_lines import read_jsonl
from tests.resumed import assert_same_run
from tests.reward_servers import ServerProcess, remote_reward, start_server
from tests.tiny import ROOT, run_task_here, run_task_process, tiny_rl_config

BRIGHTNESS = [{"type": "brightness"}]


def config_of(folder: Path, reward: dict[str, Any], **train: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    return tiny_rl_config(folder, reward={"rewards": [reward]}, train={"save_steps": 2, **train})


def remote(server: ServerProcess, **fields: Any) -> dict[str, Any]:
    fields = {"retry_for_s": 90.0, "timeout_s": 200.0, "request_timeout_s": 30.0, "name": "brightness", **fields}
    return {"type": "remote", "base_urls": [server.url], "allow_private": True, **fields}


def client(fields: dict[str, Any]):
    """The reward of the same settings, which shares its counters with that of the run."""
    return remote_reward(
        *fields["base_urls"], **{k: v for k, v in fields.items() if k not in ("type", "base_urls", "allow_private")}
    )


def after_step(folder: Path, step: int, action: Any) -> threading.Thread:
    """Does something, beside the run, once the run has logged a step."""
    log = folder / "run" / "metrics.jsonl"

    def watch() -> None:
        while not (log.exists() and read_jsonl(log) and read_jsonl(log)[-1]["step"] >= step):
            time.sleep(0.002)
        action()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """The folder of a run with the same reward in its own process."""
    return run_task_here("rl_diffusion", config_of(tmp_path_factory.mktemp("local") / "of", BRIGHTNESS[0]))


def disturbed_run(folder: Path, config: dict[str, Any], served: list[dict[str, Any]], outage_s: float) -> Path:
    """A run with the reward of a server that is killed after step 2 and comes back; every retry is counted.

    Args:
        folder: ``folder/run`` is the run folder.
        config: of the run; its rewards are replaced.
        served: what the server serves.
        outage_s: how long it is away, besides the time that it takes to start.
    """
    folder.mkdir(exist_ok=True)
    server = start_server(folder, served)
    later: list[ServerProcess] = []

    def go_down() -> None:
        server.end()
        time.sleep(outage_s)
        later.append(start_server(folder, served, port=server.port))

    reward = remote(server, name=served[0]["type"])
    outage = after_step(folder, 2, go_down)
    run = run_task_here("rl_diffusion", merge(config, {"reward": {"rewards": [reward]}}))
    outage.join()
    later[0].end()
    assert client(reward).caller().counters["connection"] >= 2
    assert f"attempts that {server.url} did not answer: connection (" in (run / "log.txt").read_text()
    return run


@pytest.mark.slow
def test_a_server_that_is_down_for_a_while_changes_no_bit_of_the_run(tmp_path: Path, undisturbed: Path) -> None:
    disturbed = disturbed_run(tmp_path, config_of(tmp_path, BRIGHTNESS[0]), BRIGHTNESS, outage_s=3)
    assert_same_run(disturbed, undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_outage_of_20_seconds_changes_no_bit_of_the_quickstart(tmp_path: Path) -> None:
    """Its three steps, shortened: the images need not be good, but the rewards must differ."""
    configs = Path(shutil.copytree(ROOT / "configs" / "quickstart", tmp_path / "configs"))  # a log lies beside them
    output = {name: str(tmp_path / name) for name in ("autoencoder", "pretrain")}
    run_task_process("train_autoencoder", configs / "autoencoder.yaml", "--train.output_dir", output["autoencoder"],
                     "--train.max_steps", "150", timeout_s=900)  # fmt: skip
    run_task_process("train_dit", configs / "pretrain.yaml", "--train.output_dir", output["pretrain"],
                     "--model.model_path", f"{output['autoencoder']}/hf_ckpt", "--data.cache_dir", f"{tmp_path}/cache",
                     "--train.max_steps", "200", "--sample.every_steps", "200", timeout_s=900)  # fmt: skip
    config = read_yaml(configs / "rl.yaml")
    (ocr,) = config["reward"]["rewards"]

    def shortened(folder: Path) -> dict[str, Any]:
        train = {"output_dir": str(folder / "run"), "max_steps": 5, "trackers": []}
        model = {"model_path": f"{output['pretrain']}/hf_ckpt"}
        return merge(config, {"model": model, "train": train, "eval": {"every_steps": 100, "num_prompts": 16}})

    undisturbed = run_task_here("rl_diffusion", shortened(tmp_path / "local"))
    disturbed = disturbed_run(tmp_path / "remote", shortened(tmp_path / "remote"), [ocr], outage_s=20)
    lines = read_jsonl(undisturbed / "metrics.jsonl")
    assert sum(line.get("updates", 0) for line in lines) > 0, "nothing was learnt"
    assert_same_run(disturbed, undisturbed)


@pytest.mark.slow
def test_a_server_that_stays_away_stops_the_run_by_name_and_it_can_be_resumed(
    tmp_path: Path, undisturbed: Path
) -> None:
    server = start_server(tmp_path, BRIGHTNESS)
    reward = remote(server, retry_for_s=0.5)
    after_step(tmp_path / "remote", 3, server.end)
    with pytest.raises(RewardError) as caught:
        run_task_here("rl_diffusion", config_of(tmp_path / "remote", reward))
    assert caught.value.exit_code == 5
    message = str(caught.value)
    assert re.search(rf"samples have no reward, .*brightness: {server.url}: .*; tried for 0\.5 s", message), message
    (last, *_) = sorted(list_checkpoints(tmp_path / "remote" / "run" / "checkpoints"), reverse=True)
    assert last >= 3

    start_server(tmp_path, BRIGHTNESS, port=server.port)
    resumed = run_task_here("rl_diffusion", config_of(tmp_path / "remote", reward, load_checkpoint_path="auto"))
    assert_same_run(resumed, undisturbed)
