"""A whole run whose machine is lost: the same command goes on elsewhere from the store."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from roll_lite.files import remote_folder
from roll_lite.pipeline.checkpoint_files import check_sums, finished_checkpoints, read_list, record
from tests.chaos.test_engine_restarts import wait_until
from tests.chaos.test_training_ranks import SETTINGS, restarts
from tests.integration.test_runs import Run, until_gone, worker

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of an empty store."""
    if request.param == "file":
        yield f"file://{tmp_path}/store"
        return
    for package in ("moto", "s3fs", "boto3"):
        pytest.importorskip(package)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    server = subprocess.Popen([sys.executable, "-m", "moto.server", "-p", address.rpartition(":")[2]], stderr=subprocess.DEVNULL)
    secrets = {"AWS_ACCESS_KEY_ID": "name", "AWS_SECRET_ACCESS_KEY": "word", "AWS_DEFAULT_REGION": "us-east-1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**secrets, "FSSPEC_S3_ENDPOINT_URL": address}.items():
            patch.setenv(name, value)
        patch.setitem(fsspec.config.conf, "s3", {"endpoint_url": address})  # this process read its environment earlier
        try:
            _make_bucket(address)
            yield "s3://bucket/prefix"
        finally:
            server.kill()
            server.wait()


def _make_bucket(address: str) -> None:
    import boto3

    for _ in range(100):
        try:
            boto3.client("s3", endpoint_url=address).create_bucket(Bucket="bucket")
            return
        except Exception:  # it has not started yet
            time.sleep(0.5)
    raise AssertionError("the server does not answer")


@pytest.mark.nightly
@pytest.mark.parametrize("store", ["file", "s3"], indirect=True)
def test_a_run_goes_on_in_an_empty_folder_like_one_that_was_never_interrupted(tmp_path: Path, store: str, undisturbed: Any) -> None:
    quiet = undisturbed("tiny_grpo", *SETTINGS, "actor_train.devices=2", "steps=7")
    settings = ["tiny_grpo", *SETTINGS, "actor_train.devices=2", "steps=7", f"checkpoint.store={store}", "checkpoint.resume=auto"]
    with Run(tmp_path / "lost", *settings) as run:
        run.wait_for_step(5)
        name, processes = run.folder.name, run.tree()
        run.process.kill()
        assert until_gone(processes, 60) == []
    shutil.rmtree(tmp_path / "lost")
    with Run(tmp_path / "new", *settings) as run:
        run.wait_for_step(5)
        assert run.folder.name == name
        worker(run.tree(), "ActorWorker").kill()
        wait_until(run, lambda: restarts(run) == 1)
        code, output = run.finish(400)
    assert code == 0 and "resumed after step 3 from " + store in output, output
    audit = subprocess.run([sys.executable, "examples/audit.py", run.folder], cwd=ROOT, capture_output=True, text=True, check=False)
    assert audit.returncode == 0 and "goes on from step 3 in another folder" in audit.stdout, audit.stdout
    assert (run.folder / "model/model.safetensors").read_bytes() == (quiet.folder / "model/model.safetensors").read_bytes()
    kept = ("step", "reward/score", "actor/grad_norm", "actor/loss")
    ours, theirs = ([[line.get(one) for one in kept] for line in each.metrics() if line["step"] > 3] for each in (run, quiet))
    assert ours == theirs
    home = remote_folder(store) / run.folder.parent.name / name
    newest = finished_checkpoints(home)[-1]
    assert [folder.name for folder in finished_checkpoints(home)] == ["step_000006", "step_000007"]
    wanted = read_list(newest)
    assert wanted is not None
    check_sums(newest, wanted, [(one, record(newest / one)) for one in wanted])
