"""Five lines of an engine's metrics page, and nothing from any other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.core.engine_metrics import kv_weight, read_report
from pdproxy.core.record import EngineReport

PAGE = b"""# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_cpu_blocks="None",\
num_gpu_blocks="4000",num_gpu_blocks_override="None"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m"} 9.0
"""


def test_page_of_vllm_is_read():
    report = EngineReport(capacity_tokens=64_000, kv_usage=0.25, running=3, waiting=1)

    assert read_report(PAGE) == report


def test_engines_behind_one_server_add_up():
    page = PAGE + PAGE.replace(b'engine="0"', b'engine="1"').replace(b" 0.25", b" 0.75")

    report = EngineReport(capacity_tokens=128_000, kv_usage=0.5, running=6, waiting=2)
    assert read_report(page) == report


def test_older_name_of_the_use_is_read():
    assert read_report(b"vllm:gpu_cache_usage_perc 0.5\n") == EngineReport(kv_usage=0.5)


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"# nothing\n",
        b"<html>\n",
        b'vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0\n',
        b"vllm:kv_cache_usage_perc NaN\nvllm:num_requests_running x\n",
        b"vllm:num_requests_running 1e300\nvllm:num_requests_waiting 1e19\n",
        b'vllm:cache_config_info{block_size="999999",num_gpu_blocks="999999999999"} 1.0\n',
        b"other:kv_cache_usage_perc 1\n",
    ],
)
def test_page_without_them_says_nothing(page):
    assert read_report(page) is None


@given(st.binary(max_size=300))
def test_no_page_is_too_odd(noise):
    read_report(noise + PAGE + noise)
    read_report(PAGE.replace(b"16", noise))


@pytest.mark.parametrize(
    ("capacity", "usage", "held", "before", "expected"),
    [
        pytest.param(1000, 0.5, 500, 1.0, 1.0, id="as-counted"),
        pytest.param(1000, 0.5, 1000, 1.0, 0.75, id="half-is-shared"),
        pytest.param(1000, 0.5, 1000, 0.5, 0.5, id="as-before"),
        pytest.param(1000, 0.9, 300, 1.0, 1.0, id="others-use-it-too"),
        pytest.param(1000, 0.0, 1000, 0.05, 0.05, id="least"),
        pytest.param(1000, 0.0, 249, 0.7, 0.7, id="holds-little"),
        pytest.param(None, 0.5, 1000, 0.7, 0.7, id="capacity-unknown"),
        pytest.param(1000, None, 1000, 0.7, 0.7, id="use-unknown"),
    ],
)
def test_weight_of_a_counted_token_follows_what_the_engine_uses(
    capacity, usage, held, before, expected
):
    report = EngineReport(capacity_tokens=capacity, kv_usage=usage)

    assert kv_weight(report, held, before) == pytest.approx(expected)
