"""Scripts, manifests and the image of cluster/: what they say, and that they start and stop real Ray nodes."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from tests.tiny import ROOT, tiny_text_config, write_config

CLUSTER = ROOT / "cluster"
SCRIPTS = sorted([*CLUSTER.glob("*.sh"), *CLUSTER.glob("*.sbatch")])

# Fields of the custom resource definition of KubeRay 1.5, https://ray-project.github.io/kuberay/reference/api/
FIELDS = {
    "RayJobSpec": "activeDeadlineSeconds backoffLimit rayClusterSpec submitterPodTemplate metadata clusterSelector "
    "submitterConfig managedBy deletionStrategy entrypoint runtimeEnvYAML jobId submissionMode entrypointResources "
    "entrypointNumCpus entrypointNumGpus ttlSecondsAfterFinished shutdownAfterJobFinishes suspend",
    "RayClusterSpec": "authOptions suspend managedBy autoscalerOptions headServiceAnnotations enableInTreeAutoscaling "
    "gcsFaultToleranceOptions headGroupSpec rayVersion workerGroupSpecs",
    "HeadGroupSpec": "template headService enableIngress rayStartParams serviceType",
    "WorkerGroupSpec": "suspend groupName replicas minReplicas maxReplicas idleTimeoutSeconds rayStartParams template "
    "scaleStrategy numOfHosts",
}


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    values = {**os.environ, "PYTHON": sys.executable, **environment}
    return subprocess.run(
        [str(argument) for argument in command], capture_output=True, text=True, env=values, timeout=300, check=False
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_sound(script: Path) -> None:
    assert run("bash", "-n", script).returncode == 0
    if shutil.which("shellcheck"):
        result = run("shellcheck", "-x", "-P", ROOT, script)
        assert result.returncode == 0, result.stdout


def test_mistakes_are_named(tmp_path: Path) -> None:
    state = {"SFUMATO_CLUSTER_DIR": str(tmp_path / "state"), "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
    for script, arguments, words in (
        ("start_worker.sh", [], "usage: "),
        ("start_worker.sh", ["10.0.0.1:6379"], f"no token in {tmp_path}/token: copy the head's file"),
        ("stop.sh", ["nobody"], "no node nobody was started here"),
        ("slurm_rl.sbatch", [], "usage: sbatch"),
        ("slurm_rl.sbatch", ["a.py", "b.yaml"], "this is for sbatch"),
        ("pre_stop.sh", [], "this is for a pod"),
    ):
        environment = {**state, "SLURM_JOB_ID": "", "KUBERNETES_SERVICE_HOST": "", "RAY_AUTH_TOKEN": ""}
        result = run("bash", CLUSTER / script, *arguments, **environment)
        assert result.returncode == 2 and words in result.stderr, result.stderr
    result = run("bash", CLUSTER / "start_head.sh", **{**state, "PYTHON": "/no/python"})
    assert result.returncode == 2 and "/no/python has no ray" in result.stderr


def test_stop_ends_what_a_pid_file_names_and_nothing_else(tmp_path: Path) -> None:
    """A pid that was given to another process since is left alone; a child that ignores SIGTERM is not."""
    state = {"SFUMATO_CLUSTER_DIR": str(tmp_path), "STOP_GRACE_S": "1"}
    stubborn = "trap '' TERM; sleep 60 & wait; sleep 60"
    bystander, node = subprocess.Popen(["sleep", "60"]), subprocess.Popen(["bash", "-c", stubborn])
    try:
        time.sleep(0.3)
        started = Path(f"/proc/{node.pid}/stat").read_text().rpartition(") ")[2].split()[19]
        children = run("ps", "-o", "pid=", "--ppid", str(node.pid)).stdout.split()
        (tmp_path / "old.pid").write_text(f"{bystander.pid} 1\n")
        (tmp_path / "head.pid").write_text(f"{node.pid} {started}\n")
        result = run("bash", CLUSTER / "stop.sh", **state)
        assert result.returncode == 0 and result.stdout.split() == ["stopped", "old", "stopped", "head"], result.stderr
        assert node.wait(timeout=5) == -signal.SIGKILL and bystander.poll() is None
        assert children and not run("ps", "-o", "args=", "-p", ",".join(children)).stdout.count("sleep 60")
        assert not list(tmp_path.glob("*.pid"))
    finally:
        bystander.kill()
        node.kill()
        bystander.wait()


def test_the_manifest_has_only_fields_that_kuberay_knows() -> None:
    job = yaml.safe_load((CLUSTER / "kuberay_rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    groups = cluster["workerGroupSpecs"]
    parts = [("RayJobSpec", job["spec"]), ("RayClusterSpec", cluster), ("HeadGroupSpec", cluster["headGroupSpec"])]
    for kind, part in [*parts, *(("WorkerGroupSpec", group) for group in groups)]:
        assert set(part) <= set(FIELDS[kind].split()), kind
    assert cluster["authOptions"] == {"mode": "token"} and cluster["rayVersion"] == importlib.metadata.version("ray")
    assert [group["groupName"] for group in groups] == ["gpus", "scorers"]
    for group in [cluster["headGroupSpec"], *groups]:
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        _check_pod(group["template"]["spec"])


def _check_pod(pod: dict[str, Any]) -> None:
    """It saves before it is ended, and sees the runs' folder and enough shared memory."""
    (container,) = pod["containers"]
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    assert (ROOT / command[1]).is_file() and pod["terminationGracePeriodSeconds"] > int(command[2])
    assert container["resources"]["requests"] == container["resources"]["limits"]
    mounts = {entry["mountPath"]: entry["name"] for entry in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert "persistentVolumeClaim" in volumes[mounts["/runs"]]
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"


def test_the_manifest_starts_a_task_that_exists() -> None:
    entrypoint = yaml.safe_load((CLUSTER / "kuberay_rayjob.yaml").read_text())["spec"]["entrypoint"]
    assert all((ROOT / path).is_file() for path in re.findall(r"\S+\.(?:sh|py|yaml)", entrypoint))
    assert "--train.load_checkpoint_path auto" in entrypoint and "--runtime.backend ray" in entrypoint


def test_the_image_copies_what_is_there_and_is_no_root() -> None:
    lines = (ROOT / "Containerfile").read_text().replace("\\\n", " ").splitlines()
    words = [line.split() for line in lines if line and not line.startswith("#")]
    copied = [name for word in words if word[0] == "COPY" and "--from" not in word[1] for name in word[1:-1]]
    assert "pyproject.toml" in copied and all((ROOT / name).exists() for name in copied)
    assert [word[1] for word in words if word[0] == "USER"] == ["1000"]
    extras = next(word[1] for word in words if word[0] == "ARG" and word[1].startswith("EXTRAS="))
    provided = importlib.metadata.metadata("sfumato").get_all("Provides-Extra")
    assert set(extras.removeprefix("EXTRAS=").split(",")) - {"ray"} <= set(provided)
    installed = next(word for word in words if word[:2] == ["RUN", "apt-get"])
    assert {"libibverbs1", "ibverbs-providers", "librdmacm1"} <= set(installed), "what NCCL needs for InfiniBand"
    assert "://" not in "\n".join(lines), "addresses of registries are build arguments"


SECRET_FILES = [
    ".git/config", ".env", ".env.local", ".venv/bin/python", ".netrc", ".ssh/id_rsa", ".ray/auth_token", "auth_token",
    ".slurm/7/token", ".huggingface/token", ".aws/credentials", "configs/.env", "cluster/auth_token", "shared/secret",
    "docs/.git/config", "my.pem", "cluster/server.key", "configs/credentials.json", "id_ed25519", "tests/id_rsa.pub",
    "notes.txt", "wandb/run", "outputs/run/config.yaml", "runs/a/log.txt", "model.safetensors", "kubeconfig", "token",
    "configs/rl/adapter.safetensors", "sfumato/__pycache__/cli.pyc", "server.yaml", "configs/my.log", "tasks/runs/a",
]  # fmt: skip
"""Files of a person's checkout that no image may hold."""


def is_copied(name: str) -> bool:
    """Whether docker and podman copy a file: of the lines that match it, or a folder above it, the last one counts."""
    copied = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#"):
            pattern = re.escape(line.removeprefix("!")).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
            if re.fullmatch(f"{pattern}(/.*)?", name):
                copied = line.startswith("!")
    return copied


@pytest.mark.parametrize("name", SECRET_FILES)
def test_no_secret_is_copied_into_an_image(name: str) -> None:
    assert not is_copied(name)


def test_one_file_says_to_docker_and_podman_what_is_copied() -> None:
    others = ["Containerfile.dockerignore", ".containerignore", "Containerfile.containerignore", "Dockerfile"]
    assert not [name for name in others if (ROOT / name).exists()], "either program would read it instead"
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    uncopied = [name for name in tracked if not is_copied(name)]
    assert [name for name in uncopied if not name.startswith(".")] in (
        [],
        ["CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "Containerfile"],
    )


def test_the_dashboard_of_a_cluster_on_kubernetes_asks_for_a_token() -> None:
    spec = yaml.safe_load((CLUSTER / "kuberay_rayjob.yaml").read_text())["spec"]["rayClusterSpec"]
    assert spec["authOptions"] == {"mode": "token"}
    assert spec["headGroupSpec"]["rayStartParams"]["dashboard-host"] == "0.0.0.0"  # the operator asks it from its pod
    policy = next(yaml.safe_load_all((CLUSTER / "kuberay_network_policy.yaml").read_text()))
    assert policy["kind"] == "NetworkPolicy" and policy["spec"]["policyTypes"] == ["Ingress"]
    allowed = [port["port"] for rule in policy["spec"]["ingress"] for port in rule.get("ports", [])]
    assert allowed == [8265]


@pytest.mark.parametrize(
    ("command", "is_driver"),
    [
        ("/opt/venv/bin/python3.12 tasks/rl_diffusion.py configs/a.yaml --train.lr 1e-4", True),
        ("python my_project/rl_text.py my_project/config.yaml", True),
        ("/usr/bin/python3 /opt/site-packages/sfumato/tasks/rl_text.py /data/a.yml", True),
        ("/usr/bin/python3 /opt/bin/ray job submit -- bash train.sh tasks/rl_text.py a.yaml", False),
        ("/usr/bin/python3 /opt/ray/_private/workers/default_worker.py --node-ip-address=10.0.0.1", False),
        ("bash train.sh tasks/rl_text.py a.yaml", False),
    ],
)
def test_a_pod_that_is_taken_away_finds_its_driver(command: str, is_driver: bool) -> None:
    """Drivers whose scripts lay elsewhere than in ``tasks/`` were not asked to save."""
    (pattern,) = re.findall(r"drivers\(\) \{ pgrep -f '(.*?)'", (CLUSTER / "pre_stop.sh").read_text())
    done = subprocess.run(["grep", "-E", pattern], input=command, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) is is_driver


def test_constraints_hold_what_ray_needs() -> None:
    pinned = {Requirement(line).name.lower() for line in _lines("constraints.txt")}
    wanted = [Requirement(line) for line in importlib.metadata.requires("ray") or []]
    assert {requirement.name.lower() for requirement in wanted if requirement.marker is None} | {"ray"} <= pinned


def _lines(name: str) -> list[str]:
    return [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A folder and a port of its own, so that no other cluster of this machine is seen or disturbed."""
    folder = Path("/tmp") / f"sf{os.getpid()}"  # Ray's sockets need short paths
    folder.mkdir()
    yield {
        "RAY_TMPDIR": str(folder),
        "SFUMATO_CLUSTER_DIR": str(folder / "state"),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
        "NODE_IP": "127.0.0.1",
        "RAY_PORT": str(20000 + os.getpid() % 10000),
        "PYTHONPATH": str(ROOT),
    }
    run("bash", CLUSTER / "stop.sh", SFUMATO_CLUSTER_DIR=str(folder / "state"))
    pids = run("pgrep", "-f", f"{folder}/").stdout.split()
    shutil.rmtree(folder)
    assert not pids


@pytest.mark.slow
def test_two_nodes_start_fit_together_and_stop(place: dict[str, str]) -> None:
    port = int(place["RAY_PORT"])
    options = ["--num-cpus", "1", "--object-store-memory", "100000000"]
    client = ["--ray-client-server-port", str(port + 1)]
    result = run("bash", CLUSTER / "start_head.sh", *options, *client, **place)
    assert result.returncode == 0, result.stderr
    # Ray gives a machine with a route out its address there, whatever it was told
    address = re.search(rf"the cluster's address: (\S+:{port})\n", result.stdout)[1]
    assert f"start_worker.sh {address}" in result.stdout
    token = Path(place["RAY_AUTH_TOKEN_PATH"])
    assert token.stat().st_mode & 0o077 == 0 and token.read_text().strip() not in result.stdout
    result = run("bash", CLUSTER / "start_worker.sh", address, *options, **place)
    assert result.returncode == 0, result.stderr
    result = run("bash", CLUSTER / "start_worker.sh", address, *options, **place)
    assert result.returncode == 2 and "worker runs already on this machine" in result.stderr
    alone = ["env", "-u", "RAY_AUTH_MODE"]  # a driver finds the token without being told that there is one
    check = [*alone, sys.executable, CLUSTER / "check_nodes.py", address, "--shared", place["RAY_TMPDIR"]]
    result = run(*check, "--nodes", "2", **place)
    assert result.returncode == 0 and result.stdout.count("1 CPUs, 0 GPUs") == 2, result.stderr
    result = run(*check, "--nodes", "3", "--wait-s", "0.5", **place)
    assert result.returncode == 2 and "2 of 3 nodes have joined" in result.stderr
    token.write_text("another")
    result = run(*check, "--nodes", "2", **place)
    assert result.returncode == 2 and f"cannot connect to {address}" in result.stderr, result.stderr
    result = run("bash", CLUSTER / "stop.sh", **place)
    assert result.stdout.split() == ["stopped", "worker", "stopped", "head"]


TASK = """
import signal, sys, time
import ray
stop = []
ray.init(address=sys.argv[sys.argv.index("--runtime.address") + 1], log_to_driver=False)
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))  # after ray.init, which puts a handler of its own there
@ray.remote(num_cpus=1)
class Role:
    def node(self):
        return ray.get_runtime_context().get_node_id()
roles = [Role.remote() for _ in range(2)]
print("nodes", len(set(ray.get([each.node.remote() for each in roles]))), *sys.argv[2:6], flush=True)
while not stop:
    time.sleep(0.05)
print("saved by", len(ray.get([each.node.remote() for each in roles])), flush=True)
sys.exit(143)
"""
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
SCONTROL = """#!/usr/bin/env bash
if [ "$1" = show ]; then printf 'one\\ntwo\\n'; else echo "$*" >>"$RUN_DIR/asked"; fi
"""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_slurm_job_saves_while_its_nodes_live(
    place: dict[str, str], tmp_path: Path, number: signal.Signals, requeued: bool
) -> None:
    """Slurm's commands are replaced, as no Slurm is here; both nodes are real and lie on this machine."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("task.py", TASK)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = str(os.getpid() * 10 + int(number))
    slurm = {
        "SLURM_JOB_ID": job,
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_NODELIST": "one,two",
        "SLURM_CPUS_PER_TASK": "1",
        "HEAD_IP": "127.0.0.1",
        "RUN_DIR": str(tmp_path),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
    }
    output = tmp_path / "output"
    command = ["bash", str(CLUSTER / "slurm_rl.sbatch"), str(tmp_path / "task.py"), "my.yaml", "--train.lr", "1"]
    with output.open("w") as file:
        process = subprocess.Popen(command, env={**os.environ, **place, **slurm}, stdout=file, stderr=file)
    try:
        until = time.monotonic() + 240
        while "nodes 2" not in output.read_text():
            assert process.poll() is None and time.monotonic() < until, output.read_text()
            time.sleep(0.2)
        assert "--train.load_checkpoint_path auto --train.lr 1" in output.read_text()
        process.send_signal(number)
        assert process.wait(timeout=120) == 143 and "saved by 2" in output.read_text()
    finally:
        process.kill()
    asked = tmp_path / "asked"
    assert (asked.read_text() if asked.exists() else "") == (f"requeue {job}\n" if requeued else "")
    assert not (tmp_path / job / "token").exists()
    shutil.rmtree(f"/tmp/sfumato-slurm-{job}")


NODES_SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
steps=()
for node in 0 1; do SLURM_NODEID=$node "$@" & steps+=($!); done
trap 'kill -TERM "${steps[@]}"' TERM
code=0
for step in "${steps[@]}"; do
  while kill -0 "$step" 2>/dev/null; do wait "$step"; done
  wait "$step"
  [ $? -le $code ] || code=143
done
exit $code
"""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_slurm_job_without_ray_saves_on_both_nodes_and_goes_on(
    tmp_path: Path, number: signal.Signals, requeued: bool
) -> None:
    """Slurm's commands are replaced, as no Slurm is here; both nodes are this machine, a rank on each."""
    for name, text in (("srun", NODES_SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    config = tiny_text_config(tmp_path)
    config["train"] |= {"max_steps": 100_000, "lr_warmup_steps": 1}
    path = write_config(config, tmp_path / "config.yaml")
    job = str(os.getpid() * 10 + int(number))
    slurm = {
        "SLURM_JOB_ID": job,
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_NODELIST": "one,two",
        "HEAD_IP": "127.0.0.1",
        "NPROC_PER_NODE": "1",
        "RUN_DIR": str(tmp_path),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
    }
    output = tmp_path / "output"
    command = ["bash", str(CLUSTER / "slurm_sft.sbatch"), "tasks/train_text.py", str(path)]
    steps = []
    for _ in range(2):  # the second goes on where the first was stopped
        with output.open("w") as file:
            process = subprocess.Popen(command, env={**os.environ, **slurm}, stdout=file, stderr=file)
        metrics = tmp_path / "run" / "metrics.jsonl"
        before = len(metrics.read_text().splitlines()) if metrics.exists() else 0
        try:
            until = time.monotonic() + 240
            while not metrics.exists() or len(metrics.read_text().splitlines()) < before + 3:
                assert process.poll() is None and time.monotonic() < until, output.read_text()
                time.sleep(0.2)
            process.send_signal(number)
            assert process.wait(timeout=120) == 143, output.read_text()
        finally:
            process.kill()
        steps.append(len(metrics.read_text().splitlines()))
        assert list((tmp_path / "run" / "checkpoints").glob("global_step_*/manifest.json"))
    assert steps[1] > steps[0] + 2
    asked = tmp_path / "asked"
    assert (asked.read_text() if asked.exists() else "") == (f"requeue {job}\n" * 2 if requeued else "")
