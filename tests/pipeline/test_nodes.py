"""What nodes are compared by before a run starts. Two hosts that really differ: tests/integration/test_several_hosts.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from roll_lite.config.loading import load_config
from roll_lite.distributed.place import Place
from roll_lite.pipeline import node_facts, nodes
from roll_lite.pipeline.nodes import (
    READ_WHOLE,
    LaterNodes,
    Reader,
    UsersCode,
    View,
    check_nodes,
    differences,
    fingerprint,
    logs_come_home,
    readers,
    view_of,
    why_apart,
    written_by_ranks,
)

ROOT = Path(__file__).resolve().parents[2]
MODEL = Reader("model.path", Path("/models/m"), ("actor_train", "actor_infer"))
PLACED = {"actor_train": {"10.0.0.1", "10.0.0.2"}, "actor_infer": {"10.0.0.3"}, "critic": {"10.0.0.4"}}
FILES = {"config.json": "sha256 c", "model.safetensors": "sha256 w"}


def told(**views: dict[str, str]) -> list[str]:
    """Of nodes by the last number of their addresses; those that are not named see what the driver's sees."""
    by_address = {f"10.0.0.{number}": View(None, {MODEL: views.get(f"n{number}", FILES)}) for number in (1, 2, 3, 4)}
    return list(differences(by_address, PLACED, "10.0.0.1"))


@pytest.mark.parametrize(
    ("there", "says"),
    [
        (FILES | {"model.safetensors": "sha256 x"}, "(driver, node): model.safetensors: sha256 w and sha256 x."),
        ({"config.json": "sha256 c"}, "model.safetensors: sha256 w and missing."),
        (FILES | {"added_tokens.json": "sha256 t"}, "added_tokens.json: missing and sha256 t."),
        (dict.fromkeys("abcd", "sha256 o"), "c: missing and sha256 o; and 3 more files."),
        ({}, "it is not there."),
    ],
)
def test_a_node_whose_files_are_not_the_drivers_is_named_with_both_sums(there: dict[str, str], says: str) -> None:
    assert told() == []
    assert told(n4=there) == [], "nothing there loads this model"
    for number, role in ((2, "actor_train"), (3, "actor_infer")):
        (message,) = told(**{f"n{number}": there})
        assert message.startswith(f"model.path: /models/m on node 10.0.0.{number}, where {role} loads it, is not what it is")
        assert says in message and "10.0.0.1" in message
    assert len(told(n2=there, n3=there)) == 2


def test_folders_are_compared_where_roles_read_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    model = Path("examples/models/tiny")
    ppo = load_config("tiny_ppo", ROOT / "examples/configs", [f"critic={{init: path, path: {tmp_path}}}"], files=False)
    code, *others = readers(ppo)
    assert (code.setting, code.roles) == ("roll_lite", ("actor_train", "actor_infer", "reference", "critic"))
    assert {"pipeline/nodes.py", "cli.py"} < set(code.files()) and not any("examples" in name for name in code.files())
    assert [(one.setting, one.roles) for one in others] == [
        ("model.path", ("actor_train", "actor_infer", "reference")),
        ("critic.path", ("critic",)),
    ]
    assert others[0].folder.resolve() == model.resolve()


def test_code_of_users_is_compared_where_a_node_imports_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "users_package" / "scores").mkdir(parents=True)
    for file in ("users_module.py", "users_package/__init__.py", "users_package/scores/__init__.py", "users_package/scores/words.py"):
        (tmp_path / file).write_text("def function(group):\n    return True\n")
    policy_loss = "algorithm.policy_loss={name: custom, function: users_package.scores.words.function}"
    (tmp_path / "users_package" / ".#words.py").symlink_to("nowhere")
    (tmp_path / "users_folder").mkdir()
    (tmp_path / "users_folder" / "any.py").touch()
    settings = ["rollout.filter={name: users_module.function}", policy_loss, "experiment=users_folder.v2", "actor_infer.devices=1"]
    settings += ["domains.add.reward={name: pytest.raises}", "domains.make.reward={name: statistics.mean}"]
    config = load_config("tiny_grpo", ROOT / "examples/configs", settings, files=False)
    by_folder = {one.folder.name: one for one in readers(config) if isinstance(one, UsersCode)}
    module, package = by_folder["users_module.py"], by_folder["users_package"]
    assert len(by_folder) == 2, "installed packages are compared by their versions"
    assert set(module.files()) == {"users_module.py"} and set(package.files()) == {"__init__.py", "scores/__init__.py", "scores/words.py"}
    there = {**package.files(), "scores/words.py": "sha256 o"}
    seen = {reader: reader.files() for reader in (module, package)}
    views = {"10.0.0.1": View(None, seen), "10.0.0.2": View(None, {module: {}, package: there})}
    (message,) = differences(views, {"actor_train": {"10.0.0.2"}}, "10.0.0.1")
    assert list(differences(views, {"actor_infer": {"10.0.0.2"}}, "10.0.0.1")) == [], "engines import none of it"
    assert message.startswith(f"users_package.scores.words.function: {tmp_path}/users_package on node 10.0.0.2")
    assert "scores/words.py: sha256" in message
    (tmp_path / "users_module.py").unlink()
    assert module.files() == {}


@pytest.mark.parametrize(
    ("settings", "lost"),
    [
        ([], []),
        (["checkpoint.every=2"], ["checkpoints"]),
        (["checkpoint.every=2", "checkpoint.store=file:///store"], []),
        (["reference={refresh: {every: 2}}"], ["the new reference"]),
    ],
)
def test_what_ranks_write(monkeypatch: pytest.MonkeyPatch, settings: list[str], lost: list[str]) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config("tiny_grpo", ROOT / "examples/configs", ["algorithm.kl_in_loss.coef=0.1", "reference={}", *settings])
    assert list(written_by_ranks(config)) == lost


def test_a_folder_is_shared_where_both_see_the_others_file(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "probe").touch()
    assert why_apart(tmp_path / "run" / "probe", "b") is None and (tmp_path / "run" / "probe-b").is_file()
    assert why_apart(tmp_path / "run" / "other", "b") == "another folder has this path"
    assert why_apart(tmp_path / "none" / "probe", "b") == "it is not there"


def test_every_node_tries_the_store(tmp_path: Path) -> None:
    assert view_of(tmp_path / "probe", "b", [], f"file://{tmp_path}/store").store is None
    (tmp_path / "file").touch()
    assert f"{tmp_path}/file/store cannot be used" in str(view_of(tmp_path / "probe", "b", [], f"file://{tmp_path}/file/store").store)


@pytest.mark.parametrize("size", [1000, READ_WHOLE + 4 * 4096])
@pytest.mark.parametrize("place", ["first", "last"])
def test_a_fingerprint_tells_contents_apart(tmp_path: Path, size: int, place: str) -> None:
    content = bytearray(size)
    (tmp_path / "a").write_bytes(content)
    (tmp_path / "b").write_bytes(content)
    assert fingerprint(tmp_path / "a") == fingerprint(tmp_path / "b")
    content[0 if place == "first" else -1] = 1
    (tmp_path / "b").write_bytes(content)
    assert fingerprint(tmp_path / "a") != fingerprint(tmp_path / "b")
    (tmp_path / "b").write_bytes(bytes(size + 1))
    assert fingerprint(tmp_path / "a") != fingerprint(tmp_path / "b")


def test_the_start_names_all_that_differs_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config("tiny_grpo", ROOT / "examples/configs")
    placement: Any = SimpleNamespace(nodes_by_role=lambda: {"actor_train": {"d", "o"}})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "d"))
    monkeypatch.setattr(nodes, "node_addresses", lambda: {"d": "10.0.0.1", "o": "10.0.0.2"})
    own = node_facts.NodeFacts({"torch": "2.11"}, 1.0, 9.0, {})
    there = node_facts.NodeFacts({"torch": "2.12"}, 1.0, 9.0, {"10.0.0.1": "refused"})
    monkeypatch.setattr(node_facts, "look_at", lambda ids, folder: dict(zip(ids, (own, there), strict=True)))
    views = {"d": View(None, {MODEL: FILES}), "o": View("it is not there", {MODEL: {}}, "cannot be used")}
    monkeypatch.setattr(nodes, "views_of_nodes", lambda *_: views)
    told: list[str] = []
    with pytest.raises(ValueError) as caught:
        check_nodes(config, tmp_path, placement, told.append)
    versions, port, files, store = str(caught.value).splitlines()
    assert versions.startswith("versions of torch differ: 2.11 on 10.0.0.1, 2.12 on 10.0.0.2")
    assert "10.0.0.2 cannot connect to 10.0.0.1: refused" in port and files.startswith("model.path: /models/m on node 10.0.0.2")
    assert store == "checkpoint.store: on node 10.0.0.2 cannot be used" and told[0].startswith("2 nodes, all with ")


@pytest.fixture
def elsewhere(ray_local: object, monkeypatch: pytest.MonkeyPatch) -> Place:
    """This node, as one that is not the driver's."""
    here = Place(ray.get_runtime_context().get_node_id(), 0)
    real = ray.get_runtime_context()
    monkeypatch.setattr(nodes, "node_addresses", lambda: {"driver": "10.0.0.1"})
    facade = {name: getattr(ray, name) for name in ("get", "remote", "util")}
    facade["get_runtime_context"] = lambda: SimpleNamespace(get_node_id=lambda: "driver", worker=real.worker)
    monkeypatch.setattr(nodes, "ray", SimpleNamespace(**facade))
    return here


def test_a_node_that_the_start_did_not_compare_is_compared_before_its_ranks_load(
    elsewhere: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    readers = [Reader("model.path", tmp_path, ("actor_train", "actor_infer")), Reader("checkpoint.resume", tmp_path, ("actor_train",))]
    monkeypatch.setattr(nodes, "readers", lambda config: readers)
    placement: Any = SimpleNamespace(nodes_by_role=lambda: {"actor_train": {"driver"}, "actor_infer": {elsewhere.node}})
    config: Any = None
    later = LaterNodes(config, placement)
    assert later.compare("actor_infer", {elsewhere.node}) == [], "the start has compared it"
    assert later.compare("rollouts", {"driver"}) == []
    with monkeypatch.context() as other_files:
        other_files.setattr(Reader, "files", lambda reader: {"config.json": "sha256 c"})  # on the driver's node
        for _ in range(2):
            with pytest.raises(
                ValueError, match=r"model\.path: .*, where actor_train loads it, is not what it is on .* sha256 c and sha256 "
            ):
                later.check("actor_train", [elsewhere])
    later.check("actor_train", [elsewhere])
    assert later.compare("actor_train", {elsewhere.node}) == [], "it is compared once"
    later.check("actor_train", [Place("0" * 56, 0)])  # it is lost: the next call to its ranks fails


def test_logs_of_every_living_node_come_home_under_their_nodes_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The second life of a run: node b was there in the first one, c is new, s shares the folder, g is gone."""
    disks = {node: tmp_path / node / "logs" for node in ("driver", "b", "c")}
    for node, disk in disks.items():
        disk.mkdir(parents=True)
        (disk / "actor_infer-1.log").write_text(f"of {node}")
    (disks["driver"] / "actor_infer-1.b.log").write_text("first life of b")
    disks["s"] = disks["driver"]

    def remote(read: Any) -> Any:
        def options(num_cpus: int, scheduling_strategy: Any) -> Any:
            return SimpleNamespace(remote=lambda probe: (read, scheduling_strategy.node_id, probe))

        return SimpleNamespace(options=options)

    def get(asked: Any) -> Any:
        read, node, probe = asked
        if node == "g":
            raise ray.exceptions.NodeDiedError("it is gone")
        return found[asked] if asked in found else read(disks[node] / probe.name)

    def wait(asked: Any, num_returns: int, timeout: float) -> Any:
        found.update({one: get(one) for one in asked if one[1] != "g"})
        return asked, []

    found: dict[Any, Any] = {}
    context = SimpleNamespace(get_node_id=lambda: "driver")
    monkeypatch.setattr(nodes, "ray", SimpleNamespace(remote=remote, get=get, wait=wait, get_runtime_context=lambda: context))
    monkeypatch.setattr(nodes, "node_addresses", lambda: {node: node for node in ("driver", "b", "c", "s", "g")})
    monkeypatch.setattr(nodes, "on_node", lambda node: SimpleNamespace(node_id=node))
    session: Any = SimpleNamespace(started=False)
    with logs_come_home(tmp_path / "driver", session):
        pass
    told = {path.name: path.read_text() for path in disks["driver"].iterdir()}
    assert told == {"actor_infer-1.log": "of driver", "actor_infer-1.b.log": "of b", "actor_infer-1.c.log": "of c"}
