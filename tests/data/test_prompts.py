"""Prompt files, their mistakes, and the order in which prompts are served."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roll_lite.config.schema.domains import DomainConfig
from roll_lite.data import prompts as prompts_module
from roll_lite.data.prompts import PromptOrder, PromptSet, load_prompts
from roll_lite.data.samples import RewardInput

MakeTokenizer = Callable[..., Any]


def domain(path: Path, data: dict[str, Any] | None = None, **sections: Any) -> DomainConfig:
    return DomainConfig.model_validate({"data": {"train": path, **(data or {})}, "reward": {"name": "exact"}, **sections})


def written(folder: Path, *lines: Any) -> Path:
    path = folder / "train.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def mistakes(config: DomainConfig, tokenizer: Any) -> str:
    with pytest.raises(ValueError) as caught:
        load_prompts("sums", config, "train", tokenizer)
    return str(caught.value)


def test_rows_become_prompts(tmp_path: Path, make_tokenizer: MakeTokenizer) -> None:
    path = written(
        tmp_path,
        {"question": "one and two", "answer": 3, "polite": "please", "level": 1},
        "",
        {"question": "three", "answer": [3], "polite": "", "level": 2},
    )
    config = domain(path, {"prompt": "question", "weight": "level"}, template={"name": "plain", "text": "add {prompt} {polite}"})
    prompts = load_prompts("sums", config, "train", make_tokenizer())
    assert len(prompts) == 2 and prompts.lengths == [5, 2]
    assert prompts[0].text == "add one and two please"
    assert prompts[0].token_ids == (3, 4, 12, 5, 7)
    assert prompts[0].answer == 3 and prompts[0].question == "one and two"
    assert prompts[0].columns == {"question": "one and two", "answer": 3, "polite": "please", "level": 1}, "rewards may need any of it"
    assert (prompts[1].uid, prompts[1].domain, prompts[1].answer) == (1, "sums", [3])
    assert [prompt.token_ids for prompt in prompts] == [(3, 4, 12, 5, 7), (3, 6)]
    with pytest.raises(IndexError):
        prompts[2]
    with pytest.raises(IndexError):
        prompts[-1]


def test_line_separators_inside_strings_and_a_byte_order_mark(tmp_path: Path, make_tokenizer: MakeTokenizer) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + '{"prompt": "one\u2028two", "answer": 1}\r\n{"prompt": "three", "answer": 2}'.encode())
    prompts = load_prompts("sums", domain(path), "train", make_tokenizer())
    assert [prompt.text for prompt in prompts] == ["one\u2028two", "three"]


def test_rewards_see_the_chat_messages_that_the_template_was_made_of(tmp_path: Path, make_tokenizer: MakeTokenizer) -> None:
    talk = [{"role": "system", "content": "add"}, {"role": "user", "content": "one and two"}]
    path = written(tmp_path, {"talk": talk, "answer": 3})
    config = domain(path, {"prompt": "talk"}, template={"name": "chat"})
    [prompt] = load_prompts("sums", config, "train", make_tokenizer(chat=True))
    seen = RewardInput.of(prompt, "three", "stop")
    assert seen.prompt == "system : add user : one and two assistant :"
    assert seen.question == seen.columns["talk"] == talk


def test_validation_and_answers_are_optional(tmp_path: Path, make_tokenizer: MakeTokenizer) -> None:
    path = written(tmp_path, {"prompt": "one"})
    prompts = load_prompts("sums", domain(path, {"answer": None, "validation": path}), "validation", make_tokenizer())
    assert prompts[0].answer is None
    with pytest.raises(ValueError, match=r"domains\.sums\.data\.validation: no file is configured"):
        load_prompts("sums", domain(path), "validation", make_tokenizer())


def test_weights_of_samples_come_from_their_column(tmp_path: Path, make_tokenizer: MakeTokenizer) -> None:
    path = written(
        tmp_path, {"prompt": "one", "answer": 1, "w": 0.5}, {"prompt": "two", "answer": 2, "w": 0}, {"prompt": "three", "answer": 3, "w": 2}
    )
    config = domain(path, {"weight": "w", "validation": path})
    prompts = list(load_prompts("sums", config, "train", make_tokenizer()))
    assert [prompt.weight for prompt in prompts] == [0.5, 0.0, 2.0]
    assert all(isinstance(prompt.weight, float) for prompt in prompts)
    assert [prompt.weight for prompt in load_prompts("sums", domain(path), "train", make_tokenizer())] == [1.0] * 3


def test_held_out_prompts_need_no_weight(tmp_path: Path, make_tokenizer: MakeTokenizer) -> None:
    path = written(tmp_path, {"prompt": "one", "answer": 1})
    prompts = load_prompts("sums", domain(path, {"weight": "w", "validation": path}), "validation", make_tokenizer())
    assert prompts[0].weight == 1.0


def test_bad_weights_name_their_line(tmp_path: Path, make_tokenizer: MakeTokenizer) -> None:
    """FINDINGS 6.9: a weight that cannot be read is an error, never a 0 or a 1."""
    bad = ["-0.5", '"two"', "true", "null", "NaN", "Infinity", "1e39", "[1]"]
    path = written(tmp_path, *[f'{{"prompt": "one", "answer": 1, "w": {weight}}}' for weight in bad], {"prompt": "one", "answer": 1})
    lines = mistakes(domain(path, {"weight": "w"}), make_tokenizer()).split("\n")[1:]
    shown = [*bad[:6], "1e+39", "[1]"]
    assert lines[:8] == [
        f"  {path}, line {number}: column 'w': the weight of a sample is a number of at least 0, got {text}"
        for number, text in enumerate(shown, start=1)
    ]
    assert lines[8:] == [f"  {path}, line 9: column 'w': missing; the line has the columns prompt, answer"]


def test_every_mistake_names_its_line_and_column(tmp_path: Path, make_tokenizer: MakeTokenizer) -> None:
    path = written(
        tmp_path,
        {"prompt": "one", "answer": 1},
        '{"prompt": "two", "answer" 2}',
        {"promt": "two", "answer": 2},
        ["two", 2],
        {"prompt": "two"},
        {"prompt": None, "answer": 2},
        {"prompt": "one two three one two three", "answer": 2},
        {"prompt": "  ", "answer": 2},
    )
    message = mistakes(domain(path, sampling={"max_prompt_tokens": 5}), make_tokenizer())
    assert message.split("\n") == [
        "domains.sums.data.train: the data has mistakes",
        f"  {path}, line 2: character 28: not valid JSON: Expecting ':' delimiter",
        f"  {path}, line 3: column 'prompt': missing; the line has the columns promt, answer; did you mean 'promt'?",
        f"  {path}, line 4: must be a JSON object with one entry per column, got ['two', 2]",
        f"  {path}, line 5: column 'answer': missing; the line has the columns prompt; without answers, set domains.sums.data.answer: null",
        f"  {path}, line 6: column 'prompt': only a string or a number can be filled into a text, got null",
        f"  {path}, line 8: column 'prompt': no tokens at all",
        f"  1 of 2 prompts have more tokens with the template than domains.sums.sampling.max_prompt_tokens (5); the longest has 6 ({path}, "
        "line 7); leave them out with domains.sums.data.filter.prompt_tokens=[1,5], or allow more",
    ]


def test_ten_mistakes_are_enough(tmp_path: Path, make_tokenizer: MakeTokenizer) -> None:
    ten = mistakes(domain(written(tmp_path, *["x"] * 10)), make_tokenizer())
    assert ten.count("line ") == 10 and "and more" not in ten
    many = mistakes(domain(written(tmp_path, *["x"] * 30)), make_tokenizer())
    assert many.count("line ") == 10 and many.endswith("... and more")


def test_empty_missing_and_undecodable_files(tmp_path: Path, make_tokenizer: MakeTokenizer) -> None:
    assert "has no rows" in mistakes(domain(written(tmp_path, "", "")), make_tokenizer())
    assert "no such file: " in mistakes(domain(tmp_path / "absent.jsonl"), make_tokenizer())
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe4"}\n')
    assert "line 1: character 13: not valid UTF-8" in mistakes(domain(tmp_path / "latin.jsonl"), make_tokenizer())


@pytest.mark.parametrize("shares", [None, (3.0, 1.0)])
def test_a_domain_may_have_several_files(tmp_path: Path, make_tokenizer: MakeTokenizer, shares: tuple[float, float] | None) -> None:
    (tmp_path / "more").mkdir()
    first = written(tmp_path, {"prompt": "one", "answer": 1}, {"prompt": "two", "answer": 2})
    second = written(tmp_path / "more", {"prompt": "three", "answer": 3})
    files = [first, second] if shares is None else dict(zip([first, second], shares, strict=True))
    prompts = load_prompts("sums", domain(first, {"train": files}), "train", make_tokenizer())
    assert [prompt.answer for prompt in prompts] == [1, 2, 3]
    assert prompts.parts == [2, 1]
    second.write_text("")
    assert f"{second} has no rows" in mistakes(domain(first, {"train": files}), make_tokenizer())


def served(order: PromptOrder, n: int) -> list[tuple[int, int]]:
    return [order.next() for _ in range(n)]


def test_every_prompt_once_per_epoch_in_changing_order() -> None:
    stream = served(PromptOrder(20, 1, "sums"), 60)
    epochs = [[index for epoch, index in stream if epoch == e] for e in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert [epoch for epoch, _ in stream] == [0] * 20 + [1] * 20 + [2] * 20
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0] and epochs[0] != list(range(20))


def test_the_order_depends_on_seed_and_domain_and_nothing_else() -> None:
    assert served(PromptOrder(20, 1, "sums"), 50) == served(PromptOrder(20, 1, "sums"), 50)
    assert served(PromptOrder(20, 1, "sums"), 20) != served(PromptOrder(20, 2, "sums"), 20)
    assert served(PromptOrder(20, 1, "sums"), 20) != served(PromptOrder(20, 1, "words"), 20)
    # Written down once: a checkpoint must be resumable with the versions to come.
    assert served(PromptOrder(8, 1, "sums"), 8) == list(zip([0] * 8, [2, 3, 5, 0, 4, 1, 6, 7], strict=True))


@pytest.mark.parametrize("before", [0, 1, 19, 20, 21, 40, 47])
def test_resuming_goes_on_exactly(before: int) -> None:
    order = PromptOrder(20, 1, "sums")
    served(order, before)
    state = json.loads(json.dumps(order.state_dict()))
    resumed = PromptOrder(20, 1, "sums")
    served(resumed, 5)
    resumed.load_state_dict(state)
    assert served(resumed, 50) == served(order, 50)


def test_a_state_of_other_data_is_refused() -> None:
    state = PromptOrder(20, 1, "sums").state_dict()
    with pytest.raises(ValueError, match="domain sums: the checkpoint's prompt order has count 20, this run has 21"):
        PromptOrder(21, 1, "sums").load_state_dict(state)
    with pytest.raises(ValueError, match="seed"):
        PromptOrder(20, 2, "sums").load_state_dict(state)
    with pytest.raises(ValueError, match="no prompts"):
        PromptOrder(0, 1, "sums")


def test_a_prompt_set_is_light() -> None:
    """Token ids and rows of a large set are bytes, not Python objects."""
    prompts = PromptSet("sums")
    for ids in ([1, 2], [], [70_000]):
        prompts.add("x", ids, {"a": [1]}, {"level": 2})
    assert [prompt.token_ids for prompt in prompts] == [(1, 2), (), (70_000,)]
    assert all(isinstance(kept, bytes) for kept in (*prompts._ids, *prompts._rows)) and len(prompts._ids[0]) == 8
    prompts[0].columns["level"] = prompts[0].answer["a"] = 9
    assert (prompts[0].columns, prompts[0].answer) == ({"level": 2}, {"a": [1]}), "what a reward does to its sample stays there"


def test_an_empty_answer_is_a_mistake(tmp_path: Path, make_tokenizer: MakeTokenizer) -> None:
    path = written(tmp_path, {"prompt": "one", "answer": None})
    assert f"{path}, line 1: column 'answer': empty (null); without answers, set domains.sums.data.answer: null" in mistakes(
        domain(path), make_tokenizer()
    )


# ---------------------------------------------------------------- tags and filters


def tagged(path: Path, tags: list[str], **data: Any) -> DomainConfig:
    return domain(path, {"tag": "task", "tags": tags, **data})


def test_domains_share_a_file_by_tags(tmp_path: Path, make_tokenizer: MakeTokenizer) -> None:
    """A row of another domain need not have this domain's columns."""
    path = written(
        tmp_path,
        {"prompt": "one", "answer": 1, "task": "sums"},
        {"question": "two", "task": "words"},
        {"prompt": "three", "answer": 3, "task": 7},
    )
    domains = {"sums": tagged(path, ["sums", "7"]), "words": tagged(path, ["words"], prompt="question", answer=None)}
    sums = load_prompts("sums", domains["sums"], "train", make_tokenizer(), domains)
    assert [prompt.text for prompt in sums] == ["one", "three"] and sums[0].columns["task"] == "sums"
    assert sums.counts() == "2 of 3 rows; left out: 1 of domain words"
    words = load_prompts("words", domains["words"], "train", make_tokenizer(), domains)
    assert [prompt.text for prompt in words] == ["two"] and words.left_out == {"of domain sums": 2}


def test_a_tag_of_a_domain_that_reads_another_file_is_a_mistake(tmp_path: Path, make_tokenizer: MakeTokenizer) -> None:
    """Each of the two would leave the row to the other."""
    rows = [{"prompt": "one", "answer": 1, "task": task} for task in ("sums", "words", "words")]
    path = written(tmp_path, *rows)
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"prompt": "two", "answer": 2, "task": "words"}))
    domains = {"sums": tagged(path, ["sums"]), "words": tagged(other, ["words"])}
    with pytest.raises(ValueError) as caught:
        load_prompts("sums", domains["sums"], "train", make_tokenizer(), domains)
    first, *_ = str(caught.value).split("\n")[1:]
    assert first.startswith(f"  {path}, line 2: column 'task': the tag 'words' is one of domain words, which does not read this file")
    domains["words"] = tagged(other, ["words"], validation=path)
    assert load_prompts("sums", domains["sums"], "train", make_tokenizer(), domains).left_out == {"of domain words": 2}


def test_a_tag_of_no_domain_is_a_mistake(tmp_path: Path, make_tokenizer: MakeTokenizer) -> None:
    """FINDINGS 6.9: such rows were sent to the math domain."""
    path = written(tmp_path, *({"prompt": "one", "answer": 1, "task": task} for task in ("sums", "other", None, True)), {"prompt": "one"})
    elsewhere = domain(path, {"tag": "kind", "tags": ["other"]})
    with pytest.raises(ValueError) as caught:
        load_prompts("sums", tagged(path, ["sums"]), "train", make_tokenizer(), {"elsewhere": elsewhere, "words": tagged(path, ["w"])})
    assert str(caught.value).split("\n")[1:] == [
        f"  {path}, line 2: column 'task': the tag 'other' belongs to no domain; there are w (words), sums (sums)",
        f"  {path}, line 3: column 'task': a tag is a text, got null",
        f"  {path}, line 4: column 'task': a tag is a text, got true",
        f"  {path}, line 5: column 'task': missing; the line has the columns prompt",
    ]


def test_filters_leave_rows_out_and_count_them(tmp_path: Path, make_tokenizer: MakeTokenizer) -> None:
    rows = [{"prompt": "one " * tokens, "answer": 1, "rate": rate} for tokens, rate in [(1, 0.5), (2, 0.1), (2, 0.2), (3, 0.8), (9, 0.5)]]
    path = written(tmp_path, *rows)
    chosen = {"prompt_tokens": [2, 3], "difficulty": "rate", "difficulty_range": [0.2, 0.8]}
    config = domain(path, {"filter": chosen, "validation": path}, sampling={"max_prompt_tokens": 5})
    prompts = load_prompts("sums", config, "train", make_tokenizer())
    assert [prompt.columns["rate"] for prompt in prompts] == [0.2, 0.8], "ends included, and what is left out may be too long"
    assert prompts.counts() == "2 of 5 rows; left out: 1 with rate outside 0.2 to 0.8, 2 whose prompt has not 2 to 3 tokens"
    held_out = load_prompts("sums", config, "validation", make_tokenizer())
    assert [prompt.columns["rate"] for prompt in held_out] == [0.1, 0.2, 0.8], "difficulty steers the training only"


def test_difficulty_and_weight_are_numbers_in_csv_too(tmp_path: Path, make_tokenizer: MakeTokenizer) -> None:
    (path := tmp_path / "train.csv").write_text("prompt,answer,rate,w\none,007,0.1,1\ntwo,2.5,0.5,3\n")
    config = domain(path, {"weight": "w", "filter": {"difficulty": "rate", "difficulty_range": [0, 0.2]}})
    prompts = load_prompts("sums", config, "train", make_tokenizer())
    assert [(prompt.answer, prompt.weight) for prompt in prompts] == [("007", 1.0)]


def test_a_filter_that_leaves_nothing_is_a_mistake(tmp_path: Path, make_tokenizer: MakeTokenizer) -> None:
    path = written(tmp_path, {"prompt": "one", "answer": 1, "rate": 1})
    config = domain(path, {"filter": {"difficulty": "rate", "difficulty_range": [0, 0.5]}})
    assert mistakes(config, make_tokenizer()) == (
        f"domains.sums.data.train: {path} no row is left (0 of 1 rows; left out: 1 with rate outside 0 to 0.5)"
    )


def test_difficulties_are_numbers(tmp_path: Path, make_tokenizer: MakeTokenizer) -> None:
    path = written(tmp_path, *[f'{{"prompt": "one", "answer": 1, "rate": {rate}}}' for rate in ("NaN", '"half"', "true", "null")])
    config = domain(path, {"filter": {"difficulty": "rate", "difficulty_range": [0, 1]}})
    assert mistakes(config, make_tokenizer()).count("column 'rate': a difficulty is a number, got ") == 4


def test_reading_stops_at_the_limit(tmp_path: Path, make_tokenizer: MakeTokenizer) -> None:
    path = written(tmp_path, *[{"prompt": "one", "answer": number} for number in range(5)], "no json")
    assert [prompt.answer for prompt in load_prompts("sums", domain(path), "train", make_tokenizer(), limit=3)] == [0, 1, 2]


def test_many_rows_are_tokenized_a_part_at_a_time(tmp_path: Path, make_tokenizer: MakeTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts_module, "ROWS_AT_ONCE", 3)
    path = written(tmp_path, *[{"prompt": "one " * (1 + number), "answer": number} for number in range(10)])
    prompts = load_prompts("sums", domain(path), "train", make_tokenizer())
    assert [(len(prompt.token_ids), prompt.answer) for prompt in prompts] == [(1 + number, number) for number in range(10)]
    longest = mistakes(domain(path, sampling={"max_prompt_tokens": 4}), make_tokenizer())
    assert "6 of 10 prompts" in longest and f"longest has 10 ({path}, line 10)" in longest, "all are counted, and none is listed"


def test_held_out_prompts_are_reported_by_a_column_of_few_values(tmp_path: Path, make_tokenizer: MakeTokenizer) -> None:
    path = written(tmp_path, *({"prompt": "one", "answer": 1, "level": level % 50} for level in range(60)))
    config = domain(path, {"validation": path, "report_by": "level"})
    assert len(load_prompts("sums", config, "validation", make_tokenizer())) == 60
    written(tmp_path, *({"prompt": "one", "answer": 1, "level": level} for level in range(51)))
    with pytest.raises(ValueError, match=r"domains\.sums\.data\.report_by: 'level' has 51 values; each is reported, so use at most 50"):
        load_prompts("sums", config, "validation", make_tokenizer())
    assert len(load_prompts("sums", config, "train", make_tokenizer())) == 51
    written(tmp_path, {"prompt": "one", "answer": 1, "level": None})
    with pytest.raises(ValueError, match="column 'level': prompts are reported by a text or a number, got null"):
        load_prompts("sums", config, "validation", make_tokenizer())
