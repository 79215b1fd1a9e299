"""Checks of the run's nodes before it starts: shared run folder, equal files."""

from __future__ import annotations

import hashlib
import re
import sys
import tempfile
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

import ray
from ray.exceptions import RayError, RayTaskError

from roll_lite.config.arithmetic import roles
from roll_lite.config.checks.layout import model_folder
from roll_lite.config.schema.run import RunConfig
from roll_lite.config.user_function import search_current_folder
from roll_lite.distributed.place import Place, node_addresses, on_node
from roll_lite.distributed.placement import Placement
from roll_lite.distributed.ray_session import RaySession
from roll_lite.files import first_line, is_local, try_store
from roll_lite.hub import MODEL_FILES, HubPath, fetch, is_of_model
from roll_lite.pipeline import node_facts
from roll_lite.pipeline.checkpoint_files import follows_actor, resumption, saved_roles

RESUME, CODE = "checkpoint.resume", "roll_lite"
DOTTED_PATH = re.compile(r'"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)"')
INSTALLED = {"site-packages", "dist-packages"}
MODEL_SUFFIXES = (*MODEL_FILES, ".safetensors")
"""Suffixes of files that must be equal on all nodes: configuration, weights, tokenizer, chat template."""
READ_WHOLE, SAMPLES, SAMPLE_BYTES = 16 << 20, 64, 4096
"""Files up to READ_WHOLE bytes are hashed whole, of larger ones SAMPLES pieces of SAMPLE_BYTES bytes."""
TOLD_FILES = 3
LOGS = "logs"
LOGS_SECONDS, LOG_BYTES = 30.0, 1 << 20
"""Limits for copying other nodes' logs at the end: total seconds, bytes per file."""


@dataclass(frozen=True)
class Reader:
    """Folder that `roles` read; its files must be equal on their nodes. `setting`: YAML path, or "roll_lite"."""

    setting: str
    folder: Path
    roles: tuple[str, ...]

    def files(self) -> dict[str, str]:
        """Return {file name: fingerprint} on this node; for a checkpoint, sizes only: loading verifies checksums."""
        if self.setting == RESUME:
            found = (path for path in self.folder.rglob("*") if path.is_file())
            return {str(path.relative_to(self.folder)): f"{path.stat().st_size} bytes" for path in found}
        if self.setting == CODE:
            here = Path(__file__).parents[1]
            own = {str(path.relative_to(here)): path for path in here.rglob("*.py")}
            return {name: fingerprint(path) for name, path in own.items() if not name.startswith("examples/")}
        fetch(self.folder)
        if not self.folder.is_dir():
            return {}
        is_read = is_of_model if isinstance(self.folder, HubPath) else lambda name: name.endswith(MODEL_SUFFIXES)
        return {path.name: fingerprint(path) for path in self.folder.iterdir() if is_read(path.name) and path.is_file()}


@dataclass(frozen=True)
class UsersCode(Reader):
    """Module or package of the user's code. `setting`: dotted path of a function in it. `folder`: where the driver imports it from."""

    def files(self) -> dict[str, str]:
        found = _imported_from(self.setting)
        if found is None or found.is_file():
            return {found.name: fingerprint(found)} if found is not None else {}
        return {str(path.relative_to(found)): fingerprint(path) for path in found.rglob("*.py") if path.is_file()}


@dataclass(frozen=True)
class View:
    apart: str | None
    """Why the node does not share the driver's run folder; None if it does."""
    files: Mapping[Reader, Mapping[str, str]]
    store: str | None = None
    """Why the node cannot use checkpoint.store; None if it can."""


def check_nodes(config: RunConfig, run_folder: Path, placement: Placement, tell: Callable[[str], None]) -> list[str]:
    """Show the nodes in a table (`tell`). Return addresses of nodes with training ranks but not the run folder. ValueError if the driver
    needs files written there, versions or files differ, or one cannot reach another or checkpoint.store."""
    driver = ray.get_runtime_context().get_node_id()
    nodes = placement.nodes_by_role()
    others = set().union(*nodes.values()) - {driver}
    if not others:
        return []
    addresses = node_addresses()
    roles_of = {node: {role for role, own in nodes.items() if node in own} for node in [driver, *sorted(others)]}
    problems = node_facts.compare_nodes(roles_of, addresses, run_folder, tell)
    read = {node: [one for one in readers(config) if node == driver or own.intersection(one.roles)] for node, own in roles_of.items()}
    views = views_of_nodes(run_folder.resolve(), read, driver, addresses, config.checkpoint.store)
    by_address = {addresses[node]: view for node, view in views.items()}
    placed = {role: {addresses[node] for node in found} for role, found in nodes.items()}
    problems += differences(by_address, placed, addresses[driver])
    problems += [f"checkpoint.store: on node {address} {view.store}" for address, view in sorted(by_address.items()) if view.store]
    writing = {role: placed[role] for role in saved_roles(config) if role in placed}
    apart = {address: view.apart for address, view in by_address.items() if view.apart and any(address in own for own in writing.values())}
    if apart and (lost := written_by_ranks(config)):
        places = [
            f"on {address}, where {', '.join(role for role, own in writing.items() if address in own)} runs, {why}"
            for address, why in sorted(apart.items())
        ]
        problems.append(
            f"run_dir: {run_folder.resolve()} is not one folder on all nodes: {'; '.join(places)}. What ranks write there would be lost to "
            f"the driver on {addresses[driver]}: {', '.join(lost)}. Set run_dir to a folder that all nodes share, place "
            f"{', '.join(writing)} on the driver's node, or do without: {' '.join(lost.values())}"
        )
    if problems:
        raise ValueError("\n".join(problems))
    return sorted(apart)


def readers(config: RunConfig) -> list[Reader]:
    found: dict[tuple[str, Path], list[str]] = {(CODE, Path(__file__).parents[1]): list(roles(config))}
    for name, role in roles(config).items():
        folder = model_folder(config, role)
        found.setdefault(("model.path" if folder == config.model.path else f"{name}.path", folder), []).append(name)
    lora = config.actor_train.lora
    if lora is not None and lora.path is not None:
        found["actor_train.lora.path", lora.path] = ["actor_train"]
    if (source := config.checkpoint.source) is not None and is_local(source):
        found[RESUME, resumption(source).checkpoint.resolve()] = saved_roles(config)
    others = tuple(name for name in roles(config) if name != "actor_infer")  # engines import none of it
    code = [UsersCode(name, place, others) for place, name in users_code(config).items()]
    return [*(Reader(setting, folder, tuple(names)) for (setting, folder), names in found.items()), *code]


def users_code(config: RunConfig) -> dict[Path, str]:
    """Return the user's modules (not installed packages) that the configuration names: {module file or package folder: first dotted path to
    it}."""
    found: dict[Path, str] = {}
    for name in DOTTED_PATH.findall(config.model_dump_json()):
        place = _imported_from(name)
        if place is not None and name.partition(".")[0] not in sys.stdlib_module_names and not INSTALLED.intersection(place.parts):
            found.setdefault(place, name)
    return {place: name for place, name in found.items() if place != Path(__file__).resolve().parents[1]}


def _imported_from(name: str) -> Path | None:
    """Return the file of a dotted path's module, or its whole package's folder; None if not found here."""
    search_current_folder()
    top, *below = name.split(".")[:-1]
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):  # a module loaded in an unusual way, such as __main__, has no spec
        return None
    for part in below:
        # Searched by its last part: for a namespace package, the full name looks the parent up among the imported modules.
        spec = spec and PathFinder.find_spec(part, list(spec.submodule_search_locations or ()))
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    place = Path(spec.origin).resolve()
    while (place.parent / "__init__.py").is_file():
        place = place.parent
    return place


def written_by_ranks(config: RunConfig) -> dict[str, str]:
    """Return {files that ranks write and the driver needs: setting that turns them off}."""
    checkpoints = {"checkpoints": "checkpoint.every=0"} if config.checkpoint.every > 0 and config.checkpoint.store is None else {}
    return checkpoints | ({"the new reference": "reference.refresh=null"} if follows_actor(config.reference) else {})


def require_same(drivers: View, versions: Mapping[str, str], driver: str, role: str) -> None:
    """Raise ValueError if files that `role` reads, or package versions, differ here from those of the driver's node (`drivers`,
    `versions`). `driver`: that node's address."""
    here = ray.util.get_node_ip_address()
    views = {driver: drivers, here: View(None, {reader: reader.files() for reader in drivers.files})}
    facts = {address: node_facts.NodeFacts(own, 0.0, 0.0, {}) for address, own in ((driver, versions), (here, node_facts.installed()))}
    problems = [*differences(views, {role: {here}}, driver), *node_facts.differences(facts, {key: {role} for key in facts})]
    if problems:
        raise ValueError("\n".join(problems))


class LaterNodes:
    """Compares the driver's node with nodes that get ranks or engines during the run. `known`: {role: ids of compared nodes}."""

    def __init__(self, config: RunConfig, placement: Placement) -> None:
        self._readers = [one for one in readers(config) if one.setting != RESUME]  # this checkpoint may be deleted later
        self.known = defaultdict(set, placement.nodes_by_role())

    def compare(self, role: str, nodes: set[str]) -> list[ray.ObjectRef]:
        """Start a task per node not yet compared, which fails with ValueError if package versions or the role's files differ."""
        driver = ray.get_runtime_context().get_node_id()
        later = nodes - {driver} - self.known[role]
        if not later:
            return []
        files = {reader: reader.files() for reader in self._readers if role in reader.roles}
        told = View(None, files), node_facts.installed(), node_addresses()[driver], role
        return [ray.remote(require_same).options(num_cpus=0, scheduling_strategy=on_node(node)).remote(*told) for node in later]

    def check(self, role: str, places: Iterable[Place]) -> None:
        """Compare the nodes of a role's ranks with the driver's; ValueError if nodes differ."""
        nodes = {place.node for place in places}
        try:
            ray.get(self.compare(role, nodes))
            self.known[role] |= nodes
        except RayTaskError as error:
            raise error.cause from None
        except RayError:  # the node is lost, and the next call to its ranks fails
            pass


def views_of_nodes(
    run_folder: Path, read: Mapping[str, list[Reader]], driver: str, addresses: Mapping[str, str], store: str | None
) -> dict[str, View]:
    """Return what each node sees. `read`: folders to compare, by node id. A node that shares the run folder answers with a file beside the
    driver's probe."""
    probe = run_folder / f".probe-{uuid.uuid4().hex}"
    probe.touch()
    task = ray.remote(view_of)
    asked = {
        node: task.options(num_cpus=0, scheduling_strategy=on_node(node)).remote(probe, node, read[node], store)
        for node in sorted(read.keys() - {driver})
    }
    views = {driver: view_of(probe, driver, read[driver], None)}
    try:
        for node, reference in asked.items():
            try:
                view = ray.get(reference)
            except RayError as error:
                reason = first_line(getattr(error, "cause", error))
                raise RuntimeError(f"node {addresses[node]} cannot be looked at: {reason}") from error
            seen = view.apart or Path(f"{probe}-{node}").exists()
            views[node] = view if seen else replace(view, apart="another folder has this path")
    finally:
        for file in run_folder.glob(f"{probe.name}*"):
            file.unlink()
    return views


def view_of(probe: Path, node: str, read: list[Reader], store: str | None) -> View:
    return View(why_apart(probe, node), {reader: reader.files() for reader in read}, try_store(store) if store else None)


def why_apart(probe: Path, node: str) -> str | None:
    """Return why this node does not share the folder of `probe`; if it does, write a file there as answer."""
    if not probe.parent.is_dir():
        return "it is not there"
    if not probe.is_file():
        return "another folder has this path"
    try:
        Path(f"{probe}-{node}").touch()
    except OSError as error:
        return f"it cannot be written to ({error.strerror})"
    return None


def differences(views: Mapping[str, View], placed: Mapping[str, set[str]], driver: str) -> Iterator[str]:
    for reader, own in views[driver].files.items():
        for address in sorted({node for role in reader.roles for node in placed.get(role, ())} - {driver}):
            there = views[address].files[reader]
            names = [name for name in sorted({**own, **there}) if own.get(name) != there.get(name)]
            if not names or (isinstance(reader, UsersCode) and not there):  # not every node needs it: the import fails where one does
                continue
            told = [f"{name}: {own.get(name, 'missing')} and {there.get(name, 'missing')}" for name in names[:TOLD_FILES]]
            more = f"; and {len(names) - TOLD_FILES} more files" if len(names) > TOLD_FILES else ""
            what = "; ".join(told) + more if there else "it is not there"
            loading = ", ".join(role for role in reader.roles if address in placed.get(role, ()))
            yield (
                f"{reader.setting}: {reader.folder} on node {address}, where {loading} loads it, is not what it is on the driver's node "
                f"{driver} (driver, node): {what}. Copy the folder to every node, or keep it on a file system that all nodes share"
            )


def fingerprint(file: Path) -> str:
    size = file.stat().st_size
    with file.open("rb") as content:
        if size <= READ_WHOLE:
            return f"sha256 {hashlib.file_digest(content, 'sha256').hexdigest()[:16]}"
        digest = hashlib.sha256(str(size).encode())
        for number in range(SAMPLES):
            content.seek((size - SAMPLE_BYTES) * number // (SAMPLES - 1))
            digest.update(content.read(SAMPLE_BYTES))
        return f"sha256 of samples {digest.hexdigest()[:16]}"


@contextmanager
def logs_come_home(run_folder: Path, session: RaySession) -> Iterator[None]:
    """Copy logs into the run folder from nodes that do not share it, after the block. File names get the node's address."""

    def read(probe: Path) -> dict[str, bytes]:  # nested, so that Ray pickles it and no node imports this package
        found = {}
        for path in probe.parent.glob("*.log") if not probe.exists() else ():
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - LOG_BYTES))
                found[path.name] = file.read()
        return found

    try:
        yield
    finally:
        place = (run_folder / LOGS).resolve()
        with suppress(RayError, OSError):  # the cluster may be gone
            addresses = {} if session.started else node_addresses()
            with tempfile.NamedTemporaryFile(dir=place) as probe:
                asked = {
                    ray.remote(read).options(num_cpus=0, scheduling_strategy=on_node(node)).remote(Path(probe.name)): address
                    for node, address in addresses.items()
                    if node != ray.get_runtime_context().get_node_id()
                }
                ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=LOGS_SECONDS) if asked else ([], [])
            for reference in ready:
                with suppress(RayError, OSError):
                    for name, content in ray.get(reference).items():
                        (place / name).with_suffix(f".{asked[reference]}.log").write_bytes(content)
