"""Grammars that output must match: compiled apart, then followed token by token."""

from common.engine.grammar.grammar import Grammar, GrammarState
from common.engine.grammar.masks import LATE, STEP_SECONDS, MaskFiller, PendingMasks

__all__ = ["LATE", "STEP_SECONDS", "Grammar", "GrammarState", "MaskFiller", "PendingMasks"]
