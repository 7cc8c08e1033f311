import pytest

from pdproxy.core.error_events import engine_error
from pdproxy.errors import PDProxyError


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
