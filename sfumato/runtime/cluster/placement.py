"""Placement: finds a machine for each process of all roles together, then reserves these places with Ray.

Ray reserves one placement group after the other and packs each as well as it can, so that an earlier one may take the
only possible place of a later one. Here the places of all roles are found first, and each is then requested on its
node.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sfumato.config.runtime import PoolConfig, RuntimeConfig
from sfumato.errors import ConfigError, PreemptedError, RoleLostError
from sfumato.runtime.weight_sync.places import ADDRESS_REMEDY, is_loopback

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from sfumato.tracking.run import Run

KINDS = ("CPU", "GPU")
UNIT = 10_000
"""Ray counts CPUs and GPUs in fractions of 1 / UNIT."""
MOST_TRIES = 20_000
"""Tries after which placing is taken to be impossible: the few kinds of processes of a run need fewer."""
SAY_PLACE_S = 5.0
"""Seconds without a place after which a run says what it waits for, and again every ``SAY_AGAIN_S``."""
SAY_AGAIN_S = 60.0
RESERVE_S = 10.0
"""Seconds in which Ray must reserve places that it has reported as free; then others are looked for."""
LOOK_S = 0.2
"""Seconds between two tries."""

Amount = tuple[int, int]
"""CPUs and GPUs, in units of ``1 / UNIT``."""


@dataclass(frozen=True)
class Machine:
    """A node of the cluster."""

    node_id: str
    name: str
    total: Amount
    free: Amount

    def __str__(self) -> str:
        taken = "" if self.free == self.total else f" ({amount_text(self.free)} free)"
        return f"{self.name} {amount_text(self.total)}{taken}"


@dataclass
class Slot:
    """The place of one process."""

    group: PlacementGroup
    """Ray's placement group."""
    index: int
    """Index of the process's bundle in it."""
    node_id: str


def plan(free: Sequence[Amount], roles: Sequence[Sequence[Amount]]) -> list[list[int]] | None:
    """Finds a machine for every process, by an exhaustive search that begins with the largest.

    Args:
        free: what each machine has.
        roles: what each process of each role needs; all of a role need the same.

    Returns:
        For each role the machines of its processes, with processes of one machine beside each other; None if there is
        no placement (or none is found within ``MOST_TRIES``).
    """
    processes = sorted(((amount, role) for role, amounts in enumerate(roles) for amount in amounts), key=_largest_first)
    remaining = list(free)
    chosen_machines: list[int] = []  # of the processes so far
    dead_ends: set[tuple[int, tuple[Amount, ...]]] = set()
    tries = 0
    # For each role the number of its processes on each machine.
    chosen: list[dict[int, int]] = [{} for _ in roles]
    # A depth-first search with a stack of its own: level i holds the candidates for process i that are not tried yet.
    levels = [_candidate_machines(remaining, chosen, processes, 0)] if processes else []
    while levels:
        if len(chosen_machines) == len(levels):  # the last choice at this level led nowhere: take it back
            machine = chosen_machines.pop()
            amount, role = processes[len(levels) - 1]
            remaining[machine] = (remaining[machine][0] + amount[0], remaining[machine][1] + amount[1])
            chosen[role][machine] -= 1
        machine = next(levels[-1], None)
        if machine is None:
            levels.pop()
            # Machines are interchangeable for what follows: the sorted amounts tell whether it can succeed.
            dead_ends.add((len(levels), tuple(sorted(remaining))))
            continue
        tries += 1
        if tries > MOST_TRIES:
            return None
        amount, role = processes[len(levels) - 1]
        remaining[machine] = (remaining[machine][0] - amount[0], remaining[machine][1] - amount[1])
        chosen[role][machine] = chosen[role].get(machine, 0) + 1
        chosen_machines.append(machine)
        if len(chosen_machines) == len(processes):
            break
        if (len(levels), tuple(sorted(remaining))) not in dead_ends:
            levels.append(_candidate_machines(remaining, chosen, processes, len(levels)))
    if len(chosen_machines) < len(processes):
        return None
    return [[machine for machine, count in sorted(counts.items()) for _ in range(count)] for counts in chosen]


def _largest_first(item: tuple[Amount, int]) -> tuple[int, int, int]:
    """Sort key: processes with many GPUs come first, since they have the fewest possible places."""
    (cpus, gpus), role = item
    return -gpus, -cpus, role


def _candidate_machines(
    remaining: Sequence[Amount],
    chosen: Sequence[Mapping[int, int]],
    processes: Sequence[tuple[Amount, int]],
    level: int,
) -> Iterator[int]:
    """Machines with room for a process, the best first; of machines that are equally good only one.

    Preferred are, in this order, machines with processes of its role, those with room for most of the role's other
    processes, those that leave the fewest GPUs unused, and those that leave the fewest CPUs.

    Args:
        remaining: what each machine has left.
        chosen: for each role the number of its processes on each machine.
        processes: all processes as (need, role).
        level: index of the process.
    """
    (cpus, gpus), role = processes[level]
    rest = sum(process == processes[level] for process in processes[level:])
    machine_by_rank: dict[tuple[bool, int, int, int], int] = {}
    for machine, (free_cpus, free_gpus) in enumerate(remaining):
        if free_cpus >= cpus and free_gpus >= gpus:
            is_there = chosen[role].get(machine, 0) > 0
            room = min([rest, *(free // need for free, need in ((free_cpus, cpus), (free_gpus, gpus)) if need)])
            machine_by_rank.setdefault((not is_there, -room, free_gpus - gpus, free_cpus - cpus), machine)
    return iter([machine_by_rank[key] for key in sorted(machine_by_rank)])


class Places:
    """The places of a role's processes, by rank; or of two roles whose processes of equal rank share a place."""

    def __init__(self, reserver: Reserver, name: str, pool: PoolConfig, slots: list[Slot]) -> None:
        self._reserver = reserver
        self.name = name
        self.pool = pool
        self.slots = slots
        self.num_roles = 1  # roles that use these places and have not freed them

    def renew(self, role: str, ranks: Iterable[int]) -> None:
        """Reserves other places for these ranks if the machine of one of them is lost, and waits for them.

        Ranks with a common placement group must be given together. If two roles share places, the first that calls this
        renews those of both: each has lost a process with the machine, and its other processes end with that one.

        Raises:
            RoleLostError: there is no place for them.
            PreemptedError: the run was asked to stop meanwhile.
        """
        ranks = list(ranks)
        alive = {machine.node_id for machine in list_machines()}
        if all(self.slots[rank].node_id in alive for rank in ranks):
            return
        _remove(self.slots[rank] for rank in ranks)
        is_group = len({id(self.slots[rank].group) for rank in ranks}) < len(ranks)
        wanted = {self.name: (self.pool.model_copy(update={"processes": len(ranks)}), is_group)}
        try:
            slots = self._reserver.reserve(wanted, is_renewal=True)[self.name].slots
        except ConfigError as error:
            raise RoleLostError(role, ranks, f"their machine is lost: {error}") from error
        for rank, slot in zip(ranks, slots, strict=True):
            self.slots[rank] = slot

    def free(self) -> None:
        """Frees the places when the last of their roles does."""
        self.num_roles -= 1
        if not self.num_roles:
            _remove(self.slots)


class Reserver:
    """Reserves places on a cluster."""

    def __init__(self, config: RuntimeConfig, run: Run, is_own: bool) -> None:
        """Args as of ``Cluster``."""
        self.config = config
        self.run = run
        self.is_own = is_own

    def reserve(self, wanted: Mapping[str, tuple[PoolConfig, bool]], *, is_renewal: bool = False) -> dict[str, Places]:
        """Finds places for several roles together, and waits until they are reserved.

        Args:
            wanted: for each role its pool, and whether its processes form a group, which is reserved as a whole; others
                are reserved one by one.
            is_renewal: whether the places replace those on a lost machine: that may come back, so it is waited for.

        Raises:
            ConfigError: there is no place for them.
            PreemptedError: the run was asked to stop meanwhile.
        """
        started = time.monotonic()
        say_at = started + SAY_PLACE_S
        while True:
            cluster_machines = list_machines()
            check_addresses(cluster_machines)
            if (planned := _plan_on([machine.free for machine in cluster_machines], wanted)) is not None:
                slots = [[cluster_machines[machine].node_id for machine in indices] for indices in planned]
                if (places := self._ask_ray(wanted, slots)) is not None:
                    return places
            waited = time.monotonic() - started
            can_never_be = planned is None and _plan_on([machine.total for machine in cluster_machines], wanted) is None
            patience = self.config.call_timeout_s if is_renewal else self._seconds_to_wait(can_never_be)
            text = _describe_pools(wanted, cluster_machines)
            if waited > patience:
                raise ConfigError(f"{text}. {self._describe_remedy(can_never_be)}")
            if time.monotonic() >= say_at:
                say_at = time.monotonic() + SAY_AGAIN_S
                event = "for machines to join" if can_never_be else "until others give some back"
                self.run.say(f"{text}; waiting {event}, at most {patience - waited:.0f} s more")
            self.check_stop()
            time.sleep(LOOK_S)

    def check_stop(self) -> None:
        """Raises PreemptedError when the run was asked to stop."""
        if self.run.stop_requested:
            raise PreemptedError("stopped by signal while processes waited for their places", is_saved=False)

    def _seconds_to_wait(self, can_never_be: bool) -> float:
        """Seconds to wait for places; ``can_never_be``: even the empty machines would not be enough."""
        if not can_never_be:
            return self.config.call_timeout_s
        return 0.0 if self.is_own else self.config.wait_for_nodes_s

    def _describe_remedy(self, can_never_be: bool) -> str:
        """What the user can do, for an error message."""
        lower = "Lower processes, cpus or gpus in runtime.pools (cpus may be a fraction), or"
        if not can_never_be:
            return f"{lower} wait until what else runs there has ended (runtime.call_timeout_s)"
        if self.is_own:
            return f"{lower} join a larger cluster with runtime.address"
        return (
            f"{lower} add machines first (cluster/check_nodes.py --nodes N waits for them); runtime.wait_for_nodes_s "
            "waits for those that an autoscaler adds"
        )

    def _ask_ray(
        self, wanted: Mapping[str, tuple[PoolConfig, bool]], nodes: Sequence[Sequence[str]]
    ) -> dict[str, Places] | None:
        """Reserves planned places; None if Ray could not, because another run was faster or a machine was lost.

        Args:
            wanted: as of ``reserve``.
            nodes: for each role the node ids of its processes.
        """
        import ray

        slots: dict[str, list[Slot]] = {}
        for (name, (pool, is_group)), ids in zip(wanted.items(), nodes, strict=True):
            need = {"CPU": pool.cpus, "GPU": pool.gpus}
            # Ray takes no empty bundle.
            bundle = {key: value for key, value in need.items() if value} or {"CPU": 1 / UNIT}
            slots[name] = []
            for team in [ids] if is_group else [[node_id] for node_id in ids]:
                node_labels = [{"ray.io/node-id": node_id} for node_id in team]
                bundles = [bundle] * len(team)
                group = ray.util.placement_group(bundles, strategy="PACK", bundle_label_selector=node_labels)
                slots[name] += [Slot(group, index, node_id) for index, node_id in enumerate(team)]
        groups = {slot.group.id: slot.group for slots_of_role in slots.values() for slot in slots_of_role}
        deadline = time.monotonic() + RESERVE_S
        while not all(group.wait(timeout_seconds=LOOK_S) for group in groups.values()):
            if time.monotonic() > deadline or self.run.stop_requested:
                for group in groups.values():
                    ray.util.remove_placement_group(group)
                self.check_stop()
                return None
        return {name: Places(self, name, wanted[name][0], slots_of_role) for name, slots_of_role in slots.items()}


def list_machines() -> list[Machine]:
    """The nodes of the cluster that are alive, ordered by name."""
    import ray
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    nodes = [
        Machine(
            node["NodeID"],
            node["NodeManagerHostname"],
            _amount_of_resources(node["Resources"]),
            _amount_of_resources(free.get(node["NodeID"], {})),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(nodes, key=lambda machine: (machine.name, machine.node_id))


def check_addresses(cluster_machines: Sequence[Machine]) -> None:
    """Refuses machines with a loopback address, if there are several: others could not reach them.

    Raises:
        ConfigError: names the machines and the remedy.
    """
    import ray

    if len({machine.name for machine in cluster_machines}) < 2:
        return
    wrong = [node for node in ray.nodes() if node["Alive"] and is_loopback(node["NodeManagerAddress"])]
    if wrong:
        names = ", ".join(f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})" for node in wrong)
        raise ConfigError(f"other machines of the cluster cannot reach {names}: {ADDRESS_REMEDY}")


def amount_text(amount: Amount) -> str:
    """An amount for messages, such as ``1.5 CPU, 1 GPU``."""
    return ", ".join(f"{value / UNIT:g} {kind}" for kind, value in zip(KINDS, amount, strict=True))


def _plan_on(free: Sequence[Amount], wanted: Mapping[str, tuple[PoolConfig, bool]]) -> list[list[int]] | None:
    return plan(free, [[_amount_of_pool(pool)] * pool.processes for pool, _ in wanted.values()])


def _amount_of_pool(pool: PoolConfig) -> Amount:
    """What one process of a pool needs."""
    return _amount_of_resources({"CPU": pool.cpus, "GPU": pool.gpus})


def _amount_of_resources(resources: Mapping[str, float]) -> Amount:
    """CPUs and GPUs among Ray's resources."""
    cpus, gpus = (round(resources.get(kind, 0.0) * UNIT) for kind in KINDS)
    return cpus, gpus


def _describe_pools(wanted: Mapping[str, tuple[PoolConfig, bool]], cluster_machines: Sequence[Machine]) -> str:
    requested = ", ".join(
        f"{name} {pool.processes} x ({amount_text(_amount_of_pool(pool))})" for name, (pool, _) in wanted.items()
    )
    machine_texts = "; ".join(map(str, cluster_machines))
    return f"no place for runtime.pools: asked for are {requested}; the machines have: {machine_texts}"


def _remove(slots: Iterable[Slot]) -> None:
    """Gives places back to Ray; a placement group is removed as a whole."""
    import ray

    for group in {slot.group.id: slot.group for slot in slots}.values():
        ray.util.remove_placement_group(group)
