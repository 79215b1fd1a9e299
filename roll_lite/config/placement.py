"""Choose the roles' device numbers from `placement` and their `devices`.

Under a preset, roles of one group share devices, which no other group uses and no role lists by number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, count, groupby, islice, zip_longest
from typing import Any

from roll_lite.config.arithmetic import TRAINING_ROLES, Role, device_numbers, model_parallel_size, roles
from roll_lite.config.problems import Problem
from roll_lite.config.schema.base import Refused
from roll_lite.config.schema.models import ON_A_NODE, Devices, InferRoleConfig, JudgeServerConfig
from roll_lite.config.schema.run import PlacementConfig, RunConfig

MODELS = ("actor_train", "reference", "critic", "reward_models")
GROUPS: Mapping[str, Sequence[Sequence[str]]] = {
    "colocated": ((*MODELS, "actor_infer"),),
    "split": (MODELS, ("actor_infer",)),
    "pairs": (("actor_train", "reference"), ("critic", "reward_models"), ("actor_infer",)),
    "apart": (),
}
"""{placement preset: groups of roles}."""


def placed(config: RunConfig) -> tuple[RunConfig, list[Problem]]:
    try:
        by_role = roles(config)
        problems = list(_not_named(config.placement, by_role))
        if not problems:
            numbers = _numbers(config.placement, by_role)
            config = _changed(config, by_role, numbers)
            problems = list(_impossible(config.placement, roles(config)))
    except Refused:  # reported by a check of the schema
        return config, []
    return config, problems


def describe(nodes: Sequence[tuple[str, int]], what: str = "devices") -> str:
    if len(nodes) > 4 and len({number for _, number in nodes}) == 1:
        return f"{len(nodes)} nodes ({nodes[0][0]} to {nodes[-1][0]}) with {nodes[0][1]} {what} each"
    each = ", ".join(f"{name} has {number}" for name, number in nodes)
    return f"{len(nodes)} node{'s' if len(nodes) != 1 else ''} with {sum(number for _, number in nodes)} {what} ({each})"


def nodes_of(placement: PlacementConfig) -> list[tuple[str, int]]:
    return [(f"node{number}", placement.devices_per_node) for number in range(placement.nodes or 0)]


def ranges(numbers: Sequence[int]) -> str:
    """Write numbers as ranges: 0-3, 6."""
    ordered, known = sorted(set(numbers)), frozenset(numbers)
    starts = [number for number in ordered if number - 1 not in known]
    ends = [number for number in ordered if number + 1 not in known]
    return ", ".join(str(start) if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True))


# ---------------------------------------------------------------- choice of devices


def _numbers(placement: PlacementConfig, by_role: Mapping[str, Role]) -> dict[str, list[int]]:
    listed = {name: _listed(placement, role.devices) for name, role in by_role.items() if not isinstance(role.devices, int)}
    numbers = dict(listed)
    taken = {number for one in listed.values() for number in one} if placement.name != "by_role" else set()
    groups = _groups(placement, [name for name in by_role if name not in listed])
    for group in groups:
        of_group = {name: by_role[name] for name in group}
        counts = _device_counts(placement, of_group, has_whole_cluster=placement.name == "colocated" and len(groups) == 1 and not listed)
        block_size = max(int(getattr(role.strategy, "tensor_parallel", 1)) for role in of_group.values())
        order = _choose_devices(placement, taken, max(counts.values()), block_size)
        numbers |= {name: order[: counts[name]] for name in group}
        if placement.name != "by_role":
            taken |= set(order)
    return {name: numbers[name] for name in by_role}


def _groups(placement: PlacementConfig, names: Sequence[str]) -> list[list[str]]:
    if placement.name == "by_role":
        return [[name] for name in names]
    groups = [[name for name in names if name.split(".")[0] in group] for group in GROUPS[placement.name]]
    grouped = {name for group in groups for name in group}
    return [group for group in [*groups, *([name] for name in names if name not in grouped)] if group]


def _device_counts(placement: PlacementConfig, group: Mapping[str, Role], has_whole_cluster: bool) -> dict[str, int]:
    """Return {role: number of devices}. Roles without a number get their group's highest; in groups without numbers: all
    devices (`has_whole_cluster`, no judges), else one."""
    given = {name: role.devices for name, role in group.items() if "devices" in role.model_fields_set and isinstance(role.devices, int)}
    is_judge = any(isinstance(role, JudgeServerConfig) for role in group.values())
    default = max(given.values()) if given else placement.devices if has_whole_cluster and placement.devices and not is_judge else 1
    return {name: given.get(name, default) for name in group}


def _choose_devices(placement: PlacementConfig, taken: set[int], wanted: int, block_size: int) -> list[int]:
    """Return `wanted` device numbers outside `taken`, in blocks (tensor-parallel groups). A block lies on one node if it fits, otherwise in
    equal parts on few nodes. If too few are free, numbers beyond the last device follow; a later check reports them."""
    of_node = placement.devices_per_node
    if placement.nodes is None or (placement.name == "by_role" and placement.fill == "pack"):
        return list(islice((number for number in count() if number not in taken), wanted))
    size = next(part for part in range(min(block_size, of_node), 0, -1) if block_size % part == 0)
    parts: list[list[list[int]]] = []
    left_over: list[int] = []
    for first in range(0, placement.devices, of_node):
        own = [number for number in range(first, first + of_node) if number not in taken]
        end = len(own) - len(own) % size
        parts.append([own[place : place + size] for place in range(0, end, size)])
        left_over += own[end:]
    is_spread = placement.fill == "spread" or block_size > of_node
    in_order = chain.from_iterable(zip_longest(*parts, fillvalue=[]) if is_spread else parts)
    return [*chain.from_iterable(in_order), *left_over, *range(placement.devices, placement.devices + wanted)][:wanted]


def _listed(placement: PlacementConfig, devices: Devices) -> list[int]:
    numbers: list[int] = []
    for one in devices if not isinstance(devices, int) else ():
        node, first, last = _parts(one) if isinstance(one, str) else (0, one, one)
        start = node * placement.devices_per_node
        numbers += range(start + first, start + last + 1)
    return numbers


def _parts(text: str) -> tuple[int, int, int]:
    match = ON_A_NODE.fullmatch(text)
    assert match is not None, "the schema has let it through"
    return int(match[1]), int(match[2]), int(match[3] or match[2])


# ---------------------------------------------------------------- changes of the roles


def _changed(config: RunConfig, by_role: Mapping[str, Role], numbers: Mapping[str, list[int]]) -> RunConfig:
    """Set the devices. Under a preset, roles that share devices get `offload: true`, unless they set it or are always in use."""
    staying = {f"reward_models.{name}" for name in config.reward_models if config.rollout.supply != "sync"}
    staying |= set(TRAINING_ROLES if config.rollout.stream_log_probs else ())
    update: dict[str, Any] = {}
    for path, role in by_role.items():
        own, is_count = numbers[path], isinstance(role.devices, int)
        changes: dict[str, Any] = {"devices": len(own) if is_count and own == list(range(len(own))) else own}
        shares = any(set(own) & set(numbers[other]) for other in by_role if other != path)
        if (
            config.placement.name != "by_role"
            and shares
            and "offload" in type(role).model_fields
            and "offload" not in role.model_fields_set
        ):
            changes["offload"] = path not in staying
        section, _, name = path.partition(".")
        changed = role.model_copy(update=changes)
        update[section] = {**update.get(section, getattr(config, section)), name: changed} if name else changed
    return config.model_copy(update=update)


# ---------------------------------------------------------------- impossible placements


def _not_named(placement: PlacementConfig, by_role: Mapping[str, Role]) -> Iterator[Problem]:
    if placement.fill == "spread" and placement.nodes is None:
        yield Problem("placement.fill", "spreads over nodes; say how many there are: placement.nodes", "spread")
    for name, role in by_role.items():
        for text in [one for one in ([] if isinstance(role.devices, int) else role.devices) if isinstance(one, str)]:
            node, first, last = _parts(text)
            if placement.nodes is None:
                yield Problem(f"{name}.devices", "names a node; say how many there are: placement.nodes", text)
            elif node >= placement.nodes or last >= placement.devices_per_node:
                yield Problem(f"{name}.devices", f"is not there: the cluster has {describe(nodes_of(placement))}, numbered from 0", text)
            elif last < first:
                yield Problem(f"{name}.devices", f"has no devices; write node{node}:{last}-{first}", text)


def _impossible(placement: PlacementConfig, by_role: Mapping[str, Role]) -> Iterator[Problem]:
    if placement.nodes is None:
        return
    for name, role in by_role.items():
        numbers = device_numbers(role.devices)
        if beyond := [number for number in numbers if number >= placement.devices]:
            wanted = f"device{'s' if len(beyond) > 1 else ''} {ranges(beyond)} {'are' if len(beyond) > 1 else 'is'} not there"
            remedy = "use fewer, or more nodes (placement.nodes)"
            yield Problem(f"{name}.devices", f"{wanted}: the cluster has {describe(nodes_of(placement))}; {remedy}", role.devices)
        elif isinstance(role, InferRoleConfig | JudgeServerConfig):
            yield from _engines_on_nodes(placement, name, role)


def _engines_on_nodes(placement: PlacementConfig, name: str, role: InferRoleConfig | JudgeServerConfig) -> Iterator[Problem]:
    size, of_node = model_parallel_size(role), placement.devices_per_node
    if size > of_node and isinstance(role, JudgeServerConfig):
        message = f"a judge's devices are on one node, which has {of_node}; use at most as many"
        yield Problem(f"{name}.strategy.tensor_parallel", message, size)
        return
    for own in engines(role):
        by_node = nodes_of_engine(placement, own)
        shares = [(part[0] // of_node, len(part)) for part in by_node]
        one_after_the_other = len({node for node, _ in shares}) == len(shares)
        if len(by_node) == 1 or (size > of_node and one_after_the_other and len({count for _, count in shares}) == 1):
            continue
        nodes = " and ".join(f"node{node}" for node in sorted({node for node, _ in shares}))
        if size <= of_node:
            message = f"an engine of {size} devices needs them on one node, but devices {ranges(own)} lie on {nodes}"
        else:
            counts = ", ".join(f"{count} of node{node}" for node, count in shares)
            message = f"an engine of {size} devices spans nodes and needs as many of each, one node after the other, but has {counts}"
        yield Problem(f"{name}.devices", f"{message}; list others, or use another tensor_parallel", role.devices)
        return


def engines(role: InferRoleConfig | JudgeServerConfig) -> list[list[int]]:
    numbers, size = device_numbers(role.devices), model_parallel_size(role)
    return [list(numbers[first : first + size]) for first in range(0, len(numbers), size)]


def nodes_of_engine(placement: PlacementConfig, devices: Sequence[int]) -> list[list[int]]:
    return [list(own) for _, own in groupby(devices, key=lambda number: number // placement.devices_per_node)]
