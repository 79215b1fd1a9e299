"""SGLang's own implementation, unchanged."""

from sglang.srt.models.qwen2 import EntryClass

__all__ = ["EntryClass"]
