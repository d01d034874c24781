"""A job's data, ready to train: its sequences, its validation sequences, and a report of what became of every line.

    files -> tokens (cached) -> overlong policy, per example -> held-out split -> weights -> numbered sequences

- An example left without a target is dropped and reported by line; a file of only such examples is an error.
- `val_set_size` holds out examples (whole ones, never pieces), chosen by the seed, before weights make copies.
- `weight` w of a data set: each of its examples is there floor(w) times in every epoch, and a part w - floor(w) of
  them, chosen by the seed, once more. 0.5 trains on a fixed half, 2 shows everything twice. Copies share their tokens
  and cost about 130 bytes each; weights that would make more than MAX_COPIES of them are refused before any is made.
- Data sets follow each other in the order given; mixing them is the sampler's work. `index` numbers the training
  sequences (copies and pieces have their own), and the validation sequences likewise.
- A preference pair is one example until it is numbered; then its halves follow each other, the chosen one (an even
  index) first. A job's data are all pairs or none, as its method wants.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from muxtune.data.cache import TokenCache
from muxtune.data.lengths import LengthProfile
from muxtune.data.overlong import Kept, Overlong, Pieces, default_overlong, keep
from muxtune.data.render import Renderer
from muxtune.data.report import DataReport, FileReport, Places
from muxtune.data.sampler import seeded_order
from muxtune.data.tokenize import Cancelled, ExampleRenderer, never, tokenize_file
from muxtune.data.tokenizer import TextTokenizer
from muxtune.data.tokens import TokenizedFile
from muxtune.data.types import Shape, TokenSequence, group_size
from muxtune.errors import ConfigError, DataError
from muxtune.spec.job import JobSpec

MAX_COPIES = 2**22  # sequences that the weights of a job add to those of its files: half a GB


@dataclass(frozen=True, slots=True)
class Source:
    """A file to read. `weight` is of training files."""

    path: str
    type: Shape | None = None
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Selection:
    """What to do with the tokens that were read. `overlong` None: as the shape of each file has it."""

    max_length: int
    overlong: Overlong | None = None
    val_set_size: float = 0  # examples, or a fraction below 1 of them
    seed: int = 42
    pairs: bool | None = None  # whether the data have to be preference pairs; None: either


@dataclass(frozen=True, slots=True, eq=False)
class TaskData:
    """`shape` is the first file's, `prompt_shape` says how its prompts are written; `system` is the system message that
    all training examples share, if they do."""

    train: tuple[TokenSequence, ...]
    validation: tuple[TokenSequence, ...]
    report: DataReport
    shape: Shape
    system: str | None = None
    prompt_shape: Shape = "messages"

    @property
    def groups(self) -> int:
        """Training examples as the method counts them: sequences, or pairs of them."""
        return len(self.train) // group_size(self.shape)


def build(
    job: JobSpec,
    renderer: ExampleRenderer,
    *,
    max_length: int,
    cache: TokenCache | None = None,
    cancelled: Cancelled = never,
) -> TaskData:
    """Reads all data of a job. `renderer` is `job_renderer`'s; `max_length` the job's, resolved against the model's.

    Raises DataError (DataFileError with every bad line of a file), ConfigError for a key that the data contradict,
    StateError where `cancelled` came true.
    """
    held_out = job.validation
    try:
        return assemble(
            [Source(data.path, data.type, data.weight) for data in job.datasets],
            Source(held_out.path, held_out.type) if held_out else None,
            renderer,
            Selection(max_length, job.overlong, job.val_set_size, job.seed, pairs=job.method == "dpo"),
            cache=cache,
            cancelled=cancelled,
        )
    except ConfigError as error:
        raise ConfigError(error.message, where=f"jobs.{job.name}.{error.where}", hint=error.hint) from None


def job_renderer(job: JobSpec, tokenizer: TextTokenizer, *, now: datetime) -> Renderer:
    """How the job's examples become tokens. `now` is the job's creation, whatever the clock says later.

    Jobs whose `train_on`, `chat_template` and `ignore_tools` agree may share one. The caller closes it.
    """
    return Renderer(
        tokenizer, template=job.chat_template, train_on=job.train_on, now=now, ignore_tools=job.ignore_tools
    )


def assemble(
    sources: Sequence[Source],
    held_out: Source | None,
    renderer: ExampleRenderer,
    selection: Selection,
    *,
    cache: TokenCache | None = None,
    cancelled: Cancelled = never,
) -> TaskData:
    """The data of a job, from its parts. Raises as `build` does."""
    if selection.max_length < 2:
        raise ConfigError(f"{selection.max_length} is below 2", where="max_length")

    def load(source: Source) -> tuple[Kept, TokenizedFile, FileReport]:
        tokens, cached = tokenize_file(source.path, source.type, renderer, cache, cancelled)
        if selection.pairs not in (None, tokens.shape == "preference"):
            raise _other_method(source.path, tokens.shape)
        policy = selection.overlong or default_overlong(tokens.shape)
        kept = keep(tokens.table, source.path, selection.max_length, policy, group=tokens.group)
        return kept, tokens, FileReport(source.path, tokens.shape, tokens.sha256, tokens.examples, cached)

    loaded = [load(source) for source in sources]
    train, validation = _hold_out([kept.examples for kept, _, _ in loaded], selection)
    split_off, left = len(validation), sum(map(len, train))
    _check_copies(train, sources)
    train = [_weigh(train[i], sources[i].weight, f"{selection.seed}/{i}") for i in range(len(sources))]
    if held_out is not None:
        loaded.append(load(held_out))
        validation = [*validation, *loaded[-1][0].examples]
    sequences = _number([example for examples in train for example in examples])
    if not sequences:
        raise _weighed_away(sources, selection)
    evaluated = _number(validation)
    systems = {tokens.system for _, tokens, _ in loaded[: len(sources)]}
    return TaskData(
        train=sequences,
        validation=evaluated,
        report=_report(
            [kept for kept, _, _ in loaded],
            [file for _, _, file in loaded],
            sequences,
            evaluated,
            selection,
            split_off,
            left,
        ),
        shape=loaded[0][1].shape,
        system=systems.pop() if len(systems) == 1 else None,
        prompt_shape=loaded[0][1].prompt_shape,
    )


def _other_method(path: str, shape: Shape) -> DataError:
    if shape == "preference":
        return DataError("the data are preference pairs, the method is sft", where=path, hint="method: dpo")
    return DataError(
        f"the data are not preference pairs but {shape}, the method is dpo",
        where=path,
        hint="dpo needs a prompt, a chosen and a rejected response a line; others train with method: sft",
    )


def _hold_out(files: list[list[Pieces]], selection: Selection) -> tuple[list[list[Pieces]], list[Pieces]]:
    """(what each file trains on, what is held out), both in the files' order."""
    total = sum(len(examples) for examples in files)
    wanted = selection.val_set_size
    count = int(wanted) if wanted >= 1 else math.ceil(total * wanted)
    if count >= total:
        raise ConfigError(
            f"{wanted} of {total} examples held out leaves none to train on",
            where="val_set_size",
            hint=f"at most {total - 1}" if total > 1 else "leave it out, or add examples",
        )
    chosen = set(seeded_order(total, f"muxtune/held-out/{selection.seed}")[:count].tolist())
    train: list[list[Pieces]] = []
    validation: list[Pieces] = []
    number = 0
    for examples in files:
        train.append([])
        for pieces in examples:
            (validation if number in chosen else train[-1]).append(pieces)
            number += 1
    return train, validation


def _check_copies(files: list[list[Pieces]], sources: Sequence[Source]) -> None:
    """Raises ConfigError where the weights add more sequences than may be held, naming the one that adds most."""
    added = [
        math.ceil(max(0, source.weight - 1) * sum(map(len, examples)))
        for source, examples in zip(sources, files, strict=True)
    ]
    if sum(added) > MAX_COPIES:
        most = max(range(len(added)), key=added.__getitem__)
        raise ConfigError(
            f"weight {sources[most].weight:g} makes {added[most]:,} copies of the {len(files[most]):,} examples of "
            f"{sources[most].path}; the weights of a job may add {MAX_COPIES:,} in all",
            where=f"datasets.{most}.weight",
            hint="lower the weight; max_steps or num_train_epochs is how long everything is seen",
        )


def _weighed_away(sources: Sequence[Source], selection: Selection) -> DataError:
    told = ", ".join(f"{source.weight:g}" for source in sources)
    return DataError(
        f"no example is left to train on: of what there is, weight {told} rounds to none",
        where=sources[0].path,
        hint="raise weight" + (", or hold out fewer with val_set_size" if selection.val_set_size else ""),
    )


def _weigh(examples: list[Pieces], weight: float, stream: str) -> list[Pieces]:
    whole, part = int(weight), weight - int(weight)
    once_more = seeded_order(len(examples), f"muxtune/weight/{stream}")[: round(part * len(examples))]
    return examples * whole + [examples[i] for i in sorted(once_more.tolist())]


def _number(examples: Sequence[Pieces]) -> tuple[TokenSequence, ...]:
    pieces = (piece for example in examples for piece in example)
    return tuple(TokenSequence(index, ids, mask) for index, (ids, mask) in enumerate(pieces))


def _report(
    kept: list[Kept],
    files: list[FileReport],
    train: tuple[TokenSequence, ...],
    validation: tuple[TokenSequence, ...],
    selection: Selection,
    split_off: int,
    left: int,
) -> DataReport:
    return DataReport(
        files=tuple(files),
        max_length=selection.max_length,
        train_sequences=len(train),
        trained_tokens=sum(sequence.trained_tokens for sequence in train),
        validation_sequences=len(validation),
        lengths=LengthProfile.of(map(len, train)),
        truncated=Places.of((one.path, one.truncated) for one in kept),
        split=Places.of((one.path, one.split) for one in kept),
        dropped_overlong=Places.of((one.path, one.dropped_overlong) for one in kept),
        dropped_untrained=Places.of((one.path, one.dropped_untrained) for one in kept),
        same_responses=Places.of((one.path, one.same_responses) for one in kept),
        val_set_size=selection.val_set_size,
        split_off=split_off,
        left=left,
    )
