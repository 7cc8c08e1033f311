import pytest

from pdproxy.core.error_events import engine_error, refuse_error
from pdproxy.core.jsonfields import Raw
from pdproxy.errors import EngineAnswered, PDProxyError


@pytest.mark.parametrize(
    ("error", "status"),
    [
        pytest.param(b'{"message": "x", "code": 500}', 500, id="code"),
        pytest.param(b'{"message": "x", "code": 400}', 400, id="clients-fault"),
        pytest.param(b'{"message": "x", "code": "429"}', 502, id="text-code"),
        pytest.param(b'{"message": "x", "code": 200}', 502, id="no-error-code"),
        pytest.param(b'{"message": "x"}', 502, id="no-code"),
        pytest.param(b'"x"', 502, id="text"),
    ],
)
def test_error_event_is_the_answer_it_stands_for(error, status):
    answered = engine_error(error)

    assert isinstance(answered, PDProxyError)
    assert answered.engine_status == status
    assert answered.body == b'{"error":' + error + b"}"


def test_whole_answer_that_is_only_an_error_is_that_error():
    error = Raw(b'{"message": "no", "code": 503}')

    with pytest.raises(EngineAnswered) as found:
        refuse_error({"error": error})

    assert found.value.engine_status == 503


@pytest.mark.parametrize(
    "fields",
    [{}, {"error": Raw(b"null")}, {"choices": Raw(b"[]"), "error": Raw(b'{"message": "odd"}')}],
    ids=["nothing", "null", "beside an answer"],
)
def test_answer_that_is_more_than_an_error_passes(fields):
    refuse_error(fields)
