"""From a local Hugging Face folder to a model in memory: start at `load_model`."""

from common.engine.loader.fingerprint import weights_fingerprint
from common.engine.loader.folder import load_config
from common.engine.loader.load import load_model

__all__ = ["load_config", "load_model", "weights_fingerprint"]
