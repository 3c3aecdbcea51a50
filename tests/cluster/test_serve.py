"""What `pdserve serve` refuses before anything starts."""

import pytest

from pdserve import cli


@pytest.mark.parametrize("grace", ["-1", "nan", "inf", "soon"])
def test_a_grace_that_is_no_time_is_refused(grace: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["serve", "--grace-s", grace])
    assert left.value.code == cli.EXIT_WRONG_INPUT
    assert f"--grace-s: got '{grace}', allowed are seconds, 0 and more" in capsys.readouterr().err
