"""Functions of users, imported and held against their signatures."""

from __future__ import annotations

import pytest
from config_project import Project
from support_cases import cases

from roll_lite.config.user_function import check_function

MODULE = """
import os
import sys
from functools import partial, lru_cache, wraps
from math import hypot
from pack import handed_on, klass as renamed

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
def hides(function):
    def inner(*args, **kwargs): ...
    return inner
@hides
def hidden_arguments(sample): ...
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
instance = Klass()
class Callable:
    def __call__(self, sample, limit): ...
callable_instance = Callable()
"""
PACKAGE = """
from .deeper import handed_on
class klass: ...
"""


@pytest.fixture(autouse=True)
def user_modules(project: Project) -> None:
    project.write("ours.py", MODULE)
    project.write("pack/__init__.py", PACKAGE)
    project.write("pack/deeper.py", "def handed_on(sample, limit=1): ...")


@pytest.mark.parametrize(("name", "given", "path", "says"), cases("config/functions"))
def test_functions_and_their_arguments(name: str, given: list[str], path: str | None, says: str | None) -> None:
    """`path`: of what is wrong; None where nothing is."""
    problems = list(check_function("name", f"ours.{name}", dict.fromkeys(given, 1), inputs=("the sample",)))
    assert [f"reward.{key}" for key, _ in problems[:1]] == ([path] if path else [])
    assert says is None or says in problems[0][1]


def test_a_module_that_makes_its_names_up(project: Project) -> None:
    project.write("lazy.py", "def __getattr__(name): return lambda sample: 1.0")
    project.write("starred.py", "from pack import *")
    assert list(check_function("name", "lazy.anything", {})) == []
    assert list(check_function("name", "starred.handed_on", {})) == []


def test_other_encodings_and_files_that_are_no_python(project: Project) -> None:
    (project.folder / "latin.py").write_bytes("# coding: latin-1\n# é\ndef f(sample, limit): ...\n".encode("latin-1"))
    assert [key for key, _ in check_function("name", "latin.f", {})] == ["args"]
    for number, content in enumerate((b"def f(", b"\xff\xfe", b"x = '\0'", b"# coding: klingon\n")):
        (project.folder / f"broken{number}.py").write_bytes(content)
        ((key, message),) = check_function("name", f"broken{number}.f", {})
        assert key == "name" and f"importing broken{number} failed: SyntaxError: " in message


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("from math import nope", "ImportError: cannot import name 'nope' from 'math'"),
        ("import sys; sys.exit('no licence')", "SystemExit: no licence"),
        ("import sys; sys.exit()", "SystemExit: SystemExit"),
        ("raise RuntimeError('no\\nGPU')", "RuntimeError: no"),
        ("nothing", "NameError: name 'nothing' is not defined"),
        ("import loud.more", "ModuleNotFoundError: No module named 'loud.more'; 'loud' is not a package"),
    ],
)
def test_an_import_that_fails_is_told_in_one_line(project: Project, code: str, said: str) -> None:
    project.write("loud.py", code)
    ((key, message),) = check_function("name", "loud.f", {})
    assert key == "name" and message.startswith(f"importing loud failed: {said}") and "\n" not in message


def test_an_import_may_print(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    project.write("loud.py", "print('loaded')\ndef f(sample, limit=1): ...\n")
    assert list(check_function("name", "loud.f", {"limit": 2})) == []
    assert capsys.readouterr() == ("", "loaded\n")


def test_where_a_class_will_do() -> None:
    assert list(check_function("name", "ours.Klass", {"any": 1}, or_class=True)) == []
    ((_, message),) = check_function("name", "ours.number", {}, or_class=True)
    assert "is a constant" in message
