"""Which (layer, token) pairs of a receive have landed: each must, and none twice."""

import numpy as np


class Coverage:
    """A bitmap of num_layers x num_tokens. One cheap operation per message."""

    def __init__(self, num_layers: int, num_tokens: int) -> None:
        self._landed = np.zeros((num_layers, num_tokens), dtype=np.bool_)
        self._missing_by_layer = np.full(num_layers, num_tokens, dtype=np.int64)
        self.missing = num_layers * num_tokens

    def overlaps(self, first_layer: int, num_layers: int, first_token: int, num_tokens: int) -> bool:
        region = self._landed[first_layer : first_layer + num_layers, first_token : first_token + num_tokens]
        return bool(region.any())

    def add(self, first_layer: int, num_layers: int, first_token: int, num_tokens: int) -> None:
        """Mark a rectangle that lies inside and of which nothing has landed."""
        assert not self.overlaps(first_layer, num_layers, first_token, num_tokens), "landed twice"
        self._landed[first_layer : first_layer + num_layers, first_token : first_token + num_tokens] = True
        self._missing_by_layer[first_layer : first_layer + num_layers] -= num_tokens
        self.missing -= num_layers * num_tokens

    @property
    def complete(self) -> bool:
        return self.missing == 0

    @property
    def missing_layers(self) -> int:
        """Layers of which some token has not landed."""
        return int(np.count_nonzero(self._missing_by_layer))
