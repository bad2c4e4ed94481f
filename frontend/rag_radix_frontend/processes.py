"""What a process has for itself: threads, and locks that they hold.

A process that was forked has none of its parent's threads: work that one of them had begun never
ends there, and a lock that it held is never released. So these things begin anew in it.
"""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod


class PerProcess(ABC):
    """An object that begins anew in every process that is forked."""

    def __init__(self) -> None:
        self._begin()
        _objects.add(self)

    @abstractmethod
    def _begin(self) -> None:
        """Set what belongs to one process, as it is when nothing has happened in it."""


_objects: weakref.WeakSet[PerProcess] = weakref.WeakSet()


def _begin_all() -> None:
    for each in list(_objects):
        each._begin()


os.register_at_fork(after_in_child=_begin_all)
