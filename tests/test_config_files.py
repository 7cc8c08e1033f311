import tomllib
from pathlib import Path

import pytest

from pdproxy.runtime.options import Origin, from_source
from pdproxy.runtime.settings import OPTIONS, Settings
from pdproxy.runtime.sources import load_settings
from tests.config_pages import FULL_TOML, PAGE, ROOT, full_toml, page_with, settings_tables

FILES = sorted((ROOT / "config").glob("*.toml"))
REWRITE = "run: python -m tests.config_pages"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_shipped_file_is_valid(path: Path) -> None:
    settings = load_settings(["--config", str(path)], {})

    assert settings.config == path


def test_the_full_file_holds_every_key_or_shows_it_as_a_comment() -> None:
    text = FULL_TOML.read_text("utf-8")

    given = tomllib.loads(text)

    for option in from_source(OPTIONS, Origin.FILE):
        has_comment = f"\n# {option.name} = " in text
        assert (option.name in given) != has_comment, option.name
        assert has_comment == (option.default is None), option.name


def test_the_full_file_equals_the_defaults() -> None:
    given = tomllib.loads(FULL_TOML.read_text("utf-8"))

    assert Settings.model_validate(given).model_dump() == Settings().model_dump()


def test_the_examples_in_comments_of_the_full_file_are_toml() -> None:
    text = FULL_TOML.read_text("utf-8")
    names = [option.name for option in OPTIONS if option.default is None]

    lines = [line for line in text.splitlines() if line.startswith("# ") and " = " in line]
    given = tomllib.loads("\n".join(line.removeprefix("# ") for line in lines))

    assert set(given) <= set(names)
    assert Settings(seed=given["seed"]).seed == 7


def test_the_full_file_is_what_the_settings_say() -> None:
    assert FULL_TOML.read_text("utf-8") == full_toml(), REWRITE


def test_the_documented_flags_are_what_the_settings_say() -> None:
    assert PAGE.read_text("utf-8") == page_with(settings_tables()), REWRITE


def test_the_page_names_every_setting_and_alias() -> None:
    text = PAGE.read_text("utf-8")

    for option in OPTIONS:
        spellings = option.flags if Origin.FLAG in option.sources else option.variables
        assert all(spelling in text for spelling in spellings), option.name


def test_the_minimal_file_has_one_instance_per_role() -> None:
    settings = load_settings(["--config", str(ROOT / "config" / "minimal.toml")], {})

    assert len(settings.prefill_endpoints) == 1
    assert len(settings.decode_endpoints) == 1


def test_the_kimi_file_has_four_ranks_on_each_of_two_nodes_per_role() -> None:
    settings = load_settings(["--config", str(ROOT / "config" / "kimi-k2-2p1d.toml")], {})

    for endpoints in (settings.prefill_endpoints, settings.decode_endpoints):
        assert len({endpoint.host for endpoint in endpoints}) == 2
        assert sorted({endpoint.port for endpoint in endpoints}) == [7100, 7101, 7102, 7103]
        assert len(endpoints) == 8
    assert settings.warnings == (
        (
            "listening on 0.0.0.0 without --admin-token: administrative calls, such as "
            "/instances/*, are taken from this machine only, where a reverse proxy makes everybody "
            "count as such"
        ),
    )


def test_no_shipped_file_names_a_real_address() -> None:
    for path in FILES:
        settings = load_settings(["--config", str(path)], {})
        for endpoint in (*settings.prefill_endpoints, *settings.decode_endpoints):
            assert endpoint.host.startswith("192.0.2."), path
