"""What a user may do about a task whose numbers are no longer finite.

The boundary: words from the code of the failure, the step before it and the rate of it; nothing is looked at.
"""

from __future__ import annotations


def advice(code: str, step: int, lr: float) -> str | None:
    """Of a failure after `step` steps, in the step whose learning rate is `lr`; None where nothing general helps."""
    if not code.startswith("non_finite_"):
        return None
    if step == 0:
        return (
            "nothing had been learnt yet, so look at what it begins with: its data (muxtune data preview), its "
            "adapter_path, the dtype"
        )
    return (
        f"lower its learning_rate (it was {lr:.2g} here) or warm up longer (warmup_steps), under a new name: "
        "a job that is resumed does the same again"
    )
