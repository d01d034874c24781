"""The errors a user can meet, in one tree.

    MuxTuneError
      ConfigError        the YAML, a flag or a value in it
      DataError          a data file, a chat template or a tokenizer
      ModelError         a base model that cannot be found, loaded or supported
      AdapterError       an adapter folder, or an adapter that does not fit the backbone
      CheckpointError    a checkpoint that is damaged, of another run, or cannot be written
      TaskError          one task failed while it trained (the others go on)
      StateError         a call that the task's or the run's present state does not allow
      RankError          a rank of a group has died or does not answer: the run ends on all of them

Each says what was wrong, where, and what to do. Errors of this tree are the user's to mend, and the command line
prints them without a traceback; anything else that escapes is a fault of this program.
"""

from __future__ import annotations


class MuxTuneError(Exception):
    """Base of every error that a user can meet.

    Args:
        message: what was wrong, in one sentence.
        where: the file and line, key, or id it was found at.
        hint: what to do about it.
    """

    code = "error"

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        text = f"{self.where}: {self.message}" if self.where else self.message
        return f"{text} ({self.hint})" if self.hint else text

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.where, self.hint))


class ConfigError(MuxTuneError, ValueError):
    code = "invalid_config"


class DataError(MuxTuneError, ValueError):
    code = "invalid_data"


class ModelError(MuxTuneError, ValueError):
    code = "invalid_model"


class AdapterError(MuxTuneError, ValueError):
    code = "invalid_adapter"


class CheckpointError(MuxTuneError):
    code = "invalid_checkpoint"


class TaskError(MuxTuneError):
    code = "task_failed"


class StateError(MuxTuneError):
    code = "invalid_state"


class RankError(MuxTuneError):
    """`rank`: the one that has failed, where it is known which."""

    code = "rank_failed"
    again = "start the run again with --resume: it goes on from its newest checkpoints"  # for hints

    def __init__(
        self, message: str, *, where: str | None = None, hint: str | None = None, rank: int | None = None
    ) -> None:
        super().__init__(message, where=where if rank is None else f"rank {rank}", hint=hint)
        self.rank = rank


def _rebuild(kind: type[MuxTuneError], message: str, where: str | None, hint: str | None) -> MuxTuneError:
    """Pickling support: errors cross process borders (the template sandbox) with all their parts."""
    return kind(message, where=where, hint=hint)
