"""The score modifications, as users import them; the code is in variant/scores.py."""

from .variant.scores import ALiBi, Bias, PackedBias, ScoreMod, SoftCap, for_packed

__all__ = ["ScoreMod", "SoftCap", "ALiBi", "Bias", "PackedBias", "for_packed"]
