"""Calls that an engine's own parser for Qwen3-Coder finds: `python engine_parsers.py vllm|sglang FOLDER_OF_TOKENIZER`. Texts and tools come
as JSON on standard input; names and arguments go as JSON to the last line of standard output."""

from __future__ import annotations

import json
import sys
from typing import Any

from transformers import AutoTokenizer

texts, tools = json.load(sys.stdin)


def of_vllm(text: str) -> list[tuple[str, Any]]:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser.engine.adapters import make_adapters
    from vllm.parser.qwen3 import Qwen3Parser

    request = ChatCompletionRequest(messages=[{"role": "user", "content": ""}], model="m", tools=tools)
    _, adapter = make_adapters(Qwen3Parser)  # vllm.tool_parsers imports those of all models, with their packages
    parser = adapter(AutoTokenizer.from_pretrained(sys.argv[2]), request.tools)
    found = parser.extract_tool_calls(text, request).tool_calls
    return [(one.function.name, json.loads(one.function.arguments)) for one in found]


def of_sglang(text: str) -> list[tuple[str, Any]]:
    from roll_lite.distributed.strategy.sglang.compat import cpu_stubs

    cpu_stubs.install()
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.qwen3_coder_detector import Qwen3CoderDetector

    found = Qwen3CoderDetector().detect_and_parse(text, [Tool(**one) for one in tools]).calls
    return [(str(one.name), json.loads(one.parameters)) for one in found]


parse = {"vllm": of_vllm, "sglang": of_sglang}[sys.argv[1]]
sys.stdout.write("\n" + json.dumps([parse(text) for text in texts]))
