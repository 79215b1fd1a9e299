"""500 configurations, each broken in one place, drawn with a seed: each is told with its place, soon, and nothing beside it."""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from config_project import MODEL, Project
from pyarrow import parquet
from pydantic import ConfigDict, TypeAdapter, ValidationError
from support_cases import records
from support_weights import tensors, write_safetensors

from roll_lite.config.problems import ConfigError, Problem
from roll_lite.config.schema.base import Section
from roll_lite.config.schema.run import RunConfig
from roll_lite.config.validation import shape_of
from roll_lite.config.wording import field_type

SEED, COUNT = 20261122, 500
LIMIT_S = 5.0

RICH = """
defaults: [run, _self_]
steps: 20
actor_train:
  devices: 4
  micro_batch_size: 4
  optimizer: {lr: 1.0e-3, min_lr: 1.0e-4, warmup_steps: 10, decay: linear}
  strategy: {name: megatron, tensor_parallel: 2, pipeline_parallel: 2, sequence_parallel: true}
actor_infer: {devices: 4, strategy: {name: vllm, tensor_parallel: 4, max_model_len: 60, max_running_requests: 8, max_batched_tokens: 64}}
reference: {devices: 2, strategy: {tensor_parallel: 2}}
domains:
  add:
    sampling: {temperature: 0.7, top_k: 5, min_tokens: 2}
    template: {name: plain, text: "{prompt} "}
    samples_per_prompt: 4
  copy: {sampling: {temperature: 0.7}, samples_per_prompt: 4}
rollout: {prompts_per_step: 8, samples_per_prompt: 1, keep_mask: false}
algorithm:
  mini_batches: 4
  kl_in_loss: {coef: 0.1}
  aggregation: constant
  aggregation_constant: 24
  reward: {overlong: {buffer_tokens: 8}}
  masks: {response_tokens: [2, 16]}
"""
"""A right configuration whose values depend on each other: with the default in place of one of them, others would be wrong."""

Prepare = Callable[[Project], object]


@dataclass(frozen=True)
class Broken:
    """`place`: what a message has to begin with, or to name as its source."""

    name: str
    place: str
    overrides: tuple[str, ...] = ()
    prepare: Prepare | None = None
    more: bool = False
    """Whether further messages may follow from it."""


# ---------------------------------------------------------------- values and keys


def leaves(cls: type[Section] = RunConfig, path: str = "") -> Iterator[tuple[str, str, type[Section]]]:
    """Every key of the schema that the rich configuration may have: its section's path, its name, the section."""
    for name, info in cls.model_fields.items():
        shape = shape_of(info.annotation)
        if not shape.variants:
            yield path, name, cls
        elif name in ("domains", "reference") or (shape.container is None and len(shape.variants) == 1 and not optional(cls, name)):
            yield from leaves(shape.variants[0], f"{path}{name}." + ("add." if shape.container is dict else ""))


def optional(cls: type[Section], name: str) -> bool:
    info = cls.model_fields[name]
    return not info.is_required() and info.get_default(call_default_factory=True) is None


VALUES = [True, "word", 1.5, -1, 0, [1, "x"], {"x": 1}, None, [], "", [{}], -0.5]


def refused(cls: type[Section], name: str, value: Any) -> bool:
    adapter = TypeAdapter(field_type(cls.model_fields[name]), config=ConfigDict(allow_inf_nan=False))
    try:
        adapter.validate_json(json.dumps(value), strict=True)
    except ValidationError:
        return True
    return False


def wrong_values(draw: random.Random) -> Iterator[Broken]:
    for path, name, cls in leaves():
        removes = not cls.model_fields[name].is_required()
        wrong = [value for value in VALUES if refused(cls, name, value) and not (value is None and removes)]
        for value in draw.sample(wrong, min(2, len(wrong))):
            yield Broken(f"value {path}{name}={json.dumps(value)}", f"{path}{name}", (f"{path}{name}={json.dumps(value)}",))


def misspelt(word: str, draw: random.Random) -> str:
    place = draw.randrange(1, len(word) - 1)
    ways = [word[:place] + word[place + 1 :], word[:place] + word[place] + word[place:], word[:place] + word[place + 1] + word[place:]]
    return draw.choice(ways) if len(word) > 4 else ways[1]


def misspelt_keys(draw: random.Random) -> Iterator[Broken]:
    for path, name, cls in leaves():
        if len(name) < 4 or (wrong := misspelt(name, draw)) in cls.model_fields:
            continue

        def rename(project: Project, path: str = path, name: str = name, wrong: str = wrong) -> None:
            import yaml

            data = yaml.safe_load(RICH)
            section = data
            for key in path.split(".")[:-1]:
                section = section.setdefault(key, {})
            section[wrong] = section.pop(name, 1)
            run = yaml.safe_load((project.folder / "configs/run.yaml").read_text())
            for key in path.split(".")[:-1]:
                run = run.get(key, {})
            removed = f"~{path}{name}" if name in run else ""
            project.write("configs/rich.yaml", yaml.safe_dump(data))
            project.write("removed", removed)

        yield Broken(f"key {path}{wrong}", f"{path}{wrong}", prepare=rename)


HUGE = ["200000", "1000000000", "10000000000000000000000", "1" + "0" * 5000, "9" * 400, "1e400"]


def huge_numbers(draw: random.Random) -> Iterator[Broken]:
    for path in (
        "actor_train.devices",
        "actor_infer.devices",
        "algorithm.mini_batches",
        "rollout.prompts_per_step",
        "actor_train.strategy.tensor_parallel",
        "actor_train.strategy.pipeline_parallel",
        "domains.add.sampling.max_tokens",
        "domains.add.sampling.stop_token_ids.0",
        "actor_infer.strategy.max_model_len",
    ):
        for number in HUGE:
            if path.endswith(("prompts_per_step", "max_tokens")) and len(number) < 11:
                continue  # only large
            value = f"{path}={number}" if not path.endswith(".0") else f"{path[:-2]}=[{number}]"
            yield Broken(f"huge {path} {number[:12]} ({len(number)})", path.removesuffix(".0"), (value,), more=True)


# ---------------------------------------------------------------- paths


def loop(project: Project) -> str:
    (project.folder / "one").symlink_to("two")
    (project.folder / "two").symlink_to("one")
    return "one"


def fifo(project: Project, name: str = "pipe.jsonl") -> str:
    (project.folder / name).unlink(missing_ok=True)
    os.mkfifo(project.folder / name)
    return name


def dangling(project: Project) -> str:
    (project.folder / "gone.jsonl").symlink_to("nowhere")
    return "gone.jsonl"


def emptied(project: Project) -> str:
    (project.folder / "empty").mkdir()
    return "empty"


BAD_PATHS: dict[str, Callable[[Project], str]] = {
    "unknown home": lambda project: "~nobody_of_this_name/x",
    "loop": loop,
    "below a loop": lambda project: loop(project) + "/x",
    "a long name": lambda project: "n" * 300,
    "a long path": lambda project: "/".join(["n" * 200] * 30),
    "below a file": lambda project: "train.jsonl/below",
    "a null byte": lambda project: '"a\\0b"',
    "a pipe": fifo,
    "a device": lambda project: "/dev/zero",
    "a file of another kind": lambda project: str(project.write("some.txt", "x").name),
    "a broken link": dangling,
    "an empty folder": emptied,
}
PATH_KEYS = {
    "model.path": (),
    "domains.add.data.train": (),
    "domains.add.data.validation": (),
    "run_dir": (),
    "checkpoint.resume": (),
    "critic.path": ("critic.init=path", "algorithm.advantage=gae", "critic.devices=1"),
}


def wrong_paths(draw: random.Random) -> Iterator[Broken]:
    for key, beside in PATH_KEYS.items():
        for name, make in BAD_PATHS.items():
            if key == "run_dir" and name in ("a broken link", "an empty folder"):
                continue

            def prepare(project: Project, make: Callable[[Project], str] = make, key: str = key) -> None:
                project.write("override", f"{key}={make(project)}")

            yield Broken(f"path {key}: {name}", key, beside, prepare, more=True)


# ---------------------------------------------------------------- YAML


DEEP = 3000
BAD_YAML: dict[str, tuple[bytes, str]] = {
    "latin 1": (b"experiment: \xe9\n", "wrong.yaml"),
    "utf 16": ("experiment: x\n".encode("utf-16"), "wrong.yaml"),
    "a zero": (b"experiment: a\0b\n", "wrong.yaml"),
    "a control character": (b"experiment: a\x07b\n", "wrong.yaml"),
    "an escape character": (b"steps: \x1b[31m3\n", "wrong.yaml"),
    "a gzip": (b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03", "wrong.yaml"),
    "a tab": (b"model:\n\tpath: model\n", "wrong.yaml"),
    "an open bracket": (b"model: {path: [}\n", "wrong.yaml"),
    "an open quote": (b'experiment: "x\n', "wrong.yaml"),
    "a stray colon": (b"experiment: x: y\n", "wrong.yaml"),
    "two documents": (b"steps: 1\n---\nsteps: 2\n", "wrong.yaml"),
    "an unknown alias": (b"steps: *nothing\n", "wrong.yaml"),
    "an anchor twice": (b"defaults: [run]\nsteps: &a\n  x: *a\n", "wrong.yaml"),
    "0x_": (b"defaults: [run]\nsteps: 0x_\n", "steps"),
    "0b_": (b"defaults: [run]\nsteps: 0b_\n", "steps"),
    "a bool that is none": (b"defaults: [run]\nsteps: !!bool maybe\n", "steps"),
    "an int that is none": (b"defaults: [run]\nsteps: !!int many\n", "steps"),
    "a float that is none": (b"defaults: [run]\nsteps: !!float few\n", "steps"),
    "a date that is none": (b"defaults: [run]\nsteps: !!timestamp never\n", "steps"),
    "base 60": (b"defaults: [run]\nsteps: !!int '1:x'\n", "steps"),
    "binary that is none": (b"defaults: [run]\nsteps: !!binary '*'\n", "steps"),
    "a Python object": (b"defaults: [run]\nsteps: !!python/object/apply:os.getcwd []\n", "steps"),
    "a tag of nobody": (b"defaults: [run]\nsteps: !mine 3\n", "steps"),
    "a set": (b"defaults: [run]\nsteps: !!set {a, b}\n", "steps"),
    "a key that is a list": (b"defaults: [run]\n? [a, b]\n: 1\n", "(top)"),
    "a key that is a mapping": (b"defaults: [run]\n? {a: b}\n: 1\n", "(top)"),
    "a merge of nothing": (b"defaults: [run]\nmodel: {<<: 3}\n", "wrong.yaml"),
    "itself in a list": (b"defaults: [run]\ntrackers: &t [*t]\n", "wrong.yaml"),
    "itself in a mapping": (b"defaults: [run]\nrollout: &t {x: *t}\n", "wrong.yaml"),
    "brackets": (b"steps: " + b"[" * DEEP + b"]" * DEEP, "wrong.yaml"),
    "open brackets": (b"steps: " + b"[" * DEEP, "wrong.yaml"),
    "blocks": (b"\n".join(b" " * n + b"a:" for n in range(DEEP // 4)), "wrong.yaml"),
    "an interpolation of itself": (b"defaults: [run]\nsteps: ${steps}\n", "steps"),
    "a section within itself": (b"defaults: [run]\nrollout: {x: '${rollout}'}\n", "rollout"),
    "an open interpolation": (b"defaults: [run]\nsteps: ${seed\n", "steps"),
    "no such resolver": (b"defaults: [run]\nsteps: ${nobody:1}\n", "steps"),
    "no such variable": (b"defaults: [run]\nsteps: ${oc.env:NO_SUCH_VARIABLE}\n", "steps"),
    "decoded nonsense": (b"defaults: [run]\nsteps: '${oc.decode:\"{a: [\"}'\n", "steps"),
    "nested interpolations": (b"defaults: [run]\nsteps: " + b"${" * 400 + b"seed" + b"}" * 400, "steps"),
    "a number of many digits": (b"defaults: [run]\nsteps: " + b"9" * 5000, "steps"),
    "itself by another name": (b"defaults: [./wrong]\n", "wrong.yaml: defaults"),
    "itself by a longer name": (b"defaults: [run, .//wrong]\n", "wrong.yaml: defaults"),
    "itself by a link": (b"defaults: [linked]\n", "wrong.yaml: defaults"),
    "a folder": (b"defaults: [folder]\n", "wrong.yaml: defaults"),
    "a pipe": (b"defaults: [pipe]\n", "wrong.yaml: defaults"),
    "a loop": (b"defaults: [loop]\n", "wrong.yaml: defaults"),
    "a name that is long": (b"defaults: [" + b"n" * 300 + b"]\n", "wrong.yaml: defaults"),
    "a name with a zero": (b'defaults: ["a\\0b"]\n', "wrong.yaml: defaults"),
    "the folder above": (b"defaults: [../run]\n", "wrong.yaml: defaults"),
    "an absolute name": (b"defaults: [/etc/passwd]\n", "wrong.yaml: defaults"),
    "a number as a file": (b"defaults: [run, 3]\n", "wrong.yaml: defaults"),
    "a mapping as defaults": (b"defaults: {run: 1}\n", "wrong.yaml: defaults"),
    "nothing as a file": (b"defaults: [run, null]\n", "wrong.yaml: defaults"),
    "an empty name": (b"defaults: [run, '']\n", "wrong.yaml: defaults"),
    "a list at the top": (b"- 1\n- 2\n", "wrong.yaml"),
    "a text at the top": (b"hello\n", "wrong.yaml"),
    "a number at the top": (b"3\n", "wrong.yaml"),
}


def wrong_yaml(draw: random.Random) -> Iterator[Broken]:
    for name, (text, place) in BAD_YAML.items():

        def prepare(project: Project, text: bytes = text) -> None:
            configs = project.folder / "configs"
            (configs / "wrong.yaml").write_bytes(text)
            (configs / "linked.yaml").symlink_to("wrong.yaml")
            (configs / "folder.yaml").mkdir()
            os.mkfifo(configs / "pipe.yaml")
            (configs / "loop.yaml").symlink_to("loop.yaml")

        follows = not text.startswith(b"defaults: [run")
        yield Broken(f"yaml {name}", place, prepare=prepare, more=follows)


# ---------------------------------------------------------------- overrides

BAD_OVERRIDES = {one["override"]: one["place"] for one in records("config/broken_overrides")} | {"steps=" + "[" * DEEP: "steps="}


def wrong_overrides(draw: random.Random) -> Iterator[Broken]:
    for override, place in BAD_OVERRIDES.items():
        yield Broken(f"override {override!r:.40}", place, (override,), more=override == "domains={}")


# ---------------------------------------------------------------- models

SIZES = [name for name, value in MODEL.items() if isinstance(value, int)]
BAD_SIZES = ["12", 0, -4, float("inf"), float("nan"), 1.5, [], {}, True, 10**30, None, "", "x"]


def changed_config(field: str, value: Any) -> Prepare:
    def prepare(project: Project) -> None:
        raw = MODEL | {field: value}
        if value is None:
            del raw[field]
        (project.folder / "model/config.json").write_text(json.dumps(raw))

    return prepare


def with_file(name: str, content: bytes) -> Prepare:
    return lambda project: (project.folder / "model" / name).write_bytes(content)


def cut(project: Project) -> None:
    file = project.folder / "model/model.safetensors"
    os.truncate(file, file.stat().st_size - 1000)


def with_tensors(change: Callable[[dict[str, list[int]]], object]) -> Prepare:
    def prepare(project: Project) -> None:
        shapes = tensors(MODEL)
        change(shapes)
        write_safetensors(project.folder / "model/model.safetensors", shapes)

    return prepare


def with_index(files: dict[str, str], written: dict[str, list[int]] | None = None) -> Prepare:
    """The model in shards that an index lists; of these only the first is there."""

    def prepare(project: Project) -> None:
        folder = project.folder / "model"
        (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
        whole = dict.fromkeys(tensors(MODEL), "model-00001-of-00002.safetensors") | files
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": whole}))

    return prepare


def model_folder_as(make: Callable[[Path], object], name: str) -> Prepare:
    def prepare(project: Project) -> None:
        file = project.folder / "model" / name
        file.unlink()
        make(file)

    return prepare


HEADERS = [
    b"",
    b"\0" * 8,
    b"\xff" * 8,
    b"\x02\0\0\0\0\0\0\0{}",
    b"\x02\0\0\0\0\0\0\0[]",
    b"\x04\0\0\0\0\0\0\0null",
    b'\x09\0\0\0\0\0\0\0{"a": 3}',
]
BAD_MODELS: dict[str, Prepare] = {
    **{f"{one['field']}={one['value']!r:.20}": changed_config(one["field"], one["value"]) for one in records("config/broken_fields")},
    **{
        f"config.json {text[:12]!r}": with_file("config.json", text) for text in (b"", b"{", b"[]", b"null", b"3", b"\xff\xfe", b"[" * 9000)
    },
    **{
        f"tokenizer.json {text[:40]!r}": with_file("tokenizer.json", text)
        for text in (
            b"",
            b"null",
            b"[]",
            b"3",
            b"\xff\xfe",
            b"{",
            b'{"model": null}',
            b'{"model": []}',
            b'{"model": {"vocab": 3}}',
            b'{"model": {"vocab": {"a": "x"}}}',
            b'{"model": {"vocab": {"a": null}}}',
            b'{"added_tokens": 3}',
            b'{"added_tokens": [3]}',
            b'{"added_tokens": [{"id": null}]}',
            b"[" * 9000,
            b'{"model": {"vocab": {"a": 100}}}',
        )
    },
    "null vocab.json": with_file("vocab.json", b"null"),
    "vocab.json of lists": with_file("vocab.json", b'{"a": [1]}'),
    "null added_tokens.json": with_file("added_tokens.json", b"null"),
    "no tokenizer": lambda project: (project.folder / "model/tokenizer.json").unlink(),
    "no weights": lambda project: (project.folder / "model/model.safetensors").unlink(),
    "no config": lambda project: (project.folder / "model/config.json").unlink(),
    "an LFS pointer": with_file("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
    "cut weights": cut,
    **{f"header {header!r:.30}": with_file("model.safetensors", header) for header in HEADERS},
    "a header without offsets": with_file(
        "model.safetensors", (lambda t: len(t).to_bytes(8, "little") + t)(b'{"model.norm.weight": {"shape": [1]}}')
    ),
    "fewer layers": with_tensors(lambda shapes: [shapes.pop(name) for name in list(shapes) if ".5." in name]),
    "another width": with_tensors(lambda shapes: shapes.update({"model.layers.2.mlp.up_proj.weight": [97, 256]})),
    "other keys": with_tensors(lambda shapes: shapes.update({"model.layers.0.self_attn.k_proj.weight": [96, 256]})),
    "another vocabulary": with_tensors(lambda shapes: shapes.update({"model.embed_tokens.weight": [120, 256]})),
    "no head": with_tensors(lambda shapes: shapes.pop("lm_head.weight")),
    "a missing shard": with_index({"model.norm.weight": "model-00002-of-00002.safetensors"}),
    "an index that names another tensor": with_index({"model.norms.weight": "model-00001-of-00002.safetensors"}),
    "an index of nothing": lambda project: (with_index({})(project), with_file("model.safetensors.index.json", b"null")(project)),
    "an index with numbers": lambda project: (
        with_index({})(project),
        with_file("model.safetensors.index.json", b'{"weight_map": {"model.norm.weight": 3}}')(project),
    ),
    "config.json is a folder": model_folder_as(Path.mkdir, "config.json"),
    "config.json is a pipe": model_folder_as(os.mkfifo, "config.json"),
    "config.json is a loop": model_folder_as(lambda file: file.symlink_to(file), "config.json"),
    "tokenizer.json is a pipe": model_folder_as(os.mkfifo, "tokenizer.json"),
    "tokenizer.json is a folder": model_folder_as(Path.mkdir, "tokenizer.json"),
    "weights are a pipe": model_folder_as(os.mkfifo, "model.safetensors"),
    "weights are a folder": model_folder_as(Path.mkdir, "model.safetensors"),
    "weights are a broken link": model_folder_as(lambda file: file.symlink_to("gone"), "model.safetensors"),
}


def wrong_models(draw: random.Random) -> Iterator[Broken]:
    for name, prepare in BAD_MODELS.items():
        yield Broken(f"model {name}", "model.path", prepare=prepare, more="vocabulary" in name)
    for field in SIZES:
        optional = field in ("max_position_embeddings", "num_key_value_heads")
        for value in draw.sample([one for one in BAD_SIZES if not (optional and one is None)], 6):
            yield Broken(f"model {field}={value!r}", "model.path", prepare=changed_config(field, value))


# ---------------------------------------------------------------- data and templates


def table(**columns: Any) -> Prepare:
    def prepare(project: Project) -> None:
        parquet.write_table(pa.table(columns), project.folder / "rows.parquet")
        project.write("override", "domains.add.data.train=rows.parquet")

    return prepare


def rows(text: bytes) -> Prepare:
    return lambda project: (project.folder / "held_out.jsonl").write_bytes(text)


def into(name: str, content: bytes, key: str = "domains.add.data.train") -> Prepare:
    def prepare(project: Project) -> None:
        (project.folder / name).parent.mkdir(exist_ok=True)
        (project.folder / name).write_bytes(content)
        project.write("override", f"{key}={name.partition('/')[0]}")

    return prepare


TRAIN, HELD_OUT = "domains.add.data.train", "domains.add.data.validation"
BAD_DATA: dict[str, tuple[str, Prepare]] = {
    "prompts that are truths": ("domains.add.data.prompt", table(prompt=[True], answer=["a"])),
    "prompts that are nothing": ("domains.add.data.prompt", table(prompt=pa.nulls(1), answer=["a"])),
    "prompts that are structs": ("domains.add.data.prompt", table(prompt=[{"text": "x"}], answer=["a"])),
    "prompts that are lists of numbers": ("domains.add.data.prompt", table(prompt=[[1, 2]], answer=["a"])),
    "prompts that are messages, for plain text": (
        "domains.add.data.prompt",
        table(prompt=[[{"role": "user", "content": "x"}]], answer=["a"]),
    ),
    "answers that are nothing": ("domains.add.data.answer", table(prompt=["x"], answer=pa.nulls(1))),
    "no prompt column": ("domains.add.data.prompt", table(question=["x"], answer=["a"])),
    "no rows": (TRAIN, table(prompt=pa.array([], pa.string()), answer=pa.array([], pa.string()))),
    "parquet that is none": (TRAIN, into("rows.parquet", b"PAR1xxxxPAR1")),
    "an empty parquet": (TRAIN, into("rows.parquet", b"")),
    "arrow that is none": (TRAIN, into("rows.arrow", b"ARROW1\0\0xxxx")),
    "a folder of two kinds": (
        TRAIN,
        lambda project: (into("many/a.jsonl", b'{"prompt": "a", "answer": "b"}\n')(project), into("many/b.parquet", b"")(project)),
    ),
    "a saved set without files": (TRAIN, into("saved/state.json", b'{"_data_files": [{"filename": "x.arrow"}]}')),
    "a saved set that is null": (TRAIN, into("saved/state.json", b"null")),
    "a saved set with numbers": (TRAIN, into("saved/state.json", b'{"_data_files": 3}')),
    "a dictionary of splits": (TRAIN, into("saved/dataset_dict.json", b"null")),
    "an empty file": (HELD_OUT, rows(b"")),
    "blank lines": (HELD_OUT, rows(b"\n\n")),
    "no JSON": (HELD_OUT, rows(b"hello\n")),
    "a list": (HELD_OUT, rows(b"[1]\n")),
    "other bytes": (HELD_OUT, rows(b"\xff\xfe\0\n")),
    "deep brackets": (HELD_OUT, rows(b"[" * 9000 + b"\n")),
    "many digits": (HELD_OUT, rows(b'{"prompt": "x", "answer": ' + b"9" * 5000 + b"}\n")),
    "a line of nothing": (HELD_OUT, rows(b"null\n")),
    "a prompt that is null": ("domains.add.data", rows(b'{"prompt": null, "answer": "x"}\n')),
    "an answer that is null": ("domains.add.data", rows(b'{"prompt": "x", "answer": null}\n')),
    "messages for plain text": ("domains.add.data", rows(b'{"prompt": [{"role": "user", "content": "x"}], "answer": "x"}\n')),
}


def wrong_data(draw: random.Random) -> Iterator[Broken]:
    for name, (place, prepare) in BAD_DATA.items():
        yield Broken(f"data {name}", place, prepare=prepare)
    for one in records("config/broken_templates"):
        key = "domains.add.template.text"
        yield Broken(f"template {one['case']}", key, (f"{key}={json.dumps(one['text'])}",))


# ---------------------------------------------------------------- all of them


def generate() -> list[Broken]:
    """All hand-written kinds, and of the large families as many as make up the number."""
    draw = random.Random(SEED)
    kinds = (wrong_paths, wrong_yaml, wrong_overrides, wrong_models, wrong_data, huge_numbers)
    chosen = [one for kind in kinds for one in kind(draw)]
    values, keys = list(wrong_values(draw)), list(misspelt_keys(draw))
    missing = COUNT - len(chosen)
    spelt = draw.sample(keys, min(len(keys), missing // 2))
    return chosen + spelt + draw.sample(values, missing - len(spelt))


CASES = generate()
SECOND = "limits.other"
"""A mistake beside the first."""


def told(project: Project, broken: Broken, *beside: str) -> list[Problem]:
    project.write("configs/rich.yaml", RICH)
    project.write_model("model")
    if broken.prepare is not None:
        broken.prepare(project)
    written = [project.folder / name for name in ("override", "removed")]
    overrides = [one.read_text() for one in written if one.is_file() and one.read_text()]
    name = "wrong" if (project.folder / "configs/wrong.yaml").is_file() else "rich"
    started = time.process_time()
    try:
        project.load(*overrides, *broken.overrides, *beside, name=name)
    except ConfigError as error:
        return list(error.problems)
    finally:
        assert time.process_time() - started < LIMIT_S, "takes too long"
    return []


def names(problem: Problem, place: str) -> bool:
    return f"{problem.path} {problem.source}".startswith(place) or place in problem.source


def test_there_are_as_many_as_promised() -> None:
    assert len(CASES) == COUNT
    assert [name for name, count in Counter(one.name for one in CASES).items() if count > 1] == []


def test_the_configuration_that_is_broken_was_right(project: Project) -> None:
    assert told(project, Broken("none", "")) == []


@pytest.mark.timeout(20)
@pytest.mark.one_in(4)
@pytest.mark.parametrize("broken", CASES, ids=lambda one: one.name.encode("ascii", "replace").decode().replace("\0", ""))
def test_it_is_told(project: Project, broken: Broken) -> None:
    problems = told(project, broken)
    assert any(names(one, broken.place) for one in problems), problems or "accepted"
    assert broken.more or all(names(one, broken.place) for one in problems), problems
    for problem in problems:
        assert problem.message.strip() and len(str(problem)) < 2000


@pytest.mark.parametrize(
    "broken", random.Random(SEED).sample(CASES, 60), ids=lambda one: one.name.encode("ascii", "replace").decode().replace("\0", "")
)
def test_it_hides_no_other(project: Project, broken: Broken) -> None:
    problems = told(project, broken, f"{SECOND}=-1")
    assert any(names(one, broken.place) for one in problems) and any(one.path == SECOND for one in problems), problems


@pytest.mark.parametrize("key", PATH_KEYS)
def test_what_may_not_be_looked_at(project: Project, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """A folder that is closed to this user; a test may run as somebody to whom none is."""
    real = Path.stat

    def stat(self: Path, **options: Any) -> os.stat_result:
        if "closed" in self.parts:
            raise PermissionError(13, "Permission denied", str(self))
        return real(self, **options)

    monkeypatch.setattr(Path, "stat", stat)
    problems = told(project, Broken("closed", key, (f"{key}=closed/inside", *PATH_KEYS[key])))
    assert [(one.path, "Permission denied" in one.message) for one in problems if one.path == key] == [(key, True)], problems
