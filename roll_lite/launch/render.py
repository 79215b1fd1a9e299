"""Render files that start a run on a cluster: scripts for Slurm and for Ray on bare machines, a RayJob of KubeRay."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from roll_lite.config.arithmetic import device_numbers, roles
from roll_lite.config.problems import hidden
from roll_lite.config.schema.base import Mistakes
from roll_lite.config.schema.run import RunConfig
from roll_lite.files import EXAMPLES, read_text

TEMPLATES = {"slurm": "slurm.sh.jinja", "ray": "ray.sh.jinja", "k8s": "k8s.yaml.jinja"}
SHARED = Path("/shared")
"""Mount point of the shared volume in pods."""
CLOSING_S = 60
"""Seconds between SIGTERM and the job's end, beyond `checkpoint.on_sigterm_s`."""
LONGEST_NAME = 47


@dataclass(frozen=True)
class Launch:
    target: str
    name: str
    folder: Path | None
    overrides: Sequence[str]
    image: str | None = None
    claim: str = "shared"

    def mistakes(self, config: RunConfig, file: Path | None) -> Mistakes:
        """Yield settings that would fail in the rendered file: secrets, another cluster's address; for Kubernetes also a missing image,
        unreachable paths."""
        for word in self.overrides:
            if hidden(word) != word and "${" not in word:
                yield hidden(word), "would stand in the file; write ${oc.env:NAME}, and set that variable on the nodes"
        if config.ray.address not in (None, "auto"):
            yield "ray.address", "names another cluster than the file starts; leave it out"
        if self.target != "k8s":
            return
        if self.image is None:
            yield "--image", "has to be given: the image of the pods, with roll_lite in it (roll-lite docs gpu)"
        if SHARED not in config.run_dir.parents and config.checkpoint.store is None:
            yield "run_dir", f"would be lost with its pod; name a folder in {SHARED}, where pods have the shared volume"
        if file is not None and not file.is_relative_to(EXAMPLES) and not Path(self.folder or "", self.name).is_absolute():
            yield "--config-name", "is read in the pods; give its absolute path there, on the shared volume or in the image"

    def render(self, config: RunConfig) -> str:
        import jinja2

        placement, checkpoint = config.placement, config.checkpoint
        count = 1 + max(number for role in roles(config).values() for number in device_numbers(role.devices))
        resume = ["checkpoint.resume=auto"] if checkpoint.every and checkpoint.resume is None else []
        start = shlex.join(["--config-name", self.name, *(["--config-path", str(self.folder)] if self.folder else [])])
        values = {
            "name": re.sub("[^a-z0-9]+", "-", f"rl-{config.experiment.lower()}")[:LONGEST_NAME].strip("-"),
            "nodes": placement.nodes or ceil(count / placement.devices_per_node),
            "devices": placement.devices_per_node if placement.nodes else min(count, placement.devices_per_node),
            "lines": [start, *map(shlex.quote, [*self.overrides, *resume])],
            "continues": bool(resume) or (checkpoint.every > 0 and checkpoint.resume == "auto"),
            "notice": ceil(checkpoint.on_sigterm_s) + CLOSING_S,
            "image": self.image,
            "claim": self.claim,
            "shared": SHARED,
        }
        text = read_text(Path(__file__).with_name(TEMPLATES[self.target]))
        environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
        return environment.from_string(text).render(values)
