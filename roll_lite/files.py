"""Read and write files, use folders in object stores, change environment variables for a block.

Reading raises ValueErrors that name the file. Only plain files are opened: pipes and devices might never end.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
import uuid
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic_core import to_json

EXAMPLES = (Path(__file__).parent / "examples").resolve()
"""Shipped configurations, tiny model, toy data and rewards. In a checkout, a link to examples/."""
CONFIGS = EXAMPLES / "configs"
STARTERS = EXAMPLES / "starters"
"""Folders from which `roll-lite init` copies."""
DOCS = Path(__file__).parent / "docs"
"""Pages of the documentation. In a checkout, a link to docs/."""

LARGEST = 1 << 30
"""Maximum bytes of a file read as a whole."""
_SHOWN = 80


@dataclass(frozen=True)
class FileRecord:
    bytes: int
    sha256: str


def record(path: Path) -> FileRecord:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileRecord(file.tell(), digest.hexdigest())


def flush(paths: Iterable[Path]) -> None:
    """Wait until files and folder entries are on disk."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno != errno.EINVAL:  # this file system does not flush
                raise
        finally:
            os.close(handle)


@contextmanager
def replacing(path: Path, has_other_writers: bool = True) -> Iterator[Path]:
    """Replace a file atomically: the block writes the draft whose path is yielded. If it fails, the draft is removed: recording the run's
    end may need its space on a full disk. `has_other_writers`: each process has its own draft; otherwise one left by a killed process is
    overwritten."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.partial" if has_other_writers else f"{path.name}.partial")
    try:
        yield draft
        draft.replace(path)
    except BaseException:
        with suppress(OSError):  # the block's error counts
            draft.unlink()
        raise


def write_whole(path: Path, text: str) -> None:
    """Replace a text file atomically."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


@contextmanager
def changed_environment(values: Mapping[str, str], without: Sequence[str] = ()) -> Iterator[None]:
    """Set environment variables, and unset those in `without`, for the block."""
    before = {name: os.environ.get(name) for name in (*values, *without)}
    for name in without:
        os.environ.pop(name, None)
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file atomically. NaN and infinity, which JSON lacks, become null."""
    write_whole(path, to_json(value, indent=2, inf_nan_mode="null").decode() + "\n")


def absolute_path(path: Path) -> Path:
    """Make a path absolute from the current folder. A missing path in examples/ is looked up in the package."""
    path = path.expanduser()
    here = path.absolute()
    if path.parts[:1] == (EXAMPLES.name,):
        shipped = EXAMPLES.joinpath(*path.parts[1:])
        with suppress(OSError, ValueError):
            return shipped if shipped.exists() and not here.exists() else here
    return here


def kind_of(path: Path) -> Literal["file", "folder", "other"] | None:
    """Return the path's kind; None if it does not exist. ValueError for circular links, overlong names, folders without permission."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        if not is_local(path):
            raise
        raise unreadable(path, error) from error
    return "folder" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "other"


def is_file(path: Path) -> bool:
    return kind_of(path) == "file"


def is_folder(path: Path) -> bool:
    return kind_of(path) == "folder"


def listing(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise unreadable(folder, error) from error


def read_bytes(file: Path) -> bytes:
    found = kind_of(file)
    if found != "file":
        raise ValueError(f"{file} is {'not there' if found is None else 'a folder' if found == 'folder' else 'no plain file'}")
    try:
        if file.stat().st_size > LARGEST:
            raise ValueError(f"{file} has more than {LARGEST:,} bytes")
        return file.read_bytes()
    except OSError as error:
        raise unreadable(file, error) from error


def read_text(file: Path) -> str:
    content = read_bytes(file)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} cannot be read: not valid UTF-8 at byte {error.start + 1}") from error


def read_json(file: Path) -> Any:
    text = read_text(file)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read: it is not valid JSON ({error})") from error


def read_object(file: Path) -> dict[str, Any]:
    found = read_json(file)
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds no JSON object")
    return found


def unreadable(path: Path, error: Exception) -> ValueError:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    shown = ascii(str(path))[1:-1]
    return ValueError(f"{shown if len(shown) <= _SHOWN else shown[:_SHOWN] + '...'} cannot be read: {reason}")


def free_bytes(folder: Path) -> int:
    """Return the free bytes of a folder's disk, or of its nearest existing parent's."""
    return shutil.disk_usage(next(place for place in (folder, *folder.parents) if place.is_dir())).free


def elsewhere(path: Path) -> str:
    """Return a hint that relative paths count from the current folder; it names a parent folder with the missing path, if any."""
    current = Path.cwd()
    if not path.is_relative_to(current):
        return ""
    relative = path.relative_to(current)
    for parent in current.parents:
        if kind_of(parent / relative) is not None:
            return f" (relative paths count from the current folder; there is {parent / relative}: start from {parent})"
    return " (relative paths count from the current folder)"


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def listed(names: Sequence[object]) -> str:
    """List up to five names, and the number of others."""
    return ", ".join(map(str, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


# ---------------------------------------------------------------- object stores


class StoreUnreachable(RuntimeError):
    pass


def remote_folder(url: str) -> Path:
    """Return a folder of an fsspec file system, with Path's methods. ValueError for an unknown protocol."""
    from upath import UPath  # takes half a second

    folder: Any = UPath(url, use_listings_cache=False)  # other processes write there as well
    return folder


def is_local(folder: Path) -> bool:
    return isinstance(folder, Path)


@contextmanager
def reaching(folder: Path) -> Iterator[None]:
    """Turn errors in the block into StoreUnreachable if the folder is in an object store, except ValueError."""
    try:
        yield
    except (ValueError, StoreUnreachable):
        raise
    except Exception as error:  # of any library
        if is_local(folder):
            raise
        remedy = "check URL, credentials and network"
        if isinstance(error, ImportError):
            remedy = "install that package on every node; for s3: pip install 'roll_lite[s3]'"
        raise StoreUnreachable(f"{folder} cannot be used ({type(error).__name__}: {first_line(error)}): {remedy}") from error


def try_store(url: str) -> str | None:
    """Write and remove a file in a store. Return the error message, if any."""
    folder = remote_folder(url)
    probe = folder / f".probe-{uuid.uuid4().hex}"
    try:
        with reaching(folder):
            _make_folder(folder)
            probe.write_bytes(b"probe")
            probe.unlink()
    except (ValueError, StoreUnreachable) as error:
        return str(error)
    return None


def upload(source: Path, target: Any) -> None:
    _make_folder(target.parent)
    target.fs.put_file(str(source), target.path)


def download(source: Any, target: Path) -> None:
    """Download a file. An existing file is replaced after a complete download."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.{uuid.uuid4().hex}")
    source.fs.get_file(source.path, str(part))
    part.replace(target)


def remove_tree(folder: Any) -> None:
    if is_local(folder):
        shutil.rmtree(folder)
    elif is_folder(folder):
        folder.fs.rm(folder.path, recursive=True)


def keep_only(folder: Path, names: Container[str]) -> None:
    for other in folder.glob("*/"):
        if other.name not in names:
            shutil.rmtree(other, ignore_errors=True)


def _make_folder(folder: Path) -> None:
    """Make a folder, but not in an object store, where a misspelt name would create a bucket."""
    from upath.implementations.cloud import CloudPath

    if not isinstance(folder, CloudPath):
        folder.mkdir(parents=True, exist_ok=True)
