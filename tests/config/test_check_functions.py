"""Functions of users, found and held against their signatures without importing their modules."""

from __future__ import annotations

import pytest
from config_project import Project
from support_cases import cases

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


@pytest.fixture(autouse=True)
def user_modules(project: Project) -> None:
    project.write("ours.py", MODULE)
    project.write("pack/__init__.py", PACKAGE)
    project.write("pack/deeper.py", "def handed_on(sample, limit=1): ...")
    project.write("pack/loop.py", "from pack import nowhere")


@pytest.mark.parametrize(("name", "given", "path", "says"), cases("config/functions"))
def test_functions_and_their_arguments(name: str, given: list[str], path: str | None, says: str | None) -> None:
    """`path`: of what is wrong; None where nothing is."""
    problems = list(check_function("reward", "name", f"ours.{name}", dict.fromkeys(given, 1), inputs=("the sample",)))
    assert [problem.path for problem in problems[:1]] == ([path] if path else [])
    assert says is None or says in problems[0].message


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
