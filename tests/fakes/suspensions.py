"""Cancels a piece of work at its k-th suspension, the tasks that it starts included.

A task can be cancelled wherever it waits, in three ways that code may take differently: while it
sleeps; when what it waited for has come but it has not run yet, so that what came may be lost; and
a second time while it cleans up.
"""

# Python 3.11 has no typing.override to mark the coroutine's methods with.
# mypy: disable-error-code="explicit-override"

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, TypeVar, cast

T = TypeVar("T")
Moment = Literal["asleep", "waking", "twice"]

_WATCHED: ContextVar[Suspensions | None] = ContextVar("watched", default=None)


class Suspensions:
    """One run of a piece of work: `run` it in a task of its own, within `child_tasks_watched`.

    Attributes:
        seen: suspensions so far.
        is_reached: the chosen suspension has come; the work is or will be cancelled.
        has_struck: the work has been cancelled.
        children: the tasks that the work has started.
    """

    def __init__(self, at: int, moment: Moment) -> None:
        self.seen = 0
        self.is_reached = False
        self.has_struck = False
        self.children: list[asyncio.Task[Any]] = []
        self._at = at
        self._moment = moment
        self._task: asyncio.Task[Any] | None = None

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do the work, and cancel this task at the chosen suspension."""
        self._task = asyncio.current_task()
        token = _WATCHED.set(self)
        try:
            result: T = await _Watched(work, self)
            return result
        finally:
            self._task = None
            _WATCHED.reset(token)

    def suspended(self, waits_for: object) -> None:
        """One of the work's tasks is about to wait."""
        position = self.seen - self._at
        self.seen += 1
        if position != 0 and not (position == 1 and self._moment == "twice"):
            return
        self.is_reached = True
        if self._moment != "waking":
            self._strike()
        elif isinstance(waits_for, asyncio.Future):
            # Runs before the task is woken, since the task adds its own callback later.
            waits_for.add_done_callback(lambda _: self._strike())
        else:
            asyncio.get_running_loop().call_soon(self._strike)

    def _strike(self) -> None:
        if self._task is not None:
            self.has_struck = True
            self._task.cancel()


class _Watched(Coroutine[Any, Any, T]):
    """A coroutine that reports each suspension of the one inside."""

    def __init__(self, inner: Coroutine[Any, Any, T], watcher: Suspensions) -> None:
        self._inner = inner
        self._watcher = watcher

    def send(self, value: Any) -> Any:
        return self._reported(self._inner.send(value))

    def throw(self, *error: Any) -> Any:
        return self._reported(self._inner.throw(*error))

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, T]:
        return cast("Generator[Any, Any, T]", self)  # whoever awaits it calls send and throw

    def __iter__(self) -> _Watched[T]:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def _reported(self, waits_for: object) -> object:
        self._watcher.suspended(waits_for)
        return waits_for


@contextmanager
def child_tasks_watched() -> Iterator[None]:
    """Let the running loop watch the tasks that a watched piece of work starts."""
    loop = asyncio.get_running_loop()

    def make(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        watcher = _WATCHED.get()
        if watcher is None:
            return asyncio.Task(coroutine, loop=loop, **options)
        task: asyncio.Task[Any] = asyncio.Task(_Watched(coroutine, watcher), loop=loop, **options)
        watcher.children.append(task)
        return task

    loop.set_task_factory(make)
    try:
        yield
    finally:
        loop.set_task_factory(None)
