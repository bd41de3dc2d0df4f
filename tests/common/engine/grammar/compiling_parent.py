"""A worker's compiler for a test to kill: `python -m tests.common.engine.grammar.compiling_parent FOLDER`.

Prints the compile process' pid once it has a job that goes on for minutes.
"""

import sys
from pathlib import Path

from common.engine.grammar.compiler import GrammarCompiler
from common.engine.grammar.limits import CompileLimits
from common.engine.grammar.vocabulary import vocabulary_of_folder
from common.sampling import GrammarKind, GrammarSpec
from tests.common.engine.grammar.hostile import many_rules
from tests.common.engine.grammar.tiny import END_IDS, no_bugs


def main() -> None:
    vocabulary = vocabulary_of_folder(Path(sys.argv[1]), 400, END_IDS)
    limits = CompileLimits(cpu_seconds=600, wall_seconds=600)
    compiler = GrammarCompiler(vocabulary, on_fatal=no_bugs, limits=limits)
    compiler.start()
    compiler.compile(GrammarSpec(GrammarKind.REGEX, "a")).result()
    job = compiler.compile(GrammarSpec(GrammarKind.EBNF, many_rules(30_000)))
    print(compiler.pid, flush=True)
    job.result()


if __name__ == "__main__":
    main()
