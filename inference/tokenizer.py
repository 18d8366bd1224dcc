"""Text to token ids and back: ChatML rendering, and the tiny byte-level BPE of the starting policy.

Contents of messages are data: a special token written out in one becomes ordinary text, so an observation cannot end
its own message. Only the agent's sampled tokens are ever special, and they are never decoded and encoded again.
"""

import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from schemas.errors import SettingsError
from schemas.trajectory import encodable

END_OF_TEXT, START, END, CALL, END_CALL = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<call>", "</call>"
SPECIAL_TOKENS = (END_OF_TEXT, START, END, CALL, END_CALL)

MAX_VOCABULARY = 512

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class ChatTokenizer:
    """A tokenizer that renders chats as ChatML."""

    def __init__(self, text: str):
        """`text` is the content of a `tokenizer.json`.

        Raises:
            SettingsError: it is malformed, or has no ChatML tokens.
        """
        try:
            self._trusted, self._data = Tokenizer.from_str(text), Tokenizer.from_str(text)
        except Exception as error:  # the library has no other type of its own
            raise SettingsError(f"the policy's tokenizer.json cannot be read: {error}") from error
        self._data.encode_special_tokens = True
        for token in (START, END):
            if self._trusted.token_to_id(token) is None:
                raise SettingsError(f"the policy's tokenizer has no {token}; expected one that knows ChatML")
        self.end_id = int(self._trusted.token_to_id(END) or 0)
        self._header = lru_cache(maxsize=16)(lambda role: self.encode(f"{START}{role}\n"))
        self._footer = self.encode(f"{END}\n")

    @classmethod
    def load(cls, folder: Path) -> "ChatTokenizer":
        """The tokenizer of a Hugging Face folder.

        Raises:
            SettingsError: no `tokenizer.json` there.
        """
        path = folder / "tokenizer.json"
        if not path.exists():
            raise SettingsError(f"no tokenizer at {path}; expected a Hugging Face folder")
        return cls(path.read_text(errors="replace"))

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end an action."""
        return (self.end_id,)

    def encode(self, text: str) -> list[int]:
        """Token ids of trusted `text`: special tokens in it count as such."""
        return self._trusted.encode(encodable(text), add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, special tokens written out."""
        return self._trusted.decode(list(token_ids), skip_special_tokens=False)

    def prompt(self, messages: Iterable[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation, up to where the assistant is to speak."""
        ids = [i for m in messages for i in self._message(m)]
        return ids + self._header("assistant")

    def observation(self, messages: Iterable[dict[str, Any]]) -> list[int]:
        """Token ids that follow an action which ended with the stop token, up to the assistant's next turn."""
        return self._footer[1:] + self.prompt(messages)

    def _message(self, message: dict[str, Any]) -> list[int]:
        content = self._data.encode(encodable(message["content"]), add_special_tokens=False).ids
        return self._header(message["role"]) + content + self._footer


def make_tokenizer(corpus: Iterable[str]) -> Tokenizer:
    """A byte-level BPE with ChatML and tool tokens, its merges from `corpus`; each digit and operator is one token."""
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[0-9]|[-+*]|\n"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json` and a `tokenizer_config.json` that `transformers` reads."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
