from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from roll_lite.files import first_line, is_file, kind_of, listed, read_bytes, read_object, read_text, unreadable
from roll_lite.models.hf_config import HfConfig

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
EMBEDDING, HEAD, VALUE_HEAD = "model.embed_tokens.weight", "lm_head.weight", "score.weight"
READ_AS_WEIGHTS = ("F32", "BF16", "F16")
"""Supported dtypes of weights. Quantized weights would need their scales."""
_LARGEST_HEADER = 100 << 20
_BLOCK = 16 << 20
_SAMPLE = 4096
_MOST_SAMPLED = 500
_EXPONENTS = {"F32": (0x7F800000, 4), "BF16": (0x7F80, 2), "F16": (0x7C00, 2)}
"""{dtype: (mask of the exponent bits, bytes per number)}. The exponent bits of NaN and infinity are all set."""
HARMLESS = ("rotary_emb.inv_freq",)
"""Endings of ignored tensors: old checkpoints store them, but models compute them."""


@dataclass(frozen=True)
class StoredTensor:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def beginning(self) -> bytes:
        with self.file.open("rb") as file:
            file.seek(self.start)
            return file.read(min(_SAMPLE, self.stop - self.start))

    def blocks(self) -> Iterator[bytes]:
        with self.file.open("rb") as file:
            file.seek(self.start)
            for position in range(self.start, self.stop, _BLOCK):
                yield file.read(min(_BLOCK, self.stop - position))

    def equals(self, other: StoredTensor) -> bool:
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        return all(mine == its for mine, its in zip(self.blocks(), other.blocks(), strict=True))


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Locate a model's tensors from its safetensors headers; ValueError for broken or missing files."""
    index = folder / "model.safetensors.index.json"
    if kind_of(index) is None:
        if kind_of(folder / "model.safetensors") is None:
            raise ValueError(f"no model.safetensors and no {index.name} in this folder; expected a model in Hugging Face format")
        return _header(folder / "model.safetensors")
    files = read_object(index).get("weight_map")
    if not isinstance(files, dict) or not files or not all(isinstance(file, str) for file in files.values()):
        raise ValueError(f"{index} has no weight_map from tensors to files")
    missing = [file for file in sorted(set(files.values())) if kind_of(folder / file) is None]
    if missing:
        raise ValueError(
            f"{index.name} names {', '.join(missing[:3])}, which {'is' if len(missing) == 1 else 'are'} not there; download again"
        )
    headers = {file: _header(folder / file) for file in set(files.values())}
    for name, file in files.items():
        if name not in headers[file]:
            raise ValueError(f"{index.name} says that {file} holds {name}; it does not")
    return {name: headers[file][name] for name, file in files.items()}


def _header(file: Path) -> dict[str, StoredTensor]:
    broken = f"its safetensors cannot be read: {file}"
    if not is_file(file):
        raise ValueError(f"{broken} is no plain file")
    try:
        with file.open("rb") as content:
            begin = content.read(8)
            size, total = int.from_bytes(begin, "little"), file.stat().st_size
            if begin == b"version ":
                raise ValueError(f"{broken} is a pointer of Git LFS in place of the weights; fetch them with `git lfs pull`")
            if not 0 < size < min(_LARGEST_HEADER, total):
                raise ValueError(f"{broken} has no header")
            header = json.loads(content.read(size))
    except OSError as error:
        raise unreadable(file, error) from error
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{broken}: {error}") from error
    try:
        found = {}
        for name, entry in header.items():
            if name != "__metadata__":
                start, stop = (8 + size + int(offset) for offset in entry["data_offsets"])
                found[name] = StoredTensor(file, str(entry["dtype"]), tuple(map(int, entry["shape"])), start, stop)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{broken} has a header that lists no tensors with their type, shape and place") from error
    needed = max((tensor.stop for tensor in found.values()), default=0)
    if total < needed:
        raise ValueError(f"{broken} is cut off: it has {total:,} bytes, its header speaks of {needed:,}; download it again")
    return found


def weights_fingerprint(folder: Path) -> str:
    """Hash the names, dtypes, shapes and first 4 KiB of all tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(stored_tensors(folder).items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode() + tensor.beginning())
    return digest.hexdigest()


def wrong_weights(stored: Mapping[str, StoredTensor], hf: HfConfig, head: str) -> str | None:
    """Return a message if the stored tensors do not fit the model. `head`: name of the output layer's tensor."""
    heads = {HEAD: (hf.vocab_size, hf.hidden), VALUE_HEAD: (1, hf.hidden)}
    if hf.tied_embeddings:
        del heads[HEAD]
    wanted = weight_shapes(hf) | {name: shape for name, shape in heads.items() if name == head}
    missing = [name for name in wanted if name not in stored]
    if missing:
        return (
            f"its safetensors lack {missing[0]}"
            + (f" and {len(missing) - 1} more tensors" if missing[1:] else "")
            + " of config.json's model"
        )
    misfits = (misfit(name, stored[name].dtype, stored[name].shape, shape) for name, shape in wanted.items())
    wrong = next((found for found in misfits if found is not None), None)
    return wrong or tensors_without_place(stored, hf, head) or _not_finite(stored)


def tensors_without_place(names: Iterable[str], hf: HfConfig, head: str) -> str | None:
    """Return a message if some tensors do not belong to the model. An unused language-model head is allowed."""
    known = {*weight_shapes(hf), HEAD, head}
    unknown = sorted(name for name in names if name not in known and not name.endswith(HARMLESS))
    return f"has tensors that a {hf.family} model has no place for: {listed(unknown)}" if unknown else None


def _not_finite(stored: Mapping[str, StoredTensor]) -> str | None:
    """Return a message if the first 4 KiB of a tensor contain NaN or infinity; reads up to 500 tensors."""
    read = ((name, tensor) for name, tensor in stored.items() if tensor.dtype in _EXPONENTS)  # harmless extra tensors may have any type
    for name, tensor in islice(read, _MOST_SAMPLED):
        content, (exponent, width) = tensor.beginning(), _EXPONENTS[tensor.dtype]
        numbers = memoryview(content[: len(content) // width * width]).cast("I" if width == 4 else "H")
        if any(number & exponent == exponent for number in numbers):
            return f"{name} in {tensor.file.name} holds NaN or infinite numbers: training has broken the model, or the file is damaged"
    return None


def misfit(name: str, dtype: str, shape: Sequence[int], wanted: Sequence[int], by: str = "config.json") -> str | None:
    """Return a message if the dtype or shape of the tensor `name` is wrong. `by`: file that gives the wanted shape."""
    if dtype not in READ_AS_WEIGHTS:
        return f"{name} holds {dtype} in its safetensors; weights are read from {', '.join(READ_AS_WEIGHTS)}: take the unquantised model"
    if list(shape) != list(wanted):
        return f"{name} has the shape {list(shape)} in its safetensors; by {by} it is {list(wanted)}"
    return None


def weight_shapes(hf: HfConfig) -> dict[str, tuple[int, ...]]:
    queries, keys = hf.heads * hf.head_dim, hf.key_value_heads * hf.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hf.hidden,),
        "post_attention_layernorm.weight": (hf.hidden,),
        "self_attn.o_proj.weight": (hf.hidden, queries),
    }
    for part, rows in (("q", queries), ("k", keys), ("v", keys)):
        layer[f"self_attn.{part}_proj.weight"] = (rows, hf.hidden)
        if hf.qkv_bias:
            layer[f"self_attn.{part}_proj.bias"] = (rows,)
        if hf.qk_norm and part != "v":
            layer[f"self_attn.{part}_norm.weight"] = (hf.head_dim,)
    whole: dict[str, tuple[int, ...]] = {EMBEDDING: (hf.vocab_size, hf.hidden), "model.norm.weight": (hf.hidden,)}
    for number in range(hf.layers):
        if hf.experts is None or not hf.has_experts(number):
            mlp = _one_feed_forward("mlp", hf.hidden, hf.feed_forward)
        else:
            mlp = {"mlp.gate.weight": (hf.experts.count, hf.hidden)}
            for expert in range(hf.experts.count):
                mlp |= _one_feed_forward(f"mlp.experts.{expert}", hf.hidden, hf.experts.feed_forward)
        whole |= {f"model.layers.{number}.{name}": shape for name, shape in (layer | mlp).items()}
    return whole


def _one_feed_forward(place: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    return {f"{place}.{part}_proj.weight": shape for part, shape in shapes.items()}


def head_beside_tied_embeddings(folder: Path) -> str | None:
    """Return a message if config.json ties the LM head to the embedding, but the files contain another head."""
    stored = stored_tensors(folder)
    head, embedding = stored.get(HEAD), stored.get(EMBEDDING)
    if head is None or embedding is None or head.equals(embedding):
        return None
    return (
        f"{folder / 'config.json'} says tie_word_embeddings true, but {HEAD} in {head.file.name} is another tensor than {EMBEDDING}: "
        "set tie_word_embeddings to false to train with that head, or take the tensor out to train without it"
    )


def require_tokenizer(folder: Path) -> None:
    if not any(kind_of(folder / name) for name in TOKENIZER_FILES):
        raise ValueError(f"no tokenizer in this folder (none of {', '.join(TOKENIZER_FILES)})")


def chat_templates(folder: Path) -> list[str]:
    settings = folder / "tokenizer_config.json"
    if is_file(folder / "chat_template.jinja"):
        return [read_text(folder / "chat_template.jinja")]
    given = read_object(settings).get("chat_template") if kind_of(settings) is not None else None
    named = given if isinstance(given, list) else [] if given is None else [{"template": given}]
    return [str(one.get("template")) for one in named if isinstance(one, dict)]


def _vocabulary(folder: Path) -> tuple[Any, list[tuple[int, str]]] | None:
    file = folder / "tokenizer.json"
    if kind_of(file) is None:
        return None
    content = read_object(file)
    try:
        vocabulary = content["model"]["vocab"]
        if not isinstance(vocabulary, dict | list):
            raise TypeError(f"its vocabulary is {vocabulary!r:.40}")
        return vocabulary, sorted((token["id"], token["content"]) for token in content.get("added_tokens") or ())
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{file} cannot be read: it is no tokenizer's ({first_line(error)})") from error


def tokenizer_checksum(folder: Path) -> str:
    """Checksum of the vocabulary in tokenizer.json, independent of formatting; without this file, of all tokenizer files."""
    digest = hashlib.sha256()
    if (found := _vocabulary(folder)) is not None:
        digest.update(json.dumps(found, sort_keys=True).encode())
        return digest.hexdigest()
    for name in (*TOKENIZER_FILES, "added_tokens.json"):
        if kind_of(folder / name) is not None:
            digest.update(name.encode() + read_bytes(folder / name))
    return digest.hexdigest()


def largest_token_id(folder: Path) -> int | None:
    vocabulary, added = _vocabulary(folder) or ({}, [])
    ids = [*(vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))), *(number for number, _ in added)]
    for name in ("vocab.json", "added_tokens.json"):
        ids += read_object(folder / name).values() if kind_of(folder / name) is not None else ()
    if not all(isinstance(one, int) for one in ids):
        raise ValueError(f"{folder} cannot be read: a token of its tokenizer has an id that is no number")
    return max(ids, default=None)


SETTINGS_FILES = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


def wrong_settings(folder: Path, vocab_size: int | None = None) -> str | None:
    """Return a message if the EOS or padding token is outside the vocabulary; without `vocab_size`, only read the files. ValueError for a
    broken file."""
    for file in ("config.json", *SETTINGS_FILES):
        raw = read_object(folder / file) if kind_of(folder / file) is not None else {}
        for field in ("eos_token_id", "pad_token_id") if vocab_size is not None else ():
            given = raw.get(field)
            beyond = [one for one in (given if isinstance(given, list) else [given]) if isinstance(one, int) and one >= (vocab_size or 0)]
            if beyond:
                return f"{file}: {field} is {beyond[0]}; the vocabulary (vocab_size) has {vocab_size} rows"
    return None
