"""Tools for tests: the tolerance rule, the oracle, dropout's mask, and the conformance cases.

>>> arguments = (q, k, v, Causal(), (), None, None)
>>> got = attention(q, k, v, causal=True, return_lse=True)
>>> assert_forward_accurate("mine", got, oracle_attention(*arguments), eager_attention(*arguments))
"""

from .build import build, output_gradients
from .call_arguments import Arguments, ConformanceCase
from .cases import conformance_cases, distinct_calls
from .decode_arguments import DecodeArguments, DecodeCase
from .decode_build import build_decode
from .decode_cases import decode_cases
from .decode_oracle import expected_decode
from .dropout import dropout_mask
from .emulator import emulate
from .expected import expected_forward, expected_gradients
from .numerics import assert_accurate, assert_forward_accurate, assert_gradients_accurate
from .oracle import eager_attention, eager_gradients, gradients, oracle_attention, oracle_gradients
from .packed_cases import packed_cases
from .poison import poisoned_memory
from .similarity_measures import dissimilarity, similarity

__all__ = [
    "assert_accurate",
    "assert_forward_accurate",
    "assert_gradients_accurate",
    "oracle_attention",
    "eager_attention",
    "eager_gradients",
    "oracle_gradients",
    "gradients",
    "dropout_mask",
    "poisoned_memory",
    "emulate",
    "similarity",
    "dissimilarity",
    "ConformanceCase",
    "Arguments",
    "build",
    "conformance_cases",
    "packed_cases",
    "DecodeCase",
    "DecodeArguments",
    "build_decode",
    "decode_cases",
    "expected_decode",
    "expected_forward",
    "expected_gradients",
    "output_gradients",
    "distinct_calls",
]
