"""Names of the hub, with the real client against a mirror on this machine."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from pyarrow import parquet
from support_hub import ROOT, TOKEN, Mirror, etag, mirror, python
from support_models import make_tiny_reward_model

from roll_lite.config.schema.domains import DataConfig
from roll_lite.config.schema.models import ModelConfig
from roll_lite.hub import HubPath, chosen, located

PROJECT = """
defaults: [tiny_base, _self_]
model: {path: %s}
steps: 1
domains:
  add: null
  make: null
  repeat: null
  word_problems:
    data: {train: "hf://acme/problems/main?split=train", validation: "hf://acme/problems?split=test", prompt: question}
    template: chat
    sampling: {max_prompt_tokens: 100, max_tokens: 12}
    reward: {name: math}
"""


def problems(folder: Path, *files: str) -> Path:
    for name in files:
        rows = [{"question": f"{name} {n} + 1?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}"} for n in range(8)]
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pa.Table.from_pylist(rows), folder / name)
    return folder


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Mirror]:
    model = shutil.copytree(ROOT / "examples/models/tiny_chat", tmp_path / "on_the_hub/model")
    (model / "pytorch_model.bin").write_bytes(b"the same weights once more")
    (model / "original").mkdir()
    (model / "original/params.json").write_text("{}")
    data = problems(tmp_path / "on_the_hub/data", "main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet")
    (data / "README.md").write_text("# Problems")
    with mirror() as served:
        served.add("models/acme/tiny", model)
        served.add("datasets/acme/problems", data, "b" * 40)
        yield served


def check(hub: Mirror, folder: Path, text: str, *overrides: str, home: str = "home", **variables: str) -> tuple[int, str, str]:
    (folder / "project.yaml").write_text(text)
    command = ["-m", "roll_lite.cli", "check", "--config-name", "project", *overrides]
    done = python(*command, home=folder / home, endpoint=hub.url, folder=folder, **variables)
    return done.returncode, done.stdout, done.stderr


def test_names_are_pinned_and_only_what_a_check_reads_is_downloaded(hub: Mirror, tmp_path: Path) -> None:
    code, resolved, told = check(hub, tmp_path, PROJECT % "acme/tiny")
    assert code == 0, told
    settings = yaml.safe_load(resolved)
    assert settings["model"]["path"] == f"hf://acme/tiny?revision={'a' * 40}"
    data = settings["domains"]["word_problems"]["data"]
    assert data["train"] == f"hf://acme/problems/main?split=train&revision={'b' * 40}"
    assert data["validation"] == f"hf://acme/problems?split=test&revision={'b' * 40}"
    assert (
        "downloading acme/tiny (aaaaaaa) of the hub: 5 files" in told and "downloading acme/problems (bbbbbbb) of the hub: 1 file," in told
    )
    assert f"the weights of hf://acme/tiny?revision={'a' * 40} are downloaded, and checked, when a run starts" in told
    model = ["chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    assert hub.downloaded() == sorted([*model, "main/test-00000-of-00001.parquet", "main/train-00000-of-00001.parquet"])
    # Later the branch has moved on, and there is no network: what was written down still is what it was.
    hub.repositories.clear()
    hub.requests.clear()
    assert check(hub, tmp_path, resolved, HF_HUB_OFFLINE="1")[:2] == (0, resolved)
    done = python("-c", RESOLVE, "acme/tiny", home=tmp_path / "home", endpoint=hub.url, folder=tmp_path, HF_HUB_OFFLINE="1")
    assert settings["model"]["path"] in done.stdout, "the last commit of a name, too"
    assert hub.requests == []


# Every model a run can have, and data of the set that has two configurations. The domain's reward is both a reward model and a judge.
EVERYWHERE = """
defaults: [tiny_ppo, _self_]
model: {path: acme/tiny}
steps: 1
algorithm: {critic_warmup_steps: 0}
critic: {init: path, path: "acme/reward?revision=v1"}
reward_models: {liked: {path: hf://acme/reward, dtype: float32, devices: [2]}}
judges:
  strict: {path: old-acme/tiny, dtype: float32, devices: [3], strategy: {max_model_len: 256, max_running_requests: 16}}
domains:
  add: null
  make: null
  repeat: null
  gsm8k:
    data: {train: "hf://openai/gsm8k?split=train", validation: "hf://openai/gsm8k?split=test", prompt: question}
    template: chat
    sampling: {max_prompt_tokens: 100, max_tokens: 12}
    reward:
      name: model
      args: {model: liked}
      terms:
        - name: judge
          args: {server: strict, api: completions, template: "{response}", pattern: "^.*?(7|$)", choices: {"7": 1, "": 0}, max_tokens: 32}
"""


@pytest.fixture
def every_model(hub: Mirror, tmp_path: Path) -> Mirror:
    first = make_tiny_reward_model(tmp_path / "on_the_hub/reward_v1", vocab_size=416)
    hub.add("models/acme/reward", first, "1" * 40, branches=("v1",))
    hub.add("models/acme/reward", make_tiny_reward_model(tmp_path / "on_the_hub/reward", seed=1), "2" * 40)
    hub.renamed["models/old-acme/tiny"] = "models/acme/tiny"
    gsm8k = problems(
        tmp_path / "on_the_hub/gsm8k",
        *(f"{name}/{split}-00000-of-00001.parquet" for name in ("main", "socratic") for split in ("train", "test")),
    )
    hub.add("datasets/openai/gsm8k", gsm8k, "3" * 40)
    return hub


def pinned(settings: dict[str, Any]) -> list[str]:
    """The names in a configuration of EVERYWHERE."""
    data = settings["domains"]["gsm8k"]["data"]
    roles = (settings["model"], settings["critic"], settings["reward_models"]["liked"], settings["judges"]["strict"])
    return [*(role["path"] for role in roles), data["train"], data["validation"]]


PINNED = [
    f"hf://acme/tiny?revision={'a' * 40}",
    f"hf://acme/reward?revision={'1' * 40}",
    f"hf://acme/reward?revision={'2' * 40}",
    f"hf://old-acme/tiny?revision={'a' * 40}",
    f"hf://openai/gsm8k?split=train&revision={'3' * 40}",
    f"hf://openai/gsm8k?split=test&revision={'3' * 40}",
]


def test_names_of_every_model_and_of_data_are_pinned(every_model: Mirror, tmp_path: Path) -> None:
    hub = every_model
    code, resolved, told = check(hub, tmp_path, EVERYWHERE)
    assert code == 0, told
    assert pinned(yaml.safe_load(resolved)) == PINNED
    notes = [line for line in told.splitlines() if "are downloaded, and checked, when a run starts" in line]
    assert [line.partition(": the weights")[0].split()[-1] for line in notes] == [
        "reference",  # the policy's, too
        "critic",
        "reward_models.liked",
        "judges.strict",
    ]
    assert not any("socratic" in file or file.endswith(".safetensors") for file in hub.downloaded())
    assert hub.downloaded().count("tokenizer.json") == 3, "for each name; the same file of two commits once"
    hub.repositories.clear()
    assert check(hub, tmp_path, resolved, HF_HUB_OFFLINE="1")[:2] == (0, resolved)


def test_weights_of_every_model_are_there_before_a_run_starts(every_model: Mirror, tmp_path: Path) -> None:
    """From pages of a file list and from another server, as on the hub. A configuration's checks then read them."""
    (tmp_path / "project.yaml").write_text(EVERYWHERE)
    done = python("-c", WITH_WEIGHTS, home=tmp_path / "home", endpoint=every_model.url, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = (every_model.repositories["models/acme/reward"][number].folder / "model.safetensors" for number in (0, 1))
    policy = every_model.repositories["models/acme/tiny"][0].folder / "model.safetensors"
    assert json.loads(done.stdout.splitlines()[-1]) == [etag(file) for file in (policy, first, second, policy)]
    assert every_model.storage.startswith("http://localhost:") and every_model.downloaded().count("model.safetensors") == 4
    (every_model.repositories["models/acme/reward"][1].folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    every_model.repositories["models/acme/reward"][1].commit = "4" * 40
    code, _, told = check(every_model, tmp_path, EVERYWHERE)
    assert code == 2 and "reward_models.liked.path" in told and "expected a reward model, ...ForSequenceClassification" in told


WITH_WEIGHTS = """
import hashlib, json
from pathlib import Path
from roll_lite.config.loading import load_config
config = load_config("project", Path(), weights=True)
roles = config.model, config.critic, config.reward_models["liked"], config.judges["strict"]
print(json.dumps([hashlib.sha256((role.path / "model.safetensors").read_bytes()).hexdigest() for role in roles]))
"""


def test_evaluation_of_names(every_model: Mirror, tmp_path: Path) -> None:
    """Two models and two sets, in the order that they are given; the preset's set is the one with two configurations."""
    sampling = "sampling: {max_prompt_tokens: 99, max_tokens: 9}"
    reward = f"domains={{gsm8k: {{data: {{prompt: question}}, reward: {{name: math}}, {sampling}}}, gsm8k_1: {{{sampling}}}}}"
    data = ("--data", "hf://openai/gsm8k?split=test", "--data", "gsm8k", "model.dtype=float32", reward)
    command = ["-m", "roll_lite.cli", "evaluate", "acme/tiny?revision=main", "hf://old-acme/tiny", *data, "--cfg", "job"]
    done = python(*command, home=tmp_path / "home", endpoint=every_model.url, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    runs = list(yaml.safe_load_all(done.stdout))
    assert [run["model"]["path"] for run in runs] == [PINNED[0], PINNED[3]]
    for run in runs:
        sets = {name: domain["data"]["validation"] for name, domain in run["domains"].items()}
        assert sets == {"gsm8k": PINNED[5], "gsm8k_1": PINNED[5].replace("gsm8k?", "gsm8k/main?")}
    assert not any("train" in file or "socratic" in file for file in every_model.downloaded())


RESOLVE = """
import json, sys
from roll_lite.config.schema.models import ModelConfig
from roll_lite.hub import online
with online(print):
    print(json.dumps([ModelConfig(path=name).model_dump(mode="json")["path"] for name in sys.argv[1:]]))
"""


def test_a_moved_branch_moves_only_what_names_it(hub: Mirror, tmp_path: Path) -> None:
    (first,) = hub.repositories["models/acme/tiny"]
    first.branches = ("v1",)
    hub.add("models/acme/tiny", first.folder, "c" * 40)
    names = ["hf://acme/tiny", "acme/tiny?revision=v1", f"hf://acme/tiny?revision={'a' * 40}"]
    done = python("-c", RESOLVE, *names, home=tmp_path, endpoint=hub.url, folder=tmp_path)
    paths = json.loads(done.stdout.splitlines()[-1])
    assert [path[-40:] for path in paths] == ["c" * 40, "a" * 40, "a" * 40]


def test_every_name_that_cannot_be_used_is_told_with_a_remedy(hub: Mirror, tmp_path: Path) -> None:
    data = hub.repositories["datasets/acme/problems"][0].folder
    hub.add("datasets/acme/gated", data, access="gated")
    hub.add("datasets/acme/private", data, access="private")
    old = tmp_path / "old"
    old.mkdir()
    (old / "pytorch_model.bin").write_bytes(b"")
    hub.add("models/acme/old", old)
    wrong = {
        "hf://acme/gated/main?split=train": f"the dataset acme/gated is gated: accept its terms at {hub.url}/datasets/acme/gated, and s",
        "hf://acme/private/main?split=train": "has no dataset acme/private, or it is private: check the spelling, or set HF_TOKEN",
        "hf://acme/problems/main?split=dev": "it has no split 'dev'; there are test, train",
        "hf://acme/problems": "it has several splits; there are test, train: add ?split=...",
        "hf://acme/problems/socratic?split=train": "it has no configuration or file 'socratic'; there are main",
        "hf://acme/problems?split=train&revision=v9": "the dataset acme/problems has no revision 'v9'; name a branch, a tag or a whole",
        "hf://acme/problems?part=train": "behind the name of a dataset may stand ?split=..., ?revision=... and a configuration",
        "hf://problems": "it is no name of the hub; write hf://owner/name",
        "hf:acme/problems": "no such file",
    }
    domains = "".join(
        f"\n  wrong_{number}: {{data: {{train: {json.dumps(name)}, prompt: question}}, reward: {{name: math}}}}"
        for number, name in enumerate(wrong)
    )
    judges = "\njudges: {old: {path: acme/old}, none: {path: acme/nothing}}\n"
    code, _, told = check(hub, tmp_path, PROJECT.rstrip() % "acme/tinny" + domains + judges)
    assert code == 2
    for number, (name, says) in enumerate(wrong.items()):
        (line,) = [line for line in told.splitlines() if f"domains.wrong_{number}.data.train = " in line]
        assert says in line and "[project.yaml:" in line, name
    folder = (
        f"no such folder: {tmp_path / 'acme/tinny'}. It looks like a name of the hub, but {hub.url} has no model acme/tinny, or it is p"
    )
    assert folder in told
    assert "judges.old.path" in told and "it holds no model*.safetensors, but pytorch_model.bin; convert it" in told
    assert "has no model acme/nothing" in told
    read = PROJECT.replace("problems/main", "private/main").replace("problems?", "gated?") % "acme/tiny"
    assert check(hub, tmp_path, read, HF_TOKEN=TOKEN)[0] == 0


@pytest.mark.parametrize(
    ("home", "variables", "says"),
    [
        (
            "home",
            {"HF_ENDPOINT": "http://127.0.0.1:9"},
            "is not in the cache {home}/hub, and http://127.0.0.1:9 cannot be reached (",
        ),
        ("home", {"HF_HUB_OFFLINE": "1"}, "is not in the cache {home}/hub, and HF_HUB_OFFLINE forbids to download it"),
        ("full", {}, "cannot be written: Not a directory; HF_HOME names the cache"),
    ],
)
def test_what_is_in_the_way(hub: Mirror, tmp_path: Path, home: str, variables: dict[str, str], says: str) -> None:
    (tmp_path / "full").write_text("no folder")
    done = python("-c", RESOLVE, "hf://acme/tiny", home=tmp_path / home, endpoint=hub.url, folder=tmp_path, **variables)
    assert says.format(home=tmp_path / home) in done.stderr
    assert "ValidationError" in done.stderr.splitlines()[-4], "no other error"


def test_a_folder_that_exists_wins_and_a_misspelt_one_is_not_asked_for(hub: Mirror, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples/models/tiny_chat", tmp_path / "acme/tiny")
    data = str(ROOT / "examples/data/add_train.jsonl")
    text = PROJECT.replace("hf://acme/problems/main?split=train", data).replace("hf://acme/problems?split=test", data)
    text = text.replace("prompt: question", "answer: answer")
    code, resolved, told = check(hub, tmp_path, text % "acme/tiny")
    assert code == 0 and yaml.safe_load(resolved)["model"]["path"] == str(tmp_path / "acme/tiny"), told
    code, _, told = check(hub, tmp_path, text % "acme/tinny")
    assert code == 2 and f"no such folder: {tmp_path / 'acme/tinny'}" in told and "hub" not in told
    assert hub.requests == []


def test_another_node_finds_a_model_in_its_own_cache(hub: Mirror, tmp_path: Path) -> None:
    """The driver's process sends a model and data; one with another cache receives them, and reads both."""
    send = f"""
import pickle, sys
from roll_lite.hub import online
from roll_lite.config.schema.domains import DataConfig
from roll_lite.config.schema.models import ModelConfig
with online(print):
    model = ModelConfig(path="hf://acme/tiny")
    data = DataConfig(train=["hf://acme/problems/main?split=train"])
assert model.path.is_relative_to({str(tmp_path / "driver")!r})
with open("sent", "wb") as file:
    pickle.dump((model, data), file)
"""
    receive = f"""
import pickle
from roll_lite.data.sources import read_rows
from roll_lite.models.model_files import stored_tensors
from roll_lite.pipeline.nodes import Reader
with open("sent", "rb") as file:
    model, data = pickle.load(file)
assert model.path.is_relative_to({str(tmp_path / "node")!r})
(model.path / "consolidated.safetensors").write_bytes(b"of another program, on this node only")
print(*sorted(Reader("model.path", model.path, ("actor_train",)).files()))
print(len(stored_tensors(model.path)), [row.content["question"] for row in read_rows(data.train[0])][0])
"""
    done = python("-c", send, home=tmp_path / "driver", endpoint=hub.url, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    hub.repositories["models/acme/tiny"][0].branches = ()  # has moved on meanwhile
    done = python("-c", receive, home=tmp_path / "node", endpoint=hub.url, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    compared, read = done.stdout.splitlines()
    assert compared == "chat_template.jinja config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json"
    assert read.split(maxsplit=1)[1] == "main/train-00000-of-00001.parquet 0 + 1?"
    assert "downloading acme/tiny (aaaaaaa) of the hub: 6 files" in done.stderr and "pytorch_model.bin" not in hub.downloaded()


def test_names_outlive_a_saved_configuration(tmp_path: Path) -> None:
    """Without asking the hub: text to path and back."""
    for text in (f"hf://a/b?revision={'c' * 40}", "hf://a/b?revision=refs/pr/1"):
        model = ModelConfig(path=Path(text))
        assert isinstance(model.path, HubPath) and model.model_dump(mode="json")["path"] == text
    for text in (
        f"hf://a/b/c?split=d&revision={'c' * 40}",
        f"hf://a/b?split=d&revision={'c' * 40}",
        f"hf://a/b/c/d.csv?revision={'c' * 40}",
    ):
        assert DataConfig(train=Path(text)).model_dump(mode="json")["train"] == text
        mixed = DataConfig(train={Path(text): 2.0, tmp_path: 1.0}).model_dump(mode="json")["train"]
        assert DataConfig(train=[Path(text)]).model_dump(mode="json")["train"] == [text]
        assert mixed == {text: 2.0, str(tmp_path): 1.0}
    assert DataConfig(train=tmp_path).model_dump(mode="json")["train"] == str(tmp_path)
    assert located(Path("a/b"), "dataset") is None, "data sets are named with hf://"


FIND = """
import sys
from pathlib import Path
from roll_lite.config.loading import load_config
from roll_lite.planning.architecture import find
for name in [None, *sys.argv[1:]]:
    try:
        found = find(load_config("project", Path.cwd(), files=False).model.path, "mine", name)
        print(found.name, found.hf.layers)
    except ValueError as error:
        print(error)
"""


def test_a_plan_of_any_name_downloads_config_json_alone(hub: Mirror, tmp_path: Path) -> None:
    data = ROOT / "examples/data/add_train.jsonl"
    text = re.sub(r"data: .*", f"data: {{train: {data}, validation: {data}, answer: answer}}", PROJECT)
    (tmp_path / "project.yaml").write_text(text % "acme/tiny")
    hub.add("models/acme/empty", tmp_path / "on_the_hub/data")
    names = ["acme/tiny", "acme/nothing", "acme/empty", "acme/tiny?revision=v9"]
    done = python("-c", FIND, *names, home=tmp_path / "home", endpoint=hub.url, folder=tmp_path)
    own, first, *others = done.stdout.splitlines()
    assert own == first == "acme/tiny 3" and hub.downloaded() == ["config.json"], done.stderr
    told = [
        f"{hub.url} has no model acme/nothing",
        "the model acme/empty has no file config.json",
        "the model acme/tiny has no revision 'v9'",
    ]
    for name, says, line in zip(names[1:], told, others, strict=True):
        assert line.startswith(f"--model {name}: no config.json there, and no known model of that name; {says}")

    for variables, says in (
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE forbids"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "cannot be reached"),
    ):
        done = python("-c", FIND, "acme/tiny", "acme/other", home=tmp_path / "home", endpoint=hub.url, folder=tmp_path, **variables)
        own, cached, absent = done.stdout.splitlines()
        assert own == cached == "acme/tiny 3" and says in absent


def test_the_shipped_configuration_of_one_gpu(hub: Mirror, tmp_path: Path) -> None:
    """With the model's real shape; a check reads no weights."""
    model = shutil.copytree(hub.repositories["models/acme/tiny"][0].folder, tmp_path / "qwen")
    shape = {
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
    }
    config = json.loads((model / "config.json").read_text()) | shape | {"layer_types": ["full_attention"] * 24}
    (model / "config.json").write_text(json.dumps(config))
    hub.add("models/Qwen/Qwen2.5-0.5B-Instruct", model)
    hub.add(
        "datasets/openai/gsm8k", problems(tmp_path / "gsm8k", "main/train-0.parquet", "main/test-0.parquet", "socratic/train-0.parquet")
    )
    command = ["-m", "roll_lite.cli", "check", "--config-name", "gsm8k_0.5b_grpo"]
    done = python(*command, home=tmp_path / "home", endpoint=hub.url, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    settings = yaml.safe_load(done.stdout)
    assert settings["domains"]["gsm8k"]["data"]["train"] == f"hf://openai/gsm8k/main?split=train&revision={'a' * 40}"
    assert list(settings["domains"]) == ["gsm8k"] and "socratic/train-0.parquet" not in hub.downloaded()


SHARDS = ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test-00000-of-00001.parquet"]


@pytest.mark.parametrize(
    ("files", "asked", "found"),
    [
        (["README.md", *SHARDS], "?split=train", SHARDS[:2]),
        (["main/train-0.parquet", "main/test-0.parquet", "socratic/train-0.parquet"], "main?split=test", ["main/test-0.parquet"]),
        (["problems.json", "dataset_infos.json"], "", ["problems.json"]),
        (["problems.json"], "?split=train", ["problems.json"]),
        (["train.jsonl", "train.parquet"], "?split=train", ["train.parquet"]),
        (["data/train_sft-0.parquet", "data/train_prefs-0.parquet"], "?split=train_sft", ["data/train_sft-0.parquet"]),
        (["data/train/0000.parquet", "data/test/0000.parquet"], "?split=test", ["data/test/0000.parquet"]),
        (["data/dev-0.parquet", "data/train-0.parquet"], "?split=validation", ["data/dev-0.parquet"]),
        (["test.jsonl", "test2.jsonl", "test3.jsonl"], "?split=test", ["test.jsonl", "test2.jsonl", "test3.jsonl"]),
        (["test.jsonl", "test2.jsonl"], "test2.jsonl", ["test2.jsonl"]),
        (["a/gpqa_diamond.csv", "a/gpqa_main.csv"], "a/*_main.csv", ["a/gpqa_main.csv"]),
        (["aime-I.jsonl", "aime-II.jsonl"], "", ["aime-I.jsonl", "aime-II.jsonl"]),
    ],
)
def test_the_files_of_a_split(files: list[str], asked: str, found: list[str]) -> None:
    assert chosen(files, asked) == found


@pytest.mark.parametrize(
    ("files", "asked", "says"),
    [
        (["data/train_sft-0.parquet", "data/train_prefs-0.parquet"], "?split=train", "no split 'train'; there are train_prefs, train_sft"),
        (["a/train.jsonl", "b/train.jsonl"], "?split=train", "several configurations, a, b: name one, hf://owner/name/CONFIGURATION"),
        (["README.md"], "?split=train", "it has no data files of a kind that is read here: .parquet, .jsonl, .csv, .json"),
    ],
)
def test_what_is_not_clear_is_refused(files: list[str], asked: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        chosen(files, asked)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(890)
def test_a_run_with_every_model_of_the_hub(every_model: Mirror, tmp_path: Path) -> None:
    """Policy, reference, critic, reward model and judge, each loaded by the process that computes with it."""
    hub = every_model
    (tmp_path / "project.yaml").write_text(EVERYWHERE)
    small = ["rollout.prompts_per_step=4", "rollout.samples_per_prompt=2", "validation.enabled=false", "checkpoint.every=1"]
    command = ["-m", "roll_lite.cli", "run", "--config-name", "project", *small]
    done = python(*command, home=tmp_path / "home", endpoint=hub.url, folder=tmp_path, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (tmp_path / "runs/tiny_ppo").iterdir()
    state = json.loads((run / "checkpoints/step_000001/state.json").read_text())
    assert pinned(yaml.safe_load((run / "config.yaml").read_text())) == pinned(state["config"]) == PINNED
    samples = [json.loads(line) for line in (run / "samples/step_000001.jsonl").read_text().splitlines()]
    assert len(samples) == 8 and all("reward_model" in sample["details"] for sample in samples), samples
    assert hub.downloaded().count("model.safetensors") == 4 and "pytorch_model.bin" not in hub.downloaded()


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(590)
def test_a_run_records_the_commits(hub: Mirror, tmp_path: Path) -> None:
    (tmp_path / "project.yaml").write_text(PROJECT % "acme/tiny")
    small = ["rollout.prompts_per_step=4", "rollout.samples_per_prompt=2", "validation.enabled=false", "checkpoint.every=1"]
    command = ["-m", "roll_lite.cli", "run", "--config-name", "project", *small]
    done = python(*command, home=tmp_path / "home", endpoint=hub.url, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (tmp_path / "runs/tiny").iterdir()
    pinned = f"hf://acme/tiny?revision={'a' * 40}"
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["path"] == pinned
    state = json.loads((run / "checkpoints/step_000001/state.json").read_text())
    assert state["config"]["model"]["path"] == pinned
    assert state["config"]["domains"]["word_problems"]["data"]["train"].endswith("b" * 40)
    assert (run / "model/model.safetensors").is_file() and (run / "model/tokenizer.json").is_file()
    assert "model.safetensors" in hub.downloaded() and "pytorch_model.bin" not in hub.downloaded()
    hub.repositories.clear()
    command = ["-m", "roll_lite.cli", "check", "--config-name", "project", *small, "steps=2", f"checkpoint.resume={run}"]
    done = python(*command, home=tmp_path / "home", endpoint=hub.url, folder=tmp_path, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "holds from the next step: steps: 1 -> 2" in done.stderr and "model.path" not in done.stderr, "the names have not changed"
