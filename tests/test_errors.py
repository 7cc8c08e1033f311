import inspect
import re

import pytest

from pdproxy import errors
from pdproxy.errors import ConfigError, EngineAnswered, PDProxyError, UpstreamTimeout

CLASSES = [
    found
    for _, found in inspect.getmembers(errors, inspect.isclass)
    if issubclass(found, PDProxyError)
]


def make(kind: type[PDProxyError]) -> PDProxyError:
    if issubclass(kind, EngineAnswered):
        return kind(503, [], b"")
    if issubclass(kind, ConfigError):
        return kind(["a", "b"])
    if issubclass(kind, UpstreamTimeout):
        return kind("text", phase="head", detail="127.0.0.1:8100")
    return kind("text", detail="127.0.0.1:8100")


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_has_an_openai_shape_without_its_detail(kind):
    error = make(kind)

    body = error.to_openai()["error"]

    assert isinstance(body, dict)
    assert body.keys() == {"message", "type", "param", "code"}
    assert body["message"] == str(error)
    assert "8100" not in str(body)
    assert 400 <= error.status <= 599
    for text in (error.type, error.code):
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", text), text


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_no_error_shows_the_engines_marker(kind):
    assert "recomputed" not in str(make(kind).to_openai())


def test_faults_of_a_configuration_are_lines():
    assert ConfigError(["a", "b"]).message == "a\nb"
    assert ConfigError(["a", "b"]).faults == ("a", "b")
