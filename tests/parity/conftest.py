"""Models and scratch folders are those of the end-to-end tests."""

from tests.e2e.conftest import make_scratch, tiny_model

__all__ = ["make_scratch", "tiny_model"]
