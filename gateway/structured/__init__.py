"""Structured output: from what clients write to a grammar that workers can hold their output to."""
