"""The sampler's tests again, with the native CPU kernel instead of its twin.

test_native_ops.py tests that the two agree draw by draw.
"""

from __future__ import annotations

import pytest

from tests.worker.sampling.test_sampler import (  # noqa: F401
    test_alone_and_in_a_crowd,
    test_distribution,
    test_each_token_is_the_inverse_cdf_of_its_number,
    test_greedy_takes_the_first_of_equals,
    test_logprobs_are_of_the_raw_logits,
    test_logprobs_modes,
    test_rows_without_a_token_are_marked_and_alone,
    test_tokens_of_equal_weight_stay_together,
    test_top_k_of_one_and_tiny_top_p_are_greedy,
    test_top_k_of_the_whole_vocabulary_or_more_is_off,
)

pytestmark = pytest.mark.usefixtures("native_kernels")
