"""Find tool calls in sampled responses, in the formats of common model families. Describe Python functions as tools."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, get_args

from roll_lite.config.schema.environments import CallFormat
from roll_lite.data.templates import Tokenizer

MARKERS = {
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *("<think>", "</think>", "[THINK]", "[/THINK]"),
}
"""Tags of calls and thoughts that the parsers need: they stay in the decoded text even if they are special tokens."""
THOUGHTS = re.compile(r"<think>.*?(?:</think>|\Z)|\[THINK\].*?(?:\[/THINK\]|\Z)", re.DOTALL)
THOUGHTS_END = re.compile("</think>")
HERMES_END = re.compile(r"\s*(?:</tool_call>|(?=<tool_call>)|\Z)")
"""End of a tool call in the format `hermes`. The closing tag may be missing."""
SKIP_TO_END = re.compile(r"</tool_call>|(?=<tool_call>)|\Z")
CODER_START = re.compile(r"<tool_call>\s*(?:<function=)?|<function=")
CODER = re.compile(r"(?:<tool_call>\s*)?<function=([^>\n]*)>((?:(?!<function=).)*?)</function>(?:\s*</tool_call>)?", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\n]*)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
LLAMA_START = re.compile(r'<\|python_tag\|>|(?=\{\s*"(?:name|type)"\s*:)')
LLAMA_CODE = re.compile(r'<\|python_tag\|>(?!\s*\{\s*"(?:name|type|parameters|arguments)"\s*:)')
INTERPRETERS = ("python", "code_interpreter", "ipython")
"""Names of tools that get the plain code which Llama writes after <|python_tag|>."""
MISTRAL_NAME = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*(\w*)\s*)?(?:\[ARGS\])?")
SPACE, SEPARATOR = re.compile(r"\s*"), re.compile(r"[\s;]*")
DECODER = json.JSONDecoder()


class _Malformed(str):
    """Reason why a text is no valid call."""


class _Found(NamedTuple):
    start: int
    end: int
    values: list[Any]


class Parsed(NamedTuple):
    content: str
    """Text without the markup of calls; thoughts included."""
    calls: list[dict[str, Any]]
    """Calls in OpenAI's form, except that arguments are dicts. A malformed call has the fields `problem` and `text`."""


def family_of(chat_template: str) -> CallFormat | None:
    if "[TOOL_CALLS]" in chat_template:
        return "mistral"
    if "<tool_call>" in chat_template and "<arg_key>" not in chat_template:  # GLM has the tag, but not JSON in it
        return "qwen3_coder" if "<function=" in chat_template else "hermes"
    if "<|start_header_id|>" in chat_template and '"parameters"' in chat_template:
        return "llama3"
    return None


class ToolCallParser:
    """Parser of tool calls. `form`: their format; None: find no calls. `tools`: OpenAI schemas, used to convert arguments that a format
    writes as plain text. `thinking`: the prompt already ends with the opening `<think>` tag."""

    def __init__(self, tokenizer: Tokenizer, form: CallFormat | None, tools: Sequence[dict[str, Any]] = (), thinking: bool = False) -> None:
        self._tokenizer = tokenizer
        self._left_out = {one for one, token in tokenizer.added_tokens_decoder.items() if token.special and token.content not in MARKERS}
        self._finder = None if form is None else FINDERS[form]
        functions = [tool["function"] for tool in tools]
        properties = {one["name"]: one.get("parameters", {}).get("properties") for one in functions}
        self._parameters = {name: one if isinstance(one, dict) else {} for name, one in properties.items()}
        self._thinking = thinking

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def parse(self, response_ids: Sequence[int]) -> Parsed:
        text = self.decode([one for one in response_ids if one not in self._left_out])
        if self._finder is None:
            return Parsed(text, [])
        closing = next(self._outside_calls(THOUGHTS_END, text), None)
        opened = self._thinking or (closing is not None and "<think>" not in text[: closing.start()])
        parts, at, text = [], 0, f"<think>{text}" if opened else text
        for thoughts in self._outside_calls(THOUGHTS, text):
            parts += [text[at : thoughts.start()], thoughts[0]]
            at = thoughts.end()
        parts.append(text[at:])
        calls: list[dict[str, Any]] = []
        for number in range(0, len(parts), 2):  # thoughts have odd numbers
            part, rest, at = parts[number], "", 0
            for start, end, values in self._finder(part, self._parameters):
                rest += part[at:start]
                at = end
                for value in values:
                    calls.append(_checked(value, len(calls), part[start:end]))
            parts[number] = rest + part[at:]
        content = "".join(parts)
        if opened:
            content = content.removeprefix("<think>")
        return Parsed(content.strip() if calls else content, calls)

    def _outside_calls(self, pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
        """Find the pattern's matches that do not begin in a call. Malformed calls are ignored: their end is unknown."""
        assert self._finder is not None
        at = base = 0
        calls = self._finder(text, self._parameters)
        call = next(calls, None)
        while (found := pattern.search(text, at)) is not None:
            while call is not None and base + call[1] <= found.start():
                call = next(calls, None)
            if call is not None and base + call[0] <= found.start() and not any(isinstance(value, _Malformed) for value in call[2]):
                at = base + call[1]
                continue
            yield found
            at = found.end()
            if call is not None and base + call[0] < at:  # it may begin in the thoughts: look again behind them
                base, calls = at, self._finder(text[at:], self._parameters)
                call = next(calls, None)


def split_thoughts(content: str, thinking: bool) -> tuple[str, str]:
    """Split a response into (thoughts, rest). `thinking`: the prompt ends with the opening tag."""
    for opening, closing in (("<think>", "</think>"), ("[THINK]", "[/THINK]")):
        text = content.lstrip()
        if text.startswith(opening) or (thinking and closing in text):
            thoughts, _, rest = text.removeprefix(opening).partition(closing)
            return thoughts.strip(), rest.strip()
    return (content.strip(), "") if thinking else ("", content)


def _checked(value: Any, number: int, text: str) -> dict[str, Any]:
    given = value if isinstance(value, dict) else {}
    name, arguments, call_id = given.get("name"), given.get("arguments", given.get("parameters")), given.get("id")
    problem = None
    if isinstance(value, _Malformed):
        problem = str(value)
    elif not isinstance(name, str) or not name:
        problem = "a call is an object with a name and arguments"
    else:
        if isinstance(arguments, str):  # doubly encoded, as OpenAI's API returns them
            arguments, _ = _read(arguments, 0)
        arguments = {} if arguments is None else arguments
        if not isinstance(arguments, dict):
            problem = f"the arguments of {name} must be an object" + (f"; {arguments}" if isinstance(arguments, _Malformed) else "")
    call = {
        "type": "function",
        "id": call_id if isinstance(call_id, str) and re.fullmatch(r"[a-zA-Z0-9]{9}", call_id) else f"call{number:05d}",
        "function": {"name": name if isinstance(name, str) else "", "arguments": arguments if problem is None else {}},
    }
    return call if problem is None else {**call, "problem": problem, "text": text}


def _skip(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return at if found is None else found.end()


def _read(text: str, at: int) -> tuple[Any, int]:
    at = _skip(SPACE, text, at)
    try:
        return DECODER.raw_decode(text, at)
    except RecursionError:
        return _Malformed("nested too deeply"), at
    except ValueError as error:
        place = f" at character {error.pos - at}" if isinstance(error, json.JSONDecodeError) else ""
        return _Malformed(f"not valid JSON: {str(getattr(error, 'msg', error)).removesuffix(' at')}{place}"), at


Finder = Callable[[str, dict[str, Any]], Iterator[_Found]]


def _hermes(text: str, parameters: dict[str, Any]) -> Iterator[_Found]:
    at = 0
    while (start := text.find("<tool_call>", at)) >= 0:
        inside = start + len("<tool_call>")
        value, at = _read(text, inside)
        end = HERMES_END.match(text, at)
        if isinstance(value, _Malformed) or end is None:
            skipped = SKIP_TO_END.search(text, inside)
            assert skipped is not None
            end, value = skipped, value if isinstance(value, _Malformed) else _Malformed("text after the JSON object")
        at = end.end()
        yield _Found(start, at, [value])


def _qwen3_coder(text: str, parameters: dict[str, Any]) -> Iterator[_Found]:
    at = 0
    while (start := CODER_START.search(text, at)) is not None:
        value: Any = _Malformed("expected <function=name>, <parameter=name>value</parameter> for each argument, and </function>")
        if (found := CODER.match(text, start.start())) is not None:
            name, types = found[1].strip(), parameters.get(found[1].strip(), {})
            value = {
                "name": name,
                "arguments": {key.strip(): _typed(one, types.get(key.strip())) for key, one in PARAMETER.findall(found[2])},
            }
        end = found or SKIP_TO_END.search(text, start.end())
        assert end is not None
        at = end.end()
        yield _Found(start.start(), at, [value])


def _typed(text: str, schema: Any) -> Any:
    """Convert an argument's text to a type that its schema (None: unknown) allows. Where that may be a string, only a null is converted."""
    types = _types(schema)
    value = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text)
    if not isinstance(schema, dict) or ("string" in types and not (value.strip() == "null" and "null" in types)):
        return text
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return text


def _types(schema: Any) -> set[str]:
    """Names of the types that a schema allows; empty if unknown."""
    if not isinstance(schema, dict):
        return set()
    kind, values = schema.get("type", []), schema.get("enum", [])
    types = {one for one in (kind if isinstance(kind, list) else [kind]) if isinstance(one, str)}
    if isinstance(values, list) and any(isinstance(one, str) for one in values):
        types.add("string")
    either = [schema.get(key) for key in ("anyOf", "oneOf")]
    return types.union(*(_types(one) for several in either if isinstance(several, list) for one in several))


def _llama3(text: str, parameters: dict[str, Any]) -> Iterator[_Found]:
    at = 0
    interpreter = next((name for name in INTERPRETERS if len(parameters.get(name, ())) == 1), None)
    while (start := LLAMA_START.search(text, at)) is not None:
        if interpreter is not None and LLAMA_CODE.match(text, start.start()):
            [argument] = parameters[interpreter]
            yield _Found(start.start(), len(text), [{"name": interpreter, "arguments": {argument: text[start.end() :].strip()}}])
            return
        value, at = _read(text, start.end())
        if isinstance(value, _Malformed):
            if start[0] or not text[: start.start()].strip():
                yield _Found(start.start(), len(text), [value])
                return
            at = start.end() + 1  # in mid-text, JSON without the tag is a call only if it is valid
        elif start[0] or (isinstance(value, dict) and not value.keys().isdisjoint(("parameters", "arguments"))):
            at = _skip(SEPARATOR, text, at)
            yield _Found(start.start(), at, [value])


def _mistral(text: str, parameters: dict[str, Any]) -> Iterator[_Found]:
    at = 0
    while (start := text.find("[TOOL_CALLS]", at)) >= 0:
        inside = start + len("[TOOL_CALLS]")
        named = MISTRAL_NAME.match(text, inside)
        value, at = _read(text, named.end() if named else inside)
        if isinstance(value, _Malformed):
            at = text.find("[TOOL_CALLS]", inside) if "[TOOL_CALLS]" in text[inside:] else len(text)
        elif named:
            value = {"name": named[1], "id": named[2], "arguments": value}
        yield _Found(start, at, value if isinstance(value, list) else [value])


FINDERS: dict[CallFormat, Finder] = {"hermes": _hermes, "qwen3_coder": _qwen3_coder, "llama3": _llama3, "mistral": _mistral}
assert set(FINDERS) == set(get_args(CallFormat))


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Build the OpenAI schema of a function from its type hints and Google-style docstring; ValueError if either is incomplete."""
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException, get_json_schema

    name = getattr(function, "__name__", type(function).__name__)
    remedy = (
        'write a type hint for each argument, and a docstring with what the function does, "Args:", and a line "name: meaning" for each'
    )
    loose = [one.name for one in inspect.signature(function).parameters.values() if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    if loose:
        raise ValueError(f"{name}: the model cannot be told about *{loose[0]}; give the function named arguments only")
    try:
        schema: dict[str, Any] = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException, NameError, TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}; {remedy}") from error
    schema["function"].pop("return", None)
    return schema
