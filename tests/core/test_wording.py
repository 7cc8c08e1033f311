import pytest

from pdproxy.core.wording import counted


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 requests"), (1, "1 request"), (2, "2 requests")]
)
def test_a_noun_is_in_the_plural_unless_there_is_one(number: int, text: str) -> None:
    assert counted(number, "request") == text
