"""The policy that KL is measured against."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from roll_lite.data.keys import Columns
from roll_lite.workers.model import ModelWorker


class ReferenceWorker(ModelWorker):
    computes: ClassVar[Mapping[str, str]] = {"ref_log_probs": "log_probs", "ref_distribution": "distribution"}
    forward_columns = Columns(reads=("input_ids", "response_mask", "temperature"), if_there=("kept_ids",))
