"""Documents to token ids: the job's templates, the model's chat template, and the length rule.

The ids of a prompt are  frame before + user turn + frame after.  The frame (chat template, system instruction)
is encoded once, so it is the same to the byte for every document and the prefix cache keeps it.
The length is checked on these final ids: prompt + max_tokens <= max_model_len.
"""

import logging
import unicodedata
from collections.abc import Sequence

from jinja2 import TemplateError, meta, nodes
from jinja2.exceptions import SecurityError

from batchgen.data import DOCUMENT_TRUNCATED, Document, Prepared
from batchgen.errors import ConfigError
from batchgen.job.config import OWN_NAMES, Job
from batchgen.job.jobfile import Origin
from batchgen.models.tokenizer import Tokenizer
from batchgen.prompting.long_prompts import LongPrompts
from batchgen.prompting.shorten import MAX_CHARS_PER_TOKEN, Shortener, beginning
from batchgen.prompting.turns import STAND_IN, NoTextError, Turn, environment, reason
from batchgen.text import nearest, visible_chars

log = logging.getLogger("batchgen")
_LOADS: tuple[type[nodes.Stmt], ...] = (nodes.Extends, nodes.FromImport, nodes.Import, nodes.Include)
_NFKC_GROWTH = 11  # of the bytes of a text at most, by Unicode's most compatible normal form


def check_templates(job: Job, origin: Origin) -> None:
    """Raise ConfigError where a template is broken, uses an unknown name, or does not hold the document once."""
    at = ("prompt", "user")
    names = _check_turn(job.prompt.user, origin, at)
    for index, item in enumerate(job.input):
        known = [*OWN_NAMES, *item.keep.values()]
        for name in names:
            if name not in known:
                raise ConfigError(
                    f"{origin.place(at)}: prompt.user uses {{{{ {name} }}}}, which input.{index} ({item.path}) does "
                    f"not keep{nearest(name, known)}; add it there: keep: [{name}]"
                )
    _check_values(job.prompt.user, names, origin, at)
    _check_system(job, origin)
    _check_long(job, origin)


def _check_turn(template: str, origin: Origin, at: tuple[str, str]) -> list[str]:
    """The names it reads, where it holds the text once."""
    names, key = _names(template, origin, at), ".".join(at)
    if names.count("text") != 1 or not _is_plain(template):
        raise ConfigError(
            f"{origin.place(at)}: {key} must hold {{{{ text }}}} exactly once, without filters or conditions"
        )
    if names.count("boundary") != _printed_plainly(template, "boundary"):
        raise ConfigError(f"{origin.place(at)}: {key} must print {{{{ boundary }}}} as it is, without filters")
    return names


def _check_values(template: str, names: Sequence[str], origin: Origin, at: tuple[str, str]) -> None:
    key = ".".join(at)
    try:
        environment().from_string(template).render(dict.fromkeys(names, ""))
    except (SecurityError, OverflowError, NoTextError) as e:  # the sandbox refuses long ranges by an OverflowError
        raise ConfigError(f"{origin.place(at)}: {key}: {e}") from e
    except Exception:  # real values may fit where empty ones do not
        log.debug("%s fails with empty values", key, exc_info=True)


def _check_long(job: Job, origin: Origin) -> None:
    for name in ("piece", "reduce", "refine"):
        at, template = ("long_documents", name), getattr(job.long_documents, name)
        names = _check_turn(template, origin, at)
        if name == "refine" and not names.count("summary") == _printed_plainly(template, "summary") == 1:
            raise ConfigError(
                f"{origin.place(at)}: long_documents.refine must hold {{{{ summary }}}} exactly once, without filters"
            )
        known = [*OWN_NAMES, *job.prompt.variables, *(["summary"] if name == "refine" else [])]
        for unknown in (one for one in names if one not in known):
            raise ConfigError(
                f"{origin.place(at)}: long_documents.{name} uses {{{{ {unknown} }}}}, which prompt.user does not use"
                f"{nearest(unknown, known)}"
            )
        _check_values(template, names, origin, at)


def _check_system(job: Job, origin: Origin) -> None:
    at = ("prompt", "system")
    if job.prompt.system is None:
        return
    if names := _names(job.prompt.system, origin, at):
        raise ConfigError(
            f"{origin.place(at)}: prompt.system is the same for every document and cannot use {{{{ {names[0]} }}}}"
        )
    try:
        environment().from_string(job.prompt.system).render()
    except Exception as e:  # templates compute: anything may come out
        raise ConfigError(f"{origin.place(at)}: prompt.system: {reason(e)}") from e


def _names(template: str, origin: Origin, at: tuple[str, str]) -> list[str]:
    """Names a template wants to be given, in order, each as often as it is read."""
    try:
        environment().from_string(template)  # finds unknown filters too
        tree = environment().parse(template)
    except TemplateError as e:
        raise ConfigError(f"{origin.place(at)}: {'.'.join(at)}: {e}") from e
    if any(tree.find(kind) for kind in _LOADS):
        raise ConfigError(f"{origin.place(at)}: {'.'.join(at)}: a prompt is one template and loads no others")
    wanted = meta.find_undeclared_variables(tree)
    return [n.name for n in tree.find_all(nodes.Name) if n.ctx == "load" and n.name in wanted]


def _is_plain(template: str) -> bool:
    """Whether `{{ text }}` is printed as it is: a direct child of an output at the top of the template."""
    tree = environment().parse(template)
    return any(
        isinstance(part, nodes.Name) and part.name == "text"
        for output in tree.body
        if isinstance(output, nodes.Output)
        for part in output.nodes
    )


def _printed_plainly(template: str, name: str) -> int:
    """How often `{{ name }}` is printed as it is, blocks included."""
    outputs = environment().parse(template).find_all(nodes.Output)
    return sum(isinstance(part, nodes.Name) and part.name == name for output in outputs for part in output.nodes)


def _most_tokens(text: str) -> int:
    """A token is a byte at least, of the text as the tokenizer normalizes it."""
    if text.isascii():
        return len(text) + 1
    grows = 1 if unicodedata.is_normalized("NFKC", text) else _NFKC_GROWTH
    return grows * len(text.encode(errors="surrogatepass")) + 1


class PromptBuilder:
    """Makes `Prepared` of documents; one tokenizer call per batch.

    max_prompt_tokens: the longest prompt that leaves room for max_tokens of answer.
    """

    def __init__(self, job: Job, tokenizer: Tokenizer, *, max_prompt_tokens: int) -> None:
        self._turn = Turn(job.prompt.user)
        self._long = job.long_documents
        self._min_chars = [item.min_chars for item in job.input]
        self._packable = 0 if job.packing.mode == "off" else job.packing.max_document_tokens
        self._tokenizer = tokenizer
        self._max = max_prompt_tokens
        system = None if job.prompt.system is None else environment().from_string(job.prompt.system).render()
        frame = tokenizer.frame(system, STAND_IN)
        self._before, self._after = frame.before, frame.after
        self._lead, self._tail = frame.lead, frame.tail
        self._last_around: tuple[tuple[str, str], list[list[int]]] | None = None
        self.long = LongPrompts(job, tokenizer, frame, max_prompt_tokens=max_prompt_tokens)
        if self._room < 1:
            raise ConfigError(
                f"the prompt without any document takes {self._fixed} of {self._max} tokens: "
                "shorten prompt.system, lower sampling.max_tokens or raise engine.args.max_model_len"
            )

    @property
    def _fixed(self) -> int:
        return len(self._before) + len(self._after)

    @property
    def _room(self) -> int:
        return self._max - self._fixed

    def prepare(self, documents: Sequence[tuple[Document, int]]) -> list[Prepared]:
        """One `Prepared` for each (document, place of its input in the job), in order."""
        done: dict[int, Prepared] = {}
        texts: dict[int, str] = {}
        around: dict[int, tuple[str, str]] = {}
        for n, (document, item) in enumerate(documents):
            if document.error is not None:
                done[n] = Prepared(document, [], error=document.error)
            elif (skip := self._skip(document, item)) is not None:
                done[n] = Prepared(document, [], skip=skip)
            else:
                try:
                    around[n] = self._around(document)
                except Exception as e:  # noqa: BLE001  the template meets values of any type
                    done[n] = Prepared(document, [], error=("template_failed", f"prompt.user: {reason(e)}"))
                    continue
                if len(document.text) > self._room * MAX_CHARS_PER_TOKEN:
                    done[n] = self._too_long(document, around[n])
                else:
                    texts[n] = document.text.join(around[n])
        for n, ids in zip(texts, self._tokenizer.encode_batch(list(texts.values())), strict=True):
            document = documents[n][0]
            if len(ids) <= self._room:
                turn = self._user_turn(texts[n]) if len(ids) <= self._packable else None
                done[n] = Prepared(document, self._before + ids + self._after, turn=turn)
            else:
                done[n] = self._too_long(document, around[n], ids)
        return [done[n] for n in range(len(documents))]

    def _user_turn(self, text: str) -> str:
        """The user turn alone, of what is encoded together with it."""
        return text[len(self._lead) : len(text) - len(self._tail)]

    def frame(self, turn: str) -> list[int]:
        """The ids of a prompt with this user turn, behind the same instruction as those of documents."""
        return self._before + self._tokenizer.encode_batch([self._lead + turn + self._tail])[0] + self._after

    def bound(self, document: Document) -> int:
        """Tokens that its prompt cannot exceed, without encoding it."""
        if document.error is not None:
            return 0
        try:
            before, after = self._around(document)
        except Exception:  # noqa: BLE001  it gets no prompt
            return 0
        return self._fixed + sum(_most_tokens(text) for text in (before, document.text, after))

    def _skip(self, document: Document, item: int) -> tuple[str, str] | None:
        # The common document is long: look at its beginning only.
        least = self._min_chars[item]
        seen = visible_chars(document.text[: 4 * least])
        if seen < least:
            seen = visible_chars(document.text)
        if seen == 0:
            return "empty", "the document has no visible character"
        if seen < least:
            return "short", f"the document has {seen} visible characters, min_chars is {least}"
        return None

    def _around(self, document: Document) -> tuple[str, str]:
        """The text before and after the document that is encoded together with it."""
        before, after = self._turn.around(document)
        return self._lead + before, after + self._tail

    def _too_long(self, document: Document, around: tuple[str, str], ids: Sequence[int] = ()) -> Prepared:
        """What the policy makes of a document that seems not to fit; `ids` of its user turn, where they are known."""
        lead, tail = self._ids_around(around)
        if len(lead) + len(tail) >= self._room:
            sentence = f"the fields around the document take {len(lead) + len(tail)} tokens, {self._room} fit"
            return Prepared(document, [], error=("prompt_too_long", sentence))
        tokens = self._fixed + len(ids) if ids else None
        if self._long.policy == "truncate":
            return self._cut(document, around, ids)
        # A beginning can have a token or two more than it has in the whole: twice the room is beyond doubt.
        if tokens is None and beginning(document.text, around[0], self._encode, more_than=2 * self._room)[1]:
            ids = self._encode(document.text.join(around))
            if len(ids) <= self._room:
                return Prepared(document, self._before + ids + self._after)
            tokens = self._fixed + len(ids)
        if self._long.in_pieces:
            return self.long.cut(document)
        known = f"more than {self._max}" if tokens is None else tokens
        why = ("document_too_long", f"the prompt has {known} tokens, {self._max} fit beside sampling.max_tokens")
        if self._long.policy == "fail":
            return Prepared(document, [], error=why)
        return Prepared(document, [], skip=why)

    def _ids_around(self, around: tuple[str, str]) -> list[list[int]]:
        """Ids of the text before and after a document; most documents have the same as the one before."""
        if self._last_around is None or self._last_around[0] != around:
            self._last_around = around, self._tokenizer.encode_batch(around)
        return self._last_around[1]

    def _cut(self, document: Document, around: tuple[str, str], whole: Sequence[int]) -> Prepared:
        """The prompt with as much of the document as fits."""
        lead, tail = self._ids_around(around)
        shortener = Shortener(document.text, around, lead, tail, self._encode, whole)
        ids, cut = shortener.shortened(room=self._room, keep=self._long.keep)
        flags = (DOCUMENT_TRUNCATED,) if cut else ()
        return Prepared(document, [*self._before, *ids, *self._after], flags=flags)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode_batch([text])[0]
