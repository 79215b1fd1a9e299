"""Tests, rewritten where they ask what Python itself would answer of copies and stand-ins: whether one object is another, of what type it
is; and where they derive a class from one of the program's."""

from __future__ import annotations

import ast
import builtins
import copy

IDENTICAL = "__identical__"
"""The names under which the tests find who can tell."""
TYPE_OF = "__type_of__"
LIVES_THERE = "__lives_there__"
DERIVED = "__derived__"
OF_UNITTEST = ("assertIs", "assertIsNot")


def rewritten(source: str) -> tuple[ast.Module, bool]:
    """The tests, and whether they ask for identity."""
    tree = ast.parse(source)
    asker = _Asker(tree)
    return ast.fix_missing_locations(asker.visit(tree)), asker.asks


class _Asker(ast.NodeTransformer):
    def __init__(self, tree: ast.Module) -> None:
        self.asks = False
        self._imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """`a is b`, unless one is a constant."""
        self.generic_visit(node)
        match node:
            case ast.Compare(ops=[ast.Is() | ast.IsNot() as kind], left=one, comparators=[other]) if not _constant(one, other):
                asked = self._identical(node, one, other)
                return asked if isinstance(kind, ast.Is) else ast.copy_location(ast.UnaryOp(ast.Not(), asked), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.Call(func=ast.Attribute(attr=name), args=[one, other, *more]) if name in OF_UNITTEST and not _constant(one, other):
                truth = "assertTrue" if name == "assertIs" else "assertFalse"
                func = ast.copy_location(ast.Attribute(node.func.value, truth, ast.Load()), node.func)  # type: ignore[attr-defined]
                return ast.copy_location(ast.Call(func, [self._identical(node, one, other), *more], node.keywords), node)
            case ast.Call(func=ast.Name(id="type"), args=[one], keywords=[]):
                return _call(node, TYPE_OF, one)
            case ast.Call(func=ast.Name(id="map"), args=[ast.Name(id="type") as kind, *_]):
                kind.id = TYPE_OF
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        return _call(node, TYPE_OF, node.value) if node.attr == "__class__" and isinstance(node.ctx, ast.Load) else node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        """Where a base is the program's, the class is made there."""
        there = self._source(node)
        self.generic_visit(node)
        if not node.bases or node.keywords:
            return node
        made = _call(node, DERIVED, *(ast.Constant(text) for text in (node.name, *there)), *copy.deepcopy(node.bases))
        assigned = ast.copy_location(ast.Assign([ast.Name(node.name, ast.Store())], made), node)
        return ast.copy_location(ast.If(_call(node, LIVES_THERE, *copy.deepcopy(node.bases)), [assigned], [node]), node)

    def _source(self, node: ast.ClassDef) -> tuple[str, str]:
        """Of the class, with the imports that it needs, its bases called `base_0` and so on; and which other names it needs."""
        alone = copy.deepcopy(node)
        alone.bases = [ast.Name(f"base_{place}", ast.Load()) for place in range(len(node.bases))]
        inside = list(ast.walk(alone))
        names = [one for one in inside if isinstance(one, ast.Name)]
        bound = {one.id for one in names if not isinstance(one.ctx, ast.Load)} | {f"base_{place}" for place in range(len(node.bases))}
        bound |= {one.arg for one in inside if isinstance(one, ast.arg)}
        bound |= {one.name or "" for one in inside if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ExceptHandler)}
        bound |= {*dir(builtins), node.name, "__class__"}
        needed, imports = {one.id for one in names} - bound, list[ast.stmt]()
        for one in self._imports:
            here = {(alias.asname or alias.name).partition(".")[0] for alias in one.names} & needed
            imports += [one] if here else []
            needed -= here
        if any(
            isinstance(one, ast.Assert) or (isinstance(one, ast.Attribute) and one.attr.startswith(("assert", "fail"))) for one in inside
        ):
            needed.add("assert")  # where nobody could fail the tests
        return ast.unparse(ast.Module([*imports, alone], [])), " ".join(sorted(needed))

    def _identical(self, node: ast.expr, one: ast.expr, other: ast.expr) -> ast.Call:
        self.asks = True
        return _call(node, IDENTICAL, one, other)


def _call(node: ast.stmt | ast.expr, name: str, *args: ast.expr) -> ast.Call:
    return ast.copy_location(ast.Call(ast.Name(name, ast.Load()), list(args), []), node)


def _constant(*nodes: ast.expr) -> bool:
    return any(isinstance(node, ast.Constant) for node in nodes)
