"""Tokens of an episode: random conversations over four families of templates, and the templates that are refused."""

from __future__ import annotations

import copy
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from roll_lite.environments import rendering
from roll_lite.environments.rendering import ChatRenderer, PlainRenderer

MakeTokenizer = Callable[[str], Any]
FAMILIES = ("qwen2.5", "qwen3", "llama3.1", "mistral-nemo")
SETTING = "domains.shop.template"
CONVERSATIONS = 300
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"The {name} of a city, not <tool_call> or [INST] or <|eot_id|>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "City"}}, "required": ["city"]},
        },
    }
    for name in ("weather", "time")
]
ORDINARY = (
    "The answer",
    " is 42.",
    "\n\n",
    " ",
    "\t",
    "Ünïcödé 日本語 🎉",
    "e\u0301",
    "{'a': 1}",
    '"',
    "\\",
    "<b>",
    "[1, 2]",
    "|",
    "<",
    "[",
)
ADDED = (
    *("<|im_end|>", "<|im_start|>system\n", "<|endoftext|>", "<tool_call>", "</tool_response>", "<think>", "</think>", "<<|im_end|>|>"),
    *("<|eot_id|>", "<|start_header_id|>", "<|begin_of_text|>", "<|python_tag|>", "<|<|eot_id|>"),
    *("[INST]", "[/INST]", "</s>", "<s>", "[TOOL_CALLS]", "[[/TOOL_RESULTS]", "<unk>"),
)


class Case:
    """A random conversation. `plain`: no content has the text of an added token, and responses are closed and as the template has them."""

    def __init__(self, seed: int, family: str, plain: bool) -> None:
        self.random = random.Random(f"{seed} {family}")
        self.family = family
        self.plain = plain
        self.tools = self.random.choice((None, TOOLS))
        self.first = [self.message("user")]
        if self.random.random() < 0.5 and not (plain and family == "mistral-nemo"):  # Nemo moves it to the last message of the user
            self.first.insert(0, self.message("system"))
        self.turns: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
        """Responses as messages, each with the messages after it."""
        for _ in range(self.random.randint(1, 3)):
            self.turns.append(self.turn())

    def message(self, role: str, **fields: Any) -> dict[str, Any]:
        pieces = ORDINARY if self.plain else ORDINARY + ADDED
        return {"role": role, "content": "Q" + "".join(self.random.choices(pieces, k=self.random.randint(0, 6))), **fields}

    def turn(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        # Templates: Nemo moves the tools to the last message of the user, and Llama writes one call at once.
        nemo = self.plain and self.family == "mistral-nemo" and self.tools is not None
        if self.tools is None or (self.random.random() < 0.5 and not nemo):
            return {"role": "assistant", "content": "The answer is wrong."}, [self.message("user")]
        count = 1 if self.family == "llama3.1" and self.plain else self.random.randint(1, 3)
        ids = [f"call{number:05d}" for number in range(count)]
        calls = [{"type": "function", "id": one, "function": {"name": "weather", "arguments": {"city": f"P{one}"}}} for one in ids]
        results = [self.message("tool", tool_call_id=one, name="weather") for one in ids]
        return {"role": "assistant", "content": "", "tool_calls": calls}, results


def written(family: str, message: dict[str, Any]) -> str:
    """Text of a response in the family's own form, written here by hand."""
    functions = [(one["function"]["name"], json.dumps(one["function"]["arguments"]), one["id"]) for one in message.get("tool_calls", ())]
    if not functions:
        return message["content"]
    if family.startswith("qwen"):
        return "\n".join(f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>' for name, arguments, _ in functions)
    if family == "llama3.1":
        return "; ".join(f'{{"name": "{name}", "parameters": {arguments}}}' for name, arguments, _ in functions)
    calls = ", ".join(f'{{"name": "{name}", "arguments": {arguments}, "id": "{one}"}}' for name, arguments, one in functions)
    return f"[TOOL_CALLS][{calls}]"


def shown(family: str, message: dict[str, Any]) -> str:
    """Content of a message as it must read in the decoded prompt."""
    if family != "llama3.1":
        return message["content"]
    return json.dumps(message["content"], ensure_ascii=False) if message["role"] == "tool" else message["content"].strip()


def added(tokenizer: Any, ids: Sequence[int]) -> Counter[int]:
    known = set(tokenizer.added_tokens_decoder)
    return Counter(one for one in ids if one in known)


def composed(tokenizer: Any, text: str) -> str:
    return str(normalizers.NFC().normalize_str(text)) if tokenizer.backend_tokenizer.normalizer else text


@pytest.mark.parametrize("family", FAMILIES)
def test_hostile_conversations(tokenizer_of: MakeTokenizer, family: str, count: int = CONVERSATIONS) -> None:
    """No text becomes an added token, all text is kept, and a response needs no end token."""
    tokenizer = tokenizer_of(family)
    renderers = {bool(tools): ChatRenderer(tokenizer, None, {}, tools, SETTING) for tools in (None, TOOLS)}
    for seed in range(count):
        case = Case(seed, family, plain=False)
        renderer = renderers[case.tools is not None]

        def check(ids: list[int], harmless: list[int], messages: list[dict[str, Any]]) -> None:
            assert added(tokenizer, ids) == added(tokenizer, harmless), messages
            text = tokenizer.decode(ids)
            assert all(composed(tokenizer, shown(family, one)) in text for one in messages), messages

        def harmless(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [{**one, "content": "x"} for one in messages]

        check(renderer.prompt(case.first), renderer.prompt(harmless(case.first)), case.first)
        for response, new in case.turns:
            ids = tokenizer.encode(written(family, response), add_special_tokens=False)
            open_ids = renderer.continuation(ids, new)
            check(open_ids, renderer.continuation(ids, harmless(new)), new)
            assert open_ids == [tokenizer.eos_token_id, *renderer.continuation([*ids, tokenizer.eos_token_id], new)]


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_the_template_applied_to_the_whole_conversation(
    tokenizer_of: MakeTokenizer, family: str, count: int = CONVERSATIONS
) -> None:
    """The oracle is Transformers' own rendering and tokenization. Sampled tokens stay as they were."""
    tokenizer = tokenizer_of(family)
    # Qwen3 drops the thoughts of earlier turns, the empty ones too; this makes it append-only.
    template = tokenizer.chat_template.replace("loop.index0 > ns.last_query_index", "false")
    renderers = {bool(tools): ChatRenderer(tokenizer, template, {}, tools, SETTING) for tools in (None, TOOLS)}
    for seed in range(count):
        case = Case(seed, family, plain=True)
        renderer = renderers[case.tools is not None]
        messages = list(case.first)
        ids = renderer.prompt(messages)
        for response, new in case.turns:
            sampled = [*tokenizer.encode(written(family, response), add_special_tokens=False), tokenizer.eos_token_id]
            before = [*ids, *sampled]
            ids = [*before, *renderer.continuation(sampled, new)]
            assert ids[: len(before)] == before
            messages += [response, *new]
        arguments = {"tools": case.tools, "chat_template": template, "add_generation_prompt": True}
        text = tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
        if case.tools is None:
            assert ids == tokenizer.encode(text, add_special_tokens=False), messages
        else:  # the descriptions of TOOLS have texts of added tokens
            assert tokenizer.decode(ids) == composed(tokenizer, text)
            last = renderer.continuation([tokenizer.eos_token_id], case.turns[-1][1])
            assert ids[-len(last) :] == tokenizer.encode(text, add_special_tokens=False)[-len(last) :]


def test_difference(tokenizer_of: MakeTokenizer) -> None:
    def difference(family: str, tools: Any = None, **arguments: Any) -> str | None:
        return ChatRenderer(tokenizer_of(family), None, arguments, tools, SETTING).difference()

    assert difference("qwen2.5", TOOLS) is difference("llama3.1", TOOLS) is difference("qwen2.5") is difference("llama3.1") is None
    qwen3 = str(difference("qwen3", TOOLS)).removeprefix(f"{SETTING}: ").split("\n  ")
    kinds = ["two turns or a system message", "thoughts", "a tool call or two tool calls at once"]
    assert [line.partition(", an episode's tokens read '<|im_start|>assi")[0] for line in qwen3] == [
        f"in a conversation with {kind}" for kind in kinds
    ]
    assert all("<think>" in line.partition("writes")[0] and "<think>" not in line.partition("writes")[2] for line in qwen3)
    marks = tokenizer_of("qwen2.5").chat_template  # none of Llama's tokens
    assert ChatRenderer(tokenizer_of("llama3.1"), marks, {}, TOOLS, SETTING).difference() is None
    assert "a system message" in str(difference("mistral-nemo"))
    assert "two turns" in str(difference("mistral-nemo", TOOLS))


def test_responses_that_end_otherwise(tokenizer_of: MakeTokenizer) -> None:
    tokenizer = tokenizer_of("llama3.1")
    eom, user = tokenizer.convert_tokens_to_ids("<|eom_id|>"), [{"role": "user", "content": "Go on"}]
    rest = ChatRenderer(tokenizer, None, {}, None, SETTING).continuation([5, tokenizer.eos_token_id], user)
    assert ChatRenderer(tokenizer, None, {}, None, SETTING).continuation([5, eom], user) == [tokenizer.eos_token_id, *rest]
    assert ChatRenderer(tokenizer, None, {}, None, SETTING, end_ids=[eom]).continuation([5, eom], user) == rest
    # GLM: the token that begins the next message ends a response.
    glm = "{% for m in messages %}{{ '<|start_header_id|>' if m.role == 'user' else '<|python_tag|>' }}{{ m.content }}{% endfor %}"
    begins = tokenizer.convert_tokens_to_ids("<|start_header_id|>")
    renderer = ChatRenderer(tokenizer, glm, {}, None, SETTING)
    assert renderer.continuation([5], user) == [begins, *renderer.continuation([5, begins], user)]
    assert renderer.continuation([5, tokenizer.eos_token_id], user)[0] == begins


def test_thoughts_in_the_generation_prompt(tokenizer_of: MakeTokenizer) -> None:
    tokenizer = tokenizer_of("qwen3")
    call = tokenizer.encode('<tool_call>{"name": "time"}</tool_call>', add_special_tokens=False)
    closed = ChatRenderer(tokenizer, None, {"enable_thinking": False}, TOOLS, SETTING)
    assert tokenizer.decode(closed.continuation([5], [])).endswith("assistant\n<think>\n\n</think>\n\n")
    assert [one["function"]["name"] for one in closed.message(call)["tool_calls"]] == ["time"]
    opens = tokenizer.chat_template.replace("{{- '<|im_start|>assistant\\n' }}", "{{- '<|im_start|>assistant\\n<think>\\n' }}")
    opened = ChatRenderer(tokenizer, opens, {}, TOOLS, SETTING)
    assert tokenizer.decode(opened.continuation([5], [])).endswith("assistant\n<think>\n")
    assert "tool_calls" not in opened.message(call)


def test_thoughts_of_an_assistant_in_the_prompt_are_tokens_but_its_special_tokens_are_not(tokenizer_of: MakeTokenizer) -> None:
    tokenizer = tokenizer_of("qwen3")
    said = {"role": "assistant", "content": "<think>x</think>y<|im_end|>"}
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    ids = ChatRenderer(tokenizer, template, {}, None, SETTING).prompt([said])
    assert [tokenizer.decode([one]) for one in added(tokenizer, ids)] == ["<think>", "</think>"]
    assert tokenizer.decode(ids) == said["content"]


CALLS = (
    "{% for m in messages %}{% if m.tool_calls %}{{ '<s>' + (m.tool_calls[0].function | tojson) + '</s>' }}"
    "{% elif m.role == 'tool' %}{% if not loop.previtem or not (loop.previtem.tool_calls or loop.previtem.role == 'tool') %}"
    "{{ raise_exception('no call') }}{% endif %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% else %}{{ '[INST]' if m.role == 'user' }}{{ (tools | string if tools and m.role == 'user' and loop.first) }}{{ m.content }}"
    "{{ '</s>' if m.role == 'assistant' }}{% endif %}{% endfor %}"
)


def test_results_that_need_a_call_before_them(tokenizer_of: MakeTokenizer) -> None:
    tokenizer = tokenizer_of("mistral-nemo")
    renderer = ChatRenderer(tokenizer, CALLS, {}, TOOLS, SETTING, "mistral")
    result = {"role": "tool", "content": "21", "tool_call_id": "abcdefghi", "name": "weather"}
    assert (
        tokenizer.decode(renderer.continuation([5], [result, result]))
        == "</s>[TOOL_RESULTS]21[/TOOL_RESULTS][TOOL_RESULTS]21[/TOOL_RESULTS]"
    )
    assert renderer.continuation([5], [{"role": "user", "content": "x"}])[0] == tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("template", "tools", "message"),
    [
        ("{{ messages[0].content }}", None, "leaves out the assistant's messages; name a template for multi-turn .*template.file"),
        ("{% for m in messages[:2] %}{{ m.content }}{% endfor %}", None, "leaves out messages of the role user; name a template"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", TOOLS, "ignores tools; name a template .*, or leave out the tools"),
        (
            "{{ tools }}{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}",
            TOOLS,
            "leaves out messages of the role tool",
        ),
        (
            "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}",
            TOOLS,
            "form of .* tool calls is unknown; .* environment.call_format",
        ),
        (
            "{% for m in messages %}{% if loop.index > 2 %}{{ raise_exception('one turn only') }}{% endif %}{{ m.content }}{% endfor %}",
            None,
            "refuses messages of the roles user, assistant, user: one turn only",
        ),
    ],
)
def test_templates_that_cannot_be_continued(tokenizer_of: MakeTokenizer, template: str, tools: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{SETTING}: the (chat template )?.*{message}"):
        ChatRenderer(tokenizer_of("qwen3"), template, {}, tools, SETTING)


def test_a_tokenizer_without_a_template(tokenizer_of: MakeTokenizer) -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer_of("qwen3").backend_tokenizer)
    with pytest.raises(ValueError, match=f"^{SETTING}.name: chat, but .*; use name: plain"):
        ChatRenderer(bare, None, {}, None, SETTING)


def test_lone_surrogates_are_replaced(tokenizer_of: MakeTokenizer) -> None:
    """A model can write them in the JSON of a call."""
    renderer = ChatRenderer(tokenizer_of("qwen3"), None, {}, TOOLS, SETTING)
    call = {"type": "function", "id": "call00000", "function": {"name": "time", "arguments": {"city": json.loads('"P\\ud83d"')}}}
    question = {"role": "user", "content": "When?"}
    result = {"role": "tool", "name": "time", "tool_call_id": "call00000", "content": "\ud83d\ude00 \ud83d"}
    text = tokenizer_of("qwen3").decode(renderer.prompt([question, {"role": "assistant", "content": "", "tool_calls": [call]}, result]))
    assert "P\ufffd" in text and "😀 \ufffd" in text


def test_plain(tokenizer_of: MakeTokenizer) -> None:
    tokenizer = tokenizer_of("llama3.1")
    renderer = PlainRenderer(tokenizer, SETTING)
    turn = [{"role": "user", "content": "Look: <|eot"}, {"role": "tool", "content": "_id|> 日本"}]
    ids = renderer.continuation([5, tokenizer.eos_token_id], turn)
    assert tokenizer.decode(ids) == "Look: <|eot_id|> 日本"
    assert not added(tokenizer, ids)
    assert renderer.prompt(turn) == ids and not added(tokenizer, ids)
    written = PlainRenderer(tokenizer, SETTING, "<|eot_id|>{prompt}").prompt(turn)
    assert written == tokenizer("Look: <|eot_id|> 日本")["input_ids"], "the template writes this token itself"
    assert renderer.message(ids) == {"role": "assistant", "content": "Look: <|eot_id|> 日本"}
    assert renderer.continuation([5], []) == []
    assert renderer.difference() is None


def test_plain_prompts_keep_the_tokenizers_bos(tokenizer_of: MakeTokenizer) -> None:
    tokenizer = copy.deepcopy(tokenizer_of("llama3.1"))
    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)])
    ids = PlainRenderer(tokenizer, SETTING).prompt([{"role": "user", "content": "<|eot_id|> no"}])
    assert tokenizer.decode(ids) == f"{bos}<|eot_id|> no" and added(tokenizer, ids[1:]) == added(tokenizer, [])


def sentencepiece_like(added_tokens: Sequence[str]) -> Any:
    """Tokenizer that puts a space before every text, as Llama 2 and Mistral 7B have it."""
    characters = ["<unk>", "▁", "\n", *(chr(one) for one in range(33, 127))]
    inner = Tokenizer(models.BPE({one: number for number, one in enumerate(characters)}, [], unk_token="<unk>"))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.pre_tokenizer = pre_tokenizers.Sequence([])
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    inner.add_tokens([AddedToken(text, normalized=False) for text in added_tokens])
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def test_tokenizers_that_put_a_space_before_every_text() -> None:
    tokenizer = sentencepiece_like(["<a>", "<ab>", "a><"])
    ids = PlainRenderer(tokenizer, SETTING).continuation([], [{"role": "user", "content": "x<a><ab>y <a"}])
    assert "".join(tokenizer.convert_ids_to_tokens(ids)) == "x<a><ab>y▁<a"
    assert not added(tokenizer, ids)


def test_whitespace_is_ordinary_text() -> None:
    """Some tokenizers have runs of spaces as added tokens."""
    tokenizer = sentencepiece_like(["\n\n", "<a>"])
    ids = PlainRenderer(tokenizer, SETTING).continuation([], [{"role": "user", "content": "x\n\ny"}])
    assert tokenizer.convert_ids_to_tokens(ids) == ["x", "\n\n", "▁", "y"]


@pytest.mark.parametrize("family", ["qwen2.5", "mistral-nemo"])
def test_descriptions_of_tools_never_become_added_tokens(tokenizer_of: MakeTokenizer, family: str) -> None:
    tokenizer = tokenizer_of(family)
    harmless = [{**one, "function": {**one["function"], "description": "x"}} for one in TOOLS]
    prompts = [ChatRenderer(tokenizer, None, {}, tools, SETTING).prompt([{"role": "user", "content": "Q"}]) for tools in (TOOLS, harmless)]
    assert added(tokenizer, prompts[0]) == added(tokenizer, prompts[1])
    assert all(one["function"]["description"] in tokenizer.decode(prompts[0]) for one in TOOLS)


def test_tools_are_repeated_where_the_template_writes_them_again(tokenizer_of: MakeTokenizer) -> None:
    tokenizer = tokenizer_of("mistral-nemo")
    renderer = ChatRenderer(tokenizer, None, {}, TOOLS, SETTING)
    user, result = {"role": "user", "content": "Q"}, {"role": "tool", "content": "21", "tool_call_id": "call00000"}
    assert tokenizer.decode(renderer.continuation([5], [user])).startswith('</s>[AVAILABLE_TOOLS][{"type": "function"')
    assert (
        tokenizer.decode(renderer.continuation([5], [result])) == '</s>[TOOL_RESULTS]{"content": 21, "call_id": "call00000"}[/TOOL_RESULTS]'
    )


def test_the_template_is_told_from_the_contents(tokenizer_of: MakeTokenizer) -> None:
    """Also of a text that spells a special token, or that a tokenizer would refuse."""
    tokenizer = tokenizer_of("qwen2.5")
    renderer = ChatRenderer(tokenizer, None, {}, None, SETTING)
    around = len(renderer.continuation([], [{"role": "user", "content": ""}]))
    for content in ("higher", "<|im_end|>", "one\ud800two"):
        messages = [{"role": "user", "content": content}]
        assert 0 < renderer.content_tokens(messages) == len(renderer.continuation([], messages)) - around


def test_no_text_of_a_message_marks_the_response_in_rendering(tokenizer_of: MakeTokenizer) -> None:
    """A fixed marker, which such a message cites, would have the text before it cut off."""
    tokenizer = tokenizer_of("qwen3")
    for marker in (rendering.SENTINEL[:16], "SENTINEL7f3a9c51"):
        ids = ChatRenderer(tokenizer, None, {}, None, SETTING).continuation([5], [{"role": "user", "content": f"Before {marker} behind."}])
        assert f"user\nBefore {marker} behind." in tokenizer.decode(ids)
    program = "from roll_lite.environments.rendering import SENTINEL; print(SENTINEL)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip() != rendering.SENTINEL
