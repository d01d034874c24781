"""The jobs that wait for memory while others train, and how they take the places of those that have ended.

    a step boundary -> tasks that have ended are detached: adapter, moments, data order, all of it
                    -> those that fit now are attached, in the order of `muxtune.engine.room`
                    -> a pass may bring together as many rows as the new set of tasks leaves room for

Nobody else notices: the others' next round comes after the milliseconds that attaching takes, and a task's bits do not
depend on when it starts or beside whom (its chunk budget follows from the job, the model and the stated limit). What an
ended task came to is in its folder and its events.

A job that cannot start after all - what it starts from has changed since it was checked, memory that is not there -
fails alone, as a task does, and leaves its place to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from muxtune.engine.admission import JobSize
from muxtune.engine.begin import Failure
from muxtune.engine.failure import raised_text
from muxtune.engine.local import LocalEngine
from muxtune.engine.room import Room, starting
from muxtune.engine.shortage import waits
from muxtune.engine.starting import Ready, opening, queued, start_as_checked
from muxtune.errors import MuxTuneError, RankError
from muxtune.spec.event import RunEvent, TaskEvent

Fail = Callable[[list[Failure]], Iterator[TaskEvent]]


class Waves:
    """A `Runner`'s queue. Args:
    running: the sizes of the tasks that are attached.
    waiting: in the order in which they stand in line; each fits alone.
    fail: notes jobs that cannot start, and tells it.
    """

    def __init__(
        self, engine: LocalEngine, room: Room, running: Iterable[JobSize], waiting: Sequence[Ready], fail: Fail
    ) -> None:
        self._engine = engine
        self._room = room
        self._sizes = {size.job.name: size for size in running}
        self._waiting = list(waiting)
        self._fail = fail
        self._changed = True  # since places were last given away

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def announce(self) -> Iterator[TaskEvent]:
        """What each that waits is waiting for, as it stands now."""
        running = list(self._sizes.values())
        for place, one in enumerate(self._waiting):
            size = one.job.size
            message = waits(size, running, [before.job.size for before in self._waiting[:place]], self._room)
            yield queued(one, message, waiting=True)

    def start(self) -> Iterator[RunEvent]:
        """Let go of the tasks that have ended, and start those that fit now; the events that any task opens with."""
        if self._waiting:
            self._release()
        if not self._waiting or not self._changed:
            return
        self._changed = False
        for one in self._next():
            self._waiting = [other for other in self._waiting if other is not one]
            failed = self._attach(one)
            if failed is None:
                yield from opening(one, recompute=self._room.model.recompute)
            else:
                self._changed = True  # its place is free
                yield from failed
        running = self._running()
        self._engine.fuse_up_to(self._room.fuse_tokens(running), self._room.keep_tokens(running))

    def _release(self) -> None:
        ended = [name for name, task in self._engine.tasks.items() if task.status.final]
        for name in ended:
            self._engine.detach(name)
        if ended:
            self._engine.trim()
        gone = self._sizes.keys() - self._engine.tasks.keys()
        for name in gone:
            del self._sizes[name]
        self._changed = self._changed or bool(gone)

    def _running(self) -> list[JobSize]:
        """With the steps that they have left now."""
        tasks = self._engine.tasks
        return [replace(size, rounds=tasks[name].total_steps - tasks[name].step) for name, size in self._sizes.items()]

    def _next(self) -> list[Ready]:
        by_size = {id(one.job.size): one for one in self._waiting}
        taken = starting(self._running(), [one.job.size for one in self._waiting], self._room.fits)
        return [by_size[id(size)] for size in taken]

    def _attach(self, one: Ready) -> list[TaskEvent] | None:
        """None where it starts, or the event of its failure."""
        try:
            start_as_checked(self._engine, one)
        except RankError:
            raise
        except MuxTuneError as error:
            return list(self._fail([Failure(one.job.plan.job, error, one.step)]))
        except Exception as error:
            why = raised_text(error)
            data = {"code": "exception", "traceback": why.traceback}
            return [TaskEvent("failed", one.name, one.step, why.message, data)]
        self._sizes[one.name] = one.job.size
        return None
