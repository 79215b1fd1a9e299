"""Templates: what the model sees, special tokens included, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roll_lite.config.schema.domains import ChatTemplateConfig, PlainTemplateConfig
from roll_lite.data.row_values import RowError
from roll_lite.data.templates import Template, load_tokenizer

MakeTokenizer = Callable[..., Any]


def template(tokenizer: Any, column: str = "prompt", name: str = "plain", **config: Any) -> Template:
    made = PlainTemplateConfig(**config) if name == "plain" else ChatTemplateConfig(**config)
    return Template(made, column, tokenizer, "domains.sums.template")


def test_placeholders(make_tokenizer: MakeTokenizer) -> None:
    made = template(make_tokenizer(), "question", text="{prompt} and {extra}, {question} in \\boxed{{}}")
    assert made.render({"question": "one", "extra": 2, "prompt": "not this"}) == "one and 2, one in \\boxed{}"
    with pytest.raises(
        RowError, match=r"column 'extra': missing; the line has the columns question, xtra; did you mean 'xtra'. .*placeholder \{extra\}"
    ):
        made.render({"question": "one", "xtra": 1})
    with pytest.raises(RowError, match=r"column 'extra': only a string or a number .* got true"):
        made.render({"question": "one", "extra": True})


@pytest.mark.parametrize(
    "text", ["\\boxed{}", "{0}", "{prompt.x}", "{prompt[0]}", "{prompt!r}", "{prompt:>10}", "{prompt", "a } b", "{two words}"]
)
def test_templates_that_are_none(make_tokenizer: MakeTokenizer, text: str) -> None:
    with pytest.raises(ValueError, match=r"write \{\{ and \}\} for braces that stay"):
        template(make_tokenizer(), text=text)


def test_a_template_without_placeholders_is_refused(make_tokenizer: MakeTokenizer) -> None:
    with pytest.raises(ValueError, match=r"never shows the prompt; put \{prompt\} where it belongs"):
        template(make_tokenizer(), text="add")


def test_braces_in_the_data_are_left_alone(make_tokenizer: MakeTokenizer) -> None:
    assert template(make_tokenizer()).render({"prompt": "{x} \\frac{1}{2} {}"}) == "{x} \\frac{1}{2} {}"


def test_plain_text_gets_the_tokenizers_own_special_tokens(make_tokenizer: MakeTokenizer) -> None:
    assert template(make_tokenizer()).tokenize(["add one"]) == [[3, 4]]
    assert template(make_tokenizer("<s> $A")).tokenize(["add one", "two"]) == [[1, 3, 4], [1, 5]]


def test_chat_text_gets_no_special_tokens_on_top(make_tokenizer: MakeTokenizer) -> None:
    made = template(make_tokenizer("<s> $A", chat=True), name="chat", system="please add")
    text = made.render({"prompt": "one and two"})
    assert text == "system : please add user : one and two assistant :"
    assert made.tokenize([text]) == [[9, 11, 7, 3, 8, 11, 4, 12, 5, 10, 11]]


def test_chat_messages(make_tokenizer: MakeTokenizer) -> None:
    made = template(make_tokenizer(chat=True), name="chat")
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}, {"role": "user", "content": "three"}]
    assert made.render({"prompt": messages}) == "user : one assistant : two user : three assistant :"
    with pytest.raises(RowError, match="message 1 must be"):
        made.render({"prompt": [messages[0], {"role": "user"}]})
    with pytest.raises(RowError, match="must be a string or a list of chat messages, got 5"):
        made.render({"prompt": 5})
    with pytest.raises(RowError, match=r"must be a string or a list of chat messages, got \[\]"):
        made.render({"prompt": []})
    with pytest.raises(RowError, match="column 'prompt': missing; the line has the columns answer"):
        made.render({"answer": 5})
    with pytest.raises(RowError, match="begins with a system message"):
        template(make_tokenizer(chat=True), name="chat", system="x").render({"prompt": [{"role": "system", "content": "y"}, *messages]})


def test_what_the_chat_template_refuses_is_an_error_of_the_row(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RowError, match="refuses the messages: roles must alternate"):
        template(tokenizer, name="chat").render({"prompt": "one"})


def test_a_chat_template_from_a_file_with_arguments(tmp_path: Path, make_tokenizer: MakeTokenizer) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages[-1].content }} think: {{ enable_thinking }}")
    made = template(make_tokenizer(chat=True), name="chat", file=file, arguments={"enable_thinking": False})
    assert made.render({"prompt": "one"}) == "one think: False"


def test_messages_need_a_chat_template(make_tokenizer: MakeTokenizer) -> None:
    with pytest.raises(RowError, match=r"a list of chat messages needs domains\.sums\.template\.name: chat"):
        template(make_tokenizer()).render({"prompt": [{"role": "user", "content": "one"}]})
    with pytest.raises(ValueError, match=r"domains\.sums\.template\.name: chat, but the tokenizer has no chat template"):
        template(make_tokenizer(), name="chat")


def test_special_tokens_that_would_harm_are_refused(make_tokenizer: MakeTokenizer) -> None:
    with pytest.raises(ValueError, match="begin with the tokenizer's BOS twice"):
        template(make_tokenizer("<s> $A")).tokenize(["<s> add one"])
    with pytest.raises(ValueError, match="ends every text with its EOS '</s>'"):
        template(make_tokenizer("$A </s>")).tokenize(["add one"])
    assert template(make_tokenizer()).tokenize(["add one </s>"]) == [[3, 4, 2]]


def test_loading_a_tokenizer(tmp_path: Path, make_tokenizer: MakeTokenizer) -> None:
    make_tokenizer().save_pretrained(tmp_path / "model")
    assert load_tokenizer(tmp_path / "model")("add one")["input_ids"] == [3, 4]
    with pytest.raises(ValueError, match=r"model\.path: .*absent is no folder"):
        load_tokenizer(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"critic\.path: no tokenizer could be loaded"):
        load_tokenizer(tmp_path / "empty", "critic.path")
