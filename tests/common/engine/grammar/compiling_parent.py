"""A worker's compiler for a test to kill: `python -m tests.common.engine.grammar.compiling_parent FOLDER`.

Prints the compile process' pid once it has three jobs that go on for minutes.
"""

import sys
from pathlib import Path

from common.engine.grammar.compiler import GrammarCompiler
from common.engine.grammar.vocabulary import vocabulary_of_folder
from tests.common.engine.grammar.compilers import NEVER_STOPPED, endless, literal
from tests.common.engine.grammar.tiny import END_IDS, no_bugs


def main() -> None:
    vocabulary = vocabulary_of_folder(Path(sys.argv[1]), 400, END_IDS)
    compiler = GrammarCompiler(vocabulary, on_fatal=no_bugs, limits=NEVER_STOPPED)
    compiler.start()
    compiler.compile(literal("a")).result()
    jobs = [compiler.compile(endless()) for _ in range(3)]
    print(compiler.pid, flush=True)
    jobs[0].result()


if __name__ == "__main__":
    main()
