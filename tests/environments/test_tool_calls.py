"""Parsing of tool calls: formats, mistakes of the model, and schemas of functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

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
