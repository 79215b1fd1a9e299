from __future__ import annotations

from pathlib import Path

import pytest

from roll_lite.pipeline import nodes as module
from roll_lite.pipeline.node_facts import installed
from roll_lite.pipeline.nodes import Reader, View


def test_a_node_with_other_files_or_versions_takes_no_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    reader = Reader("model.path", tmp_path, ("actor_infer",))
    drivers = View(None, {reader: reader.files()})
    monkeypatch.setattr(module.ray.util, "get_node_ip_address", lambda: "10.0.0.2")
    module.require_same(drivers, installed(), "10.0.0.1", "actor_infer")
    with pytest.raises(ValueError, match=r"versions of vllm differ: 0\.1 on 10\.0\.0\.1, .* on 10\.0\.0\.2"):
        module.require_same(drivers, installed() | {"vllm": "0.1"}, "10.0.0.1", "actor_infer")
    (tmp_path / "config.json").write_text('{"rope_theta": 1}')
    with pytest.raises(ValueError, match=r"model\.path: .* on node 10\.0\.0\.2, where actor_infer loads it, is not what it is on"):
        module.require_same(drivers, installed(), "10.0.0.1", "actor_infer")
