"""A process that does nothing but compile grammars, so that what never ends can be ended.

python -m pdserve.text.grammar_process MODEL_DIR VOCAB_SIZE CPU_LIMIT_S EOS_TOKEN_ID...

Says "ready" once; then for each line of JSON on stdin, ``{"kind", "text"}``, a line of JSON on
stdout: null, or what is wrong with that grammar. Ends with its stdin. A grammar that takes more
than the limit of CPU time, or more memory than there is for it, ends the process with a signal.
"""

import json
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from pdserve.core.errors import InvalidRequestError, ModelFilesError
from pdserve.core.request import Grammar, GrammarKind
from pdserve.text.grammar import GrammarCompiler, first_allowed
from pdserve.text.tokenizer import Tokenizer

READY = "ready"
TOO_LONG = signal.SIGVTALRM
MAX_BYTES = 4 << 30  # of address space


def main(arguments: Sequence[str]) -> None:
    model_dir, vocab_size, cpu_limit_s, *eos_token_ids = arguments
    compiler: GrammarCompiler | ModelFilesError
    try:
        compiler = GrammarCompiler(
            Tokenizer(Path(model_dir)),
            vocab_size=int(vocab_size),
            eos_token_ids=[int(token_id) for token_id in eos_token_ids],
        )
    except ModelFilesError as error:
        compiler = error  # the answer to whoever asks
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    signal.signal(TOO_LONG, signal.SIG_DFL)
    _say(READY)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_VIRTUAL, float(cpu_limit_s))
        problem = _problem(compiler, line)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        _say(json.dumps(problem))


def _problem(compiler: GrammarCompiler | ModelFilesError, line: str) -> str | None:
    if isinstance(compiler, ModelFilesError):
        return str(compiler)
    asked = json.loads(line)
    grammar = Grammar(kind=GrammarKind(asked["kind"]), text=asked["text"], field="")
    try:
        matcher = compiler.compile(grammar)
        matcher.advance([first_allowed(matcher.mask())])
    except InvalidRequestError as error:
        return str(error).removeprefix(": ")
    return None


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
