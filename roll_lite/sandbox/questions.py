"""What tests ask of a program, told from their syntax: words in comments and texts ask nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator

ASYNCHRONOUS = (ast.Await, ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith)
CATCHING = ("raises", "assertRaises", "assertRaisesRegex", "suppress")
TELLING = ("isinstance", "issubclass")


class Questions:
    def __init__(self, source: str) -> None:
        self._nodes = list(ast.walk(ast.parse(source)))
        self._caught = {name for node in self._nodes for part in _catching(node) for name in _names(part)}
        self._caught |= {name for node in self._nodes for part in self._passed_on(node) for name in _names(part)}
        self._told = {name for node in self._nodes for part in _telling(node) for name in _names(part)}
        self._called = {node.func.id for node in self._nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        self.attributes = {node.attr for node in self._nodes if isinstance(node, ast.Attribute)}
        self.ends_of_blocks = {line for node in self._nodes for line in self._end_of_block(node)}
        """Lines of what stands last in a `with` and checks nothing."""
        self.awaits = any(isinstance(node, ASYNCHRONOUS) for node in self._nodes) or self._has_name("asyncio")
        self.expecting_end = {line for node in self._nodes for line in _expects_end(node)}
        """Lines where the end of an iterator is caught."""

    def may_catch(self, name: str) -> bool:
        """It may be an exception that they catch, or tell from others."""
        return name in self._caught | self._told

    def only_catches(self, name: str) -> bool:
        return name in self._caught - self._called

    def _has_name(self, name: str) -> bool:
        used = any(isinstance(node, ast.Name) and node.id == name for node in self._nodes)
        return used or any(isinstance(node, ast.alias | ast.ImportFrom) and name in _modules(node) for node in self._nodes)

    def _end_of_block(self, node: ast.AST) -> Iterator[int]:
        if not isinstance(node, ast.With | ast.AsyncWith) or not isinstance(last := node.body[-1], ast.Raise | ast.Expr):
            return
        own = {one.name for one in self._nodes if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
        called = {name for one in ast.walk(last) if isinstance(one, ast.Call) for name in _called(one)}
        alone = all((one.end_lineno or last.lineno) < last.lineno for one in node.body[:-1])
        if alone and not called & own and not any(name.startswith(("assert", "fail")) for name in called):
            yield from range(last.lineno, (last.end_lineno or last.lineno) + 1)

    def _passed_on(self, node: ast.AST) -> Iterator[ast.AST]:
        """What becomes the value of a name that is caught."""
        match node:
            case ast.For(target=target, iter=value) | ast.Assign(targets=[target], value=value) if self._caught & set(_names(target)):
                yield value
            case ast.Call(func=ast.Name(id=name), args=args) if self._is_catcher(name):
                yield from args

    def _is_catcher(self, name: str) -> bool:
        """A function of the tests that catches what it is given."""
        found = [node for node in self._nodes if isinstance(node, ast.FunctionDef) and node.name == name]
        caught = {one for function in found for node in ast.walk(function) for part in _catching(node) for one in _names(part)}
        return any(arg.arg in caught for function in found for arg in function.args.args)


def _expects_end(node: ast.AST) -> Iterator[int]:
    match node:
        case ast.Try(body=body, handlers=handlers) if any("StopIteration" in _names(one.type or one) for one in handlers):
            for one in body:
                yield from range(one.lineno, (one.end_lineno or one.lineno) + 1)
        case ast.With(items=[ast.withitem(ast.Call() as caught)], body=body) if _catches_end(caught):
            for one in body:
                yield from range(one.lineno, (one.end_lineno or one.lineno) + 1)
        case ast.Call() if _catches_end(node):
            yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _catches_end(call: ast.Call) -> bool:
    return any("StopIteration" in _names(kind) for kind in _catching(call))


def _called(node: ast.Call) -> Iterator[str]:
    match node.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            yield name


def _catching(node: ast.AST) -> Iterator[ast.AST]:
    """Where exceptions are named."""
    match node:
        case ast.ExceptHandler(type=ast.expr() as kind):
            yield kind
        case ast.Raise(exc=ast.Call(func=kind)) | ast.Raise(exc=ast.Name() as kind):
            yield kind
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=args) if name in CATCHING:
            yield from args


def _telling(node: ast.AST) -> Iterator[ast.AST]:
    """Where kinds are named that something may be of."""
    match node:
        case ast.Call(func=ast.Name(id=name), args=[_, kind]) if name in TELLING:
            yield kind
        case ast.Compare(left=left, comparators=others) if any(_is_type(one) for one in (left, *others)):
            yield from (left, *others)


def _is_type(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Name(id="type")) | ast.Attribute(attr="__class__"):
            return True
    return False


def _names(node: ast.AST) -> Iterator[str]:
    """Those in it, other than of functions that are called and of what these are given."""
    match node:
        case ast.Name(id=name):
            yield name
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            for part in parts:
                yield from _names(part)


def _modules(node: ast.alias | ast.ImportFrom) -> list[str]:
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else [node.name]
