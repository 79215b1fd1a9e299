"""Does the name of a reward, or of another function of the user's, lead to a function that takes its arguments?

Found out without importing anything. A user's module may import torch or start a client; checking a configuration must stay fast and
without side effects. So modules are located by the import system's path finder and read with ast. What cannot be known that way is left
to the start of the run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from roll_lite.config.problems import Problem, did_you_mean

BUILT_IN_REWARDS = {
    "math": "roll_lite.rewards.math.math",
    "exact": "roll_lite.rewards.exact.exact",
    "code": "roll_lite.rewards.code.code",
    "choice": "roll_lite.rewards.choice.choice",
    "instruction": "roll_lite.rewards.instruction.instruction",
    "length": "roll_lite.rewards.length.length",
    "repetition": "roll_lite.rewards.repetition.repetition",
    "format": "roll_lite.rewards.form.format",
    "model": "roll_lite.rewards.model.model",
    "judge": "roll_lite.rewards.judge.judge",
    "remote": "roll_lite.rewards.remote.remote",
}
"""By name; a test holds this against the registry, which this layer may not import."""


def check_reward(path: str, name: str, arguments: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems with the reward section at `path`."""
    if "." not in name and name not in BUILT_IN_REWARDS:
        message = f"no such reward; {did_you_mean(name, BUILT_IN_REWARDS)} A function of your own is a dotted path, package.module.function"
        yield Problem(f"{path}.type", message, name)
    else:
        yield from check_function(path, "type", BUILT_IN_REWARDS.get(name, name), arguments, name)


def check_function(path: str, key: str, function_path: str, arguments: Mapping[str, Any], name: str | None = None) -> Iterator[Problem]:
    """Problems with the function that the key of the section at `path` names, and with the section's `args` for it. `name`: what the
    configuration calls it."""
    name = name or function_path
    module_name, _, attribute = function_path.rpartition(".")
    if not module_name:
        yield Problem(f"{path}.{key}", "a function of your own is a dotted path, package.module.function", name)
        return
    spec = _located(module_name)
    if isinstance(spec, str):
        yield Problem(f"{path}.{key}", spec, name)
        return
    if spec.origin is None or not spec.origin.endswith(".py"):
        return
    try:
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError) as error:
        yield Problem(f"{path}.{key}", f"{spec.origin} cannot be read: {error}", name)
        return
    names = _top_level_names(tree)
    if attribute not in names and "*" not in names:
        functions = [
            one for one, node in names.items() if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not one.startswith("_")
        ]
        yield Problem(f"{path}.{key}", f"{spec.origin} has no {attribute!r}; {did_you_mean(attribute, functions)}", name)
    function = names.get(attribute)
    if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        yield from _arguments_fit(path, key, name, function, arguments)


def _located(module_name: str) -> ModuleSpec | str:
    """The module's spec, or what is wrong. Parents are located, not imported."""
    top, *below = module_name.split(".")
    spec = _located_top(top)
    if spec is None:
        return f"there is no module {top!r} importable from {Path.cwd()} or a folder on PYTHONPATH"
    found = top
    for part in below:
        # Asked for by its own name alone: a namespace package looks its parent up among the imported modules.
        inner = PathFinder.find_spec(part, list(spec.submodule_search_locations or ()))
        if inner is None:
            return f"there is no module {part!r} in {found}"
        spec, found = inner, f"{found}.{part}"
    return spec


def _located_top(name: str) -> ModuleSpec | None:
    """find_spec imports nothing for a name without dots. The current folder is searched as well, as at the start of the run."""
    try:
        spec = find_spec(name)
    except (ValueError, ImportError):  # a module that was loaded in an unusual way, such as __main__, has no spec
        spec = None
    return spec or PathFinder.find_spec(name, [str(Path.cwd())])


def _top_level_names(tree: ast.Module) -> dict[str, ast.stmt]:
    names: dict[str, ast.stmt] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node in tree.body:
            names[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update({(alias.asname or alias.name).partition(".")[0]: node for alias in node.names})
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update({target.id: node for target in targets if isinstance(target, ast.Name)})
    return names


def _arguments_fit(
    path: str, key: str, name: str, function: ast.FunctionDef | ast.AsyncFunctionDef, given: Mapping[str, Any]
) -> Iterator[Problem]:
    if function.decorator_list:  # a decorator may change the signature
        return
    positional = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
    keywords = [one.arg for one in function.args.kwonlyargs]
    accepted = [*positional[1:], *keywords]
    if not positional and function.args.vararg is None:
        what = "the sample" if key == "type" else "its input"
        yield Problem(f"{path}.{key}", f"{function.name}() has to take {what} as its first argument", name)
        return
    if function.args.kwarg is None:
        for argument in given:
            if argument not in accepted:
                yield Problem(
                    f"{path}.args.{argument}",
                    f"{name!r} takes no such argument; {did_you_mean(argument, accepted)}",
                    given[argument],
                )
    first_default = len(positional) - len(function.args.defaults)
    required = positional[1:first_default] + [
        one for one, default in zip(keywords, function.args.kw_defaults, strict=True) if default is None
    ]
    missing = [one for one in required if one not in given]
    if missing:
        yield Problem(f"{path}.args", f"{name!r} needs {', '.join(missing)}", dict(given))
