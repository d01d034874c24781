"""The jobs of a config with transformers + peft, one after the other, as one would write it without muxtune.

    python examples/with_peft.py MODEL_FOLDER CONFIG STEPS

Trains STEPS optimizer steps of each job: padded batches, loss on the answers, AdamW, clipping, the job's schedule. The
first batch of all is run once before anything is timed. The last line of its output is JSON: tokens (padding not
counted) and seconds of all steps, and the memory of this process, which never held more than one task.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch
from peft import IA3Config, LNTuningConfig, LoraConfig, PeftConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, get_scheduler
from transformers.utils import logging

from muxtune.spec import IA3, Job, LnTuning, Lora, load_run

Example = tuple[list[int], list[int]]  # token ids, labels
IGNORED = -100


def main(model_folder: str, config: str, steps: str) -> None:
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    tokens, seconds, warm = 0, 0.0, False
    for job in load_run(config).run.jobs:
        batches = read_batches(job, tokenizer, int(steps))
        model = get_peft_model(base, peft_config(job.peft))
        if not warm:
            model(**pad(batches[0])).loss.backward()
            model.zero_grad()
            warm = True
        started = time.perf_counter()
        train(model, batches, job)
        seconds += time.perf_counter() - started
        tokens += sum(len(ids) for batch in batches for ids, _ in batch)
        usage = psutil.Process().memory_full_info()
        base = model.unload()
    print(json.dumps({"tokens": tokens, "seconds": seconds, "memory_bytes": getattr(usage, "pss", usage.rss)}))


def read_batches(job: Job, tokenizer: PreTrainedTokenizerBase, steps: int) -> list[list[Example]]:
    size = job.effective_batch
    lines = Path(job.datasets[0].path).read_text(encoding="utf-8").splitlines()[: steps * size]
    examples = [encode(tokenizer, json.loads(line)["messages"]) for line in lines]
    return [examples[start : start + size] for start in range(0, len(examples), size)]


def encode(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]]) -> Example:
    """Labels on the answer and its end-of-turn token."""
    prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    prompt_ids = tokenizer(prompt, add_special_tokens=False).input_ids
    answer_ids = tokenizer(messages[-1]["content"] + tokenizer.eos_token, add_special_tokens=False).input_ids
    return prompt_ids + answer_ids, [IGNORED] * len(prompt_ids) + answer_ids


def peft_config(peft: Lora | IA3 | LnTuning) -> PeftConfig:
    """The same adapter in peft's words; peft knows by itself which modules IA3 and norm tuning take of a Llama."""
    if isinstance(peft, IA3):
        return IA3Config(task_type="CAUSAL_LM")
    if isinstance(peft, LnTuning):
        return LNTuningConfig(task_type="CAUSAL_LM")
    targets = peft.target_modules if isinstance(peft.target_modules, str) else list(peft.target_modules)
    return LoraConfig(
        task_type="CAUSAL_LM", r=peft.r, lora_alpha=peft.lora_alpha, target_modules=targets, use_dora=peft.use_dora
    )


def train(model: PeftModel, batches: Sequence[Sequence[Example]], job: Job) -> None:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=job.learning_rate, weight_decay=job.weight_decay)
    schedule = get_scheduler(job.lr_scheduler_type, optimizer, int(job.warmup_steps), job.max_steps)
    model.train()
    for batch in batches:
        model(**pad(batch)).loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, job.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def pad(batch: Sequence[Example]) -> dict[str, torch.Tensor]:
    width = max(len(ids) for ids, _ in batch)
    rows = [(ids, labels, width - len(ids)) for ids, labels in batch]
    return {
        "input_ids": torch.tensor([ids + [0] * missing for ids, _, missing in rows]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * missing for ids, _, missing in rows]),
        "labels": torch.tensor([labels + [IGNORED] * missing for _, labels, missing in rows]),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
