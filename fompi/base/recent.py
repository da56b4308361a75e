"""Recent: a dictionary of limited size that forgets what was not used for longest."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any


class Recent(OrderedDict[Any, Any]):
    """`recent.get(key)` counts as use. At most `most` entries are kept."""

    def __init__(self, most: int):
        super().__init__()
        self.most = most

    def get(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            return default
        self.move_to_end(key)
        return self[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        if len(self) > self.most:
            self.popitem(last=False)
