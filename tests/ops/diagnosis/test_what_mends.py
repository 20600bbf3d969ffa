"""What findings name works: commands that would be refused are not named."""

import pytest
from pydantic import SecretStr

from grabstream.ops.diagnosis import database_checks, seal_keys
from grabstream.ops.diagnosis.seal_keys import SealKeyReadings
from grabstream.projections.tables.seal_keys import SealKey, Uses
from grabstream.settings import Settings


@pytest.mark.parametrize(
    ("uses", "command"),
    [
        (Uses(0, 1, 0), "nothing to do now"), (Uses(1, 0, 1), "grabstream reseal"),
        (Uses(0, 0, 1), "grabstream reseal && grabstream reseal --retire old"),
        (None, "grabstream reseal --retire old"),
    ],
)  # fmt: skip
def test_old_seal_key_is_retired_only_when_no_offer_needs_it(
    settings: Settings, uses: Uses | None, command: str
) -> None:
    known = [SealKey(name, "f", None) for name in ("old", "new")]
    of_new = settings.model_copy(update={"seal_keys": SecretStr(f"new:{'A' * 43}=")})
    readings = SealKeyReadings(known, {} if uses is None else {"old": uses})
    [finding] = seal_keys.old(readings, of_new)
    assert finding.command.partition("   #")[0] == command


def test_read_model_with_a_wrong_row_is_rebuilt_and_accepted() -> None:
    """A rebuild without --accept is refused where rows differ, and these do."""
    for kind in ("ledger", "accounts", "balances", "heads"):
        assert "--accept` then repairs them" in database_checks._DIFFERENCES[kind]
