"""A toy tokenizer: every token id stands for fixed bytes, and text goes to ids and back unchanged.

The rule this file guards: ids that the toy model writes, turned into text and tokenized again, are
the same ids. Then a continuation by text and one by exact ids have the same prefix, and a test can
compare them. It holds because written tokens are whole words with a leading space, or single
characters; and nothing that stands before them can join them.

Some characters are two tokens, the second being the last byte, so a cut can fall inside one.
"""

import codecs
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import product
from string import ascii_lowercase

VOCAB_SIZE = 4096

_SPECIALS = (
    "<unk>",
    "<s>",
    "</s>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<|end|>",
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<|image|>",
    "<|tools|>",
    "<|kwargs|>",
    "<pad>",
)
BOS, EOS = 1, 2
USER, ASSISTANT, TURN_END = 4, 5, 7
CALL_BEGIN, CALL_END = 8, 9
THINK_BEGIN, THINK_END = 10, 11
TOOLS = 13
# Markers that stay in the text of an answer; the other specials never show, as with vLLM.
_VISIBLE_SPECIALS = frozenset({CALL_BEGIN, CALL_END, THINK_BEGIN, THINK_END})
_BYTE_BASE = len(_SPECIALS)
_WORD_BASE = _BYTE_BASE + 256

_COMMON = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or "
    "had an they which one you were all her she there would their we him been has when who will no "
    "more if out so up said what its about than into them can only other time new some could these "
    "two may first then do any like my now over such our man me even most made after also did many "
    "off before must well back through years where much your way down should because long each "
    "just state people those too mister how little good world make very year still see own work "
    "men day get here old life both between being under three never know same last another while "
    "us might great go come since against right came take used himself few house use place during "
    "high without again home around small however found part school general once upon say every "
    "does got united left number course war until always away something fact water though less put "
    "think almost hand enough far took head yet system better set told nothing night end called "
    "eyes find going look asked later knew point next program city business give group toward "
    "young days let room word quick brown fox jumps lazy dog engine token cache block prefix"
)
_WORDS = tuple(dict.fromkeys(_COMMON.split()))
_CHARACTERS = ("é", "ü", "ß", "ñ", "中", "文", "→", "…", "🙂", "🌍")
_SPLIT_CHARACTERS = ("🦜", "🚀", "🧩", "語")


def _vocabulary() -> tuple[bytes, ...]:
    """All tokens in order of their ids: specials, bytes, words, characters, halves, pairs, fill."""
    tokens = [special.encode() for special in _SPECIALS]
    tokens += [bytes([value]) for value in range(256)]
    tokens += [f" {word}".encode() for word in _WORDS]
    tokens += [character.encode() for character in _CHARACTERS]
    tokens += [character.encode()[:-1] for character in _SPLIT_CHARACTERS]
    taken = set(tokens)
    pairs = ("".join(pair).encode() for pair in product(ascii_lowercase, repeat=2))
    spaced = (b" " + bytes([value]) for value in ascii_lowercase.encode())
    plain = (word.encode() for word in _WORDS)
    fill = (f" q{''.join(tail)}".encode() for tail in product(ascii_lowercase, repeat=3))
    for candidates in (pairs, spaced, plain, fill):
        for token in candidates:
            if token not in taken and len(tokens) < VOCAB_SIZE:
                taken.add(token)
                tokens.append(token)
    return tuple(tokens)


TOKEN_BYTES = _vocabulary()
_HALVES_BASE = _WORD_BASE + len(_WORDS) + len(_CHARACTERS)
# The token that must follow: the character's last byte.
TAIL_OF = {
    _HALVES_BASE + i: _BYTE_BASE + character.encode()[-1]
    for i, character in enumerate(_SPLIT_CHARACTERS)
}
_PUNCTUATION = tuple(_BYTE_BASE + value for value in b".,;:?!\n-")
# What the model chooses from; punctuation several times, so that the text looks like one.
WRITABLE = (
    tuple(range(_WORD_BASE, _HALVES_BASE)) + tuple(TAIL_OF) + _PUNCTUATION + _PUNCTUATION[:2] * 5
)

_PIECES = {
    token.decode(): number
    for number, token in enumerate(TOKEN_BYTES)
    if number >= _BYTE_BASE and number not in TAIL_OF and token.isascii()
}
_PIECES |= {c: _WORD_BASE + len(_WORDS) + i for i, c in enumerate(_CHARACTERS)}
_SPECIAL_IDS = {special: number for number, special in enumerate(_SPECIALS)}
_SPLIT = {
    character: (head, tail)
    for character, (head, tail) in zip(_SPLIT_CHARACTERS, TAIL_OF.items(), strict=True)
}
_PATTERN = re.compile(
    "|".join(re.escape(special) for special in _SPECIALS) + r"| ?[A-Za-z]+|.", re.DOTALL
)


@lru_cache(maxsize=20_000)
def _encode_piece(piece: str) -> tuple[int, ...]:
    """The ids of a piece that is no token by itself: pairs of letters, else bytes."""
    if piece in _SPECIAL_IDS:
        return (_SPECIAL_IDS[piece],)
    if piece in _SPLIT:
        return _SPLIT[piece]
    ids: list[int] = []
    start = 0
    while start < len(piece):
        pair = _PIECES.get(piece[start : start + 2])
        if pair is not None:
            ids.append(pair)
            start += 2
            continue
        ids += [_BYTE_BASE + value for value in piece[start].encode("utf-8", "replace")]
        start += 1
    return tuple(ids)


def encode(text: str) -> list[int]:
    """The token ids of a text; special tokens in it become their ids, as with real tokenizers."""
    ids: list[int] = []
    for piece in _PATTERN.findall(text):
        number = _PIECES.get(piece)
        if number is None:
            ids += _encode_piece(piece)
        else:
            ids.append(number)
    return ids


def decode(ids: Iterable[int], *, skip_special: bool = False) -> str:
    """The text of ids; bytes that are no UTF-8 become U+FFFD."""
    return b"".join(token_bytes(i, skip_special=skip_special) for i in ids).decode(
        "utf-8", "replace"
    )


def token_bytes(number: int, *, skip_special: bool) -> bytes:
    """The bytes that one token adds to a text."""
    if skip_special and number < _BYTE_BASE and number not in _VISIBLE_SPECIALS:
        return b""
    return TOKEN_BYTES[number]


def token_text(number: int) -> str:
    """The text of one token alone; half a character is the empty string."""
    return TOKEN_BYTES[number].decode("utf-8", "ignore")


def ends_inside_character(ids: Sequence[int]) -> bool:
    """Whether the text of ids stops in the middle of a UTF-8 sequence."""
    tail = b"".join(TOKEN_BYTES[i] for i in ids[-4:])
    decoder = codecs.getincrementaldecoder("utf-8")("ignore")
    decoder.decode(tail)
    return bool(decoder.getstate()[0])
