"""Ray: starting it on this machine or joining a cluster, building the roles of a run on it, and ending all of it."""

from __future__ import annotations

import atexit
import os
import signal
import site
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sfumato.config.environment import environment_with
from sfumato.config.open_mappings import Keywords
from sfumato.config.parallel import ParallelConfig
from sfumato.config.rl import RLConfig
from sfumato.config.runtime import PoolConfig, RuntimeConfig
from sfumato.errors import ConfigError, MissingDependencyError, RoleLostError
from sfumato.kernels import choose_allocator, choose_kernels
from sfumato.parallel.layout import Layout
from sfumato.parallel.rendezvous import is_loopback
from sfumato.runtime.cluster.loop import TURN_S, DriverLoop
from sfumato.runtime.cluster.placement import Places, Reserver
from sfumato.runtime.cluster.role import RayGroup, RayPool, RayRole, RolePlan
from sfumato.runtime.cluster.token import require_token, send_token, token_file
from sfumato.runtime.roles import ACTOR, SAMPLER, SCORER, Build, Driver, Future, Handle, Roles
from sfumato.runtime.weight_sync.sync import GRACE_S, WeightSync
from sfumato.tracking.run import Run

if TYPE_CHECKING:
    from sfumato.config.sections import TrainConfig
    from sfumato.runtime.roles import Role
    from sfumato.runtime.weight_sync.fixed_tokens import Rescoring

INLINE_BYTES = 4096
"""Values up to this size travel with a call or its reply; larger ones go directly from process to process."""

_WORKER_ENVIRONMENT = {
    "RAY_max_direct_call_object_size": str(INLINE_BYTES),
    # The default of later versions of Ray; ``RoleProcess`` hides GPUs from processes without any.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_ON_THIS_MACHINE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Has Ray listen at loopback alone, if it runs on this machine only. The switch is meant for systems whose firewall
asks the user."""
_DRIVER_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",  # it would drop lines that differ in their numbers alone
    "RAY_worker_niceness": "0",  # Ray's 15 lets whatever else runs on the machine starve the processes that train
}


class Cluster(Driver):
    """Ray with the roles on it, and the ``Driver`` that waits for them. Made by ``start_cluster``."""

    def __init__(self, config: RuntimeConfig, run: Run, *, is_own: bool) -> None:
        import ray

        self.config = config
        self.run = run
        self.loop = DriverLoop(run, config)
        super().__init__(self.loop.record)
        self.store_bytes = int(ray.cluster_resources().get("object_store_memory", 0.0))
        """Size of the object stores of all machines together; values that do not fit go to their disks."""
        self._reserver = Reserver(config, run, is_own)
        self._places: dict[str, Places] = {}  # reserved places of roles that are not started yet
        if is_own:
            self.loop.problem = partial(_find_dead_child, _ray_children())
        self._bytes_told: dict[str, int] = {}
        self._is_open = True
        atexit.register(self.close)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def reserve(
        self, *, groups: Mapping[str, PoolConfig], pools: Mapping[str, PoolConfig], share_gpus: bool = False
    ) -> None:
        """Reserves the places of all roles together, so that none takes the only possible place of another.

        Args:
            groups: the processes of roles that ``group`` will be called for.
            pools: the processes of roles that ``pool`` will be called for.
            share_gpus: whether processes of different groups with equal rank share a GPU; the groups then have equally
                many processes.

        Raises:
            ConfigError: there is no place for them.
            PreemptedError: the run was asked to stop while it waited for one.
        """
        roles = {name: [name] for name in groups}
        if share_gpus:
            first, *_ = several = groups.values()
            # One bundle for the processes of equal rank of all groups.
            pair = PoolConfig(processes=first.processes, cpus=sum(pool.cpus for pool in several), gpus=1)
            roles = {" with ".join(groups): list(groups)}
            groups = dict.fromkeys(roles, pair)
        wanted_groups = {name: (pool, True) for name, pool in groups.items()}
        wanted_pools = {name: (pool, False) for name, pool in pools.items()}
        reserved = self._reserver.reserve(wanted_groups | wanted_pools)
        for name, names in roles.items():
            places = reserved.pop(name)
            places.num_roles = len(names)
            reserved |= dict.fromkeys(names, places)
        self._places |= reserved

    def group(
        self,
        name: str,
        build: Build,
        config: object,
        train: TrainConfig,
        pool: PoolConfig,
        *,
        sees_folder: bool = False,
    ) -> RayGroup:
        """Starts processes that work together; it does not wait until they have built their states.

        Args:
            name: of the role.
            build: ``(config, mesh, run)`` to the state, in each process.
            config: given to ``build``.
            train: the ``TrainConfig`` from which each process makes its mesh.
            pool: number of processes, and the resources of each.
            sees_folder: whether they must see the run folder, as processes that write to it.

        Raises:
            ConfigError: there is no place for them, their number does not fit ``train``, or (in ``wait_ready``) they
                do not see the folder.
        """
        # raises for a wrong number of processes, before anything waits for a place
        Layout.resolve(train, pool.processes)
        if name not in self._places:
            self.reserve(groups={name: pool}, pools={})
        places = self._places.pop(name)
        return RayGroup(RolePlan(name, build, config, train, pool, places, sees_folder=sees_folder), self.loop)

    def pool(
        self, name: str, build: Build, config: object, train: TrainConfig, pool: PoolConfig, threads: int = 1
    ) -> RayPool:
        """Starts independent processes, each with a mesh of one process. Otherwise as ``group``.

        Each process runs up to ``threads`` calls at the same time, which share its state.
        """
        # The defaults of all parallel settings, which are those of a single process.
        alone: dict[str, object] = {
            key: field.get_default(call_default_factory=True) for key, field in ParallelConfig.model_fields.items()
        }
        if not pool.gpus:
            alone["device"] = "cpu"
        train = train.model_copy(update=alone)
        if name not in self._places:
            self.reserve(groups={}, pools={name: pool})
        return RayPool(RolePlan(name, build, config, train, pool, self._places.pop(name), threads), self.loop)

    def wait(self, pending: Iterable[Future | Handle]) -> None:
        """Waits until one of these is done, but not longer than a short while."""
        if not any(call.done() for call in pending):
            self.loop.turn(TURN_S)

    def on_progress(self, callback: Callable[[], None] | None) -> None:
        """Sets the function that is called, and may issue calls, whenever calls have ended during a wait."""
        self.loop.on_progress(callback)

    def take_timings(self) -> dict[str, float]:
        """Measurements since the last call, by role: bytes that passed through this process (``driver_bytes/ROLE``) and
        the memory of the process that uses most (such as ``memory/actor_gpu_peak_mib``)."""
        bytes_by_role = dict(self.loop.driver_bytes)
        bytes_before = self._bytes_told
        self._bytes_told = bytes_by_role
        driver_bytes = {
            f"driver_bytes/{role}": float(size - bytes_before.get(role, 0)) for role, size in bytes_by_role.items()
        }
        memory = self.loop.memory
        self.loop.memory = {}
        memory_metrics = {
            name.replace("memory/", f"memory/{role}_"): mib
            for role, memory_of_role in memory.items()
            for name, mib in memory_of_role.items()
        }
        return driver_bytes | memory_metrics

    @property
    def num_gpus(self) -> float:
        """Number of GPUs of the cluster."""
        import ray

        return float(ray.cluster_resources().get("GPU", 0.0))

    def wait_ready(self) -> None:
        """Waits until all roles are built. Raises as ``RayRole.wait_ready``."""
        for role in list(self.loop.roles):
            role.wait_ready()

    def close(self) -> None:
        """Ends all processes, and Ray if it was started here. A second call does nothing."""
        if not self._is_open:
            return
        # At once: when ending a role fails, the interpreter's exit must not try again.
        self._is_open = False
        atexit.unregister(self.close)
        import ray

        roles: list[RayRole] = list(self.loop.roles)
        with suppress(ray.exceptions.RayError):  # pyright: ignore[reportAttributeAccessIssue]
            # The cluster may be lost already
            for role in roles:
                role.close()
            for places in self._places.values():
                places.free()
        with _own_signals():
            ray.shutdown()


def start_cluster(config: RuntimeConfig, run: Run, num_cpus: int | None = None, num_gpus: int | None = None) -> Cluster:
    """Starts Ray on this machine, or joins the cluster that ``runtime.address`` names.

    Args:
        config: the section runtime.
        run: the driver's run: ``say``, ``add_time``, ``output_dir``, ``stop_requested``.
        num_cpus: CPU cores that a Ray started here assigns; None: all of the machine.
        num_gpus: GPUs, likewise.

    Raises:
        ConfigError: there is no cluster at the address, or it cannot be used from there.
        MissingDependencyError: ray is not installed.
        RoleLostError: Ray could not be started on this machine, twice.
    """
    address = config.address
    if address is not None and address.startswith("ray://"):
        raise ConfigError(
            f"runtime.address {address}: through Ray Client all values would pass through this process; start the task "
            "on a machine of the cluster, with runtime.address auto or host:port"
        )
    quiet = _DRIVER_ENVIRONMENT | ({} if sys.stderr.isatty() else {"RAY_COLOR_PREFIX": "0"})
    os.environ.update({key: value for key, value in quiet.items() if key not in os.environ})
    only_here = _ON_THIS_MACHINE if address is None else {}
    if address is None:
        require_token(run.say)
    else:
        send_token()
    try:
        with environment_with(only_here):  # Ray reads these variables when it is imported
            import ray
    except ImportError as error:
        raise MissingDependencyError("runtime.backend ray needs Ray: pip install 'sfumato[ray]'") from error
    if ray.is_initialized():
        raise RuntimeError("this process has started or joined a Ray cluster already; close that one first")
    options: Keywords = {"include_dashboard": False, "logging_level": "ERROR", "log_to_driver": True}
    variables = {**_WORKER_ENVIRONMENT, **only_here, **choose_kernels(), **_import_path()}
    variables |= choose_allocator(shares_memory=config.shares_gpu_memory)
    with _own_signals():
        if address is None:
            store = None if config.object_store_gb is None else int(config.object_store_gb * 2**30)
            with environment_with(variables):
                _start_here(run, num_cpus=num_cpus, num_gpus=num_gpus, object_store_memory=store, **options)
        else:
            try:
                ray.init(address=address, runtime_env={"env_vars": variables}, **options)
            except (ConnectionError, ValueError, RuntimeError) as error:
                remedy = "start one (ray start --head), or leave runtime.address out, which starts Ray on this machine"
                if "AuthenticationError" in str(error.__cause__):
                    remedy = (
                        f"it wants its token: copy the file from one of its machines to {token_file()} (mode 600), and "
                        "unset RAY_AUTH_MODE and RAY_AUTH_TOKEN"
                    )
                raise ConfigError(
                    f"runtime.address {address}: no cluster can be joined there: {error}; {remedy}"
                ) from error
    return Cluster(config, run, is_own=address is None)


def launch_on_ray(
    config: RLConfig, run: Run, *, actor: Build, sampler: Build, scorer: Build, rescoring: Rescoring | None = None
) -> Roles:
    """Starts or joins Ray, and builds all roles at the same time. Args are those of ``launch_roles``.

    Raises:
        ConfigError: there is no cluster, or no place on it.
        PreemptedError: the run was asked to stop before the roles were built.
        RoleLostError: a process died while it was built.
        Exception: what building a role raised.
    """
    runtime = config.runtime
    train = config.train
    pools = runtime.pools
    with ExitStack() as stack:
        cluster = stack.enter_context(start_cluster(runtime, run))
        groups = {ACTOR: pools.actor} | ({} if config.rollout.hybrid_engine else {SAMPLER: pools.sampler})
        share_gpus = len(groups) > 1 and pools.shared_gpus
        cluster.reserve(groups=groups, pools={SCORER: pools.scorer}, share_gpus=share_gpus)
        scorers = cluster.pool(SCORER, scorer, config, train, pools.scorer, config.reward.num_workers)
        actors = cluster.group(ACTOR, actor, config, train, pools.actor, sees_folder=True)
        run.set_devices(pools.actor.processes)
        samplers = actors
        weights = None
        if not config.rollout.hybrid_engine:
            by_files = runtime.weight_sync == "files"
            sampler_train = runtime.sampler_train(train)
            samplers = cluster.group(SAMPLER, sampler, config, sampler_train, pools.sampler, sees_folder=by_files)
            run.set_devices(pools.actor.processes + (0 if share_gpus else pools.sampler.processes))
            weights = WeightSync(
                cast("Role", actors),
                cast("Role", samplers),
                runtime.weight_sync,
                folder=run.output_dir,
                timeout_s=runtime.call_timeout_s,
                grace_s=runtime.heartbeat_s + GRACE_S,
                rescoring=rescoring,
            )
        if cluster.num_gpus and not pools.actor.gpus:
            run.say(
                f"the cluster has {cluster.num_gpus:g} GPUs, but runtime.pools.actor.gpus is 0: the actor works on CPUs"
            )
        cluster.wait_ready()
        run.set_peak(cluster.loop.peak_flops.get(ACTOR))
        stack.pop_all()  # the cluster stays open; the roles close it
    # ``submit`` is a method of pools alone, and only scorers are called by it.
    return Roles(
        actor=cast("Role", actors),
        sampler=cast("Role", samplers),
        scorer=cast("Role", scorers),
        weights=weights,
        driver=cluster,
    )


def _start_here(run: Run, **options: Any) -> None:
    """Starts Ray on this machine, and tries a second time if that fails: Ray gives a busy machine only 30 s."""
    import ray

    for attempt in range(2):
        try:
            ray.init(address="local", **options)
            address = ray.util.get_node_ip_address()
            if not is_loopback(address):  # Ray was imported before ``_ON_THIS_MACHINE`` was set
                run.say(f"Ray listens at every network of this machine ({address}); its token is asked for")
            return
        except Exception as error:  # Ray has no class of its own for these errors
            ray.shutdown()
            _end_failed_start()
            reason = f"Ray did not start on this machine: {error}"
            if attempt:
                logs = "its logs lie in /tmp/ray/session_latest/logs (RAY_TMPDIR names another place than /tmp)"
                remedy = "end what else keeps the machine busy or fills its memory and disk, and start the run again"
                raise RoleLostError("ray", (), f"{reason}; {remedy}; {logs}") from error
            run.say(f"{reason}; trying once more")


def _end_failed_start() -> None:
    """Ends the processes of a start that failed: ``ray.shutdown`` ends those of one that succeeded."""
    import ray

    package = str(Path(ray.__file__).parent)
    processes = [pid for pid, words in _child_commands().items() if any(word.startswith(package) for word in words)]
    for number, wait_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        for pid in processes:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + wait_s
        while any(_read_state(pid) not in "ZX" for pid in processes) and time.monotonic() < deadline:
            time.sleep(0.05)


def _import_path() -> dict[str, str]:
    """PYTHONPATH for the processes of roles: folders that this process imports from, outside of its installation."""
    installed = [*site.getsitepackages(), site.getusersitepackages(), *sysconfig.get_paths().values()]
    installed_paths = {Path(path).resolve() for path in installed if path} | {
        Path(sysconfig.get_paths()["stdlib"]) / "lib-dynload"
    }
    paths = [Path(path or ".").resolve() for path in sys.path]
    own_paths = dict.fromkeys(str(path) for path in paths if path.is_dir() and path not in installed_paths)
    return {"PYTHONPATH": os.pathsep.join(own_paths)}


@contextmanager
def _own_signals() -> Iterator[None]:
    """Restores the handlers of signals that Ray replaces: its own end the program, where a run saves its state."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ray_children() -> dict[int, str]:
    """The child processes that a Ray started here depends on: names by process id."""
    names = {pid: Path(words[0]).name for pid, words in _child_commands().items()}
    return {pid: name for pid, name in names.items() if name in ("gcs_server", "raylet")}


def _child_commands() -> dict[int, list[str]]:
    """The commands of this process's children, by process id."""
    lists = [file.read_text().split() for file in Path("/proc/self/task").glob("*/children")]
    return {int(pid): _read_command(pid) for pids in lists for pid in pids}


def _read_command(pid: str) -> list[str]:
    """A process's program and arguments; an empty word if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return [""]


def _read_state(pid: int) -> str:
    """The letter by which Linux calls what a process does; X if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def _find_dead_child(children: Mapping[int, str]) -> str:
    """What is wrong with Ray: a process that it depends on has died. Empty if nothing is."""
    for pid, name in children.items():
        if _read_state(pid) in "ZX":
            return f"its {name} (process {pid}) has died, so that all roles are lost"
    return ""
