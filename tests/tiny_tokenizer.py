"""A real byte-level BPE tokenizer of 320 tokens with a ChatML template, trained here on a few sentences.

Ids 0, 1 and 2 are `<|endoftext|>` (padding), `<|im_start|>` and `<|im_end|>` (end of turn, EOS), as in SmolLM2.
"""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB = 320
END_OF_TEXT, START_OF_TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
END_OF_TEXT_ID, START_OF_TURN_ID, END_OF_TURN_ID = 0, 1, 2

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_CORPUS = (
    "system user assistant",
    "The quick brown fox jumps over the lazy dog while the other dogs are sleeping in the sun.",
    "How many users have an age above 30? SELECT COUNT(*) FROM users WHERE age > 30;",
    "What is the sentiment of this review, positive or negative? The film was a charming surprise.",
    "Answer yes or no. Does it follow that the number of people who live in the city is greater?",
)


@cache
def _backend_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[END_OF_TEXT, START_OF_TURN, END_OF_TURN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    text: str = tokenizer.to_str()
    return text


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A fresh tokenizer; it adds no token of its own, and `save_pretrained` writes tokenizer and template files."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_backend_json()),
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        bos_token=END_OF_TEXT,
        chat_template=CHATML,
        model_max_length=256,
    )
