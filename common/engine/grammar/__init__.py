"""Grammars that output must match: compiled apart, then followed token by token."""

from common.engine.grammar.grammar import Grammar, GrammarState
from common.engine.grammar.masks import MaskFiller, PendingMasks

__all__ = ["Grammar", "GrammarState", "MaskFiller", "PendingMasks"]
