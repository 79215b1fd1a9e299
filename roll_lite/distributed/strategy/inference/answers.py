"""What an engine's worker raises comes back as a value, and is raised in the hosting process once all workers have answered.

vLLM's executor of several workers raises at the first one that does. The others' answers stay in their queues, where the next call takes
them for its own. SGLang's RPC tells of nothing but the first worker's success, or the text of its error.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from roll_lite.distributed.weight_sync.group import StaleEpoch, TransferError

_VALUE, _RAISED, _BROKE_OFF, _STALE = "value", "raised", "broke off", "stale"


def answering(method: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """A worker's method, as `values` wants it."""

    @wraps(method)
    def answer(*args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            return {_VALUE: method(*args, **kwargs)}
        except TransferError as error:
            return {_STALE if isinstance(error, StaleEpoch) else _BROKE_OFF: str(error)}
        except Exception as error:  # an edge of the process: `values` raises it on the other side
            return {_RAISED: f"{type(error).__name__}: {error}\n\n{traceback.format_exc()}"}

    return answer


def values(answers: Sequence[dict[str, Any]]) -> list[Any]:
    """Of all workers, or the error that may be the cause of the others'."""
    for what, kind in ((_RAISED, RuntimeError), (_BROKE_OFF, TransferError), (_STALE, StaleEpoch)):
        if told := [answer[what] for answer in answers if what in answer]:
            raise kind("; ".join(told))
    return [answer[_VALUE] for answer in answers]
