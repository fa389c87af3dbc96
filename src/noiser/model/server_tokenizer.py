"""The tokenizer of llama.cpp's server, which cuts texts and says which bytes each token has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import openai
from pydantic import BaseModel, ValidationError

from noiser.errors import ModelError, PromptError
from noiser.text.tokens import byte_level_alphabet


class _Piece(BaseModel):
    id: int
    piece: str | list[int]  # bytes where they are not whole characters

    def as_bytes(self) -> bytes:
        return self.piece.encode() if isinstance(self.piece, str) else bytes(self.piece)


class _Pieces(BaseModel):
    tokens: list[_Piece]


class _Ids(BaseModel):
    tokens: list[int]


class _Text(BaseModel):
    content: str


class _Properties(BaseModel):
    chat_template: str | None = None
    bos_token: str = ""
    eos_token: str = ""


class ServerTokenizer:
    """A tokenizer that asks llama.cpp's server, with as much of transformers' interface as is used.

    Attributes:
        chat_template: the template of the model, as the server has it; None without one.
        added_tokens_decoder: the special tokens that were met so far, by their ids.
    """

    is_fast = True  # it says where tokens stand in a text

    def __init__(self, root: str, sender: openai.OpenAI, size: int) -> None:
        self.backend_tokenizer = SimpleNamespace(truncation=None, padding=None)
        self.added_tokens_decoder: dict[int, Any] = {}
        self._root = root
        self._sender = sender
        self._size = size
        self._bytes: dict[int, bytes] = {}
        self._is_special: dict[int, bool] = {}
        properties = _Properties.model_validate(
            sender.get(f"{root}/props", cast_to=object, options={})
        )
        self.chat_template = properties.chat_template or None
        self.bos_token = properties.bos_token
        self.eos_token = properties.eos_token
        self.bos_token_id = self._special(properties.bos_token)
        self.eos_token_id = self._special(properties.eos_token)
        self.unk_token_id = self.sep_token_id = self.pad_token_id = self.cls_token_id = None

    def __len__(self) -> int:
        return self._size

    def __call__(self, text: str, *, add_special_tokens: bool = True, **_: Any) -> dict[str, Any]:
        """Ids, (start, end) of each in the text, and whether the tokenizer added it to the text."""
        pieces = self._pieces(text, add_special=add_special_tokens)
        ids = [piece.id for piece in pieces]
        added = 0
        if add_special_tokens:
            plain = [piece.id for piece in self._pieces(text)]
            added = len(ids) - len(plain) if ids[len(ids) - len(plain) :] == plain else 0
        self._meet_special(text, ids[added:])
        return {
            "input_ids": ids,
            "offset_mapping": [(0, 0)] * added + _offsets(text, pieces[added:]),
            "special_tokens_mask": [1] * added + [0] * (len(ids) - added),
        }

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text."""
        return [piece.id for piece in self._pieces(text, add_special=add_special_tokens)]

    def decode(
        self, ids: Sequence[int] | int, *, skip_special_tokens: bool = False, **_: Any
    ) -> str:
        """The text of tokens; bytes that complete no character read U+FFFD."""
        kept = [
            i
            for i in ([ids] if isinstance(ids, int) else ids)
            if not (skip_special_tokens and self._is_special.get(i))
        ]
        return b"".join(map(self._bytes_of, kept)).decode(errors="replace")

    def convert_ids_to_tokens(self, ids: Sequence[int] | int) -> Any:
        """The text of each token; a part of a character is named as byte-level vocabularies do."""
        if isinstance(ids, int):
            return self.convert_ids_to_tokens([ids])[0]
        letters = {byte: letter for letter, byte in byte_level_alphabet().items()}
        names: list[str] = []
        for each in map(self._bytes_of, ids):
            try:
                names.append(each.decode())
            except UnicodeDecodeError:
                names.append("".join(letters[byte] for byte in each))
        return names

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, tokenize: bool = True, **options: Any
    ) -> Any:
        """A chat as the model's template writes it, or its ids."""
        from transformers.utils.chat_template_utils import render_jinja_template

        options.pop("return_dict", None)
        options |= {"bos_token": self.bos_token, "eos_token": self.eos_token}
        template = options.pop("chat_template", None) or self.chat_template
        chats: Any = [messages]
        (text,), _ = render_jinja_template(chats, chat_template=template, **options)
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def _ask(self, path: str, **body: Any) -> object:
        return self._sender.post(f"{self._root}/{path}", cast_to=object, body=body)

    def _pieces(self, text: str, *, add_special: bool = False) -> list[_Piece]:
        answer = self._ask("tokenize", content=text, add_special=add_special, with_pieces=True)
        pieces = _Pieces.model_validate(answer).tokens
        for piece in pieces:
            self._bytes[piece.id] = piece.as_bytes()
        return pieces

    def _bytes_of(self, token: int) -> bytes:
        if token not in self._bytes:  # bytes of half a character come back as U+FFFD
            answer = self._ask("detokenize", tokens=[token])
            self._bytes[token] = _Text.model_validate(answer).content.encode()
        return self._bytes[token]

    def _special(self, name: str) -> int | None:
        """The id of a special token by its name, which is noted as special."""
        ids = self.encode(name, add_special_tokens=False) if name else []
        if len(ids) != 1:
            return None
        self._note_special(ids[0], name)
        return ids[0]

    def _note_special(self, token: int, name: str) -> None:
        self._is_special[token] = True
        self.added_tokens_decoder[token] = SimpleNamespace(content=name, special=True)

    def _meet_special(self, text: str, ids: Sequence[int]) -> None:
        """Notes the special tokens of a text: read as plain text, their names have other tokens."""
        if self._plain_ids(text) == [*ids]:
            return
        for token in {*ids} - self._is_special.keys():
            name = self._bytes_of(token).decode(errors="replace")
            self._is_special[token] = token not in self._plain_ids(name)
            if self._is_special[token]:
                self._note_special(token, name)

    def _plain_ids(self, text: str) -> list[int]:
        return _Ids.model_validate(self._ask("tokenize", content=text, parse_special=False)).tokens


def _offsets(text: str, pieces: Sequence[_Piece]) -> list[tuple[int, int]]:
    """(start, end) of each piece in a text; pieces of one character share it.

    A space that the tokenizer puts before the text belongs to no character.
    """
    whole = text.encode()
    joined = b"".join(piece.as_bytes() for piece in pieces)
    lead = 1 if joined == b" " + whole else 0
    if joined[lead:] != whole:
        raise PromptError(
            "The server's tokenizer changes the text, so nothing says where its tokens stand. "
            "Name the model whose tokenizer it is: tokenizer=."
        )
    character = [0]  # the character in which each byte stands, and one more at the end
    for place, each in enumerate(text):
        character += [place] * (len(each.encode()) - 1) + [place + 1]
    last = [0, *(place + 1 for place, each in enumerate(text) for _ in each.encode())]
    offsets: list[tuple[int, int]] = []
    end = -lead
    for piece in pieces:
        start = end
        end = end + len(piece.as_bytes())
        offsets.append((character[max(start, 0)], last[max(end, 0)]))
    return offsets


def server_tokenizer(
    address: str, sender: openai.OpenAI, card: Mapping[str, Any]
) -> ServerTokenizer | None:
    """The tokenizer of a server of llama.cpp's; None for one that does not cut texts that way."""
    size = (card.get("meta") or {}).get("n_vocab")
    if not isinstance(size, int):
        return None
    try:
        tokenizer = ServerTokenizer(address.removesuffix("/v1"), sender, size)
        tokenizer("a")
    except (openai.APIStatusError, ValidationError):
        return None
    except openai.OpenAIError as error:
        raise ModelError(f"The server at {address} gave no answer: {error}.") from error
    return tokenizer
