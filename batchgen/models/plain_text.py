"""A tokenizer for document text, made of the model's own: the same tokens, but no text becomes a control token.

`split_special_tokens` does not do that: it leaves tokens that are added and not marked special (`<think>`,
`<tool_call>`) whole, and models whose vocabulary holds `</s>` as a piece find it there. It also has what a prompt is
not made of at a seam: the space that SentencePiece tokenizers put before each text.
"""

import itertools
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any


def is_control(token: Any) -> bool:
    """Whether an added token steers the model. Runs of white space and words of a wider vocabulary are text."""
    text: str = token.content
    is_text = len(text) == 1 or all(c.isalnum() or c.isspace() or c == "\u2581" for c in text)
    return bool(token.special) or not is_text


def plain_backend(backend: Any) -> Any:
    """A `tokenizers.Tokenizer` for pieces of text. Shares the model with `backend` where that can give no control id.

    Ids are those of `backend`. Nothing is added, not even SentencePiece's space before the first word.
    """
    added: dict[int, Any] = dict(sorted(backend.get_added_tokens_decoder().items()))
    state = json.loads(backend.to_str())
    # What control tokens are called instead: no document holds the name.
    names = {t.content: f"{secrets.token_hex(16)}-{i}" for i, t in added.items() if is_control(t)}
    if not _reaches(state["model"], names):
        names = {}
    plain = _without_added(backend, state, names)
    if not all(is_control(token) for token in added.values()):
        _add(plain, added, names)
    return plain


def _without_added(backend: Any, state: Mapping[str, Any], names: Mapping[str, str]) -> Any:
    from tokenizers import Tokenizer

    parts = {part: _without_prefix(state[part]) for part in ("normalizer", "pre_tokenizer")}
    if names:
        _rename(state["model"], names)
        return Tokenizer.from_str(_json(model=state["model"], **parts))
    plain = Tokenizer(backend.model)
    shell = Tokenizer.from_str(_json(model={"type": "BPE", "vocab": {}, "merges": []}, **parts))
    plain.normalizer = shell.normalizer
    plain.pre_tokenizer = shell.pre_tokenizer
    return plain


def _json(**parts: Any) -> str:
    return json.dumps({"version": "1.0", "added_tokens": []} | parts)


def _reaches(model: Mapping[str, Any], names: Mapping[str, str]) -> bool:
    """Whether the model itself, without added tokens, can make one of `names` out of text."""
    vocab = model["vocab"]
    present = names.keys() & (vocab.keys() if isinstance(vocab, dict) else {piece for piece, _ in vocab})
    if not present or model["type"] != "BPE" or model.get("ignore_merges"):
        return bool(present)
    return any(_merged(model, pair) in present for pair in model["merges"])


def _merged(model: Mapping[str, Any], pair: Sequence[str]) -> str:
    return pair[0] + pair[1][len(model.get("continuing_subword_prefix") or "") :]


def _rename(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Give pieces of the model's vocabulary other names, ids kept; what would merge into them no longer does."""
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(piece, piece): i for piece, i in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if "merges" in model:
        model["merges"] = [
            pair for pair in model["merges"] if not names.keys() & {pair[0], pair[1], _merged(model, pair)}
        ]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]


def _without_prefix(part: Any) -> Any:
    """A normalizer or pre-tokenizer, as JSON, that puts nothing before a text."""
    if isinstance(part, list):
        return [_without_prefix(one) for one in part if not _prepends(one)]
    if not isinstance(part, dict) or _prepends(part):
        return None if _prepends(part) else part
    never = {"prepend_scheme": "never", "add_prefix_space": False}
    return {key: never.get(key, _without_prefix(value)) for key, value in part.items()}


def _prepends(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "Prepend"


def _add(plain: Any, added: Mapping[int, Any], names: Mapping[str, str]) -> None:
    """Add all tokens in the order of their ids, so that each gets its own; control tokens are not found in a text."""
    from tokenizers import AddedToken

    for control, tokens in itertools.groupby(added.values(), is_control):
        if control:
            plain.add_special_tokens([AddedToken(names.get(t.content, t.content), special=True) for t in tokens])
        else:
            plain.add_tokens(list(tokens))
    plain.encode_special_tokens = True


def pieces(text: str, contents: Sequence[str]) -> list[str]:
    """`text` cut inside of each of `contents` that stands in it, for a tokenizer that has no backend to change."""
    cuts = {0, len(text)}
    for content in contents:
        at = text.find(content)
        while at >= 0:
            cuts.update(range(at + 1, at + len(content)))
            at = text.find(content, at + 1)
    return [text[begin:end] for begin, end in itertools.pairwise(sorted(cuts))]
