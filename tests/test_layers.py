"""Imports point downwards, read from the source without importing it; docs/architecture.md has that order, and names files that exist."""

from __future__ import annotations

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path
from typing import get_args

import pytest

from roll_lite.config.schema.models import RewardModelStrategyConfig, TrainStrategyConfig
from roll_lite.distributed.strategy.build import CONNECTS_RANKS

PACKAGE = Path(__file__).resolve().parents[1] / "roll_lite"
PAGE = (PACKAGE.parent / "docs/architecture.md").read_text(encoding="utf-8")

LAYERS = (
    ("cli",),
    ("doctor",),
    ("pipeline",),
    ("planning", "launch"),
    ("workers",),
    ("simulator",),
    ("rewards", "scheduler", "environments"),
    ("sandbox",),
    ("distributed",),
    ("data",),
    ("observability",),
    ("config",),
    ("models",),
    ("hub",),
    ("files",),
    ("algorithms",),
)
"""Top to bottom. Packages of one layer may use each other. Metrics, timers, trackers and the report know nothing of what they
measure, so they stand low. The maths stands at the very bottom: it takes tensors and
numbers, and knows neither settings nor batches."""


def modules(package: Path = PACKAGE) -> dict[str, Path]:
    """Name below roll_lite to file, without roll_lite itself."""
    named = {".".join(path.relative_to(package).with_suffix("").parts): path for path in sorted(package.rglob("*.py"))}
    return {name.removesuffix(".__init__"): path for name, path in named.items() if name != "__init__"}


def imported(source: str, name: str, known: set[str], is_package: bool) -> set[str]:
    """Modules of roll_lite that a source imports anywhere in it: lazily and for type checking as well."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = f"roll_lite.{name}".split(".")[: None if is_package and node.level == 1 else -(node.level - is_package)]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            found |= {f"{base}.{alias.name}" for alias in node.names} | {base}
    inner = {one.removeprefix("roll_lite.") for one in found if one.startswith("roll_lite.")}
    return {one for one in inner if one in known}


def layer(name: str) -> int:
    matches = [(len(prefix), index) for index, prefixes in enumerate(LAYERS) for prefix in prefixes if f"{name}.".startswith(f"{prefix}.")]
    assert matches, f"roll_lite/{name.replace('.', '/')} belongs to no layer; give it its place in LAYERS"
    return max(matches)[1]


def graph() -> dict[str, set[str]]:
    files = modules()
    return {
        name: imported(path.read_text(encoding="utf-8"), name, set(files), path.name == "__init__.py") - {name}
        for name, path in files.items()
    }


def upward(imports: dict[str, set[str]]) -> list[str]:
    return [f"{name} imports {target}" for name, targets in imports.items() for target in sorted(targets) if layer(target) < layer(name)]


def test_imports_point_downwards() -> None:
    assert upward(graph()) == []


def test_no_module_imports_itself_over_others() -> None:
    imports = graph()
    # A package's own __init__ runs before its modules; an import of the package by its module is not a circle of files.
    files = {name: {target for target in targets if not name.startswith(f"{target}.")} for name, targets in imports.items()}
    TopologicalSorter(files).prepare()


ENGINES = {"vllm": "distributed.strategy.vllm.compat", "sglang": "distributed.strategy.sglang.compat"}
"""Engine, and the one package that may know its version."""


def packages_of(source: str) -> set[str]:
    """Top-level packages that a source imports, or asks importlib for, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import():
                found |= {alias.name.partition(".")[0] for alias in node.names}
            case ast.ImportFrom(level=0, module=str(module)):
                found.add(module.partition(".")[0])
            case ast.Call(func=ast.Name(id="import_module" | "find_spec") | ast.Attribute(attr="import_module" | "find_spec")):
                found |= {one.value.partition(".")[0] for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)}
    return found


def test_an_engine_is_imported_in_one_place_only() -> None:
    strangers = [
        f"{name} imports {engine}"
        for name, path in modules().items()
        for engine in sorted(packages_of(path.read_text(encoding="utf-8")) & ENGINES.keys())
        if not f"{name}.".startswith(f"{ENGINES[engine]}.")
    ]
    assert strangers == []


def test_frameworks_that_hold_models_are_behind_the_strategies() -> None:
    """Megatron stays within its own package; and whoever wants a model asks for it by its strategy's name, but for plans, which trace
    Megatron's alone."""
    sources = {name: path.read_text(encoding="utf-8") for name, path in modules().items()}
    own = "distributed.strategy"
    assert [name for name, source in sources.items() if "megatron" in packages_of(source) and not name.startswith(f"{own}.megatron.")] == []
    behind = (f"{own}.megatron", f"{own}.hf")
    outside = {
        (name, target)
        for name, targets in graph().items()
        for target in targets
        if target.startswith(behind) and not name.startswith(f"{own}.megatron")
    }
    traces = {(f"planning.{name}", f"{own}.megatron.traced") for name in ("memory", "report")}
    assert outside == {(f"{own}.build", f"{own}.megatron.strategy"), (f"{own}.build", f"{own}.hf"), *traces}


def test_the_page_has_the_layers_in_this_order() -> None:
    """The guards below hold LAYERS; readers see the page."""
    assert f"\n## Layers\n\n{'; '.join(', '.join(packages) for packages in LAYERS)}. An import goes only downwards" in PAGE


WALKS = {"From the YAML to the gradient, ": 64, "A checkpoint, ": 17, "A weight, ": 23}
"""Beginning of each walk on the page, and its number of files. A way grows longer only on purpose, and the page says how long it is."""


def walk(beginning: str, page: str = PAGE) -> tuple[str, list[str]]:
    """First paragraph of a walk, and its files from the repository's root: those that begin a table's rows or a list's points."""
    text, _, rest = page.partition(f"\n{beginning}")[2].partition("\n\n")
    files = re.findall(r"^(?:\| |- )`([\w/.]+)`", rest.partition("\n\n")[0], re.MULTILINE)
    return text, [file if rest.startswith("|") else f"roll_lite/{file}" for file in files]


@pytest.mark.parametrize("beginning", WALKS)
def test_a_walk_names_each_file_once_and_says_how_many(beginning: str) -> None:
    text, files = walk(beginning)
    assert [file for file in files if not (PACKAGE.parent / file).is_file()] == []
    assert len(set(files)) == len(files) == WALKS[beginning]
    assert f"{len(files)} files" in text


def test_every_file_that_the_page_names_exists() -> None:
    """A name is a path's end: from the root, the package, a folder below it, or the file's alone."""
    named = set(re.findall(r"`([\w/.]+\.(?:py|md|yaml))`", PAGE))
    root = PACKAGE.parent
    files = [
        path.relative_to(root) for folder in ("roll_lite", "tests", "bench", "docs", "examples") for path in (root / folder).rglob("*.*")
    ]
    assert named and sorted(one for one in named if not any(f"/{file}".endswith(f"/{one}") for file in files)) == []


def test_every_strategy_of_the_configuration_is_registered() -> None:
    """Those of models by name; engines are matched by type."""
    names = {one.model_fields["name"].default for one in get_args(RewardModelStrategyConfig)}
    assert names == CONNECTS_RANKS.keys() >= {TrainStrategyConfig.model_fields["name"].default}


def test_that_guard_sees_every_kind_of_import() -> None:
    assert packages_of("def f():\n    from vllm.a import b\n    import sglang.srt as s\n    importlib.import_module('ray.x')") == {
        "vllm",
        "sglang",
        "ray",
    }


def test_the_guard_sees_every_kind_of_import() -> None:
    known = {"cli", "pipeline.build", "pipeline", "config.schema.run", "data.proto", "distributed.strategy", "distributed.strategy.base"}
    source = """
import roll_lite.cli
from roll_lite.pipeline import build
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from roll_lite.config.schema.run import (RunConfig)
def lazily():
    from ..data import proto
    from .strategy.base import TrainStrategy
"""
    expected = {"cli", "pipeline", "pipeline.build", "config.schema.run", "data.proto", "distributed.strategy.base"}
    assert imported(source, "distributed.cluster", known, is_package=False) == expected
    assert imported("from .base import x", "distributed.strategy", known, is_package=True) == {"distributed.strategy.base"}
    assert upward({"config.schema": {"data.proto"}, "workers.infer": {"scheduler.router"}}) == ["config.schema imports data.proto"]
    assert upward({"algorithms.losses": {"config.schema", "algorithms.kl"}}) == ["algorithms.losses imports config.schema"]
    with pytest.raises(AssertionError, match="belongs to no layer"):
        layer("utils")
