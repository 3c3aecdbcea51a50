"""Which tokens may come next where an answer has to follow a grammar.

Wraps the ``llguidance`` library: JSON schemas, regular expressions and Lark grammars are turned
into masks over the model's vocabulary. How JSON is laid out is decided here: in one line, with a
space after each comma and colon, so that no model fills an answer with white space. What a mask
costs is bounded by the library's own limits; what compiling costs is not (``router`` has it done by
a process that can be killed).
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from pdserve.core.errors import InvalidRequestError, ModelFilesError
from pdserve.core.request import Grammar, GrammarKind
from pdserve.text.nesting import TOO_DEEP
from pdserve.text.schema_for_grammar import schema_for_grammar
from pdserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # the library has it in its stubs only
    from llguidance._lib import JsonCompileOptions

# A bit for each token of the vocabulary, the lowest bit of a byte first.
TokenMask = bytes

MAX_LEXER_STATES = 20_000  # of one answer; each takes 1 to 2 KiB
MAX_PROBLEM_CHARS = 300
_TOO_MUCH = "parser error"  # of work beyond the library's limits, as for a grammar without end

JSON_LAYOUT: "JsonCompileOptions" = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,  # keywords that cannot be kept to are refused
}
# What the library says of a grammar that no text matches.
_NOTHING_MATCHES = "NoExtensionBias"


def mask_len(vocab_size: int) -> int:
    """Bytes of a ``TokenMask``."""
    return -(-vocab_size // 8)


def allows(mask: TokenMask, token_id: int) -> bool:
    """Whether a token may come next."""
    return bool(mask[token_id >> 3] >> (token_id & 7) & 1)


def first_allowed(mask: TokenMask) -> int:
    """The lowest token of a mask that has one."""
    return next(token_id for token_id in range(8 * len(mask)) if allows(mask, token_id))


class Matcher:
    """Where one answer stands in its grammar. For one thread at a time."""

    def __init__(self, matcher: LLMatcher, field: str, num_bytes: int) -> None:
        self._matcher = matcher
        self._field = field
        self._num_bytes = num_bytes

    @property
    def is_complete(self) -> bool:
        """True where nothing may follow."""
        return self._matcher.is_stopped()

    def mask(self) -> TokenMask:
        """The tokens that may come next; gives up the GIL.

        Raises InvalidRequestError where that takes more work than a grammar is given.
        """
        bits = self._matcher.compute_bitmask()
        if problem := self._matcher.get_error():
            raise InvalidRequestError(self._field, _plain(problem))
        mask = bits[: self._num_bytes]
        if not mask.strip(b"\0"):
            raise InvalidRequestError(self._field, "no token of the model can follow")
        return mask

    def advance(self, token_ids: Sequence[int]) -> bool:
        """Take tokens in; False, and never of use again, where one may not come here.

        Raises InvalidRequestError where that takes more work than a grammar is given.
        """
        if self._matcher.consume_tokens(list(token_ids)):
            return True
        if (problem := self._matcher.get_error()).startswith(_TOO_MUCH):
            raise InvalidRequestError(self._field, _plain(problem))
        return False

    def copy(self) -> "Matcher":
        """Another one that stands where this one does."""
        return Matcher(self._matcher.deep_copy(), self._field, self._num_bytes)


class GrammarCompiler:
    """Compiles grammars for one model. Making one takes about a second; threads may share it.

    Raises ModelFilesError for a tokenizer that the library cannot take.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._num_bytes = mask_len(vocab_size)
        try:
            self._tokenizer = LLTokenizer(
                tokenizer.to_json(),
                n_vocab=max(vocab_size, tokenizer.vocab_size),
                eos_token=list(eos_token_ids) or None,
            )
        except BaseException as error:
            if not isinstance(error, ValueError) and not _is_panic(error):
                raise
            raise ModelFilesError(
                f"answers of this model cannot follow grammars: its tokenizer: {error}"
            ) from None
        self._limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)

    def compile(self, grammar: Grammar) -> Matcher:
        """The grammar, at its beginning; gives up the GIL. Can take very long.

        Raises InvalidRequestError naming the grammar's field.
        """
        matcher = LLMatcher(
            self._tokenizer, _library_grammar(grammar), log_level=0, limits=self._limits
        )
        if problem := matcher.get_error():
            raise InvalidRequestError(grammar.field, _plain(problem))
        return Matcher(matcher, grammar.field, self._num_bytes)


def _is_panic(error: BaseException) -> bool:
    """Whether the library's Rust gave up; there is no other name for that, and no Exception."""
    return type(error).__name__ == "PanicException"


def _library_grammar(grammar: Grammar) -> str:
    try:
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                schema = schema_for_grammar(grammar.field, json.loads(grammar.text))
                return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=JSON_LAYOUT)
            case GrammarKind.REGEX:
                return LLMatcher.grammar_from_regex(grammar.text)
            case GrammarKind.LARK:
                return LLMatcher.grammar_from_lark(grammar.text)
            case GrammarKind.EBNF:
                return grammar_from("ebnf", grammar.text)
    except ValueError as error:
        raise InvalidRequestError(grammar.field, _plain(str(error))) from None
    except RecursionError:  # brackets in brackets
        raise InvalidRequestError(grammar.field, TOO_DEEP) from None


def _plain(problem: str) -> str:
    """The library's words in one short line."""
    if problem.startswith(_NOTHING_MATCHES):
        return "no text can match it"
    line = " ".join(problem.removesuffix("<non-verbose/>").split())
    return line if len(line) <= MAX_PROBLEM_CHARS else line[:MAX_PROBLEM_CHARS] + "..."
