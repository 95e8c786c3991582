"""A dictionary of limited size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class BoundedDict(dict[Any, Any]):
    """Drops its oldest entry when a new one would exceed `most`, and then calls `forgotten`."""

    def __init__(self, most: int, forgotten: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._most, self._forgotten = most, forgotten

    def __setitem__(self, key: Any, value: Any) -> None:
        if key not in self and len(self) >= self._most:
            self.pop(next(iter(self)), None)
            if self._forgotten is not None:
                self._forgotten()
        super().__setitem__(key, value)
