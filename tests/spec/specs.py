"""Hypothesis strategies of valid specs."""

from __future__ import annotations

from hypothesis import strategies as st

from muxtune.spec import Dataset, JobSpec, Lora, Validation

_positive = st.floats(1e-8, 1e3, allow_subnormal=False)
_count = st.integers(1, 10**6)
_fraction_or_count = st.floats(0, 0.99, allow_subnormal=False) | st.integers(0, 1000)
_names = st.from_regex(r"[a-z0-9][A-Za-z0-9._-]{0,20}[a-z0-9]", fullmatch=True).filter(
    lambda name: (
        name.split(".")[0].lower() not in ("con", "prn", "aux", "nul") and name[:3].lower() not in ("com", "lpt")
    )
)
_paths = st.text(st.characters(categories=("L", "N", "P", "S", "Zs")), min_size=1, max_size=20).filter(str.strip)
_modules = st.from_regex(r"[a-z_]{1,8}(\.[a-z0-9_]{1,8}){0,2}", fullmatch=True)
_types = st.none() | st.sampled_from(["messages", "prompt_completion", "alpaca", "sharegpt", "text"])


def loras() -> st.SearchStrategy[Lora]:
    targets = st.just("all-linear") | st.lists(_modules, min_size=1, max_size=4, unique=True).map(tuple)
    return st.builds(
        Lora,
        r=st.integers(1, 512),
        lora_alpha=_positive,
        lora_dropout=st.floats(0, 0.9, allow_subnormal=False),
        target_modules=targets,
    )


@st.composite
def jobs(draw: st.DrawFn) -> JobSpec:
    schedule = draw(st.sampled_from(["linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt"]))
    held_out = draw(st.sampled_from(["file", "split", "nothing"]))
    return JobSpec(
        name=draw(_names),
        peft=draw(loras()),
        datasets=tuple(draw(st.lists(st.builds(Dataset, path=_paths, type=_types, weight=_positive), min_size=1))),
        validation=draw(st.builds(Validation, path=_paths, type=_types)) if held_out == "file" else None,
        val_set_size=draw(_fraction_or_count) if held_out == "split" else 0,
        train_on=draw(st.none() | st.sampled_from(["assistant", "last_assistant", "completion", "all"])),
        overlong=draw(st.none() | st.sampled_from(["truncate", "drop", "fail", "split"])),
        chat_template=draw(st.none() | st.just("chatml")),
        max_length=draw(st.none() | st.integers(2, 10**6)),
        shuffle=draw(st.booleans()),
        learning_rate=draw(_positive),
        lr_scheduler_type=schedule,
        warmup_steps=0 if schedule == "constant" else draw(_fraction_or_count),
        weight_decay=draw(st.floats(0, 1, allow_subnormal=False)),
        num_train_epochs=draw(_positive),
        max_steps=draw(st.none() | _count),
        per_device_train_batch_size=draw(_count),
        seed=draw(st.integers(0, 2**63 - 1)),
        save_steps=draw(st.none() | _count),
        sample_prompts=tuple(draw(st.lists(st.text(st.characters(exclude_categories=("Cs",))), max_size=3))),
    )
