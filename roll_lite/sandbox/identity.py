"""Tests that ask whether one object is another, or what its type is called: Python itself sees only copies and stand-ins."""

from __future__ import annotations

import ast

IDENTICAL = "__identical__"
"""The name under which the tests find who can."""
TYPE_NAME = "__type_name__"
OF_UNITTEST = ("assertIs", "assertIsNot")


def asks_identity(source: str) -> tuple[ast.Module, bool]:
    """The tests, asking that; and whether they do."""
    asker = _Asker()
    tree = asker.visit(ast.parse(source))
    return ast.fix_missing_locations(tree), asker.asks


class _Asker(ast.NodeTransformer):
    def __init__(self) -> None:
        self.asks = False

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
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """`type(a).__name__`."""
        self.generic_visit(node)
        match node:
            case ast.Attribute(value=ast.Call(func=ast.Name(id="type"), args=[one], keywords=[]), attr="__name__", ctx=ast.Load()):
                return ast.copy_location(ast.Call(ast.Name(TYPE_NAME, ast.Load()), [one], []), node)
        return node

    def _identical(self, node: ast.expr, one: ast.expr, other: ast.expr) -> ast.Call:
        self.asks = True
        return ast.copy_location(ast.Call(ast.Name(IDENTICAL, ast.Load()), [one, other], []), node)


def _constant(*nodes: ast.expr) -> bool:
    return any(isinstance(node, ast.Constant) for node in nodes)
