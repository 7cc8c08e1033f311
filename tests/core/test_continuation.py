import pytest

from pdproxy.core.continuation import is_recomputed


@pytest.mark.case("C40")
@pytest.mark.parametrize("finish_reason", ["stop", "length", "tool_calls", None, "error"])
def test_stop_reason_alone_decides(finish_reason):
    choice = {"index": 0, "finish_reason": finish_reason, "stop_reason": "recomputed"}

    assert is_recomputed(choice)


@pytest.mark.case("C40")
@pytest.mark.parametrize(
    "choice",
    [
        pytest.param({}, id="no-stop-reason"),
        pytest.param({"stop_reason": None}, id="null"),
        pytest.param({"stop_reason": 154829}, id="token-id"),
        pytest.param({"stop_reason": "recompute"}, id="other-word"),
        pytest.param({"stop_reason": ["recomputed"]}, id="a-list"),
        pytest.param({"stop_reason": {"stop_reason": "recomputed"}}, id="an-object"),
        pytest.param({"text": "recomputed"}, id="in-text"),
        pytest.param({"finish_reason": "recomputed"}, id="as-finish-reason"),
        pytest.param({"delta": {"stop_reason": "recomputed"}}, id="inside-delta"),
        pytest.param({"message": {"content": '"stop_reason":"recomputed"'}}, id="quoted"),
    ],
)
def test_nothing_else_is_a_sign(choice):
    assert not is_recomputed(choice)


@pytest.mark.case("C40")
def test_the_clients_own_stop_string_is_an_ordinary_stop():
    choice = {"stop_reason": "recomputed", "finish_reason": "stop"}

    assert not is_recomputed(choice, frozenset({"recomputed"}))
    assert is_recomputed(choice, frozenset({"other"}))
