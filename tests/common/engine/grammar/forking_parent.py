"""A worker that forks its compile process, for a test to watch: `python -m tests....forking_parent FOLDER`.

Says on stdout, a line each, what a test wants to know.
"""

import os
import signal
import sys
from pathlib import Path

from common.engine.grammar.compiler import GrammarCompiler
from common.engine.grammar.start import fork_process
from common.engine.grammar.vocabulary import vocabulary_of_folder
from tests.common.engine.grammar.compilers import literal
from tests.common.engine.grammar.processes import children_of
from tests.common.engine.grammar.tiny import END_IDS, no_bugs


def say(what: str, value: object) -> None:
    print(f"{what}: {value}", flush=True)


def main() -> None:
    first, unused = fork_process(), fork_process()
    assert first is not None
    # It takes no grammars, and so has no use for its process.
    GrammarCompiler(None, on_fatal=no_bugs, first_process=unused).close()
    vocabulary = vocabulary_of_folder(Path(sys.argv[1]), 400, END_IDS)
    compiler = GrammarCompiler(vocabulary, on_fatal=no_bugs, first_process=first)
    compiler.start()
    compiler.compile(literal("a")).result()
    say("compiled by the forked one", compiler.pid == first.pid)
    say("the other one is gone", children_of(os.getpid()) == [first.pid])
    say("forked", first.pid)
    if sys.argv[2:] == ["stay"]:
        signal.pause()
    os.kill(first.pid, signal.SIGKILL)
    compiler.compile(literal("b")).result()
    say("compiled by another one", compiler.pid not in (None, first.pid))
    compiler.close()
    say("none is left", children_of(os.getpid()) == [])


if __name__ == "__main__":
    main()
