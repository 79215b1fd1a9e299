"""What lies in a model's folder beside config.json: tensors by the headers of the safetensors, token ids by the tokenizer's files."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_LARGEST_HEADER = 100 << 20
_BLOCK = 16 << 20


@dataclass(frozen=True)
class StoredTensor:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Of its bytes in the file."""
    stop: int

    def blocks(self) -> Iterator[bytes]:
        with self.file.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            for position in range(self.start, self.stop, _BLOCK):
                yield content[position : min(position + _BLOCK, self.stop)]

    def equals(self, other: StoredTensor) -> bool:
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        return all(mine == its for mine, its in zip(self.blocks(), other.blocks(), strict=True))


def find_tensor(folder: Path, name: str) -> StoredTensor | None:
    """None where no file holds it; ValueError where the files are broken."""
    index, file = folder / "model.safetensors.index.json", folder / "model.safetensors"
    try:
        if index.is_file():
            files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            if name not in files:
                return None
            file = folder / files[name]
        if not file.is_file():
            raise ValueError(f"no {file.name} in this folder; expected a model in Hugging Face format")
        header, start = _header(file)
        if name not in header:
            return None
        begin, end = header[name]["data_offsets"]
        return StoredTensor(file, header[name]["dtype"], tuple(header[name]["shape"]), start + begin, start + end)
    except (OSError, KeyError, TypeError) as error:
        raise ValueError(f"its safetensors cannot be read: {error}") from error


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """What it says, and where the tensors begin."""
    with file.open("rb") as content:
        size = int.from_bytes(content.read(8), "little")
        if not 0 < size < _LARGEST_HEADER:
            raise ValueError(f"its safetensors cannot be read: {file} has no header")
        try:
            header: dict[str, Any] = json.loads(content.read(size))
        except ValueError as error:
            raise ValueError(f"its safetensors cannot be read: {file}: {error}") from error
    return header, 8 + size


def head_beside_tied_embeddings(folder: Path) -> str | None:
    """What is wrong where config.json ties the head to the embeddings and the files hold another one."""
    head, embedding = find_tensor(folder, HEAD), find_tensor(folder, EMBEDDING)
    if head is None or embedding is None or head.equals(embedding):
        return None
    return (
        f"{folder / 'config.json'} says tie_word_embeddings true, but {HEAD} in {head.file.name} is another tensor than {EMBEDDING}: "
        "set tie_word_embeddings to false to train with that head, or take the tensor out to train without it"
    )


def largest_token_id(folder: Path) -> int | None:
    """Of the tokenizer's files that can be read without the tokenizer's code; ValueError where one cannot be read."""
    ids: list[int] = []
    for name in ("tokenizer.json", "vocab.json", "added_tokens.json"):
        if not (folder / name).is_file():
            continue
        try:
            content = json.loads((folder / name).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{folder / name} cannot be read: {error}") from error
        if name != "tokenizer.json":
            ids += content.values()
            continue
        vocabulary = content.get("model", {}).get("vocab", {})
        ids += vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        ids += [token["id"] for token in content.get("added_tokens") or ()]
    return max(ids, default=None)
