"""Hugging Face hub names as model folders and data files. While the driver loads a configuration (in `online`), they become paths in this
node's cache (`HubPath`)."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path, PosixPath, PurePosixPath
from threading import Event, Thread
from typing import Any, Literal, NamedTuple
from urllib.parse import parse_qsl, quote, unquote

from roll_lite.files import absolute_path, first_line, kind_of, read_object

Kind = Literal["model", "dataset"]
Tell = Callable[[str], object]

SCHEME = "hf:/"
"""Start of a hub name as a Path, which drops a slash of hf://."""
MODEL_FILES = (".json", ".txt", ".model", ".jinja")
WEIGHTS = "model*.safetensors"
DATA_FILES = (".parquet", ".jsonl", ".csv", ".json")
"""Suffixes of data files, preferred first. Only files with the most preferred suffix present are read."""
NO_DATA = ("dataset_infos.json", "dataset_dict.json", "state.json")
PROGRESS_S = 10.0
SPLITS = {
    "train": "train training",
    "validation": "validation valid val dev",
    "test": "test testing eval evaluation",
    "held-out": "heldout holdout",
}
"""{split: words for it in file names}."""
_SPLIT_OF = {word: split for split, words in SPLITS.items() for word in words.split()}
_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:/([^?]+))?(?:\?(.*))?")
_BARE = re.compile(r"\w[\w.-]*/\w[\w.-]*(\?revision=.+)?")
_CACHED = re.compile(r"(model|dataset)s--([\w.-]+)--([\w.-]+)/snapshots/([^/?]+)(?:/(.+))?$")
_tell: ContextVar[Tell | None] = ContextVar("_tell", default=None)


class HubPath(PosixPath):
    """Path in this node's hub cache: a model's folder, or `[configuration]?split=...` of a data set. Pickled as name and commit: other
    nodes have their own caches."""

    def __reduce__(self) -> tuple[Any, ...]:
        address = _address(self)
        return (_arrived, address) if address else (PosixPath, self.parts)


def _address(path: Path) -> tuple[_Repository, str, str] | None:
    """(repository, commit, what follows it), or None."""
    found = _CACHED.search(str(path)) if isinstance(path, HubPath) else None
    return found and (_Repository("model" if found[1] == "model" else "dataset", f"{found[2]}/{found[3]}"), found[4], found[5] or "")


def _arrived(repository: _Repository, commit: str, rest: str) -> HubPath:
    path = repository.path(commit, rest)
    if repository.kind == "model" and not repository.snapshot(commit).is_dir():  # a node that joined the run
        fetch(path)
    return path


@contextmanager
def online(tell: Tell) -> Iterator[None]:
    """Let `located` resolve names in the block, and download models (without weights) and data. `tell`: receives progress messages."""
    token = _tell.set(tell)
    try:
        yield
    finally:
        _tell.reset(token)


def located(path: Path, kind: Kind) -> HubPath | None:
    """Return a hub name's path in the cache; None for a local path. A model may be `owner/name` without hf://, unless that path or a folder
    `owner` is here."""
    text = str(path)
    if text.startswith(SCHEME):
        return _located(text.removeprefix(SCHEME).lstrip("/"), kind)
    if kind != "model" or _BARE.fullmatch(text) is None or kind_of(absolute_path(path)) is not None or kind_of(path.parent) == "folder":
        return None
    try:
        return _located(text, kind)
    except ValueError as error:
        raise ValueError(f"no such folder: {absolute_path(path)}. It looks like a name of the hub, but {error}") from error


def _located(text: str, kind: Kind) -> HubPath:
    found = _NAME.fullmatch(text)
    if found is None:
        raise ValueError("it is no name of the hub; write hf://owner/name")
    name, part, query = found.groups(default="")
    settings = dict(parse_qsl(query, keep_blank_values=True))
    revision, split = settings.pop("revision", ""), settings.pop("split", "")
    if settings or (kind == "model" and (part or split)):
        known = "?split=..., ?revision=... and a configuration or file" if kind == "dataset" else "?revision=..."
        raise ValueError(f"behind the name of a {kind} may stand {known}; write hf://{name}")
    rest = f"{part}?split={split}" if split else part
    tell, repository = _tell.get(), _Repository(kind, name)
    commit = quote(revision or "main", safe="") if tell is None else _pinned(repository, revision, rest, tell)
    return repository.path(commit, rest)


@cache
def _pinned(repository: _Repository, revision: str, rest: str, tell: Tell) -> str:
    """Return a revision's commit, after downloading what configuration checks need: all but model weights."""
    commit = repository.commit(revision)
    repository.download(commit, rest, tell, weights=False)
    return commit


def to_stderr(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def fetch(path: Path, tell: Tell = to_stderr) -> list[Path]:
    """Download the missing files of a hub model, with weights, or of a data set's split. Return all files; [] for other paths."""
    if (address := _address(path)) is None:
        return []
    repository, commit, rest = address
    return repository.download(commit, rest, tell)


def config_folder(path: HubPath) -> Path:
    """Download a hub model's config.json alone; return its folder."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    address = _address(path)
    assert address is not None, path
    repository, revision, _ = address
    commit = repository.commit(unquote(revision))
    disable_progress_bars()
    with repository._explained(commit):
        return Path(hf_hub_download(repository.name, "config.json", revision=commit)).parent


def config_notation(path: Path) -> str:
    """Return the path as configurations name it: hf:// with name and commit if in the hub cache, else unchanged."""
    if (address := _address(path)) is None:
        return str(path)
    repository, commit, rest = address
    part, _, split = rest.partition("?")
    settings = "&".join(one for one in (split, f"revision={unquote(commit)}") if one)
    return f"hf://{repository.name}{f'/{part}' if part else ''}?{settings}"


def lacks_weights(folder: Path) -> bool:
    """True for a hub model without some of its weights."""
    if not isinstance(folder, HubPath):
        return False
    index = folder / "model.safetensors.index.json"
    names = read_object(index).get("weight_map", {}).values() if index.is_file() else ["model.safetensors"]
    return not all((folder / name).is_file() for name in set(names))


# ---------------------------------------------------------------- downloads


class _Repository(NamedTuple):
    kind: Kind
    name: str

    def snapshot(self, commit: str) -> Path:
        from huggingface_hub.constants import HF_HUB_CACHE

        return Path(HF_HUB_CACHE).absolute() / f"{self.kind}s--{self.name.replace('/', '--')}" / "snapshots" / commit

    def path(self, commit: str, rest: str) -> HubPath:
        return HubPath(self.snapshot(commit) / rest)

    def commit(self, revision: str) -> str:
        from huggingface_hub import HfApi

        with self._explained(revision):
            return HfApi().resolve_revision(self.name, repo_type=self.kind, revision=revision or None).resolved

    def download(self, commit: str, rest: str, tell: Tell, weights: bool = True) -> list[Path]:
        """Download missing files of a model, or of the data that `rest` selects (see `chosen`). Return all files."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils.tqdm import disable_progress_bars

        with self._explained(commit):
            sizes = self._sizes(commit)
        if self.kind == "dataset":
            names = chosen(list(sizes), rest)
        elif any(fnmatchcase(name, WEIGHTS) for name in sizes):
            names = [name for name in sizes if "/" not in name and is_of_model(name, weights)]
        else:
            others = ", ".join(sorted(name for name in sizes if name.endswith((".bin", ".gguf", ".safetensors")))[:3])
            raise ValueError(f"it holds no {WEIGHTS}{f', but {others}' if others else ''}; convert it with save_pretrained of transformers")
        files = [self.snapshot(commit) / name for name in names]
        missing = [name for name, file in zip(names, files, strict=True) if not file.is_file()]
        if not missing:
            return files
        total = sum(sizes[name] for name in missing) / 1e6
        count = "1 file" if len(missing) == 1 else f"{len(missing)} files"
        tell(f"downloading {self.name} ({commit[:7]}) of the hub: {count}, {total:,.1f} MB, to {self.snapshot(commit)}")
        disable_progress_bars()  # lines are legible in logs, too
        with self._explained(commit), _progress(self.snapshot(commit).parents[1] / "blobs", total, tell):
            snapshot_download(self.name, repo_type=self.kind, revision=commit, allow_patterns=names)
        return files

    def _sizes(self, commit: str) -> dict[str, int]:
        from huggingface_hub import HfApi, get_cached_repo_tree
        from huggingface_hub.errors import CachedRepoTreeNotFoundError
        from huggingface_hub.hf_api import RepoFile

        try:
            files: Any = get_cached_repo_tree(self.name, repo_type=self.kind, revision=commit)
        except CachedRepoTreeNotFoundError:
            files = HfApi().list_repo_tree(self.name, repo_type=self.kind, revision=commit, recursive=True)
        return {file.path: file.size for file in files if isinstance(file, RepoFile)}

    @contextmanager
    def _explained(self, revision: str) -> Iterator[None]:
        from huggingface_hub import constants, errors

        what, there = f"the {self.kind} {self.name}", constants.ENDPOINT
        absent = f"is not in the cache {constants.HF_HUB_CACHE}"
        try:
            yield
        except errors.GatedRepoError as error:
            page = f"{there}/{'datasets/' if self.kind == 'dataset' else ''}{self.name}"
            raise ValueError(f"{what} is gated: accept its terms at {page}, and set HF_TOKEN to a token of that account") from error
        except errors.RepositoryNotFoundError as error:
            raise ValueError(
                f"{there} has no {self.kind} {self.name}, or it is private: check the spelling, or set HF_TOKEN to a token that may read it"
            ) from error
        except errors.RevisionNotFoundError as error:
            raise ValueError(f"{what} has no revision {revision!r}; name a branch, a tag or a whole commit hash") from error
        except errors.RemoteEntryNotFoundError as error:
            raise ValueError(f"{what} has no file {str(error.response.url).rpartition('/')[2]}") from error
        except Exception as error:  # of the client, of the network, of the disk
            if isinstance(error, OSError) and error.filename is not None:
                raise ValueError(f"{error.filename} cannot be written: {error.strerror}; HF_HOME names the cache") from error
            if constants.HF_HUB_OFFLINE:
                raise ValueError(f"{what} {absent}, and HF_HUB_OFFLINE forbids to download it") from error
            reason = first_line(error.__cause__ or error)
            remedy = "check the network, HF_ENDPOINT and proxies, or copy the cache of a machine that has it"
            raise ValueError(f"{what} {absent}, and {there} cannot be reached ({reason}): {remedy}") from error


@contextmanager
def _progress(blobs: Path, total: float, tell: Tell) -> Iterator[None]:
    def size() -> float:
        with suppress(OSError):  # a file may be renamed meanwhile
            return sum(file.stat().st_size for file in blobs.iterdir()) / 1e6
        return 0.0

    def watch() -> None:
        while not done.wait(PROGRESS_S):
            tell(f"  {max(size() - before, 0.0):,.0f} of {total:,.0f} MB")

    before, done = size(), Event()
    thread = Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


# ---------------------------------------------------------------- choice of files


def is_of_model(name: str, weights: bool = True) -> bool:
    """True if roll_lite reads this file of a model."""
    return name.endswith(MODEL_FILES) or (weights and fnmatchcase(name, WEIGHTS))


def split_of(name: str) -> str:
    """Return the data splits named in a file name, joined by "+"."""
    words = re.findall(r"[a-z]+", re.sub(r"held[-_. ]out|hold[-_. ]out", "heldout", name.lower()))
    return "+".join(sorted({_SPLIT_OF[word] for word in words if word in _SPLIT_OF}))


def chosen(names: Sequence[str], rest: str) -> list[str]:
    """Data files that `rest` selects (`[configuration or file]?split=...`). Folders are configurations, except `data` and split names.
    ValueError lists the choices if it selects none or is ambiguous."""
    wanted, _, query = rest.partition("?")
    files = [file for file in map(PurePosixPath, sorted(names)) if file.suffix in DATA_FILES and file.name not in NO_DATA]
    if wanted and (exact := [str(file) for file in files if fnmatchcase(str(file), wanted)]):
        return exact
    if not files:
        raise ValueError(f"it has no data files of a kind that is read here: {', '.join(DATA_FILES)}")
    configurations: dict[str, list[PurePosixPath]] = {}
    for file in files:
        folders = [one for one in file.parts[:-1] if one != "data" and one not in _SPLIT_OF]
        configurations.setdefault("/".join(folders) or "default", []).append(file)
    found = configurations.get(wanted or "default") or ([] if wanted else configurations.get("main", []))
    if not wanted and len(configurations) == 1:
        found = files
    if not found:
        listed = ", ".join(configurations)
        if wanted:
            raise ValueError(f"it has no configuration or file {wanted!r}; there are {listed}")
        raise ValueError(f"it has several configurations, {listed}: name one, hf://owner/name/CONFIGURATION")
    found = next(same for suffix in DATA_FILES if (same := [file for file in found if file.suffix == suffix]))
    splits: dict[str, list[str]] = {}
    for file in found:
        stem = re.sub(r"[-_.]?\d+(-of-\d+(-[0-9a-f]{16})?)?$", "", file.stem)
        own = stem if split_of(stem) else split_of(str(file)) or "train"  # as on the hub: a file without a split is for training
        splits.setdefault(own, []).append(str(file))
    split = query.removeprefix("split=")
    matching = [own for own in splits if split in (own, "") or (split_of(split) == split_of(own) != "" and split not in splits)]
    if len(matching) != 1:
        raise ValueError(f"it has {f'no split {split!r}' if split else 'several splits'}; there are {', '.join(splits)}: add ?split=...")
    return splits[matching[0]]
