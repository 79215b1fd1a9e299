"""Draws the roles on each device in each phase of a step, for `roll-lite check`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from roll_lite.config.arithmetic import Role, actor_gives_log_probs, device_numbers, model_parallel_size, roles
from roll_lite.config.arithmetic_tables import table
from roll_lite.config.device_phases import PHASES, SERVING, TRAINING, WHOLE, Phase, kind, startable
from roll_lite.config.placement import engines, nodes_of_engine, ranges
from roll_lite.config.schema.placement import PlacementConfig
from roll_lite.config.schema.run import RunConfig

IN_WORDS = {TRAINING: "all", SERVING: "weights + KV cache"}
LEGEND = "(...): there, but idle. 1., 2.: one after the other. all: weights, gradients, optimizer"


def draw(config: RunConfig) -> str:
    by_role = roles(config)
    numbers = {name: frozenset(device_numbers(role.devices)) for name, role in by_role.items()}
    phases = [phase for phase, presence in PHASES.items() if presence.of_step and _happens(config, phase)]
    cells = {phase: _column(config, phase, by_role) for phase in phases}
    rows = []
    for devices, names in _blocks(config.placement, numbers):
        for place, name in enumerate(names or ["nobody"]):
            rows.append([devices if place == 0 else "", name, *(cells[phase].get(name, "") for phase in phases)])
    heads = ["devices", "role", *(phase.replace("_", " ") for phase in phases)]
    return "\n".join([table(heads, rows), LEGEND, *_spanning(config)])


def _spanning(config: RunConfig) -> list[str]:
    """A line on engines that are larger than a node."""
    placement, role = config.placement, config.actor_infer
    if placement.nodes is None or model_parallel_size(role) <= placement.devices_per_node or config.mode == "train_only":
        return []
    of_engines = [[part[0] // placement.devices_per_node for part in nodes_of_engine(placement, own)] for own in engines(role)]
    each = "; ".join(f"engine {number} on node{ranges(nodes)}" for number, nodes in enumerate(of_engines))
    return [f"actor_infer spans nodes: {each}"]


def _happens(config: RunConfig, phase: Phase) -> bool:
    if config.mode == "rollout_only":
        return phase is Phase.GENERATE
    if config.mode == "train_only":
        return phase in (Phase.LOG_PROBS, Phase.TRAIN)
    return True


def _column(config: RunConfig, phase: Phase, by_role: Mapping[str, Role]) -> dict[str, str]:
    """Loaded parts of each role; roles that are offloaded are left out."""
    cells, turns = {}, _turns(config, phase, by_role)
    for name, role in by_role.items():
        offloads, works = getattr(role, "offload", False), _works(config, phase, name)
        if offloads and not works:
            continue
        parts = PHASES[phase].parts[kind(name)] if offloads else WHOLE[kind(name)]
        words = IN_WORDS.get(parts, " + ".join(parts))
        cells[name] = f"{turns[name]}. {words}" if name in turns else words if works else f"({words})"
    return cells


def _works(config: RunConfig, phase: Phase, name: str) -> bool:
    role = kind(name)
    if role in ("actor_infer", "reward_models", "judges") and config.rollout.supply != "sync" and config.mode == "full":
        return True  # they work all the time
    if phase is Phase.GENERATE and config.rollout.stream_log_probs and _works(config, Phase.LOG_PROBS, name):
        return True
    if phase is Phase.LOG_PROBS and role == "actor_train":
        return actor_gives_log_probs(config)
    return role in PHASES[phase].parts


def _turns(config: RunConfig, phase: Phase, by_role: Mapping[str, Role]) -> dict[str, int]:
    """Turn numbers of roles that wait for each other, assuming equal durations."""
    if not PHASES[phase].in_turns:
        return {}
    working = [name for name in PHASES[phase].parts if name in by_role and _works(config, phase, name)]
    moving = [name for name in working if getattr(by_role[name], "offload", False)]
    devices = {name: set(device_numbers(by_role[name].devices)) for name in moving}
    turns: dict[str, int] = {}
    while waiting := [name for name in moving if name not in turns]:
        number = 1 + max(turns.values(), default=0)
        turns |= dict.fromkeys(startable(waiting, [], lambda one, other: bool(devices[one] & devices[other])), number)
    return {name: turn for name, turn in turns.items() if any(devices[name] & devices[other] for other in moving if other != name)}


def _blocks(placement: PlacementConfig, numbers: Mapping[str, frozenset[int]]) -> list[tuple[str, list[str]]]:
    """Devices with the same roles, and those roles, by node; equal nodes are merged."""

    def names(device: int) -> tuple[str, ...]:
        return tuple(name for name, own in numbers.items() if device in own)

    if placement.nodes is None:
        return _alike({device: names(device) for device in sorted(frozenset().union(*numbers.values()))}, "")
    size = placement.devices_per_node
    nodes = [tuple(names(first + place) for place in range(size)) for first in range(0, placement.nodes * size, size)]
    blocks = []
    for first in [node for node in range(len(nodes)) if node == 0 or nodes[node] != nodes[node - 1]]:
        last = next((node - 1 for node in range(first + 1, len(nodes)) if nodes[node] != nodes[first]), len(nodes) - 1)
        title = f"node{first}: " if first == last else f"node{first}-{last}, each: "
        blocks += _alike(dict(enumerate(nodes[first])), title)
    return blocks


def _alike(roles_of: Mapping[int, Sequence[str]], title: str) -> list[tuple[str, list[str]]]:
    blocks: dict[tuple[str, ...], list[int]] = {}
    for device, names in roles_of.items():
        blocks.setdefault(tuple(names), []).append(device)
    return [(f"{title}{ranges(devices)}", list(names)) for names, devices in blocks.items()]
