"""The receiving end of each transport, by the name that an endpoint gives."""

from __future__ import annotations

from collections.abc import Callable

from roll_lite.distributed.strategy.base import TransferEndpoint
from roll_lite.distributed.weight_sync.gloo import GlooReceiver
from roll_lite.distributed.weight_sync.transport import WeightReceiver

RECEIVERS: dict[str, Callable[[TransferEndpoint, int], WeightReceiver]] = {"gloo": GlooReceiver}
"""Called with the endpoint and the worker's number in its engine."""
