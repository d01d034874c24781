"""Whatever a config says, the answer is a run or a ConfigError with its place."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muxtune.errors import ConfigError
from muxtune.spec import JobSpec, RunSpec
from muxtune.spec.aliases import JOB_ALIASES, PEFT_ALIASES
from tests.spec.configs import load

pytestmark = pytest.mark.usefixtures("folder")

_words = st.sampled_from(
    [
        "",
        "lora",
        "dora",
        "null",
        "true",
        "no",
        "1e-3",
        "0",
        "-1",
        "1e999",
        "nan",
        "all",
        "x.jsonl",
        "a/b",
        "con",
        "~",
        "[",
    ]
)
_scalars = _words | st.integers(-2, 10**20) | st.floats() | st.booleans() | st.none()
_keys = st.sampled_from(
    [
        *(*JobSpec.model_fields, *RunSpec.model_fields, "matrix", "defaults"),
        *(alias.name for alias in JOB_ALIASES + PEFT_ALIASES),
        *("r", "type", "path", "grid", "random", "exclude", "samples", "log_uniform", "choice", "peft.r,seed", "bogus"),
    ]
)
_values = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_keys, inner, max_size=3), max_leaves=8
)
_jobs = st.lists(
    st.dictionaries(_keys, _values, max_size=5).map(lambda d: {"name": "a", "datasets": "d", **d}), max_size=2
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(st.dictionaries(_keys, _values, max_size=5), _jobs | _values, st.lists(st.tuples(_keys, _words), max_size=2))
def test_a_run_or_a_placed_error(top: dict[str, object], jobs: object, sets: list[tuple[str, str]]) -> None:
    document = {"base_model": "m", "output_dir": "o", **top, **({"jobs": jobs} if jobs else {"datasets": "d"})}
    try:
        load(json.dumps(document), *(f"{key}={value}" for key, value in sets))
    except ConfigError as error:
        assert error.where
