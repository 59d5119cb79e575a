"""The demo model's tokenizer: a byte-level BPE fitted on the corpus, with a ChatML template.

Every byte is in the vocabulary, so any text encodes. Digits stand alone, which keeps counting and
small sums regular, and a newline never merges, so a message encodes the same in any dialogue.
"""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

VOCABULARY_SIZE = 2048
CONTEXT_TOKENS = 2048
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# A newline, a clitic, a word, a digit, marks before a digit, other marks, other white space.
_PIECES = (
    r"\n|'(?:s|t|re|ve|m|ll|d)| ?\p{L}+|\p{N}|[^\s\p{L}\p{N}]+ (?=\p{N})| ?[^\s\p{L}\p{N}]+|\s"
)


def fit(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer whose merges come from `texts`."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files that `AutoTokenizer` reads."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START, END],
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(folder)
