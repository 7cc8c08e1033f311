"""The proxy against real vLLM engines; off by default, see README.md in this folder."""

import pytest

pytest.register_assert_rewrite("tests.real_engines.exchange", "tests.real_engines.engines")
