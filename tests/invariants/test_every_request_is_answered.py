"""Whatever goes wrong, each request gets the right answer or a true error, and nothing is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import chaos


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_chaos_leaves_right_answers_and_true_errors_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "result.json"
    code = chaos.main(["--requests", "400", "--seed", "7", "--output", str(output)])
    seen = json.loads(output.read_text())

    assert code == 0, capsys.readouterr().out
    assert seen["verdicts"]["right"] > seen["requests"] / 2
    assert seen["acts"]["killed"] > 0
