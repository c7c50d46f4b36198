"""Names for builders: a decorator registers a function, a lookup that fails says what there is."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """A name -> builder table whose error for an unknown name lists the nearest known ones."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorate a builder so that `name` finds it; a name is taken once."""

        def decorate(entry: T) -> T:
            if name in self._entries:
                raise ValueError(f"the {self.what} name {name!r} is taken already")
            self._entries[name] = entry
            return entry

        return decorate

    def __getitem__(self, name: str) -> T:
        """The entry of that name.

        Raises:
            ValueError: for an unknown name, with the nearest names and all of them.
        """
        if name in self._entries:
            return self._entries[name]
        near = difflib.get_close_matches(str(name), self._entries, n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else "."
        raise ValueError(f"unknown {self.what} {name!r}{hint} Known: {', '.join(sorted(self._entries))}")

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)
