from collections.abc import Callable
from pathlib import Path

import pytest

from pdproxy.runtime import setting_types as types

MIB = 1 << 20


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("65536", 65536),
        (1, 1),
        ("64KiB", 65536),
        ("64 kib", 65536),
        ("64k", 65536),
        ("100MB", 100_000_000),
        ("64MiB", 64 * MIB),
        ("1.5GiB", 1536 * MIB),
        ("1GB", 1_000_000_000),
        ("7B", 7),
    ],
)
def test_a_size_is_read_in_any_unit(text: object, size: int) -> None:
    assert types.read_size(text) == size


@pytest.mark.case("C86")
@pytest.mark.parametrize(
    "value",
    [0, 70000, -1, "8e3", "", "0x50", "1_0", "٣", "80.0", 80.0, True, None, [1], "9" * 5000],
)
def test_what_is_no_port_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"^is not a port \(1 to 65535\)$"):
        types.read_port(value)


@pytest.mark.parametrize(
    ("read", "value"),
    [
        *(
            pytest.param(types.read_size, value, id=f"size {value!r}")
            for value in (0, -1, "", "MB", "1TB", "1 000", "1.5", "0.1B", "ib", 1.5, True, None)
        ),
        *(
            pytest.param(types.read_duration, value, id=f"duration {value!r}")
            for value in (-1, "nan", "inf", "", "5s", True, None, 10**400)
        ),
        *(
            pytest.param(types.read_positive_duration, value, id=f"positive {value!r}")
            for value in (0, "0", -1, "nan")
        ),
        *(
            pytest.param(types.read_attempts, value, id=f"attempts {value!r}")
            for value in ("x", "", 1.0, "1.5", None)
        ),
        *(pytest.param(types.read_count, value, id=f"count {value!r}") for value in (0, "-3", "x")),
        *(
            pytest.param(types.read_switch, value, id=f"switch {value!r}")
            for value in ("", "maybe", 1, None)
        ),
        *(
            pytest.param(types.read_host, value, id=f"host {value!r}")
            for value in ("", "a b", "http://a", "a:80", "a/b", "1.2.3", ":::", 5)
        ),
        *(
            pytest.param(types.read_engine_host, value, id=f"engine host {value!r}")
            for value in ("", "a:80", "ftp://a", "https://a:1", "a/b", None)
        ),
        *(
            pytest.param(types.read_secret, value, id=f"secret {value!r}")
            for value in ("", "  ", "a b", "a\nb", "é", 5, None)
        ),
        pytest.param(types.read_log_level, "warn", id="level"),
        pytest.param(types.read_log_format, "xml", id="format"),
        pytest.param(types.read_policy, "fastest", id="policy"),
        pytest.param(types.read_policy, 5, id="policy of another type"),
        pytest.param(types.read_file, "", id="no path"),
        pytest.param(types.read_file, "/nowhere/at/all", id="no file"),
        pytest.param(types.read_file, "/", id="folder"),
        pytest.param(types.read_file, "x" * 5000, id="path that is too long"),
        pytest.param(types.read_file, 5, id="path of another type"),
    ],
)
def test_what_cannot_be_is_refused_with_the_rest_of_a_sentence(
    read: Callable[[object], object], value: object
) -> None:
    with pytest.raises(ValueError, match=r"^(is|holds|does|cannot) "):
        read(value)


@pytest.mark.parametrize(
    ("typed", "host"),
    [
        ("::1", "::1"),
        ("[::1]", "::1"),
        ("fe80::1%eth0", "fe80::1%eth0"),
        (" 0.0.0.0 ", "0.0.0.0"),
        ("proxy.lab", "proxy.lab"),
    ],
)
@pytest.mark.case("C55")
def test_a_host_to_listen_on_has_no_brackets(typed: str, host: str) -> None:
    assert types.read_host(typed) == host


@pytest.mark.parametrize(("text", "value"), [("YES", True), ("0", False), (True, True)])
def test_a_switch_is_read_in_words(text: object, value: bool) -> None:
    assert types.read_switch(text) is value


@pytest.mark.parametrize("text", ["debug", "DEBUG", "Debug"])
def test_a_log_level_is_read_in_any_case(text: str) -> None:
    assert types.read_log_level(text) == "DEBUG"


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        pytest.param(b"# nothing\n\n", "holds no key", id="empty"),
        pytest.param(b"a b\n", "holds a space", id="two words"),
        pytest.param(b"\xff\xfe", "as UTF-8", id="not text"),
    ],
)
def test_a_bad_file_of_keys_is_refused(content: bytes, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content)

    with pytest.raises(ValueError, match=fault):
        types.read_keyed_file(path)
