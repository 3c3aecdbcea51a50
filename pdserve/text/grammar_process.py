"""A process that does nothing but compile grammars, so that what never ends can be ended.

python -m pdserve.text.grammar_process MODEL_DIR VOCAB_SIZE CPU_LIMIT_S EOS_TOKEN_ID...

Says "ready" once; then for each line of JSON on stdin, ``{"kind", "text"}``, a line of JSON on
stdout: null, or what is wrong with that grammar. Ends with its stdin. A grammar that takes more
than it may of something ends the process:

    CPU time      SIGVTALRM
    memory        OUT_OF_MEMORY, or SIGABRT where it is the library that gets none
    stack         SIGSEGV; the library recurses. It has much less than on a node, which has to live
"""

import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from pdserve.core.errors import InvalidRequestError, ModelFilesError
from pdserve.core.request import Grammar, GrammarKind
from pdserve.text.grammar import GrammarCompiler, first_allowed
from pdserve.text.tokenizer import Tokenizer

READY = "ready"
TOO_LONG = signal.SIGVTALRM
OUT_OF_MEMORY = 77  # exit status
MAX_BYTES = 4 << 30  # of address space
STACK_BYTES = 1 << 20  # threads of nodes have 8 MiB, or 2 MiB where stacks have no limit


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
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # what ends it is no fault to look into
    signal.signal(TOO_LONG, signal.SIG_DFL)
    threading.stack_size(STACK_BYTES)
    answering = threading.Thread(target=_answer, args=(compiler, float(cpu_limit_s)), daemon=True)
    answering.start()
    answering.join()


def _answer(compiler: GrammarCompiler | ModelFilesError, cpu_limit_s: float) -> None:
    _say(READY)
    try:
        for line in sys.stdin:
            signal.setitimer(signal.ITIMER_VIRTUAL, cpu_limit_s)
            problem = _problem(compiler, line)
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            _say(json.dumps(problem))
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


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
