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
UNDO_PIN_ACTION = "undo_pin"
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
    control, pin = _control(scheduler), _read_pin(body)
    answer = {"rank": data_parallel_rank(), "earlier": control.pin_of(pin.selector)}
    try:
        return {**answer, "places": control.pin(pin)}
    except ControlError as error:
        return {**answer, "places": 0, "refused": str(error)}


def _undo_pin(scheduler: Any, body: dict[str, Any]) -> None:
    rank = str(data_parallel_rank())
    if rank in body["earlier"]:
        earlier = body["earlier"][rank]
        _control(scheduler).undo_pin(
            Selector(**body["selector"]), None if earlier is None else _read_pin(earlier)
        )


def _read_pin(body: dict[str, Any]) -> Pin:
    return Pin(Selector(**body["selector"]), body["tier"], body["expires_s"])


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
    UNDO_PIN_ACTION: _undo_pin,
    EXPIRE_ACTION: _expire,
    PINS_ACTION: _pins,
}
