"""Functions of users, found and held against their signatures without importing their modules."""

from __future__ import annotations

import pytest
from config_project import Project

from roll_lite.config.checks.functions import check_function

MODULE = """
import os
import sys
from functools import partial, lru_cache
from pack import handed_on, klass as renamed, nowhere

if sys.version_info > (3, 0):
    def under_if(sample, limit=1): ...
try:
    import numpy
except ImportError:
    numpy = None
else:
    async def under_else(sample, *, limit): ...
if numpy:
    def twice(sample, a): ...
else:
    def twice(sample, b): ...
with open(os.devnull):
    def under_with(sample): ...

def plain(sample, limit, slope=1.0, *, mode="a"): ...
def takes_all(sample, **anything): ...
def only_rest(*samples): ...
def by_place(sample, limit=1, /, other=2): ...
def no_sample(*, limit): ...
@lru_cache
def decorated(sample): ...
class Klass:
    def inside(self): ...
def outer():
    hidden = 1
assigned = plain
made = partial(plain, limit=2)
short = lambda sample, limit: 0.0
one, other = plain, 3
annotated: object = plain
number = 3
text: str = "x"
table = {"a": 1}
around = round_about
round_about = around
instance = Klass()
"""
PACKAGE = """
from .deeper import handed_on
from pack.loop import nowhere
class klass: ...
"""
RIGHT = [
    ("under_if", ["limit"]),
    ("under_else", ["limit"]),
    ("under_with", []),
    ("twice", ["a"]),
    ("twice", ["b"]),
    ("plain", ["limit", "mode"]),
    ("takes_all", ["limit", "whatever"]),
    ("only_rest", []),
    ("by_place", ["other"]),
    ("decorated", ["limit"]),
    ("assigned", ["limit"]),
    ("made", ["anything"]),
    ("short", ["limit"]),
    ("one", ["limit"]),
    ("annotated", ["limit"]),
    ("around", ["anything"]),
    ("instance", ["anything"]),
    ("handed_on", ["limit"]),
    ("nowhere", ["anything"]),
]
WRONG = [
    ("under_if", ["limt"], "reward.args.limt", "did you mean 'limit'?"),
    ("under_else", [], "reward.args", "needs limit"),
    ("plain", ["sample", "limit"], "reward.args.sample", "takes no such argument"),
    ("assigned", ["slop", "limit"], "reward.args.slop", "did you mean 'slope'?"),
    ("short", [], "reward.args", "needs limit"),
    ("by_place", ["limit"], "reward.args.limit", "takes no such argument"),
    ("no_sample", ["limit"], "reward.name", "has to take the sample"),
    ("handed_on", ["limits"], "reward.args.limits", "did you mean 'limit'?"),
    ("renamed", [], "reward.name", "is a class"),
    ("Klass", [], "reward.name", "is a class"),
    ("number", [], "reward.name", "is a constant"),
    ("text", [], "reward.name", "is a constant"),
    ("table", [], "reward.name", "is a constant"),
    ("inside", [], "reward.name", "has no 'inside'"),
    ("hidden", [], "reward.name", "has no 'hidden'"),
    ("planes", [], "reward.name", "did you mean 'plain'?"),
]


@pytest.fixture(autouse=True)
def user_modules(project: Project) -> None:
    project.write("ours.py", MODULE)
    project.write("pack/__init__.py", PACKAGE)
    project.write("pack/deeper.py", "def handed_on(sample, limit=1): ...")
    project.write("pack/loop.py", "from pack import nowhere")


@pytest.mark.parametrize(("name", "given"), RIGHT)
def test_functions_that_are_there(name: str, given: list[str]) -> None:
    assert list(check_function("reward", "name", f"ours.{name}", dict.fromkeys(given, 1))) == []


@pytest.mark.parametrize(("name", "given", "path", "message"), WRONG)
def test_what_is_told(name: str, given: list[str], path: str, message: str) -> None:
    problem, *_ = check_function("reward", "name", f"ours.{name}", dict.fromkeys(given, 1))
    assert problem.path == path and message in problem.message


def test_a_module_that_makes_its_names_up(project: Project) -> None:
    project.write("lazy.py", "def __getattr__(name): ...")
    project.write("starred.py", "from pack import *")
    assert list(check_function("reward", "name", "lazy.anything", {})) == []
    assert list(check_function("reward", "name", "starred.anything", {})) == []


def test_other_encodings_and_files_that_are_no_python(project: Project) -> None:
    (project.folder / "latin.py").write_bytes("# coding: latin-1\n# é\ndef f(sample, limit): ...\n".encode("latin-1"))
    assert [one.path for one in check_function("reward", "name", "latin.f", {})] == ["reward.args"]
    for content in (b"def f(", b"\xff\xfe", b"x = '\0'", b"# coding: klingon\n"):
        (project.folder / "broken.py").write_bytes(content)
        (problem,) = check_function("reward", "name", "broken.f", {})
        assert problem.path == "reward.name" and "cannot be read" in problem.message


def test_nothing_is_imported(project: Project) -> None:
    project.write("loud.py", "raise SystemExit('imported')\ndef f(sample, limit=1): ...\n")
    assert list(check_function("reward", "name", "loud.f", {"limit": 2})) == []


def test_where_a_class_will_do() -> None:
    assert list(check_function("tracker", "name", "ours.Klass", {"any": 1}, or_class=True)) == []
    (problem,) = check_function("tracker", "name", "ours.number", {}, or_class=True)
    assert "is a constant" in problem.message
