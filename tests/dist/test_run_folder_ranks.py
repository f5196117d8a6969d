"""A run folder of several ranks: rank 0 holds it, and what refuses it refuses every rank."""

import json
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import torch

from sfumato.config.dit import TrainDitConfig
from sfumato.config.load import load_config
from sfumato.errors import ConfigError, FolderError
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.tracking.lock import NAME, lock_folder, process_birth
from sfumato.tracking.run import start_run


def start(folder: Path, lr_of_rank_1: float = 1e-4) -> tuple[str, list[str]]:
    """What a rank is told, and the files that it sees while the run is at work."""
    mesh = Mesh(Layout(dp_shard=2), torch.device("cpu"), torch.distributed.get_rank())
    lr = lr_of_rank_1 if mesh.rank else 1e-4
    train = {"output_dir": str(folder / "run"), "trackers": [], "device": "cpu", "lr": lr}
    settings = {"model": {"model_path": "unused"}, "data": {"data_type": "glyphs"}, "train": train}
    try:
        run = start_run(load_config(TrainDitConfig, overrides=settings), mesh, "test")
        run.begin(1, 0, [])
    except (ConfigError, FolderError) as error:
        return str(error), []
    mesh.barrier()
    result = sorted(path.name for path in (folder / "run").iterdir())
    mesh.barrier()
    run.finish()
    return "", result


def test_rank_0_holds_the_folder_of_all(ranks, tmp_path):
    for text, names in ranks.run(2, start, tmp_path):
        assert text == "" and NAME in names and "config.yaml" in names
    assert not (tmp_path / "run" / NAME).exists()


def test_ranks_with_other_settings_are_refused(ranks, tmp_path):
    told = [text for text, _ in ranks.run(2, start, tmp_path, 5e-4)]
    assert "train.lr (0.0001 on rank 0, 0.0005 on rank 1, " in told[0] and told == [told[0]] * 2
    assert list(tmp_path.iterdir()) == []


def test_every_rank_is_refused_what_another_run_holds(ranks, tmp_path):
    with subprocess.Popen(["sleep", "60"]) as other:
        lock = lock_folder(tmp_path / "run", print)
        lock.abandon()
        holder = replace(lock.owner, pid=other.pid, born=process_birth(other.pid))
        (tmp_path / "run" / NAME).write_text(json.dumps(asdict(holder)))
        told = [text for text, _ in ranks.run(2, start, tmp_path)]
        other.kill()
    assert f"in use by another run (process {other.pid} on " in told[0] and told == [told[0]] * 2
    assert [path.name for path in (tmp_path / "run").iterdir()] == [NAME]
