import tomllib

import pytest

from pdproxy.runtime.describe import describe
from pdproxy.runtime.help_text import WIDTH, help_text
from pdproxy.runtime.options import Group, Origin, from_source, shown_size
from pdproxy.runtime.settings import OPTIONS, Settings
from pdproxy.runtime.sources import load_settings


def test_the_description_can_be_read_again() -> None:
    settings = Settings(
        prefillers=("A:7100-7101",),
        decoder_hosts=("B",),
        decoder_ports=(1,),
        max_body_bytes=100_000_001,
        retry_delay=12345.678,
        seed=7,
    )

    again = Settings.model_validate(tomllib.loads(describe(settings)))

    assert again == settings


def test_the_description_says_where_each_value_came_from() -> None:
    text = describe(load_settings(["--port", "1"], {"PDPROXY_WORKERS": "2"}))

    lines = text.splitlines()
    assert "port = 1  # flag" in lines
    assert "workers = 2  # env" in lines
    assert 'log_level = "INFO"  # default' in lines


def test_the_description_names_every_setting() -> None:
    text = describe(Settings())

    for option in OPTIONS:
        assert f"{option.name} " in text, option.name


@pytest.mark.case("C90")
def test_the_description_masks_secrets() -> None:
    text = describe(load_settings(["--api-key", "XYZ", "XYZ2"], {"OPENAI_API_KEY": "XYZ"}))

    assert 'api_keys = ["***", "***"]  # flag' in text
    assert 'openai_api_key = "***"  # env' in text
    assert "XYZ" not in text


def test_the_description_lists_instances() -> None:
    lines = describe(Settings(prefillers=("A:1-2", "A:1"))).splitlines()

    assert lines[-2:] == ["# 2 prefill instances: A:1, A:2", "# 0 decode instances"]


@pytest.mark.case("C90")
def test_a_file_made_of_the_description_lacks_the_secrets() -> None:
    text = describe(load_settings(["--admin-token", "XYZ", "--api-key", "XYZ"], {}))

    assert tomllib.loads(text).keys().isdisjoint({"admin_token", "api_keys"})


def test_help_has_every_flag_under_its_heading() -> None:
    _, *blocks = help_text().split("\n\n")
    by_heading = {block.split(":\n")[0].strip(): block for block in blocks}

    for option in from_source(OPTIONS, Origin.FLAG):
        assert f"{option.flag} {option.metavar}".rstrip() in by_heading[option.group], option.name
    assert [heading for heading in by_heading if heading in set(Group)] == list(Group)


def test_help_fits_its_width() -> None:
    assert max(map(len, help_text().splitlines())) <= WIDTH


def test_help_has_one_usage_line_and_two_examples() -> None:
    text = help_text()

    assert text.count("usage:") == 1
    assert text.count("\n  pdproxy --") == 2


@pytest.mark.parametrize(
    "example",
    [line for line in help_text().replace("\\\n", "").splitlines() if "  pdproxy --" in line],
)
def test_the_examples_of_help_are_valid(example: str) -> None:
    assert load_settings(example.split()[1:], {}).decode_endpoints


@pytest.mark.parametrize(
    "wanted",
    ["(default: localhost)", "(default: 5 s)", "(default: 256MiB)", "(default: none)"],
)
def test_help_tells_defaults_with_their_units(wanted: str) -> None:
    assert wanted in help_text()


@pytest.mark.parametrize(
    ("size", "text"), [(1, "1"), (1024, "1KiB"), (1536, "1536"), (3 << 30, "3GiB"), (0, "0")]
)
def test_a_size_is_shown_in_its_largest_whole_unit(size: int, text: str) -> None:
    assert shown_size(size) == text
