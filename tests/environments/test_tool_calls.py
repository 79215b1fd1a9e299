"""Parsing of tool calls: formats, mistakes of the model, and schemas of functions."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from engine_harness import require

from roll_lite.config.schema.environments import PythonToolConfig
from roll_lite.environments import tool_calls
from roll_lite.environments.python_tool import Interpreter
from roll_lite.environments.tool_calls import CallFormat, Parsed, ToolCallParser, family_of, schema_of

FAMILY: dict[str, str] = {"hermes": "qwen3", "qwen3_coder": "qwen3", "llama3": "llama3.1", "mistral": "mistral-nemo"}
PARIS = {"city": "Paris"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "count": {"type": "integer"},
                    "exact": {"type": "boolean"},
                    "parts": {"type": "array"},
                    "either": {"anyOf": [{"type": "integer"}, {"type": "array"}]},
                },
            },
        },
    }
]


@pytest.fixture
def parse(tokenizer_of: Callable[[str], Any]) -> Callable[..., Parsed]:
    def parsed(form: CallFormat | None, text: str, thinking: bool = False) -> Parsed:
        tokenizer = tokenizer_of(FAMILY[form or "hermes"])
        return ToolCallParser(tokenizer, form, TOOLS, thinking).parse(tokenizer.encode(text, add_special_tokens=False))

    return parsed


def called(parsed: Parsed) -> list[tuple[str, Any]]:
    """Names and arguments of calls; of malformed ones, the reason."""
    return [(one["function"]["name"], one.get("problem", one["function"]["arguments"])) for one in parsed.calls]


CALL = '{"name": "weather", "arguments": {"city": "Paris"}}'
GOOD: Sequence[tuple[CallFormat, str, str, list[tuple[str, Any]]]] = (
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call><|im_end|>", "", [("weather", PARIS)]),
    (
        "hermes",
        f"Both:\n<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call> Done.",
        "Both:\n\n Done.",
        [("weather", PARIS), ("weather", PARIS)],
    ),
    ("hermes", f"<tool_call>{CALL}", "", [("weather", PARIS)]),
    ("hermes", f"<tool_call>{CALL}\n<tool_call>{CALL}</tool_call>", "", [("weather", PARIS), ("weather", PARIS)]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
    ("hermes", '<tool_call>{"name": "f", "parameters": {"a": 1}, "mood": "good"}</tool_call>', "", [("f", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>', "", [("f", {"a": 2})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>é"}}</tool_call>', "", [("f", {"a": "</tool_call>é"})]),
    ("hermes", "The answer is 42.<|im_end|>", "The answer is 42.", []),
    (
        "qwen3_coder",
        "Look.\n<tool_call>\n<function=f>\n<parameter=text>\n12\n\n</parameter>\n<parameter=count>\n12\n</parameter>\n"
        "<parameter=exact>True</parameter><parameter=parts>[1]</parameter><parameter=either>[2]</parameter><parameter=new>3</parameter>"
        "\n</function>\n</tool_call>",
        "Look.",
        [("f", {"text": "12\n", "count": 12, "exact": True, "parts": [1], "either": [2], "new": "3"})],
    ),
    (
        "qwen3_coder",
        "<function=g></function><function=f><parameter=count>many</parameter></function>",
        "",
        [("g", {}), ("f", {"count": "many"})],
    ),
    ("llama3", '{"name": "weather", "parameters": {"city": "Paris"}}<|eot_id|>', "", [("weather", PARIS)]),
    (
        "llama3",
        '<|python_tag|>{"type": "function", "name": "weather", "parameters": {"city": "Paris"}}<|eom_id|>',
        "",
        [("weather", PARIS)],
    ),
    ("llama3", f'<|python_tag|>{CALL}; {{"name": "f"}}; {CALL}', '{"name": "f"};', [("weather", PARIS), ("weather", PARIS)]),
    ("llama3", f"I call {CALL} now.", "I call now.", [("weather", PARIS)]),
    ("llama3", '{"name": "Bob", "age": 5}', '{"name": "Bob", "age": 5}', []),
    ("llama3", '{"answer": 5}', '{"answer": 5}', []),
    ("mistral", f'[TOOL_CALLS][{CALL[:-1]}, "id": "abcdefghi"}}, {CALL}]</s>', "", [("weather", PARIS), ("weather", PARIS)]),
    ("mistral", f"[TOOL_CALLS] {CALL} Now.", "Now.", [("weather", PARIS)]),
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]f{}', "", [("weather", PARIS), ("f", {})]),
    ("mistral", '[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{"city": "Paris"}', "", [("weather", PARIS)]),
)


@pytest.mark.parametrize(("form", "text", "content", "calls"), GOOD)
def test_calls(parse: Callable[..., Parsed], form: CallFormat, text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    found = parse(form, text)
    assert (found.content, called(found)) == (content, calls)


BAD: Sequence[tuple[CallFormat, str, list[str | None]]] = (
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "Par', ["not valid JSON: Unterminated string"]),
    ("hermes", f"<tool_call>{{'name': 'f'}}</tool_call><tool_call>{CALL}</tool_call>", ["not valid JSON: Expecting property name", None]),
    ("hermes", f"<tool_call><tool_call>{CALL}</tool_call>", ["not valid JSON: Expecting value at character 0", None]),
    ("hermes", f"<tool_call>{CALL}}}</tool_call>", ["text after the JSON object"]),
    ("hermes", '<tool_call>["f"]</tool_call>', ["a call is an object with a name"]),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>', ["a call is an object with a name"]),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', ["the arguments of f must be an object"]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "no"}</tool_call>', ["the arguments of f must be an object; not valid JSON"]),
    ("hermes", "<tool_call>" + "[" * 100_000, ["nested too deeply"]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}", ["not valid JSON: Exceeds the limit"]),
    ("qwen3_coder", "<tool_call><function=f><parameter=text>half", ["expected <function=name>"]),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=text>a<tool_call><function=g></function></tool_call>",
        ["expected <function=name>", None],
    ),
    ("qwen3_coder", f"<tool_call>{CALL}</tool_call>", ["expected <function=name>"]),
    ("llama3", '<|python_tag|>print("hi")', ["not valid JSON"]),
    ("llama3", '{"name": "f", "parameters": {"a": "Par', ["not valid JSON: Unterminated string"]),
    ("llama3", 'It is {"name": unquoted}, as told.', []),
    ("llama3", f'Not {{"name": x}} but {CALL}', [None]),
    ("llama3", '{"name": "f", "parameters": 5}', ["the arguments of f must be an object"]),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a"', ["not valid JSON"]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a"[TOOL_CALLS]g{}', ["not valid JSON", None]),
    ("mistral", "[TOOL_CALLS]", ["not valid JSON: Expecting value"]),
    ("mistral", "[TOOL_CALLS][5]", ["a call is an object with a name"]),
)


@pytest.mark.parametrize(("form", "text", "problems"), BAD)
def test_malformed_calls(parse: Callable[..., Parsed], form: CallFormat, text: str, problems: list[str | None]) -> None:
    calls = parse(form, text).calls
    assert len(calls) == len(problems)
    for call, problem in zip(calls, problems, strict=True):
        assert (problem is None) == ("problem" not in call)
        if problem is not None:
            assert call["problem"].startswith(problem)
            assert call["text"] in text
            assert call["function"]["arguments"] == {}


@pytest.mark.parametrize(
    ("text", "thinking", "count"),
    [
        ("<think>\nI try {call}\n</think>\n{call}", False, 1),
        ("I try {call}\n</think>\n{call}", True, 1),
        ("I try {call}\n</think>\n{call}", False, 1),
        ("<think>I try {call}", False, 0),
        ("I try {call}", True, 0),
        ("I try {call}", False, 1),
        ("<think></think>{call}<think>{call}</think>{call}", False, 2),
    ],
)
def test_calls_in_thoughts_do_not_count(parse: Callable[..., Parsed], text: str, thinking: bool, count: int) -> None:
    call = f"<tool_call>{CALL}</tool_call>"
    found = parse("hermes", text.format(call=call), thinking)
    assert len(found.calls) == count
    assert found.content.count(call) == text.count("{call}") - count
    assert found.content.startswith(text[:5] if text[:5] != "<thin" else "<think>") or "I try" not in text


WRITES: Sequence[tuple[CallFormat, str]] = (
    ("hermes", '<tool_call>{{"name": "f", "arguments": {{"text": "{}"}}}}</tool_call>'),
    ("qwen3_coder", "<tool_call><function=f><parameter=text>{}</parameter></function></tool_call>"),
    ("llama3", '{{"name": "f", "parameters": {{"text": "{}"}}}}'),
    ("mistral", '[TOOL_CALLS][{{"name": "f", "arguments": {{"text": "{}"}}}}]'),
)


@pytest.mark.parametrize("thoughts", ["", "<think>\nhm\n</think>\n", "hm </think>\n"])
@pytest.mark.parametrize("said", ["a </think> b", "use <think> tags", "re.sub('<think>.*</think>', x)", "[THINK]x[/THINK]"])
@pytest.mark.parametrize(("form", "written"), WRITES)
def test_arguments_may_speak_of_thoughts(parse: Callable[..., Parsed], form: CallFormat, written: str, said: str, thoughts: str) -> None:
    text = f"{thoughts}{written.format(said)}\n{written.format('x')}"
    expected = [("f", {"text": said}), ("f", {"text": "x"})]
    if form == "mistral":
        text, expected = text.rpartition("\n")[0], expected[:1]
    found = parse(form, text)
    assert (called(found), found.content) == (expected, thoughts.strip())


@pytest.mark.parametrize(("form", "written"), WRITES)
def test_many_thoughts_are_read_in_one_pass(
    parse: Callable[..., Parsed], monkeypatch: pytest.MonkeyPatch, form: CallFormat, written: str
) -> None:
    """A collapsed policy writes them, and parsing holds up all episodes of the worker."""
    finder, read = tool_calls.FINDERS[form], list[int]()

    def counted(text: str, *args: Any) -> Any:
        read.append(len(text))
        return finder(text, *args)

    monkeypatch.setitem(tool_calls.FINDERS, form, counted)
    text = f"{'<think></think> a' * 300}{written.format('</think>')}"
    found = parse(form, text)
    assert called(found) == [("f", {"text": "</think>"})] and found.content == "<think></think> a" * 300
    assert sum(read) <= 4 * len(text)


PYTHON = {"name": "python", "parameters": {"type": "object", "properties": {"code": {"type": "string"}}}}
CODE = 'import math\nprint(math.pi, {"name": 1})'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"<|python_tag|>{CODE}<|eom_id|>", "", [("python", {"code": CODE})]),
        (f"Let me see. <|python_tag|>\n{CODE}", "Let me see.", [("python", {"code": CODE})]),
        ("<|python_tag|>5 + 3", "", [("python", {"code": "5 + 3"})]),
        ("<|python_tag|>[1, 2]", "", [("python", {"code": "[1, 2]"})]),
        (f"<|python_tag|>{CALL}", "", [("weather", PARIS)]),
        (f"<|python_tag|> {CALL}; {CALL}", "", [("weather", PARIS), ("weather", PARIS)]),
        ('<|python_tag|>{"name": "python", "parameters": {"code": "1"}}', "", [("python", {"code": "1"})]),
        (
            '<|python_tag|>{"name": "weather", "parameters": {"ci',
            "",
            [("", "not valid JSON: Unterminated string starting at character 35")],
        ),
        (f"{CODE}", CODE, []),
    ],
)
def test_code_behind_llamas_python_tag_is_a_call_of_the_interpreter(
    tokenizer_of: Callable[[str], Any], text: str, content: str, calls: list[tuple[str, Any]]
) -> None:
    tokenizer = tokenizer_of("llama3.1")
    parser = ToolCallParser(tokenizer, "llama3", [{"type": "function", "function": PYTHON}, *TOOLS])
    found = parser.parse(tokenizer.encode(text, add_special_tokens=False))
    assert (found.content, called(found)) == (content, calls)


def test_the_shipped_interpreter_takes_code_behind_the_tag(tokenizer_of: Callable[[str], Any]) -> None:
    tokenizer = tokenizer_of("llama3.1")
    parser = ToolCallParser(tokenizer, "llama3", [schema_of(Interpreter(PythonToolConfig(name="python")).python)])
    assert called(parser.parse(tokenizer.encode(f"<|python_tag|>{CODE}", add_special_tokens=False))) == [("python", {"code": CODE})]


CODER_VALUES: dict[str, Any] = {
    "text": ["12", "a\nb\n", "", "  indented\n    more", "<b>x</b> & 'y' \"z\"", "Ünïcödé 🎉"],
    "count": [0, -7, 10**12],
    "exact": [True, False],
    "parts": [[], [1, "a", None], [{"a": [1.5]}]],
}


def coder_text(calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Calls as Qwen3-Coder's chat template writes them: containers as JSON, other values as Python's str."""
    blocks = []
    for name, arguments in calls:
        shown = {key: json.dumps(value) if isinstance(value, list) else str(value) for key, value in arguments.items()}
        inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in shown.items())
        blocks.append(f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>")
    return "\n".join(blocks)


def coder_cases() -> list[list[tuple[str, dict[str, Any]]]]:
    single = [[("f", {key: value})] for key, values in CODER_VALUES.items() for value in values]
    whole = [("f", {key: values[place % len(values)] for key, values in CODER_VALUES.items()}) for place in range(4)]
    return [*single, *([one] for one in whole), whole, [("f", {}), ("f", {"count": 1})]]


def test_calls_of_qwen3_coder_come_back_as_they_were(parse: Callable[..., Parsed]) -> None:
    for calls in coder_cases():
        found = parse("qwen3_coder", f"I call it.\n\n{coder_text(calls)}<|im_end|>")
        assert (called(found), found.content) == (calls, "I call it.")


STRING, NULL = {"type": "string"}, {"type": "null"}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (True, "3", "3"),
        ({"anyOf": [STRING, NULL]}, "12345", "12345"),
        ({"anyOf": [STRING, NULL]}, "true", "true"),
        ({"anyOf": [STRING, NULL]}, "null", None),
        ({"type": ["string", "null"]}, "null", None),
        (STRING, "null", "null"),
        ({"anyOf": [{"oneOf": [STRING]}, {"type": "integer"}]}, "3", "3"),
        ({"oneOf": [{"type": "integer"}, NULL]}, "3", 3),
        ({"type": ["integer", "null"]}, "None", None),
        ({"$ref": "#/$defs/P"}, '{"a": 1}', {"a": 1}),
        ({"$ref": "#/$defs/P"}, "red", "red"),
        ({"enum": [1, 2, 3]}, "3", 3),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"anyOf": 5, "enum": None, "type": None}, "x", "x"),
    ],
)
def test_arguments_of_qwen3_coder_follow_any_schema(tokenizer_of: Callable[[str], Any], schema: Any, text: str, value: Any) -> None:
    tokenizer = tokenizer_of("qwen3")
    tools = [
        {"function": {"name": "f", "parameters": {"type": "object", "properties": {"x": schema}}}},
        {"function": {"name": "g", "parameters": {"properties": ["x"]}}},
    ]
    written = "".join(f"<function={name}>\n<parameter=x>\n{text}\n</parameter>\n</function>" for name in "fg")
    found = called(ToolCallParser(tokenizer, "qwen3_coder", tools).parse(tokenizer.encode(written, add_special_tokens=False)))
    assert found == [("f", {"x": value}), ("g", {"x": text})]


@pytest.mark.slow
@pytest.mark.timeout(590)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_engines_parsers_find_the_same_calls(
    parse: Callable[..., Parsed], tokenizer_of: Callable[[str], Any], tmp_path: Path, engine: str
) -> None:
    require(engine)
    tokenizer_of("qwen3").save_pretrained(tmp_path)
    texts = [f"I call it.\n\n{coder_text(calls)}" for calls in coder_cases()]
    program = [sys.executable, str(Path(__file__).with_name("engine_parsers.py")), engine, str(tmp_path)]
    done = subprocess.run(program, input=json.dumps([texts, TOOLS]), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout.splitlines()[-1])
    for text, calls in zip(texts, theirs, strict=True):
        assert called(parse("qwen3_coder", text)) == [tuple(one) for one in calls], text


def test_ids(parse: Callable[..., Parsed]) -> None:
    found = parse("mistral", f'[TOOL_CALLS][{CALL}, {{"name": "f", "id": "abcdefghi"}}, {{"name": "f", "id": "short"}}]')
    assert [one["id"] for one in found.calls] == ["call00000", "abcdefghi", "call00002"]
    assert parse("mistral", "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}").calls[0]["id"] == "abcdefghi"


def test_no_format_finds_no_calls(parse: Callable[..., Parsed]) -> None:
    assert parse(None, f"<tool_call>{CALL}</tool_call><|im_end|>") == Parsed(f"<tool_call>{CALL}</tool_call>", [])


def test_format_of_a_template() -> None:
    read = {path.stem: path.read_text(encoding="utf-8") for path in (Path(__file__).parent / "templates").glob("*.jinja")}
    assert {name: family_of(text) for name, text in read.items()} == {
        "qwen2.5": "hermes",
        "qwen3": "hermes",
        "llama3.1": "llama3",
        "mistral-nemo": "mistral",
    }
    assert family_of("'<tool_call>\\n<function=' + name") == "qwen3_coder"
    assert family_of("<tool_call>{{ name }}\\n<arg_key>") is None
    assert family_of("{{ messages }}") is None


def search(query: str, count: int = 3, mode: Literal["text", "title"] = "text") -> list[str]:
    """Search the pages.

    Args:
        query: Words to look for.
        count: Number of results.
        mode: Where to look.

    Returns:
        Pages.
    """
    return [query, mode] * count


def test_schema_of_a_function() -> None:
    assert schema_of(search) == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the pages.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "Words to look for."},
                    "count": {"type": "integer", "description": "Number of results."},
                    "mode": {"type": "string", "enum": ["text", "title"], "description": "Where to look."},
                },
                "required": ["query"],
            },
        },
    }


def no_hint(query) -> str:  # type: ignore[no-untyped-def]
    """Search.

    Args:
        query: Words.
    """
    return str(query)


def no_docstring(query: str) -> str:
    return query


def no_meaning(query: str) -> str:
    """Search."""
    return query


def any_arguments(*query: str) -> str:
    """Search."""
    return query[0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_hint, "no_hint: Argument query is missing a type hint.*; write a type hint"),
        (no_docstring, "no_docstring: .*no docstring.*; write a type hint for each argument, and a docstring"),
        (no_meaning, "no_meaning: .*no description for the argument 'query'; write .*Args:"),
        (any_arguments, r"any_arguments: the model cannot be told about \*query"),
    ],
)
def test_functions_that_cannot_be_described(function: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schema_of(function)
