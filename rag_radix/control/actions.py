"""What a scheduler does with operators' calls; their bodies were checked by `routes`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rag_radix.control.control import Control
from rag_radix.control.documents import LOOK_ACTION, ROWS_ACTION, Page, look, rows
from rag_radix.control.metrics import data_parallel_rank
from rag_radix.control.pins import Pin
from rag_radix.control.selector import Selector
from rag_radix.control.tree_view import View, tree_view
from rag_radix.errors import ControlError

TREE_ACTION = "tree"
INVALIDATE_ACTION = "invalidate"
PIN_ACTION = "pin"
UNPIN_ACTION = "unpin"
EXPIRE_ACTION = "expire_pins"
PINS_ACTION = "pins"


def _control(scheduler: Any) -> Control:
    control: Control = scheduler.tree_cache.control
    return control


def _look(scheduler: Any, body: dict[str, Any]) -> dict[str, Any]:
    found = look(scheduler.tree_cache, Page(**body["page"]), body["first"])
    return {"rank": data_parallel_rank(), **found}


def _rows(scheduler: Any, names: dict[str, list[list[str]]]) -> dict[str, Any]:
    rank = data_parallel_rank()
    return {"rank": rank, "rows": rows(scheduler.tree_cache, names[str(rank)])}


def _tree(scheduler: Any, view: dict[str, Any]) -> dict[str, Any]:
    return tree_view(scheduler.tree_cache, View(**view))


def _invalidate(scheduler: Any, selector: dict[str, Any]) -> dict[str, Any]:
    return _control(scheduler).invalidate(Selector(**selector)).as_json()


def _pin(scheduler: Any, body: dict[str, Any]) -> dict[str, Any]:
    pin = Pin(Selector(**body["selector"]), body["tier"], body["expires_s"])
    try:
        return {"places": _control(scheduler).pin(pin)}
    except ControlError as error:
        return {"places": 0, "refused": str(error)}


def _unpin(scheduler: Any, selector: dict[str, Any]) -> int:
    return _control(scheduler).unpin(Selector(**selector))


def _expire(scheduler: Any, now_s: float) -> int:
    return _control(scheduler).expire_pins(now_s)


def _pins(scheduler: Any, _body: None) -> dict[str, Any]:
    control = _control(scheduler)
    return {"pins": control.pins(), "tiers": control.pinned()}


ACTIONS: dict[str, Callable[[Any, Any], Any]] = {
    LOOK_ACTION: _look,
    ROWS_ACTION: _rows,
    TREE_ACTION: _tree,
    INVALIDATE_ACTION: _invalidate,
    PIN_ACTION: _pin,
    UNPIN_ACTION: _unpin,
    EXPIRE_ACTION: _expire,
    PINS_ACTION: _pins,
}
