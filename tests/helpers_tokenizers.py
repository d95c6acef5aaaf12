"""Small tokenizers of the families that chat models use, made here and saved like a model's."""

import dataclasses
import functools
import json
from dataclasses import dataclass, field
from pathlib import Path

WORDS = (
    "The harbour board met on Tuesday. It agreed to replace 4400 metres of quay wall, to be paid for over three "
    "years. You write summaries. Summarize this text in one sentence: who, what, where? user system assistant model "
    "Z\u00fcrich \u4e16\u754c\u3002 \u041f\u0440\u0438\u0432\u0435\u0442 \u20ac 12 [INST] [/INST] <<SYS>> "
    "Human: Assistant: The board met.\n\n"
)
ROLES = (
    "{% for m in messages %}BEGIN{{ m.role }}MIDDLE{{ m.content }}END{% endfor %}"
    "{% if add_generation_prompt %}LAST{% endif %}"
)


def turns(begin: str, middle: str, end: str, last: str, *, bos: bool = False) -> str:
    """A chat template with every turn between these; BOS first where it is asked for."""
    text = ROLES
    for name, value in (("BEGIN", begin), ("MIDDLE", middle), ("END", end), ("LAST", last)):
        text = text.replace(name, value)
    return ("{{ bos_token }}" if bos else "") + text


LLAMA2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{% set ns = m.content %}{% endif %}{% endfor %}"
    "[INST] {% if messages[0].role == 'system' %}<<SYS>>\n{{ messages[0].content }}\n<</SYS>>\n\n{% endif %}"
    "{{ messages[-1].content }} [/INST]"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"


@dataclass(frozen=True)
class Family:
    """kind: how the model cuts text. special, added: control tokens, and tokens added without that mark."""

    kind: str
    template: str | None
    special: tuple[str, ...]
    added: tuple[str, ...] = ()
    bos: str | None = None
    adds_bos: bool = False
    options: dict = field(default_factory=dict)


CHATML = turns("<|im_start|>", "\n", "<|im_end|>\n", "<|im_start|>assistant\n")
HEADERS = turns(
    "<|start_header_id|>",
    "<|end_header_id|>\n\n",
    "<|eot_id|>",
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    bos=True,
)
FAMILIES = {
    "chatml": Family("bytes", CHATML, ("<|im_start|>", "<|im_end|>", "<|endoftext|>")),
    "qwen": Family(
        "bytes", CHATML, ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
        ("<think>", "</think>", "<tool_call>", "</tool_call>"), options={"digits": True},
    ),
    "llama3": Family(
        "bytes", HEADERS,
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        bos="<|begin_of_text|>", adds_bos=True, options={"digits": True, "whole_words": True},
    ),
    "deepseek": Family(
        "bytes",
        turns("<\uff5c", "\uff5c>", "", "<\uff5cAssistant\uff5c>", bos=True).replace(
            "{{ m.role }}", "{{ {'user': 'User', 'system': 'System'}[m.role] }}"
        ),
        ("<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
        ("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "<\uff5cSystem\uff5c>", "<think>", "</think>"),
        bos="<\uff5cbegin\u2581of\u2581sentence\uff5c>", adds_bos=True,
    ),
    "command-r": Family(
        "bytes",
        turns("<|START|><|", "|>", "<|END_OF_TURN_TOKEN|>", "<|START|><|CHATBOT_TOKEN|>", bos=True)
        .replace("{{ m.role }}", "{{ m.role | upper }}_TOKEN").replace("<|START|>", "<|START_OF_TURN_TOKEN|>"),
        ("<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
        ("<|USER_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|CHATBOT_TOKEN|>"), bos="<BOS_TOKEN>", adds_bos=True,
    ),
    "llama2": Family("prefix", LLAMA2, ("<unk>", "<s>", "</s>"), bos="<s>", adds_bos=True),
    "phi": Family(
        "prefix", turns("<|", "|>\n", "<|end|>\n", "<|assistant|>\n"),
        ("<unk>", "<s>", "</s>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"), bos="<s>",
        options={"rstrip": True},
    ),
    "mistral": Family(
        "metaspace", NO_SYSTEM + "{{ bos_token }}[INST] {{ messages[-1].content }}[/INST]",
        ("<unk>", "<s>", "</s>", "[INST]", "[/INST]"), ("[TOOL_CALLS]",), bos="<s>", adds_bos=True,
    ),
    "plain words": Family(
        "metaspace", "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}Assistant:",
        ("<unk>", "<s>", "</s>"), bos="<s>", adds_bos=True,
    ),
    "gemma": Family(
        "no prefix", NO_SYSTEM + turns("<start_of_turn>", "\n", "<end_of_turn>\n", "<start_of_turn>model\n", bos=True),
        ("<unk>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), ("<unused0>", "\n\n", "\u2581\u2581", "<b>"),
        bos="<bos>", adds_bos=True,
    ),
    "unigram": Family(
        "unigram", turns("<s>", ": ", "</s>", "<s>assistant: "), ("<unk>", "<s>", "</s>"), ("<sep>",), bos="<s>"
    ),
    "wordpiece": Family(
        "wordpiece", turns("[CLS] ", " : ", " [SEP] ", "[CLS]"), ("[UNK]", "[CLS]", "[SEP]"), bos="[CLS]"
    ),
}  # fmt: skip
# These keep every character; the others have no token for some.
LOSSLESS = [name for name in FAMILIES if name not in ("unigram", "wordpiece")]
BYTES = [f"<0x{n:02X}>" for n in range(256)]
# As in cl100k: digits by threes, line ends with the signs before them.
_DIGITS = r"""(?x)  (?i:'s|'t|'re|'ve|'m|'ll|'d) | [^\r\n\p{L}\p{N}]?\p{L}+ | \p{N}{1,3}
    | [ ]?[^\s\p{L}\p{N}]+[\r\n]* | \s*[\r\n]+ | \s+(?!\S) | \s+"""


def save(name: str, folder: Path, **over) -> Path:
    """The family's tokenizer in `folder`, as a model has it; `over` replaces what the family says."""
    from tokenizers import AddedToken, Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    family = dataclasses.replace(FAMILIES[name], **over)
    backend = Tokenizer.from_str(_json(name))
    rstrip = bool(family.options.get("rstrip"))
    backend.add_special_tokens([AddedToken(one, rstrip=rstrip, normalized=False) for one in family.special])
    backend.add_tokens([AddedToken(one, normalized=False) for one in family.added])
    if family.adds_bos:
        single = f"{family.bos} $A"
        backend.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[(family.bos, backend.token_to_id(family.bos))]
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=family.bos)
    fast.chat_template = family.template
    fast.save_pretrained(folder)
    return folder


def _trained(name: str):
    from tokenizers import Tokenizer

    return Tokenizer.from_str(_json(name))


@functools.cache
def _json(name: str) -> str:
    """The tokenizer without added tokens, trained on WORDS."""
    family = FAMILIES[name]
    makers = {"bytes": _bytes, "unigram": _unigram, "wordpiece": _wordpiece}
    state = makers.get(family.kind, _sentencepiece)(family)
    state["added_tokens"] = []
    return json.dumps(state)


def _train(model, trainer, pre_tokenizer, **options):
    from tokenizers import Tokenizer

    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizer
    backend.train_from_iterator([WORDS] * 20, trainer(show_progress=False, **options))
    return backend


def _bytes(family: Family) -> dict:
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not family.options.get("digits"))
    cut = level
    if family.options.get("digits"):
        cut = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_DIGITS), "isolated"), level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend = _train(models.BPE(), trainers.BpeTrainer, cut, vocab_size=600, initial_alphabet=alphabet)
    backend.decoder = decoders.ByteLevel()
    state = json.loads(backend.to_str())
    if family.options.get("whole_words"):
        state["model"]["ignore_merges"] = True
        state["model"]["vocab"] |= {"<|eot_id|>": len(state["model"]["vocab"])}  # a piece, too
    return state


def _sentencepiece(family: Family) -> dict:
    """BPE as converted from SentencePiece: with or without a space before the first word."""
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    backend = _train(
        models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True),
        trainers.BpeTrainer,
        pre_tokenizers.Metaspace(prepend_scheme="never"),
        vocab_size=800,
        special_tokens=[*family.special, *BYTES],
    )
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    space = normalizers.Replace(" ", "\u2581")
    backend.pre_tokenizer = None
    if family.kind == "prefix":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), space])
    elif family.kind == "metaspace":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        backend.normalizer = space
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence(steps if family.kind == "no prefix" else [*steps, decoders.Strip(" ", 1, 0)])
    state = json.loads(backend.to_str())
    _let_merges_make(state["model"], family.special[2])
    return state


def _unigram(family: Family) -> dict:
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = _train(
        models.Unigram(),
        trainers.UnigramTrainer,
        pre_tokenizers.Metaspace(prepend_scheme="always"),
        vocab_size=300,
        special_tokens=[*family.special, *family.added],
        unk_token="<unk>",
    )
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    return json.loads(backend.to_str())


def _wordpiece(family: Family) -> dict:
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = _train(
        models.WordPiece(unk_token="[UNK]"),
        trainers.WordPieceTrainer,
        pre_tokenizers.WhitespaceSplit(),
        vocab_size=400,
        special_tokens=list(family.special),
    )
    backend.decoder = decoders.WordPiece()
    return json.loads(backend.to_str())


def _let_merges_make(model: dict, token: str) -> None:
    """Add merges that build `token` of its characters: models converted from SentencePiece can have such."""
    for end in range(1, len(token) + 1):
        for piece in (token[:end], token[end - 1]):
            model["vocab"].setdefault(piece, len(model["vocab"]))
    model["merges"][:0] = [[token[:end], token[end]] for end in range(1, len(token))]


def model(name: str, folder: Path, *, max_position_embeddings: int = 2048, **over) -> Path:
    """The folder of a model: the family's tokenizer, and the configuration that batchgen reads."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": max_position_embeddings}))
    return save(name, folder, **over)
