"""Text to token ids and back, chat prompts included, from what the model file itself says.

Byte-level byte-pair encoding: text becomes UTF-8 bytes, each byte one character of a printable
alphabet (GPT-2's), and merges join neighbours. Decoding is therefore a table of byte strings, and
tokens that arrive in pieces can be shown as soon as their bytes complete a character.
"""

import codecs
import functools
import hashlib
from collections.abc import Mapping, Sequence

import jinja2
from gguf import TokenType
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from dscout_jax.weights.gguf import Vocabulary

_ROLES = ("system", "user", "assistant")


class Tokenizer:
    """A tokenizer and its chat template; makes no choice that the vocabulary does not state.

    Attributes:
        vocab_size: V.
        stop_ids: ids that end an answer; they belong to it.
        special_ids: ids of control tokens; text that spells one out encodes to it.
        template_sha256: hex digest of the chat template, or of the empty text where there is none.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Builds the tokenizer.

        Raises:
            ValueError: a tokenizer family, pre-tokenizer or prefix rule that is not implemented, or
                no end-of-turn token.
        """
        if vocabulary.model != "gpt2" or vocabulary.pre not in _PRE_TOKENIZERS:
            raise ValueError(
                f"tokenizer {vocabulary.model!r} with pre-tokenizer {vocabulary.pre!r} is not "
                f"supported; allowed: 'gpt2' with one of {tuple(_PRE_TOKENIZERS)}"
            )
        if vocabulary.add_bos or vocabulary.add_space_prefix:
            raise ValueError(
                f"add_bos={vocabulary.add_bos}, add_space_prefix={vocabulary.add_space_prefix} are "
                "not supported; both must be False"
            )
        if vocabulary.eos_id is None:
            raise ValueError("the vocabulary names no eos_id; without it no answer would stop")
        self.vocab_size = len(vocabulary.tokens)
        self.stop_ids = (vocabulary.eos_id,)
        self.special_ids = frozenset(
            i for i, kind in enumerate(vocabulary.token_types) if kind == TokenType.CONTROL
        )
        self._template = vocabulary.chat_template
        self.template_sha256 = hashlib.sha256((self._template or "").encode()).hexdigest()
        self._fast = _build_fast_tokenizer(vocabulary, self.special_ids)
        self._pieces = _byte_pieces(vocabulary.tokens, self.special_ids)
        single = {piece for piece in self._pieces if len(piece) == 1}
        self._unknown_bytes = bytes(i for i in range(256) if bytes([i]) not in single)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`, with nothing added; spelled-out control tokens count as such.

        Raises:
            ValueError: a character whose bytes the vocabulary lacks (some control characters and
                unassigned planes); it would vanish from the prompt.
        """
        data = text.encode()
        if len(data.translate(None, self._unknown_bytes)) != len(data):
            bad = next(c for c in text if set(c.encode()) & set(self._unknown_bytes))
            raise ValueError(
                f"the vocabulary cannot express {bad!r} (position {text.index(bad)}); remove it"
            )
        return self._fast.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Returns the text of `ids`; incomplete UTF-8 becomes U+FFFD.

        Args:
            ids: token ids in [0, V).
            skip_special: whether control tokens are left out.

        Raises:
            ValueError: an id outside [0, V).
        """
        stream = StreamDecoder(self, skip_special=skip_special)
        return stream.push(ids) + stream.flush()

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Returns the ids that ask for the assistant's next turn.

        Args:
            messages: dicts with `role` (system, user or assistant) and `content`, oldest first.

        Raises:
            ValueError: no messages, an empty content, an unknown role, or no chat template.
        """
        return self.encode(self.chat_text(messages))

    def chat_text(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Returns the text that `chat_prompt` encodes; same arguments and errors."""
        if not messages:
            raise ValueError("no messages were given; at least one user message is needed")
        for i, message in enumerate(messages):
            if message.keys() != {"role", "content"} or message["role"] not in _ROLES:
                raise ValueError(
                    f"message {i} is {dict(message)!r}; it needs role (one of {_ROLES}) and content"
                )
            content = message["content"]
            if not isinstance(content, str) or not (content.strip() or message["role"] == "system"):
                raise ValueError(f"message {i} has content {content!r}; it must be non-empty text")
        if self._template is None:
            raise ValueError(
                "the model file has no chat template; encode the prompt's text instead"
            )
        try:
            return _compile_template(self._template).render(
                messages=[dict(message) for message in messages], add_generation_prompt=True
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refused the messages: {error}") from error

    def piece(self, token_id: int) -> bytes:
        """Returns the bytes that a token stands for.

        Raises:
            ValueError: an id outside [0, V).
        """
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(f"token id {token_id} is outside [0, {self.vocab_size})")
        return self._pieces[token_id]


class StreamDecoder:
    """Turns tokens that arrive in pieces into text, never showing half a character.

    The pieces of `push`, and at the end `flush`, joined are `Tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        """Starts an empty text; `skip_special` leaves control tokens out."""
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Sequence[int]) -> str:
        """Returns the text that `ids` complete; bytes of an unfinished character wait."""
        pieces = [self._tokenizer.piece(i) for i in map(int, ids) if i not in self._hidden]
        return self._utf8.decode(b"".join(pieces))

    def flush(self) -> str:
        """Returns what is left, with U+FFFD for an unfinished character, and starts anew."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


def _smollm() -> pre_tokenizers.PreTokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return pre_tokenizers.Sequence([digits, byte_level])


_PRE_TOKENIZERS = {"smollm": _smollm}


def _build_fast_tokenizer(vocabulary: Vocabulary, special_ids: frozenset[int]) -> FastTokenizer:
    """Returns the encoder; control tokens match before the text is split."""
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    merges = [tuple(merge.split(" ")) for merge in vocabulary.merges]
    fast = FastTokenizer(models.BPE(vocab=ids, merges=merges))
    fast.pre_tokenizer = _PRE_TOKENIZERS[vocabulary.pre]()
    fast.add_special_tokens(
        [
            AddedToken(vocabulary.tokens[i], special=True, normalized=False)
            for i in sorted(special_ids)
        ]
    )
    return fast


def _byte_pieces(tokens: Sequence[str], special_ids: frozenset[int]) -> tuple[bytes, ...]:
    """Returns the bytes of each token; control tokens stand for their own spelling."""
    alphabet = {char: byte for byte, char in enumerate(_byte_alphabet())}
    return tuple(
        token.encode() if i in special_ids else bytes(alphabet[char] for char in token)
        for i, token in enumerate(tokens)
    )


def _byte_alphabet() -> str:
    """Returns 256 printable characters, one a byte, in GPT-2's order.

    Bytes that are printable in Latin-1 stand for themselves; the others take the code points from
    256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(256, 512))
    return "".join(chr(byte if byte in printable else next(spare)) for byte in range(256))


@functools.cache
def _compile_template(source: str) -> jinja2.Template:
    """Returns the template under the settings that chat templates are written for."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _raise_exception
    return environment.from_string(source)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
