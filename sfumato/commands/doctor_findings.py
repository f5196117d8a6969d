"""``sfumato doctor``: what is installed, which devices work, how to get what is missing, who can reach what runs."""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from packaging.requirements import Requirement

import sfumato
from sfumato.config.versions import describe_broken_package, installed_version, required_packages
from sfumato.config.writing import open_new, remove
from sfumato.rollout.engines.served.versions import PACKAGES, VERSIONS, find_release, list_contradictions

if TYPE_CHECKING:
    import torch

State = Literal["ok", "missing", "broken"]

EXTRAS = {
    "rapidocr": ("the OCR reward", "pip install rapidocr onnxruntime"),
    "opencv-python-headless": ("files of videos", "pip install opencv-python-headless"),
    "torchvision": ("images for editing (Qwen-Image, FLUX.2 dev)", "pip install torchvision"),
    "wandb": ("train.trackers: wandb", "pip install wandb"),
    "swanlab": ("train.trackers: swanlab", "pip install swanlab"),
    "mlflow": ("train.trackers: mlflow", "pip install mlflow"),
    "trackio": ("train.trackers: trackio", "pip install trackio"),
    "msgpack": ("the reward server and type: remote", "pip install msgpack"),
    "starlette": ("the reward server", "pip install starlette"),
    "uvicorn": ("the reward server", "pip install uvicorn"),
    "torchao": ("train.optimizer: adamw8bit", "pip install torchao"),
    "flash-attn": ("model.attention: flash_attention_2", "pip install flash-attn --no-build-isolation"),
    "ray": ("runtime.backend: ray", "pip install 'sfumato[ray]'"),
}
"""Packages that something optional needs, what that is, and how to install it."""

SMALL_DISK_GIB = 10
SMALL_SHARED_MIB = 512
FEW_OPEN_FILES = 4096
"""Sizes below which the report says that something is little."""

OBJECT_STORE_FRACTION = 0.3
"""Fraction of the memory that Ray gives its object store by default, as long as shared memory is that large."""


SIGN = ".seen-by-"
SIGN_S = 3600.0
"""Files that machines leave in a folder, and seconds for which they count."""

LOCAL_FILE_SYSTEMS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "ramfs")


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    group: str
    name: str
    state: State
    detail: str
    """Version, size, or what is wrong."""
    remedy: str = ""
    is_needed: bool = False
    """Whether nothing works without it."""


def run_doctor(as_json: bool = False, start_ray: bool = False, folder: Path | None = None) -> int:
    """Prints what it finds.

    Args:
        as_json: for programs.
        start_ray: also start Ray on this machine, which takes about ten seconds.
        folder: for runs on several machines: also say which of them have seen it.

    Returns:
        1 when something that is needed is missing or broken, else 0.
    """
    findings = list(examine(start_ray, folder))
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        _show(findings)
    return int(any(finding.is_needed and finding.state != "ok" for finding in findings))


def examine(start_ray: bool = False, folder: Path | None = None) -> Iterator[Finding]:
    """All findings, in order."""
    yield from _check_platform()
    yield from _check_packages()
    yield from _check_devices()
    yield from _check_process_groups()
    yield from _check_infiniband()
    yield from _check_kernels()
    yield from _check_extras()
    yield from _check_engines()
    yield from _check_storage()
    if folder is not None:
        yield _shared_folder(folder.expanduser())
    yield from _check_ray(start_ray)
    yield from _check_reach()


def _check_platform() -> Iterator[Finding]:
    version = platform.python_version()
    fits = sys.version_info >= (3, 11)
    yield Finding(
        "platform", "python", "ok" if fits else "broken", version, "" if fits else "install 3.11 or newer", True
    )
    yield Finding("platform", "sfumato", "ok", sfumato.__version__)
    yield Finding("platform", "system", "ok", platform.platform())


def _check_packages() -> Iterator[Finding]:
    """Each package that sfumato requires, against the range it asks for, and whether it can be imported."""
    try:
        requirements = required_packages()
    except importlib.metadata.PackageNotFoundError:
        yield Finding("packages", "sfumato", "broken", "run from its folder, not installed", "pip install -e .", True)
        return
    for requirement in requirements:
        yield _check_package(requirement)


def _check_package(requirement: Requirement) -> Finding:
    name = requirement.name
    version_range = str(requirement.specifier)
    remedy = f"pip install '{requirement}'"
    version = installed_version(name)
    if version is None:
        return Finding("packages", name, "missing", f"needed: {version_range}", remedy, True)
    if not requirement.specifier.contains(version, prereleases=True):
        return Finding("packages", name, "broken", f"{version}, needed: {version_range}", remedy, True)
    imported = _import_problem(name)
    if imported:
        return Finding("packages", name, "broken", f"{version}, cannot be imported: {imported}", remedy, True)
    return Finding("packages", name, "ok", version, is_needed=True)


def _import_problem(package: str) -> str:
    """The error that importing a package raises; empty when it can be imported."""
    names = {"pillow": "PIL", "pyyaml": "yaml", "flash-attn": "flash_attn", "opencv-python-headless": "cv2"}
    return _describe_failure(lambda: importlib.import_module(names.get(package, package)))


def _describe_failure(action: Callable[[], object]) -> str:
    """The first line of the error that an action raises, whatever it is; empty when it raises none."""
    try:
        action()
    except Exception as error:
        return describe_broken_package(error) or f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def _check_devices() -> Iterator[Finding]:
    try:
        import torch
    except ImportError:
        return  # it stands among the packages
    kinds = (("CUDA", torch.version.cuda), ("ROCm", torch.version.hip))
    built = " ".join(f"{kind} {version}" for kind, version in kinds if version)
    detail = f"built for {built or 'CPUs only'}, {torch.get_num_threads()} CPU threads"
    yield Finding("devices", "build of torch", "ok", detail)
    yield _try_device(
        "CPU", partial(_multiply, torch.device("cpu")), "float32 and bf16 products are correct", needed=True
    )
    if built and not torch.cuda.is_available():
        yield Finding(
            "devices", "GPU", "missing", "torch was built for GPUs but finds none", "check driver and nvidia-smi"
        )
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        detail = f"{properties.name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free; bf16 products are correct"
        yield _try_device(f"GPU {index}", partial(_multiply, torch.device("cuda", index)), detail, needed=True)


def _multiply(device: torch.device) -> None:
    """Multiplies matrices in float32 and bf16 and compares with float64."""
    import torch

    generator = torch.Generator().manual_seed(0)
    factor, other_factor = (torch.randn(64, 64, generator=generator, dtype=torch.float64) for _ in range(2))
    for dtype, tolerance in ((torch.float32, 0.05), (torch.bfloat16, 0.5)):
        product = (factor.to(device, dtype) @ other_factor.to(device, dtype)).double().cpu()
        if (error := float((product - factor @ other_factor).abs().max())) > tolerance:
            raise RuntimeError(f"a product of {dtype} matrices is wrong by {error:g}")


def _check_process_groups() -> Iterator[Finding]:
    """Makes and uses process groups of one rank, in processes of their own: a broken backend may hang."""
    import torch
    import torch.distributed as dist

    backends = [("gloo", "cpu")] if dist.is_gloo_available() else []
    if torch.cuda.is_available() and dist.is_nccl_available():
        backends.append(("nccl", "cuda"))
    for backend, device in backends:
        yield _try_device(
            f"process group {backend}", partial(_try_ranks, backend, device), "one rank works", needed=True
        )
    if torch.cuda.device_count() > 1 and dist.is_nccl_available():
        yield _try_device("two GPUs", partial(_try_ranks, "nccl", "cuda", 2), "two ranks of nccl reach each other")
    if not backends:
        yield Finding(
            "devices", "process group", "broken", "torch was built without gloo", "install torch from PyPI", True
        )


def _try_ranks(backend: str, device: str, count: int = 1) -> None:
    code = (
        "import sys, torch, torch.distributed as dist\n"
        "backend, device, folder, rank, count = sys.argv[1:]\n"
        "rank, count = int(rank), int(count)\n"
        "store = dist.FileStore(folder + '/store', count)\n"
        "if device == 'cuda':\n"
        "    torch.cuda.set_device(rank)\n"
        "dist.init_process_group(backend, store=store, rank=rank, world_size=count)\n"
        "value = torch.ones(2, device=device)\n"
        "dist.all_reduce(value)\n"
        "assert value.tolist() == [count, count]\n"
        "dist.destroy_process_group()\n"
    )
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(count) as pool:
        run = partial(_run_code, code, backend, device, folder, timeout_s=120)
        for future in [pool.submit(run, str(rank), str(count)) for rank in range(count)]:
            future.result()


def _check_kernels() -> Iterator[Finding]:
    """Tries the kernels of each GPU in processes of their own, which a broken kernel may end."""
    import torch

    for index in range(torch.cuda.device_count()):
        for name in ("attention", "grouped products", "compiled blocks"):
            detail = "bf16 is correct, with its gradients"
            yield _try_device(f"{name}, GPU {index}", partial(_try_kernel, name, f"cuda:{index}"), detail)


def _try_kernel(name: str, device: str) -> None:
    _run([sys.executable, "-m", "sfumato.commands.doctor_kernels", name, device], timeout_s=300)


def _try_device(name: str, action: Callable[[], None], detail: str, needed: bool = False) -> Finding:
    wrong = _describe_failure(action)
    if wrong:
        return Finding("devices", name, "broken", wrong, "reinstall torch for this machine: pytorch.org", needed)
    return Finding("devices", name, "ok", detail, is_needed=needed)


def _check_extras() -> Iterator[Finding]:
    for name, (use, remedy) in EXTRAS.items():
        version = installed_version(name)
        if version is None:
            yield Finding("extras", name, "missing", use, remedy)
            continue
        if wrong := _import_problem(name):
            mend = f"{remedy} --upgrade, or pip uninstall {name}"
            yield Finding("extras", name, "broken", f"{version}, cannot be imported: {wrong}", mend)
        else:
            yield Finding("extras", name, "ok", f"{version}: {use}")
    program = shutil.which("tesseract")
    remedy = "" if program else "apt-get install tesseract-ocr"
    yield Finding("extras", "tesseract", "ok" if program else "missing", program or "the program, for OCR", remedy)


def _check_engines() -> Iterator[Finding]:
    """Engines of RL of text in this environment, which mostly are in one of their own: what each wants of it."""
    for engine, packages in PACKAGES.items():
        newest = [entry for entry in VERSIONS if entry.engine == engine][-1]
        wants = f"torch {newest.torch} and transformers {newest.transformers} for {engine} {newest.release}"
        apart = f"python -m venv {engine}_env && {engine}_env/bin/pip install {packages[0]}"
        remedy = f"{apart}, apart from this environment, since it wants {wants}; then set rollout.engine.program or url"
        installed = [package for package in packages if installed_version(package) is not None]
        if not installed:
            yield Finding("engines", engine, "missing", "rollout.engine, as far as it is in this environment", remedy)
            continue
        version = cast("str", installed_version(installed[0]))
        if wrong := [text for package in installed for text in list_contradictions(package)]:
            yield Finding("engines", engine, "broken", f"{version}: {'; '.join(wrong)}", remedy)
            continue
        release = find_release(engine, version)
        how = "not known to this version of sfumato" if release is None else f"tested: {release.tested}"
        yield Finding("engines", engine, "ok", f"{version}: {how}")


def _check_storage() -> Iterator[Finding]:
    free_gib = shutil.disk_usage(Path.cwd()).free / 2**30
    is_small = free_gib < SMALL_DISK_GIB
    yield Finding("storage", "disk", "ok", f"{free_gib:.1f} GiB free in {Path.cwd()}{': little' if is_small else ''}")
    shared = Path("/dev/shm")
    if shared.is_dir():
        size_mib = shutil.disk_usage(shared).total / 2**20
        remedy = "docker run --shm-size 8g" if size_mib < SMALL_SHARED_MIB else ""
        detail = f"{size_mib:,.0f} MiB{': little for NCCL and data workers' if remedy else ''}"
        yield Finding("storage", "shared memory", "ok", detail, remedy)


def _shared_folder(folder: Path) -> Finding:
    """The file system that a folder is on, and the machines that have seen it within ``SIGN_S``.

    Each machine leaves a file with its name there, so calling this on all of them shows whether they share the folder.
    """
    host = socket.gethostname()
    now = time.time()
    try:
        remove(folder / f"{SIGN}{host}")
        with open_new(folder / f"{SIGN}{host}") as file:
            file.write(str(now).encode())
        signs = {path.name.removeprefix(SIGN): now - path.stat().st_mtime for path in folder.glob(f"{SIGN}*")}
        # a machine that was there long ago may be gone
        for name in [name for name, age in signs.items() if age > SIGN_S]:
            (folder / f"{SIGN}{name}").unlink(missing_ok=True)
            del signs[name]
    except OSError as error:
        # a folder that is missing is not made: the shared disk that it lies on may not be mounted here
        remedy = "take one that can be written, and that is on every machine"
        return Finding("storage", "folder", "broken", f"{folder}: {error.strerror}", remedy, True)
    kind = _file_system(folder.resolve())
    is_local = kind in LOCAL_FILE_SYSTEMS
    detail = f"{folder} on {kind}{', a disk of this machine' if is_local else ''}; seen from {', '.join(sorted(signs))}"
    remedy = "several machines need one that they share" if is_local and len(signs) == 1 else ""
    return Finding("storage", "folder", "ok", detail, remedy)


def _file_system(folder: Path) -> str:
    """Type of the file system that a folder is on, as mount calls it."""
    mounts = Path("/proc/self/mounts")
    if not mounts.is_file():
        return "an unknown file system"
    best = -1
    kind = "an unknown file system"
    for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines():
        point, mounted_kind = line.split()[1:3]
        point = point.encode().decode("unicode_escape")  # a space in a name stands as \040 there
        # the deepest mount counts, and of several at one place the last, which hides the others
        if folder.is_relative_to(point) and len(point) >= best:
            best = len(point)
            kind = mounted_kind
    return kind


def _check_ray(start: bool) -> Iterator[Finding]:
    """What Ray needs of this machine, where it is installed."""
    if installed_version("ray") is None:
        return  # it stands among the extras
    yield _open_files()
    yield _object_store()
    if start:
        wrong = _describe_failure(_start_ray)
        remedy = "see docs/cluster.md; logs: /tmp/ray/session_latest/logs" if wrong else ""
        yield Finding("ray", "local cluster", "broken" if wrong else "ok", wrong or "starts and runs a task", remedy)


def _check_reach() -> Iterator[Finding]:
    """Who can reach what runs here as this user."""
    from sfumato.commands.doctor_reach import open_ports, token_problem

    ports = list(open_ports())
    for port in ports:
        detail = f"{port.command[:60]} (process {port.pid}): {port.reach}"
        remedy = "keep these networks private: docs/cluster.md, Ports and networks" if port.is_open else ""
        yield Finding("reach", f"port {port.number}", "ok", detail, remedy)
    if not ports:
        yield Finding("reach", "ports", "ok", "no run or server of yours listens on this machine")
    if problem := token_problem():
        yield Finding("reach", "token of Ray", "broken", problem, "chmod 600, RAY_AUTH_MODE=token, or a new token")


def _check_infiniband(devices: Path = Path("/sys/class/infiniband")) -> Iterator[Finding]:
    """Whether NCCL can use the InfiniBand or RoCE cards of this machine; else it takes sockets, and is slow."""
    cards = sorted(path.name for path in devices.iterdir()) if devices.is_dir() else []
    if not cards:
        return
    missing = [name for name in ("libibverbs.so.1", "librdmacm.so.1") if not _is_loadable(name)]
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    problems = [f"no {name}" for name in missing]
    problems += [] if Path("/dev/infiniband").is_dir() else ["no /dev/infiniband"]
    problems += [] if soft == resource.RLIM_INFINITY else [f"only {soft // 2**10} KiB of memory may be locked"]
    remedy = (
        "libibverbs1, ibverbs-providers, librdmacm1; --device /dev/infiniband --ulimit memlock=-1" if problems else ""
    )
    state = "missing" if problems else "ok"
    detail = f"{', '.join(cards)}{': ' if problems else ''}{', '.join(problems)}"
    yield Finding("network", "InfiniBand", state, detail, remedy)


def _is_loadable(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_low = soft != resource.RLIM_INFINITY and soft < FEW_OPEN_FILES
    detail = f"{soft} at most{': little for several nodes' if is_low else ''}"
    return Finding("ray", "open files", "ok", detail, f"ulimit -n {hard}" if is_low else "")


def _object_store() -> Finding:
    """Whether shared memory holds the object store; Ray takes the slow disk otherwise."""
    shared = Path("/dev/shm")
    if not shared.is_dir():
        return Finding("ray", "object store", "ok", "no /dev/shm: objects lie on disk")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    default_bytes = OBJECT_STORE_FRACTION * memory
    free_bytes = shutil.disk_usage(shared).free
    detail = f"{free_bytes / 2**30:.1f} GiB free in /dev/shm, {default_bytes / 2**30:.1f} GiB wanted by default"
    if free_bytes >= default_bytes:
        return Finding("ray", "object store", "ok", detail)
    return Finding(
        "ray", "object store", "ok", f"{detail}: smaller, or on disk", "docker run --shm-size, or object_store_gb"
    )


def _start_ray() -> None:
    """Starts a cluster of one CPU in a process of its own, and runs a task in it."""
    code = (
        "import ray\n"
        "ray.init(address='local', num_cpus=1, num_gpus=0, include_dashboard=False, log_to_driver=False,\n"
        "         object_store_memory=10**8)\n"
        "assert ray.get(ray.remote(lambda: 1).remote(), timeout=90) == 1\n"
        "ray.shutdown()\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    _run_code(code, timeout_s=180, environment=environment)


def _run_code(code: str, *arguments: str, timeout_s: float, environment: dict[str, str] | None = None) -> None:
    """Runs Python in a process of its own. Raises RuntimeError with the last line that it wrote when it fails."""
    _run([sys.executable, "-c", code, *arguments], timeout_s, environment)


def _run(command: list[str], timeout_s: float, environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, env=environment)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])


def _show(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    colours = {"ok": "green", "missing": "yellow", "broken": "red"}
    table = Table("", "", Column(overflow="fold"), Column("what to do", overflow="fold"))
    for index, finding in enumerate(findings):
        if index and finding.group != findings[index - 1].group:
            table.add_section()
        state = finding.state if finding.state == "ok" or finding.is_needed else f"({finding.state})"
        detail = finding.detail.replace("[", r"\[")
        table.add_row(finding.name, f"[{colours[finding.state]}]{state}[/]", detail, finding.remedy.replace("[", r"\["))
    console = Console()
    console.print(table)
    wrong = [finding.name for finding in findings if finding.is_needed and finding.state != "ok"]
    console.print(f"not usable: {', '.join(wrong)}" if wrong else "everything that is needed works", highlight=False)
