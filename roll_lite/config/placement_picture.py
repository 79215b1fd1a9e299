from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from roll_lite.config.arithmetic import Role, actor_gives_log_probs, device_numbers, model_parallel_size, roles, trains
from roll_lite.config.arithmetic_tables import table
from roll_lite.config.device_phases import PHASES, SERVING, TRAINING, WHOLE, Phase, kind, startable
from roll_lite.config.placement import engines, nodes_of_engine, ranges
from roll_lite.config.schema.run import PlacementConfig, RunConfig

IN_WORDS = {TRAINING: "all", SERVING: "weights + KV cache"}
LEGEND = "(...): there, but idle. 1., 2.: one after the other. all: weights, gradients, optimizer"


def draw(config: RunConfig) -> str:
    by_role, placement, engine = roles(config), config.placement, config.actor_infer
    numbers = {name: frozenset(device_numbers(role.devices)) for name, role in by_role.items()}
    phases = phases_of_step(config)
    cells: dict[tuple[Phase, str], str] = {}
    for phase in phases:
        turns = _turns(config, phase, by_role)
        for name, role in by_role.items():
            offloads, working = getattr(role, "offload", False), works(config, phase, name)
            if offloads and not working:
                continue
            parts = PHASES[phase].parts[kind(name)] if offloads else WHOLE[kind(name)]
            words = IN_WORDS.get(parts, " + ".join(parts))
            cells[phase, name] = f"{turns[name]}. {words}" if name in turns else words if working else f"({words})"
    rows = []
    for devices, names in _blocks(placement, numbers):
        for place, name in enumerate(names or ["nobody"]):
            rows.append([devices if place == 0 else "", name, *(cells.get((phase, name), "") for phase in phases)])
    lines = [table(["devices", "role", *(phase.replace("_", " ") for phase in phases)], rows), LEGEND]
    if "actor_infer" in by_role and placement.nodes is not None and model_parallel_size(engine) > placement.devices_per_node:
        of_engines = [[part[0] // placement.devices_per_node for part in nodes_of_engine(placement, own)] for own in engines(engine)]
        each = "; ".join(f"engine {number} on node{ranges(nodes)}" for number, nodes in enumerate(of_engines))
        lines.append(f"actor_infer spans nodes: {each}")
    return "\n".join(lines)


def phases_of_step(config: RunConfig) -> list[Phase]:
    of_mode = (Phase.LOG_PROBS, Phase.TRAIN) if config.mode == "train_only" else tuple(PHASES) if trains(config) else (Phase.GENERATE,)
    return [phase for phase, presence in PHASES.items() if presence.of_step and phase in of_mode]


def works(config: RunConfig, phase: Phase, name: str) -> bool:
    role = kind(name)
    if role in ("actor_infer", "reward_models", "judges") and config.rollout.supply != "sync" and config.mode == "full":
        return True  # always in use
    if phase is Phase.GENERATE and config.rollout.stream_log_probs and works(config, Phase.LOG_PROBS, name):
        return True
    if phase is Phase.LOG_PROBS and role == "actor_train":
        return actor_gives_log_probs(config)
    return role in PHASES[phase].parts


def _turns(config: RunConfig, phase: Phase, by_role: Mapping[str, Role]) -> dict[str, int]:
    presence = PHASES[phase]
    working = [name for name in presence.parts if presence.in_turns and name in by_role and works(config, phase, name)]
    devices = {name: set(device_numbers(by_role[name].devices)) for name in working if getattr(by_role[name], "offload", False)}
    turns: dict[str, int] = {}
    while waiting := [name for name in devices if name not in turns]:
        starting = startable(waiting, [], lambda one, other: bool(devices[one] & devices[other]))
        turns |= dict.fromkeys(starting, 1 + max(turns.values(), default=0))
    return {name: turn for name, turn in turns.items() if any(devices[name] & devices[other] for other in devices if other != name)}


def _blocks(placement: PlacementConfig, numbers: Mapping[str, frozenset[int]]) -> list[tuple[str, Sequence[str]]]:
    """Return the table's rows, (devices, roles). Adjacent nodes with equal roles are merged."""

    def names(device: int) -> tuple[str, ...]:
        return tuple(name for name, own in numbers.items() if device in own)

    size, titled = placement.devices_per_node, dict[str, Sequence[int]]()
    if placement.nodes is None:
        titled[""] = sorted(frozenset().union(*numbers.values()))
    for _, equal in groupby(range(placement.nodes or 0), lambda node: [names(node * size + place) for place in range(size)]):
        nodes = list(equal)
        title = f"node{nodes[0]}: " if len(nodes) == 1 else f"node{nodes[0]}-{nodes[-1]}, each: "
        titled[title] = range(nodes[0] * size, nodes[0] * size + size)
    blocks: list[tuple[str, Sequence[str]]] = []
    for title, devices in titled.items():
        by_names: dict[tuple[str, ...], list[int]] = {}
        for device in devices:
            by_names.setdefault(names(device), []).append(device % size if title else device)
        blocks += [(f"{title}{ranges(own)}", together) for together, own in by_names.items()]
    return blocks
